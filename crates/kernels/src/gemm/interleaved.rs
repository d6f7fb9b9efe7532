//! Sixteen rows side by side, as kernels with one row in each lane read them.
//!
//! Kernels for rows as they are stored have to bring the sums of several rows together, and the codes of blocks into the
//! order of activations: for Q4_K and PQ2_0 that takes more instructions than the products. Such matrices are therefore
//! rewritten when they are loaded, where the instruction set has a kernel for it: in as many bytes, but read in order,
//! and without a step across lanes. The results are those of [`integer`](super::integer) and
//! [`ternary`](super::ternary), bit for bit.

mod crumbs;
mod nibbles;
mod q4_0;
mod q4_k;
mod q5_k;
mod q6_k;
mod q8_0;
mod trits;
#[cfg(target_arch = "x86_64")]
mod trits_amx;
#[cfg(target_arch = "x86_64")]
mod trits_x86;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;
use std::ops::Range;

use sterna_format::DType;

use super::activations::{Order, QuantizedRow, QuantizedRows, Scaling, Tiles};
use super::panel::{self, Panel};
use super::ternary::TernaryMatrix;
use super::{BlockMatrix, Columns, Matrix, ROWS, Rounding, Scratch, integer};
use crate::Exec;
use crate::isa::Isa;
use crate::memory::{Pages, Plain, plain, plain_mut};
use crate::pool::SharedSlice;
use crate::quant::f16_to_f32;
use crumbs::Crumbs;
use q4_0::Q4_0;
use q4_k::Q4K;
use q5_k::Q5K;
use q6_k::Q6K;
use q8_0::Q8_0;

/// Columns of a [`Span`].
const SPAN: usize = 256;

/// Some columns of sixteen rows.
trait Span: Plain {
    /// Bytes in which these columns of a row are stored.
    const STORED: usize;

    /// Takes in the stored columns of each row.
    fn interleave(&mut self, isa: Isa, rows: &[&[u8]; ROWS]);

    /// Writes the columns of row `r` as they are stored.
    fn write_row(&self, r: usize, stored: &mut [u8]);

    /// Writes the columns into a panel.
    fn unpack(&self, isa: Isa, panel: &mut Panel);

    /// The kernels of the levels that [`x86::is_offered`] has, which prefetch weights to the `NEAREST` cache or to the second.
    #[cfg(target_arch = "x86_64")]
    fn kernels<const NEAREST: bool>() -> Kernels<Self>;
}

/// What multiplies sixteen rows, which have as many spans as the activations.
struct Kernels<S> {
    one: One<S>,
    several: Several<S>,
}

