//! What is measured, in the form that Prometheus reads.

use std::sync::atomic::AtomicU64;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use crate::adapters::MAX_ADAPTERS;

/// Labels of a metric, such as the dialect of a request and the status of its response.
pub(crate) type Labels = Vec<(&'static str, String)>;

type Share = Gauge<f64, AtomicU64>;

/// Where sequences are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Tier {
    /// With an engine, in memory of its device.
    Engine,
    /// In memory of the host.
    Host,
    Disk,
}

impl Tier {
    const ALL: [Tier; 3] = [Tier::Engine, Tier::Host, Tier::Disk];

    fn labels(self) -> Labels {
        let name = match self {
            Tier::Engine => "engine",
            Tier::Host => "host",
            Tier::Disk => "disk",
        };
        vec![("tier", name.to_owned())]
    }
}

/// Why a sequence is dropped below the engines.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DropReason {
    /// It is damaged, or another's.
    Refused,
    /// The disk doesn't keep up.
    Slow,
    /// The system refuses.
    Failed,
}

impl DropReason {
    const ALL: [DropReason; 3] = [DropReason::Refused, DropReason::Slow, DropReason::Failed];

    fn labels(self) -> Labels {
        let name = match self {
            DropReason::Refused => "refused",
            DropReason::Slow => "slow",
            DropReason::Failed => "failed",
        };
        vec![("reason", name.to_owned())]
    }
}

/// Every metric, and the registry that has them.
#[derive(Debug)]
pub(crate) struct Metrics {
    registry: Registry,
    pub(crate) requests: Family<Labels, Counter>,
    limited: Family<Labels, Counter>,
    key_tokens: Family<Labels, Counter>,
    pub(crate) prompt_tokens: Counter,
    pub(crate) cached_tokens: Counter,
    pub(crate) generated_tokens: Counter,
    pub(crate) cancelled: Counter,
    pub(crate) slow: Counter,
    pub(crate) first_token: Histogram,
    pub(crate) next_token: Histogram,
    pub(crate) answer: Histogram,
    lost_engines: Counter,
    reopened_engines: Counter,
    cache_hits: Family<Labels, Counter>,
    cache_hit_tokens: Family<Labels, Counter>,
    cache_drops: Family<Labels, Counter>,
    tier_bytes: Family<Labels, Gauge>,
    tier_sequences: Family<Labels, Gauge>,
    model_loaded: Family<Labels, Gauge>,
    model_loads: Family<Labels, Counter>,
    model_unloads: Family<Labels, Counter>,
    model_swaps: Family<Labels, Counter>,
    of_engines: OfEngines,
    all_running: Gauge,
    waiting: Gauge,
    all_cache_share: Share,
    adapters: Family<Labels, Gauge>,
    /// Bytes that the cache of an engine may have.
    cache_limit: u64,
    now: Mutex<Now>,
}

/// Figures with the label `engine`.
#[derive(Debug, Default)]
struct OfEngines {
    up: Family<Labels, Gauge>,
    running: Family<Labels, Gauge>,
    cache_bytes: Family<Labels, Gauge>,
    cache_sequences: Family<Labels, Gauge>,
    cache_share: Family<Labels, Share>,
}

/// What is so now, of which gauges are made when they are read.
#[derive(Debug, Default)]
struct Now {
    engines: Vec<EngineNow>,
    /// Adapters of requests that wait.
    waiting_adapters: Vec<String>,
}

#[derive(Debug)]
struct EngineNow {
    device: String,
    is_lost: bool,
    figures: EngineFigures,
}

/// What an engine has to do, and what it holds.
#[derive(Debug, Clone, Default)]
pub(crate) struct EngineFigures {
    pub(crate) n_running: usize,
    /// Bytes of all its sequences.
    pub(crate) cache_bytes: u64,
    /// Sequences kept for prompts to come.
    pub(crate) n_sequences: usize,
    /// Names of the adapters of its answers.
    pub(crate) adapters: Vec<String>,
}

/// Bounds of histograms, in seconds: those that vLLM has, which dashboards expect.
const FIRST_TOKEN: [f64; 21] = [
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
];
const NEXT_TOKEN: [f64; 14] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1.0, 5.0, 40.0,
];
const ANSWER: [f64; 14] = [
    0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 60.0, 240.0, 960.0,
];

/// Tokens of a block of the cache, for whoever counts in blocks.
const BLOCK_LEN: u64 = 16;

