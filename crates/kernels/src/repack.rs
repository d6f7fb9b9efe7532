//! Getting stored ternary weights into the working layout, on all threads.
//!
//! [`quant::ternary`](crate::quant::ternary) defines the layouts row by row; here ranges of rows are
//! shared out.

use std::ops::Range;
use std::sync::Mutex;

use sterna_format::DType;

use crate::Exec;
use crate::pool::SharedSlice;
use crate::quant::QuantError;
use crate::quant::ternary::{self, Layout, Source, row_bytes};

/// Rows that a thread takes at a time.
const ROWS_PER_TASK: usize = 64;

/// Rows `rows` of a ternary `[n, k]` tensor in the working layout, `[rows.len() · row_bytes(k)]`.
///
/// Errors: as [`Source::new`] and [`Source::repack_rows`]; of several, that of the first rows.
pub fn repack(
    exec: &Exec,
    layout: Layout,
    n: usize,
    k: usize,
    bytes: &[u8],
    rows: Range<usize>,
) -> Result<Vec<u8>, QuantError> {
    let source = Source::new(layout, n, k, bytes)?;
    if rows.start > rows.end || rows.end > n {
        return Err(QuantError::Rows {
            start: rows.start,
            end: rows.end,
            n,
        });
    }
    let stride = row_bytes(k);
    let mut out = vec![0; rows.len() * stride];
    let shared = SharedSlice::new(&mut out);
    try_rows(exec, rows.len(), |part| {
        // SAFETY: parts don't overlap.
        let out = unsafe { shared.range_mut(part.start * stride..part.end * stride) };
        source.repack_rows(rows.start + part.start..rows.start + part.end, out)
    })?;
    Ok(out)
}

/// The one magnitude of all nonzero values of an `[n, k]` tensor, if they share one.
///
/// For TQ1_0 and TQ2_0 it is the one scale of all blocks. `Some(0.0)` if all values are zero.
/// Errors: as [`ternary::common_block_scale`] and [`ternary::common_value_scale`];
/// [`QuantError::Size`] if `bytes` isn't `n` rows.
pub fn common_scale(
    exec: &Exec,
    dtype: DType,
    n: usize,
    bytes: &[u8],
) -> Result<Option<f32>, QuantError> {
    let stride = bytes.len().checked_div(n).unwrap_or(0);
    if stride * n != bytes.len() {
        return Err(QuantError::Size {
            what: "rows of equal length",
            expected: stride * n,
            found: bytes.len(),
        });
    }
    let common = Mutex::new(Some(0.0f32));
    try_rows(exec, n, |rows| {
        let bytes = &bytes[rows.start * stride..rows.end * stride];
        let found = match dtype {
            DType::TQ1_0 | DType::TQ2_0 => ternary::common_block_scale(dtype, bytes)
                .map_err(|error| in_tensor(error, rows.start, stride / dtype.block_bytes()))?,
            _ => ternary::common_value_scale(dtype, bytes)?,
        };
        let mut common = common.lock().expect("no holder of this lock panics");
        *common = match (*common, found) {
            (Some(a), Some(b)) if a == b || b == 0.0 => Some(a),
            (Some(0.0), Some(b)) => Some(b),
            _ => None,
        };
        Ok(())
    })?;
    Ok(common.into_inner().expect("no holder of this lock panics"))
}

/// `error`, found in rows from `first_row` on, with its place in the whole tensor.
fn in_tensor(error: QuantError, first_row: usize, blocks_per_row: usize) -> QuantError {
    match error {
        QuantError::BadScale { block, scale, .. } => QuantError::BadScale {
            row: first_row + block / blocks_per_row.max(1),
            block: block % blocks_per_row.max(1),
            scale,
        },
        other => other,
    }
}

