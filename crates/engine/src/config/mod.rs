//! Model configuration, in one form for every file format.

pub(crate) mod gguf;
pub(crate) mod hf;
#[cfg(test)]
mod testing;
pub(crate) mod to_gguf;
mod to_hf;

use std::sync::Arc;

use sterna_format::hadamard::Hadamard;
use sterna_kernels::activation::Activation;
use sterna_kernels::delta::DeltaShape;
use sterna_kernels::experts::Routing;
use sterna_kernels::mamba::MambaShape;
use sterna_kernels::rope::RopeLayout;
use sterna_kernels::rwkv::{Generation, RwkvShape};
use sterna_kernels::ssm::SsmShape;

use crate::backend::{CachedValues, KvHeads};
use crate::error::PlanError;
pub use crate::family::Family;
use crate::rope::{RopeConfig, RopeScaling};

/// Shapes and constants of a model. Together with its weights it determines every logit.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ModelConfig {
    /// The family, which determines the graph.
    pub family: &'static Family,
    /// Transformer blocks.
    pub n_layers: usize,
    /// Width of the residual stream.
    pub model_dim: usize,
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; divides `n_heads`.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Heads of layers without a window, where they differ from those of the others.
    pub wide_heads: Option<WideHeads>,
    /// Last layers, which attend to the keys and values of the last layer of their kind, with a window or without one,
    /// before them.
    pub n_sharing: usize,
    /// Width of what each layer is given besides the residual stream.
    pub layer_input_dim: Option<usize>,
    /// Whether networks of layers that share keys and values are twice as wide.
    pub wide_networks: bool,
    /// Width of the feed-forward block, where that isn't a mixture of experts.
    pub ffn_dim: usize,
    /// Size of the vocabulary; ids are below it. Rows of the embedding table.
    pub n_vocab: usize,
    /// Context length of the model.
    pub max_ctx: usize,
    /// Epsilon of norms.
    pub norm_eps: f32,
    /// The same for norms that belong to a single projection.
    pub input_norm_eps: f32,
    /// Factor on embeddings.
    pub embed_scale: f32,
    /// Activation of the feed-forward gate.
    pub activation: Activation,
    /// Scale of query-key products.
    pub attn_scale: f32,
    /// Soft cap on attention scores.
    pub attn_softcap: Option<f32>,
    /// Soft cap on logits.
    pub logit_softcap: Option<f32>,
    /// The mixture of experts that layers have.
    pub experts: Option<ExpertsConfig>,
    /// Positions that a convolution covers, its own included, in layers that have one.
    pub conv_taps: Option<usize>,
    /// Heads of gated delta nets, in layers that have one.
    pub delta: Option<DeltaShape>,
    /// Heads of state spaces, in layers that have one.
    pub ssm: Option<SsmShape>,
    /// Channels of state spaces of the first Mamba, in layers that have one.
    pub mamba: Option<MambaShape>,
    /// Heads and ranks of time mixing, in layers that have it.
    pub rwkv: Option<RwkvConfig>,
    /// Factors that aren't in the weights.
    pub multipliers: Multipliers,
    /// Parts of queries, keys and values where attention is latent. A head of `head_dim` then has the rotated part of a
    /// key and the latent vector, which is what the cache holds: one such head for all heads of queries.
    pub latent: Option<LatentConfig>,
    /// Factor on what attention and networks add to the residual stream.
    pub residual_scale: f32,
    /// Factor on logits.
    pub logit_scale: f32,
    /// Which matrices are stored in a rotated basis.
    pub hadamard: Option<Arc<Hadamard>>,
    /// Settings of each layer, `[n_layers]`.
    pub layers: Vec<LayerConfig>,
    /// Rotary embeddings that layers refer to.
    pub ropes: Vec<RopeConfig>,
}

/// Time mixing of RWKV.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RwkvConfig {
    /// Its generation and heads, which are as wide as the residual stream together.
    pub shape: RwkvShape,
    /// Epsilon of the norm of what each head gives.
    pub head_eps: f32,
    /// Ranks of its pairs of matrices.
    pub ranks: RwkvRanks,
    /// What is added to the residual stream is stored as half of itself for each time that this many layers are before;
    /// 0 if it isn't.
    pub halved_every: usize,
}

