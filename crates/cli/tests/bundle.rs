//! `sterna bundle`: engine bundles run as the folders they were made from.

use std::fs;
use std::path::Path;

use crate::common::{
    best, ids, json, logits, refusal, stdout, sterna_with_input, success, testdata,
};

/// Models that bundles can hold, by what their weights become.
fn models() -> Vec<(String, &'static str)> {
    let reference = |name: &str| path(&format!("reference-logits/{name}"));
    let tales = Path::new(env!("CARGO_MANIFEST_DIR")).join("../sterna/models/tiny-tales");
    vec![
        (reference("bitnet-packed"), "I2_S"),
        (reference("llama-bitlinear-packed"), "I2_S"),
        (reference("llama"), "BF16"),
        (reference("qwen3"), "BF16"),
        (tales.to_str().unwrap().to_owned(), "I2_S"),
    ]
}

fn path(name: &str) -> String {
    testdata(name).to_str().unwrap().to_owned()
}

/// The bundle that `sterna bundle` makes of `args`, in a folder of its own.
fn bundle(args: &[&str]) -> (tempfile::TempDir, String) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("bundle").to_str().unwrap().to_owned();
    stdout(&[&["bundle"], args, &["-o", &out]].concat());
    (dir, out)
}

/// Ids of a prompt that every model here knows.
const PROMPT: [u32; 6] = [1, 9, 30, 7, 120, 64];

#[test]
fn bundles_give_the_logits_of_their_source() {
    for (model, dtype) in models() {
        let (_dir, out) = bundle(&[&model]);
        assert!(
            logits(&model, &PROMPT, &[]) == logits(&out, &PROMPT, &[]),
            "{model}"
        );
        let report = json(&["inspect", &out, "--json"]);
        assert!(report["types"][dtype].is_object(), "{model}: {report}");
        // Nothing is repacked: rows of trits are stored as they are computed with.
        if dtype == "I2_S" {
            let kernels = json(&["bench", &out, "-p", "4", "-n", "1", "-r", "1", "--json"]);
            assert!(kernels.is_object(), "{kernels}");
        }
    }
}

/// The ids that a worker gives to [`PROMPT`], greedily, in version 1 of the protocol.
fn worker(model: &str, n: usize) -> Vec<u32> {
    let args = stdout(&["worker", "--print-config", model]);
    let mut all = vec!["worker", model, "--config"];
    all.extend(args.split_whitespace());
    let mut input = format!("{}\n1\n0\n0\n1\n1\n0\n{n}\n", PROMPT.len());
    for id in PROMPT {
        input += &format!("{id}\n");
    }
    let output = success(&all, sterna_with_input(&all, &(input + "0\n")));
    let mut ids: Vec<u32> = output.lines().map(|line| line.parse().unwrap()).collect();
    // What is left in the cache.
    ids.pop().unwrap();
    ids
}

/// The same, one after another through `sterna logits`.
fn greedy(model: &str, n: usize) -> Vec<u32> {
    let mut all = PROMPT.to_vec();
    for _ in 0..n {
        let logits = logits(model, &all, &["--last"]);
        all.push(best(&logits[0]));
    }
    all.split_off(PROMPT.len())
}

#[test]
fn workers_say_what_the_source_would() {
    for (model, _) in models() {
        let (_dir, out) = bundle(&[&model]);
        let said = worker(&out, 8);
        // A model may end before that.
        assert_eq!(said, greedy(&model, 8)[..said.len()], "{model}");
        assert!(!said.is_empty());
        // Its arguments and its own two files are all that an engine needs.
        for name in ["config.json", "trillim_config.json"] {
            let args = stdout(&["worker", "--print-config", &out]);
            fs::rename(Path::new(&out).join(name), Path::new(&out).join("away")).unwrap();
            let mut all = vec!["worker", &out, "--config"];
            all.extend(args.split_whitespace());
            let mut input = format!("{}\n1\n0\n0\n1\n1\n0\n8\n", PROMPT.len());
            input.extend(PROMPT.map(|id| format!("{id}\n")));
            let output = success(&all, sterna_with_input(&all, &(input + "0\n")));
            let lines: Vec<u32> = output.lines().map(|line| line.parse().unwrap()).collect();
            assert_eq!(lines[..lines.len() - 1], said, "{model} without {name}");
            fs::rename(Path::new(&out).join("away"), Path::new(&out).join(name)).unwrap();
        }
    }
}

