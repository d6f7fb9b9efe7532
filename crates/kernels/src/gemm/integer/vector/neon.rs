//! [`Vector`] with NEON.

use std::arch::aarch64::*;

use super::super::super::prefetch;
use super::Vector;
use crate::arm::{sdot, widen_halves};

/// With the baseline of 64-bit Arm.
pub(in crate::gemm) struct Plain;

/// With dot products of bytes.
pub(super) struct Dot;

/// The bits of bytes, and again.
const BITS: [u8; 16] = [1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128];

/// Shared by the two.
macro_rules! common {
    () => {
        type Bytes = uint8x16_t;
        type Acts = uint8x16_t;
        type Ints = int32x4_t;
        type Floats = float32x4_t;

        #[inline(always)]
        fn prefetch(rows: &[u8], at: usize, n: usize) {
            prefetch::lines(prefetch::Level::Second, rows.as_ptr().wrapping_add(at), n);
        }

        #[inline(always)]
        unsafe fn load(from: *const u8) -> uint8x16_t {
            // SAFETY: every machine of this target has NEON; so in all that follows, and what pointers
            // point to is there by the caller's promise.
            unsafe { vld1q_u8(from) }
        }

        #[inline(always)]
        unsafe fn store_bytes(to: *mut u8, v: uint8x16_t) {
            // SAFETY: as above.
            unsafe { vst1q_u8(to, v) }
        }

        #[inline(always)]
        unsafe fn and(v: uint8x16_t, mask: u8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vandq_u8(v, vdupq_n_u8(mask)) }
        }

        #[inline(always)]
        unsafe fn or(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vorrq_u8(a, b) }
        }

        #[inline(always)]
        unsafe fn right<const N: i32>(v: uint8x16_t, mask: u8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vandq_u8(vshrq_n_u8::<N>(v), vdupq_n_u8(mask)) }
        }

        #[inline(always)]
        unsafe fn left<const N: i32>(v: uint8x16_t, mask: u8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vandq_u8(vshlq_n_u8::<N>(v), vdupq_n_u8(mask)) }
        }

        #[inline(always)]
        unsafe fn spread(bits: *const u8) -> [uint8x16_t; 2] {
            // SAFETY: as above.
            unsafe {
                let each = vld1q_u8(BITS.as_ptr());
                let bytes = |at: usize| {
                    vcombine_u8(vld1_dup_u8(bits.add(at)), vld1_dup_u8(bits.add(at + 1)))
                };
                [vtstq_u8(bytes(0), each), vtstq_u8(bytes(2), each)]
            }
        }

        #[inline(always)]
        unsafe fn bytes(low: u64, high: u64) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vcombine_u8(vcreate_u8(low), vcreate_u8(high)) }
        }

        #[inline(always)]
        unsafe fn twice(bytes: u64) -> uint8x16_t {
            // SAFETY: as above.
            unsafe {
                let v = vcombine_u8(vcreate_u8(bytes), vcreate_u8(bytes));
                vzip1q_u8(v, v)
            }
        }

        #[inline(always)]
        unsafe fn flip(v: uint8x16_t) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { veorq_u8(v, vdupq_n_u8(0x80)) }
        }

        #[inline(always)]
        unsafe fn interleave(v: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
            // SAFETY: as above.
            unsafe {
                let zip = |a, b| {
                    let (low, high) = (vzip1q_u8(a, b), vzip2q_u8(a, b));
                    [vreinterpretq_u16_u8(low), vreinterpretq_u16_u8(high)]
                };
                let ([a, b], [c, d]) = (zip(v[0], v[1]), zip(v[2], v[3]));
                [
                    vreinterpretq_u8_u16(vzip1q_u16(a, c)),
                    vreinterpretq_u8_u16(vzip2q_u16(a, c)),
                    vreinterpretq_u8_u16(vzip1q_u16(b, d)),
                    vreinterpretq_u8_u16(vzip2q_u16(b, d)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn transpose(v: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
            // SAFETY: as above.
            unsafe {
                let zip = |a, b| {
                    let (a, b) = (vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b));
                    let (low, high) = (vzip1q_u32(a, b), vzip2q_u32(a, b));
                    [vreinterpretq_u64_u32(low), vreinterpretq_u64_u32(high)]
                };
                let ([a, b], [c, d]) = (zip(v[0], v[1]), zip(v[2], v[3]));
                [
                    vreinterpretq_u8_u64(vzip1q_u64(a, c)),
                    vreinterpretq_u8_u64(vzip2q_u64(a, c)),
                    vreinterpretq_u8_u64(vzip1q_u64(b, d)),
                    vreinterpretq_u8_u64(vzip2q_u64(b, d)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn zero() -> int32x4_t {
            // SAFETY: as above.
            unsafe { vdupq_n_s32(0) }
        }

        #[inline(always)]
        unsafe fn splat_i(v: i32) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vdupq_n_s32(v) }
        }

        #[inline(always)]
        unsafe fn dot_i16(weights: uint8x16_t, values: *const i16) -> int32x4_t {
            // SAFETY: as above.
            unsafe {
                let weights = vreinterpretq_s8_u8(weights);
                let (a, b) = (vmovl_s8(vget_low_s8(weights)), vmovl_high_s8(weights));
                let (x, y) = (vld1q_s16(values), vld1q_s16(values.add(8)));
                let sums = vmull_s16(vget_low_s16(a), vget_low_s16(x));
                let sums = vmlal_high_s16(sums, a, x);
                let sums = vmlal_s16(sums, vget_low_s16(b), vget_low_s16(y));
                vmlal_high_s16(sums, b, y)
            }
        }

        #[inline(always)]
        unsafe fn sums(v: [int32x4_t; 4]) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])) }
        }

        #[inline(always)]
        unsafe fn sums_of_halves(v: [int32x4_t; 4]) -> [int32x4_t; 2] {
            // SAFETY: as above.
            unsafe {
                let (a, b) = (vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
                [vuzp1q_s32(a, b), vuzp2q_s32(a, b)]
            }
        }

        #[inline(always)]
        unsafe fn store_i16(to: &mut [i16; 16], v: uint8x16_t) {
            // SAFETY: as above.
            unsafe {
                let v = vreinterpretq_s8_u8(v);
                vst1q_s16(to.as_mut_ptr(), vmovl_s8(vget_low_s8(v)));
                vst1q_s16(to.as_mut_ptr().add(8), vmovl_high_s8(v));
            }
        }

        #[inline(always)]
        unsafe fn sub_i(a: int32x4_t, b: int32x4_t) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vsubq_s32(a, b) }
        }

        #[inline(always)]
        unsafe fn shift_left<const N: u32>(v: int32x4_t) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vshlq_s32(v, vdupq_n_s32(N as i32)) }
        }

        #[inline(always)]
        unsafe fn acts(from: *const i8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vld1q_u8(from.cast()) }
        }

        #[inline(always)]
        unsafe fn add_scaled<const N: usize>(
            codes: [uint8x16_t; N],
            q: [uint8x16_t; N],
            scale: &i16,
            sums: int32x4_t,
        ) -> int32x4_t {
            // SAFETY: as above.
            unsafe {
                let mut dots = Self::zero();
                for (codes, q) in codes.into_iter().zip(q) {
                    dots = Self::add_dot(dots, codes, q);
                }
                vmlaq_n_s32(sums, dots, i32::from(*scale))
            }
        }

        #[inline(always)]
        unsafe fn to_f(v: int32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vcvtq_f32_s32(v) }
        }

        #[inline(always)]
        unsafe fn halves(from: [*const u8; 4]) -> float32x4_t {
            // SAFETY: as above.
            unsafe {
                let bits = from.map(|from| from.cast::<u16>().read_unaligned());
                widen_halves(vld1_u16(bits.as_ptr()))
            }
        }

        #[inline(always)]
        unsafe fn splat(v: f32) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vdupq_n_f32(v) }
        }

        #[inline(always)]
        unsafe fn add(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vaddq_f32(a, b) }
        }

        #[inline(always)]
        unsafe fn sub(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vsubq_f32(a, b) }
        }

        #[inline(always)]
        unsafe fn mul(a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vmulq_f32(a, b) }
        }

        #[inline(always)]
        unsafe fn store(v: float32x4_t) -> [f32; 4] {
            let mut lanes = [0.0; 4];
            // SAFETY: as above.
            unsafe { vst1q_f32(lanes.as_mut_ptr(), v) };
            lanes
        }
    };
}

