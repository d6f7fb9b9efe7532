//! Time mixing of RWKV, generations 4 to 7, and mixes of a position with the one before.

use super::scan::{LANES, WORKGROUP, too_large};
use super::{MAX_ROWS, SLOTS, State, flag};
use crate::error::{expect, expect_most};
use crate::kernels::{Rows, Sequences, fold, same_rows};
use crate::memory::Buffer;
use crate::shader::{PREVIOUS, TOKEN_SHIFT, WKV, WKV_FINISH, WKV_PREPARE, WKV4, params};
use crate::{GpuError, Recorder};

params! {
    PreviousParams {
        width: u32,
        n_sequences: u32,
        x_offset: u32,
        x_stride: u32,
        out_offset: u32,
        sequences: u32,
        places: u32,
        first: u32,
        state_len: u32,
    }
}

/// `out ←` the rows before the first of each of the sequences whose state it is, which the state has; that becomes the last
/// row.
///
/// Shapes: `x` is `[n_rows, width]`; the part of the state is `[width]`, `out` `[n_all, width]`, of all sequences in the
/// table.
/// Errors: [`GpuError::Shape`] if shapes don't match.
pub fn previous(
    recorder: &mut Recorder,
    x: Rows<'_>,
    state: State<'_>,
    out: &Buffer,
) -> Result<(), GpuError> {
    x.check("position before: rows")?;
    let Sequences { n, n_rows, .. } = state.sequences;
    let (first, end) = state.sequences.in_table();
    expect_most("position before: output", elements(out), end * x.width)?;
    state.check("position before: state", x.width, &x)?;
    if n_rows == 0 || x.width == 0 {
        return Ok(());
    }
    let params = PreviousParams {
        width: x.width as u32,
        n_sequences: n as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        out_offset: (first * x.width) as u32,
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        x.buffer.into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        out.into(),
    ];
    let constants = [("SLOTS", SLOTS as f64)];
    let grid = fold(n * x.width.div_ceil(64));
    recorder.dispatch(&PREVIOUS, &constants, &bindings, &params, grid)
}

params! {
    ShiftParams {
        width: u32,
        n_sequences: u32,
        n_rows: u32,
        sequences: u32,
        previous_offset: u32,
        x_offset: u32,
        x_stride: u32,
        added_offset: u32,
        added_stride: u32,
        out_offset: u32,
        out_stride: u32,
    }
}

/// How a position is mixed with the one before.
#[derive(Debug, Clone, Copy)]
pub struct Shift<'a> {
    /// Whose rows are mixed.
    pub sequences: Sequences<'a>,
    /// What [`previous`] gave, `[n_all, width]`.
    pub previous: &'a Buffer,
    /// `[width]`.
    pub factors: &'a Buffer,
    /// Added to the factors at each position, `[n_rows, width]`.
    pub added: Option<Rows<'a>>,
    /// Whether factors are the share of the position itself, or of the one before.
    pub of_itself: bool,
}

