//! Products of bytes with NEON: four registers, of which each has four rows of weights.
//!
//! The activations of a tile are laid out as dot products by element need them: four columns of four rows
//! fill a register.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::arch::aarch64::*;

use super::Lanes;
use super::dots::{Acts, Dots, dword};
use crate::arm::sdot_lane;
use crate::simd::neon::{Ints128, Neon, NeonDot, each};

// SAFETY of the blocks below, where nothing else is said: every machine of this target has NEON; pointers come from
// references to sixteen times four bytes.

/// [`Dots::add_pairs`].
#[inline(always)]
fn add_pairs(sum: Ints128, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints128 {
    let weights: *const i16 = weights.as_ptr().cast();
    // SAFETY: see above.
    unsafe {
        let pair = [vreinterpretq_s16_s32(vdupq_n_s32(dword(pair))); 4];
        let at = [weights, weights.add(8), weights.add(16), weights.add(24)];
        let weights = each!(vld1q_s16, at);
        sum + Ints128(each!(dot_pairs, weights, pair))
    }
}

/// `a[2i] · b[2i] + a[2i + 1] · b[2i + 1]`.
#[inline(always)]
fn dot_pairs(a: int16x8_t, b: int16x8_t) -> int32x4_t {
    // SAFETY: see above.
    unsafe {
        let low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
        vpaddq_s32(low, vmull_high_s16(a, b))
    }
}

/// Four columns of rows `4 · part` and up. Those of bytes that use all bits become signed.
#[inline(always)]
fn load_codes<const MAX: usize>(codes: &Lanes<[u8; 4]>, part: usize) -> int8x16_t {
    let codes = &codes[4 * part..4 * part + 4];
    // SAFETY: sixteen bytes are there.
    unsafe {
        let codes = vld1q_u8(codes.as_ptr().cast());
        vreinterpretq_s8_u8(if MAX > 127 {
            veorq_u8(codes, vdupq_n_u8(128))
        } else {
            codes
        })
    }
}

impl Dots for Neon {
    const SIGNED_BYTES: bool = true;

    #[inline(always)]
    fn add_pairs(self, sum: Ints128, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints128 {
        add_pairs(sum, weights, pair)
    }

    /// Products are summed in 16 bits as long as those can't overflow.
    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints128; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        // A step adds at most MAX · 128 in magnitude; where codes are signed, at most 128 · 127.
        let burst = if MAX > 127 { 2 } else { 255 / MAX };
        // Two parts of four rows of activations: as many sums as leave registers for the factors.
        // SAFETY: the caller's promise.
        unsafe {
            for (tile, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                for part in [0, 2] {
                    let mut quad = 0;
                    while quad < codes.len() {
                        let end = codes.len().min(quad + burst);
                        let mut narrow = [[vdupq_n_s16(0); 4]; 4];
                        while quad < end {
                            let a = load_codes::<MAX>(&codes[quad], part);
                            let b = load_codes::<MAX>(&codes[quad], part + 1);
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
                        for (Ints128(sums), narrow) in sums.iter_mut().zip(narrow) {
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

impl Dots for NeonDot {
    const SIGNED_BYTES: bool = true;

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
        // SAFETY: the caller's promise; a tile has four columns of four rows side by side.
        unsafe {
            for (quad, codes) in codes.iter().enumerate() {
                for (tile, sums) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
                    let acts = vld1q_s8(acts.quad(quad, 4 * tile).cast());
                    for part in 0..4 {
                        let codes = load_codes::<MAX>(codes, part);
                        sums[0].0[part] = sdot_lane::<0>(sums[0].0[part], codes, acts);
                        sums[1].0[part] = sdot_lane::<1>(sums[1].0[part], codes, acts);
                        sums[2].0[part] = sdot_lane::<2>(sums[2].0[part], codes, acts);
                        sums[3].0[part] = sdot_lane::<3>(sums[3].0[part], codes, acts);
                    }
                }
            }
        }
    }
}
