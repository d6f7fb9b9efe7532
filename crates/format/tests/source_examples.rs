//! The examples of the documents that the formats come from, in `testdata/source-examples`, mean here what
//! they mean there. A file that no assertion knows is an error.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sterna_format::DType;
use sterna_format::bundle::{
    self, Action, ArchType, LoraFile, LoraTarget, ModelFacts, RopeFile, ShardRange, SourceType,
    TensorFile,
};
use sterna_format::digest::Algorithm;
use sterna_format::rdrr::groups::{self, GroupKind};
use sterna_format::rdrr::{
    Architecture, MANIFEST_FILE, Manifest, Package, RuntimeOptimizations, SHARD_SIZE, Span,
    TENSORS_FILE, TensorMap, is_plain_file_name, lora, naming, shard_file_name,
};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata/source-examples")
}

fn read(name: &str) -> Vec<u8> {
    fs::read(folder().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn value(name: &str) -> Value {
    serde_json::from_slice(&read(name)).unwrap()
}

fn manifest(name: &str) -> Manifest {
    Manifest::parse(&read(name)).unwrap_or_else(|problems| panic!("{name}:\n{problems}"))
}

/// The bytes of a hex dump: an offset, up to 16 bytes, and a remark in each line.
fn bytes(name: &str) -> Vec<u8> {
    let text = String::from_utf8(read(name)).unwrap();
    let mut bytes = Vec::new();
    for line in text.lines() {
        let (offset, rest) = line.split_once("  ").unwrap();
        let offset = usize::from_str_radix(offset, 16).unwrap();
        assert_eq!(offset, bytes.len(), "{name}: {line}");
        for byte in rest.get(..48).unwrap_or(rest).split_whitespace() {
            bytes.push(u8::from_str_radix(byte, 16).unwrap());
        }
    }
    bytes
}

/// A manifest with nothing in it but what must be, and `member`.
fn with(member: &str, value: Value) -> Manifest {
    let mut json = json!({
        "version": 1, "modelId": "m", "modelType": "transformer", "quantization": "F32",
        "hashAlgorithm": "sha256",
        "architecture": { "numLayers": 1, "hiddenSize": 2, "intermediateSize": 4,
            "numAttentionHeads": 1, "vocabSize": 3, "maxSeqLen": 8 },
        "shards": [{ "index": 0, "fileName": "shard_00000.bin", "size": 24, "hash": "0".repeat(64) }],
        "tensorsFile": "tensors.json", "totalSize": 24
    });
    json[member] = value;
    Manifest::parse(json.to_string().as_bytes()).unwrap_or_else(|problems| panic!("{problems}"))
}

fn hints(name: &str) -> RuntimeOptimizations {
    with("runtimeOptimizations", value(name))
        .runtime_optimizations
        .unwrap()
}

fn owned<const N: usize>(pairs: [(&str, &str); N]) -> Vec<(String, String)> {
    pairs.map(|(a, b)| (a.to_owned(), b.to_owned())).into()
}

fn files_of_a_package() {
    let text = String::from_utf8(read("rdrr/folder.txt")).unwrap();
    let names: Vec<&str> = text.lines().collect();
    assert!(names.iter().all(|name| is_plain_file_name(name)));
    assert_eq!(names[..2], [MANIFEST_FILE, TENSORS_FILE]);
    assert_eq!(names[3..], [shard_file_name(0), shard_file_name(1)]);
}

fn required_fields() {
    let manifest = manifest("rdrr/package/manifest.json");
    assert_eq!((manifest.version.major, manifest.version.minor), (1, 0));
    assert_eq!(manifest.model_id, "gemma-2-2b-it-q4");
    assert_eq!(manifest.model_type, "transformer");
    assert_eq!(manifest.quantization, "Q4_K_M");
    assert_eq!(manifest.hash_algorithm, Algorithm::Sha256);
    let Some(Architecture::Shape(shape)) = &manifest.architecture else {
        panic!("{:?}", manifest.architecture);
    };
    assert_eq!(
        (shape.n_layers, shape.model_dim, shape.ffn_dim),
        (26, 2304, 9216)
    );
    assert_eq!(
        (shape.n_heads, shape.n_kv_heads, shape.head_dim),
        (8, 4, 256)
    );
    assert_eq!((shape.n_vocab, shape.max_ctx), (256_000, 8192));
    assert_eq!(shape.rope_theta, Some(10_000.0));
    assert_eq!(manifest.tensors_file.as_deref(), Some("tensors.json"));
    assert_eq!(manifest.tensor_count, Some(340));
    assert_eq!(manifest.total_size, 3_400_000_000);
    assert_eq!(manifest.groups.len(), 28);

    let map = TensorMap::parse(&read("rdrr/package/tensors.json")).unwrap();
    let package = Package::new(manifest, Some(map)).unwrap_or_else(|p| panic!("{p}"));
    assert_eq!(package.tensors().len(), 340);
    for (id, kind, layer, last_shard) in [
        ("embed", GroupKind::Embed, None, 4),
        ("layer.0", GroupKind::Layer, Some(0), 5),
        ("head", GroupKind::Head, None, 10),
    ] {
        let mut groups = package.manifest().groups.iter();
        let group = groups.find(|group| group.id == id).unwrap();
        assert_eq!((&group.kind, group.layer_index), (&kind, layer), "{id}");
        assert_eq!(group.version, "1.0.0");
        assert_eq!(group.shards.last(), Some(&last_shard), "{id}");
    }
    // The pattern of groups that the document gives for transformers.
    for tensor in package.tensors().iter() {
        let id = groups::group_of(&tensor.name, "transformer");
        assert_eq!(tensor.group, Some(id.to_string()), "{}", tensor.name);
    }
}

fn external_tensors() {
    let map = TensorMap::parse(&read("rdrr/package/tensors.json")).unwrap();
    let table = map.get("model.embed_tokens.weight").unwrap();
    assert_eq!(table.group.as_deref(), Some("embed"));
    assert_eq!((table.first().shard, table.first().offset), (0, 0));
    assert_eq!(table.size, 1_179_648_000);
    assert_eq!(table.shape, [256_000, 2304]);
    assert_eq!(table.dtype.known(), Some(DType::BF16));
    let q = map.get("model.layers.0.self_attn.q_proj.weight").unwrap();
    assert_eq!(q.group.as_deref(), Some("layer.0"));
    let place = Span {
        shard: 5,
        offset: 0,
        size: 2_654_208,
    };
    assert_eq!((q.pieces(), q.size), (&[place][..], place.size));
    assert_eq!(q.shape, [2048, 2304]);
    assert_eq!(q.dtype.known(), Some(DType::Q4_K));
    assert_eq!(q.dtype.to_string(), "Q4_K_M");
}

fn component_groups() {
    let package = Package::new(manifest("rdrr/groups/manifest.json"), None).unwrap();
    let groups = &package.manifest().groups;
    let expected = [
        ("embed", GroupKind::Embed, &[0][..], None, None),
        ("layer.0", GroupKind::Layer, &[0, 1], Some(0), None),
        (
            "layer.0.expert.0",
            GroupKind::Expert,
            &[5],
            Some(0),
            Some(0),
        ),
    ];
    assert_eq!(groups.len(), expected.len());
    for (group, (id, kind, shards, layer, expert)) in groups.iter().zip(expected) {
        assert_eq!((group.id.as_str(), &group.kind), (id, &kind));
        assert_eq!(
            (group.version.as_str(), &group.shards[..]),
            ("1.0.0", shards)
        );
        assert_eq!((group.layer_index, group.expert_index), (layer, expert));
        let [name] = &group.tensors[..] else {
            panic!("{group:?}");
        };
        assert_eq!(groups::group_of(name, "mixtral").to_string(), id);
    }
}

fn shard_entry() {
    let manifest = with("extra", Value::Null);
    let mut json: Value = serde_json::from_slice(&manifest.to_json()).unwrap();
    json["shards"] = json!([value("rdrr/shard.json")]);
    json["totalSize"] = json!(SHARD_SIZE);
    let manifest = Manifest::parse(json.to_string().as_bytes()).unwrap();
    let [shard] = &manifest.shards[..] else {
        panic!("{manifest:?}");
    };
    assert_eq!(shard.file_name, "shard_00000.bin");
    assert_eq!(shard.size, 67_108_864);
    assert_eq!(shard.hash.algorithm(), Algorithm::Sha256);
}

fn quantization_info() {
    let info = with("quantizationInfo", value("rdrr/quantization-info.json"));
    let info = info.quantization_info.unwrap();
    assert_eq!(info.weights, "q4_k_m");
    assert_eq!(info.embeddings.as_deref(), Some("f16"));
    assert_eq!(info.lm_head.as_deref(), Some("f16"));
    assert_eq!(info.variant_tag.as_deref(), Some("wq4_k_m-embf16"));
    let variant = naming::Variant::of(&info).unwrap();
    assert_eq!(variant.tag(), "wq4_k_m-embf16");
    assert_eq!(naming::Variant::parse_tag("wq4_k_m-embf16"), Some(variant));
}

fn multi_shard_tensor() {
    let map = TensorMap::parse(&read("rdrr/spans.json")).unwrap();
    let table = map.get("model.embed_tokens.weight").unwrap();
    assert_eq!(table.group.as_deref(), Some("embed"));
    assert_eq!(table.shape, [128_256, 4096]);
    assert_eq!(table.dtype.known(), Some(DType::BF16));
    let pieces = table.pieces();
    let first = Span {
        shard: 0,
        offset: 0,
        size: 67_108_864,
    };
    assert_eq!(pieces[0], first);
    assert_eq!((pieces[1].shard, pieces[1].offset), (1, 0));
    assert_eq!(pieces.iter().map(|p| p.size).sum::<u64>(), table.size);
}

fn hints_of_every_kind() {
    let every = hints("rdrr/hints.json");
    let kernels = [
        ("matmul", "q4_fused"),
        ("attention", "tiled_f16"),
        ("rmsnorm", "f16_subgroup"),
    ];
    assert_eq!(every.preferred_kernels, owned(kernels));
    let sizes = [("matmul_f16", [128, 1, 1]), ("rmsnorm", [256, 1, 1])];
    let sizes = sizes.map(|(kernel, size)| (kernel.to_owned(), size));
    assert_eq!(every.workgroup_overrides, sizes);
    assert_eq!(every.disable_features, ["subgroups"]);
    assert_eq!(every.force_f32_accumulation, Some(true));
    assert_eq!(every.attention_tier.as_deref(), Some("streaming"));
    assert_eq!(every.target_device.as_deref(), Some("apple-m1"));
    assert!(every.extra.is_empty());
}

fn hints_for_apple() {
    let kernels = [("matmul", "f16"), ("attention", "tiled_f16")];
    let expected = RuntimeOptimizations {
        preferred_kernels: owned(kernels),
        workgroup_overrides: vec![("matmul_f16".to_owned(), [64, 4, 1])],
        target_device: Some("apple-m1".to_owned()),
        ..RuntimeOptimizations::default()
    };
    assert_eq!(hints("rdrr/hints-apple.json"), expected);
}

fn conservative_hints() {
    let expected = RuntimeOptimizations {
        disable_features: vec!["subgroups".to_owned(), "shader-f16".to_owned()],
        force_f32_accumulation: Some(true),
        attention_tier: Some("basic".to_owned()),
        ..RuntimeOptimizations::default()
    };
    assert_eq!(hints("rdrr/hints-conservative.json"), expected);
}

fn adapter_package() {
    let manifest = manifest("rdrr/lora/manifest.json");
    assert!(manifest.is_lora());
    assert_eq!(manifest.model_id, "functiongemma-270m-react-lora");
    assert_eq!(manifest.adapter_type.as_deref(), Some("lora"));
    assert_eq!(
        manifest.base_model.as_deref(),
        Some("functiongemma-270m-it")
    );
    assert_eq!(manifest.quantization, "F32");
    let config = manifest.lora_config.as_ref().unwrap();
    assert_eq!((config.rank, config.alpha), (32, 64.0));
    assert_eq!(
        config.target_modules,
        ["q_proj", "k_proj", "v_proj", "o_proj"]
    );
    assert_eq!(manifest.shards[0].file_name, "lora_weights.rdrr");
    assert_eq!(manifest.shards[0].size, 15_728_640);
    let package = Package::new(manifest, None).unwrap();
    for (matrix, shape) in [("a", [4096, 32]), ("b", [32, 4096])] {
        let name = format!("layers.0.q_proj.lora_{matrix}");
        let tensor = package.tensors().get(&name).unwrap();
        assert_eq!(tensor.shape, shape);
        assert_eq!(tensor.dtype.known(), Some(DType::F32));
        let place = lora::parse_name(&name).unwrap();
        assert_eq!((place.layer, place.module.as_str()), (0, "q_proj"));
        assert_eq!(place.to_tensor_name(), name);
    }
}

/// The table of what is normalised.
fn spellings() {
    let manifest = manifest("rdrr/spellings/manifest.json");
    assert_eq!(manifest.hash_algorithm, Algorithm::Blake3);
    assert_eq!(manifest.shards[1].file_name, "shard_00001.bin");
    assert_eq!(manifest.shard_offset(1), 1);
    let written = String::from_utf8(manifest.to_json()).unwrap();
    assert!(written.contains("\"fileName\": \"shard_00001.bin\""));
    assert!(!written.contains("\"filename\""));
    Package::new(manifest, None).unwrap();
}

fn file_headers() {
    let tensors = bytes("engine/qmodel.tensors.hex");
    assert_eq!(tensors.len(), 16);
    let facts = ModelFacts {
        arch: ArchType::BitNet,
        tied_embeddings: true,
        hidden_dim: 128,
        intermediate_dim: 128,
        hidden_dim_orig: 3,
        intermediate_dim_orig: 4,
        norm_eps: 1e-5,
    };
    let header = TensorFile::layout(facts, &[]).unwrap().header();
    assert_eq!(header[..16], tensors);
    // The parser takes the header, and asks for our body.
    const ENDS: &str = "the file ends in the header: 4 bytes needed, 0 left";
    let error = TensorFile::parse(&tensors, 16).unwrap_err().to_string();
    assert_eq!(error, ENDS);

    let rope = bytes("engine/rope.cache.hex");
    assert_eq!(rope.len(), 12);
    let file = RopeFile {
        rope_theta: 10_000.0,
        head_dim: 64,
        rope_dim: 64,
        max_position_embeddings: 512,
        rope_scaling: None,
    };
    let written = file.to_bytes().unwrap();
    assert_eq!(written[..12], rope);
    assert_eq!(RopeFile::parse(&written).unwrap(), file);

    let lora = bytes("engine/qmodel.lora.hex");
    assert_eq!(lora.len(), 12);
    let header = LoraFile::layout(1, 2.0, Vec::new()).unwrap().header();
    assert_eq!(header[..12], lora);
    let error = LoraFile::parse(&lora, 12).unwrap_err().to_string();
    assert_eq!(error, ENDS);
}

fn quantize_manifest() {
    let bytes = bytes("engine/quantize-manifest.hex");
    let manifest = bundle::Manifest::parse(&bytes, ArchType::BitNet).unwrap();
    assert_eq!(manifest.shards, ["a.safetensors", "b.safetensors"]);
    assert!(manifest.sections.is_none());
    let tensors = manifest.tensors.iter();
    let found: Vec<_> = tensors
        .map(|t| (t.action, t.dtype, t.rows, t.padded_rows, t.padded_cols))
        .collect();
    let expected = [
        (Action::Raw, SourceType::BF16, 4, 4, 1),
        (Action::TernaryQuantize, SourceType::F32, 4, 4, 128),
        (Action::EmbeddingI8, SourceType::F16, 5, 5, 4),
        (Action::RepackTernary, SourceType::U8, 1, 4, 128),
        (Action::RepackTernary, SourceType::I8, 4, 4, 128),
    ];
    assert_eq!(found, expected);
    let place = |shard, offset, size| ShardRange {
        shard,
        offset,
        size,
    };
    assert_eq!(manifest.tensors[0].data, place(0, 64, 8));
    assert_eq!(manifest.tensors[0].scale, None);
    assert_eq!(manifest.tensors[3].scale, Some(place(1, 40, 2)));
    let lora = manifest.lora.as_ref().unwrap();
    assert_eq!((lora.n_layers, lora.scale), (1, 2.0));
    let [pair] = &lora.pairs[..] else {
        panic!("{lora:?}");
    };
    assert_eq!((pair.layer, pair.target), (0, LoraTarget::Q));
    assert_eq!(
        (pair.a.rows, pair.a.cols, pair.b.dtype),
        (2, 4, SourceType::F32)
    );
    assert_eq!(pair.b.data, place(1, 62, 32));
    assert_eq!(manifest.to_bytes(ArchType::BitNet).unwrap(), bytes);

    // The tables of codes, and the order of an adapter's targets.
    assert_eq!(
        [1, 2].map(ArchType::from_code),
        [ArchType::BitNet, ArchType::Llama].map(Some)
    );
    let sources = ["F32", "F16", "BF16", "I8", "U8"]
        .map(|name| DType::ALL.into_iter().find(|d| d.name() == name));
    let codes = [0, 1, 2, 3, 4].map(|code| SourceType::from_code(code).map(SourceType::dtype));
    assert_eq!(codes, sources);
    assert_eq!(
        LoraTarget::ALL.map(LoraTarget::module),
        [
            "self_attn.k_proj",
            "self_attn.v_proj",
            "self_attn.q_proj",
            "self_attn.o_proj",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
        ]
    );
}

/// The session, as far as it needs no model: `crates/cli/tests/worker.rs` replays it.
fn session() {
    let text = String::from_utf8(read("engine/session.txt")).unwrap();
    let numbers = |mark: &str| -> Vec<f64> {
        let lines = text.lines().filter_map(|line| line.strip_prefix(mark));
        lines.map(|line| line.parse().unwrap()).collect()
    };
    let said = numbers("< ");
    let (mut at, mut requests) = (0, Vec::new());
    while said[at] != 0.0 {
        let n = said[at] as usize;
        requests.push((n, said[at + 1], said[at + 7]));
        at += 8 + n;
    }
    assert_eq!(at + 1, said.len(), "0 ends it");
    assert_eq!(requests, [(8, 1.0, 0.0), (3, 0.0, 3.0)]);
    // The first reply ends with an EOS id, the second at its limit; each is followed by the position,
    // which counts all ids but the last.
    let replies = numbers("> ");
    assert_eq!((replies[3], replies[4]), (2.0, 8.0 + 3.0));
    assert_eq!(replies[5..].len(), 3 + 1);
    assert_eq!(replies[8], 11.0 + 3.0 + 2.0);
}

fn i2_s_block() {
    let bytes = bytes("webgpu/i2_s.hex");
    let size = DType::I2_S.tensor_bytes(128);
    assert_eq!(size, Some(bytes.len() as u64));
    // The document's formula, in words of 32 bits, with its table of codes mended.
    let words = bytes.chunks_exact(4);
    let packed: Vec<u32> = words
        .map(|w| u32::from_le_bytes(w.try_into().unwrap()))
        .collect();
    for k in 0..128 {
        let (block, pos) = (k / 128, k % 128);
        let (group, gp) = (pos / 32, pos % 32);
        let shift = (gp % 4) * 8 + (6 - 2 * group);
        let code = packed[block * 8 + gp / 4] >> shift & 3;
        assert_eq!(i64::from(code) - 1, k as i64 % 3 - 1, "element {k}");
    }
    assert_eq!(f32::from_bits(packed[8]), 0.75);
}

/// Every file, and what it must be.
const FILES: [(&str, fn()); 18] = [
    ("engine/qmodel.lora.hex", file_headers),
    ("engine/qmodel.tensors.hex", file_headers),
    ("engine/quantize-manifest.hex", quantize_manifest),
    ("engine/rope.cache.hex", file_headers),
    ("engine/session.txt", session),
    ("rdrr/folder.txt", files_of_a_package),
    ("rdrr/groups/manifest.json", component_groups),
    ("rdrr/hints-apple.json", hints_for_apple),
    ("rdrr/hints-conservative.json", conservative_hints),
    ("rdrr/hints.json", hints_of_every_kind),
    ("rdrr/lora/manifest.json", adapter_package),
    ("rdrr/package/manifest.json", required_fields),
    ("rdrr/package/tensors.json", external_tensors),
    ("rdrr/quantization-info.json", quantization_info),
    ("rdrr/shard.json", shard_entry),
    ("rdrr/spans.json", multi_shard_tensor),
    ("rdrr/spellings/manifest.json", spellings),
    ("webgpu/i2_s.hex", i2_s_block),
];

fn walk(dir: &Path, found: &mut Vec<String>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            walk(&path, found);
        } else {
            let name = path.strip_prefix(folder()).unwrap().to_str().unwrap();
            found.push(name.replace('\\', "/"));
        }
    }
}

