//! The store: models on this machine, with each run of bytes stored once.
//!
//! Bytes are stored under their digest, so that two revisions of a model, or two models, share what they have
//! in common. A model is a name for a list of files and their digests. The store is agnostic of what the
//! bytes mean.
//!
//! ```text
//! ROOT/blobs/sha256/ab/abcdef…    verified bytes; the files never change, and are dated to show it
//! ROOT/models/NAME/REVISION.json  the files of a revision: written after its blobs
//! ROOT/models/NAME/current        which revision counts: written last
//! ROOT/partial/NAME/…             what is arriving for a model, and what its pull needs
//! ROOT/partial/.NAME              locked while the model is fetched
//! ROOT/damaged/…                  files that were found to have changed
//! ROOT/lock                       held for moments: shared to look up and to name, exclusively to delete
//! ```
//!
//! Any process may be killed at any moment: what it had verified stays, what it had received is resumed by
//! the next pull of that model, and [`Store::gc`] deletes what nothing needs. Several processes may use one
//! store, on a file system that supports file locks.
//!
//! ```
//! use sterna_delivery::{hash::Algorithm, store::{Blob, Entry, Store}};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let folder = tempfile::tempdir()?;
//! let store = Store::open(folder.path())?;
//! let pull = store.pull("tiny")?;
//! let shard = Blob::of(Algorithm::Sha256, b"weights");
//! if pull.present(&shard)? < shard.size {
//!     pull.write_at(&shard, 0, b"weights")?;
//!     pull.commit(&shard)?;
//! }
//! let mut entry = Entry::new("https://example.org/tiny");
//! entry.files.insert("manifest.json".into(), pull.put(Algorithm::Sha256, b"{}")?);
//! entry.files.insert("shard_00000.bin".into(), shard);
//! pull.publish(&entry)?;
//!
//! let model = store.model("tiny")?;
//! assert_eq!(std::fs::read(&model.paths()["shard_00000.bin"])?, b"weights");
//! # Ok(())
//! # }
//! ```

mod blob;
mod disk;
mod error;
mod extents;
mod incoming;
mod index;
mod name;
mod pull;
mod revision;
mod seal;
mod sink;
mod sweep;

use std::{
    collections::{BTreeMap, HashMap},
    fs::File,
    path::{Path, PathBuf},
};

use crate::hash::{Digest, Expected};

use self::{blob::Layout, disk::Lock, incoming::Trust, revision::Revision};

pub use self::{
    blob::{Blob, Piece},
    error::StoreError,
    index::{Entry, Group},
    pull::Pull,
};

/// A folder of models. Cheap to open and to clone; nothing of it is cached in memory.
#[derive(Debug, Clone)]
pub struct Store {
    layout: Layout,
}

/// A model in the store. While it lives, its files stay, whatever is published or removed meanwhile.
///
/// On Unix, files that are open or mapped stay readable after that too. Windows refuses to delete such
/// files; then the next [`Store::gc`] does.
#[derive(Debug)]
pub struct Model {
    name: String,
    entry: Entry,
    paths: BTreeMap<String, PathBuf>,
    _lock: Lock,
}

/// An entry of [`Store::list`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub name: String,
    /// Its files and origin.
    pub entry: Entry,
    /// Bytes that no other model has: what removing it frees.
    pub own_bytes: u64,
    /// Bytes that other models also have.
    pub shared_bytes: u64,
}

/// A file of a model that has changed since it was verified.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: String,
    /// Its expected contents.
    pub blob: Blob,
    /// What was expected and found.
    pub problem: String,
}

/// What to do with pulls that are not in progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interrupted {
    /// Keep what has arrived, for a later pull to resume.
    Keep,
    /// Delete it.
    Drop,
}

/// What [`Store::gc`] deleted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Swept {
    /// Blobs that no model, reader or pull needed, and damaged ones.
    pub n_blobs: usize,
    /// Bytes in all files deleted.
    pub bytes: u64,
    /// Files that the system keeps because they are in use (Windows only); to be deleted another time.
    pub n_in_use: usize,
}

/// A snapshot of where groups of bytes are in the store.
#[derive(Debug, Clone, Default)]
pub struct Groups(HashMap<Digest, Vec<Piece>>);

