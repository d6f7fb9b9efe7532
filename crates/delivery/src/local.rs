//! Files on this machine.

use std::{
    fs::{self, File},
    io,
    ops::Range,
    path::{Path, PathBuf},
    thread,
    time::SystemTime,
};

use bytes::Bytes;

use crate::mmap::{self, Mapping};
use crate::positioned;

/// A regular file, its bytes in memory and shared without copies: mapped, or read
/// ([`LocalFile::read`]).
///
/// Slices keep the memory alive, so they may outlive the `LocalFile`. A mapped file must not be changed while
/// any of them is in use: write a new version next to it and rename it into place.
///
/// It holds memory and no open file, so that a model may have more files than a process may open.
#[derive(Debug, Clone)]
pub struct LocalFile {
    path: PathBuf,
    identity: Identity,
    bytes: Bytes,
    /// Where they are, unless they were read.
    mapping: Option<Mapping>,
}

/// Identifies a file, to detect its replacement or a change.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity {
    len: u64,
    modified: Option<SystemTime>,
    /// Device and inode number, where the system has such.
    node: Option<(u64, u64)>,
}

impl Identity {
    fn of(file: &File) -> io::Result<Self> {
        let metadata = file.metadata()?;
        #[cfg(unix)]
        let node = {
            use std::os::unix::fs::MetadataExt as _;
            Some((metadata.dev(), metadata.ino()))
        };
        #[cfg(not(unix))]
        let node = None;
        Ok(Self {
            len: metadata.len(),
            modified: metadata.modified().ok(),
            node,
        })
    }
}

/// Why a file, or a range of it, is not available.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LocalFileError {
    /// The system refused to open or examine the file.
    #[error("{}: cannot open", path.display())]
    Open {
        /// The requested file.
        path: PathBuf,
        /// The system's message.
        source: io::Error,
    },
    /// Only regular files can be mapped.
    #[error("{}: expected a regular file, found {found}", path.display())]
    NotAFile {
        /// The requested file.
        path: PathBuf,
        /// What is there instead.
        found: &'static str,
    },
    /// The system refused to map the file.
    #[error("{}: cannot map into memory", path.display())]
    Map {
        /// The requested file.
        path: PathBuf,
        /// The system's message.
        source: io::Error,
    },
    /// The system refused memory for the whole file, or to read it.
    #[error("{}: cannot read its {len} bytes into memory", path.display())]
    Read {
        /// The requested file.
        path: PathBuf,
        /// Its size when it was opened.
        len: u64,
        /// The system's message.
        source: io::Error,
    },
    /// It is not the file that was opened: it was changed since, or replaced.
    #[error("{}: changed since it was opened", path.display())]
    Changed {
        /// The requested file.
        path: PathBuf,
    },
    /// A range reaches past the end of the file.
    #[error("{}: wanted {len} bytes at offset {offset}, but the file has {file_len}", path.display())]
    OutOfBounds {
        /// The requested file.
        path: PathBuf,
        /// First byte requested, from the start of the file.
        offset: u64,
        /// Bytes requested.
        len: u64,
        /// Bytes in the file.
        file_len: u64,
    },
}

