//! Strings to ids and back.

mod added;
mod bpe;
mod bytes;
mod charsmap;
mod decode;
mod error;
mod gguf;
mod hf;
mod model;
mod normalize;
mod pattern;
mod pieces;
mod prefix;
mod pretokenize;
mod sentencepiece;
mod specials;
mod splits;
mod stream;
mod tiktoken;
mod to_gguf;
mod unigram;
mod vocab;
mod wordpiece;
mod world;

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use crate::Prompt;
use added::{AddedTokens, Segment, overlaps};
use decode::{Decoder, Place};
use model::Model;
use normalize::Normalizer;
use pretokenize::{Piece, PreTokenizer};
use vocab::Vocab;

pub use error::TokenizerError;
pub use specials::SpecialTokens;
pub use stream::StreamDecoder;
pub use tiktoken::TiktokenEncoding;
pub use to_gguf::GgufTokenizer;

/// How to encode a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Encode {
    /// Put the model's own tokens around the text, such as a beginning-of-sequence token, where the tokenizer says so.
    pub add_special: bool,
    /// Recognise control tokens that are written out in the text.
    ///
    /// Only for text from a chat template: in text from a user, this would let the user write control tokens.
    pub parse_special: bool,
}

impl Encode {
    /// For a complete text: special tokens around it, none recognised in it.
    pub const TEXT: Self = Self {
        add_special: true,
        parse_special: false,
    };
    /// For a whole prompt by the user's own hand: special tokens written out in it count.
    pub const RAW: Self = Self {
        add_special: true,
        parse_special: true,
    };
    /// For a rendered chat template, which writes all its special tokens out.
    pub const TEMPLATE: Self = Self {
        add_special: false,
        parse_special: true,
    };
    /// For a stretch of plain text.
    pub const PLAIN: Self = Self {
        add_special: false,
        parse_special: false,
    };
}

/// How to decode ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Decode {
    /// Leave out control tokens.
    pub skip_special: bool,
}

/// Turns strings into the ids of one model, and ids into strings. Cheap to clone; clones share the vocabulary.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    parts: Arc<Parts>,
    /// Sorted, each once.
    end_ids: Arc<[u32]>,
}

/// Everything a tokenizer consists of, whichever file it came from.
#[derive(Debug)]
struct Parts {
    /// The vocabulary; added tokens may be outside.
    vocab: Vocab,
    added: AddedTokens,
    normalizer: Option<Normalizer>,
    pre_tokenizer: Option<PreTokenizer>,
    model: Model,
    /// Ids added before and after a text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    decoder: Decoder,
    specials: SpecialTokens,
    bos: Option<u32>,
    eos: Option<u32>,
    /// Those that the file names.
    end_ids: Vec<u32>,
    n_vocab: usize,
}

impl Tokenizer {
    /// Completes `parts`: which ids begin and end a text, and how many ids there are.
    fn assemble(mut parts: Parts) -> Self {
        let id = |token| parts.id(token);
        let ends: Vec<u32> = specials::known_ends(&parts.added).collect();
        let is_special = |id: &u32| parts.added.get(*id).is_some_and(|token| token.special);
        let bos = parts
            .bos
            .or_else(|| id(&parts.specials.bos))
            .or_else(|| parts.prefix.first().copied().filter(is_special))
            .or_else(|| specials::known_bos(&parts.added));
        let eos = parts
            .eos
            .or_else(|| id(&parts.specials.eos))
            .or(match ends[..] {
                [only] => Some(only),
                _ => None,
            });
        let highest_added = parts
            .added
            .iter()
            .last()
            .map_or(0, |(id, _)| id as usize + 1);
        (parts.bos, parts.eos) = (bos, eos);
        parts.n_vocab = parts.vocab.len().max(highest_added);
        let mut end_ids = std::mem::take(&mut parts.end_ids);
        end_ids.extend(ends.into_iter().chain(eos));
        Self {
            parts: Arc::new(parts),
            end_ids: Arc::default(),
        }
        .with_end_ids(end_ids)
    }

