//! A row of activations with sixteen rows of weights, with AVX-512.

use std::arch::x86_64::*;

use super::super::prefetch;
use super::{BLOCK, GROUP, QuantizedRow, ROWS, SPAN, Span, WORD};

/// Bytes ahead of those that are multiplied that are prefetched.
const AHEAD: usize = 8 << 10;

/// As [`super::dot`].
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vnni")]
pub(super) fn dot(tile: &[Span], x: QuantizedRow<'_>) -> [f32; ROWS] {
    assert!(x.q.len() >= tile.len() * SPAN);
    assert!(x.scales.len() >= tile.len() * (SPAN / GROUP));
    assert!(x.sums.len() >= tile.len() * (SPAN / SUM));
    let mut acc = _mm512_setzero_ps();
    for (s, span) in tile.iter().enumerate() {
        let ahead = std::ptr::from_ref(span).cast::<u8>().wrapping_add(AHEAD);
        prefetch::lines(prefetch::Level::Second, ahead, size_of::<Span>());
        // SAFETY: there are as many activations.
        unsafe {
            acc = add_span(
                acc,
                span,
                x.q.as_ptr().add(s * SPAN),
                x.scales.as_ptr().add(s * (SPAN / GROUP)),
                x.sums.as_ptr().add(s * (SPAN / SUM)),
            );
        }
    }
    let mut out = [0.0; ROWS];
    // SAFETY: it is as long as a register.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc) };
    out
}

/// Activations that share a sum: half a group.
const SUM: usize = super::super::activations::SUM_LEN;

/// Adds the groups of a span, one after the other.
///
/// # Safety
/// There are 256 activations, a scale for each group of them, and two sums.
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_span(
    mut acc: __m512,
    span: &Span,
    q: *const i8,
    steps: *const f32,
    sums: *const i16,
) -> __m512 {
    let (first, second) = (_mm512_set1_epi8(3), _mm512_set1_epi8(12));
    for g in 0..SPAN / GROUP {
        // SAFETY: the caller's promise; spans are as long as their loads.
        unsafe {
            // Codes are too large by one: sums begin with what is too much.
            let excess = i32::from(*sums.add(2 * g)) + i32::from(*sums.add(2 * g + 1));
            let mut even = _mm512_set1_epi32(-excess);
            let mut odd = _mm512_setzero_si512();
            for w in g * GROUP / WORD..(g + 1) * GROUP / WORD {
                let codes = _mm512_load_si512(span.codes[w].as_ptr().cast());
                let high = _mm512_srli_epi16::<4>(codes);
                let quad = |s: usize| {
                    _mm512_set1_epi32(q.add(w * WORD + 4 * s).cast::<i32>().read_unaligned())
                };
                // Codes at bits 2 are masked where they are: they are four times as large, and so are their sums.
                even = _mm512_dpbusd_epi32(even, _mm512_and_si512(codes, first), quad(0));
                odd = _mm512_dpbusd_epi32(odd, _mm512_and_si512(codes, second), quad(1));
                even = _mm512_dpbusd_epi32(even, _mm512_and_si512(high, first), quad(2));
                odd = _mm512_dpbusd_epi32(odd, _mm512_and_si512(high, second), quad(3));
            }
            let products = _mm512_add_epi32(even, _mm512_srai_epi32::<2>(odd));
            let scales = _mm256_load_si256(span.scales[g * GROUP / BLOCK].as_ptr().cast());
            let scale = _mm512_mul_ps(_mm512_cvtph_ps(scales), _mm512_set1_ps(*steps.add(g)));
            acc = _mm512_add_ps(acc, _mm512_mul_ps(_mm512_cvtepi32_ps(products), scale));
        }
    }
    acc
}
