//! Float products in plain Rust: the reference for all other kernels.

use super::lanes::{Group, LANES, Registers, kernel};
use super::rounding::bf16_weight;
use crate::dot::sum_lanes;
use crate::quant::f16_to_f32;

kernel! {
    Plain, 1,
    tile: [1, 2],
    direct: [1 => 2, 2 => 2],
    most_direct: 4,
}

/// Arrays, which the compiler maps to the available registers.
struct Plain;

impl Registers<1> for Plain {
    type Part = [f32; LANES];

    #[inline(always)]
    unsafe fn zero() -> [f32; LANES] {
        [0.0; LANES]
    }

    #[inline(always)]
    unsafe fn load(group: &Group, _: usize) -> [f32; LANES] {
        group.0
    }

    #[inline(always)]
    unsafe fn store(value: [f32; LANES], group: &mut Group, _: usize) {
        group.0 = value;
    }

    #[inline(always)]
    unsafe fn f32(bytes: &[u8; 64]) -> [[f32; LANES]; 1] {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks().0) {
            *lane = f32::from_le_bytes(*bytes);
        }
        [lanes]
    }

    #[inline(always)]
    unsafe fn f16(bytes: &[u8; 32]) -> [[f32; LANES]; 1] {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks().0) {
            *lane = f16_to_f32(u16::from_le_bytes(*bytes));
        }
        [lanes]
    }

    #[inline(always)]
    unsafe fn bf16(bytes: &[u8; 32]) -> [[f32; LANES]; 1] {
        let mut lanes = [0.0; LANES];
        for (lane, bytes) in lanes.iter_mut().zip(bytes.as_chunks().0) {
            *lane = bf16_weight(u16::from_le_bytes(*bytes));
        }
        [lanes]
    }

    #[inline(always)]
    unsafe fn add_exact(acc: [f32; LANES], w: [f32; LANES], x: [f32; LANES]) -> [f32; LANES] {
        // SAFETY: any machine has what this needs.
        unsafe { Self::add_rounded(acc, w, x) }
    }

    #[inline(always)]
    unsafe fn add_rounded(mut acc: [f32; LANES], w: [f32; LANES], x: [f32; LANES]) -> [f32; LANES] {
        for (acc, (w, x)) in acc.iter_mut().zip(w.iter().zip(x)) {
            *acc += w * x;
        }
        acc
    }

    #[inline(always)]
    unsafe fn sum([lanes]: [[f32; LANES]; 1]) -> f32 {
        sum_lanes(lanes)
    }
}
