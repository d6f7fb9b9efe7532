//! Running low-bit language models: open one, generate, chat, and serve many at once.
#![forbid(unsafe_code)]

pub mod conversation;
mod error;
pub mod generate;
pub mod sampling;
pub mod scheduler;
pub mod sequence;

pub use error::{Error, ErrorCode, Result};
