//! Hugging Face tensor names to GGUF names and back.
//!
//! Only this module has Hugging Face's names of tensors; `rdrr::groups` and `rdrr::lora` have the looser
//! rules of the JavaScript runtime, which take other names too.

use crate::{TensorCatalog, TensorEntry};

/// What a Hugging Face tensor name means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// The tensor's GGUF name.
    Known(String),
    /// A tensor that the language model doesn't need: derived values, or another modality.
    Ignored,
    /// A name no table here has.
    Unknown,
}

/// Translates `name` as the checkpoints of family `model_type` (`model_type` in `config.json`) use it.
///
/// ```
/// use sterna_format::names::{Name, translate};
///
/// let name = translate("llama", "model.layers.7.self_attn.q_proj.weight");
/// assert_eq!(name, Name::Known("blk.7.attn_q.weight".into()));
/// ```
pub fn translate(model_type: &str, name: &str) -> Name {
    if is_ignored(name) || model_type == BERT && is_beyond_bert(name) {
        return Name::Ignored;
    }
    let name = PREFIXES
        .iter()
        .find_map(|prefix| name.strip_prefix(prefix))
        .unwrap_or(name);
    let in_blocks = match model_type {
        BERT => "encoder.layer.",
        _ if has_rwkv_blocks(model_type) => "blocks.",
        _ => "layers.",
    };
    let known = match name.strip_prefix(in_blocks) {
        Some(rest) => in_layer(model_type, rest),
        None => outside_layers(model_type, name),
    };
    known.map_or(Name::Unknown, Name::Known)
}

/// The Hugging Face module of a linear layer with the GGUF name `name` (no `.weight`), as the
/// exceptions of a quantisation configuration name it.
///
/// ```
/// use sterna_format::names::linear_module;
///
/// let module = linear_module("blk.7.attn_q");
/// assert_eq!(module.as_deref(), Some("model.layers.7.self_attn.q_proj"));
/// assert_eq!(linear_module("output").as_deref(), Some("lm_head"));
/// ```
pub fn linear_module(name: &str) -> Option<String> {
    if name == "output" {
        return Some("lm_head".into());
    }
    let (layer, module) = name.strip_prefix("blk.")?.split_once('.')?;
    let row = LINEARS.iter().find(|(_, gguf)| *gguf == module);
    row.map(|(hf, _)| format!("model.layers.{layer}.{hf}"))
}

