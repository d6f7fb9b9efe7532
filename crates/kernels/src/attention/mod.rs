//! Causal attention over a paged key-value cache.

use half::f16;
use half::slice::HalfFloatSliceExt;

use crate::Exec;
use crate::dot::dot;
use crate::isa::multiversion;
use crate::math;
use crate::pool::SharedSlice;
use crate::shape::{self, ShapeError, expect_len};

/// What the attention of one layer looks like.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads.
    pub n_heads: usize,
    /// Key and value heads; each serves `n_heads / n_kv_heads` query heads in a row.
    pub n_kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on query-key products.
    pub scale: f32,
    /// Bound on scores, applied as `cap · tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// How many positions a query sees, its own counted; all before it if `None`.
    pub window: Option<usize>,
}

/// Keys or values of consecutive positions, `[n_kv_heads, page_len, head_dim]`.
#[derive(Debug, Clone, Copy)]
pub enum KvRows<'a> {
    /// As computed.
    F32(&'a [f32]),
    /// Rounded to half precision.
    F16(&'a [f16]),
}

impl KvRows<'_> {
    fn len(&self) -> usize {
        match self {
            KvRows::F32(rows) => rows.len(),
            KvRows::F16(rows) => rows.len(),
        }
    }

    /// The `len` elements from `at`, converted into `scratch` if need be.
    fn floats<'s>(&'s self, at: usize, len: usize, scratch: &'s mut Vec<f32>) -> &'s [f32] {
        match self {
            KvRows::F32(rows) => &rows[at..at + len],
            KvRows::F16(rows) => {
                scratch.resize(len, 0.0);
                rows[at..at + len].convert_to_f32_slice(scratch);
                scratch
            }
        }
    }
}

/// A page of the cache: `page_len` consecutive positions of one layer.
#[derive(Debug, Clone, Copy)]
pub struct KvPage<'a> {
    /// Keys, with positions already rotated in.
    pub k: KvRows<'a>,
    /// Values.
    pub v: KvRows<'a>,
}

/// `out[t, h] = Σ_j softmax_j(scale · q[t, h] · k[j, h']) · v[j, h']` over the positions `j` that
/// query `t` sees: up to its own, `pos + t`, and no further back than the window.
///
/// Shapes: `q` and `out` are `[m, n_heads, head_dim]`; `pages` hold positions from 0, `page_len` to a
/// page, at least up to `pos + m`.
/// Errors: [`ShapeError`] if a slice or the number of pages doesn't fit.
/// Exactness: sums run over positions in order, so results depend on neither threads, instruction
/// set, page length nor the other queries.
pub fn attention(
    exec: &Exec,
    shape: &AttentionShape,
    q: &[f32],
    pos: usize,
    pages: &[KvPage<'_>],
    page_len: usize,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    let AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        ..
    } = *shape;
    let m = shape::rows("attention: queries", q.len(), n_heads * head_dim)?;
    let group = shape::rows("attention: query heads", n_heads, n_kv_heads)?;
    expect_len("attention: output", q.len(), out.len())?;
    let n_pages = (pos + m).div_ceil(page_len.max(1));
    expect_len(
        "attention: pages of the cache",
        n_pages,
        n_pages.min(pages.len()),
    )?;
    for page in &pages[..n_pages] {
        let len = n_kv_heads * page_len * head_dim;
        expect_len("attention: keys of a page", len, page.k.len())?;
        expect_len("attention: values of a page", len, page.v.len())?;
    }
    let shared = SharedSlice::new(out);
    let work_per_item = (2 * (pos + m) * group * head_dim).max(1);
    let grain = WORK_PER_TASK.div_ceil(work_per_item);
    exec.pool.for_ranges(m * n_kv_heads, grain, |items| {
        let mut scratch = Scratch::default();
        for item in items {
            let (t, kv_head) = (item / n_kv_heads, item % n_kv_heads);
            let at = (t * n_heads + kv_head * group) * head_dim;
            let heads = at..at + group * head_dim;
            // SAFETY: each item writes the heads of its own group.
            let out = unsafe { shared.range_mut(heads.clone()) };
            let last = pos + t;
            let first = shape
                .window
                .map_or(0, |window| (last + 1).saturating_sub(window));
            let span = Span {
                first,
                end: last + 1,
                page_len,
                kv_head,
            };
            attend(exec.isa, shape, &q[heads], span, pages, &mut scratch, out);
        }
    });
    Ok(())
}

