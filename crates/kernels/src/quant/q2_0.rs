//! Q2_0 and PQ2_0: two-bit codes with an f16 scale, in groups of 64 or 128.
//!
//! `B` is the size of the block in bytes and `N` its elements: 18 and 64 as upstream defines it,
//! 34 and 128 in the files of the fork it came from. See `docs/formats/ternary.md`.

use super::float::{f16_at, f16_bytes, round_away};
use super::integers::SmallBlock;
use super::q4::{absmax, invert};

/// `x = d · (code − 1)`; block: `d: f16, codes`, element `4j + i` at bits `2i` of byte `j`.
///
/// Code 3 is legal here and stands for `2d`.
#[inline(always)]
pub(super) fn integers<const B: usize, const N: usize>(block: &[u8; B]) -> SmallBlock<N> {
    let mut codes = [0; N];
    for (codes, &packed) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&block[2..]) {
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (packed >> (2 * i) & 3) as i8 - 1;
        }
    }
    SmallBlock {
        d: f16_at(&[block[0], block[1]]),
        codes,
    }
}

/// The scale is the largest magnitude, so that ternary values survive exactly.
pub(super) fn encode<const N: usize, const B: usize>(values: &[f32; N], block: &mut [u8; B]) {
    let d = absmax(values);
    let inv = invert(d);
    let code = |x: f32| (round_away(x * inv) as i8).clamp(-1, 1).wrapping_add(1) as u8;
    block[..2].copy_from_slice(&f16_bytes(d));
    for (codes, xs) in block[2..].iter_mut().zip(values.as_chunks::<4>().0) {
        *codes = (0..4).fold(0, |codes, i| codes | code(xs[i]) << (2 * i));
    }
}
