//! Byte-pair encoding: merge the best pair of neighbours until none is left to merge.
//!
//! Three sources rank the pairs differently, and one loop serves them all: `tokenizer.json` and GGUF list the merges
//! (Sennrich et al. 2016), tiktoken ranks a pair by the id of what it makes, and SentencePiece by that piece's score.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::BinaryHeap;

use hashbrown::HashMap;

use super::vocab::Vocab;

/// A byte-pair encoder.
#[derive(Debug)]
pub(crate) struct Bpe {
    pub(crate) merges: Merges,
    /// A word that is in the vocabulary is one token, whatever the merges say.
    pub(crate) ignore_merges: bool,
    pub(crate) unknown: Unknown,
    /// Goes in front of every character but the first of a word.
    pub(crate) continuing_subword_prefix: String,
    /// Suffix of the last character of a word.
    pub(crate) end_of_word_suffix: String,
    /// Ids that text must never become, sorted: control tokens.
    pub(crate) forbidden: Vec<u32>,
}

/// Which neighbours may be merged, and in which order.
#[derive(Debug)]
pub(crate) enum Merges {
    /// By pair of ids: the rank, lowest first, and the id that results.
    Table(HashMap<(u32, u32), (u32, u32)>),
    /// Any two neighbours that spell a token, lowest id first.
    ById,
    /// Any two neighbours that spell a piece, highest score first.
    ByScore {
        /// By id.
        scores: Vec<f32>,
        /// Pieces that only lead to longer ones; one that remains at the end is split again.
        unused: Vec<bool>,
    },
}

/// How a character that is not in the vocabulary is encoded.
#[derive(Debug, Default)]
pub(crate) struct Unknown {
    /// Spell its bytes with these tokens.
    pub(crate) bytes: Option<Box<[u32; 256]>>,
    /// Else this token replaces it; with neither, it is dropped.
    pub(crate) id: Option<u32>,
    /// One token for several in a row.
    pub(crate) fuse: bool,
}

/// A stretch of the word that is one token so far; `len == 0` marks one that was merged into its left neighbour.
struct Symbol {
    id: Option<u32>,
    start: usize,
    len: usize,
    prev: usize,
    next: usize,
}

/// No neighbour on this side.
const END: usize = usize::MAX;

/// A possible merge: rank, place of the left symbol, resulting id. The heap gives the lowest rank first, then the
/// leftmost.
type Candidate = Reverse<(u32, usize, u32)>;

/// How each merged piece that is marked unused came about: the bytes of its left part.
type Undo = HashMap<u32, usize>;

impl Bpe {
    /// An encoder that only merges.
    pub(crate) fn new(merges: Merges) -> Self {
        Self {
            merges,
            ignore_merges: false,
            unknown: Unknown::default(),
            continuing_subword_prefix: String::new(),
            end_of_word_suffix: String::new(),
            forbidden: Vec::new(),
        }
    }

    /// Appends the ids of `word` to `out`.
    pub(crate) fn encode(&self, vocab: &Vocab, word: &str, out: &mut Vec<u32>) {
        if self.ignore_merges
            && let Some(id) = vocab.id(word.as_bytes())
            && self.may_write(id)
        {
            out.push(id);
            return;
        }
        let mut symbols = self.characters(vocab, word);
        let undo = self.merge(vocab, word.as_bytes(), &mut symbols);

        let mut last_unknown = false;
        for symbol in symbols.iter().filter(|symbol| symbol.len > 0) {
            let text = &word.as_bytes()[symbol.start..symbol.start + symbol.len];
            match (symbol.id, &self.unknown.bytes, self.unknown.id) {
                (Some(id), ..) => take_apart(vocab, &undo, id, text, out),
                (None, Some(bytes), _) => out.extend(text.iter().map(|&byte| bytes[byte as usize])),
                (None, None, Some(id)) if !(last_unknown && self.unknown.fuse) => out.push(id),
                (None, None, _) => {}
            }
            last_unknown = symbol.id.is_none();
        }
    }

    fn may_write(&self, id: u32) -> bool {
        self.forbidden.binary_search(&id).is_err()
    }

