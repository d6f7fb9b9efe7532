//! The `tokenizer.json` that the JavaScript converter writes for a GGUF file's tokenizer: the same data under
//! other names.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};
use sterna_format::gguf::{Array, Metadata, Value};
use sterna_text::Tokenizer;

use crate::error::{Result, bail};

/// Special tokens: their names here and in GGUF's `tokenizer.ggml.{name}_token_id`, with the spelling of the
/// separator that files have.
const SPECIAL: [(&str, &str); 7] = [
    ("bos", "bos"),
    ("eos", "eos"),
    ("pad", "padding"),
    ("unk", "unknown"),
    ("sep", "seperator"),
    ("cls", "cls"),
    ("mask", "mask"),
];

/// Special tokens added to a text by default.
const ADD_BOS: bool = true;
const ADD_EOS: bool = false;
const ADD_SPACE_PREFIX: bool = true;

/// The key of a GGUF file's tokenizer.
fn key(name: &str) -> String {
    format!("tokenizer.ggml.{name}")
}

/// Whether `json` is such a file, as opposed to one of Hugging Face's.
pub fn is_bundled(json: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Probe {
        model: Option<serde::de::IgnoredAny>,
        vocab: Option<serde::de::IgnoredAny>,
    }
    serde_json::from_slice::<Probe>(json)
        .is_ok_and(|probe| probe.model.is_none() && probe.vocab.is_some())
}

/// The content of such a file.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Bundled {
    /// Written for other readers: the kind follows from the file's content.
    #[serde(rename = "type", skip_deserializing)]
    kind: String,
    #[serde(skip_deserializing)]
    vocab_size: usize,
    vocab: Vocab,
    merges: Option<Vec<Merge>>,
    scores: Option<Vec<f32>>,
    token_types: Option<Vec<i32>>,
    #[serde(default)]
    special_tokens: serde_json::Map<String, serde_json::Value>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    add_space_prefix: Option<bool>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Vocab {
    List(Vec<String>),
    Map(HashMap<String, u32>),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Merge {
    Joined(String),
    Pair(String, String),
}

impl Bundled {
    /// The equivalent of the tokenizer of a GGUF file; `None` if that has no vocabulary.
    ///
    /// Errors: keys of the wrong type.
    pub fn from_gguf(metadata: &Metadata) -> Result<Option<Bundled>> {
        let array = |name: &str| match metadata.get(&key(name)) {
            Some(Value::Array(array)) => Some(array),
            _ => None,
        };
        let Some(Array::String(tokens)) = array("tokens") else {
            return Ok(None);
        };
        let merges = match array("merges") {
            Some(Array::String(merges)) => {
                let joined = merges.iter().map(|merge| Merge::Joined(merge.to_owned()));
                Some(joined.collect())
            }
            _ => None,
        };
        let scores = match array("scores") {
            Some(Array::F32(scores)) => Some(scores.clone()),
            _ => None,
        };
        let token_types = match array("token_type") {
            Some(Array::I32(types)) => Some(types.clone()),
            _ => None,
        };
        let mut special_tokens = serde_json::Map::new();
        for (name, gguf) in SPECIAL {
            if let Some(id) = metadata.get_u64(&key(&format!("{gguf}_token_id")))? {
                special_tokens.insert(name.to_owned(), id.into());
            }
        }
        let flag = |name: &str, default| -> Result<Option<bool>> {
            Ok(Some(metadata.get_bool(&key(name))?.unwrap_or(default)))
        };
        let mut bundled = Bundled {
            kind: String::new(),
            vocab_size: tokens.len(),
            vocab: Vocab::List(tokens.iter().map(str::to_owned).collect()),
            merges,
            scores,
            token_types,
            special_tokens,
            add_bos_token: flag("add_bos_token", ADD_BOS)?,
            add_eos_token: flag("add_eos_token", ADD_EOS)?,
            add_space_prefix: flag("add_space_prefix", ADD_SPACE_PREFIX)?,
        };
        bundled.kind = bundled.kind().to_owned();
        Ok(Some(bundled))
    }

    /// `bpe` or `unigram`: by merges if there are any; otherwise by scores, as in SentencePiece.
    pub fn kind(&self) -> &'static str {
        match (&self.merges, &self.scores) {
            (None, Some(_)) => "unigram",
            _ => "bpe",
        }
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        match &self.vocab {
            Vocab::List(tokens) => tokens.len(),
            Vocab::Map(ids) => ids.len(),
        }
    }

    /// The equivalent metadata of a GGUF file, of a model of this architecture.
    fn into_gguf(self, architecture: &str) -> Result<Metadata> {
        let model = match self.kind() {
            "unigram" => "llama",
            _ => "gpt2",
        };
        let tokens = match self.vocab {
            Vocab::List(tokens) => tokens,
            Vocab::Map(ids) => in_order(ids)?,
        };
        let mut metadata = Metadata::new();
        let mut put = |name: &str, value: Value| metadata.insert(key(name), value);
        let strings = |tokens: &[String]| Value::Array(Array::String(tokens.iter().collect()));
        put("model", Value::String(model.into()))?;
        put("tokens", strings(&tokens))?;
        if let Some(merges) = self.merges {
            let joined = merges.into_iter().map(|merge| match merge {
                Merge::Joined(merge) => merge,
                Merge::Pair(left, right) => format!("{left} {right}"),
            });
            put("merges", strings(&joined.collect::<Vec<_>>()))?;
        }
        if let Some(scores) = self.scores {
            put("scores", Value::Array(Array::F32(scores)))?;
        }
        if let Some(types) = self.token_types {
            put("token_type", Value::Array(Array::I32(types)))?;
        }
        for (name, gguf) in SPECIAL {
            let id = match self.special_tokens.get(name) {
                Some(serde_json::Value::Number(id)) => id.as_u64(),
                Some(serde_json::Value::String(token)) => {
                    (tokens.iter().position(|t| t == token)).map(|id| id as u64)
                }
                _ => None,
            };
            if let Some(id) = id.and_then(|id| u32::try_from(id).ok()) {
                put(&format!("{gguf}_token_id"), Value::U32(id))?;
            }
        }
        for (name, flag) in [
            ("add_bos_token", self.add_bos_token.unwrap_or(ADD_BOS)),
            ("add_eos_token", self.add_eos_token.unwrap_or(ADD_EOS)),
            (
                "add_space_prefix",
                self.add_space_prefix.unwrap_or(ADD_SPACE_PREFIX),
            ),
        ] {
            put(name, Value::Bool(flag))?;
        }
        let architecture = Value::String(architecture.into());
        metadata.insert("general.architecture", architecture)?;
        Ok(metadata)
    }
}

