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

use crate::conv::{self, Window};
use crate::dot::dot;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::scan::{self, COLUMNS, Heads};
use crate::shape::{ShapeError, expect_len};
use crate::state::State;
use crate::{Exec, Isa, activation, math, norm};

/// Rows of activations per task of [`delta_rule`].
const ROWS: usize = 8;
/// Positions that a task of [`delta_net`] takes through one operation after the other.
const POSITIONS: usize = 16;
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

    /// Of queries.
    fn scale(&self) -> f32 {
        (1.0 / (self.key_dim as f64).sqrt()) as f32
    }

    /// Whether no value head before this one has its key.
    fn is_first_of_key(&self, value_head: usize) -> bool {
        match self.order {
            HeadOrder::Grouped => value_head.is_multiple_of(self.n_value_heads / self.n_key_heads),
            HeadOrder::Tiled => value_head < self.n_key_heads,
        }
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
/// Layers compute it by [`delta_net`].
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
    state: State<'_>,
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
    heads.scan(exec, m, state, out, |head, columns, t, state, out| {
        let row = &qkv[t * shape.channels()..][..shape.channels()];
        let key = shape.key_of(head) * key_dim;
        let q = &row[key..key + key_dim];
        let k = &row[shape.keys() + key..][..key_dim];
        let v = &row[2 * shape.keys() + head * value_dim..][columns.clone()];
        let gates = t * n_value_heads + head;
        step(exec.isa, state, (decay[gates], beta[gates]), (q, k), v, out);
    })
}

/// The weights of a layer of delta nets.
#[derive(Debug, Clone, Copy)]
pub struct DeltaWeights<'a> {
    /// Of the convolution, `[channels, n_taps]`.
    pub taps: &'a [f32],
    /// `[n_value_heads]`, as of [`DeltaInputs`].
    pub a: &'a [f32],
    /// `[n_value_heads]`, as of [`DeltaInputs`].
    pub dt_bias: &'a [f32],
    /// Of the norm of what a head gives, `[value_dim]`.
    pub norm: &'a [f32],
    /// Epsilon of that norm.
    pub eps: f32,
}

/// What the projections of a layer of delta nets give.
#[derive(Debug, Clone, Copy)]
pub struct Projections<'a> {
    /// Queries, keys and values side by side, `[m, channels]`.
    pub qkv: &'a [f32],
    /// `[m, n_value_heads · value_dim]`.
    pub gate: &'a [f32],
    /// `[m, n_value_heads]`, as of [`DeltaInputs`].
    pub alpha: &'a [f32],
    /// `[m, n_value_heads]`, as of [`DeltaInputs`].
    pub beta: &'a [f32],
}

/// A layer of delta nets over the positions of one sequence, but for its projections: [`conv::silu`] of queries, keys
/// and values, [`delta_rule`], [`norm::rms_norm`] of each head, times `silu(gate)`. The bits are theirs.
///
/// A task is a value head, which goes through all of it, so that a token hands over to other threads once.
///
/// Shapes: `out` is `[m, n_value_heads · value_dim]`. The states `before` the first position, zeros at the beginning,
/// and `after` the last have first the inputs of the convolution at `n_taps − 1` positions, `[n_taps − 1, channels]`,
/// then [`DeltaShape::state`] elements as those of [`delta_rule`].
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn delta_net(
    exec: &Exec,
    shape: &DeltaShape,
    weights: &DeltaWeights<'_>,
    inputs: &Projections<'_>,
    state: State<'_>,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let channels = shape.channels();
    let m = out.len().checked_div(shape.values()).unwrap_or(0);
    let n_taps = weights.taps.len().checked_div(channels).unwrap_or(0);
    let n_window = n_taps.saturating_sub(1) * channels;
    let n_state = n_window + shape.state();
    let (n_before, n_after) = state.lens();
    for (what, expected, found) in [
        ("delta net: output", m * shape.values(), out.len()),
        ("delta net: inputs", m * channels, inputs.qkv.len()),
        ("delta net: gate", out.len(), inputs.gate.len()),
        (
            "delta net: alpha",
            m * shape.n_value_heads,
            inputs.alpha.len(),
        ),
        (
            "delta net: beta",
            m * shape.n_value_heads,
            inputs.beta.len(),
        ),
        ("delta net: taps", n_taps * channels, weights.taps.len()),
        ("delta net: a", shape.n_value_heads, weights.a.len()),
        (
            "delta net: bias",
            shape.n_value_heads,
            weights.dt_bias.len(),
        ),
        ("delta net: norm", shape.value_dim, weights.norm.len()),
        ("delta net: state", n_state, n_before),
        ("delta net: next state", n_state, n_after),
    ] {
        expect_len(what, expected, found)?;
    }
    let (window, state) = state.split_at(n_window);
    // Heads that share a key read what the first of them writes.
    let mut copy = Vec::new();
    let (before_window, window) = window.copied(&mut copy);
    let (before, after) = state.parts();
    let layer = Layer {
        isa: exec.isa,
        shape,
        weights,
        inputs,
        before: (before_window, before),
        after: (SharedSlice::new(window), SharedSlice::new(after)),
        out: SharedSlice::new(out),
    };
    exec.pool.for_ranges(shape.n_value_heads, 1, |heads| {
        let mut head = Head::new(shape, n_taps, m.min(POSITIONS));
        for i in heads {
            // SAFETY: each head is given once.
            unsafe { layer.compute(i, m, &mut head) };
        }
    });
    Ok(())
}

