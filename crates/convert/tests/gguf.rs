//! Models into GGUF files.

use std::fs;
use std::path::Path;

use crate::common::{
    exec, logit_bits, message, models, names, open, stories, testdata, try_open, warned,
};
use sterna_convert::{
    GgufOptions, GgufSummary, PackageOptions, Target, Targets, Warning, to_gguf, to_package,
};
use sterna_format::DType;
use sterna_format::gguf::Gguf;

/// The GGUF file `out` of the model at `path`.
fn convert(path: &Path, out: &Path) -> sterna::Result<GgufSummary> {
    to_gguf(
        &try_open(path)?,
        out,
        &GgufOptions::default(),
        exec(2),
        &|_| {},
    )
}

/// The package `out` of the model at `path`.
fn package(path: &Path, out: &Path) {
    to_package(
        &open(path),
        out,
        &PackageOptions::default(),
        exec(2),
        &|_| {},
    )
    .unwrap();
}

/// Name, type and bytes of every tensor, by name.
fn tensors(path: &Path) -> Vec<(String, String, Vec<u8>)> {
    let bytes = fs::read(path).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let tensor = |t: &sterna_format::TensorEntry| {
        let range = t.offset as usize..(t.offset + t.len) as usize;
        (t.name.clone(), t.dtype.to_string(), bytes[range].to_vec())
    };
    let mut tensors: Vec<_> = gguf.tensors().iter().map(tensor).collect();
    tensors.sort();
    tensors
}

#[test]
fn files_give_the_logits_of_their_source_bit_for_bit() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    let (mut n, mut rounded, mut refused) = (0, Vec::new(), Vec::new());
    for model in models().into_iter().chain([stories()]) {
        let made = convert(&model, &file);
        if made.is_err() {
            let name = model.file_name().unwrap().to_string_lossy().into_owned();
            refused.push((name, message(made)));
            continue;
        }
        let (theirs, ours) = (logit_bits(&model), logit_bits(&file));
        // Value heads of a delta net are in another order there, and so are sums over them.
        let is_checkpoint = model.join("config.json").exists();
        let name = model.file_name().unwrap().to_string_lossy();
        let in_order = !(is_checkpoint && name.starts_with("qwen3.5"));
        let is_near = |(a, b): (&u32, &u32)| (f32::from_bits(*a) - f32::from_bits(*b)).abs() < 1e-3;
        if theirs != ours && (in_order || !theirs.iter().zip(&ours).all(is_near)) {
            rounded.push(model);
        }
        fs::remove_file(&file).unwrap();
        n += 1;
    }
    assert!(n > 120 && rounded.is_empty(), "{n}, {rounded:?}");
    // Models whose like nobody published: each tests something that transformers has and GGUF has not.
    let expected = [
        (
            "falcon-h1",
            "multipliers: GGUF can't express factors of a falcon-h1 model",
        ),
        ("rwkv4", "architecture: GGUF can't express a rwkv-4 model"),
        ("rwkv5", "architecture: GGUF can't express a rwkv-5 model"),
        ("gemma2-no-caps-bias", "that a gemma2 model has no bound"),
        ("llama-autobitlinear-norm", "a multiple of 128 trits"),
        ("llama-autobitlinear-online", "a multiple of 128 trits"),
        ("llama-bitlinear-bias", "a multiple of 128 trits"),
        (
            "llama-bitlinear-norm",
            "GGUF can't express that its norm has an epsilon of 0.001",
        ),
        (
            "llama-rope-dynamic-long",
            "rope scaling: GGUF can't express `dynamic`",
        ),
        (
            "llama-rope-dynamic-long-v4",
            "rope scaling: GGUF can't express `dynamic`",
        ),
        (
            "llama-rope-dynamic-short",
            "rope scaling: GGUF can't express `dynamic`",
        ),
        (
            "smollm3-interval-2-window",
            "rotary embedding: GGUF can't express that of layer 1",
        ),
        (
            "smollm3-list-v4",
            "rotary embedding: GGUF can't express that of layer 1",
        ),
    ];
    assert_eq!(refused.len(), expected.len(), "{refused:?}");
    for ((name, error), (of, expected)) in refused.iter().zip(expected) {
        assert!(name == of && error.contains(expected), "{name}: {error}");
    }
}

