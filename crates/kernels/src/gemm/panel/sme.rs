//! Products of panels of trits as outer products of SME: sixteen rows of activations with the sixteen rows of weights of a
//! panel, four columns at a time.
//!
//! A panel has the layout of an operand; activations are in [`Order::Sixteens`](Order). Where blocks have scales, sums would
//! leave the tiles every few columns; they have dot products.

use std::ops::Range;

use super::{COLUMNS, Kernel, Lanes, Panel};
use crate::gemm::activations::{SIXTEEN, Tiles};
use crate::sme;

const _: () = assert!(SIXTEEN == sme::ROWS && super::ROWS == sme::ROWS);

/// Exact sums over all columns.
pub(super) const TERNARY: Kernel<i32> = Kernel {
    columns: COLUMNS,
    begin,
    end: super::kernels::nothing,
    add: ternary,
};

/// # Safety
/// The machine has SME.
unsafe fn begin() {
    // SAFETY: the caller's promise.
    let has_length = unsafe { sme::begin() };
    assert!(
        has_length,
        "the system gives this thread other vectors than the first"
    );
}

/// # Safety
/// As [`Products`](super::Products).
unsafe fn ternary(panel: &Panel, x: &Tiles, columns: Range<usize>, sums: &mut [Lanes<i32>]) {
    assert!(sums.len() == x.m() && columns.end <= x.k() && columns.len() <= COLUMNS);
    let quads = columns.start / 4..columns.end / 4;
    if quads.is_empty() {
        return;
    }
    let (codes, n) = (panel.codes.as_ptr().cast(), quads.len());
    let stride = SIXTEEN * x.k();
    let acts = |t| x.sixteens(t)[quads.start..].as_ptr().cast();
    let (whole, rest) = sums.as_chunks_mut::<SIXTEEN>();
    let mut t = 0;
    for tiles in whole.chunks_mut(4) {
        // SAFETY: there are as many activations and sums as that; the rest is the caller's promise.
        unsafe {
            if tiles.len() == 4 {
                sme::four_by_one(acts(t), stride, codes, n, tiles.as_mut_ptr().cast());
            } else {
                for (i, tile) in tiles.iter_mut().enumerate() {
                    sme::one_by_one(acts(t + i * SIXTEEN), stride, codes, n, tile.as_mut_ptr());
                }
            }
        }
        t += tiles.len() * SIXTEEN;
    }
    if !rest.is_empty() {
        let mut tile = [[0; super::ROWS]; SIXTEEN];
        tile[..rest.len()].copy_from_slice(rest);
        // SAFETY: activations are whole tiles; the rest is the caller's promise.
        unsafe { sme::one_by_one(acts(t), stride, codes, n, tile.as_mut_ptr()) };
        rest.copy_from_slice(&tile[..rest.len()]);
    }
}
