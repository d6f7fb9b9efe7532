//! The search for scales that the K-quant encoders share.
//!
//! A super-block of 256 values is cut into sub-blocks with small integer scales (and minimums),
//! which f16 factors of the super-block multiply. The encoders minimise the plain squared error:
//! first each sub-block by itself, then the integer scales against the rounded factors, then the
//! factors against everything else. Sums are kept in eight lanes so that they vectorise.

use super::float::round_to_f16;
use super::q4::{min_max, signed_absmax};

/// Values of a super-block.
pub(super) const SUPER: usize = 256;

/// Blocks with less extent than this are stored as constant: f16 scales could not hold it.
pub(super) const MIN_EXTENT: f32 = 1e-12;

/// How often scales and factors are fitted against each other; a third time gains less than 0.1 %.
const ROUNDS: usize = 2;

/// How much the number of steps across a sub-block is varied: −1 to +2.
const STRETCHES: std::ops::RangeInclusive<i32> = -4..=8;
const STRETCH_UNIT: f32 = 0.25;

/// Where the first step is put relative to the smallest value, in steps. Outliers at the other end
/// make it matter where the levels lie among the small values.
const SHIFTS: [f32; 3] = [0.0, -0.5, 0.5];

/// A gain less than this share of the power is lost again in the f16 factors, and is no reason to
/// leave a fit that uses the range as it is.
const NEGLIGIBLE: f32 = 1e-9;

/// A super-block of `x = d·scales[s]·code − dmin·mins[s]`, `s` being the sub-block of `code`.
pub(super) struct Affine {
    pub(super) d: f32,
    pub(super) dmin: f32,
    /// One a sub-block; those beyond the last are zero.
    pub(super) scales: [u8; 16],
    pub(super) mins: [u8; 16],
    pub(super) codes: [u8; SUPER],
}

/// A super-block of `x = d·scales[s]·code`, `s` being the sub-block of 16 of `code`.
pub(super) struct Symmetric {
    pub(super) d: f32,
    pub(super) scales: [i8; 16],
    pub(super) codes: [i8; SUPER],
}

/// Fits sub-blocks of `S` values with codes `0..=max_code` and scales `0..=max_scale`.
pub(super) fn fit_affine<const S: usize>(
    values: &[f32; SUPER],
    max_code: u8,
    max_scale: u8,
) -> Affine {
    let subs = values.as_chunks::<S>().0;
    let (max_code, max_scale) = (f32::from(max_code), f32::from(max_scale));

    let mut fits = [(0.0f32, 0.0f32); 16];
    for (fit, x) in fits.iter_mut().zip(subs) {
        *fit = fit_sub_affine(x, max_code);
    }
    let (top_scale, top_min) = fits
        .iter()
        .fold((0.0f32, 0.0f32), |(s, m), fit| (s.max(fit.0), m.max(fit.1)));
    let mut d = round_to_f16(top_scale / max_scale);
    let mut dmin = round_to_f16(top_min / max_scale);

    let mut best: Option<(f32, Affine)> = None;
    for _ in 0..ROUNDS {
        let mut this = Affine {
            d,
            dmin,
            scales: [0; 16],
            mins: [0; 16],
            codes: [0; SUPER],
        };
        let mut error = 0.0;
        for (s, x) in subs.iter().enumerate() {
            let (scale, min, e) = round_sub_affine(x, fits[s], (d, dmin), max_code, max_scale);
            (this.scales[s], this.mins[s]) = (scale as u8, min as u8);
            error += e;
            let codes = affine_codes(x, d * scale, dmin * min, max_code);
            for (code, q) in this.codes[s * S..].iter_mut().zip(codes) {
                *code = q as u8;
            }
        }
        let better = best.as_ref().is_none_or(|(lowest, _)| error < *lowest);
        let (next_d, next_dmin) = refit_affine::<S>(values, &this);
        if better {
            best = Some((error, this));
        }
        if (next_d, next_dmin) == (d, dmin) {
            break;
        }
        (d, dmin) = (next_d, next_dmin);
    }
    best.expect("at least one round was made").1
}

/// The real scale and minimum that fit one sub-block best.
fn fit_sub_affine<const S: usize>(x: &[f32; S], max_code: f32) -> (f32, f32) {
    let (lo, hi) = min_max(x);
    // The minimum is subtracted and cannot be negative, so the codes start at or below zero.
    let lo = lo.min(0.0);
    if hi - lo < MIN_EXTENT {
        return (0.0, -lo);
    }
    let mut best = ((hi - lo) / max_code, -lo);
    let mut lowest = affine_error(x, best.0, best.1, max_code);
    let negligible = NEGLIGIBLE * dot(x, x);
    for stretch in STRETCHES {
        let steps = max_code + stretch as f32 * STRETCH_UNIT;
        if steps <= 0.0 {
            continue;
        }
        let scale = (hi - lo) / steps;
        for shift in SHIFTS {
            let mut fit = (scale, (shift * scale - lo).max(0.0));
            // Alternate: codes for this scale, then the scale for these codes.
            for _ in 0..2 {
                let codes = affine_codes(x, fit.0, fit.1, max_code);
                let Some(solved) = solve_affine(x, &codes) else {
                    break;
                };
                fit = solved;
                let error = affine_error(x, fit.0, fit.1, max_code);
                if error < lowest - negligible {
                    (best, lowest) = (fit, error);
                }
            }
        }
    }
    best
}

