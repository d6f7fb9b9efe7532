//! `manifest.json`: what a package is, in one spelling for every field.

use std::fmt;

use serde_json::{Map, Value};

use super::files::TENSORS_FILE;
use super::groups::{GroupKind, SEMANTIC_VERSION, is_semantic_version};
use super::hints::{HINTS, RuntimeOptimizations};
use super::naming;
use super::problem::Path;
use super::tensors::TensorMap;
use crate::DType;
use crate::digest::{Algorithm, Digest};
use crate::json::quoted;

/// What a package says of itself.
///
/// Fields have the meaning and, in camel case, the names of the format's description
/// (`docs/formats/rdrr.md`); older and newer spellings are converted to these. Unknown
/// members are kept in `extra`, at their level, and written again.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Manifest {
    /// Version of the format.
    pub version: Version,
    /// What the makers call the package.
    pub model_id: String,
    /// Kind of model: `transformer`, `mamba`, `rwkv`, `mixtral`, `deepseek`, `jamba`, or a word of
    /// the writer's; `lora` for adapters.
    pub model_type: String,
    /// Quantization in one word, such as `Q4_K_M`.
    pub quantization: String,
    /// Precisions of the parts of the model.
    pub quantization_info: Option<QuantizationInfo>,
    /// What the hashes of shards and groups are. Where a manifest doesn't say, what its first shard
    /// says that does; SHA-256 if none does.
    pub hash_algorithm: Algorithm,
    /// Shape of the model; adapters have none.
    pub architecture: Option<Architecture>,
    /// The `config.json` of the checkpoint that the package was made from.
    pub config: Option<Map<String, Value>>,
    /// Component groups in the order of the file; packages of other writers may have none.
    pub groups: Vec<Group>,
    /// Files with weights, in index order.
    pub shards: Vec<Shard>,
    /// Name of the file with the external tensor map.
    pub tensors_file: Option<String>,
    /// The inline tensor map.
    pub tensors: Option<TensorMap>,
    /// Number of tensors.
    pub tensor_count: Option<u64>,
    /// Bytes of all shards together.
    pub total_size: u64,
    /// Where the tokenizer is.
    pub tokenizer: Option<TokenizerEntry>,
    /// Experts of a mixture.
    pub moe_config: Option<MoeConfig>,
    /// Hints for running the model.
    pub runtime_optimizations: Option<RuntimeOptimizations>,
    /// BLAKE3 of the bytes of all shards in index order.
    pub blake3_full: Option<Digest>,
    /// Kind of adapter: `lora`.
    pub adapter_type: Option<String>,
    /// The model that an adapter is for.
    pub base_model: Option<String>,
    /// Shape and strength of a LoRA adapter.
    pub lora_config: Option<LoraConfig>,
    /// Every id that ends a text.
    pub eos_token_id: Vec<u32>,
    /// How the JavaScript runtime is to compute the model.
    pub inference: Option<Map<String, Value>>,
    /// Hashes of parts of shards and tensors.
    pub integrity: Option<Integrity>,
    /// Where the package comes from, in the writer's words.
    pub metadata: Option<Map<String, Value>>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// A version of the format: 1, or 0.x of the time before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    /// Changes that older readers can't follow.
    pub major: u32,
    /// Changes that they can.
    pub minor: u32,
}

