//! Answers that match a JSON schema, a regular expression or a grammar.
//!
//! ```
//! # #[cfg(all(feature = "native", feature = "builtin"))]
//! # fn main() -> sterna::Result<()> {
//! use sterna::ChatOptions;
//! use sterna::constraint::Grammar;
//!
//! let model = sterna::native::open("builtin", &Default::default())?;
//! let constraint = model.constraint(&Grammar::Regex("[1-9][0-9]?".into()))?;
//! let mut chat = model.chat(ChatOptions {
//!     constraint: Some(constraint),
//!     ..Default::default()
//! })?;
//! let answer: String = chat.say("What is 3 plus 4?")?.collect::<sterna::Result<_>>()?;
//! assert!(answer.parse::<u8>().is_ok());
//! # Ok(())
//! # }
//! # #[cfg(not(all(feature = "native", feature = "builtin")))]
//! # fn main() {}
//! ```

use std::sync::{Mutex, OnceLock, PoisonError};

pub use sterna_constraint::{Constraint, ConstraintError, Grammar, Vocabulary, bounded};
use sterna_text::Tokenizer;

use crate::error::Result;
use crate::generate::{Allowed, TokenConstraint, spellings};

/// Makes the constraints of one model. They share its vocabulary, which takes a moment for each 100,000 tokens
/// and is made with the first.
#[derive(Debug)]
pub struct Constraints {
    tokenizer: Tokenizer,
    vocabulary: OnceLock<Vocabulary>,
    /// Held by who makes it.
    making: Mutex<()>,
}

impl Constraints {
    /// Of the model with this tokenizer.
    pub fn new(tokenizer: Tokenizer) -> Constraints {
        Constraints {
            tokenizer,
            vocabulary: OnceLock::new(),
            making: Mutex::new(()),
        }
    }

    /// For [`Request::constraint`](crate::generate::Request::constraint): answers that match `grammar`.
    ///
    /// Errors: a grammar that isn't valid, isn't supported, or takes more than the limits allow; ids of tokens that
    /// don't fit.
    pub fn of(&self, grammar: &Grammar) -> Result<Box<dyn TokenConstraint>> {
        Ok(Box::new(Constraint::new(self.vocabulary()?, grammar)?))
    }

    /// Makes the vocabulary, unless there is one.
    ///
    /// Errors: as [`Constraints::of`], but for those of grammars.
    pub fn prepare(&self) -> Result<()> {
        self.vocabulary().map(drop)
    }

    fn vocabulary(&self) -> Result<&Vocabulary> {
        if let Some(vocabulary) = self.vocabulary.get() {
            return Ok(vocabulary);
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(vocabulary) = self.vocabulary.get() {
            return Ok(vocabulary);
        }
        let made = Vocabulary::new(spellings(&self.tokenizer))?;
        Ok(self.vocabulary.get_or_init(|| made))
    }
}

impl TokenConstraint for Constraint {
    fn allowed(&mut self) -> Result<Allowed> {
        let sterna_constraint::Allowed { tokens, end } = Constraint::allowed(self)?;
        Ok(Allowed { tokens, end })
    }

    fn accept(&mut self, id: u32) -> Result<()> {
        Ok(Constraint::accept(self, id)?)
    }

    fn n_allowed(&mut self, ids: &[u32]) -> usize {
        Constraint::n_allowed(self, ids)
    }

    fn forced(&mut self) -> Vec<u32> {
        Constraint::forced(self)
    }

    fn boxed(&self) -> Box<dyn TokenConstraint> {
        Box::new(self.clone())
    }
}
