//! Manifests from JSON: every spelling in use, brought to one.

use super::fields::{self, Fields};
use super::files::MANIFEST_FILE;
use super::groups::GroupKind;
use super::hints::RuntimeOptimizations;
use super::manifest::{
    Architecture, BlockMerkle, FileHash, Group, Integrity, LoraConfig, Manifest, ModelShape,
    MoeConfig, QuantizationInfo, Shard, ShardBlocks, TokenizerEntry, Version,
};
use super::problem::{Notes, Path, Problems};
use super::tensors::{MAX_SHARDS, MAX_TENSORS, TensorMap};
use crate::digest::{Algorithm, Digest};
use crate::file_name::{folded, is_plain_file_name};
use crate::json::{Json, quoted};

/// 61 layers of 256 experts make 16,000.
const MAX_GROUPS: usize = 100_000;

/// The most ids that end a text.
const MAX_EOS: usize = 256;
/// The most modules that an adapter changes.
const MAX_MODULES: usize = 256;
/// Maximum number of files other than shards that have hashes.
const MAX_FILES: usize = 1024;
/// The rank of an adapter, at most.
const MAX_RANK: u64 = 65_536;
/// Blocks that are hashed by themselves have at least this many bytes.
const MIN_BLOCK: u64 = 4096;

const DIGEST: &str = "64 lower-case hexadecimal digits";

impl Manifest {
    /// Parses `manifest.json` in any of its versions.
    ///
    /// # Errors
    ///
    /// Everything that is wrong with the file. That tensors, groups and shards fit together is for
    /// [`Package::new`](super::Package::new) to say.
    pub fn parse(bytes: &[u8]) -> Result<Manifest, Problems> {
        let mut notes = Notes::new();
        let json = fields::parse(bytes, &mut notes);
        let manifest = json.and_then(|json| manifest(&json, &mut notes));
        notes.or(manifest.unwrap_or_default())
    }
}

/// Reads a manifest; what is wrong with it goes to `notes`.
fn manifest(json: &Json<'_>, notes: &mut Notes) -> Option<Manifest> {
    let mut fields = Fields::of(json, Path::Root, notes)?;
    let f = &mut fields;
    let version = version(f);
    let adapter_type = f.string("adapterType");
    let lora_config = f.object("loraConfig", lora_config);
    let model_type = f.string("modelType");
    let is_lora = adapter_type.as_deref() == Some("lora")
        || model_type.as_deref() == Some("lora")
        || lora_config.is_some();
    let model_id = f.required_string("modelId");
    if model_type.as_deref().is_none_or(str::is_empty) {
        f.missing("modelType", "a string that isn't empty");
    }
    let quantization = match is_lora {
        true => f.string("quantization").or(Some("F32".into())),
        false => f.required_string("quantization"),
    };
    let quantization_info = f.object("quantizationInfo", quantization_info);
    let config = f.map("config");
    let architecture = architecture(f, config.is_some(), is_lora);
    let algorithm = f.string("hashAlgorithm");
    let read = shards(f, algorithm.as_deref());
    let (hash_algorithm, shards, shards_are_good) = (read.algorithm, read.shards, read.are_good);
    let groups = groups(f, hash_algorithm);
    let inline = f.take("tensors");
    let path = Path::Key(&f.path, "tensors");
    let tensors = inline.and_then(|json| TensorMap::read(json, path, f.notes));
    // Writers that made groups left the external map's name out where it is the usual one.
    let is_found = inline.is_some() || f.take("tensorsFile").is_some();
    if !is_found && f.take("groups").is_none() {
        f.missing("tensorsFile", "the name of a file, or `tensors`");
    }
    let tensors_file = f.string("tensorsFile");
    let sum = (shards.iter()).try_fold(0_u64, |sum, shard| sum.checked_add(shard.size));
    let total_size = match f.count("totalSize") {
        None if is_lora && f.take("totalSize").is_none() => sum,
        None if f.take("totalSize").is_none() => {
            f.missing("totalSize", "the bytes of all shards together");
            None
        }
        Some(total) if sum != Some(total) && shards_are_good => {
            let sum = sum.map_or("more than can be counted".to_owned(), |sum| sum.to_string());
            let expected = format_args!("{sum}, the bytes of all shards together");
            f.wrong("totalSize", expected, total);
            None
        }
        total => total,
    };
    let tokenizer = f.object("tokenizer", tokenizer);
    check_file_names(
        f,
        &read.file_names,
        tensors_file.as_deref(),
        tokenizer.as_ref(),
    );
    let eos_token_id = eos(f);
    let integrity = f.object("integrityExtensions", |f| {
        integrity(
            f,
            hash_algorithm,
            &shards,
            &read.file_names,
            shards_are_good,
        )
    });
    let manifest = Manifest {
        version: version.unwrap_or_default(),
        model_id: model_id.unwrap_or_default(),
        model_type: model_type.unwrap_or_default(),
        quantization: quantization.unwrap_or_default(),
        quantization_info,
        hash_algorithm,
        architecture,
        config,
        groups,
        shards,
        tensors_file,
        tensors,
        tensor_count: f.count("tensorCount"),
        total_size: total_size.unwrap_or_default(),
        tokenizer,
        moe_config: f.object("moeConfig", moe_config),
        runtime_optimizations: RuntimeOptimizations::read(f),
        blake3_full: f.optional("blake3Full", DIGEST, digest(Algorithm::Blake3)),
        adapter_type,
        base_model: f.string("baseModel"),
        lora_config,
        eos_token_id,
        inference: f.map("inference"),
        integrity,
        metadata: f.map("metadata"),
        extra: f.rest(),
    };
    Some(manifest)
}