/// Reads such a file. `architecture` is the model's kind, which determines pre-tokenization.
///
/// Errors: it is not such a file.
pub fn tokenizer(json: &[u8], architecture: &str) -> Result<Tokenizer> {
    let bundled: Bundled = serde_json::from_slice(json)?;
    Ok(Tokenizer::from_gguf(&bundled.into_gguf(architecture)?)?)
}

/// The tokens in the order of their ids, which must be 0, 1, 2 and so on.
fn in_order(ids: HashMap<String, u32>) -> Result<Vec<String>> {
    let n = ids.len();
    let mut tokens = vec![None; n];
    for (token, id) in ids {
        match tokens.get_mut(id as usize) {
            Some(place @ None) => *place = Some(token),
            Some(Some(_)) => bail!(
                InvalidFile,
                "vocab: expected an id of its own for `{token}`, found {id}"
            ),
            None => bail!(InvalidFile, "vocab: expected an id below {n}, found {id}"),
        }
    }
    // As many tokens as ids, and no id twice.
    Ok(tokens.into_iter().flatten().collect())
}

#[cfg(test)]
#[path = "../../../../fuzz/checks/bundled_tokenizer.rs"]
mod check;

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_text::Encode;

    #[test]
    fn fuzzing_inputs() {
        sterna_testing::fuzz::replay("bundled_tokenizer", check::check);
    }

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
    fn a_tokenizer_goes_there_and_back() {
        let mut metadata = Metadata::new();
        let strings = |tokens: &[&str]| {
            Value::Array(Array::String(
                tokens.iter().map(|t| t.to_string()).collect(),
            ))
        };
        for (name, value) in [
            ("model", Value::String("gpt2".into())),
            ("tokens", strings(&["a", "b", "ab", "<s>", "<pad>"])),
            ("merges", strings(&["a b"])),
            ("token_type", Value::Array(Array::I32(vec![1, 1, 1, 3, 3]))),
            ("bos_token_id", Value::U32(3)),
            ("padding_token_id", Value::U32(4)),
            ("seperator_token_id", Value::U32(4)),
            ("add_bos_token", Value::Bool(false)),
            ("add_eos_token", Value::Bool(true)),
            ("add_space_prefix", Value::Bool(false)),
        ] {
            metadata.insert(key(name), value).unwrap();
        }
        let bundled = Bundled::from_gguf(&metadata).unwrap().unwrap();
        assert_eq!((bundled.kind(), bundled.n_vocab()), ("bpe", 5));
        let json = serde_json::to_vec(&bundled).unwrap();
        assert!(is_bundled(&json));
        let back: Bundled = serde_json::from_slice(&json).unwrap();
        let back = back.into_gguf("llama").unwrap();
        for (name, value) in metadata.iter() {
            assert_eq!(back.get(name), Some(value), "{name}");
        }
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
