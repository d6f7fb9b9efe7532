//! Finding each weight's tensors, and checking them.

use std::collections::HashSet;
use std::sync::Arc;

use regex_lite::{Regex, RegexBuilder};
use sterna_format::gguf::Metadata;
use sterna_format::hf;
use sterna_format::names::linear_module;
use sterna_format::{DType, TensorCatalog, TensorEntry};
use sterna_kernels::delta::{DeltaShape, HeadOrder};
use sterna_kernels::experts::Gating;
use sterna_kernels::hadamard::{Regroup, Rotation};
use sterna_kernels::mamba::MambaShape;
use sterna_kernels::rwkv::{Generation, RwkvShape};
use sterna_kernels::ssm::SsmShape;

use super::{
    ENCODER_ATTN_NORM, Every, LinearId, LinearRecipe, PlanOptions, Recipe, RopeFactors, SHARES,
    ScaleRecipe, Spec, Stored, TensorRequest, Transform, VectorId, VectorRecipe, fused_mixes,
    is_float, spelled,
};
use crate::config::{self, ExpertsConfig, LatentConfig, MixerKind, ModelConfig, RwkvConfig};
use crate::error::PlanError;
use crate::family::{Family, Mixture, QkNorms, SsmFamily};
use crate::rope::RopeScaling;
use crate::weights::{
    Attention, ChannelMix, Convolution, DeltaNet, Dense, ExpertBiases, Experts, FeedForward,
    FeedForwardBlock, LatentAttention, Layer, LayerInput, LayerInputs, Mamba, Mixer, Norm, Plain,
    Positions, Projection, Recurrence, SharedExpert, Shares, Shifted, Ssm, TimeMix, Weights,
};

/// Which linear layers were trained as BitLinear, beyond those whose stored type says so.
pub(super) enum BitLinears {
    None,
    /// All in the blocks.
    All,
    /// As a Hugging Face quantization configuration says.
    Configured {
        /// Float weights are master weights, to be ternarised.
        online: bool,
        /// Float weights belong to BitLinear layers nevertheless.
        family: bool,
        /// Packed weights are divided by their scale, not multiplied.
        divides: bool,
        /// Modules that are not converted.
        except: Vec<Exception>,
    },
}

/// Maximum entries of `modules_to_not_convert`; naming each module of a large model takes hundreds.
const MAX_EXCEPTIONS: usize = 2048;
/// Memory limit of a compiled entry: each is matched against every module.
const MAX_PATTERN_BYTES: usize = 16 << 10;

/// An entry of `modules_to_not_convert`.
pub(super) struct Exception {
    /// Matches a module that the entry names, or one within it.
    start: Option<Regex>,
    end: String,
}

impl Exception {
    fn new(entry: &str) -> Exception {
        // Entries may be regular expressions; an invalid one can still be the suffix of a name.
        Exception {
            start: RegexBuilder::new(&format!(r"^(?:{entry})(?:\.|$)"))
                .size_limit(MAX_PATTERN_BYTES)
                .build()
                .ok(),
            end: entry.to_owned(),
        }
    }

    fn covers(&self, module: &str) -> bool {
        self.start.as_ref().is_some_and(|re| re.is_match(module)) || module.ends_with(&self.end)
    }
}

impl BitLinears {
    /// What the configuration of a model of `family` says.
    pub(super) fn of(hf: &hf::Config, family: &Family) -> Result<BitLinears, PlanError> {
        let Some(quantization) = &hf.quantization_config else {
            return Ok(match family.bit_linear {
                true => BitLinears::All,
                false => BitLinears::None,
            });
        };
        let is = |value: &Option<String>, name| value.as_deref() == Some(name);
        // Tensors say what else is stored so.
        let has_mxfp4 = family.mixture.is_some_and(|mixture| mixture.hf_input_rows);
        if has_mxfp4 && is(&quantization.quant_method, "mxfp4") {
            return Ok(BitLinears::None);
        }
        if !is(&quantization.quant_method, "bitnet") {
            return Err(PlanError::config(
                "quantization_config.quant_method",
                "`bitnet`",
                format!("{:?}", quantization.quant_method),
            ));
        }
        let except = match &quantization.modules_to_not_convert {
            Some(modules) if modules.len() > MAX_EXCEPTIONS => {
                return Err(PlanError::config(
                    "quantization_config.modules_to_not_convert",
                    format!("at most {MAX_EXCEPTIONS} entries"),
                    modules.len(),
                ));
            }
            Some(modules) => modules.iter().map(|m| Exception::new(m)).collect(),
            None => vec![Exception::new("lm_head")],
        };
        Ok(BitLinears::Configured {
            online: is(&quantization.quantization_mode, "online"),
            family: family.bit_linear,
            divides: !is(&quantization.linear_class, "autobitlinear"),
            except,
        })
    }

    /// What the weights of the layer with the GGUF name `name` become, if they are stored in `dtype` and not
    /// in a form that is inherently ternary.
    fn stored(&self, name: &str, dtype: DType) -> Stored {
        let in_block = name.starts_with("blk.");
        match self {
            BitLinears::All if in_block => Stored::BitLinear(dtype),
            BitLinears::Configured {
                online,
                family,
                except,
                ..
            } => match linear_module(name) {
                Some(module) if !except.iter().any(|e| e.covers(&module)) => {
                    if *online {
                        Stored::Masters(dtype)
                    } else if *family && in_block {
                        Stored::BitLinear(dtype)
                    } else {
                        Stored::Blocks(dtype)
                    }
                }
                _ => Stored::Blocks(dtype),
            },
            _ => Stored::Blocks(dtype),
        }
    }

    pub(super) fn divides(&self) -> bool {
        match self {
            BitLinears::Configured { divides, .. } => *divides,
            BitLinears::All => false,
            BitLinears::None => true,
        }
    }
}

/// What says which matrices are rotated.
const ROTATED: &str = "prism.hadamard.weight_names";

/// A norm that is before the feed-forward block in some families, and of what attention gives in others.
const POST_ATTENTION_NORM: &str = "post_attention_norm";

pub(super) struct Planner<'a> {
    config: &'a ModelConfig,
    catalog: &'a TensorCatalog,
    bit_linears: BitLinears,
    options: PlanOptions,
    /// `model_type` of a Hugging Face model, whose files have their own names and norm conventions.
    model_type: Option<&'a str>,
    /// Between stored norm weights and what they multiply with.
    norms: Transform,
    used: HashSet<&'a str>,
    specs: Vec<Spec>,
    rotations: Vec<Arc<Rotation>>,
}

/// Rows of a stored matrix that make up one projection.
#[derive(Clone, Copy)]
struct Rows {
    first: usize,
    n: usize,
    stored: usize,
}

impl Rows {
    fn all(n: usize) -> Rows {
        Rows {
            first: 0,
            n,
            stored: n,
        }
    }
}

/// Rows of a stored matrix, some of every `stride`.
#[derive(Clone, Copy)]
struct Interleaved {
    first: usize,
    n: usize,
    stride: usize,
    n_runs: usize,
}

impl<'a> Planner<'a> {
    /// For the tensors of `catalog`, of a Hugging Face model of type `model_type`, or else of GGUF files.
    ///
    /// Errors: [`PlanError::TensorBytes`] if the offset and size of one of them can't be right.
    pub(super) fn new(
        config: &'a ModelConfig,
        catalog: &'a TensorCatalog,
        bit_linears: BitLinears,
        options: PlanOptions,
        model_type: Option<&'a str>,
    ) -> Result<Self, PlanError> {
        catalog.iter().try_for_each(check_bytes)?;
        Ok(Planner {
            config,
            catalog,
            bit_linears,
            options,
            model_type,
            norms: match model_type {
                Some(_) if config.family.norms_less_one => Transform::PlusOne,
                _ => Transform::None,
            },
            used: HashSet::new(),
            specs: Vec::new(),
            rotations: Vec::new(),
        })
    }

    /// Leaves out blocks after those of the model, of `n_blocks` in all.
    pub(super) fn skip_blocks_after(&mut self, n_blocks: usize) {
        for i in self.config.n_layers..n_blocks {
            // Names of checkpoints that aren't known stay as they are.
            let prefixes = [format!("blk.{i}."), format!("model.layers.{i}.")];
            let is_of_block = |name: &&str| prefixes.iter().any(|prefix| name.starts_with(prefix));
            let names = self.catalog.iter().map(|entry| entry.name.as_str());
            self.used.extend(names.filter(is_of_block));
        }
    }

