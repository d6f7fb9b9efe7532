//! Normalisation of rows: by their root mean square, or by mean and variance.

use crate::Exec;
use crate::dot::dot;
use crate::isa::multiversion;
use crate::shape::{self, ShapeError, expect_len};

/// `x[t, i] ← x[t, i] · weight[i] / √(mean_i x[t, i]² + eps)`.
///
/// Shapes: `x` is `[m, weight.len()]`; with a head's width as `weight`, each head is a row.
/// Errors: [`ShapeError`] if `x` isn't whole rows.
pub fn rms_norm(exec: &Exec, x: &mut [f32], weight: &[f32], eps: f32) -> Result<(), ShapeError> {
    shape::rows("rms norm: input", x.len(), weight.len())?;
    exec.for_rows(x, weight.len(), |_, x| {
        norm_rows(exec.isa, x, weight, eps);
    });
    Ok(())
}

/// [`rms_norm`] of each of `n_groups` equal parts of a row by itself.
///
/// Shapes: `x` is `[m, weight.len()]`.
/// Errors: [`ShapeError`] if `x` isn't whole rows, or a row not whole groups.
pub fn rms_norm_groups(
    exec: &Exec,
    x: &mut [f32],
    weight: &[f32],
    n_groups: usize,
    eps: f32,
) -> Result<(), ShapeError> {
    let width = weight.len().checked_div(n_groups).unwrap_or(0);
    expect_len("rms norm: groups", width * n_groups, weight.len())?;
    shape::rows("rms norm: input", x.len(), weight.len())?;
    exec.for_rows(x, weight.len(), |_, x| {
        for row in x.chunks_exact_mut(weight.len()) {
            for (group, weight) in row.chunks_exact_mut(width).zip(weight.chunks_exact(width)) {
                norm_rows(exec.isa, group, weight, eps);
            }
        }
    });
    Ok(())
}

/// [`rms_norm`] of `x` into `out`, leaving `x` as it is.
///
/// Errors: [`ShapeError`] if the two differ in length or aren't whole rows.
pub fn rms_norm_into(
    exec: &Exec,
    x: &[f32],
    weight: &[f32],
    eps: f32,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    expect_len("rms norm: output", x.len(), out.len())?;
    shape::rows("rms norm: input", x.len(), weight.len())?;
    exec.for_rows(out, weight.len(), |first, out| {
        out.copy_from_slice(&x[first..first + out.len()]);
        norm_rows(exec.isa, out, weight, eps);
    });
    Ok(())
}

/// `x[t, i] ← (x[t, i] − mean) / √(variance + eps) · weight[i] + bias[i]`, mean and variance of each of `n_groups` equal
/// parts of a row by itself.
///
/// Shapes: `x` is `[m, weight.len()]`.
/// Errors: [`ShapeError`] if `x` isn't whole rows, a row not whole groups, or there are fewer or more biases than
/// weights.
pub fn layer_norm_groups(
    exec: &Exec,
    x: &mut [f32],
    (weight, bias): (&[f32], &[f32]),
    n_groups: usize,
    eps: f32,
) -> Result<(), ShapeError> {
    let width = weight.len().checked_div(n_groups).unwrap_or(0);
    expect_len("layer norm: groups", width * n_groups, weight.len())?;
    expect_len("layer norm: biases", weight.len(), bias.len())?;
    shape::rows("layer norm: input", x.len(), weight.len())?;
    exec.for_rows(x, weight.len(), |_, x| {
        for row in x.chunks_exact_mut(weight.len()) {
            let weights = weight.chunks_exact(width).zip(bias.chunks_exact(width));
            for (group, (weight, bias)) in row.chunks_exact_mut(width).zip(weights) {
                layer_norm_row(exec.isa, group, weight, bias, eps);
            }
        }
    });
    Ok(())
}

multiversion! {
    fn layer_norm_row(x: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
        let n = x.len() as f32;
        let mean = sum(x) / n;
        for x in x.iter_mut() {
            *x -= mean;
        }
        let inverse = 1.0 / (dot(x, x) / n + eps).sqrt();
        for ((x, weight), bias) in x.iter_mut().zip(weight).zip(bias) {
            *x = *x * inverse * weight + bias;
        }
    }
}

/// The sum of `x`, in a fixed order.
#[inline(always)]
fn sum(x: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut sums = [0.0; LANES];
    let (runs, rest) = x.as_chunks::<LANES>();
    for run in runs {
        for (sum, x) in sums.iter_mut().zip(run) {
            *sum += x;
        }
    }
    for (sum, x) in sums.iter_mut().zip(rest) {
        *sum += x;
    }
    sums.iter().sum()
}