#[test]
fn every_example_means_what_its_document_says() {
    for (name, check) in FILES {
        println!("{name}");
        check();
    }
}

#[test]
fn every_file_is_known() {
    let mut found = Vec::new();
    walk(&folder(), &mut found);
    found.retain(|name| !matches!(name.as_str(), "README.md" | "make.py"));
    found.sort();
    assert_eq!(found, FILES.map(|(name, _)| name));
}

#[test]
fn versions_older_and_as_text_are_read() {
    let json = value("rdrr/spellings/manifest.json");
    for version in [
        json!(1),
        json!("1"),
        json!("1.0"),
        json!(0),
        json!(0.1),
        json!("0.9"),
    ] {
        let mut json = json.clone();
        json["version"] = version.clone();
        let manifest = Manifest::parse(json.to_string().as_bytes()).unwrap();
        let package = Package::new(manifest, None);
        package.unwrap_or_else(|problems| panic!("{version}: {problems}"));
    }
}

#[test]
fn words_of_the_tables_are_read() {
    let json = value("rdrr/groups/manifest.json");
    for word in [
        "embed", "layer", "head", "expert", "shared", "mamba", "rwkv", "attn",
    ] {
        let mut json = json.clone();
        json["groups"]["embed"]["type"] = json!(word);
        let manifest = Manifest::parse(json.to_string().as_bytes()).unwrap();
        let kind = &manifest.groups[0].kind;
        assert_eq!(kind.name(), word);
        assert!(!matches!(kind, GroupKind::Other(_)), "{word}");
    }
    let info = json!({
        "weights": "q4_k_m", "activations": "f16", "kvCache": "f16", "compute": "f32"
    });
    let info = with("quantizationInfo", info).quantization_info.unwrap();
    assert_eq!(info.activations.as_deref(), Some("f16"));
    assert_eq!(info.kv_cache.as_deref(), Some("f16"));
    assert_eq!(info.compute.as_deref(), Some("f32"));
    let experts = json!({ "numExperts": 8, "numExpertsPerToken": 2 });
    let experts = with("moeConfig", experts).moe_config.unwrap();
    assert_eq!((experts.n_experts, experts.n_experts_per_token), (8, 2));
}

