//! Q5_0 and Q5_1: as Q4_0 and Q4_1 with a fifth bit per code, stored in a 32-bit mask.
//!
//! Bit `i` of the little-endian mask is bit 4 of the code of element `i`; the low four bits are
//! packed as in Q4_0. See `docs/formats/blocks.md`.

use super::bits::signed;
use super::float::{f16_at, f16_bytes};
use super::integers::SmallBlock;
use super::q4::{invert, min_max, signed_absmax};

const HALF: usize = 16;

/// `x = d · (code − 16)`; block: `d: f16, high: u32, codes: [u8; 16]`.
#[inline(always)]
pub(super) fn integers_q5_0(block: &[u8; 22]) -> SmallBlock<32> {
    let mut codes = [0; 32];
    signed(
        &unpack(block.last_chunk().expect("20 of 22 bytes")),
        16,
        &mut codes,
    );
    SmallBlock {
        d: f16_at(&[block[0], block[1]]),
        codes,
    }
}

/// `x = d · code + m`; block: `d: f16, m: f16, high: u32, codes: [u8; 16]`.
#[inline(always)]
pub(super) fn decode_q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (d, m) = (f16_at(&[block[0], block[1]]), f16_at(&[block[2], block[3]]));
    let codes = unpack(block.last_chunk().expect("20 of 24 bytes"));
    for (x, code) in out.iter_mut().zip(codes) {
        *x = d * f32::from(code) + m;
    }
}

/// The value of largest magnitude gets code 0, exactly −16 steps; the others are rounded.
pub(super) fn encode_q5_0(values: &[f32; 32], block: &mut [u8; 22]) {
    let d = signed_absmax(values) / -16.0;
    let inv = invert(d);
    block[..2].copy_from_slice(&f16_bytes(d));
    block[2..].copy_from_slice(&pack(values.map(|x| ((x * inv + 16.5) as u8).min(31))));
}

/// Codes spread evenly from the smallest value to the largest.
pub(super) fn encode_q5_1(values: &[f32; 32], block: &mut [u8; 24]) {
    let (min, max) = min_max(values);
    let d = (max - min) / 31.0;
    let inv = invert(d);
    block[..2].copy_from_slice(&f16_bytes(d));
    block[2..4].copy_from_slice(&f16_bytes(min));
    block[4..].copy_from_slice(&pack(
        values.map(|x| (((x - min) * inv + 0.5) as u8).min(31)),
    ));
}

/// The 32 five-bit codes stored as `[high mask; 4][low nibbles; 16]`.
#[inline(always)]
fn unpack(packed: &[u8; 20]) -> [u8; 32] {
    let high = u32::from_le_bytes([packed[0], packed[1], packed[2], packed[3]]);
    let mut codes = [0; 32];
    for j in 0..HALF {
        codes[j] = packed[4 + j] & 15 | ((high >> j) as u8 & 1) << 4;
        codes[HALF + j] = packed[4 + j] >> 4 | ((high >> (HALF + j)) as u8 & 1) << 4;
    }
    codes
}

/// The inverse of [`unpack`].
fn pack(codes: [u8; 32]) -> [u8; 20] {
    let mut packed = [0; 20];
    let high = (0..32).fold(0, |mask, i| mask | u32::from(codes[i] >> 4) << i);
    packed[..4].copy_from_slice(&high.to_le_bytes());
    for j in 0..HALF {
        packed[4 + j] = codes[j] & 15 | codes[HALF + j] << 4;
    }
    packed
}
