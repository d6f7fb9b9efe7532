//! Converting a tensor.

use std::ops::Range;

use bytes::Bytes;
use sterna::{Context, Result};
use sterna_format::DType;
use sterna_format::bundle::{Action, ManifestTensor, ModelFacts, SourceType, TensorForm};
use sterna_kernels::quant::ternary::{Layout, i2_s_trailer};
use sterna_kernels::quant::{Encoder, QuantError, decode_rows};
use sterna_kernels::{Exec, repack};

use super::QuantizeSettings;
use super::shards::Shards;
use crate::event::{Event, Notify};
use crate::row_chunks::row_chunks;

/// Bytes copied at a time.
const COPY_BYTES: usize = 8 << 20;

/// A tensor of a manifest, and how it is converted.
pub(super) struct Encoding<'a> {
    /// Its name in messages.
    label: String,
    source: &'a ManifestTensor,
    /// Rows of the model.
    n: u32,
    how: How,
}

/// How the bytes of a tensor are converted to the stored form.
#[derive(Clone, Copy)]
enum How {
    Copy,
    /// Into blocks of this type.
    Blocks(DType),
    /// Floats into trits; `masters` are quantized even if they are trits. `unit` is a factor on their scale.
    Floats {
        masters: bool,
        unit: f32,
    },
    /// Trits, one per byte.
    Bytes {
        scale: f32,
    },
    /// Trits, four per byte.
    Packed {
        scale: f32,
    },
}

impl<'a> Encoding<'a> {
    /// How to convert tensor `i`, which is called `name` in its checkpoint as far as its position tells.
    pub(super) fn of(
        i: usize,
        name: Option<&str>,
        source: &'a ManifestTensor,
        settings: &QuantizeSettings,
        shards: &mut Shards,
        notify: &Notify<'_>,
    ) -> Result<Encoding<'a>> {
        let label = match name {
            Some(name) => format!("tensor {i} (`{name}`)"),
            None => format!("tensor {i}"),
        };
        let how = how(source, shards, notify).with_context(|| label.clone())?;
        let n = match how {
            How::Packed { .. } => packed_rows(source.rows, name, settings),
            _ => source.rows,
        };
        Ok(Encoding {
            label,
            source,
            n,
            how,
        })
    }

    /// The stored type.
    pub(super) fn form(&self) -> TensorForm {
        let ManifestTensor { action, dtype, .. } = *self.source;
        let stored = action.stored_type(dtype);
        TensorForm {
            action,
            dtype: stored.expect("a manifest pairs actions with types that they take"),
            rows: self.n,
            cols: self.source.cols,
            // For packed trits, the manifest counts stored rows.
            padded_rows: self.source.padded_rows.max(self.n),
            padded_cols: self.source.padded_cols,
        }
    }

    /// Returns the stored bytes piece by piece, computed on `exec`.
    pub(super) fn write(
        &self,
        exec: &Exec,
        shards: &Shards,
        mut write: impl FnMut(&[u8]) -> Result<()>,
        notify: &Notify<'_>,
    ) -> Result<()> {
        let label = || self.label.clone();
        let bytes = shards.bytes(&self.source.data).with_context(label)?;
        let (n, k) = (self.n as usize, self.source.cols as usize);
        let dtype = self.source.dtype.dtype();
        let piece = |rows: &Range<usize>| {
            let share = |row: usize| (bytes.len() as u64).saturating_mul(row as u64) / n as u64;
            let n_bytes = share(rows.end) - share(rows.start);
            notify(Event::Advanced { n_bytes });
        };
        let mut trits = |layout, scale| -> Result<()> {
            for rows in row_chunks(n, k.next_multiple_of(128), DType::I2_S) {
                let codes = repack::repack(exec, layout, n, k, &bytes, rows.clone());
                write(&codes.with_context(label)?)?;
                piece(&rows);
            }
            write(&i2_s_trailer(scale))
        };
        match self.how {
            How::Copy => {
                for part in bytes.chunks(COPY_BYTES) {
                    write(part)?;
                    let n_bytes = part.len() as u64;
                    notify(Event::Advanced { n_bytes });
                }
                Ok(())
            }
            How::Packed { scale } => trits(Layout::HuggingFace, scale),
            How::Floats { masters, unit } => {
                let find = if masters {
                    repack::master_trits
                } else {
                    repack::float_trits
                };
                let (layout, scale) = find(exec, dtype, n, k, &bytes, unit).with_context(label)?;
                trits(layout, scale)
            }
            How::Bytes { scale } => {
                for rows in row_chunks(n, k, DType::F32) {
                    let part = &bytes[rows.start * k..rows.end * k];
                    write(&byte_trits(exec, rows.len(), k, part).with_context(label)?)?;
                    piece(&rows);
                }
                write(&i2_s_trailer(scale))
            }
            How::Blocks(to) => {
                // Where rows have to be padded, they are decoded first.
                let padded = k.next_multiple_of(to.block_len());
                let unit = if padded == k { to } else { DType::F32 };
                let stride = k * dtype.block_bytes();
                for rows in row_chunks(n, padded, unit) {
                    let part = &bytes[rows.start * stride..rows.end * stride];
                    let blocks = blocks(exec, &rows, k, dtype, part, to);
                    write(&blocks.with_context(label)?)?;
                    piece(&rows);
                }
                Ok(())
            }
        }
    }
}

