//! From stored rows to panels in registers of 128 bits, four rows at a time.
//!
//! Codes are unpacked as for one row of activations, in order, and then transposed, four of a row at a time.

use std::ops::Range;

use sterna_format::DType;

use super::unpack::block;
use super::{Lanes, Panel, ROWS};
use crate::gemm::integer::vector::blocks32::{self, Block};
use crate::gemm::integer::vector::blocks256::{self, N_REGISTERS, SuperBlock};
use crate::gemm::integer::vector::{Vector, f16_bits, field};
use crate::gemm::ternary::Packed;
use crate::gemm::unroll::each_row;
use crate::quant::ternary::BLOCK;
#[cfg(target_arch = "aarch64")]
use crate::simd::neon::Neon as Registers;
#[cfg(target_arch = "wasm32")]
use crate::simd::wasm::Simd128 as Registers;

/// What every machine of the target has.
#[inline(always)]
fn registers() -> Registers {
    #[cfg(target_arch = "aarch64")]
    return Registers::new();
    #[cfg(target_arch = "wasm32")]
    return Registers;
}

/// Groups of four rows.
const PARTS: usize = ROWS / 4;

/// Writes the codes of `columns` of packed rows into a panel.
pub(super) fn ternary<P: Packed>(rows: &Lanes<&[u8]>, columns: Range<usize>, panel: &mut Panel) {
    let v = registers();
    let blocks = columns.start / BLOCK..columns.end / BLOCK;
    for (i, b) in blocks.enumerate() {
        for part in 0..PARTS {
            let blocks = each_row!(r => block::<P>(rows[4 * part + r], b));
            for half in 0..2 {
                let at = i * (BLOCK / 4) + 4 * half;
                let packed = each_row!(r => v.load(field(blocks[r], 16 * half)));
                for (quad, packed) in v.transpose(packed).into_iter().enumerate() {
                    let step = |g: usize| if P::LOWEST_FIRST { g } else { 3 - g };
                    let mut set = |g, codes| panel.set(at + quad + 8 * step(g), part, codes);
                    set(0, v.and(packed, 3));
                    set(1, v.right::<2>(packed, 3));
                    set(2, v.right::<4>(packed, 3));
                    set(3, v.right::<6>(packed, 3));
                }
            }
        }
    }
}

/// Writes one block of 256, or up to eight groups of 32, into a panel; `false` if there is no code
/// for `dtype`.
///
/// Shapes: rows of nothing but the block or groups.
pub(super) fn blocks(dtype: DType, rows: &Lanes<&[u8]>, panel: &mut Panel) -> bool {
    match dtype {
        DType::Q2_K => super_block::<blocks256::Q2K, _>(rows, panel),
        DType::Q3_K => super_block::<blocks256::Q3K, _>(rows, panel),
        DType::Q4_K => super_block::<blocks256::Q4K, _>(rows, panel),
        DType::Q5_K => super_block::<blocks256::Q5K, _>(rows, panel),
        DType::Q6_K => super_block::<blocks256::Q6K, _>(rows, panel),
        DType::Q4_0 => groups::<blocks32::Q4_0, _, _>(rows, panel),
        DType::Q5_0 => groups::<blocks32::Q5_0, _, _>(rows, panel),
        DType::Q8_0 => groups::<blocks32::Q8_0, _, _>(rows, panel),
        DType::Q1_0 => groups::<blocks32::Q1_0, _, _>(rows, panel),
        DType::Q2_0 => groups::<blocks32::Q2_0, _, _>(rows, panel),
        DType::Q2_0_G128 | DType::PQ2_0 => groups::<blocks32::Q2_0G128, _, _>(rows, panel),
        _ => return false,
    }
    true
}

/// One block of 256.
fn super_block<B: SuperBlock<BYTES>, const BYTES: usize>(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    let v = registers();
    for part in 0..PARTS {
        let blocks = each_row!(r => whole::<BYTES>(rows[4 * part + r]));
        quarter::<B, BYTES>(blocks, part, 0, panel);
        quarter::<B, BYTES>(blocks, part, 1, panel);
        quarter::<B, BYTES>(blocks, part, 2, panel);
        quarter::<B, BYTES>(blocks, part, 3, panel);
        let d = v.halves(each_row!(r => f16_bits(blocks[r], B::D)));
        panel.d[0].as_chunks_mut().0[part] = v.to_array(d);
        if B::BIAS == 0 {
            let dmin = v.halves(each_row!(r => f16_bits(blocks[r], B::D + 2)));
            panel.dmin.as_chunks_mut().0[part] = v.to_array(dmin);
        }
        for (r, block) in blocks.into_iter().enumerate() {
            let r = 4 * part + r;
            let [scales, offsets] = B::scales(v, block).map(|of| v.to_i16(of));
            let to = panel.scales.iter_mut().step_by(B::REGISTERS_A_SCALE);
            for (to, scale) in to.zip(scales) {
                to[r] = scale.into();
            }
            for (to, pair) in panel.offsets.iter_mut().zip(offsets.as_chunks().0) {
                to[r] = *pair;
            }
        }
    }
}

/// A row that is nothing but a block.
fn whole<const BYTES: usize>(row: &[u8]) -> &[u8; BYTES] {
    row.try_into().expect("a block of 256")
}

/// The codes of a quarter of four blocks.
#[inline(always)]
fn quarter<B: SuperBlock<BYTES>, const BYTES: usize>(
    blocks: [&[u8; BYTES]; 4],
    part: usize,
    quarter: usize,
    panel: &mut Panel,
) {
    let codes = each_row!(r => B::codes(registers(), blocks[r], quarter));
    each_row!(i => {
        let at = 4 * (quarter * N_REGISTERS + i);
        set_four(each_row!(r => codes[r][i]), at, part, panel)
    });
}

/// Up to eight groups of 32.
fn groups<B: Block<BYTES, GROUPS>, const BYTES: usize, const GROUPS: usize>(
    rows: &Lanes<&[u8]>,
    panel: &mut Panel,
) {
    let v = registers();
    let n_blocks = rows[0].len() / BYTES;
    for (part, rows) in rows.as_chunks::<4>().0.iter().enumerate() {
        let rows = each_row!(r => rows[r].as_chunks::<BYTES>().0);
        let blocks = (0..n_blocks).map(|b| each_row!(r => &rows[r][b]));
        for (b, blocks) in blocks.enumerate() {
            let d = v.to_array(v.halves(each_row!(r => f16_bits(blocks[r], 0))));
            for i in 0..GROUPS {
                let group = b * GROUPS + i;
                panel.d[group].as_chunks_mut().0[part] = d;
                let codes = each_row!(r => B::codes(v, blocks[r], i));
                set_four(each_row!(r => codes[r][0]), group * 8, part, panel);
                set_four(each_row!(r => codes[r][1]), group * 8 + 4, part, panel);
            }
        }
    }
}

/// Sets sixteen columns from `4 · quad` on, of four rows.
#[inline(always)]
fn set_four(rows: [<Registers as Vector>::Bytes; 4], quad: usize, part: usize, panel: &mut Panel) {
    for (i, codes) in registers().transpose(rows).into_iter().enumerate() {
        panel.set(quad + i, part, codes);
    }
}

impl Panel {
    /// Sets four columns of rows `4 · part` and up.
    #[inline(always)]
    fn set(&mut self, quad: usize, part: usize, codes: <Registers as Vector>::Bytes) {
        let to = &mut self.codes[quad].as_flattened_mut().as_chunks_mut().0[part];
        registers().store_bytes(codes, to);
    }
}
