//! Ternary weights: the one layout kernels use, and conversion from every stored form.
//!
//! The working layout is that of I2_S files, row by row: a row of `k` trits is padded to a multiple of
//! [`BLOCK`], and each 128 trits take [`BLOCK_BYTES`]. Byte `p` of a block holds elements `p`, `32 + p`,
//! `64 + p` and `96 + p` at bits 7:6, 5:4, 3:2 and 1:0. Codes 0, 1, 2 stand for −1, 0, +1; padding is 0,
//! code 1; code 3 does not occur. The f32 scale of the tensor is stored separately.
//!
//! [`Source`] repacks ranges of rows, without threads or state, so that a caller can parallelise it:
//!
//! ```
//! use sterna_kernels::quant::ternary::{Layout, Source, row_bytes, unpack_row};
//!
//! // Hugging Face form of a [4, 2] matrix: each byte has one column of all four rows.
//! let source = Source::new(Layout::HuggingFace, 4, 2, &[0b10_01_00_10, 0b01_01_10_00])?;
//! let mut codes = vec![0; 4 * row_bytes(2)];
//! source.repack_rows(0..4, &mut codes)?;
//! let mut trits = [0; 2];
//! unpack_row(&codes[row_bytes(2)..][..row_bytes(2)], &mut trits)?;
//! assert_eq!(trits, [-1, 1]);
//! # Ok::<(), sterna_kernels::quant::QuantError>(())
//! ```

use std::ops::Range;

use sterna_format::DType;
pub use sterna_format::I2sLayout;

use super::bits::crumbs;
use super::float::f16_at;
use super::{QuantError, check_sizes, decode_row, tq1_0, tq2_0};
use crate::isa::{Isa, multiversion};
use crate::shape::expect_len;

/// Elements of a block; rows are padded to a multiple of it.
pub const BLOCK: usize = 128;

/// Bytes of a block.
pub const BLOCK_BYTES: usize = 32;

/// Elements in a quarter of a block, which share the position of their two bits.
const QUARTER: usize = BLOCK / 4;

/// The code of a zero trit.
const ZERO: u8 = 1;

/// Bytes of a packed row of `k` trits.
pub const fn row_bytes(k: usize) -> usize {
    k.div_ceil(BLOCK) * BLOCK_BYTES
}

/// How a ternary tensor is stored.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Layout {
    /// I2_S codes, without the scale after them.
    I2S(I2sLayout),
    /// Packed uint8 of Hugging Face checkpoints, `[⌈n/4⌉, k]`: bits `2i+1:2i` of byte `(p, c)` are
    /// row `i·⌈n/4⌉ + p`, column `c`.
    HuggingFace,
    /// Blocks of [`DType::TQ1_0`] or [`DType::TQ2_0`] that share one scale, see
    /// [`common_block_scale`]. Blocks whose scale is 0 become zeros whatever their codes.
    Blocks(DType),
    /// Values that are exactly −scale, 0 or +scale, in any type [`decode_row`] takes; see
    /// [`common_value_scale`].
    Values {
        /// Type of the values.
        dtype: DType,
        /// Their common magnitude; 0 for a tensor of zeros.
        scale: f32,
    },
    /// Master weights to be quantized: `clamp(round_half_even(w · multiplier), −1, 1)`; see [`abs_sums`] and
    /// [`absmean_multiplier`].
    Masters {
        /// Type of the weights.
        dtype: DType,
        /// Their multiplier. The scale of the trits is `1 / multiplier`.
        multiplier: f32,
    },
}

/// A stored ternary tensor of validated size, ready to be repacked.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    layout: Layout,
    n: usize,
    k: usize,
    bytes: &'a [u8],
}

