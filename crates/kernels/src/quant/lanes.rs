//! What searches are written in, beside the vectors of [`Simd`].
//!
//! A search tries many scales for every block, and for each of them sums over the block. With one block per
//! lane no sum crosses lanes: whatever the width of the registers, each block is summed in the order of its
//! elements, and every instruction set finds the same scales.

pub(super) use crate::simd::{Floats, LANES, Simd};

/// A number for each of the blocks that are searched together.
pub(super) type Lanes = [f32; LANES];

/// The factor by which another fit must explain more of the power to be preferred. Smaller improvements are
/// rounding errors of the sums, and no reason to leave a fit that uses the whole range.
pub(super) const NOTABLE: f32 = 1.0 + 8.0 * f32::EPSILON;

/// Rounds to integers, halves to even; for magnitudes below 2²².
#[inline(always)]
pub(super) fn round<S: Simd>(simd: S, v: S::F) -> S::F {
    let rounder = simd.splat(12_582_912.0);
    (v + rounder) - rounder
}

/// The integer nearest to `v` of `low..=high`; `low` for NaN.
#[inline(always)]
pub(super) fn nearest<S: Simd>(simd: S, v: S::F, low: S::F, high: S::F) -> S::F {
    round(simd, v.max(low).min(high))
}

/// `1 / v`, or 0 for 0.
#[inline(always)]
pub(super) fn inverse<S: Simd>(simd: S, v: S::F) -> S::F {
    let zero = simd.splat(0.0);
    let inverse = simd.splat(1.0) / v;
    let negative = zero.if_greater(v, inverse, zero);
    v.if_greater(zero, inverse, negative)
}
