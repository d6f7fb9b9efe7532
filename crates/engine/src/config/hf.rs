//! Model configuration from Hugging Face's `config.json`.

use std::sync::Arc;

use sterna_format::hf::{Config, RopeParameters, RopeSet};
use sterna_kernels::activation::Activation;
use sterna_kernels::delta::{DeltaShape, HeadOrder};
use sterna_kernels::experts::{ExpertGroups, Gating, Routing};
use sterna_kernels::mamba::MambaShape;
use sterna_kernels::rope::RopeLayout;
use sterna_kernels::rwkv::{Generation, RwkvShape};
use sterna_kernels::ssm::SsmShape;

use super::{
    ExpertsConfig, HEADLESS, LatentConfig, LayerConfig, MAX_LAYERS, MixerKind, ModelConfig,
    Multipliers, RWKV_CTX, RwkvConfig, RwkvRanks, WideHeads, long_rope_magnitude, yarn_magnitude,
};
use crate::error::PlanError;
use crate::family::{Family, SsmFamily, WindowPattern};
use crate::rope::{RopeConfig, RopeScaling};

/// Default of `query_pre_attn_scalar` in Gemma configurations.
const GEMMA_ATTN_SCALAR: f64 = 256.0;
/// The divisor of frequencies of elements that aren't rotated, as GGUF files have it.
pub(super) const STILL: f32 = 1e30;
/// Default of `full_attention_interval`.
pub(super) const FULL_ATTENTION_INTERVAL: usize = 4;
/// Default of the first windowed layer in Qwen configurations.
const QWEN_MAX_WINDOW_LAYERS: usize = 28;

