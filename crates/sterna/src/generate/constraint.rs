//! Answers that have to match something: which tokens may come next.

use std::fmt;

use sterna_engine::backend::MaybeSend;
use sterna_engine::sampling::is_allowed;
use sterna_text::Tokenizer;

use crate::error::{Error, ErrorCode, Result};

/// Decides which tokens may come next in an answer. [`crate::constraint`] has those of grammars.
pub trait TokenConstraint: fmt::Debug + MaybeSend {
    /// What may follow the tokens accepted so far.
    fn allowed(&mut self) -> Result<Allowed>;

    /// Whether any token may follow, and the answer may end: then [`TokenConstraint::allowed`] isn't asked.
    fn is_free(&self) -> bool {
        false
    }

    /// Appends `id`, which is allowed.
    fn accept(&mut self, id: u32) -> Result<()>;

    /// How many of `ids` could follow, one after the other: drafts are cut to that.
    fn n_allowed(&mut self, ids: &[u32]) -> usize;

    /// Tokens that spell what certainly follows, to be drafted: others may spell it too.
    fn forced(&mut self) -> Vec<u32> {
        Vec::new()
    }

    /// The same constraint, for another answer.
    fn boxed(&self) -> Box<dyn TokenConstraint>;
}

impl Clone for Box<dyn TokenConstraint> {
    fn clone(&self) -> Self {
        (**self).boxed()
    }
}

/// What may come next.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed {
    /// A bit for each token, the lowest first. Those that end the answer don't count.
    pub tokens: Vec<u32>,
    /// The answer may end here.
    pub end: bool,
}

/// What each token of `tokenizer` spells, for constraints: the bytes that it adds to a text, or, of control tokens,
/// their names after the byte 0xFF, which no text has. Ids that nothing uses spell nothing.
pub fn spellings(tokenizer: &Tokenizer) -> Vec<Vec<u8>> {
    let spelling = |id| match tokenizer.piece(id) {
        Some(name) if tokenizer.is_special(id) => [b"\xFF", name.as_bytes()].concat(),
        _ => tokenizer.token_bytes(id).unwrap_or_default(),
    };
    (0..tokenizer.n_vocab() as u32).map(spelling).collect()
}

/// A constraint, and what it allows next.
#[derive(Debug)]
pub(super) struct Constrained {
    constraint: Box<dyn TokenConstraint>,
    stop_ids: Vec<u32>,
    /// What comes next, once it is known.
    next: Option<Next>,
}

/// What comes next.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Next {
    /// Nothing.
    End,
    /// Any token.
    Any,
    /// This token, whose bit is the only one.
    Token { id: u32, bits: Vec<u32> },
    /// One of several, a bit for each; stop ids are among them if the answer may end.
    OneOf(Vec<u32>),
}

impl Next {
    /// Whether `id` may come next.
    pub(super) fn allows(&self, id: u32) -> bool {
        match self {
            Next::End => false,
            Next::Any => true,
            Next::Token { bits, .. } | Next::OneOf(bits) => is_allowed(bits, id),
        }
    }
}

impl Constrained {
    pub(super) fn new(constraint: Box<dyn TokenConstraint>, stop_ids: &[u32]) -> Constrained {
        Constrained {
            constraint,
            stop_ids: stop_ids.to_vec(),
            next: None,
        }
    }

    /// What comes next. Without stop ids, an answer ends as soon as it may.
    pub(super) fn next(&mut self) -> Result<&Next> {
        let next = match self.next.take() {
            Some(next) => next,
            None => self.find_next()?,
        };
        Ok(self.next.insert(next))
    }

    /// The tokens that may come next, a bit for each, or `None` if any may. `None` at once where that isn't known yet, or
    /// nothing may come.
    pub(super) fn allowed(&self) -> Option<Option<&[u32]>> {
        if self.is_free() {
            return Some(None);
        }
        match self.next.as_ref()? {
            Next::End => None,
            Next::Any => Some(None),
            Next::Token { bits, .. } | Next::OneOf(bits) => Some(Some(bits)),
        }
    }

    /// Whether any token may come next.
    pub(super) fn is_free(&self) -> bool {
        self.constraint.is_free()
    }

    fn find_next(&mut self) -> Result<Next> {
        if self.is_free() {
            return Ok(Next::Any);
        }
        let Allowed { mut tokens, end } = self.constraint.allowed()?;
        for &id in &self.stop_ids {
            if let Some(bits) = tokens.get_mut(id as usize / 32) {
                *bits &= !(1 << (id % 32));
            }
        }
        let n_allowed: u32 = tokens.iter().map(|bits| bits.count_ones()).sum();
        match (n_allowed, end) {
            (0, false) => Err(Error::new(
                ErrorCode::InvalidRequest,
                "the constraint: expected a token that may come next, found none in the vocabulary",
            )),
            (0, true) => Ok(Next::End),
            (_, true) if self.stop_ids.is_empty() => Ok(Next::End),
            (1, false) => {
                let word = tokens.iter().position(|&bits| bits != 0).unwrap_or(0);
                Ok(Next::Token {
                    id: word as u32 * 32 + tokens[word].trailing_zeros(),
                    bits: tokens,
                })
            }
            (_, end) => {
                for &id in self.stop_ids.iter().filter(|_| end) {
                    let word = id as usize / 32;
                    tokens.resize(tokens.len().max(word + 1), 0);
                    tokens[word] |= 1 << (id % 32);
                }
                Ok(Next::OneOf(tokens))
            }
        }
    }

    pub(super) fn accept(&mut self, id: u32) -> Result<()> {
        self.next = None;
        self.constraint.accept(id)
    }

    /// Those of `drafts` that may follow.
    pub(super) fn cut<'a>(&mut self, drafts: &'a [u32]) -> &'a [u32] {
        match drafts {
            [] => drafts,
            _ => &drafts[..self.constraint.n_allowed(drafts).min(drafts.len())],
        }
    }

    pub(super) fn forced(&mut self) -> Vec<u32> {
        self.constraint.forced()
    }
}
