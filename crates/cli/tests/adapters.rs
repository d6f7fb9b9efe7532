//! `--lora`: adapters as PEFT saves them, applied by every verb that runs a model.

use std::fs;
use std::path::Path;

use crate::common::{self, logits, refusal, stdout, testdata};
use serde_json::json;
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_format::rdrr::lora::parse_name;
use sterna_format::safetensors::SafeTensors;

fn path(name: &str) -> String {
    testdata(name).to_str().unwrap().to_owned()
}

fn llama() -> String {
    path("reference-logits/llama")
}

/// The ids and the logits called `name` that `testdata/adapters/llama` gives.
fn reference(name: &str) -> (Vec<u32>, Vec<f32>) {
    let bytes = fs::read(testdata("adapters/llama/reference.safetensors")).unwrap();
    let file = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    let words = |name: &str| {
        let tensor = file.tensors().iter().find(|t| t.name == name).unwrap();
        let start = tensor.offset as usize;
        let (words, _) = bytes[start..start + tensor.len as usize].as_chunks::<4>();
        words.to_vec()
    };
    let ids = words("input_ids").into_iter().map(u32::from_le_bytes);
    let logits = words(name).into_iter().map(f32::from_le_bytes);
    (ids.collect(), logits.collect())
}

#[test]
fn logits_are_those_of_the_merged_model() {
    let (all, stabilised) = (
        path("adapters/llama/all"),
        path("adapters/llama/stabilised"),
    );
    let (half, minus) = (format!("{all}=0.5"), format!("{stabilised}=-1.5"));
    let plain = logits(&llama(), &reference("logits.all").0, &[]);
    for (name, flags) in [
        ("logits.all", vec!["--lora", &all]),
        ("logits.together", vec!["--lora", &half, "--lora", &minus]),
    ] {
        let (ids, want) = reference(name);
        let got = logits(&llama(), &ids, &flags).concat();
        let difference = |other: &[f32]| {
            let pairs = got.iter().zip(other);
            pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
        };
        assert!(difference(&want) < 5e-3, "{name}: {}", difference(&want));
        assert!(difference(&plain.concat()) > 0.5, "{name}");
    }
    let none = format!("{all}=0");
    assert_eq!(
        plain,
        logits(&llama(), &reference("logits.all").0, &["--lora", &none])
    );
}

#[test]
fn bench_takes_adapters() {
    let all = path("adapters/llama/all");
    let args = [
        "bench",
        &llama(),
        "-p",
        "8",
        "-n",
        "2",
        "-r",
        "1",
        "--json",
        "--lora",
        &all,
    ];
    assert!(common::json(&args)["runs"].is_array());
    let llama = llama();
    let refused = refusal(&["inspect", &llama, "--lora", &all]);
    assert!(
        refused.contains("--lora: expected a verb that runs the model"),
        "{refused}"
    );
}

/// A copy of the adapter, its configuration changed.
fn changed(dir: &Path, from: &str, to: &str) -> String {
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        fs::copy(testdata("adapters/llama/all").join(name), dir.join(name)).unwrap();
    }
    let config = dir.join("adapter_config.json");
    let text = fs::read_to_string(&config).unwrap();
    assert!(text.contains(from), "{from}");
    fs::write(config, text.replacen(from, to, 1)).unwrap();
    dir.to_str().unwrap().to_owned()
}