impl ModelConfig {
    /// The configuration in `hf`, for a model with `n_vocab` embeddings.
    pub(crate) fn from_hf(hf: &Config, n_vocab: usize) -> Result<Self, PlanError> {
        let family = family(hf)?;
        let n_layers = required("num_hidden_layers", hf.num_hidden_layers)?;
        if n_layers > MAX_LAYERS {
            return Err(PlanError::config(
                "num_hidden_layers",
                format!("at most {MAX_LAYERS}"),
                n_layers,
            ));
        }
        if let Some(limit) = hf.clip_qkv {
            return Err(PlanError::config("clip_qkv", "nothing", limit));
        }
        if let Some(limits) = hf
            .time_step_limit
            .filter(|limits| *limits != [Some(0.0), None])
        {
            let found = format!("{limits:?}");
            return Err(PlanError::config("time_step_limit", "0 to infinity", found));
        }
        if hf.use_bidirectional_attention == Some(true) {
            return Err(PlanError::config(
                "use_bidirectional_attention",
                "a causal model",
                "true",
            ));
        }
        if family.encoder {
            check_encoder(hf)?;
        }
        let model_dim = required("hidden_size", hf.hidden_size)?;
        let is_alone = family.ssm.is_some_and(SsmFamily::is_alone);
        let is_granite = family.ssm == Some(SsmFamily::Granite);
        let is_falcon = family.ssm == Some(SsmFamily::FalconH1);
        let latent = latent(hf, family)?;
        let rwkv = rwkv(hf, family, model_dim)?;
        let (n_heads, n_kv_heads, head_dim) = match (family.is_headless(), &latent) {
            (true, _) => HEADLESS,
            (false, Some(latent)) => (heads(hf, family, model_dim)?.0, 1, latent.head_dim()),
            (false, None) => heads(hf, family, model_dim)?,
        };
        let mamba = mamba(hf, family, model_dim)?;
        let ssm = ssm(hf, family)?;
        let max_ctx = match rwkv {
            Some(_) => RWKV_CTX,
            None => (hf.max_position_embeddings).unwrap_or(family.hf_defaults.max_ctx),
        };
        let (key, named) = if family.gemma {
            ("hidden_activation", &hf.hidden_activation)
        } else {
            ("hidden_act", &hf.hidden_act)
        };
        let activation = match named {
            named if family.activation == Activation::ClampedSwiglu => {
                check_clamped_swiglu(hf, named.as_deref().unwrap_or("silu"))?;
                family.activation
            }
            // So one generation's configurations spell what all have.
            Some(found) if rwkv.is_some() && found == "sqrelu" => family.activation,
            Some(found) => {
                super::activation(found).ok_or_else(|| super::unknown_activation(key, found))?
            }
            None => family.activation,
        };
        if hf.enable_moe_block == Some(true) {
            let expected = "false, since experts beside a network aren't supported";
            return Err(PlanError::config("enable_moe_block", expected, "true"));
        }
        let attn_scale = if family.gemma4 {
            1.0
        } else if let Some(scale) = hf
            .attention_multiplier
            .filter(|_| is_granite || family.latent)
        {
            scale as f32
        } else if family.gemma {
            let scalar = hf.query_pre_attn_scalar.unwrap_or(GEMMA_ATTN_SCALAR);
            (1.0 / scalar.sqrt()) as f32
        } else if let Some(latent) = &latent {
            let rope = hf.rope("full_attention");
            let stretch = match (rope.rope_type.as_deref(), rope.mscale_all_dim) {
                (Some("yarn"), Some(strength)) => {
                    yarn_magnitude(rope.factor.unwrap_or(1.0), strength)
                }
                _ => 1.0,
            };
            latent.attn_scale(stretch)
        } else {
            (1.0 / (head_dim as f64).sqrt()) as f32
        };
        let softcap = |value: Option<f64>| value.map(|v| v as f32);
        let rotated = rotated_layers(hf, family, n_layers)?;
        let windows = windows(hf, family, &rotated)?;
        let wide_heads = wide_heads(hf, family, &windows, (n_kv_heads, head_dim))?;
        let whole = wide_heads.map_or(head_dim, |wide| wide.head_dim);
        let mut ropes = ropes(hf, family, [whole, head_dim], max_ctx)?;
        if let Some(latent) = &latent {
            ropes[0].dim = latent.rope_dim;
            ropes[0].layout = RopeLayout::Pairs;
        }
        let experts = experts(hf, family)?;
        let mixers = mixers(hf, family, n_layers)?;
        let layers = rotated
            .iter()
            .zip(&windows)
            .enumerate()
            .map(|(i, (&rotated, &window))| LayerConfig {
                window,
                rope: rotated.then_some(usize::from(ropes.len() > 1 && window.is_some())),
                mixer: mixers[i],
                has_experts: experts.is_some() && has_experts(hf, family, i),
            })
            .collect();
        ModelConfig {
            family,
            n_layers,
            model_dim,
            n_heads,
            n_kv_heads,
            head_dim,
            wide_heads,
            n_sharing: (hf.num_kv_shared_layers)
                .filter(|_| family.gemma4)
                .unwrap_or(0),
            layer_input_dim: (hf.hidden_size_per_layer_input)
                .filter(|&dim| family.gemma4 && dim > 0),
            wide_networks: family.gemma4 && hf.use_double_wide_mlp == Some(true),
            ffn_dim: match hf.shared_intermediate_size.filter(|_| experts.is_none()) {
                Some(dim) if is_granite => dim,
                _ if is_alone => inner_width(&mamba, &ssm),
                _ if rwkv.is_some() && hf.intermediate_size.is_none() => {
                    default_rwkv_width(hf, family, model_dim)
                }
                _ => required("intermediate_size", ffn_dim(hf))?,
            },
            n_vocab,
            max_ctx,
            norm_eps: hf
                .rms_norm_eps
                .or(hf.norm_eps)
                .or(hf.layer_norm_epsilon.filter(|_| family.is_headless()))
                .or(hf.layer_norm_eps.filter(|_| family.encoder))
                .unwrap_or(family.hf_defaults.norm_eps) as f32,
            input_norm_eps: hf
                .quantization_config
                .as_ref()
                .and_then(|q| q.rms_norm_eps)
                .unwrap_or(1e-6) as f32,
            embed_scale: match hf.embedding_multiplier.filter(|_| is_granite || is_falcon) {
                Some(factor) => factor as f32,
                None => family.embed_scale(model_dim),
            },
            residual_scale: hf.residual_multiplier.filter(|_| is_granite).unwrap_or(1.0) as f32,
            logit_scale: match (hf.logits_scaling, hf.lm_head_multiplier) {
                (Some(divisor), _) if is_granite => (1.0 / divisor) as f32,
                (_, Some(factor)) if is_falcon => factor as f32,
                _ => 1.0,
            },
            latent,
            multipliers: match is_falcon {
                true => multipliers(hf)?,
                false => Multipliers::default(),
            },
            activation,
            attn_scale,
            attn_softcap: softcap(hf.attn_logit_softcapping)
                .filter(|_| family.gguf_softcaps.is_some()),
            logit_softcap: softcap(hf.final_logit_softcapping).filter(|_| family.gemma),
            experts,
            conv_taps: hf
                .conv_l_cache
                .or(hf.linear_conv_kernel_dim)
                .or(hf.mamba_d_conv)
                .or(hf.conv_kernel.filter(|_| is_alone)),
            ssm,
            mamba,
            rwkv,
            delta: delta(hf, family)?,
            hadamard: hf.prism_hadamard.clone().map(Arc::new),
            layers,
            ropes,
        }
        .validated()
    }
}

/// Fails if an encoder does something else than attend to all positions, which are learned.
fn check_encoder(hf: &Config) -> Result<(), PlanError> {
    if hf.is_decoder == Some(true) {
        return Err(PlanError::config(
            "is_decoder",
            "false in an encoder",
            "true",
        ));
    }
    match hf.position_embedding_type.as_deref() {
        None | Some("absolute") => Ok(()),
        Some(found) => {
            let found = format!("`{found}`");
            Err(PlanError::config(
                "position_embedding_type",
                "absolute",
                found,
            ))
        }
    }
}

