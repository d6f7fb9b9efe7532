//! From files to a list of what to load: every tensor is checked before any of them is read.

mod head;
mod planner;

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use sterna_format::gguf::Metadata;
use sterna_format::hf::Config;
use sterna_format::names::{hugging_face, translate_catalog};
use sterna_format::{DType, TensorCatalog, TensorEntry};
use sterna_kernels::hadamard::Rotation;
use sterna_kernels::quant::ternary::{I2sLayout, row_bytes};
use sterna_kernels::rwkv::Generation;

use crate::backend::CacheType;
use crate::config::{self, ExpertsConfig, ModelConfig};
use crate::error::PlanError;
use crate::family::SsmFamily;
use crate::rope::RopeScaling;
use crate::self_test::{KernelFamilies, WeightForm};
use crate::weights::{Layer, Mixer, Weights};
pub(crate) use head::Head;
pub use head::{HeadOptions, HeadScreen};
use planner::{BitLinears, Planner};

/// Blocks that predict several tokens at once, at most.
const MAX_PREDICTING: usize = 64;

/// Options that files don't determine.
#[derive(Debug, Clone, Copy, Default)]
pub struct PlanOptions {
    /// Which of the three layouts that share the I2_S type id a GGUF file uses.
    pub i2s_layout: I2sLayout,
}

/// What the configuration of a Hugging Face model says about its ternary weights, and their types don't.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TernaryRules {
    /// Floats are master weights to be quantized, even if they happen to be trits.
    pub masters: bool,
    /// Packed trits are divided by their scale, not multiplied.
    pub scales_divide: bool,
}

impl TernaryRules {
    /// Those of the model that `hf` describes.
    ///
    /// Errors: [`PlanError`] if its family or its quantization isn't known.
    pub fn of(hf: &Config) -> Result<TernaryRules, PlanError> {
        let bit_linears = BitLinears::of(hf, config::hf::family(hf)?)?;
        Ok(TernaryRules {
            masters: matches!(bit_linears, BitLinears::Configured { online: true, .. }),
            scales_divide: bit_linears.divides(),
        })
    }
}

/// A model that can be loaded: its configuration, and the bytes each weight is made from.
#[derive(Debug, Clone)]
pub struct ModelPlan {
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights<LinearId, VectorId>,
    pub(crate) rope_factors: Option<RopeFactors>,
    /// What to load, in the order a forward pass uses it.
    pub(crate) specs: Vec<Spec>,
    pub(crate) head: Head,
    pub(crate) values: Values,
    /// What rows of matrices were rotated by.
    pub(crate) rotations: Vec<Arc<Rotation>>,
    /// What is odd about the configuration.
    oddity: Option<String>,
}

/// The conventions of stored values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Values {
    /// Rows of queries and keys are permuted for families that rotate pairs; Gemma's norms are whole.
    Gguf,
    /// Heads rotate halves; Gemma's norms are stored less one.
    HuggingFace,
}

/// Index of a matrix in [`ModelPlan::specs`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearId(pub(crate) usize);

/// Index of a vector in [`ModelPlan::specs`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct VectorId(pub(crate) usize);

/// Divisors of rotary frequencies that a GGUF file stores in tensors.
#[derive(Debug, Clone, Copy)]
pub(crate) enum RopeFactors {
    One(VectorId),
    ShortAndLong {
        short: VectorId,
        long: VectorId,
        original_ctx: usize,
        attention_factor: f64,
    },
}

impl RopeFactors {
    /// The scaling with these divisors, each list being what `list` returns for its index.
    pub(crate) fn scaling(self, mut list: impl FnMut(VectorId) -> Vec<f32>) -> RopeScaling {
        match self {
            RopeFactors::One(id) => RopeScaling::Factors(list(id)),
            RopeFactors::ShortAndLong {
                short,
                long,
                original_ctx,
                attention_factor,
            } => RopeScaling::LongRope {
                short: list(short),
                long: list(long),
                original_ctx,
                attention_factor,
            },
        }
    }
}

/// One weight: the bytes it is made from, and how.
#[derive(Debug, Clone)]
pub(crate) struct Spec {
    pub(crate) parts: Vec<TensorRequest>,
    pub(crate) recipe: Recipe,
}

