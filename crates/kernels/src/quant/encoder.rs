//! Encoding matrices as blocks and decoding them, on all threads.

use std::ops::Range;

use sterna_format::DType;

use super::search::search;
use super::{
    QuantError, check_sizes, decode_row, encode_directly, encode_row_quick, i2_s, is_searched,
};
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::repack::try_ranges;
use crate::shape::expect_len;
use crate::{Exec, Isa};

/// Elements that are encoded at a time: whole blocks of every type, and few enough that the decoded values of
/// a matrix stay in the nearest caches.
const PART: usize = 4096;

/// Parts per task.
const PARTS_PER_TASK: usize = 4;

/// Encodes values as blocks of a type.
type Encode = fn(Isa, DType, &[f32], &mut [u8]) -> Result<(), QuantError>;

/// Encodes the rows of a matrix, any number at a time.
///
/// Where scales can be searched for, [`Encoder::new`] does so and [`Encoder::quick`] doesn't; a program that only
/// has the latter is linked without the searches.
///
/// The result doesn't depend on how the rows are divided into calls, on threads or on instruction sets.
///
/// ```
/// use sterna_format::DType;
/// use sterna_kernels::quant::{Encoder, decode_rows};
/// use sterna_kernels::{Exec, Isa};
///
/// let exec = Exec::new(2, Isa::detect());
/// let rows: Vec<f32> = (0..512).map(|i| (i as f32).sin()).collect();
/// let encoder = Encoder::new(DType::Q4_K, 256)?;
/// let mut blocks = vec![0; encoder.bytes_of(rows.len())?];
/// encoder.encode(&exec, 0, &rows, &mut blocks)?;
/// let mut back = vec![0.0; 512];
/// decode_rows(&exec, DType::Q4_K, &blocks, &mut back)?;
/// assert!(rows.iter().zip(back).all(|(a, b)| (a - b).abs() < 0.1));
/// # Ok::<(), sterna_kernels::quant::QuantError>(())
/// ```
#[derive(Debug, Clone, Copy)]
pub struct Encoder {
    dtype: DType,
    k: usize,
    /// Unless the type is I2_S.
    encode: Encode,
    /// Of I2_S, whose scale belongs to the whole tensor.
    scale: f32,
}

impl Encoder {
    /// For rows of `k` elements, made into blocks of `dtype` to be encoded once and read often: the K types and
    /// Q4_0 search for the scales of the smallest error. Q4_K and Q5_K weight errors by magnitude and Q6_K by its
    /// square, as the reference quantizers do; the other types weight all equally.
    ///
    /// Errors: [`QuantError::Unsupported`] for types that [`encode_row`](super::encode_row) doesn't take, and for
    /// I2_S, which has [`Encoder::i2_s`]; [`QuantError::PartialBlock`] if a row isn't whole blocks.
    pub fn new(dtype: DType, k: usize) -> Result<Encoder, QuantError> {
        if is_searched(dtype) || dtype == DType::Q4_0 {
            Encoder::with(dtype, k, search)
        } else {
            Encoder::with(dtype, k, encode_direct)
        }
    }

    /// As [`Encoder::new`], but scales are found in one pass, for encoding while a model is being loaded.
    ///
    /// Errors: as [`Encoder::new`].
    pub fn quick(dtype: DType, k: usize) -> Result<Encoder, QuantError> {
        Encoder::with(dtype, k, encode_quick)
    }

    fn with(dtype: DType, k: usize, encode: Encode) -> Result<Encoder, QuantError> {
        encode(Isa::SCALAR, dtype, &[], &mut [])?;
        if !k.is_multiple_of(dtype.block_len()) {
            return Err(QuantError::PartialBlock {
                dtype,
                elements: k,
                block_len: dtype.block_len(),
            });
        }
        Ok(Encoder {
            dtype,
            k,
            encode,
            scale: 0.0,
        })
    }

    /// For rows of `k` values that are exactly `−scale`, 0 or `scale`, encoded as I2_S; see
    /// [`TernaryScales`](super::TernaryScales).
    ///
    /// The blocks cover the flattened tensor, so that `k` may be any number; what is encoded in one call must
    /// be whole blocks. The codes of the last row must be followed by
    /// [`i2_s_trailer`](super::ternary::i2_s_trailer).
    pub fn i2_s(k: usize, scale: f32) -> Encoder {
        Encoder {
            dtype: DType::I2_S,
            k,
            encode: encode_direct,
            scale: scale.abs(),
        }
    }

    /// Bytes of the blocks of `elements` elements.
    ///
    /// Errors: [`QuantError::PartialBlock`] if they aren't whole rows, or for I2_S whole blocks.
    pub fn bytes_of(&self, elements: usize) -> Result<usize, QuantError> {
        let unit = match self.dtype {
            DType::I2_S => self.dtype.block_len(),
            _ => self.k.max(1),
        };
        if !elements.is_multiple_of(unit) {
            return Err(QuantError::PartialBlock {
                dtype: self.dtype,
                elements,
                block_len: unit,
            });
        }
        // No overflow in what follows: no type has more bytes than f32 where elements are slices.
        Ok((elements / self.dtype.block_len()).saturating_mul(self.dtype.block_bytes()))
    }

    /// Encodes whole rows, the first of which is row `first_row` of the matrix.
    ///
    /// Shapes: `rows` is `[m, k]`, `out` is `[bytes_of(m · k)]`.
    /// Errors: [`QuantError::PartialBlock`], [`QuantError::Size`]; [`QuantError::InRow`] with the
    /// column of the first value that is NaN, infinite or beyond the type; [`QuantError::NotTernary`]
    /// for I2_S. `out` may have been written in part after an error.
    pub fn encode(
        &self,
        exec: &Exec,
        first_row: usize,
        rows: &[f32],
        out: &mut [u8],
    ) -> Result<(), QuantError> {
        self.encode_parts(exec, first_row, rows.len(), out, |part, out| {
            self.encode_part(exec, &rows[part], out)
        })
    }