/// Fails unless the activation `named` is what [`Activation::ClampedSwiglu`] says.
fn check_clamped_swiglu(hf: &Config, named: &str) -> Result<(), PlanError> {
    if super::activation(named) != Some(Activation::Silu) {
        return Err(PlanError::config(
            "hidden_act",
            "silu",
            format!("`{named}`"),
        ));
    }
    for (key, value, expected) in [
        ("swiglu_limit", hf.swiglu_limit, Activation::CLAMP),
        ("swiglu_alpha", hf.swiglu_alpha, Activation::CLAMPED_SLOPE),
    ] {
        if let Some(found) = value.filter(|&value| value as f32 != expected) {
            return Err(PlanError::config(key, expected.to_string(), found));
        }
    }
    Ok(())
}

/// What mixes positions in each layer.
fn mixers(hf: &Config, family: &Family, n_layers: usize) -> Result<Vec<MixerKind>, PlanError> {
    let (name, kind) = match (family.ssm, family.delta, hf.conv_l_cache) {
        (Some(ssm), _, _) => ("mamba", ssm.mixer()),
        (None, Some(_), _) => ("linear_attention", MixerKind::DeltaNet),
        _ if family.rwkv.is_some() => return Ok(vec![MixerKind::TimeMix; n_layers]),
        (None, None, Some(_)) => ("conv", MixerKind::Convolution),
        _ if family.latent => return Ok(vec![MixerKind::LatentAttention; n_layers]),
        (None, None, None) => return Ok(vec![MixerKind::Attention; n_layers]),
    };
    for (key, value, expected) in [
        ("conv_bias", hf.conv_bias, false),
        ("attn_output_gate", hf.attn_output_gate, true),
    ] {
        if value == Some(!expected) {
            return Err(PlanError::config(key, expected.to_string(), !expected));
        }
    }
    if kind == MixerKind::AttentionAndSsm || family.ssm.is_some_and(SsmFamily::is_alone) {
        return Ok(vec![kind; n_layers]);
    }
    if let Some(types) = &hf.layer_types {
        check_per_layer("layer_types", types.len(), n_layers)?;
        let kinds = types.iter().map(|found| match found.as_str() {
            "full_attention" => Ok(MixerKind::Attention),
            "attention" if family.ssm.is_some() => Ok(MixerKind::Attention),
            found if found == name => Ok(kind),
            other => {
                let expected = format!("{name} or full_attention");
                let found = format!("`{other}`");
                Err(PlanError::config("layer_types", expected, found))
            }
        });
        return kinds.collect();
    }
    let attends = |i: usize| match (family.delta, &hf.full_attn_idxs) {
        _ if family.ssm == Some(SsmFamily::Jamba) => Ok(is_every(
            i,
            hf.attn_layer_period.unwrap_or(8),
            hf.attn_layer_offset.unwrap_or(4),
        )),
        (Some(_), _) => {
            let interval = hf
                .full_attention_interval
                .unwrap_or(FULL_ATTENTION_INTERVAL);
            Ok(interval > 0 && (i + 1).is_multiple_of(interval))
        }
        (None, Some(attention)) => Ok(attention.contains(&i)),
        (None, None) => Err(PlanError::config("layer_types", "a list", "nothing")),
    };
    let mixer = |i| {
        Ok(match attends(i)? {
            true => MixerKind::Attention,
            false => kind,
        })
    };
    (0..n_layers).map(mixer).collect()
}

/// Heads and ranks of time mixing; ranks that aren't said are 0.
fn rwkv(hf: &Config, family: &Family, model_dim: usize) -> Result<Option<RwkvConfig>, PlanError> {
    let Some(generation) = family.rwkv else {
        return Ok(None);
    };
    let own = hf.attention_hidden_size.iter();
    let own = own.map(|width| ("attention_hidden_size", *width));
    let values = hf.value_dims.iter().flatten();
    let mut widths = own.chain(values.map(|width| ("value_dim", *width)));
    if let Some((key, found)) = widths.find(|(_, width)| *width != model_dim) {
        let expected = format!("the width of the model, {model_dim}");
        return Err(PlanError::config(key, expected, found));
    }
    if let Some(false) = hf.norm_bias {
        return Err(PlanError::config("norm_bias", "true", "false"));
    }
    let norm_eps = match generation {
        Generation::V7 => hf.norm_eps.unwrap_or(family.hf_defaults.norm_eps),
        _ => 1e-5,
    };
    let head_dim = match generation {
        Generation::V4 => model_dim,
        Generation::V7 => hf.head_dim.unwrap_or(64),
        Generation::V5 | Generation::V6 => hf.head_size.unwrap_or(64),
    };
    let divisor = match generation {
        Generation::V7 => head_dim as f64,
        _ => (hf.head_size_divisor.unwrap_or(8) as f64).powi(2),
    };
    Ok(Some(RwkvConfig {
        shape: RwkvShape {
            generation,
            n_heads: model_dim.checked_div(head_dim).unwrap_or(0),
            head_dim,
        },
        head_eps: (norm_eps * divisor) as f32,
        ranks: RwkvRanks {
            decay: hf.decay_low_rank_dim.unwrap_or(0),
            shares: hf.shares_low_rank_dim.unwrap_or(0),
            rate: hf.a_low_rank_dim.unwrap_or(0),
            residual: hf.v_low_rank_dim.unwrap_or(0),
            gate: hf.gate_low_rank_dim.unwrap_or(0),
        },
        halved_every: hf.stored_halved_every.unwrap_or(0),
    }))
}

