//! The operations of a graph, on rows in device memory, and how each is recorded.

use std::ops::Deref;
use std::sync::Arc;

use super::Matrix;
use super::sample::SampleOp;
use crate::kernels::attention::{
    self, Angles, AttentionShape, CacheLayer, HeadNorms, Heads, RopeLayout, Scores, Split, SplitKv,
    SplitKvStates,
};
use crate::kernels::elementwise::{self, Activation, Function};
use crate::kernels::experts;
use crate::kernels::linear::{self, Choice, Epilogue, Form, Ids, Input, Stack, WeightKind};
use crate::kernels::quantize::{
    Parts, QuantizedRows, Scaling, Wanted, can_add, quantize, quantize_for,
};
use crate::kernels::recurrent::{
    self, Gates, Mamba, Scan, ScanShape, Shift, State, StateLayer, Step, StepWeights, Wkv, Wkv4,
    WkvFinish, WkvInputs, WkvShape,
};
use crate::kernels::rotate::{self, Rotation};
use crate::kernels::{Rows, Sequences, norm};
use crate::memory::Buffer;
use crate::{Device, GpuError, Recorder};

/// An identity on the device, equal only to itself.
#[derive(Debug)]
pub struct Shared<T>(Arc<T>);

impl<T> Shared<T> {
    /// A new identity.
    pub fn new(value: T) -> Shared<T> {
        Shared(Arc::new(value))
    }
}

impl<T> Clone for Shared<T> {
    fn clone(&self) -> Shared<T> {
        Shared(Arc::clone(&self.0))
    }
}

impl<T> PartialEq for Shared<T> {
    fn eq(&self, other: &Shared<T>) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl<T> Deref for Shared<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

/// Rows of f32 in a buffer that is kept alive.
#[derive(Debug, Clone, PartialEq)]
pub struct View {
    /// The buffer.
    pub buffer: Buffer,
    /// Number of rows.
    pub n_rows: usize,
    /// Elements per row.
    pub width: usize,
    /// Where the first begins, in elements.
    pub offset: usize,
    /// From the beginning of one row to that of the next, in elements.
    pub stride: usize,
}

impl View {
    /// Contiguous rows, from the beginning of `buffer`.
    pub fn new(buffer: &Buffer, n_rows: usize, width: usize) -> View {
        View {
            buffer: buffer.clone(),
            n_rows,
            width,
            offset: 0,
            stride: width,
        }
    }

    /// The rows from `first` on, `n_rows` of them.
    #[must_use]
    pub fn rows(&self, first: usize, n_rows: usize) -> View {
        View {
            n_rows,
            offset: self.offset + first * self.stride,
            ..self.clone()
        }
    }

    /// The columns from `first` on, `width` of them.
    #[must_use]
    pub fn columns(&self, first: usize, width: usize) -> View {
        View {
            width,
            offset: self.offset + first,
            ..self.clone()
        }
    }

    /// As kernel arguments.
    pub(super) fn of(&self) -> Rows<'_> {
        Rows {
            buffer: &self.buffer,
            n_rows: self.n_rows,
            width: self.width,
            offset: self.offset,
            stride: self.stride,
        }
    }
}

/// A norm: its weights and epsilon.
pub type Norm = (Buffer, f32);

/// Cosines and sines of a rotary embedding, `[rows, pairs, 2]`, as [`Angles`].
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// The table.
    pub table: Buffer,
    /// Pairs of elements that are rotated.
    pub pairs: usize,
    /// Which elements are a pair.
    pub layout: RopeLayout,
}

