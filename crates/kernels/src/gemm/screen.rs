//! The largest results of a product, exactly, without reading the whole matrix.
//!
//! A [`Screen`] is a copy of a matrix in fewer bits, with a bound for each row of how far the product
//! with the copy can be from the product with the matrix. Rows that can't be among the `k` largest by
//! that bound are not computed.
//!
//! # Algorithm
//!
//! 1. The product with the copy gives an estimate `S` for every row.
//! 2. The rows with the `k` largest estimates are computed. The smallest of these results is the *bar*:
//!    `k` rows reach it, so the `k`-th largest result does.
//! 3. Rows whose estimate and bound together reach the bar are computed. All others are below it.
//!
//! Rows are computed by the kernel that computes the whole matrix, so they have the same bits. Of several rows of
//! activations each has its own `k` and its own bar; what any of them needs is computed for all, as it is read once.
//!
//! # Proof of the bound
//!
//! For one row and one `x`, let `w` be the weights as the kernel of the matrix multiplies them (real numbers:
//! for blocks of integers their integers and scales, else their decoded values), `v` the same of the copy,
//! and `p` and `q` the two kernels' forms of `x` (real numbers too: codes times scale). `L` is the result of
//! the kernel of the matrix, `S` that of the kernel of the copy, and `‖·‖` the Euclidean norm. Then
//!
//! `L − S = (L − w·p) + (w − v)·p + v·(p − q) + (v·q − S)`.
//!
//! By Cauchy and Schwarz, the middle terms are at most `‖w − v‖ ‖p‖` and `‖v‖ ‖p − q‖`; often `p = q`.
//! The outer terms are what rounding does to float sums. Let `u = 2⁻²⁴`, and `γ(r) = r u / (1 − r u)`,
//! which bounds the relative error of a value that was rounded `r` times. A result is a sum of terms,
//! each rounded at most `r` times on its way, so the error is at most `γ(r)` times the sum of the
//! magnitudes of the exact terms:
//!
//! - Blocks of integers: each block has two terms, `±d dx Σ code q` and `±dmin dx Σ min q`. Rounded are
//!   the sum of integers when it becomes a float, the product of scales, the product of both, the
//!   difference of the two terms, and as many sums as there are blocks: `r = blocks + 4`. The magnitudes
//!   of the terms are at most `Σ_j a_j |p_j|`, where `a_j = |d scale code| + |dmin min|` for the integers
//!   of weight `j`, and this is at most `‖a‖ ‖p‖`.
//! - Bytes with one scale for each row: the sum of integers is exact (rows have at most `bytes::MOST_COLUMNS`), and a result
//!   is rounded once as f64 and once as f32, so that this is among the roundings of the blocks that they are measured as. A
//!   scale of activations may be subnormal: the product of scales and sum is a normal f64 nevertheless.
//! - Floats: sixteen partial sums of products, added in four steps. Rounded are the product (where it
//!   isn't exact), a sixteenth of the sums, rounded up, and the four: `r = ⌈k / 16⌉ + 5`. Here `a = |w|`.
//!   The power of two that scales activations changes no significant bit. (Bf16 weights below 2⁻⁹⁵ count
//!   as 0 there, which changes `w·p` by less than `k 2⁻⁹⁵ ‖p‖`.)
//!
//! This holds as long as nothing overflows, and but for what is lost below the smallest normal number.
//! Nothing overflows, because rows with `‖a‖ > 2⁶⁰` are always computed, and all are if `‖p‖` or `‖q‖`
//! exceeds 2⁴⁰: all partial sums stay below 2¹⁰¹, and so do products of scales, since `d` is below 2¹⁶ and
//! `dx` no larger than the largest `|p_j|` of its block, or below 2⁻⁷³ if that is all zeros. Nor does
//! anything underflow where integers are multiplied: scales that aren't 0 are at least 2⁻²⁴ (`d`, as an f16)
//! and 2⁻⁷⁴ (`dx`, as activations of a block are divided by no less than 10⁻²⁰ / 127), so that terms that
//! aren't 0 are at least 2⁻⁹⁸. Among floats underflow adds at most 2⁻¹⁵⁰ for each of the
//! products of a sum, and for the last scaling: less than `(k + 2) 2⁻¹⁴⁹`, all kernels together.
//!
//! So with `X = max(‖p‖, ‖q‖)`, of each row `e ≥ ‖w − v‖ + γ ‖a_w‖ + γ' ‖a_v‖ + k 2⁻⁹⁵` and `‖v‖`, found
//! when the copy is made,
//!
//! `|L − S| ≤ e X + ‖v‖ ‖p − q‖ + (k + 2) 2⁻¹⁴⁹`.
//!
//! Norms are computed in f64 from values that have an error of 2⁻⁵² of `a` at most (one bit more than
//! `γ` accounts for covers it: `r` is one larger), as sums of squares, whose relative error is below
//! `(k + 20) 2⁻⁵³`. They are enlarged by [`MARGIN`], 2⁻²⁰, which is larger than that for every `k` that is
//! not refused, when they are made and again when they are used; to f32 they are rounded up. The latter
//! margin also covers the bound's own three roundings, and that of `S` plus the bound: `|S|` is at most
//! `(1 + γ') ‖a_v‖ X`, so it exceeds the bound by no more than a factor of 2²⁴, and 2⁻⁵³ of it is within
//! 2⁻²⁸ of the bound.

mod bytes;

use std::iter::once;

use sterna_format::DType;

use bytes::ByteMatrix;
pub(super) use bytes::Digits;

use super::activations::Scaling;
use super::float::rounding::{FloatRows, Precision};
use super::prologue::Rows;
use super::{
    BYTES_PER_TASK, BlockMatrix, Columns, Form, InterleavedMatrix, Matrix, ROWS, Rounding, Scratch,
    linear,
};
use crate::Exec;
use crate::isa::multiversion;
use crate::logits::{RUN, places_of_largest};
use crate::pool::SharedSlice;
use crate::quant::integers::{SUB_LEN, SUPER_LEN, super_blocks};
use crate::quant::{Encoder, QuantError, decode_row};
use crate::repack::try_rows;
use crate::requantize::row_bytes;
use crate::shape::{ShapeError, expect_len};

