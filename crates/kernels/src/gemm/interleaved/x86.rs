//! Sixteen rows of weights with one row of activations, and with several at once, with AVX-512.

use std::arch::x86_64::*;

use super::super::activations::{Order, SUM_LEN, TILE, Tiles};
use super::super::panel::Acts;
use super::super::prefetch;
use super::crumbs::{self, Crumbs};
use super::nibbles::{Header, WORD};
use super::q4_0::Q4_0;
use super::q4_k::Q4K;
use super::q5_k::Q5K;
use super::q6_k::Q6K;
use super::q8_0::Q8_0;
use super::{GROUP_LEN, Panel, QuantizedRow, ROWS, SPAN, Sums};
use crate::isa::{Isa, Level};

/// Bytes from those that are multiplied to those that are prefetched.
const AHEAD: usize = 8 << 10;

/// Whether `isa` has the instructions of the kernels here.
pub(super) fn is_offered(isa: Isa) -> bool {
    matches!(isa.level(), Level::Avx512 | Level::Amx)
}

/// Whether weights are prefetched to the nearest cache: measured on a Zen 4. A Xeon with AMX decodes as fast with either.
pub(super) fn prefetches_nearest(isa: Isa) -> bool {
    isa.level() == Level::Avx512
}

/// Parts of a span, with each of which about as many lines are prefetched: prefetches of a whole span in one go hold up the
/// loads that follow them.
const PARTS: usize = 8;

/// Prefetches part `part` of what is [`AHEAD`] of `span`, whole lines: to the `NEAREST` cache, from which a Zen 4 reads it
/// 1.1 to 1.25 times as fast, or to the second.
#[inline(always)]
pub(super) fn prefetch_part<S, const NEAREST: bool>(span: &S, part: usize) {
    const LINE: usize = 64;
    let lines = size_of::<S>().div_ceil(LINE);
    let (from, to) = (part * lines / PARTS, (part + 1) * lines / PARTS);
    let ahead = std::ptr::from_ref(span)
        .cast::<u8>()
        .wrapping_add(AHEAD + from * LINE);
    let level = match NEAREST {
        true => prefetch::Level::First,
        false => prefetch::Level::Second,
    };
    prefetch::lines(level, ahead, (to - from) * LINE);
}

/// Four activations in each lane.
///
/// # Safety
/// Inlined into code compiled for AVX-512; they are there.
#[inline(always)]
pub(super) unsafe fn quad(q: *const i8) -> __m512i {
    // SAFETY: the caller's promise.
    unsafe { _mm512_set1_epi32(q.cast::<i32>().read_unaligned()) }
}

/// The sums of sixteen rows, whose registers they are.
#[inline]
#[target_feature(enable = "avx512f")]
fn lanes(sums: __m512) -> [f32; ROWS] {
    let mut out = [0.0; ROWS];
    // SAFETY: it is as long as a register.
    unsafe { _mm512_storeu_ps(out.as_mut_ptr(), sums) };
    out
}

/// As [`one`], of [`Crumbs`]: sums of codes that are masked where they are, apart, take fewer instructions for one row.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn crumbs<const NEAREST: bool>(tile: &[Crumbs], x: QuantizedRow<'_>) -> [f32; ROWS] {
    use crumbs::{BLOCK, GROUP, WORD};
    let (first, second) = (_mm512_set1_epi8(3), _mm512_set1_epi8(12));
    let of_spans = x.q.as_chunks::<SPAN>().0.iter();
    let of_spans = of_spans.zip(x.scales.as_chunks::<{ SPAN / GROUP }>().0);
    let of_spans = of_spans.zip(x.sums.as_chunks::<{ SPAN / SUM_LEN }>().0);
    assert!(of_spans.len() >= tile.len());
    let mut acc = _mm512_setzero_ps();
    for (span, ((q, steps), sums)) in tile.iter().zip(of_spans) {
        let pairs = sums.as_chunks::<2>().0.iter();
        for (g, (step, [one, other])) in steps.iter().zip(pairs).enumerate() {
            prefetch_part::<_, NEAREST>(span, g);
            // Codes are too large by one: sums begin with what is too much.
            let mut even = _mm512_set1_epi32(-(i32::from(*one) + i32::from(*other)));
            let mut odd = _mm512_setzero_si512();
            for w in g * GROUP / WORD..(g + 1) * GROUP / WORD {
                let q = &q[w * WORD..][..WORD];
                // SAFETY: words of sixteen rows fill a register, and sixteen activations are there.
                unsafe {
                    let codes = _mm512_load_si512(span.codes[w].as_ptr().cast());
                    let high = _mm512_srli_epi16::<4>(codes);
                    let q = |s: usize| quad(q.as_ptr().add(4 * s));
                    // Codes at bits 2 are masked where they are: they are four times as large, and so are their sums.
                    even = _mm512_dpbusd_epi32(even, _mm512_and_si512(codes, first), q(0));
                    odd = _mm512_dpbusd_epi32(odd, _mm512_and_si512(codes, second), q(1));
                    even = _mm512_dpbusd_epi32(even, _mm512_and_si512(high, first), q(2));
                    odd = _mm512_dpbusd_epi32(odd, _mm512_and_si512(high, second), q(3));
                }
            }
            let products = _mm512_add_epi32(even, _mm512_srai_epi32::<2>(odd));
            let scales = halves(&span.scales[g * GROUP / BLOCK]);
            let scale = _mm512_mul_ps(scales, _mm512_set1_ps(*step));
            acc = _mm512_add_ps(acc, _mm512_mul_ps(_mm512_cvtepi32_ps(products), scale));
        }
    }
    lanes(acc)
}

