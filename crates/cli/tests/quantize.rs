//! `sterna quantize` on whole models and adapters: what it makes computes what the source does, and what its
//! flags say.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sterna_format::DType;

#[path = "../../convert/tests/common/engine_files.rs"]
mod engine_files;

use crate::common::{self, logits, stdout, sterna, testdata, testdata_json};
use engine_files::{
    Entry, lora_matrix, manifest, read_safetensors, read_tensors, sections, type_code, u32_at,
    u64_at, write_safetensors,
};

const BITNET: [&str; 11] = [
    "input_layernorm",
    "self_attn.attn_sub_norm",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.ffn_sub_norm",
    "mlp.down_proj",
];
const LLAMA: [&str; 9] = [
    "input_layernorm",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// Names of a checkpoint's tensors in the order of a manifest.
fn ordered(order: &[&str], config: &Value, all: &[String]) -> Vec<String> {
    let mut names = vec!["model.embed_tokens.weight".to_owned()];
    if config["tie_word_embeddings"] != true {
        names.push("lm_head.weight".into());
    }
    names.push("model.norm.weight".into());
    for layer in 0..config["num_hidden_layers"].as_u64().unwrap() {
        for part in order {
            // Older checkpoints have other names for two of the norms.
            let part = match *part {
                "self_attn.attn_sub_norm" if !all.iter().any(|n| n.contains("attn_sub_norm")) => {
                    "self_attn.inner_attn_ln"
                }
                "mlp.ffn_sub_norm" if !all.iter().any(|n| n.contains("ffn_sub_norm")) => {
                    "mlp.ffn_layernorm"
                }
                part => part,
            };
            for kind in ["weight", "bias"] {
                let name = format!("model.layers.{layer}.{part}.{kind}");
                if all.contains(&name) {
                    names.push(name);
                }
            }
        }
    }
    names
}

/// What to do with the matrices of layers.
#[derive(Clone, Copy)]
enum Weights {
    Raw,
    Ternary,
}

struct Quantized {
    dir: tempfile::TempDir,
    names: Vec<String>,
    config: Value,
}

impl Quantized {
    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }
}

/// Quantizes the model in the folder `model` of the test data.
fn quantize(model: &str, arch: u8, order: &[&str], weights: Weights, more: &[&str]) -> Quantized {
    let source = testdata(model);
    let config = testdata_json(&format!("{model}/config.json"));
    let shard = source.join("model.safetensors");
    let (header, _) = read_safetensors(&shard);
    let find = |name: &str| header.tensors().iter().find(|tensor| tensor.name == name);
    let all: Vec<_> = header.tensors().iter().map(|t| t.name.clone()).collect();
    let names = ordered(order, &config, &all);
    let up = |n: u64| n.next_multiple_of(128);
    let (hidden, ffn) = (
        config["hidden_size"].as_u64().unwrap(),
        config["intermediate_size"].as_u64().unwrap(),
    );
    let entries: Vec<_> = names
        .iter()
        .map(|name| {
            let tensor = find(name).unwrap_or_else(|| panic!("{name}"));
            let scale = find(&format!("{name}_scale"));
            let (rows, cols) = match tensor.shape[..] {
                [n] => (n as u32, 1),
                [n, k] => (n as u32, k as u32),
                _ => panic!("{name}"),
            };
            let padded = |dim: u32| match u64::from(dim) {
                d if d == hidden || d == ffn => up(d) as u32,
                _ => dim,
            };
            let action = match (weights, tensor.dtype) {
                _ if cols == 1 || name.contains("embed") || name.contains("lm_head") => 0,
                (Weights::Raw, _) => 0,
                (Weights::Ternary, DType::U8) => 3,
                (Weights::Ternary, _) => 1,
            };
            Entry {
                action,
                dtype: type_code(tensor.dtype),
                rows,
                cols,
                padded: (padded(rows), padded(cols)),
                data: (0, tensor.offset, tensor.len),
                scale: scale.filter(|_| action == 3).map(|s| (0, s.offset, s.len)),
            }
        })
        .collect();
    let dir = tempfile::tempdir().unwrap();
    let mut bytes = manifest(&[shard], &entries);
    bytes.extend(sections(entries.len() as u32));
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("manifest"), bytes).unwrap();
    let heads = config["num_attention_heads"].as_u64().unwrap();
    let head_dim = config["head_dim"].as_u64().unwrap_or(hidden / heads);
    let eps = config["rms_norm_eps"].as_f64().unwrap_or(1e-5);
    let flags = [
        ("--manifest", path("manifest")),
        ("--output", path("qmodel.tensors")),
        ("--arch", arch.to_string()),
        ("--hidden-dim", up(hidden).to_string()),
        ("--intermediate-dim", up(ffn).to_string()),
        ("--hidden-dim-orig", hidden.to_string()),
        ("--intermediate-dim-orig", ffn.to_string()),
        ("--norm-eps", eps.to_string()),
        ("--rope-output", path("rope.cache")),
        ("--rope-theta", "500000.0".to_owned()),
        ("--max-pos", "512".to_owned()),
        ("--head-dim", head_dim.to_string()),
        ("--rope-dim", head_dim.to_string()),
    ];
    let mut args = vec!["quantize"];
    args.extend(flags.iter().flat_map(|(flag, value)| [*flag, value]));
    args.extend(more);
    if config["tie_word_embeddings"] == true {
        args.push("--tie-embeddings");
    }
    stdout(&args);
    Quantized { dir, names, config }
}

