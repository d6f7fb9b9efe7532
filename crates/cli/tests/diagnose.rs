//! `sterna diagnose`, and what runs on a GPU leave behind. Skipped, with a message, where there is none.
#![cfg(feature = "gpu")]

use std::path::Path;
use std::process::{Command, Output};

use crate::common::testdata;
use serde_json::Value;

/// Runs `sterna` with `args` and `home` for everything of its own.
fn sterna_in(home: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    command
        .args(args)
        .env("STERNA_HOME", home)
        .output()
        .unwrap()
}

#[test]
fn gpu_and_cpu_agree() {
    let home = tempfile::tempdir().unwrap();
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let output = sterna_in(
        home.path(),
        &["diagnose", "builtin", "--tokens", "2", "--json"],
    );
    assert!(output.status.success());
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(report["agrees"], true);
    let stages = report["operations"].as_array().unwrap();
    let n_layers = 8;
    assert_eq!(stages.len(), 3 * (3 + 15 * n_layers));
    let attention = stages.iter().find(|s| s["stage"] == "attention").unwrap();
    assert_eq!(
        (&attention["step"], &attention["layer"]),
        (&0.into(), &0.into())
    );
    assert!(attention["relative_error"].as_f64().unwrap() < attention["bound"].as_f64().unwrap());
    assert_eq!(
        report["layers"].as_array().unwrap().len(),
        3 * (n_layers + 1)
    );

    let ids = [
        "diagnose", "builtin", "--ids", "5,6,7", "--tokens", "0", "--cache", "q8_0",
    ];
    let output = sterna_in(home.path(), &ids);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(
        output.status.success() && text.contains("with the CPU, 3 tokens at once"),
        "{text}"
    );
    assert!(
        text.contains("agrees: ") && text.contains("attn_sub_norm"),
        "{text}"
    );

    for (args, expected) in [
        (["--backend", "cpu"], "--backend cpu: expected a GPU"),
        (["--ids", "512"], "expected a token id below 512"),
        (["--ids", ""], "expected at least one token id"),
        (["--head-screen", "q8_0"], "screen"),
    ] {
        let model = testdata("stories260K/hf").display().to_string();
        let output = sterna_in(home.path(), &["diagnose", &model, args[0], args[1]]);
        let message = String::from_utf8(output.stderr).unwrap();
        assert!(
            !output.status.success() && message.contains(expected),
            "{args:?}: {message}"
        );
    }
}

#[test]
fn compiled_kernels_are_kept() {
    let home = tempfile::tempdir().unwrap();
    if !sterna_testing::gpu::is_there() {
        return;
    }
    let folder = home.path().join("pipelines");
    assert!(!folder.exists());
    let run = [
        "run",
        "builtin",
        "--backend",
        "gpu",
        "-p",
        "Hello",
        "--max-tokens",
        "3",
        "--temperature",
        "0",
    ];
    let first = sterna_in(home.path(), &run);
    assert!(first.status.success());
    let report: Value =
        serde_json::from_slice(&sterna_in(home.path(), &["doctor", "--json"]).stdout).unwrap();
    let features = report["gpus"][0]["features"].as_array().unwrap();
    let files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .collect();
    let n_files = usize::from(features.contains(&"pipeline-cache".into()));
    assert_eq!(files.len(), n_files, "{features:?}");
    assert_eq!(report["pipelines"]["n_files"], n_files);
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::metadata(&folder).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o700);
    }
    // What is damaged is written anew, and no one hears of it.
    for file in &files {
        let whole = std::fs::read(file).unwrap();
        std::fs::write(file, &whole[..whole.len() / 2]).unwrap();
    }
    let second = sterna_in(home.path(), &run);
    assert_eq!(
        (second.status.success(), &second.stdout),
        (true, &first.stdout)
    );
    // A folder that can't be had is told of, and no more.
    std::fs::remove_dir_all(&folder).unwrap();
    std::fs::write(&folder, "").unwrap();
    let third = sterna_in(home.path(), &run);
    let message = String::from_utf8(third.stderr).unwrap();
    assert_eq!(
        (third.status.success(), &third.stdout),
        (true, &first.stdout)
    );
    assert!(
        message.contains("compiled GPU kernels are not kept"),
        "{message}"
    );
}
