//! Bytes to typed values: the file formats that models come in.
//!
//! For parsing GGUF and safetensors headers, Hugging Face JSON files, and for naming tensors and
//! their encodings. Not for reading files (callers hand over bytes), nor for arithmetic on weights
//! (`sterna-kernels` decodes blocks). No I/O, no threads, no clock.
//!
//! Every parser takes bytes from strangers: it ends in a value or in an error that says what is
//! wrong and where, within a small multiple of the memory of its input.
//!
//! ```
//! use sterna_format::gguf::{Gguf, GgufError, Metadata, Model, Value, Writer};
//! use sterna_format::DType;
//!
//! // A file, written here, fetched elsewhere.
//! let mut metadata = Metadata::new();
//! metadata.insert("general.architecture", Value::String("llama".into()))?;
//! let mut writer = Writer::new(metadata)?;
//! writer.tensor("token_embd.weight", DType::Q8_0, &[512, 64])?;
//! let file = writer.finish();
//!
//! // The header is read from the first bytes; too few are an error that says so.
//! let first = Gguf::parse(&file.header[..32], file.file_len);
//! assert!(matches!(first, Err(GgufError::NeedMore { .. })));
//! let header = Gguf::parse(&file.header, file.file_len)?;
//!
//! let model = Model::from_parts(vec![header])?;
//! assert_eq!(model.metadata().architecture()?, Some("llama"));
//! let embeddings = model.tensors().get("token_embd.weight").unwrap();
//! assert_eq!(embeddings.shape, [512, 64]);
//! # Ok::<(), GgufError>(())
//! ```
#![forbid(unsafe_code)]

mod budget;
pub mod bundle;
mod catalog;
pub mod delta;
pub mod digest;
mod dtype;
mod file_name;
pub mod gguf;
pub mod hadamard;
pub mod hf;
mod json;
pub mod model;
pub mod names;
pub mod rdrr;
pub mod safetensors;

pub use catalog::{FileLayout, TensorCatalog, TensorEntry};
pub use dtype::{DType, I2sLayout, UnknownI2sLayout};
