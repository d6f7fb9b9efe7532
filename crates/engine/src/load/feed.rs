//! Building weights as their bytes arrive, and putting them in their places.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use sterna_kernels::quant::QuantError;

use super::rows::ByRows;
use super::{LoadError, expect_wanted, recipe};
use crate::backend::{Backend, BackendError, ExpertMatrices, LinearSource, WeightData};
use crate::config::ModelConfig;
use crate::plan::{
    self, LinearId, LinearRecipe, ModelPlan, Recipe, RopeFactors, TensorRequest, VectorId,
};
use crate::screening::Screening;
use crate::weight_set::{Embedding, Head, NewGroup, Output, WeightSet};
use crate::weights::{
    Attention, Convert, DeltaNet, Dense, FeedForward, Group, Layer, Mixer, Projection,
};

/// Builds weights from their bytes, some or all of a plan.
pub(crate) struct WeightFeed<B: Backend> {
    plan: ModelPlan,
    /// The requested weights of the plan, ascending.
    order: Vec<usize>,
    /// How many of these have been built.
    n_made: usize,
    /// Parts of the next weight that have arrived.
    parts: Vec<Bytes>,
    /// The next weight, if it is loaded by rows.
    by_rows: Option<ByRows<B::Linear>>,
    /// The group of each of the plan's weights; `None` for those that the engine itself keeps.
    group_of: Vec<Option<Group>>,
    /// Weights of the current group: to be loaded together, or loaded.
    sources: Vec<Source>,
    placed: Vec<Placed<B>>,
    /// Of all weights of the plan, those that have been built and not put in their places.
    loaded: Vec<Option<Loaded<B>>>,
    /// Those in their places: the embedding table, and the layers that are complete.
    embedding: Option<Embedding<B>>,
    layers: Vec<Option<Layer<B::Linear, B::Vector>>>,
    /// The output head in another type, where the table it is made from is kept too.
    made_head: Option<B::Linear>,
    screen: Option<B::Screen>,
    /// Whether all weights are checked for NaN and infinity.
    thorough: bool,
    warnings: Vec<String>,
}

/// A weight in the form passed to the backend, and its index in the plan.
enum Source {
    Linear(usize, LinearSource),
    Vector(usize, Vec<f32>),
    /// The matrix that computes logits, and the same in another type if that is to be made of it.
    Head(usize, LinearSource, Option<LinearSource>),
}

/// What a [`Source`] became.
struct Placed<B: Backend> {
    id: usize,
    loaded: Loaded<B>,
    made_head: Option<B::Linear>,
    screen: Option<Result<B::Screen, BackendError>>,
}

impl<B: Backend> Placed<B> {
    fn new(id: usize, loaded: Loaded<B>) -> Placed<B> {
        Placed {
            id,
            loaded,
            made_head: None,
            screen: None,
        }
    }
}

/// Tells `backend` that the matrices `ids` of `placed` read the same input.
fn join<B: Backend>(
    backend: &B,
    placed: &mut [Placed<B>],
    ids: &[usize],
) -> Result<(), BackendError> {
    backend.join(&mut matrices(placed, ids))
}

/// Tells `backend` that the matrices `gate`, `up` and `down` of `placed` are those of a mixture of experts.
fn join_experts<B: Backend>(
    backend: &B,
    placed: &mut [Placed<B>],
    [gate, up, down]: &[Vec<usize>; 3],
) -> Result<(), BackendError> {
    let all: Vec<usize> = [gate, up, down].into_iter().flatten().copied().collect();
    let mut gate_and_on = matrices(placed, &all);
    let mut up_and_on = gate_and_on.split_off(gate.len().min(gate_and_on.len()));
    let down = up_and_on.split_off(up.len().min(up_and_on.len()));
    backend.join_experts(&mut ExpertMatrices {
        gate: gate_and_on,
        up: up_and_on,
        down,
    })
}

/// Tells `backend` that the matrices `ids` of `placed` are those of heads.
fn join_heads<B: Backend>(
    backend: &B,
    placed: &mut [Placed<B>],
    ids: &[usize],
) -> Result<(), BackendError> {
    backend.join_heads(&mut matrices(placed, ids))
}

/// The matrices `ids` of `placed`, in this order.
fn matrices<'a, B: Backend>(placed: &'a mut [Placed<B>], ids: &[usize]) -> Vec<&'a mut B::Linear> {
    let places: HashMap<usize, usize> = ids.iter().copied().zip(0..).collect();
    let mut matrices: Vec<(usize, &mut B::Linear)> = Vec::with_capacity(ids.len());
    for Placed { id, loaded, .. } in placed {
        if let (Some(at), Loaded::Linear(linear)) = (places.get(id), loaded) {
            matrices.push((*at, linear));
        }
    }
    matrices.sort_by_key(|(at, _)| *at);
    matrices.into_iter().map(|(_, matrix)| matrix).collect()
}