#[test]
fn text_comes_along() {
    let (model, _) = models().pop().unwrap();
    let (_dir, out) = bundle(&[&model]);
    let run = |model: &str| {
        let args = ["run", model, "-p", "Tell me a story.", "--seed", "1"];
        stdout(&[&args[..], &["--max-tokens", "40"]].concat())
    };
    assert_eq!(run(&model), run(&out));
    let tokens = json(&["tokenize", &out, "--text", "a story", "--json"]);
    assert!(!ids(&tokens["ids"]).is_empty());
}

#[test]
fn adapters_become_bundles_too() {
    let model = path("reference-logits/llama");
    let adapter = path("adapters/llama/all");
    let want = logits(&model, &PROMPT, &["--lora", &adapter]);
    let (_model_dir, base) = bundle(&[&model]);
    let (_dir, out) = bundle(&[&model, &adapter]);
    assert!(want == logits(&model, &PROMPT, &["--lora", &out]));
    assert!(want == logits(&base, &PROMPT, &["--lora", &out]));
    let (_dir, both) = bundle(&[&model, &adapter, "--together"]);
    assert!(want == logits(&both, &PROMPT, &["--lora", &both]));
    assert!(want != logits(&both, &PROMPT, &[]));

    // An adapter of another base says so.
    let message = refusal(&[
        "logits",
        &path("reference-logits/qwen3"),
        "--ids",
        "1",
        "-o",
        "/dev/null",
        "--lora",
        &out,
    ]);
    assert!(
        message.contains("not an adapter of this model"),
        "{message}"
    );
    // And is no model.
    let message = refusal(&["run", &out, "-p", "x"]);
    assert!(message.contains("--lora"), "{message}");
}

#[test]
fn damaged_bundles() {
    let (_dir, out) = bundle(&[&path("reference-logits/bitnet-packed")]);
    let file = Path::new(&out).join("qmodel.tensors");
    let whole = fs::read(&file).unwrap();
    let say = |bytes: &[u8]| {
        fs::write(&file, bytes).unwrap();
        refusal(&["logits", &out, "--ids", "1", "-o", "/dev/null"])
    };
    let mut magic = whole.clone();
    magic[0] = b'X';
    assert!(say(&magic).contains("TRLM"), "{}", say(&magic));
    let mut version = whole.clone();
    version[4] = 2;
    assert!(say(&version).contains("version"), "{}", say(&version));
    assert!(say(&whole[..whole.len() / 2]).contains("qmodel.tensors"));
    fs::write(&file, &whole).unwrap();
    let rope = Path::new(&out).join("rope.cache");
    let mut other = fs::read(&rope).unwrap();
    let theta = b"\"rope_theta\":";
    let at = other
        .windows(theta.len())
        .position(|part| part == theta)
        .unwrap()
        + theta.len();
    assert_ne!(other[at], b'7');
    other[at] = b'7';
    fs::write(&rope, other).unwrap();
    let message = refusal(&["logits", &out, "--ids", "1", "-o", "/dev/null"]);
    assert!(message.contains("rope_theta: expected 7"), "{message}");
    fs::write(&rope, b"TRRX").unwrap();
    assert!(refusal(&["run", &out, "-p", "x"]).contains("rope.cache"));
    fs::remove_file(&rope).unwrap();
    assert!(refusal(&["run", &out, "-p", "x"]).contains("expected rope.cache"));
}

#[test]
fn flags_say_what_is_made() {
    let model = path("reference-logits/qwen3");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let (out, manifest) = (file("out"), file("manifest.bin"));
    let summary = json(&[
        "bundle",
        &model,
        "-o",
        &out,
        "--arch",
        "bonsai",
        "--manifest",
        &manifest,
        "--manifest-form",
        "v1",
        "--json",
    ]);
    assert_eq!(summary["architecture"], "bonsai");
    assert!(Path::new(&manifest).exists());
    let report = json(&["inspect", &out, "--json"]);
    assert!(report["types"]["Q1_0"].is_object(), "{report}");
    let message = refusal(&["bundle", &model, "-o", &out]);
    assert!(message.contains("exists already"), "{message}");
}
