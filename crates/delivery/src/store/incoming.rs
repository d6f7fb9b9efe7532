//! A blob that is arriving: its bytes so far, in any order, and what is known about them.

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
    sync::Arc,
};

use crate::{
    hash::{Algorithm, Digest, Expected, Hasher, Mismatch, Verifier},
    positioned,
};

use super::{Blob, StoreError, disk, extents::Extents, seal};

/// Bytes per blob whose arrival may be forgotten if the process is killed.
const JOURNAL_EVERY: u64 = 64 << 10;
/// The same of a blob without a digest, whose bytes are made durable before the journal says that they are there.
const SYNCED_EVERY: u64 = 16 << 20;
/// Bytes in a record of the journal: an offset and a length.
const RECORD: usize = 16;
/// Set in the length of a record for bytes that have been discarded.
const FORGET: u64 = 1 << 63;
/// Maximum size of the journal: that of 256 GiB.
const MAX_JOURNAL: u64 = 64 << 20;
/// Bytes read at once when what has arrived is hashed.
const READ: usize = 256 << 10;

/// A blob that is arriving.
///
/// Two files: the bytes, and a journal of which are there. The journal is written after the bytes and may lag
/// behind; it is never ahead, unless the system itself crashed, and then the digest tells. It is append-only,
/// so that a kill loses none of it.
#[derive(Debug)]
pub(super) struct Incoming {
    blob: Blob,
    path: PathBuf,
    file: Arc<File>,
    journal_path: PathBuf,
    journal: File,
    journal_len: u64,
    /// What is there, and the part of it that isn't in the journal yet.
    extents: Extents,
    unwritten: Extents,
    /// Bytes that may be unwritten.
    journal_every: u64,
}

impl Incoming {
    /// Where the bytes of `blob` are collected in `folder`.
    fn path(folder: &Path, blob: &Blob) -> PathBuf {
        let digest = &blob.digest;
        folder.join(format!("{}-{digest}-{}", digest.algorithm(), blob.size))
    }

    /// Bytes of `blob` that have arrived in `folder`, by the journal. Nothing is created to find out.
    pub(super) fn arrived(folder: &Path, blob: &Blob) -> Result<u64, StoreError> {
        let path = Self::path(folder, blob);
        let Some(len) = disk::file_size(&path)? else {
            return Ok(0);
        };
        let journal = path.with_extension("have");
        let Some(0..=MAX_JOURNAL) = disk::file_size(&journal)? else {
            return Ok(0);
        };
        let file = File::open(&journal).map_err(StoreError::io("open", &journal))?;
        let (mut extents, _) = read_journal(&disk::read_bounded(&file, &journal, MAX_JOURNAL)?);
        extents.remove(&(len.min(blob.size)..u64::MAX));
        Ok(extents.len())
    }

    /// True if a file in the folder of a fetch has a name that one of these gives it.
    pub(super) fn is_name(name: &str) -> bool {
        let name = name.strip_suffix(".have").unwrap_or(name);
        let mut parts = name.splitn(3, '-');
        let (Some(algorithm), Some(hex), Some(size)) = (parts.next(), parts.next(), parts.next())
        else {
            return false;
        };
        let digest =
            (algorithm.parse().ok()).and_then(|algorithm| Digest::from_hex(algorithm, hex).ok());
        digest.is_some() && size.parse::<u64>().is_ok()
    }

    /// True if bytes of `blob` have been gathered in `folder`.
    pub(super) fn exists(folder: &Path, blob: &Blob) -> Result<bool, StoreError> {
        Ok(disk::file_size(&Self::path(folder, blob))?.is_some())
    }

    /// Resumes with what is in `folder` of `blob`, or begins.
    pub(super) fn open(folder: &Path, blob: Blob) -> Result<Self, StoreError> {
        let path = Self::path(folder, &blob);
        let open = |path: &Path| {
            disk::clear_way(path).map_err(StoreError::io("take away the folder", path))?;
            (File::options()
                .create(true)
                .truncate(false)
                .read(true)
                .write(true))
            .open(path)
            .map_err(StoreError::io("open", path))
        };
        let file = open(&path)?;
        let journal_path = path.with_extension("have");
        let journal = open(&journal_path)?;
        let len = file
            .metadata()
            .map_err(StoreError::io("examine", &path))?
            .len();
        let records = match disk::file_size(&journal_path)? {
            Some(0..=MAX_JOURNAL) => disk::read_bounded(&journal, &journal_path, MAX_JOURNAL)?,
            _ => {
                journal
                    .set_len(0)
                    .map_err(StoreError::io("cut short", &journal_path))?;
                Vec::new()
            }
        };
        let (extents, journal_len) = read_journal(&records);
        let mut incoming = Self {
            blob,
            path,
            file: Arc::new(file),
            journal_path,
            journal,
            journal_len,
            extents,
            unwritten: Extents::default(),
            journal_every: JOURNAL_EVERY,
        };
        let len = len.min(blob.size);
        if incoming.extents.end() > len {
            // It mentions bytes lost in a crash of the system; other bytes may be written there.
            incoming.forget(&(len..incoming.extents.end()))?;
        }
        Ok(incoming)
    }

