//! The JSON files of a Hugging Face checkpoint. One input is tried as each of them.

use sterna_format::hf::{AdapterConfig, AdapterTensor, Config, GenerationConfig, TokenizerConfig};
use sterna_format::safetensors::Index;

/// Panics if a promise of the parser is broken.
pub(crate) fn check(data: &[u8]) {
    if let Ok(config) = Config::parse(data) {
        let _ = config.activation();
        let _ = config.rope("full_attention");
        let _ = config.rope("sliding_attention");
    }
    let _ = GenerationConfig::parse(data);
    if let Ok(TokenizerConfig {
        chat_template: Some(template),
        ..
    }) = TokenizerConfig::parse(data)
    {
        let _ = template.default_template();
    }
    let _ = Index::parse(data);
    if let Ok(config) = AdapterConfig::parse(data) {
        assert!(
            config
                .scaling("model.layers.0.self_attn.q_proj")
                .is_finite()
        );
    }
    if let Ok(name) = std::str::from_utf8(data) {
        let _ = AdapterTensor::parse(name);
    }
}
