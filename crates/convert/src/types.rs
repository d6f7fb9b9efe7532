//! The types of the tensors of a package or a GGUF file, and conversion to them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::str::FromStr;

use bytes::Bytes;
use sterna::{Context, Error, Result, bail};
use sterna_engine::export::{Exported, ExportedData, i2_s};
use sterna_format::DType;
use sterna_format::names::{is_embeddings, is_head, is_in_layer};
use sterna_format::rdrr::TensorMap;
use sterna_format::rdrr::naming::{self, Variant};
use sterna_kernels::Exec;
use sterna_kernels::quant::ternary::{row_bytes, unpack_row};
use sterna_kernels::quant::{Encoder, QuantError};

use crate::event::{Event, Notify, Warning};
use crate::row_chunks::row_chunks;

/// Tensors with fewer elements keep their type.
const MIN_ELEMENTS: usize = 1024;

/// The requested type of tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// The type of the source.
    Keep,
    /// This one, if the shape permits it. WebAssembly finds scales in one pass, other targets search for them.
    To(DType),
}

impl Target {
    /// The supported types, by name.
    const NAMES: &'static str =
        "keep, q4_k_m (or q4_k), q5_k, q6_k, q8_0, q4_0, tq2_0, tq1_0, i2_s, f16, bf16 or f32";
}

impl FromStr for Target {
    type Err = Error;

    /// Reads `keep` or the name of a type that models can be converted to.
    fn from_str(word: &str) -> Result<Target> {
        const TYPES: [DType; 11] = [
            DType::Q4_K,
            DType::Q5_K,
            DType::Q6_K,
            DType::Q8_0,
            DType::Q4_0,
            DType::TQ2_0,
            DType::TQ1_0,
            DType::I2_S,
            DType::F16,
            DType::BF16,
            DType::F32,
        ];
        if word == "keep" {
            return Ok(Target::Keep);
        }
        match naming::dtype_of(word).filter(|dtype| TYPES.contains(dtype)) {
            Some(dtype) => Ok(Target::To(dtype)),
            None => bail!(InvalidRequest, "expected {}", Target::NAMES),
        }
    }
}

/// Requested types of the parts of a model.
///
/// Ternary matrices are stored as I2_S unless a type that represents them exactly is requested.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Targets {
    /// Matrices of layers.
    pub weights: Target,
    /// The embedding table; unchanged by default. One that is also the output head gets the type of the head,
    /// unless one is requested for the table itself.
    pub embeddings: Option<Target>,
    /// The output head; by default as the table.
    pub head: Option<Target>,
}

impl Targets {
    /// Everything unchanged.
    pub const KEEP: Targets = Targets {
        weights: Target::Keep,
        embeddings: None,
        head: None,
    };

    /// The type of the embedding table. One that is also the output head (`tied`) gets the type of the head,
    /// unless one is requested for the table itself.
    fn table(&self, tied: bool) -> Target {
        let as_head = self.head.filter(|_| tied);
        self.embeddings.or(as_head).unwrap_or(Target::Keep)
    }

    /// Reports how a type requested for the head is applied if the model has no separate head.
    pub(crate) fn warn_if_tied(&self, tied: bool, notify: &Notify<'_>) {
        if let Some(warning) = self.warning_if_tied().filter(|_| tied) {
            notify(Event::Warning(warning));
        }
    }

    fn warning_if_tied(&self) -> Option<Warning> {
        let head = self.head?;
        let is_ignored = self.embeddings.is_some_and(|table| table != head);
        let is_used = self.embeddings.is_none();
        (is_ignored || is_used).then_some(Warning::NoHead { is_ignored })
    }
}

/// A tensor and the type it is stored as.
pub(crate) struct Encoding<'a> {
    tensor: &'a Exported,
    pub(crate) dtype: DType,
    /// Why it isn't the requested type.
    pub(crate) remark: Option<String>,
}

