//! Types with one scale per block: four rows at a time, block by block.

use std::borrow::Cow;

use super::super::super::activations::QuantizedRow;
use super::{ROWS, Vector, f16_bits, field, four_rows};
use crate::gemm::activations::SUM_LEN;
use crate::gemm::unroll::each_row;

/// Elements that share a scale of activations.
const GROUP: usize = 32;

/// The activations of a group, in two registers.
type Acts = [[i8; 16]; 2];

/// How a type stores its blocks of `BYTES` and `GROUPS`, all of which begin with their scale.
pub(in crate::gemm) trait Block<const BYTES: usize, const GROUPS: usize> {
    /// Groups that [`Block::dots`] takes: one or two.
    const SPAN: usize = 1;
    /// Stored codes are too large by this much.
    const BIAS: i32;

    /// The index within a span of the activation that [`Block::dots`] needs at `i`.
    fn source(i: usize) -> usize {
        i
    }

    /// The codes of group `i`, in order; those of a type with a bias of 0 with 128 added.
    fn codes<V: Vector>(v: V, block: &[u8; BYTES], i: usize) -> [V::Bytes; 2];

    /// Partial sums of `Σ_j (code_j + bias) · q_j` over span `i` of a block; of two groups one in the
    /// first two lanes, the other in the last two. `q` has [`Self::SPAN`] groups, in the order that
    /// [`Block::source`] says.
    #[inline(always)]
    fn dots<V: Vector>(v: V, block: &[u8; BYTES], i: usize, q: &[Acts]) -> V::Ints {
        let codes = Self::codes(v, block, i);
        let sums = v.add_dot(v.zero(), codes[0], v.load_i8(&q[0][0]));
        v.add_dot(sums, codes[1], v.load_i8(&q[0][1]))
    }
}

/// As [`super::multiply`].
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[cfg_attr(target_arch = "wasm32", inline(never))]
pub(super) fn gemv<V: Vector, B: Block<BYTES, GROUPS>, const BYTES: usize, const GROUPS: usize>(
    v: V,
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    const { assert!(GROUP == 2 * SUM_LEN) };
    let n_blocks = row_bytes / BYTES;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * BYTES);
    let q = arrange::<B, BYTES, GROUPS>(&x.q[..n_blocks * GROUPS * GROUP]);
    // Of each block.
    let q: &[[Acts; GROUPS]] = q.as_chunks().0.as_chunks().0.as_chunks().0;
    let scales: &[[f32; GROUPS]] = &x.scales.as_chunks().0[..n_blocks];
    let sums: &[[[i16; 2]; GROUPS]] = &x.sums.as_chunks().0.as_chunks().0[..n_blocks];
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        let blocks = four_rows::<BYTES>(rows, row_bytes, i * ROWS, out.len());
        let next = (i + 1) * ROWS * row_bytes;
        let acts = q.iter().zip(scales).zip(sums);
        let mut acc = v.splat(0.0);
        for (b, (blocks, ((q, scales), sums))) in blocks.zip(acts).enumerate() {
            v.prefetch(rows, next + b * ROWS * BYTES, ROWS * BYTES);
            let d = v.halves(each_row!(r => f16_bits(blocks[r], 0)));
            for span in 0..GROUPS / B::SPAN {
                let first = span * B::SPAN;
                let q = &q[first..first + B::SPAN];
                let dots = each_row!(r => B::dots(v, blocks[r], span, q));
                if B::SPAN == 1 {
                    let scale = v.mul(d, v.splat(scales[first]));
                    acc =
                        add_group::<V, B, BYTES, GROUPS>(v, acc, v.sums(dots), scale, sums[first]);
                } else {
                    let dots = v.sums_of_halves(dots);
                    let scale = v.mul(d, v.splat(scales[first]));
                    acc = add_group::<V, B, BYTES, GROUPS>(v, acc, dots[0], scale, sums[first]);
                    let scale = v.mul(d, v.splat(scales[first + 1]));
                    acc = add_group::<V, B, BYTES, GROUPS>(v, acc, dots[1], scale, sums[first + 1]);
                }
            }
        }
        out.copy_from_slice(&v.to_array(acc)[..out.len()]);
    }
}

/// Adds the products of a group, of which the `dots` are given, in all rows.
#[inline(always)]
fn add_group<V: Vector, B: Block<BYTES, GROUPS>, const BYTES: usize, const GROUPS: usize>(
    v: V,
    acc: V::Floats,
    dots: V::Ints,
    scale: V::Floats,
    sums: [i16; 2],
) -> V::Floats {
    let sum = i32::from(sums[0]) + i32::from(sums[1]);
    let dots = v.sub_i(dots, v.splat_i(B::BIAS * sum));
    v.add(acc, v.mul(v.to_f(dots), scale))
}

