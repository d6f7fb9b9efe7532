//! Tokens that are looked for in the text itself, before any splitting: control tokens and user-defined ones.

use std::collections::BTreeMap;
use std::ops::Range;

use aho_corasick::{AhoCorasick, AhoCorasickKind, MatchKind};
use hashbrown::HashMap;

use super::TokenizerError;

/// A token with a fixed spelling in the text.
#[derive(Debug, Clone)]
pub(crate) struct AddedToken {
    pub(crate) content: String,
    /// The spelling that is looked for, and decoded: normalised if the token is looked for in normalised text.
    pub(crate) spelling: String,
    /// A control token: found only where the caller allows it, and left out of decoded text if the caller wishes.
    pub(crate) special: bool,
    /// Looked for after normalising the text, not before.
    pub(crate) normalized: bool,
    /// Takes the white space on its left, or right, with it.
    pub(crate) lstrip: bool,
    pub(crate) rstrip: bool,
    /// Not found inside a word.
    pub(crate) single_word: bool,
}

impl AddedToken {
    /// A token that is looked for as it is written.
    pub(crate) fn plain(content: &str, special: bool) -> Self {
        Self {
            content: content.to_owned(),
            spelling: content.to_owned(),
            special,
            normalized: false,
            lstrip: false,
            rstrip: false,
            single_word: false,
        }
    }
}

/// All added tokens of a tokenizer.
#[derive(Debug, Default)]
pub(crate) struct AddedTokens {
    by_id: BTreeMap<u32, AddedToken>,
    by_content: HashMap<String, u32>,
    raw: Option<Finder>,
    normalized: Option<Finder>,
}

/// Finds the spellings of some of the tokens.
#[derive(Debug)]
struct Finder {
    automaton: AhoCorasick,
    /// By pattern of the automaton.
    ids: Vec<u32>,
}

/// A stretch of text between added tokens, or one of them.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Segment<'a> {
    Text {
        text: &'a str,
        at_start: bool,
        /// Where it begins in the text that was cut.
        offset: usize,
    },
    Token(u32),
}

impl AddedTokens {
    /// Builds the finders for `tokens`.
    pub(crate) fn new(tokens: BTreeMap<u32, AddedToken>) -> Result<Self, TokenizerError> {
        let finder = |normalized: bool| -> Result<Option<Finder>, TokenizerError> {
            let chosen = || {
                tokens.iter().filter(move |(_, token)| {
                    token.normalized == normalized && !token.spelling.is_empty()
                })
            };
            let ids: Vec<u32> = chosen().map(|(id, _)| *id).collect();
            if ids.is_empty() {
                return Ok(None);
            }
            // The denser automata are faster and take memory out of proportion to the file.
            let automaton = AhoCorasick::builder()
                .match_kind(MatchKind::LeftmostLongest)
                .kind(Some(AhoCorasickKind::ContiguousNFA))
                .build(chosen().map(|(_, token)| &token.spelling))
                .map_err(|source| TokenizerError::invalid("added_tokens", source.to_string()))?;
            Ok(Some(Finder { automaton, ids }))
        };
        let (raw, normalized) = (finder(false)?, finder(true)?);
        let by_content = tokens
            .iter()
            .map(|(id, token)| (token.content.clone(), *id))
            .collect();
        Ok(Self {
            by_id: tokens,
            by_content,
            raw,
            normalized,
        })
    }

    /// These tokens, where control tokens with a name that `strips` allows take the white space on their right along.
    pub(crate) fn stripping_right(
        self,
        strips: impl Fn(&str) -> bool,
    ) -> Result<Self, TokenizerError> {
        let mut tokens = self.by_id;
        for token in tokens.values_mut() {
            token.rstrip |= token.special && strips(&token.content);
        }
        Self::new(tokens)
    }

    /// These tokens and `more`, which come before tokens with the same ids.
    pub(crate) fn extended(self, more: BTreeMap<u32, AddedToken>) -> Result<Self, TokenizerError> {
        let mut tokens = self.by_id;
        tokens.extend(more);
        Self::new(tokens)
    }

    /// The added token `id`.
    pub(crate) fn get(&self, id: u32) -> Option<&AddedToken> {
        self.by_id.get(&id)
    }