    /// This tokenizer with more ids that end a turn or a text, such as those of a `generation_config.json`.
    pub fn with_end_ids(mut self, ids: impl IntoIterator<Item = u32>) -> Self {
        let all: BTreeSet<u32> = self.end_ids.iter().copied().chain(ids).collect();
        self.end_ids = all.into_iter().collect();
        self
    }

    /// The ids of `text`.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Unspellable`] if the vocabulary has neither a spelling for a character nor an unknown token;
    /// [`TokenizerError::PatternGaveUp`] and [`TokenizerError::Expansion`] for tokenizer files that ask for
    /// unreasonable work on this text.
    pub fn encode(&self, text: &str, options: Encode) -> Result<Vec<u32>, TokenizerError> {
        self.encode_quoting(text, options, &[])
    }

    /// The ids of a prompt that a chat template made. Control tokens of the template count, those that the conversation
    /// spells stay text.
    ///
    /// # Errors
    ///
    /// As [`Tokenizer::encode`].
    pub fn encode_prompt(&self, prompt: &Prompt) -> Result<Vec<u32>, TokenizerError> {
        self.encode_quoting(prompt.text(), Encode::TEMPLATE, prompt.quoted())
    }

    /// Where `text` spells control tokens.
    pub(crate) fn control_tokens(&self, text: &str) -> Vec<Range<usize>> {
        self.parts.added.control_tokens(text)
    }

    /// The ids of `text`, in which `quoted` are stretches whose control tokens stay text.
    fn encode_quoting(
        &self,
        text: &str,
        options: Encode,
        quoted: &[Range<usize>],
    ) -> Result<Vec<u32>, TokenizerError> {
        let parts = &*self.parts;
        let mut ids = Vec::with_capacity(text.len() / 4 + parts.prefix.len() + parts.suffix.len());
        if options.add_special {
            ids.extend(&parts.prefix);
        }
        for segment in parts.added.split_raw(text, options.parse_special, quoted) {
            match segment {
                Segment::Token(id) => ids.push(id),
                Segment::Text {
                    text,
                    at_start,
                    offset,
                } => {
                    // Normalising moves places, so a stretch with a quotation is taken as text whole.
                    let parse_special =
                        options.parse_special && !overlaps(quoted, offset..offset + text.len());
                    parts.encode_raw(text, at_start, parse_special, &mut ids)?;
                }
            }
        }
        if options.add_special {
            ids.extend(&parts.suffix);
        }
        Ok(ids)
    }

    /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD; ids outside the vocabulary say nothing.
    pub fn decode(&self, ids: &[u32], options: Decode) -> String {
        match String::from_utf8(self.decode_bytes(ids, options)) {
            Ok(text) => text,
            Err(error) => String::from_utf8_lossy(error.as_bytes()).into_owned(),
        }
    }

    /// The bytes of `ids`, which need not be UTF-8 where a text was cut inside a character.
    pub fn decode_bytes(&self, ids: &[u32], options: Decode) -> Vec<u8> {
        let parts = &*self.parts;
        let pieces: Vec<&str> = ids
            .iter()
            .filter_map(|id| parts.spelling(*id, options))
            .collect();
        let mut bytes = Vec::new();
        for (index, piece) in pieces.iter().enumerate() {
            let place = Place {
                first: index == 0,
                last: index + 1 == pieces.len(),
                previous: index.checked_sub(1).map(|before| pieces[before]),
            };
            bytes.extend_from_slice(&parts.decoder.piece(piece, place));
        }
        parts.decoder.finish(bytes)
    }

    /// The bytes that `id` adds to a text, anywhere but at its start; `None` for control tokens, and for ids that
    /// nothing uses.
    pub fn token_bytes(&self, id: u32) -> Option<Vec<u8>> {
        let options = Decode { skip_special: true };
        let place = Place {
            first: false,
            last: false,
            previous: None,
        };
        let piece = self.parts.spelling(id, options)?;
        Some(self.parts.decoder.piece(piece, place).into_owned())
    }

