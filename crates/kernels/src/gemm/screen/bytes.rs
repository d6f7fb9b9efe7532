//! A copy of a matrix in bytes, with one scale for each row: what tiles of AMX multiply as it is, as fast as memory gives it.
//!
//! Activations have two digits in base 256, with one scale for each row, too: a row in which one value is far larger than
//! the others keeps these.

#[cfg(target_arch = "x86_64")]
mod amx;

use std::fmt;

use half::f16;
use sterna_format::DType;

use crate::gemm::{BlockMatrix, Columns, ROWS};
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::isa::multiversion;
use crate::logits::RUN;
use crate::memory::{self, Pages, Plain};
use crate::pool::SharedSlice;
use crate::{Exec, Isa};

/// Columns of a tile.
const COLUMNS: usize = 64;

/// Rows of activations in a tile.
const LINES: usize = 16;

/// The largest code, and the largest higher digit.
const MAX_CODE: f32 = 127.0;

/// The largest value of two digits.
const MAX_DIGITS: f32 = MAX_CODE * 256.0;

/// Rows of weights that are multiplied at a time: two tiles share what is loaded of activations.
const PAIR: usize = 2 * ROWS;

/// Pairs of a run.
const PAIRS: usize = RUN / PAIR;

/// `[4 columns][row][4]`: 64 columns of sixteen rows of weights.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct WeightTile([[[i8; 4]; ROWS]; COLUMNS / 4]);

// SAFETY: bytes without room between them.
unsafe impl Plain for WeightTile {}

/// 64 columns of a row of activations: a digit of each.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([i8; COLUMNS]);

/// Lines of 64 columns of sixteen rows of activations, `[digit, the higher first][row]`.
const LINES_PER_STEP: usize = 2 * LINES;

/// Sums of products, `[tile of weights][digit][row of activations][row of weights]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[[[i32; ROWS]; LINES]; 2]; 2]);

/// What multiplies two tiles of weights, one after the other, with sixteen rows of activations. Between `begin` and `end`
/// nothing else uses registers of tiles on the thread.
struct Kernel {
    begin: unsafe fn(),
    end: unsafe fn(),
    multiply: Multiply,
}

/// # Safety
/// The machine has the instructions; there are as many columns of weights as of activations.
type Multiply = unsafe fn(weights: [&[WeightTile]; 2], acts: &[Line]) -> Sums;

fn kernel(isa: Isa) -> Kernel {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Amx {
        return amx::KERNEL;
    }
    let _ = isa;
    Kernel {
        begin: || (),
        end: || (),
        multiply: reference,
    }
}

/// The definition.
fn reference(weights: [&[WeightTile]; 2], acts: &[Line]) -> Sums {
    let mut sums = Sums([[[[0; ROWS]; LINES]; 2]; 2]);
    for (tiles, sums) in weights.iter().zip(&mut sums.0) {
        for (WeightTile(tile), acts) in tiles.iter().zip(acts.chunks_exact(LINES_PER_STEP)) {
            for (acts, sums) in acts.chunks_exact(LINES).zip(sums.iter_mut()) {
                for (Line(line), sums) in acts.iter().zip(sums) {
                    for (quad, acts) in tile.iter().zip(line.as_chunks::<4>().0) {
                        for (codes, sum) in quad.iter().zip(sums.iter_mut()) {
                            let products = codes.iter().zip(acts);
                            *sum += products
                                .map(|(&code, &act)| i32::from(code) * i32::from(act))
                                .sum::<i32>();
                        }
                    }
                }
            }
        }
    }
    sums
}

/// Rows of weights, each rounded to bytes with one scale.
pub(super) struct ByteMatrix {
    n: usize,
    k: usize,
    /// `[n]`.
    scales: Vec<f32>,
    /// [`WeightTile`]s, `[n / 16][k / 64]`, as many as whole pairs have; zeros past the rows and columns.
    codes: Pages,
}

