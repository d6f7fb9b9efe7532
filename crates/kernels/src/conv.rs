//! Short causal convolutions over the positions of a sequence.

use crate::Exec;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::shape::{ShapeError, expect_len};

/// Channels per task.
const CHANNELS: usize = 64;

/// A gated convolution (LFM2): `out[t, c] = C[t, c] · Σ_j w[c, j] · u[t + j − (taps − 1), c]` with
/// `u[t, c] = B[t, c] · x[t, c]`.
///
/// Shapes: `bcx` is `[m, 3 · dim]`, the rows of `B`, `C` and `x` side by side; `w` is `[dim, taps]`; `out` is
/// `[m, dim]`. `state` is `[taps − 1, dim]`: `u` at the positions before, zeros at the beginning; it becomes that
/// after the last row.
/// Exactness: sums are taken from the earliest position on, in f32, so that results don't depend on how positions
/// are divided into calls.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn gated(
    exec: &Exec,
    dim: usize,
    w: &[f32],
    bcx: &[f32],
    state: &mut [f32],
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let m = out.len().checked_div(dim).unwrap_or(0);
    let taps = w.len().checked_div(dim).unwrap_or(0);
    expect_len("convolution: output", m * dim, out.len())?;
    expect_len("convolution: weights", taps * dim, w.len())?;
    expect_len("convolution: input", 3 * out.len(), bcx.len())?;
    expect_len(
        "convolution: state",
        taps.saturating_sub(1) * dim,
        state.len(),
    )?;
    let (out, state) = (SharedSlice::new(out), SharedSlice::new(state));
    exec.pool.for_ranges(dim.div_ceil(CHANNELS), 1, |tasks| {
        let mut window = vec![[0.0; CHANNELS]; taps];
        let mut weights = window.clone();
        for task in tasks {
            let first = task * CHANNELS;
            let n = CHANNELS.min(dim - first);
            for (j, weights) in weights.iter_mut().enumerate() {
                for (c, weight) in weights[..n].iter_mut().enumerate() {
                    *weight = w[(first + c) * taps + j];
                }
            }
            // SAFETY: the channels of a task are no other's.
            let (out_at, state_at) = unsafe {
                (
                    |t: usize| out.range_mut(t * dim + first..t * dim + first + n),
                    |j: usize| state.range_mut(j * dim + first..j * dim + first + n),
                )
            };
            for (j, window) in window.iter_mut().take(taps.saturating_sub(1)).enumerate() {
                window[..n].copy_from_slice(state_at(j));
            }
            for t in 0..m {
                let row = &bcx[t * 3 * dim..(t + 1) * 3 * dim];
                let part = |i: usize| &row[i * dim + first..][..n];
                if let Some(last) = window.last_mut() {
                    multiply(exec.isa, part(0), part(2), last);
                }
                let out = out_at(t);
                out.fill(0.0);
                for (weights, window) in weights.iter().zip(&window) {
                    accumulate(exec.isa, weights, window, out);
                }
                scale(exec.isa, part(1), out);
                window.rotate_left(1.min(taps));
            }
            for (j, window) in window.iter().take(taps.saturating_sub(1)).enumerate() {
                state_at(j).copy_from_slice(&window[..n]);
            }
        }
    });
    Ok(())
}

multiversion! {
    fn multiply(a: &[f32], b: &[f32], out: &mut [f32; CHANNELS]) {
        for ((out, a), b) in out.iter_mut().zip(a).zip(b) {
            *out = a * b;
        }
    }
}

multiversion! {
    fn accumulate(w: &[f32; CHANNELS], u: &[f32; CHANNELS], out: &mut [f32]) {
        for ((out, w), u) in out.iter_mut().zip(w).zip(u) {
            *out += w * u;
        }
    }
}

multiversion! {
    fn scale(by: &[f32], out: &mut [f32]) {
        for (out, by) in out.iter_mut().zip(by) {
            *out *= by;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    /// The definition.
    fn expected(dim: usize, w: &[f32], bcx: &[f32]) -> Vec<f32> {
        let (taps, m) = (w.len() / dim, bcx.len() / (3 * dim));
        let at = |t: usize, i: usize, c: usize| bcx[(t * 3 + i) * dim + c];
        let mut out = Vec::new();
        for t in 0..m {
            for c in 0..dim {
                let mut sum = 0.0;
                for j in 0..taps {
                    let u = (t + j + 1)
                        .checked_sub(taps)
                        .map(|t| at(t, 0, c) * at(t, 2, c));
                    sum += w[c * taps + j] * u.unwrap_or(0.0);
                }
                out.push(sum * at(t, 1, c));
            }
        }
        out
    }

    #[test]
    fn every_machine_and_every_division_into_calls_gives_the_definition() {
        for (m, dim, taps) in [(1, 1, 1), (7, 130, 3), (5, 64, 4), (3, 5, 8), (0, 4, 3)] {
            let w = floats(taps * dim, 1);
            let bcx = floats(m * 3 * dim, 2);
            let want = expected(dim, &w, &bcx);
            for exec in exec_matrix() {
                for chunk in [1, 2, m.max(1)] {
                    let mut state = vec![0.0; (taps - 1) * dim];
                    let mut got = Vec::new();
                    for bcx in bcx.chunks(chunk * 3 * dim) {
                        let mut out = vec![f32::NAN; bcx.len() / 3];
                        gated(&exec, dim, &w, bcx, &mut state, &mut out).unwrap();
                        got.extend(out);
                    }
                    assert_eq!(got, want, "{m} {dim} {taps} {chunk} {exec:?}");
                }
            }
        }
    }

    #[test]
    fn shapes_are_checked() {
        let exec = Exec::new(1, crate::Isa::detect());
        let call = |w, x, state, out| {
            let (w, x) = (vec![0.0; w], vec![0.0; x]);
            gated(&exec, 4, &w, &x, &mut vec![0.0; state], &mut vec![0.0; out])
        };
        assert!(call(12, 24, 8, 8).is_ok());
        assert!(call(12, 23, 8, 8).is_err());
        assert!(call(13, 24, 8, 8).is_err());
        assert!(call(12, 24, 9, 8).is_err());
        assert!(call(12, 24, 8, 9).is_err());
    }
}
