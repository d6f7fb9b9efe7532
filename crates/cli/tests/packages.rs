//! Packages as models: those of other implementations against the logits of their source, and ones
//! made here of files that the engine reads otherwise.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{self, best, json, logits, refusal, stdout, testdata};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use sterna_format::gguf::{Gguf, Metadata, Model};
use sterna_format::names::linear_module;
use sterna_format::safetensors::SafeTensors;
use sterna_format::{DType, TensorEntry};

fn sample(name: &str) -> String {
    let path = testdata(&format!("rdrr-samples/{name}"));
    path.to_str().unwrap().to_owned()
}

/// The ids and the logits in a reference file.
fn reference(path: &Path) -> (Vec<u32>, Vec<f32>) {
    let bytes = fs::read(path).unwrap();
    let file = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    let words = |name: &str| -> Vec<[u8; 4]> {
        let tensor = file.tensors().iter().find(|t| t.name == name).unwrap();
        let data = &bytes[tensor.offset as usize..][..tensor.len as usize];
        data.as_chunks::<4>().0.to_vec()
    };
    let ids = words("input_ids").into_iter().map(u32::from_le_bytes);
    let logits = words("logits").into_iter().map(f32::from_le_bytes);
    (ids.collect(), logits.collect())
}

/// The largest difference between two lists of logits.
fn distance(rows: &[Vec<f32>], expected: &[f32]) -> f32 {
    let rows = rows.iter().flatten();
    assert_eq!(rows.clone().count(), expected.len());
    rows.zip(expected)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}

#[test]
fn packages_of_others_give_the_logits_of_their_source() {
    let llama = sample("source/tiny-llama/reference.safetensors");
    // What Transformers makes of the values that the blocks decode to.
    let gemma = sample("tiny-gemma3-q4k-reference.safetensors");
    for (name, file, more, bound) in [
        ("dec2025-llama-bf16-row", &llama, &[][..], 1e-3),
        ("tiny-llama-f16", &llama, &[][..], 1e-3),
        (
            "tiny-gemma3-q4k",
            &gemma,
            &["--activations", "f32"][..],
            1e-4,
        ),
        ("v1-gemma3-q4k", &gemma, &["--activations", "f32"][..], 1e-4),
    ] {
        let (ids, expected) = reference(Path::new(file));
        let found = logits(&sample(name), &ids, more);
        let distance = distance(&found, &expected);
        assert!(distance < bound, "{name}: {distance}");
    }
}

#[test]
fn tokens_are_those_of_the_source() {
    let tokens = |model: &str| json(&["tokenize", model, "--text", "hello there", "--json"]);
    let expected = tokens(&sample("source/tiny-llama"));
    for name in [
        "dec2025-llama-bf16-row",
        "tiny-llama-f16",
        "tiny-gemma3-q4k",
    ] {
        let found = tokens(&sample(name));
        let ids = found["ids"].as_array().unwrap();
        let expected = expected["ids"].as_array().unwrap();
        // The December writer kept nothing of what says that texts begin with a token.
        let expected = match name {
            "dec2025-llama-bf16-row" => &expected[1..],
            _ => expected,
        };
        assert_eq!(ids, expected, "{name}");
    }
}

#[test]
fn inspect_shows_groups_shards_and_hints() {
    let report = json(&["inspect", &sample("v1-gemma3-q4k"), "--json"]);
    assert_eq!(report["format"], "RDRR 1.0");
    assert_eq!(report["not_runnable"], Value::Null);
    assert_eq!(report["model"]["family"], "gemma3");
    let package = &report["package"];
    assert_eq!(package["variant"], "wq4_k_m-embf16");
    assert_eq!(package["shards"].as_array().unwrap().len(), 10);
    let ids: Vec<_> = package["groups"]
        .as_array()
        .unwrap()
        .iter()
        .map(|g| &g["id"])
        .collect();
    assert_eq!(ids, ["embed", "layer.0", "layer.1", "head"]);
    assert_eq!(report["types"]["Q4_K_M"]["n_tensors"], 14);
    let text = stdout(&["inspect", &sample("v1-gemma3-q4k")]);
    assert!(text.contains("layer.1"), "{text}");

    let report = json(&["inspect", &sample("tiny-llama-f16"), "--json"]);
    let warnings = report["package"]["warnings"].to_string();
    assert!(warnings.contains("of another model"), "{warnings}");
}

