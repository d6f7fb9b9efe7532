//! Ternary dot products with NEON: its baseline, dot products of bytes, and products of byte matrices.

use std::arch::aarch64::*;

use super::prefetch;
use super::ternary::{Packed, TILE};
use crate::arm::{sdot, smmla};
use crate::quant::ternary::{BLOCK, BLOCK_BYTES};

/// Blocks that the rows have, when all lengths fit.
///
/// Panics if they don't.
fn n_blocks<P: Packed>(rows: &[&[u8]; TILE], q: &[&[i8]]) -> usize {
    let n_blocks = q.first().map_or(0, |q| q.len() / BLOCK);
    assert!(q.len() <= TILE && q.iter().all(|q| q.len() == n_blocks * BLOCK));
    let end = n_blocks
        .checked_sub(1)
        .map_or(0, |last| P::offset(last) + BLOCK_BYTES);
    assert!(rows.iter().all(|row| row.len() >= end));
    n_blocks
}

/// # Safety
/// 16 bytes are at `p`.
#[inline(always)]
unsafe fn load(p: *const u8) -> uint8x16_t {
    // SAFETY: the caller's promise; alignment doesn't matter.
    unsafe { vld1q_u8(p) }
}

/// # Safety
/// 16 bytes are at `p`.
#[inline(always)]
unsafe fn load_q(p: *const i8) -> int8x16_t {
    // SAFETY: the caller's promise; alignment doesn't matter.
    unsafe { vld1q_s8(p) }
}

/// The codes of 64 elements in the order of their groups.
#[inline(always)]
fn groups<P: Packed>(packed: uint8x16_t) -> [int8x16_t; 4] {
    // SAFETY: every machine of this target has NEON.
    let fields = unsafe {
        let three = vdupq_n_u8(3);
        [
            vandq_u8(packed, three),
            vandq_u8(vshrq_n_u8::<2>(packed), three),
            vandq_u8(vshrq_n_u8::<4>(packed), three),
            vshrq_n_u8::<6>(packed),
        ]
        .map(|field| vreinterpretq_s8_u8(field))
    };
    let [a, b, c, d] = fields;
    if P::LOWEST_FIRST {
        [a, b, c, d]
    } else {
        [d, c, b, a]
    }
}

/// Calls the kernel for as many rows of activations as there are.
macro_rules! by_rows_of_activations {
    ($kernel:ident, $rows:ident, $q:ident, $n_blocks:ident, $sums:ident) => {
        match *$q {
            [a] => $kernel::<P, 1>($rows, [a], $n_blocks, $sums),
            [a, b] => $kernel::<P, 2>($rows, [a, b], $n_blocks, $sums),
            [a, b, c] => $kernel::<P, 3>($rows, [a, b, c], $n_blocks, $sums),
            [a, b, c, d] => $kernel::<P, 4>($rows, [a, b, c, d], $n_blocks, $sums),
            _ => {}
        }
    };
}

/// [`super::ternary::Dots`] with the baseline of 64-bit Arm.
///
/// # Safety
/// None is needed: every machine of this target has NEON.
pub(super) unsafe fn dots<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[&[i8]],
    sums: &mut [[i32; TILE]; TILE],
) {
    let n_blocks = n_blocks::<P>(rows, q);
    // SAFETY: lengths were checked.
    unsafe { by_rows_of_activations!(widening, rows, q, n_blocks, sums) }
}

/// [`super::ternary::Dots`] with dot products of bytes.
///
/// # Safety
/// The machine has the feature `dotprod`.
pub(super) unsafe fn dots_dot<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[&[i8]],
    sums: &mut [[i32; TILE]; TILE],
) {
    let n_blocks = n_blocks::<P>(rows, q);
    // SAFETY: the feature by the caller's promise; lengths were checked.
    unsafe {
        match *q {
            [q] => dot_one::<P>(rows, q, n_blocks, sums),
            _ => by_rows_of_activations!(dot, rows, q, n_blocks, sums),
        }
    }
}

/// [`super::ternary::Dots`] with products of byte matrices, where there are several rows of both.
///
/// # Safety
/// The machine has the features `dotprod` and `i8mm`.
pub(super) unsafe fn dots_i8mm<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[&[i8]],
    sums: &mut [[i32; TILE]; TILE],
) {
    let n_blocks = n_blocks::<P>(rows, q);
    // SAFETY: the features by the caller's promise; lengths were checked.
    unsafe {
        match *q {
            [q] => dot_one::<P>(rows, q, n_blocks, sums),
            [a, b] => matrix::<P, 1>(rows, [[a, b]], n_blocks, sums),
            [a, b, c] => matrix::<P, 2>(rows, [[a, b], [c, c]], n_blocks, sums),
            [a, b, c, d] => matrix::<P, 2>(rows, [[a, b], [c, d]], n_blocks, sums),
            _ => {}
        }
    }
}