/// By how much norms are enlarged, to cover the roundings in computing them.
const MARGIN: f64 = 1.0 + 1.0 / (1u32 << 20) as f64;

/// Rows with a larger norm are always computed: 2⁶⁰.
const MOST_WEIGHTS: f64 = (1u64 << 60) as f64;

/// With activations of a larger norm all rows are computed: 2⁴⁰.
const MOST_ACTIVATIONS: f64 = (1u64 << 40) as f64;

/// Bytes of the copy that are made at a time, few enough to be still in a cache when their error is measured and when they
/// are interleaved. Tests have several parts, too.
const PART_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };

/// Computing single rows costs up to this many times their share of computing all.
pub const SCATTERED: usize = 2;

/// A copy of a matrix in fewer bits, which shows which rows can have the largest products.
///
/// The proof is at the top of its source file.
#[derive(Debug)]
pub struct Screen {
    copy: Encoded,
    /// Form of activations for the matrix itself.
    form: Form,
    /// `e`, `[n]`.
    errors: Vec<f32>,
    /// `‖v‖`, `[n]`.
    norms: Vec<f32>,
    /// The largest of both in each [`RUN`] rows.
    largest: Vec<[f32; 2]>,
}

/// The copy, as it is multiplied fastest.
#[derive(Debug)]
enum Encoded {
    Stored {
        dtype: DType,
        n: usize,
        k: usize,
        bytes: Vec<u8>,
    },
    Interleaved(InterleavedMatrix),
    Bytes(ByteMatrix),
}

impl Encoded {
    /// One that has no rows yet, of `row_bytes` each.
    fn empty(exec: &Exec, dtype: DType, (n, k): (usize, usize), row_bytes: usize) -> Encoded {
        if dtype == DType::Q8_0 && bytes::is_faster(exec, k) {
            return Encoded::Bytes(ByteMatrix::empty(n, k));
        }
        match InterleavedMatrix::empty(exec, dtype, n, k) {
            Some(matrix) => Encoded::Interleaved(matrix),
            None => Encoded::Stored {
                dtype,
                n,
                k,
                bytes: Vec::with_capacity(n * row_bytes),
            },
        }
    }

    /// Takes in `rows`, those from `first` on: the ones after those that it has.
    fn append(&mut self, exec: &Exec, first: usize, rows: &BlockMatrix<'_>) {
        match self {
            Encoded::Stored { bytes, .. } => bytes.extend_from_slice(rows.bytes()),
            Encoded::Interleaved(matrix) => matrix.fill(exec, first, rows),
            Encoded::Bytes(matrix) => matrix.fill(exec, first, rows),
        }
    }

    /// What [`linear`] multiplies; `None` of bytes, which are multiplied with digits.
    fn matrix(&self) -> Option<Matrix<'_>> {
        match self {
            Encoded::Stored { dtype, n, k, bytes } => {
                Some(Matrix::Blocks(blocks_of(*dtype, (*n, *k), bytes)))
            }
            Encoded::Interleaved(matrix) => Some(Matrix::Interleaved(matrix)),
            Encoded::Bytes(_) => None,
        }
    }

    /// The form of activations that it is multiplied with; `None` for digits.
    fn form(&self) -> Option<Form> {
        self.matrix().map(|matrix| matrix.form())
    }

    /// Rows and columns.
    fn shape(&self) -> (usize, usize) {
        match self {
            Encoded::Stored { n, k, .. } => (*n, *k),
            Encoded::Interleaved(matrix) => (matrix.n(), matrix.k()),
            Encoded::Bytes(matrix) => (matrix.n(), matrix.k()),
        }
    }

    /// The products with each row of `x`, `[m, n]`.
    fn multiply(
        &self,
        exec: &Exec,
        x: &[f32],
        scratch: &mut Scratch,
        out: &mut [f32],
    ) -> Result<(), ShapeError> {
        let (_, k) = self.shape();
        if let Encoded::Bytes(matrix) = self {
            scratch.digits.write(exec, x, k);
            matrix.multiply(exec, &scratch.digits, out, &mut scratch.maxima);
            return Ok(());
        }
        let mut output = self.matrix().map(|matrix| (matrix, out));
        linear(exec, x, k, scratch, output.as_mut_slice())
    }
}

/// The blocks that an [`Encoder`] made.
fn blocks_of(dtype: DType, (n, k): (usize, usize), bytes: &[u8]) -> BlockMatrix<'_> {
    BlockMatrix::new(dtype, n, k, Rounding::Blocks, bytes)
        .expect("an encoder made whole rows of a type that can be decoded")
}

/// What [`Screen::top`] read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScreenedRows {
    /// Rows of the copy: all or none.
    pub screened: usize,
    /// Rows of the matrix.
    pub computed: usize,
}

