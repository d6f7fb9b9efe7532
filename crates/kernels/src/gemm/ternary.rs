//! Ternary weights, int8 activations, exact integer sums.

use std::ops::Range;

use super::activations::QuantizedRows;
use super::{Columns, panel};
use crate::isa::{Isa, Level};
use crate::quant::ternary::{BLOCK, BLOCK_BYTES, row_bytes};
use crate::shape::{ShapeError, expect_len};

/// Maximum columns of a matrix: sums of codes, at most `2 · 128 · k` in magnitude, stay within i32.
const MAX_K: usize = (1 << 23) - BLOCK;

/// A ternary weight matrix `[n, k]` with one scale.
#[derive(Debug, Clone, Copy)]
pub struct TernaryMatrix<'a> {
    n: usize,
    k: usize,
    scale: f32,
    packing: TernaryPacking,
    codes: &'a [u8],
}

/// How the codes of a row are packed.
///
/// In all of them 32 bytes hold 128 codes, byte `p` those of elements `p`, `32 + p`, `64 + p` and
/// `96 + p`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TernaryPacking {
    /// Nothing but codes, the first in the highest bits: [`crate::quant::ternary`]'s layout, which is
    /// that of I2_S files where `k` fills blocks.
    I2s,
    /// The first code in the lowest bits, and the scale after every 256: blocks of TQ2_0.
    Tq20,
}

impl TernaryPacking {
    const fn row_bytes(self, k: usize) -> usize {
        match self {
            TernaryPacking::I2s => row_bytes(k),
            TernaryPacking::Tq20 => k / PAIR * Tq20::PAIR_STRIDE,
        }
    }

    /// The bytes of a row that have the codes of `columns`, whole pairs of blocks or up to its end.
    pub(super) const fn bytes(self, columns: &Range<usize>) -> Range<usize> {
        self.row_bytes(columns.start)..self.row_bytes(columns.end)
    }
}

/// Elements of two blocks: as many codes as fit in a wide register.
pub(super) const PAIR: usize = 2 * BLOCK;

/// A [`TernaryPacking`] known when a kernel is compiled.
pub(super) trait Packed {
    /// Bytes from one pair of blocks to the next; the codes are the first 64 of them.
    const PAIR_STRIDE: usize;
    /// True if the first of the four codes of a byte is in the lowest bits, not the highest.
    const LOWEST_FIRST: bool;

    /// Where the codes of `block` begin in a row.
    #[inline(always)]
    fn offset(block: usize) -> usize {
        block / 2 * Self::PAIR_STRIDE + block % 2 * BLOCK_BYTES
    }

    /// The blocks of a row: pairs, and a single one at the end if the number is odd.
    fn blocks(row: &[u8]) -> impl Iterator<Item = &[u8; BLOCK_BYTES]> {
        row.chunks(Self::PAIR_STRIDE)
            .flat_map(|pair| pair.as_chunks().0)
    }
}

/// [`TernaryPacking::I2s`].
pub(super) struct I2s;

impl Packed for I2s {
    const PAIR_STRIDE: usize = 2 * BLOCK_BYTES;
    const LOWEST_FIRST: bool = false;
}

/// [`TernaryPacking::Tq20`].
pub(super) struct Tq20;

impl Packed for Tq20 {
    const PAIR_STRIDE: usize = 2 * BLOCK_BYTES + 2;
    const LOWEST_FIRST: bool = true;
}

impl<'a> TernaryMatrix<'a> {
    /// A view of `codes`, in the layout of [`crate::quant::ternary`], as `n` rows of `k` elements, each equal
    /// to `scale · (code - 1)`.
    ///
    /// No code may be 3, see [`crate::repack::check_codes`]. If one is, sums are wrong.
    ///
    /// Errors: [`ShapeError`] (in bytes) if `codes` isn't `n` rows of whole blocks; if `k` exceeds
    /// 2^23 - 128.
    pub fn new(n: usize, k: usize, scale: f32, codes: &'a [u8]) -> Result<Self, ShapeError> {
        Self::packed(TernaryPacking::I2s, n, k, scale, codes)
    }

    /// A view of codes in any packing.
    ///
    /// For blocks of TQ2_0 the caller has checked that all have this `scale`: their own are not read.
    ///
    /// Errors: as [`TernaryMatrix::new`]; [`ShapeError`] too if blocks of TQ2_0 don't fill rows.
    pub fn packed(
        packing: TernaryPacking,
        n: usize,
        k: usize,
        scale: f32,
        codes: &'a [u8],
    ) -> Result<Self, ShapeError> {
        if packing == TernaryPacking::Tq20 {
            expect_len("TQ2_0 matrix: columns", k.next_multiple_of(PAIR), k)?;
        }
        expect_len("ternary matrix: columns", k.min(MAX_K), k)?;
        let expected = packing.row_bytes(k).saturating_mul(n);
        expect_len("ternary matrix: bytes", expected, codes.len())?;
        Ok(TernaryMatrix {
            n,
            k,
            scale,
            packing,
            codes,
        })
    }

