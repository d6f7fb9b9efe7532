//! Time mixing of RWKV, generations 4 to 7: linear attention whose state decays channel by channel.
//!
//! Of generations 5 to 7, every head remembers a matrix `S`, `[head_dim, head_dim]`, that keys index and values fill:
//!
//! ```text
//! 5, 6   y = (S + (u ∘ k) ⊗ v)ᵀ r                 S ← diag(w) S + k ⊗ v
//! 7      S ← diag(w) S − (κ ∘ a) ⊗ (Sᵀ κ) + k ⊗ v      y = Sᵀ r
//! ```
//!
//! Generation 4 remembers, of every channel, a mean of values that `e^k` weighs.

use std::ops::Range;

use crate::Exec;
use crate::dot::dot;
use crate::isa::multiversion;
use crate::math;
use crate::norm;
use crate::pool::SharedSlice;
use crate::scan::{self, COLUMNS, Heads};
use crate::shape::{self, ShapeError, expect_len};
use crate::state::State;

/// Channels or rows per task.
const CHANNELS: usize = 64;
const ROWS: usize = 4;
/// Channels that are computed together.
const LANES: usize = 16;
/// What a weight of nothing has as its logarithm.
const NOTHING: f32 = -1e38;

/// The generation of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)] // Their numbers.
pub enum Generation {
    V4,
    V5,
    V6,
    V7,
}

/// The heads of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RwkvShape {
    /// Which of the formulas it computes.
    pub generation: Generation,
    /// Heads. Those of generation 4 are together all that matters.
    pub n_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
}

/// A part of the state of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The input of time mixing at the position before.
    TimeMix,
    /// The same of channel mixing.
    ChannelMix,
    /// What time mixing remembers.
    Memory,
}

impl RwkvShape {
    /// Channels.
    pub fn inner(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Elements of what time mixing remembers.
    fn memory(&self) -> usize {
        match self.generation {
            Generation::V4 => 3 * self.inner(),
            _ => self.inner() * self.head_dim,
        }
    }

    /// Elements of a state.
    pub fn state(&self) -> usize {
        2 * self.inner() + self.memory()
    }

    /// Where a part of it is.
    pub fn part(&self, part: Part) -> Range<usize> {
        let inner = self.inner();
        match part {
            Part::TimeMix => 0..inner,
            Part::ChannelMix => inner..2 * inner,
            Part::Memory => 2 * inner..self.state(),
        }
    }

    fn heads(&self) -> Heads {
        Heads {
            n: self.n_heads,
            rows: self.head_dim,
            columns: self.head_dim,
        }
    }
}

/// How a position is mixed with the one before.
#[derive(Debug)]
pub struct Shift<'a> {
    /// `[width]`.
    pub factors: &'a [f32],
    /// Added to the factors at each position, `[m, width]`.
    pub added: Option<&'a [f32]>,
    /// Whether factors are the share of the position itself, as in generations 4 and 5, or of the one before.
    pub of_itself: bool,
}

/// `out[t] ← (1 − f) · x[t] + f · x[t − 1]`, with factors as `shift` says.
///
/// Shapes: `x` and `out` are `[m, width]`; the position before the first is in `before`, zeros at the beginning, and
/// the last goes to `after`.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn token_shift(
    exec: &Exec,
    shift: &Shift<'_>,
    x: &[f32],
    (before, after): (&[f32], &mut [f32]),
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let width = shift.factors.len();
    let m = shape::rows("token shift: input", x.len(), width)?;
    for (what, expected, found) in [
        ("token shift: output", x.len(), out.len()),
        ("token shift: position before", width, before.len()),
        ("token shift: last position", width, after.len()),
        (
            "token shift: added factors",
            x.len(),
            shift.added.map_or(x.len(), <[f32]>::len),
        ),
    ] {
        expect_len(what, expected, found)?;
    }
    after.copy_from_slice(match m {
        0 => before,
        _ => &x[(m - 1) * width..],
    });
    let shared = SharedSlice::new(out);
    exec.pool.for_ranges(m, ROWS, |rows| {
        for t in rows {
            let of = |t: usize| t * width..(t + 1) * width;
            let previous = match t {
                0 => before,
                _ => &x[of(t - 1)],
            };
            let added = shift.added.map(|added| &added[of(t)]);
            // SAFETY: each row belongs to one task.
            let out = unsafe { shared.range_mut(of(t)) };
            let (first, second) = match shift.of_itself {
                true => (previous, &x[of(t)]),
                false => (&x[of(t)], previous),
            };
            match added {
                None => mix(exec.isa, first, second, shift.factors, out),
                Some(added) => mix_by(exec.isa, (first, second), (shift.factors, added), out),
            }
        }
    });
    Ok(())
}

