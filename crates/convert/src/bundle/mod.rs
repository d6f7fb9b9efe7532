//! From a Hugging Face folder to an engine bundle.
//!
//! [`source`] lists a model's tensors and how each is converted, as a quantize manifest; the quantizer
//! carries it out ([`crate::quantize`]); [`support`] adds what a user of the bundle needs besides weights.
//! Everything is written to a temporary folder next to the target, which is renamed at the end.

mod adapter;
mod source;
mod support;

use std::fs;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use sterna::native::{LocalModel, Located};
use sterna::{Context, Error, Result, bail, identity_hash};
use sterna_delivery::sync_folder;
use sterna_engine::plan::PlanOptions;
use sterna_format::bundle::{
    ArchType, BundleKind, BundleMetadata, LORA_FILE, METADATA_FILE, METADATA_VERSION, ROPE_FILE,
    TENSORS_FILE,
};
use sterna_kernels::Exec;

use crate::event::{Event, Notify, Warning};
use crate::quantize::{self, AdapterOutput, QuantizeSettings, QuantizeSummary};
use crate::staging::{Staging, write_file};
use source::Source;

/// Options for a bundle.
#[derive(Debug, Clone, Default)]
pub struct BundleOptions {
    /// PEFT folder of an adapter; the bundle is then the adapter's.
    pub adapter: Option<PathBuf>,
    /// Whether model and adapter go into one folder, as version 1 of the protocol requires.
    pub together: bool,
    /// The architecture, where the configuration leaves a choice.
    pub arch: Option<ArchType>,
    /// Whether the embedding table becomes int8.
    pub embeddings_i8: bool,
    /// Where to keep the quantize manifest, if anywhere.
    pub manifest: Option<PathBuf>,
    /// Its version.
    pub form: ManifestForm,
}

/// The versions of quantize manifests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum ManifestForm {
    /// Version 1, without a table of sections.
    V1,
    /// With a table of sections, as later writers have it.
    #[default]
    Sections,
}

impl ManifestForm {
    /// The names of all, the default first.
    pub const NAMES: [&'static str; 2] = ["sections", "v1"];
}

impl FromStr for ManifestForm {
    type Err = Error;

    /// Reads one of [`ManifestForm::NAMES`].
    fn from_str(name: &str) -> Result<ManifestForm> {
        match name {
            "sections" => Ok(ManifestForm::Sections),
            "v1" => Ok(ManifestForm::V1),
            _ => bail!(
                InvalidRequest,
                "expected {}",
                ManifestForm::NAMES.join(" or ")
            ),
        }
    }
}

/// A summary of a bundle.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct BundleSummary {
    /// The folder.
    pub bundle: PathBuf,
    /// Name of the architecture.
    pub architecture: &'static str,
    /// Tensors of the model in the bundle.
    pub n_tensors: usize,
    /// Projections that the adapter in the bundle updates.
    pub n_adapted: usize,
    /// Bytes of the files that the quantizer wrote.
    pub bytes: u64,
}

/// The quantize manifest, while a bundle is written.
const MANIFEST_FILE: &str = ".quantize_manifest.bin";
/// A mark inside every bundle that was written completely.
const COMPLETE_FILE: &str = ".trillim-quantize-complete";
/// Processors that can run the files, which are independent of the processor.
const PLATFORMS: [&str; 2] = ["x86_64", "aarch64"];

/// Writes the bundle of the model in `files`, or that of an adapter for it, to the folder `out`, which must
/// not exist.
///
/// Errors: a model that isn't a Hugging Face folder or isn't supported by bundles, an adapter for another
/// model, or files that can't be written.
pub fn to_bundle(
    files: &LocalModel,
    out: &Path,
    options: &BundleOptions,
    exec: &Exec,
    notify: &Notify<'_>,
) -> Result<BundleSummary> {
    if out.exists() {
        bail!(InvalidRequest, "{}: exists already", out.display());
    }
    let source = Source::of(files, options.arch, notify)?;
    let staging = Staging::begin(out)?;
    let dir = staging.path.clone();
    clear(&dir)?;
    let written = write(files, &source, options, &dir, exec, notify).and_then(|written| {
        sync_folder(&dir).with_context(|| dir.display().to_string())?;
        Ok(written)
    });
    match written {
        Ok(written) => {
            staging.finish(out)?;
            Ok(BundleSummary {
                bundle: out.to_owned(),
                architecture: source.arch.name(),
                n_tensors: written.n_tensors,
                n_adapted: written.n_lora_pairs,
                bytes: written.size,
            })
        }
        Err(error) => {
            staging.discard();
            Err(error)
        }
    }
}

