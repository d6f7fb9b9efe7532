//! Packages made to do harm, and packages gone wrong: refused with every problem named, in little
//! time and memory.

use proptest::prelude::*;
use serde_json::{Value, json};
use sterna_format::digest::Algorithm;
use sterna_format::rdrr::{Manifest, Package, Problems, TensorMap, hf_config};

const HASH: &str = "abababababababababababababababababababababababababababababababab";

/// A package of two shards, two tensors and two groups.
fn good() -> Value {
    json!({
        "version": 1, "modelId": "m", "modelType": "transformer", "quantization": "F32",
        "hashAlgorithm": "sha256",
        "architecture": { "numLayers": 1, "hiddenSize": 4, "intermediateSize": 8,
            "numAttentionHeads": 2, "vocabSize": 3, "maxSeqLen": 16 },
        "groups": {
            "embed": { "type": "embed", "version": "1.0.0", "shards": [0, 1],
                "tensors": ["model.embed_tokens.weight"], "hash": HASH },
            "head": { "type": "head", "version": "1.0.0", "shards": [1],
                "tensors": ["model.norm.weight"], "hash": HASH },
        },
        "shards": [
            { "index": 0, "fileName": "shard_00000.bin", "size": 32, "hash": HASH },
            { "index": 1, "fileName": "shard_00001.bin", "size": 64, "hash": HASH },
        ],
        "tensors": {
            "model.embed_tokens.weight": { "group": "embed", "shard": 0, "offset": 0, "size": 48,
                "shape": [3, 4], "dtype": "F32", "spans": [
                    { "shardIndex": 0, "offset": 0, "size": 32 },
                    { "shardIndex": 1, "offset": 0, "size": 16 } ] },
            "model.norm.weight": { "group": "head", "shard": 1, "offset": 16, "size": 16,
                "shape": [4], "dtype": "F32" },
        },
        "tensorCount": 2, "totalSize": 96,
    })
}

fn open(json: &Value) -> Result<Package, Problems> {
    Package::new(Manifest::parse(json.to_string().as_bytes())?, None)
}

/// `good` with the value at `path` replaced; null removes it.
fn with(path: &str, value: Value) -> Value {
    let mut json = good();
    match json.pointer_mut(path) {
        Some(place) => *place = value,
        None => {
            let (parent, key) = path.rsplit_once('/').unwrap();
            json.pointer_mut(parent).unwrap()[key] = value;
        }
    }
    json
}

#[test]
fn the_good_package_is_good() {
    open(&good()).unwrap();
}