/// `version`: a number or a text, of which the first two parts count.
fn version(f: &mut Fields<'_>) -> Option<Version> {
    const EXPECTED: &str = "1 or 0.x";
    let json = f.required("version", EXPECTED, Some)?;
    let text = match json {
        Json::String(text) => text.as_ref().to_owned(),
        Json::Unsigned(_) | Json::Float(_) => json.shown(),
        _ => String::new(),
    };
    let mut parts = text.split('.').map(|part| part.parse::<u32>().ok());
    let (major, minor) = (parts.next().flatten(), parts.next().unwrap_or(Some(0)));
    match (major, minor) {
        (Some(major @ (0 | 1)), Some(minor)) => Some(Version { major, minor }),
        _ => {
            f.wrong("version", EXPECTED, json.shown());
            None
        }
    }
}

fn quantization_info(f: &mut Fields<'_>) -> QuantizationInfo {
    QuantizationInfo {
        weights: f.string("weights").unwrap_or_default(),
        embeddings: f.string("embeddings"),
        lm_head: f.string("lmHead"),
        activations: f.string("activations"),
        kv_cache: f.string("kvCache"),
        compute: f.string("compute"),
        layout: f.string("layout"),
        i2s_layout: f.string("i2sLayout"),
        variant_tag: f.string("variantTag"),
        extra: f.rest(),
    }
}

fn architecture(f: &mut Fields<'_>, has_config: bool, is_lora: bool) -> Option<Architecture> {
    match f.take("architecture") {
        Some(Json::String(class)) if has_config || is_lora => {
            Some(Architecture::Class(class.as_ref().to_owned()))
        }
        Some(Json::String(_)) => {
            f.missing(
                "config",
                "the configuration of the class that `architecture` names",
            );
            None
        }
        Some(json) => {
            let mut fields = Fields::of(json, Path::Key(&f.path, "architecture"), f.notes)?;
            model_shape(&mut fields).map(|shape| Architecture::Shape(Box::new(shape)))
        }
        None => {
            if !has_config && !is_lora {
                f.missing("architecture", "the shape of the model, or `config`");
            }
            None
        }
    }
}

