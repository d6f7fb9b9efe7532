//! The search for scales and minimums: Q2_K, Q4_K and Q5_K.
//!
//! First each sub-block is fitted separately with real numbers, then the integer scales and minimums against
//! the rounded factors of the super-block, then the factors against everything else.

use std::ops::Range;

use super::batch::{Batch, Weights, codes_by_block, supers_at_once};
use super::float::{f16_neighbours, round_to_f16, round_to_f16_factor};
use super::k_fit::{Affine, MIN_EXTENT, SUPER};
use super::lanes::{Floats, LANES, Lanes, NOTABLE, Simd, inverse, nearest};

/// The limits of a type, and the error measure.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Codes are `0..=max_code`.
    pub(super) max_code: f32,
    /// Scales and minimums are `0..=max_scale`.
    pub(super) max_scale: f32,
    pub(super) weights: Weights,
}

/// How the values of a sub-block are first spread over the codes: extra steps, and where the smallest value
/// is put, in steps. Outliers affect where the levels are best placed among the many small values, and
/// whether the ends are clipped.
const SPREADS: [(f32, f32); 24] = [
    (-1.0, 0.0),
    (0.0, 0.0),
    (-0.6, 0.0),
    (-0.3, 0.0),
    (0.3, 0.0),
    (0.6, 0.0),
    (0.9, 0.0),
    (1.3, 0.0),
    (1.8, 0.0),
    (2.4, 0.0),
    (-0.5, 0.5),
    (0.0, 0.5),
    (0.5, 0.5),
    (1.0, 0.5),
    (0.0, -0.5),
    (0.5, -0.5),
    (1.0, -0.5),
    (1.5, -0.5),
    (2.0, -0.5),
    (0.0, 0.25),
    (0.5, 0.25),
    (0.5, -0.25),
    (1.0, -0.25),
    (2.0, -1.0),
];

/// Iterations of fitting the best spread's codes and scale to each other.
const REFINEMENTS: usize = 3;

/// Iterations of fitting scales and factors against each other.
const ROUNDS: usize = 2;

/// Fits super-blocks with sub-blocks of `N` values and calls `each` with every one in order.
#[inline(always)]
pub(super) fn fit<S: Simd, const N: usize>(
    simd: S,
    values: &[[f32; SUPER]],
    limits: Limits,
    mut each: impl FnMut(usize, &Affine),
) {
    let at_once = supers_at_once(N);
    for (group, values) in values.chunks(at_once).enumerate() {
        let search = Search::<S, N> {
            simd,
            batch: Batch::new(simd, values, limits.weights),
            max_code: simd.splat(limits.max_code),
            max_scale: limits.max_scale,
        };
        let found = search.run();
        let codes = codes_by_block(&search.codes_of(&found));
        let [d, dmin, scale, min] =
            [found.d, found.dmin, found.scale, found.min].map(S::F::to_array);
        for i in 0..values.len() {
            let first = i * (SUPER / N);
            let mut fit = Affine {
                d: d[first],
                dmin: dmin[first],
                scales: [0; 16],
                mins: [0; 16],
                codes: [0; SUPER],
            };
            for (s, out) in fit.codes.as_chunks_mut::<N>().0.iter_mut().enumerate() {
                fit.scales[s] = scale[first + s] as u8;
                fit.mins[s] = min[first + s] as u8;
                *out = codes[first + s].map(|code| code as u8);
            }
            each(group * at_once + i, &fit);
        }
    }
}

/// The lanes of each super-block with sub-blocks of `n` values.
#[inline(always)]
fn lanes_of_supers(n: usize) -> impl Iterator<Item = Range<usize>> {
    let lanes = SUPER / n;
    (0..LANES / lanes).map(move |i| i * lanes..(i + 1) * lanes)
}

/// The search for one batch.
struct Search<S: Simd, const N: usize> {
    simd: S,
    batch: Batch<S, N>,
    max_code: S::F,
    max_scale: f32,
}

