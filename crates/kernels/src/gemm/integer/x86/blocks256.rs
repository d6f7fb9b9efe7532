//! K types: four rows at a time, superblock by superblock.

use std::arch::x86_64::*;

use super::super::super::activations::QuantizedRow;
use super::super::super::prefetch;
use super::{Products, sum_each, sum_halves};

/// Rows that are summed together, one per lane.
const ROWS: usize = 4;

/// Tiles of [`ROWS`] from one that is multiplied to one that is prefetched.
const AHEAD: usize = 4;

/// Elements of a superblock, and sums of activations that belong to it.
const LEN: usize = 256;
const N_SUMS: usize = 16;

/// How a type stores its superblocks.
pub(super) trait SuperBlock {
    const BYTES: usize;
    /// The offset of `d`, followed by `dmin` if there are minimums.
    const D: usize;
    const HAS_MINS: bool;

    /// Partial sums: of `Σ_s scale_s · Σ_j code_j · q_j`, and of `Σ_s min_s · Σ_j q_j`.
    ///
    /// # Safety
    /// Inlined into code compiled for AVX2 and what `P` needs. `block` has [`Self::BYTES`], `q`
    /// [`LEN`] and `sums` [`N_SUMS`] elements.
    unsafe fn sums<P: Products>(block: *const u8, q: *const i8, sums: __m256i) -> [__m256i; 2];
}

/// # Safety
/// Inlined into code compiled for AVX2, F16C and what `P` needs.
#[inline(always)]
pub(super) unsafe fn gemv<P: Products, B: SuperBlock>(
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let n_blocks = row_bytes / B::BYTES;
    assert!(rows.len() == row_bytes * out.len() && row_bytes == n_blocks * B::BYTES);
    assert!(x.q.len() >= n_blocks * LEN && x.scales.len() >= n_blocks);
    assert!(x.sums.len() >= n_blocks * N_SUMS);
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        // Missing rows are replaced by the last one.
        let last = i * ROWS + out.len() - 1;
        let mut blocks = [0, 1, 2, 3].map(|r| rows[last.min(i * ROWS + r) * row_bytes..].as_ptr());
        let later = blocks[0].wrapping_add(AHEAD * ROWS * row_bytes);
        let mut sums = [0.0; ROWS];
        // SAFETY: features by the caller's promise. Every row has `n_blocks` blocks and the
        // activations of that many are there: checked above.
        unsafe {
            let mut acc = _mm_setzero_ps();
            for b in 0..n_blocks {
                // As many bytes as are multiplied, of a later tile: nearer ones arrive too late from memory.
                let later = later.wrapping_add(b * ROWS * B::BYTES);
                prefetch::lines(prefetch::Level::Second, later, ROWS * B::BYTES);
                let q = x.q.as_ptr().add(b * LEN);
                let sums = _mm256_loadu_si256(x.sums.as_ptr().add(b * N_SUMS).cast());
                let dx = *x.scales.get_unchecked(b);
                acc = _mm_add_ps(acc, products::<P, B>(blocks, q, sums, dx));
                blocks = blocks.map(|block| block.wrapping_add(B::BYTES));
            }
            _mm_storeu_ps(sums.as_mut_ptr(), acc);
        }
        out.copy_from_slice(&sums[..out.len()]);
    }
}

