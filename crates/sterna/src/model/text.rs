//! The text side of a model: its tokenizer and chat template, from whichever files contain them.

use sterna_format::gguf::Metadata;
use sterna_format::hf::TokenizerConfig;
use sterna_text::{ChatTemplate, Tokenizer, TokenizerError};

use super::companions::RWKV_VOCAB;
use super::{Header, ModelFiles, PackageHeader, bundled};
use crate::error::{Context, Result};

/// The metadata key of the kind of a GGUF file's tokenizer.
const GGUF_TOKENIZER: &str = "tokenizer.ggml.model";
/// The metadata key of a GGUF file's template.
const GGUF_TEMPLATE: &str = "tokenizer.chat_template";

/// What llama.cpp's converter writes for RWKV instead of a template.
const RWKV_TEMPLATE: &str = "rwkv-world";

/// A GGUF file without tensors that holds the tokenizer and the template of a package.
pub const GGUF_TOKENIZER_FILE: &str = "tokenizer.gguf";

impl ModelFiles {
    /// The tokenizer; `None` if the model has none.
    ///
    /// Errors: a tokenizer that can't be read.
    pub fn tokenizer(&self) -> Result<Option<Tokenizer>> {
        if let Some(metadata) = self.gguf_text() {
            let kind = metadata.get_str(GGUF_TOKENIZER);
            return match kind.with_context(|| self.name())? {
                None | Some("none" | "no_vocab") => Ok(None),
                Some(_) => Tokenizer::from_gguf(metadata)
                    .map(Some)
                    .with_context(|| self.name()),
            };
        }
        match &self.header {
            Header::Gguf { .. } => unreachable!("its metadata were taken above"),
            Header::SafeTensors { .. } | Header::Bundle(_) => {
                let config = self.tokenizer_config()?;
                let json = |bytes: &[u8]| Tokenizer::from_hf_json(bytes, Some(&config));
                if let Some(tokenizer) = self.parsed("tokenizer.json", json)? {
                    return Ok(Some(tokenizer));
                }
                let model = |bytes: &[u8]| from_tokenizer_model(bytes, &config);
                if let Some(tokenizer) = self.parsed("tokenizer.model", model)? {
                    return Ok(Some(tokenizer));
                }
                let vocab = |bytes: &[u8]| Tokenizer::from_rwkv_vocab(bytes, Some(&config));
                self.parsed(RWKV_VOCAB, vocab)
            }
            Header::Package(header) => self.package_tokenizer(header),
        }
    }

    /// The metadata of a GGUF file, or those that a package adopted from one.
    pub fn gguf_text(&self) -> Option<&Metadata> {
        match &self.header {
            Header::Gguf { metadata, .. } => Some(metadata),
            Header::SafeTensors { .. } | Header::Bundle(_) => None,
            Header::Package(header) => header.gguf_text.as_ref(),
        }
    }

    /// The tokenizer of a package: a Hugging Face file, a file made of GGUF's keys, or SentencePiece's,
    /// distinguished by their contents, as manifests call the first two by one name; or RWKV's, which has its own.
    fn package_tokenizer(&self, header: &PackageHeader) -> Result<Option<Tokenizer>> {
        let entry = header.package.manifest().tokenizer.as_ref();
        let config = self.tokenizer_config()?;
        let json = entry.and_then(|entry| entry.file.as_deref());
        let json = json.unwrap_or("tokenizer.json");
        if let Some(bytes) = self.beside(json)? {
            let tokenizer = if bundled::is_bundled(&bytes) {
                let architecture = self.architecture()?.unwrap_or_default();
                bundled::tokenizer(&bytes, &architecture)
            } else if bytes.first() == Some(&FIELD_1) {
                from_tokenizer_model(&bytes, &config).map_err(Into::into)
            } else if json == RWKV_VOCAB {
                Tokenizer::from_rwkv_vocab(&bytes, Some(&config)).map_err(Into::into)
            } else {
                self.hf_tokenizer(header, &bytes, config)
            };
            let tokenizer = tokenizer.with_context(|| format!("{}: {json}", self.name()))?;
            return Ok(Some(tokenizer));
        }
        let model = entry.and_then(|entry| entry.sentencepiece_model.as_deref());
        let model = model.unwrap_or("tokenizer.model");
        let read = |bytes: &[u8]| from_tokenizer_model(bytes, &config);
        self.parsed(model, read)
    }

    /// The tokenizer in a Hugging Face file of a package. Where no other file names the BOS token, its id in
    /// the configuration does, or else its usual name.
    fn hf_tokenizer(
        &self,
        header: &PackageHeader,
        json: &[u8],
        mut config: TokenizerConfig,
    ) -> Result<Tokenizer> {
        let tokenizer = Tokenizer::from_hf_json(json, Some(&config))?;
        let configured = (header.hf_config().ok())
            .and_then(|hf| hf.config.get("bos_token_id")?.as_u64())
            .and_then(|id| u32::try_from(id).ok());
        let usual = tokenizer
            .bos()
            .filter(|_| config.add_bos_token == Some(true));
        let bos = configured.or(usual).and_then(|id| tokenizer.piece(id));
        let (None, Some(bos)) = (&config.bos_token, bos) else {
            return Ok(tokenizer);
        };
        config.bos_token = Some(bos.to_owned());
        Ok(Tokenizer::from_hf_json(json, Some(&config))?)
    }

