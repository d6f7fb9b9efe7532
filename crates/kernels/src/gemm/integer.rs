//! Weights that are blocks of integers, int8 activations.
//!
//! Within a block sums are exact integers. How they become floats, and in which order those are added, is
//! fixed by [`reference`](self::reference), so that every kernel gives the same bits.

pub(super) mod reference;
#[cfg(any(
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128")
))]
pub(super) mod vector;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::ops::Range;

use sterna_format::DType;

use super::activations::{QuantizedRow, QuantizedRows, Scaling};
use super::{BlockMatrix, Columns, panel};
use crate::isa::{Isa, Level};

/// The scaling of activations that weights of `dtype` take; `None` if they aren't blocks of integers
/// that this module multiplies.
pub(super) fn scaling(dtype: DType) -> Option<Scaling> {
    match dtype {
        DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => {
            Some(Scaling::Blocks256)
        }
        DType::Q4_0
        | DType::Q5_0
        | DType::Q8_0
        | DType::Q1_0
        | DType::Q2_0
        | DType::Q2_0_G128
        | DType::PQ2_0 => Some(Scaling::Blocks32),
        _ => None,
    }
}

/// `out[t, i] = Σ_j w[i, j] · x[t, j]` for the rows `i` of the weights.
///
/// `x` has the [`scaling`] of the type of the weights.
pub(super) fn multiply(
    isa: Isa,
    w: &BlockMatrix<'_>,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    if x.m() > 1 {
        return panel::multiply_blocks(isa, w, rows, x, out);
    }
    let gemv = gemv(isa);
    for t in 0..x.m() {
        // SAFETY: no other task has these rows, so none writes these columns.
        let out = unsafe { out.row_mut(t, rows.clone()) };
        if let Some(gemv) = gemv {
            let bytes = w.rows(rows.start, rows.len());
            // SAFETY: it is the kernel of an `Isa`, which this machine has been seen to offer.
            unsafe { gemv(w.dtype(), bytes, w.row_bytes(), x.row(t), out) };
            continue;
        }
        for (out, i) in out.iter_mut().zip(rows.clone()) {
            *out = reference::dot(isa, w.dtype(), w.rows(i, 1), x.row(t));
        }
    }
}

/// `out[i] = Σ_j w[i, j] · x[j]` for whole rows of `row_bytes`.
///
/// # Safety
/// The machine has the instructions that the function was made for.
type Gemv =
    unsafe fn(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]);

/// The kernel for one activation row, where there is a faster one than the reference.
fn gemv(isa: Isa) -> Option<Gemv> {
    match isa.level() {
        Level::Baseline => None,
        #[cfg(target_arch = "x86_64")]
        level => x86::gemv(level),
        #[cfg(any(
            target_arch = "aarch64",
            all(target_arch = "wasm32", target_feature = "simd128")
        ))]
        level => vector::gemv(level),
    }
}

#[cfg(test)]
mod tests {
    use half::f16;

    use super::super::prologue::Rows;
    use super::super::{InterleavedMatrix, Matrix, Rounding, Scratch, linear};
    use super::*;
    use crate::Exec;
    use crate::quant::{decode_row, encode_row_quick};
    use crate::test_data::{Random, exec_matrix, floats};

    const TYPES: [DType; 12] = [
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::Q4_0,
        DType::Q5_0,
        DType::Q8_0,
        DType::Q1_0,
        DType::Q2_0,
        DType::Q2_0_G128,
        DType::PQ2_0,
    ];

    /// `[n, k]` with `k` that many blocks of the type.
    struct Weights {
        dtype: DType,
        n: usize,
        k: usize,
        bytes: Vec<u8>,
    }

    impl Weights {
        fn new(dtype: DType, n: usize, n_blocks: usize, mut byte: impl FnMut() -> u8) -> Weights {
            let bytes = (0..n * n_blocks * dtype.block_bytes()).map(|_| byte());
            Weights {
                dtype,
                n,
                k: n_blocks * dtype.block_len(),
                bytes: bytes.collect(),
            }
        }

        fn encoded(dtype: DType, n: usize, n_blocks: usize) -> Weights {
            let mut weights = Weights::new(dtype, n, n_blocks, || 0);
            encode_row_quick(dtype, &floats(n * weights.k, 3), &mut weights.bytes).unwrap();
            weights
        }

        fn matrix(&self) -> BlockMatrix<'_> {
            BlockMatrix::new(self.dtype, self.n, self.k, Rounding::Blocks, &self.bytes).unwrap()
        }

        fn multiply(&self, exec: &Exec, x: &[f32]) -> Vec<f32> {
            self.multiply_as(Matrix::Blocks(self.matrix()), exec, x)
        }

        fn multiply_as(&self, matrix: Matrix<'_>, exec: &Exec, x: &[f32]) -> Vec<f32> {
            let mut out = vec![f32::NAN; x.len().checked_div(self.k).unwrap_or(0) * self.n];
            let outputs = &mut [(matrix, &mut out[..])];
            linear(exec, x, self.k, &mut Scratch::default(), outputs).unwrap();
            out
        }

        /// The same by the reference.
        fn expected(&self, x: &[f32]) -> Vec<f32> {
            let mut rows = QuantizedRows::default();
            let exec = Exec::new(1, Isa::SCALAR);
            rows.quantize(&exec, scaling(self.dtype).unwrap(), &Rows::Ready(x), self.k)
                .unwrap();
            let w = self.matrix();
            (0..rows.m())
                .flat_map(|t| (0..self.n).map(move |i| (t, i)))
                .map(|(t, i)| reference::dot(Isa::SCALAR, self.dtype, w.rows(i, 1), rows.row(t)))
                .collect()
        }

