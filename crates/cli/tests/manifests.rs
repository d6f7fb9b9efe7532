//! What manifests of packages say besides where weights are, and manifests that say little or say it oddly.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{json, logits, refusal, stdout, sterna, testdata, text};
use serde_json::{Value, json};
use sterna_delivery::hash::{Algorithm, digest_of};

/// The package of a tiny model in `dir`.
fn package(dir: &Path, model: &str, flags: &[&str]) -> PathBuf {
    let out = dir.join(format!("package-{}", fs::read_dir(dir).unwrap().count()));
    let source = testdata(model);
    let args = ["convert", text(&source), text(&out)];
    stdout(&[&args[..], flags].concat());
    out
}

fn manifest(package: &Path) -> Value {
    serde_json::from_slice(&fs::read(package.join("manifest.json")).unwrap()).unwrap()
}

fn edit(package: &Path, change: impl FnOnce(&mut Value)) {
    let mut json = manifest(package);
    change(&mut json);
    fs::write(package.join("manifest.json"), json.to_string()).unwrap();
}

/// What goes to standard error when the logits of `model` are computed, which must succeed.
fn told(model: &str, more: &[&str]) -> String {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("x.safetensors");
    let args = ["logits", model, "--ids", "1,2", "-o", text(&out)];
    let output = sterna(&[&args[..], more].concat());
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    stderr
}

const LLAMA: &str = "reference-logits/llama";

/// What `sterna` with its folders in `home` says on standard error.
fn told_in(home: &Path, args: &[&str]) -> String {
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_sterna"));
    let output = command
        .args(args)
        .env("STERNA_HOME", home)
        .output()
        .unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{stderr}");
    stderr
}

#[test]
fn hints_are_written_shown_and_given() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("hints.json");
    let hints = json!({"preferredKernels": {"matmul": "f16", "softmax": "f32"},
        "forceF32Accumulation": true});
    fs::write(&file, hints.to_string()).unwrap();
    let flags = ["--hints", text(&file), "--kernel-hint", "matmul=f32"];
    let model = package(dir.path(), LLAMA, &flags);
    let expected = json!({"preferredKernels": {"matmul": "f32", "softmax": "f32"},
        "forceF32Accumulation": true});
    assert_eq!(manifest(&model)["runtimeOptimizations"], expected);
    // The user's take precedence, from a file or as they are.
    let given = json!({"forceF32Accumulation": false, "preferredKernels": {"matmul": "f16"}});
    for given in [given.to_string(), {
        fs::write(&file, given.to_string()).unwrap();
        text(&file).to_owned()
    }] {
        let args = [
            "inspect",
            text(&model),
            "--json",
            "--backend",
            "cpu",
            "--kernel-hints",
            &given,
        ];
        let hints = json(&args)["package"]["hints"].clone();
        let list = hints.as_array().unwrap().iter();
        let list: Vec<_> = list.map(|hint| (&hint["hint"], &hint["value"])).collect();
        let word = |text: &str| json!(text);
        for (hint, value) in [
            ("preferredKernels.matmul", "f16"),
            ("preferredKernels.softmax", "f32"),
            ("forceF32Accumulation", "false"),
        ] {
            assert!(
                list.contains(&(&word(hint), &word(value))),
                "{hint}: {hints}"
            );
        }
        told(text(&model), &["--kernel-hints", &given]);
    }
    // Who gives hints wants them followed.
    let bad = sterna(&[
        "inspect",
        text(&model),
        "--kernel-hints",
        r#"{"attentionTier": 5}"#,
    ]);
    let stderr = String::from_utf8(bad.stderr).unwrap();
    assert!(
        stderr.contains("attentionTier: expected a string, found 5"),
        "{stderr}"
    );
    fs::write(&file, "[]").unwrap();
    let args = ["convert", text(&model), "x", "--hints", text(&file)];
    let message = refusal(&args);
    assert!(
        message.contains("the file: expected an object"),
        "{message}"
    );
    let args = [
        "convert",
        text(&model),
        "x.gguf",
        "--to",
        "gguf",
        "--kernel-hint",
        "matmul=f32",
    ];
    let message = refusal(&args);
    assert!(
        message.contains("--kernel-hint: expected a package"),
        "{message}"
    );
}