enum Loaded<B: Backend> {
    Linear(B::Linear),
    Vector(B::Vector),
    Host(Vec<f32>),
}

impl<B: Backend> WeightFeed<B> {
    fn new(
        plan: ModelPlan,
        backend: &B,
        groups: &[Group],
        order: Vec<usize>,
        thorough: bool,
    ) -> WeightFeed<B> {
        let mut loaded = Vec::new();
        loaded.resize_with(plan.specs.len(), || None);
        let mut complete = Vec::new();
        complete.resize_with(plan.weights.layers.len(), || None);
        let mut group_of = vec![None; plan.specs.len()];
        for group in groups {
            for id in Ids::of(&plan, *group).0 {
                group_of[id] = Some(*group);
            }
        }
        let mut feed = WeightFeed {
            plan,
            group_of,
            sources: Vec::new(),
            placed: Vec::new(),
            order,
            n_made: 0,
            parts: Vec::new(),
            by_rows: None,
            loaded,
            embedding: None,
            layers: complete,
            made_head: None,
            screen: None,
            thorough,
            warnings: Vec::new(),
        };
        feed.begin_next(backend);
        feed
    }

    /// All weights.
    pub(crate) fn of_all(plan: ModelPlan, backend: &B) -> WeightFeed<B> {
        let all = (0..plan.specs.len()).collect();
        let layers = (0..plan.weights.layers.len()).map(Group::Layer);
        let groups: Vec<Group> = layers.chain([Group::Embedding, Group::Head]).collect();
        WeightFeed::new(plan, backend, &groups, all, false)
    }

    /// The weights of `groups`, which the plan has, and what the configuration depends on.
    pub(crate) fn of_groups(plan: ModelPlan, backend: &B, groups: &[Group]) -> WeightFeed<B> {
        let mut ids = Ids::default();
        match plan.rope_factors {
            Some(RopeFactors::One(factors)) => ids.0.push(factors.0),
            Some(RopeFactors::ShortAndLong { short, long, .. }) => ids.0.extend([short.0, long.0]),
            None => {}
        }
        for group in groups {
            ids.0.extend(Ids::of(&plan, *group).0);
        }
        let Ids(mut order) = ids;
        order.sort_unstable();
        WeightFeed::new(plan, backend, groups, order, true)
    }

    /// The range to feed next; `None` once everything has been fed.
    pub(crate) fn wanted(&self) -> Option<&TensorRequest> {
        if let Some(by_rows) = &self.by_rows {
            return Some(by_rows.wanted());
        }
        let spec = &self.plan.specs[*self.order.get(self.n_made)?];
        Some(&spec.parts[self.parts.len()])
    }

    /// Decides whether the next weight is loaded by rows.
    fn begin_next(&mut self, backend: &B) {
        let next = self.order.get(self.n_made).copied();
        let is_plain = |id: &usize| {
            *id != self.plan.head_id().0
                || (self.plan.head.dtype.is_none() && self.plan.head.screen.is_none())
        };
        self.by_rows = next
            .filter(|_| backend.loads_rows() && !backend.loads_by_group())
            .filter(is_plain)
            .and_then(|id| ByRows::of(&self.plan, &self.plan.specs[id]));
    }

    /// Feeds the bytes of the range named by [`WeightFeed::wanted`].
    pub(crate) fn feed(&mut self, backend: &B, bytes: Bytes) -> Result<(), LoadError> {
        expect_wanted(self.wanted(), &bytes)?;
        let id = self.order[self.n_made];
        match &mut self.by_rows {
            Some(by_rows) => match by_rows.feed(backend, bytes, self.thorough)? {
                Some(linear) => self.placed.push(Placed::new(id, Loaded::Linear(linear))),
                None => return Ok(()),
            },
            None => {
                self.parts.push(bytes);
                if self.parts.len() < self.plan.specs[id].parts.len() {
                    return Ok(());
                }
                self.make(backend, id)?;
            }
        }
        self.n_made += 1;
        self.begin_next(backend);
        let next = (self.order.get(self.n_made)).and_then(|id| self.group_of[*id]);
        match self.group_of[id] {
            Some(group) if next != Some(group) => self.load_group(backend, group),
            _ => Ok(()),
        }
    }