/// One operation of a step. Equal operations on equal buffers are recorded as the same commands.
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Fields are the operands of the kernels that the variants name.
pub enum Op {
    /// `out[t] ← factor · table[ids[t]]`.
    Embed {
        table: Matrix,
        ids: Ids,
        factor: f32,
        out: View,
    },
    /// `out ← rms_norm(x) · norm`, each of `n_groups` parts of a row by itself.
    RmsNorm {
        x: View,
        norm: Norm,
        n_groups: usize,
        out: View,
    },
    /// `x ← rms_norm(x)` without weights, each of `n_groups` parts of a row by itself.
    Normalize { x: View, n_groups: usize, eps: f32 },
    /// `out ← (x − mean) / √(variance + eps) · weight + bias`, row by row.
    LayerNorm {
        x: View,
        weight: Buffer,
        bias: Buffer,
        eps: f32,
        out: View,
    },
    /// All matrices read the same rows, normalised first if there is a norm.
    Linear {
        x: View,
        norm: Option<Norm>,
        outputs: Vec<Output>,
    },
    /// `x ← y`.
    Copy { x: View, y: View },
    /// `x ← x + y`.
    Add { x: View, y: View },
    /// `x[t] ← x[t] + bias`.
    AddBias { x: View, bias: Buffer },
    /// `x ← factor · x`.
    Scale { x: View, factor: f32 },
    /// `x ← cap · tanh(x / cap)`.
    Softcap { x: View, cap: f32 },
    /// `x ← function(x)`.
    Apply { function: Function, x: View },
    /// `x ← x ∘ y`.
    Multiply { x: View, y: View },
    /// `x ← x + sigmoid(shares) ∘ (y − x)`.
    Blend { x: View, y: View, shares: View },
    /// `gate ← activation(gate) · up`.
    Gate {
        activation: Activation,
        gate: View,
        up: View,
    },
    /// `x ← x · activation(gate)`.
    GateBy {
        activation: Activation,
        x: View,
        gate: View,
    },
    /// Rotates rows, or undoes it.
    Rotate {
        rotation: Rotation,
        inverse: bool,
        x: View,
        out: View,
    },
    /// `x[t] ← x[t] + sigmoid(gate[t]) · y[t]`.
    AddGated { x: View, y: View, gate: View },
    /// Multiplies each head by the sigmoids of those that follow its query.
    GateHeads { x: View, q: View, head_dim: usize },
    /// A convolution over positions.
    Convolve {
        convolution: Convolution,
        x: View,
        state: StateRef,
        out: View,
    },
    /// What an [`Op::Scan`] reads of each row: `x`, which changes, and gates.
    ScanPrepare {
        shape: ScanShape,
        x: View,
        gates: ScanGates,
        out: Buffer,
    },
    /// The delta rule, or the state space of Mamba-2.
    Scan {
        shape: ScanShape,
        x: View,
        gates: Buffer,
        d: Option<Buffer>,
        state: StateRef,
        out: View,
    },
    /// One position of each of some sequences in a layer with an [`Op::Scan`]: its convolution, its scan, and the norm and gate of its output.
    Step {
        weights: StepWeights,
        x: View,
        gate: View,
        steps: View,
        beta: Option<View>,
        eps: f32,
        state: StateRef,
        out: View,
    },
    /// The state space of the first Mamba, whose outputs replace `x`.
    Mamba {
        x: View,
        dt: View,
        b: View,
        c: View,
        a: Buffer,
        d: Buffer,
        state: StateRef,
    },
    /// `out ←` the rows before the first of sequences, which the state has; that becomes the last row.
    Previous {
        x: View,
        state: StateRef,
        out: Buffer,
    },
    /// Mixes each row with the one before.
    TokenShift {
        x: View,
        sequences: SequencesRef,
        previous: Buffer,
        factors: Buffer,
        added: Option<View>,
        of_itself: bool,
        out: View,
    },
    /// Time mixing of RWKV's fourth generation.
    Wkv4 {
        r: View,
        k: View,
        v: View,
        decay: Buffer,
        first: Buffer,
        state: StateRef,
        out: View,
    },
    /// What [`Op::Wkv`] reads besides receptances and values, `[n_rows, 4 · inner]`.
    WkvPrepare {
        shape: WkvShape,
        k: View,
        inputs: TimeInputs,
        out: View,
    },
    /// What heads give in later generations.
    Wkv {
        shape: WkvShape,
        inputs: TimeViews,
        state: StateRef,
        out: View,
    },
    /// The norm of that, and its gates.
    WkvFinish {
        shape: WkvShape,
        inputs: TimeViews,
        weight: Buffer,
        bias: Buffer,
        eps: f32,
        gate: View,
        r_k: Option<Buffer>,
        x: View,
    },
    /// Heads are normalised and rotated; keys and values are cached.
    Heads {
        heads: HeadInputs,
        cache: Shared<CacheLayer>,
    },
    /// Chooses the experts of each row by their scores.
    Route {
        scores: View,
        bias: Option<Buffer>,
        routing: experts::Routing,
        routes: Routes,
    },
    /// Products with the matrices of each route's expert; all read the same rows, one for each route, or one
    /// for the routes of a row, normalised first if there is a norm. The experts of one row may be chosen at the same time,
    /// by its scores.
    Experts {
        x: View,
        norm: Option<Norm>,
        choice: Option<(View, experts::Routing)>,
        routes: Routes,
        outputs: Vec<ExpertOutput>,
    },
    /// `out[t] ← Σ weight(r) · y[r]` over the routes of row `t`, added to `out[t]` if it `adds`.
    Combine {
        routes: Routes,
        y: View,
        adds: bool,
        out: View,
    },
    /// `x[r] ← x[r] + bias[expert(r)]` for every route `r`.
    ExpertBias {
        x: View,
        routes: Routes,
        bias: Buffer,
    },
    /// Queries attend to the cache.
    Attention {
        shape: AttentionShape,
        sinks: Option<Buffer>,
        q: View,
        sequences: SequencesRef,
        cache: Shared<CacheLayer>,
        /// The longest context, if it is to be split across workgroups.
        most_len: Option<usize>,
        is_causal: bool,
        out: View,
    },
    /// An [`Op::Heads`] of one row of each sequence and the [`Op::Attention`] after it.
    Decode {
        heads: HeadInputs,
        shape: AttentionShape,
        sinks: Option<Buffer>,
        cache: Shared<CacheLayer>,
        most_len: usize,
        /// Whether nothing reads the rows of `heads` after it.
        reads_last: bool,
        out: View,
    },
    /// Samples the next token, and advances the step's position.
    Sample(SampleOp),
}

