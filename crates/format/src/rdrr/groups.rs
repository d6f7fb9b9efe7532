//! Component groups: the parts of a model that can be exchanged separately.
//!
//! [`group_of`] decides by a tensor's Hugging Face name, in the order in which the JavaScript
//! runtime decides, so that both give every tensor the same group.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

use serde_json::{Map, Value};

use super::tensors::Role;

/// What a group is.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum GroupKind {
    Embed,
    Layer,
    Head,
    Expert,
    Shared,
    Mamba,
    Rwkv,
    Attn,
    /// A word not known here, such as `vision`.
    Other(String),
}

impl GroupKind {
    pub(super) fn parse(name: &str) -> GroupKind {
        match name {
            "embed" => GroupKind::Embed,
            "layer" => GroupKind::Layer,
            "head" => GroupKind::Head,
            "expert" => GroupKind::Expert,
            "shared" => GroupKind::Shared,
            "mamba" => GroupKind::Mamba,
            "rwkv" => GroupKind::Rwkv,
            "attn" => GroupKind::Attn,
            other => GroupKind::Other(other.to_owned()),
        }
    }

    /// The spelling in files.
    pub fn name(&self) -> &str {
        match self {
            GroupKind::Embed => "embed",
            GroupKind::Layer => "layer",
            GroupKind::Head => "head",
            GroupKind::Expert => "expert",
            GroupKind::Shared => "shared",
            GroupKind::Mamba => "mamba",
            GroupKind::Rwkv => "rwkv",
            GroupKind::Attn => "attn",
            GroupKind::Other(name) => name,
        }
    }
}

/// The id of a group, as the rules of this module make them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum GroupId {
    /// The embedding table.
    Embed,
    /// A layer, or what is in it and belongs to no part below.
    Layer(u32),
    /// Routers of a mixture of experts.
    LayerShared(u32),
    /// Experts that every token meets.
    LayerSharedExpert(u32),
    /// One expert of a layer.
    LayerExpert(u32, u32),
    /// The attention of a hybrid layer.
    LayerAttn(u32),
    /// The state space part of a hybrid layer.
    LayerMamba(u32),
    /// What is in no layer and neither embedding nor head.
    Other,
    /// The output head and the norm before it.
    Head,
}

impl GroupId {
    /// The layer, of groups that belong to one.
    pub fn layer_index(self) -> Option<u32> {
        match self {
            GroupId::Layer(n)
            | GroupId::LayerShared(n)
            | GroupId::LayerSharedExpert(n)
            | GroupId::LayerExpert(n, _)
            | GroupId::LayerAttn(n)
            | GroupId::LayerMamba(n) => Some(n),
            GroupId::Embed | GroupId::Other | GroupId::Head => None,
        }
    }

    /// The expert within its layer.
    pub fn expert_index(self) -> Option<u32> {
        match self {
            GroupId::LayerExpert(_, n) => Some(n),
            _ => None,
        }
    }

    /// What the group is, in a model of type `model_type`.
    pub fn kind(self, model_type: &str) -> GroupKind {
        match self {
            GroupId::Embed => GroupKind::Embed,
            GroupId::Head => GroupKind::Head,
            GroupId::Other | GroupId::LayerShared(_) => GroupKind::Layer,
            GroupId::LayerExpert(..) => GroupKind::Expert,
            GroupId::LayerSharedExpert(_) => GroupKind::Shared,
            GroupId::LayerAttn(_) => GroupKind::Attn,
            GroupId::LayerMamba(_) => GroupKind::Mamba,
            GroupId::Layer(_) => match model_type {
                "mamba" => GroupKind::Mamba,
                "rwkv" => GroupKind::Rwkv,
                _ => GroupKind::Layer,
            },
        }
    }

    /// Place in the order of `groups`: the embedding table, layers with their parts, what is in no
    /// layer, the head.
    fn rank(self) -> (u8, u32, u8, u32) {
        match self {
            GroupId::Embed => (0, 0, 0, 0),
            GroupId::LayerShared(n) => (1, n, 0, 0),
            GroupId::LayerAttn(n) => (1, n, 1, 0),
            GroupId::LayerMamba(n) => (1, n, 2, 0),
            GroupId::LayerExpert(n, expert) => (1, n, 3, expert),
            GroupId::Layer(n) => (1, n, 4, 0),
            GroupId::LayerSharedExpert(n) => (1, n, 5, 0),
            GroupId::Other => (2, 0, 0, 0),
            GroupId::Head => (3, 0, 0, 0),
        }
    }
}

