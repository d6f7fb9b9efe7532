use half::f16;

use super::*;
use crate::Isa;
use crate::test_data::{exec_matrix, floats};

const TYPES: [CacheType; 3] = [CacheType::F32, CacheType::F16, CacheType::Q8_0];

const SHAPE: AttentionShape = AttentionShape {
    n_heads: 6,
    n_kv_heads: 2,
    head_dim: 36,
    scale: 0.7,
    softcap: None,
    window: None,
};

/// Keys, values and queries of `n` positions, and pages that hold the former.
struct Case {
    shape: AttentionShape,
    dtype: CacheType,
    cached: CachedValues,
    k: Vec<f32>,
    v: Vec<f32>,
    q: Vec<f32>,
    pages: Vec<KvPage>,
    sinks: Option<Vec<f32>>,
    is_causal: bool,
}

impl Case {
    fn new(shape: AttentionShape, dtype: CacheType, n: usize) -> Case {
        let width = shape.n_kv_heads * shape.head_dim;
        Case::with_values(shape, dtype, CachedValues::Own, n, floats(n * width, 2))
    }

    /// One whose values are its keys, and the same with values of its own.
    fn of_keys(shape: AttentionShape, dtype: CacheType, n: usize) -> [Case; 2] {
        let width = shape.n_kv_heads * shape.head_dim;
        [CachedValues::Keys, CachedValues::Own]
            .map(|cached| Case::with_values(shape, dtype, cached, n, floats(n * width, 1)))
    }

    fn with_values(
        shape: AttentionShape,
        dtype: CacheType,
        cached: CachedValues,
        n: usize,
        v: Vec<f32>,
    ) -> Case {
        let width = shape.n_kv_heads * shape.head_dim;
        let k = floats(n * width, 1);
        let q = floats(n * shape.n_heads * shape.head_dim, 3);
        let exec = Exec::new(1, Isa::detect());
        let page = PAGE_LEN * width;
        let pages = k.chunks(page).zip(v.chunks(page));
        let pages = pages
            .map(|(k, v)| {
                let mut page = KvPage::new(dtype, cached, shape.n_kv_heads, shape.head_dim);
                // In two pieces, to store from the middle too.
                let half = (k.len() / width / 2) * width;
                let [first, second] = [0..half, half..v.len()].map(|rows| match cached {
                    CachedValues::Own => &v[rows],
                    CachedValues::Keys => &[],
                });
                page.store(&exec, 0, &k[..half], first).unwrap();
                page.store(&exec, half / width, &k[half..], second).unwrap();
                page
            })
            .collect();
        Case {
            shape,
            dtype: dtype.of_heads(shape.head_dim),
            cached,
            k,
            v,
            q,
            pages,
            sinks: None,
            is_causal: true,
        }
    }

    /// Attention of the queries at the `m` positions from `pos`.
    fn run(&self, exec: &Exec, pos: usize, m: usize) -> Vec<f32> {
        let width = self.shape.n_heads * self.shape.head_dim;
        let q = &self.q[pos * width..(pos + m) * width];
        let mut out = vec![f32::NAN; q.len()];
        let scratch = &mut Scratch::default();
        let queries = Queries {
            shape: &self.shape,
            q,
            pos,
            sinks: self.sinks.as_deref(),
            is_causal: self.is_causal,
        };
        attention(exec, &queries, &self.pages, scratch, &mut out).unwrap();
        out
    }

    /// The stored form of a head's `x`.
    fn stored(&self, x: &[f32]) -> Vec<f64> {
        match self.dtype {
            CacheType::F32 => x.iter().map(|&x| f64::from(x)).collect(),
            CacheType::F16 => x.iter().map(|&x| f16::from_f32(x).to_f64()).collect(),
            CacheType::Q8_0 => x.chunks(32).flat_map(bytes).collect(),
        }
    }

