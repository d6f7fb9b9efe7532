//! How fast rows are decoded and encoded, and activations quantised.
//!
//! Decoding is reported in stored bytes per second, to be compared with the bandwidth of memory;
//! encoding and activations in elements per second. Each result is checked before it is timed.

use std::hint::black_box;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use sterna_format::DType;
use sterna_kernels::quant::ternary::{I2sLayout, Layout, Source, row_bytes};
use sterna_kernels::quant::{
    Encoder, QuantError, TernaryScales, decode_row, decode_rows, encode_row, q8,
};
use sterna_kernels::{Exec, Isa, repack};

/// Elements of a row: a usual model width.
const K: usize = 4096;

const DECODED: [DType; 19] = [
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q8_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
    DType::TQ1_0,
    DType::TQ2_0,
    DType::I2_S,
    DType::Q1_0,
    DType::Q2_0,
    DType::PQ2_0,
    DType::MXFP4,
];

const ENCODED: [DType; 10] = [
    DType::F16,
    DType::BF16,
    DType::Q4_0,
    DType::Q8_0,
    DType::TQ2_0,
    DType::Q2_K,
    DType::Q3_K,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

/// Values that look like weights: the sum of four uniform ones, from a linear congruence.
fn weights(n: usize) -> Vec<f32> {
    let mut state = 1u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32 - 0.5
    };
    (0..n)
        .map(|_| 0.02 * (uniform() + uniform() + uniform() + uniform()))
        .collect()
}

fn encoded_len(dtype: DType) -> usize {
    K / dtype.block_len() * dtype.block_bytes()
}

fn decode(c: &mut Criterion) {
    let mut group = c.benchmark_group("decode");
    for dtype in DECODED {
        let mut bytes = vec![0x55; encoded_len(dtype)];
        let mut out = vec![0.0; K];
        if dtype != DType::I2_S {
            encode_row(dtype, &weights(K), &mut bytes).unwrap();
        }
        decode_row(dtype, &bytes, &mut out).unwrap();
        let mean = out.iter().map(|x| x.abs()).sum::<f32>() / K as f32;
        assert!(
            dtype == DType::I2_S || (0.003..0.03).contains(&mean),
            "{dtype}: {mean}"
        );
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        group.bench_function(dtype.name(), |b| {
            b.iter(|| decode_row(dtype, black_box(&bytes), black_box(&mut out)).unwrap())
        });
    }
    group.finish();
}

/// Matrices with one thread and every instruction set.
fn encode(c: &mut Criterion) {
    const N: usize = 16;
    let values = weights(N * K);
    for isa in Isa::available() {
        let exec = Exec::new(1, isa);
        type Made = fn(DType, usize) -> Result<Encoder, QuantError>;
        for (name, made) in [("quick", Encoder::quick as Made), ("search", Encoder::new)] {
            let mut group = c.benchmark_group(format!("encode-{name}-{isa}"));
            group
                .sample_size(10)
                .throughput(Throughput::Elements((N * K) as u64));
            for dtype in ENCODED {
                let encoder = made(dtype, K).unwrap();
                let mut bytes = vec![0; encoder.bytes_of(values.len()).unwrap()];
                let mut back = vec![0.0; values.len()];
                encoder.encode(&exec, 0, &values, &mut bytes).unwrap();
                decode_row(dtype, &bytes, &mut back).unwrap();
                let far = values.iter().zip(&back).any(|(a, b)| (a - b).abs() > 0.02);
                assert!(dtype == DType::TQ2_0 || !far, "{dtype}");
                group.bench_function(dtype.name(), |b| {
                    b.iter(|| {
                        let out = black_box(&mut bytes);
                        encoder.encode(&exec, 0, black_box(&values), out).unwrap();
                    })
                });
            }
            group.finish();
        }
    }
}

