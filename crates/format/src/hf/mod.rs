//! The JSON files of a Hugging Face checkpoint, as typed values.
//!
//! [`Config`], [`GenerationConfig`] and [`TokenizerConfig`] hold what the files say in the spellings
//! of Transformers 4 and 5; what it means for a model family is for the engine and the text crate
//! to say. A key that is absent and one that is null are the same. Unknown keys are ignored.

mod adapter;
mod config;
mod generation;
pub(crate) mod node;
mod rope;
mod tokenizer;

pub use adapter::{AdapterConfig, AdapterNameError, AdapterTensor, LoraFactor};
pub use config::{Config, LayerHeads, QuantizationConfig};
pub use generation::GenerationConfig;
pub use node::parse_json;
pub use rope::{RopeParameters, RopeSet};
pub use tokenizer::{AddedToken, ChatTemplate, TokenizerConfig};

/// Why a configuration file was refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// The file isn't JSON.
    #[error("not JSON: {0}")]
    Json(#[source] serde_json::Error),
    /// The file is larger than any real one.
    #[error("a file of {found} bytes, the limit is {limit}")]
    TooLarge {
        /// Bytes given.
        found: usize,
        /// The most that is accepted.
        limit: usize,
    },
    /// A value isn't what its key demands.
    #[error("{path}: expected {expected}, found {found}")]
    Value {
        /// Path to the value, such as `` `rope_scaling.factor` ``.
        path: String,
        /// What was expected there.
        expected: &'static str,
        /// What does.
        found: String,
    },
}
