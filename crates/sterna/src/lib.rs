//! Running low-bit language models: open one, generate, chat, and serve many at once.
//!
//! ```
//! # #[cfg(all(feature = "native", feature = "builtin"))]
//! fn main() -> sterna::Result<()> {
//!     let model = sterna::native::open("builtin", &Default::default())?;
//!     let mut chat = model.chat(Default::default())?;
//!     for piece in chat.say("Tell me a story about a fox named Ruby.")? {
//!         print!("{}", piece?);
//!     }
//!     Ok(())
//! }
//! # #[cfg(not(all(feature = "native", feature = "builtin")))]
//! # fn main() {}
//! ```
//!
//! For programs that run models: servers, browsers, tools. Not for arithmetic (`sterna-kernels`,
//! `sterna-gpu`), nor for transferring models (`sterna-delivery`).
//!
//! | to | see |
//! |---|---|
//! | open a model from any source of bytes | [`ModelFiles::open`], which asks a driver for what it [wants](Want) |
//! | open one on this machine | [`native`] |
//! | talk with a model | [`TextModel::chat`] |
//! | generate by hand: sans-IO, token by token | [`generate::Generator`] |
//! | make vectors of texts | [`embedding::embed`], [`embedding::Embedder`] |
//! | make answers match a schema | [`TextModel::constraint`] |
//! | have an answer checked by others | [`receipt`] |
//! | run many answers in shared steps | [`scheduler::Scheduler`] |
//! | replace weights of a running model | [`ModelFiles::swap`] |
//!
//! Nothing here prints, reads the environment or chooses folders: notable events are a [`Warning`], and every
//! [`Error`] has a stable [`ErrorCode`].
#![forbid(unsafe_code)]

mod adapted;
mod chat;
#[cfg(feature = "constraint")]
pub mod constraint;
pub mod conversation;
pub mod embedding;
mod error;
pub mod generate;
mod model;
#[cfg(all(feature = "native", not(target_family = "wasm")))]
pub mod native;
pub mod receipt;
pub mod sampling;
pub mod scheduler;
pub mod sequence;
pub mod swap;
mod want;
mod warning;

/// Only for the fuzzers.
#[doc(hidden)]
pub mod fuzzing {
    pub use crate::model::bundled::{is_bundled, tokenizer};
}

pub use adapted::Adapted;
pub use chat::{Answer, Chat, ChatOptions, DEFAULT_CTX_LEN, TextModel};
#[doc(hidden)]
pub use error::Context;
pub use error::{Error, ErrorCode, Result};
pub use model::*;
pub use want::{Machine, Want};
pub use warning::Warning;
