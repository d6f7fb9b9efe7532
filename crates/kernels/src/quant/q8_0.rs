//! Q8_0: 32 signed bytes with an f16 scale. See `docs/formats/blocks.md`.

use super::float::{f16_at, f16_bytes, round_away};
use super::integers::SmallBlock;
use super::q4::{absmax, invert};

/// `x = d · code`; block: `d: f16, codes: [i8; 32]`.
#[inline(always)]
pub(super) fn integers(block: &[u8; 34]) -> SmallBlock<32> {
    let codes: &[u8; 32] = block.last_chunk().expect("32 of 34 bytes");
    SmallBlock {
        d: f16_at(&[block[0], block[1]]),
        codes: codes.map(|code| code as i8),
    }
}

/// The largest magnitude gets code ±127; halves round away from zero.
#[inline(always)]
pub(super) fn encode(values: &[f32; 32], block: &mut [u8; 34]) {
    /// Adding this to an integer leaves the integer in the low bits, without the range checks of a
    /// conversion. Nothing is out of range, except where the scale is 0 as a half and codes don't matter.
    const TO_INTEGER: f32 = 12_582_912.0;

    let d = absmax(values) / 127.0;
    let inv = invert(d);
    block[..2].copy_from_slice(&f16_bytes(d));
    for (code, &x) in block[2..].iter_mut().zip(values) {
        *code = (round_away(x * inv) + TO_INTEGER).to_bits() as u8;
    }
}