/// Ranks of pairs of matrices in time mixing, 0 of those that a generation doesn't have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RwkvRanks {
    /// Of decays.
    pub decay: usize,
    /// Of each part of what is added to the factors of mixes.
    pub shares: usize,
    /// Of rates.
    pub rate: usize,
    /// Of the share of the first layer's values.
    pub residual: usize,
    /// Of gates.
    pub gate: usize,
}

impl RwkvConfig {
    /// What the names of matrices that the generation has say of their ranks.
    pub(crate) fn ranks_mut(&mut self) -> Vec<(&'static str, &mut usize)> {
        let RwkvRanks {
            decay,
            shares,
            rate,
            residual,
            gate,
        } = &mut self.ranks;
        match self.shape.generation {
            Generation::V4 | Generation::V5 => Vec::new(),
            Generation::V6 => vec![
                ("blk.0.time_mix_decay_w1", decay),
                ("blk.0.time_mix_w1", shares),
            ],
            Generation::V7 => vec![
                ("blk.0.time_mix_w1", decay),
                ("blk.0.time_mix_a1", rate),
                ("blk.1.time_mix_v1", residual),
                ("blk.0.time_mix_g1", gate),
            ],
        }
    }

    /// The factor on what layer `i` adds to the residual stream.
    pub(crate) fn residual_factor(&self, i: usize) -> f32 {
        let n = i.checked_div(self.halved_every).unwrap_or(0);
        libm::exp2f(n as f32)
    }

    fn check(&self, model_dim: usize, n_layers: usize) -> Result<(), PlanError> {
        let n_halved = n_layers.saturating_sub(1).checked_div(self.halved_every);
        if n_halved.is_some_and(|n| n > MAX_HALVED) {
            return Err(PlanError::config(
                "layers between halved ones",
                format!("at least {}", n_layers.div_ceil(MAX_HALVED + 1)),
                self.halved_every,
            ));
        }
        let RwkvShape {
            n_heads, head_dim, ..
        } = self.shape;
        if n_heads == 0 || head_dim == 0 || n_heads.checked_mul(head_dim) != Some(model_dim) {
            return Err(PlanError::config(
                "heads of time mixing",
                format!("as many elements together as the model is wide, {model_dim}"),
                format!("{n_heads} of {head_dim}"),
            ));
        }
        // The fourth has no heads but the whole width.
        if self.shape.generation != Generation::V4 && head_dim > MAX_DELTA {
            let expected = format!("1 to {MAX_DELTA}");
            return Err(PlanError::config(
                "head width of time mixing",
                expected,
                head_dim,
            ));
        }
        if !self.head_eps.is_finite() || self.head_eps <= 0.0 {
            return Err(PlanError::config(
                "epsilon of heads",
                "a positive number",
                self.head_eps,
            ));
        }
        check_state(self.shape.state())
    }
}

/// Heads of layers without a window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WideHeads {
    /// Those of keys and values.
    pub n_kv_heads: usize,
    /// Their elements.
    pub head_dim: usize,
    /// Whether values are keys, before their norm and rotation.
    pub values_are_keys: bool,
}

/// Factors of Falcon-H1, which GGUF files have in the weights; 1 in all other families.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Multipliers {
    /// On what attention reads.
    pub attention_in: f32,
    /// On keys.
    pub key: f32,
    /// On what attention gives.
    pub attention_out: f32,
    /// On what state spaces read.
    pub ssm_in: f32,
    /// On gates, inputs, `B`, `C` and time steps of state spaces.
    pub ssm: [f32; 5],
    /// On what state spaces give.
    pub ssm_out: f32,
    /// On the gates of networks.
    pub gate: f32,
    /// On what networks give.
    pub down: f32,
}

impl Default for Multipliers {
    fn default() -> Multipliers {
        Multipliers {
            attention_in: 1.0,
            key: 1.0,
            attention_out: 1.0,
            ssm_in: 1.0,
            ssm: [1.0; 5],
            ssm_out: 1.0,
            gate: 1.0,
            down: 1.0,
        }
    }
}

