//! Converting rows of blocks from one type to another, on all threads.

use sterna_format::DType;

use crate::Exec;
use crate::quant::{Encoder, QuantError};

/// `[n, k]` weights of type `from`, encoded as `to`.
///
/// With [`Encoder::quick`], so that a model can be loaded this way.
///
/// Errors: those of [`Encoder::transcode`];
/// [`QuantError::Size`] if `bytes` isn't `n` rows. A row with values that `to` can't hold is an
/// error; of several, that of the first rows.
pub fn requantize(
    exec: &Exec,
    n: usize,
    k: usize,
    from: DType,
    bytes: &[u8],
    to: DType,
) -> Result<Vec<u8>, QuantError> {
    let encoder = Encoder::quick(to, k)?;
    let expected = row_bytes(from, k)?.saturating_mul(n);
    if bytes.len() != expected {
        return Err(QuantError::Size {
            what: "matrix of blocks",
            expected,
            found: bytes.len(),
        });
    }
    let mut out = vec![0; row_bytes(to, k)? * n];
    encoder.transcode(exec, 0, from, bytes, &mut out)?;
    Ok(out)
}

/// Bytes of a row of `k` elements.
///
/// Errors: [`QuantError::PartialBlock`] if it isn't whole blocks.
pub(crate) fn row_bytes(dtype: DType, k: usize) -> Result<usize, QuantError> {
    if !k.is_multiple_of(dtype.block_len()) {
        return Err(QuantError::PartialBlock {
            dtype,
            elements: k,
            block_len: dtype.block_len(),
        });
    }
    Ok(k / dtype.block_len() * dtype.block_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::quant::decode_row;
    use crate::test_data::{exec_matrix, floats};

    fn encode(dtype: DType, values: &[f32]) -> Vec<u8> {
        let mut bytes = vec![0; row_bytes(dtype, values.len()).unwrap()];
        crate::quant::encode_row(dtype, values, &mut bytes).unwrap();
        bytes
    }

    fn decode(dtype: DType, bytes: &[u8], len: usize) -> Vec<f32> {
        let mut values = vec![0.0; len];
        decode_row(dtype, bytes, &mut values).unwrap();
        values
    }

    fn squared_error(a: &[f32], b: &[f32]) -> f64 {
        let pairs = a.iter().zip(b);
        pairs.map(|(a, b)| f64::from(a - b).powi(2)).sum()
    }

    #[test]
    fn one_pass_is_nearly_as_good_as_the_search() {
        let (n, k) = (70, 512);
        // Something like a bell, with outliers.
        let values: Vec<f32> = (floats(n * k, 1).iter().zip(floats(n * k, 2)))
            .zip(floats(n * k, 3))
            .map(|((a, b), c)| a + b + 2.0 * c.powi(9))
            .collect();
        let bytes = encode(DType::F32, &values);
        for dtype in [DType::Q4_K, DType::Q5_K, DType::Q6_K] {
            let search = squared_error(&values, &decode(dtype, &encode(dtype, &values), n * k));
            let mut first: Option<Vec<u8>> = None;
            for exec in exec_matrix() {
                let quick = requantize(&exec, n, k, DType::F32, &bytes, dtype).unwrap();
                let error = squared_error(&values, &decode(dtype, &quick, n * k));
                assert!(error < 1.2 * search, "{dtype}: {error}, search {search}");
                assert_eq!(
                    *first.get_or_insert_with(|| quick.clone()),
                    quick,
                    "{exec:?}"
                );
            }
        }
    }

    #[test]
    fn extreme_rows_stay_close() {
        let k = 256;
        let rows = [
            vec![0.0; k],
            vec![1.5; k],
            vec![-1.5; k],
            (0..k).map(|i| if i == 7 { 65504.0 } else { 0.0 }).collect(),
            (0..k).map(|i| if i == 7 { -1e-20 } else { 0.0 }).collect(),
            (0..k).map(|i| i as f32).collect(),
            (0..k).map(|i| -(i as f32)).collect(),
        ];
        let exec = &exec_matrix()[0];
        for dtype in [
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
            DType::Q8_0,
            DType::F16,
        ] {
            for row in &rows {
                let bytes = encode(DType::F32, row);
                let quick = requantize(exec, 1, k, DType::F32, &bytes, dtype).unwrap();
                let top = row.iter().fold(0.0f32, |m, v| m.max(v.abs()));
                for (a, b) in row.iter().zip(decode(dtype, &quick, k)) {
                    assert!(
                        (a - b).abs() <= 0.04 * top.max(1e-6),
                        "{dtype}: {a}, not {b}"
                    );
                }
            }
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let exec = &exec_matrix()[0];
        let f32s = |values: &[f32]| encode(DType::F32, values);
        let mut values = vec![0.0; 512];
        let ok = |bytes: &[u8], n, k, to| requantize(exec, n, k, DType::F32, bytes, to);
        assert!(ok(&f32s(&values), 2, 256, DType::Q6_K).is_ok());
        assert!(ok(&[], 0, 256, DType::Q6_K).is_ok());
        assert!(ok(&f32s(&values), 3, 256, DType::Q6_K).is_err());
        assert!(ok(&f32s(&values[..64]), 2, 32, DType::Q6_K).is_err());
        assert!(ok(&f32s(&values), usize::MAX, 256, DType::Q6_K).is_err());
        values[300] = f32::NAN;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        assert!(ok(&bytes, 2, 256, DType::Q6_K).is_err());
    }
}
