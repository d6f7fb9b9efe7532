//! Packages of models in any form.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use crate::common::{
    contents, exec, logit_bits, message, names, open, stories, testdata, try_open, warned,
};
use bytes::Bytes;
use serde_json::{Value, json};
use sterna::embedding::Pooling;
use sterna_convert::{
    AdapterPackageOptions, Event, GgufOptions, GroupVersions, ManifestDetail, PackageOptions,
    PackageSink, PackageSummary, Packing, Precisions, Statements, Step, Target, Targets, Warning,
    adapter_to_package, package_bytes, to_gguf, to_package,
};
use sterna_delivery::hash::Algorithm;
use sterna_format::DType;
use sterna_format::rdrr::RuntimeOptimizations;

/// The package `out` of the model at `path`.
fn convert(path: &Path, out: &Path) -> sterna::Result<PackageSummary> {
    to_package(
        &try_open(path)?,
        out,
        &PackageOptions::default(),
        exec(2),
        &|_| {},
    )
}

#[test]
fn every_form_of_ternary_weights_becomes_the_same_bytes() {
    let dir = tempfile::tempdir().unwrap();
    let mut tensors: Vec<BTreeMap<String, Vec<u8>>> = Vec::new();
    for (i, form) in ["tq1_0.gguf", "tq2_0.gguf", "f16.gguf"].iter().enumerate() {
        let model = testdata(&format!("bitllama-3M/bitllama-3M-{form}"));
        let out = dir.path().join(i.to_string());
        convert(&model, &out).unwrap();
        tensors.push(ternary_tensors(&out));
    }
    let hf = dir.path().join("hf");
    convert(&testdata("bitllama-3M/hf-packed"), &hf).unwrap();
    let hf = ternary_tensors(&hf);
    assert!(hf.len() > 10);
    for other in &tensors {
        assert!(other.keys().eq(hf.keys()));
        for (name, bytes) in &hf {
            let (codes, scale) = bytes.split_at(bytes.len() - 32);
            let (other_codes, other_scale) = other[name].split_at(bytes.len() - 32);
            assert!(codes == other_codes, "{name}");
            // Blocks of TQ have their scales in f16.
            let (a, b) = (scale_of(scale), scale_of(other_scale));
            assert!((a / b - 1.0).abs() < 1e-3, "{name}: {a} and {b}");
        }
    }
    assert!(
        tensors[0] == tensors[1],
        "TQ1_0 and TQ2_0 have the same scales"
    );
}

/// The scale after the codes, with nothing after it.
fn scale_of(trailer: &[u8]) -> f32 {
    assert!(trailer[4..].iter().all(|&byte| byte == 0));
    f32::from_le_bytes(trailer[..4].try_into().unwrap())
}

/// The bytes of the I2_S tensors of a package.
fn ternary_tensors(package: &Path) -> BTreeMap<String, Vec<u8>> {
    let map: Value =
        serde_json::from_slice(&fs::read(package.join("tensors.json")).unwrap()).unwrap();
    let mut tensors = BTreeMap::new();
    for (name, tensor) in map.as_object().unwrap() {
        if tensor["dtype"] != "I2_S" {
            continue;
        }
        let number = |key: &str| tensor[key].as_u64().unwrap() as usize;
        let shard = package.join(format!("shard_{:05}.bin", number("shard")));
        let bytes = fs::read(shard).unwrap();
        let range = number("offset")..number("offset") + number("size");
        tensors.insert(name.clone(), bytes[range].to_vec());
    }
    tensors
}

/// A package in memory.
#[derive(Default)]
struct Memory {
    files: BTreeMap<String, Vec<u8>>,
    n_shards: usize,
}

impl PackageSink for Memory {
    fn append(&mut self, index: usize, bytes: Bytes) -> sterna::Result<()> {
        assert_eq!(index, self.n_shards, "shards come one after another");
        let file = self.files.entry(format!("shard_{index:05}.bin"));
        file.or_default().extend_from_slice(&bytes);
        Ok(())
    }

