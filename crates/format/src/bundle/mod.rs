//! The files of engine bundles, and the manifest that they are made from; see
//! `docs/formats/engine-bundle.md`.
//!
//! [`Manifest`] says which ranges of which files are to become tensors, and how. [`TensorFile`],
//! [`RopeFile`] and [`LoraFile`] are the headers of `qmodel.tensors`, `rope.cache` and `qmodel.lora`,
//! each of which lays out what is to be written and reads it back. [`tensor_names`] knows what the
//! tensors are called, which no file says.

mod codes;
mod error;
mod extent;
mod lora;
mod manifest;
mod metadata;
mod names;
mod read;
mod rope;
mod tensors;

pub use codes::{Action, ActivationType, ArchType, LoraTarget, SourceType, UnknownArch};
pub use error::{BundleError, Location};
pub use lora::{LoraFile, LoraPair, StoredMatrix};
pub use manifest::{
    LoraBlock, LoraSource, Manifest, ManifestTensor, MatrixSource, Section, ShardRange,
};
pub use metadata::{BundleKind, BundleMetadata, METADATA_FILE, METADATA_VERSION, identity};
pub use names::{Names, layer_order, tensor_names};
pub use rope::RopeFile;
pub use tensors::{ModelFacts, StoredTensor, TensorFile, TensorForm};

/// The weights of a model; see [`TensorFile`].
pub const TENSORS_FILE: &str = "qmodel.tensors";
/// The parameters of its rotary embedding; see [`RopeFile`].
pub const ROPE_FILE: &str = "rope.cache";
/// The matrices of an adapter; see [`LoraFile`].
pub const LORA_FILE: &str = "qmodel.lora";
