//! Block formats: the scalar code that defines how stored weights become numbers and back.
//!
//! One file per format, or per family that shares its arithmetic. A *row* here is a whole number of
//! blocks of one [`DType`]; the functions check lengths once and then work on fixed-size arrays, so
//! that the inner loops have no bounds checks and vectorise.
//!
//! Decoding agrees bit for bit with the reference implementations named in `docs/formats/`: the
//! order of the f32 operations is part of the format.
//!
//! ```
//! use sterna_format::DType;
//! use sterna_kernels::quant::{decode_row, encode_row};
//!
//! let values: Vec<f32> = (0..32).map(|i| i as f32 - 16.0).collect();
//! let mut block = [0; 34];
//! encode_row(DType::Q8_0, &values, &mut block)?;
//! let mut back = [0.0; 32];
//! decode_row(DType::Q8_0, &block, &mut back)?;
//! assert!(values.iter().zip(back).all(|(a, b)| (a - b).abs() < 0.1));
//! # Ok::<(), sterna_kernels::quant::QuantError>(())
//! ```

mod batch;
mod bits;
mod encoder;
mod error;
mod float;
mod i2_s;
pub(crate) mod integers;
mod k_affine;
mod k_fit;
mod k_quick;
mod k_symmetric;
mod lanes;
pub mod mxfp4;
mod q1_0;
mod q2_0;
mod q2_k;
mod q3_k;
mod q4;
mod q4_k;
mod q5;
mod q5_k;
mod q6_k;
pub mod q8;
mod q8_0;
mod scales;
mod search;
pub mod ternary;
mod tq1_0;
mod tq2_0;

use sterna_format::DType;

use crate::Isa;
use crate::shape::expect_len;

pub use encoder::{Encoder, decode_rows};
pub use error::QuantError;
pub use float::f16_to_f32;
pub use scales::TernaryScales;

/// Decodes whole blocks of `dtype` into f32 values.
///
/// Shapes: `out` is `[k]`, `bytes` is `[k / block_len * block_bytes]`. For `I2_S` the bytes are the codes of
/// one row and the values are −1, 0 and +1: the scale belongs to the whole tensor and is applied by the
/// caller.
///
/// Errors: [`QuantError::Unsupported`] for integer and Boolean types, [`QuantError::PartialBlock`]
/// and [`QuantError::Size`] if the lengths don't fit. Every byte pattern of the right length
/// decodes.
///
/// Inlined, so that a caller compiled for wider instructions gets a decoder that uses them.
#[inline(always)]
pub fn decode_row(dtype: DType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    check_sizes(dtype, out.len(), bytes.len())?;
    match dtype {
        DType::F64 => decode_blocks(bytes, out, float::decode_f64),
        DType::F32 => decode_blocks(bytes, out, float::decode_f32),
        DType::F16 => decode_blocks(bytes, out, float::decode_f16),
        DType::BF16 => decode_blocks(bytes, out, float::decode_bf16),
        DType::Q4_0 => decode_blocks(bytes, out, |b, x| q4::integers_q4_0(b).decode(x)),
        DType::Q4_1 => decode_blocks(bytes, out, q4::decode_q4_1),
        DType::Q5_0 => decode_blocks(bytes, out, |b, x| q5::integers_q5_0(b).decode(x)),
        DType::Q5_1 => decode_blocks(bytes, out, q5::decode_q5_1),
        DType::Q8_0 => decode_blocks(bytes, out, |b, x| q8_0::integers(b).decode(x)),
        DType::Q2_K => decode_blocks(bytes, out, |b, x| q2_k::integers(b).decode(x)),
        DType::Q3_K => decode_blocks(bytes, out, |b, x| q3_k::integers(b).decode(x)),
        DType::Q4_K => decode_blocks(bytes, out, |b, x| q4_k::integers(b).decode(x)),
        DType::Q5_K => decode_blocks(bytes, out, |b, x| q5_k::integers(b).decode(x)),
        DType::Q6_K => decode_blocks(bytes, out, |b, x| q6_k::integers(b).decode(x)),
        DType::TQ1_0 => decode_blocks(bytes, out, tq1_0::decode::<54, 256>),
        DType::PTQ1_0 => decode_blocks(bytes, out, tq1_0::decode::<28, 128>),
        DType::TQ2_0 => decode_blocks(bytes, out, tq2_0::decode),
        DType::I2_S => decode_blocks(bytes, out, i2_s::decode),
        DType::Q1_0 => decode_blocks(bytes, out, |b, x| q1_0::integers(b).decode(x)),
        DType::Q2_0 => decode_blocks(bytes, out, |b, x| q2_0::integers::<18, 64>(b).decode(x)),
        DType::Q2_0_G128 | DType::PQ2_0 => {
            decode_blocks(bytes, out, |b, x| q2_0::integers::<34, 128>(b).decode(x));
        }
        DType::MXFP4 => decode_blocks(bytes, out, mxfp4::decode),
        _ => {
            return Err(QuantError::Unsupported {
                op: "decode",
                dtype,
            });
        }
    }
    Ok(())
}

/// Encodes f32 values into whole blocks of `dtype`.
///
/// Shapes as in [`decode_row`]. Q4_0 to Q8_0, Q1_0, Q2_0, TQ1_0, PTQ1_0, TQ2_0 and MXFP4 give the bytes of
/// the reference quantizers; the K types search for scales that keep the error small.
///
/// Errors: those of [`decode_row`], with [`QuantError::Unsupported`] also for F64 and I2_S;
/// [`QuantError::NotFinite`] and [`QuantError::TooLarge`] name the first value that the type can't
/// hold. `out` is unchanged after an error.
///
/// [`Encoder`] does the same for the rows of a matrix, faster.
pub fn encode_row(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
    match is_searched(dtype) {
        true => search::search(Isa::SCALAR, dtype, values, out),
        false => encode_directly(dtype, values, out),
    }
}

