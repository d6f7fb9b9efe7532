//! The matrices of a PEFT adapter as listed in a quantize manifest.

use std::collections::BTreeMap;
use std::path::Path;

use sterna::native::{LocalFolder, read_small};
use sterna::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, Context, Result, bail};
use sterna_delivery::LocalFile;
use sterna_format::TensorEntry;
use sterna_format::bundle::{
    LoraBlock, LoraSource, LoraTarget, MatrixSource, ShardRange, SourceType,
};
use sterna_format::hf::{AdapterConfig, AdapterTensor, LoraFactor};
use sterna_format::safetensors::SafeTensors;

use super::shard_path;

/// The configuration of the adapter in `folder`.
fn adapter_config(folder: &Path) -> Result<AdapterConfig> {
    let path = folder.join(ADAPTER_CONFIG);
    let Some(bytes) = read_small(&LocalFolder::new(folder), ADAPTER_CONFIG)? else {
        bail!(NotFound, "{}: no such file", path.display());
    };
    AdapterConfig::parse(&bytes).with_context(|| path.display().to_string())
}

/// The base model named by the adapter in `folder`.
pub(super) fn base_model(folder: &Path) -> Result<Option<String>> {
    Ok(adapter_config(folder)?.base_model)
}

/// The matrices of the adapter in `folder`, for a model of `n_layers`; its file is added to `shards`. The
/// quantizer checks whether they fit the model otherwise.
pub(super) fn block(folder: &Path, n_layers: usize, shards: &mut Vec<String>) -> Result<LoraBlock> {
    let adapter = adapter_config(folder)?;
    let path = folder.join(ADAPTER_WEIGHTS);
    let what = || path.display().to_string();
    let file = LocalFile::open(&path)?;
    let header = SafeTensors::parse(&file.prefix(u64::MAX), file.len()).with_context(what)?;
    let path = shard_path(&path)?;
    let shard = u16::try_from(shards.len())
        .ok()
        .context("more than 65535 files")?;
    shards.push(path.clone());
    let mut scale = None;
    let mut halves: BTreeMap<(usize, LoraTarget), [Option<MatrixSource>; 2]> = BTreeMap::new();
    for entry in header.tensors() {
        let tensor = AdapterTensor::parse(&entry.name)?;
        let in_tensor = || format!("{path}: tensor `{}`", entry.name);
        let ends = |target: &LoraTarget| target.module().ends_with(&format!(".{}", tensor.module));
        let target = LoraTarget::ALL.into_iter().find(ends);
        let target = target.with_context(|| {
            let known = LoraTarget::ALL.map(LoraTarget::module).join(", ");
            format!(
                "{}: expected a module among {known}, found another",
                in_tensor()
            )
        })?;
        let own = adapter.scaling(&tensor.path);
        if *scale.get_or_insert(own) != own {
            bail!(
                Unsupported,
                "{}: expected one scaling for all modules, found {own} beside {}",
                in_tensor(),
                scale.unwrap_or(own)
            );
        }
        let rank = adapter.rank(&tensor.path);
        let place = match tensor.matrix {
            LoraFactor::A => 0,
            LoraFactor::B => 1,
        };
        if entry.shape.len() != 2 || entry.shape[place] != rank {
            bail!(
                InvalidFile,
                "{}: expected two dimensions, the rank {rank} in place {place}, found {:?}",
                in_tensor(),
                entry.shape
            );
        }
        let pair = halves.entry((tensor.layer, target)).or_default();
        if pair[place].replace(matrix(entry, shard)?).is_some() {
            bail!(
                InvalidFile,
                "{}: expected one of its kind, found another",
                in_tensor()
            );
        }
    }
    let pairs = halves.into_iter().map(|((layer, target), pair)| {
        let [Some(a), Some(b)] = pair else {
            bail!(
                InvalidFile,
                "{path}: layer {layer}, {}: expected lora_A and lora_B, found only one of them",
                target.module()
            );
        };
        if layer >= n_layers {
            bail!(
                InvalidFile,
                "{path}: expected layers below {n_layers}, found layer {layer}"
            );
        }
        Ok(LoraSource {
            layer: layer as u32,
            target,
            a,
            b,
        })
    });
    let pairs: Vec<_> = pairs.collect::<Result<_>>()?;
    let Some(scale) = scale else {
        bail!(
            InvalidFile,
            "{path}: expected the matrices of an adapter, found none ({ADAPTER_CONFIG} is there)"
        );
    };
    Ok(LoraBlock {
        n_layers: n_layers as u32,
        scale,
        pairs,
    })
}

fn matrix(entry: &TensorEntry, shard: u16) -> Result<MatrixSource> {
    let dtype = SourceType::from_dtype(entry.dtype).filter(|dtype| dtype.is_float());
    let dtype = dtype.with_context(|| {
        format!(
            "tensor `{}`: expected F32, F16 or BF16, found {}",
            entry.name, entry.dtype
        )
    })?;
    Ok(MatrixSource {
        dtype,
        rows: entry.shape[0] as u32,
        cols: entry.shape[1] as u32,
        data: ShardRange {
            shard,
            offset: entry.offset,
            size: entry.len,
        },
    })
}