    /// Every weight of the model. Where there is no separate output head and it `may_be_tied`, it is the
    /// embedding table.
    pub(super) fn weights(
        &mut self,
        may_be_tied: bool,
    ) -> Result<Weights<LinearId, VectorId>, PlanError> {
        let (n_vocab, model_dim) = (self.config.n_vocab, self.config.model_dim);
        let token_embd = self.matrix("token_embd", Rows::all(n_vocab), model_dim)?;
        let layer_inputs = match self.config.layer_input_dim {
            Some(dim) => Some(self.layer_inputs(dim)?),
            None => None,
        };
        let positions = match self.config.family.encoder {
            true => Some(self.positions()?),
            false => None,
        };
        let layers = (0..self.config.n_layers)
            .map(|i| self.layer(i))
            .collect::<Result<_, _>>()?;
        let output_norm = match self.find("output_norm.weight") {
            Some(_) => "output_norm",
            None => self.config.family.gguf_output_norm,
        };
        let output_norm = match self.config.family.encoder {
            true => None,
            false => Some(self.stream_norm(output_norm)?),
        };
        let output = if may_be_tied && self.find("output.weight").is_none() {
            None
        } else {
            Some(self.projection("output", Rows::all(n_vocab), model_dim)?)
        };
        Ok(Weights {
            token_embd,
            layer_inputs,
            positions,
            layers,
            output_norm,
            output,
        })
    }

    /// Fails if queries, keys or values of a layer have no bias: the configuration says that they do.
    pub(super) fn check_biases(
        &self,
        weights: &Weights<LinearId, VectorId>,
    ) -> Result<(), PlanError> {
        for (i, layer) in weights.layers.iter().enumerate() {
            let Some(Attention { q, k, v, .. }) = layer.attention() else {
                continue;
            };
            let (q_dim, kv_dim) = (self.config.q_rows(i), self.config.kv_dim(i));
            for (part, projection, len) in [
                ("attn_q", Some(q), q_dim),
                ("attn_k", k.as_ref(), kv_dim),
                ("attn_v", v.as_ref(), kv_dim),
            ] {
                if projection.is_some_and(|projection| projection.bias.is_none()) {
                    return Err(self.missing(&format!("blk.{i}.{part}.bias"), &[len]));
                }
            }
        }
        Ok(())
    }

    /// The specs and the rotations that they refer to, once every tensor has been used.
    pub(super) fn finish(self) -> Result<(Vec<Spec>, Vec<Arc<Rotation>>), PlanError> {
        let mut rotated = self.config.hadamard.iter().flat_map(|h| h.names());
        if let Some(name) = rotated.find(|name| !self.used.contains(name)) {
            let found = format!("`{name}`");
            return Err(PlanError::config(ROTATED, "names of tensors", found));
        }
        let mut unused = self
            .catalog
            .iter()
            .filter(|t| !self.used.contains(t.name.as_str()))
            .map(TensorEntry::name_in_file);
        match unused.next() {
            None => Ok((self.specs, self.rotations)),
            Some(first) => Err(PlanError::UnusedTensors {
                first: first.to_owned(),
                count: 1 + unused.count(),
            }),
        }
    }

    /// The divisors of rotary frequencies that a GGUF file stores in tensors.
    pub(super) fn rope_factors(
        &mut self,
        metadata: &Metadata,
    ) -> Result<Option<RopeFactors>, PlanError> {
        let rope = &self.config.ropes[0];
        let len = rope.pairs();
        let one = self.find("rope_freqs.weight").is_some();
        let long = config::gguf::says_long_rope(metadata)?
            || self.find("rope_factors_long.weight").is_some();
        if (one || long) && rope.scaling != RopeScaling::None {
            return Err(PlanError::config(
                "rope scaling",
                "either a formula or tensors of factors",
                "both",
            ));
        }
        if one {
            let id = self.host_vector("rope_freqs.weight", len)?;
            return Ok(Some(RopeFactors::One(id)));
        }
        if !long {
            return Ok(None);
        }
        let (original_ctx, attention_factor) = config::gguf::long_rope(metadata, self.config)?;
        Ok(Some(RopeFactors::ShortAndLong {
            short: self.host_vector("rope_factors_short.weight", len)?,
            long: self.host_vector("rope_factors_long.weight", len)?,
            original_ctx,
            attention_factor,
        }))
    }

    /// What each layer is given besides the residual stream, `dim` elements.
    fn layer_inputs(&mut self, dim: usize) -> Result<LayerInputs<LinearId, VectorId>, PlanError> {
        let (n_vocab, model_dim) = (self.config.n_vocab, self.config.model_dim);
        let all = self.config.n_layers * dim;
        let table = self.matrix("per_layer_token_embd", Rows::all(n_vocab), all)?;
        let mut projection = self.projection("per_layer_model_proj", Rows::all(all), model_dim)?;
        projection.scale = (1.0 / (model_dim as f64).sqrt()) as f32;
        Ok(LayerInputs {
            table,
            projection,
            norm: self.norm("per_layer_proj_norm", dim)?,
        })
    }

    /// What an encoder adds to embeddings.
    fn positions(&mut self) -> Result<Positions<LinearId, VectorId>, PlanError> {
        const TYPES: &str = "token_types.weight";
        let (dim, max_ctx) = (self.config.model_dim, self.config.max_ctx);
        let table = self.matrix("position_embd", Rows::all(max_ctx), dim)?;
        let n_types = self
            .find(TYPES)
            .and_then(|entry| entry.shape.first().copied());
        let entry = self.require(TYPES, &[n_types.unwrap_or(1).max(1), dim])?;
        // A text alone is of the first type.
        let token_type = self.row_vector(entry, 0, dim)?;
        Ok(Positions { table, token_type })
    }

    /// Block `i` of an encoder.
    fn encoder_layer(&mut self, i: usize) -> Result<Layer<LinearId, VectorId>, PlanError> {
        let (dim, ffn_dim) = (self.config.model_dim, self.config.ffn_dim);
        let name = |part: &str| format!("blk.{i}.{part}");
        let embed_norm = match i {
            0 => Some(self.stream_norm("token_embd_norm")?),
            _ => None,
        };
        let mixer = Mixer::Attention(self.attention(i)?);
        let attn_norm = self.stream_norm(&name(ENCODER_ATTN_NORM))?;
        let network = FeedForward::Plain(Plain {
            up: self.projection(&name("ffn_up"), Rows::all(ffn_dim), dim)?,
            down: self.projection(&name("ffn_down"), Rows::all(dim), ffn_dim)?,
        });
        Ok(Layer {
            embed_norm,
            attn_norm,
            mixer,
            post_attn_norm: None,
            ffn: Some(FeedForwardBlock {
                norm: self.stream_norm(&name(self.config.family.ffn_norm))?,
                network,
                post_norm: None,
            }),
            input: None,
            scale: None,
        })
    }

    /// How block `i` takes its own input in, `dim` elements.
    fn layer_input(
        &mut self,
        i: usize,
        dim: usize,
    ) -> Result<LayerInput<LinearId, VectorId>, PlanError> {
        let model_dim = self.config.model_dim;
        let name = |part: &str| format!("blk.{i}.{part}");
        Ok(LayerInput {
            gate: self.projection(&name("inp_gate"), Rows::all(dim), model_dim)?,
            output: self.projection(&name("proj"), Rows::all(model_dim), dim)?,
            norm: self.norm(&name("post_norm"), model_dim)?,
        })
    }

    fn layer(&mut self, i: usize) -> Result<Layer<LinearId, VectorId>, PlanError> {
        let model_dim = self.config.model_dim;
        let parts = self.config.family.parts;
        let name = |part: &str| format!("blk.{i}.{part}");

        if self.config.family.encoder {
            return self.encoder_layer(i);
        }
        let attn_norm = self.stream_norm(&name("attn_norm"))?;
        const CHECKED: &str = "a checked configuration has the heads of such layers";
        let mixer = match self.config.layers[i].mixer {
            MixerKind::Attention => Mixer::Attention(self.attention(i)?),
            MixerKind::LatentAttention => {
                let latent = self.config.latent.expect(CHECKED);
                Mixer::Latent(self.latent_attention(i, &latent)?)
            }
            MixerKind::Convolution => Mixer::Convolution(self.convolution(i)?),
            MixerKind::DeltaNet => {
                let shape = self.config.delta.expect(CHECKED);
                Mixer::DeltaNet(self.delta_net(i, &shape)?)
            }
            MixerKind::Ssm => Mixer::Ssm(self.ssm(i, &self.config.ssm.expect(CHECKED))?),
            MixerKind::Mamba => {
                let shape = self.config.mamba.expect(CHECKED);
                Mixer::Mamba(self.mamba(i, &shape)?)
            }
            MixerKind::AttentionAndSsm => {
                let ssm = self.ssm(i, &self.config.ssm.expect(CHECKED))?;
                Mixer::Both(self.attention(i)?, ssm)
            }
            MixerKind::TimeMix => {
                let rwkv = self.config.rwkv.expect(CHECKED);
                return self.rwkv_layer(i, attn_norm, &rwkv);
            }
        };
        if self.config.family.ssm.is_some_and(SsmFamily::is_alone) {
            return Ok(Layer {
                embed_norm: None,
                attn_norm,
                mixer,
                post_attn_norm: None,
                ffn: None,
                input: None,
                scale: None,
            });
        }
        let ffn_norm = self.config.family.ffn_norm;
        let post_attn_norm = match ffn_norm == POST_ATTENTION_NORM {
            true => None,
            false => {
                let name = name(POST_ATTENTION_NORM);
                self.optional_norm(&name, model_dim, parts.post_norms)?
            }
        };

        let ffn_norm = self.stream_norm(&name(ffn_norm))?;
        let ffn = match (&self.config.experts, self.config.layers[i].has_experts) {
            (Some(experts), true) => FeedForward::Experts(self.experts(i, experts)?),
            _ => FeedForward::Dense(self.dense(i)?),
        };
        let post_norm = self.optional_norm(&name("post_ffw_norm"), model_dim, parts.post_norms)?;
        let input = match self.config.layer_input_dim {
            Some(dim) => Some(self.layer_input(i, dim)?),
            None => None,
        };
        let scale = name("layer_output_scale.weight");
        let scale = match self.find(&scale) {
            Some(_) => Some(self.vector(&scale, 1, Transform::None)?),
            None => None,
        };
        Ok(Layer {
            embed_norm: None,
            attn_norm,
            mixer,
            post_attn_norm,
            ffn: Some(FeedForwardBlock {
                norm: ffn_norm,
                network: ffn,
                post_norm,
            }),
            input,
            scale,
        })
    }

