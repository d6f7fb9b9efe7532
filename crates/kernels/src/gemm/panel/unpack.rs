//! From stored rows to panels.

use std::ops::Range;

use sterna_format::DType;

use super::kernels::bias;
#[cfg(any(
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128")
))]
use super::unpack_vector;
#[cfg(target_arch = "x86_64")]
use super::unpack_x86;
use super::{Lanes, Panel, ROWS};
use crate::gemm::ternary::{I2s, Packed, TernaryPacking, Tq20, unpack};
use crate::isa::{Isa, Level, multiversion};
use crate::quant::integers::{SUPER_LEN, groups_of_32, super_blocks};
use crate::quant::ternary::{BLOCK, BLOCK_BYTES};

/// Writes the codes of `columns` of packed rows into a panel.
///
/// # Safety
/// The machine has the instruction set that the function was asked for.
pub(super) type UnpackTernary =
    unsafe fn(rows: &Lanes<&[u8]>, columns: Range<usize>, panel: &mut Panel);

/// The function for a packing of trits. `columns` are whole blocks; the rows have them.
pub(super) fn ternary(isa: Isa, packing: TernaryPacking) -> UnpackTernary {
    fn packed<P: Packed>(isa: Isa) -> UnpackTernary {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 | Level::AvxVnni | Level::Avx512 | Level::Amx => unpack_x86::ternary::<P>,
            Level::Baseline => ternary_portable::<P>,
            #[cfg(any(
                target_arch = "aarch64",
                all(target_arch = "wasm32", target_feature = "simd128")
            ))]
            _ => unpack_vector::ternary::<P>,
        }
    }
    match packing {
        TernaryPacking::I2s => packed::<I2s>(isa),
        TernaryPacking::Tq20 => packed::<Tq20>(isa),
    }
}

/// The codes of a block in a row.
#[inline(always)]
pub(super) fn block<P: Packed>(row: &[u8], block: usize) -> &[u8; BLOCK_BYTES] {
    row[P::offset(block)..]
        .first_chunk()
        .expect("rows have the columns")
}

/// The reference.
fn ternary_portable<P: Packed>(rows: &Lanes<&[u8]>, columns: Range<usize>, panel: &mut Panel) {
    let blocks = columns.start / BLOCK..columns.end / BLOCK;
    for (quads, b) in panel.codes.chunks_mut(BLOCK / 4).zip(blocks) {
        for (r, row) in rows.iter().enumerate() {
            let codes = unpack::<P>(block::<P>(row, b));
            for (quad, codes) in quads.iter_mut().zip(codes.as_flattened().as_chunks().0) {
                quad[r] = *codes;
            }
        }
    }
}

/// Writes one block of 256, or up to eight groups of 32, of each row into a panel: its `bytes`.
pub(super) fn blocks(
    isa: Isa,
    dtype: DType,
    rows: &Lanes<&[u8]>,
    bytes: Range<usize>,
    panel: &mut Panel,
) {
    let mut rows = *rows;
    for row in &mut rows {
        *row = &row[bytes.clone()];
    }
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::AvxVnni | Level::Avx512 | Level::Amx => {
            // SAFETY: these levels have AVX2 and F16C.
            if !unsafe { unpack_x86::blocks(dtype, &rows, panel) } {
                blocks_portable(isa, dtype, &rows, panel);
            }
        }
        Level::Baseline => blocks_portable(isa, dtype, &rows, panel),
        #[cfg(any(
            target_arch = "aarch64",
            all(target_arch = "wasm32", target_feature = "simd128")
        ))]
        _ => {
            if !unpack_vector::blocks(dtype, &rows, panel) {
                blocks_portable(isa, dtype, &rows, panel);
            }
        }
    }
}

multiversion! {
    /// The reference. Rows have nothing but the block or groups.
    fn blocks_portable(dtype: DType, rows: &Lanes<&[u8]>, panel: &mut Panel) {
        let bias = bias(dtype);
        let mut codes = [[0u8; SUPER_LEN]; ROWS];
        for (r, row) in rows.iter().enumerate() {
            let codes = &mut codes[r];
            let done = super_blocks(dtype, row, |block| {
                for (to, code) in codes.iter_mut().zip(block.codes) {
                    *to = code.wrapping_add(bias) as u8;
                }
                panel.d[0][r] = block.d;
                panel.dmin[r] = block.dmin;
                for (to, scale) in panel.scales.iter_mut().zip(block.scales) {
                    to[r] = i32::from(scale);
                }
                let offsets = if bias == 0 {
                    block.mins.map(i16::from)
                } else {
                    block.scales.map(i16::from)
                };
                for (to, pair) in panel.offsets.iter_mut().zip(offsets.as_chunks().0) {
                    to[r] = *pair;
                }
            });
            if !done {
                let mut group = 0;
                groups_of_32(dtype, row, |d, from| {
                    for (to, code) in codes[group * 32..].iter_mut().zip(from) {
                        *to = code.wrapping_add(bias) as u8;
                    }
                    panel.d[group][r] = d;
                    group += 1;
                });
            }
        }
        interleave(&codes, panel);
    }
}

/// Interleaves rows of codes.
#[inline(always)]
fn interleave(codes: &Lanes<[u8; SUPER_LEN]>, panel: &mut Panel) {
    for (r, codes) in codes.iter().enumerate() {
        for (to, quad) in panel.codes.iter_mut().zip(codes.as_chunks().0) {
            to[r] = *quad;
        }
    }
}
