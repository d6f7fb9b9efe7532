//! Short causal convolutions over the positions of a sequence.

use std::ops::Range;

use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::shape::{ShapeError, expect_len};
use crate::{Exec, Isa};

/// Channels per task.
pub(crate) const CHANNELS: usize = 64;

/// A gated convolution (LFM2): `out[t, c] = C[t, c] · Σ_j w[c, j] · u[t + j − (taps − 1), c]` with
/// `u[t, c] = B[t, c] · x[t, c]`.
///
/// Shapes: `bcx` is `[m, 3 · dim]`, the rows of `B`, `C` and `x` side by side; `w` is `[dim, taps]`; `out` is
/// `[m, dim]`. `before` is `[taps − 1, dim]`: `u` at the positions before, zeros at the beginning; `after` becomes
/// that after the last row.
/// Exactness: sums are taken from the earliest position on, in f32, so that results don't depend on how positions
/// are divided into calls.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn gated(
    exec: &Exec,
    dim: usize,
    w: &[f32],
    bcx: &[f32],
    (before, after): (&[f32], &mut [f32]),
    out: &mut [f32],
) -> Result<(), ShapeError> {
    expect_len("convolution: input", 3 * out.len(), bcx.len())?;
    let part = |i: usize, t: usize, channels: &Range<usize>| {
        let first = (3 * t + i) * dim;
        &bcx[first + channels.start..first + channels.end]
    };
    convolve(
        exec,
        (dim, w),
        (before, after),
        out,
        |t, channels, u| multiply(exec.isa, part(0, t, channels), part(2, t, channels), u),
        |t, channels, out| scale(exec.isa, part(1, t, channels), out),
    )
}

/// A convolution of every channel by itself: `out[t, c] = silu(bias[c] + Σ_j w[c, j] · x[t + j − (taps − 1), c])`.
///
/// Shapes: `x` and `out` are `[m, dim]`, `bias` is `[dim]`, `w` and the state as those of [`gated`], of `x`.
/// Exactness and errors: as [`gated`].
pub fn silu(
    exec: &Exec,
    dim: usize,
    (w, bias): (&[f32], Option<&[f32]>),
    x: &[f32],
    (before, after): (&[f32], &mut [f32]),
    out: &mut [f32],
) -> Result<(), ShapeError> {
    expect_len("convolution: input", out.len(), x.len())?;
    if let Some(bias) = bias {
        expect_len("convolution: bias", dim, bias.len())?;
    }
    convolve(
        exec,
        (dim, w),
        (before, after),
        out,
        |t, channels, u| {
            u[..channels.len()].copy_from_slice(&x[t * dim..][channels.clone()]);
        },
        |_, channels, out| {
            if let Some(bias) = bias {
                add(exec.isa, &bias[channels.clone()], out);
            }
            activate(exec.isa, out);
        },
    )
}

/// Convolves what `input` writes for a row and a range of channels; `finish` makes an output of sums.
fn convolve(
    exec: &Exec,
    (dim, w): (usize, &[f32]),
    (before, after): (&[f32], &mut [f32]),
    out: &mut [f32],
    input: impl Fn(usize, &Range<usize>, &mut [f32; CHANNELS]) + Sync,
    finish: impl Fn(usize, &Range<usize>, &mut [f32]) + Sync,
) -> Result<(), ShapeError> {
    let m = out.len().checked_div(dim).unwrap_or(0);
    let taps = w.len().checked_div(dim).unwrap_or(0);
    let n_state = taps.saturating_sub(1) * dim;
    expect_len("convolution: output", m * dim, out.len())?;
    expect_len("convolution: weights", taps * dim, w.len())?;
    expect_len("convolution: state", n_state, before.len())?;
    expect_len("convolution: next state", n_state, after.len())?;
    let (out, after) = (SharedSlice::new(out), SharedSlice::new(after));
    exec.pool.for_ranges(dim.div_ceil(CHANNELS), 1, |tasks| {
        let mut window = Window::new(taps);
        for task in tasks {
            let channels = task * CHANNELS..dim.min((task + 1) * CHANNELS);
            let at = |row: usize| row * dim + channels.start..row * dim + channels.end;
            window.begin(channels.clone(), (dim, w), before);
            for t in 0..m {
                // SAFETY: the channels of a task are no other's.
                let out = unsafe { out.range_mut(at(t)) };
                window.step(exec.isa, |u| input(t, &channels, u), out);
                finish(t, &channels, out);
            }
            for (j, last) in window.before().enumerate() {
                // SAFETY: as above.
                unsafe { after.range_mut(at(j)) }.copy_from_slice(last);
            }
        }
    });
    Ok(())
}

