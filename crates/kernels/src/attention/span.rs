//! Attention of a tile of queries to one span of positions.
//!
//! A row is one query head of one query; the rows of a tile are the query heads that share a
//! key-value head, query by query.

// Register tiles are arrays of arrays, read and written by the same indices.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use half::f16;

use super::cached::Cached;
use super::page::{BLOCK, KvPage, LANES, PAGE_LEN};
use super::{AttentionShape, CacheType, CachedValues};
use crate::exact::round_significand;
use crate::isa::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
use crate::math;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};
use crate::simd::{Floats, Ints, Portable};

/// Positions whose scores share a maximum: span `i` begins at position `i · SPAN`.
///
/// Part of the definition of the result: weighted sums are rounded span by span.
pub(super) const SPAN: usize = 256;

const PAGES: usize = SPAN / PAGE_LEN;

/// Codes in pairs, and scales.
type Bytes<'a> = (&'a [[i8; 2 * LANES]], &'a [[f16; LANES]]);

/// Tiles of more rows convert keys and values to f32 once for all of them.
const CONVERT_ABOVE: usize = 8;

/// Consecutive queries, and the key-value head they attend to.
pub(super) struct Tile<'a> {
    pub(super) shape: &'a AttentionShape,
    /// `[n_queries, n_heads, head_dim]`.
    pub(super) q: &'a [f32],
    /// Position of the first query.
    pub(super) pos: usize,
    /// Where the positions end that all queries attend to; each to its own and those before if `None`.
    pub(super) end: Option<usize>,
    pub(super) kv_head: usize,
}

impl Tile<'_> {
    /// Query heads of a key-value head.
    fn group(&self) -> usize {
        self.shape.n_heads / self.shape.n_kv_heads
    }

    pub(super) fn n_rows(&self) -> usize {
        self.q.len() / (self.shape.n_kv_heads * self.shape.head_dim)
    }

    /// The query head of `row`, `[head_dim]`.
    fn query(&self, row: usize) -> &[f32] {
        let AttentionShape {
            n_heads, head_dim, ..
        } = *self.shape;
        let (t, g) = (row / self.group(), row % self.group());
        &self.q[(t * n_heads + self.kv_head * self.group() + g) * head_dim..][..head_dim]
    }

    /// Positions that `row` attends to.
    fn visible(&self, row: usize) -> Range<usize> {
        let pos = self.pos + row / self.group();
        let own = visible(self.shape, pos);
        own.start..self.end.unwrap_or(own.end)
    }

    /// Positions of the span that `row` attends to, counted from the span's first.
    pub(super) fn visible_in(&self, span: usize, row: usize) -> Range<usize> {
        let Range { start, end } = self.visible(row);
        let place = |position: usize| position.saturating_sub(span * SPAN).min(SPAN);
        place(start)..place(end)
    }

    /// Spans that any row attends to.
    pub(super) fn spans(&self) -> Range<usize> {
        let last = self.visible(self.n_rows() - 1).end;
        self.visible(0).start / SPAN..last.div_ceil(SPAN)
    }
}

/// Positions that the query at `pos` attends to.
fn visible(shape: &AttentionShape, pos: usize) -> Range<usize> {
    let end = pos + 1;
    shape.window.map_or(0, |window| end.saturating_sub(window))..end
}

/// The partial result of a row: its weighted sum `[head_dim]`, the maximum of its scores, and the sum of its
/// weights, which is 0 for a row without any position.
pub(super) struct RowState<'a> {
    sum: &'a mut [f32],
    max: &'a mut f32,
    total: &'a mut f32,
}

/// Floats of a row's state.
pub(super) fn state_len(head_dim: usize) -> usize {
    (head_dim + 2).next_multiple_of(LANES)
}

