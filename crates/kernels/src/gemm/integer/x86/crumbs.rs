//! Codes of two bits in blocks of 128, with AVX-512: two blocks at a time, in sixteen rows.

use std::arch::x86_64::*;

use super::super::super::activations::QuantizedRow;
use super::super::super::prefetch;
use super::blocks32::{GROUPS, Q2_0G128, SPAN, Span, arrange_crumbs};

/// Rows that are summed together, one per lane.
pub(super) const ROWS: usize = 16;

/// Bytes of a span, two blocks, and of each of them: a scale, then element `4j + i` at bits `2i` of byte `j`.
pub(super) const BYTES: usize = Q2_0G128::BYTES;
const BLOCK_BYTES: usize = Q2_0G128::BLOCK_BYTES;

/// `out[i] = Σ_j w[i, j] · x[j]` for whole rows of whole spans, a multiple of [`ROWS`] of them: codes less one times the
/// scale of their block.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vnni")]
pub(super) fn gemv(rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
    let n_spans = row_bytes / BYTES;
    assert!(row_bytes.is_multiple_of(BYTES) && out.len().is_multiple_of(ROWS));
    assert!(rows.len() == row_bytes * out.len());
    assert!(x.q.len() >= n_spans * SPAN);
    assert!(x.scales.len() >= n_spans * GROUPS && x.sums.len() >= n_spans * 2 * GROUPS);
    let mut q = vec![0; n_spans * SPAN];
    for (span, out) in x.q.as_chunks().0.iter().zip(q.as_chunks_mut().0) {
        arrange(span, out);
    }
    let x = QuantizedRow { q: &q, ..x };
    let tile = ROWS * row_bytes;
    for (rows, out) in rows.chunks_exact(tile).zip(out.as_chunks_mut::<ROWS>().0) {
        let mut acc = _mm512_setzero_ps();
        for s in 0..n_spans {
            // As many bytes as are multiplied, of the tile after the next.
            let ahead = rows.as_ptr().wrapping_add(2 * tile + s * ROWS * BYTES);
            prefetch::lines(prefetch::Level::Second, ahead, ROWS * BYTES);
            // SAFETY: every row has `n_spans` spans, and so have the activations.
            acc = unsafe { add_span(acc, rows.as_ptr().add(s * BYTES), row_bytes, x, s) };
        }
        // SAFETY: they are as long as a register.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), acc) };
    }
}

/// Puts a span of activations in the order of codes: every fourth of both blocks, from each of the first four on.
#[target_feature(enable = "avx2")]
fn arrange(q: &[i8; SPAN], out: &mut [i8; SPAN]) {
    let mut blocks = [0; SPAN];
    // SAFETY: compiled for AVX2.
    unsafe { arrange_crumbs(q, &mut blocks) };
    for (i, run) in blocks.chunks_exact(32).enumerate() {
        out[i % 4 * 64 + i / 4 * 32..][..32].copy_from_slice(run);
    }
}

/// Adds the groups of span `s`, one after the other, in rows of `row_bytes`, of which the first has the span at `first`.
///
/// # Safety
/// There is such a span in each of [`ROWS`] rows, and of activations, in the order of [`arrange`].
#[inline]
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vnni")]
unsafe fn add_span(
    acc: __m512,
    first: *const u8,
    row_bytes: usize,
    x: QuantizedRow<'_>,
    s: usize,
) -> __m512 {
    // SAFETY: the caller's promise. Scales are read with the two bytes of codes after them.
    unsafe {
        let q: [__m512i; 4] =
            std::array::from_fn(|i| _mm512_loadu_si512(x.q.as_ptr().add(s * SPAN + i * 64).cast()));
        // Codes are too large by one: sums begin with what is too much.
        let sums = _mm256_loadu_si256(x.sums.as_ptr().add(s * GROUPS * 2).cast());
        let excess = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepi16_epi32(sums));
        let mut dots = [_mm512_setzero_si512(); ROWS];
        let mut scales = [_mm512_setzero_si512(); 2];
        for (r, dots) in dots.iter_mut().enumerate() {
            let span = first.add(r * row_bytes);
            let codes = |block: usize| _mm256_loadu_si256(span.add(block * BLOCK_BYTES + 2).cast());
            let bytes = _mm512_inserti64x4::<1>(_mm512_castsi256_si512(codes(0)), codes(1));
            *dots = dot(excess, bytes, q);
            for (block, scales) in scales.iter_mut().enumerate() {
                let scale = span.add(block * BLOCK_BYTES).cast::<i32>();
                *scales = _mm512_mask_set1_epi32(*scales, 1 << r, scale.read_unaligned());
            }
        }
        // The lower halves.
        let scales = scales.map(|scales| _mm512_cvtph_ps(_mm512_cvtepi32_epi16(scales)));
        let mut acc = acc;
        for (g, sums) in groups(dots).into_iter().enumerate() {
            let step = _mm512_set1_ps(*x.scales.as_ptr().add(s * GROUPS + g));
            let scale = _mm512_mul_ps(scales[g / 4], step);
            acc = _mm512_add_ps(acc, _mm512_mul_ps(_mm512_cvtepi32_ps(sums), scale));
        }
        acc
    }
}

