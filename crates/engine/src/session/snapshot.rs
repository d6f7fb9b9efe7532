//! Sequences in files: what their caches hold, and a proof that it is the model's.
//!
//! Behind a head and what each layer holds come the hidden states of one more token, to which every weight and what is
//! held contribute. Whoever restores a sequence computes that token too, and believes the file only if the bits are the
//! same: what another model, revision or adapter has computed is refused, whatever the file says.

use std::borrow::Cow;
use std::io;

use super::{EngineError, Session};
use crate::backend::{
    Backend, KvCache, LayerContents, SnapshotError, SnapshotSink, SnapshotSource, take_saved,
};
use crate::config::ModelConfig;

/// The form of the file, and the machine's byte order.
const MAGIC: u64 = u64::from_be_bytes(*b"strnseq1");

/// The token that is computed as a proof.
const PROBE: u32 = 0;

impl<B: Backend> Session<B> {
    /// Writes what the session holds of its tokens, for [`Session::restore`]. The ids of the tokens are the caller's.
    ///
    /// Takes the time of a token, for which the context must have room.
    pub fn save(&mut self, to: &mut dyn SnapshotSink) -> Result<(), SaveError> {
        self.discard_lookahead();
        let len = self.len();
        let proof = self.probe()?;
        let counts = self.counts(len).map(|(_, count)| count);
        let head = std::iter::once(MAGIC).chain(counts);
        to.put(head.flat_map(u64::to_ne_bytes).collect())?;
        for layer in 0..self.model.config.n_layers {
            self.model.backend.save_layer(&mut self.cache, layer, to)?;
        }
        Ok(to.put(proof.into_iter().flat_map(f32::to_ne_bytes).collect())?)
    }

    /// Reads what [`Session::save`] wrote, in place of the tokens that the session holds. It goes on with the bits that
    /// it would have if it had computed them.
    ///
    /// Errors: [`SaveError`] if it was saved in another form, as by another kind of device, with another model or other
    /// adapters, or is damaged. The session is empty then.
    pub fn restore(&mut self, from: &mut dyn SnapshotSource) -> Result<(), SaveError> {
        self.truncate(0);
        let restored = self.read(from);
        if restored.is_err() {
            self.truncate(0);
        }
        restored
    }

    fn read(&mut self, from: &mut dyn SnapshotSource) -> Result<(), SaveError> {
        let mut number = || {
            let mut number = [0; 8];
            number.copy_from_slice(&take_saved(from, size_of::<u64>())?);
            Ok::<u64, SnapshotError>(u64::from_ne_bytes(number))
        };
        let magic = number()?;
        if magic != MAGIC {
            let hex = |number: u64| format!("{number:#018x}");
            return Err(SnapshotError::unfit("form", hex(MAGIC), hex(magic)).into());
        }
        let len = number()?;
        // One more is computed as a proof.
        let most = self.ctx_len().saturating_sub(1);
        if len > most as u64 {
            let expected = format!("at most {most}");
            return Err(SnapshotError::unfit("tokens", expected, len).into());
        }
        let len = len as usize;
        for (what, expected) in self.counts(len).into_iter().skip(1) {
            let found = number()?;
            if found != expected {
                return Err(SnapshotError::unfit(what, expected, found).into());
            }
        }
        let model = self.model.clone();
        for i in 0..model.config.n_layers {
            let held = contents(&model.config, i, len);
            let backend = model.backend();
            backend.restore_layer(&mut self.cache, i, held, from)?;
        }
        self.cache.advance(len);
        let values = self.probe()?;
        let values: Vec<u8> = values.into_iter().flat_map(f32::to_ne_bytes).collect();
        if *take_saved(from, values.len())? != *values {
            let found = "those of another model, revision or adapter";
            return Err(SnapshotError::unfit("tokens", "this model's", found).into());
        }
        Ok(())
    }

    /// What a file of `len` tokens has in its head.
    fn counts(&self, len: usize) -> [(&'static str, u64); 5] {
        let c = &self.model.config;
        [
            ("tokens", len as u64),
            ("layers", c.n_layers as u64),
            ("key-value heads", c.n_kv_heads as u64),
            ("elements of a head", c.head_dim as u64),
            (
                "type of the cache",
                self.options.cache_on(self.model.backend()) as u64,
            ),
        ]
    }

    /// The hidden states of one more token, which isn't kept.
    fn probe(&mut self) -> Result<Vec<f32>, EngineError> {
        let len = self.len();
        // So that it is remembered.
        self.cache.pin();
        let values = self.hidden(&[PROBE]);
        self.truncate(len);
        values
    }
}

/// What a session saved, in memory.
#[derive(Debug, Clone, Default)]
pub struct Snapshot {
    pieces: Vec<Vec<u8>>,
}

impl Snapshot {
    /// Bytes of all pieces.
    pub fn n_bytes(&self) -> usize {
        self.pieces.iter().map(Vec::len).sum()
    }

    /// Its pieces, one after the other.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        self.pieces.iter().map(|piece| &piece[..])
    }

    /// To restore from.
    pub fn source(&self) -> SnapshotPieces<'_> {
        SnapshotPieces {
            first: &[],
            others: &self.pieces,
        }
    }
}

impl SnapshotSink for Snapshot {
    fn put(&mut self, piece: Vec<u8>) -> io::Result<()> {
        self.pieces.push(piece);
        Ok(())
    }
}

/// What is left of a [`Snapshot`].
#[derive(Debug)]
pub struct SnapshotPieces<'a> {
    first: &'a [u8],
    others: &'a [Vec<u8>],
}

impl<'a> SnapshotPieces<'a> {
    /// Whether nothing is.
    pub fn is_empty(&self) -> bool {
        self.first.is_empty() && self.others.iter().all(Vec::is_empty)
    }

    fn skip_empty(&mut self) {
        while self.first.is_empty()
            && let Some((first, others)) = self.others.split_first()
        {
            (self.first, self.others) = (first, others);
        }
    }

    /// At most `n` bytes of the first piece.
    fn some(&mut self, n: usize) -> &'a [u8] {
        let (some, rest) = self.first.split_at(n.min(self.first.len()));
        self.first = rest;
        some
    }
}

impl SnapshotSource for SnapshotPieces<'_> {
    fn take(&mut self, n: usize) -> io::Result<Cow<'_, [u8]>> {
        self.skip_empty();
        if n <= self.first.len() {
            return Ok(self.some(n).into());
        }
        let n_left = self.first.len() + self.others.iter().map(Vec::len).sum::<usize>();
        if n > n_left {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut joined = Vec::with_capacity(n);
        while joined.len() < n {
            self.skip_empty();
            joined.extend_from_slice(self.some(n - joined.len()));
        }
        Ok(joined.into())
    }
}

fn contents(config: &ModelConfig, i: usize, len: usize) -> LayerContents {
    let layer = &config.layers[i];
    let n_state = config.layer_state(layer);
    let has_keys = layer.mixer.attends() && config.shared_layer(i).is_none();
    LayerContents {
        n_keys: if has_keys { len } else { 0 },
        n_state: if len == 0 { 0 } else { n_state },
    }
}

/// Why a session can't be saved or restored.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SaveError {
    /// What was saved doesn't fit, or can't be written or read.
    #[error(transparent)]
    Snapshot(#[from] SnapshotError),
    /// The proof can't be computed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl From<std::io::Error> for SaveError {
    fn from(error: std::io::Error) -> SaveError {
        SaveError::Snapshot(error.into())
    }
}
