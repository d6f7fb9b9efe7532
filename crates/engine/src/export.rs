//! From a plan to the tensors of a Hugging Face checkpoint or a GGUF file, whatever format the model was
//! loaded from.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};
use sterna_format::DType;
use sterna_format::gguf::Metadata;
use sterna_format::names::hugging_face;
use sterna_kernels::delta::{DeltaShape, HeadOrder};
use sterna_kernels::quant::ternary::{BLOCK, BLOCK_BYTES, Layout, row_bytes, unpack_row};
use sterna_kernels::rope::RopeLayout;
use sterna_kernels::rwkv::{Generation, RwkvShape};
use sterna_kernels::{Exec, repack};

use crate::backend::{TernaryPacking, WeightData};
use crate::config::ModelConfig;
use crate::config::gguf::INPUT_NORM_EPS;
use crate::config::to_gguf::{DIVISORS, GgufConfig, LONG, SHORT};
use crate::error::PlanError;
use crate::load::{LoadError, expect_wanted, linear, vector};
use crate::plan::{
    ENCODER_ATTN_NORM, LinearId, LinearRecipe, ModelPlan, Recipe, RopeFactors, Stored,
    TensorRequest, Values, VectorId, fused_mixes, is_float,
};
use crate::weights::{
    Attention, ChannelMix, Convolution, DeltaNet, ExpertBiases, Experts, FeedForward,
    LatentAttention, LayerInput, Mamba, Mixer, Norm, Plain, Positions, Projection, Recurrence,
    SharedExpert, Shifted, Ssm, TimeMix,
};

/// Exports the weights of a model one after another, in the order of execution, under the names and
/// conventions of a Hugging Face checkpoint or of a GGUF file. Fused projections are split, or joined where
/// GGUF stores them so; ternary weights become trits with one scale in whatever form they were stored.
///
/// It is fed as [`Loader`](crate::Loader) is. One tensor at a time is in memory.
pub struct Exporter {
    plan: ModelPlan,
    exec: Arc<Exec>,
    /// The target conventions for names and values.
    to: Values,
    /// The configuration that determines the row order of a GGUF file.
    in_gguf: ModelConfig,
    /// What each weight of the plan becomes; `None` for what isn't a tensor of a checkpoint.
    targets: Vec<Option<Target>>,
    /// Weights of the plan, in the order in which they are exported: parts of one tensor are adjacent.
    order: Vec<usize>,
    parts: Vec<Bytes>,
    /// Index in `order`.
    next: usize,
    /// The first rows of a tensor that is assembled from several weights.
    begun: Option<Exported>,
    factors: Vec<(VectorId, Vec<f32>)>,
    warnings: Vec<String>,
}

/// A tensor of a Hugging Face checkpoint or of a GGUF file.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// Its name, such as `model.layers.0.mlp.up_proj.weight` or `blk.0.ffn_up.weight`.
    pub name: String,
    /// Row-major, outermost first: a linear weight is `[n, k]`.
    pub shape: Vec<usize>,
    /// Whether its values may be stored with fewer bits: those of matrices may, but for routers and pairs of low rank,
    /// which are small and which much depends on.
    pub may_round: bool,
    /// Its values.
    pub data: ExportedData,
}

/// The values of an [`Exported`] tensor.
#[derive(Debug, Clone, PartialEq)]
pub enum ExportedData {
    /// Rows of blocks, as they were stored.
    Blocks {
        /// Type of the blocks.
        dtype: DType,
        /// The rows.
        bytes: Bytes,
    },
    /// Trits that share one scale.
    Ternary {
        /// Rows in the layout of [`sterna_kernels::quant::ternary`].
        codes: Bytes,
        /// The value of a code of +1.
        scale: f32,
    },
}

/// What a GGUF file of a model says besides the tensors of an [`Exporter`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct GgufHead {
    /// `general.architecture`, and the architecture's own keys.
    pub metadata: Metadata,
    /// Tensors that belong to the configuration: divisors of rotary frequencies.
    pub tensors: Vec<Exported>,
    /// Where llama.cpp interprets the file differently from this engine.
    pub remarks: Vec<String>,
}

impl ModelPlan {
    /// What a GGUF file of this model says.
    ///
    /// Errors: [`PlanError::Inexpressible`] if GGUF can't express the model.
    pub fn to_gguf(&self) -> Result<GgufHead, PlanError> {
        let ModelConfig {
            family,
            input_norm_eps,
            ..
        } = self.config;
        let in_layers = self.weights.layers.iter().flat_map(|l| l.projections());
        for projection in in_layers.chain(&self.weights.output) {
            let spec = &self.specs[projection.weight.0];
            if projection.input_norm.is_some() && input_norm_eps != INPUT_NORM_EPS {
                let found = format!("that its norm has an epsilon of {input_norm_eps}");
                return Err(PlanError::inexpressible(
                    spec.parts[0].name_in_file(),
                    "GGUF",
                    found,
                ));
            }
            // A reader of such a file assumes that every matrix is ternary.
            if let Recipe::Linear(recipe) = &spec.recipe
                && let Stored::Blocks(dtype) = recipe.stored
                && family.bit_linear
                && spec.parts[0].name.starts_with("blk.")
                && is_float(dtype)
            {
                let found = format!("that it isn't ternary in a {} model", family.name);
                let name = spec.parts[0].name_in_file();
                return Err(PlanError::inexpressible(name, "GGUF", found));
            }
        }
        let GgufConfig {
            metadata,
            tensors,
            mut remarks,
        } = self.config.to_gguf(self.rope_factors)?;
        if self.weights.output.is_some() && (family.gemma || family.bit_linear) {
            let architecture = metadata.architecture()?.unwrap_or_default();
            remarks.push(format!(
                "output.weight: llama.cpp may not support a separate head in a {architecture} model"
            ));
        }
        let tensors = tensors.into_iter().map(|(name, values)| Exported {
            name: name.to_owned(),
            shape: vec![values.len()],
            may_round: false,
            data: f32s(&values),
        });
        Ok(GgufHead {
            metadata,
            tensors: tensors.chain(self.unused_in_first_layer()).collect(),
            remarks,
        })
    }

