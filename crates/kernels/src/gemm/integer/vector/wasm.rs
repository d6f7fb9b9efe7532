//! [`Vector`] with WebAssembly's vectors.

use std::arch::wasm32::*;

use super::Vector;

/// With products in 16 bits.
pub(super) struct Widened;

/// With relaxed dot products of bytes, for codes on which all engines agree: those of seven bits.
#[cfg(target_feature = "relaxed-simd")]
pub(super) struct Relaxed;

/// Shared by the two.
macro_rules! common {
    () => {
        type Bytes = v128;
        type Ints = v128;
        type Floats = v128;

        #[inline(always)]
        fn prefetch(_: *const u8, _: usize) {}

        #[inline(always)]
        unsafe fn load(from: *const u8) -> v128 {
            // SAFETY: the caller's promise.
            unsafe { v128_load(from.cast()) }
        }

        #[inline(always)]
        unsafe fn and(v: v128, mask: u8) -> v128 {
            v128_and(v, u8x16_splat(mask))
        }

        #[inline(always)]
        unsafe fn or(a: v128, b: v128) -> v128 {
            v128_or(a, b)
        }

        // Bytes are shifted in pairs, which x86 has instructions for; bits that cross over are masked.

        #[inline(always)]
        unsafe fn right<const N: i32>(v: v128, mask: u8) -> v128 {
            v128_and(u16x8_shr(v, N as u32), u8x16_splat(mask))
        }

        #[inline(always)]
        unsafe fn left<const N: i32>(v: v128, mask: u8) -> v128 {
            v128_and(u16x8_shl(v, N as u32), u8x16_splat(mask))
        }

        #[inline(always)]
        unsafe fn spread(bits: u16) -> v128 {
            let bytes = u16x8_splat(bits);
            let bytes =
                u8x16_shuffle::<0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1>(bytes, bytes);
            let bit = u64x2_splat(0x8040_2010_0804_0201);
            u8x16_eq(v128_and(bytes, bit), bit)
        }

        #[inline(always)]
        unsafe fn zero() -> v128 {
            i32x4_splat(0)
        }

        #[inline(always)]
        unsafe fn splat_i(v: i32) -> v128 {
            i32x4_splat(v)
        }

        #[inline(always)]
        unsafe fn dot_i16(weights: v128, values: *const i16) -> v128 {
            let values: *const v128 = values.cast();
            // SAFETY: the caller's promise.
            let (x, y) = unsafe { (v128_load(values), v128_load(values.add(1))) };
            i32x4_add(
                i32x4_dot_i16x8(i16x8_extend_low_i8x16(weights), x),
                i32x4_dot_i16x8(i16x8_extend_high_i8x16(weights), y),
            )
        }

        #[inline(always)]
        unsafe fn sums(v: [v128; 4]) -> v128 {
            let [a, b] = sums_of_halves(v);
            i32x4_add(a, b)
        }

        #[inline(always)]
        unsafe fn sums_of_halves(v: [v128; 4]) -> [v128; 2] {
            sums_of_halves(v)
        }

        #[inline(always)]
        unsafe fn widen(v: v128) -> [v128; 4] {
            let (a, b) = (i16x8_extend_low_i8x16(v), i16x8_extend_high_i8x16(v));
            [
                i32x4_extend_low_i16x8(a),
                i32x4_extend_high_i16x8(a),
                i32x4_extend_low_i16x8(b),
                i32x4_extend_high_i16x8(b),
            ]
        }

        #[inline(always)]
        unsafe fn sub_i(a: v128, b: v128) -> v128 {
            i32x4_sub(a, b)
        }

        #[inline(always)]
        unsafe fn shift_left<const N: u32>(v: v128) -> v128 {
            i32x4_shl(v, N)
        }

        #[inline(always)]
        unsafe fn add_product(sums: v128, a: v128, b: v128) -> v128 {
            i32x4_add(sums, i32x4_mul(a, b))
        }

        #[inline(always)]
        unsafe fn to_f(v: v128) -> v128 {
            f32x4_convert_i32x4(v)
        }

        #[inline(always)]
        unsafe fn halves(from: [*const u8; 4]) -> v128 {
            // SAFETY: the caller's promise.
            let bits = from.map(|from| unsafe { from.cast::<u16>().read_unaligned() });
            widen_halves(u32x4(
                bits[0].into(),
                bits[1].into(),
                bits[2].into(),
                bits[3].into(),
            ))
        }

        #[inline(always)]
        unsafe fn splat(v: f32) -> v128 {
            f32x4_splat(v)
        }

        #[inline(always)]
        unsafe fn add(a: v128, b: v128) -> v128 {
            f32x4_add(a, b)
        }

        #[inline(always)]
        unsafe fn sub(a: v128, b: v128) -> v128 {
            f32x4_sub(a, b)
        }

        #[inline(always)]
        unsafe fn mul(a: v128, b: v128) -> v128 {
            f32x4_mul(a, b)
        }

        #[inline(always)]
        unsafe fn store(v: v128) -> [f32; 4] {
            [
                f32x4_extract_lane::<0>(v),
                f32x4_extract_lane::<1>(v),
                f32x4_extract_lane::<2>(v),
                f32x4_extract_lane::<3>(v),
            ]
        }
    };
}

