//! Files and folders that get their names when they are complete.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use sterna::{Context, Result, bail};
use sterna_delivery::{sync_folder, write_whole};

/// A folder or file that is written under a temporary name, by one process at a time. What an interrupted
/// process left is resumed or removed by the next.
pub(crate) struct Staging {
    pub(crate) path: PathBuf,
    lock_path: PathBuf,
    _lock: File,
}

impl Staging {
    /// Begins to write `out`, which must not exist.
    pub(crate) fn begin(out: &Path) -> Result<Staging> {
        let Some(path) = partial(out) else {
            bail!(InvalidRequest, "{}: expected a name", out.display());
        };
        let parent = out.parent().filter(|parent| !parent.as_os_str().is_empty());
        if let Some(parent) = parent.filter(|parent| !parent.is_dir()) {
            bail!(
                NotFound,
                "{}: expected a folder to write it into, found none at {}",
                out.display(),
                parent.display()
            );
        }
        let lock_path = with_suffix(&path, ".lock");
        let what = || lock_path.display().to_string();
        let lock = File::options()
            .create(true)
            .append(true)
            .open(&lock_path)
            .with_context(what)?;
        // Two at once would write to each other's files.
        if lock.try_lock().is_err() {
            bail!(Io, "{}: another process is writing it", out.display());
        }
        if out.exists() {
            // The lock of an existing output is not needed.
            let _ = fs::remove_file(&lock_path);
            bail!(InvalidRequest, "{}: exists already", out.display());
        }
        Ok(Staging {
            path,
            lock_path,
            _lock: lock,
        })
    }

    /// Renames what was written to its name.
    pub(crate) fn finish(self, out: &Path) -> Result<()> {
        let what = || format!("cannot rename {} to {}", self.path.display(), out.display());
        fs::rename(&self.path, out).with_context(what)?;
        if let Some(parent) = out.parent() {
            sync_folder(parent).with_context(|| parent.display().to_string())?;
        }
        // It was empty; a process that waits for it finds what was written.
        let _ = fs::remove_file(&self.lock_path);
        Ok(())
    }

    /// Removes a folder that won't be resumed.
    pub(crate) fn discard(self) {
        // The caller has a worse error to report; the next writer removes what is left.
        let _ = fs::remove_dir_all(&self.path);
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// The temporary path of `out`.
pub(crate) fn partial(out: &Path) -> Option<PathBuf> {
    out.file_name()?;
    Some(with_suffix(out, ".partial"))
}

/// The path `path` with `end` appended to its name.
pub(crate) fn with_suffix(path: &Path, end: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(end);
    path.with_file_name(name)
}

/// Syncs a file to disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    write_whole(path, bytes).with_context(|| format!("{}: cannot write", path.display()))
}