/// Queries, keys and values of a batch as the projections computed them, and how to prepare them.
#[derive(Debug, Clone, PartialEq)]
pub struct HeadInputs {
    /// Rows of queries, then keys, then values.
    pub qkv: View,
    /// Whether there are keys and values, as [`Heads::has_keys`].
    pub has_keys: bool,
    /// Query heads.
    pub n_heads: usize,
    /// Whether norms are of all heads together, which only [`Op::Decode`] has.
    pub whole_norms: bool,
    /// Normalises the heads of queries.
    pub q_norm: Option<Norm>,
    /// Normalises the heads of keys.
    pub k_norm: Option<Norm>,
    /// Rotates the heads of both.
    pub rope: Option<RopeTable>,
    /// Those of the batch that are prepared.
    pub sequences: SequencesRef,
}

/// Some of the sequences of a batch, as [`Sequences`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub struct SequencesRef {
    pub table: Buffer,
    pub n_all: usize,
    pub page_stride: usize,
    pub first: usize,
    pub n: usize,
    pub n_rows: usize,
}

impl SequencesRef {
    /// Words of a table for each of its sequences.
    pub fn words(page_stride: usize) -> usize {
        Sequences::words(page_stride)
    }

    fn of(&self) -> Sequences<'_> {
        Sequences {
            table: &self.table,
            n_all: self.n_all,
            page_stride: self.page_stride,
            first: self.first,
            n: self.n,
            n_rows: self.n_rows,
        }
    }
}

/// A part of a layer's states, as [`recurrent::State`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub struct StateRef {
    pub layer: Shared<StateLayer>,
    pub first: usize,
    pub sequences: SequencesRef,
}

impl StateRef {
    /// The part that begins `first` values after this one.
    #[must_use]
    pub fn part(self, first: usize) -> StateRef {
        StateRef {
            first: self.first + first,
            ..self
        }
    }

    fn of(&self) -> State<'_> {
        State {
            layer: &self.layer,
            first: self.first,
            sequences: self.sequences.of(),
        }
    }
}

/// A convolution, as [`recurrent::Convolution`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub struct Convolution {
    pub taps: Buffer,
    pub n_taps: usize,
    pub bias: Option<Buffer>,
    pub is_gated: bool,
}

impl Convolution {
    fn of(&self) -> recurrent::Convolution<'_> {
        recurrent::Convolution {
            taps: &self.taps,
            n_taps: self.n_taps,
            bias: self.bias.as_ref(),
            is_gated: self.is_gated,
        }
    }
}

/// What the gates of an [`Op::Scan`] follow from, as [`Gates`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub struct ScanGates {
    pub steps: View,
    pub beta: Option<View>,
    pub a: Buffer,
    pub dt_bias: Buffer,
}