/// The numbers found for a batch. All sub-blocks of a super-block have the same factors.
#[derive(Clone, Copy)]
struct Found<V> {
    d: V,
    dmin: V,
    scale: V,
    min: V,
    error: V,
}

/// `y ≈ scale·code − offset`.
#[derive(Clone, Copy)]
struct Solution<V> {
    scale: V,
    offset: V,
    /// By how much the weighted squared error is less than that of `y ≈ 0`.
    gain: V,
}

/// Distances of the values from the lowest one, and weighted sums of them.
struct Distances<V, const N: usize> {
    y: [V; N],
    low: V,
    sum_w: V,
    sum_y: V,
}

impl<S: Simd, const N: usize> Search<S, N> {
    #[inline(always)]
    fn run(&self) -> Found<S::F> {
        let simd = self.simd;
        let (scale, min) = self.fit_alone();
        let (scales, mins) = (scale.to_array(), min.to_array());
        let (mut d, mut dmin) = ([0.0; LANES], [0.0; LANES]);
        for lanes in lanes_of_supers(N) {
            let largest = |of: &Lanes| of[lanes.clone()].iter().fold(0.0f32, |top, &v| top.max(v));
            d[lanes.clone()].fill(round_to_f16_factor(largest(&scales) / self.max_scale));
            dmin[lanes.clone()].fill(round_to_f16_factor(largest(&mins) / self.max_scale));
        }

        let zero = simd.splat(0.0);
        let mut best = Found {
            d: simd.load(&d),
            dmin: simd.load(&dmin),
            scale: zero,
            min: zero,
            error: simd.splat(f32::INFINITY),
        };
        for round in 0..ROUNDS {
            let factors = match round {
                0 => (best.d, best.dmin),
                _ => self.refit(&best),
            };
            let next = self.round_to_factors((scale, min), factors);
            let (new, old) = (next.error.to_array(), best.error.to_array());
            let (mut new_sums, mut old_sums) = ([0.0; LANES], [0.0; LANES]);
            for lanes in lanes_of_supers(N) {
                let sum = |of: &Lanes| of[lanes.clone()].iter().fold(0.0, |sum, v| sum + v);
                new_sums[lanes.clone()].fill(sum(&new));
                old_sums[lanes.clone()].fill(sum(&old));
            }
            let (new, old) = (simd.load(&new_sums), simd.load(&old_sums));
            best = Found {
                d: old.if_greater(new, next.d, best.d),
                dmin: old.if_greater(new, next.dmin, best.dmin),
                scale: old.if_greater(new, next.scale, best.scale),
                min: old.if_greater(new, next.min, best.min),
                error: old.if_greater(new, next.error, best.error),
            };
        }
        best
    }

    /// The real scales and minimums that fit each sub-block best.
    #[inline(always)]
    fn fit_alone(&self) -> (S::F, S::F) {
        let (simd, Batch { x, w }) = (self.simd, &self.batch);
        let zero = simd.splat(0.0);
        let (mut low, mut high) = (zero, x[0]);
        for x in x {
            low = low.min(*x);
            high = high.max(*x);
        }
        // Distances from the smallest value, or from 0: the minimum is subtracted and can't be
        // negative. Sums of them lose fewer digits than sums of the values.
        let mut distances = Distances {
            y: *x,
            low,
            sum_w: zero,
            sum_y: zero,
        };
        for (y, w) in distances.y.iter_mut().zip(w) {
            *y = *y - low;
            distances.sum_w = distances.sum_w + *w;
            distances.sum_y = distances.sum_y + *w * *y;
        }

        let extent = high - low;
        let has_extent = simd.splat(MIN_EXTENT);
        let per_extent = extent.if_greater(has_extent, simd.splat(1.0) / extent, zero);
        // Without a scale every value is the smallest.
        let mut best = Solution {
            scale: zero,
            offset: zero,
            gain: zero,
        };
        // First, and kept unless another is better: where there are negative values an odd number of
        // levels, of which one is zero if the others reach as far.
        let odd = zero.if_greater(low, simd.splat(1.0), zero);
        for attempt in 0..1 + SPREADS.len() + REFINEMENTS {
            let (per_step, shift) = if attempt == 0 {
                ((self.max_code - odd) * per_extent, zero)
            } else if let Some(&(more, shift)) = SPREADS.get(attempt - 1) {
                let steps = self.max_code + simd.splat(more);
                (steps * per_extent, simd.splat(shift))
            } else {
                let per_step = inverse(simd, best.scale);
                (per_step, best.offset * per_step)
            };
            self.improve(&mut best, &distances, per_step, shift);
        }
        (best.scale, best.offset - low)
    }

