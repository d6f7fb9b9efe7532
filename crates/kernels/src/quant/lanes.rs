//! Sixteen blocks side by side, one to a lane.
//!
//! A search tries many scales for every block, and for each of them sums up over the block. With a
//! block to a lane no sum crosses lanes: whatever the width of the registers, each block is summed in
//! the order of its elements, and every instruction set finds the same scales.

use super::k_fit::SUPER;

/// Blocks that are searched together.
pub(super) const LANES: usize = 16;

/// A number for each block.
pub(super) type Lanes = [f32; LANES];

/// How much the error of an element counts. These are the measures of the reference quantisers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Weights {
    /// All alike.
    Flat,
    /// The magnitude, and the root mean square of the block.
    Magnitude,
    /// The square.
    Power,
}

/// The elements of the blocks, and what they weigh.
pub(super) struct Batch<const S: usize> {
    /// Element `j` of block `l` is `x[j][l]`.
    pub(super) x: [Lanes; S],
    pub(super) w: [Lanes; S],
}

impl<const S: usize> Batch<S> {
    /// Batches of up to `LANES · S / G` groups of `G` values, which share what their weights are
    /// measured against; lanes without a block hold zeros. `G` is a multiple of `S`.
    #[inline(always)]
    pub(super) fn new<const G: usize>(groups: &[[f32; G]], weights: Weights) -> Self {
        let mut x = [[0.0; LANES]; S];
        let mut unit = [0.0; LANES];
        for (g, group) in groups.iter().enumerate() {
            let mut top = 0.0f32;
            for (b, block) in group.as_chunks::<S>().0.iter().enumerate() {
                let lane = g * (G / S) + b;
                for (x, &value) in x.iter_mut().zip(block) {
                    x[lane] = value;
                    top = if value.abs() > top { value.abs() } else { top };
                }
            }
            // Relative to the largest value of the group, so that squares of small ones don't vanish.
            let inverse = if top > 0.0 { 1.0 / top } else { 0.0 };
            unit[g * (G / S)..(g + 1) * (G / S)].fill(inverse);
        }
        let mut w = [[1.0; LANES]; S];
        match weights {
            Weights::Flat => {}
            Weights::Magnitude => {
                let mut power = [0.0; LANES];
                for x in &x {
                    for l in 0..LANES {
                        let relative = x[l] * unit[l];
                        power[l] += relative * relative;
                    }
                }
                let mean = power.map(|power| (power / S as f32).sqrt());
                for (w, x) in w.iter_mut().zip(&x) {
                    for l in 0..LANES {
                        w[l] = mean[l] + (x[l] * unit[l]).abs();
                    }
                }
            }
            Weights::Power => {
                for (w, x) in w.iter_mut().zip(&x) {
                    for l in 0..LANES {
                        let relative = x[l] * unit[l];
                        w[l] = relative * relative;
                    }
                }
            }
        }
        Batch { x, w }
    }
}

/// The codes of a batch as the blocks they belong to.
#[inline(always)]
pub(super) fn blocks_of<const S: usize>(codes: &[Lanes; S], lane: usize, out: &mut [i8; S]) {
    for (out, codes) in out.iter_mut().zip(codes) {
        *out = codes[lane] as i32 as i8;
    }
}

/// Groups of 256 values that fill the lanes with blocks of `S`.
pub(super) const fn supers_at_once(s: usize) -> usize {
    LANES * s / SUPER
}

/// Rounds to an integer, halves to even; for magnitudes below 2²².
#[inline(always)]
pub(super) fn round(v: f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0;
    (v + ROUNDER) - ROUNDER
}

/// As [`f32::clamp`] without its care for NaN, which costs instructions; NaN becomes `low`.
#[inline(always)]
pub(super) fn clamp(v: f32, low: f32, high: f32) -> f32 {
    let v = if v > low { v } else { low };
    if v < high { v } else { high }
}

/// `1 / v`, or 0 for 0.
#[inline(always)]
pub(super) fn inverse(v: f32) -> f32 {
    if v != 0.0 { 1.0 / v } else { 0.0 }
}
