//! Finding all pieces that a text begins with.

use super::vocab::Vocab;

/// Ids sorted by spelling. The pieces that share the bytes read so far are a range of them, and every further byte
/// narrows the range; this needs no memory beyond the ids, whatever the pieces look like.
#[derive(Debug)]
pub(crate) struct PrefixIndex(Vec<u32>);

impl PrefixIndex {
    /// An index of the non-empty pieces of `vocab` that `wanted` allows.
    pub(crate) fn new(vocab: &Vocab, wanted: impl Fn(u32) -> bool) -> Self {
        let mut pieces: Vec<(&str, u32)> = vocab
            .iter()
            .filter(|(id, piece)| !piece.is_empty() && wanted(*id))
            .map(|(id, piece)| (piece, id))
            .collect();
        pieces.sort_unstable();
        Self(pieces.into_iter().map(|(_, id)| id).collect())
    }

    /// Calls `found` with the length and id of every piece that `text` begins with, shortest first.
    pub(crate) fn each_prefix(
        &self,
        vocab: &Vocab,
        text: impl Iterator<Item = u8>,
        mut found: impl FnMut(usize, u32),
    ) {
        let spelling = |id: &u32| vocab.piece(*id).unwrap_or_default().as_bytes();
        let mut range = &self.0[..];
        for (depth, byte) in text.enumerate() {
            let from = range.partition_point(|id| spelling(id).get(depth) < Some(&byte));
            range = &range[from..];
            let to = range.partition_point(|id| spelling(id).get(depth) <= Some(&byte));
            range = &range[..to];
            let Some(first) = range.first() else { return };
            if spelling(first).len() == depth + 1 {
                // Of equal spellings the last is the one the vocabulary finds.
                let same = range.partition_point(|id| spelling(id).len() == depth + 1);
                found(depth + 1, range[same - 1]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_every_prefix_shortest_first() {
        let mut vocab = Vocab::new(0);
        for (id, piece) in (0..).zip(["b", "a", "abc", "ab", "abd", "é"]) {
            vocab.insert(piece, id).unwrap();
        }
        let index = PrefixIndex::new(&vocab, |id| id != 3);
        let prefixes = |text: &str| {
            let mut all = Vec::new();
            index.each_prefix(&vocab, text.bytes(), |len, id| all.push((len, id)));
            all
        };
        assert_eq!(prefixes("abcd"), [(1, 1), (3, 2)]);
        assert_eq!(prefixes("é"), [(2, 5)]);
        assert_eq!(prefixes("x"), []);
        assert_eq!(prefixes(""), []);
    }
}
