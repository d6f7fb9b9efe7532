//! `sterna bundle`: engine bundles run as the folders they were made from.

mod common;

use std::fs;
use std::path::Path;

use common::{
    best, ids, json, logits, refusal, stdout, sterna, sterna_with_input, success, testdata,
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
        // Nothing is repacked: rows of trits lie as they are computed with.
        if dtype == "I2_S" {
            let kernels = json(&["bench", &out, "-p", "4", "-n", "1", "-r", "1", "--json"]);
            assert!(kernels.is_object(), "{kernels}");
        }
    }
}

/// Every checkpoint of the test data that bundles have a place for: the bits of its source, or a refusal.
#[test]
fn checkpoints_give_the_bits_of_their_source_or_are_refused() {
    let (mut n, mut refused) = (0, Vec::new());
    for set in ["reference-logits", "reference-variants"] {
        let mut folders: Vec<_> = fs::read_dir(testdata(set)).unwrap().collect();
        folders.sort_by_key(|entry| entry.as_ref().unwrap().path());
        for entry in folders {
            let folder = entry.unwrap().path();
            if !folder.join("config.json").exists() {
                continue;
            }
            let model = folder.to_str().unwrap();
            let dir = tempfile::tempdir().unwrap();
            let out = dir.path().join("bundle").to_str().unwrap().to_owned();
            let made = sterna(&["bundle", model, "-o", &out]);
            if made.status.code() == Some(1) {
                let message = String::from_utf8(made.stderr).unwrap();
                refused.push(message.lines().last().unwrap_or_default().to_owned());
                // Not even a lock is left.
                assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0, "{model}");
                continue;
            }
            success(&["bundle", model], made);
            let same = logits(model, &PROMPT, &[]) == logits(&out, &PROMPT, &[]);
            assert!(same, "{model}");
            n += 1;
        }
    }
    println!("{n} the same; refused: {refused:#?}");
    // Of other architectures, with norms of single projections, or with fused matrices.
    let reasons = ["architectures: expected", "have no place for it", "missing"];
    let known = |message: &&String| !reasons.iter().any(|reason| message.contains(reason));
    let odd: Vec<_> = refused.iter().filter(known).collect();
    assert!(n > 20 && odd.is_empty(), "{n}, {odd:#?}");
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
fn one_bit_and_grouped_weights() {
    let model = path("reference-logits/qwen3");
    for (arch, dtype) in [("bonsai", "Q1_0"), ("bonsai_ternary", "PQ2_0")] {
        let (_dir, out) = bundle(&[&model, "--arch", arch]);
        let report = json(&["inspect", &out, "--json"]);
        assert!(report["types"][dtype].is_object(), "{report}");
        let rows = logits(&out, &PROMPT, &[]);
        assert!(rows.iter().flatten().all(|x| x.is_finite()));
        let (_dir, again) = bundle(&[&model, "--arch", arch]);
        let weights = |dir: &str| fs::read(Path::new(dir).join("qmodel.tensors")).unwrap();
        assert_eq!(weights(&out), weights(&again));
    }
}

/// The words of a description that make a Qwen3 one of few bits.
#[test]
fn descriptions() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    fs::create_dir(&model).unwrap();
    for entry in fs::read_dir(testdata("reference-logits/qwen3")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, model.join(path.file_name().unwrap())).unwrap();
    }
    for (i, (readme, architecture)) in [
        ("See also our work on ternary networks.", "qwen3"),
        ("We provide 1-bit variants elsewhere.", "qwen3"),
        ("Bonsai, trained with 1-bit weights", "bonsai"),
        ("Ternary Bonsai", "bonsai_ternary"),
    ]
    .into_iter()
    .enumerate()
    {
        fs::write(model.join("README.md"), readme).unwrap();
        let out = dir.path().join(i.to_string());
        let paths = [&model, &out].map(|path| path.to_str().unwrap());
        let summary = json(&["bundle", paths[0], "-o", paths[1], "--json"]);
        assert_eq!(summary["architecture"], architecture, "{readme}");
    }
}

#[test]
fn manifests_can_be_kept() {
    let model = path("reference-logits/bitnet-packed");
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    for (form, out, manifest) in [("v1", "a", "a.bin"), ("sections", "b", "b.bin")] {
        let (out, manifest) = (file(out), file(manifest));
        let args = ["bundle", &model, "-o", &out, "--manifest", &manifest];
        stdout(&[&args[..], &["--manifest-form", form]].concat());
        // What it lists can be made of it again.
        let again = file(form);
        stdout(&[
            "quantize",
            "--manifest",
            &manifest,
            "--output",
            &again,
            "--arch",
            "bitnet",
            "--hidden-dim",
            "128",
            "--intermediate-dim",
            "256",
            "--norm-eps",
            "1e-5",
            "--head-dim",
            "32",
            "--tie-embeddings",
        ]);
        let first = fs::read(Path::new(&out).join("qmodel.tensors")).unwrap();
        assert!(first == fs::read(&again).unwrap(), "{form}");
    }
    let [a, b] = ["a.bin", "b.bin"].map(|name| fs::read(file(name)).unwrap());
    // The table of one section stands behind the tensors, and nothing else differs.
    assert_eq!(a.len() + 4 + 9, b.len());
    assert_eq!(a[..], b[..a.len()]);
}

#[test]
fn what_an_interrupted_run_left_is_removed() {
    let model = path("reference-logits/llama");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let partial = dir.path().join("out.partial");
    fs::create_dir(&partial).unwrap();
    fs::write(partial.join("qmodel.tensors"), "half").unwrap();
    fs::write(partial.join("mine.txt"), "not to be removed").unwrap();
    let args = ["bundle", &model, "-o", out.to_str().unwrap()];
    assert!(refusal(&args).contains("mine.txt"));
    fs::remove_file(partial.join("mine.txt")).unwrap();
    stdout(&args);
    let left: Vec<_> = fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

#[test]
fn embeddings_of_eight_bits() {
    let model = path("reference-logits/llama");
    let (_dir, out) = bundle(&[&model, "--embeddings-i8"]);
    let report = json(&["inspect", &out, "--json"]);
    assert_eq!(report["types"]["Q8_0"]["n_tensors"], 1);
    let (exact, rounded) = (logits(&model, &PROMPT, &[]), logits(&out, &PROMPT, &[]));
    let pairs = exact.iter().flatten().zip(rounded.iter().flatten());
    let (error, total) = pairs.fold((0.0, 0.0), |(error, total), (a, b)| {
        (error + (a - b) * (a - b), total + a * a)
    });
    assert!(error > 0.0 && error / total < 1e-2, "{}", error / total);
}

#[test]
fn what_cannot_be_bundled() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out").to_str().unwrap().to_owned();
    let refused = |args: &[&str]| refusal(&[&["bundle"], args].concat());
    let gemma = path("reference-logits/gemma3");
    assert!(refused(&[&gemma, "-o", &out]).contains("expected BitNetForCausalLM"));
    let gguf = path("stories260K/stories260K-f32.gguf");
    if Path::new(&gguf).exists() {
        assert!(refused(&[&gguf, "-o", &out]).contains("expected a Hugging Face folder"));
    }
    let llama = path("reference-logits/llama");
    let here = dir.path().to_str().unwrap();
    assert!(refused(&[&llama, "-o", here]).contains("exists already"));
    let other = path("adapters/gemma3/all");
    assert!(refused(&[&llama, &other, "-o", &out]).contains("expected"));
    // Nothing is left of any of them.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
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