    /// Solves by least squares for the codes nearest to `y · per_step + shift` and keeps improvements. The
    /// offset may not be less than the lowest value, nor a scale negative.
    #[inline(always)]
    fn improve(
        &self,
        best: &mut Solution<S::F>,
        distances: &Distances<S::F, N>,
        per_step: S::F,
        shift: S::F,
    ) {
        let simd = self.simd;
        let zero = simd.splat(0.0);
        let (mut q, mut qq, mut qy) = (zero, zero, zero);
        for (y, w) in distances.y.iter().zip(&self.batch.w) {
            let code = nearest(simd, *y * per_step + shift, zero, self.max_code);
            let weighted = *w * code;
            q = q + weighted;
            qq = qq + weighted * code;
            qy = qy + weighted * *y;
        }
        let Distances {
            low, sum_w, sum_y, ..
        } = *distances;
        let det = sum_w * qq - q * q;
        let free = (sum_w * qy - q * sum_y) / det;
        let free_offset = (free * q - sum_y) / sum_w;
        // At the limit the offset is fixed, and only the scale is solved for. There is no determinant where
        // all codes are the same.
        let bound = (qy + low * q) / qq;
        let is_bound = det.if_greater(zero, low - free_offset, simd.splat(1.0));
        let scale = is_bound.if_greater(zero, bound, free);
        let offset = is_bound.if_greater(zero, low, free_offset);
        let two = simd.splat(2.0);
        let gain = (two * scale * qy - scale * scale * qq)
            - (two * offset * sum_y - two * scale * offset * q + offset * offset * sum_w);
        // Comparisons with NaN are false: a division by zero improves nothing.
        let gain = scale.if_greater(zero, gain, zero);
        let enough = best.gain * simd.splat(NOTABLE);
        best.scale = gain.if_greater(enough, scale, best.scale);
        best.offset = gain.if_greater(enough, offset, best.offset);
        best.gain = gain.if_greater(enough, gain, best.gain);
    }

    /// The integer scales and minimums near the real ones that give the smallest errors.
    #[inline(always)]
    fn round_to_factors(&self, (scale, min): (S::F, S::F), (d, dmin): (S::F, S::F)) -> Found<S::F> {
        let simd = self.simd;
        let (zero, most) = (simd.splat(0.0), simd.splat(self.max_scale));
        let near_scale = nearest(simd, scale * inverse(simd, d), zero, most);
        let near_min = nearest(simd, min * inverse(simd, dmin), zero, most);
        let mut best = Found {
            d,
            dmin,
            scale: zero,
            min: zero,
            error: simd.splat(f32::INFINITY),
        };
        for scale_step in [0.0, -1.0, 1.0] {
            for min_step in [0.0, -1.0, 1.0] {
                let mut this = best;
                this.scale = (near_scale + simd.splat(scale_step)).max(zero).min(most);
                this.min = (near_min + simd.splat(min_step)).max(zero).min(most);
                let error = self.error_of(&this);
                best.scale = best.error.if_greater(error, this.scale, best.scale);
                best.min = best.error.if_greater(error, this.min, best.min);
                best.error = best.error.if_greater(error, error, best.error);
            }
        }
        best
    }

