//! Sixteen lanes with WebAssembly's vectors: four registers, of which each has four rows of weights.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::wasm32::*;

use super::Lanes as Array;
use super::lanes::{Acts, Lanes};
use crate::gemm::unroll::each_row;

/// With products in 16 bits, even bytes separate from odd ones.
#[derive(Clone, Copy)]
pub(super) struct Simd128;

/// With relaxed dot products of bytes, for codes on which all engines agree: those of seven bits.
#[cfg(target_feature = "relaxed-simd")]
#[derive(Clone, Copy)]
pub(super) struct Relaxed;

/// An instruction on all registers.
macro_rules! each {
    ($f:ident, $($v:expr),+) => {
        [$f($($v[0]),+), $f($($v[1]),+), $f($($v[2]),+), $f($($v[3]),+)]
    };
}

/// # Safety
/// 64 bytes are there.
#[inline(always)]
unsafe fn load<T>(from: *const T) -> [v128; 4] {
    let from: *const v128 = from.cast();
    // SAFETY: the caller's promise; alignment doesn't matter.
    unsafe {
        let at = [from, from.add(1), from.add(2), from.add(3)];
        each!(v128_load, at)
    }
}

/// # Safety
/// 64 bytes are there.
#[inline(always)]
unsafe fn store<T>(to: *mut T, v: [v128; 4]) {
    let to: *mut v128 = to.cast();
    // SAFETY: the caller's promise; alignment doesn't matter.
    unsafe {
        let at = [to, to.add(1), to.add(2), to.add(3)];
        each!(v128_store, at, v);
    }
}

/// Shared by the two.
macro_rules! lanes_128 {
    () => {
        type I = [v128; 4];
        type F = [v128; 4];

        const SIGNED_BYTES: bool = false;

        #[inline(always)]
        unsafe fn zero() -> Self::I {
            [i32x4_splat(0); 4]
        }

        #[inline(always)]
        unsafe fn load_i(from: *const Array<i32>) -> Self::I {
            // SAFETY: the caller's promise.
            unsafe { load(from) }
        }

        #[inline(always)]
        unsafe fn store_i(to: *mut Array<i32>, v: Self::I) {
            // SAFETY: the caller's promise.
            unsafe { store(to, v) }
        }

        #[inline(always)]
        unsafe fn add_pairs(
            sum: Self::I,
            weights: *const Array<[i16; 2]>,
            pair: [i16; 2],
        ) -> Self::I {
            let pair = i32::from(pair[0] as u16) | i32::from(pair[1]) << 16;
            let pair = [i32x4_splat(pair); 4];
            // SAFETY: the caller's promise.
            let weights = unsafe { load(weights) };
            let products = each!(i32x4_dot_i16x8, weights, pair);
            each!(i32x4_add, sum, products)
        }

        #[inline(always)]
        unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, b: Self::I) -> Self::I {
            let b = each!(i32x4_shl, b, [SHIFT; 4]);
            each!(i32x4_sub, a, b)
        }

        #[inline(always)]
        unsafe fn to_f(v: Self::I) -> Self::F {
            each!(f32x4_convert_i32x4, v)
        }

        #[inline(always)]
        unsafe fn load_f(from: *const Array<f32>) -> Self::F {
            // SAFETY: the caller's promise.
            unsafe { load(from) }
        }

        #[inline(always)]
        unsafe fn store_f(to: *mut Array<f32>, v: Self::F) {
            // SAFETY: the caller's promise.
            unsafe { store(to, v) }
        }

        #[inline(always)]
        unsafe fn splat(v: f32) -> Self::F {
            [f32x4_splat(v); 4]
        }

        #[inline(always)]
        unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
            each!(f32x4_add, a, b)
        }

        #[inline(always)]
        unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
            each!(f32x4_sub, a, b)
        }

        #[inline(always)]
        unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
            each!(f32x4_mul, a, b)
        }
    };
}

/// Four columns of rows `4 · part` and up.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn load_codes(codes: *const Array<[u8; 4]>, part: usize) -> v128 {
    // SAFETY: the caller's promise; alignment doesn't matter.
    unsafe { v128_load(codes.cast::<v128>().add(part)) }
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
/// As [`Lanes::add_dots`].
#[inline(always)]
unsafe fn tile<D: Dot>(
    sums: [[v128; 2]; 4],
    codes: *const Array<[u8; 4]>,
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
    for quad in quads {
        // SAFETY: the caller's promise.
        let (first, second, acts) = unsafe {
            let codes = codes.add(quad);
            let row = |t| D::acts(load_acts(acts, quad, 4 * tile + t));
            (
                D::codes(load_codes(codes, part)),
                D::codes(load_codes(codes, part + 1)),
                [row(0), row(1), row(2), row(3)],
            )
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
fn half_of(sums: &[[v128; 4]; 4], part: usize) -> [[v128; 2]; 4] {
    each_row!(t => [sums[t][part], sums[t][part + 1]])
}

#[inline(always)]
fn set_half(sums: &mut [[v128; 4]; 4], part: usize, half: [[v128; 2]; 4]) {
    each_row!(t => [sums[t][part], sums[t][part + 1]] = half[t]);
}

impl Lanes for Simd128 {
    lanes_128!();

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        for (i, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in [0, 2] {
                // SAFETY: the caller's promise.
                let half = unsafe {
                    tile::<Simd128>(half_of(sums, part), codes, part, acts, i, 0..n_quads)
                };
                set_half(sums, part, half);
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    ) {
        for (i, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in [0, 2] {
                // SAFETY: the caller's promise.
                let (dots, scales) = unsafe {
                    let zero = [[Self::zero()[0]; 2]; 4];
                    let scales = scales.cast::<v128>().add(part);
                    (
                        tile::<Simd128>(zero, codes, part, acts, i, 0..n_quads),
                        [v128_load(scales), v128_load(scales.add(1))],
                    )
                };
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
    /// As [`Lanes::add_dots`]; `MAX` is at most 127.
    #[inline(always)]
    unsafe fn add_in_16_bits<const T: usize, const MAX: usize>(
        sums: &mut [[v128; 4]; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        factors: [v128; 4],
    ) {
        let most = const { quads_in_16_bits(MAX) };
        for (i, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in [0, 2] {
                let factors = [factors[part], factors[part + 1]];
                let mut half = half_of(sums, part);
                let mut start = 0;
                while start < n_quads {
                    let quads = start..n_quads.min(start + most);
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
impl Lanes for Relaxed {
    lanes_128!();

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            if MAX > 127 {
                return Simd128::add_dots::<T, MAX>(sums, codes, acts, n_quads);
            }
            let ones = [i16x8_splat(1); 4];
            Self::add_in_16_bits::<T, MAX>(sums, codes, acts, n_quads, ones);
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    ) {
        // Scales fit i16; both halves of a lane are to have them.
        let twice = |v| v128_or(v128_and(v, i32x4_splat(0xffff)), i32x4_shl(v, 16));
        // SAFETY: the caller's promise.
        unsafe {
            let scales = load(scales);
            let scales = each!(twice, scales);
            Self::add_in_16_bits::<T, MAX>(sums, codes, acts, n_quads, scales);
        }
    }
}
