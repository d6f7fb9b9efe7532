//! Unexpected but harmless events.

use std::fmt;

use sterna_delivery::hash::Verified;

/// Something that the user of a model should know. This library doesn't print it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// An invalid recommendation of the model was ignored.
    IgnoredRecommendation {
        /// The model.
        model: String,
        /// The file and its content.
        reason: String,
    },
    /// An oddity of a model's files, though it can be run.
    Oddity {
        /// The model.
        model: String,
        /// The oddity.
        what: String,
    },
    /// A context longer than the model's.
    LongContext {
        /// The model.
        model: String,
        /// Tokens of the context.
        ctx_len: usize,
        /// The model's context size.
        max_ctx: usize,
    },
    /// An adapter that was made for a model of another name.
    OtherBase {
        /// The adapter.
        adapter: String,
        /// The base model of the adapter.
        base: String,
        /// The name of the model.
        names: Vec<String>,
    },
    /// A file was verified by the variant of BLAKE3 that the existing JavaScript runtime computes.
    Blake3Variant {
        /// The file.
        file: String,
    },
    /// The hash of a file is labelled SHA-256 and is BLAKE3.
    LabelledSha256 {
        /// The file.
        file: String,
    },
    /// A GPU was requested but can't be used; the CPU is.
    NotOnGpu {
        /// Why.
        reason: String,
    },
    /// The device of a model, if that was left open or not all of it is on the requested one.
    Placement {
        /// The device, and what is elsewhere.
        device: String,
    },
}

impl Warning {
    /// What is odd about how a file was verified.
    pub(crate) fn of_verified(
        verified: Verified,
        file: impl FnOnce() -> String,
    ) -> Option<Warning> {
        match verified {
            Verified::Blake3Variant => Some(Warning::Blake3Variant { file: file() }),
            Verified::LabelledSha256 => Some(Warning::LabelledSha256 { file: file() }),
            _ => None,
        }
    }

    /// Whether it is a warning, and not just information.
    pub fn is_warning(&self) -> bool {
        match self {
            Warning::IgnoredRecommendation { .. }
            | Warning::Oddity { .. }
            | Warning::LongContext { .. }
            | Warning::OtherBase { .. }
            | Warning::LabelledSha256 { .. } => true,
            Warning::Blake3Variant { .. }
            | Warning::NotOnGpu { .. }
            | Warning::Placement { .. } => false,
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::IgnoredRecommendation { model, reason } => {
                write!(f, "{model}: {reason}; ignored")
            }
            Warning::Oddity { model, what } => write!(f, "{model}: {what}"),
            Warning::LongContext {
                model,
                ctx_len,
                max_ctx,
            } => write!(
                f,
                "{model}: a context of {ctx_len} tokens, but the model was made for {max_ctx}"
            ),
            Warning::OtherBase {
                adapter,
                base,
                names,
            } => write!(
                f,
                "{adapter}: it was made for `{base}`; this model is called `{}`",
                names.join("`, `")
            ),
            Warning::Blake3Variant { file } => write!(
                f,
                "{file}: verified by the variant of BLAKE3 that the existing JavaScript runtime computes"
            ),
            Warning::LabelledSha256 { file } => write!(
                f,
                "{file}: the manifest calls its hash SHA-256, and it is BLAKE3"
            ),
            Warning::NotOnGpu { reason } => write!(f, "Computing on the CPU: {reason}"),
            Warning::Placement { device } => write!(f, "Computing on {device}"),
        }
    }
}
