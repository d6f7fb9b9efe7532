//! A limit to what a model thinks: once that many tokens are thought, the thought ends.

use sterna::Result;
use sterna::generate::{Allowed, TokenConstraint};

use super::anything;

/// Ends the thought of an answer; what comes after may have to match something.
#[derive(Debug, Clone)]
pub(super) struct ThoughtBudget {
    /// The tokens that begin and end a thought.
    pub(super) begin: Option<u32>,
    pub(super) end: u32,
    /// What comes now is thought.
    pub(super) is_thinking: bool,
    /// Tokens that may still be thought.
    pub(super) n_left: usize,
    pub(super) n_vocab: usize,
    /// What the answer has to match otherwise.
    pub(super) inner: Option<Box<dyn TokenConstraint>>,
}

impl ThoughtBudget {
    fn note(&mut self, id: u32) {
        match self.is_thinking {
            true if id == self.end => self.is_thinking = false,
            true => self.n_left = self.n_left.saturating_sub(1),
            false => self.is_thinking = Some(id) == self.begin,
        }
    }

    fn must_end(&self) -> bool {
        self.is_thinking && self.n_left == 0
    }
}

impl TokenConstraint for ThoughtBudget {
    fn allowed(&mut self) -> Result<Allowed> {
        let mut allowed = match &mut self.inner {
            Some(inner) => inner.allowed()?,
            None => anything(self.n_vocab),
        };
        let (word, bit) = (self.end as usize / 32, 1 << (self.end % 32));
        let may_end = allowed.tokens.get(word).is_some_and(|bits| bits & bit != 0);
        if self.must_end() && may_end {
            allowed.tokens.fill(0);
            allowed.tokens[word] = bit;
            allowed.end = false;
        }
        Ok(allowed)
    }

    fn is_free(&self) -> bool {
        !self.must_end() && self.inner.as_ref().is_none_or(|inner| inner.is_free())
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        self.note(id);
        self.inner.as_mut().map_or(Ok(()), |inner| inner.accept(id))
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        let mut ahead = ThoughtBudget {
            inner: None,
            ..self.clone()
        };
        let mut n = 0;
        for id in ids {
            if ahead.must_end() && *id != self.end {
                break;
            }
            ahead.note(*id);
            n += 1;
        }
        match &mut self.inner {
            Some(inner) => inner.n_allowed(&ids[..n]),
            None => n,
        }
    }

    fn forced(&mut self) -> Vec<u32> {
        match (self.must_end(), &mut self.inner) {
            (false, Some(inner)) => inner.forced(),
            _ => Vec::new(),
        }
    }

    fn boxed(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bits(allowed: &Allowed) -> usize {
        allowed
            .tokens
            .iter()
            .map(|bits| bits.count_ones() as usize)
            .sum()
    }

    #[test]
    fn a_thought_ends_when_its_tokens_are_spent() {
        let mut budget = ThoughtBudget {
            begin: Some(40),
            end: 41,
            is_thinking: false,
            n_left: 2,
            n_vocab: 45,
            inner: None,
        };
        let all = budget.allowed().unwrap();
        assert_eq!((bits(&all), all.end), (45, true));
        // Nothing but thoughts counts.
        for id in [7, 40, 1] {
            budget.accept(id).unwrap();
        }
        assert_eq!(bits(&budget.allowed().unwrap()), 45);
        assert_eq!(budget.n_allowed(&[2, 3, 4]), 1);
        assert_eq!(budget.n_allowed(&[2, 41, 4]), 3);
        budget.accept(2).unwrap();
        let end = budget.allowed().unwrap();
        assert_eq!((bits(&end), end.end, end.tokens[1]), (1, false, 1 << 9));
        assert_eq!(budget.n_allowed(&[3]), 0);
        budget.accept(41).unwrap();
        assert_eq!(bits(&budget.allowed().unwrap()), 45);
    }
}