    /// Makes weight `id` of its parts, which have all arrived.
    fn make(&mut self, backend: &B, id: usize) -> Result<(), LoadError> {
        let parts = std::mem::take(&mut self.parts);
        let spec = &self.plan.specs[id];
        let source = match &spec.recipe {
            Recipe::Vector(recipe) => {
                let values = recipe::vector(recipe, &spec.parts[0], &parts[0])?;
                Source::Vector(id, values)
            }
            Recipe::HostVector(recipe) => {
                let values = recipe::vector(recipe, &spec.parts[0], &parts[0])?;
                self.loaded[id] = Some(Loaded::Host(values));
                return Ok(());
            }
            Recipe::Linear(recipe) => {
                let weights = recipe::linear(backend.host(), recipe, &spec.parts, parts)?;
                let name = spec.parts[0].name_in_file();
                if self.thorough {
                    recipe::check_finite(backend.host(), recipe, name, &weights)?;
                }
                (self.warnings).extend(recipe::odd_scale(recipe, &spec.parts, &weights));
                let recipe = *recipe;
                if self.plan.head_id().0 == id {
                    self.head_source(backend, &recipe, weights)?
                } else {
                    let weights = recipe::unpacked(backend.host(), &recipe, weights)
                        .map_err(|source| weights_error(name, source))?;
                    Source::Linear(id, linear_source(&self.plan, &recipe, weights))
                }
            }
        };
        match backend.loads_by_group() {
            true => self.sources.push(source),
            false => self.placed.push(source.load(backend, self.plan.head)?),
        }
        Ok(())
    }

    /// The matrix that computes logits, and what [`ModelPlan::with_head`] decided to make of it.
    fn head_source(
        &self,
        backend: &B,
        recipe: &LinearRecipe,
        mut weights: WeightData,
    ) -> Result<Source, LoadError> {
        let id = self.plan.head_id().0;
        let mut made = None;
        if let Some(dtype) = self.plan.head.dtype {
            let head = recipe::encode(backend.host(), recipe, &weights, dtype)
                .map_err(|source| weights_error(&self.head_name(), source))?;
            if self.plan.weights.output.is_some() {
                weights = head;
            } else {
                made = Some(linear_source(&self.plan, recipe, head));
            }
        }
        let weights = recipe::unpacked(backend.host(), recipe, weights)
            .map_err(|source| weights_error(&self.head_name(), source))?;
        Ok(Source::Head(
            id,
            linear_source(&self.plan, recipe, weights),
            made,
        ))
    }

    fn head_name(&self) -> String {
        self.plan.specs[self.plan.head_id().0].parts[0]
            .name_in_file()
            .to_owned()
    }

    /// Loads the weights that have arrived, which are all of `group`, and puts them in their places.
    fn load_group(&mut self, backend: &B, group: Group) -> Result<(), LoadError> {
        let (siblings, experts) = (self.siblings(group), self.experts(group));
        let heads = self.heads(group);
        let joined = |backend: &B, mut placed: Vec<Placed<B>>| {
            for ids in &siblings {
                join(backend, &mut placed, ids)?;
            }
            if let Some(ids) = &experts {
                join_experts(backend, &mut placed, ids)?;
            }
            for ids in &heads {
                join_heads(backend, &mut placed, ids)?;
            }
            Ok::<_, BackendError>(placed)
        };
        let placed = if backend.loads_by_group() {
            let (sources, head) = (std::mem::take(&mut self.sources), self.plan.head);
            backend.load_group(group, |backend| {
                let placed = sources.iter().map(|source| source.load(backend, head));
                joined(backend, placed.collect::<Result<_, _>>()?)
            })?
        } else {
            joined(backend, std::mem::take(&mut self.placed))?
        };
        for Placed {
            id,
            loaded,
            made_head,
            screen,
        } in placed
        {
            self.loaded[id] = Some(loaded);
            self.made_head = made_head.or(self.made_head.take());
            match screen {
                Some(Ok(screen)) => self.screen = Some(screen),
                Some(Err(error)) => {
                    let name = self.head_name();
                    let warning = format!("tensor `{name}`: no screen of the head: {error}");
                    self.warnings.push(warning);
                    self.plan.head.screen = None;
                }
                None if id == self.plan.head_id().0 => self.plan.head.screen = None,
                None => {}
            }
        }
        match group {
            Group::Embedding => self.embedding = Some(self.embedding()),
            Group::Layer(i) => self.layers[i] = Some(self.layer(i)),
            Group::Expert { .. } | Group::Head => {}
        }
        Ok(())
    }

    /// The embedding table, if that has been fed.
    pub(crate) fn complete_embedding(&self) -> Option<&Embedding<B>> {
        self.embedding.as_ref()
    }

