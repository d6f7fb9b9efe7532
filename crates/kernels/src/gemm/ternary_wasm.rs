//! Ternary dot products with WebAssembly's vectors, and with its relaxed dot products of bytes.

use std::arch::wasm32::*;
use std::ops::Range;

use super::ternary::{Packed, TILE};
use super::unroll::each_row;
use crate::quant::ternary::{BLOCK, BLOCK_BYTES};

/// Half of a block's bytes, and of each of its four groups of elements.
const HALF: usize = BLOCK_BYTES / 2;

/// Blocks whose products are summed in 16 bits: in each lane two products of at most 2 · 128 for each group of each
/// half.
const BLOCKS: usize = i16::MAX as usize / (2 * 2 * 128 * 4 * 2);

/// [`super::ternary::Dots`] with vectors of 16 bytes.
///
/// # Safety
/// None is needed: a build that has this function needs the instructions throughout.
pub(super) unsafe fn dots<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[&[i8]],
    sums: &mut [[i32; TILE]; TILE],
) {
    for (q, sums) in q.iter().zip(sums) {
        *sums = tile::<P, Widened>(rows, q);
    }
}

/// [`super::ternary::Dots`] with relaxed dot products of bytes.
///
/// Engines may differ in products of which the second factor isn't within 0 to 127; codes are.
///
/// # Safety
/// None is needed: a build that has this function needs the instructions throughout.
#[cfg(target_feature = "relaxed-simd")]
pub(super) unsafe fn dots_relaxed<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[&[i8]],
    sums: &mut [[i32; TILE]; TILE],
) {
    for (q, sums) in q.iter().zip(sums) {
        *sums = tile::<P, Relaxed>(rows, q);
    }
}

/// How 16 codes are multiplied with 16 activations.
trait Dot {
    /// Activations, converted once for all rows.
    type Acts: Copy;

    fn acts(q: v128) -> Self::Acts;

    /// Adds the products of the codes in bits `2 · FIELD` and up of each byte to eight sums of i16.
    fn add<const FIELD: u32>(sums: v128, packed: v128, acts: Self::Acts) -> v128;
}

/// Even bytes separate from odd ones.
struct Widened;

impl Dot for Widened {
    type Acts = [v128; 2];

    #[inline(always)]
    fn acts(q: v128) -> [v128; 2] {
        [i16x8_shr(i16x8_shl(q, 8), 8), i16x8_shr(q, 8)]
    }

    #[inline(always)]
    fn add<const FIELD: u32>(sums: v128, packed: v128, acts: [v128; 2]) -> v128 {
        let three = i16x8_splat(3);
        let even = v128_and(u16x8_shr(packed, 2 * FIELD), three);
        let odd = v128_and(u16x8_shr(packed, 2 * FIELD + 8), three);
        let sums = i16x8_add(sums, i16x8_mul(even, acts[0]));
        i16x8_add(sums, i16x8_mul(odd, acts[1]))
    }
}

/// In bytes.
#[cfg(target_feature = "relaxed-simd")]
struct Relaxed;

#[cfg(target_feature = "relaxed-simd")]
impl Dot for Relaxed {
    type Acts = v128;

    #[inline(always)]
    fn acts(q: v128) -> v128 {
        q
    }

    #[inline(always)]
    fn add<const FIELD: u32>(sums: v128, packed: v128, acts: v128) -> v128 {
        // Shifted in pairs, which x86 has an instruction for; bits that cross over are masked.
        let codes = v128_and(u16x8_shr(packed, 2 * FIELD), u8x16_splat(3));
        i16x8_add(sums, i16x8_relaxed_dot_i8x16_i7x16(acts, codes))
    }
}

#[inline(always)]
fn tile<P: Packed, D: Dot>(rows: &[&[u8]; TILE], q: &[i8]) -> [i32; TILE] {
    let n_blocks = q.len() / BLOCK;
    assert!(q.len() == n_blocks * BLOCK);
    let end = n_blocks
        .checked_sub(1)
        .map_or(0, |last| P::offset(last) + BLOCK_BYTES);
    assert!(rows.iter().all(|row| row.len() >= end));

    let mut sums = [i32x4_splat(0); TILE];
    let mut start = 0;
    while start < n_blocks {
        let blocks = start..n_blocks.min(start + BLOCKS);
        start = blocks.end;
        // SAFETY: `blocks` are below `n_blocks`, and rows and activations were seen to have that many.
        let products = unsafe { sums_of_blocks::<P, D>(rows, q, blocks) };
        sums = each_row!(r => i32x4_add(sums[r], i32x4_extadd_pairwise_i16x8(products[r])));
    }
    each_row!(r => sum_lanes(sums[r]))
}

/// Sums of i16 of each row.
///
/// # Safety
/// Rows and activations have the `blocks`, which are at most [`BLOCKS`].
#[inline(always)]
unsafe fn sums_of_blocks<P: Packed, D: Dot>(
    rows: &[&[u8]; TILE],
    q: &[i8],
    blocks: Range<usize>,
) -> [v128; TILE] {
    let mut sums = [i32x4_splat(0); TILE];
    for block in blocks {
        for half in [0, HALF] {
            // SAFETY: the caller's promise.
            unsafe {
                let acts = q.as_ptr().add(block * BLOCK + half);
                let acts =
                    each_row!(group => D::acts(v128_load(acts.add(group * BLOCK_BYTES).cast())));
                let acts = if P::LOWEST_FIRST {
                    acts
                } else {
                    [acts[3], acts[2], acts[1], acts[0]]
                };
                let at = P::offset(block) + half;
                sums = each_row!(r => {
                    let packed = v128_load(rows[r].as_ptr().add(at).cast());
                    let sum = D::add::<0>(sums[r], packed, acts[0]);
                    let sum = D::add::<1>(sum, packed, acts[1]);
                    let sum = D::add::<2>(sum, packed, acts[2]);
                    D::add::<3>(sum, packed, acts[3])
                });
            }
        }
    }
    sums
}

#[inline(always)]
fn sum_lanes(v: v128) -> i32 {
    let v = i32x4_add(v, i32x4_shuffle::<2, 3, 0, 1>(v, v));
    i32x4_extract_lane::<0>(v) + i32x4_extract_lane::<1>(v)
}