impl Screen {
    /// Encodes `w` as `dtype`, and measures the error.
    ///
    /// Errors: those of [`requantize`](crate::requantize::requantize).
    pub fn new(exec: &Exec, w: &BlockMatrix<'_>, dtype: DType) -> Result<Screen, QuantError> {
        let (n, k) = (w.n(), w.k());
        let (encoder, row_bytes) = (Encoder::quick(dtype, k)?, row_bytes(dtype, k)?);
        let mut screen = Screen {
            copy: Encoded::empty(exec, dtype, (n, k), row_bytes),
            form: Matrix::Blocks(*w).form(),
            errors: vec![0.0; n],
            norms: vec![0.0; n],
            largest: Vec::new(),
        };
        let rows_per_part = (PART_BYTES / row_bytes.max(1))
            .max(1)
            .next_multiple_of(ROWS);
        let mut part = Vec::new();
        for first in (0..n).step_by(rows_per_part) {
            let n_rows = rows_per_part.min(n - first);
            part.resize(n_rows * row_bytes, 0);
            let in_bytes = matches!(screen.copy, Encoded::Bytes(_));
            if !(in_bytes && bytes::encode(exec, w, first, &mut part)) {
                encoder.transcode(exec, first, w.dtype(), w.rows(first, n_rows), &mut part)?;
                assert!(
                    !in_bytes,
                    "what one scale for a row can't hold, scales of blocks can't"
                );
            }
            let blocks = blocks_of(dtype, (n_rows, k), &part);
            let errors = SharedSlice::new(&mut screen.errors[first..first + n_rows]);
            let norms = SharedSlice::new(&mut screen.norms[first..first + n_rows]);
            try_rows(exec, n_rows, |rows| {
                // SAFETY: ranges of rows don't overlap.
                let (errors, norms) = unsafe {
                    (
                        errors.range_mut(rows.clone()),
                        norms.range_mut(rows.clone()),
                    )
                };
                let firsts = [first + rows.start, rows.start];
                measure(exec.isa, [w, &blocks], firsts, errors, norms)
            })?;
            screen.copy.append(exec, first, &blocks);
        }
        // None is NaN, as weights aren't.
        let largest = |values: &[f32]| values.iter().copied().fold(0.0, f32::max);
        let runs = screen.errors.chunks(RUN).zip(screen.norms.chunks(RUN));
        screen.largest = runs.map(|(e, v)| [largest(e), largest(v)]).collect();
        Ok(screen)
    }

    /// The results of `out[t, i] = Σ_j w[i, j] · x[t, j]` that are among the `tops[t]` largest of row `t`, and those
    /// that equal the least of them; −∞ for others, unless they were computed too.
    ///
    /// `w` is the matrix that the screen was made of. Computed results have the same bits as those of
    /// [`linear`]. All results are computed if one of `tops` is 0, if too few can be ruled out, or if activations are
    /// huge or NaN.
    /// Shapes: `x` is `[m, k]`, `tops` is `[m]`, `out` is `[m, n]`.
    /// Errors: [`ShapeError`] if a slice or the matrix has another shape.
    pub fn top(
        &self,
        exec: &Exec,
        w: Matrix<'_>,
        x: &[f32],
        tops: &[usize],
        scratch: &mut Scratch,
        out: &mut [f32],
    ) -> Result<ScreenedRows, ShapeError> {
        let (n, k) = self.copy.shape();
        expect_len("top: rows of the matrix", n, w.n())?;
        expect_len("top: columns of the matrix", k, w.k())?;
        expect_len("top: activations", tops.len() * k, x.len())?;
        expect_len("top: output", tops.len() * n, out.len())?;
        let worth_it = |n_rows: usize| n_rows.saturating_mul(SCATTERED) < n;
        let n_first = tops
            .iter()
            .fold(0, |sum: usize, &top| sum.saturating_add(top));
        let mut screened = 0;
        if !tops.contains(&0) && worth_it(n_first) && w.form() == self.form {
            self.copy.multiply(exec, x, scratch, out)?;
            scratch.prepare(exec, Rows::Ready(x), k, once(w))?;
            screened = n;
            if let Some(computed) = self.compute_tops(exec, w, tops, scratch, out, worth_it) {
                return Ok(ScreenedRows { screened, computed });
            }
        }
        linear(exec, x, k, scratch, &mut [(w, out)])?;
        let computed = n;
        Ok(ScreenedRows { screened, computed })
    }

    /// Replaces estimates by results, or −∞ where there is none; returns how many rows were computed. `None` if
    /// all should be.
    fn compute_tops(
        &self,
        exec: &Exec,
        w: Matrix<'_>,
        tops: &[usize],
        scratch: &Scratch,
        out: &mut [f32],
        worth_it: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let n = w.n();
        let maxima = |t: usize| match self.copy {
            Encoded::Bytes(_) => Some(&scratch.maxima[t * n.div_ceil(RUN)..][..n.div_ceil(RUN)]),
            _ => None,
        };
        let firsts = exec.map(tops.len(), |t| {
            let estimates = &out[t * n..(t + 1) * n];
            let first = places_of_largest(exec.isa, estimates, tops[t], maxima(t));
            (first.len() == tops[t]).then_some(first)
        });
        let firsts = firsts.into_iter().collect::<Option<Vec<_>>>()?;
        compute_rows(exec, w, &union(&firsts), scratch, out);
        let rows = exec.map(tops.len(), |t| {
            let out = &out[t * n..(t + 1) * n];
            let mut bar = f32::INFINITY;
            for &i in &firsts[t] {
                let result = out[i as usize];
                if result.is_nan() {
                    return None;
                }
                bar = bar.min(result);
            }
            // Rows computed already reach the bar, so they are among these.
            let activations = self.activations(scratch, t)?;
            Some(reaching(exec.isa, self, activations, out, maxima(t), bar))
        });
        let rows = union(&rows.into_iter().collect::<Option<Vec<_>>>()?);
        let n_computed = parts_of(&w, &rows).len() * beside(&w);
        if !worth_it(n_computed) {
            return None;
        }
        compute_rows(exec, w, &rows, scratch, out);
        let shared = SharedSlice::new(out);
        exec.pool.for_ranges(tops.len(), 1, |range| {
            // SAFETY: ranges don't overlap.
            let out = unsafe { shared.range_mut(range.start * n..range.end * n) };
            for out in out.chunks_exact_mut(n) {
                let mut end = 0;
                for &i in &rows {
                    out[end..i as usize].fill(f32::NEG_INFINITY);
                    end = i as usize + 1;
                }
                out[end..].fill(f32::NEG_INFINITY);
            }
        });
        Some(n_computed.min(n))
    }

