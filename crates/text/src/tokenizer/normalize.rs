//! Normalizers: what is done to a text before it is split.

use std::borrow::Cow;

use unicode_normalization::UnicodeNormalization;
use unicode_normalization::char::is_combining_mark;
use unicode_properties::{GeneralCategory, UnicodeGeneralCategory};

use super::TokenizerError;
use super::bytes;
use super::charsmap::Charsmap;
use super::pattern::Pattern;

/// One step, or a sequence of steps, named as in `tokenizer.json`.
#[derive(Debug)]
pub(crate) enum Normalizer {
    Sequence(Vec<Normalizer>),
    Nfc,
    Nfd,
    Nfkc,
    Nfkd,
    Nmt,
    Lowercase,
    StripAccents,
    Strip {
        left: bool,
        right: bool,
    },
    Prepend(String),
    /// As `Prepend`, but only where the whole text begins.
    PrependAtStart(String),
    Replace {
        pattern: Pattern,
        with: String,
    },
    ByteLevel,
    Bert(Bert),
    /// A SentencePiece character map, applied the way Hugging Face does: by grapheme.
    PrecompiledByGrapheme(Charsmap),
    /// A SentencePiece character map, applied the way SentencePiece does: longest match first.
    Precompiled(Charsmap),
    /// SentencePiece's `remove_extra_whitespaces`: none at either end, one between words.
    CollapseSpaces,
}

/// The cleaning that BERT's basic tokenizer does.
#[derive(Debug)]
pub(crate) struct Bert {
    pub(crate) clean_text: bool,
    pub(crate) handle_chinese_chars: bool,
    pub(crate) strip_accents: bool,
    pub(crate) lowercase: bool,
}

/// The most bytes that normalising `len` bytes may give.
///
/// The largest expansion of a character in Unicode is 18-fold (U+FDFA under NFKC); replacements in real tokenizers
/// add a few bytes. A chain of doubling replacements, on the other hand, could ask for any amount of memory.
fn limit(len: usize) -> usize {
    len.saturating_mul(64).saturating_add(1 << 16)
}

impl Normalizer {
    /// The normal form of `text`.
    ///
    /// `at_start` says whether it begins where the whole text begins.
    pub(crate) fn normalize<'a>(
        &self,
        text: &'a str,
        at_start: bool,
    ) -> Result<Cow<'a, str>, TokenizerError> {
        self.apply(Cow::Borrowed(text), at_start, limit(text.len()))
    }

    fn apply<'a>(
        &self,
        text: Cow<'a, str>,
        at_start: bool,
        limit: usize,
    ) -> Result<Cow<'a, str>, TokenizerError> {
        let len = text.len();
        let text = match self {
            Self::Sequence(steps) => {
                let mut text = text;
                for step in steps {
                    text = step.apply(text, at_start, limit)?;
                }
                text
            }
            Self::Nfc if text.is_ascii() => text,
            Self::Nfc => text.nfc().collect(),
            Self::Nfd => text.nfd().collect(),
            Self::Nfkc => text.nfkc().collect(),
            Self::Nfkd => text.nfkd().collect(),
            Self::Nmt => text.chars().filter_map(nmt).collect(),
            Self::Lowercase => text.chars().flat_map(char::to_lowercase).collect(),
            Self::StripAccents => text.chars().filter(|&c| !is_combining_mark(c)).collect(),
            Self::Strip { left, right } => {
                let mut kept: &str = &text;
                if *left {
                    kept = kept.trim_start();
                }
                if *right {
                    kept = kept.trim_end();
                }
                Cow::Owned(kept.to_owned())
            }
            Self::Prepend(_) if text.is_empty() => text,
            Self::PrependAtStart(_) if text.is_empty() || !at_start => text,
            Self::Prepend(prefix) | Self::PrependAtStart(prefix) => {
                Cow::Owned(format!("{prefix}{text}"))
            }
            Self::Replace { pattern, with } => pattern.replace(text, with, limit)?,
            Self::ByteLevel => Cow::Owned(bytes::spell_all(text.as_bytes())),
            Self::Bert(bert) => Cow::Owned(bert.apply(&text)),
            Self::PrecompiledByGrapheme(map) => Cow::Owned(map.normalize_by_grapheme(&text, limit)),
            Self::Precompiled(map) => Cow::Owned(map.normalize(&text, limit)),
            Self::CollapseSpaces => Cow::Owned(collapse_spaces(&text)),
        };
        if text.len() > limit {
            return Err(TokenizerError::Expansion { len, limit });
        }
        Ok(text)
    }
}

