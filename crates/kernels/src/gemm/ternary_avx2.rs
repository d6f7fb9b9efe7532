//! The ternary dot product with AVX2.

use std::arch::x86_64::*;

use crate::quant::ternary::{BLOCK, BLOCK_BYTES};

/// Sums of codes (0 to 2) times activations.
///
/// Shapes: `codes` is `[k / 4]`, `q` is `[sums.len(), k]`, `k` a multiple of 128, at most four rows.
///
/// # Safety
/// The machine has AVX2.
pub(super) unsafe fn dot(codes: &[u8], q: &[i8], sums: &mut [i32]) {
    let k = codes.len() * 4;
    assert!(codes.len().is_multiple_of(BLOCK_BYTES) && q.len() == k * sums.len());
    // SAFETY: AVX2 by the caller's promise; lengths are checked above.
    unsafe {
        match sums {
            [a] => [*a] = dot_rows([q], codes),
            [a, b] => [*a, *b] = dot_rows([&q[..k], &q[k..]], codes),
            [a, b, c] => [*a, *b, *c] = dot_rows([&q[..k], &q[k..2 * k], &q[2 * k..]], codes),
            [a, b, c, d] => {
                [*a, *b, *c, *d] = dot_rows(
                    [&q[..k], &q[k..2 * k], &q[2 * k..3 * k], &q[3 * k..]],
                    codes,
                );
            }
            _ => assert!(sums.is_empty(), "at most four rows at a time"),
        }
    }
}

/// Blocks whose products are summed in 16 bits: each adds at most 4 · 2 · 2 · 128 = 2,048 in
/// magnitude, and 15 · 2,048 is below 32,768.
const NARROW: usize = 15;

/// # Safety
/// The machine has AVX2; each of `q` has 4 × `codes.len()` elements, `codes` whole blocks.
#[target_feature(enable = "avx2")]
unsafe fn dot_rows<const T: usize>(q: [&[i8]; T], codes: &[u8]) -> [i32; T] {
    let three = _mm256_set1_epi8(3);
    let ones = _mm256_set1_epi16(1);
    let mut wide = [_mm256_setzero_si256(); T];
    let n_blocks = codes.len() / BLOCK_BYTES;
    let mut block = 0;
    while block < n_blocks {
        let end = n_blocks.min(block + NARROW);
        let mut narrow = [_mm256_setzero_si256(); T];
        while block < end {
            // SAFETY: `block < n_blocks`, so 32 bytes are there.
            let packed =
                unsafe { _mm256_loadu_si256(codes.as_ptr().add(block * BLOCK_BYTES).cast()) };
            let groups = [
                _mm256_and_si256(_mm256_srli_epi16::<6>(packed), three),
                _mm256_and_si256(_mm256_srli_epi16::<4>(packed), three),
                _mm256_and_si256(_mm256_srli_epi16::<2>(packed), three),
                _mm256_and_si256(packed, three),
            ];
            for t in 0..T {
                for (g, &codes) in groups.iter().enumerate() {
                    let at = block * BLOCK + g * BLOCK_BYTES;
                    // SAFETY: the row has 128 elements for each block.
                    let acts = unsafe { _mm256_loadu_si256(q[t].as_ptr().add(at).cast()) };
                    narrow[t] = _mm256_add_epi16(narrow[t], _mm256_maddubs_epi16(codes, acts));
                }
            }
            block += 1;
        }
        for t in 0..T {
            wide[t] = _mm256_add_epi32(wide[t], _mm256_madd_epi16(narrow[t], ones));
        }
    }
    wide.map(|v| {
        let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
        let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
        _mm_cvtsi128_si32(v)
    })
}
