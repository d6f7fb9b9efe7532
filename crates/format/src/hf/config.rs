//! `config.json`: what a checkpoint says about its model.

use serde_json::Value;

use super::ConfigError;
use super::node::{self, Node};
use super::rope::{RopeParameters, RopeSet};
use crate::hadamard::{self, Hadamard};
use crate::json::Json;

/// The facts of `config.json`, under their names there. What the file doesn't say is `None` or
/// empty: defaults depend on the model family.
///
/// A multimodal file nests the language model under `text_config`; its values are taken from there,
/// and from the outer level where the inner one is silent.
#[derive(Debug, Clone, Default, PartialEq)]
// Fields without a comment are the keys of the file.
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
    /// Original context length, where it is outside of the RoPE parameters (phi3).
    pub original_max_position_embeddings: Option<usize>,
    pub rms_norm_eps: Option<f64>,
    /// The same in configurations of LFM2.
    pub norm_eps: Option<f64>,
    pub hidden_act: Option<String>,
    pub hidden_activation: Option<String>,
    /// Elements of a head in Gemma 4's layers without a window.
    pub global_head_dim: Option<usize>,
    /// Key-value heads there.
    pub num_global_key_value_heads: Option<usize>,
    /// The same layer by layer, as Transformers 5 writes it.
    pub per_layer_config: Option<Vec<LayerHeads>>,
    /// Whether values are keys there.
    pub attention_k_eq_v: Option<bool>,
    /// Last layers, which attend to keys and values of earlier ones.
    pub num_kv_shared_layers: Option<usize>,
    /// Width of what each layer is given besides the residual stream.
    pub hidden_size_per_layer_input: Option<usize>,
    /// Rows of the table that it is from.
    pub vocab_size_per_layer_input: Option<usize>,
    /// Whether networks of layers that share keys and values are twice as wide.
    pub use_double_wide_mlp: Option<bool>,
    /// Whether layers have experts beside a network.
    pub enable_moe_block: Option<bool>,
    /// Bound of the gates of gpt-oss's experts and of what they are multiplied with.
    pub swiglu_limit: Option<f64>,
    /// The factor in their logistic function.
    pub swiglu_alpha: Option<f64>,
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
    /// Every token sees every other, as in embedding models.
    pub use_bidirectional_attention: Option<bool>,
    /// One a layer: `full_attention` or `sliding_attention`.
    pub layer_types: Option<Vec<String>>,
    /// One layer in this many sees everything, the others a window; also spelled `_sliding_window_pattern`.
    pub sliding_window_pattern: Option<usize>,
    /// One a layer: 1 if it rotates, 0 if not, whatever the name suggests.
    pub no_rope_layers: Option<Vec<usize>>,
    pub no_rope_layer_interval: Option<usize>,
    pub attn_logit_softcapping: Option<f64>,
    pub final_logit_softcapping: Option<f64>,
    pub query_pre_attn_scalar: Option<f64>,
    /// Experts of a layer; also spelled `num_local_experts`.
    pub num_experts: Option<usize>,
    /// Experts that a token is sent to.
    pub num_experts_per_tok: Option<usize>,
    /// Width of an expert; `intermediate_size` where there is none.
    pub moe_intermediate_size: Option<usize>,
    /// Whether the probabilities of a token's experts add up to 1.
    pub norm_topk_prob: Option<bool>,
    /// One layer in this many has experts.
    pub decoder_sparse_step: Option<usize>,
    /// Layers without experts, from 0.
    pub mlp_only_layers: Option<Vec<usize>>,
    /// Layers at the beginning that have no experts.
    pub num_dense_layers: Option<usize>,
    /// Factor on what experts give.
    pub routed_scaling_factor: Option<f64>,
    /// Width of the expert that every token is sent to.
    pub shared_expert_intermediate_size: Option<usize>,
    /// Positions of the convolution of a gated delta net.
    pub linear_conv_kernel_dim: Option<usize>,
    pub linear_key_head_dim: Option<usize>,
    pub linear_num_key_heads: Option<usize>,
    pub linear_value_head_dim: Option<usize>,
    pub linear_num_value_heads: Option<usize>,
    /// `tiled` if values are in the order of GGUF files; no other program writes it.
    pub linear_value_head_order: Option<String>,
    /// The state spaces of Granite 4.
    pub mamba_n_heads: Option<usize>,
    pub mamba_d_head: Option<usize>,
    pub mamba_d_state: Option<usize>,
    pub mamba_n_groups: Option<usize>,
    pub mamba_d_conv: Option<usize>,
    pub mamba_dt_rank: Option<usize>,
    pub mamba_expand: Option<usize>,
    /// Width of the state spaces of Falcon-H1.
    pub mamba_d_ssm: Option<usize>,
    pub mamba_rms_norm: Option<bool>,
    pub mamba_norm_before_gate: Option<bool>,
    pub mamba_proj_bias: Option<bool>,
    pub mamba_conv_bias: Option<bool>,
    pub projectors_bias: Option<bool>,
    /// The state spaces of Mamba.
    pub conv_kernel: Option<usize>,
    pub state_size: Option<usize>,
    /// Not said if it is `auto`.
    pub time_step_rank: Option<usize>,
    pub expand: Option<usize>,
    pub num_heads: Option<usize>,
    pub n_groups: Option<usize>,
    pub use_bias: Option<bool>,
    /// Bounds of time steps; infinite if the second is no number.
    pub time_step_limit: Option<[Option<f64>; 2]>,
    pub layer_norm_epsilon: Option<f64>,
    /// The same of encoders.
    pub layer_norm_eps: Option<f64>,
    pub is_decoder: Option<bool>,
    /// Time mixing of RWKV.
    pub attention_hidden_size: Option<usize>,
    /// Elements of its heads.
    pub head_size: Option<usize>,
    /// The root of what 1e-5 is multiplied with in norms of its heads.
    pub head_size_divisor: Option<usize>,
    /// Widths of values in each layer (`value_dim`).
    pub value_dims: Option<Vec<usize>>,
    pub norm_bias: Option<bool>,
    /// Width of channel mixing over that of the model.
    pub hidden_ratio: Option<f64>,
    /// Ranks of pairs of matrices in time mixing.
    pub decay_low_rank_dim: Option<usize>,
    /// No other program writes it.
    pub shares_low_rank_dim: Option<usize>,
    pub a_low_rank_dim: Option<usize>,
    pub v_low_rank_dim: Option<usize>,
    pub gate_low_rank_dim: Option<usize>,
    /// After how many layers what is added to the residual stream is stored halved, as in GGUF files; no other program
    /// writes it.
    pub stored_halved_every: Option<usize>,
    /// Which layers of Jamba have attention, and which experts.
    pub attn_layer_period: Option<usize>,
    pub attn_layer_offset: Option<usize>,
    pub expert_layer_period: Option<usize>,
    pub expert_layer_offset: Option<usize>,
    /// Latent attention.
    pub q_lora_rank: Option<usize>,
    pub kv_lora_rank: Option<usize>,
    pub qk_nope_head_dim: Option<usize>,
    pub qk_rope_head_dim: Option<usize>,
    pub v_head_dim: Option<usize>,
    /// Experts of DeepSeek.
    pub n_shared_experts: Option<usize>,
    pub n_group: Option<usize>,
    pub topk_group: Option<usize>,
    pub topk_method: Option<String>,
    pub scoring_func: Option<String>,
    pub first_k_dense_replace: Option<usize>,
    pub moe_layer_freq: Option<usize>,
    pub num_nextn_predict_layers: Option<usize>,
    /// Whether elements that rotate together are adjacent.
    pub rope_interleave: Option<bool>,
    /// Factors of Falcon-H1.
    pub attention_in_multiplier: Option<f64>,
    pub attention_out_multiplier: Option<f64>,
    pub key_multiplier: Option<f64>,
    pub ssm_in_multiplier: Option<f64>,
    pub ssm_out_multiplier: Option<f64>,
    pub lm_head_multiplier: Option<f64>,
    /// On gate and down.
    pub mlp_multipliers: Option<Vec<f64>>,
    /// On gate, input, `B`, `C` and time steps.
    pub ssm_multipliers: Option<Vec<f64>>,
    /// Width of the network of every row, beside experts or without.
    pub shared_intermediate_size: Option<usize>,
    /// Factor on embeddings.
    pub embedding_multiplier: Option<f64>,
    /// Factor on what attention and networks add to the residual stream.
    pub residual_multiplier: Option<f64>,
    /// Factor on query-key products.
    pub attention_multiplier: Option<f64>,
    /// What logits are divided by.
    pub logits_scaling: Option<f64>,
    /// `nope` if nothing tells positions but order.
    pub position_embedding_type: Option<String>,
    /// One layer in this many has attention, the others a gated delta net.
    pub full_attention_interval: Option<usize>,
    /// Whether queries come with gates of what attention gives.
    pub attn_output_gate: Option<bool>,
    /// Positions of a short convolution (`conv_L_cache`).
    pub conv_l_cache: Option<usize>,
    pub conv_bias: Option<bool>,
    /// Layers with attention, where others have a convolution.
    pub full_attn_idxs: Option<Vec<usize>>,
    /// What the width of LFM2's feed-forward blocks is derived from.
    pub block_ff_dim: Option<usize>,
    pub block_auto_adjust_ff_dim: Option<bool>,
    pub block_ffn_dim_multiplier: Option<f64>,
    pub block_multiple_of: Option<usize>,
    /// A bound on queries, keys and values.
    pub clip_qkv: Option<f64>,
    pub quantization_config: Option<QuantizationConfig>,
    /// Which matrices are stored in a rotated basis, of packages made of such GGUF files.
    pub prism_hadamard: Option<Hadamard>,
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
    /// Modules left in float. A list, even an empty one, replaces the usual exception of the head.
    pub modules_to_not_convert: Option<Vec<String>>,
}

