//! [`Vector`] with NEON: the baseline, and with dot products of bytes.

use std::arch::aarch64::*;

use super::super::super::prefetch;
use super::Vector;
use crate::arm::{sdot, widen_halves};
use crate::simd::neon::{Neon, NeonDot};

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
        fn prefetch(self, rows: &[u8], at: usize, n: usize) {
            prefetch::lines(prefetch::Level::Second, rows.as_ptr().wrapping_add(at), n);
        }

        #[inline(always)]
        fn load(self, from: &[u8; 16]) -> uint8x16_t {
            // SAFETY: every machine of this target has NEON; so in all that follows. Pointers come from references to as
            // much as is read or written.
            unsafe { vld1q_u8(from.as_ptr()) }
        }

        #[inline(always)]
        fn load_i8(self, from: &[i8; 16]) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vld1q_u8(from.as_ptr().cast()) }
        }

        #[inline(always)]
        fn store_bytes(self, v: uint8x16_t, to: &mut [u8; 16]) {
            // SAFETY: as above.
            unsafe { vst1q_u8(to.as_mut_ptr(), v) }
        }

        #[inline(always)]
        fn and(self, v: uint8x16_t, mask: u8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vandq_u8(v, vdupq_n_u8(mask)) }
        }

        #[inline(always)]
        fn or(self, a: uint8x16_t, b: uint8x16_t) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vorrq_u8(a, b) }
        }

        #[inline(always)]
        fn right<const N: i32>(self, v: uint8x16_t, mask: u8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vandq_u8(vshrq_n_u8::<N>(v), vdupq_n_u8(mask)) }
        }

        #[inline(always)]
        fn left<const N: i32>(self, v: uint8x16_t, mask: u8) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vandq_u8(vshlq_n_u8::<N>(v), vdupq_n_u8(mask)) }
        }

        #[inline(always)]
        fn spread(self, bits: [u8; 4]) -> [uint8x16_t; 2] {
            // SAFETY: as above.
            unsafe {
                let each = vld1q_u8(BITS.as_ptr());
                let bytes = |at: usize| vcombine_u8(vdup_n_u8(bits[at]), vdup_n_u8(bits[at + 1]));
                [vtstq_u8(bytes(0), each), vtstq_u8(bytes(2), each)]
            }
        }

        #[inline(always)]
        fn bytes(self, low: u64, high: u64) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { vcombine_u8(vcreate_u8(low), vcreate_u8(high)) }
        }

        #[inline(always)]
        fn twice(self, bytes: u64) -> uint8x16_t {
            // SAFETY: as above.
            unsafe {
                let v = vcombine_u8(vcreate_u8(bytes), vcreate_u8(bytes));
                vzip1q_u8(v, v)
            }
        }

        #[inline(always)]
        fn flip(self, v: uint8x16_t) -> uint8x16_t {
            // SAFETY: as above.
            unsafe { veorq_u8(v, vdupq_n_u8(0x80)) }
        }

        #[inline(always)]
        fn interleave(self, v: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
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
        fn transpose(self, v: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
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
        fn zero(self) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vdupq_n_s32(0) }
        }

        #[inline(always)]
        fn splat_i(self, v: i32) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vdupq_n_s32(v) }
        }

        #[inline(always)]
        fn dot_i16(self, weights: uint8x16_t, values: &[i16; 16]) -> int32x4_t {
            // SAFETY: as above.
            unsafe {
                let weights = vreinterpretq_s8_u8(weights);
                let (a, b) = (vmovl_s8(vget_low_s8(weights)), vmovl_high_s8(weights));
                let (x, y) = (vld1q_s16(values.as_ptr()), vld1q_s16(values[8..].as_ptr()));
                let sums = vmull_s16(vget_low_s16(a), vget_low_s16(x));
                let sums = vmlal_high_s16(sums, a, x);
                let sums = vmlal_s16(sums, vget_low_s16(b), vget_low_s16(y));
                vmlal_high_s16(sums, b, y)
            }
        }

        #[inline(always)]
        fn sums(self, v: [int32x4_t; 4]) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vpaddq_s32(vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3])) }
        }

        #[inline(always)]
        fn sums_of_halves(self, v: [int32x4_t; 4]) -> [int32x4_t; 2] {
            // SAFETY: as above.
            unsafe {
                let (a, b) = (vpaddq_s32(v[0], v[1]), vpaddq_s32(v[2], v[3]));
                [vuzp1q_s32(a, b), vuzp2q_s32(a, b)]
            }
        }

        #[inline(always)]
        fn to_i16(self, v: uint8x16_t) -> [i16; 16] {
            let mut to = [0; 16];
            // SAFETY: as above.
            unsafe {
                let v = vreinterpretq_s8_u8(v);
                vst1q_s16(to.as_mut_ptr(), vmovl_s8(vget_low_s8(v)));
                vst1q_s16(to[8..].as_mut_ptr(), vmovl_high_s8(v));
            }
            to
        }

        #[inline(always)]
        fn sub_i(self, a: int32x4_t, b: int32x4_t) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vsubq_s32(a, b) }
        }

        #[inline(always)]
        fn shift_left<const N: u32>(self, v: int32x4_t) -> int32x4_t {
            // SAFETY: as above.
            unsafe { vshlq_s32(v, vdupq_n_s32(N as i32)) }
        }

        #[inline(always)]
        fn acts(self, from: &[i8; 16]) -> uint8x16_t {
            self.load_i8(from)
        }

        #[inline(always)]
        fn add_scaled<const N: usize>(
            self,
            codes: [uint8x16_t; N],
            q: [uint8x16_t; N],
            scale: &i16,
            sums: int32x4_t,
        ) -> int32x4_t {
            let mut dots = self.zero();
            for (codes, q) in codes.into_iter().zip(q) {
                dots = self.add_dot(dots, codes, q);
            }
            // SAFETY: as above.
            unsafe { vmlaq_n_s32(sums, dots, i32::from(*scale)) }
        }

        #[inline(always)]
        fn to_f(self, v: int32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vcvtq_f32_s32(v) }
        }

        #[inline(always)]
        fn halves(self, bits: [u16; 4]) -> float32x4_t {
            // SAFETY: as above.
            unsafe { widen_halves(vld1_u16(bits.as_ptr())) }
        }

        #[inline(always)]
        fn splat(self, v: f32) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vdupq_n_f32(v) }
        }

        #[inline(always)]
        fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vaddq_f32(a, b) }
        }

        #[inline(always)]
        fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vsubq_f32(a, b) }
        }

        #[inline(always)]
        fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
            // SAFETY: as above.
            unsafe { vmulq_f32(a, b) }
        }

        #[inline(always)]
        fn to_array(self, v: float32x4_t) -> [f32; 4] {
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

impl Vector for Neon {
    common!();

    #[inline(always)]
    fn add_dot(self, sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        self.add_dot_signed(sums, codes, q)
    }

    #[inline(always)]
    fn add_dot_by_fours(self, sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        let [codes, q] = signed(codes, q);
        // SAFETY: as above. Two products of codes up to 127 fit 16 bits.
        unsafe {
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(q));
            vpadalq_s16(sums, vpaddq_s16(low, vmull_high_s8(codes, q)))
        }
    }

    #[inline(always)]
    fn add_dot_signed(self, sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        let [codes, q] = signed(codes, q);
        // SAFETY: as above. Two products of at most 128 · 127 fit 16 bits.
        unsafe {
            let low = vmull_s8(vget_low_s8(codes), vget_low_s8(q));
            vpadalq_s16(sums, vmlal_high_s8(low, codes, q))
        }
    }
}

impl Vector for NeonDot {
    common!();

    #[inline(always)]
    fn add_dot(self, sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        let [codes, q] = signed(codes, q);
        // SAFETY: the token is made only where there are dot products.
        unsafe { sdot(sums, codes, q) }
    }

    #[inline(always)]
    fn add_dot_by_fours(self, sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        self.add_dot(sums, codes, q)
    }

    #[inline(always)]
    fn add_dot_signed(self, sums: int32x4_t, codes: uint8x16_t, q: uint8x16_t) -> int32x4_t {
        self.add_dot(sums, codes, q)
    }
}