/// Mixes each row of `x` with the one before, as `sterna_kernels::rwkv::token_shift`.
///
/// Shapes: `x` and `out` are `[n_rows, width]`.
/// Errors: [`GpuError::Shape`] if shapes don't match.
pub fn token_shift(
    recorder: &mut Recorder,
    shift: &Shift<'_>,
    x: Rows<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    x.check("token shift: input")?;
    out.check("token shift: output")?;
    same_rows("token shift: rows of the output", &x, &out)?;
    expect("token shift: width of the output", x.width, out.width)?;
    shift.sequences.check(&x)?;
    let Sequences { n, n_rows, .. } = shift.sequences;
    let (first, end) = shift.sequences.in_table();
    for (what, vector, len) in [
        ("token shift: factors", shift.factors, x.width),
        (
            "token shift: position before",
            shift.previous,
            end * x.width,
        ),
    ] {
        expect_most(what, elements(vector), len)?;
    }
    if let Some(added) = &shift.added {
        added.check("token shift: added factors")?;
        same_rows("token shift: rows of added factors", &x, added)?;
        expect("token shift: width of added factors", x.width, added.width)?;
    }
    let nothing = recorder.device().nothing()?;
    let added = shift.added.unwrap_or(Rows::new(&nothing, 0, 0));
    let params = ShiftParams {
        width: x.width as u32,
        n_sequences: n as u32,
        n_rows: n_rows as u32,
        sequences: shift.sequences.header(),
        previous_offset: (first * x.width) as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        added_offset: added.offset as u32,
        added_stride: added.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
    };
    let bindings = [
        x.buffer.into(),
        shift.previous.into(),
        shift.factors.into(),
        added.buffer.into(),
        shift.sequences.table.into(),
        out.buffer.into(),
    ];
    let constants = [
        ("ITSELF", flag(shift.of_itself)),
        ("ADDED", flag(shift.added.is_some())),
    ];
    let grid = fold(n * (n_rows * x.width).div_ceil(64));
    recorder.dispatch(&TOKEN_SHIFT, &constants, &bindings, &params, grid)
}

params! {
    Wkv4Params {
        inner: u32,
        n_sequences: u32,
        r_offset: u32,
        r_stride: u32,
        k_offset: u32,
        k_stride: u32,
        v_offset: u32,
        v_stride: u32,
        out_offset: u32,
        out_stride: u32,
        sequences: u32,
        places: u32,
        first_value: u32,
        state_len: u32,
    }
}

/// What [`wkv4`] reads.
#[derive(Debug, Clone, Copy)]
pub struct Wkv4<'a> {
    /// Receptances, `[n_rows, inner]`.
    pub r: Rows<'a>,
    /// Keys, `[n_rows, inner]`.
    pub k: Rows<'a>,
    /// Values, `[n_rows, inner]`.
    pub v: Rows<'a>,
    /// Weights decay by `e^(−e^decay)`, `[inner]`.
    pub decay: &'a Buffer,
    /// What keys have besides at their own position, `[inner]`.
    pub first: &'a Buffer,
}

/// Time mixing of generation 4, as `sterna_kernels::rwkv::wkv4`, over the rows of the sequences whose state it is.
///
/// Shapes: `out` is `[n_rows, inner]`; the part of the state is `[3, inner]`.
/// Errors: [`GpuError::Shape`] if shapes don't match.
/// Exactness: results don't depend on how positions are divided into calls.
pub fn wkv4(
    recorder: &mut Recorder,
    inputs: &Wkv4<'_>,
    state: State<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Wkv4 {
        r,
        k,
        v,
        decay,
        first,
    } = *inputs;
    let inner = out.width;
    check_like(&out, [&r, &k, &v])?;
    for vector in [decay, first] {
        expect_most("time mixing: factors", elements(vector), inner)?;
    }
    state.check("time mixing: state", 3 * inner, &out)?;
    let Sequences { n, n_rows, .. } = state.sequences;
    if n_rows == 0 || inner == 0 {
        return Ok(());
    }
    let params = Wkv4Params {
        inner: inner as u32,
        n_sequences: n as u32,
        r_offset: r.offset as u32,
        r_stride: r.stride as u32,
        k_offset: k.offset as u32,
        k_stride: k.stride as u32,
        v_offset: v.offset as u32,
        v_stride: v.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        first_value: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        r.buffer.into(),
        k.buffer.into(),
        v.buffer.into(),
        decay.into(),
        first.into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
    ];
    let constants = [("SLOTS", SLOTS as f64)];
    let grid = fold(n * inner.div_ceil(64));
    recorder.dispatch(&WKV4, &constants, &bindings, &params, grid)
}

/// The heads of generations 5 to 7, each of which remembers a matrix, `[head_dim, head_dim]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WkvShape {
    /// Heads.
    pub n_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether it is generation 7.
    pub is_seventh: bool,
}

impl WkvShape {
    /// Channels.
    pub fn inner(&self) -> usize {
        self.n_heads * self.head_dim
    }

