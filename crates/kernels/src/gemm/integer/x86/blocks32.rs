//! Types with one scale per block: eight groups of 32 elements of a row at a time, in eight rows.

use std::arch::x86_64::*;
use std::borrow::Cow;

use super::super::super::activations::QuantizedRow;
use super::super::super::prefetch;
use super::{Products, sum_each, sum_halves};

/// Rows that are summed together, one per lane.
const ROWS: usize = 8;

/// Tiles of [`ROWS`] from one that is multiplied to one that is prefetched.
const AHEAD: usize = 2;

/// Elements that a kernel multiplies at a time, and groups of them that share a scale of activations.
const SPAN: usize = 256;
const GROUPS: usize = 8;

/// How a type stores the elements of a span.
pub(super) trait Span {
    /// Bytes of a span, and of each of its blocks.
    const BYTES: usize;
    const BLOCK_BYTES: usize;

    /// Stored codes are too large by this much.
    fn bias<P: Products>() -> i16;

    /// The index within the span of the activation that [`Span::dots`] needs at `i`.
    fn source(i: usize) -> usize {
        i
    }

    /// Puts a span of activations in that order.
    ///
    /// # Safety
    /// Inlined into code compiled for AVX2.
    #[inline(always)]
    unsafe fn arrange(q: &[i8; SPAN], out: &mut [i8; SPAN]) {
        for (i, out) in out.iter_mut().enumerate() {
            *out = q[Self::source(i)];
        }
    }

    /// `Σ_j (code_j + bias) · q_j` of each group. `q` is in the order that [`Span::source`] says.
    ///
    /// # Safety
    /// Inlined into code compiled for AVX2 and what `P` needs. `span` has [`Self::BYTES`], `q`
    /// [`SPAN`] elements.
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i;

    /// The scale of each group.
    ///
    /// # Safety
    /// Inlined into code compiled for AVX2 and F16C. `span` has [`Self::BYTES`] elements.
    unsafe fn scales(span: *const u8) -> __m256;
}

/// # Safety
/// Inlined into code compiled for AVX2, F16C and what `P` needs.
#[inline(always)]
pub(super) unsafe fn gemv<P: Products, S: Span>(
    rows: &[u8],
    row_bytes: usize,
    x: QuantizedRow<'_>,
    out: &mut [f32],
) {
    let (n_spans, rest) = (row_bytes / S::BYTES, row_bytes % S::BYTES);
    let n_padded = n_spans + usize::from(rest > 0);
    assert!(rows.len() == row_bytes * out.len());
    assert!(x.q.len() >= n_padded * SPAN);
    assert!(x.scales.len() >= n_padded * GROUPS && x.sums.len() >= n_padded * 2 * GROUPS);
    // SAFETY: the caller's promise.
    let q = unsafe { arrange::<S>(&x.q[..n_padded * SPAN]) };
    let x = QuantizedRow { q: &q, ..x };
    for (i, out) in out.chunks_mut(ROWS).enumerate() {
        // Missing rows are replaced by the last one.
        let last = i * ROWS + out.len() - 1;
        let row = |r: usize| &rows[last.min(i * ROWS + r) * row_bytes..][..row_bytes];
        let mut spans: [*const u8; ROWS] = std::array::from_fn(|r| row(r).as_ptr());
        let mut sums = [0.0; ROWS];
        // SAFETY: features by the caller's promise. Every row has `n_spans` spans, and the padded one
        // is as long as one.
        unsafe {
            let mut acc = _mm256_setzero_ps();
            for s in 0..n_spans {
                for span in spans {
                    let later = span.wrapping_add(AHEAD * ROWS * row_bytes);
                    prefetch::lines(prefetch::Level::Second, later, S::BYTES);
                }
                acc = add_span::<P, S>(acc, spans, Activations::load::<P, S>(x, s));
                spans = spans.map(|span| span.wrapping_add(S::BYTES));
            }
            if rest > 0 {
                // Blocks of zeros add nothing.
                let mut padded = [[0; SPAN + GROUPS * 2]; ROWS];
                for (r, padded) in padded.iter_mut().enumerate() {
                    padded[..rest].copy_from_slice(&row(r)[row_bytes - rest..]);
                }
                let spans = std::array::from_fn(|r| padded[r].as_ptr());
                acc = add_span::<P, S>(acc, spans, Activations::load::<P, S>(x, n_spans));
            }
            _mm256_storeu_ps(sums.as_mut_ptr(), acc);
        }
        out.copy_from_slice(&sums[..out.len()]);
    }
}

