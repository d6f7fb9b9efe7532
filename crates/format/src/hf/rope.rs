//! Rotary position parameters in the spellings of Transformers 4 (`rope_theta`, `rope_scaling`) and
//! 5 (`rope_parameters`).

use std::collections::BTreeMap;

use super::ConfigError;
use super::node::Node;

/// Models have two at most.
const MAX_LAYER_TYPES: usize = 64;

/// How positions are rotated, and how the context is stretched.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct RopeParameters {
    /// `rope_type`, in older files `type`: `default`, `linear`, `dynamic`, `llama3`, `yarn`,
    /// `longrope` or its older name `su`.
    pub rope_type: Option<String>,
    /// Base of the rotation frequencies.
    pub rope_theta: Option<f64>,
    /// Factor by which the context is stretched.
    pub factor: Option<f64>,
    /// `llama3`: frequencies below `original length / low_freq_factor` are stretched in full.
    pub low_freq_factor: Option<f64>,
    /// `llama3`: frequencies above `original length / high_freq_factor` are left alone.
    pub high_freq_factor: Option<f64>,
    /// Context length before stretching.
    pub original_max_position_embeddings: Option<usize>,
    /// `yarn`, `longrope`: what attention logits are scaled by; derived from `factor` if absent.
    pub attention_factor: Option<f64>,
    /// `yarn`: rotations at which extrapolation ends.
    pub beta_fast: Option<f64>,
    /// `yarn`: rotations at which interpolation starts.
    pub beta_slow: Option<f64>,
    /// `yarn`: numerator of the attention factor.
    pub mscale: Option<f64>,
    /// `yarn`: denominator of the attention factor.
    pub mscale_all_dim: Option<f64>,
    /// `yarn`: whether the correction range is rounded to whole dimensions.
    pub truncate: Option<bool>,
    /// `longrope`: one factor a frequency, for sequences up to the original length.
    pub short_factor: Option<Vec<f64>>,
    /// `longrope`: one factor a frequency, for longer sequences.
    pub long_factor: Option<Vec<f64>>,
    /// Share of a head's dimensions that rotate.
    pub partial_rotary_factor: Option<f64>,
}

impl RopeParameters {
    fn read(node: &Node<'_>) -> Result<RopeParameters, ConfigError> {
        node.expect_object()?;
        let f64 = |key: &str| node.get(key).map(|n| n.f64()).transpose();
        let f64s = |key: &str| node.get(key).map(|n| n.list(Node::f64)).transpose();
        let rope_type = node.get("rope_type").or_else(|| node.get("type"));
        Ok(RopeParameters {
            rope_type: rope_type.map(|n| n.str()).transpose()?,
            rope_theta: f64("rope_theta")?,
            factor: f64("factor")?,
            low_freq_factor: f64("low_freq_factor")?,
            high_freq_factor: f64("high_freq_factor")?,
            original_max_position_embeddings: node
                .get("original_max_position_embeddings")
                .map(|n| n.count())
                .transpose()?,
            attention_factor: f64("attention_factor")?,
            beta_fast: f64("beta_fast")?,
            beta_slow: f64("beta_slow")?,
            mscale: f64("mscale")?,
            mscale_all_dim: f64("mscale_all_dim")?,
            truncate: node.get("truncate").map(|n| n.bool()).transpose()?,
            short_factor: f64s("short_factor")?,
            long_factor: f64s("long_factor")?,
            partial_rotary_factor: f64("partial_rotary_factor")?,
        })
    }
}

/// `rope_parameters` or `rope_scaling`: one for all layers, or one for each type of layer.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum RopeSet {
    /// The same for every layer.
    Uniform(Box<RopeParameters>),
    /// By the names that `layer_types` uses, such as `sliding_attention`.
    PerLayerType(BTreeMap<String, RopeParameters>),
}

impl RopeSet {
    pub(super) fn read(node: &Node<'_>) -> Result<RopeSet, ConfigError> {
        let nested = |n: &Node<'_>| n.is_object() && n.get("__float__").is_none();
        if !node.members()?.any(|(_, member)| nested(&member)) {
            return RopeParameters::read(node).map(|rope| RopeSet::Uniform(Box::new(rope)));
        }
        let n = node.members()?.count();
        if n > MAX_LAYER_TYPES {
            return node.refuse(
                "parameters of at most 64 layer types",
                format!("{n} members"),
            );
        }
        // A value next to the layer types would be one for all of them, which no version writes:
        // reading it as parameters of a layer type is an error.
        let read = |(name, member): (&str, Node<'_>)| {
            Ok((name.to_owned(), RopeParameters::read(&member)?))
        };
        let map: Result<_, _> = node.members()?.map(read).collect();
        map.map(RopeSet::PerLayerType)
    }

    /// The parameters of layers of type `layer_type`.
    pub fn get(&self, layer_type: &str) -> Option<&RopeParameters> {
        match self {
            RopeSet::Uniform(rope) => Some(rope),
            RopeSet::PerLayerType(map) => map.get(layer_type),
        }
    }
}
