//! A session, and the tokens that it holds.

#[cfg(all(feature = "native", not(target_family = "wasm")))]
mod read;
mod saved;

use sterna_engine::lora::ActiveAdapter;
use sterna_engine::{Backend, Decoded, EngineError, Logits, Sampling, Session};

use crate::error::Result;

#[cfg(all(feature = "native", not(target_family = "wasm")))]
pub(crate) use saved::read_ids;
pub use saved::{SavedSequence, is_saved};

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
        }
        self.sync();
    }

    /// Drops the ids that the session has no tokens of: a step that failed, or was dropped, may have left it shorter
    /// ([`Session::forward_async`]).
    pub(crate) fn sync(&mut self) {
        self.ids.truncate(self.session.len());
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

    /// Applies these adapters from the next step on ([`Session::set_adapters`]). Tokens that were computed
    /// without them stay.
    pub fn set_adapters(&mut self, adapters: Vec<ActiveAdapter<B>>) -> Result<()> {
        Ok(self.session.set_adapters(adapters)?)
    }

    /// Appends `ids`, and returns the requested logits ([`Session::forward`]).
    /// After an error it may be shorter, as the session is.
    pub fn forward(&mut self, ids: &[u32], logits: Logits) -> Result<Vec<f32>> {
        let logits = self.session.forward(ids, logits);
        self.appended(ids, logits)
    }

    /// Appends `ids`, and returns the next token or logits to sample from ([`Session::decode`]). Errors: as of
    /// [`Sequence::forward`].
    pub fn decode(
        &mut self,
        ids: &[u32],
        sampling: Sampling<'_>,
        wanted: usize,
    ) -> Result<Decoded> {
        let decoded = self.session.decode(ids, sampling, wanted);
        self.appended(ids, decoded)
    }

    fn appended<T>(&mut self, ids: &[u32], result: Result<T, EngineError>) -> Result<T> {
        match result {
            Ok(_) => self.computed(ids),
            Err(_) => self.sync(),
        }
        Ok(result?)
    }
}
