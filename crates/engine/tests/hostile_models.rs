//! Damaged models end as errors, never as panics: from the header to the first logits.

use crate::common::{cpu, files, load, read, testdata};
use bytes::Bytes;
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Logits, ModelPlan, Session, SessionOptions};
use sterna_format::gguf::{self, Gguf};
use sterna_format::hf;
use sterna_format::safetensors::{self, SafeTensors};

/// SplitMix64: the same damage on every run.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % n as u64) as usize
    }
}

/// Runs the model if it still loads; true if it got as far as logits.
fn run(plan: ModelPlan, files: &[Bytes]) -> bool {
    let Ok(model) = load(plan, files, cpu()) else {
        return false;
    };
    let is_encoder = model.config().is_encoder();
    let width = match is_encoder {
        true => model.config().model_dim,
        false => model.config().n_vocab,
    };
    let options = SessionOptions::new(model.config().max_ctx.min(8));
    let Ok(mut session) = Session::new(model, options) else {
        return false;
    };
    let values = match is_encoder {
        true => session.hidden(&[1, 2, 3]),
        false => session.forward(&[1, 2, 3], Logits::All),
    };
    match values {
        Ok(values) => {
            assert_eq!(values.len(), 3 * width);
            true
        }
        Err(_) => false,
    }
}

fn run_gguf(file: Vec<u8>) -> bool {
    let file = Bytes::from(file);
    let Ok(header) = Gguf::parse(&file, file.len() as u64) else {
        return false;
    };
    let Ok(model) = gguf::Model::from_parts(vec![header]) else {
        return false;
    };
    let plan = ModelPlan::from_gguf(model.metadata(), model.tensors(), &PlanOptions::default());
    plan.is_ok_and(|plan| run(plan, &[file]))
}

#[test]
fn damaged_gguf_files() {
    let mut random = Random(1);
    let mut survived = 0;
    for name in [
        "reference-gguf/gemma3",
        "reference-gguf/falcon-e-i2-s",
        "reference-gguf/qwen3-yarn",
        "reference-gguf/phi3-longrope-long",
        "reference-mixtures/gguf/mixtral",
        "reference-mixtures/gguf/qwen3-moe",
        "reference-mixtures/gguf/deepseek-v3",
        "reference-mixtures/gguf/gpt-oss",
        "reference-states/gguf/lfm2",
        "reference-states/gguf/qwen3-next",
        "reference-states/gguf/bonsai2-ptq1_0",
        "reference-states/gguf/granite-hybrid",
        "reference-states/gguf/jamba",
        "reference-states/gguf/falcon-h1",
        "reference-states/gguf/mamba2",
        "reference-states/gguf/rwkv6",
        "reference-states/gguf/rwkv7",
        "embeddings/bert.gguf",
    ] {
        let path = testdata().join(name);
        let file = match path.is_dir() {
            true => read(&files(&path, "gguf")[0]).to_vec(),
            false => read(&path).to_vec(),
        };
        let header = Gguf::parse(&file, file.len() as u64).unwrap();
        let header_len = header.data_offset() as usize;
        for i in 0..250 {
            let mut damaged = file.clone();
            // The header is where a byte changes what is done; one case in five damages weights.
            let range = if i % 5 == 0 { file.len() } else { header_len };
            for _ in 0..1 + random.below(3) {
                let at = random.below(range);
                damaged[at] = match random.below(4) {
                    0 => 0,
                    1 => 0xff,
                    2 => damaged[at] ^ (1 << random.below(8)),
                    _ => random.below(256) as u8,
                };
            }
            survived += usize::from(run_gguf(damaged));
        }
    }
    // Damage to names of unread keys and to weights leaves a model that runs.
    assert!(survived > 0, "no damaged file got as far as logits");
}

/// Numbers that configurations don't expect.
const NUMBERS: [&str; 14] = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "0.5",
    "1e-40",
    "1e30",
    "4294967296",
    "null",
    "true",
    "\"x\"",
    "[]",
];

/// Why the model of a configuration with some members replaced is refused; `None` if it isn't.
fn contradiction(model: &str, changes: serde_json::Value) -> Option<String> {
    let dir = testdata().join(model);
    let mut config: serde_json::Value =
        serde_json::from_slice(&read(&dir.join("config.json"))).unwrap();
    let members = config.as_object_mut().unwrap();
    members.extend(changes.as_object().unwrap().clone());
    let config = hf::Config::parse(config.to_string().as_bytes()).unwrap();
    let name = "model.safetensors";
    let file = read(&dir.join(name));
    let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
    let tensors = safetensors::merge(vec![(name, header)], None).unwrap();
    let plan = ModelPlan::from_hf(&config, &tensors, &PlanOptions::default());
    plan.err().map(|error| error.to_string())
}

