//! The search for scales and minimums: Q2_K, Q4_K and Q5_K.
//!
//! First each sub-block is fitted by itself with real numbers, then the integer scales and minimums
//! against the rounded factors of the super-block, then the factors against everything else.

use super::float::round_to_f16;
use super::k_fit::{Affine, MIN_EXTENT, SUPER};
use super::lanes::{
    Batch, LANES, Lanes, Weights, blocks_of, clamp, inverse, round, supers_at_once,
};

/// What a type allows, and what is made small.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// Codes are `0..=max_code`.
    pub(super) max_code: f32,
    /// Scales and minimums are `0..=max_scale`.
    pub(super) max_scale: f32,
    pub(super) weights: Weights,
}

/// How the values of a sub-block are first spread over the codes: steps across it more than there
/// are, and where the smallest value is put, in steps. Outliers make it matter where the levels lie
/// among the many small values, and whether the ends are cut off.
const SPREADS: [(f32, f32); 24] = [
    (0.0, 0.0),
    (-0.9, 0.0),
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

/// How often the best spread's codes and scale are fitted to each other.
const REFINEMENTS: usize = 3;

/// How often scales and factors are fitted against each other.
const ROUNDS: usize = 2;

/// Fits super-blocks with sub-blocks of `S` values and calls `each` with every one in order.
#[inline(always)]
pub(super) fn fit<const S: usize>(
    values: &[[f32; SUPER]],
    limits: Limits,
    mut each: impl FnMut(usize, &Affine),
) {
    let at_once = supers_at_once(S);
    for (group, values) in values.chunks(at_once).enumerate() {
        let batch = Batch::<S>::new(values, limits.weights);
        let found = search(&batch, limits);
        let mut codes = [[0.0; LANES]; S];
        let (scale, min) = found.products();
        codes_of(&batch.x, &scale, &min, limits.max_code, &mut codes);
        for i in 0..values.len() {
            let first = i * (SUPER / S);
            let mut fit = Affine {
                d: found.d[first],
                dmin: found.dmin[first],
                scales: [0; 16],
                mins: [0; 16],
                codes: [0; SUPER],
            };
            for (s, out) in fit.codes.as_chunks_mut::<S>().0.iter_mut().enumerate() {
                fit.scales[s] = found.scale[first + s] as u8;
                fit.mins[s] = found.min[first + s] as u8;
                let mut signed = [0; S];
                blocks_of(&codes, first + s, &mut signed);
                for (out, code) in out.iter_mut().zip(signed) {
                    *out = code as u8;
                }
            }
            each(group * at_once + i, &fit);
        }
    }
}

/// The numbers found for a batch. All sub-blocks of a super-block have the same factors.
#[derive(Clone, Copy)]
struct Found {
    d: Lanes,
    dmin: Lanes,
    scale: Lanes,
    min: Lanes,
    error: Lanes,
}

impl Found {
    /// `d·scale` and `dmin·min`.
    #[inline(always)]
    fn products(&self) -> (Lanes, Lanes) {
        let (mut scale, mut min) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            scale[l] = self.d[l] * self.scale[l];
            min[l] = self.dmin[l] * self.min[l];
        }
        (scale, min)
    }
}

