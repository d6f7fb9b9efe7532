//! The API of models that are served, as this program is told to offer it.

use std::fs;
use std::net::ToSocketAddrs;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use axum::http::uri::Authority;
use clap::Args;
use clap::builder::BoolishValueParser;
use serde::Deserialize;
use serde_json::{Map, Value};
use sterna::native::{BUILTIN, Device, LocalModel, gpu_name};
use sterna::receipt::{Receipt, Setup};
use sterna::scheduler::SchedulerOptions;
use sterna::{Adapted, AdapterFiles, ErrorCode, Header};
use sterna_engine::plan::{HeadScreen, PlanOptions};
use sterna_server::{
    BODY_TIMEOUT, CACHE_BYTES, CacheFolder, EngineOptions, FOLDER_BYTES, GRAMMAR_TIMEOUT, Hosts,
    Keys, MAX_BODY, MOST_PARALLEL, Models, PARALLEL, QUEUE, Served, Server, Settings, Sign, Signal,
    SignalLimits, parallel_on,
};

use crate::args::{AdapterFlag, EngineFlags, EngineSettings, ModelFlags};
use crate::device::gpus::Gpus;
use crate::key_file::KeyFile;
use crate::model::Replaceable;
use crate::numbers::{positive, whole};
use crate::{model, output, size};

use super::listener::ConnectionLimits;
#[cfg(feature = "otel")]
use super::otlp::Collector;
use super::tls::Tls;
#[cfg(feature = "otel")]
use sterna_server::Tracer;

/// Connections beside those of requests that run or wait, unless another number is asked for.
const CONNECTIONS: usize = 1024;
/// How long a client may read nothing of its answer, unless another time is asked for.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// What settings are called that may be given alone, or as `=false`, which holds against the environment and the file.
const SWITCH: &str = "BOOL";

/// `arg`, which takes no value from the next word if it is a [`SWITCH`].
fn switched(arg: clap::Arg) -> clap::Arg {
    match arg.get_value_names() {
        Some([name]) if name == SWITCH => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value("true"),
        _ => arg,
    }
}

/// How the API is offered.
#[derive(Debug, Args)]
#[command(next_help_heading = "API", mut_args(switched))]
pub(super) struct ApiFlags {
    /// Serve files only, no API
    #[arg(long, conflicts_with = "no_files")]
    pub(super) no_api: bool,

    /// Serve no files of the model, only the API and the chat that asks it: nothing is converted
    #[arg(long)]
    pub(super) no_files: bool,

