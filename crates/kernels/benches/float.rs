//! Products with float weights at the shape of a 1B model, on every instruction set. Bytes are those
//! of the weights, elements are multiplications. And what is asked of the logits of a large vocabulary.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sterna_format::DType;
use sterna_kernels::gemm::{BlockMatrix, Matrix, Rounding, Scratch, linear};
use sterna_kernels::quant::encode_row;
use sterna_kernels::{Exec, Isa, logits};

const K: usize = 2048;
const N: usize = 8192;

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

fn products(c: &mut Criterion) {
    for dtype in [DType::F16, DType::BF16, DType::F32, DType::Q4_1] {
        let row_bytes = K / dtype.block_len() * dtype.block_bytes();
        let mut bytes = vec![0; N * row_bytes];
        let values = floats(K + N);
        for (i, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            encode_row(dtype, &values[i..i + K], row).expect("finite values in whole blocks");
        }
        let matrix =
            BlockMatrix::new(dtype, N, K, Rounding::Blocks, &bytes).expect("the shape is right");
        for m in [1, 4, 128] {
            let x = floats(m * K);
            let mut group = c.benchmark_group(format!("{dtype}-{N}x{K}-m{m}"));
            group.sample_size(10).throughput(if m == 1 {
                Throughput::Bytes(bytes.len() as u64)
            } else {
                Throughput::Elements((N * K * m) as u64)
            });
            let mut expected: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let exec = Exec::new(1, isa);
                let mut out = vec![0.0; m * N];
                let mut scratch = Scratch::default();
                let mut run = || {
                    let outputs = &mut [(Matrix::Blocks(matrix), &mut out[..])];
                    linear(&exec, black_box(&x), K, &mut scratch, outputs).expect("the shapes fit");
                };
                run();
                group.bench_function(BenchmarkId::from_parameter(isa), |b| b.iter(&mut run));
                assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
            }
        }
    }
}

fn vocabulary(c: &mut Criterion) {
    let x = floats(128_256);
    let mut group = c.benchmark_group("logits-128256");
    group.throughput(Throughput::Elements(x.len() as u64));
    group.bench_function("largest", |b| b.iter(|| logits::largest(black_box(&x))));
    group.bench_function("best-20", |b| b.iter(|| logits::best(black_box(&x), 20)));
    group.bench_function("log-sum", |b| {
        b.iter(|| logits::log_sum(black_box(&x), 1.0))
    });
}

criterion_group!(benches, products, vocabulary);
criterion_main!(benches);
