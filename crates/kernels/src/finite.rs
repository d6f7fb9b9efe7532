//! Checking that weights are finite.

use sterna_format::DType;

use crate::Exec;
use crate::isa::multiversion;
use crate::quant::{QuantError, decode_row};
use crate::repack::try_rows;
use crate::requantize::row_bytes;

/// Checks that every weight of `[n, k]` blocks of type `dtype` is finite, on all threads.
///
/// Errors: [`QuantError::NotFinite`] names the first that isn't, counted from the first of the first row;
/// those of [`decode_row`]; [`QuantError::Size`] if `bytes` isn't `n` rows.
pub fn check_finite(
    exec: &Exec,
    dtype: DType,
    n: usize,
    k: usize,
    bytes: &[u8],
) -> Result<(), QuantError> {
    let stride = row_bytes(dtype, k)?;
    let expected = stride.saturating_mul(n);
    if bytes.len() != expected {
        return Err(QuantError::Size {
            what: "matrix of blocks",
            expected,
            found: bytes.len(),
        });
    }
    try_rows(exec, n, |rows| {
        let bytes = &bytes[rows.start * stride..rows.end * stride];
        check_rows(exec.isa, dtype, k, rows.start, bytes)
    })
}

multiversion! {
    /// The same for some rows, of which the first is row `first` of the matrix.
    fn check_rows(dtype: DType, k: usize, first: usize, bytes: &[u8]) -> Result<(), QuantError> {
        let mut values = vec![0.0f32; k];
        let stride = row_bytes(dtype, k)?;
        for (i, bytes) in bytes.chunks_exact(stride.max(1)).enumerate() {
            decode_row(dtype, bytes, &mut values)?;
            if let Some(at) = values.iter().position(|value| !value.is_finite()) {
                return Err(QuantError::NotFinite {
                    index: (first + i) * k + at,
                    value: values[at],
                });
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::test_data::exec_matrix;

    #[test]
    fn the_first_that_is_no_number_is_named() {
        let (n, k) = (200, 32);
        let mut values = vec![1.0f32; n * k];
        values[150 * k + 3] = f32::NAN;
        let bytes = |values: &[f32]| -> Vec<u8> {
            values
                .iter()
                .flat_map(|value| value.to_le_bytes())
                .collect()
        };
        for exec in exec_matrix() {
            let check = |values: &[f32]| check_finite(&exec, DType::F32, n, k, &bytes(values));
            let error = check(&values).unwrap_err();
            assert!(
                matches!(error, QuantError::NotFinite { index, value } if index == 150 * k + 3 && value.is_nan())
            );
            let mut values = values.clone();
            values[7] = f32::INFINITY;
            let infinite = QuantError::NotFinite {
                index: 7,
                value: f32::INFINITY,
            };
            assert_eq!(check(&values), Err(infinite));
            assert_eq!(check(&vec![0.5; n * k]), Ok(()));
            assert!(matches!(check(&[1.0]), Err(QuantError::Size { .. })));
        }
        // A scale of a block that is infinite.
        let mut block = vec![0u8; 34];
        block[..2].copy_from_slice(&0x7c00u16.to_le_bytes());
        block[2..].fill(1);
        let exec = &exec_matrix()[0];
        assert!(check_finite(exec, DType::Q8_0, 1, 32, &block).is_err());
    }
}
