//! K-quant fits in one pass, for encoding while a model is loaded.
//!
//! The searches of [`k_affine`](super::k_affine) and [`k_symmetric`](super::k_symmetric) try dozens of scales
//! for each sub-block; here each begins with the scale that covers its values and is then solved for twice by
//! least squares, with equal weights.

use super::float::round_to_f16;
use super::k_fit::{Affine, MIN_EXTENT, SUPER, Symmetric};

/// Iterations of fitting codes and scale to each other.
const ROUNDS: usize = 2;

/// A fit with codes `0..=max_code` and scales and minimums `0..=max_scale`.
#[inline(always)]
pub(super) fn affine<const S: usize>(values: &[f32; SUPER], max_code: u8, max_scale: u8) -> Affine {
    let subs = values.as_chunks::<S>().0;
    let (max_code, max_scale) = (f32::from(max_code), f32::from(max_scale));

    let mut fits = [(0.0f32, 0.0f32); 16];
    let (mut top_scale, mut top_min) = (0.0f32, 0.0f32);
    for (fit, x) in fits.iter_mut().zip(subs) {
        *fit = sub_affine(x, max_code);
        top_scale = top_scale.max(fit.0);
        top_min = top_min.max(fit.1);
    }
    let d = round_to_f16(top_scale / max_scale);
    let dmin = round_to_f16(top_min / max_scale);
    let mut this = Affine {
        d,
        dmin,
        scales: [0; 16],
        mins: [0; 16],
        codes: [0; SUPER],
    };
    for (s, x) in subs.iter().enumerate() {
        let scale = nearest(fits[s].0, d, 0.0, max_scale);
        let min = nearest(fits[s].1, dmin, 0.0, max_scale);
        (this.scales[s], this.mins[s]) = (scale as u8, min as u8);
        let codes = affine_codes(x, d * scale, dmin * min, max_code);
        for (code, q) in this.codes[s * S..][..S].iter_mut().zip(codes) {
            *code = q as i32 as u8;
        }
    }
    this
}

/// The real scale and minimum of one sub-block.
#[inline(always)]
fn sub_affine<const S: usize>(x: &[f32; S], max_code: f32) -> (f32, f32) {
    let (lo, hi) = extent(x);
    // The minimum is subtracted and cannot be negative, so the codes start at or below zero.
    let lo = lo.min(0.0);
    if hi - lo < MIN_EXTENT {
        return (0.0, -lo);
    }
    let mut fit = ((hi - lo) / max_code, -lo);
    for _ in 0..ROUNDS {
        let codes = affine_codes(x, fit.0, fit.1, max_code);
        fit = solve_affine(x, &codes).unwrap_or(fit);
    }
    fit
}

/// A fit with codes `−half..half` and scales `−half_scale..half_scale`.
#[inline(always)]
pub(super) fn symmetric(values: &[f32; SUPER], half: u8, half_scale: u8) -> Symmetric {
    let subs = values.as_chunks::<16>().0;
    let (half, half_scale) = (f32::from(half), f32::from(half_scale));

    let mut fits = [0.0f32; 16];
    let mut top = 0.0f32;
    for (fit, x) in fits.iter_mut().zip(subs) {
        *fit = sub_symmetric(x, half);
        top = if fit.abs() > top.abs() { *fit } else { top };
    }
    // The negative end reaches one step further, so the widest sub-block is put there.
    let d = round_to_f16(top / -half_scale);
    let mut this = Symmetric {
        d,
        scales: [0; 16],
        codes: [0; SUPER],
    };
    for (s, x) in subs.iter().enumerate() {
        let scale = nearest(fits[s], d, -half_scale, half_scale - 1.0);
        this.scales[s] = scale as i8;
        let codes = symmetric_codes(x, d * scale, half);
        for (code, q) in this.codes[s * 16..][..16].iter_mut().zip(codes) {
            *code = q as i32 as i8;
        }
    }
    this
}

