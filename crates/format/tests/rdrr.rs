//! Packages that other implementations wrote.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use sterna_format::DType;
use sterna_format::hf::Config;
use sterna_format::rdrr::{HfConfig, Manifest, Package, Packing, Problems, TensorMap, hf_config};

const SAMPLES: [&str; 4] = [
    "dec2025-llama-bf16-row",
    "tiny-gemma3-q4k",
    "tiny-llama-f16",
    "v1-gemma3-q4k",
];

fn folder(sample: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata/rdrr-samples")
        .join(sample)
}

fn manifest(sample: &str) -> Manifest {
    let bytes = fs::read(folder(sample).join("manifest.json")).unwrap();
    Manifest::parse(&bytes).unwrap_or_else(|problems| panic!("{sample}:\n{problems}"))
}

fn package(sample: &str) -> Package {
    let manifest = manifest(sample);
    let tensors = manifest.tensors_file.as_ref().map(|name| {
        let bytes = fs::read(folder(sample).join(name)).unwrap();
        TensorMap::parse(&bytes).unwrap_or_else(|problems| panic!("{sample}:\n{problems}"))
    });
    Package::new(manifest, tensors).unwrap_or_else(|problems| panic!("{sample}:\n{problems}"))
}

#[test]
fn samples_are_read() {
    for (sample, n_tensors, n_shards, n_groups) in [
        ("dec2025-llama-bf16-row", 21, 7, 0),
        ("tiny-gemma3-q4k", 28, 8, 0),
        ("tiny-llama-f16", 21, 6, 0),
        ("v1-gemma3-q4k", 28, 10, 4),
    ] {
        let package = package(sample);
        let manifest = package.manifest();
        assert_eq!(package.tensors().len(), n_tensors, "{sample}");
        assert_eq!(manifest.shards.len(), n_shards, "{sample}");
        assert_eq!(manifest.groups.len(), n_groups, "{sample}");
        for (i, shard) in manifest.shards.iter().enumerate() {
            let len = fs::metadata(folder(sample).join(&shard.file_name))
                .unwrap()
                .len();
            assert_eq!(shard.size, len, "{sample}: shard {i}");
        }
    }
}

#[test]
fn what_is_read_is_written() {
    for sample in SAMPLES {
        let manifest = manifest(sample);
        let text = manifest.to_json();
        let again = Manifest::parse(&text).unwrap_or_else(|p| panic!("{sample}:\n{p}"));
        assert_eq!(again, manifest, "{sample}");
        assert_eq!(again.to_json(), text, "{sample}");
        let package = package(sample);
        let text = package.tensors().to_json();
        let again = TensorMap::parse(&text).unwrap_or_else(|p| panic!("{sample}:\n{p}"));
        assert_eq!(again, *package.tensors(), "{sample}");
    }
}

#[test]
fn padded_rows_are_told_by_size() {
    for sample in ["tiny-gemma3-q4k", "v1-gemma3-q4k"] {
        let package = package(sample);
        let packing = |name: &str| {
            let tensor = package.tensors().get(name).unwrap();
            assert_eq!(tensor.dtype.known(), Some(DType::Q4_K));
            tensor.packing()
        };
        // 320 columns are a block and a quarter; 512 are two.
        let q = packing("model.layers.0.self_attn.q_proj.weight");
        assert_eq!(q, Some(Packing::PaddedRows), "{sample}");
        let down = packing("model.layers.0.mlp.down_proj.weight");
        assert_eq!(down, Some(Packing::Flat), "{sample}");
    }
}

/// The configuration of a sample with some members of its manifest replaced.
fn config_with(sample: &str, edits: &[(&str, Value)]) -> Result<HfConfig, Problems> {
    let bytes = fs::read(folder(sample).join("manifest.json")).unwrap();
    let mut json: Value = serde_json::from_slice(&bytes).unwrap();
    for (path, value) in edits {
        match json.pointer_mut(path) {
            Some(place) => *place = value.clone(),
            None => {
                let (parent, key) = path.rsplit_once('/').unwrap();
                json.pointer_mut(parent).unwrap()[key] = value.clone();
            }
        }
    }
    hf_config(&Manifest::parse(json.to_string().as_bytes()).unwrap())
}

