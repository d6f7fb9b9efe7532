//! MXFP4: 32 four-bit floats (e2m1) with a shared power of two (e8m0). See `docs/formats/blocks.md`.

use super::QuantError;
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

/// Blocks of codes whose scales are apart, as gpt-oss's checkpoints have them.
///
/// Shapes: `codes` is `[n, 16]`, each byte with the codes of two neighbours, the first in the low half; `scales` is
/// `[n]`.
/// Errors: [`QuantError`] if there are not as many of both.
pub fn from_split(codes: &[u8], scales: &[u8]) -> Result<Vec<u8>, QuantError> {
    let (codes, rest) = codes.as_chunks::<HALF>();
    if codes.len() != scales.len() || !rest.is_empty() {
        return Err(QuantError::Size {
            what: "bytes of MXFP4 codes",
            expected: scales.len() * HALF,
            found: codes.len() * HALF + rest.len(),
        });
    }
    let mut blocks = Vec::with_capacity(scales.len() * (HALF + 1));
    for (codes, scale) in codes.iter().zip(scales) {
        let code = |i: usize| codes[i / 2] >> (i % 2 * 4) & 15;
        blocks.push(*scale);
        blocks.extend((0..HALF).map(|i| code(i) | code(HALF + i) << 4));
    }
    Ok(blocks)
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

    #[test]
    fn codes_of_neighbours_are_taken_apart() {
        // Codes 0 to 15 and back, and a scale of 2: every value in its place.
        let codes: [u8; 16] = std::array::from_fn(|i| match i {
            0..8 => (2 * i + (2 * i + 1) * 16) as u8,
            _ => (31 - 2 * i + (30 - 2 * i) * 16) as u8,
        });
        let blocks = from_split(&codes, &[128]).unwrap();
        let mut values = [0.0; 32];
        decode(blocks.as_slice().try_into().unwrap(), &mut values);
        for (i, value) in values.iter().enumerate() {
            let code = if i < 16 { i } else { 31 - i };
            assert_eq!(*value, f32::from(doubled_value(code as u8)), "{i}");
        }
        assert!(from_split(&codes, &[128, 128]).is_err());
        assert!(from_split(&codes[1..], &[]).is_err());
    }
}
