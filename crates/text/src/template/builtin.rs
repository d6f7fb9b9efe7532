//! Templates for models that ship none.

use super::{ChatTemplate, TemplateError};
use crate::{SpecialTokens, Tokenizer};

/// A well-known way to write a conversation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChatFormat {
    /// `User: …<|eot_id|>Assistant: `, the form of BitNet b1.58 2B-4T.
    BitNet,
    /// `<|im_start|>user … <|im_end|>`.
    ChatMl,
    /// `<|start_header_id|>user<|end_header_id|> … <|eot_id|>`.
    Llama3,
    /// `[INST] … [/INST]` with `<<SYS>>` for the system message.
    Llama2,
    /// `[INST] … [/INST]` where these are tokens of the vocabulary.
    Mistral,
    /// `<start_of_turn>user … <end_of_turn>`.
    Gemma,
    /// `<|user|> … <|end|>`.
    Phi3,
    /// `<|user|> … </s>`.
    Zephyr,
    /// `User: …`, `Assistant: …` in plain text, for models that know no marks at all.
    Plain,
}

impl ChatFormat {
    /// The format that the vocabulary of a model, and its architecture as GGUF names it, give away.
    ///
    /// `None` for models without any token that marks a turn: base models, to be given raw text.
    pub fn detect(architecture: Option<&str>, tokenizer: &Tokenizer) -> Option<Self> {
        let has = |piece: &str| tokenizer.token_id(piece).is_some();
        let bitnet = architecture.is_some_and(|name| name.starts_with("bitnet"));
        if bitnet && has("<|eot_id|>") {
            Some(Self::BitNet)
        } else if has("<|im_start|>") && has("<|im_end|>") {
            Some(Self::ChatMl)
        } else if has("<|start_header_id|>") && has("<|eot_id|>") {
            Some(Self::Llama3)
        } else if has("<start_of_turn>") {
            Some(Self::Gemma)
        } else if has("<|user|>") && has("<|assistant|>") {
            Some(if has("<|end|>") {
                Self::Phi3
            } else {
                Self::Zephyr
            })
        } else if has("[INST]") && has("[/INST]") {
            Some(Self::Mistral)
        } else {
            None
        }
    }

    /// The template, in Jinja.
    pub fn source(self) -> &'static str {
        match self {
            Self::BitNet => include_str!("builtin/bitnet.jinja"),
            Self::ChatMl => include_str!("builtin/chatml.jinja"),
            Self::Llama3 => include_str!("builtin/llama3.jinja"),
            Self::Llama2 => include_str!("builtin/llama2.jinja"),
            Self::Mistral => include_str!("builtin/mistral.jinja"),
            Self::Gemma => include_str!("builtin/gemma.jinja"),
            Self::Phi3 => include_str!("builtin/phi3.jinja"),
            Self::Zephyr => include_str!("builtin/zephyr.jinja"),
            Self::Plain => include_str!("builtin/plain.jinja"),
        }
    }
}

impl ChatTemplate {
    /// The template of a well-known format.
    pub fn of_format(format: ChatFormat, specials: &SpecialTokens) -> Self {
        match Self::new(format.source(), specials) {
            Ok(template) => template,
            Err(TemplateError::Syntax { line, problem }) => {
                unreachable!(
                    "the built-in template {format:?} compiles, which a test checks: line {line}: {problem}"
                )
            }
            Err(error) => unreachable!("the built-in template {format:?} is short: {error}"),
        }
    }

    /// The template for a model that ships none, by what its vocabulary gives away; `None` for base models.
    pub fn default_for(architecture: Option<&str>, tokenizer: &Tokenizer) -> Option<Self> {
        let format = ChatFormat::detect(architecture, tokenizer)?;
        Some(Self::of_format(format, tokenizer.special_tokens()))
    }
}
