//! Plain floating-point elements, little-endian, and the half-precision scales of the block types.

/// Converts the bits of an IEEE half to f32, exactly; NaN payloads are kept.
///
/// Branch-free in a way that vectorises: rows of f16 weights go through here, and f16 subnormals
/// are common among small weights. They are made by a subtraction, because multiplying f32
/// subnormals costs a microcode assist on many CPUs.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    /// Distance between the exponent biases of the two formats, in place.
    const REBIAS: u32 = (127 - 15) << 23;
    const F16_MIN_NORMAL: u32 = 1 << 23;
    const F16_INF: u32 = 31 << 23;

    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff) << 13;
    // 2⁻¹⁴ + m·2⁻²⁴, from which 2⁻¹⁴ goes again.
    let one = f32::from_bits(REBIAS + F16_MIN_NORMAL);
    let subnormal = (f32::from_bits(magnitude + REBIAS + F16_MIN_NORMAL) - one).to_bits();
    let special = if magnitude >= F16_INF { REBIAS } else { 0 };
    let normal = magnitude + REBIAS + special;
    f32::from_bits(
        sign | if magnitude < F16_MIN_NORMAL {
            subnormal
        } else {
            normal
        },
    )
}

/// The nearest integer, halves away from zero: [`f32::round`], as instructions of vectors.
///
/// What is added is the largest number below a half, so that the numbers below a half stay below one; with a half the sum
/// is a tie between that and the next integer, which is even in its last bit and wins.
#[inline(always)]
pub(super) fn round_away(value: f32) -> f32 {
    const BELOW_HALF: f32 = 0.5f32.next_down();
    (value + BELOW_HALF.copysign(value)).trunc()
}

/// The half-precision number stored at the start of `bytes`.
#[inline(always)]
pub(super) fn f16_at(bytes: &[u8; 2]) -> f32 {
    f16_to_f32(u16::from_le_bytes(*bytes))
}

/// The bits of the nearest half, ties to even; for numbers, including infinite ones.
///
/// Branch-free as [`f16_to_f32`] is, for rows of weights go through here too.
#[inline(always)]
pub(super) fn f32_to_f16(value: f32) -> u16 {
    /// Distance between the exponent biases of the two formats, in place.
    const REBIAS: u32 = (127 - 15) << 23;
    /// The smallest magnitude that isn't subnormal as a half, 2⁻¹⁴.
    const MIN_NORMAL: u32 = (127 - 14) << 23;
    const F16_INF: u32 = 0x7c00;

    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    // Just less than half a step, or half a step where the last bit that stays is odd.
    let half_step = 0xfff + (magnitude >> 13 & 1);
    let normal = (magnitude + half_step).wrapping_sub(REBIAS) >> 13;
    // Between ½ and 1, f32 has the steps that subnormal halves have, and rounds to them.
    let subnormal = (f32::from_bits(magnitude) + 0.5)
        .to_bits()
        .wrapping_sub(0.5f32.to_bits());
    let half = if magnitude < MIN_NORMAL {
        subnormal
    } else {
        normal
    };
    let half = if half < F16_INF { half } else { F16_INF };
    (bits >> 16 & 0x8000 | half) as u16
}

/// The bytes of the nearest half, ties to even.
#[inline(always)]
pub(super) fn f16_bytes(value: f32) -> [u8; 2] {
    f32_to_f16(value).to_le_bytes()
}

/// `value` after a round trip through f16.
#[inline(always)]
pub(super) fn round_to_f16(value: f32) -> f32 {
    f16_to_f32(f32_to_f16(value))
}

/// [`round_to_f16`], but away from zero where that would be 0: for scales of integers, which can compensate.
#[inline(always)]
pub(super) fn round_to_f16_factor(value: f32) -> f32 {
    /// The smallest half above zero, 2⁻²⁴.
    const SMALLEST: f32 = f32::from_bits((127 - 24) << 23);
    let rounded = round_to_f16(value);
    if rounded == 0.0 && value != 0.0 {
        SMALLEST.copysign(value)
    } else {
        rounded
    }
}