/// Whether [`encode_row`] searches for the scales of this type.
const fn is_searched(dtype: DType) -> bool {
    use DType::{Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
    matches!(dtype, Q2_K | Q3_K | Q4_K | Q5_K | Q6_K)
}

/// Applies a function to each block; the lengths were checked against each other before. Called by name, it is inlined into
/// code that is compiled for wider instructions; as a value it isn't.
macro_rules! encode_blocks {
    ($values:expr, $out:expr, $encode:path) => {
        for (values, block) in ($values.as_chunks().0.iter()).zip($out.as_chunks_mut().0) {
            $encode(values, block);
        }
    };
}

/// As [`encode_row`], of the types without a search.
///
/// Inlined, so that a caller compiled for wider instructions gets an encoder that uses them.
#[inline(always)]
fn encode_directly(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
    check_sizes(dtype, values.len(), out.len())?;
    check_magnitudes(dtype, values)?;
    match dtype {
        DType::F32 => encode_blocks!(values, out, float::encode_f32),
        DType::F16 => encode_blocks!(values, out, float::encode_f16),
        DType::BF16 => encode_blocks!(values, out, float::encode_bf16),
        DType::Q4_0 => encode_blocks!(values, out, q4::encode_q4_0),
        DType::Q4_1 => encode_blocks!(values, out, q4::encode_q4_1),
        DType::Q5_0 => encode_blocks!(values, out, q5::encode_q5_0),
        DType::Q5_1 => encode_blocks!(values, out, q5::encode_q5_1),
        DType::Q8_0 => encode_blocks!(values, out, q8_0::encode),
        DType::TQ1_0 => encode_blocks!(values, out, tq1_0::encode::<256, 54>),
        DType::PTQ1_0 => encode_blocks!(values, out, tq1_0::encode::<128, 28>),
        DType::TQ2_0 => encode_blocks!(values, out, tq2_0::encode),
        DType::Q1_0 => encode_blocks!(values, out, q1_0::encode),
        DType::Q2_0 => encode_blocks!(values, out, q2_0::encode::<64, 18>),
        DType::Q2_0_G128 | DType::PQ2_0 => encode_blocks!(values, out, q2_0::encode::<128, 34>),
        DType::MXFP4 => encode_blocks!(values, out, mxfp4::encode),
        _ => {
            return Err(QuantError::Unsupported {
                op: "encode",
                dtype,
            });
        }
    }
    Ok(())
}

/// As [`encode_row`], but the K types are fitted in one pass instead of by a search: for encoding while a model is
/// being loaded.
///
/// Errors: as [`encode_row`].
///
/// Inlined, so that a caller compiled for wider instructions gets an encoder that uses them.
#[inline(always)]
pub(crate) fn encode_row_quick(
    dtype: DType,
    values: &[f32],
    out: &mut [u8],
) -> Result<(), QuantError> {
    if !is_searched(dtype) {
        return encode_directly(dtype, values, out);
    }
    check_sizes(dtype, values.len(), out.len())?;
    check_magnitudes(dtype, values)?;
    match dtype {
        DType::Q2_K => encode_blocks!(values, out, q2_k::encode_quick),
        DType::Q3_K => encode_blocks!(values, out, q3_k::encode_quick),
        DType::Q4_K => encode_blocks!(values, out, q4_k::encode_quick),
        DType::Q5_K => encode_blocks!(values, out, q5_k::encode_quick),
        _ => encode_blocks!(values, out, q6_k::encode_quick),
    }
    Ok(())
}

/// Applies `decode` to each block; the lengths were checked against each other before.
#[inline(always)]
fn decode_blocks<const B: usize, const N: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; B], &mut [f32; N]),
) {
    for (block, values) in bytes.as_chunks().0.iter().zip(out.as_chunks_mut().0) {
        decode(block, values);
    }
}

fn check_sizes(dtype: DType, elements: usize, found: usize) -> Result<(), QuantError> {
    if !elements.is_multiple_of(dtype.block_len()) {
        return Err(QuantError::PartialBlock {
            dtype,
            elements,
            block_len: dtype.block_len(),
        });
    }
    // An overflowing product equals no length.
    let expected = (elements / dtype.block_len()).saturating_mul(dtype.block_bytes());
    Ok(expect_len("row of blocks: bytes", expected, found)?)
}

/// The largest magnitude that `dtype` takes.
///
/// Types with f16 scales could hold somewhat more where a scale is multiplied by a code, but how
/// much depends on the other values of the block; one limit for all is easier to understand.
fn max_magnitude(dtype: DType) -> f32 {
    match dtype {
        DType::F32 | DType::MXFP4 => f32::MAX,
        DType::BF16 => half::bf16::MAX.to_f32(),
        _ => half::f16::MAX.to_f32(),
    }
}

fn check_magnitudes(dtype: DType, values: &[f32]) -> Result<(), QuantError> {
    let max = max_magnitude(dtype);
    // A fold without an early exit vectorises; the position is looked up only when there is one.
    let all_fit = values.iter().fold(true, |ok, v| ok & (v.abs() <= max));
    if all_fit {
        return Ok(());
    }
    for (index, &value) in values.iter().enumerate() {
        if !value.is_finite() {
            return Err(QuantError::NotFinite { index, value });
        }
        if value.abs() > max {
            return Err(QuantError::TooLarge {
                dtype,
                index,
                value,
                max,
            });
        }
    }
    Ok(())
}
