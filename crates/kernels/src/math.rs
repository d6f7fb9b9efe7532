//! Elementary functions that give the same bits on every machine and vectorise.
//!
//! A platform's own `exp` differs from another's in the last bit, and calls to it keep loops from
//! being vectorised. These are plain polynomials.

/// `e^x`, within 2 ulp for results in the normal range; 0 below it, infinity above, NaN for NaN.
///
/// `x = n·ln 2 + r` with |r| ≤ ln 2 / 2; `e^r` is its Taylor polynomial of degree 7, whose first
/// omitted term is below 2^-27 of the result.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    // Adding and subtracting 1.5·2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    // ln 2 in two parts: the first has few enough bits for `n · LN2_HIGH` to be exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    let clamped = x.clamp(-88.0, 89.0);
    let rounded = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    // 2^n in two factors, because n = 128 has no exponent of its own.
    // It is in the low bits of the rounded sum; a cast, which saturates, isn't vectorised.
    let n = rounded.to_bits().wrapping_sub(ROUND.to_bits()) as i32;
    let half = n >> 1;
    let y = p * power_of_two(half) * power_of_two(n.wrapping_sub(half));
    let y = if x < -87.336_54 { 0.0 } else { y };
    let y = if x > 88.722_83 { f32::INFINITY } else { y };
    if x.is_nan() { x } else { y }
}

/// `2^n` for `n` in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// `x / (1 + e^−x)`, as exact as [`exp`].
#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// `1 / (1 + e^−x)`, likewise.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// `ln(1 + e^x)`, within 4 ulp.
#[inline(always)]
pub(crate) fn softplus(x: f32) -> f32 {
    x.max(0.0) + libm::log1pf(exp(-x.abs()))
}

/// `tanh x`, within 1e-6 absolute.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

/// The error function, within 1.5e-7 absolute (Abramowitz and Stegun 7.1.26).
#[inline(always)]
pub(crate) fn erf(x: f32) -> f32 {
    let a = x.abs();
    let t = 1.0 / (1.0 + 0.327_591_1 * a);
    let mut p = 1.061_405_4;
    p = p * t - 1.453_152;
    p = p * t + 1.421_413_7;
    p = p * t - 0.284_496_74;
    p = p * t + 0.254_829_6;
    (1.0 - p * t * exp(-a * a)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn softplus_of_large_numbers() {
        assert_eq!((softplus(-200.0), softplus(200.0)), (0.0, 200.0));
        assert!((softplus(0.0) - std::f32::consts::LN_2).abs() < 1e-7);
    }

    /// Every 97th f32 between the two, by bits.
    fn floats(from: f32, to: f32) -> impl Iterator<Item = f32> {
        (from.to_bits()..to.to_bits())
            .step_by(97)
            .map(f32::from_bits)
    }

    #[test]
    fn exp_is_within_two_ulp() {
        for x in floats(1e-6, 88.7).flat_map(|x| [x, -x]) {
            let want = f64::from(x).exp();
            if want < f64::from(f32::MIN_POSITIVE) {
                continue;
            }
            let got = f64::from(exp(x));
            let ulp = f64::from((want as f32).next_up()) - f64::from(want as f32);
            assert!(
                (got - want).abs() <= 2.0 * ulp,
                "exp({x}) = {got}, not {want}"
            );
        }
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp(-200.0), 0.0);
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(89.0), f32::INFINITY);
        assert!(exp(88.72).is_finite());
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn tanh_and_erf_are_close() {
        for x in floats(1e-4, 20.0).flat_map(|x| [x, -x]) {
            let want = f64::from(x).tanh();
            assert!((f64::from(tanh(x)) - want).abs() < 1e-6, "tanh({x})");
        }
        for (x, want) in [
            (0.0, 0.0),
            (0.5, 0.520_499_877_8),
            (1.0, 0.842_700_792_9),
            (2.0, 0.995_322_265),
            (-1.5, -0.966_105_146_5),
        ] {
            assert!((f64::from(erf(x)) - want).abs() < 5e-7, "erf({x})");
        }
    }
}