fn model_shape(f: &mut Fields<'_>) -> Option<ModelShape> {
    let mut above_0 = |key: &str| {
        f.required(key, "a whole number from 1 to 4294967295", |json| {
            json.u64().filter(|&n| n > 0 && n <= u64::from(u32::MAX))
        })
    };
    let n_layers = above_0("numLayers");
    let model_dim = above_0("hiddenSize");
    let ffn_dim = above_0("intermediateSize");
    let n_heads = above_0("numAttentionHeads");
    let n_vocab = above_0("vocabSize");
    let max_ctx = above_0("maxSeqLen");
    let n_kv_heads = f.count("numKeyValueHeads");
    let head_dim = f.count("headDim");
    let rope_theta = f.number("ropeTheta");
    let extra = f.rest();
    Some(ModelShape {
        n_layers: n_layers?,
        model_dim: model_dim?,
        ffn_dim: ffn_dim?,
        n_heads: n_heads?,
        n_kv_heads: n_kv_heads.or(n_heads)?,
        head_dim: head_dim.or(Some(model_dim? / n_heads?))?,
        n_vocab: n_vocab?,
        max_ctx: max_ctx?,
        rope_theta,
        extra,
    })
}

fn lora_config(f: &mut Fields<'_>) -> LoraConfig {
    let rank = f.required("rank", "a whole number from 1 to 65536", |json| {
        json.u64().filter(|rank| (1..=MAX_RANK).contains(rank))
    });
    let alpha = f.required("alpha", "a number above 0", |json| {
        json.f64().filter(|&alpha| alpha > 0.0 && alpha.is_finite())
    });
    LoraConfig {
        rank: rank.unwrap_or_default(),
        alpha: alpha.unwrap_or_default(),
        rank_stabilized: f.bool("useRslora").unwrap_or(false),
        target_modules: f.strings("targetModules", MAX_MODULES).unwrap_or_default(),
        extra: f.rest(),
    }
}

fn moe_config(f: &mut Fields<'_>) -> MoeConfig {
    let n_experts = f.required_count("numExperts").unwrap_or_default();
    let per_token = f.count("numExpertsPerToken").unwrap_or(2);
    if per_token > n_experts {
        let expected = format_args!("at most `numExperts`, {n_experts}");
        f.wrong("numExpertsPerToken", expected, per_token);
    }
    MoeConfig {
        n_experts,
        n_experts_per_token: per_token,
        n_shared_experts: f.count("sharedExperts"),
        extra: f.rest(),
    }
}

fn tokenizer(f: &mut Fields<'_>) -> TokenizerEntry {
    TokenizerEntry {
        kind: f.required_string("type").unwrap_or_default(),
        file: f.string("file"),
        sentencepiece_model: f.string("sentencepieceModel"),
        vocab_size: f.count("vocabSize"),
        tokenizer_type: f.string("tokenizerType"),
        extra: f.rest(),
    }
}

/// Reads a digest. Manifests spell it in lower case only, so that equal digests are equal texts.
fn digest(algorithm: Algorithm) -> impl Fn(&Json<'_>) -> Option<Digest> {
    move |json| match json {
        Json::String(hex) => lower_case_digest(algorithm, hex),
        _ => None,
    }
}

fn lower_case_digest(algorithm: Algorithm, hex: &str) -> Option<Digest> {
    let digest = Digest::from_hex(algorithm, hex).ok()?;
    (!hex.contains(|c: char| c.is_ascii_uppercase())).then_some(digest)
}

/// What the list of shards says.
struct Shards {
    /// What hashes are: as the manifest says, else as the first shard does that says it.
    algorithm: Algorithm,
    shards: Vec<Shard>,
    /// Index and name of each file, of shards too that are bad otherwise.
    file_names: Vec<(usize, String)>,
    /// Whether all of them could be read.
    are_good: bool,
}

