//! Sixteen lanes with NEON: four registers, of which each has four rows of weights.
//!
//! The activations of a tile are laid out as dot products by element need them: four columns of four rows
//! fill a register.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;

use super::Lanes as Array;
use super::lanes::{Acts, Lanes};
use crate::arm::sdot_lane;

/// With the baseline of 64-bit Arm: products are summed in 16 bits as long as those can't overflow.
#[derive(Clone, Copy)]
pub(super) struct Neon;

/// With dot products of bytes.
#[derive(Clone, Copy)]
pub(super) struct NeonDot;

/// An instruction on all registers.
macro_rules! each {
    ($f:ident, $($v:expr),+) => {
        [$f($($v[0]),+), $f($($v[1]),+), $f($($v[2]),+), $f($($v[3]),+)]
    };
}

/// Shared by the two.
macro_rules! lanes_128 {
    () => {
        type I = [int32x4_t; 4];
        type F = [float32x4_t; 4];

        const SIGNED_BYTES: bool = true;

        #[inline(always)]
        unsafe fn zero() -> Self::I {
            // SAFETY: every machine of this target has NEON; so in all that follows, and what pointers
            // point to is there by the caller's promise.
            unsafe { [vdupq_n_s32(0); 4] }
        }

        #[inline(always)]
        unsafe fn load_i(from: *const Array<i32>) -> Self::I {
            let from: *const i32 = from.cast();
            // SAFETY: as above.
            unsafe {
                let at = [from, from.add(4), from.add(8), from.add(12)];
                each!(vld1q_s32, at)
            }
        }

        #[inline(always)]
        unsafe fn store_i(to: *mut Array<i32>, v: Self::I) {
            let to: *mut i32 = to.cast();
            // SAFETY: as above.
            unsafe {
                let at = [to, to.add(4), to.add(8), to.add(12)];
                each!(vst1q_s32, at, v);
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
            // SAFETY: as above.
            unsafe {
                let mut dots = [Self::zero(); T];
                Self::add_dots::<T, MAX>(&mut dots, codes, acts, n_quads);
                let scales = Self::load_i(scales);
                for (sums, dots) in sums.iter_mut().zip(dots) {
                    *sums = each!(vmlaq_s32, sums, dots, scales);
                }
            }
        }

        #[inline(always)]
        unsafe fn add_pairs(
            sum: Self::I,
            weights: *const Array<[i16; 2]>,
            pair: [i16; 2],
        ) -> Self::I {
            let weights: *const i16 = weights.cast();
            // SAFETY: as above.
            unsafe {
                let pair = i32::from(pair[0] as u16) | i32::from(pair[1]) << 16;
                let pair = [vreinterpretq_s16_s32(vdupq_n_s32(pair)); 4];
                let at = [weights, weights.add(8), weights.add(16), weights.add(24)];
                let weights = each!(vld1q_s16, at);
                let products = each!(dot_pairs, weights, pair);
                each!(vaddq_s32, sum, products)
            }
        }

        #[inline(always)]
        unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, b: Self::I) -> Self::I {
            // SAFETY: as above.
            unsafe {
                let count = [vdupq_n_s32(SHIFT as i32); 4];
                let b = each!(vshlq_s32, b, count);
                each!(vsubq_s32, a, b)
            }
        }

        #[inline(always)]
        unsafe fn to_f(v: Self::I) -> Self::F {
            // SAFETY: as above.
            unsafe { each!(vcvtq_f32_s32, v) }
        }

        #[inline(always)]
        unsafe fn load_f(from: *const Array<f32>) -> Self::F {
            let from: *const f32 = from.cast();
            // SAFETY: as above.
            unsafe {
                let at = [from, from.add(4), from.add(8), from.add(12)];
                each!(vld1q_f32, at)
            }
        }

        #[inline(always)]
        unsafe fn store_f(to: *mut Array<f32>, v: Self::F) {
            let to: *mut f32 = to.cast();
            // SAFETY: as above.
            unsafe {
                let at = [to, to.add(4), to.add(8), to.add(12)];
                each!(vst1q_f32, at, v);
            }
        }

        #[inline(always)]
        unsafe fn splat(v: f32) -> Self::F {
            // SAFETY: as above.
            unsafe { [vdupq_n_f32(v); 4] }
        }

        #[inline(always)]
        unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
            // SAFETY: as above.
            unsafe { each!(vaddq_f32, a, b) }
        }

        #[inline(always)]
        unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
            // SAFETY: as above.
            unsafe { each!(vsubq_f32, a, b) }
        }

        #[inline(always)]
        unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
            // SAFETY: as above.
            unsafe { each!(vmulq_f32, a, b) }
        }
    };
}

