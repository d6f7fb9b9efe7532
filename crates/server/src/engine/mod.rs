//! The engines, one for each device: a thread that owns the sequences which are computed there. And the way to them.
//!
//! Requests for work ([`Job`]) wait in one queue ([`dispatch`]); what becomes of each goes out by a bounded channel of
//! its own, so that who reads slowly stalls nobody. [`fair`] says whose turn it is, [`route`] which engine gets it,
//! [`prefix`] which sequence a prompt continues, [`worker`] computes, and between the steps of answers parts of what is
//! [`aside`]; [`models`] loads what requests name.

mod adapters;
mod aside;
mod dispatch;
mod fair;
mod models;
mod prefix;
mod rates;
mod route;
mod tiers;
mod worker;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sterna::embedding::Pooling;
use sterna::generate::{Generator, Logprobs, Request, Stats, StopReason};
use sterna::receipt::Receipt;
use sterna::{Adapted, Error, ErrorCode, Result};
use sterna_engine::lora::ActiveAdapter;
use sterna_engine::{Backend, Model};
use tokio::sync::mpsc as replies;

use crate::metrics::Metrics;
use crate::settings::Log;
pub(crate) use adapters::{AdapterKey, Adapters, LoadAdapter};
use dispatch::Dispatch;
pub(crate) use dispatch::{Stage, Standing};
use models::Tell;
pub(crate) use models::{AdapterSource, Library, ModelSource, NotSwapped};
pub use tiers::CacheFolder;
use tiers::Tiers;
use worker::Worker;

/// Events of one request that wait to be read; with more, it is given up.
const MAX_UNREAD: usize = 4096;

/// How engines share their time and memory.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Answers of an engine at once, at most.
    pub parallel: usize,
    /// Requests that may wait beyond those.
    pub queue: usize,
    /// Bytes of all sequences of an engine, unless those of running answers alone are more.
    pub cache_bytes: u64,
    /// Bytes of sequences in memory of the host that engines have no room for; where engines compute on the CPU, their
    /// own memory is that, and nothing is gained.
    pub host_bytes: u64,
    /// [`SchedulerOptions::chunk`](sterna::scheduler::SchedulerOptions::chunk).
    pub chunk: usize,
    /// [`SchedulerOptions::chunk_beside`](sterna::scheduler::SchedulerOptions::chunk_beside).
    pub chunk_beside: usize,
    /// Bytes of all models on an engine: to load one, others are unloaded. `None` for as many as there are.
    pub models_bytes: Option<u64>,
    /// A model that nobody has used for so long is unloaded. `None` for never.
    pub models_idle: Option<Duration>,
}

/// What is to be computed, and for whom.
pub(crate) struct Job {
    /// The index of the model.
    pub(crate) model: usize,
    /// The adapter of its sequences, beside the model's own.
    pub(crate) adapter: Option<Arc<AdapterKey>>,
    /// Whose turn is taken.
    pub(crate) key: usize,
    pub(crate) work: Work,
    /// Whether a receipt of the answer is to be written.
    pub(crate) receipt: bool,
    pub(crate) reply: Reply,
}

pub(crate) enum Work {
    /// An answer.
    Generate(Box<Request>),
    /// The rest of one that was begun by an engine which has lost its device.
    Continue(Box<Continued>),
    /// The log-probabilities of a text's tokens, and of so many of the most probable ones.
    Score { ids: Vec<u32>, n_top: usize },
    /// Vectors of texts.
    Embed {
        texts: Vec<Vec<u32>>,
        pooling: Pooling,
        normalised: bool,
    },
}

/// An answer that was begun.
pub(crate) struct Continued {
    generator: Generator,
    begun: Instant,
    /// When its newest token came.
    last: Option<Instant>,
}

/// Where the outputs of one of the answers to a request go.
#[derive(Clone)]
pub(crate) struct Reply {
    /// Which of the request's answers it is.
    pub(crate) choice: usize,
    /// Devices that were lost while it was computed.
    n_lost_with: usize,
    sender: replies::Sender<(usize, Output)>,
}