impl<'a> RowState<'a> {
    /// The state in `[state_len(head_dim)]` floats.
    #[inline(always)]
    pub(super) fn of(floats: &'a mut [f32], head_dim: usize) -> RowState<'a> {
        let (sum, rest) = floats.split_at_mut(head_dim);
        let [max, total, ..] = rest else {
            unreachable!("a state has two floats behind the sum")
        };
        RowState { sum, max, total }
    }

    /// A row without any position.
    pub(super) fn clear(self) {
        *self.total = 0.0;
    }

    /// Merges the row's partial result for a later span.
    #[inline(always)]
    fn merge(self, sum: &[f32], max: f32, total: f32) {
        if *self.total == 0.0 {
            self.sum.copy_from_slice(sum);
            (*self.max, *self.total) = (max, total);
            return;
        }
        let both = if max > *self.max { max } else { *self.max };
        let (before, now) = (math::exp(*self.max - both), math::exp(max - both));
        for (a, b) in self.sum.iter_mut().zip(sum) {
            *a = *a * before + b * now;
        }
        *self.max = both;
        *self.total = *self.total * before + total * now;
    }

    /// Merges another row's state, for a later span.
    #[inline(always)]
    pub(super) fn merge_state(self, later: &RowState<'_>) {
        if *later.total != 0.0 {
            self.merge(later.sum, *later.max, *later.total);
        }
    }

    /// The weighted mean; with a sink, which has a score and no value.
    #[inline(always)]
    pub(super) fn finish(self, sink: Option<f32>, out: &mut [f32]) {
        let inverse = match sink {
            None => 1.0 / *self.total,
            Some(sink) => {
                let both = if sink > *self.max { sink } else { *self.max };
                let own = math::exp(*self.max - both);
                own / (*self.total * own + math::exp(sink - both))
            }
        };
        for (out, sum) in out.iter_mut().zip(self.sum) {
            *out = *sum * inverse;
        }
    }
}

/// Buffers that a thread reuses.
#[derive(Default)]
pub(super) struct Workspace {
    /// Scaled queries, `[n_rows, head_dim]`; for integer keys pairs of i16, `[n_rows, head_dim / 2]`.
    queries: Vec<f32>,
    pairs: Vec<i32>,
    /// The scale of an integer query, `[n_rows]`.
    units: Vec<f32>,
    /// Scores, then weights, `[n_rows, SPAN]`.
    scores: Vec<f32>,
    /// Weights times the scales of a block of values, `[n_rows, SPAN]`.
    scaled: Vec<f32>,
    /// Keys or values of some columns.
    converted: Vec<f32>,
    /// Weighted sums within the span, `[n_rows, head_dim]`.
    sums: Vec<f32>,
    /// Maximum and total of each row.
    totals: Vec<(f32, f32)>,
    /// Which positions of the span each row attends to.
    seen: Vec<Range<usize>>,
}

/// Queries are clamped to these magnitudes, so that products with f16 neither overflow nor lose bits below
/// the smallest f32.
const QUERY_LIMIT: f32 = 1.0e30;

/// Weights below this are negligible next to the largest, which is 1; without them no product is so small
/// that it loses bits.
const MIN_WEIGHT: f32 = 1.0e-18;

impl Workspace {
    /// Prepares the queries of `tile` for keys of `dtype`.
    pub(super) fn prepare(&mut self, tile: &Tile<'_>, dtype: CacheType) {
        let scale = tile.shape.scale;
        self.queries.clear();
        self.pairs.clear();
        self.units.clear();
        for row in 0..tile.n_rows() {
            let query = tile.query(row);
            match dtype {
                CacheType::F32 => self.queries.extend(query.iter().map(|q| q * scale)),
                CacheType::F16 => self
                    .queries
                    .extend(query.iter().map(|q| round_query(q * scale))),
                CacheType::Q8_0 => {
                    let max = query.iter().fold(0, |max, q| max.max(q.to_bits() << 1)) >> 1;
                    // Infinity or NaN if any element is.
                    let max = f32::from_bits(max) * scale.abs();
                    let unit = max / 32_767.0;
                    let inverse = if unit.is_normal() { scale / unit } else { 0.0 };
                    let code = |q: f32| (q * inverse).clamp(-32_767.0, 32_767.0).round_ties_even();
                    self.units
                        .push(if max.is_finite() { unit } else { f32::NAN });
                    self.pairs.extend(query.chunks(2).map(|pair| {
                        let high = pair.get(1).map_or(0, |&q| code(q) as i32);
                        (high << 16) | (code(pair[0]) as i32 & 0xFFFF)
                    }));
                }
            }
        }
    }
}

/// Rounds an element of a scaled query so that products with f16 are exact.
fn round_query(x: f32) -> f32 {
    let x = round_significand::<13>(x.clamp(-QUERY_LIMIT, QUERY_LIMIT));
    if x.abs() < 1.0 / QUERY_LIMIT { 0.0 } else { x }
}

/// Attends to the span `span`, whose pages are `pages`, and merges the result into each row's state,
/// `[n_rows, state_len(head_dim)]`. The workspace holds the tile's queries.
pub(super) fn attend(
    isa: Isa,
    tile: &Tile<'_>,
    span: usize,
    pages: &[&KvPage],
    work: &mut Workspace,
    states: &mut [f32],
) {
    #[cfg(target_arch = "x86_64")]
    match isa.level() {
        Level::Avx2 | Level::AvxVnni => {
            // SAFETY: these levels exist only where `Level::is_here` saw AVX2, FMA and F16C.
            return unsafe { attend_avx2(tile, span, pages, work, states) };
        }
        Level::Avx512 | Level::Amx => {
            // SAFETY: these levels exist only where `Level::is_here` saw these features.
            return unsafe { attend_avx512(tile, span, pages, work, states) };
        }
        _ => {}
    }
    let _ = isa;
    attend_with::<Portable, 1>(Portable, tile, span, pages, work, states);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn attend_avx2(
    tile: &Tile<'_>,
    span: usize,
    pages: &[&KvPage],
    work: &mut Workspace,
    states: &mut [f32],
) {
    // SAFETY: this function's features.
    let simd = unsafe { Avx2::new() };
    attend_with::<Avx2, 1>(simd, tile, span, pages, work, states);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn attend_avx512(
    tile: &Tile<'_>,
    span: usize,
    pages: &[&KvPage],
    work: &mut Workspace,
    states: &mut [f32],
) {
    // SAFETY: this function's features.
    let simd = unsafe { Avx512::new() };
    attend_with::<Avx512, 2>(simd, tile, span, pages, work, states);
}

/// `P` is the number of groups of lanes computed together.
#[inline(always)]
fn attend_with<S: Cached, const P: usize>(
    simd: S,
    tile: &Tile<'_>,
    span: usize,
    pages: &[&KvPage],
    work: &mut Workspace,
    states: &mut [f32],
) {
    let (n_rows, d, head) = (tile.n_rows(), tile.shape.head_dim, tile.kv_head);
    let dtype = pages[0].dtype();
    work.seen.clear();
    work.seen
        .extend((0..n_rows).map(|row| tile.visible_in(span, row)));
    let Workspace {
        queries,
        pairs,
        units,
        scores,
        scaled,
        converted,
        sums,
        totals,
        seen,
    } = work;
    // Later rows attend to no less at the end, and no more at the beginning.
    let all = seen[0].start..seen[n_rows - 1].end;
    let lanes = all.start / LANES..all.end.div_ceil(LANES);
    scores.resize(n_rows * SPAN, 0.0);
    sums.resize(n_rows * d, 0.0);
    totals.clear();
    let convert = n_rows > CONVERT_ABOVE;
    let is_keys = pages[0].cached() == CachedValues::Keys;
    if convert || is_keys {
        converted.resize((P * LANES * d).max(BLOCK * SPAN), 0.0);
    }

    let mut at = lanes.start;
    while at < lanes.end {
        // The remainder is computed one by one.
        let scores = &mut scores[at * LANES..];
        if at + P <= lanes.end {
            let keys = Keys::<P> { pages, head, d, at };
            match dtype {
                CacheType::F32 => {
                    score_rows::<S, f32, false, P>(simd, queries, keys.floats(), scores);
                }
                CacheType::F16 if convert => {
                    convert_keys(simd, keys.halves(), converted);
                    let keys = columns(converted, d);
                    score_rows::<S, f32, true, P>(simd, queries, keys, scores);
                }
                CacheType::F16 => {
                    score_rows::<S, f16, true, P>(simd, queries, keys.halves(), scores);
                }
                CacheType::Q8_0 => score_integers::<S, P>(simd, pairs, units, keys, scores),
            }
            at += P;
        } else {
            let keys = Keys::<1> { pages, head, d, at };
            match dtype {
                CacheType::F32 => {
                    score_rows::<S, f32, false, 1>(simd, queries, keys.floats(), scores);
                }
                CacheType::F16 => {
                    score_rows::<S, f16, true, 1>(simd, queries, keys.halves(), scores);
                }
                CacheType::Q8_0 => score_integers::<S, 1>(simd, pairs, units, keys, scores),
            }
            at += 1;
        }
    }

    for (row, scores) in scores.chunks_exact_mut(SPAN).enumerate().take(n_rows) {
        let seen = seen[row].clone();
        let cap = tile.shape.softcap;
        let scores = &mut scores[..lanes.end * LANES];
        totals.push(if seen.is_empty() {
            (0.0, 0.0)
        } else if dtype == CacheType::F16 {
            weights::<true>(scores, lanes.start * LANES, seen, cap)
        } else {
            weights::<false>(scores, lanes.start * LANES, seen, cap)
        });
    }

    let weigh = Weigh { d, seen, all };
    match dtype {
        _ if is_keys => {
            scaled.resize(n_rows * SPAN, 0.0);
            for start in (0..d).step_by(BLOCK) {
                let columns = start..d.min(start + BLOCK);
                let keys = |at| Keys::<1> { pages, head, d, at };
                transpose(simd, dtype, keys, lanes.clone(), columns.clone(), converted);
                let values = rows_of_pages(converted, BLOCK);
                let (columns, sums) = (0..columns.len(), &mut sums[start..]);
                if dtype == CacheType::F32 {
                    weigh
                        .rows::<S, f32, false, P>(simd, scores, values, BLOCK, columns, None, sums);
                    continue;
                }
                let mut weights = &*scores;
                if dtype == CacheType::Q8_0 {
                    let scales = |at| &keys(at).bytes()[0].1[start / BLOCK];
                    scale_weights(simd, scores, scales, lanes.clone(), scaled);
                    weights = &*scaled;
                }
                weigh.rows::<S, f32, true, P>(simd, weights, values, BLOCK, columns, None, sums);
            }
        }
        CacheType::F32 => {
            let values = gather(pages, |page| page.float_values(head));
            weigh.rows::<S, f32, false, P>(simd, scores, values, d, 0..d, None, sums);
        }
        CacheType::F16 => {
            let values = gather(pages, |page| page.half_values(head));
            let converted = convert.then_some(converted);
            weigh.rows::<S, f16, true, P>(simd, scores, values, d, 0..d, converted, sums);
        }
        CacheType::Q8_0 => {
            scaled.resize(n_rows * SPAN, 0.0);
            let values = gather(pages, |page| page.byte_values(head).0);
            let stride = d.next_multiple_of(2);
            for (i, start) in (0..d).step_by(BLOCK).enumerate() {
                let scales = gather(pages, |page| {
                    page.byte_values(head).1[i * PAGE_LEN..][..PAGE_LEN]
                        .as_chunks()
                        .0
                });
                let scales = |at: usize| &scales[at / GROUPS][at % GROUPS];
                scale_weights(simd, scores, scales, lanes.clone(), scaled);
                let columns = start..d.min(start + BLOCK);
                let converted = convert.then_some(&mut *converted);
                weigh
                    .rows::<S, i8, true, P>(simd, scaled, values, stride, columns, converted, sums);
            }
        }
    }

    let rows = states.chunks_exact_mut(state_len(d)).zip(sums.chunks(d));
    for ((state, sum), &(max, total)) in rows.zip(totals.iter()) {
        if total != 0.0 {
            RowState::of(state, d).merge(sum, max, total);
        }
    }
}

/// `f` of each page of a span; empty for those missing at its end.
#[inline(always)]
fn gather<'a, T>(pages: &[&'a KvPage], f: impl Fn(&'a KvPage) -> &'a [T]) -> [&'a [T]; PAGES] {
    let mut parts: [&[T]; PAGES] = [&[]; PAGES];
    for (part, page) in parts.iter_mut().zip(pages) {
        *part = f(page);
    }
    parts
}

/// Values that kernels read as floats.
trait Element: Copy {
    fn load<S: Cached>(simd: S, from: &[Self; LANES]) -> S::F;
    fn to_f32(self) -> f32;
}

impl Element for f32 {
    #[inline(always)]
    fn load<S: Cached>(simd: S, from: &[f32; LANES]) -> S::F {
        simd.load(from)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
}

impl Element for f16 {
    #[inline(always)]
    fn load<S: Cached>(simd: S, from: &[f16; LANES]) -> S::F {
        simd.load_halves(from)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f16::to_f32(self)
    }
}

impl Element for i8 {
    #[inline(always)]
    fn load<S: Cached>(simd: S, from: &[i8; LANES]) -> S::F {
        simd.load_bytes(from)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        f32::from(self)
    }
}

/// `sum + a · b`, rounded once or twice: the same if the product is `EXACT`.
#[inline(always)]
fn add_product<S: Cached, const EXACT: bool>(simd: S, sum: S::F, a: S::F, b: S::F) -> S::F {
    if EXACT {
        simd.add_exact_product(sum, a, b)
    } else {
        sum + a * b
    }
}

/// Runs a kernel for blocks of four rows and the remainder: `$r` names their number, a constant.
macro_rules! for_blocks_of_rows {
    ($n:expr, $r:ident, |$first:ident| $body:expr) => {
        let n: usize = $n;
        for $first in (0..n).step_by(4) {
            match n - $first {
                1 => {
                    const $r: usize = 1;
                    $body
                }
                2 => {
                    const $r: usize = 2;
                    $body
                }
                3 => {
                    const $r: usize = 3;
                    $body
                }
                _ => {
                    const $r: usize = 4;
                    $body
                }
            }
        }
    };
}

/// Keys of `P` groups of lanes of a span, from group `at`.
#[derive(Clone, Copy)]
struct Keys<'a, const P: usize> {
    pages: &'a [&'a KvPage],
    head: usize,
    d: usize,
    at: usize,
}

/// Groups of lanes in a page.
const GROUPS: usize = PAGE_LEN / LANES;

impl<'a, const P: usize> Keys<'a, P> {
    #[inline(always)]
    fn page(&self, p: usize) -> (&'a KvPage, usize) {
        let group = self.at + p;
        (self.pages[group / GROUPS], group % GROUPS)
    }

