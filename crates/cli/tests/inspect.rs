//! `sterna inspect`, on files of several kinds.

use crate::common::{json, stdout, testdata};
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
        "cache_type": "f32",
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
    // GPUs have f16 unless something else is asked for.
    assert_eq!(memory(&["--backend", "gpu"]), memory(&[]) / 2);
    assert_eq!(
        memory(&["--backend", "gpu", "--gpu-layers", "0"]),
        memory(&[])
    );
    assert_eq!(memory(&["--backend", "gpu", "--cache", "f32"]), memory(&[]));
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
            "tokenizers/llama.cpp-vocab/ggml-vocab-mpt.gguf",
            "`mpt` isn't supported",
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
fn a_broken_configuration_is_described() {
    let dir = tempfile::tempdir().unwrap();
    let weights = dir.path().join("model.safetensors");
    std::fs::copy(testdata("stories260K/hf/model.safetensors"), &weights).unwrap();
    let list = format!("[{}0]", "0,".repeat(2_000_000));
    for (config, reason) in [("{", "config.json: "), (&list, "config.json: ")] {
        std::fs::write(dir.path().join("config.json"), config).unwrap();
        let report = json(&["inspect", dir.path().to_str().unwrap(), "--json"]);
        assert_eq!(report["n_tensors"], 47);
        assert_eq!(report["metadata"]["config.json"], json!(null));
        let found = report["not_runnable"].as_str().unwrap();
        assert!(found.contains(reason), "{found}");
    }
    // As Python writes it, and as `run` accepts it.
    let config = std::fs::read_to_string(testdata("stories260K/hf/config.json")).unwrap();
    let config = config.replacen('{', r#"{"anything": Infinity,"#, 1);
    std::fs::write(dir.path().join("config.json"), config).unwrap();
    let report = json(&["inspect", dir.path().to_str().unwrap(), "--json"]);
    assert_eq!(report["not_runnable"], json!(null));
    assert_eq!(report["metadata"]["config.json"]["hidden_size"], 64);
}

#[test]
fn a_weight_file_stands_for_its_folder() {
    let folder = testdata("stories260K/hf");
    let report = json(&[
        "inspect",
        folder.join("model.safetensors").to_str().unwrap(),
        "--json",
    ]);
    assert_eq!(report["model"]["family"], "llama");
    let sharded = testdata("reference-variants/llama-sharded");
    let whole = json(&["inspect", sharded.to_str().unwrap(), "--json"]);
    let n_files = whole["files"].as_array().unwrap().len();
    assert!(n_files > 1);
    for file in whole["files"].as_array().unwrap() {
        let report = json(&["inspect", file["path"].as_str().unwrap(), "--json"]);
        assert_eq!(report["n_tensors"], whole["n_tensors"]);
        assert_eq!(report["model"], whole["model"]);
    }
}

#[test]
fn terminals_take_no_orders_from_files() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("odd.safetensors");
    let header = r#"{"__metadata__":{"k\u001b[2J":"v\u009b\n"},"t\u001b[31m":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}"#;
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend([0; 4]);
    std::fs::write(&path, bytes).unwrap();
    let path = path.to_str().unwrap();
    let text = stdout(&["inspect", path, "--tensors"]);
    assert!(text.contains("t\\u{1b}[31m"), "{text}");
    assert!(text.contains("k\\u{1b}[2J"), "{text}");
    let raw = stdout(&["inspect", path, "--json"]);
    for c in [text, raw].concat().chars() {
        assert!(c == '\n' || !c.is_control(), "{c:?}");
    }
}

#[test]
fn the_text_is_the_expected_one() {
    let path = testdata("fixtures/ratchet-dummy.gguf");
    let path = path.to_str().unwrap();
    let text = stdout(&["inspect", path, "--tensors"]);
    let lines: Vec<&str> = text
        .lines()
        .filter(|line| !line.starts_with("can't run"))
        .collect();
    let expected = include_str!("golden/inspect-ratchet-dummy.txt").replace("PATH", path);
    assert_eq!(lines, expected.lines().collect::<Vec<_>>());
}

#[test]
fn tensors_are_listed_when_asked_for() {
    let name = "model.layers.7.mlp.down_proj.weight";
    let short = stdout(&["inspect", "builtin"]);
    assert!(!short.contains(name), "{short}");
    let all = stdout(&["inspect", "builtin", "--tensors"]);
    assert!(all.starts_with(short.trim_end()) && all.contains(name));
}

#[test]
fn the_help_has_the_flags_that_are_taken() {
    let help = stdout(&["inspect", "--help"]);
    for (flag, is_taken) in [
        ("--tensors", true),
        ("--ctx", true),
        ("--cache", true),
        ("--backend", true),
        ("--lora", false),
        ("--threads", false),
        ("--weights", false),
        ("--activations", false),
    ] {
        assert_eq!(
            help.contains(&format!("{flag} ")) || help.contains(&format!("{flag}\n")),
            is_taken,
            "{flag}: {help}"
        );
    }
}
