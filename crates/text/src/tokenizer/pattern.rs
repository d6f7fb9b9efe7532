//! What a normalizer replaces or a pre-tokenizer splits at: a fixed text or a regular expression.

use std::borrow::Cow;
use std::ops::Range;

use fancy_regex::{Regex, RegexBuilder};

use super::TokenizerError;

/// The split of GPT-2, which the byte-level steps of `tokenizer.json` use by name.
pub(crate) const GPT2: &str =
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// A text or an expression to look for.
#[derive(Debug)]
pub(crate) enum Pattern {
    Literal(String),
    Regex(Box<Regex>),
}

/// What Oniguruma takes for a word character. The `regex` crates follow another annex of Unicode: fractions and
/// superscripts are none there, joiners are.
const WORD: &str = r"\p{L}\p{M}\p{N}\p{Pc}";

fn with_word_class(expression: &str) -> String {
    let mut out = String::with_capacity(expression.len());
    let mut class_depth = 0;
    let mut chars = expression.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('w') if class_depth > 0 => out.push_str(WORD),
                Some('w') => out.push_str(&format!("[{WORD}]")),
                Some('W') => out.push_str(&format!("[^{WORD}]")),
                escaped => {
                    out.push('\\');
                    out.extend(escaped);
                }
            },
            '[' => {
                class_depth += 1;
                out.push(c);
            }
            ']' => {
                class_depth = usize::saturating_sub(class_depth, 1);
                out.push(c);
            }
            _ => out.push(c),
        }
    }
    out
}

impl Pattern {
    /// A pattern that matches exactly `text`, which must not be empty.
    pub(crate) fn literal(text: &str) -> Result<Self, TokenizerError> {
        if text.is_empty() {
            return Err(TokenizerError::invalid(
                "pattern",
                "is empty, which would match everywhere",
            ));
        }
        Ok(Self::Literal(text.to_owned()))
    }

    /// A regular expression in the syntax of Oniguruma, as far as `fancy_regex` shares it, with its meaning of `\w`.
    pub(crate) fn oniguruma(expression: &str) -> Result<Self, TokenizerError> {
        Self::regex(&with_word_class(expression))
    }

    /// A regular expression in the syntax and meaning of `fancy_regex`.
    pub(crate) fn regex(expression: &str) -> Result<Self, TokenizerError> {
        RegexBuilder::new(expression)
            .backtrack_limit(10_000_000)
            .build()
            .map(|regex| Self::Regex(Box::new(regex)))
            .map_err(|source| TokenizerError::Pattern {
                pattern: expression.chars().take(200).collect(),
                source: Box::new(source),
            })
    }

    /// Calls `found` with every match in `text`, from left to right, not overlapping.
    pub(crate) fn each_match(
        &self,
        text: &str,
        mut found: impl FnMut(Range<usize>) -> Result<(), TokenizerError>,
    ) -> Result<(), TokenizerError> {
        match self {
            Self::Literal(literal) => {
                for (start, part) in text.match_indices(literal.as_str()) {
                    found(start..start + part.len())?;
                }
            }
            Self::Regex(regex) => {
                for hit in regex.find_iter(text) {
                    let hit = hit.map_err(|source| TokenizerError::PatternGaveUp {
                        len: text.len(),
                        source: Box::new(source),
                    })?;
                    found(hit.range())?;
                }
            }
        }
        Ok(())
    }

    /// `text` with every match replaced by `with`; an error if the result has more than `limit` bytes.
    pub(crate) fn replace<'a>(
        &self,
        text: Cow<'a, str>,
        with: &str,
        limit: usize,
    ) -> Result<Cow<'a, str>, TokenizerError> {
        let mut out = String::new();
        let mut copied = 0;
        self.each_match(&text, |hit| {
            out.push_str(&text[copied..hit.start]);
            out.push_str(with);
            copied = hit.end;
            if out.len() > limit {
                return Err(TokenizerError::Expansion {
                    len: text.len(),
                    limit,
                });
            }
            Ok(())
        })?;
        if copied == 0 && out.is_empty() {
            return Ok(text);
        }
        out.push_str(&text[copied..]);
        Ok(Cow::Owned(out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_those_of_oniguruma() {
        for (expression, expected) in [
            (
                r"\w+|[^\w\s]",
                r"[\p{L}\p{M}\p{N}\p{Pc}]+|[^\p{L}\p{M}\p{N}\p{Pc}\s]",
            ),
            (r"\\w\W", r"\\w[^\p{L}\p{M}\p{N}\p{Pc}]"),
            (r"a\", r"a\"),
        ] {
            assert_eq!(with_word_class(expression), expected);
        }
    }

    #[test]
    fn a_pattern_that_backtracks_without_end_is_an_error() {
        let pattern = Pattern::regex(r"(?=(a+)+$)b").unwrap();
        let found = pattern.each_match(&"a".repeat(40), |_| Ok(()));
        assert!(matches!(
            found,
            Ok(()) | Err(TokenizerError::PatternGaveUp { .. })
        ));
    }
}
