//! One row of activations with rows of blocks, straight from the stored bytes, in registers of 128
//! bits.
//!
//! Unpacking and summing blocks is written once, in terms of [`Vector`]; an instruction set is an
//! implementation of it.

pub(in crate::gemm) mod blocks256;
pub(in crate::gemm) mod blocks32;
#[cfg(target_arch = "aarch64")]
pub(in crate::gemm) mod neon;
#[cfg(target_arch = "wasm32")]
pub(in crate::gemm) mod wasm;

use sterna_format::DType;

use super::super::activations::QuantizedRow;
use super::Gemv;
use crate::gemm::unroll::each_row;
use crate::isa::Level;

/// Rows that are summed together, one per lane.
const ROWS: usize = 4;

/// The kernel of a level; `None` if it has none.
#[cfg(target_arch = "aarch64")]
pub(super) fn gemv(level: Level) -> Option<Gemv> {
    use crate::simd::neon::{Neon, NeonDot};

    fn plain(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
        multiply(Neon::new(), dtype, rows, row_bytes, x, out);
    }

    #[target_feature(enable = "dotprod")]
    fn dot(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
        // SAFETY: compiled for dot products.
        let v = unsafe { NeonDot::new() };
        multiply(v, dtype, rows, row_bytes, x, out);
    }

    match level {
        Level::Baseline => None,
        Level::Neon => Some(plain),
        // Products of matrices need two rows of activations.
        Level::NeonDot | Level::I8mm | Level::Sme => Some(dot),
    }
}

/// The kernel of a level; `None` if it has none.
#[cfg(target_arch = "wasm32")]
pub(super) fn gemv(level: Level) -> Option<Gemv> {
    use crate::simd::wasm;

    fn widened(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
        multiply(wasm::Simd128, dtype, rows, row_bytes, x, out);
    }

    #[cfg(target_feature = "relaxed-simd")]
    fn relaxed(dtype: DType, rows: &[u8], row_bytes: usize, x: QuantizedRow<'_>, out: &mut [f32]) {
        multiply(wasm::Relaxed, dtype, rows, row_bytes, x, out);
    }

    match level {
        Level::Baseline => None,
        Level::Simd128 => Some(widened),
        #[cfg(target_feature = "relaxed-simd")]
        Level::Relaxed => Some(relaxed),
    }
}

/// [`Gemv`] with `V`, inlined into code compiled for its instructions.
#[inline(always)]
fn multiply<V: Vector>(
    v: V,
    dtype: DType,
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    use blocks32::{Q1_0, Q2_0, Q2_0G128, Q4_0, Q5_0, Q8_0};
    use blocks256::{Q2K, Q3K, Q4K, Q5K, Q6K};
    match dtype {
        DType::Q2_K => blocks256::gemv::<V, Q2K, _>(v, rows, row_bytes, x, out),
        DType::Q3_K => blocks256::gemv::<V, Q3K, _>(v, rows, row_bytes, x, out),
        DType::Q4_K => blocks256::gemv::<V, Q4K, _>(v, rows, row_bytes, x, out),
        DType::Q5_K => blocks256::gemv::<V, Q5K, _>(v, rows, row_bytes, x, out),
        DType::Q6_K => blocks256::gemv::<V, Q6K, _>(v, rows, row_bytes, x, out),
        DType::Q4_0 => blocks32::gemv::<V, Q4_0, _, _>(v, rows, row_bytes, x, out),
        DType::Q5_0 => blocks32::gemv::<V, Q5_0, _, _>(v, rows, row_bytes, x, out),
        DType::Q8_0 => blocks32::gemv::<V, Q8_0, _, _>(v, rows, row_bytes, x, out),
        DType::Q1_0 => blocks32::gemv::<V, Q1_0, _, _>(v, rows, row_bytes, x, out),
        DType::Q2_0 => blocks32::gemv::<V, Q2_0, _, _>(v, rows, row_bytes, x, out),
        DType::Q2_0_G128 | DType::PQ2_0 => {
            blocks32::gemv::<V, Q2_0G128, _, _>(v, rows, row_bytes, x, out);
        }
        _ => unreachable!("{dtype} has no scaling"),
    }
}

/// The stored blocks of the `n` rows from `first` on, up to four, which are summed together, one of each at a time; missing rows
/// are replaced by the last.
#[inline(always)]
fn four_rows<const BYTES: usize>(
    rows: &[u8],
    row_bytes: usize,
    first: usize,
    n: usize,
) -> impl Iterator<Item = [&[u8; BYTES]; ROWS]> {
    let last = first + n - 1;
    let [a, b, c, d] = each_row!(r => {
        let row = &rows[last.min(first + r) * row_bytes..][..row_bytes];
        row.as_chunks().0.iter()
    });
    // Zipped, as no index has to be checked then.
    (a.zip(b).zip(c.zip(d))).map(|((a, b), (c, d))| [a, b, c, d])
}