    /// Serve no pages
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_NO_PAGES"
    )]
    no_pages: Option<bool>,

    /// Answers of an engine at once; others wait [default: twice its threads, from 8 to 32; 32 where a GPU computes a
    /// model, or would compute one that is not loaded yet]
    #[arg(long, value_name = "N", value_parser = positive, env = "STERNA_SERVE_PARALLEL")]
    parallel: Option<NonZero<usize>>,

    /// Requests that may wait; more are refused with status 429 [default: 64]
    #[arg(long, value_name = "N", value_parser = whole, env = "STERNA_SERVE_QUEUE")]
    queue: Option<usize>,

    /// Memory of an engine for what was computed of conversations, which their next turns continue; the least
    /// recently used is forgotten [default: 2GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::n_bytes, env = "STERNA_SERVE_CACHE_MEMORY")]
    cache_memory: Option<NonZero<u64>>,

    /// Memory of this machine for conversations that GPUs have no room for; they are copied back when they go on. On
    /// the CPU --cache-memory is that already [default: none]
    #[arg(long, value_name = "SIZE", value_parser = size::n_bytes, env = "STERNA_SERVE_CACHE_HOST_MEMORY")]
    cache_host_memory: Option<NonZero<u64>>,

    /// Folder for conversations that there is no memory for, and for all of them when the server ends: they go on
    /// after a restart. Servers may share it. Models that aren't packages are hashed for it
    #[arg(long, value_name = "DIR", env = "STERNA_SERVE_CACHE_FOLDER")]
    cache_folder: Option<PathBuf>,

    /// Size of that folder; what was used least recently is removed [default: 16GiB]
    #[arg(long, value_name = "SIZE", value_parser = size::n_bytes, env = "STERNA_SERVE_CACHE_FOLDER_SIZE")]
    cache_folder_size: Option<NonZero<u64>>,

    /// GPUs to compute on, each with an engine of its own that has all models; requests wait in one queue for them:
    /// all of the best kind, so many of those, or a list of numbers or PCI addresses as `sterna doctor` shows them
    /// (0,2; one alone as in 2,) [default: one device, as --backend and --gpu say]
    #[arg(long, value_name = "all|N|LIST", env = "STERNA_SERVE_GPUS")]
    gpus: Option<Gpus>,

    /// What clients call a model, of several in their order; may be given several times [default: the name of its file
    /// without the extension, of its folder, or in the store]
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        value_parser = model_name,
        env = "STERNA_SERVE_MODEL_NAME"
    )]
    model_name: Vec<String>,

    /// Memory of an engine for models: of those given here, the others are loaded when a request names them, and the
    /// one that was used least recently, and isn't in use, is unloaded for that [default: all are loaded]
    #[arg(long, value_name = "SIZE", value_parser = size::n_bytes, env = "STERNA_SERVE_MODELS_MEMORY")]
    models_memory: Option<NonZero<u64>>,

    /// Seconds after which a model that nobody has used is unloaded, unless it is pinned; a request that names it loads
    /// it again [default: never]
    #[arg(long, value_name = "SECONDS", value_parser = positive, env = "STERNA_SERVE_MODELS_IDLE")]
    models_idle: Option<NonZero<usize>>,

    /// LoRA adapter that requests may ask for, as MODEL:NAME: a PEFT folder, a package, its URL, or its name in the
    /// store; =SCALE sets its strength [SCALE: 1]; may be given several times. Without MODEL, of the first model
    #[arg(
        long,
        value_name = "[MODEL:]NAME=DIR[=SCALE]",
        env = "STERNA_SERVE_ADAPTER"
    )]
    adapter: Vec<AdapterFlag>,

    /// Key that clients have to send; better in the environment, where other users don't see it
    #[arg(
        long,
        value_name = "KEY",
        env = "STERNA_API_KEY",
        hide_env_values = true
    )]
    api_key: Option<String>,

    /// File with a name and the BLAKE3 digest of a key on each line, and what it may use in a minute (rpm=60
    /// requests, tpm=100000 tokens), and admin if it may load adapters and models; --new-api-key makes such lines
    #[arg(long, value_name = "FILE", env = "STERNA_API_KEYS")]
    api_keys: Option<PathBuf>,

    /// Print a new key and its line for --api-keys, and exit
    #[arg(long, value_name = "NAME")]
    pub(super) new_api_key: Option<String>,

    /// Offer the API to everybody on an address that isn't this machine's own, without a key
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_ALLOW_ANYONE"
    )]
    allow_anyone: Option<bool>,

    /// Name by which the API may be asked on an address of this machine alone, without a key, beside localhost and its
    /// loopback addresses; may be given several times. Other names are refused: pages of any site can lead theirs here
    #[arg(
        long,
        value_name = "NAME",
        value_delimiter = ',',
        env = "STERNA_SERVE_ALLOW_HOST"
    )]
    allow_host: Vec<String>,

    /// Origin whose pages may use the API, or * for all; may be given several times
    #[arg(
        long,
        value_name = "ORIGIN",
        value_delimiter = ',',
        env = "STERNA_SERVE_CORS"
    )]
    cors: Vec<String>,

    /// Let tabs that share packages with each other find each other, by WebSockets at /signal/: for who has a key, if there
    /// are keys, and for pages of this server and of --cors
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_SIGNAL"
    )]
    signal: Option<bool>,

    /// Connections at a time; more wait until one ends [default: 1,024, and 2 for each request that may run or wait]
    #[arg(long, value_name = "N", value_parser = positive, env = "STERNA_SERVE_MAX_CONNECTIONS")]
    max_connections: Option<NonZero<usize>>,

    /// Connections at a time from one address, or one network of 64 bits of IPv6; more are closed. Behind a proxy all
    /// clients have its address [default: three quarters of all]
    #[arg(
        long,
        value_name = "N",
        value_parser = positive,
        env = "STERNA_SERVE_MAX_CONNECTIONS_PER_ADDRESS"
    )]
    max_connections_per_address: Option<NonZero<usize>>,

    /// Seconds in which a request has to arrive after its head [default: 60]
    #[arg(long, value_name = "SECONDS", value_parser = positive, env = "STERNA_SERVE_BODY_TIMEOUT")]
    body_timeout: Option<NonZero<usize>>,

    /// Seconds after which a client that reads nothing of its answer is cut off [default: 30]
    #[arg(long, value_name = "SECONDS", value_parser = positive, env = "STERNA_SERVE_WRITE_TIMEOUT")]
    write_timeout: Option<NonZero<usize>>,

    /// Longest request [default: 16MiB]
    #[arg(long, value_name = "SIZE", value_parser = size::n_bytes, env = "STERNA_SERVE_MAX_BODY")]
    max_body: Option<NonZero<u64>>,

    /// PEM file with the certificate of this server, and those between it and one that clients trust; connections
    /// are encrypted then (https)
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "STERNA_SERVE_TLS_CERT")]
    pub(super) tls_cert: Option<PathBuf>,

    /// PEM file with the private key of the certificate
    #[cfg(feature = "tls")]
    #[arg(long, value_name = "FILE", env = "STERNA_SERVE_TLS_KEY")]
    pub(super) tls_key: Option<PathBuf>,

    /// Collector that gets a trace of each request: OTLP over HTTP, as JSON, at /v1/traces of this address
    #[cfg(feature = "otel")]
    #[arg(long, value_name = "URL", env = "OTEL_EXPORTER_OTLP_ENDPOINT")]
    otlp_endpoint: Option<String>,

    /// Refuse requests that say what their answers have to match: schemas, patterns, grammars, required calls, strict tools
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_NO_GRAMMARS"
    )]
    no_grammars: Option<bool>,

    /// Seconds that a schema, a pattern or a grammar may take to prepare; what takes longer is refused [default: 10]
    #[arg(long, value_name = "SECONDS", value_parser = positive, env = "STERNA_SERVE_GRAMMAR_TIMEOUT")]
    grammar_timeout: Option<NonZero<usize>>,

    /// Write receipts of answers for requests that ask for them (`"receipt": true`), which anyone who has the model can
    /// check; models that aren't packages are hashed for it
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_RECEIPTS"
    )]
    receipts: Option<bool>,

    /// Sign receipts with the secret key in FILE (`sterna sign --generate`)
    #[arg(long, value_name = "FILE", env = "STERNA_SERVE_RECEIPT_KEY")]
    receipt_key: Option<PathBuf>,

    /// File whose first line is the password of that key [default: asked for on the terminal]
    #[arg(long, value_name = "FILE", env = "STERNA_SERVE_RECEIPT_PASSWORD_FILE")]
    receipt_password_file: Option<PathBuf>,

    /// Let everybody read /metrics, without a key; it has the names of keys
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_PUBLIC_METRICS"
    )]
    public_metrics: Option<bool>,

    /// Leave out the metrics that have the names which gateways look for (vllm:...), and keep Sterna's own
    #[arg(
        long,
        value_name = SWITCH,
        value_parser = BoolishValueParser::new(),
        env = "STERNA_SERVE_NO_GATEWAY_METRICS"
    )]
    no_gateway_metrics: Option<bool>,

    /// TOML file with these settings; the environment comes before it, and flags before both (--signal=false says that
    /// something isn't so)
    #[arg(long, value_name = "FILE", env = "STERNA_SERVE_CONFIG")]
    pub(super) config: Option<PathBuf>,

    /// Check the settings and the models' headers, and exit
    #[arg(long)]
    pub(super) check: bool,
}