/// How the bytes of `source` are converted.
fn how(source: &ManifestTensor, shards: &mut Shards, notify: &Notify<'_>) -> Result<How> {
    let shard = source.data.shard;
    // They must be there in any case.
    let bytes = shards.bytes(&source.data)?;
    let mut scale = || match &source.scale {
        Some(scale) => shards.scale(scale, shard, notify),
        None => Ok(1.0),
    };
    Ok(match source.action {
        Action::Raw => How::Copy,
        Action::TernaryQuantize => How::Floats {
            unit: scale()?,
            masters: shards
                .rules(shard, notify)
                .is_some_and(|rules| rules.masters),
        },
        Action::RepackTernary if source.dtype == SourceType::I8 && are_trits(&bytes) => {
            How::Bytes { scale: scale()? }
        }
        Action::RepackTernary => How::Packed { scale: scale()? },
        action @ (Action::EmbeddingI8
        | Action::Q1_0
        | Action::GroupedTernary
        | Action::Q4_0
        | Action::Q8_0
        | Action::Q8_0Blocked) => {
            let to = action.stored_type(source.dtype);
            How::Blocks(to.expect("a manifest pairs actions with types that they take"))
        }
    })
}

/// Whether each byte is −1, 0 or 1.
fn are_trits(bytes: &Bytes) -> bool {
    bytes.iter().all(|&byte| byte.wrapping_add(1) <= 2)
}

/// Rows of the model in `stored` rows of packed trits, four each except for the last: as many as the tensor's
/// position implies, if that fits, and all otherwise.
fn packed_rows(stored: u32, name: Option<&str>, settings: &QuantizeSettings) -> u32 {
    let all = stored.saturating_mul(4);
    let ModelFacts {
        hidden_dim_orig,
        intermediate_dim_orig,
        ..
    } = settings.model;
    let module = name.and_then(|name| name.strip_suffix("_proj.weight"));
    let module = module.and_then(|path| path.rsplit('.').next());
    let said = match (module, settings.head_dim) {
        (Some("gate" | "up"), _) => intermediate_dim_orig,
        (Some("o" | "down"), _) => hidden_dim_orig,
        (Some("q" | "k" | "v"), Some(head_dim)) if head_dim > 0 => all / head_dim * head_dim,
        _ => all,
    };
    match said.div_ceil(4) == stored {
        true => said,
        false => all,
    }
}

/// Rows of trits that are stored one per byte, in the working layout.
fn byte_trits(exec: &Exec, n: usize, k: usize, bytes: &[u8]) -> Result<Vec<u8>, QuantError> {
    let values = bytes.iter().map(|&byte| f32::from(byte as i8));
    let values: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
    let layout = Layout::Values {
        dtype: DType::F32,
        scale: 1.0,
    };
    repack::repack(exec, layout, n, k, &values, 0..n)
}

/// Rows `rows` of `from`, padded to whole blocks of `to`, in that type.
fn blocks(
    exec: &Exec,
    rows: &Range<usize>,
    k: usize,
    from: DType,
    bytes: &[u8],
    to: DType,
) -> Result<Vec<u8>, QuantError> {
    let padded = k.next_multiple_of(to.block_len());
    let encoder = Encoder::new(to, padded)?;
    let mut out = vec![0; encoder.bytes_of(rows.len() * padded)?];
    if padded == k {
        encoder.transcode(exec, rows.start, from, bytes, &mut out)?;
        return Ok(out);
    }
    let mut values = vec![0.0; rows.len() * k];
    decode_rows(exec, from, bytes, &mut values)?;
    let mut wide = Vec::with_capacity(rows.len() * padded);
    for row in values.chunks_exact(k) {
        wide.extend_from_slice(row);
        let last = &row[k / to.block_len() * to.block_len()..];
        // A block of Q1_0 contains the mean magnitude, which padding mustn't lower.
        let padding = match to {
            DType::Q1_0 => last.iter().map(|v| v.abs()).sum::<f32>() / last.len() as f32,
            _ => 0.0,
        };
        wide.resize(wide.len() + padded - k, padding);
    }
    encoder.encode(exec, rows.start, &wide, &mut out)?;
    Ok(out)
}

#[cfg(test)]
mod tests {
    use sterna_format::bundle::ArchType;

    use super::*;

    #[test]
    fn the_place_of_packed_trits_says_how_many_rows_they_have() {
        let settings = QuantizeSettings {
            model: ModelFacts {
                arch: ArchType::BitNet,
                tied_embeddings: true,
                hidden_dim: 128,
                intermediate_dim: 256,
                hidden_dim_orig: 90,
                intermediate_dim_orig: 161,
                norm_eps: 1e-5,
            },
            head_dim: Some(18),
            output: None,
            rope: None,
            adapter: None,
        };
        for (stored, name, rows) in [
            (23, "model.layers.0.self_attn.q_proj.weight", 90),
            (9, "model.layers.0.self_attn.k_proj.weight", 36),
            (5, "model.layers.0.self_attn.v_proj.weight", 18),
            (23, "model.layers.0.self_attn.o_proj.weight", 90),
            (41, "model.layers.0.mlp.gate_proj.weight", 161),
            (40, "model.layers.0.mlp.gate_proj.weight", 160),
            (23, "model.layers.0.mlp.down_proj.weight", 90),
            (23, "lm_head.weight", 92),
        ] {
            assert_eq!(packed_rows(stored, Some(name), &settings), rows, "{name}");
        }
        assert_eq!(packed_rows(23, None, &settings), 92);
        assert_eq!(packed_rows(u32::MAX, None, &settings), u32::MAX);
    }
}
