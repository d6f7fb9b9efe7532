//! `generation_config.json`: how a model's makers sample from it.

use super::ConfigError;
use super::config::{first_id, token_ids};
use super::node::{self, Node};

/// Sampling defaults and stop ids, under their names there. What the file doesn't say is `None` or
/// empty.
///
/// These are hints: numbers are returned verbatim, out of range, infinite or NaN, for the
/// sampler to judge. Only a value that isn't a number is an error.
#[derive(Debug, Clone, Default, PartialEq)]
// Fields without a comment are the keys of the file.
#[allow(missing_docs)]
#[non_exhaustive]
pub struct GenerationConfig {
    pub bos_token_id: Option<u32>,
    /// Every id that ends a text; files give one or a list.
    pub eos_token_id: Vec<u32>,
    /// False means greedy, whatever the temperature.
    pub do_sample: Option<bool>,
    pub temperature: Option<f64>,
    /// 0 means no limit; files may say -1 as well.
    pub top_k: Option<usize>,
    pub top_p: Option<f64>,
    pub min_p: Option<f64>,
    pub repetition_penalty: Option<f64>,
    /// `None` also for a number below 1.
    pub max_new_tokens: Option<usize>,
}

impl GenerationConfig {
    /// Parses `generation_config.json`.
    ///
    /// # Errors
    ///
    /// [`ConfigError`] if it isn't JSON or a value isn't what its key demands.
    pub fn parse(json: &[u8]) -> Result<GenerationConfig, ConfigError> {
        let json = node::parse(json)?;
        let root = Node::root(&json);
        root.expect_object()?;
        let f64 = |key: &str| root.get(key).map(|n| n.any_f64()).transpose();
        // The cast ends at the limits of a `usize`: 0 for what is negative or NaN.
        let count = |key: &str| f64(key).map(|x| x.map(|x| x as usize));
        Ok(GenerationConfig {
            bos_token_id: first_id(root.get("bos_token_id"))?,
            eos_token_id: token_ids(root.get("eos_token_id"))?,
            do_sample: root.get("do_sample").map(|n| n.bool()).transpose()?,
            temperature: f64("temperature")?,
            top_k: count("top_k")?,
            top_p: f64("top_p")?,
            min_p: f64("min_p")?,
            repetition_penalty: f64("repetition_penalty")?,
            max_new_tokens: count("max_new_tokens")?.filter(|&n| n > 0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: &str) -> Result<GenerationConfig, ConfigError> {
        GenerationConfig::parse(json.as_bytes())
    }

    #[test]
    fn odd_hints_refuse_no_model() {
        for (json, top_k, max_new_tokens) in [
            (r#"{"top_k":-1,"max_new_tokens":-1}"#, Some(0), None),
            (r#"{"top_k":0,"max_new_tokens":0}"#, Some(0), None),
            (r#"{"top_k":20.0,"max_new_tokens":7}"#, Some(20), Some(7)),
            (
                r#"{"top_k":1e30,"max_new_tokens":Infinity}"#,
                Some(usize::MAX),
                Some(usize::MAX),
            ),
            (r#"{"top_k":null}"#, None, None),
        ] {
            let config = parse(json).unwrap();
            assert_eq!(config.top_k, top_k, "{json}");
            assert_eq!(config.max_new_tokens, max_new_tokens, "{json}");
        }
        let config = parse(r#"{"temperature":-1,"top_p":Infinity,"min_p":NaN}"#).unwrap();
        assert_eq!(
            (config.temperature, config.top_p),
            (Some(-1.0), Some(f64::INFINITY))
        );
        assert!(config.min_p.unwrap().is_nan());
    }

    #[test]
    fn wrong_types_are_errors() {
        for (json, message) in [
            (
                r#"{"top_k":"50"}"#,
                "`top_k`: expected a number, found a string",
            ),
            (
                r#"{"temperature":[]}"#,
                "`temperature`: expected a number, found a list",
            ),
            (
                r#"{"do_sample":1}"#,
                "`do_sample`: expected a boolean, found a number",
            ),
        ] {
            assert_eq!(parse(json).unwrap_err().to_string(), message);
        }
    }
}