#[test]
fn a_malformed_hint_is_ignored_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let model = package(dir.path(), LLAMA, &[]);
    edit(&model, |json| {
        json["runtimeOptimizations"] =
            json!({"forceF32Accumulation": "yes", "workgroupOverrides": {"gemv": [0, 1, 1]}});
    });
    let warnings = told(text(&model), &[]);
    let expected = "runtimeOptimizations.forceF32Accumulation: expected true or false, found `yes`";
    assert!(warnings.contains(expected), "{warnings}");
    let shown = stdout(&["inspect", text(&model), "--backend", "cpu"]);
    assert!(
        shown.contains("`yes`: ignored (expected true or false)"),
        "{shown}"
    );
    assert!(shown.contains("workgroupOverrides.gemv"), "{shown}");
    assert_eq!(json(&["verify", text(&model), "--json"])["ok"], true);
}

#[test]
fn versions_of_groups_are_checked_shown_and_compared() {
    let dir = tempfile::tempdir().unwrap();
    let a = package(dir.path(), LLAMA, &[]);
    let b = package(dir.path(), LLAMA, &["--group-version", "layer.0=1.1.0"]);
    let report = json(&["diff", text(&a), text(&b), "--json"]);
    assert_eq!(report["groups"]["changed"], json!(["layer.0"]));
    assert_eq!(report["tensors"]["changed"], json!([]));
    let versions = json!([{"group": "layer.0", "from": "1.0.0", "to": "1.1.0"}]);
    assert_eq!(report["versions"], versions);
    let shown = stdout(&["diff", text(&a), text(&b)]);
    assert!(
        shown.contains("~ groups: layer.0, version 1.0.0 → 1.1.0"),
        "{shown}"
    );
    let c = package(dir.path(), LLAMA, &["--group-version", "3.0.0"]);
    let groups = manifest(&c)["groups"].as_object().unwrap().clone();
    assert!(groups.values().all(|group| group["version"] == "3.0.0"));

    let args = ["convert", "builtin", "x", "--group-version", "embed=abc"];
    let bad = sterna(&args);
    let stderr = String::from_utf8(bad.stderr).unwrap();
    let expected = "expected GROUP=VERSION or VERSION, a semantic version such as 1.2.0, found";
    assert!(
        !bad.status.success() && stderr.contains(expected),
        "{stderr}"
    );
    // Of a package that is there, it is odd and no more.
    edit(&c, |json| json["groups"]["head"]["version"] = json!("abc"));
    let warnings = told(text(&c), &[]);
    let expected = "groups.head.version: expected a semantic version such as 1.2.0, found `abc`";
    assert!(warnings.contains(expected), "{warnings}");
    let remarks = json(&["verify", text(&c), "--json"])["remarks"].to_string();
    assert!(remarks.contains("groups.head.version"), "{remarks}");
}

#[test]
fn a_package_says_which_cache_and_activations_it_is_run_with() {
    let dir = tempfile::tempdir().unwrap();
    let plain = package(dir.path(), LLAMA, &["--quantize", "q8_0"]);
    let flags = [
        "--quantize",
        "q8_0",
        "--kv-cache",
        "f16",
        "--activations",
        "f32",
        "--compute",
        "f32",
    ];
    let model = package(dir.path(), LLAMA, &flags);
    let info = &manifest(&model)["quantizationInfo"];
    assert_eq!(
        [&info["kvCache"], &info["activations"], &info["compute"]],
        ["f16", "f32", "f32"]
    );
    let ids = [1, 5, 9, 20];
    let as_asked = logits(
        text(&plain),
        &ids,
        &["--cache", "f16", "--activations", "f32"],
    );
    assert_eq!(logits(text(&model), &ids, &[]), as_asked);
    let over = ["--cache", "f32", "--activations", "int8"];
    assert_eq!(
        logits(text(&model), &ids, &over),
        logits(text(&plain), &ids, &[])
    );

    let report = json(&["inspect", text(&model), "--json", "--backend", "cpu"]);
    let cache = |report: &Value| report["model"]["memory"]["cache_bytes"].as_u64().unwrap();
    let plain_report = json(&["inspect", text(&plain), "--json", "--backend", "cpu"]);
    assert_eq!(cache(&report) * 2, cache(&plain_report));
    assert_eq!(report["package"]["precisions"]["kv_cache"], "f16");
    let shown = stdout(&["inspect", text(&model), "--backend", "cpu"]);
    assert!(
        shown.contains("cache f16, activations f32, compute f32"),
        "{shown}"
    );

    edit(&model, |json| {
        json["quantizationInfo"]["kvCache"] = json!("q3")
    });
    let warnings = told(text(&model), &[]);
    let expected = "quantizationInfo.kvCache: expected f32, f16 or q8_0, found `q3`; ignored";
    assert!(warnings.contains(expected), "{warnings}");
    let report = json(&["inspect", text(&model), "--json", "--backend", "cpu"]);
    assert_eq!(cache(&report), cache(&plain_report));
}