multiversion! {
    fn mix(from: &[f32], to: &[f32], factors: &[f32], out: &mut [f32]) {
        for (((out, a), b), factor) in out.iter_mut().zip(from).zip(to).zip(factors) {
            *out = a + (b - a) * factor;
        }
    }
}

multiversion! {
    fn mix_by(ends: (&[f32], &[f32]), factors: (&[f32], &[f32]), out: &mut [f32]) {
        let factors = factors.0.iter().zip(factors.1);
        for (((out, a), b), (factor, added)) in out.iter_mut().zip(ends.0).zip(ends.1).zip(factors) {
            *out = a + (b - a) * (factor + added);
        }
    }
}

/// What all generations have: receptances, keys and values, `[m, inner]`.
#[derive(Debug, Clone, Copy)]
pub struct Rkv<'a> {
    /// Receptances.
    pub r: &'a [f32],
    /// Keys.
    pub k: &'a [f32],
    /// Values.
    pub v: &'a [f32],
}

/// What becomes of what heads give.
#[derive(Debug, Clone, Copy)]
pub struct Finish<'a> {
    /// Normalises each head by itself, mean and variance, `[inner]`.
    pub weight: &'a [f32],
    /// Added then, `[inner]`.
    pub bias: &'a [f32],
    /// Epsilon of the norm.
    pub eps: f32,
    /// `[m, inner]`: the output is multiplied with them; of generation 5 and 6, with `silu` of them.
    pub gate: &'a [f32],
}

impl Finish<'_> {
    /// That of generation 4, which has none.
    pub const NONE: Finish<'static> = Finish {
        weight: &[],
        bias: &[],
        eps: 0.0,
        gate: &[],
    };
}

/// Generation 4: `out ← sigmoid(r) · mean`, of values so far weighed by `e^k` and by `decay`, and of this position's by
/// `first`.
///
/// Shapes: `decay` and `first` are `[inner]`, states `[3, inner]`: sums of values and of weights, and the logarithm of
/// what both are multiplied with. Weights decay by `e^(−e^decay)`.
/// Exactness: positions are taken one after the other, so that results depend neither on how positions are divided
/// into calls nor on the machine.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn wkv4(
    exec: &Exec,
    inputs: &Rkv<'_>,
    (decay, first): (&[f32], &[f32]),
    (before, after): (&[f32], &mut [f32]),
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let inner = decay.len();
    let m = shape::rows("time mixing: output", out.len(), inner)?;
    expect_inputs(m * inner, inputs)?;
    expect_len("time mixing: factors", inner, first.len())?;
    expect_len("time mixing: state", 3 * inner, before.len())?;
    expect_len("time mixing: next state", 3 * inner, after.len())?;
    after.copy_from_slice(before);
    let (out, after) = (SharedSlice::new(out), SharedSlice::new(after));
    exec.pool.for_ranges(inner.div_ceil(CHANNELS), 1, |tasks| {
        for task in tasks {
            let own = task * CHANNELS..inner.min((task + 1) * CHANNELS);
            let of_sum = |i: usize| i * inner + own.start..i * inner + own.end;
            // SAFETY: the channels of a task are no other's, and the three runs don't overlap.
            let (values, weights, logs) = unsafe {
                (
                    after.range_mut(of_sum(0)),
                    after.range_mut(of_sum(1)),
                    after.range_mut(of_sum(2)),
                )
            };
            let factors = (&decay[own.clone()], &first[own.clone()]);
            for t in 0..m {
                // SAFETY: as above.
                let out = unsafe { out.range_mut(of_sum(t)) };
                let Rkv { r, k, v } = *inputs;
                let rkv = (&r[of_sum(t)], &k[of_sum(t)], &v[of_sum(t)]);
                let sums = (&mut *values, &mut *weights, &mut *logs);
                step4(exec.isa, sums, factors, rkv, out);
            }
        }
    });
    Ok(())
}