/// Neighbouring channels of a convolution, at most [`CHANNELS`], and their inputs at the last positions.
pub(crate) struct Window {
    channels: Range<usize>,
    /// For each tap, of each channel.
    weights: Vec<[f32; CHANNELS]>,
    /// The earliest first. The last is that of the position that is computed.
    inputs: Vec<[f32; CHANNELS]>,
}

impl Window {
    pub(crate) fn new(taps: usize) -> Window {
        let inputs = vec![[0.0; CHANNELS]; taps];
        Window {
            channels: 0..0,
            weights: inputs.clone(),
            inputs,
        }
    }

    /// Begins with `channels` of `dim`, whose weights `w` are `[dim, taps]` and whose inputs at the positions before are
    /// `[taps − 1, dim]`.
    pub(crate) fn begin(
        &mut self,
        channels: Range<usize>,
        (dim, w): (usize, &[f32]),
        before: &[f32],
    ) {
        let taps = self.weights.len();
        let own = &w[channels.start * taps..channels.end * taps];
        for (j, weights) in self.weights.iter_mut().enumerate() {
            for (weight, of_channel) in weights.iter_mut().zip(own.chunks_exact(taps)) {
                *weight = of_channel[j];
            }
        }
        let n = channels.len();
        for (row, input) in before.chunks_exact(dim.max(1)).zip(&mut self.inputs) {
            input[..n].copy_from_slice(&row[channels.clone()]);
        }
        self.channels = channels;
    }

    /// The sums of the next position, whose inputs `input` writes.
    pub(crate) fn step(
        &mut self,
        isa: Isa,
        input: impl FnOnce(&mut [f32; CHANNELS]),
        out: &mut [f32],
    ) {
        out.fill(0.0);
        let Some(last) = self.inputs.last_mut() else {
            return;
        };
        input(last);
        for (weights, input) in self.weights.iter().zip(&self.inputs) {
            accumulate(isa, weights, input, out);
        }
        self.inputs.rotate_left(1);
    }

    /// What [`Window::begin`] takes for the next position, of these channels, `[taps − 1, channels]`.
    pub(crate) fn before(&self) -> impl Iterator<Item = &[f32]> {
        let rows = self.inputs.iter().take(self.inputs.len().saturating_sub(1));
        rows.map(|row| &row[..self.channels.len()])
    }

    pub(crate) fn channels(&self) -> &Range<usize> {
        &self.channels
    }
}

multiversion! {
    fn add(bias: &[f32], out: &mut [f32]) {
        for (out, bias) in out.iter_mut().zip(bias) {
            *out += bias;
        }
    }
}

