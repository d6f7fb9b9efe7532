//! The models that turn a word into ids.

use super::TokenizerError;
use super::bpe::Bpe;
use super::unigram::Unigram;
use super::vocab::Vocab;
use super::wordpiece::{WordLevel, WordPiece};

/// One of the four kinds.
#[derive(Debug)]
pub(crate) enum Model {
    Bpe(Bpe),
    Unigram(Unigram),
    WordPiece(WordPiece),
    WordLevel(WordLevel),
}

impl Model {
    /// Appends the ids of `word` to `out`.
    pub(crate) fn encode(
        &self,
        vocab: &Vocab,
        word: &str,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        match self {
            Self::Bpe(bpe) => bpe.encode(vocab, word, out),
            Self::Unigram(unigram) => unigram.encode(vocab, word, out)?,
            Self::WordPiece(word_piece) => word_piece.encode(vocab, word, out)?,
            Self::WordLevel(word_level) => word_level.encode(vocab, word, out)?,
        }
        Ok(())
    }
}

/// The tokens `<0x00>` to `<0xFF>`, if the vocabulary has them all.
pub(crate) fn byte_tokens(vocab: &Vocab) -> Option<Box<[u32; 256]>> {
    let mut ids = Box::new([0; 256]);
    for (byte, id) in ids.iter_mut().enumerate() {
        *id = vocab.id(format!("<0x{byte:02X}>").as_bytes())?;
    }
    Some(ids)
}
