//! Answers as text.

use sterna_text::{Decode, StreamDecoder, Tokenizer};

use super::TextOptions;
use super::stop::{Passed, StopStrings};

/// Decodes an answer to text, token by token, up to the first stop string.
#[derive(Debug)]
pub(super) struct TextStream {
    /// Taken when the answer ends.
    decoder: Option<StreamDecoder>,
    stops: StopStrings,
}

impl TextStream {
    /// Text of what follows `last`, the end of a prompt.
    pub(super) fn new(options: TextOptions, last: Option<u32>) -> TextStream {
        TextStream {
            decoder: Some(decoder_after(&options.tokenizer, last)),
            stops: StopStrings::new(options.stop_strings),
        }
    }

    /// The text completed by `id`.
    pub(super) fn push(&mut self, id: u32) -> Passed {
        let decoder = self.decoder.as_mut();
        let text = decoder.map(|decoder| decoder.push(id)).unwrap_or_default();
        self.stops.push(&text)
    }

    /// The text that was held back, at the end of the answer.
    pub(super) fn finish(&mut self) -> Passed {
        let decoder = self.decoder.take();
        let rest = decoder.map(StreamDecoder::finish).unwrap_or_default();
        let mut passed = self.stops.push(&rest);
        if !passed.stopped {
            passed.text += &self.stops.finish();
        }
        passed
    }
}

/// A decoder for what follows `last`, the end of a prompt.
fn decoder_after(tokenizer: &Tokenizer, last: Option<u32>) -> StreamDecoder {
    let options = Decode { skip_special: true };
    let mut decoder = tokenizer.stream(options);
    let Some(last) = last else { return decoder };
    // A decoder that has seen the previous token keeps the space between two words, which it would strip at
    // the start of a text.
    if decoder.push(last) == tokenizer.decode(&[last], options) {
        return decoder;
    }
    // It holds the token back, to output it as if it were part of the answer.
    tokenizer.stream(options)
}
