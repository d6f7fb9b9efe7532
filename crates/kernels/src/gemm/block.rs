//! A weight matrix in any block format.

use std::ops::Range;

use sterna_format::DType;

use crate::isa::{Isa, multiversion};
use crate::quant::{QuantError, decode_row};

/// A weight matrix `[n, k]`, row-major, each row whole blocks of `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct BlockMatrix<'a> {
    dtype: DType,
    n: usize,
    k: usize,
    row_bytes: usize,
    rounding: Rounding,
    bytes: &'a [u8],
}

/// How activations are rounded before they are multiplied with a [`BlockMatrix`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Rounding {
    /// Not at all: weights are dequantized, and products are taken in f32.
    None,
    /// Quantized to int8 with one scale per row: a BitLinear layer whose weights don't share one scale.
    Row,
    /// Quantized to int8 block by block, where the weights are blocks of integers; sums within a block are
    /// then exact. Floats are multiplied as with [`Rounding::None`].
    #[default]
    Blocks,
}

impl<'a> BlockMatrix<'a> {
    /// A view of `bytes` as `n` rows of `k` elements.
    ///
    /// Errors: [`QuantError`] if the type has no decoder, the rows aren't whole blocks, or `bytes`
    /// isn't `n` rows.
    pub fn new(
        dtype: DType,
        n: usize,
        k: usize,
        rounding: Rounding,
        bytes: &'a [u8],
    ) -> Result<Self, QuantError> {
        decode_row(dtype, &[], &mut [])?;
        if !k.is_multiple_of(dtype.block_len()) {
            return Err(QuantError::PartialBlock {
                dtype,
                elements: k,
                block_len: dtype.block_len(),
            });
        }
        let row_bytes = k / dtype.block_len() * dtype.block_bytes();
        // An overflowing product equals no length.
        let expected = row_bytes.saturating_mul(n);
        if bytes.len() != expected {
            return Err(QuantError::Size {
                what: "matrix of blocks",
                expected,
                found: bytes.len(),
            });
        }
        Ok(BlockMatrix {
            dtype,
            n,
            k,
            row_bytes,
            rounding,
            bytes,
        })
    }

    /// Type of the blocks.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn k(&self) -> usize {
        self.k
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.bytes
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.row_bytes
    }

    pub(super) fn rounding(&self) -> Rounding {
        self.rounding
    }

    /// The bytes of rows from `first` on. Panics if there are not `n_rows` of them.
    pub(super) fn rows(&self, first: usize, n_rows: usize) -> &'a [u8] {
        &self.bytes[first * self.row_bytes..][..n_rows * self.row_bytes]
    }

    /// Decodes rows from `first` into `out`, `[n_rows, k]`. Panics if they aren't all there.
    pub(super) fn decode(&self, isa: Isa, first: usize, out: &mut [f32]) {
        let n_rows = out.len().checked_div(self.k).unwrap_or(0);
        decode_rows(isa, self.dtype, self.rows(first, n_rows), out);
    }

    /// The bytes of some columns of a row. Panics if they aren't all there or not whole blocks.
    pub(super) fn part(&self, row: usize, columns: Range<usize>) -> &'a [u8] {
        let block = self.dtype.block_len();
        assert!(columns.start.is_multiple_of(block) && columns.end.is_multiple_of(block));
        let bytes = self.dtype.block_bytes();
        &self.rows(row, 1)[columns.start / block * bytes..columns.end / block * bytes]
    }

    /// Decodes some columns of a row into `out`. Panics as [`BlockMatrix::part`] does, and if `out`
    /// has another length.
    pub(super) fn decode_part(&self, isa: Isa, row: usize, columns: Range<usize>, out: &mut [f32]) {
        decode_rows(isa, self.dtype, self.part(row, columns), out);
    }
}

multiversion! {
    fn decode_rows(dtype: DType, bytes: &[u8], out: &mut [f32]) {
        decode_row(dtype, bytes, out).expect("`BlockMatrix::new` checked the type and the sizes");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_shapes_are_refused() {
        let new = |dtype, n, k, bytes: &[u8]| {
            BlockMatrix::new(dtype, n, k, Rounding::None, bytes).map(|_| ())
        };
        assert!(new(DType::Q8_0, 1, 33, &[0; 34]).is_err());
        assert!(new(DType::F32, 2, 2, &[0; 15]).is_err());
        assert!(new(DType::F32, usize::MAX, 2, &[0; 16]).is_err());
        assert!(new(DType::F32, 2, 2, &[0; 16]).is_ok());
    }
}