    /// From now on the journal isn't ahead after a crash of the system either, as no digest would tell.
    pub(super) fn sync_before_journal(&mut self) {
        self.journal_every = SYNCED_EVERY;
    }

    /// The digest of all bytes, which the name of this file isn't.
    pub(super) fn digest(&self, algorithm: Algorithm) -> Result<Digest, StoreError> {
        self.check_whole()?;
        let mut hasher = Hasher::new(algorithm);
        read_file(&self.file, &self.path, self.blob.size, |bytes| {
            hasher.update(bytes);
        })?;
        Ok(hasher.finish())
    }

    pub(super) fn extents(&self) -> &Extents {
        &self.extents
    }

    /// The file that bytes are written to, each at its offset; then they are [noted](Self::note). Two steps,
    /// so that several threads can write in parallel. A writer keeps the file until its bytes are noted:
    /// until then, the file is not [truncated](Self::discard).
    pub(super) fn file(&self) -> (Arc<File>, &Path) {
        (Arc::clone(&self.file), &self.path)
    }

    /// Whether there is a reader or writer at this moment, possibly of bytes that are not noted yet.
    pub(super) fn is_in_use(&self) -> bool {
        Arc::strong_count(&self.file) > 1
    }

    /// Records that the bytes of `range` are there. The journal follows a little later.
    pub(super) fn note(&mut self, range: Range<u64>) -> Result<(), StoreError> {
        self.extents.insert(range.clone());
        self.unwritten.insert(range);
        if self.unwritten.len() >= self.journal_every {
            self.flush_journal()?;
        }
        Ok(())
    }

    fn flush_journal(&mut self) -> Result<(), StoreError> {
        if self.journal_every == SYNCED_EVERY && self.unwritten.len() > 0 {
            (self.file.sync_data()).map_err(StoreError::io("make durable", &self.path))?;
        }
        let unwritten = std::mem::take(&mut self.unwritten);
        let records = unwritten.ranges().iter();
        let records: Vec<u8> = records
            .flat_map(|range| record(range.start, range.end - range.start))
            .collect();
        self.append(&records)
    }

    fn append(&mut self, records: &[u8]) -> Result<(), StoreError> {
        positioned::write_all_at(&self.journal, records, self.journal_len)
            .map_err(StoreError::io("write", &self.journal_path))?;
        self.journal_len += records.len() as u64;
        Ok(())
    }

    /// Records that the bytes of `range` are not there.
    fn forget(&mut self, range: &Range<u64>) -> Result<(), StoreError> {
        self.flush_journal()?;
        self.extents.remove(range);
        self.append(&record(
            range.start,
            range.end.saturating_sub(range.start) | FORGET,
        ))
    }

    /// Forgets the bytes of `range`, and truncates the end of the file unless it is in use: bytes that
    /// another thread has written and not noted yet may be there.
    pub(super) fn discard(&mut self, range: &Range<u64>) -> Result<(), StoreError> {
        // Forgotten first, then deleted.
        self.forget(range)?;
        if self.is_in_use() {
            return Ok(());
        }
        let (len, end) = (self.file_len()?, self.extents.end());
        if len > end {
            self.file
                .set_len(end)
                .map_err(StoreError::io("cut short", &self.path))?;
        }
        Ok(())
    }

    fn file_len(&self) -> Result<u64, StoreError> {
        let metadata = self.file.metadata();
        Ok(metadata
            .map_err(StoreError::io("examine", &self.path))?
            .len())
    }

    /// Reads all bytes and verifies them. Wrong ones are all discarded, as it is unknown which are wrong.
    pub(super) fn verify(&mut self) -> Result<(), StoreError> {
        self.check_whole()?;
        let blob = self.blob;
        match check_file(&self.file, &self.path, &blob)? {
            Ok(()) => Ok(()),
            Err(problem) => {
                self.discard(&(0..blob.size))?;
                Err(StoreError::Mismatch { blob, problem })
            }
        }
    }

    /// Checks that all bytes have arrived.
    pub(super) fn check_whole(&self) -> Result<(), StoreError> {
        let (blob, found) = (self.blob, self.extents.len());
        if found == blob.size {
            Ok(())
        } else {
            Err(StoreError::Incomplete { blob, found })
        }
    }