impl Bert {
    fn apply(&self, text: &str) -> String {
        let mut text = text.to_owned();
        if self.clean_text {
            text = text
                .chars()
                .filter(|&c| c != '\0' && c != '\u{FFFD}' && !is_control(c))
                .map(|c| if c.is_whitespace() { ' ' } else { c })
                .collect();
        }
        if self.handle_chinese_chars {
            let mut spaced = String::with_capacity(text.len());
            for c in text.chars() {
                if is_chinese(c) {
                    spaced.extend([' ', c, ' ']);
                } else {
                    spaced.push(c);
                }
            }
            text = spaced;
        }
        if self.strip_accents {
            text = text
                .nfd()
                .filter(|c| c.general_category() != GeneralCategory::NonspacingMark)
                .collect();
        }
        if self.lowercase {
            text = text.chars().flat_map(char::to_lowercase).collect();
        }
        text
    }
}

fn is_control(c: char) -> bool {
    use GeneralCategory::{Control, Format, PrivateUse};
    !matches!(c, '\t' | '\n' | '\r')
        && matches!(c.general_category(), Control | Format | PrivateUse)
}

/// The blocks of ideographs as BERT's multilingual preparation listed them.
fn is_chinese(c: char) -> bool {
    matches!(c as u32,
        0x4E00..=0x9FFF | 0x3400..=0x4DBF | 0x20000..=0x2A6DF | 0x2A700..=0x2B73F | 0x2B740..=0x2B81F
        | 0x2B920..=0x2CEAF | 0xF900..=0xFAFF | 0x2F800..=0x2FA1F)
}

/// The cleaning of SentencePiece's `nmt` rules: control characters go, rare spaces become plain ones.
fn nmt(c: char) -> Option<char> {
    match c as u32 {
        0x1..=0x8 | 0xB | 0xE..=0x1F | 0x7F | 0x8F | 0x9F => None,
        0x9
        | 0xA
        | 0xC
        | 0xD
        | 0x1680
        | 0x200B..=0x200F
        | 0x2028
        | 0x2029
        | 0x2581
        | 0xFEFF
        | 0xFFFD => Some(' '),
        _ => Some(c),
    }
}

fn collapse_spaces(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for word in text.split(' ').filter(|word| !word.is_empty()) {
        if !out.is_empty() {
            out.push(' ');
        }
        out.push_str(word);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_do_what_their_names_say() {
        let cases = [
            (Normalizer::Nfc, "e\u{301}", "é"),
            (Normalizer::Nfkd, "ﬁ", "fi"),
            (Normalizer::Nmt, "a\u{1}b\u{200B}c", "ab c"),
            (
                Normalizer::Lowercase,
                "ΑΣ İ",
                "ας i\u{307}".replace('ς', "σ").leak(),
            ),
            (Normalizer::StripAccents, "e\u{301}", "e"),
            (
                Normalizer::Strip {
                    left: true,
                    right: false,
                },
                " a ",
                "a ",
            ),
            (Normalizer::Prepend("▁".into()), "", ""),
            (Normalizer::Prepend("▁".into()), "a", "▁a"),
            (Normalizer::CollapseSpaces, "  a   b ", "a b"),
            (
                Normalizer::Bert(Bert {
                    clean_text: true,
                    handle_chinese_chars: true,
                    strip_accents: true,
                    lowercase: true,
                }),
                "É\t中\u{200D}x\0",
                "e  中 x",
            ),
        ];
        for (normalizer, text, expected) in cases {
            assert_eq!(
                normalizer.normalize(text, true).unwrap(),
                expected,
                "{normalizer:?}"
            );
        }
    }

    #[test]
    fn a_chain_of_doublings_is_refused() {
        let double = || Normalizer::Replace {
            pattern: Pattern::literal("a").unwrap(),
            with: "aa".into(),
        };
        let chain = Normalizer::Sequence((0..60).map(|_| double()).collect());
        assert!(matches!(
            chain.normalize("a", true),
            Err(TokenizerError::Expansion { .. })
        ));
    }
}
