//! How weights are stored on the device.

use std::borrow::Cow;
use std::ops::Range;

use sterna_format::DType;
use sterna_gpu::kernels::linear::{self, Linear, WeightKind};
use sterna_gpu::memory::Upload;
use sterna_gpu::{Device, GpuError};
use sterna_kernels::quant::ternary::{Layout, common_block_scale, row_bytes};
use sterna_kernels::{Exec, repack, requantize};

use crate::backend::{BackendError, LinearSource, ROW_GRAIN, Rounding, TernaryPacking, WeightData};
use crate::cpu::Activations;

/// Bytes of a staging buffer, and their number: enough to copy one while the next is filled.
const SLOT_BYTES: usize = 8 << 20;
const N_SLOTS: usize = 3;

/// A matrix in a form that kernels support.
struct Held<'a> {
    kind: WeightKind,
    bytes: Cow<'a, [u8]>,
    /// The scale of each row of trits; empty for other kinds.
    scales: Vec<f32>,
}

/// The type that blocks of `dtype` are stored as on the device.
///
/// Types with kernels stay as they are. TQ1_0 and TQ2_0 become PQ2_0 and MXFP4 becomes BF16, which represent
/// all their values. The others are dequantized: those wider than F16 to F32, the rest to F16, which rounds a
/// weight by 2^-12 of its value at most.
fn held_as(dtype: DType) -> DType {
    match dtype {
        dtype if WeightKind::Blocks(dtype).is_supported() => dtype,
        DType::TQ1_0 | DType::TQ2_0 => DType::PQ2_0,
        DType::MXFP4 => DType::BF16,
        DType::F64 => DType::F32,
        _ => DType::F16,
    }
}

/// The type that blocks of `dtype` are stored as on the device with such `activations`.
fn held_with(dtype: DType, activations: Activations) -> DType {
    match activations {
        Activations::F32 => DType::F32,
        Activations::Int8 => held_as(dtype),
    }
}

/// Uploads a matrix.
pub(super) fn load(
    device: &Device,
    host: &Exec,
    upload: &mut Option<Upload>,
    source: &LinearSource,
    activations: Activations,
) -> Result<Linear, BackendError> {
    let LinearSource {
        n,
        k,
        weights,
        rotation: _,
    } = source;
    let held = held(host, *n, *k, weights, activations)?;
    let linear = Linear::new(device, held.kind, (*n, *k), &held.scales)?;
    write(device, upload, &linear, 0..*n, &held)?;
    Ok(linear)
}

/// Memory for the matrix `[n, k]` of blocks of `dtype`, whose rows follow.
pub(super) fn begin(
    device: &Device,
    (n, k): (usize, usize),
    dtype: DType,
    activations: Activations,
) -> Result<Linear, BackendError> {
    let kind = WeightKind::Blocks(held_with(dtype, activations));
    Ok(Linear::new(device, kind, (n, k), &[])?)
}

/// Uploads the rows `rows` of a matrix that was [begun](begin).
pub(super) fn load_rows(
    device: &Device,
    host: &Exec,
    upload: &mut Option<Upload>,
    linear: &Linear,
    rows: Range<usize>,
    weights: &WeightData,
    activations: Activations,
) -> Result<(), BackendError> {
    let held = held(host, rows.len(), linear.k(), weights, activations)?;
    write(device, upload, linear, rows, &held)
}

/// Uploads `held` to the rows `range` of `linear`.
fn write(
    device: &Device,
    upload: &mut Option<Upload>,
    linear: &Linear,
    range: Range<usize>,
    held: &Held<'_>,
) -> Result<(), BackendError> {
    if held.kind != linear.kind() {
        return Err(BackendError::from(GpuError::Shape {
            what: "bytes of a row",
            expected: linear.kind().row_bytes(linear.k()) as u64,
            found: held.kind.row_bytes(linear.k()) as u64,
        }));
    }
    Ok(linear.write(staging(device, upload)?, range, &held.bytes)?)
}

/// Staging buffers, which are made if there are none.
pub(super) fn staging<'a>(
    device: &Device,
    upload: &'a mut Option<Upload>,
) -> Result<&'a mut Upload, GpuError> {
    match upload {
        Some(upload) => Ok(upload),
        None => Ok(upload.insert(Upload::new(device, SLOT_BYTES, N_SLOTS)?)),
    }
}

fn held<'a>(
    host: &Exec,
    n: usize,
    k: usize,
    weights: &'a WeightData,
    activations: Activations,
) -> Result<Held<'a>, BackendError> {
    let ternary = |bytes, scales| Held {
        kind: WeightKind::Ternary,
        bytes,
        scales,
    };
    match weights {
        WeightData::Ternary {
            codes,
            packing,
            scale,
        } => {
            let bytes = match packing {
                TernaryPacking::I2s => Cow::Borrowed(&codes[..]),
                TernaryPacking::Tq20 => Cow::Owned(repack::repack(
                    host,
                    Layout::Blocks(DType::TQ2_0),
                    n,
                    k,
                    codes,
                    0..n,
                )?),
            };
            Ok(ternary(bytes, vec![*scale; n]))
        }
        WeightData::Blocks {
            dtype,
            bytes,
            rounding,
        } => {
            if *rounding == Rounding::Row
                && let Some(scales) = scales_of_rows(*dtype, k, bytes)?
            {
                let codes = repack::repack(host, Layout::Blocks(*dtype), n, k, bytes, 0..n)?;
                return Ok(ternary(Cow::Owned(codes), scales));
            }
            let to = held_with(*dtype, activations);
            let bytes = if to == *dtype {
                Cow::Borrowed(&bytes[..])
            } else {
                Cow::Owned(requantize(host, n, k, *dtype, bytes, to)?)
            };
            Ok(Held {
                kind: WeightKind::Blocks(to),
                bytes,
                scales: Vec::new(),
            })
        }
    }
}

/// The scales of rows whose blocks each share one; `None` if the blocks of a row differ, or aren't trits.
fn scales_of_rows(dtype: DType, k: usize, bytes: &[u8]) -> Result<Option<Vec<f32>>, BackendError> {
    if !matches!(dtype, DType::TQ1_0 | DType::TQ2_0) {
        return Ok(None);
    }
    let stride = k / dtype.block_len() * dtype.block_bytes();
    let rows = bytes.chunks_exact(stride.max(1));
    let scales: Result<Option<Vec<f32>>, _> =
        rows.map(|row| common_block_scale(dtype, row)).collect();
    Ok(scales?)
}

const _: () = assert!(row_bytes(128) == 32);
const _: () = assert!(ROW_GRAIN.is_multiple_of(linear::ROW_GRAIN));
