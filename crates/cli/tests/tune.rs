//! `sterna tune`, and what becomes of a package's hints on a GPU. Skipped, with a message, where there is
//! none.
#![cfg(feature = "gpu")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::testdata;
use serde_json::{Value, json};

/// Runs `sterna` with `args` and `home` for everything of its own.
fn sterna_in(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let command = command.args(args).env("STERNA_HOME", home);
    command.output().unwrap()
}

/// The JSON that `sterna` prints with `args`; it must succeed.
fn json_in(home: &Path, args: &[&str]) -> Value {
    let output = sterna_in(home, args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{args:?}: {stderr}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What `doctor` says of GPUs.
fn doctor(home: &Path) -> Value {
    json_in(home, &["doctor", "--json"])["gpus"].take()
}

/// Greedy tokens of `model`, computed on the GPU.
fn tokens(home: &Path, model: &str, more: &[&str]) -> Value {
    let args = [
        &[
            "run",
            model,
            "--backend",
            "gpu",
            "--raw",
            "-p",
            "Once upon a time",
        ][..],
        &["--max-tokens", "8", "--temperature", "0", "--json"],
        more,
    ];
    json_in(home, &args.concat())["ids"].take()
}

#[test]
fn what_was_measured_is_kept_and_used() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let model = testdata("stories260K/hf").display().to_string();
    let before = tokens(home, &model, &[]);
    assert_eq!(doctor(home)[0]["tuning"]["n_products"], 0);

    // Nothing is kept of a dry run.
    let dry = [
        "tune",
        &model,
        "--limit",
        "4",
        "--rounds",
        "3",
        "--dry-run",
        "--json",
    ];
    let report = json_in(home, &dry);
    assert_eq!(report["file"], Value::Null);
    assert!(!home.join("tuning").exists());

    let report = json_in(
        home,
        &["tune", &model, "--limit", "24", "--rounds", "3", "--json"],
    );
    let products = report["products"].as_array().unwrap();
    assert!(!products.is_empty(), "{report}");
    for product in products {
        assert_eq!(product["n_wrong"], 0, "{product}");
        assert!(product["best_us"].as_f64() <= product["rule_us"].as_f64());
    }
    let file = report["file"].as_str().unwrap();
    let kept: Value = serde_json::from_slice(&fs::read(file).unwrap()).unwrap();
    assert_eq!(kept["products"].as_array().unwrap().len(), products.len());
    let tuning = &doctor(home)[0]["tuning"];
    assert_eq!(tuning["n_products"], products.len());
    assert_eq!(
        (&tuning["age_days"], &tuning["unused"]),
        (&0.into(), &Value::Null)
    );
    let text = String::from_utf8(sterna_in(home, &["doctor"]).stdout).unwrap();
    assert!(text.contains("measured today"), "{text}");
    assert_eq!(tokens(home, &model, &[]), before);

    // Of what a file says only what the device can do is done.
    let mut strange = kept.clone();
    for product in strange["products"].as_array_mut().unwrap() {
        product["lanes"] = u32::MAX.into();
        product["workgroup"] = 1.into();
        product["rounds_itself"] = true.into();
    }
    fs::write(file, strange.to_string()).unwrap();
    assert_eq!(tokens(home, &model, &[]), before);
    assert_eq!(tokens(home, &model, &["--gpu-tuning", "off"]), before);

    // What is good for something else is not used, and what is damaged is told of.
    let mut stale = kept.clone();
    stale["kernels"] = "0".into();
    fs::write(file, stale.to_string()).unwrap();
    let unused = doctor(home)[0]["tuning"]["unused"].take();
    assert_eq!(unused, "measured with kernels of another version");
    fs::write(file, &kept.to_string()[1..]).unwrap();
    let run = [
        "run",
        &model,
        "--backend",
        "gpu",
        "-p",
        "x",
        "--max-tokens",
        "1",
    ];
    let output = sterna_in(home, &run);
    let message = stderr(&output);
    assert!(output.status.success(), "{message}");
    assert!(
        message.contains(file) && message.contains("not used"),
        "{message}"
    );

    let removed = json_in(home, &["tune", "--reset", "--json"]);
    assert_eq!(removed["removed"], json!([file]));
    assert_eq!(doctor(home)[0]["tuning"]["n_products"], 0);
    let text = String::from_utf8(sterna_in(home, &["tune", "--reset"]).stdout).unwrap();
    assert!(text.contains("nothing was kept"), "{text}");
}

#[test]
fn tuning_needs_a_gpu() {
    let home = tempfile::tempdir().unwrap();
    for (args, expected) in [
        (["--backend", "cpu"], "--backend cpu: expected a GPU"),
        (["--gpu", "no such thing"], "--gpu no such thing"),
    ] {
        let output = sterna_in(home.path(), &["tune", "builtin", args[0], args[1]]);
        let message = stderr(&output);
        assert!(
            !output.status.success() && message.contains(expected),
            "{message}"
        );
    }
}

#[test]
fn a_packages_hints_reach_the_gpu() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let package = home.join("package").display().to_string();
    let source = testdata("stories260K/hf").display().to_string();
    let output = sterna_in(home, &["convert", &source, &package]);
    assert!(output.status.success(), "{}", stderr(&output));
    let plain = tokens(home, &package, &[]);

    let path = Path::new(&package).join("manifest.json");
    let mut manifest: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    manifest["runtimeOptimizations"] = json!({
        "workgroupOverrides": {"gemv_f16": [64, 1, 1]},
        "disableFeatures": ["subgroups", "magic"],
        "forceF32Accumulation": true,
        "attentionTier": "streaming",
    });
    fs::write(&path, manifest.to_string()).unwrap();
    assert_eq!(tokens(home, &package, &[]), plain);

    let outcomes = |args: &[&str]| -> Vec<[String; 2]> {
        let report = json_in(home, &[&["inspect", &package, "--json"], args].concat());
        let hints = report["package"]["hints"].as_array().unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let pair = |hint: &Value| [text(&hint["value"]), text(&hint["outcome"])];
        hints.iter().map(pair).collect()
    };
    let pairs = |pairs: [[&str; 2]; 5]| pairs.map(|pair| pair.map(str::to_owned));
    let gpu = ["--backend", "gpu"];
    assert_eq!(
        outcomes(&gpu),
        pairs([
            ["[64, 1, 1]", "taken"],
            ["subgroups", "taken"],
            ["magic", "ignored"],
            ["true", "taken"],
            ["streaming", "ignored"],
        ])
    );
    let rules = outcomes(&[&gpu[..], &["--gpu-tuning", "off"]].concat());
    assert_eq!(rules[0], ["[64, 1, 1]", "overruled"]);
    assert_eq!(rules[1], ["subgroups", "taken"]);
    // The CPU computes so small a model unless told otherwise.
    let on_cpu = outcomes(&[]);
    assert_eq!(on_cpu.iter().filter(|pair| pair[1] == "taken").count(), 1);

    // What is measured without subgroups is kept apart, and counts more than a size that is asked for.
    let tune = ["tune", &package, "--limit", "24", "--rounds", "3", "--json"];
    let report = json_in(home, &tune);
    let file = report["file"].as_str().unwrap();
    assert!(!file.contains("subgroups"), "{file}");
    assert_eq!(outcomes(&gpu)[0], ["[64, 1, 1]", "overruled"]);
    assert_eq!(doctor(home)[0]["tuning"]["n_products"], 0);
    assert_eq!(tokens(home, &package, &[]), plain);
    // It is forgotten all the same.
    let removed = json_in(home, &["tune", "--reset", "--json"]);
    assert_eq!(removed["removed"], json!([file]));
}

#[test]
fn what_cannot_be_kept_is_said_before_it_is_measured() {
    let home = tempfile::tempdir().unwrap();
    let home = home.path();
    if !sterna_testing::gpu::is_there() {
        return;
    }
    for folder in ["tuning", "pipelines"] {
        fs::write(home.join(folder), "").unwrap();
    }
    let output = sterna_in(home, &["tune", "builtin", "--limit", "600"]);
    let message = stderr(&output);
    assert_eq!(output.status.code(), Some(1), "{message}");
    assert!(message.contains("cannot make the folder"), "{message}");
    // What can be told is told.
    assert!(json_in(home, &["doctor", "--json"])["pipelines"].is_null());

    fs::remove_file(home.join("tuning")).unwrap();
    let none = ["tune", "builtin", "--gpu-memory", "1MiB"];
    let message = stderr(&sterna_in(home, &none));
    assert!(message.contains("expected layers on the GPU"), "{message}");
}