    fn end_shard(&mut self, index: usize, len: u64) -> sterna::Result<()> {
        let shard = &self.files[&format!("shard_{index:05}.bin")];
        assert_eq!(shard.len() as u64, len);
        self.n_shards += 1;
        Ok(())
    }

    fn put(&mut self, name: &str, bytes: Bytes) -> sterna::Result<()> {
        assert!(!self.files.contains_key("manifest.json"), "it comes last");
        self.files.insert(name.to_owned(), bytes.into());
        Ok(())
    }
}

#[test]
fn a_package_in_memory_is_the_one_in_a_folder() {
    let dir = tempfile::tempdir().unwrap();
    for (i, model) in [
        "bitllama-3M/bitllama-3M-tq1_0.gguf",
        "bitllama-3M/bitllama-3M-f16.gguf",
        "bitllama-3M/hf-packed",
        "stories260K/hf",
    ]
    .iter()
    .enumerate()
    {
        let files = open(&testdata(model));
        let mut options = PackageOptions {
            shard_size: 64 << 10,
            ..PackageOptions::default()
        };
        let out = dir.path().join(i.to_string());
        to_package(&files, &out, &options, exec(2), &|_| {}).unwrap();
        // Without files, without threads.
        options.hash_on_threads = false;
        let opened = || Ok(Memory::default());
        let mut packing = Packing::new(&files, &options, exec(1), &|_| {}, opened).unwrap();
        while let Some(want) = packing.wanted() {
            let bytes = files.bytes_of(want).unwrap();
            packing.feed(bytes).unwrap();
        }
        let packed = packing.finish().unwrap();
        let expected = contents(&out);
        assert_eq!(packed.n_shards, packed.sink.n_shards);
        assert!(packed.n_shards > 1, "{model}");
        assert!(packed.sink.files.keys().eq(expected.keys()), "{model}");
        for (name, bytes) in &expected {
            assert!(packed.sink.files[name] == *bytes, "{model}: {name}");
        }
        // What is asked of a browser's quota is enough, and not absurd.
        let size: u64 = expected.values().map(|bytes| bytes.len() as u64).sum();
        let said = package_bytes(&files, &options.plan).unwrap();
        assert!(
            size <= said && said < 4 * size,
            "{model}: {said} for {size}"
        );
    }
}

