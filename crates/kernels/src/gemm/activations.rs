//! Activations quantized to int8, in the three scalings that weights need.

use super::panel;
use super::prologue::Rows;
use crate::Exec;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::quant::q8;
use crate::shape::{self, ShapeError};
use crate::sync::atomic::{AtomicUsize, Ordering};

/// Rows of quantized activations are padded to a multiple of this: the longest block.
pub(super) const PADDING: usize = 256;

/// How many activations share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scaling {
    /// A whole row, as BitLinear layers were trained; rounded as in PyTorch.
    Row,
    /// Blocks of 256, for weights whose blocks contain integer scales (Q4_K and the like).
    Blocks256,
    /// Blocks of 32, for weights of smaller blocks.
    Blocks32,
}

/// Granularity of stored sums: the finest at which any weights have an offset.
pub(super) const SUM_LEN: usize = 16;

/// Activation rows quantized to int8.
///
/// `x[t, j] ≈ q[t, j] · step[t, j / block]`; rows are padded with zeros to whole blocks of
/// [`PADDING`].
#[derive(Debug, Default, Clone)]
pub(super) struct QuantizedRows {
    m: usize,
    k: usize,
    /// `[m, stride]`.
    q: Vec<i8>,
    /// The steps: `[m, scales of a row]`. For [`Scaling::Row`] the inverse, as PyTorch divides by it.
    scales: Vec<f32>,
    /// Sums of [`SUM_LEN`] values each, `[m, stride / SUM_LEN]`; they fit 12 bits.
    sums: Vec<i16>,
    /// Sums of whole rows, `[m]`.
    row_sums: Vec<i32>,
    tiles: Tiles,
}

/// Rows in a tile.
pub(super) const TILE: usize = 4;

/// Rows that are stored together in [`Order::Lines`].
#[cfg(target_arch = "x86_64")]
pub(super) const LINES: usize = 16;

/// Rows that are stored together in [`Order::Sixteens`].
#[cfg(target_arch = "aarch64")]
pub(super) const SIXTEEN: usize = 16;

/// In which order [`Tiles`] have their values.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    /// `[tile][stride / 4][row][4]`: four columns of the four rows of a tile, then the next four columns.
    #[default]
    Quads,
    /// `[stride / 256][m / LINES][4][LINES][64]`: 64 columns of sixteen rows four times, and the same of the next rows, then
    /// the next 256 columns of all rows. Past the rows of the last tile values are arbitrary.
    #[cfg(target_arch = "x86_64")]
    Lines,
    /// `[m / SIXTEEN][stride / 4][SIXTEEN][4]`: four columns of sixteen rows, then the next four columns; of
    /// [`Scaling::Row`]. Past the rows of the last tile values are arbitrary.
    #[cfg(target_arch = "aarch64")]
    Sixteens,
}

/// Values in a cache line: four columns of four rows four times or of sixteen rows, or 64 columns of one row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([i8; 64]);

/// Groups of four values of a line.
const QUADS: usize = size_of::<Line>() / 4;

impl Line {
    /// The same values, four at a time.
    fn quads(lines: &[Line]) -> &[[i8; 4]] {
        // SAFETY: a line is 64 values and nothing else.
        unsafe { std::slice::from_raw_parts(lines.as_ptr().cast(), QUADS * lines.len()) }
    }

    /// As [`Line::quads`].
    fn quads_mut(lines: &mut [Line]) -> &mut [[i8; 4]] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), QUADS * lines.len()) }
    }
}

/// The quantized rows once more, interleaved as kernels for several rows read them. Empty for a single row.
///
/// Rows are padded with zeros to whole tiles.
#[derive(Debug, Default, Clone)]
pub(super) struct Tiles {
    order: Order,
    n_tiles: usize,
    stride: usize,
    n_scales: usize,
    q: Vec<Line>,
    /// Sums of two times [`SUM_LEN`] values, `[tile][stride / 32][row][2]`; in [`Order::Lines`] of [`Scaling::Blocks256`]
    /// only.
    pairs: Vec<[[i16; 2]; TILE]>,
    /// In [`Order::Lines`], of [`Scaling::Blocks256`], sums of two times 32 values, `[tile][stride / 64][row][2]`.
    wide_pairs: Vec<[[i16; 2]; TILE]>,
    /// `[tile][scales of a row][row]`.
    scales: Vec<[f32; TILE]>,
}

impl Tiles {
    /// Rows, including padding.
    pub(super) fn m(&self) -> usize {
        self.n_tiles * TILE
    }

