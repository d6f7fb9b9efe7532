//! Float products with WebAssembly's vectors: a group is four registers.

use std::arch::wasm32::*;

use super::lanes::{Group, Registers};
use super::rounding::BF16_EXPONENT;
use crate::gemm::integer::vector::wasm::widen_halves;
#[cfg(target_feature = "relaxed-simd")]
use crate::simd::wasm::Relaxed;
use crate::simd::wasm::Simd128;

/// With products rounded before they are added, which changes nothing where they are exact.
pub(super) mod simd128 {
    use super::super::lanes::kernel;

    kernel! {
        token: super::Simd128, parts: 4,
        tile: [1, 2],
        direct: [1 => 2, 2 => 1],
        most_direct: 4,
    }
}

/// With exact products fused where the machine can.
#[cfg(target_feature = "relaxed-simd")]
pub(super) mod relaxed {
    use super::super::lanes::kernel;

    kernel! {
        token: super::Relaxed, parts: 4,
        tile: [1, 2],
        direct: [1 => 2, 2 => 1],
        most_direct: 4,
    }
}

/// Shared by the two.
macro_rules! common {
    () => {
        type Part = v128;

        #[inline(always)]
        fn zero(self) -> v128 {
            f32x4_splat(0.0)
        }

        #[inline(always)]
        fn load(self, group: &Group, part: usize) -> v128 {
            assert!(part < 4);
            // SAFETY: a group has four parts of 16 bytes.
            unsafe { v128_load(group.0.as_ptr().add(4 * part).cast()) }
        }

        #[inline(always)]
        fn store(self, value: v128, group: &mut Group, part: usize) {
            assert!(part < 4);
            // SAFETY: as in `load`.
            unsafe { v128_store(group.0.as_mut_ptr().add(4 * part).cast(), value) }
        }

        #[inline(always)]
        fn f32(self, bytes: &[u8; 64]) -> [v128; 4] {
            let at: *const v128 = bytes.as_ptr().cast();
            // SAFETY: 64 bytes; alignment doesn't matter.
            unsafe {
                [
                    v128_load(at),
                    v128_load(at.add(1)),
                    v128_load(at.add(2)),
                    v128_load(at.add(3)),
                ]
            }
        }

        #[inline(always)]
        fn f16(self, bytes: &[u8; 32]) -> [v128; 4] {
            let [a, b] = load_pair(bytes);
            let exponent = i16x8_splat(0x7c00);
            let no_number = |v| i16x8_eq(v128_and(v, exponent), exponent);
            if v128_any_true(v128_or(no_number(a), no_number(b))) {
                return widen_all(a, b);
            }
            [
                widen_finite(i32x4_extend_low_i16x8(a)),
                widen_finite(i32x4_extend_high_i16x8(a)),
                widen_finite(i32x4_extend_low_i16x8(b)),
                widen_finite(i32x4_extend_high_i16x8(b)),
            ]
        }

        #[inline(always)]
        fn bf16(self, bytes: &[u8; 32]) -> [v128; 4] {
            // Weights whose masked exponent is 0 become zeros.
            let flush = |v| {
                let exponent = v128_and(v, i16x8_splat(BF16_EXPONENT));
                v128_andnot(v, i16x8_eq(exponent, i16x8_splat(0)))
            };
            let [a, b] = load_pair(bytes);
            let (a, b) = (flush(a), flush(b));
            [
                u32x4_shl(u32x4_extend_low_u16x8(a), 16),
                u32x4_shl(u32x4_extend_high_u16x8(a), 16),
                u32x4_shl(u32x4_extend_low_u16x8(b), 16),
                u32x4_shl(u32x4_extend_high_u16x8(b), 16),
            ]
        }

        #[inline(always)]
        fn add_rounded(self, acc: v128, w: v128, x: v128) -> v128 {
            f32x4_add(acc, f32x4_mul(w, x))
        }

        #[inline(always)]
        fn sum(self, [a, b, c, d]: [v128; 4]) -> f32 {
            // Halves upon halves, as everywhere.
            let v = f32x4_add(f32x4_add(a, c), f32x4_add(b, d));
            let v = f32x4_add(v, i32x4_shuffle::<2, 3, 2, 3>(v, v));
            f32x4_extract_lane::<0>(v) + f32x4_extract_lane::<1>(v)
        }
    };
}

impl Registers<4> for Simd128 {
    common!();

    #[inline(always)]
    fn add_exact(self, acc: v128, w: v128, x: v128) -> v128 {
        self.add_rounded(acc, w, x)
    }
}

#[cfg(target_feature = "relaxed-simd")]
impl Registers<4> for Relaxed {
    common!();

    #[inline(always)]
    fn add_exact(self, acc: v128, w: v128, x: v128) -> v128 {
        // Engines may fuse or not.
        f32x4_relaxed_madd(w, x, acc)
    }
}

/// Sixteen bytes at a time.
#[inline(always)]
fn load_pair(bytes: &[u8; 32]) -> [v128; 2] {
    let at: *const v128 = bytes.as_ptr().cast();
    // SAFETY: 32 bytes; alignment doesn't matter.
    unsafe { [v128_load(at), v128_load(at.add(1))] }
}

/// f16 whose bits were widened with their signs, neither infinite nor NaN.
#[inline(always)]
fn widen_finite(bits: v128) -> v128 {
    let bits = v128_and(i32x4_shl(bits, 13), u32x4_splat(0x8fff_e000));
    // Read as an f32, the exponent is too small by 2^112; subnormals come out right, too.
    f32x4_mul(bits, f32x4_splat(f32::from_bits((127 + 112) << 23)))
}

/// Any f16.
#[cold]
#[inline(never)]
fn widen_all(a: v128, b: v128) -> [v128; 4] {
    [
        widen_halves(u32x4_extend_low_u16x8(a)),
        widen_halves(u32x4_extend_high_u16x8(a)),
        widen_halves(u32x4_extend_low_u16x8(b)),
        widen_halves(u32x4_extend_high_u16x8(b)),
    ]
}
