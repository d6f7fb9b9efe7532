//! An incomplete file, and what is known to be in it.

use std::{
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Read as _, Write as _},
    ops::Range,
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::{Blob, RangeSet, SinkError};
use crate::{positioned, sync_folder};

/// A file `NAME.part` that is filled in any order, with a log `NAME.part-map` of what has been filled, for
/// the next process.
///
/// The log is text: a line that names the blob, then a line for each range stored (`+0-1048576`) or forgotten
/// (`-0-4096`). It survives the end of the process at any moment: what isn't logged is fetched again, and a
/// truncated line is ignored. After a power failure the log may claim bytes that never reached the disk;
/// hashing detects that.
///
/// The log is locked while it is open, so that no second process writes to the same file.
#[derive(Debug)]
pub struct PartFile {
    path: PathBuf,
    map_path: PathBuf,
    file: File,
    map: Mutex<Map>,
}

#[derive(Debug)]
struct Map {
    log: File,
    stored: RangeSet,
    /// Stored, and not logged yet.
    pending: RangeSet,
}

/// Bytes per file that may be stored without being logged.
const LOG_EVERY: u64 = 64 << 10;

/// Maximum bytes of the log that are read; far more than a fetch writes.
const MAX_LOG: u64 = 64 << 20;

impl PartFile {
    /// Opens or creates the file of `blob` that is to become `target`. Bytes that an earlier process
    /// stored for another blob of this name are dropped.
    ///
    /// Errors: [`SinkError`], also if another process has it open.
    pub fn open(target: &Path, blob: &Blob) -> Result<Self, SinkError> {
        let path = with_suffix(target, ".part");
        let map_path = with_suffix(target, ".part-map");
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).map_err(SinkError::of(folder, "create the folder"))?;
        }
        let mut log = (OpenOptions::new().read(true).append(true).create(true))
            .open(&map_path)
            .map_err(SinkError::of(&map_path, "open"))?;
        log.try_lock().map_err(|error| {
            let source = match error {
                TryLockError::WouldBlock => {
                    io::Error::new(io::ErrorKind::WouldBlock, "another process is fetching it")
                }
                TryLockError::Error(source) => source,
            };
            SinkError::of(&map_path, "lock")(source)
        })?;
        let file = (OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false))
        .open(&path)
        .map_err(SinkError::of(&path, "open"))?;
        let identity = blob.identity();
        let mut text = Vec::new();
        ((&log).take(MAX_LOG).read_to_end(&mut text)).map_err(SinkError::of(&map_path, "read"))?;
        let mut stored = RangeSet::new();
        match text.strip_prefix(identity.as_bytes()) {
            Some(lines) => {
                stored = replay(lines);
                let len = file
                    .metadata()
                    .map_err(SinkError::of(&path, "examine"))?
                    .len();
                stored.remove(len.min(blob.size())..u64::MAX);
                if !text.ends_with(b"\n") {
                    log.write_all(b"\n")
                        .map_err(SinkError::of(&map_path, "write"))?;
                }
            }
            None => {
                file.set_len(0).map_err(SinkError::of(&path, "truncate"))?;
                log.set_len(0)
                    .map_err(SinkError::of(&map_path, "truncate"))?;
                (log.write_all(identity.as_bytes())).map_err(SinkError::of(&map_path, "write"))?;
            }
        }
        let pending = RangeSet::new();
        Ok(Self {
            path,
            map_path,
            file,
            map: Mutex::new(Map {
                log,
                stored,
                pending,
            }),
        })
    }

    /// The bytes of `blob` that an earlier process stored; nothing is created.
    ///
    /// Errors: as for [`open`](Self::open).
    pub fn left(target: &Path, blob: &Blob) -> Result<RangeSet, SinkError> {
        if with_suffix(target, ".part-map").exists() {
            Ok(Self::open(target, blob)?.present())
        } else {
            Ok(RangeSet::new())
        }
    }

    /// Cleans up after a process that was stopped between renaming the file to `target` and cleaning up.
    pub fn clean(target: &Path) -> Result<(), SinkError> {
        let map_path = with_suffix(target, ".part-map");
        if with_suffix(target, ".part").exists() {
            return Ok(());
        }
        match fs::remove_file(&map_path) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(SinkError::of(&map_path, "remove")(source))
            }
            _ => Ok(()),
        }
    }

    /// The stored ranges.
    pub fn present(&self) -> RangeSet {
        let map = self.lock();
        map.stored.union(&map.pending)
    }

    /// Stores `bytes` at `offset`.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        positioned::write_all_at(&self.file, bytes, offset)
            .map_err(SinkError::of(&self.path, "write"))?;
        let mut map = self.lock();
        map.pending.insert(offset..offset + bytes.len() as u64);
        if map.pending.len() >= LOG_EVERY {
            self.log_pending(&mut map)?;
        }
        Ok(())
    }

    /// Reads the stored bytes at `offset`.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError> {
        positioned::read_exact_at(&self.file, bytes, offset)
            .map_err(SinkError::of(&self.path, "read back"))
    }

    /// Forgets a range.
    pub fn discard(&self, range: Range<u64>) -> Result<(), SinkError> {
        let mut map = self.lock();
        map.stored.remove(range.clone());
        map.pending.remove(range.clone());
        let line = format!("-{}-{}\n", range.start, range.end);
        (map.log.write_all(line.as_bytes())).map_err(SinkError::of(&self.map_path, "write"))
    }

    /// Renames the file, whose bytes are all stored and verified, to `target`. When it returns, that is
    /// durable.
    pub fn commit(&self, target: &Path) -> Result<(), SinkError> {
        self.file
            .sync_all()
            .map_err(SinkError::of(&self.path, "write"))?;
        fs::rename(&self.path, target).map_err(SinkError::of(&self.path, "rename"))?;
        if let Some(folder) = target.parent() {
            sync_folder(folder).map_err(SinkError::of(folder, "write"))?;
        }
        // Without the file it is meaningless.
        fs::remove_file(&self.map_path).map_err(SinkError::of(&self.map_path, "remove"))
    }

    fn log_pending(&self, map: &mut Map) -> Result<(), SinkError> {
        let ranges = std::mem::take(&mut map.pending);
        let lines: String = ranges
            .iter()
            .map(|r| format!("+{}-{}\n", r.start, r.end))
            .collect();
        map.stored = map.stored.union(&ranges);
        (map.log.write_all(lines.as_bytes())).map_err(SinkError::of(&self.map_path, "write"))
    }

    fn lock(&self) -> MutexGuard<'_, Map> {
        // A panic while the lock was held left it consistent.
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        let mut map = self.lock();
        if !map.pending.is_empty() && self.map_path.exists() {
            // What isn't logged is fetched again, and errors can't be reported here.
            drop(self.log_pending(&mut map));
        }
    }
}

