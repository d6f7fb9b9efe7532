//! One position of a layer with a scan, in one dispatch.

use super::scan::{LANES, MAX_ROWS, WORKGROUP, too_large};
use super::{MAX_TAPS, SLOTS, ScanShape, State, flag};
use crate::error::{expect, expect_most};
use crate::kernels::{Rows, fold, same_rows};
use crate::memory::Buffer;
use crate::shader::{SCAN_STEP, params};
use crate::{Device, GpuError, Limits, Recorder};

params! {
    StepParams {
        n_heads: u32,
        n_key_heads: u32,
        key_dim: u32,
        value_dim: u32,
        channels: u32,
        n_sequences: u32,
        x_offset: u32,
        x_stride: u32,
        q: u32,
        k: u32,
        v: u32,
        gate_offset: u32,
        gate_stride: u32,
        step_offset: u32,
        step_stride: u32,
        beta_offset: u32,
        beta_stride: u32,
        out_offset: u32,
        out_stride: u32,
        bias: u32,
        a: u32,
        dt_bias: u32,
        last: u32,
        sequences: u32,
        places: u32,
        window: u32,
        first: u32,
        state_len: u32,
        scale: f32,
        eps: f32,
    }
}

/// The vectors of a layer that [`step`] reads.
#[derive(Debug, Clone, Copy)]
pub struct StepVectors<'a> {
    /// `[channels, n_taps]`, the earliest position first.
    pub taps: &'a Buffer,
    /// Positions that the convolution covers.
    pub n_taps: usize,
    /// Added before its activation, `[channels]`.
    pub bias: Option<&'a Buffer>,
    /// `[n_heads]`.
    pub a: &'a Buffer,
    /// `[n_heads]`.
    pub dt_bias: &'a Buffer,
    /// Of the delta rule the norm of what heads give, `[value_dim]`; of a state space `d`, `[n_heads]`.
    pub last: &'a Buffer,
}

/// Copies of a layer's [`StepVectors`], one after the other in one buffer: devices may bind no more than eight. Two are
/// equal if they are the same memory.
#[derive(Debug, Clone, PartialEq)]
pub struct StepWeights {
    shape: ScanShape,
    n_taps: usize,
    has_bias: bool,
    values: Buffer,
    /// Where bias, `a`, `dt_bias` and the last begin.
    parts: [usize; 4],
}

impl StepWeights {
    /// Copies those of a layer of `shape`.
    ///
    /// Errors: [`GpuError::Unsupported`] beyond [`MAX_TAPS`]; [`GpuError::Shape`] if a vector is too short;
    /// [`GpuError::OutOfMemory`].
    pub fn new(
        device: &Device,
        shape: &ScanShape,
        vectors: &StepVectors<'_>,
    ) -> Result<StepWeights, GpuError> {
        let StepVectors {
            taps,
            n_taps,
            bias,
            a,
            dt_bias,
            last,
        } = *vectors;
        if n_taps == 0 || n_taps > MAX_TAPS {
            return Err(too_large(
                format!("a convolution of {n_taps} positions"),
                MAX_TAPS,
            ));
        }
        let n_last = match shape.is_delta {
            true => shape.value_dim,
            false => shape.n_heads,
        };
        let all = [
            (Some(taps), shape.channels() * n_taps),
            (bias, shape.channels()),
            (Some(a), shape.n_heads),
            (Some(dt_bias), shape.n_heads),
            (Some(last), n_last),
        ];
        let mut ends = [0; 5];
        let mut end = 0;
        for ((vector, len), place) in all.iter().zip(&mut ends) {
            if let Some(vector) = vector {
                expect_most("step: weights", (vector.bytes() / 4) as usize, *len)?;
                end += len;
            }
            *place = end;
        }
        let values = device.buffer("weights", end as u64 * 4)?;
        for ((vector, len), end) in all.iter().zip(ends) {
            if let Some(vector) = vector {
                let (to, bytes) = ((end - len) as u64 * 4, *len as u64 * 4);
                device.copy((vector, 0), (&values, to), bytes)?;
            }
        }
        let [bias_at, a_at, dt_bias_at, last_at, _] = ends;
        Ok(StepWeights {
            shape: *shape,
            n_taps,
            has_bias: bias.is_some(),
            values,
            parts: [bias_at, a_at, dt_bias_at, last_at],
        })
    }
}

/// What a step reads of positions, rows of several sequences.
#[derive(Debug, Clone, Copy)]
pub struct Step<'a> {
    /// Queries, keys and values as the projection computed them, `[n_rows, channels]`.
    pub x: Rows<'a>,
    /// Gates of the output, `[n_rows, n_heads · value_dim]`.
    pub gate: Rows<'a>,
    /// Of the delta rule `alpha`, of a state space its time steps, `[n_rows, n_heads]`.
    pub steps: Rows<'a>,
    /// Of the delta rule, `[n_rows, n_heads]`.
    pub beta: Option<Rows<'a>>,
    /// Epsilon of the norm after the delta rule.
    pub eps: f32,
}

/// Workgroups that a device has enough to do with.
const MANY_WORKGROUPS: usize = 2048;

