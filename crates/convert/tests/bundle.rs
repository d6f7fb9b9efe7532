//! Engine bundles of Hugging Face folders.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{contents, exec, logits, message, names, open, testdata, try_open, warned};
use sterna_convert::{
    BundleOptions, BundleSummary, ManifestForm, QuantizeSettings, Warning, quantize, to_bundle,
};
use sterna_format::DType;
use sterna_format::bundle::{ArchType, ModelFacts};

/// Ids of a prompt that every model here knows.
const PROMPT: [u32; 6] = [1, 9, 30, 7, 120, 64];

/// The bundle `out` of the model at `path`.
fn bundle(path: &Path, out: &Path, options: &BundleOptions) -> sterna::Result<BundleSummary> {
    to_bundle(&try_open(path)?, out, options, &exec(2), &|_| {})
}

/// A folder, and the name of a bundle in it that isn't there.
fn new_out() -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("bundle");
    (dir, out)
}

/// How many tensors of the model at `path` are of this type.
fn n_of(path: &Path, dtype: DType) -> usize {
    let files = open(path);
    let tensors = files.tensors().iter();
    tensors.filter(|tensor| tensor.dtype == dtype).count()
}

/// Every checkpoint of the test data that bundles have a place for: the bits of its source, or a refusal.
#[test]
fn checkpoints_give_the_bits_of_their_source_or_are_refused() {
    let (mut n, mut refused) = (0, Vec::new());
    for set in ["reference-logits", "reference-variants"] {
        let mut folders: Vec<_> = fs::read_dir(testdata(set)).unwrap().collect();
        folders.sort_by_key(|entry| entry.as_ref().unwrap().path());
        for entry in folders {
            let model = entry.unwrap().path();
            if !model.join("config.json").exists() {
                continue;
            }
            let (dir, out) = new_out();
            let made = bundle(&model, &out, &BundleOptions::default());
            if made.is_err() {
                refused.push(message(made));
                // Not even a lock is left.
                assert!(names(dir.path()).is_empty(), "{}", model.display());
                continue;
            }
            let same = logits(&model, &PROMPT) == logits(&out, &PROMPT);
            assert!(same, "{}", model.display());
            n += 1;
        }
    }
    println!("{n} the same; refused: {refused:#?}");
    // The biases of Qwen2, and a window.
    for model in ["qwen2", "mistral-sliding"] {
        let (_dir, out) = new_out();
        let model = testdata("reference-logits").join(model);
        bundle(&model, &out, &BundleOptions::default()).unwrap();
        assert_eq!(logits(&model, &PROMPT), logits(&out, &PROMPT));
    }
    // Of other architectures, with norms of single projections, or with fused matrices.
    let reasons = ["architectures: expected", "have no place for it", "missing"];
    let known = |message: &&String| !reasons.iter().any(|reason| message.contains(reason));
    let odd: Vec<_> = refused.iter().filter(known).collect();
    assert!(n > 20 && odd.is_empty(), "{n}, {odd:#?}");
}

#[test]
fn one_bit_and_grouped_weights() {
    let model = testdata("reference-logits/qwen3");
    for (arch, dtype) in [
        (ArchType::Bonsai, DType::Q1_0),
        (ArchType::BonsaiTernary, DType::PQ2_0),
    ] {
        let options = BundleOptions {
            arch: Some(arch),
            ..BundleOptions::default()
        };
        let (_dir, out) = new_out();
        bundle(&model, &out, &options).unwrap();
        assert!(n_of(&out, dtype) > 0, "{dtype}");
        assert!(logits(&out, &PROMPT).iter().all(|x| x.is_finite()));
        let (_dir, again) = new_out();
        bundle(&model, &again, &options).unwrap();
        let weights = |dir: &Path| fs::read(dir.join("qmodel.tensors")).unwrap();
        assert_eq!(weights(&out), weights(&again));
    }
}

/// The words of a description that make a Qwen3 one of few bits.
#[test]
fn descriptions() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for (name, bytes) in contents(&testdata("reference-logits/qwen3")) {
        fs::write(model.join(name), bytes).unwrap();
    }
    for (i, (readme, arch)) in [
        ("See also our work on ternary networks.", ArchType::Qwen3),
        ("We provide 1-bit variants elsewhere.", ArchType::Qwen3),
        ("Bonsai, trained with 1-bit weights", ArchType::Bonsai),
        ("Ternary Bonsai", ArchType::BonsaiTernary),
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(model.join("README.md"), readme).unwrap();
        let out = dir.path().join(i.to_string());
        let files = open(&model);
        let options = BundleOptions::default();
        let (summary, warnings) =
            warned(|notify| to_bundle(&files, &out, &options, &exec(2), notify));
        assert_eq!(summary.unwrap().architecture, arch.name(), "{readme}");
        let told: Vec<_> = match arch {
            ArchType::Qwen3 => Vec::new(),
            arch => vec![Warning::Described {
                model: files.name().to_owned(),
                arch,
            }],
        };
        assert_eq!(warnings, told, "{readme}");
    }
}

