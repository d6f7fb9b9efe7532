//! Destinations of fetched bytes.

use std::{
    io,
    ops::Range,
    path::{Path, PathBuf},
};

use super::{Blob, RangeSet};
use crate::hash::Verified;

/// A destination for blobs: stores their bytes as they arrive, in any order, invisible until
/// [`commit`](Self::commit).
///
/// Several threads call it at once, also for one blob, but never for overlapping ranges of it.
pub trait Sink: Sync {
    /// What is stored of a blob, called once and before anything else.
    fn present(&self, blob: &Blob) -> Result<Present, SinkError>;

    /// Stores `bytes` at `offset`.
    fn write_at(&self, blob: &Blob, offset: u64, bytes: &[u8]) -> Result<(), SinkError>;

    /// Reads the stored bytes at `offset`.
    fn read_at(&self, blob: &Blob, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError>;

    /// Forgets a range, so that [`present`](Self::present) doesn't report it the next time. Other bytes of
    /// the blob stay, including those that are being written concurrently.
    fn discard(&self, blob: &Blob, range: Range<u64>) -> Result<(), SinkError>;

    /// Makes a blob visible and durable. All its bytes are stored, and were verified as `verified` says.
    fn commit(&self, blob: &Blob, verified: Verified) -> Result<(), SinkError>;
}

/// What a sink has of a blob.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Present {
    /// All of it, committed and right.
    Complete,
    /// Bytes that an earlier fetch stored. They are verified before they are trusted.
    Parts(RangeSet),
}

/// Why bytes could not be stored. Nothing stored before is lost: the next fetch resumes from it.
#[derive(Debug, thiserror::Error)]
#[error("{}: cannot {action}", path.display())]
pub struct SinkError {
    /// The file.
    pub path: PathBuf,
    /// The operation: `write`, `rename`.
    pub action: &'static str,
    /// The system's message.
    pub source: io::Error,
}

impl SinkError {
    /// For `map_err`: the error of trying `action` on `path`.
    pub fn of(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| Self {
            path: path.to_owned(),
            action,
            source,
        }
    }
}
