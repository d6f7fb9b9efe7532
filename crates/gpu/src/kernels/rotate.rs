//! Rotation of activations for weights that are stored in a rotated basis.

use super::{Rows, fold, same_rows};
use crate::error::{expect, expect_most};
use crate::memory::Buffer;
use crate::shader::{ROTATE, ROTATE_IN_PLACE, params};
use crate::{GpuError, Recorder};

/// The longest run that kernels rotate.
pub const MAX_BLOCK: usize = 4096;

params! {
    RotateParams {
        width: u32,
        n_rows: u32,
        x_offset: u32,
        x_stride: u32,
        out_offset: u32,
        out_stride: u32,
        n_groups: u32,
        n_each: u32,
        head_dim: u32,
        scale: f32,
    }
}

/// A rotation of rows, as `sterna_kernels::hadamard::Rotation`.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotation {
    /// 1 or −1 for each element of a row.
    pub signs: Buffer,
    /// Elements of a row.
    pub width: usize,
    /// Elements of a run, a power of two.
    pub block: usize,
    /// Groups of heads, heads of each, and elements of a head, if heads of inputs are in another order than the matrix's.
    pub regroup: Option<[usize; 3]>,
}

/// `out ← H(signs · x)`, or with `inverse` `out ← signs · H(x)`, which undoes that of a stored row.
///
/// Errors: [`GpuError::Shape`] if shapes don't match, or `x` and `out` are different rows of one buffer, or one buffer whose
/// heads change places; [`GpuError::Unsupported`] if runs are longer than [`MAX_BLOCK`], or heads would have to be put back
/// into the order of inputs.
/// Exactness: that of `sterna_kernels::hadamard`, except for when sums are scaled.
pub fn rotate(
    recorder: &mut Recorder,
    rotation: &Rotation,
    inverse: bool,
    x: Rows<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Rotation {
        signs,
        width,
        block,
        regroup,
    } = rotation;
    let (width, block) = (*width, *block);
    let is_refused = inverse && regroup.is_some();
    if block > MAX_BLOCK || !block.is_power_of_two() || is_refused {
        return Err(GpuError::Unsupported {
            what: format!("a rotation of runs of {block} elements, heads of {regroup:?}"),
            reason: format!("kernels take powers of two up to {MAX_BLOCK}, and put no heads back"),
        });
    }
    x.check("rotation: input")?;
    out.check("rotation: output")?;
    same_rows("rotation: rows of the output", &x, &out)?;
    expect("rotation: elements of a row", width, x.width)?;
    expect(
        "rotation: elements of a row of the output",
        width,
        out.width,
    )?;
    expect("rotation: runs of a row", width / block * block, width)?;
    expect_most("rotation: signs", (signs.bytes() / 4) as usize, width)?;
    let [n_groups, n_each, head_dim] = regroup.unwrap_or([1, 1, width]);
    expect(
        "rotation: elements of heads",
        n_groups * n_each * head_dim,
        width,
    )?;
    let params = RotateParams {
        width: width as u32,
        n_rows: x.n_rows as u32,
        x_offset: x.offset as u32,
        x_stride: x.stride as u32,
        out_offset: out.offset as u32,
        out_stride: out.stride as u32,
        n_groups: n_groups as u32,
        n_each: n_each as u32,
        head_dim: head_dim as u32,
        scale: (1.0 / (block as f64).sqrt()) as f32,
    };
    let workgroup = (block / 2).clamp(32, 256);
    let constants = [
        ("WG", workgroup as f64),
        ("BLOCK", block as f64),
        ("INVERSE", f64::from(u8::from(inverse))),
        ("REGROUP", f64::from(u8::from(regroup.is_some()))),
    ];
    let grid = fold(x.n_rows * (width / block));
    if x.buffer == out.buffer {
        expect("rotation in place: offset", x.offset, out.offset)?;
        expect("rotation in place: stride", x.stride, out.stride)?;
        expect(
            "rotation in place: heads in order",
            0,
            usize::from(regroup.is_some()),
        )?;
        let bindings = [signs.into(), out.buffer.into()];
        return recorder.dispatch(&ROTATE_IN_PLACE, &constants, &bindings, &params, grid);
    }
    let bindings = [signs.into(), out.buffer.into(), x.buffer.into()];
    recorder.dispatch(&ROTATE, &constants, &bindings, &params, grid)
}
