//! `sterna bench` and `sterna doctor`: numbers are measured, so only their shape can be tested.

use std::process::Command;

use crate::common::{self, json, on_gpu, refusal, stdout};

#[test]
fn kernels_are_timed_on_a_gpu() {
    let small = [
        "bench",
        "-p",
        "8",
        "-n",
        "2",
        "-b",
        "1,2",
        "-r",
        "1",
        "--kernels",
    ];
    let message = refusal(&[&small[..], &["--backend", "cpu"]].concat());
    assert!(
        message.contains("--kernels: expected a model on a GPU"),
        "{message}"
    );
    let Some(out) = on_gpu(&[&small[..], &["--backend", "gpu", "--json"]].concat()) else {
        return;
    };
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let run = &report["runs"][0];
    assert!(run["read_bandwidth_bytes_per_s"].is_null(), "{run}");
    for result in run["results"].as_array().unwrap() {
        assert!(result["peak_share"].is_null() && result["bandwidth_share"].is_null());
        let kernels = result["kernels"]["kernels"].as_array().unwrap();
        let near = |key: &str| {
            let sum: f64 = kernels.iter().map(|k| k[key].as_f64().unwrap()).sum();
            (result["kernels"][key].as_f64().unwrap() - sum).abs()
        };
        assert!(near("us") < 1e-3 && near("dispatches") < 1e-9, "{result}");
        let dispatches = |of: &str| -> f64 {
            let kernels = kernels.iter();
            let named = kernels.filter(|k| k["name"].as_str().unwrap().contains(of));
            named.map(|k| k["dispatches"].as_f64().unwrap()).sum()
        };
        assert!(dispatches("TERNARY") > 0.0);
        // Every step begins with one, which two sequences share.
        let n_steps = if result["test"] == "tg2x2" { 0.5 } else { 1.0 };
        assert_eq!(dispatches("EMBED"), n_steps, "{result}");
    }
}

#[test]
fn what_the_processor_could_do_is_measured_where_it_computes() {
    let small = ["bench", "-p", "8", "-n", "2", "-r", "1", "--json"];
    let split = ["--backend", "gpu", "--gpu-layers", "1"];
    let Some(out) = on_gpu(&[&small[..], &split].concat()) else {
        return;
    };
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let gpu = report["gpu"].as_str().unwrap();
    assert!(gpu.contains("1 of"), "{gpu}");
    let run = &report["runs"][0];
    assert!(run["read_bandwidth_bytes_per_s"].is_number(), "{run}");
    assert!(run["peak_multiply_adds_per_s"].is_number(), "{run}");
}

#[test]
fn bench_reports_every_test_for_every_thread_count() {
    let report = json(&[
        "bench", "-p", "8,16", "-n", "4", "-d", "0,5", "-t", "1,2", "-r", "2", "--json",
    ]);
    for key in ["version", "cpu", "instruction_set"] {
        assert!(report[key].is_string(), "{key}");
    }
    assert_eq!(report["model"]["name"], "builtin");
    let hash = report["model"]["head_fnv1a64"].as_str().unwrap();
    assert_eq!(hash.len(), 16);
    assert!(
        report["peak_memory_bytes"]
            .as_u64()
            .is_none_or(|bytes| bytes > 1_000_000)
    );
    assert!(report["model"]["bytes_per_token"].as_u64().unwrap() > 1_000_000);
    let runs = report["runs"].as_array().unwrap();
    assert_eq!(
        runs.iter()
            .map(|run| run["threads"].as_u64().unwrap())
            .collect::<Vec<_>>(),
        [1, 2]
    );
    for run in runs {
        let reads = run["reads"].as_array().unwrap();
        let rates = reads
            .iter()
            .map(|read| read["bytes_per_s"].as_f64().unwrap());
        let bandwidth = run["read_bandwidth_bytes_per_s"].as_f64().unwrap();
        assert_eq!(rates.fold(0.0, f64::max), bandwidth);
        for read in reads {
            assert!(read["bytes_per_s"].as_f64().unwrap() > 0.0);
            // The built-in model is too small to say anything.
            let pages = read["pages"].as_str().unwrap();
            assert!(["ordinary", "huge"].contains(&pages), "{read}");
            assert!(read["prefetch"].is_boolean() && read["spread"].is_number());
        }
        assert!(run["peak_multiply_adds_per_s"].as_f64().unwrap() > 0.0);
        let results = run["results"].as_array().unwrap();
        let tests: Vec<_> = results
            .iter()
            .map(|result| result["test"].as_str().unwrap())
            .collect();
        assert_eq!(tests, ["pp8", "pp16", "tg4", "tg4@5"]);
        for result in results {
            assert!(result["min"].as_f64() <= result["median"].as_f64());
            assert!(result["median"].as_f64() <= result["max"].as_f64());
            // Not every system tells.
            if let Some(rate) = result["cpu_median"].as_f64() {
                assert!(rate > 0.0 && run["threads"] == 1, "{run}");
            }
        }
        let (prefill, decode) = results.split_at(2);
        for result in prefill {
            assert!(result["peak_share"].as_f64().unwrap() > 0.0);
            assert!(result["bandwidth_share"].is_null());
        }
        for result in decode {
            assert!(result["bandwidth_share"].as_f64().unwrap() > 0.0);
            assert!(result["peak_share"].is_null());
        }
    }
}

