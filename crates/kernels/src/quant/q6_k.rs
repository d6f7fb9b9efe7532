//! Q6_K: 256 six-bit codes, 16 sub-blocks with signed 8-bit scales. See
//! `docs/formats/k-quants.md`.

use super::bits::{crumbs, join, nibbles};
use super::float::{f16_at, f16_bytes};
use super::k_search::fit_symmetric;

/// `x = d · scale · (code − 32)`; block:
/// `low: [u8; 128], high: [u8; 64], scales: [i8; 16], d: f16`.
///
/// Each half of the block has 64 bytes of low and 32 of high bits for 128 elements. Its elements 0
/// to 63 have the low nibbles, 64 to 127 the high; the upper two bits of each run of 32 elements
/// are bits 1:0, 3:2, 5:4 and 7:6 of the high bytes.
#[inline(always)]
pub(super) fn decode(block: &[u8; 210], out: &mut [f32; 256]) {
    let d = f16_at(&[block[208], block[209]]);
    let low = block[..128].as_chunks::<64>().0;
    let high = block[128..192].as_chunks::<32>().0;
    let scales = block[192..208].as_chunks::<8>().0;
    for (half, xs) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let mut codes = nibbles(&low[half]);
        join::<4>(codes.as_flattened_mut(), crumbs(&high[half]).as_flattened());
        let codes = codes.as_flattened().as_chunks::<16>().0;
        let subs = xs.as_chunks_mut::<16>().0.iter_mut().zip(codes);
        for ((xs, codes), scale) in subs.zip(&scales[half]) {
            let scale = d * f32::from(*scale as i8);
            for (x, code) in xs.iter_mut().zip(codes) {
                *x = scale * (i32::from(*code) - 32) as f32;
            }
        }
    }
}

pub(super) fn encode(values: &[f32; 256], block: &mut [u8; 210]) {
    let fit = fit_symmetric(values, 32, 128);
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

/// Where the codes of a sub-block lie.
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
