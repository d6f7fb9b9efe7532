//! Packages as models: their shards opened, every tensor given a place that the engine can read.

use anyhow::{Context, Result, bail};
use sterna_format::TensorCatalog;
use sterna_format::hf::Config;
use sterna_format::rdrr::{
    self, HfConfig, MANIFEST_FILE, Manifest, Package, TENSORS_FILE, TensorMap,
};
use sterna_kernels::quant::ternary::I2sLayout;

use super::assemble::{self, Assembled};
use super::source::Folder;
use super::{Header, MAX_FILE_BYTES, ModelFiles, SourceFile};

/// A package and the folder it is in.
#[derive(Debug)]
pub(crate) struct PackageHeader {
    pub(crate) package: Package,
    pub(super) folder: Folder,
    /// Why the package can't be run, though it can be looked at.
    not_runnable: Option<String>,
}

impl ModelFiles {
    /// Opens the package in `folder`.
    pub(super) fn open_package(name: &str, folder: Folder) -> Result<ModelFiles> {
        let package = read_package(name, &folder)?;
        let n_shards = package.manifest().shards.len();
        let files: Vec<SourceFile> = (0..n_shards)
            .map(|index| open_shard(&folder, package.manifest(), index))
            .collect::<Result<_>>()?;
        let mut tensors = TensorCatalog::default();
        let mut assembled: Vec<Assembled> = Vec::new();
        let is_lora = package.manifest().is_lora();
        let mut not_runnable = is_lora.then(|| {
            "expected a model, found a LoRA adapter, which runs with its base model".to_owned()
        });
        for tensor in package.tensors().iter() {
            let Some(dtype) = tensor.dtype.known() else {
                let reason = format!(
                    "tensor `{}`: type {} isn't supported",
                    tensor.name, tensor.dtype
                );
                not_runnable.get_or_insert(reason);
                continue;
            };
            let (entry, made) = assemble::place(tensor, dtype, n_shards + assembled.len())
                .with_context(|| name.to_owned())?;
            assembled.extend(made);
            let added = tensors.insert(entry);
            added.expect("names in a tensor map are unique");
        }
        // Under these names lie values as GGUF has them, queries and keys in another order.
        let gguf = |name: &str| name.starts_with("blk.") || name.starts_with("token_embd");
        if let Some(tensor) = package.tensors().iter().find(|t| gguf(&t.name)) {
            not_runnable.get_or_insert(format!(
                "tensor `{}`: expected Hugging Face names and values, found GGUF's; convert the original again",
                tensor.name
            ));
        }
        let header = PackageHeader {
            package,
            folder,
            not_runnable,
        };
        Ok(ModelFiles {
            name: name.to_owned(),
            files,
            assembled,
            tensors,
            header: Header::Package(Box::new(header)),
        })
    }
}

impl PackageHeader {
    /// How I2_S codes are packed, where the manifest says it.
    pub(super) fn i2s_layout(&self) -> Result<Option<I2sLayout>> {
        let info = self.package.manifest().quantization_info.as_ref();
        match info.and_then(|info| info.i2s_layout.as_deref()) {
            None => Ok(None),
            Some("block128") => Ok(Some(I2sLayout::Block128)),
            Some("block64") => Ok(Some(I2sLayout::Block64)),
            Some("rows4") => Ok(Some(I2sLayout::Rows4)),
            Some(other) => bail!(
                "quantizationInfo.i2sLayout: expected block128, block64 or rows4, found `{other}`"
            ),
        }
    }

    /// The Hugging Face configuration of the model.
    pub(super) fn hf_config(&self) -> Result<HfConfig> {
        Ok(rdrr::hf_config(self.package.manifest())?)
    }

    /// The same, read; fails for packages that can't be run at all.
    pub(super) fn config(&self) -> Result<Config> {
        if let Some(reason) = &self.not_runnable {
            bail!("{reason}");
        }
        let json = serde_json::to_vec(&self.hf_config()?.config)?;
        Config::parse(&json).context("the configuration that the manifest amounts to")
    }
}

/// The manifest and the tensor map of the package in `folder`, which the user calls `name`.
pub(crate) fn read_package(name: &str, folder: &Folder) -> Result<Package> {
    let Some((file, bytes)) = small_file(folder, MANIFEST_FILE)? else {
        bail!("{name}: expected {MANIFEST_FILE} in the folder, found none");
    };
    let manifest = Manifest::parse(&bytes).with_context(|| file.to_string())?;
    let tensors = match &manifest.tensors_file {
        Some(tensors_file) => match small_file(folder, tensors_file)? {
            Some((file, bytes)) => {
                Some(TensorMap::parse(&bytes).with_context(|| file.to_string())?)
            }
            // Stored copies may have lost it; what is inline says the same.
            None if manifest.tensors.is_some() => None,
            None => bail!("{name}: expected {tensors_file}, which the manifest names, found none"),
        },
        None if manifest.tensors.is_none() => match small_file(folder, TENSORS_FILE)? {
            Some((file, bytes)) => {
                Some(TensorMap::parse(&bytes).with_context(|| file.to_string())?)
            }
            None => None,
        },
        None => None,
    };
    Package::new(manifest, tensors).with_context(|| name.to_owned())
}

/// The file called `name` and its bytes, unless there is none.
fn small_file(folder: &Folder, name: &str) -> Result<Option<(SourceFile, bytes::Bytes)>> {
    let Some(file) = folder.file(name)? else {
        return Ok(None);
    };
    if file.len() > MAX_FILE_BYTES {
        bail!(
            "{file}: expected at most {MAX_FILE_BYTES} bytes, found {}",
            file.len()
        );
    }
    let bytes = file.bytes();
    Ok(Some((file, bytes)))
}

/// The one door through which bytes of shards come in: whatever is to be verified before a package
/// is used is verified here.
fn open_shard(folder: &Folder, manifest: &Manifest, index: usize) -> Result<SourceFile> {
    let shard = &manifest.shards[index];
    let file = folder.shard(&shard.file_name)?;
    if file.len() != shard.size {
        bail!(
            "{file}: expected {} bytes, found {}",
            shard.size,
            file.len()
        );
    }
    Ok(file)
}
