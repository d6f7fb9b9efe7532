//! The forward pass, for every family and every backend.

use std::ops::Range;

use sterna_kernels::activation::{Activation, Function};
use sterna_kernels::attention::AttentionShape;
use sterna_kernels::rwkv::{Part, RwkvShape};

use crate::backend::{
    self, Attention, Backend, BackendError, ExpertInput, ExpertProduct, OutputLayout, Product,
    Prologue, RmsNorm, Rotation, ScreenedRows, Sequence, TokenShift,
};
use crate::config::{LayerConfig, ModelConfig, RwkvConfig};
use crate::family::QkNorms;
use crate::lora::ActiveAdapter;
use crate::model::Model;
use crate::rope::Angles;
use crate::screening::{ScreenBudget, Screening};
use crate::stage::{LinearLayer, Operation, Stage};
use crate::weight_set::{Embedding, WeightSet};
use crate::weights::{
    self, ChannelMix, Convolution, DeltaNet, Dense, Experts, FeedForward, FeedForwardBlock,
    LatentAttention, Layer, LayerInput, LayerInputs, Mamba, Mixer, Norm, Plain, Positions,
    Projection, Recurrence, SharedExpert, Shifted, Ssm, TimeMix,
};

/// Buffers of a forward pass, reused by the next.
pub(crate) struct Scratch<B: Backend> {
    /// The residual stream, `[m, model_dim]`.
    x: B::Buffer,
    /// Input or output of a block, `[m, model_dim]`.
    h: B::Buffer,
    /// That of the sum by which `h`, the output of a block, is still to be added to `x`.
    residual: Option<Stage>,
    /// `[m, n_heads · head_dim]`, with gates twice as wide; the input of a convolution, `[m, 3 · model_dim]`, or of
    /// a delta net, `[m, channels]`.
    q: B::Buffer,
    /// `[m, n_kv_heads · head_dim]`; of a delta net what decays follow from, `[m, n_value_heads]`.
    k: B::Buffer,
    /// `[m, n_kv_heads · head_dim]`; of a delta net its betas, `[m, n_value_heads]`.
    v: B::Buffer,
    /// Output of attention, `[m, n_heads · head_dim]`; of a delta net, `[m, values]`.
    a: B::Buffer,
    /// `[m, ffn_dim]`; of experts, `[routes, ffn_dim]`; the gates of a delta net, `[m, values]`.
    gate: B::Buffer,
    /// `[m, ffn_dim]`; of experts, `[routes, ffn_dim]`.
    up: B::Buffer,
    /// Scores of experts, `[m, n_experts]`; of the shared one, `[m, 1]`.
    scores: B::Buffer,
    /// What the shared expert gives, `[m, model_dim]`; the input of a layer, `[m, layer_input_dim]`.
    shared: B::Buffer,
    /// What all layers are given besides the residual stream, `[m, n_layers · layer_input_dim]`; of RWKV's seventh
    /// generation, the values of the first layer, `[m, model_dim]`.
    inputs: B::Buffer,
    /// What experts give, `[routes, model_dim]`.
    given: B::Buffer,
    /// The experts of each row.
    routes: B::Routes,
    /// The input of one projection, after its own norm.
    normed: B::Buffer,
    /// `[rows, n_vocab]`; `[rows, model_dim]` where hidden states are wanted.
    logits: B::Buffer,
    /// Savings of the screen of the output head.
    budget: ScreenBudget,
}

impl<B: Backend> Scratch<B> {
    pub(crate) fn new(backend: &B) -> Scratch<B> {
        let buffer = || backend.buffer();
        Scratch {
            x: buffer(),
            h: buffer(),
            residual: None,
            q: buffer(),
            k: buffer(),
            v: buffer(),
            a: buffer(),
            gate: buffer(),
            up: buffer(),
            scores: buffer(),
            shared: buffer(),
            inputs: buffer(),
            given: buffer(),
            routes: backend.routes(),
            normed: buffer(),
            logits: buffer(),
            budget: ScreenBudget::default(),
        }
    }

    pub(crate) fn budget(&self) -> &ScreenBudget {
        &self.budget
    }

    pub(crate) fn logits(&mut self) -> &mut B::Buffer {
        &mut self.logits
    }
}

/// A linear layer and its output.
type Output<'a, B> = (
    LinearLayer,
    &'a Projection<<B as Backend>::Linear, <B as Backend>::Vector>,
    &'a mut <B as Backend>::Buffer,
);

/// The norm that a block begins with.
struct Entry<'a, B: Backend> {
    stage: Stage,
    norm: &'a Norm<B::Vector>,
}

impl<B: Backend> Clone for Entry<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for Entry<'_, B> {}

/// Where linear layers that read mixes of positions are, and buffers that they need.
struct Shifts<'a, B: Backend> {
    layer: usize,
    /// The part of the state that has the position before.
    part: Part,
    x: &'a B::Buffer,
    /// What becomes of `x`.
    mixed: &'a mut B::Buffer,
    /// Between two layers of low rank.
    inner: &'a mut B::Buffer,
    normed: &'a mut B::Buffer,
}

impl<'a, B: Backend> Shifts<'a, B> {
    /// A mix by `factors`.
    fn of<'b>(
        &self,
        shape: RwkvShape,
        factors: &'b B::Vector,
        added: Option<&'b B::Buffer>,
    ) -> TokenShift<'b, B>
    where
        'a: 'b,
    {
        TokenShift {
            shape,
            part: self.part,
            x: self.x,
            factors,
            added,
        }
    }
}

/// The inputs of a batch of tokens. Each token is a row.
pub(crate) struct Batch<'a, B: Backend> {
    /// The token of each row.
    pub(crate) ids: &'a [u32],
    /// The sequences that the rows belong to, in order.
    pub(crate) sequences: &'a mut [Sequence<'a, B::Cache>],
    /// The rotations of each row's position, for each of the model's rotary embeddings.
    pub(crate) angles: &'a [Angles],
    /// Ranges of rows and their adapters.
    pub(crate) adapters: &'a [(Range<usize>, &'a [ActiveAdapter<B>])],
    /// Rows whose logits are needed, ascending.
    pub(crate) wanted: &'a [usize],
    /// How many of the largest logits of each of these are needed; empty if all are of any.
    pub(crate) tops: &'a [usize],
    /// What the output head would read is wanted, instead of logits.
    pub(crate) hidden: bool,
}

