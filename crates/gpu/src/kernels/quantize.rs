//! Activations quantized to int8, as integer weights need them.

use super::linear::{COOP_SUMS_BYTES, LEAST_COOP_TRITS};
use super::{Rows, fold, max_workgroup};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{
    DEQUANTIZE, HALVE, QUANTIZE, QUANTIZE_ELEMENTS, QUANTIZE_SUMS_BLOCKS, QUANTIZE_SUMS_TERNARY,
    params,
};
use crate::tuning::RowClass;
use crate::{Device, GpuError, Limits, Recorder};

/// How many activations share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Scaling {
    /// A whole row, as BitLinear layers were trained.
    Row,
    /// Blocks of 256, for weights whose blocks contain integer scales (Q4_K, Q6_K).
    Blocks256,
    /// Blocks of 32, for weights of smaller blocks.
    Blocks32,
}

/// Rows of quantized activations are padded to a multiple of this.
pub const PADDING: usize = 256;

/// Values that share a stored scale and sum.
const RUN: usize = 32;

/// Invocations that quantize a block of [`PADDING`] together, if subgroups are as large; and where many rows have a scale each.
/// Found on an H100.
const LANES: u32 = 32;
const LANES_OF_MANY_ROWS: u32 = 16;
const MANY_ROWS: usize = 256;

/// Whether products by matrix units may take so many rows as f16.
fn takes_halves(device: &Device, n_rows: usize, scaling: Scaling) -> bool {
    let enough = match scaling {
        Scaling::Row => n_rows >= LEAST_COOP_TRITS,
        Scaling::Blocks256 | Scaling::Blocks32 => RowClass::of(n_rows) == RowClass::Many,
    };
    device.has_matrix_units() && enough
}

/// Memory for quantized activations, `[most_rows, most_width]` of any scaling.
#[derive(Debug, Clone)]
pub struct QuantizedRows {
    /// `[n_rows, padded width]` of int8.
    pub(super) q: Buffer,
    /// Scales and sums.
    pub(in crate::kernels) steps: Buffer,
    /// The values of blocks or of floats, or the codes of rows, as f16, for products by matrix units: of many rows, or of trits,
    /// of several.
    /// Without such units or rows, nothing.
    pub(super) halves: Buffer,
    /// What products with them by matrix units need: groups of routes, or sums of parts of the columns, for a moment or until the
    /// next rows are quantized.
    pub(in crate::kernels) scratch: Buffer,
    most_rows: usize,
    most_width: usize,
}

impl QuantizedRows {
    /// Room for up to `most_rows` rows of `most_width` elements.
    ///
    /// Errors: [`GpuError::OutOfMemory`].
    pub fn new(device: &Device, most_rows: usize, most_width: usize) -> Result<Self, GpuError> {
        let padded = most_width.next_multiple_of(PADDING) as u64;
        let bytes = padded.saturating_mul(most_rows as u64);
        let scratch = match device.has_matrix_units() && most_rows >= LEAST_COOP_TRITS {
            true => device.buffer("scratch of products", COOP_SUMS_BYTES as u64)?,
            false => device.nothing()?,
        };
        let halves = match takes_halves(device, most_rows, Scaling::Row) {
            true => device.buffer("activations as f16", bytes.saturating_mul(2))?,
            false => device.nothing()?,
        };
        Ok(QuantizedRows {
            scratch,
            halves,
            q: device.buffer("rounded activations", bytes)?,
            steps: device.buffer(
                "scales of activations",
                (bytes / RUN as u64).saturating_mul(8),
            )?,
            most_rows,
            most_width,
        })
    }

    /// Errors unless this many rows of this many elements fit.
    pub(super) fn expect_room(&self, n_rows: usize, width: usize) -> Result<(), GpuError> {
        expect_most("rounded activations: rows", self.most_rows, n_rows)?;
        let padded = self.most_width.next_multiple_of(PADDING);
        expect_most(
            "rounded activations: width",
            padded,
            width.next_multiple_of(PADDING),
        )
    }

    /// The quantized values of `n_rows` rows of `width`, read back: for tests.
    ///
    /// Errors: as [`Device::read`].
    pub fn read(
        &self,
        device: &Device,
        n_rows: usize,
        width: usize,
        scaling: Scaling,
    ) -> Result<Rounded, GpuError> {
        let len = n_rows * width.next_multiple_of(PADDING);
        let n_steps = match scaling {
            Scaling::Row => n_rows,
            Scaling::Blocks256 | Scaling::Blocks32 => len / RUN,
        };
        let steps: Vec<u32> = device.read(&self.steps, 0..2 * n_steps)?;
        let steps = steps.as_chunks().0.iter();
        Ok(Rounded {
            codes: device.read(&self.q, 0..len)?,
            steps: steps
                .map(|[scale, sum]| (f32::from_bits(*scale), *sum as i32))
                .collect(),
        })
    }
}