/// What one superblock of each of four rows adds to its sum.
///
/// # Safety
/// As [`SuperBlock::sums`], for each of the blocks.
#[inline(always)]
unsafe fn products<P: Products, B: SuperBlock>(
    blocks: [*const u8; ROWS],
    q: *const i8,
    sums: __m256i,
    dx: f32,
) -> __m128 {
    // SAFETY: the caller's promise; `d` and `dmin` lie within the block.
    unsafe {
        let [[a, am], [b, bm], [c, cm], [d, dm]] = [
            B::sums::<P>(blocks[0], q, sums),
            B::sums::<P>(blocks[1], q, sums),
            B::sums::<P>(blocks[2], q, sums),
            B::sums::<P>(blocks[3], q, sums),
        ];
        let scales = blocks.map(|block| block.add(B::D));
        if B::HAS_MINS {
            let sums = sum_each([a, b, c, d], [am, bm, cm, dm]);
            // d and dmin of each row, then those of all rows interleaved.
            let [s0, s1, s2, s3] = scales.map(|s| s.cast::<i32>().read_unaligned());
            let pairs = _mm_set_epi32(s3, s2, s1, s0);
            let apart = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
            let scales = _mm256_cvtph_ps(_mm_shuffle_epi8(pairs, apart));
            let scales = _mm256_mul_ps(scales, _mm256_set1_ps(dx));
            let products = _mm256_mul_ps(_mm256_cvtepi32_ps(sums), scales);
            _mm_sub_ps(
                _mm256_castps256_ps128(products),
                _mm256_extractf128_ps::<1>(products),
            )
        } else {
            let sums = sum_halves([a, b, c, d]);
            let sums = _mm_add_epi32(
                _mm256_castsi256_si128(sums),
                _mm256_extracti128_si256::<1>(sums),
            );
            let [s0, s1, s2, s3] = scales.map(|s| s.cast::<i16>().read_unaligned());
            let scales = _mm_cvtph_ps(_mm_setr_epi16(s0, s1, s2, s3, 0, 0, 0, 0));
            let scales = _mm_mul_ps(scales, _mm_set1_ps(dx));
            _mm_mul_ps(_mm_cvtepi32_ps(sums), scales)
        }
    }
}

/// Adds the products of 32 codes with their activations, group `G` of the eight of a superblock,
/// multiplied by scale `G` of the eight 16-bit scales in either half.
///
/// # Safety
/// Inlined into code compiled for AVX2 and what `P` needs; `q` has [`LEN`] elements. Codes are
/// unsigned, at most 128.
#[inline(always)]
unsafe fn add_group<P: Products, const G: usize>(
    acc: __m256i,
    codes: __m256i,
    q: *const i8,
    scales: __m256i,
) -> __m256i {
    // SAFETY: the caller's promise; there are eight groups of 32.
    unsafe {
        let q = _mm256_loadu_si256(q.add(32 * G).cast());
        let pick = _mm256_set1_epi16(((2 * G) | ((2 * G + 1) << 8)) as i16);
        let scale = _mm256_shuffle_epi8(scales, pick);
        P::add_i16(acc, _mm256_maddubs_epi16(codes, q), scale)
    }
}

/// Adds the products of all codes, 32 at a time. As [`add_group`].
///
/// # Safety
/// As [`add_group`].
#[inline(always)]
unsafe fn add_groups<P: Products>(
    acc: __m256i,
    codes: [__m256i; 8],
    q: *const i8,
    scales: __m256i,
) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let acc = add_group::<P, 0>(acc, codes[0], q, scales);
        let acc = add_group::<P, 1>(acc, codes[1], q, scales);
        let acc = add_group::<P, 2>(acc, codes[2], q, scales);
        let acc = add_group::<P, 3>(acc, codes[3], q, scales);
        let acc = add_group::<P, 4>(acc, codes[4], q, scales);
        let acc = add_group::<P, 5>(acc, codes[5], q, scales);
        let acc = add_group::<P, 6>(acc, codes[6], q, scales);
        add_group::<P, 7>(acc, codes[7], q, scales)
    }
}

/// Eight scales of 32 elements each, as both halves of 16-bit scales.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn scales_of_32(scales: u64) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_cvtepu8_epi16(_mm_set1_epi64x(scales as i64)) }
}

/// Sixteen signed scales of 16 elements each: those of the first 16 of every 32 in the lower half, the
/// others in the upper.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn scales_of_16(scales: __m128i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let apart = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
        _mm256_cvtepi8_epi16(_mm_shuffle_epi8(scales, apart))
    }
}

/// `−bias · Σ_s scale_s · Σ_j q_j`, the excess of codes stored with a bias of 2^`SHIFT`.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn bias<const SHIFT: i32>(scales: __m128i, sums: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let sums = _mm256_madd_epi16(_mm256_cvtepi8_epi16(scales), sums);
        _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32::<SHIFT>(sums))
    }
}

/// 32 bytes.
///
/// # Safety
/// Inlined into code compiled for AVX2; they are there.
#[inline(always)]
unsafe fn load(bytes: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(bytes.cast()) }
}

/// The low nibbles of 32 bytes, and the high ones.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn nibbles(bytes: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = load(bytes);
        let mask = _mm256_set1_epi8(15);
        [
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask),
        ]
    }
}

/// `low | high & mask`.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn join(low: __m256i, high: __m256i, mask: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_or_si256(low, _mm256_and_si256(high, mask)) }
}

