//! The recommended sampling settings of a model, without invalid ones.
//!
//! An invalid recommendation is no reason to refuse a model: files in use have a `top_p` of 0. What is not a
//! recommendation, such as the tokens that end a text, must be valid.

use sterna_format::hf::{ConfigError, GenerationConfig};

/// Parses `json`, a `generation_config.json`, and returns for each recommendation that is ignored its key and
/// the reason.
///
/// Fails if it isn't JSON or has values of the wrong type.
pub(super) fn parse(json: &[u8]) -> Result<(GenerationConfig, Vec<String>), ConfigError> {
    let mut config = GenerationConfig::parse(json)?;
    let mut ignored = Vec::new();
    for (key, hint, is_valid, range) in [
        (
            "temperature",
            &mut config.temperature,
            (|t| t >= 0.0 && t.is_finite()) as fn(f32) -> bool,
            "of at least 0",
        ),
        (
            "top_p",
            &mut config.top_p,
            |p| p > 0.0 && p <= 1.0,
            "above 0 and at most 1",
        ),
        (
            "min_p",
            &mut config.min_p,
            |p| (0.0..=1.0).contains(&p),
            "from 0 to 1",
        ),
        (
            "repetition_penalty",
            &mut config.repetition_penalty,
            |x| x > 0.0 && x.is_finite(),
            "above 0",
        ),
    ] {
        if let Some(found) = hint.take_if(|hint| !is_valid(*hint as f32)) {
            ignored.push(format!("`{key}`: expected a number {range}, found {found}"));
        }
    }
    Ok((config, ignored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn odd_recommendations_are_ignored_by_name() {
        let (config, ignored) = parse(
            br#"{"do_sample": true, "temperature": -1, "top_p": 0.0, "min_p": 2,
                 "repetition_penalty": 1e-60, "eos_token_id": [3]}"#,
        )
        .unwrap();
        let expected = GenerationConfig::parse(br#"{"do_sample": true, "eos_token_id": [3]}"#);
        assert_eq!(config, expected.unwrap());
        let expected = [
            "`temperature`: expected a number of at least 0, found -1",
            "`top_p`: expected a number above 0 and at most 1, found 0",
            "`min_p`: expected a number from 0 to 1, found 2",
        ];
        assert_eq!(ignored[..3], expected);
        assert!(
            ignored[3].starts_with("`repetition_penalty`: expected a number above 0, found 0.0")
        );
        assert_eq!(ignored.len(), 4);
    }

    #[test]
    fn good_recommendations_stay_and_wrong_files_are_refused() {
        let json = br#"{"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0.05}"#;
        let (config, ignored) = parse(json).unwrap();
        assert_eq!(config, GenerationConfig::parse(json).unwrap());
        assert_eq!(ignored, [""; 0]);
        for json in [r#"{"eos_token_id": "x"}"#, "[]", "{"] {
            assert!(parse(json.as_bytes()).is_err(), "{json}");
        }
    }
}
