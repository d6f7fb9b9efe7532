//! Trits with one scale.

use std::ops::Range;

use super::{
    Columns, InterleavedMatrix, Order, Panel, Plain, QuantizedRows, ROWS, Sums, Tiles, across,
    multiply_tiles, panel, plain_mut,
};
#[cfg(target_arch = "x86_64")]
use super::{trits_amx, trits_x86};
use crate::Exec;
use crate::gemm::ternary::TernaryMatrix;
use crate::isa::{Isa, multiversion};
use crate::memory::Pages;
use crate::pool::SharedSlice;
use crate::quant::ternary;

/// Columns of a [`Block`].
pub(super) const BLOCK: usize = ternary::BLOCK;

/// Words of a row in a block.
pub(super) const WORDS: usize = ternary::BLOCK_BYTES / 4;

/// Columns from those of the first codes of a word's bytes to those of the second, and so on.
pub(super) const QUARTER: usize = BLOCK / 4;

/// Codes are 0, 1 and 2 at these bits of each byte; the first are the highest.
pub(super) const CODES: u32 = 0x0303_0303;

/// A block of each row as [`ternary`] has it: word `i` is bytes `4i..4i + 4`, which have columns `4i..4i + 4` of every
/// quarter.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Block {
    /// `[word][row]`.
    pub(super) words: [[u32; ROWS]; WORDS],
}

// SAFETY: integers without room between them.
unsafe impl Plain for Block {}

/// What multiplies sixteen rows, which have as many columns as the activations, or fewer. Sums are those of codes, too large
/// by the sums of activations.
pub(super) struct Kernels {
    pub(super) one: One,
    pub(super) several: Several,
}

/// The sums with a row of activations.
///
/// # Safety
/// The machine has the instructions that the function was made for.
type One = unsafe fn(tile: &[Block], q: &[i8]) -> [i32; ROWS];

/// The sums with `n` rows of activations in [`Order::Quads`], from `first` on, the first of a tile.
///
/// # Safety
/// As [`One`].
type Several = unsafe fn(tile: &[Block], x: &Tiles, first: usize, n: usize, sums: &mut Sums<i32>);

/// The kernels that are faster than those for stored rows, if there are any.
pub(super) fn kernels(isa: Isa) -> Option<Kernels> {
    #[cfg(target_arch = "x86_64")]
    if super::x86::is_offered(isa) {
        return Some(match super::x86::prefetches_nearest(isa) {
            true => trits_x86::kernels::<true>(),
            false => trits_x86::kernels::<false>(),
        });
    }
    let _ = isa;
    None
}

/// The blocks of a matrix.
pub(super) fn interleaved(exec: &Exec, w: &TernaryMatrix<'_>) -> Pages {
    let (n, per_tile) = (w.n(), w.k().div_ceil(BLOCK));
    let n_tiles = n.div_ceil(ROWS);
    let mut pages = Pages::zeroed(n_tiles * per_tile * size_of::<Block>());
    let blocks = SharedSlice::new(plain_mut::<Block>(&mut pages));
    exec.pool.for_ranges(n_tiles, 1, |tiles| {
        // SAFETY: ranges of tiles don't overlap.
        let blocks = unsafe { blocks.range_mut(tiles.start * per_tile..tiles.end * per_tile) };
        for (tile, blocks) in tiles.zip(blocks.chunks_exact_mut(per_tile.max(1))) {
            for (b, block) in blocks.iter_mut().enumerate() {
                let mut rows = [[0; WORDS]; ROWS];
                for (row, i) in rows.iter_mut().zip(tile * ROWS..n.min((tile + 1) * ROWS)) {
                    let stored = w.block(i, b);
                    for (word, bytes) in row.iter_mut().zip(stored.as_chunks().0) {
                        *word = u32::from_le_bytes(*bytes);
                    }
                }
                across(&rows, &mut block.words);
            }
        }
    });
    pages
}

/// Writes row `r` of a tile as [`ternary`] has it.
pub(super) fn write_row(tile: &[Block], r: usize, row: &mut [u8]) {
    let words = tile.iter().flat_map(|block| &block.words);
    for (to, word) in row.as_chunks_mut().0.iter_mut().zip(words) {
        *to = word[r].to_le_bytes();
    }
}

/// As [`InterleavedMatrix::rows_at_a_time`].
pub(super) fn rows_at_a_time(x: &QuantizedRows) -> usize {
    #[cfg(target_arch = "x86_64")]
    if x.tiles().order() == Order::Lines && trits_amx::takes_two(x.m()) {
        return 2 * ROWS;
    }
    let _ = x;
    ROWS
}

