//! Float products with AVX-512: a group is one register.

use std::arch::x86_64::*;

use super::avx2::sum_eight;
use super::lanes::{Group, Registers, kernel};
use crate::simd::x86::Avx512;

kernel! {
    #[target_feature(enable = "avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    // SAFETY: the functions that this is in have these features.
    token: unsafe { Avx512::new() }, parts: 1,
    tile: [1, 2, 3, 4, 5, 6],
    direct: [1 => 4, 2 => 4, 3 => 4, 4 => 4, 5 => 4, 6 => 4],
    most_direct: usize::MAX,
}

impl Registers<1> for Avx512 {
    type Part = __m512;

    #[inline(always)]
    fn zero(self) -> __m512 {
        // SAFETY: a token is made only where there is AVX-512; so in all functions here.
        unsafe { _mm512_setzero_ps() }
    }

    #[inline(always)]
    fn load(self, group: &Group, _: usize) -> __m512 {
        // SAFETY: a group is 64 bytes, aligned.
        unsafe { _mm512_load_ps(group.0.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, value: __m512, group: &mut Group, _: usize) {
        // SAFETY: as in `load`.
        unsafe { _mm512_store_ps(group.0.as_mut_ptr(), value) }
    }

    #[inline(always)]
    fn f32(self, bytes: &[u8; 64]) -> [__m512; 1] {
        // SAFETY: 64 bytes are there.
        unsafe { [_mm512_loadu_ps(bytes.as_ptr().cast())] }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> [__m512; 1] {
        // SAFETY: 32 bytes are there.
        unsafe { [_mm512_cvtph_ps(_mm256_loadu_si256(bytes.as_ptr().cast()))] }
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> [__m512; 1] {
        // SAFETY: 32 bytes are there.
        unsafe {
            let all = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bytes.as_ptr().cast()));
            let exponent = _mm512_set1_epi32(i32::from(super::rounding::BF16_EXPONENT));
            let large = _mm512_test_epi32_mask(all, exponent);
            [_mm512_castsi512_ps(_mm512_maskz_slli_epi32::<16>(
                large, all,
            ))]
        }
    }

    #[inline(always)]
    fn add_exact(self, acc: __m512, w: __m512, x: __m512) -> __m512 {
        // SAFETY: as in `zero`.
        unsafe { _mm512_fmadd_ps(w, x, acc) }
    }

    #[inline(always)]
    fn add_rounded(self, acc: __m512, w: __m512, x: __m512) -> __m512 {
        // SAFETY: as in `zero`.
        unsafe { _mm512_add_ps(acc, _mm512_mul_ps(w, x)) }
    }

    #[inline(always)]
    fn sum(self, [v]: [__m512; 1]) -> f32 {
        // SAFETY: as in `zero`.
        unsafe {
            sum_eight(_mm256_add_ps(
                _mm512_castps512_ps256(v),
                _mm512_extractf32x8_ps::<1>(v),
            ))
        }
    }
}