/// A checkpoint of the tensors that were made: trits as floats with a separate scale.
fn rebuilt(quantized: &Quantized) -> PathBuf {
    let mut tensors = Vec::new();
    let mut ternary = false;
    let stored = read_tensors(&quantized.path("qmodel.tensors"));
    assert_eq!(stored.len(), quantized.names.len());
    for (tensor, name) in stored.iter().zip(&quantized.names) {
        let shape = match tensor.cols {
            1 => vec![tensor.rows],
            cols => vec![tensor.rows, cols],
        };
        let dtype = match tensor.type_id {
            0 => DType::F32,
            1 => DType::F16,
            30 => DType::BF16,
            _ => {
                let (trits, scale) = tensor.trits();
                let floats = trits.iter().flat_map(|&t| f32::from(t).to_le_bytes());
                tensors.push((name.clone(), DType::F32, shape, floats.collect()));
                let scale = scale.to_le_bytes().to_vec();
                tensors.push((format!("{name}_scale"), DType::F32, vec![1], scale));
                ternary = true;
                continue;
            }
        };
        tensors.push((name.clone(), dtype, shape, tensor.data.clone()));
    }
    let folder = quantized.path("rebuilt");
    fs::create_dir(&folder).unwrap();
    write_safetensors(&folder.join("model.safetensors"), &tensors);
    let mut config = quantized.config.clone();
    if ternary {
        config["quantization_config"] = json!({"quant_method": "bitnet",
            "linear_class": "autobitlinear", "quantization_mode": "offline"});
    }
    fs::write(folder.join("config.json"), config.to_string()).unwrap();
    folder
}

fn same_bits(a: &Path, b: &Path) {
    let ids: Vec<u32> = (1..40).map(|i| i * 7 % 120).collect();
    let rows = |path: &Path| -> Vec<Vec<u32>> {
        let rows = logits(path.to_str().unwrap(), &ids, &[]);
        let bits = |row: Vec<f32>| row.into_iter().map(f32::to_bits).collect();
        rows.into_iter().map(bits).collect()
    };
    assert!(rows(a) == rows(b), "{} and {}", a.display(), b.display());
}

#[test]
fn packed_models_compute_the_same_bits() {
    for (model, arch, order) in [
        ("reference-logits/bitnet-packed", 1, &BITNET[..]),
        ("reference-logits/llama-bitlinear-packed", 2, &LLAMA),
        // Widths that are no whole blocks.
        ("reference-variants/bitnet-packed-odd", 1, &BITNET),
        ("reference-variants/bitnet-packed-silu-untied", 1, &BITNET),
        ("bitllama-3M/hf-packed", 1, &BITNET),
    ] {
        let quantized = quantize(model, arch, order, Weights::Ternary, &[]);
        same_bits(&testdata(model), &rebuilt(&quantized));
    }
}