/// The ranges described by the lines of a log.
fn replay(lines: &[u8]) -> RangeSet {
    let mut stored = RangeSet::new();
    // A line without a line break was truncated.
    let complete = lines
        .iter()
        .rposition(|b| *b == b'\n')
        .map_or(0, |end| end + 1);
    for line in lines[..complete].split(|b| *b == b'\n') {
        let parsed = str::from_utf8(line).ok().and_then(|line| {
            let (sign, rest) = line.split_at_checked(1)?;
            let (start, end) = rest.split_once('-')?;
            Some((sign, start.parse().ok()?..end.parse().ok()?))
        });
        match parsed {
            Some(("+", range)) => stored.insert(range),
            Some(("-", range)) => stored.remove(range),
            _ => {}
        }
    }
    stored
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Algorithm, Expected, digest_of};

    fn blob(bytes: &[u8]) -> Blob {
        let expected = Expected::Digest(digest_of(Algorithm::Sha256, bytes));
        Blob::new("b", bytes.len() as u64, expected).unwrap()
    }

    fn ranges(part: &PartFile) -> Vec<(u64, u64)> {
        part.present().iter().map(|r| (r.start, r.end)).collect()
    }

    #[test]
    fn what_was_stored_is_known_to_the_next_process() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("folder/b");
        let blob = blob(&[7; 1000]);
        let part = PartFile::open(&target, &blob).unwrap();
        part.write_at(600, &[7; 400]).unwrap();
        part.write_at(0, &[7; 100]).unwrap();
        part.discard(900..1000).unwrap();
        let error = PartFile::open(&target, &blob).unwrap_err();
        assert!(
            error.source.to_string().contains("another process"),
            "{error}"
        );
        drop(part);
        let part = PartFile::open(&target, &blob).unwrap();
        assert_eq!(ranges(&part), [(0, 100), (600, 900)]);
        part.write_at(100, &[7; 500]).unwrap();
        part.write_at(900, &[7; 100]).unwrap();
        assert!(!target.exists());
        part.commit(&target).unwrap();
        drop(part);
        assert_eq!(fs::read(&target).unwrap(), [7; 1000]);
        let left = fs::read_dir(target.parent().unwrap()).unwrap().count();
        assert_eq!(left, 1);
    }

    #[test]
    fn what_belongs_to_another_blob_or_is_not_there_does_not_count() {
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("b");
        let first = blob(&[7; 1000]);
        PartFile::open(&target, &first)
            .unwrap()
            .write_at(0, &[7; 500])
            .unwrap();
        let other = PartFile::open(&target, &blob(&[8; 1000])).unwrap();
        assert_eq!(ranges(&other), []);
        other.write_at(0, &[8; 500]).unwrap();
        drop(other);
        File::options()
            .write(true)
            .open(dir.path().join("b.part"))
            .unwrap()
            .set_len(300)
            .unwrap();
        let other = PartFile::open(&target, &blob(&[8; 1000])).unwrap();
        assert_eq!(ranges(&other), [(0, 300)]);
    }

    #[test]
    fn a_log_may_end_anywhere_and_hold_anything() {
        let log = b"+0-10\n+20-30\n-5-8\n+1x-4\n\xff\n+9-3\n-\n\n+100-2";
        let found: Vec<_> = replay(log).iter().collect();
        assert_eq!(found, [0..5, 8..10, 20..30]);
        for end in 0..log.len() {
            replay(&log[..end]);
        }
        assert!(replay(b"+3-99999999999999999999\n").is_empty());
    }
}
