//! Models into GGUF files.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{logit_bytes, models, stdout, sterna, testdata};
use sterna_format::gguf::Gguf;

fn stories() -> PathBuf {
    let mut files = fs::read_dir(testdata("stories260K")).unwrap();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|e| e == "gguf");
    let found = files.find_map(|entry| Some(entry.unwrap().path()).filter(is_gguf));
    found.expect("a GGUF file of it")
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// Runs `convert`; gives what it says if it refuses.
fn convert(args: &[&str]) -> Result<String, String> {
    let output = sterna(&[&["convert"], args].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.success() {
        true => Ok(said),
        false => Err(said),
    }
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
        if let Err(error) = convert(&[text(&model), text(&file), "--to", "gguf"]) {
            let name = model.file_name().unwrap().to_string_lossy().into_owned();
            refused.push((name, error));
            continue;
        }
        if logit_bytes(text(&model), dir.path()) != logit_bytes(text(&file), dir.path()) {
            rounded.push(model);
        }
        fs::remove_file(&file).unwrap();
        n += 1;
    }
    assert!(n > 120 && rounded.is_empty(), "{n}, {rounded:?}");
    // Models whose like nobody published: each tests something that transformers has and GGUF has not.
    let expected = [
        ("gemma2-no-caps-bias", "that a gemma2 model has no bound"),
        ("llama-autobitlinear-norm", "a multiple of 128 trits"),
        ("llama-autobitlinear-online", "a multiple of 128 trits"),
        ("llama-bitlinear-bias", "a multiple of 128 trits"),
        (
            "llama-bitlinear-norm",
            "GGUF can't say that its norm has an epsilon of 0.001",
        ),
        (
            "llama-rope-dynamic-long",
            "rope scaling: GGUF can't say `dynamic`",
        ),
        (
            "llama-rope-dynamic-long-v4",
            "rope scaling: GGUF can't say `dynamic`",
        ),
        (
            "llama-rope-dynamic-short",
            "rope scaling: GGUF can't say `dynamic`",
        ),
        (
            "smollm3-interval-2-window",
            "rotary embedding: GGUF can't say that of layer 1",
        ),
        (
            "smollm3-list-v4",
            "rotary embedding: GGUF can't say that of layer 1",
        ),
    ];
    assert_eq!(refused.len(), expected.len(), "{refused:?}");
    for ((name, error), (of, expected)) in refused.iter().zip(expected) {
        assert!(name == of && error.contains(expected), "{name}: {error}");
    }
}

/// What text becomes.
fn tokens(model: &Path, text_file: &Path) -> String {
    stdout(&["tokenize", text(model), "--file", text(text_file), "--json"])
}

#[test]
fn text_and_templates_go_along() {
    let dir = tempfile::tempdir().unwrap();
    let text_file = testdata("tokenizers/kitoken/utf8_input.txt");
    let small_file = testdata("tokenizers/kitoken/small_input.txt");
    let tales = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    for (i, model) in [
        Path::new("builtin"),
        &tales,
        &testdata("bitllama-3M/hf-packed"),
        &testdata("stories260K/hf"),
        &stories(),
    ]
    .into_iter()
    .enumerate()
    {
        let file = dir.path().join(format!("{i}.gguf"));
        convert(&[text(model), text(&file), "--to", "gguf"]).unwrap();
        let package = dir.path().join(format!("{i}"));
        convert(&[text(model), text(&package)]).unwrap();
        let through = dir.path().join(format!("{i}-through.gguf"));
        convert(&[text(&package), text(&through), "--to", "gguf"]).unwrap();
        for file in [&file, &through] {
            for text_file in [&text_file, &small_file] {
                let same = tokens(model, text_file) == tokens(file, text_file);
                assert!(same, "{} and {}", model.display(), file.display());
            }
            let same = logit_bytes(text(model), dir.path()) == logit_bytes(text(file), dir.path());
            assert!(same, "{} and {}", model.display(), file.display());
        }
        assert!(tensors(&file) == tensors(&through), "{}", model.display());
    }
    let messages = dir.path().join("messages.json");
    fs::write(&messages, r#"[{"role": "user", "content": "Hello!"}]"#).unwrap();
    let rendered = |model: &str| stdout(&["template", model, "--messages", text(&messages)]);
    let written = dir.path().join("0.gguf");
    assert_eq!(rendered("builtin"), rendered(text(&written)));
}

#[test]
fn what_the_file_says_of_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    let model = testdata("reference-logits/llama3-rope-scaled");
    let args = [
        text(&model),
        text(&file),
        "--to",
        "gguf",
        "--id",
        "A Name",
        "--json",
    ];
    let output = sterna(&[&["convert"], &args[..]].concat());
    let summary: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(summary["architecture"], "llama");
    assert_eq!(summary["size"], fs::metadata(&file).unwrap().len());
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
    let adapter = testdata("adapters/llama/all");
    let other = dir.path().join("adapter.gguf");
    let error = convert(&[text(&adapter), text(&other), "--to", "gguf"]).unwrap_err();
    assert!(error.contains("found an adapter"), "{error}");
}

#[test]
fn a_package_between_two_files_changes_no_tensor() {
    let dir = tempfile::tempdir().unwrap();
    let (package, file) = (dir.path().join("package"), dir.path().join("model.gguf"));
    let mut n = 0;
    for model in models()
        .into_iter()
        .filter(|m| !m.join("config.json").exists())
    {
        let direct = dir.path().join("direct.gguf");
        convert(&[text(&model), text(&direct), "--to", "gguf"]).unwrap();
        convert(&[text(&model), text(&package)]).unwrap();
        convert(&[text(&package), text(&file), "--to", "gguf"]).unwrap();
        let (direct_tensors, tensors) = (tensors(&direct), tensors(&file));
        let same = direct_tensors == tensors;
        assert!(same, "{}", model.display());
        fs::remove_dir_all(&package).unwrap();
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
    let quantized = [
        "--to",
        "gguf",
        "--quantize",
        "tq2_0",
        "--embeddings",
        "q8_0",
    ];
    convert(&[&[text(&model), text(&one), "--jobs", "1"], &quantized[..]].concat()).unwrap();
    // What a killed conversion left.
    fs::write(dir.path().join("two.gguf.partial"), vec![7; 9_000_000]).unwrap();
    fs::write(dir.path().join("two.gguf.partial.lock"), "").unwrap();
    convert(&[&[text(&model), text(&two), "--jobs", "2"], &quantized[..]].concat()).unwrap();
    assert!(fs::read(&one).unwrap() == fs::read(&two).unwrap());
    let mut left: Vec<_> = fs::read_dir(dir.path())
        .unwrap()
        .map(|e| e.unwrap().file_name())
        .collect();
    left.sort();
    assert_eq!(left, ["one.gguf", "two.gguf"]);

    let types = |name: &str| {
        let tensors = tensors(&one);
        let found = tensors.iter().find(|t| t.0 == name).unwrap();
        found.1.clone()
    };
    assert_eq!(types("token_embd.weight"), "Q8_0");
    assert_eq!(types("blk.0.attn_norm.weight"), "F32");
    let error = convert(&[text(&model), text(&one), "--to", "gguf"]).unwrap_err();
    assert!(error.contains("exists already"), "{error}");
}
