//! Sixteen lanes with AVX2, AVX-VNNI and AVX-512 VNNI.

use std::arch::x86_64::*;

use super::Lanes as Array;
use super::lanes::{Acts, Lanes};

/// Two registers; products of bytes are summed in 16 bits as long as those can't overflow.
#[derive(Clone, Copy)]
pub(super) struct Avx2;

/// Two registers, exact sums of four products.
#[derive(Clone, Copy)]
pub(super) struct AvxVnni;

/// One register, exact sums of four products.
#[derive(Clone, Copy)]
pub(super) struct Avx512;

/// An instruction on both registers. Closures called by functions of `core` would not be compiled for these
/// instructions, so there are none here.
macro_rules! both {
    ($f:ident, $a:expr, $b:expr) => {{
        let (a, b) = ($a, $b);
        [$f(a[0], b[0]), $f(a[1], b[1])]
    }};
}

/// Shared by the two levels with registers of 256 bits.
macro_rules! lanes_256 {
    () => {
        type I = [__m256i; 2];
        type F = [__m256; 2];

        #[inline(always)]
        unsafe fn zero() -> Self::I {
            // SAFETY: this and the following are the promises of the callers.
            unsafe { [_mm256_setzero_si256(); 2] }
        }

        #[inline(always)]
        unsafe fn load_i(from: *const Array<i32>) -> Self::I {
            // SAFETY: as above.
            unsafe { load_256(from) }
        }

        #[inline(always)]
        unsafe fn store_i(to: *mut Array<i32>, v: Self::I) {
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_si256(to.cast(), v[0]);
                _mm256_storeu_si256(to.cast::<__m256i>().add(1), v[1]);
            }
        }

        #[inline(always)]
        unsafe fn add_pairs(
            sum: Self::I,
            weights: *const Array<[i16; 2]>,
            pair: [i16; 2],
        ) -> Self::I {
            // SAFETY: as above.
            unsafe {
                let pair = _mm256_set1_epi32(dword(pair));
                let products = both!(_mm256_madd_epi16, load_256(weights), [pair; 2]);
                both!(_mm256_add_epi32, sum, products)
            }
        }

        #[inline(always)]
        unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, b: Self::I) -> Self::I {
            // SAFETY: as above.
            unsafe {
                let count = _mm_cvtsi32_si128(SHIFT as i32);
                both!(_mm256_sub_epi32, a, both!(_mm256_sll_epi32, b, [count; 2]))
            }
        }

        #[inline(always)]
        unsafe fn to_f(v: Self::I) -> Self::F {
            // SAFETY: as above.
            unsafe { [_mm256_cvtepi32_ps(v[0]), _mm256_cvtepi32_ps(v[1])] }
        }

        #[inline(always)]
        unsafe fn load_f(from: *const Array<f32>) -> Self::F {
            // SAFETY: as above.
            unsafe {
                [
                    _mm256_loadu_ps(from.cast()),
                    _mm256_loadu_ps(from.cast::<f32>().add(8)),
                ]
            }
        }

        #[inline(always)]
        unsafe fn store_f(to: *mut Array<f32>, v: Self::F) {
            // SAFETY: as above.
            unsafe {
                _mm256_storeu_ps(to.cast(), v[0]);
                _mm256_storeu_ps(to.cast::<f32>().add(8), v[1]);
            }
        }

        #[inline(always)]
        unsafe fn splat(v: f32) -> Self::F {
            // SAFETY: as above.
            unsafe { [_mm256_set1_ps(v); 2] }
        }

        #[inline(always)]
        unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
            // SAFETY: as above.
            unsafe { both!(_mm256_add_ps, a, b) }
        }

        #[inline(always)]
        unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
            // SAFETY: as above.
            unsafe { both!(_mm256_sub_ps, a, b) }
        }

        #[inline(always)]
        unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
            // SAFETY: as above.
            unsafe { both!(_mm256_mul_ps, a, b) }
        }
    };
}

/// Two i16 as one register lane has them.
#[inline(always)]
fn dword(pair: [i16; 2]) -> i32 {
    i32::from(pair[0] as u16) | i32::from(pair[1]) << 16
}

/// # Safety
/// AVX2, and 64 bytes.
#[inline(always)]
unsafe fn load_256<T>(from: *const T) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        [
            _mm256_loadu_si256(from.cast()),
            _mm256_loadu_si256(from.cast::<__m256i>().add(1)),
        ]
    }
}

/// Four activations in every lane.
///
/// # Safety
/// AVX2; as [`Acts::quad`].
#[inline(always)]
unsafe fn broadcast_256(acts: Acts, quad: usize, t: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_set1_epi32(acts.quad(quad, t).read_unaligned()) }
}

impl Avx2 {
    /// `sums[t] += scale · Σ code · act`, where a lane of `scales` has the scale of its row twice in
    /// 16 bits.
    ///
    /// # Safety
    /// As [`Lanes::add_scaled_dots`].
    #[inline(always)]
    unsafe fn add_widened<const T: usize, const MAX: usize>(
        sums: &mut [[__m256i; 2]; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: [__m256i; 2],
    ) {
        // A step adds from MAX · 2 · -128 to MAX · 2 · 127, and 16 bits hold -32,768 to 32,767.
        let burst = 128 / MAX;
        // SAFETY: the caller's promise.
        unsafe {
            let mut quad = 0;
            while quad < n_quads {
                let end = n_quads.min(quad + burst);
                let mut narrow = [[_mm256_setzero_si256(); 2]; T];
                while quad < end {
                    let codes = load_256(codes.add(quad));
                    for (t, narrow) in narrow.iter_mut().enumerate() {
                        let acts = broadcast_256(acts, quad, t);
                        let products = both!(_mm256_maddubs_epi16, codes, [acts; 2]);
                        *narrow = both!(_mm256_add_epi16, *narrow, products);
                    }
                    quad += 1;
                }
                for (sums, narrow) in sums.iter_mut().zip(narrow) {
                    let wide = both!(_mm256_madd_epi16, narrow, scales);
                    *sums = both!(_mm256_add_epi32, *sums, wide);
                }
            }
        }
    }
}

impl Lanes for Avx2 {
    lanes_256!();