/// A configuration file.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ConfigFile {
    pub(super) models: Vec<String>,
    pub(super) host: Option<String>,
    pub(super) port: Option<u16>,
    ctx: Option<NonZero<usize>>,
    threads: Option<NonZero<usize>>,
    backend: Option<String>,
    gpu_memory: Option<String>,
    lora: Vec<String>,
    parallel: Option<NonZero<usize>>,
    queue: Option<usize>,
    cache_memory: Option<String>,
    cache_host_memory: Option<String>,
    cache_folder: Option<PathBuf>,
    cache_folder_size: Option<String>,
    api_keys: Option<PathBuf>,
    allow_anyone: Option<bool>,
    allow_hosts: Vec<String>,
    cors: Vec<String>,
    signal: Option<bool>,
    max_connections: Option<NonZero<usize>>,
    max_connections_per_address: Option<NonZero<usize>>,
    body_timeout: Option<NonZero<usize>>,
    write_timeout: Option<NonZero<usize>>,
    max_body: Option<String>,
    grammars: Option<bool>,
    grammar_timeout: Option<NonZero<usize>>,
    receipts: Option<bool>,
    receipt_key: Option<PathBuf>,
    receipt_password_file: Option<PathBuf>,
    pages: Option<bool>,
    public_metrics: Option<bool>,
    gateway_metrics: Option<bool>,
    adapters: Vec<String>,
    otlp_endpoint: Option<String>,
    gpus: Option<CountOrText>,
    model_names: Vec<String>,
    models_memory: Option<String>,
    models_idle: Option<NonZero<usize>>,
    pub(super) tls_cert: Option<PathBuf>,
    pub(super) tls_key: Option<PathBuf>,
}

/// A value that may be written as a number.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum CountOrText {
    Count(usize),
    Text(String),
}

impl ConfigFile {
    /// The one at `path`.
    pub(super) fn read(path: &Path) -> Result<ConfigFile> {
        let name = || path.display().to_string();
        let text = fs::read_to_string(path).with_context(name)?;
        toml::from_str(&text).with_context(name)
    }

    /// What it says of the engine.
    pub(super) fn engine(&self) -> EngineSettings {
        EngineSettings {
            ctx: self.ctx,
            threads: self.threads,
            backend: self.backend.clone(),
            gpu_memory: self.gpu_memory.clone(),
            lora: self.lora.clone(),
        }
    }
}

/// Which of the settings stand.
#[derive(Clone)]
pub(super) struct Chosen {
    settings: Settings,
    /// What clients call the first models.
    model_names: Vec<String>,
    /// Adapters that requests may ask for.
    adapters: Vec<AdapterFlag>,
    gpus: Option<Gpus>,
    allow_anyone: bool,
    /// Tabs find each other here.
    signal: bool,
    connections: Connections,
    /// Receipts are written for who asks.
    receipts: bool,
    /// Something about the API was asked for.
    is_asked: bool,
    /// How many answers run at once isn't a default.
    is_parallel_chosen: bool,
}

/// Connections that are asked for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Connections {
    all: Option<NonZero<usize>>,
    per_address: Option<NonZero<usize>>,
    write_timeout: Duration,
}

impl Connections {
    /// Connections of a server that has no more than `n_requests` at once, unless another number is asked for: enough
    /// for all of them from three quarters of one address, as behind a proxy.
    pub(super) fn limits(self, n_requests: usize) -> ConnectionLimits {
        let usual = CONNECTIONS.saturating_add(n_requests.saturating_mul(2));
        let connections = self.all.map_or(usual, NonZero::get);
        let share = connections - connections / 4;
        ConnectionLimits {
            connections,
            per_address: self.per_address.map_or(share, NonZero::get),
            write_timeout: self.write_timeout,
        }
    }
}

/// What is so unless a flag or the environment has that it isn't, or else the file.
fn unless(is_not: Option<bool>, file: Option<bool>) -> bool {
    is_not.map(|is_not| !is_not).or(file).unwrap_or(true)
}

impl ApiFlags {
    /// Whether there are pages.
    pub(super) fn has_pages(&self, file: &ConfigFile) -> bool {
        unless(self.no_pages, file.pages)
    }

