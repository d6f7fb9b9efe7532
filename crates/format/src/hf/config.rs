//! `config.json`: what a checkpoint says about its model.

use super::ConfigError;
use super::json::{Json, Node};
use super::rope::{RopeParameters, RopeSet};

/// The facts of `config.json`, under their names there. What the file doesn't say is `None` or
/// empty: defaults depend on the model family.
///
/// A multimodal file nests the language model under `text_config`; its values are taken from there,
/// and from the outer level where the inner one is silent.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct Config {
    /// The family, such as `llama`; of a multimodal file the inner one, such as `gemma3_text`.
    pub model_type: Option<String>,
    /// Transformers classes, such as `LlamaForCausalLM`; of a multimodal file the outer ones.
    pub architectures: Vec<String>,
    pub vocab_size: Option<usize>,
    pub hidden_size: Option<usize>,
    pub intermediate_size: Option<usize>,
    pub num_hidden_layers: Option<usize>,
    pub num_attention_heads: Option<usize>,
    pub num_key_value_heads: Option<usize>,
    pub head_dim: Option<usize>,
    pub max_position_embeddings: Option<usize>,
    /// Context length before stretching, where it stands outside of the RoPE parameters (phi3).
    pub original_max_position_embeddings: Option<usize>,
    pub rms_norm_eps: Option<f64>,
    pub hidden_act: Option<String>,
    pub hidden_activation: Option<String>,
    pub tie_word_embeddings: Option<bool>,
    pub attention_bias: Option<bool>,
    pub mlp_bias: Option<bool>,
    pub bos_token_id: Option<u32>,
    /// Every id that ends a text; files give one or a list.
    pub eos_token_id: Vec<u32>,
    pub pad_token_id: Option<u32>,
    pub rope_theta: Option<f64>,
    /// Base frequency of sliding layers (gemma3, Transformers 4).
    pub rope_local_base_freq: Option<f64>,
    /// Transformers 4; see [`Config::rope`].
    pub rope_scaling: Option<RopeSet>,
    /// Transformers 5; see [`Config::rope`].
    pub rope_parameters: Option<RopeSet>,
    pub partial_rotary_factor: Option<f64>,
    /// Positions a sliding layer sees, itself included.
    pub sliding_window: Option<usize>,
    pub use_sliding_window: Option<bool>,
    pub max_window_layers: Option<usize>,
    /// One a layer: `full_attention` or `sliding_attention`.
    pub layer_types: Option<Vec<String>>,
    /// Every so-manieth layer is a full one; also spelled `_sliding_window_pattern`.
    pub sliding_window_pattern: Option<usize>,
    /// One a layer: 1 if it rotates, 0 if not, whatever the name suggests.
    pub no_rope_layers: Option<Vec<usize>>,
    pub no_rope_layer_interval: Option<usize>,
    pub attn_logit_softcapping: Option<f64>,
    pub final_logit_softcapping: Option<f64>,
    pub query_pre_attn_scalar: Option<f64>,
    pub quantization_config: Option<QuantizationConfig>,
    /// Bits of a weight in 1bitLLM checkpoints, which are float masters.
    pub weight_bits: Option<usize>,
    /// Bits of an activation in 1bitLLM checkpoints.
    pub input_bits: Option<usize>,
}

/// How stored weights are quantised.
#[derive(Debug, Clone, Default, PartialEq)]
#[non_exhaustive]
pub struct QuantizationConfig {
    /// The method, such as `bitnet`.
    pub quant_method: Option<String>,
    /// `autobitlinear` multiplies by `weight_scale`; `bitlinear` or nothing divides.
    pub linear_class: Option<String>,
    /// `offline` stores ternary weights, `online` float masters.
    pub quantization_mode: Option<String>,
    /// Whether each linear has an RMSNorm of its own before its activations are quantised.
    pub use_rms_norm: Option<bool>,
    /// Epsilon of that norm.
    pub rms_norm_eps: Option<f64>,
    /// Modules left in float.
    pub modules_to_not_convert: Vec<String>,
}