impl Multipliers {
    fn check(&self) -> Result<(), PlanError> {
        let Multipliers {
            attention_in,
            key,
            attention_out,
            ssm_in,
            ssm,
            ssm_out,
            gate,
            down,
        } = *self;
        let all = [
            attention_in,
            key,
            attention_out,
            ssm_in,
            ssm_out,
            gate,
            down,
        ];
        match all
            .into_iter()
            .chain(ssm)
            .find(|x| !x.is_finite() || *x == 0.0)
        {
            None => Ok(()),
            Some(found) => Err(PlanError::config(
                "multipliers",
                "numbers other than 0",
                found,
            )),
        }
    }
}

/// Latent attention: keys and values of all heads follow from one short vector a position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentConfig {
    /// Elements of what queries follow from; `None` if they follow from the input itself.
    pub q_rank: Option<usize>,
    /// Elements of the latent vector.
    pub kv_rank: usize,
    /// Elements of a head's queries and keys that aren't rotated.
    pub nope_dim: usize,
    /// Elements that are; those of keys are the same for all heads.
    pub rope_dim: usize,
    /// Elements of a head's values.
    pub value_dim: usize,
}

impl LatentConfig {
    /// Elements of a head in the cache: the rotated part, then the latent vector.
    pub fn head_dim(&self) -> usize {
        self.rope_dim.saturating_add(self.kv_rank)
    }

    /// Scale of query-key products where YaRN scales queries and keys by `stretch`.
    pub(crate) fn attn_scale(&self, stretch: f64) -> f32 {
        let plain = 1.0 / (self.query_dim() as f64).sqrt();
        (plain * stretch * stretch) as f32
    }

    /// Elements of a head's queries.
    pub fn query_dim(&self) -> usize {
        self.nope_dim.saturating_add(self.rope_dim)
    }

    fn check(&self, n_heads: usize) -> Result<(), PlanError> {
        // Each has matrices of its own.
        if n_heads > MAX_DELTA {
            let expected = format!("at most {MAX_DELTA} with latent attention");
            return Err(PlanError::config("heads", expected, n_heads));
        }
        for (what, value) in [
            ("rank of queries", self.q_rank.unwrap_or(1)),
            ("rank of keys and values", self.kv_rank),
            ("elements of queries that aren't rotated", self.nope_dim),
            ("elements of queries that are rotated", self.rope_dim),
            ("elements of values", self.value_dim),
        ] {
            if value == 0 || value > MAX_LATENT {
                return Err(PlanError::config(what, format!("1 to {MAX_LATENT}"), value));
            }
        }
        let widest = self.query_dim().max(self.value_dim).max(self.head_dim());
        if n_heads as u64 * widest as u64 > MAX_COUNT {
            let found = n_heads as u64 * widest as u64;
            return Err(PlanError::config(
                "elements of all heads",
                format!("at most {MAX_COUNT}"),
                found,
            ));
        }
        Ok(())
    }
}

/// What may differ from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// How many positions a query attends to, including its own; `None` for all.
    pub window: Option<usize>,
    /// Index in [`ModelConfig::ropes`]; `None` for no rotary embedding.
    pub rope: Option<usize>,
    /// What mixes positions.
    pub mixer: MixerKind,
    /// Whether the feed-forward block is a mixture of experts.
    pub has_experts: bool,
}

/// What mixes the positions of a sequence in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum MixerKind {
    /// Attention.
    Attention,
    /// Attention whose keys and values follow from a latent vector.
    LatentAttention,
    /// A short convolution.
    Convolution,
    /// A gated delta net.
    DeltaNet,
    /// A selective state space (Mamba-2).
    Ssm,
    /// A selective state space of the first Mamba.
    Mamba,
    /// Attention and a selective state space (Mamba-2), whose outputs are added.
    AttentionAndSsm,
    /// Time mixing of RWKV.
    TimeMix,
}

impl MixerKind {
    /// Whether it remembers a state.
    pub fn has_state(self) -> bool {
        !matches!(self, MixerKind::Attention | MixerKind::LatentAttention)
    }

    /// Whether it remembers keys and values.
    pub fn attends(self) -> bool {
        use MixerKind::{Attention, AttentionAndSsm, LatentAttention};
        matches!(self, Attention | LatentAttention | AttentionAndSsm)
    }
}

/// A mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct ExpertsConfig {
    /// How rows are sent to experts.
    pub routing: Routing,
    /// Width of an expert.
    pub ffn_dim: usize,
    /// Width of the expert that every row is sent to, if there is one.
    pub shared_ffn_dim: Option<usize>,
}