#[test]
fn what_does_not_fit_is_refused() {
    let refuse = |model: &str, adapter: &str| {
        let args = [
            "logits",
            &path(model),
            "--ids",
            "1",
            "-o",
            "/nowhere/x",
            "--lora",
            adapter,
        ];
        refusal(&args)
    };
    let all = path("adapters/llama/all");
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for (model, adapter, messages) in [
        (
            "reference-logits/gemma3",
            all.clone(),
            [
                "adapters/llama/all: not an adapter of this model; it was made for `reference/llama`: ",
                "expected shape [96, 4] by the k_proj of the base model, found [64, 4]",
            ],
        ),
        (
            "stories260K/hf",
            all.clone(),
            [
                "not an adapter of this model",
                "by the down_proj of the base model",
            ],
        ),
        (
            "reference-logits/llama",
            path("reference-logits/llama"),
            [
                "expected an adapter as PEFT saves it",
                "found a folder without adapter_config.json",
            ],
        ),
        (
            "reference-logits/llama",
            "no/such".to_owned(),
            ["adapter no/such: no such folder", ""],
        ),
        (
            "reference-logits/llama",
            changed(dir, r#""use_dora": false"#, r#""use_dora": true"#),
            [
                "adapter_config.json: `use_dora`: expected no weight decomposition (DoRA)",
                "found true",
            ],
        ),
    ] {
        let found = refuse(model, &adapter);
        for message in messages {
            assert!(found.contains(message), "{model}: {found}");
        }
    }
    let adapter = changed(dir, r#""r": 4"#, r#""r": 5"#);
    let found = refuse("reference-logits/llama", &adapter);
    assert!(
        found.contains("expected rank 5 by the adapter's configuration, found shape"),
        "{found}"
    );

    let weights = dir.join("adapter_model.safetensors");
    let bytes = fs::read(&weights).unwrap();
    let rename = |from: &str, to: &str| {
        assert_eq!(from.len(), to.len());
        let at = bytes
            .windows(from.len())
            .position(|w| w == from.as_bytes())
            .unwrap();
        let mut bytes = bytes.clone();
        bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
        fs::write(&weights, bytes).unwrap();
        refuse("reference-logits/llama", &adapter)
    };
    let found = rename(
        "layers.0.mlp.down_proj.lora_B",
        "layers.0.mlp.down_prox.lora_B",
    );
    assert!(
        found.contains("expected a linear layer of attention or the feed-forward block"),
        "{found}"
    );
    let found = rename(
        "layers.0.mlp.down_proj.lora_B",
        "layers.7.mlp.down_proj.lora_B",
    );
    assert!(
        found.contains("expected both matrices, lora_A and lora_B, found only"),
        "{found}"
    );
    fs::write(&weights, &bytes[..bytes.len() - 1]).unwrap();
    let found = refuse("reference-logits/llama", &adapter);
    assert!(found.contains("adapter_model.safetensors: "), "{found}");
    fs::remove_file(&weights).unwrap();
    fs::write(dir.join("adapter_model.bin"), "").unwrap();
    let found = refuse("reference-logits/llama", &adapter);
    assert!(found.contains("save the adapter as safetensors"), "{found}");
}

#[test]
fn a_scale_must_be_a_number() {
    let llama = llama();
    let args = ["run", &llama, "-p", "x", "--lora", "a=nan"];
    let output = common::sterna(&args);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr.contains("expected a finite scale, found NaN"),
        "{stderr}"
    );
    assert!(stdout(&["run", "--help"]).contains("--lora <DIR[=SCALE]>"));
}

/// The adapter `all` as a package: matrices the other way round, in one shard.
fn package(dir: &Path) {
    let bytes = fs::read(testdata("adapters/llama/all/adapter_model.safetensors")).unwrap();
    let file = SafeTensors::parse(&bytes, bytes.len() as u64).unwrap();
    let (mut shard, mut tensors) = (Vec::new(), serde_json::Map::new());
    for tensor in file.tensors() {
        let name = parse_name(&tensor.name).unwrap().to_tensor_name();
        let &[rows, columns] = &tensor.shape[..] else {
            panic!("two dimensions")
        };
        tensors.insert(
            name,
            json!({
                "shard": 0, "offset": shard.len(), "size": tensor.len,
                "shape": [columns, rows], "dtype": "f32",
            }),
        );
        let stored = &bytes[tensor.offset as usize..][..tensor.len as usize];
        for j in 0..columns {
            for i in 0..rows {
                let at = 4 * (i * columns + j);
                shard.extend_from_slice(&stored[at..at + 4]);
            }
        }
    }
    let manifest = json!({
        "version": "1.0", "modelId": "all", "modelType": "lora", "adapterType": "lora",
        "baseModel": "reference/llama", "quantization": "F32", "hashAlgorithm": "sha256",
        "loraConfig": { "rank": 4, "alpha": 8, "targetModules": ["q_proj"] },
        "shards": [{
            "index": 0, "fileName": "weights.rdrr", "size": shard.len(),
            "hash": digest_of(Algorithm::Sha256, &shard).to_string(),
        }],
        "tensors": tensors,
    });
    fs::write(dir.join("weights.rdrr"), shard).unwrap();
    fs::write(dir.join("manifest.json"), manifest.to_string()).unwrap();
}

#[test]
fn packages_are_adapters_too() {
    let dir = tempfile::tempdir().unwrap();
    package(dir.path());
    let dir = dir.path().to_str().unwrap();
    let (ids, _) = reference("logits.all");
    let saved = path("adapters/llama/all");
    let want = logits(&llama(), &ids, &["--lora", &saved]);
    assert_eq!(logits(&llama(), &ids, &["--lora", dir]), want);
    let shard = format!("{dir}/weights.rdrr");
    let mut bytes = fs::read(&shard).unwrap();
    bytes[5] ^= 1;
    fs::write(shard, bytes).unwrap();
    let llama = llama();
    let args = [
        "logits",
        &llama,
        "--ids",
        "1",
        "-o",
        "/nowhere/x",
        "--lora",
        dir,
    ];
    assert!(refusal(&args).contains("weights.rdrr"));
}

#[test]
fn converted_adapters_do_what_their_source_does() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("package");
    let out = out.to_str().unwrap();
    for base in ["llama", "gemma3", "phi3"] {
        let model = path(&format!("reference-logits/{base}"));
        for entry in fs::read_dir(testdata(&format!("adapters/{base}"))).unwrap() {
            let adapter = entry.unwrap().path();
            if !adapter.is_dir() {
                continue;
            }
            let source = adapter.to_str().unwrap().to_owned();
            stdout(&["convert", &source, out]);
            let verified = common::json(&["verify", out, "--json"]);
            assert!(verified["n_groups"].as_u64().unwrap() > 0, "{source}");
            let manifest = fs::read(Path::new(out).join("manifest.json")).unwrap();
            let manifest: serde_json::Value = serde_json::from_slice(&manifest).unwrap();
            let integrity = &manifest["integrityExtensions"];
            for (place, n) in [
                (&integrity["blockMerkle"]["roots"], &manifest["tensorCount"]),
                (&integrity["files"], &json!(1)),
            ] {
                let found = place.as_object().map(|members| members.len() as u64);
                assert_eq!(found, n.as_u64(), "{source}");
            }
            assert!(integrity["shardBlocks"]["hashes"][0].is_array(), "{source}");
            assert!(manifest["blake3Full"].is_string(), "{source}");
            let ids = [5, 42, 79, 116, 3];
            let want = logits(&model, &ids, &["--lora", &source]).concat();
            let got = logits(&model, &ids, &["--lora", out]).concat();
            let pairs = got.iter().zip(&want);
            let difference = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            // Ranks filled with zeros are summed in another order.
            assert!(difference < 1e-3, "{source}: {difference}");
            fs::remove_dir_all(out).unwrap();
        }
    }
}

#[test]
fn an_adapter_of_a_model_of_another_name_is_said_to_be_one() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let base = "\"base_model_name_or_path\": \"reference/llama\"";
    let other = changed(dir, base, &base.replace("reference/llama", "acme/Other-3B"));
    let out = dir.join("logits.safetensors");
    let (llama, out) = (llama(), out.to_str().unwrap());
    for (adapter, warned) in [(path("adapters/llama/all"), false), (other, true)] {
        let args = [
            "logits", &llama, "--ids", "1,2", "-o", out, "--lora", &adapter,
        ];
        let output = common::sterna(&args);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{stderr}");
        let warning = "it was made for `acme/Other-3B`; this model is called `llama`";
        assert_eq!(stderr.contains(warning), warned, "{stderr}");
        assert_eq!(stderr.contains("warning"), warned, "{stderr}");
    }
}
