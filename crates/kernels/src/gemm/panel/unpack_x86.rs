//! From stored rows to panels with AVX2.
//!
//! Stored bytes are transposed first, four of a row at a time, and then unpacked into codes: that takes a
//! half or a quarter of the shuffles. What a block has only once is gathered from all rows, and unpacked in
//! lanes, too.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;
use std::ops::Range;

use sterna_format::DType;

use super::unpack::block;
use super::{Lanes, Panel, ROWS};
use crate::gemm::ternary::Packed;
use crate::quant::ternary::BLOCK;

/// The same four bytes of sixteen rows.
type Quad = [__m256i; 2];

/// Writes the codes of `columns` of packed rows into a panel.
#[target_feature(enable = "avx2")]
pub(super) fn ternary<P: Packed>(rows: &Lanes<&[u8]>, columns: Range<usize>, panel: &mut Panel) {
    let blocks = columns.start / BLOCK..columns.end / BLOCK;
    for (i, b) in blocks.enumerate() {
        let mut codes = [&[0; 32]; ROWS];
        for (codes, row) in codes.iter_mut().zip(rows) {
            *codes = block::<P>(row, b);
        }
        for (quad, packed) in transpose_32(codes).into_iter().enumerate() {
            let at = i * (BLOCK / 4) + quad;
            let first = if P::LOWEST_FIRST { 0 } else { 3 };
            let step = |g: usize| if P::LOWEST_FIRST { g } else { first - g };
            panel.set(at + 8 * step(0), mask::<3>(packed));
            panel.set(at + 8 * step(1), mask::<3>(shift::<2>(packed)));
            panel.set(at + 8 * step(2), mask::<3>(shift::<4>(packed)));
            panel.set(at + 8 * step(3), mask::<3>(shift::<6>(packed)));
        }
    }
}

/// Writes one block of 256, or up to eight groups of 32, into a panel; `false` if there is no code
/// for `dtype`.
///
/// Shapes: rows of nothing but the block or groups.
#[target_feature(enable = "avx2,f16c")]
pub(super) fn blocks(dtype: DType, rows: &Lanes<&[u8]>, panel: &mut Panel) -> bool {
    match dtype {
        DType::Q4_K => q4_k(rows, panel),
        DType::Q5_K => q5_k(rows, panel),
        DType::Q6_K => q6_k(rows, panel),
        DType::Q8_0 => q8_0(rows, panel),
        DType::Q4_0 => q4_0(rows, panel),
        _ => return false,
    }
    true
}

/// See `quant::q4_k` for the layout.
#[target_feature(enable = "avx2,f16c")]
fn q4_k(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    let rows = sized::<144>(rows);
    k_header(&rows, panel);
    for chunk in 0..4 {
        let packed = transpose_32(parts(&rows, 16 + 32 * chunk));
        for (i, packed) in packed.into_iter().enumerate() {
            panel.set(chunk * 16 + i, mask::<15>(packed));
            panel.set(chunk * 16 + 8 + i, mask::<15>(shift::<4>(packed)));
        }
    }
}

/// See `quant::q5_k` for the layout.
#[target_feature(enable = "avx2,f16c")]
fn q5_k(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    let rows = sized::<176>(rows);
    k_header(&rows, panel);
    let mut high = transpose_32(parts(&rows, 16));
    for chunk in 0..4 {
        let packed = transpose_32(parts(&rows, 48 + 32 * chunk));
        for (i, (packed, high)) in packed.into_iter().zip(&mut high).enumerate() {
            let fifth = shift_left::<4>(mask::<1>(*high));
            panel.set(chunk * 16 + i, or(mask::<15>(packed), fifth));
            let fifth = shift_left::<3>(mask::<2>(*high));
            panel.set(
                chunk * 16 + 8 + i,
                or(mask::<15>(shift::<4>(packed)), fifth),
            );
            // Bits shifted in from a neighbour are masked above, because they come from higher bits.
            *high = shift::<2>(*high);
        }
    }
}

/// See `quant::q6_k` for the layout.
#[target_feature(enable = "avx2,f16c")]
fn q6_k(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    let rows = sized::<210>(rows);
    for half in 0..2 {
        let first = transpose_32(parts(&rows, 64 * half));
        let second = transpose_32(parts(&rows, 64 * half + 32));
        let high = transpose_32(parts(&rows, 128 + 32 * half));
        for i in 0..8 {
            let at = half * 32 + i;
            let (a, b, h) = (first[i], second[i], high[i]);
            let top = shift_left::<4>(mask::<3>(h));
            panel.set(at, or(mask::<15>(a), top));
            let top = shift_left::<2>(mask::<12>(h));
            panel.set(at + 8, or(mask::<15>(b), top));
            panel.set(at + 16, or(mask::<15>(shift::<4>(a)), mask::<48>(h)));
            let top = mask::<48>(shift::<2>(h));
            panel.set(at + 24, or(mask::<15>(shift::<4>(b)), top));
        }
    }
    for quad in 0..4 {
        let packed = dwords(&rows, 192 + 4 * quad);
        for r in 0..ROWS {
            let scales = packed[r].to_le_bytes().map(|s| s as i8);
            for (i, scale) in scales.into_iter().enumerate() {
                panel.scales[4 * quad + i][r] = i32::from(scale);
            }
            for pair in 0..2 {
                panel.offsets[2 * quad + pair][r] =
                    [i16::from(scales[2 * pair]), i16::from(scales[2 * pair + 1])];
            }
        }
    }
    panel.d[0] = halves(&rows, 208);
}