/// The products with a row of activations.
///
/// # Safety
/// The machine has the instructions that the function was made for.
type One<S> = unsafe fn(tile: &[S], x: QuantizedRow<'_>) -> [f32; ROWS];

/// Rows of activations that are multiplied together, at most: as many as there are registers for.
const GROUP_LEN: usize = 8;

/// The products with `n` rows of activations in [`Order::Quads`], from `first` on, the first of a tile.
///
/// # Safety
/// As [`One`].
type Several<S> = unsafe fn(tile: &[S], x: &Tiles, first: usize, n: usize, sums: &mut Sums<f32>);

/// The kernels that are faster than those for stored rows, if there are any.
fn kernels<S: Span>(isa: Isa) -> Option<Kernels<S>> {
    #[cfg(target_arch = "x86_64")]
    if x86::is_offered(isa) {
        return Some(match x86::prefetches_nearest(isa) {
            true => S::kernels::<true>(),
            false => S::kernels::<false>(),
        });
    }
    let _ = isa;
    None
}

/// Words of each row, as each word of all rows.
#[inline(always)]
fn across<const N: usize>(rows: &[[u32; N]; ROWS], words: &mut [[u32; ROWS]; N]) {
    for (w, word) in words.iter_mut().enumerate() {
        for (word, row) in word.iter_mut().zip(rows) {
            *word = row[w];
        }
    }
}

/// The f16 of each row, as f32.
#[inline(always)]
fn widen(halves: &[u16; ROWS], floats: &mut [f32; ROWS]) {
    for (float, half) in floats.iter_mut().zip(halves) {
        *float = f16_to_f32(*half);
    }
}

/// `$then` with the type of the spans of `$dtype`, else `$otherwise`.
macro_rules! with_span {
    ($dtype:expr, $S:ident => $then:expr, _ => $otherwise:expr) => {
        match $dtype {
            DType::Q2_0_G128 | DType::PQ2_0 => {
                type $S = Crumbs;
                $then
            }
            DType::Q4_0 => {
                type $S = Q4_0;
                $then
            }
            DType::Q8_0 => {
                type $S = Q8_0;
                $then
            }
            DType::Q4_K => {
                type $S = Q4K;
                $then
            }
            DType::Q5_K => {
                type $S = Q5K;
                $then
            }
            DType::Q6_K => {
                type $S = Q6K;
                $then
            }
            _ => $otherwise,
        }
    };
}

/// A matrix `[n, k]` of blocks of integers or of trits with one scale, multiplied like a [`BlockMatrix`] or a
/// [`TernaryMatrix`] of them.
pub struct InterleavedMatrix {
    /// I2_S for trits.
    dtype: DType,
    /// Of trits; blocks have theirs.
    scale: f32,
    n: usize,
    k: usize,
    /// [`Span`]s of the type, `[n / 16][k / 256]`, or [`trits::Block`]s, `[n / 16][k / 128]`; what is stored for rows past
    /// the last is zeros.
    pages: Pages,
}

impl InterleavedMatrix {
    /// Whether `exec` multiplies blocks of `dtype` in rows of `k` columns, or trits with one scale if that is I2_S, faster
    /// interleaved.
    pub fn is_faster(exec: &Exec, dtype: DType, k: usize) -> bool {
        if dtype == DType::I2_S {
            return trits::kernels(exec.isa).is_some();
        }
        has_form(dtype, k) && with_span!(dtype, S => kernels::<S>(exec.isa).is_some(), _ => false)
    }

    /// The same weights interleaved, on all threads; `None` where `exec` multiplies them faster as they are.
    pub fn new(exec: &Exec, w: &Matrix<'_>) -> Option<InterleavedMatrix> {
        let dtype = match w {
            Matrix::Blocks(w) => w.dtype(),
            Matrix::Ternary(_) => DType::I2_S,
            Matrix::Interleaved(_) => return None,
        };
        if !InterleavedMatrix::is_faster(exec, dtype, w.k()) {
            return None;
        }
        InterleavedMatrix::on_any_level(exec, w)
    }

    /// The same, whether or not it is faster; `None` if there is no such form.
    pub(super) fn on_any_level(exec: &Exec, w: &Matrix<'_>) -> Option<InterleavedMatrix> {
        let (dtype, scale, pages) = match w {
            Matrix::Blocks(w) => {
                if w.rounding() != Rounding::Blocks {
                    return None;
                }
                let mut matrix = InterleavedMatrix::zeroed(w.dtype(), w.n(), w.k())?;
                matrix.fill(exec, 0, w);
                return Some(matrix);
            }
            Matrix::Ternary(w) => (DType::I2_S, w.scale(), trits::interleaved(exec, w)),
            Matrix::Interleaved(_) => return None,
        };
        let (n, k) = (w.n(), w.k());
        Some(InterleavedMatrix {
            dtype,
            scale,
            n,
            k,
            pages,
        })
    }

    /// A matrix of blocks that are zeros, if `exec` multiplies such faster interleaved.
    pub(super) fn empty(
        exec: &Exec,
        dtype: DType,
        n: usize,
        k: usize,
    ) -> Option<InterleavedMatrix> {
        let is_faster = dtype != DType::I2_S && InterleavedMatrix::is_faster(exec, dtype, k);
        is_faster.then(|| InterleavedMatrix::zeroed(dtype, n, k))?
    }

    /// The same, whether or not it is faster; `None` if there is no such form.
    fn zeroed(dtype: DType, n: usize, k: usize) -> Option<InterleavedMatrix> {
        if !has_form(dtype, k) {
            return None;
        }
        let span = with_span!(dtype, S => size_of::<S>(), _ => return None);
        Some(InterleavedMatrix {
            dtype,
            scale: 1.0,
            n,
            k,
            pages: Pages::zeroed(n.div_ceil(ROWS) * (k / SPAN) * span),
        })
    }

    /// Takes in `w`, the rows from `first` on, on all threads. Panics unless these are whole tiles of the matrix, or the rest
    /// of it, and of its type.
    pub(super) fn fill(&mut self, exec: &Exec, first: usize, w: &BlockMatrix<'_>) {
        let end = first + w.n();
        assert!(first.is_multiple_of(ROWS) && (end.is_multiple_of(ROWS) || end == self.n));
        assert!((w.dtype(), w.k(), end <= self.n) == (self.dtype, self.k, true));
        let per_tile = self.k / SPAN;
        let spans = first / ROWS * per_tile..end.div_ceil(ROWS) * per_tile;
        with_span!(self.dtype, S => {
            interleave::<S>(exec, w, &mut plain_mut(&mut self.pages)[spans]);
        }, _ => unreachable!("{}", self.dtype));
    }

    /// Its rows as they were stored: what [`BlockMatrix`] takes with [`Rounding::Blocks`], or what [`TernaryMatrix::new`]
    /// does.
    pub fn stored(&self, exec: &Exec) -> Vec<u8> {
        let len = self.row_bytes();
        let mut bytes = vec![0; self.n * len];
        let shared = SharedSlice::new(&mut bytes);
        exec.pool.for_ranges(self.n, ROWS, |rows| {
            // SAFETY: ranges of rows don't overlap.
            let bytes = unsafe { shared.range_mut(rows.start * len..rows.end * len) };
            for (i, row) in rows.zip(bytes.chunks_exact_mut(len.max(1))) {
                self.write_row(i, row);
            }
        });
        bytes
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The type that its weights had, I2_S if they are trits with one scale.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.pages
    }

    pub(super) fn row_bytes(&self) -> usize {
        self.k.div_ceil(self.dtype.block_len()) * self.dtype.block_bytes()
    }

    /// How activations are quantized for it.
    pub(super) fn scaling(&self) -> Scaling {
        match self.dtype {
            DType::I2_S => Scaling::Row,
            dtype => integer::scaling(dtype).expect("types that are interleaved have one"),
        }
    }

    /// Decodes row `i` into `out`, `[k]`. Panics if there is no such row.
    pub(super) fn decode(&self, isa: Isa, i: usize, out: &mut [f32]) {
        let row = self.row(i);
        let what = "it was made of such rows";
        if self.dtype == DType::I2_S {
            let row = TernaryMatrix::new(1, self.k, self.scale, &row).expect(what);
            return row.decode(0, out);
        }
        let row = BlockMatrix::new(self.dtype, 1, self.k, Rounding::Blocks, &row).expect(what);
        row.decode(isa, 0, out);
    }

    /// Writes row `i` as it was stored.
    fn write_row(&self, i: usize, row: &mut [u8]) {
        if self.dtype == DType::I2_S {
            return trits::write_row(self.blocks(i / ROWS), i % ROWS, row);
        }
        with_span!(self.dtype, S => {
            let spans = self.tile::<S>(i / ROWS).iter();
            for (span, stored) in spans.zip(row.chunks_exact_mut(S::STORED)) {
                span.write_row(i % ROWS, stored);
            }
        }, _ => unreachable!("{}", self.dtype));
    }

    /// Row `i` as it was stored. Panics if there is no such row.
    fn row(&self, i: usize) -> Vec<u8> {
        assert!(i < self.n);
        let mut row = vec![0; self.row_bytes()];
        self.write_row(i, &mut row);
        row
    }

    /// The spans of sixteen rows.
    fn tile<S: Span>(&self, tile: usize) -> &[S] {
        let per_tile = self.k / SPAN;
        &plain(&self.pages)[tile * per_tile..][..per_tile]
    }

    /// Rows that the kernel for `x` computes together.
    pub(super) fn rows_at_a_time(&self, x: &QuantizedRows) -> usize {
        match self.dtype {
            DType::I2_S => trits::rows_at_a_time(x),
            _ => ROWS,
        }
    }

    /// Sixteen rows of trits.
    fn blocks(&self, tile: usize) -> &[trits::Block] {
        let per_tile = self.k.div_ceil(trits::BLOCK);
        &plain(&self.pages)[tile * per_tile..][..per_tile]
    }
}

/// Whether blocks of `dtype` in rows of `k` columns can be interleaved.
fn has_form(dtype: DType, k: usize) -> bool {
    let has_spans = with_span!(dtype, S => {
        const { assert!(size_of::<S>() == ROWS * S::STORED, "as many bytes as are stored") };
        true
    }, _ => false);
    has_spans && k.is_multiple_of(SPAN)
}

/// Writes the spans of a matrix.
fn interleave<S: Span>(exec: &Exec, w: &BlockMatrix<'_>, spans: &mut [S]) {
    let (n, per_tile) = (w.n(), w.k() / SPAN);
    let n_tiles = n.div_ceil(ROWS);
    let spans = SharedSlice::new(spans);
    let zeros = vec![0; S::STORED];
    exec.pool.for_ranges(n_tiles, 1, |tiles| {
        // SAFETY: ranges of tiles don't overlap.
        let spans = unsafe { spans.range_mut(tiles.start * per_tile..tiles.end * per_tile) };
        for (tile, spans) in tiles.zip(spans.chunks_exact_mut(per_tile.max(1))) {
            let rows = tile * ROWS..n.min((tile + 1) * ROWS);
            for (s, span) in spans.iter_mut().enumerate() {
                let mut stored = [&zeros[..]; ROWS];
                for (row, stored) in rows.clone().zip(&mut stored) {
                    *stored = w.part(row, s * SPAN..(s + 1) * SPAN);
                }
                span.interleave(exec.isa, &stored);
            }
        }
    });
}

impl fmt::Debug for InterleavedMatrix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InterleavedMatrix")
            .field("dtype", &self.dtype)
            .field("n", &self.n)
            .field("k", &self.k)
            .finish_non_exhaustive()
    }
}

