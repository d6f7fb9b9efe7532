//! Products with several activation rows: sixteen interleaved rows of weights at a time.
//!
//! Weights are unpacked, a range of columns at a time, into a [`Panel`]: unsigned codes of a byte each, four
//! columns of one row together, the same four columns of sixteen rows one after another. A kernel then
//! multiplies the panel with every activation row, four bytes of which are multiplied with all sixteen rows
//! at once: the lanes of its registers are rows of weights, so that no sum is ever taken across lanes.
//! Several activation rows are computed together, since they share the loads of weights.
//!
//! The activations are stored in the order in which kernels read them: [`Tiles`].

#[cfg(target_arch = "x86_64")]
mod amx;
mod dots;
mod kernels;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;
#[cfg(target_arch = "aarch64")]
mod sme;
mod unpack;
#[cfg(any(
    target_arch = "aarch64",
    all(target_arch = "wasm32", target_feature = "simd128")
))]
mod unpack_vector;
#[cfg(target_arch = "x86_64")]
mod unpack_x86;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::cell::RefCell;
use std::ops::Range;

use sterna_format::DType;

#[cfg(target_arch = "x86_64")]
pub(super) use dots::Acts;

#[cfg(target_arch = "aarch64")]
use super::activations::SIXTEEN;
use super::activations::{Order, QuantizedRows, Scaling, Tiles};
use super::ternary::TernaryMatrix;
use super::{BlockMatrix, Columns};
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
use crate::isa::Level;
use crate::isa::{Isa, multiversion};
use crate::quant::integers::SUPER_LEN;
use crate::quant::ternary;

/// Rows of weights in a panel.
pub(super) const ROWS: usize = super::ROWS;

/// Columns of a panel at most: 16 KiB of codes, which stay in the first-level cache.
const COLUMNS: usize = 1024;

/// Values that belong to the rows of a panel.
type Lanes<T> = [T; ROWS];

/// A range of columns of sixteen rows of weights.
#[repr(C, align(64))]
pub(super) struct Panel {
    /// `[columns / 4][row][4]`: the integers of a block, plus the bias of the type.
    pub(super) codes: [Lanes<[u8; 4]>; COLUMNS / 4],
    /// The integer scale of each 16 columns of a block of 256.
    pub(super) scales: [Lanes<i32>; 16],
    /// What the sums of each two 16 activations are multiplied with: the minimums of a block of 256
    /// if its type has them, else its scales.
    pub(super) offsets: [Lanes<[i16; 2]>; 8],
    /// The scale of a block of 256, or of each 32 columns.
    pub(super) d: [Lanes<f32>; 8],
    /// The scale of the minimums of a block of 256.
    pub(super) dmin: Lanes<f32>,
}

impl Panel {
    pub(super) const EMPTY: Panel = Panel {
        codes: [[[0; 4]; ROWS]; COLUMNS / 4],
        scales: [[0; ROWS]; 16],
        offsets: [[[0; 2]; ROWS]; 8],
        d: [[0.0; ROWS]; 8],
        dmin: [0.0; ROWS],
    };
}

/// Sums of a panel's rows, in a cache line of their own.
#[derive(Clone, Copy, Default)]
#[repr(C, align(64))]
struct Line<T>(Lanes<T>);

impl<T> Line<T> {
    /// The same sums.
    fn lanes_mut(lines: &mut [Line<T>]) -> &mut [Lanes<T>] {
        const { assert!(size_of::<Line<T>>() == size_of::<Lanes<T>>()) };
        // SAFETY: a line is its sums and nothing else.
        unsafe { std::slice::from_raw_parts_mut(lines.as_mut_ptr().cast(), lines.len()) }
    }
}

/// Memory that a thread reuses from task to task.
struct Scratch {
    panel: Panel,
    /// Of each panel and activation row the integer sums of ternary weights, or the float sums of others so far.
    integers: Vec<Line<i32>>,
    floats: Vec<Line<f32>>,
}

thread_local! {
    static SCRATCH: RefCell<Box<Scratch>> = RefCell::new(Box::new(Scratch {
        panel: Panel::EMPTY,
        integers: Vec::new(),
        floats: Vec::new(),
    }));
}

/// The products of a panel with every activation row.
struct Kernel<T> {
    /// Columns that are unpacked at a time.
    columns: usize,
    /// What has to be done before the first panel and after the last, in the same thread.
    ///
    /// Safety: as [`Products`].
    begin: unsafe fn(),
    end: unsafe fn(),
    add: Products<T>,
}

/// Adds the products of the columns `columns` of a panel to the sums of every activation row.
///
/// # Safety
/// The machine has the instruction set that the kernel was asked for, and `x` the order. The sums are as many as the
/// rows of `x`, which has these columns.
type Products<T> =
    unsafe fn(panel: &Panel, x: &Tiles, columns: Range<usize>, sums: &mut [Lanes<T>]);

