//! RWKV's vocabulary of the world's languages: pieces are bytes, and a text becomes the longest that it begins with, from
//! left to right.
//!
//! Files spell bytes as Python does: `\n`, `\xe4`.

use std::collections::BTreeMap;

use sterna_format::hf::TokenizerConfig;

use super::added::{AddedToken, AddedTokens};
use super::decode::Decoder;
use super::model::Model;
use super::prefix::PrefixIndex;
use super::pretokenize::PreTokenizer;
use super::vocab::Vocab;
use super::wordpiece::WordPiece;
use super::{Parts, Tokenizer, TokenizerError, bytes};

/// What id 0 is called, which ends texts and no text becomes.
const END: &str = "<s>";

impl Tokenizer {
    /// Reads `rwkv_vocab_v20230424.txt`: lines of an id, a piece as a Python literal, and its bytes. A
    /// `tokenizer_config.json` may add tokens and roles.
    ///
    /// # Errors
    ///
    /// [`TokenizerError::Invalid`] names the line that isn't one.
    pub fn from_rwkv_vocab(
        file: &[u8],
        config: Option<&TokenizerConfig>,
    ) -> Result<Self, TokenizerError> {
        let mut vocab = Vocab::new(file.len());
        vocab.insert(END, 0)?;
        for (number, line) in (1..).zip(file.split(|byte| *byte == b'\n')) {
            let line = line.trim_ascii();
            if line.is_empty() {
                continue;
            }
            let bad = |problem: &str| {
                TokenizerError::invalid(format!("vocabulary, line {number}"), problem.to_owned())
            };
            let line = std::str::from_utf8(line).map_err(|_| bad("expected UTF-8"))?;
            let parts = line.split_once(' ').zip(line.rsplit_once(' '));
            let ((id, _), (rest, n_bytes)) =
                parts.ok_or_else(|| bad("expected an id, a piece and its length"))?;
            let literal = rest.get(id.len() + 1..).unwrap_or_default();
            let piece = literal_bytes(literal).ok_or_else(|| bad("expected a Python literal"))?;
            if n_bytes.parse() != Ok(piece.len()) {
                return Err(bad("the piece has another length than is said"));
            }
            let id = id.parse().ok().filter(|&id| id > 0);
            let id = id.ok_or_else(|| bad("the id is not a number above 0"))?;
            if vocab.piece(id).is_some() {
                return Err(bad("another piece has this id"));
            }
            vocab.insert(&bytes::spell_all(&piece), id)?;
        }
        let end = AddedToken::plain(END, true);
        let mut parts = parts(vocab, BTreeMap::from([(0, end)]))?;
        parts.specials.eos = Some(END.to_owned());
        // Configurations name other ends by text, which no piece is spelled as.
        parts.eos = Some(0);
        parts.end_ids.push(0);
        if let Some(config) = config {
            parts.complete(config)?;
        }
        Ok(Self::assemble(parts))
    }
}

/// The tokenizer of a vocabulary whose pieces have a character for each byte, but for those `added`.
pub(super) fn parts(
    vocab: Vocab,
    added: BTreeMap<u32, AddedToken>,
) -> Result<Parts, TokenizerError> {
    let pieces = PrefixIndex::new(&vocab, |id| !added.contains_key(&id));
    let model = Model::WordPiece(WordPiece {
        continuing_subword_prefix: String::new(),
        max_chars: usize::MAX,
        unknown: None,
        pieces,
    });
    Ok(Parts {
        pre_tokenizer: Some(PreTokenizer::ByteLevel {
            add_prefix_space: false,
            split: None,
        }),
        ..Parts::new(
            vocab,
            AddedTokens::new(added)?,
            model,
            Decoder::byte_level(),
        )
    })
}

/// Whether `model` is one of bytes, with the longest piece first.
pub(super) fn is_one(model: &WordPiece) -> bool {
    model.continuing_subword_prefix.is_empty() && model.max_chars == usize::MAX
}

/// The bytes of a Python literal, of text or of bytes.
fn literal_bytes(literal: &str) -> Option<Vec<u8>> {
    let (is_bytes, quoted) = match literal.strip_prefix('b') {
        Some(quoted) => (true, quoted),
        None => (false, literal),
    };
    let quote = quoted.chars().next().filter(|c| matches!(c, '\'' | '"'))?;
    let inner = quoted.strip_prefix(quote)?.strip_suffix(quote)?;
    unescaped(inner, is_bytes)
}

/// The bytes that `text` spells; `\xe4` is a byte, or a character if it isn't bytes that are spelled.
pub(super) fn unescaped(text: &str, is_bytes: bool) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        let escaped = match c {
            '\\' => chars.next()?,
            _ => {
                push(&mut out, c);
                continue;
            }
        };
        let n_digits = match escaped {
            'x' => 2,
            'u' if !is_bytes => 4,
            'U' if !is_bytes => 8,
            't' => {
                out.push(b'\t');
                continue;
            }
            'n' => {
                out.push(b'\n');
                continue;
            }
            'r' => {
                out.push(b'\r');
                continue;
            }
            other => {
                push(&mut out, other);
                continue;
            }
        };
        let digits = chars.as_str().get(..n_digits)?;
        chars = chars.as_str()[n_digits..].chars();
        let code = u32::from_str_radix(digits, 16).ok()?;
        match u8::try_from(code) {
            Ok(byte) if is_bytes => out.push(byte),
            _ => push(&mut out, char::from_u32(code)?),
        }
    }
    Some(out)
}

