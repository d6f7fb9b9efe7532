//! What can be wrong with a chat template.

/// Longer messages are cut: a template chooses what they say.
const MAX_MESSAGE: usize = 1000;

/// Why a chat template could not be compiled or rendered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TemplateError {
    /// The source is no Jinja template.
    #[error("chat template, line {line}: {problem}")]
    Syntax {
        /// From 1; 0 if unknown.
        line: usize,
        /// What is wrong.
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

    /// The conversation is longer than any prompt.
    #[error("conversation of {len} bytes, at most {limit} are made a prompt")]
    ConversationTooLarge {
        /// Bytes of messages, tools, documents and other variables.
        len: usize,
        /// Bytes allowed.
        limit: usize,
    },

    /// The template does something impossible, or more than the limits on work and size allow.
    #[error("chat template, line {line}: {problem}")]
    Render {
        /// From 1; 0 if unknown.
        line: usize,
        /// What is wrong.
        problem: String,
    },

    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {0}")]
    Raised(String),
}

/// Why rendering ended early.
#[derive(Debug)]
pub(super) struct Fault(Box<Kind>);

#[derive(Debug)]
enum Kind {
    Problem(String),
    Raised(String),
}

impl Fault {
    pub(super) fn new(problem: impl AsRef<str>) -> Self {
        Self(Box::new(Kind::Problem(cut(problem.as_ref()))))
    }

    /// The template's own refusal.
    pub(super) fn raised(message: &str) -> Self {
        Self(Box::new(Kind::Raised(cut(message))))
    }

    pub(super) fn at(self, line: u32) -> TemplateError {
        match *self.0 {
            Kind::Raised(message) => TemplateError::Raised(message),
            Kind::Problem(problem) => TemplateError::Render {
                line: line as usize,
                problem,
            },
        }
    }
}

/// The beginning of a text that may be long.
pub(super) fn cut(text: &str) -> String {
    if text.len() <= MAX_MESSAGE {
        return text.to_owned();
    }
    let start = text.floor_char_boundary(MAX_MESSAGE);
    format!("{}… ({} bytes)", &text[..start], text.len())
}