/// `begin` and sums of the codes of eight bytes times activations, in pairs of lanes: the halves of eight groups. Each is
/// at most 16 · 3 · 127 in magnitude.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vnni")]
fn dot(begin: __m512i, bytes: __m512i, q: [__m512i; 4]) -> __m512i {
    // Codes at bits 2 are masked where they are: they are four times as large, and so are their sums.
    let (first, second) = (_mm512_set1_epi8(3), _mm512_set1_epi8(12));
    let high = _mm512_srli_epi16::<4>(bytes);
    let even = _mm512_dpbusd_epi32(begin, _mm512_and_si512(bytes, first), q[0]);
    let even = _mm512_dpbusd_epi32(even, _mm512_and_si512(high, first), q[2]);
    let zero = _mm512_setzero_si512();
    let odd = _mm512_dpbusd_epi32(zero, _mm512_and_si512(bytes, second), q[1]);
    let odd = _mm512_dpbusd_epi32(odd, _mm512_and_si512(high, second), q[3]);
    _mm512_add_epi32(even, _mm512_srai_epi32::<2>(odd))
}

/// From the halves of the eight groups of each row: each group, of all rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn groups(dots: [__m512i; ROWS]) -> [__m512i; GROUPS] {
    let floats = _mm512_castsi512_ps;
    let even = |a, b| _mm512_castps_si512(_mm512_shuffle_ps::<0b10_00_10_00>(floats(a), floats(b)));
    let odd = |a, b| _mm512_castps_si512(_mm512_shuffle_ps::<0b11_01_11_01>(floats(a), floats(b)));
    // Halves fit i16. In each quarter of a register two groups, of two rows; then one group of four rows.
    let ones = _mm512_set1_epi16(1);
    let pairs: [__m512i; 8] = std::array::from_fn(|i| {
        _mm512_madd_epi16(_mm512_packs_epi32(dots[2 * i], dots[2 * i + 1]), ones)
    });
    let mut all = [_mm512_setzero_si512(); GROUPS];
    for is_odd in 0..2 {
        let [a, b, c, d]: [__m512i; 4] = std::array::from_fn(|i| match is_odd {
            0 => even(pairs[2 * i], pairs[2 * i + 1]),
            _ => odd(pairs[2 * i], pairs[2 * i + 1]),
        });
        // Quarters of the same group together: those of the first two, and of the others.
        let low = [
            _mm512_shuffle_i32x4::<0b01_00_01_00>(a, b),
            _mm512_shuffle_i32x4::<0b01_00_01_00>(c, d),
        ];
        let high = [
            _mm512_shuffle_i32x4::<0b11_10_11_10>(a, b),
            _mm512_shuffle_i32x4::<0b11_10_11_10>(c, d),
        ];
        all[is_odd] = _mm512_shuffle_i32x4::<0b10_00_10_00>(low[0], low[1]);
        all[2 + is_odd] = _mm512_shuffle_i32x4::<0b11_01_11_01>(low[0], low[1]);
        all[4 + is_odd] = _mm512_shuffle_i32x4::<0b10_00_10_00>(high[0], high[1]);
        all[6 + is_odd] = _mm512_shuffle_i32x4::<0b11_01_11_01>(high[0], high[1]);
    }
    all
}