/// Writes everything that belongs to the bundle into `dir`.
fn write(
    files: &LocalModel,
    source: &Source<'_>,
    options: &BundleOptions,
    dir: &Path,
    exec: &Exec,
    notify: &Notify<'_>,
) -> Result<QuantizeSummary> {
    let with_model = options.adapter.is_none() || options.together;
    let mut settings = QuantizeSettings {
        model: source.facts(),
        head_dim: u32::try_from(source.config().head_dim).ok(),
        output: None,
        rope: None,
        adapter: None,
    };
    let mut manifest = source.empty_manifest(options.form);
    if with_model {
        manifest = source.manifest(options.form, options.embeddings_i8)?;
        settings.output = Some(dir.join(TENSORS_FILE));
        settings.rope = Some((dir.join(ROPE_FILE), source.rope()?));
        support::copy_model(files, dir)?;
    }
    if let Some(folder) = &options.adapter {
        let n_layers = source.config().n_layers;
        manifest.lora = Some(adapter::block(folder, n_layers, &mut manifest.shards)?);
        settings.adapter = Some(AdapterOutput {
            path: dir.join(LORA_FILE),
            rank: None,
            n_heads: u32::try_from(source.config().n_heads).ok(),
            n_kv_heads: u32::try_from(source.config().n_kv_heads).ok(),
        });
        if let Some(base) = adapter::base_model(folder)? {
            warn_of_other_base(folder, &base, &files.names()?, notify);
        }
        // A model's folder is complete: it has its own tokenizer, and is identified by its configuration.
        if !with_model {
            support::copy_adapter(folder, dir)?;
        }
    }
    // The quantizer is given the manifest as it would be read from a file.
    let path = dir.join(MANIFEST_FILE);
    write_file(&path, &manifest.to_bytes(source.arch)?)?;
    let manifest = quantize::read_manifest(&path, source.arch)?;
    let written = quantize::carry_out(&manifest, &settings, exec, notify)?;
    if let Some(kept) = &options.manifest {
        fs::copy(&path, kept).with_context(|| kept.display().to_string())?;
    }
    fs::remove_file(&path).with_context(|| path.display().to_string())?;
    write_file(
        &dir.join(METADATA_FILE),
        &metadata(files, source, options, with_model)?,
    )?;
    write_file(&dir.join(COMPLETE_FILE), b"")?;
    if with_model {
        // The result must be the model that it was made from.
        let made = LocalModel::open(&dir.to_string_lossy(), Located::at(dir)?, None, None)?;
        made.plan(&PlanOptions::default())?;
    }
    Ok(written)
}

/// Warns if the adapter in `folder`, made for the model `base`, is for one that isn't named in `names`.
fn warn_of_other_base(folder: &Path, base: &str, names: &[String], notify: &Notify<'_>) {
    if !sterna::may_be_called(base, names) {
        let warning = sterna::Warning::OtherBase {
            adapter: folder.display().to_string(),
            base: base.to_owned(),
            names: names.to_vec(),
        };
        notify(Event::Warning(Warning::Model(warning)));
    }
}

/// Creates an empty folder `dir`, or empties what an interrupted run left there.
fn clear(dir: &Path) -> Result<()> {
    let what = || dir.display().to_string();
    if !dir.exists() {
        return fs::create_dir(dir).with_context(what);
    }
    let entries: Vec<_> = fs::read_dir(dir)
        .and_then(|entries| entries.collect::<Result<_, _>>())
        .with_context(what)?;
    if let Some(other) = entries.iter().find(|entry| !is_ours(entry)) {
        bail!(
            InvalidRequest,
            "{}: expected what an interrupted run left, found another file",
            other.path().display()
        );
    }
    for path in entries.iter().map(fs::DirEntry::path) {
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

/// Whether a file is written by this module.
fn is_ours(entry: &fs::DirEntry) -> bool {
    let name = entry.file_name();
    let name = name.to_string_lossy();
    let own = [
        TENSORS_FILE,
        ROPE_FILE,
        LORA_FILE,
        METADATA_FILE,
        MANIFEST_FILE,
        COMPLETE_FILE,
    ];
    own.contains(&&*name) || support::is_taken(&name) || name.ends_with(".tmp")
}

fn metadata(
    files: &LocalModel,
    source: &Source<'_>,
    options: &BundleOptions,
    with_model: bool,
) -> Result<Vec<u8>> {
    let config = files.config_json()?.unwrap_or_default();
    let source_model = match (&options.adapter, with_model) {
        (Some(folder), false) => adapter::base_model(folder)?.unwrap_or_default(),
        _ => {
            let name = config.get("_name_or_path").and_then(|name| name.as_str());
            name.unwrap_or_default().to_owned()
        }
    };
    let metadata = BundleMetadata {
        writer_version: concat!("sterna ", env!("CARGO_PKG_VERSION")).to_owned(),
        format_version: METADATA_VERSION,
        kind: match with_model {
            true => BundleKind::Model,
            false => BundleKind::LoraAdapter,
        },
        quantization: source.quantization().to_owned(),
        source_model,
        architecture: source.arch.name().to_owned(),
        platforms: PLATFORMS.map(str::to_owned).to_vec(),
        base_model_config_hash: identity_hash(&config)?,
        remote_code: false,
    };
    let mut json = serde_json::to_vec_pretty(&metadata)?;
    json.push(b'\n');
    Ok(json)
}

/// The path of a file as manifests have it: from the root on, in Unicode.
fn shard_path(path: &Path) -> Result<String> {
    let what = || path.display().to_string();
    let path = path.canonicalize().with_context(what)?;
    let text = path.to_str().map(str::to_owned);
    text.with_context(|| format!("{}: expected a path in Unicode", path.display()))
}
