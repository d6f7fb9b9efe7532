//! Q6_K: 256 six-bit codes, 16 sub-blocks with signed 8-bit scales. See
//! `docs/formats/k-quants.md`.

use super::batch::Weights;
use super::bits::{crumbs, join, nibbles, signed};
use super::float::{f16_at, f16_bytes};
use super::integers::SuperBlock;
use super::k_fit::Symmetric;
use super::k_quick;
use super::k_symmetric::{self, Limits};
use super::lanes::Simd;

/// `x = d · scale · (code − 32)`; block:
/// `low: [u8; 128], high: [u8; 64], scales: [i8; 16], d: f16`.
///
/// Each half of the block has 64 bytes of low and 32 of high bits for 128 elements. Its elements 0
/// to 63 have the low nibbles, 64 to 127 the high; the upper two bits of each run of 32 elements
/// are bits 1:0, 3:2, 5:4 and 7:6 of the high bytes.
#[inline(always)]
pub(super) fn integers(block: &[u8; 210]) -> SuperBlock {
    let low = block[..128].as_chunks::<64>().0;
    let high = block[128..192].as_chunks::<32>().0;
    let mut codes = [0; 256];
    for (half, codes) in codes.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let mut joined = nibbles(&low[half]);
        join::<4>(
            joined.as_flattened_mut(),
            crumbs(&high[half]).as_flattened(),
        );
        signed(joined.as_flattened(), 32, codes);
    }
    let scales: &[u8; 16] = block[192..]
        .first_chunk()
        .expect("16 bytes from 192 of 210");
    SuperBlock {
        d: f16_at(&[block[208], block[209]]),
        dmin: 0.0,
        scales: scales.map(|scale| scale as i8),
        mins: [0; 16],
        codes,
    }
}

/// One block for every 256 values.
#[inline(always)]
pub(super) fn encode<S: Simd>(simd: S, values: &[[f32; 256]], blocks: &mut [[u8; 210]]) {
    const LIMITS: Limits = Limits {
        half: 32.0,
        half_scale: 128.0,
        weights: Weights::Power,
    };
    k_symmetric::fit(simd, values, LIMITS, |i, fit| pack(fit, &mut blocks[i]));
}

/// Encodes a block without a search.
#[inline(always)]
pub(super) fn encode_quick(values: &[f32; 256], block: &mut [u8; 210]) {
    pack(&k_quick::symmetric(values, 32, 128), block);
}

/// A fit as a block.
#[inline(always)]
fn pack(fit: &Symmetric, block: &mut [u8; 210]) {
    block.fill(0);
    for (s, codes) in fit.codes.as_chunks::<16>().0.iter().enumerate() {
        let p = Position::of(s);
        for (i, code) in codes.iter().enumerate() {
            let code = (code + 32) as u8;
            block[p.low + i] |= (code & 15) << p.low_shift;
            block[p.high + i] |= (code >> 4) << p.high_shift;
        }
        block[192 + s] = fit.scales[s] as u8;
    }
    block[208..].copy_from_slice(&f16_bytes(fit.d));
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
        let (half, quarter, column) = (s / 8, s % 8 / 2, s % 2 * 16);
        Position {
            low: half * 64 + quarter % 2 * 32 + column,
            low_shift: quarter / 2 * 4,
            high: 128 + half * 32 + column,
            high_shift: quarter * 2,
        }
    }
}
