//! A folder as the destination of blobs.

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

/// Stores every blob in a folder, under its name once it is verified and as [`PartFile`] before.
///
/// An existing file with a blob's name is kept if it is the blob, and else replaced when the blob has
/// arrived.
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

    /// The path of a blob.
    pub fn path(&self, blob: &Blob) -> PathBuf {
        // The name was checked when the blob was created: it stays below the root.
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
        // Opened when the first byte arrives: there may be more blobs than a process can have open files.
        Ok(Present::Parts(PartFile::left(&path, blob)?))
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

/// Whether the file at `path` has the blob's digest.
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
    match blob.expected().second_verifier() {
        Some(variant) => matches(&mut File::open(path)?, variant),
        None => Ok(false),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::RangeSet, *};

    #[test]
    fn asking_what_there_is_opens_and_creates_nothing() {
        let dir = tempfile::tempdir().unwrap();
        let sink = FolderSink::new(dir.path().join("model"));
        let blob = Blob::new("shards/0.bin", 9, Expected::GitBlob([0; 20])).unwrap();
        assert_eq!(
            sink.present(&blob).unwrap(),
            Present::Parts(RangeSet::new())
        );
        assert!(!dir.path().join("model").exists());
        sink.write_at(&blob, 3, b"abc").unwrap();
        drop(sink);
        let sink = FolderSink::new(dir.path().join("model"));
        let three: RangeSet = std::iter::once(3..6).collect();
        // Twice, so the first time closed all files.
        assert_eq!(sink.present(&blob).unwrap(), Present::Parts(three.clone()));
        let other = FolderSink::new(dir.path().join("model"));
        assert_eq!(other.present(&blob).unwrap(), Present::Parts(three));
    }
}