/// [`Vector::sums_of_halves`].
#[inline(always)]
fn sums_of_halves(v: [v128; 4]) -> [v128; 2] {
    let pairs = |a, b| {
        i32x4_add(
            i32x4_shuffle::<0, 2, 4, 6>(a, b),
            i32x4_shuffle::<1, 3, 5, 7>(a, b),
        )
    };
    let (a, b) = (pairs(v[0], v[1]), pairs(v[2], v[3]));
    [
        i32x4_shuffle::<0, 2, 4, 6>(a, b),
        i32x4_shuffle::<1, 3, 5, 7>(a, b),
    ]
}

/// The f16 in the lower halves of four u32, exactly.
#[inline(always)]
fn widen_halves(bits: v128) -> v128 {
    let sign = i32x4_shl(v128_and(bits, u32x4_splat(0x8000)), 16);
    let magnitude = i32x4_shl(v128_and(bits, u32x4_splat(0x7fff)), 13);
    // Read as an f32, the exponent is too small by 2^112; subnormals come out right, too.
    let finite = f32x4_mul(magnitude, f32x4_splat(f32::from_bits((127 + 112) << 23)));
    let no_number = u32x4_ge(magnitude, u32x4_splat(31 << 23));
    let exponent = v128_and(no_number, u32x4_splat(255 << 23));
    v128_or(v128_or(sign, exponent), finite)
}

impl Vector for Widened {
    common!();

    #[inline(always)]
    unsafe fn add_dot(sums: v128, codes: v128, q: v128) -> v128 {
        // SAFETY: the caller's promise.
        unsafe { Self::add_dot_by_fours(sums, codes, q) }
    }

    #[inline(always)]
    unsafe fn add_dot_by_fours(sums: v128, codes: v128, q: v128) -> v128 {
        // Even bytes separate from odd ones.
        let even = v128_and(codes, i16x8_splat(0xff));
        let products = i32x4_dot_i16x8(even, i16x8_shr(i16x8_shl(q, 8), 8));
        let odd = i32x4_dot_i16x8(u16x8_shr(codes, 8), i16x8_shr(q, 8));
        i32x4_add(i32x4_add(sums, products), odd)
    }

    #[inline(always)]
    unsafe fn add_dot_signed(sums: v128, codes: v128, q: v128) -> v128 {
        add_dot_signed(sums, codes, q)
    }
}

/// [`Vector::add_dot_signed`].
#[inline(always)]
fn add_dot_signed(sums: v128, codes: v128, q: v128) -> v128 {
    let low = i32x4_dot_i16x8(i16x8_extend_low_i8x16(codes), i16x8_extend_low_i8x16(q));
    let high = i32x4_dot_i16x8(i16x8_extend_high_i8x16(codes), i16x8_extend_high_i8x16(q));
    i32x4_add(i32x4_add(sums, low), high)
}

#[cfg(target_feature = "relaxed-simd")]
impl Vector for Relaxed {
    common!();

    #[inline(always)]
    unsafe fn add_dot(sums: v128, codes: v128, q: v128) -> v128 {
        i32x4_relaxed_dot_i8x16_i7x16_add(q, codes, sums)
    }

    #[inline(always)]
    unsafe fn add_dot_by_fours(sums: v128, codes: v128, q: v128) -> v128 {
        i32x4_relaxed_dot_i8x16_i7x16_add(q, codes, sums)
    }

    #[inline(always)]
    unsafe fn add_dot_signed(sums: v128, codes: v128, q: v128) -> v128 {
        add_dot_signed(sums, codes, q)
    }
}
