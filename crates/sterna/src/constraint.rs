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

pub use sterna_constraint::{Constraint, ConstraintError, Grammar, Vocabulary};
use sterna_text::Tokenizer;

use crate::error::Result;
use crate::generate::{Allowed, TokenConstraint, spellings};

/// The vocabulary of `tokenizer`. Making one takes a moment for each 100,000 tokens; all constraints of a model
/// share it.
///
/// Errors: ids that don't fit.
pub fn vocabulary(tokenizer: &Tokenizer) -> Result<Vocabulary> {
    Ok(Vocabulary::new(spellings(tokenizer))?)
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
