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
    // Closing the file unlocks it. None where a store that can't be written has no lock to be had.
    #[allow(dead_code)] Option<File>,
);

/// True if an error says that this user can't write there, by permissions or because nobody can.
pub(super) fn is_unwritable(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem
    )
}

/// Opens the file at `path` to be locked, creating it if need be. Nothing is ever written to it.
fn open_lock(path: &Path) -> io::Result<File> {
    let open = || {
        let mut options = File::options();
        options.create(true).truncate(false).read(true).write(true);
        options.open(path)
    };
    match open() {
        Err(_) if path.is_dir() => {
            clear_way(path)?;
            open()
        }
        opened => opened,
    }
}

/// The lock of a store that is only read: as `opened` to write, or else as `open_to_read` gives it; `None`
/// if there is none to be had, and then nobody here can delete anything either.
fn to_be_shared(
    opened: io::Result<File>,
    open_to_read: impl FnOnce() -> io::Result<File>,
) -> io::Result<Option<File>> {
    match opened {
        Err(error) if is_unwritable(&error) => match open_to_read() {
            Err(error) if is_unwritable(&error) || error.kind() == io::ErrorKind::NotFound => {
                Ok(None)
            }
            opened => opened.map(Some),
        },
        opened => opened.map(Some),
    }
}

/// Waits until nobody holds `path` exclusively, then holds it with others. In a store that can't be written,
/// what can't be locked is read without.
pub(super) fn lock_shared(path: &Path) -> Result<Lock, StoreError> {
    let opened = open_lock(path);
    let is_writable = opened.is_ok();
    let file = to_be_shared(opened, || File::open(path))
        .map_err(StoreError::io("open the lock file", path))?;
    let Some(file) = file else {
        return Ok(Lock(None));
    };
    match uninterrupted(|| file.lock_shared()) {
        Err(error) if is_writable => Err(StoreError::io("lock", path)(error)),
        locked => Ok(Lock(locked.is_ok().then_some(file))),
    }
}

/// Waits for an exclusive lock on `path`.
pub(super) fn lock(path: &Path) -> Result<Lock, StoreError> {
    let file = open_lock(path).map_err(StoreError::io("open the lock file", path))?;
    uninterrupted(|| file.lock()).map_err(StoreError::io("lock", path))?;
    Ok(Lock(Some(file)))
}

/// Takes an exclusive lock on `path`, unless it is locked.
pub(super) fn try_lock(path: &Path) -> Result<Option<Lock>, StoreError> {
    let file = open_lock(path).map_err(StoreError::io("open the lock file", path))?;
    try_lock_file(file, path)
}

/// True if somebody holds `path`. Nothing is created to find out.
pub(super) fn is_held(path: &Path) -> Result<bool, StoreError> {
    match File::open(path) {
        Ok(file) => Ok(try_lock_file(file, path)?.is_none()),
        Err(e) if e.kind() == io::ErrorKind::NotFound || is_unwritable(&e) => Ok(false),
        Err(e) => Err(StoreError::io("open the lock file", path)(e)),
    }
}

/// Takes an exclusive lock on the open `file`, unless it is locked.
pub(super) fn try_lock_file(file: File, path: &Path) -> Result<Option<Lock>, StoreError> {
    match file.try_lock() {
        Ok(()) => Ok(Some(Lock(Some(file)))),
        Err(TryLockError::WouldBlock) => Ok(None),
        Err(TryLockError::Error(source)) => Err(StoreError::io("lock", path)(source)),
    }
}

/// Waits for a shared lock on the open `file`.
pub(super) fn share_file(file: File, path: &Path) -> Result<Lock, StoreError> {
    match uninterrupted(|| file.lock_shared()) {
        Err(error) if is_unwritable(&error) => Ok(Lock(None)),
        Err(error) => Err(StoreError::io("lock", path)(error)),
        Ok(()) => Ok(Lock(Some(file))),
    }
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
        clear_way(path)?;
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

/// Takes away a folder that stands where a file of ours belongs: deletes it if it is empty, and else gives it
/// another name beside this one. Anything else stays.
pub(super) fn clear_way(path: &Path) -> io::Result<()> {
    if !path.is_dir() || fs::remove_dir(path).is_ok() {
        return Ok(());
    }
    let mut n = 0;
    loop {
        let mut aside = path.as_os_str().to_owned();
        aside.push(format!(".aside-{n}"));
        if fs::symlink_metadata(&aside).is_err() {
            return fs::rename(path, aside);
        }
        n += 1;
    }
}

/// The names in a folder, sorted; none if there is no such folder, or something else in its place.
pub(super) fn names_in(path: &Path) -> Result<Vec<String>, StoreError> {
    let failed = |e| StoreError::io("list the folder", path)(e);
    let entries = match fs::read_dir(path) {
        Ok(entries) => entries,
        Err(e)
            if matches!(
                e.kind(),
                io::ErrorKind::NotFound | io::ErrorKind::NotADirectory
            ) =>
        {
            return Ok(Vec::new());
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_cannot_be_written_is_shared_or_done_without() {
        use io::ErrorKind::{NotFound, Other, PermissionDenied, ReadOnlyFilesystem};
        let file = || tempfile::tempfile();
        let refused = |kind: io::ErrorKind| move || Err(kind.into());
        assert!(to_be_shared(file(), refused(Other)).unwrap().is_some());
        for kind in [PermissionDenied, ReadOnlyFilesystem] {
            let opened = || Err(kind.into());
            assert!(to_be_shared(opened(), file).unwrap().is_some());
            for without in [NotFound, PermissionDenied] {
                assert!(to_be_shared(opened(), refused(without)).unwrap().is_none());
            }
            assert!(to_be_shared(opened(), refused(Other)).is_err());
        }
        assert!(to_be_shared(Err(Other.into()), file).is_err());
    }

    #[test]
    fn a_folder_in_the_place_of_a_file_goes_aside_with_what_it_holds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        for n in 0..2 {
            fs::create_dir(&path).unwrap();
            fs::write(path.join("mine"), "1").unwrap();
            clear_way(&path).unwrap();
            assert!(dir.path().join(format!("x.aside-{n}/mine")).exists() && !path.exists());
        }
        fs::create_dir(&path).unwrap();
        clear_way(&path).unwrap();
        assert_eq!(names_in(dir.path()).unwrap().len(), 2);
        fs::write(&path, "2").unwrap();
        clear_way(&path).unwrap();
        assert!(path.is_file() && names_in(&path).unwrap().is_empty());
    }
}