/// `a[2i] · b[2i] + a[2i + 1] · b[2i + 1]`.
#[inline(always)]
fn dot_pairs(a: int16x8_t, b: int16x8_t) -> int32x4_t {
    // SAFETY: every machine of this target has NEON.
    unsafe {
        let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
        vpaddq_s32(low, vmull_high_s16(a, b))
    }
}

/// Four columns of rows `4 · part` and up. Those of bytes that use all bits become signed.
///
/// # Safety
/// They are there.
#[inline(always)]
unsafe fn load_codes<const MAX: usize>(codes: *const Array<[u8; 4]>, part: usize) -> int8x16_t {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = vld1q_u8(codes.cast::<u8>().add(16 * part));
        vreinterpretq_s8_u8(if MAX > 127 {
            veorq_u8(codes, vdupq_n_u8(128))
        } else {
            codes
        })
    }
}

impl Lanes for Neon {
    lanes_128!();

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        // A step adds at most MAX · 128 in magnitude; where codes are signed, at most 128 · 127.
        let burst = if MAX > 127 { 2 } else { 255 / MAX };
        // Two parts of four rows of activations: as many sums as leave registers for the factors.
        // SAFETY: the caller's promise.
        unsafe {
            for (tile, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                for part in [0, 2] {
                    let mut quad = 0;
                    while quad < n_quads {
                        let end = n_quads.min(quad + burst);
                        let mut narrow = [[vdupq_n_s16(0); 4]; 4];
                        while quad < end {
                            let a = load_codes::<MAX>(codes.add(quad), part);
                            let b = load_codes::<MAX>(codes.add(quad), part + 1);
                            for (t, narrow) in narrow.iter_mut().enumerate() {
                                let act = acts.quad(quad, 4 * tile + t).read_unaligned();
                                let act = vreinterpretq_s8_s32(vdupq_n_s32(act));
                                let low = vget_low_s8(act);
                                narrow[0] = vmlal_s8(narrow[0], vget_low_s8(a), low);
                                narrow[1] = vmlal_high_s8(narrow[1], a, act);
                                narrow[2] = vmlal_s8(narrow[2], vget_low_s8(b), low);
                                narrow[3] = vmlal_high_s8(narrow[3], b, act);
                            }
                            quad += 1;
                        }
                        for (sums, narrow) in sums.iter_mut().zip(narrow) {
                            let wide = each!(vpaddlq_s16, narrow);
                            let (a, b) =
                                (vpaddq_s32(wide[0], wide[1]), vpaddq_s32(wide[2], wide[3]));
                            sums[part] = vaddq_s32(sums[part], a);
                            sums[part + 1] = vaddq_s32(sums[part + 1], b);
                        }
                    }
                }
            }
        }
    }
}

impl Lanes for NeonDot {
    lanes_128!();

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        // SAFETY: the caller's promise; a tile has four columns of four rows side by side.
        unsafe {
            for quad in 0..n_quads {
                for (tile, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let acts = vld1q_s8(acts.quad(quad, 4 * tile).cast());
                    for part in 0..4 {
                        let codes = load_codes::<MAX>(codes.add(quad), part);
                        sums[0][part] = sdot_lane::<0>(sums[0][part], codes, acts);
                        sums[1][part] = sdot_lane::<1>(sums[1][part], codes, acts);
                        sums[2][part] = sdot_lane::<2>(sums[2][part], codes, acts);
                        sums[3][part] = sdot_lane::<3>(sums[3][part], codes, acts);
                    }
                }
            }
        }
    }
}