        fn check(&self, x: &[f32]) {
            let expected = self.expected(x);
            for exec in exec_matrix() {
                let interleaved =
                    InterleavedMatrix::on_any_level(&exec, &Matrix::Blocks(self.matrix()));
                let forms = interleaved.iter().map(Matrix::Interleaved);
                for form in forms.chain([Matrix::Blocks(self.matrix())]) {
                    let got = self.multiply_as(form, &exec, x);
                    for (i, (got, want)) in got.iter().zip(&expected).enumerate() {
                        let same = got.to_bits() == want.to_bits() || got.is_nan() && want.is_nan();
                        assert!(same, "{form:?} {exec:?} at {i}: {got}, not {want}");
                    }
                }
            }
        }
    }

    #[test]
    fn every_path_gives_the_bits_of_the_reference() {
        for dtype in TYPES {
            for (n, n_blocks, m) in [
                (1, 1, 1),
                (0, 2, 3),
                (5, 0, 1),
                (3, 2, 2),
                (17, 3, 1),
                (33, 4, 5),
                (16, 5, 3),
                (15, 7, 1),
                (18, 8, 9),
                (35, 9, 17),
                (31, 17, 1),
                (50, 9, 35),
                // With AMX: whole tiles of rows of activations, pairs and one alone, and one with few of them.
                (50, 9, 51),
                (17, 2, 64),
            ] {
                let w = Weights::encoded(dtype, n, n_blocks);
                w.check(&floats(m * w.k, 5));
            }
        }
    }

    /// Blocks of several rows side by side have their own kernels for each of these numbers of rows of activations.
    #[test]
    fn any_few_rows_give_the_bits_of_the_reference() {
        let mut random = Random::new(12);
        for dtype in TYPES {
            for (n, k) in [(5, 256), (33, 768)] {
                let mut w = Weights::new(dtype, n, k / dtype.block_len(), || random.next() as u8);
                w.set_scales(f16::from_f32(0.5));
                for m in 1..=9 {
                    w.check(&floats(m * k, 20 + m as u64));
                }
            }
        }
    }

    #[test]
    fn the_largest_sums_do_not_overflow() {
        // All bits set and all clear are the largest codes, scales and minimums of either sign, with
        // scales of the blocks that are NaN and 0; then the same with ordinary ones.
        for dtype in TYPES {
            for code in [0xff, 0x00, 0x80, 0x7f, 0xf0] {
                for scale in [None, Some(f16::from_f32(0.5))] {
                    // Whole spans of any type, and a block more of those that have none.
                    let n_blocks = (512 / dtype.block_len()).max(2);
                    let mut w = Weights::new(dtype, 17, n_blocks, || code);
                    if let Some(scale) = scale {
                        w.set_scales(scale);
                    }
                    for sign in [1.0, -1.0] {
                        for m in [1, 3] {
                            w.check(&vec![sign; m * w.k]);
                            let alternating = |i| if i % 2 == 0 { sign } else { -sign };
                            w.check(&(0..m * w.k).map(alternating).collect::<Vec<_>>());
                        }
                    }
                }
            }
        }
    }

    impl Weights {
        /// Sets all scales of blocks, and those of minimums.
        fn set_scales(&mut self, scale: f16) {
            let at: &[usize] = match self.dtype {
                DType::Q2_K => &[80, 82],
                DType::Q3_K => &[108],
                DType::Q4_K | DType::Q5_K => &[0, 2],
                DType::Q6_K => &[208],
                _ => &[0],
            };
            for block in self.bytes.chunks_exact_mut(self.dtype.block_bytes()) {
                for &at in at {
                    block[at..at + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }

    #[test]
    fn any_bytes_are_weights() {
        let mut random = Random::new(11);
        for dtype in TYPES {
            for (n, n_blocks, m) in [(40, 3, 1), (20, 9, 2), (17, 16, 4)] {
                let w = Weights::new(dtype, n, n_blocks, || random.next() as u8);
                let mut x = floats(m * w.k, 6);
                w.check(&x);
                x[0] = f32::NAN;
                x[w.k - 1] = f32::INFINITY;
                w.check(&x);
            }
        }
    }

    #[test]
    fn results_are_near_those_of_floats() {
        for dtype in TYPES {
            let w = Weights::encoded(dtype, 64, 2048 / dtype.block_len());
            let x = floats(2 * w.k, 8);
            let mut decoded = vec![0.0; w.n * w.k];
            decode_row(dtype, &w.bytes, &mut decoded).unwrap();
            let got = w.multiply(&Exec::new(1, Isa::detect()), &x);
            let (mut error, mut power) = (0.0, 0.0);
            for (t, x) in x.chunks_exact(w.k).enumerate() {
                for (i, row) in decoded.chunks_exact(w.k).enumerate() {
                    let products = row.iter().zip(x);
                    let exact: f64 = products.map(|(&w, &x)| f64::from(w) * f64::from(x)).sum();
                    error += (f64::from(got[t * w.n + i]) - exact).powi(2);
                    power += exact.powi(2);
                }
            }
            // Rounding to steps of 1/127 of the largest value is an error of variance step²/12.
            // Uniform values within ±1 have variance 1/3, so relative to them it is
            // (1/127)² / 12 · 3 = 1.6e-5, and sums of independent errors keep that ratio. The bound
            // leaves a quarter for chance among 128 sums.
            assert!(error / power < 2e-5, "{dtype}: {}", error / power);
        }
    }
}