impl<'a> Encoding<'a> {
    /// Applies `targets` to `tensor`, of a model whose embedding table is also its output head if it is
    /// `tied`.
    ///
    /// Errors: a ternary tensor that no supported type can represent.
    pub(crate) fn of(tensor: &'a Exported, targets: &Targets, tied: bool) -> Result<Encoding<'a>> {
        let target = match tensor.name.as_str() {
            _ if !tensor.may_round => Target::Keep,
            name if is_embeddings(name) => targets.table(tied),
            name if is_head(name) => targets.head.unwrap_or_else(|| targets.table(false)),
            _ => targets.weights,
        };
        let (dtype, remark) = match &tensor.data {
            ExportedData::Ternary { scale, .. } => ternary_type(tensor, *scale, target)?,
            ExportedData::Blocks { dtype, .. } => block_type(tensor, *dtype, target),
        };
        Ok(Encoding {
            tensor,
            dtype,
            remark,
        })
    }

    /// Its size in bytes.
    pub(crate) fn size(&self) -> u64 {
        let n = self.tensor.shape.iter().product::<usize>() as u64;
        let size = self.dtype.tensor_bytes(n);
        size.expect("types were chosen that whole blocks of fit")
    }

    /// Returns the bytes piece by piece, computed on `exec`.
    pub(crate) fn write(
        &self,
        exec: &Exec,
        mut write: impl FnMut(Bytes) -> Result<()>,
    ) -> Result<()> {
        let name = || format!("tensor `{}`", self.tensor.name);
        let (n, k) = match self.tensor.shape[..] {
            [n, k] => (n, k),
            [n_experts, n, k] => (n_experts * n, k),
            _ => (1, self.tensor.shape.iter().product()),
        };
        match &self.tensor.data {
            ExportedData::Blocks { dtype, bytes } if *dtype == self.dtype => write(bytes.clone()),
            ExportedData::Blocks { dtype, bytes } => {
                let stride = bytes.len() / n;
                for rows in row_chunks(n, k, self.dtype) {
                    let first = rows.start;
                    let bytes = &bytes[first * stride..rows.end * stride];
                    let encoded = self.encoded(exec, first, rows.len() * k, k, *dtype, bytes);
                    write(encoded.with_context(name)?)?;
                }
                Ok(())
            }
            ExportedData::Ternary { codes, scale } if self.dtype == DType::I2_S => write(
                i2_s(n, k, codes, *scale)
                    .expect("the type was chosen for it")
                    .into(),
            ),
            ExportedData::Ternary { codes, scale } => {
                for rows in row_chunks(n, k, DType::F32) {
                    let values = floats(codes, *scale, k, &rows);
                    let n_values = rows.len() * k;
                    let encoded = self.encoded(exec, rows.start, n_values, k, DType::F32, &values);
                    write(encoded.with_context(name)?)?;
                }
                Ok(())
            }
        }
    }

    /// Rows of `from`, the first of which is row `first`, in the type of the tensor.
    fn encoded(
        &self,
        exec: &Exec,
        first: usize,
        n_values: usize,
        k: usize,
        from: DType,
        rows: &[u8],
    ) -> Result<Bytes, QuantError> {
        // Browsers keep types, and the searches for scales would be a tenth of their engine.
        let encoder = match cfg!(target_family = "wasm") {
            true => Encoder::quick(self.dtype, k)?,
            false => Encoder::new(self.dtype, k)?,
        };
        let mut blocks = vec![0; encoder.bytes_of(n_values)?];
        encoder.transcode(exec, first, from, rows, &mut blocks)?;
        Ok(blocks.into())
    }
}

/// Rows of trits as the bytes of f32.
fn floats(codes: &[u8], scale: f32, k: usize, rows: &Range<usize>) -> Vec<u8> {
    let stride = row_bytes(k);
    let mut trits = vec![0; k];
    let mut values = Vec::with_capacity(rows.len() * k * 4);
    for row in codes[rows.start * stride..rows.end * stride].chunks_exact(stride) {
        unpack_row(row, &mut trits).expect("exported codes are trits");
        for &trit in &trits {
            values.extend_from_slice(&(f32::from(trit) * scale).to_le_bytes());
        }
    }
    values
}

/// What `tensor` is stored as: unchanged, except for trits that no ternary type can store because they aren't
/// whole blocks, which become floats and a separate scale, as in checkpoints. `divides` says how the model's
/// configuration interprets such a scale.
///
/// Errors: a scale that such a checkpoint can't express.
pub(crate) fn storable(tensor: Exported, divides: bool) -> Result<Vec<Exported>> {
    let ExportedData::Ternary { codes, scale } = &tensor.data else {
        return Ok(vec![tensor]);
    };
    let [n, k] = tensor.shape[..] else {
        return Ok(vec![tensor]);
    };
    if (n * k).is_multiple_of(DType::I2_S.block_len()) {
        return Ok(vec![tensor]);
    }
    let said = match divides {
        true => divisor(*scale).with_context(|| {
            let name = &tensor.name;
            format!("tensor `{name}`: expected a scale that is one by a float, found {scale}")
        })?,
        false => *scale,
    };
    let mut trits = vec![0; k];
    let mut values = Vec::with_capacity(n * k * 2);
    for row in codes.chunks_exact(row_bytes(k)) {
        unpack_row(row, &mut trits).expect("exported codes are trits");
        for &trit in &trits {
            values.extend_from_slice(&half::f16::from_f32(trit.into()).to_le_bytes());
        }
    }
    let blocks = |name: String, shape, dtype, bytes: Vec<u8>| Exported {
        name,
        shape,
        may_round: false,
        data: ExportedData::Blocks {
            dtype,
            bytes: bytes.into(),
        },
    };
    let scale = blocks(
        format!("{}_scale", tensor.name),
        vec![1],
        DType::F32,
        said.to_le_bytes().to_vec(),
    );
    let codes = blocks(tensor.name, tensor.shape, DType::F16, values);
    Ok(vec![codes, scale])
}

/// A float whose reciprocal is `scale`, if there is one.
fn divisor(scale: f32) -> Option<f32> {
    let near = scale.recip();
    let mut candidates = [near, near.next_down(), near.next_up()].into_iter();
    candidates.find(|divisor| divisor.recip() == scale)
}

/// Trits stay trits: types other than ternary ones and floats are ignored.
fn ternary_type(tensor: &Exported, scale: f32, target: Target) -> Result<(DType, Option<String>)> {
    let (n, k) = (tensor.shape[0], tensor.shape[1]);
    let f16_scale = half::f16::from_f32(scale).to_f32() == scale;
    match target {
        Target::To(dtype @ (DType::TQ1_0 | DType::TQ2_0))
            if f16_scale && k.is_multiple_of(dtype.block_len()) =>
        {
            return Ok((dtype, None));
        }
        Target::To(dtype @ DType::F32) => return Ok((dtype, None)),
        Target::To(dtype @ DType::F16) if f16_scale => return Ok((dtype, None)),
        Target::To(dtype @ DType::BF16) if half::bf16::from_f32(scale).to_f32() == scale => {
            return Ok((dtype, None));
        }
        _ => {}
    }
    if !(n * k).is_multiple_of(DType::I2_S.block_len()) {
        bail!(
            Unsupported,
            "tensor `{}`: expected a multiple of 128 trits, found {n} times {k}",
            tensor.name
        );
    }
    let remark = match target {
        Target::Keep | Target::To(DType::I2_S) => None,
        Target::To(asked) => Some(format!(
            "{asked} would not hold the trits of `{}` exactly; stored as I2_S",
            tensor.name
        )),
    };
    Ok((DType::I2_S, remark))
}

/// The requested type, or the next one whose blocks fit.
fn block_type(tensor: &Exported, from: DType, target: Target) -> (DType, Option<String>) {
    let n_elements: usize = tensor.shape.iter().product();
    let Target::To(asked) = target else {
        return (from, None);
    };
    if n_elements < MIN_ELEMENTS {
        let remark = format!(
            "`{}` has {n_elements} elements, fewer than {MIN_ELEMENTS}; kept as {from}",
            tensor.name
        );
        return (from, (asked != from).then_some(remark));
    }
    let k = tensor.shape.last().copied().unwrap_or(0);
    // Trits with several scales are as exact as those with one.
    let trits = matches!(from, DType::TQ1_0 | DType::TQ2_0);
    if trits && !matches!(asked, DType::TQ1_0 | DType::TQ2_0 | DType::F32) {
        let remark = format!(
            "{asked} would not hold the trits of `{}` exactly; kept as {from}",
            tensor.name
        );
        return (from, Some(remark));
    }
    // Floats aren't quantized to trits they weren't trained for.
    let ternary = matches!(asked, DType::I2_S | DType::TQ1_0 | DType::TQ2_0);
    if (!ternary || trits) && k.is_multiple_of(asked.block_len()) {
        return (asked, None);
    }
    if ternary {
        let remark = format!("`{}` isn't ternary; kept as {from}", tensor.name);
        return (from, (asked != from).then_some(remark));
    }
    let instead = match k.is_multiple_of(DType::Q8_0.block_len()) {
        true => DType::Q8_0,
        false => DType::F16,
    };
    let remark = format!(
        "rows of `{}` have {k} elements, no whole blocks of {asked}; stored as {instead}",
        tensor.name
    );
    (instead, Some(remark))
}

/// Types of the parts of a model with these tensors; [`Targets::weights`] was requested.
///
/// That of the layers is the requested one if any matrix there has it, so that different requests give
/// different names however many matrices took another type; else that of most elements. That of a `tied` head
/// is the table's.
pub(crate) fn variant(tensors: &TensorMap, asked: Target, tied: bool) -> Variant {
    let of = |is_it: fn(&str) -> bool| {
        let mut found = tensors.iter().filter(|tensor| is_it(&tensor.name));
        found.find_map(|tensor| tensor.dtype.known())
    };
    let embeddings = of(is_embeddings).unwrap_or(DType::F32);
    let in_layers = tensors.iter().filter(|t| is_in_layer(&t.name));
    let in_layers = in_layers.filter_map(|t| Some((t.dtype.known()?, &t.shape[..])));
    let weights = match asked {
        Target::To(dtype)
            if in_layers
                .clone()
                .any(|(of, shape)| of == dtype && shape.len() > 1) =>
        {
            dtype
        }
        _ => most_used(in_layers).unwrap_or(embeddings),
    };
    let head = match tied {
        true => embeddings,
        false => of(is_head).unwrap_or(embeddings),
    };
    Variant {
        weights,
        embeddings,
        head,
    }
}

/// Of tensors of these types and shapes, the type that most elements of matrices have.
pub(crate) fn most_used<'a>(tensors: impl Iterator<Item = (DType, &'a [usize])>) -> Option<DType> {
    let mut counts: BTreeMap<DType, u64> = BTreeMap::new();
    for (dtype, shape) in tensors.filter(|(_, shape)| shape.len() > 1) {
        *counts.entry(dtype).or_default() += shape.iter().product::<usize>() as u64;
    }
    let most = counts.into_iter().max_by_key(|(_, n_elements)| *n_elements);
    most.map(|(dtype, _)| dtype)
}