/// A range of bytes that a model is made from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorRequest {
    /// GGUF name of the tensor.
    pub name: String,
    /// Its name in the file, if different.
    pub renamed_from: Option<String>,
    /// Index of the file, as in the catalog.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
}

impl TensorRequest {
    /// The tensor's name in the file, for messages.
    pub fn name_in_file(&self) -> &str {
        self.renamed_from.as_deref().unwrap_or(&self.name)
    }
}

/// How the bytes of a [`Spec`] become a weight.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Recipe {
    /// A vector on the backend.
    Vector(VectorRecipe),
    /// A vector the engine itself keeps.
    HostVector(VectorRecipe),
    Linear(LinearRecipe),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct VectorRecipe {
    pub(crate) dtype: DType,
    pub(crate) len: usize,
    pub(crate) transform: Transform,
    /// Which of the stored elements it has.
    pub(crate) every: Every,
}

/// Which rows of a stored matrix, or elements of a stored vector, belong to a weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Every {
    /// The first of them.
    pub(crate) first: usize,
    /// From one to the next.
    pub(crate) step: usize,
}

impl Every {
    /// All of them.
    pub(crate) const ONE: Every = Every { first: 0, step: 1 };

    /// Those of `bytes`, rows of `len` bytes.
    pub(crate) fn of(self, bytes: &Bytes, len: usize) -> Bytes {
        if self == Every::ONE {
            return bytes.clone();
        }
        let rows = bytes.chunks_exact(len.max(1));
        let own = rows.skip(self.first).step_by(self.step);
        own.collect::<Vec<_>>().concat().into()
    }
}

/// What makes values of stored ones.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Transform {
    None,
    /// `x + 1`: norms of some families are stored less one.
    PlusOne,
    /// `−e^x`: of a decay, the logarithm is stored.
    MinusExp,
    /// Values before each index, from the one before on, times a factor.
    Factors([(usize, f32); 3]),
}

impl Transform {
    /// The value number `i` of a stored one.
    pub(crate) fn apply(self, i: usize, stored: f32) -> f32 {
        match self {
            Transform::None => stored,
            Transform::PlusOne => stored + 1.0,
            Transform::MinusExp => -libm::expf(stored),
            Transform::Factors(parts) => match parts.iter().find(|(end, _)| i < *end) {
                Some((_, factor)) => stored * factor,
                None => stored,
            },
        }
    }
}

/// Parts: the weights, in as many runs of rows as `n_runs` says, then what `scale` needs.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LinearRecipe {
    /// Rows and columns of the weight.
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// First of these rows in the stored tensor, and rows of that tensor, where the part is all of it; 0 and
    /// `n` where the part is just the requested rows.
    pub(crate) first_row: usize,
    pub(crate) n_stored: usize,
    pub(crate) stored: Stored,
    pub(crate) scale: Option<ScaleRecipe>,
    /// More than one only where each is rows of whole blocks.
    pub(crate) n_runs: usize,
    /// Floats are multiplied with activations as they are, not rounded so that products are exact: delta nets divide
    /// by small numbers.
    pub(crate) precise: bool,
    /// Index in [`ModelPlan::rotations`] of what its rows were rotated by.
    pub(crate) rotation: Option<usize>,
    /// Floats whose rows are the columns of the weight.
    pub(crate) transposed: bool,
    /// Of the stored rows, which it has.
    pub(crate) every: Every,
    /// The scales of MXFP4 are a part of their own, after the codes, which are in pairs of neighbours.
    pub(crate) split_scales: bool,
}

/// How a matrix is stored, and what it becomes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Stored {
    /// Blocks, multiplied with float activations.
    Blocks(DType),
    /// Blocks of a BitLinear layer: trits with one scale if that is what they contain, float master weights
    /// otherwise.
    BitLinear(DType),
    /// Float master weights of a BitLinear layer.
    Masters(DType),
    /// I2_S codes; the scale is a part of its own.
    I2s(I2sLayout),
    /// Hugging Face's packed trits.
    Packed,
}

/// What a scale tensor of one element does.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ScaleRecipe {
    pub(crate) dtype: DType,
    pub(crate) divides: bool,
}

