//! Carrying out recipes: turning the bytes of a weight into the backend's form.

use bytes::Bytes;
use sterna_format::DType;
use sterna_kernels::quant::ternary::{Layout, Source, row_bytes};
use sterna_kernels::quant::{QuantError, decode_row, mxfp4};
use sterna_kernels::{Exec, check_finite as check_finite_blocks, repack, requantize};

use super::LoadError;
use crate::backend::{Rounding, TernaryPacking, WeightData};
use crate::plan::{
    LinearRecipe, ScaleRecipe, Stored, TensorRequest, VectorRecipe, is_float, multiplied_as,
};

/// Fails at the first weight that is NaN or infinite.
pub(super) fn check_finite(
    host: &Exec,
    recipe: &LinearRecipe,
    name: &str,
    weights: &WeightData,
) -> Result<(), LoadError> {
    let name = || name.to_owned();
    match weights {
        WeightData::Blocks { dtype, bytes, .. } => {
            check_finite_blocks(host, *dtype, recipe.n, recipe.k, bytes).map_err(|source| {
                match source {
                    QuantError::NotFinite { index, value } => LoadError::NotFinite {
                        name: name(),
                        index,
                        found: value,
                    },
                    source => LoadError::Weights {
                        name: name(),
                        source,
                    },
                }
            })
        }
        WeightData::Ternary { scale, .. } if !scale.is_finite() => Err(LoadError::BadScale {
            name: name(),
            found: *scale,
        }),
        WeightData::Ternary { .. } => Ok(()),
    }
}

pub(crate) fn vector(
    recipe: &VectorRecipe,
    request: &TensorRequest,
    bytes: &Bytes,
) -> Result<Vec<f32>, LoadError> {
    let mut values = vec![0.0; recipe.len];
    let bytes = recipe.every.of(bytes, recipe.dtype.block_bytes());
    decode_row(recipe.dtype, &bytes, &mut values).map_err(|source| LoadError::Weights {
        name: request.name_in_file().to_owned(),
        source,
    })?;
    for (index, value) in values.iter_mut().enumerate() {
        *value = recipe.transform.apply(index, *value);
        if !value.is_finite() {
            return Err(LoadError::NotFinite {
                name: request.name_in_file().to_owned(),
                index,
                found: *value,
            });
        }
    }
    Ok(values)
}

/// The matrix `[n, k]` whose columns are the rows of `bytes`, elements of any size.
fn transposed(bytes: &[u8], n: usize, k: usize) -> Vec<u8> {
    let size = bytes.len().checked_div(n * k).unwrap_or(0);
    let mut out = Vec::with_capacity(bytes.len());
    for row in 0..n {
        for column in 0..k {
            let at = (column * n + row) * size;
            out.extend_from_slice(&bytes[at..at + size]);
        }
    }
    out
}

/// The weights of a linear layer in the backend's form, repacked on `host` if need be.
pub(crate) fn linear(
    host: &Exec,
    recipe: &LinearRecipe,
    requests: &[TensorRequest],
    parts: Vec<Bytes>,
) -> Result<WeightData, LoadError> {
    let LinearRecipe { n, k, .. } = *recipe;
    let weights_error = |source| LoadError::Weights {
        name: requests[0].name_in_file().to_owned(),
        source,
    };
    let joined;
    let bytes = match recipe.n_runs {
        1 => &parts[0],
        n_runs => {
            joined = Bytes::from(parts[..n_runs].concat());
            &joined
        }
    };
    let with_scales;
    let bytes = match recipe.split_scales {
        false => bytes,
        true => {
            let blocks = mxfp4::from_split(bytes, &parts[recipe.n_runs]).map_err(weights_error)?;
            with_scales = Bytes::from(blocks);
            &with_scales
        }
    };
    let n_rows = n * recipe.every.step;
    let turned;
    let bytes = match recipe.transposed {
        false => bytes,
        true => {
            turned = Bytes::from(transposed(bytes, n_rows, k));
            &turned
        }
    };
    let bytes = &recipe.every.of(bytes, bytes.len() / n_rows.max(1));
    let given_scale = match &recipe.scale {
        Some(scale) => {
            let at = recipe.n_runs;
            Some(read_scale(scale, &requests[at], &parts[at])?)
        }
        None => None,
    };
    let pack = |layout| {
        let rows = recipe.first_row..recipe.first_row + n;
        repack::repack(host, layout, recipe.n_stored, k, bytes, rows)
            .map(Bytes::from)
            .map_err(weights_error)
    };
    let blocks = |dtype, rounding| match given_scale {
        None => Ok(WeightData::Blocks {
            dtype,
            bytes: bytes.clone(),
            rounding,
        }),
        Some(_) => Err(LoadError::NoCommonScale {
            name: requests[1].name_in_file().to_owned(),
        }),
    };
    let dense = |(layout, scale)| {
        Ok(WeightData::Ternary {
            codes: pack(layout)?,
            packing: TernaryPacking::I2s,
            scale,
        })
    };
    let unit = given_scale.unwrap_or(1.0);
    match recipe.stored {
        Stored::Blocks(dtype) if recipe.precise && is_float(dtype) => blocks(dtype, Rounding::None),
        Stored::Blocks(dtype) => blocks(dtype, Rounding::Blocks),
        Stored::Masters(dtype) => {
            dense(repack::master_trits(host, dtype, n, k, bytes, unit).map_err(weights_error)?)
        }
        Stored::BitLinear(dtype) if is_float(dtype) => {
            dense(repack::float_trits(host, dtype, n, k, bytes, unit).map_err(weights_error)?)
        }
        Stored::BitLinear(dtype) => {
            if dtype == DType::TQ2_0
                && let Some(scale) = repack::common_tq2_0_scale(host, bytes)
            {
                return Ok(WeightData::Ternary {
                    codes: bytes.clone(),
                    packing: TernaryPacking::Tq20,
                    scale: scale * unit,
                });
            }
            let common = repack::common_scale(host, dtype, n, bytes).map_err(weights_error)?;
            match common {
                Some(scale) => dense((ternary_layout(dtype, scale), scale * unit)),
                None => blocks(dtype, Rounding::Row),
            }
        }
        Stored::Packed => dense((Layout::HuggingFace, unit)),
        Stored::I2s(layout) => {
            let stored = Source::new(Layout::I2S(layout), recipe.n_stored, k, bytes)
                .map_err(weights_error)?;
            let codes = if stored.is_working_layout() {
                let stride = row_bytes(k);
                let codes = bytes.slice(recipe.first_row * stride..(recipe.first_row + n) * stride);
                repack::check_codes(host, n, k, &codes).map_err(weights_error)?;
                codes
            } else {
                pack(Layout::I2S(layout))?
            };
            Ok(WeightData::Ternary {
                codes,
                packing: TernaryPacking::I2s,
                scale: given_scale.unwrap_or(1.0),
            })
        }
    }
}