    /// Elements of what heads remember.
    pub fn state(&self) -> usize {
        self.inner() * self.head_dim
    }

    /// What is prepared for `n_rows` is that of rows `[n_rows, 4 · inner]`, on whole elements: returns where.
    fn prepared(&self, rows: &Rows<'_>, n_rows: usize) -> Result<u32, GpuError> {
        rows.check("time mixing: what is prepared")?;
        expect("time mixing: prepared rows", n_rows, rows.n_rows)?;
        expect("time mixing: prepared width", 4 * self.inner(), rows.width)?;
        expect("time mixing: prepared stride", rows.width, rows.stride)?;
        expect("time mixing: prepared offset", 0, rows.offset % 4)?;
        Ok((rows.offset / 4) as u32)
    }
}

params! {
    WkvPrepareParams {
        n_rows: u32,
        n_heads: u32,
        head_dim: u32,
        k_offset: u32,
        k_stride: u32,
        decay_offset: u32,
        decay_stride: u32,
        rate_offset: u32,
        rate_stride: u32,
    }
}

/// What generations 5 to 7 have besides receptances, keys and values.
#[derive(Debug, Clone, Copy)]
pub enum WkvInputs<'a> {
    /// The fifth: `x` of decays, which are `e^(−e^x)`, and factors on keys at their own position, `[inner]` each.
    Fixed(&'a Buffer, &'a Buffer),
    /// The sixth: the same decays of each position, `[n_rows, inner]`, and factors.
    Given(Rows<'a>, &'a Buffer),
    /// The seventh.
    Seventh {
        /// Of decays, `[n_rows, inner]`.
        decay: Rows<'a>,
        /// How much of what keys hold is taken away, before a sigmoid, `[n_rows, inner]`.
        rate: Rows<'a>,
        /// Factors on keys in directions that are forgotten, `[inner]`.
        k_k: &'a Buffer,
        /// How far rates change keys, `[inner]`.
        k_a: &'a Buffer,
    },
}

/// Prepares what [`wkv`] and [`wkv_finish`] read: of each channel of each row four values.
///
/// Shapes: `k` is `[n_rows, inner]`, `out` contiguous rows from the beginning of its buffer, `[n_rows, 4 · inner]`.
/// Errors: [`GpuError::Shape`] if shapes don't match, or the inputs are another generation's.
pub fn wkv_prepare(
    recorder: &mut Recorder,
    shape: &WkvShape,
    k: Rows<'_>,
    inputs: &WkvInputs<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let (n_rows, inner) = (k.n_rows, shape.inner());
    k.check("time mixing: keys")?;
    expect("time mixing: width of keys", inner, k.width)?;
    let at = shape.prepared(&out, n_rows)?;
    expect("time mixing: beginning of what is prepared", 0, at as usize)?;
    let nothing = recorder.device().nothing()?;
    let none = Rows::new(&nothing, 0, 0);
    let (decay, rate, first, k_a) = match *inputs {
        WkvInputs::Fixed(decay, first) => {
            expect_most("time mixing: decays", elements(decay), inner)?;
            let decay = Rows {
                stride: 0,
                ..Rows::new(decay, n_rows, inner)
            };
            (decay, none, first, None)
        }
        WkvInputs::Given(decay, first) => {
            check_like(&k, [&decay])?;
            (decay, none, first, None)
        }
        WkvInputs::Seventh {
            decay,
            rate,
            k_k,
            k_a,
        } => {
            check_like(&k, [&decay, &rate])?;
            (decay, rate, k_k, Some(k_a))
        }
    };
    expect(
        "time mixing: inputs of generation 7",
        usize::from(shape.is_seventh),
        usize::from(k_a.is_some()),
    )?;
    let k_a = k_a.unwrap_or(first);
    for vector in [first, k_a] {
        expect_most("time mixing: factors", elements(vector), inner)?;
    }
    if n_rows == 0 || inner == 0 {
        return Ok(());
    }
    let params = WkvPrepareParams {
        n_rows: n_rows as u32,
        n_heads: shape.n_heads as u32,
        head_dim: shape.head_dim as u32,
        k_offset: k.offset as u32,
        k_stride: k.stride as u32,
        decay_offset: decay.offset as u32,
        decay_stride: decay.stride as u32,
        rate_offset: rate.offset as u32,
        rate_stride: rate.stride as u32,
    };
    let bindings = [
        k.buffer.into(),
        decay.buffer.into(),
        rate.buffer.into(),
        first.into(),
        k_a.into(),
        out.buffer.into(),
    ];
    let constants = [
        ("WG", WORKGROUP as f64),
        ("SEVENTH", flag(shape.is_seventh)),
    ];
    let grid = fold(n_rows * shape.n_heads);
    recorder.dispatch(&WKV_PREPARE, &constants, &bindings, &params, grid)
}

