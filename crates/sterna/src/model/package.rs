//! Packages as models: finding their shards, and mapping every tensor to where the engine can read it.

use std::collections::BTreeMap;

use bytes::Bytes;
use serde_json::{Map, Value};
use sterna_delivery::hash::{Algorithm, Expected, Hasher};
use sterna_delivery::package::hashed_files;
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_format::I2sLayout;
use sterna_format::TensorCatalog;
use sterna_format::digest::Digest;
use sterna_format::gguf::{self, Gguf, Metadata};
use sterna_format::hf::{Config, parse_json};
use sterna_format::rdrr::{self, HfConfig, MANIFEST_FILE, Manifest, Package, TensorMap};

use super::assemble::{self, Assembled};
use super::companions::{self, Companions, read_one};
use super::text::GGUF_TOKENIZER_FILE;
use super::{Header, ModelFiles, OpenOptions, WeightFile, label};
use crate::error::{Context, Result, bail};
use crate::want::{Files, Machine};

/// The configuration of a checkpoint, which a package may have beside its manifest.
const CONFIG_FILE: &str = "config.json";

/// Decides whether a signed package is accepted.
pub trait Signatures: Send + Sync {
    /// Checks whether `signature`, in minisign's form, is a trusted one of `manifest`, of the package called
    /// `name`.
    ///
    /// Errors: [`ErrorCode::Untrusted`](crate::ErrorCode::Untrusted) if it isn't.
    fn check(&self, name: &str, manifest: &[u8], signature: &str) -> Result<()>;
}

/// A package, as described by its manifest.
#[derive(Debug)]
pub struct PackageHeader {
    /// The manifest and the tensor map.
    pub package: Package,
    /// The digest of the bytes of both.
    pub(super) digest: Digest,
    /// The prefix of the names of files in messages.
    prefix: String,
    /// Files that are not shards, with digests in the manifest.
    hashed: BTreeMap<String, Digest>,
    /// Tokenizer and template of the GGUF file that the package was made from.
    pub(super) gguf_text: Option<Metadata>,
    /// The members of a `config.json` beside the manifest, if that doesn't describe the model.
    config: Option<Map<String, Value>>,
    /// Why the package can't be run, though it can be inspected.
    not_runnable: Option<String>,
}

/// Opens the package in a folder.
pub(super) async fn open(options: OpenOptions, files: &Files) -> Result<ModelFiles> {
    let name = &options.name;
    // Read once: what was signed is what is parsed.
    let bytes = read_manifest(&options, files).await?;
    check_signed(&bytes, &options, files).await?;
    let (package, digest) = parse(&bytes, &options, files).await?;
    let manifest = package.manifest();
    let mut shards = Vec::new();
    for shard in &manifest.shards {
        let label = options.label(&shard.file_name);
        // A shard's contents are verified, by `PackageHeader::checks`, before a model is made from it.
        match files.len(&shard.file_name).await {
            Some(len) if len == shard.size => shards.push(WeightFile {
                name: shard.file_name.clone(),
                label,
                len,
            }),
            Some(len) => bail!(
                InvalidFile,
                "{label}: expected {} bytes, found {len}",
                shard.size
            ),
            None => bail!(NotFound, "{label}: cannot open: no such file"),
        }
    }
    let mut tensors = TensorCatalog::default();
    let mut assembled: Vec<Assembled> = Vec::new();
    let mut not_runnable = manifest.is_lora().then(|| {
        format!("expected a model, found a LoRA adapter; use it with its base model: --lora {name}")
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
        let (entry, made) = assemble::place(tensor, dtype, shards.len() + assembled.len())
            .with_context(|| name.clone())?;
        assembled.extend(made);
        let added = tensors.insert(entry);
        added.expect("names in a tensor map are unique");
    }
    // Under these names are values as in GGUF, with queries and keys in another order.
    let gguf = |name: &str| name.starts_with("blk.") || name.starts_with("token_embd");
    if let Some(tensor) = package.tensors().iter().find(|t| gguf(&t.name)) {
        not_runnable.get_or_insert(format!(
            "tensor `{}`: expected Hugging Face names and values, found GGUF's; convert the original again",
            tensor.name
        ));
    }
    let companions = read_companions(manifest, &options, files).await;
    let mut header = PackageHeader {
        hashed: (hashed_files(manifest).into_iter())
            .map(|(name, file)| (name.to_owned(), file.hash))
            .collect(),
        package,
        digest,
        prefix: options.prefix.clone(),
        gguf_text: None,
        config: None,
        not_runnable,
    };
    let manifest = header.package.manifest();
    if manifest.config.is_none()
        && manifest.inference.is_none()
        && let Some(bytes) = header.beside(&companions, CONFIG_FILE)?
    {
        let json = parse_json(&bytes).with_context(|| options.label(CONFIG_FILE))?;
        header.config = json.as_object().cloned();
    }
    if let Some(bytes) = header.beside(&companions, GGUF_TOKENIZER_FILE)? {
        let what = || options.label(GGUF_TOKENIZER_FILE);
        let gguf = Gguf::parse(&bytes, bytes.len() as u64).with_context(what)?;
        let model = gguf::Model::from_parts(vec![gguf]).with_context(what)?;
        header.gguf_text = Some(model.into_parts().0);
    }
    Ok(ModelFiles {
        options,
        files: shards,
        assembled,
        tensors,
        companions,
        header: Header::Package(Box::new(header)),
    })
}

/// Reading a package without opening a model from it.
#[derive(Debug)]
pub struct PackageFiles;

impl PackageFiles {
    /// The manifest and the tensor map of the package in a folder. Its signature is not checked.
    pub fn open(options: OpenOptions) -> Machine<'static, Package> {
        Machine::new(move |files| async move {
            let bytes = read_manifest(&options, &files).await?;
            Ok(parse(&bytes, &options, &files).await?.0)
        })
    }
}

