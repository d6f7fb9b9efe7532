//! From bytes to a model: the engine says which ranges it wants next, and is fed them.

use std::sync::Arc;

use bytes::Bytes;
use sterna_format::DType;
use sterna_kernels::quant::ternary::{I2sLayout, Layout, row_bytes};
use sterna_kernels::quant::{QuantError, decode_row};
use sterna_kernels::{Exec, check_finite as check_finite_blocks, repack, requantize};

use crate::PlanError;
use crate::backend::{Backend, BackendError, LinearSource, TernaryPacking, WeightData};
use crate::config::ModelConfig;
use crate::generation::{Embedding, Generation, Group, Head, NewGroup, Output};
use crate::head::screening::Screening;
use crate::model::Model;
use crate::plan::{
    LinearId, LinearRecipe, ModelPlan, Recipe, RopeFactors, ScaleRecipe, Stored, TensorRequest,
    VectorId, VectorRecipe, is_float,
};
use crate::rope::RopeScaling;
use crate::weights::{Convert, Layer, Projection};

/// Makes a [`Model`] from a [`ModelPlan`], piece by piece in the order of execution.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use sterna_engine::{Cpu, LoadError, Loader, Model, ModelPlan};
/// # fn load(plan: ModelPlan, file: bytes::Bytes, cpu: Cpu) -> Result<Arc<Model<Cpu>>, LoadError> {
/// let mut loader = Loader::new(plan, cpu);
/// while let Some(want) = loader.wanted() {
///     let range = want.offset as usize..(want.offset + want.len) as usize;
///     loader.feed(file.slice(range))?;
/// }
/// loader.finish()
/// # }
/// ```
pub struct Loader<B: Backend> {
    backend: B,
    feed: Feed<B>,
}

/// Makes weights from their bytes, some or all of a plan.
pub(crate) struct Feed<B: Backend> {
    plan: ModelPlan,
    /// Which of the plan's weights are wanted, ascending.
    order: Vec<usize>,
    /// How many of these have been made.
    n_made: usize,
    /// Parts of the next weight that have come in.
    parts: Vec<Bytes>,
    /// Of all weights of the plan, those that have been made and not taken to their place.
    loaded: Vec<Option<Loaded<B>>>,
    /// The output head in another type, where the table it is made from is kept too.
    made_head: Option<B::Linear>,
    screen: Option<B::Screen>,
    /// Whether all weights are looked through for values that aren't numbers.
    thorough: bool,
    warnings: Vec<String>,
}

enum Loaded<B: Backend> {
    Linear(B::Linear),
    Vector(B::Vector),
    Host(Vec<f32>),
}

/// Why a model could not be loaded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    /// Bytes that weren't asked for.
    #[error("tensor `{name}`: expected {expected} bytes, found {found}")]
    WrongLength {
        /// GGUF name of the tensor wanted, or `none` if loading was complete.
        name: String,
        /// Bytes wanted.
        expected: u64,
        /// Bytes fed.
        found: u64,
    },
    /// Finished before every weight was fed.
    #[error("tensor `{name}` has not been loaded")]
    Incomplete {
        /// GGUF name of the first tensor that is missing.
        name: String,
    },
    /// Weights that can't be what they are said to be.
    #[error("tensor `{name}`: {source}")]
    Weights {
        /// GGUF name of the tensor.
        name: String,
        /// What is wrong.
        source: QuantError,
    },
    /// A scale that isn't a positive number.
    #[error("tensor `{name}`: expected a positive scale, found {found}")]
    BadScale {
        /// GGUF name of the tensor.
        name: String,
        /// The scale.
        found: f32,
    },
    /// A value that isn't a number, of a norm, bias or list of factors, or of a matrix that is swapped in.
    #[error("tensor `{name}`: expected numbers, found {found} at index {index}")]
    NotFinite {
        /// GGUF name of the tensor.
        name: String,
        /// Place of the value.
        index: usize,
        /// The value.
        found: f32,
    },
    /// A separate scale beside weights that already have scales of their own.
    #[error("tensor `{name}`: its weights have no common scale that this one could multiply")]
    NoCommonScale {
        /// GGUF name of the scale.
        name: String,
    },
    /// Values that make no sense together.
    #[error(transparent)]
    Config(#[from] PlanError),
    /// The backend refused a weight.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl<B: Backend> Loader<B> {
    /// Begins to load `plan` onto `backend`.
    pub fn new(plan: ModelPlan, backend: B) -> Loader<B> {
        let all = (0..plan.specs.len()).collect();
        Loader {
            backend,
            feed: Feed::new(plan, all, false),
        }
    }

    /// The range to feed next; `None` once everything is there.
    pub fn wanted(&self) -> Option<&TensorRequest> {
        self.feed.wanted()
    }

    /// Takes the bytes of the range [`Loader::wanted`] names.
    ///
    /// They are kept, not copied, where their layout can be used as it is.
    /// Errors: [`LoadError`] names the tensor at fault.
    pub fn feed(&mut self, bytes: Bytes) -> Result<(), LoadError> {
        self.feed.feed(&self.backend, bytes)
    }

    /// What looks wrong about the weights so far, though it could be right.
    pub fn warnings(&self) -> &[String] {
        self.feed.warnings()
    }

    /// The model, once everything it wanted has been fed.
    ///
    /// Errors: [`LoadError::Incomplete`] if something is missing.
    pub fn finish(self) -> Result<Arc<Model<B>>, LoadError> {
        let Loader { backend, mut feed } = self;
        feed.expect_complete()?;
        let config = feed.config()?;
        let embedding = feed.embedding();
        let layers = (0..config.n_layers).map(|i| feed.layer(i)).collect();
        let head = feed.head();
        let weights = Generation::first(embedding, layers, head);
        Ok(Arc::new(Model::new(config, backend, weights)))
    }
}

