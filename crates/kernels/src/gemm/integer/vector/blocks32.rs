//! Types with one scale per block: four rows at a time, block by block.

use std::borrow::Cow;

use super::super::super::activations::QuantizedRow;
use super::{ROWS, Vector, f16_bits, field, four_rows};
use crate::gemm::activations::SUM_LEN;
use crate::gemm::unroll::each_row;

/// Elements that share a scale of activations.
const GROUP: usize = 32;

/// Elements of a register of activations.
const REGISTER: usize = 16;

/// How a type stores its blocks of `BYTES`, all of which begin with their scale.
pub(in crate::gemm) trait Block<const BYTES: usize> {
    /// Elements.
    const LEN: usize;
    /// Elements that [`Block::dots`] takes: one group or two.
    const SPAN: usize = GROUP;
    /// Stored codes are too large by this much.
    const BIAS: i32;

    /// The index within a span of the activation that [`Block::dots`] needs at `i`.
    fn source(i: usize) -> usize {
        i
    }

    /// The codes of group `i`, in order; those of a type with a bias of 0 with 128 added.
    fn codes<V: Vector>(v: V, block: &[u8; BYTES], i: usize) -> [V::Bytes; 2];

    /// Partial sums of `Σ_j (code_j + bias) · q_j` over span `i` of a block; of two groups one in the
    /// first two lanes, the other in the last two. `q` has [`Self::SPAN`] activations, in the order that
    /// [`Block::source`] says.
    #[inline(always)]
    fn dots<V: Vector>(v: V, block: &[u8; BYTES], i: usize, q: &[[i8; REGISTER]]) -> V::Ints {
        let codes = Self::codes(v, block, i);
        let sums = v.add_dot(v.zero(), codes[0], v.load_i8(&q[0]));
        v.add_dot(sums, codes[1], v.load_i8(&q[1]))
    }
}

/// As [`super::multiply`].
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[cfg_attr(target_arch = "wasm32", inline(never))]
pub(super) fn gemv<V: Vector, B: Block<BYTES>, const BYTES: usize>(
    v: V,
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let n_blocks = row_bytes / BYTES;
    let n_groups = n_blocks * B::LEN / GROUP;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * BYTES);
    let q = arrange::<B, BYTES>(&x.q[..n_groups * GROUP]);
    let (q, scales, sums) = (
        q.as_chunks::<REGISTER>().0,
        &x.scales[..n_groups],
        &x.sums[..n_groups * (GROUP / SUM_LEN)],
    );
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        let rows_of_blocks = four_rows::<BYTES>(rows, row_bytes, i * ROWS);
        let next = (i + 1) * ROWS * row_bytes;
        let acts = q
            .chunks_exact(B::LEN / REGISTER)
            .zip(scales.chunks_exact(B::LEN / GROUP))
            .zip(sums.chunks_exact(B::LEN / SUM_LEN));
        let mut acc = v.splat(0.0);
        for (b, ((q, scales), sums)) in acts.enumerate() {
            v.prefetch(rows, next + b * ROWS * BYTES, ROWS * BYTES);
            let blocks = each_row!(r => &rows_of_blocks[r][b]);
            let d = v.halves(each_row!(r => f16_bits(blocks[r], 0)));
            let add_group = |acc, dots, group: usize| {
                let sum: i32 = sums[group * (GROUP / SUM_LEN)..][..GROUP / SUM_LEN]
                    .iter()
                    .map(|&sum| i32::from(sum))
                    .sum();
                let dots = v.sub_i(dots, v.splat_i(B::BIAS * sum));
                let scale = v.mul(d, v.splat(scales[group]));
                v.add(acc, v.mul(v.to_f(dots), scale))
            };
            for (span, q) in q.chunks_exact(B::SPAN / REGISTER).enumerate() {
                let dots = each_row!(r => B::dots(v, blocks[r], span, q));
                if B::SPAN == GROUP {
                    acc = add_group(acc, v.sums(dots), span);
                } else {
                    let [first, second] = v.sums_of_halves(dots);
                    acc = add_group(acc, first, 2 * span);
                    acc = add_group(acc, second, 2 * span + 1);
                }
            }
        }
        out.copy_from_slice(&v.to_array(acc)[..out.len()]);
    }
}

/// Activations in the order that the type needs.
fn arrange<B: Block<BYTES>, const BYTES: usize>(q: &[i8]) -> Cow<'_, [i8]> {
    if (0..B::SPAN).all(|i| B::source(i) == i) {
        return Cow::Borrowed(q);
    }
    let spans = q.chunks_exact(B::SPAN);
    Cow::Owned(
        spans
            .flat_map(|span| (0..B::SPAN).map(|i| span[B::source(i)]))
            .collect(),
    )
}

/// `d: f16, codes: [i8; 32]`.
pub(in crate::gemm) struct Q8_0;

impl Block<34> for Q8_0 {
    const LEN: usize = 32;
    const BIAS: i32 = 0;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 34], _: usize) -> [V::Bytes; 2] {
        [
            v.flip(v.load(field(block, 2))),
            v.flip(v.load(field(block, 18))),
        ]
    }

    #[inline(always)]
    fn dots<V: Vector>(v: V, block: &[u8; 34], _: usize, q: &[[i8; REGISTER]]) -> V::Ints {
        // Rounded activations of blocks are at least −127.
        let (a, b) = (v.load(field(block, 2)), v.load(field(block, 18)));
        let sums = v.add_dot_signed(v.zero(), a, v.load_i8(&q[0]));
        v.add_dot_signed(sums, b, v.load_i8(&q[1]))
    }
}

/// `d: f16, codes: [u8; 16]`: the first 16 elements in low nibbles, the others in high ones.
pub(in crate::gemm) struct Q4_0;

impl Block<18> for Q4_0 {
    const LEN: usize = 32;
    const BIAS: i32 = 8;

    #[inline(always)]
    fn codes<V: Vector>(v: V, block: &[u8; 18], _: usize) -> [V::Bytes; 2] {
        let codes = v.load(field(block, 2));
        [v.and(codes, 15), v.right::<4>(codes, 15)]
    }
}

/// `d: f16, high: u32, codes: [u8; 16]`: as [`Q4_0`], with the fifth bits in order.
pub(in crate::gemm) struct Q5_0;

impl Block<22> for Q5_0 {
    const LEN: usize = 32;
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

impl Block<18> for Q1_0 {
    const LEN: usize = 128;
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
pub(in crate::gemm) struct Crumbs<const BYTES: usize>;

/// 64 elements a block.
pub(in crate::gemm) type Q2_0 = Crumbs<18>;

/// 128 elements a block.
pub(in crate::gemm) type Q2_0G128 = Crumbs<34>;

impl<const BYTES: usize> Block<BYTES> for Crumbs<BYTES> {
    const LEN: usize = (BYTES - 2) * 4;
    const SPAN: usize = 2 * GROUP;
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
    fn dots<V: Vector>(v: V, block: &[u8; BYTES], i: usize, q: &[[i8; REGISTER]]) -> V::Ints {
        let [a, b, c, d] = fields(v, field(block, 2 + 16 * i));
        let sums = v.add_dot_by_fours(v.zero(), a, v.load_i8(&q[0]));
        let sums = v.add_dot_by_fours(sums, b, v.load_i8(&q[1]));
        let sums = v.add_dot_by_fours(sums, c, v.load_i8(&q[2]));
        v.add_dot_by_fours(sums, d, v.load_i8(&q[3]))
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
