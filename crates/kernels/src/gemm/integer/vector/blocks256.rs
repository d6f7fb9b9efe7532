//! K types: four rows at a time, superblock by superblock.

use super::super::super::activations::QuantizedRow;
use super::{ROWS, Vector, f16_bits, field, four_rows};
use crate::gemm::unroll::each_row;

/// Elements of a superblock, sums of activations that belong to it, and its scales, some of them stored once for
/// two.
const LEN: usize = 256;
const N_SUMS: usize = 16;
pub(in crate::gemm) const N_SCALES: usize = LEN / 16;

/// Codes are unpacked in quarters of a superblock, so that few registers are in use at once.
pub(in crate::gemm) const N_REGISTERS: usize = LEN / 4 / 16;

/// How a type stores its superblocks of `BYTES`.
pub(in crate::gemm) trait SuperBlock<const BYTES: usize> {
    /// The offset of `d`, followed by `dmin` if there are minimums.
    const D: usize;
    /// Codes are stored 2^`BIAS` too large; if it is 0, there are minimums.
    const BIAS: u32;
    /// Registers of codes that share a scale: 1 or 2.
    const REGISTERS_A_SCALE: usize;

    /// The codes of a quarter as stored, in order.
    fn codes<V: Vector>(v: V, block: &[u8; BYTES], quarter: usize) -> [V::Bytes; N_REGISTERS];

    /// The scales, signed, in order of the codes; a scale of two registers stands once, and nothing behind the
    /// last. The minimums of 16 elements each; where codes are biased, the scales instead.
    fn scales<V: Vector>(v: V, block: &[u8; BYTES]) -> [V::Bytes; 2];
}

/// As [`super::multiply`].
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[cfg_attr(target_arch = "wasm32", inline(never))]
pub(super) fn gemv<V: Vector, B: SuperBlock<BYTES>, const BYTES: usize>(
    v: V,
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let n_blocks = row_bytes / BYTES;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * BYTES);
    let (q, sums, scales) = (
        &x.q.as_chunks().0[..n_blocks],
        &x.sums.as_chunks().0[..n_blocks],
        &x.scales[..n_blocks],
    );
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        let blocks = four_rows::<BYTES>(rows, row_bytes, i * ROWS, out.len());
        let next = (i + 1) * ROWS * row_bytes;
        let mut acc = v.splat(0.0);
        let acts = q.iter().zip(sums).zip(scales);
        for (b, (blocks, ((q, sums), scale))) in blocks.zip(acts).enumerate() {
            v.prefetch(rows, next + b * ROWS * BYTES, ROWS * BYTES);
            acc = v.add(
                acc,
                products::<V, B, BYTES>(v, blocks, q, sums, v.splat(*scale)),
            );
        }
        out.copy_from_slice(&v.to_array(acc)[..out.len()]);
    }
}

/// What one superblock of each of four rows adds to its sum.
#[inline(always)]
fn products<V: Vector, B: SuperBlock<BYTES>, const BYTES: usize>(
    v: V,
    blocks: [&[u8; BYTES]; ROWS],
    q: &[i8; LEN],
    sums: &[i16; N_SUMS],
    dx: V::Floats,
) -> V::Floats {
    let prepared = each_row!(r => scales_and_offsets::<V, B, BYTES>(v, blocks[r], sums));
    let mut dots = [v.zero(); ROWS];
    dots = add_quarter::<V, B, BYTES>(v, dots, blocks, &prepared, q, 0);
    dots = add_quarter::<V, B, BYTES>(v, dots, blocks, &prepared, q, 1);
    dots = add_quarter::<V, B, BYTES>(v, dots, blocks, &prepared, q, 2);
    dots = add_quarter::<V, B, BYTES>(v, dots, blocks, &prepared, q, 3);
    let offsets = each_row!(r => prepared[r].1);
    let (dots, offsets) = (v.sums(dots), v.sums(offsets));
    let scale = v.mul(v.halves(each_row!(r => f16_bits(blocks[r], B::D))), dx);
    if B::BIAS > 0 {
        let biased = shifted::<V, B, BYTES>(v, offsets);
        v.mul(v.to_f(v.sub_i(dots, biased)), scale)
    } else {
        let offset = v.mul(v.halves(each_row!(r => f16_bits(blocks[r], B::D + 2))), dx);
        let product = v.mul(v.to_f(dots), scale);
        v.sub(product, v.mul(v.to_f(offsets), offset))
    }
}