    /// Columns, including padding.
    pub(super) fn k(&self) -> usize {
        self.stride
    }

    pub(super) fn order(&self) -> Order {
        self.order
    }

    /// In [`Order::Quads`], groups of four columns of the four rows of a tile, followed by those of later tiles. Panics
    /// if there is no such tile.
    pub(super) fn q(&self, tile: usize) -> &[[[i8; 4]; TILE]] {
        debug_assert_eq!(self.order, Order::Quads);
        assert!(tile < self.n_tiles);
        &Line::quads(&self.q).as_chunks().0[tile * self.stride / 4..]
    }

    /// In [`Order::Lines`], the 256 columns from `start` on, a multiple of that, of the [`LINES`] rows from `t` on, a multiple
    /// of that: 64 columns of each row, then the next 64; followed by those of the next rows. Panics if there are no such
    /// rows or columns.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn lines(&self, t: usize, start: usize) -> &[[i8; 64]] {
        debug_assert_eq!(self.order, Order::Lines);
        debug_assert!(t.is_multiple_of(LINES) && start.is_multiple_of(PADDING));
        assert!(t < self.m() && start < self.stride);
        let n_rows = self.m().next_multiple_of(LINES);
        let columns = &self.q[(start * n_rows + t * PADDING) / 64..];
        // SAFETY: a line is 64 values and nothing else.
        unsafe { std::slice::from_raw_parts(columns.as_ptr().cast(), columns.len()) }
    }

    /// In [`Order::Sixteens`], groups of four columns of the [`SIXTEEN`] rows from `t` on, a multiple of that, followed by those
    /// of the next rows. Panics if there are no such rows.
    #[cfg(target_arch = "aarch64")]
    pub(super) fn sixteens(&self, t: usize) -> &[[[i8; 4]; SIXTEEN]] {
        debug_assert_eq!(self.order, Order::Sixteens);
        debug_assert!(t.is_multiple_of(SIXTEEN));
        assert!(t < self.m());
        Line::quads(&self.q[t * self.stride / 64..]).as_chunks().0
    }

    /// Sums of two times 16 columns from column `start` on, a multiple of 32, followed by those of later tiles, of
    /// [`Tiles::k`] columns each; in [`Order::Lines`], of [`Scaling::Blocks256`]. Panics if there is no such tile or column.
    pub(super) fn pairs(&self, tile: usize, start: usize) -> &[[[i16; 2]; TILE]] {
        assert!(tile < self.n_tiles && start <= self.stride);
        &self.pairs[tile * self.stride / 32..][start / 32..]
    }

    /// In [`Order::Lines`], of [`Scaling::Blocks256`], sums of two times 32 columns from column `start` on, a multiple of 64:
    /// as [`Tiles::pairs`].
    #[cfg(target_arch = "x86_64")]
    pub(super) fn wide_pairs(&self, tile: usize, start: usize) -> &[[[i16; 2]; TILE]] {
        debug_assert_eq!(self.order, Order::Lines);
        assert!(tile < self.n_tiles && start <= self.stride);
        &self.wide_pairs[tile * self.stride / 64..][start / 64..]
    }

    /// The scales of each row of a tile from the `i`th on, followed by those of later tiles, of [`Tiles::n_scales`] each.
    /// Panics if there is no such tile or scale.
    pub(super) fn scales(&self, tile: usize, i: usize) -> &[[f32; TILE]] {
        assert!(tile < self.n_tiles && i <= self.n_scales);
        &self.scales[tile * self.n_scales..][i..]
    }

    /// Scales of a row.
    #[cfg(target_arch = "x86_64")]
    pub(super) fn n_scales(&self) -> usize {
        self.n_scales
    }
}

/// One quantized row.
#[derive(Debug, Clone, Copy)]
pub(super) struct QuantizedRow<'a> {
    /// Whole blocks of [`PADDING`].
    pub(super) q: &'a [i8],
    /// One for the row, or one for each block.
    pub(super) scales: &'a [f32],
    /// One for each [`SUM_LEN`] values.
    pub(super) sums: &'a [i16],
    /// Of the whole row.
    pub(super) sum: i32,
}

