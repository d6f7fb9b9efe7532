//! Conversions of whole models.

mod bundle;
mod common;
mod gguf;
mod package;
mod quantize_actions;