impl<B: Backend> Feed<B> {
    fn new(plan: ModelPlan, order: Vec<usize>, thorough: bool) -> Feed<B> {
        let mut loaded = Vec::new();
        loaded.resize_with(plan.specs.len(), || None);
        Feed {
            plan,
            order,
            n_made: 0,
            parts: Vec::new(),
            loaded,
            made_head: None,
            screen: None,
            thorough,
            warnings: Vec::new(),
        }
    }

    /// The weights of `groups`, which the plan has, and what the configuration depends on.
    pub(crate) fn of_groups(plan: ModelPlan, groups: &[Group]) -> Feed<B> {
        let mut ids = Ids::default();
        match plan.rope_factors {
            Some(RopeFactors::One(factors)) => ids.0.push(factors.0),
            Some(RopeFactors::ShortAndLong { short, long, .. }) => ids.0.extend([short.0, long.0]),
            None => {}
        }
        let weights = &plan.weights;
        for group in groups {
            match group {
                Group::Embedding => ids.linear(weights.token_embd),
                Group::Layer(i) => {
                    weights.layers[*i].clone().convert(&mut ids);
                }
                Group::Head => {
                    ids.vector(weights.output_norm);
                    if let Some(head) = weights.output.clone() {
                        head.convert(&mut ids);
                    }
                }
            }
        }
        let Ids(mut order) = ids;
        order.sort_unstable();
        Feed::new(plan, order, true)
    }

    /// The range to feed next; `None` once everything is there.
    pub(crate) fn wanted(&self) -> Option<&TensorRequest> {
        let spec = &self.plan.specs[*self.order.get(self.n_made)?];
        Some(&spec.parts[self.parts.len()])
    }

    /// Takes the bytes of the range [`Feed::wanted`] names.
    pub(crate) fn feed(&mut self, backend: &B, bytes: Bytes) -> Result<(), LoadError> {
        let (name, expected) = match self.wanted() {
            Some(want) => (want.name.as_str(), want.len),
            None => ("none", 0),
        };
        if bytes.len() as u64 != expected || self.wanted().is_none() {
            return Err(LoadError::WrongLength {
                name: name.to_owned(),
                expected,
                found: bytes.len() as u64,
            });
        }
        let id = self.order[self.n_made];
        self.parts.push(bytes);
        let spec = &self.plan.specs[id];
        if self.parts.len() < spec.parts.len() {
            return Ok(());
        }
        let parts = std::mem::take(&mut self.parts);
        let loaded = match &spec.recipe {
            Recipe::Vector(recipe) => {
                let values = vector(recipe, &spec.parts[0], &parts[0])?;
                Loaded::Vector(backend.load_vector(values)?)
            }
            Recipe::HostVector(recipe) => Loaded::Host(vector(recipe, &spec.parts[0], &parts[0])?),
            Recipe::Linear(recipe) => {
                let weights = linear(backend.host(), recipe, &spec.parts, parts)?;
                let name = &spec.parts[0].name;
                if self.thorough {
                    check_finite(backend.host(), recipe, name, &weights)?;
                }
                (self.warnings).extend(odd_scale(recipe, &spec.parts, &weights));
                let recipe = *recipe;
                if self.plan.head_id().0 == id {
                    Loaded::Linear(self.load_head(backend, &recipe, weights)?)
                } else {
                    Loaded::Linear(load_linear(backend, &recipe, weights)?)
                }
            }
        };
        self.loaded[id] = Some(loaded);
        self.n_made += 1;
        Ok(())
    }

