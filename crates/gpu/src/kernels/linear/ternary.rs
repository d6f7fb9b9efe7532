//! Ternary weights, int8 activations, exact integer sums.

use bytemuck::NoUninit;

use super::{Epilogue, Linear};
use crate::kernels::quantize::{PADDING, QuantizedRows};
use crate::kernels::{Rows, fold};
use crate::shader::{TERNARY_GEMM, TERNARY_GEMV};
use crate::{GpuError, Recorder};

/// Rows of activations that are multiplied straight from the packed weights.
const MAX_GEMV_ROWS: usize = 8;

/// Rows of activations that the kernel for few of them takes at a time.
const GEMV_TOKENS: usize = 4;

/// Rows of weights, and of activations, of a workgroup of the kernel for many.
const GEMM_TILE: usize = 64;

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
    n: u32,
    first: u32,
    row_len: u32,
    q_len: u32,
    /// The first row of activations, or the number of them.
    token: u32,
    out_offset: u32,
    out_stride: u32,
}

pub(super) fn multiply(
    recorder: &mut Recorder,
    w: &Linear,
    x: &QuantizedRows,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let [epilogue, activation] = epilogue.constants();
    let scales = w.scales.as_ref().ok_or(GpuError::Shape {
        what: "ternary matrix: scales",
        expected: w.n as u64,
        found: 0,
    })?;
    let row_len = w.k.div_ceil(128) * 2;
    let shape = tuning(recorder, row_len);
    for piece in &w.pieces {
        let params = |token: usize| Params {
            n: piece.n as u32,
            first: piece.first as u32,
            row_len: row_len as u32,
            q_len: (w.k.next_multiple_of(PADDING) / 16) as u32,
            token: token as u32,
            out_offset: out.offset as u32,
            out_stride: out.stride as u32,
        };
        let bindings = [
            (&piece.codes).into(),
            scales.into(),
            (&x.q).into(),
            (&x.steps).into(),
            out.buffer.into(),
        ];
        if out.n_rows > MAX_GEMV_ROWS {
            let grid = [
                piece.n.div_ceil(GEMM_TILE) as u32,
                out.n_rows.div_ceil(GEMM_TILE) as u32,
            ];
            let params = params(out.n_rows);
            recorder.dispatch(
                &TERNARY_GEMM,
                &[epilogue, activation],
                &bindings,
                &params,
                grid,
            )?;
            continue;
        }
        for token in (0..out.n_rows).step_by(GEMV_TOKENS) {
            let tokens = GEMV_TOKENS.min(out.n_rows - token);
            let constants = [
                epilogue,
                activation,
                ("TOKENS", tokens as f64),
                ("WG", f64::from(shape.workgroup)),
                ("LANES", f64::from(shape.lanes)),
            ];
            let rows = 2 * (shape.workgroup / shape.lanes) as usize;
            let grid = fold(piece.n.div_ceil(rows));
            recorder.dispatch(&TERNARY_GEMV, &constants, &bindings, &params(token), grid)?;
        }
    }
    Ok(())
}

/// How the invocations of a GEMV are shared out.
#[derive(Debug, Clone, Copy)]
struct GemvShape {
    workgroup: u32,
    /// Invocations that share two rows.
    lanes: u32,
}

/// Eight lanes read 128 bytes of a row together, a cache line; longer rows take more, so that each
/// lane has at least four vectors to wait for at once.
fn tuning(recorder: &Recorder, row_len: usize) -> GemvShape {
    let limits = recorder.device().limits();
    let most = limits.min_subgroup.clamp(8, 32);
    let lanes = (row_len as u32 / 6).next_power_of_two().clamp(8, most);
    GemvShape {
        workgroup: 128,
        lanes,
    }
}