    /// Makes the verified bytes durable, and seals them.
    pub(super) fn sync(&self) -> Result<(), StoreError> {
        self.file
            .sync_all()
            .map_err(StoreError::io("make durable", &self.path))?;
        // Last, because some file systems update the date of late writes.
        seal::seal(&self.file);
        Ok(())
    }

    /// Moves the verified and durable bytes to `to`, their final name.
    pub(super) fn finish(self, to: &Path) -> Result<(), StoreError> {
        disk::clear_way(to).map_err(StoreError::io("take away the folder", to))?;
        let (path, journal_path) = self.close();
        disk::rename(&path, to)?;
        disk::delete(&journal_path).map(|_| ())
    }

    /// Deletes what has arrived.
    pub(super) fn remove(self) -> Result<(), StoreError> {
        let (path, journal_path) = self.close();
        disk::delete(&path)?;
        disk::delete(&journal_path).map(|_| ())
    }

    /// Closes both files: not every system moves or deletes open ones.
    fn close(self) -> (PathBuf, PathBuf) {
        (self.path, self.journal_path)
    }

    /// Writes everything to the journal, so that another process can resume.
    pub(super) fn pause(&mut self) -> Result<(), StoreError> {
        self.flush_journal()
    }
}

/// What a journal says is there, and the bytes of its whole records.
fn read_journal(bytes: &[u8]) -> (Extents, u64) {
    let mut extents = Extents::default();
    // A record that was cut short says nothing, and is written over.
    let records = bytes.as_chunks::<RECORD>().0;
    for record in records {
        let (offset, n) = record.split_at(8);
        let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
        let (offset, n) = (number(offset), number(n));
        match (offset.checked_add(n & !FORGET), n & FORGET) {
            (Some(end), FORGET) => extents.remove(&(offset..end)),
            (Some(end), _) => extents.insert(offset..end),
            // No record of ours.
            (None, _) => {}
        }
    }
    (extents, (records.len() * RECORD) as u64)
}

fn record(offset: u64, len: u64) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..8].copy_from_slice(&offset.to_le_bytes());
    record[8..].copy_from_slice(&len.to_le_bytes());
    record
}

/// How much a published blob's file is trusted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Trust {
    /// A sealed file has not been written since it was verified.
    Seal,
    /// Only the digest.
    Nothing,
}

/// What is wrong with the file of a published blob; `None` if its contents are right. Those are sealed.
pub(super) fn problem_in(
    path: &Path,
    blob: &Blob,
    trust: Trust,
) -> Result<Option<String>, StoreError> {
    let Some(metadata) = disk::examine(path)? else {
        return Ok(Some("is missing".to_owned()));
    };
    let size = metadata.len();
    if size != blob.size {
        return Ok(Some(format!("expected {} bytes, found {size}", blob.size)));
    }
    let is_sealed = seal::is_sealed(&metadata);
    if is_sealed && trust == Trust::Seal {
        return Ok(None);
    }
    let file = File::open(path).map_err(StoreError::io("open", path))?;
    let problem = check_file(&file, path, blob)?.err();
    if problem.is_none() && !is_sealed {
        // Where sealing fails, as in another user's store, it is hashed each time.
        if let Ok(file) = File::options().write(true).open(path) {
            seal::seal(&file);
        }
    }
    Ok(problem.map(|mismatch| mismatch.to_string()))
}

/// Whether `file`, of the right size, contains the bytes of `blob`: by its digest, or by the alternative
/// reading of the digest if there is one, BLAKE3 as a known writer gets it wrong.
fn check_file(file: &File, path: &Path, blob: &Blob) -> Result<Result<(), Mismatch>, StoreError> {
    let expected = Expected::Digest(blob.digest);
    let verify = |mut verifier: Verifier| {
        read_file(file, path, blob.size, |bytes| verifier.update(bytes))?;
        Ok(verifier.finish().map(|_| ()))
    };
    match (
        verify(Verifier::new(expected, blob.size))?,
        expected.second_verifier(),
    ) {
        (Err(mismatch), Some(variant)) => Ok(verify(variant)?.map_err(|_| mismatch)),
        (verdict, _) => Ok(verdict),
    }
}

/// Passes the first `size` bytes of `file` to `take`, in order.
fn read_file(
    file: &File,
    path: &Path,
    size: u64,
    mut take: impl FnMut(&[u8]),
) -> Result<(), StoreError> {
    let mut buffer = vec![0; READ];
    let mut at = 0;
    while at < size {
        // At most the length of the buffer.
        let bytes = &mut buffer[..(size - at).min(READ as u64) as usize];
        positioned::read_exact_at(file, bytes, at).map_err(StoreError::io("read", path))?;
        take(bytes);
        at += bytes.len() as u64;
    }
    Ok(())
}