    pub(super) fn n(&self) -> usize {
        self.n
    }

    pub(super) fn k(&self) -> usize {
        self.k
    }

    pub(super) fn bytes(&self) -> &[u8] {
        self.codes
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.packing.row_bytes(self.k)
    }

    pub(super) fn packing(&self) -> TernaryPacking {
        self.packing
    }

    /// Block `b` of row `i` as [`crate::quant::ternary`] has it. Panics if there is none.
    pub(super) fn block(&self, i: usize, b: usize) -> [u8; BLOCK_BYTES] {
        fn block<P: Packed>(row: &[u8], b: usize) -> [u8; BLOCK_BYTES] {
            let block = row[P::offset(b)..].first_chunk();
            *block.expect("rows have whole blocks")
        }
        match self.packing {
            TernaryPacking::I2s => block::<I2s>(self.row(i), b),
            TernaryPacking::Tq20 => block::<Tq20>(self.row(i), b).map(|codes| {
                // The four codes of a byte, the other way round.
                let halves = codes.rotate_left(4);
                (halves & 0x33) << 2 | halves >> 2 & 0x33
            }),
        }
    }

    pub(super) fn scale(&self) -> f32 {
        self.scale
    }

    /// Columns of whole blocks.
    pub(super) fn padded_k(&self) -> usize {
        self.k.next_multiple_of(BLOCK)
    }

    /// Writes row `i` as floats into `out`, `[k]`. Panics if there is no such row.
    pub(super) fn decode(&self, i: usize, out: &mut [f32]) {
        match self.packing {
            TernaryPacking::I2s => self.decode_packed::<I2s>(i, out),
            TernaryPacking::Tq20 => self.decode_packed::<Tq20>(i, out),
        }
    }

    fn decode_packed<P: Packed>(&self, i: usize, out: &mut [f32]) {
        for (out, block) in out.chunks_mut(BLOCK).zip(P::blocks(self.row(i))) {
            for (out, code) in out.iter_mut().zip(unpack::<P>(block).as_flattened()) {
                *out = (f32::from(*code) - 1.0) * self.scale;
            }
        }
    }

    /// Packed row `i`. Panics if there is no such row.
    pub(super) fn row(&self, i: usize) -> &'a [u8] {
        let len = self.row_bytes();
        &self.codes[i * len..][..len]
    }
}

/// The codes of a block, in order.
#[inline(always)]
pub(super) fn unpack<P: Packed>(block: &[u8; BLOCK_BYTES]) -> [[u8; BLOCK_BYTES]; 4] {
    let mut groups = [
        block.map(|byte| byte >> 6),
        block.map(|byte| byte >> 4 & 3),
        block.map(|byte| byte >> 2 & 3),
        block.map(|byte| byte & 3),
    ];
    if P::LOWEST_FIRST {
        groups.reverse();
    }
    groups
}

/// Activation rows that are multiplied directly with the packed weights: up to that, unpacking them into
/// panels costs more than it saves. (From the cache, panels are faster with seven and eight rows, too; from memory they
/// aren't.)
const SMALL_BATCH: usize = 8;

/// Maximum rows of weights and of activations that a kernel takes at a time.
pub(super) const TILE: usize = 4;

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
    if x.m() > SMALL_BATCH {
        return panel::multiply_ternary(isa, w, rows, x, out);
    }
    if x.m() == 0 {
        return;
    }
    let dots = kernel(isa, w.packing);
    let k = w.padded_k();
    let acts: [_; SMALL_BATCH] = std::array::from_fn(|t| x.row(t.min(x.m() - 1)));
    let q = acts.map(|act| &act.q[..k]);
    let scales = acts.map(|act| w.scale / act.scales[0]);
    for first in rows.clone().step_by(TILE) {
        // Past the end the last row is computed again; that costs less than a kernel for each rest.
        let tile = std::array::from_fn(|r| w.row((first + r).min(rows.end - 1)));
        let columns = first..rows.end.min(first + TILE);
        for t in (0..x.m()).step_by(TILE) {
            let tokens = t..x.m().min(t + TILE);
            let mut sums = [[0; TILE]; TILE];
            // SAFETY: `kernel` picked it by an `Isa`, which this machine has been seen to offer.
            unsafe { dots(&tile, &q[tokens.clone()], &mut sums) };
            for (t, sums) in tokens.zip(sums) {
                // SAFETY: no other task has these rows, so none writes these columns.
                let out = unsafe { out.row_mut(t, columns.clone()) };
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = (sum - acts[t].sum) as f32 * scales[t];
                }
            }
        }
    }
}