    /// The settings of a server at `host`: of the flags, or of `file`, or defaults.
    pub(super) fn choose(&self, host: &str, file: &ConfigFile) -> Result<Chosen> {
        let bytes = |flag: Option<NonZero<u64>>, text: &Option<String>, name| match (flag, text) {
            (Some(bytes), _) => Ok(Some(bytes.get())),
            (None, Some(text)) => match size::n_bytes(text) {
                Ok(bytes) => Ok(Some(bytes.get())),
                Err(error) => bail!("{name}: {error}, found {text:?}"),
            },
            (None, None) => Ok(None),
        };
        let mut keys = Keys::none();
        if let Some(key) = &self.api_key {
            keys.add("default", key).context("--api-key")?;
        }
        if let Some(path) = self.api_keys.as_ref().or(file.api_keys.as_ref()) {
            let list = fs::read_to_string(path).with_context(|| path.display().to_string())?;
            let added = keys.add_list(&list);
            added.with_context(|| path.display().to_string())?;
        }
        let seconds = |flag: Option<NonZero<usize>>, other: Option<NonZero<usize>>| {
            let n = flag.or(other);
            n.map(|n| Duration::from_secs(n.get() as u64))
        };
        let per_address = self.max_connections_per_address;
        let connections = Connections {
            all: self.max_connections.or(file.max_connections),
            per_address: per_address.or(file.max_connections_per_address),
            write_timeout: seconds(self.write_timeout, file.write_timeout).unwrap_or(WRITE_TIMEOUT),
        };
        let body_timeout = seconds(self.body_timeout, file.body_timeout);
        let grammar_timeout = seconds(self.grammar_timeout, file.grammar_timeout);
        let parallel = self.parallel.or(file.parallel);
        let max_body = bytes(self.max_body, &file.max_body, "max-body")?;
        let cache_bytes = bytes(self.cache_memory, &file.cache_memory, "cache-memory")?;
        let (flag, text) = (self.cache_host_memory, &file.cache_host_memory);
        let host_bytes = bytes(flag, text, "cache-host-memory")?;
        let (flag, text) = (self.cache_folder_size, &file.cache_folder_size);
        let folder_bytes = bytes(flag, text, "cache-folder-size")?;
        let cache_folder = match self.cache_folder.as_ref().or(file.cache_folder.as_ref()) {
            None if folder_bytes.is_some() => {
                bail!("cache-folder-size: expected a cache-folder with it, found none")
            }
            None => None,
            Some(path) if path.exists() && !path.is_dir() => bail!(
                "cache-folder: expected a folder, found a file: {}",
                path.display()
            ),
            Some(path) => Some(CacheFolder {
                path: path.clone(),
                max_bytes: folder_bytes.unwrap_or(FOLDER_BYTES),
            }),
        };
        let models_bytes = bytes(self.models_memory, &file.models_memory, "models-memory")?;
        let models_idle = seconds(self.models_idle, file.models_idle);
        let allow_anyone = self.allow_anyone.or(file.allow_anyone).unwrap_or(false);
        let cors = match self.cors.is_empty() {
            true => file.cors.clone(),
            false => self.cors.clone(),
        };
        if let Some(origin) = cors.iter().find(|origin| !is_origin(origin)) {
            bail!("cors: expected an origin such as https://example.org, or *, found {origin:?}");
        }
        let mut hosts = match self.allow_host.is_empty() {
            true => file.allow_hosts.clone(),
            false => self.allow_host.clone(),
        };
        let is_name = |name: &&String| {
            let authority: Result<Authority, _> = name.parse();
            authority.is_ok_and(|own| own.host() == name.as_str() && !name.contains('*'))
        };
        if let Some(name) = hosts.iter().find(|name| !is_name(name)) {
            bail!("allow-host: expected a name such as sterna.example, found {name:?}");
        }
        hosts.push(host.to_owned());
        // Elsewhere there are keys, which pages of others don't have, or anyone is let in.
        let hosts = match is_loopback(host) && keys.is_empty() && !allow_anyone {
            true => Hosts::local(hosts),
            false => Hosts::any(),
        };
        let adapters = match self.adapter.is_empty() {
            true => file.adapters.iter().map(|text| text.parse()).collect(),
            false => Ok(self.adapter.clone()),
        };
        let receipts = self.receipts.or(file.receipts).unwrap_or(false);
        let sign = self.sign(file)?;
        if sign.is_some() && !receipts {
            bail!("receipt-key: expected receipts with it, found none");
        }
        let gpus = match (&self.gpus, &file.gpus) {
            (Some(gpus), _) => Some(Ok(gpus.clone())),
            (None, Some(CountOrText::Count(n))) => Some(n.to_string().parse()),
            (None, Some(CountOrText::Text(text))) => Some(text.parse()),
            (None, None) => None,
        };
        let gpus = gpus.transpose();
        let model_names = match self.model_name.is_empty() {
            true => file
                .model_names
                .iter()
                .map(|name| model_name(name))
                .collect(),
            false => Ok(self.model_name.clone()),
        };
        Ok(Chosen {
            model_names: model_names.map_err(|error: String| anyhow!("model-names: {error}"))?,
            gpus: gpus.map_err(|error: String| anyhow!("gpus: {error}"))?,
            adapters: adapters.map_err(|error: String| anyhow!("adapters: {error}"))?,
            is_asked: self.no_files || allow_anyone || !keys.is_empty(),
            allow_anyone,
            signal: self.signal.or(file.signal).unwrap_or(false),
            connections,
            receipts,
            is_parallel_chosen: parallel.is_some(),
            settings: Settings {
                engine: EngineOptions {
                    parallel: parallel.map_or(PARALLEL, NonZero::get),
                    queue: self.queue.or(file.queue).unwrap_or(QUEUE),
                    cache_bytes: cache_bytes.unwrap_or(CACHE_BYTES),
                    host_bytes: host_bytes.unwrap_or(0),
                    chunk: SchedulerOptions::default().chunk,
                    chunk_beside: SchedulerOptions::default().chunk_beside,
                    models_bytes,
                    models_idle,
                },
                cache_folder,
                devices: Vec::new(),
                keys,
                hosts,
                cors,
                max_body: max_body.map_or(MAX_BODY, |bytes| bytes.try_into().unwrap_or(usize::MAX)),
                body_timeout: body_timeout.unwrap_or(BODY_TIMEOUT),
                grammars: unless(self.no_grammars, file.grammars),
                grammar_timeout: grammar_timeout.unwrap_or(GRAMMAR_TIMEOUT),
                sign,
                public_metrics: self.public_metrics.or(file.public_metrics).unwrap_or(false),
                gateway_metrics: unless(self.no_gateway_metrics, file.gateway_metrics),
                commit: option_env!("STERNA_COMMIT").map(str::to_owned),
                log: Arc::new(log),
                tracer: None,
            },
        })
    }
}

