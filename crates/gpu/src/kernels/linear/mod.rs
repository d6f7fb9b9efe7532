//! Linear layers: weight matrices, and their products with activations.

mod dispatch;
mod embed;
mod planes;
mod stack;

use std::ops::Range;

use sterna_format::DType;

use crate::error::{expect, expect_most};
use crate::kernels::Rows;
use crate::kernels::elementwise::Activation;
use crate::kernels::quantize::{QuantizedRows, Scaling, halve, quantize};
use crate::memory::{Buffer, Upload};
use crate::tuning::{Product, RowClass};
use crate::{Device, GpuError, Recorder};

pub use crate::WeightKind;
use dispatch::Source;
pub(crate) use dispatch::{
    COOP_SUMS_BYTES, LEAST_COOP_TRITS, LinearParams, TwoLinearParams, has_matrix_units, parts_of,
    reads_halves, rounds_itself, settled,
};
pub(crate) use embed::EmbedParams;
pub use embed::{Ids, embed};
pub(crate) use stack::GroupRoutesParams;
pub use stack::{Choice, Stack, can_choose, choose_and_multiply, multiply_routed};

/// A weight matrix `[n, k]` on a device. Two are equal if they are the same memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Linear {
    n: usize,
    k: usize,
    kind: WeightKind,
    /// Rows, split where a kernel's binding would exceed the device's limit.
    pieces: Vec<Piece>,
}

/// Some of the rows of a matrix.
#[derive(Debug, Clone, PartialEq)]
struct Piece {
    /// The number of its first row, a multiple of [`ROW_GRAIN`].
    first: usize,
    /// Its rows.
    n: usize,
    /// Rows of the buffers before them.
    begin: usize,
    codes: Buffer,
    /// Scales of rows of trits, or of blocks that are stored apart from their codes.
    scales: Buffer,
}

/// Pieces begin at multiples of this many rows: pairs of rows stay together, and so do words.
pub const ROW_GRAIN: usize = 8;

impl WeightKind {
    /// Whether there are kernels for such weights.
    pub fn is_supported(self) -> bool {
        planes::Planes::of(self).is_some()
    }

    /// Bytes of a row of `k` elements, as passed by the caller.
    pub fn row_bytes(self, k: usize) -> usize {
        match self {
            WeightKind::Ternary => k.div_ceil(128) * 32,
            WeightKind::Blocks(dtype) => k / dtype.block_len() * dtype.block_bytes(),
        }
    }

    /// The form in which activations are multiplied with such weights.
    pub fn form(self) -> Form {
        match self {
            WeightKind::Ternary => Form::Int8(Scaling::Row),
            WeightKind::Blocks(DType::Q4_K | DType::Q6_K) => Form::Int8(Scaling::Blocks256),
            WeightKind::Blocks(DType::F32 | DType::F16 | DType::BF16) => Form::Float,
            WeightKind::Blocks(_) => Form::Int8(Scaling::Blocks32),
        }
    }
}

/// A form of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Quantized to int8.
    Int8(Scaling),
    /// Left as floats.
    Float,
}

/// Activations in a [`Form`].
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// Quantized rows, from the first one on, of the matrix's width.
    Int8(&'a QuantizedRows),
    /// Floats.
    Float(Rows<'a>),
    /// Floats that go as f16 through `scratch` where matrix units multiply them.
    Half {
        /// The floats.
        x: Rows<'a>,
        /// Memory for as many rows.
        scratch: &'a QuantizedRows,
    },
    /// Floats that are normalised first, by weights `[k]` and with an eps: for weights that are floats, and few rows.
    Normed(Rows<'a>, (&'a Buffer, f32)),
    /// Floats to be quantized to the form of the weights, normalised first if there is a norm, its weights
    /// `[k]` and eps. Few rows are quantized by the product itself, many go through `scratch`.
    Round {
        /// The floats.
        x: Rows<'a>,
        /// The norm.
        norm: Option<(&'a Buffer, f32)>,
        /// Memory for quantized rows.
        scratch: &'a QuantizedRows,
    },
}

/// What is done with the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// `out ← x · wᵀ`.
    Store,
    /// `out ← out + x · wᵀ`: the residual.
    Add,
    /// `out[i] ← activation(row i) · (row n/2 + i)`: gate and up projection adjacent in one piece. The output
    /// is half as wide as the matrix is high.
    Gate(Activation),
}

impl Epilogue {
    /// Columns of the output of a matrix of `n` rows.
    pub fn width(self, n: usize) -> usize {
        match self {
            Epilogue::Store | Epilogue::Add => n,
            Epilogue::Gate(_) => n / 2,
        }
    }