/// Activations in the order that the type needs.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn arrange<S: Span>(q: &[i8]) -> Cow<'_, [i8]> {
    if (0..SPAN).all(|i| S::source(i) == i) {
        return Cow::Borrowed(q);
    }
    let mut arranged = vec![0; q.len()];
    let spans = q.as_chunks().0.iter();
    for (span, out) in spans.zip(arranged.as_chunks_mut().0) {
        // SAFETY: the caller's promise.
        unsafe { S::arrange(span, out) };
    }
    Cow::Owned(arranged)
}

/// The activations for a span.
struct Activations {
    q: *const i8,
    /// The contribution of the codes' bias to the sums of products.
    biases: __m256i,
    scales: __m256,
}

impl Activations {
    /// Those of span `s`.
    ///
    /// # Safety
    /// Inlined into code compiled for AVX2. There is such a span.
    #[inline(always)]
    unsafe fn load<P: Products, S: Span>(x: QuantizedRow<'_>, s: usize) -> Activations {
        // SAFETY: the caller's promise.
        unsafe {
            let sums = load(x.sums.as_ptr().add(s * 2 * GROUPS));
            Activations {
                q: x.q.as_ptr().add(s * SPAN),
                biases: _mm256_madd_epi16(sums, _mm256_set1_epi16(S::bias::<P>())),
                scales: _mm256_loadu_ps(x.scales.as_ptr().add(s * GROUPS)),
            }
        }
    }
}

/// Adds the groups of a span, one after the other, in all rows.
///
/// # Safety
/// Inlined into code compiled for AVX2, F16C and what `P` needs. Spans have [`Span::BYTES`], the
/// activations [`SPAN`] elements.
#[inline(always)]
unsafe fn add_span<P: Products, S: Span>(
    acc: __m256,
    spans: [*const u8; ROWS],
    x: Activations,
) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        let mut products = [_mm256_setzero_ps(); ROWS];
        for (products, span) in products.iter_mut().zip(spans) {
            let dots = _mm256_sub_epi32(S::dots::<P>(span, x.q), x.biases);
            let scales = _mm256_mul_ps(S::scales(span), x.scales);
            *products = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), scales);
        }
        let mut acc = acc;
        for group in transpose(products) {
            acc = _mm256_add_ps(acc, group);
        }
        acc
    }
}

/// Transposes 4 × 4 in the lower halves and in the upper.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn transpose_halves(a: __m256, b: __m256, c: __m256, d: __m256) -> [__m256; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let (ab, ab_high) = (_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
        let (cd, cd_high) = (_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
        [
            _mm256_shuffle_ps::<0b01_00_01_00>(ab, cd),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab, cd),
            _mm256_shuffle_ps::<0b01_00_01_00>(ab_high, cd_high),
            _mm256_shuffle_ps::<0b11_10_11_10>(ab_high, cd_high),
        ]
    }
}

/// Lane `j` of vector `i` becomes lane `i` of vector `j`.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn transpose([a, b, c, d, e, f, g, h]: [__m256; 8]) -> [__m256; 8] {
    // SAFETY: the caller's promise.
    unsafe {
        let [a, b, c, d] = transpose_halves(a, b, c, d);
        let [e, f, g, h] = transpose_halves(e, f, g, h);
        [
            _mm256_permute2f128_ps::<0x20>(a, e),
            _mm256_permute2f128_ps::<0x20>(b, f),
            _mm256_permute2f128_ps::<0x20>(c, g),
            _mm256_permute2f128_ps::<0x20>(d, h),
            _mm256_permute2f128_ps::<0x31>(a, e),
            _mm256_permute2f128_ps::<0x31>(b, f),
            _mm256_permute2f128_ps::<0x31>(c, g),
            _mm256_permute2f128_ps::<0x31>(d, h),
        ]
    }
}

