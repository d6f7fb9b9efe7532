//! Finding each weight's tensors, and checking them.

use std::collections::HashSet;

use regex_lite::{Regex, RegexBuilder};
use sterna_format::gguf::Metadata;
use sterna_format::hf;
use sterna_format::names::linear_module;
use sterna_format::{DType, TensorCatalog, TensorEntry};
use sterna_kernels::experts::Gating;

use super::{
    LinearId, LinearRecipe, PlanOptions, Recipe, RopeFactors, ScaleRecipe, Spec, Stored,
    TensorRequest, VectorId, VectorRecipe, is_float, spelled,
};
use crate::config::{self, ExpertsConfig, ModelConfig};
use crate::error::PlanError;
use crate::family::{Family, QkNorms};
use crate::rope::RopeScaling;
use crate::weights::{
    Attention, Convolution, Dense, Experts, FeedForward, Layer, Mixer, Projection, Weights,
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

pub(super) struct Planner<'a> {
    config: &'a ModelConfig,
    catalog: &'a TensorCatalog,
    bit_linears: BitLinears,
    options: PlanOptions,
    /// `model_type` of a Hugging Face model, whose files have their own names and norm conventions.
    model_type: Option<&'a str>,
    /// Added to norm weights.
    norm_plus: f32,
    used: HashSet<&'a str>,
    specs: Vec<Spec>,
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
            norm_plus: match model_type {
                Some(_) if config.family.gemma => 1.0,
                _ => 0.0,
            },
            used: HashSet::new(),
            specs: Vec::new(),
        })
    }

    /// Every weight of the model. Where there is no separate output head and it `may_be_tied`, it is the
    /// embedding table.
    pub(super) fn weights(
        &mut self,
        may_be_tied: bool,
    ) -> Result<Weights<LinearId, VectorId>, PlanError> {
        let (n_vocab, model_dim) = (self.config.n_vocab, self.config.model_dim);
        let token_embd = self.matrix("token_embd", Rows::all(n_vocab), model_dim)?;
        let layers = (0..self.config.n_layers)
            .map(|i| self.layer(i))
            .collect::<Result<_, _>>()?;
        let output_norm = match self.find("output_norm.weight") {
            Some(_) => "output_norm",
            None => self.config.family.gguf_output_norm,
        };
        let output_norm = self.norm(output_norm, model_dim)?;
        let output = if may_be_tied && self.find("output.weight").is_none() {
            None
        } else {
            Some(self.projection("output", Rows::all(n_vocab), model_dim)?)
        };
        Ok(Weights {
            token_embd,
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
        let (q_dim, kv_dim) = (self.config.q_dim(), self.config.kv_dim());
        for (i, layer) in weights.layers.iter().enumerate() {
            let Some(Attention { q, k, v, .. }) = layer.attention() else {
                continue;
            };
            for (part, projection, len) in [
                ("attn_q", q, q_dim),
                ("attn_k", k, kv_dim),
                ("attn_v", v, kv_dim),
            ] {
                if projection.bias.is_none() {
                    return Err(self.missing(&format!("blk.{i}.{part}.bias"), &[len]));
                }
            }
        }
        Ok(())
    }

    /// The specs, once every tensor has been used.
    pub(super) fn finish(self) -> Result<Vec<Spec>, PlanError> {
        let mut unused = self
            .catalog
            .iter()
            .filter(|t| !self.used.contains(t.name.as_str()))
            .map(TensorEntry::name_in_file);
        match unused.next() {
            None => Ok(self.specs),
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

    fn layer(&mut self, i: usize) -> Result<Layer<LinearId, VectorId>, PlanError> {
        let model_dim = self.config.model_dim;
        let parts = self.config.family.parts;
        let name = |part: &str| format!("blk.{i}.{part}");

        let attn_norm = self.norm(&name("attn_norm"), model_dim)?;
        let mixer = match self.config.layers[i].is_convolution {
            true => Mixer::Convolution(self.convolution(i)?),
            false => Mixer::Attention(self.attention(i)?),
        };
        let post_attn_norm =
            self.optional_norm(&name("post_attention_norm"), model_dim, parts.post_norms)?;

        let ffn_norm = self.norm(&name("ffn_norm"), model_dim)?;
        let ffn = match (&self.config.experts, self.config.layers[i].has_experts) {
            (Some(experts), true) => FeedForward::Experts(self.experts(i, experts)?),
            _ => FeedForward::Dense(self.dense(i)?),
        };
        let post_ffn_norm =
            self.optional_norm(&name("post_ffw_norm"), model_dim, parts.post_norms)?;
        Ok(Layer {
            attn_norm,
            mixer,
            post_attn_norm,
            ffn_norm,
            ffn,
            post_ffn_norm,
        })
    }

    /// The attention of block `i`.
    fn attention(&mut self, i: usize) -> Result<Attention<LinearId, VectorId>, PlanError> {
        let ModelConfig {
            model_dim,
            head_dim,
            ..
        } = *self.config;
        let (q_dim, kv_dim) = (self.config.q_dim(), self.config.kv_dim());
        let parts = self.config.family.parts;
        let name = |part: &str| format!("blk.{i}.{part}");
        let stored = q_dim + 2 * kv_dim;
        let fused = self.find(&name("attn_qkv.weight")).is_some();
        let mut qkv = |part: &str, first, n| {
            if fused {
                self.projection(&name("attn_qkv"), Rows { first, n, stored }, model_dim)
            } else {
                self.projection(&name(part), Rows::all(n), model_dim)
            }
        };
        let q = qkv("attn_q", 0, q_dim)?;
        let k = qkv("attn_k", q_dim, kv_dim)?;
        let v = qkv("attn_v", q_dim + kv_dim, kv_dim)?;
        for (part, projection, len) in [
            ("attn_q", &q, q_dim),
            ("attn_k", &k, kv_dim),
            ("attn_v", &v, kv_dim),
        ] {
            if parts.qkv_biases && projection.bias.is_none() {
                return Err(self.missing(&name(&format!("{part}.bias")), &[len]));
            }
        }
        let (q_norm_dim, k_norm_dim) = match parts.qk_norms {
            QkNorms::Whole => (q_dim, kv_dim),
            QkNorms::None | QkNorms::Heads => (head_dim, head_dim),
        };
        let normed = parts.qk_norms != QkNorms::None;
        let q_norm = self.optional_norm(&name("attn_q_norm"), q_norm_dim, normed)?;
        let k_norm = self.optional_norm(&name("attn_k_norm"), k_norm_dim, normed)?;
        let sub_norm = self.optional_norm(&name("attn_sub_norm"), q_dim, parts.sub_norms)?;
        let o = self.projection(&name("attn_output"), Rows::all(model_dim), q_dim)?;
        Ok(Attention {
            q,
            k,
            v,
            q_norm,
            k_norm,
            sub_norm,
            o,
        })
    }

    /// The short convolution of block `i`.
    fn convolution(&mut self, i: usize) -> Result<Convolution<LinearId, VectorId>, PlanError> {
        let dim = self.config.model_dim;
        let n_taps = self.config.conv_taps.unwrap_or(0);
        let name = |part: &str| format!("blk.{i}.shortconv.{part}");
        let input = self.projection(&name("in_proj"), Rows::all(3 * dim), dim)?;
        let taps = name("conv.weight");
        // Checkpoints have a dimension of one between the two.
        let shape = match self.catalog.get(&taps).map(|entry| entry.shape.len()) {
            Some(3) => vec![dim, 1, n_taps],
            _ => vec![dim, n_taps],
        };
        let (parts, recipe) = self.vector_of_shape(&taps, &shape, 0.0)?;
        let taps = VectorId(self.push(parts, Recipe::Vector(recipe)));
        let output = self.projection(&name("out_proj"), Rows::all(dim), dim)?;
        Ok(Convolution {
            input,
            taps,
            output,
        })
    }

    /// The feed-forward network of block `i`.
    fn dense(&mut self, i: usize) -> Result<Dense<LinearId, VectorId>, PlanError> {
        let ModelConfig {
            model_dim, ffn_dim, ..
        } = *self.config;
        let parts = self.config.family.parts;
        let name = |part: &str| format!("blk.{i}.{part}");
        // Without a separate gate, the up projection contains both, the gate first.
        let (gate, up) = if self.find(&name("ffn_gate.weight")).is_some() {
            (
                self.projection(&name("ffn_gate"), Rows::all(ffn_dim), model_dim)?,
                self.projection(&name("ffn_up"), Rows::all(ffn_dim), model_dim)?,
            )
        } else {
            let half = |first| Rows {
                first,
                n: ffn_dim,
                stored: 2 * ffn_dim,
            };
            (
                self.projection(&name("ffn_up"), half(0), model_dim)?,
                self.projection(&name("ffn_up"), half(ffn_dim), model_dim)?,
            )
        };
        let sub_norm = self.optional_norm(&name("ffn_sub_norm"), ffn_dim, parts.sub_norms)?;
        let down = self.projection(&name("ffn_down"), Rows::all(model_dim), ffn_dim)?;
        Ok(Dense {
            gate,
            up,
            sub_norm,
            down,
        })
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
            true => Some(self.vector(&bias, n_experts, 0.0)?),
            false => None,
        };
        let mut all = Experts {
            router,
            bias,
            gate: Vec::with_capacity(n_experts),
            up: Vec::with_capacity(n_experts),
            down: Vec::with_capacity(n_experts),
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

    /// A matrix `[n, k]` of one expert: a tensor of its own, or a part of one that has those of all.
    fn expert(
        &mut self,
        name: &str,
        expert: usize,
        n_experts: usize,
        [n, k]: [usize; 2],
    ) -> Result<LinearId, PlanError> {
        let stacked_name = format!("{name}_exps.weight");
        let Some(entry) = self.find(&stacked_name) else {
            return self.matrix(&format!("{name}.{expert}"), Rows::all(n), k);
        };
        check_shape(entry, &[n_experts, n, k])?;
        let dtype = entry.dtype;
        if matches!(dtype, DType::I2_S | DType::U8) || !k.is_multiple_of(dtype.block_len()) {
            return Err(PlanError::TensorType {
                name: entry.name_in_file().to_owned(),
                expected: "a type whose blocks fill rows is needed for stacked experts",
                found: dtype,
            });
        }
        let rows = Rows {
            first: expert * n,
            n,
            stored: n_experts * n,
        };
        let (part, recipe) = self.rows_of(name, entry, rows, k);
        Ok(LinearId(self.push(vec![part], Recipe::Linear(recipe))))
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
        plus: f32,
    ) -> Result<(Vec<TensorRequest>, VectorRecipe), PlanError> {
        self.vector_of_shape(name, &[len], plus)
    }

    fn vector_of_shape(
        &mut self,
        name: &str,
        shape: &[usize],
        plus: f32,
    ) -> Result<(Vec<TensorRequest>, VectorRecipe), PlanError> {
        let entry = self.require(name, shape)?;
        if !is_float(entry.dtype) {
            return Err(PlanError::TensorType {
                name: entry.name_in_file().to_owned(),
                expected: "floats are needed",
                found: entry.dtype,
            });
        }
        let recipe = VectorRecipe {
            dtype: entry.dtype,
            len: shape.iter().product(),
            plus,
        };
        Ok((vec![whole(entry)], recipe))
    }

    fn host_vector(&mut self, name: &str, len: usize) -> Result<VectorId, PlanError> {
        let (parts, recipe) = self.vector_recipe(name, len, 0.0)?;
        Ok(VectorId(self.push(parts, Recipe::HostVector(recipe))))
    }

    fn vector(&mut self, name: &str, len: usize, plus: f32) -> Result<VectorId, PlanError> {
        let (parts, recipe) = self.vector_recipe(name, len, plus)?;
        Ok(VectorId(self.push(parts, Recipe::Vector(recipe))))
    }

    fn norm(&mut self, name: &str, len: usize) -> Result<VectorId, PlanError> {
        self.vector(&format!("{name}.weight"), len, self.norm_plus)
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
        let input_norm = match self.find(&norm_name) {
            None => None,
            // Without an offset in every family: this norm belongs to the layer, not to the model.
            Some(_) => Some(self.vector(&norm_name, k, 0.0)?),
        };
        let weight = self.matrix(name, rows, k)?;
        let bias_name = format!("{name}.bias");
        let bias = match self.find(&bias_name) {
            None => None,
            Some(_) => {
                let (mut parts, mut recipe) = self.vector_recipe(&bias_name, rows.stored, 0.0)?;
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
            bias,
        })
    }

    fn matrix(&mut self, name: &str, rows: Rows, k: usize) -> Result<LinearId, PlanError> {
        let weight_name = format!("{name}.weight");
        let shape = [rows.stored, k];
        let Some(entry) = self.find(&weight_name) else {
            return Err(self.missing(&weight_name, &shape));
        };
        let mut parts = vec![whole(entry)];
        let mut recipe = LinearRecipe {
            n: rows.n,
            k,
            first_row: rows.first,
            n_stored: rows.stored,
            stored: Stored::Packed,
            scale: None,
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
        (parts[0], recipe) = self.rows_of(name, entry, rows, k);
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

    /// The bytes of `rows` of the layer `name`, which `entry` has as whole blocks, and what becomes of them.
    fn rows_of(
        &self,
        name: &str,
        entry: &TensorEntry,
        rows: Rows,
        k: usize,
    ) -> (TensorRequest, LinearRecipe) {
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
        };
        (part, recipe)
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
        if !is_float(entry.dtype) {
            return Err(PlanError::TensorType {
                name: entry.name_in_file().to_owned(),
                expected: "a float is needed",
                found: entry.dtype,
            });
        }
        Ok((whole(entry), entry.dtype))
    }
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