/// The width of channel mixing where a configuration doesn't say it.
fn default_rwkv_width(hf: &Config, family: &Family, model_dim: usize) -> usize {
    match family.rwkv {
        Some(Generation::V5 | Generation::V6) => model_dim.saturating_mul(7) / 2 / 32 * 32,
        Some(Generation::V7) => {
            let width = (model_dim as f64 * hf.hidden_ratio.unwrap_or(4.0)) as usize;
            width.div_ceil(32).saturating_mul(32)
        }
        _ => model_dim.saturating_mul(4),
    }
}

/// The heads of state spaces.
fn ssm(hf: &Config, family: &Family) -> Result<Option<SsmShape>, PlanError> {
    match family.ssm {
        None => return Ok(None),
        Some(kind) if kind.is_first() => return Ok(None),
        Some(SsmFamily::Mamba2) => {
            return Ok(Some(SsmShape {
                n_heads: required("num_heads", hf.num_heads)?,
                head_dim: required("head_dim", hf.head_dim)?,
                state_dim: required("state_size", hf.state_size)?,
                n_groups: hf.n_groups.unwrap_or(8),
            }));
        }
        Some(_) => {}
    }
    Ok(Some(SsmShape {
        n_heads: required("mamba_n_heads", hf.mamba_n_heads)?,
        head_dim: required("mamba_d_head", hf.mamba_d_head)?,
        state_dim: required("mamba_d_state", hf.mamba_d_state)?,
        n_groups: hf.mamba_n_groups.unwrap_or(1),
    }))
}

/// The channels of state spaces of the first Mamba.
fn mamba(hf: &Config, family: &Family, model_dim: usize) -> Result<Option<MambaShape>, PlanError> {
    let (inner, state_dim, dt_rank) = match family.ssm {
        Some(SsmFamily::Mamba) => {
            let inner = (hf.intermediate_size)
                .unwrap_or_else(|| hf.expand.unwrap_or(2).saturating_mul(model_dim));
            (inner, hf.state_size, hf.time_step_rank)
        }
        Some(SsmFamily::Jamba) => {
            let inner = hf.mamba_expand.unwrap_or(2).saturating_mul(model_dim);
            (inner, hf.mamba_d_state, hf.mamba_dt_rank)
        }
        _ => return Ok(None),
    };
    Ok(Some(MambaShape {
        inner,
        state_dim: state_dim.unwrap_or(16),
        dt_rank: dt_rank.unwrap_or(model_dim.div_ceil(16)),
    }))
}

/// What networks of a model that has none would have the width of.
fn inner_width(mamba: &Option<MambaShape>, ssm: &Option<SsmShape>) -> usize {
    match (mamba, ssm) {
        (Some(mamba), _) => mamba.inner,
        (None, Some(ssm)) => ssm.n_heads.saturating_mul(ssm.head_dim),
        (None, None) => 0,
    }
}

/// Factors of Falcon-H1.
fn multipliers(hf: &Config) -> Result<Multipliers, PlanError> {
    for (key, value) in [
        ("attention_bias", hf.attention_bias),
        ("mlp_bias", hf.mlp_bias),
        ("projectors_bias", hf.projectors_bias),
        ("mamba_proj_bias", hf.mamba_proj_bias),
        (
            "mamba_norm_before_gate",
            (hf.mamba_norm_before_gate).filter(|_| hf.mamba_rms_norm == Some(true)),
        ),
    ] {
        if value == Some(true) {
            return Err(PlanError::config(key, "false in a falcon_h1 model", "true"));
        }
    }
    let one = |value: Option<f64>| value.unwrap_or(1.0) as f32;
    let list = |key: &'static str, list: &Option<Vec<f64>>, n: usize| match list {
        None => Ok(vec![1.0; n]),
        Some(list) if list.len() == n => Ok(list.iter().map(|&x| x as f32).collect()),
        Some(list) => Err(PlanError::config(key, format!("{n} numbers"), list.len())),
    };
    let networks = list("mlp_multipliers", &hf.mlp_multipliers, 2)?;
    let parts = list("ssm_multipliers", &hf.ssm_multipliers, 5)?;
    let mut ssm = [1.0; 5];
    ssm.copy_from_slice(&parts);
    Ok(Multipliers {
        attention_in: one(hf.attention_in_multiplier),
        key: one(hf.key_multiplier),
        attention_out: one(hf.attention_out_multiplier),
        ssm_in: one(hf.ssm_in_multiplier),
        ssm,
        ssm_out: one(hf.ssm_out_multiplier),
        gate: networks[0],
        down: networks[1],
    })
}

