//! Tensors of packages and engine bundles that the engine can't read in place: split across shards, stored
//! transposed, or with rows that end inside a block.
//!
//! Each appears as an additional file after the model's files, whose bytes are computed on request.

use std::ops::Range;

use bytes::Bytes;
use sterna_format::rdrr::{Layout, Packing, Span, Tensor};
use sterna_format::{DType, TensorEntry};
use sterna_kernels::quant::{QuantError, decode_row};

use crate::error::{Context, Result, bail};

/// The type of rows that end inside a block once decoded: exactly the stored values.
const DECODED: DType = DType::F32;

/// A tensor that is assembled from its pieces.
#[derive(Debug)]
pub(super) struct Assembled {
    name: String,
    pieces: Vec<Span>,
    /// Total bytes of the pieces.
    size: u64,
    /// How the joined pieces are converted; `None` if they are the tensor.
    matrix: Option<Matrix>,
}

/// A matrix that is converted from another form.
#[derive(Debug, Clone, Copy)]
struct Matrix {
    rows: usize,
    columns: usize,
    /// Bytes per row after conversion.
    row_bytes: usize,
    form: Form,
}

/// The form in which a matrix is stored.
#[derive(Debug, Clone, Copy)]
enum Form {
    /// Values of `size` bytes, column by column.
    Transposed { size: usize },
    /// Blocks that rows don't fill, or column by column, which become [`DECODED`].
    Decoded {
        dtype: DType,
        packing: Packing,
        transposed: bool,
    },
}

/// Where the engine finds `tensor`, of type `dtype`, and how to assemble its bytes if that is the file with
/// index `file`.
pub(super) fn place(
    tensor: &Tensor,
    dtype: DType,
    file: usize,
) -> Result<(TensorEntry, Option<Assembled>)> {
    let shape = tensor.logical_shape();
    let first = tensor.first();
    let columns = shape.last().copied().unwrap_or(1);
    let rows: usize = shape[..shape.len().saturating_sub(1)].iter().product();
    let transposed = tensor.layout == Some(Layout::Column);
    let packing = tensor
        .packing()
        .with_context(|| format!("tensor `{}`: a size that fits its shape", tensor.name))?;
    let stored_columns = tensor.shape.last().copied().unwrap_or(1);
    let whole_blocks = dtype == DType::I2_S || stored_columns.is_multiple_of(dtype.block_len());
    if transposed && dtype == DType::I2_S {
        let name = &tensor.name;
        bail!(
            Unsupported,
            "tensor `{name}`: expected rows of I2_S, found column layout"
        );
    }
    let is_decoded = !whole_blocks || (transposed && dtype.block_len() > 1);
    if !is_decoded && !transposed && tensor.pieces().len() == 1 {
        let entry = TensorEntry {
            name: tensor.name.clone(),
            renamed_from: None,
            dtype,
            shape,
            file: first.shard,
            offset: first.offset,
            len: tensor.size,
        };
        return Ok((entry, None));
    }
    let made = if is_decoded { DECODED } else { dtype };
    let matrix = (is_decoded || transposed).then(|| Matrix {
        rows,
        columns,
        row_bytes: columns.saturating_mul(made.block_bytes()),
        form: match is_decoded {
            true => Form::Decoded {
                dtype,
                packing,
                transposed,
            },
            false => Form::Transposed {
                size: dtype.block_bytes(),
            },
        },
    });
    let assembled = Assembled {
        name: tensor.name.clone(),
        pieces: tensor.pieces().to_vec(),
        size: tensor.size,
        matrix,
    };
    let entry = TensorEntry {
        name: tensor.name.clone(),
        renamed_from: None,
        dtype: made,
        shape,
        file,
        offset: 0,
        len: matrix.map_or(tensor.size, Matrix::n_bytes),
    };
    Ok((entry, Some(assembled)))
}