/// Why an output could not be delivered.
#[derive(Debug, PartialEq, Eq)]
enum Undelivered {
    /// Nobody reads any more.
    Gone,
    /// Too much waits to be read.
    Slow,
}

impl Reply {
    fn is_closed(&self) -> bool {
        self.sender.is_closed()
    }

    fn send(&self, output: Output) -> std::result::Result<(), Undelivered> {
        let sent = self.sender.try_send((self.choice, output));
        sent.map_err(|error| match error {
            replies::error::TrySendError::Full(_) => Undelivered::Slow,
            replies::error::TrySendError::Closed(_) => Undelivered::Gone,
        })
    }
}

/// The outputs of all answers to a request.
pub(crate) type Outputs = replies::Receiver<(usize, Output)>;

/// Where `n` answers to one request reply to, and where that is read.
pub(crate) fn replies(n: usize) -> (Vec<Reply>, Outputs) {
    let (sender, outputs) = replies::channel(MAX_UNREAD * n.max(1));
    let reply = |choice| Reply {
        choice,
        n_lost_with: 0,
        sender: sender.clone(),
    };
    ((0..n).map(reply).collect(), outputs)
}

/// What becomes of a job, in order.
#[derive(Debug)]
pub(crate) enum Output {
    /// An answer was begun.
    Begun {
        /// The number of the engine that did so.
        engine: usize,
        n_prompt: usize,
        /// Tokens of the prompt that are not computed again.
        n_cached: usize,
    },
    /// A token of it.
    Token(sterna::generate::Token),
    /// It has ended.
    Ended {
        reason: StopReason,
        /// Text that had been held back.
        text: String,
        stats: Stats,
        /// If it was asked for.
        receipt: Option<Box<Receipt>>,
    },
    /// Of each token but the first.
    Scored(Vec<Logprobs>),
    /// The vector of a text.
    Embedded(Vec<f32>),
    /// It failed; nothing follows.
    Failed(Error),
}

/// Why a job isn't taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Refused {
    /// As many wait as may.
    Full { retry_after: Duration },
    /// More at once than may ever wait.
    TooMany { limit: usize },
    /// No engine is left.
    Stopped,
}

/// The way to the engines. When the last one is gone, they stop.
#[derive(Clone)]
pub(crate) struct Engines {
    door: Arc<Door>,
}

/// Closes the queue when it is dropped.
struct Door {
    dispatch: Arc<Dispatch>,
    tiers: Arc<Tiers>,
}

impl Drop for Door {
    fn drop(&mut self) {
        self.dispatch.close();
    }
}

