//! What the kernels of panels need of sixteen lanes beside [`Simd`]: products of bytes.

use super::{Lanes, ROWS};
use crate::gemm::activations::{TILE, Tiles};
use crate::simd::{LANES, Simd};

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

/// Lanes that multiply codes with activations.
///
/// Methods are inlined into functions that are compiled for the instructions they use.
pub(super) trait Dots: Simd {
    /// True if codes up to 255 are summed with 128 subtracted.
    const SIGNED_BYTES: bool;

    /// `sum + weights[0] · pair[0] + weights[1] · pair[1]` in each lane.
    fn add_pairs(self, sum: Self::I, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Self::I;

    /// `sums[t] += Σ code · act` over the four columns of each of `codes`, which are at most `MAX`.
    ///
    /// # Safety
    /// There are as many columns of the `T` rows of activations.
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Self::I; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    );

    /// The same, the sums of each lane times its scale. Scales fit i16, sums times scales fit i32.
    ///
    /// # Safety
    /// As [`Dots::add_dots`].
    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Self::I; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
        scales: &Lanes<i32>,
    ) {
        let mut dots = [self.zero(); T];
        let scales = self.load_i(scales);
        // SAFETY: the caller's promise.
        unsafe { self.add_dots::<T, MAX>(&mut dots, codes, acts) };
        for (sums, dots) in sums.iter_mut().zip(dots) {
            *sums = *sums + dots * scales;
        }
    }
}

/// Two i16 as one lane has them.
#[inline(always)]
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    target_feature = "simd128"
))]
pub(super) fn dword(pair: [i16; 2]) -> i32 {
    i32::from(pair[0] as u16) | i32::from(pair[1]) << 16
}

const _: () = assert!(ROWS == LANES, "lanes are the rows of a panel");
