//! The files of a package that are not shards: tokenizer and template.

use bytes::Bytes;
use serde_json::{Map, Value, json};
use sterna::{Bundled, Context, GGUF_TOKENIZER_FILE, Header, ModelFiles, RWKV_VOCAB, Result};
use sterna_format::gguf::{self, Metadata};
use sterna_format::rdrr::TokenizerEntry;

use crate::event::{Notify, warn_of};

/// Files of a Hugging Face folder that a package contains unchanged.
const TAKEN: [&str; 9] = [
    "tokenizer.json",
    "tokenizer.model",
    RWKV_VOCAB,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The name of a tokenizer that the JavaScript runtime reads.
const BUNDLED: &str = "tokenizer.json";

/// The text side of a model in a package.
pub(super) struct Companions {
    /// Names and contents.
    pub(super) files: Vec<(String, Bytes)>,
    pub(super) tokenizer: Option<TokenizerEntry>,
    /// Every token that ends a text.
    pub(super) eos: Vec<u32>,
    pub(super) has_chat_template: bool,
}

impl Companions {
    /// Those of the model in `files`.
    pub(super) fn of(files: &ModelFiles, notify: &Notify<'_>) -> Result<Companions> {
        let mut eos = files
            .config()?
            .map(|config| config.eos_token_id)
            .unwrap_or_default();
        let mut warnings = Vec::new();
        eos.extend(files.generation_config(&mut warnings)?.eos_token_id);
        warn_of(warnings, notify);
        let mut companions = Companions {
            files: Vec::new(),
            tokenizer: None,
            eos: Vec::new(),
            has_chat_template: false,
        };
        if let Some(tokenizer) = files.tokenizer()? {
            if eos.is_empty() {
                eos.extend(tokenizer.end_ids());
            }
            companions.has_chat_template = files.chat_template(&tokenizer)?.is_some();
        }
        eos.sort_unstable();
        eos.dedup();
        companions.eos = eos;
        match files.header() {
            Header::Gguf { metadata, .. } => companions.take_gguf(metadata)?,
            Header::Package(header) => {
                let entry = header.package.manifest().tokenizer.clone();
                let named = entry
                    .iter()
                    .flat_map(|entry| [&entry.file, &entry.sentencepiece_model]);
                let mut names: Vec<&str> = named.flatten().map(String::as_str).collect();
                names.extend(TAKEN);
                names.push(GGUF_TOKENIZER_FILE);
                names.sort_unstable();
                names.dedup();
                for name in names {
                    if let Some(bytes) = files.beside(name)? {
                        companions.files.push((name.to_owned(), bytes));
                    }
                }
                companions.tokenizer = entry;
            }
            _ => companions.take_folder(files)?,
        }
        Ok(companions)
    }

    fn take_folder(&mut self, files: &ModelFiles) -> Result<()> {
        for name in TAKEN {
            if let Some(bytes) = files.beside(name)? {
                self.files.push((name.to_owned(), bytes));
            }
        }
        let has = |name| self.files.iter().find(|(file, _)| file == name);
        self.tokenizer = if let Some((name, bytes)) = has("tokenizer.json") {
            let (kind, n_vocab) = huggingface(bytes).with_context(|| name.clone())?;
            Some(TokenizerEntry {
                kind: "huggingface".into(),
                file: Some(name.clone()),
                vocab_size: n_vocab,
                tokenizer_type: kind,
                ..TokenizerEntry::default()
            })
        } else if let Some((name, _)) = has("tokenizer.model") {
            Some(TokenizerEntry {
                kind: "sentencepiece".into(),
                sentencepiece_model: Some(name.clone()),
                ..TokenizerEntry::default()
            })
        } else {
            has(RWKV_VOCAB).map(|(name, _)| TokenizerEntry {
                kind: "rwkv".into(),
                file: Some(name.clone()),
                ..TokenizerEntry::default()
            })
        };
        Ok(())
    }

    /// A GGUF file's tokenizer and template are copied unchanged, to a GGUF file without tensors; for the
    /// JavaScript runtime the vocabulary is also written in its own format.
    fn take_gguf(&mut self, metadata: &Metadata) -> Result<()> {
        let mut text = Metadata::new();
        for (key, value) in metadata.iter() {
            if key == "general.architecture" || key.starts_with("tokenizer.") {
                text.insert(key, value.clone())?;
            }
        }
        let Some(bundled) = Bundled::from_gguf(&text)? else {
            return Ok(());
        };
        let json = serde_json::to_vec(&bundled)?;
        let header = gguf::Writer::new(text)?.finish().header;
        self.files
            .push((GGUF_TOKENIZER_FILE.to_owned(), header.into()));
        self.files.push((BUNDLED.to_owned(), json.into()));
        self.tokenizer = Some(TokenizerEntry {
            kind: "bundled".into(),
            file: Some(BUNDLED.to_owned()),
            vocab_size: Some(bundled.n_vocab() as u64),
            tokenizer_type: Some(bundled.kind().to_owned()),
            extra: Map::from_iter([("ggufFile".to_owned(), json!(GGUF_TOKENIZER_FILE))]),
            ..TokenizerEntry::default()
        });
        Ok(())
    }
}

/// Bytes of the files beside `files` that a package contains unchanged.
pub(super) fn taken_bytes(files: &ModelFiles) -> Result<u64> {
    let mut sum = 0;
    for name in TAKEN {
        sum += files.beside(name)?.map_or(0, |bytes| bytes.len() as u64);
    }
    Ok(sum)
}

/// Kind and size of a `tokenizer.json`.
fn huggingface(bytes: &[u8]) -> Result<(Option<String>, Option<u64>)> {
    let json: Value = serde_json::from_slice(bytes)?;
    let model = &json["model"];
    let kind = model["type"].as_str().map(str::to_lowercase);
    let n_vocab = match &model["vocab"] {
        Value::Object(map) => Some(map.len() as u64),
        Value::Array(list) => Some(list.len() as u64),
        _ => None,
    };
    Ok((kind, n_vocab))
}