    /// The norms of row `t` of the activations that were prepared; `None` if they are too large for the bound.
    fn activations(&self, scratch: &Scratch, t: usize) -> Option<Activations> {
        let (_, k) = self.copy.shape();
        let p = scratch.values(self.form, t, k);
        let q = match self.copy.form() {
            Some(form) if form == self.form => None,
            Some(form) => Some(scratch.values(form, t, k)),
            None => Some(scratch.digits.values(t)),
        };
        let (q, difference) = match q {
            None => (0.0, 0.0),
            Some(q) => {
                let difference = norm(p.iter().zip(&q).map(|(p, q)| p - q));
                (norm(q.into_iter()), difference)
            }
        };
        // Not `f64::max`, which would drop a NaN.
        let p = norm(p.into_iter());
        let largest = if q > p { q } else { p };
        (largest <= MOST_ACTIVATIONS && q <= MOST_ACTIVATIONS).then_some(Activations {
            norm: largest * MARGIN,
            difference: difference * MARGIN,
            underflow: (k as f64 + 2.0) * 2f64.powi(-149),
        })
    }
}

/// The rows in any of `lists`, ascending.
fn union(lists: &[Vec<u32>]) -> Vec<u32> {
    let mut rows = lists.concat();
    rows.sort_unstable();
    rows.dedup();
    rows
}

/// The norms of activations that the bound needs.
#[derive(Debug, Clone, Copy)]
struct Activations {
    /// `max(‖p‖, ‖q‖)`.
    norm: f64,
    /// `‖p − q‖`.
    difference: f64,
    /// The effect of underflow.
    underflow: f64,
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt() * MARGIN
}

impl Scratch {
    /// Row `t` of activations as kernels that take `form` multiply them, `[k]`.
    fn values(&self, form: Form, t: usize, k: usize) -> Vec<f64> {
        let float = |rows: &FloatRows| rows.values(t).take(k).collect();
        let row = match form {
            Form::Float(Precision::Full) => return float(&self.float),
            Form::Float(Precision::Bits16) => return float(&self.float16),
            Form::Float(Precision::Bits13) => return float(&self.float13),
            Form::RoundedF32 => return float(&self.rounded),
            Form::Int8(Scaling::Blocks256) => self.blocks256.row(t),
            Form::Int8(Scaling::Blocks32) => self.blocks32.row(t),
            Form::Int8(Scaling::Row) => unreachable!("blocks are not multiplied with such rows"),
        };
        let blocks = row.q.chunks(row.q.len() / row.scales.len().max(1));
        let values = blocks.zip(row.scales).flat_map(|(q, &scale)| {
            let scale = f64::from(scale);
            q.iter().map(move |&q| f64::from(q) * scale)
        });
        values.take(k).collect()
    }
}

/// Rows of `w` that are computed together: a tile, where rows are interleaved.
fn beside(w: &Matrix<'_>) -> usize {
    match w {
        Matrix::Interleaved(_) => ROWS,
        Matrix::Blocks(_) | Matrix::Ternary(_) => 1,
    }
}

/// The numbers of what is computed together that has any of `rows`, ascending.
fn parts_of(w: &Matrix<'_>, rows: &[u32]) -> Vec<usize> {
    let mut parts: Vec<usize> = rows.iter().map(|&row| row as usize / beside(w)).collect();
    parts.dedup();
    parts
}

/// Computes some rows of a product, ascending, with prepared activations; whole tiles of them where rows are interleaved.
fn compute_rows(exec: &Exec, w: Matrix<'_>, rows: &[u32], scratch: &Scratch, out: &mut [f32]) {
    let n = w.n();
    let out = Columns::new(out, n);
    let (beside, parts) = (beside(&w), parts_of(&w, rows));
    let parts_per_task = BYTES_PER_TASK.div_ceil((beside * w.row_bytes()).max(1));
    exec.pool.for_ranges(parts.len(), parts_per_task, |range| {
        for run in parts[range].chunk_by(|a, b| a + 1 == *b) {
            let rows = run[0] * beside..n.min((run[0] + run.len()) * beside);
            super::multiply(exec, &w, rows, scratch, &out);
        }
    });
}

multiversion! {
    /// The rows, ascending, whose estimate and bound together reach `bar`, or are NaN. Estimates are compared a run at a time,
    /// mostly to find that none of them does.
    fn reaching(
        screen: &Screen,
        x: Activations,
        estimates: &[f32],
        maxima: Option<&[f32]>,
        bar: f32,
    ) -> Vec<u32> {
        let bar = f64::from(bar);
        let mut rows = Vec::new();
        let Activations { norm, difference, underflow } = x;
        for (i, estimates) in estimates.chunks(RUN).enumerate() {
            if let Some(maxima) = maxima {
                // No sum of a row, rounded likewise, is larger.
                let [e, v] = screen.largest[i].map(f64::from);
                let bound = e * norm + v * difference + underflow;
                if f64::from(maxima[i]) + bound < bar {
                    continue;
                }
            }
            let chunk = i * RUN..i * RUN + estimates.len();
            let errors = &screen.errors[chunk.clone()];
            let mut reaches = [false; RUN];
            if difference == 0.0 {
                for ((reaches, &s), &e) in reaches.iter_mut().zip(estimates).zip(errors) {
                    // Sums that are NaN are not below.
                    let is_below = f64::from(s) + (f64::from(e) * norm + underflow) < bar;
                    *reaches = !is_below;
                }
            } else {
                let norms = &screen.norms[chunk.clone()];
                for ((reaches, &s), (&e, &v)) in
                    reaches.iter_mut().zip(estimates).zip(errors.iter().zip(norms))
                {
                    let bound = f64::from(e) * norm + f64::from(v) * difference + underflow;
                    let is_below = f64::from(s) + bound < bar;
                    *reaches = !is_below;
                }
            }
            if reaches.iter().fold(false, |any, &reaches| any | reaches) {
                let places = reaches.iter().zip(chunk).filter(|(reaches, _)| **reaches);
                rows.extend(places.map(|(_, row)| row as u32));
            }
        }
        rows
    }
}

/// Number of partial sums.
const LANES: usize = SUB_LEN;

/// The weights of a row as its kernel multiplies them.
struct Exact {
    /// `[k]`.
    weights: Vec<f64>,
    /// `Σ a²`.
    squares: f64,
    decoded: Vec<f32>,
}

