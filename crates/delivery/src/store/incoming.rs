//! A blob that is arriving: its bytes so far, in whatever order, and what is known about them.

use std::{
    fs::File,
    ops::Range,
    path::{Path, PathBuf},
};

use crate::hash::{Expected, Verified, Verifier};

use super::{Blob, StoreError, disk, extents::Extents};

/// Bytes that a crash may make us forget that we have, for each blob.
const JOURNAL_EVERY: u64 = 1 << 20;
/// Bytes in a record of the journal: an offset and a length.
const RECORD: usize = 16;
/// Largest journal that is believed: more pieces than any transfer has, and little memory.
const MAX_JOURNAL: u64 = 16 << 20;
/// Bytes read at once when what has arrived is hashed.
const READ: usize = 256 << 10;

/// A blob that is arriving.
///
/// Two files: the bytes, and a journal of which are there. The journal is written after the bytes and may
/// be behind them; it is never ahead, unless the system itself crashed, and then the digest tells.
#[derive(Debug)]
pub(super) struct Incoming {
    blob: Blob,
    path: PathBuf,
    file: File,
    journal_path: PathBuf,
    journal: File,
    journal_len: u64,
    /// What is there, and the part of it that the journal doesn't say yet.
    extents: Extents,
    unwritten: Range<u64>,
    /// The digest of the first `hashed` bytes, in the making.
    verifier: Verifier,
    hashed: u64,
}

impl Incoming {
    /// Where the bytes of `blob` are gathered in `folder`.
    fn path(folder: &Path, blob: &Blob) -> PathBuf {
        let digest = &blob.digest;
        folder.join(format!("{}-{digest}-{}", digest.algorithm(), blob.size))
    }

    /// True if bytes of `blob` have been gathered in `folder`.
    pub(super) fn exists(folder: &Path, blob: &Blob) -> Result<bool, StoreError> {
        Ok(disk::file_size(&Self::path(folder, blob))?.is_some())
    }

    /// Goes on with what is in `folder` of `blob`, or begins.
    pub(super) fn open(folder: &Path, blob: Blob) -> Result<Self, StoreError> {
        let path = Self::path(folder, &blob);
        let open = |path: &Path| {
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
            _ => Vec::new(),
        };
        let mut extents = Extents::default();
        // A record that was cut short, or speaks of bytes that are not there, says nothing.
        for record in records.as_chunks::<RECORD>().0 {
            let (offset, n) = record.split_at(8);
            let number = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
            let (offset, n) = (number(offset), number(n));
            if let Some(end) = offset
                .checked_add(n)
                .filter(|end| *end <= len.min(blob.size))
            {
                extents.insert(offset..end);
            }
        }
        let mut incoming = Self {
            blob,
            path,
            file,
            journal_path,
            journal,
            journal_len: 0,
            extents,
            unwritten: 0..0,
            verifier: Self::verifier(&blob),
            hashed: 0,
        };
        incoming.rewrite_journal()?;
        Ok(incoming)
    }

    fn verifier(blob: &Blob) -> Verifier {
        Verifier::new(Expected::Digest(blob.digest), blob.size)
    }

    pub(super) fn extents(&self) -> &Extents {
        &self.extents
    }

