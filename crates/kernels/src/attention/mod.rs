//! Attention over a paged key-value cache, causal or, for encoders, to all of a text.
//!
//! # Definition
//!
//! Positions are divided into spans of 256, counted from 0. Within a span, each query head's scores are sums
//! over elements in order; the weights `e^(score − maximum)` are summed in 16 lanes (by position) and then
//! across them; the weighted sum of values runs over positions in order. Spans are merged in order, each side
//! scaled to the larger maximum, and the sum is divided by the total weight at the end, to which a sink, if
//! heads have one, adds its own: a score without a value. Nothing else affects a result: not the threads, not the
//! instruction set, not the other queries of the batch, not how the cache was filled.
//!
//! Operands are rounded where that makes products exact, so that fused multiply-adds give the same bits as
//! two operations:
//! - f32: nothing is rounded, and nothing is fused;
//! - f16: scaled queries and weights are rounded to 13 significant bits;
//! - Q8_0: scaled queries are rounded to i16, one unit for a head; blocks of 32 products are summed in
//!   i32, then weighted by the scales of the keys. Weights are multiplied by the scales of the values
//!   and rounded to 16 significant bits.
//!
//! # Implementation
//!
//! A tile is a number of queries with the query heads that share a key-value head. Few queries (decoding) are
//! divided by key-value head and span (split-KV), so that any number of heads keeps all threads busy, and
//! each thread reads its part of the cache once; many (prefill) by key-value head and tile, each tile
//! iterating over all spans it attends to. Values that are the keys are the keys' columns, transposed for a span
//! and all rows of a tile.

mod cached;
mod page;
mod span;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::borrow::Borrow;
use std::cell::RefCell;
use std::cmp::Reverse;
use std::ops::Range;

pub use page::{KvPage, PAGE_LEN};
pub use sterna_format::model::{AttentionShape, CacheType, CachedValues};

use crate::Exec;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError, expect_len};
use span::{RowState, SPAN, Tile, Workspace, state_len};

/// Buffers reused from call to call.
#[derive(Debug, Default)]
pub struct Scratch {
    /// The partial results of each row in each span, `[n_kv_heads, n_spans, n_rows, state_len]`.
    states: Vec<f32>,
}

/// Rows (query heads of queries) of a tile: enough that converting keys and values is a small part
/// of the work, few enough that scores and sums stay in the second-level cache.
const TILE_ROWS: usize = 64;

/// Floats of states that are stored at once when spans are computed separately.
const MAX_STATES: usize = 1 << 22;

/// Multiply-accumulates per task.
const WORK_PER_TASK: usize = 1 << 16;

thread_local! {
    /// Buffers of the threads that compute attention; a few hundred KB at most.
    static WORKSPACE: RefCell<(Workspace, Vec<f32>)> = RefCell::default();
}

/// The queries of consecutive positions of a sequence.
#[derive(Debug, Clone, Copy)]
pub struct Queries<'a> {
    /// Heads, scale, cap and window.
    pub shape: &'a AttentionShape,
    /// `[m, n_heads, head_dim]`.
    pub q: &'a [f32],
    /// The position of the first.
    pub pos: usize,
    /// Of each query head, the score of a position that every query attends to and whose value is zero,
    /// `[n_heads]`.
    pub sinks: Option<&'a [f32]>,
    /// Whether queries attend to no positions after their own; else they attend to those of the queries after them too.
    pub is_causal: bool,
}

/// `out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h']` over the positions `j` that query `t`
/// attends to: up to its own, `pos + t`, or to the last query's if attention isn't causal, and no further back than
/// the window.
///
/// Shapes: `out` is `[m, n_heads, head_dim]`; `pages` hold positions from 0, [`PAGE_LEN`] per page,
/// at least up to `pos + m`, all of the type of the first, and with or without values as that.
/// Errors: [`ShapeError`] if a slice or the number of pages doesn't fit.
/// Exactness: results depend on neither threads, instruction set nor the other queries; the
/// [module](self) says what is rounded.
pub fn attention<P: Borrow<KvPage> + Sync>(
    exec: &Exec,
    queries: &Queries<'_>,
    pages: &[P],
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    attention_of_each(exec, &[(*queries, pages)], scratch, out)
}