impl Config {
    /// Parses `config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it isn't JSON or a value isn't what its key demands.
    pub fn parse(json: &[u8]) -> Result<Config, ConfigError> {
        Config::read(&node::parse(json)?)
    }

    /// The same, of a `config.json` that is parsed already.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if a value isn't what its key demands.
    pub fn from_value(json: &Value) -> Result<Config, ConfigError> {
        Config::read(&json.into())
    }

    pub(crate) fn read(json: &Json<'_>) -> Result<Config, ConfigError> {
        let outer = Node::root(json);
        outer.expect_object()?;
        let inner = outer.get("text_config");
        if let Some(inner) = &inner {
            inner.expect_object()?;
        }
        let get = |key: &str| {
            let inner = inner.as_ref().and_then(|inner| inner.get(key));
            inner.or_else(|| outer.get(key))
        };
        let count = |key: &str| get(key).map(|n| n.count()).transpose();
        let f64 = |key: &str| get(key).map(|n| n.f64()).transpose();
        let bool = |key: &str| get(key).map(|n| n.bool()).transpose();
        let string = |key: &str| get(key).map(|n| n.str()).transpose();
        let floats = |key: &str| get(key).map(|n| n.list(Node::f64)).transpose();
        let auto = |key: &str| match get(key) {
            Some(node) if node.str().is_ok_and(|text| text == "auto") => Ok(None),
            node => node.map(|n| n.count()).transpose(),
        };
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
            norm_eps: f64("norm_eps")?,
            hidden_act: string("hidden_act")?,
            hidden_activation: string("hidden_activation")?,
            global_head_dim: count("global_head_dim")?,
            num_global_key_value_heads: count("num_global_key_value_heads")?,
            per_layer_config: get("per_layer_config").map(|n| layers(&n)).transpose()?,
            attention_k_eq_v: bool("attention_k_eq_v")?,
            num_kv_shared_layers: count("num_kv_shared_layers")?,
            hidden_size_per_layer_input: count("hidden_size_per_layer_input")?,
            vocab_size_per_layer_input: count("vocab_size_per_layer_input")?,
            use_double_wide_mlp: bool("use_double_wide_mlp")?,
            enable_moe_block: bool("enable_moe_block")?,
            swiglu_limit: f64("swiglu_limit")?,
            swiglu_alpha: f64("swiglu_alpha")?,
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
            use_bidirectional_attention: bool("use_bidirectional_attention")?,
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
            num_experts: get("num_experts")
                .or_else(|| get("num_local_experts"))
                .or_else(|| get("n_routed_experts"))
                .map(|n| n.count())
                .transpose()?,
            num_experts_per_tok: count("num_experts_per_tok")?,
            moe_intermediate_size: count("moe_intermediate_size")?,
            norm_topk_prob: bool("norm_topk_prob")?,
            decoder_sparse_step: count("decoder_sparse_step")?,
            mlp_only_layers: get("mlp_only_layers")
                .map(|n| n.list(Node::count))
                .transpose()?,
            num_dense_layers: count("num_dense_layers")?,
            routed_scaling_factor: f64("routed_scaling_factor")?,
            shared_expert_intermediate_size: count("shared_expert_intermediate_size")?,
            linear_conv_kernel_dim: count("linear_conv_kernel_dim")?,
            linear_key_head_dim: count("linear_key_head_dim")?,
            linear_num_key_heads: count("linear_num_key_heads")?,
            linear_value_head_dim: count("linear_value_head_dim")?,
            linear_num_value_heads: count("linear_num_value_heads")?,
            linear_value_head_order: string("linear_value_head_order")?,
            mamba_n_heads: count("mamba_n_heads")?,
            mamba_d_head: count("mamba_d_head")?,
            mamba_d_state: count("mamba_d_state")?,
            mamba_n_groups: count("mamba_n_groups")?,
            mamba_d_conv: count("mamba_d_conv")?,
            mamba_dt_rank: auto("mamba_dt_rank")?,
            mamba_expand: count("mamba_expand")?,
            mamba_d_ssm: count("mamba_d_ssm")?,
            mamba_rms_norm: bool("mamba_rms_norm")?,
            mamba_norm_before_gate: bool("mamba_norm_before_gate")?,
            mamba_proj_bias: bool("mamba_proj_bias")?,
            mamba_conv_bias: bool("mamba_conv_bias")?,
            projectors_bias: bool("projectors_bias")?,
            conv_kernel: count("conv_kernel")?,
            state_size: count("state_size")?,
            time_step_rank: auto("time_step_rank")?,
            expand: count("expand")?,
            num_heads: count("num_heads")?,
            n_groups: count("n_groups")?,
            use_bias: bool("use_bias")?,
            time_step_limit: get("time_step_limit").map(|n| limits(&n)).transpose()?,
            layer_norm_epsilon: f64("layer_norm_epsilon")?,
            layer_norm_eps: f64("layer_norm_eps")?,
            is_decoder: bool("is_decoder")?,
            attention_hidden_size: count("attention_hidden_size")?,
            head_size: count("head_size")?,
            head_size_divisor: count("head_size_divisor")?,
            value_dims: match get("value_dim") {
                Some(node) if node.count().is_err() => Some(node.list(Node::count)?),
                node => node.map(|n| n.count().map(|dim| vec![dim])).transpose()?,
            },
            norm_bias: bool("norm_bias")?,
            hidden_ratio: f64("hidden_ratio")?,
            decay_low_rank_dim: count("decay_low_rank_dim")?,
            shares_low_rank_dim: count("shares_low_rank_dim")?,
            a_low_rank_dim: count("a_low_rank_dim")?,
            v_low_rank_dim: count("v_low_rank_dim")?,
            gate_low_rank_dim: count("gate_low_rank_dim")?,
            stored_halved_every: count("stored_halved_every")?,
            attn_layer_period: count("attn_layer_period")?,
            attn_layer_offset: count("attn_layer_offset")?,
            expert_layer_period: count("expert_layer_period")?,
            expert_layer_offset: count("expert_layer_offset")?,
            q_lora_rank: count("q_lora_rank")?,
            kv_lora_rank: count("kv_lora_rank")?,
            qk_nope_head_dim: count("qk_nope_head_dim")?,
            qk_rope_head_dim: count("qk_rope_head_dim")?,
            v_head_dim: count("v_head_dim")?,
            n_shared_experts: count("n_shared_experts")?,
            n_group: count("n_group")?,
            topk_group: count("topk_group")?,
            topk_method: string("topk_method")?,
            scoring_func: string("scoring_func")?,
            first_k_dense_replace: count("first_k_dense_replace")?,
            moe_layer_freq: count("moe_layer_freq")?,
            rope_interleave: bool("rope_interleave")?,
            num_nextn_predict_layers: count("num_nextn_predict_layers")?,
            attention_in_multiplier: f64("attention_in_multiplier")?,
            attention_out_multiplier: f64("attention_out_multiplier")?,
            key_multiplier: f64("key_multiplier")?,
            ssm_in_multiplier: f64("ssm_in_multiplier")?,
            ssm_out_multiplier: f64("ssm_out_multiplier")?,
            lm_head_multiplier: f64("lm_head_multiplier")?,
            mlp_multipliers: floats("mlp_multipliers")?,
            ssm_multipliers: floats("ssm_multipliers")?,
            shared_intermediate_size: count("shared_intermediate_size")?,
            embedding_multiplier: f64("embedding_multiplier")?,
            residual_multiplier: f64("residual_multiplier")?,
            attention_multiplier: f64("attention_multiplier")?,
            logits_scaling: f64("logits_scaling")?,
            position_embedding_type: string("position_embedding_type")?,
            full_attention_interval: count("full_attention_interval")?,
            attn_output_gate: bool("attn_output_gate")?,
            conv_l_cache: count("conv_L_cache")?,
            conv_bias: bool("conv_bias")?,
            full_attn_idxs: get("full_attn_idxs")
                .map(|n| n.list(Node::count))
                .transpose()?,
            block_ff_dim: count("block_ff_dim")?,
            block_auto_adjust_ff_dim: bool("block_auto_adjust_ff_dim")?,
            block_ffn_dim_multiplier: f64("block_ffn_dim_multiplier")?,
            block_multiple_of: count("block_multiple_of")?,
            clip_qkv: f64("clip_qkv")?,
            quantization_config: get("quantization_config")
                .map(|n| QuantizationConfig::read(&n))
                .transpose()?,
            prism_hadamard: get(hadamard::MEMBER)
                .map(|n| Hadamard::read(&n))
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
    /// distinguish), however the file spells them.
    ///
    /// `rope_scaling` replaces `rope_parameters` where a file has both. Values outside of them
    /// (`rope_theta`, `partial_rotary_factor`, `original_max_position_embeddings`) fill their gaps.
    /// A file with `rope_local_base_freq` means it for sliding layers, which it doesn't scale.
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
        let set = self.rope_scaling.as_ref().or(self.rope_parameters.as_ref());
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
        node.expect_object()?;
        let string = |key: &str| node.get(key).map(|n| n.str()).transpose();
        let modules = node.get("modules_to_not_convert");
        Ok(QuantizationConfig {
            quant_method: string("quant_method")?,
            linear_class: string("linear_class")?,
            quantization_mode: string("quantization_mode")?,
            use_rms_norm: node.get("use_rms_norm").map(|n| n.bool()).transpose()?,
            rms_norm_eps: node.get("rms_norm_eps").map(|n| n.f64()).transpose()?,
            modules_to_not_convert: modules.map(|n| n.list(Node::str)).transpose()?,
        })
    }
}