    fn constants(self) -> [(&'static str, f64); 2] {
        let (epilogue, activation) = match self {
            Epilogue::Store => (0, 0),
            Epilogue::Add => (1, 0),
            Epilogue::Gate(activation) => (2, activation as u8),
        };
        [
            ("EPILOGUE", f64::from(epilogue)),
            ("ACTIVATION", f64::from(activation)),
        ]
    }
}

impl Linear {
    /// Uploads `n` rows of `k` elements, [`WeightKind::row_bytes`] each.
    ///
    /// `scales` are the scales of each row of trits, `[n]`; empty for other kinds.
    ///
    /// Errors: those of [`Linear::new`] and [`Linear::write`].
    pub fn upload(
        device: &Device,
        upload: &mut Upload,
        kind: WeightKind,
        (n, k): (usize, usize),
        scales: &[f32],
        rows: &[u8],
    ) -> Result<Linear, GpuError> {
        let linear = Linear::new(device, kind, (n, k), scales)?;
        linear.write(upload, 0..n, rows)?;
        Ok(linear)
    }

    /// Memory for `n` rows of `k` elements, which [`Linear::write`] fills.
    ///
    /// `scales` are the scales of each row of trits, `[n]`; empty for other kinds.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Unsupported`] for kinds without kernels;
    /// [`GpuError::Shape`] if `scales` doesn't fit, `k` isn't whole blocks, or none, or eight rows exceed the device's
    /// binding size.
    pub fn new(
        device: &Device,
        kind: WeightKind,
        (n, k): (usize, usize),
        scales: &[f32],
    ) -> Result<Linear, GpuError> {
        let planes = planes_of(kind)?;
        match kind {
            WeightKind::Ternary => {
                expect("ternary matrix: scales", n, scales.len())?;
                expect_most("ternary matrix: columns", MAX_TERNARY_K, k)?;
            }
            WeightKind::Blocks(dtype) => {
                expect("matrix: scales of rows", 0, scales.len())?;
                // Kernels load a block of a row before they ask how many there are.
                let whole = k.max(1).next_multiple_of(dtype.block_len());
                expect("matrix: columns", whole, k)?;
            }
        }
        let row_bytes = planes.row_bytes(k).max(1);
        let most = most_bytes(device);
        expect_most(
            "bytes of eight rows of a matrix",
            most,
            row_bytes * ROW_GRAIN,
        )?;
        let piece_rows = most / row_bytes / ROW_GRAIN * ROW_GRAIN;
        let mut pieces = Vec::new();
        for first in (0..n).step_by(piece_rows) {
            let n = piece_rows.min(n - first);
            pieces.push(Piece {
                first,
                n,
                begin: 0,
                codes: device.buffer("weights", (n * row_bytes) as u64)?,
                scales: match kind {
                    WeightKind::Ternary => device.upload(&scales[first..first + n])?,
                    WeightKind::Blocks(_) => {
                        device.buffer("scales of weights", planes.scale_bytes(n, k) as u64)?
                    }
                },
            });
        }
        Ok(Linear { n, k, kind, pieces })
    }

    /// Writes `rows`, which are those of `range`, [`WeightKind::row_bytes`] each; it begins at a multiple of
    /// [`ROW_GRAIN`].
    ///
    /// Errors: [`GpuError::Shape`] for rows that it doesn't have, that begin elsewhere, or of another size;
    /// [`GpuError::Lost`].
    pub fn write(
        &self,
        upload: &mut Upload,
        range: Range<usize>,
        rows: &[u8],
    ) -> Result<(), GpuError> {
        let planes = planes_of(self.kind)?;
        expect_most("rows of a matrix", self.n, range.end)?;
        let grain = range.start.next_multiple_of(ROW_GRAIN);
        expect("first row that is written", grain, range.start)?;
        let stride = self.kind.row_bytes(self.k);
        let n_bytes = stride.saturating_mul(range.len());
        expect("bytes of a matrix", n_bytes, rows.len())?;
        for piece in &self.pieces {
            let start = range.start.max(piece.first);
            let end = range.end.min(piece.first + piece.n);
            if start < end {
                let own = start - piece.first..end - piece.first;
                let rows = &rows[(start - range.start) * stride..(end - range.start) * stride];
                let buffers = [&piece.codes, &piece.scales];
                planes.upload(upload, self.k, own, buffers, rows)?;
            }
        }
        Ok(())
    }

