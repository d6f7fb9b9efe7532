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
use crate::isa::Level;

/// Rows that are summed together, one per lane.
const ROWS: usize = 4;

/// The kernel of a level; `None` if it has none.
#[cfg(target_arch = "aarch64")]
pub(super) fn gemv(level: Level) -> Option<Gemv> {
    /// # Safety
    /// The machine has the feature `dotprod`.
    #[target_feature(enable = "dotprod")]
    unsafe fn dot(
        dtype: DType,
        rows: &[u8],
        row_bytes: usize,
        x: QuantizedRow<'_>,
        out: &mut [f32],
    ) {
        // SAFETY: the caller's promise.
        unsafe { multiply::<neon::Dot>(dtype, rows, row_bytes, x, out) }
    }

    match level {
        Level::Baseline => None,
        Level::Neon => Some(multiply::<neon::Plain>),
        // Products of matrices need two rows of activations.
        Level::NeonDot | Level::I8mm | Level::Sme => Some(dot),
    }
}

/// The kernel of a level; `None` if it has none.
#[cfg(target_arch = "wasm32")]
pub(super) fn gemv(level: Level) -> Option<Gemv> {
    match level {
        Level::Baseline => None,
        Level::Simd128 => Some(multiply::<wasm::Widened>),
        #[cfg(target_feature = "relaxed-simd")]
        Level::Relaxed => Some(multiply::<wasm::Relaxed>),
    }
}

/// [`Gemv`] with `V`.
///
/// # Safety
/// The machine has the instructions of `V`, and this is inlined into code compiled for them.
#[inline(always)]
unsafe fn multiply<V: Vector>(
    dtype: DType,
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            DType::Q2_K => blocks256::gemv::<V, blocks256::Q2K>(rows, row_bytes, x, out),
            DType::Q3_K => blocks256::gemv::<V, blocks256::Q3K>(rows, row_bytes, x, out),
            DType::Q4_K => blocks256::gemv::<V, blocks256::Q4K>(rows, row_bytes, x, out),
            DType::Q5_K => blocks256::gemv::<V, blocks256::Q5K>(rows, row_bytes, x, out),
            DType::Q6_K => blocks256::gemv::<V, blocks256::Q6K>(rows, row_bytes, x, out),
            DType::Q4_0 => blocks32::gemv::<V, blocks32::Q4_0>(rows, row_bytes, x, out),
            DType::Q5_0 => blocks32::gemv::<V, blocks32::Q5_0>(rows, row_bytes, x, out),
            DType::Q8_0 => blocks32::gemv::<V, blocks32::Q8_0>(rows, row_bytes, x, out),
            DType::Q1_0 => blocks32::gemv::<V, blocks32::Q1_0>(rows, row_bytes, x, out),
            DType::Q2_0 => blocks32::gemv::<V, blocks32::Q2_0>(rows, row_bytes, x, out),
            DType::Q2_0_G128 | DType::PQ2_0 => {
                blocks32::gemv::<V, blocks32::Q2_0G128>(rows, row_bytes, x, out);
            }
            _ => unreachable!("{dtype} has no scaling"),
        }
    }
}

/// Registers of 128 bits.
///
/// # Safety
/// Every method needs the instruction set of the type, and data behind its pointers, at any alignment.
pub(in crate::gemm) trait Vector {
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
    fn prefetch(rows: &[u8], at: usize, n: usize);

    unsafe fn load(from: *const u8) -> Self::Bytes;

    unsafe fn acts(from: *const i8) -> Self::Acts;

    unsafe fn store_bytes(to: *mut u8, v: Self::Bytes);

    unsafe fn and(v: Self::Bytes, mask: u8) -> Self::Bytes;

    unsafe fn or(a: Self::Bytes, b: Self::Bytes) -> Self::Bytes;

    /// `v >> N & mask` in each byte, for masks of at most `8 − N` low bits; `N` is at least 1.
    unsafe fn right<const N: i32>(v: Self::Bytes, mask: u8) -> Self::Bytes;

    /// `v << N & mask` in each byte, for masks without the `N` lowest bits; `N` is at least 1.
    unsafe fn left<const N: i32>(v: Self::Bytes, mask: u8) -> Self::Bytes;

    /// Bit `i` of 32 in all bits of byte `i`.
    unsafe fn spread(bits: *const u8) -> [Self::Bytes; 2];

    /// The bytes of two numbers, the lowest first.
    unsafe fn bytes(low: u64, high: u64) -> Self::Bytes;

    /// Each byte of a number twice, the lowest first.
    unsafe fn twice(bytes: u64) -> Self::Bytes;

    /// Adds 128 to each byte.
    unsafe fn flip(v: Self::Bytes) -> Self::Bytes;

    /// Byte `j` of vector `i` becomes byte `4j + i` of all.
    unsafe fn interleave(v: [Self::Bytes; 4]) -> [Self::Bytes; 4];

    /// Four bytes `j` of vector `i` become four bytes `i` of vector `j`.
    unsafe fn transpose(v: [Self::Bytes; 4]) -> [Self::Bytes; 4];

    unsafe fn zero() -> Self::Ints;

    unsafe fn splat_i(v: i32) -> Self::Ints;

    /// Adds the products of sixteen codes up to 127 and their activations, each to one of the lanes.
    unsafe fn add_dot(sums: Self::Ints, codes: Self::Bytes, q: Self::Bytes) -> Self::Ints;

    /// Adds `scale` times the products of `16 · N` codes and their activations, each to one of the lanes.
    ///
    /// `127 · N` times the largest code fits 15 bits, and `scale` is that of a byte.
    unsafe fn add_scaled<const N: usize>(
        codes: [Self::Bytes; N],
        q: [Self::Acts; N],
        scale: &i16,
        sums: Self::Ints,
    ) -> Self::Ints;

    /// The same, without a scale; those of bytes `4i` to `4i + 3` go to lane `i`.
    unsafe fn add_dot_by_fours(sums: Self::Ints, codes: Self::Bytes, q: Self::Bytes) -> Self::Ints;

    /// The same for signed codes, and activations from −127; any lanes.
    unsafe fn add_dot_signed(sums: Self::Ints, codes: Self::Bytes, q: Self::Bytes) -> Self::Ints;

    /// Sums of the products of sixteen signed bytes with i16.
    unsafe fn dot_i16(weights: Self::Bytes, values: *const i16) -> Self::Ints;

    /// Lane `i` is the sum of the lanes of vector `i`.
    unsafe fn sums(v: [Self::Ints; 4]) -> Self::Ints;

    /// Lane `i` of the first is the sum of the first two lanes of vector `i`, that of the second of its
    /// last two.
    unsafe fn sums_of_halves(v: [Self::Ints; 4]) -> [Self::Ints; 2];

    /// Signed bytes, in order.
    unsafe fn store_i16(to: &mut [i16; 16], v: Self::Bytes);

    unsafe fn sub_i(a: Self::Ints, b: Self::Ints) -> Self::Ints;

    unsafe fn shift_left<const N: u32>(v: Self::Ints) -> Self::Ints;

    unsafe fn to_f(v: Self::Ints) -> Self::Floats;

    /// The f16 at each of four places.
    unsafe fn halves(from: [*const u8; 4]) -> Self::Floats;

    unsafe fn splat(v: f32) -> Self::Floats;

    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    unsafe fn sub(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    unsafe fn mul(a: Self::Floats, b: Self::Floats) -> Self::Floats;

    unsafe fn store(v: Self::Floats) -> [f32; 4];
}
