//! The search for signed scales: Q3_K, Q6_K and Q4_0.
//!
//! As in [`k_affine`](super::k_affine), without minimums. Codes reach one step further below zero
//! than above, so scales of either sign are tried.

use super::batch::{Batch, Weights, codes_by_block, supers_at_once};
use super::float::{round_to_f16, round_to_f16_factor};
use super::k_fit::{MIN_EXTENT, SUPER, Symmetric};
use super::lanes::{Floats, LANES, Lanes, NOTABLE, Simd, inverse, nearest};

/// The limits of a type, and the error measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Codes are `−half..half`.
    pub(super) half: f32,
    /// Scales are `−half_scale..half_scale`.
    pub(super) half_scale: f32,
    pub(super) weights: Weights,
}

/// Values of a sub-block of the K types.
const SUB: usize = 16;

/// Steps from zero to the largest magnitude more than `half`.
const STRETCHES: [f32; 12] = [
    0.0, -0.8, -0.5, -0.25, 0.25, 0.5, 0.75, 1.0, 1.33, 1.66, 2.0, 2.5,
];

/// Integer scales that are tried around the one nearest to the real scale. With many levels, which of them
/// fits best is a matter of chance.
const NEIGHBOURS: [f32; 7] = [0.0, -1.0, 1.0, -2.0, 2.0, -3.0, 3.0];

/// Iterations of fitting the best stretch's codes and scale to each other.
const REFINEMENTS: usize = 2;

/// Iterations of fitting scales and the factor against each other.
const ROUNDS: usize = 2;

/// Fits super-blocks and calls `each` with every one in order.
#[inline(always)]
pub(super) fn fit<S: Simd>(
    simd: S,
    values: &[[f32; SUPER]],
    limits: Limits,
    mut each: impl FnMut(usize, &Symmetric),
) {
    const { assert!(supers_at_once(SUB) == 1) }
    for (i, values) in values.iter().enumerate() {
        let batch = Batch::new(simd, std::slice::from_ref(values), limits.weights);
        let search = Search::<S, SUB>::new(simd, batch, limits.half);
        let (d, scales) = search.run(limits.half_scale);
        let codes = codes_by_block(&search.codes_of(simd.splat(d) * scales));
        let mut fit = Symmetric {
            d,
            scales: scales.to_array().map(|scale| scale as i32 as i8),
            codes: [0; SUPER],
        };
        fit.codes.copy_from_slice(codes.as_flattened());
        each(i, &fit);
    }
}

/// Fits blocks that have one f16 scale each, and calls `each` with the scale and the codes of every
/// one in order. No error is larger than with the scale that gives the largest magnitude the code
/// `−half`.
#[inline(always)]
pub(super) fn fit_blocks<S: Simd, const N: usize>(
    simd: S,
    values: &[[f32; N]],
    half: f32,
    mut each: impl FnMut(usize, f32, &[i8; N]),
) {
    for (group, values) in values.chunks(LANES).enumerate() {
        let batch = Batch::new(simd, values, Weights::Flat);
        let search = Search::<S, N>::new(simd, batch, half);
        let rounded = |scale: S::F| simd.load(&scale.to_array().map(round_to_f16));
        let usual = rounded(search.top / search.low);
        let found = rounded(search.fit_alone());
        let (usual_error, error) = (search.error_of(usual), search.error_of(found));
        let scale = usual_error.if_greater(error, found, usual);
        let codes = codes_by_block(&search.codes_of(scale));
        let scale = scale.to_array();
        for i in 0..values.len() {
            each(group * LANES + i, scale[i], &codes[i]);
        }
    }
}

/// The search for one batch.
struct Search<S: Simd, const N: usize> {
    simd: S,
    batch: Batch<S, N>,
    /// The value of largest magnitude of each block.
    top: S::F,
    /// The lowest code, `−half`.
    low: S::F,
    /// The highest code.
    high: S::F,
}

impl<S: Simd, const N: usize> Search<S, N> {
    #[inline(always)]
    fn new(simd: S, batch: Batch<S, N>, half: f32) -> Self {
        let zero = simd.splat(0.0);
        let mut top = zero;
        for x in &batch.x {
            let (new, old) = (x.max(zero - *x), top.max(zero - top));
            top = new.if_greater(old, *x, top);
        }
        Search {
            simd,
            batch,
            top,
            low: simd.splat(-half),
            high: simd.splat(half - 1.0),
        }
    }

    /// The real scale that fits each block best; of either sign, as the codes are asymmetric.
    #[inline(always)]
    fn fit_alone(&self) -> S::F {
        let simd = self.simd;
        let zero = simd.splat(0.0);
        let magnitude = self.top.max(zero - self.top);
        let min_extent = simd.splat(MIN_EXTENT);
        let per_top = magnitude.if_greater(min_extent, simd.splat(1.0) / self.top, zero);
        let mut best = (zero, zero);
        for attempt in 0..2 * STRETCHES.len() + REFINEMENTS {
            let per_step = match STRETCHES.get(attempt / 2) {
                Some(&more) => {
                    let steps = self.low - simd.splat(more);
                    let steps = if attempt % 2 == 0 {
                        steps
                    } else {
                        zero - steps
                    };
                    steps * per_top
                }
                None => inverse(simd, best.0),
            };
            self.improve(&mut best, per_step);
        }
        best.0
    }

