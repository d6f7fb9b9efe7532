//! From a PEFT low-rank adapter to a package.

use std::path::Path;

use bytes::Bytes;
use serde_json::Map;
use sterna::native::stem;
use sterna::{AdapterFiles, Context, Error, ErrorCode, Result, bail};
use sterna_delivery::hash::Algorithm;
use sterna_engine::lora::{AdapterSource, LoraMatrix, Orientation};
use sterna_format::DType;
use sterna_format::rdrr::groups::group_of;
use sterna_format::rdrr::lora::{LoraFactor, LoraName};
use sterna_format::rdrr::{LoraConfig, Manifest, Role, Tensor, TensorMap};
use sterna_kernels::quant::decode_row;

use super::folder::{Folder, PackageSummary, begin_package, finish_package};
use super::journal::Journal;
use super::shards::ShardWriter;
use super::{DEFAULT_SHARD_SIZE, ManifestDetail, Statements, check_shard_size, manifest, stated};

/// The kind of model in manifests of adapters.
const MODEL_TYPE: &str = "lora";

/// Options for a package of an adapter.
#[derive(Debug, Clone)]
pub struct AdapterPackageOptions {
    /// Maximum bytes of a shard, a multiple of 4096.
    pub shard_size: u64,
    /// Hash algorithm of shards and groups.
    pub algorithm: Algorithm,
    /// Name of the package; by default that of the adapter's folder.
    pub model_id: Option<String>,
    /// What the manifest says besides.
    pub statements: Statements,
    /// How much the manifest has besides what is needed.
    pub detail: ManifestDetail,
}

impl Default for AdapterPackageOptions {
    /// Shards of 64 MiB, hashed with SHA-256.
    fn default() -> AdapterPackageOptions {
        AdapterPackageOptions {
            shard_size: DEFAULT_SHARD_SIZE,
            algorithm: Algorithm::Sha256,
            model_id: None,
            statements: Statements::default(),
            detail: ManifestDetail::Full,
        }
    }
}

/// Writes `adapter`, whose folder is called `name`, to the package `out`, which must not exist.
///
/// The package has one rank and one scaling for all modules: smaller ranks are padded with zeros, and other
/// scalings are multiplied into the second matrix.
/// Errors: an adapter without matrices, or a package that can't be written.
pub fn adapter_to_package(
    adapter: &AdapterFiles,
    name: &str,
    out: &Path,
    options: &AdapterPackageOptions,
) -> Result<PackageSummary> {
    check_shard_size(options.shard_size)?;
    let AdapterFiles { source, base, .. } = adapter;
    let staging = begin_package(out)?;
    let dir = &staging.path;
    // Small: always started over.
    let journal = Journal::fresh(dir)?;
    let folder = Folder::new(dir, journal);
    let mut writer = ShardWriter::new(folder, options.shard_size, options.algorithm, true);
    let ranks = source.pairs.iter().map(|pair| rank(source, &pair.a));
    let rank = ranks.collect::<Result<Vec<_>>>()?.into_iter().max();
    let (Some(rank), Some(first)) = (rank, source.pairs.first()) else {
        bail!(
            InvalidFile,
            "{}: expected an adapter, found one without matrices",
            source.name
        );
    };
    let scaling = first.scaling;
    let mut tensors = TensorMap::default();
    let mut modules = Vec::new();
    for pair in &source.pairs {
        let module = pair.module.name();
        if !modules.contains(&module) {
            modules.push(module);
        }
        let a = input_first(source, &pair.a, rank)?;
        let b = rank_first(source, &pair.b, rank, pair.scaling / scaling)?;
        for (matrix, values) in [(LoraFactor::A, a), (LoraFactor::B, b)] {
            let name = LoraName {
                layer: pair.layer as u32,
                module: module.to_owned(),
                matrix,
            };
            let width = values.len() / rank;
            let bytes: Bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let name = name.to_tensor_name();
            let group = group_of(&name, MODEL_TYPE);
            let spans = writer.begin(group, bytes.len() as u64)?;
            let tensor = Tensor {
                name,
                group: Some(group.to_string()),
                dtype: DType::F32.into(),
                shape: match matrix {
                    LoraFactor::A => vec![width, rank],
                    LoraFactor::B => vec![rank, width],
                },
                size: bytes.len() as u64,
                layout: None,
                spans,
                role: Some(Role::Other),
                original_shape: None,
                extra: Map::new(),
            };
            writer.write(bytes)?;
            tensors.push(tensor).map_err(|twice| {
                let message = format!("tensor `{}`: twice in the adapter", twice.name);
                Error::new(ErrorCode::InvalidFile, message)
            })?;
        }
    }
    let (written, mut folder) = writer.finish()?;
    let name = stem(name);
    let n_tensors = tensors.len();
    let mut manifest = Manifest {
        model_id: options.model_id.clone().unwrap_or_else(|| name.clone()),
        quantization: "F32".to_owned(),
        adapter_type: Some("lora".to_owned()),
        base_model: base.clone(),
        lora_config: Some(LoraConfig {
            rank: rank as u64,
            alpha: f64::from(scaling) * rank as f64,
            rank_stabilized: false,
            target_modules: modules.into_iter().map(str::to_owned).collect(),
            extra: Map::new(),
        }),
        ..manifest::of_weights(MODEL_TYPE, &name, tensors, &written)
    };
    let ids = manifest.groups.iter().map(|group| group.id.as_str());
    options.statements.versions.check(ids)?;
    stated::state(&mut manifest, &options.statements, None);
    manifest::write(&mut folder, &mut manifest, Vec::new(), options.detail)?;
    finish_package(staging, out)?;
    Ok(PackageSummary {
        package: out.to_owned(),
        model_id: manifest.model_id,
        n_tensors,
        n_shards: written.shards.len(),
        total_size: manifest.total_size,
        n_resumed: 0,
    })
}