/// As [`super::integer::multiply`] or [`super::ternary::multiply`], of the activations in `scratch`.
pub(super) fn multiply(
    isa: Isa,
    w: &InterleavedMatrix,
    rows: Range<usize>,
    scratch: &Scratch,
    out: &Columns<'_>,
) {
    let x = scratch.quantized(w.scaling());
    if w.dtype == DType::I2_S {
        return trits::multiply(isa, w, rows, x, out);
    }
    with_span!(w.dtype, S => multiply_spans::<S>(isa, w, rows, x, out), _ => unreachable!("{}", w.dtype));
}

fn multiply_spans<S: Span>(
    isa: Isa,
    w: &InterleavedMatrix,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    let kernels = kernels::<S>(isa);
    // Those for many rows have panels, and so do levels without kernels for spans.
    if x.m() > 1 && (kernels.is_none() || x.tiles().order() != Order::Quads) {
        let tile = |first: usize| {
            debug_assert!(first.is_multiple_of(ROWS));
            let spans = w.tile::<S>(first / ROWS);
            move |columns: Range<usize>, panel: &mut Panel| {
                panel::prefetch_next(spans.get(columns.end / SPAN));
                spans[columns.start / SPAN].unpack(isa, panel);
            }
        };
        return panel::multiply_groups(isa, (w.dtype, w.k), rows, x, out, tile);
    }
    let add = |tile: usize, tokens: Range<usize>, sums: &mut Sums<f32>| {
        let spans = w.tile::<S>(tile);
        match &kernels {
            None => {
                sums[0] = std::array::from_fn(|r| match tile * ROWS + r {
                    i if i < w.n => integer::reference::dot(isa, w.dtype, &w.row(i), x.row(0)),
                    _ => 0.0,
                });
            }
            // SAFETY: it is the kernel of an `Isa`, which this machine has been seen to offer.
            Some(kernels) if x.m() == 1 => sums[0] = unsafe { (kernels.one)(spans, x.row(0)) },
            // SAFETY: as above.
            Some(kernels) => unsafe {
                (kernels.several)(spans, x.tiles(), tokens.start, tokens.len(), sums);
            },
        }
    };
    multiply_tiles(rows, x.m(), out, add, |_, sums, out| {
        out.copy_from_slice(sums)
    });
}

