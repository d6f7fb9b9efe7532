//! The two-way table between pieces and ids.

use std::hash::BuildHasher;

use hashbrown::{DefaultHashBuilder, HashTable};

use super::TokenizerError;

/// Ids above the number of bytes in a file are allowed up to here: small vocabularies with a few high ids exist.
const FREE_IDS: usize = 1 << 20;

/// Pieces of text by id, and ids by piece.
///
/// All pieces are in one string, so that a vocabulary of 256,000 pieces costs three allocations instead of half a
/// million, which is most of the time it takes to load one.
#[derive(Debug)]
pub(crate) struct Vocab {
    text: String,
    /// By id: where the piece is in `text`; unused ids have `start == u32::MAX`.
    spans: Vec<Span>,
    index: HashTable<u32>,
    /// Whether some spelling was given to two ids.
    has_equals: bool,
    hasher: DefaultHashBuilder,
    max_ids: usize,
}

#[derive(Debug, Clone, Copy)]
struct Span {
    start: u32,
    len: u32,
}

const HOLE: Span = Span {
    start: u32::MAX,
    len: 0,
};

impl Vocab {
    /// An empty vocabulary read from a file of `file_bytes` bytes, which bounds the ids it may use.
    pub(crate) fn new(file_bytes: usize) -> Self {
        Self {
            text: String::new(),
            spans: Vec::new(),
            index: HashTable::new(),
            has_equals: false,
            hasher: DefaultHashBuilder::default(),
            max_ids: Self::max_ids(file_bytes),
        }
    }

    /// An empty vocabulary with room for `n` pieces, which the caller holds.
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self {
            spans: Vec::with_capacity(n),
            index: HashTable::with_capacity(n),
            ..Self::new(n)
        }
    }

    /// How many ids a file of `file_bytes` bytes may use.
    pub(crate) fn max_ids(file_bytes: usize) -> usize {
        file_bytes.saturating_add(FREE_IDS).min(u32::MAX as usize)
    }

    /// Gives `id` the spelling `piece`. Of two ids with one spelling, the later is found by that spelling.
    pub(crate) fn insert(&mut self, piece: &str, id: u32) -> Result<(), TokenizerError> {
        let at = id as usize;
        if at >= self.max_ids {
            return Err(TokenizerError::invalid(
                "vocabulary",
                format!("id {id} of {piece:?} is far beyond the size of the vocabulary"),
            ));
        }
        let end = self.text.len() + piece.len();
        if end >= u32::MAX as usize {
            return Err(TokenizerError::invalid(
                "vocabulary",
                "more than 4 GiB of pieces",
            ));
        }
        if at >= self.spans.len() {
            self.spans.resize(at + 1, HOLE);
        }
        self.spans[at] = Span {
            start: self.text.len() as u32,
            len: piece.len() as u32,
        };
        self.text.push_str(piece);

        let (text, spans, hasher) = (&self.text, &self.spans, &self.hasher);
        let spelling = |id: &u32| slice(text, spans[*id as usize]);
        let hash = hasher.hash_one(piece.as_bytes());
        match self.index.find_mut(hash, |known| spelling(known) == piece) {
            Some(known) => {
                *known = id;
                self.has_equals = true;
            }
            None => {
                self.index.insert_unique(hash, id, |known| {
                    hasher.hash_one(spelling(known).as_bytes())
                });
            }
        }
        Ok(())
    }

    /// The id whose spelling is `piece`.
    pub(crate) fn id(&self, piece: &[u8]) -> Option<u32> {
        let hash = self.hasher.hash_one(piece);
        self.index
            .find(hash, |id| {
                slice(&self.text, self.spans[*id as usize]).as_bytes() == piece
            })
            .copied()
    }

    /// The id whose spelling is `piece`, which is found at once if it is `near` or the next id.
    pub(crate) fn id_near(&self, piece: &[u8], near: u32) -> Option<u32> {
        let is_it = |id: &u32| {
            self.piece(*id)
                .is_some_and(|known| known.as_bytes() == piece)
        };
        let neighbours = [near, near.saturating_add(1)];
        match neighbours.into_iter().find(is_it) {
            Some(id) if !self.has_equals => Some(id),
            _ => self.id(piece),
        }
    }

    /// The spelling of `id`.
    pub(crate) fn piece(&self, id: u32) -> Option<&str> {
        let span = *self.spans.get(id as usize)?;
        (span.start != u32::MAX).then(|| slice(&self.text, span))
    }

    /// One more than the highest id.
    pub(crate) fn len(&self) -> usize {
        self.spans.len()
    }

    /// Every id that is in use, with its spelling, by rising id.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &str)> {
        (0..self.spans.len() as u32).filter_map(|id| Some((id, self.piece(id)?)))
    }
}

fn slice(text: &str, span: Span) -> &str {
    &text[span.start as usize..span.start as usize + span.len as usize]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_both_ways_and_the_later_of_two_equals() {
        let mut vocab = Vocab::new(0);
        for (piece, id) in [("a", 0), ("bc", 5), ("", 2), ("a", 7)] {
            vocab.insert(piece, id).unwrap();
        }
        assert_eq!(vocab.id(b"a"), Some(7));
        assert_eq!(vocab.piece(0), Some("a"));
        assert_eq!(vocab.id(b""), Some(2));
        for near in [0, 4, 5, 6, 7, u32::MAX] {
            assert_eq!(vocab.id_near(b"a", near), Some(7));
            assert_eq!(vocab.id_near(b"bc", near), Some(5));
            assert_eq!(vocab.id_near(b"b", near), None);
        }
        assert_eq!(vocab.piece(1), None);
        assert_eq!(vocab.piece(8), None);
        assert_eq!(vocab.len(), 8);
        assert_eq!(vocab.iter().count(), 4);
    }

    #[test]
    fn neighbours_are_found_without_the_table() {
        let mut vocab = Vocab::with_capacity(3);
        for (id, piece) in (0..).zip(["a", "bc", ""]) {
            vocab.insert(piece, id).unwrap();
        }
        for near in 0..5 {
            for (id, piece) in vocab.iter() {
                assert_eq!(vocab.id_near(piece.as_bytes(), near), Some(id));
            }
            assert_eq!(vocab.id_near(b"b", near), None);
        }
    }

    #[test]
    fn an_id_cannot_choose_the_memory() {
        assert!(Vocab::new(100).insert("a", u32::MAX).is_err());
    }
}
