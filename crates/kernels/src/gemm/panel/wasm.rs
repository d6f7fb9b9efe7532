//! Products of bytes with WebAssembly's vectors: four registers, of which each has four rows of weights.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::wasm32::*;

use super::Lanes;
use super::dots::{Acts, Dots, dword};
use crate::gemm::unroll::each_row;
#[cfg(target_feature = "relaxed-simd")]
use crate::simd::wasm::Relaxed;
use crate::simd::wasm::{Ints128, Simd128, each, load};

/// [`Dots::add_pairs`].
#[inline(always)]
fn add_pairs(sum: Ints128, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints128 {
    let pair = [i32x4_splat(dword(pair)); 4];
    let weights = load(weights);
    sum + Ints128(each!(i32x4_dot_i16x8, weights, pair))
}

/// Four columns of rows `4 · part` and up.
#[inline(always)]
fn load_codes(codes: &Lanes<[u8; 4]>, part: usize) -> v128 {
    let codes = &codes[4 * part..4 * part + 4];
    // SAFETY: sixteen bytes are there; alignment doesn't matter.
    unsafe { v128_load(codes.as_ptr().cast()) }
}

/// Four activations of a row, in every lane.
///
/// # Safety
/// As [`Acts::quad`].
#[inline(always)]
unsafe fn load_acts(acts: Acts, quad: usize, t: usize) -> v128 {
    // SAFETY: the caller's promise; alignment doesn't matter.
    unsafe { v128_load32_splat(acts.quad(quad, t).cast()) }
}

/// How four bytes of activations are multiplied with those of four rows of weights.
trait Dot {
    /// Four codes of each of four rows; four activations in every lane.
    type Codes: Copy;
    type Acts: Copy;

    fn codes(v: v128) -> Self::Codes;
    fn acts(v: v128) -> Self::Acts;

    /// Adds the products to sums, four of i32 or eight of i16.
    fn add(sums: v128, codes: Self::Codes, acts: Self::Acts) -> v128;
}

/// Sums of i32: even bytes separate from odd ones.
impl Dot for Simd128 {
    type Codes = [v128; 2];
    type Acts = [v128; 2];

    #[inline(always)]
    fn codes(v: v128) -> [v128; 2] {
        [v128_and(v, i16x8_splat(0xff)), u16x8_shr(v, 8)]
    }

    #[inline(always)]
    fn acts(v: v128) -> [v128; 2] {
        [i16x8_shr(i16x8_shl(v, 8), 8), i16x8_shr(v, 8)]
    }

    #[inline(always)]
    fn add(sums: v128, codes: [v128; 2], acts: [v128; 2]) -> v128 {
        let even = i32x4_add(sums, i32x4_dot_i16x8(codes[0], acts[0]));
        i32x4_add(even, i32x4_dot_i16x8(codes[1], acts[1]))
    }
}

/// Sums of i16, two for each row of weights: see [`quads_in_16_bits`]. On x86 without dot products of bytes, those
/// with sums of i32 are five instructions, these are two.
#[cfg(target_feature = "relaxed-simd")]
impl Dot for Relaxed {
    type Codes = v128;
    type Acts = v128;

    #[inline(always)]
    fn codes(v: v128) -> v128 {
        v
    }

    #[inline(always)]
    fn acts(v: v128) -> v128 {
        v
    }

    #[inline(always)]
    fn add(sums: v128, codes: v128, acts: v128) -> v128 {
        i16x8_add(sums, i16x8_relaxed_dot_i8x16_i7x16(acts, codes))
    }
}

/// Times four columns of which two sums of two products each fit i16: codes are at most `max`, activations at least
/// −128.
#[cfg(target_feature = "relaxed-simd")]
const fn quads_in_16_bits(max: usize) -> usize {
    i16::MAX as usize / (2 * 128 * max)
}

/// The sums of four rows of activations and rows `4 · part` to `4 · part + 8` of weights from `quads` on, which is
/// half of the registers of x86, on which many engines run. No loop is left to be unrolled: arrays of loops that
/// aren't are in memory.
///
/// # Safety
/// As [`Dots::add_dots`].
#[inline(always)]
unsafe fn tile<D: Dot>(
    sums: [[v128; 2]; 4],
    codes: &[Lanes<[u8; 4]>],
    part: usize,
    acts: Acts,
    tile: usize,
    quads: std::ops::Range<usize>,
) -> [[v128; 2]; 4] {
    let [
        [mut a0, mut a1],
        [mut b0, mut b1],
        [mut c0, mut c1],
        [mut d0, mut d1],
    ] = sums;
    let first_quad = quads.start;
    for (i, codes) in codes[quads].iter().enumerate() {
        let first = D::codes(load_codes(codes, part));
        let second = D::codes(load_codes(codes, part + 1));
        // SAFETY: the caller's promise.
        let acts = unsafe {
            let row = |t| D::acts(load_acts(acts, first_quad + i, 4 * tile + t));
            [row(0), row(1), row(2), row(3)]
        };
        a0 = D::add(a0, first, acts[0]);
        a1 = D::add(a1, second, acts[0]);
        b0 = D::add(b0, first, acts[1]);
        b1 = D::add(b1, second, acts[1]);
        c0 = D::add(c0, first, acts[2]);
        c1 = D::add(c1, second, acts[2]);
        d0 = D::add(d0, first, acts[3]);
        d1 = D::add(d1, second, acts[3]);
    }
    [[a0, a1], [b0, b1], [c0, c1], [d0, d1]]
}

/// The sums of eight rows of weights, and back.
#[inline(always)]
fn half_of(sums: &[Ints128; 4], part: usize) -> [[v128; 2]; 4] {
    each_row!(t => [sums[t].0[part], sums[t].0[part + 1]])
}

#[inline(always)]
fn set_half(sums: &mut [Ints128; 4], part: usize, half: [[v128; 2]; 4]) {
    each_row!(t => [sums[t].0[part], sums[t].0[part + 1]] = half[t]);
}

impl Dots for Simd128 {
    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    fn add_pairs(self, sum: Ints128, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints128 {
        add_pairs(sum, weights, pair)
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints128; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        for (i, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in [0, 2] {
                // SAFETY: the caller's promise.
                let half = unsafe {
                    tile::<Simd128>(half_of(sums, part), codes, part, acts, i, 0..codes.len())
                };
                set_half(sums, part, half);
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints128; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
        scales: &Lanes<i32>,
    ) {
        let scales = load(scales);
        for (i, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in [0, 2] {
                // SAFETY: the caller's promise.
                let dots = unsafe {
                    let zero = [[i32x4_splat(0); 2]; 4];
                    tile::<Simd128>(zero, codes, part, acts, i, 0..codes.len())
                };
                let scales = [scales[part], scales[part + 1]];
                let half = half_of(sums, part);
                let sum =
                    |t: usize, i: usize| i32x4_add(half[t][i], i32x4_mul(dots[t][i], scales[i]));
                set_half(sums, part, each_row!(t => [sum(t, 0), sum(t, 1)]));
            }
        }
    }
}

#[cfg(target_feature = "relaxed-simd")]
impl Relaxed {
    /// Adds to each sum that of two sums of i16 times two factors.
    ///
    /// # Safety
    /// As [`Dots::add_dots`]; `MAX` is at most 127.
    #[inline(always)]
    unsafe fn add_in_16_bits<const T: usize, const MAX: usize>(
        sums: &mut [Ints128; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
        factors: [v128; 4],
    ) {
        let most = const { quads_in_16_bits(MAX) };
        for (i, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in [0, 2] {
                let factors = [factors[part], factors[part + 1]];
                let mut half = half_of(sums, part);
                let mut start = 0;
                while start < codes.len() {
                    let quads = start..codes.len().min(start + most);
                    start = quads.end;
                    let zero = [[i32x4_splat(0); 2]; 4];
                    // SAFETY: the caller's promise.
                    let dots = unsafe { tile::<Relaxed>(zero, codes, part, acts, i, quads) };
                    let sum = |t: usize, i: usize| {
                        i32x4_add(half[t][i], i32x4_dot_i16x8(dots[t][i], factors[i]))
                    };
                    half = each_row!(t => [sum(t, 0), sum(t, 1)]);
                }
                set_half(sums, part, half);
            }
        }
    }
}

#[cfg(target_feature = "relaxed-simd")]
impl Dots for Relaxed {
    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    fn add_pairs(self, sum: Ints128, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints128 {
        add_pairs(sum, weights, pair)
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints128; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if MAX > 127 {
                return Simd128.add_dots::<T, MAX>(sums, codes, acts);
            }
            let ones = [i16x8_splat(1); 4];
            Self::add_in_16_bits::<T, MAX>(sums, codes, acts, ones);
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints128; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
        scales: &Lanes<i32>,
    ) {
        // Scales fit i16; both halves of a lane are to have them.
        let twice = |v| v128_or(v128_and(v, i32x4_splat(0xffff)), i32x4_shl(v, 16));
        let scales = load(scales);
        let scales = each!(twice, scales);
        // SAFETY: the caller's promise.
        unsafe { Self::add_in_16_bits::<T, MAX>(sums, codes, acts, scales) };
    }
}
