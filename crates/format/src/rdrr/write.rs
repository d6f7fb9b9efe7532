//! Manifests as text: one order of keys, two spaces, so that the same package has the same bytes.

use serde_json::{Map, Value, json};

use super::manifest::{
    Architecture, FileHash, Group, Integrity, LoraConfig, Manifest, ModelShape, MoeConfig,
    QuantizationInfo, Shard, TokenizerEntry,
};
use crate::json::pretty;

impl Manifest {
    /// The text of `manifest.json` in version 1 of the format: the same manifest gives the same
    /// bytes.
    pub fn to_json(&self) -> Vec<u8> {
        pretty(&manifest(self))
    }
}

/// An object that is filled in the order of its members.
struct Object(Map<String, Value>);

impl Object {
    fn new() -> Object {
        Object(Map::new())
    }

    fn put(&mut self, key: &str, value: impl Into<Value>) {
        self.0.insert(key.to_owned(), value.into());
    }

    fn maybe<T: Into<Value>>(&mut self, key: &str, value: Option<T>) {
        if let Some(value) = value {
            self.put(key, value);
        }
    }

    /// The object, with the members of unknown meaning after the others.
    fn with(mut self, extra: &Map<String, Value>) -> Value {
        for (key, value) in extra {
            // A member that has a meaning is never unknown.
            self.0.entry(key.clone()).or_insert_with(|| value.clone());
        }
        Value::Object(self.0)
    }
}

fn manifest(m: &Manifest) -> Value {
    let mut out = Object::new();
    match m.version.minor {
        0 => out.put("version", m.version.major),
        _ => out.put("version", m.version.to_string()),
    }
    out.put("modelId", m.model_id.as_str());
    out.put("modelType", m.model_type.as_str());
    out.maybe("adapterType", m.adapter_type.as_deref());
    out.maybe("baseModel", m.base_model.as_deref());
    out.put("quantization", m.quantization.as_str());
    let quantization = m.quantization_info.as_ref().map(quantization_info);
    out.maybe("quantizationInfo", quantization);
    out.put("hashAlgorithm", m.hash_algorithm.name());
    out.maybe("loraConfig", m.lora_config.as_ref().map(lora_config));
    out.maybe("architecture", m.architecture.as_ref().map(architecture));
    out.maybe("moeConfig", m.moe_config.as_ref().map(moe_config));
    out.maybe("inference", m.inference.clone());
    match m.eos_token_id[..] {
        [] => {}
        [id] => out.put("eos_token_id", id),
        ref ids => out.put("eos_token_id", ids),
    }
    out.maybe("tokenizer", m.tokenizer.as_ref().map(tokenizer));
    let hints = m.runtime_optimizations.as_ref();
    out.maybe("runtimeOptimizations", hints.map(|hints| hints.to_json()));
    out.maybe("config", m.config.clone());
    if !m.groups.is_empty() {
        let groups = m.groups.iter().map(|g| (g.id.clone(), group(g)));
        out.put("groups", Value::Object(groups.collect()));
    }
    let shards = m.shards.iter().enumerate();
    let shards: Vec<Value> = shards.map(|(i, s)| shard(m, i, s)).collect();
    out.put("shards", shards);
    out.maybe("tensorsFile", m.tensors_file.as_deref());
    out.maybe("tensors", m.tensors.as_ref().map(|map| map.to_value()));
    out.maybe("tensorCount", m.tensor_count);
    out.put("totalSize", m.total_size);
    out.maybe("blake3Full", m.blake3_full.map(|hash| hash.to_string()));
    let integrity = m.integrity.as_ref().map(integrity);
    out.maybe("integrityExtensions", integrity);
    out.maybe("metadata", m.metadata.clone());
    out.with(&m.extra)
}

fn quantization_info(info: &QuantizationInfo) -> Value {
    let mut out = Object::new();
    out.put("weights", info.weights.as_str());
    out.maybe("embeddings", info.embeddings.as_deref());
    out.maybe("lmHead", info.lm_head.as_deref());
    out.maybe("activations", info.activations.as_deref());
    out.maybe("kvCache", info.kv_cache.as_deref());
    out.maybe("compute", info.compute.as_deref());
    out.maybe("layout", info.layout.as_deref());
    out.maybe("i2sLayout", info.i2s_layout.as_deref());
    out.maybe("variantTag", info.variant_tag.as_deref());
    out.with(&info.extra)
}

