//! The precompiled character map of SentencePiece: a double-array trie from byte strings to replacements.
//!
//! Layout: u32 (little-endian) size of the trie in bytes, the trie as u32 units, then replacement strings, each ended
//! by a zero byte; a trie value is an offset into them. Units are those of Darts-clone.

use unicode_segmentation::UnicodeSegmentation;

use super::TokenizerError;

/// A map from sequences of characters to their replacements.
#[derive(Debug)]
pub(crate) struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// Reads a `precompiled_charsmap`; every lookup in the result is bounds-checked.
    pub(crate) fn parse(blob: &[u8]) -> Result<Self, TokenizerError> {
        let bad = |problem: String| TokenizerError::invalid("precompiled_charsmap", problem);
        let Some((head, rest)) = blob.split_first_chunk::<4>() else {
            return Err(bad(format!(
                "is {} bytes long, its size field alone takes 4",
                blob.len()
            )));
        };
        let trie_bytes = u32::from_le_bytes(*head) as usize;
        if !trie_bytes.is_multiple_of(4) || trie_bytes > rest.len() {
            return Err(bad(format!(
                "names a trie of {trie_bytes} bytes, {} remain",
                rest.len()
            )));
        }
        let (trie, replacements) = rest.split_at(trie_bytes);
        let replacements = std::str::from_utf8(replacements)
            .map_err(|source| bad(format!("replacements are not UTF-8: {source}")))?;
        let units = trie
            .as_chunks::<4>()
            .0
            .iter()
            .map(|unit| u32::from_le_bytes(*unit))
            .collect();
        Ok(Self {
            units,
            replacements: replacements.to_owned(),
        })
    }

    /// The replacements of all prefixes of `text` that the map knows, shortest first: bytes of prefix, replacement.
    fn prefixes<'s>(&'s self, text: &'s [u8]) -> impl Iterator<Item = (usize, &'s str)> {
        let mut node = self.units.first().map_or(0, |root| offset(*root) as usize);
        let mut at = 0;
        let mut alive = !self.units.is_empty();
        std::iter::from_fn(move || {
            while alive && at < text.len() {
                let byte = text[at];
                node ^= byte as usize;
                // A zero byte would walk into the value of the node instead of to a child.
                let Some(&unit) = self
                    .units
                    .get(node)
                    .filter(|unit| byte != 0 && label(**unit) == byte as u32)
                else {
                    alive = false;
                    break;
                };
                at += 1;
                node ^= offset(unit) as usize;
                if has_leaf(unit) {
                    let value = self
                        .units
                        .get(node)
                        .map_or(u32::MAX, |leaf| leaf & 0x7FFF_FFFF);
                    if let Some(replacement) = self.replacement(value as usize) {
                        return Some((at, replacement));
                    }
                }
            }
            None
        })
    }

    fn replacement(&self, start: usize) -> Option<&str> {
        let tail = self.replacements.get(start..)?;
        Some(tail.split('\0').next().unwrap_or(tail))
    }

    /// Replaces the longest known sequence at each place, as SentencePiece does. Stops early beyond `limit` bytes.
    pub(crate) fn normalize(&self, text: &str, limit: usize) -> String {
        let mut out = String::with_capacity(text.len());
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            if out.len() > limit {
                break;
            }
            let longest = self
                .prefixes(rest.as_bytes())
                .filter(|(len, _)| rest.is_char_boundary(*len))
                .last();
            let taken = match longest {
                Some((len, replacement)) => {
                    out.push_str(replacement);
                    len
                }
                None => {
                    out.push(c);
                    c.len_utf8()
                }
            };
            rest = &rest[taken..];
        }
        out
    }

    /// Replaces graphemes, or the characters in them, by their shortest known prefix, as Hugging Face does.
    /// Stops early beyond `limit` bytes.
    pub(crate) fn normalize_by_grapheme(&self, text: &str, limit: usize) -> String {
        let mut out = String::with_capacity(text.len());
        for grapheme in text.graphemes(true) {
            if out.len() > limit {
                break;
            }
            let whole = if grapheme.len() < 6 {
                self.prefixes(grapheme.as_bytes()).next()
            } else {
                None
            };
            if let Some((_, replacement)) = whole {
                out.push_str(replacement);
                continue;
            }
            for (start, c) in grapheme.char_indices() {
                match self
                    .prefixes(&grapheme.as_bytes()[start..start + c.len_utf8()])
                    .next()
                {
                    Some((_, replacement)) => out.push_str(replacement),
                    None => out.push(c),
                }
            }
        }
        out
    }
}

fn has_leaf(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

fn label(unit: u32) -> u32 {
    unit & (1 << 31 | 0xFF)
}

fn offset(unit: u32) -> u32 {
    (unit >> 10) << ((unit & 1 << 9) >> 6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_maps_are_errors_or_harmless() {
        assert!(Charsmap::parse(b"").is_err());
        assert!(Charsmap::parse(&[255, 255, 255, 255, 0]).is_err());
        assert!(Charsmap::parse(&[0, 0, 0, 0, 0xFF]).is_err());
        for byte in 0..=255u8 {
            let mut blob = vec![8, 0, 0, 0];
            blob.extend([byte; 8]);
            let map = Charsmap::parse(&blob).unwrap();
            assert_eq!(map.normalize("aé\0", 1000), "aé\0");
            assert_eq!(map.normalize_by_grapheme("aé\0", 1000), "aé\0");
        }
    }
}