impl<'a> Source<'a> {
    /// A tensor of shape `[n, k]` in `bytes`, which holds nothing else.
    ///
    /// Errors: [`QuantError::Layout`] if the layout can't hold the shape (I2_S without padding needs
    /// `n·k` to be a multiple of 128, its form `Rows4` also `n` of 4), [`QuantError::PartialBlock`],
    /// [`QuantError::Size`] if `bytes` has another length, [`QuantError::Unsupported`].
    pub fn new(layout: Layout, n: usize, k: usize, bytes: &'a [u8]) -> Result<Self, QuantError> {
        let shape = |layout, rule| QuantError::Layout { layout, n, k, rule };
        let elements = n
            .checked_mul(k)
            .ok_or(shape("ternary", "a product that fits the address space"))?;
        match layout {
            Layout::I2S(I2sLayout::PaddedRows) => {
                let size = n
                    .checked_mul(row_bytes(k))
                    .ok_or(shape("I2_S", "rows that fit the address space"))?;
                expect_len("I2_S codes: bytes", size, bytes.len())?;
            }
            Layout::I2S(form) => {
                if !elements.is_multiple_of(BLOCK) {
                    return Err(shape("I2_S", "a multiple of 128 elements"));
                }
                if form == I2sLayout::Rows4 && !n.is_multiple_of(4) {
                    return Err(shape("I2_S rows4", "a multiple of 4 rows"));
                }
                expect_len("I2_S codes: bytes", elements / 4, bytes.len())?;
            }
            Layout::HuggingFace => {
                // No overflow: at most n·k.
                expect_len(
                    "packed uint8 weights: bytes",
                    n.div_ceil(4) * k,
                    bytes.len(),
                )?;
            }
            Layout::Blocks(dtype) => {
                if !matches!(dtype, DType::TQ1_0 | DType::TQ2_0) {
                    return Err(QuantError::Unsupported {
                        op: "repack",
                        dtype,
                    });
                }
                check_rows(dtype, elements, k, bytes.len())?;
            }
            Layout::Values { dtype, .. } | Layout::Masters { dtype, .. } => {
                decode_row(dtype, &[], &mut [])?;
                check_rows(dtype, elements, k, bytes.len())?;
            }
        }
        Ok(Source {
            layout,
            n,
            k,
            bytes,
        })
    }

    /// Writes rows `rows` in the working layout.
    ///
    /// Shapes: `out` is `[rows.len() · row_bytes(k)]`.
    /// Errors: [`QuantError::Rows`], [`QuantError::Size`]; [`QuantError::InvalidCode`] where a
    /// two-bit code is 3, [`QuantError::BadScale`] for a block scale that is no finite number,
    /// [`QuantError::NotTernary`] for a value that doesn't have the scale's magnitude. `out` may
    /// have been written in part after an error.
    pub fn repack_rows(&self, rows: Range<usize>, out: &mut [u8]) -> Result<(), QuantError> {
        let k = self.k;
        self.check_range(&rows)?;
        // No overflow: row_bytes(k) is at most max(32, k) and `out` would have to be that long.
        expect_len(
            "packed rows: bytes",
            rows.len().saturating_mul(row_bytes(k)),
            out.len(),
        )?;
        // Only where there are rows is k bounded by the bytes that exist.
        if k == 0 || rows.is_empty() {
            return Ok(());
        }

        if self.is_working_layout() {
            let stride = row_bytes(k);
            out.copy_from_slice(&self.bytes[rows.start * stride..rows.end * stride]);
            return check_codes(k, rows.start, out);
        }

        let mut codes = vec![ZERO; k];
        let mut values = match self.layout {
            Layout::Values { .. } | Layout::Masters { .. } => vec![0.0; k],
            _ => Vec::new(),
        };
        for (row, out) in rows.zip(out.chunks_exact_mut(row_bytes(k))) {
            self.read_codes(row, &mut codes, &mut values)?;
            pack_row(&codes, out);
            check_codes(k, row, out)?;
        }
        Ok(())
    }

    /// Whether the stored bytes already have the working layout.
    pub fn is_working_layout(&self) -> bool {
        match self.layout {
            Layout::I2S(I2sLayout::PaddedRows) => true,
            Layout::I2S(I2sLayout::Block128) => self.k.is_multiple_of(BLOCK),
            _ => false,
        }
    }

    /// Errors: [`QuantError::Rows`] unless all of `rows` are in the tensor.
    fn check_range(&self, rows: &Range<usize>) -> Result<(), QuantError> {
        if rows.start > rows.end || rows.end > self.n {
            return Err(QuantError::Rows {
                start: rows.start,
                end: rows.end,
                n: self.n,
            });
        }
        Ok(())
    }