/// The least activation rows that tiles of AMX multiply faster than other instructions do, as measured: tiles have sixteen
/// rows, whether there are as many or not, and where blocks have scales, sums leave them after every few columns.
#[cfg(target_arch = "x86_64")]
fn min_lines(scaling: Scaling) -> usize {
    match scaling {
        Scaling::Row => 8,
        Scaling::Blocks256 => 32,
        Scaling::Blocks32 => 48,
    }
}

/// The order in which kernels of `isa` read `m` rows of activations with this scaling.
pub(super) fn order(isa: Isa, scaling: Scaling, m: usize) -> Order {
    #[cfg(target_arch = "x86_64")]
    if isa.level() == Level::Amx && m >= min_lines(scaling) {
        return Order::Lines;
    }
    // Whole tiles; no machine was there to measure fewer rows with.
    #[cfg(target_arch = "aarch64")]
    if isa.level() == Level::Sme && scaling == Scaling::Row && m >= SIXTEEN {
        return Order::Sixteens;
    }
    let _ = (isa, scaling, m);
    Order::Quads
}

/// Panels that are multiplied with a range of columns of the activations before the next range: what they share comes from
/// a nearer cache.
///
/// Their results are written together: a cache line for each panel and activation row, which are a row of the output apart,
/// so that several adjacent ones save address translations.
const PANELS: usize = 4;

/// As [`super::ternary::multiply`].
pub(super) fn multiply_ternary(
    isa: Isa,
    w: &TernaryMatrix<'_>,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    let unpack = unpack::ternary(isa, w.packing());
    let k = w.padded_k();
    let bytes = |columns: &Range<usize>| w.packing().bytes(columns);
    let tile = |first: usize| {
        let codes = panel_rows(first, &rows, |i| w.row(i));
        move |columns: Range<usize>, panel: &mut Panel| {
            prefetch(&codes, bytes(&(columns.end..k.min(columns.end + COLUMNS))));
            // SAFETY: it was picked by `isa`, which this machine has been seen to offer.
            unsafe { unpack(&codes, columns, panel) };
        }
    };
    multiply_trits(isa, (w.scale(), k), rows.clone(), x, out, tile);
}

/// The products of the rows `rows` of a matrix of `k` columns of trits with a `scale` with every activation row. `unpack` is
/// called as that of [`multiply_groups`], with ranges of up to [`COLUMNS`] columns, whole blocks of trits.
pub(super) fn multiply_trits<U: FnMut(Range<usize>, &mut Panel)>(
    isa: Isa,
    (scale, k): (f32, usize),
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
    unpack: impl Fn(usize) -> U,
) {
    let kernel = kernels::ternary(isa, x.tiles().order());
    let k = k.next_multiple_of(ternary::BLOCK);
    SCRATCH.with_borrow_mut(|scratch| {
        let Scratch {
            panel, integers, ..
        } = &mut **scratch;
        multiply(
            &kernel,
            (panel, integers),
            (rows, k),
            x.tiles(),
            unpack,
            |rows, sums| {
                for t in 0..x.m() {
                    let act = x.row(t);
                    let scale = scale / act.scales[0];
                    // SAFETY: no other task has these rows, so none writes these columns.
                    let out = unsafe { out.row_mut(t, rows.clone()) };
                    write_scaled(isa, &sums[t..], x.tiles().m(), act.sum, scale, out);
                }
            },
        );
    });
}

/// As [`super::integer::multiply`], for types that have a scaling there.
pub(super) fn multiply_blocks(
    isa: Isa,
    w: &BlockMatrix<'_>,
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
) {
    let (dtype, k) = (w.dtype(), w.k());
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    let bytes = |columns: &Range<usize>| columns.start / len * size..columns.end / len * size;
    let unpack = |first: usize| {
        let blocks = panel_rows(first, &rows, |i| w.rows(i, 1));
        move |columns: Range<usize>, panel: &mut Panel| {
            let next = columns.end..k.min(columns.end + SUPER_LEN);
            prefetch(&blocks, bytes(&next));
            unpack::blocks(isa, dtype, &blocks, bytes(&columns), panel);
        }
    };
    multiply_groups(isa, (dtype, k), rows.clone(), x, out, unpack);
}

/// The products of the rows `rows` of a matrix of `k` columns with every activation row. `unpack` is called with the first
/// of sixteen rows, and what it returns with one range of 256 columns of these after another, to write them into a panel;
/// rows past `rows` may be anything.
pub(super) fn multiply_groups<U: FnMut(Range<usize>, &mut Panel)>(
    isa: Isa,
    (dtype, k): (DType, usize),
    rows: Range<usize>,
    x: &QuantizedRows,
    out: &Columns<'_>,
    unpack: impl Fn(usize) -> U,
) {
    let kernel = kernels::blocks(isa, x.tiles().order(), dtype)
        .expect("every type with a scaling has a kernel");
    SCRATCH.with_borrow_mut(|scratch| {
        let Scratch { panel, floats, .. } = &mut **scratch;
        multiply(
            &kernel,
            (panel, floats),
            (rows, k),
            x.tiles(),
            unpack,
            |rows, sums| {
                for t in 0..x.m() {
                    // SAFETY: no other task has these rows, so none writes these columns.
                    let out = unsafe { out.row_mut(t, rows.clone()) };
                    write(isa, &sums[t..], x.tiles().m(), out);
                }
            },
        );
    });
}