/// Signed bytes.
#[inline(always)]
fn signed(a: uint8x16_t, b: uint8x16_t) -> [int8x16_t; 2] {
    // SAFETY: every machine of this target has NEON.
    unsafe { [vreinterpretq_s8_u8(a), vreinterpretq_s8_u8(b)] }
}

impl Vector for Plain {
    common!();

    #[inline(always)]
    unsafe fn add_dot(sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        // SAFETY: as above.
        unsafe { Self::add_dot_signed(sums, codes, q) }
    }

    #[inline(always)]
    unsafe fn add_dot_by_fours(sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        let [codes, q] = signed(codes, q);
        // SAFETY: as above. Two products of codes up to 127 fit 16 bits.
        unsafe {
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(q));
            vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(codes, q)))
        }
    }

    #[inline(always)]
    unsafe fn add_dot_signed(sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        let [codes, q] = signed(codes, q);
        // SAFETY: as above. Two products of at most 128 · 127 fit 16 bits.
        unsafe {
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(q));
            vpadalq_s16(sums, vmlal_high_s8(low, codes, q))
        }
    }
}

impl Vector for Dot {
    common!();

    #[inline(always)]
    unsafe fn add_dot(sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        let [codes, q] = signed(codes, q);
        // SAFETY: the caller's promise.
        unsafe { sdot(sums, codes, q) }
    }

    #[inline(always)]
    unsafe fn add_dot_by_fours(sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe { Self::add_dot(sums, codes, q) }
    }

    #[inline(always)]
    unsafe fn add_dot_signed(sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        // SAFETY: the caller's promise.
        unsafe { Self::add_dot(sums, codes, q) }
    }
}
