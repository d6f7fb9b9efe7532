//! The worst case of sums of integers: all activations ±127 and all weights at an end of their range, at every length.
//!
//! Kernels add products in lanes of 16 bits for as long as those hold them: one that does so for too long is wrong here,
//! and right on random numbers.

use half::f16;
use sterna_format::DType;
use sterna_kernels::gemm::{
    BlockMatrix, InterleavedMatrix, Matrix, Rounding, Scratch, TernaryMatrix, TernaryPacking,
    linear,
};
use sterna_kernels::quant::decode_row;
use sterna_kernels::{Exec, Isa};

/// Rows of weights: more than a kernel computes at a time, and a rest.
const N: usize = 19;

/// Rows of activations: one, few, more than a tile has.
const ROWS: [usize; 6] = [1, 2, 3, 5, 8, 17];

/// The largest quantized activation. The scale of activations that are all as large is 1.
const LARGEST: f32 = 127.0;

/// All multiples of 128 up to 4,096, so that every loop ends in every way, and around powers of two up to 32,768.
fn lengths() -> impl Iterator<Item = usize> {
    let long = [8_192, 16_384, 32_768].map(|k| [k - 256, k - 128, k, k + 128]);
    (256..=4_096).step_by(128).chain(long.concat())
}

fn levels() -> impl Iterator<Item = Exec> {
    Isa::available().map(|isa| Exec::new(1, isa))
}

fn product(exec: &Exec, w: Matrix<'_>, x: &[f32]) -> Vec<f32> {
    let mut out = vec![f32::NAN; x.len() / w.k() * w.n()];
    let outputs = &mut [(w, &mut out[..])];
    linear(exec, x, w.k(), &mut Scratch::default(), outputs).unwrap();
    out
}

/// Checks all sums of a product against `want`, which f32 can hold.
fn check(exec: &Exec, w: Matrix<'_>, x: &[f32], want: i64) {
    assert_eq!(want as f32 as i64, want, "a sum that f32 can't hold");
    let m = x.len() / w.k();
    for (at, got) in product(exec, w, x).into_iter().enumerate() {
        assert_eq!(got, want as f32, "{w:?} {exec:?}, {m} rows, at {at}");
    }
}

/// As [`check`], interleaved too where that is faster.
fn check_forms(exec: &Exec, w: Matrix<'_>, x: &[f32], want: i64) {
    check(exec, w, x, want);
    if let Some(w) = InterleavedMatrix::new(exec, &w) {
        check(exec, Matrix::Interleaved(&w), x, want);
    }
}

/// Rows of `k` trits that are all `trit`.
fn trits(packing: TernaryPacking, k: usize, trit: i8) -> Vec<u8> {
    let code = (trit + 1) as u8;
    let byte = code << 6 | code << 4 | code << 2 | code;
    let mut row = vec![byte; k.div_ceil(128) * 32];
    match packing {
        TernaryPacking::I2s => {
            // Past the end there are zeros, whose code is 1.
            for j in k..k.next_multiple_of(128) {
                let (at, shift) = (j / 128 * 32 + j % 32, 6 - 2 * (j % 128 / 32));
                row[at] = row[at] & !(3 << shift) | 1 << shift;
            }
        }
        // The scale of each block is that of the matrix.
        TernaryPacking::Tq20 => {
            let blocks = row.chunks_exact(64);
            let one = f16::ONE.to_le_bytes();
            row = blocks.flat_map(|codes| [codes, &one].concat()).collect();
        }
    }
    row.repeat(N)
}

fn check_ternary(packing: TernaryPacking, k: usize) {
    for trit in [1, -1] {
        let codes = trits(packing, k, trit);
        let w = TernaryMatrix::packed(packing, N, k, 1.0, &codes).unwrap();
        for exec in levels() {
            for m in ROWS {
                for sign in [1, -1] {
                    let x = vec![sign as f32 * LARGEST; m * k];
                    let want = i64::from(trit) * sign * LARGEST as i64 * k as i64;
                    check_forms(&exec, Matrix::Ternary(w), &x, want);
                }
            }
        }
    }
}

#[test]
fn ternary_sums_are_exact() {
    for k in lengths() {
        check_ternary(TernaryPacking::I2s, k);
    }
}

#[test]
fn ternary_sums_of_partial_blocks_are_exact() {
    for k in [257, 383, 1_000, 4_095, 4_097, 8_191, 32_767, 32_769] {
        check_ternary(TernaryPacking::I2s, k);
    }
}

#[test]
fn ternary_sums_of_blocks_with_scales_are_exact() {
    for k in lengths().filter(|k| k.is_multiple_of(256)) {
        check_ternary(TernaryPacking::Tq20, k);
    }
}

/// Types whose sums are integers within a block, and where in a block scales are.
const BLOCKS: [(DType, &[usize]); 12] = [
    (DType::Q2_K, &[80, 82]),
    (DType::Q3_K, &[108]),
    (DType::Q4_K, &[0, 2]),
    (DType::Q5_K, &[0, 2]),
    (DType::Q6_K, &[208]),
    (DType::Q4_0, &[0]),
    (DType::Q5_0, &[0]),
    (DType::Q8_0, &[0]),
    (DType::Q1_0, &[0]),
    (DType::Q2_0, &[0]),
    (DType::Q2_0_G128, &[0]),
    (DType::PQ2_0, &[0]),
];

/// Rows of blocks that are nothing but `byte`, with scales of 1.
fn blocks(dtype: DType, scales: &[usize], k: usize, byte: u8) -> Vec<u8> {
    let mut block = vec![byte; dtype.block_bytes()];
    for &at in scales {
        block[at..at + 2].copy_from_slice(&f16::ONE.to_le_bytes());
    }
    block.repeat(N * k / dtype.block_len())
}

#[test]
fn sums_of_blocks_are_exact() {
    for (dtype, scales) in BLOCKS {
        for byte in [0xff, 0x00, 0x7f, 0x80] {
            for k in lengths().filter(|k| k.is_multiple_of(256)) {
                let bytes = blocks(dtype, scales, k, byte);
                let stored = BlockMatrix::new(dtype, N, k, Rounding::Blocks, &bytes).unwrap();
                let mut weights = vec![f32::NAN; k];
                decode_row(dtype, &bytes[..bytes.len() / N], &mut weights).unwrap();
                // Signs change every 256 elements, so that sums of all blocks stay exact in f32.
                let signs = |j: usize| {
                    if (j / 256).is_multiple_of(2) {
                        1.0
                    } else {
                        -1.0
                    }
                };
                for sign in [1.0, -1.0] {
                    let row: Vec<_> = (0..k).map(|j| sign * signs(j) * LARGEST).collect();
                    let products = row.iter().zip(&weights);
                    let want = products.map(|(x, w)| *x as i64 * *w as i64).sum();
                    for exec in levels() {
                        for m in ROWS {
                            let x = row.repeat(m);
                            check_forms(&exec, Matrix::Blocks(stored), &x, want);
                        }
                    }
                }
            }
        }
    }
}