impl Exact {
    #[inline(always)]
    fn new(k: usize) -> Exact {
        Exact {
            weights: vec![0.0; k],
            squares: 0.0,
            decoded: vec![0.0; k],
        }
    }

    #[inline(always)]
    fn read(&mut self, form: Form, dtype: DType, row: &[u8]) -> Result<(), QuantError> {
        let mut squares = [0.0; LANES];
        if form == Form::Int8(Scaling::Blocks256) {
            let mut blocks = self.weights.as_chunks_mut::<SUPER_LEN>().0.iter_mut();
            let done = super_blocks(dtype, row, |block| {
                let (d, dmin) = (f64::from(block.d), f64::from(block.dmin));
                let Some(out) = blocks.next() else { return };
                let subs = out.as_chunks_mut::<SUB_LEN>().0.iter_mut();
                let codes = block.codes.as_chunks::<SUB_LEN>().0;
                let factors = block.scales.iter().zip(&block.mins);
                for ((out, codes), (&scale, &min)) in subs.zip(codes).zip(factors) {
                    let (scale, min) = (d * f64::from(scale), dmin * f64::from(min));
                    for i in 0..SUB_LEN {
                        let product = scale * f64::from(codes[i]);
                        out[i] = product - min;
                        squares[i] += (product.abs() + min.abs()).powi(2);
                    }
                }
            });
            assert!(
                done,
                "{dtype} is multiplied in blocks of 256, so it is one of these"
            );
        } else {
            // Floats, and codes times one scale: of f16 and eight bits, which f32 holds exactly.
            decode_row(dtype, row, &mut self.decoded)?;
            for (w, decoded) in self.weights.iter_mut().zip(&self.decoded) {
                *w = f64::from(*decoded);
            }
            add_squares(&mut squares, &self.weights);
        }
        self.squares = squares.into_iter().sum();
        Ok(())
    }
}

#[inline(always)]
fn add_squares(sums: &mut [f64; LANES], values: &[f64]) {
    let (groups, rest) = values.as_chunks::<LANES>();
    for group in groups {
        for i in 0..LANES {
            sums[i] += group[i] * group[i];
        }
    }
    for (sum, value) in sums.iter_mut().zip(rest) {
        *sum += value * value;
    }
}

/// `γ` of the most roundings of a term of a sum of `k` products, and one more.
fn rounding(form: Form, k: usize) -> f64 {
    let n_roundings = match form {
        Form::Int8(Scaling::Blocks256) => k / 256 + 4,
        Form::Int8(_) => k / 32 + 4,
        Form::Float(_) | Form::RoundedF32 => k.div_ceil(16) + 5,
    };
    let error = (n_roundings as f64 + 1.0) * 2f64.powi(-24);
    if error < 0.5 {
        error / (1.0 - error)
    } else {
        f64::INFINITY
    }
}

