//! What is done to rows of activations on their way to products: the prologue of a product.

use std::ops::Range;

use crate::activation::{self, Activation};
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError, expect_len};
use crate::{Exec, Isa, norm, vector};

/// An operation on each row of activations by itself.
#[derive(Debug)]
pub enum RowOp<'a> {
    /// A residual connection, `sum ← sum + x`, then `x ← sum`. `sum` is `[m, k]`.
    AddTo(&'a mut [f32]),
    /// `x ← y`. `y` is `[m, k]`.
    Copy(&'a [f32]),
    /// [`activation::gate`]. The other factor is `[m, k]`.
    Gate(Activation, &'a [f32]),
    /// [`norm::rms_norm`], whose weights are as many as `k`, or a divisor of it.
    RmsNorm {
        /// The weights.
        weight: &'a [f32],
        /// Added to the mean of squares.
        eps: f32,
    },
}

/// Rows of activations that threads come for one by one.
pub(super) enum Rows<'a> {
    Ready(&'a [f32]),
    /// Each row becomes ready when it is [taken](Rows::take).
    Raw {
        x: SharedSlice<'a, f32>,
        k: usize,
        ops: Vec<Op<'a>>,
    },
}

/// A [`RowOp`] whose row each thread has for itself.
pub(super) enum Op<'a> {
    AddTo(SharedSlice<'a, f32>),
    Copy(&'a [f32]),
    Gate(Activation, &'a [f32]),
    RmsNorm { weight: &'a [f32], eps: f32 },
}

impl<'a> Rows<'a> {
    /// `x`, `[m, k]`, to which `ops` are to be done, in order.
    ///
    /// Errors: [`ShapeError`] if anything has another shape.
    pub(super) fn new(
        x: &'a mut [f32],
        k: usize,
        ops: Vec<RowOp<'a>>,
    ) -> Result<Rows<'a>, ShapeError> {
        shape::rows("prologue: activations", x.len(), k)?;
        let ops = ops.into_iter().map(|op| {
            Ok(match op {
                RowOp::AddTo(sum) => {
                    expect_len("prologue: sums", x.len(), sum.len())?;
                    Op::AddTo(SharedSlice::new(sum))
                }
                RowOp::Copy(y) => {
                    expect_len("prologue: rows to copy", x.len(), y.len())?;
                    Op::Copy(y)
                }
                RowOp::Gate(activation, up) => {
                    expect_len("prologue: up projection", x.len(), up.len())?;
                    Op::Gate(activation, up)
                }
                RowOp::RmsNorm { weight, eps } => {
                    shape::rows("prologue: weights of a norm", k, weight.len())?;
                    Op::RmsNorm { weight, eps }
                }
            })
        });
        let ops = ops.collect::<Result<Vec<_>, ShapeError>>()?;
        Ok(match ops.is_empty() {
            true => Rows::Ready(x),
            false => Rows::Raw {
                x: SharedSlice::new(x),
                k,
                ops,
            },
        })
    }

    /// Values of all rows.
    pub(super) fn len(&self) -> usize {
        match self {
            Rows::Ready(x) => x.len(),
            Rows::Raw { x, .. } => x.len(),
        }
    }

    /// A row, after the operations.
    ///
    /// # Safety
    /// Once only for each row.
    pub(super) unsafe fn take(&self, isa: Isa, row: Range<usize>) -> &[f32] {
        let (x, ops) = match self {
            Rows::Ready(x) => return &x[row],
            Rows::Raw { x, ops, .. } => (x, ops),
        };
        // SAFETY: nobody else takes this row.
        let x = unsafe { x.range_mut(row.clone()) };
        for op in ops {
            match op {
                Op::AddTo(sum) => {
                    // SAFETY: as above; sums have the same rows.
                    let sum = unsafe { sum.range_mut(row.clone()) };
                    vector::add_all(isa, sum, x);
                    x.copy_from_slice(sum);
                }
                Op::Copy(y) => x.copy_from_slice(&y[row.clone()]),
                Op::Gate(activation, up) => {
                    activation::gate_by(isa, *activation, x, &up[row.clone()]);
                }
                Op::RmsNorm { weight, eps } => norm::norm_rows(isa, x, weight, *eps),
            }
        }
        x
    }

    /// All rows, of which each was taken.
    pub(super) fn taken(self) -> &'a [f32] {
        match self {
            Rows::Ready(x) => x,
            Rows::Raw { x, .. } => x.into_slice(),
        }
    }

    /// All rows, of which none was taken.
    pub(super) fn finish(self, exec: &Exec) -> &'a [f32] {
        if let Rows::Raw { x, k, .. } = &self {
            let k = *k;
            exec.pool
                .for_ranges(x.len().checked_div(k).unwrap_or(0), 1, |rows| {
                    for t in rows {
                        // SAFETY: each row is in one range.
                        unsafe { self.take(exec.isa, t * k..(t + 1) * k) };
                    }
                });
        }
        self.taken()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gemm::{
        BlockMatrix, InterleavedMatrix, Matrix, Rounding, Scratch, linear, linear_after,
    };
    use crate::quant::encode_row_quick;
    use crate::test_data::{exec_matrix, floats};
    use sterna_format::DType;

    /// Ternary weights are rounded by row, those of blocks in two ways, others not at all.
    #[test]
    fn gives_the_bits_of_its_operations_one_by_one() {
        const K: usize = 512;
        const N: usize = 33;
        let encoded = |dtype: DType| {
            let mut bytes = vec![0; N * K / dtype.block_len() * dtype.block_bytes()];
            encode_row_quick(dtype, &floats(N * K, 3), &mut bytes).unwrap();
            (dtype, bytes)
        };
        let types = [DType::TQ2_0, DType::Q4_K, DType::Q8_0, DType::F16];
        let encoded = types.map(encoded);
        fn matrix((dtype, bytes): &(DType, Vec<u8>)) -> Matrix<'_> {
            Matrix::Blocks(BlockMatrix::new(*dtype, N, K, Rounding::Blocks, bytes).unwrap())
        }
        let (weight, eps) = (floats(K, 5), 1e-5);
        for exec in exec_matrix() {
            for m in [0, 1, 2, 5, 16, 41] {
                let (x, up, sum) = (floats(m * K, 7), floats(m * K, 8), floats(m * K, 9));
                let mut want_sum = sum.clone();
                let mut want_x = x.clone();
                activation::gate(&exec, Activation::Silu, &mut want_x, &up).unwrap();
                vector::add(&exec, &mut want_sum, &want_x).unwrap();
                norm::rms_norm_into(&exec, &want_sum, &weight, eps, &mut want_x).unwrap();
                for of in [&encoded[..], &encoded[3..], &encoded[..1]] {
                    let product = |x: &[f32]| {
                        let mut outs = vec![vec![0.0; m * N]; of.len()];
                        let outputs = of.iter().zip(&mut outs);
                        let mut outputs: Vec<_> =
                            outputs.map(|(w, out)| (matrix(w), &mut out[..])).collect();
                        linear(&exec, x, K, &mut Scratch::default(), &mut outputs).unwrap();
                        outs
                    };
                    let (mut got_x, mut got_sum) = (x.clone(), sum.clone());
                    let mut outs = vec![vec![0.0; m * N]; of.len()];
                    let outputs = of.iter().zip(&mut outs);
                    let mut outputs: Vec<_> =
                        outputs.map(|(w, out)| (matrix(w), &mut out[..])).collect();
                    let ops = vec![
                        RowOp::Gate(Activation::Silu, &up),
                        RowOp::AddTo(&mut got_sum),
                        RowOp::RmsNorm {
                            weight: &weight,
                            eps,
                        },
                    ];
                    let scratch = &mut Scratch::default();
                    linear_after(&exec, ops, &mut got_x, K, scratch, &mut outputs).unwrap();
                    assert_eq!((&got_x, &got_sum), (&want_x, &want_sum), "{exec:?} {m}");
                    assert_eq!(outs, product(&want_x), "{exec:?} {m}");
                }
            }
        }
    }

    /// Rows that are copied, heads that are normalised by themselves, interleaved weights, and a matrix without rows among
    /// others.
    #[test]
    fn other_operations_give_their_bits_too() {
        const K: usize = 256;
        let encoded = |n: usize| {
            let mut bytes = vec![0; n * K / 256 * DType::Q4_K.block_bytes()];
            encode_row_quick(DType::Q4_K, &floats(n * K, n as u64), &mut bytes).unwrap();
            (n, bytes)
        };
        let encoded = [20, 0, 70].map(encoded);
        let (weight, eps) = (floats(K / 4, 5), 1e-5);
        for exec in exec_matrix() {
            let interleaved = encoded.each_ref().map(|(n, bytes)| {
                let w = BlockMatrix::new(DType::Q4_K, *n, K, Rounding::Blocks, bytes).unwrap();
                InterleavedMatrix::on_any_level(&exec, &Matrix::Blocks(w)).unwrap()
            });
            for m in [1, 3, 16] {
                let y = floats(m * K, 7);
                let mut want_x = y.clone();
                norm::rms_norm(&exec, &mut want_x, &weight, eps).unwrap();
                let product = |ops: Option<Vec<RowOp<'_>>>, x: &mut [f32]| {
                    let mut outs = encoded.each_ref().map(|(n, _)| vec![f32::NAN; m * n]);
                    let outputs = interleaved.iter().zip(&mut outs);
                    let outputs = outputs.map(|(w, out)| (Matrix::Interleaved(w), &mut out[..]));
                    let (outputs, scratch) =
                        (&mut outputs.collect::<Vec<_>>(), &mut Scratch::default());
                    match ops {
                        Some(ops) => linear_after(&exec, ops, x, K, scratch, outputs).unwrap(),
                        None => linear(&exec, x, K, scratch, outputs).unwrap(),
                    }
                    outs
                };
                let mut x = vec![f32::NAN; m * K];
                let weight = &weight[..];
                let ops = vec![RowOp::Copy(&y), RowOp::RmsNorm { weight, eps }];
                let got = product(Some(ops), &mut x);
                assert_eq!(x, want_x, "{exec:?} {m}");
                assert_eq!(got, product(None, &mut want_x), "{exec:?} {m}");
            }
        }
    }

    #[test]
    fn other_shapes_are_refused() {
        let exec = &exec_matrix()[0];
        let (mut sum, long) = (vec![0.0; 5], vec![1.0; 5]);
        let eps = 1e-5;
        let weight = &long[..];
        let cases = [
            RowOp::AddTo(&mut sum),
            RowOp::Copy(&long),
            RowOp::Gate(Activation::Relu, &long),
            RowOp::RmsNorm { weight, eps },
        ];
        for op in cases {
            let scratch = &mut Scratch::default();
            let refused = linear_after(exec, vec![op], &mut [1.0; 6], 3, scratch, &mut []);
            assert!(refused.is_err());
        }
    }
}
