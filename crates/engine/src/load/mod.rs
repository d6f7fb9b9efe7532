//! From bytes to a model: the engine says which range it needs next, and is fed that.

mod feed;
mod recipe;
mod rows;

use std::sync::Arc;

use bytes::Bytes;
use sterna_kernels::quant::QuantError;

use crate::PlanError;
use crate::backend::{Backend, BackendError};
use crate::model::Model;
use crate::plan::{ModelPlan, TensorRequest};
use crate::session::early::EarlyPrefill;
use crate::session::{EngineError, Session, SessionOptions};

pub(crate) use feed::WeightFeed;
pub(crate) use recipe::{linear, vector};

/// Builds a [`Model`] from a [`ModelPlan`], piece by piece in the order of execution.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use sterna_engine::{Cpu, LoadError, Loader, Model, ModelPlan};
/// # fn load(plan: ModelPlan, file: bytes::Bytes, cpu: Cpu) -> Result<Arc<Model<Cpu>>, LoadError> {
/// let mut loader = Loader::new(plan, cpu);
/// while let Some(want) = loader.wanted() {
///     let range = want.offset as usize..(want.offset + want.len) as usize;
///     loader.feed(file.slice(range))?;
/// }
/// loader.finish()
/// # }
/// ```
pub struct Loader<B: Backend> {
    backend: B,
    feed: WeightFeed<B>,
    prompt: Option<Prompt<B>>,
}

/// What [`Loader::prefill`] was asked for, and how far it has come.
enum Prompt<B: Backend> {
    Waiting(Vec<u32>, SessionOptions),
    Running(Box<EarlyPrefill<B>>),
}

/// What [`Loader::finish_with_session`] returns.
pub struct Loaded<B: Backend> {
    /// The model.
    pub model: Arc<Model<B>>,
    /// The sequence that [`Loader::prefill`] asked for.
    pub session: Option<Session<B>>,
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Bytes that weren't requested.
    #[error("tensor `{name}`: expected {expected} bytes, found {found}")]
    WrongLength {
        /// Name of the requested tensor in its file, or `none` if loading was complete.
        name: String,
        /// Bytes requested.
        expected: u64,
        /// Bytes fed.
        found: u64,
    },
    /// Finished before every weight was fed.
    #[error("tensor `{name}` has not been loaded")]
    Incomplete {
        /// Name in its file of the first tensor that is missing.
        name: String,
    },
    /// Weights that don't match their description.
    #[error("tensor `{name}`: {source}")]
    Weights {
        /// Name of the tensor in its file.
        name: String,
        /// What is wrong.
        source: QuantError,
    },
    /// A scale that isn't positive.
    #[error("tensor `{name}`: expected a positive scale, found {found}")]
    BadScale {
        /// Name of the tensor in its file.
        name: String,
        /// The scale.
        found: f32,
    },
    /// A value that is NaN or infinite, of a norm, bias or list of factors, or of a matrix that is swapped
    /// in.
    #[error("tensor `{name}`: expected numbers, found {found} at index {index}")]
    NotFinite {
        /// Name of the tensor in its file.
        name: String,
        /// Index of the value.
        index: usize,
        /// The value.
        found: f32,
    },
    /// A separate scale for weights that already have scales of their own.
    #[error("tensor `{name}`: its weights have no common scale that this one could multiply")]
    NoCommonScale {
        /// Name of the scale in its file.
        name: String,
    },
    /// Values that are inconsistent.
    #[error(transparent)]
    Config(#[from] PlanError),
    /// The backend refused a weight.
    #[error(transparent)]
    Backend(#[from] BackendError),
    /// The prompt can't be computed.
    #[error("prompt: {0}")]
    Prompt(#[source] EngineError),
}

/// Checks that `bytes` has the length of `want`, and that anything is requested at all.
pub(crate) fn expect_wanted(want: Option<&TensorRequest>, bytes: &[u8]) -> Result<(), LoadError> {
    let found = bytes.len() as u64;
    match want {
        Some(want) if want.len == found => Ok(()),
        _ => Err(LoadError::WrongLength {
            name: want.map_or("none", TensorRequest::name_in_file).to_owned(),
            expected: want.map_or(0, |want| want.len),
            found,
        }),
    }
}

impl<B: Backend> Loader<B> {
    /// Begins to load `plan` onto `backend`.
    pub fn new(plan: ModelPlan, backend: B) -> Loader<B> {
        Loader {
            feed: WeightFeed::of_all(plan, &backend),
            backend,
            prompt: None,
        }
    }

    /// Computes the first tokens of a sequence while weights arrive: each layer as soon as it is loaded. They are the
    /// first `options.chunk` of `ids`, or all, and [`Loader::finish_with_session`] returns a session that holds them.
    ///
    /// May be called at any time before that; of several calls the last counts. The same bits result as from
    /// [`Session::forward`].
    /// Errors: [`LoadError::Prompt`] if `ids` are none, not in the vocabulary, or more than the context holds.
    pub fn prefill(&mut self, ids: Vec<u32>, options: SessionOptions) -> Result<(), LoadError> {
        self.prompt = Some(Prompt::Waiting(ids, options));
        self.advance()
    }

    /// The range to feed next; `None` once everything has been fed.
    pub fn wanted(&self) -> Option<&TensorRequest> {
        self.feed.wanted()
    }

    /// Feeds the bytes of the range named by [`Loader::wanted`].
    ///
    /// They are kept, not copied, where their layout can be used as it is.
    /// Errors: [`LoadError`] names the tensor at fault.
    pub fn feed(&mut self, bytes: Bytes) -> Result<(), LoadError> {
        self.feed.feed(&self.backend, bytes)?;
        self.advance()
    }

    /// Computes what there are weights for.
    fn advance(&mut self) -> Result<(), LoadError> {
        let Loader {
            backend,
            feed,
            prompt,
        } = self;
        let Some(prompt) = prompt else {
            return Ok(());
        };
        if let (Prompt::Waiting(ids, options), Some(embedding)) =
            (&mut *prompt, feed.complete_embedding())
        {
            let early = EarlyPrefill::new(backend, feed.config()?, embedding, ids, *options);
            *prompt = Prompt::Running(Box::new(early.map_err(LoadError::Prompt)?));
        }
        if let Prompt::Running(early) = prompt {
            while let Some(layer) = feed.complete_layer(early.n_layers()) {
                early.layer(backend, layer).map_err(LoadError::Prompt)?;
            }
        }
        Ok(())
    }

    /// Suspicious but possibly correct properties of the weights so far.
    pub fn warnings(&self) -> &[String] {
        self.feed.warnings()
    }

    /// The model, once everything requested has been fed.
    ///
    /// Errors: [`LoadError::Incomplete`] if something is missing.
    pub fn finish(self) -> Result<Arc<Model<B>>, LoadError> {
        Ok(self.finish_with_session()?.model)
    }

    /// The same, and the sequence that [`Loader::prefill`] asked for.
    pub fn finish_with_session(self) -> Result<Loaded<B>, LoadError> {
        let Loader {
            backend,
            mut feed,
            prompt,
        } = self;
        feed.expect_complete()?;
        let config = feed.config()?;
        let weights = feed.generation();
        let model = Arc::new(Model::new(config, backend, weights));
        let session = match prompt {
            Some(Prompt::Running(early)) => Some(Session::of(Arc::clone(&model), early.finish())),
            _ => None,
        };
        Ok(Loaded { model, session })
    }
}