/// The real scale of one sub-block.
#[inline(always)]
fn sub_symmetric(x: &[f32; 16], half: f32) -> f32 {
    let (lo, hi) = extent(x);
    let top = if hi > -lo { hi } else { lo };
    if top.abs() < MIN_EXTENT {
        return 0.0;
    }
    let mut scale = top / -half;
    for _ in 0..ROUNDS {
        let codes = symmetric_codes(x, scale, half);
        let qq = dot(&codes, &codes);
        if qq > 0.0 {
            scale = dot(&codes, x) / qq;
        }
    }
    scale
}

/// The integer nearest to `real / factor` within the limits.
#[inline(always)]
fn nearest(real: f32, factor: f32, low: f32, high: f32) -> f32 {
    if factor == 0.0 {
        return 0.0;
    }
    (real / factor).round().clamp(low, high)
}

/// The smallest and the largest value, in eight lanes; `S` is a multiple of 8.
#[inline(always)]
fn extent<const S: usize>(x: &[f32; S]) -> (f32, f32) {
    let (mut lo, mut hi) = ([f32::MAX; 8], [f32::MIN; 8]);
    for chunk in x.as_chunks::<8>().0 {
        for ((lo, hi), &x) in lo.iter_mut().zip(&mut hi).zip(chunk) {
            *lo = if x < *lo { x } else { *lo };
            *hi = if x > *hi { x } else { *hi };
        }
    }
    let smaller = |a: f32, b: f32| if b < a { b } else { a };
    let larger = |a: f32, b: f32| if b > a { b } else { a };
    (
        lo.into_iter().fold(f32::MAX, smaller),
        hi.into_iter().fold(f32::MIN, larger),
    )
}

/// Least squares for `x ≈ scale·code − min` with `min ≥ 0`; `None` if no positive scale does.
#[inline(always)]
fn solve_affine<const S: usize>(x: &[f32; S], codes: &[f32; S]) -> Option<(f32, f32)> {
    let (sum_x, sum_q) = (lanes(x, |v| v), lanes(codes, |q| q));
    let (sum_qq, sum_qx) = (dot(codes, codes), dot(codes, x));
    let n = S as f32;
    let det = n * sum_qq - sum_q * sum_q;
    if det <= 0.0 {
        return None;
    }
    let scale = (n * sum_qx - sum_q * sum_x) / det;
    let min = -(sum_qq * sum_x - sum_q * sum_qx) / det;
    let (scale, min) = if min < 0.0 {
        (sum_qx / sum_qq, 0.0)
    } else {
        (scale, min)
    };
    (scale > 0.0).then_some((scale, min))
}

/// The codes nearest to `(x + min) / scale`.
#[inline(always)]
fn affine_codes<const S: usize>(x: &[f32; S], scale: f32, min: f32, max_code: f32) -> [f32; S] {
    let inv = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    x.map(|x| round(clamp((x + min) * inv, 0.0, max_code)))
}

/// The codes nearest to `x / scale`.
#[inline(always)]
fn symmetric_codes(x: &[f32; 16], scale: f32, half: f32) -> [f32; 16] {
    let inv = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    x.map(|x| round(clamp(x * inv, -half, half - 1.0)))
}

/// Σ f(xᵢ), in eight lanes; `S` is a multiple of 8.
#[inline(always)]
fn lanes<const S: usize>(x: &[f32; S], f: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0; 8];
    for chunk in x.as_chunks::<8>().0 {
        for (sum, &x) in sums.iter_mut().zip(chunk) {
            *sum += f(x);
        }
    }
    sums.iter().sum()
}

/// Σ aᵢ·bᵢ, in eight lanes; `S` is a multiple of 8.
#[inline(always)]
fn dot<const S: usize>(a: &[f32; S], b: &[f32; S]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}

/// Rounds to an integer, halves to even; for magnitudes below 2²².
#[inline(always)]
fn round(v: f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0;
    (v + ROUNDER) - ROUNDER
}

/// As [`f32::clamp`] without its handling of NaN, which costs instructions.
#[inline(always)]
fn clamp(v: f32, low: f32, high: f32) -> f32 {
    let v = if v > low { v } else { low };
    if v < high { v } else { high }
}
