//! Element-wise operations.

pub use sterna_format::model::Activation;

use super::{Rows, fold, same_rows};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{ELEMENTWISE, params};
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
