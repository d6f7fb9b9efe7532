//! Linear layers: weight matrices, and activations times them.

mod ternary;

use std::ops::Range;

use crate::error::{expect, expect_most};
use crate::kernels::Rows;
use crate::kernels::elementwise::Activation;
use crate::kernels::quantize::{QuantizedRows, Scaling};
use crate::memory::{Buffer, Upload};
use crate::{Device, GpuError, Recorder};

/// A weight matrix `[n, k]` on a device.
#[derive(Debug, Clone)]
pub struct Linear {
    n: usize,
    k: usize,
    kind: WeightKind,
    /// Rows, cut where a kernel would see more than the device allows at once.
    pieces: Vec<Piece>,
    /// What a trit is worth, `[n]`; nothing for other kinds.
    scales: Option<Buffer>,
}

/// Some of the rows of a matrix.
#[derive(Debug, Clone)]
struct Piece {
    /// The number of its first row, a multiple of [`ROW_GRAIN`].
    first: usize,
    /// Its rows.
    n: usize,
    codes: Buffer,
}

/// Pieces begin at multiples of so many rows: pairs of rows stay together, and so do words.
const ROW_GRAIN: usize = 8;

/// What the weights of a [`Linear`] are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WeightKind {
    /// Trits in the working layout of `sterna_kernels::quant::ternary`: rows padded to blocks of 128,
    /// 32 bytes each.
    Ternary,
}

impl WeightKind {
    /// Bytes of a row of `k` elements, as it is handed over.
    pub fn row_bytes(self, k: usize) -> usize {
        match self {
            WeightKind::Ternary => k.div_ceil(128) * 32,
        }
    }

    /// The form that activations take before they meet such weights.
    pub fn form(self) -> Form {
        match self {
            WeightKind::Ternary => Form::Int8(Scaling::Row),
        }
    }
}

/// A form of activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Form {
    /// Rounded to int8.
    Int8(Scaling),
    /// As they are.
    Float,
}

/// Activations in a [`Form`].
#[derive(Debug, Clone, Copy)]
pub enum Input<'a> {
    /// Rounded rows, from the first one on, of the matrix's width.
    Int8(&'a QuantizedRows),
    /// Floats.
    Float(Rows<'a>),
}

/// What becomes of the products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Epilogue {
    /// `out ← x · wᵀ`.
    Store,
    /// `out ← out + x · wᵀ`: the residual.
    Add,
    /// `out[i] ← activation(row 2i) · (row 2i + 1)`: gate and up projection, whose rows alternate. The
    /// output is half as wide as the matrix is high.
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
    /// Uploads `n` rows of `k` elements. `rows` is asked for runs of rows in order, and fills the memory
    /// it is given with them, [`WeightKind::row_bytes`] each. Matrices that are to be multiplied in one
    /// go are one matrix here, their rows behind one another or taking turns.
    ///
    /// `scales` are what a trit of each row is worth, `[n]`; empty for other kinds.
    ///
    /// Errors: [`GpuError::OutOfMemory`]; [`GpuError::Shape`] if `scales` doesn't fit, or a row is larger
    /// than a slot of `upload` or than a kernel may see; what `rows` returns.
    pub fn upload<E: From<GpuError>>(
        device: &Device,
        upload: &mut Upload,
        kind: WeightKind,
        (n, k): (usize, usize),
        scales: &[f32],
        mut rows: impl FnMut(Range<usize>, &mut [u8]) -> Result<(), E>,
    ) -> Result<Linear, E> {
        let row_bytes = kind.row_bytes(k);
        let WeightKind::Ternary = kind;
        expect("ternary matrix: scales", n, scales.len())?;
        expect_most("ternary matrix: columns", MAX_TERNARY_K, k)?;
        let limits = device.limits();
        let most = limits.binding_bytes.min(limits.buffer_bytes) as usize;
        let piece_rows = (most / row_bytes.max(1) / ROW_GRAIN * ROW_GRAIN).min(n);
        expect_most(
            "bytes of eight rows of a matrix",
            most,
            row_bytes * ROW_GRAIN,
        )?;
        let mut pieces = Vec::new();
        for first in (0..n).step_by(piece_rows.max(1)) {
            let n = piece_rows.min(n - first);
            let bytes = n * row_bytes;
            let codes = device.buffer("weights", bytes as u64)?;
            upload.write_with(&codes, 0, bytes, row_bytes, |start, piece| {
                let start = first + start / row_bytes;
                rows(start..start + piece.len() / row_bytes, piece)
            })?;
            pieces.push(Piece { first, n, codes });
        }
        Ok(Linear {
            n,
            k,
            kind,
            pieces,
            scales: Some(device.upload(scales)?),
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

    /// What its weights are.
    pub fn kind(&self) -> WeightKind {
        self.kind
    }

    /// Into how many pieces it was cut: dispatches of a product.
    pub fn n_pieces(&self) -> usize {
        self.pieces.len()
    }
}

/// Sums of products of codes and activations stay within i32.
const MAX_TERNARY_K: usize = (1 << 23) - 128;

/// `out ← x · wᵀ`, or what `epilogue` says, for the rows of `out`.
///
/// Errors: [`GpuError::Shape`] if shapes don't fit one another, or `x` has another form than
/// [`WeightKind::form`] of the weights.
/// Exactness: see `docs/gpu.md`; for ternary weights, the bits of `sterna_kernels::gemm`.
pub fn multiply(
    recorder: &mut Recorder,
    w: &Linear,
    x: Input<'_>,
    epilogue: Epilogue,
    out: Rows<'_>,
) -> Result<(), GpuError> {
    out.check("linear: output")?;
    expect(
        "linear: width of the output",
        epilogue.width(w.n),
        out.width,
    )?;
    if let Epilogue::Gate(_) = epilogue {
        expect("gated linear: rows", w.n.next_multiple_of(2), w.n)?;
    }
    match (w.kind, x) {
        (WeightKind::Ternary, Input::Int8(x)) => {
            x.expect_room(out.n_rows, w.k)?;
            ternary::multiply(recorder, w, x, epilogue, out)
        }
        (kind, Input::Float(_)) => Err(GpuError::Unsupported {
            what: format!("{kind:?} weights with activations that aren't rounded"),
            reason: format!("they take {:?}", kind.form()),
        }),
    }
}
