//! Pre-tokenizers: where a text is cut into words before the model sees it.

use std::borrow::Cow;
use std::ops::Range;

use unicode_properties::{GeneralCategoryGroup, UnicodeGeneralCategory};
use unicode_script::{Script, UnicodeScript};

use super::TokenizerError;
use super::bytes;
use super::pattern::Pattern;

/// One step, or a sequence of steps, named as in `tokenizer.json`.
#[derive(Debug)]
pub(crate) enum PreTokenizer {
    Sequence(Vec<PreTokenizer>),
    /// Splits at the matches of a pattern; `invert` swaps matches and what is between them.
    Split {
        pattern: Pattern,
        behavior: Behavior,
        invert: bool,
    },
    /// Spells every byte as a character, after an optional leading space and an optional split.
    ByteLevel {
        add_prefix_space: bool,
        split: Option<Pattern>,
    },
    Metaspace {
        replacement: char,
        prepend: Prepend,
        split: bool,
    },
    WhitespaceSplit,
    Bert,
    Punctuation(Behavior),
    Digits {
        individual: bool,
    },
    Delimiter(char),
    FixedLength(usize),
    Scripts,
}

/// What happens to the text that a split matched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Behavior {
    Removed,
    Isolated,
    MergedWithPrevious,
    MergedWithNext,
    Contiguous,
}

/// Which pieces get a word mark in front if they have none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Prepend {
    Always,
    First,
    Never,
}

/// A piece of the text on its way to the model.
#[derive(Debug, Clone)]
pub(crate) struct Piece<'a> {
    pub(crate) text: Cow<'a, str>,
    /// Whether the piece begins where the whole text begins.
    pub(crate) at_start: bool,
}

impl<'a> Piece<'a> {
    fn part(&self, range: Range<usize>) -> Self {
        let at_start = self.at_start && range.start == 0;
        let text = match &self.text {
            Cow::Borrowed(text) => Cow::Borrowed(&text[range]),
            Cow::Owned(text) => Cow::Owned(text[range].to_owned()),
        };
        Piece { text, at_start }
    }

    fn prepend(&mut self, c: char) {
        self.text.to_mut().insert(0, c);
    }
}

impl PreTokenizer {
    /// Cuts `piece`, appending what comes of it to `out`; empty pieces are dropped.
    pub(crate) fn split<'a>(
        &self,
        mut piece: Piece<'a>,
        out: &mut Vec<Piece<'a>>,
    ) -> Result<(), TokenizerError> {
        match self {
            Self::Sequence(steps) => {
                let mut pieces = vec![piece];
                for step in steps {
                    let mut next = Vec::with_capacity(pieces.len());
                    for piece in pieces {
                        step.split(piece, &mut next)?;
                    }
                    pieces = next;
                }
                out.append(&mut pieces);
            }
            Self::Split {
                pattern,
                behavior,
                invert,
            } => {
                let spans = spans_of_pattern(pattern, &piece.text, *invert)?;
                cut(&piece, spans, *behavior, out);
            }
            Self::ByteLevel {
                add_prefix_space,
                split,
            } => {
                if *add_prefix_space && !piece.text.starts_with(' ') {
                    piece.prepend(' ');
                }
                let start = out.len();
                match split {
                    Some(pattern) => {
                        let spans = spans_of_pattern(pattern, &piece.text, false)?;
                        cut(&piece, spans, Behavior::Isolated, out);
                    }
                    None => out.push(piece),
                }
                for piece in &mut out[start..] {
                    piece.text = Cow::Owned(bytes::spell_all(piece.text.as_bytes()));
                }
            }
            Self::Metaspace {
                replacement,
                prepend,
                split,
            } => {
                if piece.text.contains(' ') {
                    piece.text = Cow::Owned(
                        piece
                            .text
                            .replace(' ', replacement.encode_utf8(&mut [0; 4])),
                    );
                }
                let wanted = match prepend {
                    Prepend::Always => true,
                    Prepend::First => piece.at_start,
                    Prepend::Never => false,
                };
                if wanted && !piece.text.starts_with(*replacement) {
                    piece.prepend(*replacement);
                }
                if *split {
                    let spans = spans_of_chars(&piece.text, |c| c == *replacement);
                    cut(&piece, spans, Behavior::MergedWithNext, out);
                } else {
                    out.push(piece);
                }
            }
            Self::WhitespaceSplit => {
                cut(
                    &piece,
                    spans_of_chars(&piece.text, char::is_whitespace),
                    Behavior::Removed,
                    out,
                );
            }
            Self::Bert => {
                let mut words = Vec::new();
                cut(
                    &piece,
                    spans_of_chars(&piece.text, char::is_whitespace),
                    Behavior::Removed,
                    &mut words,
                );
                for word in words {
                    cut(
                        &word,
                        spans_of_chars(&word.text, is_punctuation),
                        Behavior::Isolated,
                        out,
                    );
                }
            }
            Self::Punctuation(behavior) => {
                cut(
                    &piece,
                    spans_of_chars(&piece.text, is_punctuation),
                    *behavior,
                    out,
                );
            }
            Self::Digits { individual } => {
                let behavior = if *individual {
                    Behavior::Isolated
                } else {
                    Behavior::Contiguous
                };
                cut(
                    &piece,
                    spans_of_chars(&piece.text, char::is_numeric),
                    behavior,
                    out,
                );
            }
            Self::Delimiter(delimiter) => {
                cut(
                    &piece,
                    spans_of_chars(&piece.text, |c| c == *delimiter),
                    Behavior::Removed,
                    out,
                );
            }
            Self::FixedLength(length) => {
                let starts: Vec<usize> = piece
                    .text
                    .char_indices()
                    .map(|(start, _)| start)
                    .step_by((*length).max(1))
                    .collect();
                let ends = starts.iter().skip(1).copied().chain([piece.text.len()]);
                for (&start, end) in starts.iter().zip(ends) {
                    out.push(piece.part(start..end));
                }
            }
            Self::Scripts => split_scripts(&piece, out),
        }
        Ok(())
    }
}

