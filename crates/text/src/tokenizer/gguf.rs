//! The tokenizer inside a GGUF file: metadata under `tokenizer.ggml.`.

use sterna_format::gguf::{Array, GgufError, Metadata};

use super::added::AddedTokens;
use super::bpe::Bpe;
use super::charsmap::Charsmap;
use super::decode::{Decoder, PieceStep};
use super::model::Model;
use super::normalize::{Bert, Normalizer};
use super::pieces::{Choice, DummyPrefix, PieceType, Pieces, added_tokens, merge_table};
use super::prefix::PrefixIndex;
use super::pretokenize::PreTokenizer;
use super::vocab::Vocab;
use super::wordpiece::WordPiece;
use super::{Parts, SpecialTokens, Tokenizer, TokenizerError, bytes, splits, world};

impl Tokenizer {
    /// Reads the tokenizer of a GGUF file.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Metadata`] if the file holds none or keys of the wrong type,
    /// [`TokenizerError::Unsupported`] for kinds other than `gpt2`, `llama`, `gemma4`, `t5`, `bert`
    /// and `rwkv`.
    pub fn from_gguf(metadata: &Metadata) -> Result<Self, TokenizerError> {
        let keys = Keys(metadata);
        let kind = metadata.require_str("tokenizer.ggml.model")?;
        let (mut parts, defaults) = match kind {
            "gpt2" => byte_level(&keys)?,
            "llama" => (
                sentence_pieces(&keys, Choice::Bpe)?,
                Around {
                    bos: true,
                    eos: false,
                },
            ),
            "gemma4" => (
                merged_pieces(&keys)?,
                Around {
                    bos: true,
                    eos: false,
                },
            ),
            "t5" => (
                sentence_pieces(&keys, Choice::Unigram)?,
                Around {
                    bos: false,
                    eos: true,
                },
            ),
            "bert" => (
                word_pieces(&keys)?,
                Around {
                    bos: true,
                    eos: true,
                },
            ),
            "rwkv" => (
                byte_pieces(&keys)?,
                Around {
                    bos: false,
                    eos: false,
                },
            ),
            other => {
                return Err(TokenizerError::Unsupported {
                    place: "tokenizer.ggml.model",
                    found: other.to_owned(),
                });
            }
        };
        keys.add_special_tokens(&mut parts, kind, defaults)?;
        Ok(Self::assemble(parts))
    }
}

impl From<GgufError> for TokenizerError {
    fn from(error: GgufError) -> Self {
        Self::Metadata(Box::new(error))
    }
}

/// Whether a text is put between special tokens unless the file says otherwise.
struct Around {
    bos: bool,
    eos: bool,
}

/// The metadata, with what several kinds of tokenizer ask of it.
struct Keys<'a>(&'a Metadata);

