//! Weights that are blocks of integers, or floats; and rows of them as embeddings.

use bytemuck::NoUninit;
use sterna_format::DType;

use super::planes::FLOAT_PADDING;
use super::{Epilogue, GEMM_TILE, GEMV_TOKENS, GemvShape, Linear, MAX_GEMV_ROWS, WeightKind};
use crate::error::{expect, expect_most};
use crate::kernels::quantize::{PADDING, QuantizedRows};
use crate::kernels::{Rows, fold};
use crate::memory::Buffer;
use crate::record::Binding;
use crate::shader::{self, Shader};
use crate::{GpuError, Recorder};

/// Elements whose scale and sum activations have.
const RUN: usize = 32;

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct Params {
    n: u32,
    first: u32,
    k: u32,
    row_blocks: u32,
    q_len: u32,
    runs: u32,
    token: u32,
    m: u32,
    x_offset: u32,
    x_stride: u32,
    out_offset: u32,
    out_stride: u32,
}

/// Kernels for few rows of activations and for many.
struct Kernels {
    gemv: &'static Shader,
    gemm: &'static Shader,
}

fn unsupported(dtype: DType) -> GpuError {
    GpuError::Unsupported {
        what: format!("{dtype} weights"),
        reason: "there are no kernels for them".into(),
    }
}

/// Blocks of a row, as kernels count them.
fn row_blocks(kind: WeightKind, k: usize) -> usize {
    match kind {
        WeightKind::Ternary => k.div_ceil(128),
        WeightKind::Blocks(dtype) if dtype.block_len() == 1 => k.div_ceil(FLOAT_PADDING),
        WeightKind::Blocks(dtype) => k / dtype.block_len(),
    }
}

/// Constants that tell types apart which share their kernels.
fn constants_of(dtype: DType) -> Option<(&'static str, f64)> {
    match dtype {
        DType::Q2_0 => Some(("BLOCK_RUNS", 2.0)),
        DType::Q2_0_G128 | DType::PQ2_0 => Some(("BLOCK_RUNS", 4.0)),
        _ => None,
    }
}

/// Blocks of integers times int8.
pub(super) fn multiply_rounded(
    recorder: &mut Recorder,
    w: &Linear,
    dtype: DType,
    x: &QuantizedRows,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let (gemv, gemm) = match dtype {
        DType::Q8_0 => (&shader::GEMV_Q8_0, &shader::GEMM_Q8_0),
        DType::Q4_0 => (&shader::GEMV_Q4_0, &shader::GEMM_Q4_0),
        DType::Q4_K => (&shader::GEMV_Q4_K, &shader::GEMM_Q4_K),
        DType::Q6_K => (&shader::GEMV_Q6_K, &shader::GEMM_Q6_K),
        DType::Q1_0 => (&shader::GEMV_Q1_0, &shader::GEMM_Q1_0),
        DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => (&shader::GEMV_Q2_0, &shader::GEMM_Q2_0),
        _ => return Err(unsupported(dtype)),
    };
    let kernels = Kernels { gemv, gemm };
    let params = Params {
        q_len: (w.k.next_multiple_of(PADDING) / 16) as u32,
        runs: w.k.div_ceil(RUN) as u32,
        ..params(w, &out)
    };
    let inputs = [(&x.q).into(), (&x.steps).into()];
    multiply(
        recorder,
        w,
        &kernels,
        constants_of(dtype),
        &params,
        &inputs,
        epilogue,
        out,
    )
}

/// Floats times floats.
pub(super) fn multiply_floats(
    recorder: &mut Recorder,
    w: &Linear,
    dtype: DType,
    x: Rows<'_>,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let in_vectors = [x.offset, x.stride, w.k]
        .iter()
        .all(|at| at.is_multiple_of(4));
    let (gemv, gemm) = match (dtype, in_vectors) {
        (DType::F32, true) => (&shader::GEMV_F32, &shader::GEMM_F32),
        (DType::F16, true) => (&shader::GEMV_F16, &shader::GEMM_F16),
        (DType::BF16, true) => (&shader::GEMV_BF16, &shader::GEMM_BF16),
        (DType::F32, false) => (&shader::GEMV_F32_ELEMENTS, &shader::GEMM_F32_ELEMENTS),
        (DType::F16, false) => (&shader::GEMV_F16_ELEMENTS, &shader::GEMM_F16_ELEMENTS),
        (DType::BF16, false) => (&shader::GEMV_BF16_ELEMENTS, &shader::GEMM_BF16_ELEMENTS),
        _ => return Err(unsupported(dtype)),
    };
    let kernels = Kernels { gemv, gemm };
    let params = Params {
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        ..params(w, &out)
    };
    multiply(
        recorder,
        w,
        &kernels,
        None,
        &params,
        &[x.buffer.into()],
        epilogue,
        out,
    )
}

