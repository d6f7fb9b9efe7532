//! Answers as text.

use anyhow::Result;
use sterna_text::{Decode, StreamDecoder, Tokenizer};

use super::{Answer, Stats, StopReason};
use crate::stop::StopStrings;

/// An answer in words: an iterator over pieces of text, none of them empty.
pub(crate) struct Generation<'a> {
    answer: Answer<'a>,
    /// Taken when the answer ends.
    decoder: Option<StreamDecoder>,
    stops: StopStrings,
}

impl<'a> Generation<'a> {
    /// The text that `tokenizer` decodes `answer` to, up to the first of `stop_strings`.
    pub(crate) fn new(
        answer: Answer<'a>,
        tokenizer: &Tokenizer,
        stop_strings: Vec<String>,
    ) -> Generation<'a> {
        Generation {
            decoder: Some(decoder_after(
                tokenizer,
                answer.request.prompt.last().copied(),
            )),
            stops: StopStrings::new(stop_strings),
            answer,
        }
    }

    /// Tokens of the prompt that are still to be computed.
    pub(crate) fn n_left(&self) -> usize {
        self.answer.n_left()
    }

    /// Computes the next part of the prompt; returns how many of its tokens are still to come.
    pub(crate) fn prefill(&mut self) -> Result<usize> {
        self.answer.prefill()
    }

    /// Tokens generated so far.
    pub(crate) fn ids(&self) -> &[u32] {
        &self.answer.ids
    }

    /// What it took so far.
    pub(crate) fn stats(&self) -> Stats {
        self.answer.stats()
    }

    /// Generates a token; returns the text that became certain by it, or at the end what was held back.
    fn step(&mut self) -> Result<String> {
        let Some(id) = self.answer.next_id()? else {
            return Ok(self.finish());
        };
        let text = self
            .decoder
            .as_mut()
            .map(|decoder| decoder.push(id))
            .unwrap_or_default();
        let passed = self.stops.push(&text);
        if passed.stopped {
            self.answer.stop(StopReason::StopString);
        }
        Ok(passed.text)
    }

    /// The text that was held back, of an answer that has ended.
    fn finish(&mut self) -> String {
        let rest = self
            .decoder
            .take()
            .map(StreamDecoder::finish)
            .unwrap_or_default();
        let passed = self.stops.push(&rest);
        if passed.stopped {
            self.answer.stop(StopReason::StopString);
            return passed.text;
        }
        passed.text + &self.stops.finish()
    }
}

impl Iterator for Generation<'_> {
    type Item = Result<String>;

    fn next(&mut self) -> Option<Result<String>> {
        while self.answer.stats.stop.is_none() {
            match self.step() {
                Ok(text) if text.is_empty() => {}
                piece => return Some(piece),
            }
        }
        None
    }
}

/// A decoder for what follows `last`, the end of a prompt.
fn decoder_after(tokenizer: &Tokenizer, last: Option<u32>) -> StreamDecoder {
    let options = Decode { skip_special: true };
    let mut decoder = tokenizer.stream(options);
    let Some(last) = last else { return decoder };
    // A decoder that sees the token before keeps the space between two words, which it would take
    // off at the start of a text.
    if decoder.push(last) == tokenizer.decode(&[last], options) {
        return decoder;
    }
    // It holds the token back, to give it out as if it were part of the answer.
    tokenizer.stream(options)
}
