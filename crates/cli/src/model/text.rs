//! The text side of a model: its tokenizer and chat template, from whichever files have them.

use anyhow::{Context, Result};
use sterna_format::hf::TokenizerConfig;
use sterna_text::{ChatTemplate, Tokenizer, TokenizerError};

use super::{Header, ModelFiles};

/// The metadata key of the kind of a GGUF file's tokenizer.
const GGUF_TOKENIZER: &str = "tokenizer.ggml.model";
/// The metadata key of a GGUF file's template.
const GGUF_TEMPLATE: &str = "tokenizer.chat_template";

/// A GGUF file without tensors that holds the tokenizer and the template of a package.
pub(crate) const GGUF_TOKENIZER_FILE: &str = "tokenizer.gguf";

impl ModelFiles {
    /// The tokenizer; `None` if the model comes without one.
    pub(crate) fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        match &self.header {
            Header::Gguf { metadata, .. } => {
                match metadata
                    .get_str(GGUF_TOKENIZER)
                    .with_context(|| self.name.clone())?
                {
                    None | Some("none" | "no_vocab") => Ok(None),
                    Some(_) => Tokenizer::from_gguf(metadata)
                        .map(Some)
                        .with_context(|| self.name.clone()),
                }
            }
            Header::SafeTensors { .. } => {
                let config = self.tokenizer_config()?;
                let json = |bytes: &[u8]| Tokenizer::from_hf_json(bytes, Some(&config));
                if let Some(tokenizer) = self.parsed("tokenizer.json", json)? {
                    return Ok(Some(tokenizer));
                }
                let model = |bytes: &[u8]| from_tokenizer_model(bytes, &config);
                self.parsed("tokenizer.model", model)
            }
        }
    }

    /// The tokenizer; fails if the model comes without one.
    pub(crate) fn require_tokenizer(&self) -> Result<Tokenizer> {
        self.tokenizer()?.with_context(|| {
            let expected = match self.header {
                Header::Gguf { .. } => "a tokenizer in the metadata (tokenizer.ggml.model)",
                Header::SafeTensors { .. } => {
                    "tokenizer.json or tokenizer.model beside the weights"
                }
            };
            format!("{}: text needs {expected}, found none", self.name)
        })
    }

    /// The token that a text by itself begins with, if the model has one: the one that its tokenizer
    /// puts there, or else the one that its files name as BOS.
    ///
    /// No such token is one that the files say isn't added (`add_bos_token`), nor one that ends texts
    /// too: GGUF files need some id, and give that of `<|endoftext|>` for models that have no BOS.
    pub(crate) fn text_start(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        if tokenizer.adds_bos() {
            return Ok(tokenizer.bos());
        }
        let added = match &self.header {
            Header::Gguf { metadata, .. } => metadata
                .get_bool("tokenizer.ggml.add_bos_token")
                .with_context(|| self.name.clone())?,
            Header::SafeTensors { .. } => self.tokenizer_config()?.add_bos_token,
        };
        // Without a name in the files, a tokenizer goes by what tokens are usually called.
        let is_named = tokenizer.special_tokens().bos.is_some();
        let may_begin = is_named && added != Some(false);
        Ok(tokenizer
            .bos()
            .filter(|bos| may_begin && !tokenizer.end_ids().contains(bos)))
    }

    /// The chat template: the model's own, or one that fits its vocabulary. `None` for base models.
    pub(crate) fn chat_template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        match self.template_source()? {
            Some(source) => ChatTemplate::new(&source, tokenizer.special_tokens())
                .map(Some)
                .with_context(|| self.name.clone()),
            None => Ok(ChatTemplate::default_for(
                self.architecture()?.as_deref(),
                tokenizer,
            )),
        }
    }

    /// The template's text, where the model ships one.
    fn template_source(&self) -> Result<Option<String>> {
        if let Header::Gguf { metadata, .. } = &self.header {
            let source = metadata
                .get_str(GGUF_TEMPLATE)
                .with_context(|| self.name.clone())?;
            return Ok(source.map(str::to_owned));
        }
        let text = |bytes: &[u8]| std::str::from_utf8(bytes).map(str::to_owned);
        if let Some(source) = self.parsed("chat_template.jinja", text)? {
            return Ok(Some(source));
        }
        // A file of its own has the template under the same key as the tokenizer's configuration.
        let own = self
            .parsed("chat_template.json", TokenizerConfig::parse)?
            .unwrap_or_default();
        let template = own.chat_template.or(self.tokenizer_config()?.chat_template);
        Ok(template.and_then(|template| template.default_template().map(str::to_owned)))
    }

    /// The model's kind, by which default templates are chosen.
    fn architecture(&self) -> Result<Option<String>> {
        match &self.header {
            Header::Gguf { metadata, .. } => {
                let name = metadata.architecture().with_context(|| self.name.clone())?;
                Ok(name.map(str::to_owned))
            }
            Header::SafeTensors { .. } => Ok(self.config()?.and_then(|config| config.model_type)),
        }
    }

    /// `tokenizer_config.json`, or the empty one.
    fn tokenizer_config(&self) -> Result<TokenizerConfig> {
        Ok(self
            .parsed("tokenizer_config.json", TokenizerConfig::parse)?
            .unwrap_or_default())
    }
}

/// Reads a file that two kinds of tokenizer call `tokenizer.model`: SentencePiece's protocol buffer,
/// which begins with its field 1, and tiktoken's lines of base64, as Llama 3 has it.
fn from_tokenizer_model(
    file: &[u8],
    config: &TokenizerConfig,
) -> Result<Tokenizer, TokenizerError> {
    const FIELD_1: u8 = 0x0a;
    match file.first() {
        Some(&FIELD_1) => Tokenizer::from_sentencepiece(file, Some(config)),
        _ => Tokenizer::from_tiktoken(file, None, Some(config)),
    }
}