#[test]
fn masters_are_rounded_as_they_are_at_load() {
    for model in [
        "reference-logits/bitnet-bf16-online",
        "reference-variants/bitnet-1bitllm",
        "reference-variants/bitnet-online",
    ] {
        let quantized = quantize(model, 1, &BITNET, Weights::Ternary, &[]);
        same_bits(&testdata(model), &rebuilt(&quantized));
    }
}

#[test]
fn floats_stay_as_they_are() {
    for (model, arch, order) in [
        ("reference-logits/llama", 2, LLAMA.to_vec()),
        ("reference-variants/llama-bias", 2, LLAMA.to_vec()),
        ("reference-logits/qwen3", 6, {
            let mut order = LLAMA.to_vec();
            order.splice(4..4, ["self_attn.q_norm", "self_attn.k_norm"]);
            order
        }),
    ] {
        let quantized = quantize(model, arch, &order, Weights::Raw, &[]);
        same_bits(&testdata(model), &rebuilt(&quantized));
    }
}

#[test]
fn headers_say_what_the_flags_do() {
    let yarn = [
        "--yarn-factor",
        "4.0",
        "--yarn-orig-max-pos",
        "128",
        "--yarn-beta-fast",
        "16.5",
    ];
    let model = "reference-variants/bitnet-packed-odd";
    let quantized = quantize(model, 1, &BITNET, Weights::Ternary, &yarn);
    let bytes = fs::read(quantized.path("qmodel.tensors")).unwrap();
    let words = [8, 24, 28, 32, 36, 40].map(|at| u32_at(&bytes, at));
    assert_eq!(words, [1, 1, 128, 256, 96, 160]);
    assert_eq!(bytes[48..56], 1e-5_f64.to_le_bytes());
    // The table keeps its shape, and the manifest's padding is on record.
    let embeddings = &read_tensors(&quantized.path("qmodel.tensors"))[0];
    assert_eq!((embeddings.rows, embeddings.cols), (136, 96));
    assert_eq!(embeddings.padded, (136, 128));

    let rope = fs::read(quantized.path("rope.cache")).unwrap();
    assert_eq!(rope[..12], *b"TRRC\x01\0\0\0\0\0\0\0");
    assert_eq!(u32_at(&rope, 12) as usize, rope.len() - 16);
    let rope: Value = serde_json::from_slice(&rope[16..]).unwrap();
    let expected = json!({"rope_theta": 500_000.0, "head_dim": 16, "max_position_embeddings": 512,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 128, "beta_fast": 16.5}});
    assert_eq!(rope, expected);
    let names = fs::read_dir(quantized.dir.path()).unwrap().count();
    assert_eq!(names, 3, "manifest, tensors and rope");
}

/// The order of an adapter's projections.
const TARGETS: [&str; 7] = [
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
];

/// The manifest of an adapter, as an adapter run of the Python SDK writes it.
fn adapter_manifest(shard: &Path, n_layers: usize, with_sections: bool) -> Vec<u8> {
    let (header, _) = read_safetensors(shard);
    let mut bytes = manifest(&[shard.to_owned()], &[]);
    if with_sections {
        bytes.extend([0; 4]);
    }
    bytes.extend((n_layers as u32).to_le_bytes());
    bytes.extend(7_u32.to_le_bytes());
    bytes.extend(2.5_f64.to_le_bytes());
    for layer in 0..n_layers {
        for target in TARGETS {
            let find = |part: &str| {
                let name = format!("base_model.model.model.layers.{layer}.{target}.{part}.weight");
                header.tensors().iter().find(|tensor| tensor.name == name)
            };
            let (Some(a), Some(b)) = (find("lora_A"), find("lora_B")) else {
                bytes.push(0);
                continue;
            };
            bytes.push(1);
            for matrix in [a, b] {
                let [rows, cols] = [0, 1].map(|i| matrix.shape[i] as u32);
                let code = type_code(matrix.dtype);
                bytes.extend(lora_matrix(code, rows, cols, matrix.offset, matrix.len));
            }
        }
    }
    bytes
}