    /// A decoder that takes ids one by one.
    pub fn stream(&self, options: Decode) -> StreamDecoder {
        StreamDecoder::new(self.clone(), options)
    }

    /// The piece of `id` as the vocabulary spells it (`Ġthe`, `▁the`, `<0x0A>`); `None` for ids nothing uses.
    pub fn piece(&self, id: u32) -> Option<&str> {
        match self.parts.added.get(id) {
            Some(token) => Some(&token.content),
            None => self.parts.vocab.piece(id),
        }
    }

    /// The id of a piece, spelled as the vocabulary spells it; added tokens come first.
    pub fn token_id(&self, piece: &str) -> Option<u32> {
        self.parts
            .added
            .id(piece)
            .or_else(|| self.parts.vocab.id(piece.as_bytes()))
    }

    /// Whether `id` is a control token.
    pub fn is_special(&self, id: u32) -> bool {
        self.parts.added.get(id).is_some_and(|token| token.special)
    }

    /// One more than the highest id. A model's own vocabulary may be padded beyond.
    pub fn n_vocab(&self) -> usize {
        self.parts.n_vocab
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.parts.bos
    }

    /// The token that ends a text, as the model's files name it.
    pub fn eos(&self) -> Option<u32> {
        self.parts.eos
    }

    /// Whether [`Encode::add_special`] puts [`Tokenizer::bos`] in front.
    pub fn adds_bos(&self) -> bool {
        self.parts.bos.is_some() && self.parts.prefix.first() == self.parts.bos.as_ref()
    }

    /// Every id that ends a turn or a text, sorted: those that the files name, and control tokens whose names are known
    /// to, such as `<|eot_id|>` and `<|im_end|>`.
    pub fn end_ids(&self) -> &[u32] {
        &self.end_ids
    }

    /// The special tokens by their role, as chat templates refer to them.
    pub fn special_tokens(&self) -> &SpecialTokens {
        &self.parts.specials
    }
}

impl Parts {
    /// A tokenizer that takes text as it is and puts nothing around it.
    fn new(vocab: Vocab, added: AddedTokens, model: Model, decoder: Decoder) -> Self {
        Self {
            vocab,
            added,
            normalizer: None,
            pre_tokenizer: None,
            model,
            prefix: Vec::new(),
            suffix: Vec::new(),
            decoder,
            specials: SpecialTokens::default(),
            bos: None,
            eos: None,
            end_ids: Vec::new(),
            n_vocab: 0,
        }
    }

    /// Encodes text that holds no token that is looked for in raw text.
    fn encode_raw(
        &self,
        text: &str,
        at_start: bool,
        parse_special: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let text = match &self.normalizer {
            Some(normalizer) => normalizer.normalize(text, at_start)?,
            None => Cow::Borrowed(text),
        };
        for segment in self.added.split_normalized(&text, at_start, parse_special) {
            match segment {
                Segment::Token(id) => ids.push(id),
                Segment::Text { text, at_start, .. } => {
                    self.encode_normalized(text, at_start, ids)?;
                }
            }
        }
        Ok(())
    }

    fn encode_normalized(
        &self,
        text: &str,
        at_start: bool,
        ids: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let piece = Piece {
            text: Cow::Borrowed(text),
            at_start,
        };
        let mut words = Vec::new();
        match &self.pre_tokenizer {
            Some(pre_tokenizer) => pre_tokenizer.split(piece, &mut words)?,
            None => words.push(piece),
        }
        for word in &words {
            self.model.encode(&self.vocab, &word.text, ids)?;
        }
        Ok(())
    }

    /// The piece of `id` as the decoder wants it; `None` if it is left out.
    fn spelling(&self, id: u32, options: Decode) -> Option<&str> {
        match self.added.get(id) {
            Some(token) if token.special && options.skip_special => None,
            Some(token) => Some(&token.spelling),
            None => self.vocab.piece(id),
        }
    }
}
