//! Sixteen lanes with WebAssembly's vectors: four registers.

use std::arch::wasm32::*;
use std::ops::{Add, Div, Mul, Sub};

use super::{Floats, Ints, LANES, Simd};

/// The feature `simd128`, which a build has or hasn't.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Simd128;

/// With relaxed instructions, where all engines agree: dot products with codes of seven bits, and products of floats that are
/// exact and may be fused with a sum.
#[cfg(target_feature = "relaxed-simd")]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Relaxed;

/// Floats in four registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats128(pub(crate) [v128; 4]);

/// Integers in four registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ints128(pub(crate) [v128; 4]);

/// An instruction on all registers.
macro_rules! each {
    ($f:ident, $($v:expr),+) => {
        [$f($($v[0]),+), $f($($v[1]),+), $f($($v[2]),+), $f($($v[3]),+)]
    };
}
pub(crate) use each;

/// Reads 64 bytes.
#[inline(always)]
pub(crate) fn load<T: Copy>(from: &[T; LANES]) -> [v128; 4] {
    const { assert!(size_of::<T>() == 4) };
    let from: *const v128 = from.as_ptr().cast();
    // SAFETY: sixteen times four bytes are there; alignment doesn't matter.
    unsafe {
        let at = [from, from.add(1), from.add(2), from.add(3)];
        each!(v128_load, at)
    }
}

/// Writes 64 bytes.
#[inline(always)]
fn store<T: Copy>(to: &mut [T; LANES], v: [v128; 4]) {
    const { assert!(size_of::<T>() == 4) };
    let to: *mut v128 = to.as_mut_ptr().cast();
    // SAFETY: as above; all bits are numbers.
    unsafe {
        let at = [to, to.add(1), to.add(2), to.add(3)];
        each!(v128_store, at, v);
    }
}

/// What makes vectors is the same for both.
macro_rules! vectors {
    ($token:ident) => {
        impl Simd for $token {
            type F = Floats128;
            type I = Ints128;

            #[inline(always)]
            fn splat(self, x: f32) -> Floats128 {
                Floats128([f32x4_splat(x); 4])
            }
            #[inline(always)]
            fn load(self, from: &[f32; LANES]) -> Floats128 {
                Floats128(load(from))
            }
            #[inline(always)]
            fn zero(self) -> Ints128 {
                Ints128([i32x4_splat(0); 4])
            }
            #[inline(always)]
            fn load_i(self, from: &[i32; LANES]) -> Ints128 {
                Ints128(load(from))
            }
        }
    };
}
vectors!(Simd128);
#[cfg(target_feature = "relaxed-simd")]
vectors!(Relaxed);

/// An operator.
macro_rules! operator {
    ($trait:ident, $method:ident, $of:ident, $wasm:ident) => {
        impl $trait for $of {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                $of(each!($wasm, self.0, other.0))
            }
        }
    };
}

operator!(Add, add, Floats128, f32x4_add);
operator!(Sub, sub, Floats128, f32x4_sub);
operator!(Mul, mul, Floats128, f32x4_mul);
operator!(Div, div, Floats128, f32x4_div);
operator!(Add, add, Ints128, i32x4_add);
operator!(Sub, sub, Ints128, i32x4_sub);
operator!(Mul, mul, Ints128, i32x4_mul);

impl Floats for Floats128 {
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        store(to, self.0);
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        let greater = each!(f32x4_gt, self.0, than.0);
        Floats128(each!(v128_bitselect, yes.0, no.0, greater))
    }
}

impl Ints for Ints128 {
    type F = Floats128;

    #[inline(always)]
    fn store(self, to: &mut [i32; LANES]) {
        store(to, self.0);
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        Ints128(each!(i32x4_shl, self.0, [N; 4]))
    }
    #[inline(always)]
    fn to_f(self) -> Floats128 {
        Floats128(each!(f32x4_convert_i32x4, self.0))
    }
}
