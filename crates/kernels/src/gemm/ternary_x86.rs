//! The ternary dot products with AVX2, AVX-VNNI and AVX-512 VNNI.
//!
//! A tile is some rows of weights by some of activations. Each 32 bytes of a row are unpacked into their four
//! groups of codes once for all rows of activations, and each 32 activations are loaded once for all rows of
//! weights.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::x86_64::*;

use super::prefetch;
use super::ternary::{Packed, TILE};
use crate::quant::ternary::{BLOCK, BLOCK_BYTES};

/// Defines a kernel (see the type of kernels in [`super::ternary`]) from its tile for four rows and
/// one of activations, and that for two rows and several.
macro_rules! kernel {
    ($(#[$meta:meta])* $name:ident, $features:literal, $tile:ident) => {
        $(#[$meta])*
        pub(super) unsafe fn $name<P: Packed>(
            rows: &[&[u8]; TILE],
            q: &[&[i8]],
            sums: &mut [[i32; TILE]; TILE],
        ) {
            #[target_feature(enable = $features)]
            unsafe fn halves<P: Packed, const T: usize>(
                rows: [*const u8; TILE],
                q: [*const i8; T],
                n_blocks: usize,
                sums: &mut [[i32; TILE]; TILE],
            ) {
                let [a, b, c, d] = rows;
                // SAFETY: the caller's promise, which is that of this function.
                let (ab, cd) = unsafe {
                    ($tile::<P, 2, T>([a, b], q, n_blocks), $tile::<P, 2, T>([c, d], q, n_blocks))
                };
                for t in 0..T {
                    sums[t] = [ab[t][0], ab[t][1], cd[t][0], cd[t][1]];
                }
            }

            let n_blocks = n_blocks::<P>(rows, q);
            let rows = rows.map(<[u8]>::as_ptr);
            // SAFETY: the instructions by the caller's promise; `n_blocks` saw that many blocks in
            // every row.
            unsafe {
                match *q {
                    [] => {}
                    [a] => [sums[0]] = $tile::<P, 4, 1>(rows, [a.as_ptr()], n_blocks),
                    [a, b] => halves::<P, 2>(rows, [a, b].map(<[i8]>::as_ptr), n_blocks, sums),
                    [a, b, c] => {
                        halves::<P, 3>(rows, [a, b, c].map(<[i8]>::as_ptr), n_blocks, sums);
                    }
                    [a, b, c, d, ..] => {
                        halves::<P, 4>(rows, [a, b, c, d].map(<[i8]>::as_ptr), n_blocks, sums);
                    }
                }
            }
        }
    };
}

kernel! {
    /// With AVX2.
    ///
    /// # Safety
    /// The machine has AVX2.
    dots_avx2, "avx2", tile_avx2
}

kernel! {
    /// With AVX-VNNI.
    ///
    /// # Safety
    /// The machine has AVX2 and AVX-VNNI.
    dots_avxvnni, "avx2,avxvnni", tile_avxvnni
}

kernel! {
    /// With AVX-512 VNNI.
    ///
    /// # Safety
    /// The machine has AVX2, AVX-512 F, BW and VNNI.
    dots_avx512, "avx2,avx512f,avx512bw,avx512vnni", tile_avx512
}

/// Blocks of a row. Panics if rows differ in theirs, or are not whole blocks.
fn n_blocks<P: Packed>(rows: &[&[u8]; TILE], q: &[&[i8]]) -> usize {
    let n_blocks = blocks_of::<P>(rows[0].len());
    assert!(rows.iter().all(|row| row.len() == rows[0].len()));
    assert!(q.iter().all(|q| q.len() == n_blocks * BLOCK));
    n_blocks
}

/// Blocks of a row of so many bytes.
#[inline(always)]
fn blocks_of<P: Packed>(row_bytes: usize) -> usize {
    row_bytes / P::PAIR_STRIDE * 2 + row_bytes % P::PAIR_STRIDE / BLOCK_BYTES
}

/// How far the bits of group `g` are shifted, in steps of two.
#[inline(always)]
fn steps<P: Packed>(g: usize) -> usize {
    if P::LOWEST_FIRST { g } else { 3 - g }
}

/// Blocks whose products are summed in 16 bits: each adds from 4 · 2 · 2 · -128 = -2,048 to 2,032,
/// and 16 · -2,048 is the least that 16 bits hold.
const NARROW: usize = 16;

/// Prefetches the position of `block` in the next tile.
#[inline(always)]
fn prefetch<P: Packed, const R: usize>(rows: [*const u8; R], n_blocks: usize, block: usize) {
    let tile = TILE * P::offset(n_blocks);
    let next = rows[0].wrapping_add(tile + R * P::offset(block));
    prefetch::lines(prefetch::Level::First, next, R * P::PAIR_STRIDE / 2);
}

/// `[t][r] = Σ_j code[r][j] · q[t][j]`.
///
/// # Safety
/// The machine has AVX2; there are `n_blocks` blocks behind each pointer.
#[target_feature(enable = "avx2")]
unsafe fn tile_avx2<P: Packed, const R: usize, const T: usize>(
    rows: [*const u8; R],
    q: [*const i8; T],
    n_blocks: usize,
) -> [[i32; R]; T] {
    let ones = _mm256_set1_epi16(1);
    let mut wide = [[_mm256_setzero_si256(); R]; T];
    let mut block = 0;
    while block < n_blocks {
        let end = n_blocks.min(block + NARROW);
        let mut narrow = [[_mm256_setzero_si256(); R]; T];
        while block < end {
            prefetch::<P, R>(rows, n_blocks, block);
            // SAFETY: `block < n_blocks`, so 32 bytes are there.
            let packed =
                rows.map(|row| unsafe { _mm256_loadu_si256(row.add(P::offset(block)).cast()) });
            for g in 0..4 {
                let at = block * BLOCK + g * BLOCK_BYTES;
                // SAFETY: a row has 128 activations for each block.
                let acts = q.map(|q| unsafe { _mm256_loadu_si256(q.add(at).cast()) });
                for r in 0..R {
                    let codes = group_256(packed[r], steps::<P>(g));
                    for t in 0..T {
                        let products = _mm256_maddubs_epi16(codes, acts[t]);
                        narrow[t][r] = _mm256_add_epi16(narrow[t][r], products);
                    }
                }
            }
            block += 1;
        }
        for t in 0..T {
            for r in 0..R {
                let sums = _mm256_madd_epi16(narrow[t][r], ones);
                wide[t][r] = _mm256_add_epi32(wide[t][r], sums);
            }
        }
    }
    wide.map(|row| row.map(|v| sum_256(v)))
}

/// `[t][r] = Σ_j code[r][j] · q[t][j]`. Groups of codes take turns with two sums: a product takes several cycles until
/// the next can be added to it.
///
/// # Safety
/// The machine has AVX2 and AVX-VNNI; there are `n_blocks` blocks behind each pointer.
#[target_feature(enable = "avx2,avxvnni")]
unsafe fn tile_avxvnni<P: Packed, const R: usize, const T: usize>(
    rows: [*const u8; R],
    q: [*const i8; T],
    n_blocks: usize,
) -> [[i32; R]; T] {
    let mut sums = [[[_mm256_setzero_si256(); 2]; R]; T];
    for block in 0..n_blocks {
        prefetch::<P, R>(rows, n_blocks, block);
        // SAFETY: `block < n_blocks`, so 32 bytes are there.
        let packed =
            rows.map(|row| unsafe { _mm256_loadu_si256(row.add(P::offset(block)).cast()) });
        for g in 0..4 {
            let at = block * BLOCK + g * BLOCK_BYTES;
            // SAFETY: a row has 128 activations for each block.
            let acts = q.map(|q| unsafe { _mm256_loadu_si256(q.add(at).cast()) });
            for r in 0..R {
                let codes = group_256(packed[r], steps::<P>(g));
                for t in 0..T {
                    let sum = &mut sums[t][r][g % 2];
                    *sum = _mm256_dpbusd_avx_epi32(*sum, codes, acts[t]);
                }
            }
        }
    }
    sums.map(|row| row.map(|[a, b]| sum_256(_mm256_add_epi32(a, b))))
}

/// `[t][r] = Σ_j code[r][j] · q[t][j]`; `R` is even.
///
/// A register has one block of two rows each, so that activations are loaded into both halves at
/// once, in their order, and any number of blocks comes out even.
///
/// # Safety
/// The machine has AVX2, AVX-512 F, BW and VNNI; there are `n_blocks` blocks behind each pointer.
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vnni")]
unsafe fn tile_avx512<P: Packed, const R: usize, const T: usize>(
    rows: [*const u8; R],
    q: [*const i8; T],
    n_blocks: usize,
) -> [[i32; R]; T] {
    // Half of them are used; `[_; R / 2]` can't be written. Groups take turns with two sums.
    let mut sums = [[[_mm512_setzero_si512(); 2]; R]; T];
    let mut packed = [_mm512_setzero_si512(); R];
    for block in 0..n_blocks {
        prefetch::<P, R>(rows, n_blocks, block);
        for pair in 0..R / 2 {
            // SAFETY: `block < n_blocks`, so 32 bytes are there.
            let half =
                |r: usize| unsafe { _mm256_loadu_si256(rows[r].add(P::offset(block)).cast()) };
            let low = _mm512_castsi256_si512(half(2 * pair));
            packed[pair] = _mm512_inserti64x4::<1>(low, half(2 * pair + 1));
        }
        for g in 0..4 {
            let at = block * BLOCK + g * BLOCK_BYTES;
            let acts = q.map(|q| {
                // SAFETY: a row has 128 activations for each block.
                _mm512_broadcast_i64x4(unsafe { _mm256_loadu_si256(q.add(at).cast()) })
            });
            for pair in 0..R / 2 {
                let codes = group_512(packed[pair], steps::<P>(g));
                for t in 0..T {
                    let sum = &mut sums[t][pair][g % 2];
                    *sum = _mm512_dpbusd_epi32(*sum, codes, acts[t]);
                }
            }
        }
    }
    sums.map(|pairs| {
        std::array::from_fn(|r| {
            let [a, b] = pairs[r / 2];
            let pair = _mm512_add_epi32(a, b);
            sum_256(if r % 2 == 0 {
                _mm512_castsi512_si256(pair)
            } else {
                _mm512_extracti64x4_epi64::<1>(pair)
            })
        })
    })
}

/// Two bits of every byte, those `steps` times two from the lowest.
#[inline]
#[target_feature(enable = "avx2")]
fn group_256(packed: __m256i, steps: usize) -> __m256i {
    let shifted = match steps {
        0 => packed,
        1 => _mm256_srli_epi16::<2>(packed),
        2 => _mm256_srli_epi16::<4>(packed),
        _ => _mm256_srli_epi16::<6>(packed),
    };
    _mm256_and_si256(shifted, _mm256_set1_epi8(3))
}

/// Two bits of every byte, those `steps` times two from the lowest.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn group_512(packed: __m512i, steps: usize) -> __m512i {
    let shifted = match steps {
        0 => packed,
        1 => _mm512_srli_epi16::<2>(packed),
        2 => _mm512_srli_epi16::<4>(packed),
        _ => _mm512_srli_epi16::<6>(packed),
    };
    _mm512_and_si512(shifted, _mm512_set1_epi8(3))
}

/// The sum of eight lanes.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_256(v: __m256i) -> i32 {
    let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
    let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
    let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v));
    _mm_cvtsi128_si32(v)
}