/// Blocks whose products are summed in 16 bits: each adds at most 16 · 2 · 128 = 4,096 in magnitude,
/// and 7 · 4,096 is below 32,768.
const NARROW: usize = 7;

/// # Safety
/// The rows have `n_blocks` blocks.
unsafe fn widening<P: Packed, const T: usize>(
    rows: &[&[u8]; TILE],
    q: [&[i8]; T],
    n_blocks: usize,
    sums: &mut [[i32; TILE]; TILE],
) {
    // SAFETY: every machine of this target has NEON; blocks are below `n_blocks`, which the rows have.
    unsafe {
        let mut wide = [[vdupq_n_s32(0); TILE]; T];
        let mut block = 0;
        while block < n_blocks {
            let end = n_blocks.min(block + NARROW);
            let mut narrow = [[vdupq_n_s16(0); TILE]; T];
            while block < end {
                let at = P::offset(block);
                for half in 0..2 {
                    let mut codes = [[vdupq_n_s8(0); 4]; TILE];
                    for (codes, row) in codes.iter_mut().zip(rows) {
                        *codes = groups::<P>(load(row.as_ptr().add(at + half * 16)));
                    }
                    for g in 0..4 {
                        for t in 0..T {
                            let at = block * BLOCK + g * BLOCK_BYTES + half * 16;
                            let q = load_q(q[t].as_ptr().add(at));
                            for (sum, codes) in narrow[t].iter_mut().zip(&codes) {
                                *sum = vmlal_s8(*sum, vget_low_s8(codes[g]), vget_low_s8(q));
                                *sum = vmlal_high_s8(*sum, codes[g], q);
                            }
                        }
                    }
                }
                block += 1;
            }
            for (wide, narrow) in wide
                .as_flattened_mut()
                .iter_mut()
                .zip(narrow.as_flattened())
            {
                *wide = vpadalq_s16(*wide, *narrow);
            }
        }
        for (sums, wide) in sums.iter_mut().zip(wide) {
            *sums = wide.map(|wide| vaddvq_s32(wide));
        }
    }
}

/// One row of activations. Codes are masked in place in their bytes, which saves shifting them; the sums are
/// shifted at the end.
///
/// Sums of codes times 16 fit: at most 16 · 2 · 128 for each of `k / 4` elements, shared out to four
/// lanes, is below 2^31 for every `k` that a matrix may have.
///
/// # Safety
/// The machine has the feature `dotprod`; the rows have `n_blocks` blocks.
#[target_feature(enable = "dotprod")]
unsafe fn dot_one<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[i8],
    n_blocks: usize,
    sums: &mut [[i32; TILE]; TILE],
) {
    // SAFETY: blocks are below `n_blocks`, which the rows have.
    unsafe {
        let masks = [0x03, 0x0c, 0x30].map(|mask| vdupq_n_u8(mask));
        // Sums of codes, of codes times 4 and of codes times 16.
        let mut parts = [[vdupq_n_s32(0); 3]; TILE];
        for block in 0..n_blocks {
            let at = P::offset(block);
            // The same position in the next tile.
            let next = rows[0].as_ptr().wrapping_add(TILE * (rows[0].len() + at));
            prefetch::lines(prefetch::Level::First, next, TILE * P::PAIR_STRIDE / 2);
            for half in 0..2 {
                let mut acts = [vdupq_n_s8(0); 4];
                for (g, acts) in acts.iter_mut().enumerate() {
                    let field = if P::LOWEST_FIRST { g } else { 3 - g };
                    let at = block * BLOCK + field * BLOCK_BYTES + half * 16;
                    *acts = load_q(q.as_ptr().add(at));
                }
                for (parts, row) in parts.iter_mut().zip(rows) {
                    let packed = load(row.as_ptr().add(at + half * 16));
                    for ((part, mask), acts) in parts.iter_mut().zip(masks).zip(acts) {
                        let codes = vreinterpretq_s8_u8(vandq_u8(packed, mask));
                        *part = sdot(*part, codes, acts);
                    }
                    let codes = vreinterpretq_s8_u8(vshrq_n_u8::<6>(packed));
                    parts[0] = sdot(parts[0], codes, acts[3]);
                }
            }
        }
        for (sum, [ones, fours, sixteens]) in sums[0].iter_mut().zip(parts) {
            let sum4 = vsraq_n_s32::<2>(vsraq_n_s32::<4>(ones, sixteens), fours);
            *sum = vaddvq_s32(sum4);
        }
    }
}

