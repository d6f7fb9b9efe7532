//! At most one call in an answer that may have none.

use sterna::Result;
use sterna::generate::{Allowed, TokenConstraint};
use sterna_text::{Decode, StreamDecoder, Tokenizer};

use super::split::Splitter;
use super::{anything, with_mark};

/// Ends an answer behind its first call, which the same [`Splitter`] finds that reads the answer.
#[derive(Debug, Clone)]
pub(super) struct SingleCall {
    heard: Heard,
    n_vocab: usize,
    /// What the answer has to match otherwise.
    inner: Option<Box<dyn TokenConstraint>>,
}

/// The answer so far.
#[derive(Debug, Clone)]
struct Heard {
    decoder: StreamDecoder,
    /// Control tokens that mean something.
    marks: Vec<(u32, &'static str)>,
    splitter: Splitter,
}

impl Heard {
    /// Takes the next token; whether the call is complete.
    fn push(&mut self, id: u32) -> bool {
        let text = self.decoder.push(id);
        self.splitter.push(&with_mark(text, id, &self.marks));
        self.splitter.is_over()
    }
}

impl SingleCall {
    /// Of an answer that is read by `splitter`, with these `marks`, and has to match `inner` otherwise.
    pub(super) fn new(
        tokenizer: &Tokenizer,
        marks: &[(u32, &'static str)],
        splitter: Splitter,
        inner: Option<Box<dyn TokenConstraint>>,
    ) -> SingleCall {
        SingleCall {
            heard: Heard {
                decoder: tokenizer.stream(Decode { skip_special: true }),
                marks: marks.to_vec(),
                splitter,
            },
            n_vocab: tokenizer.n_vocab(),
            inner,
        }
    }

    fn is_over(&self) -> bool {
        self.heard.splitter.is_over()
    }
}

impl TokenConstraint for SingleCall {
    fn allowed(&mut self) -> Result<Allowed> {
        match &mut self.inner {
            _ if self.heard.splitter.is_over() => Ok(Allowed {
                tokens: vec![0; self.n_vocab.div_ceil(32)],
                end: true,
            }),
            Some(inner) => inner.allowed(),
            None => Ok(anything(self.n_vocab)),
        }
    }

    fn is_free(&self) -> bool {
        !self.is_over() && self.inner.as_ref().is_none_or(|inner| inner.is_free())
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        self.heard.push(id);
        self.inner.as_mut().map_or(Ok(()), |inner| inner.accept(id))
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        if self.is_over() {
            return 0;
        }
        let mut ahead = self.heard.clone();
        let last = ids.iter().position(|id| ahead.push(*id));
        let ids = &ids[..last.map_or(ids.len(), |last| last + 1)];
        match &mut self.inner {
            Some(inner) => inner.n_allowed(ids),
            None => ids.len(),
        }
    }

    fn forced(&mut self) -> Vec<u32> {
        match (self.is_over(), &mut self.inner) {
            (false, Some(inner)) => inner.forced(),
            _ => Vec::new(),
        }
    }

    fn boxed(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}