#[test]
fn what_the_file_says_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    let model = testdata("reference-logits/llama3-rope-scaled");
    let options = GgufOptions {
        name: Some("A Name".to_owned()),
        ..GgufOptions::default()
    };
    let summary = to_gguf(&open(&model), &file, &options, exec(2), &|_| {}).unwrap();
    assert_eq!(summary.architecture, "llama");
    assert_eq!(summary.size, fs::metadata(&file).unwrap().len());
    let bytes = fs::read(&file).unwrap();
    let gguf = Gguf::parse(&bytes, bytes.len() as u64).unwrap();
    let metadata = gguf.metadata();
    let keys: Vec<&str> = metadata.iter().map(|(key, _)| key).collect();
    assert_eq!(
        keys,
        [
            "general.architecture",
            "general.type",
            "general.alignment",
            "general.quantization_version",
            "general.name",
            "llama.vocab_size",
            "llama.context_length",
            "llama.embedding_length",
            "llama.block_count",
            "llama.feed_forward_length",
            "llama.attention.head_count",
            "llama.attention.head_count_kv",
            "llama.attention.key_length",
            "llama.attention.value_length",
            "llama.rope.dimension_count",
            "llama.attention.layer_norm_rms_epsilon",
            "llama.rope.freq_base",
            "tokenizer.ggml.model",
            "general.file_type",
        ]
    );
    assert_eq!(metadata.get_str("general.name").unwrap(), Some("A Name"));
    assert_eq!(gguf.tensors()[0].name, "rope_freqs.weight");
}

#[test]
fn a_package_between_two_files_changes_no_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let (folder, file) = (dir.path().join("package"), dir.path().join("model.gguf"));
    let mut n = 0;
    for model in models()
        .into_iter()
        .filter(|m| !m.join("config.json").exists())
    {
        let direct = dir.path().join("direct.gguf");
        convert(&model, &direct).unwrap();
        package(&model, &folder);
        convert(&folder, &file).unwrap();
        let (direct_tensors, tensors) = (tensors(&direct), tensors(&file));
        let same = direct_tensors == tensors;
        assert!(same, "{}", model.display());
        fs::remove_dir_all(&folder).unwrap();
        for file in [&file, &direct] {
            fs::remove_file(file).unwrap();
        }
        n += 1;
    }
    assert!(n > 40, "{n}");
}

#[test]
fn the_same_bytes_come_of_any_threads_and_after_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let model = testdata("bitllama-3M/bitllama-3M-f16.gguf");
    let (one, two) = (dir.path().join("one.gguf"), dir.path().join("two.gguf"));
    let quantized = |out: &Path, n_threads| {
        let options = GgufOptions {
            targets: Targets {
                weights: Target::To(DType::TQ2_0),
                embeddings: Some(Target::To(DType::Q8_0)),
                head: None,
            },
            ..GgufOptions::default()
        };
        to_gguf(&open(&model), out, &options, exec(n_threads), &|_| {}).unwrap();
    };
    quantized(&one, 1);
    // What a killed conversion left.
    fs::write(dir.path().join("two.gguf.partial"), vec![7; 9_000_000]).unwrap();
    fs::write(dir.path().join("two.gguf.partial.lock"), "").unwrap();
    quantized(&two, 2);
    assert!(fs::read(&one).unwrap() == fs::read(&two).unwrap());
    assert_eq!(names(dir.path()), ["one.gguf", "two.gguf"]);

    let types = |name: &str| {
        let tensors = tensors(&one);
        let found = tensors.iter().find(|t| t.0 == name).unwrap();
        found.1.clone()
    };
    assert_eq!(types("token_embd.weight"), "Q8_0");
    assert_eq!(types("blk.0.attn_norm.weight"), "F32");
    let error = message(convert(&model, &one));
    assert!(error.contains("exists already"), "{error}");
}

#[test]
fn files_that_llama_cpp_refuses_are_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    let told = |model: &str, weights| {
        let options = GgufOptions {
            targets: Targets {
                weights,
                ..Targets::KEEP
            },
            ..GgufOptions::default()
        };
        let model = testdata(model);
        let (made, warnings) =
            warned(|notify| to_gguf(&open(&model), &file, &options, exec(1), notify));
        made.unwrap();
        fs::remove_file(&file).unwrap();
        warnings.into_iter().find_map(|warning| match warning {
            Warning::NotForLlamaCpp { what, .. } => Some(what),
            _ => None,
        })
    };
    let relu2 = told("reference-logits/bitnet-packed", Target::Keep).unwrap();
    assert!(relu2.contains("ReLU²"), "{relu2}");
    let silu = "reference-gguf/bitnet-silu-i2-s/model.gguf";
    let i2_s = told(silu, Target::Keep).unwrap();
    assert!(i2_s.contains("is I2_S"), "{i2_s}");
    assert_eq!(told(silu, Target::To(DType::F32)), None);
    assert_eq!(told("reference-logits/llama", Target::Keep), None);
}