/// Blocks of a type that is only stored in one that is multiplied, with the same values.
pub(super) fn unpacked(
    host: &Exec,
    recipe: &LinearRecipe,
    weights: WeightData,
) -> Result<WeightData, QuantError> {
    match weights {
        WeightData::Blocks {
            dtype,
            bytes,
            rounding,
        } if multiplied_as(dtype) != dtype => {
            let to = multiplied_as(dtype);
            Ok(WeightData::Blocks {
                dtype: to,
                bytes: requantize(host, recipe.n, recipe.k, dtype, &bytes, to)?.into(),
                rounding,
            })
        }
        weights => Ok(weights),
    }
}

/// Converts `weights` to blocks of another type.
pub(super) fn encode(
    host: &Exec,
    recipe: &LinearRecipe,
    weights: &WeightData,
    to: DType,
) -> Result<WeightData, QuantError> {
    let WeightData::Blocks { dtype, bytes, .. } = weights else {
        unreachable!("`ModelPlan::with_head` takes heads that are blocks only");
    };
    let bytes = requantize(host, recipe.n, recipe.k, *dtype, bytes, to)?;
    Ok(WeightData::Blocks {
        dtype: to,
        bytes: bytes.into(),
        rounding: Rounding::Blocks,
    })
}

/// Packed checkpoints disagree on whether scales multiply or divide. Weights are much smaller than 1 in any
/// trained model, so a larger scale indicates that the configuration is wrong about that.
pub(super) fn odd_scale(
    recipe: &LinearRecipe,
    requests: &[TensorRequest],
    weights: &WeightData,
) -> Option<String> {
    match weights {
        WeightData::Ternary { scale, .. } if recipe.stored == Stored::Packed && *scale > 1.0 => {
            Some(format!(
                "tensor `{}`: weights are worth ±{scale} each; does the configuration's \
                 linear_class say rightly whether scales multiply or divide?",
                requests[0].name_in_file()
            ))
        }
        _ => None,
    }
}

fn ternary_layout(dtype: DType, scale: f32) -> Layout {
    match dtype {
        DType::TQ1_0 | DType::TQ2_0 => Layout::Blocks(dtype),
        _ => Layout::Values { dtype, scale },
    }
}

fn read_scale(
    recipe: &ScaleRecipe,
    request: &TensorRequest,
    bytes: &[u8],
) -> Result<f32, LoadError> {
    let mut value = [0.0];
    decode_row(recipe.dtype, bytes, &mut value).map_err(|source| LoadError::Weights {
        name: request.name_in_file().to_owned(),
        source,
    })?;
    let scale = if recipe.divides {
        1.0 / value[0]
    } else {
        value[0]
    };
    if scale.is_finite() && scale > 0.0 {
        Ok(scale)
    } else {
        Err(LoadError::BadScale {
            name: request.name_in_file().to_owned(),
            found: value[0],
        })
    }
}