#[inline(always)]
fn search<const S: usize>(batch: &Batch<S>, limits: Limits) -> Found {
    let (scale, min) = fit_alone(batch, limits.max_code);
    let (mut d, mut dmin) = ([0.0; LANES], [0.0; LANES]);
    for lanes in lanes_of_supers::<S>() {
        let (mut top_scale, mut top_min) = (0.0f32, 0.0f32);
        for l in lanes.clone() {
            top_scale = top_scale.max(scale[l]);
            top_min = top_min.max(min[l]);
        }
        d[lanes.clone()].fill(round_to_f16(top_scale / limits.max_scale));
        dmin[lanes].fill(round_to_f16(top_min / limits.max_scale));
    }

    let mut best = round_to_factors(batch, (&scale, &min), (&d, &dmin), limits);
    for _ in 1..ROUNDS {
        let (d, dmin) = refit(batch, &best, limits.max_code);
        let next = round_to_factors(batch, (&scale, &min), (&d, &dmin), limits);
        for lanes in lanes_of_supers::<S>() {
            let sum = |found: &Found| lanes.clone().fold(0.0, |sum, l| sum + found.error[l]);
            if sum(&next) < sum(&best) {
                for l in lanes {
                    best.d[l] = next.d[l];
                    best.dmin[l] = next.dmin[l];
                    best.scale[l] = next.scale[l];
                    best.min[l] = next.min[l];
                    best.error[l] = next.error[l];
                }
            }
        }
    }
    best
}

/// The lanes of each super-block.
#[inline(always)]
fn lanes_of_supers<const S: usize>() -> impl Iterator<Item = std::ops::Range<usize>> {
    let n = SUPER / S;
    (0..LANES / n).map(move |i| i * n..(i + 1) * n)
}

/// Weighted sums over the codes of each block.
struct Sums {
    q: Lanes,
    qq: Lanes,
    qy: Lanes,
}

/// The real scales and minimums that fit each sub-block best.
#[inline(always)]
fn fit_alone<const S: usize>(batch: &Batch<S>, max_code: f32) -> (Lanes, Lanes) {
    let (mut lo, mut hi) = ([0.0; LANES], batch.x[0]);
    for x in &batch.x {
        for l in 0..LANES {
            lo[l] = if x[l] < lo[l] { x[l] } else { lo[l] };
            hi[l] = if x[l] > hi[l] { x[l] } else { hi[l] };
        }
    }
    // Distances from the smallest value, or from 0: the minimum is subtracted and can't be negative.
    // Sums of them lose fewer digits than sums of the values.
    let mut y = [[0.0; LANES]; S];
    let (mut sum_w, mut sum_y) = ([0.0; LANES], [0.0; LANES]);
    for ((y, x), w) in y.iter_mut().zip(&batch.x).zip(&batch.w) {
        for l in 0..LANES {
            y[l] = x[l] - lo[l];
            sum_w[l] += w[l];
            sum_y[l] += w[l] * y[l];
        }
    }

    // Without a scale every value is the smallest.
    let mut best = Solution {
        scale: [0.0; LANES],
        offset: [0.0; LANES],
        gain: [0.0; LANES],
    };
    let mut per_extent = [0.0; LANES];
    for l in 0..LANES {
        let extent = hi[l] - lo[l];
        per_extent[l] = if extent < MIN_EXTENT { 0.0 } else { 1.0 / extent };
    }
    for (more, shift) in SPREADS {
        let mut per_step = [0.0; LANES];
        for l in 0..LANES {
            per_step[l] = (max_code + more) * per_extent[l];
        }
        let sums = sums_of_codes(&y, &batch.w, &per_step, &[shift; LANES], max_code);
        best.improve(&sums, &sum_w, &sum_y, &lo);
    }
    for _ in 0..REFINEMENTS {
        let (mut per_step, mut shift) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            per_step[l] = inverse(best.scale[l]);
            shift[l] = best.offset[l] * per_step[l];
        }
        let sums = sums_of_codes(&y, &batch.w, &per_step, &shift, max_code);
        best.improve(&sums, &sum_w, &sum_y, &lo);
    }
    let mut min = [0.0; LANES];
    for l in 0..LANES {
        min[l] = best.offset[l] - lo[l];
    }
    (best.scale, min)
}

/// `y ≈ scale·code − offset`.
struct Solution {
    scale: Lanes,
    offset: Lanes,
    /// By how much the weighted squared error is less than that of `y ≈ 0`.
    gain: Lanes,
}

