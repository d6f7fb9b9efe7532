//! File system operations of the store: locks between processes, and writes that survive a crash.

use std::{
    fs::{self, File, Metadata, TryLockError},
    io::{self, Read, Write},
    path::Path,
};

use super::StoreError;
use crate::PartialFile;

/// A lock visible to other processes and other handles of this one, until it is dropped.
///
/// The system releases it when the process ends, however it ends.
#[derive(Debug)]
pub(super) struct Lock(
    // Closing the file unlocks it.
    #[allow(dead_code)] File,
);

/// Opens the file at `path` for locking, creating it if need be. Nothing is ever written to it.
fn open_lock(path: &Path) -> Result<File, StoreError> {
    (File::options()
        .create(true)
        .truncate(false)
        .read(true)
        .write(true))
    .open(path)
    .map_err(StoreError::io("open the lock file", path))
}

/// Waits for a shared lock on `path`.
pub(super) fn lock_shared(path: &Path) -> Result<Lock, StoreError> {
    let file = open_lock(path)?;
    uninterrupted(|| file.lock_shared()).map_err(StoreError::io("lock", path))?;
    Ok(Lock(file))
}

/// Waits for an exclusive lock on `path`.
pub(super) fn lock(path: &Path) -> Result<Lock, StoreError> {
    let file = open_lock(path)?;
    uninterrupted(|| file.lock()).map_err(StoreError::io("lock", path))?;
    Ok(Lock(file))
}

/// Takes an exclusive lock on `path`, unless it is locked.
pub(super) fn try_lock(path: &Path) -> Result<Option<Lock>, StoreError> {
    try_lock_file(open_lock(path)?, path)
}

/// Takes an exclusive lock on the open `file`, unless it is locked.
pub(super) fn try_lock_file(file: File, path: &Path) -> Result<Option<Lock>, StoreError> {
    match file.try_lock() {
        Ok(()) => Ok(Some(Lock(file))),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(source)) => Err(StoreError::io("lock", path)(source)),
    }
}

/// Waits for a shared lock on the open `file`.
pub(super) fn share_file(file: File, path: &Path) -> Result<Lock, StoreError> {
    uninterrupted(|| file.lock_shared()).map_err(StoreError::io("lock", path))?;
    Ok(Lock(file))
}

fn uninterrupted(mut wait: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    loop {
        match wait() {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            result => return result,
        }
    }
}

/// Creates the folder at `path`, and its parents, durably.
pub(super) fn create_folder(path: &Path) -> Result<(), StoreError> {
    if path.is_dir() {
        return Ok(());
    }
    if let Some(parent) = path.parent().filter(|p| !p.as_os_str().is_empty()) {
        create_folder(parent)?;
        match fs::create_dir(path) {
            // Another process was faster.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            result => result.map_err(StoreError::io("create the folder", path))?,
        }
        return sync_folder(parent);
    }
    fs::create_dir_all(path).map_err(StoreError::io("create the folder", path))
}

/// Writes `bytes` to `path` atomically, through the file `temporary`, which nothing else may use. When this
/// returns, that survives a crash of the system.
pub(super) fn replace(path: &Path, temporary: &Path, bytes: &[u8]) -> Result<(), StoreError> {
    let write = || -> io::Result<()> {
        let mut file = PartialFile::create_as(path, temporary)?;
        file.write_all(bytes)?;
        file.finish()
    };
    write().map_err(StoreError::io("write", path))
}

/// Renames the file `from` to `to`, replacing an existing one, durably. Both must be on one file system.
/// Making the contents of `from` durable first is up to the caller.
pub(super) fn rename(from: &Path, to: &Path) -> Result<(), StoreError> {
    fs::rename(from, to).map_err(StoreError::io("give its final name to", from))?;
    to.parent().map_or(Ok(()), sync_folder)
}

/// Makes the entries of a folder durable.
pub(super) fn sync_folder(path: &Path) -> Result<(), StoreError> {
    crate::sync_folder(path).map_err(StoreError::io("make durable the folder", path))
}

/// Deletes a file; true if it is gone, false if the system keeps it because it is in use (Windows).
pub(super) fn delete(path: &Path) -> Result<bool, StoreError> {
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(true),
        Err(e) if cfg!(windows) && e.kind() == io::ErrorKind::PermissionDenied => Ok(false),
        Err(e) => Err(StoreError::io("delete", path)(e)),
    }
}

/// Deletes a folder and everything in it, if it exists.
pub(super) fn delete_folder(path: &Path) -> Result<(), StoreError> {
    match fs::remove_dir_all(path) {
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result.map_err(StoreError::io("delete the folder", path)),
    }
}

/// The names in a folder, sorted; none if there is no such folder.
pub(super) fn names_in(path: &Path) -> Result<Vec<String>, StoreError> {
    let failed = |e| StoreError::io("list the folder", path)(e);
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(failed(e)),
    };
    let mut names = Vec::new();
    for entry in entries {
        // Names that are not Unicode are not ours.
        names.extend(entry.map_err(failed)?.file_name().into_string());
    }
    names.sort();
    Ok(names)
}

/// The metadata of the regular file at `path`; `None` if there is no such file.
pub(super) fn examine(path: &Path) -> Result<Option<Metadata>, StoreError> {
    match fs::metadata(path) {
        Ok(metadata) => Ok(Some(metadata).filter(Metadata::is_file)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(StoreError::io("examine", path)(e)),
    }
}

/// The size of the regular file at `path`; `None` if there is no such file.
pub(super) fn file_size(path: &Path) -> Result<Option<u64>, StoreError> {
    Ok(examine(path)?.map(|metadata| metadata.len()))
}

/// The bytes of `file`, unless there are more than `limit`.
pub(super) fn read_bounded(file: &File, path: &Path, limit: u64) -> Result<Vec<u8>, StoreError> {
    let mut bytes = Vec::new();
    (file.take(limit + 1).read_to_end(&mut bytes)).map_err(StoreError::io("read", path))?;
    if bytes.len() as u64 > limit {
        return Err(StoreError::Index {
            path: path.to_owned(),
            problem: format!("expected at most {limit} bytes, found more"),
        });
    }
    Ok(bytes)
}