fn push(out: &mut Vec<u8>, c: char) {
    out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
}

/// `piece`, one character for each byte, as Python spells bytes.
pub(super) fn escaped(piece: &str) -> Option<String> {
    let mut bytes = Vec::new();
    if !super::bytes::unspell(piece, &mut bytes) {
        return None;
    }
    let escaped = bytes.iter().map(|byte| match byte {
        b'\\' => "\\\\".to_owned(),
        b'\t' => "\\t".to_owned(),
        b'\n' => "\\n".to_owned(),
        b'\r' => "\\r".to_owned(),
        b' '..=b'~' => char::from(*byte).to_string(),
        byte => format!("\\x{byte:02x}"),
    });
    Some(escaped.collect())
}

#[cfg(test)]
mod tests {
    use sterna_format::gguf::{Metadata, Value};

    use super::super::{Decode, Encode};
    use super::*;

    /// All bytes but one of those that UTF-8 never has, and some longer pieces.
    fn vocabulary() -> String {
        let mut lines: Vec<String> = (0..=255_u8)
            .map(|byte| {
                let spelled = match byte {
                    b'\\' => r"'\\'".to_owned(),
                    b'\'' => "\"'\"".to_owned(),
                    b'\n' => r"'\n'".to_owned(),
                    b' '..=b'~' => format!("'{}'", char::from(byte)),
                    0x80.. => format!("b'\\x{byte:02x}'"),
                    _ => format!("'\\x{byte:02x}'"),
                };
                format!("{} {spelled} 1", u32::from(byte) + 1)
            })
            .collect();
        lines.push("257 'ab' 2".into());
        lines.push("258 ' the' 4".into());
        lines.push("259 'abcd' 4".into());
        lines.push(r"260 b'\xe4\xbd' 2".into());
        lines.push("261 '你' 3".into());
        lines.push("262 'é' 2".into());
        lines.push(r"263 '\u200b' 3".into());
        lines.push("264 ' \"' 2".into());
        lines.join("\n")
    }

    #[test]
    fn the_longest_piece_is_first() {
        let tokenizer = Tokenizer::from_rwkv_vocab(vocabulary().as_bytes(), None).unwrap();
        for (text, ids) in [
            ("", &[][..]),
            ("abc", &[257, 100]),
            ("abcd the", &[259, 258]),
            ("你", &[261]),
            // Its first two bytes, and another third.
            ("佡", &[260, 0xa1 + 1]),
            ("é\n\\", &[262, 11, 93]),
            ("\u{200b} \"'", &[263, 264, 40]),
            ("<s>a", &[0, 98]),
        ] {
            let found = tokenizer.encode(text, Encode::RAW).unwrap();
            assert_eq!(found, ids, "{text:?}");
            assert_eq!(tokenizer.decode(&found, Decode::default()), text);
        }
    }

    #[test]
    fn a_configuration_that_names_no_piece_leaves_the_end() {
        let config = TokenizerConfig::parse(br#"{"eos_token": "\n\n"}"#).unwrap();
        let file = vocabulary();
        let tokenizer = Tokenizer::from_rwkv_vocab(file.as_bytes(), Some(&config)).unwrap();
        assert_eq!(tokenizer.eos(), Some(0));
        assert!(tokenizer.end_ids().contains(&0));
    }

    #[test]
    fn gguf_says_it() {
        let tokenizer = Tokenizer::from_rwkv_vocab(vocabulary().as_bytes(), None).unwrap();
        let written = tokenizer.to_gguf("rwkv7", 300).unwrap();
        let mut metadata = Metadata::new();
        let architecture = Value::String("rwkv7".into());
        metadata
            .insert("general.architecture", architecture)
            .unwrap();
        for (key, value) in written.entries {
            metadata.insert(key, value).unwrap();
        }
        let read = Tokenizer::from_gguf(&metadata).unwrap();
        let text = "the abcd 你好 \\ \u{200b}<s>";
        let ids = tokenizer.encode(text, Encode::TEXT).unwrap();
        assert_eq!(read.encode(text, Encode::TEXT).unwrap(), ids);
        assert_eq!(read.eos(), Some(0));
    }

    #[test]
    fn lines_that_are_none_are_named() {
        for (line, expected) in [
            ("1 'a'", "expected a Python literal"),
            ("x 'a' 1", "the id is not a number above 0"),
            ("0 'a' 1", "the id is not a number above 0"),
            ("2 'a' 1", "another piece has this id"),
            ("1 'a' 2", "the piece has another length than is said"),
            ("1 a 1", "expected a Python literal"),
            ("1", "expected an id, a piece and its length"),
            (r"1 b'\xzz' 1", "expected a Python literal"),
            (r"1 b'\x' 1", "expected a Python literal"),
            (r"1 '\ud800' 3", "expected a Python literal"),
        ] {
            let file = format!("2 'b' 1\n{line}");
            let error = Tokenizer::from_rwkv_vocab(file.as_bytes(), None).unwrap_err();
            let error = error.to_string();
            assert!(
                error.contains("line 2") && error.contains(expected),
                "{line}: {error}"
            );
        }
    }

    #[test]
    fn pieces_are_spelled_as_they_are_read() {
        let all: Vec<u8> = (0..=255).collect();
        let spelled = escaped(&bytes::spell_all(&all)).unwrap();
        assert_eq!(unescaped(&spelled, true).unwrap(), all);
        assert_eq!(escaped("▁"), None);
    }
}
