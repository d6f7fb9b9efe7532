//! Float products with NEON: a group is four registers.

use std::arch::aarch64::*;

use super::lanes::{Group, Registers, kernel};
use super::rounding::BF16_EXPONENT;
use crate::arm::widen_halves;
use crate::simd::neon::Neon;

kernel! {
    token: Neon::new(), parts: 4,
    tile: [1, 2, 3, 4],
    direct: [1 => 4, 2 => 2, 3 => 1, 4 => 1],
    most_direct: 8,
}

impl Registers<4> for Neon {
    type Part = float32x4_t;

    #[inline(always)]
    fn zero(self) -> float32x4_t {
        // SAFETY: every machine of this target has NEON; so in all functions here.
        unsafe { vdupq_n_f32(0.0) }
    }

    #[inline(always)]
    fn load(self, group: &Group, part: usize) -> float32x4_t {
        assert!(part < 4);
        // SAFETY: a group has four parts of 16 bytes.
        unsafe { vld1q_f32(group.0.as_ptr().add(4 * part)) }
    }

    #[inline(always)]
    fn store(self, value: float32x4_t, group: &mut Group, part: usize) {
        assert!(part < 4);
        // SAFETY: as in `load`.
        unsafe { vst1q_f32(group.0.as_mut_ptr().add(4 * part), value) }
    }

    #[inline(always)]
    fn f32(self, bytes: &[u8; 64]) -> [float32x4_t; 4] {
        let at = bytes.as_ptr();
        // SAFETY: 64 bytes are there, at any alignment.
        unsafe {
            [
                vreinterpretq_f32_u8(vld1q_u8(at)),
                vreinterpretq_f32_u8(vld1q_u8(at.add(16))),
                vreinterpretq_f32_u8(vld1q_u8(at.add(32))),
                vreinterpretq_f32_u8(vld1q_u8(at.add(48))),
            ]
        }
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> [float32x4_t; 4] {
        // SAFETY: as in `zero`.
        unsafe {
            let [a, b] = load_halves(bytes);
            [
                widen_halves(vget_low_u16(a)),
                widen_halves(vget_high_u16(a)),
                widen_halves(vget_low_u16(b)),
                widen_halves(vget_high_u16(b)),
            ]
        }
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> [float32x4_t; 4] {
        // SAFETY: as in `zero`.
        unsafe {
            // Weights whose masked exponent is 0 become zeros.
            let exponent = vdupq_n_u16(BF16_EXPONENT as u16);
            let [a, b] = load_halves(bytes).map(|v| vandq_u16(v, vtstq_u16(v, exponent)));
            [
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(a))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(a)),
                vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(b))),
                vreinterpretq_f32_u32(vshll_high_n_u16::<16>(b)),
            ]
        }
    }

    #[inline(always)]
    fn add_exact(self, acc: float32x4_t, w: float32x4_t, x: float32x4_t) -> float32x4_t {
        // SAFETY: as in `zero`.
        unsafe { vfmaq_f32(acc, w, x) }
    }

    #[inline(always)]
    fn add_rounded(self, acc: float32x4_t, w: float32x4_t, x: float32x4_t) -> float32x4_t {
        // SAFETY: as in `zero`.
        unsafe { vaddq_f32(acc, vmulq_f32(w, x)) }
    }

    #[inline(always)]
    fn sum(self, [a, b, c, d]: [float32x4_t; 4]) -> f32 {
        // SAFETY: as in `zero`. Halves upon halves, as everywhere.
        unsafe {
            let v = vaddq_f32(vaddq_f32(a, c), vaddq_f32(b, d));
            vpadds_f32(vadd_f32(vget_low_f32(v), vget_high_f32(v)))
        }
    }
}

/// Sixteen numbers of 16 bits.
#[inline(always)]
fn load_halves(bytes: &[u8; 32]) -> [uint16x8_t; 2] {
    let at = bytes.as_ptr();
    // SAFETY: every machine of this target has NEON; 32 bytes are there, at any alignment.
    unsafe {
        [
            vreinterpretq_u16_u8(vld1q_u8(at)),
            vreinterpretq_u16_u8(vld1q_u8(at.add(16))),
        ]
    }
}