fn parsed(hf: &HfConfig) -> Config {
    let config = hf.parsed().unwrap();
    let text = serde_json::to_string(&hf.config).unwrap();
    assert_eq!(config, Config::parse(text.as_bytes()).unwrap());
    config
}

/// What a folder's own `config.json` says.
fn source_config(name: &str) -> Config {
    Config::parse(&fs::read(folder(&format!("source/{name}")).join("config.json")).unwrap())
        .unwrap()
}

#[test]
fn configurations_are_those_of_the_sources() {
    let source = source_config("tiny-llama");
    let own = config_with("dec2025-llama-bf16-row", &[]).unwrap();
    assert_eq!(parsed(&own), source);

    for (sample, source, n_warnings) in [
        ("tiny-llama-f16", source, 1),
        ("tiny-gemma3-q4k", source_config("tiny-gemma3"), 0),
        ("v1-gemma3-q4k", source_config("tiny-gemma3"), 0),
    ] {
        let hf = config_with(sample, &[]).unwrap();
        assert_eq!(hf.warnings.len(), n_warnings, "{sample}: {:?}", hf.warnings);
        let derived = parsed(&hf);
        assert_eq!(derived.model_type, source.model_type, "{sample}");
        assert_eq!(derived.hidden_size, source.hidden_size, "{sample}");
        assert_eq!(derived.head_dim, source.head_dim, "{sample}");
        assert_eq!(derived.rms_norm_eps, source.rms_norm_eps, "{sample}");
        assert_eq!(derived.activation(), source.activation(), "{sample}");
        assert_eq!(
            derived.tie_word_embeddings, source.tie_word_embeddings,
            "{sample}"
        );
        assert_eq!(derived.eos_token_id, source.eos_token_id, "{sample}");
        assert_eq!(derived.sliding_window, source.sliding_window, "{sample}");
        assert_eq!(
            derived.query_pre_attn_scalar, source.query_pre_attn_scalar,
            "{sample}"
        );
        for layer in ["full_attention", "sliding_attention"] {
            assert_eq!(derived.rope(layer), source.rope(layer), "{sample} {layer}");
        }
    }
}