multiversion! {
    /// One position of some channels.
    fn step4(
        sums: (&mut [f32], &mut [f32], &mut [f32]),
        factors: (&[f32], &[f32]),
        rkv: (&[f32], &[f32], &[f32]),
        out: &mut [f32],
    ) {
        let ((values, weights, logs), (decay, first), (r, k, v)) = (sums, factors, rkv);
        for at in (0..out.len()).step_by(LANES) {
            let own = at..out.len().min(at + LANES);
            let load = |x: &[f32]| {
                let mut lanes = [0.0; LANES];
                lanes[..own.len()].copy_from_slice(&x[own.clone()]);
                lanes
            };
            let (mut sum, mut weight, mut log) = (load(values), load(weights), load(logs));
            let (decay, first) = (load(decay), load(first));
            let (r, k, v) = (load(r), load(k), load(v));
            let mut answer = [0.0; LANES];
            for i in 0..LANES {
                let before = if weight[i] == 0.0 { NOTHING } else { log[i] };
                // This position and those before, both divided by the larger weight.
                let most = before.max(first[i] + k[i]);
                let (old, new) = (math::exp(before - most), math::exp(first[i] + k[i] - most));
                let mean = (old * sum[i] + new * v[i]) / (old * weight[i] + new);
                answer[i] = math::sigmoid(r[i]) * mean;
                let before = before - math::exp(decay[i]);
                let most = before.max(k[i]);
                let (old, new) = (math::exp(before - most), math::exp(k[i] - most));
                sum[i] = old * sum[i] + new * v[i];
                weight[i] = old * weight[i] + new;
                log[i] = most;
            }
            for (to, from) in [
                (&mut *out, answer),
                (&mut *values, sum),
                (&mut *weights, weight),
                (&mut *logs, log),
            ] {
                to[own.clone()].copy_from_slice(&from[..own.len()]);
            }
        }
    }
}

/// Decays of generations 5 and 6, which are `e^(−e^x)`.
#[derive(Debug)]
pub enum Decay<'a> {
    /// The same at every position, `[inner]`.
    Fixed(&'a [f32]),
    /// Of each position, `[m, inner]`. Unspecified afterwards.
    Given(&'a mut [f32]),
}

/// Generations 5 and 6, with the norm of what heads give, and its gates.
///
/// Shapes: `first` is `[inner]`: `u`. States `before` the first position, zeros at the beginning, and `after` the last
/// are `[n_heads, head_dim · head_dim]`, runs of 32 columns together. `out` is `[m, inner]`.
/// Exactness: as [`wkv4`]; sums over rows in a fixed order.
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn wkv6(
    exec: &Exec,
    shape: &RwkvShape,
    inputs: &Rkv<'_>,
    (decay, first): (Decay<'_>, &[f32]),
    finish: &Finish<'_>,
    state: State<'_>,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let (inner, d) = (shape.inner(), shape.head_dim);
    let m = shape::rows("time mixing: output", out.len(), inner)?;
    expect_inputs(m * inner, inputs)?;
    expect_len("time mixing: factors", inner, first.len())?;
    let fixed;
    let (decay, stride) = match decay {
        Decay::Fixed(decay) => {
            expect_len("time mixing: decays", inner, decay.len())?;
            let mut own = decay.to_vec();
            decays6(exec.isa, &mut own);
            fixed = own;
            (&fixed[..], 0)
        }
        Decay::Given(decay) => {
            expect_len("time mixing: decays", m * inner, decay.len())?;
            each_row(exec, inner, decay, |rows| decays6(exec.isa, rows));
            (&*decay, inner)
        }
    };
    let Rkv { r, k, v } = *inputs;
    let step =
        |head: usize, columns: &Range<usize>, t: usize, state: &mut [f32], out: &mut [f32]| {
            let of = |x, width| head_of(x, t * width, head, d);
            let value = head * d;
            let v = &v[t * inner + value..][columns.clone()];
            let rows = (of(r, inner), of(k, inner), of(decay, stride));
            step6(exec.isa, state, rows, head_of(first, 0, head, d), v, out);
        };
    shape.heads().scan(exec, m, state, out, step)?;
    norm_heads(exec, shape, finish, out)?;
    let shared = SharedSlice::new(out);
    exec.pool.for_ranges(m, ROWS, |rows| {
        let rows = rows.start * inner..rows.end * inner;
        // SAFETY: each row belongs to one task.
        let out = unsafe { shared.range_mut(rows.clone()) };
        gate6(exec.isa, out, &finish.gate[rows]);
    });
    Ok(())
}

multiversion! {
    fn decays6(x: &mut [f32]) {
        for x in x {
            *x = math::exp(-math::exp(*x));
        }
    }
}

multiversion! {
    fn gate6(x: &mut [f32], gate: &[f32]) {
        for (x, gate) in x.iter_mut().zip(gate) {
            *x *= math::silu(*gate);
        }
    }
}

multiversion! {
    /// One position, for some columns of a head, `[head_dim, v.len()]`.
    fn step6(
        state: &mut [f32],
        rows: (&[f32], &[f32], &[f32]),
        first: &[f32],
        v: &[f32],
        out: &mut [f32],
    ) {
        scan::padded(state, first.len(), v, out, &Step6 { rows, first });
    }
}

struct Step6<'a> {
    /// Receptances, keys and decays.
    rows: (&'a [f32], &'a [f32], &'a [f32]),
    first: &'a [f32],
}

impl scan::Step for Step6<'_> {
    #[inline(always)]
    fn step(&self, state: &mut [[f32; COLUMNS]], v: &[f32; COLUMNS], out: &mut [f32; COLUMNS]) {
        let (r, k, decay) = self.rows;
        *out = scan::sum_rows(state, [r, k, decay, self.first], &Row6(v));
    }
}

/// Adds what a row answers, and then changes it, given its values.
struct Row6<'a>(&'a [f32; COLUMNS]);

