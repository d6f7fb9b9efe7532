//! Decoders: from pieces back to bytes.

use std::borrow::Cow;

use super::bytes;
use super::pattern::Pattern;

/// What is done to each piece, and then to the text they make.
///
/// Nearly every decoder of `tokenizer.json` comes down to steps on single pieces followed by stripping the start of
/// the text; such a decoder can stream.
#[derive(Debug, Default)]
pub(crate) struct Decoder {
    /// Applied to every piece, in order.
    pub(crate) pieces: Vec<PieceStep>,
    /// Applied to the whole text, in order.
    pub(crate) text: Vec<TextStep>,
    /// The pieces are words, with a space between them.
    pub(crate) spaced: bool,
}

/// A step on one piece.
#[derive(Debug)]
pub(crate) enum PieceStep {
    /// Bytes for the characters that spell them; a piece with any other character stays as it is.
    ByteLevel,
    /// `<0x0A>` becomes the byte 10.
    ByteFallback,
    Replace {
        pattern: Pattern,
        with: String,
    },
    /// Maximum number of this character that is stripped at either end.
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    /// The word mark becomes a space, or nothing in the first piece.
    Metaspace {
        replacement: char,
        strip_first: bool,
    },
    /// A continuing piece loses its prefix, any other but the first gets a space in front.
    WordPiece {
        prefix: String,
    },
    /// No space before punctuation and English clitics.
    CleanUp,
    /// The end-of-word mark becomes a space, or nothing in the last piece.
    EndOfWord {
        suffix: String,
    },
    /// A piece equal to the one before is dropped, then the padding in it, then a delimiter becomes a space.
    Ctc {
        pad: String,
        delimiter: String,
        cleanup: bool,
    },
}

/// A step on the whole text.
#[derive(Debug)]
pub(crate) enum TextStep {
    Strip {
        content: char,
        start: usize,
        stop: usize,
    },
    Replace {
        pattern: Pattern,
        with: String,
    },
}

/// The position of a piece.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) first: bool,
    pub(crate) last: bool,
    pub(crate) previous: Option<&'a str>,
}

impl Decoder {
    /// Pieces spell bytes.
    pub(crate) fn byte_level() -> Self {
        Self {
            pieces: vec![PieceStep::ByteLevel],
            ..Self::default()
        }
    }

    /// Whether the text up to a piece is certain before the next piece is known.
    pub(crate) fn streams(&self) -> bool {
        let pieces = self
            .pieces
            .iter()
            .all(|step| !matches!(step, PieceStep::EndOfWord { .. }));
        let text = self.text.iter().all(
            |step| matches!(step, TextStep::Strip { content, stop: 0, .. } if content.is_ascii()),
        );
        // Two strips in a row would have to share what is known of the start.
        pieces && text && self.text.len() <= 1
    }

    /// The bytes of one piece.
    pub(crate) fn piece<'a>(&self, piece: &'a str, place: Place<'_>) -> Cow<'a, [u8]> {
        let mut bytes: Cow<'a, [u8]> = Cow::Borrowed(piece.as_bytes());
        if self.spaced && !place.first {
            bytes.to_mut().insert(0, b' ');
        }
        for step in &self.pieces {
            // A piece that is no longer text is past the steps that process text.
            let Ok(text) = std::str::from_utf8(&bytes) else {
                break;
            };
            if let Some(next) = step.apply(text, place) {
                bytes = Cow::Owned(next);
            }
        }
        bytes
    }

    /// How many bytes of the character `.0` to drop at the start of a text that streams.
    pub(crate) fn strip_start(&self) -> Option<(u8, usize)> {
        match self.text.first()? {
            TextStep::Strip { content, start, .. } => Some((u8::try_from(*content).ok()?, *start)),
            TextStep::Replace { .. } => None,
        }
    }

