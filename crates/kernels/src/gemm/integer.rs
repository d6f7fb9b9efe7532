//! Weights that are blocks of integers, int8 activations.

use std::ops::Range;

use sterna_format::DType;

use super::activations::{QuantizedRows, Scaling};
use super::{BlockMatrix, Columns};
use crate::isa::Isa;

/// The scaling of activations that weights of `dtype` take; `None` if they aren't blocks of integers
/// that this module multiplies.
pub(super) fn scaling(_dtype: DType) -> Option<Scaling> {
    None
}

/// `out[t, i] = Σ_j w[i, j] · x[t, j]` for the rows `i` of the weights.
pub(super) fn multiply(
    _isa: Isa,
    _w: &BlockMatrix<'_>,
    _rows: Range<usize>,
    _x: &QuantizedRows,
    _out: &Columns<'_>,
) {
}
