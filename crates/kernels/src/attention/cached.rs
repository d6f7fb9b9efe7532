//! What attention needs of sixteen lanes beside [`Simd`]: what caches hold, and products that are exact.

use half::f16;

use crate::simd::{Array, LANES, Portable, Simd};

/// Lanes that read caches.
///
/// A new instruction set implements these and gains all of attention.
pub(super) trait Cached: Simd {
    /// Pairs of bytes, one per lane, ready to be multiplied.
    type Pairs: Copy;

    /// Reads and widens half-precision floats.
    fn load_halves(self, from: &[f16; LANES]) -> Self::F;
    /// Reads and converts signed bytes.
    fn load_bytes(self, from: &[i8; LANES]) -> Self::F;
    /// Floats with lanes for rows: lane `j` of element `i` becomes lane `i` of element `j`.
    fn transpose(self, x: [Self::F; LANES]) -> [Self::F; LANES];
    /// `sum + a · b`, for products that an f32 holds exactly: fused or not.
    fn add_exact_product(self, sum: Self::F, a: Self::F, b: Self::F) -> Self::F;
    /// Reads pairs of signed bytes.
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> Self::Pairs;
    /// The first bytes of pairs, and the second, as floats.
    fn split_pairs(self, pairs: Self::Pairs) -> [Self::F; 2];
    /// `sum + codes₀ · low(pair) + codes₁ · high(pair)`, where `pair` is two i16.
    fn add_pairs(self, sum: Self::I, codes: Self::Pairs, pair: i32) -> Self::I;
}

impl Cached for Portable {
    type Pairs = [i8; 2 * LANES];

    #[inline(always)]
    fn load_halves(self, from: &[f16; LANES]) -> Array<f32> {
        Array::new(|i| from[i].to_f32_const())
    }
    #[inline(always)]
    fn load_bytes(self, from: &[i8; LANES]) -> Array<f32> {
        Array::new(|i| f32::from(from[i]))
    }
    #[inline(always)]
    fn transpose(self, x: [Array<f32>; LANES]) -> [Array<f32>; LANES] {
        let mut out = x;
        for (j, out) in out.iter_mut().enumerate() {
            *out = Array::new(|i| x[i].0[j]);
        }
        out
    }
    #[inline(always)]
    fn add_exact_product(self, sum: Array<f32>, a: Array<f32>, b: Array<f32>) -> Array<f32> {
        sum + a * b
    }
    #[inline(always)]
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> Self::Pairs {
        *from
    }
    #[inline(always)]
    fn split_pairs(self, pairs: Self::Pairs) -> [Array<f32>; 2] {
        [0, 1].map(|of| Array::new(|i| f32::from(pairs[2 * i + of])))
    }
    #[inline(always)]
    fn add_pairs(self, sum: Array<i32>, codes: Self::Pairs, pair: i32) -> Array<i32> {
        let (low, high) = (i32::from(pair as i16), pair >> 16);
        Array::new(|i| {
            sum.0[i] + i32::from(codes[2 * i]) * low + i32::from(codes[2 * i + 1]) * high
        })
    }
}
