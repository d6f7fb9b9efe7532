//! Sixteen lanes with AVX2 and AVX-512.

use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

use super::{Floats, Ints, LANES, Simd};

/// AVX2, FMA and F16C: two registers for sixteen lanes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

/// The same with dot products of bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AvxVnni(Avx2);

/// AVX-512 F, BW, DQ and VL with dot products of bytes: one register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

impl AvxVnni {
    /// # Safety
    /// The machine has AVX2, FMA, F16C and AVX-VNNI.
    #[inline(always)]
    pub(crate) unsafe fn new() -> AvxVnni {
        AvxVnni(Avx2(()))
    }
}

impl Avx512 {
    /// # Safety
    /// The machine has AVX-512 F, BW, DQ, VL and VNNI.
    #[inline(always)]
    pub(crate) unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

/// Floats in two registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats256(pub(crate) [__m256; 2]);

/// Integers in two registers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ints256(pub(crate) [__m256i; 2]);

/// Floats in one register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Floats512(pub(crate) __m512);

/// Integers in one register.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ints512(pub(crate) __m512i);

/// An instruction on both registers. Closures called by functions of `core` would not be compiled for these
/// instructions, so there are none here.
macro_rules! both {
    ($f:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        [$f(a[0], b[0]), $f(a[1], b[1])]
    }};
}
pub(crate) use both;

// SAFETY of the blocks below: tokens are made only where their instructions exist, and vectors only of them; pointers
// come from references to arrays of sixteen.

impl Simd for Avx2 {
    type F = Floats256;
    type I = Ints256;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats256 {
        // SAFETY: see above.
        unsafe { Floats256([_mm256_set1_ps(x); 2]) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Floats256 {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe { Floats256([_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))]) }
    }
    #[inline(always)]
    fn zero(self) -> Ints256 {
        // SAFETY: see above.
        unsafe { Ints256([_mm256_setzero_si256(); 2]) }
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; LANES]) -> Ints256 {
        let from: *const __m256i = from.as_ptr().cast();
        // SAFETY: see above.
        unsafe { Ints256([_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))]) }
    }
}

impl Simd for AvxVnni {
    type F = Floats256;
    type I = Ints256;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats256 {
        self.0.splat(x)
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Floats256 {
        self.0.load(from)
    }
    #[inline(always)]
    fn zero(self) -> Ints256 {
        self.0.zero()
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; LANES]) -> Ints256 {
        self.0.load_i(from)
    }
}

impl Simd for Avx512 {
    type F = Floats512;
    type I = Ints512;

    #[inline(always)]
    fn splat(self, x: f32) -> Floats512 {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Floats512 {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_loadu_ps(from.as_ptr())) }
    }
    #[inline(always)]
    fn zero(self) -> Ints512 {
        // SAFETY: see above.
        unsafe { Ints512(_mm512_setzero_si512()) }
    }
    #[inline(always)]
    fn load_i(self, from: &[i32; LANES]) -> Ints512 {
        // SAFETY: see above.
        unsafe { Ints512(_mm512_loadu_si512(from.as_ptr().cast())) }
    }
}

/// An operator of the vectors of both widths.
macro_rules! operator {
    ($trait:ident, $method:ident, $of256:ident, $of512:ident, $avx2:ident, $avx512:ident) => {
        impl $trait for $of256 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { $of256(both!($avx2, self.0, other.0)) }
            }
        }

        impl $trait for $of512 {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { $of512($avx512(self.0, other.0)) }
            }
        }
    };
}

operator!(Add, add, Floats256, Floats512, _mm256_add_ps, _mm512_add_ps);
operator!(Sub, sub, Floats256, Floats512, _mm256_sub_ps, _mm512_sub_ps);
operator!(Mul, mul, Floats256, Floats512, _mm256_mul_ps, _mm512_mul_ps);
operator!(Div, div, Floats256, Floats512, _mm256_div_ps, _mm512_div_ps);
operator!(
    Add,
    add,
    Ints256,
    Ints512,
    _mm256_add_epi32,
    _mm512_add_epi32
);
operator!(
    Sub,
    sub,
    Ints256,
    Ints512,
    _mm256_sub_epi32,
    _mm512_sub_epi32
);
operator!(
    Mul,
    mul,
    Ints256,
    Ints512,
    _mm256_mullo_epi32,
    _mm512_mullo_epi32
);

// Minimum and maximum instructions return the second operand where one is NaN.

impl Floats for Floats256 {
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, self.0[0]);
            _mm256_storeu_ps(to.add(8), self.0[1]);
        }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Floats256(both!(_mm256_max_ps, self.0, other.0)) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Floats256(both!(_mm256_min_ps, self.0, other.0)) }
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0[0], than.0[0]);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0[1], than.0[1]);
            Floats256([
                _mm256_blendv_ps(no.0[0], yes.0[0], low),
                _mm256_blendv_ps(no.0[1], yes.0[1], high),
            ])
        }
    }
}

impl Floats for Floats512 {
    #[inline(always)]
    fn store(self, to: &mut [f32; LANES]) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), self.0) }
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_min_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, than.0);
            Floats512(_mm512_mask_blend_ps(greater, no.0, yes.0))
        }
    }
}

impl Ints for Ints256 {
    type F = Floats256;

    #[inline(always)]
    fn store(self, to: &mut [i32; LANES]) {
        let to: *mut __m256i = to.as_mut_ptr().cast();
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_si256(to, self.0[0]);
            _mm256_storeu_si256(to.add(1), self.0[1]);
        }
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        // SAFETY: see above.
        unsafe {
            Ints256(both!(
                _mm256_sll_epi32,
                self.0,
                [_mm_cvtsi32_si128(N as i32); 2]
            ))
        }
    }
    #[inline(always)]
    fn to_f(self) -> Floats256 {
        // SAFETY: see above.
        unsafe { Floats256([_mm256_cvtepi32_ps(self.0[0]), _mm256_cvtepi32_ps(self.0[1])]) }
    }
}

impl Ints for Ints512 {
    type F = Floats512;

    #[inline(always)]
    fn store(self, to: &mut [i32; LANES]) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().cast(), self.0) }
    }
    #[inline(always)]
    fn shift_left<const N: u32>(self) -> Self {
        // SAFETY: see above.
        unsafe { Ints512(_mm512_slli_epi32::<N>(self.0)) }
    }
    #[inline(always)]
    fn to_f(self) -> Floats512 {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_cvtepi32_ps(self.0)) }
    }
}