#[test]
fn a_conversion_interrupted_at_its_first_or_last_step_is_no_obstacle() {
    let dir = tempfile::tempdir().unwrap();
    let model = testdata("stories260K/hf");
    let out = dir.path().join("out");
    // The first journal was being written.
    fs::create_dir(dir.path().join("out.partial")).unwrap();
    fs::write(dir.path().join("out.partial.new"), "{").unwrap();
    convert(&model, &out).unwrap();
    let inside: Vec<_> = contents(&out).into_keys().collect();
    assert!(
        !inside.iter().any(|name| name.starts_with("conversion")),
        "{inside:?}"
    );
    // The package had its name, and the journal was still there.
    fs::write(dir.path().join("out.partial.json"), "{}").unwrap();
    let refused = message(convert(&model, &out));
    assert!(refused.contains("exists already"), "{refused}");
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn threads_change_no_byte() {
    let dir = tempfile::tempdir().unwrap();
    let files = open(&testdata("bitllama-3M/bitllama-3M-f16.gguf"));
    let convert = |name: &str, n_threads| {
        let out = dir.path().join(name);
        let options = PackageOptions {
            shard_size: 16 << 10,
            ..PackageOptions::default()
        };
        to_package(&files, &out, &options, exec(n_threads), &|_| {}).unwrap();
        contents(&out)
    };
    assert!(convert("one", 1) == convert("two", 2));
}

#[test]
fn types_are_chosen_by_part() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let options = PackageOptions {
        targets: Targets {
            weights: Target::To(DType::Q8_0),
            embeddings: Some(Target::To(DType::F16)),
            head: None,
        },
        ..PackageOptions::default()
    };
    let files = open(&stories());
    to_package(&files, &out, &options, exec(2), &|_| {}).unwrap();
    let manifest = fs::read(out.join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    assert_eq!(manifest["quantization"], "Q8_0");
    assert_eq!(manifest["quantizationInfo"]["embeddings"], "f16");
    let refused = message(to_package(&files, &out, &options, exec(1), &|_| {}));
    assert!(refused.contains("exists already"), "{refused}");
    assert!(message("q9".parse::<Target>()).starts_with("expected keep, q4_k_m"));
}

#[test]
fn shards_have_a_size_that_tensors_are_aligned_to() {
    let dir = tempfile::tempdir().unwrap();
    let files = open(&testdata("reference-logits/llama"));
    for shard_size in [0, 1, 4095, 4097] {
        let options = PackageOptions {
            shard_size,
            ..PackageOptions::default()
        };
        let out = dir.path().join("out");
        let made = to_package(&files, &out, &options, exec(1), &|_| {});
        assert_eq!(made.unwrap_err().code(), sterna::ErrorCode::InvalidRequest);
    }
    assert!(names(dir.path()).is_empty());
}

#[test]
fn a_type_for_the_head_of_a_tied_model_is_for_its_table() {
    let dir = tempfile::tempdir().unwrap();
    // Its embedding table is its output head too.
    let files = open(&testdata("stories260K/hf"));
    let (q8, f16) = (Target::To(DType::Q8_0), Target::To(DType::F16));
    for (i, (head, embeddings, table, told)) in [
        (Some(q8), None, "q8_0", Some(false)),
        (Some(q8), Some(f16), "f16", Some(true)),
        (None, Some(f16), "f16", None),
    ]
    .into_iter()
    .enumerate()
    {
        let out = dir.path().join(i.to_string());
        let options = PackageOptions {
            targets: Targets {
                weights: Target::Keep,
                embeddings,
                head,
            },
            ..PackageOptions::default()
        };
        let (made, warnings) = warned(|notify| to_package(&files, &out, &options, exec(2), notify));
        made.unwrap();
        let of_head = warnings.iter().find_map(|warning| match warning {
            Warning::NoHead { is_ignored } => Some(*is_ignored),
            _ => None,
        });
        assert_eq!(of_head, told);
        let manifest = fs::read(out.join("manifest.json")).unwrap();
        let manifest: Value = serde_json::from_slice(&manifest).unwrap();
        assert_eq!(manifest["quantizationInfo"]["embeddings"], table);
    }
}

#[test]
fn wrong_bytes_get_no_right_hashes_and_no_files_are_lost() {
    let dir = tempfile::tempdir().unwrap();
    let (out, again) = (dir.path().join("out"), dir.path().join("again"));
    convert(Path::new("builtin"), &out).unwrap();
    let shard = out.join("shard_00000.bin");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[5000] ^= 1;
    fs::write(&shard, bytes).unwrap();
    let made = convert(&out, &again);
    let error = made.as_ref().unwrap_err();
    assert_eq!(error.code(), sterna::ErrorCode::HashMismatch);
    let refused = message(made);
    assert!(refused.contains("shard_00000.bin"), "{refused}");
    // Folders from elsewhere.
    let partial = dir.path().join("mine.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("notes.txt"), "keep").unwrap();
    let refused = message(convert(Path::new("builtin"), &dir.path().join("mine")));
    assert!(refused.contains("other files"), "{refused}");
    assert_eq!(fs::read(partial.join("notes.txt")).unwrap(), b"keep");
}

#[test]
fn progress_counts_every_byte_that_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let package = dir.path().join("package");
    convert(&testdata("reference-logits/llama"), &package).unwrap();
    let events = std::cell::RefCell::new(Vec::new());
    let (files, out) = (open(&package), dir.path().join("again"));
    let notify = |event| events.borrow_mut().push(event);
    to_package(&files, &out, &PackageOptions::default(), exec(1), &notify).unwrap();
    let mut steps: Vec<(Step, u64, u64)> = Vec::new();
    for event in events.into_inner() {
        match event {
            Event::Started { step, n_bytes } => steps.push((step, n_bytes, 0)),
            Event::Advanced { n_bytes } => steps.last_mut().unwrap().2 += n_bytes,
            other => panic!("{other:?}"),
        }
    }
    let names: Vec<_> = steps.iter().map(|(step, ..)| *step).collect();
    assert_eq!(names, [Step::Verifying, Step::Converting]);
    for (step, expected, found) in steps {
        assert!(
            expected > 0 && expected == found,
            "{step:?}: {found} of {expected}"
        );
    }
}

#[test]
fn adapters_become_packages() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let folder = testdata("adapters/llama/all");
    let name = folder.to_str().unwrap();
    let files = sterna::native::LocalFolder::new(&folder);
    let adapter = sterna::native::open_adapter(name, &files, None).unwrap();
    let options = AdapterPackageOptions {
        algorithm: Algorithm::Blake3,
        ..AdapterPackageOptions::default()
    };
    let summary = adapter_to_package(&adapter, name, &out, &options).unwrap();
    assert_eq!(summary.model_id, "all");
    let files = sterna::native::LocalFolder::new(&out);
    let back = sterna::native::open_adapter("out", &files, None).unwrap();
    assert_eq!(back.source.pairs.len(), adapter.source.pairs.len());
    let refused = message(adapter_to_package(&adapter, name, &out, &options));
    assert!(refused.contains("exists already"), "{refused}");
}

