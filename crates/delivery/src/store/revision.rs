//! The revisions of a model: index files that never change, and the file that says which one is current.
//!
//! `models/NAME/REVISION.json` is written before `models/NAME/current`, which contains REVISION. Readers of a
//! revision hold a shared lock on its file, so that its blobs stay after it is replaced.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use crate::hash::{Algorithm, Digest, digest_of};

use super::{Entry, StoreError, blob::Layout, disk, disk::Lock, index};

/// The file that says which revision is current.
const MARK: &str = "current";
/// Maximum size of that file.
const MAX_MARK_BYTES: u64 = 256;

/// The index file of a revision, open.
pub(super) struct Revision {
    pub(super) path: PathBuf,
    file: File,
}

impl Revision {
    fn open(path: PathBuf) -> Result<Self, StoreError> {
        let file = File::open(&path).map_err(StoreError::io("open", &path))?;
        Ok(Self { path, file })
    }

    /// The model's name and entry.
    pub(super) fn read(&self) -> Result<(String, Entry), StoreError> {
        let bytes = disk::read_bounded(&self.file, &self.path, index::MAX_INDEX_BYTES)?;
        Entry::parse(&bytes, &self.path)
    }

    /// Keeps a sweep from deleting the revision and its blobs.
    pub(super) fn hold(self) -> Result<Lock, StoreError> {
        disk::share_file(self.file, &self.path)
    }

    /// True if it isn't locked. A lock taken to find out is released at once.
    pub(super) fn is_free(&self) -> Result<bool, StoreError> {
        let file = File::open(&self.path).map_err(StoreError::io("open", &self.path))?;
        Ok(disk::try_lock_file(file, &self.path)?.is_some())
    }
}

/// The current revision in `folder`. To be called with the store's lock held.
pub(super) fn current(folder: &Path) -> Result<Option<Revision>, StoreError> {
    let path = folder.join(MARK);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(StoreError::io("open", &path)(e)),
    };
    let mark = disk::read_bounded(&file, &path, MAX_MARK_BYTES)?;
    let revision = (std::str::from_utf8(&mark).ok())
        .and_then(|text| Digest::from_hex(Algorithm::Sha256, text.trim_end()).ok())
        .ok_or_else(|| StoreError::Index {
            path: path.clone(),
            problem: "expected the 64 digits of a revision".to_owned(),
        })?;
    let path = folder.join(format!("{revision}.json"));
    match Revision::open(path.clone()) {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            let problem = "is missing".to_owned();
            Err(StoreError::Index { path, problem })
        }
        result => result.map(Some),
    }
}

/// All revisions in `folder`, including the current one.
pub(super) fn all(folder: &Path) -> Result<Vec<Revision>, StoreError> {
    let names = disk::names_in(folder)?.into_iter();
    names
        .filter(|name| name.ends_with(".json"))
        .map(|name| Revision::open(folder.join(name)))
        .collect()
}

/// Makes the index file `bytes` the current revision of `name`. `scratch` is a folder of the caller's own. To
/// be called with the store's lock held.
pub(super) fn publish(
    layout: &Layout,
    name: &str,
    scratch: &Path,
    bytes: &[u8],
) -> Result<(), StoreError> {
    let folder = layout.model(name);
    disk::create_folder(&folder)?;
    let revision = digest_of(Algorithm::Sha256, bytes);
    disk::replace(
        &folder.join(format!("{revision}.json")),
        &scratch.join("index"),
        bytes,
    )?;
    let mark = format!("{revision}\n");
    disk::replace(&folder.join(MARK), &scratch.join("mark"), mark.as_bytes())
}

/// Removes the current revision.
pub(super) fn unpublish(folder: &Path) -> Result<(), StoreError> {
    disk::delete(&folder.join(MARK))?;
    disk::sync_folder(folder)
}