impl scan::Row<4> for Row6<'_> {
    #[inline(always)]
    fn add(
        &self,
        row: &mut [f32; COLUMNS],
        [r, k, decay, first]: [f32; 4],
        sum: &mut [f32; COLUMNS],
    ) {
        let own = first * k;
        for ((s, v), sum) in row.iter_mut().zip(self.0).zip(sum) {
            *sum += r * (*s + own * v);
            *s = decay * *s + k * v;
        }
    }
}

/// What generation 7 has besides, and its parameters.
#[derive(Debug)]
pub struct Wkv7Inputs<'a> {
    /// `[m, inner]`: decays are `e^(−0.606531 · sigmoid(x))`. Unspecified afterwards.
    pub decay: &'a mut [f32],
    /// How much of what a key holds is taken away, before a sigmoid, `[m, inner]`. Unspecified afterwards.
    pub rate: &'a mut [f32],
    /// Keys, which become those of the formula, `[m, inner]`.
    pub k: &'a mut [f32],
    /// Directions that are forgotten, `[m, inner]`: what is in it doesn't matter.
    pub forgotten: &'a mut [f32],
    /// Receptances, `[m, inner]`.
    pub r: &'a [f32],
    /// Values, `[m, inner]`.
    pub v: &'a [f32],
    /// Factors on keys in the directions that are forgotten, `[inner]`.
    pub k_k: &'a [f32],
    /// How far rates change keys, `[inner]`.
    pub k_a: &'a [f32],
    /// What a position adds of its own values, by its receptances and keys, `[inner]`.
    pub r_k: &'a [f32],
}

/// Generation 7, with the norm of what heads give, and its gates.
///
/// Shapes and exactness: as [`wkv6`].
/// Errors: [`ShapeError`] if a slice has the wrong length.
pub fn wkv7(
    exec: &Exec,
    shape: &RwkvShape,
    inputs: Wkv7Inputs<'_>,
    finish: &Finish<'_>,
    state: State<'_>,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let (inner, d) = (shape.inner(), shape.head_dim);
    let m = shape::rows("time mixing: output", out.len(), inner)?;
    let Wkv7Inputs {
        decay,
        rate,
        k,
        forgotten,
        r,
        v,
        k_k,
        k_a,
        r_k,
    } = inputs;
    expect_inputs(m * inner, &Rkv { r, k, v })?;
    for (what, expected, found) in [
        ("time mixing: decays", m * inner, decay.len()),
        ("time mixing: rates", m * inner, rate.len()),
        ("time mixing: directions", m * inner, forgotten.len()),
        ("time mixing: factors on directions", inner, k_k.len()),
        ("time mixing: factors on keys", inner, k_a.len()),
        ("time mixing: factors on receptances", inner, r_k.len()),
    ] {
        expect_len(what, expected, found)?;
    }
    {
        let all = [&mut *decay, &mut *rate, &mut *k, &mut *forgotten].map(SharedSlice::new);
        exec.pool.for_ranges(m, ROWS, |rows| {
            for t in rows {
                let own = t * inner..(t + 1) * inner;
                // SAFETY: each row belongs to one task.
                let [decay, rate, k, forgotten] =
                    [0, 1, 2, 3].map(|i| unsafe { all[i].range_mut(own.clone()) });
                prepare7(exec.isa, (decay, rate, k, forgotten), (k_k, k_a), d);
            }
        });
    }
    let (decay, rate, k, forgotten) = (&*decay, &*rate, &*k, &*forgotten);
    let step =
        |head: usize, columns: &Range<usize>, t: usize, state: &mut [f32], out: &mut [f32]| {
            let of = |x| head_of(x, t * inner, head, d);
            let v = &v[t * inner + head * d..][columns.clone()];
            let rows = (of(r), of(k), of(decay));
            step7(exec.isa, state, rows, (of(forgotten), of(rate)), v, out);
        };
    shape.heads().scan(exec, m, state, out, step)?;
    norm_heads(exec, shape, finish, out)?;
    let shared = SharedSlice::new(out);
    exec.pool.for_ranges(m, ROWS, |rows| {
        for t in rows {
            let own = t * inner..(t + 1) * inner;
            // SAFETY: each row belongs to one task.
            let out = unsafe { shared.range_mut(own.clone()) };
            let rkv = (&r[own.clone()], &k[own.clone()], &v[own.clone()]);
            finish7(exec.isa, out, rkv, (r_k, &finish.gate[own]), d);
        }
    });
    Ok(())
}

