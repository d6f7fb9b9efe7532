//! Names in folders that survive a crash of the system.

use std::{io, path::Path};

/// Waits until the names in `folder` would survive a crash of the system: those of files that were
/// created there, renamed, or removed. What the files hold is made durable by syncing them first.
///
/// An empty path is the current folder, as the parent of a plain file name is.
pub fn sync_folder(folder: &Path) -> io::Result<()> {
    // Windows has no such operation; its file systems keep a log of names.
    #[cfg(unix)]
    {
        let folder = match folder.as_os_str().is_empty() {
            true => Path::new("."),
            false => folder,
        };
        std::fs::File::open(folder)?.sync_all()?;
    }
    #[cfg(not(unix))]
    let _ = folder;
    Ok(())
}