    /// As [`Encoder::encode`], of rows stored as blocks of `from`, which are decoded on the way.
    ///
    /// Shapes: `bytes` is `[m, k]` of `from`, and `out` as many rows.
    /// Errors: also those of [`decode_rows`].
    pub fn transcode(
        &self,
        exec: &Exec,
        first_row: usize,
        from: DType,
        bytes: &[u8],
        out: &mut [u8],
    ) -> Result<(), QuantError> {
        let (len, size) = (from.block_len(), from.block_bytes());
        decode_row(from, &[], &mut [])?;
        expect_len(
            "whole blocks: bytes",
            bytes.len() / size * size,
            bytes.len(),
        )?;
        let elements = bytes.len() / size * len;
        self.encode_parts(exec, first_row, elements, out, |part, out| {
            let bytes = &bytes[part.start / len * size..part.end / len * size];
            let mut values = [0.0; PART];
            let values = &mut values[..part.len()];
            decode_part(exec.isa, from, bytes, values)?;
            self.encode_part(exec, values, out)
        })
    }

    /// Divides `elements` into parts of up to [`PART`]; an error of `encode` names an index in its part.
    fn encode_parts(
        &self,
        exec: &Exec,
        first_row: usize,
        elements: usize,
        out: &mut [u8],
        encode: impl Fn(Range<usize>, &mut [u8]) -> Result<(), QuantError> + Sync,
    ) -> Result<(), QuantError> {
        expect_len("blocks: bytes", self.bytes_of(elements)?, out.len())?;
        let part_bytes = PART / self.dtype.block_len() * self.dtype.block_bytes();
        let shared = SharedSlice::new(out);
        try_ranges(exec, elements.div_ceil(PART), PARTS_PER_TASK, |parts| {
            for part in parts {
                let at = part * PART..elements.min((part + 1) * PART);
                let end = at.end / self.dtype.block_len() * self.dtype.block_bytes();
                // SAFETY: parts don't overlap.
                let out = unsafe { shared.range_mut(part * part_bytes..end) };
                encode(at.clone(), out).map_err(|error| self.place(error, first_row, at.start))?;
            }
            Ok(())
        })
    }

    fn encode_part(&self, exec: &Exec, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
        match self.dtype {
            DType::I2_S => encode_trits(exec.isa, self.scale, values, out),
            dtype => (self.encode)(exec.isa, dtype, values, out),
        }
    }

    /// An error found `start` elements after the beginning of row `first_row`, with its index in the matrix.
    fn place(&self, error: QuantError, first_row: usize, start: usize) -> QuantError {
        let place = |index: usize| {
            let at = start + index;
            (first_row + at / self.k.max(1), at % self.k.max(1))
        };
        match error {
            QuantError::NotTernary {
                col, value, scale, ..
            } => {
                let (row, col) = place(col);
                QuantError::NotTernary {
                    row,
                    col,
                    value,
                    scale,
                }
            }
            QuantError::NotFinite { index, value } => {
                let (row, index) = place(index);
                in_row(row, QuantError::NotFinite { index, value })
            }
            QuantError::TooLarge {
                dtype,
                index,
                value,
                max,
            } => {
                let (row, index) = place(index);
                let source = QuantError::TooLarge {
                    dtype,
                    index,
                    value,
                    max,
                };
                in_row(row, source)
            }
            other => other,
        }
    }
}

fn in_row(row: usize, source: QuantError) -> QuantError {
    QuantError::InRow {
        row,
        source: Box::new(source),
    }
}

/// As [`decode_row`], on all threads.
///
/// Shapes: `bytes` is blocks of `dtype`, `out` their elements; rows are irrelevant to all types.
/// Errors: as [`decode_row`].
pub fn decode_rows(
    exec: &Exec,
    dtype: DType,
    bytes: &[u8],
    out: &mut [f32],
) -> Result<(), QuantError> {
    decode_row(dtype, &[], &mut [])?;
    check_sizes(dtype, out.len(), bytes.len())?;
    let (len, size) = (dtype.block_len(), dtype.block_bytes());
    let elements = out.len();
    let shared = SharedSlice::new(out);
    try_ranges(exec, elements.div_ceil(PART), PARTS_PER_TASK, |parts| {
        let at = parts.start * PART..elements.min(parts.end * PART);
        let bytes = &bytes[at.start / len * size..at.end / len * size];
        // SAFETY: parts don't overlap.
        let out = unsafe { shared.range_mut(at) };
        decode_part(exec.isa, dtype, bytes, out)
    })
}

multiversion! {
    fn decode_part(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
        decode_row(dtype, bytes, out)
    }
}

multiversion! {
    fn encode_quick(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
        encode_row_quick(dtype, values, out)
    }
}

multiversion! {
    fn encode_direct(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
        encode_directly(dtype, values, out)
    }
}

multiversion! {
    fn encode_trits(scale: f32, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
        let mut exact = true;
        for (values, block) in values.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
            exact &= i2_s::encode(values, scale, block);
        }
        if exact {
            return Ok(());
        }
        let col = values
            .iter()
            .position(|v| !(*v == 0.0 || v.abs() == scale))
            .expect("the encoder saw such a value");
        Err(QuantError::NotTernary { row: 0, col, value: values[col], scale })
    }
}