/// Quantized activations as numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Rounded {
    /// Rows of codes, padded with zeros to [`PADDING`].
    pub codes: Vec<i8>,
    /// For each row its scale, 127 / max|x|, and its sum; or for each run of 32 the step of its block, and
    /// its sum.
    pub steps: Vec<(f32, i32)>,
}

params! {
    QuantizeParams {
        k: u32,
        padded: u32,
        n_rows: u32,
        x_offset: u32,
        x_stride: u32,
        eps: f32,
        begin: u32,
    }
}

/// Quantizes `x` to int8, or `rms_norm(x) · weight` with `norm` as weight and eps.
///
/// Errors: [`GpuError::Shape`] if there is no room, or the weight is too short.
/// Exactness: without a norm, the bits of `sterna_kernels`' quantization, for finite values that the device
/// doesn't flush to zero. With one, a code differs by 1 where the value was close to a half, and scales in
/// their last places.
pub fn quantize(
    recorder: &mut Recorder,
    x: Rows<'_>,
    norm: Option<(&Buffer, f32)>,
    scaling: Scaling,
    out: &QuantizedRows,
) -> Result<(), GpuError> {
    let wanted = Wanted {
        halves: true,
        added: None,
    };
    quantize_for(recorder, x, norm, scaling, wanted, out)
}

/// What is done besides.
#[derive(Clone, Copy)]
pub(crate) struct Wanted<'a> {
    /// Whether products [read the rows as f16](super::linear::reads_halves).
    pub(crate) halves: bool,
    /// A product that is added to the rows first, if [`can_add`] says so.
    pub(crate) added: Option<&'a Parts>,
}

/// The parts of a product, whose sums are in the scratch memory of the quantized rows that it multiplied: what is quantized next
/// can take their place.
#[derive(Debug, Clone)]
pub(crate) struct Parts {
    /// How many there are.
    pub(crate) n: usize,
    /// Scales of rows of trits, and where they begin; `None` for blocks.
    pub(crate) scales: Option<(Buffer, usize)>,
}

/// How rows are divided among invocations.
struct Shape {
    lanes: usize,
    workgroup: usize,
    /// Workgroups of a row.
    sharing: usize,
}

impl Shape {
    fn of(limits: &Limits, x: &Rows<'_>, is_normed: bool, scaling: Scaling) -> Shape {
        let blocks = x.width.div_ceil(PADDING);
        let lanes = match scaling {
            Scaling::Row if x.n_rows >= MANY_ROWS => LANES_OF_MANY_ROWS,
            _ => LANES,
        };
        // Through shared memory, where there are no subgroups, any number exchange.
        let lanes = match limits.min_subgroup {
            1 => lanes as usize,
            subgroup => lanes.min(subgroup.max(8)) as usize,
        };
        // Blocks are independent: where there is no norm, several workgroups share a row.
        let shares = !is_normed && scaling != Scaling::Row;
        let workgroup = match shares {
            true => 64,
            false => (blocks * lanes)
                .next_power_of_two()
                .clamp(64, max_workgroup(limits) as usize),
        };
        let sharing = match shares {
            true => blocks.div_ceil(workgroup / lanes),
            false => 1,
        };
        Shape {
            lanes,
            workgroup,
            sharing,
        }
    }
}

/// Whether the parts of a product can be added to normalised rows as they are quantized: if a workgroup reads each row once.
pub(crate) fn can_add(device: &Device, x: &Rows<'_>, scaling: Scaling) -> bool {
    let shape = Shape::of(device.limits(), x, true, scaling);
    x.in_vectors() && x.width.div_ceil(PADDING) <= shape.workgroup / shape.lanes
}

