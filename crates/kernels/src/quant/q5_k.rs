//! Q5_K: Q4_K with a fifth bit per code. See `docs/formats/k-quants.md`.

use super::bits::{bit_planes, join, nibbles};
use super::k_search::fit_affine;
use super::q4_k::{SubScales, pack_header};

/// `x = d·scale·code − dmin·min`; block:
/// `d, dmin: f16, scales: [u8; 12], high: [u8; 32], low: [u8; 128]`.
///
/// The low four bits lie as in Q4_K. The fifth bit of the codes of sub-block `s` is bit `s` of the
/// 32 bytes of `high`.
#[inline(always)]
pub(super) fn decode(block: &[u8; 176], out: &mut [f32; 256]) {
    let subs = SubScales::unpack(block.first_chunk().expect("16 of 176 bytes"));
    let high = bit_planes(
        block[16..]
            .first_chunk::<32>()
            .expect("32 bytes from 16 of 176"),
    );
    let packed = block[48..].as_chunks::<32>().0;
    for (i, (xs, packed)) in out
        .as_chunks_mut::<64>()
        .0
        .iter_mut()
        .zip(packed)
        .enumerate()
    {
        let mut codes = nibbles(packed);
        join::<4>(
            codes.as_flattened_mut(),
            high[2 * i..2 * i + 2].as_flattened(),
        );
        let halves = xs.as_chunks_mut::<32>().0.iter_mut().zip(&codes);
        for (half, (xs, codes)) in halves.enumerate() {
            let (scale, min) = subs.get(2 * i + half);
            for (x, code) in xs.iter_mut().zip(codes) {
                *x = scale * f32::from(*code) - min;
            }
        }
    }
}

pub(super) fn encode(values: &[f32; 256], block: &mut [u8; 176]) {
    let fit = fit_affine::<32>(values, 31, 63);
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