/// 32 bytes.
///
/// # Safety
/// Inlined into code compiled for AVX2; they are there.
#[inline(always)]
unsafe fn load<T>(bytes: *const T) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu_si256(bytes.cast()) }
}

/// 16 bytes each of two places.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn load_two(low: *const u8, high: *const u8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_loadu2_m128i(high.cast(), low.cast()) }
}

/// The scale that begins block `i`, as bits.
///
/// # Safety
/// `i + 1` blocks of `stride` bytes are there.
#[inline(always)]
unsafe fn scale(span: *const u8, i: usize, stride: usize) -> i16 {
    // SAFETY: the caller's promise.
    unsafe { span.add(i * stride).cast::<i16>().read_unaligned() }
}

/// The scales that begin the eight blocks of a span.
///
/// # Safety
/// Inlined into code compiled for AVX2 and F16C; eight blocks of `stride` bytes are there.
#[inline(always)]
unsafe fn eight_scales(span: *const u8, stride: usize) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe {
        _mm256_cvtph_ps(_mm_setr_epi16(
            scale(span, 0, stride),
            scale(span, 1, stride),
            scale(span, 2, stride),
            scale(span, 3, stride),
            scale(span, 4, stride),
            scale(span, 5, stride),
            scale(span, 6, stride),
            scale(span, 7, stride),
        ))
    }
}

/// `d: f16, codes: [i8; 32]`.
pub(super) struct Q8_0;

/// Partial sums of block `I`.
///
/// # Safety
/// As [`Span::dots`].
#[inline(always)]
unsafe fn q8_0_dot<P: Products, const I: usize>(span: *const u8, q: *const i8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let codes = load(span.add(I * Q8_0::BLOCK_BYTES + 2));
        P::dot_i8(codes, load(q.add(32 * I)))
    }
}

impl Span for Q8_0 {
    const BYTES: usize = GROUPS * Self::BLOCK_BYTES;
    const BLOCK_BYTES: usize = 34;

    fn bias<P: Products>() -> i16 {
        P::I8_BIAS
    }

    #[inline(always)]
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            sum_each(
                [
                    q8_0_dot::<P, 0>(span, q),
                    q8_0_dot::<P, 1>(span, q),
                    q8_0_dot::<P, 2>(span, q),
                    q8_0_dot::<P, 3>(span, q),
                ],
                [
                    q8_0_dot::<P, 4>(span, q),
                    q8_0_dot::<P, 5>(span, q),
                    q8_0_dot::<P, 6>(span, q),
                    q8_0_dot::<P, 7>(span, q),
                ],
            )
        }
    }

    #[inline(always)]
    unsafe fn scales(span: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { eight_scales(span, Self::BLOCK_BYTES) }
    }
}

/// The order of activations for blocks with the first 16 elements in low and the last 16 in high
/// nibbles, of which blocks `i` and `4 + i` fill the halves of a register.
fn source_of_nibbles(i: usize) -> usize {
    let (pair, high, second, j) = (i / 64, i / 32 % 2, i / 16 % 2, i % 16);
    32 * (pair + 4 * second) + 16 * high + j
}

/// The first 16 elements of two blocks, and the last 16: the nibbles of two times 16 bytes.
///
/// # Safety
/// As [`load`].
#[inline(always)]
unsafe fn nibbles_of_two(a: *const u8, b: *const u8) -> [__m256i; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let bytes = load_two(a, b);
        let mask = _mm256_set1_epi8(15);
        [
            _mm256_and_si256(bytes, mask),
            _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), mask),
        ]
    }
}