/// What an [`Op::WkvPrepare`] reads besides keys, as [`WkvInputs`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub enum TimeInputs {
    Fixed(Buffer, Buffer),
    Given(View, Buffer),
    Seventh {
        decay: View,
        rate: View,
        k_k: Buffer,
        k_a: Buffer,
    },
}

impl TimeInputs {
    fn of(&self) -> WkvInputs<'_> {
        match self {
            TimeInputs::Fixed(decay, first) => WkvInputs::Fixed(decay, first),
            TimeInputs::Given(decay, first) => WkvInputs::Given(decay.of(), first),
            TimeInputs::Seventh {
                decay,
                rate,
                k_k,
                k_a,
            } => WkvInputs::Seventh {
                decay: decay.of(),
                rate: rate.of(),
                k_k,
                k_a,
            },
        }
    }

    /// The rows.
    pub(super) fn views(&self) -> Vec<&View> {
        match self {
            TimeInputs::Fixed(..) => vec![],
            TimeInputs::Given(decay, _) => vec![decay],
            TimeInputs::Seventh { decay, rate, .. } => vec![decay, rate],
        }
    }
}

/// What an [`Op::Wkv`] and an [`Op::WkvFinish`] read, as [`Wkv`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub struct TimeViews {
    pub r: View,
    pub prepared: View,
    pub v: View,
}

impl TimeViews {
    fn of(&self) -> Wkv<'_> {
        Wkv {
            r: self.r.of(),
            prepared: self.prepared.of(),
            v: self.v.of(),
        }
    }

    /// All of them.
    pub(super) fn views(&self) -> Vec<&View> {
        vec![&self.r, &self.prepared, &self.v]
    }
}

/// A product of an [`Op::Linear`].
#[derive(Debug, Clone, PartialEq)]
pub struct Output {
    /// The weights.
    pub w: Matrix,
    /// Where the result goes.
    pub out: View,
    /// What is done with the result as it is stored.
    pub epilogue: Epilogue,
}

/// The experts of each row, and the weights of what they give, as [`experts::Routes`].
#[derive(Debug, Clone, PartialEq)]
#[allow(missing_docs)] // Their fields are the same.
pub struct Routes {
    pub experts: Buffer,
    pub weights: Buffer,
    pub n_rows: usize,
    pub n_used: usize,
}

impl Routes {
    fn of(&self) -> experts::Routes<'_> {
        experts::Routes {
            experts: &self.experts,
            weights: &self.weights,
            n_rows: self.n_rows,
            n_used: self.n_used,
        }
    }
}

/// A product of an [`Op::Experts`].
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertOutput {
    /// The matrices of all experts.
    pub w: Stack,
    /// Where the result goes, a row for each route.
    pub out: View,
    /// What is done with the result as it is stored.
    pub epilogue: Epilogue,
}

/// Scratch memory shared by operations, one after the other.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// Quantized activations, with their rows and elements per row.
    rounded: Option<(QuantizedRows, usize, usize)>,
    /// Split-KV states, and how many values they have.
    split_kv: Option<(SplitKvStates, usize)>,
}

impl Workspace {
    /// Makes room for all of `ops`.
    pub(super) fn fit(&mut self, device: &Device, ops: &[Op]) -> Result<(), GpuError> {
        let (mut rows, mut width) = self.rounded.as_ref().map_or((1, 1), |(_, r, w)| (*r, *w));
        let mut split_kv = self.split_kv.as_ref().map_or(0, |(_, len)| *len);
        for op in ops {
            match op {
                Op::Linear { x, .. } | Op::Experts { x, .. } => {
                    (rows, width) = (rows.max(x.n_rows), width.max(x.width))
                }
                Op::Attention {
                    shape,
                    sequences,
                    most_len: Some(most_len),
                    ..
                }
                | Op::Decode {
                    shape,
                    heads: HeadInputs { sequences, .. },
                    most_len,
                    ..
                } => {
                    let rows = (sequences.n, sequences.n_rows);
                    let heads = (shape.n_heads, shape.head_dim);
                    split_kv = split_kv.max(SplitKvStates::len(rows, heads, *most_len));
                }
                _ => {}
            }
        }
        if !matches!(&self.rounded, Some((_, r, w)) if (*r, *w) == (rows, width)) {
            self.rounded = Some((QuantizedRows::new(device, rows, width)?, rows, width));
        }
        if split_kv != 0 && !matches!(&self.split_kv, Some((_, len)) if *len == split_kv) {
            self.split_kv = Some((SplitKvStates::new(device, split_kv)?, split_kv));
        }
        Ok(())
    }