impl Solution {
    /// Solves by least squares for other codes and keeps what is better. `offset` may not be less
    /// than `lo`, nor a scale negative.
    #[inline(always)]
    fn improve(&mut self, sums: &Sums, sum_w: &Lanes, sum_y: &Lanes, lo: &Lanes) {
        for l in 0..LANES {
            let (q, qq, qy) = (sums.q[l], sums.qq[l], sums.qy[l]);
            let (w, y, lo) = (sum_w[l], sum_y[l], lo[l]);
            let det = w * qq - q * q;
            let free = (w * qy - q * y) / det;
            let free_offset = (free * q - y) / w;
            // At the limit the offset is given, and the scale is solved for alone.
            let bound = (qy + lo * q) / qq;
            let is_free = (det > 0.0) & (free_offset >= lo);
            let scale = if is_free { free } else { bound };
            let offset = if is_free { free_offset } else { lo };
            let gain = (2.0 * scale * qy - scale * scale * qq)
                - (2.0 * offset * y - 2.0 * scale * offset * q + offset * offset * w);
            // A comparison with NaN, where there was nothing to divide by, is false.
            let better = (scale > 0.0) & (gain > self.gain[l]);
            self.scale[l] = if better { scale } else { self.scale[l] };
            self.offset[l] = if better { offset } else { self.offset[l] };
            self.gain[l] = if better { gain } else { self.gain[l] };
        }
    }
}

/// The sums for the codes nearest to `y · per_step + shift`.
#[inline(always)]
fn sums_of_codes<const S: usize>(
    y: &[Lanes; S],
    w: &[Lanes; S],
    per_step: &Lanes,
    shift: &Lanes,
    max_code: f32,
) -> Sums {
    let (mut q, mut qq, mut qy) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    for (y, w) in y.iter().zip(w) {
        for l in 0..LANES {
            let code = round(clamp(y[l] * per_step[l] + shift[l], 0.0, max_code));
            let weighted = w[l] * code;
            q[l] += weighted;
            qq[l] += weighted * code;
            qy[l] += weighted * y[l];
        }
    }
    Sums { q, qq, qy }
}

/// The integer scales and minimums next to the real ones that give the smallest errors.
#[inline(always)]
fn round_to_factors<const S: usize>(
    batch: &Batch<S>,
    (scale, min): (&Lanes, &Lanes),
    (d, dmin): (&Lanes, &Lanes),
    limits: Limits,
) -> Found {
    let (mut scale0, mut min0) = ([0.0; LANES], [0.0; LANES]);
    for l in 0..LANES {
        let (per_d, per_dmin) = (inverse(d[l]), inverse(dmin[l]));
        scale0[l] = round(clamp(scale[l] * per_d, 0.0, limits.max_scale));
        min0[l] = round(clamp(min[l] * per_dmin, 0.0, limits.max_scale));
    }
    let mut best = Found {
        d: *d,
        dmin: *dmin,
        scale: [0.0; LANES],
        min: [0.0; LANES],
        error: [f32::INFINITY; LANES],
    };
    for scale_step in [0.0, -1.0, 1.0] {
        for min_step in [0.0, -1.0, 1.0] {
            let mut this = best;
            for l in 0..LANES {
                this.scale[l] = clamp(scale0[l] + scale_step, 0.0, limits.max_scale);
                this.min[l] = clamp(min0[l] + min_step, 0.0, limits.max_scale);
            }
            let (scale, min) = this.products();
            let error = error_of(batch, &scale, &min, limits.max_code);
            for l in 0..LANES {
                let better = error[l] < best.error[l];
                best.scale[l] = if better { this.scale[l] } else { best.scale[l] };
                best.min[l] = if better { this.min[l] } else { best.min[l] };
                best.error[l] = if better { error[l] } else { best.error[l] };
            }
        }
    }
    best
}

