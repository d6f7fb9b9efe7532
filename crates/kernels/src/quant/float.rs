//! Plain floating-point elements, little-endian, and the half-precision scales of the block types.

use half::{bf16, f16};

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

/// The half-precision number stored at the start of `bytes`.
#[inline(always)]
pub(super) fn f16_at(bytes: &[u8; 2]) -> f32 {
    f16_to_f32(u16::from_le_bytes(*bytes))
}

/// The bytes of the nearest half, ties to even.
#[inline]
pub(super) fn f16_bytes(value: f32) -> [u8; 2] {
    f16::from_f32(value).to_le_bytes()
}

/// `value` after a round trip through f16.
#[inline]
pub(super) fn round_to_f16(value: f32) -> f32 {
    f16::from_f32(value).to_f32()
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

#[inline]
pub(super) fn encode_f32(values: &[f32; 1], block: &mut [u8; 4]) {
    *block = values[0].to_le_bytes();
}

#[inline]
pub(super) fn encode_f16(values: &[f32; 1], block: &mut [u8; 2]) {
    *block = f16_bytes(values[0]);
}

#[inline]
pub(super) fn encode_bf16(values: &[f32; 1], block: &mut [u8; 2]) {
    *block = bf16::from_f32(values[0]).to_le_bytes();
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
