//! Matrix products: weights `[n, k]` with activations `[m, k]`, giving `[m, n]`.
//!
//! [`linear`] is the entry point; [`linear_after`] and [`linear_batches`] are for what else is known of a product. The
//! kernel depends on the weights:
//!
//! | weights | activations | sums |
//! |---|---|---|
//! | ternary | int8, one scale per row | exact integers over the row (`ternary`, `interleaved`) |
//! | blocks of integers | int8, one scale per block | exact integers within a block, then floats block by block (`integer`, `interleaved`) |
//! | F16 and BF16 | f32, rounded so that products are exact | floats in one fixed order (`float`) |
//! | F32, other types, and all with [`Rounding::None`] | f32 | floats in one fixed order (`float`) |
//!
//! Whatever the path, thread count and instruction set, and whatever the other activation rows, a result has
//! the same bits.

mod activations;
mod block;
mod float;
mod integer;
mod interleaved;
mod lookahead;
mod panel;
#[cfg(any(
    target_arch = "x86_64",
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128")
))]
mod prefetch;
mod prologue;
mod screen;
mod ternary;
#[cfg(target_arch = "aarch64")]
mod ternary_neon;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod ternary_wasm;
#[cfg(target_arch = "x86_64")]
mod ternary_x86;
#[cfg(any(
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128")
))]
mod unroll;

use std::ops::Range;

pub use block::{BlockMatrix, Rounding};
pub use interleaved::InterleavedMatrix;
pub(crate) use lookahead::Lookahead;
use lookahead::Part;
pub use prologue::RowOp;
pub use screen::{SCATTERED, Screen, ScreenedRows};
pub use ternary::{TernaryMatrix, TernaryPacking};

use crate::Exec;
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError, expect_len};
use activations::{Order, QuantizedRows, Scaling};
use float::rounding::{FloatRows, Precision};
use prologue::Rows;

/// A weight matrix `[n, k]`.
#[derive(Debug, Clone, Copy)]
pub enum Matrix<'a> {
    /// Rows of blocks or floats.
    Blocks(BlockMatrix<'a>),
    /// Several rows side by side.
    Interleaved(&'a InterleavedMatrix),
    /// Trits with one scale.
    Ternary(TernaryMatrix<'a>),
}

impl Matrix<'_> {
    /// Output features.
    pub fn n(&self) -> usize {
        match self {
            Matrix::Blocks(w) => w.n(),
            Matrix::Interleaved(w) => w.n(),
            Matrix::Ternary(w) => w.n(),
        }
    }

    /// Input features.
    pub fn k(&self) -> usize {
        match self {
            Matrix::Blocks(w) => w.k(),
            Matrix::Interleaved(w) => w.k(),
            Matrix::Ternary(w) => w.k(),
        }
    }

    /// Decodes row `i` into `out`, `[k]`. Panics if there is no such row.
    pub fn decode_row(&self, exec: &Exec, i: usize, out: &mut [f32]) {
        match self {
            Matrix::Blocks(w) => w.decode(exec.isa, i, out),
            Matrix::Interleaved(w) => w.decode(exec.isa, i, out),
            Matrix::Ternary(w) => w.decode(i, out),
        }
    }

    /// Of all rows.
    fn bytes(&self) -> &[u8] {
        match self {
            Matrix::Blocks(w) => w.bytes(),
            Matrix::Interleaved(w) => w.bytes(),
            Matrix::Ternary(w) => w.bytes(),
        }
    }

    fn row_bytes(&self) -> usize {
        match self {
            Matrix::Blocks(w) => w.row_bytes(),
            Matrix::Interleaved(w) => w.row_bytes(),
            Matrix::Ternary(w) => w.row_bytes(),
        }
    }

    /// The form of activations that the kernel of this matrix needs.
    fn form(&self) -> Form {
        let of_blocks = |dtype, rounding| match rounding {
            Rounding::None => Form::Float(Precision::Full),
            Rounding::Row => Form::RoundedF32,
            Rounding::Blocks => {
                integer::scaling(dtype).map_or(Form::Float(float::precision(dtype)), Form::Int8)
            }
        };
        match self {
            Matrix::Ternary(_) => Form::Int8(Scaling::Row),
            Matrix::Interleaved(w) => Form::Int8(w.scaling()),
            Matrix::Blocks(w) => of_blocks(w.dtype(), w.rounding()),
        }
    }
}

/// The form that activations are converted to before products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    Float(Precision),
    /// Quantized to int8 with one scale per row, and dequantized.
    RoundedF32,
    Int8(Scaling),
}

