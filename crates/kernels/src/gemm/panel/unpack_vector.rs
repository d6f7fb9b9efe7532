//! From stored rows to panels in registers of 128 bits, four rows at a time.
//!
//! Codes are unpacked as for one row of activations, in order, and then transposed, four of a row at a time.

use std::ops::Range;

use sterna_format::DType;

use super::unpack::block;
use super::{Lanes, Panel, ROWS};
use crate::gemm::integer::vector::Vector;
use crate::gemm::integer::vector::blocks32::{self, Block};
use crate::gemm::integer::vector::blocks256::{self, N_REGISTERS, N_SCALES, SuperBlock};
#[cfg(target_arch = "aarch64")]
use crate::gemm::integer::vector::neon::Plain as Registers;
#[cfg(target_arch = "wasm32")]
use crate::gemm::integer::vector::wasm::Widened as Registers;
use crate::gemm::ternary::Packed;
use crate::gemm::unroll::each_row;
use crate::quant::ternary::BLOCK;

/// Groups of four rows.
const PARTS: usize = ROWS / 4;

/// Writes the codes of `columns` of packed rows into a panel.
pub(super) fn ternary<P: Packed>(rows: &Lanes<&[u8]>, columns: Range<usize>, panel: &mut Panel) {
    let blocks = columns.start / BLOCK..columns.end / BLOCK;
    for (i, b) in blocks.enumerate() {
        for part in 0..PARTS {
            let blocks = each_row!(r => block::<P>(rows[4 * part + r], b));
            // SAFETY: every machine of the target has the registers; halves of 32 bytes.
            unsafe {
                for half in 0..2 {
                    let at = i * (BLOCK / 4) + 4 * half;
                    let packed = each_row!(r => Registers::load(blocks[r][16 * half..].as_ptr()));
                    let packed = Registers::transpose(packed);
                    for (quad, packed) in packed.into_iter().enumerate() {
                        let step = |g: usize| if P::LOWEST_FIRST { g } else { 3 - g };
                        let mut set =
                            |g, v| panel.set::<Registers>(at + quad + 8 * step(g), part, v);
                        set(0, Registers::and(packed, 3));
                        set(1, Registers::right::<2>(packed, 3));
                        set(2, Registers::right::<4>(packed, 3));
                        set(3, Registers::right::<6>(packed, 3));
                    }
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
        DType::Q2_K => super_block::<blocks256::Q2K>(rows, panel),
        DType::Q3_K => super_block::<blocks256::Q3K>(rows, panel),
        DType::Q4_K => super_block::<blocks256::Q4K>(rows, panel),
        DType::Q5_K => super_block::<blocks256::Q5K>(rows, panel),
        DType::Q6_K => super_block::<blocks256::Q6K>(rows, panel),
        DType::Q4_0 => groups::<blocks32::Q4_0>(rows, panel),
        DType::Q5_0 => groups::<blocks32::Q5_0>(rows, panel),
        DType::Q8_0 => groups::<blocks32::Q8_0>(rows, panel),
        DType::Q1_0 => groups::<blocks32::Q1_0>(rows, panel),
        DType::Q2_0 => groups::<blocks32::Q2_0>(rows, panel),
        DType::Q2_0_G128 | DType::PQ2_0 => groups::<blocks32::Q2_0G128>(rows, panel),
        _ => return false,
    }
    true
}

/// One block of 256.
fn super_block<B: SuperBlock>(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    assert!(rows.iter().all(|row| row.len() == B::BYTES));
    for part in 0..PARTS {
        let blocks = each_row!(r => rows[4 * part + r].as_ptr());
        // SAFETY: every machine of the target has the registers; the rows are a block each.
        unsafe {
            quarter::<B>(blocks, part, 0, panel);
            quarter::<B>(blocks, part, 1, panel);
            quarter::<B>(blocks, part, 2, panel);
            quarter::<B>(blocks, part, 3, panel);
            let d = Registers::halves(each_row!(r => blocks[r].add(B::D)));
            panel.d[0].as_chunks_mut().0[part] = Registers::store(d);
            if B::BIAS == 0 {
                let dmin = Registers::halves(each_row!(r => blocks[r].add(B::D + 2)));
                panel.dmin.as_chunks_mut().0[part] = Registers::store(dmin);
            }
            for (r, block) in blocks.into_iter().enumerate() {
                let r = 4 * part + r;
                let [stored, mins] = B::scales::<Registers>(block);
                let (mut scales, mut offsets) = ([0; N_SCALES], [0; N_SCALES]);
                Registers::store_i16(&mut scales, stored);
                Registers::store_i16(&mut offsets, mins);
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
}

/// The codes of a quarter of four blocks.
///
/// # Safety
/// Each has [`SuperBlock::BYTES`].
#[inline(always)]
unsafe fn quarter<B: SuperBlock>(
    blocks: [*const u8; 4],
    part: usize,
    quarter: usize,
    panel: &mut Panel,
) {
    // SAFETY: the caller's promise; every machine of the target has the registers.
    unsafe {
        let codes = each_row!(r => B::codes::<Registers>(blocks[r], quarter));
        each_row!(i => {
            let at = 4 * (quarter * N_REGISTERS + i);
            set_four(each_row!(r => codes[r][i]), at, part, panel)
        });
    }
}

/// Up to eight groups of 32.
fn groups<B: Block>(rows: &Lanes<&[u8]>, panel: &mut Panel) {
    const GROUP: usize = 32;
    let n_blocks = rows[0].len() / B::BYTES;
    assert!(
        rows.iter()
            .all(|row| row.len() == rows[0].len() && row.len() == n_blocks * B::BYTES)
    );
    for b in 0..n_blocks {
        for part in 0..PARTS {
            // SAFETY: every machine of the target has the registers; the rows have as many blocks.
            unsafe {
                let blocks = each_row!(r => rows[4 * part + r].as_ptr().add(b * B::BYTES));
                let d = Registers::store(Registers::halves(blocks));
                for i in 0..B::LEN / GROUP {
                    let group = b * (B::LEN / GROUP) + i;
                    panel.d[group].as_chunks_mut().0[part] = d;
                    let codes = each_row!(r => B::codes::<Registers>(blocks[r], i));
                    set_four(each_row!(r => codes[r][0]), group * 8, part, panel);
                    set_four(each_row!(r => codes[r][1]), group * 8 + 4, part, panel);
                }
            }
        }
    }
}

/// Sets sixteen columns from `4 · quad` on, of four rows.
#[inline(always)]
fn set_four(rows: [<Registers as Vector>::Bytes; 4], quad: usize, part: usize, panel: &mut Panel) {
    // SAFETY: every machine of the target has the registers.
    let [a, b, c, d] = unsafe { Registers::transpose(rows) };
    panel.set::<Registers>(quad, part, a);
    panel.set::<Registers>(quad + 1, part, b);
    panel.set::<Registers>(quad + 2, part, c);
    panel.set::<Registers>(quad + 3, part, d);
}

impl Panel {
    /// Sets four columns of rows `4 · part` and up.
    #[inline(always)]
    fn set<V: Vector>(&mut self, quad: usize, part: usize, codes: V::Bytes) {
        let to = &mut self.codes[quad].as_flattened_mut().as_chunks_mut::<16>().0[part];
        // SAFETY: 16 bytes of an array; every machine of the target has the registers.
        unsafe { V::store_bytes(to.as_mut_ptr(), codes) }
    }
}
