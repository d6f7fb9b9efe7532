//! From bytes to a model: the engine says which ranges it wants next, and is fed them.

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

/// Makes a [`Model`] from a [`ModelPlan`], piece by piece in the order of execution.
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
    /// Bytes that weren't asked for.
    #[error("tensor `{name}`: expected {expected} bytes, found {found}")]
    WrongLength {
        /// Name of the tensor wanted in its file, or `none` if loading was complete.
        name: String,
        /// Bytes wanted.
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
    /// Weights that can't be what they are said to be.
    #[error("tensor `{name}`: {source}")]
    Weights {
        /// Name of the tensor in its file.
        name: String,
        /// What is wrong.
        source: QuantError,
    },
    /// A scale that isn't a positive number.
    #[error("tensor `{name}`: expected a positive scale, found {found}")]
    BadScale {
        /// Name of the tensor in its file.
        name: String,
        /// The scale.
        found: f32,
    },
    /// A value that isn't a number, of a norm, bias or list of factors, or of a matrix that is swapped in.
    #[error("tensor `{name}`: expected numbers, found {found} at index {index}")]
    NotFinite {
        /// Name of the tensor in its file.
        name: String,
        /// Place of the value.
        index: usize,
        /// The value.
        found: f32,
    },
    /// A separate scale beside weights that already have scales of their own.
    #[error("tensor `{name}`: its weights have no common scale that this one could multiply")]
    NoCommonScale {
        /// Name of the scale in its file.
        name: String,
    },
    /// Values that make no sense together.
    #[error(transparent)]
    Config(#[from] PlanError),
    /// The backend refused a weight.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

/// Checks that `bytes` are as many as `want` asks for, and that anything is wanted at all.
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

    /// The range to feed next; `None` once everything is there.
    pub fn wanted(&self) -> Option<&TensorRequest> {
        self.feed.wanted()
    }

    /// Takes the bytes of the range [`Loader::wanted`] names.
    ///
    /// They are kept, not copied, where their layout can be used as it is.
    /// Errors: [`LoadError`] names the tensor at fault.
    pub fn feed(&mut self, bytes: Bytes) -> Result<(), LoadError> {
        self.feed.feed(&self.backend, bytes)
    }

    /// What looks wrong about the weights so far, though it could be right.
    pub fn warnings(&self) -> &[String] {
        self.feed.warnings()
    }

    /// The model, once everything it wanted has been fed.
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