multiversion! {
    /// For the rows of the matrix and of its copy from each of `firsts` on: `e` and `‖v‖`.
    fn measure(
        matrices: [&BlockMatrix<'_>; 2],
        firsts: [usize; 2],
        errors: &mut [f32],
        norms: &mut [f32],
    ) -> Result<(), QuantError> {
        let [w, copy] = matrices;
        let k = w.k();
        let forms = matrices.map(|w| Matrix::Blocks(*w).form());
        let gamma = forms.map(|form| rounding(form, k));
        let (mut exact, mut rounded) = (Exact::new(k), Exact::new(k));
        for (i, (error, norm)) in errors.iter_mut().zip(norms).enumerate() {
            exact.read(forms[0], w.dtype(), w.rows(firsts[0] + i, 1))?;
            rounded.read(forms[1], copy.dtype(), copy.rows(firsts[1] + i, 1))?;
            let (mut difference, mut squares) = ([0.0; LANES], [0.0; LANES]);
            add_squares(&mut squares, &rounded.weights);
            for (w, v) in exact.weights.iter_mut().zip(&rounded.weights) {
                *w -= v;
            }
            add_squares(&mut difference, &exact.weights);
            let root = |sums: [f64; LANES]| sums.into_iter().sum::<f64>().sqrt();
            let (a, b) = (exact.squares.sqrt(), rounded.squares.sqrt());
            let bounded = a <= MOST_WEIGHTS && b <= MOST_WEIGHTS;
            let small = k as f64 * 2f64.powi(-95);
            let e = root(difference) + gamma[0] * a + gamma[1] * b + small;
            *error = if bounded { at_least(e * MARGIN) } else { f32::INFINITY };
            *norm = at_least(root(squares) * MARGIN);
        }
        Ok(())
    }
}

/// The next f32 that is no smaller.
fn at_least(value: f64) -> f32 {
    let near = value as f32;
    if f64::from(near) < value {
        near.next_up()
    } else {
        near
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Isa;
    use crate::quant::encode_row;
    use crate::test_data::{Random, exec_matrix, floats};

    /// `[n, k]` in any type, and its activations.
    #[derive(Clone)]
    struct Weights {
        dtype: DType,
        rounding: Rounding,
        n: usize,
        k: usize,
        bytes: Vec<u8>,
    }

    impl Weights {
        fn new(dtype: DType, k: usize, values: &[f32]) -> Weights {
            let n = values.len() / k;
            let mut bytes = vec![0; values.len() / dtype.block_len() * dtype.block_bytes()];
            encode_row(dtype, values, &mut bytes).unwrap();
            Weights {
                dtype,
                rounding: Rounding::Blocks,
                n,
                k,
                bytes,
            }
        }

        fn matrix(&self) -> BlockMatrix<'_> {
            BlockMatrix::new(self.dtype, self.n, self.k, self.rounding, &self.bytes).unwrap()
        }

        fn multiply(&self, exec: &Exec, x: &[f32]) -> Vec<f32> {
            let mut out = vec![0.0; self.n];
            let outputs = &mut [(Matrix::Blocks(self.matrix()), &mut out[..])];
            linear(exec, x, self.k, &mut Scratch::default(), outputs).unwrap();
            out
        }

        /// Compares the `top` largest with those of the whole product, on every instruction set; returns how
        /// many rows were computed.
        fn check(&self, screen: DType, x: &[f32], top: usize) -> usize {
            let what = format!("{} [{}, {}], top {top}", self.dtype, self.n, self.k);
            let mut n_computed = None;
            let screen =
                &Screen::new(&Exec::new(1, Isa::detect()), &self.matrix(), screen).unwrap();
            for exec in exec_matrix() {
                let full = self.multiply(&exec, x);
                let mut out = vec![f32::NAN; self.n];
                let scratch = &mut Scratch::default();
                let rows = screen.top(
                    &exec,
                    Matrix::Blocks(self.matrix()),
                    x,
                    &[top],
                    scratch,
                    &mut out,
                );
                let rows = rows.unwrap();
                expect_largest(&full, &out, top, &format!("{what}, {exec:?}"));
                let computed = out.iter().filter(|v| **v > f32::NEG_INFINITY).count();
                assert!(rows.computed >= computed, "{what}");
                let first = *n_computed.get_or_insert(rows.computed);
                assert_eq!(first, rows.computed, "{what} {exec:?}");
            }
            n_computed.unwrap()
        }

        /// `|L − S|` of each row, and its bound, on one instruction set.
        fn errors_and_bounds(&self, dtype: DType, x: &[f32]) -> Vec<(f64, f64)> {
            let exec = &Exec::new(1, Isa::detect());
            let screen = Screen::new(exec, &self.matrix(), dtype).unwrap();
            let scratch = &mut Scratch::default();
            let (mut full, mut estimates) = (vec![0.0; self.n], vec![0.0; self.n]);
            (screen.copy)
                .multiply(exec, x, scratch, &mut estimates)
                .unwrap();
            let outputs = &mut [(Matrix::Blocks(self.matrix()), &mut full[..])];
            linear(exec, x, self.k, scratch, outputs).unwrap();
            let x = screen.activations(scratch, 0).unwrap();
            (0..self.n)
                .map(|i| {
                    let bound = f64::from(screen.errors[i]) * x.norm
                        + f64::from(screen.norms[i]) * x.difference
                        + x.underflow;
                    ((f64::from(full[i]) - f64::from(estimates[i])).abs(), bound)
                })
                .collect()
        }
    }

    impl Screen {
        /// The copy as it would be stored.
        fn stored(&self, exec: &Exec) -> Vec<u8> {
            match &self.copy {
                Encoded::Stored { bytes, .. } => bytes.clone(),
                Encoded::Interleaved(matrix) => matrix.stored(exec),
                Encoded::Bytes(matrix) => matrix.stored(),
            }
        }

        /// Row `i` of the copy.
        fn decode_row(&self, exec: &Exec, i: usize, out: &mut [f32]) {
            match &self.copy {
                Encoded::Bytes(matrix) => matrix.decode_row(i, out),
                copy => copy.matrix().unwrap().decode_row(exec, i, out),
            }
        }
    }

    /// `got` are the results `full`, or −∞ where they aren't among the `top` largest.
    fn expect_largest(full: &[f32], got: &[f32], top: usize, what: &str) {
        let mut sorted: Vec<f32> = full.iter().copied().filter(|v| !v.is_nan()).collect();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let least = (top > 0)
            .then(|| sorted.get(top - 1).copied())
            .flatten()
            .unwrap_or(f32::NEG_INFINITY);
        for (i, (&want, &got)) in full.iter().zip(got).enumerate() {
            let same = want.to_bits() == got.to_bits() || want.is_nan() && got.is_nan();
            let ruled_out = got == f32::NEG_INFINITY && want < least;
            assert!(same || ruled_out, "{what} at {i}: {got}, not {want}");
        }
    }

    /// Values with a roughly normal distribution, of variance 1.
    fn bell(n: usize, seed: u64) -> Vec<f32> {
        let parts: Vec<Vec<f32>> = (0..6).map(|i| floats(n, seed * 6 + i)).collect();
        (0..n)
            .map(|i| parts.iter().map(|part| part[i]).sum::<f32>() * 0.707)
            .collect()
    }

    /// Types of the matrix with types of the screen: all pairs of forms of activations.
    const PAIRS: [(DType, DType); 12] = [
        (DType::Q6_K, DType::Q5_K),
        (DType::Q6_K, DType::Q4_K),
        (DType::Q6_K, DType::Q4_0),
        (DType::Q8_0, DType::Q5_K),
        (DType::Q8_0, DType::Q4_0),
        (DType::F16, DType::Q6_K),
        (DType::F16, DType::Q8_0),
        (DType::BF16, DType::Q5_K),
        (DType::F32, DType::Q8_0),
        (DType::F32, DType::F16),
        (DType::Q4_1, DType::Q4_K),
        (DType::Q4_K, DType::Q2_K),
    ];

    #[test]
    fn the_largest_are_those_of_the_whole_product() {
        for (dtype, screen) in PAIRS {
            for rounding in [Rounding::Blocks, Rounding::None, Rounding::Row] {
                let (n, k) = (200, 256);
                let weights = Weights {
                    rounding,
                    ..Weights::new(dtype, k, &bell(n * k, 1))
                };
                for (seed, top) in [(2, 1), (3, 5), (4, 99)] {
                    weights.check(screen, &bell(k, seed), top);
                }
                // Like one of the rows: the one that stands out is found without computing the others.
                let mut x = vec![0.0; k];
                decode_row(dtype, weights.matrix().rows(77, 1), &mut x).unwrap();
                let n_computed = weights.check(screen, &x, 1);
                let few = if screen == DType::Q2_K { n } else { 20 };
                assert!(n_computed <= few, "{dtype} {screen}: {n_computed}");
            }
        }
    }

    #[test]
    fn several_rows_each_have_their_largest() {
        let (n, k) = (600, 256);
        for (dtype, screen) in PAIRS {
            let weights = Weights::new(dtype, k, &bell(n * k, 1));
            let made =
                Screen::new(&Exec::new(1, Isa::detect()), &weights.matrix(), screen).unwrap();
            for exec in exec_matrix() {
                let stored = Matrix::Blocks(weights.matrix());
                let interleaved = InterleavedMatrix::on_any_level(&exec, &stored);
                let interleaved = interleaved.as_ref().map(Matrix::Interleaved);
                for m in [2, 3, 8, 9, 49] {
                    // Half are like one of the rows each, which stands out.
                    let mut x = bell(m * k, 2);
                    for (t, x) in x.chunks_exact_mut(k).enumerate().skip(m / 2) {
                        stored.decode_row(&exec, 7 * t, x);
                    }
                    let mut tops: Vec<usize> = (0..m).map(|t| 1 + t % 3).collect();
                    let mut full = vec![0.0; m * n];
                    let outputs = &mut [(stored, &mut full[..])];
                    linear(&exec, &x, k, &mut Scratch::default(), outputs).unwrap();
                    for w in [Some(stored), interleaved].into_iter().flatten() {
                        let what = format!("{dtype} {screen} {exec:?} {m}");
                        let (mut out, scratch) = (vec![f32::NAN; m * n], &mut Scratch::default());
                        let rows = made.top(&exec, w, &x, &tops, scratch, &mut out).unwrap();
                        assert_eq!(rows.screened, n, "{what}");
                        for (t, &top) in tops.iter().enumerate() {
                            let row = t * n..(t + 1) * n;
                            expect_largest(&full[row.clone()], &out[row], top, &what);
                        }
                        if screen == DType::Q8_0 {
                            assert!(rows.computed < n / 4, "{what}: {rows:?}");
                        }
                    }
                    // One that needs all of them, and activations that the bound doesn't cover.
                    tops[1] = 0;
                    let (mut out, scratch) = (vec![f32::NAN; m * n], &mut Scratch::default());
                    let rows = made
                        .top(&exec, stored, &x, &tops, scratch, &mut out)
                        .unwrap();
                    assert_eq!((rows.screened, rows.computed), (0, n));
                    assert_eq!(out, full);
                    tops[1] = 1;
                    x[k] = 1e20;
                    let rows = made
                        .top(&exec, stored, &x, &tops, scratch, &mut out)
                        .unwrap();
                    assert_eq!(rows.computed, n);
                }
            }
        }
    }

    #[test]
    fn every_machine_makes_the_same_screen() {
        let k = 512;
        for (dtype, screen) in PAIRS {
            let weights = Weights::new(dtype, k, &bell(70 * k, 4));
            // One of blocks, and one of bytes.
            let mut firsts: [Option<Screen>; 2] = [None, None];
            for exec in exec_matrix() {
                let made = Screen::new(&exec, &weights.matrix(), screen).unwrap();
                let first = &mut firsts[usize::from(made.copy.form().is_none())];
                let first = first
                    .get_or_insert_with(|| Screen::new(&exec, &weights.matrix(), screen).unwrap());
                let copies = [first, &made].map(|made| made.stored(&exec));
                assert_eq!(copies[0], copies[1], "{dtype} {screen} {exec:?}");
                assert_eq!(first.errors, made.errors, "{dtype} {screen} {exec:?}");
                assert_eq!(first.norms, made.norms, "{dtype} {screen} {exec:?}");
            }
        }
    }

    #[test]
    fn no_error_exceeds_its_bound() {
        let (n, k) = (64, 768);
        for (dtype, screen) in PAIRS {
            for rounding in [Rounding::Blocks, Rounding::None, Rounding::Row] {
                let weights = Weights {
                    rounding,
                    ..Weights::new(dtype, k, &bell(n * k, 7))
                };
                let mut largest: f64 = 0.0;
                for (seed, factor) in [(1, 1.0), (2, 1e-6), (3, 1e8), (4, 1e-30)] {
                    let x: Vec<f32> = bell(k, seed).iter().map(|x| x * factor).collect();
                    for (error, bound) in weights.errors_and_bounds(screen, &x) {
                        assert!(error <= bound, "{dtype} {screen}: {error:e} > {bound:e}");
                    }
                }
                // Activations along the error of a row of the copy: the bound is nearly reached.
                let exec = &Exec::new(1, Isa::detect());
                let made = Screen::new(exec, &weights.matrix(), screen).unwrap();
                for i in 0..8 {
                    let (mut w, mut v) = (vec![0.0; k], vec![0.0; k]);
                    decode_row(dtype, weights.matrix().rows(i, 1), &mut w).unwrap();
                    made.decode_row(exec, i, &mut v);
                    let x: Vec<f32> = w.iter().zip(&v).map(|(w, v)| 100.0 * (w - v)).collect();
                    if x.iter().all(|x| *x == 0.0) {
                        continue;
                    }
                    let (error, bound) = weights.errors_and_bounds(screen, &x)[i];
                    assert!(error <= bound, "{dtype} {screen}: {error:e} > {bound:e}");
                    largest = largest.max(error / bound);
                }
                // Where both use the same form of activations. Else their rounding contributes a large part.
                let matrix = Matrix::Blocks(weights.matrix());
                if made.copy.form() == Some(matrix.form()) {
                    assert!(largest > 0.9, "{dtype} {screen}: {largest}");
                }
            }
        }
    }

    #[test]
    fn an_adversary_gains_nothing() {
        let (n, k) = (200, 256);
        let exec = &Exec::new(1, Isa::detect());
        let mut random = Random::new(3);
        for round in 0..20 {
            // Rows that differ by less than the copy resolves, and activations along its error.
            let base = bell(k, round + 100);
            let mut values = Vec::with_capacity(n * k);
            for _ in 0..n {
                values.extend(base.iter().map(|b| b + 0.01 * random.below(7) as f32));
            }
            for (dtype, screen) in [(DType::Q6_K, DType::Q4_K), (DType::F16, DType::Q4_K)] {
                let weights = Weights::new(dtype, k, &values);
                let made = Screen::new(exec, &weights.matrix(), screen).unwrap();
                let (mut w, mut v) = (vec![0.0; k], vec![0.0; k]);
                let row = random.below(n as u32) as usize;
                decode_row(dtype, weights.matrix().rows(row, 1), &mut w).unwrap();
                made.decode_row(exec, row, &mut v);
                let x: Vec<f32> = w.iter().zip(&v).map(|(w, v)| w - v).collect();
                for top in [1, 3, 99] {
                    weights.check(screen, &x, top);
                }
            }
        }
    }

    #[test]
    fn ties_and_extremes() {
        let (n, k) = (260, 256);
        let x = bell(k, 5);
        let one_row = bell(k, 6);
        let all_equal = one_row.repeat(n);
        let zeros = vec![0.0; n * k];
        // Pairs of equal rows, so that the last of the largest may have an equal.
        let pairs: Vec<f32> = bell(n * k / 2, 7)
            .chunks(k)
            .flat_map(|row| row.repeat(2))
            .collect();
        // One row a thousand times the others; rows of very different size.
        let mut outlier = bell(n * k, 8);
        outlier[5 * k..6 * k].iter_mut().for_each(|w| *w *= 1000.0);
        let sizes: Vec<f32> = (bell(n * k, 9).into_iter().enumerate())
            .map(|(i, w)| w * 10f32.powi((i / k % 8) as i32 - 4))
            .collect();
        for values in [&all_equal, &zeros, &pairs, &outlier, &sizes] {
            for (dtype, screen) in [
                (DType::Q6_K, DType::Q5_K),
                (DType::F16, DType::Q6_K),
                (DType::F32, DType::Q4_0),
            ] {
                let weights = Weights::new(dtype, k, values);
                for top in [0, 1, 2, 3, 10, 129, 130, n - 1, n, n + 1, usize::MAX] {
                    let n_computed = weights.check(screen, &x, top);
                    if top == 0 || top >= n / 2 {
                        assert_eq!(n_computed, n);
                    }
                }
                weights.check(screen, &vec![0.0; k], 3);
                let negative: Vec<f32> = x.iter().map(|x| -x).collect();
                weights.check(screen, &negative, 3);
            }
        }
        let pairs = Weights::new(DType::Q6_K, k, &pairs);
        let exec = &Exec::new(1, Isa::detect());
        let full = pairs.multiply(exec, &x);
        let screen = Screen::new(exec, &pairs.matrix(), DType::Q5_K).unwrap();
        let mut out = vec![0.0; n];
        let scratch = &mut Scratch::default();
        let rows = screen.top(
            exec,
            Matrix::Blocks(pairs.matrix()),
            &x,
            &[1],
            scratch,
            &mut out,
        );
        assert!(rows.unwrap().computed < n / 2);
        let best = full.iter().copied().fold(f32::MIN, f32::max);
        let places = |values: &[f32]| values.iter().filter(|v| **v == best).count();
        assert!(places(&full) >= 2);
        assert_eq!(places(&full), places(&out));
    }

    #[test]
    fn what_is_no_number_or_huge_is_computed_as_a_whole() {
        let (n, k) = (100, 256);
        let values = bell(n * k, 1);
        for (dtype, screen) in [
            (DType::Q6_K, DType::Q5_K),
            (DType::F16, DType::Q6_K),
            (DType::F32, DType::Q8_0),
        ] {
            let weights = Weights::new(dtype, k, &values);
            for bad in [
                f32::NAN,
                f32::INFINITY,
                f32::NEG_INFINITY,
                3e38,
                1e20,
                1e-45,
            ] {
                for everywhere in [false, true] {
                    let mut x = bell(k, 2);
                    x[9] = bad;
                    if everywhere {
                        x.fill(bad);
                    }
                    let n_computed = weights.check(screen, &x, 2);
                    if bad.abs() > 1e12 && dtype != DType::Q6_K {
                        assert_eq!(n_computed, n, "{dtype} {bad}");
                    }
                }
            }
        }
        // Huge weights, which the bound doesn't cover: their rows are computed, and only these.
        let mut values = values;
        values[3 * k..4 * k].fill(1e30);
        values[60 * k..61 * k].fill(-1e36);
        let weights = Weights::new(DType::F32, k, &values);
        let n_computed = weights.check(DType::BF16, &bell(k, 2), 1);
        assert!(n_computed < 10, "{n_computed}");
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let exec = &Exec::new(1, Isa::detect());
        let (n, k) = (20, 256);
        let weights = Weights::new(DType::F32, k, &bell(n * k, 1));
        let screen = Screen::new(exec, &weights.matrix(), DType::Q5_K).unwrap();
        let top = |w: &Weights, n_x: usize, n_out: usize| {
            let (x, mut out) = (vec![0.0; n_x], vec![0.0; n_out]);
            screen.top(
                exec,
                Matrix::Blocks(w.matrix()),
                &x,
                &[1],
                &mut Scratch::default(),
                &mut out,
            )
        };
        assert!(top(&weights, k, n).is_ok());
        assert!(top(&weights, 2 * k, n).is_err());
        assert!(top(&weights, k, n - 1).is_err());
        assert!(top(&Weights::new(DType::F32, k, &bell(k, 1)), k, n).is_err());
        // Another form of activations than the bounds were made for.
        let other = Weights {
            rounding: Rounding::Row,
            ..weights.clone()
        };
        assert_eq!(top(&other, k, n).unwrap().screened, 0);
        let narrow = Weights::new(DType::F32, 32, &bell(64, 1));
        assert!(Screen::new(exec, &narrow.matrix(), DType::Q5_K).is_err());
        let mut bytes = weights.bytes.clone();
        bytes[..4].copy_from_slice(&f32::NAN.to_le_bytes());
        let damaged = Weights { bytes, ..weights };
        assert!(Screen::new(exec, &damaged.matrix(), DType::Q5_K).is_err());
        let none = Weights::new(DType::F32, k, &[]);
        assert_eq!(none.check(DType::Q5_K, &bell(k, 1), 1), 0);
    }
}