    fn rounded(&self) -> &QuantizedRows {
        let (rounded, ..) = self.rounded.as_ref().expect("`fit` makes room");
        rounded
    }
}

/// Records `op`, which adds up the parts of the product before it if there are any; and returns those of its own product, if
/// `next` is to add them up. The workspace has room for it.
pub(super) fn record(
    recorder: &mut Recorder,
    workspace: &Workspace,
    (op, next): (&Op, Option<&Op>),
    added: Option<Parts>,
) -> Result<Option<Parts>, GpuError> {
    let left = next.and_then(|next| parts_left(recorder, op, next));
    record_one(recorder, workspace, op, (added, left.is_some()))?;
    Ok(left)
}

/// The parts that the product `op` is computed in, if `next` can add them up as it reads them.
fn parts_left(recorder: &Recorder, op: &Op, next: &Op) -> Option<Parts> {
    let Op::Linear { x, outputs, .. } = op else {
        return None;
    };
    let [Output { w, out, epilogue }] = &outputs[..] else {
        return None;
    };
    let Form::Int8(scaling) = w.kind().form() else {
        return None;
    };
    let adds = match next {
        Op::Linear {
            x: sum,
            norm: Some(_),
            outputs,
        } => {
            *epilogue == Epilogue::Add
                && out == sum
                && quantizing_adds(recorder, scaling, sum, outputs)
        }
        Op::Decode {
            heads,
            shape,
            sinks: None,
            cache,
            most_len,
            reads_last: true,
            ..
        } => {
            *epilogue == Epilogue::Store
                && *out == heads.qkv
                && w.kind() == WeightKind::Ternary
                && attention::can_add(shape, &heads.of(), cache, *most_len)
        }
        _ => false,
    };
    match adds {
        true => linear::parts_of(recorder, &w.linear(), x.n_rows),
        false => None,
    }
}

/// Whether the parts of a product of activations with this scaling can be added to `sum` as it is quantized for `readers`.
fn quantizing_adds(recorder: &Recorder, scaling: Scaling, sum: &View, readers: &[Output]) -> bool {
    let Some(Form::Int8(next)) = readers.first().map(|it| it.w.kind().form()) else {
        return false;
    };
    // Scales of rows are where those of the next are stored, row by row.
    let are_alike = scaling != Scaling::Row || next == Scaling::Row;
    let rounds_itself =
        |reader: &Output| linear::rounds_itself(recorder, &reader.w.linear(), &sum.of());
    are_alike
        && (readers.iter()).all(|reader| reader.w.kind().form() == Form::Int8(next))
        && !readers.iter().all(rounds_itself)
        && can_add(recorder.device(), &sum.of(), next)
}

