//! Attention's lanes with AVX2 and AVX-512.

use std::arch::x86_64::*;

use half::f16;

use super::cached::Cached;
use crate::simd::x86::{Avx2, Avx512, Floats256, Floats512, Ints256, Ints512, both};
use crate::simd::{LANES, Simd};

/// The transpose of eight rows of eight.
#[inline(always)]
fn transpose_eight(_: Avx2, x: [__m256; 8]) -> [__m256; 8] {
    let mut out = x;
    // SAFETY: an `Avx2` is made only where its instructions exist.
    unsafe {
        // Columns of four rows, those of the low and those of the high lanes side by side.
        let mut fours = [[x[0]; 4]; 2];
        for (four, x) in fours.iter_mut().zip(x.as_chunks::<4>().0) {
            let low = [
                _mm256_unpacklo_ps(x[0], x[1]),
                _mm256_unpacklo_ps(x[2], x[3]),
            ];
            let high = [
                _mm256_unpackhi_ps(x[0], x[1]),
                _mm256_unpackhi_ps(x[2], x[3]),
            ];
            *four = [
                _mm256_shuffle_ps::<0x44>(low[0], low[1]),
                _mm256_shuffle_ps::<0xEE>(low[0], low[1]),
                _mm256_shuffle_ps::<0x44>(high[0], high[1]),
                _mm256_shuffle_ps::<0xEE>(high[0], high[1]),
            ];
        }
        for i in 0..4 {
            out[i] = _mm256_permute2f128_ps::<0x20>(fours[0][i], fours[1][i]);
            out[4 + i] = _mm256_permute2f128_ps::<0x31>(fours[0][i], fours[1][i]);
        }
    }
    out
}

// SAFETY of the blocks below: tokens are made only where their instructions exist, and pointers come
// from references to arrays that are as long as what is read or written.
impl Cached for Avx2 {
    type Pairs = [__m256i; 2];

    #[inline(always)]
    fn load_halves(self, from: &[f16; LANES]) -> Floats256 {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            Floats256([
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            ])
        }
    }
    #[inline(always)]
    fn load_bytes(self, from: &[i8; LANES]) -> Floats256 {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            Floats256([
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()))),
            ])
        }
    }
    #[inline(always)]
    fn transpose(self, x: [Floats256; LANES]) -> [Floats256; LANES] {
        let mut out = [self.splat(0.0); LANES];
        for half in 0..2 {
            for rows in 0..2 {
                let mut quarter = [out[0].0[0]; 8];
                for (to, from) in quarter.iter_mut().zip(&x[8 * rows..]) {
                    *to = from.0[half];
                }
                let quarter = transpose_eight(self, quarter);
                for (to, from) in out[8 * half..].iter_mut().zip(quarter) {
                    to.0[rows] = from;
                }
            }
        }
        out
    }
    #[inline(always)]
    fn add_exact_product(self, sum: Floats256, a: Floats256, b: Floats256) -> Floats256 {
        // SAFETY: see above.
        unsafe {
            Floats256([
                _mm256_fmadd_ps(a.0[0], b.0[0], sum.0[0]),
                _mm256_fmadd_ps(a.0[1], b.0[1], sum.0[1]),
            ])
        }
    }
    #[inline(always)]
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> Self::Pairs {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtepi8_epi16(_mm_loadu_si128(from.cast())),
                _mm256_cvtepi8_epi16(_mm_loadu_si128(from.add(LANES).cast())),
            ]
        }
    }
    #[inline(always)]
    fn split_pairs(self, pairs: Self::Pairs) -> [Floats256; 2] {
        // SAFETY: see above.
        unsafe {
            let mut out = [self.splat(0.0); 2];
            for (i, x) in pairs.into_iter().enumerate() {
                let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(x));
                out[0].0[i] = _mm256_cvtepi32_ps(first);
                out[1].0[i] = _mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(x));
            }
            out
        }
    }
    #[inline(always)]
    fn add_pairs(self, sum: Ints256, codes: Self::Pairs, pair: i32) -> Ints256 {
        // SAFETY: see above.
        unsafe {
            let pair = _mm256_set1_epi32(pair);
            sum + Ints256(both!(_mm256_madd_epi16, codes, [pair; 2]))
        }
    }
}

impl Cached for Avx512 {
    type Pairs = __m512i;

    #[inline(always)]
    fn load_halves(self, from: &[f16; LANES]) -> Floats512 {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn load_bytes(self, from: &[i8; LANES]) -> Floats512 {
        // SAFETY: see above.
        unsafe {
            let bytes = _mm_loadu_si128(from.as_ptr().cast());
            Floats512(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)))
        }
    }
    #[inline(always)]
    fn transpose(self, x: [Floats512; LANES]) -> [Floats512; LANES] {
        let mut out = x;
        // SAFETY: see above.
        unsafe {
            // Columns of four rows, those of each quarter of the lanes side by side.
            let mut fours = [[x[0].0; 4]; 4];
            for (four, x) in fours.iter_mut().zip(x.as_chunks::<4>().0) {
                let low = [
                    _mm512_unpacklo_ps(x[0].0, x[1].0),
                    _mm512_unpacklo_ps(x[2].0, x[3].0),
                ];
                let high = [
                    _mm512_unpackhi_ps(x[0].0, x[1].0),
                    _mm512_unpackhi_ps(x[2].0, x[3].0),
                ];
                *four = [
                    _mm512_shuffle_ps::<0x44>(low[0], low[1]),
                    _mm512_shuffle_ps::<0xEE>(low[0], low[1]),
                    _mm512_shuffle_ps::<0x44>(high[0], high[1]),
                    _mm512_shuffle_ps::<0xEE>(high[0], high[1]),
                ];
            }
            for i in 0..4 {
                let even = [
                    _mm512_shuffle_f32x4::<0x88>(fours[0][i], fours[1][i]),
                    _mm512_shuffle_f32x4::<0x88>(fours[2][i], fours[3][i]),
                ];
                let odd = [
                    _mm512_shuffle_f32x4::<0xDD>(fours[0][i], fours[1][i]),
                    _mm512_shuffle_f32x4::<0xDD>(fours[2][i], fours[3][i]),
                ];
                out[i] = Floats512(_mm512_shuffle_f32x4::<0x88>(even[0], even[1]));
                out[4 + i] = Floats512(_mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]));
                out[8 + i] = Floats512(_mm512_shuffle_f32x4::<0xDD>(even[0], even[1]));
                out[12 + i] = Floats512(_mm512_shuffle_f32x4::<0xDD>(odd[0], odd[1]));
            }
        }
        out
    }
    #[inline(always)]
    fn add_exact_product(self, sum: Floats512, a: Floats512, b: Floats512) -> Floats512 {
        // SAFETY: see above.
        unsafe { Floats512(_mm512_fmadd_ps(a.0, b.0, sum.0)) }
    }
    #[inline(always)]
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn split_pairs(self, pairs: __m512i) -> [Floats512; 2] {
        // SAFETY: see above.
        unsafe {
            let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
            let second = _mm512_srai_epi32::<16>(pairs);
            [
                Floats512(_mm512_cvtepi32_ps(first)),
                Floats512(_mm512_cvtepi32_ps(second)),
            ]
        }
    }
    #[inline(always)]
    fn add_pairs(self, sum: Ints512, codes: __m512i, pair: i32) -> Ints512 {
        // SAFETY: see above.
        unsafe { Ints512(_mm512_dpwssd_epi32(sum.0, codes, _mm512_set1_epi32(pair))) }
    }
}
