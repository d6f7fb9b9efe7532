//! The forward pass, for every family and every backend.

use std::ops::Range;

use sterna_kernels::attention::AttentionShape;

use crate::backend::{Backend, BackendError, ScreenedRows, Sequence};
use crate::config::LayerConfig;
use crate::generation::Generation;
use crate::head::screening::{Account, Screening};
use crate::lora::{ActiveAdapter, Module};
use crate::model::Model;
use crate::rope::Angles;
use crate::weights::{Layer, Projection};

/// Buffers of a forward pass, kept from one to the next.
pub(crate) struct Scratch<B: Backend> {
    /// The residual stream, `[m, model_dim]`.
    x: B::Buffer,
    /// What a block reads or adds, `[m, model_dim]`.
    h: B::Buffer,
    /// `[m, n_heads · head_dim]`.
    q: B::Buffer,
    /// `[m, n_kv_heads · head_dim]`.
    k: B::Buffer,
    /// `[m, n_kv_heads · head_dim]`.
    v: B::Buffer,
    /// What attention gives, `[m, n_heads · head_dim]`.
    a: B::Buffer,
    /// `[m, ffn_dim]`.
    gate: B::Buffer,
    /// `[m, ffn_dim]`.
    up: B::Buffer,
    /// The input of one projection, behind its own norm.
    normed: B::Buffer,
    /// `[rows, n_vocab]`.
    logits: B::Buffer,
    /// What the screen of the output head saves.
    account: Account,
}

impl<B: Backend> Scratch<B> {
    pub(crate) fn new(backend: &B) -> Scratch<B> {
        let buffer = || backend.buffer();
        Scratch {
            x: buffer(),
            h: buffer(),
            q: buffer(),
            k: buffer(),
            v: buffer(),
            a: buffer(),
            gate: buffer(),
            up: buffer(),
            normed: buffer(),
            logits: buffer(),
            account: Account::default(),
        }
    }

    pub(crate) fn account(&self) -> &Account {
        &self.account
    }

    pub(crate) fn logits(&mut self) -> &mut B::Buffer {
        &mut self.logits
    }
}

/// A linear layer, and where its result goes.
type Output<'a, B> = (
    &'a Projection<<B as Backend>::Linear, <B as Backend>::Vector>,
    &'a mut <B as Backend>::Buffer,
);

/// What a batch of tokens is run with. Each token is a row.
pub(crate) struct Batch<'a, B: Backend> {
    /// The token of each row.
    pub(crate) ids: &'a [u32],
    /// The sequences that the rows belong to, in turn.
    pub(crate) sequences: &'a mut [Sequence<'a, B::Cache>],
    /// The rotations of each row's position, for each of the model's rotary embeddings.
    pub(crate) angles: &'a [Angles],
    /// Ranges of rows that have adapters, and which.
    pub(crate) adapters: &'a [(Range<usize>, &'a [ActiveAdapter<B>])],
    /// Rows whose logits are wanted, ascending.
    pub(crate) wanted: &'a [usize],
    /// How many of the largest logits are wanted, if only one row's are; `None` for all.
    pub(crate) top: Option<usize>,
}

impl<B: Backend> Model<B> {
    /// Runs a batch through the model with the weights `w`, each sequence at the positions after those in its cache, and
    /// leaves the wanted logits in the scratch.
    pub(crate) fn forward(
        &self,
        w: &Generation<B>,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
    ) -> Result<(), BackendError> {
        let (be, c) = (&self.backend, &self.config);
        be.embed(w.token_embd(), batch.ids, c.embed_scale, &mut s.x)?;
        for (i, (layer, settings)) in w.layers().zip(&c.layers).enumerate() {
            self.attention_block(s, batch, i, layer, settings)?;
            self.ffn_block(s, batch, i, layer)?;
        }
        if batch.wanted.is_empty() {
            return Ok(());
        }
        if batch.wanted.len() < batch.ids.len() {
            be.keep_rows(&mut s.x, batch.wanted)?;
        }
        be.rms_norm(&s.x, w.output_norm(), c.norm_eps, &mut s.h)?;
        if let (Some(screening), Some(top)) = (&w.output().screening, batch.top) {
            return self.largest_logits(w, s, screening, top);
        }
        self.logits(w, s)?;
        if let Some(cap) = c.logit_softcap {
            be.softcap(&mut s.logits, cap)?;
        }
        Ok(())
    }

    /// `logits ← W_head · h`.
    fn logits(&self, w: &Generation<B>, s: &mut Scratch<B>) -> Result<(), BackendError> {
        match &w.output().projection {
            Some(head) => self.project(&s.h, &mut s.normed, &mut [(head, &mut s.logits)]),
            None => (self.backend).linear(&s.h, &mut [(w.token_embd(), &mut s.logits)]),
        }
    }