impl ModelPlan {
    /// Plans a model from the metadata and tensors of a GGUF file (or a split set, merged).
    ///
    /// Errors: [`PlanError`] names the key or tensor at fault.
    pub fn from_gguf(
        metadata: &Metadata,
        catalog: &TensorCatalog,
        options: &PlanOptions,
    ) -> Result<ModelPlan, PlanError> {
        // The family first: for an unsupported model, tensors can't be reported as missing.
        let (_, family) = config::gguf::family(metadata)?;
        let mut config = ModelConfig::from_gguf(metadata, n_vocab(catalog, None)?)?;
        if config.family.ssm == Some(SsmFamily::Jamba) {
            // Nothing else says which layers have experts.
            for (i, layer) in config.layers.iter_mut().enumerate() {
                let router = catalog.get(&format!("blk.{i}.ffn_gate_inp.weight"));
                layer.has_experts = config.experts.is_some() && router.is_some();
            }
        }
        set_ranks(&mut config, catalog)?;
        if let Some(wide) = &mut config.wide_heads {
            // Nothing else says so.
            let full = config
                .layers
                .iter()
                .position(|layer| layer.window.is_none());
            let has_values = |i| catalog.get(&format!("blk.{i}.attn_v.weight")).is_some();
            wide.values_are_keys = full.is_some_and(|i| !has_values(i));
        }
        let oddity = config::gguf::check_vocab(metadata, config.n_vocab)?;
        let bit_linears = if family.bit_linear {
            BitLinears::All
        } else {
            BitLinears::None
        };
        let mut planner = Planner::new(&config, catalog, bit_linears, *options, None)?;
        planner.skip_blocks_after(config::gguf::n_blocks(metadata)?);
        let rope_factors = planner.rope_factors(metadata)?;
        let weights = planner.weights(true)?;
        let (specs, rotations) = planner.finish()?;
        Ok(ModelPlan {
            rotations,
            config,
            weights,
            rope_factors,
            specs,
            head: Head::default(),
            values: Values::Gguf,
            oddity,
        })
    }

    /// Plans a model from a Hugging Face folder's configuration and tensors.
    ///
    /// `catalog` has the tensors under their names in the files.
    /// Errors: [`PlanError`] names the value or tensor at fault.
    pub fn from_hf(
        hf: &Config,
        catalog: &TensorCatalog,
        options: &PlanOptions,
    ) -> Result<ModelPlan, PlanError> {
        let family = config::hf::family(hf)?;
        let model_type = hf.model_type.as_deref().unwrap_or_default();
        let catalog = &translate_catalog(model_type, catalog)?;
        let mut config = ModelConfig::from_hf(hf, n_vocab(catalog, Some(model_type))?)?;
        set_ranks(&mut config, catalog)?;
        let oddity = config::check_vocab("vocab_size", hf.vocab_size, config.n_vocab)?;
        let bit_linears = BitLinears::of(hf, family)?;
        let mut planner = Planner::new(&config, catalog, bit_linears, *options, Some(model_type))?;
        let may_be_tied = hf.tie_word_embeddings.unwrap_or(family.hf_defaults.tied);
        let n_predicting = hf.num_nextn_predict_layers.unwrap_or(0).min(MAX_PREDICTING);
        planner.skip_blocks_after(config.n_layers + n_predicting);
        let weights = planner.weights(may_be_tied)?;
        if hf.attention_bias == Some(true) {
            planner.check_biases(&weights)?;
        }
        let (specs, rotations) = planner.finish()?;
        Ok(ModelPlan {
            rotations,
            config,
            weights,
            rope_factors: None,
            specs,
            head: Head::default(),
            values: Values::HuggingFace,
            oddity,
        })
    }

    /// What is odd about the configuration, if something is.
    pub fn oddity(&self) -> Option<&str> {
        self.oddity.as_deref()
    }

    /// Shapes and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Bytes of all weights, as stored.
    pub fn weight_bytes(&self) -> u64 {
        self.requests().map(|r| r.len).sum()
    }