    /// Layer `i`, if all of it has been fed.
    pub(crate) fn complete_layer(&self, i: usize) -> Option<&Layer<B::Linear, B::Vector>> {
        self.layers.get(i)?.as_ref()
    }

    pub(crate) fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// Fails if anything requested has not been fed.
    pub(crate) fn expect_complete(&self) -> Result<(), LoadError> {
        match self.wanted() {
            Some(want) => Err(LoadError::Incomplete {
                name: want.name_in_file().to_owned(),
            }),
            None => Ok(()),
        }
    }

    /// The configuration, including what is in tensors, which come before those of any group.
    pub(crate) fn config(&self) -> Result<ModelConfig, LoadError> {
        let mut config = self.plan.config.clone();
        let Some(factors) = self.plan.rope_factors else {
            return Ok(config);
        };
        config.ropes[0].scaling = factors.scaling(|id| match &self.loaded[id.0] {
            Some(Loaded::Host(values)) => values.clone(),
            _ => unreachable!("the planner gave this id to one host vector, and it has been fed"),
        });
        Ok(config.validated()?)
    }

    /// All weights, once everything has been fed.
    pub(crate) fn generation(&mut self) -> WeightSet<B> {
        let embedding = self.embedding();
        let layers = 0..self.plan.weights.layers.len();
        let layers = layers.map(|i| self.layer(i)).collect();
        WeightSet::first(embedding, layers, self.head())
    }

    /// One of the requested groups, once everything has been fed.
    pub(crate) fn group(&mut self, group: Group) -> NewGroup<B> {
        match group {
            Group::Embedding => NewGroup::Embedding(self.embedding()),
            Group::Layer(i) => NewGroup::Layer(i, self.layer(i)),
            Group::Expert { layer, expert } => {
                let ids = expert_ids(&self.plan, layer, expert);
                let ids = ids.expect("checked before any group was requested");
                NewGroup::Expert(
                    layer,
                    expert,
                    ids.map(|id| Take(&mut self.loaded).linear(id)),
                )
            }
            Group::Head => NewGroup::Head(self.head()),
        }
    }

    /// The matrices of `group` that always read the same input, by index in the plan.
    fn siblings(&self, group: Group) -> Vec<Vec<usize>> {
        let Group::Layer(i) = group else {
            return Vec::new();
        };
        let layer = &self.plan.weights.layers[i];
        let mut families = Vec::new();
        if let Some(Attention { q, k, v, .. }) = layer.attention() {
            let all = [Some(q), k.as_ref(), v.as_ref()];
            families.push(all.into_iter().flatten().collect());
        }
        if let Some(FeedForward::Dense(Dense { gate, up, .. })) = layer.network() {
            families.push(vec![gate, up]);
        }
        if let Mixer::DeltaNet(DeltaNet {
            qkv,
            gate,
            alpha,
            beta,
            ..
        }) = &layer.mixer
        {
            families.push(vec![qkv, gate, alpha, beta]);
        }
        if let Mixer::Ssm(ssm) | Mixer::Both(_, ssm) = &layer.mixer {
            families.push(vec![&ssm.gate, &ssm.xbc, &ssm.dt]);
        }
        let plain = families.into_iter().filter(|projections| {
            // Matrices with norms of their own have different inputs.
            projections.iter().all(|p| p.input_norm.is_none())
        });
        plain
            .map(|projections| projections.iter().map(|p| p.weight.0).collect())
            .collect()
    }

    /// The matrices of the experts of `group`, by index in the plan: gates, ups and downs.
    fn experts(&self, group: Group) -> Option<[Vec<usize>; 3]> {
        let Group::Layer(i) = group else {
            return None;
        };
        let experts = self.plan.weights.layers[i].experts()?;
        let of = |ids: &[LinearId]| ids.iter().map(|id| id.0).collect();
        Some([of(&experts.gate), of(&experts.up), of(&experts.down)])
    }

    /// The matrices of the heads of latent attention in `group`: those that are multiplied together.
    fn heads(&self, group: Group) -> Vec<Vec<usize>> {
        let Group::Layer(i) = group else {
            return Vec::new();
        };
        let Mixer::Latent(latent) = &self.plan.weights.layers[i].mixer else {
            return Vec::new();
        };
        let of = |ids: &[LinearId]| ids.iter().map(|id| id.0).collect();
        vec![of(&latent.k_up), of(&latent.v_up)]
    }