/// Records `op`, which adds up parts, and leaves its own.
fn record_one(
    recorder: &mut Recorder,
    workspace: &Workspace,
    op: &Op,
    (added, leaves): (Option<Parts>, bool),
) -> Result<(), GpuError> {
    match op {
        Op::Embed {
            table,
            ids,
            factor,
            out,
        } => linear::embed(recorder, &table.linear(), ids, *factor, out.of()),
        Op::RmsNorm {
            x,
            norm,
            n_groups,
            out,
        } => norm::rms_norm_groups(recorder, x.of(), &norm.0, *n_groups, norm.1, out.of()),
        Op::Normalize { x, n_groups, eps } => norm::normalize(recorder, x.of(), *n_groups, *eps),
        Op::LayerNorm {
            x,
            weight,
            bias,
            eps,
            out,
        } => norm::layer_norm(recorder, x.of(), (weight, bias), *eps, out.of()),
        Op::Linear { x, norm, outputs } => {
            let input = (x, norm.as_ref());
            products(recorder, workspace, input, outputs, (added, leaves))
        }
        Op::Copy { x, y } => elementwise::copy(recorder, x.of(), y.of()),
        Op::Add { x, y } => elementwise::add(recorder, x.of(), y.of()),
        Op::AddBias { x, bias } => elementwise::add_bias(recorder, x.of(), bias),
        Op::Scale { x, factor } => elementwise::scale(recorder, x.of(), *factor),
        Op::Softcap { x, cap } => elementwise::softcap(recorder, x.of(), *cap),
        Op::Apply { function, x } => elementwise::function(recorder, *function, x.of()),
        Op::Multiply { x, y } => elementwise::multiply(recorder, x.of(), y.of()),
        Op::Blend { x, y, shares } => elementwise::blend(recorder, x.of(), y.of(), shares.of()),
        Op::Gate {
            activation,
            gate,
            up,
        } => elementwise::gate(recorder, *activation, gate.of(), up.of()),
        Op::GateBy {
            activation,
            x,
            gate,
        } => elementwise::gate_by(recorder, *activation, x.of(), gate.of()),
        Op::Rotate {
            rotation,
            inverse,
            x,
            out,
        } => rotate::rotate(recorder, rotation, *inverse, x.of(), out.of()),
        Op::AddGated { x, y, gate } => elementwise::add_gated(recorder, x.of(), y.of(), gate.of()),
        Op::GateHeads { x, q, head_dim } => {
            elementwise::gate_heads(recorder, x.of(), q.of(), *head_dim)
        }
        Op::Convolve {
            convolution,
            x,
            state,
            out,
        } => recurrent::convolve(recorder, &convolution.of(), x.of(), state.of(), out.of()),
        Op::ScanPrepare {
            shape,
            x,
            gates,
            out,
        } => {
            let gates = Gates {
                steps: gates.steps.of(),
                beta: gates.beta.as_ref().map(View::of),
                a: &gates.a,
                dt_bias: &gates.dt_bias,
            };
            recurrent::scan_prepare(recorder, shape, x.of(), &gates, out)
        }
        Op::Scan {
            shape,
            x,
            gates,
            d,
            state,
            out,
        } => {
            let inputs = Scan {
                x: x.of(),
                gates,
                d: d.as_ref(),
            };
            recurrent::scan(recorder, shape, &inputs, state.of(), out.of())
        }
        Op::Step {
            weights,
            x,
            gate,
            steps,
            beta,
            eps,
            state,
            out,
        } => {
            let inputs = Step {
                x: x.of(),
                gate: gate.of(),
                steps: steps.of(),
                beta: beta.as_ref().map(View::of),
                eps: *eps,
            };
            recurrent::step(recorder, weights, &inputs, state.of(), out.of())
        }
        Op::Mamba {
            x,
            dt,
            b,
            c,
            a,
            d,
            state,
        } => {
            let inputs = Mamba {
                dt: dt.of(),
                b: b.of(),
                c: c.of(),
                a,
                d,
            };
            recurrent::mamba(recorder, &inputs, state.of(), x.of())
        }
        Op::Previous { x, state, out } => recurrent::previous(recorder, x.of(), state.of(), out),
        Op::TokenShift {
            x,
            sequences,
            previous,
            factors,
            added,
            of_itself,
            out,
        } => {
            let shift = Shift {
                sequences: sequences.of(),
                previous,
                factors,
                added: added.as_ref().map(View::of),
                of_itself: *of_itself,
            };
            recurrent::token_shift(recorder, &shift, x.of(), out.of())
        }
        Op::Wkv4 {
            r,
            k,
            v,
            decay,
            first,
            state,
            out,
        } => {
            let inputs = Wkv4 {
                r: r.of(),
                k: k.of(),
                v: v.of(),
                decay,
                first,
            };
            recurrent::wkv4(recorder, &inputs, state.of(), out.of())
        }
        Op::WkvPrepare {
            shape,
            k,
            inputs,
            out,
        } => recurrent::wkv_prepare(recorder, shape, k.of(), &inputs.of(), out.of()),
        Op::Wkv {
            shape,
            inputs,
            state,
            out,
        } => recurrent::wkv(recorder, shape, &inputs.of(), state.of(), out.of()),
        Op::WkvFinish {
            shape,
            inputs,
            weight,
            bias,
            eps,
            gate,
            r_k,
            x,
        } => {
            let finish = WkvFinish {
                weight,
                bias,
                eps: *eps,
                gate: gate.of(),
                r_k: r_k.as_ref(),
            };
            recurrent::wkv_finish(recorder, shape, &inputs.of(), &finish, x.of())
        }
        Op::Heads { heads, cache } => {
            attention::prepare_heads(recorder, &heads.of(), heads.n_heads, cache)
        }
        Op::Route {
            scores,
            bias,
            routing,
            routes,
        } => experts::route(recorder, scores.of(), bias.as_ref(), routing, routes.of()),
        Op::Experts {
            x,
            norm,
            choice,
            routes,
            outputs,
        } => {
            let choice = choice.as_ref();
            let rest = chosen_product(
                recorder,
                workspace,
                (x, norm.as_ref()),
                choice,
                routes,
                outputs,
            )?;
            routed_products(recorder, workspace, (x, norm.as_ref()), routes, rest)
        }
        Op::Combine {
            routes,
            y,
            adds,
            out,
        } => experts::combine(recorder, routes.of(), y.of(), *adds, out.of()),
        Op::ExpertBias { x, routes, bias } => {
            experts::add_bias(recorder, routes.of(), x.of(), bias)
        }
        Op::Attention {
            shape,
            sinks,
            q,
            sequences,
            cache,
            most_len,
            is_causal,
            out,
        } => {
            let split = match (most_len, &workspace.split_kv) {
                (Some(most_len), Some((states, _))) => Split::Kv(SplitKv {
                    states,
                    most_len: *most_len,
                }),
                _ => Split::Queries,
            };
            let sequences = sequences.of();
            let scores = Scores {
                shape,
                sinks: sinks.as_ref(),
                is_causal: *is_causal,
            };
            attention::attention(recorder, scores, q.of(), sequences, cache, split, out.of())
        }
        Op::Decode {
            heads,
            shape,
            sinks,
            cache,
            most_len,
            out,
            ..
        } => {
            let scores = Scores {
                shape,
                sinks: sinks.as_ref(),
                is_causal: true,
            };
            let (states, _) = workspace.split_kv.as_ref().expect("`fit` makes room");
            let split_kv = SplitKv {
                states,
                most_len: *most_len,
            };
            let heads = heads.of();
            match added {
                Some(parts) => {
                    let sums = (&parts, workspace.rounded());
                    attention::decode_sums(
                        recorder,
                        scores,
                        &heads,
                        sums,
                        cache,
                        split_kv,
                        out.of(),
                    )
                }
                None => attention::decode(recorder, scores, &heads, cache, split_kv, out.of()),
            }
        }
        Op::Sample(sample) => sample.record(recorder),
    }
}

