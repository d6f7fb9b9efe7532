//! Sixteen blocks of values, one per lane, and the weights of their errors.

use super::k_fit::SUPER;
use super::lanes::{Floats, LANES, Lanes, Simd};

/// How the error of an element is weighted. These are the measures of the reference quantizers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Weights {
    /// All the same.
    Flat,
    /// The magnitude, and the root mean square of the block.
    Magnitude,
    /// The square.
    Power,
}

/// The elements of the blocks, and their weights.
pub(super) struct Batch<S: Simd, const N: usize> {
    /// Element `j` of all blocks.
    pub(super) x: [S::F; N],
    pub(super) w: [S::F; N],
}

impl<S: Simd, const N: usize> Batch<S, N> {
    /// Blocks of `N` values; lanes without a block hold zeros. Weights are relative to a measure of each `G`
    /// values, a multiple of `N`.
    #[inline(always)]
    pub(super) fn new<const G: usize>(simd: S, groups: &[[f32; G]], weights: Weights) -> Self {
        let mut lanes = [[0.0; LANES]; N];
        for (lane, block) in groups.as_flattened().as_chunks::<N>().0.iter().enumerate() {
            for (lanes, &value) in lanes.iter_mut().zip(block) {
                lanes[lane] = value;
            }
        }
        let mut x = [simd.splat(0.0); N];
        for (x, lanes) in x.iter_mut().zip(&lanes) {
            *x = simd.load(lanes);
        }
        let mut w = [simd.splat(1.0); N];
        if weights == Weights::Flat {
            return Batch { x, w };
        }

        // Relative to the largest value of the group, so that squares of small ones don't vanish.
        let zero = simd.splat(0.0);
        let mut top = zero;
        for x in &x {
            top = x.max(zero - *x).max(top);
        }
        let unit = simd.load(&units::<G, N>(top.to_array()));
        let mut power = zero;
        for (w, x) in w.iter_mut().zip(&x) {
            let relative = *x * unit;
            *w = relative * relative;
            power = power + *w;
        }
        if weights == Weights::Magnitude {
            let mean = simd.load(&power.to_array().map(|power| (power / N as f32).sqrt()));
            for (w, x) in w.iter_mut().zip(&x) {
                let relative = *x * unit;
                *w = mean + relative.max(zero - relative);
            }
        }
        Batch { x, w }
    }
}

/// One over the largest of `tops` in each group, or 0.
#[inline(always)]
fn units<const G: usize, const N: usize>(tops: Lanes) -> Lanes {
    let mut units = [0.0; LANES];
    let lanes = (G / N).min(LANES);
    for (units, tops) in units.chunks_mut(lanes).zip(tops.chunks(lanes)) {
        let top = tops
            .iter()
            .fold(0.0f32, |top, &t| if t > top { t } else { top });
        units.fill(if top > 0.0 { 1.0 / top } else { 0.0 });
    }
    units
}

/// The codes of each block.
#[inline(always)]
pub(super) fn codes_by_block<V: Floats, const N: usize>(codes: &[V; N]) -> [[i8; N]; LANES] {
    let mut blocks = [[0; N]; LANES];
    for (j, codes) in codes.iter().enumerate() {
        for (block, code) in blocks.iter_mut().zip(codes.to_array()) {
            block[j] = code as i32 as i8;
        }
    }
    blocks
}

/// Super-blocks that fill the lanes with blocks of `n`.
pub(super) const fn supers_at_once(n: usize) -> usize {
    LANES * n / SUPER
}
