//! Q2_K: 256 two-bit codes, 16 sub-blocks with 4-bit scales and minimums. See
//! `docs/formats/k-quants.md`.

use super::bits::crumbs;
use super::float::{f16_at, f16_bytes};
use super::k_search::fit_affine;

/// `x = d·scale·code − dmin·min`; block:
/// `scales: [u8; 16]` (scale in the low nibble, min in the high), `codes: [u8; 64], d, dmin: f16`.
///
/// Each 32 bytes of codes hold 128 elements, the first 32 in bits 1:0, the next in 3:2, and so on.
#[inline(always)]
pub(super) fn decode(block: &[u8; 84], out: &mut [f32; 256]) {
    let d = f16_at(&[block[80], block[81]]);
    let dmin = f16_at(&[block[82], block[83]]);
    let scales = block.as_chunks::<8>().0;
    let packed = block[16..80].as_chunks::<32>().0;
    for (half, xs) in out.as_chunks_mut::<128>().0.iter_mut().enumerate() {
        let codes = crumbs(&packed[half]);
        let codes = codes.as_flattened().as_chunks::<16>().0;
        let subs = xs.as_chunks_mut::<16>().0.iter_mut().zip(codes);
        for ((xs, codes), scale) in subs.zip(&scales[half]) {
            let (scale, min) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
            for (x, code) in xs.iter_mut().zip(codes) {
                *x = scale * f32::from(*code) - min;
            }
        }
    }
}

pub(super) fn encode(values: &[f32; 256], block: &mut [u8; 84]) {
    let fit = fit_affine::<16>(values, 3, 15);
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
