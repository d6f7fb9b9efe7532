//! A folder as the place where blobs go.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, Read as _},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use super::{Blob, Present, Sink, SinkError, part::PartFile};
use crate::hash::{Expected, Verified, Verifier};

/// Puts every blob in a folder, under its name once it is verified and as [`PartFile`] before.
///
/// What has a blob's name already is kept if it is the blob, and else replaced when the blob has come.
#[derive(Debug)]
pub struct FolderSink {
    root: PathBuf,
    parts: Mutex<HashMap<String, Arc<PartFile>>>,
}

impl FolderSink {
    /// A sink that writes below `root`, which is created when the first blob comes.
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self {
            root: root.into(),
            parts: Mutex::default(),
        }
    }

    /// Where a blob will be.
    pub fn path(&self, blob: &Blob) -> PathBuf {
        // The name was checked when the blob was made: it stays below the root.
        self.root.join(blob.name())
    }

    fn part(&self, blob: &Blob) -> Result<Arc<PartFile>, SinkError> {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = parts.get(blob.name()) {
            return Ok(part.clone());
        }
        let part = Arc::new(PartFile::open(&self.path(blob), blob)?);
        parts.insert(blob.name().to_owned(), part.clone());
        Ok(part)
    }
}

impl Sink for FolderSink {
    fn present(&self, blob: &Blob) -> Result<Present, SinkError> {
        let path = self.path(blob);
        if is_there(&path, blob).map_err(SinkError::of(&path, "read"))? {
            PartFile::clean(&path)?;
            return Ok(Present::Complete);
        }
        Ok(Present::Parts(self.part(blob)?.present()))
    }

    fn write_at(&self, blob: &Blob, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        self.part(blob)?.write_at(offset, bytes)
    }

    fn read_at(&self, blob: &Blob, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError> {
        self.part(blob)?.read_at(offset, bytes)
    }

    fn discard(&self, blob: &Blob, range: Range<u64>) -> Result<(), SinkError> {
        self.part(blob)?.discard(range)
    }

    fn commit(&self, blob: &Blob, _: Verified) -> Result<(), SinkError> {
        self.part(blob)?.commit(&self.path(blob))?;
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.remove(blob.name());
        Ok(())
    }
}

/// Whether the blob is at `path`, by its digest.
fn is_there(path: &Path, blob: &Blob) -> io::Result<bool> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        Err(error) => return Err(error),
    };
    let metadata = file.metadata()?;
    let same_size = metadata.is_file() && metadata.len() == blob.size();
    if !same_size || blob.expected() == Expected::SizeOnly {
        return Ok(false);
    }
    let matches = |file: &mut File, mut verifier: Verifier| {
        let mut buffer = vec![0; 1 << 18];
        loop {
            match file.read(&mut buffer)? {
                0 => return io::Result::Ok(verifier.finish().is_ok()),
                n => verifier.update(&buffer[..n]),
            }
        }
    };
    if matches(&mut file, Verifier::new(blob.expected(), blob.size()))? {
        return Ok(true);
    }
    match blob.expected().variant_verifier() {
        Some(variant) => matches(&mut File::open(path)?, variant),
        None => Ok(false),
    }
}
