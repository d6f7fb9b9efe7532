//! Matrix products at the shapes of a 2B model. Bytes are those of the weights: what decoding has to
//! read.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use sterna_format::DType;
use sterna_kernels::gemm::{
    BlockMatrix, InterleavedMatrix, Matrix, Rounding, Scratch, TernaryMatrix, linear,
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

/// One thread with every instruction set, and two with the best.
fn execs() -> Vec<(String, Exec)> {
    let one = |isa| (format!("{isa}/1"), Exec::new(1, isa));
    let mut execs: Vec<_> = Isa::available().map(one).collect();
    let best = Isa::detect();
    execs.push((format!("{best}/2"), Exec::new(2, best)));
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
    both_forms(c, "ternary", Matrix::Ternary(matrix), codes.len());
}

fn blocks(c: &mut Criterion) {
    for dtype in [
        DType::F16,
        DType::Q8_0,
        DType::Q6_K,
        DType::Q5_K,
        DType::Q4_K,
        DType::Q4_0,
        DType::PQ2_0,
    ] {
        let row_bytes = K / dtype.block_len() * dtype.block_bytes();
        let mut bytes = vec![0; N * row_bytes];
        let values = floats(K + N);
        for (i, row) in bytes.chunks_exact_mut(row_bytes).enumerate() {
            encode_row(dtype, &values[i..i + K], row).expect("finite values in whole blocks");
        }
        let matrix =
            BlockMatrix::new(dtype, N, K, Rounding::Blocks, &bytes).expect("the shape is right");
        both_forms(c, dtype.name(), Matrix::Blocks(matrix), bytes.len());
    }
}

/// Products with a matrix of `n_bytes` bytes, as it is and interleaved.
fn both_forms(c: &mut Criterion, name: &str, matrix: Matrix<'_>, n_bytes: usize) {
    const ROWS: [usize; 7] = [1, 2, 4, 8, 16, 128, 512];
    for m in ROWS {
        products(c, name, matrix, n_bytes, m);
    }
    let best = Exec::new(1, Isa::detect());
    if let Some(interleaved) = InterleavedMatrix::new(&best, &matrix) {
        let name = format!("{name} interleaved");
        for m in ROWS {
            products(c, &name, Matrix::Interleaved(&interleaved), n_bytes, m);
        }
    }
}

/// Products of `m` activation rows with a matrix of `n_bytes` bytes, on every instruction set.
fn products(c: &mut Criterion, name: &str, matrix: Matrix<'_>, n_bytes: usize, m: usize) {
    let x = floats(m * K);
    let mut group = c.benchmark_group(format!("{name}-{N}x{K}-m{m}"));
    group.throughput(if m == 1 {
        Throughput::Bytes(n_bytes as u64)
    } else {
        Throughput::Elements((N * K * m) as u64)
    });
    let mut expected: Option<Vec<f32>> = None;
    for (name, exec) in execs() {
        if let Matrix::Interleaved(w) = matrix
            && !InterleavedMatrix::is_faster(&exec, w.dtype(), K)
        {
            continue;
        }
        let mut out = vec![0.0; m * N];
        let mut scratch = Scratch::default();
        let mut run = || {
            let outputs = &mut [(matrix, &mut out[..])];
            linear(&exec, black_box(&x), K, &mut scratch, outputs).expect("the shapes fit");
        };
        let mut is_asked_for = false;
        group.bench_function(BenchmarkId::from_parameter(name), |b| {
            is_asked_for = true;
            b.iter(&mut run);
        });
        if is_asked_for {
            assert_eq!(*expected.get_or_insert_with(|| out.clone()), out);
        }
    }
}

criterion_group!(benches, ternary, blocks);
criterion_main!(benches);