/// What a conversion does with every weight besides: widening, and telling and packing trits.
fn converted(c: &mut Criterion) {
    const N: usize = 64;
    let trits: Vec<f32> = weights(N * K).iter().map(|w| w.signum() * 0.375).collect();
    for isa in Isa::available() {
        let exec = Exec::new(1, isa);
        let mut group = c.benchmark_group(format!("convert-{isa}"));
        group
            .sample_size(10)
            .throughput(Throughput::Elements((N * K) as u64));
        for dtype in [
            DType::BF16,
            DType::F16,
            DType::F32,
            DType::Q4_K,
            DType::TQ2_0,
        ] {
            let encoder = Encoder::quick(dtype, K).unwrap();
            let mut bytes = vec![0; encoder.bytes_of(trits.len()).unwrap()];
            encoder.encode(&exec, 0, &trits, &mut bytes).unwrap();
            let mut rows = vec![0.0; trits.len()];
            decode_rows(&exec, dtype, &bytes, &mut rows).unwrap();
            assert!(dtype == DType::Q4_K || rows == trits, "{dtype}");
            group.bench_function(format!("decode-{dtype}"), |b| {
                b.iter(|| {
                    decode_rows(&exec, dtype, black_box(&bytes), black_box(&mut rows)).unwrap();
                })
            });
        }
        group.bench_function("ternary-scales", |b| {
            b.iter(|| {
                let scales = TernaryScales::of_rows(&exec, K, black_box(&trits)).unwrap();
                assert_eq!(scales.one(), Some(0.375));
            })
        });
        let mut codes = vec![0; trits.len() / 4];
        group.bench_function("encode-I2_S", |b| {
            b.iter(|| {
                let out = black_box(&mut codes);
                Encoder::i2_s(K, 0.375)
                    .encode(&exec, 0, black_box(&trits), out)
                    .unwrap();
            })
        });
        group.finish();
    }
}

fn activations(c: &mut Criterion) {
    let mut group = c.benchmark_group("activations");
    group.throughput(Throughput::Elements(K as u64));
    let x = weights(K);
    let mut q = vec![0; K];
    let (scale, sum) = q8::quantize_row(&x, &mut q);
    assert!(scale > 0.0 && sum == q.iter().map(|&q| i32::from(q)).sum::<i32>());
    group.bench_function("q8", |b| {
        b.iter(|| q8::quantize_row(black_box(&x), black_box(&mut q)))
    });
    group.finish();
}

fn repacked(c: &mut Criterion) {
    const N: usize = 64;
    let mut group = c.benchmark_group("repack");
    group.throughput(Throughput::Elements((N * K) as u64));
    let bytes = vec![0x55; N * K / 4];
    for (name, layout) in [
        ("i2s-block128", Layout::I2S(I2sLayout::Block128)),
        ("i2s-block64", Layout::I2S(I2sLayout::Block64)),
        ("i2s-rows4", Layout::I2S(I2sLayout::Rows4)),
        ("hugging-face", Layout::HuggingFace),
    ] {
        let source = Source::new(layout, N, K, &bytes).unwrap();
        group.bench_function(name, |b| {
            b.iter_batched_ref(
                || vec![0; N * row_bytes(K)],
                |out| {
                    source.repack_rows(0..N, out).unwrap();
                    assert_eq!(out[0], 0x55);
                },
                BatchSize::LargeInput,
            )
        });
    }
    group.finish();
}

/// The look at every code that tells whether weights can be used where the file has them.
fn check(c: &mut Criterion) {
    const N: usize = 2048;
    let exec = Exec::new(1, Isa::detect());
    let mut group = c.benchmark_group("check");
    let mut block = [0x92; 66];
    block[64..].copy_from_slice(&[0, 0x38]);
    let blocks = block.repeat(N * K / 256);
    group.throughput(Throughput::Bytes(blocks.len() as u64));
    group.bench_function("TQ2_0", |b| {
        b.iter(|| assert_eq!(repack::common_tq2_0_scale(&exec, &blocks), Some(0.5)))
    });
    let codes = vec![0x92; N * row_bytes(K)];
    group.throughput(Throughput::Bytes(codes.len() as u64));
    group.bench_function("I2_S", |b| {
        b.iter(|| repack::check_codes(&exec, N, K, &codes).unwrap())
    });
    group.finish();
}

criterion_group!(
    benches,
    decode,
    encode,
    converted,
    activations,
    repacked,
    check
);
criterion_main!(benches);
