//! Types with one scale per block: four rows at a time, block by block.

use std::borrow::Cow;

use super::super::super::activations::QuantizedRow;
use super::{ROWS, Vector};
use crate::gemm::unroll::each_row;

/// Elements that share a scale of activations.
const GROUP: usize = 32;

/// Elements of which [`SUM_LEN`](super::super::super::activations::SUM_LEN) are summed up.
const SUMS_A_GROUP: usize = 2;

/// How a type stores its blocks, all of which begin with their scale.
pub(in crate::gemm) trait Block {
    const BYTES: usize;
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
    ///
    /// # Safety
    /// The instructions of `V`. `block` has [`Self::BYTES`], of which group `i` is a part.
    unsafe fn codes<V: Vector>(block: *const u8, i: usize) -> [V::Bytes; 2];

    /// Partial sums of `Σ_j (code_j + bias) · q_j` over span `i` of a block; of two groups one in the
    /// first two lanes, the other in the last two. `q` is in the order that [`Block::source`] says.
    ///
    /// # Safety
    /// As [`Block::codes`]; `q` has [`Self::SPAN`] elements.
    #[inline(always)]
    unsafe fn dots<V: Vector>(block: *const u8, i: usize, q: *const i8) -> V::Ints {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = Self::codes::<V>(block, i);
            let sums = V::add_dot(V::zero(), codes[0], V::load(q.cast()));
            V::add_dot(sums, codes[1], V::load(q.add(16).cast()))
        }
    }
}

/// As [`super::multiply`].
///
/// # Safety
/// As there.
#[cfg_attr(not(target_arch = "wasm32"), inline(always))]
#[cfg_attr(target_arch = "wasm32", inline(never))]
pub(super) unsafe fn gemv<V: Vector, B: Block>(
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let n_blocks = row_bytes / B::BYTES;
    let n_groups = n_blocks * B::LEN / GROUP;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * B::BYTES);
    assert!(x.q.len() >= n_groups * GROUP && x.scales.len() >= n_groups);
    assert!(x.sums.len() >= n_groups * SUMS_A_GROUP);
    let q = arrange::<B>(&x.q[..n_groups * GROUP]);
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
                let d = V::halves(blocks);
                for span in 0..B::LEN / B::SPAN {
                    let at = b * B::LEN + span * B::SPAN;
                    let q = q.as_ptr().add(at);
                    let dots = each_row!(r => B::dots::<V>(blocks[r], span, q));
                    if B::SPAN == GROUP {
                        acc = add_group::<V, B>(acc, V::sums(dots), d, x, at / GROUP);
                    } else {
                        let [first, second] = V::sums_of_halves(dots);
                        acc = add_group::<V, B>(acc, first, d, x, at / GROUP);
                        acc = add_group::<V, B>(acc, second, d, x, at / GROUP + 1);
                    }
                }
                blocks = each_row!(r => blocks[r].wrapping_add(B::BYTES));
            }
            V::store(acc)
        };
        out.copy_from_slice(&sums[..out.len()]);
    }
}

/// Activations in the order that the type needs.
fn arrange<B: Block>(q: &[i8]) -> Cow<'_, [i8]> {
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

/// Adds the products of a group, of which the `dots` are given, in all rows.
///
/// # Safety
/// The instructions of `V`; there is such a group of activations.
#[inline(always)]
unsafe fn add_group<V: Vector, B: Block>(
    acc: V::Floats,
    dots: V::Ints,
    d: V::Floats,
    x: QuantizedRow<'_>,
    group: usize,
) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = x.sums.as_ptr().add(group * SUMS_A_GROUP);
        let sum = i32::from(*sums) + i32::from(*sums.add(1));
        let dots = V::sub_i(dots, V::splat_i(B::BIAS * sum));
        let scale = V::mul(d, V::splat(*x.scales.get_unchecked(group)));
        V::add(acc, V::mul(V::to_f(dots), scale))
    }
}

/// `d: f16, codes: [i8; 32]`.
pub(in crate::gemm) struct Q8_0;