fn adapter_args<'a>(manifest: &'a str, output: &'a str, lora: &'a str) -> Vec<&'a str> {
    let mut args = vec!["quantize", "--manifest", manifest, "--output", output];
    args.extend(["--arch", "2", "--hidden-dim", "128", "--intermediate-dim"]);
    args.extend(["256", "--hidden-dim-orig", "128", "--intermediate-dim-orig"]);
    args.extend(["256", "--norm-eps", "1e-05", "--head-dim", "32"]);
    args.extend(["--lora-output", lora, "--num-heads", "4", "--num-kv-heads"]);
    args.push("2");
    args
}

#[test]
fn adapters_are_copied_as_they_are() {
    for (name, with_sections) in [("all", true), ("stabilised", true), ("stabilised", false)] {
        let shard = testdata(&format!("adapters/llama/{name}/adapter_model.safetensors"));
        let (header, source) = read_safetensors(&shard);
        let dir = tempfile::tempdir().unwrap();
        let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(path("manifest"), adapter_manifest(&shard, 3, with_sections)).unwrap();
        let (input, output, lora) = (path("manifest"), path("unused"), path("qmodel.lora"));
        stdout(&adapter_args(&input, &output, &lora));

        let bytes = fs::read(&lora).unwrap();
        assert_eq!(bytes[..12], *b"TRLA\x01\0\0\0\0\0\0\0");
        assert_eq!([12, 16, 20].map(|at| u32_at(&bytes, at)), [1, 3, 7]);
        assert_eq!(bytes[24..32], 2.5_f64.to_le_bytes());
        let mut n_found = 0;
        for (i, record) in bytes[64..64 + 21 * 64].chunks(64).enumerate() {
            let (layer, target) = (i / 7, TARGETS[i % 7]);
            for (part, at) in [("lora_A", 4), ("lora_B", 36)] {
                let name = format!("base_model.model.model.layers.{layer}.{target}.{part}.weight");
                let tensor = header.tensors().iter().find(|tensor| tensor.name == name);
                assert_eq!(u32_at(record, 0), u32::from(tensor.is_some()));
                let Some(tensor) = tensor else {
                    continue;
                };
                let (offset, size) = (u64_at(record, at + 12), u64_at(record, at + 20));
                assert_eq!(offset % 64, 0);
                let from = tensor.offset as usize;
                assert!(
                    bytes[offset..offset + size] == source[from..from + size],
                    "{name}"
                );
                assert_eq!(u32_at(record, at + 4) as usize, tensor.shape[0]);
                n_found += 1;
            }
        }
        assert_eq!(n_found, header.tensors().len());
        assert!(read_tensors(Path::new(&output)).is_empty());
    }
}

#[test]
fn adapters_must_fit_the_model() {
    let shard = testdata("adapters/llama/all/adapter_model.safetensors");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("manifest"), adapter_manifest(&shard, 3, true)).unwrap();
    let (input, output, lora) = (path("manifest"), path("unused"), path("qmodel.lora"));
    let args = adapter_args(&input, &output, &lora);
    for (flag, value, message) in [
        (
            "--num-kv-heads",
            "4",
            "layer 0, self_attn.k_proj: B: rows: expected 128, found 64",
        ),
        (
            "--hidden-dim-orig",
            "96",
            "layer 0, self_attn.k_proj: A: columns: expected 96, found 128",
        ),
    ] {
        let mut args = args.clone();
        let at = args.iter().position(|arg| *arg == flag).unwrap();
        args[at + 1] = value;
        let refusal = common::refusal(&args);
        assert!(refusal.contains(message), "{refusal}");
    }
    let mut ranked = args.clone();
    ranked.extend(["--lora-rank", "5"]);
    let message = "layer 0, self_attn.k_proj: rank: expected 5, found 4";
    assert!(common::refusal(&ranked).contains(message));
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
}