/// Memory for the forms of activations that [`linear`] makes, reused from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    row: QuantizedRows,
    blocks256: QuantizedRows,
    blocks32: QuantizedRows,
    float: FloatRows,
    float16: FloatRows,
    float13: FloatRows,
    /// `row` in f32.
    rounded: FloatRows,
    digits: screen::Digits,
    /// Of the products of a screen, `[m, n / 64]`, the largest of each 64, or a NaN among them.
    maxima: Vec<f32>,
}

impl Scratch {
    fn int8(&mut self, scaling: Scaling) -> &mut QuantizedRows {
        match scaling {
            Scaling::Row => &mut self.row,
            Scaling::Blocks256 => &mut self.blocks256,
            Scaling::Blocks32 => &mut self.blocks32,
        }
    }

    /// The activations that were prepared in a scaling.
    fn quantized(&self, scaling: Scaling) -> &QuantizedRows {
        match scaling {
            Scaling::Row => &self.row,
            Scaling::Blocks256 => &self.blocks256,
            Scaling::Blocks32 => &self.blocks32,
        }
    }

    fn float(&mut self, precision: Precision) -> &mut FloatRows {
        match precision {
            Precision::Full => &mut self.float,
            Precision::Bits16 => &mut self.float16,
            Precision::Bits13 => &mut self.float13,
        }
    }

    /// Makes each form that any of `matrices` needs, once.
    fn prepare<'a>(
        &mut self,
        exec: &Exec,
        mut x: Rows<'_>,
        k: usize,
        matrices: impl Iterator<Item = Matrix<'a>> + Clone,
    ) -> Result<(), ShapeError> {
        let forms = || matrices.clone().map(|w| w.form());
        for scaling in [Scaling::Row, Scaling::Blocks256, Scaling::Blocks32] {
            let rounded = scaling == Scaling::Row && forms().any(|f| f == Form::RoundedF32);
            if rounded || forms().any(|f| f == Form::Int8(scaling)) {
                self.int8(scaling).quantize(exec, scaling, &x, k)?;
                x = Rows::Ready(x.taken());
            }
            if rounded {
                let rounded = self.row.dequantize_rows();
                self.rounded.round(exec, Precision::Full, &rounded, k)?;
            }
        }
        let x = x.finish(exec);
        for precision in [Precision::Full, Precision::Bits16, Precision::Bits13] {
            if forms().any(|f| f == Form::Float(precision)) {
                self.float(precision).round(exec, precision, x, k)?;
            }
        }
        Ok(())
    }
}

/// Columns of a result written by several threads, disjointly.
struct Columns<'a> {
    out: SharedSlice<'a, f32>,
    n: usize,
}