multiversion! {
    pub(crate) fn norm_rows(x: &mut [f32], weight: &[f32], eps: f32) {
        for row in x.chunks_exact_mut(weight.len()) {
            let mean = dot(row, row) / weight.len() as f32;
            let inverse = 1.0 / (mean + eps).sqrt();
            for (x, w) in row.iter_mut().zip(weight) {
                *x = *x * inverse * w;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    #[test]
    fn matches_the_formula_on_every_path() {
        for (m, width) in [(1, 1), (3, 17), (40, 64)] {
            let (x, weight) = (floats(m * width, 1), floats(width, 2));
            let mut first = None;
            for exec in exec_matrix() {
                let mut out = vec![0.0; x.len()];
                rms_norm_into(&exec, &x, &weight, 1e-5, &mut out).unwrap();
                for (row, out) in x.chunks(width).zip(out.chunks(width)) {
                    let mean: f64 =
                        row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() / width as f64;
                    for i in 0..width {
                        let want = f64::from(row[i]) * f64::from(weight[i]) / (mean + 1e-5).sqrt();
                        assert!((f64::from(out[i]) - want).abs() < 1e-5);
                    }
                }
                assert_eq!(*first.get_or_insert(out.clone()), out);
            }
        }
    }

    #[test]
    fn groups_are_normalised_by_themselves() {
        let (x, weight) = (floats(5 * 12, 1), floats(12, 2));
        for exec in exec_matrix() {
            let mut together = x.clone();
            rms_norm_groups(&exec, &mut together, &weight, 3, 1e-5).unwrap();
            for (i, (got, x)) in together.chunks(4).zip(x.chunks(4)).enumerate() {
                let mut alone = x.to_vec();
                rms_norm(&exec, &mut alone, &weight[i % 3 * 4..][..4], 1e-5).unwrap();
                assert_eq!(got, alone);
            }
            assert!(rms_norm_groups(&exec, &mut [0.0; 12], &weight, 5, 1e-5).is_err());
            assert!(rms_norm_groups(&exec, &mut [0.0; 11], &weight, 3, 1e-5).is_err());
        }
    }

    #[test]
    fn layer_norms_match_the_formula_on_every_path() {
        for (m, width, n_groups) in [(1, 1, 1), (3, 17, 1), (5, 64, 1), (7, 60, 3)] {
            let (x, weight, bias) = (floats(m * width, 1), floats(width, 2), floats(width, 3));
            let mut first = None;
            for exec in exec_matrix() {
                let mut out = x.clone();
                layer_norm_groups(&exec, &mut out, (&weight, &bias), n_groups, 1e-2).unwrap();
                let each = width / n_groups;
                for (i, (x, out)) in x.chunks(each).zip(out.chunks(each)).enumerate() {
                    let of = |f: &dyn Fn(f64) -> f64| {
                        x.iter().map(|&x| f(f64::from(x))).sum::<f64>() / each as f64
                    };
                    let mean = of(&|x| x);
                    let variance = of(&|x| (x - mean).powi(2));
                    for j in 0..each {
                        let at = i % n_groups * each + j;
                        let normed = (f64::from(x[j]) - mean) / (variance + 1e-2).sqrt();
                        let want = normed * f64::from(weight[at]) + f64::from(bias[at]);
                        assert!((f64::from(out[j]) - want).abs() < 1e-5);
                    }
                }
                assert_eq!(*first.get_or_insert(out.clone()), out);
            }
        }
        let exec = Exec::new(1, crate::Isa::SCALAR);
        let call = |x: usize, weight: usize, bias: usize, n_groups| {
            let (weight, bias) = (vec![1.0; weight], vec![0.0; bias]);
            layer_norm_groups(&exec, &mut vec![0.0; x], (&weight, &bias), n_groups, 1e-5)
        };
        assert!(call(12, 6, 6, 2).is_ok());
        for (x, weight, bias, n_groups) in
            [(11, 6, 6, 2), (12, 6, 5, 2), (12, 6, 6, 4), (12, 6, 6, 0)]
        {
            assert!(call(x, weight, bias, n_groups).is_err());
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let exec = Exec::new(1, crate::Isa::SCALAR);
        assert!(rms_norm(&exec, &mut [0.0; 3], &[1.0; 2], 1e-5).is_err());
        assert!(rms_norm(&exec, &mut [0.0; 3], &[], 1e-5).is_err());
        assert!(rms_norm_into(&exec, &[0.0; 4], &[1.0; 2], 1e-5, &mut [0.0; 2]).is_err());
    }
}
