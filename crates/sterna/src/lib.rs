//! Running low-bit language models: open one, generate, chat, and serve many at once.
#![forbid(unsafe_code)]

mod adapted;
mod error;
mod model;
#[cfg(all(feature = "native", not(target_family = "wasm")))]
pub mod native;
mod want;
mod warning;

pub use adapted::Adapted;
pub use error::{Error, ErrorCode, Result};
pub use model::*;
pub use want::{Machine, Want};
pub use warning::Warning;
