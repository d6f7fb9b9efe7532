//! K types: four rows at a time, superblock by superblock.

use super::super::super::activations::QuantizedRow;
use super::{ROWS, Vector};
use crate::gemm::unroll::each_row;

/// Elements of a superblock, sums of activations that belong to it, and its scales, some of them stored once for
/// two.
const LEN: usize = 256;
const N_SUMS: usize = 16;
pub(in crate::gemm) const N_SCALES: usize = LEN / 16;

/// Codes are unpacked in quarters of a superblock, so that few registers are in use at once.
pub(in crate::gemm) const N_REGISTERS: usize = LEN / 4 / 16;

/// How a type stores its superblocks.
///
/// # Safety
/// Methods take a pointer to [`Self::BYTES`], and need the instruction set of `V`.
pub(in crate::gemm) trait SuperBlock {
    const BYTES: usize;
    /// The offset of `d`, followed by `dmin` if there are minimums.
    const D: usize;
    /// Codes are stored 2^`BIAS` too large; if it is 0, there are minimums.
    const BIAS: u32;
    /// Registers of codes that share a scale: 1 or 2.
    const REGISTERS_A_SCALE: usize;

    /// The codes of a quarter as stored, in order.
    unsafe fn codes<V: Vector>(block: *const u8, quarter: usize) -> [V::Bytes; N_REGISTERS];

    /// The scales, signed, in order of the codes; a scale of two registers stands once, and nothing behind the
    /// last. The minimums of 16 elements each; where codes are biased, the scales instead.
    unsafe fn scales<V: Vector>(block: *const u8) -> [V::Bytes; 2];
}

/// As [`super::multiply`].
///
/// # Safety
/// As there.
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[cfg_attr(target_arch = "wasm32", inline(never))]
pub(super) unsafe fn gemv<V: Vector, B: SuperBlock>(
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let n_blocks = row_bytes / B::BYTES;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * B::BYTES);
    assert!(x.q.len() >= n_blocks * LEN && x.scales.len() >= n_blocks);
    assert!(x.sums.len() >= n_blocks * N_SUMS);
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        // Missing rows are replaced by the last one.
        let last = i * ROWS + out.len() - 1;
        let mut blocks = [0, 1, 2, 3].map(|r| rows[last.min(i * ROWS + r) * row_bytes..].as_ptr());
        let next = (i + 1) * ROWS * row_bytes;
        // SAFETY: the instructions by the caller's promise. Every row has `n_blocks` blocks and the
        // activations of that many are there: checked above.
        let sums = unsafe {
            let mut acc = V::splat(0.0);
            for b in 0..n_blocks {
                V::prefetch(rows, next + b * ROWS * B::BYTES, ROWS * B::BYTES);
                let q = x.q.as_ptr().add(b * LEN);
                let sums = x.sums.as_ptr().add(b * N_SUMS);
                let dx = V::splat(*x.scales.get_unchecked(b));
                acc = V::add(acc, products::<V, B>(blocks, q, sums, dx));
                blocks = each_row!(r => blocks[r].wrapping_add(B::BYTES));
            }
            V::store(acc)
        };
        out.copy_from_slice(&sums[..out.len()]);
    }
}

/// What one superblock of each of four rows adds to its sum.
///
/// # Safety
/// The instructions of `V`; each block has [`SuperBlock::BYTES`], `q` [`LEN`] and `sums` [`N_SUMS`]
/// elements.
#[inline(always)]
unsafe fn products<V: Vector, B: SuperBlock>(
    blocks: [*const u8; ROWS],
    q: *const i8,
    sums: *const i16,
    dx: V::Floats,
) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let prepared = each_row!(r => scales_and_offsets::<V, B>(blocks[r], sums));
        let mut dots = [V::zero(); ROWS];
        dots = add_quarter::<V, B>(dots, blocks, &prepared, q, 0);
        dots = add_quarter::<V, B>(dots, blocks, &prepared, q, 1);
        dots = add_quarter::<V, B>(dots, blocks, &prepared, q, 2);
        dots = add_quarter::<V, B>(dots, blocks, &prepared, q, 3);
        let offsets = each_row!(r => prepared[r].1);
        let (dots, offsets) = (V::sums(dots), V::sums(offsets));
        let scale = V::mul(V::halves(each_row!(r => blocks[r].add(B::D))), dx);
        if B::BIAS > 0 {
            let biased = shifted::<V, B>(offsets);
            V::mul(V::to_f(V::sub_i(dots, biased)), scale)
        } else {
            let offset = V::mul(V::halves(each_row!(r => blocks[r].add(B::D + 2))), dx);
            let product = V::mul(V::to_f(dots), scale);
            V::sub(product, V::mul(V::to_f(offsets), offset))
        }
    }
}

