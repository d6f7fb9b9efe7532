//! The search for signed scales: Q3_K, Q6_K and Q4_0.
//!
//! As in [`k_affine`](super::k_affine), without minimums. Codes reach one step further below zero
//! than above, so scales of either sign are tried.

use super::float::round_to_f16;
use super::k_fit::{MIN_EXTENT, SUPER, Symmetric};
use super::lanes::{
    Batch, LANES, Lanes, Weights, blocks_of, clamp, inverse, round, supers_at_once,
};

/// What a type allows, and what is made small.
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
const STRETCHES: [f32; 16] = [
    0.0, -0.8, -0.6, -0.4, -0.2, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0,
];

/// How often the best stretch's codes and scale are fitted to each other.
const REFINEMENTS: usize = 2;

/// How often scales and the factor are fitted against each other.
const ROUNDS: usize = 2;

/// Fits super-blocks and calls `each` with every one in order.
#[inline(always)]
pub(super) fn fit(values: &[[f32; SUPER]], limits: Limits, mut each: impl FnMut(usize, &Symmetric)) {
    const { assert!(supers_at_once(SUB) == 1) }
    for (i, values) in values.iter().enumerate() {
        let batch = Batch::<SUB>::new(std::slice::from_ref(values), limits.weights);
        let (d, scales) = search(&batch, limits);
        let mut codes = [[0.0; LANES]; SUB];
        codes_of(&batch.x, &scales.map(|scale| d * scale), limits.half, &mut codes);
        let mut fit = Symmetric {
            d,
            scales: scales.map(|scale| scale as i32 as i8),
            codes: [0; SUPER],
        };
        for (s, out) in fit.codes.as_chunks_mut::<SUB>().0.iter_mut().enumerate() {
            blocks_of(&codes, s, out);
        }
        each(i, &fit);
    }
}

/// Fits blocks that have one f16 scale each, and calls `each` with the scale and the codes of every
/// one in order. No error is larger than with the scale that gives the largest magnitude the code
/// `−half`.
#[inline(always)]
pub(super) fn fit_blocks<const S: usize>(
    values: &[[f32; S]],
    half: f32,
    mut each: impl FnMut(usize, f32, &[i8; S]),
) {
    for (group, values) in values.chunks(LANES).enumerate() {
        let batch = Batch::<S>::new(values, Weights::Flat);
        let (top, found) = fit_alone(&batch, half);
        let mut scale = top.map(|top| round_to_f16(top / -half));
        let mut lowest = error_of(&batch, &scale, half);
        let next = found.map(round_to_f16);
        let error = error_of(&batch, &next, half);
        for l in 0..LANES {
            let better = error[l] < lowest[l];
            scale[l] = if better { next[l] } else { scale[l] };
            lowest[l] = if better { error[l] } else { lowest[l] };
        }
        let mut codes = [[0.0; LANES]; S];
        codes_of(&batch.x, &scale, half, &mut codes);
        for i in 0..values.len() {
            let mut signed = [0; S];
            blocks_of(&codes, i, &mut signed);
            each(group * LANES + i, scale[i], &signed);
        }
    }
}

/// The factor and the scales.
#[inline(always)]
fn search(batch: &Batch<SUB>, limits: Limits) -> (f32, Lanes) {
    let (_, scale) = fit_alone(batch, limits.half);
    // The negative end reaches one step further, so the widest sub-block is put there.
    let top = scale
        .iter()
        .fold(0.0f32, |top, &s| if s.abs() > top.abs() { s } else { top });
    let d = round_to_f16(top / -limits.half_scale);
    let (mut lowest, mut best) = (f32::INFINITY, (d, [0.0; LANES]));
    let mut d = d;
    for round in 0..ROUNDS {
        let (scales, error) = round_to_factor(batch, &scale, d, limits);
        let error = error.iter().fold(0.0, |sum, e| sum + e);
        if error < lowest {
            (lowest, best) = (error, (d, scales));
        }
        if round + 1 < ROUNDS {
            d = refit(batch, best, limits.half);
        }
    }
    best
}