/// As [`super::multiply`].
pub(super) fn multiply(
    isa: Isa,
    w: &InterleavedMatrix,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    if x.m() > 1 && x.tiles().order() != Order::Quads {
        #[cfg(target_arch = "x86_64")]
        if x.m() <= trits_amx::MOST_ROWS {
            // SAFETY: only `Isa`s with AMX have this order, which this machine has been seen to offer.
            return unsafe { trits_amx::multiply(w, rows, x, out) };
        }
        let tile = |first: usize| {
            debug_assert!(first.is_multiple_of(ROWS));
            let blocks = w.blocks(first / ROWS);
            move |columns: Range<usize>, panel: &mut Panel| {
                unpack(
                    isa,
                    &blocks[columns.start / BLOCK..columns.end / BLOCK],
                    panel,
                );
            }
        };
        return panel::multiply_trits(isa, (w.scale, w.k), rows, x, out, tile);
    }
    let kernels = kernels(isa);
    let add = |tile: usize, tokens: Range<usize>, sums: &mut Sums<i32>| {
        let blocks = w.blocks(tile);
        match &kernels {
            None => {
                for (t, sums) in tokens.zip(sums) {
                    *sums = reference(blocks, x.row(t).q);
                }
            }
            // SAFETY: it is the kernel of an `Isa`, which this machine has been seen to offer.
            Some(kernels) if x.m() == 1 => sums[0] = unsafe { (kernels.one)(blocks, x.row(0).q) },
            // SAFETY: as above.
            Some(kernels) => unsafe {
                (kernels.several)(blocks, x.tiles(), tokens.start, tokens.len(), sums);
            },
        }
    };
    let finish = |t: usize, sums: &[i32], out: &mut [f32]| {
        let x = x.row(t);
        let scale = w.scale / x.scales[0];
        for (out, sum) in out.iter_mut().zip(sums) {
            *out = (sum - x.sum) as f32 * scale;
        }
    };
    multiply_tiles(rows, x.m(), out, add, finish);
}

/// The sums of a tile with a row of activations: the reference.
fn reference(tile: &[Block], q: &[i8]) -> [i32; ROWS] {
    let mut sums = [0; ROWS];
    for (block, q) in tile.iter().zip(q.as_chunks::<BLOCK>().0) {
        for (i, word) in block.words.iter().enumerate() {
            for (g, q) in q.as_chunks::<QUARTER>().0.iter().enumerate() {
                let q = &q[4 * i..][..4];
                for (sum, word) in sums.iter_mut().zip(word) {
                    let codes = (word >> (6 - 2 * g) & CODES).to_le_bytes();
                    let products = codes.iter().zip(q);
                    *sum += products
                        .map(|(&code, &q)| i32::from(code) * i32::from(q))
                        .sum::<i32>();
                }
            }
        }
    }
    sums
}

/// Writes the codes of blocks into a panel.
fn unpack(isa: Isa, blocks: &[Block], panel: &mut Panel) {
    #[cfg(target_arch = "x86_64")]
    if super::x86::is_offered(isa) {
        // SAFETY: the level has the instructions.
        return unsafe { trits_x86::unpack(blocks, panel) };
    }
    unpack_portable(isa, blocks, panel);
}

multiversion! {
    /// The reference.
    fn unpack_portable(blocks: &[Block], panel: &mut Panel) {
        for (block, quads) in blocks.iter().zip(panel.codes.as_chunks_mut::<{ BLOCK / 4 }>().0) {
            for (g, quads) in quads.as_chunks_mut::<WORDS>().0.iter_mut().enumerate() {
                for (quad, word) in quads.iter_mut().zip(&block.words) {
                    for (codes, word) in quad.iter_mut().zip(word) {
                        *codes = (word >> (6 - 2 * g) & CODES).to_le_bytes();
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::ternary::unpack as codes_of;
    use crate::gemm::ternary::{I2s, TernaryPacking};
    use crate::test_data::{Random, exec_matrix};

    #[test]
    fn panels_have_the_codes_of_the_rows() {
        let (n, k) = (ROWS, 3 * BLOCK);
        let mut random = Random::new(3);
        let codes: Vec<u8> = (0..n * k / 4).map(|_| random.next() as u8).collect();
        let w = TernaryMatrix::packed(TernaryPacking::I2s, n, k, 1.0, &codes).unwrap();
        for exec in exec_matrix() {
            let pages = interleaved(&exec, &w);
            let mut panel = Box::new(Panel::EMPTY);
            unpack(exec.isa, &super::super::plain(&pages)[1..], &mut panel);
            for r in 0..n {
                for b in [1, 2] {
                    let codes = codes_of::<I2s>(&w.block(r, b));
                    let quads = &panel.codes[(b - 1) * BLOCK / 4..][..BLOCK / 4];
                    let got = quads.iter().flat_map(|quad| quad[r]);
                    assert!(got.eq(codes.into_iter().flatten()), "{exec:?} {r} {b}");
                }
            }
        }
    }
}
