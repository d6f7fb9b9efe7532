//! A folder on this machine.

use std::{
    fs::File,
    io::{self, Read as _, Seek as _, SeekFrom},
    ops::Range,
    path::PathBuf,
};

use super::{Answer, Source, asked_for};
use crate::fetch::{Fault, Head};

/// A folder with blobs as files. Its bytes are verified like any other source's.
#[derive(Debug)]
pub struct FolderSource {
    root: PathBuf,
    name: String,
}

impl FolderSource {
    /// The folder at `root`.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        let root = root.into();
        Self {
            name: root.display().to_string(),
            root,
        }
    }
}

impl Source for FolderSource {
    fn name(&self) -> &str {
        &self.name
    }

    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault> {
        let missing = |error: &dyn ToString| Fault::Missing {
            message: error.to_string(),
        };
        asked_for(name)?;
        let failed = |error: io::Error| match error.kind() {
            io::ErrorKind::NotFound
            | io::ErrorKind::PermissionDenied
            | io::ErrorKind::NotADirectory => missing(&error),
            _ => Fault::Unreachable {
                message: error.to_string(),
            },
        };
        let path = self.root.join(name);
        // Examined before it is opened, because opening a FIFO waits for its writer.
        let metadata = path.metadata().map_err(failed)?;
        if !metadata.is_file() {
            return Err(missing(&"not a regular file"));
        }
        let mut file = File::open(&path).map_err(failed)?;
        let size = metadata.len();
        let part = range.map(|r| r.start.min(size)..r.end.min(size));
        let (start, end) = part.as_ref().map_or((0, size), |r| (r.start, r.end));
        file.seek(SeekFrom::Start(start)).map_err(failed)?;
        let head = Head {
            status: if part.is_some() { 206 } else { 200 },
            content_length: Some(end - start),
            content_range: part.map(|_| format!("bytes {start}-{}/{size}", end.saturating_sub(1))),
            ..Head::default()
        };
        Ok(Answer {
            head,
            body: Box::new(file.take(end - start)),
        })
    }
}
