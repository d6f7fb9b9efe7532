//! TQ1_0 and PTQ1_0: 256 or 128 trits in base 3, five to a byte, with an f16 scale. See
//! `docs/formats/ternary.md`.
//!
//! A byte is not the base-3 number itself but that number as a fraction of 243, scaled to 256 and
//! rounded up: multiplying by 3 then pushes the leading trit out at the top, so that a decoder
//! needs no division.

use super::float::{f16_at, f16_bytes};
use super::q4::{absmax, invert};

/// Groups of bytes in a block: `(first byte, bytes, trits per byte, first element)`.
///
/// Within a group of `w` bytes at element `e`, trit `t` of byte `p` is element `e + t·w + p`.
type Groups = [(usize, usize, usize, usize); 3];

const OF_TQ1_0: &Groups = &[(0, 32, 5, 0), (32, 16, 5, 160), (48, 4, 4, 240)];
const OF_PTQ1_0: &Groups = &[(0, 16, 5, 0), (16, 8, 5, 80), (24, 2, 4, 120)];

/// The groups of blocks of `N` elements.
const fn groups<const N: usize>() -> &'static Groups {
    match N {
        128 => OF_PTQ1_0,
        _ => OF_TQ1_0,
    }
}

const POWERS: [u8; 5] = [1, 3, 9, 27, 81];

/// `x = d · (trit − 1)`; block: bytes of five trits, bytes of four, `d: f16`.
#[inline(always)]
pub(super) fn decode<const B: usize, const N: usize>(block: &[u8; B], out: &mut [f32; N]) {
    let (codes, d) = unpack::<B, N>(block);
    for (x, code) in out.iter_mut().zip(codes) {
        *x = d * (i32::from(code) - 1) as f32;
    }
}

/// The trits, 0 to 2, in the order of their elements, and the scale.
#[inline(always)]
pub(super) fn unpack<const B: usize, const N: usize>(block: &[u8; B]) -> ([u8; N], f32) {
    let mut codes = [0; N];
    for &(byte, width, trits, element) in groups::<N>() {
        let packed = &block[byte..byte + width];
        for (t, power) in POWERS[..trits].iter().enumerate() {
            let at = element + t * width;
            for (code, byte) in codes[at..at + width].iter_mut().zip(packed) {
                let fraction = byte.wrapping_mul(*power);
                *code = ((u16::from(fraction) * 3) >> 8) as u8;
            }
        }
    }
    (codes, f16_at(&[block[B - 2], block[B - 1]]))
}

/// The scale is the largest magnitude, so that ternary values survive exactly.
#[inline(always)]
pub(super) fn encode<const N: usize, const B: usize>(values: &[f32; N], block: &mut [u8; B]) {
    let (codes, d) = trits_of(values);
    for &(byte, width, trits, element) in groups::<N>() {
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
    block[B - 2..].copy_from_slice(&f16_bytes(d));
}

/// Codes 0, 1, 2 for −d, 0, +d, where d is the largest magnitude; halves round away from zero.
#[inline(always)]
pub(super) fn trits_of<const N: usize>(values: &[f32; N]) -> ([u8; N], f32) {
    let d = absmax(values);
    let inv = invert(d);
    let mut codes = [0; N];
    for (code, x) in codes.iter_mut().zip(values) {
        let steps = x * inv;
        *code = 1 + u8::from(steps >= 0.5) - u8::from(steps <= -0.5);
    }
    (codes, d)
}
