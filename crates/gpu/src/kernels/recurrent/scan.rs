//! Scans: heads that remember a matrix, or channels that remember a vector, from position to position.

use super::{SLOTS, State};
use crate::error::{expect, expect_most};
use crate::kernels::{Rows, elementwise, fold, same_rows};
use crate::memory::Buffer;
use crate::shader::{MAMBA, SCAN, SCAN_PREPARE, params};
use crate::{GpuError, Recorder};

/// The most rows of a head's matrix, or elements of a channel's vector.
pub const MAX_ROWS: usize = 256;
/// Invocations that share a column of a matrix.
pub(super) const LANES: usize = 8;
/// Invocations of a workgroup.
pub(super) const WORKGROUP: usize = 64;

params! {
    PrepareParams {
        n_rows: u32,
        n_heads: u32,
        n_key_heads: u32,
        key_dim: u32,
        x_offset: u32,
        x_stride: u32,
        q: u32,
        k: u32,
        step_offset: u32,
        step_stride: u32,
        beta_offset: u32,
        beta_stride: u32,
        scale: f32,
    }
}

params! {
    ScanParams {
        n_rows: u32,
        n_heads: u32,
        n_key_heads: u32,
        key_dim: u32,
        value_dim: u32,
        x_offset: u32,
        x_stride: u32,
        q: u32,
        k: u32,
        v: u32,
        out_offset: u32,
        out_stride: u32,
        position: u32,
        first: u32,
        state_len: u32,
    }
}

/// The heads of a scan, each of which remembers a matrix, `[key_dim, value_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScanShape {
    /// Heads of values, each with a state.
    pub n_heads: usize,
    /// Heads of queries and keys; divides `n_heads`.
    pub n_key_heads: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Whether the value heads of a key head are as many apart as there are key heads; else they are adjacent.
    pub is_tiled: bool,
    /// Whether it is the gated delta rule, whose rows are queries, keys and values side by side; else the state space
    /// of Mamba-2, whose rows are values, keys (`B`) and queries (`C`).
    pub is_delta: bool,
}

impl ScanShape {
    fn keys(&self) -> usize {
        self.n_key_heads * self.key_dim
    }

    fn values(&self) -> usize {
        self.n_heads * self.value_dim
    }

    /// Elements of queries, keys and values of a position.
    pub fn channels(&self) -> usize {
        2 * self.keys() + self.values()
    }

    /// Elements of a state.
    pub fn state(&self) -> usize {
        self.values() * self.key_dim
    }

    /// Where queries, keys and values begin in a row.
    pub(super) fn parts(&self) -> [usize; 3] {
        match self.is_delta {
            true => [0, self.keys(), 2 * self.keys()],
            false => [self.values() + self.keys(), self.values(), 0],
        }
    }
}

/// What a scan reads, and memory for it.
#[derive(Debug, Clone, Copy)]
pub struct Scan<'a> {
    /// Queries, keys and values, `[n_rows, channels]`. Those of the delta rule are normalised in place.
    pub x: Rows<'a>,
    /// What gates follow from.
    pub recurrence: Recurrence<'a>,
    /// `[n_heads]`.
    pub a: &'a Buffer,
    /// `[n_heads]`.
    pub dt_bias: &'a Buffer,
    /// Scratch memory, `[n_rows, n_heads, 4]`.
    pub gates: &'a Buffer,
}

/// What gates of a [`Scan`] follow from.
#[derive(Debug, Clone, Copy)]
pub enum Recurrence<'a> {
    /// Of the delta rule: `alpha` and `beta`, `[n_rows, n_heads]` each.
    Delta(Rows<'a>, Rows<'a>),
    /// Of a state space: time steps, `[n_rows, n_heads]`, and what inputs are multiplied with where they are added to the
    /// output, `[n_heads]`.
    Ssm(Rows<'a>, &'a Buffer),
}