#[test]
fn configurations_that_contradict_their_files() {
    use serde_json::json;
    for (changes, expected) in [
        (
            json!({"attention_bias": true}),
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (
            json!({"vocab_size": 385}),
            "vocab_size: expected at most 384, the rows of the embedding table, found 385",
        ),
        (
            json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0}}),
            "factor: expected a number, with rope scaling of type `yarn`, found nothing",
        ),
    ] {
        let error = contradiction("reference-logits/llama", changes.clone()).unwrap_or_default();
        assert!(error.contains(expected), "{changes}: {error}");
    }
    for (model, changes, expected) in [
        (
            "reference-mixtures/hf/qwen3-moe",
            json!({"num_local_experts": 9}),
            "mlp.gate.weight`: expected shape [9, 128], found [8, 128]",
        ),
        (
            "reference-mixtures/hf/qwen3-moe",
            json!({"num_experts_per_tok": 9}),
            "experts of a token: expected 1 to 8, found 9",
        ),
        (
            "reference-mixtures/hf/mixtral",
            json!({"num_local_experts": 1_000_000}),
            "experts: expected 1 to 4096, found 1000000",
        ),
        (
            "reference-mixtures/hf/qwen3-moe",
            json!({"mlp_only_layers": [1]}),
            "`model.layers.1.mlp.up_proj.weight` is missing",
        ),
        (
            "reference-mixtures/hf/olmoe",
            json!({"clip_qkv": 8.0}),
            "clip_qkv: expected nothing, found 8",
        ),
        (
            "reference-layers/hf/gemma4",
            json!({"num_kv_shared_layers": 6}),
            "layers that share keys and values: expected fewer than 6 layers, found 6",
        ),
        (
            "reference-layers/hf/gemma4",
            json!({"num_kv_shared_layers": 1}),
            "layers that share keys and values: expected an earlier layer like each, found none like layer 5",
        ),
        (
            "reference-layers/hf/gemma4",
            json!({"hidden_size_per_layer_input": 1_000_000_000}),
            "width of a layer's own input: expected 1 to",
        ),
        (
            "reference-layers/hf/gemma4",
            json!({"per_layer_config": {"2": {"head_dim": 512}}}),
            "per_layer_config: expected (2, 32) in layer 2, found (2, 512)",
        ),
        (
            "reference-layers/hf/gemma4",
            json!({"enable_moe_block": true}),
            "enable_moe_block: expected false, since experts beside a network aren't supported",
        ),
        (
            "reference-layers/hf/gemma4-sharing",
            json!({"global_head_dim": 0}),
            "head width of layers without a window: expected 1 to",
        ),
        (
            "reference-layers/hf/gemma4-sharing",
            json!({"num_global_key_value_heads": 3}),
            "key-value heads of layers without a window: expected a divisor of 4 heads, found 3",
        ),
        (
            "reference-mixtures/hf/gpt-oss",
            json!({"swiglu_limit": 10.0}),
            "swiglu_limit: expected 7, found 10",
        ),
        (
            "reference-mixtures/hf/gpt-oss",
            json!({"hidden_act": "gelu"}),
            "hidden_act: expected silu, found `gelu`",
        ),
        (
            "reference-mixtures/hf/gpt-oss",
            json!({"num_attention_heads": 8, "head_dim": 16}),
            "self_attn.k_proj.weight`: expected shape [32, 128], found [64, 128]",
        ),
        (
            "reference-mixtures/hf/gpt-oss",
            json!({"intermediate_size": 128}),
            "mlp.experts.gate_up_proj_bias`: expected shape [4, 256], found [4, 512]",
        ),
        (
            "reference-mixtures/hf/gpt-oss-mxfp4",
            json!({"hidden_size": 64}),
            "`model.embed_tokens.weight`: expected shape",
        ),
        (
            "reference-mixtures/hf/gpt-oss-mxfp4",
            json!({"quantization_config": {"quant_method": "fp8"}}),
            "quantization_config.quant_method: expected `bitnet`",
        ),
        (
            "embeddings/bert",
            json!({"is_decoder": true}),
            "is_decoder: expected false in an encoder",
        ),
        (
            "embeddings/bert",
            json!({"position_embedding_type": "relative_key"}),
            "position_embedding_type: expected absolute, found `relative_key`",
        ),
        (
            "embeddings/bert",
            json!({"max_position_embeddings": 65}),
            "tensor `embeddings.position_embeddings.weight`: expected shape [65, 128], found [64, 128]",
        ),
        (
            "embeddings/bert",
            json!({"num_hidden_layers": 2}),
            "encoder.layer.2.",
        ),
        (
            "reference-states/hf/rwkv4",
            json!({"attention_hidden_size": 256}),
            "attention_hidden_size: expected the width of the model, 128, found 256",
        ),
        (
            "reference-states/hf/rwkv4",
            json!({"hidden_size": 2048, "attention_hidden_size": 2048}),
            "tensor `rwkv.embeddings.weight`: expected shape [384, 2048]",
        ),
        (
            "reference-states/hf/rwkv5",
            json!({"head_size": 16}),
            "time_decay`: expected shape [8, 16], found [4, 32]",
        ),
        (
            "reference-states/hf/rwkv6",
            json!({"head_size": 32}),
            "time_faaaa`: expected shape [4, 32], found [2, 64]",
        ),
        (
            "reference-states/hf/rwkv7",
            json!({"head_dim": 32}),
            "r_k`: expected shape [4, 32], found [2, 64]",
        ),
        (
            "reference-states/hf/rwkv5",
            json!({"head_size": 48}),
            "heads of time mixing: expected as many elements together as the model is wide, 128, found 2 of 48",
        ),
        (
            "reference-states/hf/rwkv6",
            json!({"head_size": 0}),
            "heads of time mixing: expected as many elements together as the model is wide, 128, found 0 of 0",
        ),
        (
            "reference-states/hf/rwkv6",
            json!({"head_size_divisor": 0}),
            "epsilon of heads: expected a positive number, found 0",
        ),
        (
            "reference-states/hf/rwkv7",
            json!({"a_low_rank_dim": 1_000_000_000}),
            "rank of `blk.0.time_mix_a1`: expected 1 to 65536, found 1000000000",
        ),
        (
            "reference-states/hf/rwkv7",
            json!({"gate_low_rank_dim": 16}),
            "`model.layers.0.attn.g_lora.lora.0.weight`: expected shape [16, 128]",
        ),
        (
            "reference-states/hf/rwkv6",
            json!({"num_hidden_layers": 100, "stored_halved_every": 1}),
            "layers between halved ones: expected at least 4, found 1",
        ),
        (
            "reference-states/hf/rwkv7",
            json!({"norm_bias": false}),
            "norm_bias: expected true",
        ),
        (
            "reference-states/hf/lfm2-moe",
            json!({"routed_scaling_factor": 2.5}),
            "routed_scaling_factor: expected 1, found 2.5",
        ),
        (
            "reference-states/hf/qwen3.5",
            json!({"linear_num_value_heads": 3}),
            "value heads of a delta net: expected a multiple of 2 key heads, found 3",
        ),
        (
            "reference-states/hf/qwen3.5",
            json!({"linear_key_head_dim": 1_000_000}),
            "key width of a delta net: expected 1 to 1024, found 1000000",
        ),
        (
            "reference-states/hf/qwen3.5",
            json!({"linear_num_value_heads": 1024, "linear_key_head_dim": 1024, "linear_value_head_dim": 1024}),
            "elements of a state: expected at most 268435456, found 1073741824",
        ),
        (
            "reference-states/hf/qwen3.5",
            json!({"linear_num_key_heads": null}),
            "linear_num_key_heads: expected a count, found nothing",
        ),
        (
            "reference-states/hf/qwen3.5",
            json!({"attn_output_gate": false}),
            "attn_output_gate: expected true, found false",
        ),
        (
            "reference-states/hf/qwen3-next",
            json!({"shared_expert_intermediate_size": 49}),
            "mlp.shared_expert.gate_proj.weight`: expected shape [49, 128], found [48, 128]",
        ),
        (
            "reference-states/hf/qwen3-next",
            json!({"linear_num_value_heads": 8}),
            "linear_attn.in_proj_qkvz.weight`: expected shape",
        ),
        (
            "reference-states/hf/granite-hybrid",
            json!({"mamba_n_groups": 3}),
            "groups of a state space: expected a divisor of 8 heads, found 3",
        ),
        (
            "reference-states/hf/granite-hybrid",
            json!({"mamba_d_state": 2_000_000}),
            "rows of a state: expected 1 to 1024, found 2000000",
        ),
        (
            "reference-states/hf/granite-hybrid",
            json!({"residual_multiplier": -1.0}),
            "residual scale: expected a positive number, found -1",
        ),
        (
            "reference-states/hf/granite-hybrid",
            json!({"num_local_experts": 9}),
            "block_sparse_moe.router.layer.weight`: expected shape [9, 128], found [8, 128]",
        ),
        (
            "reference-mixtures/hf/deepseek-v3",
            json!({"n_group": 3}),
            "groups of experts: expected groups of 8 experts with 2 in those chosen, found 1 of 3",
        ),
        (
            "reference-mixtures/hf/deepseek-v3",
            json!({"kv_lora_rank": 1_000_000}),
            "rank of keys and values: expected 1 to 65536, found 1000000",
        ),
        (
            "reference-mixtures/hf/deepseek-v2",
            json!({"v_head_dim": 25}),
            "self_attn.kv_b_proj.weight`: expected shape [228, 32], found [224, 32]",
        ),
        (
            "reference-mixtures/hf/deepseek-v2",
            json!({"topk_method": "noaux_tc"}),
            "topk_method: expected greedy or gready or group_limited_greedy, found `noaux_tc`",
        ),
        (
            "reference-states/hf/mamba",
            json!({"state_size": 1_000_000}),
            "elements of a channel's state: expected 1 to 1024, found 1000000",
        ),
        (
            "reference-states/hf/mamba",
            json!({"time_step_rank": 7}),
            "mixer.x_proj.weight`: expected shape [39, 256], found [40, 256]",
        ),
        (
            "reference-states/hf/mamba2",
            json!({"time_step_limit": [0.0, 0.1]}),
            "time_step_limit: expected 0 to infinity",
        ),
        (
            "reference-states/hf/jamba",
            json!({"expert_layer_offset": 0}),
            "`model.layers.0.feed_forward.router.weight` is missing",
        ),
        (
            "reference-states/hf/falcon-h1",
            json!({"ssm_multipliers": [1.0]}),
            "ssm_multipliers: expected 5 numbers, found 1",
        ),
        (
            "reference-states/hf/falcon-h1",
            json!({"key_multiplier": 0.0}),
            "multipliers: expected numbers other than 0, found 0",
        ),
        (
            "reference-states/hf/lfm2",
            json!({"conv_L_cache": 65}),
            "positions of a convolution: expected 1 to 64, found 65",
        ),
        (
            "reference-states/hf/lfm2",
            json!({"layer_types": ["conv", "conv", "mamba", "conv"]}),
            "layer_types: expected conv or full_attention, found `mamba`",
        ),
    ] {
        let error = contradiction(model, changes.clone()).unwrap_or_default();
        assert!(error.contains(expected), "{model}, {changes}: {error}");
    }
    for changes in [
        // Rows of padding.
        json!({"vocab_size": 380}),
        json!({"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0,
            "original_max_position_embeddings": 256}}),
    ] {
        let error = contradiction("reference-logits/llama", changes.clone());
        assert_eq!(error, None, "{changes}");
    }
}