    fn embedding(&mut self) -> Embedding<B> {
        if let Some(complete) = self.embedding.take() {
            return complete;
        }
        let tied = self.plan.weights.output.is_none();
        let projection = self.made_head.take().map(|weight| Projection {
            input_norm: None,
            scale: 1.0,
            weight,
            bias: None,
        });
        Embedding {
            output: tied.then(|| Output {
                projection,
                screening: self.screening(),
            }),
            token_embd: Take(&mut self.loaded).linear(self.plan.weights.token_embd),
            positions: (self.plan.weights.positions.clone())
                .map(|positions| positions.convert(&mut Take(&mut self.loaded))),
            layer_inputs: (self.plan.weights.layer_inputs.clone())
                .map(|inputs| inputs.convert(&mut Take(&mut self.loaded))),
        }
    }

    fn layer(&mut self, i: usize) -> Layer<B::Linear, B::Vector> {
        if let Some(complete) = self.layers[i].take() {
            return complete;
        }
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
            output_norm: (self.plan.weights.output_norm.clone())
                .map(|norm| norm.convert(&mut Take(&mut self.loaded))),
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

/// The indices of weights in a plan.
#[derive(Default)]
struct Ids(Vec<usize>);

impl Ids {
    /// Those of the weights of `group`, which the plan has.
    fn of(plan: &ModelPlan, group: Group) -> Ids {
        let (mut ids, weights) = (Ids::default(), &plan.weights);
        match group {
            Group::Embedding => {
                ids.linear(weights.token_embd);
                if let Some(inputs) = weights.layer_inputs.clone() {
                    inputs.convert(&mut ids);
                }
                if let Some(positions) = weights.positions.clone() {
                    positions.convert(&mut ids);
                }
            }
            Group::Layer(i) => {
                weights.layers[i].clone().convert(&mut ids);
            }
            Group::Expert { layer, expert } => {
                for id in expert_ids(plan, layer, expert).into_iter().flatten() {
                    ids.linear(id);
                }
            }
            Group::Head => {
                if let Some(norm) = weights.output_norm.clone() {
                    norm.convert(&mut ids);
                }
                if let Some(head) = weights.output.clone() {
                    head.convert(&mut ids);
                }
            }
        }
        ids
    }
}

/// The matrices of an expert: gate, up and down.
fn expert_ids(plan: &ModelPlan, layer: usize, expert: usize) -> Option<[LinearId; 3]> {
    let experts = plan.weights.layers.get(layer)?.experts()?;
    let [gate, up, down] = [&experts.gate, &experts.up, &experts.down];
    Some([*gate.get(expert)?, *up.get(expert)?, *down.get(expert)?])
}

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

/// Puts each loaded weight in its place. Every id stands for one weight, of the kind it names.
struct Take<'a, B: Backend>(&'a mut [Option<Loaded<B>>]);

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

impl Source {
    /// Passes the weight to `backend`, and makes the screen of the output head if `head` asks for one.
    fn load<B: Backend>(&self, backend: &B, head: plan::Head) -> Result<Placed<B>, BackendError> {
        match self {
            Source::Linear(id, source) => {
                let linear = backend.load_linear(source.clone())?;
                Ok(Placed::new(*id, Loaded::Linear(linear)))
            }
            Source::Vector(id, values) => {
                let vector = backend.load_vector(values.clone())?;
                Ok(Placed::new(*id, Loaded::Vector(vector)))
            }
            Source::Head(id, source, made) => {
                let linear = backend.load_linear(source.clone())?;
                let made = made.clone().map(|made| backend.load_linear(made));
                let made_head = made.transpose()?;
                let of = made_head.as_ref().unwrap_or(&linear);
                // A model whose screen may fail goes without where there are none, and says nothing of it.
                let wanted =
                    (head.screen).filter(|_| !head.screen_may_fail || backend.has_screen_of(of));
                let screen = match wanted.map(|dtype| backend.load_screen(of, dtype)) {
                    Some(Err(error)) if !head.screen_may_fail => return Err(error),
                    screen => screen,
                };
                Ok(Placed {
                    made_head,
                    screen,
                    ..Placed::new(*id, Loaded::Linear(linear))
                })
            }
        }
    }
}

pub(super) fn weights_error(name: &str, source: QuantError) -> LoadError {
    LoadError::Weights {
        name: name.to_owned(),
        source,
    }
}

/// A matrix as backends take it.
fn linear_source(plan: &ModelPlan, recipe: &LinearRecipe, weights: WeightData) -> LinearSource {
    let LinearRecipe { n, k, rotation, .. } = *recipe;
    LinearSource {
        n,
        k,
        weights,
        rotation: rotation.map(|i| Arc::clone(&plan.rotations[i])),
    }
}