/// A lower and an upper bound, each of which may be infinite, which Transformers writes as an object.
fn limits(node: &Node<'_>) -> Result<[Option<f64>; 2], ConfigError> {
    let bounds = node.list(|n| Ok(n.f64().ok().filter(|bound| bound.is_finite())))?;
    match bounds.try_into() {
        Ok(bounds) => Ok(bounds),
        Err(bounds) => node.refuse("two bounds", format!("{} of them", bounds.len())),
    }
}

/// One id or a list of them.
pub(super) fn token_ids(node: Option<Node<'_>>) -> Result<Vec<u32>, ConfigError> {
    let Some(node) = node else {
        return Ok(Vec::new());
    };
    let ids = match node.is_list() {
        true => node.list(Node::token_id)?,
        false => vec![node.token_id()?],
    };
    Ok(ids.into_iter().flatten().collect())
}

/// What a configuration says of the heads of one layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerHeads {
    /// The layer, from 0.
    pub layer: usize,
    /// Elements of a head.
    pub head_dim: Option<usize>,
    /// Key-value heads.
    pub n_kv_heads: Option<usize>,
}

/// Numbers of layers, and what is said of the heads of each.
fn layers(node: &Node<'_>) -> Result<Vec<LayerHeads>, ConfigError> {
    let mut layers = Vec::new();
    for (layer, node) in node.members()? {
        let count = |key: &str| node.get(key).map(|n| n.count()).transpose();
        let (head_dim, n_kv_heads) = (count("head_dim")?, count("num_key_value_heads")?);
        // Others are names of kinds of layers, for which each layer of the kind has its own.
        if let Ok(layer) = layer.parse() {
            layers.push(LayerHeads {
                layer,
                head_dim,
                n_kv_heads,
            });
        }
    }
    Ok(layers)
}