    /// Solves for the codes nearest to `x · per_step`, and keeps improvements: the scale, and by how much the
    /// weighted squared error is less than that of zeros.
    #[inline(always)]
    fn improve(&self, best: &mut (S::F, S::F), per_step: S::F) {
        let (qq, qx) = self.sums_of_codes(per_step);
        // Comparisons with NaN are false: where all codes are zero, nothing improves.
        let scale = qx / qq;
        let gain = qx * scale;
        let enough = best.1 * self.simd.splat(NOTABLE);
        best.0 = gain.if_greater(enough, scale, best.0);
        best.1 = gain.if_greater(enough, gain, best.1);
    }

    /// `Σ w·q²` and `Σ w·q·x` for the codes `q` nearest to `x · per_step`.
    #[inline(always)]
    fn sums_of_codes(&self, per_step: S::F) -> (S::F, S::F) {
        let (mut qq, mut qx) = (self.simd.splat(0.0), self.simd.splat(0.0));
        for (x, w) in self.batch.x.iter().zip(&self.batch.w) {
            let code = nearest(self.simd, *x * per_step, self.low, self.high);
            let weighted = *w * code;
            qq = qq + weighted * code;
            qx = qx + weighted * *x;
        }
        (qq, qx)
    }

    /// The weighted squared error of the nearest codes.
    #[inline(always)]
    fn error_of(&self, scale: S::F) -> S::F {
        let per_step = inverse(self.simd, scale);
        let mut error = self.simd.splat(0.0);
        for (x, w) in self.batch.x.iter().zip(&self.batch.w) {
            let off = scale * nearest(self.simd, *x * per_step, self.low, self.high) - *x;
            error = error + *w * (off * off);
        }
        error
    }

    /// The codes nearest to `x / scale`.
    #[inline(always)]
    fn codes_of(&self, scale: S::F) -> [S::F; N] {
        let per_step = inverse(self.simd, scale);
        let mut codes = self.batch.x;
        for code in &mut codes {
            *code = nearest(self.simd, *code * per_step, self.low, self.high);
        }
        codes
    }
}

impl<S: Simd> Search<S, SUB> {
    /// The factor of a super-block and its integer scales.
    #[inline(always)]
    fn run(&self, half_scale: f32) -> (f32, S::F) {
        let scale = self.fit_alone();
        // The negative end reaches one step further, so the widest sub-block is put there.
        let widest = |top: f32, s: f32| if s.abs() > top.abs() { s } else { top };
        let top = scale.to_array().into_iter().fold(0.0, widest);
        let mut d = round_to_f16_factor(top / -half_scale);
        let (mut lowest, mut best) = (f32::INFINITY, (d, self.simd.splat(0.0)));
        for round in 0..ROUNDS {
            let (scales, error) = self.round_to_factor(scale, d, half_scale);
            let error = error.to_array().iter().fold(0.0, |sum, e| sum + e);
            if error < lowest {
                (lowest, best) = (error, (d, scales));
            }
            if round + 1 < ROUNDS {
                d = self.refit(best);
            }
        }
        best
    }

    /// The integer scales near the real ones that give the smallest errors, and the errors.
    #[inline(always)]
    fn round_to_factor(&self, scale: S::F, d: f32, half_scale: f32) -> (S::F, S::F) {
        let simd = self.simd;
        let (low, high) = (simd.splat(-half_scale), simd.splat(half_scale - 1.0));
        let d = simd.splat(d);
        let near = nearest(simd, scale * inverse(simd, d), low, high);
        let (mut best, mut lowest) = (simd.splat(0.0), simd.splat(f32::INFINITY));
        for step in NEIGHBOURS {
            let this = (near + simd.splat(step)).max(low).min(high);
            let error = self.error_of(d * this);
            best = lowest.if_greater(error, this, best);
            lowest = lowest.if_greater(error, error, lowest);
        }
        (best, lowest)
    }

    /// The f16 factor that fits the super-block best, given all integers.
    #[inline(always)]
    fn refit(&self, (d, scales): (f32, S::F)) -> f32 {
        /// The largest finite f16.
        const MAX_FACTOR: f32 = 65504.0;
        let (qq, qx) = self.sums_of_codes(inverse(self.simd, self.simd.splat(d) * scales));
        let sum = |of: Lanes| of.iter().fold(0.0, |sum, v| sum + v);
        // A comparison with NaN is false.
        let new = sum((scales * qx).to_array()) / sum((scales * scales * qq).to_array());
        if new.abs() <= MAX_FACTOR {
            round_to_f16(new)
        } else {
            d
        }
    }
}
