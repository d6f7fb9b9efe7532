//! RDRR packages: a manifest, a tensor map and shards; see `docs/formats/rdrr.md`.
//!
//! [`Manifest::parse`] and [`TensorMap::parse`] bring every spelling in use to one and say
//! everything that is wrong at once; [`Package::new`] checks that the two and the component groups
//! fit together. [`Manifest::to_json`] and [`TensorMap::to_json`] are the inverse.
//! Nothing here reads shards or computes hashes.
//!
//! ```
//! use sterna_format::rdrr::{Manifest, Package};
//!
//! let manifest = br#"{
//!     "version": 1, "modelId": "tiny", "modelType": "transformer", "quantization": "F32",
//!     "hashAlgorithm": "sha256",
//!     "architecture": { "numLayers": 1, "hiddenSize": 2, "intermediateSize": 4,
//!         "numAttentionHeads": 1, "vocabSize": 3, "maxSeqLen": 8 },
//!     "shards": [{ "index": 0, "fileName": "shard_00000.bin", "size": 24,
//!         "hash": "0000000000000000000000000000000000000000000000000000000000000000" }],
//!     "tensors": { "model.embed_tokens.weight":
//!         { "shard": 0, "offset": 0, "size": 24, "shape": [3, 2], "dtype": "F32" } },
//!     "totalSize": 24
//! }"#;
//! let package = Package::new(Manifest::parse(manifest)?, None)?;
//! let embeddings = package.tensors().get("model.embed_tokens.weight").unwrap();
//! assert_eq!(embeddings.pieces()[0].size, 24);
//!
//! let problems = Manifest::parse(br#"{ "version": 3, "shards": [] }"#).unwrap_err();
//! assert!(problems.to_string().starts_with("version: expected 1 or 0.x, found 3"));
//! # Ok::<(), sterna_format::rdrr::Problems>(())
//! ```

mod fields;
mod files;
pub mod groups;
mod hf_config;
pub mod hints;
pub mod lora;
mod manifest;
pub mod naming;
mod package;
mod problem;
mod read;
mod tensors;
mod write;

pub use crate::file_name::is_plain_file_name;
pub use files::{MANIFEST_FILE, TENSORS_FILE, shard_file_name};
pub use groups::GroupKind;
pub use hf_config::{HfConfig, hf_config};
pub use hints::{MalformedHint, RuntimeOptimizations};
pub use manifest::{
    Architecture, BlockMerkle, FileHash, Group, Integrity, LoraConfig, Manifest, ModelShape,
    MoeConfig, QuantizationInfo, Shard, ShardBlocks, TokenizerEntry, Version,
};
pub use package::Package;
pub use problem::{Problem, Problems};
pub use tensors::{Layout, Packing, Role, Span, Tensor, TensorMap, TensorType};

/// Where tensors start within shards: at multiples of this many bytes.
pub const TENSOR_ALIGNMENT: u64 = 4096;
/// The usual size of a shard, in bytes.
pub const SHARD_SIZE: u64 = 64 << 20;