/// # Safety
/// The machine has the feature `dotprod`; the rows have `n_blocks` blocks.
#[target_feature(enable = "dotprod")]
unsafe fn dot<P: Packed, const T: usize>(
    rows: &[&[u8]; TILE],
    q: [&[i8]; T],
    n_blocks: usize,
    sums: &mut [[i32; TILE]; TILE],
) {
    // SAFETY: blocks are below `n_blocks`, which the rows have.
    unsafe {
        let mut parts = [[vdupq_n_s32(0); TILE]; T];
        for block in 0..n_blocks {
            let at = P::offset(block);
            for half in 0..2 {
                let mut codes = [[vdupq_n_s8(0); 4]; TILE];
                for (codes, row) in codes.iter_mut().zip(rows) {
                    *codes = groups::<P>(load(row.as_ptr().add(at + half * 16)));
                }
                for g in 0..4 {
                    for t in 0..T {
                        let at = block * BLOCK + g * BLOCK_BYTES + half * 16;
                        let q = load_q(q[t].as_ptr().add(at));
                        for (part, codes) in parts[t].iter_mut().zip(&codes) {
                            *part = sdot(*part, codes[g], q);
                        }
                    }
                }
            }
        }
        for (sums, parts) in sums.iter_mut().zip(parts) {
            *sums = parts.map(|part| vaddvq_s32(part));
        }
    }
}

/// Two halves of one register after the other: `a[0..8], b[0..8]` and `a[8..16], b[8..16]`.
#[inline(always)]
fn interleave(a: uint8x16_t, b: uint8x16_t) -> [uint8x16_t; 2] {
    // SAFETY: every machine of this target has NEON.
    unsafe {
        let (a, b) = (vreinterpretq_u64_u8(a), vreinterpretq_u64_u8(b));
        [vzip1q_u64(a, b), vzip2q_u64(a, b)].map(|zipped| vreinterpretq_u8_u64(zipped))
    }
}

/// Rows of weights and of activations two by two: packed codes are interleaved before they are
/// unpacked, so that one interleaving serves four products.
///
/// # Safety
/// The machine has the feature `i8mm`; the rows have `n_blocks` blocks.
#[target_feature(enable = "i8mm")]
unsafe fn matrix<P: Packed, const PAIRS: usize>(
    rows: &[&[u8]; TILE],
    q: [[&[i8]; 2]; PAIRS],
    n_blocks: usize,
    sums: &mut [[i32; TILE]; TILE],
) {
    // SAFETY: blocks are below `n_blocks`, which the rows have.
    unsafe {
        // Products of each pair of activations with each pair of rows; first and second halves.
        let mut parts = [[[vdupq_n_s32(0); 2]; TILE / 2]; PAIRS];
        for block in 0..n_blocks {
            let at = P::offset(block);
            for half in 0..2 {
                let mut codes = [[[vdupq_n_s8(0); 4]; 2]; TILE / 2];
                for (codes, [a, b]) in codes.iter_mut().zip(rows.as_chunks().0) {
                    let a = load(a.as_ptr().add(at + half * 16));
                    let b = load(b.as_ptr().add(at + half * 16));
                    for (codes, packed) in codes.iter_mut().zip(interleave(a, b)) {
                        *codes = groups::<P>(packed);
                    }
                }
                for g in 0..4 {
                    for (parts, [a, b]) in parts.iter_mut().zip(q) {
                        let at = block * BLOCK + g * BLOCK_BYTES + half * 16;
                        let acts = interleave(
                            load(a.as_ptr().add(at).cast()),
                            load(b.as_ptr().add(at).cast()),
                        );
                        for (parts, codes) in parts.iter_mut().zip(&codes) {
                            for h in 0..2 {
                                let acts = vreinterpretq_s8_u8(acts[h]);
                                parts[h] = smmla(parts[h], acts, codes[h][g]);
                            }
                        }
                    }
                }
            }
        }
        for (sums, parts) in sums.as_chunks_mut::<2>().0.iter_mut().zip(parts) {
            for (pair, [a, b]) in parts.into_iter().enumerate() {
                let product = vaddq_s32(a, b);
                sums[0][2 * pair] = vgetq_lane_s32::<0>(product);
                sums[0][2 * pair + 1] = vgetq_lane_s32::<1>(product);
                sums[1][2 * pair] = vgetq_lane_s32::<2>(product);
                sums[1][2 * pair + 1] = vgetq_lane_s32::<3>(product);
            }
        }
    }
}
