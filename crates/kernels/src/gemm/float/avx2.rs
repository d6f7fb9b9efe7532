//! Float products with AVX2: a group is two registers.

use std::arch::x86_64::*;

use super::lanes::{Group, Registers, kernel};
use crate::simd::x86::Avx2;

kernel! {
    #[target_feature(enable = "avx2,f16c,fma")]
    // SAFETY: the functions that this is in have these features.
    token: unsafe { Avx2::new() }, parts: 2,
    tile: [1, 2, 3],
    direct: [1 => 4, 2 => 2, 3 => 2, 4 => 1, 5 => 1, 6 => 1],
    most_direct: 12,
}

impl Registers<2> for Avx2 {
    type Part = __m256;

    #[inline(always)]
    fn zero(self) -> __m256 {
        // SAFETY: a token is made only where there is AVX2; so in all functions here.
        unsafe { _mm256_setzero_ps() }
    }

    #[inline(always)]
    fn load(self, group: &Group, part: usize) -> __m256 {
        assert!(part < 2);
        // SAFETY: a group has two parts of 32 bytes, aligned.
        unsafe { _mm256_load_ps(group.0.as_ptr().add(8 * part)) }
    }

    #[inline(always)]
    fn store(self, value: __m256, group: &mut Group, part: usize) {
        assert!(part < 2);
        // SAFETY: as in `load`.
        unsafe { _mm256_store_ps(group.0.as_mut_ptr().add(8 * part), value) }
    }

    #[inline(always)]
    fn f32(self, bytes: &[u8; 64]) -> [__m256; 2] {
        let at: *const f32 = bytes.as_ptr().cast();
        // SAFETY: 16 unaligned values are there.
        unsafe { [_mm256_loadu_ps(at), _mm256_loadu_ps(at.add(8))] }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> [__m256; 2] {
        let at: *const __m128i = bytes.as_ptr().cast();
        // SAFETY: 32 bytes are there.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(at)),
                _mm256_cvtph_ps(_mm_loadu_si128(at.add(1))),
            ]
        }
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> [__m256; 2] {
        // SAFETY: 32 bytes are there.
        unsafe {
            let all = _mm256_loadu_si256(bytes.as_ptr().cast());
            // Taking the sign of the masked exponent zeroes weights for which it is 0.
            let large = _mm256_and_si256(all, _mm256_set1_epi16(super::rounding::BF16_EXPONENT));
            let all = _mm256_sign_epi16(all, large);
            let wide =
                |half| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(half)));
            [
                wide(_mm256_castsi256_si128(all)),
                wide(_mm256_extracti128_si256::<1>(all)),
            ]
        }
    }

    #[inline(always)]
    fn add_exact(self, acc: __m256, w: __m256, x: __m256) -> __m256 {
        // SAFETY: as in `zero`.
        unsafe { _mm256_fmadd_ps(w, x, acc) }
    }

    #[inline(always)]
    fn add_rounded(self, acc: __m256, w: __m256, x: __m256) -> __m256 {
        // SAFETY: as in `zero`.
        unsafe { _mm256_add_ps(acc, _mm256_mul_ps(w, x)) }
    }

    #[inline(always)]
    fn sum(self, [low, high]: [__m256; 2]) -> f32 {
        // SAFETY: as in `zero`.
        unsafe { sum_eight(_mm256_add_ps(low, high)) }
    }
}

/// The sum of eight lanes, halves upon halves.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn sum_eight(v: __m256) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let v = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let v = _mm_add_ps(v, _mm_movehl_ps(v, v));
        _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)))
    }
}