impl Metrics {
    /// All at zero, of engines on `devices`. The cache of each holds `cache_bytes`.
    pub(crate) fn new(devices: &[String], cache_bytes: u64) -> Metrics {
        let engine = |device: &String| EngineNow {
            device: device.clone(),
            is_lost: false,
            figures: EngineFigures::default(),
        };
        let now = Now {
            engines: devices.iter().map(engine).collect(),
            waiting_adapters: Vec::new(),
        };
        let metrics = Metrics {
            registry: Registry::default(),
            requests: Family::default(),
            limited: Family::default(),
            key_tokens: Family::default(),
            prompt_tokens: Counter::default(),
            cached_tokens: Counter::default(),
            generated_tokens: Counter::default(),
            cancelled: Counter::default(),
            slow: Counter::default(),
            first_token: Histogram::new(FIRST_TOKEN),
            next_token: Histogram::new(NEXT_TOKEN),
            answer: Histogram::new(ANSWER),
            lost_engines: Counter::default(),
            reopened_engines: Counter::default(),
            cache_hits: Family::default(),
            cache_hit_tokens: Family::default(),
            cache_drops: Family::default(),
            tier_bytes: Family::default(),
            tier_sequences: Family::default(),
            model_loaded: Family::default(),
            model_loads: Family::default(),
            model_unloads: Family::default(),
            model_swaps: Family::default(),
            of_engines: OfEngines::default(),
            all_running: Gauge::default(),
            waiting: Gauge::default(),
            all_cache_share: Share::default(),
            adapters: Family::default(),
            cache_limit: cache_bytes,
            now: Mutex::new(now),
        };
        // Counts begin at zero, not when something is counted.
        for tier in Tier::ALL {
            drop(metrics.cache_hits.get_or_create(&tier.labels()));
            drop(metrics.cache_hit_tokens.get_or_create(&tier.labels()));
        }
        for reason in DropReason::ALL {
            drop(metrics.cache_drops.get_or_create(&reason.labels()));
        }
        metrics.registered()
    }

    /// The same with all of them in the registry.
    fn registered(mut self) -> Metrics {
        let own = self.registry.sub_registry_with_prefix("sterna");
        own.register(
            "requests",
            "Requests by dialect and status",
            self.requests.clone(),
        );
        own.register(
            "limited_requests",
            "Requests refused because their key had spent what it may use in a minute",
            self.limited.clone(),
        );
        own.register(
            "key_tokens",
            "Tokens by key and kind",
            self.key_tokens.clone(),
        );
        own.register(
            "prompt_tokens",
            "Tokens of prompts",
            self.prompt_tokens.clone(),
        );
        own.register(
            "cached_tokens",
            "Tokens of prompts that were not computed again",
            self.cached_tokens.clone(),
        );
        own.register(
            "generated_tokens",
            "Tokens of answers",
            self.generated_tokens.clone(),
        );
        own.register(
            "cancelled_answers",
            "Answers whose client went away",
            self.cancelled.clone(),
        );
        own.register(
            "slow_answers",
            "Answers given up because they were read too slowly",
            self.slow.clone(),
        );
        own.register(
            "time_to_first_token_seconds",
            "From an answer's beginning to its first token",
            self.first_token.clone(),
        );
        own.register(
            "time_between_tokens_seconds",
            "Between two tokens of an answer",
            self.next_token.clone(),
        );
        own.register(
            "answer_seconds",
            "From an answer's beginning to its end",
            self.answer.clone(),
        );
        own.register(
            "lost_engines",
            "Engines taken out because their device was lost",
            self.lost_engines.clone(),
        );
        own.register(
            "reopened_engines",
            "Engines whose lost device was opened again",
            self.reopened_engines.clone(),
        );
        own.register(
            "cache_hits",
            "Answers whose prompt was partly held, by what held it",
            self.cache_hits.clone(),
        );
        own.register(
            "cache_hit_tokens",
            "Tokens of those prompts that were held, by what held them",
            self.cache_hit_tokens.clone(),
        );
        own.register(
            "cache_drops",
            "Sequences that were dropped below the engines: the disk was too slow or failed, or they were refused",
            self.cache_drops.clone(),
        );
        own.register(
            "cache_tier_bytes",
            "Bytes of the sequences in memory of the host, and on disk",
            self.tier_bytes.clone(),
        );
        own.register(
            "cache_tier_sequences",
            "How many those are",
            self.tier_sequences.clone(),
        );
        own.register(
            "model_loaded",
            "Whether the model is loaded",
            self.model_loaded.clone(),
        );
        own.register(
            "model_loads",
            "How often the model was loaded while the server ran, and whether it could be",
            self.model_loads.clone(),
        );
        own.register(
            "model_unloads",
            "How often the model was unloaded: by request, for the memory, or as nobody used it",
            self.model_unloads.clone(),
        );
        own.register(
            "model_swaps",
            "How often weights of the model were replaced",
            self.model_swaps.clone(),
        );
        let OfEngines {
            up,
            running,
            cache_bytes,
            cache_sequences,
            cache_share,
        } = &self.of_engines;
        own.register(
            "engine_up",
            "Whether the engine on the device computes",
            up.clone(),
        );
        own.register("cache_bytes", "Bytes of all sequences", cache_bytes.clone());
        own.register(
            "cache_sequences",
            "Sequences kept for prompts to come",
            cache_sequences.clone(),
        );
        own.register("requests_running", "Answers in progress", running.clone());
        own.register(
            "cache_share",
            "Share of the cache that is used, from 0 to 1",
            cache_share.clone(),
        );
        own.register(
            "requests_waiting",
            "Requests that wait",
            self.waiting.clone(),
        );
        self
    }

