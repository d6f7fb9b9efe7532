//! Deleting what nothing needs.

use std::{collections::HashSet, path::Path};

use crate::hash::{Algorithm, Digest};

use super::{Interrupted, StoreError, Swept, blob::Layout, disk, pull, revision};

/// Deletes what no model, reader or pull needs. To be called with the store's lock held exclusively.
pub(super) fn sweep(layout: &Layout, interrupted: Interrupted) -> Result<Swept, StoreError> {
    // Everything that is needed is determined before anything is deleted: an unreadable index stops it.
    let mut needed = HashSet::new();
    let mut retired = Vec::new();
    for model in disk::names_in(&layout.models())? {
        let folder = layout.models().join(model);
        let current = revision::current(&folder)?.map(|current| current.path);
        for revision in revision::all(&folder)? {
            if Some(&revision.path) != current.as_ref() && revision.is_free()? {
                retired.push(revision.path);
                continue;
            }
            let (_, entry) = revision.read()?;
            needed.extend(entry.files.values().map(|blob| blob.digest));
        }
    }
    let mut abandoned = Vec::new();
    for name in disk::names_in(&layout.partial())? {
        let Some(model) = name.strip_prefix('.') else {
            continue;
        };
        let folder = layout.fetching(model);
        let lock_path = layout.fetching_lock(model);
        let lock = disk::try_lock(&lock_path)?;
        if lock.is_none() || (interrupted == Interrupted::Keep && folder.is_dir()) {
            needed.extend(pull::read_claims(&folder)?.iter().map(|blob| blob.digest));
        } else {
            // Closed before it is deleted; nothing can take it meanwhile without the store's lock.
            drop(lock);
            abandoned.push((folder, lock_path));
        }
    }
    let mut swept = Swept::default();
    for path in retired {
        swept.count(&path, false)?;
    }
    for model in disk::names_in(&layout.models())? {
        // A folder that isn't empty stays.
        let _ = std::fs::remove_dir(layout.models().join(model));
    }
    for (folder, lock_path) in abandoned {
        for name in disk::names_in(&folder)? {
            swept.count(&folder.join(name), false)?;
        }
        disk::delete_folder(&folder)?;
        disk::delete(&lock_path)?;
    }
    for name in disk::names_in(&layout.damaged())? {
        swept.count(&layout.damaged().join(name), true)?;
    }
    for algorithm in Algorithm::ALL {
        let folder = layout.blobs().join(algorithm.name());
        for part in disk::names_in(&folder)? {
            let folder = folder.join(part);
            for name in disk::names_in(&folder)? {
                // Files from elsewhere are left alone.
                let digest = Digest::from_hex(algorithm, &name).ok();
                if digest.is_some_and(|digest| !needed.contains(&digest)) {
                    swept.count(&folder.join(name), true)?;
                }
            }
        }
    }
    Ok(swept)
}

impl Swept {
    /// Deletes a file and counts it.
    fn count(&mut self, path: &Path, is_blob: bool) -> Result<(), StoreError> {
        let size = disk::file_size(path)?.unwrap_or(0);
        if !disk::delete(path)? {
            self.n_in_use += 1;
        } else {
            self.n_blobs += usize::from(is_blob);
            self.bytes += size;
        }
        Ok(())
    }
}