fn shards(f: &mut Fields<'_>, given: Option<&str>) -> Shards {
    let mut algorithm: Option<Algorithm> = None;
    if let Some(name) = given {
        match name.parse() {
            Ok(named) => algorithm = Some(named),
            Err(_) => f.wrong("hashAlgorithm", "sha256 or blake3", quoted(name)),
        }
    }
    let mut n_read = 0;
    let mut file_names = Vec::new();
    let mut offset = Some(0_u64);
    let shards = f.list("shards", MAX_SHARDS, |json, path, notes| {
        let mut f = Fields::of(json, path, notes)?;
        let index = n_read;
        n_read += 1;
        if let Some(found) = f.count("index")
            && found != index as u64
        {
            f.wrong(
                "index",
                format_args!("{index}, its place in the list"),
                found,
            );
        }
        let name = f.take_any(&["fileName", "filename"]);
        let file_name = match name {
            Some((_, Json::String(name))) => {
                file_names.push((index, name.as_ref().to_owned()));
                Some(name.as_ref().to_owned())
            }
            Some((key, json)) => {
                f.wrong(key, "the name of a file", json.shown());
                None
            }
            None => {
                f.missing("fileName", "the name of a file");
                None
            }
        };
        let size = f.required("size", "a number of bytes above 0", |json| {
            json.u64().filter(|&size| size > 0)
        });
        if let Some(found) = f.count("offset")
            && offset.is_some_and(|offset| offset != found)
        {
            let sum = offset.unwrap_or_default();
            f.wrong(
                "offset",
                format_args!("{sum}, the bytes of the shards before it"),
                found,
            );
        }
        offset = offset
            .zip(size)
            .and_then(|(offset, size)| offset.checked_add(size));
        if let Some(name) = f.string("hashAlgorithm") {
            match (name.parse::<Algorithm>(), algorithm) {
                (Err(_), _) => f.wrong("hashAlgorithm", "sha256 or blake3", quoted(&name)),
                (Ok(named), None) => algorithm = Some(named),
                (Ok(named), Some(common)) if named != common => {
                    f.wrong("hashAlgorithm", format_args!("{common}, as before"), named);
                }
                (Ok(_), Some(_)) => {}
            }
        }
        // Which algorithm made it is known once all shards are read.
        let hash = f.optional("hash", DIGEST, digest(Algorithm::default()));
        let mut blake3 = f.optional("blake3", DIGEST, digest(Algorithm::Blake3));
        if hash.is_none() && blake3.is_some() && algorithm.is_none() {
            algorithm = Some(Algorithm::Blake3);
        }
        // The alias holds the hash itself where that is BLAKE3, and where there is no other.
        let hash = match (hash, algorithm) {
            (Some(hash), Some(Algorithm::Blake3)) => blake3.take().or(Some(hash)),
            (Some(hash), _) => Some(hash),
            (None, _) => blake3.take(),
        };
        if f.take_any(&["hash", "blake3"]).is_none() {
            f.missing("hash", DIGEST);
        }
        Some(Shard {
            file_name: file_name?,
            size: size?,
            hash: hash?,
            blake3,
            extra: f.rest(),
        })
    });
    if f.take("shards").is_none() {
        f.missing("shards", "a list of shards");
    } else if shards.as_ref().is_some_and(|_| n_read == 0) {
        f.wrong("shards", "at least one shard", "none");
    }
    let mut shards = shards.unwrap_or_default();
    let algorithm = algorithm.unwrap_or_default();
    for shard in &mut shards {
        shard.hash = Digest::new(algorithm, *shard.hash.as_bytes());
    }
    Shards {
        algorithm,
        are_good: n_read > 0 && shards.len() == n_read,
        shards,
        file_names,
    }
}