impl Keys<'_> {
    /// The pieces with their ids; `spell` changes how they are written.
    fn vocab(
        &self,
        spell: impl Fn(&str, PieceType) -> Option<String>,
    ) -> Result<Vocab, TokenizerError> {
        let tokens = self.0.require_strings("tokenizer.ggml.tokens")?;
        let types = self.types()?;
        let mut vocab = Vocab::with_capacity(tokens.len());
        for (id, token) in (0..).zip(tokens.iter()) {
            let kind = types.get(id as usize).copied().unwrap_or(PieceType::Normal);
            match spell(token, kind) {
                Some(spelling) => vocab.insert(&spelling, id)?,
                None => vocab.insert(token, id)?,
            }
        }
        Ok(vocab)
    }

    fn types(&self) -> Result<Vec<PieceType>, TokenizerError> {
        let types = self
            .0
            .get_i32s("tokenizer.ggml.token_type")?
            .unwrap_or_default();
        Ok(types
            .iter()
            .map(|number| PieceType::from_number(i64::from(*number)))
            .collect())
    }

    fn flag(&self, name: &str, default: bool) -> Result<bool, TokenizerError> {
        Ok(self
            .0
            .get_bool(&format!("tokenizer.ggml.{name}"))?
            .unwrap_or(default))
    }

    /// A token id, if the file names one that the vocabulary has. Some files write -1 for none.
    fn id(&self, name: &str, vocab: &Vocab) -> Result<Option<u32>, TokenizerError> {
        let number = self.0.get_i64(&format!("tokenizer.ggml.{name}_token_id"))?;
        Ok(number
            .and_then(|number| u32::try_from(number).ok())
            .filter(|id| vocab.piece(*id).is_some()))
    }

    /// Fills in the roles of special tokens and what goes around a text.
    fn add_special_tokens(
        &self,
        parts: &mut Parts,
        kind: &str,
        defaults: Around,
    ) -> Result<(), TokenizerError> {
        let id = |name: &str| self.id(name, &parts.vocab);
        let (mut bos, mut eos) = (id("bos")?, id("eos")?);
        let (cls, sep) = (id("cls")?, id("seperator")?.or(id("separator")?));
        let mut around = Around {
            bos: self.flag("add_bos_token", defaults.bos)?,
            eos: self.flag("add_eos_token", defaults.eos)?,
        };
        let specials = {
            let spelled =
                |id: Option<u32>| id.and_then(|id| parts.vocab.piece(id)).map(str::to_owned);
            SpecialTokens {
                bos: spelled(bos),
                eos: spelled(eos),
                unk: spelled(id("unknown")?),
                sep: spelled(sep),
                pad: spelled(id("padding")?),
                cls: spelled(cls),
                mask: spelled(id("mask")?),
            }
        };
        let ends = [eos, id("eot")?, id("eom")?];
        if kind == "bert" {
            // Text goes between a class token and a separator, which older files do not name.
            bos = cls.or(bos).or(parts.added.id("[CLS]"));
            eos = sep.or(eos).or(parts.added.id("[SEP]"));
            around.eos = self.flag("add_sep_token", around.eos)?;
        }
        if around.bos {
            parts.prefix.extend(bos);
        }
        if around.eos {
            parts.suffix.extend(eos);
        }
        parts.end_ids.extend(ends.into_iter().flatten());
        (parts.bos, parts.eos, parts.specials) = (bos, eos, specials);
        Ok(())
    }
}

fn byte_level(keys: &Keys<'_>) -> Result<(Parts, Around), TokenizerError> {
    let vocab = keys.vocab(|_, _| None)?;
    let added = added_tokens(&vocab, &keys.types()?);
    let architecture = keys.0.architecture()?.unwrap_or_default();
    let split = splits::choose(
        keys.0.get_str("tokenizer.ggml.pre")?,
        architecture,
        vocab.len(),
    );
    let merges = keys.0.require_strings("tokenizer.ggml.merges")?;
    let model = Model::Bpe(Bpe {
        ignore_merges: split.ignore_merges,
        forbidden: added
            .iter()
            .filter(|(_, token)| token.special)
            .map(|(id, _)| *id)
            .collect(),
        ..Bpe::new(merge_table(merges.iter(), &vocab))
    });
    let parts = Parts {
        pre_tokenizer: Some(split.pre_tokenizer()?),
        ..Parts::new(
            vocab,
            AddedTokens::new(added)?,
            model,
            Decoder::byte_level(),
        )
    };
    Ok((
        parts,
        Around {
            bos: split.adds_bos,
            eos: false,
        },
    ))
}

