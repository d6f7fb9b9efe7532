//! Replacing groups of a model's weights while it runs.

use std::sync::Arc;

use bytes::Bytes;

use crate::backend::Backend;
use crate::config::ModelConfig;
use crate::load::{LoadError, WeightFeed};
use crate::model::Model;
use crate::plan::{ModelPlan, TensorRequest};
pub use crate::weight_set::WeightVersions;
pub use crate::weights::Group;
use crate::weights::Layer;

/// Loads groups of weights from another revision of a model, and replaces the old ones.
///
/// Nothing changes until [`Swap::finish`]. Then all groups change at once: a step that has begun finishes
/// with the old weights, and every later one, of any session, uses the new. Keys and values in the caches of
/// sessions stay as the old weights made them; [truncate](crate::Session::truncate) a session to nothing to
/// remove their influence. What only the old weights needed is freed when the last step with them ends.
///
/// A swap that fails or is dropped leaves the model unchanged. Several may be in progress; each changes its
/// own groups only, and of two with the same group the one that finishes last wins.
///
/// ```no_run
/// # use std::sync::Arc;
/// # use sterna_engine::swap::{Group, Swap, SwapError};
/// # use sterna_engine::{Cpu, Model, ModelPlan};
/// # fn swap(
/// #     model: &Arc<Model<Cpu>>, revision: ModelPlan, file: bytes::Bytes,
/// # ) -> Result<(), SwapError> {
/// let mut swap = Swap::new(model, revision, &[Group::Layer(3)])?;
/// while let Some(want) = swap.wanted() {
///     let range = want.offset as usize..(want.offset + want.len) as usize;
///     swap.feed(file.slice(range))?;
/// }
/// let generation = swap.finish()?;
/// assert_eq!(model.versions().generation, generation);
/// # Ok(())
/// # }
/// ```
pub struct Swap<B: Backend> {
    model: Arc<Model<B>>,
    /// Ascending, each once.
    groups: Vec<Group>,
    feed: WeightFeed<B>,
}

/// Why weights could not be replaced.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SwapError {
    /// No groups to replace.
    #[error("expected groups of weights to replace, found none")]
    NoGroup,
    /// A layer that the model doesn't have.
    #[error("layer {found}: expected one below {n_layers}")]
    UnknownLayer {
        /// Layers of the model.
        n_layers: usize,
        /// The requested layer.
        found: usize,
    },
    /// An expert that the layer doesn't have.
    #[error("expert {found} of layer {layer}: expected one below {n_experts}")]
    UnknownExpert {
        /// The layer.
        layer: usize,
        /// Its experts.
        n_experts: usize,
        /// The requested expert.
        found: usize,
    },
    /// A revision of another shape.
    #[error("{what} of the revision: expected {expected} as in the running model, found {found}")]
    Config {
        /// The value that differs.
        what: &'static str,
        /// What the model has.
        expected: String,
        /// What the revision has.
        found: String,
    },
    /// Weights that could not be loaded.
    #[error(transparent)]
    Load(#[from] LoadError),
}

impl<B: Backend> Swap<B> {
    /// Begins to replace `groups` of `model` by those of the revision described by `plan`. Shapes and
    /// constants must be the same; types of weights may differ.
    ///
    /// Errors: [`SwapError`] names the missing group, or the value that differs.
    pub fn new(
        model: &Arc<Model<B>>,
        plan: ModelPlan,
        groups: &[Group],
    ) -> Result<Swap<B>, SwapError> {
        let mut groups = groups.to_vec();
        groups.sort();
        groups.dedup();
        if groups.is_empty() {
            return Err(SwapError::NoGroup);
        }
        let whole = groups.clone();
        groups.retain(|group| !whole.iter().any(|w| w != group && w.includes(*group)));
        let n_layers = model.config.n_layers;
        for group in &groups {
            match *group {
                Group::Layer(found) | Group::Expert { layer: found, .. } if found >= n_layers => {
                    return Err(SwapError::UnknownLayer { n_layers, found });
                }
                Group::Expert {
                    layer,
                    expert: found,
                } => {
                    // That both have as many is compared below.
                    let experts = plan.weights.layers.get(layer).and_then(Layer::experts);
                    let n_experts = experts.map_or(0, |experts| experts.gate.len());
                    if found >= n_experts {
                        return Err(SwapError::UnknownExpert {
                            layer,
                            n_experts,
                            found,
                        });
                    }
                }
                _ => {}
            }
        }
        if plan.rope_factors.is_none() {
            compare(&model.config, &plan.config)?;
        }
        expect_same(
            "output head",
            head(model.current().is_tied()),
            head(plan.weights.output.is_none()),
        )?;
        Ok(Swap {
            model: Arc::clone(model),
            feed: WeightFeed::of_groups(plan, model.backend(), &groups),
            groups,
        })
    }

    /// The range of the revision to feed next; `None` once everything has been fed.
    pub fn wanted(&self) -> Option<&TensorRequest> {
        self.feed.wanted()
    }