impl ApiFlags {
    /// How connections are encrypted: as the flags say, or `file`, or not at all.
    #[cfg(feature = "tls")]
    pub(super) fn tls(&self, file: &ConfigFile) -> Result<Option<Tls>> {
        let cert = self.tls_cert.as_ref().or(file.tls_cert.as_ref());
        let key = self.tls_key.as_ref().or(file.tls_key.as_ref());
        match (cert, key) {
            (None, None) => Ok(None),
            (Some(cert), Some(key)) => Tls::read(cert, key).map(Some),
            (Some(_), None) => bail!("tls-cert: expected a tls-key with it, found none"),
            (None, Some(_)) => bail!("tls-key: expected a tls-cert with it, found none"),
        }
    }

    /// None.
    #[cfg(not(feature = "tls"))]
    pub(super) fn tls(&self, file: &ConfigFile) -> Result<Option<Tls>> {
        match file.tls_cert.is_some() || file.tls_key.is_some() {
            true => bail!("tls-cert: this program was built without TLS"),
            false => Ok(None),
        }
    }
}

impl ApiFlags {
    /// What signs receipts: as the flags say, or `file`, or nothing.
    fn sign(&self, file: &ConfigFile) -> Result<Option<Sign>> {
        let key = self.receipt_key.as_ref().or(file.receipt_key.as_ref());
        let password = self.receipt_password_file.as_ref();
        let password = password.or(file.receipt_password_file.as_ref());
        let Some(path) = key else {
            if password.is_some() {
                bail!("receipt-password-file: expected a receipt-key with it, found none");
            }
            return Ok(None);
        };
        let password = password.map(PathBuf::as_path);
        let key = KeyFile { path, password }.read()?;
        Ok(Some(Arc::new(move |receipt: &mut Receipt| {
            let signed = receipt.sign(&key);
            signed.map_err(|error| sterna::Error::typed(ErrorCode::Compute, error))
        })))
    }
}

impl ApiFlags {
    /// The collector of traces: as the flag says, or `file`, or none.
    #[cfg(feature = "otel")]
    pub(super) fn collector(&self, file: &ConfigFile) -> Result<Option<Collector>> {
        let endpoint = self.otlp_endpoint.as_ref().or(file.otlp_endpoint.as_ref());
        endpoint
            .map(|endpoint| Collector::new(endpoint))
            .transpose()
    }

    /// Errors: `file` names a collector.
    #[cfg(not(feature = "otel"))]
    pub(super) fn expect_no_collector(&self, file: &ConfigFile) -> Result<()> {
        match file.otlp_endpoint {
            Some(_) => {
                bail!("otlp-endpoint: this program was built without traces (feature `otel`)")
            }
            None => Ok(()),
        }
    }
}

/// Whether a header may say this of where a page comes from.
fn is_origin(text: &str) -> bool {
    let host = text
        .split_once("://")
        .map(|(scheme, host)| (scheme, host.trim_end_matches('/')));
    text == "*"
        || host.is_some_and(|(scheme, host)| {
            let is_plain = |c: char| c.is_ascii_graphic() && !matches!(c, '/' | '?' | '#');
            !scheme.is_empty()
                && !host.is_empty()
                && host.chars().all(is_plain)
                && !text.ends_with('/')
        })
}

/// Writes a record of the log: JSON, a line each.
fn log(record: &Map<String, Value>) {
    if let Ok(line) = serde_json::to_string(record) {
        output::note(line);
    }
}

impl Chosen {
    /// What clients call the model number `index`, which the command line calls `name`.
    pub(super) fn name_of(&self, index: usize, name: &str, stem: &str) -> String {
        let chosen = self.model_names.get(index).cloned();
        chosen.unwrap_or_else(|| called(name, stem))
    }

    /// Errors: two of the models with these names are called the same.
    pub(super) fn expect_apart(names: &[String]) -> Result<()> {
        let mut all = names.iter().enumerate();
        match all.find(|(i, name)| names[..*i].contains(name)) {
            Some((_, name)) => {
                bail!("model-name: expected names of their own, found two models called {name:?}")
            }
            None => Ok(()),
        }
    }

