//! The manifest of a package, from what was converted.

use std::collections::HashMap;

use bytes::Bytes;
use serde_json::{Map, Value, json};
use sterna::Result;
use sterna::embedding::Pooling;
use sterna_delivery::hash::{DEFAULT_BLOCK_SIZE, digest_of};
use sterna_engine::ModelConfig;
use sterna_engine::config::LayerConfig;
use sterna_engine::rope::RopeScaling;
use sterna_format::names::module;
use sterna_format::rdrr::groups::{GroupId, group_of};
use sterna_format::rdrr::naming::{Variant, quantization_of};
use sterna_format::rdrr::{
    Architecture, BlockMerkle, FileHash, Group, Integrity, MANIFEST_FILE, Manifest, ModelShape,
    MoeConfig, Shard, ShardBlocks, TENSORS_FILE, Tensor, TensorMap, TokenizerEntry,
    shard_file_name,
};
use sterna_kernels::activation::Activation;

use super::shards::{ShardHashes, Written};
use super::sink::PackageSink;
use super::stated::ManifestDetail;

/// The inputs of a manifest besides the bytes that were written.
pub(super) struct Facts<'a> {
    pub(super) model_id: String,
    /// Descriptions of weights: `transformer` and the like.
    pub(super) model_type: &'a str,
    pub(super) variant: Variant,
    pub(super) config: &'a ModelConfig,
    /// `config.json`.
    pub(super) hf: Map<String, Value>,
    pub(super) tied: bool,
    pub(super) eos: Vec<u32>,
    pub(super) tokenizer: Option<TokenizerEntry>,
    pub(super) has_chat_template: bool,
    /// The model's origin.
    pub(super) source: String,
    /// How vectors of texts are made of hidden states.
    pub(super) pooling: Option<Pooling>,
}

/// The manifest of a model with these tensors.
pub(super) fn manifest(facts: Facts<'_>, tensors: TensorMap, written: &Written) -> Manifest {
    let inference = inference(&facts, &tensors);
    let c = facts.config;
    let mut of_weights = of_weights(facts.model_type, &facts.source, tensors, written);
    if let (Some(pooling), Some(metadata)) = (facts.pooling, &mut of_weights.metadata) {
        metadata.insert(Pooling::MEMBER.to_owned(), json!(pooling.name()));
    }
    Manifest {
        model_id: facts.model_id,
        quantization: quantization_of(facts.variant.weights),
        quantization_info: Some(facts.variant.info()),
        architecture: Some(Architecture::Shape(Box::new(ModelShape {
            n_layers: c.n_layers as u64,
            model_dim: c.model_dim as u64,
            ffn_dim: c.ffn_dim as u64,
            n_heads: c.n_heads as u64,
            n_kv_heads: c.n_kv_heads as u64,
            head_dim: c.head_dim as u64,
            n_vocab: c.n_vocab as u64,
            max_ctx: c.max_ctx as u64,
            rope_theta: Some(c.ropes[0].base),
            extra: Map::new(),
        }))),
        moe_config: c.experts.map(|experts| MoeConfig {
            n_experts: experts.routing.n_experts as u64,
            n_experts_per_token: experts.routing.n_used as u64,
            n_shared_experts: experts.shared_ffn_dim.map(|_| 1),
            ..MoeConfig::default()
        }),
        config: Some(facts.hf),
        tokenizer: facts.tokenizer,
        eos_token_id: facts.eos,
        inference: Some(inference),
        ..of_weights
    }
}

/// The part of a manifest about what was written: where tensors are, their groups, and every hash.
pub(super) fn of_weights(
    model_type: &str,
    source: &str,
    tensors: TensorMap,
    written: &Written,
) -> Manifest {
    let roots = (tensors.iter().zip(&written.tensors.roots))
        .map(|(tensor, root)| (tensor.name.clone(), *root));
    let shards = written.shards.iter().enumerate().map(|(i, shard)| Shard {
        file_name: shard_file_name(i),
        size: shard.size,
        hash: shard.digest,
        blake3: None,
        extra: Map::new(),
    });
    let blocks = |shard: &ShardHashes| shard.blocks.digests().to_vec();
    let converter = concat!("sterna ", env!("CARGO_PKG_VERSION"));
    Manifest {
        model_type: model_type.to_owned(),
        hash_algorithm: written.algorithm,
        groups: groups(model_type, &tensors, written),
        total_size: written.shards.iter().map(|shard| shard.size).sum(),
        shards: shards.collect(),
        blake3_full: Some(written.blake3),
        integrity: Some(Integrity {
            block_merkle: Some(BlockMerkle {
                block_size: DEFAULT_BLOCK_SIZE,
                roots: roots.collect(),
            }),
            shard_blocks: Some(ShardBlocks {
                block_size: DEFAULT_BLOCK_SIZE,
                hashes: written.shards.iter().map(blocks).collect(),
            }),
            ..Integrity::default()
        }),
        metadata: Some(Map::from_iter([
            ("source".to_owned(), json!(source)),
            ("converter".to_owned(), json!(converter)),
        ])),
        tensors_file: Some(TENSORS_FILE.to_owned()),
        tensor_count: Some(tensors.len() as u64),
        // Inline as well: the JavaScript runtime's downloader never fetches the other.
        tensors: Some(tensors),
        ..Manifest::default()
    }
}