fn params(w: &Linear, out: &Rows<'_>) -> Params {
    Params {
        n: 0,
        first: 0,
        k: w.k as u32,
        row_blocks: row_blocks(w.kind, w.k) as u32,
        q_len: 0,
        runs: 0,
        token: 0,
        m: out.n_rows as u32,
        x_offset: 0,
        x_stride: 0,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
    }
}

/// Records the dispatches of all pieces.
#[allow(clippy::too_many_arguments)]
fn multiply(
    recorder: &mut Recorder,
    w: &Linear,
    kernels: &Kernels,
    constant: Option<(&'static str, f64)>,
    params: &Params,
    inputs: &[Binding<'_>],
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    // A step is a run of codes, or eight floats.
    let steps = if params.runs > 0 { w.k / RUN } else { w.k / 8 };
    let shape = GemvShape::of(recorder, steps);
    for piece in &w.pieces {
        let params = Params {
            n: piece.n as u32,
            first: piece.first as u32,
            ..*params
        };
        let mut bindings = vec![(&piece.codes).into(), (&piece.scales).into()];
        bindings.extend_from_slice(inputs);
        bindings.push(out.buffer.into());
        if out.n_rows > MAX_GEMV_ROWS {
            let tiles = |n: usize| n.div_ceil(GEMM_TILE) as u32;
            let grid = [tiles(piece.n), tiles(out.n_rows)];
            let mut constants = epilogue.constants().to_vec();
            constants.extend(constant);
            recorder.dispatch(kernels.gemm, &constants, &bindings, &params, grid)?;
            continue;
        }
        for token in (0..out.n_rows).step_by(GEMV_TOKENS) {
            let params = Params {
                token: token as u32,
                ..params
            };
            let tokens = GEMV_TOKENS.min(out.n_rows - token);
            let mut constants = shape.constants(epilogue, tokens).to_vec();
            constants.extend(constant);
            let grid = fold(piece.n.div_ceil(shape.rows()));
            recorder.dispatch(kernels.gemv, &constants, &bindings, &params, grid)?;
        }
    }
    Ok(())
}

#[repr(C)]
#[derive(Clone, Copy, NoUninit)]
struct EmbedParams {
    n: u32,
    first: u32,
    k: u32,
    row_blocks: u32,
    ids_offset: u32,
    out_offset: u32,
    out_stride: u32,
    factor: f32,
}

/// `out[t] ← factor · table[ids[t]]`, with the `u32` ids of the rows of `out` in a buffer from element
/// `ids_offset` on. An id that the table doesn't have leaves its row as it is.
///
/// Errors: [`GpuError::Shape`] if the widths differ, or there are too few ids.
/// Exactness: that of `sterna_kernels::quant::decode_row`, but for products and differences that a device
/// fuses: the last place.
pub fn embed(
    recorder: &mut Recorder,
    table: &Linear,
    (ids, ids_offset): (&Buffer, usize),
    factor: f32,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    out.check("embedding: output")?;
    expect("embedding: width of the output", table.k, out.width)?;
    let n_ids = ids_offset.saturating_add(out.n_rows);
    expect_most("embedding: ids", (ids.bytes() / 4) as usize, n_ids)?;
    let shader = match table.kind {
        WeightKind::Ternary => &shader::EMBED_TERNARY,
        WeightKind::Blocks(dtype) => match dtype {
            DType::F32 => &shader::EMBED_F32,
            DType::F16 => &shader::EMBED_F16,
            DType::BF16 => &shader::EMBED_BF16,
            DType::Q8_0 => &shader::EMBED_Q8_0,
            DType::Q4_0 => &shader::EMBED_Q4_0,
            DType::Q4_K => &shader::EMBED_Q4_K,
            DType::Q6_K => &shader::EMBED_Q6_K,
            DType::Q1_0 => &shader::EMBED_Q1_0,
            DType::Q2_0 | DType::Q2_0_G128 | DType::PQ2_0 => &shader::EMBED_Q2_0,
            _ => return Err(unsupported(dtype)),
        },
    };
    let constant = match table.kind {
        WeightKind::Ternary => None,
        WeightKind::Blocks(dtype) => constants_of(dtype),
    };
    // The grid has a row of workgroups for each token.
    let most = recorder.device().limits().grid as usize;
    for first in (0..out.n_rows).step_by(most) {
        let n_rows = most.min(out.n_rows - first);
        for piece in &table.pieces {
            let params = EmbedParams {
                n: piece.n as u32,
                first: piece.first as u32,
                k: table.k as u32,
                row_blocks: row_blocks(table.kind, table.k) as u32,
                ids_offset: (ids_offset + first) as u32,
                out_offset: (out.offset + first * out.stride) as u32,
                out_stride: out.stride as u32,
                factor,
            };
            let bindings = [
                (&piece.codes).into(),
                (&piece.scales).into(),
                ids.into(),
                out.buffer.into(),
            ];
            let grid = [table.k.div_ceil(8 * 64) as u32, n_rows as u32];
            recorder.dispatch(shader, constant.as_slice(), &bindings, &params, grid)?;
        }
    }
    Ok(())
}