/// The Hugging Face name of the tensor with the GGUF name `name`, as checkpoints of family `model_type`
/// have it: what [`translate`] makes `name` of. `None` for a name no table here has.
///
/// ```
/// use sterna_format::names::hugging_face;
///
/// let name = hugging_face("gemma2", "blk.7.ffn_norm.weight");
/// assert_eq!(name.as_deref(), Some("model.layers.7.pre_feedforward_layernorm.weight"));
/// ```
pub fn hugging_face(model_type: &str, name: &str) -> Option<String> {
    let stem = match is_mamba(model_type) {
        true => "backbone",
        false => "model",
    };
    let layers = match model_type {
        BERT => "encoder.layer".to_owned(),
        _ if has_rwkv_blocks(model_type) => "rwkv.blocks".to_owned(),
        _ => format!("{stem}.layers"),
    };
    if let Some((layer, rest)) = name.strip_prefix("blk.").and_then(|n| n.split_once('.'))
        && let Some((hf, _)) = bare(model_type).iter().find(|(_, gguf)| *gguf == rest)
    {
        return Some(format!("{layers}.{layer}.{hf}"));
    }
    let (module, kind) = name.rsplit_once('.')?;
    if let Some(embed_norm) = rwkv_embed_norm(model_type)
        && module == RWKV_EMBED_NORM
    {
        return Some(format!("{layers}.0.{embed_norm}.{kind}"));
    }
    if model_type == BERT
        && let Some((hf, _)) = BERT_OUTSIDE.iter().find(|(_, gguf)| *gguf == module)
    {
        return Some(format!("{hf}.{kind}"));
    }
    let outside = match module {
        "token_embd" if is_mamba(model_type) => Some(MAMBA_EMBEDDINGS),
        "token_embd" if model_type == RWKV7 => Some(RWKV7_EMBEDDINGS),
        "token_embd" if has_rwkv_blocks(model_type) => Some(RWKV_EMBEDDINGS),
        "output_norm" if has_rwkv_blocks(model_type) => Some("rwkv.ln_out"),
        "output" if has_rwkv_blocks(model_type) => Some(RWKV_HEAD),
        "token_embd" => Some(EMBEDDINGS),
        "output_norm" if is_lfm2(model_type) => Some(LFM2_OUTPUT_NORM),
        "output_norm" if is_mamba(model_type) => Some(MAMBA_OUTPUT_NORM),
        "output_norm" if is_hybrid(model_type) => Some(HYBRID_OUTPUT_NORM),
        "output_norm" => Some(OUTPUT_NORM),
        "output" => Some(HEAD),
        _ => None,
    };
    if let Some(weight) = outside {
        return Some(format!("{}.{kind}", weight.trim_end_matches(".weight")));
    }
    let inverse = |table: &[(&'static str, &str)], module: &str| {
        let row = table.iter().find(|(_, gguf)| *gguf == module);
        row.map(|(hf, _)| *hf)
    };
    if is_gemma4(model_type)
        && let Some(hf) = inverse(&GEMMA4_OUTSIDE, module)
    {
        return Some(format!("{stem}.{hf}.{kind}"));
    }
    let (layer, module) = module.strip_prefix("blk.")?.split_once('.')?;
    let module = match module.strip_suffix("_norm_in") {
        Some(linear) => format!("{}.rms_norm", inverse(&LINEARS, linear)?),
        None => inverse(own(model_type), module)
            .or_else(|| inverse(&LINEARS, module))
            .or_else(|| inverse(norms(model_type), module))
            .or_else(|| inverse(&OTHER_NORMS, module))
            .map(str::to_owned)
            .or_else(|| {
                let mixture = Mixture::of(model_type);
                if module == ROUTER {
                    return Some(mixture.router.to_owned());
                }
                let (part, expert) = module.split_once('.')?;
                let part = inverse(&mixture.parts, part).filter(|_| is_index(expert))?;
                Some(format!("{}{expert}.{part}", mixture.experts))
            })?,
    };
    Some(format!("{layers}.{layer}.{module}.{kind}"))
}

/// Two tensors of a checkpoint mean the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("tensor `{second}` means `{name}`, which another tensor does already")]
pub struct NameCollision {
    /// The GGUF name.
    pub name: String,
    /// The second tensor's name in the file.
    pub second: String,
}

/// A catalog with GGUF names: known tensors renamed, ignored ones left out, unknown ones kept. Each
/// remembers what the file calls it.
///
/// # Errors
///
/// [`NameCollision`] if two tensors end up with one name.
pub fn translate_catalog(
    model_type: &str,
    catalog: &TensorCatalog,
) -> Result<TensorCatalog, NameCollision> {
    let mut out = TensorCatalog::default();
    for entry in catalog.iter() {
        let name = match translate(model_type, &entry.name) {
            Name::Known(name) => name,
            Name::Unknown => entry.name.clone(),
            Name::Ignored => continue,
        };
        let renamed = TensorEntry {
            renamed_from: (name != entry.name).then(|| entry.name_in_file().to_owned()),
            name,
            ..entry.clone()
        };
        out.insert(renamed).map_err(|taken| NameCollision {
            name: taken.name,
            second: entry.name.clone(),
        })?;
    }
    Ok(out)
}

/// Where the language model sits: alone, in a multimodal model, or saved without its head.
const PREFIXES: [&str; 7] = [
    "bert.",
    "rwkv.",
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.",
    "backbone.",
];

/// What the language model doesn't need: other modalities, and layers that predict several tokens at once.
const OTHER_PARTS: [&str; 15] = [
    "mtp.",
    "vision_tower.",
    "vision_model.",
    "visual.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.vision_model.",
    "model.visual.",
    "model.multi_modal_projector.",
    "audio_tower.",
    "embed_audio.",
    "embed_vision.",
    "model.audio_tower.",
    "model.embed_audio.",
    "model.embed_vision.",
];

fn is_ignored(name: &str) -> bool {
    // Older checkpoints store the rotation frequencies, which the configuration gives as well.
    name.ends_with("rotary_emb.inv_freq") || OTHER_PARTS.iter().any(|p| name.starts_with(p))
}

fn outside_layers(model_type: &str, name: &str) -> Option<String> {
    let (module, kind) = name.rsplit_once('.')?;
    let module = match module {
        "embed_tokens" => "token_embd",
        "embeddings" if is_mamba(model_type) || is_rwkv(model_type) => "token_embd",
        "ln_out" if has_rwkv_blocks(model_type) => "output_norm",
        "head" if has_rwkv_blocks(model_type) => "output",
        "norm" => "output_norm",
        "embedding_norm" if is_lfm2(model_type) => "output_norm",
        "norm_f" if is_mamba(model_type) => "output_norm",
        "final_layernorm" if is_hybrid(model_type) => "output_norm",
        "lm_head" => "output",
        _ if is_gemma4(model_type) => find(&GEMMA4_OUTSIDE, module)?,
        _ if model_type == BERT => find(&BERT_OUTSIDE, module)?,
        _ => return None,
    };
    KINDS.contains(&kind).then(|| format!("{module}.{kind}"))
}

/// `rest` is what follows `layers.`, such as `3.mlp.up_proj.weight`.
fn in_layer(model_type: &str, rest: &str) -> Option<String> {
    let (layer, rest) = rest.split_once('.')?;
    if !is_index(layer) {
        return None;
    }
    if let Some(gguf) = find(bare(model_type), rest) {
        return Some(format!("blk.{layer}.{gguf}"));
    }
    let (module, kind) = rest.rsplit_once('.')?;
    if !KINDS.contains(&kind) {
        return None;
    }
    if layer == "0" && rwkv_embed_norm(model_type) == Some(module) {
        return Some(format!("{RWKV_EMBED_NORM}.{kind}"));
    }
    // As Transformers spells the norm of a linear layer, and as BitNet's embedding models do.
    let of_linear = [".rms_norm", ".norm"].map(|end| module.strip_suffix(end));
    let mut of_linear = of_linear.into_iter().flatten();
    if let Some(gguf) = of_linear.find_map(|linear| find(&LINEARS, linear)) {
        return Some(format!("blk.{layer}.{gguf}_norm_in.{kind}"));
    }
    let gguf = find(own(model_type), module)
        .or_else(|| find(&LINEARS, module))
        .or_else(|| find(norms(model_type), module))
        .or_else(|| find(&OTHER_NORMS, module));
    if let Some(gguf) = gguf {
        return Some(format!("blk.{layer}.{gguf}.{kind}"));
    }
    let mixture = Mixture::of(model_type);
    if module == mixture.router {
        return Some(format!("blk.{layer}.{ROUTER}.{kind}"));
    }
    let (expert, part) = module.strip_prefix(mixture.experts)?.split_once('.')?;
    let gguf = find(&mixture.parts, part).filter(|_| is_index(expert))?;
    Some(format!("blk.{layer}.{gguf}.{expert}.{kind}"))
}

/// Whether `text` is a number as names spell it: one spelling a number, so that no two names mean the same
/// tensor.
fn is_index(text: &str) -> bool {
    let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    plain && text.len() <= 4 && (text.len() == 1 || !text.starts_with('0'))
}

fn is_lfm2(model_type: &str) -> bool {
    matches!(model_type, "lfm2" | "lfm2_moe")
}

/// The norm before the output head of LFM2's checkpoints.
const LFM2_OUTPUT_NORM: &str = "model.embedding_norm.weight";

fn is_gemma4(model_type: &str) -> bool {
    matches!(model_type, "gemma4" | "gemma4_text")
}

/// Modules of Gemma 4 outside of layers: what each layer is given besides the residual stream.
const GEMMA4_OUTSIDE: [(&str, &str); 3] = [
    ("embed_tokens_per_layer", "per_layer_token_embd"),
    ("per_layer_model_projection", "per_layer_model_proj"),
    ("per_layer_projection_norm", "per_layer_proj_norm"),
];

/// How its layers take that in.
const GEMMA4_OWN: [(&str, &str); 3] = [
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
];

/// Encoders.
const BERT: &str = "bert";

/// Their embedding table.
const BERT_EMBEDDINGS: &str = "embeddings.word_embeddings.weight";

const BERT_OUTSIDE: [(&str, &str); 4] = [
    ("embeddings.word_embeddings", "token_embd"),
    ("embeddings.position_embeddings", "position_embd"),
    ("embeddings.token_type_embeddings", "token_types"),
    ("embeddings.LayerNorm", "token_embd_norm"),
];

const BERT_OWN: [(&str, &str); 8] = [
    ("attention.self.query", "attn_q"),
    ("attention.self.key", "attn_k"),
    ("attention.self.value", "attn_v"),
    ("attention.output.dense", "attn_output"),
    ("attention.output.LayerNorm", "attn_output_norm"),
    ("intermediate.dense", "ffn_up"),
    ("output.dense", "ffn_down"),
    ("output.LayerNorm", "layer_output_norm"),
];

/// Whether a tensor of an encoder's checkpoint belongs to what it was trained with: heads, and what follows from nothing.
fn is_beyond_bert(name: &str) -> bool {
    let name = name.strip_prefix("bert.").unwrap_or(name);
    name == "embeddings.position_ids" || ["pooler.", "cls."].iter().any(|p| name.starts_with(p))
}

/// gpt-oss.
const GPT_OSS: &str = "gpt_oss";

const GPT_OSS_OWN: [(&str, &str); 2] = [
    ("mlp.router", ROUTER),
    (module::POST_ATTENTION_NORM, "post_attention_norm"),
];

/// Sinks, and the tensors of all experts, in floats or in MXFP4, whose codes and scales are apart.
const GPT_OSS_BARE: [(&str, &str); 11] = [
    ("self_attn.sinks", "attn_sinks.weight"),
    ("mlp.experts.gate_up_proj", "ffn_gate_up_exps.weight"),
    ("mlp.experts.gate_up_proj_blocks", "ffn_gate_up_exps.blocks"),
    ("mlp.experts.gate_up_proj_scales", "ffn_gate_up_exps.scales"),
    ("mlp.experts.gate_up_proj_bias", "ffn_gate_up_exps.bias"),
    ("mlp.experts.down_proj", "ffn_down_exps.weight"),
    ("mlp.experts.down_proj_blocks", "ffn_down_exps.blocks"),
    ("mlp.experts.down_proj_scales", "ffn_down_exps.scales"),
    ("mlp.experts.down_proj_bias", "ffn_down_exps.bias"),
    // As packages have them.
    ("mlp.experts.gate_proj_bias", "ffn_gate_exps.bias"),
    ("mlp.experts.up_proj_bias", "ffn_up_exps.bias"),
];

fn is_deepseek(model_type: &str) -> bool {
    matches!(model_type, "deepseek_v2" | "deepseek_v3")
}

/// The first and the second Mamba, which have nothing but state spaces.
fn is_mamba(model_type: &str) -> bool {
    matches!(model_type, "mamba" | "mamba2")
}

/// Families whose checkpoints call state spaces `mamba` and networks `feed_forward`.
fn is_hybrid(model_type: &str) -> bool {
    matches!(model_type, "jamba" | "falcon_h1")
}

/// The embedding table of Mamba's checkpoints.
const MAMBA_EMBEDDINGS: &str = "backbone.embeddings.weight";
/// The norm before the output head of Mamba's checkpoints.
const MAMBA_OUTPUT_NORM: &str = "backbone.norm_f.weight";
/// The norm before the output head of Jamba's and Falcon-H1's checkpoints.
const HYBRID_OUTPUT_NORM: &str = "model.final_layernorm.weight";

/// Whether layers of the family have a gated delta net.
fn is_delta_net(model_type: &str) -> bool {
    model_type == "qwen3_next" || model_type.starts_with("qwen3_5")
}

/// The seventh generation of RWKV, as flash-linear-attention names it.
const RWKV7: &str = "rwkv7";

/// Generations of RWKV before, which Transformers or its like have.
fn has_rwkv_blocks(model_type: &str) -> bool {
    matches!(model_type, "rwkv" | "rwkv5" | "rwkv6")
}

fn is_rwkv(model_type: &str) -> bool {
    has_rwkv_blocks(model_type) || model_type == RWKV7
}

/// The embedding table of the seventh generation.
const RWKV7_EMBEDDINGS: &str = "model.embeddings.weight";
/// That of generations before.
const RWKV_EMBEDDINGS: &str = "rwkv.embeddings.weight";
/// Their output head.
const RWKV_HEAD: &str = "head.weight";

/// The norm of embeddings.
const RWKV_EMBED_NORM: &str = "token_embd_norm";

/// What checkpoints call it in their first layer.
fn rwkv_embed_norm(model_type: &str) -> Option<&'static str> {
    match model_type {
        RWKV7 => Some("pre_norm"),
        _ => has_rwkv_blocks(model_type).then_some("pre_ln"),
    }
}

