//! Why files don't make up a supported model.

use std::fmt::Display;

use sterna_format::DType;
use sterna_format::gguf::GgufError;
use sterna_format::names::NameCollision;

/// Why a model can't be planned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// An unsupported family.
    #[error("model family `{found}` isn't supported; supported are {expected}")]
    UnknownFamily {
        /// The family named in the files.
        found: String,
        /// The supported families.
        expected: String,
    },
    /// A missing or invalid value of the configuration.
    #[error("{what}: expected {expected}, found {found}")]
    Config {
        /// The value's name.
        what: String,
        /// What was expected.
        expected: String,
        /// What was found.
        found: String,
    },
    /// A value that another format can't express.
    #[error("{what}: {format} can't express {found}")]
    Inexpressible {
        /// The value's name.
        what: String,
        /// The other format.
        format: &'static str,
        /// The value.
        found: String,
    },
    /// A metadata key of the wrong type.
    #[error(transparent)]
    Metadata(#[from] GgufError),
    /// Two tensors with the same name.
    #[error(transparent)]
    Names(#[from] NameCollision),
    /// A tensor required by the family.
    #[error("tensor `{name}` is missing; it should be {expected:?}")]
    MissingTensor {
        /// Its name, as spelled in files of this kind.
        name: String,
        /// Its shape.
        expected: Vec<usize>,
    },
    /// A tensor of the wrong shape.
    #[error("tensor `{name}`: expected shape {expected:?}, found {found:?}")]
    TensorShape {
        /// Its name in the file.
        name: String,
        /// The shape required by the configuration.
        expected: Vec<usize>,
        /// The shape it has.
        found: Vec<usize>,
    },
    /// A tensor of an unsupported type.
    #[error("tensor `{name}`: {expected}, found type {found}")]
    TensorType {
        /// Its name in the file.
        name: String,
        /// The expected types.
        expected: &'static str,
        /// Its type.
        found: DType,
    },
    /// A tensor whose offset or size doesn't match its elements.
    #[error("tensor `{name}`: expected {expected}, found {len} at offset {offset}")]
    TensorBytes {
        /// Its name in the file.
        name: String,
        /// The size required by its type and shape.
        expected: String,
        /// Its size in bytes.
        len: u64,
        /// Its offset.
        offset: u64,
    },
    /// Tensors that are unused: the model isn't what its configuration says.
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
