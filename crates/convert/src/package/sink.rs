//! Where a package's files go.

use std::ops::Range;

use bytes::Bytes;
use sterna::{Result, bail};

/// Takes the files of a package: a folder, memory, the storage of a browser.
///
/// Shards come one after another, then the other files, the manifest last.
pub trait PackageSink {
    /// Writes `bytes` to the end of shard `index`.
    ///
    /// Errors: it can't be written.
    fn append(&mut self, index: usize, bytes: Bytes) -> Result<()>;

    /// Shard `index`, of `len` bytes, is complete.
    ///
    /// Errors: it can't be written.
    fn end_shard(&mut self, index: usize, len: u64) -> Result<()>;

    /// Writes the file called `name`.
    ///
    /// Errors: it can't be written.
    fn put(&mut self, name: &str, bytes: Bytes) -> Result<()>;

    /// How many shards are complete, those of an interrupted conversion included, which aren't written again.
    fn n_finished(&self) -> usize {
        0
    }

    /// Bytes of a complete shard.
    ///
    /// Errors: it can't be read.
    fn read_back(&mut self, index: usize, range: Range<u64>) -> Result<Bytes> {
        bail!(Io, "shard {index}: {range:?} can't be read back")
    }
}