/// `N` bytes of a block, from `at` on.
#[inline(always)]
pub(in crate::gemm) fn field<const N: usize>(block: &[u8], at: usize) -> &[u8; N] {
    block[at..].first_chunk().expect("a part of the block")
}

/// The bits of the f16 at `at` of a block.
#[inline(always)]
pub(in crate::gemm) fn f16_bits(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*field(block, at))
}

/// Registers of 128 bits. A value is the proof that its instructions exist.
pub(in crate::gemm) trait Vector: Copy {
    /// Sixteen bytes.
    type Bytes: Copy;
    /// Sixteen activations.
    type Acts: Copy;
    /// Four i32.
    type Ints: Copy;
    /// Four f32.
    type Floats: Copy;

    /// Prefetches the lines of `n` bytes of `rows` from `at` on; those beyond them too, if the target has an
    /// instruction for it.
    fn prefetch(self, rows: &[u8], at: usize, n: usize);

    fn load(self, from: &[u8; 16]) -> Self::Bytes;

    /// Sixteen bytes that are signed.
    fn load_i8(self, from: &[i8; 16]) -> Self::Bytes;

    fn acts(self, from: &[i8; 16]) -> Self::Acts;

    fn store_bytes(self, v: Self::Bytes, to: &mut [u8; 16]);

    fn and(self, v: Self::Bytes, mask: u8) -> Self::Bytes;

    fn or(self, a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// `v >> N & mask` in each byte, for masks of at most `8 − N` low bits; `N` is at least 1.
    fn right<const N: i32>(self, v: Self::Bytes, mask: u8) -> Self::Bytes;

    /// `v << N & mask` in each byte, for masks without the `N` lowest bits; `N` is at least 1.
    fn left<const N: i32>(self, v: Self::Bytes, mask: u8) -> Self::Bytes;

    /// Bit `i` of 32 in all bits of byte `i`.
    fn spread(self, bits: [u8; 4]) -> [Self::Bytes; 2];

    /// The bytes of two numbers, the lowest first.
    fn bytes(self, low: u64, high: u64) -> Self::Bytes;

    /// Each byte of a number twice, the lowest first.
    fn twice(self, bytes: u64) -> Self::Bytes;

    /// Adds 128 to each byte.
    fn flip(self, v: Self::Bytes) -> Self::Bytes;

    /// Byte `j` of vector `i` becomes byte `4j + i` of all.
    fn interleave(self, v: [Self::Bytes; 4]) -> [Self::Bytes; 4];

    /// Four bytes `j` of vector `i` become four bytes `i` of vector `j`.
    fn transpose(self, v: [Self::Bytes; 4]) -> [Self::Bytes; 4];

    fn zero(self) -> Self::Ints;

    fn splat_i(self, v: i32) -> Self::Ints;

    /// Adds the products of sixteen codes up to 127 and their activations, each to one of the lanes.
    fn add_dot(self, sums: Self::Ints, codes: Self::Bytes, q: Self::Bytes) -> Self::Ints;

    /// Adds `scale` times the products of `16 · N` codes and their activations, each to one of the lanes.
    ///
    /// `127 · N` times the largest code fits 15 bits, and `scale` is that of a byte.
    fn add_scaled<const N: usize>(
        self,
        codes: [Self::Bytes; N],
        q: [Self::Acts; N],
        scale: &i16,
        sums: Self::Ints,
    ) -> Self::Ints;

    /// The same, without a scale; those of bytes `4i` to `4i + 3` go to lane `i`.
    fn add_dot_by_fours(self, sums: Self::Ints, codes: Self::Bytes, q: Self::Bytes) -> Self::Ints;

    /// The same for signed codes, and activations from −127; any lanes.
    fn add_dot_signed(self, sums: Self::Ints, codes: Self::Bytes, q: Self::Bytes) -> Self::Ints;

    /// Sums of the products of sixteen signed bytes with i16.
    fn dot_i16(self, weights: Self::Bytes, values: &[i16; 16]) -> Self::Ints;

    /// Lane `i` is the sum of the lanes of vector `i`.
    fn sums(self, v: [Self::Ints; 4]) -> Self::Ints;

    /// Lane `i` of the first is the sum of the first two lanes of vector `i`, that of the second of its
    /// last two.
    fn sums_of_halves(self, v: [Self::Ints; 4]) -> [Self::Ints; 2];

    /// Signed bytes, in order.
    fn to_i16(self, v: Self::Bytes) -> [i16; 16];

    fn sub_i(self, a: Self::Ints, b: Self::Ints) -> Self::Ints;

    fn shift_left<const N: u32>(self, v: Self::Ints) -> Self::Ints;

    fn to_f(self, v: Self::Ints) -> Self::Floats;

    /// Four f16, of which the bits are given.
    fn halves(self, bits: [u16; 4]) -> Self::Floats;

    fn splat(self, v: f32) -> Self::Floats;

    fn add(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn sub(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn mul(self, a: Self::Floats, b: Self::Floats) -> Self::Floats;

    fn to_array(self, v: Self::Floats) -> [f32; 4];
}