    /// Errors: there are names of more models than `n`.
    pub(super) fn expect_models(&self, n: usize) -> Result<()> {
        match self.model_names.get(n) {
            Some(name) => {
                bail!("model-name: expected names of {n} models at most, found {name:?} besides")
            }
            None => Ok(()),
        }
    }

    /// Whether the API is offered at `host`.
    ///
    /// Errors: it was asked for, and everybody would get it.
    pub(super) fn may_offer(&self, host: &str) -> Result<bool> {
        if self.is_guarded(host) {
            return Ok(true);
        }
        let message = "the API on an address that others can reach: expected --api-key, --api-keys or --allow-anyone";
        if self.is_asked {
            bail!("{host}: {message}");
        }
        output::note(format_args!("files only; {message}"));
        Ok(false)
    }

    /// Whether not everybody gets what is offered at `host`, or that is wanted.
    fn is_guarded(&self, host: &str) -> bool {
        self.allow_anyone || !self.settings.keys.is_empty() || is_loopback(host)
    }

    /// The rooms in which tabs find each other, if they are asked for.
    ///
    /// Errors: everybody would get them at `host`.
    pub(super) fn signal(&self, host: &str) -> Result<Option<Signal>> {
        if !self.signal {
            return Ok(None);
        }
        if !self.is_guarded(host) {
            bail!(
                "{host}: signal on an address that others can reach: expected --api-key, --api-keys or --allow-anyone"
            );
        }
        let Settings {
            keys, hosts, cors, ..
        } = self.settings.clone();
        let limits = SignalLimits::default();
        Ok(Some(Signal::new(keys, hosts, cors, limits)))
    }

    /// How many connections there may be.
    pub(super) fn connections(&self) -> Connections {
        self.connections
    }

    /// Whether what can't be offered is an error.
    pub(super) fn is_asked(&self) -> bool {
        self.is_asked
    }

    /// The same, with traces for `tracer`.
    #[cfg(feature = "otel")]
    pub(super) fn with_tracer(mut self, tracer: Tracer) -> Chosen {
        self.settings.tracer = Some(tracer);
        self
    }

    /// The adapters of the model that clients call `name`; `is_first` of the models.
    pub(super) fn adapters_of(&self, name: &str, is_first: bool) -> Vec<AdapterFlag> {
        let is_own = |flag: &&AdapterFlag| match &flag.model {
            Some(model) => model == name,
            None => is_first,
        };
        self.adapters.iter().filter(is_own).cloned().collect()
    }

    /// Errors: an adapter of a model that isn't among `names`.
    pub(super) fn check_adapters(&self, names: &[String]) -> Result<()> {
        for AdapterFlag { model, name, .. } in &self.adapters {
            if let Some(model) = model.as_ref().filter(|model| !names.contains(model)) {
                let names = names.join(", ");
                bail!("adapter {name}: expected one of the models {names}, found `{model}`");
            }
        }
        Ok(())
    }

    /// The engines that are asked for by `flags` and `--gpus`.
    ///
    /// Errors: a GPU that isn't there; `--gpus` beside another device.
    pub(super) fn engines(&self, flags: &EngineFlags) -> Result<Devices> {
        let (needs_hashes, receipts) = (self.settings.cache_folder.is_some(), self.receipts);
        let screen = self.screen(flags);
        match &self.gpus {
            Some(gpus) => {
                let (engines, names) = flags.on_each(gpus)?.into_iter().unzip();
                Ok(Devices {
                    engines,
                    names,
                    screen,
                    needs_hashes,
                    receipts,
                })
            }
            None => Ok(Devices {
                engines: vec![flags.clone()],
                names: Vec::new(),
                screen,
                needs_hashes,
                receipts,
            }),
        }
    }

    /// The screens of output heads if none is asked for: where memory is bounded, it is for models.
    fn screen(&self, flags: &EngineFlags) -> HeadScreen {
        match self.gpus.is_some() || self.settings.engine.models_bytes.is_some() {
            true => HeadScreen::Off,
            false => flags.screen(),
        }
    }

    /// Errors: there would never be room for the model `name` of `bytes`.
    fn expect_room(&self, name: &str, bytes: u64) -> Result<()> {
        match self.settings.engine.models_bytes {
            Some(limit) if bytes > limit => bail!(
                "models-memory: expected at least the {} of {name}, found {}",
                output::Bytes(bytes),
                output::Bytes(limit)
            ),
            _ => Ok(()),
        }
    }

    /// Which of `models`, in order, are loaded from the beginning: those that there is room for.
    ///
    /// Errors: one that there would never be room for.
    pub(super) fn loaded(&self, models: &[Opened]) -> Result<Vec<bool>> {
        let Some(limit) = self.settings.engine.models_bytes else {
            return Ok(vec![true; models.len()]);
        };
        let mut used = 0;
        let fits = |model: &Opened| {
            let bytes = model.served.n_bytes();
            self.expect_room(model.served.name(), bytes)?;
            let fits = used + bytes <= limit;
            used += if fits { bytes } else { 0 };
            Ok(fits)
        };
        models.iter().map(fits).collect()
    }

