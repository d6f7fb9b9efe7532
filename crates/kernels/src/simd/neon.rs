//! Sixteen lanes with NEON: four registers.

use std::arch::aarch64::*;
use std::ops::{Add, Div, Mul, Sub};

use super::{Floats, Ints, LANES, Simd};

/// The baseline of 64-bit Arm.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon(());

/// With dot products of bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NeonDot(Neon);

impl Neon {
    /// Every machine of this target has NEON.
    #[inline(always)]
    pub(crate) fn new() -> Neon {
        Neon(())
    }
}

impl NeonDot {
    /// # Safety
    /// The machine has the feature `dotprod`.
    #[inline(always)]
    pub(crate) unsafe fn new() -> NeonDot {
        NeonDot(Neon(()))
    }
}

/// Floats in four registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats128(pub(crate) [float32x4_t; 4]);

/// Integers in four registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ints128(pub(crate) [int32x4_t; 4]);

/// An instruction on all registers.
macro_rules! each {
    ($f:ident, $($v:expr),+) => {
        [$f($($v[0]),+), $f($($v[1]),+), $f($($v[2]),+), $f($($v[3]),+)]
    };
}
pub(crate) use each;

// SAFETY of the blocks below: every machine of this target has NEON; pointers come from references to arrays of sixteen.

impl Simd for Neon {
    type F = Floats128;
    type I = Ints128;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats128 {
        // SAFETY: see above.
        unsafe { Floats128([vdupq_n_f32(x); 4]) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Floats128 {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            let at = [from, from.add(4), from.add(8), from.add(12)];
            Floats128(each!(vld1q_f32, at))
        }
    }
    #[inline(always)]
    fn zero(self) -> Ints128 {
        // SAFETY: see above.
        unsafe { Ints128([vdupq_n_s32(0); 4]) }
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; LANES]) -> Ints128 {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            let at = [from, from.add(4), from.add(8), from.add(12)];
            Ints128(each!(vld1q_s32, at))
        }
    }
}

impl Simd for NeonDot {
    type F = Floats128;
    type I = Ints128;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats128 {
        self.0.splat(x)
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Floats128 {
        self.0.load(from)
    }
    #[inline(always)]
    fn zero(self) -> Ints128 {
        self.0.zero()
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; LANES]) -> Ints128 {
        self.0.load_i(from)
    }
}

/// An operator.
macro_rules! operator {
    ($trait:ident, $method:ident, $of:ident, $neon:ident) => {
        impl $trait for $of {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { $of(each!($neon, self.0, other.0)) }
            }
        }
    };
}

operator!(Add, add, Floats128, vaddq_f32);
operator!(Sub, sub, Floats128, vsubq_f32);
operator!(Mul, mul, Floats128, vmulq_f32);
operator!(Div, div, Floats128, vdivq_f32);
operator!(Add, add, Ints128, vaddq_s32);
operator!(Sub, sub, Ints128, vsubq_s32);
operator!(Mul, mul, Ints128, vmulq_s32);

impl Floats for Floats128 {
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: see above.
        unsafe {
            let at = [to, to.add(4), to.add(8), to.add(12)];
            each!(vst1q_f32, at, self.0);
        }
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let greater = each!(vcgtq_f32, self.0, than.0);
            Floats128(each!(vbslq_f32, greater, yes.0, no.0))
        }
    }
}

impl Ints for Ints128 {
    type F = Floats128;

    #[inline(always)]
    fn store(self, to: &mut [i32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: see above.
        unsafe {
            let at = [to, to.add(4), to.add(8), to.add(12)];
            each!(vst1q_s32, at, self.0);
        }
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        // SAFETY: see above.
        unsafe { Ints128(each!(vshlq_s32, self.0, [vdupq_n_s32(N as i32); 4])) }
    }
    #[inline(always)]
    fn to_f(self) -> Floats128 {
        // SAFETY: see above.
        unsafe { Floats128(each!(vcvtq_f32_s32, self.0)) }
    }
}