/// Rows of activations in two digits.
#[derive(Debug, Default)]
pub(in crate::gemm) struct Digits {
    m: usize,
    k: usize,
    /// What a row's values are multiplied with, `[m]`.
    steps: Vec<f32>,
    /// `[m / 16][k / 64][digit, the higher first][row]`. Rows past the last are arbitrary, columns past the last zeros.
    lines: Vec<Line>,
}

/// The most columns whose sums of products with a digit are exact.
const MOST_COLUMNS: usize = 1 << 17;
const _: () = assert!(MOST_COLUMNS * 127 * 128 <= i32::MAX as usize);

/// Whether `exec` multiplies such a copy of `k` columns faster than blocks of as many bits.
pub(super) fn is_faster(exec: &Exec, k: usize) -> bool {
    #[cfg(target_arch = "x86_64")]
    let has_tiles = exec.isa.level() == Level::Amx;
    #[cfg(not(target_arch = "x86_64"))]
    let has_tiles = {
        let _ = exec;
        false
    };
    has_tiles && k <= MOST_COLUMNS
}

/// Writes the `n` rows of `w` from `first` on as Q8_0 in which all blocks of a row have one scale; `false` if there is a value
/// that no scale holds.
pub(super) fn encode(exec: &Exec, w: &BlockMatrix<'_>, first: usize, out: &mut [u8]) -> bool {
    let row_bytes = w.k() / DType::Q8_0.block_len() * DType::Q8_0.block_bytes();
    let n = out.len().checked_div(row_bytes).unwrap_or(0);
    let out = SharedSlice::new(out);
    let encoded = exec.map(n, |i| {
        let mut values = vec![0.0; w.k()];
        w.decode(exec.isa, first + i, &mut values);
        // SAFETY: each number has a row of its own.
        let row = unsafe { out.range_mut(i * row_bytes..(i + 1) * row_bytes) };
        encode_row(exec.isa, &values, row)
    });
    encoded.into_iter().all(|is_encoded| is_encoded)
}

multiversion! {
    fn encode_row(values: &[f32], out: &mut [u8]) -> bool {
        const LEN: usize = DType::Q8_0.block_len();
        const BYTES: usize = DType::Q8_0.block_bytes();
        let scale = f16::from_f32(largest_of(values) / MAX_CODE);
        if !scale.is_finite() {
            return false;
        }
        let inverse = if scale.to_f32() == 0.0 { 0.0 } else { 1.0 / scale.to_f32() };
        let blocks = out.as_chunks_mut::<BYTES>().0.iter_mut();
        for (block, values) in blocks.zip(values.as_chunks::<LEN>().0) {
            let (d, codes) = block.split_at_mut(2);
            d.copy_from_slice(&scale.to_le_bytes());
            for (code, value) in codes.iter_mut().zip(values) {
                let rounded = (value * inverse).round_ties_even();
                *code = rounded.clamp(-MAX_CODE, MAX_CODE) as i8 as u8;
            }
        }
        true
    }
}