    /// The attention of block `i`.
    fn attention(&mut self, i: usize) -> Result<Attention<LinearId, VectorId>, PlanError> {
        let ModelConfig {
            model_dim, n_heads, ..
        } = *self.config;
        let head_dim = self.config.heads_of(i).head_dim;
        let (q_dim, kv_dim) = (self.config.q_dim(i), self.config.kv_dim(i));
        let q_rows = self.config.q_rows(i);
        let parts = self.config.family.parts;
        let name = |part: &str| format!("blk.{i}.{part}");
        let shares = self.config.shared_layer(i).is_some();
        let are_keys = self
            .config
            .wide_heads
            .is_some_and(|wide| wide.values_are_keys)
            && self.config.layers[i].window.is_none();
        let stored = q_rows + 2 * kv_dim;
        let fused = self.find(&name("attn_qkv.weight")).is_some();
        let mut qkv = |part: &str, first, n| {
            if fused {
                self.projection(&name("attn_qkv"), Rows { first, n, stored }, model_dim)
            } else {
                self.projection(&name(part), Rows::all(n), model_dim)
            }
        };
        let mut q = qkv("attn_q", 0, q_rows)?;
        let mut k = match shares {
            true => None,
            false => Some(qkv("attn_k", q_rows, kv_dim)?),
        };
        let mut v = match shares || are_keys {
            true => None,
            false => Some(qkv("attn_v", q_rows + kv_dim, kv_dim)?),
        };
        let factors = &self.config.multipliers;
        for projection in [Some(&mut q), k.as_mut(), v.as_mut()].into_iter().flatten() {
            projection.scale = factors.attention_in;
        }
        if let Some(k) = &mut k {
            k.scale *= factors.key;
        }
        for (part, projection, len) in [
            ("attn_q", Some(&q), q_rows),
            ("attn_k", k.as_ref(), kv_dim),
            ("attn_v", v.as_ref(), kv_dim),
        ] {
            let lacks = projection.is_some_and(|projection| projection.bias.is_none());
            if parts.qkv_biases && lacks {
                return Err(self.missing(&name(&format!("{part}.bias")), &[len]));
            }
        }
        if shares {
            // Checkpoints have them nevertheless.
            for part in ["attn_k", "attn_v", "attn_k_norm"] {
                self.find(&name(&format!("{part}.weight")));
            }
        }
        let (q_norm_dim, k_norm_dim) = match parts.qk_norms {
            QkNorms::Whole => (q_dim, kv_dim),
            QkNorms::None | QkNorms::Heads => (head_dim, head_dim),
        };
        let normed = parts.qk_norms != QkNorms::None;
        let q_norm = self.optional_norm(&name("attn_q_norm"), q_norm_dim, normed)?;
        let k_norm = match shares {
            true => None,
            false => self.optional_norm(&name("attn_k_norm"), k_norm_dim, normed)?,
        };
        let sinks = name("attn_sinks.weight");
        let sinks = match parts.sinks || self.find(&sinks).is_some() {
            true => Some(self.vector(&sinks, n_heads, Transform::None)?),
            false => None,
        };
        let sub_norm = self.optional_norm(&name("attn_sub_norm"), q_dim, parts.sub_norms)?;
        let mut o = self.projection(&name("attn_output"), Rows::all(model_dim), q_dim)?;
        o.scale = self.config.multipliers.attention_out;
        Ok(Attention {
            q,
            k,
            v,
            q_norm,
            k_norm,
            sinks,
            sub_norm,
            o,
        })
    }

    /// The latent attention of block `i`.
    fn latent_attention(
        &mut self,
        i: usize,
        shape: &LatentConfig,
    ) -> Result<LatentAttention<LinearId, VectorId>, PlanError> {
        let ModelConfig {
            model_dim, n_heads, ..
        } = *self.config;
        let name = |part: &str| format!("blk.{i}.{part}");
        let LatentConfig {
            kv_rank,
            nope_dim,
            rope_dim,
            value_dim,
            ..
        } = *shape;
        let queries = Rows::all(n_heads * shape.query_dim());
        let (q_down, q) = match shape.q_rank {
            Some(rank) => {
                let down = self.projection(&name("attn_q_a"), Rows::all(rank), model_dim)?;
                let norm = self.norm(&name("attn_q_a_norm"), rank)?;
                let q = self.projection(&name("attn_q_b"), queries, rank)?;
                (Some((down, norm)), q)
            }
            None => (None, self.projection(&name("attn_q"), queries, model_dim)?),
        };
        let mut part = |first, n| {
            let stored = kv_rank + rope_dim;
            self.projection(&name("attn_kv_a_mqa"), Rows { first, n, stored }, model_dim)
        };
        let (latent, k_rope) = (part(0, kv_rank)?, part(kv_rank, rope_dim)?);
        let latent_norm = self.norm(&name("attn_kv_a_norm"), kv_rank)?;
        let (mut k_up, mut v_up) = (Vec::new(), Vec::new());
        let stored = n_heads * (nope_dim + value_dim);
        let both = name("attn_kv_b");
        let joined = self.find(&format!("{both}.weight"));
        for head in 0..n_heads {
            let Some(entry) = joined else {
                k_up.push(self.one_of(&name("attn_k_b"), head, [n_heads, kv_rank, nope_dim])?);
                v_up.push(self.one_of(&name("attn_v_b"), head, [n_heads, value_dim, kv_rank])?);
                continue;
            };
            check_shape(entry, &[stored, kv_rank])?;
            let first = head * (nope_dim + value_dim);
            k_up.push(self.turned(&both, entry, first, [kv_rank, nope_dim])?);
            let values = Rows {
                first: first + nope_dim,
                n: value_dim,
                stored,
            };
            v_up.push(self.matrix(&both, values, kv_rank)?);
        }
        let o = self.projection(
            &name("attn_output"),
            Rows::all(model_dim),
            n_heads * value_dim,
        )?;
        Ok(LatentAttention {
            q_down,
            q,
            k_rope,
            latent,
            latent_norm,
            k_up,
            v_up,
            o,
        })
    }

    /// The matrix `[n, k]` number `index` of a tensor that has `count` of them.
    fn one_of(
        &mut self,
        name: &str,
        index: usize,
        [count, n, k]: [usize; 3],
    ) -> Result<LinearId, PlanError> {
        let entry = self.require(&format!("{name}.weight"), &[count, n, k])?;
        expect_whole_blocks(entry, k)?;
        let rows = Rows {
            first: index * n,
            n,
            stored: count * n,
        };
        let (part, recipe) = self.rows_of(name, entry, rows, k)?;
        Ok(LinearId(self.push(vec![part], Recipe::Linear(recipe))))
    }

    /// The matrix `[n, k]` whose columns are rows of `entry`, from row `first` on.
    fn turned(
        &mut self,
        name: &str,
        entry: &TensorEntry,
        first: usize,
        [n, k]: [usize; 2],
    ) -> Result<LinearId, PlanError> {
        expect_floats(entry, "floats are needed where rows become columns")?;
        let rows = Rows {
            first,
            n: k,
            stored: k,
        };
        let (part, recipe) = self.rows_of(name, entry, rows, n)?;
        let recipe = LinearRecipe {
            n,
            k,
            n_stored: n,
            transposed: true,
            ..recipe
        };
        Ok(LinearId(self.push(vec![part], Recipe::Linear(recipe))))
    }