/// The gated delta rule, as `sterna_kernels::delta`, or the state space of Mamba-2, as `sterna_kernels::ssm`.
///
/// Shapes: `out` is `[n_rows, n_heads · value_dim]`; the part of the state has [`ScanShape::state`] values.
/// Errors: [`GpuError::Unsupported`] if keys have more than [`MAX_ROWS`] elements; [`GpuError::Shape`] if shapes
/// don't match.
/// Exactness: the product of query and key is taken apart from that with the state, so results differ by rounding. They
/// don't depend on how positions are divided into calls.
pub fn scan(
    recorder: &mut Recorder,
    shape: &ScanShape,
    inputs: &Scan<'_>,
    state: State<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
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
    let Scan {
        x,
        recurrence,
        a,
        dt_bias,
        gates,
    } = *inputs;
    let n_rows = out.n_rows;
    out.check("scan: output")?;
    expect("scan: width of the output", shape.values(), out.width)?;
    x.check("scan: input")?;
    same_rows("scan: rows of the input", &out, &x)?;
    expect("scan: width of the input", shape.channels(), x.width)?;
    let nothing = recorder.device().nothing()?;
    let (step, beta, d) = match recurrence {
        Recurrence::Delta(alpha, beta) => (alpha, beta, &nothing),
        Recurrence::Ssm(dt, d) => (
            dt,
            Rows {
                buffer: &nothing,
                ..dt
            },
            d,
        ),
    };
    for rows in [&step, &beta] {
        same_rows("scan: rows of gates", &out, rows)?;
        expect("scan: gates of a row", n_heads, rows.width)?;
    }
    step.check("scan: gates")?;
    if is_delta {
        beta.check("scan: gates")?;
    } else {
        expect_most("scan: d", (d.bytes() / 4) as usize, n_heads)?;
    }
    for vector in [a, dt_bias] {
        expect_most("scan: parameters", (vector.bytes() / 4) as usize, n_heads)?;
    }
    let room = (gates.bytes() / 16) as usize;
    expect_most("scan: memory of gates", room, n_rows * n_heads)?;
    state.check("scan: state", shape.state())?;
    if n_rows == 0 || shape.state() == 0 {
        return Ok(());
    }
    let [q, k, v] = shape.parts().map(|at| at as u32);
    let constants = [
        ("WG", WORKGROUP as f64),
        ("LANES", LANES as f64),
        ("DELTA", f64::from(u8::from(is_delta))),
        ("TILED", f64::from(u8::from(is_tiled))),
    ];
    let params = PrepareParams {
        n_rows: n_rows as u32,
        n_heads: n_heads as u32,
        n_key_heads: n_key_heads as u32,
        key_dim: key_dim as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        q,
        k,
        step_offset: step.offset as u32,
        step_stride: step.stride as u32,
        beta_offset: beta.offset as u32,
        beta_stride: beta.stride as u32,
        scale: (1.0 / (key_dim as f64).sqrt()) as f32,
    };
    let bindings = [
        x.buffer.into(),
        step.buffer.into(),
        beta.buffer.into(),
        a.into(),
        dt_bias.into(),
        gates.into(),
    ];
    let grid = fold(n_rows * n_key_heads);
    recorder.dispatch(&SCAN_PREPARE, &constants, &bindings, &params, grid)?;
    let params = ScanParams {
        n_rows: n_rows as u32,
        n_heads: n_heads as u32,
        n_key_heads: n_key_heads as u32,
        key_dim: key_dim as u32,
        value_dim: value_dim as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        q,
        k,
        v,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        position: state.position.index as u32,
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        x.buffer.into(),
        gates.into(),
        d.into(),
        state.position.buffer.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
    ];
    let [workgroup, lanes, delta, tiled] = constants;
    let rows = ("ROWS", key_dim.div_ceil(LANES) as f64);
    let slots = ("SLOTS", SLOTS as f64);
    let constants = [workgroup, lanes, delta, tiled, rows, slots];
    let grid = fold(n_heads * value_dim.div_ceil(WORKGROUP / LANES));
    recorder.dispatch(&SCAN, &constants, &bindings, &params, grid)
}

