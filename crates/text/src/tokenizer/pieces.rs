//! Vocabularies of scored, typed pieces, as SentencePiece files and GGUF files with its models hold them.

use std::collections::BTreeMap;

use hashbrown::HashMap;

use super::added::{AddedToken, AddedTokens};
use super::bpe::{Bpe, Merges, Unknown};
use super::charsmap::Charsmap;
use super::decode::{Decoder, PieceStep, TextStep};
use super::model::{Model, byte_tokens};
use super::normalize::Normalizer;
use super::pattern::Pattern;
use super::unigram::Unigram;
use super::vocab::Vocab;
use super::{Parts, TokenizerError};

/// What a piece is for; the numbers are the same in both formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum PieceType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl PieceType {
    /// The type of number `number`; newer numbers count as normal pieces.
    pub(super) fn from_number(number: i64) -> Self {
        match number {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }

    /// The number of this type.
    pub(super) fn number(self) -> i32 {
        match self {
            Self::Normal => 1,
            Self::Unknown => 2,
            Self::Control => 3,
            Self::UserDefined => 4,
            Self::Unused => 5,
            Self::Byte => 6,
        }
    }
}

/// How pieces are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Choice {
    /// Merge neighbours, the best score first.
    Bpe,
    /// The largest sum of scores.
    Unigram,
}

/// Where the mark of a word goes in front of a text that has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DummyPrefix {
    None,
    /// In front of the whole text, as SentencePiece does.
    Text,
    /// In front of every stretch between special tokens, as llama.cpp does.
    Stretch,
}

/// Everything that the two formats say.
pub(super) struct Pieces {
    pub(super) vocab: Vocab,
    /// By id.
    pub(super) scores: Vec<f32>,
    /// By id.
    pub(super) types: Vec<PieceType>,
    pub(super) choice: Choice,
    pub(super) charsmap: Option<Charsmap>,
    pub(super) dummy_prefix: DummyPrefix,
    pub(super) remove_extra_whitespaces: bool,
    pub(super) unknown: Option<u32>,
}

/// Control tokens, user-defined tokens and the unknown token among typed pieces.
pub(super) fn added_tokens(vocab: &Vocab, types: &[PieceType]) -> BTreeMap<u32, AddedToken> {
    let of_type = |id: u32| types.get(id as usize).copied().unwrap_or(PieceType::Normal);
    let added = vocab.iter().filter_map(|(id, piece)| {
        let special = match of_type(id) {
            PieceType::Control | PieceType::Unknown => true,
            PieceType::UserDefined => false,
            PieceType::Normal | PieceType::Unused | PieceType::Byte => return None,
        };
        // Padding of the vocabulary may repeat a name; the one that is found by it counts.
        (vocab.id(piece.as_bytes()) == Some(id) && !piece.is_empty())
            .then(|| (id, AddedToken::plain(piece, special)))
    });
    added.collect()
}

impl Pieces {
    /// The tokenizer of these pieces, without anything around a text.
    pub(super) fn into_parts(self) -> Result<Parts, TokenizerError> {
        let Self {
            vocab,
            scores,
            types,
            choice,
            charsmap,
            dummy_prefix,
            remove_extra_whitespaces,
            unknown,
        } = self;
        let added = added_tokens(&vocab, &types);
        let is = |id: u32, wanted: PieceType| types.get(id as usize) == Some(&wanted);
        let bytes = byte_tokens(&vocab);
        let unknown = unknown
            .filter(|id| vocab.piece(*id).is_some())
            .or_else(|| (0..vocab.len() as u32).find(|id| is(*id, PieceType::Unknown)));
        let forbidden = |id: u32| {
            is(id, PieceType::Control) || is(id, PieceType::Unknown) || is(id, PieceType::Byte)
        };
        let model = match choice {
            Choice::Bpe => Model::Bpe(Bpe {
                unknown: Unknown {
                    bytes,
                    id: unknown,
                    fuse: true,
                },
                forbidden: (0..vocab.len() as u32)
                    .filter(|id| forbidden(*id))
                    .collect(),
                ..Bpe::new(Merges::ByScore {
                    unused: types
                        .iter()
                        .map(|kind| *kind == PieceType::Unused)
                        .collect(),
                    scores,
                })
            }),
            Choice::Unigram => {
                let in_text = |id: u32| !forbidden(id) && !is(id, PieceType::Unused);
                let scores = scores.into_iter().map(f64::from).collect();
                Model::Unigram(Unigram::new(&vocab, scores, unknown, bytes, in_text)?)
            }
        };
        let mut normal = Vec::new();
        normal.extend(charsmap.map(Normalizer::Precompiled));
        if remove_extra_whitespaces {
            normal.push(Normalizer::CollapseSpaces);
        }
        match dummy_prefix {
            DummyPrefix::None => {}
            DummyPrefix::Text => normal.push(Normalizer::PrependAtStart(" ".into())),
            DummyPrefix::Stretch => normal.push(Normalizer::Prepend(" ".into())),
        }
        normal.push(Normalizer::Replace {
            pattern: Pattern::literal(" ")?,
            with: "▁".into(),
        });
        let decoder = Decoder {
            pieces: vec![
                PieceStep::Replace {
                    pattern: Pattern::literal("▁")?,
                    with: " ".into(),
                },
                PieceStep::ByteFallback,
            ],
            text: match dummy_prefix {
                DummyPrefix::None => Vec::new(),
                _ => vec![TextStep::Strip {
                    content: ' ',
                    start: 1,
                    stop: 0,
                }],
            },
            spaced: false,
        };
        Ok(Parts {
            normalizer: Some(Normalizer::Sequence(normal)),
            ..Parts::new(vocab, AddedTokens::new(added)?, model, decoder)
        })
    }
}

/// The merges of a GGUF file: pairs of pieces, separated by the first space that is not their first character.
pub(super) fn merge_table<'a>(merges: impl Iterator<Item = &'a str>, vocab: &Vocab) -> Merges {
    let mut table = HashMap::with_capacity(merges.size_hint().0);
    let mut merged = String::new();
    // What merges make comes in the order of ids in most files.
    let mut made = 0;
    for (rank, text) in (0..).zip(merges) {
        let space = text.char_indices().skip(1).find(|(_, c)| *c == ' ');
        let Some((left, right)) = space.map(|(at, _)| (&text[..at], &text[at + 1..])) else {
            continue;
        };
        merged.clear();
        merged.push_str(left);
        merged.push_str(right);
        let id = |piece: &str| vocab.id(piece.as_bytes());
        // A merge of pieces that have no id can never come up.
        let whole = vocab.id_near(merged.as_bytes(), made);
        if let (Some(left), Some(right), Some(whole)) = (id(left), id(right), whole) {
            made = whole;
            table.entry((left, right)).or_insert((rank, whole));
        }
    }
    Merges::Table(table)
}