    /// Writes rows `rows` as numbers: −`scale`, 0 and `scale`.
    ///
    /// Shapes: `out` is `[rows.len(), k]`. Rounded [`Layout::Masters`] have the scale
    /// `1 / multiplier`; what it is in the other layouts is stored elsewhere.
    /// Errors: as [`Source::repack_rows`].
    pub fn decode_rows(
        &self,
        rows: Range<usize>,
        scale: f32,
        out: &mut [f32],
    ) -> Result<(), QuantError> {
        let k = self.k;
        self.check_range(&rows)?;
        expect_len("rows of values", rows.len().saturating_mul(k), out.len())?;
        // Only where there are rows is k bounded by the bytes that exist.
        if k == 0 || rows.is_empty() {
            return Ok(());
        }
        let mut packed = vec![0; row_bytes(k)];
        let mut trits = vec![0; k];
        for (row, out) in rows.zip(out.chunks_exact_mut(k)) {
            self.repack_rows(row..row + 1, &mut packed)?;
            unpack_row(&packed, &mut trits)?;
            for (value, trit) in out.iter_mut().zip(&trits) {
                *value = scale * f32::from(*trit);
            }
        }
        Ok(())
    }

    /// The codes of one row, 0 to 3, as they are stored; `values` is scratch for float sources.
    fn read_codes(
        &self,
        row: usize,
        codes: &mut [u8],
        values: &mut [f32],
    ) -> Result<(), QuantError> {
        let (n, k) = (self.n, self.k);
        match self.layout {
            Layout::I2S(I2sLayout::Block128) => unpack_flat::<32>(self.bytes, row * k, codes),
            Layout::I2S(I2sLayout::PaddedRows) => {
                unpack_flat::<32>(self.bytes, row * row_bytes(k) * 4, codes);
            }
            Layout::I2S(I2sLayout::Block64) => unpack_flat::<16>(self.bytes, row * k, codes),
            Layout::I2S(I2sLayout::Rows4) => {
                unpack_shifted(&self.bytes[row / 4 * k..][..k], 6 - 2 * (row % 4), codes);
            }
            Layout::HuggingFace => {
                let quarter = n.div_ceil(4);
                let bytes = &self.bytes[row % quarter * k..][..k];
                unpack_shifted(bytes, row / quarter * 2, codes);
            }
            Layout::Blocks(DType::TQ1_0) => {
                let blocks = self.bytes.as_chunks::<54>().0;
                read_blocks(row, &blocks[row * (k / 256)..], codes, tq1_0::unpack)?;
            }
            Layout::Blocks(_) => {
                let blocks = self.bytes.as_chunks::<66>().0;
                read_blocks(row, &blocks[row * (k / 256)..], codes, tq2_0::unpack)?;
            }
            Layout::Values { dtype, scale } => {
                self.decode(dtype, row, values)?;
                // Compared as magnitudes, so that −0 is zero and a negative scale is allowed.
                let scale = scale.abs();
                let exact = codes.iter_mut().zip(&*values).fold(true, |ok, (code, &v)| {
                    *code = (ZERO + u8::from(v > 0.0)).wrapping_sub(u8::from(v < 0.0));
                    ok & ((v == 0.0) | (v.abs() == scale))
                });
                if !exact {
                    let (col, &value) = values
                        .iter()
                        .enumerate()
                        .find(|(_, v)| !(**v == 0.0 || v.abs() == scale))
                        .expect("the fold saw such a value");
                    return Err(QuantError::NotTernary {
                        row,
                        col,
                        value,
                        scale,
                    });
                }
            }
            Layout::Masters { dtype, multiplier } => {
                self.decode(dtype, row, values)?;
                for (code, v) in codes.iter_mut().zip(&*values) {
                    // Rounding half to even makes ±1 of everything beyond ±½, the halves excluded.
                    let v = v * multiplier;
                    *code = (ZERO + u8::from(v > 0.5)).wrapping_sub(u8::from(v < -0.5));
                }
            }
        }
        Ok(())
    }