    /// Concatenates the matrices `parts` into one, so that products that read the same input become one.
    /// `None` if their kinds and widths don't permit it, or the whole exceeds the device's binding size.
    ///
    /// Errors: [`GpuError::OutOfMemory`], as both the parts and the whole exist for a moment.
    pub fn join(device: &Device, parts: &[&Linear]) -> Result<Option<Linear>, GpuError> {
        let Some(&Linear { k, kind, .. }) = parts.first().copied() else {
            return Ok(None);
        };
        let Some(planes) = planes::Planes::of(kind) else {
            return Ok(None);
        };
        let n: usize = parts.iter().map(|part| part.n).sum();
        let bytes = |n| [n * planes.row_bytes(k), planes.scale_bytes(n, k)];
        // Pieces are copied in words.
        let in_words = |n| bytes(n).iter().all(|bytes| bytes % 4 == 0);
        let fits = |part: &&Linear| {
            let is_one = part.pieces.len() == 1 && in_words(part.pieces[0].begin);
            part.k == k && part.kind == kind && is_one && in_words(part.n)
        };
        if !parts.iter().all(fits) || bytes(n)[0] > most_bytes(device) {
            return Ok(None);
        }
        let codes = device.buffer("weights", bytes(n)[0] as u64)?;
        let scales = device.buffer("scales of weights", bytes(n)[1] as u64)?;
        let mut first = 0;
        for part in parts {
            let piece = &part.pieces[0];
            for (from, to, i) in [(&piece.codes, &codes, 0), (&piece.scales, &scales, 1)] {
                let [start, at] = [piece.begin, first].map(|rows| bytes(rows)[i] as u64);
                device.copy((from, start), (to, at), bytes(part.n)[i] as u64)?;
            }
            first += part.n;
        }
        let piece = Piece {
            first: 0,
            n,
            begin: 0,
            codes,
            scales,
        };
        Ok(Some(Linear {
            n,
            k,
            kind,
            pieces: vec![piece],
        }))
    }

    /// The rows `rows` as a matrix of its own, in the same memory; `None` if they are in several pieces.
    pub fn rows(&self, rows: Range<usize>) -> Option<Linear> {
        let holds = |piece: &&Piece| piece.first <= rows.start && rows.end <= piece.first + piece.n;
        let piece = self.pieces.iter().find(holds)?;
        let own = Piece {
            first: 0,
            n: rows.len(),
            begin: piece.begin + rows.start - piece.first,
            ..piece.clone()
        };
        Some(Linear {
            n: rows.len(),
            pieces: vec![own],
            ..*self
        })
    }

    /// Output features.
    pub fn n(&self) -> usize {
        self.n
    }

    /// Input features.
    pub fn k(&self) -> usize {
        self.k
    }

    /// The kind of its weights.
    pub fn kind(&self) -> WeightKind {
        self.kind
    }

    /// The tuning key of a product of it and `n_rows` rows of activations.
    pub fn product(&self, n_rows: usize) -> Product {
        Product {
            weights: self.kind,
            n: self.n,
            k: self.k,
            rows: RowClass::of(n_rows),
        }
    }

    /// The number of pieces: dispatches per product.
    pub fn n_pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Bytes of device memory.
    pub fn bytes(&self) -> u64 {
        let pieces = self.pieces.iter();
        pieces.map(|p| p.codes.bytes() + p.scales.bytes()).sum()
    }
}

fn planes_of(kind: WeightKind) -> Result<planes::Planes, GpuError> {
    planes::Planes::of(kind).ok_or_else(|| GpuError::Unsupported {
        what: format!("{kind:?} weights"),
        reason: "there are no kernels for them".into(),
    })
}

/// Maximum bytes of a piece, which a kernel binds as a whole.
fn most_bytes(device: &Device) -> usize {
    let limits = device.limits();
    limits.binding_bytes.min(limits.buffer_bytes) as usize
}

/// Errors unless a norm has weights for rows of `k`.
fn check_norm((norm, _): (&Buffer, f32), k: usize) -> Result<(), GpuError> {
    let n = (norm.bytes() / 4) as usize;
    expect_most("linear: weights of the norm", n, k)
}

/// Sixteen times the sums of products of codes and activations must fit i32.
const MAX_TERNARY_K: usize = (1 << 19) - 128;

/// `out ← x · wᵀ`, or what `epilogue` says, for the rows of `out`.
///
/// Errors: [`GpuError::Shape`] if shapes don't match; [`GpuError::Unsupported`] if `x` has another form than
/// [`WeightKind::form`] of the weights.
/// Exactness: see `docs/gpu.md`; for ternary weights, the bits of `sterna_kernels::gemm`, unless rows are normalised first.
pub fn multiply(
    recorder: &mut Recorder,
    w: &Linear,
    x: Input<'_>,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    check_output(w, epilogue, &out)?;
    let source = match (w.kind.form(), x) {
        (Form::Int8(_), Input::Int8(x)) => {
            x.expect_room(out.n_rows, w.k)?;
            Source::Stored(x)
        }
        (Form::Float, Input::Float(x)) => {
            check_input(w, &x, &out)?;
            Source::Floats(x, None)
        }
        (Form::Float, Input::Half { x, scratch }) => {
            check_input(w, &x, &out)?;
            if dispatch::halves_floats(recorder, w, &x) {
                halve(recorder, x, scratch)?;
                Source::Halves(scratch)
            } else {
                Source::Floats(x, None)
            }
        }
        (Form::Float, Input::Normed(x, norm)) => {
            check_input(w, &x, &out)?;
            check_norm(norm, w.k)?;
            if RowClass::of(x.n_rows) == RowClass::Many {
                return Err(GpuError::Unsupported {
                    what: format!("a product of floats and {} normalised rows", x.n_rows),
                    reason: "kernels take few".into(),
                });
            }
            Source::Floats(x, Some(norm))
        }
        (Form::Int8(scaling), Input::Round { x, norm, scratch }) => {
            check_input(w, &x, &out)?;
            if let Some(norm) = norm {
                check_norm(norm, w.k)?;
            }
            if dispatch::rounds_itself(recorder, w, &x) {
                Source::Own { x, norm, scaling }
            } else {
                quantize(recorder, x, norm, scaling, scratch)?;
                Source::Stored(scratch)
            }
        }
        (form, _) => {
            return Err(GpuError::Unsupported {
                what: format!("{:?} weights with activations of another form", w.kind),
                reason: format!("they take {form:?}"),
            });
        }
    };
    dispatch::multiply(recorder, w, source, epilogue, out, false)
}

/// The sums of the [`parts_of`] a product of rows that are quantized, in their scratch memory; `out` is where the product would
/// be stored, or added.
pub(crate) fn multiply_parts(
    recorder: &mut Recorder,
    w: &Linear,
    x: Input<'_>,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    let Input::Int8(x) = x else {
        return Err(GpuError::Unsupported {
            what: "a product in parts of rows that aren't quantized".into(),
            reason: "its kernels take int8".into(),
        });
    };
    check_output(w, Epilogue::Store, &out)?;
    x.expect_room(out.n_rows, w.k)?;
    dispatch::multiply(recorder, w, Source::Stored(x), Epilogue::Store, out, true)
}