/// The weighted squared error of the nearest codes.
#[inline(always)]
fn error_of<const S: usize>(batch: &Batch<S>, scale: &Lanes, min: &Lanes, max_code: f32) -> Lanes {
    let (mut per_step, mut error) = ([0.0; LANES], [0.0; LANES]);
    for l in 0..LANES {
        per_step[l] = inverse(scale[l]);
    }
    for (x, w) in batch.x.iter().zip(&batch.w) {
        for l in 0..LANES {
            let code = round(clamp((x[l] + min[l]) * per_step[l], 0.0, max_code));
            let off = scale[l] * code - min[l] - x[l];
            error[l] += w[l] * (off * off);
        }
    }
    error
}

/// The codes nearest to `(x + min) / scale`.
#[inline(always)]
fn codes_of<const S: usize>(
    x: &[Lanes; S],
    scale: &Lanes,
    min: &Lanes,
    max_code: f32,
    codes: &mut [Lanes; S],
) {
    let mut per_step = [0.0; LANES];
    for l in 0..LANES {
        per_step[l] = inverse(scale[l]);
    }
    for (codes, x) in codes.iter_mut().zip(x) {
        for l in 0..LANES {
            codes[l] = round(clamp((x[l] + min[l]) * per_step[l], 0.0, max_code));
        }
    }
}

/// The f16 factors that fit each super-block best, all integers given.
#[inline(always)]
fn refit<const S: usize>(batch: &Batch<S>, found: &Found, max_code: f32) -> (Lanes, Lanes) {
    let (scale, min) = found.products();
    let mut codes = [[0.0; LANES]; S];
    codes_of(&batch.x, &scale, &min, max_code, &mut codes);
    let (mut w, mut x) = ([0.0; LANES], [0.0; LANES]);
    let (mut q, mut qq, mut qx) = ([0.0; LANES], [0.0; LANES], [0.0; LANES]);
    for ((codes, xs), ws) in codes.iter().zip(&batch.x).zip(&batch.w) {
        for l in 0..LANES {
            let weighted = ws[l] * codes[l];
            w[l] += ws[l];
            x[l] += ws[l] * xs[l];
            q[l] += weighted;
            qq[l] += weighted * codes[l];
            qx[l] += weighted * xs[l];
        }
    }
    let (mut d, mut dmin) = (found.d, found.dmin);
    for lanes in lanes_of_supers::<S>() {
        // Normal equations of x ≈ d·a − dmin·b, where a = scale·code and b = min.
        let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0.0, 0.0, 0.0, 0.0, 0.0);
        for l in lanes.clone() {
            let (scale, min) = (found.scale[l], found.min[l]);
            aa += scale * scale * qq[l];
            ab += scale * min * q[l];
            bb += min * min * w[l];
            ax += scale * qx[l];
            bx += min * x[l];
        }
        let first = lanes.start;
        let new = factors([aa, ab, bb], [ax, bx], (d[first], dmin[first]));
        d[lanes.clone()].fill(new.0);
        dmin[lanes].fill(new.1);
    }
    (d, dmin)
}

/// The solution for `d` and `dmin` in f16; the old factors where there is none.
#[inline(always)]
fn factors([aa, ab, bb]: [f32; 3], [ax, bx]: [f32; 2], old: (f32, f32)) -> (f32, f32) {
    /// The largest finite f16.
    const MAX_FACTOR: f32 = 65504.0;
    let round = |new: f32, old: f32| {
        if (0.0..=MAX_FACTOR).contains(&new) {
            round_to_f16(new)
        } else {
            old
        }
    };
    let det = aa * bb - ab * ab;
    let d = if bb == 0.0 && aa > 0.0 {
        ax / aa
    } else if det > 0.0 {
        (ax * bb - bx * ab) / det
    } else {
        old.0
    };
    // Solved for the rounded d, dmin makes good part of what rounding lost.
    let d = round(d, old.0);
    let dmin = if bb > 0.0 { (d * ab - bx) / bb } else { old.1 };
    (d, round(dmin, old.1))
}