    #[inline(always)]
    fn floats(&self) -> [&'a [[f32; LANES]]; P] {
        let mut out: [&[[f32; LANES]]; P] = [&[]; P];
        for (p, out) in out.iter_mut().enumerate() {
            let (page, group) = self.page(p);
            *out = &page.float_keys(self.head).as_chunks().0[group * self.d..][..self.d];
        }
        out
    }

    #[inline(always)]
    fn halves(&self) -> [&'a [[f16; LANES]]; P] {
        let mut out: [&[[f16; LANES]]; P] = [&[]; P];
        for (p, out) in out.iter_mut().enumerate() {
            let (page, group) = self.page(p);
            *out = &page.half_keys(self.head).as_chunks().0[group * self.d..][..self.d];
        }
        out
    }

    /// Codes in pairs, and scales.
    #[inline(always)]
    fn bytes(&self) -> [Bytes<'a>; P] {
        let mut out: [Bytes<'_>; P] = [(&[], &[]); P];
        let (n_pairs, n_scales) = (self.d.div_ceil(2), self.d.div_ceil(BLOCK));
        for (p, out) in out.iter_mut().enumerate() {
            let (page, group) = self.page(p);
            let (codes, scales) = page.byte_keys(self.head);
            *out = (
                &codes.as_chunks().0[group * n_pairs..][..n_pairs],
                &scales.as_chunks().0[group * n_scales..][..n_scales],
            );
        }
        out
    }
}

/// Writes halves as floats, one group after another.
#[inline(always)]
fn convert_keys<S: Cached, const P: usize>(
    simd: S,
    keys: [&[[f16; LANES]]; P],
    converted: &mut [f32],
) {
    let mut out = converted.as_chunks_mut::<LANES>().0.iter_mut();
    for keys in keys {
        for (key, out) in keys.iter().zip(&mut out) {
            simd.load_halves(key).store(out);
        }
    }
}

/// Writes a block of columns of the keys in `lanes` as floats, one row of [`BLOCK`] for each position of the span;
/// beyond the columns they are unspecified.
#[inline(always)]
fn transpose<'a, S: Cached>(
    simd: S,
    dtype: CacheType,
    keys: impl Fn(usize) -> Keys<'a, 1>,
    lanes: Range<usize>,
    columns: Range<usize>,
    rows: &mut [f32],
) {
    let rows = rows.as_chunks_mut::<LANES>().0;
    for at in lanes {
        let keys = keys(at);
        for start in columns.clone().step_by(LANES) {
            let end = columns.end.min(start + LANES);
            let mut x = [simd.splat(0.0); LANES];
            match dtype {
                CacheType::F32 => {
                    for (x, key) in x.iter_mut().zip(&keys.floats()[0][start..end]) {
                        *x = simd.load(key);
                    }
                }
                CacheType::F16 => {
                    for (x, key) in x.iter_mut().zip(&keys.halves()[0][start..end]) {
                        *x = simd.load_halves(key);
                    }
                }
                CacheType::Q8_0 => {
                    let pairs = &keys.bytes()[0].0[start / 2..end.div_ceil(2)];
                    for (x, pair) in x.as_chunks_mut().0.iter_mut().zip(pairs) {
                        *x = simd.split_pairs(simd.load_pairs(pair));
                    }
                }
            }
            let part = (start - columns.start) / LANES;
            for (i, x) in simd.transpose(x).into_iter().enumerate() {
                x.store(&mut rows[(at * LANES + i) * (BLOCK / LANES) + part]);
            }
        }
    }
}

/// The pages of a span's rows of `stride` floats.
#[inline(always)]
fn rows_of_pages(rows: &[f32], stride: usize) -> [&[f32]; PAGES] {
    let mut pages: [&[f32]; PAGES] = [&[]; PAGES];
    for (page, rows) in pages.iter_mut().zip(rows.chunks_exact(PAGE_LEN * stride)) {
        *page = rows;
    }
    pages
}

/// Groups of `d` columns, one after another.
#[inline(always)]
fn columns<const P: usize>(converted: &[f32], d: usize) -> [&[[f32; LANES]]; P] {
    let mut out: [&[[f32; LANES]]; P] = [&[]; P];
    for (p, out) in out.iter_mut().enumerate() {
        *out = &converted.as_chunks().0[p * d..][..d];
    }
    out
}

/// Scores of all rows with the keys of `P` groups of lanes: sums over elements in order.
#[inline(always)]
fn score_rows<S: Cached, E: Element, const EXACT: bool, const P: usize>(
    simd: S,
    queries: &[f32],
    keys: [&[[E; LANES]]; P],
    scores: &mut [f32],
) {
    let d = keys[0].len();
    for_blocks_of_rows!(queries.len() / d, R, |first| {
        let mut q: [&[f32]; R] = [&[]; R];
        for (r, q) in q.iter_mut().enumerate() {
            *q = &queries[(first + r) * d..][..d];
        }
        let block = score_block::<S, E, EXACT, R, P>(simd, q, keys);
        store_scores::<S, _, _>(block, &mut scores[first * SPAN..]);
    });
}

#[inline(always)]
fn score_block<S: Cached, E: Element, const EXACT: bool, const R: usize, const P: usize>(
    simd: S,
    q: [&[f32]; R],
    keys: [&[[E; LANES]]; P],
) -> [[S::F; P]; R] {
    let mut sums = [[simd.splat(0.0); P]; R];
    for e in 0..keys[0].len() {
        let mut key = [simd.splat(0.0); P];
        for p in 0..P {
            key[p] = E::load(simd, &keys[p][e]);
        }
        for r in 0..R {
            let q = simd.splat(q[r][e]);
            for p in 0..P {
                sums[r][p] = add_product::<S, EXACT>(simd, sums[r][p], key[p], q);
            }
        }
    }
    sums
}

/// Writes the scores of rows that are `SPAN` apart.
#[inline(always)]
fn store_scores<S: Cached, const R: usize, const P: usize>(
    block: [[S::F; P]; R],
    scores: &mut [f32],
) {
    for (r, row) in block.iter().enumerate() {
        let out = scores[r * SPAN..].as_chunks_mut::<LANES>().0;
        for (&x, out) in row.iter().zip(out) {
            x.store(out);
        }
    }
}

/// Scores of all rows with integer keys: blocks are summed exactly, then weighted and summed in
/// order.
#[inline(always)]
fn score_integers<S: Cached, const P: usize>(
    simd: S,
    pairs: &[i32],
    units: &[f32],
    keys: Keys<'_, P>,
    scores: &mut [f32],
) {
    let n_pairs = keys.d.div_ceil(2);
    let keys = keys.bytes();
    for_blocks_of_rows!(units.len(), R, |first| {
        let mut q: [&[i32]; R] = [&[]; R];
        for (r, q) in q.iter_mut().enumerate() {
            *q = &pairs[(first + r) * n_pairs..][..n_pairs];
        }
        let mut block = integer_block::<S, R, P>(simd, q, keys);
        for (row, &unit) in block.iter_mut().zip(&units[first..]) {
            for sum in row {
                *sum = *sum * simd.splat(unit);
            }
        }
        store_scores::<S, _, _>(block, &mut scores[first * SPAN..]);
    });
}

#[inline(always)]
fn integer_block<S: Cached, const R: usize, const P: usize>(
    simd: S,
    q: [&[i32]; R],
    keys: [Bytes<'_>; P],
) -> [[S::F; P]; R] {
    let mut sums = [[simd.splat(0.0); P]; R];
    let n_pairs = keys[0].0.len();
    for block in 0..keys[0].1.len() {
        // At most 32 · 127 · 32,767 in magnitude, which fits.
        let mut ints = [[simd.zero(); P]; R];
        for e in block * BLOCK / 2..n_pairs.min((block + 1) * BLOCK / 2) {
            for p in 0..P {
                let codes = simd.load_pairs(&keys[p].0[e]);
                for r in 0..R {
                    ints[r][p] = simd.add_pairs(ints[r][p], codes, q[r][e]);
                }
            }
        }
        for p in 0..P {
            let scale = simd.load_halves(&keys[p].1[block]);
            for r in 0..R {
                let product = ints[r][p].to_f() * scale;
                sums[r][p] = sums[r][p] + product;
            }
        }
    }
    sums
}

/// Turns a row's scores into weights `e^(score − max)`, 0 at positions that the row doesn't attend to;
/// returns the maximum and the sum of the weights, taken lane by lane, then across the lanes.
///
/// With `ROUND`, weights have so few bits that products with f16 are exact.
#[inline(always)]
fn weights<const ROUND: bool>(
    scores: &mut [f32],
    first: usize,
    seen: Range<usize>,
    cap: Option<f32>,
) -> (f32, f32) {
    if let Some(cap) = cap {
        for score in &mut scores[first..] {
            *score = cap * math::tanh(*score / cap);
        }
    }
    scores[first..seen.start].fill(f32::NEG_INFINITY);
    scores[seen.end..].fill(f32::NEG_INFINITY);
    let chunks = scores[first..].as_chunks_mut::<LANES>().0;
    let mut maxima = [f32::NEG_INFINITY; LANES];
    for chunk in chunks.iter() {
        for (max, &score) in maxima.iter_mut().zip(chunk) {
            *max = if score > *max { score } else { *max };
        }
    }
    let max = maxima
        .iter()
        .fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    let mut sums = [0.0; LANES];
    for chunk in chunks {
        for (sum, score) in sums.iter_mut().zip(chunk) {
            let weight = math::exp(*score - max);
            let weight = if ROUND {
                round_significand::<13>(weight)
            } else {
                weight
            };
            *score = if weight < MIN_WEIGHT { 0.0 } else { weight };
            *sum += *score;
        }
    }
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
        width /= 2;
    }
    (max, sums[0])
}

/// Multiplies weights by the scales of a block of values, to 16 bits, so that products with codes
/// are exact. `scales` gives those of each group of lanes.
#[inline(always)]
fn scale_weights<'a, S: Cached>(
    simd: S,
    weights: &[f32],
    scales: impl Fn(usize) -> &'a [f16; LANES],
    lanes: Range<usize>,
    scaled: &mut [f32],
) {
    let mut floats = [[0.0; LANES]; SPAN / LANES];
    for i in lanes.clone() {
        simd.load_halves(scales(i)).store(&mut floats[i]);
    }
    let span = lanes.start * LANES..lanes.end * LANES;
    let floats = &floats.as_flattened()[span.clone()];
    let rows = weights
        .chunks_exact(SPAN)
        .zip(scaled.chunks_exact_mut(SPAN));
    for (weights, scaled) in rows {
        let pairs = weights[span.clone()].iter().zip(floats);
        for (scaled, (weight, scale)) in scaled[span.clone()].iter_mut().zip(pairs) {
            *scaled = round_significand::<16>(weight * scale);
        }
    }
}