/// [`multiply`] of the same row by two matrices with the same epilogue, in one dispatch, if there is a kernel for them: of
/// Q4_K beside Q6_K, none of them gated, and results in different columns of the same row. Returns whether there is; if
/// not, nothing is recorded.
///
/// Errors and exactness: as [`multiply`].
pub fn multiply_beside(
    recorder: &mut Recorder,
    products: [(&Linear, Rows<'_>); 2],
    x: Input<'_>,
    epilogue: Epilogue,
) -> Result<bool, GpuError> {
    for (w, out) in &products {
        check_output(w, epilogue, out)?;
    }
    let [(w, out), (_, second_out)] = products;
    let [start, second_start] = [out.offset, second_out.offset];
    let is_apart = start + out.width <= second_start || second_start + second_out.width <= start;
    if matches!(epilogue, Epilogue::Gate(_))
        || [out.n_rows, second_out.n_rows] != [1, 1]
        || !is_apart
    {
        return Ok(false);
    }
    let source = match x {
        Input::Int8(x) => {
            x.expect_room(out.n_rows, w.k)?;
            Source::Stored(x)
        }
        Input::Round { x, norm, .. } => {
            check_input(w, &x, &out)?;
            if let Some(norm) = norm {
                check_norm(norm, w.k)?;
            }
            let rounds = |(w, _): &(&Linear, _)| dispatch::rounds_itself(recorder, w, &x);
            match w.kind.form() {
                Form::Int8(scaling) if products.iter().all(rounds) => {
                    Source::Own { x, norm, scaling }
                }
                _ => return Ok(false),
            }
        }
        Input::Float(_) | Input::Half { .. } | Input::Normed(..) => return Ok(false),
    };
    dispatch::multiply_beside(recorder, products, source, epilogue)
}

/// Errors unless `out` has the width of the results.
fn check_output(w: &Linear, epilogue: Epilogue, out: &Rows<'_>) -> Result<(), GpuError> {
    out.check("linear: output")?;
    expect(
        "linear: width of the output",
        epilogue.width(w.n),
        out.width,
    )?;
    if let Epilogue::Gate(_) = epilogue {
        expect("gated linear: rows", w.n.next_multiple_of(2), w.n)?;
        expect_most("gated linear: pieces", 1, w.pieces.len())?;
    }
    Ok(())
}

/// Errors unless `x` are rows as `w` takes them, as many as `out` has.
fn check_input(w: &Linear, x: &Rows<'_>, out: &Rows<'_>) -> Result<(), GpuError> {
    x.check("linear: input")?;
    expect("linear: width of the input", w.k, x.width)?;
    expect("linear: rows of the output", x.n_rows, out.n_rows)
}
