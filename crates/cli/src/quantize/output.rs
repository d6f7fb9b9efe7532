//! Files that take their name only when they are whole.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};

/// A file that is written beside its name, which is that of the file with `.tmp` behind it; it is gone
/// with this value unless [`commit`] gave it its name.
pub(super) struct OutputFile {
    path: PathBuf,
    staged: PathBuf,
    file: BufWriter<File>,
    len: u64,
    renamed: bool,
}

impl OutputFile {
    /// Begins to write the file `path`. What an interrupted run left in its place is overwritten.
    pub(super) fn create(path: &Path) -> Result<OutputFile> {
        let mut staged = OsString::from(path);
        staged.push(".tmp");
        let staged = PathBuf::from(staged);
        let file = File::create(&staged);
        let file = file.with_context(|| format!("{}: cannot create", staged.display()))?;
        Ok(OutputFile {
            path: path.to_owned(),
            staged,
            file: BufWriter::new(file),
            len: 0,
            renamed: false,
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

    /// Brings everything onto the disk.
    fn sync(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        let synced = flushed.and_then(|()| self.file.get_ref().sync_all());
        synced.with_context(|| self.cannot_write())
    }

    fn cannot_write(&self) -> String {
        format!("{}: cannot write", self.staged.display())
    }
}

impl Drop for OutputFile {
    fn drop(&mut self) {
        if !self.renamed {
            // What led here is reported already.
            let _ = fs::remove_file(&self.staged);
        }
    }
}

/// Gives all of `files` their names once each is on the disk; if one can't have it, none has.
pub(super) fn commit(mut files: Vec<OutputFile>) -> Result<()> {
    for file in &mut files {
        file.sync()?;
    }
    for i in 0..files.len() {
        let OutputFile { path, staged, .. } = &files[i];
        if let Err(error) = fs::rename(staged, path) {
            for done in &files[..i] {
                // What led here is reported.
                let _ = fs::remove_file(&done.path);
            }
            let what = format!("cannot rename {} to {}", staged.display(), path.display());
            return Err(error).context(what);
        }
        files[i].renamed = true;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_appear_together_or_not_at_all() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b) = (dir.path().join("a"), dir.path().join("b"));
        let write = || {
            [&a, &b].map(|path| {
                let mut file = OutputFile::create(path).unwrap();
                file.write(b"x").unwrap();
                file.pad_to(3).unwrap();
                file
            })
        };
        let names = || {
            let entries = fs::read_dir(dir.path()).unwrap();
            let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
            names.sort();
            names
        };
        drop(write());
        assert!(names().is_empty());
        // A folder in the place of the second.
        fs::create_dir(&b).unwrap();
        assert!(commit(write().into()).is_err());
        assert_eq!(names(), ["b"]);
        fs::remove_dir(&b).unwrap();
        commit(write().into()).unwrap();
        assert_eq!(names(), ["a", "b"]);
        assert_eq!(fs::read(&a).unwrap(), b"x\0\0");
    }
}