/// Largest accepted count or width: enough for any model, and small enough that products of two fit 64 bits.
const MAX_COUNT: u64 = 1 << 28;
/// How often weights of RWKV may be halved: the factor that undoes it is small enough for any of their products.
const MAX_HALVED: usize = 32;
/// Context length of RWKV, which has no limit of its own: what llama.cpp's files say.
const RWKV_CTX: usize = 1 << 20;
/// Heads and their elements in models that have no attention: as little as a configuration may say.
const HEADLESS: (usize, usize, usize) = (1, 1, 2);
/// Maximum number of layers.
const MAX_LAYERS: usize = 4096;
/// Maximum positions of a short convolution.
const MAX_TAPS: usize = 64;
/// Maximum heads of a delta net, and elements of one: products of three fit 64 bits, and on machines of 32 bits what
/// is checked before them does.
const MAX_DELTA: usize = 1 << 10;
/// Maximum elements of a part of latent attention.
const MAX_LATENT: usize = 1 << 16;
/// Maximum channels of a state space of the first Mamba, for the same reason.
const MAX_CHANNELS: usize = 1 << 20;
/// Maximum number of experts: the largest models have 512 in a layer.
const MAX_EXPERTS: usize = 4096;

impl ModelConfig {
    /// The heads of keys and values of layer `i`.
    pub fn heads_of(&self, i: usize) -> KvHeads {
        let layer = &self.layers[i];
        let (n_kv_heads, head_dim) = match self.wide_heads {
            Some(wide) if layer.window.is_none() => (wide.n_kv_heads, wide.head_dim),
            _ => (self.n_kv_heads, self.head_dim),
        };
        KvHeads {
            n_kv_heads,
            head_dim,
            values: match layer.mixer {
                MixerKind::LatentAttention => CachedValues::Keys,
                _ => CachedValues::Own,
            },
        }
    }

    /// Those of every layer.
    pub(crate) fn kv_heads(&self) -> Arc<[KvHeads]> {
        (0..self.n_layers).map(|i| self.heads_of(i)).collect()
    }

    /// The earlier layer whose keys and values layer `i` attends to, if they aren't its own.
    pub fn shared_layer(&self, i: usize) -> Option<usize> {
        let first = self.n_layers - self.n_sharing;
        let has_window = |layer: usize| self.layers[layer].window.is_some();
        let alike = (0..first)
            .rev()
            .find(|&layer| has_window(layer) == has_window(i));
        alike.filter(|_| i >= first)
    }

    /// Width of the keys (or values) of one position in layer `i`.
    pub fn kv_dim(&self, i: usize) -> usize {
        let heads = self.heads_of(i);
        heads.n_kv_heads * heads.head_dim
    }

    /// Width of the queries of one position in layer `i`.
    pub fn q_dim(&self, i: usize) -> usize {
        self.n_heads * self.heads_of(i).head_dim
    }

    /// Rows of the matrix of queries: their elements, and those of gates where they come with some.
    pub(crate) fn q_rows(&self, i: usize) -> usize {
        match self.family.parts.output_gates {
            true => 2 * self.q_dim(i),
            false => self.q_dim(i),
        }
    }

    /// Width of the network of layer `i`, where that isn't a mixture of experts.
    pub fn ffn_dim_of(&self, i: usize) -> usize {
        match self.wide_networks && i >= self.n_layers - self.n_sharing {
            true => 2 * self.ffn_dim,
            false => self.ffn_dim,
        }
    }

    /// Whether it reads whole texts, makes vectors of them, and continues none.
    pub fn is_encoder(&self) -> bool {
        self.family.encoder
    }

    /// Whether some layers have a state instead of keys and values.
    pub fn has_states(&self) -> bool {
        self.layers.iter().any(|layer| layer.mixer.has_state())
    }

    /// Whether small errors of products grow: heads with states have norms that divide by what may be small, and scores of
    /// normalised heads that aren't scaled are large.
    pub(crate) fn is_sensitive(&self) -> bool {
        let has_states = self.delta.is_some() || self.ssm.is_some() || self.mamba.is_some();
        has_states || self.rwkv.is_some() || self.family.gemma4
    }

    /// Values that all layers with a state remember of a sequence.
    pub(crate) fn state_values(&self) -> usize {
        self.layers
            .iter()
            .map(|layer| self.layer_state(layer))
            .sum()
    }

