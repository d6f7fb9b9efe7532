//! Weights that are floats, or decoded to floats; activations in f32.
//!
//! F16 and BF16 weights are multiplied with activations that are rounded to as many bits as leave
//! every product exact ([`rounding`]), so that machines which fuse multiplication and addition, and
//! those which can't, agree. All other products are rounded before they are added.
//!
//! Every sum is taken in the order of [`crate::dot`], in sixteen partial sums. With few activation
//! rows (with AVX-512 any number) they run over the stored weights; with more, or other types, over panels of decoded
//! weights:
//!
//! - [`ROWS`] rows of weights times a few activation rows are a tile, whose sums stay in registers
//!   over [`DEPTH`] groups of columns; until the next groups they rest in memory.
//! - The panel is [`DEPTH`] groups of [`PANEL`] rows, which stay in the nearest cache while all tiles
//!   of up to [`TOKENS`] activation rows are multiplied with them.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod lanes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
pub(super) mod rounding;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;

use std::cell::RefCell;
use std::ops::Range;

use sterna_format::DType;

use super::{BlockMatrix, Columns};
use crate::isa::{Isa, Level};
use lanes::{Group, Kernel, LANES, ROWS, Stored};
use rounding::{FloatRows, Precision};

/// Groups of columns in a panel: whole blocks of any type.
const DEPTH: usize = 32;

/// Rows of weights in a panel.
const PANEL: usize = 16;

/// Activation rows that are multiplied with a panel before the next one is decoded.
const TOKENS: usize = 128;

/// The precision of activations that weights of `dtype` take.
pub(super) fn precision(dtype: DType) -> Precision {
    match dtype {
        DType::F16 => Precision::Bits13,
        DType::BF16 => Precision::Bits16,
        _ => Precision::Full,
    }
}

/// Memory that a thread reuses from task to task.
#[derive(Default)]
struct Workspace {
    /// Decoded weights: [`ROWS`] interleaved rows, followed by the next ones.
    panel: Vec<[Group; ROWS]>,
    /// Partial sums of the tiles.
    acc: Vec<Group>,
    /// Finished sums.
    sums: Vec<f32>,
}

thread_local! {
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// `out[t, i] = Σ_j w[i, j] · x[t, j]` for the rows `i` of the weights.
///
/// Exactness: each sum is taken in one fixed order, so the bits depend on neither threads, instruction
/// set nor the other rows of `x`. If activations have another [`precision`] than the type asks for,
/// weights are decoded exactly, and products rounded.
pub(super) fn multiply(
    isa: Isa,
    w: &BlockMatrix<'_>,
    rows: Range<usize>,
    precision: Precision,
    x: &FloatRows,
    out: &Columns<'_>,
) {
    let kernel = kernel(isa);
    let stored = match (w.dtype(), precision) {
        (DType::F16, Precision::Bits13) => Some(Stored::F16),
        (DType::BF16, Precision::Bits16) => Some(Stored::BF16),
        (DType::F32, Precision::Full) => Some(Stored::F32),
        _ => None,
    };
    WORKSPACE.with_borrow_mut(|workspace| match stored {
        Some(stored) if x.m() <= kernel.most_direct => {
            multiply_stored(kernel, stored, w, rows, x, out, workspace);
        }
        _ => multiply_panels(isa, kernel, stored, w, rows, x, out, workspace),
    });
}

/// The loops for an instruction set.
fn kernel(isa: Isa) -> &'static Kernel {
    match isa.level() {
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 | Level::AvxVnni => &avx2::KERNEL,
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Amx => &avx512::KERNEL,
        #[cfg(target_arch = "aarch64")]
        Level::Neon | Level::NeonDot | Level::I8mm | Level::Sme => &neon::KERNEL,
        #[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
        Level::Simd128 => &wasm::simd128::KERNEL,
        #[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
        Level::Relaxed => &wasm::relaxed::KERNEL,
        Level::Baseline => &portable::KERNEL,
    }
}