/// Where the engine finds the tensor of `entry`, in one piece and with every row padded to whole blocks, and
/// how to assemble its bytes if that is the file with index `file`.
pub(super) fn place_padded(entry: TensorEntry, file: usize) -> (TensorEntry, Option<Assembled>) {
    let columns = entry.shape.last().copied().unwrap_or(1);
    // Padded rows of I2_S are what the engine reads.
    if entry.dtype == DType::I2_S || columns.is_multiple_of(entry.dtype.block_len()) {
        return (entry, None);
    }
    let rows = entry.shape[..entry.shape.len().saturating_sub(1)].iter();
    let matrix = Matrix {
        rows: rows.product(),
        columns,
        row_bytes: columns.saturating_mul(DECODED.block_bytes()),
        form: Form::Decoded {
            dtype: entry.dtype,
            packing: Packing::PaddedRows,
            transposed: false,
        },
    };
    let piece = Span {
        shard: entry.file,
        offset: entry.offset,
        size: entry.len,
    };
    let assembled = Assembled {
        name: entry.name.clone(),
        pieces: vec![piece],
        size: entry.len,
        matrix: Some(matrix),
    };
    let entry = TensorEntry {
        dtype: DECODED,
        file,
        offset: 0,
        len: matrix.n_bytes(),
        ..entry
    };
    (entry, Some(assembled))
}

impl Matrix {
    fn n_bytes(self) -> u64 {
        (self.rows as u64).saturating_mul(self.row_bytes as u64)
    }
}

impl Assembled {
    /// The parts of shards, by index and range, that `len` bytes from `offset` on consist of, in order.
    pub(super) fn parts(&self, offset: u64, len: u64) -> Result<Vec<(usize, Range<u64>)>> {
        let end = self.end(offset, len)?;
        let (from, to) = match self.made_rows() {
            Some(_) => (0, self.size),
            None => (offset, end),
        };
        let mut parts = Vec::new();
        let mut at = 0;
        for piece in &self.pieces {
            let (start, end) = (from.max(at), to.min(at + piece.size));
            if start < end {
                let first = piece.offset + (start - at);
                parts.push((piece.shard, first..first + (end - start)));
            }
            at += piece.size;
        }
        Ok(parts)
    }

    /// Total bytes, if any of them needs all that is stored.
    pub(super) fn converted_bytes(&self) -> Option<u64> {
        self.made_rows().map(Matrix::n_bytes)
    }

    /// `len` bytes from `offset` on, made of `stored`, the bytes of [`parts`](Self::parts).
    pub(super) fn make(&self, stored: Bytes, offset: u64, len: u64) -> Result<Bytes> {
        let end = self.end(offset, len)?;
        let Some(matrix) = self.made_rows() else {
            return Ok(stored);
        };
        let row_bytes = matrix.row_bytes as u64;
        let first = offset / row_bytes;
        let rows = first as usize..end.div_ceil(row_bytes) as usize;
        let made = matrix
            .made(&stored, rows)
            .with_context(|| format!("tensor `{}`", self.name))?;
        let skipped = (offset - first * row_bytes) as usize;
        Ok(Bytes::from(made).slice(skipped..skipped + len as usize))
    }

    /// The form that the stored one is converted to, if they differ.
    fn made_rows(&self) -> Option<Matrix> {
        self.matrix.filter(|matrix| matrix.row_bytes > 0)
    }

    /// Where `len` bytes from `offset` on end.
    fn end(&self, offset: u64, len: u64) -> Result<u64> {
        let total = self.matrix.map_or(self.size, Matrix::n_bytes);
        let end = offset.checked_add(len).filter(|&end| end <= total);
        end.with_context(|| {
            let name = &self.name;
            format!("tensor `{name}`: wanted {len} bytes at offset {offset}, but it has {total}")
        })
    }
}

impl Matrix {
    /// The bytes of `rows`, converted from all that is stored.
    fn made(&self, stored: &[u8], rows: Range<usize>) -> Result<Vec<u8>> {
        let mut out = zeros(rows.len() * self.row_bytes)?;
        match self.form {
            Form::Transposed { size } => {
                for (column, values) in stored.chunks_exact(self.rows * size).enumerate() {
                    self.scatter(
                        &values[rows.start * size..rows.end * size],
                        size,
                        column,
                        &mut out,
                    );
                }
            }
            Form::Decoded {
                dtype,
                packing,
                transposed: false,
            } => {
                let mut blocks = Blocks::new(stored, dtype, packing, self.columns);
                for (row, out) in rows.zip(out.chunks_exact_mut(self.row_bytes)) {
                    write_floats(blocks.row(row)?, out)?;
                }
            }
            Form::Decoded {
                dtype,
                packing,
                transposed: true,
            } => {
                let size = DECODED.block_bytes();
                let mut blocks = Blocks::new(stored, dtype, packing, self.rows);
                let mut values = zeros(rows.len() * size)?;
                for column in 0..self.columns {
                    let decoded = &blocks.row(column)?[rows.clone()];
                    write_floats(decoded, &mut values)?;
                    self.scatter(&values, size, column, &mut out);
                }
            }
        }
        Ok(out)
    }