/// `sums[t][r] = Σ_j code[r][j] · q[t][j]`, with codes from 0 to 2.
///
/// Shapes: packed rows of `k` elements, `k` whole blocks; one to four rows of `k` activations.
///
/// # Safety
/// The machine has the instruction set that [`kernel`] was asked for.
type Dots = unsafe fn(rows: &[&[u8]; TILE], q: &[&[i8]], sums: &mut [[i32; TILE]; TILE]);

fn kernel(isa: Isa, packing: TernaryPacking) -> Dots {
    fn packed<P: Packed>(isa: Isa) -> Dots {
        match isa.level() {
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => super::ternary_x86::dots_avx2::<P>,
            #[cfg(target_arch = "x86_64")]
            Level::AvxVnni => super::ternary_x86::dots_avxvnni::<P>,
            #[cfg(target_arch = "x86_64")]
            Level::Avx512 | Level::Amx => super::ternary_x86::dots_avx512::<P>,
            #[cfg(target_arch = "aarch64")]
            Level::Neon => super::ternary_neon::dots::<P>,
            #[cfg(target_arch = "aarch64")]
            Level::NeonDot => super::ternary_neon::dots_dot::<P>,
            #[cfg(target_arch = "aarch64")]
            Level::I8mm | Level::Sme => super::ternary_neon::dots_i8mm::<P>,
            #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
            Level::Simd128 => super::ternary_wasm::dots::<P>,
            #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
            Level::Relaxed => super::ternary_wasm::dots_relaxed::<P>,
            Level::Baseline => dots_scalar::<P>,
        }
    }
    match packing {
        TernaryPacking::I2s => packed::<I2s>(isa),
        TernaryPacking::Tq20 => packed::<Tq20>(isa),
    }
}