/// Modules of generations before the seventh; the last are names of packages, whose matrices aren't transposed.
const RWKV: [(&str, &str); 15] = [
    ("ln1", "attn_norm"),
    ("ln2", "attn_norm_2"),
    ("attention.ln_x", "time_mix_ln"),
    ("attention.receptance", "time_mix_receptance"),
    ("attention.key", "time_mix_key"),
    ("attention.value", "time_mix_value"),
    ("attention.gate", "time_mix_gate"),
    ("attention.output", "time_mix_output"),
    ("feed_forward.key", "channel_mix_key"),
    ("feed_forward.receptance", "channel_mix_receptance"),
    ("feed_forward.value", "channel_mix_value"),
    ("attention.time_mix_w1", "time_mix_w1"),
    ("attention.time_mix_w2", "time_mix_w2"),
    ("attention.time_mix_decay_w1", "time_mix_decay_w1"),
    ("attention.time_mix_decay_w2", "time_mix_decay_w2"),
];

/// Factors of the fourth and fifth.
const RWKV_BARE: [(&str, &str); 9] = [
    ("attention.time_mix_receptance", "time_mix_lerp_r.weight"),
    ("attention.time_mix_key", "time_mix_lerp_k.weight"),
    ("attention.time_mix_value", "time_mix_lerp_v.weight"),
    ("attention.time_mix_gate", "time_mix_lerp_g.weight"),
    ("attention.time_decay", "time_mix_decay.weight"),
    ("attention.time_first", "time_mix_first.weight"),
    ("attention.time_faaaa", "time_mix_first.weight"),
    ("feed_forward.time_mix_key", "channel_mix_lerp_k.weight"),
    (
        "feed_forward.time_mix_receptance",
        "channel_mix_lerp_r.weight",
    ),
];