impl QuantizedRows {
    /// Quantizes `x`, `[m, k]`, and takes all of its rows.
    ///
    /// Errors: [`ShapeError`] if `x` isn't whole rows.
    pub(super) fn quantize(
        &mut self,
        exec: &Exec,
        scaling: Scaling,
        x: &Rows<'_>,
        k: usize,
    ) -> Result<(), ShapeError> {
        let m = shape::rows("quantize: activations", x.len(), k)?;
        let stride = k.next_multiple_of(PADDING);
        let n_scales = match scaling {
            Scaling::Row => 1,
            Scaling::Blocks256 => stride / 256,
            Scaling::Blocks32 => stride / 32,
        };
        (self.m, self.k) = (m, k);
        // Tasks write all of it: what one thread clears, the others have to get from its cache.
        grow(&mut self.q, m * stride, 0);
        grow(&mut self.scales, m * n_scales, 0.0);
        grow(&mut self.sums, m * stride / SUM_LEN, 0);
        grow(&mut self.row_sums, m, 0);
        let order = panel::order(exec.isa, scaling, m);
        let tiled = if m > 1 { m.div_ceil(TILE) } else { 0 };
        let n_rows = match order {
            Order::Quads => tiled * TILE,
            #[cfg(target_arch = "x86_64")]
            Order::Lines => m.next_multiple_of(LINES),
            #[cfg(target_arch = "aarch64")]
            Order::Sixteens => m.next_multiple_of(SIXTEEN),
        };
        (self.tiles.order, self.tiles.n_tiles) = (order, tiled);
        (self.tiles.stride, self.tiles.n_scales) = (stride, n_scales);
        grow(&mut self.tiles.q, n_rows * stride / 64, Line([0; 64]));
        // Whether kernels read nothing side by side but scales.
        let by_row = order != Order::Quads && scaling != Scaling::Blocks256;
        let pairs = if by_row { 0 } else { tiled * stride / 32 };
        let wide_pairs = if order == Order::Quads { 0 } else { pairs / 2 };
        grow(&mut self.tiles.pairs, pairs, [[0; 2]; TILE]);
        grow(&mut self.tiles.wide_pairs, wide_pairs, [[0; 2]; TILE]);
        grow(&mut self.tiles.scales, tiled * n_scales, [0.0; TILE]);
        let tile_q = SharedSlice::new(Line::quads_mut(&mut self.tiles.q));
        let tile_pairs = SharedSlice::new(&mut self.tiles.pairs);
        #[cfg(target_arch = "x86_64")]
        let tile_wide_pairs = SharedSlice::new(&mut self.tiles.wide_pairs);
        let tile_scales = SharedSlice::new(self.tiles.scales.as_flattened_mut());
        let q = SharedSlice::new(&mut self.q);
        let scales = SharedSlice::new(&mut self.scales);
        let sums = SharedSlice::new(&mut self.sums);
        let totals = SharedSlice::new(&mut self.row_sums);
        // Few rows are tasks of their own.
        let grain = match order {
            // Sixteen rows share their lines.
            #[cfg(target_arch = "aarch64")]
            Order::Sixteens => SIXTEEN,
            _ if m < TILE * exec.pool.n_threads() => 1,
            _ => TILE,
        };
        // Rows that each tile waits for: who has the last puts all side by side.
        let n_waiting = if by_row { 0 } else { tiled };
        let waiting = (0..n_waiting).map(|tile| AtomicUsize::new(TILE.min(m - tile * TILE)));
        let waiting: Vec<_> = waiting.collect();
        exec.pool.for_ranges(m, grain, |rows| {
            for t in rows {
                // SAFETY: each row belongs to one task.
                let (x, row_q, row_scales, row_sums, sum) = unsafe {
                    (
                        x.take(exec.isa, t * k..(t + 1) * k),
                        q.range_mut(t * stride..(t + 1) * stride),
                        scales.range_mut(t * n_scales..(t + 1) * n_scales),
                        sums.range_mut(t * stride / SUM_LEN..(t + 1) * stride / SUM_LEN),
                        totals.range_mut(t..t + 1),
                    )
                };
                row_q[k..].fill(0);
                row_scales.fill(0.0);
                sum[0] = quantize(exec.isa, scaling, x, row_q, row_scales, row_sums);
                match order {
                    Order::Quads => {}
                    #[cfg(target_arch = "x86_64")]
                    Order::Lines => {
                        const PARTS: usize = PADDING / 64;
                        let first = t / LINES * LINES * PARTS + t % LINES;
                        for (i, values) in row_q.as_chunks::<64>().0.iter().enumerate() {
                            let block = i / PARTS * n_rows * PARTS;
                            let at = block + first + i % PARTS * LINES;
                            // SAFETY: this line is the row's.
                            let line = unsafe { tile_q.range_mut(at * QUADS..(at + 1) * QUADS) };
                            line.as_flattened_mut().copy_from_slice(values);
                        }
                    }
                    #[cfg(target_arch = "aarch64")]
                    Order::Sixteens => {
                        let first = t / SIXTEEN * stride / 4 * SIXTEEN + t % SIXTEEN;
                        for (i, values) in row_q.as_chunks().0.iter().enumerate() {
                            let at = first + i * SIXTEEN;
                            // SAFETY: these four places are the row's.
                            unsafe { tile_q.range_mut(at..at + 1)[0] = *values };
                        }
                    }
                }
                if by_row {
                    let of_last = if t + 1 == m { TILE } else { t % TILE + 1 };
                    for (i, scale) in row_scales.iter().enumerate() {
                        let tile = (t / TILE * n_scales + i) * TILE;
                        // SAFETY: these places are the row's, and those after the last row's are nobody's.
                        let to = unsafe { tile_scales.range_mut(tile + t % TILE..tile + of_last) };
                        to.fill(0.0);
                        to[0] = *scale;
                    }
                }
                let tile = t / TILE;
                // Releases this row, and acquires the others.
                let is_last = |n: &AtomicUsize| n.fetch_sub(1, Ordering::AcqRel) == 1;
                if !waiting.get(tile).is_some_and(is_last) {
                    continue;
                }
                let rows = tile * TILE..m.min((tile + 1) * TILE);
                let part = |len: usize| tile * len..(tile + 1) * len;
                let all = |len: usize| rows.start * len..rows.end * len;
                // SAFETY: each tile has one last row, and its others are done.
                unsafe {
                    let sums = sums.range_mut(all(stride / SUM_LEN));
                    match order {
                        Order::Quads => {
                            let quads = tile_q.range_mut(part(stride / 4 * TILE));
                            side_by_side(q.range_mut(all(stride)), quads.as_chunks_mut().0);
                        }
                        #[cfg(target_arch = "x86_64")]
                        Order::Lines => {
                            let pairs = sums.as_chunks().0.iter();
                            let wide: Vec<_> = pairs.map(|[a, b]| a + b).collect();
                            let to = tile_wide_pairs.range_mut(part(stride / 64));
                            side_by_side(&wide, to);
                        }
                        // Of whole rows, which wait for no others.
                        #[cfg(target_arch = "aarch64")]
                        Order::Sixteens => {}
                    }
                    side_by_side(sums, tile_pairs.range_mut(part(stride / 32)));
                    let scales = scales.range_mut(all(n_scales));
                    let tile = tile_scales.range_mut(part(n_scales * TILE));
                    tile.fill(0.0);
                    for (r, row) in scales.chunks_exact(n_scales.max(1)).enumerate() {
                        for (to, scale) in tile.as_chunks_mut::<TILE>().0.iter_mut().zip(row) {
                            to[r] = *scale;
                        }
                    }
                }
            }
        });
        Ok(())
    }

