//! What a kernel requires of an instruction set.

use super::{Lanes as Array, ROWS};
use crate::gemm::activations::{TILE, Tiles};

/// Where the activations of a tile begin: `[tile of four rows][columns / 4][row][4]`.
#[derive(Clone, Copy)]
pub(in super::super) struct Acts {
    pub(super) q: *const i8,
    /// Bytes from four rows to the next four.
    pub(super) stride: usize,
}

impl Acts {
    /// Those from column `start` on, a multiple of four, of the rows from those of a tile on. Panics if none begins
    /// there.
    #[inline(always)]
    pub(in super::super) fn new(x: &Tiles, tile: usize, start: usize) -> Acts {
        Acts {
            q: x.q(tile)[start / 4..].as_ptr().cast(),
            stride: x.k() * TILE,
        }
    }

    /// Four activations of row `t`, those of the `quad`th four columns.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    pub(in super::super) unsafe fn quad(self, quad: usize, t: usize) -> *const i32 {
        // SAFETY: the caller's promise.
        unsafe {
            self.q
                .add(t / 4 * self.stride + quad * 16 + t % 4 * 4)
                .cast()
        }
    }

    /// The same from the `quad`th four columns on.
    ///
    /// # Safety
    /// They are there.
    #[inline(always)]
    pub(super) unsafe fn skip(self, quads: usize) -> Acts {
        Acts {
            // SAFETY: the caller's promise.
            q: unsafe { self.q.add(quads * 16) },
            ..self
        }
    }
}

/// Arithmetic on sixteen lanes.
///
/// Methods are inlined into functions that are compiled for the instructions they use.
///
/// # Safety
/// Every method needs the instruction set of the type, and data behind its pointers.
pub(super) trait Lanes: Copy {
    /// Sixteen i32.
    type I: Copy;
    /// Sixteen f32.
    type F: Copy;

    /// True if codes up to 255 are summed with 128 subtracted.
    const SIGNED_BYTES: bool;

    unsafe fn zero() -> Self::I;
    unsafe fn load_i(from: *const Array<i32>) -> Self::I;
    unsafe fn store_i(to: *mut Array<i32>, v: Self::I);

    /// `sums[t] += Σ code · act` over `n_quads` times four columns; codes are at most `MAX`.
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    );

    /// The same, the sums of each lane times its scale. Scales fit i16, sums times scales fit i32.
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    );

    /// `sum + weights[0] · pair[0] + weights[1] · pair[1]` in each lane.
    unsafe fn add_pairs(sum: Self::I, weights: *const Array<[i16; 2]>, pair: [i16; 2]) -> Self::I;

    /// `a - b · 2^SHIFT`.
    unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, b: Self::I) -> Self::I;

    unsafe fn to_f(v: Self::I) -> Self::F;
    unsafe fn load_f(from: *const Array<f32>) -> Self::F;
    unsafe fn store_f(to: *mut Array<f32>, v: Self::F);
    unsafe fn splat(v: f32) -> Self::F;
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
}

const _: () = assert!(ROWS == 16, "lanes are the rows of a panel");