/// Weights that are rotated, whose file says something else about it.
#[test]
fn rotations_that_are_not_known() {
    let dir = testdata().join("reference-states/gguf/bonsai2-ptq1_0");
    let file = read(&files(&dir, "gguf")[0]);
    let model = Gguf::parse(&file, file.len() as u64).unwrap();
    let model = gguf::Model::from_parts(vec![model]).unwrap();
    let with = |name: &str, value: gguf::Value| {
        let name = format!("prism.hadamard.{name}");
        let mut metadata = gguf::Metadata::default();
        for (key, value) in model.metadata().iter().filter(|(key, _)| *key != name) {
            metadata.insert(key, value.clone()).unwrap();
        }
        metadata.insert(&name, value).unwrap();
        let plan = ModelPlan::from_gguf(&metadata, model.tensors(), &PlanOptions::default());
        plan.err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    };
    let string = |text: &str| gguf::Value::String(text.to_owned());
    let names = |names: &[&str]| gguf::Value::Array(gguf::Array::String(names.iter().collect()));
    for (key, value, expected) in [
        (
            "version",
            gguf::Value::U32(3),
            "version: expected 1 or 2, found 3",
        ),
        (
            "transform",
            string("dct"),
            "transform: expected `normalized-sylvester",
        ),
        (
            "sign_mode",
            string("random"),
            "sign_mode: expected `explicit` or `identity`",
        ),
        (
            "block_size",
            gguf::Value::U32(96),
            "block_size: expected a power of two",
        ),
        (
            "twist",
            gguf::Value::U32(1),
            "twist: expected a key that is known",
        ),
        (
            "weight_names",
            names(&["blk.0.attn_qkv.weight", "blk.99.ffn_up.weight"]),
            "weight_names: expected names of tensors, found `blk.99.ffn_up.weight`",
        ),
        (
            "sign_widths",
            gguf::Value::Array(gguf::Array::I32(vec![128])),
            "sign_values: expected 128 of them",
        ),
    ] {
        let error = with(key, value);
        assert!(error.contains(expected), "{key}: {error}");
    }
}