/// Heads of queries, of keys and values, and their elements.
fn heads(
    hf: &Config,
    family: &Family,
    model_dim: usize,
) -> Result<(usize, usize, usize), PlanError> {
    let defaults = &family.hf_defaults;
    let n_heads = hf.num_attention_heads.or(defaults.n_heads);
    let n_heads = required("num_attention_heads", n_heads)?;
    let n_kv_heads = hf.num_key_value_heads.or(defaults.n_kv_heads);
    let head_dim = hf.head_dim.or(defaults.head_dim);
    let head_dim = head_dim.unwrap_or(model_dim.checked_div(n_heads).unwrap_or(0));
    Ok((n_heads, n_kv_heads.unwrap_or(n_heads), head_dim))
}

/// Whether `i` is `offset` in a period.
fn is_every(i: usize, period: usize, offset: usize) -> bool {
    i.checked_rem(period) == Some(offset)
}

/// The heads of gated delta nets.
fn delta(hf: &Config, family: &Family) -> Result<Option<DeltaShape>, PlanError> {
    if family.delta.is_none() {
        return Ok(None);
    }
    Ok(Some(DeltaShape {
        n_key_heads: required("linear_num_key_heads", hf.linear_num_key_heads)?,
        n_value_heads: required("linear_num_value_heads", hf.linear_num_value_heads)?,
        key_dim: required("linear_key_head_dim", hf.linear_key_head_dim)?,
        value_dim: required("linear_value_head_dim", hf.linear_value_head_dim)?,
        order: match hf.linear_value_head_order.as_deref() {
            None | Some("grouped") => HeadOrder::Grouped,
            Some("tiled") => HeadOrder::Tiled,
            Some(other) => {
                let found = format!("`{other}`");
                let key = "linear_value_head_order";
                return Err(PlanError::config(key, "grouped or tiled", found));
            }
        },
    }))
}

/// Width of the feed-forward block. LFM2's configurations may give what it is derived from.
fn ffn_dim(hf: &Config) -> Option<usize> {
    // All layers may have experts.
    let given = hf.block_ff_dim.or(hf.intermediate_size);
    let given = given.or(hf.moe_intermediate_size)?;
    if hf.conv_l_cache.is_none() || hf.num_experts.is_some() {
        return hf.intermediate_size.or(hf.moe_intermediate_size);
    }
    if hf.block_auto_adjust_ff_dim == Some(false) {
        return Some(given);
    }
    let two_thirds = given / 3 * 2 + given % 3 * 2 / 3;
    let scaled = hf.block_ffn_dim_multiplier.unwrap_or(1.0) * two_thirds as f64;
    let step = hf.block_multiple_of.unwrap_or(256).max(1);
    (scaled as usize).checked_next_multiple_of(step)
}

/// The mixture of experts.
fn experts(hf: &Config, family: &Family) -> Result<Option<ExpertsConfig>, PlanError> {
    let Some(mixture) = family.mixture else {
        return Ok(None);
    };
    let n_experts = match family.ssm {
        Some(SsmFamily::Granite) if hf.num_experts.is_none_or(|n| n == 0) => return Ok(None),
        Some(SsmFamily::Jamba) if hf.num_experts == Some(1) => return Ok(None),
        _ => hf.num_experts,
    };
    let ffn_dim = hf.moe_intermediate_size.or(hf.intermediate_size);
    // What depends on defaults would be wrong without a sign.
    let scale = match hf.routed_scaling_factor {
        None if family.latent => {
            return Err(PlanError::config(
                "routed_scaling_factor",
                "a number",
                "nothing",
            ));
        }
        factor => factor.unwrap_or(1.0),
    };
    if scale != 1.0 && !family.latent {
        let factor = scale;
        return Err(PlanError::config("routed_scaling_factor", "1", factor));
    }
    Ok(Some(ExpertsConfig {
        routing: Routing {
            n_experts: required("num_experts", n_experts)?,
            n_used: required("num_experts_per_tok", hf.num_experts_per_tok)?,
            gating: mixture.gating,
            renormalised: mixture
                .hf_renormalised
                .is_none_or(|default| hf.norm_topk_prob.unwrap_or(default)),
            groups: expert_groups(hf, family)?,
            scale: scale as f32,
        },
        ffn_dim: required("moe_intermediate_size", ffn_dim)?,
        shared_ffn_dim: (hf.shared_expert_intermediate_size)
            .or(hf.shared_intermediate_size)
            .or_else(|| Some(hf.n_shared_experts?.saturating_mul(ffn_dim?)))
            .filter(|&dim| dim > 0),
    }))
}