impl Default for Version {
    fn default() -> Version {
        Version { major: 1, minor: 0 }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Precisions of the parts of a model, in the words of the file; [`super::naming`] reads them.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct QuantizationInfo {
    /// Of the matrices in the layers.
    pub weights: String,
    /// Of the embedding table.
    pub embeddings: Option<String>,
    /// Of the output head, where it differs from the embedding table.
    pub lm_head: Option<String>,
    /// Of activations.
    pub activations: Option<String>,
    /// Of the key-value cache.
    pub kv_cache: Option<String>,
    /// Of arithmetic.
    pub compute: Option<String>,
    /// `row` or `col`: how blocks follow matrices.
    pub layout: Option<String>,
    /// Layout of I2_S codes: `block128`.
    pub i2s_layout: Option<String>,
    /// What is appended to the name of a model.
    pub variant_tag: Option<String>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// What a manifest says of a model's shape.
#[derive(Debug, Clone, PartialEq)]
pub enum Architecture {
    /// Its numbers.
    Shape(Box<ModelShape>),
    /// The Transformers class, such as `LlamaForCausalLM`; the numbers are in `config`.
    Class(String),
}

/// The numbers of a model.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ModelShape {
    /// `numLayers`.
    pub n_layers: u64,
    /// `hiddenSize`.
    pub model_dim: u64,
    /// `intermediateSize`.
    pub ffn_dim: u64,
    /// `numAttentionHeads`.
    pub n_heads: u64,
    /// `numKeyValueHeads`; as many as heads where the file doesn't say.
    pub n_kv_heads: u64,
    /// `headDim`; width over heads where the file doesn't say.
    pub head_dim: u64,
    /// `vocabSize`.
    pub n_vocab: u64,
    /// `maxSeqLen`.
    pub max_ctx: u64,
    /// `ropeTheta`.
    pub rope_theta: Option<f64>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// A component that can be exchanged separately.
#[derive(Debug, Clone, PartialEq)]
pub struct Group {
    /// Id, such as `layer.0`; see [`super::groups`].
    pub id: String,
    /// What it is.
    pub kind: GroupKind,
    /// Semantic version.
    pub version: String,
    /// Indices of the shards that hold bytes of it, ascending.
    pub shards: Vec<usize>,
    /// Names of its tensors, in the order in which they were written.
    pub tensors: Vec<String>,
    /// Hash of the stored bytes of its tensors, one after the other in the order of `tensors`.
    pub hash: Digest,
    /// Layer, of groups that belong to one.
    pub layer_index: Option<u64>,
    /// Expert within the layer.
    pub expert_index: Option<u64>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// A file with weights. Its index is its place in the list.
#[derive(Debug, Clone, PartialEq)]
pub struct Shard {
    /// Name in the package's folder.
    pub file_name: String,
    /// Bytes.
    pub size: u64,
    /// Hash of all bytes, by the manifest's algorithm.
    pub hash: Digest,
    /// BLAKE3 of all bytes, where a manifest with another algorithm gives it besides.
    pub blake3: Option<Digest>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// Where the tokenizer of a package is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct TokenizerEntry {
    /// `bundled`, `huggingface` or `sentencepiece`. The first is used for files of both kinds, so
    /// what a file holds must be looked up in the file.
    pub kind: String,
    /// Name of the JSON file.
    pub file: Option<String>,
    /// Name of the SentencePiece file.
    pub sentencepiece_model: Option<String>,
    /// Number of tokens.
    pub vocab_size: Option<u64>,
    /// `bpe` or `unigram`.
    pub tokenizer_type: Option<String>,
    /// Members of unknown meaning, such as `addBosToken`.
    pub extra: Map<String, Value>,
}

/// Experts of a mixture.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct MoeConfig {
    /// Experts of a layer.
    pub n_experts: u64,
    /// Experts that a token meets.
    pub n_experts_per_token: u64,
    /// Experts that every token meets.
    pub n_shared_experts: Option<u64>,
    /// Members of unknown meaning, such as `expertShardMap`.
    pub extra: Map<String, Value>,
}

/// Shape and strength of a LoRA adapter.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LoraConfig {
    /// Inner dimension.
    pub rank: u64,
    /// Strength: what the adapter adds is multiplied by `alpha / rank`.
    pub alpha: f64,
    /// Strength is `alpha / sqrt(rank)` instead. Written as `useRslora`.
    pub rank_stabilized: bool,
    /// Modules it changes, such as `q_proj`.
    pub target_modules: Vec<String>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// Hashes of parts.
#[derive(Debug, Clone, PartialEq)]
pub struct Integrity {
    /// Version of these members; 1 where the file doesn't say.
    pub contract_version: u64,
    /// Root of a hash tree for each tensor.
    pub block_merkle: Option<BlockMerkle>,
    /// Hashes of the blocks of each shard, for verifying a shard while it arrives.
    pub shard_blocks: Option<ShardBlocks>,
    /// Files other than shards, in the order of the file.
    pub files: Vec<FileHash>,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

impl Default for Integrity {
    fn default() -> Integrity {
        Integrity {
            contract_version: 1,
            block_merkle: None,
            shard_blocks: None,
            files: Vec::new(),
            extra: Map::new(),
        }
    }
}

/// A tree of SHA-256 hashes for each tensor.
///
/// Leaves are hashes of blocks of the tensor's bytes; a node is the hash of its two children, of
/// which an odd last one is its own sibling.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct BlockMerkle {
    /// Bytes of a block.
    pub block_size: u64,
    /// Name of each tensor and its root, in the order of the file.
    pub roots: Vec<(String, Digest)>,
}

/// BLAKE3 hashes of the blocks of every shard, whatever the shards themselves are hashed with.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ShardBlocks {
    /// Bytes of a block; the last one of a shard may be shorter.
    pub block_size: u64,
    /// For each shard the hashes of its blocks.
    pub hashes: Vec<Vec<Digest>>,
}

/// A file other than a shard, and how its bytes are verified.
#[derive(Debug, Clone, PartialEq)]
pub struct FileHash {
    /// Name in the package's folder; neither a shard's nor the manifest's.
    pub name: String,
    /// Bytes.
    pub size: u64,
    /// Hash of all bytes, by the manifest's algorithm.
    pub hash: Digest,
    /// Members of unknown meaning.
    pub extra: Map<String, Value>,
}

/// The most warnings of one kind.
const MAX_WARNED: usize = 16;

impl QuantizationInfo {
    /// The type of key-value cache that the package asks for: F32, F16 or Q8_0; `None` where it doesn't say,
    /// or says something else.
    pub fn cache_type(&self) -> Option<DType> {
        let dtype = naming::dtype_of(self.kv_cache.as_deref()?)?;
        matches!(dtype, DType::F32 | DType::F16 | DType::Q8_0).then_some(dtype)
    }

    /// Whether the package asks for activations of 8 bits or for floats where weights are stored as blocks of
    /// integers; `None` where it doesn't say, or says something else.
    pub fn int8_activations(&self) -> Option<bool> {
        match naming::dtype_of(self.activations.as_deref()?)? {
            DType::I8 | DType::Q8_0 => Some(true),
            DType::F32 | DType::F16 | DType::BF16 => Some(false),
            _ => None,
        }
    }

    /// The precision of arithmetic that the package asks for: F32 or F16; `None` where it doesn't say, or says
    /// something else.
    pub fn compute_type(&self) -> Option<DType> {
        let dtype = naming::dtype_of(self.compute.as_deref()?)?;
        matches!(dtype, DType::F32 | DType::F16).then_some(dtype)
    }

    /// Words that mean nothing here, where there is a choice.
    fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        for (key, expected, word, is_known) in [
            (
                "kvCache",
                "f32, f16 or q8_0",
                &self.kv_cache,
                self.cache_type().is_some(),
            ),
            (
                "activations",
                "int8 or f32",
                &self.activations,
                self.int8_activations().is_some(),
            ),
            (
                "compute",
                "f32 or f16",
                &self.compute,
                self.compute_type().is_some(),
            ),
        ] {
            if let (Some(word), false) = (word, is_known) {
                let found = quoted(word);
                warnings.push(format!(
                    "quantizationInfo.{key}: expected {expected}, found {found}; ignored"
                ));
            }
        }
        warnings
    }
}

impl Manifest {
    /// Whether this is a LoRA adapter, not a model.
    pub fn is_lora(&self) -> bool {
        self.adapter_type.as_deref() == Some("lora")
            || self.model_type == "lora"
            || self.lora_config.is_some()
    }