    /// The same for one row, of which the `top` largest are wanted. A head that is screened is a
    /// product and nothing else: [`ModelPlan::with_head`](crate::ModelPlan::with_head) sees to that.
    fn largest_logits(
        &self,
        w: &Generation<B>,
        s: &mut Scratch<B>,
        screening: &Screening<B::Screen>,
        top: usize,
    ) -> Result<(), BackendError> {
        let n_vocab = self.config.n_vocab;
        let rows = if s.account.affords(screening) {
            let projection = w.output().projection.as_ref();
            let head = projection.map_or(w.token_embd(), |head| &head.weight);
            let Screening { screen, .. } = screening;
            (self.backend).linear_top(&s.h, head, screen, top, &mut s.logits)?
        } else {
            self.logits(w, s)?;
            ScreenedRows {
                screened: 0,
                computed: n_vocab,
            }
        };
        s.account.enter(screening, rows, n_vocab);
        Ok(())
    }

    /// `x ← x + W_o · attention(norm(x))`.
    fn attention_block(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        layer: &Layer<B::Linear, B::Vector>,
        settings: &LayerConfig,
    ) -> Result<(), BackendError> {
        let (be, c) = (&self.backend, &self.config);
        be.rms_norm(&s.x, &layer.attn_norm, c.norm_eps, &mut s.h)?;
        self.project(
            &s.h,
            &mut s.normed,
            &mut [
                (&layer.q, &mut s.q),
                (&layer.k, &mut s.k),
                (&layer.v, &mut s.v),
            ],
        )?;
        self.adapt(
            batch,
            i,
            &s.h,
            &mut [
                (Module::Q, &mut s.q),
                (Module::K, &mut s.k),
                (Module::V, &mut s.v),
            ],
        )?;
        if let Some(norm) = &layer.q_norm {
            be.rms_norm_in_place(&mut s.q, norm, c.norm_eps)?;
        }
        if let Some(norm) = &layer.k_norm {
            be.rms_norm_in_place(&mut s.k, norm, c.norm_eps)?;
        }
        if let Some(rope) = settings.rope {
            be.rope(&mut s.q, c.head_dim, &batch.angles[rope])?;
            be.rope(&mut s.k, c.head_dim, &batch.angles[rope])?;
        }
        let shape = AttentionShape {
            n_heads: c.n_heads,
            n_kv_heads: c.n_kv_heads,
            head_dim: c.head_dim,
            scale: c.attn_scale,
            softcap: c.attn_softcap,
            window: settings.window,
        };
        let sequences = &mut *batch.sequences;
        be.attention(sequences, i, &shape, &s.q, &s.k, &s.v, &mut s.a)?;
        if let Some(norm) = &layer.attn_sub_norm {
            be.rms_norm_in_place(&mut s.a, norm, c.norm_eps)?;
        }
        self.project(&s.a, &mut s.normed, &mut [(&layer.o, &mut s.h)])?;
        self.adapt(batch, i, &s.a, &mut [(Module::O, &mut s.h)])?;
        if let Some(norm) = &layer.post_attn_norm {
            be.rms_norm_in_place(&mut s.h, norm, c.norm_eps)?;
        }
        be.add(&mut s.x, &s.h)
    }

    /// `x ← x + W_down · (activation(W_gate · h) ∘ W_up · h)` with `h = norm(x)`.
    fn ffn_block(
        &self,
        s: &mut Scratch<B>,
        batch: &Batch<'_, B>,
        i: usize,
        layer: &Layer<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let (be, c) = (&self.backend, &self.config);
        be.rms_norm(&s.x, &layer.ffn_norm, c.norm_eps, &mut s.h)?;
        self.project(
            &s.h,
            &mut s.normed,
            &mut [(&layer.gate, &mut s.gate), (&layer.up, &mut s.up)],
        )?;
        self.adapt(
            batch,
            i,
            &s.h,
            &mut [(Module::Gate, &mut s.gate), (Module::Up, &mut s.up)],
        )?;
        be.gate(c.activation, &mut s.gate, &s.up)?;
        if let Some(norm) = &layer.ffn_sub_norm {
            be.rms_norm_in_place(&mut s.gate, norm, c.norm_eps)?;
        }
        self.project(&s.gate, &mut s.normed, &mut [(&layer.down, &mut s.h)])?;
        self.adapt(batch, i, &s.gate, &mut [(Module::Down, &mut s.h)])?;
        if let Some(norm) = &layer.post_ffn_norm {
            be.rms_norm_in_place(&mut s.h, norm, c.norm_eps)?;
        }
        be.add(&mut s.x, &s.h)
    }

    /// Runs linear layers that read the same input; together, unless they norm it each in its way.
    fn project(
        &self,
        x: &B::Buffer,
        normed: &mut B::Buffer,
        outputs: &mut [Output<'_, B>],
    ) -> Result<(), BackendError> {
        let be = &self.backend;
        let mut plain = Vec::with_capacity(outputs.len());
        for (projection, out) in outputs.iter_mut() {
            match &projection.input_norm {
                None => plain.push((&projection.weight, &mut **out)),
                Some(norm) => {
                    be.rms_norm(x, norm, self.config.input_norm_eps, normed)?;
                    be.linear(normed, &mut [(&projection.weight, &mut **out)])?;
                }
            }
        }
        be.linear(x, &mut plain)?;
        drop(plain);
        for (projection, out) in outputs {
            if let Some(bias) = &projection.bias {
                be.add_bias(out, bias)?;
            }
        }
        Ok(())
    }
}
