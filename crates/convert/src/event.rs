//! What a conversion has to say while it works.

use std::fmt;

use sterna::native::LocalModel;
use sterna_format::bundle::ArchType;

/// What happens during a conversion.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A step begins.
    Started {
        /// Which.
        step: Step,
        /// Bytes that it will read.
        n_bytes: u64,
    },
    /// The step has read so many bytes more.
    Advanced {
        /// How many.
        n_bytes: u64,
    },
    /// Something that the user should know, and that doesn't stop it.
    Warning(Warning),
}

/// What is called with each event.
pub type Notify<'a> = dyn Fn(Event) + 'a;

/// A part of a conversion that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Hashing the files of a package.
    Verifying,
    /// Writing tensors as the types asked for.
    Converting,
    /// Making what a quantize manifest lists.
    Quantizing,
}

impl Step {
    /// What progress bars call it.
    pub const fn name(self) -> &'static str {
        match self {
            Step::Verifying => "verifying",
            Step::Converting => "converting",
            Step::Quantizing => "quantizing",
        }
    }
}

/// Something that went right, but not as one would expect.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// About the files of the model, or an adapter for it.
    Model(sterna::Warning),
    /// A type was asked for the output head of a model whose embedding table serves as one.
    NoHead {
        /// Whether it counts for nothing, because another was asked for the table; else it is the table's.
        is_ignored: bool,
    },
    /// Tensors that are stored as another type than the one asked for.
    OtherType {
        /// The first of them, and why.
        reason: String,
        /// How many more there are.
        n_more: usize,
    },
    /// What is written computes not exactly what its source does, here or in llama.cpp.
    Inexact {
        /// The model.
        model: String,
        /// What differs.
        what: String,
    },
    /// What readers of a GGUF file may make of its tokenizer.
    Tokenizer {
        /// The model.
        model: String,
        /// What may differ.
        what: String,
    },
    /// A model that is Qwen3 by its configuration has an architecture of few bits by its README.md.
    Described {
        /// The model.
        model: String,
        /// The architecture that is taken.
        arch: ArchType,
    },
    /// A configuration beside weights that can't be understood is taken to say nothing about them.
    UnknownConfig {
        /// The file, and what is wrong with it.
        reason: String,
    },
}

impl Warning {
    /// Whether it is a warning, and not just worth knowing.
    pub fn is_warning(&self) -> bool {
        match self {
            Warning::Model(warning) => warning.is_warning(),
            Warning::NoHead { is_ignored } => *is_ignored,
            Warning::Inexact { .. } | Warning::UnknownConfig { .. } => true,
            Warning::OtherType { .. } | Warning::Tokenizer { .. } | Warning::Described { .. } => {
                false
            }
        }
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Warning::Model(warning) => warning.fmt(f),
            Warning::NoHead { is_ignored } => {
                f.write_str(
                    "the model has no output head of its own: its embedding table serves as one",
                )?;
                f.write_str(match is_ignored {
                    true => "; the type for the head is ignored, as one is given for the table",
                    false => ", and the type for the head is for the table",
                })
            }
            Warning::OtherType { reason, n_more: 0 } => f.write_str(reason),
            Warning::OtherType { reason, n_more } => {
                write!(f, "{reason} (and {n_more} more like it)")
            }
            Warning::Inexact { model, what } => write!(f, "{model}: {what}"),
            Warning::Tokenizer { model, what } => write!(f, "{model}: tokenizer: {what}"),
            Warning::Described { model, arch } => write!(f, "{model}: {arch} by README.md"),
            Warning::UnknownConfig { reason } => {
                write!(f, "{reason}; taken to say nothing about ternary weights")
            }
        }
    }
}

/// Checks the bytes of a package that nobody has checked yet, on `n_threads` threads: wrong bytes must not
/// become a model that looks right.
pub(crate) fn verify(
    files: &LocalModel,
    n_threads: usize,
    notify: &Notify<'_>,
) -> sterna::Result<()> {
    let checks = files.checks();
    let checked = (files.files().iter().zip(&checks)).filter(|(_, check)| check.is_some());
    notify(Event::Started {
        step: Step::Verifying,
        n_bytes: checked.map(|(file, _)| file.len).sum(),
    });
    let warnings = files.verify(n_threads, &|n_bytes| notify(Event::Advanced { n_bytes }))?;
    warn_of(warnings, notify);
    Ok(())
}

/// Passes the library's own warnings on.
pub(crate) fn warn_of(warnings: Vec<sterna::Warning>, notify: &Notify<'_>) {
    for warning in warnings {
        notify(Event::Warning(Warning::Model(warning)));
    }
}
