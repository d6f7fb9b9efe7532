//! Files that get their names only when they are complete.

use std::fs;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use sterna::{Context, Error, Result, bail};
use tempfile::{NamedTempFile, TempPath};

/// A file that is written next to its name, under a new one that begins with a dot and ends in `.tmp`; it is
/// removed when this value is dropped unless [`commit`] renamed it.
pub(super) struct OutputFile {
    path: PathBuf,
    file: BufWriter<NamedTempFile>,
    len: u64,
}

impl OutputFile {
    /// Begins to write the file `path`.
    pub(super) fn create(path: &Path) -> Result<OutputFile> {
        let staged = stage(path, |staged| {
            fs::File::options()
                .write(true)
                .create_new(true)
                .open(staged)
        });
        let file = staged.with_context(|| format!("{}: cannot create", path.display()))?;
        Ok(OutputFile {
            path: path.to_owned(),
            file: BufWriter::new(file),
            len: 0,
        })
    }

    /// Bytes written so far.
    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let written = self.file.write_all(bytes);
        written.with_context(|| self.cannot_write())?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Writes zeros up to `offset`, fewer than 64.
    pub(super) fn pad_to(&mut self, offset: u64) -> Result<()> {
        let n = (offset - self.len) as usize;
        self.write(&[0; 64][..n])
    }

    /// Syncs everything to disk; returns the final name, and the file under its temporary one.
    fn finish(mut self) -> Result<(PathBuf, TempPath)> {
        let flushed = self.file.flush();
        let synced = flushed.and_then(|()| self.file.get_ref().as_file().sync_all());
        synced.with_context(|| self.cannot_write())?;
        let (file, _) = self.file.into_parts();
        Ok((self.path, file.into_temp_path()))
    }

    fn cannot_write(&self) -> String {
        format!("{}: cannot write", self.path.display())
    }
}

/// Renames all of `files` once each is on disk; if one rename fails, none takes effect, and what they would
/// have replaced is restored.
pub(super) fn commit(files: Vec<OutputFile>) -> Result<()> {
    let files: Vec<_> = files
        .into_iter()
        .map(OutputFile::finish)
        .collect::<Result<_>>()?;
    let last = files.len().saturating_sub(1);
    // Completed renames, each with the file it replaced.
    let mut given: Vec<(PathBuf, Option<TempPath>)> = Vec::new();
    for (i, (path, staged)) in files.into_iter().enumerate() {
        // Nothing can fail after the last one.
        let before = if i < last { set_aside(&path) } else { Ok(None) };
        let renamed = before.and_then(|before| match staged.persist(&path) {
            Ok(()) => Ok(before),
            Err(failed) => {
                let failed = Error::from(failed.error);
                Err(put_back(path.clone(), before, failed))
            }
        });
        match renamed {
            Ok(before) => given.push((path, before)),
            Err(error) => {
                let error = error.context(format!("{}: cannot give it its name", path.display()));
                return Err(
                    (given.into_iter().rev()).fold(error, |error, (path, before)| {
                        // Where nothing was, nothing stays. The original error is reported.
                        if before.is_none() {
                            let _ = fs::remove_file(&path);
                        }
                        put_back(path, before, error)
                    }),
                );
            }
        }
    }
    Ok(())
}

/// Gives the file at `path`, if there is one, a second name, so that it survives being replaced.
fn set_aside(path: &Path) -> Result<Option<TempPath>> {
    check_replaceable(path)?;
    if fs::symlink_metadata(path).is_err_and(|error| error.kind() == io::ErrorKind::NotFound) {
        return Ok(None);
    }
    let kept = stage(path, |name| match fs::hard_link(path, name) {
        // Not every file system supports hard links. Then it has no first name for a moment.
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => fs::rename(path, name),
        linked => linked,
    });
    Ok(Some(kept?.into_temp_path()))
}