#[test]
fn wrong_values_are_named() {
    let embed = "/tensors/model.embed_tokens.weight";
    let norm = "/tensors/model.norm.weight";
    for (path, value, message) in [
        ("/version", json!(2), "version: expected 1 or 0.x, found 2"),
        (
            "/version",
            json!("one"),
            "version: expected 1 or 0.x, found `one`",
        ),
        (
            "/version",
            Value::Null,
            "version: expected 1 or 0.x, found nothing",
        ),
        (
            "/version",
            json!(-1),
            "version: expected 1 or 0.x, found -1",
        ),
        (
            "/modelId",
            json!(""),
            "modelId: expected a string that isn't empty, found ``",
        ),
        (
            "/modelType",
            Value::Null,
            "modelType: expected a string that isn't empty, found nothing",
        ),
        (
            "/quantization",
            json!(4),
            "quantization: expected a string that isn't empty, found 4",
        ),
        (
            "/hashAlgorithm",
            json!("md5"),
            "hashAlgorithm: expected sha256 or blake3, found `md5`",
        ),
        (
            "/architecture",
            Value::Null,
            "architecture: expected the shape of the model, or `config`, found nothing",
        ),
        (
            "/architecture",
            json!("LlamaForCausalLM"),
            "config: expected the configuration of the class",
        ),
        (
            "/architecture/numLayers",
            json!(0),
            "architecture.numLayers: expected a whole number from 1 to 4294967295, found 0",
        ),
        (
            "/architecture/hiddenSize",
            json!(2.5),
            "architecture.hiddenSize: expected a whole number from 1 to 4294967295, found 2.5",
        ),
        (
            "/architecture/vocabSize",
            json!(-3),
            "architecture.vocabSize: expected a whole number from 1 to 4294967295, found -3",
        ),
        (
            "/totalSize",
            json!(95),
            "totalSize: expected 96, the bytes of all shards together, found 95",
        ),
        (
            "/totalSize",
            Value::Null,
            "totalSize: expected the bytes of all shards together, found nothing",
        ),
        (
            "/tensorCount",
            json!(3),
            "tensorCount: expected 2, the number of tensors, found 3",
        ),
        (
            "/tensors",
            Value::Null,
            "tensors: expected a tensor map, inline or in `tensors.json`, found none",
        ),
        (
            "/shards",
            json!([]),
            "shards: expected at least one shard, found none",
        ),
        (
            "/shards",
            Value::Null,
            "shards: expected a list of shards, found nothing",
        ),
        (
            "/shards/1/index",
            json!(7),
            "shards[1].index: expected 1, its place in the list, found 7",
        ),
        (
            "/shards/1/size",
            json!(0),
            "shards[1].size: expected a number of bytes above 0, found 0",
        ),
        (
            "/shards/1/size",
            json!(-64),
            "shards[1].size: expected a number of bytes above 0, found -64",
        ),
        (
            "/shards/1/size",
            json!(64.5),
            "shards[1].size: expected a number of bytes above 0, found 64.5",
        ),
        (
            "/shards/1/offset",
            json!(31),
            "shards[1].offset: expected 32, the bytes of the shards before it, found 31",
        ),
        (
            "/shards/1/hash",
            json!("ab"),
            "shards[1].hash: expected 64 lower-case hexadecimal digits, found `ab`",
        ),
        (
            "/shards/1/hash",
            json!(HASH.to_uppercase()),
            "shards[1].hash: expected 64 lower-case hexadecimal digits",
        ),
        (
            "/shards/1/hash",
            Value::Null,
            "shards[1].hash: expected 64 lower-case hexadecimal digits, found nothing",
        ),
        (
            "/shards/1/hashAlgorithm",
            json!("blake3"),
            "shards[1].hashAlgorithm: expected sha256, as before, found blake3",
        ),
        (
            "/shards/1/fileName",
            json!("../../etc/passwd"),
            "shards[1].fileName: expected a plain file name",
        ),
        (
            "/shards/1/fileName",
            json!("/etc/passwd"),
            "shards[1].fileName: expected a plain file name",
        ),
        (
            "/shards/1/fileName",
            json!("C:\\shard.bin"),
            "shards[1].fileName: expected a plain file name",
        ),
        (
            "/shards/1/fileName",
            json!("NUL"),
            "shards[1].fileName: expected a plain file name",
        ),
        (
            "/shards/1/fileName",
            json!(""),
            "shards[1].fileName: expected a plain file name",
        ),
        (
            "/shards/1/fileName",
            json!("SHARD_00000.BIN"),
            "shards[1].fileName: expected a name of its own, whatever the case (shards[0].fileName has it)",
        ),
        (
            "/shards/1/fileName",
            json!("Manifest.json"),
            "expected a name of its own, whatever the case (the manifest has it)",
        ),
        (
            "/tensorsFile",
            json!("a/tensors.json"),
            "tensorsFile: expected a plain file name",
        ),
        (
            "/tensorsFile",
            json!("shard_00000.bin"),
            "tensorsFile: expected a name of its own",
        ),
        (
            "/tokenizer",
            json!({"type": "bundled", "file": "../x"}),
            "tokenizer.file: expected a plain file name",
        ),
        (
            "/tokenizer",
            json!({"type": "bundled", "file": "shard_00001.bin"}),
            "tokenizer.file: expected a name of its own",
        ),
        (
            "/tokenizer",
            json!({"type": "bundled", "file": "MANIFEST.json"}),
            "tokenizer.file: expected a name of its own",
        ),
        (
            "/moeConfig",
            json!({"numExperts": 2, "numExpertsPerToken": 3}),
            "moeConfig.numExpertsPerToken: expected at most `numExperts`, 2, found 3",
        ),
        (
            "/eos_token_id",
            json!([1, "x"]),
            "eos_token_id[1]: expected a token id, found `x`",
        ),
        (
            "/blake3Full",
            json!("xyz"),
            "blake3Full: expected 64 lower-case hexadecimal digits, found `xyz`",
        ),
        (
            "/architecture/numLayers",
            json!(1_099_511_627_776_u64),
            "architecture.numLayers: expected a whole number from 1 to 4294967295, found 1099511627776",
        ),
        (
            "/loraConfig",
            json!({"rank": 0, "alpha": 1}),
            "loraConfig.rank: expected a whole number from 1 to 65536, found 0",
        ),
        (
            "/integrityExtensions",
            json!({"shardBlocks": {"blockSize": 4096, "hashes": [[HASH]]}}),
            "integrityExtensions.shardBlocks.hashes: expected a list for each of 2 shards, found 1",
        ),
        (
            "/integrityExtensions",
            json!({"shardBlocks": {"blockSize": 4096, "hashes": [[HASH], []]}}),
            "integrityExtensions.shardBlocks.hashes[1]: expected 1 hashes, one a block, found 0",
        ),
        (
            "/integrityExtensions",
            json!({"shardBlocks": {"blockSize": 1, "hashes": []}}),
            "integrityExtensions.shardBlocks.blockSize: expected a number of bytes from 4096 on, found 1",
        ),
        (
            "/integrityExtensions",
            json!({"blockMerkle": {"blockSize": 4096, "roots": {"x": format!("sha256:{HASH}")}}}),
            "integrityExtensions.blockMerkle.roots.x: expected the name of a tensor, found `x`",
        ),
        (
            "/integrityExtensions",
            json!({"files": [1]}),
            "integrityExtensions.files: expected an object, found a list",
        ),
        (
            "/integrityExtensions",
            json!({"files": {"../x": {"size": 1, "hash": HASH}}}),
            "integrityExtensions.files[`../x`]: expected the plain name of a file beside the manifest, found `../x`",
        ),
        (
            "/integrityExtensions",
            json!({"files": {"Manifest.json.minisig": {"size": 1, "hash": HASH}}}),
            "integrityExtensions.files[`Manifest.json.minisig`]: expected the plain name of a file beside the manifest, found `Manifest.json.minisig`",
        ),
        (
            "/integrityExtensions",
            json!({"files": {"Shard_00001.bin": {"size": 1, "hash": HASH}}}),
            "integrityExtensions.files[`Shard_00001.bin`]: expected a name that no shard or other file has, whatever the case, found `Shard_00001.bin`",
        ),
        (
            "/integrityExtensions",
            json!({"files": {"a": {"size": -1, "hash": HASH}}}),
            "integrityExtensions.files.a.size: expected a whole number from 0 on, found -1",
        ),
        (
            "/integrityExtensions",
            json!({"files": {"a": {"size": 1, "hash": "00"}}}),
            "integrityExtensions.files.a.hash: expected 64 lower-case hexadecimal digits, found `00`",
        ),
        (
            "/groups/embed/type",
            Value::Null,
            "groups.embed.type: expected a string that isn't empty, found nothing",
        ),
        (
            "/groups/embed/shards",
            json!([0]),
            "groups.embed.shards: expected [0, 1], where its tensors are, found [0]",
        ),
        (
            "/groups/embed/shards",
            json!([0, 1, 9]),
            "groups.embed.shards: expected [0, 1], where its tensors are, found [0, 1, 9]",
        ),
        (
            "/groups/embed/hash",
            json!(""),
            "groups.embed.hash: expected 64 lower-case hexadecimal digits, found ``",
        ),
        (
            "/groups/embed/tensors",
            json!(["x"]),
            "groups.embed.tensors[0]: expected the name of a tensor, found `x`",
        ),
        (
            "/groups/head/tensors",
            json!(["model.norm.weight", "model.embed_tokens.weight"]),
            "groups.head.tensors[1]: expected a tensor that no group has yet",
        ),
        (
            "/groups/head/tensors",
            json!(["model.norm.weight", "model.norm.weight"]),
            "groups.head.tensors[1]: expected a tensor that no group has yet",
        ),
        (
            &format!("{norm}/group"),
            json!("embed"),
            "tensors[`model.norm.weight`].group: expected `head`, which lists it, found `embed`",
        ),
        (
            &format!("{norm}/shard"),
            json!(2),
            "tensors[`model.norm.weight`].shard: expected the index of one of 2 shards, found 2",
        ),
        (
            &format!("{norm}/shard"),
            json!(-1),
            "tensors[`model.norm.weight`].shard: expected the index of a shard, found -1",
        ),
        (
            &format!("{norm}/shard"),
            Value::Null,
            "tensors[`model.norm.weight`].shard: expected the index of a shard, or spans, found nothing",
        ),
        (
            &format!("{norm}/offset"),
            json!(56),
            "tensors[`model.norm.weight`]: expected bytes of shard 1, which has 64, found 16 bytes at offset 56",
        ),
        (
            &format!("{norm}/offset"),
            json!(u64::MAX),
            "expected bytes of shard 1, which has 64",
        ),
        (
            &format!("{norm}/offset"),
            json!(8),
            "tensors[`model.norm.weight`]: expected bytes of its own: `model.embed_tokens.weight` ends at byte 16 of shard 1, found a start at byte 8",
        ),
        (
            &format!("{norm}/offset"),
            json!(1e300),
            "tensors[`model.norm.weight`].offset: expected a number of bytes, found 1",
        ),
        (
            &format!("{norm}/size"),
            json!(12),
            "tensors[`model.norm.weight`].size: expected the bytes of F32 of shape [4], found 12",
        ),
        (
            &format!("{norm}/shape"),
            json!([u64::MAX, 2]),
            "tensors[`model.norm.weight`].size: expected the bytes of F32 of shape [18446744073709551615, 2], found 16",
        ),
        (
            &format!("{norm}/shape"),
            json!([1, 1, 1, 1, 1, 1, 1, 1, 4]),
            "tensors[`model.norm.weight`].shape: expected a list of up to 8 dimensions, found 9",
        ),
        (
            &format!("{norm}/shape"),
            json!([4.5]),
            "tensors[`model.norm.weight`].shape[0]: expected a dimension, found 4.5",
        ),
        (
            &format!("{norm}/layout"),
            json!("diagonal"),
            "tensors[`model.norm.weight`].layout: expected row or column, found `diagonal`",
        ),
        (
            &format!("{norm}/layout"),
            json!("column"),
            "tensors[`model.norm.weight`].shape: expected two dimensions, with column layout, found 1",
        ),
        (
            &format!("{norm}/dtype"),
            Value::Null,
            "tensors[`model.norm.weight`].dtype: expected a string that isn't empty, found nothing",
        ),
        (
            &format!("{embed}/spans/1/size"),
            json!(15),
            "tensors[`model.embed_tokens.weight`].spans: expected pieces of 48 bytes together, as `size` says, found 47",
        ),
        (
            &format!("{embed}/spans/1/size"),
            json!(u64::MAX),
            "found more than can be counted",
        ),
        (
            &format!("{embed}/spans/1/size"),
            json!(0),
            "tensors[`model.embed_tokens.weight`].spans[1].size: expected a number of bytes above 0, found 0",
        ),
        (
            &format!("{embed}/spans/1"),
            json!({"shardIndex": 0, "offset": 0, "size": 16}),
            "expected bytes of its own",
        ),
        (
            &format!("{embed}/offset"),
            json!(4),
            "expected a first piece where `shard` and `offset` say, found one in shard 0 at 0",
        ),
    ] {
        let problems = open(&with(path, value.clone())).map(|_| ()).unwrap_err();
        let text = problems.to_string();
        assert!(
            text.contains(message),
            "{path} = {value}\nexpected: {message}\nfound: {text}"
        );
    }
}