impl Store {
    /// Opens the store in the folder `root`, which is created if need be.
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let layout = Layout { root: root.into() };
        for folder in [layout.blobs(), layout.models(), layout.partial()] {
            disk::create_folder(&folder)?;
        }
        // Fails at once if the file system has no locks.
        disk::lock_shared(&layout.lock())?;
        Ok(Self { layout })
    }

    /// Its folder.
    pub fn root(&self) -> &Path {
        &self.layout.root
    }

    /// Begins to fetch the model `name`, or resumes. Waits while another process fetches it.
    ///
    /// Errors: [`StoreError::Name`] for a name that some system can't have; [`StoreError::NameTaken`] if
    /// one that differs in case only is in use.
    pub fn pull(&self, name: &str) -> Result<Pull, StoreError> {
        loop {
            match self.try_pull(name) {
                Err(StoreError::Busy { .. }) => {
                    // Waited for without the store's lock, so it may be the lock of a file that was deleted
                    // meanwhile. Then it is released, and everything is retried.
                    drop(disk::lock(&self.layout.fetching_lock(name))?);
                }
                result => return result,
            }
        }
    }

    /// As [`pull`](Self::pull), but fails with [`StoreError::Busy`] instead of waiting.
    pub fn try_pull(&self, name: &str) -> Result<Pull, StoreError> {
        name::check_model(name)?;
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let lock = disk::try_lock(&self.layout.fetching_lock(name))?;
        let lock = lock.ok_or_else(|| StoreError::Busy {
            name: name.to_owned(),
        })?;
        match self.spelt_like(name) {
            Ok(Some((_, existing, _))) if existing != name => {
                return Err(StoreError::NameTaken {
                    kind: "model",
                    name: name.to_owned(),
                    existing,
                });
            }
            // An unreadable entry is replaced when this pull is published.
            Ok(_) | Err(StoreError::Index { .. }) => {}
            Err(error) => return Err(error),
        }
        Pull::begin(self.layout.clone(), name, lock)
    }

    /// The model `name`, for reading.
    ///
    /// Its files exist, have the right sizes, and were not written to since they were verified, as far as
    /// their dates show; one that was is hashed again. [`verify`](Self::verify) hashes all.
    ///
    /// Errors: [`StoreError::NoSuchModel`]; [`StoreError::Damaged`] if a file has changed, which is then set
    /// aside.
    pub fn model(&self, name: &str) -> Result<Model, StoreError> {
        let (entry, lock) = self.hold(name)?;
        let mut paths = BTreeMap::new();
        for (file, blob) in &entry.files {
            if let Some(problem) = self.layout.problem_with(blob, Trust::Seal)? {
                return Err(StoreError::Damaged {
                    name: name.to_owned(),
                    file: file.clone(),
                    problem,
                });
            }
            paths.insert(file.clone(), self.layout.blob(&blob.digest));
        }
        Ok(Model {
            name: name.to_owned(),
            entry,
            paths,
            _lock: lock,
        })
    }

    /// The verified bytes of `blob`: for small files, of at most `limit` bytes.
    ///
    /// Errors: [`StoreError::Io`] if it isn't there; [`StoreError::Mismatch`] if it has changed;
    /// [`StoreError::Index`] if it is larger.
    pub fn read(&self, blob: &Blob, limit: u64) -> Result<Vec<u8>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let path = self.layout.blob(&blob.digest);
        let file = File::open(&path).map_err(StoreError::io("open", &path))?;
        let bytes = disk::read_bounded(&file, &path, limit)?;
        match Expected::Digest(blob.digest).verify(&bytes) {
            Ok(_) => Ok(bytes),
            Err(problem) => Err(StoreError::Mismatch {
                blob: *blob,
                problem,
            }),
        }
    }

    /// Reads all bytes of the model `name` and compares them with their digests. Files that have changed are
    /// set aside, so that fetching the model again fetches only them.
    pub fn verify(&self, name: &str) -> Result<Vec<Damage>, StoreError> {
        let (entry, _lock) = self.hold(name)?;
        let mut damages = Vec::new();
        for (file, blob) in entry.files {
            if let Some(problem) = self.layout.problem_with(&blob, Trust::Nothing)? {
                damages.push(Damage {
                    file,
                    blob,
                    problem,
                });
            }
        }
        Ok(damages)
    }

    /// The entry of the model `name`, and what keeps its files from being deleted.
    fn hold(&self, name: &str) -> Result<(Entry, Lock), StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let (revision, entry) = self.current(name)?;
        Ok((entry, revision.hold()?))
    }

    /// All models, by name.
    pub fn list(&self) -> Result<Vec<Listed>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let models = self.entries()?;
        let mut users: HashMap<Digest, usize> = HashMap::new();
        for (_, entry) in &models {
            for digest in digests(entry).into_keys() {
                *users.entry(digest).or_default() += 1;
            }
        }
        let listed = models.into_iter().map(|(name, entry)| {
            let (mut own_bytes, mut shared_bytes) = (0_u64, 0_u64);
            for (digest, size) in digests(&entry) {
                let sum = if users[&digest] == 1 {
                    &mut own_bytes
                } else {
                    &mut shared_bytes
                };
                *sum = sum.saturating_add(size);
            }
            Listed {
                name,
                entry,
                own_bytes,
                shared_bytes,
            }
        });
        Ok(listed.collect())
    }

    /// Interrupted pulls that left bytes that a later one could resume: lower-case names, and bytes. Those in
    /// progress are not among them.
    pub fn interrupted(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let mut found = Vec::new();
        for name in disk::names_in(&self.layout.partial())? {
            let Some(name) = name.strip_prefix('.') else {
                continue;
            };
            if disk::try_lock(&self.layout.fetching_lock(name))?.is_none() {
                continue;
            }
            let folder = self.layout.fetching(name);
            let mut n_bytes = 0;
            for file in disk::names_in(&folder)? {
                n_bytes += disk::file_size(&folder.join(file))?.unwrap_or(0);
            }
            if n_bytes > 0 {
                found.push((name.to_owned(), n_bytes));
            }
        }
        Ok(found)
    }

    /// Groups of bytes that a model to be fetched may share, in models whose shards differ.
    pub fn groups(&self) -> Result<Groups, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let models = self.entries()?.into_iter();
        let groups = models.flat_map(|(_, entry)| entry.groups);
        Ok(Groups(
            groups.map(|group| (group.digest, group.pieces)).collect(),
        ))
    }

    /// Removes the model `name`, and what only it needed. What has arrived of a new revision stays.
    ///
    /// Readers of the model keep its files, which the next [`gc`](Self::gc) deletes.
    pub fn remove(&self, name: &str) -> Result<Swept, StoreError> {
        let _alone = disk::lock(&self.layout.lock())?;
        match self.current(name) {
            // An unreadable model can be removed.
            Ok(_) | Err(StoreError::Index { .. }) => {}
            Err(error) => return Err(error),
        }
        revision::unpublish(&self.layout.model(name))?;
        sweep::sweep(&self.layout, Interrupted::Keep)
    }

    /// Deletes what no model, reader or pull needs. Waits until no process is looking something up or
    /// publishing, which takes moments; pulls and readers go on meanwhile.
    ///
    /// Errors: an index file that can't be read stops it before anything is deleted.
    pub fn gc(&self, interrupted: Interrupted) -> Result<Swept, StoreError> {
        let _alone = disk::lock(&self.layout.lock())?;
        sweep::sweep(&self.layout, interrupted)
    }

    /// The current revision of the model `name`, case-sensitive on every system.
    fn current(&self, name: &str) -> Result<(Revision, Entry), StoreError> {
        match self.spelt_like(name)? {
            Some((revision, spelt, entry)) if spelt == name => Ok((revision, entry)),
            _ => Err(StoreError::NoSuchModel {
                name: name.to_owned(),
                root: self.layout.root.clone(),
            }),
        }
    }

    /// The current revision of the model whose name is `name` ignoring case, with its name and entry.
    fn spelt_like(&self, name: &str) -> Result<Option<(Revision, String, Entry)>, StoreError> {
        name::check_model(name)?;
        let Some(revision) = revision::current(&self.layout.model(name))? else {
            return Ok(None);
        };
        let (spelt, entry) = revision.read()?;
        Ok(Some((revision, spelt, entry)))
    }

    fn entries(&self) -> Result<Vec<(String, Entry)>, StoreError> {
        let mut entries = Vec::new();
        for model in disk::names_in(&self.layout.models())? {
            if let Some(revision) = revision::current(&self.layout.models().join(model))? {
                entries.push(revision.read()?);
            }
        }
        Ok(entries)
    }
}

/// The blobs of an entry, each once.
fn digests(entry: &Entry) -> HashMap<Digest, u64> {
    (entry.files.values())
        .map(|blob| (blob.digest, blob.size))
        .collect()
}

impl Model {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its files and origin.
    pub fn entry(&self) -> &Entry {
        &self.entry
    }

    /// For each of its files, the path of its bytes. Those never change, and must not be written to.
    pub fn paths(&self) -> &BTreeMap<String, PathBuf> {
        &self.paths
    }
}

impl Groups {
    /// The pieces that, one after another, are the bytes with this digest. Whether they still exist is known
    /// when they are copied ([`Pull::copy_from`]).
    pub fn find(&self, digest: &Digest) -> Option<&[Piece]> {
        self.0.get(digest).map(Vec::as_slice)
    }
}
