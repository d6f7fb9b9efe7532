//! Models into GGUF files by the program; what the files hold is tested in `sterna-convert`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::{logit_bytes, stdout, sterna, testdata, text};
use sterna_format::gguf::Gguf;

fn stories() -> PathBuf {
    let mut files = fs::read_dir(testdata("stories260K")).unwrap();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|e| e == "gguf");
    let found = files.find_map(|entry| Some(entry.unwrap().path()).filter(is_gguf));
    found.expect("a GGUF file of it")
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
fn the_summary_says_what_the_file_is() {
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
    let name = gguf.metadata().get_str("general.name").unwrap();
    assert_eq!(name, Some("A Name"));
    let adapter = testdata("adapters/llama/all");
    let other = dir.path().join("adapter.gguf");
    let error = convert(&[text(&adapter), text(&other), "--to", "gguf"]).unwrap_err();
    assert!(error.contains("found an adapter"), "{error}");
}

#[test]
fn the_name_of_the_output_says_what_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let model = testdata("reference-logits/llama");
    let out = |name: &str| dir.path().join(name);
    for (name, flags, is_file) in [
        ("a.gguf", &[][..], true),
        ("b.GGUF", &[], true),
        ("c", &[], false),
        ("d.gguf", &["--to", "package"], false),
        ("e", &["--to", "gguf"], true),
    ] {
        convert(&[&[text(&model), text(&out(name))], flags].concat()).unwrap();
        assert_eq!(out(name).is_file(), is_file, "{name}");
    }
    assert_eq!(
        fs::read(out("a.gguf")).unwrap(),
        fs::read(out("e")).unwrap()
    );
    // Also where files are looked for.
    let folder = out("folder");
    fs::create_dir(&folder).unwrap();
    fs::rename(out("b.GGUF"), folder.join("b.GGUF")).unwrap();
    stdout(&["inspect", text(&folder)]);
}