/// Renames `before` back to `path` after `error`, extending it if that fails too.
fn put_back(path: PathBuf, before: Option<TempPath>, error: Error) -> Error {
    let Some(before) = before else {
        return error;
    };
    match before.persist(&path) {
        Ok(()) => error,
        Err(failed) => {
            let name = failed.path.to_path_buf();
            let kept = failed.path.keep().unwrap_or(name);
            let (path, kept) = (path.display(), kept.display());
            error.context(format!("{path}: what it held is in {kept} now"))
        }
    }
}

/// Creates something under a new name next to `path`.
fn stage<T>(path: &Path, make: impl FnMut(&Path) -> io::Result<T>) -> io::Result<NamedTempFile<T>> {
    let mut prefix = std::ffi::OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    prefix.push("-");
    tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".tmp")
        .make_in(folder(path), make)
}

/// The folder of the file `path`.
fn folder(path: &Path) -> &Path {
    match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    }
}

/// The canonical path of `path`, however its folder is written. The file needn't exist.
pub(super) fn place(path: &Path) -> Result<PathBuf> {
    let folder = fs::canonicalize(folder(path)).with_context(|| path.display().to_string())?;
    Ok(folder.join(path.file_name().unwrap_or_default()))
}

/// Checks that `path` doesn't exist or may be replaced: a file and not a device or folder.
pub(super) fn check_replaceable(path: &Path) -> Result<()> {
    let name = path.display();
    match fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(()),
        Ok(found) if found.is_dir() => {
            bail!(
                InvalidRequest,
                "{name}: expected a file to write, found a folder"
            )
        }
        Ok(_) => bail!(
            InvalidRequest,
            "{name}: expected a file to write, found a pipe, socket or device"
        ),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error).with_context(|| format!("{name}: cannot write")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(paths: [&Path; 2]) -> Vec<OutputFile> {
        let write = |path: &Path| {
            let mut file = OutputFile::create(path).unwrap();
            file.write(b"x").unwrap();
            file.pad_to(3).unwrap();
            file
        };
        paths.map(write).into()
    }

    fn names(dir: &Path) -> Vec<std::ffi::OsString> {
        let entries = fs::read_dir(dir).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn files_appear_together_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let files = write([&a, &b]);
        for name in names(dir.path()) {
            let name = name.into_string().unwrap();
            assert!(name.starts_with('.') && name.ends_with(".tmp"), "{name}");
        }
        drop(files);
        assert!(names(dir.path()).is_empty());
        let files = write([&a, &b]);
        // A folder that comes in the place of the second.
        fs::create_dir(&b).unwrap();
        let error = commit(files).unwrap_err().to_string();
        assert!(error.contains("b: cannot give it its name"), "{error}");
        assert_eq!(names(dir.path()), ["b"]);
        fs::remove_dir(&b).unwrap();
        commit(write([&a, &b])).unwrap();
        assert_eq!(names(dir.path()), ["a", "b"]);
        assert_eq!(fs::read(&a).unwrap(), b"x\0\0");
    }

    #[test]
    fn what_was_there_stays_unless_all_is_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, "old").unwrap();
        let files = write([&a, &b]);
        fs::create_dir(&b).unwrap();
        assert!(commit(files).is_err());
        assert_eq!(names(dir.path()), ["a", "b"]);
        assert_eq!(fs::read(&a).unwrap(), b"old");
        fs::remove_dir(&b).unwrap();
        commit(write([&a, &b])).unwrap();
        assert_eq!(names(dir.path()), ["a", "b"]);
        assert_eq!(fs::read(&a).unwrap(), b"x\0\0");
    }

    #[cfg(unix)]
    #[test]
    fn new_files_are_for_those_who_may_read_others() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        fs::write(&a, "").unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        let expected = mode(&a);
        commit(write([&a, &b])).unwrap();
        assert_eq!((mode(&a), mode(&b)), (expected, expected));
    }

    #[test]
    fn folders_are_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("a");
        check_replaceable(&file).unwrap();
        fs::write(&file, "").unwrap();
        check_replaceable(&file).unwrap();
        let error = check_replaceable(dir.path()).unwrap_err().to_string();
        assert!(
            error.ends_with("expected a file to write, found a folder"),
            "{error}"
        );
    }
}