/// As [`one`], of [`Q4K`]: as [`crumbs`].
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn q4_k<const NEAREST: bool>(tile: &[Q4K], x: QuantizedRow<'_>) -> [f32; ROWS] {
    /// Columns that share an integer scale and minimum.
    const SUB: usize = 32;
    let (low, high) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0xf0u8 as i8));
    let of_spans = x.q.as_chunks::<SPAN>().0.iter().zip(x.scales);
    let of_spans = of_spans.zip(x.sums.as_chunks::<{ SPAN / SUM_LEN }>().0);
    assert!(of_spans.len() >= tile.len());
    let mut acc = _mm512_setzero_ps();
    for (span, ((q, step), sums)) in tile.iter().zip(of_spans) {
        let [scales, mins] = scales_and_minimums(&span.header.packed);
        let mut products = _mm512_setzero_si512();
        for sub in 0..SPAN / SUB {
            prefetch_part::<_, NEAREST>(span, sub);
            let (mut even, mut odd) = (_mm512_setzero_si512(), _mm512_setzero_si512());
            for w in sub * SUB / WORD..(sub + 1) * SUB / WORD {
                let q = &q[w * WORD..][..WORD];
                // SAFETY: words of sixteen rows fill a register, and eight activations are there.
                unsafe {
                    let codes = _mm512_load_si512(span.codes[w].as_ptr().cast());
                    // High codes are masked where they are: they are 16 times as large, and so are their sums.
                    even =
                        _mm512_dpbusd_epi32(even, _mm512_and_si512(codes, low), quad(q.as_ptr()));
                    let q = quad(q.as_ptr().add(4));
                    odd = _mm512_dpbusd_epi32(odd, _mm512_and_si512(codes, high), q);
                }
            }
            let sums = _mm512_add_epi32(even, _mm512_srai_epi32::<4>(odd));
            let scale = byte(scales[sub / 4], sub % 4);
            products = _mm512_add_epi32(products, _mm512_mullo_epi32(sums, scale));
        }
        let offsets = offsets(mins, sums);
        let [d, dmin] = [
            halves(&span.header.scales[0]),
            halves(&span.header.scales[1]),
        ];
        let step = _mm512_set1_ps(*step);
        let products = _mm512_mul_ps(_mm512_cvtepi32_ps(products), _mm512_mul_ps(d, step));
        let offsets = _mm512_mul_ps(_mm512_cvtepi32_ps(offsets), _mm512_mul_ps(dmin, step));
        acc = _mm512_add_ps(acc, _mm512_sub_ps(products, offsets));
    }
    lanes(acc)
}

/// The scales, and the minimums, of the first 128 columns and of the others: four in each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn scales_and_minimums([a, b, c]: &[[u32; ROWS]; 3]) -> [[__m512i; 2]; 2] {
    let (a, b, c) = (words(a), words(b), words(c));
    let (four, six, upper) = (
        _mm512_set1_epi8(0x0f),
        _mm512_set1_epi8(0x3f),
        _mm512_set1_epi8(0x30),
    );
    let join = |low, high| {
        let high = _mm512_and_si512(_mm512_srli_epi32::<2>(high), upper);
        _mm512_or_si512(_mm512_and_si512(low, four), high)
    };
    [
        [_mm512_and_si512(a, six), join(c, a)],
        [_mm512_and_si512(b, six), join(_mm512_srli_epi32::<4>(c), b)],
    ]
}

