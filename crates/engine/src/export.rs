//! From a plan to the tensors of a Hugging Face checkpoint, whatever files the model came in.

use std::sync::Arc;

use bytes::Bytes;
use serde_json::{Map, Value};
use sterna_format::DType;
use sterna_format::names::hugging_face;
use sterna_kernels::quant::ternary::{BLOCK, BLOCK_BYTES, Layout, row_bytes, unpack_row};
use sterna_kernels::rope::RopeLayout;
use sterna_kernels::{Exec, repack};

use crate::backend::{TernaryPacking, WeightData};
use crate::config::ModelConfig;
use crate::load::{LoadError, expect_wanted, linear, vector};
use crate::plan::{LinearId, LinearRecipe, ModelPlan, Recipe, TensorRequest, Values, VectorId};
use crate::weights::Projection;

/// Gives the weights of a model one after another, in the order of execution, under the names and
/// with the values of a Hugging Face checkpoint. Fused projections come apart; ternary weights come
/// as trits with one scale in whatever form they were stored.
///
/// It is fed as [`Loader`](crate::Loader) is. A tensor at a time is in memory.
pub struct Exporter {
    plan: ModelPlan,
    exec: Arc<Exec>,
    /// What each weight of the plan becomes; `None` for what isn't a tensor of a checkpoint.
    targets: Vec<Option<Target>>,
    parts: Vec<Bytes>,
    next: usize,
    factors: Vec<(VectorId, Vec<f32>)>,
    warnings: Vec<String>,
}

/// A tensor of a Hugging Face checkpoint.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// Its name, such as `model.layers.0.mlp.up_proj.weight`.
    pub name: String,
    /// Row-major, outermost first: a linear weight is `[n, k]`.
    pub shape: Vec<usize>,
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
        /// What a code of +1 is worth.
        scale: f32,
    },
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
        // Rows are padded to whole blocks, and the tensor isn't.
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
    /// Rows are those of rotated heads, and are to stand as in a checkpoint.
    rotated: bool,
    /// One is to be taken off every value.
    less_one: bool,
}

impl Exporter {
    /// Begins to export the model of `plan`, computing on `exec`.
    pub fn new(plan: ModelPlan, exec: Arc<Exec>) -> Exporter {
        Exporter {
            targets: targets(&plan),
            plan,
            exec,
            parts: Vec::new(),
            next: 0,
            factors: Vec::new(),
            warnings: Vec::new(),
        }
    }

    /// Whether the embedding table is the output head too.
    pub fn is_tied(&self) -> bool {
        self.plan.weights.output.is_none()
    }

    /// The range to feed next; `None` once everything has been exported.
    pub fn wanted(&self) -> Option<&TensorRequest> {
        let spec = self.plan.specs.get(self.next)?;
        Some(&spec.parts[self.parts.len()])
    }

    /// Takes the bytes of the range [`Exporter::wanted`] names; gives a tensor once its last range is
    /// there.
    ///
    /// Errors: [`LoadError`] names the tensor at fault.
    pub fn feed(&mut self, bytes: Bytes) -> Result<Option<Exported>, LoadError> {
        expect_wanted(self.wanted(), &bytes)?;
        self.parts.push(bytes);
        let spec = &self.plan.specs[self.next];
        if self.parts.len() < spec.parts.len() {
            return Ok(None);
        }
        let parts = std::mem::take(&mut self.parts);
        let id = self.next;
        self.next += 1;
        let target = self.targets[id].as_ref();
        let target = || target.expect("only host vectors have no target");
        let (shape, data) = match &spec.recipe {
            Recipe::HostVector(recipe) => {
                let values = vector(recipe, &spec.parts[0], &parts[0])?;
                self.factors.push((VectorId(id), values));
                return Ok(None);
            }
            Recipe::Vector(recipe) => {
                // Decoded for its checks, even where the bytes are passed on.
                let values = vector(recipe, &spec.parts[0], &parts[0])?;
                let data = if target().less_one {
                    let (data, exact) = less_one(&values);
                    if !exact {
                        self.warnings.push(format!(
                            "tensor `{}`: not all values are exact as one and a float",
                            target().name
                        ));
                    }
                    data
                } else {
                    ExportedData::Blocks {
                        dtype: recipe.dtype,
                        bytes: target().in_order(&self.plan.config, parts[0].clone(), recipe.len),
                    }
                };
                (vec![recipe.len], data)
            }
            Recipe::Linear(recipe) => {
                let data = self.matrix(recipe, &spec.parts, parts, target())?;
                (vec![recipe.n, recipe.k], data)
            }
        };
        Ok(Some(Exported {
            name: target().name.clone(),
            shape,
            data,
        }))
    }