/// The scales of a superblock, and its partial sums of `Σ_s min_s · Σ_j q_j`; where codes are biased, of
/// `Σ_s scale_s · Σ_j q_j`.
///
/// # Safety
/// The instructions of `V`; the block has [`SuperBlock::BYTES`], `sums` [`N_SUMS`] elements.
#[inline(always)]
unsafe fn scales_and_offsets<V: Vector, B: SuperBlock>(
    block: *const u8,
    sums: *const i16,
) -> ([i16; N_SCALES], V::Ints) {
    // SAFETY: the caller's promise.
    unsafe {
        let [stored, mins] = B::scales::<V>(block);
        let mut scales = [0; N_SCALES];
        V::store_i16(&mut scales, stored);
        (scales, V::dot_i16(mins, sums))
    }
}

/// Adds the products of a quarter of a superblock of each row.
///
/// # Safety
/// As [`products`].
#[inline(always)]
unsafe fn add_quarter<V: Vector, B: SuperBlock>(
    dots: [V::Ints; ROWS],
    blocks: [*const u8; ROWS],
    prepared: &[([i16; N_SCALES], V::Ints); ROWS],
    q: *const i8,
    quarter: usize,
) -> [V::Ints; ROWS] {
    // SAFETY: the caller's promise.
    unsafe {
        let q = q.add(quarter * N_REGISTERS * 16);
        let q = [
            V::acts(q),
            V::acts(q.add(16)),
            V::acts(q.add(32)),
            V::acts(q.add(48)),
        ];
        each_row!(r => {
            let codes = B::codes::<V>(blocks[r], quarter);
            scaled_dots::<V, B>(dots[r], codes, q, &prepared[r].0, quarter)
        })
    }
}

/// `v · 2^BIAS`.
///
/// # Safety
/// The instructions of `V`.
#[inline(always)]
unsafe fn shifted<V: Vector, B: SuperBlock>(v: V::Ints) -> V::Ints {
    // SAFETY: the caller's promise.
    unsafe {
        match B::BIAS {
            2 => V::shift_left::<2>(v),
            5 => V::shift_left::<5>(v),
            _ => unreachable!("no type has another bias"),
        }
    }
}

/// Adds a quarter's partial sums of `Σ_s scale_s · Σ_j code_j · q_j`.
///
/// # Safety
/// The instructions of `V`.
#[inline(always)]
unsafe fn scaled_dots<V: Vector, B: SuperBlock>(
    sums: V::Ints,
    codes: [V::Bytes; N_REGISTERS],
    q: [V::Acts; N_REGISTERS],
    scales: &[i16; N_SCALES],
    quarter: usize,
) -> V::Ints {
    // SAFETY: the caller's promise.
    unsafe {
        let ([a, b, c, d], [x, y, z, w]) = (codes, q);
        if B::REGISTERS_A_SCALE == 2 {
            let sums = V::add_scaled([a, b], [x, y], &scales[2 * quarter], sums);
            V::add_scaled([c, d], [z, w], &scales[2 * quarter + 1], sums)
        } else {
            let sums = V::add_scaled([a], [x], &scales[4 * quarter], sums);
            let sums = V::add_scaled([b], [y], &scales[4 * quarter + 1], sums);
            let sums = V::add_scaled([c], [z], &scales[4 * quarter + 2], sums);
            V::add_scaled([d], [w], &scales[4 * quarter + 3], sums)
        }
    }
}

/// Both halves of `2 · 16` bytes, and their high nibbles: 64 codes in order.
///
/// # Safety
/// The instructions of `V`; 32 bytes.
#[inline(always)]
unsafe fn nibbles<V: Vector>(bytes: *const u8) -> [V::Bytes; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (V::load(bytes), V::load(bytes.add(16)));
        [
            V::and(a, 15),
            V::and(b, 15),
            V::right::<4>(a, 15),
            V::right::<4>(b, 15),
        ]
    }
}

