//! Sixteen lanes with AVX2 and AVX-512.

use std::arch::x86_64::*;
use std::ops::{Add, Div, Mul, Sub};

use super::lanes::{Lanes, Simd, Vector};

/// AVX2: two registers for sixteen lanes.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

/// AVX-512 F.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2.
    #[inline(always)]
    pub(super) unsafe fn new() -> Avx2 {
        Avx2(())
    }
}

impl Avx512 {
    /// # Safety
    /// The machine has AVX-512 F.
    #[inline(always)]
    pub(super) unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

/// The vectors of [`Avx2`].
#[derive(Clone, Copy)]
pub(super) struct Avx2Vector(__m256, __m256);

/// The vectors of [`Avx512`].
#[derive(Clone, Copy)]
pub(super) struct Avx512Vector(__m512);

// SAFETY of the blocks below: `Avx2` and `Avx512` are made only where their instructions exist, and
// vectors only of them; pointers come from references to arrays of sixteen floats.

impl Simd for Avx2 {
    type V = Avx2Vector;

    #[inline(always)]
    fn splat(self, x: f32) -> Avx2Vector {
        // SAFETY: see above.
        let x = unsafe { _mm256_set1_ps(x) };
        Avx2Vector(x, x)
    }
    #[inline(always)]
    fn load(self, from: &Lanes) -> Avx2Vector {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe { Avx2Vector(_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))) }
    }
}

impl Simd for Avx512 {
    type V = Avx512Vector;

    #[inline(always)]
    fn splat(self, x: f32) -> Avx512Vector {
        // SAFETY: see above.
        unsafe { Avx512Vector(_mm512_set1_ps(x)) }
    }
    #[inline(always)]
    fn load(self, from: &Lanes) -> Avx512Vector {
        // SAFETY: see above.
        unsafe { Avx512Vector(_mm512_loadu_ps(from.as_ptr())) }
    }
}

/// An operator of both vector types.
macro_rules! operator {
    ($trait:ident, $method:ident, $avx2:ident, $avx512:ident) => {
        impl $trait for Avx2Vector {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { Avx2Vector($avx2(self.0, other.0), $avx2(self.1, other.1)) }
            }
        }

        impl $trait for Avx512Vector {
            type Output = Self;
            #[inline(always)]
            fn $method(self, other: Self) -> Self {
                // SAFETY: see above.
                unsafe { Avx512Vector($avx512(self.0, other.0)) }
            }
        }
    };
}

operator!(Add, add, _mm256_add_ps, _mm512_add_ps);
operator!(Sub, sub, _mm256_sub_ps, _mm512_sub_ps);
operator!(Mul, mul, _mm256_mul_ps, _mm512_mul_ps);
operator!(Div, div, _mm256_div_ps, _mm512_div_ps);

// Minimum and maximum instructions return the second operand where one is NaN.

impl Vector for Avx2Vector {
    #[inline(always)]
    fn store(self) -> Lanes {
        let mut lanes = [0.0; 16];
        let to = lanes.as_mut_ptr();
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, self.0);
            _mm256_storeu_ps(to.add(8), self.1);
        }
        lanes
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            Avx2Vector(
                _mm256_max_ps(self.0, other.0),
                _mm256_max_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            Avx2Vector(
                _mm256_min_ps(self.0, other.0),
                _mm256_min_ps(self.1, other.1),
            )
        }
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_GT_OQ>(self.0, than.0);
            let high = _mm256_cmp_ps::<_CMP_GT_OQ>(self.1, than.1);
            Avx2Vector(
                _mm256_blendv_ps(no.0, yes.0, low),
                _mm256_blendv_ps(no.1, yes.1, high),
            )
        }
    }
}

impl Vector for Avx512Vector {
    #[inline(always)]
    fn store(self) -> Lanes {
        let mut lanes = [0.0; 16];
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), self.0) };
        lanes
    }
    #[inline(always)]
    fn max(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Avx512Vector(_mm512_max_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn min(self, other: Self) -> Self {
        // SAFETY: see above.
        unsafe { Avx512Vector(_mm512_min_ps(self.0, other.0)) }
    }
    #[inline(always)]
    fn if_greater(self, than: Self, yes: Self, no: Self) -> Self {
        // SAFETY: see above.
        unsafe {
            let greater = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(self.0, than.0);
            Avx512Vector(_mm512_mask_blend_ps(greater, no.0, yes.0))
        }
    }
}
