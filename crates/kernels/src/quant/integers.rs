//! Blocks as the integers and scales they are made of.
//!
//! Everything that computes with stored blocks of integers starts from here: decoding multiplies
//! the integers out, and the matrix products of [`crate::gemm`] sum them up first.

use sterna_format::DType;

use super::{q1_0, q2_0, q2_k, q3_k, q4, q4_k, q5, q5_k, q6_k, q8_0};

/// Elements of a [`SuperBlock`].
pub(crate) const SUPER_LEN: usize = 256;
/// Elements that share an integer scale in a [`SuperBlock`].
pub(crate) const SUB_LEN: usize = 16;

/// A block of a K type: `x[j] = (d · scales[j / 16]) · codes[j] − dmin · mins[j / 16]`.
///
/// Types whose sub-blocks are 32 long have each scale and minimum twice. Types without minimums have
/// zeros for `dmin` and `mins`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SuperBlock {
    pub(crate) d: f32,
    pub(crate) dmin: f32,
    pub(crate) scales: [i8; SUPER_LEN / SUB_LEN],
    pub(crate) mins: [u8; SUPER_LEN / SUB_LEN],
    pub(crate) codes: [i8; SUPER_LEN],
}

impl SuperBlock {
    /// The elements. The order of the operations is that of the reference implementations.
    #[inline(always)]
    pub(super) fn decode(&self, out: &mut [f32; SUPER_LEN]) {
        let subs = out.as_chunks_mut::<SUB_LEN>().0.iter_mut();
        let codes = self.codes.as_chunks::<SUB_LEN>().0;
        for ((xs, codes), (&scale, &min)) in subs.zip(codes).zip(self.scales.iter().zip(&self.mins))
        {
            let (scale, min) = (self.d * f32::from(scale), self.dmin * f32::from(min));
            for (x, &code) in xs.iter_mut().zip(codes) {
                *x = scale * f32::from(code) - min;
            }
        }
    }
}

/// A block with one scale: `x[j] = d · codes[j]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SmallBlock<const N: usize> {
    pub(crate) d: f32,
    pub(crate) codes: [i8; N],
}

impl<const N: usize> SmallBlock<N> {
    /// The elements.
    #[inline(always)]
    pub(super) fn decode(&self, out: &mut [f32; N]) {
        for (x, &code) in out.iter_mut().zip(&self.codes) {
            *x = self.d * f32::from(code);
        }
    }
}

/// Calls `each` with every block of a row of a K type; `false` if `dtype` is another.
#[inline(always)]
pub(crate) fn super_blocks(dtype: DType, row: &[u8], each: impl FnMut(SuperBlock)) -> bool {
    match dtype {
        DType::Q2_K => for_each(row, q2_k::integers, each),
        DType::Q3_K => for_each(row, q3_k::integers, each),
        DType::Q4_K => for_each(row, q4_k::integers, each),
        DType::Q5_K => for_each(row, q5_k::integers, each),
        DType::Q6_K => for_each(row, q6_k::integers, each),
        _ => return false,
    }
    true
}

#[inline(always)]
fn for_each<const B: usize, T>(row: &[u8], integers: impl Fn(&[u8; B]) -> T, each: impl FnMut(T)) {
    row.as_chunks().0.iter().map(integers).for_each(each);
}

/// Calls `each` with the scale and the codes of every 32 elements of a row; `false` if the blocks of
/// `dtype` are more than codes with one scale.
#[inline(always)]
pub(crate) fn groups_of_32(dtype: DType, row: &[u8], mut each: impl FnMut(f32, &[i8; 32])) -> bool {
    /// Blocks are whole groups.
    #[inline(always)]
    fn split<const N: usize>(block: SmallBlock<N>, each: &mut impl FnMut(f32, &[i8; 32])) {
        for codes in block.codes.as_chunks().0 {
            each(block.d, codes);
        }
    }
    match dtype {
        DType::Q4_0 => for_each(row, q4::integers_q4_0, |b| split(b, &mut each)),
        DType::Q5_0 => for_each(row, q5::integers_q5_0, |b| split(b, &mut each)),
        DType::Q8_0 => for_each(row, q8_0::integers, |b| split(b, &mut each)),
        DType::Q1_0 => for_each(row, q1_0::integers, |b| split(b, &mut each)),
        DType::Q2_0 => for_each(row, q2_0::integers::<18, 64>, |b| split(b, &mut each)),
        DType::Q2_0_G128 | DType::PQ2_0 => {
            for_each(row, q2_0::integers::<34, 128>, |b| split(b, &mut each));
        }
        _ => return false,
    }
    true
}
