//! Progress and warnings of a conversion.

use std::fmt;

use sterna::ModelFiles;
use sterna::embedding::Pooling;
#[cfg(not(target_family = "wasm"))]
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
    /// The step has read this many more bytes.
    Advanced {
        /// How many.
        n_bytes: u64,
    },
    /// Something that the user should know, and that doesn't stop the conversion.
    Warning(Warning),
}

/// A callback for each event.
pub type Notify<'a> = dyn Fn(Event) + 'a;

/// A part of a conversion that takes time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Step {
    /// Hashing the files of a package.
    Verifying,
    /// Writing tensors in the requested types.
    Converting,
    /// Carrying out a quantize manifest.
    Quantizing,
}

impl Step {
    /// Its name in progress bars.
    pub const fn name(self) -> &'static str {
        match self {
            Step::Verifying => "verifying",
            Step::Converting => "converting",
            Step::Quantizing => "quantizing",
        }
    }
}

/// Unexpected but harmless events.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Warning {
    /// About the files of the model, or an adapter for it.
    Model(sterna::Warning),
    /// A type was requested for the output head of a model that uses its embedding table.
    NoHead {
        /// Whether it is ignored, because another was requested for the table; else it is the table's.
        is_ignored: bool,
    },
    /// Tensors that are stored as another type than the requested one.
    OtherType {
        /// The first of them, and why.
        reason: String,
        /// How many more there are.
        n_more: usize,
    },
    /// The output doesn't compute exactly the same as its source, here or in llama.cpp.
    Inexact {
        /// The model.
        model: String,
        /// What differs.
        what: String,
    },
    /// No token is known that ends a text of the model.
    NoEnd {
        /// The model.
        model: String,
    },
    /// A GGUF file that llama.cpp can't load.
    NotForLlamaCpp {
        /// The model.
        model: String,
        /// Why.
        what: String,
    },
    /// How readers of a GGUF file may interpret its tokenizer differently.
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
        /// The architecture that is used.
        arch: ArchType,
    },
    /// A configuration next to weights that can't be interpreted is ignored.
    UnknownConfig {
        /// The file, and what is wrong with it.
        reason: String,
    },
}

impl Warning {
    /// Whether it is a warning, and not just information.
    pub fn is_warning(&self) -> bool {
        match self {
            Warning::Model(warning) => warning.is_warning(),
            Warning::NoHead { is_ignored } => *is_ignored,
            Warning::Inexact { .. }
            | Warning::NoEnd { .. }
            | Warning::NotForLlamaCpp { .. }
            | Warning::UnknownConfig { .. } => true,
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
                f.write_str("the model has no separate output head: it uses its embedding table")?;
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
            Warning::NoEnd { model } => write!(
                f,
                "{model}: no token is known that ends a text; the package has no `eos_token_id`, and the \
                 JavaScript runtime refuses it"
            ),
            Warning::NotForLlamaCpp { model, what } => {
                write!(f, "{model}: llama.cpp can't load the file: {what}")
            }
            Warning::Tokenizer { model, what } => write!(f, "{model}: tokenizer: {what}"),
            Warning::Described { model, arch } => write!(f, "{model}: {arch} by README.md"),
            Warning::UnknownConfig { reason } => {
                write!(f, "{reason}; taken to say nothing about ternary weights")
            }
        }
    }
}

/// How vectors of texts are pooled, if `files` say something that can be kept; a warning if they say something else, as
/// those of rerankers do.
pub(crate) fn pooling(files: &ModelFiles, notify: &Notify<'_>) -> Option<Pooling> {
    files.pooling().unwrap_or_else(|error| {
        let model = files.name().to_owned();
        let what = format!("how its vectors are pooled isn't kept: {error:#}");
        notify(Event::Warning(Warning::Inexact { model, what }));
        None
    })
}

/// Verifies the bytes of a package that haven't been verified yet, on `n_threads` threads: wrong bytes must
/// not become a model that looks valid.
#[cfg(not(target_family = "wasm"))]
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