/// The sums of sixteen rows of weights with each of some rows of activations.
type Sums<T> = [[T; ROWS]; GROUP_LEN];

/// Multiplies the rows `rows` of a matrix with `m` rows of activations: `add` writes the sums of a tile of sixteen rows with
/// some rows of activations, and `finish` makes results of those with one row of activations.
fn multiply_tiles<T: Copy + Default>(
    rows: Range<usize>,
    m: usize,
    out: &Columns<'_>,
    add: impl Fn(usize, Range<usize>, &mut Sums<T>),
    finish: impl Fn(usize, &[T], &mut [f32]),
) {
    let mut sums = [[T::default(); ROWS]; GROUP_LEN];
    for tile in rows.start / ROWS..rows.end.div_ceil(ROWS) {
        let first = tile * ROWS;
        let wanted = rows.start.max(first)..rows.end.min(first + ROWS);
        for begin in (0..m).step_by(GROUP_LEN) {
            let tokens = begin..m.min(begin + GROUP_LEN);
            add(tile, tokens.clone(), &mut sums);
            for (t, sums) in tokens.zip(&sums) {
                // SAFETY: no other task has these rows, so none writes these columns.
                let out = unsafe { out.row_mut(t, wanted.clone()) };
                finish(t, &sums[wanted.start - first..wanted.end - first], out);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::linear;
    use super::*;
    use crate::test_data::{Random, exec_matrix, floats};

    const TYPES: [DType; 6] = [
        DType::PQ2_0,
        DType::Q4_0,
        DType::Q8_0,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];

    #[test]
    fn rows_come_back_as_they_were() {
        let mut random = Random::new(5);
        let shapes = [(16, 256), (1, 512), (37, 768), (0, 256), (3, 0)];
        for (dtype, (n, k)) in TYPES
            .into_iter()
            .flat_map(|t| shapes.map(|shape| (t, shape)))
        {
            let len = n * k / dtype.block_len() * dtype.block_bytes();
            let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            let w = BlockMatrix::new(dtype, n, k, Rounding::Blocks, &bytes).unwrap();
            for exec in exec_matrix() {
                let matrix = Matrix::Blocks(w);
                let interleaved = InterleavedMatrix::on_any_level(&exec, &matrix).unwrap();
                assert_eq!(interleaved.stored(&exec), bytes, "{dtype} [{n}, {k}]");
                for i in 0..n {
                    let (mut expected, mut got) = (vec![0.0; k], vec![0.0; k]);
                    w.decode(exec.isa, i, &mut expected);
                    interleaved.decode(exec.isa, i, &mut got);
                    let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                    assert_eq!(bits(&got), bits(&expected));
                }
            }
        }
    }

    #[test]
    fn long_rows_of_trits_have_exact_sums() {
        // Longer than what is summed before codes' places are taken out of sums, with a block left over.
        let (n, k) = (5, (1 << 18) + 3 * trits::BLOCK);
        let codes = vec![0b1010_1010; n * k / 4];
        let w = Matrix::Ternary(TernaryMatrix::new(n, k, 0.5, &codes).unwrap());
        for exec in exec_matrix() {
            let w = InterleavedMatrix::on_any_level(&exec, &w).unwrap();
            for m in [1, 2, 3, 5, 7, 8, 9, 13, 18] {
                for sign in [1.0, -1.0] {
                    let mut out = vec![f32::NAN; m * n];
                    let outputs = &mut [(Matrix::Interleaved(&w), &mut out[..])];
                    let x = vec![sign * 127.0; m * k];
                    linear(&exec, &x, k, &mut Scratch::default(), outputs).unwrap();
                    assert_eq!(out, vec![sign * (127 * k) as f32 * 0.5; m * n], "{exec:?}");
                }
            }
        }
    }

    #[test]
    fn other_matrices_are_left() {
        let exec = Exec::new(1, Isa::detect());
        for (dtype, k, rounding) in [
            (DType::Q5_0, 256, Rounding::Blocks),
            (DType::PQ2_0, 384, Rounding::Blocks),
            (DType::PQ2_0, 256, Rounding::None),
        ] {
            let bytes = vec![0; 16 * k / dtype.block_len() * dtype.block_bytes()];
            let w = BlockMatrix::new(dtype, 16, k, rounding, &bytes).unwrap();
            assert!(InterleavedMatrix::on_any_level(&exec, &Matrix::Blocks(w)).is_none());
        }
    }

    #[test]
    fn any_rows_are_those_of_the_whole_product() {
        let mut random = Random::new(7);
        let (n, k) = (37, 512);
        for dtype in TYPES.into_iter().chain([DType::I2_S]) {
            let len = n * k / dtype.block_len() * dtype.block_bytes();
            let bytes: Vec<u8> = (0..len).map(|_| random.next() as u8).collect();
            let w = match dtype {
                DType::I2_S => Matrix::Ternary(TernaryMatrix::new(n, k, 0.5, &bytes).unwrap()),
                _ => {
                    Matrix::Blocks(BlockMatrix::new(dtype, n, k, Rounding::Blocks, &bytes).unwrap())
                }
            };
            let exec = Exec::new(1, Isa::detect());
            let w = InterleavedMatrix::on_any_level(&exec, &w).unwrap();
            let (x, mut whole) = (floats(k, 3), vec![f32::NAN; n]);
            let mut scratch = Scratch::default();
            let outputs = &mut [(Matrix::Interleaved(&w), &mut whole[..])];
            linear(&exec, &x, k, &mut scratch, outputs).unwrap();
            for rows in [0..37, 1..2, 5..33, 15..17, 36..37, 16..32] {
                let mut part = vec![f32::NAN; n];
                let out = Columns::new(&mut part, n);
                multiply(exec.isa, &w, rows.clone(), &scratch, &out);
                for (i, (part, whole)) in part.iter().zip(&whole).enumerate() {
                    let expected = if rows.contains(&i) { *whole } else { f32::NAN };
                    assert_eq!(part.to_bits(), expected.to_bits(), "{dtype} {rows:?} {i}");
                }
            }
        }
    }
}
