//! [`Vector`] with WebAssembly's vectors: with products in 16 bits, and with relaxed dot products of bytes.

use std::arch::wasm32::*;

use super::super::super::prefetch;
use super::Vector;
#[cfg(target_feature = "relaxed-simd")]
use crate::simd::wasm::Relaxed;
use crate::simd::wasm::Simd128;

/// Shared by the two.
macro_rules! common {
    () => {
        type Bytes = v128;
        type Ints = v128;
        type Floats = v128;

        #[inline(always)]
        fn prefetch(self, rows: &[u8], at: usize, n: usize) {
            prefetch::touch(rows, at, n);
        }

        #[inline(always)]
        fn load(self, from: &[u8; 16]) -> v128 {
            // SAFETY: 16 bytes; so where others are loaded or stored, too.
            unsafe { v128_load(from.as_ptr().cast()) }
        }

        #[inline(always)]
        fn load_i8(self, from: &[i8; 16]) -> v128 {
            // SAFETY: as above.
            unsafe { v128_load(from.as_ptr().cast()) }
        }

        #[inline(always)]
        fn store_bytes(self, v: v128, to: &mut [u8; 16]) {
            // SAFETY: as above.
            unsafe { v128_store(to.as_mut_ptr().cast(), v) }
        }

        #[inline(always)]
        fn and(self, v: v128, mask: u8) -> v128 {
            v128_and(v, u8x16_splat(mask))
        }

        #[inline(always)]
        fn or(self, a: v128, b: v128) -> v128 {
            v128_or(a, b)
        }

        // Bytes are shifted in pairs, which x86 has instructions for; bits that cross over are masked.

        #[inline(always)]
        fn right<const N: i32>(self, v: v128, mask: u8) -> v128 {
            v128_and(u16x8_shr(v, N as u32), u8x16_splat(mask))
        }

        #[inline(always)]
        fn left<const N: i32>(self, v: v128, mask: u8) -> v128 {
            v128_and(u16x8_shl(v, N as u32), u8x16_splat(mask))
        }

        #[inline(always)]
        fn spread(self, bits: [u8; 4]) -> [v128; 2] {
            let v = u32x4_splat(u32::from_le_bytes(bits));
            let bytes = [
                u8x16_shuffle::<0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1>(v, v),
                u8x16_shuffle::<2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3>(v, v),
            ];
            let bit = u64x2_splat(0x8040_2010_0804_0201);
            [
                u8x16_eq(v128_and(bytes[0], bit), bit),
                u8x16_eq(v128_and(bytes[1], bit), bit),
            ]
        }

        #[inline(always)]
        fn bytes(self, low: u64, high: u64) -> v128 {
            u64x2(low, high)
        }

        #[inline(always)]
        fn twice(self, bytes: u64) -> v128 {
            let v = u64x2_splat(bytes);
            u8x16_shuffle::<0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7>(v, v)
        }

        #[inline(always)]
        fn flip(self, v: v128) -> v128 {
            v128_xor(v, u8x16_splat(0x80))
        }

        #[inline(always)]
        fn interleave(self, v: [v128; 4]) -> [v128; 4] {
            let zip = |a, b| {
                [
                    u8x16_shuffle::<0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23>(a, b),
                    u8x16_shuffle::<8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31>(
                        a, b,
                    ),
                ]
            };
            let ([a, b], [c, d]) = (zip(v[0], v[1]), zip(v[2], v[3]));
            [
                u16x8_shuffle::<0, 8, 1, 9, 2, 10, 3, 11>(a, c),
                u16x8_shuffle::<4, 12, 5, 13, 6, 14, 7, 15>(a, c),
                u16x8_shuffle::<0, 8, 1, 9, 2, 10, 3, 11>(b, d),
                u16x8_shuffle::<4, 12, 5, 13, 6, 14, 7, 15>(b, d),
            ]
        }

        #[inline(always)]
        fn transpose(self, v: [v128; 4]) -> [v128; 4] {
            let zip = |a, b| {
                [
                    u32x4_shuffle::<0, 4, 1, 5>(a, b),
                    u32x4_shuffle::<2, 6, 3, 7>(a, b),
                ]
            };
            let ([a, b], [c, d]) = (zip(v[0], v[1]), zip(v[2], v[3]));
            [
                u64x2_shuffle::<0, 2>(a, c),
                u64x2_shuffle::<1, 3>(a, c),
                u64x2_shuffle::<0, 2>(b, d),
                u64x2_shuffle::<1, 3>(b, d),
            ]
        }

        #[inline(always)]
        fn zero(self) -> v128 {
            i32x4_splat(0)
        }

        #[inline(always)]
        fn splat_i(self, v: i32) -> v128 {
            i32x4_splat(v)
        }

        #[inline(always)]
        fn dot_i16(self, weights: v128, values: &[i16; 16]) -> v128 {
            let values: *const v128 = values.as_ptr().cast();
            // SAFETY: 32 bytes.
            let (x, y) = unsafe { (v128_load(values), v128_load(values.add(1))) };
            i32x4_add(
                i32x4_dot_i16x8(i16x8_extend_low_i8x16(weights), x),
                i32x4_dot_i16x8(i16x8_extend_high_i8x16(weights), y),
            )
        }

        #[inline(always)]
        fn sums(self, v: [v128; 4]) -> v128 {
            let [a, b] = sums_of_halves(v);
            i32x4_add(a, b)
        }

        #[inline(always)]
        fn sums_of_halves(self, v: [v128; 4]) -> [v128; 2] {
            sums_of_halves(v)
        }

        #[inline(always)]
        fn to_i16(self, v: v128) -> [i16; 16] {
            let [low, high] = [i16x8_extend_low_i8x16(v), i16x8_extend_high_i8x16(v)];
            let mut to = [0; 16];
            // SAFETY: there is room for both.
            unsafe {
                v128_store(to.as_mut_ptr().cast(), low);
                v128_store(to.as_mut_ptr().add(8).cast(), high);
            }
            to
        }

        #[inline(always)]
        fn sub_i(self, a: v128, b: v128) -> v128 {
            i32x4_sub(a, b)
        }

        #[inline(always)]
        fn shift_left<const N: u32>(self, v: v128) -> v128 {
            i32x4_shl(v, N)
        }

        #[inline(always)]
        fn to_f(self, v: v128) -> v128 {
            f32x4_convert_i32x4(v)
        }

        #[inline(always)]
        fn halves(self, bits: [u16; 4]) -> v128 {
            let bits = |r: usize| bits[r].into();
            widen_halves(u32x4(bits(0), bits(1), bits(2), bits(3)))
        }

        #[inline(always)]
        fn splat(self, v: f32) -> v128 {
            f32x4_splat(v)
        }

        #[inline(always)]
        fn add(self, a: v128, b: v128) -> v128 {
            f32x4_add(a, b)
        }

        #[inline(always)]
        fn sub(self, a: v128, b: v128) -> v128 {
            f32x4_sub(a, b)
        }

        #[inline(always)]
        fn mul(self, a: v128, b: v128) -> v128 {
            f32x4_mul(a, b)
        }

        #[inline(always)]
        fn to_array(self, v: v128) -> [f32; 4] {
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
pub(in crate::gemm) fn widen_halves(bits: v128) -> v128 {
    let sign = i32x4_shl(v128_and(bits, u32x4_splat(0x8000)), 16);
    let magnitude = i32x4_shl(v128_and(bits, u32x4_splat(0x7fff)), 13);
    // Read as an f32, the exponent is too small by 2^112; subnormals come out right, too.
    let finite = f32x4_mul(magnitude, f32x4_splat(f32::from_bits((127 + 112) << 23)));
    let no_number = u32x4_ge(magnitude, u32x4_splat(31 << 23));
    let exponent = v128_and(no_number, u32x4_splat(255 << 23));
    v128_or(v128_or(sign, exponent), finite)
}

impl Vector for Simd128 {
    common!();

    /// Even bytes and odd ones.
    type Acts = [v128; 2];

    #[inline(always)]
    fn acts(self, from: &[i8; 16]) -> [v128; 2] {
        let q = self.load_i8(from);
        [i16x8_shr(i16x8_shl(q, 8), 8), i16x8_shr(q, 8)]
    }

    #[inline(always)]
    fn add_scaled<const N: usize>(
        self,
        codes: [v128; N],
        q: [[v128; 2]; N],
        scale: &i16,
        sums: v128,
    ) -> v128 {
        let products = |i: usize| {
            let even = i16x8_mul(v128_and(codes[i], i16x8_splat(0xff)), q[i][0]);
            i16x8_add(even, i16x8_mul(u16x8_shr(codes[i], 8), q[i][1]))
        };
        let dots = (1..N).fold(products(0), |dots, i| i16x8_add(dots, products(i)));
        // SAFETY: it is a reference.
        let scale = unsafe { v128_load16_splat(std::ptr::from_ref(scale).cast()) };
        i32x4_add(sums, i32x4_dot_i16x8(dots, scale))
    }

    #[inline(always)]
    fn add_dot(self, sums: v128, codes: v128, q: v128) -> v128 {
        self.add_dot_by_fours(sums, codes, q)
    }

    #[inline(always)]
    fn add_dot_by_fours(self, sums: v128, codes: v128, q: v128) -> v128 {
        // Even bytes separate from odd ones.
        let even = v128_and(codes, i16x8_splat(0xff));
        let products = i32x4_dot_i16x8(even, i16x8_shr(i16x8_shl(q, 8), 8));
        let odd = i32x4_dot_i16x8(u16x8_shr(codes, 8), i16x8_shr(q, 8));
        i32x4_add(i32x4_add(sums, products), odd)
    }

    #[inline(always)]
    fn add_dot_signed(self, sums: v128, codes: v128, q: v128) -> v128 {
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

    type Acts = v128;

    #[inline(always)]
    fn acts(self, from: &[i8; 16]) -> v128 {
        self.load_i8(from)
    }

    #[inline(always)]
    fn add_scaled<const N: usize>(
        self,
        codes: [v128; N],
        q: [v128; N],
        scale: &i16,
        sums: v128,
    ) -> v128 {
        let products = |i: usize| i16x8_relaxed_dot_i8x16_i7x16(q[i], codes[i]);
        let dots = (1..N).fold(products(0), |dots, i| i16x8_add(dots, products(i)));
        // SAFETY: it is a reference.
        let scale = unsafe { v128_load16_splat(std::ptr::from_ref(scale).cast()) };
        i32x4_add(sums, i32x4_dot_i16x8(dots, scale))
    }

    #[inline(always)]
    fn add_dot(self, sums: v128, codes: v128, q: v128) -> v128 {
        i32x4_relaxed_dot_i8x16_i7x16_add(q, codes, sums)
    }

    #[inline(always)]
    fn add_dot_by_fours(self, sums: v128, codes: v128, q: v128) -> v128 {
        i32x4_relaxed_dot_i8x16_i7x16_add(q, codes, sums)
    }

    #[inline(always)]
    fn add_dot_signed(self, sums: v128, codes: v128, q: v128) -> v128 {
        add_dot_signed(sums, codes, q)
    }
}