/// Byte `i` of each lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn byte(lanes: __m512i, i: usize) -> __m512i {
    let shift = _mm_cvtsi32_si128(8 * i as i32);
    _mm512_and_si512(_mm512_srl_epi32(lanes, shift), _mm512_set1_epi32(0xff))
}

/// Writes a span into a panel.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn unpack_q4_k(span: &Q4K, panel: &mut Panel) {
    let four = _mm512_set1_epi8(0x0f);
    let [scales, mins] = scales_and_minimums(&span.header.packed);
    // SAFETY: what is read and written has sixteen lanes, and a panel is aligned to them.
    unsafe {
        for (word, quads) in span.codes.iter().zip(panel.codes.as_chunks_mut::<2>().0) {
            let codes = _mm512_load_si512(word.as_ptr().cast());
            let high = _mm512_srli_epi16::<4>(codes);
            _mm512_store_si512(quads[0].as_mut_ptr().cast(), _mm512_and_si512(codes, four));
            _mm512_store_si512(quads[1].as_mut_ptr().cast(), _mm512_and_si512(high, four));
        }
        let subs = panel.scales.as_chunks_mut::<2>().0.iter_mut();
        for (sub, (halves, offsets)) in subs.zip(&mut panel.offsets).enumerate() {
            let scale = byte(scales[sub / 4], sub % 4);
            for half in halves {
                _mm512_store_si512(half.as_mut_ptr().cast(), scale);
            }
            let min = byte(mins[sub / 4], sub % 4);
            let pair = _mm512_or_si512(min, _mm512_slli_epi32::<16>(min));
            _mm512_store_si512(offsets.as_mut_ptr().cast(), pair);
        }
        let [d, dmin] = &span.header.scales;
        _mm512_store_ps(panel.d[0].as_mut_ptr(), halves(d));
        _mm512_store_ps(panel.dmin.as_mut_ptr(), halves(dmin));
    }
}

/// `Σ_s min_s · Σ_j q_j`, of minimums of 32 columns each, of which a register has four in each lane.
#[inline]
#[target_feature(enable = "avx2,avx512f,avx512bw,avx512vl,avx512vnni")]
fn offsets(mins: [__m512i; 2], sums: &[i16; SPAN / SUM_LEN]) -> __m512i {
    // SAFETY: sixteen sums fill a register.
    let sums = unsafe { _mm256_loadu_si256(sums.as_ptr().cast()) };
    // Of 32 columns; at most 32 · 127. Seven bits, and the others with the sign, are bytes.
    let sums = _mm256_madd_epi16(sums, _mm256_set1_epi16(1));
    let bytes = |sums| _mm_cvtsi128_si64(_mm256_cvtepi32_epi8(sums));
    let low = bytes(_mm256_and_si256(sums, _mm256_set1_epi32(127)));
    let high = bytes(_mm256_srai_epi32::<7>(sums));
    let dots = |sums: i64| {
        let first = _mm512_dpbusd_epi32(
            _mm512_setzero_si512(),
            mins[0],
            _mm512_set1_epi32(sums as i32),
        );
        _mm512_dpbusd_epi32(first, mins[1], _mm512_set1_epi32((sums >> 32) as i32))
    };
    _mm512_add_epi32(dots(low), _mm512_slli_epi32::<7>(dots(high)))
}

/// Spans that are multiplied with several rows of activations at once, which share the loads of weights.
pub(super) trait Multiplied: Sized {
    /// Steps of the activations that belong to a span.
    const STEPS: usize;

    /// Adds the products with the columns of `x` to the sums of each of its rows.
    ///
    /// # Safety
    /// Inlined into code compiled for the instructions of [`several`]; `x` has `T` rows.
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]);
}

/// The activations that belong to the columns of a span.
pub(super) trait Activations {
    /// Those of row `t`, four in each lane: the `i`th four columns.
    ///
    /// # Safety
    /// Inlined into code compiled for AVX-512; a span has these columns, and there is such a row.
    unsafe fn quad(&self, i: usize, t: usize) -> __m512i;