    /// The same, with what gateways schedule by under the names that they look for. Each token takes `token_bytes`.
    pub(crate) fn with_aliases(mut self, token_bytes: u64) -> Metrics {
        let n_engines = self.now().engines.len() as u64;
        let n_bytes = self.cache_limit.saturating_mul(n_engines);
        let n_blocks = n_bytes / (token_bytes * BLOCK_LEN).max(1);
        let registry = &mut self.registry;
        registry.register(
            "vllm:num_requests_running",
            "As sterna_requests_running, of all engines",
            self.all_running.clone(),
        );
        registry.register(
            "vllm:num_requests_waiting",
            "As sterna_requests_waiting",
            self.waiting.clone(),
        );
        registry.register(
            "vllm:kv_cache_usage_perc",
            "As sterna_cache_share, of all engines",
            self.all_cache_share.clone(),
        );
        registry.register(
            "vllm:lora_requests_info",
            "Adapters of requests; the value is the time",
            self.adapters.clone(),
        );
        registry.register(
            "vllm:cache_config",
            "The cache, counted in blocks",
            Info::new(vec![
                ("block_size", BLOCK_LEN.to_string()),
                ("num_gpu_blocks", n_blocks.to_string()),
            ]),
        );
        self
    }

    fn now(&self) -> MutexGuard<'_, Now> {
        self.now.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many requests wait, and which adapters they have.
    pub(crate) fn set_waiting(&self, n: usize, adapters: Vec<String>) {
        self.waiting.set(n as i64);
        self.now().waiting_adapters = adapters;
    }

    /// What the engine `number` has.
    pub(crate) fn set_engine(&self, number: usize, figures: EngineFigures) {
        self.now().engines[number].figures = figures;
    }

    /// The engine `number` computes no more.
    pub(crate) fn lose_engine(&self, number: usize) {
        self.lost_engines.inc();
        let engine = &mut self.now().engines[number];
        engine.is_lost = true;
        engine.figures = EngineFigures::default();
    }

    /// The engine `number` computes again.
    pub(crate) fn reopen_engine(&self, number: usize) {
        self.reopened_engines.inc();
        self.now().engines[number].is_lost = false;
    }

    /// How many sequences of so many bytes a tier has.
    pub(crate) fn set_tier(&self, tier: Tier, n: usize, n_bytes: u64) {
        let labels = tier.labels();
        self.tier_sequences.get_or_create(&labels).set(n as i64);
        self.tier_bytes.get_or_create(&labels).set(n_bytes as i64);
    }

    /// Counts an answer of whose prompt `tier` held `n_tokens`.
    pub(crate) fn count_cache_hit(&self, tier: Tier, n_tokens: usize) {
        let labels = tier.labels();
        self.cache_hits.get_or_create(&labels).inc();
        let tokens = self.cache_hit_tokens.get_or_create(&labels);
        tokens.inc_by(n_tokens as u64);
    }

    /// Counts a sequence that was dropped, and why.
    pub(crate) fn count_cache_drop(&self, reason: DropReason) {
        self.cache_drops.get_or_create(&reason.labels()).inc();
    }

    /// Whether the model called `name` is loaded.
    pub(crate) fn set_model(&self, name: &str, is_loaded: bool) {
        let loaded = self.model_loaded.get_or_create(&of_model(name));
        loaded.set(i64::from(is_loaded));
        // Counts begin at zero, not when something is counted.
        for result in [true, false] {
            drop(self.model_loads.get_or_create(&of_load(name, result)));
        }
        for reason in ["idle", "memory", "request"] {
            drop(self.model_unloads.get_or_create(&of_unload(name, reason)));
        }
        drop(self.model_swaps.get_or_create(&of_model(name)));
    }