    /// Every added token by rising id.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &AddedToken)> {
        self.by_id.iter().map(|(id, token)| (*id, token))
    }

    /// The id of the token that is written `content`.
    pub(crate) fn id(&self, content: &str) -> Option<u32> {
        self.by_content.get(content).copied()
    }

    /// Cuts raw text at the tokens that are looked for before normalising; control tokens in `quoted` stay text.
    pub(crate) fn split_raw<'a>(
        &self,
        text: &'a str,
        parse_special: bool,
        quoted: &[Range<usize>],
    ) -> Vec<Segment<'a>> {
        self.split(self.raw.as_ref(), text, true, parse_special, quoted)
    }

    /// Where `text` spells control tokens.
    pub(crate) fn control_tokens(&self, text: &str) -> Vec<Range<usize>> {
        let finders = self.raw.iter().chain(&self.normalized);
        let mut found: Vec<_> = finders
            .flat_map(|finder| {
                let hits = finder.automaton.find_iter(text);
                hits.filter(|hit| self.by_id[&finder.ids[hit.pattern().as_usize()]].special)
                    .map(|hit| hit.start()..hit.end())
            })
            .collect();
        found.sort_by_key(|range| range.start);
        let mut end = 0;
        found.retain(|range| {
            let apart = range.start >= end;
            end = end.max(range.end);
            apart
        });
        found
    }

    /// Cuts normalised text at the tokens that are looked for after normalising.
    pub(crate) fn split_normalized<'a>(
        &self,
        text: &'a str,
        at_start: bool,
        parse_special: bool,
    ) -> Vec<Segment<'a>> {
        self.split(self.normalized.as_ref(), text, at_start, parse_special, &[])
    }

    fn split<'a>(
        &self,
        finder: Option<&Finder>,
        text: &'a str,
        at_start: bool,
        parse_special: bool,
        quoted: &[Range<usize>],
    ) -> Vec<Segment<'a>> {
        let mut segments = Vec::new();
        let mut done = 0;
        let stretch = |from: usize, to: usize| {
            (from < to).then(|| Segment::Text {
                text: &text[from..to],
                at_start: at_start && from == 0,
                offset: from,
            })
        };
        let hits = finder.into_iter().flat_map(|finder| {
            finder
                .automaton
                .find_iter(text)
                .map(|hit| (finder.ids[hit.pattern().as_usize()], hit.start(), hit.end()))
        });
        for (id, mut start, mut end) in hits {
            let token = &self.by_id[&id];
            let inside_word = token.single_word
                && (text[..start].chars().next_back().is_some_and(is_word)
                    || text[end..].chars().next().is_some_and(is_word));
            let is_text = token.special && (!parse_special || overlaps(quoted, start..end));
            if is_text || inside_word || start < done {
                continue;
            }
            if token.lstrip {
                start = text[..start].trim_end().len().max(done);
            }
            if token.rstrip {
                end = text.len() - text[end..].trim_start().len();
            }
            segments.extend(stretch(done, start));
            segments.push(Segment::Token(id));
            done = end;
        }
        segments.extend(stretch(done, text.len()));
        segments
    }
}

/// Whether `range` overlaps one of `ranges`, which are sorted and disjoint.
pub(crate) fn overlaps(ranges: &[Range<usize>], range: Range<usize>) -> bool {
    let after = ranges.partition_point(|other| other.end <= range.start);
    ranges
        .get(after)
        .is_some_and(|other| other.start < range.end)
}

/// What `\w` matches, near enough: letters, digits and the underscore.
fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(tokens: &[(u32, AddedToken)], text: &str, parse_special: bool) -> Vec<String> {
        let added = AddedTokens::new(tokens.iter().cloned().collect()).unwrap();
        let describe = |segment| match segment {
            Segment::Text { text, at_start, .. } => {
                format!("{text}{}", if at_start { "^" } else { "" })
            }
            Segment::Token(id) => id.to_string(),
        };
        added
            .split_raw(text, parse_special, &[])
            .into_iter()
            .map(describe)
            .collect()
    }

    #[test]
    fn longest_leftmost_and_only_where_allowed() {
        let tokens = [
            (1, AddedToken::plain("<s>", true)),
            (2, AddedToken::plain("<s>>", false)),
            (
                3,
                AddedToken {
                    lstrip: true,
                    rstrip: true,
                    ..AddedToken::plain("<m>", false)
                },
            ),
            (
                4,
                AddedToken {
                    single_word: true,
                    ..AddedToken::plain("day", false)
                },
            ),
        ];
        assert_eq!(
            split(&tokens, "a<s>b<s>>c", true),
            ["a^", "1", "b", "2", "c"]
        );
        assert_eq!(split(&tokens, "a<s>b<s>>c", false), ["a<s>b^", "2", "c"]);
        assert_eq!(split(&tokens, "a <m> b", true), ["a^", "3", "b"]);
        assert_eq!(split(&tokens, "monday day", true), ["monday ^", "4"]);
        assert_eq!(split(&tokens, "<s>", true), ["1"]);
        assert_eq!(split(&tokens, "", true), [""; 0]);
    }
}
