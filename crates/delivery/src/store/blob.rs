//! Blobs, and the paths of a store.

use std::{
    collections::BTreeSet,
    fmt, fs,
    path::{Path, PathBuf},
};

use crate::hash::{Algorithm, Digest, digest_of};

use super::{
    StoreError, disk,
    incoming::{self, Trust},
    name, pull,
};

/// A run of bytes, identified by its digest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Blob {
    /// The digest of the bytes.
    pub digest: Digest,
    /// Its size.
    pub size: u64,
}

impl Blob {
    /// The blob with the contents `bytes`.
    pub fn of(algorithm: Algorithm, bytes: &[u8]) -> Self {
        Self {
            digest: digest_of(algorithm, bytes),
            size: bytes.len() as u64,
        }
    }

    /// Checks that `len` bytes at `offset` are within it; returns their end.
    pub(super) fn end_of(&self, offset: u64, len: u64) -> Result<u64, StoreError> {
        (offset.checked_add(len).filter(|end| *end <= self.size)).ok_or(StoreError::OutOfBounds {
            blob: *self,
            offset,
            len,
        })
    }
}

impl fmt::Display for Blob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.digest.algorithm(), self.digest)
    }
}

/// Part of a blob.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The blob.
    pub blob: Blob,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// The paths under the root of a store.
#[derive(Debug, Clone)]
pub(super) struct Layout {
    pub(super) root: PathBuf,
}

impl Layout {
    /// Held shared briefly, while something is looked up or given its name; held exclusively while something
    /// is deleted.
    pub(super) fn lock(&self) -> PathBuf {
        self.root.join("lock")
    }

    pub(super) fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub(super) fn blob(&self, digest: &Digest) -> PathBuf {
        let hex = digest.to_string();
        let folder = self.blobs().join(digest.algorithm().name());
        folder.join(&hex[..2]).join(hex)
    }

    pub(super) fn models(&self) -> PathBuf {
        self.root.join("models")
    }

    /// The folder with the revisions of a model, and the file that says which one is current.
    pub(super) fn model(&self, name: &str) -> PathBuf {
        self.models().join(name::key(name))
    }

    /// The folders that a model may lie in, and the keys of their names. Others are none of ours.
    pub(super) fn model_folders(&self) -> Result<Vec<(String, PathBuf)>, StoreError> {
        let keys = disk::names_in(&self.models())?.into_iter();
        Ok(keys
            .filter(|name| name::is_key(name))
            .map(|key| (key.clone(), self.models().join(key)))
            .filter(|(_, folder)| folder.is_dir())
            .collect())
    }

    /// Models that are being fetched or were, by the keys of their names. Other files are none of ours.
    pub(super) fn fetches(&self) -> Result<BTreeSet<String>, StoreError> {
        let has_claims = |key: &str| self.fetching(key).join(pull::CLAIMS).exists();
        let is_ours = |name: &str| match name.strip_prefix('.') {
            Some(key) if name::is_key(key) => {
                // Nothing is ever written to a lock.
                let size = disk::file_size(&self.fetching_lock(key));
                (has_claims(key) || matches!(size, Ok(Some(0)))).then(|| key.to_owned())
            }
            None if name::is_key(name) && has_claims(name) => Some(name.to_owned()),
            _ => None,
        };
        let names = disk::names_in(&self.partial())?;
        Ok(names.iter().filter_map(|name| is_ours(name)).collect())
    }

    pub(super) fn partial(&self) -> PathBuf {
        self.root.join("partial")
    }

    /// The folder of what is being fetched for a model.
    pub(super) fn fetching(&self, name: &str) -> PathBuf {
        self.partial().join(name::key(name))
    }

    /// Held by the process that fetches the model.
    pub(super) fn fetching_lock(&self, name: &str) -> PathBuf {
        // No name of a model begins like this, so no two of these are the same.
        self.partial().join(format!(".{}", name::key(name)))
    }

    /// The folder of damaged blobs.
    pub(super) fn damaged(&self) -> PathBuf {
        self.root.join("damaged")
    }

    /// What is wrong with the file of `blob`; `None` if its contents are right. A damaged one is set aside.
    ///
    /// To be called while something keeps the blob from being deleted.
    pub(super) fn problem_with(
        &self,
        blob: &Blob,
        trust: Trust,
    ) -> Result<Option<String>, StoreError> {
        let path = self.blob(&blob.digest);
        let problem = incoming::problem_in(&path, blob, trust)?;
        if problem.is_some() && path.exists() {
            self.put_aside(blob)?;
        }
        Ok(problem)
    }

    /// True if there is a file for `blob`, of its size. One of another size is damaged, or `blob` is wrong;
    /// either way fetching finds out.
    ///
    /// To be called while the store's lock is held.
    pub(super) fn has(&self, blob: &Blob) -> Result<bool, StoreError> {
        let size = disk::file_size(&self.blob(&blob.digest))?;
        Ok(size == Some(blob.size))
    }

    /// Takes the damaged file of a blob out of sight, unless this user can't.
    fn put_aside(&self, blob: &Blob) -> Result<(), StoreError> {
        let path = &self.blob(&blob.digest);
        match self.move_aside(blob, path) {
            Err(StoreError::Io { source, .. })
                if disk::is_unwritable(&source)
                    // Another process has done it.
                    || source.kind() == std::io::ErrorKind::NotFound =>
            {
                Ok(())
            }
            result => result,
        }
    }

    fn move_aside(&self, blob: &Blob, path: &Path) -> Result<(), StoreError> {
        let failed = || StoreError::io("put aside the damaged", path);
        if path.is_dir() {
            return disk::clear_way(path).map_err(failed());
        }
        let folder = self.damaged();
        disk::create_folder(&folder)?;
        let to = folder.join(format!("{}-{}", blob.digest.algorithm(), blob.digest));
        disk::clear_way(&to).map_err(failed())?;
        fs::rename(path, &to).map_err(failed())
    }
}
