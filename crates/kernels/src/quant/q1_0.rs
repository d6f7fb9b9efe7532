//! Q1_0: one sign bit per element, groups of 128. See `docs/formats/ternary.md`.

use super::float::{f16_at, f16_bytes};
use super::integers::SmallBlock;

/// `x = d` where the bit is 1, `−d` where it is 0; block: `d: f16, bits: [u8; 16]`, LSB first.
#[inline(always)]
pub(super) fn integers(block: &[u8; 18]) -> SmallBlock<128> {
    let mut codes = [0; 128];
    for (codes, &bits) in codes.as_chunks_mut::<8>().0.iter_mut().zip(&block[2..]) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (bits >> i & 1) as i8 * 2 - 1;
        }
    }
    SmallBlock {
        d: f16_at(&[block[0], block[1]]),
        codes,
    }
}

/// The scale is the mean magnitude, which minimises the squared error; zero counts as positive.
pub(super) fn encode(values: &[f32; 128], block: &mut [u8; 18]) {
    // Summed one by one, because the reference does so and the scale should be the same.
    let d = values.iter().fold(0.0, |sum, x| sum + x.abs()) / 128.0;
    block[..2].copy_from_slice(&f16_bytes(d));
    for (bits, xs) in block[2..].iter_mut().zip(values.as_chunks::<8>().0) {
        *bits = (0..8).fold(0, |bits, i| bits | u8::from(xs[i] >= 0.0) << i);
    }
}