/// See `quant::q8_0` for the layout.
#[target_feature(enable = "avx2,f16c")]
fn q8_0(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    for group in 0..rows[0].len() / 34 {
        let rows = nth::<34>(rows, group);
        panel.d[group] = halves(&rows, 0);
        for (i, packed) in transpose_32(parts(&rows, 2)).into_iter().enumerate() {
            panel.set(group * 8 + i, flip(packed));
        }
    }
}

/// See `quant::q4` for the layout.
#[target_feature(enable = "avx2,f16c")]
fn q4_0(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    for group in 0..rows[0].len() / 18 {
        let rows = nth::<18>(rows, group);
        panel.d[group] = halves(&rows, 0);
        // The second half of what is transposed is unused.
        let mut codes = [[0; 32]; ROWS];
        for (codes, row) in codes.iter_mut().zip(rows) {
            codes[..16].copy_from_slice(&row[2..]);
        }
        let packed = transpose_32(codes.each_ref());
        for (i, packed) in packed.into_iter().take(4).enumerate() {
            panel.set(group * 8 + i, mask::<15>(packed));
            panel.set(group * 8 + 4 + i, mask::<15>(shift::<4>(packed)));
        }
    }
}

/// The header of Q4_K and Q5_K; see `quant::q4_k` for the layout.
#[target_feature(enable = "avx2,f16c")]
fn k_header<const B: usize>(rows: &Lanes<&[u8; B]>, panel: &mut Panel) {
    panel.d[0] = halves(rows, 0);
    panel.dmin = halves(rows, 2);
    let (a, b, c) = (dwords(rows, 4), dwords(rows, 8), dwords(rows, 12));
    for j in 0..4 {
        // Kernels read the first of each two scales, the second being the same.
        for r in 0..ROWS {
            panel.scales[2 * j][r] = (a[r] >> (8 * j) & 63) as i32;
        }
        for r in 0..ROWS {
            let top = a[r] >> (8 * j + 6) & 3;
            panel.scales[8 + 2 * j][r] = (c[r] >> (8 * j) & 15 | top << 4) as i32;
        }
        for r in 0..ROWS {
            panel.offsets[j][r] = [(b[r] >> (8 * j) & 63) as i16; 2];
        }
        for r in 0..ROWS {
            let top = b[r] >> (8 * j + 6) & 3;
            panel.offsets[4 + j][r] = [(c[r] >> (8 * j + 4) & 15 | top << 4) as i16; 2];
        }
    }
}

impl Panel {
    /// Sets four columns.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn set(&mut self, quad: usize, codes: Quad) {
        let to = self.codes[quad].as_flattened_mut().as_chunks_mut::<32>().0;
        for (to, codes) in to.iter_mut().zip(codes) {
            // SAFETY: 32 bytes of an array.
            unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast(), codes) };
        }
    }
}

/// Rows of one block. Panics if they are shorter.
#[inline]
fn sized<'a, const B: usize>(rows: &Lanes<&'a [u8]>) -> Lanes<&'a [u8; B]> {
    nth(rows, 0)
}

/// The `i`th block of rows. Panics if there is none.
#[inline]
fn nth<'a, const B: usize>(rows: &Lanes<&'a [u8]>, i: usize) -> Lanes<&'a [u8; B]> {
    let mut blocks = [&[0; B]; ROWS];
    for (block, row) in blocks.iter_mut().zip(rows) {
        *block = &row.as_chunks().0[i];
    }
    blocks
}

/// 32 bytes of each row. Panics if there are fewer from `at` on.
#[inline(always)]
fn parts<'a, const B: usize>(rows: &Lanes<&'a [u8; B]>, at: usize) -> Lanes<&'a [u8; 32]> {
    let mut parts = [&[0; 32]; ROWS];
    for (part, row) in parts.iter_mut().zip(rows) {
        *part = row[at..].first_chunk().expect("blocks are longer");
    }
    parts
}