    /// The characters of `word`, as far as they are in the vocabulary or can be spelled by bytes.
    fn characters(&self, vocab: &Vocab, word: &str) -> Vec<Symbol> {
        let mut symbols: Vec<Symbol> = Vec::with_capacity(word.len());
        let mut push = |id, start, len| {
            let at = symbols.len();
            symbols.push(Symbol {
                id,
                start,
                len,
                prev: at.checked_sub(1).unwrap_or(END),
                next: at + 1,
            });
        };
        let merges_by_text = !matches!(self.merges, Merges::Table(_));
        for (start, c) in word.char_indices() {
            let len = c.len_utf8();
            let end = start + len;
            let mut spelling = Cow::Borrowed(&word[start..end]);
            if start > 0 && !self.continuing_subword_prefix.is_empty() {
                spelling = Cow::Owned(format!("{}{spelling}", self.continuing_subword_prefix));
            }
            if end == word.len() && !self.end_of_word_suffix.is_empty() {
                spelling.to_mut().push_str(&self.end_of_word_suffix);
            }
            let id = vocab
                .id(spelling.as_bytes())
                .filter(|id| self.may_write(*id));
            match (&self.unknown.bytes, id) {
                // A table of merges may name byte tokens, so they take part in merging; by text they cannot.
                (Some(bytes), None) if !merges_by_text => {
                    for byte in spelling.bytes() {
                        push(Some(bytes[byte as usize]), start, 1);
                    }
                }
                _ => push(id, start, len),
            }
        }
        if let Some(last) = symbols.last_mut() {
            last.next = END;
        }
        symbols
    }

    fn merge(&self, vocab: &Vocab, word: &[u8], symbols: &mut [Symbol]) -> Undo {
        let mut undo = Undo::new();
        let mut heap: BinaryHeap<Candidate> = BinaryHeap::with_capacity(symbols.len());
        let consider = |heap: &mut BinaryHeap<Candidate>, symbols: &[Symbol], left: usize| {
            let right = symbols[left].next;
            if right != END
                && let Some((rank, id)) = self.rank(vocab, word, &symbols[left], &symbols[right])
            {
                heap.push(Reverse((rank, left, id)));
            }
        };
        for left in 0..symbols.len() {
            consider(&mut heap, symbols, left);
        }
        while let Some(Reverse((_, left, id))) = heap.pop() {
            let right = symbols[left].next;
            if symbols[left].len == 0
                || right == END
                || !self.still_makes(vocab, id, &symbols[left], &symbols[right])
            {
                continue;
            }
            if self.is_unused(id) {
                undo.insert(id, symbols[left].len);
            }
            let next = symbols[right].next;
            symbols[left].id = Some(id);
            symbols[left].len += symbols[right].len;
            symbols[left].next = next;
            symbols[right].len = 0;
            if next != END {
                symbols[next].prev = left;
            }
            if symbols[left].prev != END {
                consider(&mut heap, symbols, symbols[left].prev);
            }
            consider(&mut heap, symbols, left);
        }
        undo
    }

    /// Whether a candidate made earlier is still what these two symbols give; one of them may have been merged since.
    fn still_makes(&self, vocab: &Vocab, id: u32, left: &Symbol, right: &Symbol) -> bool {
        match (&self.merges, left.id, right.id) {
            (Merges::Table(table), Some(a), Some(b)) => {
                table.get(&(a, b)).is_some_and(|(_, merged)| *merged == id)
            }
            (Merges::Table(_), ..) => false,
            // A candidate begins where `left` begins, so its length determines the range.
            _ => vocab
                .piece(id)
                .is_some_and(|piece| piece.len() == left.len + right.len),
        }
    }

    fn is_unused(&self, id: u32) -> bool {
        matches!(&self.merges, Merges::ByScore { unused, .. } if unused.get(id as usize) == Some(&true))
    }

    /// The rank of the merge of two neighbours, lowest first, and the id it gives.
    fn rank(
        &self,
        vocab: &Vocab,
        word: &[u8],
        left: &Symbol,
        right: &Symbol,
    ) -> Option<(u32, u32)> {
        match &self.merges {
            Merges::Table(table) => table.get(&(left.id?, right.id?)).copied(),
            by_text => {
                let id = vocab.id(&word[left.start..right.start + right.len])?;
                match by_text {
                    Merges::ByScore { scores, .. } => {
                        Some((descending(*scores.get(id as usize)?), id))
                    }
                    _ => Some((id, id)),
                }
            }
        }
        .filter(|(_, id)| self.may_write(*id))
    }
}

/// Appends `id`, or its parts if it is a piece that only leads to longer ones.
fn take_apart(vocab: &Vocab, undo: &Undo, id: u32, text: &[u8], out: &mut Vec<u32>) {
    let mut stack = vec![(id, text)];
    while let Some((id, text)) = stack.pop() {
        let parts = undo
            .get(&id)
            .filter(|left| **left < text.len())
            .map(|&left| text.split_at(left));
        match parts.and_then(|(a, b)| Some(((vocab.id(a)?, a), (vocab.id(b)?, b)))) {
            Some((left, right)) => stack.extend([right, left]),
            None => out.push(id),
        }
    }
}

/// A number that falls as `score` rises, in the total order of floats.
fn descending(score: f32) -> u32 {
    let bits = (score + 0.0).to_bits();
    let rising = if bits >> 31 == 1 {
        !bits
    } else {
        bits | 1 << 31
    };
    !rising
}