/// A call of [`delta_net`].
struct Layer<'a> {
    isa: Isa,
    shape: &'a DeltaShape,
    weights: &'a DeltaWeights<'a>,
    inputs: &'a Projections<'a>,
    /// The inputs of the convolution, and the states, unless those are in place.
    before: (&'a [f32], Option<&'a [f32]>),
    after: (SharedSlice<'a, f32>, SharedSlice<'a, f32>),
    out: SharedSlice<'a, f32>,
}

/// What a task has of the head that it is at, for some positions.
struct Head {
    /// Its channels: of the query, the key and the value.
    qkv: [Convolved; 3],
    /// Decay and β of each position.
    gates: Vec<(f32, f32)>,
    /// `[m, value_dim]`: what the rule gives.
    answers: Vec<f32>,
}

impl Head {
    /// For at most `m` positions.
    fn new(shape: &DeltaShape, n_taps: usize, m: usize) -> Head {
        let qkv = [shape.key_dim, shape.key_dim, shape.value_dim];
        Head {
            qkv: qkv.map(|width| Convolved::new(width, n_taps, m)),
            gates: vec![(0.0, 0.0); m],
            answers: vec![0.0; m * shape.value_dim],
        }
    }
}

/// Some channels of the convolution, `width` side by side.
struct Convolved {
    width: usize,
    windows: Vec<Window>,
    /// `[m, width]`.
    rows: Vec<f32>,
}

impl Convolved {
    fn new(width: usize, n_taps: usize, m: usize) -> Convolved {
        let n_windows = width.div_ceil(conv::CHANNELS);
        Convolved {
            width,
            windows: (0..n_windows).map(|_| Window::new(n_taps)).collect(),
            rows: vec![0.0; m * width],
        }
    }

    /// Begins with the channels from `first` on.
    fn begin(&mut self, first: usize, (channels, taps): (usize, &[f32]), before: &[f32]) {
        for (i, window) in self.windows.iter_mut().enumerate() {
            let from = i * conv::CHANNELS;
            let to = self.width.min(from + conv::CHANNELS);
            window.begin(first + from..first + to, (channels, taps), before);
        }
    }

    /// Computes the positions of `inputs`, `[positions, channels]`.
    fn compute(&mut self, isa: Isa, channels: usize, inputs: &[f32]) {
        for (i, window) in self.windows.iter_mut().enumerate() {
            let own = window.channels().clone();
            let rows = self.rows.chunks_exact_mut(self.width);
            for (input, row) in inputs.chunks_exact(channels).zip(rows) {
                let out = &mut row[i * conv::CHANNELS..][..own.len()];
                let fill = |to: &mut [f32; conv::CHANNELS]| {
                    to[..own.len()].copy_from_slice(&input[own.clone()]);
                };
                window.step(isa, fill, out);
                conv::activate(isa, out);
            }
        }
    }

    fn row(&self, t: usize) -> &[f32] {
        &self.rows[t * self.width..][..self.width]
    }
}