/// The weighted sums of a tile over a span.
struct Weigh<'a> {
    d: usize,
    /// Which positions each row attends to.
    seen: &'a [Range<usize>],
    /// Which positions any row attends to.
    all: Range<usize>,
}

impl Weigh<'_> {
    /// `sums[row, e] ← Σ_j weights[row, j] · values[j, e]` for `e` in `columns`, over the positions that the
    /// row attends to, in order.
    ///
    /// Shapes: `weights` is `[n_rows, SPAN]`; each page of `values` is `[PAGE_LEN, stride]`; `sums`
    /// is `[n_rows, head_dim]`. If `converted` is given, values are converted there first.
    #[allow(clippy::too_many_arguments)]
    #[inline(always)]
    fn rows<S: Cached, E: Element, const EXACT: bool, const P: usize>(
        &self,
        simd: S,
        weights: &[f32],
        values: [&[E]; PAGES],
        stride: usize,
        columns: Range<usize>,
        mut converted: Option<&mut Vec<f32>>,
        sums: &mut [f32],
    ) {
        let mut at = columns.start;
        while at + P * LANES <= columns.end {
            if let Some(converted) = &mut converted {
                self.convert::<S, E, P>(simd, values, stride, at, converted);
                let from = (rows_of_pages(converted, P * LANES), P * LANES, 0);
                self.columns::<S, f32, EXACT, P>(simd, weights, from, at, sums);
            } else {
                let from = (values, stride, at);
                self.columns::<S, E, EXACT, P>(simd, weights, from, at, sums);
            }
            at += P * LANES;
        }
        while at + LANES <= columns.end {
            let from = (values, stride, at);
            self.columns::<S, E, EXACT, 1>(simd, weights, from, at, sums);
            at += LANES;
        }
        if at < columns.end {
            self.rest(weights, values, stride, at..columns.end, sums);
        }
    }

    /// Converts `P · LANES` columns of the positions that any row attends to.
    #[inline(always)]
    fn convert<S: Cached, E: Element, const P: usize>(
        &self,
        simd: S,
        values: [&[E]; PAGES],
        stride: usize,
        at: usize,
        converted: &mut [f32],
    ) {
        let out = converted.as_chunks_mut::<LANES>().0;
        for position in self.all.clone() {
            let row = &values[position / PAGE_LEN][position % PAGE_LEN * stride + at..];
            let row = row[..P * LANES].as_chunks::<LANES>().0;
            for (p, from) in row.iter().enumerate() {
                E::load(simd, from).store(&mut out[position * P + p]);
            }
        }
    }

    /// The columns from `at`, which `from` (pages, their stride, and the column in them) holds.
    #[inline(always)]
    fn columns<S: Cached, E: Element, const EXACT: bool, const P: usize>(
        &self,
        simd: S,
        weights: &[f32],
        from: ([&[E]; PAGES], usize, usize),
        at: usize,
        sums: &mut [f32],
    ) {
        let d = self.d;
        for_blocks_of_rows!(self.seen.len(), R, |first| {
            let mut w: [&[f32]; R] = [&[]; R];
            for (r, w) in w.iter_mut().enumerate() {
                *w = &weights[(first + r) * SPAN..][..SPAN];
            }
            // Positions that not all rows attend to are summed row by row, so that a row's sums don't depend
            // on the other rows.
            let seen = &self.seen[first..first + R];
            let start = seen[R - 1].start;
            let end = seen[0].end.max(start);
            let mut acc = [[simd.splat(0.0); P]; R];
            for r in 0..R {
                let before = seen[r].start..seen[r].end.min(start);
                [acc[r]] = weigh::<S, E, EXACT, 1, P>(simd, [w[r]], before, from, [acc[r]]);
            }
            acc = weigh::<S, E, EXACT, R, P>(simd, w, start..end, from, acc);
            for r in 0..R {
                let after = seen[r].start.max(end)..seen[r].end;
                [acc[r]] = weigh::<S, E, EXACT, 1, P>(simd, [w[r]], after, from, [acc[r]]);
                let out = &mut sums[(first + r) * d + at..][..P * LANES];
                for (out, &acc) in out.as_chunks_mut().0.iter_mut().zip(&acc[r]) {
                    acc.store(out);
                }
            }
        });
    }

    /// The columns that don't fill the lanes.
    #[inline(always)]
    fn rest<E: Element>(
        &self,
        weights: &[f32],
        values: [&[E]; PAGES],
        stride: usize,
        columns: Range<usize>,
        sums: &mut [f32],
    ) {
        let d = self.d;
        for row in 0..self.seen.len() {
            let sums = &mut sums[row * d..][columns.clone()];
            sums.fill(0.0);
            for position in self.seen[row].clone() {
                let weight = weights[row * SPAN + position];
                let value = &values[position / PAGE_LEN][position % PAGE_LEN * stride..];
                for (sum, value) in sums.iter_mut().zip(&value[columns.clone()]) {
                    *sum += weight * value.to_f32();
                }
            }
        }
    }
}