/// The scales of a superblock, and its partial sums of `Σ_s min_s · Σ_j q_j`; where codes are biased, of
/// `Σ_s scale_s · Σ_j q_j`.
#[inline(always)]
fn scales_and_offsets<V: Vector, B: SuperBlock<BYTES>, const BYTES: usize>(
    v: V,
    block: &[u8; BYTES],
    sums: &[i16; N_SUMS],
) -> ([i16; N_SCALES], V::Ints) {
    let [stored, mins] = B::scales(v, block);
    (v.to_i16(stored), v.dot_i16(mins, sums))
}

/// Adds the products of a quarter of a superblock of each row.
#[inline(always)]
fn add_quarter<V: Vector, B: SuperBlock<BYTES>, const BYTES: usize>(
    v: V,
    dots: [V::Ints; ROWS],
    blocks: [&[u8; BYTES]; ROWS],
    prepared: &[([i16; N_SCALES], V::Ints); ROWS],
    q: &[i8; LEN],
    quarter: usize,
) -> [V::Ints; ROWS] {
    let q = &q.as_chunks().0[quarter * N_REGISTERS..][..N_REGISTERS];
    let q = [v.acts(&q[0]), v.acts(&q[1]), v.acts(&q[2]), v.acts(&q[3])];
    each_row!(r => {
        let codes = B::codes(v, blocks[r], quarter);
        scaled_dots::<V, B, BYTES>(v, dots[r], codes, q, &prepared[r].0, quarter)
    })
}

/// `ints · 2^BIAS`.
#[inline(always)]
fn shifted<V: Vector, B: SuperBlock<BYTES>, const BYTES: usize>(v: V, ints: V::Ints) -> V::Ints {
    match B::BIAS {
        2 => v.shift_left::<2>(ints),
        5 => v.shift_left::<5>(ints),
        _ => unreachable!("no type has another bias"),
    }
}

/// Adds a quarter's partial sums of `Σ_s scale_s · Σ_j code_j · q_j`.
#[inline(always)]
fn scaled_dots<V: Vector, B: SuperBlock<BYTES>, const BYTES: usize>(
    v: V,
    sums: V::Ints,
    codes: [V::Bytes; N_REGISTERS],
    q: [V::Acts; N_REGISTERS],
    scales: &[i16; N_SCALES],
    quarter: usize,
) -> V::Ints {
    let ([a, b, c, d], [x, y, z, w]) = (codes, q);
    if B::REGISTERS_A_SCALE == 2 {
        let sums = v.add_scaled([a, b], [x, y], &scales[2 * quarter], sums);
        v.add_scaled([c, d], [z, w], &scales[2 * quarter + 1], sums)
    } else {
        let sums = v.add_scaled([a], [x], &scales[4 * quarter], sums);
        let sums = v.add_scaled([b], [y], &scales[4 * quarter + 1], sums);
        let sums = v.add_scaled([c], [z], &scales[4 * quarter + 2], sums);
        v.add_scaled([d], [w], &scales[4 * quarter + 3], sums)
    }
}

/// Both halves of `2 · 16` bytes, and their high nibbles: 64 codes in order.
#[inline(always)]
fn nibbles<V: Vector>(v: V, bytes: &[u8; 32]) -> [V::Bytes; 4] {
    let (a, b) = (v.load(field(bytes, 0)), v.load(field(bytes, 16)));
    [
        v.and(a, 15),
        v.and(b, 15),
        v.right::<4>(a, 15),
        v.right::<4>(b, 15),
    ]
}