#[test]
fn without_groups_the_tensors_must_be_somewhere() {
    let mut json = with("/tensors", Value::Null);
    json["groups"] = Value::Null;
    let problems = open(&json).unwrap_err().to_string();
    let expected = "tensorsFile: expected the name of a file, or `tensors`, found nothing";
    assert_eq!(problems, expected);
}

#[test]
fn every_problem_is_said_at_once() {
    let mut json = with("/version", json!(9));
    json["hashAlgorithm"] = json!("crc");
    json["shards"][0]["size"] = json!(-1);
    json["shards"][1]["fileName"] = json!("a/b");
    json["tensors"]["model.norm.weight"]["dtype"] = json!(3);
    json["groups"]["head"]["hash"] = json!("x");
    let problems = open(&json).unwrap_err();
    let paths: Vec<_> = problems
        .iter()
        .map(|problem| problem.path.as_str())
        .collect();
    for path in [
        "version",
        "hashAlgorithm",
        "shards[0].size",
        "shards[1].fileName",
        "tensors[`model.norm.weight`].dtype",
        "groups.head.hash",
    ] {
        assert!(paths.contains(&path), "{path} not in {paths:?}");
    }
    assert_eq!(paths.len(), 6, "{problems}");
}

#[test]
fn what_is_not_json() {
    for text in [
        "",
        "{",
        "[]",
        "null",
        r#"{"version":1,"version":1}"#,
        "{} {}",
        "\u{feff}{}",
    ] {
        let problems = Manifest::parse(text.as_bytes()).unwrap_err();
        assert!(!problems.is_empty(), "{text}");
        assert!(
            TensorMap::parse(text.as_bytes()).is_err() || text == "{}",
            "{text}"
        );
    }
    let text = r#"{"a":{"shard":0},"a":{"shard":0}}"#;
    let problems = TensorMap::parse(text.as_bytes()).unwrap_err().to_string();
    assert!(problems.contains("`a` occurs twice"), "{problems}");
    // Names are the same though they are spelt differently.
    let problems = TensorMap::parse(br#"{"a":{},"\u0061":{}}"#)
        .unwrap_err()
        .to_string();
    assert!(problems.contains("`a` occurs twice"), "{problems}");
}

/// `n` copies of what `item` makes, in brackets.
fn many(n: usize, open: &str, close: &str, item: impl Fn(usize) -> String) -> String {
    let items: Vec<String> = (0..n).map(item).collect();
    format!("{open}{}{close}", items.join(","))
}

#[test]
fn too_many_of_anything() {
    let base = good().to_string();
    let with_raw = |key: &str, raw: &str| format!("{},\"{key}\":{raw}}}", &base[..base.len() - 1]);
    let without = |key: &str| {
        let mut json = good();
        json.as_object_mut().unwrap().remove(key);
        json.to_string()
    };
    let insert = |text: String, key: &str, raw: &str| {
        format!("{},\"{key}\":{raw}}}", &text[..text.len() - 1])
    };
    for (what, text, message) in [
        (
            "a million groups",
            insert(
                without("groups"),
                "groups",
                &many(1_000_000, "{", "}", |i| format!("\"{i}\":{{}}")),
            ),
            "groups: expected at most 100000 members, found 1000000",
        ),
        (
            "a million shards",
            insert(
                without("shards"),
                "shards",
                &many(1_000_000, "[", "]", |_| "{}".into()),
            ),
            "shards: expected at most 100000 items, found 1000000",
        ),
        (
            "a million tensors",
            insert(
                without("tensors"),
                "tensors",
                &many(1_000_000, "{", "}", |i| format!("\"{i}\":{{}}")),
            ),
            "expected at most 300000 members, found 1000000",
        ),
        (
            "a hundred thousand bad groups",
            insert(
                without("groups"),
                "groups",
                &many(100_000, "{", "}", |i| format!("\"{i}\":{{}}")),
            ),
            "and ",
        ),
        (
            "deep lists",
            with_raw("deep", &("[".repeat(100_000) + &"]".repeat(100_000))),
            "recursion limit",
        ),
        (
            "deep objects",
            with_raw(
                "deep",
                &("{\"a\":".repeat(100_000) + "1" + &"}".repeat(100_000)),
            ),
            "recursion limit",
        ),
        (
            "ten million zeros",
            with_raw("zeros", &many(10_000_000, "[", "]", |_| "0".into())),
            "bytes of memory are needed, the limit is",
        ),
        (
            "unknown values",
            with_raw("unknown", &many(500_000, "[", "]", |_| "0".into())),
            "unknown: expected at most 200000 values of unknown meaning in a file, found more",
        ),
        (
            "a long file",
            with_raw("x", &format!("\"{}\"", "x".repeat(64 << 20))),
            "expected at most 67108864 bytes",
        ),
    ] {
        let problems = Manifest::parse(text.as_bytes()).unwrap_err().to_string();
        assert!(
            problems.contains(message),
            "{what}: {}",
            &problems[..problems.len().min(300)]
        );
        assert!(
            problems.len() < 100_000,
            "{what}: a message of {} bytes",
            problems.len()
        );
    }
}

#[test]
fn sizes_that_overflow_when_they_are_summed() {
    let mut json = good();
    json["shards"][0]["size"] = json!(u64::MAX);
    json["shards"][1]["size"] = json!(u64::MAX);
    json["totalSize"] = json!(u64::MAX);
    let problems = open(&json).unwrap_err().to_string();
    assert!(problems.contains("more than can be counted"), "{problems}");
}

#[test]
fn algorithms_are_inferred() {
    let without = |edit: &dyn Fn(&mut Value)| {
        let mut json = good();
        json.as_object_mut().unwrap().remove("hashAlgorithm");
        edit(&mut json);
        Manifest::parse(json.to_string().as_bytes()).unwrap()
    };
    assert_eq!(without(&|_| {}).hash_algorithm, Algorithm::Sha256);
    let named = without(&|json| json["shards"][0]["hashAlgorithm"] = json!("blake3"));
    assert_eq!(named.hash_algorithm, Algorithm::Blake3);
    let alias = without(&|json| {
        for shard in json["shards"].as_array_mut().unwrap() {
            let shard = shard.as_object_mut().unwrap();
            let hash = shard.remove("hash").unwrap();
            shard.insert("blake3".into(), hash);
        }
    });
    assert_eq!(alias.hash_algorithm, Algorithm::Blake3);
    assert_eq!(alias.shards[0].hash.to_string(), HASH);
    // Both given: the alias counts where hashes are BLAKE3, and is besides where they aren't.
    let other = "cd".repeat(32);
    let mut both = good();
    both["shards"][0]["blake3"] = json!(other);
    let sha = Manifest::parse(both.to_string().as_bytes()).unwrap();
    assert_eq!(sha.shards[0].hash.to_string(), HASH);
    assert_eq!(sha.shards[0].blake3.unwrap().to_string(), other);
    both["hashAlgorithm"] = json!("blake3");
    let blake3 = Manifest::parse(both.to_string().as_bytes()).unwrap();
    assert_eq!(
        (blake3.shards[0].hash.to_string(), blake3.shards[0].blake3),
        (other, None)
    );
}

#[test]
fn adapters_are_read_leniently_and_written_completely() {
    // As the format's description prints it.
    let json = json!({
        "version": "1.0", "modelId": "a", "modelType": "lora", "adapterType": "lora",
        "baseModel": "b", "quantization": "F32",
        "loraConfig": { "rank": 2, "alpha": 4, "targetModules": ["q_proj"], "later": true },
        "shards": [{ "index": 0, "fileName": "lora_weights.rdrr", "size": 96, "hash": HASH }],
        "tensors": {
            "layers.0.q_proj.lora_a": { "shard": 0, "offset": 0, "size": 64, "shape": [8, 2], "dtype": "f32" },
            "layers.0.q_proj.lora_b": { "shard": 0, "offset": 64, "size": 32, "shape": [2, 4], "dtype": "f32" },
        },
    });
    let package = open(&json).unwrap();
    let manifest = package.manifest();
    assert!(manifest.is_lora());
    assert_eq!(manifest.total_size, 96);
    let written: Value = serde_json::from_slice(&manifest.to_json()).unwrap();
    for (key, value) in [
        ("/version", json!(1)),
        ("/hashAlgorithm", json!("sha256")),
        ("/totalSize", json!(96)),
        ("/loraConfig/later", json!(true)),
        ("/loraConfig/alpha", json!(4)),
        ("/tensors/layers.0.q_proj.lora_a/dtype", json!("F32")),
    ] {
        assert_eq!(written.pointer(key), Some(&value), "{key}");
    }
}

#[test]
fn unknown_members_survive_at_every_level() {
    let mut json = good();
    for path in [
        "",
        "/architecture",
        "/groups/embed",
        "/shards/0",
        "/tensors/model.norm.weight",
        "/quantizationInfo",
        "/tokenizer",
        "/moeConfig",
        "/runtimeOptimizations",
        "/integrityExtensions",
        "/integrityExtensions/files/notes.txt",
        "/inference/deep",
        "/metadata",
    ] {
        json["quantizationInfo"]["weights"] = json!("f32");
        json["tokenizer"]["type"] = json!("bundled");
        json["moeConfig"]["numExperts"] = json!(4);
        json["integrityExtensions"]["files"]["notes.txt"]["size"] = json!(3);
        json["integrityExtensions"]["files"]["notes.txt"]["hash"] = json!(HASH);
        let (parent, key) = path.rsplit_once('/').unwrap_or_default();
        if json.pointer(path).is_none() {
            if json.pointer(parent).is_none() {
                json[parent.trim_start_matches('/')] = json!({});
            }
            json.pointer_mut(parent).unwrap()[key] = json!({});
        }
        json.pointer_mut(path).unwrap()["later"] = json!([null, { "x": 1.5 }]);
        let manifest = Manifest::parse(json.to_string().as_bytes()).unwrap();
        let written: Value = serde_json::from_slice(&manifest.to_json()).unwrap();
        let kept = written.pointer(&format!("{path}/later"));
        assert_eq!(kept, Some(&json!([null, { "x": 1.5 }])), "{path}");
    }
}

#[test]
fn two_maps_of_one_package_must_agree() {
    let manifest = Manifest::parse(good().to_string().as_bytes()).unwrap();
    let inline = manifest.tensors.clone().unwrap();
    let package = Package::new(manifest.clone(), Some(inline));
    assert_eq!(package.unwrap().tensors().len(), 2);
    let mut other = good()["tensors"].clone();
    other["model.norm.weight"]["offset"] = json!(32);
    let other = TensorMap::parse(other.to_string().as_bytes()).unwrap();
    let problems = Package::new(manifest, Some(other)).unwrap_err().to_string();
    let expected = "tensors[`model.norm.weight`]: expected what the external map says of it";
    assert!(problems.contains(expected), "{problems}");
}

#[test]
fn malformed_hints_and_odd_versions_are_warnings() {
    let mut json = good();
    json["runtimeOptimizations"] =
        json!({"forceF32Accumulation": "yes", "workgroupOverrides": {"rmsnorm": [1, 2]}});
    json["groups"]["embed"]["version"] = json!("abc");
    json["quantizationInfo"] = json!({"weights": "f32", "kvCache": "q3", "activations": "f16"});
    let manifest = Manifest::parse(json.to_string().as_bytes()).unwrap();
    let package = Package::new(manifest, None).unwrap();
    assert_eq!(
        package.warnings(),
        [
            "runtimeOptimizations.workgroupOverrides.rmsnorm: expected three whole numbers above 0, \
             found a list; ignored",
            "runtimeOptimizations.forceF32Accumulation: expected true or false, found `yes`; ignored",
            "groups.embed.version: expected a semantic version such as 1.2.0, found `abc`",
            "quantizationInfo.kvCache: expected f32, f16 or q8_0, found `q3`; ignored",
        ]
    );
    let same = Manifest::parse(&package.manifest().to_json()).unwrap();
    assert_eq!(same, *package.manifest());
}

#[test]
fn groups_may_list_more_shards_than_they_need_in_any_order() {
    let needed = good()["groups"]["embed"]["shards"].clone();
    assert_eq!(needed, json!([0, 1]));
    for listed in [json!([1, 0]), json!([0, 1, 1])] {
        let package = open(&with("/groups/embed/shards", listed)).unwrap();
        assert_eq!(package.manifest().groups[0].shards, [0, 1]);
        let warnings = package.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:?}");
        assert!(
            warnings[0].starts_with("groups.embed.shards: expected [0, 1], where its tensors are"),
            "{warnings:?}"
        );
    }
    for listed in [json!([0]), json!([0, 1, 2])] {
        let problems = open(&with("/groups/embed/shards", listed)).unwrap_err();
        assert!(
            problems
                .to_string()
                .contains("groups.embed.shards: expected")
        );
    }
    assert!(open(&good()).unwrap().warnings().is_empty());
}

