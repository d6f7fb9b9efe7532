//! Rounding operands until their products are exact.
//!
//! A product of two floats with `a` and `b` significant bits has at most `a + b`; if that is no more than the
//! 24 of an f32, multiplying doesn't round, and a fused multiply-add gives the same bits as a multiplication
//! and an addition. Kernels that read values of few bits (f16 has 11, int8 codes 8) round the other operand,
//! so that they may use whatever the machine has.

/// Rounds to `BITS` significant bits, halves away from zero; infinities and NaN are unchanged.
#[inline(always)]
pub(crate) fn round_significand<const BITS: u32>(x: f32) -> f32 {
    let dropped = f32::MANTISSA_DIGITS - BITS;
    // A carry out of the significand belongs in the exponent.
    let rounded =
        f32::from_bits(x.to_bits().wrapping_add(1 << (dropped - 1)) & !((1 << dropped) - 1));
    if x.is_nan() { x } else { rounded }
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::f16;

    #[test]
    fn keeps_the_leading_bits() {
        assert_eq!(round_significand::<13>(1.0), 1.0);
        assert_eq!(round_significand::<2>(1.25), 1.5);
        assert_eq!(round_significand::<2>(-1.2), -1.0);
        assert_eq!(round_significand::<2>(1.9), 2.0);
        assert_eq!(round_significand::<13>(0.0), 0.0);
        assert_eq!(round_significand::<13>(f32::INFINITY), f32::INFINITY);
        assert!(round_significand::<13>(f32::from_bits(0x7FFF_FFFF)).is_nan());
        assert!(round_significand::<13>(f32::from_bits(0xFFFF_FFFF)).is_nan());
        let x = 1.234_567_8f32;
        assert!((round_significand::<13>(x) / x - 1.0).abs() <= 1.0 / 8192.0);
    }

    #[test]
    fn products_with_few_bits_are_exact() {
        for i in 0..2000 {
            let x = round_significand::<13>((i as f32 * 0.37).sin() * 3.0);
            let half = f16::from_f32((i as f32 * 0.71).cos()).to_f32();
            assert_eq!(f64::from(x * half), f64::from(x) * f64::from(half));
            let x = round_significand::<16>((i as f32 * 0.37).sin() * 3.0);
            let code = (i % 255 - 127) as f32;
            assert_eq!(f64::from(x * code), f64::from(x) * f64::from(code));
        }
    }
}