    /// The short convolution of block `i`.
    fn convolution(&mut self, i: usize) -> Result<Convolution<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        let name = |part: &str| format!("blk.{i}.shortconv.{part}");
        let input = self.projection(&name("in_proj"), Rows::all(3 * dim), dim)?;
        let taps = self.taps(&name("conv.weight"), dim)?;
        let output = self.projection(&name("out_proj"), Rows::all(dim), dim)?;
        Ok(Convolution {
            input,
            taps,
            output,
        })
    }

    /// The taps of a convolution of `dim` channels.
    fn taps(&mut self, name: &str, dim: usize) -> Result<VectorId, PlanError> {
        let n_taps = self.config.conv_taps.unwrap_or(0);
        // Checkpoints have a dimension of one between the two.
        let shape = match self.catalog.get(name).map(|entry| entry.shape.len()) {
            Some(3) => vec![dim, 1, n_taps],
            _ => vec![dim, n_taps],
        };
        let (parts, recipe) = self.vector_of_shape(name, &shape, Transform::None)?;
        Ok(VectorId(self.push(parts, Recipe::Vector(recipe))))
    }

    /// The gated delta net of block `i`.
    fn delta_net(
        &mut self,
        i: usize,
        shape: &DeltaShape,
    ) -> Result<DeltaNet<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        let name = |part: &str| format!("blk.{i}.{part}");
        let n_heads = shape.n_value_heads;
        let [qkv, gate] = match self.find(&name("ssm_in.weight")) {
            // All heads of a key after each other, as checkpoints of Qwen3-Next have them.
            Some(_) => {
                let each = shape.values() / shape.n_key_heads;
                let [q, k, v, z] = [shape.key_dim, shape.key_dim, each, each];
                let parts = [(0, q), (q, k), (q + k, v), (q + k + v, z)];
                let runs = |(first, n)| Interleaved {
                    first,
                    n,
                    stride: q + k + v + z,
                    n_runs: shape.n_key_heads,
                };
                let [q, k, v, z] = parts.map(runs);
                let name = name("ssm_in");
                [
                    self.interleaved(&name, &[q, k, v], dim)?,
                    self.interleaved(&name, &[z], dim)?,
                ]
            }
            None => [
                self.projection(&name("attn_qkv"), Rows::all(shape.channels()), dim)?,
                self.projection(&name("attn_gate"), Rows::all(shape.values()), dim)?,
            ],
        };
        let [beta, alpha] = match self.find(&name("ssm_ba.weight")) {
            Some(_) => {
                let each = n_heads / shape.n_key_heads;
                let name = name("ssm_ba");
                let runs = |first| Interleaved {
                    first,
                    n: each,
                    stride: 2 * each,
                    n_runs: shape.n_key_heads,
                };
                [
                    self.interleaved(&name, &[runs(0)], dim)?,
                    self.interleaved(&name, &[runs(each)], dim)?,
                ]
            }
            None => [
                self.projection(&name("ssm_beta"), Rows::all(n_heads), dim)?,
                self.projection(&name("ssm_alpha"), Rows::all(n_heads), dim)?,
            ],
        };
        Ok(DeltaNet {
            qkv,
            gate,
            alpha,
            beta,
            taps: self.taps(&name("ssm_conv1d.weight"), shape.channels())?,
            a: self.decay(&name("ssm_a"), n_heads)?,
            dt_bias: self.vector(&name("ssm_dt.bias"), n_heads, Transform::None)?,
            norm: self.vector(&name("ssm_norm.weight"), shape.value_dim, Transform::None)?,
            output: self.projection(&name("ssm_out"), Rows::all(dim), shape.values())?,
        })
    }

    /// The state space of block `i`.
    fn ssm(&mut self, i: usize, shape: &SsmShape) -> Result<Ssm<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        let name = |part: &str| format!("blk.{i}.{part}");
        let n_heads = shape.n_heads;
        let stored = shape.inner() + shape.channels() + n_heads;
        let mut part = |first, n| {
            let rows = Rows { first, n, stored };
            self.projection(&name("ssm_in"), rows, dim)
        };
        let mut gate = part(0, shape.inner())?;
        let xbc = part(shape.inner(), shape.channels())?;
        let mut dt = part(stored - n_heads, n_heads)?;
        let factors = self.config.multipliers;
        gate.scale = factors.ssm_in * factors.ssm[0];
        dt.scale = factors.ssm_in * factors.ssm[4];
        let taps = self.taps(&name("ssm_conv1d.weight"), shape.channels())?;
        // A convolution of multiples is one with multiples of its taps.
        let n_taps = self.config.conv_taps.unwrap_or(0);
        let mut parts = [(0, 1.0); 3];
        let mut end = 0;
        for (part, (n, factor)) in parts.iter_mut().zip([
            (shape.inner(), factors.ssm[1]),
            (shape.directions(), factors.ssm[2]),
            (shape.directions(), factors.ssm[3]),
        ]) {
            end += n * n_taps;
            *part = (end, factors.ssm_in * factor);
        }
        if let Recipe::Vector(recipe) = &mut self.specs[taps.0].recipe
            && parts.iter().any(|(_, factor)| *factor != 1.0)
        {
            recipe.transform = Transform::Factors(parts);
        }
        let norm = name("ssm_norm.weight");
        let has_norm =
            self.config.family.ssm != Some(SsmFamily::FalconH1) || self.find(&norm).is_some();
        let norm = match has_norm {
            true => Some(self.any_shape(&norm, shape.inner(), Transform::None)?),
            false => None,
        };
        let mut output = self.projection(&name("ssm_out"), Rows::all(dim), shape.inner())?;
        output.scale = factors.ssm_out;
        Ok(Ssm {
            gate,
            xbc,
            dt,
            taps,
            conv_bias: self.conv_bias(i, shape.channels())?,
            a: self.decay(&name("ssm_a"), n_heads)?,
            d: self.any_shape(&name("ssm_d"), n_heads, Transform::None)?,
            dt_bias: self.vector(&name("ssm_dt.bias"), n_heads, Transform::None)?,
            norm,
            output,
        })
    }

    /// A value for each element of all heads of time mixing. Checkpoints have one row a head: nothing else in them says how
    /// many there are.
    fn of_heads(&mut self, name: &str, rwkv: &RwkvConfig) -> Result<VectorId, PlanError> {
        let RwkvShape {
            n_heads, head_dim, ..
        } = rwkv.shape;
        if let Some(entry) = self.find(name)
            && entry.shape.len() == 2
        {
            check_shape(entry, &[n_heads, head_dim])?;
        }
        self.any_shape(name, n_heads * head_dim, Transform::None)
    }

    /// The bias of the convolution of block `i`, if it has one.
    fn conv_bias(&mut self, i: usize, channels: usize) -> Result<Option<VectorId>, PlanError> {
        let name = format!("blk.{i}.ssm_conv1d.bias");
        match self.find(&name) {
            Some(_) => self.vector(&name, channels, Transform::None).map(Some),
            None => Ok(None),
        }
    }

    /// The state space of block `i`, of the first Mamba.
    fn mamba(
        &mut self,
        i: usize,
        shape: &MambaShape,
    ) -> Result<Mamba<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        let name = |part: &str| format!("blk.{i}.{part}");
        let MambaShape {
            inner,
            state_dim,
            dt_rank,
        } = *shape;
        let mut input = |first| {
            let stored = 2 * inner;
            let n = inner;
            self.projection(&name("ssm_in"), Rows { first, n, stored }, dim)
        };
        let (input, gate) = (input(0)?, input(inner)?);
        let mut part = |first, n| {
            let stored = dt_rank + 2 * state_dim;
            self.projection(&name("ssm_x"), Rows { first, n, stored }, inner)
        };
        let (dt_in, b) = (part(0, dt_rank)?, part(dt_rank, state_dim)?);
        let c = part(dt_rank + state_dim, state_dim)?;
        let has_norms = self.config.family.ssm == Some(SsmFamily::Jamba);
        let dt = self.projection(&name("ssm_dt"), Rows::all(inner), dt_rank)?;
        if dt.bias.is_none() {
            return Err(self.missing(&name("ssm_dt.bias"), &[inner]));
        }
        Ok(Mamba {
            input,
            gate,
            dt_in,
            b,
            c,
            taps: self.taps(&name("ssm_conv1d.weight"), inner)?,
            conv_bias: self.conv_bias(i, inner)?,
            dt_norm: self.optional_norm(&name("ssm_dt_norm"), dt_rank, has_norms)?,
            b_norm: self.optional_norm(&name("ssm_b_norm"), state_dim, has_norms)?,
            c_norm: self.optional_norm(&name("ssm_c_norm"), state_dim, has_norms)?,
            dt,
            a: self.decay(&name("ssm_a"), shape.state())?,
            d: self.vector(&name("ssm_d"), inner, Transform::None)?,
            output: self.projection(&name("ssm_out"), Rows::all(dim), inner)?,
        })
    }

    /// Block `i` of RWKV.
    fn rwkv_layer(
        &mut self,
        i: usize,
        attn_norm: Norm<VectorId>,
        rwkv: &RwkvConfig,
    ) -> Result<Layer<LinearId, VectorId>, PlanError> {
        let (dim, generation) = (self.config.model_dim, rwkv.shape.generation);
        let ffn_dim = self.config.ffn_dim;
        const CHANNEL: &str = "channel_mix";
        let name = |part: &str| format!("blk.{i}.{part}");
        let embed_norm = match i {
            0 => Some(self.stream_norm("token_embd_norm")?),
            _ => None,
        };
        let mixer = Mixer::Time(self.time_mix(i, rwkv)?);
        let norm = self.stream_norm(&name(self.config.family.ffn_norm))?;
        let key = self.shifted(i, (CHANNEL, "k", "key"), ffn_dim, rwkv)?;
        let receptance = match generation {
            Generation::V7 => None,
            _ => Some(self.shifted(i, (CHANNEL, "r", "receptance"), dim, rwkv)?),
        };
        let mut value = self.projection(&name("channel_mix_value"), Rows::all(dim), ffn_dim)?;
        value.scale = rwkv.residual_factor(i);
        Ok(Layer {
            embed_norm,
            attn_norm,
            mixer,
            post_attn_norm: None,
            ffn: Some(FeedForwardBlock {
                norm,
                network: FeedForward::Channel(ChannelMix {
                    key,
                    receptance,
                    value,
                }),
                post_norm: None,
            }),
            input: None,
            scale: None,
        })
    }

    /// The time mixing of block `i`.
    fn time_mix(
        &mut self,
        i: usize,
        rwkv: &RwkvConfig,
    ) -> Result<TimeMix<LinearId, VectorId>, PlanError> {
        let (dim, generation, ranks) = (self.config.model_dim, rwkv.shape.generation, rwkv.ranks);
        let name = |part: &str| format!("blk.{i}.time_mix_{part}");
        let mut square =
            |letter: &str, part: &str| self.shifted(i, ("time_mix", letter, part), dim, rwkv);
        let (r, k) = (square("r", "receptance")?, square("k", "key")?);
        let v = square("v", "value")?;
        let gate = match generation {
            Generation::V4 => None,
            Generation::V5 | Generation::V6 => Some(square("g", "gate")?),
            Generation::V7 => {
                let pair = (name("g"), None);
                Some(self.shifted_pair(i, "g", pair, ranks.gate, rwkv)?)
            }
        };
        let recurrence = match generation {
            Generation::V4 | Generation::V5 => Recurrence::Fixed {
                decay: self.of_heads(&name("decay.weight"), rwkv)?,
                first: self.of_heads(&name("first.weight"), rwkv)?,
            },
            Generation::V6 => {
                let rank = ranks.shares;
                let w2 = name("w2");
                let up = (0..SHARES).map(|part| self.share(&w2, part, [dim, rank]));
                let up = up.collect::<Result<_, _>>()?;
                let pair = (name("decay_w"), Some(name("decay")));
                let decay = self.shifted_pair(i, "w", pair, ranks.decay, rwkv)?;
                Recurrence::Six {
                    shares: Shares {
                        factors: self.any_shape(&name("lerp_x.weight"), dim, Transform::None)?,
                        down: self.of_inputs(&name("w1"), [SHARES * rank, dim])?,
                        up,
                    },
                    decay,
                    first: self.of_heads(&name("first.weight"), rwkv)?,
                }
            }
            Generation::V7 => {
                let biased = |letter: &str| (name(letter), Some(name(&format!("{letter}0"))));
                let residual = match i {
                    0 => {
                        // GGUF files have copies of others there.
                        for part in ["v0", "v1", "v2"] {
                            self.find(&name(&format!("{part}.weight")));
                        }
                        None
                    }
                    _ => Some(self.low_rank(biased("v"), ranks.residual)?),
                };
                Recurrence::Seven {
                    decay: self.shifted_pair(i, "w", biased("w"), ranks.decay, rwkv)?,
                    rate: self.shifted_pair(i, "a", biased("a"), ranks.rate, rwkv)?,
                    residual,
                    k_k: self.any_shape(&name("k_k.weight"), dim, Transform::None)?,
                    k_a: self.any_shape(&name("k_a.weight"), dim, Transform::None)?,
                    r_k: self.of_heads(&name("r_k.weight"), rwkv)?,
                }
            }
        };
        let finish = match gate {
            None => None,
            Some(gate) => Some((self.stream_norm(&name("ln"))?, gate)),
        };
        let mut output = self.projection(&name("output"), Rows::all(dim), dim)?;
        output.scale = rwkv.residual_factor(i);
        Ok(TimeMix {
            r,
            k,
            v,
            recurrence,
            finish,
            output,
        })
    }

    /// A linear layer of `n` rows that reads a mix of positions.
    fn shifted(
        &mut self,
        i: usize,
        (kind, letter, part): (&str, &str, &str),
        n: usize,
        rwkv: &RwkvConfig,
    ) -> Result<Shifted<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        Ok(Shifted {
            factors: self.mix_factors(i, kind, letter, rwkv)?,
            down: None,
            projection: self.projection(&format!("blk.{i}.{kind}_{part}"), Rows::all(n), dim)?,
        })
    }

    /// A pair of matrices of low rank, which read a mix of positions.
    fn shifted_pair(
        &mut self,
        i: usize,
        letter: &str,
        names: (String, Option<String>),
        rank: usize,
        rwkv: &RwkvConfig,
    ) -> Result<Shifted<LinearId, VectorId>, PlanError> {
        let factors = self.mix_factors(i, "time_mix", letter, rwkv)?;
        let [down, projection] = self.low_rank(names, rank)?;
        Ok(Shifted {
            factors,
            down: Some(down),
            projection,
        })
    }

    /// A pair of matrices of low rank, whose names end in 1 and 2, and what is added then, if something is.
    fn low_rank(
        &mut self,
        (pair, bias): (String, Option<String>),
        rank: usize,
    ) -> Result<[Projection<LinearId, VectorId>; 2], PlanError> {
        let dim = self.config.model_dim;
        let down = self.of_inputs(&format!("{pair}1"), [rank, dim])?;
        let mut up = self.of_inputs(&format!("{pair}2"), [dim, rank])?;
        if let Some(bias) = bias {
            up.bias = Some(self.any_shape(&format!("{bias}.weight"), dim, Transform::None)?);
        }
        Ok([down, up])
    }

    /// A linear layer that checkpoints may have with inputs as rows.
    fn of_inputs(
        &mut self,
        name: &str,
        [n, k]: [usize; 2],
    ) -> Result<Projection<LinearId, VectorId>, PlanError> {
        let transposed = format!("{name}.transposed");
        let Some(entry) = self.find(&transposed) else {
            return self.projection(name, Rows::all(n), k);
        };
        check_shape(entry, &[k, n])?;
        let weight = self.turned(name, entry, 0, [n, k])?;
        Ok(Projection {
            input_norm: None,
            weight,
            scale: 1.0,
            bias: None,
        })
    }

    /// One of the matrices `[n, k]` that give shares of factors, of a tensor that has all.
    fn share(
        &mut self,
        name: &str,
        part: usize,
        [n, k]: [usize; 2],
    ) -> Result<LinearId, PlanError> {
        if let Some(entry) = self.find(&format!("{name}.transposed")) {
            check_shape(entry, &[SHARES, k, n])?;
            return self.turned(name, entry, part * k, [n, k]);
        }
        self.one_of(name, part, [SHARES, n, k])
    }

    /// The factors of a mix of positions: a vector of their own, or a part of one that has those of all.
    fn mix_factors(
        &mut self,
        i: usize,
        kind: &str,
        letter: &str,
        rwkv: &RwkvConfig,
    ) -> Result<VectorId, PlanError> {
        let dim = self.config.model_dim;
        let fused = format!("blk.{i}.{kind}_lerp_fused.weight");
        let all = fused_mixes(rwkv.shape.generation);
        let own = all.iter().position(|&other| other == letter);
        let own = own.filter(|_| kind == "time_mix");
        let Some((own, entry)) = own.and_then(|own| Some((own, self.find(&fused)?))) else {
            let name = format!("blk.{i}.{kind}_lerp_{letter}.weight");
            return self.any_shape(&name, dim, Transform::None);
        };
        check_shape(entry, &[all.len(), 1, 1, dim])?;
        self.row_vector(entry, own, dim)
    }

    /// The decays of heads, of which checkpoints have the logarithm.
    fn decay(&mut self, name: &str, n_heads: usize) -> Result<VectorId, PlanError> {
        let entry = self.catalog.get(name);
        let transform = match entry.is_some_and(|entry| entry.name_in_file().ends_with("A_log")) {
            true => Transform::MinusExp,
            false => Transform::None,
        };
        self.any_shape(name, n_heads, transform)
    }

    /// A vector of `len` elements, whatever its dimensions: GGUF files have one value of a head in a row, and groups of a
    /// norm; checkpoints, dimensions of one.
    fn any_shape(
        &mut self,
        name: &str,
        len: usize,
        transform: Transform,
    ) -> Result<VectorId, PlanError> {
        let shape = match self.catalog.get(name).map(|entry| &entry.shape[..]) {
            Some(shape) if shape.iter().product::<usize>() == len => shape.to_vec(),
            _ => vec![len],
        };
        let (parts, recipe) = self.vector_of_shape(name, &shape, transform)?;
        Ok(VectorId(self.push(parts, Recipe::Vector(recipe))))
    }

    /// A linear layer of rows of a matrix that has those of several in turn.
    fn interleaved(
        &mut self,
        name: &str,
        runs: &[Interleaved],
        k: usize,
    ) -> Result<Projection<LinearId, VectorId>, PlanError> {
        let weight_name = format!("{name}.weight");
        let n_stored = runs.iter().map(|runs| runs.stride * runs.n_runs).max();
        let n_stored = n_stored.unwrap_or(0);
        let entry = self.require(&weight_name, &[n_stored, k])?;
        expect_whole_blocks(entry, k)?;
        let (mut parts, mut n) = (Vec::new(), 0);
        let mut recipe = None;
        for runs in runs {
            for run in 0..runs.n_runs {
                let rows = Rows {
                    first: runs.first + run * runs.stride,
                    n: runs.n,
                    stored: n_stored,
                };
                let (part, own) = self.rows_of(name, entry, rows, k)?;
                parts.push(part);
                n += rows.n;
                recipe = Some(own);
            }
        }
        let recipe = recipe.map(|recipe| LinearRecipe {
            n,
            n_stored: n,
            n_runs: parts.len(),
            ..recipe
        });
        let Some(recipe) = recipe else {
            return Err(self.missing(&weight_name, &[n_stored, k]));
        };
        Ok(Projection {
            input_norm: None,
            weight: LinearId(self.push(parts, Recipe::Linear(recipe))),
            scale: 1.0,
            bias: None,
        })
    }

    /// The feed-forward network of block `i`.
    fn dense(&mut self, i: usize) -> Result<Dense<LinearId, VectorId>, PlanError> {
        let (model_dim, ffn_dim) = (self.config.model_dim, self.config.ffn_dim_of(i));
        let parts = self.config.family.parts;
        // Granite's checkpoints call the only network what others call the shared expert.
        let end = match self.find(&format!("blk.{i}.ffn_up.weight")) {
            None if self.config.family.ssm == Some(SsmFamily::Granite) => "_shexp",
            _ => "",
        };
        let name = |part: &str| format!("blk.{i}.{part}{end}");
        let names = [name("ffn_gate"), name("ffn_up")];
        let [mut gate, up] = self.gate_and_up(&names, ffn_dim, model_dim)?;
        gate.scale = self.config.multipliers.gate;
        let sub_norm = self.optional_norm(&name("ffn_sub_norm"), ffn_dim, parts.sub_norms)?;
        let mut down = self.projection(&name("ffn_down"), Rows::all(model_dim), ffn_dim)?;
        down.scale = self.config.multipliers.down;
        Ok(Dense {
            gate,
            up,
            sub_norm,
            down,
        })
    }

    /// The matrices of a gate and of what it is multiplied with; without a separate gate, the second contains both, the
    /// gate first.
    fn gate_and_up(
        &mut self,
        [gate, up]: &[String; 2],
        n: usize,
        k: usize,
    ) -> Result<[Projection<LinearId, VectorId>; 2], PlanError> {
        if self.find(&format!("{gate}.weight")).is_some() {
            let all = Rows::all(n);
            return Ok([self.projection(gate, all, k)?, self.projection(up, all, k)?]);
        }
        let half = |first| Rows {
            first,
            n,
            stored: 2 * n,
        };
        Ok([
            self.projection(up, half(0), k)?,
            self.projection(up, half(n), k)?,
        ])
    }

    /// The experts of block `i`, one after another.
    fn experts(
        &mut self,
        i: usize,
        experts: &ExpertsConfig,
    ) -> Result<Experts<LinearId, VectorId>, PlanError> {
        let (model_dim, ffn_dim) = (self.config.model_dim, experts.ffn_dim);
        let n_experts = experts.routing.n_experts;
        let router = format!("blk.{i}.ffn_gate_inp");
        let router = self.projection(&router, Rows::all(n_experts), model_dim)?;
        let bias = format!("blk.{i}.exp_probs_b.bias");
        let biased = experts.routing.gating == Gating::Sigmoid && self.find(&bias).is_some();
        let bias = match biased {
            true => Some(self.vector(&bias, n_experts, Transform::None)?),
            false => None,
        };
        let mut all = Experts {
            router,
            bias,
            gate: Vec::with_capacity(n_experts),
            up: Vec::with_capacity(n_experts),
            down: Vec::with_capacity(n_experts),
            biases: self.expert_biases(i, experts)?,
            shared: match experts.shared_ffn_dim {
                Some(ffn_dim) => Some(self.shared_expert(i, ffn_dim)?),
                None => None,
            },
        };
        for expert in 0..n_experts {
            for (ids, part, n, k) in [
                (&mut all.gate, "ffn_gate", ffn_dim, model_dim),
                (&mut all.up, "ffn_up", ffn_dim, model_dim),
                (&mut all.down, "ffn_down", model_dim, ffn_dim),
            ] {
                ids.push(self.expert(&format!("blk.{i}.{part}"), expert, n_experts, [n, k])?);
            }
        }
        Ok(all)
    }

    /// The biases of all experts of block `i`.
    fn expert_biases(
        &mut self,
        i: usize,
        experts: &ExpertsConfig,
    ) -> Result<Option<ExpertBiases<VectorId>>, PlanError> {
        let (model_dim, ffn_dim) = (self.config.model_dim, experts.ffn_dim);
        let n_experts = experts.routing.n_experts;
        let name = |part: &str| format!("blk.{i}.{part}_exps.bias");
        let both = name("ffn_gate_up");
        let joined = self.find(&both).is_some();
        if !joined
            && !["ffn_gate", "ffn_up", "ffn_down"]
                .iter()
                .any(|part| self.find(&name(part)).is_some())
        {
            return Ok(None);
        }
        let mut vector = |name: &str, width: usize, every: Every| {
            let shape = [n_experts, width * every.step];
            let (parts, recipe) = self.vector_of_shape(name, &shape, Transform::None)?;
            let len = n_experts * width;
            let recipe = Recipe::Vector(VectorRecipe {
                len,
                every,
                ..recipe
            });
            Ok::<_, PlanError>(VectorId(self.push(parts, recipe)))
        };
        let (gate, up) = match joined {
            true => (
                vector(&both, ffn_dim, Every { first: 0, step: 2 })?,
                vector(&both, ffn_dim, Every { first: 1, step: 2 })?,
            ),
            false => (
                vector(&name("ffn_gate"), ffn_dim, Every::ONE)?,
                vector(&name("ffn_up"), ffn_dim, Every::ONE)?,
            ),
        };
        let down = vector(&name("ffn_down"), model_dim, Every::ONE)?;
        Ok(Some(ExpertBiases { gate, up, down }))
    }

    /// The expert of every row in block `i`.
    fn shared_expert(
        &mut self,
        i: usize,
        ffn_dim: usize,
    ) -> Result<SharedExpert<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        let name = |part: &str| format!("blk.{i}.{part}_shexp");
        let gate = name("ffn_gate_inp");
        let names = [name("ffn_gate"), name("ffn_up")];
        let [of_gate, of_up] = self.gate_and_up(&names, ffn_dim, dim)?;
        Ok(SharedExpert {
            network: Dense {
                gate: of_gate,
                up: of_up,
                sub_norm: None,
                down: self.projection(&name("ffn_down"), Rows::all(dim), ffn_dim)?,
            },
            gate: match self.find(&format!("{gate}.weight")) {
                Some(entry) => Some(self.row(&gate, entry, dim)?),
                None => None,
            },
        })
    }

    /// A linear layer of one row, which may be stored as a list.
    fn row(
        &mut self,
        name: &str,
        entry: &TensorEntry,
        k: usize,
    ) -> Result<Projection<LinearId, VectorId>, PlanError> {
        if entry.shape.len() == 1 {
            check_shape(entry, &[k])?;
            expect_whole_blocks(entry, k)?;
            let (part, recipe) = self.rows_of(name, entry, Rows::all(1), k)?;
            return Ok(Projection {
                input_norm: None,
                weight: LinearId(self.push(vec![part], Recipe::Linear(recipe))),
                scale: 1.0,
                bias: None,
            });
        }
        self.projection(name, Rows::all(1), k)
    }

    /// A matrix `[n, k]` of one expert: a tensor of its own, or a part of one that has those of all.
    fn expert(
        &mut self,
        name: &str,
        expert: usize,
        n_experts: usize,
        [n, k]: [usize; 2],
    ) -> Result<LinearId, PlanError> {
        if self.has_input_rows()
            && let Some(id) = self.expert_of_input_rows(name, expert, n_experts, [n, k])?
        {
            return Ok(id);
        }
        let stacked_name = format!("{name}_exps.weight");
        // Gates and ups of all experts may be in one tensor, each expert's gate first.
        let both = match name.rsplit_once('.') {
            Some((block, "ffn_gate")) => Some((block, 0)),
            Some((block, "ffn_up")) => Some((block, n)),
            _ => None,
        };
        let both = both.and_then(|(block, first)| {
            let entry = self.find(&format!("{block}.ffn_gate_up_exps.weight"))?;
            Some((entry, 2 * n, first))
        });
        let (entry, of_each, first) = match (both, self.find(&stacked_name)) {
            (Some(both), _) => both,
            (None, Some(entry)) => (entry, n, 0),
            (None, None) => return self.matrix(&format!("{name}.{expert}"), Rows::all(n), k),
        };
        check_shape(entry, &[n_experts, of_each, k])?;
        expect_whole_blocks(entry, k)?;
        let rows = Rows {
            first: expert * of_each + first,
            n,
            stored: n_experts * of_each,
        };
        let (part, recipe) = self.rows_of(name, entry, rows, k)?;
        Ok(LinearId(self.push(vec![part], Recipe::Linear(recipe))))
    }

    /// Whether tensors with the matrices of all experts are those of gpt-oss's checkpoints.
    fn has_input_rows(&self) -> bool {
        let is_so = |mixture: Mixture| mixture.hf_input_rows;
        self.model_type.is_some() && self.config.family.mixture.is_some_and(is_so)
    }

    /// The same of a tensor whose rows are inputs, with gates and ups in turn among the columns; or of one of MXFP4, whose
    /// rows are outputs, gates and ups in turn. `None` if there is neither.
    fn expert_of_input_rows(
        &mut self,
        name: &str,
        expert: usize,
        n_experts: usize,
        [n, k]: [usize; 2],
    ) -> Result<Option<LinearId>, PlanError> {
        let in_turn = |block: &str, first| {
            (
                format!("{block}.ffn_gate_up_exps"),
                Every { first, step: 2 },
            )
        };
        let (stacked, every) = match name.rsplit_once('.') {
            Some((block, "ffn_gate")) => in_turn(block, 0),
            Some((block, "ffn_up")) => in_turn(block, 1),
            _ => (format!("{name}_exps"), Every::ONE),
        };
        let n_rows = n * every.step;
        if let Some(entry) = self.find(&format!("{stacked}.weight")) {
            check_shape(entry, &[n_experts, k, n_rows])?;
            expect_floats(entry, "floats are needed where rows of experts are inputs")?;
            let rows = Rows {
                first: expert * k,
                n: k,
                stored: n_experts * k,
            };
            let (part, recipe) = self.rows_of(name, entry, rows, n_rows)?;
            let recipe = LinearRecipe {
                n,
                k,
                n_stored: n,
                transposed: true,
                every,
                ..recipe
            };
            return Ok(Some(LinearId(
                self.push(vec![part], Recipe::Linear(recipe)),
            )));
        }
        if self.find(&format!("{stacked}.blocks")).is_none() {
            return Ok(None);
        }
        let blocks = k / DType::MXFP4.block_len();
        let mut parts = Vec::with_capacity(2);
        for (end, shape) in [
            (
                "blocks",
                vec![n_experts, n_rows, blocks, DType::MXFP4.block_len() / 2],
            ),
            ("scales", vec![n_experts, n_rows, blocks]),
        ] {
            let entry = self.require(&format!("{stacked}.{end}"), &shape)?;
            if entry.dtype != DType::U8 {
                return Err(PlanError::TensorType {
                    name: entry.name_in_file().to_owned(),
                    expected: "bytes are needed where codes or scales of MXFP4 are by themselves",
                    found: entry.dtype,
                });
            }
            let len = shape[1..].iter().product::<usize>() as u64;
            parts.push(TensorRequest {
                offset: entry.offset + expert as u64 * len,
                len,
                ..whole(entry)
            });
        }
        let recipe = LinearRecipe {
            n,
            k,
            first_row: 0,
            n_stored: n,
            stored: Stored::Blocks(DType::MXFP4),
            scale: None,
            n_runs: 1,
            precise: self.config.is_sensitive(),
            rotation: None,
            transposed: false,
            every,
            split_scales: true,
        };
        Ok(Some(LinearId(self.push(parts, Recipe::Linear(recipe)))))
    }

    /// A tensor by its full name; from now on it counts as used.
    fn find(&mut self, name: &str) -> Option<&'a TensorEntry> {
        let entry = self.catalog.get(name)?;
        self.used.insert(&entry.name);
        Some(entry)
    }

    fn missing(&self, name: &str, expected: &[usize]) -> PlanError {
        PlanError::MissingTensor {
            name: spelled(name, self.model_type),
            expected: expected.to_vec(),
        }
    }

    fn require(&mut self, name: &str, shape: &[usize]) -> Result<&'a TensorEntry, PlanError> {
        let Some(entry) = self.find(name) else {
            return Err(self.missing(name, shape));
        };
        check_shape(entry, shape)?;
        Ok(entry)
    }

    fn push(&mut self, parts: Vec<TensorRequest>, recipe: Recipe) -> usize {
        self.specs.push(Spec { parts, recipe });
        self.specs.len() - 1
    }

    fn vector_recipe(
        &mut self,
        name: &str,
        len: usize,
        transform: Transform,
    ) -> Result<(Vec<TensorRequest>, VectorRecipe), PlanError> {
        self.vector_of_shape(name, &[len], transform)
    }

    fn vector_of_shape(
        &mut self,
        name: &str,
        shape: &[usize],
        transform: Transform,
    ) -> Result<(Vec<TensorRequest>, VectorRecipe), PlanError> {
        let entry = self.require(name, shape)?;
        expect_floats(entry, "floats are needed")?;
        let recipe = VectorRecipe {
            dtype: entry.dtype,
            len: shape.iter().product(),
            transform,
            every: Every::ONE,
        };
        Ok((vec![whole(entry)], recipe))
    }

    fn host_vector(&mut self, name: &str, len: usize) -> Result<VectorId, PlanError> {
        let (parts, recipe) = self.vector_recipe(name, len, Transform::None)?;
        Ok(VectorId(self.push(parts, Recipe::HostVector(recipe))))
    }

    fn vector(
        &mut self,
        name: &str,
        len: usize,
        transform: Transform,
    ) -> Result<VectorId, PlanError> {
        let (parts, recipe) = self.vector_recipe(name, len, transform)?;
        Ok(VectorId(self.push(parts, Recipe::Vector(recipe))))
    }

    /// Row `index` of a tensor whose rows have `len` floats each.
    fn row_vector(
        &mut self,
        entry: &TensorEntry,
        index: usize,
        len: usize,
    ) -> Result<VectorId, PlanError> {
        expect_floats(entry, "floats are needed")?;
        let size = entry.dtype.block_bytes() as u64 * len as u64;
        let part = TensorRequest {
            offset: entry.offset + index as u64 * size,
            len: size,
            ..whole(entry)
        };
        let recipe = VectorRecipe {
            dtype: entry.dtype,
            len,
            transform: Transform::None,
            every: Every::ONE,
        };
        Ok(VectorId(self.push(vec![part], Recipe::Vector(recipe))))
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<VectorId, PlanError> {
        // Falcon-H1's files spell one so.
        let stored = match self.catalog.get(name) {
            Some(_) if name.ends_with(".ffn_norm") => name.to_owned(),
            _ => format!("{name}.weight"),
        };
        self.vector(&stored, len, self.norms)
    }

    /// A norm of the residual stream, with a bias in families that have those.
    fn stream_norm(&mut self, name: &str) -> Result<Norm<VectorId>, PlanError> {
        let len = self.config.model_dim;
        let bias = format!("{name}.bias");
        Ok(Norm {
            weight: self.norm(name, len)?,
            bias: match self.config.family.has_layer_norms() {
                true => Some(self.vector(&bias, len, Transform::None)?),
                false => None,
            },
        })
    }

    fn optional_norm(
        &mut self,
        name: &str,
        len: usize,
        required: bool,
    ) -> Result<Option<VectorId>, PlanError> {
        if required || self.find(&format!("{name}.weight")).is_some() {
            self.norm(name, len).map(Some)
        } else {
            Ok(None)
        }
    }

    /// A linear layer with its bias and its own norm, where the file has them.
    fn projection(
        &mut self,
        name: &str,
        rows: Rows,
        k: usize,
    ) -> Result<Projection<LinearId, VectorId>, PlanError> {
        let norm_name = format!("{name}_norm_in.weight");
        let norm = self.find(&norm_name);
        let input_norm = match norm {
            None => None,
            // Without an offset in every family: this norm belongs to the layer, not to the model.
            Some(_) => Some(self.vector(&norm_name, k, Transform::None)?),
        };
        let weight = self.matrix(name, rows, k)?;
        // Checkpoints of BitNet's embedding models have nothing else that says so.
        let is_bit_linear = matches!(self.bit_linears, BitLinears::None)
            && norm.is_some_and(|norm| norm.name_in_file().ends_with("_proj.norm.weight"));
        if let Recipe::Linear(recipe) = &mut self.specs[weight.0].recipe
            && let Stored::Blocks(dtype) = recipe.stored
            && is_bit_linear
            && is_float(dtype)
        {
            recipe.stored = Stored::Masters(dtype);
        }
        let bias_name = format!("{name}.bias");
        let bias = match self.find(&bias_name) {
            None => None,
            Some(_) => {
                let (mut parts, mut recipe) =
                    self.vector_recipe(&bias_name, rows.stored, Transform::None)?;
                let size = recipe.dtype.block_bytes() as u64;
                parts[0].offset += rows.first as u64 * size;
                parts[0].len = rows.n as u64 * size;
                recipe.len = rows.n;
                Some(VectorId(self.push(parts, Recipe::Vector(recipe))))
            }
        };
        Ok(Projection {
            input_norm,
            weight,
            scale: 1.0,
            bias,
        })
    }

    fn matrix(&mut self, name: &str, rows: Rows, k: usize) -> Result<LinearId, PlanError> {
        let weight_name = format!("{name}.weight");
        let shape = [rows.stored, k];
        let Some(entry) = self.find(&weight_name) else {
            return Err(self.missing(&weight_name, &shape));
        };
        let rotation = self.rotation(entry, k)?;
        let mut parts = vec![whole(entry)];
        let mut recipe = LinearRecipe {
            n: rows.n,
            k,
            first_row: rows.first,
            n_stored: rows.stored,
            stored: Stored::Packed,
            scale: None,
            n_runs: 1,
            precise: self.config.is_sensitive(),
            rotation,
            transposed: false,
            every: Every::ONE,
            split_scales: false,
        };
        if entry.dtype == DType::U8 {
            check_shape(entry, &[rows.stored.div_ceil(4), k])?;
            let (scale, dtype) = self.scale(&format!("{name}.weight_scale"))?;
            parts.push(scale);
            recipe.scale = Some(ScaleRecipe {
                dtype,
                divides: self.bit_linears.divides(),
            });
            return Ok(LinearId(self.push(parts, Recipe::Linear(recipe))));
        }
        check_shape(entry, &shape)?;
        if entry.dtype == DType::I2_S {
            let trailer = DType::I2_S.trailer_bytes() as u64;
            let codes = entry.len - trailer;
            parts[0].len = codes;
            parts.push(TensorRequest {
                offset: entry.offset + codes,
                len: 4,
                ..parts[0].clone()
            });
            recipe.stored = Stored::I2s(self.options.i2s_layout);
            recipe.scale = Some(ScaleRecipe {
                dtype: DType::F32,
                divides: false,
            });
            return Ok(LinearId(self.push(parts, Recipe::Linear(recipe))));
        }
        if !k.is_multiple_of(entry.dtype.block_len()) {
            return Err(PlanError::TensorShape {
                name: entry.name_in_file().to_owned(),
                expected: vec![rows.stored, k.next_multiple_of(entry.dtype.block_len())],
                found: entry.shape.clone(),
            });
        }
        (parts[0], recipe) = self.rows_of(name, entry, rows, k)?;
        // Some files store the scale of ternary floats in a tensor of its own: 1bitLLM's in GGUF, and Hugging
        // Face's with codes that aren't packed.
        for (scale_name, divides) in [
            (format!("{name}.scale"), false),
            (format!("{name}.weight_scale"), self.bit_linears.divides()),
        ] {
            if self.find(&scale_name).is_some() {
                let (scale, dtype) = self.scale(&scale_name)?;
                parts.push(scale);
                recipe.stored = Stored::BitLinear(entry.dtype);
                recipe.scale = Some(ScaleRecipe { dtype, divides });
                break;
            }
        }
        Ok(LinearId(self.push(parts, Recipe::Linear(recipe))))
    }

    /// What the rows of `entry`, of `k` elements, were rotated by.
    fn rotation(&mut self, entry: &TensorEntry, k: usize) -> Result<Option<usize>, PlanError> {
        let Some(hadamard) = &self.config.hadamard else {
            return Ok(None);
        };
        if !hadamard.is_rotated(&entry.name) {
            return Ok(None);
        }
        if matches!(entry.dtype, DType::U8 | DType::I2_S) {
            return Err(PlanError::TensorType {
                name: entry.name_in_file().to_owned(),
                expected: "blocks are needed where a matrix is rotated",
                found: entry.dtype,
            });
        }
        let Some(signs) = hadamard.signs(k) else {
            let expected = format!("one of {k}, for tensor `{}`", entry.name_in_file());
            return Err(PlanError::config(
                "prism.hadamard.sign_widths",
                expected,
                "none",
            ));
        };
        // The engine's values are in the order of the file, and the columns of this matrix may not be.
        let regroup = self.config.delta.filter(|delta| {
            entry.name.ends_with(".ssm_out.weight")
                && hadamard.has_grouped_values()
                && delta.order == HeadOrder::Tiled
        });
        let regroup = regroup.map(|delta| Regroup {
            n_groups: delta.n_key_heads,
            n_each: delta.n_value_heads / delta.n_key_heads,
            head_dim: delta.value_dim,
        });
        let rotation = Rotation::new(hadamard.block_size(), signs, regroup)
            .map_err(|error| PlanError::config(ROTATED, "rows of whole runs", error))?;
        let known = self.rotations.iter().position(|known| **known == rotation);
        Ok(Some(known.unwrap_or_else(|| {
            self.rotations.push(Arc::new(rotation));
            self.rotations.len() - 1
        })))
    }

    /// The bytes of `rows` of the layer `name`, which `entry` has as whole blocks, and what becomes of them.
    fn rows_of(
        &mut self,
        name: &str,
        entry: &TensorEntry,
        rows: Rows,
        k: usize,
    ) -> Result<(TensorRequest, LinearRecipe), PlanError> {
        let rotation = self.rotation(entry, k)?;
        let row_bytes = (k / entry.dtype.block_len() * entry.dtype.block_bytes()) as u64;
        let part = TensorRequest {
            offset: entry.offset + rows.first as u64 * row_bytes,
            len: rows.n as u64 * row_bytes,
            ..whole(entry)
        };
        let recipe = LinearRecipe {
            n: rows.n,
            k,
            first_row: 0,
            n_stored: rows.n,
            stored: self.bit_linears.stored(name, entry.dtype),
            scale: None,
            n_runs: 1,
            precise: self.config.is_sensitive(),
            rotation,
            transposed: false,
            every: Every::ONE,
            split_scales: false,
        };
        Ok((part, recipe))
    }

    /// A tensor of one number.
    fn scale(&mut self, name: &str) -> Result<(TensorRequest, DType), PlanError> {
        let Some(entry) = self.find(name) else {
            return Err(self.missing(name, &[1]));
        };
        if entry.shape.iter().product::<usize>() != 1 {
            return Err(PlanError::TensorShape {
                name: entry.name_in_file().to_owned(),
                expected: vec![1],
                found: entry.shape.clone(),
            });
        }
        expect_floats(entry, "a float is needed")?;
        Ok((whole(entry), entry.dtype))
    }
}