/// The same of the sixth, and its matrices whose rows are inputs.
const RWKV6_BARE: [(&str, &str); 14] = [
    ("attention.time_maa_x", "time_mix_lerp_x.weight"),
    ("attention.time_maa_w", "time_mix_lerp_w.weight"),
    ("attention.time_maa_k", "time_mix_lerp_k.weight"),
    ("attention.time_maa_v", "time_mix_lerp_v.weight"),
    ("attention.time_maa_r", "time_mix_lerp_r.weight"),
    ("attention.time_maa_g", "time_mix_lerp_g.weight"),
    ("attention.time_maa_w1", "time_mix_w1.transposed"),
    ("attention.time_maa_w2", "time_mix_w2.transposed"),
    ("attention.time_decay", "time_mix_decay.weight"),
    ("attention.time_decay_w1", "time_mix_decay_w1.transposed"),
    ("attention.time_decay_w2", "time_mix_decay_w2.transposed"),
    ("attention.time_faaaa", "time_mix_first.weight"),
    ("feed_forward.time_maa_k", "channel_mix_lerp_k.weight"),
    ("feed_forward.time_maa_r", "channel_mix_lerp_r.weight"),
];

const RWKV7_OWN: [(&str, &str); 9] = [
    ("attn_norm", "attn_norm"),
    ("ffn_norm", "attn_norm_2"),
    ("attn.g_norm", "time_mix_ln"),
    ("attn.r_proj", "time_mix_receptance"),
    ("attn.k_proj", "time_mix_key"),
    ("attn.v_proj", "time_mix_value"),
    ("attn.o_proj", "time_mix_output"),
    ("ffn.key", "channel_mix_key"),
    ("ffn.value", "channel_mix_value"),
];

const RWKV7_BARE: [(&str, &str); 21] = [
    ("attn.x_r", "time_mix_lerp_r.weight"),
    ("attn.x_w", "time_mix_lerp_w.weight"),
    ("attn.x_k", "time_mix_lerp_k.weight"),
    ("attn.x_v", "time_mix_lerp_v.weight"),
    ("attn.x_a", "time_mix_lerp_a.weight"),
    ("attn.x_g", "time_mix_lerp_g.weight"),
    ("attn.k_k", "time_mix_k_k.weight"),
    ("attn.k_a", "time_mix_k_a.weight"),
    ("attn.r_k", "time_mix_r_k.weight"),
    ("attn.w_lora.lora.0.weight", "time_mix_w1.weight"),
    ("attn.w_lora.lora.2.weight", "time_mix_w2.weight"),
    ("attn.w_lora.lora.2.bias", "time_mix_w0.weight"),
    ("attn.a_lora.lora.0.weight", "time_mix_a1.weight"),
    ("attn.a_lora.lora.2.weight", "time_mix_a2.weight"),
    ("attn.a_lora.lora.2.bias", "time_mix_a0.weight"),
    ("attn.v_lora.lora.0.weight", "time_mix_v1.weight"),
    ("attn.v_lora.lora.2.weight", "time_mix_v2.weight"),
    ("attn.v_lora.lora.2.bias", "time_mix_v0.weight"),
    ("attn.g_lora.lora.0.weight", "time_mix_g1.weight"),
    ("attn.g_lora.lora.2.weight", "time_mix_g2.weight"),
    ("ffn.x_k", "channel_mix_lerp_k.weight"),
];

/// Modules that only checkpoints of this family call so.
fn own(model_type: &str) -> &'static [(&'static str, &'static str)] {
    if model_type == BERT {
        &BERT_OWN
    } else if is_lfm2(model_type) {
        &LFM2
    } else if is_delta_net(model_type) {
        &DELTA_NET
    } else if model_type == GRANITE {
        &GRANITE_OWN
    } else if is_deepseek(model_type) {
        &DEEPSEEK
    } else if is_mamba(model_type) {
        &MAMBA
    } else if is_hybrid(model_type) {
        &HYBRID
    } else if model_type == GPT_OSS {
        &GPT_OSS_OWN
    } else if is_gemma4(model_type) {
        &GEMMA4_OWN
    } else if model_type == RWKV7 {
        &RWKV7_OWN
    } else if has_rwkv_blocks(model_type) {
        &RWKV
    } else {
        &[]
    }
}

