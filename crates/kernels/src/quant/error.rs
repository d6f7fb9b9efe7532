//! Errors of encoding, decoding and repacking.

use sterna_format::DType;

use crate::ShapeError;

/// Why blocks could not be decoded, encoded or repacked.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum QuantError {
    /// The operation does not exist for this type.
    #[error("cannot {op} {dtype}: not a type that this operation supports")]
    Unsupported {
        /// `"decode"`, `"encode"`, or another operation.
        op: &'static str,
        /// The type.
        dtype: DType,
    },
    /// The number of elements is not a whole number of blocks.
    #[error("{dtype}: {elements} elements don't fill blocks of {block_len}")]
    PartialBlock {
        /// The type of the blocks.
        dtype: DType,
        /// Elements given.
        elements: usize,
        /// Elements of one block.
        block_len: usize,
    },
    /// A slice has the wrong length.
    #[error("{what}: expected {expected} elements, found {found}")]
    Size {
        /// The slice.
        what: &'static str,
        /// Elements (or bytes, where `what` says so) expected from the shapes.
        expected: usize,
        /// Elements found.
        found: usize,
    },
    /// A shape that the layout cannot hold.
    #[error("{layout}: a [{n}, {k}] tensor needs {rule}")]
    Layout {
        /// The layout.
        layout: &'static str,
        /// Rows.
        n: usize,
        /// Columns.
        k: usize,
        /// What the layout requires of the shape.
        rule: &'static str,
    },
    /// The requested rows are not all in the tensor.
    #[error("rows {start}..{end} of a tensor with {n} rows")]
    Rows {
        /// First row requested.
        start: usize,
        /// One past the last row requested.
        end: usize,
        /// Rows of the tensor.
        n: usize,
    },
    /// A value to encode is NaN or infinite.
    #[error("value {index} is {value}; only finite values can be encoded")]
    NotFinite {
        /// Index into the values given.
        index: usize,
        /// The value.
        value: f32,
    },
    /// A row of a matrix cannot be encoded; indices of `source` are columns.
    #[error("row {row}: {source}")]
    InRow {
        /// Row in the tensor.
        row: usize,
        /// What is wrong with the row.
        source: Box<QuantError>,
    },
    /// A value to encode is beyond what the type can represent.
    #[error("value {index} is {value}; {dtype} holds magnitudes up to {max}")]
    TooLarge {
        /// The type.
        dtype: DType,
        /// Index into the values given.
        index: usize,
        /// The value.
        value: f32,
        /// The largest magnitude accepted.
        max: f32,
    },
    /// A two-bit code is 3, which isn't a trit.
    #[error("row {row}, column {col}: code 3 is not a ternary value; wrong layout or damaged data")]
    InvalidCode {
        /// Row in the tensor.
        row: usize,
        /// Column in the tensor.
        col: usize,
    },
    /// A value of a tensor that should only contain −s, 0 and +s is something else.
    #[error("row {row}, column {col}: {value} is none of 0 and ±{scale}")]
    NotTernary {
        /// Row in the tensor.
        row: usize,
        /// Column in the tensor.
        col: usize,
        /// The value found.
        value: f32,
        /// The scale.
        scale: f32,
    },
    /// A scale is NaN or infinite.
    #[error("row {row}, block {block}: the scale is {scale}")]
    BadScale {
        /// Row in the tensor.
        row: usize,
        /// Block in the row.
        block: usize,
        /// The scale.
        scale: f32,
    },
}

impl From<ShapeError> for QuantError {
    fn from(error: ShapeError) -> QuantError {
        let ShapeError {
            what,
            expected,
            found,
        } = error;
        QuantError::Size {
            what,
            expected,
            found,
        }
    }
}