#[test]
fn manifests_can_be_kept() {
    let model = testdata("reference-logits/bitnet-packed");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    for (form, out, manifest) in [("v1", "a", "a.bin"), ("sections", "b", "b.bin")] {
        let (out, manifest) = (file(out), file(manifest));
        let options = BundleOptions {
            manifest: Some(manifest.clone()),
            form: form.parse().unwrap(),
            ..BundleOptions::default()
        };
        bundle(&model, &out, &options).unwrap();
        // What it lists can be made of it again.
        let again = file(form);
        let settings = QuantizeSettings {
            model: ModelFacts {
                arch: ArchType::BitNet,
                tied_embeddings: true,
                hidden_dim: 128,
                intermediate_dim: 256,
                hidden_dim_orig: 128,
                intermediate_dim_orig: 256,
                norm_eps: 1e-5,
            },
            head_dim: Some(32),
            output: Some(again.clone()),
            rope: None,
            adapter: None,
        };
        quantize(&manifest, &settings, &exec(2), &|_| {}).unwrap();
        let first = fs::read(out.join("qmodel.tensors")).unwrap();
        assert!(first == fs::read(&again).unwrap(), "{form}");
    }
    assert_eq!(
        ManifestForm::NAMES[0].parse().ok(),
        Some(ManifestForm::default())
    );
    let [a, b] = ["a.bin", "b.bin"].map(|name| fs::read(file(name)).unwrap());
    // The table of one section follows the tensors, and nothing else differs.
    assert_eq!(a.len() + 4 + 9, b.len());
    assert_eq!(a[..], b[..a.len()]);
}

#[test]
fn what_an_interrupted_run_left_is_removed() {
    let model = testdata("reference-logits/llama");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let partial = dir.path().join("out.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("qmodel.tensors"), "half").unwrap();
    fs::write(partial.join("mine.txt"), "not to be removed").unwrap();
    let options = BundleOptions::default();
    assert!(message(bundle(&model, &out, &options)).contains("mine.txt"));
    fs::remove_file(partial.join("mine.txt")).unwrap();
    bundle(&model, &out, &options).unwrap();
    assert_eq!(names(dir.path()), ["out"]);
}

#[test]
fn embeddings_of_eight_bits() {
    let model = testdata("reference-logits/llama");
    let (_dir, out) = new_out();
    let options = BundleOptions {
        embeddings_i8: true,
        ..BundleOptions::default()
    };
    bundle(&model, &out, &options).unwrap();
    assert_eq!(n_of(&out, DType::Q8_0), 1);
    let (exact, rounded) = (logits(&model, &PROMPT), logits(&out, &PROMPT));
    let pairs = exact.iter().zip(&rounded);
    let (error, total) = pairs.fold((0.0, 0.0), |(error, total), (a, b)| {
        (error + (a - b) * (a - b), total + a * a)
    });
    assert!(error > 0.0 && error / total < 1e-2, "{}", error / total);
}

#[test]
fn what_cannot_be_bundled() {
    let (dir, out) = new_out();
    let options = BundleOptions::default();
    let refused = |model: &Path, out: &Path| message(bundle(model, out, &options));
    let gemma = testdata("reference-logits/gemma3");
    assert!(refused(&gemma, &out).contains("expected BitNetForCausalLM"));
    let gguf = testdata("stories260K/stories260K-f32.gguf");
    if gguf.exists() {
        assert!(refused(&gguf, &out).contains("expected a Hugging Face folder"));
    }
    let llama = testdata("reference-logits/llama");
    assert!(refused(&llama, dir.path()).contains("exists already"));
    let other = BundleOptions {
        adapter: Some(testdata("adapters/gemma3/all")),
        ..BundleOptions::default()
    };
    assert!(message(bundle(&llama, &out, &other)).contains("expected"));
    // Nothing is left of any of them.
    assert!(names(dir.path()).is_empty());
}
