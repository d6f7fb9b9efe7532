//! Configurations for tests.

use serde_json::{Value, json};
use sterna_format::hf::Config;

use super::ModelConfig;

/// The configuration from a `config.json` of a small model with the entries `more` besides its shape.
pub(super) fn model(more: &Value) -> ModelConfig {
    let mut hf = json!({
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 16,
        "intermediate_size": 96, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    });
    let more = more.as_object().unwrap().clone();
    hf.as_object_mut().unwrap().extend(more);
    let hf = Config::parse(hf.to_string().as_bytes()).unwrap();
    ModelConfig::from_hf(&hf, 100).unwrap()
}
