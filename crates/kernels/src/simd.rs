//! Sixteen lanes of floats or integers: what kernels are written in, and its definition in plain Rust.
//!
//! A kernel is generic over [`Simd`], takes a value of it, and is compiled for each level of instructions. What one alone
//! needs is in a trait of its own on top ([`attention`](crate::attention), [`gemm::panel`](crate::gemm)); products of floats,
//! and of one row of blocks in 128 bits, take vectors register by register, by the same tokens
//! ([`gemm::float`](crate::gemm), [`gemm::integer`](crate::gemm)).
//! Every implementation has the results of [`Portable`], bit for bit: additions and multiplications are never fused.

// Lanes are indexed: iterators over several arrays hide from the compiler what they have in common.
#![allow(clippy::needless_range_loop)]

#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
pub(crate) mod wasm;
#[cfg(target_arch = "x86_64")]
pub(crate) mod x86;

use std::ops::{Add, Div, Mul, Sub};

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// Makes vectors of one instruction set. A value is the proof that its instructions exist.
pub(crate) trait Simd: Copy {
    /// Sixteen floats.
    type F: Floats;
    /// Sixteen integers.
    type I: Ints<F = Self::F>;

    /// `x` in all lanes.
    fn splat(self, x: f32) -> Self::F;
    /// Reads floats.
    fn load(self, from: &[f32; LANES]) -> Self::F;
    /// Zero in all lanes.
    fn zero(self) -> Self::I;
    /// Reads integers.
    fn load_i(self, from: &[i32; LANES]) -> Self::I;
}

/// Sixteen f32; operators work lane by lane. A value is a proof, too.
pub(crate) trait Floats:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self> + Div<Output = Self>
{
    /// Writes the floats.
    fn store(self, to: &mut [f32; LANES]);
    /// `yes` where `self > than`, else `no`: also where one is NaN.
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self;

    /// `self` where it is greater than `other`, else `other`: also where one is NaN.
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        self.if_greater(other, self, other)
    }
    /// `self` where it is less than `other`, else `other`: also where one is NaN.
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        other.if_greater(self, self, other)
    }
    /// The floats.
    #[inline(always)]
    fn to_array(self) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        self.store(&mut lanes);
        lanes
    }
}

/// Sixteen i32; operators work lane by lane, and wrap around. A value is a proof, too.
pub(crate) trait Ints:
    Copy + Add<Output = Self> + Sub<Output = Self> + Mul<Output = Self>
{
    /// As many floats.
    type F;

    /// Writes the integers.
    fn store(self, to: &mut [i32; LANES]);
    /// `self · 2^N`.
    fn shift_left<const N: u32>(self) -> Self;
    /// Converts to floats, rounding to nearest.
    fn to_f(self) -> Self::F;
}

/// Plain Rust: the reference for all other instruction sets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Portable;

/// The vectors of [`Portable`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Array<T>(pub(crate) [T; LANES]);

impl<T: Copy> Array<T> {
    /// `f` of each lane.
    #[inline(always)]
    pub(crate) fn new(f: impl Fn(usize) -> T) -> Array<T>
    where
        T: Default,
    {
        let mut out = [T::default(); LANES];
        for l in 0..LANES {
            out[l] = f(l);
        }
        Array(out)
    }
}

impl Simd for Portable {
    type F = Array<f32>;
    type I = Array<i32>;

    #[inline(always)]
    fn splat(self, x: f32) -> Array<f32> {
        Array([x; LANES])
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Array<f32> {
        Array(*from)
    }
    #[inline(always)]
    fn zero(self) -> Array<i32> {
        Array([0; LANES])
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; LANES]) -> Array<i32> {
        Array(*from)
    }
}

/// An operator of [`Array`]s.
macro_rules! operator {
    ($trait:ident, $method:ident, $of:ty, $f:expr) => {
        impl $trait for Array<$of> {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                Array::new(|l| $f(self.0[l], other.0[l]))
            }
        }
    };
}
operator!(Add, add, f32, |a, b| a + b);
operator!(Sub, sub, f32, |a, b| a - b);
operator!(Mul, mul, f32, |a, b| a * b);
operator!(Div, div, f32, |a, b| a / b);
operator!(Add, add, i32, i32::wrapping_add);
operator!(Sub, sub, i32, i32::wrapping_sub);
operator!(Mul, mul, i32, i32::wrapping_mul);

impl Floats for Array<f32> {
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        Array::new(|l| match self.0[l] > than.0[l] {
            true => yes.0[l],
            false => no.0[l],
        })
    }
}

impl Ints for Array<i32> {
    type F = Array<f32>;

    #[inline(always)]
    fn store(self, to: &mut [i32; LANES]) {
        *to = self.0;
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        Array::new(|l| self.0[l] << N)
    }
    #[inline(always)]
    fn to_f(self) -> Array<f32> {
        Array::new(|l| self.0[l] as f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::isa::Level;

    /// The bits of the results of each operation on `a` and `b`.
    fn results<S: Simd>(simd: S, a: &[f32; LANES], b: &[f32; LANES]) -> Vec<u32> {
        let ints = [a, b].map(|of| simd.load_i(&of.map(|x| x.to_bits() as i32)));
        let (a, b) = (simd.load(a), simd.load(b));
        let floats = [
            a + b,
            a - b,
            a * b,
            a / b,
            a.max(b),
            a.min(b),
            a.if_greater(b, simd.splat(1.0), a),
            ints[0].to_f(),
        ];
        // NaN has different bits on each machine.
        let floats = floats.into_iter().flat_map(|v| {
            v.to_array()
                .map(|v| if v.is_nan() { u32::MAX } else { v.to_bits() })
        });
        let ints = [
            ints[0] + ints[1],
            ints[0] - ints[1],
            ints[0] * ints[1],
            simd.zero() - ints[0],
            ints[0].shift_left::<5>(),
        ];
        let ints = ints.into_iter().flat_map(|v| {
            let mut to = [0; LANES];
            v.store(&mut to);
            to.map(|v| v as u32)
        });
        floats.chain(ints).collect()
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
                    Level::Baseline => results(Portable, &special, &other),
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx2 | Level::AvxVnni => {
                        // SAFETY: these levels have AVX2, FMA and F16C.
                        results(unsafe { x86::Avx2::new() }, &special, &other)
                    }
                    #[cfg(target_arch = "x86_64")]
                    Level::Avx512 | Level::Amx => {
                        // SAFETY: these levels have the features of AVX-512.
                        results(unsafe { x86::Avx512::new() }, &special, &other)
                    }
                    #[cfg(target_arch = "aarch64")]
                    Level::Neon | Level::NeonDot | Level::I8mm | Level::Sme => {
                        results(neon::Neon::new(), &special, &other)
                    }
                    #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
                    Level::Simd128 => results(wasm::Simd128, &special, &other),
                    #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
                    Level::Relaxed => results(wasm::Simd128, &special, &other),
                };
                assert_eq!(got, want, "{isa}");
            }
        }
    }
}