impl Layer<'_> {
    /// All positions of a value head.
    ///
    /// # Safety
    ///
    /// No other thread is given `index` in this call of [`delta_net`].
    unsafe fn compute(&self, index: usize, m: usize, head: &mut Head) {
        let (shape, weights) = (self.shape, self.weights);
        let (channels, values) = (shape.channels(), shape.values());
        let key = shape.key_of(index);
        let first = [
            key * shape.key_dim,
            shape.keys() + key * shape.key_dim,
            2 * shape.keys() + index * shape.value_dim,
        ];
        for (part, first) in head.qkv.iter_mut().zip(first) {
            part.begin(first, (channels, weights.taps), self.before.0);
        }
        let state = index * shape.value_dim * shape.key_dim;
        let state = state..state + shape.value_dim * shape.key_dim;
        // SAFETY: the state of a head is in no other's range.
        let own = unsafe { self.after.1.range_mut(state.clone()) };
        let mut before = self.before.1.map(|before| &before[state]);
        if let (0, Some(before)) = (m, before) {
            own.copy_from_slice(before);
        }
        for start in (0..m).step_by(POSITIONS) {
            let rows = start..m.min(start + POSITIONS);
            self.rule(index, &rows, (before.take(), own), head);
            for (t, answer) in rows.zip(head.answers.chunks_exact_mut(shape.value_dim)) {
                norm::norm_rows(self.isa, answer, weights.norm, weights.eps);
                let at = t * values + index * shape.value_dim;
                let at = at..at + shape.value_dim;
                // SAFETY: the columns of a head are no other's.
                let out = unsafe { self.out.range_mut(at.clone()) };
                out.copy_from_slice(&self.inputs.gate[at]);
                activation::silu(self.isa, out, answer);
            }
        }
        // Value heads that share a key have its windows in common.
        let shared = shape.is_first_of_key(index);
        let parts = head.qkv.iter().zip([shared, shared, true]);
        for (part, _) in parts.filter(|(_, writes)| *writes) {
            for window in &part.windows {
                for (j, last) in window.before().enumerate() {
                    let own = window.channels();
                    let at = j * channels + own.start..j * channels + own.end;
                    // SAFETY: channels of values are their head's; those of a key are written by the first head that
                    // has it.
                    unsafe { self.after.0.range_mut(at) }.copy_from_slice(last);
                }
            }
        }
    }

    /// What the rule gives for the positions `rows`, at most [`POSITIONS`], and the state after them; that before them is
    /// in its place, or `before`, of which some columns are copied when they are needed, to the nearest cache.
    fn rule(
        &self,
        index: usize,
        rows: &Range<usize>,
        (before, state): (Option<&[f32]>, &mut [f32]),
        head: &mut Head,
    ) {
        let (shape, weights, inputs) = (self.shape, self.weights, self.inputs);
        let channels = shape.channels();
        let qkv = &inputs.qkv[rows.start * channels..rows.end * channels];
        for part in &mut head.qkv {
            part.compute(self.isa, channels, qkv);
        }
        let [q, k, v] = &mut head.qkv;
        let n_keys = rows.len() * shape.key_dim;
        normalise(
            self.isa,
            &mut q.rows[..n_keys],
            shape.key_dim,
            shape.scale(),
        );
        normalise(self.isa, &mut k.rows[..n_keys], shape.key_dim, 1.0);
        for (t, gates) in rows.clone().zip(&mut head.gates) {
            let at = t * shape.n_value_heads + index;
            *gates = (
                decay(inputs.alpha[at], weights.a[index], weights.dt_bias[index]),
                math::sigmoid(inputs.beta[at]),
            );
        }
        let columns = state.chunks_mut(COLUMNS * shape.key_dim);
        for (state, first) in columns.zip((0..).step_by(COLUMNS)) {
            if let Some(before) = before {
                state.copy_from_slice(&before[first * shape.key_dim..][..state.len()]);
            }
            let own = first..shape.value_dim.min(first + COLUMNS);
            for (t, gates) in head.gates[..rows.len()].iter().enumerate() {
                let out = &mut head.answers[t * shape.value_dim..][own.clone()];
                let qk = (q.row(t), k.row(t));
                step(self.isa, state, *gates, qk, &v.row(t)[own.clone()], out);
            }
        }
    }
}

