//! The form of saved sequences: what they begin with, tokens, what was computed for them, and a digest of all of it.

use std::io::{self, Read, Write};

use sterna_delivery::hash::{Algorithm, DIGEST_BYTES, Hasher};
use sterna_engine::Backend;
use sterna_engine::session::Snapshot;

use super::Sequence;
use crate::error::{Result, bail};

/// What saved sequences begin with.
const MAGIC: &[u8; 16] = b"sterna sequence\n";

/// Whether a file that begins with `bytes`, 16 of them, is a saved sequence ([`Sequence::save`]).
pub fn is_saved(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// What a sequence holds, in memory of the host: its tokens, and what was computed for them.
#[derive(Debug, Clone)]
pub struct SavedSequence {
    pub(super) ids: Vec<u32>,
    /// As sessions write it.
    pub(super) contents: Snapshot,
}

impl SavedSequence {
    #[cfg(test)]
    pub(crate) fn new(ids: Vec<u32>, piece: Vec<u8>) -> SavedSequence {
        use sterna_engine::backend::SnapshotSink;
        let mut contents = Snapshot::default();
        contents.put(piece).unwrap();
        SavedSequence { ids, contents }
    }

    #[cfg(test)]
    pub(crate) fn contents(&self) -> Vec<u8> {
        self.contents.pieces().collect::<Vec<_>>().concat()
    }

    /// The tokens, in order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// Bytes in memory.
    pub fn n_bytes(&self) -> u64 {
        (size_of_val(&self.ids[..]) + self.contents.n_bytes()) as u64
    }

    /// Bytes that [`SavedSequence::write`] writes.
    pub fn file_bytes(&self) -> u64 {
        HEAD_BYTES + self.n_bytes() + DIGEST_BYTES as u64
    }

    /// Writes it as [`Sequence::save`] does.
    pub fn write(&self, to: &mut dyn Write) -> Result<()> {
        let mut hashed = Hashed::new(to);
        write_head(&self.ids, &mut hashed)?;
        for piece in self.contents.pieces() {
            hashed.write_all(piece)?;
        }
        let (to, digest) = hashed.finish();
        Ok(to.write_all(&digest)?)
    }
}

/// Memory for `n` bytes.
pub(super) fn room(n: u64) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let n_bytes = n.try_into().unwrap_or(usize::MAX);
    match bytes.try_reserve_exact(n_bytes) {
        Ok(()) => Ok(bytes),
        Err(_) => bail!(OutOfMemory, "no memory for {n} bytes of a sequence"),
    }
}

pub(super) const DAMAGED: &str = "saved sequence: it is damaged";
/// Bytes before the tokens.
pub(super) const HEAD_BYTES: u64 = MAGIC.len() as u64 + 8;

fn write_head(ids: &[u32], to: &mut dyn Write) -> Result<()> {
    to.write_all(MAGIC)?;
    to.write_all(&(ids.len() as u64).to_ne_bytes())?;
    let ids: Vec<u8> = ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
    Ok(to.write_all(&ids)?)
}

/// The tokens that a saved sequence begins with, at most `most`. Only the digest at its end says that they are what was
/// written.
///
/// Errors: it is no saved sequence, or has more.
pub(crate) fn read_ids(from: &mut dyn Read, most: u64) -> Result<Vec<u32>> {
    let (mut magic, mut n) = ([0; 16], [0; 8]);
    from.read_exact(&mut magic)?;
    if !is_saved(&magic) {
        bail!(InvalidFile, "expected a saved sequence, found another file");
    }
    from.read_exact(&mut n)?;
    let n = u64::from_ne_bytes(n);
    if n > most {
        bail!(
            ContextFull,
            "saved sequence: expected at most {most} tokens, found {n}"
        );
    }
    let mut ids = Vec::new();
    from.take(4 * n).read_to_end(&mut ids)?;
    let (ids, rest) = ids.as_chunks();
    if !rest.is_empty() || ids.len() as u64 != n {
        bail!(InvalidFile, "saved sequence: it is cut off");
    }
    Ok(ids.iter().copied().map(u32::from_ne_bytes).collect())
}

impl<B: Backend> Sequence<B> {
    /// Writes the tokens and what was computed for them ([`Session::save`](sterna_engine::Session::save)), in a form
    /// that only [`Sequence::restore`] reads. Takes the time of a token, for which the context must have room.
    pub fn save(&mut self, to: &mut dyn Write) -> Result<()> {
        let mut hashed = Hashed::new(to);
        write_head(&self.ids, &mut hashed)?;
        self.session.save(&mut hashed)?;
        let (to, digest) = hashed.finish();
        Ok(to.write_all(&digest)?)
    }

    /// Reads what [`Sequence::save`] wrote, in place of the tokens of this sequence, and goes on with the bits that it
    /// would have if it had computed them.
    ///
    /// Errors: what another model, adapter or kind of device has saved is refused, as are damaged files. The sequence
    /// is empty then.
    pub fn restore(&mut self, from: &mut dyn Read) -> Result<()> {
        self.reset();
        let restored = self.read(from);
        if restored.is_err() {
            self.session.truncate(0);
        }
        self.ids = restored?;
        Ok(())
    }

    /// Reads what was saved into the session; the ids of its tokens.
    fn read(&mut self, from: &mut dyn Read) -> Result<Vec<u32>> {
        let mut hashed = Hashed::new(from);
        let ids = read_ids(&mut hashed, self.ctx_len() as u64)?;
        self.session.restore(&mut hashed)?;
        let (from, digest) = hashed.finish();
        let mut expected = [0; DIGEST_BYTES];
        from.read_exact(&mut expected)?;
        if digest != expected || self.session.len() != ids.len() {
            bail!(HashMismatch, "{DAMAGED}");
        }
        Ok(ids)
    }

    /// The same as [`Sequence::save`], in memory, where about `n_bytes` are needed.
    ///
    /// Errors: also, there is no memory for it.
    pub fn snapshot(&mut self, n_bytes: u64) -> Result<SavedSequence> {
        // It comes in pieces.
        drop(room(n_bytes)?);
        let mut contents = Snapshot::default();
        self.session.save(&mut contents)?;
        let ids = self.ids.clone();
        Ok(SavedSequence { ids, contents })
    }

    /// The same as [`Sequence::restore`], from memory.
    pub fn restore_from(&mut self, saved: &SavedSequence) -> Result<()> {
        self.reset();
        let mut from = saved.contents.source();
        self.session.restore(&mut from)?;
        if !from.is_empty() || self.session.len() != saved.ids.len() {
            self.session.truncate(0);
            bail!(HashMismatch, "{DAMAGED}");
        }
        self.ids.clone_from(&saved.ids);
        Ok(())
    }
}

/// Bytes on their way, and their digest.
pub(super) struct Hashed<T> {
    pub(super) inner: T,
    pub(super) hasher: Hasher,
}

impl<T> Hashed<T> {
    pub(super) fn new(inner: T) -> Hashed<T> {
        Hashed {
            inner,
            hasher: Hasher::new(Algorithm::Blake3),
        }
    }

    pub(super) fn finish(self) -> (T, [u8; DIGEST_BYTES]) {
        (self.inner, *self.hasher.finish().as_bytes())
    }
}

impl<T: Read> Read for Hashed<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let n = self.inner.read(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }
}

impl<T: Write> Write for Hashed<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let n = self.inner.write(bytes)?;
        self.hasher.update(&bytes[..n]);
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}