    /// Bytes of all weights in the form they are computed with.
    pub fn memory_bytes(&self) -> u64 {
        let weights = self.specs.iter().map(Spec::memory_bytes).sum::<u64>();
        let replaced = match (&self.weights.output, self.head.dtype) {
            (Some(head), Some(_)) => self.specs[head.weight.0].memory_bytes(),
            _ => 0,
        };
        weights - replaced + self.made_bytes()
    }

    /// Bytes of the weights that decoding one token reads: all but the embedding table, of which it reads a
    /// row, unless the table is also the output head; and of a table with inputs of all layers. Of a head with a screen, the screen is counted: the
    /// rows that it doesn't rule out are extra.
    pub fn bytes_per_token(&self) -> u64 {
        let table = self.specs[self.weights.token_embd.0].memory_bytes();
        let inputs = self.weights.layer_inputs.as_ref();
        let inputs = inputs.map_or(0, |inputs| self.specs[inputs.table.0].memory_bytes());
        let all = self.memory_bytes() - self.resting_bytes() - inputs;
        let read = match (&self.weights.output, self.head.dtype) {
            (None, None) => all,
            _ => all - table,
        };
        match self.head.screen {
            Some(_) => read - self.head_bytes(),
            None => read,
        }
    }

    /// Bytes of the experts that a token isn't sent to.
    fn resting_bytes(&self) -> u64 {
        let Some(ExpertsConfig { routing, .. }) = self.config.experts else {
            return 0;
        };
        let ids = self.weights.layers.iter().filter_map(Layer::experts);
        let ids = ids.flat_map(|experts| [&experts.gate, &experts.up, &experts.down]);
        // Those of one layer and one kind are alike, but may be of several types.
        let bytes = ids.map(|ids| {
            let all: u64 = ids.iter().map(|id| self.specs[id.0].memory_bytes()).sum();
            all - all * routing.n_used as u64 / routing.n_experts as u64
        });
        bytes.sum()
    }

    /// Bytes of a cache of `ctx_len` positions, and of the states at its end.
    pub fn cache_bytes(&self, ctx_len: usize, dtype: CacheType) -> u64 {
        let c = &self.config;
        let own = (0..c.n_layers).filter(|&i| c.layers[i].mixer.attends());
        let own = own.filter(|&i| c.shared_layer(i).is_none());
        let of_layer = own.map(|i| {
            let heads = c.heads_of(i);
            let n_vectors = heads.values.per_head() * heads.n_kv_heads;
            n_vectors as u64 * dtype.head_bytes(heads.head_dim) as u64
        });
        let position: u64 = of_layer.sum();
        let states = 4 * c.state_values() as u64;
        position
            .saturating_mul(ctx_len as u64)
            .saturating_add(states)
    }

    /// Every range of bytes the model is made from, in the order a forward pass uses it.
    pub fn requests(&self) -> impl Iterator<Item = &TensorRequest> {
        self.specs.iter().flat_map(|spec| &spec.parts)
    }

    /// The stored weights that become trits with one scale, whatever form they are stored in.
    ///
    /// Quantised blocks of a BitLinear layer are not among them, though some may turn out to be.
    pub fn ternary_weights(&self) -> impl Iterator<Item = &TensorRequest> {
        let is_ternary = |spec: &&Spec| match &spec.recipe {
            Recipe::Linear(recipe) => recipe.becomes_packed_trits(),
            Recipe::Vector(_) | Recipe::HostVector(_) => false,
        };
        (self.specs.iter().filter(is_ternary)).filter_map(|spec| spec.parts.first())
    }

    /// How I2_S weights are read, if there are any.
    pub fn i2s_layout(&self) -> Option<I2sLayout> {
        self.stored().find_map(|stored| match stored {
            Stored::I2s(layout) => Some(layout),
            _ => None,
        })
    }

    /// How each matrix is stored.
    pub(crate) fn stored(&self) -> impl Iterator<Item = Stored> {
        self.specs.iter().filter_map(|spec| match &spec.recipe {
            Recipe::Linear(recipe) => Some(recipe.stored),
            Recipe::Vector(_) | Recipe::HostVector(_) => None,
        })
    }

