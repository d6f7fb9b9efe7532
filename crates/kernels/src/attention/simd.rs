//! The vector operations that attention is written in, and their portable definition.

use half::f16;

use super::page::LANES;

/// Sixteen lanes of one instruction set. A value is the proof that its instructions exist.
///
/// A new instruction set implements these and gains all of attention.
pub(super) trait Simd: Copy {
    /// Floats, one per lane.
    type Floats: Copy;
    /// Sums of products of integers, one per lane.
    type Ints: Copy;
    /// Pairs of bytes, one per lane, ready to be multiplied.
    type Pairs: Copy;

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::Floats;
    /// Reads floats.
    fn load(self, from: &[f32; LANES]) -> Self::Floats;
    /// Reads and widens half-precision floats.
    fn load_halves(self, from: &[f16; LANES]) -> Self::Floats;
    /// Reads and converts signed bytes.
    fn load_bytes(self, from: &[i8; LANES]) -> Self::Floats;
    /// Floats with lanes for rows: lane `j` of element `i` becomes lane `i` of element `j`.
    fn transpose(self, x: [Self::Floats; LANES]) -> [Self::Floats; LANES];
    /// Writes floats.
    fn store(self, x: Self::Floats, to: &mut [f32; LANES]);
    /// `a + b`.
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `a · b`.
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// `sum + a · b`, for products that an f32 holds exactly: fused or not.
    fn add_exact_product(self, sum: Self::Floats, a: Self::Floats, b: Self::Floats)
    -> Self::Floats;

    /// Sums of zero.
    fn no_ints(self) -> Self::Ints;
    /// Reads pairs of signed bytes.
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> Self::Pairs;
    /// The first bytes of pairs, and the second, as floats.
    fn split_pairs(self, pairs: Self::Pairs) -> [Self::Floats; 2];
    /// `sum + codes₀ · low(pair) + codes₁ · high(pair)`, where `pair` is two i16.
    fn add_pairs(self, sum: Self::Ints, codes: Self::Pairs, pair: i32) -> Self::Ints;
    /// Converts to floats, rounding to nearest.
    fn to_floats(self, x: Self::Ints) -> Self::Floats;
}

/// Plain Rust: the reference for all other instruction sets.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// `f(i)` for every lane.
#[inline(always)]
fn lanes<T: Copy + Default>(f: impl Fn(usize) -> T) -> [T; LANES] {
    let mut out = [T::default(); LANES];
    for (i, out) in out.iter_mut().enumerate() {
        *out = f(i);
    }
    out
}

impl Simd for Portable {
    type Floats = [f32; LANES];
    type Ints = [i32; LANES];
    type Pairs = [i8; 2 * LANES];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Floats {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Floats {
        *from
    }
    #[inline(always)]
    fn load_halves(self, from: &[f16; LANES]) -> Self::Floats {
        lanes(|i| from[i].to_f32_const())
    }
    #[inline(always)]
    fn load_bytes(self, from: &[i8; LANES]) -> Self::Floats {
        lanes(|i| f32::from(from[i]))
    }
    #[inline(always)]
    fn transpose(self, x: [Self::Floats; LANES]) -> [Self::Floats; LANES] {
        lanes(|j| lanes(|i| x[i][j]))
    }
    #[inline(always)]
    fn store(self, x: Self::Floats, to: &mut [f32; LANES]) {
        *to = x;
    }
    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn add_exact_product(
        self,
        sum: Self::Floats,
        a: Self::Floats,
        b: Self::Floats,
    ) -> Self::Floats {
        lanes(|i| sum[i] + a[i] * b[i])
    }

    #[inline(always)]
    fn no_ints(self) -> Self::Ints {
        [0; LANES]
    }
    #[inline(always)]
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> Self::Pairs {
        *from
    }
    #[inline(always)]
    fn split_pairs(self, pairs: Self::Pairs) -> [Self::Floats; 2] {
        [0, 1].map(|of| lanes(|i| f32::from(pairs[2 * i + of])))
    }
    #[inline(always)]
    fn add_pairs(self, sum: Self::Ints, codes: Self::Pairs, pair: i32) -> Self::Ints {
        let (low, high) = (i32::from(pair as i16), pair >> 16);
        lanes(|i| sum[i] + i32::from(codes[2 * i]) * low + i32::from(codes[2 * i + 1]) * high)
    }
    #[inline(always)]
    fn to_floats(self, x: Self::Ints) -> Self::Floats {
        lanes(|i| x[i] as f32)
    }
}