    /// Writes `values` of `size` bytes, one per row, to `column` of the rows in `out`.
    fn scatter(&self, values: &[u8], size: usize, column: usize, out: &mut [u8]) {
        let rows = out.chunks_exact_mut(self.row_bytes);
        for (row, value) in rows.zip(values.chunks_exact(size)) {
            row[column * size..][..size].copy_from_slice(value);
        }
    }
}

/// Writes values as [`DECODED`].
fn write_floats(values: &[f32], out: &mut [u8]) -> Result<()> {
    if let Some(index) = values.iter().position(|value| !value.is_finite()) {
        let value = values[index];
        return Err(QuantError::NotFinite { index, value }.into());
    }
    for (value, out) in values.iter().zip(out.as_chunks_mut().0) {
        *out = value.to_le_bytes();
    }
    Ok(())
}

/// This many zeros, or an error if out of memory.
fn zeros(n: usize) -> Result<Vec<u8>> {
    let mut out = Vec::new();
    out.try_reserve_exact(n)?;
    out.resize(n, 0);
    Ok(out)
}

/// A matrix of blocks whose rows need not end where blocks do.
struct Blocks<'a> {
    bytes: &'a [u8],
    dtype: DType,
    packing: Packing,
    columns: usize,
    /// Values of the blocks that hold a row.
    values: Vec<f32>,
}

impl<'a> Blocks<'a> {
    fn new(bytes: &'a [u8], dtype: DType, packing: Packing, columns: usize) -> Blocks<'a> {
        Blocks {
            bytes,
            dtype,
            packing,
            columns,
            values: Vec::new(),
        }
    }

    /// The values of row `i`.
    fn row(&mut self, i: usize) -> Result<&[f32]> {
        let (len, size) = (self.dtype.block_len(), self.dtype.block_bytes());
        let n_blocks = self.columns.div_ceil(len);
        let (first, skipped, n_blocks) = match self.packing {
            Packing::PaddedRows => (i * n_blocks, 0, n_blocks),
            Packing::Flat => {
                let start = i * self.columns;
                let end = (start + self.columns).div_ceil(len);
                (start / len, start % len, end - start / len)
            }
        };
        self.values.resize(n_blocks * len, 0.0);
        let blocks = &self.bytes[first * size..][..n_blocks * size];
        decode_row(self.dtype, blocks, &mut self.values)?;
        Ok(&self.values[skipped..][..self.columns])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_format::rdrr::TensorMap;

    /// `len` bytes from `offset` on that `made` assembles from `shards`.
    fn slice(made: &Assembled, shards: &[&[u8]], offset: u64, len: u64) -> Result<Bytes> {
        let parts = made.parts(offset, len)?.into_iter();
        let stored =
            parts.map(|(shard, Range { start, end })| &shards[shard][start as usize..end as usize]);
        let stored = stored.collect::<Vec<_>>().concat();
        made.make(stored.into(), offset, len)
    }

    /// The tensor that `entry` describes, and its bytes as the engine sees them.
    fn read(entry: &str, parts: &[&[u8]]) -> (TensorEntry, Vec<u8>) {
        let map = format!(r#"{{"t":{entry}}}"#);
        let map = TensorMap::parse(map.as_bytes()).unwrap();
        let tensor = map.get("t").unwrap();
        let dtype = tensor.dtype.known().unwrap();
        let (entry, assembled) = place(tensor, dtype, 9).unwrap();
        let bytes = match assembled {
            Some(made) => slice(&made, parts, entry.offset, entry.len).unwrap(),
            None => {
                let range = entry.offset as usize..(entry.offset + entry.len) as usize;
                Bytes::copy_from_slice(&parts[entry.file][range])
            }
        };
        (entry, bytes.to_vec())
    }

    #[test]
    fn a_tensor_in_one_piece_stays_where_it_is() {
        let entry = r#"{"shard":1,"offset":2,"size":4,"shape":[2,2],"dtype":"U8"}"#;
        let (entry, bytes) = read(entry, &[&[], &[0, 1, 2, 3, 4, 5]]);
        assert_eq!((entry.file, entry.offset), (1, 2));
        assert_eq!(bytes, [2, 3, 4, 5]);
    }

    #[test]
    fn pieces_are_joined() {
        let entry = r#"{"size":5,"shape":[5],"dtype":"U8","spans":[
            {"shardIndex":0,"offset":3,"size":1},{"shardIndex":1,"offset":0,"size":2},
            {"shardIndex":2,"offset":1,"size":2}]}"#;
        let parts: [&[u8]; 3] = [&[0, 0, 0, 1], &[2, 3], &[0, 4, 5]];
        let (entry, bytes) = read(entry, &parts);
        assert_eq!((entry.file, entry.offset, entry.len), (9, 0, 5));
        assert_eq!(bytes, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn columns_become_rows() {
        // [[1, 2, 3], [4, 5, 6]] stored as [[1, 4], [2, 5], [3, 6]].
        let entry = r#"{"size":6,"shape":[3,2],"originalShape":[2,3],"dtype":"U8","layout":"column",
            "spans":[{"shardIndex":0,"offset":0,"size":4},{"shardIndex":1,"offset":0,"size":2}]}"#;
        let (entry, bytes) = read(entry, &[&[1, 4, 2, 5], &[3, 6]]);
        assert_eq!(entry.shape, [2, 3]);
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6]);
    }