/// Four bytes of each row.
#[inline(always)]
fn dwords<const B: usize>(rows: &Lanes<&[u8; B]>, at: usize) -> Lanes<u32> {
    let mut dwords = [0; ROWS];
    for (dword, row) in dwords.iter_mut().zip(rows) {
        *dword = u32::from_le_bytes(*row[at..].first_chunk().expect("blocks are longer"));
    }
    dwords
}

/// An f16 of each row.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn halves<const B: usize>(rows: &Lanes<&[u8; B]>, at: usize) -> Lanes<f32> {
    let mut bits = [0u16; ROWS];
    for (bits, row) in bits.iter_mut().zip(rows) {
        *bits = u16::from_le_bytes([row[at], row[at + 1]]);
    }
    let mut floats = [0.0f32; ROWS];
    for (floats, bits) in floats
        .as_chunks_mut::<8>()
        .0
        .iter_mut()
        .zip(bits.as_chunks::<8>().0)
    {
        // SAFETY: 16 and 32 bytes of arrays.
        unsafe {
            let wide = _mm256_cvtph_ps(_mm_loadu_si128(bits.as_ptr().cast()));
            _mm256_storeu_ps(floats.as_mut_ptr(), wide);
        }
    }
    floats
}

#[inline]
#[target_feature(enable = "avx2")]
fn mask<const MASK: i8>(v: Quad) -> Quad {
    let mask = _mm256_set1_epi8(MASK);
    [_mm256_and_si256(v[0], mask), _mm256_and_si256(v[1], mask)]
}

/// To the right, across byte boundaries.
#[inline]
#[target_feature(enable = "avx2")]
fn shift<const N: i32>(v: Quad) -> Quad {
    [_mm256_srli_epi16::<N>(v[0]), _mm256_srli_epi16::<N>(v[1])]
}

/// To the left, across byte boundaries.
#[inline]
#[target_feature(enable = "avx2")]
fn shift_left<const N: i32>(v: Quad) -> Quad {
    [_mm256_slli_epi16::<N>(v[0]), _mm256_slli_epi16::<N>(v[1])]
}

#[inline]
#[target_feature(enable = "avx2")]
fn or(a: Quad, b: Quad) -> Quad {
    [_mm256_or_si256(a[0], b[0]), _mm256_or_si256(a[1], b[1])]
}

/// Adds 128 to every byte.
#[inline]
#[target_feature(enable = "avx2")]
fn flip(v: Quad) -> Quad {
    let top = _mm256_set1_epi8(-128);
    [_mm256_xor_si256(v[0], top), _mm256_xor_si256(v[1], top)]
}

/// 32 bytes of each row as eight times four bytes of all.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_32(rows: Lanes<&[u8; 32]>) -> [Quad; 8] {
    let mut loaded = [[_mm256_setzero_si256(); 8]; 2];
    for (to, row) in loaded.as_flattened_mut().iter_mut().zip(rows) {
        // SAFETY: 32 bytes of an array.
        *to = unsafe { _mm256_loadu_si256(row.as_ptr().cast()) };
    }
    let (a, b) = (transpose(loaded[0]), transpose(loaded[1]));
    let mut quads = [[_mm256_setzero_si256(); 2]; 8];
    for (quad, (a, b)) in quads.iter_mut().zip(a.into_iter().zip(b)) {
        *quad = [a, b];
    }
    quads
}

/// Turns 8 rows of 8 lanes into 8 columns.
#[inline]
#[target_feature(enable = "avx2")]
fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    let [a, b, c, d, e, f, g, h] = rows;
    // Lanes of two rows, of four, and of all eight; within halves of registers up to the last.
    macro_rules! fours {
        ($a:ident $b:ident $c:ident $d:ident) => {{
            let ab = [_mm256_unpacklo_epi32($a, $b), _mm256_unpackhi_epi32($a, $b)];
            let cd = [_mm256_unpacklo_epi32($c, $d), _mm256_unpackhi_epi32($c, $d)];
            [
                _mm256_unpacklo_epi64(ab[0], cd[0]),
                _mm256_unpackhi_epi64(ab[0], cd[0]),
                _mm256_unpacklo_epi64(ab[1], cd[1]),
                _mm256_unpackhi_epi64(ab[1], cd[1]),
            ]
        }};
    }
    let low = fours!(a b c d);
    let high = fours!(e f g h);
    [
        _mm256_permute2x128_si256::<0x20>(low[0], high[0]),
        _mm256_permute2x128_si256::<0x20>(low[1], high[1]),
        _mm256_permute2x128_si256::<0x20>(low[2], high[2]),
        _mm256_permute2x128_si256::<0x20>(low[3], high[3]),
        _mm256_permute2x128_si256::<0x31>(low[0], high[0]),
        _mm256_permute2x128_si256::<0x31>(low[1], high[1]),
        _mm256_permute2x128_si256::<0x31>(low[2], high[2]),
        _mm256_permute2x128_si256::<0x31>(low[3], high[3]),
    ]
}