#[cfg(test)]
mod tests {
    use super::*;
    use sterna_format::rdrr::{Span, Tensor};

    fn tensor(name: &str, shape: &[usize]) -> Exported {
        let n: usize = shape.iter().product();
        let bytes: Vec<u8> = (0..n)
            .flat_map(|i| (((i * 37) % 101) as f32 / 50.0 - 1.0).to_le_bytes())
            .collect();
        Exported {
            name: name.into(),
            shape: shape.to_vec(),
            may_round: shape.len() > 1,
            data: ExportedData::Blocks {
                dtype: DType::F32,
                bytes: bytes.into(),
            },
        }
    }

    const TARGETS: Targets = Targets {
        weights: Target::To(DType::Q4_K),
        embeddings: Some(Target::To(DType::F16)),
        head: Some(Target::Keep),
    };

    #[test]
    fn parts_of_a_model_have_their_own_types() {
        for (name, shape, dtype) in [
            ("model.embed_tokens.weight", &[8, 256][..], DType::F16),
            ("lm_head.weight", &[8, 256], DType::F32),
            ("model.layers.0.mlp.up_proj.weight", &[8, 256], DType::Q4_K),
            ("model.layers.0.mlp.up_proj.weight", &[64, 32], DType::Q8_0),
            ("model.layers.0.mlp.up_proj.weight", &[64, 40], DType::F16),
            ("model.layers.0.mlp.up_proj.weight", &[2, 256], DType::F32),
            ("model.norm.weight", &[4096], DType::F32),
        ] {
            let tensor = tensor(name, shape);
            let encoding = Encoding::of(&tensor, &TARGETS, false).unwrap();
            assert_eq!(encoding.dtype, dtype, "{name} {shape:?}");
            let exec = Exec::new(1, sterna_kernels::Isa::SCALAR);
            let mut len = 0;
            encoding
                .write(&exec, |bytes| {
                    len += bytes.len() as u64;
                    Ok(())
                })
                .unwrap();
            assert_eq!(len, encoding.size());
        }
    }

