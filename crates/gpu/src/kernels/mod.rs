//! The operations: each checks its shapes and records dispatches.
//!
//! Activations are rows of f32 in a buffer ([`Rows`]); weights are [`linear::Linear`]. What kernels agree
//! with, and how closely, is documented in each file and in `docs/gpu.md`.

pub mod attention;
pub mod elementwise;
pub mod experts;
pub mod linear;
pub mod norm;
pub mod output;
pub mod quantize;
pub mod recurrent;
pub mod rotate;
mod sequences;

pub use sequences::{SequenceRows, Sequences, sequence_table};

use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::{GpuError, Limits};

/// Rows of f32 in a buffer: `[n_rows, width]`, not necessarily next to one another.
#[derive(Debug, Clone, Copy)]
pub struct Rows<'a> {
    /// The buffer.
    pub buffer: &'a Buffer,
    /// Number of rows.
    pub n_rows: usize,
    /// Elements per row.
    pub width: usize,
    /// Where the first begins, in elements.
    pub offset: usize,
    /// From the beginning of one row to that of the next, in elements.
    pub stride: usize,
}

/// The largest workgroup of a kernel that halves it again and again: a power of two.
fn max_workgroup(limits: &Limits) -> u32 {
    1 << limits.workgroup_len.clamp(64, 1024).ilog2()
}

impl<'a> Rows<'a> {
    /// Contiguous rows, from the beginning of `buffer`.
    pub fn new(buffer: &'a Buffer, n_rows: usize, width: usize) -> Rows<'a> {
        Rows {
            buffer,
            n_rows,
            width,
            offset: 0,
            stride: width,
        }
    }

    /// The columns from `first` on, `width` of them.
    #[must_use]
    pub fn columns(self, first: usize, width: usize) -> Rows<'a> {
        Rows {
            width,
            offset: self.offset + first,
            ..self
        }
    }

    /// The rows from `first` on, `n_rows` of them.
    #[must_use]
    pub fn rows(self, first: usize, n_rows: usize) -> Rows<'a> {
        Rows {
            n_rows,
            offset: self.offset + first * self.stride,
            ..self
        }
    }

    /// Whether kernels can read them as vectors of four.
    fn in_vectors(&self) -> bool {
        let stride = if self.n_rows > 1 { self.stride } else { 0 };
        [self.offset, self.width, stride]
            .iter()
            .all(|n| n.is_multiple_of(4))
    }

    /// Errors if the rows exceed the buffer, overlap, or need more than 32-bit indices.
    fn check(&self, what: &'static str) -> Result<(), GpuError> {
        if self.n_rows == 0 || self.width == 0 {
            return Ok(());
        }
        if self.n_rows > 1 {
            expect_most(what, self.stride, self.width)?;
        }
        let end = (self.n_rows - 1)
            .checked_mul(self.stride)
            .and_then(|last| last.checked_add(self.offset)?.checked_add(self.width))
            .unwrap_or(usize::MAX);
        let most = (self.buffer.bytes() / 4).min(u64::from(u32::MAX));
        expect_most(what, most as usize, end)
    }
}

/// A grid of `n` workgroups, folded to stay within the device's limit per dimension; kernels compute their
/// index by `group_of` and do nothing beyond `n`.
fn fold(n: usize) -> [u32; 2] {
    // Every device supports 65535.
    const MOST: usize = 32_768;
    let x = n.min(MOST);
    [x as u32, n.div_ceil(x.max(1)) as u32]
}

/// Errors unless both have the same number of rows.
fn same_rows(what: &'static str, x: &Rows<'_>, y: &Rows<'_>) -> Result<(), GpuError> {
    expect(what, x.n_rows, y.n_rows)
}
