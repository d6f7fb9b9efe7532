//! The engines, one for each device: a thread that owns the sequences which are computed there. And the way to them.
//!
//! Requests for work ([`Job`]) wait in one queue ([`dispatch`]); what becomes of each goes out by a bounded channel of
//! its own, so that who reads slowly stalls nobody. [`fair`] says whose turn it is, [`route`] which engine gets it,
//! [`prefix`] which sequence a prompt continues, [`worker`] computes.

mod adapters;
mod dispatch;
mod fair;
mod prefix;
mod route;
mod worker;

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use sterna::embedding::Pooling;
use sterna::generate::{Generator, Logprobs, Request, Stats, StopReason};
use sterna::{Adapted, Error};
use sterna_engine::{Backend, SessionOptions};
use tokio::sync::mpsc as replies;

use crate::metrics::Metrics;
use crate::settings::Log;
pub(crate) use adapters::{AdapterKey, Adapters, LoadAdapter};
use dispatch::Dispatch;
use worker::Worker;

/// Events of one request that wait to be read; with more, it is given up.
const MAX_UNREAD: usize = 4096;

/// A model as an engine sees it: no strings.
pub(crate) struct EngineModel<B: Backend> {
    /// The model, with the adapters of its sequences.
    pub(crate) adapted: Adapted<B>,
    /// Settings of its sequences.
    pub(crate) session: SessionOptions,
    /// Bytes of a sequence's cache by its number of tokens.
    pub(crate) cache_bytes: Arc<dyn Fn(usize) -> u64 + Send + Sync>,
    /// Adapters that requests may name, beside those of all sequences. All engines share them.
    pub(crate) adapters: Arc<Adapters<B>>,
}

/// How engines share their time and memory.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Answers of an engine at once, at most.
    pub parallel: usize,
    /// Requests that may wait beyond those.
    pub queue: usize,
    /// Bytes of all sequences of an engine, unless those of running answers alone are more.
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
}

impl Drop for Door {
    fn drop(&mut self) {
        self.dispatch.close();
    }
}

impl Engines {
    /// Starts a thread for each of `devices`, which has the models of the same place in `models`: each engine has all
    /// of them.
    ///
    /// Errors: the system has no thread left.
    pub(crate) fn start<B>(
        models: Vec<Vec<EngineModel<B>>>,
        devices: Vec<String>,
        options: EngineOptions,
        metrics: &Arc<Metrics>,
        log: Log,
    ) -> std::io::Result<Engines>
    where
        B: Backend + 'static,
        Adapted<B>: Send + Sync,
        Adapters<B>: Send + Sync,
    {
        let dispatch = Dispatch::new(devices, options, Arc::clone(metrics), log);
        let dispatch = Arc::new(dispatch);
        let door = Door {
            dispatch: Arc::clone(&dispatch),
        };
        for (number, models) in models.into_iter().enumerate() {
            let (dispatch, metrics) = (Arc::clone(&dispatch), Arc::clone(metrics));
            thread::Builder::new()
                .name(format!("engine {number}"))
                .spawn(move || {
                    // If it panics, it is as if its device were lost.
                    let _lost = LostInPanic {
                        dispatch: Arc::clone(&dispatch),
                        number,
                    };
                    Worker::new(number, models, options, dispatch, metrics).run();
                })?;
        }
        Ok(Engines {
            door: Arc::new(door),
        })
    }

    /// Takes `jobs`, all or none.
    pub(crate) fn submit(&self, jobs: Vec<Job>) -> Result<(), Refused> {
        self.door.dispatch.submit(jobs)
    }

    /// Whether one of them answers.
    pub(crate) fn is_well(&self) -> bool {
        self.door.dispatch.is_well()
    }

    /// Lets the engine `number` lose its device in its next step.
    #[cfg(test)]
    fn lose(&self, number: usize) {
        self.door.dispatch.doom(number);
    }
}

/// Takes an engine out when its thread panics.
struct LostInPanic {
    dispatch: Arc<Dispatch>,
    number: usize,
}

impl Drop for LostInPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            let message = "its thread has panicked";
            self.dispatch.lose(self.number, Vec::new(), message);
        }
    }
}

#[cfg(test)]
mod tests;