/// Cuts a package of ours down to the members that version 1 requires.
fn cut(package: &Path) {
    edit(package, |json| {
        let object = json.as_object_mut().unwrap();
        let required = [
            "version",
            "modelId",
            "modelType",
            "quantization",
            "quantizationInfo",
            "hashAlgorithm",
            "architecture",
            "groups",
            "shards",
            "tensorsFile",
            "tensorCount",
            "totalSize",
        ];
        object.retain(|key, _| required.contains(&key.as_str()));
    });
}

#[test]
fn the_required_members_suffice_with_a_configuration_beside_them() {
    let dir = tempfile::tempdir().unwrap();
    let model = package(dir.path(), LLAMA, &[]);
    let ids = [1, 5, 9, 20];
    let expected = logits(text(&model), &ids, &[]);
    cut(&model);
    let message = refusal(&["logits", text(&model), "--ids", "1", "-o", "x"]);
    for missing in [
        "the manifest doesn't say enough to run the model, and there is no config.json beside it",
        "inference.normalization.rmsNormEps: expected a number, found nothing",
        "inference.ffn.activation: expected silu or relu2, and gelu for Gemma, found nothing",
    ] {
        assert!(message.contains(missing), "{message}");
    }
    assert_eq!(message.matches(text(&model)).count(), 1, "{message}");
    // The rest is told by the tensors and the architecture.
    let eps = {
        let config = fs::read(testdata(LLAMA).join("config.json")).unwrap();
        let config: Value = serde_json::from_slice(&config).unwrap();
        config["rms_norm_eps"].clone()
    };
    let bare = manifest(&model);
    edit(&model, |json| {
        json["inference"] =
            json!({"normalization": {"rmsNormEps": eps}, "ffn": {"activation": "silu"}});
    });
    assert_eq!(logits(text(&model), &ids, &[]), expected);
    fs::write(model.join("manifest.json"), bare.to_string()).unwrap();
    fs::copy(
        testdata(LLAMA).join("config.json"),
        model.join("config.json"),
    )
    .unwrap();
    assert_eq!(logits(text(&model), &ids, &[]), expected);
    // So in the store.
    let home = dir.path().join("home");
    let pulled = told_in(&home, &["pull", text(&model), "tiny"]);
    assert!(
        pulled.contains("no hashes for tensors.json, config.json"),
        "{pulled}"
    );
    let out = dir.path().join("y.safetensors");
    told_in(&home, &["logits", "tiny", "--ids", "1", "-o", text(&out)]);
}

#[test]
fn hashes_that_are_blake3_and_labelled_sha256_are_read_with_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    let model = package(dir.path(), LLAMA, &[]);
    let blake3 = |name: &str| {
        let bytes = fs::read(model.join(name)).unwrap();
        json!(digest_of(Algorithm::Blake3, &bytes).to_string())
    };
    edit(&model, |json| {
        json.as_object_mut().unwrap().remove("integrityExtensions");
        for shard in json["shards"].as_array_mut().unwrap() {
            shard["hash"] = blake3(shard["fileName"].as_str().unwrap());
        }
        json.as_object_mut().unwrap().remove("groups");
        for tensor in json["tensors"].as_object_mut().unwrap().values_mut() {
            tensor.as_object_mut().unwrap().remove("group");
        }
        json.as_object_mut().unwrap().remove("tensorsFile");
    });
    let expected = "shard_00000.bin: the manifest calls its hash SHA-256, and it is BLAKE3";
    let warnings = told(text(&model), &[]);
    assert!(warnings.contains(expected), "{warnings}");
    let findings = json(&["verify", text(&model), "--json"]);
    assert_eq!(findings["ok"], true, "{findings}");
    assert!(
        findings["remarks"].to_string().contains(expected),
        "{findings}"
    );
    let home = dir.path().join("home");
    let stderr = told_in(&home, &["pull", text(&model), "tiny"]);
    assert!(
        stderr.contains("calls the hash of shard_00000.bin"),
        "{stderr}"
    );
    // The store remembers it, whatever name the bytes get.
    let stderr = told_in(&home, &["pull", text(&model), "again"]);
    assert!(
        stderr.contains("calls the hash of shard_00000.bin"),
        "{stderr}"
    );
    for name in ["tiny", "again"] {
        let out = dir.path().join("x.safetensors");
        let stderr = told_in(&home, &["logits", name, "--ids", "1", "-o", text(&out)]);
        assert!(stderr.contains(expected), "{stderr}");
        let stderr = told_in(&home, &["verify", name]);
        assert!(stderr.contains(expected), "{stderr}");
    }
    // Other bytes are refused as ever.
    let shard = model.join("shard_00000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[0] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let message = refusal(&["logits", text(&model), "--ids", "1", "-o", "x"]);
    assert!(message.contains("expected sha256"), "{message}");
}

