//! `trillim_config.json`: what a folder of engine files says about itself.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The file's name.
pub const METADATA_FILE: &str = "trillim_config.json";
/// The version that is written. Readers in use take this one, or this one and the next.
pub const METADATA_VERSION: u64 = 4;

/// What a folder of engine files is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BundleKind {
    /// A whole model.
    Model,
    /// A low-rank adapter.
    LoraAdapter,
}

/// What a folder of engine files says about itself. Unknown fields are ignored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BundleMetadata {
    /// Version of the program that wrote the folder.
    #[serde(rename = "trillim_version", default)]
    pub writer_version: String,
    /// Version of this file.
    pub format_version: u64,
    /// What the folder holds.
    #[serde(rename = "type")]
    pub kind: BundleKind,
    /// What was done to the weights, such as `ternary`.
    #[serde(default)]
    pub quantization: String,
    /// What the maker of the checkpoint called it, or of an adapter its base; may be empty.
    #[serde(default)]
    pub source_model: String,
    /// Name of the [`ArchType`](super::ArchType).
    #[serde(default)]
    pub architecture: String,
    /// Processors that the files are for.
    #[serde(default)]
    pub platforms: Vec<String>,
    /// SHA-256 of [`identity`], in hexadecimal.
    #[serde(default)]
    pub base_model_config_hash: String,
    /// Whether the tokenizer runs code that comes with the folder.
    #[serde(default)]
    pub remote_code: bool,
}

/// What `config` says about the shape of a model, as the text whose SHA-256 tells whether an adapter
/// fits: compact JSON with sorted keys, all in ASCII. Members of `text_config` replace those next to it,
/// except for the architectures.
///
/// `None` if `config` is not an object.
pub fn identity(config: &Value) -> Option<String> {
    let top = config.as_object()?;
    let text = top.get("text_config").and_then(Value::as_object);
    let find = |key: &str| {
        let inner = text.and_then(|text| text.get(key));
        inner.or_else(|| top.get(key)).cloned()
    };
    let heads = find("num_attention_heads").unwrap_or(Value::Null);
    let architectures = top.get("architectures").cloned();
    let architectures = architectures.or_else(|| find("architectures"));
    let mut identity = Map::new();
    // In this order, whatever the map does with it.
    for (key, value) in [
        ("architectures", architectures.unwrap_or(json!([]))),
        ("hidden_size", find("hidden_size").unwrap_or_default()),
        (
            "intermediate_size",
            find("intermediate_size").unwrap_or_default(),
        ),
        ("num_attention_heads", heads.clone()),
        (
            "num_hidden_layers",
            find("num_hidden_layers").unwrap_or_default(),
        ),
        (
            "num_key_value_heads",
            find("num_key_value_heads").unwrap_or(heads),
        ),
        ("vocab_size", find("vocab_size").unwrap_or_default()),
    ] {
        identity.insert(key.to_owned(), value);
    }
    Some(ascii(&Value::Object(identity).to_string()))
}

/// JSON text with everything beyond ASCII escaped, as UTF-16.
fn ascii(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_ascii() {
            out.push(c);
        } else {
            let mut units = [0; 2];
            for unit in c.encode_utf16(&mut units) {
                out.push_str(&format!("\\u{unit:04x}"));
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_sorted_and_compact() {
        let config = json!({
            "model_type": "x", "vocab_size": 9, "hidden_size": 4, "num_attention_heads": 2,
            "architectures": ["Ünit"], "num_hidden_layers": 3, "intermediate_size": 8,
        });
        assert_eq!(
            identity(&config).unwrap(),
            r#"{"architectures":["\u00dcnit"],"hidden_size":4,"intermediate_size":8,"num_attention_heads":2,"num_hidden_layers":3,"num_key_value_heads":2,"vocab_size":9}"#
        );
        let nested = json!({
            "architectures": ["Outer"], "vocab_size": 1,
            "text_config": {"architectures": ["Inner"], "vocab_size": 2, "num_key_value_heads": 7},
        });
        assert_eq!(
            identity(&nested).unwrap(),
            r#"{"architectures":["Outer"],"hidden_size":null,"intermediate_size":null,"num_attention_heads":null,"num_hidden_layers":null,"num_key_value_heads":7,"vocab_size":2}"#
        );
        assert_eq!(identity(&json!([])), None);
    }

    #[test]
    fn metadata_survives_a_round_trip() {
        let text = r#"{"trillim_version":"0.12.2","format_version":4,"type":"lora_adapter","quantization":"ternary","source_model":"","architecture":"bitnet","platforms":["x86_64","aarch64"],"base_model_config_hash":"ab","remote_code":false}"#;
        let metadata: BundleMetadata = serde_json::from_str(text).unwrap();
        assert_eq!(metadata.kind, BundleKind::LoraAdapter);
        assert_eq!(serde_json::to_string(&metadata).unwrap(), text);
        let least = r#"{"format_version":5,"type":"model","more":[]}"#;
        let metadata: BundleMetadata = serde_json::from_str(least).unwrap();
        assert_eq!(
            (metadata.format_version, metadata.kind),
            (5, BundleKind::Model)
        );
        assert!(serde_json::from_str::<BundleMetadata>(r#"{"type":"model"}"#).is_err());
    }
}