    /// Sums of two times 16 of them in each lane: the `i`th 32 columns.
    ///
    /// # Safety
    /// As [`Activations::quad`].
    unsafe fn pair(&self, i: usize, t: usize) -> __m512i;

    /// Prefetches part `part` of what is [`AHEAD`] of `span`, if they are the first that are multiplied with it: the others
    /// find it in a cache.
    fn prefetch<S>(&self, span: &S, part: usize);

    /// Their step in each lane, the `i`th of this span.
    ///
    /// # Safety
    /// As [`Activations::quad`]; a span has so many.
    unsafe fn step(&self, i: usize, t: usize) -> __m512;
}

/// Of one row.
struct OfRow<const NEAREST: bool> {
    q: *const i8,
    sums: *const i16,
    steps: *const f32,
}

impl<const NEAREST: bool> Activations for OfRow<NEAREST> {
    #[inline(always)]
    fn prefetch<S>(&self, span: &S, part: usize) {
        prefetch_part::<S, NEAREST>(span, part);
    }

    #[inline(always)]
    unsafe fn quad(&self, i: usize, _: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { quad(self.q.add(4 * i)) }
    }

    #[inline(always)]
    unsafe fn pair(&self, i: usize, _: usize) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_set1_epi32(self.sums.add(2 * i).cast::<i32>().read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn step(&self, i: usize, _: usize) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_set1_ps(*self.steps.add(i)) }
    }
}

/// Of rows in tiles.
struct OfTiles<const NEAREST: bool> {
    are_first: bool,
    q: Acts,
    /// `[tile][32 columns][row]`, and how many a tile has.
    pairs: (*const [[i16; 2]; TILE], usize),
    /// `[tile][scale][row]`, and how many a tile has.
    steps: (*const [f32; TILE], usize),
}

impl<const NEAREST: bool> Activations for OfTiles<NEAREST> {
    #[inline(always)]
    fn prefetch<S>(&self, span: &S, part: usize) {
        if self.are_first {
            prefetch_part::<S, NEAREST>(span, part);
        }
    }

    #[inline(always)]
    unsafe fn quad(&self, i: usize, t: usize) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_set1_epi32(self.q.quad(i, t).read_unaligned()) }
    }

    #[inline(always)]
    unsafe fn pair(&self, i: usize, t: usize) -> __m512i {
        let (pairs, per_tile) = self.pairs;
        // SAFETY: as above.
        unsafe {
            let pairs = pairs.add(t / TILE * per_tile + i).cast::<[i16; 2]>();
            _mm512_set1_epi32(pairs.add(t % TILE).cast::<i32>().read_unaligned())
        }
    }

    #[inline(always)]
    unsafe fn step(&self, i: usize, t: usize) -> __m512 {
        let (steps, per_tile) = self.steps;
        // SAFETY: as above.
        unsafe {
            let steps = steps.add(t / TILE * per_tile + i).cast::<f32>();
            _mm512_set1_ps(*steps.add(t % TILE))
        }
    }
}

/// The products of sixteen rows with a row of activations.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn one<S: Multiplied, const NEAREST: bool>(
    tile: &[S],
    x: QuantizedRow<'_>,
) -> [f32; ROWS] {
    let n = tile.len();
    assert!(x.q.len() >= n * SPAN && x.sums.len() >= n * SPAN / SUM_LEN);
    assert!(x.scales.len() >= n * S::STEPS);
    // SAFETY: this function is compiled for the instructions, and the columns are there.
    unsafe {
        let mut acc = [_mm512_setzero_ps()];
        for (s, span) in tile.iter().enumerate() {
            let x = OfRow::<NEAREST> {
                q: x.q.as_ptr().add(s * SPAN),
                sums: x.sums.as_ptr().add(s * SPAN / SUM_LEN),
                steps: x.scales.as_ptr().add(s * S::STEPS),
            };
            span.add(&x, &mut acc);
        }
        lanes(acc[0])
    }
}