/// The eight scales and the eight minimums, one per byte, that Q4_K and Q5_K pack into twelve bytes: see
/// [`crate::quant`].
///
/// # Safety
/// Twelve bytes are there.
#[inline(always)]
unsafe fn unpack_scales(packed: *const u8) -> (u64, u64) {
    // SAFETY: the caller's promise.
    let [a, b, c] = unsafe { packed.cast::<[u32; 3]>().read_unaligned() };
    let high = (c & 0x0f0f_0f0f) | (a >> 2 & 0x3030_3030);
    let scales = u64::from(a & 0x3f3f_3f3f) | u64::from(high) << 32;
    let high = (c >> 4 & 0x0f0f_0f0f) | (b >> 2 & 0x3030_3030);
    let mins = u64::from(b & 0x3f3f_3f3f) | u64::from(high) << 32;
    (scales, mins)
}

/// `Σ_s min_s · Σ_j q_j` with minimums of 32 elements each.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn offset_of_32(mins: u64, sums: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let mins = _mm_set_epi64x(0, mins as i64);
        let twice = _mm_unpacklo_epi8(mins, mins);
        _mm256_madd_epi16(_mm256_cvtepu8_epi16(twice), sums)
    }
}

pub(super) struct Q4K;

impl SuperBlock for Q4K {
    const BYTES: usize = 144;
    const D: usize = 0;
    const HAS_MINS: bool = true;

    #[inline(always)]
    unsafe fn sums<P: Products>(block: *const u8, q: *const i8, sums: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let (scales, mins) = unpack_scales(block.add(4));
            let codes = block.add(16);
            let [c0, c1] = nibbles(codes);
            let [c2, c3] = nibbles(codes.add(32));
            let [c4, c5] = nibbles(codes.add(64));
            let [c6, c7] = nibbles(codes.add(96));
            let codes = [c0, c1, c2, c3, c4, c5, c6, c7];
            let zero = _mm256_setzero_si256();
            [
                add_groups::<P>(zero, codes, q, scales_of_32(scales)),
                offset_of_32(mins, sums),
            ]
        }
    }
}

pub(super) struct Q5K;

impl SuperBlock for Q5K {
    const BYTES: usize = 176;
    const D: usize = 0;
    const HAS_MINS: bool = true;

    #[inline(always)]
    unsafe fn sums<P: Products>(block: *const u8, q: *const i8, sums: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let (scales, mins) = unpack_scales(block.add(4));
            let high = load(block.add(16));
            // Bit s becomes bit 4 of group s.
            let fifth = _mm256_set1_epi8(16);
            let codes = block.add(48);
            let [c0, c1] = nibbles(codes);
            let [c2, c3] = nibbles(codes.add(32));
            let [c4, c5] = nibbles(codes.add(64));
            let [c6, c7] = nibbles(codes.add(96));
            let codes = [
                join(c0, _mm256_slli_epi16::<4>(high), fifth),
                join(c1, _mm256_slli_epi16::<3>(high), fifth),
                join(c2, _mm256_slli_epi16::<2>(high), fifth),
                join(c3, _mm256_slli_epi16::<1>(high), fifth),
                join(c4, high, fifth),
                join(c5, _mm256_srli_epi16::<1>(high), fifth),
                join(c6, _mm256_srli_epi16::<2>(high), fifth),
                join(c7, _mm256_srli_epi16::<3>(high), fifth),
            ];
            let zero = _mm256_setzero_si256();
            [
                add_groups::<P>(zero, codes, q, scales_of_32(scales)),
                offset_of_32(mins, sums),
            ]
        }
    }
}

/// The codes of half a block, of 64 bytes of low and 32 of high bits.
///
/// # Safety
/// As [`load`], for each.
#[inline(always)]
unsafe fn q6_k_half(low: *const u8, high: *const u8) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let [c0, c2] = nibbles(low);
        let [c1, c3] = nibbles(low.add(32));
        let high = load(high);
        let upper = _mm256_set1_epi8(0x30);
        [
            join(c0, _mm256_slli_epi16::<4>(high), upper),
            join(c1, _mm256_slli_epi16::<2>(high), upper),
            join(c2, high, upper),
            join(c3, _mm256_srli_epi16::<2>(high), upper),
        ]
    }
}

pub(super) struct Q6K;