/// The manifest of the package at `path`.
fn manifest(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path.join("manifest.json")).unwrap()).unwrap()
}

#[test]
fn experts_are_groups_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    for (model, kind, mixture, expert) in [
        (
            "reference-mixtures/hf/deepseek-v3",
            "deepseek",
            json!({"numExperts": 8, "numExpertsPerToken": 2, "sharedExperts": 1}),
            "layer.1.expert.7",
        ),
        (
            "reference-mixtures/hf/mixtral",
            "mixtral",
            json!({"numExperts": 4, "numExpertsPerToken": 2}),
            "layer.2.expert.3",
        ),
        (
            "reference-mixtures/hf/gpt-oss-mxfp4",
            "mixtral",
            json!({"numExperts": 4, "numExpertsPerToken": 2}),
            "layer.1.expert.2",
        ),
        (
            "reference-states/hf/qwen3.5-moe",
            "mixtral",
            json!({"numExperts": 8, "numExpertsPerToken": 2, "sharedExperts": 1}),
            "layer.3.expert.7",
        ),
    ] {
        let out = dir.path().join(expert);
        convert(&testdata(model), &out).unwrap();
        let manifest = manifest(&out);
        assert_eq!(manifest["modelType"], kind);
        assert_eq!(manifest["moeConfig"], mixture, "{model}");
        let group = &manifest["groups"][expert];
        assert_eq!(group["type"], "expert");
        let (layer, index) = expert["layer.".len()..].split_once(".expert.").unwrap();
        assert_eq!(group["layerIndex"].to_string(), layer);
        assert_eq!(group["expertIndex"].to_string(), index);
        assert_eq!(group["tensors"].as_array().unwrap().len(), 3);
    }
    let groups = &manifest(&dir.path().join("layer.2.expert.3"))["groups"];
    assert_eq!(groups["layer.0.shared"]["type"], "layer");
}

#[test]
fn state_spaces_are_groups_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    for (model, kind, groups) in [
        (
            "mamba2",
            "mamba",
            &[("embed", "embed"), ("layer.2", "mamba"), ("head", "head")][..],
        ),
        (
            "rwkv6",
            "rwkv",
            &[("embed", "embed"), ("layer.2", "rwkv"), ("head", "head")],
        ),
        (
            "rwkv7",
            "rwkv",
            &[("embed", "embed"), ("layer.2", "rwkv"), ("head", "head")],
        ),
        (
            "jamba",
            "jamba",
            &[
                ("layer.0.mamba", "mamba"),
                ("layer.2.attn", "attn"),
                ("layer.3.expert.1", "expert"),
            ],
        ),
    ] {
        let out = dir.path().join(model);
        convert(&testdata("reference-states/hf").join(model), &out).unwrap();
        let manifest = manifest(&out);
        assert_eq!(manifest["modelType"], kind);
        for (group, kind) in groups {
            assert_eq!(manifest["groups"][group]["type"], *kind, "{group}");
        }
    }
}