impl ByteMatrix {
    /// One of zeros.
    pub(super) fn empty(n: usize, k: usize) -> ByteMatrix {
        let n_tiles = n.next_multiple_of(PAIR) / ROWS * k.div_ceil(COLUMNS);
        ByteMatrix {
            n,
            k,
            scales: vec![0.0; n],
            codes: Pages::zeroed(n_tiles * size_of::<WeightTile>()),
        }
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// Takes in `rows`, those from `first` on, a multiple of sixteen, which [`encode`] wrote.
    pub(super) fn fill(&mut self, exec: &Exec, first: usize, rows: &BlockMatrix<'_>) {
        const LEN: usize = DType::Q8_0.block_len();
        debug_assert!(first.is_multiple_of(ROWS) && rows.dtype() == DType::Q8_0);
        let (n, per_row) = (rows.n(), self.k.div_ceil(COLUMNS));
        let row = |i: usize| {
            rows.rows(i, 1)
                .as_chunks::<{ DType::Q8_0.block_bytes() }>()
                .0
        };
        for (i, scale) in self.scales[first..first + n].iter_mut().enumerate() {
            let block = row(i).first();
            *scale = block.map_or(0.0, |block| {
                f16::from_le_bytes([block[0], block[1]]).to_f32()
            });
        }
        let tiles = memory::plain_mut::<WeightTile>(&mut self.codes);
        let tiles = SharedSlice::new(&mut tiles[first / ROWS * per_row..]);
        exec.pool.for_ranges(n.div_ceil(ROWS), 1, |range| {
            for group in range {
                // SAFETY: each group of rows has tiles of its own.
                let tiles = unsafe { tiles.range_mut(group * per_row..(group + 1) * per_row) };
                for (r, i) in (group * ROWS..n.min((group + 1) * ROWS)).enumerate() {
                    for (b, block) in row(i).iter().enumerate() {
                        let WeightTile(tile) = &mut tiles[b * LEN / COLUMNS];
                        let quads = &mut tile[b * LEN % COLUMNS / 4..][..LEN / 4];
                        for (quad, codes) in quads.iter_mut().zip(block[2..].as_chunks::<4>().0) {
                            quad[r] = codes.map(|code| code as i8);
                        }
                    }
                }
            }
        });
    }

    /// The products with each row of activations, `[m, n]`, and of each [`RUN`] of them the largest, or a NaN among them.
    pub(super) fn multiply(&self, exec: &Exec, x: &Digits, out: &mut [f32], maxima: &mut Vec<f32>) {
        // Its tasks aren't those of a product.
        exec.lookahead.skip();
        let (n, m, per_row) = (self.n, x.m, self.k.div_ceil(COLUMNS));
        assert!(x.k == self.k && out.len() == m * n);
        let tiles = memory::plain::<WeightTile>(&self.codes);
        let kernel = kernel(exec.isa);
        let n_runs = n.div_ceil(RUN);
        maxima.resize(m * n_runs, 0.0);
        let (out, maxima) = (Columns::new(out, n), SharedSlice::new(maxima));
        exec.pool.for_ranges(n_runs, 1, |runs| {
            // SAFETY: it is the kernel of an `Isa`, which this machine has been seen to offer.
            unsafe { (kernel.begin)() };
            for (run, first) in runs.flat_map(|run| (0..m).step_by(LINES).map(move |t| (run, t))) {
                let acts = &x.lines[first / LINES * per_row * LINES_PER_STEP..];
                let acts = &acts[..per_row * LINES_PER_STEP];
                let mut largest = [f32::NEG_INFINITY; LINES];
                for pair in run * PAIRS..n.div_ceil(PAIR).min((run + 1) * PAIRS) {
                    let weights = &tiles[pair * 2 * per_row..][..2 * per_row];
                    let (one, other) = weights.split_at(per_row);
                    // SAFETY: as above; lengths are those of a row.
                    let sums = unsafe { (kernel.multiply)([one, other], acts) };
                    for (tile, sums) in (2 * pair..).zip(&sums.0) {
                        let columns = n.min(tile * ROWS)..n.min((tile + 1) * ROWS);
                        let scales = &self.scales[columns.clone()];
                        let steps = &x.steps[first..m.min(first + LINES)];
                        // SAFETY: no other task has these columns.
                        let rows = |t| unsafe { out.row_mut(first + t, columns.clone()) };
                        for (t, (step, largest)) in steps.iter().zip(&mut largest).enumerate() {
                            let digits = sums.each_ref().map(|sums| &sums[t]);
                            finish(exec.isa, digits, scales, *step, rows(t), largest);
                        }
                    }
                }
                for (t, largest) in (first..m).zip(largest) {
                    let at = t * n_runs + run;
                    // SAFETY: no other task has this run.
                    unsafe { maxima.range_mut(at..at + 1)[0] = largest };
                }
            }
            // SAFETY: as above.
            unsafe { (kernel.end)() };
        });
    }

    /// All bytes of it.
    #[cfg(test)]
    pub(super) fn stored(&self) -> Vec<u8> {
        let scales = self.scales.iter().flat_map(|scale| scale.to_le_bytes());
        scales.chain(self.codes.iter().copied()).collect()
    }

    /// Row `i` as it is multiplied.
    #[cfg(test)]
    pub(super) fn decode_row(&self, i: usize, out: &mut [f32]) {
        let per_row = self.k.div_ceil(COLUMNS);
        let tiles = &memory::plain::<WeightTile>(&self.codes)[i / ROWS * per_row..][..per_row];
        for (j, out) in out.iter_mut().enumerate() {
            let code = tiles[j / COLUMNS].0[j % COLUMNS / 4][i % ROWS][j % 4];
            *out = f32::from(code) * self.scales[i];
        }
    }
}

impl fmt::Debug for ByteMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ByteMatrix")
            .field("n", &self.n)
            .field("k", &self.k)
            .finish_non_exhaustive()
    }
}