/// Straight from the stored weights.
fn multiply_stored(
    kernel: &Kernel,
    stored: Stored,
    w: &BlockMatrix<'_>,
    rows: Range<usize>,
    x: &FloatRows,
    out: &Columns<'_>,
    workspace: &mut Workspace,
) {
    let n = rows.len();
    for (tile, _) in tiles(0..x.m(), kernel.direct_tokens) {
        let mut acts: [&[Group]; LANES] = [&[]; LANES];
        for (act, t) in acts.iter_mut().zip(tile.clone()) {
            *act = x.row(t);
        }
        let acts = &acts[..tile.len()];
        workspace.sums.resize(n * tile.len(), 0.0);
        let sums = &mut workspace.sums;
        // SAFETY: `kernel` was picked by an `Isa`, which this machine has been seen to offer.
        unsafe { (kernel.direct)(stored, w.rows(rows.start, n), w.row_bytes(), acts, sums) };
        for (i, t) in tile.clone().enumerate() {
            // SAFETY: no other task has these rows, so none writes these columns.
            let out = unsafe { out.row_mut(t, rows.clone()) };
            for (out, sums) in out.iter_mut().zip(sums.chunks_exact(tile.len())) {
                *out = sums[i] * x.scale(t);
            }
        }
    }
}

/// With weights decoded first.
#[allow(clippy::too_many_arguments)]
fn multiply_panels(
    isa: Isa,
    kernel: &Kernel,
    stored: Option<Stored>,
    w: &BlockMatrix<'_>,
    rows: Range<usize>,
    x: &FloatRows,
    out: &Columns<'_>,
    workspace: &mut Workspace,
) {
    let Workspace { panel, acc, sums } = workspace;
    let fused = stored.is_some_and(Stored::fused);
    panel.resize(PANEL / ROWS * DEPTH, Default::default());
    for first in rows.clone().step_by(PANEL) {
        let n_rows = PANEL.min(rows.end - first);
        let n_quads = n_rows.div_ceil(ROWS);
        for start in (0..x.m()).step_by(TOKENS) {
            let tokens = start..x.m().min(start + TOKENS);
            acc.resize(n_quads * ROWS * tokens.len(), Group::default());
            for depth in (0..x.n_groups()).step_by(DEPTH) {
                let depth = depth..x.n_groups().min(depth + DEPTH);
                let panel = &mut panel[..n_quads * depth.len()];
                let columns = depth.start * LANES..w.k().min(depth.end * LANES);
                for (quad, i) in panel
                    .chunks_exact_mut(depth.len())
                    .zip((first..).step_by(ROWS))
                {
                    // A matrix that ends within these rows repeats its last one.
                    let rows: [usize; ROWS] = std::array::from_fn(|r| (i + r).min(rows.end - 1));
                    match stored {
                        // SAFETY: `kernel` was picked by an `Isa`, which this machine has been seen
                        // to offer.
                        Some(stored) => unsafe {
                            let rows = rows.map(|i| w.part(i, columns.clone()));
                            (kernel.unpack)(stored, rows, quad);
                        },
                        None => {
                            for (r, i) in rows.into_iter().enumerate() {
                                let mut row = [0.0; DEPTH * LANES];
                                let row = &mut row[..columns.len()];
                                w.decode_part(isa, i, columns.clone(), row);
                                copy_row(row, quad, r);
                            }
                        }
                    }
                }
                multiply_panel(kernel, fused, panel, x, tokens.clone(), depth, acc);
            }
            sums.resize(acc.len(), 0.0);
            // SAFETY: as above.
            unsafe { (kernel.sums)(acc, sums) };
            for (tile, at) in tiles(tokens.clone(), kernel.tokens) {
                let sums = &sums[at * n_quads * ROWS..];
                for (i, t) in tile.clone().enumerate() {
                    // SAFETY: no other task has these rows, so none writes these columns.
                    let out = unsafe { out.row_mut(t, first..first + n_rows) };
                    for (r, out) in out.iter_mut().enumerate() {
                        *out = sums[r * tile.len() + i] * x.scale(t);
                    }
                }
            }
        }
    }
}

/// Writes decoded values into row `r` of a panel, padded with zeros.
fn copy_row(row: &[f32], panel: &mut [[Group; ROWS]], r: usize) {
    for (values, groups) in row.chunks(LANES).zip(panel) {
        let (values_to, padding) = groups[r].0.split_at_mut(values.len());
        values_to.copy_from_slice(values);
        padding.fill(0.0);
    }
}

/// Divides rows of activations into tiles of about equal size, none larger than `most`, each with the number
/// of rows before it.
fn tiles(tokens: Range<usize>, most: usize) -> impl Iterator<Item = (Range<usize>, usize)> {
    let (start, len) = (tokens.start, tokens.len());
    let n = len.div_ceil(most);
    let at = move |i: usize| len * i / n.max(1);
    (0..n).map(move |i| (start + at(i)..start + at(i + 1), at(i)))
}