/// Groups of experts.
fn expert_groups(hf: &Config, family: &Family) -> Result<Option<ExpertGroups>, PlanError> {
    if !family.latent {
        return Ok(None);
    }
    let is_sigmoid = family.mixture.is_some_and(|m| m.gating == Gating::Sigmoid);
    let (gating, methods) = match is_sigmoid {
        true => ("sigmoid", &["noaux_tc"][..]),
        false => ("softmax", &["greedy", "gready", "group_limited_greedy"][..]),
    };
    if let Some(found) = hf.scoring_func.as_deref().filter(|found| *found != gating) {
        return Err(PlanError::config(
            "scoring_func",
            gating,
            format!("`{found}`"),
        ));
    }
    let method = hf.topk_method.as_deref();
    if let Some(found) = method.filter(|found| !methods.contains(found)) {
        let found = format!("`{found}`");
        return Err(PlanError::config(
            "topk_method",
            methods.join(" or "),
            found,
        ));
    }
    if let Some(found) = hf.moe_layer_freq.filter(|&n| n != 1) {
        return Err(PlanError::config("moe_layer_freq", "1", found));
    }
    let is_grouped = is_sigmoid || method == Some("group_limited_greedy");
    if is_sigmoid {
        required("n_group", hf.n_group)?;
        required("topk_group", hf.topk_group)?;
    }
    let groups = match (hf.n_group, hf.topk_group) {
        (Some(n_groups), Some(n_used)) if is_grouped && n_groups > 1 => {
            Some(ExpertGroups { n_groups, n_used })
        }
        _ => None,
    };
    Ok(groups)
}

/// The parts of latent attention.
fn latent(hf: &Config, family: &Family) -> Result<Option<LatentConfig>, PlanError> {
    if !family.latent {
        return Ok(None);
    }
    if hf.rope_interleave == Some(false) {
        return Err(PlanError::config("rope_interleave", "true", "false"));
    }
    Ok(Some(LatentConfig {
        q_rank: hf.q_lora_rank,
        kv_rank: required("kv_lora_rank", hf.kv_lora_rank)?,
        nope_dim: required("qk_nope_head_dim", hf.qk_nope_head_dim)?,
        rope_dim: required("qk_rope_head_dim", hf.qk_rope_head_dim)?,
        value_dim: required("v_head_dim", hf.v_head_dim)?,
    }))
}

/// Whether layer `i` of a model with experts has some: all that aren't listed, or every n-th of those.
fn has_experts(hf: &Config, family: &Family, i: usize) -> bool {
    let listed = hf.mlp_only_layers.as_ref();
    let n_dense = hf.num_dense_layers.or(hf.first_k_dense_replace);
    if n_dense.is_some_and(|n_dense| i < n_dense) {
        return false;
    }
    if family.ssm == Some(SsmFamily::Jamba) && listed.is_none() {
        let (period, offset) = (hf.expert_layer_period, hf.expert_layer_offset);
        return is_every(i, period.unwrap_or(2), offset.unwrap_or(1));
    }
    let step = hf.decoder_sparse_step.unwrap_or(1);
    !listed.is_some_and(|dense| dense.contains(&i)) && step > 0 && (i + 1).is_multiple_of(step)
}

fn required(name: &'static str, value: Option<usize>) -> Result<usize, PlanError> {
    value.ok_or_else(|| PlanError::config(name, "a count", "nothing"))
}

/// The family of a configuration.
pub(crate) fn family(hf: &Config) -> Result<&'static Family, PlanError> {
    let model_type = hf
        .model_type
        .as_deref()
        .ok_or_else(|| PlanError::config("model_type", "a string", "nothing"))?;
    // The first BitNet models are declared as llama and are recognised only by this.
    if model_type == "llama" && hf.weight_bits == Some(1) {
        return Ok(Family::first_bitnet());
    }
    Family::of_hf(model_type).ok_or_else(|| PlanError::UnknownFamily {
        found: model_type.to_owned(),
        expected: Family::hf_model_types(),
    })
}

/// Which layers have rotary embedding.
fn rotated_layers(hf: &Config, family: &Family, n_layers: usize) -> Result<Vec<bool>, PlanError> {
    let has_none = match family.ssm {
        Some(SsmFamily::Granite) => hf.position_embedding_type.as_deref() == Some("nope"),
        Some(SsmFamily::FalconH1) => false,
        Some(SsmFamily::Mamba | SsmFamily::Mamba2 | SsmFamily::Jamba) => true,
        None => family.rwkv.is_some() || family.encoder,
    };
    if has_none {
        return Ok(vec![false; n_layers]);
    }
    let Some(default_interval) = family.no_rope_interval else {
        return Ok(vec![true; n_layers]);
    };
    if let Some(list) = &hf.no_rope_layers {
        check_per_layer("no_rope_layers", list.len(), n_layers)?;
        // The name is misleading: 1 marks a layer that has rotary embedding.
        return Ok(list.iter().map(|&rotated| rotated != 0).collect());
    }
    let interval = hf.no_rope_layer_interval.unwrap_or(default_interval);
    if interval == 0 {
        return Err(PlanError::config("no_rope_layer_interval", "at least 1", 0));
    }
    Ok((1..=n_layers)
        .map(|i| !i.is_multiple_of(interval))
        .collect())
}