/// Latent attention, and the expert of every row.
const DEEPSEEK: [(&str, &str); 11] = [
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    // The two parts of it head by head, the first transposed: as GGUF files have them, and packages.
    ("self_attn.k_b_proj", "attn_k_b"),
    ("self_attn.v_b_proj", "attn_v_b"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
];

const MAMBA: [(&str, &str); 7] = [
    ("mixer.in_proj", "ssm_in"),
    ("mixer.conv1d", "ssm_conv1d"),
    ("mixer.x_proj", "ssm_x"),
    ("mixer.dt_proj", "ssm_dt"),
    ("mixer.norm", "ssm_norm"),
    ("mixer.out_proj", "ssm_out"),
    ("norm", "attn_norm"),
];

const HYBRID: [(&str, &str); 14] = [
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.x_proj", "ssm_x"),
    ("mamba.dt_proj", "ssm_dt"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.dt_layernorm", "ssm_dt_norm"),
    ("mamba.b_layernorm", "ssm_b_norm"),
    ("mamba.c_layernorm", "ssm_c_norm"),
    ("mamba.out_proj", "ssm_out"),
    ("feed_forward.gate_proj", "ffn_gate"),
    ("feed_forward.up_proj", "ffn_up"),
    ("feed_forward.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
    ("pre_ff_layernorm", "ffn_norm"),
];

/// Granite 4.
const GRANITE: &str = "granitemoehybrid";

const GRANITE_OWN: [(&str, &str); 12] = [
    ("mamba.in_proj", "ssm_in"),
    ("mamba.conv1d", "ssm_conv1d"),
    ("mamba.norm", "ssm_norm"),
    ("mamba.out_proj", "ssm_out"),
    ("block_sparse_moe.router.layer", "ffn_gate_inp"),
    ("block_sparse_moe.input_linear", "ffn_gate_up_exps"),
    ("block_sparse_moe.output_linear", "ffn_down_exps"),
    // As packages have them, and with gate and up in one matrix.
    ("shared_mlp.gate_proj", "ffn_gate_shexp"),
    ("shared_mlp.up_proj", "ffn_up_shexp"),
    ("shared_mlp.down_proj", "ffn_down_shexp"),
    ("shared_mlp.input_linear", "ffn_up_shexp"),
    ("shared_mlp.output_linear", "ffn_down_shexp"),
];

const LFM2: [(&str, &str); 11] = [
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w3", "ffn_up"),
    ("feed_forward.w2", "ffn_down"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("conv.out_proj", "shortconv.out_proj"),
];

const DELTA_NET: [(&str, &str); 14] = [
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    // Both of the two in one matrix, in checkpoints of Qwen3-Next.
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    (module::POST_ATTENTION_NORM, "post_attention_norm"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
];

/// Tensors whose names in checkpoints of this family end with no kind.
fn bare(model_type: &str) -> &'static [(&'static str, &'static str)] {
    if model_type == RWKV7 {
        &RWKV7_BARE
    } else if model_type == "rwkv6" {
        &RWKV6_BARE
    } else if has_rwkv_blocks(model_type) {
        &RWKV_BARE
    } else if is_deepseek(model_type) {
        &[("mlp.gate.e_score_correction_bias", "exp_probs_b.bias")]
    } else if is_lfm2(model_type) {
        &[("feed_forward.expert_bias", "exp_probs_b.bias")]
    } else if is_delta_net(model_type) {
        &[
            ("linear_attn.A_log", "ssm_a"),
            // As GGUF files have it, whose logarithm may not give back every bit.
            ("linear_attn.A", "ssm_a"),
            ("linear_attn.dt_bias", "ssm_dt.bias"),
        ]
    } else if is_mamba(model_type) {
        let all = &[
            ("mixer.A_log", "ssm_a"),
            ("mixer.A", "ssm_a"),
            ("mixer.D", "ssm_d"),
            ("mixer.dt_bias", "ssm_dt.bias"),
        ];
        // The bias of a linear layer in the first.
        if model_type == "mamba2" {
            all
        } else {
            &all[..3]
        }
    } else if model_type == "jamba" {
        &[
            ("mamba.A_log", "ssm_a"),
            ("mamba.A", "ssm_a"),
            ("mamba.D", "ssm_d"),
        ]
    } else if model_type == GRANITE || is_hybrid(model_type) {
        &[
            ("mamba.A_log", "ssm_a"),
            ("mamba.A", "ssm_a"),
            ("mamba.D", "ssm_d"),
            ("mamba.dt_bias", "ssm_dt.bias"),
        ]
    } else if model_type == GPT_OSS {
        &GPT_OSS_BARE
    } else if is_gemma4(model_type) {
        &[("layer_scalar", "layer_output_scale.weight")]
    } else {
        &[]
    }
}

/// Modules of a mixture of experts.
struct Mixture {
    router: &'static str,
    /// What the number of an expert follows.
    experts: &'static str,
    /// The matrices of an expert.
    parts: [(&'static str, &'static str); 3],
}

impl Mixture {
    /// What checkpoints of this family call them.
    fn of(model_type: &str) -> &'static Mixture {
        match model_type {
            "mixtral" => &Mixture {
                router: "block_sparse_moe.gate",
                experts: "block_sparse_moe.experts.",
                parts: W_PARTS,
            },
            "lfm2_moe" => &Mixture {
                router: "feed_forward.gate",
                experts: "feed_forward.experts.",
                parts: W_PARTS,
            },
            "jamba" => &Mixture {
                router: "feed_forward.router",
                experts: "feed_forward.experts.",
                parts: PARTS,
            },
            _ => &Mixture {
                router: "mlp.gate",
                experts: "mlp.experts.",
                parts: PARTS,
            },
        }
    }
}

const PARTS: [(&str, &str); 3] = [
    ("gate_proj", "ffn_gate"),
    ("up_proj", "ffn_up"),
    ("down_proj", "ffn_down"),
];

const W_PARTS: [(&str, &str); 3] = [("w1", "ffn_gate"), ("w3", "ffn_up"), ("w2", "ffn_down")];

/// The router of a mixture of experts in GGUF files.
const ROUTER: &str = "ffn_gate_inp";

/// Whether the tensor with the GGUF or Hugging Face name `name` is the embedding table.
///
/// ```
/// use sterna_format::names::is_embeddings;
///
/// assert!(is_embeddings("token_embd.weight"));
/// assert!(is_embeddings("backbone.embeddings.weight"));
/// assert!(!is_embeddings("lm_head.weight"));
/// ```
pub fn is_embeddings(name: &str) -> bool {
    matches!(
        name,
        "token_embd.weight"
            | EMBEDDINGS
            | MAMBA_EMBEDDINGS
            | RWKV_EMBEDDINGS
            | RWKV7_EMBEDDINGS
            | BERT_EMBEDDINGS
    )
}

/// Whether it is the output head, where that isn't the embedding table.
pub fn is_head(name: &str) -> bool {
    matches!(name, "output.weight" | HEAD | RWKV_HEAD)
}

/// Whether the tensor with the Hugging Face name `name` belongs to a layer.
pub fn is_in_layer(name: &str) -> bool {
    [".layers.", ".blocks.", "encoder.layer."]
        .iter()
        .any(|part| name.contains(part))
}

/// The norms that families name differently.
fn norms(model_type: &str) -> &'static [(&'static str, &'static str)] {
    match model_type {
        "gemma2" | "gemma3" | "gemma3_text" => &GEMMA_NORMS,
        _ if is_gemma4(model_type) => &GEMMA_NORMS,
        _ => &LLAMA_NORMS,
    }
}

fn find(table: &[(&str, &'static str)], module: &str) -> Option<&'static str> {
    let row = table.iter().find(|(hf, _)| *hf == module);
    row.map(|&(_, gguf)| gguf)
}

/// What a module stores. `weight_scale` belongs to packed ternary weights.
const KINDS: [&str; 3] = ["weight", "bias", "weight_scale"];

/// The embedding table of a Hugging Face checkpoint.
pub const EMBEDDINGS: &str = "model.embed_tokens.weight";
/// The norm before the output head of a Hugging Face checkpoint.
pub const OUTPUT_NORM: &str = "model.norm.weight";
/// The output head of a Hugging Face checkpoint, where it isn't the embedding table.
pub const HEAD: &str = "lm_head.weight";

/// Paths of modules within a layer of a Hugging Face checkpoint.
// Their names say what they are.
#[allow(missing_docs)]
pub mod module {
    pub const Q: &str = "self_attn.q_proj";
    pub const K: &str = "self_attn.k_proj";
    pub const V: &str = "self_attn.v_proj";
    pub const QKV: &str = "self_attn.qkv_proj";
    pub const O: &str = "self_attn.o_proj";
    pub const GATE: &str = "mlp.gate_proj";
    pub const UP: &str = "mlp.up_proj";
    pub const GATE_UP: &str = "mlp.gate_up_proj";
    pub const DOWN: &str = "mlp.down_proj";
    pub const INPUT_NORM: &str = "input_layernorm";
    pub const POST_ATTENTION_NORM: &str = "post_attention_layernorm";
    pub const PRE_FFN_NORM: &str = "pre_feedforward_layernorm";
    pub const POST_FFN_NORM: &str = "post_feedforward_layernorm";
    pub const Q_NORM: &str = "self_attn.q_norm";
    pub const K_NORM: &str = "self_attn.k_norm";
    pub const ATTN_SUB_NORM: &str = "self_attn.attn_sub_norm";
    pub const FFN_SUB_NORM: &str = "mlp.ffn_sub_norm";

    /// What the module at `path` within its layer is called by itself, such as `q_proj`.
    pub fn name(path: &'static str) -> &'static str {
        path.rsplit('.').next().unwrap_or(path)
    }
}

const LINEARS: [(&str, &str); 9] = [
    (module::Q, "attn_q"),
    (module::K, "attn_k"),
    (module::V, "attn_v"),
    (module::QKV, "attn_qkv"),
    (module::O, "attn_output"),
    (module::GATE, "ffn_gate"),
    (module::UP, "ffn_up"),
    // Gate and up in one matrix, under the name that GGUF's phi3 gives it.
    (module::GATE_UP, "ffn_up"),
    (module::DOWN, "ffn_down"),
];

const LLAMA_NORMS: [(&str, &str); 2] = [
    (module::INPUT_NORM, "attn_norm"),
    (module::POST_ATTENTION_NORM, "ffn_norm"),
];

/// Gemma 2 and 3 have norms before and after both halves of a layer.
const GEMMA_NORMS: [(&str, &str); 4] = [
    (module::INPUT_NORM, "attn_norm"),
    (module::POST_ATTENTION_NORM, "post_attention_norm"),
    (module::PRE_FFN_NORM, "ffn_norm"),
    (module::POST_FFN_NORM, "post_ffw_norm"),
];

const OTHER_NORMS: [(&str, &str); 6] = [
    (module::Q_NORM, "attn_q_norm"),
    (module::K_NORM, "attn_k_norm"),
    // BitNet as Microsoft and as 1bitLLM spell it.
    (module::ATTN_SUB_NORM, "attn_sub_norm"),
    (OLDER[0].1, "attn_sub_norm"),
    (module::FFN_SUB_NORM, "ffn_sub_norm"),
    (OLDER[1].1, "ffn_sub_norm"),
];

/// Modules, and what older BitNet checkpoints (1bitLLM's) call them.
const OLDER: [(&str, &str); 2] = [
    (module::ATTN_SUB_NORM, "self_attn.inner_attn_ln"),
    (module::FFN_SUB_NORM, "mlp.ffn_layernorm"),
];

/// What older BitNet checkpoints call the tensor with the Hugging Face name `name`, where that is
/// something else.
///
/// ```
/// use sterna_format::names::older;
///
/// let name = older("model.layers.1.mlp.ffn_sub_norm.weight");
/// assert_eq!(name.as_deref(), Some("model.layers.1.mlp.ffn_layernorm.weight"));
/// assert_eq!(older("model.norm.weight"), None);
/// ```
pub fn older(name: &str) -> Option<String> {
    let (new, old) = OLDER.iter().find(|(new, _)| name.contains(new))?;
    Some(name.replace(new, old))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType;

    #[test]
    fn names_of_every_family() {
        for (model_type, hf, gguf) in [
            ("llama", "model.embed_tokens.weight", "token_embd.weight"),
            ("llama", "model.norm.weight", "output_norm.weight"),
            ("llama", "lm_head.weight", "output.weight"),
            (
                "llama",
                "model.layers.0.self_attn.o_proj.weight",
                "blk.0.attn_output.weight",
            ),
            (
                "llama",
                "model.layers.12.mlp.down_proj.bias",
                "blk.12.ffn_down.bias",
            ),
            (
                "llama",
                "model.layers.1.post_attention_layernorm.weight",
                "blk.1.ffn_norm.weight",
            ),
            (
                "llama",
                "model.layers.1.self_attn.q_proj.weight_scale",
                "blk.1.attn_q.weight_scale",
            ),
            (
                "qwen2",
                "model.layers.1.self_attn.k_proj.bias",
                "blk.1.attn_k.bias",
            ),
            (
                "qwen3",
                "model.layers.1.self_attn.q_norm.weight",
                "blk.1.attn_q_norm.weight",
            ),
            (
                "qwen3",
                "layers.1.self_attn.q_proj.rms_norm.weight",
                "blk.1.attn_q_norm_in.weight",
            ),
            (
                "qwen3",
                "model.layers.1.self_attn.o_proj.rms_norm.weight",
                "blk.1.attn_output_norm_in.weight",
            ),
            (
                "qwen3",
                "layers.1.self_attn.q_proj.norm.weight",
                "blk.1.attn_q_norm_in.weight",
            ),
            (
                "qwen3",
                "model.layers.1.mlp.gate_proj.rms_norm.weight",
                "blk.1.ffn_gate_norm_in.weight",
            ),
            (
                "gemma2",
                "model.layers.1.input_layernorm.weight",
                "blk.1.attn_norm.weight",
            ),
            (
                "gemma2",
                "model.layers.1.post_attention_layernorm.weight",
                "blk.1.post_attention_norm.weight",
            ),
            (
                "gemma3",
                "model.layers.1.pre_feedforward_layernorm.weight",
                "blk.1.ffn_norm.weight",
            ),
            (
                "gemma3_text",
                "model.layers.1.post_feedforward_layernorm.weight",
                "blk.1.post_ffw_norm.weight",
            ),
            (
                "gemma3_text",
                "language_model.model.layers.1.self_attn.k_norm.weight",
                "blk.1.attn_k_norm.weight",
            ),
            (
                "gemma3_text",
                "model.language_model.embed_tokens.weight",
                "token_embd.weight",
            ),
            (
                "gemma3_text",
                "language_model.lm_head.weight",
                "output.weight",
            ),
            (
                "phi3",
                "model.layers.1.self_attn.qkv_proj.weight",
                "blk.1.attn_qkv.weight",
            ),
            (
                "phi3",
                "model.layers.1.mlp.gate_up_proj.weight",
                "blk.1.ffn_up.weight",
            ),
            (
                "mixtral",
                "model.layers.1.block_sparse_moe.gate.weight",
                "blk.1.ffn_gate_inp.weight",
            ),
            (
                "mixtral",
                "model.layers.1.block_sparse_moe.experts.7.w2.weight",
                "blk.1.ffn_down.7.weight",
            ),
            (
                "bert",
                "bert.embeddings.LayerNorm.bias",
                "token_embd_norm.bias",
            ),
            (
                "bert",
                "encoder.layer.1.output.LayerNorm.weight",
                "blk.1.layer_output_norm.weight",
            ),
            (
                "bert",
                "encoder.layer.1.attention.self.query.bias",
                "blk.1.attn_q.bias",
            ),
            ("lfm2", "model.embedding_norm.weight", "output_norm.weight"),
            (
                "lfm2",
                "model.layers.1.conv.conv.weight",
                "blk.1.shortconv.conv.weight",
            ),
            (
                "lfm2_moe",
                "model.layers.1.feed_forward.expert_bias",
                "blk.1.exp_probs_b.bias",
            ),
            (
                "lfm2_moe",
                "model.layers.1.feed_forward.experts.3.w3.weight",
                "blk.1.ffn_up.3.weight",
            ),
            (
                "olmoe",
                "model.layers.1.mlp.gate.weight",
                "blk.1.ffn_gate_inp.weight",
            ),
            (
                "qwen3_moe",
                "model.layers.1.mlp.experts.127.up_proj.weight",
                "blk.1.ffn_up.127.weight",
            ),
            (
                "qwen3_5_text",
                "model.language_model.layers.1.linear_attn.in_proj_qkv.weight",
                "blk.1.attn_qkv.weight",
            ),
            ("qwen3_5", "model.layers.1.linear_attn.A_log", "blk.1.ssm_a"),
            (
                "qwen3_5_moe_text",
                "model.layers.1.linear_attn.dt_bias",
                "blk.1.ssm_dt.bias",
            ),
            (
                "qwen3_next",
                "model.layers.1.post_attention_layernorm.weight",
                "blk.1.post_attention_norm.weight",
            ),
            (
                "qwen3_next",
                "model.layers.1.mlp.shared_expert_gate.weight",
                "blk.1.ffn_gate_inp_shexp.weight",
            ),
            ("rwkv", "rwkv.embeddings.weight", "token_embd.weight"),
            ("rwkv", "rwkv.ln_out.bias", "output_norm.bias"),
            ("rwkv5", "head.weight", "output.weight"),
            ("rwkv6", "rwkv.blocks.0.pre_ln.bias", "token_embd_norm.bias"),
            (
                "rwkv6",
                "rwkv.blocks.2.attention.time_maa_w2",
                "blk.2.time_mix_w2.transposed",
            ),
            (
                "rwkv",
                "rwkv.blocks.2.feed_forward.time_mix_receptance",
                "blk.2.channel_mix_lerp_r.weight",
            ),
            (
                "rwkv7",
                "model.layers.0.pre_norm.weight",
                "token_embd_norm.weight",
            ),
            (
                "rwkv7",
                "model.layers.1.attn.v_lora.lora.2.bias",
                "blk.1.time_mix_v0.weight",
            ),
            (
                "rwkv7",
                "model.layers.1.ffn_norm.bias",
                "blk.1.attn_norm_2.bias",
            ),
            (
                "bitnet",
                "model.layers.1.self_attn.attn_sub_norm.weight",
                "blk.1.attn_sub_norm.weight",
            ),
            (
                "bitnet",
                "model.layers.1.mlp.ffn_sub_norm.weight",
                "blk.1.ffn_sub_norm.weight",
            ),
            (
                "llama",
                "model.layers.1.self_attn.inner_attn_ln.weight",
                "blk.1.attn_sub_norm.weight",
            ),
            (
                "llama",
                "model.layers.1.mlp.ffn_layernorm.weight",
                "blk.1.ffn_sub_norm.weight",
            ),
        ] {
            assert_eq!(
                translate(model_type, hf),
                Name::Known(gguf.into()),
                "{model_type} {hf}"
            );
        }
    }

    #[test]
    fn names_are_translated_back() {
        for model_type in ["llama", "bitnet", "qwen3", "gemma2", "gemma3_text"] {
            let modules = LINEARS.iter().chain(norms(model_type)).chain(&OTHER_NORMS);
            let in_layers = modules.flat_map(|(_, gguf)| {
                ["weight", "bias"].map(|kind| format!("blk.3.{gguf}.{kind}"))
            });
            let others = ["token_embd.weight", "output_norm.weight", "output.weight"];
            let others = others.into_iter().chain(["blk.12.attn_q_norm_in.weight"]);
            for gguf in in_layers.chain(others.map(str::to_owned)) {
                let hf = hugging_face(model_type, &gguf).unwrap();
                assert_eq!(
                    translate(model_type, &hf),
                    Name::Known(gguf),
                    "{model_type} {hf}"
                );
            }
        }
        for name in [
            "",
            "weight",
            "blk.0.weight",
            "rope_freqs.weight",
            "blk.1.attn_x.weight",
        ] {
            assert_eq!(hugging_face("llama", name), None, "{name}");
        }
    }

    #[test]
    fn names_left_out_and_names_unheard_of() {
        for name in [
            "model.layers.0.self_attn.rotary_emb.inv_freq",
            "rotary_emb.inv_freq",
            "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",
            "model.multi_modal_projector.mm_soft_emb_norm.weight",
        ] {
            assert_eq!(translate("gemma3", name), Name::Ignored, "{name}");
        }
        for name in [
            "",
            "weight",
            "model.layers.weight",
            "model.layers.01.mlp.up_proj.weight",
            "model.layers.-1.mlp.up_proj.weight",
            "model.layers.99999.mlp.up_proj.weight",
            "model.layers.0.mlp.up_proj.lora_a",
            "model.layers.0.mlp.experts.00.up_proj.weight",
            "model.layers.0.pre_feedforward_layernorm.weight",
            "model.layers.0.input_layernorm.rms_norm.weight",
        ] {
            assert_eq!(translate("llama", name), Name::Unknown, "{name}");
        }
    }

    #[test]
    fn a_catalog_is_renamed_in_place() {
        let catalog = |names: &[&str]| {
            let mut catalog = TensorCatalog::default();
            for (i, &name) in names.iter().enumerate() {
                let entry = TensorEntry {
                    name: name.into(),
                    renamed_from: None,
                    dtype: DType::F32,
                    shape: vec![1],
                    file: i,
                    offset: 0,
                    len: 4,
                };
                catalog.insert(entry).unwrap();
            }
            catalog
        };
        let hf = catalog(&["model.norm.weight", "rotary_emb.inv_freq", "extra"]);
        let out = translate_catalog("llama", &hf).unwrap();
        let names: Vec<_> = out.iter().map(|t| (&*t.name, t.file)).collect();
        assert_eq!(names, [("output_norm.weight", 0), ("extra", 2)]);
        let in_file: Vec<_> = out.iter().map(TensorEntry::name_in_file).collect();
        assert_eq!(in_file, ["model.norm.weight", "extra"]);

        let twice = catalog(&["model.norm.weight", "norm.weight"]);
        assert_eq!(
            translate_catalog("llama", &twice).unwrap_err().to_string(),
            "tensor `norm.weight` means `output_norm.weight`, which another tensor does already"
        );
    }
}