impl HeadInputs {
    fn of(&self) -> Heads<'_> {
        let (q_norm, k_norm) = (self.q_norm.as_ref(), self.k_norm.as_ref());
        Heads {
            qkv: self.qkv.of(),
            has_keys: self.has_keys,
            norms: HeadNorms {
                whole: self.whole_norms,
                q: q_norm.map(|(weight, _)| weight),
                k: k_norm.map(|(weight, _)| weight),
                eps: q_norm.or(k_norm).map_or(0.0, |(_, eps)| *eps),
            },
            angles: match &self.rope {
                Some(rope) => Angles {
                    table: &rope.table,
                    pairs: rope.pairs,
                    layout: rope.layout,
                },
                None => Angles {
                    table: &self.sequences.table,
                    pairs: 0,
                    layout: RopeLayout::Halves,
                },
            },
            sequences: self.sequences.of(),
        }
    }
}

/// Few rows are quantized by each product for itself where that pays for all that use the same format; else they are once, for
/// all of these. Where it leaves its parts, there is one product.
fn products(
    recorder: &mut Recorder,
    workspace: &Workspace,
    (x, norm): (&View, Option<&Norm>),
    outputs: &[Output],
    (added, leaves): (Option<Parts>, bool),
) -> Result<(), GpuError> {
    let rounded = workspace.rounded();
    let norm = norm.map(|(weight, eps)| (weight, *eps));
    let multiply = |recorder: &mut Recorder, output: &Output, input| {
        let (w, out) = (output.w.linear(), output.out.of());
        match leaves {
            true => linear::multiply_parts(recorder, &w, input, out),
            false => linear::multiply(recorder, &w, input, output.epilogue, out),
        }
    };
    for output in outputs {
        if output.w.kind().form() == Form::Float {
            let input = match norm {
                Some(norm) => Input::Normed(x.of(), norm),
                None => Input::Half {
                    x: x.of(),
                    scratch: rounded,
                },
            };
            multiply(recorder, output, input)?;
        }
    }
    for scaling in [Scaling::Row, Scaling::Blocks256, Scaling::Blocks32] {
        let is_same = |output: &&Output| output.w.kind().form() == Form::Int8(scaling);
        let same: Vec<&Output> = outputs.iter().filter(is_same).collect();
        let rounds_itself =
            |output: &&Output| linear::rounds_itself(recorder, &output.w.linear(), &x.of());
        let input = match same.iter().all(rounds_itself) {
            true => {
                debug_assert!(added.is_none() || same.is_empty());
                Input::Round {
                    x: x.of(),
                    norm,
                    scratch: rounded,
                }
            }
            false => {
                let reads_halves =
                    |output: &&Output| linear::reads_halves(recorder, &output.w.linear(), x.n_rows);
                let wanted = Wanted {
                    halves: same.iter().any(reads_halves),
                    added: added.as_ref(),
                };
                quantize_for(recorder, x.of(), norm, scaling, wanted, rounded)?;
                Input::Int8(rounded)
            }
        };
        if let [first, second] = same[..]
            && (beside(recorder, [first, second], input)?
                || beside(recorder, [second, first], input)?)
        {
            continue;
        }
        for output in same {
            multiply(recorder, output, input)?;
        }
    }
    Ok(())
}

