//! Packages of models in any form.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use common::{contents, exec, message, names, open, stories, testdata, try_open, warned};
use serde_json::Value;
use sterna_convert::{
    AdapterPackageOptions, Event, PackageOptions, PackageSummary, Step, Target, Targets, Warning,
    adapter_to_package, to_package,
};
use sterna_delivery::hash::Algorithm;
use sterna_format::DType;

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
