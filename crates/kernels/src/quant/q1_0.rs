//! Q1_0: one sign bit an element, groups of 128. See `docs/formats/ternary.md`.

use super::float::{f16_at, f16_bytes};

/// `x = d` where the bit is 1, `−d` where it is 0; block: `d: f16, bits: [u8; 16]`, LSB first.
#[inline(always)]
pub(super) fn decode(block: &[u8; 18], out: &mut [f32; 128]) {
    let d = f16_at(&[block[0], block[1]]).to_bits();
    for (xs, &bits) in out.as_chunks_mut::<8>().0.iter_mut().zip(&block[2..]) {
        for (i, x) in xs.iter_mut().enumerate() {
            // A clear bit flips the sign of d.
            *x = f32::from_bits(d ^ (u32::from(!bits) >> i & 1) << 31);
        }
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
