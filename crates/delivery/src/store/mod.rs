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
    collections::{BTreeMap, BTreeSet, HashMap},
    fs::File,
    path::{Path, PathBuf},
};

use crate::hash::{Digest, Expected};

use self::{
    blob::Layout,
    disk::Lock,
    incoming::{Incoming, Trust},
    revision::Revision,
};

pub(crate) use self::name::is_allowed;
pub use self::{
    blob::{Blob, Piece},
    error::StoreError,
    index::{Entry, Group},
    name::portable_name,
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
    /// What is wrong with it, as far as its index and the sizes of its files show. Of a damaged index, `entry`
    /// is the last revision that can be read.
    pub damage: Option<String>,
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
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Swept {
    /// Blobs that no model, reader or pull needed, and damaged ones.
    pub n_blobs: usize,
    /// Bytes in all files deleted.
    pub bytes: u64,
    /// Files that the system keeps because they are in use (Windows only); to be deleted another time.
    pub n_in_use: usize,
    /// Models, in small letters, whose index is so damaged that their files can't be told. While there are
    /// any, no blob is deleted that could be theirs.
    pub damaged: Vec<String>,
    /// Files and folders that nothing here made, seen from the root. They are left alone.
    pub unknown: Vec<PathBuf>,
}

/// A snapshot of where groups of bytes are in the store.
#[derive(Debug, Clone, Default)]
pub struct Groups(HashMap<Digest, Vec<Piece>>);

impl Store {
    /// Opens the store in the folder `root`, which is created if need be. One that this user can't write to
    /// can be read: then what would write fails with [`StoreError::Unwritable`].
    pub fn open(root: impl Into<PathBuf>) -> Result<Self, StoreError> {
        let layout = Layout { root: root.into() };
        for folder in [layout.blobs(), layout.models(), layout.partial()] {
            match disk::create_folder(&folder) {
                Err(StoreError::Io { source, .. })
                    if disk::is_unwritable(&source) && layout.root.is_dir() => {}
                result => result?,
            }
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
                    // Waited for without the store's lock, so what is got may be the lock of a file that
                    // was deleted meanwhile. It is let go, and all begins anew.
                    drop(self.writing(disk::lock(&self.layout.fetching_lock(name)))?);
                }
                result => return result,
            }
        }
    }

    /// As [`pull`](Self::pull), but fails with [`StoreError::Busy`] instead of waiting.
    pub fn try_pull(&self, name: &str) -> Result<Pull, StoreError> {
        name::check_model(name)?;
        self.writing(self.begin(name))
    }

    /// The same error as one of a store that can't be written, if that is why.
    fn writing<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        match result {
            Err(StoreError::Io { source, .. }) if disk::is_unwritable(&source) => {
                Err(StoreError::Unwritable {
                    root: self.layout.root.clone(),
                    source,
                })
            }
            result => result,
        }
    }

    fn begin(&self, name: &str) -> Result<Pull, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let lock = disk::try_lock(&self.layout.fetching_lock(name))?;
        let lock = lock.ok_or_else(|| StoreError::Busy {
            name: name.to_owned(),
        })?;
        match self.spelt_like(name) {
            Ok(Some(existing)) if existing.name != name => {
                return Err(StoreError::NameTaken {
                    kind: "model",
                    name: name.to_owned(),
                    existing: existing.name,
                });
            }
            // What can't be read is replaced when this pull is published.
            Ok(_) | Err(StoreError::DamagedIndex { .. }) => {}
            Err(error) => return Err(error),
        }
        Pull::begin(self.layout.clone(), name, lock)
    }

    /// The model `name`, for reading.
    ///
    /// Its files exist, have the right sizes, and were not written to since they were verified, as far as
    /// their dates show; one that was is hashed again. [`verify`](Self::verify) hashes all.
    ///
    /// Errors: [`StoreError::NoSuchModel`]; [`StoreError::Damaged`] if a file has changed, which is then put
    /// aside; [`StoreError::DamagedIndex`].
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
        self.current(name)?.hold()
    }

    /// All models of which it is known what belongs to them, by name. Damaged ones say so.
    pub fn list(&self) -> Result<Vec<Listed>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let mut models = Vec::new();
        for (_, folder) in self.layout.model_folders()? {
            match revision::current(&folder) {
                Ok(None) => {}
                Ok(Some(current)) => {
                    let damage = self.damage_of(&current.entry)?;
                    models.push((current.name, current.entry, damage));
                }
                Err(problem) => {
                    let saved = revision::salvage(&folder);
                    let damage = Some(with_cause(&problem));
                    models.extend(saved.map(|saved| (saved.name, saved.entry, damage)));
                }
            }
        }
        let mut users: HashMap<Digest, usize> = HashMap::new();
        for (_, entry, _) in &models {
            for digest in digests(entry).into_keys() {
                *users.entry(digest).or_default() += 1;
            }
        }
        let listed = models.into_iter().map(|(name, entry, damage)| {
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
                damage,
            }
        });
        Ok(listed.collect())
    }

    /// What is wrong with the files of `entry`, as far as their sizes show.
    fn damage_of(&self, entry: &Entry) -> Result<Option<String>, StoreError> {
        for (file, blob) in &entry.files {
            match disk::file_size(&self.layout.blob(&blob.digest))? {
                Some(size) if size == blob.size => {}
                Some(size) => {
                    let expected = blob.size;
                    return Ok(Some(format!(
                        "{file}: expected {expected} bytes, found {size}"
                    )));
                }
                None => return Ok(Some(format!("{file}: is missing"))),
            }
        }
        Ok(None)
    }

    /// Models so damaged that [`list`](Self::list) can't say what belongs to them: names, in small letters,
    /// and what is wrong. They can be pulled again, from where they came, and removed.
    pub fn unreadable(&self) -> Result<Vec<(String, String)>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let folders = self.layout.model_folders()?.into_iter();
        let damaged = folders.filter_map(|(key, folder)| {
            let problem = revision::current(&folder).err()?;
            let is_saved = revision::salvage(&folder).is_some();
            (!is_saved).then(|| (key, with_cause(&problem)))
        });
        Ok(damaged.collect())
    }

    /// Pulls that were interrupted and left bytes that a later one could go on with: names, in small letters,
    /// and bytes that have arrived, in whole files too. Those that somebody is at now are not among them.
    pub fn interrupted(&self) -> Result<Vec<(String, u64)>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let models = self.entries()?;
        let used: BTreeSet<&Digest> = (models.iter())
            .flat_map(|entry| entry.files.values().map(|blob| &blob.digest))
            .collect();
        let mut found = Vec::new();
        for key in self.layout.fetches()? {
            if disk::is_held(&self.layout.fetching_lock(&key))? {
                continue;
            }
            let folder = self.layout.fetching(&key);
            let claims: BTreeSet<_> = (pull::read_claims(&folder).unwrap_or_default())
                .into_iter()
                .collect();
            let mut n_bytes = 0_u64;
            for blob in &claims {
                let n = match self.layout.has(blob)? {
                    true if used.contains(&blob.digest) => 0,
                    true => blob.size,
                    false => Incoming::arrived(&folder, blob)?,
                };
                n_bytes = n_bytes.saturating_add(n);
            }
            if n_bytes > 0 {
                found.push((key, n_bytes));
            }
        }
        Ok(found)
    }

    /// Groups of bytes that a model to be fetched may share, in models whose shards differ.
    pub fn groups(&self) -> Result<Groups, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let models = self.entries()?.into_iter();
        let groups = models.flat_map(|entry| entry.groups);
        Ok(Groups(
            groups.map(|group| (group.digest, group.pieces)).collect(),
        ))
    }

    /// The blobs that models here have as [`Entry::labelled`].
    pub fn labelled(&self) -> Result<BTreeSet<Blob>, StoreError> {
        let _shared = disk::lock_shared(&self.layout.lock())?;
        let models = self.entries()?;
        let labelled = models
            .iter()
            .flat_map(|entry| entry.labelled.iter().map(|file| entry.files.get(file)));
        Ok(labelled.flatten().copied().collect())
    }

    /// Removes the model `name`, and what only it needed. What has arrived of a new revision stays.
    ///
    /// Readers of the model keep its files, which the next [`gc`](Self::gc) deletes.
    pub fn remove(&self, name: &str) -> Result<Swept, StoreError> {
        let _alone = self.writing(disk::lock(&self.layout.lock()))?;
        match self.current(name) {
            // What can't be read can be removed.
            Ok(_) | Err(StoreError::DamagedIndex { .. }) => {}
            Err(error) => return Err(error),
        }
        self.writing(revision::unpublish(&self.layout.model(name)))?;
        sweep::sweep(&self.layout, Interrupted::Keep)
    }

    /// Deletes what no model, reader or pull needs. Waits until no process is looking something up or
    /// publishing, which takes moments; pulls and readers go on meanwhile.
    ///
    /// What a damaged model may still need stays, and so does what nothing here made: [`Swept`] names both.
    pub fn gc(&self, interrupted: Interrupted) -> Result<Swept, StoreError> {
        let _alone = self.writing(disk::lock(&self.layout.lock()))?;
        sweep::sweep(&self.layout, interrupted)
    }

    /// The current revision of the model `name`, spelt exactly so: on every system, names differ if their
    /// case does.
    fn current(&self, name: &str) -> Result<Revision, StoreError> {
        match self.spelt_like(name)? {
            Some(revision) if revision.name == name => Ok(revision),
            _ => Err(StoreError::NoSuchModel {
                name: name.to_owned(),
                root: self.layout.root.clone(),
            }),
        }
    }

    /// The current revision of the model whose name is `name` but for the case of letters.
    fn spelt_like(&self, name: &str) -> Result<Option<Revision>, StoreError> {
        name::check_model(name)?;
        let folder = self.layout.model(name);
        if !folder.is_dir() {
            return Ok(None);
        }
        revision::current(&folder).map_err(|problem| StoreError::DamagedIndex {
            name: name.to_owned(),
            origin: revision::salvage(&folder).map(|saved| saved.entry.source),
            source: Box::new(problem),
        })
    }

    /// The entries of all models whose index is in order.
    fn entries(&self) -> Result<Vec<Entry>, StoreError> {
        let folders = self.layout.model_folders()?.into_iter();
        let current = folders.filter_map(|(_, folder)| revision::current(&folder).ok()?);
        Ok(current.map(|revision| revision.entry).collect())
    }
}

/// An error and what caused it, in one line.
fn with_cause(error: &StoreError) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
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
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The pieces that, one after another, are the bytes with this digest. Whether they still exist is known
    /// when they are copied ([`Pull::copy_from`]).
    pub fn find(&self, digest: &Digest) -> Option<&[Piece]> {
        self.0.get(digest).map(Vec::as_slice)
    }
}
