//! MXFP4: 32 four-bit floats (e2m1) with a shared power of two (e8m0). See `docs/formats/blocks.md`.

use super::bits::nibbles;
use super::q4::absmax;

const HALF: usize = 16;

/// `x = 2^(e−127) · e2m1[code]`; block: `e: u8, codes: [u8; 16]`, packed as in Q4_0.
///
/// The exponent 255, which the OCP specification reserves for NaN, is read as 2^128, as GGML does.
#[inline(always)]
pub(super) fn decode(block: &[u8; 17], out: &mut [f32; 32]) {
    let d = half_scale(block[0]);
    let codes = nibbles(block.last_chunk::<HALF>().expect("16 of 17 bytes"));
    for (x, code) in out.iter_mut().zip(codes.as_flattened()) {
        *x = d * f32::from(doubled_value(*code));
    }
}

/// Twice the value of a code of e2m1, which is an integer: 0, 1, 2, 3, 4, 6, 8, 12, then the same
/// negated. Code 8, which is −0, gives 0.
///
/// Computed, because a table can't be looked up in vectors everywhere.
#[inline(always)]
fn doubled_value(code: u8) -> i8 {
    let m = code & 7;
    // Steps of one up to 4, of two from there, and four to the last.
    let magnitude = m + m.saturating_sub(4) + if m == 7 { 2 } else { 0 };
    let sign = -((code >> 3) as i8);
    (magnitude as i8 ^ sign) - sign
}

/// The scale puts the largest magnitude between 4 and 8 steps; codes are the nearest values.
pub(super) fn encode(values: &[f32; 32], block: &mut [u8; 17]) {
    let max = absmax(values);
    let e = if max > 0.0 {
        (floor_log2(max) - 2 + 127).max(0) as u8
    } else {
        0
    };
    let d = half_scale(e);
    let levels: [f32; 16] = std::array::from_fn(|code| d * f32::from(doubled_value(code as u8)));
    let code = |x: f32| {
        let mut best = (0, f32::INFINITY);
        for (code, level) in (0..).zip(levels) {
            let error = (level - x).abs();
            // Strictly smaller, so that the first of two equally near values is taken.
            if error < best.1 {
                best = (code, error);
            }
        }
        best.0
    };
    block[0] = e;
    for (j, byte) in block[1..].iter_mut().enumerate() {
        *byte = code(values[j]) | code(values[HALF + j]) << 4;
    }
}

/// `2^(e − 128)`: half the block's scale, to match the doubled values.
#[inline(always)]
fn half_scale(e: u8) -> f32 {
    // The two smallest are subnormal.
    f32::from_bits(if e < 2 {
        0x0020_0000 << e
    } else {
        (u32::from(e) - 1) << 23
    })
}

/// ⌊log2 x⌋ for positive finite x.
fn floor_log2(x: f32) -> i32 {
    let biased = (x.to_bits() >> 23) as i32;
    if biased > 0 {
        biased - 127
    } else {
        // Subnormal: the value is the mantissa times 2⁻¹⁴⁹.
        31 - x.to_bits().leading_zeros() as i32 - 149
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_those_of_e2m1() {
        let positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        for (code, value) in (0..).zip(positive) {
            assert_eq!(f32::from(doubled_value(code)) / 2.0, value);
            assert_eq!(f32::from(doubled_value(8 + code)) / 2.0, -value);
        }
    }
}