#[cfg(unix)]
#[test]
fn a_program_called_quantize_needs_no_verb() {
    let shard = testdata("adapters/llama/all/adapter_model.safetensors");
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    fs::write(path("manifest"), adapter_manifest(&shard, 3, true)).unwrap();
    let (input, output, lora) = (path("manifest"), path("unused"), path("qmodel.lora"));
    let program = path("trillim-quantize");
    std::os::unix::fs::symlink(env!("CARGO_BIN_EXE_sterna"), &program).unwrap();
    let run = std::process::Command::new(&program)
        .args(&adapter_args(&input, &output, &lora)[1..])
        .output()
        .unwrap();
    assert!(run.status.success(), "{run:?}");
    assert!(Path::new(&lora).exists());
}

/// Arguments that make nothing of an empty manifest in `dir`.
fn empty_args(dir: &Path, arch: &str) -> Vec<String> {
    fs::write(dir.join("manifest"), manifest(&[], &[])).unwrap();
    let path = |name: &str| dir.join(name).to_str().unwrap().to_owned();
    let args = [
        ["--manifest", &path("manifest")],
        ["--output", &path("out")],
        ["--arch", arch],
        ["--hidden-dim", "128"],
        ["--intermediate-dim", "128"],
        ["--norm-eps", "1e-6"],
    ];
    let words = args.iter().flatten().map(|word| (*word).to_owned());
    ["quantize".to_owned()].into_iter().chain(words).collect()
}

#[test]
fn flags_that_need_others_say_so() {
    let dir = tempfile::tempdir().unwrap();
    let args = empty_args(dir.path(), "llama");
    for more in [
        &["--rope-output", "x"][..],
        &["--yarn-factor", "2"],
        &["--yarn-beta-fast", "2"],
    ] {
        let mut args: Vec<_> = args.iter().map(String::as_str).collect();
        args.extend(more);
        assert_eq!(sterna(&args).status.code(), Some(2), "{more:?}");
    }
    let rope = [
        "--rope-output",
        "x",
        "--rope-theta",
        "1e4",
        "--max-pos",
        "9",
        "--head-dim",
        "4",
    ];
    for (flag, value, message) in [
        ("--yarn-factor", "nan", "expected a number above 0"),
        ("--yarn-factor", "inf", "expected a number above 0"),
        ("--yarn-factor", "0", "expected a number above 0"),
        ("--yarn-orig-max-pos", "0", "0 is not in 1..=2147483647"),
        ("--yarn-beta-slow", "nan", "expected a number above 0"),
        ("--yarn-beta-fast", "inf", "expected a number above 0"),
    ] {
        let yarn = [("--yarn-factor", "2"), ("--yarn-orig-max-pos", "4")];
        let others = yarn.into_iter().filter(|(name, _)| *name != flag);
        let mut args: Vec<_> = args.iter().map(String::as_str).chain(rope).collect();
        args.extend(
            others
                .chain([(flag, value)])
                .flat_map(|(name, value)| [name, value]),
        );
        let output = sterna(&args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(
            stderr.contains(flag) && stderr.contains(message),
            "{stderr}"
        );
    }
    let args = empty_args(dir.path(), "llama3");
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let stderr = String::from_utf8(sterna(&args).stderr).unwrap();
    assert!(
        stderr.contains("expected an architecture as a number"),
        "{stderr}"
    );
}

#[test]
fn rotated_elements_are_some_of_a_head() {
    let dir = tempfile::tempdir().unwrap();
    let args = empty_args(dir.path(), "llama");
    let rope = dir.path().join("rope");
    let rope = ["--rope-output", rope.to_str().unwrap()];
    let more = ["--rope-theta", "1e4", "--max-pos", "9", "--head-dim", "4"];
    for dim in ["0", "3", "6"] {
        let message = format!(
            "--rope-dim: expected an even number from 2 to 4, the elements of a head, found {dim}"
        );
        let mut args: Vec<_> = args.iter().map(String::as_str).collect();
        args.extend(rope.into_iter().chain(more).chain(["--rope-dim", dim]));
        assert!(common::refusal(&args).contains(&message));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}
