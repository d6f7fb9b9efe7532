//! Constrained output: which tokens a JSON schema, a regular expression or a grammar allows next.
//!
//! For whatever chooses tokens: it asks a [`Constraint`] before each, and tells it which one was chosen. Not
//! for models or logits; the vocabulary is given as the bytes of each token.
//!
//! ```
//! use sterna_constraint::{Constraint, Grammar, Vocabulary};
//!
//! let tokens = ["y", "es", "n", "o", "yes"].map(|token| token.as_bytes().to_vec());
//! let vocabulary = Vocabulary::new(tokens.to_vec())?;
//! let mut constraint = Constraint::new(&vocabulary, &Grammar::Regex("yes|no".into()))?;
//! assert_eq!(constraint.allowed()?.tokens, [0b10101]);
//! constraint.accept(2)?;
//! assert_eq!(constraint.allowed()?.tokens, [0b01000]);
//! constraint.accept(3)?;
//! let last = constraint.allowed()?;
//! assert!(last.tokens == [0] && last.end);
//! # Ok::<(), sterna_constraint::ConstraintError>(())
//! ```
#![forbid(unsafe_code)]

mod constraint;
mod error;
mod grammar;
mod vocabulary;

pub use constraint::{Allowed, Constraint};
pub use error::ConstraintError;
pub use grammar::{Grammar, bounded};
pub use vocabulary::Vocabulary;

#[cfg(test)]
mod tests;
