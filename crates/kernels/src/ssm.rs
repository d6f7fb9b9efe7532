//! The selective state space of Mamba-2.
//!
//! A head remembers a matrix `S`, `[state_dim, head_dim]`. At each position it forgets a part of it, adds the input in
//! the direction of `B`, and answers `C`:
//!
//! ```text
//! S ← exp(a · dt) · S + B ⊗ (dt · x)
//! y = Sᵀ C + d · x
//! ```
//!
//! Heads of a group share `B` and `C`.

use std::ops::Range;

use crate::Exec;
use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::scan::{self, COLUMNS, Heads};
use crate::shape::{ShapeError, expect_len};
use crate::state::State;

/// Rows of activations per task.
const ROWS: usize = 64;

/// The heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SsmShape {
    /// Heads.
    pub n_heads: usize,
    /// Elements of a head's input and output.
    pub head_dim: usize,
    /// Rows of a head's state: elements of `B` and of `C`.
    pub state_dim: usize,
    /// Groups of heads; divides `n_heads`.
    pub n_groups: usize,
}

impl SsmShape {
    /// Elements of all heads of a position.
    pub fn inner(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Elements of all `B`, or of all `C`, of a position.
    pub fn directions(&self) -> usize {
        self.n_groups * self.state_dim
    }

    /// Elements of inputs, `B` and `C` of a position together.
    pub fn channels(&self) -> usize {
        self.inner() + 2 * self.directions()
    }

    /// Elements of a state.
    pub fn state(&self) -> usize {
        self.inner() * self.state_dim
    }
}

/// What is scanned, and its parameters.
#[derive(Debug)]
pub struct SsmInputs<'a> {
    /// Inputs, `B` and `C` side by side, `[m, channels]`.
    pub xbc: &'a [f32],
    /// `[m, n_heads]`: the time step is `softplus(dt + dt_bias)`, which replaces it.
    pub dt: &'a mut [f32],
    /// `[n_heads]`.
    pub a: &'a [f32],
    /// `[n_heads]`.
    pub d: &'a [f32],
    /// `[n_heads]`.
    pub dt_bias: &'a [f32],
}

/// Scans the positions of one sequence.
///
/// Shapes: `out` is `[m, n_heads · head_dim]`. The states `before` the first position, zeros at the beginning, and
/// `after` the last have [`SsmShape::state`] elements, head by head and in blocks of 32 columns.
/// Exactness: positions are taken one after the other, so that results don't depend on how they are divided into
/// calls.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn scan(
    exec: &Exec,
    shape: &SsmShape,
    SsmInputs {
        xbc,
        dt,
        a,
        d,
        dt_bias,
    }: SsmInputs<'_>,
    state: State<'_>,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let SsmShape {
        n_heads,
        head_dim,
        state_dim,
        n_groups,
    } = *shape;
    let m = out.len().checked_div(shape.inner()).unwrap_or(0);
    for (what, expected, found) in [
        ("scan: inputs", m * shape.channels(), xbc.len()),
        ("scan: time steps", m * n_heads, dt.len()),
        ("scan: a", n_heads, a.len()),
        ("scan: d", n_heads, d.len()),
        ("scan: bias", n_heads, dt_bias.len()),
    ] {
        expect_len(what, expected, found)?;
    }
    time_steps(exec, dt, dt_bias);
    let dt = &*dt;
    let heads = Heads {
        n: n_heads,
        rows: state_dim,
        columns: head_dim,
    };
    heads.scan(exec, m, state, out, |head, columns, t, state, out| {
        let (x, directions) =
            xbc[t * shape.channels()..][..shape.channels()].split_at(shape.inner());
        let (b, c) = directions.split_at(shape.directions());
        let group = head / (n_heads / n_groups) * state_dim;
        let of_group = group..group + state_dim;
        let dt = dt[t * n_heads + head];
        let x = &x[head * head_dim..][columns.clone()];
        let gates = (math::exp(a[head] * dt), dt, d[head]);
        let directions = (&b[of_group.clone()], &c[of_group]);
        step(exec.isa, state, gates, directions, x, out);
    })
}

fn time_steps(exec: &Exec, dt: &mut [f32], bias: &[f32]) {
    let (n, width) = (dt.len(), bias.len());
    let shared = SharedSlice::new(dt);
    let rows = n.checked_div(width).unwrap_or(0);
    exec.pool.for_ranges(rows, ROWS, |rows: Range<usize>| {
        // SAFETY: rows of different tasks don't overlap.
        let dt = unsafe { shared.range_mut(rows.start * width..rows.end * width) };
        for row in dt.chunks_exact_mut(width) {
            for (dt, bias) in row.iter_mut().zip(bias) {
                *dt = math::softplus(*dt + bias);
            }
        }
    });
}

multiversion! {
    /// One position, for some columns of a state, `[state_dim, x.len()]`.
    fn step(
        state: &mut [f32],
        gates: (f32, f32, f32),
        directions: (&[f32], &[f32]),
        x: &[f32],
        out: &mut [f32],
    ) {
        scan::padded(state, directions.0.len(), x, out, &Step { gates, directions });
    }
}

struct Step<'a> {
    /// Decay, time step and `d`.
    gates: (f32, f32, f32),
    /// `B` and `C`.
    directions: (&'a [f32], &'a [f32]),
}

