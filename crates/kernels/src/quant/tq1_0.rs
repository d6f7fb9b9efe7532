//! TQ1_0: 256 trits in base 3, five to a byte, with an f16 scale. See `docs/formats/ternary.md`.
//!
//! A byte is not the base-3 number itself but that number as a fraction of 243, scaled to 256 and
//! rounded up: multiplying by 3 then pushes the leading trit out at the top, so that a decoder
//! needs no division.

use super::float::{f16_at, f16_bytes};
use super::q4::{absmax, invert};

/// Groups of bytes in a block: `(first byte, bytes, trits per byte, first element)`.
///
/// Within a group of `w` bytes at element `e`, trit `t` of byte `p` is element `e + t·w + p`.
const GROUPS: [(usize, usize, usize, usize); 3] =
    [(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)];

const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// `x = d · (trit − 1)`; block: `[u8; 48]` of five trits, `[u8; 4]` of four, `d: f16`.
#[inline(always)]
pub(super) fn decode(block: &[u8; 54], out: &mut [f32; 256]) {
    let (codes, d) = unpack(block);
    for (x, code) in out.iter_mut().zip(codes) {
        *x = d * (i32::from(code) - 1) as f32;
    }
}

/// The trits, 0 to 2, in the order of their elements, and the scale.
#[inline(always)]
pub(super) fn unpack(block: &[u8; 54]) -> ([u8; 256], f32) {
    let mut codes = [0; 256];
    for (byte, width, trits, element) in GROUPS {
        let packed = &block[byte..byte + width];
        for (t, power) in POWERS[..trits].iter().enumerate() {
            let at = element + t * width;
            for (code, byte) in codes[at..at + width].iter_mut().zip(packed) {
                let fraction = byte.wrapping_mul(*power);
                *code = ((u16::from(fraction) * 3) >> 8) as u8;
            }
        }
    }
    (codes, f16_at(&[block[52], block[53]]))
}

/// The scale is the largest magnitude, so that ternary values survive exactly.
#[inline(always)]
pub(super) fn encode(values: &[f32; 256], block: &mut [u8; 54]) {
    let (codes, d) = trits_of(values);
    for (byte, width, trits, element) in GROUPS {
        for (p, out) in block[byte..byte + width].iter_mut().enumerate() {
            // The first trit is the most significant; a byte of four is padded with a zero trit.
            let number = (0..5).fold(0, |number, t| {
                let trit = if t < trits {
                    codes[element + t * width + p]
                } else {
                    0
                };
                number * 3 + u32::from(trit)
            });
            *out = (number * 256).div_ceil(243) as u8;
        }
    }
    block[52..].copy_from_slice(&f16_bytes(d));
}

/// Codes 0, 1, 2 for −d, 0, +d, where d is the largest magnitude; halves round away from zero.
#[inline(always)]
pub(super) fn trits_of(values: &[f32; 256]) -> ([u8; 256], f32) {
    let d = absmax(values);
    let inv = invert(d);
    let mut codes = [0; 256];
    for (code, x) in codes.iter_mut().zip(values) {
        let steps = x * inv;
        *code = 1 + u8::from(steps >= 0.5) - u8::from(steps <= -0.5);
    }
    (codes, d)
}
