//! Scans: heads that remember a matrix, or channels that remember a vector, from position to position.

use super::{SLOTS, State, flag};
use crate::error::{expect, expect_most};
use crate::kernels::{Rows, Sequences, fold, same_rows};
use crate::memory::Buffer;
use crate::shader::{MAMBA, SCAN, SCAN_PREPARE, params};
use crate::{GpuError, Recorder};

/// The most rows of a head's matrix, or elements of a channel's vector.
pub const MAX_ROWS: usize = 256;
/// Invocations that share a column of a matrix.
pub(super) const LANES: usize = 8;
/// Rows that they take at once, four each.
const VECTOR_ROWS: usize = 4 * LANES;
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
        n_sequences: u32,
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
        sequences: u32,
        places: u32,
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

/// What [`scan`] reads besides values.
#[derive(Debug, Clone, Copy)]
pub struct Scan<'a> {
    /// Queries, keys and values, `[n_rows, channels]`.
    pub x: Rows<'a>,
    /// What [`scan_prepare`] gave, `[n_rows, n_heads, 4]`.
    pub gates: &'a Buffer,
    /// Of a state space what inputs are multiplied with where they are added to the output, `[n_heads]`.
    pub d: Option<&'a Buffer>,
}

/// What the gates of a scan follow from.
#[derive(Debug, Clone, Copy)]
pub struct Gates<'a> {
    /// Of the delta rule `alpha`, of a state space its time steps, `[n_rows, n_heads]`.
    pub steps: Rows<'a>,
    /// Of the delta rule, `[n_rows, n_heads]`.
    pub beta: Option<Rows<'a>>,
    /// `[n_heads]`.
    pub a: &'a Buffer,
    /// `[n_heads]`.
    pub dt_bias: &'a Buffer,
}

fn constants(shape: &ScanShape) -> [(&'static str, f64); 4] {
    [
        ("WG", WORKGROUP as f64),
        ("LANES", LANES as f64),
        ("DELTA", flag(shape.is_delta)),
        ("TILED", flag(shape.is_tiled)),
    ]
}

/// Prepares what [`scan`] reads of each row: queries and keys of the delta rule are normalised in place, and gates
/// computed.
///
/// Shapes: `x` is `[n_rows, channels]`, `out` `[n_rows, n_heads, 4]`.
/// Errors: [`GpuError::Shape`] if shapes don't match.
pub fn scan_prepare(
    recorder: &mut Recorder,
    shape: &ScanShape,
    x: Rows<'_>,
    gates: &Gates<'_>,
    out: &Buffer,
) -> Result<(), GpuError> {
    let Gates {
        steps,
        beta,
        a,
        dt_bias,
    } = *gates;
    let (n_rows, n_heads) = (x.n_rows, shape.n_heads);
    x.check("scan: input")?;
    expect("scan: width of the input", shape.channels(), x.width)?;
    let betas = usize::from(beta.is_some());
    expect("scan: betas", usize::from(shape.is_delta), betas)?;
    let nothing = recorder.device().nothing()?;
    for rows in [Some(&steps), beta.as_ref()].into_iter().flatten() {
        rows.check("scan: gates")?;
        same_rows("scan: rows of gates", &x, rows)?;
        expect("scan: gates of a row", n_heads, rows.width)?;
    }
    let beta = beta.unwrap_or(Rows::new(&nothing, 0, 0));
    for vector in [a, dt_bias] {
        expect_most("scan: parameters", (vector.bytes() / 4) as usize, n_heads)?;
    }
    let room = (out.bytes() / 16) as usize;
    expect_most("scan: memory of gates", room, n_rows * n_heads)?;
    if n_rows == 0 || n_heads == 0 {
        return Ok(());
    }
    let [q, k, _] = shape.parts().map(|at| at as u32);
    let params = PrepareParams {
        n_rows: n_rows as u32,
        n_heads: n_heads as u32,
        n_key_heads: shape.n_key_heads as u32,
        key_dim: shape.key_dim as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        q,
        k,
        step_offset: steps.offset as u32,
        step_stride: steps.stride as u32,
        beta_offset: beta.offset as u32,
        beta_stride: beta.stride as u32,
        scale: (1.0 / (shape.key_dim as f64).sqrt()) as f32,
    };
    let bindings = [
        x.buffer.into(),
        steps.buffer.into(),
        beta.buffer.into(),
        a.into(),
        dt_bias.into(),
        out.into(),
    ];
    let grid = fold(n_rows * shape.n_key_heads);
    recorder.dispatch(&SCAN_PREPARE, &constants(shape), &bindings, &params, grid)
}

/// The gated delta rule, as `sterna_kernels::delta`, or the state space of Mamba-2, as `sterna_kernels::ssm`, over the
/// rows of the sequences whose state it is, after [`scan_prepare`].
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
        is_delta,
        ..
    } = *shape;
    if key_dim > MAX_ROWS {
        return Err(too_large(format!("states of {key_dim} rows"), MAX_ROWS));
    }
    let Scan { x, gates, d } = *inputs;
    out.check("scan: output")?;
    expect("scan: width of the output", shape.values(), out.width)?;
    x.check("scan: input")?;
    same_rows("scan: rows of the input", &out, &x)?;
    expect("scan: width of the input", shape.channels(), x.width)?;
    let room = (gates.bytes() / 16) as usize;
    expect_most("scan: gates", room, out.n_rows * n_heads)?;
    let nothing = recorder.device().nothing()?;
    let d = match is_delta {
        true => &nothing,
        false => d.unwrap_or(&nothing),
    };
    if !is_delta {
        expect_most("scan: d", (d.bytes() / 4) as usize, n_heads)?;
    }
    state.check("scan: state", shape.state(), &out)?;
    let Sequences { n, n_rows, .. } = state.sequences;
    if n_rows == 0 || shape.state() == 0 {
        return Ok(());
    }
    let [q, k, v] = shape.parts().map(|at| at as u32);
    let params = ScanParams {
        n_sequences: n as u32,
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
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        x.buffer.into(),
        gates.into(),
        d.into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
        x.buffer.into(),
    ];
    let begins = [x.offset + q as usize, x.offset + k as usize, key_dim];
    let is_aligned = x.stride.is_multiple_of(4) && begins.iter().all(|at| at.is_multiple_of(4));
    let [workgroup, lanes, delta, tiled] = constants(shape);
    let constants = [
        workgroup,
        lanes,
        delta,
        tiled,
        ("VECTORS", key_dim.div_ceil(VECTOR_ROWS) as f64),
        ("EVEN", flag(key_dim.is_multiple_of(VECTOR_ROWS))),
        ("ALIGNED", flag(is_aligned)),
        ("SLOTS", SLOTS as f64),
    ];
    let grid = fold(n * n_heads * value_dim.div_ceil(WORKGROUP / LANES));
    recorder.dispatch(&SCAN, &constants, &bindings, &params, grid)
}