/// Writes the files of a package that are not shards to `sink`: those of `beside`, the tensor map, and last
/// the manifest, with the hashes of the others.
pub(super) fn write(
    sink: &mut impl PackageSink,
    manifest: &mut Manifest,
    mut beside: Vec<(String, Bytes)>,
    detail: ManifestDetail,
) -> Result<()> {
    let algorithm = manifest.hash_algorithm;
    if let (Some(name), Some(tensors)) = (&manifest.tensors_file, &manifest.tensors) {
        beside.push((name.clone(), tensors.to_json().into()));
    }
    let files = beside.iter().map(|(name, bytes)| FileHash {
        name: name.clone(),
        size: bytes.len() as u64,
        hash: digest_of(algorithm, bytes),
        extra: Map::new(),
    });
    let integrity = manifest.integrity.get_or_insert_default();
    integrity.files = files.collect();
    if detail == ManifestDetail::Compact {
        manifest.tensors = None;
        integrity.block_merkle = None;
        integrity.shard_blocks = None;
    }
    for (name, bytes) in beside {
        sink.put(&name, bytes)?;
    }
    sink.put(MANIFEST_FILE, manifest.to_json().into())
}

fn groups(model_type: &str, tensors: &TensorMap, written: &Written) -> Vec<Group> {
    let mut members: HashMap<GroupId, Vec<&Tensor>> = HashMap::new();
    for tensor in tensors.iter() {
        let id = group_of(&tensor.name, model_type);
        members.entry(id).or_default().push(tensor);
    }
    let mut groups: Vec<_> = members.into_iter().collect();
    groups.sort_by_key(|(id, _)| *id);
    let group = |(id, members): (GroupId, Vec<&Tensor>)| {
        let spans = members.iter().flat_map(|tensor| &tensor.spans);
        let mut shards: Vec<usize> = spans.map(|span| span.shard).collect();
        shards.sort_unstable();
        shards.dedup();
        Group {
            id: id.to_string(),
            kind: id.kind(model_type),
            version: "1.0.0".to_owned(),
            shards,
            tensors: members.iter().map(|tensor| tensor.name.clone()).collect(),
            hash: written.tensors.groups[&id],
            layer_index: id.layer_index().map(u64::from),
            expert_index: id.expert_index().map(u64::from),
            extra: Map::new(),
        }
    };
    groups.into_iter().map(group).collect()
}

/// The description of how the model is computed that the JavaScript runtime requires.
fn inference(facts: &Facts<'_>, tensors: &TensorMap) -> Map<String, Value> {
    let c = facts.config;
    let has = |module: &str, kind: &str| {
        let end = format!("{module}.{kind}");
        tensors.iter().any(|tensor| tensor.name.ends_with(&end))
    };
    let gemma = facts.hf["model_type"]
        .as_str()
        .is_some_and(|name| name.starts_with("gemma"));
    let window = c.layers.iter().find_map(|layer| layer.window);
    let full: Vec<usize> = (0..c.n_layers)
        .filter(|&i| c.layers[i].window.is_none())
        .collect();
    let activation = match c.activation {
        Activation::Silu => "silu",
        Activation::Relu2 => "relu2",
        Activation::Relu => "relu",
        Activation::GeluTanh | Activation::GeluErf => "gelu",
        // With what the configuration of its family adds.
        Activation::ClampedSwiglu => "silu",
    };
    let swiglu_limit = (c.activation == Activation::ClampedSwiglu).then_some(Activation::CLAMP);
    let layer_pattern = match (window, full.as_slice()) {
        // Every n-th layer without a window.
        (Some(_), [first, second, ..]) => {
            json!({ "type": "every_n", "period": second - first, "offset": first })
        }
        (Some(_), [only]) => json!({ "type": "every_n", "period": only + 1, "offset": only }),
        _ => json!({ "type": "uniform", "period": null, "offset": null }),
    };
    let mut layer_pattern = layer_pattern;
    layer_pattern["globalPattern"] = Value::Null;
    layer_pattern["layerTypes"] = Value::Null;
    let number = |key: &str| layer_pattern[key].as_u64().map(|n| n as usize);
    if let (Some(period), Some(offset)) = (number("period"), number("offset")) {
        let said = (0..c.n_layers).filter(|i| i % period == offset % period);
        if !said.eq(full.iter().copied()) {
            let kind = |layer: &LayerConfig| match layer.window {
                Some(_) => "sliding_attention",
                None => "full_attention",
            };
            let kinds: Vec<_> = c.layers.iter().map(kind).collect();
            layer_pattern["type"] = json!("custom");
            layer_pattern["period"] = Value::Null;
            layer_pattern["offset"] = Value::Null;
            layer_pattern["layerTypes"] = json!(kinds);
            // The JavaScript runtime's word for any other list.
            layer_pattern["attentionLayers"] = json!(full);
        }
    }
    layer_pattern["residualBranchScale"] = json!(1);
    let inference = json!({
        "attention": {
            "queryPreAttnScalar": c.query_scalar(),
            "queryKeyNorm": has(module::Q_NORM, "weight"),
            "valueNorm": false,
            "attentionBias": has(module::Q, "bias"),
            "causal": true,
            "slidingWindow": window,
            "attnLogitSoftcapping": c.attn_softcap,
        },
        "normalization": {
            "rmsNormEps": facts.hf.get("rms_norm_eps").cloned().unwrap_or(json!(c.norm_eps)),
            "rmsNormWeightOffset": gemma,
            "postAttentionNorm": has(module::POST_ATTENTION_NORM, "weight"),
            "preFeedforwardNorm": has(module::PRE_FFN_NORM, "weight"),
            "postFeedforwardNorm": has(module::POST_FFN_NORM, "weight"),
        },
        "ffn": {
            "activation": activation,
            "gatedActivation": true,
            "branchMode": "dense",
            "useDoubleWideMlp": false,
            "swigluLimit": swiglu_limit,
        },
        "rope": rope(c),
        "output": {
            "tieWordEmbeddings": facts.tied,
            "scaleEmbeddings": c.embed_scale != 1.0,
            "embeddingTranspose": false,
            "embeddingScale": null,
            "embeddingVocabSize": null,
            "embeddingPostprocessor": null,
            "logitInputScale": 1,
            "finalLogitSoftcapping": c.logit_softcap,
        },
        "layerPattern": layer_pattern,
        "chatTemplate": { "type": null, "enabled": facts.has_chat_template },
        "session": {
            "kvcache": {
                "layout": "contiguous",
                "tiering": { "mode": "off", "gating": { "mode": "auto" } },
                "quantization": { "mode": "none" },
            },
            "decodeLoop": { "batchSize": 1, "disableCommandBatching": false },
        },
    });
    match inference {
        Value::Object(map) => map,
        _ => unreachable!("it is written as an object above"),
    }
}