fn groups(f: &mut Fields<'_>, algorithm: Algorithm) -> Vec<Group> {
    let read = |id: &str, json: &Json<'_>, path: Path<'_>, notes: &mut Notes| {
        let mut f = Fields::of(json, path, notes)?;
        let kind = f.required_string("type");
        let version = f.required_string("version");
        let shards = f.list("shards", MAX_SHARDS, |json, path, notes| {
            let index = json.u64().and_then(|i| usize::try_from(i).ok());
            if index.is_none() {
                notes.add(path, "the index of a shard", json.shown());
            }
            index
        });
        if shards.is_none() {
            f.missing("shards", "a list of indices of shards");
        }
        let tensors = f.strings("tensors", MAX_TENSORS);
        if tensors.is_none() {
            f.missing("tensors", "a list of names");
        }
        let hash = f.required("hash", DIGEST, digest(algorithm));
        Some(Group {
            id: id.to_owned(),
            kind: GroupKind::parse(&kind?),
            version: version?,
            shards: shards?,
            tensors: tensors?,
            hash: hash?,
            layer_index: f.count("layerIndex"),
            expert_index: f.count("expertIndex"),
            extra: f.rest(),
        })
    };
    f.members("groups", MAX_GROUPS, read).unwrap_or_default()
}

/// No two files of a package may have one name, not even where systems ignore case.
fn check_file_names(
    f: &mut Fields<'_>,
    shards: &[(usize, String)],
    tensors_file: Option<&str>,
    tokenizer: Option<&TokenizerEntry>,
) {
    let mut names = std::collections::HashMap::new();
    names.insert(folded(MANIFEST_FILE), "the manifest".to_owned());
    let root = f.path;
    let mut check = |path: Path<'_>, name: &str, notes: &mut Notes| {
        if !is_plain_file_name(name) {
            let expected = "a plain file name, without path, drive or device";
            notes.add(path, expected, quoted(name));
        } else if let Some(other) = names.insert(folded(name), path.to_string()) {
            let expected = format_args!("a name of its own, whatever the case ({other} has it)");
            notes.add(path, expected, quoted(name));
        }
    };
    let list = Path::Key(&root, "shards");
    for (i, name) in shards {
        let path = Path::Index(&list, *i);
        check(Path::Key(&path, "fileName"), name, f.notes);
    }
    if let Some(name) = tensors_file {
        check(Path::Key(&root, "tensorsFile"), name, f.notes);
    }
    if let Some(tokenizer) = tokenizer {
        let path = Path::Key(&root, "tokenizer");
        if let Some(name) = &tokenizer.file {
            check(Path::Key(&path, "file"), name, f.notes);
        }
        if let Some(name) = &tokenizer.sentencepiece_model
            && tokenizer.file.as_ref() != Some(name)
        {
            check(Path::Key(&path, "sentencepieceModel"), name, f.notes);
        }
    }
}

/// One id or a list of them.
fn eos(f: &mut Fields<'_>) -> Vec<u32> {
    const EXPECTED: &str = "a token id";
    let id = |json: &Json<'_>| json.u64().and_then(|id| u32::try_from(id).ok());
    let Some(json) = f.take("eos_token_id") else {
        return Vec::new();
    };
    match json {
        Json::Array(_) => {
            let read = |json: &Json<'_>, path: Path<'_>, notes: &mut Notes| {
                let id = id(json);
                if id.is_none() {
                    notes.add(path, EXPECTED, json.shown());
                }
                id
            };
            f.list("eos_token_id", MAX_EOS, read).unwrap_or_default()
        }
        json => {
            let id = id(json);
            if id.is_none() {
                f.wrong("eos_token_id", EXPECTED, json.shown());
            }
            id.into_iter().collect()
        }
    }
}