/// The window of each layer.
fn windows(
    hf: &Config,
    family: &Family,
    rotated: &[bool],
) -> Result<Vec<Option<usize>>, PlanError> {
    let n_layers = rotated.len();
    let on = match family.windows {
        WindowPattern::All | WindowPattern::AllButEvery(_) => true,
        WindowPattern::Last | WindowPattern::Unrotated => hf.use_sliding_window == Some(true),
        WindowPattern::None => false,
    };
    let window = hf.sliding_window.or(family.hf_defaults.window);
    let Some(window) = window.filter(|_| on) else {
        return Ok(vec![None; n_layers]);
    };
    let windowed: Vec<bool> = match &hf.layer_types {
        Some(types) => {
            check_per_layer("layer_types", types.len(), n_layers)?;
            types
                .iter()
                .map(|kind| match kind.as_str() {
                    "sliding_attention" => Ok(true),
                    "full_attention" => Ok(false),
                    other => Err(PlanError::config(
                        "layer_types",
                        "full_attention or sliding_attention",
                        format!("`{other}`"),
                    )),
                })
                .collect::<Result<_, _>>()?
        }
        None => {
            let covers = |i: usize| match family.windows {
                WindowPattern::All => Ok(true),
                WindowPattern::AllButEvery(default) => {
                    match hf.sliding_window_pattern.unwrap_or(default) {
                        0 => Err(PlanError::config("sliding_window_pattern", "at least 1", 0)),
                        n => Ok(!(i + 1).is_multiple_of(n)),
                    }
                }
                WindowPattern::Last => {
                    Ok(i >= hf.max_window_layers.unwrap_or(QWEN_MAX_WINDOW_LAYERS))
                }
                WindowPattern::Unrotated => Ok(!rotated[i]),
                WindowPattern::None => Ok(false),
            };
            (0..n_layers).map(covers).collect::<Result<_, _>>()?
        }
    };
    Ok(windowed
        .into_iter()
        .map(|windowed| windowed.then_some(window))
        .collect())
}

fn check_per_layer(what: &'static str, found: usize, n_layers: usize) -> Result<(), PlanError> {
    if found == n_layers {
        Ok(())
    } else {
        Err(PlanError::config(
            what,
            format!("{n_layers} entries, one a layer"),
            found,
        ))
    }
}

/// The heads of layers without a window, if the family lets them differ from the others', `(n_kv_heads, head_dim)`.
fn wide_heads(
    hf: &Config,
    family: &Family,
    windows: &[Option<usize>],
    (n_kv_heads, head_dim): (usize, usize),
) -> Result<Option<WideHeads>, PlanError> {
    if !family.gemma4 {
        return Ok(None);
    }
    let mut wide = WideHeads {
        n_kv_heads: hf.num_global_key_value_heads.unwrap_or(n_kv_heads),
        head_dim: hf.global_head_dim.unwrap_or(head_dim),
        values_are_keys: hf.attention_k_eq_v == Some(true),
    };
    if let Some(layers) = &hf.per_layer_config {
        let of = |layer: usize| {
            let own = layers.iter().find(|own| own.layer == layer);
            let heads = own.and_then(|own| own.n_kv_heads);
            let dim = own.and_then(|own| own.head_dim);
            (heads.unwrap_or(n_kv_heads), dim.unwrap_or(head_dim))
        };
        let full = windows.iter().position(Option::is_none);
        (wide.n_kv_heads, wide.head_dim) = full.map_or((n_kv_heads, head_dim), of);
        for (i, window) in windows.iter().enumerate() {
            let expected = match window {
                Some(_) => (n_kv_heads, head_dim),
                None => (wide.n_kv_heads, wide.head_dim),
            };
            if of(i) != expected {
                let (expected, found) = (format!("{expected:?} in layer {i}"), of(i));
                return Err(PlanError::config(
                    "per_layer_config",
                    expected,
                    format!("{found:?}"),
                ));
            }
        }
    }
    Ok(Some(wide))
}

/// The rotary embeddings: of full layers, and of windowed ones where the family distinguishes them, whose heads have
/// the second number of elements.
fn ropes(
    hf: &Config,
    family: &Family,
    [head_dim, windowed_dim]: [usize; 2],
    max_ctx: usize,
) -> Result<Vec<RopeConfig>, PlanError> {
    let full = hf.rope("full_attention");
    let defaults = &family.hf_defaults;
    let whole = (head_dim, defaults.partial_rotary);
    let mut ropes = vec![rope(hf, &full, defaults.rope_base, whole, max_ctx)?];
    if let Some(base) = family.local_rope_base {
        let listed = match &hf.rope_parameters {
            Some(RopeSet::PerLayerType(types)) => types.get("sliding_attention").cloned(),
            _ => None,
        };
        // A file with a single set of parameters means it for full layers.
        let local = listed.unwrap_or_default();
        let base = hf.rope_local_base_freq.unwrap_or(base);
        let whole = (windowed_dim, defaults.partial_rotary);
        ropes.push(rope(hf, &local, base, whole, max_ctx)?);
    }
    Ok(ropes)
}