    /// A server of `models`, of which those are loaded that there is room for, for `devices`; others are opened as
    /// `flags` say.
    pub(super) fn start(
        self,
        models: Vec<Opened>,
        devices: Arc<Devices>,
        flags: &ModelFlags,
    ) -> Result<Server> {
        let loaded = self.loaded(&models)?;
        let mut settings = self.settings;
        settings.devices.clone_from(&devices.names);
        // A model that isn't loaded yet may come to one.
        let device = devices.engines[0].device();
        let awaited = (models.iter().zip(&loaded)).filter(|(_, is_loaded)| !**is_loaded);
        let largest = awaited.map(|(model, _)| model.served.n_bytes()).max();
        let largest = largest.or(models.is_empty().then_some(u64::MAX));
        let mut on_gpu =
            self.gpus.is_some() || largest.is_some_and(|n_bytes| device.finds_gpu(n_bytes));
        let engines: Vec<usize> = (0..devices.engines.len()).collect();
        let mut all = Vec::new();
        for (model, is_loaded) in models.into_iter().zip(loaded) {
            let Opened { mut served, load } = model;
            if is_loaded {
                let adapted = load(&engines)?;
                let gpu = gpu_name(adapted[0].model().backend());
                on_gpu |= gpu.is_some();
                if gpu.is_none() && std::mem::take(&mut settings.engine.host_bytes) > 0 {
                    output::note(
                        "cache-host-memory: models are on the CPU, where cache-memory is that",
                    );
                }
                if settings.devices.is_empty() {
                    settings
                        .devices
                        .push(gpu.unwrap_or_else(|| "CPU".to_owned()));
                }
                served = served.with_weights(adapted);
            } else {
                let (name, bytes) = (served.name(), output::Bytes(served.n_bytes()));
                output::note(format_args!(
                    "{name}, {bytes}, is loaded when it is asked for"
                ));
            }
            all.push(served);
        }
        if on_gpu {
            let SchedulerOptions {
                chunk,
                chunk_beside,
                ..
            } = SchedulerOptions::gpu();
            settings.engine.chunk = chunk;
            settings.engine.chunk_beside = chunk_beside;
        }
        if !self.is_parallel_chosen {
            settings.engine.parallel = match on_gpu {
                true => MOST_PARALLEL,
                false => parallel_on(devices.engines[0].n_threads()),
            };
        }
        let flags = flags.clone();
        let models = Models::from(all).with_others(move |name| {
            let opened = open(name, called, |_| Vec::new(), &flags, &devices);
            let opened = opened.map_err(|error| format!("{error:#}"))?;
            Ok(opened.served)
        });
        Server::start(models, settings).context("cannot start the engines")
    }
}

/// Where engines compute.
pub(super) struct Devices {
    /// Flags of each.
    engines: Vec<EngineFlags>,
    /// The names of the GPUs that `--gpus` asked for.
    pub(super) names: Vec<String>,
    /// Of their output heads, if none is asked for.
    screen: HeadScreen,
    /// What they compute is kept for later, so that it has to be known which models they are.
    needs_hashes: bool,
    /// Receipts are written of what they compute.
    receipts: bool,
}

/// A model that can be loaded.
pub(super) struct Opened {
    pub(super) served: Served<Device>,
    /// Loads it for the engines with these numbers.
    load: Arc<Load>,
}

type Load = dyn Fn(&[usize]) -> sterna::Result<Vec<Adapted<Device>>> + Send + Sync;

/// Whether only this machine can reach `host`.
fn is_loopback(host: &str) -> bool {
    let addresses = (host, 0).to_socket_addrs();
    addresses.is_ok_and(|mut all| all.all(|address| address.ip().is_loopback()))
}

/// What clients may call a model. A colon is between it and an adapter.
fn model_name(name: &str) -> Result<String, String> {
    match name.trim().is_empty() || name.contains(|c: char| c == ':' || c.is_control()) {
        true => Err(format!("expected a name without a colon, found {name:?}")),
        false => Ok(name.to_owned()),
    }
}

/// What clients call the model that the command line calls `name`.
fn called(name: &str, stem: &str) -> String {
    let is_name = name == BUILTIN || !name.contains(['/', '\\']) && !Path::new(name).exists();
    match is_name {
        true => name.to_owned(),
        false => stem.to_owned(),
    }
}

/// What the model is made of that the command line calls `name`: a path, however it is written, or that.
fn origin(name: &str) -> String {
    let path = fs::canonicalize(name);
    path.map_or_else(|_| name.to_owned(), |path| path.display().to_string())
}

/// Opens the model called `name`, without its weights; what clients call it.
///
/// Errors: also, there is no room for it.
pub(super) fn check(
    (index, name): (usize, &str),
    (flags, engine): (&ModelFlags, &EngineFlags),
    chosen: &Chosen,
) -> Result<String> {
    let files = model::open(name)?;
    let plan = model::plan_with(&files, flags, chosen.screen(engine))?;
    files.require_tokenizer()?;
    let called = chosen.name_of(index, name, files.stem());
    chosen.expect_room(&called, plan.memory_bytes())?;
    Ok(called)
}