/// Types whose blocks are nibbles: how they process a pair of blocks.
trait Nibbles {
    /// The first 16 codes of blocks `I` and `4 + I`, and the last 16.
    ///
    /// # Safety
    /// As [`Span::dots`].
    unsafe fn pair<const I: usize>(span: *const u8) -> [__m256i; 2];
}

/// Partial sums of a pair of blocks.
///
/// # Safety
/// As [`Span::dots`].
#[inline(always)]
unsafe fn dot_pair<P: Products, N: Nibbles, const I: usize>(
    span: *const u8,
    q: *const i8,
) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let q = [load(q.add(64 * I)), load(q.add(64 * I + 32))];
        P::dot_two_u8(N::pair::<I>(span), q)
    }
}

/// The sums of all pairs: those of the lower halves first.
///
/// # Safety
/// As [`Span::dots`].
#[inline(always)]
unsafe fn dots_of_pairs<P: Products, N: Nibbles>(span: *const u8, q: *const i8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        sum_halves([
            dot_pair::<P, N, 0>(span, q),
            dot_pair::<P, N, 1>(span, q),
            dot_pair::<P, N, 2>(span, q),
            dot_pair::<P, N, 3>(span, q),
        ])
    }
}

/// `d: f16, codes: [u8; 16]`.
pub(super) struct Q4_0;

impl Span for Q4_0 {
    const BYTES: usize = GROUPS * Self::BLOCK_BYTES;
    const BLOCK_BYTES: usize = 18;

    fn bias<P: Products>() -> i16 {
        8
    }

    fn source(i: usize) -> usize {
        source_of_nibbles(i)
    }

    #[inline(always)]
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { dots_of_pairs::<P, Self>(span, q) }
    }

    #[inline(always)]
    unsafe fn scales(span: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { eight_scales(span, Self::BLOCK_BYTES) }
    }
}

impl Nibbles for Q4_0 {
    #[inline(always)]
    unsafe fn pair<const I: usize>(span: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            nibbles_of_two(
                span.add(I * Self::BLOCK_BYTES + 2),
                span.add((4 + I) * Self::BLOCK_BYTES + 2),
            )
        }
    }
}

/// `d: f16, high: u32, codes: [u8; 16]`.
pub(super) struct Q5_0;

impl Span for Q5_0 {
    const BYTES: usize = GROUPS * Self::BLOCK_BYTES;
    const BLOCK_BYTES: usize = 22;

    fn bias<P: Products>() -> i16 {
        16
    }

    fn source(i: usize) -> usize {
        source_of_nibbles(i)
    }

    #[inline(always)]
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { dots_of_pairs::<P, Self>(span, q) }
    }

    #[inline(always)]
    unsafe fn scales(span: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { eight_scales(span, Self::BLOCK_BYTES) }
    }
}

impl Nibbles for Q5_0 {
    #[inline(always)]
    unsafe fn pair<const I: usize>(span: *const u8) -> [__m256i; 2] {
        // SAFETY: the caller's promise.
        unsafe {
            let a = span.add(I * Self::BLOCK_BYTES);
            let b = span.add((4 + I) * Self::BLOCK_BYTES);
            let [low, high] = nibbles_of_two(a.add(6), b.add(6));
            let masks = _mm256_setr_m128i(
                _mm_cvtsi32_si128(a.add(2).cast::<i32>().read_unaligned()),
                _mm_cvtsi32_si128(b.add(2).cast::<i32>().read_unaligned()),
            );
            [
                _mm256_or_si256(low, fifth_bits(masks)),
                _mm256_or_si256(high, fifth_bits(_mm256_srli_epi32::<16>(masks))),
            ]
        }
    }
}

/// Bit `i` of either half as bit 4 of its byte `i`.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn fifth_bits(masks: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let byte_of = _mm256_broadcastsi128_si256(_mm_set_epi64x(0x0101_0101_0101_0101, 0));
        let bit_of = _mm256_set1_epi64x(0x8040_2010_0804_0201_u64 as i64);
        let bits = _mm256_and_si256(_mm256_shuffle_epi8(masks, byte_of), bit_of);
        _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of), _mm256_set1_epi8(16))
    }
}

