//! Element-wise operations.

pub use sterna_format::model::Activation;

use super::{Rows, fold, same_rows};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{ELEMENTWISE, SIGMOID_GATE, params};
use crate::{GpuError, Recorder};

params! {
    ElementwiseParams {
        width: u32,
        len: u32,
        x_offset: u32,
        x_stride: u32,
        y_offset: u32,
        y_stride: u32,
        factor: f32,
    }
}

#[derive(Debug, Clone, Copy)]
enum Op {
    Add,
    Scale(f32),
    Softcap(f32),
    Copy,
    Gate(Activation),
    GateBy(Activation),
    Function(Function),
    Multiply,
}

/// A function of single values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Function {
    /// The hyperbolic tangent.
    Tanh,
    /// `1 / (1 + e^−x)`.
    Sigmoid,
    /// An activation, of a gate for 1.
    Activation(Activation),
}

/// `x ← x + y`. Errors: [`GpuError::Shape`] if the shapes differ, or both are in one buffer.
pub fn add(recorder: &mut Recorder, x: Rows<'_>, y: Rows<'_>) -> Result<(), GpuError> {
    apply(recorder, Op::Add, x, Some(y))
}

/// `x[t] ← x[t] + bias`, `bias` being `[width]`. Errors: [`GpuError::Shape`] if it is shorter.
pub fn add_bias(recorder: &mut Recorder, x: Rows<'_>, bias: &Buffer) -> Result<(), GpuError> {
    expect_most("add bias: bias", (bias.bytes() / 4) as usize, x.width)?;
    let y = Rows {
        stride: 0,
        ..Rows::new(bias, x.n_rows, x.width)
    };
    apply(recorder, Op::Add, x, Some(y))
}

/// `x ← factor · x`. Errors: [`GpuError::Shape`] if the rows are outside their buffer.
pub fn scale(recorder: &mut Recorder, x: Rows<'_>, factor: f32) -> Result<(), GpuError> {
    apply(recorder, Op::Scale(factor), x, None)
}

/// `x ← cap · tanh(x / cap)`. Errors: as [`scale`].
pub fn softcap(recorder: &mut Recorder, x: Rows<'_>, cap: f32) -> Result<(), GpuError> {
    apply(recorder, Op::Softcap(cap), x, None)
}

/// `x ← y`. Errors: as [`add`].
pub fn copy(recorder: &mut Recorder, x: Rows<'_>, y: Rows<'_>) -> Result<(), GpuError> {
    apply(recorder, Op::Copy, x, Some(y))
}

/// `gate ← activation(gate) · up`. Errors: as [`add`].
pub fn gate(
    recorder: &mut Recorder,
    activation: Activation,
    gate: Rows<'_>,
    up: Rows<'_>,
) -> Result<(), GpuError> {
    apply(recorder, Op::Gate(activation), gate, Some(up))
}

/// `x ← x · activation(gate)`. Errors: as [`add`].
pub fn gate_by(
    recorder: &mut Recorder,
    activation: Activation,
    x: Rows<'_>,
    gate: Rows<'_>,
) -> Result<(), GpuError> {
    apply(recorder, Op::GateBy(activation), x, Some(gate))
}

/// `x ← x ∘ y`. Errors: as [`add`].
pub fn multiply(recorder: &mut Recorder, x: Rows<'_>, y: Rows<'_>) -> Result<(), GpuError> {
    apply(recorder, Op::Multiply, x, Some(y))
}

/// `x ← function(x)`. Errors: as [`scale`].
pub fn function(recorder: &mut Recorder, function: Function, x: Rows<'_>) -> Result<(), GpuError> {
    apply(recorder, Op::Function(function), x, None)
}

fn apply(
    recorder: &mut Recorder,
    op: Op,
    x: Rows<'_>,
    y: Option<Rows<'_>>,
) -> Result<(), GpuError> {
    x.check("element-wise: first operand")?;
    // Without a second operand any other buffer will do.
    let nothing;
    let y = match y {
        Some(y) => {
            if y.stride != 0 {
                y.check("element-wise: second operand")?;
            }
            same_rows("element-wise: rows of the second operand", &x, &y)?;
            expect(
                "element-wise: width of the second operand",
                x.width,
                y.width,
            )?;
            expect(
                "element-wise: operands that are one buffer",
                0,
                usize::from(x.buffer == y.buffer),
            )?;
            y
        }
        None => {
            nothing = recorder.device().nothing()?;
            Rows::new(&nothing, 0, 0)
        }
    };
    let len = x.n_rows * x.width;
    let (code, factor, activation) = match op {
        Op::Add => (0, 0.0, 0),
        Op::Scale(factor) => (1, factor, 0),
        Op::Softcap(cap) => (2, cap, 0),
        Op::Copy => (3, 0.0, 0),
        Op::Gate(activation) => (4, 0.0, activation as u8),
        Op::GateBy(activation) => (5, 0.0, activation as u8),
        Op::Function(Function::Tanh) => (6, 0.0, 0),
        Op::Function(Function::Sigmoid) => (7, 0.0, 0),
        Op::Function(Function::Activation(activation)) => (8, 0.0, activation as u8),
        Op::Multiply => (9, 0.0, 0),
    };
    let params = ElementwiseParams {
        width: x.width as u32,
        len: len as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        y_offset: y.offset as u32,
        y_stride: y.stride as u32,
        factor,
    };
    let constants = [
        ("OP", f64::from(code)),
        ("ACTIVATION", f64::from(activation)),
    ];
    let bindings = [x.buffer.into(), y.buffer.into()];
    recorder.dispatch(
        &ELEMENTWISE,
        &constants,
        &bindings,
        &params,
        fold(len.div_ceil(256)),
    )
}