/// `exp(a · softplus(alpha + bias))`.
#[inline(always)]
fn decay(alpha: f32, a: f32, bias: f32) -> f32 {
    math::exp(a * math::softplus(alpha + bias))
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
            normalise(exec.isa, q, shape.key_dim, shape.scale());
            normalise(exec.isa, &mut rest[..shape.keys()], shape.key_dim, 1.0);
        }
        for row in alpha.chunks_exact_mut(n) {
            for ((alpha, a), bias) in row.iter_mut().zip(a).zip(dt_bias) {
                *alpha = decay(*alpha, *a, *bias);
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
    use crate::state::change;
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
            change(&mut state, first / chunk, |state| {
                delta_rule(exec, s, inputs, state, &mut answers).unwrap();
            });
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

    /// The positions `rows` of a layer's input, by one operation after the other.
    fn in_steps(
        exec: &Exec,
        shape: &DeltaShape,
        weights: &DeltaWeights<'_>,
        inputs: &Projections<'_>,
        (before, after): (&[f32], &mut [f32]),
        out: &mut [f32],
    ) {
        let n_window = weights.taps.len() - shape.channels();
        let (window, before) = before.split_at(n_window);
        let (next_window, after) = after.split_at_mut(n_window);
        let mut qkv = vec![0.0; inputs.qkv.len()];
        let taps = (weights.taps, None);
        let window = (window, next_window);
        conv::silu(exec, shape.channels(), taps, inputs.qkv, window, &mut qkv).unwrap();
        let rule = DeltaInputs {
            qkv: &mut qkv,
            alpha: &mut inputs.alpha.to_vec(),
            beta: &mut inputs.beta.to_vec(),
            a: weights.a,
            dt_bias: weights.dt_bias,
        };
        delta_rule(exec, shape, rule, State::Copied(before, after), out).unwrap();
        norm::rms_norm(exec, out, weights.norm, weights.eps).unwrap();
        let mut gate = inputs.gate.to_vec();
        activation::gate(exec, activation::Activation::Silu, &mut gate, out).unwrap();
        out.copy_from_slice(&gate);
    }

    #[test]
    fn a_layer_has_the_bits_of_its_operations() {
        for (shape, n_taps, m) in [
            (shape([2, 4], 16, 16, HeadOrder::Grouped), 4, 40),
            (shape([2, 6], 16, 32, HeadOrder::Tiled), 4, 17),
            (shape([1, 3], 5, 70, HeadOrder::Tiled), 3, 9),
            (shape([2, 2], 128, 64, HeadOrder::Grouped), 2, 16),
            (shape([1, 1], 1, 1, HeadOrder::Grouped), 1, 3),
        ] {
            let case = case(shape, m);
            let gate = floats(m * shape.values(), 6);
            let (taps, norm) = (
                floats(shape.channels() * n_taps, 7),
                floats(shape.value_dim, 8),
            );
            let weights = DeltaWeights {
                taps: &taps,
                a: &case.a,
                dt_bias: &case.dt_bias,
                norm: &norm,
                eps: 1e-5,
            };
            let all = Projections {
                qkv: &case.qkv,
                gate: &gate,
                alpha: &case.alpha,
                beta: &case.beta,
            };
            let before = floats((n_taps - 1) * shape.channels() + shape.state(), 9);
            let nothing = (
                vec![f32::NAN; before.len()],
                vec![f32::NAN; m * shape.values()],
            );
            let (mut state, mut want) = nothing.clone();
            let scalar = Exec::new(1, Isa::SCALAR);
            in_steps(
                &scalar,
                &shape,
                &weights,
                &all,
                (&before, &mut state),
                &mut want,
            );
            for exec in exec_matrix() {
                for chunk in [1, 5, m] {
                    let (mut last, mut got) = (before.clone(), Vec::new());
                    for first in (0..m).step_by(chunk) {
                        let rows = first..m.min(first + chunk);
                        let part = |x| -> &[f32] {
                            let width = <[f32]>::len(x) / m;
                            &x[rows.start * width..rows.end * width]
                        };
                        let inputs = Projections {
                            qkv: part(all.qkv),
                            gate: part(all.gate),
                            alpha: part(all.alpha),
                            beta: part(all.beta),
                        };
                        let mut out = vec![f32::NAN; rows.len() * shape.values()];
                        change(&mut last, first / chunk, |state| {
                            delta_net(&exec, &shape, &weights, &inputs, state, &mut out).unwrap();
                        });
                        got.extend(out);
                    }
                    assert_eq!((&got, &last), (&want, &state), "{shape:?} {chunk} {exec:?}");
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
        delta_rule(
            &exec,
            &shape,
            inputs,
            State::Copied(&before, &mut after),
            &mut [],
        )
        .unwrap();
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
            delta_rule(
                &exec,
                &shape,
                inputs,
                State::Copied(&before, after),
                &mut [0.0; 16],
            )
        };
        assert!(call(32, 4, 2, 32).is_ok());
        assert!(call(31, 4, 2, 32).is_err());
        assert!(call(32, 3, 2, 32).is_err());
        assert!(call(32, 4, 3, 32).is_err());
        assert!(call(32, 4, 2, 31).is_err());
    }
}
