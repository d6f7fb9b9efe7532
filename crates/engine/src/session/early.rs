//! The beginning of a sequence, computed while the model's weights arrive.

use super::{EngineError, SessionOptions, check, expect_decoder};
use crate::backend::{Backend, BackendError, CacheShape, KvCache, Sequence};
use crate::config::ModelConfig;
use crate::forward::{Batch, ForwardPass, Scratch};
use crate::rope::{Angles, Rope};
use crate::weight_set::Embedding;
use crate::weights::Layer;

/// All that a sequence has before there are weights.
pub(crate) struct Start<B: Backend> {
    pub(super) options: SessionOptions,
    pub(super) ropes: Vec<Rope>,
    pub(super) cache: B::Cache,
    pub(super) scratch: Scratch<B>,
}

impl<B: Backend> Start<B> {
    pub(super) fn new(
        backend: &B,
        config: &ModelConfig,
        ropes: impl FnOnce(usize) -> Vec<Rope>,
        mut options: SessionOptions,
    ) -> Result<Start<B>, EngineError> {
        if config.family.encoder {
            // It has embeddings of so many positions, and every one attends to all.
            options.ctx_len = options.ctx_len.min(config.max_ctx);
            options.chunk = options.ctx_len;
        }
        let cache = backend.cache(&CacheShape {
            layers: config.kv_heads(),
            dtype: options.cache_on(backend),
        })?;
        Ok(Start {
            ropes: ropes(options.ctx_len),
            options,
            cache,
            scratch: Scratch::new(backend),
        })
    }
}

/// A forward pass over the first chunk of a prompt that goes as far as there are weights.
pub(crate) struct EarlyPrefill<B: Backend> {
    start: Start<B>,
    config: ModelConfig,
    ids: Vec<u32>,
    angles: Vec<Angles>,
    n_layers: usize,
}

impl<B: Backend> EarlyPrefill<B> {
    /// Begins with the first of `ids`, as many as there are in a chunk.
    pub(crate) fn new(
        backend: &B,
        config: ModelConfig,
        embedding: &Embedding<B>,
        ids: &[u32],
        options: SessionOptions,
    ) -> Result<EarlyPrefill<B>, EngineError> {
        expect_decoder(&config)?;
        check(&config, ids, 0, options.ctx_len)?;
        let ropes = |ctx_len| Rope::all(&config.ropes, ctx_len);
        let start = Start::new(backend, &config, ropes, options)?;
        let ids = &ids[..ids.len().min(options.chunk.max(1))];
        let ropes = start.ropes.iter();
        let mut early = EarlyPrefill {
            angles: ropes.map(|rope| rope.angles(0, ids.len())).collect(),
            start,
            config,
            ids: ids.to_vec(),
            n_layers: 0,
        };
        early.run(backend, |pass, scratch, batch| {
            pass.embed(embedding, scratch, batch)
        })?;
        Ok(early)
    }

    /// How many layers it has gone through.
    pub(crate) fn n_layers(&self) -> usize {
        self.n_layers
    }

    /// Goes through the next layer.
    pub(crate) fn layer(
        &mut self,
        backend: &B,
        layer: &Layer<B::Linear, B::Vector>,
    ) -> Result<(), EngineError> {
        let i = self.n_layers;
        self.run(backend, |pass, scratch, batch| {
            pass.layer(layer, scratch, batch, i)
        })?;
        self.n_layers += 1;
        Ok(())
    }

    /// The sequence, once it has gone through all layers.
    pub(crate) fn finish(mut self) -> Start<B> {
        self.start.cache.advance(self.ids.len());
        self.start
    }

    fn run(
        &mut self,
        backend: &B,
        part: impl FnOnce(
            ForwardPass<'_, B>,
            &mut Scratch<B>,
            &mut Batch<'_, B>,
        ) -> Result<(), BackendError>,
    ) -> Result<(), EngineError> {
        let Start { cache, scratch, .. } = &mut self.start;
        let mut sequences = [Sequence {
            cache,
            n_rows: self.ids.len(),
            n_angles: self.ids.len(),
        }];
        let mut batch = Batch {
            ids: &self.ids,
            sequences: &mut sequences,
            angles: &self.angles,
            adapters: &[],
            wanted: &[],
            tops: &[],
            hidden: false,
        };
        let pass = ForwardPass {
            backend,
            config: &self.config,
        };
        part(pass, scratch, &mut batch)?;
        // While it is computed, more weights arrive.
        Ok(backend.flush()?)
    }
}