impl LocalFile {
    /// Opens and maps the regular file at `path`. No byte of it is read yet.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, LocalFileError> {
        let path = path.into();
        // Examined before it is opened, because opening a FIFO waits for its writer.
        let kind = match fs::metadata(&path) {
            Ok(metadata) => metadata.file_type(),
            Err(source) => return Err(LocalFileError::Open { path, source }),
        };
        if !kind.is_file() {
            let found = if kind.is_dir() {
                "a directory"
            } else {
                "a pipe, socket or device"
            };
            return Err(LocalFileError::NotAFile { path, found });
        }
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(source) => return Err(LocalFileError::Open { path, source }),
        };
        match Identity::of(&file).and_then(|identity| Ok((identity, mmap::map(&file)?))) {
            Ok((identity, mapping)) => Ok(Self {
                path,
                identity,
                bytes: mapping.bytes(),
                mapping: Some(mapping),
            }),
            Err(source) => Err(LocalFileError::Map { path, source }),
        }
    }

    /// The same file, read into memory of this process: in huge pages where the system has them, which
    /// processors read faster than the pages of a mapped file.
    ///
    /// Errors: [`LocalFileError::Read`]; [`LocalFileError::Changed`].
    pub fn read(&self) -> Result<Self, LocalFileError> {
        self.read_by(fill)
    }

    /// As [`read`](Self::read), on this thread alone; `look` is called with all bytes in order, piece by
    /// piece, as they are read: to hash them while they are in the cache.
    ///
    /// Errors: as for [`read`](Self::read).
    pub fn read_past(&self, mut look: impl FnMut(&[u8])) -> Result<Self, LocalFileError> {
        self.read_by(|file, bytes| {
            let mut offset = 0;
            for piece in bytes.chunks_mut(PIECE) {
                positioned::read_exact_at(file, piece, offset)?;
                offset += piece.len() as u64;
                look(piece);
            }
            Ok(())
        })
    }

    fn read_by(
        &self,
        fill: impl FnOnce(&File, &mut [u8]) -> io::Result<()>,
    ) -> Result<Self, LocalFileError> {
        let path = || self.path.clone();
        let file = File::open(&self.path).map_err(|source| LocalFileError::Open {
            path: path(),
            source,
        })?;
        let failed = |source| LocalFileError::Read {
            path: path(),
            len: self.len(),
            source,
        };
        if Identity::of(&file).map_err(failed)? != self.identity {
            return Err(LocalFileError::Changed { path: path() });
        }
        let bytes = mmap::filled(self.bytes.len(), |bytes| fill(&file, bytes)).map_err(failed)?;
        Ok(Self {
            bytes,
            mapping: None,
            ..self.clone()
        })
    }

    /// Where `bytes` are in this file, if it is mapped and they are in the mapping: the system can take them out of
    /// memory then.
    pub fn mapped_range(&self, bytes: &[u8]) -> Option<Range<usize>> {
        self.mapping.as_ref()?.position(bytes)
    }

    /// Prepares a mapped file for what is [released](Self::release) in small parts. A hint.
    pub fn in_small_pages(&self) {
        if let Some(mapping) = &self.mapping {
            mapping.in_small_pages();
        }
    }

    /// Has the system begin to read `range` of a mapped file. A hint.
    pub fn will_need(&self, range: Range<usize>) {
        if let Some(mapping) = &self.mapping {
            mapping.will_need(range);
        }
    }

    /// Takes the pages of a mapped file that `range` fills out of the memory of this process; they are read again when
    /// they are used. A hint.
    pub fn release(&self, range: Range<usize>) {
        if let Some(mapping) = &self.mapping {
            mapping.release(range);
        }
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes in the file.
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// True if the file has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The first `n` bytes, or the whole file if it is shorter.
    pub fn prefix(&self, n: u64) -> Bytes {
        let n = usize::try_from(n).map_or(self.bytes.len(), |n| n.min(self.bytes.len()));
        self.bytes.slice(..n)
    }

    /// A copy of `len` bytes from `offset` on in memory of this process, in huge pages where the system has them.
    ///
    /// Errors: [`LocalFileError::OutOfBounds`]; [`LocalFileError::Read`] if there is no memory.
    pub fn copy(&self, offset: u64, len: u64) -> Result<Bytes, LocalFileError> {
        let from = self.slice(offset, len)?;
        let copied = mmap::filled(from.len(), |to| {
            in_parallel(to, |part, at| {
                part.copy_from_slice(&from[at..at + part.len()]);
                Ok(())
            })
        });
        copied.map_err(|source| LocalFileError::Read {
            path: self.path.clone(),
            len,
            source,
        })
    }

    /// `len` bytes from `offset` on; fails if the file ends before.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Bytes, LocalFileError> {
        let file_len = self.len();
        match offset.checked_add(len) {
            // In bounds of a mapping, so both fit an address.
            Some(end) if end <= file_len => Ok(self.bytes.slice(offset as usize..end as usize)),
            _ => Err(LocalFileError::OutOfBounds {
                path: self.path.clone(),
                offset,
                len,
                file_len,
            }),
        }
    }
}