impl<'a> Columns<'a> {
    /// All columns of a result of `n`.
    fn new(out: &'a mut [f32], n: usize) -> Columns<'a> {
        let out = SharedSlice::new(out);
        Columns { out, n }
    }

    fn len(&self) -> usize {
        self.out.len()
    }

    /// Columns `columns` of row `t`.
    ///
    /// # Safety
    /// No other thread has any of these columns.
    #[allow(clippy::mut_from_ref)]
    unsafe fn row_mut(&self, t: usize, columns: Range<usize>) -> &mut [f32] {
        assert!(columns.end <= self.n);
        // SAFETY: the caller's promise; within the row by the check above.
        unsafe {
            self.out
                .range_mut(t * self.n + columns.start..t * self.n + columns.end)
        }
    }
}

/// Rows of weights per task are a multiple of this, except in the last task of a matrix: what the widest
/// kernel computes at a time.
const ROWS: usize = 16;

/// Bytes of weights that justify a task when there is one activation row: reading them takes some
/// microseconds.
const BYTES_PER_TASK: usize = 48 << 10;

/// Multiply-accumulates that justify a task.
const WORK_PER_TASK: usize = 1 << 18;

/// `out[t, i] = Σ_j w[i, j] · x[t, j]` for each of several matrices that read the same `x`.
///
/// Shapes: `x` is `[m, k]`; each matrix is `[n, k]` with an output `[m, n]`. `k` is that of the
/// matrices.
/// Errors: [`ShapeError`] if a slice has the wrong length or a matrix another `k`.
/// Exactness: see the [module](self).
pub fn linear(
    exec: &Exec,
    x: &[f32],
    k: usize,
    scratch: &mut Scratch,
    outputs: &mut [(Matrix<'_>, &mut [f32])],
) -> Result<(), ShapeError> {
    begin(exec, Rows::Ready(x), k, scratch, outputs)?;
    run(exec, [(&*scratch, outputs)].into_iter());
    Ok(())
}

/// The products of [`linear`] after `ops`, in order: each row of `x` goes through all of them, and is converted to what
/// products read, while one thread has it in its caches.
///
/// Shapes, errors and exactness: as [`linear`], and each operation has the bits that it has alone.
pub fn linear_after<'a>(
    exec: &Exec,
    ops: Vec<RowOp<'a>>,
    x: &'a mut [f32],
    k: usize,
    scratch: &mut Scratch,
    outputs: &mut [(Matrix<'_>, &mut [f32])],
) -> Result<(), ShapeError> {
    begin(exec, Rows::new(x, k, ops)?, k, scratch, outputs)?;
    run(exec, [(&*scratch, outputs)].into_iter());
    Ok(())
}

/// Rows of activations, and the matrices that read them.
#[derive(Debug)]
pub struct Batch<'a> {
    /// `[m, k]`.
    pub x: &'a [f32],
    /// Matrices `[n, k]`, each with its output `[m, n]`.
    pub outputs: Vec<(Matrix<'a>, &'a mut [f32])>,
}

/// The products of [`linear`] for several batches, whose tasks are shared out together: small batches keep all
/// threads busy.
///
/// Shapes, errors and exactness: as [`linear`]; all batches have the same `k`.
pub fn linear_batches(
    exec: &Exec,
    k: usize,
    scratches: &mut Vec<Scratch>,
    batches: &mut [Batch<'_>],
) -> Result<(), ShapeError> {
    scratches.resize_with(scratches.len().max(batches.len()), Scratch::default);
    for (scratch, Batch { x, outputs }) in scratches.iter_mut().zip(&*batches) {
        begin(exec, Rows::Ready(x), k, scratch, outputs)?;
    }
    let batches = batches.iter_mut().map(|batch| &mut batch.outputs[..]);
    run(exec, scratches.iter().zip(batches));
    Ok(())
}

/// Checks shapes, and prepares the activations.
fn begin(
    exec: &Exec,
    x: Rows<'_>,
    k: usize,
    scratch: &mut Scratch,
    outputs: &[(Matrix<'_>, &mut [f32])],
) -> Result<(), ShapeError> {
    let m = shape::rows("linear: activations", x.len(), k)?;
    for (w, out) in outputs {
        expect_len("linear: columns of a matrix", k, w.k())?;
        expect_len("linear: output", m * w.n(), out.len())?;
    }
    scratch.prepare(exec, x, k, outputs.iter().map(|(w, _)| *w))
}

/// A matrix, its activations, and where the products go.
struct Target<'a, 'w> {
    w: Matrix<'w>,
    scratch: &'a Scratch,
    out: Columns<'a>,
    /// Those that compute it.
    tasks: Range<usize>,
    rows_per_task: usize,
}

/// Whether adjacent tasks are faster as one. Kernels that read rows once for every few rows of activations find the rows
/// of a small task in a cache; those for AMX have several panels share activations.
fn is_joined(w: &Matrix<'_>, scratch: &Scratch) -> bool {
    match w.form() {
        Form::Int8(scaling) => scratch.quantized(scaling).tiles().order() != Order::Quads,
        Form::Float(_) | Form::RoundedF32 => false,
    }
}

/// Computes the products of batches whose activations are prepared, each with its outputs.
fn run<'a, 'w: 'a, 'o: 'a>(
    exec: &Exec,
    batches: impl Iterator<Item = (&'a Scratch, &'a mut [(Matrix<'w>, &'o mut [f32])])>,
) {
    let mut targets = Vec::new();
    let (mut n_batches, mut n_tasks) = (0, 0);
    for (scratch, outputs) in batches {
        n_batches += 1;
        for (w, out) in outputs {
            let m = out.len().checked_div(w.n()).unwrap_or(0);
            let rows_per_task = rows_per_task(w, m).next_multiple_of(rows_at_a_time(w, scratch));
            let tasks = n_tasks..n_tasks + w.n().div_ceil(rows_per_task);
            n_tasks = tasks.end;
            targets.push(Target {
                w: *w,
                scratch,
                out: Columns::new(out, w.n()),
                tasks,
                rows_per_task,
            });
        }
    }
    // Experts are others for each token, and more rows take longer than what is between their products.
    match n_batches {
        1 if targets.iter().all(|of| of.out.len() == of.w.n()) => {
            (exec.lookahead).begin(targets.iter().map(|Target { w, .. }| Part {
                address: w.bytes().as_ptr().addr(),
                len: w.bytes().len(),
                per_task: rows_per_task(w, 1) * w.row_bytes(),
            }));
        }
        _ => exec.lookahead.skip(),
    }
    exec.pool.for_ranges(n_tasks, 1, |range| {
        for target in &targets {
            let Target {
                w,
                scratch,
                out,
                tasks,
                rows_per_task,
            } = target;
            let own = range.start.max(tasks.start)..range.end.min(tasks.end);
            if own.is_empty() {
                continue;
            }
            let at_once = match is_joined(w, scratch) {
                true => own.len(),
                false => 1,
            };
            for first in own.clone().step_by(at_once) {
                let rows = |task: usize| w.n().min((task - tasks.start) * rows_per_task);
                let rows = rows(first)..rows(own.end.min(first + at_once));
                multiply(exec, w, rows, scratch, out);
            }
        }
    });
}

/// Rows that the kernel for the activations in `scratch` computes together.
fn rows_at_a_time(w: &Matrix<'_>, scratch: &Scratch) -> usize {
    match w {
        Matrix::Interleaved(w) => w.rows_at_a_time(scratch.quantized(w.scaling())),
        Matrix::Blocks(_) | Matrix::Ternary(_) => ROWS,
    }
}

fn rows_per_task(w: &Matrix<'_>, m: usize) -> usize {
    let by_work = WORK_PER_TASK.div_ceil((w.k() * m).max(1));
    let by_bytes = BYTES_PER_TASK.div_ceil(w.row_bytes().max(1));
    by_work.min(by_bytes).next_multiple_of(ROWS)
}

/// Computes the columns `rows` of a result. No other task may have them.
fn multiply(exec: &Exec, w: &Matrix<'_>, rows: Range<usize>, scratch: &Scratch, out: &Columns<'_>) {
    match (w, w.form()) {
        (Matrix::Ternary(w), _) => ternary::multiply(exec.isa, w, rows, &scratch.row, out),
        (Matrix::Interleaved(w), _) => {
            interleaved::multiply(exec.isa, w, rows, scratch, out);
        }
        (Matrix::Blocks(w), Form::Float(precision)) => {
            let x = match precision {
                Precision::Full => &scratch.float,
                Precision::Bits16 => &scratch.float16,
                Precision::Bits13 => &scratch.float13,
            };
            float::multiply(exec.isa, w, rows, precision, x, out);
        }
        (Matrix::Blocks(w), Form::RoundedF32) => {
            float::multiply(exec.isa, w, rows, Precision::Full, &scratch.rounded, out);
        }
        (Matrix::Blocks(w), Form::Int8(Scaling::Blocks256)) => {
            integer::multiply(exec.isa, w, rows, &scratch.blocks256, out);
        }
        (Matrix::Blocks(w), Form::Int8(_)) => {
            integer::multiply(exec.isa, w, rows, &scratch.blocks32, out);
        }
    }
}

#[cfg(test)]
mod tests {
    use sterna_format::DType;

    use super::*;
    use crate::quant::encode_row_quick;
    use crate::test_data::{exec_matrix, floats};

    #[test]
    fn batches_give_the_bits_that_each_gives_alone() {
        const K: usize = 256;
        let encoded = |dtype: DType, n: usize| {
            let mut bytes = vec![0; n * K / dtype.block_len() * dtype.block_bytes()];
            encode_row_quick(dtype, &floats(n * K, 3), &mut bytes).unwrap();
            (dtype, n, bytes)
        };
        let weights = [
            encoded(DType::Q4_K, 33),
            encoded(DType::BF16, 17),
            encoded(DType::Q8_0, 5),
        ];
        fn matrix((dtype, n, bytes): &(DType, usize, Vec<u8>)) -> Matrix<'_> {
            let blocks = BlockMatrix::new(*dtype, *n, K, Rounding::Blocks, bytes);
            Matrix::Blocks(blocks.unwrap())
        }
        for exec in exec_matrix() {
            // Rows of each batch; the scratch is reused for batches of other sizes.
            let mut scratches = Vec::new();
            for sizes in [&[1, 3, 0, 40][..], &[7], &[]] {
                let inputs: Vec<Vec<f32>> =
                    sizes.iter().map(|m| floats(m * K, *m as u64)).collect();
                let mut got: Vec<Vec<Vec<f32>>> = (sizes.iter())
                    .map(|m| {
                        weights
                            .iter()
                            .map(|(_, n, _)| vec![f32::NAN; m * n])
                            .collect()
                    })
                    .collect();
                let mut batches: Vec<Batch<'_>> = (inputs.iter().zip(&mut got))
                    .map(|(x, outs)| Batch {
                        x,
                        outputs: (weights.iter().zip(outs))
                            .map(|(w, out)| (matrix(w), &mut out[..]))
                            .collect(),
                    })
                    .collect();
                linear_batches(&exec, K, &mut scratches, &mut batches).unwrap();
                drop(batches);
                for (x, got) in inputs.iter().zip(&got) {
                    for (w, got) in weights.iter().zip(got) {
                        let mut want = vec![f32::NAN; got.len()];
                        let outputs = &mut [(matrix(w), &mut want[..])];
                        linear(&exec, x, K, &mut Scratch::default(), outputs).unwrap();
                        assert_eq!(*got, want, "{exec:?} {}", w.0);
                    }
                }
            }
        }
    }
}