multiversion! {
    /// One row: decays, rates, keys, and the directions that are forgotten.
    fn prepare7(
        row: (&mut [f32], &mut [f32], &mut [f32], &mut [f32]),
        factors: (&[f32], &[f32]),
        head_dim: usize,
    ) {
        const MOST: f32 = -0.606_531;
        let ((decay, rate, k, forgotten), (k_k, k_a)) = (row, factors);
        for decay in decay {
            *decay = math::exp(MOST * math::sigmoid(*decay));
        }
        for ((forgotten, k), k_k) in forgotten.iter_mut().zip(&*k).zip(k_k) {
            *forgotten = k * k_k;
        }
        for ((rate, k), k_a) in rate.iter_mut().zip(k).zip(k_a) {
            *rate = math::sigmoid(*rate);
            *k *= 1.0 + (*rate - 1.0) * k_a;
        }
        for head in forgotten.chunks_exact_mut(head_dim) {
            let inverse = 1.0 / dot(head, head).sqrt().max(1e-12);
            for x in head {
                *x *= inverse;
            }
        }
    }
}

multiversion! {
    /// One position, for some columns of a head, `[head_dim, v.len()]`.
    fn step7(
        state: &mut [f32],
        rows: (&[f32], &[f32], &[f32]),
        forgotten: (&[f32], &[f32]),
        v: &[f32],
        out: &mut [f32],
    ) {
        scan::padded(state, rows.0.len(), v, out, &Step7 { rows, forgotten });
    }
}

struct Step7<'a> {
    /// Receptances, keys and decays.
    rows: (&'a [f32], &'a [f32], &'a [f32]),
    /// The direction, and how much of it.
    forgotten: (&'a [f32], &'a [f32]),
}

impl scan::Step for Step7<'_> {
    #[inline(always)]
    fn step(&self, state: &mut [[f32; COLUMNS]], v: &[f32; COLUMNS], out: &mut [f32; COLUMNS]) {
        let ((r, k, decay), (forgotten, rate)) = (self.rows, self.forgotten);
        let known = &scan::look_up(state, forgotten);
        let vectors = [r, k, decay, forgotten, rate];
        *out = scan::sum_rows(state, vectors, &Row7 { v, known });
    }
}

/// Changes a row, and then adds what it answers.
struct Row7<'a> {
    v: &'a [f32; COLUMNS],
    known: &'a [f32; COLUMNS],
}

impl scan::Row<5> for Row7<'_> {
    #[inline(always)]
    fn add(
        &self,
        row: &mut [f32; COLUMNS],
        [r, k, decay, direction, rate]: [f32; 5],
        sum: &mut [f32; COLUMNS],
    ) {
        let less = direction * rate;
        for (((s, v), known), sum) in row.iter_mut().zip(self.v).zip(self.known).zip(sum) {
            *s = decay * *s - less * known + k * v;
            *sum += r * *s;
        }
    }
}

multiversion! {
    /// One row: what the position adds of its own values, and its gates.
    fn finish7(
        out: &mut [f32],
        rkv: (&[f32], &[f32], &[f32]),
        factors: (&[f32], &[f32]),
        head_dim: usize,
    ) {
        let ((r, k, v), (r_k, gate)) = (rkv, factors);
        for (head, out) in out.chunks_exact_mut(head_dim).enumerate() {
            let own = head * head_dim..(head + 1) * head_dim;
            let mut bonus = [0.0; LANES];
            let (r, k, r_k) = (&r[own.clone()], &k[own.clone()], &r_k[own.clone()]);
            let runs = r.chunks(LANES).zip(k.chunks(LANES)).zip(r_k.chunks(LANES));
            for ((r, k), r_k) in runs {
                for (((bonus, r), k), r_k) in bonus.iter_mut().zip(r).zip(k).zip(r_k) {
                    *bonus += r * k * r_k;
                }
            }
            let bonus: f32 = bonus.iter().sum();
            for (out, (v, gate)) in out.iter_mut().zip(v[own.clone()].iter().zip(&gate[own])) {
                *out = (*out + bonus * v) * gate;
            }
        }
    }
}

fn expect_inputs(n: usize, Rkv { r, k, v }: &Rkv<'_>) -> Result<(), ShapeError> {
    expect_len("time mixing: receptances", n, r.len())?;
    expect_len("time mixing: keys", n, k.len())?;
    expect_len("time mixing: values", n, v.len())
}

