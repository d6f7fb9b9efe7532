//! Q4_0 and Q4_1: 32 four-bit codes with an f16 scale, and for Q4_1 an f16 minimum.
//!
//! Byte `j` of the codes holds element `j` in its low and element `16 + j` in its high nibble.
//! See `docs/formats/blocks.md`.

use super::bits::{nibbles, signed};
use super::float::{f16_at, f16_bytes};
use super::integers::SmallBlock;
use super::k_symmetric;
use super::lanes::Simd;

const HALF: usize = 16;

/// `x = d · (code − 8)`; block: `d: f16, codes: [u8; 16]`.
#[inline(always)]
pub(super) fn integers_q4_0(block: &[u8; 18]) -> SmallBlock<32> {
    let (d, packed) = split::<2, 18>(block);
    let mut codes = [0; 32];
    signed(nibbles(packed).as_flattened(), 8, &mut codes);
    SmallBlock {
        d: f16_at(d),
        codes,
    }
}

/// `x = d · code + m`; block: `d: f16, m: f16, codes: [u8; 16]`.
#[inline(always)]
pub(super) fn decode_q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (dm, codes) = split::<4, 20>(block);
    let (d, m) = (f16_at(&[dm[0], dm[1]]), f16_at(&[dm[2], dm[3]]));
    for (x, code) in out.iter_mut().zip(nibbles(codes).as_flattened()) {
        *x = d * f32::from(*code) + m;
    }
}

/// One block for every 32 values, with the scale that keeps the squared error smallest.
#[inline(always)]
pub(super) fn search_q4_0<S: Simd>(simd: S, values: &[[f32; 32]], blocks: &mut [[u8; 18]]) {
    k_symmetric::fit_blocks(simd, values, 8.0, |i, d, codes| {
        let block = &mut blocks[i];
        block[..2].copy_from_slice(&f16_bytes(d));
        for (j, byte) in block[2..].iter_mut().enumerate() {
            *byte = (codes[j] + 8) as u8 | ((codes[HALF + j] + 8) as u8) << 4;
        }
    });
}

/// The value of largest magnitude gets code 0, exactly −8 steps; the others are rounded.
#[inline(always)]
pub(super) fn encode_q4_0(values: &[f32; 32], block: &mut [u8; 18]) {
    let d = signed_absmax(values) / -8.0;
    let inv = invert(d);
    let code = |x: f32| ((x * inv + 8.5) as u8).min(15);
    block[..2].copy_from_slice(&f16_bytes(d));
    for (j, byte) in block[2..].iter_mut().enumerate() {
        *byte = code(values[j]) | code(values[HALF + j]) << 4;
    }
}

/// Codes spread evenly from the smallest value to the largest.
pub(super) fn encode_q4_1(values: &[f32; 32], block: &mut [u8; 20]) {
    let (min, max) = min_max(values);
    let d = (max - min) / 15.0;
    let inv = invert(d);
    let code = |x: f32| (((x - min) * inv + 0.5) as u8).min(15);
    block[..2].copy_from_slice(&f16_bytes(d));
    block[2..4].copy_from_slice(&f16_bytes(min));
    for (j, byte) in block[4..].iter_mut().enumerate() {
        *byte = code(values[j]) | code(values[HALF + j]) << 4;
    }
}

/// Splits the header of `H` bytes from the 16 code bytes that end the block.
#[inline(always)]
fn split<const H: usize, const B: usize>(block: &[u8; B]) -> (&[u8; H], &[u8; HALF]) {
    let (header, _) = block
        .split_first_chunk()
        .expect("a header is shorter than its block");
    let (_, codes) = block
        .split_last_chunk()
        .expect("the codes are shorter than their block");
    (header, codes)
}

/// The first value of largest magnitude, with its sign.
pub(super) fn signed_absmax(values: &[f32]) -> f32 {
    values.iter().fold(
        0.0,
        |best: f32, &x| if x.abs() > best.abs() { x } else { best },
    )
}

/// The largest magnitude of finite values.
#[inline(always)]
pub(super) fn absmax(values: &[f32]) -> f32 {
    // As integers, magnitudes compare as they do as floats, and their maximum vectorises.
    let mut top = 0;
    for x in values {
        let magnitude = x.to_bits() & 0x7fff_ffff;
        top = if magnitude > top { magnitude } else { top };
    }
    f32::from_bits(top)
}

/// The smallest and the largest of finite values.
pub(super) fn min_max(values: &[f32]) -> (f32, f32) {
    values
        .iter()
        .fold((f32::MAX, f32::MIN), |(lo, hi), &x| (lo.min(x), hi.max(x)))
}

/// `1 / d`, or 0 for a constant block.
#[inline(always)]
pub(super) fn invert(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}
