//! The gated delta rule: linear attention that corrects what its state remembers.
//!
//! A head remembers a matrix `S`, `[key_dim, value_dim]`. At each position it forgets a part of it, looks up what
//! it remembers for the key, moves that towards the value, and answers the query:
//!
//! ```text
//! S ← decay · S
//! S ← S + k ⊗ (β · (v − Sᵀ k))
//! o = Sᵀ q
//! ```

use std::ops::Range;

use crate::Exec;
use crate::dot::dot;
use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::scan::{self, COLUMNS, Heads};
use crate::shape::{ShapeError, expect_len};

/// Rows of activations per task.
const ROWS: usize = 8;
/// Added to the sum of squares that a query or key is divided by the root of.
const EPS: f32 = 1e-6;

/// The heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaShape {
    /// Heads of queries and keys.
    pub n_key_heads: usize,
    /// Heads of values, each with a state; a multiple of `n_key_heads`.
    pub n_value_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Which key belongs to which values.
    pub order: HeadOrder,
}

/// The order of value heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadOrder {
    /// Those of one key head follow each other: head `h` has key `h / (n_value_heads / n_key_heads)`.
    Grouped,
    /// One of every key head, then the next of each: head `h` has key `h % n_key_heads`.
    Tiled,
}

impl DeltaShape {
    /// Elements of all queries, or of all keys, of a position.
    pub fn keys(&self) -> usize {
        self.n_key_heads * self.key_dim
    }

    /// Elements of all values of a position.
    pub fn values(&self) -> usize {
        self.n_value_heads * self.value_dim
    }

    /// Elements of queries, keys and values of a position together.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Elements of a state.
    pub fn state(&self) -> usize {
        self.values() * self.key_dim
    }

    /// The key head of a value head.
    fn key_of(&self, value_head: usize) -> usize {
        match self.order {
            HeadOrder::Grouped => value_head / (self.n_value_heads / self.n_key_heads),
            HeadOrder::Tiled => value_head % self.n_key_heads,
        }
    }
}

/// What the rule is applied to, and its parameters.
#[derive(Debug)]
pub struct DeltaInputs<'a> {
    /// Queries, keys and values side by side, `[m, channels]`. Queries and keys are normalised in place.
    pub qkv: &'a mut [f32],
    /// `[m, n_value_heads]`: the decay is `exp(a · softplus(alpha + dt_bias))`, which replaces it.
    pub alpha: &'a mut [f32],
    /// `[m, n_value_heads]`: β is `sigmoid(beta)`, which replaces it.
    pub beta: &'a mut [f32],
    /// `[n_value_heads]`.
    pub a: &'a [f32],
    /// `[n_value_heads]`.
    pub dt_bias: &'a [f32],
}

/// The gated delta rule over the positions of one sequence; queries are scaled by `1 / √key_dim`.
///
/// Shapes: `out` is `[m, n_value_heads · value_dim]`. The states `before` the first position, zeros at the
/// beginning, and `after` the last have [`DeltaShape::state`] elements, head by head and in blocks of 32 columns.
/// Exactness: positions are taken one after the other, so that results don't depend on how they are divided into
/// calls.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn delta_rule(
    exec: &Exec,
    shape: &DeltaShape,
    inputs: DeltaInputs<'_>,
    (before, after): (&[f32], &mut [f32]),
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let DeltaShape {
        n_value_heads,
        key_dim,
        value_dim,
        ..
    } = *shape;
    let m = out.len().checked_div(shape.values()).unwrap_or(0);
    for (what, expected, found) in [
        ("delta rule: output", m * shape.values(), out.len()),
        ("delta rule: inputs", m * shape.channels(), inputs.qkv.len()),
        ("delta rule: alpha", m * n_value_heads, inputs.alpha.len()),
        ("delta rule: beta", m * n_value_heads, inputs.beta.len()),
        ("delta rule: a", n_value_heads, inputs.a.len()),
        ("delta rule: bias", n_value_heads, inputs.dt_bias.len()),
    ] {
        expect_len(what, expected, found)?;
    }
    let DeltaInputs {
        qkv,
        alpha,
        beta,
        a,
        dt_bias,
    } = inputs;
    prepare(exec, shape, m, qkv, (&mut *alpha, &mut *beta), (a, dt_bias));
    let (qkv, decay, beta) = (&*qkv, &*alpha, &*beta);
    let heads = Heads {
        n: n_value_heads,
        rows: key_dim,
        columns: value_dim,
    };
    heads.scan(
        exec,
        m,
        (before, after),
        out,
        |head, columns, t, state, out| {
            let row = &qkv[t * shape.channels()..][..shape.channels()];
            let key = shape.key_of(head) * key_dim;
            let q = &row[key..key + key_dim];
            let k = &row[shape.keys() + key..][..key_dim];
            let v = &row[2 * shape.keys() + head * value_dim..][columns.clone()];
            let gates = t * n_value_heads + head;
            step(exec.isa, state, (decay[gates], beta[gates]), (q, k), v, out);
        },
    )
}

