//! What can be wrong with a chat template.

use std::error::Error as _;
use std::fmt;

/// Why a chat template could not be compiled or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The source is no Jinja template.
    #[error("chat template, line {line}: {problem}")]
    Syntax {
        /// From 1; 0 if unknown.
        line: usize,
        /// What the engine says.
        problem: String,
    },

    /// The source is longer than any real template.
    #[error("chat template of {len} bytes, at most {limit} are read")]
    TooLarge {
        /// Bytes of source.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },

    /// The template does something impossible, or more than the limits on work and size allow.
    #[error("chat template, line {line}: {problem}")]
    Render {
        /// From 1; 0 if unknown.
        line: usize,
        /// What the engine says.
        problem: String,
    },

    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
}

impl TemplateError {
    pub(super) fn syntax(error: minijinja::Error) -> Self {
        Self::Syntax {
            line: error.line().unwrap_or(0),
            problem: describe(&error),
        }
    }

    pub(super) fn render(error: minijinja::Error) -> Self {
        let mut cause = error.source();
        while let Some(inner) = cause {
            if let Some(RaisedByTemplate(message)) = inner.downcast_ref() {
                return Self::Raised(message.clone());
            }
            cause = inner.source();
        }
        Self::Render {
            line: error.line().unwrap_or(0),
            problem: describe(&error),
        }
    }
}

/// The message of the error and of the innermost one it wraps, without the engine's own name for the place.
fn describe(error: &minijinja::Error) -> String {
    let own = match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    };
    match error.source() {
        Some(source) => format!("{own}: {source}"),
        None => own,
    }
}

/// The message given to `raise_exception`, as the source of the engine's error.
#[derive(Debug)]
pub(super) struct RaisedByTemplate(pub(super) String);

impl fmt::Display for RaisedByTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for RaisedByTemplate {}
