//! From bytes to a model: the engine says which range it needs next, and is fed that.

mod feed;
mod recipe;

use std::sync::Arc;

use bytes::Bytes;
use sterna_kernels::quant::QuantError;

use crate::PlanError;
use crate::backend::{Backend, BackendError};
use crate::model::Model;
use crate::plan::{ModelPlan, TensorRequest};

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
            backend,
            feed: WeightFeed::of_all(plan),
        }
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
        self.feed.feed(&self.backend, bytes)
    }

    /// Suspicious but possibly correct properties of the weights so far.
    pub fn warnings(&self) -> &[String] {
        self.feed.warnings()
    }

    /// The model, once everything requested has been fed.
    ///
    /// Errors: [`LoadError::Incomplete`] if something is missing.
    pub fn finish(self) -> Result<Arc<Model<B>>, LoadError> {
        let Loader { backend, mut feed } = self;
        feed.expect_complete()?;
        let config = feed.config()?;
        let weights = feed.generation();
        Ok(Arc::new(Model::new(config, backend, weights)))
    }
}
