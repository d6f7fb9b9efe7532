//! Models into GGUF files.

mod common;

use std::fs;
use std::path::{Path, PathBuf};

use common::{stdout, sterna, testdata};
use sterna_format::gguf::Gguf;

/// The models of the test data: files and folders.
fn models() -> Vec<PathBuf> {
    let mut models = Vec::new();
    for set in ["reference-gguf", "reference-logits", "reference-variants"] {
        for dir in fs::read_dir(testdata(set)).unwrap() {
            let dir = dir.unwrap().path();
            if dir.is_dir() {
                models.push(dir);
            }
        }
    }
    for file in ["f16.gguf", "tq1_0.gguf", "tq2_0.gguf"] {
        models.push(testdata(&format!("bitllama-3M/bitllama-3M-{file}")));
    }
    models.push(testdata("bitllama-3M/hf-packed"));
    models.push(stories());
    models.retain(|model| model.exists());
    models.sort();
    models
}

fn stories() -> PathBuf {
    let mut files = fs::read_dir(testdata("stories260K")).unwrap();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|e| e == "gguf");
    let found = files.find_map(|entry| Some(entry.unwrap().path()).filter(is_gguf));
    found.expect("a GGUF file of it")
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// The bytes of a model's logits for a few ids.
fn logits(model: &str, dir: &Path) -> Vec<u8> {
    let out = dir.join("logits.safetensors");
    let ids = "5,42,79,116,3,40,77,114";
    stdout(&[
        "logits",
        model,
        "--ids",
        ids,
        "-o",
        text(&out),
        "--threads",
        "1",
    ]);
    fs::read(out).unwrap()
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
    for model in models() {
        if let Err(error) = convert(&[text(&model), text(&file), "--to", "gguf"]) {
            let name = model.file_name().unwrap().to_string_lossy().into_owned();
            refused.push((name, error));
            continue;
        }
        if logits(text(&model), dir.path()) != logits(text(&file), dir.path()) {
            rounded.push(model);
        }
        fs::remove_file(&file).unwrap();
        n += 1;
    }
    println!("{n} models, refused {refused:#?}, rounded {rounded:#?}");
    assert!(n > 100 && rounded.is_empty() && refused.is_empty());
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
