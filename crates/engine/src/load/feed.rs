//! Making weights as their bytes come in, and taking them to their places.

use bytes::Bytes;

use super::LoadError;
use super::{expect_wanted, recipe};
use crate::backend::{Backend, LinearSource, WeightData};
use crate::config::ModelConfig;
use crate::generation::{Embedding, Generation, Group, Head, NewGroup, Output};
use crate::head::screening::Screening;
use crate::plan::{
    LinearId, LinearRecipe, ModelPlan, Recipe, RopeFactors, TensorRequest, VectorId,
};
use crate::weights::{Convert, Layer, Projection};

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

    /// All weights.
    pub(crate) fn of_all(plan: ModelPlan) -> Feed<B> {
        let all = (0..plan.specs.len()).collect();
        Feed::new(plan, all, false)
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
        expect_wanted(self.wanted(), &bytes)?;
        let id = self.order[self.n_made];
        self.parts.push(bytes);
        let spec = &self.plan.specs[id];
        if self.parts.len() < spec.parts.len() {
            return Ok(());
        }
        let parts = std::mem::take(&mut self.parts);
        let loaded = match &spec.recipe {
            Recipe::Vector(recipe) => {
                let values = recipe::vector(recipe, &spec.parts[0], &parts[0])?;
                Loaded::Vector(backend.load_vector(values)?)
            }
            Recipe::HostVector(recipe) => {
                Loaded::Host(recipe::vector(recipe, &spec.parts[0], &parts[0])?)
            }
            Recipe::Linear(recipe) => {
                let weights = recipe::linear(backend.host(), recipe, &spec.parts, parts)?;
                let name = &spec.parts[0].name;
                if self.thorough {
                    recipe::check_finite(backend.host(), recipe, name, &weights)?;
                }
                (self.warnings).extend(recipe::odd_scale(recipe, &spec.parts, &weights));
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
            let head =
                recipe::encode(backend.host(), recipe, &weights, dtype).map_err(|source| {
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
        config.ropes[0].scaling = factors.scaling(|id| take.host(id));
        Ok(config.validated()?)
    }

    /// All weights, once everything is there.
    pub(crate) fn generation(&mut self) -> Generation<B> {
        let embedding = self.embedding();
        let layers = 0..self.plan.weights.layers.len();
        let layers = layers.map(|i| self.layer(i)).collect();
        Generation::first(embedding, layers, self.head())
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
