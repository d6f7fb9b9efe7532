//! WordPiece: the longest known piece first, from left to right (BERT); and the word-level model, its trivial cousin.

use super::TokenizerError;
use super::prefix::PrefixIndex;
use super::vocab::Vocab;

/// A greedy longest-match model.
#[derive(Debug)]
pub(crate) struct WordPiece {
    /// Marks pieces that continue a word, such as `##`.
    pub(crate) continuing_subword_prefix: String,
    /// Longer words are unknown; in characters.
    pub(crate) max_chars: usize,
    /// What a word becomes that cannot be spelled.
    pub(crate) unknown: Option<u32>,
    /// The pieces text may become.
    pub(crate) pieces: PrefixIndex,
}

impl WordPiece {
    /// Appends the ids of `word` to `out`.
    pub(crate) fn encode(
        &self,
        vocab: &Vocab,
        word: &str,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        let before = out.len();
        let too_long = word.chars().nth(self.max_chars).is_some();
        let mut start = if too_long { None } else { Some(0) };
        while let Some(at) = start.filter(|at| *at < word.len()) {
            start = self
                .longest_match(vocab, &word[at..], at > 0)
                .map(|(id, len)| {
                    out.push(id);
                    at + len
                });
        }
        if start.is_none() {
            out.truncate(before);
            out.push(self.unknown.ok_or_else(|| TokenizerError::Unspellable {
                text: word.to_owned(),
            })?);
        }
        Ok(())
    }

    fn longest_match(&self, vocab: &Vocab, rest: &str, continues: bool) -> Option<(u32, usize)> {
        let prefix = if continues {
            self.continuing_subword_prefix.as_str()
        } else {
            ""
        };
        let mut longest = None;
        self.pieces
            .each_prefix(vocab, prefix.bytes().chain(rest.bytes()), |len, id| {
                if len > prefix.len() {
                    longest = Some((id, len - prefix.len()));
                }
            });
        longest
    }
}

/// A model that knows whole words only.
#[derive(Debug)]
pub(crate) struct WordLevel {
    /// What other words become.
    pub(crate) unknown: Option<u32>,
}

impl WordLevel {
    /// Appends the id of `word` to `out`.
    pub(crate) fn encode(
        &self,
        vocab: &Vocab,
        word: &str,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        match vocab.id(word.as_bytes()).or(self.unknown) {
            Some(id) => out.push(id),
            None => {
                return Err(TokenizerError::Unspellable {
                    text: word.to_owned(),
                });
            }
        }
        Ok(())
    }
}