/// A model without its weights: what computes, and how. Weights are passed group by group, so that a pass can begin
/// before all of them are there.
pub(crate) struct ForwardPass<'a, B: Backend> {
    pub(crate) backend: &'a B,
    pub(crate) config: &'a ModelConfig,
}

impl<B: Backend> Model<B> {
    /// Runs a batch through the model with the weights `w`, each sequence at the positions after those in its
    /// cache, and leaves the requested logits in the scratch.
    pub(crate) fn forward(
        &self,
        w: &WeightSet<B>,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
    ) -> Result<(), BackendError> {
        let pass = ForwardPass {
            backend: self.backend(),
            config: &self.config,
        };
        pass.embed(w.embedding(), s, batch)?;
        for (i, layer) in w.layers().enumerate() {
            pass.layer(layer, s, batch, i)?;
        }
        pass.output(w, s, batch)
    }
}

impl<B: Backend> ForwardPass<'_, B> {
    /// Begins a step: the residual stream of a batch.
    pub(crate) fn embed(
        &self,
        w: &Embedding<B>,
        s: &mut Scratch<B>,
        batch: &Batch<'_, B>,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        be.begin_step()?;
        s.residual = None;
        be.embed(&w.token_embd, batch.ids, c.embed_scale, &mut s.x)?;
        if let (Some(inputs), Some(dim)) = (&w.layer_inputs, c.layer_input_dim) {
            self.layer_inputs(s, batch.ids, inputs, dim)?;
        }
        match &w.positions {
            Some(positions) => self.positions(s, batch, positions),
            None => Ok(()),
        }
    }

    /// What layer `i` adds to it.
    pub(crate) fn layer(
        &self,
        layer: &Layer<B::Linear, B::Vector>,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
    ) -> Result<(), BackendError> {
        let c = self.config;
        self.mixer_block(s, batch, i, layer, &c.layers[i])?;
        if let Some(block) = &layer.ffn {
            self.ffn_block(s, batch, i, block)?;
        }
        if let (Some(input), Some(dim)) = (&layer.input, c.layer_input_dim) {
            self.layer_input(s, i, input, dim)?;
        }
        match &layer.scale {
            Some(scale) => {
                let stage = of_layer(i, Operation::LayerScale);
                self.settle(s)?;
                self.backend.scale_by(stage, &mut s.x, scale)
            }
            None => Ok(()),
        }
    }

    /// The requested logits or hidden states.
    fn output(
        &self,
        w: &WeightSet<B>,
        s: &mut Scratch<B>,
        batch: &Batch<'_, B>,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        if batch.wanted.is_empty() {
            return Ok(());
        }
        self.settle(s)?;
        if batch.wanted.len() < batch.ids.len() {
            be.keep_rows(&mut s.x, batch.wanted)?;
        }
        let stage = outside(Operation::OutputNorm);
        let normed = match batch.hidden {
            true => &mut s.logits,
            false => &mut s.h,
        };
        match w.output_norm() {
            Some(norm) => self.norm(stage, &s.x, norm, normed)?,
            None => std::mem::swap(&mut s.x, normed),
        }
        if batch.hidden {
            return Ok(());
        }
        if let (Some(screening), [_, ..]) = (&w.output().screening, batch.tops) {
            return self.largest_logits(w, s, screening, batch.tops);
        }
        self.logits(w, s)?;
        if c.logit_scale != 1.0 {
            be.scale(outside(Operation::LogitScale), &mut s.logits, c.logit_scale)?;
        }
        if let Some(cap) = c.logit_softcap {
            be.softcap(outside(Operation::LogitSoftcap), &mut s.logits, cap)?;
        }
        Ok(())
    }

    /// `x ← x + table[positions] + token_type`, of whole sequences.
    fn positions(
        &self,
        s: &mut Scratch<B>,
        batch: &Batch<'_, B>,
        weights: &Positions<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let (be, stage) = (self.backend, outside(Operation::Positions));
        let sequences = batch.sequences.iter();
        let positions = sequences.flat_map(|sequence| 0..sequence.n_rows as u32);
        let positions: Vec<u32> = positions.collect();
        be.embed(&weights.table, &positions, 1.0, &mut s.h)?;
        be.add(stage, &mut s.x, &s.h)?;
        be.add_bias(stage, &mut s.x, &weights.token_type)
    }

    /// The sum of the residual stream and what the last block gave: `x ← x + h`.
    fn settle(&self, s: &mut Scratch<B>) -> Result<(), BackendError> {
        match s.residual.take() {
            Some(stage) => self.backend.add(stage, &mut s.x, &s.h),
            None => Ok(()),
        }
    }

    /// What a block reads: `h ← norm(x)`; all of `x` in encoders.
    fn enter(&self, s: &mut Scratch<B>, entry: Entry<'_, B>) -> Result<(), BackendError> {
        self.settle(s)?;
        match self.config.family.encoder {
            true => {
                let columns = 0..self.config.model_dim;
                (self.backend).columns(entry.stage, &s.x, columns, &mut s.h)
            }
            false => self.norm(entry.stage, &s.x, entry.norm, &mut s.h),
        }
    }

    /// The same for a block whose first products can begin with it: what they are to begin with, or `None` if it is done.
    fn entering<'a>(
        &self,
        s: &mut Scratch<B>,
        entry: Entry<'a, B>,
    ) -> Result<Option<Entry<'a, B>>, BackendError> {
        if self.config.family.encoder || entry.norm.bias.is_some() {
            self.enter(s, entry)?;
            return Ok(None);
        }
        Ok(Some(entry))
    }

    /// What becomes of what it gives: `x ← x + h`, once `x` is read ([`ForwardPass::settle`]); in encoders, the norm of that.
    fn leave(
        &self,
        s: &mut Scratch<B>,
        residual: Stage,
        entry: Entry<'_, B>,
    ) -> Result<(), BackendError> {
        s.residual = Some(residual);
        if self.config.family.encoder {
            self.settle(s)?;
            self.norm(entry.stage, &s.x, entry.norm, &mut s.h)?;
            std::mem::swap(&mut s.x, &mut s.h);
        }
        Ok(())
    }

    /// What all layers are given: `inputs ← (√dim · table[ids] + norm(W · x / √model_dim)) / √2`.
    fn layer_inputs(
        &self,
        s: &mut Scratch<B>,
        ids: &[u32],
        weights: &LayerInputs<B::Linear, B::Vector>,
        dim: usize,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        let stage = outside(Operation::LayerInputs);
        be.embed(&weights.table, ids, (dim as f32).sqrt(), &mut s.inputs)?;
        let projected = (LinearLayer::LayerInputs, &weights.projection, &mut s.up);
        let separate = OutputLayout::Separate;
        self.project(None, separate, &s.x, &mut s.normed, &mut [projected])?;
        be.rms_norm_in_place(stage, &mut s.up, &weights.norm, c.norm_eps)?;
        be.add(stage, &mut s.inputs, &s.up)?;
        be.scale(stage, &mut s.inputs, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// `x ← x + norm(W_out · (activation(W_gate · x) ∘ inputs[i]))`.
    fn layer_input(
        &self,
        s: &mut Scratch<B>,
        i: usize,
        weights: &LayerInput<B::Linear, B::Vector>,
        dim: usize,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        let stage = of_layer(i, Operation::LayerInput);
        self.settle(s)?;
        let separate = OutputLayout::Separate;
        let gate = (LinearLayer::LayerInputGate, &weights.gate, &mut s.gate);
        self.project(Some(i), separate, &s.x, &mut s.normed, &mut [gate])?;
        be.columns(stage, &s.inputs, i * dim..(i + 1) * dim, &mut s.shared)?;
        be.gate(stage, c.activation, &mut s.gate, &s.shared)?;
        let output = (LinearLayer::LayerInputOut, &weights.output, &mut s.h);
        self.project(Some(i), separate, &s.gate, &mut s.normed, &mut [output])?;
        be.rms_norm_in_place(stage, &mut s.h, &weights.norm, c.norm_eps)?;
        let stage = of_layer(i, Operation::LayerInputResidual);
        be.add(stage, &mut s.x, &s.h)
    }

    /// `logits ← W_head · h`.
    fn logits(&self, w: &WeightSet<B>, s: &mut Scratch<B>) -> Result<(), BackendError> {
        let separate = OutputLayout::Separate;
        match &w.output().projection {
            Some(head) => {
                let head = (LinearLayer::Head, head, &mut s.logits);
                self.project(None, separate, &s.h, &mut s.normed, &mut [head])
            }
            None => {
                let head = Product {
                    stage: outside(Operation::Product(LinearLayer::Head)),
                    w: w.token_embd(),
                    out: &mut s.logits,
                };
                self.backend.linear(&s.h, separate, &mut [head])
            }
        }
    }

    /// The same, of which the `tops[t]` largest of each row `t` are needed. A head with a screen is a product and
    /// nothing else: [`ModelPlan::with_head`](crate::ModelPlan::with_head) ensures that.
    fn largest_logits(
        &self,
        w: &WeightSet<B>,
        s: &mut Scratch<B>,
        screening: &Screening<B::Screen>,
        tops: &[usize],
    ) -> Result<(), BackendError> {
        let n_vocab = self.config.n_vocab;
        let rows = if s.budget.can_spend(screening) {
            let projection = w.output().projection.as_ref();
            let head = projection.map_or(w.token_embd(), |head| &head.weight);
            let Screening { screen, .. } = screening;
            let stage = outside(Operation::Product(LinearLayer::Head));
            (self.backend).linear_top(stage, &s.h, head, screen, tops, &mut s.logits)?
        } else {
            self.logits(w, s)?;
            ScreenedRows {
                screened: 0,
                computed: n_vocab,
            }
        };
        s.budget.record(screening, rows, tops.len(), n_vocab);
        Ok(())
    }

    /// `x ← x + mixer(norm(x))`; in encoders, `x ← norm(x + mixer(x))`.
    fn mixer_block(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        layer: &Layer<B::Linear, B::Vector>,
        settings: &LayerConfig,
    ) -> Result<(), BackendError> {
        let (be, eps) = (self.backend, self.config.norm_eps);
        let stage = |operation| of_layer(i, operation);
        if let Some(norm) = &layer.embed_norm {
            self.settle(s)?;
            self.norm(stage(Operation::EmbedNorm), &s.x, norm, &mut s.h)?;
            std::mem::swap(&mut s.x, &mut s.h);
        }
        let entry = Entry {
            stage: stage(Operation::AttnNorm),
            norm: &layer.attn_norm,
        };
        // `h` becomes what the mixer reads: here, or by its first products.
        let first = match &layer.mixer {
            Mixer::Time(_) | Mixer::Latent(_) => {
                self.enter(s, entry)?;
                None
            }
            _ => self.entering(s, entry)?,
        };
        match &layer.mixer {
            Mixer::Attention(attention) => {
                self.attention(s, batch, i, first, attention, settings)?;
            }
            Mixer::Latent(latent) => self.latent_attention(s, batch, i, latent, settings)?,
            Mixer::Convolution(convolution) => self.convolution(s, batch, i, first, convolution)?,
            Mixer::DeltaNet(net) => self.delta_net(s, batch, i, first, net)?,
            Mixer::Ssm(ssm) => {
                self.ssm(s, batch, i, first, ssm)?;
                std::mem::swap(&mut s.h, &mut s.shared);
            }
            Mixer::Mamba(mamba) => self.mamba(s, batch, i, first, mamba)?,
            Mixer::Time(time) => self.time_mix(s, batch, i, time)?,
            Mixer::Both(attention, ssm) => {
                self.ssm(s, batch, i, first, ssm)?;
                self.attention(s, batch, i, None, attention, settings)?;
                be.add(stage(Operation::Ssm), &mut s.h, &s.shared)?;
            }
        }
        if let Some(norm) = &layer.post_attn_norm {
            be.rms_norm_in_place(stage(Operation::PostAttnNorm), &mut s.h, norm, eps)?;
        }
        if self.config.residual_scale != 1.0 {
            let factor = self.config.residual_scale;
            be.scale(stage(Operation::AttnScale), &mut s.h, factor)?;
        }
        self.leave(s, stage(Operation::AttnResidual), entry)
    }

    /// `h ← W_out · convolution(W_in · h)`.
    fn convolution(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        first: Option<Entry<'_, B>>,
        convolution: &Convolution<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let separate = OutputLayout::Separate;
        let prologue = first.map(|entry| self.prologue(entry, &mut s.x, &mut s.residual));
        let input = &mut [(LinearLayer::ConvIn, &convolution.input, &mut s.q)];
        self.project_after(Some(i), separate, prologue, &mut s.h, &mut s.normed, input)?;
        let stage = of_layer(i, Operation::Convolution);
        (self.backend).convolution(stage, &convolution.taps, &s.q, batch.sequences, &mut s.a)?;
        let output = (LinearLayer::ConvOut, &convolution.output, &mut s.h);
        self.project(Some(i), separate, &s.a, &mut s.normed, &mut [output])
    }

    /// `h ← W_out · delta_net(h)`.
    fn delta_net(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        first: Option<Entry<'_, B>>,
        net: &DeltaNet<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let layout = OutputLayout::SideBySide;
        let inputs = &mut [
            (LinearLayer::DeltaQkv, &net.qkv, &mut s.q),
            (LinearLayer::DeltaGate, &net.gate, &mut s.gate),
            (LinearLayer::DeltaAlpha, &net.alpha, &mut s.k),
            (LinearLayer::DeltaBeta, &net.beta, &mut s.v),
        ];
        let prologue = first.map(|entry| self.prologue(entry, &mut s.x, &mut s.residual));
        self.project_after(Some(i), layout, prologue, &mut s.h, &mut s.normed, inputs)?;
        let shape = self.config.delta;
        let inputs = backend::DeltaNet {
            shape: shape.expect("a configuration with such layers has their heads"),
            taps: &net.taps,
            a: &net.a,
            dt_bias: &net.dt_bias,
            norm: &net.norm,
            eps: self.config.norm_eps,
            qkv: &mut s.q,
            gate: &mut s.gate,
            alpha: &mut s.k,
            beta: &mut s.v,
        };
        let stage = of_layer(i, Operation::DeltaNet);
        (self.backend).delta_net(stage, inputs, batch.sequences, &mut s.a)?;
        let separate = OutputLayout::Separate;
        let output = (LinearLayer::DeltaOut, &net.output, &mut s.h);
        self.project(Some(i), separate, &s.a, &mut s.normed, &mut [output])
    }

    /// `shared ← W_out · ssm(h)`, beside which attention may read the same `h`.
    fn ssm(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        first: Option<Entry<'_, B>>,
        ssm: &Ssm<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let layout = OutputLayout::SideBySide;
        let inputs = &mut [
            (LinearLayer::SsmGate, &ssm.gate, &mut s.gate),
            (LinearLayer::SsmIn, &ssm.xbc, &mut s.q),
            (LinearLayer::SsmDt, &ssm.dt, &mut s.k),
        ];
        let prologue = first.map(|entry| self.prologue(entry, &mut s.x, &mut s.residual));
        self.project_after(Some(i), layout, prologue, &mut s.h, &mut s.normed, inputs)?;
        let shape = self.config.ssm;
        let inputs = backend::Ssm {
            shape: shape.expect("a configuration with such layers has their heads"),
            taps: &ssm.taps,
            conv_bias: ssm.conv_bias.as_ref(),
            a: &ssm.a,
            d: &ssm.d,
            dt_bias: &ssm.dt_bias,
            norm: ssm.norm.as_ref(),
            eps: self.config.norm_eps,
            gate: &mut s.gate,
            xbc: &mut s.q,
            dt: &mut s.k,
        };
        let stage = of_layer(i, Operation::Ssm);
        (self.backend).ssm(stage, inputs, batch.sequences, &mut s.a)?;
        let separate = OutputLayout::Separate;
        let output = (LinearLayer::SsmOut, &ssm.output, &mut s.shared);
        self.project(Some(i), separate, &s.a, &mut s.normed, &mut [output])
    }

    /// `h ← W_out · mamba(h)`.
    fn mamba(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        first: Option<Entry<'_, B>>,
        mamba: &Mamba<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        let shape = (c.mamba).expect("a configuration with such layers has their channels");
        let separate = OutputLayout::Separate;
        let stage = of_layer(i, Operation::Ssm);
        let inputs = &mut [
            (LinearLayer::SsmIn, &mamba.input, &mut s.q),
            (LinearLayer::SsmGate, &mamba.gate, &mut s.gate),
        ];
        let prologue = first.map(|entry| self.prologue(entry, &mut s.x, &mut s.residual));
        self.project_after(Some(i), separate, prologue, &mut s.h, &mut s.normed, inputs)?;
        let sequences = &mut *batch.sequences;
        let convolution = backend::CausalConvolution {
            shape,
            taps: &mamba.taps,
            bias: mamba.conv_bias.as_ref(),
            input: &s.q,
        };
        be.causal_convolution(stage, convolution, sequences, &mut s.a)?;
        let inputs = &mut [
            (LinearLayer::SsmDt, &mamba.dt_in, &mut s.k),
            (LinearLayer::SsmB, &mamba.b, &mut s.v),
            (LinearLayer::SsmC, &mamba.c, &mut s.scores),
        ];
        self.project(Some(i), separate, &s.a, &mut s.normed, inputs)?;
        for (linear, x, norm) in [
            (LinearLayer::SsmDt, &mut s.k, &mamba.dt_norm),
            (LinearLayer::SsmB, &mut s.v, &mamba.b_norm),
            (LinearLayer::SsmC, &mut s.scores, &mamba.c_norm),
        ] {
            if let Some(norm) = norm {
                let stage = of_layer(i, Operation::WholeNorm(linear));
                be.rms_norm_in_place(stage, x, norm, c.norm_eps)?;
            }
        }
        let dt = (LinearLayer::SsmDtUp, &mamba.dt, &mut s.up);
        self.project(Some(i), separate, &s.k, &mut s.normed, &mut [dt])?;
        let scan = backend::SelectiveScan {
            shape,
            n_taps: c.conv_taps.unwrap_or(1),
            a: &mamba.a,
            d: &mamba.d,
            x: &s.a,
            dt: &s.up,
            b: &s.v,
            c: &s.scores,
            gate: &mut s.gate,
        };
        be.selective_scan(stage, scan, sequences, &mut s.q)?;
        let output = (LinearLayer::SsmOut, &mamba.output, &mut s.h);
        self.project(Some(i), separate, &s.q, &mut s.normed, &mut [output])
    }

    /// `out ← norm(x)`.
    fn norm(
        &self,
        stage: Stage,
        x: &B::Buffer,
        norm: &Norm<B::Vector>,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        let (be, eps) = (self.backend, self.config.norm_eps);
        match &norm.bias {
            None => be.rms_norm(stage, x, &norm.weight, eps, out),
            Some(bias) => be.layer_norm(stage, x, (&norm.weight, bias), eps, out),
        }
    }

    /// `h ← W_out · time_mix(h)`.
    fn time_mix(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        time: &TimeMix<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let (be, rwkv) = (self.backend, self.rwkv());
        let shape = rwkv.shape;
        let sequences = &mut *batch.sequences;
        let separate = OutputLayout::Separate;
        let mut shifts = Shifts {
            layer: i,
            part: Part::TimeMix,
            x: &s.h,
            mixed: &mut s.a,
            inner: &mut s.given,
            normed: &mut s.normed,
        };
        // Values of the first layer, which later ones add a part of to theirs.
        let is_first = matches!(&time.recurrence, Recurrence::Seven { residual: None, .. });
        let v = match is_first {
            true => &mut s.inputs,
            false => &mut s.v,
        };
        let gate = time.finish.as_ref().map(|(_, gate)| gate);
        let layers = [
            (Some(&time.k), LinearLayer::TimeK, &mut s.k),
            (Some(&time.v), LinearLayer::TimeV, v),
            (Some(&time.r), LinearLayer::TimeR, &mut s.q),
            (gate, LinearLayer::TimeGate, &mut s.gate),
        ];
        if let Recurrence::Six { shares, decay, .. } = &time.recurrence {
            let linear = LinearLayer::TimeShares;
            let stage = of_layer(i, Operation::Shift(linear));
            let shift = shifts.of(shape, &shares.factors, None);
            be.token_shift(stage, shift, sequences, shifts.mixed)?;
            let down = (linear, &shares.down, &mut s.shared);
            self.project(Some(i), separate, shifts.mixed, shifts.normed, &mut [down])?;
            be.apply(stage, Function::Tanh, &mut s.shared)?;
            let rank = rwkv.ranks.shares;
            let of_decay = (Some(decay), LinearLayer::TimeDecay, &mut s.up);
            let layers = [of_decay].into_iter().chain(layers);
            for (part, ((shifted, linear, out), up)) in layers.zip(&shares.up).enumerate() {
                let columns = part * rank..(part + 1) * rank;
                be.columns(stage, &s.shared, columns, shifts.inner)?;
                let product = Product {
                    stage: of_layer(i, Operation::Product(LinearLayer::TimeShares)),
                    w: up,
                    out: &mut s.scores,
                };
                be.linear(shifts.inner, separate, &mut [product])?;
                if let Some(shifted) = shifted {
                    let added = Some(&s.scores);
                    self.shifted(&mut shifts, sequences, linear, shifted, added, out)?;
                }
            }
        } else {
            for (shifted, linear, out) in layers {
                let Some(shifted) = shifted else {
                    continue;
                };
                self.shifted(&mut shifts, sequences, linear, shifted, None, out)?;
                if linear == LinearLayer::TimeV
                    && let Recurrence::Seven {
                        residual: Some([down, up]),
                        ..
                    } = &time.recurrence
                {
                    let linear = LinearLayer::TimeResidual;
                    self.through(&mut shifts, linear, Some(down), up, &mut s.shared)?;
                }
            }
        }
        if let Recurrence::Seven { decay, rate, .. } = &time.recurrence {
            let (of_decay, of_rate) = (LinearLayer::TimeDecay, LinearLayer::TimeRate);
            self.shifted(&mut shifts, sequences, of_decay, decay, None, &mut s.up)?;
            self.shifted(&mut shifts, sequences, of_rate, rate, None, &mut s.scores)?;
        }
        let (v, first_values) = match is_first {
            true => (&mut s.inputs, None),
            false => (&mut s.v, Some(&s.inputs)),
        };
        let mix = backend::TimeMix {
            shape,
            r: &s.q,
            k: &mut s.k,
            v,
            recurrence: match &time.recurrence {
                Recurrence::Fixed { decay, first } => backend::Recurrence::Fixed { decay, first },
                Recurrence::Six { first, .. } => backend::Recurrence::Six {
                    decay: &mut s.up,
                    first,
                },
                Recurrence::Seven { k_k, k_a, r_k, .. } => backend::Recurrence::Seven {
                    decay: &mut s.up,
                    rate: &mut s.scores,
                    residual: first_values.map(|first| (first, &s.shared)),
                    k_k,
                    k_a,
                    r_k,
                },
            },
            finish: match &time.finish {
                Some((
                    Norm {
                        weight,
                        bias: Some(bias),
                    },
                    _,
                )) => Some(backend::HeadNorm {
                    weight,
                    bias,
                    eps: rwkv.head_eps,
                    gate: &s.gate,
                }),
                _ => None,
            },
        };
        be.time_mix(of_layer(i, Operation::TimeMix), mix, sequences, &mut s.a)?;
        let output = (LinearLayer::TimeOut, &time.output, &mut s.h);
        self.project(Some(i), separate, &s.a, &mut s.normed, &mut [output])
    }

    /// `h ← sigmoid(W_r · h_r) ∘ W_v · max(W_k · h_k, 0)²`, of mixes of positions.
    fn channel_mix(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        mix: &ChannelMix<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let be = self.backend;
        let stage = of_layer(i, Operation::Activation);
        let mut shifts = Shifts {
            layer: i,
            part: Part::ChannelMix,
            x: &s.h,
            mixed: &mut s.a,
            inner: &mut s.given,
            normed: &mut s.normed,
        };
        let sequences = &mut *batch.sequences;
        let (of_key, of_gate) = (LinearLayer::Up, LinearLayer::Gate);
        self.shifted(&mut shifts, sequences, of_key, &mix.key, None, &mut s.up)?;
        if let Some(gate) = &mix.receptance {
            self.shifted(&mut shifts, sequences, of_gate, gate, None, &mut s.gate)?;
        }
        be.apply(stage, Function::Activation(Activation::Relu2), &mut s.up)?;
        let value = (LinearLayer::Down, &mix.value, &mut s.h);
        let separate = OutputLayout::Separate;
        self.project(Some(i), separate, &s.up, &mut s.normed, &mut [value])?;
        if mix.receptance.is_some() {
            be.apply(stage, Function::Sigmoid, &mut s.gate)?;
            be.multiply(stage, &mut s.h, &s.gate)?;
        }
        Ok(())
    }

    /// `out ← W · mix(x)`.
    fn shifted(
        &self,
        shifts: &mut Shifts<'_, B>,
        sequences: &mut [Sequence<'_, B::Cache>],
        linear: LinearLayer,
        weights: &Shifted<B::Linear, B::Vector>,
        added: Option<&B::Buffer>,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        let stage = of_layer(shifts.layer, Operation::Shift(linear));
        let shift = shifts.of(self.rwkv().shape, &weights.factors, added);
        (self.backend).token_shift(stage, shift, sequences, shifts.mixed)?;
        let (down, up) = (weights.down.as_ref(), &weights.projection);
        self.through(shifts, linear, down, up, out)
    }

    /// `out ← W · mixed`, through a low rank if there is one, with what function is between the two.
    fn through(
        &self,
        shifts: &mut Shifts<'_, B>,
        linear: LinearLayer,
        down: Option<&Projection<B::Linear, B::Vector>>,
        up: &Projection<B::Linear, B::Vector>,
        out: &mut B::Buffer,
    ) -> Result<(), BackendError> {
        let be = self.backend;
        let separate = OutputLayout::Separate;
        let layer = Some(shifts.layer);
        let stage = of_layer(shifts.layer, Operation::Shift(linear));
        let input = match down {
            None => &*shifts.mixed,
            Some(down) => {
                let down = &mut [(linear, down, &mut *shifts.inner)];
                self.project(layer, separate, shifts.mixed, shifts.normed, down)?;
                match linear {
                    LinearLayer::TimeDecay => be.apply(stage, Function::Tanh, shifts.inner)?,
                    LinearLayer::TimeGate => be.apply(stage, Function::Sigmoid, shifts.inner)?,
                    _ => {}
                }
                &*shifts.inner
            }
        };
        self.project(
            layer,
            separate,
            input,
            shifts.normed,
            &mut [(linear, up, out)],
        )
    }

    fn rwkv(&self) -> &RwkvConfig {
        let rwkv = self.config.rwkv.as_ref();
        rwkv.expect("a configuration with such layers has their heads")
    }

    /// `h ← W_o · attention(h)`.
    fn attention(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        first: Option<Entry<'_, B>>,
        weights: &weights::Attention<B::Linear, B::Vector>,
        settings: &LayerConfig,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        let stage = |operation| of_layer(i, operation);
        let (eps, adapters) = (c.norm_eps, batch.adapters);
        let parts = c.family.parts;
        let layout = OutputLayout::SideBySide;
        let mut inputs = vec![(LinearLayer::Q, &weights.q, &mut s.q)];
        let mut adapted = vec![LinearLayer::Q];
        if let Some(k) = &weights.k {
            let v = weights.v.as_ref().unwrap_or(k);
            inputs.push((LinearLayer::K, k, &mut s.k));
            inputs.push((LinearLayer::V, v, &mut s.v));
            adapted.extend([LinearLayer::K, LinearLayer::V]);
        }
        let prologue = first.map(|entry| self.prologue(entry, &mut s.x, &mut s.residual));
        let (h, normed) = (&mut s.h, &mut s.normed);
        self.project_after(Some(i), layout, prologue, h, normed, &mut inputs)?;
        let outputs = [&mut s.q, &mut s.k, &mut s.v];
        let mut outputs: Vec<_> = adapted.into_iter().zip(outputs).collect();
        self.adapt(adapters, i, &s.h, &mut outputs)?;
        let (mut q_norm, mut k_norm) = (weights.q_norm.as_ref(), weights.k_norm.as_ref());
        if parts.qk_norms == QkNorms::Whole {
            for (linear, x, norm) in [
                (LinearLayer::Q, &mut s.q, q_norm.take()),
                (LinearLayer::K, &mut s.k, k_norm.take()),
            ] {
                if let Some(norm) = norm {
                    be.rms_norm_in_place(stage(Operation::WholeNorm(linear)), x, norm, eps)?;
                }
            }
        }
        let heads = c.heads_of(i);
        let shared = c.shared_layer(i);
        if parts.value_norms && shared.is_none() {
            be.normalize_heads(stage(Operation::ValueNorm), &mut s.v, heads.head_dim, eps)?;
        }
        let attention = Attention {
            layer: i,
            shape: AttentionShape {
                n_heads: c.n_heads,
                n_kv_heads: heads.n_kv_heads,
                head_dim: heads.head_dim,
                scale: c.attn_scale,
                softcap: c.attn_softcap,
                window: settings.window,
            },
            q: &mut s.q,
            gated: parts.output_gates,
            k: &mut s.k,
            v: Some(&s.v),
            q_norm,
            k_norm,
            eps,
            rope: settings.rope.map(|index| Rotation {
                index,
                angles: &batch.angles[index],
            }),
            sinks: weights.sinks.as_ref(),
            shared,
            is_causal: !c.family.encoder,
        };
        be.attention(attention, batch.sequences, &mut s.a)?;
        let sub_norm = weights.sub_norm.as_ref().map(|weight| {
            Prologue::Norm(RmsNorm {
                stage: stage(Operation::AttnSubNorm),
                weight,
                eps,
            })
        });
        let output = &mut [(LinearLayer::O, &weights.o, &mut s.h)];
        let separate = OutputLayout::Separate;
        self.project_after(Some(i), separate, sub_norm, &mut s.a, &mut s.normed, output)?;
        self.adapt(adapters, i, &s.a, &mut [(LinearLayer::O, &mut s.h)])
    }

    /// `h ← W_o · latent_attention(h)`.
    fn latent_attention(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        weights: &LatentAttention<B::Linear, B::Vector>,
        settings: &LayerConfig,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        let shape = c.latent.as_ref();
        let shape = shape.expect("a configuration with such layers has their parts");
        let separate = OutputLayout::Separate;
        let stage = |operation| of_layer(i, operation);
        let norm = |linear| stage(Operation::WholeNorm(linear));
        let mut inputs = vec![
            (LinearLayer::K, &weights.k_rope, &mut s.up),
            (LinearLayer::Latent, &weights.latent, &mut s.v),
        ];
        inputs.push(match &weights.q_down {
            Some((down, _)) => (LinearLayer::QDown, down, &mut s.k),
            None => (LinearLayer::Q, &weights.q, &mut s.q),
        });
        self.project(Some(i), separate, &s.h, &mut s.normed, &mut inputs)?;
        if let Some((_, weight)) = &weights.q_down {
            be.rms_norm_in_place(norm(LinearLayer::QDown), &mut s.k, weight, c.norm_eps)?;
            let q = (LinearLayer::Q, &weights.q, &mut s.q);
            self.project(Some(i), separate, &s.k, &mut s.normed, &mut [q])?;
        }
        be.rms_norm_in_place(
            norm(LinearLayer::Latent),
            &mut s.v,
            &weights.latent_norm,
            c.norm_eps,
        )?;
        let inputs = backend::LatentInputs {
            shape,
            q: &s.q,
            k_rope: &s.up,
            latent: &s.v,
            w: &weights.k_up.iter().collect::<Vec<_>>(),
        };
        let (q, k) = (&mut s.gate, &mut s.k);
        be.latent_queries(stage(Operation::LatentQueries), inputs, q, k)?;
        let attention = Attention {
            layer: i,
            shape: AttentionShape {
                n_heads: c.n_heads,
                n_kv_heads: 1,
                head_dim: c.head_dim,
                scale: c.attn_scale,
                softcap: None,
                window: None,
            },
            q: &mut s.gate,
            gated: false,
            k: &mut s.k,
            v: None,
            q_norm: None,
            k_norm: None,
            eps: c.norm_eps,
            rope: settings.rope.map(|index| Rotation {
                index,
                angles: &batch.angles[index],
            }),
            sinks: None,
            shared: None,
            is_causal: true,
        };
        be.attention(attention, batch.sequences, &mut s.a)?;
        let w: Vec<_> = weights.v_up.iter().collect();
        be.latent_values(stage(Operation::LatentValues), shape, &s.a, &w, &mut s.q)?;
        let output = (LinearLayer::O, &weights.o, &mut s.h);
        self.project(Some(i), separate, &s.q, &mut s.normed, &mut [output])
    }

    /// `x ← x + ffn(norm(x))`; in encoders, `x ← norm(x + ffn(x))`.
    fn ffn_block(
        &self,
        s: &mut Scratch<B>,
        batch: &mut Batch<'_, B>,
        i: usize,
        block: &FeedForwardBlock<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let (be, eps) = (self.backend, self.config.norm_eps);
        let stage = |operation| of_layer(i, operation);
        let entry = Entry {
            stage: stage(Operation::FfnNorm),
            norm: &block.norm,
        };
        match &block.network {
            FeedForward::Dense(dense) => {
                let first = self.entering(s, entry)?;
                self.dense(s, batch, i, first, dense)?;
            }
            FeedForward::Channel(mix) => {
                self.enter(s, entry)?;
                self.channel_mix(s, batch, i, mix)?;
            }
            FeedForward::Plain(plain) => {
                self.enter(s, entry)?;
                self.plain(s, i, plain)?;
            }
            FeedForward::Experts(experts) => {
                self.enter(s, entry)?;
                self.experts(s, i, experts)?;
            }
        }
        if let Some(norm) = &block.post_norm {
            be.rms_norm_in_place(stage(Operation::PostFfnNorm), &mut s.h, norm, eps)?;
        }
        if self.config.residual_scale != 1.0 {
            let factor = self.config.residual_scale;
            be.scale(stage(Operation::FfnScale), &mut s.h, factor)?;
        }
        self.leave(s, stage(Operation::FfnResidual), entry)
    }

    /// `h ← W_down · activation(W_up · h)`.
    fn plain(
        &self,
        s: &mut Scratch<B>,
        i: usize,
        Plain { up, down }: &Plain<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let separate = OutputLayout::Separate;
        let up = (LinearLayer::Up, up, &mut s.up);
        self.project(Some(i), separate, &s.h, &mut s.normed, &mut [up])?;
        let function = Function::Activation(self.config.activation);
        (self.backend).apply(of_layer(i, Operation::Activation), function, &mut s.up)?;
        let down = (LinearLayer::Down, down, &mut s.h);
        self.project(Some(i), separate, &s.up, &mut s.normed, &mut [down])
    }

    /// `h ← W_down · (activation(W_gate · h) ∘ W_up · h)`.
    fn dense(
        &self,
        s: &mut Scratch<B>,
        batch: &Batch<'_, B>,
        i: usize,
        first: Option<Entry<'_, B>>,
        dense: &Dense<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let c = self.config;
        let stage = |operation| of_layer(i, operation);
        let adapters = batch.adapters;
        let prologue = first.map(|entry| self.prologue(entry, &mut s.x, &mut s.residual));
        let separate = OutputLayout::Separate;
        let inputs = &mut [
            (LinearLayer::Gate, &dense.gate, &mut s.gate),
            (LinearLayer::Up, &dense.up, &mut s.up),
        ];
        self.project_after(Some(i), separate, prologue, &mut s.h, &mut s.normed, inputs)?;
        let (gate, up) = (&mut s.gate, &mut s.up);
        let mut outputs = [(LinearLayer::Gate, gate), (LinearLayer::Up, up)];
        self.adapt(adapters, i, &s.h, &mut outputs)?;
        let activation = Prologue::Gate {
            stage: stage(Operation::Activation),
            activation: c.activation,
            up: &s.up,
            norm: dense.sub_norm.as_ref().map(|weight| RmsNorm {
                stage: stage(Operation::FfnSubNorm),
                weight,
                eps: c.norm_eps,
            }),
        };
        let output = &mut [(LinearLayer::Down, &dense.down, &mut s.h)];
        let (gate, normed) = (&mut s.gate, &mut s.normed);
        self.project_after(Some(i), separate, Some(activation), gate, normed, output)?;
        self.adapt(adapters, i, &s.gate, &mut [(LinearLayer::Down, &mut s.h)])
    }

    /// The same for each of the experts that a row is sent to; `h` becomes the weighted sum.
    fn experts(
        &self,
        s: &mut Scratch<B>,
        i: usize,
        experts: &Experts<B::Linear, B::Vector>,
    ) -> Result<(), BackendError> {
        let (be, c) = (self.backend, self.config);
        let stage = |operation| of_layer(i, operation);
        self.project(
            Some(i),
            OutputLayout::Separate,
            &s.h,
            &mut s.normed,
            &mut [(LinearLayer::Router, &experts.router, &mut s.scores)],
        )?;
        let mixture = (c.experts.as_ref()).expect("a configuration with such layers has a mixture");
        let bias = experts.bias.as_ref();
        be.choose_experts(&s.scores, bias, &mixture.routing, &mut s.routes)?;
        let biases = experts.biases.as_ref();
        let (of_gate, of_up, of_down) = (
            (&experts.gate[..], biases.map(|biases| &biases.gate)),
            (&experts.up[..], biases.map(|biases| &biases.up)),
            (&experts.down[..], biases.map(|biases| &biases.down)),
        );
        let products = &mut [
            of_experts(i, LinearLayer::Gate, of_gate, &mut s.gate),
            of_experts(i, LinearLayer::Up, of_up, &mut s.up),
        ];
        be.linear_experts(&s.routes, &s.h, ExpertInput::Tokens, products)?;
        be.gate(
            stage(Operation::Activation),
            c.activation,
            &mut s.gate,
            &s.up,
        )?;
        let down = &mut [of_experts(i, LinearLayer::Down, of_down, &mut s.given)];
        be.linear_experts(&s.routes, &s.gate, ExpertInput::Routes, down)?;
        let Some(shared) = &experts.shared else {
            return be.combine_experts(&s.routes, &s.given, &mut s.h);
        };
        let is_gated = self.shared_expert(s, i, shared)?;
        be.combine_experts(&s.routes, &s.given, &mut s.h)?;
        let stage = stage(Operation::SharedExpert);
        match is_gated {
            true => be.add_gated(stage, &mut s.h, &s.shared, &s.scores),
            false => be.add(stage, &mut s.h, &s.shared),
        }
    }

    /// What the expert of every row gives for `h`, and in `scores` how much it counts; whether it has such a gate.
    fn shared_expert(
        &self,
        s: &mut Scratch<B>,
        i: usize,
        SharedExpert { network, gate }: &SharedExpert<B::Linear, B::Vector>,
    ) -> Result<bool, BackendError> {
        let separate = OutputLayout::Separate;
        let mut inputs = vec![
            (LinearLayer::SharedGate, &network.gate, &mut s.gate),
            (LinearLayer::SharedUp, &network.up, &mut s.up),
        ];
        if let Some(gate) = gate {
            inputs.push((LinearLayer::SharedScore, gate, &mut s.scores));
        }
        self.project(Some(i), separate, &s.h, &mut s.normed, &mut inputs)?;
        let stage = of_layer(i, Operation::Activation);
        (self.backend).gate(stage, self.config.activation, &mut s.gate, &s.up)?;
        let output = (LinearLayer::SharedDown, &network.down, &mut s.shared);
        self.project(Some(i), separate, &s.gate, &mut s.normed, &mut [output])?;
        Ok(gate.is_some())
    }

    /// What the first products of a block do first: its entry.
    fn prologue<'a>(
        &self,
        Entry { stage, norm }: Entry<'a, B>,
        sum: &'a mut B::Buffer,
        residual: &mut Option<Stage>,
    ) -> Prologue<'a, B> {
        Prologue::Residual {
            sum,
            add: residual.take(),
            norm: RmsNorm {
                stage,
                weight: &norm.weight,
                eps: self.config.norm_eps,
            },
        }
    }

    /// Runs linear layers that read the same input; together, unless one has a norm of its own.
    fn project(
        &self,
        layer: Option<usize>,
        layout: OutputLayout,
        x: &B::Buffer,
        normed: &mut B::Buffer,
        outputs: &mut [Output<'_, B>],
    ) -> Result<(), BackendError> {
        let be = self.backend;
        if outputs.iter().all(|(_, of, _)| of.input_norm.is_none()) {
            be.linear(x, layout, &mut products(layer, outputs))?;
        } else {
            for output in outputs.iter_mut() {
                let (linear, Projection { input_norm, .. }, _) = output;
                let x = match input_norm {
                    None => x,
                    Some(norm) => {
                        let operation = Operation::InputNorm(*linear);
                        let (stage, eps) = (Stage { layer, operation }, self.config.input_norm_eps);
                        be.rms_norm(stage, x, norm, eps, normed)?;
                        &*normed
                    }
                };
                let separate = OutputLayout::Separate;
                be.linear(
                    x,
                    separate,
                    &mut products(layer, std::slice::from_mut(output)),
                )?;
            }
        }
        self.finish(layer, outputs)
    }

    /// The same after `prologue`, if there is one. `x` becomes what they read.
    fn project_after(
        &self,
        layer: Option<usize>,
        layout: OutputLayout,
        prologue: Option<Prologue<'_, B>>,
        x: &mut B::Buffer,
        normed: &mut B::Buffer,
        outputs: &mut [Output<'_, B>],
    ) -> Result<(), BackendError> {
        match prologue {
            Some(prologue) if outputs.iter().all(|(_, of, _)| of.input_norm.is_none()) => {
                let products = &mut products(layer, outputs);
                self.backend.linear_after(prologue, x, layout, products)?;
                return self.finish(layer, outputs);
            }
            Some(prologue) => prologue.run(self.backend, x)?,
            None => {}
        }
        self.project(layer, layout, x, normed, outputs)
    }

    /// Scales and biases of linear layers.
    fn finish(
        &self,
        layer: Option<usize>,
        outputs: &mut [Output<'_, B>],
    ) -> Result<(), BackendError> {
        let be = self.backend;
        let stage = |operation| Stage { layer, operation };
        for (linear, projection, out) in outputs {
            if projection.scale != 1.0 {
                be.scale(stage(Operation::Scale(*linear)), out, projection.scale)?;
            }
            if let Some(bias) = &projection.bias {
                be.add_bias(stage(Operation::Bias(*linear)), out, bias)?;
            }
        }
        Ok(())
    }
}

/// The products of linear layers.
fn products<'a, B: Backend>(
    layer: Option<usize>,
    outputs: &'a mut [Output<'_, B>],
) -> Vec<Product<'a, B>> {
    let outputs = outputs.iter_mut();
    let product = |(linear, projection, out): &'a mut Output<'_, B>| Product {
        stage: Stage {
            layer,
            operation: Operation::Product(*linear),
        },
        w: &projection.weight,
        out: &mut **out,
    };
    outputs.map(product).collect()
}

/// A product with the matrices of the experts of block `layer`, and their biases.
fn of_experts<'a, B: Backend>(
    layer: usize,
    linear: LinearLayer,
    (w, bias): (&'a [B::Linear], Option<&'a B::Vector>),
    out: &'a mut B::Buffer,
) -> ExpertProduct<'a, B> {
    ExpertProduct {
        stage: of_layer(layer, Operation::Product(linear)),
        w: w.iter().collect(),
        bias,
        out,
    }
}

/// An operation of block `layer`.
fn of_layer(layer: usize, operation: Operation) -> Stage {
    Stage {
        layer: Some(layer),
        operation,
    }
}

/// An operation before the first block or after the last.
fn outside(operation: Operation) -> Stage {
    Stage {
        layer: None,
        operation,
    }
}
