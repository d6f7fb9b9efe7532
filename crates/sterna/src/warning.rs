//! What went right, but not as one would expect.

use std::fmt;

/// Something that the user of a model should know. Nobody prints it here.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// A recommendation of the model's makers that makes no sense is ignored.
    IgnoredRecommendation {
        /// The model.
        model: String,
        /// The file and what it says.
        reason: String,
    },
    /// What is odd about a model's files, though it can be run.
    Oddity {
        /// The model.
        model: String,
        /// What is odd.
        what: String,
    },
    /// A context longer than the model was made for.
    LongContext {
        /// The model.
        model: String,
        /// Tokens of the context.
        ctx_len: usize,
        /// Tokens that the model was made for.
        max_ctx: usize,
    },
    /// An adapter that was made for a model of another name.
    OtherBase {
        /// The adapter.
        adapter: String,
        /// The model it was made for.
        base: String,
        /// What the model is called.
        names: Vec<String>,
    },
    /// A file was verified by the variant of BLAKE3 that the existing JavaScript runtime computes.
    Blake3Variant {
        /// The file.
        file: String,
    },
    /// A GPU was to compute and can't; the CPU does.
    NotOnGpu {
        /// Why.
        reason: String,
    },
    /// Where a model is computed, if that was left open or not all of it is where it was asked to be.
    Placement {
        /// The device, and what lies elsewhere.
        device: String,
    },
}

impl Warning {
    /// Whether it is a warning, and not just worth knowing.
    pub fn is_warning(&self) -> bool {
        match self {
            Warning::IgnoredRecommendation { .. }
            | Warning::Oddity { .. }
            | Warning::LongContext { .. }
            | Warning::OtherBase { .. } => true,
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
            Warning::NotOnGpu { reason } => write!(f, "Computing on the CPU: {reason}"),
            Warning::Placement { device } => write!(f, "Computing on {device}"),
        }
    }
}
