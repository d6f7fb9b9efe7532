//! `sterna run --receipt` and `sterna check`: an answer that others can check, on any processor.

use crate::common;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};
use sterna_kernels::Isa;

/// A folder to work in, with settings of its own.
struct Place(tempfile::TempDir);

impl Place {
    fn new() -> Place {
        Place(tempfile::tempdir().unwrap())
    }

    fn sterna_at(&self, isa: Option<&str>, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
        if let Some(isa) = isa {
            command.env("STERNA_ISA", isa);
        }
        let command = command.args(args).env("STERNA_HOME", self.0.path());
        command.current_dir(self.0.path()).output().unwrap()
    }

    fn stdout(&self, args: &[&str]) -> String {
        let output = self.sterna_at(None, args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{args:?}: {stderr}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// What is said about a command that fails.
    fn failure(&self, args: &[&str]) -> String {
        let output = self.sterna_at(None, args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8(output.stderr).unwrap()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn receipt(&self, name: &str) -> Value {
        serde_json::from_slice(&fs::read(self.path(name)).unwrap()).unwrap()
    }

    /// The receipt `from` with the value at `pointer` changed, as `to`.
    fn change(&self, from: &str, to: &str, pointer: &str, value: Value) {
        let mut receipt = self.receipt(from);
        *receipt.pointer_mut(pointer).unwrap() = value;
        fs::write(self.path(to), receipt.to_string()).unwrap();
    }
}

const TALE: [&str; 8] = [
    "run",
    "-p",
    "Tell me a story about a fox named Ruby.",
    "--max-tokens",
    "40",
    "--seed",
    "7",
    "--receipt",
];

fn testdata(path: &str) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
    root.join(path).display().to_string()
}

#[test]
fn an_answer_checks_with_every_instruction_set() {
    let place = Place::new();
    let told = place.stdout(&[&TALE[..], &["a.json"]].concat());
    assert!(!told.is_empty());
    let receipt = place.receipt("a.json");
    assert_eq!(receipt["model"]["name"], "builtin");
    assert_eq!(receipt["machine"]["name"], Isa::detect().name());
    assert_eq!(receipt["answer"].as_array().unwrap().len(), 40);
    assert_eq!(
        place.stdout(&["check", "a.json"]),
        "a.json: 40 tokens of builtin, the same bits; not signed\n"
    );
    for isa in Isa::available() {
        let isa = isa.name();
        let output = place.sterna_at(Some(isa), &["check", "a.json", "--threads", "2", "--json"]);
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["ok"], true, "{isa}: {report}");
        // And is written with the same bits.
        let output = place.sterna_at(Some(isa), &[&TALE[..], &["b.json"]].concat());
        assert!(output.status.success());
        let mut other = place.receipt("b.json");
        other["machine"] = receipt["machine"].clone();
        assert_eq!(other, receipt, "{isa}");
    }
}

#[test]
fn what_was_changed_is_named_with_exit_code_1() {
    let place = Place::new();
    place.stdout(&[&TALE[..], &["a.json"]].concat());
    let receipt = place.receipt("a.json");
    let third = receipt["answer"][3].as_u64().unwrap();
    place.change("a.json", "token.json", "/answer/3", json!(third + 1));
    let expected = format!(
        "token.json: token 3 of the answer: expected {third}, found {}",
        third + 1
    );
    assert!(place.failure(&["check", "token.json"]).contains(&expected));
    let output = place.sterna_at(None, &["check", "token.json", "--json"]);
    assert_eq!(output.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&report["ok"], &report["index"]),
        (&json!(false), &json!(3))
    );
    for (pointer, value) in [
        ("/sampling/seed", json!("8")),
        ("/prompt/0", json!(5)),
        ("/settings/cache", json!("f16")),
    ] {
        place.change("a.json", "asked.json", pointer, value);
        let said = place.failure(&["check", "asked.json"]);
        assert!(said.contains("what was asked"), "{pointer}: {said}");
    }
    let said = place.failure(&["check", "a.json", &testdata("stories260K/hf")]);
    assert!(
        said.contains("the model: expected files with the digest"),
        "{said}"
    );
    place.change("a.json", "head.json", "/settings/head", json!("Q9"));
    let said = place.failure(&["check", "head.json"]);
    assert!(
        said.contains("settings.head: unknown type \"Q9\""),
        "{said}"
    );
    fs::write(place.path("no.json"), "{\"receipt\": 1}").unwrap();
    let said = place.failure(&["check", "no.json"]);
    assert!(
        said.contains("no.json: receipt: missing field `program`"),
        "{said}"
    );
    let said = place.failure(&["check", "none.json"]);
    assert!(said.contains("none.json: cannot read"), "{said}");
}

#[test]
fn settings_of_an_answer_are_those_of_its_check() {
    let place = Place::new();
    let model = testdata("reference-logits/llama");
    let adapter = format!("{}=0.5", testdata("adapters/llama/all"));
    let stories = testdata("stories260K/stories260K-q8_0.gguf");
    let args = [
        "run",
        &stories,
        "--raw",
        "-p",
        "Once upon a time",
        "-n",
        "20",
        "--cache",
        "q8_0",
        "--ctx",
        "64",
        "--activations",
        "f32",
        "--head",
        "f16",
        "--speculate",
        "--repeat-penalty",
        "1.2",
        "--receipt",
        "a.json",
    ];
    place.stdout(&args);
    assert_eq!(
        place.receipt("a.json")["settings"],
        json!({"context": 64, "cache": "q8_0", "activations": "f32", "head": "F16", "i2s_layout": null})
    );
    // The file's name isn't where it is.
    let said = place.failure(&["check", "a.json"]);
    assert!(said.contains("stories260K-q8_0"), "{said}");
    assert!(
        place
            .stdout(&["check", "a.json", &stories])
            .contains("the same bits")
    );

    // An adapter that isn't for the model, and another model.
    let said = place.failure(&["check", "a.json", &stories, "--lora", &adapter]);
    assert!(said.contains("adapter"), "{said}");
    let said = place.failure(&["check", "a.json", &model]);
    assert!(said.contains("the model: expected"), "{said}");
}

#[test]
fn receipts_are_signed_with_the_keys_of_packages() {
    let place = Place::new();
    place.stdout(&["sign", "--generate", "--no-password", "--key", "k"]);
    place.stdout(&[&TALE[..], &["a.json", "--receipt-key", "k"]].concat());
    // By somebody.
    let output = place.sterna_at(None, &["check", "a.json"]);
    assert!(output.status.success());
    let note = String::from_utf8(output.stderr).unwrap();
    assert!(note.contains("which is not trusted"), "{note}");
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("not signed")
    );
    place.stdout(&["trust", "us", "k.pub"]);
    assert_eq!(
        place.stdout(&["check", "a.json"]),
        "a.json: 40 tokens of builtin, the same bits; signed by us\n"
    );
    place.change("a.json", "b.json", "/machine/name", json!("scalar"));
    let said = place.failure(&["check", "b.json"]);
    assert!(said.contains("does not fit"), "{said}");
}

