//! `generation_config.json`: how a model's makers sample from it.

use super::ConfigError;
use super::config::{first_id, token_ids};
use super::json::{Json, Node};

/// Sampling defaults and stop ids. What the file doesn't say is `None` or empty.
#[derive(Debug, Clone, Default, PartialEq)]
#[allow(missing_docs)]
#[non_exhaustive]
pub struct GenerationConfig {
    pub bos_token_id: Option<u32>,
    /// Every id that ends a text; files give one or a list.
    pub eos_token_id: Vec<u32>,
    pub pad_token_id: Option<u32>,
    /// False means greedy, whatever the temperature.
    pub do_sample: Option<bool>,
    pub temperature: Option<f64>,
    /// 0 means no limit.
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    /// Parses `generation_config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it isn't JSON or a value isn't what its key demands.
    pub fn parse(json: &[u8]) -> Result<GenerationConfig, ConfigError> {
        let json = Json::parse(json)?;
        let root = Node::root(&json);
        root.expect_object()?;
        let count = |key: &str| root.get(key).map(|n| n.count()).transpose();
        let f64 = |key: &str| root.get(key).map(|n| n.f64()).transpose();
        Ok(GenerationConfig {
            bos_token_id: first_id(root.get("bos_token_id"))?,
            eos_token_id: token_ids(root.get("eos_token_id"))?,
            pad_token_id: first_id(root.get("pad_token_id"))?,
            do_sample: root.get("do_sample").map(|n| n.bool()).transpose()?,
            temperature: f64("temperature")?,
            top_k: count("top_k")?,
            top_p: f64("top_p")?,
            min_p: f64("min_p")?,
            repetition_penalty: f64("repetition_penalty")?,
            max_new_tokens: count("max_new_tokens")?,
        })
    }
}
