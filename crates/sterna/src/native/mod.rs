//! Models on this machine: finding their files, reading and verifying them on several threads.

#[cfg(feature = "builtin")]
mod builtin;
mod device;
mod experts;
mod files;
mod find;
mod local;
mod names;
mod open;
mod saved;
mod shards;

#[cfg(feature = "builtin")]
pub use builtin::{BUILTIN, builtin};
pub use device::*;
pub use experts::ExpertsInMemory;
pub use files::{
    FileSet, IncomingFiles, LocalFolder, MemoryFiles, SourceFile, StoredFiles, expect_file,
};
pub use find::Located;
#[cfg(test)]
pub(crate) use local::tests::{loaded, opened};
pub use local::{LoadFrom, LocalModel, Weights, open_adapter, read_package, read_small};
pub use names::stem;
pub use open::{Options, load, open};
pub use saved::{SequenceFolder, SequenceLabel, StoredSequence};
