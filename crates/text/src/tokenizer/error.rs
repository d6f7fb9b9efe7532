//! Errors of tokenizers.

/// Why a tokenizer could not be read, or a text not encoded.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TokenizerError {
    /// The file is not JSON, or not the JSON of a tokenizer.
    #[error("tokenizer.json: {0}")]
    Json(#[from] serde_json::Error),

    /// A part of the tokenizer contradicts itself or the rest.
    #[error("tokenizer {place}: {problem}")]
    Invalid {
        /// Which part, in the spelling of the file.
        place: String,
        /// What was expected and what was found.
        problem: String,
    },

    /// A part of the tokenizer is of a kind this crate does not implement.
    #[error("tokenizer {place}: `{found}` is not supported")]
    Unsupported {
        /// Which part, in the spelling of the file.
        place: &'static str,
        /// The kind that was named.
        found: String,
    },

    /// GGUF has no words for a part of the tokenizer.
    #[error("tokenizer {place}: GGUF can't express {found}")]
    Inexpressible {
        /// Which part, in the spelling of `tokenizer.json`.
        place: &'static str,
        /// The value, truncated to a readable length.
        found: String,
    },

    /// A regular expression does not compile.
    #[error("tokenizer pattern `{pattern}`: {source}")]
    Pattern {
        /// The expression, cut to a readable length.
        pattern: String,
        /// Why it was refused.
        source: Box<fancy_regex::Error>,
    },

    /// A regular expression gave up on this text: it backtracks too much.
    #[error("tokenizer pattern gave up on a piece of {len} bytes: {source}")]
    PatternGaveUp {
        /// Bytes of text the expression was applied to.
        len: usize,
        /// Which limit was reached.
        source: Box<fancy_regex::Error>,
    },

    /// The text has a character that the vocabulary cannot spell, and there is no token for the unknown.
    #[error("the vocabulary has no token for {text:?} and no token for unknown text")]
    Unspellable {
        /// The character or word.
        text: String,
    },

    /// Normalising made the text larger than any real tokenizer does.
    #[error("normalising {len} bytes of text gave more than {limit} bytes")]
    Expansion {
        /// Bytes before.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },

    /// The metadata of a GGUF file holds no tokenizer, or a key of it has the wrong type.
    #[error("tokenizer in GGUF metadata: {0}")]
    Metadata(#[source] Box<sterna_format::gguf::GgufError>),
}

impl TokenizerError {
    pub(crate) fn invalid(place: impl Into<String>, problem: impl Into<String>) -> Self {
        Self::Invalid {
            place: place.into(),
            problem: problem.into(),
        }
    }
}