    /// The families of kernels that a backend computes it with.
    pub fn kernels(&self) -> KernelFamilies {
        let c = &self.config;
        KernelFamilies {
            forms: self.weight_forms(),
            experts: c.experts.as_ref().map(|experts| experts.routing),
            has_states: c.rwkv.is_none() && c.state_values() > 0,
            rwkv: c.rwkv.map(|rwkv| rwkv.shape.generation),
            is_rotated: c.hadamard.is_some(),
            has_gates: c.family.parts.output_gates,
            is_encoder: c.family.encoder,
            is_latent: c.latent.is_some(),
            is_layerwise: c.family.parts.value_norms,
        }
    }

    /// The forms that matrices have once they are loaded; blocks of a BitLinear layer may also become trits.
    fn weight_forms(&self) -> BTreeSet<WeightForm> {
        self.stored()
            .flat_map(|stored| match stored {
                Stored::Blocks(dtype) => vec![WeightForm::Blocks(multiplied_as(dtype))],
                Stored::BitLinear(dtype) => vec![WeightForm::Blocks(dtype), WeightForm::Ternary],
                Stored::Masters(_) | Stored::I2s(_) | Stored::Packed => vec![WeightForm::Ternary],
            })
            .collect()
    }

    /// Bytes of weights that are in another form once they are loaded, so that those of the files needn't stay in
    /// memory. `rewrites` says which blocks, in rows of how many columns, or packed trits (I2_S) a backend rewrites.
    pub fn rewritten_bytes(&self, rewrites: impl Fn(DType, usize) -> bool) -> u64 {
        let specs = self.specs.iter();
        let rewritten = specs.filter(|spec| is_rewritten(spec, &rewrites));
        let parts = rewritten.flat_map(|spec| &spec.parts);
        parts.map(|part| part.len).sum()
    }

    /// What isn't among [`rewritten_bytes`](Self::rewritten_bytes): weights that stay in the bytes that they are given in.
    pub fn given(
        &self,
        rewrites: impl Fn(DType, usize) -> bool,
    ) -> impl Iterator<Item = &TensorRequest> {
        let specs = self.specs.iter();
        let given = specs.filter(move |spec| !is_rewritten(spec, &rewrites));
        given.flat_map(|spec| &spec.parts)
    }

    /// Multiply-accumulates with weights for a prompt of `n_tokens`, and the head after its last token.
    pub fn prefill_multiply_adds(&self, n_tokens: usize) -> u64 {
        let size = |id: LinearId| match self.specs[id.0].recipe {
            Recipe::Linear(LinearRecipe { n, k, .. }) => n as u64 * k as u64,
            Recipe::Vector(_) | Recipe::HostVector(_) => 0,
        };
        let head = self.weights.output.as_ref().map(|head| head.weight);
        let in_blocks = (self.weights.layers.iter()).flat_map(|layer| layer.projections());
        let mut per_token: u64 = in_blocks.map(|projection| size(projection.weight)).sum();
        if let Some(ExpertsConfig { routing, .. }) = self.config.experts {
            for experts in self.weights.layers.iter().filter_map(Layer::experts) {
                let one = [&experts.gate, &experts.up, &experts.down].map(|ids| size(ids[0]));
                per_token += routing.n_used as u64 * one.iter().sum::<u64>();
            }
        }
        for layer in &self.weights.layers {
            if let Mixer::Latent(latent) = &layer.mixer {
                let up = latent.k_up.iter().chain(&latent.v_up);
                per_token += up.map(|id| size(*id)).sum::<u64>();
            }
        }
        per_token * n_tokens as u64 + size(head.unwrap_or(self.weights.token_embd))
    }
}

impl Spec {
    /// Bytes of the weight once it is loaded.
    pub(crate) fn memory_bytes(&self) -> u64 {
        match self.recipe {
            Recipe::Vector(recipe) | Recipe::HostVector(recipe) => 4 * recipe.len as u64,
            Recipe::Linear(recipe) if recipe.becomes_packed_trits() => {
                recipe.n as u64 * row_bytes(recipe.k) as u64
            }
            Recipe::Linear(recipe) => match recipe.stored {
                Stored::Blocks(dtype) => {
                    let blocks = (recipe.n * recipe.k / dtype.block_len()) as u64;
                    blocks * multiplied_as(dtype).block_bytes() as u64
                }
                _ => self.parts[..recipe.n_runs].iter().map(|r| r.len).sum(),
            },
        }
    }
}

