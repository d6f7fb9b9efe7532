//! The unigram model of SentencePiece: the split whose pieces have the largest sum of scores (Kudo 2018).

use super::TokenizerError;
use super::prefix::PrefixIndex;
use super::vocab::Vocab;

/// What an unknown character costs below the worst piece, as SentencePiece has it.
const UNKNOWN_PENALTY: f64 = 10.0;

/// A unigram model.
#[derive(Debug)]
pub(crate) struct Unigram {
    /// By id: the logarithm of the piece's probability.
    scores: Vec<f64>,
    /// The pieces text may become.
    pieces: PrefixIndex,
    unknown: Option<u32>,
    unknown_score: f64,
    /// Tokens that spell an unknown character byte by byte.
    bytes: Option<Box<[u32; 256]>>,
}

impl Unigram {
    /// A model over the pieces of `vocab` that `in_text` allows; `scores` go by id.
    pub(crate) fn new(
        vocab: &Vocab,
        scores: Vec<f64>,
        unknown: Option<u32>,
        bytes: Option<Box<[u32; 256]>>,
        in_text: impl Fn(u32) -> bool,
    ) -> Result<Self, TokenizerError> {
        if let Some(id) = (0..)
            .zip(&scores)
            .find_map(|(id, score): (u32, _)| score.is_nan().then_some(id))
        {
            return Err(TokenizerError::invalid(
                "scores",
                format!("the score of id {id} is not a number"),
            ));
        }
        let pieces = PrefixIndex::new(vocab, |id| {
            (id as usize) < scores.len() && Some(id) != unknown && in_text(id)
        });
        let worst = scores.iter().copied().fold(f64::INFINITY, f64::min);
        Ok(Self {
            scores,
            pieces,
            unknown,
            unknown_score: worst - UNKNOWN_PENALTY,
            bytes,
        })
    }

    /// Appends the ids of `word` to `out`.
    pub(crate) fn encode(
        &self,
        vocab: &Vocab,
        word: &str,
        out: &mut Vec<u32>,
    ) -> Result<(), TokenizerError> {
        /// The best segmentation of the text up to a position: its score, its last token, and where that
        /// token starts.
        #[derive(Clone, Copy)]
        struct Best {
            score: f64,
            id: Option<u32>,
            start: usize,
        }
        let text = word.as_bytes();
        let mut best: Vec<Option<Best>> = vec![None; text.len() + 1];
        best[0] = Some(Best {
            score: 0.0,
            id: None,
            start: 0,
        });
        for (start, c) in word.char_indices() {
            let Some(Best { score: so_far, .. }) = best[start] else {
                continue;
            };
            let mut offer = |end: usize, score: f64, id: Option<u32>| {
                let score = so_far + score;
                if best[end].is_none_or(|known| score > known.score) {
                    best[end] = Some(Best { score, id, start });
                }
            };
            let mut single = false;
            self.pieces
                .each_prefix(vocab, text[start..].iter().copied(), |len, id| {
                    single |= len == c.len_utf8();
                    offer(start + len, self.scores[id as usize], Some(id));
                });
            if !single {
                offer(start + c.len_utf8(), self.unknown_score, None);
            }
        }

        let mut path = Vec::new();
        let mut end = text.len();
        while end > 0 {
            // Every character offers at least itself, so every place before the end was reached.
            let Some(step) = best[end] else { break };
            path.push((step.id, step.start..end));
            end = step.start;
        }
        let mut last_unknown = false;
        for (id, range) in path.into_iter().rev() {
            match (id, &self.bytes, self.unknown) {
                (Some(id), ..) => out.push(id),
                (None, Some(bytes), _) => {
                    out.extend(text[range].iter().map(|&byte| bytes[byte as usize]))
                }
                (None, None, Some(unknown)) if !last_unknown => out.push(unknown),
                (None, None, Some(_)) => {}
                (None, None, None) => {
                    return Err(TokenizerError::Unspellable {
                        text: word[range].to_owned(),
                    });
                }
            }
            last_unknown = id.is_none();
        }
        Ok(())
    }
}