    /// Counts that the model called `name` was loaded, or could not be.
    pub(crate) fn count_load(&self, name: &str, is_loaded: bool) {
        let labels = of_load(name, is_loaded);
        self.model_loads.get_or_create(&labels).inc();
    }

    /// Counts that the model called `name` was unloaded, and why.
    pub(crate) fn count_unload(&self, name: &str, reason: &str) {
        let labels = of_unload(name, reason);
        self.model_unloads.get_or_create(&labels).inc();
    }

    /// Counts that weights of the model called `name` were replaced.
    pub(crate) fn count_swap(&self, name: &str) {
        self.model_swaps.get_or_create(&of_model(name)).inc();
    }

    /// Counts a request.
    pub(crate) fn count(&self, dialect: &str, status: u16) {
        let labels = vec![
            ("dialect", dialect.to_owned()),
            ("status", status.to_string()),
        ];
        self.requests.get_or_create(&labels).inc();
    }

    /// Counts a request of `key` that was refused because of a limit.
    pub(crate) fn count_limited(&self, key: &str, limit: &str) {
        let labels = vec![("key", key.to_owned()), ("limit", limit.to_owned())];
        self.limited.get_or_create(&labels).inc();
    }

    /// Counts `n` tokens of the kind `kind` that `key` used.
    pub(crate) fn count_tokens(&self, key: &str, kind: &str, n: usize) {
        let labels = vec![("key", key.to_owned()), ("kind", kind.to_owned())];
        self.key_tokens.get_or_create(&labels).inc_by(n as u64);
    }

    /// Makes gauges of what is so now.
    fn gauge(&self) {
        let Now {
            engines,
            waiting_adapters,
        } = &*self.now();
        let of = &self.of_engines;
        let share = |bytes: u64, n: usize| {
            let limit = self.cache_limit.saturating_mul(n as u64).max(1);
            (bytes as f64 / limit as f64).min(1.0)
        };
        let (mut n_running, mut n_bytes, mut n_alive) = (0, 0, 0);
        let mut adapters: Vec<&str> = Vec::new();
        for (number, engine) in engines.iter().enumerate() {
            let EngineNow {
                device,
                is_lost,
                figures,
            } = engine;
            let labels = vec![("engine", number.to_string())];
            let running = of.running.get_or_create(&labels);
            running.set(figures.n_running as i64);
            let bytes = of.cache_bytes.get_or_create(&labels);
            bytes.set(figures.cache_bytes as i64);
            let sequences = of.cache_sequences.get_or_create(&labels);
            sequences.set(figures.n_sequences as i64);
            let of_cache = of.cache_share.get_or_create(&labels);
            of_cache.set(share(figures.cache_bytes, 1));
            let labels = [labels, vec![("device", device.clone())]].concat();
            of.up.get_or_create(&labels).set(i64::from(!is_lost));
            n_running += figures.n_running;
            n_bytes += figures.cache_bytes;
            n_alive += usize::from(!is_lost);
            adapters.extend(figures.adapters.iter().map(String::as_str));
        }
        self.all_running.set(n_running as i64);
        self.all_cache_share.set(share(n_bytes, n_alive));
        adapters.sort_unstable();
        adapters.dedup();
        let labels = vec![
            ("max_lora", MAX_ADAPTERS.to_string()),
            ("running_lora_adapters", adapters.join(",")),
            ("waiting_lora_adapters", waiting_adapters.join(",")),
        ];
        // Those of before are so no more.
        self.adapters.clear();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs();
        self.adapters.get_or_create(&labels).set(now as i64);
    }

    /// All of them as text.
    pub(crate) fn text(&self) -> String {
        self.gauge();
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}

/// The label of the model called `name`.
fn of_model(name: &str) -> Labels {
    vec![("model", name.to_owned())]
}

/// The labels of how loading the model called `name` went.
fn of_load(name: &str, is_loaded: bool) -> Labels {
    let result = if is_loaded { "ok" } else { "failed" };
    vec![("model", name.to_owned()), ("result", result.to_owned())]
}

/// The labels of why the model called `name` was unloaded.
fn of_unload(name: &str, reason: &str) -> Labels {
    vec![("model", name.to_owned()), ("reason", reason.to_owned())]
}