/// Adds the weighted values at `positions` to the sums of `R` rows.
#[inline(always)]
fn weigh<S: Cached, E: Element, const EXACT: bool, const R: usize, const P: usize>(
    simd: S,
    weights: [&[f32]; R],
    positions: Range<usize>,
    (pages, stride, column): ([&[E]; PAGES], usize, usize),
    mut acc: [[S::F; P]; R],
) -> [[S::F; P]; R] {
    let mut start = positions.start;
    while start < positions.end {
        let end = positions.end.min((start / PAGE_LEN + 1) * PAGE_LEN);
        let values =
            &pages[start / PAGE_LEN][start % PAGE_LEN * stride..][..(end - start) * stride];
        let mut w: [&[f32]; R] = [&[]; R];
        for (r, w) in w.iter_mut().enumerate() {
            *w = &weights[r][start..end];
        }
        for (i, value) in values.chunks_exact(stride).enumerate() {
            let value = value[column..][..P * LANES].as_chunks::<LANES>().0;
            let mut v = [simd.splat(0.0); P];
            for p in 0..P {
                v[p] = E::load(simd, &value[p]);
            }
            for r in 0..R {
                let weight = simd.splat(w[r][i]);
                for p in 0..P {
                    acc[r][p] = add_product::<S, EXACT>(simd, acc[r][p], v[p], weight);
                }
            }
        }
        start = end;
    }
    acc
}