params! {
    SigmoidGateParams {
        width: u32,
        len: u32,
        x_offset: u32,
        x_stride: u32,
        y_offset: u32,
        y_stride: u32,
        gates_offset: u32,
        gates_stride: u32,
        head_dim: u32,
    }
}

/// `x[t] ← x[t] + sigmoid(gate[t]) · y[t]`, `gate` being `[n_rows, 1]`. Errors: as [`add`].
pub fn add_gated(
    recorder: &mut Recorder,
    x: Rows<'_>,
    y: Rows<'_>,
    gate: Rows<'_>,
) -> Result<(), GpuError> {
    y.check("gated sum: second operand")?;
    same_rows("gated sum: rows of the second operand", &x, &y)?;
    expect("gated sum: width of the second operand", x.width, y.width)?;
    expect("gated sum: gates of a row", 1, gate.width)?;
    gate_by_sigmoids(recorder, Gates::OfRows, x, Some(y), gate)
}

/// `x ← x + sigmoid(shares) ∘ (y − x)`. Errors: as [`add`].
pub fn blend(
    recorder: &mut Recorder,
    x: Rows<'_>,
    y: Rows<'_>,
    shares: Rows<'_>,
) -> Result<(), GpuError> {
    y.check("blend: second operand")?;
    same_rows("blend: rows of the second operand", &x, &y)?;
    expect("blend: width of the second operand", x.width, y.width)?;
    expect("blend: shares of a row", x.width, shares.width)?;
    gate_by_sigmoids(recorder, Gates::Shares, x, Some(y), shares)
}

/// `x[t, h, e] ← x[t, h, e] · sigmoid(q[t, h, 1, e])`, where `x` is `[n_rows, n_heads, head_dim]` and `q`
/// `[n_rows, n_heads, 2, head_dim]`. Errors: as [`add`].
pub fn gate_heads(
    recorder: &mut Recorder,
    x: Rows<'_>,
    q: Rows<'_>,
    head_dim: usize,
) -> Result<(), GpuError> {
    expect("gates of heads: width", 2 * x.width, q.width)?;
    gate_by_sigmoids(recorder, Gates::OfHeads(head_dim), x, None, q)
}

/// What gates are of.
#[derive(Clone, Copy)]
enum Gates {
    OfRows,
    /// Of so many elements each.
    OfHeads(usize),
    Shares,
}

fn gate_by_sigmoids(
    recorder: &mut Recorder,
    kind: Gates,
    x: Rows<'_>,
    y: Option<Rows<'_>>,
    gates: Rows<'_>,
) -> Result<(), GpuError> {
    x.check("gates: rows")?;
    gates.check("gates")?;
    same_rows("gates: rows", &x, &gates)?;
    let nothing = recorder.device().nothing()?;
    let (kind, head_dim) = match kind {
        Gates::OfRows => (0, 1),
        Gates::OfHeads(head_dim) => (1, head_dim),
        Gates::Shares => (2, 1),
    };
    let y = y.unwrap_or(Rows::new(&nothing, 0, 0));
    let is_one = x.buffer == gates.buffer || x.buffer == y.buffer;
    expect(
        "gates: operands that are one buffer",
        0,
        usize::from(is_one),
    )?;
    let len = x.n_rows * x.width;
    let params = SigmoidGateParams {
        width: x.width as u32,
        len: len as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        y_offset: y.offset as u32,
        y_stride: y.stride as u32,
        gates_offset: gates.offset as u32,
        gates_stride: gates.stride as u32,
        head_dim: head_dim as u32,
    };
    let constants = [("KIND", f64::from(kind))];
    let bindings = [x.buffer.into(), y.buffer.into(), gates.buffer.into()];
    let grid = fold(len.div_ceil(256));
    recorder.dispatch(&SIGMOID_GATE, &constants, &bindings, &params, grid)
}