fn rope(
    hf: &Config,
    parameters: &RopeParameters,
    default_base: f64,
    (head_dim, partial): (usize, Option<f64>),
    max_ctx: usize,
) -> Result<RopeConfig, PlanError> {
    let is_phi3 = hf.model_type.as_deref() == Some("phi3");
    let kind = match parameters.rope_type.as_deref() {
        Some("su" | "yarn") if is_phi3 => "longrope",
        Some(kind) => kind,
        None => "default",
    };
    if kind == "proportional" {
        return proportional(parameters, default_base, head_dim);
    }
    let scaling = rope_scaling(hf, parameters, kind, max_ctx)?;
    let dim = match parameters.partial_rotary_factor.or(partial) {
        // The unscaled embedding of the other families rotates whole heads, whatever the file says.
        Some(part) if scaling != RopeScaling::None || is_phi3 || partial.is_some() => {
            if !(part > 0.0 && part <= 1.0) {
                return Err(PlanError::config(
                    "partial_rotary_factor",
                    "a number above 0, up to 1",
                    part,
                ));
            }
            (head_dim as f64 * part) as usize
        }
        _ => head_dim,
    };
    Ok(RopeConfig {
        dim,
        base: parameters.rope_theta.unwrap_or(default_base),
        layout: RopeLayout::Halves,
        scaling,
    })
}

/// Frequencies of whole heads, of which only the first part rotates.
fn proportional(
    parameters: &RopeParameters,
    default_base: f64,
    head_dim: usize,
) -> Result<RopeConfig, PlanError> {
    let part = parameters.partial_rotary_factor.unwrap_or(1.0);
    if !(part > 0.0 && part <= 1.0) {
        return Err(PlanError::config(
            "partial_rotary_factor",
            "a number above 0, up to 1",
            part,
        ));
    }
    let pairs = head_dim.div_ceil(2);
    let n_rotated = (head_dim as f64 * part / 2.0) as usize;
    let divisor = |pair| if pair < n_rotated { 1.0 } else { STILL };
    Ok(RopeConfig {
        dim: head_dim,
        base: parameters.rope_theta.unwrap_or(default_base),
        layout: RopeLayout::Halves,
        scaling: RopeScaling::Factors((0..pairs).map(divisor).collect()),
    })
}

fn rope_scaling(
    hf: &Config,
    p: &RopeParameters,
    kind: &str,
    max_ctx: usize,
) -> Result<RopeScaling, PlanError> {
    let required = |name: &'static str, value: Option<f64>| {
        value.ok_or_else(|| {
            PlanError::config(
                name,
                format!("a number, with rope scaling of type `{kind}`"),
                "nothing",
            )
        })
    };
    let original_ctx = hf
        .original_max_position_embeddings
        .or(p.original_max_position_embeddings)
        .unwrap_or(max_ctx);
    let stretch = max_ctx as f64 / original_ctx as f64;
    Ok(match kind {
        "default" => RopeScaling::None,
        "linear" => RopeScaling::Linear {
            factor: required("factor", p.factor)?,
        },
        "dynamic" => RopeScaling::Dynamic {
            factor: required("factor", p.factor)?,
            original_ctx: max_ctx,
        },
        "llama3" => RopeScaling::Llama3 {
            factor: required("factor", p.factor)?,
            low_freq_factor: required("low_freq_factor", p.low_freq_factor)?,
            high_freq_factor: required("high_freq_factor", p.high_freq_factor)?,
            original_ctx,
        },
        "yarn" => {
            let is_stretched = hf.original_max_position_embeddings.is_some()
                || p.original_max_position_embeddings.is_some();
            let factor = match p.factor {
                None if is_stretched => stretch,
                factor => required("factor", factor)?,
            };
            let attention_factor = match (p.attention_factor, p.mscale, p.mscale_all_dim) {
                (Some(given), _, _) => given,
                (None, Some(scale), Some(all_dim)) if scale != 0.0 && all_dim != 0.0 => {
                    yarn_magnitude(factor, scale) / yarn_magnitude(factor, all_dim)
                }
                _ => yarn_magnitude(factor, 1.0),
            };
            let beta = |value: Option<f64>, default| value.filter(|&v| v != 0.0).unwrap_or(default);
            RopeScaling::Yarn {
                factor,
                original_ctx,
                beta_fast: beta(p.beta_fast, 32.0),
                beta_slow: beta(p.beta_slow, 1.0),
                attention_factor,
                truncate: p.truncate.unwrap_or(true),
            }
        }
        "longrope" => {
            let factors = |name: &'static str, list: &Option<Vec<f64>>| match list {
                Some(list) => Ok(list.iter().map(|&f| f as f32).collect()),
                None => Err(PlanError::config(name, "a list of numbers", "nothing")),
            };
            RopeScaling::LongRope {
                short: factors("short_factor", &p.short_factor)?,
                long: factors("long_factor", &p.long_factor)?,
                original_ctx,
                attention_factor: p.attention_factor.unwrap_or_else(|| {
                    long_rope_magnitude(p.factor.unwrap_or(stretch), original_ctx)
                }),
            }
        }
        other => {
            return Err(PlanError::config(
                "rope_type",
                "default, linear, dynamic, llama3, yarn or longrope",
                format!("`{other}`"),
            ));
        }
    })
}