/// Opens the model called `name`, to be loaded for `devices`, with the adapters that `adapters` returns for what
/// clients call it: that is what `call` makes of its name and its stem.
pub(super) fn open(
    name: &str,
    call: impl FnOnce(&str, &str) -> String,
    adapters: impl FnOnce(&str) -> Vec<AdapterFlag>,
    flags: &ModelFlags,
    devices: &Arc<Devices>,
) -> Result<Opened> {
    let files = Arc::new(model::open(name)?);
    let plan = model::plan_with(&files, flags, devices.screen)?;
    // What would fail later fails before the weights are read.
    files.require_tokenizer()?;
    let engines = devices.engines.iter();
    let engines: Vec<EngineFlags> = engines
        .map(|engine| engine.clone().for_model(&files))
        .collect();
    let ctx_len = engines[0].ctx_len(plan.config().max_ctx);
    let session = engines[0].session(ctx_len);
    let mut warnings = Vec::new();
    let origin = origin(name);
    let name = call(name, files.stem());
    let adapters = adapters(&name);
    let mut served = Served::new(name, &files, plan.clone(), session, &mut warnings)?;
    warnings.iter().for_each(model::tell);
    for AdapterFlag { name, lora, .. } in adapters {
        let files = Arc::clone(&files);
        served = served.with_adapter(&name, lora.scale, move || {
            open_adapter(&lora.folder, &files).map_err(library_error)
        });
    }
    let stated = match files.header() {
        Header::Package(header) => header.package.manifest().blake3_full,
        _ => None,
    };
    let is_hashed = devices.receipts || devices.needs_hashes && stated.is_none();
    let digest = is_hashed.then(|| model::digest(&files)).transpose()?;
    let hash = stated.or(digest);
    if let Some(digest) = digest.filter(|_| devices.receipts) {
        let (activations, name) = (engines[0].activations(), served.name().to_owned());
        let described = plan.clone();
        served = served.with_receipts(move |adapted| {
            let backend = adapted.model().backend();
            let (device, cache) = (model::computing(backend), session.cache_on(backend));
            let device = device.map_err(library_error)?;
            let setup = Setup::new(
                &name,
                digest,
                &described,
                activations,
                ctx_len,
                cache,
                device,
            );
            setup.with_adapters(adapted)
        });
    }
    let options = PlanOptions {
        i2s_layout: flags.i2s_layout(),
    };
    let weights = Replaceable::new(&files, &plan, options, flags.head(devices.screen));
    let weights = Arc::new(Mutex::new(weights));
    let load: Arc<Load> = {
        let (files, weights) = (Arc::clone(&files), Arc::clone(&weights));
        Arc::new(move |numbers: &[usize]| {
            let mut weights = weights.lock().unwrap_or_else(PoisonError::into_inner);
            weights.load_again();
            drop(weights);
            let engines = numbers.iter().map(|number| engines[*number].clone());
            let engines: Vec<EngineFlags> = engines.collect();
            model::adapted_for_each(&files, &plan, &engines, ctx_len).map_err(library_error)
        })
    };
    let served = served
        .with_hash(hash.map(|hash| hash.to_string()))
        .with_origin(origin)
        .with_revisions(move |models, revision, groups| {
            let mut weights = weights.lock().unwrap_or_else(PoisonError::into_inner);
            let swapped = weights.swap(models, revision, groups);
            swapped.map_err(library_error)
        })
        .with_adapters(move |path| {
            let adapter = open_adapter(Path::new(path), &files);
            adapter.map_err(|error| format!("{error:#}"))
        })
        .with_loader({
            let load = Arc::clone(&load);
            move |numbers| load(numbers)
        });
    Ok(Opened { served, load })
}

/// `error` as one of the library, with the code of its cause.
fn library_error(error: anyhow::Error) -> sterna::Error {
    let mut causes = error.chain();
    let code = causes.find_map(|cause| Some(cause.downcast_ref::<sterna::Error>()?.code()));
    sterna::Error::new(code.unwrap_or(ErrorCode::Compute), format!("{error:#}"))
}

/// The adapter at `path` for the model of `files`.
fn open_adapter(path: &Path, files: &LocalModel) -> Result<AdapterFiles> {
    let adapter = model::open_adapter(path)?;
    let mut warnings = Vec::new();
    adapter.check_base(files, &mut warnings)?;
    warnings.iter().for_each(model::tell);
    Ok(adapter)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins_are_what_browsers_send() {
        for origin in [
            "*",
            "https://example.org",
            "http://localhost:3000",
            "chrome-extension://abc",
        ] {
            assert!(is_origin(origin), "{origin}");
        }
        for origin in [
            "",
            "example.org",
            "https://",
            "https://example.org/",
            "https://a/b",
            "https://a b",
        ] {
            assert!(!is_origin(origin), "{origin}");
        }
    }

    #[test]
    fn one_address_may_send_all_requests_that_are_taken() {
        let asked = |all, per_address| Connections {
            all: NonZero::new(all),
            per_address: NonZero::new(per_address),
            write_timeout: WRITE_TIMEOUT,
        };
        let limits = |asked: Connections, n_requests| {
            let limits = asked.limits(n_requests);
            (limits.connections, limits.per_address)
        };
        assert_eq!(limits(asked(0, 0), 0), (1024, 768));
        for n_requests in [72, 8 * 32 + 64, 100_000] {
            let (all, per_address) = limits(asked(0, 0), n_requests);
            assert!(per_address > n_requests && all > per_address);
        }
        assert_eq!(limits(asked(8, 0), 72), (8, 6));
        assert_eq!(limits(asked(1, 0), 72), (1, 1));
        assert_eq!(limits(asked(8, 3), 72), (8, 3));
    }

    #[test]
    fn only_this_machine_is_loopback() {
        for (host, expected) in [
            ("127.0.0.1", true),
            ("::1", true),
            ("0.0.0.0", false),
            ("::", false),
            ("192.0.2.1", false),
        ] {
            assert_eq!(is_loopback(host), expected, "{host}");
        }
    }

    #[test]
    fn models_are_called_by_their_names() {
        assert_eq!(called("builtin", "tiny-tales"), "builtin");
        assert_eq!(called("a/model.gguf", "model"), "model");
        assert_eq!(called("stored-model", "x"), "stored-model");
    }
}