    fn decode(&self, dtype: DType, row: usize, values: &mut [f32]) -> Result<(), QuantError> {
        let stride = self.k / dtype.block_len() * dtype.block_bytes();
        decode_row(dtype, &self.bytes[row * stride..][..stride], values)
    }
}

/// The scale that all blocks of a TQ1_0 or TQ2_0 tensor share; blocks whose scale is 0 don't count.
///
/// `None` if blocks differ: such a tensor has no single scale and is decoded by [`decode_row`]
/// instead. `Some(0.0)` if all are 0. Results for parts of a tensor combine: equal or zero.
///
/// Errors: [`QuantError::Unsupported`] for other types, [`QuantError::Size`] for a partial block,
/// [`QuantError::BadScale`] for a scale that is no finite number (blocks count from the start of
/// `bytes`, as row 0).
pub fn common_block_scale(dtype: DType, bytes: &[u8]) -> Result<Option<f32>, QuantError> {
    if !matches!(dtype, DType::TQ1_0 | DType::TQ2_0) {
        return Err(QuantError::Unsupported {
            op: "find the scale of",
            dtype,
        });
    }
    let size = dtype.block_bytes();
    expect_len(
        "whole blocks: bytes",
        bytes.len() / size * size,
        bytes.len(),
    )?;
    let mut common = 0.0;
    for (block, bytes) in bytes.chunks_exact(size).enumerate() {
        let scale = f16_at(
            bytes
                .last_chunk()
                .expect("a block is longer than its scale"),
        );
        if !scale.is_finite() {
            return Err(QuantError::BadScale {
                row: 0,
                block,
                scale,
            });
        }
        if common == 0.0 {
            common = scale;
        } else if scale != 0.0 && scale != common {
            return Ok(None);
        }
    }
    Ok(Some(common))
}

/// The magnitude that all nonzero values share, if they do.
///
/// `None` if two magnitudes differ or a value is NaN or infinite: the tensor is not ternary.
/// `Some(0.0)` if all are 0. Results for parts of a tensor combine: equal or zero.
///
/// Shapes: `bytes` is whole blocks of `dtype`.
/// Errors: as [`decode_row`].
pub fn common_value_scale(dtype: DType, bytes: &[u8]) -> Result<Option<f32>, QuantError> {
    /// Values decoded at a time; a multiple of every block length.
    const CHUNK: usize = 1024;

    decode_row(dtype, &[], &mut [])?;
    let size = dtype.block_bytes();
    expect_len(
        "whole blocks: bytes",
        bytes.len() / size * size,
        bytes.len(),
    )?;
    let mut values = [0.0; CHUNK];
    let mut scale = 0.0;
    for bytes in bytes.chunks(CHUNK / dtype.block_len() * size) {
        let values = &mut values[..bytes.len() / size * dtype.block_len()];
        decode_row(dtype, bytes, values)?;
        if scale == 0.0 {
            scale = values
                .iter()
                .map(|v| v.abs())
                .find(|v| *v != 0.0)
                .unwrap_or(0.0);
        }
        let ternary = values
            .iter()
            .fold(true, |ok, v| ok & ((*v == 0.0) | (v.abs() == scale)));
        if !ternary || !scale.is_finite() {
            return Ok(None);
        }
    }
    Ok(Some(scale))
}

