//! The cache of compiled GPU kernels, so that only the first start compiles them.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

use crate::{folders, output};

/// The folder for compiled kernels, created if missing. Without one, they are compiled at every start, with a
/// note.
pub(crate) fn folder() -> Option<PathBuf> {
    let found = folders::pipelines().and_then(|folder| {
        make(&folder).with_context(|| folder.display().to_string())?;
        Ok(folder)
    });
    match found {
        Ok(folder) => Some(folder),
        Err(error) => {
            output::note(format_args!(
                "note: compiled GPU kernels are not kept: {error:#}"
            ));
            None
        }
    }
}

/// Creates `folder`, for this user alone; fails if it exists and others may write to it: its contents are
/// handed to the driver.
fn make(folder: &Path) -> Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).context("cannot make the folder")?;
    #[cfg(any(target_os = "linux", target_os = "macos"))]
    {
        use std::os::unix::fs::MetadataExt;

        let found = fs::metadata(folder).context("cannot look at the folder")?;
        if found.uid() != rustix::process::geteuid().as_raw() {
            anyhow::bail!(
                "expected a folder of this user's own, found one of user {}",
                found.uid()
            );
        }
        if found.mode() & 0o022 != 0 {
            let mode = found.mode() & 0o777;
            anyhow::bail!("expected a folder that only its owner writes to, found mode {mode:o}");
        }
    }
    Ok(())
}

/// The cached kernels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Kept {
    pub(crate) folder: PathBuf,
    pub(crate) n_files: usize,
    pub(crate) n_bytes: u64,
}

/// The current contents of the cache; fails if no folder is known, or it can't be read.
pub(crate) fn kept() -> Result<Kept> {
    let folder = folders::pipelines()?;
    let (n_files, n_bytes) = sizes(&folder).with_context(|| folder.display().to_string())?;
    Ok(Kept {
        folder,
        n_files,
        n_bytes,
    })
}

/// Number of files in `folder` and their bytes; 0 if there is no folder.
fn sizes(folder: &Path) -> io::Result<(usize, u64)> {
    let entries = match fs::read_dir(folder) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok((0, 0)),
        Err(error) => return Err(error),
    };
    let (mut n_files, mut n_bytes) = (0, 0);
    for entry in entries {
        let found = entry?.metadata()?;
        if found.is_file() {
            n_files += 1;
            n_bytes += found.len();
        }
    }
    Ok((n_files, n_bytes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_counted() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a/b");
        assert_eq!(sizes(&folder).unwrap(), (0, 0));
        make(&folder).unwrap();
        make(&folder).unwrap();
        fs::write(folder.join("one"), [0; 5]).unwrap();
        fs::write(folder.join("two"), [0; 7]).unwrap();
        assert_eq!(sizes(&folder).unwrap(), (2, 12));
        assert!(make(&folder.join("one")).is_err());
    }

    #[test]
    #[cfg(unix)]
    fn a_folder_that_others_write_to_is_refused() {
        use std::os::unix::fs::PermissionsExt;

        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("a");
        make(&folder).unwrap();
        let mode = fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o777)).unwrap();
        let error = make(&folder).unwrap_err().to_string();
        assert!(error.contains("found mode 777"), "{error}");
    }
}
