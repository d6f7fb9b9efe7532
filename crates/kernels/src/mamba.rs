//! The selective state space of the first Mamba.
//!
//! Every channel remembers a vector `s`, `[state_dim]`. At each position it forgets a part of it, adds its input in the
//! direction of `B`, and answers `C`, which all channels share:
//!
//! ```text
//! s ← exp(a · dt) · s + B · (dt · x)
//! y = s · C + d · x
//! ```

use crate::Exec;
use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::shape::{ShapeError, expect_len};
use crate::state::State;

/// Channels per task.
const CHANNELS: usize = 32;
/// Elements of a channel's state that are computed together.
const LANES: usize = 16;

/// The channels of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MambaShape {
    /// Channels.
    pub inner: usize,
    /// Elements of a channel's state, of `B` and of `C`.
    pub state_dim: usize,
    /// Rank of what the time steps of all channels follow from.
    pub dt_rank: usize,
}

impl MambaShape {
    /// Elements of a state.
    pub fn state(&self) -> usize {
        self.inner * self.state_dim
    }
}

/// What is scanned, and its parameters.
#[derive(Debug)]
pub struct MambaInputs<'a> {
    /// `[m, inner]`.
    pub x: &'a [f32],
    /// `[m, inner]`: the time step is `softplus(dt)`.
    pub dt: &'a [f32],
    /// `[m, state_dim]`.
    pub b: &'a [f32],
    /// `[m, state_dim]`.
    pub c: &'a [f32],
    /// `[inner, state_dim]`.
    pub a: &'a [f32],
    /// `[inner]`.
    pub d: &'a [f32],
}

/// Scans the positions of one sequence.
///
/// Shapes: `out` is `[m, inner]`. The states `before` the first position, zeros at the beginning, and `after` the last
/// are `[inner, state_dim]`.
/// Exactness: positions are taken one after the other, and sums over a state in a fixed order, so that results depend
/// neither on how positions are divided into calls nor on the machine.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn scan(
    exec: &Exec,
    shape: &MambaShape,
    inputs: &MambaInputs<'_>,
    state: State<'_>,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let MambaShape {
        inner, state_dim, ..
    } = *shape;
    let MambaInputs { x, dt, b, c, a, d } = *inputs;
    let m = out.len().checked_div(inner).unwrap_or(0);
    let (n_before, n_after) = state.lens();
    for (what, expected, found) in [
        ("scan: output", m * inner, out.len()),
        ("scan: inputs", m * inner, x.len()),
        ("scan: time steps", m * inner, dt.len()),
        ("scan: B", m * state_dim, b.len()),
        ("scan: C", m * state_dim, c.len()),
        ("scan: a", shape.state(), a.len()),
        ("scan: d", inner, d.len()),
        (
            "scan: elements of a channel's state",
            state_dim.max(1),
            state_dim,
        ),
        ("scan: state", shape.state(), n_before),
        ("scan: next state", shape.state(), n_after),
    ] {
        expect_len(what, expected, found)?;
    }
    let (before, after) = state.parts();
    let (out, after) = (SharedSlice::new(out), SharedSlice::new(after));
    exec.pool.for_ranges(inner.div_ceil(CHANNELS), 1, |tasks| {
        for task in tasks {
            let own = task * CHANNELS..inner.min((task + 1) * CHANNELS);
            let of_state = own.start * state_dim..own.end * state_dim;
            // SAFETY: the channels of a task are no other's.
            let state = unsafe { after.range_mut(of_state.clone()) };
            if let Some(before) = before {
                state.copy_from_slice(&before[of_state.clone()]);
            }
            for t in 0..m {
                let at = t * inner + own.start..t * inner + own.end;
                let of_position = t * state_dim..(t + 1) * state_dim;
                // SAFETY: as above.
                let out = unsafe { out.range_mut(at.clone()) };
                let directions = (&b[of_position.clone()], &c[of_position]);
                let parameters = (&a[of_state.clone()], &d[own.clone()]);
                step(
                    exec.isa,
                    state,
                    parameters,
                    directions,
                    (&dt[at.clone()], &x[at]),
                    out,
                );
            }
        }
    });
    Ok(())
}