    /// What llama.cpp expects in the first layer of RWKV's seventh generation, and doesn't compute with.
    fn unused_in_first_layer(&self) -> Vec<Exported> {
        let Some(rwkv) = &self.config.rwkv else {
            return Vec::new();
        };
        if rwkv.shape.generation != Generation::V7 {
            return Vec::new();
        }
        let (dim, rank) = (self.config.model_dim, rwkv.ranks.rate);
        let shapes = [vec![dim], vec![rank, dim], vec![dim, rank]];
        let tensors = shapes.into_iter().enumerate().map(|(i, shape)| Exported {
            name: format!("blk.0.time_mix_v{i}.weight"),
            data: f32s(&vec![0.0; shape.iter().product()]),
            may_round: false,
            shape,
        });
        tensors.collect()
    }
}

/// The bytes of an I2_S tensor `[n, k]` with these trits: codes over the flattened tensor, the scale, 28
/// zeros. `None` if it isn't whole blocks of 128 elements.
///
/// `codes` are rows as [`ExportedData::Ternary`] has them.
pub fn i2_s(n: usize, k: usize, codes: &[u8], scale: f32) -> Option<Vec<u8>> {
    if !(n * k).is_multiple_of(BLOCK) {
        return None;
    }
    let mut out = Vec::with_capacity(n * k / 4 + DType::I2_S.trailer_bytes());
    if k.is_multiple_of(BLOCK) {
        out.extend_from_slice(codes);
    } else {
        // Rows are padded to whole blocks; the I2_S tensor isn't.
        let mut trits = vec![0i8; k];
        out.resize(n * k / 4, 0);
        for (i, row) in codes.chunks_exact(row_bytes(k)).enumerate() {
            unpack_row(row, &mut trits).expect("exported codes are trits");
            for (j, trit) in trits.iter().enumerate() {
                let (block, within) = ((i * k + j) / BLOCK, (i * k + j) % BLOCK);
                let shift = 6 - 2 * (within / BLOCK_BYTES);
                out[block * BLOCK_BYTES + within % BLOCK_BYTES] |= ((trit + 1) as u8) << shift;
            }
        }
    }
    out.extend_from_slice(&scale.to_le_bytes());
    out.resize(n * k / 4 + DType::I2_S.trailer_bytes(), 0);
    Some(out)
}

/// The tensor that a weight of the plan becomes.
#[derive(Debug, Clone)]
struct Target {
    name: String,
    order: Order,
    /// One has to be subtracted from every value.
    less_one: bool,
    /// The tensor is `[n_experts, n, k]`; this is the matrix of one expert.
    stacked: bool,
    /// Its values keep their bits.
    is_exact: bool,
    /// Its place among the parts of the tensor, where that isn't the order of execution.
    row: usize,
    /// The shape of values that are no list.
    shape: Option<Vec<usize>>,
}

/// Which order rows are in, where files of one kind differ from those of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Order {
    /// The same everywhere.
    Same,
    /// Those of rotated heads.
    Rotated,
    /// Some rows, and then those of value heads of a delta net, so many each.
    ValueHeads { first: usize, each: usize },
    /// Columns of value heads, so many each.
    ValueColumns { each: usize },
    /// Betas of all value heads and then alphas, of which GGUF files have those of one key head after another.
    BetaAlpha,
}

impl Target {
    /// The shape of what `recipe` makes a part of, if that is the only one.
    fn shape(&self, recipe: &Recipe) -> Vec<usize> {
        match (recipe, &self.shape) {
            (_, Some(shape)) => shape.clone(),
            (Recipe::Vector(recipe) | Recipe::HostVector(recipe), None) => vec![recipe.len],
            (Recipe::Linear(recipe), None) if self.stacked => vec![1, recipe.n, recipe.k],
            (Recipe::Linear(recipe), None) => vec![recipe.n, recipe.k],
        }
    }
}

/// The indices of `targets`, with parts of one tensor after one another.
fn order(targets: &[Option<Target>]) -> Vec<usize> {
    let mut first = HashMap::new();
    let mut order: Vec<usize> = (0..targets.len()).collect();
    order.sort_by_cached_key(|&i| match &targets[i] {
        Some(target) => (*first.entry(target.name.as_str()).or_insert(i), target.row),
        None => (i, 0),
    });
    order
}

impl Exporter {
    /// Exports the model of `plan` as a checkpoint, computing on `exec`.
    pub fn new(plan: ModelPlan, exec: Arc<Exec>) -> Exporter {
        Exporter::with_values(plan, exec, Values::HuggingFace)
    }

    /// Exports the tensors of a GGUF file, in addition to those of [`ModelPlan::to_gguf`].
    pub fn for_gguf(plan: ModelPlan, exec: Arc<Exec>) -> Exporter {
        Exporter::with_values(plan, exec, Values::Gguf)
    }