    /// Takes bytes at `offset`. What was there is replaced.
    pub(super) fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let end = self.blob.end_of(offset, bytes.len() as u64)?;
        disk::write_all_at(&self.file, bytes, offset)
            .map_err(StoreError::io("write", &self.path))?;
        if offset == self.hashed {
            self.verifier.update(bytes);
            self.hashed = end;
        } else if offset < self.hashed {
            self.restart_hash();
        }
        self.extents.insert(offset..end);
        self.note(offset..end)
    }

    /// Has the journal say that `range` is there, if not at once.
    fn note(&mut self, range: Range<u64>) -> Result<(), StoreError> {
        if self.unwritten.is_empty() {
            self.unwritten = range;
        } else if self.unwritten.end == range.start {
            self.unwritten.end = range.end;
        } else {
            self.flush_journal()?;
            self.unwritten = range;
        }
        if self.unwritten.end - self.unwritten.start >= JOURNAL_EVERY {
            self.flush_journal()?;
        }
        Ok(())
    }

    fn flush_journal(&mut self) -> Result<(), StoreError> {
        if self.unwritten.is_empty() {
            return Ok(());
        }
        let record = record(&self.unwritten);
        disk::write_all_at(&self.journal, &record, self.journal_len)
            .map_err(StoreError::io("write", &self.journal_path))?;
        self.journal_len += RECORD as u64;
        self.unwritten = 0..0;
        Ok(())
    }

    /// Writes the journal anew, from what is known. Cut short, it says less than there is.
    fn rewrite_journal(&mut self) -> Result<(), StoreError> {
        let records: Vec<u8> = self.extents.ranges().iter().flat_map(record).collect();
        (self
            .journal
            .set_len(0)
            .and_then(|()| disk::write_all_at(&self.journal, &records, 0)))
        .map_err(StoreError::io("write", &self.journal_path))?;
        self.journal_len = records.len() as u64;
        Ok(())
    }

    /// Forgets the bytes from `from` on.
    pub(super) fn discard(&mut self, from: u64) -> Result<(), StoreError> {
        self.flush_journal()?;
        self.extents.truncate(from);
        if self.hashed > from {
            self.restart_hash();
        }
        // Forgotten first, then gone.
        self.rewrite_journal()?;
        let len = self
            .file
            .metadata()
            .map_err(StoreError::io("examine", &self.path))?
            .len();
        if len > from {
            self.file
                .set_len(from)
                .map_err(StoreError::io("cut short", &self.path))?;
        }
        Ok(())
    }

    fn restart_hash(&mut self) {
        self.verifier = Self::verifier(&self.blob);
        self.hashed = 0;
    }

    /// Checks that all bytes are there and are the right ones, and makes them durable. Wrong ones are
    /// discarded.
    pub(super) fn verify(&mut self) -> Result<Verified, StoreError> {
        let (blob, found) = (self.blob, self.extents.len());
        if found != blob.size {
            return Err(StoreError::Incomplete { blob, found });
        }
        // What came in order is hashed already.
        hash_file(
            &self.file,
            &self.path,
            &mut self.verifier,
            self.hashed..blob.size,
        )?;
        self.hashed = blob.size;
        let verdict = match self.verifier.clone().finish() {
            Ok(verified) => Ok(verified),
            Err(mismatch) => second_opinion(&self.file, &self.path, &blob)?.ok_or(mismatch),
        };
        match verdict {
            Ok(verified) => {
                self.file
                    .sync_all()
                    .map_err(StoreError::io("make durable", &self.path))?;
                Ok(verified)
            }
            Err(problem) => {
                self.discard(0)?;
                Err(StoreError::Mismatch { blob, problem })
            }
        }
    }

    /// Moves the verified bytes to `to`, their final name.
    pub(super) fn finish(self, to: &Path) -> Result<(), StoreError> {
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

    /// Lets go of both files: not every system moves or deletes open ones.
    fn close(self) -> (PathBuf, PathBuf) {
        (self.path, self.journal_path)
    }

    /// Has the journal say all that is there, so that another process can go on.
    pub(super) fn pause(&mut self) -> Result<(), StoreError> {
        self.flush_journal()
    }
}

fn record(range: &Range<u64>) -> [u8; RECORD] {
    let mut record = [0; RECORD];
    record[..8].copy_from_slice(&range.start.to_le_bytes());
    record[8..].copy_from_slice(&(range.end - range.start).to_le_bytes());
    record
}

/// Whether the file of a published blob still holds the right bytes; `None` if it does.
pub(super) fn problem_in(path: &Path, blob: &Blob) -> Result<Option<String>, StoreError> {
    let Some(size) = disk::file_size(path)? else {
        return Ok(Some("is missing".to_owned()));
    };
    if size != blob.size {
        return Ok(Some(format!("expected {} bytes, found {size}", blob.size)));
    }
    let file = File::open(path).map_err(StoreError::io("open", path))?;
    let mut verifier = Incoming::verifier(blob);
    hash_file(&file, path, &mut verifier, 0..size)?;
    match verifier.finish() {
        Ok(_) => Ok(None),
        Err(mismatch) => {
            Ok((second_opinion(&file, path, blob)?.is_none()).then(|| mismatch.to_string()))
        }
    }
}

fn hash_file(
    file: &File,
    path: &Path,
    verifier: &mut Verifier,
    range: Range<u64>,
) -> Result<(), StoreError> {
    let mut buffer = vec![0; READ];
    let mut at = range.start;
    while at < range.end {
        let n = (range.end - at).min(READ as u64);
        // At most the length of the buffer.
        let bytes = &mut buffer[..n as usize];
        disk::read_exact_at(file, bytes, at).map_err(StoreError::io("read", path))?;
        verifier.update(bytes);
        at += n;
    }
    Ok(())
}

/// What the other reading of the digest says, where there is one: BLAKE3 as a known writer gets it wrong.
fn second_opinion(file: &File, path: &Path, blob: &Blob) -> Result<Option<Verified>, StoreError> {
    let Some(mut verifier) = Expected::Digest(blob.digest).variant_verifier() else {
        return Ok(None);
    };
    hash_file(file, path, &mut verifier, 0..blob.size)?;
    Ok(verifier.finish().ok())
}