    const SIGNED_BYTES: bool = true;

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let ones = [_mm256_set1_epi16(1); 2];
            if MAX < 128 {
                return Self::add_widened::<T, MAX>(sums, codes, acts, n_quads, ones);
            }
            // Two products of unsigned bytes overflow 16 bits; of magnitudes up to 128 with
            // activations from -127 to 127 they don't.
            let top = _mm256_set1_epi8(-128);
            for quad in 0..n_quads {
                let codes = load_256(codes.add(quad));
                let codes = both!(_mm256_xor_si256, codes, [top; 2]);
                let magnitudes = [_mm256_abs_epi8(codes[0]), _mm256_abs_epi8(codes[1])];
                for (t, sums) in sums.iter_mut().enumerate() {
                    let acts = broadcast_256(acts, quad, t);
                    let acts = both!(_mm256_sign_epi8, [acts; 2], codes);
                    let pairs = both!(_mm256_maddubs_epi16, magnitudes, acts);
                    let wide = both!(_mm256_madd_epi16, pairs, ones);
                    *sums = both!(_mm256_add_epi32, *sums, wide);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let scales = load_256(scales);
            let twice = |v| _mm256_blend_epi16::<0b1010_1010>(v, _mm256_slli_epi32::<16>(v));
            let scales = [twice(scales[0]), twice(scales[1])];
            Self::add_widened::<T, MAX>(sums, codes, acts, n_quads, scales);
        }
    }
}

impl Lanes for AvxVnni {
    lanes_256!();

    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        for quad in 0..n_quads {
            // SAFETY: the caller's promise.
            unsafe {
                let codes = load_256(codes.add(quad));
                for (t, sums) in sums.iter_mut().enumerate() {
                    let acts = broadcast_256(acts, quad, t);
                    *sums = [
                        _mm256_dpbusd_avx_epi32(sums[0], codes[0], acts),
                        _mm256_dpbusd_avx_epi32(sums[1], codes[1], acts),
                    ];
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let mut dots = [Self::zero(); T];
            Self::add_dots::<T, MAX>(&mut dots, codes, acts, n_quads);
            let scales = load_256(scales);
            for (sums, dots) in sums.iter_mut().zip(dots) {
                let scaled = both!(_mm256_mullo_epi32, dots, scales);
                *sums = both!(_mm256_add_epi32, *sums, scaled);
            }
        }
    }
}

impl Lanes for Avx512 {
    type I = __m512i;
    type F = __m512;

    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    unsafe fn zero() -> Self::I {
        // SAFETY: this and the following are the promises of the callers.
        unsafe { _mm512_setzero_si512() }
    }

    #[inline(always)]
    unsafe fn load_i(from: *const Array<i32>) -> Self::I {
        // SAFETY: as above.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_i(to: *mut Array<i32>, v: Self::I) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_si512(to.cast(), v) }
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
    ) {
        for quad in 0..n_quads {
            // SAFETY: as above.
            unsafe {
                let codes = _mm512_loadu_si512(codes.add(quad).cast());
                for (t, sums) in sums.iter_mut().enumerate() {
                    let acts = _mm512_set1_epi32(acts.quad(quad, t).read_unaligned());
                    *sums = _mm512_dpbusd_epi32(*sums, codes, acts);
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        sums: &mut [Self::I; T],
        codes: *const Array<[u8; 4]>,
        acts: Acts,
        n_quads: usize,
        scales: *const Array<i32>,
    ) {
        // SAFETY: as above.
        unsafe {
            let mut dots = [Self::zero(); T];
            Self::add_dots::<T, MAX>(&mut dots, codes, acts, n_quads);
            let scales = Self::load_i(scales);
            for (sums, dots) in sums.iter_mut().zip(dots) {
                *sums = _mm512_add_epi32(*sums, _mm512_mullo_epi32(dots, scales));
            }
        }
    }

    #[inline(always)]
    unsafe fn add_pairs(sum: Self::I, weights: *const Array<[i16; 2]>, pair: [i16; 2]) -> Self::I {
        // SAFETY: as above.
        unsafe {
            let weights = _mm512_loadu_si512(weights.cast());
            _mm512_dpwssd_epi32(sum, weights, _mm512_set1_epi32(dword(pair)))
        }
    }

    #[inline(always)]
    unsafe fn sub_shifted<const SHIFT: u32>(a: Self::I, b: Self::I) -> Self::I {
        // SAFETY: as above.
        unsafe { _mm512_sub_epi32(a, _mm512_slli_epi32::<SHIFT>(b)) }
    }

    #[inline(always)]
    unsafe fn to_f(v: Self::I) -> Self::F {
        // SAFETY: as above.
        unsafe { _mm512_cvtepi32_ps(v) }
    }

    #[inline(always)]
    unsafe fn load_f(from: *const Array<f32>) -> Self::F {
        // SAFETY: as above.
        unsafe { _mm512_loadu_ps(from.cast()) }
    }

    #[inline(always)]
    unsafe fn store_f(to: *mut Array<f32>, v: Self::F) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(to.cast(), v) }
    }

    #[inline(always)]
    unsafe fn splat(v: f32) -> Self::F {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(v) }
    }

    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: as above.
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn sub(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: as above.
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: as above.
        unsafe { _mm512_mul_ps(a, b) }
    }
}
