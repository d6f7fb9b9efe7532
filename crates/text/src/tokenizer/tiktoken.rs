//! Reading tiktoken files: a line for each token, its bytes in base64 and its rank.

use std::collections::BTreeMap;

use base64::Engine as _;
use sterna_format::hf::TokenizerConfig;

use super::added::{AddedToken, AddedTokens};
use super::bpe::{Bpe, Merges};
use super::bytes;
use super::decode::Decoder;
use super::model::Model;
use super::pattern::GPT2;
use super::splits::{self, LLAMA3, O200K, QWEN2};
use super::vocab::Vocab;
use super::{Parts, Tokenizer, TokenizerError};

/// What a tiktoken file does not say: how text is split, and which special tokens there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TiktokenEncoding {
    /// GPT-2 and GPT-3 (`r50k_base`, `gpt2`).
    R50k,
    /// Codex (`p50k_base`).
    P50k,
    /// GPT-3.5 and GPT-4 (`cl100k_base`).
    Cl100k,
    /// GPT-4o (`o200k_base`).
    O200k,
    /// Llama 3's `tokenizer.model`.
    Llama3,
    /// Qwen's `qwen.tiktoken`.
    Qwen,
}

impl TiktokenEncoding {
    /// The encoding with this number of tokens.
    pub fn of_size(n_tokens: usize) -> Option<Self> {
        match n_tokens {
            50_256 => Some(Self::R50k),
            50_280 => Some(Self::P50k),
            100_256 => Some(Self::Cl100k),
            199_998 => Some(Self::O200k),
            128_000 => Some(Self::Llama3),
            151_643 => Some(Self::Qwen),
            _ => None,
        }
    }

    fn expression(self) -> &'static [&'static str] {
        match self {
            Self::R50k | Self::P50k => &[GPT2],
            Self::Cl100k | Self::Llama3 => &[LLAMA3],
            Self::O200k => &[O200K],
            Self::Qwen => &[QWEN2],
        }
    }

    fn special_tokens(self) -> Vec<(String, u32)> {
        let named = |names: &[(&str, u32)]| {
            names
                .iter()
                .map(|(name, id)| (name.to_string(), *id))
                .collect()
        };
        match self {
            Self::R50k | Self::P50k => named(&[("<|endoftext|>", 50_256)]),
            Self::Cl100k => named(&[
                ("<|endoftext|>", 100_257),
                ("<|fim_prefix|>", 100_258),
                ("<|fim_middle|>", 100_259),
                ("<|fim_suffix|>", 100_260),
                ("<|endofprompt|>", 100_276),
            ]),
            Self::O200k => named(&[("<|endoftext|>", 199_999), ("<|endofprompt|>", 200_018)]),
            Self::Llama3 => {
                let mut tokens: Vec<(String, u32)> = named(&[
                    ("<|begin_of_text|>", 128_000),
                    ("<|end_of_text|>", 128_001),
                    ("<|finetune_right_pad_id|>", 128_004),
                    ("<|start_header_id|>", 128_006),
                    ("<|end_header_id|>", 128_007),
                    ("<|eom_id|>", 128_008),
                    ("<|eot_id|>", 128_009),
                    ("<|python_tag|>", 128_010),
                ]);
                let reserved = [128_002, 128_003, 128_005]
                    .into_iter()
                    .chain(128_011..128_256);
                tokens.extend(
                    (0..)
                        .zip(reserved)
                        .map(|(n, id): (u32, u32)| (format!("<|reserved_special_token_{n}|>"), id)),
                );
                tokens
            }
            Self::Qwen => named(&[
                ("<|endoftext|>", 151_643),
                ("<|im_start|>", 151_644),
                ("<|im_end|>", 151_645),
            ]),
        }
    }
}

impl Tokenizer {
    /// Reads a tiktoken file; without an encoding, the number of tokens tells which it is. A
    /// `tokenizer_config.json` may add tokens and roles.
    ///
    /// # Errors
    ///
    /// If a line is not a token and its rank, or nothing tells the encoding.
    pub fn from_tiktoken(
        file: &[u8],
        encoding: Option<TiktokenEncoding>,
        config: Option<&TokenizerConfig>,
    ) -> Result<Self, TokenizerError> {
        let mut vocab = Vocab::new(file.len());
        let mut n_tokens = 0;
        for (number, line) in (1..).zip(file.split(|byte| *byte == b'\n')) {
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let bad = |problem: String| {
                TokenizerError::invalid(format!("tiktoken file, line {number}"), problem)
            };
            let space = line.iter().position(|byte| *byte == b' ');
            let (token, rank) =
                line.split_at(space.ok_or_else(|| bad("expected a token and a rank".into()))?);
            let token = base64::engine::general_purpose::STANDARD
                .decode(token)
                .map_err(|source| bad(format!("the token is not base64: {source}")))?;
            let rank = std::str::from_utf8(&rank[1..])
                .ok()
                .and_then(|rank| rank.trim().parse().ok());
            let rank = rank.ok_or_else(|| bad("the rank is not a number".into()))?;
            vocab.insert(&bytes::spell_all(&token), rank)?;
            n_tokens += 1;
        }
        let encoding = encoding
            .or_else(|| TiktokenEncoding::of_size(n_tokens))
            .ok_or_else(|| TokenizerError::Unsupported {
                place: "tiktoken file",
                found: format!("{n_tokens} tokens"),
            })?;
        let added: BTreeMap<u32, AddedToken> = encoding
            .special_tokens()
            .into_iter()
            .filter(|(_, id)| vocab.piece(*id).is_none())
            .map(|(name, id)| (id, AddedToken::plain(&name, true)))
            .collect();
        let model = Model::Bpe(Bpe {
            ignore_merges: true,
            ..Bpe::new(Merges::ById)
        });
        let mut parts = Parts {
            pre_tokenizer: Some(splits::single(encoding.expression()).pre_tokenizer()?),
            ..Parts::new(
                vocab,
                AddedTokens::new(added)?,
                model,
                Decoder::byte_level(),
            )
        };
        let (bos, eos) = match encoding {
            TiktokenEncoding::Llama3 => (Some("<|begin_of_text|>"), "<|end_of_text|>"),
            _ => (None, "<|endoftext|>"),
        };
        parts.specials.bos = bos.map(str::to_owned);
        parts.specials.eos = Some(eos.to_owned());
        parts
            .prefix
            .extend(bos.and_then(|token| parts.added.id(token)));
        if let Some(config) = config {
            parts.complete(config)?;
        }
        Ok(Self::assemble(parts))
    }
}
