//! Why a set of files isn't a model that runs here.

use std::fmt::Display;

use sterna_format::DType;
use sterna_format::gguf::GgufError;
use sterna_format::names::NameCollision;

/// Why a model can't be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// A family there is no graph for.
    #[error("model family `{found}` isn't supported; supported are {expected}")]
    UnknownFamily {
        /// The family the files name.
        found: String,
        /// The families there are.
        expected: String,
    },
    /// A value of the configuration that is missing or makes no sense.
    #[error("{what}: expected {expected}, found {found}")]
    Config {
        /// The value.
        what: String,
        /// What it should be.
        expected: String,
        /// What it is.
        found: String,
    },
    /// A value that another format has no words for.
    #[error("{what}: {format} can't say {found}")]
    Inexpressible {
        /// The value.
        what: String,
        /// The other format.
        format: &'static str,
        /// What it is.
        found: String,
    },
    /// A metadata key of another type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// Two tensors under one name.
    #[error(transparent)]
    Names(#[from] NameCollision),
    /// A tensor the family needs.
    #[error("tensor `{name}` is missing; it should be {expected:?}")]
    MissingTensor {
        /// Its name, as files of the model's kind spell it.
        name: String,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// A tensor of another shape.
    #[error("tensor `{name}`: expected shape {expected:?}, found {found:?}")]
    TensorShape {
        /// Its name in the file.
        name: String,
        /// The shape the configuration calls for.
        expected: Vec<usize>,
        /// The shape it has.
        found: Vec<usize>,
    },
    /// A tensor of a type that its place doesn't take.
    #[error("tensor `{name}`: {expected}, found type {found}")]
    TensorType {
        /// Its name in the file.
        name: String,
        /// What is taken.
        expected: &'static str,
        /// Its type.
        found: DType,
    },
    /// A tensor whose place or size can't be that of its elements.
    #[error("tensor `{name}`: expected {expected}, found {len} at offset {offset}")]
    TensorBytes {
        /// Its name in the file.
        name: String,
        /// What its type and shape take.
        expected: String,
        /// The bytes it has.
        len: u64,
        /// Where they begin.
        offset: u64,
    },
    /// Tensors that nothing would read: the model isn't what its configuration says.
    #[error("{count} tensors are not part of this model family, among them `{first}`")]
    UnusedTensors {
        /// How many.
        count: usize,
        /// The first of them, by its name in the file.
        first: String,
    },
}

impl PlanError {
    pub(crate) fn inexpressible(
        what: impl Into<String>,
        format: &'static str,
        found: impl Display,
    ) -> PlanError {
        PlanError::Inexpressible {
            what: what.into(),
            format,
            found: found.to_string(),
        }
    }

    pub(crate) fn config(
        what: impl Into<String>,
        expected: impl Into<String>,
        found: impl Display,
    ) -> PlanError {
        PlanError::Config {
            what: what.into(),
            expected: expected.into(),
            found: found.to_string(),
        }
    }
}
