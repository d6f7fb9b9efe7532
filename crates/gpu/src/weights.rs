//! Kinds of weights. How kernels handle them is in `kernels::linear`.

use sterna_format::DType;

/// The kind of a matrix's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// Trits in the working layout of `sterna_kernels::quant::ternary`: rows padded to blocks of 128,
    /// 32 bytes each.
    Ternary,
    /// Rows of whole blocks, or of floats.
    Blocks(DType),
}

impl WeightKind {
    /// Its name: `ternary`, or that of the type.
    pub const fn name(self) -> &'static str {
        match self {
            WeightKind::Ternary => "ternary",
            WeightKind::Blocks(dtype) => dtype.name(),
        }
    }

    /// The kind of that name.
    pub fn named(name: &str) -> Option<WeightKind> {
        if name == WeightKind::Ternary.name() {
            return Some(WeightKind::Ternary);
        }
        let dtype = DType::ALL.into_iter().find(|dtype| dtype.name() == name)?;
        Some(WeightKind::Blocks(dtype))
    }
}