/// The products of sixteen rows with `n` rows of activations, the first of which is the first of a tile.
#[target_feature(enable = "avx2,f16c,avx512f,avx512bw,avx512vl,avx512vnni")]
pub(super) fn several<S: Multiplied, const NEAREST: bool>(
    tile: &[S],
    x: &Tiles,
    first: usize,
    n: usize,
    sums: &mut Sums<f32>,
) {
    // Rows that fill a tile are there, and zeros.
    assert!(first.is_multiple_of(TILE) && n <= GROUP_LEN && first + n <= x.m());
    assert!(x.order() == Order::Quads && tile.len() * SPAN <= x.k());
    assert!(tile.len() * S::STEPS <= x.n_scales());
    // SAFETY: this function is compiled for the instructions, and rows and columns are there.
    unsafe {
        match n {
            0..=2 => group::<S, 2, NEAREST>(tile, x, first / TILE, sums),
            3..=4 => group::<S, 4, NEAREST>(tile, x, first / TILE, sums),
            5..=6 => group::<S, 6, NEAREST>(tile, x, first / TILE, sums),
            _ => group::<S, GROUP_LEN, NEAREST>(tile, x, first / TILE, sums),
        }
    }
}

/// # Safety
/// As [`Multiplied::add`]; `x` has `T` rows from `first` on, and the columns.
#[inline(always)]
unsafe fn group<S: Multiplied, const T: usize, const NEAREST: bool>(
    tile: &[S],
    x: &Tiles,
    first: usize,
    sums: &mut Sums<f32>,
) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut acc = [_mm512_setzero_ps(); T];
        for (s, span) in tile.iter().enumerate() {
            let x = OfTiles::<NEAREST> {
                are_first: first == 0,
                q: Acts::new(x, first, s * SPAN),
                pairs: (x.pairs(first, s * SPAN).as_ptr(), x.k() / (2 * SUM_LEN)),
                steps: (x.scales(first, s * S::STEPS).as_ptr(), x.n_scales()),
            };
            span.add(&x, &mut acc);
        }
        for (sums, acc) in sums.iter_mut().zip(acc) {
            *sums = lanes(acc);
        }
    }
}

/// [`Multiplied::add`] of blocks whose every 32 codes, which `codes` gives as eight times four columns, have an integer
/// scale and a minimum.
///
/// # Safety
/// As [`Multiplied::add`].
#[inline(always)]
unsafe fn add_with_minimums<S, X: Activations, const T: usize>(
    span: &S,
    header: &Header,
    codes: impl Fn(usize) -> [__m512i; 8],
    x: &X,
    sums: &mut [__m512; T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let [scales, mins] = scales_and_minimums(&header.packed);
        let (mut products, mut offsets) =
            ([_mm512_setzero_si512(); T], [_mm512_setzero_si512(); T]);
        for sub in 0..SPAN / 32 {
            x.prefetch(span, sub);
            let mut dots = [_mm512_setzero_si512(); T];
            add_dots(&mut dots, &codes(sub), 8 * sub, x);
            let scale = byte(scales[sub / 4], sub % 4);
            let min = byte(mins[sub / 4], sub % 4);
            let mins = _mm512_or_si512(min, _mm512_slli_epi32::<16>(min));
            for t in 0..T {
                let scaled = _mm512_mullo_epi32(dots[t], scale);
                products[t] = _mm512_add_epi32(products[t], scaled);
                offsets[t] = _mm512_dpwssd_epi32(offsets[t], mins, x.pair(sub, t));
            }
        }
        let (d, dmin) = (halves(&header.scales[0]), halves(&header.scales[1]));
        for (t, sum) in sums.iter_mut().enumerate() {
            let step = x.step(0, t);
            let products = _mm512_mul_ps(_mm512_cvtepi32_ps(products[t]), _mm512_mul_ps(d, step));
            let offsets = _mm512_mul_ps(_mm512_cvtepi32_ps(offsets[t]), _mm512_mul_ps(dmin, step));
            *sum = _mm512_add_ps(*sum, _mm512_sub_ps(products, offsets));
        }
    }
}