impl Ord for GroupId {
    fn cmp(&self, other: &GroupId) -> Ordering {
        self.rank().cmp(&other.rank())
    }
}

impl PartialOrd for GroupId {
    fn partial_cmp(&self, other: &GroupId) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for GroupId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GroupId::Embed => f.write_str("embed"),
            GroupId::Head => f.write_str("head"),
            GroupId::Other => f.write_str("other"),
            GroupId::Layer(n) => write!(f, "layer.{n}"),
            GroupId::LayerShared(n) => write!(f, "layer.{n}.shared"),
            GroupId::LayerSharedExpert(n) => write!(f, "layer.{n}.shared_expert"),
            GroupId::LayerExpert(n, expert) => write!(f, "layer.{n}.expert.{expert}"),
            GroupId::LayerAttn(n) => write!(f, "layer.{n}.attn"),
            GroupId::LayerMamba(n) => write!(f, "layer.{n}.mamba"),
        }
    }
}

/// A text that isn't a group id by this module's rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected a group id such as embed, layer.0, layer.0.expert.1 or head")]
pub struct UnknownGroupId;

impl FromStr for GroupId {
    type Err = UnknownGroupId;

    fn from_str(id: &str) -> Result<GroupId, UnknownGroupId> {
        let number = |text: &str| text.parse().map_err(|_| UnknownGroupId);
        let parts: Vec<&str> = id.split('.').collect();
        let group = match parts[..] {
            ["embed"] => GroupId::Embed,
            ["head"] => GroupId::Head,
            ["other"] => GroupId::Other,
            ["layer", n] => GroupId::Layer(number(n)?),
            ["layer", n, "shared"] => GroupId::LayerShared(number(n)?),
            ["layer", n, "shared_expert"] => GroupId::LayerSharedExpert(number(n)?),
            ["layer", n, "attn"] => GroupId::LayerAttn(number(n)?),
            ["layer", n, "mamba"] => GroupId::LayerMamba(number(n)?),
            ["layer", n, "expert", expert] => GroupId::LayerExpert(number(n)?, number(expert)?),
            _ => return Err(UnknownGroupId),
        };
        // One spelling a group: no signs, no leading zeros.
        match group.to_string() == id {
            true => Ok(group),
            false => Err(UnknownGroupId),
        }
    }
}

/// The group of the tensor called `name` in a model of type `model_type`.
///
/// Names are Hugging Face's. Those of RWKV and Mamba that the JavaScript runtime's rules know nothing
/// of (`blocks.N`, `emb`, `ln_out`, `backbone.embeddings`) have their places too.
pub fn group_of(name: &str, model_type: &str) -> GroupId {
    let name = name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let recurrent = matches!(model_type, "rwkv" | "mamba");
    let layer = indexed(&name, "layer").or(match recurrent {
        true => indexed(&name, "block"),
        false => None,
    });
    let embed = [
        "embed_tokens",
        "token_embd",
        "wte.weight",
        "word_embeddings",
    ];
    let recurrent_embed = ["embeddings.weight", "emb.weight"];
    if has(&embed) || (recurrent && layer.is_none() && has(&recurrent_embed)) {
        return GroupId::Embed;
    }
    // Recurrent layers have outputs of their own, which no other name says.
    let may_be_head = !recurrent || layer.is_none();
    if (may_be_head && (has(&["lm_head", "output.weight"]) || name.ends_with(".output")))
        || (has(&["norm"]) && has(&["final", "model.norm", "norm_f"]))
        || matches!(name.as_str(), "norm.weight" | "norm.bias")
        || (recurrent && layer.is_none() && (has(&["ln_out"]) || name == "head.weight"))
    {
        return GroupId::Head;
    }
    let Some(layer) = layer else {
        return GroupId::Other;
    };
    if let Some(expert) = indexed(&name, "expert") {
        return match has(&["shared_expert"]) {
            true => GroupId::LayerSharedExpert(layer),
            false => GroupId::LayerExpert(layer, expert),
        };
    }
    if has(&["block_sparse_moe.gate", "router", "moe.gate"]) {
        return GroupId::LayerShared(layer);
    }
    if matches!(model_type, "jamba" | "hybrid") {
        if has(&["self_attn", "attention"]) {
            return GroupId::LayerAttn(layer);
        }
        if has(&["mamba"]) {
            return GroupId::LayerMamba(layer);
        }
    }
    GroupId::Layer(layer)
}