/// An encoder, with weights outside of layers that others don't have, and the kind of pooling that its file says.
#[test]
fn embedding_models_stay_embedding_models() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("embeddings/bert.gguf");
    let (package, file) = (dir.path().join("bert"), dir.path().join("bert.gguf"));
    convert(&source, &package).unwrap();
    let manifest = manifest(&package);
    assert_eq!(manifest["modelType"], "transformer");
    assert_eq!(manifest["metadata"]["pooling"], "cls");
    to_gguf(
        &open(&package),
        &file,
        &GgufOptions::default(),
        exec(2),
        &|_| {},
    )
    .unwrap();
    let want = logit_bits(&source);
    for path in [source, package, file] {
        assert_eq!(open(&path).pooling().unwrap(), Some(Pooling::First));
        assert_eq!(logit_bits(&path), want, "{}", path.display());
    }
}

#[test]
fn a_package_keeps_what_its_source_says_besides() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b, c) = (
        dir.path().join("a"),
        dir.path().join("b"),
        dir.path().join("c"),
    );
    let source = testdata("reference-logits/llama");
    let hints = |json: Value| RuntimeOptimizations::parse(json.to_string().as_bytes()).unwrap();
    let with = |statements| PackageOptions {
        statements,
        ..PackageOptions::default()
    };
    let versions =
        |list: &[&str]| GroupVersions::new(list.iter().map(|text| text.parse().unwrap()));
    let statements = Statements {
        hints: hints(json!({"preferredKernels": {"matmul": "f16"}, "attentionTier": "tiled"})),
        versions: versions(&["1.1.0", "embed=2.0.0"]),
        precisions: Precisions {
            kv_cache: Some("f16".to_owned()),
            activations: Some("f32".to_owned()),
            compute: None,
        },
    };
    to_package(&open(&source), &a, &with(statements), exec(1), &|_| {}).unwrap();
    let mut edited = manifest(&a);
    edited["later"] = json!({"x": [1]});
    edited["artifactIdentity"] = json!({"shardSetHash": "00"});
    edited["moeConfig"] = json!({"numExperts": 1, "numExpertsPerToken": 1});
    edited["groups"]["head"]["note"] = json!("kept");
    edited["metadata"]["license"] = json!("MIT");
    edited["quantizationInfo"]["audio"] = json!("f16");
    edited["runtimeOptimizations"]["targetDevice"] = json!(7);
    fs::write(a.join("manifest.json"), edited.to_string()).unwrap();

    let made = to_package(&open(&a), &b, &PackageOptions::default(), exec(1), &|_| {});
    made.unwrap();
    let kept = manifest(&b);
    for (path, value) in [
        ("/later", json!({"x": [1]})),
        ("/moeConfig/numExperts", json!(1)),
        ("/groups/embed/version", json!("2.0.0")),
        ("/groups/layer.0/version", json!("1.1.0")),
        ("/groups/head/note", json!("kept")),
        ("/metadata/license", json!("MIT")),
        ("/quantizationInfo/kvCache", json!("f16")),
        ("/quantizationInfo/activations", json!("f32")),
        ("/quantizationInfo/audio", json!("f16")),
        (
            "/runtimeOptimizations/preferredKernels/matmul",
            json!("f16"),
        ),
        ("/runtimeOptimizations/targetDevice", json!(7)),
    ] {
        assert_eq!(kept.pointer(path), Some(&value), "{path}");
    }
    // What it says of bytes that are others now.
    assert_eq!(kept.get("artifactIdentity"), None);

    let statements = Statements {
        hints: hints(json!({"preferredKernels": {"matmul": "f32"}})),
        versions: versions(&["layer.0=1.2.0"]),
        ..Statements::default()
    };
    to_package(&open(&b), &c, &with(statements), exec(1), &|_| {}).unwrap();
    let over = manifest(&c);
    for (path, value) in [
        ("/groups/embed/version", json!("2.0.0")),
        ("/groups/layer.0/version", json!("1.2.0")),
        (
            "/runtimeOptimizations/preferredKernels/matmul",
            json!("f32"),
        ),
        ("/runtimeOptimizations/attentionTier", json!("tiled")),
    ] {
        assert_eq!(over.pointer(path), Some(&value), "{path}");
    }
    let unknown = with(Statements {
        versions: versions(&["layer.99=1.0.0"]),
        ..Statements::default()
    });
    let out = dir.path().join("d");
    let refused = message(to_package(&open(&source), &out, &unknown, exec(1), &|_| {}));
    assert!(
        refused.contains("expected one of embed, layer.0, ")
            && refused.ends_with("found `layer.99`"),
        "{refused}"
    );
    assert_eq!(names(dir.path()), ["a", "b", "c"]);
}