/// The half nearest to a positive number, and those next to it; the number itself is a finite half when
/// rounded.
#[inline(always)]
pub(super) fn f16_neighbours(value: f32) -> [f32; 3] {
    const LARGEST: u16 = 0x7bff;
    let bits = f32_to_f16(value).min(LARGEST);
    [bits, bits.saturating_sub(1), (bits + 1).min(LARGEST)].map(f16_to_f32)
}

#[inline(always)]
pub(super) fn decode_f64(block: &[u8; 8], out: &mut [f32; 1]) {
    out[0] = f64::from_le_bytes(*block) as f32;
}

#[inline(always)]
pub(super) fn decode_f32(block: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*block);
}

#[inline(always)]
pub(super) fn decode_f16(block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16_at(block);
}

#[inline(always)]
pub(super) fn decode_bf16(block: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f32::from_bits(u32::from(u16::from_le_bytes(*block)) << 16);
}

#[inline(always)]
pub(super) fn encode_f32(values: &[f32; 1], block: &mut [u8; 4]) {
    *block = values[0].to_le_bytes();
}

#[inline(always)]
pub(super) fn encode_f16(values: &[f32; 1], block: &mut [u8; 2]) {
    *block = f16_bytes(values[0]);
}

#[inline(always)]
pub(super) fn encode_bf16(values: &[f32; 1], block: &mut [u8; 2]) {
    // Rounded to even, as for f16. A carry out of the significand belongs in the exponent, and no number up
    // to the largest bf16 becomes infinite by it.
    let bits = values[0].to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    *block = ((rounded >> 16) as u16).to_le_bytes();
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::{bf16, f16};

    #[test]
    fn every_half_converts_exactly() {
        for bits in 0..=u16::MAX {
            let (ours, theirs) = (f16_to_f32(bits), f16::from_bits(bits).to_f32());
            if theirs.is_nan() {
                assert!(ours.is_nan(), "{bits:04x}");
                assert_eq!(ours.is_sign_negative(), bits & 0x8000 != 0, "{bits:04x}");
            } else {
                assert_eq!(ours.to_bits(), theirs.to_bits(), "{bits:04x}");
            }
        }
    }

    /// Numbers of every exponent, and those half-way between two halves with their neighbours.
    fn numbers() -> impl Iterator<Item = f32> {
        let steps = (0..=u32::MAX).step_by(12_345).map(f32::from_bits);
        let halves = (0..0x7c00u16).flat_map(|bits| {
            let middle = (f16::from_bits(bits).to_f32() + f16::from_bits(bits + 1).to_f32()) / 2.0;
            [middle.next_down(), middle, middle.next_up(), -middle]
        });
        steps.chain(halves).filter(|v| !v.is_nan())
    }

    #[test]
    fn numbers_round_to_the_nearest_half() {
        for v in numbers() {
            assert_eq!(f32_to_f16(v), f16::from_f32(v).to_bits(), "{v:e}");
        }
    }

    #[test]
    fn numbers_round_to_the_nearest_bf16() {
        for v in numbers().filter(|v| v.abs() <= bf16::MAX.to_f32()) {
            let mut bytes = [0; 2];
            encode_bf16(&[v], &mut bytes);
            assert_eq!(bytes, bf16::from_f32(v).to_le_bytes(), "{v:e}");
        }
    }

    #[test]
    fn integers_are_the_nearest() {
        let near_halves = (0..300).flat_map(|i| {
            let half = i as f32 + 0.5;
            [half.next_down(), half, half.next_up(), i as f32, 1e5 * half]
        });
        let wide = (0..=u32::MAX).step_by(9973).map(f32::from_bits);
        for v in near_halves
            .chain(numbers())
            .chain(wide.filter(|v| !v.is_nan()))
        {
            for v in [v, -v] {
                assert_eq!(round_away(v).to_bits(), v.round().to_bits(), "{v:e}");
            }
        }
    }
}