/// [`Multiplied::add`] of groups of 32 codes, which `codes` gives as eight times four columns, too large by `bias`, with the
/// scales `scale`.
///
/// # Safety
/// As [`Multiplied::add`].
#[inline(always)]
unsafe fn add_biased<'a, S, X: Activations, const T: usize>(
    span: &S,
    bias: i16,
    scale: impl Fn(usize) -> &'a [u16; ROWS],
    codes: impl Fn(usize) -> [__m512i; 8],
    x: &X,
    sums: &mut [__m512; T],
) {
    // SAFETY: the caller's promise.
    unsafe {
        let bias = _mm512_set1_epi16(-bias);
        for g in 0..SPAN / 32 {
            x.prefetch(span, g);
            let mut dots = [_mm512_setzero_si512(); T];
            for (t, dots) in dots.iter_mut().enumerate() {
                *dots = _mm512_dpwssd_epi32(*dots, bias, x.pair(g, t));
            }
            add_dots(&mut dots, &codes(g), 8 * g, x);
            let d = halves(scale(g));
            for (t, sum) in sums.iter_mut().enumerate() {
                let scale = _mm512_mul_ps(d, x.step(g, t));
                let product = _mm512_mul_ps(_mm512_cvtepi32_ps(dots[t]), scale);
                *sum = _mm512_add_ps(*sum, product);
            }
        }
    }
}

/// Adds the products of some times four columns, the first of which are the `first`th of the span.
///
/// # Safety
/// As [`Multiplied::add`].
#[inline(always)]
unsafe fn add_dots<X: Activations, const T: usize>(
    dots: &mut [__m512i; T],
    codes: &[__m512i],
    first: usize,
    x: &X,
) {
    for (i, codes) in codes.iter().enumerate() {
        for (t, dots) in dots.iter_mut().enumerate() {
            // SAFETY: the caller's promise.
            *dots = unsafe { _mm512_dpbusd_epi32(*dots, *codes, x.quad(first + i, t)) };
        }
    }
}

/// A word of each row.
#[inline]
#[target_feature(enable = "avx512f")]
fn words(of: &[u32; ROWS]) -> __m512i {
    // SAFETY: sixteen of them fill a register.
    unsafe { _mm512_loadu_si512(of.as_ptr().cast()) }
}

/// An f16 of each row.
#[inline]
#[target_feature(enable = "avx512f")]
fn halves(of: &[u16; ROWS]) -> __m512 {
    // SAFETY: sixteen of them fill half a register.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(of.as_ptr().cast())) }
}

/// Codes of 32 columns, of which words have eight columns each.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn nibbles(from: &[[u32; ROWS]; 4]) -> [__m512i; 8] {
    let four = _mm512_set1_epi8(0x0f);
    let mut codes = [_mm512_setzero_si512(); 8];
    for (pair, from) in codes.as_chunks_mut::<2>().0.iter_mut().zip(from) {
        let both = words(from);
        *pair = [
            _mm512_and_si512(both, four),
            _mm512_and_si512(_mm512_srli_epi16::<4>(both), four),
        ];
    }
    codes
}

impl Multiplied for Q4K {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]) {
        let subs = self.codes.as_chunks().0;
        // SAFETY: the caller's promise.
        unsafe {
            let codes = |sub: usize| nibbles(&subs[sub]);
            add_with_minimums(self, &self.header, codes, x, sums);
        }
    }
}

impl Multiplied for Q5K {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]) {
        let subs = self.codes.as_chunks().0;
        // SAFETY: the caller's promise.
        unsafe {
            let codes = |sub: usize| {
                let (fifth, upper) = (_mm512_set1_epi8(0x10), words(&self.high[sub]));
                let [a, b, c, d, e, f, g, h] = nibbles(&subs[sub]);
                // Bit `i` of a byte belongs to the `i`th four columns.
                let join = |low, shifted| _mm512_or_si512(low, _mm512_and_si512(shifted, fifth));
                [
                    join(a, _mm512_slli_epi16::<4>(upper)),
                    join(b, _mm512_slli_epi16::<3>(upper)),
                    join(c, _mm512_slli_epi16::<2>(upper)),
                    join(d, _mm512_slli_epi16::<1>(upper)),
                    join(e, upper),
                    join(f, _mm512_srli_epi16::<1>(upper)),
                    join(g, _mm512_srli_epi16::<2>(upper)),
                    join(h, _mm512_srli_epi16::<3>(upper)),
                ]
            };
            add_with_minimums(self, &self.header, codes, x, sums);
        }
    }
}

impl Multiplied for Q6K {
    const STEPS: usize = 1;