/// Σ|w| of each row in `rows`, for [`absmean_multiplier`].
///
/// Shapes: `bytes` is `[n, k]` of `dtype`; `sums` is `[rows.len()]`.
/// Errors: as [`Source::new`] and [`Source::repack_rows`]; [`QuantError::NotFinite`] with the index
/// into the tensor.
/// Exactness: summed in f64, in eight lanes by column and then lane by lane, so the result depends
/// neither on the split into ranges nor on the instruction set.
pub fn abs_sums(
    dtype: DType,
    n: usize,
    k: usize,
    bytes: &[u8],
    rows: Range<usize>,
    sums: &mut [f64],
) -> Result<(), QuantError> {
    const LANES: usize = 8;

    let source = Source::new(
        Layout::Masters {
            dtype,
            multiplier: 1.0,
        },
        n,
        k,
        bytes,
    )?;
    if rows.start > rows.end || rows.end > n {
        return Err(QuantError::Rows {
            start: rows.start,
            end: rows.end,
            n,
        });
    }
    expect_len("row sums", rows.len(), sums.len())?;
    // Only where there are rows is k bounded by the bytes that exist.
    if rows.is_empty() {
        return Ok(());
    }
    let mut values = vec![0.0; k];
    for (row, sum) in rows.zip(sums) {
        source.decode(dtype, row, &mut values)?;
        let mut lanes = [0.0; LANES];
        let (chunks, rest) = values.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, v) in lanes.iter_mut().zip(chunk) {
                *lane += f64::from(v.abs());
            }
        }
        for (lane, v) in lanes.iter_mut().zip(rest) {
            *lane += f64::from(v.abs());
        }
        *sum = lanes.iter().sum();
        if !sum.is_finite() {
            let at = values
                .iter()
                .position(|v| !v.is_finite())
                .expect("finite f32s add up in f64");
            return Err(QuantError::NotFinite {
                index: row * k + at,
                value: values[at],
            });
        }
    }
    Ok(())
}

/// `1 / max(mean |w|, 1e-5)` of a tensor with the given row sums and `k` columns, as BitNet models
/// were trained with.
///
/// The mean is rounded to f32 once. The f32 summation of other implementations differs from it in
/// the last bits, which moves a rounding only for weights within about 1e-7 of a half step.
/// The sums are added in order.
pub fn absmean_multiplier(sums: &[f64], k: usize) -> f32 {
    let count = (sums.len() as f64 * k as f64).max(1.0);
    let mean = (sums.iter().sum::<f64>() / count) as f32;
    1.0 / mean.max(1e-5)
}

/// Quantizes master weights to trits and their scale, `1 / multiplier`, as [`Layout::Masters`] does; see
/// [`absmean_multiplier`].
pub fn round_to_trits(isa: Isa, values: &mut [f32], multiplier: f32) {
    round_all(isa, values, multiplier);
}

multiversion! {
    fn round_all(values: &mut [f32], multiplier: f32) {
        let scale = 1.0 / multiplier;
        for value in values {
            // Rounding half to even makes ±1 of everything beyond ±½, the halves excluded.
            let v = *value * multiplier;
            let v = if v > 0.5 { scale } else if v < -0.5 { -scale } else { 0.0 };
            *value = v;
        }
    }
}

/// The bytes after the codes of an I2_S tensor: the scale, and zeros where other writers leave garbage.
pub fn i2_s_trailer(scale: f32) -> [u8; 32] {
    let mut trailer = [0; 32];
    trailer[..4].copy_from_slice(&scale.to_le_bytes());
    trailer
}

/// Checks that no code of the rows in `codes` is 3, for codes that are used in place.
///
/// Shapes: `codes` is whole rows of [`row_bytes`]`(k)`, the first of them row `first_row` of the
/// tensor.
/// Errors: [`QuantError::InvalidCode`] names the first.
pub fn check_codes(k: usize, first_row: usize, codes: &[u8]) -> Result<(), QuantError> {
    // Both bits of some code are set; a fold vectorises where a search would not.
    let any = codes
        .iter()
        .fold(0, |any, byte| any | byte & byte >> 1 & 0x55);
    if any == 0 {
        return Ok(());
    }
    let at = codes
        .iter()
        .position(|byte| byte & byte >> 1 & 0x55 != 0)
        .expect("the fold saw one");
    let stride = row_bytes(k).max(BLOCK_BYTES);
    let (row, in_row) = (at / stride, at % stride);
    let quarter = (0..4)
        .find(|q| codes[at] >> (6 - 2 * q) & 3 == 3)
        .expect("one of the codes in the byte");
    let col = in_row / BLOCK_BYTES * BLOCK + quarter * QUARTER + in_row % BLOCK_BYTES;
    Err(QuantError::InvalidCode {
        row: first_row + row,
        col,
    })
}