/// Normalises queries and keys, and computes decays and βs.
fn prepare(
    exec: &Exec,
    shape: &DeltaShape,
    m: usize,
    qkv: &mut [f32],
    (alpha, beta): (&mut [f32], &mut [f32]),
    (a, dt_bias): (&[f32], &[f32]),
) {
    let (width, n) = (shape.channels(), shape.n_value_heads);
    let scale = (1.0 / (shape.key_dim as f64).sqrt()) as f32;
    let qkv = SharedSlice::new(qkv);
    let (alpha, beta) = (SharedSlice::new(alpha), SharedSlice::new(beta));
    exec.pool.for_ranges(m, ROWS, |rows| {
        let of = |rows: &Range<usize>, width| rows.start * width..rows.end * width;
        // SAFETY: rows of different tasks don't overlap.
        let (qkv, alpha, beta) = unsafe {
            (
                qkv.range_mut(of(&rows, width)),
                alpha.range_mut(of(&rows, n)),
                beta.range_mut(of(&rows, n)),
            )
        };
        for row in qkv.chunks_exact_mut(width) {
            let (q, rest) = row.split_at_mut(shape.keys());
            normalise(exec.isa, q, shape.key_dim, scale);
            normalise(exec.isa, &mut rest[..shape.keys()], shape.key_dim, 1.0);
        }
        for row in alpha.chunks_exact_mut(n) {
            for ((alpha, a), bias) in row.iter_mut().zip(a).zip(dt_bias) {
                *alpha = math::exp(a * math::softplus(*alpha + bias));
            }
        }
        for beta in beta {
            *beta = math::sigmoid(*beta);
        }
    });
}

multiversion! {
    fn normalise(x: &mut [f32], head_dim: usize, scale: f32) {
        for head in x.chunks_exact_mut(head_dim) {
            let inverse = scale / (dot(head, head) + EPS).sqrt();
            for x in head {
                *x *= inverse;
            }
        }
    }
}

multiversion! {
    /// One position, for some columns of a state, `[key_dim, v.len()]`.
    fn step(
        state: &mut [f32],
        gates: (f32, f32),
        qk: (&[f32], &[f32]),
        v: &[f32],
        out: &mut [f32],
    ) {
        scan::padded(state, qk.1.len(), v, out, &Step { gates, qk });
    }
}

struct Step<'a> {
    /// Decay and β.
    gates: (f32, f32),
    /// The query and the key.
    qk: (&'a [f32], &'a [f32]),
}