    /// The tokenizer; fails if the model has none.
    ///
    /// Errors: as for [`ModelFiles::tokenizer`], and if there is none.
    pub fn require_tokenizer(&self) -> Result<Tokenizer> {
        self.tokenizer()?.with_context(|| {
            let expected = match self.header {
                Header::Gguf { .. } => "a tokenizer in the metadata (tokenizer.ggml.model)",
                Header::SafeTensors { .. } | Header::Package(_) | Header::Bundle(_) => {
                    "tokenizer.json, tokenizer.model or rwkv_vocab_v20230424.txt beside the weights"
                }
            };
            format!("{}: text needs {expected}, found none", self.name())
        })
    }

    /// The token that a text begins with, if the model has one: the one that its tokenizer adds, or else the
    /// one that its files name as BOS.
    ///
    /// Tokens that according to the files aren't added (`add_bos_token`) are excluded, and those that also
    /// end texts: GGUF files need some id, and give that of `<|endoftext|>` for models that have no BOS.
    ///
    /// Errors: keys of the wrong type.
    pub fn text_start(&self, tokenizer: &Tokenizer) -> Result<Option<u32>> {
        if tokenizer.adds_bos() {
            return Ok(tokenizer.bos());
        }
        let added = match self.gguf_text() {
            Some(metadata) => metadata
                .get_bool("tokenizer.ggml.add_bos_token")
                .with_context(|| self.name())?,
            None => self.tokenizer_config()?.add_bos_token,
        };
        // Without a name in the files, a tokenizer uses the usual names of tokens.
        let is_named = tokenizer.special_tokens().bos.is_some();
        let may_begin = is_named && added != Some(false);
        Ok(tokenizer
            .bos()
            .filter(|bos| may_begin && !tokenizer.end_ids().contains(bos)))
    }

    /// The chat template: the model's own, or a default that fits its vocabulary. `None` for base models.
    ///
    /// Errors: a template that can't be read.
    pub fn chat_template(&self, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        self.chat_template_for(tokenizer, false)
    }

    /// The same for a conversation with tools, if `has_tools`: some models have a template of its own for that.
    ///
    /// Errors: a template that can't be read.
    pub fn chat_template_for(
        &self,
        tokenizer: &Tokenizer,
        has_tools: bool,
    ) -> Result<Option<ChatTemplate>> {
        match self.template_source_for(has_tools)? {
            Some(source) => ChatTemplate::new(&source, tokenizer.special_tokens())
                .map(Some)
                .with_context(|| self.name()),
            None => Ok(ChatTemplate::default_for(
                self.architecture()?.as_deref(),
                tokenizer,
            )),
        }
    }

    /// The template's text, if the model includes one: of several, the default.
    ///
    /// Errors: files that can't be read.
    pub fn template_source(&self) -> Result<Option<String>> {
        self.template_source_for(false)
    }

    fn template_source_for(&self, has_tools: bool) -> Result<Option<String>> {
        if let Some(metadata) = self.gguf_text() {
            let source = metadata
                .get_str(GGUF_TEMPLATE)
                .with_context(|| self.name())?;
            // The name of a format, where others have a template.
            let source = source.filter(|&source| source != RWKV_TEMPLATE);
            return Ok(source.map(str::to_owned));
        }
        let text = |bytes: &[u8]| std::str::from_utf8(bytes).map(str::to_owned);
        if let Some(source) = self.parsed("chat_template.jinja", text)? {
            return Ok(Some(source));
        }
        // A separate file has the template under the same key as the tokenizer's configuration.
        let own = self
            .parsed("chat_template.json", TokenizerConfig::parse)?
            .unwrap_or_default();
        let template = own.chat_template.or(self.tokenizer_config()?.chat_template);
        let source = template.as_ref();
        let source = source.and_then(|template| ChatTemplate::choose(template, has_tools));
        Ok(source.map(str::to_owned))
    }

    /// The model's kind, which selects default templates.
    fn architecture(&self) -> Result<Option<String>> {
        if let Some(metadata) = self.gguf_text() {
            let name = metadata.architecture().with_context(|| self.name())?;
            return Ok(name.map(str::to_owned));
        }
        match &self.header {
            Header::Gguf { .. } => unreachable!("its metadata were taken above"),
            Header::SafeTensors { .. } | Header::Bundle(_) => {
                Ok(self.config()?.and_then(|config| config.model_type))
            }
            // A package that can't be run still has a vocabulary and templates.
            Header::Package(header) => {
                let named = || header.package.manifest().model_type.clone();
                let config = header.config().ok();
                Ok(config
                    .and_then(|config| config.model_type)
                    .or_else(|| Some(named())))
            }
        }
    }

    /// `tokenizer_config.json`; for a package without one, what its manifest says; or an empty one.
    fn tokenizer_config(&self) -> Result<TokenizerConfig> {
        if let Some(config) = self.parsed("tokenizer_config.json", TokenizerConfig::parse)? {
            return Ok(config);
        }
        let mut config = TokenizerConfig::default();
        if let Header::Package(header) = &self.header
            && let Some(entry) = &header.package.manifest().tokenizer
        {
            let flag = |key: &str| entry.extra.get(key).and_then(|flag| flag.as_bool());
            config.add_bos_token = flag("addBosToken");
            config.add_eos_token = flag("addEosToken");
        }
        Ok(config)
    }
}

/// The first byte of SentencePiece's files: the tag of their first field.
const FIELD_1: u8 = 0x0a;

/// Reads a file that two kinds of tokenizer call `tokenizer.model`: SentencePiece's protocol buffer, which
/// begins with its field 1, and tiktoken's lines of base64, as in Llama 3.
fn from_tokenizer_model(
    file: &[u8],
    config: &TokenizerConfig,
) -> Result<Tokenizer, TokenizerError> {
    match file.first() {
        Some(&FIELD_1) => Tokenizer::from_sentencepiece(file, Some(config)),
        _ => Tokenizer::from_tiktoken(file, None, Some(config)),
    }
}
