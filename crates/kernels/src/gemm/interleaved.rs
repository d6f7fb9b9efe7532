//! Blocks of sixteen rows side by side, as kernels with one row in each lane read them.
//!
//! Where blocks are small, bringing the sums of several rows together takes more instructions than the products
//! themselves. Matrices of PQ2_0 are therefore rewritten when they are loaded, where the instruction set has a kernel
//! for it: in as many bytes, but read in order, and without a step across lanes. Its results are those of
//! [`integer`](super::integer), bit for bit.

#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;
use std::ops::Range;

use sterna_format::DType;

use super::activations::{QuantizedRow, QuantizedRows};
use super::panel::{self, Panel};
use super::{BlockMatrix, Columns, ROWS, Rounding};
use crate::Exec;
use crate::isa::{Isa, Level, multiversion};
use crate::memory::Pages;
use crate::pool::SharedSlice;
use crate::quant::f16_to_f32;

/// Columns of a [`Span`], and of one of its blocks: what shares a scale.
const SPAN: usize = 256;
const BLOCK: usize = 128;

/// Columns that share a scale of activations.
const GROUP: usize = 32;

/// Columns whose codes are together in a row: four bytes.
const WORD: usize = 16;

/// Bytes of a block as it is stored: its scale, then element `4j + i` at bits `2i` of byte `j`.
const BLOCK_BYTES: usize = 34;

/// 256 columns of sixteen rows: two blocks of each.
///
/// Column `16w + 4s + j` is at bits `2s` of byte `j` of word `w`, so that a shift and a mask give four adjacent columns.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Span {
    /// `[block][row]`, f16.
    scales: [[u16; ROWS]; SPAN / BLOCK],
    /// `[word][row]`.
    codes: [[u32; ROWS]; SPAN / WORD],
}

impl Span {
    /// The stored blocks of a row.
    fn row(&self, r: usize) -> [[u8; BLOCK_BYTES]; SPAN / BLOCK] {
        let mut blocks = [[0; BLOCK_BYTES]; SPAN / BLOCK];
        for (b, block) in blocks.iter_mut().enumerate() {
            let (scale, codes) = block.split_at_mut(2);
            scale.copy_from_slice(&self.scales[b][r].to_le_bytes());
            let words = &self.codes[b * BLOCK / WORD..];
            for (to, word) in codes.as_chunks_mut().0.iter_mut().zip(words) {
                *to = transposed(word[r]).to_le_bytes();
            }
        }
        blocks
    }
}

multiversion! {
    /// Sets a span to the stored blocks of up to sixteen rows.
    fn interleave(rows: &[&[[u8; BLOCK_BYTES]; SPAN / BLOCK]], span: &mut Span) {
        let mut words = [[0; SPAN / WORD]; ROWS];
        for (r, (blocks, words)) in rows.iter().zip(&mut words).enumerate() {
            for (b, block) in blocks.iter().enumerate() {
                span.scales[b][r] = u16::from_le_bytes([block[0], block[1]]);
                let of_block = words[b * BLOCK / WORD..].iter_mut();
                for (to, word) in of_block.zip(block[2..].as_chunks().0) {
                    *to = u32::from_le_bytes(*word);
                }
            }
        }
        for word in words.as_flattened_mut() {
            *word = transposed(*word);
        }
        for (w, codes) in span.codes.iter_mut().enumerate() {
            for (code, words) in codes.iter_mut().zip(&words) {
                *code = words[w];
            }
        }
    }
}

/// Sixteen codes of two bits as a matrix of four by four, transposed.
#[inline(always)]
fn transposed(codes: u32) -> u32 {
    // The quadrants off the diagonal change places, then within each the codes off its diagonal.
    let swap = |x: u32, mask: u32, by: u32| {
        let different = (x ^ x >> by) & mask;
        x ^ different ^ different << by
    };
    swap(swap(codes, 0x0000_f0f0, 12), 0x00cc_00cc, 6)
}

/// A matrix `[n, k]` of blocks of integers, multiplied like a [`BlockMatrix`] of them.
pub struct InterleavedMatrix {
    dtype: DType,
    n: usize,
    k: usize,
    /// [`Span`]s, `[n / 16][k / 256]`; rows past the last are zeros.
    pages: Pages,
}

/// Memory as spans, as many as it has room for.
fn spans(pages: &Pages) -> &[Span] {
    // SAFETY: spans are integers, which any bytes are.
    let (before, spans, _) = unsafe { pages.align_to() };
    debug_assert!(before.is_empty());
    spans
}

/// As [`spans`].
fn spans_mut(pages: &mut Pages) -> &mut [Span] {
    // SAFETY: spans are integers, which any bytes are, and whose bytes may be anything.
    let (before, spans, _) = unsafe { pages.align_to_mut() };
    debug_assert!(before.is_empty());
    spans
}

