//! The `tokenizer.json` that the JavaScript converter makes of a GGUF file's tokenizer: the same
//! facts under other names.

use std::collections::HashMap;

use anyhow::{Result, bail};
use serde::Deserialize;
use sterna_format::gguf::{Array, Metadata, Value};
use sterna_text::Tokenizer;

/// Whether `json` is such a file, and not one of Hugging Face's.
pub(super) fn is_bundled(json: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Probe {
        model: Option<serde::de::IgnoredAny>,
        vocab: Option<serde::de::IgnoredAny>,
    }
    serde_json::from_slice::<Probe>(json)
        .is_ok_and(|probe| probe.model.is_none() && probe.vocab.is_some())
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Bundled {
    vocab: Vocab,
    merges: Option<Vec<Merge>>,
    scores: Option<Vec<f32>>,
    token_types: Option<Vec<i32>>,
    #[serde(default)]
    special_tokens: HashMap<String, serde_json::Value>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    add_space_prefix: Option<bool>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Vocab {
    List(Vec<String>),
    Map(HashMap<String, u32>),
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Merge {
    Joined(String),
    Pair(String, String),
}

/// Reads such a file. `architecture` is the model's kind, by which texts are cut into words.
pub(super) fn tokenizer(json: &[u8], architecture: &str) -> Result<Tokenizer> {
    let bundled: Bundled = serde_json::from_slice(json)?;
    let tokens = match bundled.vocab {
        Vocab::List(tokens) => tokens,
        Vocab::Map(ids) => in_order(ids)?,
    };
    // By merges if there are any; by scores, as SentencePiece does, if not.
    let kind = match (&bundled.merges, &bundled.scores) {
        (None, Some(_)) => "llama",
        _ => "gpt2",
    };
    let mut metadata = Metadata::new();
    let mut put = |key: &str, value: Value| metadata.insert(key, value);
    let strings = |tokens: &[String]| Value::Array(Array::String(tokens.iter().collect()));
    put("general.architecture", Value::String(architecture.into()))?;
    put("tokenizer.ggml.model", Value::String(kind.into()))?;
    put("tokenizer.ggml.tokens", strings(&tokens))?;
    if let Some(merges) = bundled.merges {
        let joined = merges.into_iter().map(|merge| match merge {
            Merge::Joined(merge) => merge,
            Merge::Pair(left, right) => format!("{left} {right}"),
        });
        put(
            "tokenizer.ggml.merges",
            strings(&joined.collect::<Vec<_>>()),
        )?;
    }
    if let Some(scores) = bundled.scores {
        put("tokenizer.ggml.scores", Value::Array(Array::F32(scores)))?;
    }
    if let Some(types) = bundled.token_types {
        put("tokenizer.ggml.token_type", Value::Array(Array::I32(types)))?;
    }
    for (name, key) in [
        ("bos", "bos"),
        ("eos", "eos"),
        ("pad", "padding"),
        ("unk", "unknown"),
        ("sep", "separator"),
        ("cls", "cls"),
        ("mask", "mask"),
    ] {
        let id = match bundled.special_tokens.get(name) {
            Some(serde_json::Value::Number(id)) => id.as_u64(),
            Some(serde_json::Value::String(token)) => {
                (tokens.iter().position(|t| t == token)).map(|id| id as u64)
            }
            _ => None,
        };
        if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
            put(&format!("tokenizer.ggml.{key}_token_id"), Value::U32(id))?;
        }
    }
    for (key, flag) in [
        ("add_bos_token", bundled.add_bos_token.unwrap_or(true)),
        ("add_eos_token", bundled.add_eos_token.unwrap_or(false)),
        ("add_space_prefix", bundled.add_space_prefix.unwrap_or(true)),
    ] {
        put(&format!("tokenizer.ggml.{key}"), Value::Bool(flag))?;
    }
    Ok(Tokenizer::from_gguf(&metadata)?)
}

/// The tokens in the order of their ids, which must be 0, 1, 2 and so on.
fn in_order(ids: HashMap<String, u32>) -> Result<Vec<String>> {
    let n = ids.len();
    let mut tokens = vec![None; n];
    for (token, id) in ids {
        match tokens.get_mut(id as usize) {
            Some(place @ None) => *place = Some(token),
            Some(Some(_)) => bail!("vocab: expected an id of its own for `{token}`, found {id}"),
            None => bail!("vocab: expected an id below {n}, found {id}"),
        }
    }
    // As many tokens as places, and no place taken twice.
    Ok(tokens.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_text::Encode;

    #[test]
    fn a_byte_level_tokenizer() {
        let json = br#"{"type":"bpe","vocab":{"a":0,"b":1,"ab":2,"<s>":3},"vocabSize":4,"merges":["a b"],
            "scores":null,"tokenTypes":[1,1,1,3],"specialTokens":{"bos":3,"eos":null},"addBosToken":true}"#;
        assert!(is_bundled(json));
        let tokenizer = tokenizer(json, "llama").unwrap();
        let ids = tokenizer.encode("abba", Encode::TEXT).unwrap();
        assert_eq!(ids, [3, 2, 1, 0]);
    }

    #[test]
    fn a_sentencepiece_tokenizer() {
        let json = r#"{"type":"unigram","vocab":["<unk>","<s>","</s>","▁","a","▁a"],"merges":null,
            "scores":[0,0,0,-1,-2,-0.5],"tokenTypes":[2,3,3,1,1,1],
            "specialTokens":{"bos":"<s>","eos":2,"unk":0}}"#;
        let tokenizer = tokenizer(json.as_bytes(), "llama").unwrap();
        let ids = tokenizer.encode("a a", Encode::TEXT).unwrap();
        assert_eq!(ids, [1, 5, 5]);
        assert_eq!(tokenizer.eos(), Some(2));
    }

    #[test]
    fn what_is_not_a_vocabulary() {
        assert!(!is_bundled(br#"{"model":{"vocab":{}},"version":"1.0"}"#));
        assert!(!is_bundled(b"nonsense"));
        for json in [
            r#"{"vocab":{"a":0,"b":0}}"#,
            r#"{"vocab":{"a":1}}"#,
            r#"{"vocab":{"a":4294967296}}"#,
            r#"{"vocab":7}"#,
        ] {
            assert!(tokenizer(json.as_bytes(), "llama").is_err(), "{json}");
        }
    }
}
