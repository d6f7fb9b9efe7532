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
    /// An expression that ends with `|\s+(?!\S)|\s+`, as nearly all splitting expressions do.
    ///
    /// The look-ahead is done by hand: without it an automaton can run the expression in linear time, while
    /// backtracking through a run of a hundred thousand spaces overflows the engine's stack.
    BeforeSpaces(Box<Regex>),
}

/// Runs of white space, less the last one if a word follows.
const SPACES: &str = r"|\s+(?!\S)|\s+";

/// Whether a match at a position may depend on its context.
fn looks_around(expression: &str) -> bool {
    let anchors = expression.replace("[^", "[");
    [
        "(?=", "(?!", "(?<", r"\b", r"\B", r"\A", r"\z", r"\Z", r"\G", r"\K",
    ]
    .iter()
    .any(|look| expression.contains(look))
        || anchors.contains(['^', '$'])
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
        let compile = |expression: &str| {
            RegexBuilder::new(expression)
                .backtrack_limit(10_000_000)
                .build()
                .map(Box::new)
        };
        if let Some(head) = expression.strip_suffix(SPACES).filter(|head| !looks_around(head))
            // A head that ends inside a group does not compile.
            && let Ok(head) = compile(head)
            && let Ok(false) = head.is_match("")
        {
            return Ok(Self::BeforeSpaces(head));
        }
        compile(expression)
            .map(Self::Regex)
            .map_err(|source| TokenizerError::Pattern {
                pattern: expression.chars().take(200).collect(),
                source: Box::new(source),
            })
    }

    /// The expression that this was made of; a fixed text as it is.
    pub(crate) fn expression(&self) -> String {
        match self {
            Self::Literal(text) => text.clone(),
            Self::Regex(regex) => regex.as_str().to_owned(),
            Self::BeforeSpaces(head) => format!("{}{SPACES}", head.as_str()),
        }
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
                    found(hit.map_err(|source| gave_up(text, source))?.range())?;
                }
            }
            Self::BeforeSpaces(head) => {
                let mut at = 0;
                while at < text.len() {
                    let next = head
                        .find_from_pos(text, at)
                        .map_err(|source| gave_up(text, source))?;
                    let hit = next.map_or(text.len()..text.len(), |hit| hit.range());
                    at = spaces_before(text, at, hit.start, &mut found)?;
                    // The spaces may have swallowed the place of the hit, which then has to be looked for again.
                    if at == hit.start && !hit.is_empty() {
                        at = hit.end;
                        found(hit)?;
                    }
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

/// Calls `found` with what [`SPACES`] matches from `at` on, as long as a match begins before `end`; returns where the
/// last one ends, or `end`.
fn spaces_before(
    text: &str,
    mut at: usize,
    end: usize,
    found: &mut impl FnMut(Range<usize>) -> Result<(), TokenizerError>,
) -> Result<usize, TokenizerError> {
    while at < end {
        let run = text[at..].len() - text[at..].trim_start().len();
        let stop = match text[at..at + run].char_indices().next_back() {
            None => {
                // Nothing matches at a character that isn't a space.
                at += text[at..].chars().next().map_or(1, char::len_utf8);
                continue;
            }
            Some((last, _)) if last > 0 && at + run < text.len() => at + last,
            Some(_) => at + run,
        };
        found(at..stop)?;
        at = stop;
    }
    Ok(at)
}

fn gave_up(text: &str, source: fancy_regex::Error) -> TokenizerError {
    TokenizerError::PatternGaveUp {
        len: text.len(),
        source: Box::new(source),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

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

    fn matches(pattern: &Pattern, text: &str) -> Vec<Range<usize>> {
        let mut hits = Vec::new();
        let collect = |hit| {
            hits.push(hit);
            Ok(())
        };
        pattern.each_match(text, collect).unwrap();
        hits
    }

    #[test]
    fn long_runs_of_spaces_are_no_trouble() {
        let pattern = Pattern::regex(GPT2).unwrap();
        let text = " ".repeat(300_000) + "x";
        let hits = matches(&pattern, &text);
        assert_eq!(hits, [0..299_999, 299_999..300_001]);
    }

    proptest! {
        #[test]
        fn spaces_by_hand_are_those_of_the_expression(text in "[ \\n\\t\u{3000}\u{85}ab1.'é]{0,24}") {
            for expression in [GPT2, r"\p{L}+|\s+(?!\S)|\s+", r" ?a|\s*[\r\n]+|\s+(?!\S)|\s+", r"[^a]?b| {2}|\s+(?!\S)|\s+"] {
                let pattern = Pattern::regex(expression).unwrap();
                prop_assert!(matches!(pattern, Pattern::BeforeSpaces(_)));
                let hits = matches(&pattern, &text);
                let whole = Regex::new(expression).unwrap();
                let expected: Vec<_> = whole.find_iter(&text).map(|hit| hit.unwrap().range()).collect();
                prop_assert_eq!(hits, expected, "{}", expression);
            }
        }
    }
}