/// Bits 1:0 and 3:2 of 32 bytes, or bits 5:4 and 7:6: 64 of 128 codes in order.
///
/// # Safety
/// The instructions of `V`; 32 bytes.
#[inline(always)]
unsafe fn crumbs<V: Vector>(bytes: *const u8, high: bool) -> [V::Bytes; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (a, b) = (V::load(bytes), V::load(bytes.add(16)));
        if high {
            [
                V::right::<4>(a, 3),
                V::right::<4>(b, 3),
                V::right::<6>(a, 3),
                V::right::<6>(b, 3),
            ]
        } else {
            [
                V::and(a, 3),
                V::and(b, 3),
                V::right::<2>(a, 3),
                V::right::<2>(b, 3),
            ]
        }
    }
}

/// The eight scales, and the eight minimums twice each, that Q4_K and Q5_K pack into twelve bytes: see
/// [`crate::quant`].
///
/// # Safety
/// Twelve bytes are there.
#[inline(always)]
unsafe fn unpack_scales<V: Vector>(packed: *const u8) -> [V::Bytes; 2] {
    // SAFETY: the caller's promise.
    let [a, b, c] = unsafe { three_words(packed) };
    let high = (c & 0x0f0f_0f0f) | (a >> 2 & 0x3030_3030);
    let scales = u64::from(a & 0x3f3f_3f3f) | u64::from(high) << 32;
    let high = (c >> 4 & 0x0f0f_0f0f) | (b >> 2 & 0x3030_3030);
    let mins = u64::from(b & 0x3f3f_3f3f) | u64::from(high) << 32;
    // SAFETY: the caller's promise.
    unsafe { [V::bytes(scales, 0), V::twice(mins)] }
}

/// # Safety
/// Twelve bytes are there.
#[inline(always)]
unsafe fn three_words(from: *const u8) -> [u32; 3] {
    // SAFETY: the caller's promise.
    let words = unsafe { from.cast::<[u32; 3]>().read_unaligned() };
    [
        u32::from_le(words[0]),
        u32::from_le(words[1]),
        u32::from_le(words[2]),
    ]
}

pub(in crate::gemm) struct Q4K;

impl SuperBlock for Q4K {
    const BYTES: usize = 144;
    const D: usize = 0;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, quarter: usize) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe { nibbles::<V>(block.add(16 + 32 * quarter)) }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe { unpack_scales::<V>(block.add(4)) }
    }
}

pub(in crate::gemm) struct Q5K;

impl SuperBlock for Q5K {
    const BYTES: usize = 176;
    const D: usize = 0;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 2;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, quarter: usize) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let [c0, c1, c2, c3] = nibbles::<V>(block.add(48 + 32 * quarter));
            let (a, b) = (V::load(block.add(16)), V::load(block.add(32)));
            // Bit s becomes bit 4 of sub-block s, of which a quarter has two.
            let [a0, b0, a1, b1] = match quarter {
                0 => [
                    V::left::<4>(a, 16),
                    V::left::<4>(b, 16),
                    V::left::<3>(a, 16),
                    V::left::<3>(b, 16),
                ],
                1 => [
                    V::left::<2>(a, 16),
                    V::left::<2>(b, 16),
                    V::left::<1>(a, 16),
                    V::left::<1>(b, 16),
                ],
                2 => [
                    V::and(a, 16),
                    V::and(b, 16),
                    V::right::<1>(a, 16),
                    V::right::<1>(b, 16),
                ],
                _ => [
                    V::right::<2>(a, 16),
                    V::right::<2>(b, 16),
                    V::right::<3>(a, 16),
                    V::right::<3>(b, 16),
                ],
            };
            [V::or(c0, a0), V::or(c1, b0), V::or(c2, a1), V::or(c3, b1)]
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe { unpack_scales::<V>(block.add(4)) }
    }
}

pub(in crate::gemm) struct Q6K;

