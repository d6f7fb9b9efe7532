//! The revisions of a model: index files that never change, and the file that says which one is current.
//!
//! `models/NAME/REVISION.json` is written before `models/NAME/current`, which contains REVISION. Readers of a
//! revision hold a shared lock on its file, so that its blobs stay after it is replaced.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
};

use crate::hash::{Algorithm, Digest, Expected, digest_of};

use super::{Entry, StoreError, blob::Layout, disk, disk::Lock, index, name};

/// The file that says which revision counts.
pub(super) const MARK: &str = "current";
/// Longest mark that is read.
const MAX_MARK_BYTES: u64 = 256;

/// A revision that was read, its index file open.
pub(super) struct Revision {
    pub(super) path: PathBuf,
    file: File,
    /// The model's name.
    pub(super) name: String,
    pub(super) entry: Entry,
}

impl Revision {
    /// Reads the index file at `path`, and checks that it is the one of that name.
    pub(super) fn read(path: PathBuf) -> Result<Self, StoreError> {
        let file = File::open(&path).map_err(StoreError::io("open", &path))?;
        let bytes = disk::read_bounded(&file, &path, index::MAX_INDEX_BYTES)?;
        let wrong = |problem| StoreError::Index {
            path: path.clone(),
            problem,
        };
        if let Some(digest) = digest_in(&path) {
            let verified = Expected::Digest(digest).verify(&bytes);
            verified.map_err(|mismatch| wrong(mismatch.to_string()))?;
        }
        let (name, entry) = Entry::parse(&bytes, &path)?;
        let folder = path.parent().and_then(Path::file_name);
        if folder.is_none_or(|folder| folder != name::key(&name).as_str()) {
            return Err(wrong(format!("is of the model {name:?}")));
        }
        Ok(Self {
            path,
            file,
            name,
            entry,
        })
    }

    /// Keeps a sweep from deleting the revision and what it names.
    pub(super) fn hold(self) -> Result<(Entry, Lock), StoreError> {
        Ok((self.entry, disk::share_file(self.file, &self.path)?))
    }
}

/// The digest that an index file is named by.
fn digest_in(path: &Path) -> Option<Digest> {
    let hex = path.file_name()?.to_str()?.strip_suffix(".json")?;
    let digest = Digest::from_hex(Algorithm::Sha256, hex).ok()?;
    (digest.to_string() == hex).then_some(digest)
}

/// The revision in `folder` that counts; `None` if there is no such model. To be called with the store's lock
/// held.
///
/// Errors: what should say it doesn't, or the revision isn't whole.
pub(super) fn current(folder: &Path) -> Result<Option<Revision>, StoreError> {
    let Some(revision) = mark(folder)? else {
        return Ok(None);
    };
    let path = folder.join(format!("{revision}.json"));
    match Revision::read(path.clone()) {
        Err(StoreError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            let problem = "is missing".to_owned();
            Err(StoreError::Index { path, problem })
        }
        result => result.map(Some),
    }
}

/// Which revision in `folder` counts, as far as its mark says.
pub(super) fn mark(folder: &Path) -> Result<Option<Digest>, StoreError> {
    let path = folder.join(MARK);
    let file = match File::open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(StoreError::io("open", &path)(e)),
    };
    let mark = disk::read_bounded(&file, &path, MAX_MARK_BYTES)?;
    (std::str::from_utf8(&mark).ok())
        .and_then(|text| Digest::from_hex(Algorithm::Sha256, text.trim_end()).ok())
        .map(Some)
        .ok_or_else(|| StoreError::Index {
            path: path.clone(),
            problem: match mark.len() {
                0 => "expected the 64 digits of a revision, found an empty file".to_owned(),
                n => format!("expected the 64 digits of a revision, found {n} other bytes"),
            },
        })
}

/// The index files of all revisions in `folder`, the current one too.
pub(super) fn all(folder: &Path) -> Result<Vec<PathBuf>, StoreError> {
    let paths = disk::names_in(folder)?.into_iter();
    Ok(paths
        .map(|name| folder.join(name))
        .filter(|path| digest_in(path).is_some() && path.is_file())
        .collect())
}

/// The last revision that can be read in the `folder` of a damaged model.
pub(super) fn salvage(folder: &Path) -> Option<Revision> {
    let revisions = all(folder).ok()?.into_iter();
    revisions
        .filter_map(|path| Revision::read(path).ok())
        .max_by_key(|revision| revision.entry.published)
}

/// True if nobody holds the index file at `path`. A lock taken to find out is released at once.
pub(super) fn is_free(path: &Path) -> Result<bool, StoreError> {
    let file = File::open(path).map_err(StoreError::io("open", path))?;
    Ok(disk::try_lock_file(file, path)?.is_some())
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
        &scratch.join(SCRATCH[0]),
        bytes,
    )?;
    let mark = format!("{revision}\n");
    disk::replace(
        &folder.join(MARK),
        &scratch.join(SCRATCH[1]),
        mark.as_bytes(),
    )
}

/// The names of files that [`publish`] writes in its scratch folder.
pub(super) const SCRATCH: [&str; 2] = ["index", "mark"];

/// Makes no revision the current one.
pub(super) fn unpublish(folder: &Path) -> Result<(), StoreError> {
    let mark = folder.join(MARK);
    disk::clear_way(&mark).map_err(StoreError::io("take away the folder", &mark))?;
    disk::delete(&mark)?;
    disk::sync_folder(folder)
}