    /// The weighted squared error of the nearest codes.
    #[inline(always)]
    fn error_of(&self, found: &Found<S::F>) -> S::F {
        let simd = self.simd;
        let zero = simd.splat(0.0);
        let (scale, min) = (found.d * found.scale, found.dmin * found.min);
        let per_step = inverse(simd, scale);
        let mut error = zero;
        for (x, w) in self.batch.x.iter().zip(&self.batch.w) {
            let code = nearest(simd, (*x + min) * per_step, zero, self.max_code);
            let off = scale * code - min - *x;
            error = error + *w * (off * off);
        }
        error
    }

    /// The codes nearest to `(x + min) / scale`.
    #[inline(always)]
    fn codes_of(&self, found: &Found<S::F>) -> [S::F; N] {
        let simd = self.simd;
        let (scale, min) = (found.d * found.scale, found.dmin * found.min);
        let per_step = inverse(simd, scale);
        let mut codes = self.batch.x;
        for code in &mut codes {
            *code = nearest(
                simd,
                (*code + min) * per_step,
                simd.splat(0.0),
                self.max_code,
            );
        }
        codes
    }

    /// The f16 factors that fit each super-block best, given all integers.
    #[inline(always)]
    fn refit(&self, found: &Found<S::F>) -> (S::F, S::F) {
        let (simd, batch) = (self.simd, &self.batch);
        let zero = simd.splat(0.0);
        let (mut sum_w, mut sum_x) = (zero, zero);
        let (mut q, mut qq, mut qx) = (zero, zero, zero);
        for ((code, x), w) in self.codes_of(found).iter().zip(&batch.x).zip(&batch.w) {
            let weighted = *w * *code;
            sum_w = sum_w + *w;
            sum_x = sum_x + *w * *x;
            q = q + weighted;
            qq = qq + weighted * *code;
            qx = qx + weighted * *x;
        }
        // Normal equations of x ≈ d·a − dmin·b, where a = scale·code and b = min.
        let (scale, min) = (found.scale, found.min);
        let [aa, ab, bb] = [scale * scale * qq, scale * min * q, min * min * sum_w];
        let terms = [aa, ab, bb, scale * qx, min * sum_x].map(S::F::to_array);
        let (mut d, mut dmin) = (found.d.to_array(), found.dmin.to_array());
        for lanes in lanes_of_supers(N) {
            let sum = |of: Lanes| {
                of[lanes.clone()]
                    .iter()
                    .fold(0.0, |sum, &v| sum + f64::from(v))
            };
            let sums = terms.map(sum);
            let new = factors(sums, (d[lanes.start], dmin[lanes.start]));
            d[lanes.clone()].fill(new.0);
            dmin[lanes.clone()].fill(new.1);
        }
        (simd.load(&d), simd.load(&dmin))
    }
}

/// The solution for `d` and `dmin` in f16; the old factors where there is none.
#[inline(always)]
fn factors([aa, ab, bb, ax, bx]: [f64; 5], old: (f32, f32)) -> (f32, f32) {
    let det = aa * bb - ab * ab;
    let d = if bb == 0.0 && aa > 0.0 {
        ax / aa
    } else if det > 0.0 {
        (ax * bb - bx * ab) / det
    } else {
        return old;
    };
    let d = d as f32;
    if !(0.0..=MAX_FACTOR).contains(&d) {
        return old;
    }
    // With the rounded d, the matching rounded dmin recovers much of what is lost; how much is a matter of
    // chance.
    let mut best = (f64::INFINITY, old);
    for d in f16_neighbours(d) {
        let dmin = if bb > 0.0 {
            ((f64::from(d) * ab - bx) / bb) as f32
        } else {
            old.1
        };
        if !(0.0..=MAX_FACTOR).contains(&dmin) {
            continue;
        }
        let dmin = round_to_f16(dmin);
        let (x, y) = (f64::from(d), f64::from(dmin));
        let error = x * x * aa - 2.0 * x * y * ab + y * y * bb - 2.0 * x * ax + 2.0 * y * bx;
        if error < best.0 {
            best = (error, (d, dmin));
        }
    }
    best.1
}

/// The largest finite f16.
const MAX_FACTOR: f32 = 65504.0;
