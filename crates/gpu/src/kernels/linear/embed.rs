//! Embedding lookup: rows of a matrix.

use sterna_format::DType;

use super::dispatch::{constants_of, row_blocks, unsupported};
use super::{Linear, WeightKind};
use crate::error::{expect, expect_most};
use crate::kernels::Rows;
use crate::memory::Buffer;
use crate::shader::{self, params};
use crate::{GpuError, Recorder};

params! {
    EmbedParams {
        n: u32,
        first: u32,
        begin: u32,
        k: u32,
        row_blocks: u32,
        ids_offset: u32,
        ids_stride: u32,
        out_offset: u32,
        out_stride: u32,
        factor: f32,
    }
}

/// The ids of rows: `u32`, each `stride` elements behind the one before.
#[derive(Debug, Clone, PartialEq)]
pub struct Ids {
    /// Where they are.
    pub buffer: Buffer,
    /// The element with the first.
    pub offset: usize,
    /// From one to the next.
    pub stride: usize,
}

/// `out[t] ← factor · table[ids[t]]`. An id outside the table leaves its row unchanged.
///
/// Errors: [`GpuError::Shape`] if the widths differ, or there are too few ids.
/// Exactness: that of `sterna_kernels::quant::decode_row`, except for products and differences that a device
/// fuses: the last place.
pub fn embed(
    recorder: &mut Recorder,
    table: &Linear,
    ids: &Ids,
    factor: f32,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    out.check("embedding: output")?;
    expect("embedding: width of the output", table.k, out.width)?;
    let last = out.n_rows.saturating_sub(1).saturating_mul(ids.stride);
    let words = (ids.buffer.bytes() / 4) as usize;
    let need = ids.offset.saturating_add(last).saturating_add(1);
    expect_most("embedding: elements of the ids", words, need)?;
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
    let constant = constants_of(table.kind);
    // The grid has a row of workgroups for each token.
    let most = recorder.device().limits().grid as usize;
    for first in (0..out.n_rows).step_by(most) {
        let n_rows = most.min(out.n_rows - first);
        for piece in &table.pieces {
            let params = EmbedParams {
                n: piece.n as u32,
                first: piece.first as u32,
                begin: piece.begin as u32,
                k: table.k as u32,
                row_blocks: row_blocks(table.kind, table.k) as u32,
                ids_offset: (ids.offset + first * ids.stride) as u32,
                ids_stride: ids.stride as u32,
                out_offset: (out.offset + first * out.stride) as u32,
                out_stride: out.stride as u32,
                factor,
            };
            let bindings = [
                (&piece.codes).into(),
                (&piece.scales).into(),
                (&ids.buffer).into(),
                out.buffer.into(),
            ];
            let grid = [table.k.div_ceil(8 * 64) as u32, n_rows as u32];
            recorder.dispatch(shader, constant.as_slice(), &bindings, &params, grid)?;
        }
    }
    Ok(())
}