/// A stretch of text, and whether it is one that the split looked for.
type Span = (Range<usize>, bool);

fn spans_of_pattern(
    pattern: &Pattern,
    text: &str,
    invert: bool,
) -> Result<Vec<Span>, TokenizerError> {
    let mut spans = Vec::new();
    let mut end = 0;
    pattern.each_match(text, |hit| {
        if end < hit.start {
            spans.push((end..hit.start, invert));
        }
        end = hit.end;
        spans.push((hit, !invert));
        Ok(())
    })?;
    if end < text.len() {
        spans.push((end..text.len(), invert));
    }
    Ok(spans)
}

fn spans_of_chars(text: &str, wanted: impl Fn(char) -> bool) -> Vec<Span> {
    let mut spans = Vec::new();
    let mut end = 0;
    for (start, c) in text.char_indices().filter(|(_, c)| wanted(*c)) {
        if end < start {
            spans.push((end..start, false));
        }
        end = start + c.len_utf8();
        spans.push((start..end, true));
    }
    if end < text.len() {
        spans.push((end..text.len(), false));
    }
    spans
}

fn cut<'a>(piece: &Piece<'a>, spans: Vec<Span>, behavior: Behavior, out: &mut Vec<Piece<'a>>) {
    let mut kept: Vec<Range<usize>> = Vec::with_capacity(spans.len());
    match behavior {
        Behavior::Isolated => kept.extend(spans.into_iter().map(|(range, _)| range)),
        Behavior::Removed => kept.extend(
            spans
                .into_iter()
                .filter(|(_, hit)| !hit)
                .map(|(range, _)| range),
        ),
        Behavior::Contiguous => {
            let mut last_hit = None;
            for (range, hit) in spans {
                match kept.last_mut() {
                    Some(last) if last_hit == Some(hit) => last.end = range.end,
                    _ => kept.push(range),
                }
                last_hit = Some(hit);
            }
        }
        Behavior::MergedWithPrevious => {
            let mut last_hit = false;
            for (range, hit) in spans {
                match kept.last_mut() {
                    Some(last) if hit && !last_hit => last.end = range.end,
                    _ => kept.push(range),
                }
                last_hit = hit;
            }
        }
        Behavior::MergedWithNext => {
            let mut last_hit = false;
            for (range, hit) in spans.into_iter().rev() {
                match kept.last_mut() {
                    Some(next) if hit && !last_hit => next.start = range.start,
                    _ => kept.push(range),
                }
                last_hit = hit;
            }
            kept.reverse();
        }
    }
    out.extend(
        kept.into_iter()
            .filter(|range| !range.is_empty())
            .map(|range| piece.part(range)),
    );
}

fn is_punctuation(c: char) -> bool {
    c.is_ascii_punctuation() || c.general_category_group() == GeneralCategoryGroup::Punctuation
}

/// Cuts where the script changes, as SentencePiece does while training: kana count as Han, a space as no script.
/// Spaces before the first script belong to no piece, which is what Hugging Face does with them.
fn split_scripts<'a>(piece: &Piece<'a>, out: &mut Vec<Piece<'a>>) {
    let mut open: Option<(usize, Script)> = None;
    for (at, c) in piece.text.char_indices() {
        let script = match c.script() {
            _ if c == ' ' => continue,
            _ if c == 'ー' => Script::Han,
            Script::Hiragana | Script::Katakana => Script::Han,
            script => script,
        };
        match open {
            Some((_, last)) if last == script => {}
            Some((start, _)) => {
                out.push(piece.part(start..at));
                open = Some((at, script));
            }
            None => open = Some((at, script)),
        }
    }
    if let Some((start, _)) = open {
        out.push(piece.part(start..piece.text.len()));
    }
}