    /// Does the steps on the whole text.
    pub(crate) fn finish(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        for step in &self.text {
            bytes = match step {
                TextStep::Strip {
                    content,
                    start,
                    stop,
                } => strip(&bytes, *content, *start, *stop).to_vec(),
                TextStep::Replace { pattern, with } => {
                    let text = String::from_utf8_lossy(&bytes).into_owned();
                    replace(pattern, &text, with).map_or(text.into_bytes(), String::into_bytes)
                }
            };
        }
        bytes
    }
}

impl PieceStep {
    /// The result of the step for `text`; `None` if nothing changes.
    fn apply(&self, text: &str, place: Place<'_>) -> Option<Vec<u8>> {
        match self {
            Self::ByteLevel => {
                let mut out = Vec::with_capacity(text.len());
                bytes::unspell(text, &mut out).then_some(out)
            }
            Self::ByteFallback => byte_token(text).map(|byte| vec![byte]),
            Self::Replace { pattern, with } => replace(pattern, text, with).map(String::into_bytes),
            Self::Strip {
                content,
                start,
                stop,
            } => Some(strip(text.as_bytes(), *content, *start, *stop).to_vec()),
            Self::Metaspace {
                replacement,
                strip_first,
            } => {
                let with = if place.first && *strip_first { "" } else { " " };
                text.contains(*replacement)
                    .then(|| text.replace(*replacement, with).into_bytes())
            }
            Self::WordPiece { .. } if place.first => None,
            Self::WordPiece { prefix } => Some(match text.strip_prefix(prefix.as_str()) {
                Some(rest) => rest.as_bytes().to_vec(),
                None => format!(" {text}").into_bytes(),
            }),
            Self::CleanUp => Some(clean_up(text).into_bytes()),
            Self::EndOfWord { suffix } => Some(
                text.replace(suffix.as_str(), if place.last { "" } else { " " })
                    .into_bytes(),
            ),
            Self::Ctc { .. } if place.previous == Some(text) => Some(Vec::new()),
            Self::Ctc {
                pad,
                delimiter,
                cleanup,
            } => {
                let kept = text.replace(pad.as_str(), "");
                Some(
                    if *cleanup {
                        clean_up(&kept).replace(delimiter.as_str(), " ")
                    } else {
                        kept
                    }
                    .into_bytes(),
                )
            }
        }
    }
}

/// The byte of a piece such as `<0x0A>`.
pub(crate) fn byte_token(piece: &str) -> Option<u8> {
    let digits = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2 && !digits.starts_with('+')).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// `None` if nothing changes. A pattern that gives up, or a replacement out of all proportion, changes nothing.
fn replace(pattern: &Pattern, text: &str, with: &str) -> Option<String> {
    let limit = text.len().saturating_mul(64).saturating_add(1 << 16);
    match pattern.replace(Cow::Borrowed(text), with, limit) {
        Ok(Cow::Owned(replaced)) => Some(replaced),
        _ => None,
    }
}

fn strip(bytes: &[u8], content: char, start: usize, stop: usize) -> &[u8] {
    let mut buffer = [0; 4];
    let content = content.encode_utf8(&mut buffer).as_bytes();
    let mut kept = bytes;
    for _ in 0..start {
        let Some(rest) = kept.strip_prefix(content) else {
            break;
        };
        kept = rest;
    }
    for _ in 0..stop {
        let Some(rest) = kept.strip_suffix(content) else {
            break;
        };
        kept = rest;
    }
    kept
}

/// The clean-up of spaces that BERT's detokenizer does.
fn clean_up(text: &str) -> String {
    const RULES: [(&str, &str); 11] = [
        (" .", "."),
        (" ?", "?"),
        (" !", "!"),
        (" ,", ","),
        (" ' ", "'"),
        (" n't", "n't"),
        (" 'm", "'m"),
        (" do not", " don't"),
        (" 's", "'s"),
        (" 've", "'ve"),
        (" 're", "'re"),
    ];
    RULES
        .iter()
        .fold(text.to_owned(), |text, (from, to)| text.replace(from, to))
}
