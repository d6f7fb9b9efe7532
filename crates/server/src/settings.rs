//! What whoever starts the server chooses.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use sterna::Result;
use sterna::receipt::Receipt;
use sterna::scheduler::SchedulerOptions;

use crate::api::Keys;
use crate::engine::{CacheFolder, EngineOptions};
use crate::hosts::Hosts;
use crate::trace::Tracer;

/// Takes records of the log: what happened, to which request. No record has a word of a prompt or an answer.
pub type Log = Arc<dyn Fn(&Map<String, Value>) + Send + Sync>;

/// Signs the receipt of an answer.
///
/// Errors: it can't; the answer fails then.
pub type Sign = Arc<dyn Fn(&mut Receipt) -> Result<()> + Send + Sync>;

/// Logs `record`, an object.
pub(crate) fn tell(log: &Log, record: Value) {
    if let Value::Object(record) = record {
        log(&record);
    }
}

/// The settings of a server.
#[derive(Clone)]
pub struct Settings {
    /// How engines share their time and memory.
    pub engine: EngineOptions,
    /// Where sequences are kept that neither engines nor the host have memory for, also when the server has ended.
    pub cache_folder: Option<CacheFolder>,
    /// The names of the engines' devices, for logs and metrics.
    pub devices: Vec<String>,
    /// Who is let in.
    pub keys: Keys,
    /// By which names it may be asked.
    pub hosts: Hosts,
    /// The origins whose pages may ask; `*` are all.
    pub cors: Vec<String>,
    /// Bytes of a request at most.
    pub max_body: usize,
    /// How long a request may take to arrive, after its head.
    pub body_timeout: Duration,
    /// Whether clients may say what answers have to match.
    pub grammars: bool,
    /// How long that may take to prepare, and wait for what others say.
    pub grammar_timeout: Duration,
    /// Signs receipts of answers, where [they are written](crate::Served::with_receipts).
    pub sign: Option<Sign>,
    /// Whether metrics are read without a key. They have the names of keys.
    pub public_metrics: bool,
    /// Whether there are metrics under the names that gateways look for (`vllm:…`), beside its own.
    pub gateway_metrics: bool,
    /// The commit that the program was built from.
    pub commit: Option<String>,
    /// Takes the log.
    pub log: Log,
    /// Takes traces, if they are made.
    pub tracer: Option<Tracer>,
}

/// Answers at once unless another number is chosen: what a step of a small machine shares well.
pub const PARALLEL: usize = 8;
/// The same on a GPU, and on many threads, whose steps take little longer with more.
pub const MOST_PARALLEL: usize = 32;

/// Answers at once on so many threads of a CPU, unless another number is chosen.
pub fn parallel_on(n_threads: usize) -> usize {
    n_threads.saturating_mul(2).clamp(PARALLEL, MOST_PARALLEL)
}

/// Requests that may wait.
pub const QUEUE: usize = 64;
/// Bytes of the cache.
pub const CACHE_BYTES: u64 = 2 << 30;
/// Bytes of the cache's folder.
pub const FOLDER_BYTES: u64 = 16 << 30;
/// Bytes of a request.
pub const MAX_BODY: usize = 16 << 20;
/// The time in which a request arrives.
pub const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// The time in which a grammar is prepared.
pub const GRAMMAR_TIMEOUT: Duration = Duration::from_secs(10);

impl Default for Settings {
    /// Everybody is let in, by any name, no page of another site, and nothing is logged.
    fn default() -> Settings {
        Settings {
            engine: EngineOptions {
                parallel: PARALLEL,
                queue: QUEUE,
                cache_bytes: CACHE_BYTES,
                host_bytes: 0,
                chunk: SchedulerOptions::default().chunk,
                chunk_beside: SchedulerOptions::default().chunk_beside,
                models_bytes: None,
                models_idle: None,
            },
            cache_folder: None,
            devices: Vec::new(),
            keys: Keys::none(),
            hosts: Hosts::any(),
            cors: Vec::new(),
            max_body: MAX_BODY,
            body_timeout: BODY_TIMEOUT,
            grammars: true,
            grammar_timeout: GRAMMAR_TIMEOUT,
            sign: None,
            public_metrics: false,
            gateway_metrics: true,
            commit: None,
            log: Arc::new(|_| {}),
            tracer: None,
        }
    }
}
