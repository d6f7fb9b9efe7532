//! Converting stored ternary weights to the working layout, on all threads.
//!
//! [`quant::ternary`](crate::quant::ternary) defines the layouts row by row; here ranges of rows are
//! parallelised.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use sterna_format::DType;

use crate::Exec;
use crate::isa::multiversion;
use crate::pool::SharedSlice;
use crate::quant::ternary::{self, Layout, Source, row_bytes};
use crate::quant::{QuantError, f16_to_f32};

/// Rows per task.
const ROWS_PER_TASK: usize = 64;

/// Blocks per task: enough for hardware prefetching.
const BLOCKS_PER_TASK: usize = 4096;

/// A block of TQ2_0: codes of 256 values, and their scale.
const TQ2_0_BYTES: usize = 66;

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

/// The scale that all blocks of TQ2_0 in `bytes` share, where the blocks can be used as they are:
/// every code is a trit, and a block with another scale has the scale 0 and no trits but 0.
///
/// `None` otherwise, also for damaged blocks; [`common_scale`] and [`repack`] then give the details. Reads
/// each byte once.
pub fn common_tq2_0_scale(exec: &Exec, bytes: &[u8]) -> Option<f32> {
    let (blocks, rest) = bytes.as_chunks::<TQ2_0_BYTES>();
    if !rest.is_empty() {
        return None;
    }
    let mut scales = blocks.iter().map(scale_bits);
    let common = scales.find(|&d| f16_to_f32(d) != 0.0).unwrap_or_default();
    let in_place = AtomicBool::new(f16_to_f32(common).is_finite());
    exec.pool
        .for_ranges(blocks.len(), BLOCKS_PER_TASK, |range| {
            if !are_trits_of_scale(exec.isa, &blocks[range], common) {
                in_place.store(false, Ordering::Relaxed);
            }
        });
    in_place.into_inner().then(|| f16_to_f32(common))
}

/// The scale of a block of TQ2_0, which follows its codes.
#[inline(always)]
fn scale_bits(block: &[u8; TQ2_0_BYTES]) -> u16 {
    u16::from_le_bytes([block[64], block[65]])
}

multiversion! {
    /// Whether each of `blocks` holds trits of the scale with the bits `common`, or zeros only.
    fn are_trits_of_scale(blocks: &[[u8; TQ2_0_BYTES]], common: u16) -> bool {
        // Violations are collected over many blocks and checked once. These are loops because closures would
        // not be compiled for the instruction set.
        for blocks in blocks.chunks(64) {
            let (mut threes, mut differences) = ([0; 8], 0);
            for block in blocks {
                for (any, codes) in threes.iter_mut().zip(block.as_chunks().0) {
                    *any |= threes_in(u64::from_le_bytes(*codes));
                }
                differences |= scale_bits(block) ^ common;
            }
            if threes != [0; 8] || (differences != 0 || common == 0) && !are_alike(blocks, common) {
                return false;
            }
        }
        true
    }
}

/// Whether each of `blocks` that isn't of the scale with the bits `common` holds zeros only.
#[cold]
fn are_alike(blocks: &[[u8; TQ2_0_BYTES]], common: u16) -> bool {
    blocks.iter().all(|block| {
        let d = scale_bits(block);
        let zero = || f16_to_f32(d) == 0.0 && block[..64].iter().all(|&codes| codes == 0x55);
        d == common && d != 0 || zero()
    })
}

/// The lower bit of each two-bit code that is 3, which isn't a trit.
#[inline(always)]
fn threes_in(codes: u64) -> u64 {
    codes & codes >> 1 & 0x5555_5555_5555_5555
}

multiversion! {
    /// Whether any two-bit code is 3.
    fn has_threes(codes: &[u8]) -> bool {
        let (words, rest) = codes.as_chunks();
        let mut threes = 0;
        for word in words {
            threes |= threes_in(u64::from_le_bytes(*word));
        }
        for &codes in rest {
            threes |= threes_in(codes.into());
        }
        threes != 0
    }
}

/// `error`, found in rows from `first_row` on, with its index in the whole tensor.
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

/// The multiplier of the master weights of an `[n, k]` tensor before they are rounded to trits.
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

/// How the float master weights of an `[n, k]` tensor become trits, and the scale of the trits, in units of
/// `unit`.
///
/// Errors: as [`absmean_multiplier`].
pub fn master_trits(
    exec: &Exec,
    dtype: DType,
    n: usize,
    k: usize,
    bytes: &[u8],
    unit: f32,
) -> Result<(Layout, f32), QuantError> {
    let multiplier = absmean_multiplier(exec, dtype, n, k, bytes)?;
    Ok((Layout::Masters { dtype, multiplier }, unit / multiplier))
}

