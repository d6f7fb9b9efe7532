//! One row of activations with rows of blocks, straight from the stored bytes, on x86-64.
//!
//! Everything is in registers of 256 bits, and the levels differ in [`Products`] only. Many types
//! take more instructions a byte than memory leaves time for: where there is AVX-512 they are
//! [`interleaved`](super::super::interleaved).

mod blocks256;
mod blocks32;

use std::arch::x86_64::*;

use sterna_format::DType;

use super::super::activations::QuantizedRow;
use super::Gemv;
use crate::isa::Level;

/// The kernel of a level; `None` if it has none.
pub(super) fn gemv(level: Level) -> Option<Gemv> {
    match level {
        Level::Baseline => None,
        Level::Avx2 => Some(avx2),
        Level::AvxVnni => Some(avx_vnni),
        Level::Avx512 | Level::Amx => Some(avx512),
    }
}

#[target_feature(enable = "avx2,f16c")]
fn avx2(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
    // SAFETY: compiled for AVX2 and F16C.
    unsafe { multiply::<Avx2>(dtype, rows, row_bytes, x, out) }
}

#[target_feature(enable = "avx2,f16c,avxvnni")]
fn avx_vnni(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
    // SAFETY: compiled for AVX2, F16C and AVX-VNNI.
    unsafe { multiply::<AvxVnni>(dtype, rows, row_bytes, x, out) }
}

#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn avx512(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
    // SAFETY: compiled for AVX2, F16C and the VNNI of AVX-512.
    unsafe { multiply::<Avx512>(dtype, rows, row_bytes, x, out) }
}

/// # Safety
/// Inlined into code compiled for AVX2, F16C and what `P` needs.
#[inline(always)]
unsafe fn multiply<P: Products>(
    dtype: DType,
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Q2_K => blocks256::gemv::<P, blocks256::Q2K>(rows, row_bytes, x, out),
            DType::Q3_K => blocks256::gemv::<P, blocks256::Q3K>(rows, row_bytes, x, out),
            DType::Q4_K => blocks256::gemv::<P, blocks256::Q4K>(rows, row_bytes, x, out),
            DType::Q5_K => blocks256::gemv::<P, blocks256::Q5K>(rows, row_bytes, x, out),
            DType::Q6_K => blocks256::gemv::<P, blocks256::Q6K>(rows, row_bytes, x, out),
            DType::Q4_0 => blocks32::gemv::<P, blocks32::Q4_0>(rows, row_bytes, x, out),
            DType::Q5_0 => blocks32::gemv::<P, blocks32::Q5_0>(rows, row_bytes, x, out),
            DType::Q8_0 => blocks32::gemv::<P, blocks32::Q8_0>(rows, row_bytes, x, out),
            DType::Q1_0 => blocks32::gemv::<P, blocks32::Q1_0>(rows, row_bytes, x, out),
            DType::Q2_0 => blocks32::gemv::<P, blocks32::Q2_0>(rows, row_bytes, x, out),
            DType::Q2_0_G128 | DType::PQ2_0 => {
                blocks32::gemv::<P, blocks32::Q2_0G128>(rows, row_bytes, x, out);
            }
            _ => unreachable!("{dtype} has no scaling"),
        }
    }
}

/// Sums of products of bytes, exact within the stated bounds.
///
/// # Safety
/// All functions: inlined into code compiled for AVX2 and what the type is named for.
trait Products: Copy {
    /// `acc[i] + Σ a[i, 0..2] · b[i, 0..2]`, i16 pairs to i32.
    unsafe fn add_i16(acc: __m256i, a: __m256i, b: __m256i) -> __m256i;

    /// `Σ a[i, 0..4] · q[i, 0..4]`, unsigned and signed bytes to i32; `a` at most 128.
    unsafe fn dot_u8(a: __m256i, q: __m256i) -> __m256i;

    /// `Σ a[i, 0..4] · q[i, 0..4] + Σ b[i, 0..4] · r[i, 0..4]`; `a` and `b` at most 64.
    unsafe fn dot_two_u8(a: [__m256i; 2], q: [__m256i; 2]) -> __m256i;

    /// The same of four; they are at most 32.
    unsafe fn dot_four_u8(a: [__m256i; 4], q: [__m256i; 4]) -> __m256i;

