//! Files and folders that take their name when they are whole.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use sterna::{Context, Result, bail};
use sterna_delivery::{sync_folder, write_whole};

/// The folder or file that is written before it is whole, by one process at a time. What an interrupted one
/// left is for the next to go on with, or to remove.
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
        let lock_path = with_suffix(&path, ".lock");
        let what = || lock_path.display().to_string();
        let lock = File::options()
            .create(true)
            .append(true)
            .open(&lock_path)
            .with_context(what)?;
        // Two at once would write into each other's files.
        if lock.try_lock().is_err() {
            bail!(Io, "{}: another process is writing it", out.display());
        }
        if out.exists() {
            // Nobody needs the lock of what is there.
            let _ = fs::remove_file(&lock_path);
            bail!(InvalidRequest, "{}: exists already", out.display());
        }
        Ok(Staging {
            path,
            lock_path,
            _lock: lock,
        })
    }

    /// Gives what was written its name.
    pub(crate) fn finish(self, out: &Path) -> Result<()> {
        let what = || format!("cannot rename {} to {}", self.path.display(), out.display());
        fs::rename(&self.path, out).with_context(what)?;
        if let Some(parent) = out.parent() {
            sync_folder(parent).with_context(|| parent.display().to_string())?;
        }
        // It held nothing; whoever waits for it finds what was written.
        let _ = fs::remove_file(&self.lock_path);
        Ok(())
    }

    /// Removes a folder that is not to be gone on with.
    pub(crate) fn discard(self) {
        // Whoever discards it has worse to report; the next to write it removes what is left.
        let _ = fs::remove_dir_all(&self.path);
        let _ = fs::remove_file(&self.lock_path);
    }
}

/// Where `out` is while it is written.
pub(crate) fn partial(out: &Path) -> Option<PathBuf> {
    out.file_name()?;
    Some(with_suffix(out, ".partial"))
}

/// The path `path` with `end` behind its name.
pub(crate) fn with_suffix(path: &Path, end: &str) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(end);
    path.with_file_name(name)
}

/// Writes a file to the disk.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    write_whole(path, bytes).with_context(|| format!("{}: cannot write", path.display()))
}
