//! Bytes to typed values: the file formats that models come in.
//!
//! For parsing GGUF and safetensors headers, Hugging Face JSON files, and for naming tensors and
//! their encodings. Not for reading files (callers hand over bytes), nor for arithmetic on weights
//! (`sterna-kernels` decodes blocks). No I/O, no threads, no clock.
#![forbid(unsafe_code)]

mod catalog;
mod dtype;
pub mod gguf;
pub mod hf;
pub mod names;
pub mod safetensors;

pub use catalog::{TensorCatalog, TensorEntry};
pub use dtype::DType;
