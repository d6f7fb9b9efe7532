//! From a Hugging Face folder to an engine bundle.
//!
//! [`source`] says which tensors a model has and what is to become of each, as a quantize manifest; the
//! quantizer carries it out ([`crate::quantize`]); [`support`] puts beside it what a user of the bundle
//! needs besides weights. Everything is written to a folder beside the target, which takes its name at
//! the end.

mod adapter;
mod source;
mod support;

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sterna_format::bundle::{
    ArchType, BundleKind, BundleMetadata, LORA_FILE, METADATA_FILE, METADATA_VERSION, ROPE_FILE,
    TENSORS_FILE,
};
use sterna_kernels::Exec;

use crate::model::{ModelFiles, identity_hash};
use crate::quantize::{self, AdapterOutput, Settings};
use source::Source;

/// What to make.
pub(crate) struct Options {
    /// The folder to write, which must not exist.
    pub(crate) out: PathBuf,
    /// Folder of an adapter as PEFT saves it.
    pub(crate) adapter: Option<PathBuf>,
    /// Whether model and adapter go into one folder, as version 1 of the protocol wants them.
    pub(crate) together: bool,
    /// The architecture, where the configuration leaves a choice.
    pub(crate) arch: Option<ArchType>,
    /// Whether the embedding table becomes int8.
    pub(crate) embeddings_i8: bool,
}

/// What came of it.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Summary {
    pub(crate) bundle: PathBuf,
    /// Name of the architecture.
    pub(crate) architecture: &'static str,
    /// Tensors of the model in the bundle.
    pub(crate) n_tensors: usize,
    /// Projections that the adapter in the bundle changes.
    pub(crate) n_adapted: usize,
    /// Bytes of the files that the quantizer wrote.
    pub(crate) bytes: u64,
}

/// What every bundle that was written to its end has inside.
const COMPLETE_FILE: &str = ".trillim-quantize-complete";
/// Processors that can run what is written; the files hold nothing that depends on one.
const PLATFORMS: [&str; 2] = ["x86_64", "aarch64"];

/// Writes the bundle of the model in `files`, or that of an adapter for it.
pub(crate) fn bundle(files: &ModelFiles, options: &Options, exec: &Exec) -> Result<Summary> {
    let out = &options.out;
    if out.exists() {
        bail!("{}: exists already", out.display());
    }
    let source = Source::of(files, options.arch)?;
    let staging = staging(out)?;
    let dir = staging.path();
    let with_model = options.adapter.is_none() || options.together;
    let mut summary = Summary {
        bundle: out.clone(),
        architecture: source.arch.name(),
        n_tensors: 0,
        n_adapted: 0,
        bytes: 0,
    };
    let mut settings = Settings {
        model: source.facts(),
        head_dim: u32::try_from(source.config().head_dim).ok(),
        output: None,
        rope: None,
        adapter: None,
    };
    let mut manifest = source.empty_manifest();
    if with_model {
        manifest = source.manifest(options.embeddings_i8)?;
        settings.output = Some(dir.join(TENSORS_FILE));
        settings.rope = Some((dir.join(ROPE_FILE), source.rope()?));
        summary.n_tensors = manifest.tensors.len();
        support::copy_model(files, dir)?;
    }
    if let Some(folder) = &options.adapter {
        let lora = adapter::block(folder, source.config().n_layers, &mut manifest.shards)?;
        summary.n_adapted = lora.pairs.len();
        manifest.lora = Some(lora);
        settings.adapter = Some(AdapterOutput {
            path: dir.join(LORA_FILE),
            rank: None,
            n_heads: u32::try_from(source.config().n_heads).ok(),
            n_kv_heads: u32::try_from(source.config().n_kv_heads).ok(),
        });
        support::copy_adapter(folder, dir, with_model)?;
    }
    summary.bytes = quantize::run(&manifest, &settings, exec)?.size;
    let metadata = metadata(files, &source, options, with_model)?;
    support::write(&dir.join(METADATA_FILE), &metadata)?;
    support::write(&dir.join(COMPLETE_FILE), b"ready\n")?;
    publish(staging, out)?;
    Ok(summary)
}

fn metadata(
    files: &ModelFiles,
    source: &Source<'_>,
    options: &Options,
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

/// A new folder beside `out`; it goes with the value unless it is published.
fn staging(out: &Path) -> Result<tempfile::TempDir> {
    let name = out
        .file_name()
        .with_context(|| format!("{}: expected the name of a folder", out.display()))?;
    let parent = parent(out);
    fs::create_dir_all(parent).with_context(|| parent.display().to_string())?;
    let prefix = format!(".{}-", name.to_string_lossy());
    tempfile::Builder::new()
        .prefix(&prefix)
        .suffix(".partial")
        .tempdir_in(parent)
        .with_context(|| format!("{}: cannot write", parent.display()))
}

fn parent(out: &Path) -> &Path {
    match out.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Gives a finished folder its name.
fn publish(staging: tempfile::TempDir, out: &Path) -> Result<()> {
    let what = || format!("cannot rename to {}", out.display());
    // What was renamed is no longer there to be removed.
    fs::rename(staging.path(), out).with_context(what)?;
    let _ = staging.keep();
    // A folder's entries are kept by the folder above it.
    if cfg!(unix) {
        let parent = parent(out);
        let sync = File::open(parent).and_then(|folder| folder.sync_all());
        sync.with_context(|| parent.display().to_string())?;
    }
    Ok(())
}
