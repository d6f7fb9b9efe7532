//! Decoding ids as they come.

use super::decode::Place;
use super::{Decode, Tokenizer};

/// Takes ids one by one and gives out text as soon as it is certain.
///
/// Characters are never split: bytes that do not yet make one are held back. All that [`StreamDecoder::push`] and
/// [`StreamDecoder::finish`] return, put together, is what [`Tokenizer::decode`] returns for all the ids.
#[derive(Debug, Clone)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    options: Decode,
    /// Bytes that do not yet make a character.
    pending: Vec<u8>,
    /// The last id that said something.
    previous: Option<u32>,
    /// How many more times the character may be dropped from the start of the text.
    strip: Option<(u8, usize)>,
    /// All ids, for the few decoders that know nothing before the last.
    held: Option<Vec<u32>>,
}

impl StreamDecoder {
    pub(super) fn new(tokenizer: Tokenizer, options: Decode) -> Self {
        let decoder = &tokenizer.parts.decoder;
        let held = if decoder.streams() {
            None
        } else {
            Some(Vec::new())
        };
        let strip = decoder.strip_start();
        Self {
            tokenizer,
            options,
            pending: Vec::new(),
            previous: None,
            strip,
            held,
        }
    }

    /// Takes the next id and returns the text that is now certain, which may be empty.
    pub fn push(&mut self, id: u32) -> String {
        if let Some(held) = &mut self.held {
            held.push(id);
            return String::new();
        }
        let parts = &*self.tokenizer.parts;
        let Some(piece) = parts.spelling(id, self.options) else {
            return String::new();
        };
        let place = Place {
            first: self.previous.is_none(),
            last: false,
            previous: self
                .previous
                .and_then(|id| parts.spelling(id, self.options)),
        };
        let bytes = parts.decoder.piece(piece, place);
        self.previous = Some(id);
        let mut bytes = &bytes[..];
        while let (Some((content, left)), Some((first, rest))) = (self.strip, bytes.split_first()) {
            if left == 0 || *first != content {
                self.strip = None;
                break;
            }
            self.strip = Some((content, left - 1));
            bytes = rest;
        }
        self.pending.extend_from_slice(bytes);
        self.take_certain()
    }

    /// The text that was held back: U+FFFD for an incomplete character.
    pub fn finish(self) -> String {
        match self.held {
            Some(ids) => self.tokenizer.decode(&ids, self.options),
            None => String::from_utf8_lossy(&self.pending).into_owned(),
        }
    }

    /// Everything in `pending` but an incomplete character at its end.
    fn take_certain(&mut self) -> String {
        let mut text = String::with_capacity(self.pending.len());
        let mut rest = &self.pending[..];
        loop {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                    break;
                }
                Err(error) => {
                    let (valid, bad) = rest.split_at(error.valid_up_to());
                    text.push_str(&String::from_utf8_lossy(valid));
                    rest = bad;
                    let Some(len) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &bad[len..];
                }
            }
        }
        self.pending = rest.to_vec();
        text
    }
}