impl LinearRecipe {
    /// Whether the weight will be stored as densely packed trits, not in as many bytes as the file has.
    ///
    /// Quantised blocks of a BitLinear layer are assumed not to be, though some may turn out to be.
    fn becomes_packed_trits(&self) -> bool {
        match self.stored {
            Stored::Blocks(_) => false,
            Stored::BitLinear(dtype) => is_float(dtype) || dtype == DType::TQ1_0,
            Stored::Masters(_) | Stored::I2s(_) | Stored::Packed => true,
        }
    }
}

/// Whether a weight is in another form once it is loaded; `rewrites` as for [`ModelPlan::rewritten_bytes`].
fn is_rewritten(spec: &Spec, rewrites: impl Fn(DType, usize) -> bool) -> bool {
    match &spec.recipe {
        Recipe::Linear(recipe) => match recipe.stored {
            Stored::Blocks(dtype) => {
                let multiplied = multiplied_as(dtype);
                multiplied != dtype || rewrites(multiplied, recipe.k)
            }
            // Packed trits already.
            Stored::I2s(_) | Stored::BitLinear(DType::TQ2_0) => rewrites(DType::I2_S, recipe.k),
            _ => recipe.becomes_packed_trits(),
        },
        Recipe::Vector(_) | Recipe::HostVector(_) => true,
    }
}

/// The type that blocks of `dtype` are multiplied as: with the same values, and with kernels.
pub(crate) fn multiplied_as(dtype: DType) -> DType {
    match dtype {
        DType::PTQ1_0 => DType::PQ2_0,
        dtype => dtype,
    }
}