/// The reference.
fn dots_scalar<P: Packed>(rows: &[&[u8]; TILE], q: &[&[i8]], sums: &mut [[i32; TILE]; TILE]) {
    for (sums, q) in sums.iter_mut().zip(q) {
        for (sum, row) in sums.iter_mut().zip(rows) {
            let blocks = P::blocks(row).zip(q.as_chunks::<BLOCK>().0);
            *sum = blocks
                .map(|(block, q)| {
                    let codes = unpack::<P>(block);
                    let products = codes.as_flattened().iter().zip(q);
                    products
                        .map(|(&code, &q)| i32::from(code) * i32::from(q))
                        .sum::<i32>()
                })
                .sum();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::activations::Scaling;
    use super::super::prologue::Rows;
    use super::super::{InterleavedMatrix, Matrix, Scratch, linear};
    use super::*;
    use crate::Exec;
    use crate::test_data::{Random, exec_matrix, floats};

    /// Packed rows of random trits, and the trits.
    fn random_codes(packing: TernaryPacking, n: usize, k: usize) -> (Vec<u8>, Vec<i32>) {
        let mut random = Random::new(9);
        let row_bytes = packing.row_bytes(k);
        let mut codes = vec![0u8; n * row_bytes];
        let mut trits = Vec::new();
        for i in 0..n {
            for j in 0..k.next_multiple_of(BLOCK) {
                let code = if j < k { random.below(3) as u8 } else { 1 };
                if j < k {
                    trits.push(i32::from(code) - 1);
                }
                let (block, within) = (j / BLOCK, j % BLOCK);
                let (gaps, shift) = match packing {
                    TernaryPacking::I2s => (0, 6 - 2 * (within / 32)),
                    TernaryPacking::Tq20 => (2 * (j / 256), 2 * (within / 32)),
                };
                codes[i * row_bytes + block * BLOCK_BYTES + gaps + within % 32] |= code << shift;
            }
        }
        (codes, trits)
    }

    #[test]
    fn every_path_matches_the_definition_bit_for_bit() {
        let mut cases = Vec::new();
        for m in [1, 2, 3, 7, 9, 14, 16, 21, 33] {
            for k in [1, 100, 128, 129, 256, 384, 4224] {
                cases.push((TernaryPacking::I2s, 37, k, m));
            }
            for k in [256, 512, 768, 4096] {
                cases.push((TernaryPacking::Tq20, 37, k, m));
            }
        }
        for n in [0, 1, 2, 3, 4, 5, 15, 16, 17, 64] {
            for m in [0, 1, 5] {
                cases.push((TernaryPacking::I2s, n, 640, m));
                cases.push((TernaryPacking::Tq20, n, 768, m));
            }
        }
        // Tiles of sixteen rows, four at a time and the rest; several panels of columns.
        cases.push((TernaryPacking::I2s, 70, 1408, 133));
        cases.push((TernaryPacking::Tq20, 20, 2304, 84));
        // What is left of one product is there in the next.
        let mut scratch = Scratch::default();
        for (packing, n, k, m) in cases {
            let (codes, trits) = random_codes(packing, n, k);
            let w = TernaryMatrix::packed(packing, n, k, 0.37, &codes).unwrap();
            let x = floats(m * k, 5);
            let mut rows = QuantizedRows::default();
            let one = Exec::new(1, Isa::SCALAR);
            rows.quantize(&one, Scaling::Row, &Rows::Ready(&x), k)
                .unwrap();
            let want = |t: usize, i: usize| {
                let products = trits[i * k..][..k].iter().zip(rows.row(t).q);
                let sum: i32 = products.map(|(trit, q)| trit * i32::from(*q)).sum();
                (sum as f32 * (0.37 / rows.row(t).scales[0])).to_bits()
            };
            let want: Vec<u32> = (0..m * n).map(|at| want(at / n, at % n)).collect();
            for exec in exec_matrix() {
                let stored = Matrix::Ternary(w);
                let interleaved = InterleavedMatrix::on_any_level(&exec, &stored).unwrap();
                for form in [stored, Matrix::Interleaved(&interleaved)] {
                    let mut out = vec![f32::NAN; m * n];
                    let outputs = &mut [(form, &mut out[..])];
                    linear(&exec, &x, k, &mut scratch, outputs).unwrap();
                    let got: Vec<u32> = out.iter().map(|out| out.to_bits()).collect();
                    assert_eq!(got, want, "{exec:?} {packing:?} {form:?} {n}x{k}");
                }
            }
        }
    }

    #[test]
    fn the_largest_sums_do_not_overflow() {
        // All codes 2 against all -128 is the worst case for kernels with 16-bit partial sums.
        let k = 128 * 66;
        for packing in [TernaryPacking::I2s, TernaryPacking::Tq20] {
            let codes = vec![0b1010_1010; packing.row_bytes(k)];
            for (value, q) in [(-128i8, -128i32), (127, 127)] {
                let row = vec![value; k];
                for isa in Isa::available() {
                    let mut sums = [[0; TILE]; TILE];
                    // SAFETY: this machine has `isa`.
                    unsafe {
                        kernel(isa, packing)(&[&codes[..]; TILE], &[&row[..]; TILE], &mut sums)
                    };
                    assert_eq!(sums, [[2 * q * k as i32; TILE]; TILE], "{isa}");
                }
            }
        }
    }

    #[test]
    fn rows_are_decoded() {
        for (packing, k) in [(TernaryPacking::I2s, 200), (TernaryPacking::Tq20, 512)] {
            let (codes, trits) = random_codes(packing, 3, k);
            let w = TernaryMatrix::packed(packing, 3, k, 0.5, &codes).unwrap();
            let exec = Exec::new(1, Isa::detect());
            let interleaved = InterleavedMatrix::on_any_level(&exec, &Matrix::Ternary(w)).unwrap();
            for form in [Matrix::Ternary(w), Matrix::Interleaved(&interleaved)] {
                let mut row = vec![f32::NAN; k];
                form.decode_row(&exec, 2, &mut row);
                let want: Vec<f32> = trits[2 * k..].iter().map(|&t| t as f32 * 0.5).collect();
                assert_eq!(row, want);
            }
            if packing == TernaryPacking::I2s {
                assert_eq!(interleaved.stored(&exec), codes);
            }
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        assert!(TernaryMatrix::new(2, 129, 1.0, &[0; 128]).is_ok());
        assert!(TernaryMatrix::new(2, 129, 1.0, &[0; 127]).is_err());
        assert!(TernaryMatrix::new(usize::MAX, 128, 1.0, &[0; 32]).is_err());
        assert!(TernaryMatrix::new(0, MAX_K + 1, 1.0, &[]).is_err());
        let tq2_0 = |k, blocks| TernaryMatrix::packed(TernaryPacking::Tq20, 2, k, 1.0, blocks);
        assert!(tq2_0(256, &[0; 132]).is_ok());
        assert!(tq2_0(256, &[0; 128]).is_err());
        assert!(tq2_0(128, &[0; 66]).is_err());
    }
}