/// Fails if rows of `k` elements can't be taken from a tensor one by one.
fn expect_whole_blocks(entry: &TensorEntry, k: usize) -> Result<(), PlanError> {
    let dtype = entry.dtype;
    if matches!(dtype, DType::I2_S | DType::U8) || !k.is_multiple_of(dtype.block_len()) {
        return Err(PlanError::TensorType {
            name: entry.name_in_file().to_owned(),
            expected: "a type whose blocks fill rows is needed where several matrices are in one tensor",
            found: dtype,
        });
    }
    Ok(())
}

/// Fails unless a tensor has floats, which `expected` says the need of.
fn expect_floats(entry: &TensorEntry, expected: &'static str) -> Result<(), PlanError> {
    if is_float(entry.dtype) {
        return Ok(());
    }
    Err(PlanError::TensorType {
        name: entry.name_in_file().to_owned(),
        expected,
        found: entry.dtype,
    })
}

fn whole(entry: &TensorEntry) -> TensorRequest {
    TensorRequest {
        name: entry.name.clone(),
        renamed_from: entry.renamed_from.clone(),
        file: entry.file,
        offset: entry.offset,
        len: entry.len,
    }
}

fn check_shape(entry: &TensorEntry, expected: &[usize]) -> Result<(), PlanError> {
    if entry.shape == expected {
        Ok(())
    } else {
        Err(PlanError::TensorShape {
            name: entry.name_in_file().to_owned(),
            expected: expected.to_vec(),
            found: entry.shape.clone(),
        })
    }
}

/// Fails if a tensor has fewer bytes than its elements take, or its end overflows: catalogs may come from
/// anywhere, and all arithmetic on offsets relies on this check.
fn check_bytes(entry: &TensorEntry) -> Result<(), PlanError> {
    let dtype = entry.dtype;
    let n_elements = (entry.shape.iter()).try_fold(1_usize, |n, &dim| n.checked_mul(dim));
    let need = n_elements.and_then(|n| {
        let blocks = n.div_ceil(dtype.block_len()) as u64;
        let bytes = blocks.checked_mul(dtype.block_bytes() as u64)?;
        bytes.checked_add(dtype.trailer_bytes() as u64)
    });
    let ends = entry.offset.checked_add(entry.len).is_some();
    match need {
        Some(need) if need <= entry.len && ends => Ok(()),
        _ => Err(PlanError::TensorBytes {
            name: entry.name_in_file().to_owned(),
            expected: match need {
                Some(need) => format!("{need} bytes of {dtype}"),
                None => format!("bytes of {dtype} that can be counted"),
            },
            len: entry.len,
            offset: entry.offset,
        }),
    }
}