async fn read_manifest(options: &OpenOptions, files: &Files) -> Result<Bytes> {
    match read_one(MANIFEST_FILE, options, files).await? {
        // A copy: what is verified and then parsed can't change in between.
        Some(bytes) => Ok(Bytes::copy_from_slice(&bytes)),
        None => bail!(
            NotFound,
            "{}: expected {MANIFEST_FILE} in the folder, found none",
            options.name
        ),
    }
}

/// The small files of the package that `manifest` describes.
async fn read_companions(manifest: &Manifest, options: &OpenOptions, files: &Files) -> Companions {
    let entry = manifest.tokenizer.iter();
    let named = entry.flat_map(|entry| [&entry.file, &entry.sentencepiece_model]);
    let mut names: Vec<&str> = named.flatten().map(String::as_str).collect();
    names.extend(companions::NAMES);
    names.push(GGUF_TOKENIZER_FILE);
    names.sort_unstable();
    names.dedup();
    Companions::read(names, options, files).await
}

/// Refuses a package whose `manifest` has a signature that the user doesn't trust.
async fn check_signed(manifest: &[u8], options: &OpenOptions, files: &Files) -> Result<()> {
    let Some(signature) = read_one(SIGNATURE_FILE, options, files).await? else {
        return Ok(());
    };
    let label = || options.label(SIGNATURE_FILE);
    let signature =
        std::str::from_utf8(&signature).with_context(|| format!("{}: no text", label()))?;
    match &options.signatures {
        Some(signatures) => signatures.check(&options.name, manifest, signature),
        None => bail!(
            Untrusted,
            "{}: expected a signature by a trusted key; no key is trusted",
            label()
        ),
    }
}

/// The package with `bytes` as its manifest, and the digest of these and of its tensor map.
async fn parse(bytes: &[u8], options: &OpenOptions, files: &Files) -> Result<(Package, Digest)> {
    let manifest = Manifest::parse(bytes).with_context(|| options.label(MANIFEST_FILE))?;
    let map = match manifest.tensor_map_file() {
        Some(name) => read_one(name, options, files)
            .await?
            .map(|bytes| (name.to_owned(), bytes)),
        None => None,
    };
    let mut hasher = Hasher::new(Algorithm::Blake3);
    let map_bytes = map.as_ref().map(|(_, bytes)| &bytes[..]);
    for bytes in [bytes, map_bytes.unwrap_or_default()] {
        hasher.update(&(bytes.len() as u64).to_le_bytes());
        hasher.update(bytes);
    }
    let package = Package::open(manifest, |_| match &map {
        Some((name, bytes)) => {
            let tensors = TensorMap::parse(bytes).with_context(|| options.label(name))?;
            Ok::<_, crate::Error>(Some(tensors))
        }
        None => Ok(None),
    });
    let package = package.with_context(|| options.name.clone())?;
    Ok((package, hasher.finish()))
}

impl PackageHeader {
    /// The checks of each shard, in order.
    pub(super) fn checks(&self) -> Vec<Option<Expected>> {
        let manifest = self.package.manifest();
        let expected = |shard: &rdrr::Shard| Expected::Digest(shard.hash);
        manifest.shards.iter().map(|s| Some(expected(s))).collect()
    }

    /// The verified bytes of the file called `name`. If the manifest has hashes of such files, others are
    /// ignored: they may come from anyone.
    pub(super) fn beside(&self, companions: &Companions, name: &str) -> Result<Option<Bytes>> {
        let expected = self.hashed.get(name);
        if expected.is_none() && !self.hashed.is_empty() {
            return Ok(None);
        }
        let label = || label(&self.prefix, name);
        let Some(bytes) = companions.get(name)? else {
            return match expected {
                Some(_) => bail!(NotFound, "{}: expected a file, found none", label()),
                None => Ok(None),
            };
        };
        // A copy: what is verified and then parsed can't change in between.
        let bytes = Bytes::copy_from_slice(&bytes);
        if let Some(digest) = expected {
            let verified = Expected::Digest(*digest).verify(&bytes);
            verified.with_context(label)?;
        }
        Ok(Some(bytes))
    }

    /// How I2_S codes are packed, if the manifest says so.
    pub(super) fn i2s_layout(&self) -> Result<Option<I2sLayout>> {
        let info = self.package.manifest().quantization_info.as_ref();
        match info.and_then(|info| info.i2s_layout.as_deref()) {
            None => Ok(None),
            Some(name) => Ok(Some(name.parse().context("quantizationInfo.i2sLayout")?)),
        }
    }

    /// The Hugging Face configuration of the model.
    ///
    /// Errors: the manifest doesn't say enough about it.
    pub fn hf_config(&self) -> Result<HfConfig> {
        let config = self.package.hf_config(self.config.as_ref());
        let manifest = self.package.manifest();
        if manifest.config.is_none() && self.config.is_none() && !manifest.is_lora() {
            return config.context(
                "the manifest doesn't say enough to run the model, and there is no config.json beside it",
            );
        }
        Ok(config?)
    }

    /// What is odd about the manifest and was accepted.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.package.warnings();
        // Why there is no configuration is the reason why the model can't be run.
        warnings.extend(
            self.hf_config()
                .map_or_else(|_| Vec::new(), |hf| hf.warnings),
        );
        warnings
    }

    /// The same, parsed; fails for packages that can't be run at all.
    pub(super) fn config(&self) -> Result<Config> {
        if let Some(reason) = &self.not_runnable {
            bail!(Unsupported, "{reason}");
        }
        let config = self.hf_config()?.parsed();
        config.context("the configuration that the manifest amounts to")
    }
}
