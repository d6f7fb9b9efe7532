//! Ternary weights, int8 activations, exact integer sums.

use super::rows_per_task;
use crate::Exec;
use crate::isa::{Isa, Level};
use crate::pool::SharedSlice;
use crate::quant::q8::quantize_row;
use crate::quant::ternary::{BLOCK, BLOCK_BYTES, row_bytes, unpack_row};
use crate::shape::{self, ShapeError, expect_len};

/// Most columns of a matrix: sums of codes, at most `2 · 128 · k` in magnitude, stay within i32.
const MAX_K: usize = (1 << 23) - BLOCK;

/// A ternary weight matrix `[n, k]` with one scale.
///
/// Codes are in the layout of [`crate::quant::ternary`], which is that of I2_S files where `k` fills
/// blocks.
#[derive(Debug, Clone, Copy)]
pub struct TernaryMatrix<'a> {
    n: usize,
    k: usize,
    scale: f32,
    codes: &'a [u8],
}

impl<'a> TernaryMatrix<'a> {
    /// A view of `codes` as `n` rows of `k` elements, each worth `scale · (code - 1)`.
    ///
    /// No code may be 3; [`crate::repack::check_codes`] tells. If one is, sums are wrong.
    ///
    /// Errors: [`ShapeError`] (in bytes) if `codes` isn't `n` rows of whole blocks; if `k` exceeds
    /// 2^23 - 128.
    pub fn new(n: usize, k: usize, scale: f32, codes: &'a [u8]) -> Result<Self, ShapeError> {
        expect_len("ternary matrix: columns", k.min(MAX_K), k)?;
        expect_len(
            "ternary matrix: bytes",
            row_bytes(k).saturating_mul(n),
            codes.len(),
        )?;
        Ok(TernaryMatrix { n, k, scale, codes })
    }

    /// Rows.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Elements of a row.
    pub fn k(&self) -> usize {
        self.k
    }

    /// Writes row `i` as floats into `out`, `[k]`. Panics if there is no such row.
    pub fn decode(&self, i: usize, out: &mut [f32]) {
        let mut trits = vec![0; self.k];
        unpack_row(self.row(i), &mut trits).expect("rows have this length");
        for (out, trit) in out.iter_mut().zip(trits) {
            *out = f32::from(trit) * self.scale;
        }
    }

    fn row(&self, i: usize) -> &'a [u8] {
        let len = row_bytes(self.k);
        &self.codes[i * len..][..len]
    }
}

/// Activation rows rounded to int8, as BitLinear layers take them.
///
/// Rows are padded with zeros to whole blocks of 128; each has its scale and the sum of its values.
#[derive(Debug, Default, Clone)]
pub struct QuantizedRows {
    k: usize,
    q: Vec<i8>,
    scales: Vec<f32>,
    sums: Vec<i32>,
}

impl QuantizedRows {
    /// Rounds `x`, `[m, k]`, row by row: `q = round(x · 127 / max|x|)`, ties to even.
    ///
    /// Errors: [`ShapeError`] if `x` isn't whole rows.
    pub fn quantize(&mut self, exec: &Exec, x: &[f32], k: usize) -> Result<(), ShapeError> {
        let m = shape::rows("quantize: activations", x.len(), k)?;
        let padded = k.next_multiple_of(BLOCK);
        self.k = k;
        self.q.clear();
        self.q.resize(m * padded, 0);
        self.scales.clear();
        self.scales.resize(m, 0.0);
        self.sums.clear();
        self.sums.resize(m, 0);
        let (q, scales, sums) = (
            SharedSlice::new(&mut self.q),
            SharedSlice::new(&mut self.scales),
            SharedSlice::new(&mut self.sums),
        );
        exec.pool.for_ranges(m, 8, |rows| {
            for t in rows {
                // SAFETY: each row belongs to one task.
                let (q, scale, sum) = unsafe {
                    (
                        q.range_mut(t * padded..t * padded + k),
                        scales.range_mut(t..t + 1),
                        sums.range_mut(t..t + 1),
                    )
                };
                (scale[0], sum[0]) = quantize(exec.isa, &x[t * k..][..k], q);
            }
        });
        Ok(())
    }

    /// Rows.
    pub fn m(&self) -> usize {
        self.scales.len()
    }

    /// The rounded values as floats, `[m, k]`: what a float kernel needs to compute the same layer.
    pub fn dequantize(&self, out: &mut [f32]) -> Result<(), ShapeError> {
        expect_len("dequantize: output", self.m() * self.k, out.len())?;
        let padded = self.k.next_multiple_of(BLOCK);
        for (t, out) in out.chunks_exact_mut(self.k.max(1)).enumerate() {
            for (out, &q) in out.iter_mut().zip(&self.q[t * padded..]) {
                *out = f32::from(q) / self.scales[t];
            }
        }
        Ok(())
    }
}

crate::isa::multiversion! {
    fn quantize(x: &[f32], q: &mut [i8]) -> (f32, i32) {
        quantize_row(x, q)
    }
}

/// Multiplications that a thread takes at a time.
const WORK_PER_TASK: usize = 1 << 18;

/// Activation rows whose sums with one row of weights are taken together.
pub(super) const TOKENS: usize = 4;