/// Whether values of this type are stored one by one, as floats.
pub(crate) fn is_float(dtype: DType) -> bool {
    matches!(dtype, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
}

/// The tensor with the GGUF name `name` as files spell it: those of Hugging Face models of type
/// `model_type`, or else GGUF files.
fn spelled(name: &str, model_type: Option<&str>) -> String {
    let spelled = model_type.and_then(|model_type| hugging_face(model_type, name));
    spelled.unwrap_or_else(|| name.to_owned())
}

/// Rows of the embedding table.
fn n_vocab(catalog: &TensorCatalog, model_type: Option<&str>) -> Result<usize, PlanError> {
    let name = "token_embd.weight";
    let wrong = |found| {
        let name = catalog.get(name).map(TensorEntry::name_in_file);
        let name = name.map_or_else(|| spelled("token_embd.weight", model_type), str::to_owned);
        PlanError::config(format!("tensor `{name}`"), "[n_vocab, model_dim]", found)
    };
    let entry = catalog
        .get(name)
        .ok_or_else(|| wrong("nothing".to_owned()))?;
    match entry.shape[..] {
        [n_vocab, _] => Ok(n_vocab),
        _ => Err(wrong(format!("{:?}", entry.shape))),
    }
}

/// Sets ranks of time mixing that the configuration doesn't say to those of its matrices.
fn set_ranks(config: &mut ModelConfig, catalog: &TensorCatalog) -> Result<(), PlanError> {
    let n_layers = config.n_layers;
    let Some(rwkv) = &mut config.rwkv else {
        return Ok(());
    };
    let n_shares = match rwkv.shape.generation {
        Generation::V6 => SHARES,
        _ => 1,
    };
    for (name, rank) in rwkv.ranks_mut() {
        let dim = |form: &str, axis: usize| {
            let entry = catalog.get(&format!("{name}.{form}"))?;
            entry.shape.get(axis).copied()
        };
        if *rank == 0 {
            let n = dim("weight", 0).or_else(|| dim("transposed", 1));
            let each = if name.ends_with("mix_w1") {
                n_shares
            } else {
                1
            };
            *rank = n.unwrap_or(0) / each;
        }
        // The first layer has no share of its own values.
        let is_absent = n_layers == 1 && name.starts_with("blk.1.");
        if !is_absent && !(1..=MAX_RANK).contains(rank) {
            let what = format!("rank of `{name}`");
            return Err(PlanError::config(what, format!("1 to {MAX_RANK}"), *rank));
        }
    }
    Ok(())
}

/// Maximum rank of a pair of matrices.
const MAX_RANK: usize = 1 << 16;

/// The norm after the attention of an encoder.
pub(crate) const ENCODER_ATTN_NORM: &str = "attn_output_norm";

/// Mixes of positions that have shares of their own in the sixth generation of RWKV.
pub(crate) const SHARES: usize = 5;

/// Whose factors GGUF files have in one tensor, in order.
pub(crate) fn fused_mixes(generation: Generation) -> &'static [&'static str] {
    match generation {
        Generation::V7 => &["r", "w", "k", "v", "a", "g"],
        _ => &["w", "k", "v", "r", "g"],
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use sterna_format::safetensors::{SafeTensors, merge};

    use super::*;

    /// The error of a plan for a checkpoint of three layers, where `config` reads the configuration and
    /// `change` changes a tensor or removes it.
    fn refusal(
        config: impl Fn(String) -> String,
        change: impl Fn(TensorEntry) -> Option<TensorEntry>,
    ) -> String {
        let dir =
            Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/reference-logits/llama");
        let hf = config(fs::read_to_string(dir.join("config.json")).unwrap());
        let hf = Config::parse(hf.as_bytes()).unwrap();
        let file = fs::read(dir.join("model.safetensors")).unwrap();
        let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
        let whole = merge(vec![("model.safetensors", header)], None).unwrap();
        let mut catalog = TensorCatalog::default();
        for entry in whole.iter().cloned().filter_map(change) {
            catalog.insert(entry).unwrap();
        }
        let plan = ModelPlan::from_hf(&hf, &catalog, &PlanOptions::default());
        plan.unwrap_err().to_string()
    }

    /// The error of a plan for a checkpoint in which `change` changes the tensor called `name`.
    fn with(name: &str, change: impl Fn(&mut TensorEntry)) -> String {
        refusal(
            |config| config,
            |mut entry| {
                if entry.name == name {
                    change(&mut entry);
                }
                Some(entry)
            },
        )
    }

    const Q: &str = "model.layers.0.self_attn.q_proj.weight";

    #[test]
    fn errors_name_tensors_as_their_file_does() {
        let without = |name: &str| {
            refusal(
                |config| config,
                |entry| (entry.name != name).then_some(entry),
            )
        };
        assert_eq!(
            without(Q),
            format!("tensor `{Q}` is missing; it should be [128, 128]")
        );
        assert_eq!(
            without("model.layers.1.post_attention_layernorm.weight"),
            "tensor `model.layers.1.post_attention_layernorm.weight` is missing; it should be [128]"
        );
        assert_eq!(
            without("model.embed_tokens.weight"),
            "tensor `model.embed_tokens.weight`: expected [n_vocab, model_dim], found nothing"
        );
        assert_eq!(
            with(Q, |entry| entry.shape = vec![128, 8]),
            format!("tensor `{Q}`: expected shape [128, 128], found [128, 8]")
        );
        assert_eq!(
            with("model.norm.weight", |entry| entry.dtype = DType::I16),
            "tensor `model.norm.weight`: floats are needed, found type I16"
        );
        let unused = refusal(
            |config| config.replace("\"num_hidden_layers\": 3", "\"num_hidden_layers\": 2"),
            Some,
        );
        assert!(unused.contains("among them `model.layers.2."), "{unused}");
    }

    /// Catalogs are untrusted.
    #[test]
    fn places_that_cannot_be_are_refused() {
        let message = with(Q, |entry| {
            (entry.dtype, entry.len, entry.offset) = (DType::I2_S, 31, 0);
        });
        assert_eq!(
            message,
            format!("tensor `{Q}`: expected 4128 bytes of I2_S, found 31 at offset 0")
        );
        let message = with(Q, |entry| entry.offset = u64::MAX);
        assert!(
            message.ends_with(&format!("at offset {}", u64::MAX)),
            "{message}"
        );
        let message = with(Q, |entry| entry.shape = vec![usize::MAX, 2]);
        assert!(
            message.contains("expected bytes of BF16 that can be counted"),
            "{message}"
        );
    }
}