impl InterleavedMatrix {
    /// Whether `exec` multiplies blocks of `dtype` in rows of `k` columns faster interleaved.
    pub fn is_faster(exec: &Exec, dtype: DType, k: usize) -> bool {
        kernel(exec.isa).is_some() && has_form(dtype, k)
    }

    /// The same weights interleaved, on all threads; `None` where `exec` multiplies them faster as they are.
    pub fn new(exec: &Exec, w: &BlockMatrix<'_>) -> Option<InterleavedMatrix> {
        kernel(exec.isa).and_then(|_| InterleavedMatrix::on_any_level(exec, w))
    }

    /// The same, whether or not it is faster; `None` if there is no such form.
    pub(super) fn on_any_level(exec: &Exec, w: &BlockMatrix<'_>) -> Option<InterleavedMatrix> {
        if !has_form(w.dtype(), w.k()) || w.rounding() != Rounding::Blocks {
            return None;
        }
        let (n, k) = (w.n(), w.k());
        let per_tile = k / SPAN;
        let n_tiles = n.div_ceil(ROWS);
        let mut pages = Pages::zeroed(n_tiles * per_tile * size_of::<Span>());
        let spans = SharedSlice::new(spans_mut(&mut pages));
        exec.pool.for_ranges(n_tiles, 1, |tiles| {
            // SAFETY: ranges of tiles don't overlap.
            let spans = unsafe { spans.range_mut(tiles.start * per_tile..tiles.end * per_tile) };
            for (tile, spans) in tiles.zip(spans.chunks_exact_mut(per_tile.max(1))) {
                let rows = tile * ROWS..n.min((tile + 1) * ROWS);
                for (s, span) in spans.iter_mut().enumerate() {
                    let columns = s * SPAN..(s + 1) * SPAN;
                    let mut blocks = [&[[0; BLOCK_BYTES]; SPAN / BLOCK]; ROWS];
                    for (row, blocks) in rows.clone().zip(&mut blocks) {
                        let stored = w.part(row, columns.clone()).as_chunks().0;
                        *blocks = stored.first_chunk().expect("a span is two blocks");
                    }
                    interleave(exec.isa, &blocks, span);
                }
            }
        });
        Some(InterleavedMatrix {
            dtype: w.dtype(),
            n,
            k,
            pages,
        })
    }

    /// Its rows as they were stored: what [`BlockMatrix`] takes with [`Rounding::Blocks`].
    pub fn stored(&self) -> Vec<u8> {
        (0..self.n).flat_map(|i| self.row(i)).collect()
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The type that its weights had.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.k / BLOCK * BLOCK_BYTES
    }

    /// Decodes row `i` into `out`, `[k]`. Panics if there is no such row.
    pub(super) fn decode(&self, isa: Isa, i: usize, out: &mut [f32]) {
        let row = self.row(i);
        BlockMatrix::new(self.dtype, 1, self.k, Rounding::Blocks, &row)
            .expect("it was made of such rows")
            .decode(isa, 0, out);
    }

    /// Row `i` as it was stored.
    fn row(&self, i: usize) -> Vec<u8> {
        assert!(i < self.n);
        let spans = self.tile(i / ROWS).iter();
        let blocks = spans.flat_map(|span| span.row(i % ROWS));
        blocks.flatten().collect()
    }

    /// The spans of sixteen rows.
    fn tile(&self, tile: usize) -> &[Span] {
        let per_tile = self.k / SPAN;
        &spans(&self.pages)[tile * per_tile..][..per_tile]
    }
}

/// Whether blocks of `dtype` in rows of `k` columns can be interleaved.
fn has_form(dtype: DType, k: usize) -> bool {
    matches!(dtype, DType::Q2_0_G128 | DType::PQ2_0) && k.is_multiple_of(SPAN)
}

impl fmt::Debug for InterleavedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterleavedMatrix")
            .field("dtype", &self.dtype)
            .field("n", &self.n)
            .field("k", &self.k)
            .finish_non_exhaustive()
    }
}

/// The products of sixteen rows, which have as many spans as the activations, with a row of activations.
///
/// # Safety
/// The machine has the instructions that the function was made for.
type Kernel = unsafe fn(tile: &[Span], x: QuantizedRow<'_>) -> [f32; ROWS];

/// The kernel that is faster than those for stored rows, if there is one.
fn kernel(isa: Isa) -> Option<Kernel> {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Amx => Some(x86::dot),
        _ => None,
    }
}