/// Activations in the order that the type needs.
fn arrange<B: Block<BYTES, GROUPS>, const BYTES: usize, const GROUPS: usize>(
    q: &[i8],
) -> Cow<'_, [i8]> {
    let len = B::SPAN * GROUP;
    if (0..len).all(|i| B::source(i) == i) {
        return Cow::Borrowed(q);
    }
    let spans = q.chunks_exact(len);
    Cow::Owned(
        spans
            .flat_map(|span| (0..len).map(|i| span[B::source(i)]))
            .collect(),
    )
}

/// `d: f16, codes: [i8; 32]`.
pub(in crate::gemm) struct Q8_0;

impl Block<34, 1> for Q8_0 {
    const BIAS: i32 = 0;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 34], _: usize) -> [V::Bytes; 2] {
        [
            v.flip(v.load(field(block, 2))),
            v.flip(v.load(field(block, 18))),
        ]
    }

    #[inline(always)]
    fn dots<V: Vector>(v: V, block: &[u8; 34], _: usize, q: &[Acts]) -> V::Ints {
        // Rounded activations of blocks are at least −127.
        let (a, b) = (v.load(field(block, 2)), v.load(field(block, 18)));
        let sums = v.add_dot_signed(v.zero(), a, v.load_i8(&q[0][0]));
        v.add_dot_signed(sums, b, v.load_i8(&q[0][1]))
    }
}

/// `d: f16, codes: [u8; 16]`: the first 16 elements in low nibbles, the others in high ones.
pub(in crate::gemm) struct Q4_0;

impl Block<18, 1> for Q4_0 {
    const BIAS: i32 = 8;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 18], _: usize) -> [V::Bytes; 2] {
        let codes = v.load(field(block, 2));
        [v.and(codes, 15), v.right::<4>(codes, 15)]
    }
}

/// `d: f16, high: u32, codes: [u8; 16]`: as [`Q4_0`], with the fifth bits in order.
pub(in crate::gemm) struct Q5_0;

impl Block<22, 1> for Q5_0 {
    const BIAS: i32 = 16;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 22], _: usize) -> [V::Bytes; 2] {
        let [a, b] = v.spread(*field(block, 2));
        let codes = v.load(field(block, 6));
        [
            v.or(v.and(codes, 15), v.and(a, 16)),
            v.or(v.right::<4>(codes, 15), v.and(b, 16)),
        ]
    }
}

/// `d: f16, bits: [u8; 16]`, element `8j + i` at bit `i` of byte `j`.
pub(in crate::gemm) struct Q1_0;

impl Block<18, 4> for Q1_0 {
    /// A bit is 1 or −1. That makes `2 · Σ bit · q − Σ q`.
    const BIAS: i32 = 1;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 18], i: usize) -> [V::Bytes; 2] {
        let [a, b] = v.spread(*field(block, 2 + 4 * i));
        [v.and(a, 2), v.and(b, 2)]
    }
}

/// `d: f16, codes: [u8; N]`, element `4j + i` at bits `2i` of byte `j`.
///
/// A register of codes has two groups, and those at the same bits are multiplied together.
pub(in crate::gemm) struct Crumbs<const BYTES: usize, const GROUPS: usize>;

/// 64 elements a block.
pub(in crate::gemm) type Q2_0 = Crumbs<18, 2>;

/// 128 elements a block.
pub(in crate::gemm) type Q2_0G128 = Crumbs<34, 4>;

impl<const BYTES: usize, const GROUPS: usize> Block<BYTES, GROUPS> for Crumbs<BYTES, GROUPS> {
    const SPAN: usize = 2;
    const BIAS: i32 = 1;

    fn source(i: usize) -> usize {
        i % 16 * 4 + i / 16
    }

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; BYTES], i: usize) -> [V::Bytes; 2] {
        let codes = v.interleave(fields(v, field(block, 2 + 16 * (i / 2))));
        if i.is_multiple_of(2) {
            [codes[0], codes[1]]
        } else {
            [codes[2], codes[3]]
        }
    }

    #[inline(always)]
    fn dots<V: Vector>(v: V, block: &[u8; BYTES], i: usize, q: &[Acts]) -> V::Ints {
        let [a, b, c, d] = fields(v, field(block, 2 + 16 * i));
        let sums = v.add_dot_by_fours(v.zero(), a, v.load_i8(&q[0][0]));
        let sums = v.add_dot_by_fours(sums, b, v.load_i8(&q[0][1]));
        let sums = v.add_dot_by_fours(sums, c, v.load_i8(&q[1][0]));
        v.add_dot_by_fours(sums, d, v.load_i8(&q[1][1]))
    }
}

/// Bits 1:0, 3:2, 5:4 and 7:6 of 16 bytes.
#[inline(always)]
fn fields<V: Vector>(v: V, bytes: &[u8; 16]) -> [V::Bytes; 4] {
    let codes = v.load(bytes);
    [
        v.and(codes, 3),
        v.right::<2>(codes, 3),
        v.right::<4>(codes, 3),
        v.right::<6>(codes, 3),
    ]
}