    /// Values that a layer remembers of a sequence; 0 if those are keys and values.
    pub(crate) fn layer_state(&self, layer: &LayerConfig) -> usize {
        let window = |channels: usize| self.conv_taps.unwrap_or(1).saturating_sub(1) * channels;
        match (layer.mixer, &self.delta) {
            (MixerKind::Convolution, _) => window(self.model_dim),
            (MixerKind::DeltaNet, Some(delta)) => window(delta.channels()) + delta.state(),
            (MixerKind::Ssm | MixerKind::AttentionAndSsm, _) => match &self.ssm {
                Some(ssm) => window(ssm.channels()) + ssm.state(),
                None => 0,
            },
            (MixerKind::Mamba, _) => match &self.mamba {
                Some(mamba) => window(mamba.inner) + mamba.state(),
                None => 0,
            },
            (MixerKind::TimeMix, _) => self.rwkv.map_or(0, |rwkv| rwkv.shape.state()),
            (MixerKind::Attention | MixerKind::LatentAttention | MixerKind::DeltaNet, _) => 0,
        }
    }

    /// Layers with keys and values.
    pub fn n_attention_layers(&self) -> usize {
        self.layers
            .iter()
            .filter(|layer| layer.mixer.attends())
            .count()
    }

    /// Which row of queries or keys in a Hugging Face checkpoint is row `i` of the engine's.
    ///
    /// GGUF files of some families store rows so that elements which rotate together are adjacent; the rotary
    /// layout says so.
    pub(crate) fn checkpoint_row(&self, i: usize) -> usize {
        let rope = &self.ropes[0];
        let (head, within) = (i / self.head_dim, i % self.head_dim);
        if rope.layout == RopeLayout::Pairs && within < 2 * rope.pairs() {
            head * self.head_dim + within % 2 * rope.pairs() + within / 2
        } else {
            i
        }
    }

    /// Checks what the readers of single values can't: that the values are consistent.
    pub(crate) fn validated(self) -> Result<ModelConfig, PlanError> {
        let positive = [
            ("layers", self.n_layers),
            ("model width", self.model_dim),
            ("heads", self.n_heads),
            ("key-value heads", self.n_kv_heads),
            ("head width", self.head_dim),
            ("feed-forward width", self.ffn_dim),
            ("vocabulary", self.n_vocab),
            ("context length", self.max_ctx),
        ];
        for (what, value) in positive {
            if value == 0 || value as u64 > MAX_COUNT {
                return Err(PlanError::config(what, format!("1 to {MAX_COUNT}"), value));
            }
        }
        // Within these bounds, sums of two of them don't overflow, on any machine.
        for (what, a, b) in [
            ("query heads times head width", self.n_heads, self.head_dim),
            ("key heads times head width", self.n_kv_heads, self.head_dim),
        ] {
            if a as u64 * b as u64 > MAX_COUNT {
                return Err(PlanError::config(
                    what,
                    format!("at most {MAX_COUNT}"),
                    a as u64 * b as u64,
                ));
            }
        }
        if self.n_layers > MAX_LAYERS {
            return Err(PlanError::config(
                "layers",
                format!("at most {MAX_LAYERS}"),
                self.n_layers,
            ));
        }
        self.check_wide_heads()?;
        if !self.n_heads.is_multiple_of(self.n_kv_heads) {
            return Err(PlanError::config(
                "key-value heads",
                format!("a divisor of {} heads", self.n_heads),
                self.n_kv_heads,
            ));
        }
        for (what, value) in [
            ("norm epsilon", self.norm_eps),
            ("embedding scale", self.embed_scale),
            ("attention scale", self.attn_scale),
            ("residual scale", self.residual_scale),
            ("logit scale", self.logit_scale),
            ("attention soft cap", self.attn_softcap.unwrap_or(1.0)),
            ("logit soft cap", self.logit_softcap.unwrap_or(1.0)),
        ] {
            if !value.is_finite() || value <= 0.0 {
                return Err(PlanError::config(what, "a positive number", value));
            }
        }
        for layer in &self.layers {
            if layer.window == Some(0) {
                return Err(PlanError::config("attention window", "at least 1", 0));
            }
            let convolves = layer.mixer.has_state() && layer.mixer != MixerKind::TimeMix;
            if convolves && !matches!(self.conv_taps, Some(1..=MAX_TAPS)) {
                let found = self.conv_taps.unwrap_or(0);
                let expected = format!("1 to {MAX_TAPS}");
                return Err(PlanError::config(
                    "positions of a convolution",
                    expected,
                    found,
                ));
            }
            if layer.has_experts && self.experts.is_none() {
                return Err(PlanError::config("experts", "a count", "nothing"));
            }
        }
        if let Some(experts) = &self.experts {
            experts.check()?;
        }
        self.multipliers.check()?;
        if let Some(latent) = &self.latent {
            latent.check(self.n_heads)?;
        } else if self.family.latent {
            return Err(PlanError::config(
                "latent attention",
                "its ranks",
                "nothing",
            ));
        }
        self.check_kind(
            &self.mamba,
            "channels of a state space",
            check_mamba,
            |kind| kind == MixerKind::Mamba,
        )?;
        self.check_kind(&self.ssm, "heads of a state space", check_ssm, |kind| {
            matches!(kind, MixerKind::Ssm | MixerKind::AttentionAndSsm)
        })?;
        self.check_kind(&self.delta, "heads of a delta net", check_delta, |kind| {
            kind == MixerKind::DeltaNet
        })?;
        self.check_kind(
            &self.rwkv,
            "heads of time mixing",
            |rwkv| rwkv.check(self.model_dim, self.n_layers),
            |kind| kind == MixerKind::TimeMix,
        )?;
        for (index, rope) in self.ropes.iter().enumerate() {
            self.check_rope(index, rope)?;
        }
        Ok(self)
    }

