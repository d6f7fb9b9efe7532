//! Reading SentencePiece's `tokenizer.model`: a protocol buffer of pieces and settings.

use sterna_format::hf::TokenizerConfig;

use super::charsmap::Charsmap;
use super::pieces::{Choice, DummyPrefix, PieceType, Pieces};
use super::vocab::Vocab;
use super::{Tokenizer, TokenizerError};

impl Tokenizer {
    /// Reads a SentencePiece model of the BPE or unigram kind, with the tokens and roles that a
    /// `tokenizer_config.json` adds.
    ///
    /// The file does not say whether texts begin with the beginning-of-sequence token; as in the Llama and Mistral
    /// models that ship such files, they do if the model is of the BPE kind.
    ///
    /// # Errors
    ///
    /// If the file is no such protocol buffer, or the model is of another kind.
    pub fn from_sentencepiece(
        model: &[u8],
        config: Option<&TokenizerConfig>,
    ) -> Result<Self, TokenizerError> {
        let proto = Proto::read(model)?;
        let choice = match proto.model_type {
            1 => Choice::Unigram,
            2 => Choice::Bpe,
            3 => {
                return Err(TokenizerError::Unsupported {
                    place: "model_type",
                    found: "word".into(),
                });
            }
            4 => {
                return Err(TokenizerError::Unsupported {
                    place: "model_type",
                    found: "char".into(),
                });
            }
            other => {
                return Err(TokenizerError::Unsupported {
                    place: "model_type",
                    found: other.to_string(),
                });
            }
        };
        let id = |id: i64, vocab: &Vocab| {
            u32::try_from(id)
                .ok()
                .filter(|id| vocab.piece(*id).is_some())
        };
        let (bos, eos) = (
            id(proto.bos_id, &proto.vocab),
            id(proto.eos_id, &proto.vocab),
        );
        let pad = id(proto.pad_id, &proto.vocab);
        let charsmap = match &proto.charsmap {
            blob if blob.is_empty() => None,
            blob => Some(Charsmap::parse(blob)?),
        };
        let mut parts = Pieces {
            unknown: id(proto.unk_id, &proto.vocab),
            vocab: proto.vocab,
            scores: proto.scores,
            types: proto.types,
            choice,
            charsmap,
            dummy_prefix: if proto.add_dummy_prefix {
                DummyPrefix::Text
            } else {
                DummyPrefix::None
            },
            remove_extra_whitespaces: proto.remove_extra_whitespaces,
        }
        .into_parts()?;
        let spelled = |id: Option<u32>| id.and_then(|id| parts.vocab.piece(id)).map(str::to_owned);
        let specials = (spelled(bos), spelled(eos), spelled(pad));
        (parts.specials.bos, parts.specials.eos, parts.specials.pad) = specials;
        (parts.bos, parts.eos) = (bos, eos);
        if choice == Choice::Bpe {
            parts.prefix.extend(bos);
        }
        if let Some(config) = config {
            parts.complete(config)?;
        }
        Ok(Self::assemble(parts))
    }
}

/// What `sentencepiece_model.proto` says, as far as it matters here.
struct Proto {
    vocab: Vocab,
    scores: Vec<f32>,
    types: Vec<PieceType>,
    model_type: i64,
    unk_id: i64,
    bos_id: i64,
    eos_id: i64,
    pad_id: i64,
    charsmap: Vec<u8>,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
}

impl Proto {
    fn read(model: &[u8]) -> Result<Self, TokenizerError> {
        let mut proto = Self {
            vocab: Vocab::new(model.len()),
            scores: Vec::new(),
            types: Vec::new(),
            model_type: 1,
            unk_id: 0,
            bos_id: 1,
            eos_id: 2,
            pad_id: -1,
            charsmap: Vec::new(),
            add_dummy_prefix: true,
            remove_extra_whitespaces: true,
        };
        for field in Fields(model, "ModelProto") {
            match field? {
                (1, Wire::Bytes(piece)) => proto.read_piece(piece)?,
                (2, Wire::Bytes(trainer)) => proto.read_trainer(trainer)?,
                (3, Wire::Bytes(normalizer)) => proto.read_normalizer(normalizer)?,
                _ => {}
            }
        }
        if proto.scores.is_empty() {
            return Err(TokenizerError::invalid(
                "tokenizer.model",
                "holds no pieces",
            ));
        }
        Ok(proto)
    }

