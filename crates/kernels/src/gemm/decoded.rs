//! Weights decoded to f32, activations in f32.

use std::ops::Range;

use super::{BlockMatrix, Columns};
use crate::dot::dot_tile;
use crate::isa::{Isa, multiversion};

/// Rows that are decoded together and then multiplied with every activation row.
const TILE: usize = 4;

/// `out[t, i] = Σ_j w[i, j] · x[t, j]` for the rows `i` of the weights, `[n, k]`; `x` is `[m, k]`.
///
/// Exactness: weights are decoded to f32 exactly; each sum is taken in one fixed order, so the bits
/// depend on neither threads, instruction set nor the other rows of `x`.
pub(super) fn multiply(
    isa: Isa,
    w: &BlockMatrix<'_>,
    rows: Range<usize>,
    x: &[f32],
    out: &Columns<'_>,
) {
    let k = w.k();
    let m = x.len().checked_div(k).unwrap_or(0);
    let mut decoded = vec![0.0; TILE * k];
    let mut tile = vec![0.0; TILE * m];
    for first in rows.clone().step_by(TILE) {
        let n_rows = TILE.min(rows.end - first);
        let decoded = &mut decoded[..n_rows * k];
        w.decode(isa, first, decoded);
        let tile = &mut tile[..n_rows * m];
        multiply_tile(isa, decoded, x, k, tile);
        for t in 0..m {
            // SAFETY: no other task has these rows, so none writes these columns.
            let out = unsafe { out.row_mut(t, first..first + n_rows) };
            for (r, out) in out.iter_mut().enumerate() {
                *out = tile[r * m + t];
            }
        }
    }
}

multiversion! {
    /// `out[r, t] = Σ_j w[r, j] · x[t, j]` for whole rows of `k`; `out` is `[n_rows, m]`.
    fn multiply_tile(w: &[f32], x: &[f32], k: usize, out: &mut [f32]) {
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
    use sterna_format::DType;

    use super::super::{Matrix, Rounding, Scratch, linear};
    use super::*;
    use crate::Exec;
    use crate::test_data::{exec_matrix, floats};

    fn run(exec: &Exec, w: BlockMatrix<'_>, x: &[f32], m: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; m * w.n()];
        let outputs = &mut [(Matrix::Blocks(w), &mut out[..])];
        linear(exec, x, w.k(), &mut Scratch::default(), outputs).unwrap();
        out
    }

    #[test]
    fn f32_matrix_matches_f64_sums_on_every_path() {
        for (n, k, m) in [(1, 1, 1), (3, 17, 2), (33, 64, 5), (70, 100, 1), (0, 4, 2)] {
            let w = floats(n * k, 1);
            let x = floats(m * k, 2);
            let bytes: Vec<u8> = w.iter().flat_map(|v| v.to_le_bytes()).collect();
            let matrix = BlockMatrix::new(DType::F32, n, k, Rounding::None, &bytes).unwrap();
            let mut first: Option<Vec<f32>> = None;
            for exec in exec_matrix() {
                let out = run(&exec, matrix, &x, m);
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
        let matrix = BlockMatrix::new(DType::F16, n, k, Rounding::None, &bytes).unwrap();
        let x = floats(m * k, 4);
        let exec = Exec::new(2, Isa::detect());
        let all = run(&exec, matrix, &x, m);
        for t in 0..m {
            let one = run(&exec, matrix, &x[t * k..][..k], 1);
            assert_eq!(one, all[t * n..][..n]);
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let w = BlockMatrix::new(DType::F32, 2, 2, Rounding::None, &[0; 16]).unwrap();
        let exec = Exec::new(1, Isa::SCALAR);
        let mut scratch = Scratch::default();
        let mut run = |x: &[f32], k, out: &mut [f32]| {
            linear(&exec, x, k, &mut scratch, &mut [(Matrix::Blocks(w), out)])
        };
        assert!(run(&[0.0; 3], 2, &mut [0.0; 2]).is_err());
        assert!(run(&[0.0; 4], 2, &mut [0.0; 3]).is_err());
        assert!(run(&[0.0; 4], 4, &mut [0.0; 2]).is_err());
        assert!(run(&[0.0; 4], 2, &mut [0.0; 4]).is_ok());
    }
}