/// What messages expect of a group's version.
pub(super) const SEMANTIC_VERSION: &str = "a semantic version such as 1.2.0";

/// Whether `text` is a version by the rules of semver.org: three numbers, then perhaps `-` and the identifiers
/// of a pre-release, then perhaps `+` and those of a build.
///
/// ```
/// use sterna_format::rdrr::groups::is_semantic_version;
///
/// assert!(is_semantic_version("1.2.0-rc.1+2026"));
/// assert!(!is_semantic_version("1.2") && !is_semantic_version("01.2.0"));
/// ```
pub fn is_semantic_version(text: &str) -> bool {
    let is_number = |part: &str| {
        let has_digits = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        has_digits && (part == "0" || !part.starts_with('0'))
    };
    let is_word = |part: &str| {
        !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
    };
    let is_all_digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    let (text, build) = match text.split_once('+') {
        Some((text, build)) => (text, Some(build)),
        None => (text, None),
    };
    let (core, pre) = match text.split_once('-') {
        Some((core, pre)) => (core, Some(pre)),
        None => (text, None),
    };
    let core: Vec<&str> = core.split('.').collect();
    core.len() == 3
        && core.into_iter().all(is_number)
        && pre.is_none_or(|pre| {
            let mut parts = pre.split('.');
            parts.all(|part| is_word(part) && (!is_all_digits(part) || is_number(part)))
        })
        && build.is_none_or(|build| build.split('.').all(is_word))
}

/// The number after the first `word` or `words` in `name` that a number follows, after a dot or an
/// underscore.
fn indexed(name: &str, word: &str) -> Option<u32> {
    name.match_indices(word).find_map(|(at, _)| {
        let rest = &name[at + word.len()..];
        let rest = rest.strip_prefix('s').unwrap_or(rest);
        let rest = rest.strip_prefix(['.', '_'])?;
        let end = rest.find(|c: char| !c.is_ascii_digit());
        rest[..end.unwrap_or(rest.len())].parse().ok()
    })
}

/// What the tensor called `name` is for, in the words that the JavaScript runtime demands.
pub fn role_of(name: &str) -> Role {
    let name = name.to_ascii_lowercase();
    let has = |parts: &[&str]| parts.iter().any(|part| name.contains(part));
    let router = [
        "router",
        "mlp.gate.",
        "moe.gate",
        "block_sparse_moe.gate",
        "e_score_correction",
    ];
    if has(&["norm", "ln_out", ".ln1", ".ln2", ".ln0", "pre_ln", "_ln."]) {
        Role::Norm
    } else if has(&["lm_head"]) || matches!(name.as_str(), "head.weight" | "output.weight") {
        Role::LmHead
    } else if has(&[
        "embed_tokens",
        "token_embd",
        "wte.weight",
        "word_embeddings",
        "embeddings.weight",
    ]) || name == "emb.weight"
    {
        Role::Embedding
    } else if has(&router) {
        Role::Router
    } else if has(&["expert"]) {
        Role::Expert
    } else if has(&["conv"]) {
        Role::Conv
    } else if name.ends_with(".weight")
        && has(&[
            "proj",
            "attn",
            "mlp",
            "ffn",
            "attention",
            "feed_forward",
            "mixer",
            ".att.",
        ])
    {
        Role::Matmul
    } else {
        Role::Other
    }
}