    /// `Σ (w[i, 0..4] + I8_BIAS) · q[i, 0..4]`, signed bytes to i32; `q` at least −127.
    unsafe fn dot_i8(w: __m256i, q: __m256i) -> __m256i;

    const I8_BIAS: i16;
}

#[derive(Clone, Copy)]
struct Avx2;

impl Products for Avx2 {
    #[inline(always)]
    unsafe fn add_i16(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(a, b)) }
    }

    #[inline(always)]
    unsafe fn dot_u8(a: __m256i, q: __m256i) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_madd_epi16(_mm256_maddubs_epi16(a, q), _mm256_set1_epi16(1)) }
    }

    #[inline(always)]
    unsafe fn dot_two_u8([a, b]: [__m256i; 2], [q, r]: [__m256i; 2]) -> __m256i {
        // SAFETY: the caller's promise. 2 · 2 · 64 · 127 is below 32,768.
        unsafe {
            let pairs = _mm256_add_epi16(_mm256_maddubs_epi16(a, q), _mm256_maddubs_epi16(b, r));
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn dot_four_u8(a: [__m256i; 4], q: [__m256i; 4]) -> __m256i {
        // SAFETY: the caller's promise. 4 · 2 · 32 · 127 is below 32,768.
        unsafe {
            let mut pairs = _mm256_maddubs_epi16(a[0], q[0]);
            for i in 1..4 {
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(a[i], q[i]));
            }
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn dot_i8(w: __m256i, q: __m256i) -> __m256i {
        // |−128| is 128 as an unsigned byte, and 2 · 128 · 127 is below 32,768.
        // SAFETY: the caller's promise.
        unsafe { Avx2::dot_u8(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w)) }
    }

    const I8_BIAS: i16 = 0;
}

/// The two encodings of the 256-bit VNNI instructions.
macro_rules! vnni {
    ($name:ident, $dpwssd:ident, $dpbusd:ident) => {
        #[derive(Clone, Copy)]
        struct $name;

        impl Products for $name {
            #[inline(always)]
            unsafe fn add_i16(acc: __m256i, a: __m256i, b: __m256i) -> __m256i {
                // SAFETY: the caller's promise.
                unsafe { $dpwssd(acc, a, b) }
            }

            #[inline(always)]
            unsafe fn dot_u8(a: __m256i, q: __m256i) -> __m256i {
                // SAFETY: the caller's promise.
                unsafe { $dpbusd(_mm256_setzero_si256(), a, q) }
            }

            #[inline(always)]
            unsafe fn dot_two_u8([a, b]: [__m256i; 2], [q, r]: [__m256i; 2]) -> __m256i {
                // SAFETY: the caller's promise.
                unsafe { $dpbusd($dpbusd(_mm256_setzero_si256(), a, q), b, r) }
            }

            #[inline(always)]
            unsafe fn dot_four_u8([a, b, c, d]: [__m256i; 4], q: [__m256i; 4]) -> __m256i {
                // SAFETY: the caller's promise.
                unsafe {
                    let sums = $dpbusd(_mm256_setzero_si256(), a, q[0]);
                    $dpbusd($dpbusd($dpbusd(sums, b, q[1]), c, q[2]), d, q[3])
                }
            }

            #[inline(always)]
            unsafe fn dot_i8(w: __m256i, q: __m256i) -> __m256i {
                // Flipping the top bit adds 128.
                // SAFETY: the caller's promise.
                unsafe { $name::dot_u8(_mm256_xor_si256(w, _mm256_set1_epi8(-128)), q) }
            }

            const I8_BIAS: i16 = 128;
        }
    };
}

vnni!(AvxVnni, _mm256_dpwssd_avx_epi32, _mm256_dpbusd_avx_epi32);
vnni!(Avx512, _mm256_dpwssd_epi32, _mm256_dpbusd_epi32);

/// `[Σ a, Σ b, Σ c, Σ d]` of the lower and of the upper halves.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn sum_halves([a, b, c, d]: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
        let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
        _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd))
    }
}

/// The sums of eight vectors.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn sum_each(low: [__m256i; 4], high: [__m256i; 4]) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let (low, high) = (sum_halves(low), sum_halves(high));
        _mm256_add_epi32(
            _mm256_permute2x128_si256::<0x20>(low, high),
            _mm256_permute2x128_si256::<0x31>(low, high),
        )
    }
}