    /// The formula, in f64, on stored values.
    fn formula(&self, pos: usize, m: usize) -> Vec<f64> {
        let AttentionShape {
            n_heads,
            n_kv_heads,
            head_dim: d,
            ..
        } = self.shape;
        let k: Vec<_> = self.k.chunks(d).map(|k| self.stored(k)).collect();
        let v: Vec<_> = self.v.chunks(d).map(|v| self.stored(v)).collect();
        let mut out = Vec::new();
        for (i, q) in self
            .q
            .chunks(d)
            .enumerate()
            .skip(pos * n_heads)
            .take(m * n_heads)
        {
            let (own, kv) = (i / n_heads, i % n_heads / (n_heads / n_kv_heads));
            let first = self.shape.window.map_or(0, |w| (own + 1).saturating_sub(w));
            let last = match self.is_causal {
                true => own,
                false => pos + m - 1,
            };
            let scores: Vec<f64> = (first..=last)
                .map(|j| {
                    let products = q.iter().zip(&k[j * n_kv_heads + kv]);
                    let dot: f64 = products.map(|(&q, k)| f64::from(q) * k).sum();
                    let score = dot * f64::from(self.shape.scale);
                    self.shape.softcap.map_or(score, |cap| {
                        f64::from(cap) * (score / f64::from(cap)).tanh()
                    })
                })
                .collect();
            let sink = self
                .sinks
                .as_ref()
                .map(|sinks| f64::from(sinks[i % n_heads]));
            let all = scores.iter().copied().chain(sink);
            let max = all.clone().fold(f64::NEG_INFINITY, f64::max);
            let sum: f64 = all.map(|s| (s - max).exp()).sum();
            out.extend((0..d).map(|e| -> f64 {
                let weighted = scores.iter().zip(first..);
                weighted
                    .map(|(s, j)| (s - max).exp() / sum * v[j * n_kv_heads + kv][e])
                    .sum()
            }));
        }
        out
    }

    /// Checks the formula, and that bits are the same for every instruction set, number of threads
    /// and chunk.
    fn check(&self, pos: usize, m: usize, chunks: &[usize]) {
        // Values are within ±1. Queries lose 2^-14 (f16) or less, which moves scores of unit
        // variance by as much, and weights with them; f32 loses what rounding its sums costs.
        let bound = match self.dtype {
            CacheType::F32 => 4e-6,
            CacheType::F16 | CacheType::Q8_0 => 3e-4,
        };
        let portable = Exec::new(1, Isa::SCALAR);
        let whole = self.run(&portable, pos, m);
        for (got, want) in whole.iter().zip(self.formula(pos, m)) {
            let error = (f64::from(*got) - want).abs();
            assert!(error < bound, "{got}, not {want}: {:?}", self.shape);
        }
        for exec in exec_matrix() {
            for &chunk in chunks {
                let mut got = Vec::new();
                for start in (pos..pos + m).step_by(chunk) {
                    got.extend(self.run(&exec, start, chunk.min(pos + m - start)));
                }
                for (i, (a, b)) in got.iter().zip(&whole).enumerate() {
                    assert_eq!(
                        a.to_bits(),
                        b.to_bits(),
                        "{i} of {}: {exec:?} {:?} {:?} {:?} {pos}+{m} by {chunk}",
                        whole.len(),
                        self.shape,
                        self.dtype,
                        self.cached
                    );
                }
            }
        }
    }
}

/// A block of Q8_0: bytes times an f16, from the definition.
fn bytes(x: &[f32]) -> Vec<f64> {
    let max = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
    let scale = f16::from_f32(max / 127.0);
    let inverse = if scale > f16::ZERO {
        1.0 / scale.to_f32()
    } else {
        0.0
    };
    let code = |x: f32| (x * inverse).clamp(-127.0, 127.0).round_ties_even();
    x.iter()
        .map(|&x| f64::from(code(x)) * scale.to_f64())
        .collect()
}

#[test]
fn several_sequences_have_the_bits_of_each_alone() {
    for dtype in [CacheType::F32, CacheType::Q8_0] {
        let shape = AttentionShape {
            window: Some(700),
            ..SHAPE
        };
        let case = Case::new(shape, dtype, 1200);
        let width = shape.n_heads * shape.head_dim;
        // Short and long ones, one without queries, some of several, and more than fit a tile.
        let parts = [
            (0, 1),
            (1100, 1),
            (5, 1),
            (300, 0),
            (64, 3),
            (700, 100),
            (63, 1),
            (1199, 1),
        ];
        for n in [1, 2, 3, parts.len()] {
            let parts = &parts[..n];
            let queries = parts.iter().map(|&(pos, m)| {
                let queries = Queries {
                    shape: &case.shape,
                    q: &case.q[pos * width..(pos + m) * width],
                    pos,
                    sinks: None,
                    is_causal: true,
                };
                (queries, &case.pages[..])
            });
            let queries: Vec<_> = queries.collect();
            for exec in exec_matrix() {
                let n_values: usize = parts.iter().map(|(_, m)| m * width).sum();
                let mut out = vec![f32::NAN; n_values];
                let scratch = &mut Scratch::default();
                attention_of_each(&exec, &queries, scratch, &mut out).unwrap();
                let alone = parts.iter().map(|&(pos, m)| case.run(&exec, pos, m));
                assert_eq!(
                    out,
                    alone.collect::<Vec<_>>().concat(),
                    "{dtype:?} {n} {exec:?}"
                );
                let short = &mut out[1..];
                assert!(attention_of_each(&exec, &queries, scratch, short).is_err());
            }
        }
    }
}