/// [`attention`] of several sequences, each with its queries and pages, all of one shape; `out` has the rows of all, in
/// order. Those that are short among them are shared out together.
///
/// Shapes, errors and exactness: as [`attention`].
pub fn attention_of_each<P: Borrow<KvPage> + Sync>(
    exec: &Exec,
    sequences: &[(Queries<'_>, &[P])],
    scratch: &mut Scratch,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let n_values = sequences.iter().map(|(queries, _)| queries.q.len()).sum();
    expect_len("attention: output", n_values, out.len())?;
    let mut parts = Vec::with_capacity(sequences.len());
    let mut first = 0;
    for (queries, pages) in sequences {
        let (m, pages) = checked(queries, pages)?;
        let place = first..first + queries.q.len();
        first = place.end;
        if m > 0 {
            let n_spans = queries.tile(0..m, 0).spans().len();
            parts.push(Part {
                queries,
                m,
                pages,
                n_spans,
                place,
            });
        }
    }
    if let [part] = &parts[..] {
        attend_all(exec, part.queries, part.m, part.pages, scratch, out);
        return Ok(());
    }
    // One that takes longer than a thread's share of all is divided among threads for itself.
    let is_small = |part: &Part<'_, P>| part.m <= tile_len(part.queries.shape);
    let n_spans: usize = parts
        .iter()
        .filter(|part| is_small(part))
        .map(|part| part.n_spans)
        .sum();
    let n_threads = exec.pool.n_threads();
    let is_short = |part: &Part<'_, P>| {
        is_small(part) && part.n_spans * n_threads <= n_spans * part.queries.shape.n_kv_heads
    };
    let (mut short, long): (Vec<_>, Vec<_>) = parts.into_iter().partition(is_short);
    // The longest are started first.
    short.sort_by_key(|part| Reverse(part.n_spans));
    let items = short.iter().flat_map(|part| {
        let n_kv_heads = part.queries.shape.n_kv_heads;
        (0..n_kv_heads).map(move |kv_head| (part, kv_head))
    });
    let items: Vec<_> = items.collect();
    let work: usize = items.iter().map(|(part, _)| part.work()).sum();
    let grain = (WORK_PER_TASK * items.len()).div_ceil(work.max(1));
    let shared = SharedSlice::new(out);
    exec.pool.for_ranges(items.len(), grain, |range| {
        for (part, kv_head) in &items[range] {
            let (tile, begin) = ((0..part.m, *kv_head), part.place.start);
            // SAFETY: each sequence and head has places of its own.
            unsafe { attend_tile(exec, part.queries, part.pages, tile, &shared, begin) };
        }
    });
    for part in long {
        attend_all(
            exec,
            part.queries,
            part.m,
            part.pages,
            scratch,
            &mut out[part.place],
        );
    }
    Ok(())
}

/// A sequence of several.
struct Part<'a, P> {
    queries: &'a Queries<'a>,
    m: usize,
    pages: &'a [P],
    n_spans: usize,
    /// Of its rows in the output.
    place: Range<usize>,
}

impl<P> Part<'_, P> {
    /// Multiply-accumulates with a key-value head, about.
    fn work(&self) -> usize {
        let AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            ..
        } = *self.queries.shape;
        2 * self.m * (n_heads / n_kv_heads) * self.n_spans * SPAN * head_dim
    }
}

/// The number of queries, and the pages that they attend to.
fn checked<'a, P: Borrow<KvPage>>(
    queries: &Queries<'_>,
    pages: &'a [P],
) -> Result<(usize, &'a [P]), ShapeError> {
    let Queries {
        shape,
        q,
        pos,
        sinks,
        is_causal: _,
    } = *queries;
    let AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        ..
    } = *shape;
    let m = shape::rows("attention: queries", q.len(), n_heads * head_dim)?;
    shape::rows("attention: query heads", n_heads, n_kv_heads)?;
    if let Some(sinks) = sinks {
        expect_len("attention: sinks", n_heads, sinks.len())?;
    }
    if m == 0 {
        return Ok((0, &[]));
    }
    let n_pages = (pos + m).div_ceil(PAGE_LEN);
    expect_len(
        "attention: pages of the cache",
        n_pages,
        n_pages.min(pages.len()),
    )?;
    let pages = &pages[..n_pages];
    let (dtype, cached) = (pages[0].borrow().dtype(), pages[0].borrow().cached());
    for page in pages {
        let page = page.borrow();
        expect_len("attention: heads of a page", n_kv_heads, page.n_kv_heads())?;
        expect_len("attention: heads of a page", head_dim, page.head_dim())?;
        let bytes = |dtype: CacheType| dtype.head_bytes(head_dim);
        expect_len(
            "attention: bytes of a head",
            bytes(dtype),
            bytes(page.dtype()),
        )?;
        let (expected, found) = (cached.per_head(), page.cached().per_head());
        expect_len("attention: keys and values of a head", expected, found)?;
    }
    Ok((m, pages))
}