    #[inline(always)]
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]) {
        // SAFETY: the caller's promise; words of sixteen rows fill a register, their bytes a quarter.
        unsafe {
            let (low, high) = (_mm512_set1_epi8(0x0f), _mm512_set1_epi8(0x30));
            let join = |lower, upper| {
                let upper = _mm512_and_si512(upper, high);
                _mm512_or_si512(_mm512_and_si512(lower, low), upper)
            };
            let (mut products, mut offsets) =
                ([_mm512_setzero_si512(); T], [_mm512_setzero_si512(); T]);
            let lows = self.low.as_chunks::<2>().0.iter();
            let mut before = _mm512_setzero_si512();
            for (sub, (([first, second], upper), scales)) in
                lows.zip(&self.high).zip(&self.scales).enumerate()
            {
                if sub % 2 == 0 {
                    x.prefetch(self, sub / 2);
                }
                let (first, second, upper) = (words(first), words(second), words(upper));
                let codes = [
                    join(first, _mm512_slli_epi16::<4>(upper)),
                    join(_mm512_srli_epi16::<4>(first), _mm512_slli_epi16::<2>(upper)),
                    join(second, upper),
                    join(
                        _mm512_srli_epi16::<4>(second),
                        _mm512_srli_epi16::<2>(upper),
                    ),
                ];
                let mut dots = [_mm512_setzero_si512(); T];
                add_dots(&mut dots, &codes, 4 * sub, x);
                let scales = _mm512_cvtepi8_epi32(_mm_loadu_si128(scales.as_ptr().cast()));
                for t in 0..T {
                    let scaled = _mm512_mullo_epi32(dots[t], scales);
                    products[t] = _mm512_add_epi32(products[t], scaled);
                }
                // Codes are too large by 32, which is taken off for two scales at a time.
                if sub % 2 == 0 {
                    before = scales;
                    continue;
                }
                let pairs =
                    _mm512_mask_blend_epi16(0xaaaa_aaaa, before, _mm512_slli_epi32::<16>(scales));
                for (t, offsets) in offsets.iter_mut().enumerate() {
                    *offsets = _mm512_dpwssd_epi32(*offsets, pairs, x.pair(sub / 2, t));
                }
            }
            let d = halves(&self.d);
            for (t, sum) in sums.iter_mut().enumerate() {
                let product = _mm512_sub_epi32(products[t], _mm512_slli_epi32::<5>(offsets[t]));
                let d = _mm512_mul_ps(d, x.step(0, t));
                *sum = _mm512_add_ps(*sum, _mm512_mul_ps(_mm512_cvtepi32_ps(product), d));
            }
        }
    }
}

impl Multiplied for Crumbs {
    const STEPS: usize = SPAN / 32;

    #[inline(always)]
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]) {
        use crumbs::{BLOCK, GROUP};
        let groups = self.codes.as_chunks::<2>().0;
        // SAFETY: the caller's promise.
        unsafe {
            let codes = |g: usize| {
                let two = _mm512_set1_epi8(3);
                let mut codes = [_mm512_setzero_si512(); 8];
                for (quads, from) in codes.as_chunks_mut::<4>().0.iter_mut().zip(&groups[g]) {
                    let all = words(from);
                    *quads = [
                        _mm512_and_si512(all, two),
                        _mm512_and_si512(_mm512_srli_epi16::<2>(all), two),
                        _mm512_and_si512(_mm512_srli_epi16::<4>(all), two),
                        _mm512_and_si512(_mm512_srli_epi16::<6>(all), two),
                    ];
                }
                codes
            };
            add_biased(self, 1, |g| &self.scales[g * GROUP / BLOCK], codes, x, sums);
        }
    }
}

impl Multiplied for Q4_0 {
    const STEPS: usize = SPAN / 32;

    #[inline(always)]
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]) {
        let groups = self.codes.as_chunks().0;
        // SAFETY: the caller's promise.
        unsafe {
            add_biased(
                self,
                8,
                |g| &self.scales[g],
                |g| nibbles(&groups[g]),
                x,
                sums,
            );
        }
    }
}

impl Multiplied for Q8_0 {
    const STEPS: usize = SPAN / 32;

    #[inline(always)]
    unsafe fn add<X: Activations, const T: usize>(&self, x: &X, sums: &mut [__m512; T]) {
        let groups = self.codes.as_chunks::<8>().0;
        // SAFETY: the caller's promise.
        unsafe {
            let codes = |g: usize| {
                let mut codes = [_mm512_setzero_si512(); 8];
                for (code, from) in codes.iter_mut().zip(&groups[g]) {
                    *code = words(from);
                }
                codes
            };
            add_biased(self, 128, |g| &self.scales[g], codes, x, sums);
        }
    }
}