params! {
    MambaParams {
        inner: u32,
        n_rows: u32,
        state_dim: u32,
        dt_offset: u32,
        dt_stride: u32,
        b_offset: u32,
        b_stride: u32,
        c_offset: u32,
        c_stride: u32,
        out_offset: u32,
        out_stride: u32,
        position: u32,
        first: u32,
        state_len: u32,
    }
}

/// What [`mamba`] reads.
#[derive(Debug, Clone, Copy)]
pub struct Mamba<'a> {
    /// `[n_rows, inner]`.
    pub x: Rows<'a>,
    /// `[n_rows, inner]`.
    pub dt: Rows<'a>,
    /// `[n_rows, state_dim]`.
    pub b: Rows<'a>,
    /// `[n_rows, state_dim]`.
    pub c: Rows<'a>,
    /// `[inner, state_dim]`.
    pub a: &'a Buffer,
    /// `[inner]`.
    pub d: &'a Buffer,
}

/// The selective state space of the first Mamba, as `sterna_kernels::mamba`.
///
/// Shapes: `out` is `[n_rows, inner]`; the part of the state is `[inner, state_dim]`.
/// Errors: [`GpuError::Unsupported`] if states have more than [`MAX_ROWS`] elements a channel; [`GpuError::Shape`] if
/// shapes don't match.
/// Exactness: sums over a state in another order. Results don't depend on how positions are divided into calls.
pub fn mamba(
    recorder: &mut Recorder,
    inputs: &Mamba<'_>,
    state: State<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Mamba { x, dt, b, c, a, d } = *inputs;
    let (inner, state_dim) = (out.width, b.width);
    if state_dim > MAX_ROWS {
        return Err(too_large(format!("states of {state_dim} values"), MAX_ROWS));
    }
    out.check("scan: output")?;
    for (rows, width) in [(&dt, inner), (&b, state_dim), (&c, state_dim)] {
        rows.check("scan: input")?;
        same_rows("scan: rows of the inputs", &out, rows)?;
        expect("scan: width of an input", width, rows.width)?;
    }
    expect_most("scan: a", (a.bytes() / 4) as usize, inner * state_dim)?;
    expect_most("scan: d", (d.bytes() / 4) as usize, inner)?;
    state.check("scan: state", inner * state_dim)?;
    if out.n_rows == 0 || inner * state_dim == 0 {
        return Ok(());
    }
    // Devices may bind no more than eight buffers, so outputs replace inputs.
    elementwise::copy(recorder, out, x)?;
    let params = MambaParams {
        inner: inner as u32,
        n_rows: out.n_rows as u32,
        state_dim: state_dim as u32,
        dt_offset: dt.offset as u32,
        dt_stride: dt.stride as u32,
        b_offset: b.offset as u32,
        b_stride: b.stride as u32,
        c_offset: c.offset as u32,
        c_stride: c.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        position: state.position.index as u32,
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        dt.buffer.into(),
        b.buffer.into(),
        c.buffer.into(),
        a.into(),
        d.into(),
        state.position.buffer.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
    ];
    let constants = [
        ("WG", WORKGROUP as f64),
        ("LANES", LANES as f64),
        ("ROWS", state_dim.div_ceil(LANES) as f64),
        ("SLOTS", SLOTS as f64),
    ];
    let grid = fold(inner.div_ceil(WORKGROUP / LANES));
    recorder.dispatch(&MAMBA, &constants, &bindings, &params, grid)
}

pub(super) fn too_large(what: String, most: usize) -> GpuError {
    GpuError::Unsupported {
        what,
        reason: format!("kernels take at most {most}"),
    }
}