fn sentence_pieces(keys: &Keys<'_>, choice: Choice) -> Result<Parts, TokenizerError> {
    let vocab = keys.vocab(|_, _| None)?;
    let mut scores = keys
        .0
        .get_f32s("tokenizer.ggml.scores")?
        .unwrap_or_default()
        .into_owned();
    scores.resize(vocab.len(), 0.0);
    let charsmap = match keys.0.get_array("tokenizer.ggml.precompiled_charsmap")? {
        Some(Array::U8(blob)) if !blob.is_empty() => Some(Charsmap::parse(blob)?),
        Some(Array::I8(blob)) if !blob.is_empty() => {
            let blob: Vec<u8> = blob.iter().map(|byte| byte.cast_unsigned()).collect();
            Some(Charsmap::parse(&blob)?)
        }
        _ => None,
    };
    let prefixed = keys.flag("add_space_prefix", true)?;
    let mut parts = Pieces {
        scores,
        types: keys.types()?,
        choice,
        charsmap,
        dummy_prefix: if prefixed {
            DummyPrefix::Stretch
        } else {
            DummyPrefix::None
        },
        remove_extra_whitespaces: keys.flag("remove_extra_whitespaces", false)?,
        unknown: keys.id("unknown", &vocab)?,
        vocab,
    }
    .into_parts()?;
    let name = keys
        .0
        .get_str("general.name")?
        .unwrap_or_default()
        .to_lowercase();
    if keys.0.architecture()? == Some("phi3") || name.contains("phi-3") || name.contains("phi3") {
        // Phi-3's control tokens consume the space after them, which GGUF has no key for.
        parts.added = parts
            .added
            .stripping_right(|token| !["<unk>", "<s>", "<|endoftext|>"].contains(&token))?;
    }
    Ok(parts)
}

/// Pieces with marked spaces, which are merged by a table over whole texts, and not by scores.
fn merged_pieces(keys: &Keys<'_>) -> Result<Parts, TokenizerError> {
    let mut parts = sentence_pieces(keys, Choice::Bpe)?;
    let merges = keys.0.require_strings("tokenizer.ggml.merges")?;
    if let Model::Bpe(bpe) = &mut parts.model {
        bpe.merges = merge_table(merges.iter(), &parts.vocab);
    }
    Ok(parts)
}

/// Pieces of bytes, which are spelled as Python does.
fn byte_pieces(keys: &Keys<'_>) -> Result<Parts, TokenizerError> {
    let vocab = keys.vocab(|token, kind| match kind {
        PieceType::Normal => {
            let bytes = world::unescaped(token, true)?;
            Some(bytes::spell_all(&bytes))
        }
        _ => None,
    })?;
    let added = added_tokens(&vocab, &keys.types()?);
    world::parts(vocab, added)
}

/// GGUF writes `▁word` for a whole word and `word` for what continues one, where BERT itself has `word` and `##word`.
fn word_pieces(keys: &Keys<'_>) -> Result<Parts, TokenizerError> {
    let vocab = keys.vocab(|token, kind| match (kind, token.strip_prefix('▁')) {
        (PieceType::Normal, Some(word)) => Some(word.to_owned()),
        (PieceType::Normal, None) => Some(format!("##{token}")),
        _ => None,
    })?;
    let added = added_tokens(&vocab, &keys.types()?);
    let unknown = keys.id("unknown", &vocab)?.or_else(|| vocab.id(b"[UNK]"));
    let pieces = PrefixIndex::new(&vocab, |id| !added.contains_key(&id));
    let model = Model::WordPiece(WordPiece {
        continuing_subword_prefix: "##".into(),
        max_chars: 100,
        unknown,
        pieces,
    });
    let decoder = Decoder {
        pieces: vec![
            PieceStep::WordPiece {
                prefix: "##".into(),
            },
            PieceStep::CleanUp,
        ],
        ..Decoder::default()
    };
    Ok(Parts {
        normalizer: Some(Normalizer::Bert(Bert {
            clean_text: true,
            handle_chinese_chars: true,
            strip_accents: true,
            lowercase: true,
        })),
        pre_tokenizer: Some(PreTokenizer::Bert),
        ..Parts::new(vocab, AddedTokens::new(added)?, model, decoder)
    })
}
