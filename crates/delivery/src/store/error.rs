//! Why an operation of the store failed.

use std::{io, path::PathBuf};

use super::Blob;

/// Why an operation of the store failed. Everything that was in the store before is still there.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A system error: no space, no permission, a failing disk.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// The operation, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// The system's message.
        source: io::Error,
    },
    /// A name that isn't portable between file systems.
    #[error("{kind} name {name:?}: {problem}")]
    Name {
        /// What the name is for: `model` or `file`.
        kind: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Two names that differ only in case.
    #[error("{kind} name {name:?}: there is {existing:?} already, which differs in case only")]
    NameTaken {
        /// What the name is for: `model` or `file`.
        kind: &'static str,
        /// The requested name.
        name: String,
        /// The existing name.
        existing: String,
    },
    /// No model of this name is in the store.
    #[error("no model {name:?} in the store at {}", root.display())]
    NoSuchModel {
        /// The requested name.
        name: String,
        /// Where the store is.
        root: PathBuf,
    },
    /// Another process is fetching the model.
    #[error("model {name:?}: another process is fetching it")]
    Busy {
        /// The model.
        name: String,
    },
    /// The store can't be written by this user. It can be read.
    #[error("the store at {} can be read but not written", root.display())]
    Unwritable {
        /// Where the store is.
        root: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// An index file that holds something else than it should.
    #[error("{}: {problem}", path.display())]
    Index {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        problem: String,
    },
    /// Nothing says reliably which files belong to a model: what names its revision, or the revision, is
    /// missing or has changed. Fetching the model again repairs it; it can be removed, too.
    #[error("model {name:?}: its index is damaged")]
    DamagedIndex {
        /// The model.
        name: String,
        /// Where it came from, if that can be told.
        origin: Option<String>,
        /// What is wrong, and where.
        source: Box<StoreError>,
    },
    /// A file of a model that is not there, or was found damaged and put aside. Fetching the model
    /// again repairs it.
    #[error("model {name:?}, file {file:?}: {problem}; fetch the model again to repair it")]
    Damaged {
        /// The model.
        name: String,
        /// The first file concerned.
        file: String,
        /// What was expected and found.
        problem: String,
    },
    /// A write, a piece or a group that exceeds its blob.
    #[error("{blob}: wanted {len} bytes at offset {offset}, but it has {}", blob.size)]
    OutOfBounds {
        /// The blob.
        blob: Blob,
        /// First byte requested.
        offset: u64,
        /// Bytes requested.
        len: u64,
    },
    /// A commit of an incomplete blob.
    #[error("{blob}: expected {} bytes, found {found}", blob.size)]
    Incomplete {
        /// The blob.
        blob: Blob,
        /// Bytes that have arrived.
        found: u64,
    },
    /// Bytes with a wrong digest. Those that were arriving are discarded.
    #[error("{blob}: {problem}")]
    Mismatch {
        /// The blob.
        blob: Blob,
        /// Both digests.
        problem: crate::hash::Mismatch,
    },
    /// A published entry with a blob that the store does not have completely.
    #[error("file {file:?}: {blob} is not in the store")]
    MissingBlob {
        /// The file of the entry, or the piece of a group.
        file: String,
        /// The blob.
        blob: Blob,
    },
}

impl StoreError {
    /// For `map_err`: the operation attempted with `path`.
    pub(super) fn io(
        action: &'static str,
        path: impl Into<PathBuf>,
    ) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io {
            action,
            path,
            source,
        }
    }
}