impl scan::Step for Step<'_> {
    #[inline(always)]
    fn step(&self, state: &mut [[f32; COLUMNS]], v: &[f32; COLUMNS], out: &mut [f32; COLUMNS]) {
        let ((decay, beta), (q, k)) = (self.gates, self.qk);
        let known = scan::look_up(state, k);
        let mut change = [0.0; COLUMNS];
        for ((change, v), known) in change.iter_mut().zip(v).zip(known) {
            *change = beta * (v - decay * known);
        }
        scan::update(state, decay, (k, &change), q, out);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    struct Case {
        shape: DeltaShape,
        m: usize,
        qkv: Vec<f32>,
        alpha: Vec<f32>,
        beta: Vec<f32>,
        a: Vec<f32>,
        dt_bias: Vec<f32>,
    }

    fn case(shape: DeltaShape, m: usize) -> Case {
        let n = shape.n_value_heads;
        Case {
            shape,
            m,
            qkv: floats(m * shape.channels(), 1),
            alpha: floats(m * n, 2),
            beta: floats(m * n, 3),
            a: floats(n, 4).iter().map(|a| -a.abs()).collect(),
            dt_bias: floats(n, 5),
        }
    }

    /// The definition, in f64.
    fn expected(case: &Case) -> Vec<f64> {
        let s = &case.shape;
        let mut states = vec![vec![vec![0.0; s.value_dim]; s.key_dim]; s.n_value_heads];
        let mut out = Vec::new();
        for t in 0..case.m {
            let row: Vec<f64> = case.qkv[t * s.channels()..][..s.channels()]
                .iter()
                .map(|&x| f64::from(x))
                .collect();
            for (head, state) in states.iter_mut().enumerate() {
                let key = match s.order {
                    HeadOrder::Grouped => head * s.n_key_heads / s.n_value_heads,
                    HeadOrder::Tiled => head % s.n_key_heads,
                };
                let normed = |first: usize| -> Vec<f64> {
                    let x = &row[first + key * s.key_dim..][..s.key_dim];
                    let norm = x.iter().map(|x| x * x).sum::<f64>() + 1e-6;
                    x.iter().map(|x| x / norm.sqrt()).collect()
                };
                let (q, k) = (normed(0), normed(s.keys()));
                let v = &row[2 * s.keys() + head * s.value_dim..][..s.value_dim];
                let gate = t * s.n_value_heads + head;
                let dt = f64::from(case.alpha[gate] + case.dt_bias[head]);
                let decay = (f64::from(case.a[head]) * dt.exp().ln_1p()).exp();
                let beta = 1.0 / (1.0 + f64::from(-case.beta[gate]).exp());
                for row in state.iter_mut() {
                    row.iter_mut().for_each(|s| *s *= decay);
                }
                for (j, v) in v.iter().enumerate() {
                    let known: f64 = state.iter().zip(&k).map(|(row, k)| row[j] * k).sum();
                    for (row, k) in state.iter_mut().zip(&k) {
                        row[j] += k * beta * (v - known);
                    }
                    let answer: f64 = state.iter().zip(&q).map(|(row, q)| row[j] * q).sum();
                    out.push(answer / (s.key_dim as f64).sqrt());
                }
            }
        }
        out
    }

    /// What is computed in calls of `chunk` positions: the outputs, and the state at the end.
    fn computed(exec: &Exec, case: &Case, chunk: usize) -> (Vec<f32>, Vec<f32>) {
        let s = &case.shape;
        let n = s.n_value_heads;
        let mut state = vec![0.0; s.state()];
        let mut out = Vec::new();
        for first in (0..case.m).step_by(chunk) {
            let rows = first..case.m.min(first + chunk);
            let part = |x: &[f32], width| x[rows.start * width..rows.end * width].to_vec();
            let inputs = DeltaInputs {
                qkv: &mut part(&case.qkv, s.channels()),
                alpha: &mut part(&case.alpha, n),
                beta: &mut part(&case.beta, n),
                a: &case.a,
                dt_bias: &case.dt_bias,
            };
            let mut answers = vec![f32::NAN; rows.len() * s.values()];
            let mut after = vec![f32::NAN; state.len()];
            delta_rule(exec, s, inputs, (&state, &mut after), &mut answers).unwrap();
            state = after;
            out.extend(answers);
        }
        (out, state)
    }

    fn shape(heads: [usize; 2], key_dim: usize, value_dim: usize, order: HeadOrder) -> DeltaShape {
        DeltaShape {
            n_key_heads: heads[0],
            n_value_heads: heads[1],
            key_dim,
            value_dim,
            order,
        }
    }

    #[test]
    fn every_machine_and_every_division_into_calls_gives_the_definition() {
        for (shape, m) in [
            (shape([2, 4], 16, 16, HeadOrder::Grouped), 20),
            (shape([2, 4], 16, 16, HeadOrder::Tiled), 20),
            (shape([1, 3], 5, 70, HeadOrder::Tiled), 9),
            (shape([2, 2], 128, 64, HeadOrder::Grouped), 11),
            (shape([1, 1], 1, 1, HeadOrder::Grouped), 3),
        ] {
            let case = case(shape, m);
            let want = expected(&case);
            let mut first = None;
            for exec in exec_matrix() {
                for chunk in [1, 4, m] {
                    let got = computed(&exec, &case, chunk);
                    for (i, (got, want)) in got.0.iter().zip(&want).enumerate() {
                        let error = (f64::from(*got) - want).abs();
                        assert!(error < 2e-6, "{shape:?} {i}: {got}, not {want}");
                    }
                    assert_eq!(got.0.len(), want.len());
                    let first = first.get_or_insert_with(|| got.clone());
                    assert_eq!(*first, got, "{shape:?} {chunk} {exec:?}");
                }
            }
        }
    }

    #[test]
    fn nothing_leaves_the_state() {
        let shape = shape([1, 2], 4, 4, HeadOrder::Tiled);
        let exec = Exec::new(1, crate::Isa::detect());
        let case = case(shape, 0);
        let before = floats(shape.state(), 9);
        let mut after = vec![0.0; shape.state()];
        let inputs = DeltaInputs {
            qkv: &mut [],
            alpha: &mut [],
            beta: &mut [],
            a: &case.a,
            dt_bias: &case.dt_bias,
        };
        delta_rule(&exec, &shape, inputs, (&before, &mut after), &mut []).unwrap();
        assert_eq!(after, before);
    }

    #[test]
    fn shapes_are_checked() {
        let shape = shape([1, 2], 4, 4, HeadOrder::Tiled);
        let exec = Exec::new(1, crate::Isa::detect());
        let call = |qkv: usize, gates: usize, heads: usize, state: usize| {
            let (a, before) = (vec![0.0; heads], vec![0.0; state]);
            let inputs = DeltaInputs {
                qkv: &mut vec![0.0; qkv],
                alpha: &mut vec![0.0; gates],
                beta: &mut vec![0.0; gates],
                a: &a,
                dt_bias: &a,
            };
            let after = &mut vec![0.0; state];
            delta_rule(&exec, &shape, inputs, (&before, after), &mut [0.0; 16])
        };
        assert!(call(32, 4, 2, 32).is_ok());
        assert!(call(31, 4, 2, 32).is_err());
        assert!(call(32, 3, 2, 32).is_err());
        assert!(call(32, 4, 3, 32).is_err());
        assert!(call(32, 4, 2, 31).is_err());
    }
}