    fn read_piece(&mut self, message: &[u8]) -> Result<(), TokenizerError> {
        let id = self.scores.len() as u32;
        let (mut text, mut score, mut kind) = ("", 0.0, 1);
        for field in Fields(message, "SentencePiece") {
            match field? {
                (1, Wire::Bytes(bytes)) => {
                    text = std::str::from_utf8(bytes).map_err(|source| {
                        TokenizerError::invalid(
                            "tokenizer.model",
                            format!("piece {id} is not UTF-8: {source}"),
                        )
                    })?;
                }
                (2, Wire::Fixed32(bits)) => score = f32::from_bits(bits),
                (3, Wire::Varint(number)) => kind = number.cast_signed(),
                _ => {}
            }
        }
        self.vocab.insert(text, id)?;
        self.scores.push(score);
        self.types.push(PieceType::from_number(kind));
        Ok(())
    }

    fn read_trainer(&mut self, message: &[u8]) -> Result<(), TokenizerError> {
        for field in Fields(message, "TrainerSpec") {
            match field? {
                (3, Wire::Varint(number)) => self.model_type = number.cast_signed(),
                (40, Wire::Varint(number)) => self.unk_id = number.cast_signed(),
                (41, Wire::Varint(number)) => self.bos_id = number.cast_signed(),
                (42, Wire::Varint(number)) => self.eos_id = number.cast_signed(),
                (43, Wire::Varint(number)) => self.pad_id = number.cast_signed(),
                (24, Wire::Varint(1)) => {
                    let found = "treat_whitespace_as_suffix".into();
                    return Err(TokenizerError::Unsupported {
                        place: "tokenizer.model",
                        found,
                    });
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn read_normalizer(&mut self, message: &[u8]) -> Result<(), TokenizerError> {
        for field in Fields(message, "NormalizerSpec") {
            match field? {
                (2, Wire::Bytes(blob)) => self.charsmap = blob.to_vec(),
                (3, Wire::Varint(flag)) => self.add_dummy_prefix = flag != 0,
                (4, Wire::Varint(flag)) => self.remove_extra_whitespaces = flag != 0,
                _ => {}
            }
        }
        Ok(())
    }
}

/// A value in protocol-buffer wire format.
enum Wire<'a> {
    Varint(u64),
    Fixed64,
    Bytes(&'a [u8]),
    Fixed32(u32),
}

/// The numbered fields of a message, by the name of its type.
struct Fields<'a>(&'a [u8], &'static str);

impl<'a> Fields<'a> {
    fn varint(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (byte, rest) = self.0.split_first()?;
            self.0 = rest;
            value |= u64::from(byte & 0x7F) << shift;
            if byte & 0x80 == 0 {
                return Some(value);
            }
        }
        None
    }

    fn take(&mut self, len: u64) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(usize::try_from(len).ok()?)?;
        self.0 = rest;
        Some(taken)
    }

    fn field(&mut self) -> Option<(u64, Wire<'a>)> {
        let key = self.varint()?;
        let value = match key & 7 {
            0 => Wire::Varint(self.varint()?),
            1 => self.take(8).map(|_| Wire::Fixed64)?,
            2 => {
                let len = self.varint()?;
                Wire::Bytes(self.take(len)?)
            }
            5 => Wire::Fixed32(u32::from_le_bytes(self.take(4)?.try_into().ok()?)),
            _ => return None,
        };
        Some((key >> 3, value))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u64, Wire<'a>), TokenizerError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let left = self.0.len();
        let field = self.field();
        if field.is_none() {
            self.0 = &[];
        }
        let damaged = || {
            let problem = format!(
                "the {} message is damaged, {left} bytes before its end",
                self.1
            );
            TokenizerError::invalid("tokenizer.model", problem)
        };
        Some(field.ok_or_else(damaged))
    }
}