fn integrity(
    f: &mut Fields<'_>,
    algorithm: Algorithm,
    shards: &[Shard],
    shard_names: &[(usize, String)],
    shards_are_good: bool,
) -> Integrity {
    let block_merkle = f.object("blockMerkle", |f| {
        let block_size = block_size(f);
        let roots = f.members("roots", MAX_TENSORS, |name, json, path, notes| {
            let root = match json {
                Json::String(text) => text
                    .strip_prefix("sha256:")
                    .and_then(|hex| lower_case_digest(Algorithm::Sha256, hex)),
                _ => None,
            };
            if root.is_none() {
                notes.add(
                    path,
                    "`sha256:` and 64 lower-case hexadecimal digits",
                    json.shown(),
                );
            }
            Some((name.to_owned(), root?))
        });
        if f.take("roots").is_none() {
            f.missing("roots", "an object");
        }
        Some(BlockMerkle {
            block_size: block_size?,
            roots: roots?,
        })
    });
    let shard_blocks = f.object("shardBlocks", |f| shard_blocks(f, shards, shards_are_good));
    Integrity {
        contract_version: f.count("contractVersion").unwrap_or(1),
        block_merkle: block_merkle.flatten(),
        shard_blocks: shard_blocks.flatten(),
        files: file_hashes(f, algorithm, shard_names),
        extra: f.rest(),
    }
}

/// Files other than shards. The manifest can't give its own hash, nor that of its signature.
fn file_hashes(
    f: &mut Fields<'_>,
    algorithm: Algorithm,
    shard_names: &[(usize, String)],
) -> Vec<FileHash> {
    let mut taken: std::collections::HashSet<String> =
        shard_names.iter().map(|(_, name)| folded(name)).collect();
    let read = |name: &str, json: &Json<'_>, path: Path<'_>, notes: &mut Notes| {
        if !is_plain_file_name(name) || folded(name).starts_with(MANIFEST_FILE) {
            let expected = "the plain name of a file beside the manifest";
            notes.add(path, expected, quoted(name));
        } else if !taken.insert(folded(name)) {
            let expected = "a name that no shard or other file has, whatever the case";
            notes.add(path, expected, quoted(name));
        }
        let mut f = Fields::of(json, path, notes)?;
        let size = f.required_count("size");
        let hash = f.required("hash", DIGEST, digest(algorithm));
        Some(FileHash {
            name: name.to_owned(),
            size: size?,
            hash: hash?,
            extra: f.rest(),
        })
    };
    f.members("files", MAX_FILES, read).unwrap_or_default()
}

fn block_size(f: &mut Fields<'_>) -> Option<u64> {
    f.required("blockSize", "a number of bytes from 4096 on", |json| {
        json.u64().filter(|&size| size >= MIN_BLOCK)
    })
}

fn shard_blocks(
    f: &mut Fields<'_>,
    shards: &[Shard],
    shards_are_good: bool,
) -> Option<ShardBlocks> {
    let block_size = block_size(f);
    let hashes = f.list("hashes", MAX_SHARDS, |json, path, notes| {
        let Json::Array(items) = json else {
            notes.add(path, "a list of hashes", json.shown());
            return None;
        };
        let hash = |(i, json): (usize, &Json<'_>)| {
            let hash = digest(Algorithm::Blake3)(json);
            if hash.is_none() {
                notes.add(Path::Index(&path, i), DIGEST, json.shown());
            }
            hash
        };
        items
            .iter()
            .enumerate()
            .map(hash)
            .collect::<Option<Vec<Digest>>>()
    });
    let (block_size, hashes) = (block_size?, hashes?);
    if !shards_are_good {
        return None;
    }
    let path = Path::Key(&f.path, "hashes");
    if hashes.len() != shards.len() {
        let expected = format_args!("a list for each of {} shards", shards.len());
        f.notes.add(path, expected, hashes.len());
        return None;
    }
    for (i, (of_shard, shard)) in hashes.iter().zip(shards).enumerate() {
        let n_blocks = shard.size.div_ceil(block_size);
        if of_shard.len() as u64 != n_blocks {
            let expected = format_args!("{n_blocks} hashes, one a block");
            f.notes.add(Path::Index(&path, i), expected, of_shard.len());
        }
    }
    Some(ShardBlocks { block_size, hashes })
}
