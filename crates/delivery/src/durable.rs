//! Atomic file creation, and directory entries that survive a crash of the system.

use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

/// Waits until the directory entries in `folder` would survive a crash of the system: those of files that
/// were created there, renamed, or removed. The contents of files are made durable by syncing them first.
///
/// An empty path is the current folder, as in the parent of a plain file name.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    // Windows has no such operation; its file systems keep a log of names.
    #[cfg(unix)]
    {
        let folder = match folder.as_os_str().is_empty() {
            true => Path::new("."),
            false => folder,
        };
        File::open(folder)?.sync_all()?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}

/// Replaces the file at `path` by `bytes`. Readers see the old file or the new one, also after a crash.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = PartialFile::create(path)?;
    file.write_all(bytes)?;
    file.finish()
}

/// Removes what processes that were killed while they wrote a whole file left in `folder`, if it wasn't written to for
/// `age`: no other process may be at a file for longer.
pub fn remove_temporaries(folder: &Path, age: Duration) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        if !name.starts_with('.') || !name.ends_with(TEMPORARY) {
            continue;
        }
        // Another process may remove it, too.
        let gone = |error: &io::Error| error.kind() == io::ErrorKind::NotFound;
        let modified = match entry.metadata().and_then(|metadata| metadata.modified()) {
            Err(error) if gone(&error) => continue,
            modified => modified?,
        };
        // One from the future is new.
        if modified.elapsed().unwrap_or_default() >= age
            && let Err(error) = fs::remove_file(entry.path())
            && !gone(&error)
        {
            return Err(error);
        }
    }
    Ok(())
}

/// How temporary names end; they begin with a dot.
const TEMPORARY: &str = ".tmp";

/// A file that is written under a temporary name and gets its own from [`finish`](Self::finish). If it is
/// dropped before, it is removed.
#[derive(Debug)]
pub struct PartialFile {
    path: PathBuf,
    temporary: PathBuf,
    /// `None` once it has its name.
    file: Option<File>,
}

impl PartialFile {
    /// Begins to write the file at `path`, under a new name in the same folder.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_with(path, File::options().write(true).create_new(true))
    }

    /// The same, of a file that only this user may read and write, where the system has such permissions.
    pub fn create_private(path: &Path) -> io::Result<Self> {
        let mut options = File::options();
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        Self::create_with(path, &options)
    }

    fn create_with(path: &Path, options: &OpenOptions) -> io::Result<Self> {
        static COUNTER: AtomicU64 = AtomicU64::new(0);
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        loop {
            let n = COUNTER.fetch_add(1, Ordering::Relaxed);
            let mut temporary = OsString::from(".");
            temporary.push(name);
            temporary.push(format!("-{}-{n}{TEMPORARY}", process::id()));
            let temporary = path.with_file_name(temporary);
            match options.open(&temporary) {
                // Left by a process that had this number before, and crashed.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error),
                Ok(file) => {
                    return Ok(Self {
                        path: path.to_owned(),
                        temporary,
                        file: Some(file),
                    });
                }
            }
        }
    }

    /// As [`create`](Self::create), with the temporary name `temporary`, which nothing else may use. It must
    /// be on the same file system; an existing file is overwritten.
    pub fn create_as(path: &Path, temporary: &Path) -> io::Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            temporary: temporary.to_owned(),
            file: Some(File::create(temporary)?),
        })
    }

    /// Renames the file to its name, replacing any other. When this returns, that survives a crash of the
    /// system.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(file) = &self.file {
            file.sync_all()?;
        }
        fs::rename(&self.temporary, &self.path)?;
        self.file = None;
        self.path.parent().map_or(Ok(()), sync_folder)
    }

    fn file(&mut self) -> io::Result<&mut File> {
        self.file
            .as_mut()
            .ok_or_else(|| io::ErrorKind::Other.into())
    }
}

impl Write for PartialFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file()?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file()?.flush()
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        // Windows can't remove open files.
        if self.file.take().is_some() {
            // The original failure is reported; this one can't be.
            let _ = fs::remove_file(&self.temporary);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;

    fn names(folder: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(folder).unwrap();
        entries.map(|entry| entry.unwrap().file_name()).collect()
    }

    #[test]
    fn a_file_is_replaced_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("list");
        write_whole(&path, b"old").unwrap();
        let mut new = PartialFile::create(&path).unwrap();
        new.write_all(b"ne").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"old");
        drop(new);
        assert_eq!(names(folder.path()), ["list"]);
        write_whole(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        assert_eq!(names(folder.path()), ["list"]);
    }

    #[test]
    #[cfg(unix)]
    fn a_private_file_is_read_by_nobody_else() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("secret");
        write_whole(&path, b"old").unwrap();
        PartialFile::create_private(&path)
            .unwrap()
            .finish()
            .unwrap();
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        assert_eq!(names(folder.path()), ["secret"]);
    }

    #[test]
    fn what_was_abandoned_is_removed_and_what_is_new_stays() {
        let folder = tempfile::tempdir().unwrap();
        let new = PartialFile::create(&folder.path().join("new")).unwrap();
        let old = folder.path().join(".old-1-1.tmp");
        let day = Duration::from_secs(24 * 60 * 60);
        let file = File::create(&old).unwrap();
        file.set_modified(SystemTime::now() - 2 * day).unwrap();
        write_whole(&folder.path().join("whole"), b"x").unwrap();
        remove_temporaries(folder.path(), day).unwrap();
        assert!(!old.exists());
        new.finish().unwrap();
        assert_eq!(names(folder.path()).len(), 2);
    }

    #[test]
    fn where_no_file_can_be_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        fs::create_dir_all(path.join("inside")).unwrap();
        assert!(write_whole(&path, b"new").is_err());
        assert_eq!(names(folder.path()), ["taken"]);
        assert!(write_whole(&folder.path().join("no/such"), b"new").is_err());
        assert!(write_whole(Path::new("/"), b"new").is_err());
    }
}