fn rope(c: &ModelConfig) -> Value {
    let full = &c.ropes[0];
    // Gemma's windowed layers rotate by another base.
    let local = c
        .layers
        .iter()
        .find_map(|layer| layer.rope.filter(|&r| r > 0 && layer.window.is_some()));
    let part = (full.dim != c.head_dim).then(|| full.dim as f64 / c.head_dim as f64);
    let mut rope = json!({
        "ropeTheta": full.base,
        "ropeLocalTheta": local.map(|r| c.ropes[r].base),
        "ropeScalingType": null,
        "ropeScalingFactor": 1,
        "ropeLocalScalingType": null,
        "ropeLocalScalingFactor": 1,
        "mropeInterleaved": false,
        "mropeSection": null,
        "partialRotaryFactor": part,
        "ropeLocalPartialRotaryFactor": null,
        "ropeFrequencyBaseDim": null,
        "ropeLocalFrequencyBaseDim": null,
        "yarnBetaFast": null,
        "yarnBetaSlow": null,
        "yarnOriginalMaxPos": null,
        "ropeLocalYarnBetaFast": null,
        "ropeLocalYarnBetaSlow": null,
        "ropeLocalYarnOriginalMaxPos": null,
        "longropeShortFactor": null,
        "longropeLongFactor": null,
        "longropeOriginalMaxPos": null,
    });
    let mut set = |key: &str, value: Value| rope[key] = value;
    match &full.scaling {
        RopeScaling::None => {}
        RopeScaling::Linear { factor } => {
            set("ropeScalingType", json!("linear"));
            set("ropeScalingFactor", json!(factor));
        }
        RopeScaling::Dynamic { factor, .. } => {
            set("ropeScalingType", json!("dynamic"));
            set("ropeScalingFactor", json!(factor));
        }
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_ctx,
        } => {
            set("ropeScalingType", json!("llama3"));
            set("ropeScalingFactor", json!(factor));
            set("ropeLowFreqFactor", json!(low_freq_factor));
            set("ropeHighFreqFactor", json!(high_freq_factor));
            set("ropeOriginalMaxPos", json!(original_ctx));
        }
        RopeScaling::Yarn {
            factor,
            original_ctx,
            beta_fast,
            beta_slow,
            ..
        } => {
            set("ropeScalingType", json!("yarn"));
            set("ropeScalingFactor", json!(factor));
            set("yarnBetaFast", json!(beta_fast));
            set("yarnBetaSlow", json!(beta_slow));
            set("yarnOriginalMaxPos", json!(original_ctx));
        }
        RopeScaling::LongRope {
            short,
            long,
            original_ctx,
            ..
        } => {
            set("ropeScalingType", json!("longrope"));
            set("longropeShortFactor", json!(short));
            set("longropeLongFactor", json!(long));
            set("longropeOriginalMaxPos", json!(original_ctx));
        }
        RopeScaling::Factors(factors) => {
            set("ropeScalingType", json!("longrope"));
            set("longropeShortFactor", json!(factors));
            set("longropeLongFactor", json!(factors));
            set("longropeOriginalMaxPos", json!(c.max_ctx));
        }
    }
    rope
}