multiversion! {
    /// Writes a row of results, the sums of every `stride`th of `sums`.
    fn write(sums: &[Lanes<f32>], stride: usize, out: &mut [f32]) {
        let (whole, rest) = out.as_chunks_mut::<ROWS>();
        let mut sums = sums.iter().step_by(stride);
        for (out, sums) in whole.iter_mut().zip(&mut sums) {
            *out = *sums;
        }
        if let Some(sums) = sums.next() {
            rest.copy_from_slice(&sums[..rest.len()]);
        }
    }
}

multiversion! {
    /// The same of trits, whose sums are too large by `excess`, times a scale.
    fn write_scaled(
        sums: &[Lanes<i32>],
        stride: usize,
        excess: i32,
        scale: f32,
        out: &mut [f32],
    ) {
        let scaled = |out: &mut [f32], sums: &Lanes<i32>| {
            for (out, sum) in out.iter_mut().zip(sums) {
                *out = (sum - excess) as f32 * scale;
            }
        };
        let (whole, rest) = out.as_chunks_mut::<ROWS>();
        let mut sums = sums.iter().step_by(stride);
        for (out, sums) in whole.iter_mut().zip(&mut sums) {
            scaled(out, sums);
        }
        if let Some(sums) = sums.next() {
            scaled(rest, sums);
        }
    }
}

/// The products of the rows `rows` of a matrix of `k` columns, of [`PANELS`] at a time, whose rows and sums, `[panel][row of
/// x]`, are passed to `write`. `unpack` is as that of [`multiply_groups`].
fn multiply<T: Copy + Default, U: FnMut(Range<usize>, &mut Panel)>(
    kernel: &Kernel<T>,
    (panel, sums): (&mut Panel, &mut Vec<Line<T>>),
    (rows, k): (Range<usize>, usize),
    x: &Tiles,
    unpack: impl Fn(usize) -> U,
    write: impl Fn(Range<usize>, &[Lanes<T>]),
) {
    // SAFETY: it was picked by the instruction set, which this machine has been seen to offer.
    unsafe { (kernel.begin)() };
    for first in rows.clone().step_by(PANELS * ROWS) {
        let rows = first..rows.end.min(first + PANELS * ROWS);
        sums.clear();
        sums.resize(rows.len().div_ceil(ROWS) * x.m(), Line::default());
        let sums = Line::lanes_mut(sums);
        let mut unpacks: Vec<U> = rows.clone().step_by(ROWS).map(&unpack).collect();
        for start in (0..k).step_by(kernel.columns) {
            let columns = start..k.min(start + kernel.columns);
            for (unpack, sums) in unpacks.iter_mut().zip(sums.chunks_exact_mut(x.m())) {
                unpack(columns.clone(), panel);
                // SAFETY: as above; rows and activations are padded alike.
                unsafe { (kernel.add)(panel, x, columns.clone(), sums) };
            }
        }
        write(rows, sums);
    }
    // SAFETY: as above.
    unsafe { (kernel.end)() };
}

/// The rows of a panel from `first` on; past `rows` the last is repeated, and its sums are ignored.
fn panel_rows<'a>(
    first: usize,
    rows: &Range<usize>,
    row: impl Fn(usize) -> &'a [u8],
) -> Lanes<&'a [u8]> {
    let mut panel: Lanes<&[u8]> = [&[]; ROWS];
    for (r, panel) in panel.iter_mut().enumerate() {
        *panel = row((first + r).min(rows.end - 1));
    }
    panel
}

/// Prefetches the bytes of each row that are unpacked next: sixteen streams at once are more than a hardware
/// prefetcher follows. Those beyond the rows begin the rows that come next.
fn prefetch(rows: &Lanes<&[u8]>, bytes: Range<usize>) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    for row in rows {
        use super::prefetch::{Level, lines};
        lines(
            Level::First,
            row.as_ptr().wrapping_add(bytes.start),
            bytes.len(),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = (rows, bytes);
}

/// Prefetches what is unpacked next: from one panel to another, hardware prefetchers begin anew.
pub(super) fn prefetch_next<T>(next: Option<&T>) {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    if let Some(next) = next {
        use super::prefetch::{Level, lines};
        lines(
            Level::Second,
            std::ptr::from_ref(next).cast(),
            size_of::<T>(),
        );
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = next;
}