#[test]
fn a_compact_manifest_verifies_and_runs() {
    let dir = tempfile::tempdir().unwrap();
    let model = package(dir.path(), LLAMA, &["--manifest", "compact"]);
    assert!(manifest(&model).get("tensors").is_none());
    assert_eq!(json(&["verify", text(&model), "--json"])["ok"], true);
    told(text(&model), &[]);
}

#[test]
fn a_dense_package_that_says_mixtral_is_odd() {
    let dir = tempfile::tempdir().unwrap();
    let model = package(dir.path(), LLAMA, &[]);
    edit(&model, |json| {
        json["modelType"] = json!("mixtral");
        json["moeConfig"] = json!({"numExperts": 8});
    });
    let warnings = told(text(&model), &[]);
    for expected in [
        "modelType: expected `transformer`, as the configuration has it, found `mixtral`",
        "moeConfig: expected nothing",
    ] {
        assert!(warnings.contains(expected), "{warnings}");
    }
    let shown = stdout(&["inspect", text(&model)]);
    assert!(shown.contains("8, 2 for each token"), "{shown}");
}

#[test]
fn an_embedding_postprocessor_is_no_obstacle() {
    let dir = tempfile::tempdir().unwrap();
    let model = package(dir.path(), "reference-logits/qwen3", &[]);
    let ids = [1, 5, 9, 20];
    let expected = logits(text(&model), &ids, &[]);
    edit(&model, |json| {
        let object = json.as_object_mut().unwrap();
        object.remove("config");
        object.remove("groups");
        object.remove("integrityExtensions");
        json["modelType"] = json!("embedding");
        json["inference"]["output"]["embeddingPostprocessor"] = json!({"pooling": "last"});
        for tensor in json["tensors"].as_object_mut().unwrap().values_mut() {
            tensor.as_object_mut().unwrap().remove("group");
        }
    });
    fs::remove_file(model.join("tensors.json")).unwrap();
    let warnings = told(text(&model), &[]);
    assert!(
        warnings.contains("inference.output.embeddingPostprocessor"),
        "{warnings}"
    );
    assert_eq!(logits(text(&model), &ids, &[]), expected);
}

#[test]
fn adapters_are_described() {
    let dir = tempfile::tempdir().unwrap();
    let peft = testdata("adapters/llama/all");
    let report = json(&["inspect", text(&peft), "--json"]);
    assert_eq!(report["format"], "PEFT adapter");
    assert!(
        report["ranks"][0].is_u64() && report["alphas"][0].is_number(),
        "{report}"
    );
    let shown = stdout(&["inspect", text(&peft)]);
    assert!(shown.contains("q_proj"), "{shown}");

    let package = package(dir.path(), "adapters/llama/all", &[]);
    let report = json(&["inspect", text(&package), "--json"]);
    let lora = &report["package"]["adapter"];
    assert!(lora["rank"].as_u64().unwrap() > 0 && lora["alpha"].as_f64().unwrap() > 0.0);
    assert!(lora["targets"].to_string().contains("q_proj"), "{lora}");
    edit(&package, |json| {
        json["loraConfig"]["targetModules"] = json!(["q_proj", "banana"]);
    });
    let model = testdata(LLAMA);
    let warnings = told(text(&model), &["--lora", text(&package)]);
    assert!(
        warnings.contains("loraConfig.targetModules: expected `"),
        "{warnings}"
    );
    assert!(warnings.contains("`banana`"), "{warnings}");
}