#[test]
fn packages_without_a_configuration_say_so() {
    let manifest = Manifest::parse(good().to_string().as_bytes()).unwrap();
    let problems = hf_config(&manifest).unwrap_err().to_string();
    assert!(
        problems.starts_with("inference: expected how the model is computed"),
        "{problems}"
    );
}

proptest! {
    /// Whatever becomes of a byte of a good manifest, the parser ends in a value that can be written
    /// and read again, or in problems.
    #[test]
    fn a_changed_byte(at in 0..2000_usize, byte in any::<u8>()) {
        let mut text = good().to_string().into_bytes();
        let at = at % text.len();
        text[at] = byte;
        if let Ok(manifest) = Manifest::parse(&text) {
            let written = manifest.to_json();
            prop_assert_eq!(&Manifest::parse(&written).unwrap(), &manifest);
            let _ = Package::new(manifest, None);
        }
    }

    /// Any number in any place.
    #[test]
    fn any_number_anywhere(place in 0..14_usize, number in prop_oneof![
        any::<u64>().prop_map(Value::from), any::<i64>().prop_map(Value::from), any::<f64>().prop_map(Value::from)]) {
        let places = [
            "/version", "/totalSize", "/tensorCount", "/shards/0/size", "/shards/1/index",
            "/architecture/numLayers", "/architecture/headDim", "/tensors/model.norm.weight/shard",
            "/tensors/model.norm.weight/offset", "/tensors/model.norm.weight/size",
            "/tensors/model.norm.weight/shape/0", "/groups/embed/shards/0",
            "/tensors/model.embed_tokens.weight/spans/0/offset",
            "/tensors/model.embed_tokens.weight/spans/0/size",
        ];
        let _ = open(&with(places[place], number));
    }
}
