//! Why the store could not do what it was asked.

use std::{io, path::PathBuf};

use super::Blob;

/// Why the store could not do what it was asked. Whatever it says, everything that was in the store
/// before is there still.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// The system refused: no room, no permission, a failing disk.
    #[error("{}: cannot {action}", path.display())]
    Io {
        /// What was attempted, as a verb.
        action: &'static str,
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A name that some file system would take for something else.
    #[error("{kind} name {name:?}: {problem}")]
    Name {
        /// What was to be named: `model` or `file`.
        kind: &'static str,
        /// The name.
        name: String,
        /// What is wrong with it.
        problem: &'static str,
    },
    /// Two names that differ in the case of letters only.
    #[error("{kind} name {name:?}: there is {existing:?} already, which differs in case only")]
    NameTaken {
        /// What was to be named: `model` or `file`.
        kind: &'static str,
        /// The name asked for.
        name: String,
        /// The name in the way.
        existing: String,
    },
    /// No model of this name is in the store.
    #[error("no model {name:?} in the store at {}", root.display())]
    NoSuchModel {
        /// The name asked for.
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
    /// A write, a piece or a group that reaches outside its blob.
    #[error("{blob}: wanted {len} bytes at offset {offset}, but it has {}", blob.size)]
    OutOfBounds {
        /// The blob.
        blob: Blob,
        /// First byte wanted.
        offset: u64,
        /// Bytes wanted.
        len: u64,
    },
    /// A blob that was to be made visible before all of it was there.
    #[error("{blob}: expected {} bytes, found {found}", blob.size)]
    Incomplete {
        /// The blob.
        blob: Blob,
        /// Bytes that are there.
        found: u64,
    },
    /// Bytes that are not those the digest was made of. Those that were arriving are discarded.
    #[error("{blob}: {problem}")]
    Mismatch {
        /// The blob.
        blob: Blob,
        /// Both digests.
        problem: crate::hash::Mismatch,
    },
    /// An entry to be published that names a blob which the store does not have whole.
    #[error("file {file:?}: {blob} is not in the store")]
    MissingBlob {
        /// The file of the entry, or the piece of a group.
        file: String,
        /// The blob.
        blob: Blob,
    },
}

impl StoreError {
    /// For `map_err`: what was attempted with `path`.
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