/// What the masters of an `[n, k]` tensor are multiplied by before they are rounded to trits.
///
/// Errors: as [`ternary::abs_sums`].
pub fn absmean_multiplier(
    exec: &Exec,
    dtype: DType,
    n: usize,
    k: usize,
    bytes: &[u8],
) -> Result<f32, QuantError> {
    Source::new(
        Layout::Masters {
            dtype,
            multiplier: 1.0,
        },
        n,
        k,
        bytes,
    )?;
    let mut sums = vec![0.0; n];
    let shared = SharedSlice::new(&mut sums);
    try_rows(exec, n, |rows| {
        // SAFETY: parts don't overlap.
        let sums = unsafe { shared.range_mut(rows.clone()) };
        ternary::abs_sums(dtype, n, k, bytes, rows, sums)
    })?;
    Ok(ternary::absmean_multiplier(&sums, k))
}

/// Checks that no code in the working layout is 3.
///
/// Errors: [`QuantError::InvalidCode`] names the first.
pub fn check_codes(exec: &Exec, n: usize, k: usize, codes: &[u8]) -> Result<(), QuantError> {
    let stride = row_bytes(k);
    if codes.len() != stride.saturating_mul(n) {
        return Err(QuantError::Size {
            what: "ternary codes",
            expected: stride.saturating_mul(n),
            found: codes.len(),
        });
    }
    try_rows(exec, n, |rows| {
        let codes = &codes[rows.start * stride..rows.end * stride];
        ternary::check_codes(k, rows.start, codes)
    })
}

/// Runs `f` on ranges that cover `0..n`; of several errors, returns that of the first range.
pub(crate) fn try_rows(
    exec: &Exec,
    n: usize,
    f: impl Fn(Range<usize>) -> Result<(), QuantError> + Sync,
) -> Result<(), QuantError> {
    let first: Mutex<Option<(usize, QuantError)>> = Mutex::new(None);
    exec.pool.for_ranges(n, ROWS_PER_TASK, |rows| {
        let start = rows.start;
        if let Err(error) = f(rows) {
            let mut first = first.lock().expect("no holder of this lock panics");
            if first.as_ref().is_none_or(|(at, _)| start < *at) {
                *first = Some((start, error));
            }
        }
    });
    match first.into_inner().expect("no holder of this lock panics") {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::exec_matrix;

    /// A `[200, 3]` tensor of f32 values ±s and 0.
    fn values(scale: f32) -> Vec<u8> {
        (0..600)
            .map(|i| (i * 7 % 3 - 1) as f32 * scale)
            .flat_map(f32::to_le_bytes)
            .collect()
    }

    #[test]
    fn every_thread_count_repacks_alike() {
        let bytes = values(0.5);
        let layout = Layout::Values {
            dtype: DType::F32,
            scale: 0.5,
        };
        let source = Source::new(layout, 200, 3, &bytes).unwrap();
        let mut want = vec![0; 190 * row_bytes(3)];
        source.repack_rows(10..200, &mut want).unwrap();
        for exec in exec_matrix() {
            let got = repack(&exec, layout, 200, 3, &bytes, 10..200).unwrap();
            assert_eq!(got, want);
            check_codes(&exec, 190, 3, &got).unwrap();
            assert_eq!(common_scale(&exec, DType::F32, 200, &bytes), Ok(Some(0.5)));
        }
    }

    #[test]
    fn differing_scales_are_no_common_scale() {
        let mut bytes = values(0.5);
        bytes[2388..2392].copy_from_slice(&0.25f32.to_le_bytes());
        for exec in exec_matrix() {
            assert_eq!(common_scale(&exec, DType::F32, 200, &bytes), Ok(None));
        }
    }

    #[test]
    fn the_first_of_several_errors_is_reported() {
        let mut codes = vec![0x55; 200 * row_bytes(3)];
        for row in [130, 199] {
            codes[row * row_bytes(3)] = 0xff;
        }
        for exec in exec_matrix() {
            assert_eq!(
                check_codes(&exec, 200, 3, &codes),
                Err(QuantError::InvalidCode { row: 130, col: 0 })
            );
        }
        assert!(check_codes(&exec_matrix()[0], 200, 3, &codes[1..]).is_err());
    }
}
