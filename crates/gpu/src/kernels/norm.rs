//! Normalisation of rows, by their root mean square or their variance.

use super::{Rows, fold, max_workgroup, same_rows};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{LAYER_NORM, RMS_NORM, RMS_NORM_IN_PLACE, params};
use crate::{GpuError, Limits, Recorder};

params! {
    RmsNormParams {
        width: u32,
        n_rows: u32,
        n_groups: u32,
        x_offset: u32,
        x_stride: u32,
        out_offset: u32,
        out_stride: u32,
        eps: f32,
    }
}

/// `out[t, i] ← x[t, i] · weight[i] / √(mean_i x[t, i]² + eps)`. `x` and `out` may be the same rows.
///
/// Shapes: `weight` is `[width]`. Rows of heads are normalised head by head.
/// Errors: [`GpuError::Shape`] if shapes don't match, or if `x` and `out` are different rows of one buffer.
/// Exactness: that of `sterna_kernels::norm`, except for the order of the sum of squares.
pub fn rms_norm(
    recorder: &mut Recorder,
    x: Rows<'_>,
    weight: &Buffer,
    eps: f32,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    rms_norm_groups(recorder, x, weight, 1, eps, out)
}

/// The same with each of `n_groups` equal parts of a row normalised by itself. Errors: also if there are no such parts.
pub fn rms_norm_groups(
    recorder: &mut Recorder,
    x: Rows<'_>,
    weight: &Buffer,
    n_groups: usize,
    eps: f32,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    expect_most("rms norm: weights", (weight.bytes() / 4) as usize, x.width)?;
    record(recorder, x, Some(weight), n_groups, eps, out)
}

/// `x ← rms_norm(x)` without weights, each of `n_groups` equal parts of a row by itself.
///
/// Errors, exactness: as [`rms_norm_groups`].
pub fn normalize(
    recorder: &mut Recorder,
    x: Rows<'_>,
    n_groups: usize,
    eps: f32,
) -> Result<(), GpuError> {
    record(recorder, x, None, n_groups, eps, x)
}

fn record(
    recorder: &mut Recorder,
    x: Rows<'_>,
    weight: Option<&Buffer>,
    n_groups: usize,
    eps: f32,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    x.check("rms norm: input")?;
    out.check("rms norm: output")?;
    same_rows("rms norm: rows of the output", &x, &out)?;
    expect("rms norm: width of the output", x.width, out.width)?;
    let width = x.width / n_groups.max(1);
    expect(
        "rms norm: elements of all groups",
        width * n_groups,
        x.width,
    )?;
    let params = RmsNormParams {
        width: width as u32,
        n_rows: x.n_rows as u32,
        n_groups: n_groups as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        eps,
    };
    let device = recorder.device().clone();
    let workgroup = workgroup(width, device.limits());
    let is_weighted = f64::from(u8::from(weight.is_some()));
    let constants = [("WG", workgroup as f64), ("WEIGHTED", is_weighted)];
    let grid = fold(x.n_rows * n_groups);
    // Without weights any other buffer will do.
    let nothing = device.nothing()?;
    let weight = weight.unwrap_or(&nothing);
    if x.buffer == out.buffer {
        expect("rms norm in place: offset", x.offset, out.offset)?;
        expect("rms norm in place: stride", x.stride, out.stride)?;
        let bindings = [weight.into(), out.buffer.into()];
        return recorder.dispatch(&RMS_NORM_IN_PLACE, &constants, &bindings, &params, grid);
    }
    let bindings = [weight.into(), out.buffer.into(), x.buffer.into()];
    recorder.dispatch(&RMS_NORM, &constants, &bindings, &params, grid)
}

params! {
    LayerNormParams {
        width: u32,
        n_rows: u32,
        x_offset: u32,
        x_stride: u32,
        out_offset: u32,
        out_stride: u32,
        eps: f32,
    }
}

/// `out[t, i] ← (x[t, i] − mean) / √(variance + eps) · weight[i] + bias[i]`, mean and variance of each row.
///
/// Shapes: `weight` and `bias` are `[width]`. `x` and `out` are in different buffers.
/// Errors: [`GpuError::Shape`] if shapes don't match.
/// Exactness: that of `sterna_kernels::norm`, except for the order of sums.
pub fn layer_norm(
    recorder: &mut Recorder,
    x: Rows<'_>,
    (weight, bias): (&Buffer, &Buffer),
    eps: f32,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    x.check("layer norm: input")?;
    out.check("layer norm: output")?;
    same_rows("layer norm: rows of the output", &x, &out)?;
    expect("layer norm: width of the output", x.width, out.width)?;
    for (what, vector) in [
        ("layer norm: weights", weight),
        ("layer norm: biases", bias),
    ] {
        expect_most(what, (vector.bytes() / 4) as usize, x.width)?;
    }
    expect(
        "layer norm: operands that are one buffer",
        0,
        usize::from(x.buffer == out.buffer),
    )?;
    let params = LayerNormParams {
        width: x.width as u32,
        n_rows: x.n_rows as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        eps,
    };
    let workgroup = workgroup(x.width, recorder.device().limits());
    let constants = [("WG", workgroup as f64)];
    let bindings = [
        x.buffer.into(),
        weight.into(),
        bias.into(),
        out.buffer.into(),
    ];
    let grid = fold(x.n_rows);
    recorder.dispatch(&LAYER_NORM, &constants, &bindings, &params, grid)
}

/// Invocations per row: several elements for each, as few rows leave the device idle otherwise.
fn workgroup(width: usize, limits: &Limits) -> usize {
    (width / 4)
        .next_power_of_two()
        .clamp(64, max_workgroup(limits) as usize)
}
