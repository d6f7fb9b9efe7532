//! A session, and the tokens that it holds.

use std::io::{self, Read, Write};

use sterna_delivery::hash::{Algorithm, DIGEST_BYTES, Hasher};
use sterna_engine::lora::ActiveAdapter;
use sterna_engine::{Backend, Decoded, Logits, Sampler, Session};

use crate::error::{Result, bail};

/// What saved sequences begin with.
const MAGIC: &[u8; 16] = b"sterna sequence\n";

/// Whether a file that begins with `bytes`, 16 of them, is a saved sequence ([`Sequence::save`]).
pub fn is_saved(bytes: &[u8]) -> bool {
    bytes.starts_with(MAGIC)
}

/// A session, and the ids of the tokens in its cache.
pub struct Sequence<B: Backend> {
    session: Session<B>,
    /// One for each token of the session.
    ids: Vec<u32>,
}

impl<B: Backend> Sequence<B> {
    /// An empty sequence; the contents of `session` are dropped.
    pub fn new(mut session: Session<B>) -> Sequence<B> {
        if !session.is_empty() {
            session.truncate(0);
        }
        Sequence {
            session,
            ids: Vec::new(),
        }
    }

    /// What `session` holds, the first of `ids`.
    pub(crate) fn of(session: Session<B>, mut ids: Vec<u32>) -> Sequence<B> {
        ids.truncate(session.len());
        Sequence { session, ids }
    }

    /// The tokens, in order.
    pub fn ids(&self) -> &[u32] {
        &self.ids
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.ids.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty()
    }

    /// The maximum number of tokens.
    pub fn ctx_len(&self) -> usize {
        self.session.ctx_len()
    }

    /// The session.
    pub fn session(&self) -> &Session<B> {
        &self.session
    }

    /// The session alone.
    pub fn into_session(self) -> Session<B> {
        self.session
    }

    pub(crate) fn session_mut(&mut self) -> &mut Session<B> {
        &mut self.session
    }

    /// Appends `ids`, which the session has computed.
    pub(crate) fn computed(&mut self, ids: &[u32]) {
        self.ids.extend_from_slice(ids);
    }

    /// Truncates to the first `len` tokens, or fewer, as [`Session::truncate`].
    pub fn truncate(&mut self, len: usize) {
        // Truncating nothing would still discard what was computed ahead.
        if len < self.ids.len() {
            self.session.truncate(len);
            self.ids.truncate(self.session.len());
        }
    }

    /// Drops all tokens.
    pub fn reset(&mut self) {
        self.truncate(0);
    }

    /// A sequence that begins with the first `len` tokens of this one, or fewer, as [`Session::truncate`], sharing
    /// their memory.
    pub fn fork(&self, len: usize) -> Sequence<B> {
        let session = self.session.fork(len.min(self.ids.len()));
        let ids = self.ids[..session.len()].to_vec();
        Sequence { session, ids }
    }

    /// Writes the tokens and what was computed for them ([`Session::save`]), in a form that only [`Sequence::restore`]
    /// reads. Takes the time of a token, for which the context must have room.
    pub fn save(&mut self, to: &mut dyn Write) -> Result<()> {
        let mut hashed = Hashed::new(to);
        hashed.write_all(MAGIC)?;
        hashed.write_all(&(self.ids.len() as u64).to_ne_bytes())?;
        let ids: Vec<u8> = self.ids.iter().flat_map(|id| id.to_ne_bytes()).collect();
        hashed.write_all(&ids)?;
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
        let (mut magic, mut n) = ([0; 16], [0; 8]);
        hashed.read_exact(&mut magic)?;
        if !is_saved(&magic) {
            bail!(InvalidFile, "expected a saved sequence, found another file");
        }
        hashed.read_exact(&mut n)?;
        let (n, ctx_len) = (u64::from_ne_bytes(n), self.ctx_len());
        if n > ctx_len as u64 {
            bail!(
                ContextFull,
                "saved sequence: expected at most {ctx_len} tokens, found {n}"
            );
        }
        let mut ids = vec![0; 4 * n as usize];
        hashed.read_exact(&mut ids)?;
        self.session.restore(&mut hashed)?;
        let (from, digest) = hashed.finish();
        let mut expected = [0; DIGEST_BYTES];
        from.read_exact(&mut expected)?;
        if digest != expected || self.session.len() as u64 != n {
            bail!(HashMismatch, "saved sequence: it is damaged");
        }
        let (ids, _) = ids.as_chunks();
        Ok(ids.iter().copied().map(u32::from_ne_bytes).collect())
    }

    /// Applies these adapters from the next step on ([`Session::set_adapters`]). Tokens that were computed
    /// without them stay.
    pub fn set_adapters(&mut self, adapters: Vec<ActiveAdapter<B>>) -> Result<()> {
        Ok(self.session.set_adapters(adapters)?)
    }

    /// Appends `ids`, and returns the requested logits ([`Session::forward`]).
    pub fn forward(&mut self, ids: &[u32], logits: Logits) -> Result<Vec<f32>> {
        let logits = self.session.forward(ids, logits)?;
        self.computed(ids);
        Ok(logits)
    }

    /// Appends `id`, and returns the next token or logits to sample from ([`Session::decode`]).
    pub fn decode(&mut self, id: u32, sampler: &Sampler, wanted: usize) -> Result<Decoded> {
        let decoded = self.session.decode(id, sampler, wanted)?;
        self.computed(&[id]);
        Ok(decoded)
    }
}

/// Bytes on their way, and their digest.
struct Hashed<T> {
    inner: T,
    hasher: Hasher,
}

impl<T> Hashed<T> {
    fn new(inner: T) -> Hashed<T> {
        Hashed {
            inner,
            hasher: Hasher::new(Algorithm::Blake3),
        }
    }

    fn finish(self) -> (T, [u8; DIGEST_BYTES]) {
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