impl Engines {
    /// Starts a thread for each of `devices`, and one that loads models, which are added to the library that is
    /// returned beside the engines. What they have no room for goes to a folder, if there is one. `tell` is told of
    /// models that are there or aren't.
    ///
    /// Errors: a folder that can't be used; the system has no thread left.
    pub(crate) fn start<B>(
        devices: Vec<String>,
        (options, folder): (EngineOptions, Option<&CacheFolder>),
        metrics: &Arc<Metrics>,
        log: Log,
        tell: Box<Tell>,
    ) -> Result<(Engines, Arc<Library<B>>)>
    where
        B: Backend + 'static,
        Adapted<B>: Send + Sync,
        Model<B>: Send + Sync,
        ActiveAdapter<B>: Send,
    {
        let n_engines = devices.len();
        let tiers = Tiers::start(n_engines, options.host_bytes, folder, metrics, &log)?;
        let kinds = devices.clone();
        let dispatch = Dispatch::new(devices, options, Arc::clone(metrics), log);
        let dispatch = Arc::new(dispatch);
        let door = Door {
            dispatch: Arc::clone(&dispatch),
            tiers: Arc::clone(&tiers),
        };
        let library = Arc::new(Library::new(n_engines, Arc::clone(&dispatch), tell));
        for (number, table) in library.tables.iter().enumerate() {
            let device = Device {
                number,
                kind: kinds[number].clone(),
            };
            let parts = (Arc::clone(&dispatch), Arc::clone(&tiers));
            let (models, metrics) = (Arc::clone(table), Arc::clone(metrics));
            thread::Builder::new()
                .name(format!("engine {number}"))
                .spawn(move || {
                    let _ended = Ended(Arc::clone(&parts.1));
                    let work = || {
                        let (models, metrics) = (Arc::clone(&models), Arc::clone(&metrics));
                        Worker::new(&device, models, options, parts.clone(), metrics).run()
                    };
                    loop {
                        // If it panics, it is as if its device were lost.
                        let is_lost = catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| {
                            parts.0.lose(number, Vec::new(), "its thread has panicked");
                            true
                        });
                        if !is_lost || !parts.0.comes_back(number) {
                            return;
                        }
                    }
                })?;
        }
        let loading = Arc::clone(&library);
        thread::Builder::new()
            .name("models".to_owned())
            .spawn(move || loading.run())?;
        let door = Arc::new(door);
        Ok((Engines { door }, library))
    }

    /// What there is of the model `number`.
    pub(crate) fn standing(&self, number: usize) -> Standing {
        self.door.dispatch.standing(number)
    }

    /// Loads the model `number`, if it isn't there; pins it if `pin` says so, and doesn't any more if it says that.
    ///
    /// Errors: it can't be loaded; there is no room for it.
    pub(crate) async fn load(&self, number: usize, pin: Option<bool>) -> Result<()> {
        let loaded = self.door.dispatch.want(number, pin).await;
        loaded.unwrap_or_else(|_| Err(Error::new(ErrorCode::Compute, "the server stops")))
    }

    /// Unloads the model `number`: what is being answered ends with it, and a request that names it loads it again.
    /// False if it is there to stay.
    pub(crate) async fn unload(&self, number: usize) -> bool {
        match self.door.dispatch.unwant(number) {
            // If nobody answers, the engines are gone, and it with them.
            Some(unloaded) => {
                let _ = unloaded.await;
                true
            }
            None => false,
        }
    }

    /// Records how many adapters the model `number` has that were loaded by request: with one it isn't unloaded to
    /// make room.
    pub(crate) fn set_adapters(&self, number: usize, n: usize) {
        self.door.dispatch.set_adapters(number, n);
    }

    /// How many jobs they have and let wait, at most.
    pub(crate) fn limit(&self) -> usize {
        self.door.dispatch.limit()
    }

    /// Errors: `n` jobs at once are more than they ever take.
    pub(crate) fn expect_room(&self, n: usize) -> std::result::Result<(), Refused> {
        match self.limit() {
            limit if n > limit => Err(Refused::TooMany { limit }),
            _ => Ok(()),
        }
    }

    /// Takes `jobs`, all or none.
    pub(crate) fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), Refused> {
        self.door.dispatch.submit(jobs)
    }

    /// Ends them once all is answered, and waits for that and until what is kept is on disk, but no longer than
    /// `patience`; whether it is.
    pub(crate) fn finish(&self, patience: Duration) -> bool {
        self.door.dispatch.close();
        self.door.tiers.wait_until_done(patience)
    }

    /// Whether one of them answers.
    pub(crate) fn is_well(&self) -> bool {
        self.door.dispatch.is_well()
    }

    /// Whether one of them answers, or will once its device is opened again.
    pub(crate) fn has_future(&self) -> bool {
        self.door.dispatch.has_future()
    }

    /// Lets the engine `number` lose its device in its next step.
    #[cfg(test)]
    fn lose(&self, number: usize) {
        self.lose_after(number, 0);
    }

    /// Lets the engine `number` lose its device once one of its answers has `n_tokens`.
    #[cfg(test)]
    fn lose_after(&self, number: usize, n_tokens: usize) {
        self.door.dispatch.doom(number, n_tokens);
    }

    /// Whether the engine `number` waits after each step.
    #[cfg(test)]
    fn hold(&self, number: usize, is_held: bool) {
        self.door.dispatch.hold(number, is_held);
    }
}

/// What an engine computes on.
struct Device {
    /// Its place among the engines.
    number: usize,
    /// Its name, which others of the kind have, too.
    kind: String,
}

/// Tells the tiers that an engine asks no more.
struct Ended(Arc<Tiers>);

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.end();
    }
}

#[cfg(test)]
mod tests;
