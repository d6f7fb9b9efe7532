//! Q3_K: 256 three-bit codes, 16 sub-blocks with signed 6-bit scales. See
//! `docs/formats/k-quants.md`.

use super::batch::Weights;
use super::bits::{bit_planes, crumbs, join, signed};
use super::float::{f16_at, f16_bytes};
use super::integers::SuperBlock;
use super::k_fit::Symmetric;
use super::k_quick;
use super::k_symmetric::{self, Limits};
use super::lanes::Simd;

/// `x = d · scale · (code − 4)`; block:
/// `high: [u8; 32], low: [u8; 64], scales: [u8; 12], d: f16`.
///
/// The low two bits are stored as in Q2_K. The third bit of the `i`-th run of 32 elements is bit `i` of the
/// 32 bytes of `high`.
#[inline(always)]
pub(super) fn integers(block: &[u8; 110]) -> SuperBlock {
    let high = bit_planes(block.first_chunk::<32>().expect("32 of 110 bytes"));
    let high = high.as_chunks::<4>().0;
    let low = block[32..96].as_chunks::<32>().0;
    let mut codes = [0; 256];
    for ((codes, low), high) in codes.as_chunks_mut::<128>().0.iter_mut().zip(low).zip(high) {
        let mut joined = crumbs(low);
        join::<2>(joined.as_flattened_mut(), high.as_flattened());
        signed(joined.as_flattened(), 4, codes);
    }
    SuperBlock {
        d: f16_at(&[block[108], block[109]]),
        dmin: 0.0,
        scales: unpack_scales(block[96..].first_chunk().expect("12 bytes from 96 of 110")),
        mins: [0; 16],
        codes,
    }
}

/// One block for every 256 values.
#[inline(always)]
pub(super) fn encode<S: Simd>(simd: S, values: &[[f32; 256]], blocks: &mut [[u8; 110]]) {
    const LIMITS: Limits = Limits {
        half: 4.0,
        half_scale: 32.0,
        weights: Weights::Flat,
    };
    k_symmetric::fit(simd, values, LIMITS, |i, fit| pack(fit, &mut blocks[i]));
}

/// Encodes a block without a search.
#[inline(always)]
pub(super) fn encode_quick(values: &[f32; 256], block: &mut [u8; 110]) {
    pack(&k_quick::symmetric(values, 4, 32), block);
}

/// A fit as a block.
#[inline(always)]
fn pack(fit: &Symmetric, block: &mut [u8; 110]) {
    block.fill(0);
    for (s, codes) in fit.codes.as_chunks::<16>().0.iter().enumerate() {
        let p = Position::of(s);
        for (i, code) in codes.iter().enumerate() {
            let code = (code + 4) as u8;
            block[p.low + i] |= (code & 3) << p.low_shift;
            block[p.high + i] |= (code >> 2) << p.high_shift;
        }
    }
    block[96..108].copy_from_slice(&pack_scales(&fit.scales));
    block[108..].copy_from_slice(&f16_bytes(fit.d));
}

/// The location of the codes of a sub-block.
struct Position {
    low: usize,
    low_shift: usize,
    high: usize,
    high_shift: usize,
}

impl Position {
    #[inline(always)]
    fn of(s: usize) -> Self {
        let column = s % 2 * 16;
        Position {
            low: 32 + s / 8 * 32 + column,
            low_shift: s % 8 / 2 * 2,
            high: column,
            high_shift: s / 2,
        }
    }
}

/// Scales are stored with 32 added, six bits each: the low four of scales `j` and `8 + j` in byte `j`, the
/// high two of scales `j`, `4 + j`, `8 + j` and `12 + j` in byte `8 + j`, lowest first.
#[inline(always)]
fn unpack_scales(packed: &[u8; 12]) -> [i8; 16] {
    let mut scales = [0; 16];
    for (j, scale) in scales.iter_mut().enumerate() {
        let low = packed[j % 8] >> (j / 8 * 4) & 15;
        let high = packed[8 + j % 4] >> (j / 4 * 2) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
    scales
}

fn pack_scales(scales: &[i8; 16]) -> [u8; 12] {
    let mut packed = [0; 12];
    for (j, scale) in scales.iter().enumerate() {
        let scale = (scale + 32) as u8;
        packed[j % 8] |= (scale & 15) << (j / 8 * 4);
        packed[8 + j % 4] |= (scale >> 4) << (j / 4 * 2);
    }
    packed
}