#[test]
fn sinks_take_weight_and_give_nothing() {
    for dtype in TYPES {
        // Above all scores, among them, and far below; by spans and by tiles.
        let mut case = Case::new(SHAPE, dtype, 600);
        case.sinks = Some(vec![40.0, 1.0, -1.0, 0.0, 3.0, -200.0]);
        case.check(598, 2, &[1, 2]);
        case.check(0, 70, &[70, 33]);
    }
    let exec = Exec::new(1, Isa::SCALAR);
    let case = Case::new(SHAPE, CacheType::F32, 3);
    let queries = Queries {
        shape: &case.shape,
        q: &case.q,
        pos: 0,
        sinks: Some(&[0.0; 5]),
        is_causal: true,
    };
    let (scratch, mut out) = (&mut Scratch::default(), vec![0.0; case.q.len()]);
    assert!(attention(&exec, &queries, &case.pages, scratch, &mut out).is_err());
}

/// As encoders have it.
#[test]
fn queries_attend_to_those_after_them() {
    for dtype in TYPES {
        let mut case = Case::new(SHAPE, dtype, 600);
        case.is_causal = false;
        // By tiles, within a span and over several, and by spans.
        for (pos, m) in [(0, 1), (0, 40), (0, 600), (40, 90), (590, 2)] {
            case.check(pos, m, &[m]);
        }
    }
}

#[test]
fn heads_of_any_width_and_groups_of_any_size() {
    for head_dim in [1, 8, 20, 33, 64, 80, 96, 128, 256] {
        for (n_heads, n_kv_heads) in [(1, 1), (4, 1), (5, 1), (6, 2)] {
            let shape = AttentionShape {
                n_heads,
                n_kv_heads,
                head_dim,
                scale: (head_dim as f32).sqrt().recip() * 3.0,
                ..SHAPE
            };
            for dtype in TYPES {
                Case::new(shape, dtype, 70).check(0, 70, &[70, 33, 3]);
            }
        }
    }
}

#[test]
fn lengths_about_a_page_and_a_span() {
    for dtype in TYPES {
        let case = Case::new(SHAPE, dtype, 600);
        for end in [1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 511, 512, 513, 600] {
            case.check(end - 1, 1, &[1]);
            let m = end.min(3);
            case.check(end - m, m, &[m, 1]);
        }
        case.check(230, 100, &[100, 64, 7, 1]);
        case.check(0, 600, &[600, 256]);
    }
}

#[test]
fn windows_and_caps() {
    for (softcap, window) in [
        (Some(2.0), Some(5)),
        (None, Some(1)),
        (None, Some(100)),
        (Some(0.5), None),
        (None, Some(300)),
    ] {
        for (n_heads, n_kv_heads) in [(6, 2), (5, 5)] {
            let shape = AttentionShape {
                softcap,
                window,
                n_heads,
                n_kv_heads,
                ..SHAPE
            };
            for dtype in TYPES {
                Case::new(shape, dtype, 560).check(240, 320, &[320, 50, 1]);
            }
        }
    }
}

