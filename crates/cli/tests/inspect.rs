//! `sterna inspect`, on files of several kinds.

mod common;

use common::{json, stdout, testdata};
use serde_json::json;

#[test]
fn a_model_is_described() {
    let path = testdata("stories260K/stories260K-q8_0.gguf");
    let report = json(&["inspect", path.to_str().unwrap(), "--json"]);
    assert_eq!(report["format"], "GGUF v3");
    assert_eq!(report["architecture"], "llama");
    assert_eq!(report["n_parameters"], 260_032);
    assert_eq!(report["bytes"], 344_448);
    assert_eq!(
        report["types"]["F16"],
        json!({ "n_tensors": 5, "bytes": 5 * 64 * 172 * 2 })
    );
    let memory = json!({
        "weight_bytes": report["types"].as_object().unwrap().values()
            .map(|of_type| of_type["bytes"].as_u64().unwrap()).sum::<u64>(),
        // Keys and values of 5 layers, 4 heads of 8 f32 each.
        "cache_bytes": 2 * 5 * 4 * 8 * 4 * 512,
        "ctx_len": 512,
    });
    let model = json!({
        "family": "llama", "n_layers": 5, "model_dim": 64, "ffn_dim": 172, "n_heads": 8,
        "n_kv_heads": 4, "head_dim": 8, "n_vocab": 512, "max_ctx": 512, "memory": memory,
    });
    assert_eq!(report["model"], model);
    assert_eq!(report["not_runnable"], json!(null));
    let tokens = &report["metadata"]["tokenizer.ggml.tokens"];
    assert_eq!(tokens["len"], 512);
    assert_eq!(tokens["first"].as_array().unwrap().len(), 6);
    assert_eq!(
        report["metadata"]["llama.attention.layer_norm_rms_epsilon"],
        json!(1e-5)
    );
    let tensors = report["tensors"].as_array().unwrap();
    assert_eq!(tensors.len(), 47);
    assert_eq!(
        (&tensors[0]["name"], &tensors[0]["type"]),
        (&json!("token_embd.weight"), &json!("Q8_0"))
    );
    assert_eq!(tensors[0]["shape"], json!([512, 64]));
}

#[test]
fn the_context_and_cache_asked_for_are_predicted() {
    let memory = |flags: &[&str]| {
        let report = json(&[&["inspect", "builtin", "--json"], flags].concat());
        report["model"]["memory"]["cache_bytes"].as_u64().unwrap()
    };
    assert_eq!(memory(&["--ctx", "256"]), memory(&[]) / 2);
    assert_eq!(memory(&["--cache", "f16"]), memory(&[]) / 2);
}

#[test]
fn packed_weights_count_as_what_they_hold() {
    let report = json(&["inspect", "builtin", "--json"]);
    assert_eq!(report["architecture"], "BitNetForCausalLM");
    assert_eq!(report["n_parameters"], 6_746_368);
    assert_eq!(report["metadata"]["config.json"]["hidden_act"], "relu2");
}

#[test]
fn files_that_cannot_run_are_described_too() {
    for (file, reason, n_tensors) in [
        ("fixtures/ratchet-dummy.gguf", "general.architecture", 10),
        (
            "fixtures/minicpm3-4b-dummy.safetensors",
            "expected config.json",
            15,
        ),
        (
            "fixtures/discollama-lora-mlx-adapters.safetensors",
            "expected config.json",
            8,
        ),
        (
            "tokenizers/llama.cpp-vocab/ggml-vocab-bert-bge.gguf",
            "`bert` isn't supported",
            0,
        ),
    ] {
        let path = testdata(file);
        let report = json(&["inspect", path.to_str().unwrap(), "--json"]);
        assert_eq!(report["model"], json!(null), "{file}");
        let found = report["not_runnable"].as_str().unwrap();
        assert!(
            found.contains(reason),
            "{file}: `{found}` does not say `{reason}`"
        );
        assert_eq!(report["n_tensors"], n_tensors, "{file}");
    }
}

#[test]
fn the_text_is_the_expected_one() {
    let path = testdata("fixtures/ratchet-dummy.gguf");
    let path = path.to_str().unwrap();
    let text = stdout(&["inspect", path]);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("can't run"))
        .collect();
    let expected = include_str!("golden/inspect-ratchet-dummy.txt").replace("PATH", path);
    assert_eq!(lines, expected.lines().collect::<Vec<_>>());
}