    /// 48 values of Q8_0 in a row of one and a half blocks: 0, 1, 2, … times the scale 1.
    fn q8_0(values: impl Iterator<Item = i8>) -> Vec<u8> {
        let values: Vec<i8> = values.collect();
        let mut out = Vec::new();
        for block in values.chunks(32) {
            out.extend([0x00, 0x3c]);
            out.extend(block.iter().map(|&v| v as u8));
            out.resize(out.len().next_multiple_of(34), 0);
        }
        out
    }

    fn floats(bytes: &[u8]) -> Vec<f32> {
        let mut out = vec![0.0; bytes.len() / 4];
        decode_row(DECODED, bytes, &mut out).unwrap();
        out
    }

    #[test]
    fn rows_that_end_inside_a_block() {
        let expected: Vec<f32> = (0..96).map(|i| i as f32).collect();
        let padded = [q8_0(0..48), q8_0(48..96)].concat();
        let entry = format!(
            r#"{{"shard":0,"offset":0,"size":{},"shape":[2,48],"dtype":"Q8_0","layout":"row"}}"#,
            padded.len()
        );
        let (entry, bytes) = read(&entry, &[&padded]);
        assert_eq!((entry.dtype, entry.shape), (DECODED, vec![2, 48]));
        assert_eq!(floats(&bytes), expected);

        let flat = q8_0(0..96);
        let entry = format!(
            r#"{{"shard":0,"offset":0,"size":{},"shape":[2,48],"dtype":"Q8_0"}}"#,
            flat.len()
        );
        let (_, bytes) = read(&entry, &[&flat]);
        assert_eq!(floats(&bytes), expected);
    }

    #[test]
    fn blocks_in_columns() {
        // [2, 48] stored as [48, 2], every row padded to a block.
        let stored: Vec<u8> = (0..48)
            .flat_map(|c| q8_0([c, c + 48].into_iter()))
            .collect();
        let entry = format!(
            r#"{{"shard":0,"offset":0,"size":{},"shape":[48,2],"dtype":"Q8_0","layout":"column"}}"#,
            stored.len()
        );
        let (entry, bytes) = read(&entry, &[&stored]);
        assert_eq!(entry.shape, [2, 48]);
        let expected: Vec<f32> = (0..96).map(|i| i as f32).collect();
        assert_eq!(floats(&bytes), expected);
    }

    #[test]
    fn rows_are_made_one_by_one() {
        let entry =
            r#"{"shard":0,"offset":0,"size":6,"shape":[3,2],"dtype":"U8","layout":"column"}"#;
        let map = TensorMap::parse(format!(r#"{{"t":{entry}}}"#).as_bytes()).unwrap();
        let (_, made) = place(map.get("t").unwrap(), DType::U8, 1).unwrap();
        let made = made.unwrap();
        let shards: [&[u8]; 1] = [&[1, 4, 2, 5, 3, 6]];
        assert_eq!(slice(&made, &shards, 3, 3).unwrap()[..], [4, 5, 6]);
        assert_eq!(slice(&made, &shards, 1, 4).unwrap()[..], [2, 3, 4, 5]);
        assert!(slice(&made, &shards, 4, 3).is_err());
    }
}