/// Queries of a tile.
fn tile_len(shape: &AttentionShape) -> usize {
    (TILE_ROWS / (shape.n_heads / shape.n_kv_heads)).max(1)
}

/// [`attention`] of `m` queries, of which there is one at least. Shapes have been checked.
fn attend_all<P: Borrow<KvPage> + Sync>(
    exec: &Exec,
    queries: &Queries<'_>,
    m: usize,
    pages: &[P],
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        ..
    } = *queries.shape;
    let (group, tile_len) = (n_heads / n_kv_heads, tile_len(queries.shape));
    let n_spans = queries.tile(0..m, 0).spans().len();
    let work = |n_queries: usize, n_positions: usize| {
        let per_item = 2 * n_queries * group * n_positions * head_dim;
        WORK_PER_TASK.div_ceil(per_item.max(1))
    };
    let n_states = n_kv_heads * n_spans * m * group;
    if m <= tile_len && n_spans > 1 && n_states * state_len(head_dim) <= MAX_STATES {
        by_span(exec, queries, pages, work(m, SPAN), scratch, out);
    } else {
        let grain = work(tile_len.min(m), queries.pos + m);
        by_tile(exec, queries, tile_len, pages, grain, out);
    }
}

impl<'a> Queries<'a> {
    fn tile(&self, queries: Range<usize>, kv_head: usize) -> Tile<'a> {
        let width = self.shape.n_heads * self.shape.head_dim;
        Tile {
            shape: self.shape,
            q: &self.q[queries.start * width..queries.end * width],
            pos: self.pos + queries.start,
            end: (!self.is_causal).then(|| self.pos + self.q.len() / width),
            kv_head,
        }
    }

    /// Where in the output a row of the tile that begins at `query` goes.
    fn place(&self, query: usize, kv_head: usize, row: usize) -> Range<usize> {
        let AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim,
            ..
        } = *self.shape;
        let group = n_heads / n_kv_heads;
        let head = (query + row / group) * n_heads + kv_head * group + row % group;
        head * head_dim..(head + 1) * head_dim
    }

    /// The score of the sink of a row of a tile.
    fn sink(&self, kv_head: usize, row: usize) -> Option<f32> {
        let group = self.shape.n_heads / self.shape.n_kv_heads;
        (self.sinks).map(|sinks| sinks[kv_head * group + row % group])
    }
}

/// The pages of a span, as many as there are.
fn span_pages<P: Borrow<KvPage>>(pages: &[P], span: usize) -> ([&KvPage; SPAN / PAGE_LEN], usize) {
    let first = span * (SPAN / PAGE_LEN);
    let n = (SPAN / PAGE_LEN).min(pages.len() - first);
    let mut of_span = [pages[first].borrow(); SPAN / PAGE_LEN];
    for (of_span, page) in of_span.iter_mut().zip(&pages[first..first + n]) {
        *of_span = page.borrow();
    }
    (of_span, n)
}

