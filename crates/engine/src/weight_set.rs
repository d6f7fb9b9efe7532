//! A snapshot of a model's weights, in groups that are replaced one by one.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::backend::{Backend, BackendError, ExpertMatrices};
use crate::screening::Screening;
use crate::weights::{Group, Layer, LayerInputs, Norm, Positions, Projection};

/// All weights of a model. Generations share unchanged groups.
pub(crate) struct WeightSet<B: Backend> {
    number: u64,
    embedding: Versioned<Embedding<B>>,
    layers: Vec<Versioned<Layer<B::Linear, B::Vector>>>,
    head: Versioned<Head<B>>,
    /// Experts that were replaced after their layer, and the generation that did so last.
    experts: BTreeMap<Group, u64>,
}

/// Which weights a model computes with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightVersions {
    /// How often weights have been replaced: 0 for a model as it was loaded.
    pub generation: u64,
    /// For each group, the generation that replaced it last; of experts only those that were replaced without their
    /// layer.
    pub groups: Vec<(Group, u64)>,
}

/// A group, and the generation that replaced it last.
struct Versioned<T> {
    since: u64,
    weights: Arc<T>,
}

impl<T> Versioned<T> {
    fn new(since: u64, weights: T) -> Versioned<T> {
        Versioned {
            since,
            weights: Arc::new(weights),
        }
    }
}

impl<T> Clone for Versioned<T> {
    fn clone(&self) -> Versioned<T> {
        Versioned {
            since: self.since,
            weights: Arc::clone(&self.weights),
        }
    }
}

/// The weights of [`Group::Embedding`].
pub(crate) struct Embedding<B: Backend> {
    /// `[n_vocab, model_dim]`.
    pub(crate) token_embd: B::Linear,
    pub(crate) layer_inputs: Option<LayerInputs<B::Linear, B::Vector>>,
    pub(crate) positions: Option<Positions<B::Linear, B::Vector>>,
    /// The matrix that computes logits, if that is the same table.
    pub(crate) output: Option<Output<B>>,
}

/// The weights of [`Group::Head`].
pub(crate) struct Head<B: Backend> {
    /// `[model_dim]`.
    pub(crate) output_norm: Option<Norm<B::Vector>>,
    /// The matrix that computes logits, if that isn't the embedding table.
    pub(crate) output: Option<Output<B>>,
}

/// The matrix that computes logits.
pub(crate) struct Output<B: Backend> {
    /// `[n_vocab, model_dim]`; the embedding table if `None`.
    pub(crate) projection: Option<Projection<B::Linear, B::Vector>>,
    pub(crate) screening: Option<Screening<B::Screen>>,
}

/// New weights of one group.
pub(crate) enum NewGroup<B: Backend> {
    Embedding(Embedding<B>),
    Layer(usize, Layer<B::Linear, B::Vector>),
    /// Of an expert of a layer, gate, up and down.
    Expert(usize, usize, [B::Linear; 3]),
    Head(Head<B>),
}

impl<B: Backend> WeightSet<B> {
    /// The weights of a model as loaded. Exactly one of `embedding` and `head` has an output.
    pub(crate) fn first(
        embedding: Embedding<B>,
        layers: Vec<Layer<B::Linear, B::Vector>>,
        head: Head<B>,
    ) -> WeightSet<B> {
        WeightSet {
            number: 0,
            embedding: Versioned::new(0, embedding),
            layers: layers.into_iter().map(|l| Versioned::new(0, l)).collect(),
            head: Versioned::new(0, head),
            experts: BTreeMap::new(),
        }
    }

    /// The generation after this one, with the same weights.
    pub(crate) fn next(&self) -> WeightSet<B> {
        WeightSet {
            number: self.number + 1,
            embedding: self.embedding.clone(),
            layers: self.layers.clone(),
            head: self.head.clone(),
            experts: self.experts.clone(),
        }
    }

    /// This generation with other weights in one group. The layer exists, as does the expert, and the group has an
    /// output if it had one.
    ///
    /// Errors: the backend can't have the expert beside the others: there is no memory, or it has another type.
    pub(crate) fn with(
        mut self,
        group: NewGroup<B>,
        backend: &B,
    ) -> Result<WeightSet<B>, BackendError> {
        let since = self.number;
        match group {
            NewGroup::Embedding(weights) => self.embedding = Versioned::new(since, weights),
            NewGroup::Layer(i, weights) => {
                self.experts
                    .retain(|expert, _| !Group::Layer(i).includes(*expert));
                self.layers[i] = Versioned::new(since, weights);
            }
            NewGroup::Expert(layer, expert, matrices) => {
                let weights = self.layers[layer].weights.as_ref();
                let weights = with_expert(weights, expert, matrices, backend)?;
                self.layers[layer].weights = Arc::new(weights);
                self.experts.insert(Group::Expert { layer, expert }, since);
            }
            NewGroup::Head(weights) => self.head = Versioned::new(since, weights),
        }
        Ok(self)
    }

    pub(crate) fn number(&self) -> u64 {
        self.number
    }

    pub(crate) fn versions(&self) -> WeightVersions {
        let mut groups = vec![(Group::Embedding, self.embedding.since)];
        let layers = self.layers.iter().enumerate();
        groups.extend(layers.map(|(i, layer)| (Group::Layer(i), layer.since)));
        groups.extend(self.experts.iter().map(|(expert, since)| (*expert, *since)));
        groups.push((Group::Head, self.head.since));
        WeightVersions {
            generation: self.number,
            groups,
        }
    }

    /// What rows are made of.
    pub(crate) fn embedding(&self) -> &Embedding<B> {
        &self.embedding.weights
    }

    /// `[n_vocab, model_dim]`.
    pub(crate) fn token_embd(&self) -> &B::Linear {
        &self.embedding().token_embd
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Layer<B::Linear, B::Vector>> {
        self.layers.iter().map(|layer| &*layer.weights)
    }

    /// `[model_dim]`.
    pub(crate) fn output_norm(&self) -> Option<&Norm<B::Vector>> {
        self.head.weights.output_norm.as_ref()
    }

    /// Whether the embedding table computes logits.
    pub(crate) fn is_tied(&self) -> bool {
        self.head.weights.output.is_none()
    }

    /// The matrix that computes logits.
    pub(crate) fn output(&self) -> &Output<B> {
        let own = self.head.weights.output.as_ref();
        own.or(self.embedding.weights.output.as_ref())
            .expect("a model has logits, from one group or the other")
    }
}

/// `layer`, a mixture, with other matrices of one of its experts.
fn with_expert<B: Backend>(
    layer: &Layer<B::Linear, B::Vector>,
    expert: usize,
    [gate, up, down]: [B::Linear; 3],
    backend: &B,
) -> Result<Layer<B::Linear, B::Vector>, BackendError> {
    let mut layer = layer.clone();
    let Some(experts) = layer.experts_mut() else {
        return Ok(layer);
    };
    experts.gate[expert] = gate;
    experts.up[expert] = up;
    experts.down[expert] = down;
    backend.join_experts(&mut ExpertMatrices {
        gate: experts.gate.iter_mut().collect(),
        up: experts.up.iter_mut().collect(),
        down: experts.down.iter_mut().collect(),
    })?;
    Ok(layer)
}
