//! Q2_K: 256 two-bit codes, 16 sub-blocks with 4-bit scales and minimums. See
//! `docs/formats/k-quants.md`.

use super::batch::Weights;
use super::bits::{crumbs, signed};
use super::float::{f16_at, f16_bytes};
use super::integers::SuperBlock;
use super::k_affine::{self, Limits};
use super::k_fit::Affine;
use super::k_quick;
use super::lanes::Simd;

/// `x = d·scale·code − dmin·min`; block:
/// `scales: [u8; 16]` (scale in the low nibble, min in the high), `codes: [u8; 64], d, dmin: f16`.
///
/// Each 32 bytes of codes hold 128 elements, the first 32 in bits 1:0, the next in 3:2, and so on.
#[inline(always)]
pub(super) fn integers(block: &[u8; 84]) -> SuperBlock {
    let packed = block[16..80].as_chunks::<32>().0;
    let mut codes = [0; 256];
    for (codes, packed) in codes.as_chunks_mut::<128>().0.iter_mut().zip(packed) {
        signed(crumbs(packed).as_flattened(), 0, codes);
    }
    let scales: &[u8; 16] = block.first_chunk().expect("16 of 84 bytes");
    SuperBlock {
        d: f16_at(&[block[80], block[81]]),
        dmin: f16_at(&[block[82], block[83]]),
        scales: scales.map(|scale| (scale & 15) as i8),
        mins: scales.map(|scale| scale >> 4),
        codes,
    }
}

/// One block for every 256 values.
#[inline(always)]
pub(super) fn encode<S: Simd>(simd: S, values: &[[f32; 256]], blocks: &mut [[u8; 84]]) {
    const LIMITS: Limits = Limits {
        max_code: 3.0,
        max_scale: 15.0,
        weights: Weights::Flat,
    };
    k_affine::fit::<S, 16>(simd, values, LIMITS, |i, fit| pack(fit, &mut blocks[i]));
}

/// Encodes a block without a search.
#[inline(always)]
pub(super) fn encode_quick(values: &[f32; 256], block: &mut [u8; 84]) {
    pack(&k_quick::affine::<16>(values, 3, 15), block);
}

/// A fit as a block.
#[inline(always)]
fn pack(fit: &Affine, block: &mut [u8; 84]) {
    block.fill(0);
    for (s, codes) in fit.codes.as_chunks::<16>().0.iter().enumerate() {
        block[s] = fit.scales[s] | fit.mins[s] << 4;
        let (at, shift) = code_position(s);
        for (byte, code) in block[at..at + 16].iter_mut().zip(codes) {
            *byte |= code << shift;
        }
    }
    block[80..82].copy_from_slice(&f16_bytes(fit.d));
    block[82..].copy_from_slice(&f16_bytes(fit.dmin));
}

/// First byte and shift of the codes of sub-block `s`.
#[inline(always)]
fn code_position(s: usize) -> (usize, usize) {
    (16 + s / 8 * 32 + s % 2 * 16, s % 8 / 2 * 2)
}