/// The values of a matrix with its rows in stored order.
fn values(matrix: &LoraMatrix) -> Result<(usize, usize, Vec<f32>)> {
    let name = || format!("tensor `{}`", matrix.name);
    let [rows, columns] = matrix.shape[..] else {
        bail!(
            InvalidFile,
            "{}: expected a matrix, found shape {:?}",
            name(),
            matrix.shape
        );
    };
    let mut values = vec![0.0; rows * columns];
    decode_row(matrix.dtype, &matrix.bytes, &mut values).with_context(name)?;
    Ok((rows, columns, values))
}

/// The rank of the first matrix of a pair.
fn rank(source: &AdapterSource, a: &LoraMatrix) -> Result<usize> {
    let at = usize::from(source.orientation == Orientation::RankLast);
    let rank = a.shape.get(at).copied();
    rank.with_context(|| format!("tensor `{}`: expected a matrix", a.name))
}

/// `[in, rank]` of a first matrix.
fn input_first(source: &AdapterSource, a: &LoraMatrix, rank: usize) -> Result<Vec<f32>> {
    let (rows, columns, values) = values(a)?;
    if rows == 0 || columns == 0 {
        bail!(
            InvalidFile,
            "tensor `{}`: expected values, found none",
            a.name
        );
    }
    Ok(match source.orientation {
        Orientation::RankFirst => filled(&transposed(rows, columns, &values), columns, rows, rank),
        Orientation::RankLast => filled(&values, rows, columns, rank),
    })
}

/// `[rank, out]` of a second matrix.
fn rank_first(source: &AdapterSource, b: &LoraMatrix, rank: usize, by: f32) -> Result<Vec<f32>> {
    let (rows, columns, values) = values(b)?;
    let (n_ranks, width, mut values) = match source.orientation {
        Orientation::RankFirst => (columns, rows, transposed(rows, columns, &values)),
        Orientation::RankLast => (rows, columns, values),
    };
    if n_ranks > rank || width == 0 || rank == 0 {
        bail!(
            InvalidFile,
            "tensor `{}`: expected rank 1 to {rank} and some outputs, found shape {:?}",
            b.name,
            b.shape
        );
    }
    values.iter_mut().for_each(|v| *v *= by);
    values.resize(rank * width, 0.0);
    Ok(values)
}

/// A matrix padded to `rank` columns with zeros.
fn filled(values: &[f32], rows: usize, columns: usize, rank: usize) -> Vec<f32> {
    let mut out = vec![0.0; rows * rank];
    for (out, row) in out.chunks_exact_mut(rank).zip(values.chunks_exact(columns)) {
        out[..columns].copy_from_slice(row);
    }
    out
}

fn transposed(rows: usize, columns: usize, values: &[f32]) -> Vec<f32> {
    (0..columns)
        .flat_map(|column| (0..rows).map(move |row| values[row * columns + column]))
        .collect()
}