/// The value of largest magnitude of each block, and the real scale that fits the block best; of
/// either sign, as the codes are lopsided.
#[inline(always)]
fn fit_alone<const S: usize>(batch: &Batch<S>, half: f32) -> (Lanes, Lanes) {
    let mut top = [0.0f32; LANES];
    for x in &batch.x {
        for l in 0..LANES {
            top[l] = if x[l].abs() > top[l].abs() { x[l] } else { top[l] };
        }
    }
    let mut per_extent = [0.0; LANES];
    for l in 0..LANES {
        per_extent[l] = if top[l].abs() < MIN_EXTENT { 0.0 } else { -1.0 / top[l] };
    }
    let (mut best, mut highest) = ([0.0; LANES], [0.0; LANES]);
    let mut improve = |per_step: &Lanes, best: &mut Lanes| {
        let (qq, qx) = sums_of_codes(batch, per_step, half);
        for l in 0..LANES {
            let scale = qx[l] / qq[l];
            // By how much the weighted squared error is less than that of zeros. A comparison with
            // NaN, where all codes are zero, is false.
            let gain = qx[l] * scale;
            let better = gain > highest[l];
            best[l] = if better { scale } else { best[l] };
            highest[l] = if better { gain } else { highest[l] };
        }
    };
    for sign in [1.0, -1.0] {
        for more in STRETCHES {
            let mut per_step = [0.0; LANES];
            for l in 0..LANES {
                per_step[l] = sign * (half + more) * per_extent[l];
            }
            improve(&per_step, &mut best);
        }
    }
    for _ in 0..REFINEMENTS {
        let mut per_step = [0.0; LANES];
        for l in 0..LANES {
            per_step[l] = inverse(best[l]);
        }
        improve(&per_step, &mut best);
    }
    (top, best)
}

/// `Σ w·q²` and `Σ w·q·x` for the codes `q` nearest to `x · per_step`.
#[inline(always)]
fn sums_of_codes<const S: usize>(
    batch: &Batch<S>,
    per_step: &Lanes,
    half: f32,
) -> (Lanes, Lanes) {
    let (mut qq, mut qx) = ([0.0; LANES], [0.0; LANES]);
    for (x, w) in batch.x.iter().zip(&batch.w) {
        for l in 0..LANES {
            let code = round(clamp(x[l] * per_step[l], -half, half - 1.0));
            let weighted = w[l] * code;
            qq[l] += weighted * code;
            qx[l] += weighted * x[l];
        }
    }
    (qq, qx)
}

/// The integer scales next to the real ones that give the smallest errors, and the errors.
#[inline(always)]
fn round_to_factor(batch: &Batch<SUB>, scale: &Lanes, d: f32, limits: Limits) -> (Lanes, Lanes) {
    let (low, high) = (-limits.half_scale, limits.half_scale - 1.0);
    let per_d = inverse(d);
    let (mut best, mut lowest) = ([0.0; LANES], [f32::INFINITY; LANES]);
    for step in [0.0, -1.0, 1.0] {
        let (mut integer, mut real) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            let near = round(clamp(scale[l] * per_d, low, high));
            integer[l] = clamp(near + step, low, high);
            real[l] = d * integer[l];
        }
        let error = error_of(batch, &real, limits.half);
        for l in 0..LANES {
            let better = error[l] < lowest[l];
            best[l] = if better { integer[l] } else { best[l] };
            lowest[l] = if better { error[l] } else { lowest[l] };
        }
    }
    (best, lowest)
}

/// The weighted squared error of the nearest codes.
#[inline(always)]
fn error_of<const S: usize>(batch: &Batch<S>, scale: &Lanes, half: f32) -> Lanes {
    let (mut per_step, mut error) = ([0.0; LANES], [0.0; LANES]);
    for l in 0..LANES {
        per_step[l] = inverse(scale[l]);
    }
    for (x, w) in batch.x.iter().zip(&batch.w) {
        for l in 0..LANES {
            let code = round(clamp(x[l] * per_step[l], -half, half - 1.0));
            let off = scale[l] * code - x[l];
            error[l] += w[l] * (off * off);
        }
    }
    error
}

/// The codes nearest to `x / scale`.
#[inline(always)]
fn codes_of<const S: usize>(
    x: &[Lanes; S],
    scale: &Lanes,
    half: f32,
    codes: &mut [Lanes; S],
) {
    let mut per_step = [0.0; LANES];
    for l in 0..LANES {
        per_step[l] = inverse(scale[l]);
    }
    for (codes, x) in codes.iter_mut().zip(x) {
        for l in 0..LANES {
            codes[l] = round(clamp(x[l] * per_step[l], -half, half - 1.0));
        }
    }
}

/// The f16 factor that fits the super-block best, all integers given.
#[inline(always)]
fn refit(batch: &Batch<SUB>, (d, scales): (f32, Lanes), half: f32) -> f32 {
    /// The largest finite f16.
    const MAX_FACTOR: f32 = 65504.0;
    let mut per_step = [0.0; LANES];
    for l in 0..LANES {
        per_step[l] = inverse(d * scales[l]);
    }
    let (qq, qx) = sums_of_codes(batch, &per_step, half);
    let (mut aa, mut ax) = (0.0, 0.0);
    for l in 0..LANES {
        aa += scales[l] * scales[l] * qq[l];
        ax += scales[l] * qx[l];
    }
    // A comparison with NaN is false.
    let new = ax / aa;
    if new.abs() <= MAX_FACTOR {
        round_to_f16(new)
    } else {
        d
    }
}