multiversion! {
    /// The definition.
    fn dot(tile: &[Span], x: QuantizedRow<'_>) -> [f32; ROWS] {
        let mut acc = [0.0; ROWS];
        for (s, span) in tile.iter().enumerate() {
            for g in 0..SPAN / GROUP {
                let words = &span.codes[g * GROUP / WORD..][..GROUP / WORD];
                let first = s * SPAN + g * GROUP;
                let q = x.q[first..first + GROUP].as_chunks::<4>().0;
                let step = x.scales[first / GROUP];
                for (r, acc) in acc.iter_mut().enumerate() {
                    let quads = words.iter().flat_map(|word| (0..4).map(|s| word[r] >> (2 * s)));
                    let codes = quads.map(|quad| quad.to_le_bytes().map(|code| i32::from(code & 3) - 1));
                    let products = codes.zip(q).map(|(codes, q)| (0..4).map(|j| codes[j] * i32::from(q[j])).sum::<i32>());
                    let scale = f16_to_f32(span.scales[g * GROUP / BLOCK][r]);
                    *acc += products.sum::<i32>() as f32 * (scale * step);
                }
            }
        }
        acc
    }
}

/// As [`super::integer::multiply`].
pub(super) fn multiply(
    isa: Isa,
    w: &InterleavedMatrix,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    if x.m() > 1 {
        let tile = |first: usize| {
            debug_assert!(first.is_multiple_of(ROWS));
            let spans = w.tile(first / ROWS);
            move |columns: Range<usize>, panel: &mut Panel| {
                unpack(isa, &spans[columns.start / SPAN], panel);
            }
        };
        return panel::multiply_groups(isa, (w.dtype, w.k), rows, x, out, tile);
    }
    for t in 0..x.m() {
        for tile in rows.start / ROWS..rows.end.div_ceil(ROWS) {
            let spans = w.tile(tile);
            let sums = match kernel(isa) {
                // SAFETY: it is the kernel of an `Isa`, which this machine has been seen to offer.
                Some(kernel) => unsafe { kernel(spans, x.row(t)) },
                None => dot(isa, spans, x.row(t)),
            };
            let first = tile * ROWS;
            let wanted = rows.start.max(first)..rows.end.min(first + ROWS);
            // SAFETY: no other task has these rows, so none writes these columns.
            let out = unsafe { out.row_mut(t, wanted.clone()) };
            out.copy_from_slice(&sums[wanted.start - first..wanted.end - first]);
        }
    }
}

multiversion! {
    /// Writes a span into a panel.
    fn unpack(span: &Span, panel: &mut Panel) {
        for (word, quads) in span.codes.iter().zip(panel.codes.as_chunks_mut::<4>().0) {
            for (s, quads) in quads.iter_mut().enumerate() {
                for (quad, word) in quads.iter_mut().zip(word) {
                    *quad = (word >> (2 * s) & 0x0303_0303).to_le_bytes();
                }
            }
        }
        for (g, d) in panel.d.iter_mut().enumerate() {
            for (d, scale) in d.iter_mut().zip(&span.scales[g * GROUP / BLOCK]) {
                *d = f16_to_f32(*scale);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{Random, exec_matrix};

    #[test]
    fn rows_come_back_as_they_were() {
        let mut random = Random::new(5);
        for (n, k) in [(16, 256), (1, 512), (37, 768), (0, 256), (3, 0)] {
            let bytes = (0..n * k / BLOCK * BLOCK_BYTES).map(|_| random.next() as u8);
            let bytes = bytes.collect::<Vec<_>>();
            let w = BlockMatrix::new(DType::PQ2_0, n, k, Rounding::Blocks, &bytes).unwrap();
            for exec in exec_matrix() {
                let interleaved = InterleavedMatrix::on_any_level(&exec, &w).unwrap();
                assert_eq!(interleaved.stored(), bytes, "[{n}, {k}]");
                for i in 0..n {
                    let (mut expected, mut got) = (vec![0.0; k], vec![0.0; k]);
                    w.decode(exec.isa, i, &mut expected);
                    interleaved.decode(exec.isa, i, &mut got);
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&got), bits(&expected));
                }
            }
        }
    }

    #[test]
    fn other_matrices_are_left() {
        let exec = Exec::new(1, Isa::detect());
        for (dtype, k, rounding) in [
            (DType::Q8_0, 256, Rounding::Blocks),
            (DType::PQ2_0, 384, Rounding::Blocks),
            (DType::PQ2_0, 256, Rounding::None),
        ] {
            let bytes = vec![0; 16 * k / dtype.block_len() * dtype.block_bytes()];
            let w = BlockMatrix::new(dtype, 16, k, rounding, &bytes).unwrap();
            assert!(InterleavedMatrix::on_any_level(&exec, &w).is_none());
        }
    }

    #[test]
    fn codes_are_transposed() {
        let code = |x: u32, i: usize| x >> (2 * i) & 3;
        let mut random = Random::new(6);
        for _ in 0..100 {
            let x = random.next() as u32;
            for i in 0..16 {
                assert_eq!(code(transposed(x), i), code(x, i % 4 * 4 + i / 4));
            }
        }
    }
}