#[test]
fn a_damaged_package_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let copy = copy_of("v1-gemma3-q4k", dir.path());
    let model = copy.to_str().unwrap();
    let shard = copy.join("shard_00001.bin");
    let bytes = fs::read(&shard).unwrap();
    fs::write(&shard, &bytes[1..]).unwrap();
    let message = refusal(&["logits", model, "--ids", "1", "-o", "x"]);
    assert!(
        message.contains("shard_00001.bin: expected 161792 bytes, found 161791"),
        "{message}"
    );
    fs::remove_file(&shard).unwrap();
    let message = refusal(&["inspect", model]);
    assert!(
        message.contains("shard_00001.bin: cannot open"),
        "{message}"
    );
    fs::remove_file(copy.join("tensors.json")).unwrap();
    let message = refusal(&["inspect", model]);
    assert!(
        message.contains("tensors: expected a tensor map, inline or in `tensors.json`, found none"),
        "{message}"
    );
    fs::write(copy.join("manifest.json"), "{}").unwrap();
    let message = refusal(&["inspect", model]);
    assert!(
        message.contains("version: expected 1 or 0.x, found nothing"),
        "{message}"
    );
    assert!(
        message.contains("shards: expected a list of shards, found nothing"),
        "{message}"
    );
}

#[test]
fn hashes_of_groups_and_of_the_whole_are_checked() {
    let dir = tempfile::tempdir().unwrap();
    let copy = copy_of("v1-gemma3-q4k", dir.path());
    let path = copy.join("manifest.json");
    let whole: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    stdout(&["verify", copy.to_str().unwrap()]);
    let wrong = "0".repeat(64);
    for (pointer, found) in [
        ("/groups/layer.1/hash", "layer.1"),
        ("/blake3Full", "blake3Full"),
    ] {
        let mut manifest = whole.clone();
        manifest["blake3Full"] = Value::Null;
        *manifest.pointer_mut(pointer).unwrap() = json!(wrong);
        fs::write(&path, manifest.to_string()).unwrap();
        let output = common::sterna(&["verify", copy.to_str().unwrap()]);
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(
            !output.status.success() && text.contains(found),
            "{pointer}: {text}"
        );
    }
}

#[test]
fn diff_says_what_to_fetch() {
    let v1 = sample("v1-gemma3-q4k");
    let same = json(&["diff", &v1, &v1, "--json"]);
    assert_eq!(same["fetch_bytes"], 0);
    assert_eq!(same["groups"]["same"], 4);

    let dir = tempfile::tempdir().unwrap();
    let copy = copy_of("v1-gemma3-q4k", dir.path());
    let path = copy.join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let changed = "ab".repeat(32);
    manifest["shards"][8]["hash"] = json!(changed);
    manifest["groups"]["layer.1"]["hash"] = json!(changed);
    fs::write(&path, manifest.to_string()).unwrap();
    let report = json(&["diff", &v1, copy.to_str().unwrap(), "--json"]);
    assert_eq!(report["groups"]["changed"], json!(["layer.1"]));
    assert_eq!(report["shards"]["changed"], json!(["shard_00008.bin"]));
    assert_eq!(report["fetch_bytes"], manifest["shards"][8]["size"]);
    let tensors = report["tensors"]["changed"].as_array().unwrap();
    assert!(
        tensors
            .iter()
            .all(|name| name.as_str().unwrap().starts_with("model.layers.1."))
    );
    let text = stdout(&["diff", &v1, copy.to_str().unwrap()]);
    assert!(text.contains("~ groups: layer.1"), "{text}");
}

/// A copy of a sample in `dir`.
fn copy_of(name: &str, dir: &Path) -> PathBuf {
    let copy = dir.join(name);
    fs::create_dir(&copy).unwrap();
    for entry in fs::read_dir(sample(name)).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), copy.join(entry.file_name())).unwrap();
    }
    copy
}