/// The id, or the first of a list.
pub(super) fn first_id(node: Option<Node<'_>>) -> Result<Option<u32>, ConfigError> {
    Ok(token_ids(node)?.first().copied())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Config {
        Config::parse(json.as_bytes()).unwrap_or_else(|e| panic!("{json}: {e}"))
    }

    #[test]
    fn ids_come_in_several_forms() {
        for (json, bos, eos, pad) in [
            (
                r#"{"bos_token_id":1,"eos_token_id":2}"#,
                Some(1),
                vec![2],
                None,
            ),
            (
                r#"{"bos_token_id":[5],"eos_token_id":[1,106]}"#,
                Some(5),
                vec![1, 106],
                None,
            ),
            (
                r#"{"bos_token_id":null,"eos_token_id":null,"pad_token_id":-1}"#,
                None,
                vec![],
                None,
            ),
            (
                r#"{"eos_token_id":[],"pad_token_id":0}"#,
                None,
                vec![],
                Some(0),
            ),
        ] {
            let config = parse(json);
            assert_eq!(config.bos_token_id, bos, "{json}");
            assert_eq!(config.eos_token_id, eos, "{json}");
            assert_eq!(config.pad_token_id, pad, "{json}");
        }
    }

    #[test]
    fn infinite_bounds_come_in_several_forms() {
        for text in [
            "[0.0, Infinity]",
            r#"[0, {"__float__": "Infinity"}]"#,
            "[0.0, null]",
        ] {
            let config = parse(&format!(r#"{{"time_step_limit": {text}}}"#));
            assert_eq!(config.time_step_limit, Some([Some(0.0), None]), "{text}");
        }
        let config = parse(r#"{"time_step_limit": [0.001, 0.1], "time_step_rank": "auto"}"#);
        assert_eq!(config.time_step_limit, Some([Some(0.001), Some(0.1)]));
        assert_eq!(config.time_step_rank, None);
        let error = Config::parse(br#"{"time_step_limit": [1]}"#).unwrap_err();
        assert!(error.to_string().contains("two bounds"), "{error}");
    }

    #[test]
    fn rope_in_both_spellings() {
        let llama3 = RopeParameters {
            rope_type: Some("llama3".into()),
            rope_theta: Some(500_000.0),
            factor: Some(8.0),
            low_freq_factor: Some(1.0),
            high_freq_factor: Some(4.0),
            original_max_position_embeddings: Some(64),
            ..RopeParameters::default()
        };
        for json in [
            r#"{"rope_theta":500000,"rope_scaling":{"rope_type":"llama3","factor":8,"low_freq_factor":1,
                "high_freq_factor":4,"original_max_position_embeddings":64}}"#,
            r#"{"rope_theta":500000.0,"original_max_position_embeddings":64,"rope_scaling":
                {"type":"llama3","factor":8.0,"low_freq_factor":1.0,"high_freq_factor":4.0}}"#,
            r#"{"rope_theta":1,"rope_parameters":{"rope_theta":500000.0,"rope_type":"llama3","factor":8.0,
                "low_freq_factor":1.0,"high_freq_factor":4.0,"original_max_position_embeddings":64}}"#,
        ] {
            assert_eq!(parse(json).rope("full_attention"), llama3, "{json}");
        }
        let none = parse(r#"{"rope_theta":10000.0,"rope_scaling":null}"#).rope("full_attention");
        assert_eq!((none.rope_type, none.rope_theta), (None, Some(10_000.0)));

        let phi = parse(
            r#"{"original_max_position_embeddings":4096,"partial_rotary_factor":0.75,
                "rope_scaling":{"type":"su","short_factor":[1,1.5],"long_factor":[2.0,64]}}"#,
        )
        .rope("full_attention");
        assert_eq!(phi.short_factor, Some(vec![1.0, 1.5]));
        assert_eq!(phi.long_factor, Some(vec![2.0, 64.0]));
        assert_eq!(phi.original_max_position_embeddings, Some(4096));
        assert_eq!(phi.partial_rotary_factor, Some(0.75));
    }

    #[test]
    fn gemma3_rotates_sliding_layers_by_another_base() {
        for json in [
            r#"{"rope_theta":1000000,"rope_local_base_freq":10000,"rope_scaling":{"rope_type":"linear","factor":8}}"#,
            r#"{"rope_parameters":{"full_attention":{"rope_theta":1000000,"rope_type":"linear","factor":8},
                "sliding_attention":{"rope_theta":10000}}}"#,
        ] {
            let config = parse(json);
            let full = config.rope("full_attention");
            assert_eq!(
                (full.rope_theta, full.factor),
                (Some(1e6), Some(8.0)),
                "{json}"
            );
            let sliding = config.rope("sliding_attention");
            assert_eq!(
                (sliding.rope_theta, sliding.factor),
                (Some(1e4), None),
                "{json}"
            );
        }
    }

    #[test]
    fn a_multimodal_file_shows_its_text_part() {
        let config = parse(
            r#"{"architectures":["Gemma3ForConditionalGeneration"],"model_type":"gemma3","eos_token_id":[1,106],
                "hidden_size":7,"vision_config":{"hidden_size":1152},
                "text_config":{"model_type":"gemma3_text","hidden_size":2560,"sliding_window":1024,"head_dim":null}}"#,
        );
        assert_eq!(config.model_type.as_deref(), Some("gemma3_text"));
        assert_eq!(config.architectures, ["Gemma3ForConditionalGeneration"]);
        assert_eq!(config.hidden_size, Some(2560));
        assert_eq!(config.head_dim, None);
        assert_eq!(config.eos_token_id, [1, 106]);
    }

    #[test]
    fn quantization_and_activation() {
        let config = parse(
            r#"{"hidden_act":"gelu","hidden_activation":"gelu_pytorch_tanh","weight_bits":1,"input_bits":8,
                "quantization_config":{"quant_method":"bitnet","linear_class":"autobitlinear","quantization_mode":"online",
                "use_rms_norm":true,"rms_norm_eps":1e-6,"modules_to_not_convert":["lm_head"]}}"#,
        );
        assert_eq!(config.activation(), Some("gelu_pytorch_tanh"));
        assert_eq!((config.weight_bits, config.input_bits), (Some(1), Some(8)));
        let quantization = config.quantization_config.unwrap();
        assert_eq!(quantization.linear_class.as_deref(), Some("autobitlinear"));
        assert_eq!(quantization.use_rms_norm, Some(true));
        let modules = quantization.modules_to_not_convert.as_deref();
        assert_eq!(modules, Some(&["lm_head".to_owned()][..]));
    }

    #[test]
    fn numbers_json_does_not_have() {
        let config = parse(
            r#"{"a":[NaN,-Infinity,"NaN \" Infinity"],"time_step_limit":[0.0,{"__float__":"Infinity"}],
                "hidden_act":"Infinity","hidden_size":4}"#,
        );
        assert_eq!(config.hidden_act.as_deref(), Some("Infinity"));
        assert_eq!(config.hidden_size, Some(4));
    }

    #[test]
    fn errors_name_the_path() {
        for (json, message) in [
            ("[]", "the file: expected an object, found a list"),
            (
                r#"{"hidden_size":-1}"#,
                "`hidden_size`: expected a whole number from 0 to 2147483647, found -1",
            ),
            (
                r#"{"hidden_size":1e30}"#,
                "`hidden_size`: expected a whole number from 0 to 2147483647, found 1000000000000000000000000000000",
            ),
            (
                r#"{"hidden_size":0.5}"#,
                "`hidden_size`: expected a whole number from 0 to 2147483647, found 0.5",
            ),
            (
                r#"{"hidden_size":"4"}"#,
                "`hidden_size`: expected a whole number from 0 to 2147483647, found a string",
            ),
            (
                r#"{"rope_theta":Infinity}"#,
                "`rope_theta`: expected a finite number, found inf",
            ),
            (
                r#"{"eos_token_id":[1,"x"]}"#,
                "`eos_token_id[1]`: expected a whole number from 0 to 2147483647, found a string",
            ),
            (
                r#"{"text_config":{"rope_scaling":{"factor":"8"}}}"#,
                "`text_config.rope_scaling.factor`: expected a number, found a string",
            ),
            (
                r#"{"rope_parameters":{"full_attention":{"factor":[]}}}"#,
                "`rope_parameters.full_attention.factor`: expected a number, found a list",
            ),
            (
                r#"{"rope_parameters":{"full_attention":{},"factor":8}}"#,
                "`rope_parameters.factor`: expected an object, found a number",
            ),
            (
                r#"{"layer_types":["full_attention",1]}"#,
                "`layer_types[1]`: expected a string, found a number",
            ),
            (
                r#"{"tie_word_embeddings":1}"#,
                "`tie_word_embeddings`: expected a boolean, found a number",
            ),
            (
                r#"{"quantization_config":7}"#,
                "`quantization_config`: expected an object, found a number",
            ),
            (
                r#"{"text_config":7}"#,
                "`text_config`: expected an object, found a number",
            ),
        ] {
            assert_eq!(
                Config::parse(json.as_bytes()).unwrap_err().to_string(),
                message
            );
        }
        for json in ["", "{", r#"{"a":1,}"#, "{} {}"] {
            assert!(
                matches!(Config::parse(json.as_bytes()), Err(ConfigError::Json(_))),
                "{json}"
            );
        }
        let many = format!("[{}0]", "0,".repeat(300_000));
        let error = Config::parse(many.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("more than 250000 values"), "{error}");
    }
}