/// Least squares for `x ≈ scale·code − min` with `min ≥ 0`; `None` if no positive scale does.
#[inline(always)]
pub(super) fn solve_affine<const S: usize>(x: &[f32; S], codes: &[f32; S]) -> Option<(f32, f32)> {
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

/// The integer scale and minimum next to the real ones that give the smallest error, and the error.
fn round_sub_affine<const S: usize>(
    x: &[f32; S],
    fit: (f32, f32),
    factors: (f32, f32),
    max_code: f32,
    max_scale: f32,
) -> (f32, f32, f32) {
    let near = |real: f32, factor: f32| {
        if factor > 0.0 {
            (real / factor).round()
        } else {
            0.0
        }
    };
    let (scale0, min0) = (near(fit.0, factors.0), near(fit.1, factors.1));
    let mut best = (0.0, 0.0, f32::INFINITY);
    for scale_step in [0.0, -1.0, 1.0] {
        for min_step in [0.0, -1.0, 1.0] {
            let scale = (scale0 + scale_step).clamp(0.0, max_scale);
            let min = (min0 + min_step).clamp(0.0, max_scale);
            let error = affine_error(x, factors.0 * scale, factors.1 * min, max_code);
            if error < best.2 {
                best = (scale, min, error);
            }
        }
    }
    best
}

/// The f16 factors that fit the super-block best, all integers given.
fn refit_affine<const S: usize>(values: &[f32; SUPER], fit: &Affine) -> (f32, f32) {
    // Normal equations of x ≈ d·a − dmin·b, where a = scale·code and b = min.
    let (mut aa, mut ab, mut bb, mut ax, mut bx) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (s, (x, codes)) in values
        .as_chunks::<S>()
        .0
        .iter()
        .zip(fit.codes.as_chunks::<S>().0)
        .enumerate()
    {
        let codes = codes.map(f32::from);
        let (scale, min) = (f32::from(fit.scales[s]), f32::from(fit.mins[s]));
        aa += scale * scale * dot(&codes, &codes);
        ab += scale * min * lanes(&codes, |q| q);
        bb += min * min * S as f32;
        ax += scale * dot(&codes, x);
        bx += min * lanes(x, |v| v);
    }
    let det = aa * bb - ab * ab;
    let d = if bb == 0.0 && aa > 0.0 {
        ax / aa
    } else if det > 0.0 {
        (ax * bb - bx * ab) / det
    } else {
        fit.d
    };
    let round = |new: f32, old: f32| {
        if (0.0..=MAX_FACTOR).contains(&new) {
            round_to_f16(new)
        } else {
            old
        }
    };
    // Solved for the rounded d, dmin makes good part of what rounding lost.
    let d = round(d, fit.d);
    let dmin = if bb > 0.0 {
        (d * ab - bx) / bb
    } else {
        fit.dmin
    };
    (d, round(dmin, fit.dmin))
}

/// Fits sub-blocks of 16 with codes `−half..half` and scales `−half_scale..half_scale`.
pub(super) fn fit_symmetric(values: &[f32; SUPER], half: u8, half_scale: u8) -> Symmetric {
    let subs = values.as_chunks::<16>().0;
    let (half, half_scale) = (f32::from(half), f32::from(half_scale));

    let mut fits = [0.0f32; 16];
    for (fit, x) in fits.iter_mut().zip(subs) {
        *fit = fit_sub_symmetric(x, half);
    }
    // The negative end reaches one step further, so the widest sub-block is put there.
    let top = fits
        .iter()
        .fold(0.0f32, |top, &s| if s.abs() > top.abs() { s } else { top });
    let mut d = round_to_f16(top / -half_scale);

    let mut best: Option<(f32, Symmetric)> = None;
    for _ in 0..ROUNDS {
        let mut this = Symmetric {
            d,
            scales: [0; 16],
            codes: [0; SUPER],
        };
        let mut error = 0.0;
        for (s, x) in subs.iter().enumerate() {
            let (scale, e) = round_sub_symmetric(x, fits[s], d, half, half_scale);
            this.scales[s] = scale as i8;
            error += e;
            let codes = symmetric_codes(x, d * scale, half);
            for (code, q) in this.codes[s * 16..].iter_mut().zip(codes) {
                *code = q as i8;
            }
        }
        let better = best.as_ref().is_none_or(|(lowest, _)| error < *lowest);
        let next = refit_symmetric(values, &this);
        if better {
            best = Some((error, this));
        }
        if next == d {
            break;
        }
        d = next;
    }
    best.expect("at least one round was made").1
}

/// The real scale that fits one sub-block best; of either sign, as the codes are lopsided.
fn fit_sub_symmetric(x: &[f32; 16], half: f32) -> f32 {
    let extent = signed_absmax(x).abs();
    if extent < MIN_EXTENT {
        return 0.0;
    }
    // The value of largest magnitude at the end that reaches further: exact for constant blocks.
    let mut best = signed_absmax(x) / -half;
    let mut lowest = symmetric_error(x, best, half);
    let negligible = NEGLIGIBLE * dot(x, x);
    for sign in [-1.0, 1.0] {
        for stretch in STRETCHES {
            let mut scale = sign * extent / (half + stretch as f32 * STRETCH_UNIT);
            for _ in 0..2 {
                let codes = symmetric_codes(x, scale, half);
                let qq = dot(&codes, &codes);
                if qq == 0.0 {
                    break;
                }
                scale = dot(&codes, x) / qq;
                let error = symmetric_error(x, scale, half);
                if error < lowest - negligible {
                    (best, lowest) = (scale, error);
                }
            }
        }
    }
    best
}

/// The integer scale next to the real one that gives the smallest error, and the error.
fn round_sub_symmetric(x: &[f32; 16], fit: f32, d: f32, half: f32, half_scale: f32) -> (f32, f32) {
    let near = if d != 0.0 { (fit / d).round() } else { 0.0 };
    let mut best = (0.0, f32::INFINITY);
    for step in [0.0, -1.0, 1.0] {
        let scale = (near + step).clamp(-half_scale, half_scale - 1.0);
        let error = symmetric_error(x, d * scale, half);
        if error < best.1 {
            best = (scale, error);
        }
    }
    best
}

/// The f16 factor that fits the super-block best, all integers given.
fn refit_symmetric(values: &[f32; SUPER], fit: &Symmetric) -> f32 {
    let (mut aa, mut ax) = (0.0, 0.0);
    for (s, (x, codes)) in values
        .as_chunks::<16>()
        .0
        .iter()
        .zip(fit.codes.as_chunks::<16>().0)
        .enumerate()
    {
        let codes = codes.map(f32::from);
        let scale = f32::from(fit.scales[s]);
        aa += scale * scale * dot(&codes, &codes);
        ax += scale * dot(&codes, x);
    }
    let d = if aa > 0.0 { ax / aa } else { fit.d };
    if d.abs() <= MAX_FACTOR {
        round_to_f16(d)
    } else {
        fit.d
    }
}

/// The largest finite f16.
const MAX_FACTOR: f32 = 65504.0;

/// Rounds to an integer, halves to even; for magnitudes below 2²².
#[inline(always)]
fn round(v: f32) -> f32 {
    const ROUNDER: f32 = 12_582_912.0;
    (v + ROUNDER) - ROUNDER
}

/// As [`f32::clamp`] without its care for NaN, which costs instructions.
#[inline(always)]
fn clamp(v: f32, low: f32, high: f32) -> f32 {
    let v = if v > low { v } else { low };
    if v < high { v } else { high }
}

/// The codes nearest to `(x + min) / scale`.
#[inline(always)]
pub(super) fn affine_codes<const S: usize>(
    x: &[f32; S],
    scale: f32,
    min: f32,
    max_code: f32,
) -> [f32; S] {
    let inv = if scale > 0.0 { 1.0 / scale } else { 0.0 };
    x.map(|x| round(clamp((x + min) * inv, 0.0, max_code)))
}

/// The codes nearest to `x / scale`.
#[inline(always)]
pub(super) fn symmetric_codes(x: &[f32; 16], scale: f32, half: f32) -> [f32; 16] {
    let inv = if scale != 0.0 { 1.0 / scale } else { 0.0 };
    x.map(|x| round(clamp(x * inv, -half, half - 1.0)))
}

/// Squared error of the nearest codes.
#[inline(always)]
fn affine_error<const S: usize>(x: &[f32; S], scale: f32, min: f32, max_code: f32) -> f32 {
    let codes = affine_codes(x, scale, min, max_code);
    let mut error = [0.0; S];
    for ((e, q), x) in error.iter_mut().zip(codes).zip(x) {
        *e = scale * q - min - x;
    }
    dot(&error, &error)
}

/// Squared error of the nearest codes.
#[inline(always)]
fn symmetric_error(x: &[f32; 16], scale: f32, half: f32) -> f32 {
    let codes = symmetric_codes(x, scale, half);
    let mut error = [0.0; 16];
    for ((e, q), x) in error.iter_mut().zip(codes).zip(x) {
        *e = scale * q - x;
    }
    dot(&error, &error)
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
pub(super) fn dot<const S: usize>(a: &[f32; S], b: &[f32; S]) -> f32 {
    let mut sums = [0.0; 8];
    for (a, b) in a.as_chunks::<8>().0.iter().zip(b.as_chunks::<8>().0) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    sums.iter().sum()
}
