//! Deleting what nothing needs.

use std::{
    collections::HashSet,
    fs,
    path::{Path, PathBuf},
};

use crate::hash::{Algorithm, Digest};

use super::{
    Entry, Interrupted, StoreError, Swept,
    blob::Layout,
    disk, pull,
    revision::{self, Revision},
};

/// What is needed, and what may go.
#[derive(Default)]
struct Plan {
    /// What is named by what can be read.
    needed: HashSet<Digest>,
    /// Index files that count no more.
    retired: Vec<PathBuf>,
    swept: Swept,
}

/// Deletes what no model, reader or pull needs. To be called with the store's lock held exclusively.
pub(super) fn sweep(layout: &Layout, interrupted: Interrupted) -> Result<Swept, StoreError> {
    // Everything that is needed is known before anything is deleted.
    let mut plan = Plan::default();
    for (key, folder) in layout.model_folders()? {
        plan.model(key, &folder)?;
    }
    let mut abandoned = Vec::new();
    for key in layout.fetches()? {
        let folder = layout.fetching(&key);
        let lock_path = layout.fetching_lock(&key);
        let lock = disk::try_lock(&lock_path)?;
        if lock.is_none() || (interrupted == Interrupted::Keep && folder.is_dir()) {
            match pull::read_claims(&folder) {
                Ok(claims) => plan.needed.extend(claims.iter().map(|blob| blob.digest)),
                // Somebody is at it, and needs what nobody can tell.
                Err(_) if lock.is_none() => plan.swept.damaged.push(key),
                Err(_) => {}
            }
        } else {
            // Closed before it is deleted; nothing can take it meanwhile without the store's lock.
            drop(lock);
            abandoned.push((folder, lock_path));
        }
    }
    let Plan {
        needed,
        retired,
        mut swept,
    } = plan;
    for path in retired {
        swept.count(&path, false)?;
    }
    for (_, folder) in layout.model_folders()? {
        // A folder that still holds something stays.
        let _ = fs::remove_dir(folder);
    }
    for (folder, lock_path) in abandoned {
        for name in disk::names_in(&folder)? {
            if pull::is_ours(&name) {
                swept.count(&folder.join(name), false)?;
            }
        }
        let _ = fs::remove_dir(&folder);
        disk::delete(&lock_path)?;
    }
    for name in disk::names_in(&layout.damaged())? {
        if is_damaged_blob(&name) {
            swept.count(&layout.damaged().join(name), true)?;
        }
    }
    for algorithm in Algorithm::ALL {
        let folder = layout.blobs().join(algorithm.name());
        for part in disk::names_in(&folder)? {
            let folder = folder.join(&part);
            for name in disk::names_in(&folder)? {
                // While the files of a model can't be told, any may be one of them.
                let is_garbage = |digest: Digest| {
                    swept.damaged.is_empty()
                        && is_name_of(&digest, &part, &name)
                        && !needed.contains(&digest)
                };
                let path = folder.join(&name);
                if Digest::from_hex(algorithm, &name).is_ok_and(is_garbage) {
                    swept.count(&path, true)?;
                }
            }
        }
    }
    swept.unknown = unknown(layout)?;
    Ok(swept)
}

impl Plan {
    /// Takes note of what the model in `folder` needs.
    fn model(&mut self, key: String, folder: &Path) -> Result<(), StoreError> {
        let revisions = revision::all(folder)?;
        let current = match revision::current(folder) {
            Ok(current) => current,
            Err(_) => {
                self.damaged(key, folder, &revisions);
                return Ok(());
            }
        };
        for path in revisions {
            let is_current = current.as_ref().is_some_and(|current| current.path == path);
            if is_current {
                continue;
            }
            if revision::is_free(&path).unwrap_or(false) {
                self.retired.push(path);
                continue;
            }
            match Revision::read(path) {
                Ok(revision) => self.keep(&revision.entry),
                Err(_) => self.swept.damaged.push(key.clone()),
            }
        }
        if let Some(current) = current {
            self.keep(&current.entry);
        }
        Ok(())
    }