/// Invocations of a workgroup, and in how many turns it takes as many columns, for `n` sequences. The heads of the delta
/// rule are normalised, and are one workgroup's; of a state space a workgroup takes more columns where there are many, as each
/// convolves queries and keys for itself.
fn launch(limits: &Limits, shape: &ScanShape, n: usize) -> (usize, usize) {
    if !shape.is_delta {
        let most = shape.value_dim.div_ceil(WORKGROUP / LANES).max(1);
        let n_workgroups = n * shape.n_heads * most;
        let turns = (n_workgroups / MANY_WORKGROUPS).clamp(1, most);
        return (WORKGROUP, 1 << turns.ilog2());
    }
    let most = 1 << limits.workgroup_len.clamp(64, 1024).ilog2();
    let workgroup = (shape.value_dim * LANES)
        .next_power_of_two()
        .clamp(WORKGROUP, most);
    (workgroup, shape.value_dim.div_ceil(workgroup / LANES))
}

/// Whether a device has the shared memory for a [`step`] of `shape`.
pub fn can_step(limits: &Limits, shape: &ScanShape) -> bool {
    let (workgroup, _) = launch(limits, shape, 1);
    // Twelve bytes an invocation for reductions, besides a query, a key and what a head gives.
    let values = if shape.is_delta { shape.value_dim } else { 1 };
    let words = 3 * workgroup + 2 * shape.key_dim.min(MAX_ROWS);
    words.saturating_add(values) <= limits.workgroup_bytes as usize / 4
}

/// One position of each of the sequences whose state it is, in a layer: [`convolve`](super::convolve), [`scan`](super::scan), and what comes after it. Of the delta
/// rule each head of its output is normalised, and multiplied by `silu(gate)`; that of a state space is multiplied only.
///
/// Shapes: `out` is `[n_rows, n_heads · value_dim]`, of which those sequences have one row each. The part of the state is that of the convolution and, after it,
/// that of the scan.
/// Errors: [`GpuError::Unsupported`] if keys have more than [`MAX_ROWS`] elements, or not [`can_step`];
/// [`GpuError::Shape`] if shapes don't match.
/// Exactness: that of these one after the other, except for the order of sums.
pub fn step(
    recorder: &mut Recorder,
    weights: &StepWeights,
    inputs: &Step<'_>,
    state: State<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let shape = &weights.shape;
    let ScanShape {
        n_heads,
        n_key_heads,
        key_dim,
        value_dim,
        is_tiled,
        is_delta,
    } = *shape;
    if key_dim > MAX_ROWS {
        return Err(too_large(format!("states of {key_dim} rows"), MAX_ROWS));
    }
    let limits = recorder.device().limits();
    if !can_step(limits, shape) {
        return Err(GpuError::Unsupported {
            what: format!("a step of heads of {value_dim} values"),
            reason: "they exceed the device's shared memory".into(),
        });
    }
    let Step {
        x,
        gate,
        steps,
        beta,
        eps,
    } = *inputs;
    let nothing = recorder.device().nothing()?;
    let no_beta = Rows::new(&nothing, out.n_rows, 0);
    let values = n_heads * value_dim;
    let betas = if is_delta { n_heads } else { 0 };
    let beta = beta.unwrap_or(no_beta);
    for (what, rows, width) in [
        ("step: input", &x, shape.channels()),
        ("step: gates", &gate, values),
        ("step: time steps", &steps, n_heads),
        ("step: betas", &beta, betas),
        ("step: output", &out, values),
    ] {
        rows.check(what)?;
        same_rows(what, &out, rows)?;
        expect(what, width, rows.width)?;
    }
    let window = (weights.n_taps - 1) * shape.channels();
    state.check("step: state", window + shape.state(), &out)?;
    expect("step: rows of a sequence", 1, state.sequences.n_rows)?;
    if shape.state() == 0 {
        return Ok(());
    }
    let (workgroup, turns) = launch(limits, shape, state.sequences.n);
    let [q, k, v] = shape.parts().map(|at| at as u32);
    let [bias, a, dt_bias, last] = weights.parts.map(|at| at as u32);
    let params = StepParams {
        n_heads: n_heads as u32,
        n_key_heads: n_key_heads as u32,
        key_dim: key_dim as u32,
        value_dim: value_dim as u32,
        channels: shape.channels() as u32,
        n_sequences: state.sequences.n as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        q,
        k,
        v,
        gate_offset: gate.offset as u32,
        gate_stride: gate.stride as u32,
        step_offset: steps.offset as u32,
        step_stride: steps.stride as u32,
        beta_offset: beta.offset as u32,
        beta_stride: beta.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        bias,
        a,
        dt_bias,
        last,
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        window: state.first as u32,
        first: (state.first + window) as u32,
        state_len: state.layer.len as u32,
        scale: (1.0 / (key_dim as f64).sqrt()) as f32,
        eps,
    };
    let bindings = [
        x.buffer.into(),
        gate.buffer.into(),
        steps.buffer.into(),
        beta.buffer.into(),
        (&weights.values).into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
    ];
    let constants = [
        ("WG", workgroup as f64),
        ("LANES", LANES as f64),
        ("DELTA", flag(is_delta)),
        ("TILED", flag(is_tiled)),
        ("BIAS", flag(weights.has_bias)),
        ("ROWS", key_dim.div_ceil(LANES) as f64),
        ("EVEN", flag(key_dim.is_multiple_of(LANES))),
        ("TAPS", weights.n_taps as f64),
        ("TURNS", turns as f64),
        ("SLOTS", SLOTS as f64),
        ("KEYS", 2.0 * key_dim as f64),
        ("VALUES", if is_delta { value_dim as f64 } else { 1.0 }),
    ];
    let grid = fold(state.sequences.n * n_heads * value_dim.div_ceil(turns * workgroup / LANES));
    recorder.dispatch(&SCAN_STEP, &constants, &bindings, &params, grid)
}