    fn with_values(plan: ModelPlan, exec: Arc<Exec>, to: Values) -> Exporter {
        let targets = targets(&plan, to);
        Exporter {
            order: order(&targets),
            targets,
            in_gguf: plan.config.in_gguf(),
            plan,
            exec,
            to,
            parts: Vec::new(),
            next: 0,
            begun: None,
            factors: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Whether the embedding table is also the output head.
    pub fn is_tied(&self) -> bool {
        self.plan.weights.output.is_none()
    }

    /// Names and shapes of the tensors to be exported, in order.
    pub fn tensors(&self) -> Vec<(&str, Vec<usize>)> {
        let mut tensors: Vec<(&str, Vec<usize>)> = Vec::new();
        for &id in &self.order[self.next..] {
            let Some(target @ Target { name, .. }) = &self.targets[id] else {
                continue;
            };
            let shape = target.shape(&self.plan.specs[id].recipe);
            match tensors.last_mut() {
                Some((last, rows)) if last == name => rows[0] += shape[0],
                _ => tensors.push((name, shape)),
            }
        }
        tensors
    }

    /// The range to feed next; `None` once everything has been exported.
    pub fn wanted(&self) -> Option<&TensorRequest> {
        let spec = &self.plan.specs[*self.order.get(self.next)?];
        Some(&spec.parts[self.parts.len()])
    }

    /// Feeds the bytes of the range named by [`Exporter::wanted`]; returns a tensor once its last range has
    /// been fed.
    ///
    /// Errors: [`LoadError`] names the tensor at fault.
    pub fn feed(&mut self, bytes: Bytes) -> Result<Option<Exported>, LoadError> {
        expect_wanted(self.wanted(), &bytes)?;
        self.parts.push(bytes);
        let id = self.order[self.next];
        let spec = &self.plan.specs[id];
        if self.parts.len() < spec.parts.len() {
            return Ok(None);
        }
        let parts = std::mem::take(&mut self.parts);
        self.next += 1;
        let target = self.targets[id].as_ref();
        let (shape, data) = match (&spec.recipe, target) {
            (Recipe::HostVector(recipe), None) => {
                let values = vector(recipe, &spec.parts[0], &parts[0])?;
                self.factors.push((VectorId(id), values));
                return Ok(None);
            }
            (Recipe::Vector(recipe) | Recipe::HostVector(recipe), Some(target)) => {
                let n_rows = target.shape(&spec.recipe).first().map_or(0, |&n| n);
                // Decoded for validation, even where the bytes are passed on.
                let values = vector(recipe, &spec.parts[0], &parts[0])?;
                let data = if self.to == Values::Gguf {
                    // The target stores norms and biases as floats, without the offset.
                    self.in_order(target, f32s(&values), n_rows)?
                } else if target.less_one {
                    let (data, exact) = less_one(&values);
                    if !exact {
                        self.warnings.push(format!(
                            "tensor `{}`: not all values are exact as 1 plus a float",
                            target.name
                        ));
                    }
                    data
                } else {
                    let stored = ExportedData::Blocks {
                        dtype: recipe.dtype,
                        bytes: recipe.every.of(&parts[0], recipe.dtype.block_bytes()),
                    };
                    self.in_order(target, stored, n_rows)?
                };
                (target.shape(&spec.recipe), data)
            }
            (Recipe::Linear(recipe), Some(target)) => {
                let data = self.matrix(recipe, &spec.parts, parts)?;
                let data = self.in_order(target, data, recipe.n)?;
                (target.shape(&spec.recipe), data)
            }
            (Recipe::Vector(_) | Recipe::Linear(_), None) => {
                unreachable!("only host vectors have no target")
            }
        };
        let name = target.map(|target| target.name.clone()).unwrap_or_default();
        let is_matrix = matches!(spec.recipe, Recipe::Linear(_));
        let mut tensor = Exported {
            name,
            shape,
            may_round: is_matrix && target.is_some_and(|target| !target.is_exact),
            data,
        };
        if let Some(begun) = self.begun.take() {
            tensor = begun.joined(tensor)?;
        }
        let next = (self.order.get(self.next)).and_then(|&id| self.targets[id].as_ref());
        if next.is_some_and(|next| next.name == tensor.name) {
            self.begun = Some(tensor);
            return Ok(None);
        }
        if let (Some(Order::BetaAlpha), Some(delta)) =
            (target.map(|target| target.order), &self.plan.config.delta)
        {
            let each = delta.n_value_heads / delta.n_key_heads;
            let n = tensor.shape[0];
            tensor.data = tensor.data.with_rows(n, |row| {
                let (of_alpha, head) = (row / delta.n_value_heads, row % delta.n_value_heads);
                (head / each * 2 + of_alpha) * each + head % each
            });
        }
        Ok(Some(tensor))
    }

    fn matrix(
        &self,
        recipe: &LinearRecipe,
        requests: &[TensorRequest],
        parts: Vec<Bytes>,
    ) -> Result<ExportedData, LoadError> {
        let LinearRecipe { n, k, .. } = *recipe;
        Ok(match linear(&self.exec, recipe, requests, parts)? {
            WeightData::Blocks { dtype, bytes, .. } => ExportedData::Blocks { dtype, bytes },
            WeightData::Ternary {
                mut codes,
                packing,
                scale,
            } => {
                if packing == TernaryPacking::Tq20 {
                    let blocks = Layout::Blocks(DType::TQ2_0);
                    codes = repack::repack(&self.exec, blocks, n, k, &codes, 0..n)
                        .map_err(|source| LoadError::Weights {
                            name: requests[0].name_in_file().to_owned(),
                            source,
                        })?
                        .into();
                }
                ExportedData::Ternary { codes, scale }
            }
        })
    }

    /// `data`, which are `n` rows as stored, in the order of exported tensors.
    ///
    /// Errors: [`PlanError::Inexpressible`] if columns are in blocks of several heads.
    fn in_order(
        &self,
        target: &Target,
        data: ExportedData,
        n: usize,
    ) -> Result<ExportedData, PlanError> {
        let delta = match &self.plan.config.delta {
            Some(delta) if self.to == Values::Gguf => {
                let to = self.plan.config.family.delta;
                Some(delta).filter(|delta| to.is_some_and(|to| to != delta.order))
            }
            _ => None,
        };
        let place = |delta: &DeltaShape, head: usize| {
            let each = delta.n_value_heads / delta.n_key_heads;
            match delta.order {
                HeadOrder::Grouped => head % each * delta.n_key_heads + head / each,
                HeadOrder::Tiled => head % delta.n_key_heads * each + head / delta.n_key_heads,
            }
        };
        Ok(match (target.order, delta) {
            (Order::Rotated, _) => {
                let layout = self.in_gguf.ropes[0].layout;
                if self.plan.values == self.to || layout != RopeLayout::Pairs {
                    return Ok(data);
                }
                let in_checkpoint: Vec<usize> =
                    (0..n).map(|row| self.in_gguf.checkpoint_row(row)).collect();
                match self.to {
                    Values::HuggingFace => data.with_rows(n, |row| in_checkpoint[row]),
                    Values::Gguf => {
                        let mut places = vec![0; n];
                        for (row, &of_checkpoint) in in_checkpoint.iter().enumerate() {
                            places[of_checkpoint] = row;
                        }
                        data.with_rows(n, |row| places[row])
                    }
                }
            }
            (Order::ValueHeads { first, each }, Some(delta)) => {
                data.with_rows(n, |row| match row.checked_sub(first) {
                    Some(row) => first + place(delta, row / each) * each + row % each,
                    None => row,
                })
            }
            (Order::ValueColumns { each }, Some(delta)) => {
                // Every run of columns is moved as if it were a row.
                let block_len = match &data {
                    ExportedData::Blocks { dtype, .. } => dtype.block_len(),
                    ExportedData::Ternary { .. } => BLOCK,
                };
                if !each.is_multiple_of(block_len) {
                    let found = format!("heads of {each} columns in blocks of {block_len}");
                    return Err(PlanError::inexpressible(&target.name, "GGUF", found));
                }
                let heads = delta.n_value_heads;
                data.with_rows(n * heads, |run| {
                    run / heads * heads + place(delta, run % heads)
                })
            }
            (Order::Same | Order::BetaAlpha, _) | (_, None) => data,
        })
    }

    /// What could not be exported exactly so far.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The `config.json` for the tensors, once all have been exported.
    ///
    /// Errors: [`LoadError::Incomplete`] if some haven't; [`PlanError::Inexpressible`] if it can't be expressed.
    pub fn config(&self) -> Result<Map<String, Value>, LoadError> {
        if let Some(want) = self.wanted() {
            return Err(LoadError::Incomplete {
                name: want.name_in_file().to_owned(),
            });
        }
        let mut config = self.plan.config.clone();
        if let Some(factors) = self.plan.rope_factors {
            let list = |id: VectorId| {
                let found = self.factors.iter().find(|(of, _)| of.0 == id.0);
                found.map(|(_, list)| list.clone()).unwrap_or_default()
            };
            config.ropes[0].scaling = factors.scaling(list);
            config = config.validated()?;
        }
        Ok(config.to_hf(self.is_tied())?)
    }
}

impl ExportedData {
    /// The same with row `i` of `n` where `place` says.
    fn with_rows(self, n: usize, place: impl Fn(usize) -> usize) -> ExportedData {
        let moved = |bytes: Bytes| -> Bytes {
            let stride = bytes.len() / n.max(1);
            let mut out = vec![0; bytes.len()];
            for row in 0..n {
                let to = place(row) * stride;
                out[to..to + stride].copy_from_slice(&bytes[row * stride..][..stride]);
            }
            out.into()
        };
        match self {
            ExportedData::Blocks { dtype, bytes } => ExportedData::Blocks {
                dtype,
                bytes: moved(bytes),
            },
            ExportedData::Ternary { codes, scale } => ExportedData::Ternary {
                codes: moved(codes),
                scale,
            },
        }
    }
}

impl Exported {
    /// This tensor with the rows of `more` appended.
    ///
    /// Errors: types or scales that differ.
    fn joined(mut self, more: Exported) -> Result<Exported, PlanError> {
        self.data = match (self.data, more.data) {
            (
                ExportedData::Blocks { dtype, bytes },
                ExportedData::Blocks {
                    dtype: other,
                    bytes: more,
                },
            ) if dtype == other => ExportedData::Blocks {
                dtype,
                bytes: [bytes, more].concat().into(),
            },
            (
                ExportedData::Ternary { codes, scale },
                ExportedData::Ternary {
                    codes: more,
                    scale: other,
                },
            ) if scale == other => ExportedData::Ternary {
                codes: [codes, more].concat().into(),
                scale,
            },
            _ => {
                let found = "parts of different types or scales";
                return Err(PlanError::inexpressible(self.name, "GGUF", found));
            }
        };
        self.shape[0] += more.shape[0];
        Ok(self)
    }
}

/// Floats minus 1, and whether adding 1 restores all of them exactly.
fn less_one(values: &[f32]) -> (ExportedData, bool) {
    let less: Vec<f32> = values.iter().map(|v| v - 1.0).collect();
    let exact = less.iter().zip(values).all(|(less, v)| less + 1.0 == *v);
    (f32s(&less), exact)
}

/// Values unchanged.
fn f32s(values: &[f32]) -> ExportedData {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    ExportedData::Blocks {
        dtype: DType::F32,
        bytes: bytes.into(),
    }
}

/// What each weight of `plan` becomes.
fn targets(plan: &ModelPlan, to: Values) -> Vec<Option<Target>> {
    let config = &plan.config;
    let mut naming = Naming {
        to,
        model_type: config.family.hf_name(),
        in_gguf: plan.values == Values::Gguf,
        norms_less_one: config.family.norms_less_one,
        targets: vec![None; plan.specs.len()],
    };
    let weights = &plan.weights;
    if to == Values::Gguf {
        match plan.rope_factors {
            Some(RopeFactors::One(id)) => {
                naming.set(id.0, DIVISORS);
            }
            Some(RopeFactors::ShortAndLong { short, long, .. }) => {
                naming.set(short.0, SHORT);
                naming.set(long.0, LONG);
            }
            None => {}
        }
    }
    let fused = to == Values::Gguf && config.family.gguf_fused;
    let part = |own: &'static str, fused_name: &'static str| match fused {
        true => fused_name,
        false => own,
    };
    naming.set(weights.token_embd.0, "token_embd.weight");
    if let Some(inputs) = &weights.layer_inputs {
        naming.set(inputs.table.0, "per_layer_token_embd.weight");
        naming.projection(&inputs.projection, "per_layer_model_proj", Order::Same);
        naming.norm(inputs.norm, "per_layer_proj_norm.weight");
    }
    if let Some(Positions { table, token_type }) = &weights.positions {
        naming.set(table.0, "position_embd.weight");
        let token_type = naming.set(token_type.0, "token_types.weight");
        token_type.shape = Some(vec![1, config.model_dim]);
    }
    let attn_norm = match config.family.encoder {
        true => ENCODER_ATTN_NORM,
        false => "attn_norm",
    };
    for (i, layer) in weights.layers.iter().enumerate() {
        let attention = layer.attention();
        let dense = match layer.network() {
            Some(FeedForward::Dense(dense)) => Some(dense),
            Some(FeedForward::Experts(experts)) => {
                naming.experts(experts, i, config);
                None
            }
            Some(FeedForward::Channel(mix)) => {
                naming.channel_mix(mix, i, config);
                None
            }
            Some(FeedForward::Plain(Plain { up, down })) => {
                naming.projection(up, &format!("blk.{i}.ffn_up"), Order::Same);
                naming.projection(down, &format!("blk.{i}.ffn_down"), Order::Same);
                None
            }
            None => None,
        };
        if let Some(LayerInput { gate, output, norm }) = &layer.input {
            naming.projection(gate, &format!("blk.{i}.inp_gate"), Order::Same);
            naming.projection(output, &format!("blk.{i}.proj"), Order::Same);
            naming.norm(*norm, &format!("blk.{i}.post_norm.weight"));
        }
        if let Some(scale) = layer.scale {
            naming.set(scale.0, &format!("blk.{i}.layer_output_scale.weight"));
        }
        let block = layer.ffn.as_ref();
        for (name, norm) in [
            ("token_embd_norm", layer.embed_norm.as_ref()),
            (&format!("blk.{i}.{attn_norm}"), Some(&layer.attn_norm)),
            (
                &format!("blk.{i}.{}", config.family.ffn_norm),
                block.map(|block| &block.norm),
            ),
        ] {
            if let Some(norm) = norm {
                naming.stream_norm(norm, name);
            }
        }
        for (part, id) in [
            ("attn_q_norm", attention.and_then(|a| a.q_norm)),
            ("attn_k_norm", attention.and_then(|a| a.k_norm)),
            ("attn_sinks", attention.and_then(|a| a.sinks)),
            ("attn_sub_norm", attention.and_then(|a| a.sub_norm)),
            ("post_attention_norm", layer.post_attn_norm),
            ("ffn_sub_norm", dense.and_then(|dense| dense.sub_norm)),
            ("post_ffw_norm", block.and_then(|block| block.post_norm)),
        ] {
            if let Some(id) = id {
                naming.norm(id, &format!("blk.{i}.{part}.weight"));
            }
        }
        let name_attention = |naming: &mut Naming, attention: &Attention<_, _>| {
            let (k, v) = (attention.k.as_ref(), attention.v.as_ref());
            for (part, projection, order) in [
                (
                    part("attn_q", "attn_qkv"),
                    Some(&attention.q),
                    Order::Rotated,
                ),
                (part("attn_k", "attn_qkv"), k, Order::Rotated),
                (part("attn_v", "attn_qkv"), v, Order::Same),
                ("attn_output", Some(&attention.o), Order::Same),
            ] {
                if let Some(projection) = projection {
                    naming.projection(projection, &format!("blk.{i}.{part}"), order);
                }
            }
        };
        match &layer.mixer {
            Mixer::Attention(attention) => name_attention(&mut naming, attention),
            Mixer::Both(attention, ssm) => {
                name_attention(&mut naming, attention);
                naming.ssm(ssm, i, config);
            }
            Mixer::Mamba(mamba) => naming.mamba(mamba, i, config),
            Mixer::Time(time) => naming.time_mix(time, i, config),
            Mixer::Latent(latent) => naming.latent_attention(latent, i),
            Mixer::Convolution(convolution) => naming.convolution(convolution, i, config),
            Mixer::DeltaNet(net) => naming.delta_net(net, i, config),
            Mixer::Ssm(ssm) => naming.ssm(ssm, i, config),
        }
        if let Some(dense) = dense {
            for (part, projection) in [
                (part("ffn_gate", "ffn_up"), &dense.gate),
                ("ffn_up", &dense.up),
                ("ffn_down", &dense.down),
            ] {
                naming.projection(projection, &format!("blk.{i}.{part}"), Order::Same);
            }
        }
    }
    let output_norm = match to {
        Values::Gguf => config.family.gguf_output_norm,
        Values::HuggingFace => "output_norm",
    };
    if let Some(norm) = &weights.output_norm {
        naming.stream_norm(norm, output_norm);
    }
    if let Some(head) = &weights.output {
        naming.projection(head, "output", Order::Same);
    }
    naming.targets
}

/// Assigns names to weights.
struct Naming {
    to: Values,
    model_type: &'static str,
    /// The plan's values are those of GGUF files.
    in_gguf: bool,
    norms_less_one: bool,
    targets: Vec<Option<Target>>,
}

impl Naming {
    fn set(&mut self, id: usize, name: &str) -> &mut Target {
        let name = match self.to {
            Values::Gguf => name.to_owned(),
            Values::HuggingFace => {
                hugging_face(self.model_type, name).expect("the planner's names are in the table")
            }
        };
        self.targets[id].insert(Target {
            name,
            order: Order::Same,
            less_one: false,
            stacked: false,
            is_exact: false,
            row: 0,
            shape: None,
        })
    }

    /// Keeps the bits of a matrix that has a name.
    fn keep(&mut self, id: LinearId) {
        if let Some(target) = &mut self.targets[id.0] {
            target.is_exact = true;
        }
    }

    /// The latent attention of block `i`: the matrices of all heads are one tensor.
    fn latent_attention(&mut self, latent: &LatentAttention<LinearId, VectorId>, i: usize) {
        let name = |part: &str| format!("blk.{i}.{part}");
        match &latent.q_down {
            Some((down, norm)) => {
                self.projection(down, &name("attn_q_a"), Order::Same);
                self.norm(*norm, &name("attn_q_a_norm.weight"));
                self.projection(&latent.q, &name("attn_q_b"), Order::Same);
            }
            None => self.projection(&latent.q, &name("attn_q"), Order::Same),
        }
        self.projection(&latent.latent, &name("attn_kv_a_mqa"), Order::Same);
        self.projection(&latent.k_rope, &name("attn_kv_a_mqa"), Order::Same);
        self.norm(latent.latent_norm, &name("attn_kv_a_norm.weight"));
        for (part, ids) in [("attn_k_b", &latent.k_up), ("attn_v_b", &latent.v_up)] {
            for id in ids {
                self.set(id.0, &name(&format!("{part}.weight"))).stacked = true;
            }
        }
        self.projection(&latent.o, &name("attn_output"), Order::Same);
    }

    /// The short convolution of block `i`.
    fn convolution(
        &mut self,
        convolution: &Convolution<LinearId, VectorId>,
        i: usize,
        config: &ModelConfig,
    ) {
        let name = |part: &str| format!("blk.{i}.shortconv.{part}");
        self.projection(&convolution.input, &name("in_proj"), Order::Same);
        self.projection(&convolution.output, &name("out_proj"), Order::Same);
        let taps = (config.model_dim, config.conv_taps.unwrap_or(0));
        self.taps(convolution.taps, &name("conv.weight"), taps);
    }

    fn taps(&mut self, id: VectorId, name: &str, (dim, n_taps): (usize, usize)) -> &mut Target {
        let shape = match self.to {
            Values::Gguf => vec![dim, n_taps],
            Values::HuggingFace => vec![dim, 1, n_taps],
        };
        let target = self.set(id.0, name);
        target.shape = Some(shape);
        target
    }

    /// The gated delta net of block `i`.
    fn delta_net(&mut self, net: &DeltaNet<LinearId, VectorId>, i: usize, config: &ModelConfig) {
        let Some(delta) = &config.delta else {
            return;
        };
        let name = |part: &str| format!("blk.{i}.{part}");
        let values = |first, each| Order::ValueHeads { first, each };
        let of_values = values(2 * delta.keys(), delta.value_dim);
        self.projection(&net.qkv, &name("attn_qkv"), of_values);
        self.projection(&net.gate, &name("attn_gate"), values(0, delta.value_dim));
        let joined = self.to == Values::Gguf && config.family.delta == Some(HeadOrder::Grouped);
        for (part, projection) in [("ssm_alpha", &net.alpha), ("ssm_beta", &net.beta)] {
            match joined {
                true => self.projection(projection, &name("ssm_ba"), Order::BetaAlpha),
                false => self.projection(projection, &name(part), values(0, 1)),
            }
        }
        let columns = Order::ValueColumns {
            each: delta.value_dim,
        };
        self.projection(&net.output, &name("ssm_out"), columns);
        let taps = (delta.channels(), config.conv_taps.unwrap_or(0));
        self.taps(net.taps, &name("ssm_conv1d.weight"), taps).order = of_values;
        self.decay(net.a, &name("ssm_a")).order = values(0, 1);
        self.set(net.dt_bias.0, &name("ssm_dt.bias")).order = values(0, 1);
        self.set(net.norm.0, &name("ssm_norm.weight"));
    }

    /// The state space of block `i`, whose inputs are one matrix.
    fn ssm(&mut self, ssm: &Ssm<LinearId, VectorId>, i: usize, config: &ModelConfig) {
        let Some(shape) = &config.ssm else {
            return;
        };
        let name = |part: &str| format!("blk.{i}.{part}");
        for part in [&ssm.gate, &ssm.xbc, &ssm.dt] {
            self.projection(part, &name("ssm_in"), Order::Same);
        }
        self.projection(&ssm.output, &name("ssm_out"), Order::Same);
        let taps = (shape.channels(), config.conv_taps.unwrap_or(0));
        self.taps(ssm.taps, &name("ssm_conv1d.weight"), taps);
        if let Some(bias) = ssm.conv_bias {
            self.set(bias.0, &name("ssm_conv1d.bias"));
        }
        self.decay(ssm.a, &name("ssm_a"));
        self.set(ssm.d.0, &name("ssm_d"));
        self.set(ssm.dt_bias.0, &name("ssm_dt.bias"));
        if let Some(norm) = ssm.norm {
            self.set(norm.0, &name("ssm_norm.weight"));
        }
        if self.to == Values::Gguf {
            let width = shape.inner() / shape.n_groups;
            for (id, of) in [
                (Some(ssm.a), vec![shape.n_heads, 1]),
                (Some(ssm.d), vec![shape.n_heads, 1]),
                (ssm.norm, vec![shape.n_groups, width]),
            ] {
                if let Some(id) = id
                    && let Some(target) = &mut self.targets[id.0]
                {
                    target.shape = Some(of);
                }
            }
        }
    }

    /// The state space of block `i`, of the first Mamba.
    fn mamba(&mut self, mamba: &Mamba<LinearId, VectorId>, i: usize, config: &ModelConfig) {
        let Some(shape) = &config.mamba else {
            return;
        };
        let name = |part: &str| format!("blk.{i}.{part}");
        for (part, projection) in [
            ("ssm_in", &mamba.input),
            ("ssm_in", &mamba.gate),
            ("ssm_x", &mamba.dt_in),
            ("ssm_x", &mamba.b),
            ("ssm_x", &mamba.c),
            ("ssm_dt", &mamba.dt),
            ("ssm_out", &mamba.output),
        ] {
            self.projection(projection, &name(part), Order::Same);
        }
        for (part, norm) in [
            ("ssm_dt_norm.weight", mamba.dt_norm),
            ("ssm_b_norm.weight", mamba.b_norm),
            ("ssm_c_norm.weight", mamba.c_norm),
            ("ssm_conv1d.bias", mamba.conv_bias),
        ] {
            if let Some(id) = norm {
                self.set(id.0, &name(part));
            }
        }
        let taps = (shape.inner, config.conv_taps.unwrap_or(0));
        self.taps(mamba.taps, &name("ssm_conv1d.weight"), taps);
        let of_state = vec![shape.inner, shape.state_dim];
        self.decay(mamba.a, &name("ssm_a")).shape = Some(of_state);
        self.set(mamba.d.0, &name("ssm_d"));
    }

    /// The time mixing of block `i`.
    fn time_mix(&mut self, time: &TimeMix<LinearId, VectorId>, i: usize, config: &ModelConfig) {
        let Some(rwkv) = &config.rwkv else {
            return;
        };
        let shape = rwkv.shape;
        let name = |part: &str| format!("blk.{i}.time_mix_{part}");
        let heads = vec![shape.n_heads, shape.head_dim];
        let mut mixes = vec![
            ("r", time.r.factors),
            ("k", time.k.factors),
            ("v", time.v.factors),
        ];
        self.projection(&time.r.projection, &name("receptance"), Order::Same);
        self.projection(&time.k.projection, &name("key"), Order::Same);
        self.projection(&time.v.projection, &name("value"), Order::Same);
        self.projection(&time.output, &name("output"), Order::Same);
        if let Some((norm, gate)) = &time.finish {
            self.stream_norm(norm, &name("ln"));
            mixes.push(("g", gate.factors));
            match &gate.down {
                Some(down) => self.low_rank([down, &gate.projection], &name("g"), &name("g0")),
                None => self.projection(&gate.projection, &name("gate"), Order::Same),
            }
        }
        match &time.recurrence {
            Recurrence::Fixed { decay, first } => {
                let of = (shape.generation == Generation::V5).then_some(heads);
                self.set(decay.0, &name("decay.weight")).shape = of.clone();
                self.set(first.0, &name("first.weight")).shape = of;
            }
            Recurrence::Six {
                shares,
                decay,
                first,
            } => {
                mixes.push(("w", decay.factors));
                self.shifted_pair(decay, &name("decay_w"), &name("decay"));
                self.set(first.0, &name("first.weight")).shape = Some(heads);
                mixes.push(("x", shares.factors));
                self.set(shares.down.weight.0, &name("w1.weight"));
                self.keep(shares.down.weight);
                for id in &shares.up {
                    self.set(id.0, &name("w2.weight")).stacked = true;
                    self.keep(*id);
                }
            }
            Recurrence::Seven {
                decay,
                rate,
                residual,
                k_k,
                k_a,
                r_k,
            } => {
                mixes.extend([("w", decay.factors), ("a", rate.factors)]);
                self.shifted_pair(decay, &name("w"), &name("w0"));
                self.shifted_pair(rate, &name("a"), &name("a0"));
                if let Some([down, up]) = residual {
                    self.low_rank([down, up], &name("v"), &name("v0"));
                }
                self.set(k_k.0, &name("k_k.weight"));
                self.set(k_a.0, &name("k_a.weight"));
                self.set(r_k.0, &name("r_k.weight")).shape =
                    (self.to == Values::HuggingFace).then_some(heads);
            }
        }
        for (letter, id) in mixes {
            self.mix(id, i, ("time_mix", letter), shape);
        }
    }

    /// The channel mixing of block `i`.
    fn channel_mix(
        &mut self,
        mix: &ChannelMix<LinearId, VectorId>,
        i: usize,
        config: &ModelConfig,
    ) {
        let Some(rwkv) = &config.rwkv else {
            return;
        };
        let name = |part: &str| format!("blk.{i}.channel_mix_{part}");
        let receptance = mix.receptance.as_ref();
        for (letter, part, shifted) in [
            ("k", "key", Some(&mix.key)),
            ("r", "receptance", receptance),
        ] {
            if let Some(shifted) = shifted {
                self.projection(&shifted.projection, &name(part), Order::Same);
                self.mix(shifted.factors, i, ("channel_mix", letter), rwkv.shape);
            }
        }
        self.projection(&mix.value, &name("value"), Order::Same);
    }

    /// The factors of a mix of positions: in GGUF files those of time mixing are one tensor.
    fn mix(
        &mut self,
        id: VectorId,
        i: usize,
        (kind, letter): (&str, &str),
        RwkvShape {
            generation,
            n_heads,
            head_dim,
        }: RwkvShape,
    ) {
        let dim = n_heads * head_dim;
        let place = fused_mixes(generation).iter().position(|&of| of == letter);
        let is_fused = self.to == Values::Gguf && kind == "time_mix" && place.is_some();
        let part = if is_fused { "fused" } else { letter };
        let is_hf = self.to == Values::HuggingFace;
        let target = self.set(id.0, &format!("blk.{i}.{kind}_lerp_{part}.weight"));
        target.row = place.filter(|_| is_fused).unwrap_or(0);
        target.shape = match (is_fused, is_hf && generation != Generation::V7) {
            (true, _) => Some(vec![1, 1, 1, dim]),
            (false, true) => Some(vec![1, 1, dim]),
            (false, false) => None,
        };
    }

    fn shifted_pair(&mut self, shifted: &Shifted<LinearId, VectorId>, pair: &str, bias: &str) {
        if let Some(down) = &shifted.down {
            self.low_rank([down, &shifted.projection], pair, bias);
        }
    }

    /// A pair of matrices of low rank, and what is added then.
    fn low_rank(
        &mut self,
        [down, up]: [&Projection<LinearId, VectorId>; 2],
        pair: &str,
        bias: &str,
    ) {
        self.set(down.weight.0, &format!("{pair}1.weight"));
        self.set(up.weight.0, &format!("{pair}2.weight"));
        self.keep(down.weight);
        self.keep(up.weight);
        if let Some(id) = up.bias {
            self.set(id.0, &format!("{bias}.weight"));
        }
    }

    /// A norm with its bias.
    fn stream_norm(&mut self, norm: &Norm<VectorId>, name: &str) {
        self.norm(norm.weight, &format!("{name}.weight"));
        if let Some(bias) = norm.bias {
            self.set(bias.0, &format!("{name}.bias"));
        }
    }

    /// The decays of heads, of a GGUF file in its form: their logarithms may not give back every bit.
    fn decay(&mut self, id: VectorId, name: &str) -> &mut Target {
        let in_gguf = self.in_gguf;
        let target = self.set(id.0, name);
        if in_gguf {
            target.name = target.name.replace("A_log", "A");
        }
        target
    }

    /// The mixture of block `i`: in GGUF files the matrices of all experts are one tensor.
    fn experts(&mut self, experts: &Experts<LinearId, VectorId>, i: usize, config: &ModelConfig) {
        let name = |part: &str| format!("blk.{i}.{part}");
        let ffn_dim = config
            .experts
            .map_or(config.ffn_dim, |experts| experts.ffn_dim);
        self.projection(&experts.router, &name("ffn_gate_inp"), Order::Same);
        self.keep(experts.router.weight);
        if let Some(bias) = experts.bias {
            self.set(bias.0, &name("exp_probs_b.bias"));
        }
        if let Some(ExpertBiases { gate, up, down }) = &experts.biases {
            let n_experts = experts.gate.len();
            for (part, id, width) in [
                ("ffn_gate_exps.bias", gate, ffn_dim),
                ("ffn_up_exps.bias", up, ffn_dim),
                ("ffn_down_exps.bias", down, config.model_dim),
            ] {
                self.set(id.0, &name(part)).shape = Some(vec![n_experts, width]);
            }
        }
        if let Some(SharedExpert { network, gate }) = &experts.shared {
            for (part, projection) in [
                ("ffn_gate_shexp", Some(&network.gate)),
                ("ffn_up_shexp", Some(&network.up)),
                ("ffn_down_shexp", Some(&network.down)),
                ("ffn_gate_inp_shexp", gate.as_ref()),
            ] {
                if let Some(projection) = projection {
                    self.projection(projection, &name(part), Order::Same);
                }
            }
        }
        for (part, ids) in [
            ("ffn_gate", &experts.gate),
            ("ffn_up", &experts.up),
            ("ffn_down", &experts.down),
        ] {
            for (expert, id) in ids.iter().enumerate() {
                match self.to {
                    Values::Gguf => {
                        let target = self.set(id.0, &format!("blk.{i}.{part}_exps.weight"));
                        target.stacked = true;
                    }
                    Values::HuggingFace => {
                        self.set(id.0, &format!("blk.{i}.{part}.{expert}.weight"));
                    }
                }
            }
        }
    }

    fn norm(&mut self, id: VectorId, name: &str) {
        let less_one = self.in_gguf && self.norms_less_one;
        // So llama.cpp spells it.
        let is_bare = self.to == Values::Gguf
            && self.model_type == "falcon_h1"
            && name.ends_with(".ffn_norm.weight");
        let target = self.set(id.0, name);
        target.less_one = less_one;
        if is_bare {
            target.name = name.trim_end_matches(".weight").to_owned();
        }
    }

    fn projection(&mut self, p: &Projection<LinearId, VectorId>, name: &str, order: Order) {
        if let Some(id) = p.input_norm {
            self.set(id.0, &format!("{name}_norm_in.weight"));
        }
        self.set(p.weight.0, &format!("{name}.weight")).order = order;
        if let Some(id) = p.bias {
            self.set(id.0, &format!("{name}.bias")).order = order;
        }
    }
}