/// As of latent attention: on every path the bits of pages that have the same values once more.
#[test]
fn values_that_are_the_keys() {
    let latent = AttentionShape {
        n_heads: 16,
        n_kv_heads: 1,
        head_dim: 576,
        scale: 0.1,
        ..SHAPE
    };
    let of = |n_heads, n_kv_heads, head_dim| AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: (head_dim as f32).sqrt().recip() * 3.0,
        ..SHAPE
    };
    let windowed = AttentionShape {
        window: Some(100),
        softcap: Some(2.0),
        ..of(9, 1, 48)
    };
    let mut cases = vec![
        (latent, 300, vec![(299, 1), (255, 3), (0, 20)]),
        (windowed, 560, vec![(559, 1), (240, 40)]),
    ];
    for head_dim in [1, 8, 20, 31, 32, 33, 63, 64, 80, 97] {
        for (n_heads, n_kv_heads) in [(1, 1), (4, 2), (12, 1)] {
            let shape = of(n_heads, n_kv_heads, head_dim);
            cases.push((shape, 70, vec![(69, 1), (0, 35)]));
        }
    }
    for (shape, n, ranges) in cases {
        for dtype in TYPES {
            let [keys, own] = Case::of_keys(shape, dtype, n);
            let bytes = |case: &Case| -> [usize; 2] { case.pages[0].as_bytes().map(<[u8]>::len) };
            assert_eq!(bytes(&keys), [bytes(&own)[0], 0]);
            for &(pos, m) in &ranges {
                keys.check(pos, m, &[m, 7]);
                let exec = Exec::new(1, Isa::detect());
                let bits = |case: &Case| -> Vec<u32> {
                    let out = case.run(&exec, pos, m);
                    out.iter().map(|x| x.to_bits()).collect()
                };
                assert_eq!(bits(&keys), bits(&own), "{shape:?} {dtype:?} {pos}+{m}");
            }
        }
    }
}

/// As the rotated part of latent attention's values, which nobody reads: what isn't in the same block has the same bits
/// whatever it is.
#[test]
fn a_part_of_values_that_differs_changes_no_other() {
    const PART: usize = 64;
    let shape = AttentionShape {
        n_heads: 16,
        n_kv_heads: 1,
        head_dim: PART + 512,
        scale: 0.1,
        ..SHAPE
    };
    let n = 270;
    for dtype in TYPES {
        let [keys, own] = Case::of_keys(shape, dtype, n);
        let mut v = own.v.clone();
        for (v, other) in v
            .chunks_mut(shape.head_dim)
            .zip(floats(n * PART, 5).chunks(PART))
        {
            v[..PART].copy_from_slice(other);
        }
        let other = Case::with_values(shape, dtype, CachedValues::Own, n, v);
        for exec in exec_matrix() {
            let [keys, other] = [&keys, &other].map(|case| case.run(&exec, n - 2, 2));
            assert_ne!(keys, other);
            let heads = keys.chunks(shape.head_dim);
            for (keys, other) in heads.zip(other.chunks(shape.head_dim)) {
                assert_eq!(keys[PART..], other[PART..], "{dtype:?} {exec:?}");
            }
        }
    }
}

/// What is in a page beyond the positions that a query attends to may be anything.
#[test]
fn later_keys_are_no_values() {
    for dtype in TYPES {
        let [mut case, _] = Case::of_keys(SHAPE, dtype, 100);
        let exec = Exec::new(2, Isa::detect());
        let before = case.run(&exec, 60, 30);
        let nan = vec![f32::NAN; SHAPE.n_kv_heads * SHAPE.head_dim];
        case.pages[1].store(&exec, 26, &nan, &[]).unwrap();
        assert_eq!(before, case.run(&exec, 60, 30), "{dtype:?}");
        let row = SHAPE.n_heads * SHAPE.head_dim;
        let after = case.run(&exec, 60, 40);
        assert!(after[30 * row..].iter().all(|x| x.is_nan()), "{dtype:?}");
    }
}

#[test]
fn extreme_scores_and_values_agree_on_every_path() {
    for dtype in TYPES {
        for factor in [1e-30f32, 1e-20, 1e-3, 300.0, 1e9, 1e30] {
            let mut case = Case::new(SHAPE, dtype, 300);
            for q in &mut case.q {
                *q *= factor;
            }
            let whole = case.run(&Exec::new(1, Isa::SCALAR), 280, 20);
            for exec in exec_matrix() {
                let got = case.run(&exec, 280, 20);
                assert!(
                    got.iter()
                        .zip(&whole)
                        .all(|(a, b)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())),
                    "{dtype:?} {factor}"
                );
            }
        }
    }
}

#[test]
fn later_positions_have_no_influence() {
    for dtype in TYPES {
        let case = Case::new(SHAPE, dtype, 100);
        let width = SHAPE.n_kv_heads * SHAPE.head_dim;
        let exec = Exec::new(2, Isa::detect());
        let before = case.run(&exec, 60, 40);
        let mut spoilt = Case { ..case };
        let nan = vec![f32::NAN; width];
        spoilt.pages[1].store(&exec, 26, &nan, &nan).unwrap();
        let after = spoilt.run(&exec, 60, 40);
        let row = SHAPE.n_heads * SHAPE.head_dim;
        // Position 90 is invalid; the 30 queries before it don't attend to it.
        assert_eq!(before[..30 * row], after[..30 * row]);
        assert!(after[30 * row..].iter().all(|x| x.is_nan()), "{dtype:?}");
    }
}