/// How the tensors of a package that a test makes are stored.
#[derive(Clone, Copy)]
struct Packed {
    shard_size: usize,
    /// Floats of two dimensions are stored transposed.
    transposed: bool,
    /// Gate and up projections are one tensor.
    fused: bool,
}

/// The package of the model in the GGUF file at `source`, whose values must be Hugging Face's.
fn pack(source: &Path, dir: &Path, packed: Packed) {
    let bytes = fs::read(source).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let model = Model::from_parts(vec![gguf]).unwrap();
    let mut tensors: Vec<(String, TensorEntry, Vec<u8>)> = (model.tensors().iter())
        .map(|tensor| {
            let data = &bytes[tensor.offset as usize..][..tensor.len as usize];
            (hf_name(&tensor.name), tensor.clone(), data.to_vec())
        })
        .collect();
    if packed.fused {
        while let Some(gate) = tensors
            .iter()
            .position(|(name, ..)| name.ends_with("gate_proj.weight"))
        {
            let name = tensors[gate].0.replace("gate_proj", "up_proj");
            let up = tensors
                .iter()
                .position(|(other, ..)| *other == name)
                .unwrap();
            let up_data = tensors[up].2.clone();
            let (name, entry, data) = &mut tensors[gate];
            *name = name.replace("gate_proj", "gate_up_proj");
            entry.shape[0] *= 2;
            data.extend(up_data);
            tensors.remove(up);
        }
    }
    let mut stream: Vec<u8> = Vec::new();
    let mut map = Map::new();
    for (name, tensor, mut data) in tensors {
        let is_float = matches!(tensor.dtype, DType::F32 | DType::F16 | DType::BF16);
        let mut shape = tensor.shape.clone();
        let mut entry = Map::new();
        if let (true, true, [n, k]) = (packed.transposed, is_float, &tensor.shape[..]) {
            let size = tensor.dtype.block_bytes();
            let values: Vec<&[u8]> = data.chunks_exact(size).collect();
            let columns = (0..n * k).map(|i| values[i % n * k + i / n]);
            data = columns.flatten().copied().collect();
            entry.insert("layout".into(), json!("column"));
            entry.insert("originalShape".into(), json!(tensor.shape));
            shape.reverse();
        }
        let mut spans = Vec::new();
        let mut at = stream.len();
        while at < stream.len() + data.len() {
            let offset = at % packed.shard_size;
            let size = (packed.shard_size - offset).min(stream.len() + data.len() - at);
            spans.push(
                json!({ "shardIndex": at / packed.shard_size, "offset": offset, "size": size }),
            );
            at += size;
        }
        entry.insert("size".into(), json!(data.len()));
        entry.insert("shape".into(), json!(shape));
        entry.insert("dtype".into(), json!(tensor.dtype.name()));
        entry.insert("spans".into(), json!(spans));
        stream.extend(data);
        map.insert(name, entry.into());
    }
    let shards: Vec<Value> = (stream.chunks(packed.shard_size).enumerate())
        .map(|(i, shard)| {
            let name = format!("shard_{i:05}.bin");
            fs::write(dir.join(&name), shard).unwrap();
            let hash: String = Sha256::digest(shard)
                .iter()
                .map(|b| format!("{b:02x}"))
                .collect();
            json!({ "index": i, "filename": name, "size": shard.len(), "hash": hash })
        })
        .collect();
    let manifest = json!({
        "version": 1, "modelId": "made", "modelType": "transformer", "quantization": "mixed",
        "hashAlgorithm": "sha256", "config": config(model.metadata()), "shards": shards,
        "tensors": map, "totalSize": stream.len(),
    });
    fs::write(dir.join("manifest.json"), manifest.to_string()).unwrap();
}

fn hf_name(gguf: &str) -> String {
    let (module, kind) = gguf.rsplit_once('.').unwrap();
    match module {
        "token_embd" => return format!("model.embed_tokens.{kind}"),
        "output_norm" => return format!("model.norm.{kind}"),
        "output" => return format!("lm_head.{kind}"),
        _ => {}
    }
    if let Some(module) = linear_module(module) {
        return format!("{module}.{kind}");
    }
    let (layer, norm) = module
        .strip_prefix("blk.")
        .unwrap()
        .split_once('.')
        .unwrap();
    let norm = match norm {
        "attn_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attn_sub_norm" => "self_attn.attn_sub_norm",
        "ffn_sub_norm" => "mlp.ffn_sub_norm",
        "attn_q_norm" => "self_attn.q_norm",
        "attn_k_norm" => "self_attn.k_norm",
        other => panic!("{other}"),
    };
    format!("model.layers.{layer}.{norm}.{kind}")
}