    fn matrix(
        &self,
        recipe: &LinearRecipe,
        requests: &[TensorRequest],
        parts: Vec<Bytes>,
        target: &Target,
    ) -> Result<ExportedData, LoadError> {
        let LinearRecipe { n, k, .. } = *recipe;
        Ok(match linear(&self.exec, recipe, requests, parts)? {
            WeightData::Blocks { dtype, bytes, .. } => ExportedData::Blocks {
                dtype,
                bytes: target.in_order(&self.plan.config, bytes, n),
            },
            WeightData::Ternary {
                mut codes,
                packing,
                scale,
            } => {
                if packing == TernaryPacking::Tq20 {
                    let blocks = Layout::Blocks(DType::TQ2_0);
                    codes = repack::repack(&self.exec, blocks, n, k, &codes, 0..n)
                        .map_err(|source| LoadError::Weights {
                            name: requests[0].name.clone(),
                            source,
                        })?
                        .into();
                }
                ExportedData::Ternary {
                    codes: target.in_order(&self.plan.config, codes, n),
                    scale,
                }
            }
        })
    }

    /// What could not be carried over exactly so far.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// The `config.json` that goes with the tensors, once all have been exported.
    ///
    /// Errors: [`LoadError::Incomplete`] if they haven't; [`PlanError::Inexpressible`](crate::PlanError::Inexpressible) if it can't be
    /// said.
    pub fn config(&self) -> Result<Map<String, Value>, LoadError> {
        if let Some(want) = self.wanted() {
            return Err(LoadError::Incomplete {
                name: want.name.clone(),
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

impl Target {
    /// `bytes`, which are `n` rows, in the order of a checkpoint of `config`.
    fn in_order(&self, config: &ModelConfig, bytes: Bytes, n: usize) -> Bytes {
        if !self.rotated || config.ropes[0].layout != RopeLayout::Pairs {
            return bytes;
        }
        let stride = bytes.len() / n;
        let mut out = vec![0; bytes.len()];
        for (i, row) in bytes.chunks_exact(stride).enumerate() {
            out[config.checkpoint_row(i) * stride..][..stride].copy_from_slice(row);
        }
        out.into()
    }
}

/// Floats less one, and whether adding one gives all of them back.
fn less_one(values: &[f32]) -> (ExportedData, bool) {
    let less: Vec<f32> = values.iter().map(|v| v - 1.0).collect();
    let exact = less.iter().zip(values).all(|(less, v)| less + 1.0 == *v);
    let bytes: Vec<u8> = less.iter().flat_map(|v| v.to_le_bytes()).collect();
    let data = ExportedData::Blocks {
        dtype: DType::F32,
        bytes: bytes.into(),
    };
    (data, exact)
}

/// What each weight of `plan` becomes.
fn targets(plan: &ModelPlan) -> Vec<Option<Target>> {
    let config = &plan.config;
    let mut naming = Naming {
        model_type: config.family.hf_name(),
        norms_less_one: plan.values == Values::Gguf && config.family.gemma,
        targets: vec![None; plan.specs.len()],
    };
    let weights = &plan.weights;
    naming.set(weights.token_embd.0, "token_embd.weight", false);
    for (i, layer) in weights.layers.iter().enumerate() {
        for (part, id) in [
            ("attn_norm", Some(layer.attn_norm)),
            ("attn_q_norm", layer.q_norm),
            ("attn_k_norm", layer.k_norm),
            ("attn_sub_norm", layer.attn_sub_norm),
            ("post_attention_norm", layer.post_attn_norm),
            ("ffn_norm", Some(layer.ffn_norm)),
            ("ffn_sub_norm", layer.ffn_sub_norm),
            ("post_ffw_norm", layer.post_ffn_norm),
        ] {
            if let Some(id) = id {
                naming.norm(id, &format!("blk.{i}.{part}.weight"));
            }
        }
        for (part, projection, rotated) in [
            ("attn_q", &layer.q, true),
            ("attn_k", &layer.k, true),
            ("attn_v", &layer.v, false),
            ("attn_output", &layer.o, false),
            ("ffn_gate", &layer.gate, false),
            ("ffn_up", &layer.up, false),
            ("ffn_down", &layer.down, false),
        ] {
            naming.projection(projection, &format!("blk.{i}.{part}"), rotated);
        }
    }
    naming.norm(weights.output_norm, "output_norm.weight");
    if let Some(head) = &weights.output {
        naming.projection(head, "output", false);
    }
    naming.targets
}

/// Gives weights their names.
struct Naming {
    model_type: &'static str,
    norms_less_one: bool,
    targets: Vec<Option<Target>>,
}

impl Naming {
    /// `rotated` are rows of heads that rotate.
    fn set(&mut self, id: usize, name: &str, rotated: bool) -> &mut Target {
        let name = hugging_face(self.model_type, name);
        self.targets[id].insert(Target {
            name: name.expect("the planner's names are in the table"),
            rotated,
            less_one: false,
        })
    }

    fn norm(&mut self, id: VectorId, name: &str) {
        let less_one = self.norms_less_one;
        self.set(id.0, name, false).less_one = less_one;
    }

    fn projection(&mut self, p: &Projection<LinearId, VectorId>, name: &str, rotated: bool) {
        if let Some(id) = p.input_norm {
            self.set(id.0, &format!("{name}_norm_in.weight"), false);
        }
        self.set(p.weight.0, &format!("{name}.weight"), rotated);
        if let Some(id) = p.bias {
            self.set(id.0, &format!("{name}.bias"), rotated);
        }
    }
}