multiversion! {
    /// Sums are exact, as integers and as f64; a result is rounded once to f64 and once to f32.
    fn finish(
        sums: [&[i32; ROWS]; 2],
        scales: &[f32],
        step: f32,
        out: &mut [f32],
        largest: &mut f32,
    ) {
        let [high, low] = sums;
        for (((out, scale), high), low) in out.iter_mut().zip(scales).zip(high).zip(low) {
            let sum = f64::from(*high) * 256.0 + f64::from(*low);
            *out = (sum * (f64::from(*scale) * f64::from(step))) as f32;
        }
        for x in out {
            if *x > *largest || x.is_nan() {
                *largest = *x;
            }
        }
    }
}

impl Digits {
    /// Takes in `x`, `[m, k]`.
    pub(super) fn write(&mut self, exec: &Exec, x: &[f32], k: usize) {
        let (m, per_row) = (x.len() / k.max(1), k.div_ceil(COLUMNS));
        (self.m, self.k) = (m, k);
        self.steps.resize(m, 0.0);
        let n_lines = m.div_ceil(LINES) * per_row * LINES_PER_STEP;
        self.lines.resize(n_lines, Line([0; COLUMNS]));
        let steps = SharedSlice::new(&mut self.steps);
        let lines = SharedSlice::new(&mut self.lines);
        exec.pool.for_ranges(m, 1, |rows| {
            for t in rows {
                let x = &x[t * k..(t + 1) * k];
                let step = largest(exec.isa, x) / MAX_DIGITS;
                // SAFETY: each row is in one range.
                unsafe { steps.range_mut(t..t + 1)[0] = step };
                let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
                for (c, x) in x.chunks(COLUMNS).enumerate() {
                    let at = (t / LINES * per_row + c) * LINES_PER_STEP + t % LINES;
                    // SAFETY: these lines are the row's.
                    let [high, low] =
                        [at, at + LINES].map(|at| unsafe { &mut lines.range_mut(at..at + 1)[0].0 });
                    split(exec.isa, x, inverse, high, low);
                }
            }
        });
    }

    /// Row `t` as it is multiplied, `[k]`.
    pub(super) fn values(&self, t: usize) -> Vec<f64> {
        let per_row = self.k.div_ceil(COLUMNS);
        let lines = &self.lines[t / LINES * per_row * LINES_PER_STEP..];
        let steps = lines.chunks_exact(LINES_PER_STEP).take(per_row);
        let values = steps.flat_map(|lines| {
            let [high, low] = [t % LINES, LINES + t % LINES].map(|at| lines[at].0);
            let digits = high.into_iter().zip(low);
            digits.map(|(high, low)| f64::from(high) * 256.0 + f64::from(low))
        });
        let step = f64::from(self.steps[t]);
        values.take(self.k).map(|value| value * step).collect()
    }
}

multiversion! {
    /// The largest magnitude, or a NaN if there is one.
    fn largest(x: &[f32]) -> f32 {
        largest_of(x)
    }
}

#[inline(always)]
fn largest_of(x: &[f32]) -> f32 {
    let mut largest = [0.0f32; 16];
    let wider = |largest: &mut f32, x: f32| {
        // Not `f32::max`, which would drop a NaN.
        if x.abs() > *largest || x.is_nan() {
            *largest = x.abs();
        }
    };
    let (groups, rest) = x.as_chunks();
    for group in groups
        .iter()
        .map(|group: &[f32; 16]| &group[..])
        .chain([rest])
    {
        largest
            .iter_mut()
            .zip(group)
            .for_each(|(largest, x)| wider(largest, *x));
    }
    let mut all = 0.0;
    largest.into_iter().for_each(|x| wider(&mut all, x));
    all
}