/// `out[t, i] = (w.scale / scale[t]) · Σ_j w[i, j] · q[t, j]`.
///
/// Shapes: `w` is `[n, k]`; `x` is `[m, k]`; `out` is `[m, n]`.
/// Errors: [`ShapeError`] if they don't fit one another.
/// Exactness: sums are integers, so every instruction set, thread count and batch gives the same
/// bits as the scalar kernel.
pub fn gemm_ternary_q8(
    exec: &Exec,
    w: TernaryMatrix<'_>,
    x: &QuantizedRows,
    out: &mut [f32],
) -> Result<(), ShapeError> {
    expect_len("ternary gemm: activations of a row", w.k, x.k)?;
    let m = x.m();
    expect_len("ternary gemm: output", m * w.n, out.len())?;
    let padded = w.k.next_multiple_of(BLOCK);
    let dot = kernel(exec.isa);
    let shared = SharedSlice::new(out);
    let grain = rows_per_task(w.k, m, WORK_PER_TASK);
    exec.pool.for_ranges(w.n, grain, |rows| {
        for first in (0..m).step_by(TOKENS) {
            let tokens = first..m.min(first + TOKENS);
            let q = &x.q[tokens.start * padded..tokens.end * padded];
            for i in rows.clone() {
                let mut sums = [0; TOKENS];
                // SAFETY: `kernel` picked it by an `Isa`, which this machine has been seen to offer.
                unsafe { dot(w.row(i), q, &mut sums[..tokens.len()]) };
                for (t, sum) in tokens.clone().zip(sums) {
                    let at = t * w.n + i;
                    // SAFETY: no other task has row `i`, so none writes this element.
                    let out = unsafe { shared.range_mut(at..at + 1) };
                    out[0] = (sum - x.sums[t]) as f32 * (w.scale / x.scales[t]);
                }
            }
        }
    });
    Ok(())
}

/// Sums of codes (0 to 2) times activations, one for each of the rows of `q`.
///
/// # Safety
/// The machine has the instruction set that [`kernel`] was asked for.
type Dot = unsafe fn(codes: &[u8], q: &[i8], sums: &mut [i32]);

fn kernel(isa: Isa) -> Dot {
    match isa.level() {
        Level::Baseline => dot_scalar,
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::Avx512 => super::ternary_avx2::dot,
        #[cfg(not(target_arch = "x86_64"))]
        Level::Avx2 | Level::Avx512 => dot_scalar,
    }
}

/// The reference. Shapes: `codes` is `[k / 4]`, `q` is `[sums.len(), k]`, `k` a multiple of 128.
fn dot_scalar(codes: &[u8], q: &[i8], sums: &mut [i32]) {
    let k = codes.len() * 4;
    for (t, sum) in sums.iter_mut().enumerate() {
        let blocks = codes.as_chunks::<BLOCK_BYTES>().0;
        let acts = q[t * k..][..k].as_chunks::<BLOCK>().0;
        *sum = blocks
            .iter()
            .zip(acts)
            .map(|(codes, acts)| {
                let mut sum = 0;
                for (group, acts) in acts.as_chunks::<BLOCK_BYTES>().0.iter().enumerate() {
                    for (code, &act) in codes.iter().zip(acts) {
                        sum += i32::from((code >> (6 - 2 * group)) & 3) * i32::from(act);
                    }
                }
                sum
            })
            .sum();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::{Random, exec_matrix, floats};

    fn random_codes(n: usize, k: usize) -> (Vec<u8>, Vec<i32>) {
        let mut random = Random::new(9);
        let padded = k.next_multiple_of(BLOCK);
        let mut codes = vec![0u8; n * padded / 4];
        let mut trits = Vec::new();
        for i in 0..n {
            for j in 0..padded {
                let code = if j < k { random.below(3) as u8 } else { 1 };
                if j < k {
                    trits.push(i32::from(code) - 1);
                }
                let (block, within) = (j / BLOCK, j % BLOCK);
                codes[i * padded / 4 + block * BLOCK_BYTES + within % 32] |=
                    code << (6 - 2 * (within / 32));
            }
        }
        (codes, trits)
    }

    #[test]
    fn every_path_matches_the_definition_bit_for_bit() {
        for (n, k, m) in [(1, 128, 1), (5, 100, 3), (40, 384, 6), (33, 4224, 9)] {
            let (codes, trits) = random_codes(n, k);
            let w = TernaryMatrix::new(n, k, 0.37, &codes).unwrap();
            let x = floats(m * k, 5);
            for exec in exec_matrix() {
                let mut rows = QuantizedRows::default();
                rows.quantize(&exec, &x, k).unwrap();
                let mut out = vec![f32::NAN; m * n];
                gemm_ternary_q8(&exec, w, &rows, &mut out).unwrap();
                let padded = k.next_multiple_of(BLOCK);
                for t in 0..m {
                    for i in 0..n {
                        let sum: i32 = (0..k)
                            .map(|j| trits[i * k + j] * i32::from(rows.q[t * padded + j]))
                            .sum();
                        let want = sum as f32 * (0.37 / rows.scales[t]);
                        assert_eq!(out[t * n + i].to_bits(), want.to_bits(), "{exec:?} {t} {i}");
                    }
                }
            }
        }
    }

    #[test]
    fn the_largest_sums_do_not_overflow() {
        // All codes 2 against all -128 is the worst case for kernels with 16-bit partial sums.
        let k = 128 * 64;
        let codes = vec![0b1010_1010; k / 4];
        for (value, q) in [(-128i8, -128i32), (127, 127)] {
            for isa in Isa::available() {
                let mut sums = [0; TOKENS];
                // SAFETY: this machine has `isa`.
                unsafe { kernel(isa)(&codes, &vec![value; k * TOKENS], &mut sums) };
                assert_eq!(sums, [2 * q * k as i32; TOKENS], "{isa}");
            }
        }
    }
}