params! {
    WkvParams {
        n_sequences: u32,
        n_heads: u32,
        head_dim: u32,
        r_offset: u32,
        r_stride: u32,
        prepared: u32,
        v_offset: u32,
        v_stride: u32,
        out_offset: u32,
        out_stride: u32,
        sequences: u32,
        places: u32,
        first: u32,
        state_len: u32,
    }
}

/// What [`wkv`] and [`wkv_finish`] read.
#[derive(Debug, Clone, Copy)]
pub struct Wkv<'a> {
    /// Receptances, `[n_rows, inner]`.
    pub r: Rows<'a>,
    /// What [`wkv_prepare`] gave, `[n_rows, 4 · inner]`.
    pub prepared: Rows<'a>,
    /// Values, `[n_rows, inner]`.
    pub v: Rows<'a>,
}

/// What heads give in generations 5 to 7, as `sterna_kernels::rwkv::wkv6` and `wkv7` before the norm, over the rows of the
/// sequences whose state it is.
///
/// Shapes: `out` is `[n_rows, inner]`; the part of the state has [`WkvShape::state`] values.
/// Errors: [`GpuError::Unsupported`] if heads have more than [`MAX_ROWS`] elements; [`GpuError::Shape`] if shapes don't
/// match.
/// Exactness: sums over rows in another order. Results don't depend on how positions are divided into calls.
pub fn wkv(
    recorder: &mut Recorder,
    shape: &WkvShape,
    inputs: &Wkv<'_>,
    state: State<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let WkvShape {
        n_heads,
        head_dim,
        is_seventh,
    } = *shape;
    if head_dim > MAX_ROWS {
        return Err(too_large(format!("states of {head_dim} rows"), MAX_ROWS));
    }
    let Wkv { r, prepared, v } = *inputs;
    expect("time mixing: width", shape.inner(), out.width)?;
    check_like(&out, [&r, &v])?;
    let at = shape.prepared(&prepared, out.n_rows)?;
    state.check("time mixing: state", shape.state(), &out)?;
    let Sequences { n, n_rows, .. } = state.sequences;
    if n_rows == 0 || shape.state() == 0 {
        return Ok(());
    }
    let params = WkvParams {
        n_sequences: n as u32,
        n_heads: n_heads as u32,
        head_dim: head_dim as u32,
        r_offset: r.offset as u32,
        r_stride: r.stride as u32,
        prepared: at,
        v_offset: v.offset as u32,
        v_stride: v.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let bindings = [
        r.buffer.into(),
        prepared.buffer.into(),
        v.buffer.into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
    ];
    let constants = [
        ("WG", WORKGROUP as f64),
        ("LANES", LANES as f64),
        ("SEVENTH", flag(is_seventh)),
        ("ROWS", head_dim.div_ceil(LANES) as f64),
        ("EVEN", flag(head_dim.is_multiple_of(LANES))),
        ("SEVERAL", flag(n_rows > 1)),
        ("SLOTS", SLOTS as f64),
    ];
    let grid = fold(n * n_heads * head_dim.div_ceil(WORKGROUP / LANES));
    recorder.dispatch(&WKV, &constants, &bindings, &params, grid)
}

params! {
    WkvFinishParams {
        n_rows: u32,
        n_heads: u32,
        head_dim: u32,
        x_offset: u32,
        x_stride: u32,
        gate_offset: u32,
        gate_stride: u32,
        r_offset: u32,
        r_stride: u32,
        v_offset: u32,
        v_stride: u32,
        prepared: u32,
        eps: f32,
    }
}

/// The norm of what each head gives, and its gates.
#[derive(Debug, Clone, Copy)]
pub struct WkvFinish<'a> {
    /// `[inner]`.
    pub weight: &'a Buffer,
    /// `[inner]`.
    pub bias: &'a Buffer,
    /// Epsilon of the norm.
    pub eps: f32,
    /// `[n_rows, inner]`.
    pub gate: Rows<'a>,
    /// Of generation 7, what a position adds of its own values, `[inner]`.
    pub r_k: Option<&'a Buffer>,
}