/// Adds a panel times the groups `depth` of `tokens` to partial sums: for each of their [`tiles`] and
/// each [`ROWS`] rows of the panel, `[ROWS, tile]`.
fn multiply_panel(
    kernel: &Kernel,
    fused: bool,
    panel: &[[Group; ROWS]],
    x: &FloatRows,
    tokens: Range<usize>,
    depth: Range<usize>,
    acc: &mut [Group],
) {
    let n_rows = panel.len() / depth.len() * ROWS;
    for (tile, at) in tiles(tokens, kernel.tokens) {
        let mut acts: [&[Group]; LANES] = [&[]; LANES];
        for (act, t) in acts.iter_mut().zip(tile.clone()) {
            *act = &x.row(t)[depth.clone()];
        }
        let acc = acc[at * n_rows..].chunks_exact_mut(ROWS * tile.len());
        for (w, acc) in panel.chunks_exact(depth.len()).zip(acc) {
            // SAFETY: `kernel` was picked by an `Isa`, which this machine has been seen to offer.
            unsafe { (kernel.tile)(fused, w, &acts[..tile.len()], acc, depth.start == 0) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Matrix, Rounding, Scratch, linear};
    use super::*;
    use crate::Exec;
    use crate::dot::dot;
    use crate::quant::decode_row;
    use crate::test_data::{Random, exec_matrix, floats};

    fn run(exec: &Exec, w: BlockMatrix<'_>, x: &[f32], m: usize) -> Vec<f32> {
        let mut out = vec![f32::NAN; m * w.n()];
        let outputs = &mut [(Matrix::Blocks(w), &mut out[..])];
        linear(exec, x, w.k(), &mut Scratch::default(), outputs).unwrap();
        out
    }

    /// The definition, one sum at a time.
    fn reference(w: &BlockMatrix<'_>, x: &[f32], m: usize) -> Vec<f32> {
        let exact = w.rounding() == Rounding::None;
        let (n, k) = (w.n(), w.k());
        let precision = if exact {
            Precision::Full
        } else {
            precision(w.dtype())
        };
        let mut acts = FloatRows::default();
        acts.round(&Exec::new(1, Isa::SCALAR), precision, x, k)
            .unwrap();
        let mut out = Vec::new();
        for t in 0..m {
            let act: Vec<f32> = acts.row(t).iter().flat_map(|g| g.0).collect();
            for i in 0..n {
                let mut row = vec![0.0; k];
                decode_row(w.dtype(), w.rows(i, 1), &mut row).unwrap();
                if w.dtype() == DType::BF16 && !exact {
                    for w in &mut row {
                        *w = if w.abs() < rounding::MIN_BF16 {
                            0.0
                        } else {
                            *w
                        };
                    }
                }
                out.push(dot(&row, &act[..k]) * acts.scale(t));
            }
        }
        out
    }

    /// Bits, with one pattern for all NaN.
    fn bits(values: &[f32]) -> Vec<u32> {
        let bits = |v: &f32| if v.is_nan() { u32::MAX } else { v.to_bits() };
        values.iter().map(bits).collect()
    }

    const SHAPES: [(usize, usize, usize); 12] = [
        (0, 32, 2),
        (1, 32, 1),
        (5, 64, 2),
        (17, 96, 3),
        (16, 544, 4),
        (3, 512, 7),
        (33, 32, 24),
        (18, 1056, 25),
        (4, 128, 50),
        (9, 96, 131),
        (7, 2592, 1),
        (50, 64, 1),
    ];

    #[test]
    fn every_path_gives_the_bits_of_the_definition() {
        for dtype in [
            DType::F16,
            DType::BF16,
            DType::F32,
            DType::Q4_1,
            DType::MXFP4,
        ] {
            for rounding in [Rounding::Blocks, Rounding::None] {
                for (n, k, m) in SHAPES {
                    // Rows of floats may end anywhere.
                    for k in [k, k - 15] {
                        if !k.is_multiple_of(dtype.block_len()) {
                            continue;
                        }
                        let values = floats(n * k, 1);
                        let mut bytes = vec![0; n * k / dtype.block_len() * dtype.block_bytes()];
                        crate::quant::encode_row(dtype, &values, &mut bytes).unwrap();
                        let w = BlockMatrix::new(dtype, n, k, rounding, &bytes).unwrap();
                        let x = floats(m * k, 2);
                        let want = reference(&w, &x, m);
                        for exec in exec_matrix() {
                            let got = run(&exec, w, &x, m);
                            assert_eq!(bits(&got), bits(&want), "{dtype} {n} {k} {m} {exec:?}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn weights_and_activations_of_any_bits_give_the_same_on_every_path() {
        let mut random = Random::new(5);
        let mut finite = 0;
        for round in 0..60 {
            let (n, k, m) = (9, 80, [1, 2, 8][round % 3]);
            for dtype in [DType::F16, DType::BF16] {
                let mut bytes: Vec<u8> = (0..n * k)
                    .flat_map(|_| (random.next() as u16).to_le_bytes())
                    .collect();
                if round % 2 == 0 {
                    // Adjacent exponents, so that sums are not dominated by their largest product.
                    let exponent = random.below(253) as u16;
                    for w in bytes.as_chunks_mut::<2>().0 {
                        let bits = u16::from_le_bytes(*w);
                        *w = (bits & 0x83ff | exponent << 7).to_le_bytes();
                    }
                }
                let exponent = random.below(230);
                let x: Vec<f32> = (0..m * k)
                    .map(|_| {
                        let bits = random.next() ^ random.next() << 1;
                        f32::from_bits(bits & 0x807f_ffff | (exponent + random.below(24)) << 23)
                    })
                    .collect();
                let w = BlockMatrix::new(dtype, n, k, Rounding::Blocks, &bytes).unwrap();
                let want = reference(&w, &x, m);
                finite += want.iter().filter(|v| v.is_finite() && **v != 0.0).count();
                for exec in exec_matrix() {
                    assert_eq!(bits(&run(&exec, w, &x, m)), bits(&want), "{dtype} {exec:?}");
                }
            }
        }
        assert!(finite > 2000, "only {finite} numbers were compared");
    }

    #[test]
    fn sums_are_close_to_those_of_unrounded_values() {
        for (n, k, m) in [
            (1, 1, 1),
            (3, 17, 2),
            (33, 64, 5),
            (70, 1000, 1),
            (6, 300, 9),
        ] {
            let x = floats(m * k, 2);
            for (dtype, error) in [(DType::F32, 1e-6), (DType::F16, 1e-4), (DType::BF16, 1e-5)] {
                let mut bytes = vec![0; n * k * dtype.block_bytes()];
                crate::quant::encode_row(dtype, &floats(n * k, 1), &mut bytes).unwrap();
                let mut w = vec![0.0; n * k];
                decode_row(dtype, &bytes, &mut w).unwrap();
                let matrix = BlockMatrix::new(dtype, n, k, Rounding::Blocks, &bytes).unwrap();
                let out = run(&Exec::new(1, Isa::detect()), matrix, &x, m);
                for t in 0..m {
                    for i in 0..n {
                        let exact: f64 = (0..k)
                            .map(|j| f64::from(w[i * k + j]) * f64::from(x[t * k + j]))
                            .sum();
                        // Roundings of k values within ±1 to 13 or 16 bits, and of their sums.
                        let got = f64::from(out[t * n + i]);
                        assert!((got - exact).abs() < error * k as f64, "{dtype}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_does_not_depend_on_its_neighbours() {
        let (n, k, m) = (37, 96, 31);
        let mut bytes = vec![0; n * k * 2];
        crate::quant::encode_row(DType::F16, &floats(n * k, 3), &mut bytes).unwrap();
        let matrix = BlockMatrix::new(DType::F16, n, k, Rounding::Blocks, &bytes).unwrap();
        let x = floats(m * k, 4);
        let exec = Exec::new(2, Isa::detect());
        let all = run(&exec, matrix, &x, m);
        for t in 0..m {
            let one = run(&exec, matrix, &x[t * k..][..k], 1);
            assert_eq!(one, all[t * n..][..n]);
        }
    }

    #[test]
    fn wrong_shapes_are_refused() {
        let w = BlockMatrix::new(DType::F32, 2, 2, Rounding::None, &[0; 16]).unwrap();
        let exec = Exec::new(1, Isa::SCALAR);
        let mut scratch = Scratch::default();
        let mut run = |x: &[f32], k, out: &mut [f32]| {
            linear(&exec, x, k, &mut scratch, &mut [(Matrix::Blocks(w), out)])
        };
        assert!(run(&[0.0; 3], 2, &mut [0.0; 2]).is_err());
        assert!(run(&[0.0; 4], 2, &mut [0.0; 3]).is_err());
        assert!(run(&[0.0; 4], 4, &mut [0.0; 2]).is_err());
        assert!(run(&[0.0; 4], 2, &mut [0.0; 4]).is_ok());
    }
}