/// Bits 1:0 and 3:2 of 32 bytes, or bits 5:4 and 7:6: 64 of 128 codes in order.
#[inline(always)]
fn crumbs<V: Vector>(v: V, bytes: &[u8; 32], high: bool) -> [V::Bytes; 4] {
    let (a, b) = (v.load(field(bytes, 0)), v.load(field(bytes, 16)));
    if high {
        [
            v.right::<4>(a, 3),
            v.right::<4>(b, 3),
            v.right::<6>(a, 3),
            v.right::<6>(b, 3),
        ]
    } else {
        [
            v.and(a, 3),
            v.and(b, 3),
            v.right::<2>(a, 3),
            v.right::<2>(b, 3),
        ]
    }
}

/// The eight scales, and the eight minimums twice each, that Q4_K and Q5_K pack into twelve bytes: see
/// [`crate::quant`].
#[inline(always)]
fn unpack_scales<V: Vector>(v: V, packed: &[u8; 12]) -> [V::Bytes; 2] {
    let [a, b, c] = three_words(packed);
    let high = (c & 0x0f0f_0f0f) | (a >> 2 & 0x3030_3030);
    let scales = u64::from(a & 0x3f3f_3f3f) | u64::from(high) << 32;
    let high = (c >> 4 & 0x0f0f_0f0f) | (b >> 2 & 0x3030_3030);
    let mins = u64::from(b & 0x3f3f_3f3f) | u64::from(high) << 32;
    [v.bytes(scales, 0), v.twice(mins)]
}

#[inline(always)]
fn three_words(from: &[u8; 12]) -> [u32; 3] {
    // Not by a loop: compilers for WebAssembly keep arrays in memory that one indexes.
    let word = |at| u32::from_le_bytes(*field(from, at));
    [word(0), word(4), word(8)]
}

pub(in crate::gemm) struct Q4K;

impl SuperBlock<144> for Q4K {
    const D: usize = 0;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 2;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 144], quarter: usize) -> [V::Bytes; N_REGISTERS] {
        nibbles(v, field(block, 16 + 32 * quarter))
    }

    #[inline(always)]
    fn scales<V: Vector>(v: V, block: &[u8; 144]) -> [V::Bytes; 2] {
        unpack_scales(v, field(block, 4))
    }
}

pub(in crate::gemm) struct Q5K;

impl SuperBlock<176> for Q5K {
    const D: usize = 0;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 2;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 176], quarter: usize) -> [V::Bytes; N_REGISTERS] {
        let [c0, c1, c2, c3] = nibbles(v, field(block, 48 + 32 * quarter));
        let (a, b) = (v.load(field(block, 16)), v.load(field(block, 32)));
        // Bit s becomes bit 4 of sub-block s, of which a quarter has two.
        let [a0, b0, a1, b1] = match quarter {
            0 => [
                v.left::<4>(a, 16),
                v.left::<4>(b, 16),
                v.left::<3>(a, 16),
                v.left::<3>(b, 16),
            ],
            1 => [
                v.left::<2>(a, 16),
                v.left::<2>(b, 16),
                v.left::<1>(a, 16),
                v.left::<1>(b, 16),
            ],
            2 => [
                v.and(a, 16),
                v.and(b, 16),
                v.right::<1>(a, 16),
                v.right::<1>(b, 16),
            ],
            _ => [
                v.right::<2>(a, 16),
                v.right::<2>(b, 16),
                v.right::<3>(a, 16),
                v.right::<3>(b, 16),
            ],
        };
        [v.or(c0, a0), v.or(c1, b0), v.or(c2, a1), v.or(c3, b1)]
    }

    #[inline(always)]
    fn scales<V: Vector>(v: V, block: &[u8; 176]) -> [V::Bytes; 2] {
        unpack_scales(v, field(block, 4))
    }
}

pub(in crate::gemm) struct Q6K;