/// The trits of one packed row, −1, 0 or +1; what code 3 gives is unspecified.
///
/// Shapes: `out` is `[k]`, `codes` is `[row_bytes(k)]`.
/// Errors: [`QuantError::Size`].
pub fn unpack_row(codes: &[u8], out: &mut [i8]) -> Result<(), QuantError> {
    expect_len("packed row: bytes", row_bytes(out.len()), codes.len())?;
    let mut block = [0; BLOCK];
    for (out, packed) in out
        .chunks_mut(BLOCK)
        .zip(codes.as_chunks::<BLOCK_BYTES>().0)
    {
        unpack_block::<BLOCK_BYTES>(packed, &mut block);
        for (trit, code) in out.iter_mut().zip(block) {
            *trit = code as i8 - 1;
        }
    }
    Ok(())
}

/// Packs one row of codes, padded with zeros to whole blocks.
fn pack_row(codes: &[u8], out: &mut [u8]) {
    let (blocks, rest) = codes.as_chunks::<BLOCK>();
    let mut last = [ZERO; BLOCK];
    last[..rest.len()].copy_from_slice(rest);
    let out = out.as_chunks_mut::<BLOCK_BYTES>().0;
    for (out, block) in out.iter_mut().zip(blocks.iter().chain([&last])) {
        for (p, byte) in out.iter_mut().enumerate() {
            *byte = block[p] << 6
                | block[QUARTER + p] << 4
                | block[2 * QUARTER + p] << 2
                | block[3 * QUARTER + p];
        }
    }
}

/// Codes `start..start + codes.len()` of a flat sequence of blocks of `W` bytes.
fn unpack_flat<const W: usize>(packed: &[u8], start: usize, codes: &mut [u8]) {
    let block_len = 4 * W;
    let mut block = [0; BLOCK];
    let mut done = 0;
    while done < codes.len() {
        let at = start + done;
        let packed = packed[at / block_len * W..]
            .first_chunk::<W>()
            .expect("sizes were checked");
        unpack_block::<W>(packed, &mut block);
        let from = at % block_len;
        let n = (block_len - from).min(codes.len() - done);
        codes[done..done + n].copy_from_slice(&block[from..from + n]);
        done += n;
    }
}

/// The `4·W` codes of a block whose quarters are at bits 7:6, 5:4, 3:2 and 1:0.
#[inline(always)]
fn unpack_block<const W: usize>(packed: &[u8; W], codes: &mut [u8; BLOCK]) {
    let quarters = crumbs(packed);
    for (codes, quarter) in codes
        .as_chunks_mut()
        .0
        .iter_mut()
        .zip(quarters.iter().rev())
    {
        *codes = *quarter;
    }
}

/// The codes at one position of each byte.
fn unpack_shifted(bytes: &[u8], shift: usize, codes: &mut [u8]) {
    for (code, byte) in codes.iter_mut().zip(bytes) {
        *code = byte >> shift & 3;
    }
}

/// The codes of one row of blocks with scales of their own.
fn read_blocks<const B: usize>(
    row: usize,
    blocks: &[[u8; B]],
    codes: &mut [u8],
    unpack: impl Fn(&[u8; B]) -> ([u8; 256], f32),
) -> Result<(), QuantError> {
    for (block, (codes, bytes)) in codes
        .as_chunks_mut::<256>()
        .0
        .iter_mut()
        .zip(blocks)
        .enumerate()
    {
        let (unpacked, scale) = unpack(bytes);
        if !scale.is_finite() {
            return Err(QuantError::BadScale { row, block, scale });
        }
        *codes = if scale == 0.0 { [ZERO; 256] } else { unpacked };
    }
    Ok(())
}

/// Checks that rows are whole blocks, as repacking goes row by row, and that `found` bytes hold them.
fn check_rows(dtype: DType, elements: usize, k: usize, found: usize) -> Result<(), QuantError> {
    if !k.is_multiple_of(dtype.block_len()) {
        let block_len = dtype.block_len();
        return Err(QuantError::PartialBlock {
            dtype,
            elements: k,
            block_len,
        });
    }
    check_sizes(dtype, elements, found)
}
