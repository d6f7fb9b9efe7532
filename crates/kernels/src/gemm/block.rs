//! Weights in any block format, activations in f32.

use sterna_format::DType;

use super::rows_per_task;
use crate::Exec;
use crate::dot::dot_tile;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::quant::{QuantError, decode_row};
use crate::shape::{self, ShapeError, expect_len};

/// A weight matrix `[n, k]`, row-major, each row whole blocks of `dtype`.
#[derive(Debug, Clone, Copy)]
pub struct BlockMatrix<'a> {
    dtype: DType,
    n: usize,
    k: usize,
    row_bytes: usize,
    bytes: &'a [u8],
}

impl<'a> BlockMatrix<'a> {
    /// A view of `bytes` as `n` rows of `k` elements.
    ///
    /// Errors: [`QuantError`] if the type has no decoder, the rows aren't whole blocks, or `bytes`
    /// isn't `n` rows.
    pub fn new(dtype: DType, n: usize, k: usize, bytes: &'a [u8]) -> Result<Self, QuantError> {
        decode_row(dtype, &[], &mut [])?;
        if !k.is_multiple_of(dtype.block_len()) {
            return Err(QuantError::PartialBlock {
                dtype,
                elements: k,
                block_len: dtype.block_len(),
            });
        }
        let row_bytes = k / dtype.block_len() * dtype.block_bytes();
        // A product beyond the address space equals no length.
        let expected = row_bytes.saturating_mul(n);
        if bytes.len() != expected {
            return Err(QuantError::Size {
                what: "matrix of blocks",
                expected,
                found: bytes.len(),
            });
        }
        Ok(BlockMatrix {
            dtype,
            n,
            k,
            row_bytes,
            bytes,
        })
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Elements of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Decodes rows from `first` into `out`, `[n_rows, k]`. Panics if they aren't all there.
    pub fn decode(&self, exec: &Exec, first: usize, out: &mut [f32]) {
        let n_rows = out.len().checked_div(self.k).unwrap_or(0);
        let bytes = &self.bytes[first * self.row_bytes..][..n_rows * self.row_bytes];
        decode_rows(exec.isa, self.dtype, bytes, &mut out[..n_rows * self.k]);
    }
}

multiversion! {
    fn decode_rows(dtype: DType, bytes: &[u8], out: &mut [f32]) {
        decode_row(dtype, bytes, out).expect("`BlockMatrix::new` checked the type and the sizes");
    }
}

/// Multiplications that a thread takes at a time.
const WORK_PER_TASK: usize = 1 << 16;

/// Rows that are decoded together and then multiplied with every activation row.
const TILE: usize = 4;

/// `out[t, i] = Σ_j w[i, j] · x[t, j]`.
///
/// Shapes: `w` is `[n, k]`; `x` is `[m, k]`; `out` is `[m, n]`.
/// Errors: [`ShapeError`] if a slice has the wrong length.
/// Exactness: weights are decoded to f32 exactly; each sum is taken in one fixed order, so the bits
/// depend on neither threads, instruction set nor the other rows of `x`.
pub fn gemm_block_f32(
    exec: &Exec,
    w: BlockMatrix<'_>,
    x: &[f32],
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let m = shape::rows("gemm: activations", x.len(), w.k)?;
    expect_len("gemm: output", m * w.n, out.len())?;
    let shared = SharedSlice::new(out);
    let grain = rows_per_task(w.k, m, WORK_PER_TASK);
    exec.pool.for_ranges(w.n, grain, |rows| {
        let mut decoded = vec![0.0; TILE * w.k];
        let mut tile = vec![0.0; TILE * m];
        for first in rows.clone().step_by(TILE) {
            let n_rows = TILE.min(rows.end - first);
            let decoded = &mut decoded[..n_rows * w.k];
            w.decode(exec, first, decoded);
            let tile = &mut tile[..n_rows * m];
            multiply(exec.isa, decoded, x, w.k, tile);
            for t in 0..m {
                let start = t * w.n + first;
                // SAFETY: no other task has these rows, so none writes these columns.
                let out = unsafe { shared.range_mut(start..start + n_rows) };
                for (r, out) in out.iter_mut().enumerate() {
                    *out = tile[r * m + t];
                }
            }
        }
    });
    Ok(())
}

multiversion! {
    /// `out[r, t] = Σ_j w[r, j] · x[t, j]` for whole rows of `k`; `out` is `[n_rows, m]`.
    fn multiply(w: &[f32], x: &[f32], k: usize, out: &mut [f32]) {
        let n_rows = w.len().checked_div(k).unwrap_or(0);
        let m = x.len().checked_div(k).unwrap_or(0);
        let row = |r: usize| &w[r * k..][..k];
        let act = |t: usize| &x[t * k..][..k];
        let mut r = 0;
        while r < n_rows {
            let pair = r + 1 < n_rows;
            let mut t = 0;
            while t < m {
                let two = t + 1 < m;
                // One and two activation rows, one and two weight rows: the registers of AVX2 hold
                // no larger tile.
                match (pair, two) {
                    (true, true) => {
                        let [a, b] = dot_tile([row(r), row(r + 1)], [act(t), act(t + 1)]);
                        out[r * m + t..][..2].copy_from_slice(&a);
                        out[(r + 1) * m + t..][..2].copy_from_slice(&b);
                    }
                    (true, false) => {
                        let [[a], [b]] = dot_tile([row(r), row(r + 1)], [act(t)]);
                        out[r * m + t] = a;
                        out[(r + 1) * m + t] = b;
                    }
                    (false, true) => {
                        let [a] = dot_tile([row(r)], [act(t), act(t + 1)]);
                        out[r * m + t..][..2].copy_from_slice(&a);
                    }
                    (false, false) => out[r * m + t] = dot_tile([row(r)], [act(t)])[0][0],
                }
                t += 2;
            }
            r += 2;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    #[test]
    fn f32_matrix_matches_f64_sums_on_every_path() {
        for (n, k, m) in [(1, 1, 1), (3, 17, 2), (33, 64, 5), (70, 100, 1), (0, 4, 2)] {
            let w = floats(n * k, 1);
            let x = floats(m * k, 2);
            let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
            let matrix = BlockMatrix::new(DType::F32, n, k, &bytes).unwrap();
            let mut first: Option<Vec<f32>> = None;
            for exec in exec_matrix() {
                let mut out = vec![f32::NAN; m * n];
                gemm_block_f32(&exec, matrix, &x, &mut out).unwrap();
                for t in 0..m {
                    for i in 0..n {
                        let exact: f64 = (0..k)
                            .map(|j| f64::from(w[i * k + j]) * f64::from(x[t * k + j]))
                            .sum();
                        // 17 roundings of sums of at most k products of values within ±1.
                        assert!((f64::from(out[t * n + i]) - exact).abs() < 1e-6 * k as f64);
                    }
                }
                assert_eq!(*first.get_or_insert(out.clone()), out, "{exec:?}");
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let (n, k, m) = (37, 96, 7);
        let bytes: Vec<u8> = floats(n * k, 3)
            .iter()
            .flat_map(|v| half::f16::from_f32(*v).to_le_bytes())
            .collect();
        let matrix = BlockMatrix::new(DType::F16, n, k, &bytes).unwrap();
        let x = floats(m * k, 4);
        let exec = Exec::new(2, crate::Isa::detect());
        let mut all = vec![0.0; m * n];
        gemm_block_f32(&exec, matrix, &x, &mut all).unwrap();
        for t in 0..m {
            let mut one = vec![0.0; n];
            gemm_block_f32(&exec, matrix, &x[t * k..][..k], &mut one).unwrap();
            assert_eq!(one, all[t * n..][..n]);
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert!(BlockMatrix::new(DType::Q8_0, 1, 33, &[0; 34]).is_err());
        assert!(BlockMatrix::new(DType::F32, 2, 2, &[0; 15]).is_err());
        assert!(BlockMatrix::new(DType::F32, usize::MAX, 2, &[0; 16]).is_err());
        let w = BlockMatrix::new(DType::F32, 2, 2, &[0; 16]).unwrap();
        let exec = Exec::new(1, crate::Isa::SCALAR);
        assert!(gemm_block_f32(&exec, w, &[0.0; 3], &mut [0.0; 2]).is_err());
        assert!(gemm_block_f32(&exec, w, &[0.0; 4], &mut [0.0; 3]).is_err());
    }
}