params! {
    MambaParams {
        inner: u32,
        n_sequences: u32,
        state_dim: u32,
        dt_offset: u32,
        dt_stride: u32,
        b_offset: u32,
        b_stride: u32,
        c_offset: u32,
        c_stride: u32,
        x_offset: u32,
        x_stride: u32,
        sequences: u32,
        places: u32,
        first: u32,
        state_len: u32,
    }
}

/// What [`mamba`] reads.
#[derive(Debug, Clone, Copy)]
pub struct Mamba<'a> {
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

/// The selective state space of the first Mamba, as `sterna_kernels::mamba`, over the rows of the sequences whose state it
/// is.
///
/// Shapes: `x`, which outputs replace, is `[n_rows, inner]`; the part of the state is `[inner, state_dim]`.
/// Errors: [`GpuError::Unsupported`] if states have more than [`MAX_ROWS`] elements a channel; [`GpuError::Shape`] if
/// shapes don't match.
/// Exactness: sums over a state in another order. Results don't depend on how positions are divided into calls.
pub fn mamba(
    recorder: &mut Recorder,
    inputs: &Mamba<'_>,
    state: State<'_>,
    x: Rows<'_>,
) -> Result<(), GpuError> {
    let Mamba { dt, b, c, a, d } = *inputs;
    let (inner, state_dim) = (x.width, b.width);
    if state_dim > MAX_ROWS {
        return Err(too_large(format!("states of {state_dim} values"), MAX_ROWS));
    }
    x.check("scan: input")?;
    for (rows, width) in [(&dt, inner), (&b, state_dim), (&c, state_dim)] {
        rows.check("scan: input")?;
        same_rows("scan: rows of the inputs", &x, rows)?;
        expect("scan: width of an input", width, rows.width)?;
    }
    expect_most("scan: a", (a.bytes() / 4) as usize, inner * state_dim)?;
    expect_most("scan: d", (d.bytes() / 4) as usize, inner)?;
    state.check("scan: state", inner * state_dim, &x)?;
    let Sequences { n, n_rows, .. } = state.sequences;
    if n_rows == 0 || inner * state_dim == 0 {
        return Ok(());
    }
    let params = MambaParams {
        inner: inner as u32,
        n_sequences: n as u32,
        state_dim: state_dim as u32,
        dt_offset: dt.offset as u32,
        dt_stride: dt.stride as u32,
        b_offset: b.offset as u32,
        b_stride: b.stride as u32,
        c_offset: c.offset as u32,
        c_stride: c.stride as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        dt.buffer.into(),
        b.buffer.into(),
        c.buffer.into(),
        a.into(),
        d.into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        // Devices may bind no more than eight buffers, so outputs replace inputs.
        x.buffer.into(),
    ];
    let constants = [
        ("WG", WORKGROUP as f64),
        ("LANES", LANES as f64),
        ("ROWS", state_dim.div_ceil(LANES) as f64),
        ("EVEN", flag(state_dim.is_multiple_of(LANES))),
        ("SEVERAL", flag(n_rows > 1)),
        ("SLOTS", SLOTS as f64),
    ];
    let grid = fold(n * inner.div_ceil(WORKGROUP / LANES));
    recorder.dispatch(&MAMBA, &constants, &bindings, &params, grid)
}

pub(super) fn too_large(what: String, most: usize) -> GpuError {
    GpuError::Unsupported {
        what,
        reason: format!("kernels take at most {most}"),
    }
}