    /// What is odd about the manifest and was accepted, each with its place.
    pub(super) fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let hints = self.runtime_optimizations.as_ref();
        let malformed = hints.map_or(&[][..], |hints| &hints.malformed);
        for wrong in malformed.iter().take(MAX_WARNED) {
            let dot = if wrong.name().is_empty() { "" } else { "." };
            warnings.push(format!(
                "{HINTS}{dot}{}: expected {}, found {}; ignored",
                wrong.name(),
                wrong.expected,
                wrong.found()
            ));
        }
        if malformed.len() > MAX_WARNED {
            let n = malformed.len() - MAX_WARNED;
            warnings.push(format!("{HINTS}: {n} more hints like these are ignored"));
        }
        let mut odd = self
            .groups
            .iter()
            .filter(|g| !is_semantic_version(&g.version));
        if let Some(first) = odd.next() {
            let groups = Path::Key(&Path::Root, "groups");
            let path = Path::Key(&groups, &first.id);
            let more = match odd.count() {
                0 => String::new(),
                n => format!(" (and {n} more like it)"),
            };
            warnings.push(format!(
                "{}: expected {SEMANTIC_VERSION}, found {}{more}",
                Path::Key(&path, "version"),
                quoted(&first.version)
            ));
        }
        let info = self.quantization_info.iter();
        warnings.extend(info.flat_map(QuantizationInfo::warnings));
        warnings
    }

    /// The name of the file with the external tensor map: what the manifest says, and the usual one where
    /// it neither says it nor has an inline map.
    pub fn tensor_map_file(&self) -> Option<&str> {
        let usual = self.tensors.is_none().then_some(TENSORS_FILE);
        self.tensors_file.as_deref().or(usual)
    }

    /// The files other than shards that the manifest has hashes of.
    pub fn hashed_files(&self) -> &[FileHash] {
        self.integrity.as_ref().map_or(&[], |i| &i.files)
    }

    /// Where shard `index` begins in the concatenation of all shards, in bytes.
    pub fn shard_offset(&self, index: usize) -> u64 {
        self.shards.iter().take(index).map(|shard| shard.size).sum()
    }
}