/// Attention of one tile's queries: an item for each key-value head and span, then one for each row.
fn by_span<P: Borrow<KvPage> + Sync>(
    exec: &Exec,
    queries: &Queries<'_>,
    pages: &[P],
    grain: usize,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        ..
    } = *queries.shape;
    let m = queries.q.len() / (n_heads * head_dim);
    let whole = queries.tile(0..m, 0);
    let (spans, n_rows) = (whole.spans(), whole.n_rows());
    let len = state_len(head_dim);
    let dtype = pages[0].borrow().dtype();
    scratch
        .states
        .resize(n_kv_heads * spans.len() * n_rows * len, 0.0);
    let states = SharedSlice::new(&mut scratch.states);
    exec.pool
        .for_ranges(spans.len() * n_kv_heads, grain, |items| {
            WORKSPACE.with_borrow_mut(|(work, _)| {
                for item in items {
                    // Heads of a span are adjacent in its pages.
                    let (span, kv_head) = (item / n_kv_heads, item % n_kv_heads);
                    let at = (kv_head * spans.len() + span) * n_rows * len;
                    // SAFETY: each head and span has states of its own.
                    let states = unsafe { states.range_mut(at..at + n_rows * len) };
                    let tile = queries.tile(0..m, kv_head);
                    let (of_span, n) = span_pages(pages, spans.start + span);
                    work.prepare(&tile, dtype);
                    clear(states, head_dim);
                    span::attend(
                        exec.isa,
                        &tile,
                        spans.start + span,
                        &of_span[..n],
                        work,
                        states,
                    );
                }
            });
        });
    let out = SharedSlice::new(out);
    let grain = WORK_PER_TASK.div_ceil(4 * spans.len() * head_dim);
    exec.pool.for_ranges(n_kv_heads * n_rows, grain, |rows| {
        for row in rows {
            let (kv_head, row) = (row / n_rows, row % n_rows);
            let at = |span: usize| ((kv_head * spans.len() + span) * n_rows + row) * len;
            // SAFETY: each row has states, and a place in the output, of its own.
            let out = unsafe { out.range_mut(queries.place(0, kv_head, row)) };
            // SAFETY: as above; the first span's state is none of the later ones.
            let first = unsafe { states.range_mut(at(0)..at(0) + len) };
            for span in 1..spans.len() {
                // SAFETY: as above.
                let later = unsafe { states.range_mut(at(span)..at(span) + len) };
                merge(exec.isa, first, later, head_dim);
            }
            RowState::of(first, head_dim).finish(queries.sink(kv_head, row), out);
        }
    });
}

/// Attention tile by tile: an item for each tile and key-value head.
fn by_tile<P: Borrow<KvPage> + Sync>(
    exec: &Exec,
    queries: &Queries<'_>,
    tile_len: usize,
    pages: &[P],
    grain: usize,
    out: &mut [f32],
) {
    let AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        ..
    } = *queries.shape;
    let m = queries.q.len() / (n_heads * head_dim);
    let out = SharedSlice::new(out);
    let n_tiles = m.div_ceil(tile_len);
    exec.pool.for_ranges(n_tiles * n_kv_heads, grain, |items| {
        for item in items {
            // The last tiles attend to the most positions: started first, none is left alone at the end.
            let first = (n_tiles - 1 - item / n_kv_heads) * tile_len;
            let tile = first..m.min(first + tile_len);
            // SAFETY: each tile and head has places of its own.
            unsafe { attend_tile(exec, queries, pages, (tile, item % n_kv_heads), &out, 0) };
        }
    });
}

/// Attention of a tile of queries with a key-value head; the sequence's output begins at `begin`.
///
/// # Safety
/// Nothing else writes the output of these queries' heads.
unsafe fn attend_tile<P: Borrow<KvPage>>(
    exec: &Exec,
    queries: &Queries<'_>,
    pages: &[P],
    (tile, kv_head): (Range<usize>, usize),
    out: &SharedSlice<'_, f32>,
    begin: usize,
) {
    let head_dim = queries.shape.head_dim;
    let (len, first) = (state_len(head_dim), tile.start);
    let tile = queries.tile(tile, kv_head);
    WORKSPACE.with_borrow_mut(|(work, states)| {
        states.resize(tile.n_rows() * len, 0.0);
        work.prepare(&tile, pages[0].borrow().dtype());
        clear(states, head_dim);
        for span in tile.spans() {
            let (of_span, n) = span_pages(pages, span);
            span::attend(exec.isa, &tile, span, &of_span[..n], work, states);
        }
        for (row, state) in states.chunks_exact_mut(len).enumerate() {
            let place = queries.place(first, kv_head, row);
            // SAFETY: each row has a place of its own, which is the caller's.
            let out = unsafe { out.range_mut(begin + place.start..begin + place.end) };
            RowState::of(state, head_dim).finish(queries.sink(kv_head, row), out);
        }
    });
}

/// Initialises `states` for rows without any position.
fn clear(states: &mut [f32], head_dim: usize) {
    for state in states.chunks_exact_mut(state_len(head_dim)) {
        RowState::of(state, head_dim).clear();
    }
}

multiversion! {
    /// Merges the state of a later span into a row's.
    fn merge(state: &mut [f32], later: &mut [f32], head_dim: usize) {
        RowState::of(state, head_dim).merge_state(&RowState::of(later, head_dim));
    }
}