    /// Feeds the bytes of the range named by [`Swap::wanted`]. Unlike a [`Loader`](crate::Loader), it checks
    /// all weights for NaN and infinity: a serving model must not start to produce garbage.
    ///
    /// Errors: [`LoadError`] names the tensor at fault.
    pub fn feed(&mut self, bytes: Bytes) -> Result<(), LoadError> {
        self.feed.feed(self.model.backend(), bytes)
    }

    /// Suspicious but possibly correct properties of the weights so far.
    pub fn warnings(&self) -> &[String] {
        self.feed.warnings()
    }

    /// Publishes the new weights, once everything requested has been fed; returns the number of their
    /// generation.
    ///
    /// Errors: [`LoadError::Incomplete`] if something is missing; [`SwapError::Config`] if the revision's
    /// rotary embeddings turn out to differ.
    pub fn finish(mut self) -> Result<u64, SwapError> {
        self.feed.expect_complete()?;
        compare(&self.model.config, &self.feed.config()?)?;
        let groups: Vec<_> = (self.groups.iter())
            .map(|group| self.feed.group(*group))
            .collect();
        let backend = self.model.backend();
        let published = self.model.publish(|next| {
            (groups.into_iter()).try_fold(next, |next, group| next.with(group, backend))
        });
        Ok(published.map_err(LoadError::from)?)
    }
}

fn head(tied: bool) -> &'static str {
    match tied {
        true => "the embedding table",
        false => "a matrix of its own",
    }
}

fn expect_same<T: PartialEq + std::fmt::Debug>(
    what: &'static str,
    expected: T,
    found: T,
) -> Result<(), SwapError> {
    if expected == found {
        return Ok(());
    }
    Err(SwapError::Config {
        what,
        expected: format!("{expected:?}"),
        found: format!("{found:?}"),
    })
}

/// Fails if `found` differs from the model's own configuration.
fn compare(expected: &ModelConfig, found: &ModelConfig) -> Result<(), SwapError> {
    macro_rules! each {
        ($($field:ident)*) => {{
            // A field that isn't compared is an error here.
            let ModelConfig { family, layers, ropes, $($field),* } = expected;
            $(expect_same(stringify!($field), $field, &found.$field)?;)*
            expect_same("family", family.name, found.family.name)?;
            expect_same("layers", layers.len(), found.layers.len())?;
            for pair in layers.iter().zip(&found.layers) {
                expect_same("settings of a layer", pair.0, pair.1)?;
            }
            expect_same("ropes", ropes, &found.ropes)
        }};
    }
    each!(
        n_layers model_dim n_heads n_kv_heads head_dim ffn_dim n_vocab max_ctx norm_eps
        input_norm_eps embed_scale activation attn_scale attn_softcap logit_softcap experts conv_taps
        delta hadamard ssm mamba rwkv multipliers latent residual_scale logit_scale wide_heads n_sharing
        layer_input_dim wide_networks
    )
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Weak;

    use sterna_format::gguf::{self, Gguf};
    use sterna_kernels::Isa;

    use super::*;
    use crate::plan::PlanOptions;
    use crate::{Cpu, Loader};

    /// Bytes, and a guard that lives as long.
    struct Tracked(Bytes, #[allow(dead_code)] Arc<()>);

    impl AsRef<[u8]> for Tracked {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    #[test]
    fn readers_in_flight_keep_the_old_weights_alive() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../testdata/reference-gguf/llama-q8-0/model.gguf");
        let file = Bytes::from(std::fs::read(path).unwrap());
        let parsed = Gguf::parse(&file, file.len() as u64).unwrap();
        let (metadata, tensors) = gguf::Model::from_parts(vec![parsed]).unwrap().into_parts();
        let plan = || ModelPlan::from_gguf(&metadata, &tensors, &PlanOptions::default()).unwrap();
        let bytes = |want: &TensorRequest| {
            file.slice(want.offset as usize..(want.offset + want.len) as usize)
        };
        let mut of_layer: Vec<Weak<()>> = Vec::new();
        // A level that multiplies blocks as they are given.
        let mut loader = Loader::new(plan(), Cpu::new(1, Isa::SCALAR));
        while let Some(want) = loader.wanted() {
            let token = Arc::new(());
            if want.name.starts_with("blk.0.ffn") && !want.name.contains("norm") {
                of_layer.push(Arc::downgrade(&token));
            }
            let bytes = Bytes::from_owner(Tracked(bytes(want), token));
            loader.feed(bytes).unwrap();
        }
        let model = loader.finish().unwrap();
        let alive = || {
            of_layer
                .iter()
                .filter(|token| token.strong_count() > 0)
                .count()
        };
        assert_eq!((of_layer.len(), alive()), (3, 3));

        let (first_reader, second_reader) = (model.current(), model.current());
        let mut swap = Swap::new(&model, plan(), &[Group::Layer(0)]).unwrap();
        while let Some(want) = swap.wanted() {
            let bytes = bytes(want);
            swap.feed(bytes).unwrap();
        }
        assert_eq!(swap.finish().unwrap(), 1);
        let late_reader = model.current();
        assert_eq!((first_reader.number(), late_reader.number()), (0, 1));
        drop(first_reader);
        assert_eq!(alive(), 3);
        drop(second_reader);
        assert_eq!(alive(), 0);
    }
}