impl Block for Q8_0 {
    const BYTES: usize = 34;
    const LEN: usize = 32;
    const BIAS: i32 = 0;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, _: usize) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            [
                V::flip(V::load(block.add(2))),
                V::flip(V::load(block.add(18))),
            ]
        }
    }

    #[inline(always)]
    unsafe fn dots<V: Vector>(block: *const u8, _: usize, q: *const i8) -> V::Ints {
        // SAFETY: the caller's promise. Rounded activations of blocks are at least −127.
        unsafe {
            let (a, b) = (V::load(block.add(2)), V::load(block.add(18)));
            let sums = V::add_dot_signed(V::zero(), a, V::load(q.cast()));
            V::add_dot_signed(sums, b, V::load(q.add(16).cast()))
        }
    }
}

/// `d: f16, codes: [u8; 16]`: the first 16 elements in low nibbles, the others in high ones.
pub(in crate::gemm) struct Q4_0;

impl Block for Q4_0 {
    const BYTES: usize = 18;
    const LEN: usize = 32;
    const BIAS: i32 = 8;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, _: usize) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = V::load(block.add(2));
            [V::and(codes, 15), V::right::<4>(codes, 15)]
        }
    }
}

/// `d: f16, high: u32, codes: [u8; 16]`: as [`Q4_0`], with the fifth bits in order.
pub(in crate::gemm) struct Q5_0;

impl Block for Q5_0 {
    const BYTES: usize = 22;
    const LEN: usize = 32;
    const BIAS: i32 = 16;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, _: usize) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b] = V::spread(block.add(2));
            let codes = V::load(block.add(6));
            let low = V::or(V::and(codes, 15), V::and(a, 16));
            let high = V::or(V::right::<4>(codes, 15), V::and(b, 16));
            [low, high]
        }
    }
}

/// `d: f16, bits: [u8; 16]`, element `8j + i` at bit `i` of byte `j`.
pub(in crate::gemm) struct Q1_0;

impl Block for Q1_0 {
    const BYTES: usize = 18;
    const LEN: usize = 128;
    /// A bit is 1 or −1. That makes `2 · Σ bit · q − Σ q`.
    const BIAS: i32 = 1;

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, i: usize) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b] = V::spread(block.add(2 + 4 * i));
            [V::and(a, 2), V::and(b, 2)]
        }
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

impl<const BYTES: usize> Block for Crumbs<BYTES> {
    const BYTES: usize = BYTES;
    const LEN: usize = (BYTES - 2) * 4;
    const SPAN: usize = 2 * GROUP;
    const BIAS: i32 = 1;

    fn source(i: usize) -> usize {
        i % 16 * 4 + i / 16
    }

    #[inline(always)]
    unsafe fn codes<V: Vector>(block: *const u8, i: usize) -> [V::Bytes; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let codes = V::interleave(fields::<V>(block.add(2 + 16 * (i / 2))));
            if i.is_multiple_of(2) {
                [codes[0], codes[1]]
            } else {
                [codes[2], codes[3]]
            }
        }
    }

    #[inline(always)]
    unsafe fn dots<V: Vector>(block: *const u8, i: usize, q: *const i8) -> V::Ints {
        // SAFETY: the caller's promise.
        unsafe {
            let [a, b, c, d] = fields::<V>(block.add(2 + 16 * i));
            let sums = V::add_dot_by_fours(V::zero(), a, V::load(q.cast()));
            let sums = V::add_dot_by_fours(sums, b, V::load(q.add(16).cast()));
            let sums = V::add_dot_by_fours(sums, c, V::load(q.add(32).cast()));
            V::add_dot_by_fours(sums, d, V::load(q.add(48).cast()))
        }
    }
}

/// Bits 1:0, 3:2, 5:4 and 7:6 of 16 bytes.
///
/// # Safety
/// The instructions of `V`; 16 bytes.
#[inline(always)]
unsafe fn fields<V: Vector>(bytes: *const u8) -> [V::Bytes; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = V::load(bytes);
        [
            V::and(codes, 3),
            V::right::<2>(codes, 3),
            V::right::<4>(codes, 3),
            V::right::<6>(codes, 3),
        ]
    }
}
