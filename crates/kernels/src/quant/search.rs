//! Searching with the vector type of an instruction set.
//!
//! Each search is compiled once for each of them, and called from here only.

use sterna_format::DType;

use super::{QuantError, check_magnitudes, check_sizes, q2_k, q3_k, q4, q4_k, q5_k, q6_k};
use crate::Isa;
#[cfg(target_arch = "x86_64")]
use crate::isa::Level;
#[cfg(target_arch = "x86_64")]
use crate::simd::x86::{Avx2, Avx512};
use crate::simd::{Portable, Simd};

/// As [`encode_row`](super::encode_row), of the types with a search: the K types, and Q4_0.
pub(super) fn search(
    isa: Isa,
    dtype: DType,
    values: &[f32],
    out: &mut [u8],
) -> Result<(), QuantError> {
    check_sizes(dtype, values.len(), out.len())?;
    check_magnitudes(dtype, values)?;
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,f16c,fma")]
        fn avx2(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
            // SAFETY: the function's own features.
            search_with(unsafe { Avx2::new() }, dtype, values, out)
        }
        #[target_feature(enable = "avx2,f16c,fma,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        fn avx512(dtype: DType, values: &[f32], out: &mut [u8]) -> Result<(), QuantError> {
            // SAFETY: the function's own features.
            search_with(unsafe { Avx512::new() }, dtype, values, out)
        }
        match isa.level() {
            Level::Baseline => {}
            Level::Avx2 | Level::AvxVnni => {
                // SAFETY: these levels exist only where `Level::is_here` saw AVX2, F16C and FMA.
                return unsafe { avx2(dtype, values, out) };
            }
            // SAFETY: these levels exist only where `Level::is_here` saw these features.
            Level::Avx512 | Level::Amx => return unsafe { avx512(dtype, values, out) },
        }
    }
    let _ = isa;
    search_with(Portable, dtype, values, out)
}

/// No closures anywhere down the call chain: they would not be compiled for the instruction set.
#[inline(always)]
fn search_with<S: Simd>(
    simd: S,
    dtype: DType,
    values: &[f32],
    out: &mut [u8],
) -> Result<(), QuantError> {
    match dtype {
        DType::Q4_0 => q4::search_q4_0(simd, values.as_chunks().0, out.as_chunks_mut().0),
        DType::Q2_K => q2_k::encode(simd, values.as_chunks().0, out.as_chunks_mut().0),
        DType::Q3_K => q3_k::encode(simd, values.as_chunks().0, out.as_chunks_mut().0),
        DType::Q4_K => q4_k::encode(simd, values.as_chunks().0, out.as_chunks_mut().0),
        DType::Q5_K => q5_k::encode(simd, values.as_chunks().0, out.as_chunks_mut().0),
        DType::Q6_K => q6_k::encode(simd, values.as_chunks().0, out.as_chunks_mut().0),
        _ => {
            return Err(QuantError::Unsupported {
                op: "search for",
                dtype,
            });
        }
    }
    Ok(())
}
