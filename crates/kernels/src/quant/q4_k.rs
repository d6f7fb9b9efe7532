//! Q4_K: 256 four-bit codes, 8 sub-blocks with 6-bit scales and minimums. See
//! `docs/formats/k-quants.md`.

use super::batch::Weights;
use super::bits::{nibbles, signed};
use super::float::{f16_at, f16_bytes};
use super::integers::SuperBlock;
use super::k_affine::{self, Limits};
use super::k_fit::Affine;
use super::k_quick;
use super::lanes::Simd;

/// `x = d·scale·code − dmin·min`; block: `d, dmin: f16, scales: [u8; 12], codes: [u8; 128]`.
///
/// Each 32 bytes of codes hold 64 elements: the first 32 in the low nibbles, the rest in the high.
#[inline(always)]
pub(super) fn integers(block: &[u8; 144]) -> SuperBlock {
    let mut codes = [0; 256];
    let packed = block[16..].as_chunks::<32>().0;
    for (codes, packed) in codes.as_chunks_mut::<64>().0.iter_mut().zip(packed) {
        signed(nibbles(packed).as_flattened(), 0, codes);
    }
    with_header(block.first_chunk().expect("16 of 144 bytes"), codes)
}

/// One block for every 256 values.
#[inline(always)]
pub(super) fn encode<S: Simd>(simd: S, values: &[[f32; 256]], blocks: &mut [[u8; 144]]) {
    const LIMITS: Limits = Limits {
        max_code: 15.0,
        max_scale: 63.0,
        weights: Weights::Magnitude,
    };
    k_affine::fit::<S, 32>(simd, values, LIMITS, |i, fit| pack(fit, &mut blocks[i]));
}

/// Encodes a block without a search.
#[inline(always)]
pub(super) fn encode_quick(values: &[f32; 256], block: &mut [u8; 144]) {
    pack(&k_quick::affine::<32>(values, 15, 63), block);
}

/// A fit as a block.
#[inline(always)]
fn pack(fit: &Affine, block: &mut [u8; 144]) {
    let (header, codes) = block.split_at_mut(16);
    header.copy_from_slice(&pack_header(fit.d, fit.dmin, &fit.scales, &fit.mins));
    let pairs = fit.codes.as_chunks::<64>().0;
    for (bytes, codes) in codes.as_chunks_mut::<32>().0.iter_mut().zip(pairs) {
        for (i, byte) in bytes.iter_mut().enumerate() {
            *byte = codes[i] | codes[32 + i] << 4;
        }
    }
}

/// A block of the codes and of the header that Q4_K and Q5_K begin with:
/// `d, dmin: f16, packed: [u8; 12]`.
///
/// Scales and minimums 0 to 3 are the low six bits of bytes 0..4 and 4..8. Of 4 to 7, the low four
/// bits are the nibbles of bytes 8..12 (scale low, minimum high), and the upper two are the top bits
/// of bytes 0..4 and 4..8.
#[inline(always)]
pub(super) fn with_header(header: &[u8; 16], codes: [i8; 256]) -> SuperBlock {
    let (mut scales, mut mins) = ([0; 16], [0; 16]);
    for j in 0..4 {
        let (a, b, c) = (header[4 + j], header[8 + j], header[12 + j]);
        // Twice each, as sub-blocks are 32 long.
        scales[2 * j..][..2].fill((a & 63) as i8);
        mins[2 * j..][..2].fill(b & 63);
        scales[8 + 2 * j..][..2].fill((c & 15 | a >> 6 << 4) as i8);
        mins[8 + 2 * j..][..2].fill(c >> 4 | b >> 6 << 4);
    }
    SuperBlock {
        d: f16_at(&[header[0], header[1]]),
        dmin: f16_at(&[header[2], header[3]]),
        scales,
        mins,
        codes,
    }
}

/// The header that [`with_header`] reads; only the first eight scales and minimums are used.
pub(super) fn pack_header(d: f32, dmin: f32, scales: &[u8; 16], mins: &[u8; 16]) -> [u8; 16] {
    let mut header = [0; 16];
    header[..2].copy_from_slice(&f16_bytes(d));
    header[2..4].copy_from_slice(&f16_bytes(dmin));
    for j in 0..4 {
        header[4 + j] = scales[j] | scales[4 + j] >> 4 << 6;
        header[8 + j] = mins[j] | mins[4 + j] >> 4 << 6;
        header[12 + j] = scales[4 + j] & 15 | (mins[4 + j] & 15) << 4;
    }
    header
}
