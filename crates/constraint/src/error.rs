//! What is wrong with a grammar, or with the tokens said to follow it.

/// Why output can't be constrained.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConstraintError {
    /// A schema that isn't JSON.
    #[error("JSON schema: expected JSON, found none: {0}")]
    NotJson(#[source] serde_json::Error),
    /// A schema that is another kind of JSON.
    #[error("JSON schema: expected an object, true or false, found {found}")]
    NotASchema {
        /// What it is.
        found: &'static str,
    },
    /// A grammar longer than any that is meant well.
    #[error("{kind}: expected at most {limit} bytes, found {len}")]
    TooLong {
        /// The kind of grammar.
        kind: &'static str,
        /// Its length in bytes.
        len: usize,
        /// The longest allowed.
        limit: usize,
    },
    /// Parentheses in parentheses, deeper than can be read.
    #[error(
        "{kind}: expected at most {limit} brackets inside one another, found more at byte {at}"
    )]
    TooDeep {
        /// The kind of grammar.
        kind: &'static str,
        /// The byte where there is one too many.
        at: usize,
        /// The most allowed.
        limit: usize,
    },
    /// A grammar that isn't valid, asks for what isn't supported, or takes more than the limits allow.
    #[error("{kind}: {message}")]
    NotCompiled {
        /// The kind of grammar.
        kind: &'static str,
        /// What is wrong, and where.
        message: String,
    },
    /// A vocabulary that no grammar can be matched with.
    #[error("the vocabulary: {0}")]
    Vocabulary(String),
    /// The grammar takes more time or memory for a token than the limits allow.
    #[error("the next token: {0}")]
    Step(String),
    /// A token that isn't allowed.
    #[error("expected a token that the grammar allows, found {id}")]
    NotAllowed {
        /// The token.
        id: u32,
    },
}
