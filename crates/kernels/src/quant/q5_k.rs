//! Q5_K: Q4_K with a fifth bit per code. See `docs/formats/k-quants.md`.

use super::batch::Weights;
use super::bits::{bit_planes, join, nibbles, signed};
use super::integers::SuperBlock;
use super::k_affine::{self, Limits};
use super::k_fit::Affine;
use super::k_quick;
use super::lanes::Simd;
use super::q4_k::{pack_header, with_header};

/// `x = d·scale·code − dmin·min`; block:
/// `d, dmin: f16, scales: [u8; 12], high: [u8; 32], low: [u8; 128]`.
///
/// The low four bits are stored as in Q4_K. The fifth bit of the codes of sub-block `s` is bit `s` of the 32
/// bytes of `high`.
#[inline(always)]
pub(super) fn integers(block: &[u8; 176]) -> SuperBlock {
    let high = bit_planes(
        block[16..]
            .first_chunk::<32>()
            .expect("32 bytes from 16 of 176"),
    );
    let high = high.as_chunks::<2>().0;
    let mut codes = [0; 256];
    let packed = block[48..].as_chunks::<32>().0;
    for ((codes, packed), high) in codes
        .as_chunks_mut::<64>()
        .0
        .iter_mut()
        .zip(packed)
        .zip(high)
    {
        let mut joined = nibbles(packed);
        join::<4>(joined.as_flattened_mut(), high.as_flattened());
        signed(joined.as_flattened(), 0, codes);
    }
    with_header(block.first_chunk().expect("16 of 176 bytes"), codes)
}

/// One block for every 256 values.
#[inline(always)]
pub(super) fn encode<S: Simd>(simd: S, values: &[[f32; 256]], blocks: &mut [[u8; 176]]) {
    const LIMITS: Limits = Limits {
        max_code: 31.0,
        max_scale: 63.0,
        weights: Weights::Magnitude,
    };
    k_affine::fit::<S, 32>(simd, values, LIMITS, |i, fit| pack(fit, &mut blocks[i]));
}

/// Encodes a block without a search.
#[inline(always)]
pub(super) fn encode_quick(values: &[f32; 256], block: &mut [u8; 176]) {
    pack(&k_quick::affine::<32>(values, 31, 63), block);
}

/// A fit as a block.
#[inline(always)]
fn pack(fit: &Affine, block: &mut [u8; 176]) {
    block.fill(0);
    block[..16].copy_from_slice(&pack_header(fit.d, fit.dmin, &fit.scales, &fit.mins));
    let (_, codes) = block.split_at_mut(16);
    let (high, low) = codes.split_at_mut(32);
    for (s, codes) in fit.codes.as_chunks::<32>().0.iter().enumerate() {
        for (i, code) in codes.iter().enumerate() {
            high[i] |= (code >> 4) << s;
            low[s / 2 * 32 + i] |= (code & 15) << (s % 2 * 4);
        }
    }
}