    /// Checks the `shape` of layers whose mixer `is_one`, which must be there if such a layer is.
    fn check_kind<T>(
        &self,
        shape: &Option<T>,
        what: &'static str,
        check: impl Fn(&T) -> Result<(), PlanError>,
        is_one: impl Fn(MixerKind) -> bool,
    ) -> Result<(), PlanError> {
        match shape {
            Some(shape) => check(shape),
            None if self.layers.iter().any(|layer| is_one(layer.mixer)) => {
                Err(PlanError::config(what, "counts", "nothing"))
            }
            None => Ok(()),
        }
    }

    fn check_wide_heads(&self) -> Result<(), PlanError> {
        if self.n_sharing >= self.n_layers {
            return Err(PlanError::config(
                "layers that share keys and values",
                format!("fewer than {} layers", self.n_layers),
                self.n_sharing,
            ));
        }
        let first = self.n_layers - self.n_sharing;
        if let Some(i) = (first..self.n_layers).find(|&i| self.shared_layer(i).is_none()) {
            return Err(PlanError::config(
                "layers that share keys and values",
                "an earlier layer like each",
                format!("none like layer {i}"),
            ));
        }
        if let Some(dim) = self.layer_input_dim
            && (dim == 0 || dim as u64 * self.n_layers as u64 > MAX_COUNT)
        {
            return Err(PlanError::config(
                "width of a layer's own input",
                format!("1 to {}", MAX_COUNT / self.n_layers as u64),
                dim,
            ));
        }
        let Some(wide) = self.wide_heads else {
            return Ok(());
        };
        for (what, value) in [
            (
                "key-value heads of layers without a window",
                wide.n_kv_heads,
            ),
            ("head width of layers without a window", wide.head_dim),
        ] {
            if value == 0 || self.n_heads as u64 * value as u64 > MAX_COUNT {
                let most = MAX_COUNT / self.n_heads as u64;
                return Err(PlanError::config(what, format!("1 to {most}"), value));
            }
        }
        if !self.n_heads.is_multiple_of(wide.n_kv_heads) {
            return Err(PlanError::config(
                "key-value heads of layers without a window",
                format!("a divisor of {} heads", self.n_heads),
                wide.n_kv_heads,
            ));
        }
        Ok(())
    }

