//! The lanes of attention with AVX2 and AVX-512.

use std::arch::x86_64::*;

use half::f16;

use super::page::LANES;
use super::simd::Simd;

/// AVX2, FMA and F16C: two registers for sixteen lanes.
#[derive(Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    /// # Safety
    /// The machine has AVX2, FMA and F16C.
    pub(super) unsafe fn new() -> Avx2 {
        Avx2(())
    }

    /// The transpose of eight rows of eight.
    #[inline(always)]
    fn transpose_eight(self, x: [__m256; 8]) -> [__m256; 8] {
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
}

// SAFETY of the blocks below: an `Avx2` is made only where its instructions exist, and pointers come
// from references to arrays that are as long as what is read or written.
impl Simd for Avx2 {
    type Floats = [__m256; 2];
    type Ints = [__m256i; 2];
    type Pairs = [__m256i; 2];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Floats {
        // SAFETY: see above.
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> Self::Floats {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    fn load_halves(self, from: &[f16; LANES]) -> Self::Floats {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(8).cast())),
            ]
        }
    }
    #[inline(always)]
    fn load_bytes(self, from: &[i8; LANES]) -> Self::Floats {
        let from = from.as_ptr();
        // SAFETY: see above.
        unsafe {
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()))),
            ]
        }
    }
    #[inline(always)]
    fn transpose(self, x: [Self::Floats; LANES]) -> [Self::Floats; LANES] {
        let mut out = [self.splat(0.0); LANES];
        for half in 0..2 {
            for rows in 0..2 {
                let mut quarter = [out[0][0]; 8];
                for (to, from) in quarter.iter_mut().zip(&x[8 * rows..]) {
                    *to = from[half];
                }
                let quarter = self.transpose_eight(quarter);
                for (to, from) in out[8 * half..].iter_mut().zip(quarter) {
                    to[rows] = from;
                }
            }
        }
        out
    }
    #[inline(always)]
    fn store(self, [low, high]: Self::Floats, to: &mut [f32; LANES]) {
        let to = to.as_mut_ptr();
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(to, low);
            _mm256_storeu_ps(to.add(8), high);
        }
    }
    #[inline(always)]
    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: see above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    fn add_exact_product(
        self,
        sum: Self::Floats,
        a: Self::Floats,
        b: Self::Floats,
    ) -> Self::Floats {
        // SAFETY: see above.
        unsafe {
            [
                _mm256_fmadd_ps(a[0], b[0], sum[0]),
                _mm256_fmadd_ps(a[1], b[1], sum[1]),
            ]
        }
    }

    #[inline(always)]
    fn no_ints(self) -> Self::Ints {
        // SAFETY: see above.
        unsafe { [_mm256_setzero_si256(); 2] }
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
    fn split_pairs(self, pairs: Self::Pairs) -> [Self::Floats; 2] {
        // SAFETY: see above.
        unsafe {
            let mut out = [[_mm256_setzero_ps(); 2]; 2];
            for (i, x) in pairs.into_iter().enumerate() {
                let first = _mm256_srai_epi32::<16>(_mm256_slli_epi32::<16>(x));
                out[0][i] = _mm256_cvtepi32_ps(first);
                out[1][i] = _mm256_cvtepi32_ps(_mm256_srai_epi32::<16>(x));
            }
            out
        }
    }
    #[inline(always)]
    fn add_pairs(self, sum: Self::Ints, codes: Self::Pairs, pair: i32) -> Self::Ints {
        // SAFETY: see above.
        unsafe {
            let pair = _mm256_set1_epi32(pair);
            [
                _mm256_add_epi32(sum[0], _mm256_madd_epi16(codes[0], pair)),
                _mm256_add_epi32(sum[1], _mm256_madd_epi16(codes[1], pair)),
            ]
        }
    }
    #[inline(always)]
    fn to_floats(self, x: Self::Ints) -> Self::Floats {
        // SAFETY: see above.
        unsafe { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
    }
}

/// AVX-512 F, BW and VNNI: one register for sixteen lanes.
#[derive(Clone, Copy)]
pub(super) struct Avx512(());

impl Avx512 {
    /// # Safety
    /// The machine has AVX-512 F, BW and VNNI.
    pub(super) unsafe fn new() -> Avx512 {
        Avx512(())
    }
}

// SAFETY of the blocks below: an `Avx512` is made only where its instructions exist, and pointers
// come from references to arrays that are as long as what is read or written.
impl Simd for Avx512 {
    type Floats = __m512;
    type Ints = __m512i;
    type Pairs = __m512i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn load(self, from: &[f32; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    fn load_halves(self, from: &[f16; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn load_bytes(self, from: &[i8; LANES]) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.as_ptr().cast()))) }
    }
    #[inline(always)]
    fn transpose(self, x: [__m512; LANES]) -> [__m512; LANES] {
        let mut out = x;
        // SAFETY: see above.
        unsafe {
            // Columns of four rows, those of each quarter of the lanes side by side.
            let mut fours = [[x[0]; 4]; 4];
            for (four, x) in fours.iter_mut().zip(x.as_chunks::<4>().0) {
                let low = [
                    _mm512_unpacklo_ps(x[0], x[1]),
                    _mm512_unpacklo_ps(x[2], x[3]),
                ];
                let high = [
                    _mm512_unpackhi_ps(x[0], x[1]),
                    _mm512_unpackhi_ps(x[2], x[3]),
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
                out[i] = _mm512_shuffle_f32x4::<0x88>(even[0], even[1]);
                out[4 + i] = _mm512_shuffle_f32x4::<0x88>(odd[0], odd[1]);
                out[8 + i] = _mm512_shuffle_f32x4::<0xDD>(even[0], even[1]);
                out[12 + i] = _mm512_shuffle_f32x4::<0xDD>(odd[0], odd[1]);
            }
        }
        out
    }
    #[inline(always)]
    fn store(self, x: __m512, to: &mut [f32; LANES]) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), x) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn add_exact_product(self, sum: __m512, a: __m512, b: __m512) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, sum) }
    }

    #[inline(always)]
    fn no_ints(self) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_setzero_si512() }
    }
    #[inline(always)]
    fn load_pairs(self, from: &[i8; 2 * LANES]) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi8_epi16(_mm256_loadu_si256(from.as_ptr().cast())) }
    }
    #[inline(always)]
    fn split_pairs(self, pairs: __m512i) -> [__m512; 2] {
        // SAFETY: see above.
        unsafe {
            let first = _mm512_srai_epi32::<16>(_mm512_slli_epi32::<16>(pairs));
            let second = _mm512_srai_epi32::<16>(pairs);
            [_mm512_cvtepi32_ps(first), _mm512_cvtepi32_ps(second)]
        }
    }
    #[inline(always)]
    fn add_pairs(self, sum: __m512i, codes: __m512i, pair: i32) -> __m512i {
        // SAFETY: see above.
        unsafe { _mm512_dpwssd_epi32(sum, codes, _mm512_set1_epi32(pair)) }
    }
    #[inline(always)]
    fn to_floats(self, x: __m512i) -> __m512 {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
}
