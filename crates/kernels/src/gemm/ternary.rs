//! Ternary weights, int8 activations, exact integer sums.

use std::ops::Range;

use super::Columns;
use super::activations::QuantizedRows;
use crate::isa::{Isa, Level};
use crate::quant::ternary::{BLOCK, BLOCK_BYTES, row_bytes, unpack_row};
use crate::shape::{ShapeError, expect_len};

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

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn k(&self) -> usize {
        self.k
    }

    pub(super) fn row_bytes(&self) -> usize {
        row_bytes(self.k)
    }

    /// Writes row `i` as floats into `out`, `[k]`. Panics if there is no such row.
    pub(super) fn decode(&self, i: usize, out: &mut [f32]) {
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

/// Activation rows whose sums with one row of weights are taken together.
pub(super) const TOKENS: usize = 4;

/// `out[t, i] = (w.scale / scale[t]) · Σ_j w[i, j] · q[t, j]` for the rows `i` of the weights.
///
/// Exactness: sums are integers, so every instruction set, thread count and batch gives the same
/// bits as the scalar kernel.
pub(super) fn multiply(
    isa: Isa,
    w: &TernaryMatrix<'_>,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    let dot = kernel(isa);
    for t in 0..x.m() {
        let act = x.row(t);
        let q = &act.q[..w.row_bytes() * 4];
        // SAFETY: no other task has these rows, so none writes these columns.
        let out = unsafe { out.row_mut(t, rows.clone()) };
        for (out, i) in out.iter_mut().zip(rows.clone()) {
            let mut sum = [0];
            // SAFETY: `kernel` picked it by an `Isa`, which this machine has been seen to offer.
            unsafe { dot(w.row(i), q, &mut sum) };
            *out = (sum[0] - act.sum) as f32 * (w.scale / act.scales[0]);
        }
    }
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
        Level::Avx2 | Level::AvxVnni | Level::Avx512 => super::ternary_avx2::dot,
        #[cfg(not(target_arch = "x86_64"))]
        Level::Avx2 | Level::AvxVnni | Level::Avx512 => dot_scalar,
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
    use super::super::activations::Scaling;
    use super::super::{Matrix, Scratch, linear};
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
                rows.quantize(&exec, Scaling::Row, &x, k).unwrap();
                let mut out = vec![f32::NAN; m * n];
                let outputs = &mut [(Matrix::Ternary(w), &mut out[..])];
                linear(&exec, &x, k, &mut Scratch::default(), outputs).unwrap();
                for t in 0..m {
                    for i in 0..n {
                        let sum: i32 = (0..k)
                            .map(|j| trits[i * k + j] * i32::from(rows.row(t).q[j]))
                            .sum();
                        let want = sum as f32 * (0.37 / rows.row(t).scales[0]);
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