/// `d: f16, bits: [u8; 16]`, element `8j + i` at bit `i` of byte `j`: a register holds two blocks, and bits
/// `i` of its bytes match one register of activations.
pub(super) struct Q1_0;

impl Span for Q1_0 {
    const BYTES: usize = 2 * Self::BLOCK_BYTES;
    const BLOCK_BYTES: usize = 18;

    /// A bit is 1 or −1. That makes `2 · Σ bit · q − Σ q`.
    fn bias<P: Products>() -> i16 {
        1
    }

    fn source(i: usize) -> usize {
        i % 32 * 8 + i / 32
    }

    #[inline(always)]
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let bits = load_two(span.add(2), span.add(Self::BLOCK_BYTES + 2));
            // Each bit as 0 or 2.
            let mask = _mm256_set1_epi8(2);
            let planes = [
                _mm256_slli_epi16::<1>(bits),
                bits,
                _mm256_srli_epi16::<1>(bits),
                _mm256_srli_epi16::<2>(bits),
                _mm256_srli_epi16::<3>(bits),
                _mm256_srli_epi16::<4>(bits),
                _mm256_srli_epi16::<5>(bits),
                _mm256_srli_epi16::<6>(bits),
            ];
            // Sums of sixteen products, at most 16 · 2 · 127.
            let mut pairs = _mm256_setzero_si256();
            for (i, plane) in planes.into_iter().enumerate() {
                let codes = _mm256_and_si256(plane, mask);
                let products = _mm256_maddubs_epi16(codes, load(q.add(32 * i)));
                pairs = _mm256_add_epi16(pairs, products);
            }
            // Four bytes are a group.
            _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))
        }
    }

    #[inline(always)]
    unsafe fn scales(span: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let first = _mm_set1_epi16(scale(span, 0, Self::BLOCK_BYTES));
            let second = _mm_set1_epi16(scale(span, 1, Self::BLOCK_BYTES));
            _mm256_cvtph_ps(_mm_unpacklo_epi64(first, second))
        }
    }
}

/// The order of activations for codes of two bits, element `4j + i` at bits `2i` of byte `j`, of which 32
/// bytes at a time are unpacked.
fn source_of_crumbs(i: usize) -> usize {
    let (register, shift, j) = (i / 128, i / 32 % 4, i % 32);
    128 * register + 4 * j + shift
}

/// Puts a span in the order of [`source_of_crumbs`]: every fourth element of each half together.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn arrange_crumbs(q: &[i8; SPAN], out: &mut [i8; SPAN]) {
    for (q, out) in q.chunks_exact(128).zip(out.chunks_exact_mut(128)) {
        // SAFETY: the caller's promise; both have 128 elements.
        unsafe {
            // Every fourth of sixteen, then those of both halves next to one another: in each vector eight elements
            // of each of the four runs.
            let fourths = _mm256_broadcastsi128_si256(_mm_setr_epi8(
                0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15,
            ));
            let halves = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
            let [a, b, c, d] = std::array::from_fn(|i| {
                let each = _mm256_shuffle_epi8(load(q.as_ptr().add(32 * i)), fourths);
                _mm256_permutevar8x32_epi32(each, halves)
            });
            let (ab, ab_odd) = (_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
            let (cd, cd_odd) = (_mm256_unpacklo_epi64(c, d), _mm256_unpackhi_epi64(c, d));
            let runs = [
                _mm256_permute2x128_si256::<0x20>(ab, cd),
                _mm256_permute2x128_si256::<0x20>(ab_odd, cd_odd),
                _mm256_permute2x128_si256::<0x31>(ab, cd),
                _mm256_permute2x128_si256::<0x31>(ab_odd, cd_odd),
            ];
            for (run, out) in runs.into_iter().zip(out.chunks_exact_mut(32)) {
                _mm256_storeu_si256(out.as_mut_ptr().cast(), run);
            }
        }
    }
}

