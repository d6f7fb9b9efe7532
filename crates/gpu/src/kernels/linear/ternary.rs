//! Ternary weights, int8 activations, exact integer sums.

use bytemuck::NoUninit;

use super::{Epilogue, GEMM_TILE, GEMV_TOKENS, GemvShape, Linear, MAX_GEMV_ROWS};
use crate::kernels::quantize::{PADDING, QuantizedRows};
use crate::kernels::{Rows, fold};
use crate::shader::{Shader, TERNARY_GEMM, TERNARY_GEMM_COOP, TERNARY_GEMV};
use crate::{GpuError, Recorder};

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
    let row_len = w.k.div_ceil(128) * 2;
    let shape = GemvShape::of(recorder, row_len);
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
            (&piece.scales).into(),
            (&x.q).into(),
            (&x.steps).into(),
            out.buffer.into(),
        ];
        if out.n_rows > MAX_GEMV_ROWS {
            let tiles = |n: usize| n.div_ceil(GEMM_TILE) as u32;
            let grid = [tiles(piece.n), tiles(out.n_rows)];
            let constants = epilogue.constants();
            recorder.dispatch(
                &TERNARY_GEMM,
                &constants,
                &bindings,
                &params(out.n_rows),
                grid,
            )?;
            continue;
        }
        for token in (0..out.n_rows).step_by(GEMV_TOKENS) {
            let constants = shape.constants(epilogue, GEMV_TOKENS.min(out.n_rows - token));
            let grid = fold(piece.n.div_ceil(shape.rows()));
            recorder.dispatch(&TERNARY_GEMV, &constants, &bindings, &params(token), grid)?;
        }
    }
    Ok(())
}

/// Most columns whose sums are exact in f32: 2^24 / 128.
const MAX_COOP_K: usize = 1 << 17;

/// Shared memory of the kernel by matrix units.
const COOP_BYTES: u32 = 2 * 4608 * 2 + 4352 * 4;

/// The kernel for many rows of activations: by matrix units, where there are any and sums stay exact.
fn gemm(recorder: &Recorder, k: usize) -> &'static Shader {
    let device = recorder.device();
    let limits = device.limits();
    let of_32 = limits.min_subgroup == 32 && limits.max_subgroup == 32;
    let fits = limits.workgroup_bytes >= COOP_BYTES && k < MAX_COOP_K;
    if device.features().cooperative_matrix && of_32 && fits {
        &TERNARY_GEMM_COOP
    } else {
        &TERNARY_GEMM
    }
}
