//! The sequences a model works on.

use std::sync::Arc;

use crate::backend::{Backend, BackendError, CacheShape, CacheType, KvCache};
use crate::forward::{Rows, Scratch};
use crate::model::Model;
use crate::rope::Rope;

/// Settings of a [`Session`].
#[derive(Debug, Clone, Copy)]
pub struct SessionOptions {
    /// Most tokens the sequence may hold.
    ///
    /// Rotary embeddings that depend on the length of the context take it from here, so that results
    /// don't depend on how a prompt is cut.
    pub ctx_len: usize,
    /// Number format of cached keys and values.
    pub cache: CacheType,
    /// Most tokens that are run through the model at once.
    pub chunk: usize,
}

impl SessionOptions {
    /// A context of `ctx_len` tokens, an f32 cache, chunks of 256.
    pub fn new(ctx_len: usize) -> SessionOptions {
        SessionOptions {
            ctx_len,
            cache: CacheType::F32,
            chunk: 256,
        }
    }
}

/// One sequence of tokens, with the keys and values the model has computed for it.
pub struct Session<B: Backend> {
    model: Arc<Model<B>>,
    options: SessionOptions,
    /// One for each of the model's rotary embeddings.
    ropes: Vec<Rope>,
    cache: B::Cache,
    scratch: Scratch<B>,
}

/// Which logits a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// Those after the last token.
    Last,
    /// Those after each token.
    All,
}

/// Why a model could not be run.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No tokens to run.
    #[error("no tokens: a forward pass needs at least one")]
    Empty,
    /// A token id the model doesn't have.
    #[error("token id {id} at index {index}: the model has {n_vocab} tokens")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Its place among those given.
        index: usize,
        /// The number of tokens the model has.
        n_vocab: usize,
    },
    /// More tokens than the session's context holds.
    #[error("context is full: {len} tokens and {more} more, where {ctx_len} fit")]
    ContextFull {
        /// Tokens in the cache.
        len: usize,
        /// Tokens to be added.
        more: usize,
        /// The most there may be.
        ctx_len: usize,
    },
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl<B: Backend> Session<B> {
    /// An empty sequence.
    pub fn new(model: Arc<Model<B>>, options: SessionOptions) -> Result<Session<B>, EngineError> {
        let config = &model.config;
        let ropes = config
            .ropes
            .iter()
            .map(|rope| Rope::new(rope, options.ctx_len))
            .collect();
        let cache = model.backend.cache(&CacheShape {
            n_layers: config.n_layers,
            n_kv_heads: config.n_kv_heads,
            head_dim: config.head_dim,
            dtype: options.cache,
        })?;
        let scratch = Scratch::new(&model.backend);
        Ok(Session {
            model,
            options,
            ropes,
            cache,
            scratch,
        })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model<B>> {
        &self.model
    }

    /// Tokens in the sequence.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// The most tokens there may be.
    pub fn ctx_len(&self) -> usize {
        self.options.ctx_len
    }

    /// Appends `ids` to the sequence and returns logits, `[rows, n_vocab]`.
    ///
    /// Long inputs are run in chunks; how they are cut doesn't change the result. After an error the
    /// sequence is as it was.
    /// Errors: [`EngineError`] names the token or the limit.
    pub fn forward(&mut self, ids: &[u32], logits: Logits) -> Result<Vec<f32>, EngineError> {
        self.check(ids)?;
        let before = self.cache.len();
        let result = self.run(ids, logits);
        if result.is_err() {
            self.cache.truncate(before);
        }
        result
    }

    fn run(&mut self, ids: &[u32], logits: Logits) -> Result<Vec<f32>, EngineError> {
        let mut out = Vec::new();
        let mut chunks = ids.chunks(self.options.chunk.max(1)).peekable();
        while let Some(chunk) = chunks.next() {
            let rows = match logits {
                Logits::All => Rows::All,
                Logits::Last if chunks.peek().is_none() => Rows::Last,
                Logits::Last => Rows::None,
            };
            let pos = self.cache.len();
            let angles: Vec<_> = self
                .ropes
                .iter()
                .map(|rope| rope.angles(pos, chunk.len()))
                .collect();
            self.model
                .forward(&mut self.scratch, &mut self.cache, chunk, &angles, rows)?;
            self.cache.advance(chunk.len());
            if rows != Rows::None {
                let values = self.model.backend.read(self.scratch.logits())?;
                if out.is_empty() {
                    out = values;
                } else {
                    out.extend(values);
                }
            }
        }
        Ok(out)
    }

    fn check(&self, ids: &[u32]) -> Result<(), EngineError> {
        if ids.is_empty() {
            return Err(EngineError::Empty);
        }
        let n_vocab = self.model.config.n_vocab;
        if let Some(index) = ids.iter().position(|&id| id as usize >= n_vocab) {
            return Err(EngineError::UnknownToken {
                id: ids[index],
                index,
                n_vocab,
            });
        }
        let (len, ctx_len) = (self.cache.len(), self.options.ctx_len);
        if ids.len() > ctx_len.saturating_sub(len) {
            return Err(EngineError::ContextFull {
                len,
                more: ids.len(),
                ctx_len,
            });
        }
        Ok(())
    }

    /// Forgets all but the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.cache.truncate(len);
    }

    /// A sequence that begins with the first `len` tokens of this one, sharing their memory.
    pub fn fork(&self, len: usize) -> Session<B> {
        Session {
            model: Arc::clone(&self.model),
            options: self.options,
            ropes: self.ropes.clone(),
            cache: self.cache.fork(len),
            scratch: Scratch::new(&self.model.backend),
        }
    }
}
