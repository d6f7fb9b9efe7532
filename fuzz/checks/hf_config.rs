//! The JSON files beside a Hugging Face checkpoint. One input is tried as each of them.

use sterna_format::hf::{Config, GenerationConfig, TokenizerConfig};
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
}
