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
    pub(crate) cache_bytes: Gauge,
    pub(crate) cache_sequences: Gauge,
    running: Gauge,
    waiting: Gauge,
    cache_share: Share,
    adapters: Family<Labels, Gauge>,
    /// Adapters of requests that are answered, and of those that wait.
    adapter_names: Mutex<(String, String)>,
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
    /// All at zero. The cache holds `cache_bytes`, of `token_bytes` each token.
    pub(crate) fn new(cache_bytes: u64, token_bytes: u64) -> Metrics {
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
            cache_bytes: Gauge::default(),
            cache_sequences: Gauge::default(),
            running: Gauge::default(),
            waiting: Gauge::default(),
            cache_share: Share::default(),
            adapters: Family::default(),
            adapter_names: Mutex::default(),
        };
        metrics.registered(cache_bytes, token_bytes)
    }

    fn registered(mut self, cache_bytes: u64, token_bytes: u64) -> Metrics {
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
            "cache_bytes",
            "Bytes of all sequences",
            self.cache_bytes.clone(),
        );
        own.register(
            "cache_sequences",
            "Sequences kept for prompts to come",
            self.cache_sequences.clone(),
        );
        own.register(
            "requests_running",
            "Answers in progress",
            self.running.clone(),
        );
        own.register(
            "requests_waiting",
            "Requests that wait",
            self.waiting.clone(),
        );
        own.register(
            "cache_share",
            "Share of the cache that is used, from 0 to 1",
            self.cache_share.clone(),
        );
        // What gateways schedule by, under the names that they look for.
        let registry = &mut self.registry;
        registry.register(
            "vllm:num_requests_running",
            "As sterna_requests_running",
            self.running.clone(),
        );
        registry.register(
            "vllm:num_requests_waiting",
            "As sterna_requests_waiting",
            self.waiting.clone(),
        );
        registry.register(
            "vllm:kv_cache_usage_perc",
            "As sterna_cache_share",
            self.cache_share.clone(),
        );
        registry.register(
            "vllm:lora_requests_info",
            "Adapters of requests; the value is the time",
            self.adapters.clone(),
        );
        let n_blocks = cache_bytes / (token_bytes * BLOCK_LEN).max(1);
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

    /// How many answers are in progress, and how many requests wait.
    pub(crate) fn set_load(&self, n_running: usize, n_waiting: usize) {
        self.running.set(n_running as i64);
        self.waiting.set(n_waiting as i64);
    }

    fn adapter_names(&self) -> MutexGuard<'_, (String, String)> {
        let names = self.adapter_names.lock();
        names.unwrap_or_else(PoisonError::into_inner)
    }

    /// Which adapters requests that are answered have, and those that wait.
    pub(crate) fn set_adapters(&self, running: String, waiting: String) {
        *self.adapter_names() = (running, waiting);
    }

    /// The share of the cache that is used.
    pub(crate) fn set_cache_share(&self, share: f64) {
        self.cache_share.set(share);
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

    /// All of them as text.
    pub(crate) fn text(&self) -> String {
        let (running, waiting) = self.adapter_names().clone();
        let labels = vec![
            ("max_lora", MAX_ADAPTERS.to_string()),
            ("running_lora_adapters", running),
            ("waiting_lora_adapters", waiting),
        ];
        // Those of before are so no more.
        self.adapters.clear();
        let now = SystemTime::now().duration_since(UNIX_EPOCH);
        let now = now.unwrap_or_default().as_secs();
        self.adapters.get_or_create(&labels).set(now as i64);
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
