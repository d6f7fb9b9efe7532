//! Dividing matrices into pieces to be converted one after another.

use std::ops::Range;

use sterna_format::DType;

/// Bytes per piece.
const CHUNK_BYTES: usize = 8 << 20;

/// Ranges of rows whose encoding takes some megabytes.
pub(crate) fn row_chunks(n: usize, k: usize, dtype: DType) -> impl Iterator<Item = Range<usize>> {
    let row = (k / dtype.block_len() * dtype.block_bytes()).max(1);
    // As many as 64, so that every thread gets some.
    let step = (CHUNK_BYTES / row).max(64);
    (0..n)
        .step_by(step)
        .map(move |first| first..n.min(first + step))
}