/// Multiplications that a thread takes at a time.
const WORK_PER_TASK: usize = 1 << 16;

/// Buffers that a thread keeps from item to item.
#[derive(Default)]
struct Scratch {
    scores: Vec<f32>,
    rows: Vec<f32>,
}

/// The positions one query sees, and the head it looks at.
#[derive(Clone, Copy)]
struct Span {
    first: usize,
    end: usize,
    page_len: usize,
    kv_head: usize,
}

impl Span {
    /// The pages that hold the span: index of the page, place and length of the rows in it, and how
    /// many positions of the span come before.
    fn pieces(self, head_dim: usize) -> impl Iterator<Item = (usize, usize, usize, usize)> {
        let Span {
            first,
            end,
            page_len,
            kv_head,
        } = self;
        (first / page_len..end.div_ceil(page_len)).map(move |page| {
            let start = first.max(page * page_len);
            let stop = end.min((page + 1) * page_len);
            let at = (kv_head * page_len + start % page_len) * head_dim;
            (page, at, (stop - start) * head_dim, start - first)
        })
    }
}

multiversion! {
    /// Attention of a group of query heads that share one key-value head, for one query position.
    fn attend(
        shape: &AttentionShape,
        q: &[f32],
        span: Span,
        pages: &[KvPage<'_>],
        scratch: &mut Scratch,
        out: &mut [f32],
    ) {
        let d = shape.head_dim;
        let n = span.end - span.first;
        let group = q.len() / d;
        let Scratch { scores, rows } = scratch;
        scores.clear();
        scores.resize(group * n, 0.0);
        for (page, at, len, before) in span.pieces(d) {
            let keys = pages[page].k.floats(at, len, rows);
            for (g, q) in q.chunks_exact(d).enumerate() {
                let scores = &mut scores[g * n + before..];
                for (score, key) in scores.iter_mut().zip(keys.chunks_exact(d)) {
                    *score = dot(q, key) * shape.scale;
                }
            }
        }
        for scores in scores.chunks_exact_mut(n) {
            if let Some(cap) = shape.softcap {
                for score in scores.iter_mut() {
                    *score = cap * math::tanh(*score / cap);
                }
            }
            softmax(scores);
        }
        out.fill(0.0);
        for (page, at, len, before) in span.pieces(d) {
            let values = pages[page].v.floats(at, len, rows);
            for (g, out) in out.chunks_exact_mut(d).enumerate() {
                let weights = &scores[g * n + before..];
                for (weight, value) in weights.iter().zip(values.chunks_exact(d)) {
                    for (out, v) in out.iter_mut().zip(value) {
                        *out += weight * v;
                    }
                }
            }
        }
    }
}

/// `x[i] ← e^(x[i] - max) / Σ e^(x - max)`.
#[inline(always)]
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for x in x.iter_mut() {
        *x = math::exp(*x - max);
    }
    let mut sum = 0.0;
    for x in x.iter() {
        sum += x;
    }
    let inverse = 1.0 / sum;
    for x in x {
        *x *= inverse;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{exec_matrix, floats};

    const SHAPE: AttentionShape = AttentionShape {
        n_heads: 6,
        n_kv_heads: 2,
        head_dim: 20,
        scale: 0.7,
        softcap: None,
        window: None,
    };

    /// The formula, in f64, on keys and values laid out `[position, n_kv_heads, head_dim]`.
    fn naive(shape: &AttentionShape, q: &[f32], pos: usize, k: &[f32], v: &[f32]) -> Vec<f64> {
        let (d, h) = (shape.head_dim, shape.n_heads);
        let mut out = vec![0.0; q.len()];
        for (i, q) in q.chunks(d).enumerate() {
            let (t, kv) = (i / h, i % h / (h / shape.n_kv_heads));
            let last = pos + t;
            let first = shape.window.map_or(0, |w| (last + 1).saturating_sub(w));
            let row =
                |x: &[f32], j: usize, e: usize| f64::from(x[(j * shape.n_kv_heads + kv) * d + e]);
            let scores: Vec<f64> = (first..=last)
                .map(|j| {
                    let dot: f64 = (0..d).map(|e| f64::from(q[e]) * row(k, j, e)).sum();
                    let score = dot * f64::from(shape.scale);
                    shape.softcap.map_or(score, |cap| {
                        f64::from(cap) * (score / f64::from(cap)).tanh()
                    })
                })
                .collect();
            let sum: f64 = scores.iter().map(|s| s.exp()).sum();
            for e in 0..d {
                out[i * d + e] = (first..=last)
                    .zip(&scores)
                    .map(|(j, s)| s.exp() / sum * row(v, j, e))
                    .sum();
            }
        }
        out
    }

    /// Cuts `[position, n_kv_heads, head_dim]` into pages, the last filled with NaN.
    fn pages(shape: &AttentionShape, rows: &[f32], page_len: usize) -> Vec<Vec<f32>> {
        let (d, h) = (shape.head_dim, shape.n_kv_heads);
        let n = rows.len() / (d * h);
        (0..n.div_ceil(page_len))
            .map(|page| {
                let mut out = vec![f32::NAN; h * page_len * d];
                for j in page * page_len..n.min((page + 1) * page_len) {
                    for kv in 0..h {
                        out[(kv * page_len + j % page_len) * d..][..d]
                            .copy_from_slice(&rows[(j * h + kv) * d..][..d]);
                    }
                }
                out
            })
            .collect()
    }

    #[test]
    fn matches_the_formula_on_every_path() {
        for (softcap, window) in [(None, None), (Some(2.0), Some(5)), (None, Some(1))] {
            let shape = AttentionShape {
                softcap,
                window,
                ..SHAPE
            };
            let (pos, m) = (9, 4);
            let kv = shape.n_kv_heads * shape.head_dim;
            let k = floats((pos + m) * kv, 1);
            let v = floats((pos + m) * kv, 2);
            let q = floats(m * shape.n_heads * shape.head_dim, 3);
            let want = naive(&shape, &q, pos, &k, &v);
            let mut first: Option<Vec<f32>> = None;
            for page_len in [1, 4, 32] {
                let (k, v) = (pages(&shape, &k, page_len), pages(&shape, &v, page_len));
                let views: Vec<KvPage> = k
                    .iter()
                    .zip(&v)
                    .map(|(k, v)| KvPage {
                        k: KvRows::F32(k),
                        v: KvRows::F32(v),
                    })
                    .collect();
                for exec in exec_matrix() {
                    let mut out = vec![f32::NAN; q.len()];
                    attention(&exec, &shape, &q, pos, &views, page_len, &mut out).unwrap();
                    for (got, want) in out.iter().zip(&want) {
                        assert!((f64::from(*got) - want).abs() < 2e-6, "{got}, not {want}");
                    }
                    assert_eq!(
                        *first.get_or_insert(out.clone()),
                        out,
                        "{exec:?} {page_len}"
                    );
                }
            }
        }
    }

    #[test]
    fn half_precision_pages_equal_their_f32_values() {
        let exec = Exec::new(2, crate::Isa::detect());
        let kv = SHAPE.n_kv_heads * SHAPE.head_dim;
        let half: Vec<f16> = floats(8 * kv, 4).into_iter().map(f16::from_f32).collect();
        let full: Vec<f32> = half.iter().map(|v| v.to_f32()).collect();
        let q = floats(SHAPE.n_heads * SHAPE.head_dim, 5);
        let run = |rows: KvRows| {
            let mut out = vec![0.0; q.len()];
            attention(
                &exec,
                &SHAPE,
                &q,
                7,
                &[KvPage { k: rows, v: rows }],
                8,
                &mut out,
            )
            .unwrap();
            out
        };
        assert_eq!(run(KvRows::F16(&half)), run(KvRows::F32(&full)));
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let exec = Exec::new(1, crate::Isa::SCALAR);
        let row = SHAPE.n_heads * SHAPE.head_dim;
        let page = vec![0.0; SHAPE.n_kv_heads * 4 * SHAPE.head_dim];
        let good = KvPage {
            k: KvRows::F32(&page),
            v: KvRows::F32(&page),
        };
        let short = KvPage {
            v: KvRows::F32(&page[1..]),
            ..good
        };
        let (q, mut out) = (vec![0.0; row], vec![0.0; row]);
        let mut run = |shape: &AttentionShape, q: &[f32], pos, pages: &[KvPage]| {
            attention(&exec, shape, q, pos, pages, 4, &mut out)
        };
        assert!(run(&SHAPE, &q, 3, &[good]).is_ok());
        assert!(run(&SHAPE, &q, 4, &[good]).is_err());
        assert!(run(&SHAPE, &q, 0, &[short]).is_err());
        assert!(run(&SHAPE, &q[1..], 0, &[good]).is_err());
        let uneven = AttentionShape {
            n_kv_heads: 4,
            ..SHAPE
        };
        assert!(run(&uneven, &q, 0, &[good]).is_err());
    }
}
