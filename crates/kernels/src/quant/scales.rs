//! Detecting whether floating-point weights are trits, and with how many scales.

use std::sync::Mutex;

use sterna_format::DType;

use super::QuantError;
use super::float::round_to_f16;
use crate::Exec;
use crate::isa::multiversion;
use crate::repack::try_ranges;
use crate::shape;

/// Elements that share a scale in TQ1_0 and TQ2_0.
const BLOCK: usize = 256;

/// Rows per task.
const ROWS_PER_TASK: usize = 16;

/// The magnitudes of a matrix, as far as known from some of its rows.
///
/// Every stored form of ternary weights decodes to the same numbers, so these results, and what
/// [`Encoder`](super::Encoder) then writes, are the same for all of them. Rows may be processed in any order:
/// the results for parts combine by [`TernaryScales::and`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TernaryScales {
    /// The magnitude of all values that aren't zero, 0 if there are none.
    one: Option<f32>,
    /// Whether each block has one magnitude, which f16 holds.
    in_blocks: bool,
}

impl TernaryScales {
    /// For no rows.
    pub const NONE: TernaryScales = TernaryScales {
        one: Some(0.0),
        in_blocks: true,
    };

    /// For whole rows of `k` elements. Ends early where there is nothing ternary.
    ///
    /// Errors: [`QuantError::Size`] if `rows` isn't whole rows.
    pub fn of_rows(exec: &Exec, k: usize, rows: &[f32]) -> Result<TernaryScales, QuantError> {
        let n = shape::rows("rows of values", rows.len(), k)?;
        let all = Mutex::new(TernaryScales::NONE);
        try_ranges(exec, n, ROWS_PER_TASK, |range| {
            let found = look(exec.isa, k, &rows[range.start * k..range.end * k]);
            let mut all = all.lock().expect("no holder of this lock panics");
            *all = all.and(found);
            Ok(())
        })?;
        Ok(all.into_inner().expect("no holder of this lock panics"))
    }

    /// For these and other rows.
    pub fn and(self, other: TernaryScales) -> TernaryScales {
        TernaryScales {
            one: match (self.one, other.one) {
                (Some(a), Some(b)) if a == b || b == 0.0 => Some(a),
                (Some(0.0), Some(b)) => Some(b),
                _ => None,
            },
            in_blocks: self.in_blocks && other.in_blocks,
        }
    }

    /// The one scale of all values; 0 if all are zero.
    pub fn one(self) -> Option<f32> {
        self.one
    }

    /// Whether `dtype` is a ternary type that holds the values exactly: I2_S takes any one scale,
    /// TQ1_0 and TQ2_0 a scale for every 256 elements of a row that an f16 holds.
    pub fn fit(self, dtype: DType) -> bool {
        match dtype {
            DType::I2_S => self.one.is_some(),
            DType::TQ1_0 | DType::TQ2_0 => self.in_blocks,
            _ => false,
        }
    }
}

multiversion! {
    fn look(k: usize, rows: &[f32]) -> TernaryScales {
        let mut found = TernaryScales {
            one: Some(0.0),
            in_blocks: k.is_multiple_of(BLOCK),
        };
        // Where rows aren't whole blocks, blocks are meaningless but still end the search early.
        for values in rows.chunks(BLOCK) {
            let scale = magnitude(values);
            let one = scale.filter(|scale| found.in_blocks && *scale == round_to_f16(*scale));
            found = found.and(TernaryScales { one: scale, in_blocks: one.is_some() });
            if found.one.is_none() && !found.in_blocks {
                break;
            }
        }
        found
    }
}

/// The one magnitude of all values that aren't zero, if there is one; 0 if all are.
#[inline(always)]
fn magnitude(values: &[f32]) -> Option<f32> {
    // As integers, magnitudes compare as they do as floats, and NaN is the largest.
    let mut top = 0;
    for v in values {
        let bits = v.to_bits() & 0x7fff_ffff;
        top = if bits > top { bits } else { top };
    }
    let mut others = false;
    for v in values {
        let bits = v.to_bits() & 0x7fff_ffff;
        others |= (bits != 0) & (bits != top);
    }
    (!others && f32::from_bits(top).is_finite()).then_some(f32::from_bits(top))
}