    /// The same for a model whose index is damaged: all its revisions stay, and what they name.
    fn damaged(&mut self, key: String, folder: &Path, revisions: &[PathBuf]) {
        let read: Vec<_> = (revisions.iter())
            .filter_map(|path| Revision::read(path.clone()).ok())
            .collect();
        read.iter().for_each(|revision| self.keep(&revision.entry));
        let is_marked = !matches!(revision::mark(folder), Err(StoreError::Index { .. }));
        if is_marked || read.is_empty() || read.len() < revisions.len() {
            self.swept.damaged.push(key);
        }
    }

    fn keep(&mut self, entry: &Entry) {
        self.needed
            .extend(entry.files.values().map(|blob| blob.digest));
    }
}

fn is_name_of(digest: &Digest, part: &str, name: &str) -> bool {
    let hex = digest.to_string();
    hex == name && &hex[..2] == part
}

fn is_damaged_blob(name: &str) -> bool {
    let parts = name.split_once('-');
    parts.is_some_and(|(algorithm, hex)| {
        let algorithm = algorithm.parse::<Algorithm>();
        algorithm.is_ok_and(|algorithm| Digest::from_hex(algorithm, hex).is_ok())
    })
}

/// Files and folders that nothing here made, seen from the root.
fn unknown(layout: &Layout) -> Result<Vec<PathBuf>, StoreError> {
    let mut found = Vec::new();
    let mut look = |folder: &Path, is_ours: &dyn Fn(&str, &Path) -> bool| {
        for name in disk::names_in(&layout.root.join(folder))? {
            let path = folder.join(&name);
            if !is_ours(&name, &layout.root.join(&path)) {
                found.push(path);
            }
        }
        Ok::<_, StoreError>(())
    };
    look(Path::new(""), &|name, _| {
        ["lock", "blobs", "models", "partial", "damaged"].contains(&name)
    })?;
    let models = layout.model_folders()?;
    look(Path::new("models"), &|name, _| {
        models.iter().any(|(key, _)| key == name)
    })?;
    for (key, folder) in &models {
        let revisions = revision::all(folder)?;
        look(&Path::new("models").join(key), &|name, path| {
            name == revision::MARK || revisions.iter().any(|revision| revision == path)
        })?;
    }
    let fetches = layout.fetches()?;
    look(Path::new("partial"), &|name, _| {
        fetches.contains(name.strip_prefix('.').unwrap_or(name))
    })?;
    for key in &fetches {
        look(&Path::new("partial").join(key), &|name, _| {
            pull::is_ours(name)
        })?;
    }
    look(Path::new("damaged"), &|name, _| is_damaged_blob(name))?;
    let algorithms = Algorithm::ALL.map(Algorithm::name);
    look(Path::new("blobs"), &|name, _| algorithms.contains(&name))?;
    for algorithm in Algorithm::ALL {
        let folder = Path::new("blobs").join(algorithm.name());
        let is_part = |name: &str| name.len() == 2 && name.bytes().all(|b| b.is_ascii_hexdigit());
        look(&folder, &|name, path| is_part(name) && path.is_dir())?;
        for part in disk::names_in(&layout.root.join(&folder))? {
            look(&folder.join(&part), &|name, path| {
                let digest = Digest::from_hex(algorithm, name);
                digest.is_ok_and(|digest| is_name_of(&digest, &part, name)) && path.is_file()
            })?;
        }
    }
    Ok(found)
}

impl Swept {
    /// Deletes a file and counts it. A folder in its place stays.
    fn count(&mut self, path: &Path, is_blob: bool) -> Result<(), StoreError> {
        let Some(size) = disk::file_size(path)? else {
            return Ok(());
        };
        if !disk::delete(path)? {
            self.n_in_use += 1;
        } else {
            self.n_blobs += usize::from(is_blob);
            self.bytes += size;
        }
        Ok(())
    }
}