    fn check_rope(&self, index: usize, rope: &RopeConfig) -> Result<(), PlanError> {
        let of = |layer: &LayerConfig| layer.rope == Some(index);
        let head_dim = match (self.wide_heads, self.layers.iter().position(of)) {
            (Some(_), Some(i)) => self.heads_of(i).head_dim,
            _ => self.head_dim,
        };
        if 2 * rope.pairs() > head_dim || rope.dim == 0 {
            return Err(PlanError::config(
                "rotated elements of a head",
                format!("1 to {head_dim}"),
                rope.dim,
            ));
        }
        let positive = |what, value: f64| {
            if value.is_finite() && value > 0.0 {
                Ok(())
            } else {
                Err(PlanError::config(what, "a positive number", value))
            }
        };
        positive("rope base", rope.base)?;
        match &rope.scaling {
            RopeScaling::None | RopeScaling::Factors(_) => {}
            RopeScaling::Linear { factor } => positive("rope scaling factor", *factor)?,
            RopeScaling::Dynamic {
                factor,
                original_ctx,
            } => {
                positive("rope scaling factor", *factor)?;
                positive("original context length", *original_ctx as f64)?;
                if rope.dim < 4 {
                    return Err(PlanError::config(
                        "rotated elements of a head, with dynamic scaling",
                        "at least 4",
                        rope.dim,
                    ));
                }
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_ctx,
            } => {
                positive("rope scaling factor", *factor)?;
                positive("low_freq_factor", *low_freq_factor)?;
                positive(
                    "high_freq_factor less low_freq_factor",
                    high_freq_factor - low_freq_factor,
                )?;
                positive("original context length", *original_ctx as f64)?;
            }
            RopeScaling::Yarn {
                factor,
                original_ctx,
                beta_fast,
                beta_slow,
                attention_factor,
                truncate: _,
            } => {
                positive("rope scaling factor", *factor)?;
                positive("beta_fast", *beta_fast)?;
                positive("beta_slow", *beta_slow)?;
                positive("attention_factor", *attention_factor)?;
                positive("original context length", *original_ctx as f64)?;
            }
            RopeScaling::LongRope {
                attention_factor,
                original_ctx,
                ..
            } => {
                positive("attention_factor", *attention_factor)?;
                positive("original context length", *original_ctx as f64)?;
            }
        }
        for factors in rope.scaling.factor_lists() {
            if factors.len() != rope.pairs() {
                return Err(PlanError::config(
                    "rope factors",
                    format!("{} of them", rope.pairs()),
                    factors.len(),
                ));
            }
            for &factor in factors {
                positive("rope factor", f64::from(factor))?;
            }
        }
        Ok(())
    }
}

impl ExpertsConfig {
    fn check(&self) -> Result<(), PlanError> {
        let Routing {
            n_experts,
            n_used,
            groups,
            scale,
            ..
        } = self.routing;
        if !scale.is_finite() || scale <= 0.0 {
            return Err(PlanError::config(
                "factor on experts",
                "a positive number",
                scale,
            ));
        }
        if let Some(groups) = groups {
            let divides = n_experts.checked_rem(groups.n_groups) == Some(0);
            let fit = |size| {
                (1..=groups.n_groups).contains(&groups.n_used) && groups.n_used * size >= n_used
            };
            if !divides || !fit(n_experts / groups.n_groups) {
                let expected =
                    format!("groups of {n_experts} experts with {n_used} in those chosen");
                let found = format!("{} of {}", groups.n_used, groups.n_groups);
                return Err(PlanError::config("groups of experts", expected, found));
            }
        }
        for (what, most, value) in [
            ("experts", MAX_EXPERTS, n_experts),
            ("experts of a token", n_experts, n_used),
            ("width of an expert", MAX_COUNT as usize, self.ffn_dim),
            (
                "width of the shared expert",
                MAX_COUNT as usize,
                self.shared_ffn_dim.unwrap_or(1),
            ),
        ] {
            if value == 0 || value > most {
                return Err(PlanError::config(what, format!("1 to {most}"), value));
            }
        }
        Ok(())
    }
}

fn check_ssm(ssm: &SsmShape) -> Result<(), PlanError> {
    let SsmShape {
        n_heads,
        head_dim,
        state_dim,
        n_groups,
    } = *ssm;
    for (what, value) in [
        ("heads of a state space", n_heads),
        ("head width of a state space", head_dim),
        ("rows of a state", state_dim),
        ("groups of a state space", n_groups),
    ] {
        if value == 0 || value > MAX_DELTA {
            return Err(PlanError::config(what, format!("1 to {MAX_DELTA}"), value));
        }
    }
    if !n_heads.is_multiple_of(n_groups) {
        return Err(PlanError::config(
            "groups of a state space",
            format!("a divisor of {n_heads} heads"),
            n_groups,
        ));
    }
    check_state(ssm.state())
}