/// The Hugging Face configuration of a GGUF file's model.
fn config(metadata: &Metadata) -> Value {
    let architecture = metadata.architecture().unwrap().unwrap();
    let count = |key: &str| metadata.get_i64(&format!("{architecture}.{key}")).unwrap();
    let number = |key: &str| metadata.get_f32(&format!("{architecture}.{key}")).unwrap();
    json!({
        "model_type": match architecture { "bitnet" | "bitnet-b1.58" => "bitnet", other => other },
        "hidden_act": match architecture { "bitnet-b1.58" => "relu2", _ => "silu" },
        "num_hidden_layers": count("block_count"), "hidden_size": count("embedding_length"),
        "intermediate_size": count("feed_forward_length"),
        "num_attention_heads": count("attention.head_count"),
        "num_key_value_heads": count("attention.head_count_kv"),
        "head_dim": count("attention.key_length"),
        "max_position_embeddings": count("context_length"),
        "rms_norm_eps": number("attention.layer_norm_rms_epsilon"),
        "rope_theta": number("rope.freq_base").unwrap_or(10_000.0),
        "tie_word_embeddings": true,
    })
}

#[test]
fn packages_compute_what_their_source_does() {
    let (small, large) = (10_007, 1 << 20);
    let plain = |shard_size| Packed {
        shard_size,
        transposed: false,
        fused: false,
    };
    for (source, packed) in [
        // Ternary types, in one piece and cut at odd places.
        ("bitllama-3M/bitllama-3M-tq2_0.gguf", plain(large)),
        ("bitllama-3M/bitllama-3M-tq1_0.gguf", plain(small)),
        ("reference-gguf/bitnet-b1.58-i2-s/model.gguf", plain(large)),
        ("reference-gguf/bitnet-b1.58-i2-s/model.gguf", plain(small)),
        // Floats, transposed; and with gate and up in one.
        (
            "reference-gguf/qwen3/model.gguf",
            Packed {
                transposed: true,
                ..plain(small)
            },
        ),
        (
            "reference-gguf/qwen3/model.gguf",
            Packed {
                fused: true,
                ..plain(large)
            },
        ),
        (
            "reference-gguf/qwen3/model.gguf",
            Packed {
                fused: true,
                transposed: true,
                ..plain(small)
            },
        ),
    ] {
        let source = testdata(source);
        let dir = tempfile::tempdir().unwrap();
        pack(&source, dir.path(), packed);
        let ids: Vec<u32> = (0..24).map(|i| i * 7 % 100 + 3).collect();
        let expected = logits(source.to_str().unwrap(), &ids, &[]);
        let found = logits(dir.path().to_str().unwrap(), &ids, &[]);
        assert!(found == expected, "{}", source.display());
        assert!(
            expected
                .iter()
                .all(|row| row[best(row) as usize].is_finite())
        );
    }
}

#[test]
fn packages_with_gguf_names_are_shown_and_not_run() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("reference-gguf/qwen3/model.gguf");
    pack(
        &source,
        dir.path(),
        Packed {
            shard_size: 1 << 20,
            transposed: false,
            fused: false,
        },
    );
    let path = dir.path().join("manifest.json");
    let text = fs::read_to_string(&path).unwrap();
    fs::write(
        &path,
        text.replace("model.layers.0.self_attn.q_proj", "blk.0.attn_q"),
    )
    .unwrap();
    let model = dir.path().to_str().unwrap();
    let report = json(&["inspect", model, "--json"]);
    let reason = report["not_runnable"].as_str().unwrap();
    assert!(
        reason.contains("expected Hugging Face names and values, found GGUF's"),
        "{reason}"
    );
    let message = refusal(&["logits", model, "--ids", "1", "-o", "x"]);
    assert!(message.contains("blk.0.attn_q"), "{message}");
}