multiversion! {
    /// One position of some channels.
    fn step(
        state: &mut [f32],
        parameters: (&[f32], &[f32]),
        directions: (&[f32], &[f32]),
        inputs: (&[f32], &[f32]),
        out: &mut [f32],
    ) {
        let ((a, d), (b, c), (dt, x)) = (parameters, directions, inputs);
        let n = b.len();
        let channels = state.chunks_exact_mut(n).zip(a.chunks_exact(n));
        for (i, ((state, a), out)) in channels.zip(out).enumerate() {
            let dt = math::softplus(dt[i]);
            let change = dt * x[i];
            let mut sums = [0.0; LANES];
            let (states, rest) = state.as_chunks_mut::<LANES>();
            let parts = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
            let ((a, a_rest), (b, b_rest), (c, c_rest)) = parts;
            for (((state, a), b), c) in states.iter_mut().zip(a).zip(b).zip(c) {
                for j in 0..LANES {
                    state[j] = math::exp(a[j] * dt) * state[j] + b[j] * change;
                    sums[j] += c[j] * state[j];
                }
            }
            for (j, state) in rest.iter_mut().enumerate() {
                *state = math::exp(a_rest[j] * dt) * *state + b_rest[j] * change;
                sums[j] += c_rest[j] * *state;
            }
            let mut width = LANES / 2;
            while width > 0 {
                for j in 0..width {
                    sums[j] += sums[j + width];
                }
                width /= 2;
            }
            *out = sums[0] + d[i] * x[i];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::change;
    use crate::test_data::{expect_scan, floats};

    struct Case {
        shape: MambaShape,
        m: usize,
        x: Vec<f32>,
        dt: Vec<f32>,
        b: Vec<f32>,
        c: Vec<f32>,
        a: Vec<f32>,
        d: Vec<f32>,
    }

    fn case(inner: usize, state_dim: usize, m: usize) -> Case {
        Case {
            shape: MambaShape {
                inner,
                state_dim,
                dt_rank: 1,
            },
            m,
            x: floats(m * inner, 1),
            dt: floats(m * inner, 2),
            b: floats(m * state_dim, 3),
            c: floats(m * state_dim, 4),
            a: floats(inner * state_dim, 5)
                .iter()
                .map(|a| -a.abs())
                .collect(),
            d: floats(inner, 6),
        }
    }

    /// The definition, in f64.
    fn expected(case: &Case) -> Vec<f64> {
        let MambaShape {
            inner, state_dim, ..
        } = case.shape;
        let mut states = vec![0.0; inner * state_dim];
        let mut out = Vec::new();
        for t in 0..case.m {
            for i in 0..inner {
                let x = f64::from(case.x[t * inner + i]);
                let dt = f64::from(case.dt[t * inner + i]).exp().ln_1p();
                let mut y = f64::from(case.d[i]) * x;
                for j in 0..state_dim {
                    let state = &mut states[i * state_dim + j];
                    let decay = (f64::from(case.a[i * state_dim + j]) * dt).exp();
                    *state = decay * *state + f64::from(case.b[t * state_dim + j]) * dt * x;
                    y += f64::from(case.c[t * state_dim + j]) * *state;
                }
                out.push(y);
            }
        }
        out
    }

    fn computed(exec: &Exec, case: &Case, chunk: usize) -> (Vec<f32>, Vec<f32>) {
        let MambaShape {
            inner, state_dim, ..
        } = case.shape;
        let mut state = vec![0.0; case.shape.state()];
        let mut out = Vec::new();
        for first in (0..case.m).step_by(chunk) {
            let end = case.m.min(first + chunk);
            let wide = first * inner..end * inner;
            let narrow = first * state_dim..end * state_dim;
            let inputs = MambaInputs {
                x: &case.x[wide.clone()],
                dt: &case.dt[wide.clone()],
                b: &case.b[narrow.clone()],
                c: &case.c[narrow],
                a: &case.a,
                d: &case.d,
            };
            let mut answers = vec![f32::NAN; wide.len()];
            change(&mut state, first / chunk, |state| {
                scan(exec, &case.shape, &inputs, state, &mut answers).unwrap();
            });
            out.extend(answers);
        }
        (out, state)
    }

    #[test]
    fn every_machine_and_every_division_into_calls_gives_the_definition() {
        for (inner, state_dim, m) in [(64, 16, 12), (70, 5, 7), (33, 24, 9), (1, 1, 3)] {
            let case = case(inner, state_dim, m);
            let want = expected(&case);
            expect_scan(
                format_args!("{inner} {state_dim}"),
                m,
                &want,
                |exec, chunk| computed(exec, &case, chunk),
            );
        }
    }

    #[test]
    fn shapes_are_checked() {
        let case = case(8, 3, 2);
        let exec = Exec::new(1, crate::Isa::detect());
        let call = |x: usize, b: usize, a: usize, state: usize| {
            let inputs = MambaInputs {
                x: &case.x[..x],
                dt: &case.dt,
                b: &case.b[..b],
                c: &case.c,
                a: &case.a[..a],
                d: &case.d,
            };
            let (before, after) = (&vec![0.0; state], &mut vec![0.0; state]);
            scan(
                &exec,
                &case.shape,
                &inputs,
                State::Copied(before, after),
                &mut [0.0; 16],
            )
        };
        assert!(call(16, 6, 24, 24).is_ok());
        assert!(call(15, 6, 24, 24).is_err());
        assert!(call(16, 5, 24, 24).is_err());
        assert!(call(16, 6, 23, 24).is_err());
        assert!(call(16, 6, 24, 25).is_err());
    }
}
