//! What can be wrong with the files of an engine bundle.

use std::fmt;

use super::{ArchType, LoraTarget};
use crate::hf::ConfigError;

/// Why a quantize manifest or a file of an engine bundle was refused, or can't be written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BundleError {
    /// The given bytes end inside the header, but the file continues.
    #[error("the header goes on after the bytes at hand: at least {at_least} are needed")]
    NeedMore {
        /// Bytes from the start of the file without which parsing can't get further.
        at_least: u64,
    },
    /// The file itself ends too early.
    #[error("the file ends in {place}: {need} bytes needed, {have} left")]
    Truncated {
        /// What was being read.
        place: Location,
        /// Bytes needed from there on.
        need: u64,
        /// Bytes left in the file.
        have: u64,
    },
    /// A field doesn't hold what it should.
    #[error("{place}: {field}: expected {expected}, found {found}")]
    Field {
        /// What the field is part of.
        place: Location,
        /// The field.
        field: &'static str,
        /// What was expected there.
        expected: String,
        /// What does.
        found: String,
    },
    /// The file continues after its last part.
    #[error("{n} bytes after the last part of the file, at offset {at}")]
    Trailing {
        /// Where they begin.
        at: u64,
        /// How many there are.
        n: u64,
    },
    /// What follows the tensors of a manifest fits neither of its two forms.
    #[error(
        "after the tensors, read with a table of sections: {sections}; read without one: {plain}"
    )]
    NeitherForm {
        /// What is wrong with it in the newer form.
        sections: Box<BundleError>,
        /// What is wrong with it in version 1.
        plain: Box<BundleError>,
    },
    /// The parameters of the rotary embedding aren't what they should be.
    #[error("the rotary embedding: {0}")]
    Rope(#[from] ConfigError),
    /// The names of the tensors of this architecture aren't known.
    #[error("architecture {arch}: the order of its tensors isn't known")]
    UnknownOrder {
        /// The architecture.
        arch: ArchType,
    },
    /// A tensor isn't the one whose turn it is.
    #[error("tensor {index}: expected `{name}`, a {expected}, found {found}")]
    Order {
        /// Its place.
        index: usize,
        /// The tensor that belongs there.
        name: String,
        /// `matrix` or `vector`.
        expected: &'static str,
        /// What was found there.
        found: String,
    },
    /// There are more or fewer layers than there should be.
    #[error(
        "expected the tensors of {expected} layers, at least {per_layer} each, found those of {found}"
    )]
    Layers {
        /// How many there should be.
        expected: usize,
        /// How many there are.
        found: usize,
        /// Tensors of a layer without biases.
        per_layer: usize,
    },
}

/// A part of a file, for messages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Location {
    /// What stands before everything else.
    Header,
    /// A shard of a manifest.
    Shard(usize),
    /// The list of tensors.
    Tensors,
    /// A tensor, counted from 0.
    Tensor(usize),
    /// The table of sections of a manifest.
    Sections,
    /// A section, counted from 0.
    Section(usize),
    /// The list of low-rank matrices.
    Lora,
    /// The low-rank matrices of a projection of a layer.
    Pair(u32, LoraTarget),
    /// The parameters of the rotary embedding.
    Rope,
}

impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Header => write!(f, "the header"),
            Location::Shard(i) => write!(f, "shard {i}"),
            Location::Tensors => write!(f, "the list of tensors"),
            Location::Tensor(i) => write!(f, "tensor {i}"),
            Location::Sections => write!(f, "the table of sections"),
            Location::Section(i) => write!(f, "section {i}"),
            Location::Lora => write!(f, "the LoRA block"),
            Location::Pair(layer, target) => write!(f, "layer {layer}, {}", target.module()),
            Location::Rope => write!(f, "the parameters of the rotary embedding"),
        }
    }
}

impl BundleError {
    /// The error that `field` of `place` isn't what it should be.
    pub(super) fn field(
        place: Location,
        field: &'static str,
        expected: impl fmt::Display,
        found: impl fmt::Display,
    ) -> BundleError {
        BundleError::Field {
            place,
            field,
            expected: expected.to_string(),
            found: found.to_string(),
        }
    }
}

/// Fails unless `ok`, with what `expected` and `found` say about `field` of `place`.
pub(super) fn ensure(
    ok: bool,
    place: Location,
    field: &'static str,
    expected: impl fmt::Display,
    found: impl fmt::Display,
) -> Result<(), BundleError> {
    match ok {
        true => Ok(()),
        false => Err(BundleError::field(place, field, expected, found)),
    }
}