multiversion! {
    pub(crate) fn activate(x: &mut [f32]) {
        for x in x {
            *x = math::silu(*x);
        }
    }
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

    /// The definition, of inputs `u`, `[m, dim]`.
    fn sums(dim: usize, w: &[f32], u: &[f32]) -> Vec<f32> {
        let (taps, m) = (w.len() / dim, u.len() / dim);
        let mut out = Vec::new();
        for t in 0..m {
            for c in 0..dim {
                let mut sum = 0.0;
                for j in 0..taps {
                    let u = (t + j + 1).checked_sub(taps).map(|t| u[t * dim + c]);
                    sum += w[c * taps + j] * u.unwrap_or(0.0);
                }
                out.push(sum);
            }
        }
        out
    }

    fn expected_gated(dim: usize, w: &[f32], bcx: &[f32]) -> Vec<f32> {
        let part = |i: usize| {
            bcx.chunks(3 * dim)
                .flat_map(move |row| &row[i * dim..][..dim])
        };
        let u: Vec<f32> = part(0).zip(part(2)).map(|(b, x)| b * x).collect();
        let sums = sums(dim, w, &u);
        sums.iter().zip(part(1)).map(|(sum, c)| sum * c).collect()
    }

    fn expected_silu(dim: usize, w: &[f32], bias: Option<&[f32]>, x: &[f32]) -> Vec<f32> {
        let sums = sums(dim, w, x).into_iter().enumerate();
        let biased = sums.map(|(i, sum)| bias.map_or(sum, |bias| sum + bias[i % dim]));
        biased.map(math::silu).collect()
    }

    type State<'a> = (&'a [f32], &'a mut [f32]);

    /// Compares `call` for inputs of `width` values for every channel with what it should give.
    fn check(
        shape: (usize, usize, usize),
        width: usize,
        x: &[f32],
        want: &[f32],
        call: impl Fn(&Exec, &[f32], State<'_>, &mut [f32]) -> Result<(), ShapeError>,
    ) {
        let (m, dim, taps) = shape;
        for exec in exec_matrix() {
            for chunk in [1, 2, m.max(1)] {
                let mut state = vec![0.0; (taps - 1) * dim];
                let mut got = Vec::new();
                for x in x.chunks(chunk * width * dim) {
                    let mut out = vec![f32::NAN; x.len() / width];
                    let mut after = vec![f32::NAN; state.len()];
                    call(&exec, x, (&state, &mut after), &mut out).unwrap();
                    state = after;
                    got.extend(out);
                }
                assert_eq!(got, want, "{shape:?} {chunk} {exec:?}");
            }
        }
    }

    #[test]
    fn every_machine_and_every_division_into_calls_gives_the_definition() {
        for shape in [(1, 1, 1), (7, 130, 3), (5, 64, 4), (3, 5, 8), (0, 4, 3)] {
            let (m, dim, taps) = shape;
            let w = floats(taps * dim, 1);
            let bcx = floats(m * 3 * dim, 2);
            let want = expected_gated(dim, &w, &bcx);
            check(shape, 3, &bcx, &want, |exec, x, state, out| {
                gated(exec, dim, &w, x, state, out)
            });
            let x = floats(m * dim, 3);
            let bias = floats(dim, 4);
            for bias in [None, Some(&bias[..])] {
                let want = expected_silu(dim, &w, bias, &x);
                check(shape, 1, &x, &want, |exec, x, state, out| {
                    silu(exec, dim, (&w, bias), x, state, out)
                });
            }
        }
    }

    #[test]
    fn shapes_are_checked() {
        let exec = Exec::new(1, crate::Isa::detect());
        let call = |w, x, state, out| {
            let (w, x, before) = (vec![0.0; w], vec![0.0; x], vec![0.0; state]);
            let state = (&before[..], &mut vec![0.0; state][..]);
            gated(&exec, 4, &w, &x, state, &mut vec![0.0; out])
        };
        assert!(call(12, 24, 8, 8).is_ok());
        assert!(call(12, 23, 8, 8).is_err());
        assert!(call(13, 24, 8, 8).is_err());
        assert!(call(12, 24, 9, 8).is_err());
        assert!(call(12, 24, 8, 9).is_err());
        let state = (&[0.0; 8][..], &mut [0.0; 4][..]);
        assert!(
            silu(
                &exec,
                4,
                (&[0.0; 12], None),
                &[0.0; 8],
                state,
                &mut [0.0; 8]
            )
            .is_err()
        );
        let (x, bias) = (&[0.0; 8], Some(&[0.0; 3][..]));
        let state = (&[0.0; 8][..], &mut [0.0; 8][..]);
        assert!(silu(&exec, 4, (&[0.0; 12], bias), x, state, &mut [0.0; 8]).is_err());
    }
}