fn check_mamba(mamba: &MambaShape) -> Result<(), PlanError> {
    let MambaShape {
        inner,
        state_dim,
        dt_rank,
    } = *mamba;
    for (what, most, value) in [
        ("channels of a state space", MAX_CHANNELS, inner),
        ("elements of a channel's state", MAX_DELTA, state_dim),
        ("rank of time steps", MAX_CHANNELS, dt_rank),
    ] {
        if value == 0 || value > most {
            return Err(PlanError::config(what, format!("1 to {most}"), value));
        }
    }
    check_state(mamba.state())
}

fn check_state(n: usize) -> Result<(), PlanError> {
    if n as u64 > MAX_COUNT {
        let expected = format!("at most {MAX_COUNT}");
        return Err(PlanError::config("elements of a state", expected, n));
    }
    Ok(())
}

fn check_delta(delta: &DeltaShape) -> Result<(), PlanError> {
    let DeltaShape {
        n_key_heads,
        n_value_heads,
        key_dim,
        value_dim,
        ..
    } = *delta;
    for (what, value) in [
        ("key heads of a delta net", n_key_heads),
        ("value heads of a delta net", n_value_heads),
        ("key width of a delta net", key_dim),
        ("value width of a delta net", value_dim),
    ] {
        if value == 0 || value > MAX_DELTA {
            return Err(PlanError::config(what, format!("1 to {MAX_DELTA}"), value));
        }
    }
    if !n_value_heads.is_multiple_of(n_key_heads) {
        return Err(PlanError::config(
            "value heads of a delta net",
            format!("a multiple of {n_key_heads} key heads"),
            n_value_heads,
        ));
    }
    check_state(delta.state())
}

/// Fails if a configuration says at `key` that there are more tokens than `n_vocab`, the rows of the embedding
/// table. A table may be padded with rows of no token, which is odd.
pub(crate) fn check_vocab(
    key: &str,
    said: Option<usize>,
    n_vocab: usize,
) -> Result<Option<String>, PlanError> {
    match said {
        Some(said) if said > n_vocab => Err(PlanError::config(
            key,
            format!("at most {n_vocab}, the rows of the embedding table"),
            said,
        )),
        Some(said) if said < n_vocab => Ok(Some(format!(
            "{key}: expected {n_vocab}, the rows of the embedding table, found {said}; all rows are taken for \
             tokens"
        ))),
        _ => Ok(None),
    }
}

/// The activation that files call `name`.
fn activation(name: &str) -> Option<Activation> {
    Some(match name {
        "silu" | "swish" => Activation::Silu,
        "relu2" | "relu_sqr" | "relu_squared" => Activation::Relu2,
        "relu" => Activation::Relu,
        "gelu_pytorch_tanh" | "gelu_new" | "gelu_tanh" => Activation::GeluTanh,
        "gelu" => Activation::GeluErf,
        _ => return None,
    })
}

fn unknown_activation(place: impl Into<String>, found: &str) -> PlanError {
    PlanError::config(
        place,
        "silu, relu2, relu, gelu or gelu_pytorch_tanh",
        format!("`{found}`"),
    )
}

impl Family {
    fn embed_scale(&self, model_dim: usize) -> f32 {
        if self.gemma {
            (model_dim as f32).sqrt()
        } else {
            1.0
        }
    }

    /// The default attention scale.
    fn attn_scale(
        &self,
        n_layers: usize,
        model_dim: usize,
        n_heads: usize,
        head_dim: usize,
    ) -> f32 {
        if self.gemma4 {
            return 1.0;
        }
        let width = if self.wide_scale_layers == Some(n_layers) {
            model_dim as f64 / n_heads as f64
        } else {
            head_dim as f64
        };
        (1.0 / width.sqrt()) as f32
    }
}

/// YaRN's attention factor for a context stretched by `factor`.
fn yarn_magnitude(factor: f64, strength: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * strength * libm::log(factor) + 1.0
    }
}

/// LongRoPE's attention factor for a context stretched by `factor`.
fn long_rope_magnitude(factor: f64, original_ctx: usize) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        libm::sqrt(1.0 + libm::log(factor) / libm::log(original_ctx as f64))
    }
}
