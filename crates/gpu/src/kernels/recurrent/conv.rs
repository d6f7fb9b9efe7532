//! Short causal convolutions over the positions of a sequence.

use super::{SLOTS, State, flag};
use crate::error::{expect, expect_most};
use crate::kernels::{Rows, Sequences, fold, same_rows};
use crate::memory::Buffer;
use crate::shader::{CONVOLVE, params};
use crate::{GpuError, Recorder};

/// Rows of a channel that an invocation computes, which need most of what it loads in common.
const AT_ONCE: usize = 8;

/// The most positions that a convolution covers.
pub const MAX_TAPS: usize = 8;

params! {
    ConvParams {
        dim: u32,
        n_sequences: u32,
        n_rows: u32,
        x_offset: u32,
        x_stride: u32,
        out_offset: u32,
        out_stride: u32,
        sequences: u32,
        places: u32,
        first: u32,
        state_len: u32,
    }
}

/// What a convolution is made of.
#[derive(Debug, Clone, Copy)]
pub struct Convolution<'a> {
    /// `[dim, n_taps]`, the earliest position first.
    pub taps: &'a Buffer,
    /// Positions that it covers.
    pub n_taps: usize,
    /// Added before the activation, `[dim]`; not if it is gated.
    pub bias: Option<&'a Buffer>,
    /// Whether inputs are `B`, `C` and `x` side by side, as of `sterna_kernels::conv::gated`; otherwise it is
    /// `sterna_kernels::conv::silu`.
    pub is_gated: bool,
}

/// Convolves every channel of `x`, `[n_rows, dim]`, or three times as wide if it is gated, by itself: rows of the
/// sequences whose state it is.
///
/// Shapes: `out` is `[n_rows, dim]`; the part of the state is `[n_taps − 1, dim]`.
/// Errors: [`GpuError::Unsupported`] beyond [`MAX_TAPS`]; [`GpuError::Shape`] if shapes don't match.
/// Exactness: sums in the order of `sterna_kernels::conv`, except for products that a device fuses with them; results
/// don't depend on how positions are divided into calls.
pub fn convolve(
    recorder: &mut Recorder,
    convolution: &Convolution<'_>,
    x: Rows<'_>,
    state: State<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Convolution {
        taps,
        n_taps,
        bias,
        is_gated,
    } = *convolution;
    if n_taps == 0 || n_taps > MAX_TAPS {
        return Err(GpuError::Unsupported {
            what: format!("a convolution of {n_taps} positions"),
            reason: format!("kernels take 1 to {MAX_TAPS}"),
        });
    }
    let dim = out.width;
    x.check("convolution: input")?;
    out.check("convolution: output")?;
    same_rows("convolution: rows of the output", &x, &out)?;
    let width = if is_gated { 3 * dim } else { dim };
    expect("convolution: width of the input", width, x.width)?;
    let n_weights = (taps.bytes() / 4) as usize;
    expect_most("convolution: weights", n_weights, dim * n_taps)?;
    if let Some(bias) = bias {
        expect_most("convolution: bias", (bias.bytes() / 4) as usize, dim)?;
    }
    state.check("convolution: state", (n_taps - 1) * dim, &out)?;
    let Sequences { n, n_rows, .. } = state.sequences;
    if n * n_rows == 0 || dim == 0 {
        return Ok(());
    }
    let params = ConvParams {
        dim: dim as u32,
        n_sequences: n as u32,
        n_rows: n_rows as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        sequences: state.sequences.header(),
        places: state.sequences.places(),
        first: state.first as u32,
        state_len: state.layer.len as u32,
    };
    let nothing = recorder.device().nothing()?;
    let bindings = [
        x.buffer.into(),
        taps.into(),
        bias.unwrap_or(&nothing).into(),
        state.sequences.table.into(),
        (&state.layer.slots).into(),
        out.buffer.into(),
    ];
    // Outputs of several rows are computed at once, before any state is written, as both may be in one slot.
    let parts: &[(u32, usize)] = match n_rows {
        1 => &[(0, 1)],
        _ => &[(1, AT_ONCE), (2, 1)],
    };
    for &(part, at_once) in parts {
        let constants = [
            ("GATED", flag(is_gated)),
            ("BIAS", flag(bias.is_some())),
            ("PART", f64::from(part)),
            ("TAPS", n_taps as f64),
            ("ROWS", at_once as f64),
            ("SLOTS", SLOTS as f64),
        ];
        let n_rows = if part == 1 {
            n_rows.div_ceil(at_once)
        } else {
            1
        };
        let grid = fold(n * (n_rows * dim).div_ceil(64));
        recorder.dispatch(&CONVOLVE, &constants, &bindings, &params, grid)?;
    }
    Ok(())
}