impl SuperBlock for Q6K {
    const BYTES: usize = 210;
    const D: usize = 208;
    const BIAS: u32 = 5;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, quarter: usize) -> [V::Bytes; N_REGISTERS] {
        // Half a block has 64 bytes of low and 32 of high bits: its first quarter is in the low nibbles.
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let (half, low) = (quarter / 2, block.add(64 * (quarter / 2)));
            let (c0, c1) = (V::load(low), V::load(low.add(16)));
            let (c2, c3) = (V::load(low.add(32)), V::load(low.add(48)));
            let high = block.add(128 + 32 * half);
            let (a, b) = (V::load(high), V::load(high.add(16)));
            if quarter.is_multiple_of(2) {
                [
                    V::or(V::and(c0, 15), V::left::<4>(a, 0x30)),
                    V::or(V::and(c1, 15), V::left::<4>(b, 0x30)),
                    V::or(V::and(c2, 15), V::left::<2>(a, 0x30)),
                    V::or(V::and(c3, 15), V::left::<2>(b, 0x30)),
                ]
            } else {
                [
                    V::or(V::right::<4>(c0, 15), V::and(a, 0x30)),
                    V::or(V::right::<4>(c1, 15), V::and(b, 0x30)),
                    V::or(V::right::<4>(c2, 15), V::right::<2>(a, 0x30)),
                    V::or(V::right::<4>(c3, 15), V::right::<2>(b, 0x30)),
                ]
            }
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        let scales = unsafe { V::load(block.add(192)) };
        [scales, scales]
    }
}

pub(in crate::gemm) struct Q2K;

impl SuperBlock for Q2K {
    const BYTES: usize = 84;
    const D: usize = 80;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, quarter: usize) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe { crumbs::<V>(block.add(16 + 32 * (quarter / 2)), quarter % 2 == 1) }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let packed = V::load(block);
            [V::and(packed, 15), V::right::<4>(packed, 15)]
        }
    }
}

pub(in crate::gemm) struct Q3K;

impl SuperBlock for Q3K {
    const BYTES: usize = 110;
    const D: usize = 108;
    const BIAS: u32 = 2;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, quarter: usize) -> [V::Bytes; N_REGISTERS] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let low = crumbs::<V>(block.add(32 + 32 * (quarter / 2)), quarter % 2 == 1);
            let (a, b) = (V::load(block), V::load(block.add(16)));
            // Bit s becomes bit 2 of the codes of each 32 elements, of which a quarter has two.
            let [a0, b0, a1, b1] = match quarter {
                0 => [
                    V::left::<2>(a, 4),
                    V::left::<2>(b, 4),
                    V::left::<1>(a, 4),
                    V::left::<1>(b, 4),
                ],
                1 => [
                    V::and(a, 4),
                    V::and(b, 4),
                    V::right::<1>(a, 4),
                    V::right::<1>(b, 4),
                ],
                2 => [
                    V::right::<2>(a, 4),
                    V::right::<2>(b, 4),
                    V::right::<3>(a, 4),
                    V::right::<3>(b, 4),
                ],
                _ => [
                    V::right::<4>(a, 4),
                    V::right::<4>(b, 4),
                    V::right::<5>(a, 4),
                    V::right::<5>(b, 4),
                ],
            };
            [
                V::or(low[0], a0),
                V::or(low[1], b0),
                V::or(low[2], a1),
                V::or(low[3], b1),
            ]
        }
    }

    #[inline(always)]
    unsafe fn scales<V: Vector>(block: *const u8) -> [V::Bytes; 2] {
        // Six bits each, plus 32: the low four of scales 0 to 7 and 8 to 15 in the nibbles of eight
        // bytes, the upper two in four more.
        // SAFETY: the caller's promise.
        let [low, low_rest, high] = unsafe { three_words(block.add(96)) };
        let (nibbles, upper) = (0x0f0f_0f0f, 0x3030_3030);
        let two = |low: u32, high: u32| signed(u64::from(low) | u64::from(high) << 32);
        let (first, second) = (
            two(
                low & nibbles | high << 4 & upper,
                low_rest & nibbles | high << 2 & upper,
            ),
            two(
                low >> 4 & nibbles | high & upper,
                low_rest >> 4 & nibbles | high >> 2 & upper,
            ),
        );
        // SAFETY: the caller's promise.
        let scales = unsafe { V::bytes(first, second) };
        [scales, scales]
    }
}

/// Less 32 each of eight numbers of six bits.
#[inline(always)]
fn signed(scales: u64) -> u64 {
    // With the top bit set nothing is borrowed from the next byte; 128 − 32 has bits 5 and 6 set.
    let top = 0x8080_8080_8080_8080;
    ((scales | top) - 0x2020_2020_2020_2020) ^ top
}