/// Records two products of a row in one dispatch if that can be; returns whether it can.
fn beside(
    recorder: &mut Recorder,
    products: [&Output; 2],
    input: Input<'_>,
) -> Result<bool, GpuError> {
    let [first, second] = products;
    if first.out.n_rows != 1 || first.epilogue != second.epilogue {
        return Ok(false);
    }
    let weights = products.map(|it| it.w.linear());
    let both = [
        (&weights[0], first.out.of()),
        (&weights[1], second.out.of()),
    ];
    linear::multiply_beside(recorder, both, input, first.epilogue)
}

/// Chooses the experts of a row if there is a choice, as the first product is computed if that can. Returns what remains of
/// the products.
fn chosen_product<'a>(
    recorder: &mut Recorder,
    workspace: &Workspace,
    (x, norm): (&View, Option<&Norm>),
    choice: Option<&(View, experts::Routing)>,
    routes: &Routes,
    outputs: &'a [ExpertOutput],
) -> Result<&'a [ExpertOutput], GpuError> {
    let Some((scores, routing)) = choice else {
        return Ok(outputs);
    };
    if let Some((ExpertOutput { w, out, epilogue }, rest)) = outputs.split_first()
        && linear::can_choose(recorder, w, x.of(), routing)
    {
        let input = (x.of(), norm.map(|(weight, eps)| (weight, *eps)));
        let choice = Choice {
            scores: scores.of(),
            routing,
        };
        let how = (*epilogue, workspace.rounded());
        linear::choose_and_multiply(recorder, w, input, choice, routes.of(), how, out.of())?;
        return Ok(rest);
    }
    experts::route(recorder, scores.of(), None, routing, routes.of())?;
    Ok(outputs)
}

/// One row, and what its experts go on with, is quantized by each product for itself; several are quantized once for all
/// products that use the same format.
fn routed_products(
    recorder: &mut Recorder,
    workspace: &Workspace,
    (x, norm): (&View, Option<&Norm>),
    routes: &Routes,
    outputs: &[ExpertOutput],
) -> Result<(), GpuError> {
    let rounded = workspace.rounded();
    let norm = norm.map(|(weight, eps)| (weight, *eps));
    let per_row = if x.n_rows == routes.n_rows {
        routes.n_used
    } else {
        1
    };
    let mut stored: Option<Scaling> = None;
    for ExpertOutput { w, out, epilogue } in outputs {
        let input = match w.kind().form() {
            Form::Float => match norm {
                Some(norm) => Input::Normed(x.of(), norm),
                None => Input::Float(x.of()),
            },
            Form::Int8(_) if routes.n_rows == 1 => Input::Round {
                x: x.of(),
                norm,
                scratch: rounded,
            },
            Form::Int8(scaling) => {
                if stored != Some(scaling) {
                    quantize(recorder, x.of(), norm, scaling, rounded)?;
                    stored = Some(scaling);
                }
                Input::Int8(rounded)
            }
        };
        linear::multiply_routed(
            recorder,
            w,
            input,
            routes.of(),
            per_row,
            *epilogue,
            out.of(),
        )?;
    }
    Ok(())
}
