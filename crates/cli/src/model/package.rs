//! Packages as models: their shards opened, every tensor given a place that the engine can read.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use sterna_delivery::hash::{Digest, Expected};
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_format::TensorCatalog;
use sterna_format::gguf::{self, Gguf, Metadata};
use sterna_format::hf::Config;
use sterna_format::rdrr::{self, HfConfig, MANIFEST_FILE, Manifest, Package, TensorMap};
use sterna_kernels::quant::ternary::I2sLayout;

use super::assemble::{self, Assembled};
use super::source::Folder;
use super::text::GGUF_TOKENIZER_FILE;
use super::{Header, ModelFiles, SourceFile};
use crate::hashes::{algorithm, digest};
use crate::pull::contents::hashed_files;
use crate::pull::{MAX_FILE_BYTES, check_signature};

/// A package and the folder it is in.
#[derive(Debug)]
pub(crate) struct PackageHeader {
    pub(crate) package: Package,
    pub(super) folder: Folder,
    /// Files beside the shards that the manifest gives hashes of: sizes and digests.
    hashed: BTreeMap<String, (u64, Digest)>,
    /// Tokenizer and template of the GGUF file that the package was made from.
    pub(super) gguf_text: Option<Metadata>,
    /// Why the package can't be run, though it can be looked at.
    not_runnable: Option<String>,
}

impl ModelFiles {
    /// Opens the package in `folder`.
    pub(super) fn open_package(name: &str, folder: Folder) -> Result<ModelFiles> {
        // Read once: what was signed is what is parsed.
        let manifest = read_manifest(name, &folder)?;
        check_signed(name, &folder, &manifest)?;
        let package = parse_package(name, &folder, &manifest)?;
        let n_shards = package.manifest().shards.len();
        let files: Vec<SourceFile> = (0..n_shards)
            .map(|index| open_shard(&folder, package.manifest(), index))
            .collect::<Result<_>>()?;
        let mut tensors = TensorCatalog::default();
        let mut assembled: Vec<Assembled> = Vec::new();
        let is_lora = package.manifest().is_lora();
        let mut not_runnable = is_lora.then(|| {
            format!(
                "expected a model, found a LoRA adapter; use it with its base model: --lora {name}"
            )
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
        let mut header = PackageHeader {
            hashed: hashed_files(package.manifest()),
            package,
            folder,
            gguf_text: None,
            not_runnable,
        };
        if let Some(bytes) = header.beside(GGUF_TOKENIZER_FILE)? {
            let what = || header.folder.path_of(GGUF_TOKENIZER_FILE);
            let gguf = Gguf::parse(&bytes, bytes.len() as u64).with_context(what)?;
            let model = gguf::Model::from_parts(vec![gguf]).with_context(what)?;
            header.gguf_text = Some(model.into_parts().0);
        }
        Ok(ModelFiles {
            name: name.to_owned(),
            files,
            assembled,
            tensors,
            header: Header::Package(Box::new(header)),
            told: None,
        })
    }
}

/// Refuses a package whose `manifest` somebody signed whom the user doesn't trust.
fn check_signed(name: &str, folder: &Folder, manifest: &[u8]) -> Result<()> {
    let Some((file, signature)) = small_file(folder, SIGNATURE_FILE)? else {
        return Ok(());
    };
    let signature = std::str::from_utf8(&signature).with_context(|| format!("{file}: no text"))?;
    check_signature(name, manifest, Some(signature)).map(|_| ())
}

impl PackageHeader {
    /// What each shard must be, in order, where that is not known to be so.
    ///
    /// Shards of a model in the store, or on its way there, were checked before they got there.
    pub(super) fn checks(&self) -> Vec<Option<Expected>> {
        if matches!(self.folder, Folder::Stored(_) | Folder::Arriving(_)) {
            return Vec::new();
        }
        let manifest = self.package.manifest();
        let algorithm = algorithm(manifest);
        let expected = |shard: &rdrr::Shard| Expected::Digest(digest(algorithm, &shard.hash));
        manifest.shards.iter().map(|s| Some(expected(s))).collect()
    }

    /// The bytes of the file called `name` beside the shards, as the manifest says they must be. Where it
    /// gives hashes of such files, others are taken not to be there: anybody may have put them.
    pub(super) fn beside(&self, name: &str) -> Result<Option<Bytes>> {
        let expected = self.hashed.get(name);
        if expected.is_none() && !self.hashed.is_empty() {
            return Ok(None);
        }
        let Some((file, bytes)) = small_file(&self.folder, name)? else {
            return match expected {
                Some(_) => bail!("{}: expected a file, found none", self.folder.path_of(name)),
                None => Ok(None),
            };
        };
        if let Some((_, digest)) = expected {
            let verified = Expected::Digest(*digest).verify(&bytes);
            verified.with_context(|| file.to_string())?;
        }
        Ok(Some(bytes))
    }

    /// Waits until a package that is being fetched is in the store.
    pub(super) fn settle(&self) -> Result<()> {
        match &self.folder {
            Folder::Arriving(arrival) => arrival.finish(),
            _ => Ok(()),
        }
    }

    /// How I2_S codes are packed, where the manifest says it.
    pub(super) fn i2s_layout(&self) -> Result<Option<I2sLayout>> {
        let info = self.package.manifest().quantization_info.as_ref();
        match info.and_then(|info| info.i2s_layout.as_deref()) {
            None => Ok(None),
            Some(name) => Ok(Some(name.parse().context("quantizationInfo.i2sLayout")?)),
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
        let config = self.hf_config()?.parsed();
        config.context("the configuration that the manifest amounts to")
    }
}

/// The manifest and the tensor map of the package in `folder`, which the user calls `name`. Whoever signed
/// it is not looked at.
pub(crate) fn read_package(name: &str, folder: &Folder) -> Result<Package> {
    let manifest = read_manifest(name, folder)?;
    parse_package(name, folder, &manifest)
}

fn read_manifest(name: &str, folder: &Folder) -> Result<Bytes> {
    let Some((_, bytes)) = small_file(folder, MANIFEST_FILE)? else {
        bail!("{name}: expected {MANIFEST_FILE} in the folder, found none");
    };
    Ok(bytes)
}

/// The package in `folder` whose manifest is `bytes`.
fn parse_package(name: &str, folder: &Folder, bytes: &[u8]) -> Result<Package> {
    let place = || folder.path_of(MANIFEST_FILE);
    let manifest = Manifest::parse(bytes).with_context(place)?;
    let package = Package::open(manifest, |map| match small_file(folder, map)? {
        Some((file, bytes)) => {
            let tensors = TensorMap::parse(&bytes).with_context(|| file.to_string())?;
            Ok::<_, anyhow::Error>(Some(tensors))
        }
        None => Ok(None),
    });
    package.with_context(|| name.to_owned())
}

/// The file called `name` and its bytes as they are now, unless there is none.
pub(super) fn small_file(folder: &Folder, name: &str) -> Result<Option<(SourceFile, Bytes)>> {
    let Some(file) = folder.file(name)? else {
        return Ok(None);
    };
    if file.len() > MAX_FILE_BYTES {
        bail!(
            "{file}: expected at most {MAX_FILE_BYTES} bytes, found {}",
            file.len()
        );
    }
    // A copy: what is verified and then parsed can't change in between.
    let bytes = Bytes::copy_from_slice(&file.bytes()?);
    Ok(Some((file, bytes)))
}

/// A shard of the size that the manifest gives. What it holds is verified, by [`PackageHeader::checks`],
/// before a model is made of it.
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