#[test]
fn bench_prints_a_table() {
    let text = stdout(&[
        "bench",
        "builtin",
        "-p",
        "4",
        "-n",
        "2",
        "-r",
        "1",
        "--threads",
        "1",
    ]);
    for part in [
        "model ",
        "builtin",
        "pp4",
        "tg2",
        "tokens/s",
        "ordinary pages",
        "of the bandwidth",
        "of the peak",
    ] {
        assert!(text.contains(part), "`{text}` does not say `{part}`");
    }
}

#[test]
fn bench_compares_steps_of_several_sequences_with_steps_of_one() {
    let args = [
        "bench", "-p", "4", "-n", "3", "-d", "0,2", "-b", "1,4,5", "-r", "2", "-t", "1,2",
    ];
    let report = json(&[&args[..], &["--json"]].concat());
    for run in report["runs"].as_array().unwrap() {
        let results = run["results"].as_array().unwrap();
        let tests: Vec<_> = results
            .iter()
            .map(|result| result["test"].as_str().unwrap())
            .collect();
        let expected = [
            "pp4", "tg3", "tg3x4", "tg3x5", "tg3@2", "tg3x4@2", "tg3x5@2",
        ];
        assert_eq!(tests, expected);
        assert!(results[0]["step_ms"].is_null());
        for (result, n) in results[1..].iter().zip([1, 4, 5].into_iter().cycle()) {
            let number = |value: &serde_json::Value| value.as_f64().unwrap();
            let (rate, step_ms) = (number(&result["median"]), number(&result["step_ms"]));
            assert!((rate * step_ms / 1e3 - n as f64).abs() < 1e-6, "{result}");
            assert!(number(&result["bandwidth_share"]) > 0.0);
            let batch = &result["batch"];
            if n == 1 {
                assert!(batch.is_null() && result["peak_share"].is_null());
                continue;
            }
            assert_eq!(batch["n_sequences"], n);
            assert!(number(&batch["alone_step_ms"]) > 0.0);
            assert!(number(&batch["relative"]) > 0.0 && number(&batch["relative_spread"]) >= 0.0);
            assert!(number(&result["peak_share"]) > 0.0);
        }
    }
    let text = stdout(&args);
    for part in ["tg3x4@2", "ms a step", "times that of one sequence"] {
        assert!(text.contains(part), "`{text}` does not say `{part}`");
    }
}

#[test]
fn bench_refuses_batches_out_of_bounds() {
    let output = common::sterna(&["bench", "-b", "1,0"]);
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success());
    assert!(
        message.contains("expected a number of sequences from 1 to 1024"),
        "{message}"
    );
}

#[test]
fn bench_refuses_what_the_context_does_not_hold() {
    let message = refusal(&["bench", "-p", "64", "--ctx", "32"]);
    assert!(message.contains("expected at most 32 tokens"), "{message}");
}

#[test]
fn doctor_says_what_will_be_used() {
    let report = json(&["doctor", "--json"]);
    assert_eq!(report["used"]["backend"], "cpu");
    assert!(report["used"]["threads"].as_u64().unwrap() >= 1);
    assert!(report["memory_bytes"].as_u64().unwrap() > 0);
    let sets = report["instruction_sets"].as_array().unwrap();
    assert_eq!(sets[0], "scalar");
    assert!(sets.contains(&report["used"]["instruction_set"]));
    for gpu in report["gpus"].as_array().unwrap() {
        assert!(gpu["features"].is_array() && gpu["kernels"]["sums"].is_string());
        assert!(gpu["limits"]["binding_bytes"].as_u64().unwrap() >= 1 << 27);
    }
    assert!(report["pipelines"]["folder"].is_string());
    let text = stdout(&["doctor"]);
    assert!(text.contains("will use") && text.contains("GB/s"), "{text}");
}

/// Runs `sterna` with `args`, limited to the instruction set `isa`.
fn with_isa(isa: &str, args: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_sterna"));
    let output = command.args(args).env("STERNA_ISA", isa).output().unwrap();
    let text = if output.status.success() {
        output.stdout
    } else {
        output.stderr
    };
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn the_instruction_set_changes_no_token() {
    let run = [
        "run",
        "-p",
        "Tell me a story.",
        "--seed",
        "4",
        "--temperature",
        "1",
    ];
    let expected = stdout(&run);
    for isa in json(&["doctor", "--json"])["instruction_sets"]
        .as_array()
        .unwrap()
    {
        assert_eq!(
            with_isa(isa.as_str().unwrap(), &run),
            (true, expected.clone()),
            "{isa}"
        );
    }
    let (success, message) = with_isa("mmx", &run);
    assert!(
        !success && message.contains("STERNA_ISA: expected one of scalar"),
        "{message}"
    );
}
