//! Running low-bit language models: open one, generate, chat, and serve many at once.
#![forbid(unsafe_code)]

mod adapted;
pub mod conversation;
mod error;
pub mod generate;
mod model;
#[cfg(all(feature = "native", not(target_family = "wasm")))]
pub mod native;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
mod want;
mod warning;

/// What the fuzzers reach, and nobody else.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::model::bundled::{is_bundled, tokenizer};
}

pub use adapted::Adapted;
pub use error::{Error, ErrorCode, Result};
pub use model::*;
pub use want::{Machine, Want};
pub use warning::Warning;
