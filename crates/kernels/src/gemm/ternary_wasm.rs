//! Ternary dot products with WebAssembly's vectors, and with its relaxed dot products of bytes.

use std::arch::wasm32::*;

use super::ternary::{Packed, TILE};
use crate::quant::ternary::{BLOCK, BLOCK_BYTES};

/// Rows of activations taken at a time: with four rows of weights their sums leave half of x86's 16
/// registers free.
const ACTS: usize = 2;

/// Half of a block's bytes, and of each of its four groups of elements.
const HALF: usize = BLOCK_BYTES / 2;

/// [`super::ternary::Dots`] with vectors of 16 bytes.
///
/// # Safety
/// None is needed: a build that has this function needs the instructions throughout.
pub(super) unsafe fn dots<P: Packed>(
    rows: &[&[u8]; TILE],
    q: &[&[i8]],
    sums: &mut [[i32; TILE]; TILE],
) {
    for (q, sums) in q.chunks(ACTS).zip(sums.chunks_mut(ACTS)) {
        match *q {
            [a] => [sums[0]] = tile::<P, Widened, 1>(rows, [a]),
            [a, b] => [sums[0], sums[1]] = tile::<P, Widened, 2>(rows, [a, b]),
            _ => {}
        }
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
    for (q, sums) in q.chunks(ACTS).zip(sums.chunks_mut(ACTS)) {
        match *q {
            [a] => [sums[0]] = tile::<P, Relaxed, 1>(rows, [a]),
            [a, b] => [sums[0], sums[1]] = tile::<P, Relaxed, 2>(rows, [a, b]),
            _ => {}
        }
    }
}

/// How 16 codes are multiplied with 16 activations.
trait Dot {
    /// Converts factors once before each is used with several others.
    type Operand: Copy;

    /// The codes in bits `2 · FIELD` and up of each byte.
    fn codes<const FIELD: u32>(packed: v128) -> Self::Operand;

    fn acts(q: v128) -> Self::Operand;

    /// Adds products to four sums; which products go to which sum is unspecified.
    fn add(sums: v128, codes: Self::Operand, acts: Self::Operand) -> v128;
}

/// In 16 bits, even bytes separate from odd ones.
struct Widened;

impl Dot for Widened {
    type Operand = [v128; 2];

    #[inline(always)]
    fn codes<const FIELD: u32>(packed: v128) -> [v128; 2] {
        let three = i16x8_splat(3);
        [
            v128_and(u16x8_shr(packed, 2 * FIELD), three),
            v128_and(u16x8_shr(packed, 2 * FIELD + 8), three),
        ]
    }

    #[inline(always)]
    fn acts(q: v128) -> [v128; 2] {
        [i16x8_shr(i16x8_shl(q, 8), 8), i16x8_shr(q, 8)]
    }

    #[inline(always)]
    fn add(sums: v128, codes: [v128; 2], acts: [v128; 2]) -> v128 {
        let even = i32x4_add(sums, i32x4_dot_i16x8(codes[0], acts[0]));
        i32x4_add(even, i32x4_dot_i16x8(codes[1], acts[1]))
    }
}

/// In bytes.
#[cfg(target_feature = "relaxed-simd")]
struct Relaxed;

#[cfg(target_feature = "relaxed-simd")]
impl Dot for Relaxed {
    type Operand = v128;

    #[inline(always)]
    fn codes<const FIELD: u32>(packed: v128) -> v128 {
        v128_and(u8x16_shr(packed, 2 * FIELD), u8x16_splat(3))
    }

    #[inline(always)]
    fn acts(q: v128) -> v128 {
        q
    }

    #[inline(always)]
    fn add(sums: v128, codes: v128, acts: v128) -> v128 {
        i32x4_relaxed_dot_i8x16_i7x16_add(acts, codes, sums)
    }
}

#[inline(always)]
fn tile<P: Packed, D: Dot, const T: usize>(
    rows: &[&[u8]; TILE],
    q: [&[i8]; T],
) -> [[i32; TILE]; T] {
    let n_blocks = q[0].len() / BLOCK;
    assert!(q.iter().all(|q| q.len() == n_blocks * BLOCK));
    let end = n_blocks
        .checked_sub(1)
        .map_or(0, |last| P::offset(last) + BLOCK_BYTES);
    assert!(rows.iter().all(|row| row.len() >= end));

    let mut sums = [[i32x4_splat(0); TILE]; T];
    for block in 0..n_blocks {
        for half in 0..2 {
            let at = P::offset(block) + half * HALF;
            // SAFETY: `block` is below `n_blocks`, and rows were seen to have that many.
            let packed = rows.map(|row| unsafe { v128_load(row.as_ptr().add(at).cast()) });
            let mut field = |group: usize, codes: [D::Operand; TILE]| {
                let at = block * BLOCK + group * BLOCK_BYTES + half * HALF;
                for (sums, q) in sums.iter_mut().zip(q) {
                    // SAFETY: as above; the activations of a block are 128.
                    let acts = D::acts(unsafe { v128_load(q.as_ptr().add(at).cast()) });
                    for (sum, codes) in sums.iter_mut().zip(codes) {
                        *sum = D::add(*sum, codes, acts);
                    }
                }
            };
            let group = |field: usize| if P::LOWEST_FIRST { field } else { 3 - field };
            field(group(0), packed.map(D::codes::<0>));
            field(group(1), packed.map(D::codes::<1>));
            field(group(2), packed.map(D::codes::<2>));
            field(group(3), packed.map(D::codes::<3>));
        }
    }
    sums.map(|sums| sums.map(sum_lanes))
}

#[inline(always)]
fn sum_lanes(v: v128) -> i32 {
    let v = i32x4_add(v, i32x4_shuffle::<2, 3, 0, 1>(v, v));
    i32x4_extract_lane::<0>(v) + i32x4_extract_lane::<1>(v)
}