#[test]
fn a_gguf_file_with_more_tokens_than_rows() {
    let dir = testdata().join("reference-gguf/llama");
    let file = read(&files(&dir, "gguf")[0]);
    let model = Gguf::parse(&file, file.len() as u64).unwrap();
    let model = gguf::Model::from_parts(vec![model]).unwrap();
    let plan = |n: u32| {
        const KEY: &str = "llama.vocab_size";
        let mut metadata = gguf::Metadata::default();
        for (key, value) in model.metadata().iter().filter(|(key, _)| *key != KEY) {
            metadata.insert(key, value.clone()).unwrap();
        }
        metadata.insert(KEY, gguf::Value::U32(n)).unwrap();
        ModelPlan::from_gguf(&metadata, model.tensors(), &PlanOptions::default())
    };
    let padded = plan(1).unwrap();
    let n_vocab = padded.config().n_vocab as u32;
    let oddity = padded.oddity().unwrap();
    assert!(
        oddity.contains(&format!("llama.vocab_size: expected {n_vocab}, the rows")),
        "{oddity}"
    );
    assert_eq!(plan(n_vocab).unwrap().oddity(), None);
    let error = plan(n_vocab + 1).unwrap_err().to_string();
    assert!(
        error.contains("llama.vocab_size: expected at most"),
        "{error}"
    );
}

