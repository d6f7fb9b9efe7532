//! The definition of a product of blocks of integers: all kernels agree with this code bit for bit.

use sterna_format::DType;

use super::super::activations::QuantizedRow;
use crate::isa::multiversion;
use crate::quant::integers::{SUB_LEN, SUPER_LEN, SuperBlock, groups_of_32, super_blocks};

multiversion! {
    /// One row of weights with one row of activations of its type's scaling.
    ///
    /// Every operation on floats is rounded separately. Activations beyond the row are ignored.
    pub(in crate::gemm) fn dot(dtype: DType, row: &[u8], x: QuantizedRow<'_>) -> f32 {
        let mut acc = 0.0;
        let mut b = 0;
        let done = super_blocks(dtype, row, |block| {
            let q = &x.q.as_chunks::<SUPER_LEN>().0[b];
            let sums = &x.sums.as_chunks::<{ SUPER_LEN / SUB_LEN }>().0[b];
            let (product, offset) = sums_of_super_block(&block, q, sums);
            let dx = x.scales[b];
            acc += product as f32 * (block.d * dx) - offset as f32 * (block.dmin * dx);
            b += 1;
        }) || groups_of_32(dtype, row, |d, codes| {
            let q = &x.q.as_chunks::<32>().0[b];
            acc += products(codes, q) as f32 * (d * x.scales[b]);
            b += 1;
        });
        assert!(done, "{dtype} has a scaling, so it is one of these");
        acc
    }
}

/// `Σ_s scale_s · Σ_j code_j · q_j` and `Σ_s min_s · Σ_j q_j`.
///
/// At most 256 · 128 · 32 · 127 and 256 · 255 · 127 in magnitude, far within i32.
#[inline(always)]
fn sums_of_super_block(
    block: &SuperBlock,
    q: &[i8; SUPER_LEN],
    sums: &[i16; SUPER_LEN / SUB_LEN],
) -> (i32, i32) {
    let (mut product, mut offset) = (0, 0);
    let codes = block.codes.as_chunks::<SUB_LEN>().0;
    for (s, (codes, q)) in codes.iter().zip(q.as_chunks::<SUB_LEN>().0).enumerate() {
        product += i32::from(block.scales[s]) * products(codes, q);
        offset += i32::from(block.mins[s]) * i32::from(sums[s]);
    }
    (product, offset)
}

/// `Σ_j codes[j] · q[j]`.
#[inline(always)]
fn products<const N: usize>(codes: &[i8; N], q: &[i8; N]) -> i32 {
    let products = codes.iter().zip(q);
    products.map(|(&c, &q)| i32::from(c) * i32::from(q)).sum()
}