multiversion! {
    fn split(x: &[f32], inverse: f32, high: &mut [i8; COLUMNS], low: &mut [i8; COLUMNS]) {
        (*high, *low) = ([0; COLUMNS], [0; COLUMNS]);
        for ((x, high), low) in x.iter().zip(high).zip(low) {
            let rounded = (x * inverse).round_ties_even();
            let value = rounded.clamp(-MAX_DIGITS, MAX_DIGITS) as i32;
            let digit = (value + 128) >> 8;
            (*high, *low) = (digit as i8, (value - 256 * digit) as i8);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::Rounding;
    use crate::test_data::{exec_matrix, floats};

    #[test]
    fn products_are_those_of_the_values_that_are_multiplied() {
        for (n, k, m) in [(1, 32, 1), (33, 96, 3), (70, 160, 17), (16, 64, 33)] {
            let weights = floats(n * k, 1);
            let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
            let w = BlockMatrix::new(DType::F32, n, k, Rounding::Blocks, &bytes).unwrap();
            let mut x = floats(m * k, 2);
            // One value far larger than the others.
            x[0] = 300.0;
            let mut first: Option<Vec<u32>> = None;
            for exec in exec_matrix() {
                let mut encoded = vec![0; n * k / 32 * 34];
                assert!(encode(&exec, &w, 0, &mut encoded));
                let mut copy = ByteMatrix::empty(n, k);
                let blocks = BlockMatrix::new(DType::Q8_0, n, k, Rounding::Blocks, &encoded);
                copy.fill(&exec, 0, &blocks.unwrap());
                let mut digits = Digits::default();
                // What was there before leaves no trace.
                digits.write(&exec, &floats(5 * 2 * k, 3), 2 * k);
                digits.write(&exec, &x, k);
                let mut out = vec![f32::NAN; m * n];
                let mut maxima = vec![f32::NAN; 1];
                copy.multiply(&exec, &digits, &mut out, &mut maxima);
                let of_runs = out.chunks(n).flat_map(|out| out.chunks(RUN));
                let of_runs = of_runs.map(|run| run.iter().copied().fold(f32::MIN, f32::max));
                assert!(of_runs.eq(maxima), "{exec:?}");
                let mut row = vec![0.0; k];
                for t in 0..m {
                    let values = digits.values(t);
                    let largest = x[t * k..(t + 1) * k]
                        .iter()
                        .fold(0.0f32, |l, x| l.max(x.abs()));
                    for (value, x) in values.iter().zip(&x[t * k..]) {
                        let step = f64::from(largest) / f64::from(MAX_DIGITS);
                        assert!((value - f64::from(*x)).abs() <= 0.51 * step, "{exec:?}");
                    }
                    for i in 0..n {
                        copy.decode_row(i, &mut row);
                        let products = row.iter().zip(&values).map(|(w, x)| f64::from(*w) * x);
                        let (sum, got) = (products.sum::<f64>(), f64::from(out[t * n + i]));
                        assert!((got - sum).abs() <= 1e-6 * sum.abs().max(1e-3), "{exec:?}");
                    }
                }
                let bits: Vec<u32> = out.iter().map(|out| out.to_bits()).collect();
                assert_eq!(*first.get_or_insert(bits.clone()), bits, "{exec:?}");
            }
        }
    }

    #[test]
    fn weights_that_no_scale_holds_are_refused() {
        let exec = &exec_matrix()[0];
        for bad in [f32::NAN, f32::INFINITY, 1e10] {
            let mut weights = floats(64, 1);
            weights[40] = bad;
            let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
            let w = BlockMatrix::new(DType::F32, 2, 32, Rounding::Blocks, &bytes).unwrap();
            assert!(!encode(exec, &w, 0, &mut [0; 68]), "{bad}");
        }
    }
}