#[test]
fn damaged_configurations() {
    let mut random = Random(2);
    let (mut refused, mut survived) = (0, 0);
    for name in [
        "reference-variants/gemma3-pattern-v4",
        "reference-variants/bitnet-online",
        "reference-variants/phi3-longrope-long",
        "reference-variants/qwen3-yarn-v4",
        "reference-variants/smollm3-list-v4",
        "reference-variants/llama-rope-dynamic-long",
        "reference-mixtures/hf/mixtral",
        "reference-mixtures/hf/qwen3-moe",
        "reference-mixtures/hf/olmoe",
        "reference-states/hf/lfm2",
        "reference-states/hf/lfm2-moe",
        "reference-states/hf/qwen3.5",
        "reference-states/hf/qwen3-next",
        "reference-states/hf/granite-hybrid",
        "reference-states/hf/rwkv6",
        "reference-states/hf/rwkv7",
    ] {
        let dir = testdata().join(name);
        let text = String::from_utf8(read(&dir.join("config.json")).to_vec()).unwrap();
        let weights: Vec<Bytes> = files(&dir, "safetensors")
            .iter()
            .filter(|path| !path.ends_with("reference.safetensors"))
            .map(|path| read(path))
            .collect();
        // Where a value is: after a colon.
        let values: Vec<usize> = text.match_indices(": ").map(|(at, _)| at + 2).collect();
        for _ in 0..300 {
            let mut damaged = text.clone();
            let at = values[random.below(values.len())];
            let end = text[at..].find([',', '\n', '}']).unwrap() + at;
            damaged.replace_range(at..end, NUMBERS[random.below(NUMBERS.len())]);
            let Ok(config) = hf::Config::parse(damaged.as_bytes()) else {
                refused += 1;
                continue;
            };
            let headers = weights
                .iter()
                .map(|file| {
                    (
                        "model.safetensors",
                        SafeTensors::parse(file, file.len() as u64).unwrap(),
                    )
                })
                .collect();
            let catalog = safetensors::merge(headers, None).unwrap();
            match ModelPlan::from_hf(&config, &catalog, &PlanOptions::default()) {
                Ok(plan) => survived += usize::from(run(plan, &weights)),
                Err(_) => refused += 1,
            }
        }
    }
    // Some values matter and are refused, others don't and leave a model that runs.
    assert!(refused > 100 && survived > 100, "{refused}, {survived}");
}