/// [`quantize`], as it is wanted.
pub(crate) fn quantize_for(
    recorder: &mut Recorder,
    x: Rows<'_>,
    norm: Option<(&Buffer, f32)>,
    scaling: Scaling,
    wanted: Wanted<'_>,
    out: &QuantizedRows,
) -> Result<(), GpuError> {
    x.check("quantize: input")?;
    out.expect_room(x.n_rows, x.width)?;
    if let Some((weight, _)) = norm {
        expect_most("quantize: weights", (weight.bytes() / 4) as usize, x.width)?;
    }
    let device = recorder.device().clone();
    let most = device.limits().workgroup_len as usize;
    expect("quantize: invocations of a workgroup", most.max(64), most)?;
    let Shape {
        lanes,
        workgroup,
        sharing,
    } = Shape::of(device.limits(), &x, norm.is_some(), scaling);
    let halves = wanted.halves && takes_halves(&device, x.n_rows, scaling);
    let (weight, eps) = norm.unwrap_or((x.buffer, 0.0));
    let scales = wanted.added.and_then(|added| added.scales.as_ref());
    let params = QuantizeParams {
        k: x.width as u32,
        padded: x.width.next_multiple_of(PADDING) as u32,
        n_rows: x.n_rows as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        eps,
        begin: scales.map_or(0, |(_, begin)| *begin as u32),
    };
    let mut constants = vec![
        ("WG", workgroup as f64),
        ("LANES", lanes as f64),
        ("SCALING", f64::from(scaling as u8)),
        ("NORM", f64::from(u8::from(norm.is_some()))),
        ("HALVES", f64::from(u8::from(halves))),
        ("SHARING", sharing as f64),
    ];
    let mut bindings = vec![
        (&out.q).into(),
        weight.into(),
        x.buffer.into(),
        (&out.steps).into(),
        (&out.halves).into(),
    ];
    let kernel = match (wanted.added.is_some(), scales) {
        (false, _) if x.in_vectors() => &QUANTIZE,
        (false, _) => &QUANTIZE_ELEMENTS,
        (true, None) => &QUANTIZE_SUMS_BLOCKS,
        (true, Some(_)) => &QUANTIZE_SUMS_TERNARY,
    };
    if let Some(added) = wanted.added {
        bindings.push((&out.scratch).into());
        constants.push(("ADDED", added.n as f64));
    }
    if let Some((scales, _)) = scales {
        bindings.push(scales.into());
    }
    recorder.dispatch(
        kernel,
        &constants,
        &bindings,
        &params,
        fold(x.n_rows * sharing),
    )
}

params! {
    HalveParams {
        k: u32,
        padded: u32,
        x_offset: u32,
        x_stride: u32,
    }
}

/// Whether `x` can be [halved](halve): if rows are vectors, and no more than a grid has.
pub(super) fn can_halve(device: &Device, x: &Rows<'_>) -> bool {
    x.in_vectors() && x.n_rows <= device.limits().grid as usize
}

/// Stores `x`, over a power of two, as f16 in `out`, whose `halves` there are.
///
/// Errors: [`GpuError::Shape`] if there is no room.
pub(super) fn halve(
    recorder: &mut Recorder,
    x: Rows<'_>,
    out: &QuantizedRows,
) -> Result<(), GpuError> {
    x.check("halve: input")?;
    out.expect_room(x.n_rows, x.width)?;
    let padded = x.width.next_multiple_of(PADDING);
    let params = HalveParams {
        k: x.width as u32,
        padded: padded as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
    };
    let bindings = [(&out.halves).into(), x.buffer.into()];
    let grid = [padded.div_ceil(8 * 64) as u32, x.n_rows as u32];
    recorder.dispatch(&HALVE, &[], &bindings, &params, grid)
}

params! {
    DequantizeParams {
        width: u32,
        padded: u32,
        out_offset: u32,
        out_stride: u32,
    }
}

/// Dequantizes rows that were quantized with [`Scaling::Row`], for BitLinear layers whose weights are floats:
/// `out[t, i] ← q[t, i] / scale[t]`.
///
/// Errors: [`GpuError::Shape`] if `x` has room for fewer rows or columns than `out` has.
/// Exactness: that of `sterna_kernels::gemm`, bit for bit.
pub fn dequantize(
    recorder: &mut Recorder,
    x: &QuantizedRows,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    out.check("dequantize: output")?;
    x.expect_room(out.n_rows, out.width)?;
    let most = recorder.device().limits().grid as usize;
    expect_most("dequantize: rows", most, out.n_rows)?;
    let params = DequantizeParams {
        width: out.width as u32,
        padded: out.width.next_multiple_of(PADDING) as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
    };
    let bindings = [(&x.q).into(), (&x.steps).into(), out.buffer.into()];
    let grid = [out.width.div_ceil(4 * 64) as u32, out.n_rows as u32];
    recorder.dispatch(&DEQUANTIZE, &[], &bindings, &params, grid)
}