/// Sums of eight bytes' codes, as halves of groups.
///
/// # Safety
/// Inlined into code compiled for AVX2 and what `P` needs; `q` has 128 elements.
#[inline(always)]
unsafe fn dots_of_crumbs<P: Products>(bytes: __m256i, q: *const i8) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        let mask = _mm256_set1_epi8(3);
        let planes = [
            bytes,
            _mm256_srli_epi16::<2>(bytes),
            _mm256_srli_epi16::<4>(bytes),
            _mm256_srli_epi16::<6>(bytes),
        ];
        P::dot_four_u8(
            planes.map(|plane| _mm256_and_si256(plane, mask)),
            std::array::from_fn(|i| load(q.add(32 * i))),
        )
    }
}

/// The groups of two registers of their halves.
///
/// # Safety
/// Inlined into code compiled for AVX2.
#[inline(always)]
unsafe fn join_groups(first: __m256i, second: __m256i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe {
        // 0 1 4 5 and 2 3 6 7.
        let groups = _mm256_hadd_epi32(first, second);
        _mm256_permute4x64_epi64::<0b11_01_10_00>(groups)
    }
}

/// `d: f16, codes: [u8; 16]` for 64 elements.
pub(super) struct Q2_0;

impl Span for Q2_0 {
    const BYTES: usize = 4 * Self::BLOCK_BYTES;
    const BLOCK_BYTES: usize = 18;

    fn bias<P: Products>() -> i16 {
        1
    }

    fn source(i: usize) -> usize {
        source_of_crumbs(i)
    }

    #[inline(always)]
    unsafe fn arrange(q: &[i8; SPAN], out: &mut [i8; SPAN]) {
        // SAFETY: the caller's promise.
        unsafe { arrange_crumbs(q, out) }
    }

    #[inline(always)]
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            let a = span.add(2);
            let b = a.add(Self::BLOCK_BYTES);
            let c = b.add(Self::BLOCK_BYTES);
            let d = c.add(Self::BLOCK_BYTES);
            join_groups(
                dots_of_crumbs::<P>(load_two(a, b), q),
                dots_of_crumbs::<P>(load_two(c, d), q.add(128)),
            )
        }
    }

    #[inline(always)]
    unsafe fn scales(span: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let a = scale(span, 0, Self::BLOCK_BYTES);
            let b = scale(span, 1, Self::BLOCK_BYTES);
            let c = scale(span, 2, Self::BLOCK_BYTES);
            let d = scale(span, 3, Self::BLOCK_BYTES);
            _mm256_cvtph_ps(_mm_setr_epi16(a, a, b, b, c, c, d, d))
        }
    }
}

/// `d: f16, codes: [u8; 32]` for 128 elements.
pub(super) struct Q2_0G128;

impl Span for Q2_0G128 {
    const BYTES: usize = 2 * Self::BLOCK_BYTES;
    const BLOCK_BYTES: usize = 34;

    fn bias<P: Products>() -> i16 {
        1
    }

    fn source(i: usize) -> usize {
        source_of_crumbs(i)
    }

    #[inline(always)]
    unsafe fn arrange(q: &[i8; SPAN], out: &mut [i8; SPAN]) {
        // SAFETY: the caller's promise.
        unsafe { arrange_crumbs(q, out) }
    }

    #[inline(always)]
    unsafe fn dots<P: Products>(span: *const u8, q: *const i8) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe {
            join_groups(
                dots_of_crumbs::<P>(load(span.add(2)), q),
                dots_of_crumbs::<P>(load(span.add(Self::BLOCK_BYTES + 2)), q.add(128)),
            )
        }
    }

    #[inline(always)]
    unsafe fn scales(span: *const u8) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe {
            let first = _mm_set1_epi16(scale(span, 0, Self::BLOCK_BYTES));
            let second = _mm_set1_epi16(scale(span, 1, Self::BLOCK_BYTES));
            _mm256_cvtph_ps(_mm_unpacklo_epi64(first, second))
        }
    }
}
