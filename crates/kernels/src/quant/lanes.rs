//! Sixteen numbers in a vector, and the operations that searches are written in.
//!
//! A search tries many scales for every block, and for each of them sums over the block. With one block per
//! lane no sum crosses lanes: whatever the width of the registers, each block is summed in the order of its
//! elements, and every instruction set finds the same scales. Products are never fused with sums.

// Lanes are indexed: iterators over several arrays hide from the compiler what they have in common.
#![allow(clippy::needless_range_loop)]

use std::ops::{Add, Div, Mul, Sub};

/// Blocks that are searched together.
pub(super) const LANES: usize = 16;

/// A number for each block.
pub(super) type Lanes = [f32; LANES];

/// The factor by which another fit must explain more of the power to be preferred. Smaller improvements are
/// rounding errors of the sums, and no reason to leave a fit that uses the whole range.
pub(super) const NOTABLE: f32 = 1.0 + 8.0 * f32::EPSILON;

/// Makes vectors of one instruction set. A value is the proof that its instructions exist.
pub(super) trait Simd: Copy {
    /// Sixteen floats. A value is a proof, too.
    type V: Vector;

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::V;
    /// Reads floats.
    fn load(self, from: &Lanes) -> Self::V;
}

/// Sixteen floats; operators work lane by lane.
pub(super) trait Vector:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// The floats.
    fn store(self) -> Lanes;
    /// `self` where it is greater than `other`, else `other`: also where one is NaN.
    fn max(self, other: Self) -> Self;
    /// `self` where it is less than `other`, else `other`: also where one is NaN.
    fn min(self, other: Self) -> Self;
    /// `yes` where `self > than`, else `no`: also where one is NaN.
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self;
}

/// Plain Rust: the reference for all other instruction sets.
#[derive(Clone, Copy)]
pub(super) struct Portable;

/// The vectors of [`Portable`].
#[derive(Clone, Copy)]
pub(super) struct PortableVector(Lanes);

impl Simd for Portable {
    type V = PortableVector;

    #[inline(always)]
    fn splat(self, x: f32) -> PortableVector {
        PortableVector([x; LANES])
    }
    #[inline(always)]
    fn load(self, from: &Lanes) -> PortableVector {
        PortableVector(*from)
    }
}

impl PortableVector {
    #[inline(always)]
    fn zip(self, other: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = [0.0; LANES];
        for l in 0..LANES {
            out[l] = f(self.0[l], other.0[l]);
        }
        PortableVector(out)
    }
}

impl Add for PortableVector {
    type Output = Self;
    #[inline(always)]
    fn add(self, other: Self) -> Self {
        self.zip(other, |a, b| a + b)
    }
}

impl Sub for PortableVector {
    type Output = Self;
    #[inline(always)]
    fn sub(self, other: Self) -> Self {
        self.zip(other, |a, b| a - b)
    }
}

impl Mul for PortableVector {
    type Output = Self;
    #[inline(always)]
    fn mul(self, other: Self) -> Self {
        self.zip(other, |a, b| a * b)
    }
}

impl Div for PortableVector {
    type Output = Self;
    #[inline(always)]
    fn div(self, other: Self) -> Self {
        self.zip(other, |a, b| a / b)
    }
}

impl Vector for PortableVector {
    #[inline(always)]
    fn store(self) -> Lanes {
        self.0
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.zip(other, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        self.zip(other, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        let mut out = [0.0; LANES];
        for l in 0..LANES {
            out[l] = if self.0[l] > than.0[l] {
                yes.0[l]
            } else {
                no.0[l]
            };
        }
        PortableVector(out)
    }
}

/// Rounds to integers, halves to even; for magnitudes below 2²².
#[inline(always)]
pub(super) fn round<S: Simd>(simd: S, v: S::V) -> S::V {
    let rounder = simd.splat(12_582_912.0);
    (v + rounder) - rounder
}

/// The integer nearest to `v` of `low..=high`; `low` for NaN.
#[inline(always)]
pub(super) fn nearest<S: Simd>(simd: S, v: S::V, low: S::V, high: S::V) -> S::V {
    round(simd, v.max(low).min(high))
}

/// `1 / v`, or 0 for 0.
#[inline(always)]
pub(super) fn inverse<S: Simd>(simd: S, v: S::V) -> S::V {
    let zero = simd.splat(0.0);
    let inverse = simd.splat(1.0) / v;
    let negative = zero.if_greater(v, inverse, zero);
    v.if_greater(zero, inverse, negative)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    #[cfg(target_arch = "x86_64")]
    use crate::isa::Level;
    #[cfg(target_arch = "x86_64")]
    use crate::quant::lanes_x86::{Avx2, Avx512};

    /// The results of each operation on `a`, `b`.
    fn results<S: Simd>(simd: S, a: &Lanes, b: &Lanes) -> Vec<u32> {
        let (a, b) = (simd.load(a), simd.load(b));
        [
            a + b,
            a - b,
            a * b,
            a / b,
            a.max(b),
            a.min(b),
            a.if_greater(b, simd.splat(1.0), a),
            inverse(simd, a),
            nearest(simd, a, simd.splat(-3.0), simd.splat(15.0)),
        ]
        .into_iter()
        // NaN has different bits on each machine.
        .flat_map(|v| {
            v.store()
                .map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() })
        })
        .collect()
    }

    #[test]
    fn every_instruction_set_agrees_with_plain_rust() {
        let special = [
            0.0,
            -0.0,
            1.0,
            -1.0,
            0.5,
            1.5,
            -2.5,
            7.3,
            1e-40,
            -1e-40,
            f32::MAX,
            f32::MIN,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::NAN,
            1e-38,
        ];
        for shift in 0..LANES {
            let mut other = special;
            other.rotate_left(shift);
            let want = results(Portable, &special, &other);
            for isa in Isa::available() {
                let got = match isa.level() {
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 | Level::AvxVnni => {
                        // SAFETY: these levels have AVX2.
                        results(unsafe { Avx2::new() }, &special, &other)
                    }
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 | Level::Amx => {
                        // SAFETY: these levels have AVX-512.
                        results(unsafe { Avx512::new() }, &special, &other)
                    }
                    _ => results(Portable, &special, &other),
                };
                assert_eq!(got, want, "{isa}");
            }
        }
    }
}