impl SuperBlock for Q6K {
    const BYTES: usize = 210;
    const D: usize = 208;
    const HAS_MINS: bool = false;

    #[inline(always)]
    unsafe fn sums<P: Products>(block: *const u8, q: *const i8, sums: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let [c0, c1, c2, c3] = q6_k_half(block, block.add(128));
            let [c4, c5, c6, c7] = q6_k_half(block.add(64), block.add(160));
            let codes = [c0, c1, c2, c3, c4, c5, c6, c7];
            let scales = _mm_loadu_si128(block.add(192).cast());
            let acc = bias::<5>(scales, sums);
            [
                add_groups::<P>(acc, codes, q, scales_of_16(scales)),
                _mm256_setzero_si256(),
            ]
        }
    }
}

/// Bits 1:0, 3:2, 5:4 and 7:6 of 32 bytes.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn crumbs(bytes: *const u8) -> [__m256i; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = load(bytes);
        let mask = _mm256_set1_epi8(3);
        [
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi16::<2>(bytes), mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask),
            _mm256_and_si256(_mm256_srli_epi16::<6>(bytes), mask),
        ]
    }
}

pub(super) struct Q2K;

impl SuperBlock for Q2K {
    const BYTES: usize = 84;
    const D: usize = 80;
    const HAS_MINS: bool = true;

    #[inline(always)]
    unsafe fn sums<P: Products>(block: *const u8, q: *const i8, sums: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            let packed = _mm_loadu_si128(block.cast());
            let mask = _mm_set1_epi8(15);
            let scales = _mm_and_si128(packed, mask);
            let mins = _mm_and_si128(_mm_srli_epi16::<4>(packed), mask);
            let [c0, c1, c2, c3] = crumbs(block.add(16));
            let [c4, c5, c6, c7] = crumbs(block.add(48));
            let codes = [c0, c1, c2, c3, c4, c5, c6, c7];
            let zero = _mm256_setzero_si256();
            [
                add_groups::<P>(zero, codes, q, scales_of_16(scales)),
                _mm256_madd_epi16(_mm256_cvtepu8_epi16(mins), sums),
            ]
        }
    }
}

pub(super) struct Q3K;

impl SuperBlock for Q3K {
    const BYTES: usize = 110;
    const D: usize = 108;
    const HAS_MINS: bool = false;

    #[inline(always)]
    unsafe fn sums<P: Products>(block: *const u8, q: *const i8, sums: __m256i) -> [__m256i; 2] {
        // SAFETY: the caller's promise; the fields fill the block.
        unsafe {
            // Six bits each, less 32: the low four of scales 0 to 7 and 8 to 15 in the nibbles of
            // eight bytes, the upper two in four more.
            let low = block.add(96).cast::<u64>().read_unaligned();
            let high = block.add(104).cast::<u32>().read_unaligned();
            let nibble = 0x0f0f_0f0f_0f0f_0f0f;
            let upper = 0x3030_3030_3030_3030;
            let first =
                u64::from(high << 4 & 0x3030_3030) | u64::from(high << 2 & 0x3030_3030) << 32;
            let second = (u64::from(high) | u64::from(high >> 2) << 32) & upper;
            let scales = _mm_set_epi64x(
                (low >> 4 & nibble | second) as i64,
                (low & nibble | first) as i64,
            );
            let scales = _mm_sub_epi8(scales, _mm_set1_epi8(32));

            let high = load(block);
            // Bit s becomes bit 2 of group s.
            let third = _mm256_set1_epi8(4);
            let [c0, c1, c2, c3] = crumbs(block.add(32));
            let [c4, c5, c6, c7] = crumbs(block.add(64));
            let codes = [
                join(c0, _mm256_slli_epi16::<2>(high), third),
                join(c1, _mm256_slli_epi16::<1>(high), third),
                join(c2, high, third),
                join(c3, _mm256_srli_epi16::<1>(high), third),
                join(c4, _mm256_srli_epi16::<2>(high), third),
                join(c5, _mm256_srli_epi16::<3>(high), third),
                join(c6, _mm256_srli_epi16::<4>(high), third),
                join(c7, _mm256_srli_epi16::<5>(high), third),
            ];
            let acc = bias::<2>(scales, sums);
            [
                add_groups::<P>(acc, codes, q, scales_of_16(scales)),
                _mm256_setzero_si256(),
            ]
        }
    }
}
