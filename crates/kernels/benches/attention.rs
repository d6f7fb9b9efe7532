//! Attention at the shapes of Llama 3.2 1B, BitNet 2B and DeepSeek V2 Lite, one layer; of the last with values of
//! their own, and with keys as values.
//!
//! Decoding is reported in bytes of cached keys and values per second, to be compared with the
//! bandwidth of memory (a cache of 4,096 positions of all layers doesn't stay in a processor's own
//! caches, so each layer here takes its turn); prefill in multiplications per second.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sterna_kernels::attention::{
    AttentionShape, CacheType, CachedValues, KvPage, PAGE_LEN, Queries, Scratch, attention,
};
use sterna_kernels::{Exec, Isa};

const SHAPES: [(&str, usize, AttentionShape, CachedValues); 4] = [
    ("1b", 16, shape(32, 8, 64), CachedValues::Own),
    ("2b", 30, shape(20, 5, 128), CachedValues::Own),
    ("latent-own", 8, shape(16, 1, 576), CachedValues::Own),
    ("latent", 8, shape(16, 1, 576), CachedValues::Keys),
];

const TYPES: [(&str, CacheType); 3] = [
    ("f32", CacheType::F32),
    ("f16", CacheType::F16),
    ("q8_0", CacheType::Q8_0),
];

const fn shape(n_heads: usize, n_kv_heads: usize, head_dim: usize) -> AttentionShape {
    AttentionShape {
        n_heads,
        n_kv_heads,
        head_dim,
        scale: 0.1,
        softcap: None,
        window: None,
    }
}

/// Values within ±1, the same every time.
fn floats(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// Pages of `n_layers` layers that hold `n_ctx` positions.
fn cache(
    shape: &AttentionShape,
    cached: CachedValues,
    dtype: CacheType,
    n_layers: usize,
    n_ctx: usize,
) -> Vec<Vec<KvPage>> {
    let exec = Exec::new(1, Isa::detect());
    let (heads, dim) = (shape.n_kv_heads, shape.head_dim);
    let mut page = KvPage::new(dtype, cached, heads, dim);
    let rows = floats(PAGE_LEN * heads * dim);
    let values = match cached {
        CachedValues::Own => &rows[..],
        CachedValues::Keys => &[],
    };
    page.store(&exec, 0, &rows, values).expect("a page's rows");
    vec![vec![page; n_ctx.div_ceil(PAGE_LEN)]; n_layers]
}

/// Every instruction set on one thread, and the widest on two.
fn execs() -> Vec<(String, Exec)> {
    let one = Isa::available().map(|isa| (format!("{isa}/1"), Exec::new(1, isa)));
    let best = Isa::detect();
    one.chain([(format!("{best}/2"), Exec::new(2, best))])
        .filter(|(name, _)| !name.starts_with("avxvnni"))
        .collect()
}

fn decode(c: &mut Criterion) {
    for (name, n_layers, shape, cached) in SHAPES {
        let q = floats(shape.n_heads * shape.head_dim);
        for (dtype_name, dtype) in TYPES {
            for n_ctx in [128, 1024, 4096] {
                let layers = cache(&shape, cached, dtype, n_layers, n_ctx);
                let n_heads = cached.per_head() * shape.n_kv_heads;
                let bytes = n_ctx * n_heads * dtype.head_bytes(shape.head_dim);
                let mut group = c.benchmark_group(format!("decode-{name}-{dtype_name}-{n_ctx}"));
                group.throughput(Throughput::Bytes((bytes * n_layers) as u64));
                let mut expected: Option<Vec<f32>> = None;
                for (isa, exec) in execs() {
                    let mut out = vec![0.0; q.len()];
                    let mut scratch = Scratch::default();
                    let mut run = |q: &[f32]| {
                        for pages in &layers {
                            let queries = Queries {
                                shape: &shape,
                                q,
                                pos: n_ctx - 1,
                                sinks: None,
                                is_causal: true,
                            };
                            attention(&exec, &queries, pages, &mut scratch, &mut out)
                                .expect("the shapes fit");
                        }
                    };
                    run(&q);
                    group.bench_function(BenchmarkId::from_parameter(isa), |b| {
                        b.iter(|| run(black_box(&q)));
                    });
                    assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
                }
            }
        }
    }
}

fn prefill(c: &mut Criterion) {
    const N: usize = 512;
    for (name, _, shape, cached) in SHAPES {
        let q = floats(N * shape.n_heads * shape.head_dim);
        for (dtype_name, dtype) in TYPES {
            let pages = &cache(&shape, cached, dtype, 1, N)[0];
            let mut group = c.benchmark_group(format!("prefill-{name}-{dtype_name}-{N}"));
            // Scores and weighted sums, of half of all pairs.
            group.throughput(Throughput::Elements((q.len() * (N + 1)) as u64));
            let mut expected: Option<Vec<f32>> = None;
            for (isa, exec) in execs() {
                let mut out = vec![0.0; q.len()];
                let mut scratch = Scratch::default();
                let mut run = |q: &[f32]| {
                    let queries = Queries {
                        shape: &shape,
                        q,
                        pos: 0,
                        sinks: None,
                        is_causal: true,
                    };
                    attention(&exec, &queries, pages, &mut scratch, &mut out)
                        .expect("the shapes fit");
                };
                run(&q);
                group.bench_function(BenchmarkId::from_parameter(isa), |b| {
                    b.iter(|| run(black_box(&q)));
                });
                assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_secs(1));
    targets = decode, prefill
}
criterion_main!(benches);
