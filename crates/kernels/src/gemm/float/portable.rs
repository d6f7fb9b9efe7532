//! Float products in plain Rust: the reference for all other kernels.

use super::lanes::{Group, LANES, Registers, kernel};
use super::rounding::bf16_weight;
use crate::dot::sum_lanes;
use crate::quant::f16_to_f32;
use crate::simd::Portable;

kernel! {
    token: Portable, parts: 1,
    tile: [1, 2],
    direct: [1 => 2, 2 => 2],
    most_direct: 4,
}

/// Arrays, which the compiler maps to the available registers.
impl Registers<1> for Portable {
    type Part = [f32; LANES];

    #[inline(always)]
    fn zero(self) -> [f32; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    fn load(self, group: &Group, _: usize) -> [f32; LANES] {
        group.0
    }

    #[inline(always)]
    fn store(self, value: [f32; LANES], group: &mut Group, _: usize) {
        group.0 = value;
    }

    #[inline(always)]
    fn f32(self, bytes: &[u8; 64]) -> [[f32; LANES]; 1] {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks().0) {
            *lane = f32::from_le_bytes(*bytes);
        }
        [lanes]
    }

    #[inline(always)]
    fn f16(self, bytes: &[u8; 32]) -> [[f32; LANES]; 1] {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks().0) {
            *lane = f16_to_f32(u16::from_le_bytes(*bytes));
        }
        [lanes]
    }

    #[inline(always)]
    fn bf16(self, bytes: &[u8; 32]) -> [[f32; LANES]; 1] {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks().0) {
            *lane = bf16_weight(u16::from_le_bytes(*bytes));
        }
        [lanes]
    }

    #[inline(always)]
    fn add_exact(self, acc: [f32; LANES], w: [f32; LANES], x: [f32; LANES]) -> [f32; LANES] {
        self.add_rounded(acc, w, x)
    }

    #[inline(always)]
    fn add_rounded(self, mut acc: [f32; LANES], w: [f32; LANES], x: [f32; LANES]) -> [f32; LANES] {
        for (acc, (w, x)) in acc.iter_mut().zip(w.iter().zip(x)) {
            *acc += w * x;
        }
        acc
    }

    #[inline(always)]
    fn sum(self, [lanes]: [[f32; LANES]; 1]) -> f32 {
        sum_lanes(lanes)
    }
}