    #[test]
    fn a_head_that_is_the_table_too_is_what_either_is_asked_to_be() {
        let tensor = tensor("model.embed_tokens.weight", &[8, 256]);
        let (f16, q8) = (Target::To(DType::F16), Target::To(DType::Q8_0));
        for (embeddings, head, tied, dtype, said) in [
            (None, None, true, DType::F32, None),
            (None, Some(q8), true, DType::Q8_0, Some(false)),
            (Some(f16), Some(q8), true, DType::F16, Some(true)),
            (Some(f16), Some(f16), true, DType::F16, None),
            (None, Some(q8), false, DType::F32, None),
        ] {
            let targets = Targets {
                weights: Target::Keep,
                embeddings,
                head,
            };
            let encoding = Encoding::of(&tensor, &targets, tied).unwrap();
            assert_eq!(encoding.dtype, dtype);
            if tied {
                let warning = targets.warning_if_tied();
                assert_eq!(warning.map(|warning| warning.is_warning()), said);
            }
        }
    }

    #[test]
    fn a_package_is_called_after_the_type_asked_for_where_any_matrix_took_it() {
        let map = |of: &[(&str, [usize; 2], DType)]| {
            let mut map = TensorMap::default();
            for (name, shape, dtype) in of {
                let tensor = Tensor {
                    name: format!("model.{name}.weight"),
                    group: None,
                    dtype: (*dtype).into(),
                    shape: shape.to_vec(),
                    size: 0,
                    layout: None,
                    spans: vec![Span {
                        shard: 0,
                        offset: 0,
                        size: 1,
                    }],
                    role: None,
                    original_shape: None,
                    extra: serde_json::Map::new(),
                };
                map.push(tensor).unwrap();
            }
            map
        };
        // As in Qwen2-0.5B: rows of 896 elements are no whole blocks of Q4_K, those of 4864 are.
        let mixed = map(&[
            ("embed_tokens", [16, 896], DType::F16),
            ("layers.0.mlp.up_proj", [4864, 896], DType::Q8_0),
            ("layers.0.mlp.gate_proj", [4864, 896], DType::Q8_0),
            ("layers.0.mlp.down_proj", [896, 4864], DType::Q4_K),
        ]);
        let tag = |map: &TensorMap, asked| variant(map, asked, true).tag();
        assert_eq!(tag(&mixed, Target::To(DType::Q4_K)), "wq4_k_m-embf16");
        assert_eq!(tag(&mixed, Target::To(DType::Q8_0)), "wq8_0-embf16");
        assert_eq!(tag(&mixed, Target::To(DType::Q6_K)), "wq8_0-embf16");
        // Most elements, not most bytes.
        let kept = map(&[
            ("layers.0.mlp.up_proj", [512, 512], DType::I2_S),
            ("layers.0.mlp.down_proj", [128, 512], DType::F32),
        ]);
        assert_eq!(tag(&kept, Target::Keep), "wi2_s-embf32");
    }