impl Config {
    /// Parses `config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it isn't JSON or a value isn't what its key demands.
    pub fn parse(json: &[u8]) -> Result<Config, ConfigError> {
        let json = Json::parse(json)?;
        let outer = Node::root(&json);
        outer.members()?;
        let inner = outer.get("text_config");
        if let Some(inner) = &inner {
            inner.members()?;
        }
        let get = |key: &str| {
            let inner = inner.as_ref().and_then(|inner| inner.get(key));
            inner.or_else(|| outer.get(key))
        };
        let count = |key: &str| get(key).map(|n| n.count()).transpose();
        let f64 = |key: &str| get(key).map(|n| n.f64()).transpose();
        let bool = |key: &str| get(key).map(|n| n.bool()).transpose();
        let string = |key: &str| get(key).map(|n| n.str()).transpose();
        let strings = |node: Node<'_>| node.list(Node::str);
        let rope = |key: &str| get(key).map(|n| RopeSet::read(&n)).transpose();
        let architectures = outer.get("architectures").or_else(|| get("architectures"));
        Ok(Config {
            model_type: string("model_type")?,
            architectures: architectures.map(strings).transpose()?.unwrap_or_default(),
            vocab_size: count("vocab_size")?,
            hidden_size: count("hidden_size")?,
            intermediate_size: count("intermediate_size")?,
            num_hidden_layers: count("num_hidden_layers")?,
            num_attention_heads: count("num_attention_heads")?,
            num_key_value_heads: count("num_key_value_heads")?,
            head_dim: count("head_dim")?,
            max_position_embeddings: count("max_position_embeddings")?,
            original_max_position_embeddings: count("original_max_position_embeddings")?,
            rms_norm_eps: f64("rms_norm_eps")?,
            hidden_act: string("hidden_act")?,
            hidden_activation: string("hidden_activation")?,
            tie_word_embeddings: bool("tie_word_embeddings")?,
            attention_bias: bool("attention_bias")?,
            mlp_bias: bool("mlp_bias")?,
            bos_token_id: first_id(get("bos_token_id"))?,
            eos_token_id: token_ids(get("eos_token_id"))?,
            pad_token_id: first_id(get("pad_token_id"))?,
            rope_theta: f64("rope_theta")?,
            rope_local_base_freq: f64("rope_local_base_freq")?,
            rope_scaling: rope("rope_scaling")?,
            rope_parameters: rope("rope_parameters")?,
            partial_rotary_factor: f64("partial_rotary_factor")?,
            sliding_window: count("sliding_window")?,
            use_sliding_window: bool("use_sliding_window")?,
            max_window_layers: count("max_window_layers")?,
            layer_types: get("layer_types").map(strings).transpose()?,
            sliding_window_pattern: get("sliding_window_pattern")
                .or_else(|| get("_sliding_window_pattern"))
                .map(|n| n.count())
                .transpose()?,
            no_rope_layers: get("no_rope_layers")
                .map(|n| n.list(Node::count))
                .transpose()?,
            no_rope_layer_interval: count("no_rope_layer_interval")?,
            attn_logit_softcapping: f64("attn_logit_softcapping")?,
            final_logit_softcapping: f64("final_logit_softcapping")?,
            query_pre_attn_scalar: f64("query_pre_attn_scalar")?,
            quantization_config: get("quantization_config")
                .map(|n| QuantizationConfig::read(&n))
                .transpose()?,
            weight_bits: count("weight_bits")?,
            input_bits: count("input_bits")?,
        })
    }

    /// The activation function of the FFN: `hidden_activation`, or else `hidden_act`.
    pub fn activation(&self) -> Option<&str> {
        let either = self.hidden_activation.as_ref().or(self.hidden_act.as_ref());
        either.map(String::as_str)
    }

    /// The RoPE parameters of layers of type `layer_type` (`full_attention` for models that don't
    /// distinguish), whichever way the file spells them.
    ///
    /// `rope_parameters` comes first, `rope_scaling` next. Values that stand outside of them
    /// (`rope_theta`, `partial_rotary_factor`, `original_max_position_embeddings`) fill their gaps.
    /// A file with `rope_local_base_freq` means it for sliding layers, which it doesn't stretch.
    pub fn rope(&self, layer_type: &str) -> RopeParameters {
        let local = self
            .rope_local_base_freq
            .filter(|_| layer_type == "sliding_attention" && self.rope_parameters.is_none());
        if let Some(rope_theta) = local {
            return RopeParameters {
                rope_theta: Some(rope_theta),
                partial_rotary_factor: self.partial_rotary_factor,
                ..RopeParameters::default()
            };
        }
        let set = self.rope_parameters.as_ref().or(self.rope_scaling.as_ref());
        let mut rope = set
            .and_then(|set| set.get(layer_type))
            .cloned()
            .unwrap_or_default();
        rope.rope_theta = rope.rope_theta.or(self.rope_theta);
        rope.partial_rotary_factor = rope.partial_rotary_factor.or(self.partial_rotary_factor);
        rope.original_max_position_embeddings = rope
            .original_max_position_embeddings
            .or(self.original_max_position_embeddings);
        rope
    }
}

impl QuantizationConfig {
    fn read(node: &Node<'_>) -> Result<QuantizationConfig, ConfigError> {
        node.members()?;
        let string = |key: &str| node.get(key).map(|n| n.str()).transpose();
        let modules = node.get("modules_to_not_convert");
        Ok(QuantizationConfig {
            quant_method: string("quant_method")?,
            linear_class: string("linear_class")?,
            quantization_mode: string("quantization_mode")?,
            use_rms_norm: node.get("use_rms_norm").map(|n| n.bool()).transpose()?,
            rms_norm_eps: node.get("rms_norm_eps").map(|n| n.f64()).transpose()?,
            modules_to_not_convert: modules
                .map(|n| n.list(Node::str))
                .transpose()?
                .unwrap_or_default(),
        })
    }
}

/// One id or a list of them.
pub(super) fn token_ids(node: Option<Node<'_>>) -> Result<Vec<u32>, ConfigError> {
    let Some(node) = node else {
        return Ok(Vec::new());
    };
    let nodes = if node.is_list() {
        node.items()?
    } else {
        vec![node]
    };
    let ids: Result<Vec<_>, _> = nodes.iter().map(Node::token_id).collect();
    Ok(ids?.into_iter().flatten().collect())
}

/// The id, or the first of a list.
pub(super) fn first_id(node: Option<Node<'_>>) -> Result<Option<u32>, ConfigError> {
    Ok(token_ids(node)?.first().copied())
}