fn architecture(architecture: &Architecture) -> Value {
    match architecture {
        Architecture::Class(name) => json!(name),
        Architecture::Shape(shape) => model_shape(shape),
    }
}

fn model_shape(shape: &ModelShape) -> Value {
    let mut out = Object::new();
    for (key, value) in [
        ("numLayers", shape.n_layers),
        ("hiddenSize", shape.model_dim),
        ("intermediateSize", shape.ffn_dim),
        ("numAttentionHeads", shape.n_heads),
        ("numKeyValueHeads", shape.n_kv_heads),
        ("headDim", shape.head_dim),
        ("vocabSize", shape.n_vocab),
        ("maxSeqLen", shape.max_ctx),
    ] {
        out.put(key, value);
    }
    out.maybe("ropeTheta", shape.rope_theta.map(number));
    out.with(&shape.extra)
}

fn lora_config(lora: &LoraConfig) -> Value {
    let mut out = Object::new();
    out.put("rank", lora.rank);
    out.put("alpha", number(lora.alpha));
    if lora.rank_stabilized {
        out.put("useRslora", true);
    }
    out.put("targetModules", lora.target_modules.clone());
    out.with(&lora.extra)
}

fn moe_config(moe: &MoeConfig) -> Value {
    let mut out = Object::new();
    out.put("numExperts", moe.n_experts);
    out.put("numExpertsPerToken", moe.n_experts_per_token);
    out.maybe("sharedExperts", moe.n_shared_experts);
    out.with(&moe.extra)
}

fn tokenizer(tokenizer: &TokenizerEntry) -> Value {
    let mut out = Object::new();
    out.put("type", tokenizer.kind.as_str());
    out.maybe("file", tokenizer.file.as_deref());
    let model = tokenizer.sentencepiece_model.as_deref();
    out.maybe("sentencepieceModel", model);
    out.maybe("vocabSize", tokenizer.vocab_size);
    out.maybe("tokenizerType", tokenizer.tokenizer_type.as_deref());
    out.with(&tokenizer.extra)
}

fn group(group: &Group) -> Value {
    let mut out = Object::new();
    out.put("type", group.kind.name());
    out.put("version", group.version.as_str());
    out.put("shards", group.shards.clone());
    out.put("tensors", group.tensors.clone());
    out.put("hash", group.hash.to_string());
    out.maybe("layerIndex", group.layer_index);
    out.maybe("expertIndex", group.expert_index);
    out.with(&group.extra)
}

fn shard(manifest: &Manifest, index: usize, shard: &Shard) -> Value {
    let mut out = Object::new();
    out.put("index", index);
    out.put("fileName", shard.file_name.as_str());
    out.put("size", shard.size);
    out.put("hash", shard.hash.to_string());
    out.put("hashAlgorithm", manifest.hash_algorithm.name());
    out.maybe("blake3", shard.blake3.map(|hash| hash.to_string()));
    out.with(&shard.extra)
}

fn integrity(integrity: &Integrity) -> Value {
    let mut out = Object::new();
    out.put("contractVersion", integrity.contract_version);
    if let Some(merkle) = &integrity.block_merkle {
        let roots = merkle.roots.iter();
        let roots: Map<String, Value> = roots
            .map(|(name, root)| (name.clone(), json!(format!("sha256:{root}"))))
            .collect();
        out.put(
            "blockMerkle",
            json!({ "blockSize": merkle.block_size, "roots": roots }),
        );
    }
    if let Some(blocks) = &integrity.shard_blocks {
        let of_shard = |hashes: &Vec<_>| hashes.iter().map(|hash| format!("{hash}")).collect();
        let hashes: Vec<Vec<String>> = blocks.hashes.iter().map(of_shard).collect();
        out.put(
            "shardBlocks",
            json!({ "blockSize": blocks.block_size, "hashes": hashes }),
        );
    }
    if !integrity.files.is_empty() {
        let files = integrity.files.iter();
        let files: Map<String, Value> = files.map(|f| (f.name.clone(), file_hash(f))).collect();
        out.put("files", files);
    }
    out.with(&integrity.extra)
}

fn file_hash(file: &FileHash) -> Value {
    let mut out = Object::new();
    out.put("size", file.size);
    out.put("hash", file.hash.to_string());
    out.with(&file.extra)
}

/// `x` as JavaScript writes it: without a point where it is whole.
fn number(x: f64) -> Value {
    match x.fract() == 0.0 && x.abs() < 1e15 {
        true => json!(x as i64),
        false => json!(x),
    }
}