/// The elements of a head in a row that starts at `row`.
fn head_of(x: &[f32], row: usize, head: usize, head_dim: usize) -> &[f32] {
    &x[row + head * head_dim..][..head_dim]
}

fn each_row(exec: &Exec, width: usize, x: &mut [f32], change: impl Fn(&mut [f32]) + Sync) {
    let n = x.len().checked_div(width).unwrap_or(0);
    let shared = SharedSlice::new(x);
    exec.pool.for_ranges(n, ROWS, |rows| {
        // SAFETY: each row belongs to one task.
        change(unsafe { shared.range_mut(rows.start * width..rows.end * width) });
    });
}

fn norm_heads(
    exec: &Exec,
    shape: &RwkvShape,
    finish: &Finish<'_>,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    expect_len("time mixing: gates", out.len(), finish.gate.len())?;
    expect_len("time mixing: norm", shape.inner(), finish.weight.len())?;
    let weights = (finish.weight, finish.bias);
    norm::layer_norm_groups(exec, out, weights, shape.n_heads, finish.eps)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::change;
    use crate::test_data::{exec_matrix, expect_scan, floats};

    /// Inputs of any generation.
    struct Case {
        shape: RwkvShape,
        m: usize,
        /// Receptances, keys, values, gates, decays and rates, `[m, inner]`.
        rows: [Vec<f32>; 6],
        /// Parameters, `[inner]`: the norm and its bias, and those of a generation.
        factors: [Vec<f32>; 5],
    }

    const EPS: f32 = 0.3;
    const R: usize = 0;
    const K: usize = 1;
    const V: usize = 2;
    const GATE: usize = 3;
    const DECAY: usize = 4;
    const RATE: usize = 5;

    fn case(generation: Generation, n_heads: usize, head_dim: usize, m: usize) -> Case {
        let shape = RwkvShape {
            generation,
            n_heads,
            head_dim,
        };
        let n = shape.inner();
        Case {
            shape,
            m,
            rows: [1, 2, 3, 4, 5, 6].map(|seed| floats(m * n, seed)),
            factors: [7, 8, 9, 10, 11].map(|seed| floats(n, seed)),
        }
    }

    fn sigmoid(x: f64) -> f64 {
        1.0 / (1.0 + (-x).exp())
    }

    impl Case {
        fn at(&self, kind: usize, t: usize, i: usize) -> f64 {
            f64::from(self.rows[kind][t * self.shape.inner() + i])
        }

        fn factor(&self, kind: usize, i: usize) -> f64 {
            f64::from(self.factors[kind][i])
        }

        /// The norm of one head of one position.
        fn normed(&self, head: usize, y: &[f64]) -> Vec<f64> {
            let n = y.len() as f64;
            let mean = y.iter().sum::<f64>() / n;
            let variance = y.iter().map(|y| (y - mean).powi(2)).sum::<f64>() / n;
            let at = |i: usize| head * y.len() + i;
            let y = y.iter().enumerate().map(|(i, y)| {
                let y = (y - mean) / (variance + f64::from(EPS)).sqrt();
                y * self.factor(0, at(i)) + self.factor(1, at(i))
            });
            y.collect()
        }

        /// The definitions, in f64.
        fn expected(&self) -> Vec<f64> {
            match self.shape.generation {
                Generation::V4 => self.expected4(),
                _ => self.expected_matrices(),
            }
        }

        fn expected4(&self) -> Vec<f64> {
            let n = self.shape.inner();
            let mut out = vec![0.0; self.m * n];
            for i in 0..n {
                let (mut values, mut weights) = (0.0, 0.0);
                for t in 0..self.m {
                    let (k, v) = (self.at(K, t, i), self.at(V, t, i));
                    let own = (self.factor(1, i) + k).exp();
                    let mean = (values + own * v) / (weights + own);
                    out[t * n + i] = sigmoid(self.at(R, t, i)) * mean;
                    let decay = (-self.factor(0, i).exp()).exp();
                    values = decay * values + k.exp() * v;
                    weights = decay * weights + k.exp();
                }
            }
            out
        }

        fn expected_matrices(&self) -> Vec<f64> {
            let RwkvShape {
                generation,
                n_heads,
                head_dim: d,
            } = self.shape;
            let mut states = vec![vec![vec![0.0; d]; d]; n_heads];
            let mut out = Vec::new();
            for t in 0..self.m {
                for (head, state) in states.iter_mut().enumerate() {
                    let of = |kind, i: usize| self.at(kind, t, head * d + i);
                    let factor = |kind, i: usize| self.factor(kind, head * d + i);
                    let list = |f: &dyn Fn(usize) -> f64| (0..d).map(f).collect::<Vec<f64>>();
                    let y = match generation {
                        Generation::V7 => {
                            let rate = list(&|i| sigmoid(of(RATE, i)));
                            let k = list(&|i| of(K, i) * (1.0 + (rate[i] - 1.0) * factor(3, i)));
                            let kk = list(&|i| of(K, i) * factor(2, i));
                            let length = kk.iter().map(|x| x * x).sum::<f64>().sqrt();
                            let kk = list(&|i| kk[i] / length);
                            let held = list(&|j| (0..d).map(|i| kk[i] * state[i][j]).sum());
                            for i in 0..d {
                                let decay = (-0.606531 * sigmoid(of(DECAY, i))).exp();
                                for j in 0..d {
                                    let less = kk[i] * rate[i] * held[j];
                                    state[i][j] = decay * state[i][j] - less + k[i] * of(V, j);
                                }
                            }
                            let y = list(&|j| (0..d).map(|i| of(R, i) * state[i][j]).sum());
                            let bonus: f64 = (0..d).map(|i| of(R, i) * k[i] * factor(4, i)).sum();
                            let normed = self.normed(head, &y);
                            list(&|j| (normed[j] + bonus * of(V, j)) * of(GATE, j))
                        }
                        _ => {
                            let own = |i| factor(3, i) * of(K, i);
                            let y = list(&|j| {
                                (0..d)
                                    .map(|i| of(R, i) * (state[i][j] + own(i) * of(V, j)))
                                    .sum()
                            });
                            for (i, row) in state.iter_mut().enumerate() {
                                let decay = match generation {
                                    Generation::V5 => factor(2, i),
                                    _ => of(DECAY, i),
                                };
                                for (j, s) in row.iter_mut().enumerate() {
                                    *s = (-decay.exp()).exp() * *s + of(K, i) * of(V, j);
                                }
                            }
                            let normed = self.normed(head, &y);
                            list(&|j| normed[j] * of(GATE, j) * sigmoid(of(GATE, j)))
                        }
                    };
                    out.extend(y);
                }
            }
            out
        }

        fn computed(&self, exec: &Exec, chunk: usize) -> (Vec<f32>, Vec<f32>) {
            let n = self.shape.inner();
            let mut state = vec![0.0; self.shape.part(Part::Memory).len()];
            let mut out = Vec::new();
            for first in (0..self.m).step_by(chunk) {
                let own = first * n..self.m.min(first + chunk) * n;
                let of = |kind: usize| self.rows[kind][own.clone()].to_vec();
                let (r, mut k, v) = (of(R), of(K), of(V));
                let (mut decay, mut rate, gate) = (of(DECAY), of(RATE), of(GATE));
                let mut answers = vec![f32::NAN; own.len()];
                let [a, b, c, d, e] = &self.factors;
                let finish = Finish {
                    weight: a,
                    bias: b,
                    eps: EPS,
                    gate: &gate,
                };
                let mut copy = Vec::new();
                change(&mut state, first / chunk, |state| {
                    let rkv = Rkv {
                        r: &r,
                        k: &k,
                        v: &v,
                    };
                    match self.shape.generation {
                        Generation::V4 => {
                            let state = state.copied(&mut copy);
                            wkv4(exec, &rkv, (a, b), state, &mut answers)
                        }
                        Generation::V5 | Generation::V6 => {
                            let decay = match self.shape.generation {
                                Generation::V5 => Decay::Fixed(c),
                                _ => Decay::Given(&mut decay),
                            };
                            let factors = (decay, &d[..]);
                            let out = &mut answers;
                            wkv6(exec, &self.shape, &rkv, factors, &finish, state, out)
                        }
                        Generation::V7 => {
                            let inputs = Wkv7Inputs {
                                decay: &mut decay,
                                rate: &mut rate,
                                k: &mut k,
                                forgotten: &mut vec![f32::NAN; own.len()],
                                r: &r,
                                v: &v,
                                k_k: c,
                                k_a: d,
                                r_k: e,
                            };
                            wkv7(exec, &self.shape, inputs, &finish, state, &mut answers)
                        }
                    }
                    .unwrap();
                });
                out.extend(answers);
            }
            (out, state)
        }
    }

    #[test]
    fn every_machine_and_every_division_into_calls_gives_the_definition() {
        use Generation::{V4, V5, V6, V7};
        for generation in [V4, V5, V6, V7] {
            for (n_heads, head_dim, m) in [(2, 64, 9), (3, 24, 12), (1, 40, 5), (2, 1, 3)] {
                // A head of one channel has no variance.
                let case = case(generation, n_heads, head_dim, m);
                let what = format_args!("{:?}", case.shape).to_string();
                expect_scan(what, m, &case.expected(), |exec, chunk| {
                    case.computed(exec, chunk)
                });
            }
        }
    }

    #[test]
    fn a_mean_of_tiny_weights_is_one() {
        // e^−200 is no f32.
        let exec = Exec::new(1, crate::Isa::detect());
        let inputs = Rkv {
            r: &[100.0; 2],
            k: &[-200.0, -201.0],
            v: &[3.0, 5.0],
        };
        let (mut after, mut out) = ([0.0; 3], [0.0; 2]);
        wkv4(
            &exec,
            &inputs,
            (&[-50.0], &[0.0]),
            (&[0.0; 3], &mut after),
            &mut out,
        )
        .unwrap();
        let second = (3.0 + 5.0 * f32::exp(-1.0)) / (1.0 + f32::exp(-1.0));
        assert_eq!(out[0], 3.0);
        assert!((out[1] - second).abs() < 1e-5, "{}, not {second}", out[1]);
    }

    #[test]
    fn positions_are_mixed_with_those_before() {
        let (m, width) = (5, 19);
        let (x, factors, added) = (floats(m * width, 1), floats(width, 2), floats(m * width, 3));
        let start = floats(width, 4);
        for (of_itself, is_added) in [(false, false), (true, false), (false, true)] {
            for exec in exec_matrix() {
                for chunk in [1, 2, m] {
                    let (mut before, mut got) = (start.clone(), Vec::new());
                    for first in (0..m).step_by(chunk) {
                        let own = first * width..m.min(first + chunk) * width;
                        let mut out = vec![f32::NAN; own.len()];
                        let mut after = vec![f32::NAN; width];
                        let shift = Shift {
                            factors: &factors,
                            added: is_added.then(|| &added[own.clone()]),
                            of_itself,
                        };
                        token_shift(&exec, &shift, &x[own], (&before, &mut after), &mut out)
                            .unwrap();
                        before = after;
                        got.extend(out);
                    }
                    assert_eq!(before, x[(m - 1) * width..]);
                    for (i, got) in got.iter().enumerate() {
                        let previous = match i.checked_sub(width) {
                            Some(at) => x[at],
                            None => start[i],
                        };
                        let mut factor = f64::from(factors[i % width]);
                        if is_added {
                            factor += f64::from(added[i]);
                        }
                        let share = if of_itself { 1.0 - factor } else { factor };
                        let want = f64::from(x[i]) * (1.0 - share) + f64::from(previous) * share;
                        assert!(
                            (f64::from(*got) - want).abs() < 1e-6,
                            "{i}: {got}, not {want}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn nothing_leaves_the_state_and_shapes_are_checked() {
        let exec = Exec::new(1, crate::Isa::detect());
        let shift = |factors: usize, x: usize, added: Option<usize>, state: usize| {
            let (factors, x) = (floats(factors, 1), floats(x, 2));
            let added = added.map(|n| floats(n, 3));
            let shift = Shift {
                factors: &factors,
                added: added.as_deref(),
                of_itself: false,
            };
            let (before, mut after) = (floats(state, 4), vec![0.0; state]);
            let mut out = vec![0.0; x.len()];
            token_shift(&exec, &shift, &x, (&before, &mut after), &mut out)
                .map(|()| (before, after))
        };
        let (before, after) = shift(4, 0, None, 4).unwrap();
        assert_eq!(before, after);
        assert!(shift(4, 8, Some(8), 4).is_ok());
        assert!(shift(4, 9, None, 4).is_err());
        assert!(shift(4, 8, Some(7), 4).is_err());
        assert!(shift(4, 8, None, 3).is_err());

        let case = case(Generation::V6, 2, 4, 2);
        let call = |k: usize, decay: usize, gate: usize, state: usize| {
            let rkv = Rkv {
                r: &case.rows[R],
                k: &case.rows[K][..k],
                v: &case.rows[V],
            };
            let finish = Finish {
                weight: &case.factors[0],
                bias: &case.factors[1],
                eps: EPS,
                gate: &case.rows[GATE][..gate],
            };
            let mut decay = case.rows[DECAY][..decay].to_vec();
            let decay = (Decay::Given(&mut decay), &case.factors[2][..]);
            let (before, after) = (vec![0.0; state], &mut vec![0.0; state]);
            let states = State::Copied(&before, after);
            wkv6(
                &exec,
                &case.shape,
                &rkv,
                decay,
                &finish,
                states,
                &mut [0.0; 16],
            )
        };
        assert!(call(16, 16, 16, 32).is_ok());
        assert!(call(15, 16, 16, 32).is_err());
        assert!(call(16, 15, 16, 32).is_err());
        assert!(call(16, 16, 15, 32).is_err());
        assert!(call(16, 16, 16, 31).is_err());
    }
}