#[test]
fn bytes_hold_two_digits() {
    let exec = Exec::new(1, Isa::detect());
    let shape = AttentionShape {
        n_heads: 1,
        n_kv_heads: 1,
        head_dim: 40,
        ..SHAPE
    };
    // One position has all the weight, so its value comes back.
    for (i, factor) in [0.0, 1e-3, 1.0, 1000.0, 1e6].into_iter().enumerate() {
        let v: Vec<f32> = floats(40, i as u64).iter().map(|v| v * factor).collect();
        let mut page = KvPage::new(CacheType::Q8_0, CachedValues::Own, 1, 40);
        page.store(&exec, 0, &v, &v).unwrap();
        let mut out = vec![f32::NAN; 40];
        let scratch = &mut Scratch::default();
        let queries = Queries {
            shape: &shape,
            q: &[0.0; 40],
            pos: 0,
            sinks: None,
            is_causal: true,
        };
        attention(&exec, &queries, &[page], scratch, &mut out).unwrap();
        for (out, v) in out.iter().zip(&v) {
            assert!((out - v).abs() <= factor / 127.0 * 0.52, "{out}, not {v}");
        }
    }
}

#[test]
fn sizes_are_what_is_allocated() {
    assert_eq!(CacheType::F32.head_bytes(64), 256);
    assert_eq!(CacheType::F16.head_bytes(64), 128);
    assert_eq!(CacheType::Q8_0.head_bytes(64), 68);
    assert_eq!(CacheType::Q8_0.head_bytes(31), 62);
    assert_eq!(CacheType::Q8_0.head_bytes(32), 34);
    assert_eq!(CacheType::Q8_0.head_bytes(33), 38);
}

#[test]
fn wrong_shapes_are_refused() {
    let exec = Exec::new(1, Isa::SCALAR);
    let row = SHAPE.n_heads * SHAPE.head_dim;
    let (n_kv_heads, head_dim) = (SHAPE.n_kv_heads, SHAPE.head_dim);
    let of = |dtype, cached, head_dim| KvPage::new(dtype, cached, n_kv_heads, head_dim);
    let page = || of(CacheType::F16, CachedValues::Own, head_dim);
    let (q, mut out) = (vec![0.0; row], vec![0.0; row]);
    let mut run = |shape: &AttentionShape, q: &[f32], pos, pages: &[KvPage]| {
        let queries = Queries {
            shape,
            q,
            pos,
            sinks: None,
            is_causal: true,
        };
        attention(&exec, &queries, pages, &mut Scratch::default(), &mut out)
    };
    assert!(run(&SHAPE, &q, 3, &[page()]).is_ok());
    assert!(run(&SHAPE, &q, 64, &[page()]).is_err());
    assert!(run(&SHAPE, &q[1..], 0, &[page()]).is_err());
    let uneven = AttentionShape {
        n_kv_heads: 4,
        ..SHAPE
    };
    assert!(run(&uneven, &q, 0, &[page()]).is_err());
    let other = of(CacheType::F16, CachedValues::Own, head_dim + 1);
    assert!(run(&SHAPE, &q, 0, &[other]).is_err());
    let other = of(CacheType::F32, CachedValues::Own, head_dim);
    assert!(run(&SHAPE, &q, 64, &[page(), other]).is_err());
    let other = || of(CacheType::F16, CachedValues::Keys, head_dim);
    assert!(run(&SHAPE, &q, 64, &[page(), other()]).is_err());
    assert!(run(&SHAPE, &q, 64, &[other(), page()]).is_err());

    let mut page = page();
    let width = SHAPE.n_kv_heads * SHAPE.head_dim;
    let k = vec![0.0; 2 * width];
    assert!(page.store(&exec, 62, &k, &k).is_ok());
    assert!(page.store(&exec, 63, &k, &k).is_err());
    assert!(page.store(&exec, 99, &k, &k).is_err());
    assert!(page.store(&exec, 0, &k[1..], &k[1..]).is_err());
    assert!(page.store(&exec, 0, &k, &k[width..]).is_err());
    assert!(page.store(&exec, 0, &k, &[]).is_err());
    assert!(other().store(&exec, 0, &k, &k).is_err());
    assert!(other().store(&exec, 0, &k, &[]).is_ok());
}