/// Bytes read at once before they are passed on: they fit the cache of a core.
const PIECE: usize = 256 << 10;

/// Threads that read a file; more are bound by the same memory.
const MAX_READERS: usize = 4;

/// Fills `bytes` with the beginning of `file`, in parallel.
fn fill(file: &File, bytes: &mut [u8]) -> io::Result<()> {
    in_parallel(bytes, |part, at| {
        positioned::read_exact_at(file, part, at as u64)
    })
}

/// Has threads fill parts of `bytes`, each told where it begins.
fn in_parallel(
    bytes: &mut [u8],
    fill: impl Fn(&mut [u8], usize) -> io::Result<()> + Sync,
) -> io::Result<()> {
    let fill = &fill;
    let n = thread::available_parallelism().map_or(1, |n| n.get().min(MAX_READERS));
    let share = (bytes.len() / n + 1).next_multiple_of(mmap::HUGE_PAGE);
    thread::scope(|scope| {
        let readers: Vec<_> = (bytes.chunks_mut(share).enumerate())
            .map(|(i, part)| scope.spawn(move || fill(part, i * share)))
            .collect();
        readers
            .into_iter()
            .try_for_each(|reader| reader.join().expect("a reader panicked"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file_with(bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("data.bin");
        fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    #[test]
    fn slices_share_the_mapping_and_outlive_the_file() {
        let (_dir, path) = file_with(b"0123456789");
        let file = LocalFile::open(&path).unwrap();
        assert_eq!(file.path(), path);
        assert_eq!((file.len(), file.is_empty()), (10, false));
        assert_eq!(file.prefix(4), "0123");
        assert_eq!(file.prefix(u64::MAX), "0123456789");
        let (a, b) = (file.slice(2, 3).unwrap(), file.slice(10, 0).unwrap());
        let start = file.prefix(10).as_ptr();
        drop(file);
        assert_eq!((&a[..], &b[..]), (&b"234"[..], &b""[..]));
        assert_eq!(
            a.as_ptr() as usize - start as usize,
            2,
            "a slice is not a copy"
        );
    }

    #[test]
    fn released_bytes_are_there_when_they_are_used() {
        let bytes: Vec<u8> = (0..1_000_000u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let (_dir, path) = file_with(&bytes);
        let file = LocalFile::open(&path).unwrap();
        let slice = file.slice(100_000, 700_000).unwrap();
        assert_eq!(file.mapped_range(&slice), Some(100_000..800_000));
        assert_eq!(file.mapped_range(&bytes), None);
        let read = file.read().unwrap();
        assert_eq!(read.mapped_range(&read.prefix(9)), None);
        for range in [
            100_000..800_000,
            0..1_000_000,
            9..10,
            5..5,
            999_999..2_000_000,
        ] {
            file.release(range.clone());
            file.will_need(range);
            assert!(slice == bytes[100_000..800_000]);
        }
    }

    #[test]
    fn ranges_past_the_end_are_refused() {
        let (_dir, path) = file_with(b"0123456789");
        let file = LocalFile::open(&path).unwrap();
        for (offset, len) in [(0, 11), (11, 0), (9, 2), (u64::MAX, 1), (1, u64::MAX)] {
            let message = file.slice(offset, len).unwrap_err().to_string();
            let end = format!("wanted {len} bytes at offset {offset}, but the file has 10");
            assert!(
                message.contains("data.bin") && message.ends_with(&end),
                "{message}"
            );
        }
    }

    #[test]
    fn a_file_that_is_read_has_the_same_bytes_and_no_need_of_the_mapping() {
        let bytes: Vec<u8> = (0..9_000_001u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let (_dir, path) = file_with(&bytes);
        let mapped = LocalFile::open(&path).unwrap();
        let read = mapped.read().unwrap();
        drop(mapped);
        assert_eq!(read.path(), path);
        assert!(read.prefix(u64::MAX) == bytes);
        assert_eq!(read.prefix(1).as_ptr().align_offset(mmap::HUGE_PAGE), 0);
        let (_dir, path) = file_with(b"");
        assert!(LocalFile::open(path).unwrap().read().unwrap().is_empty());
    }

    #[test]
    fn a_copy_has_the_bytes_of_the_slice() {
        let bytes: Vec<u8> = (0..5_000_000u32).map(|i| (i % 251) as u8).collect();
        let (_dir, path) = file_with(&bytes);
        let file = LocalFile::open(&path).unwrap();
        for (offset, len) in [(0, 5_000_000), (7, 4_500_001), (5_000_000, 0), (12, 1)] {
            let copy = file.copy(offset, len).unwrap();
            assert_eq!(copy, file.slice(offset, len).unwrap());
            assert_eq!(file.mapped_range(&copy), None);
        }
        let error = file.copy(1, 5_000_000).unwrap_err();
        assert!(matches!(error, LocalFileError::OutOfBounds { .. }));
    }

    #[test]
    fn bytes_are_shown_in_order_while_they_are_read() {
        let bytes: Vec<u8> = (0..3_000_001u32).map(|i| ((i * 7) >> 3) as u8).collect();
        let (_dir, path) = file_with(&bytes);
        let mut seen = Vec::new();
        let read = LocalFile::open(&path).unwrap();
        let read = read.read_past(|piece| seen.extend_from_slice(piece));
        assert!(read.unwrap().prefix(u64::MAX) == bytes && seen == bytes);
    }

    #[test]
    fn a_file_that_changed_since_it_was_opened_is_not_read() {
        let (dir, path) = file_with(b"0123456789");
        let changes: [&dyn Fn(); 3] = [
            &|| {
                let file = File::options().write(true).open(&path).unwrap();
                file.set_len(9).unwrap();
            },
            &|| {
                let file = File::options().write(true).open(&path).unwrap();
                file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
            },
            &|| {
                let other = dir.path().join("other");
                fs::copy(&path, &other).unwrap();
                let modified = fs::metadata(&path).unwrap().modified().unwrap();
                let file = File::options().write(true).open(&other).unwrap();
                file.set_modified(modified).unwrap();
                fs::rename(other, &path).unwrap();
            },
        ];
        for (i, change) in changes.iter().enumerate() {
            let mapped = LocalFile::open(&path).unwrap();
            change();
            if cfg!(unix) || i < 2 {
                let error = mapped.read().unwrap_err();
                assert!(matches!(error, LocalFileError::Changed { .. }), "{error}");
            }
            assert!(LocalFile::open(&path).unwrap().read().is_ok());
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn files_that_are_open_here_need_none_of_the_system() {
        let (_dir, path) = file_with(b"0123456789");
        let files: Vec<_> = (0..50).map(|_| LocalFile::open(&path).unwrap()).collect();
        let open = fs::read_dir("/proc/self/fd").unwrap().filter(|entry| {
            let link = entry.as_ref().map(|entry| fs::read_link(entry.path()));
            link.is_ok_and(|link| link.is_ok_and(|link| link == path))
        });
        assert_eq!((open.count(), files.len()), (0, 50));
    }

    #[test]
    fn an_empty_file_is_empty() {
        let (_dir, path) = file_with(b"");
        let file = LocalFile::open(path).unwrap();
        assert!(file.is_empty() && file.prefix(9).is_empty());
    }

    #[test]
    fn what_is_no_file_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let missing = LocalFile::open(dir.path().join("none")).unwrap_err();
        assert!(matches!(missing, LocalFileError::Open { .. }), "{missing}");
        let folder = LocalFile::open(dir.path()).unwrap_err();
        assert!(
            matches!(
                folder,
                LocalFileError::NotAFile {
                    found: "a directory",
                    ..
                }
            ),
            "{folder}"
        );
        #[cfg(unix)]
        {
            let device = LocalFile::open("/dev/null").unwrap_err();
            assert!(
                matches!(device, LocalFileError::NotAFile { .. }),
                "{device}"
            );
        }
    }
}