/// `x ← norm(x) · silu(gate)`, or of generation 7 `(norm(x) + (r · (k ∘ r_k)) v) · gate`, each head by itself.
///
/// Shapes: `x` is `[n_rows, inner]`.
/// Errors: [`GpuError::Shape`] if shapes don't match.
/// Exactness: as `sterna_kernels::rwkv`, except for the order of sums.
pub fn wkv_finish(
    recorder: &mut Recorder,
    shape: &WkvShape,
    inputs: &Wkv<'_>,
    finish: &WkvFinish<'_>,
    x: Rows<'_>,
) -> Result<(), GpuError> {
    let Wkv { r, prepared, v } = *inputs;
    let inner = shape.inner();
    expect("time mixing: width", inner, x.width)?;
    check_like(&x, [&r, &v, &finish.gate])?;
    let at = shape.prepared(&prepared, x.n_rows)?;
    expect(
        "time mixing: factors on receptances",
        usize::from(shape.is_seventh),
        usize::from(finish.r_k.is_some()),
    )?;
    let r_k = finish.r_k.unwrap_or(finish.weight);
    for vector in [finish.weight, finish.bias, r_k] {
        expect_most("time mixing: norm", elements(vector), inner)?;
    }
    if x.n_rows == 0 || inner == 0 {
        return Ok(());
    }
    let params = WkvFinishParams {
        n_rows: x.n_rows as u32,
        n_heads: shape.n_heads as u32,
        head_dim: shape.head_dim as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        gate_offset: finish.gate.offset as u32,
        gate_stride: finish.gate.stride as u32,
        r_offset: r.offset as u32,
        r_stride: r.stride as u32,
        v_offset: v.offset as u32,
        v_stride: v.stride as u32,
        prepared: at,
        eps: finish.eps,
    };
    let bindings = [
        x.buffer.into(),
        finish.weight.into(),
        finish.bias.into(),
        finish.gate.buffer.into(),
        r.buffer.into(),
        prepared.buffer.into(),
        v.buffer.into(),
        r_k.into(),
    ];
    let constants = [
        ("WG", WORKGROUP as f64),
        ("SEVENTH", flag(shape.is_seventh)),
    ];
    let grid = fold(x.n_rows * shape.n_heads);
    recorder.dispatch(&WKV_FINISH, &constants, &bindings, &params, grid)
}

/// Errors unless all are rows of the same shape within their buffers.
fn check_like<const N: usize>(x: &Rows<'_>, others: [&Rows<'_>; N]) -> Result<(), GpuError> {
    x.check("time mixing: rows")?;
    for other in others {
        other.check("time mixing: rows")?;
        same_rows("time mixing: rows of an input", x, other)?;
        expect("time mixing: width of an input", x.width, other.width)?;
    }
    Ok(())
}

fn elements(vector: &Buffer) -> usize {
    (vector.bytes() / 4) as usize
}