#[test]
fn headers_are_validated() {
    let rope = [bytes("engine/rope.cache.hex"), b"\x02\0\0\0{}".to_vec()].concat();
    let tensors = bytes("engine/qmodel.tensors.hex");
    let lora = bytes("engine/qmodel.lora.hex");
    let say = |kind: &str, at: usize| {
        let changed = |file: &[u8]| {
            let mut file = file.to_vec();
            file[at] = 9;
            file
        };
        let error = match kind {
            "TRLM" => TensorFile::parse(&changed(&tensors), 16).unwrap_err(),
            "TRRC" => RopeFile::parse(&changed(&rope)).unwrap_err(),
            _ => LoraFile::parse(&changed(&lora), 12).unwrap_err(),
        };
        error.to_string()
    };
    for kind in ["TRLM", "TRRC", "TRLA"] {
        let error = say(kind, 0);
        assert!(error.contains("magic") && error.contains(kind), "{error}");
        let error = say(kind, 4);
        assert!(error.contains("version: expected 1, found 9"), "{error}");
        let reserved = if kind == "TRLM" { 12 } else { 8 };
        let error = say(kind, reserved);
        assert!(error.contains("reserved field: expected 0"), "{error}");
    }
    let error = say("TRLM", 8);
    assert!(error.contains("a number from 0 to 7"), "{error}");
}
