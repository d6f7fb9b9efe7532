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
    tokenizer: Tokenizer,
}

impl TextStream {
    /// Text of what follows `last`, the end of a prompt.
    pub(super) fn new(options: TextOptions, last: Option<u32>) -> TextStream {
        TextStream {
            decoder: Some(decoder_after(&options.tokenizer, last)),
            stops: StopStrings::new(options.stop_strings),
            tokenizer: options.tokenizer,
        }
    }

    /// The text completed by `id`. Behind a control token, nothing of what was before it is held back: no stop string has one
    /// in it, and what it means comes after that text.
    pub(super) fn push(&mut self, id: u32) -> Passed {
        let decoder = self.decoder.as_mut();
        let text = decoder.map(|decoder| decoder.push(id)).unwrap_or_default();
        let mut passed = self.stops.push(&text);
        if !passed.stopped && self.tokenizer.is_special(id) {
            passed.text += &self.stops.finish();
        }
        passed
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

#[cfg(test)]
mod tests {
    use std::fs;

    use sterna_text::Encode;

    use super::*;

    #[test]
    fn what_is_held_back_comes_before_a_control_token() {
        let file = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/models/tiny-tales/tokenizer.json"
        );
        let tokenizer = Tokenizer::from_hf_json(&fs::read(file).unwrap(), None).unwrap();
        let mut ids = 0..tokenizer.n_vocab() as u32;
        let control = ids.find(|id| tokenizer.is_special(*id)).unwrap();
        let ids = tokenizer.encode("tale", Encode::RAW).unwrap();
        let options = TextOptions {
            tokenizer,
            stop_strings: vec!["tales!".to_owned()],
        };
        let mut stream = TextStream::new(options, None);
        let text: String = ids.into_iter().map(|id| stream.push(id).text).collect();
        assert_eq!(text.trim(), "");
        let passed = stream.push(control);
        assert_eq!((passed.text.trim(), passed.stopped), ("tale", false));
        assert_eq!(stream.finish().text, "");
    }
}
