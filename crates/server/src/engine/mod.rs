//! The engine: one thread that owns every sequence, and the way to it.
//!
//! Requests for work ([`Job`]) come in by a channel; what becomes of each goes out by a bounded channel of its own, so
//! that who reads slowly stalls nobody. [`fair`] says whose turn it is, [`prefix`] which sequence a prompt continues,
//! [`worker`] computes.

mod adapters;
mod fair;
mod prefix;
mod worker;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use sterna::embedding::Pooling;
use sterna::generate::{Logprobs, Request, Stats, StopReason};
use sterna::{Adapted, Error};
use sterna_engine::{Backend, SessionOptions};
use tokio::sync::mpsc as replies;

use crate::metrics::Metrics;
pub(crate) use adapters::{AdapterKey, Adapters, LoadAdapter};
use worker::Worker;

/// Events of one request that wait to be read; with more, it is given up.
const MAX_UNREAD: usize = 4096;

/// A model as the engine sees it: no strings.
pub struct EngineModel<B: Backend> {
    /// The model, with the adapters of its sequences.
    pub adapted: Adapted<B>,
    /// Settings of its sequences.
    pub session: SessionOptions,
    /// Bytes of a sequence's cache by its number of tokens.
    pub cache_bytes: Box<dyn Fn(usize) -> u64 + Send>,
    /// Adapters that requests may name, beside those of all sequences.
    pub(crate) adapters: Arc<Adapters<B>>,
}

/// How the engine shares its time and memory.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Answers at once, at most.
    pub parallel: usize,
    /// Requests that may wait beyond those.
    pub queue: usize,
    /// Bytes of all sequences, unless those of running answers alone are more.
    pub cache_bytes: u64,
    /// Tokens of prompts in a step that running answers share.
    pub chunk: usize,
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
    pub(crate) reply: Reply,
}

pub(crate) enum Work {
    /// An answer.
    Generate(Box<Request>),
    /// The log-probabilities of a text's tokens, and of so many of the most probable ones.
    Score { ids: Vec<u32>, n_top: usize },
    /// Vectors of texts.
    Embed {
        texts: Vec<Vec<u32>>,
        pooling: Pooling,
        normalised: bool,
    },
}

/// Where the outputs of one of the answers to a request go.
#[derive(Clone)]
pub(crate) struct Reply {
    /// Which of the request's answers it is.
    pub(crate) choice: usize,
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

    fn send(&self, output: Output) -> Result<(), Undelivered> {
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
        sender: sender.clone(),
    };
    ((0..n).map(reply).collect(), outputs)
}

/// What becomes of a job, in order.
#[derive(Debug)]
pub(crate) enum Output {
    /// An answer was begun.
    Begun {
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
    /// The engine has stopped.
    Stopped,
}

/// What both sides know of the engine's load.
#[derive(Debug, Default)]
struct Load {
    /// Jobs that run or wait.
    pending: AtomicUsize,
    is_stopped: AtomicBool,
    /// A device was lost.
    is_lost: AtomicBool,
    /// How long answers took lately.
    answer_ms: AtomicUsize,
}

/// The way to the engine. When the last one is gone, the engine stops.
#[derive(Clone)]
pub(crate) struct Engine {
    jobs: mpsc::Sender<Job>,
    load: Arc<Load>,
    options: EngineOptions,
}

impl Engine {
    /// Starts the thread, for `models`.
    ///
    /// Errors: the system has no thread left.
    pub(crate) fn start<B>(
        models: Vec<EngineModel<B>>,
        options: EngineOptions,
        metrics: Arc<Metrics>,
    ) -> std::io::Result<Engine>
    where
        B: Backend + 'static,
        Adapted<B>: Send,
        Adapters<B>: Send + Sync,
    {
        let (sender, jobs) = mpsc::channel();
        let load = Arc::new(Load::default());
        let engine = Engine {
            jobs: sender,
            load: Arc::clone(&load),
            options,
        };
        thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || {
                // Also if it panics, after which nothing is answered.
                let _stopped = Stopped(Arc::clone(&load));
                Worker::new(models, options, jobs, load, metrics).run();
            })?;
        Ok(engine)
    }

    /// Takes `jobs`, all or none.
    pub(crate) fn submit(&self, jobs: Vec<Job>) -> Result<(), Refused> {
        if !self.is_well() {
            return Err(Refused::Stopped);
        }
        let limit = self.options.parallel + self.options.queue;
        let n = jobs.len();
        if n > limit {
            return Err(Refused::TooMany { limit });
        }
        let pending = &self.load.pending;
        let taken = pending.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |pending| {
            (pending + n <= limit).then_some(pending + n)
        });
        if let Err(pending) = taken {
            let answer = self.load.answer_ms.load(Ordering::Relaxed) as u64;
            let rounds = pending as u64 / self.options.parallel as u64;
            let wait = Duration::from_millis((answer * rounds).clamp(1_000, 60_000));
            return Err(Refused::Full { retry_after: wait });
        }
        for job in jobs {
            self.jobs.send(job).map_err(|_| Refused::Stopped)?;
        }
        Ok(())
    }

    /// Whether it answers.
    pub(crate) fn is_well(&self) -> bool {
        let Load {
            is_stopped,
            is_lost,
            ..
        } = &*self.load;
        !is_stopped.load(Ordering::Relaxed) && !is_lost.load(Ordering::Relaxed)
    }
}

/// Records, when it is dropped, that the engine has stopped.
struct Stopped(Arc<Load>);

impl Drop for Stopped {
    fn drop(&mut self) {
        self.0.is_stopped.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests;