    #[test]
    fn small_matrices_keep_their_type_with_a_remark() {
        let targets = |weights| Targets { weights, ..TARGETS };
        let small = tensor("model.layers.0.self_attn.q_proj.weight", &[4, 64]);
        for (asked, said) in [(DType::F16, true), (DType::F32, false)] {
            let encoding = Encoding::of(&small, &targets(Target::To(asked)), false).unwrap();
            assert_eq!(encoding.dtype, DType::F32);
            assert_eq!(encoding.remark.is_some(), said, "{asked}");
        }
    }

    #[test]
    fn trits_stay_exact() {
        let ternary = |scale| Exported {
            name: "model.layers.0.mlp.up_proj.weight".into(),
            shape: vec![4, 256],
            may_round: true,
            data: ExportedData::Ternary {
                codes: vec![0b01_10_00_01; 4 * 64].into(),
                scale,
            },
        };
        for (scale, asked, dtype) in [
            (0.1, Target::Keep, DType::I2_S),
            (0.1, Target::To(DType::Q4_K), DType::I2_S),
            (0.1, Target::To(DType::TQ2_0), DType::I2_S),
            (0.1, Target::To(DType::F32), DType::F32),
            (0.25, Target::To(DType::TQ2_0), DType::TQ2_0),
            (0.25, Target::To(DType::BF16), DType::BF16),
        ] {
            let tensor = ternary(scale);
            let targets = Targets {
                weights: asked,
                ..TARGETS
            };
            let encoding = Encoding::of(&tensor, &targets, false).unwrap();
            assert_eq!(encoding.dtype, dtype, "{scale} {asked:?}");
            let said = encoding.remark.is_some();
            assert_eq!(said, asked != Target::Keep && asked != Target::To(dtype));
        }
    }
}