#[test]
fn a_compact_manifest_leaves_out_what_can_be_read_elsewhere() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("reference-logits/llama");
    let convert = |name: &str, detail| {
        let out = dir.path().join(name);
        let options = PackageOptions {
            detail,
            ..PackageOptions::default()
        };
        to_package(&open(&source), &out, &options, exec(1), &|_| {}).unwrap();
        out
    };
    let full = convert("full", ManifestDetail::Full);
    let compact = convert("compact", ManifestDetail::Compact);
    let (full_json, compact_json) = (manifest(&full), manifest(&compact));
    assert!(full_json["tensors"].is_object() && compact_json.get("tensors").is_none());
    let integrity = compact_json["integrityExtensions"].as_object().unwrap();
    let keys: Vec<&String> = integrity.keys().collect();
    assert_eq!(keys, ["contractVersion", "files"]);
    let len = |package: &Path| fs::metadata(package.join("manifest.json")).unwrap().len();
    assert!(len(&compact) < len(&full) / 2);
    assert_eq!(logit_bits(&compact), logit_bits(&full));
    for name in ["tensors.json", "shard_00000.bin"] {
        assert!(fs::read(compact.join(name)).unwrap() == fs::read(full.join(name)).unwrap());
    }
}

#[test]
fn what_cannot_end_and_what_keeps_its_type_is_said() {
    let dir = tempfile::tempdir().unwrap();
    let told = |model: &Path, weights| {
        let out = dir.path().join("out");
        let options = PackageOptions {
            targets: Targets {
                weights,
                ..Targets::KEEP
            },
            ..PackageOptions::default()
        };
        let convert =
            |notify: &dyn Fn(Event)| to_package(&open(model), &out, &options, exec(1), notify);
        let (made, warnings) = warned(convert);
        made.unwrap();
        fs::remove_dir_all(&out).unwrap();
        warnings.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let has =
        |warnings: &[String], part: &str| warnings.iter().any(|warning| warning.contains(part));
    // A GGUF file without a tokenizer.
    let warnings = told(&testdata("reference-gguf/llama/model.gguf"), Target::Keep);
    assert!(
        has(&warnings, "no token is known that ends a text"),
        "{warnings:?}"
    );
    let warnings = told(&stories(), Target::Keep);
    assert!(!has(&warnings, "no token is known"), "{warnings:?}");
}

#[test]
fn a_window_goes_to_gguf_and_back() {
    let dir = tempfile::tempdir().unwrap();
    let source = testdata("reference-logits/mistral-sliding");
    let (gguf, package) = (dir.path().join("model.gguf"), dir.path().join("package"));
    let options = GgufOptions::default();
    to_gguf(&open(&source), &gguf, &options, exec(1), &|_| {}).unwrap();
    convert(&gguf, &package).unwrap();
    let config = &manifest(&package)["config"];
    assert_eq!(config["model_type"], "mistral");
    assert!(config["sliding_window"].is_u64());
    assert_eq!(logit_bits(&package), logit_bits(&source));
}