#[test]
fn an_answer_of_which_there_is_no_receipt_is_refused() {
    let place = Place::new();
    fs::write(place.path("prompts"), "one\n").unwrap();
    for args in [
        &["run", "--batch", "prompts", "--receipt", "a.json"][..],
        &["run", "-p", "x", "--regex", "a+", "--receipt", "a.json"],
        &["run", "-p", "x", "--receipt-key", "k"],
    ] {
        let output = place.sterna_at(None, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
    }
    assert!(!place.path("a.json").exists());
}

/// On whatever GPU there is, a software one too.
#[test]
fn an_answer_of_a_gpu_is_within_the_margin() {
    let place = Place::new();
    let file = place.path("a.json").display().to_string();
    let args = |temperature| {
        let args = [
            &TALE[..],
            &[&file, "--backend", "gpu", "--temperature", temperature],
        ];
        args.concat()
    };
    let Some(_) = common::on_gpu(&args("0")) else {
        return;
    };
    let report = place.stdout(&["check", "a.json", "--json"]);
    let report: Value = serde_json::from_str(&report).unwrap();
    assert_eq!(report["ok"], true);
    assert!(report["n_within_margin"].as_u64().unwrap() < 8, "{report}");
    let said = place.failure(&args("0.8"));
    assert!(said.contains("expected temperature 0, found 0.8"), "{said}");
}
