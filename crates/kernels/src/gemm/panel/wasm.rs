//! Sixteen lanes with WebAssembly's vectors: four registers, of which each has four rows of weights.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::wasm32::*;

use super::Lanes as Array;
use super::lanes::{Acts, Lanes};

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
        unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
            sums: &mut [Self::I; T],
            codes: *const Array<[u8; 4]>,
            acts: Acts,
            n_quads: usize,
            scales: *const Array<i32>,
        ) {
            // SAFETY: the caller's promise.
            unsafe {
                let mut dots = [Self::zero(); T];
                Self::add_dots::<T, MAX>(&mut dots, codes, acts, n_quads);
                let scales = load(scales);
                for (sums, dots) in sums.iter_mut().zip(dots) {
                    let products = each!(i32x4_mul, dots, scales);
                    *sums = each!(i32x4_add, sums, products);
                }
            }
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

/// Rows of weights whose sums are kept in registers, in fours: with four rows of activations that is half of
/// the registers of x86, on which many engines run.
const PARTS: usize = 2;

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

impl Lanes for Simd128 {
    lanes_128!();

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        for (tile, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in (0..4).step_by(PARTS) {
                for quad in 0..n_quads {
                    let (mut even, mut odd) = ([i32x4_splat(0); PARTS], [i32x4_splat(0); PARTS]);
                    for i in 0..PARTS {
                        // SAFETY: the caller's promise.
                        let codes = unsafe { load_codes(codes.add(quad), part + i) };
                        even[i] = v128_and(codes, i16x8_splat(0xff));
                        odd[i] = u16x8_shr(codes, 8);
                    }
                    for (t, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: the caller's promise.
                        let acts = unsafe { load_acts(acts, quad, 4 * tile + t) };
                        let (low, high) = (i16x8_shr(i16x8_shl(acts, 8), 8), i16x8_shr(acts, 8));
                        for i in 0..PARTS {
                            let sum = i32x4_add(sums[part + i], i32x4_dot_i16x8(even[i], low));
                            sums[part + i] = i32x4_add(sum, i32x4_dot_i16x8(odd[i], high));
                        }
                    }
                }
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
        if MAX > 127 {
            // SAFETY: the caller's promise.
            return unsafe { Simd128::add_dots::<T, MAX>(sums, codes, acts, n_quads) };
        }
        for (tile, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            for part in (0..4).step_by(PARTS) {
                for quad in 0..n_quads {
                    let mut rows = [i32x4_splat(0); PARTS];
                    for (i, rows) in rows.iter_mut().enumerate() {
                        // SAFETY: the caller's promise.
                        *rows = unsafe { load_codes(codes.add(quad), part + i) };
                    }
                    for (t, sums) in sums.iter_mut().enumerate() {
                        // SAFETY: the caller's promise.
                        let acts = unsafe { load_acts(acts, quad, 4 * tile + t) };
                        for (sum, rows) in sums[part..].iter_mut().zip(rows) {
                            *sum = i32x4_relaxed_dot_i8x16_i7x16_add(acts, rows, *sum);
                        }
                    }
                }
            }
        }
    }
}