impl scan::Step for Step<'_> {
    #[inline(always)]
    fn step(&self, state: &mut [[f32; COLUMNS]], x: &[f32; COLUMNS], out: &mut [f32; COLUMNS]) {
        let ((decay, dt, d), (b, c)) = (self.gates, self.directions);
        let change = x.map(|x| dt * x);
        scan::update(state, decay, (b, &change), c, out);
        for (out, x) in out.iter_mut().zip(x) {
            *out += d * x;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::change;
    use crate::test_data::{expect_scan, floats};

    struct Case {
        shape: SsmShape,
        m: usize,
        xbc: Vec<f32>,
        dt: Vec<f32>,
        a: Vec<f32>,
        d: Vec<f32>,
        dt_bias: Vec<f32>,
    }

    fn case(shape: SsmShape, m: usize) -> Case {
        let n = shape.n_heads;
        Case {
            shape,
            m,
            xbc: floats(m * shape.channels(), 1),
            dt: floats(m * n, 2),
            a: floats(n, 3).iter().map(|a| -a.abs()).collect(),
            d: floats(n, 4),
            dt_bias: floats(n, 5),
        }
    }

    /// The definition, in f64.
    fn expected(case: &Case) -> Vec<f64> {
        let s = &case.shape;
        let mut states = vec![vec![vec![0.0; s.head_dim]; s.state_dim]; s.n_heads];
        let mut out = Vec::new();
        for t in 0..case.m {
            let row = &case.xbc[t * s.channels()..][..s.channels()];
            for (head, state) in states.iter_mut().enumerate() {
                let group = head * s.n_groups / s.n_heads * s.state_dim;
                let b = &row[s.inner() + group..][..s.state_dim];
                let c = &row[s.inner() + s.directions() + group..][..s.state_dim];
                let raw = f64::from(case.dt[t * s.n_heads + head] + case.dt_bias[head]);
                let dt = raw.exp().ln_1p();
                let decay = (f64::from(case.a[head]) * dt).exp();
                for j in 0..s.head_dim {
                    let x = f64::from(row[head * s.head_dim + j]);
                    let mut y = f64::from(case.d[head]) * x;
                    for (state, (b, c)) in state.iter_mut().zip(b.iter().zip(c)) {
                        state[j] = decay * state[j] + f64::from(*b) * dt * x;
                        y += f64::from(*c) * state[j];
                    }
                    out.push(y);
                }
            }
        }
        out
    }

    fn computed(exec: &Exec, case: &Case, chunk: usize) -> (Vec<f32>, Vec<f32>) {
        let s = &case.shape;
        let mut state = vec![0.0; s.state()];
        let mut out = Vec::new();
        for first in (0..case.m).step_by(chunk) {
            let rows = first..case.m.min(first + chunk);
            let part = |x: &[f32], width| x[rows.start * width..rows.end * width].to_vec();
            let inputs = SsmInputs {
                xbc: &part(&case.xbc, s.channels()),
                dt: &mut part(&case.dt, s.n_heads),
                a: &case.a,
                d: &case.d,
                dt_bias: &case.dt_bias,
            };
            let mut answers = vec![f32::NAN; rows.len() * s.inner()];
            change(&mut state, first / chunk, |state| {
                scan(exec, s, inputs, state, &mut answers).unwrap();
            });
            out.extend(answers);
        }
        (out, state)
    }

    fn shape(n_heads: usize, head_dim: usize, state_dim: usize, n_groups: usize) -> SsmShape {
        SsmShape {
            n_heads,
            head_dim,
            state_dim,
            n_groups,
        }
    }

    #[test]
    fn every_machine_and_every_division_into_calls_gives_the_definition() {
        for (shape, m) in [
            (shape(4, 32, 16, 2), 12),
            (shape(3, 70, 5, 1), 7),
            (shape(2, 64, 128, 2), 9),
            (shape(1, 1, 1, 1), 3),
        ] {
            let case = case(shape, m);
            let want = expected(&case);
            expect_scan(format_args!("{shape:?}"), m, &want, |exec, chunk| {
                computed(exec, &case, chunk)
            });
        }
    }

    #[test]
    fn shapes_are_checked() {
        let shape = shape(2, 4, 3, 1);
        let exec = Exec::new(1, crate::Isa::detect());
        let call = |xbc: usize, dt: usize, heads: usize, state: usize| {
            let (of_heads, before) = (vec![0.0; heads], vec![0.0; state]);
            let inputs = SsmInputs {
                xbc: &vec![0.0; xbc],
                dt: &mut vec![0.0; dt],
                a: &of_heads,
                d: &of_heads,
                dt_bias: &of_heads,
            };
            let after = &mut vec![0.0; state];
            scan(
                &exec,
                &shape,
                inputs,
                State::Copied(&before, after),
                &mut [0.0; 16],
            )
        };
        assert!(call(28, 4, 2, 24).is_ok());
        assert!(call(27, 4, 2, 24).is_err());
        assert!(call(28, 5, 2, 24).is_err());
        assert!(call(28, 4, 3, 24).is_err());
        assert!(call(28, 4, 2, 23).is_err());
    }
}