    /// Rows.
    pub(super) fn m(&self) -> usize {
        self.m
    }

    /// The interleaved rows, if there is more than one.
    pub(super) fn tiles(&self) -> &Tiles {
        &self.tiles
    }

    /// Row `t`. Panics if there is none.
    pub(super) fn row(&self, t: usize) -> QuantizedRow<'_> {
        let Tiles {
            stride, n_scales, ..
        } = self.tiles;
        assert!(t < self.m);
        QuantizedRow {
            q: &self.q[t * stride..][..stride],
            scales: &self.scales[t * n_scales..][..n_scales],
            sums: &self.sums[t * (stride / SUM_LEN)..][..stride / SUM_LEN],
            sum: self.row_sums[t],
        }
    }

    /// The values quantized with [`Scaling::Row`], as floats, `[m, k]`: what a float kernel needs to compute
    /// the same layer.
    pub(super) fn dequantize_rows(&self) -> Vec<f32> {
        let mut out = Vec::with_capacity(self.m * self.k);
        for t in 0..self.m {
            let QuantizedRow { q, scales, .. } = self.row(t);
            out.extend(q[..self.k].iter().map(|&q| f32::from(q) / scales[0]));
        }
        out
    }
}

/// Makes `all` hold `n` values at least. It keeps what is more: values are cleared by one thread, while the others wait, and
/// matrices of several widths take turns.
fn grow<T: Clone>(all: &mut Vec<T>, n: usize, value: T) {
    if all.len() < n {
        all.resize(n, value);
    }
}