#[test]
fn families_are_told_by_their_ways() {
    let llama = [
        ("/inference/rope/ropeScalingType", Value::Null),
        ("/inference/rope/longropeOriginalMaxPos", Value::Null),
        ("/inference/output/embeddingScale", Value::Null),
        ("/inference/output/logitInputScale", json!(1)),
        ("/inference/layerPattern/residualBranchScale", json!(1)),
    ];
    let from_llama =
        |edits: &[(&'static str, Value)]| config_with("tiny-llama-f16", &[&llama, edits].concat());
    for (edits, model_type) in [
        (&[][..], "llama"),
        (
            &[("/inference/attention/queryKeyNorm", json!(true))],
            "qwen3",
        ),
        (
            &[("/inference/attention/attentionBias", json!(true))],
            "qwen2",
        ),
        (
            &[("/inference/attention/slidingWindow", json!(64))],
            "mistral",
        ),
        (&[("/modelType", json!("phi3"))], "phi3"),
    ] {
        let hf = from_llama(edits).unwrap_or_else(|problems| panic!("{model_type}: {problems}"));
        assert_eq!(hf.config["model_type"], model_type);
        assert_eq!(hf.warnings, [""; 0]);
    }
    let yarn = from_llama(&[
        ("/inference/rope/ropeScalingType", json!("yarn")),
        ("/inference/rope/ropeScalingFactor", json!(4)),
        ("/inference/rope/yarnOriginalMaxPos", json!(512)),
        ("/inference/rope/yarnBetaFast", json!(32)),
    ]);
    let rope = parsed(&yarn.unwrap()).rope("full_attention");
    assert_eq!(
        (rope.rope_type.as_deref(), rope.factor),
        (Some("yarn"), Some(4.0))
    );
    assert_eq!(rope.original_max_position_embeddings, Some(512));

    let gemma2 = config_with(
        "v1-gemma3-q4k",
        &[
            ("/inference/attention/queryKeyNorm", json!(false)),
            ("/inference/attention/attnLogitSoftcapping", json!(50)),
            ("/inference/output/finalLogitSoftcapping", json!(30)),
            ("/inference/rope/ropeLocalTheta", Value::Null),
            (
                "/inference/layerPattern",
                json!({ "type": "alternating", "globalPattern": "odd" }),
            ),
        ],
    );
    let gemma2 = parsed(&gemma2.unwrap());
    assert_eq!(gemma2.model_type.as_deref(), Some("gemma2"));
    assert_eq!(gemma2.attn_logit_softcapping, Some(50.0));
    let layers = gemma2.layer_types.unwrap();
    assert_eq!(layers, ["sliding_attention", "full_attention"]);
}

#[test]
fn what_no_family_computes_is_an_error() {
    for (path, value, message) in [
        (
            "/inference/attention/causal",
            json!(false),
            "inference.attention.causal: expected true: no family here has anything else, found false",
        ),
        (
            "/inference/attention/valueNorm",
            json!(true),
            "inference.attention.valueNorm: expected false",
        ),
        (
            "/inference/attention/queryPreAttnScalar",
            json!("x"),
            "inference.attention.queryPreAttnScalar: expected a number, found `x`",
        ),
        (
            "/inference/normalization/rmsNormEps",
            Value::Null,
            "inference.normalization.rmsNormEps: expected a number, found nothing",
        ),
        (
            "/inference/normalization/preFeedforwardNorm",
            json!(false),
            "inference.normalization.preFeedforwardNorm: expected true, of a model like gemma3_text, found false",
        ),
        (
            "/inference/ffn/activation",
            json!("tanh"),
            "inference.ffn.activation: expected silu or relu2, and gelu for Gemma, found `tanh`",
        ),
        (
            "/inference/ffn/branchMode",
            json!("moe"),
            "inference.ffn.branchMode: expected \"auto\" or \"dense\"",
        ),
        (
            "/inference/output/embeddingScale",
            json!(12),
            "inference.output.embeddingScale: expected 1",
        ),
        (
            "/inference/layerPattern/residualBranchScale",
            json!(0.5),
            "inference.layerPattern.residualBranchScale: expected 1",
        ),
        (
            "/inference/layerPattern/period",
            Value::Null,
            "inference.layerPattern.period: expected a whole number above 0",
        ),
        (
            "/inference/layerPattern/type",
            json!("spiral"),
            "inference.layerPattern.type: expected uniform, every_n",
        ),
        (
            "/inference/rope/ropeScalingType",
            json!("llama3"),
            "inference.rope.ropeScalingType: expected linear, dynamic, yarn or longrope",
        ),
        (
            "/inference/rope/ropeScalingFactor",
            json!(8),
            "inference.rope.ropeScalingFactor: expected 1, without `ropeScalingType`, found 8",
        ),
        (
            "/inference/rope/partialRotaryFactor",
            json!(0.5),
            "inference.rope.partialRotaryFactor: expected 1",
        ),
        (
            "/architecture/globalHeadDim",
            json!(512),
            "architecture.globalHeadDim: expected nothing: no family here has it, found 512",
        ),
        (
            "/moeConfig",
            json!({"numExperts": 8}),
            "moeConfig: expected nothing, without the `config` of the mixture",
        ),
    ] {
        let problems = config_with("v1-gemma3-q4k", &[(path, value)])
            .unwrap_err()
            .to_string();
        assert!(
            problems.contains(message),
            "{path}\nexpected: {message}\nfound: {problems}"
        );
    }
}