    /// Loads the matrix that logits come from, and makes what [`ModelPlan::with_head`] decided.
    fn load_head(
        &mut self,
        backend: &B,
        recipe: &LinearRecipe,
        mut weights: WeightData,
    ) -> Result<B::Linear, LoadError> {
        let name = || self.plan.specs[self.plan.head_id().0].parts[0].name.clone();
        let mut made = None;
        if let Some(dtype) = self.plan.head.dtype {
            let head = encode(backend.host(), recipe, &weights, dtype).map_err(|source| {
                LoadError::Weights {
                    name: name(),
                    source,
                }
            })?;
            if self.plan.weights.output.is_some() {
                weights = head;
            } else {
                made = Some(load_linear(backend, recipe, head)?);
            }
        }
        let linear = load_linear(backend, recipe, weights)?;
        if let Some(dtype) = self.plan.head.screen {
            match backend.load_screen(made.as_ref().unwrap_or(&linear), dtype) {
                Ok(screen) => self.screen = Some(screen),
                Err(error) if self.plan.head.screen_may_fail => {
                    let warning = format!("tensor `{}`: no screen of the head: {error}", name());
                    self.warnings.push(warning);
                    self.plan.head.screen = None;
                }
                Err(error) => return Err(error.into()),
            }
        }
        self.made_head = made;
        Ok(linear)
    }

    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Fails if anything wanted has not been fed.
    pub(crate) fn expect_complete(&self) -> Result<(), LoadError> {
        match self.wanted() {
            Some(want) => Err(LoadError::Incomplete {
                name: want.name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// The configuration, with what of it is in tensors.
    pub(crate) fn config(&mut self) -> Result<ModelConfig, LoadError> {
        let mut config = self.plan.config.clone();
        let Some(factors) = self.plan.rope_factors else {
            return Ok(config);
        };
        let mut take = Take(&mut self.loaded);
        config.ropes[0].scaling = match factors {
            RopeFactors::One(id) => RopeScaling::Factors(take.host(id)),
            RopeFactors::ShortAndLong {
                short,
                long,
                original_ctx,
                attention_factor,
            } => RopeScaling::LongRope {
                short: take.host(short),
                long: take.host(long),
                original_ctx,
                attention_factor,
            },
        };
        Ok(config.validated()?)
    }

    /// One of the groups that were wanted, once everything is there.
    pub(crate) fn group(&mut self, group: Group) -> NewGroup<B> {
        match group {
            Group::Embedding => NewGroup::Embedding(self.embedding()),
            Group::Layer(i) => NewGroup::Layer(i, self.layer(i)),
            Group::Head => NewGroup::Head(self.head()),
        }
    }

    fn embedding(&mut self) -> Embedding<B> {
        let tied = self.plan.weights.output.is_none();
        let projection = self.made_head.take().map(|weight| Projection {
            input_norm: None,
            weight,
            bias: None,
        });
        Embedding {
            output: tied.then(|| Output {
                projection,
                screening: self.screening(),
            }),
            token_embd: Take(&mut self.loaded).linear(self.plan.weights.token_embd),
        }
    }

    fn layer(&mut self, i: usize) -> Layer<B::Linear, B::Vector> {
        let layer = self.plan.weights.layers[i].clone();
        layer.convert(&mut Take(&mut self.loaded))
    }

    fn head(&mut self) -> Head<B> {
        let projection = self.plan.weights.output.clone();
        let projection = projection.map(|head| head.convert(&mut Take(&mut self.loaded)));
        Head {
            output: projection.map(|projection| Output {
                projection: Some(projection),
                screening: self.screening(),
            }),
            output_norm: Take(&mut self.loaded).vector(self.plan.weights.output_norm),
        }
    }

    fn screening(&mut self) -> Option<Screening<B::Screen>> {
        self.screen.take().map(|screen| Screening {
            screen,
            head_bytes: self.plan.head_bytes(),
            screen_bytes: self.plan.screen_bytes().unwrap_or(0),
        })
    }
}

/// The places of weights in a plan.
#[derive(Default)]
struct Ids(Vec<usize>);

impl Convert<LinearId, VectorId> for Ids {
    type Linear = ();
    type Vector = ();

    fn linear(&mut self, id: LinearId) {
        self.0.push(id.0);
    }

    fn vector(&mut self, id: VectorId) {
        self.0.push(id.0);
    }
}

/// Takes each loaded weight to its place. Every id stands for one weight, of the kind it says.
struct Take<'a, B: Backend>(&'a mut [Option<Loaded<B>>]);

impl<B: Backend> Take<'_, B> {
    fn host(&mut self, id: VectorId) -> Vec<f32> {
        match self.0[id.0].take() {
            Some(Loaded::Host(values)) => values,
            _ => unreachable!("the planner gave this id to one host vector"),
        }
    }
}

impl<B: Backend> Convert<LinearId, VectorId> for Take<'_, B> {
    type Linear = B::Linear;
    type Vector = B::Vector;

    fn linear(&mut self, id: LinearId) -> B::Linear {
        match self.0[id.0].take() {
            Some(Loaded::Linear(linear)) => linear,
            _ => unreachable!("the planner gave this id to one matrix"),
        }
    }

    fn vector(&mut self, id: VectorId) -> B::Vector {
        match self.0[id.0].take() {
            Some(Loaded::Vector(vector)) => vector,
            _ => unreachable!("the planner gave this id to one vector"),
        }
    }
}

fn load_linear<B: Backend>(
    backend: &B,
    recipe: &LinearRecipe,
    weights: WeightData,
) -> Result<B::Linear, LoadError> {
    let LinearRecipe { n, k, .. } = *recipe;
    Ok(backend.load_linear(LinearSource { n, k, weights })?)
}

/// Fails at the first weight that isn't a number.
fn check_finite(
    host: &Exec,
    recipe: &LinearRecipe,
    name: &str,
    weights: &WeightData,
) -> Result<(), LoadError> {
    let name = || name.to_owned();
    match weights {
        WeightData::Blocks { dtype, bytes, .. } => {
            check_finite_blocks(host, *dtype, recipe.n, recipe.k, bytes).map_err(|source| {
                match source {
                    QuantError::NotFinite { index, value } => LoadError::NotFinite {
                        name: name(),
                        index,
                        found: value,
                    },
                    source => LoadError::Weights {
                        name: name(),
                        source,
                    },
                }
            })
        }
        WeightData::Ternary { scale, .. } if !scale.is_finite() => Err(LoadError::BadScale {
            name: name(),
            found: *scale,
        }),
        WeightData::Ternary { .. } => Ok(()),
    }
}

fn vector(
    recipe: &VectorRecipe,
    request: &TensorRequest,
    bytes: &[u8],
) -> Result<Vec<f32>, LoadError> {
    let mut values = vec![0.0; recipe.len];
    decode_row(recipe.dtype, bytes, &mut values).map_err(|source| LoadError::Weights {
        name: request.name.clone(),
        source,
    })?;
    for (index, value) in values.iter_mut().enumerate() {
        *value += recipe.plus;
        if !value.is_finite() {
            return Err(LoadError::NotFinite {
                name: request.name.clone(),
                index,
                found: *value,
            });
        }
    }
    Ok(values)
}

/// The weights of a linear layer in the form a backend takes, repacked on `host` if need be.
fn linear(
    host: &Exec,
    recipe: &LinearRecipe,
    requests: &[TensorRequest],
    parts: Vec<Bytes>,
) -> Result<WeightData, LoadError> {
    let LinearRecipe { n, k, .. } = *recipe;
    let weights_error = |source| LoadError::Weights {
        name: requests[0].name.clone(),
        source,
    };
    let bytes = &parts[0];
    let given_scale = match &recipe.scale {
        Some(scale) => Some(read_scale(scale, &requests[1], &parts[1])?),
        None => None,
    };
    let pack = |layout| {
        let rows = recipe.first_row..recipe.first_row + n;
        repack::repack(host, layout, recipe.n_stored, k, bytes, rows)
            .map(Bytes::from)
            .map_err(weights_error)
    };
    let blocks = |dtype, int8_activations| match given_scale {
        None => Ok(WeightData::Blocks {
            dtype,
            bytes: bytes.clone(),
            int8_activations,
        }),
        Some(_) => Err(LoadError::NoCommonScale {
            name: requests[1].name.clone(),
        }),
    };
    let masters = |dtype| {
        let multiplier =
            repack::absmean_multiplier(host, dtype, n, k, bytes).map_err(weights_error)?;
        Ok(WeightData::Ternary {
            codes: pack(Layout::Masters { dtype, multiplier })?,
            packing: TernaryPacking::Dense,
            scale: given_scale.unwrap_or(1.0) / multiplier,
        })
    };
    match recipe.stored {
        Stored::Blocks(dtype) => blocks(dtype, false),
        Stored::Masters(dtype) => masters(dtype),
        Stored::BitLinear(dtype) => {
            if dtype == DType::TQ2_0
                && let Some(scale) = repack::common_tq2_0_scale(host, bytes)
            {
                return Ok(WeightData::Ternary {
                    codes: bytes.clone(),
                    packing: TernaryPacking::Tq20,
                    scale: scale * given_scale.unwrap_or(1.0),
                });
            }
            let common = repack::common_scale(host, dtype, n, bytes).map_err(weights_error)?;
            match common {
                Some(scale) => Ok(WeightData::Ternary {
                    codes: pack(ternary_layout(dtype, scale))?,
                    packing: TernaryPacking::Dense,
                    scale: scale * given_scale.unwrap_or(1.0),
                }),
                None if is_float(dtype) => masters(dtype),
                None => blocks(dtype, true),
            }
        }
        Stored::Packed => Ok(WeightData::Ternary {
            codes: pack(Layout::HuggingFace)?,
            packing: TernaryPacking::Dense,
            scale: given_scale.unwrap_or(1.0),
        }),
        Stored::I2s(layout) => {
            let in_place = layout == I2sLayout::Block128 && row_bytes(k) * 4 == k;
            let codes = if in_place {
                let stride = row_bytes(k);
                let codes = bytes.slice(recipe.first_row * stride..(recipe.first_row + n) * stride);
                repack::check_codes(host, n, k, &codes).map_err(weights_error)?;
                codes
            } else {
                pack(Layout::I2S(layout))?
            };
            Ok(WeightData::Ternary {
                codes,
                packing: TernaryPacking::Dense,
                scale: given_scale.unwrap_or(1.0),
            })
        }
    }
}

/// Blocks of another type made of `weights`.
fn encode(
    host: &Exec,
    recipe: &LinearRecipe,
    weights: &WeightData,
    to: DType,
) -> Result<WeightData, QuantError> {
    let WeightData::Blocks { dtype, bytes, .. } = weights else {
        unreachable!("`ModelPlan::with_head` takes heads that are blocks only");
    };
    let bytes = requantize(host, recipe.n, recipe.k, *dtype, bytes, to)?;
    Ok(WeightData::Blocks {
        dtype: to,
        bytes: bytes.into(),
        int8_activations: false,
    })
}

/// Packed checkpoints disagree on whether scales multiply or divide. A weight is worth much less than
/// one in any trained model, so a scale above it says that the configuration is wrong about that.
fn odd_scale(
    recipe: &LinearRecipe,
    requests: &[TensorRequest],
    weights: &WeightData,
) -> Option<String> {
    match weights {
        WeightData::Ternary { scale, .. } if recipe.stored == Stored::Packed && *scale > 1.0 => {
            Some(format!(
                "tensor `{}`: weights are worth ±{scale} each; does the configuration's \
                 linear_class say rightly whether scales multiply or divide?",
                requests[0].name
            ))
        }
        _ => None,
    }
}

fn ternary_layout(dtype: DType, scale: f32) -> Layout {
    match dtype {
        DType::TQ1_0 | DType::TQ2_0 => Layout::Blocks(dtype),
        _ => Layout::Values { dtype, scale },
    }
}

fn read_scale(
    recipe: &ScaleRecipe,
    request: &TensorRequest,
    bytes: &[u8],
) -> Result<f32, LoadError> {
    let mut value = [0.0];
    decode_row(recipe.dtype, bytes, &mut value).map_err(|source| LoadError::Weights {
        name: request.name.clone(),
        source,
    })?;
    let scale = if recipe.divides {
        1.0 / value[0]
    } else {
        value[0]
    };
    if scale.is_finite() && scale > 0.0 {
        Ok(scale)
    } else {
        Err(LoadError::BadScale {
            name: request.name.clone(),
            found: value[0],
        })
    }
}