/// Interleaves groups of `N` values of up to four rows, zeros for rows that are missing.
fn side_by_side<T: Copy + Default, const N: usize>(rows: &[T], tile: &mut [[[T; N]; TILE]]) {
    let len = tile.len() * N;
    for r in 0..TILE {
        let row = rows.get(r * len..(r + 1) * len);
        match row {
            Some(row) => {
                for (to, values) in tile.iter_mut().zip(row.as_chunks().0) {
                    to[r] = *values;
                }
            }
            None => tile.iter_mut().for_each(|to| to[r] = [T::default(); N]),
        }
    }
}

multiversion! {
    fn quantize(scaling: Scaling, x: &[f32], q: &mut [i8], scales: &mut [f32], sums: &mut [i16]) -> i32 {
        match scaling {
            Scaling::Row => scales[0] = q8::quantize_row(x, q).0,
            Scaling::Blocks256 => blocks::<256>(x, q, scales),
            Scaling::Blocks32 => blocks::<32>(x, q, scales),
        }
        let mut total = 0;
        for (sum, q) in sums.iter_mut().zip(q.as_chunks::<SUM_LEN>().0) {
            *sum = q.iter().map(|&q| i16::from(q)).sum();
            total += i32::from(*sum);
        }
        total
    }
}

/// Smallest divisor of a block: small activations keep their precision, and scales of weights, which are at
/// least 2^-24, don't underflow when multiplied with those of activations.
const MIN_BLOCK_ABSMAX: f32 = 1e-20;

/// Quantizes each block of `N`; the step is `max(max|x|, 1e-20) / 127`, or 0 if a value is infinite.
#[inline(always)]
fn blocks<const N: usize>(x: &[f32], q: &mut [i8], scales: &mut [f32]) {
    for ((x, q), scale) in x.chunks(N).zip(q.chunks_mut(N)).zip(scales) {
        let (inverse, _) = q8::quantize_above(MIN_BLOCK_ABSMAX, x, q);
        *scale = if inverse > 0.0 { 1.0 / inverse } else { 0.0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    #[test]
    fn what_was_there_before_leaves_no_trace() {
        let scalings = [Scaling::Row, Scaling::Blocks256, Scaling::Blocks32];
        for exec in exec_matrix() {
            for scaling in scalings {
                let mut reused = QuantizedRows::default();
                for before in scalings {
                    reused
                        .quantize(&exec, before, &Rows::Ready(&floats(40 * 900, 1)), 900)
                        .unwrap();
                    for (m, k) in [(9, 700), (1, 300), (3, 33)] {
                        let x = floats(m * k, 2);
                        let x = Rows::Ready(&x);
                        let mut fresh = QuantizedRows::default();
                        reused.quantize(&exec, scaling, &x, k).unwrap();
                        fresh.quantize(&exec, scaling, &x, k).unwrap();
                        for t in 0..m {
                            let [a, b] = [&reused, &fresh].map(|rows| rows.row(t));
                            assert_eq!(
                                (a.q, a.scales, a.sums, a.sum),
                                (b.q, b.scales, b.sums, b.sum)
                            );
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn every_scaling_stays_within_half_a_step() {
        for (m, k) in [(1, 1), (3, 100), (2, 256), (5, 700)] {
            let x = floats(m * k, 7);
            for (scaling, len) in [
                (Scaling::Row, usize::MAX),
                (Scaling::Blocks256, 256),
                (Scaling::Blocks32, 32),
            ] {
                let mut first: Option<QuantizedRows> = None;
                for exec in exec_matrix() {
                    let mut rows = QuantizedRows::default();
                    rows.quantize(&exec, scaling, &Rows::Ready(&x), k).unwrap();
                    assert_eq!(rows.m(), m);
                    for t in 0..m {
                        let row = rows.row(t);
                        for j in 0..k {
                            let scale = row.scales[j / len];
                            let step = if scaling == Scaling::Row {
                                1.0 / scale
                            } else {
                                scale
                            };
                            let error = (f32::from(row.q[j]) * step - x[t * k + j]).abs();
                            assert!(error <= step * 0.5001, "{scaling:?} {t} {j}");
                        }
                        let total: i32 = row.q.iter().map(|&q| i32::from(q)).sum();
                        assert_eq!(row.sum, total);
                        for (sum, q) in row.sums.iter().zip(row.q.chunks(SUM_LEN)) {
                            assert_eq!(*sum, q.iter().map(|&q| i16::from(q)).sum::<i16>());
                        }
                    }
                    let first = first.get_or_insert(rows.clone());
                    assert_eq!(
                        (&first.q, &first.scales),
                        (&rows.q, &rows.scales),
                        "{exec:?}"
                    );
                }
            }
        }
    }
}
