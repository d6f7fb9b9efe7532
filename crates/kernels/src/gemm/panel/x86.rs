//! Products of bytes with AVX2, AVX-VNNI and AVX-512 VNNI.

use std::arch::x86_64::*;

use super::Lanes;
use super::dots::{Acts, Dots, dword};
use crate::simd::Simd;
use crate::simd::x86::{Avx2, Avx512, AvxVnni, Ints256, Ints512, both};

// SAFETY of the blocks below, where nothing else is said: tokens are made only where their instructions exist; pointers
// come from references to sixteen times four bytes.

/// Reads 64 bytes with AVX2.
#[inline(always)]
fn load_256<T>(_: impl Simd<I = Ints256>, from: &Lanes<T>) -> [__m256i; 2] {
    const { assert!(size_of::<T>() == 4) };
    let from: *const __m256i = from.as_ptr().cast();
    // SAFETY: see above.
    unsafe { [_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))] }
}

/// [`Dots::add_pairs`] with AVX2.
#[inline(always)]
fn add_pairs_256(
    simd: impl Simd<I = Ints256>,
    sum: Ints256,
    weights: &Lanes<[i16; 2]>,
    pair: [i16; 2],
) -> Ints256 {
    let weights = load_256(simd, weights);
    // SAFETY: see above.
    unsafe {
        let pair = _mm256_set1_epi32(dword(pair));
        sum + Ints256(both!(_mm256_madd_epi16, weights, [pair; 2]))
    }
}

/// Four activations in every lane.
///
/// # Safety
/// As [`Acts::quad`].
#[inline(always)]
unsafe fn broadcast_256(_: impl Simd<I = Ints256>, acts: Acts, quad: usize, t: usize) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_set1_epi32(acts.quad(quad, t).read_unaligned()) }
}

/// `sums[t] += scale · Σ code · act`, where a lane of `scales` has the scale of its row twice in 16 bits. Products are
/// summed in 16 bits as long as those can't overflow.
///
/// # Safety
/// As [`Dots::add_scaled_dots`].
#[inline(always)]
unsafe fn add_widened<const T: usize, const MAX: usize>(
    simd: Avx2,
    sums: &mut [Ints256; T],
    codes: &[Lanes<[u8; 4]>],
    acts: Acts,
    scales: [__m256i; 2],
) {
    // A step adds from MAX · 2 · -128 to MAX · 2 · 127, and 16 bits hold -32,768 to 32,767.
    let burst = 128 / MAX;
    // SAFETY: the caller's promise.
    unsafe {
        let mut quad = 0;
        while quad < codes.len() {
            let end = codes.len().min(quad + burst);
            let mut narrow = [[_mm256_setzero_si256(); 2]; T];
            while quad < end {
                let codes = load_256(simd, &codes[quad]);
                for (t, narrow) in narrow.iter_mut().enumerate() {
                    let acts = broadcast_256(simd, acts, quad, t);
                    let products = both!(_mm256_maddubs_epi16, codes, [acts; 2]);
                    *narrow = both!(_mm256_add_epi16, *narrow, products);
                }
                quad += 1;
            }
            for (sums, narrow) in sums.iter_mut().zip(narrow) {
                *sums = *sums + Ints256(both!(_mm256_madd_epi16, narrow, scales));
            }
        }
    }
}

impl Dots for Avx2 {
    const SIGNED_BYTES: bool = true;

    #[inline(always)]
    fn add_pairs(self, sum: Ints256, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints256 {
        add_pairs_256(self, sum, weights, pair)
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints256; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let ones = [_mm256_set1_epi16(1); 2];
            if MAX < 128 {
                return add_widened::<T, MAX>(self, sums, codes, acts, ones);
            }
            // Two products of unsigned bytes overflow 16 bits; of magnitudes up to 128 with
            // activations from -127 to 127 they don't.
            let top = _mm256_set1_epi8(-128);
            for (quad, codes) in codes.iter().enumerate() {
                let codes = both!(_mm256_xor_si256, load_256(self, codes), [top; 2]);
                let magnitudes = [_mm256_abs_epi8(codes[0]), _mm256_abs_epi8(codes[1])];
                for (t, sums) in sums.iter_mut().enumerate() {
                    let acts = broadcast_256(self, acts, quad, t);
                    let acts = both!(_mm256_sign_epi8, [acts; 2], codes);
                    let pairs = both!(_mm256_maddubs_epi16, magnitudes, acts);
                    *sums = *sums + Ints256(both!(_mm256_madd_epi16, pairs, ones));
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn add_scaled_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints256; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
        scales: &Lanes<i32>,
    ) {
        // SAFETY: the caller's promise.
        unsafe {
            let scales = load_256(self, scales);
            let twice = |v| _mm256_blend_epi16::<0b1010_1010>(v, _mm256_slli_epi32::<16>(v));
            let scales = [twice(scales[0]), twice(scales[1])];
            add_widened::<T, MAX>(self, sums, codes, acts, scales);
        }
    }
}

impl Dots for AvxVnni {
    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    fn add_pairs(self, sum: Ints256, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints256 {
        add_pairs_256(self, sum, weights, pair)
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints256; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        for (quad, codes) in codes.iter().enumerate() {
            let codes = load_256(self, codes);
            for (t, Ints256(sums)) in sums.iter_mut().enumerate() {
                // SAFETY: the caller's promise.
                unsafe {
                    let acts = broadcast_256(self, acts, quad, t);
                    *sums = [
                        _mm256_dpbusd_avx_epi32(sums[0], codes[0], acts),
                        _mm256_dpbusd_avx_epi32(sums[1], codes[1], acts),
                    ];
                }
            }
        }
    }
}

impl Dots for Avx512 {
    const SIGNED_BYTES: bool = false;

    #[inline(always)]
    fn add_pairs(self, sum: Ints512, weights: &Lanes<[i16; 2]>, pair: [i16; 2]) -> Ints512 {
        // SAFETY: see above.
        unsafe {
            let weights = _mm512_loadu_si512(weights.as_ptr().cast());
            let pair = _mm512_set1_epi32(dword(pair));
            Ints512(_mm512_dpwssd_epi32(sum.0, weights, pair))
        }
    }

    #[inline(always)]
    unsafe fn add_dots<const T: usize, const MAX: usize>(
        self,
        sums: &mut [Ints512; T],
        codes: &[Lanes<[u8; 4]>],
        acts: Acts,
    ) {
        for (quad, codes) in codes.iter().enumerate() {
            // SAFETY: the caller's promise.
            unsafe {
                let codes = _mm512_loadu_si512(codes.as_ptr().cast());
                for (t, Ints512(sum)) in sums.iter_mut().enumerate() {
                    let acts = _mm512_set1_epi32(acts.quad(quad, t).read_unaligned());
                    *sum = _mm512_dpbusd_epi32(*sum, codes, acts);
                }
            }
        }
    }
}
