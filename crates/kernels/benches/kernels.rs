//! Matrix products and attention at the shapes of a 2B model. Bytes are those of the weights, or of
//! the cached keys and values: what decoding has to read.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::f16;
use sterna_format::DType;
use sterna_kernels::attention::{AttentionShape, KvPage, KvRows, attention};
use sterna_kernels::gemm::{
    BlockMatrix, QuantizedRows, TernaryMatrix, gemm_block_f32, gemm_ternary_q8,
};
use sterna_kernels::quant::encode_row;
use sterna_kernels::{Exec, Isa};

/// Width of the model, and of its feed-forward block.
const K: usize = 2560;
const N: usize = 6912;

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

/// One and two threads with the best instruction set, and one with the portable one.
fn execs() -> Vec<(String, Exec)> {
    let best = Isa::detect();
    let mut execs = vec![("scalar/1".into(), Exec::new(1, Isa::SCALAR))];
    for n in [1, 2] {
        execs.push((format!("{best}/{n}"), Exec::new(n, best)));
    }
    execs
}

fn ternary(c: &mut Criterion) {
    let codes: Vec<u8> = floats(N * K / 4)
        .iter()
        .map(|v| {
            // Four codes of 0 to 2, none of them 3.
            let bits = (v.to_bits() >> 2) as u8;
            bits & !((bits & 0x55) << 1)
        })
        .collect();
    let matrix = TernaryMatrix::new(N, K, 0.5, &codes).expect("the shape is right");
    for m in [1, 32] {
        let x = floats(m * K);
        let mut group = c.benchmark_group(format!("ternary-{N}x{K}-m{m}"));
        group.throughput(Throughput::Bytes(codes.len() as u64));
        let mut expected: Option<Vec<f32>> = None;
        for (name, exec) in execs() {
            let mut rows = QuantizedRows::default();
            rows.quantize(&exec, &x, K).expect("whole rows");
            let mut out = vec![0.0; m * N];
            let mut run = || gemm_ternary_q8(&exec, matrix, black_box(&rows), &mut out);
            run().expect("the shapes fit");
            assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
            let mut run = || gemm_ternary_q8(&exec, matrix, black_box(&rows), &mut out);
            group.bench_function(BenchmarkId::from_parameter(name), |b| b.iter(&mut run));
        }
    }
}

fn blocks(c: &mut Criterion) {
    for dtype in [DType::F16, DType::Q8_0, DType::Q6_K, DType::Q4_K] {
        let row_bytes = K / dtype.block_len() * dtype.block_bytes();
        let mut bytes = vec![0; N * row_bytes];
        let values = floats(K + N);
        for (i, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            encode_row(dtype, &values[i..i + K], row).expect("finite values in whole blocks");
        }
        let matrix = BlockMatrix::new(dtype, N, K, &bytes).expect("the shape is right");
        let x = floats(K);
        let mut group = c.benchmark_group(format!("{dtype}-{N}x{K}-m1"));
        group.throughput(Throughput::Bytes(bytes.len() as u64));
        let mut expected: Option<Vec<f32>> = None;
        for (name, exec) in execs() {
            let mut out = vec![0.0; N];
            gemm_block_f32(&exec, matrix, &x, &mut out).expect("the shapes fit");
            assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
            group.bench_function(BenchmarkId::from_parameter(name), |b| {
                b.iter(|| gemm_block_f32(&exec, matrix, black_box(&x), &mut out));
            });
        }
    }
}

fn decode_attention(c: &mut Criterion) {
    const PAGE_LEN: usize = 64;
    let shape = AttentionShape {
        n_heads: 20,
        n_kv_heads: 5,
        head_dim: 128,
        scale: 0.09,
        softcap: None,
        window: None,
    };
    let page = floats(shape.n_kv_heads * PAGE_LEN * shape.head_dim);
    let half: Vec<f16> = page.iter().map(|&v| f16::from_f32(v)).collect();
    let q = floats(shape.n_heads * shape.head_dim);
    for (kind, rows, size) in [
        ("f32", KvRows::F32(&page), 4),
        ("f16", KvRows::F16(&half), 2),
    ] {
        for n_ctx in [128, 4096] {
            let pages = vec![KvPage { k: rows, v: rows }; n_ctx / PAGE_LEN];
            let mut group = c.benchmark_group(format!("attention-{kind}-ctx{n_ctx}"));
            let bytes = 2 * n_ctx * shape.n_kv_heads * shape.head_dim * size;
            group.throughput(Throughput::Bytes(bytes as u64));
            let mut expected: Option<Vec<f32>> = None;
            for (name, exec) in execs() {
                let mut out = vec![0.0; q.len()];
                let mut run =
                    |q: &[f32]| attention(&exec, &shape, q, n_ctx - 1, &pages, PAGE_LEN, &mut out);
                run(&q).expect("the shapes fit");
                group.bench_function(BenchmarkId::from_parameter(name), |b| {
                    b.iter(|| run(black_box(&q)));
                });
                assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
            }
        }
    }
}

criterion_group!(benches, ternary, blocks, decode_attention);
criterion_main!(benches);
