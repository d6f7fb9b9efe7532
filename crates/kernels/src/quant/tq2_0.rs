//! TQ2_0: 256 two-bit trits with an f16 scale. See `docs/formats/ternary.md`.

use super::bits::crumbs;
use super::float::{f16_at, f16_bytes};
use super::tq1_0::trits_of;

/// `x = d · (code − 1)`; block: `codes: [u8; 64], d: f16`.
///
/// Each 32 bytes hold 128 elements: byte `p` has elements `p`, `32 + p`, `64 + p` and `96 + p` at
/// bits 1:0, 3:2, 5:4 and 7:6.
#[inline(always)]
pub(super) fn decode(block: &[u8; 66], out: &mut [f32; 256]) {
    let (codes, d) = unpack(block);
    for (x, code) in out.iter_mut().zip(codes) {
        *x = d * (i32::from(code) - 1) as f32;
    }
}

/// The codes in the order of their elements, and the scale.
#[inline(always)]
pub(super) fn unpack(block: &[u8; 66]) -> ([u8; 256], f32) {
    let mut codes = [0; 256];
    let halves = block[..64].as_chunks::<32>().0;
    for (codes, packed) in codes.as_chunks_mut::<128>().0.iter_mut().zip(halves) {
        codes.copy_from_slice(crumbs(packed).as_flattened());
    }
    (codes, f16_at(&[block[64], block[65]]))
}

/// The scale is the largest magnitude, so that ternary values survive exactly.
#[inline(always)]
pub(super) fn encode(values: &[f32; 256], block: &mut [u8; 66]) {
    let (codes, d) = trits_of(values);
    let halves = codes.as_chunks::<128>().0;
    for (packed, half) in block[..64].as_chunks_mut::<32>().0.iter_mut().zip(halves) {
        for (p, byte) in packed.iter_mut().enumerate() {
            *byte = (0..4).fold(0, |byte, i| byte | half[32 * i + p] << (2 * i));
        }
    }
    block[64..].copy_from_slice(&f16_bytes(d));
}