impl SuperBlock<210> for Q6K {
    const D: usize = 208;
    const BIAS: u32 = 5;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 210], quarter: usize) -> [V::Bytes; N_REGISTERS] {
        // Half a block has 64 bytes of low and 32 of high bits: its first quarter is in the low nibbles.
        let load = |at| v.load(field(block, at));
        let low = 64 * (quarter / 2);
        let [c0, c1, c2, c3] = [load(low), load(low + 16), load(low + 32), load(low + 48)];
        let high = 128 + 32 * (quarter / 2);
        let [a, b] = [load(high), load(high + 16)];
        if quarter.is_multiple_of(2) {
            [
                v.or(v.and(c0, 15), v.left::<4>(a, 0x30)),
                v.or(v.and(c1, 15), v.left::<4>(b, 0x30)),
                v.or(v.and(c2, 15), v.left::<2>(a, 0x30)),
                v.or(v.and(c3, 15), v.left::<2>(b, 0x30)),
            ]
        } else {
            [
                v.or(v.right::<4>(c0, 15), v.and(a, 0x30)),
                v.or(v.right::<4>(c1, 15), v.and(b, 0x30)),
                v.or(v.right::<4>(c2, 15), v.right::<2>(a, 0x30)),
                v.or(v.right::<4>(c3, 15), v.right::<2>(b, 0x30)),
            ]
        }
    }

    #[inline(always)]
    fn scales<V: Vector>(v: V, block: &[u8; 210]) -> [V::Bytes; 2] {
        let scales = v.load(field(block, 192));
        [scales, scales]
    }
}

pub(in crate::gemm) struct Q2K;

impl SuperBlock<84> for Q2K {
    const D: usize = 80;
    const BIAS: u32 = 0;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 84], quarter: usize) -> [V::Bytes; N_REGISTERS] {
        crumbs(v, field(block, 16 + 32 * (quarter / 2)), quarter % 2 == 1)
    }

    #[inline(always)]
    fn scales<V: Vector>(v: V, block: &[u8; 84]) -> [V::Bytes; 2] {
        let packed = v.load(field(block, 0));
        [v.and(packed, 15), v.right::<4>(packed, 15)]
    }
}

pub(in crate::gemm) struct Q3K;

impl SuperBlock<110> for Q3K {
    const D: usize = 108;
    const BIAS: u32 = 2;
    const REGISTERS_A_SCALE: usize = 1;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 110], quarter: usize) -> [V::Bytes; N_REGISTERS] {
        let low = crumbs(v, field(block, 32 + 32 * (quarter / 2)), quarter % 2 == 1);
        let (a, b) = (v.load(field(block, 0)), v.load(field(block, 16)));
        // Bit s becomes bit 2 of the codes of each 32 elements, of which a quarter has two.
        let [a0, b0, a1, b1] = match quarter {
            0 => [
                v.left::<2>(a, 4),
                v.left::<2>(b, 4),
                v.left::<1>(a, 4),
                v.left::<1>(b, 4),
            ],
            1 => [
                v.and(a, 4),
                v.and(b, 4),
                v.right::<1>(a, 4),
                v.right::<1>(b, 4),
            ],
            2 => [
                v.right::<2>(a, 4),
                v.right::<2>(b, 4),
                v.right::<3>(a, 4),
                v.right::<3>(b, 4),
            ],
            _ => [
                v.right::<4>(a, 4),
                v.right::<4>(b, 4),
                v.right::<5>(a, 4),
                v.right::<5>(b, 4),
            ],
        };
        [
            v.or(low[0], a0),
            v.or(low[1], b0),
            v.or(low[2], a1),
            v.or(low[3], b1),
        ]
    }

    #[inline(always)]
    fn scales<V: Vector>(v: V, block: &[u8; 110]) -> [V::Bytes; 2] {
        // Six bits each, plus 32: the low four of scales 0 to 7 and 8 to 15 in the nibbles of eight
        // bytes, the upper two in four more.
        let [low, low_rest, high] = three_words(field(block, 96));
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
        let scales = v.bytes(first, second);
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