/// The type of model that a Hugging Face configuration describes: `transformer`, `mamba`, `rwkv`,
/// `mixtral`, `deepseek` or `jamba`.
pub fn model_type_of(config: &Map<String, Value>) -> &'static str {
    let text = config.get("text_config").and_then(Value::as_object);
    let get = |key: &str| {
        text.and_then(|text| text.get(key))
            .or_else(|| config.get(key))
    };
    let name = get("model_type")
        .and_then(Value::as_str)
        .unwrap_or_default();
    let name = name.to_ascii_lowercase();
    let count = |key: &str| get(key).and_then(Value::as_u64).unwrap_or(0);
    let n_experts = ["num_local_experts", "num_experts", "n_routed_experts"].map(count);
    if name.contains("jamba") {
        "jamba"
    } else if name.contains("rwkv") {
        "rwkv"
    } else if name.contains("mamba") {
        "mamba"
    } else if n_experts.iter().all(|&n| n <= 1) {
        "transformer"
    } else if count("n_shared_experts") > 0 || name.contains("deepseek") {
        "deepseek"
    } else {
        "mixtral"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_of_every_model_type() {
        for (model_type, name, id) in [
            ("transformer", "model.embed_tokens.weight", "embed"),
            ("transformer", "transformer.wte.weight", "embed"),
            ("transformer", "lm_head.weight", "head"),
            ("transformer", "model.norm.weight", "head"),
            ("transformer", "norm.weight", "head"),
            (
                "transformer",
                "model.layers.7.self_attn.q_proj.weight",
                "layer.7",
            ),
            (
                "transformer",
                "model.layers.12.input_layernorm.weight",
                "layer.12",
            ),
            ("transformer", "transformer.ln_f.weight", "other"),
            ("transformer", "blk.0.attn_q.weight", "other"),
            ("mamba", "backbone.embeddings.weight", "embed"),
            (
                "mamba",
                "backbone.layers.3.mixer.out_proj.weight",
                "layer.3",
            ),
            ("mamba", "backbone.layers.3.norm.weight", "layer.3"),
            ("mamba", "backbone.norm_f.weight", "head"),
            ("rwkv", "rwkv.embeddings.weight", "embed"),
            ("rwkv", "emb.weight", "embed"),
            ("rwkv", "rwkv.blocks.1.attention.output.weight", "layer.1"),
            ("rwkv", "blocks.1.att.output.weight", "layer.1"),
            ("rwkv", "rwkv.ln_out.weight", "head"),
            ("rwkv", "head.weight", "head"),
            (
                "mixtral",
                "model.layers.0.block_sparse_moe.gate.weight",
                "layer.0.shared",
            ),
            (
                "mixtral",
                "model.layers.0.block_sparse_moe.experts.3.w1.weight",
                "layer.0.expert.3",
            ),
            (
                "mixtral",
                "model.layers.0.self_attn.q_proj.weight",
                "layer.0",
            ),
            (
                "deepseek",
                "model.layers.2.mlp.experts.63.up_proj.weight",
                "layer.2.expert.63",
            ),
            (
                "deepseek",
                "model.layers.2.mlp.shared_experts.up_proj.weight",
                "layer.2",
            ),
            (
                "deepseek",
                "model.layers.2.mlp.shared_experts.0.up_proj.weight",
                "layer.2.shared_expert",
            ),
            ("deepseek", "model.layers.2.mlp.gate.weight", "layer.2"),
            (
                "jamba",
                "model.layers.4.self_attn.q_proj.weight",
                "layer.4.attn",
            ),
            (
                "jamba",
                "model.layers.3.mamba.in_proj.weight",
                "layer.3.mamba",
            ),
            (
                "jamba",
                "model.layers.3.feed_forward.router.weight",
                "layer.3.shared",
            ),
            (
                "jamba",
                "model.layers.3.feed_forward.experts.9.down_proj.weight",
                "layer.3.expert.9",
            ),
            ("jamba", "model.layers.3.input_layernorm.weight", "layer.3"),
            ("jamba", "model.final_layernorm.weight", "head"),
            (
                "hybrid",
                "model.layers.3.self_attn.k_proj.weight",
                "layer.3.attn",
            ),
            ("transformer", "model.layers.99999999999.x.weight", "other"),
            ("transformer", "", "other"),
        ] {
            assert_eq!(
                group_of(name, model_type).to_string(),
                id,
                "{model_type} {name}"
            );
        }
    }

    #[test]
    fn kinds_and_order() {
        let ids = [
            ("embed", "embed"),
            ("layer.0.shared", "layer"),
            ("layer.0.attn", "attn"),
            ("layer.0.mamba", "mamba"),
            ("layer.0.expert.0", "expert"),
            ("layer.0.expert.10", "expert"),
            ("layer.0", "layer"),
            ("layer.0.shared_expert", "shared"),
            ("layer.2", "layer"),
            ("layer.10", "layer"),
            ("other", "layer"),
            ("head", "head"),
        ];
        let parsed: Vec<GroupId> = ids.iter().map(|(id, _)| id.parse().unwrap()).collect();
        assert!(parsed.is_sorted());
        for (id, (text, kind)) in parsed.iter().zip(ids) {
            assert_eq!(id.to_string(), text);
            assert_eq!(id.kind("jamba").name(), kind, "{text}");
            assert_eq!(GroupKind::parse(kind).name(), kind);
        }
        let layer = GroupId::Layer(0);
        assert_eq!(layer.kind("mamba"), GroupKind::Mamba);
        assert_eq!(layer.kind("rwkv"), GroupKind::Rwkv);
        let expert = GroupId::LayerExpert(2, 5);
        assert_eq!(
            (expert.layer_index(), expert.expert_index()),
            (Some(2), Some(5))
        );
        for bad in [
            "",
            "layer",
            "layer.",
            "layer.-1",
            "layer.01",
            "layer.1.x",
            "embed.0",
        ] {
            assert_eq!(bad.parse::<GroupId>(), Err(UnknownGroupId), "{bad}");
        }
    }

    #[test]
    fn versions() {
        for good in [
            "0.0.0",
            "1.0.0",
            "10.20.30",
            "1.0.0-alpha",
            "1.0.0-alpha.1",
            "1.0.0-0.3.7",
            "1.0.0--",
            "1.0.0+001",
            "1.0.0-rc.1+build.5",
            "999999999999999999999.0.0",
        ] {
            assert!(is_semantic_version(good), "{good}");
        }
        for bad in [
            "",
            "1",
            "1.2",
            "1.2.3.4",
            "01.2.3",
            "1.2.x",
            "v1.2.3",
            "1.2.3-",
            "1.2.3-01",
            "1.2.3-a..b",
            "1.2.3+",
            "1.2.3+a+b",
            " 1.2.3",
            "1.2.3-ä",
            "-1.2.3",
        ] {
            assert!(!is_semantic_version(bad), "{bad}");
        }
    }

    #[test]
    fn roles() {
        for (name, role) in [
            ("model.embed_tokens.weight", Role::Embedding),
            ("lm_head.weight", Role::LmHead),
            ("model.norm.weight", Role::Norm),
            ("model.layers.0.self_attn.q_norm.weight", Role::Norm),
            ("model.layers.0.self_attn.q_proj.weight", Role::Matmul),
            ("model.layers.0.mlp.gate_up_proj.weight", Role::Matmul),
            ("model.layers.0.self_attn.q_proj.bias", Role::Other),
            ("model.layers.0.mlp.gate.weight", Role::Router),
            ("model.layers.0.mlp.gate_proj.weight", Role::Matmul),
            (
                "model.layers.0.block_sparse_moe.experts.0.w1.weight",
                Role::Expert,
            ),
            ("model.layers.0.mamba.conv1d.weight", Role::Conv),
            ("backbone.layers.0.mixer.A_log", Role::Other),
        ] {
            assert_eq!(role_of(name), role, "{name}");
        }
    }

    #[test]
    fn model_types_of_configurations() {
        for (config, model_type) in [
            (r#"{"model_type":"llama"}"#, "transformer"),
            (r#"{}"#, "transformer"),
            (
                r#"{"model_type":"mixtral","num_local_experts":8}"#,
                "mixtral",
            ),
            (r#"{"model_type":"qwen3_moe","num_experts":128}"#, "mixtral"),
            (
                r#"{"model_type":"deepseek_v3","n_routed_experts":256,"n_shared_experts":1}"#,
                "deepseek",
            ),
            (r#"{"model_type":"jamba","num_experts":16}"#, "jamba"),
            (r#"{"model_type":"mamba2"}"#, "mamba"),
            (r#"{"model_type":"rwkv"}"#, "rwkv"),
            (
                r#"{"model_type":"x","text_config":{"model_type":"y","num_experts":4}}"#,
                "mixtral",
            ),
        ] {
            let json: Map<String, Value> = serde_json::from_str(config).unwrap();
            assert_eq!(model_type_of(&json), model_type, "{config}");
        }
    }
}