/// As [`master_trits`], of floats that may be trits already: all of one magnitude, or zero.
///
/// Errors: as [`common_scale`] and [`absmean_multiplier`].
pub fn float_trits(
    exec: &Exec,
    dtype: DType,
    n: usize,
    k: usize,
    bytes: &[u8],
    unit: f32,
) -> Result<(Layout, f32), QuantError> {
    match common_scale(exec, dtype, n, bytes)? {
        Some(scale) => Ok((Layout::Values { dtype, scale }, scale * unit)),
        None => master_trits(exec, dtype, n, k, bytes, unit),
    }
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
        match has_threes(exec.isa, codes) {
            true => ternary::check_codes(k, rows.start, codes),
            false => Ok(()),
        }
    })
}

/// Runs `f` on ranges that cover `0..n`; of several errors, returns that of the first range.
pub(crate) fn try_rows(
    exec: &Exec,
    n: usize,
    f: impl Fn(Range<usize>) -> Result<(), QuantError> + Sync,
) -> Result<(), QuantError> {
    try_ranges(exec, n, ROWS_PER_TASK, f)
}

/// As [`try_rows`], with ranges that are multiples of `grain`.
pub(crate) fn try_ranges(
    exec: &Exec,
    n: usize,
    grain: usize,
    f: impl Fn(Range<usize>) -> Result<(), QuantError> + Sync,
) -> Result<(), QuantError> {
    let first: Mutex<Option<(usize, QuantError)>> = Mutex::new(None);
    exec.pool.for_ranges(n, grain, |rows| {
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
    fn floats_are_trits_or_masters() {
        let dtype = DType::F32;
        let trits = values(0.5);
        let mut masters = trits.clone();
        masters[2388..2392].copy_from_slice(&0.25f32.to_le_bytes());
        for exec in exec_matrix() {
            let found = float_trits(&exec, dtype, 200, 3, &trits, 3.0);
            assert_eq!(found, Ok((Layout::Values { dtype, scale: 0.5 }, 1.5)));
            let multiplier = absmean_multiplier(&exec, dtype, 200, 3, &masters).unwrap();
            let rounded = Ok((Layout::Masters { dtype, multiplier }, 3.0 / multiplier));
            let found = float_trits(&exec, dtype, 200, 3, &masters, 3.0);
            assert_eq!(found, rounded);
            let found = master_trits(&exec, dtype, 200, 3, &trits, 1.0).unwrap();
            // Two thirds of the values are not zero.
            assert!((found.1 - 1.0 / 3.0).abs() < 1e-6);
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

    #[test]
    fn blocks_stay_in_place_only_if_their_codes_and_one_scale_say_all() {
        let n = 2 * BLOCKS_PER_TASK + 3;
        let mut block = [0x92; 66];
        block[64..].copy_from_slice(&[0, 0x38]);
        let blocks: Vec<u8> = block.repeat(n);
        let mut zero = [0x55; 66];
        zero[64..].copy_from_slice(&[0, 0x80]);
        for exec in exec_matrix() {
            let common = |at: usize, with: &[u8]| {
                let mut blocks = blocks.clone();
                blocks[66 * at..][..with.len()].copy_from_slice(with);
                common_tq2_0_scale(&exec, &blocks)
            };
            for at in [0, 1, BLOCKS_PER_TASK, n - 1] {
                assert_eq!(common(at, &[]), Some(0.5));
                assert_eq!(common(at, &zero), Some(0.5), "zeros without a scale");
                let with = |i: usize, byte| {
                    let mut block = zero;
                    block[i] = byte;
                    block
                };
                assert_eq!(common(at, &with(65, 0x39)), None, "another scale");
                assert_eq!(common(at, &with(65, 0x7c)), None, "an infinite scale");
                assert_eq!(common(at, &with(0, 0x54)), None, "a trit, but no scale");
                assert_eq!(common(at, &[0xd2]), None, "a code of 3");
            }
            assert_eq!(common_tq2_0_scale(&exec, &zero), Some(0.0));
            assert_eq!(common_tq2_0_scale(&exec, &[]), Some(0.0));
            assert_eq!(common_tq2_0_scale(&exec, &blocks[1..]), None);
        }
    }
}
