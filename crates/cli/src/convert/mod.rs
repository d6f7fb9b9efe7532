//! From a model in any form to an RDRR package, or to a GGUF file ([`gguf`]).
//!
//! The engine's exporter gives tensor after tensor as a checkpoint has them ([`sterna_engine::Exporter`]);
//! [`types`] says what each is stored as and encodes it, [`shards`] lays it out, hashes and writes it,
//! [`manifest`] describes the whole. Everything is written to a folder beside the target, which takes
//! its name at the end; if the conversion is interrupted, the next one goes on with the shards that are
//! there.

mod adapter;
mod companions;
mod gguf;
mod journal;
mod manifest;
mod shards;
mod types;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use anyhow::{Context, Result, anyhow};
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_delivery::sync_folder;
use sterna_engine::{Exported, Exporter, PlanOptions, TernaryRules};
use sterna_format::rdrr::groups::{group_of, model_type_of, role_of};
use sterna_format::rdrr::{MANIFEST_FILE, TENSORS_FILE, Tensor, TensorMap};
use sterna_kernels::Exec;

use sterna::native::LocalModel;

use crate::model;
use crate::output;
use crate::progress::Progress;
use crate::staging::{Staging, partial};
pub(crate) use adapter::convert_adapter;
use companions::Companions;
pub(crate) use gguf::{GgufOptions, convert_gguf};
use journal::Journal;
use shards::ShardWriter;
pub(crate) use types::chunks;
use types::{Encoding, storable};
pub(crate) use types::{Target, Targets};

/// How to convert.
pub(crate) struct Options {
    pub(crate) plan: PlanOptions,
    pub(crate) targets: Targets,
    pub(crate) shard_size: u64,
    pub(crate) algorithm: Algorithm,
    /// What the package is called; made from the names of source and types otherwise.
    pub(crate) model_id: Option<String>,
}

/// What came of it.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Summary {
    pub(crate) package: PathBuf,
    pub(crate) model_id: String,
    pub(crate) n_tensors: usize,
    pub(crate) n_shards: usize,
    pub(crate) total_size: u64,
    /// Shards that an interrupted conversion had left.
    pub(crate) n_resumed: usize,
}

/// Writes the model in `files` to the package `out`, which must not exist.
pub(crate) fn convert(
    files: &LocalModel,
    out: &Path,
    options: &Options,
    exec: Arc<Exec>,
) -> Result<Summary> {
    // Wrong bytes must not get right hashes.
    model::verify(files)?;
    let plan = files.plan(&options.plan)?;
    let config = plan.config().clone();
    let n_bytes = plan.weight_bytes();
    let staging = begin_package(out)?;
    let dir = staging.path.clone();
    let journal = Journal::open(&dir, &key(files, options)?)?;
    let n_resumed = journal.n_finished();
    let algorithm = options.algorithm;
    let mut writer = ShardWriter::new(&dir, options.shard_size, algorithm, journal);
    let mut exporter = Exporter::new(plan, exec.clone());
    let tied = exporter.is_tied();
    options.targets.say_if_tied(tied);
    let rules = files
        .config()?
        .map(|hf| TernaryRules::of(&hf))
        .transpose()?;
    let divides = rules.is_some_and(|rules| rules.scales_divide);
    let mut tensors = TensorMap::default();
    let mut remarks = Vec::new();
    export(files, &mut exporter, n_bytes, |exported| {
        let parts = storable(exported, divides)?;
        // Trits that had to become floats are exact as they are.
        let targets = match parts.len() {
            2.. => &Targets::KEEP,
            _ => &options.targets,
        };
        for exported in parts {
            let encoding = Encoding::of(&exported, targets, tied)?;
            // The language models here are all plain transformers.
            let group = group_of(&exported.name, "transformer");
            let spans = writer.begin(group, encoding.size())?;
            if writer.is_written(&spans) {
                writer.skip(&spans)?;
            } else {
                encoding.write(&exec, |bytes| writer.write(bytes))?;
            }
            remarks.extend(encoding.remark.clone());
            let tensor = Tensor {
                role: Some(role_of(&exported.name)),
                group: Some(group.to_string()),
                dtype: encoding.dtype.into(),
                shape: exported.shape.clone(),
                size: encoding.size(),
                layout: None,
                spans,
                original_shape: None,
                extra: serde_json::Map::new(),
                name: exported.name.clone(),
            };
            tensors
                .push(tensor)
                .map_err(|twice| anyhow!("tensor `{}`: exported twice", twice.name))?;
        }
        Ok(())
    })?;
    say(&remarks);
    for warning in exporter.warnings() {
        output::note(format_args!("warning: {}: {warning}", files.name()));
    }
    let written = writer.finish()?;
    let hf = match files.config_json()? {
        Some(serde_json::Value::Object(config)) => config,
        _ => exporter.config()?,
    };
    let variant = types::variant(&tensors, options.targets.weights, tied);
    let model_id = match &options.model_id {
        Some(id) => id.clone(),
        None => format!("{}-{}", files.stem(), variant.tag()),
    };
    let companions = Companions::of(files)?;
    let facts = manifest::Facts {
        model_id: model_id.clone(),
        model_type: model_type_of(&hf),
        variant,
        config: &config,
        eos: companions.eos.clone(),
        tokenizer: companions.tokenizer.clone(),
        has_chat_template: companions.has_chat_template,
        source: files.stem().to_owned(),
        tied,
        hf,
    };
    let (n_tensors, n_shards) = (tensors.len(), written.shards.len());
    let mut manifest = manifest::manifest(facts, tensors, &written);
    manifest::write(&dir, &mut manifest, companions.files)?;
    finish_package(staging, out)?;
    files.settle()?;
    Ok(Summary {
        package: out.to_owned(),
        model_id,
        n_tensors,
        n_shards,
        total_size: manifest.total_size,
        n_resumed,
    })
}

/// Feeds `exporter` with all that it wants of `files`, which is `n_bytes`, and gives `take` each tensor.
fn export(
    files: &LocalModel,
    exporter: &mut Exporter,
    n_bytes: u64,
    mut take: impl FnMut(Exported) -> Result<()>,
) -> Result<()> {
    let progress = Progress::bytes("converting", n_bytes);
    while let Some(want) = exporter.wanted() {
        let (bytes, len) = (files.bytes_of(want)?, want.len);
        let exported = exporter
            .feed(bytes)
            .with_context(|| files.name().to_owned())?;
        if let Some(exported) = exported {
            take(exported)?;
        }
        progress.add(len);
    }
    Ok(())
}

/// Says the first of what was stored otherwise than asked for, and how many more there are.
fn say(remarks: &[String]) {
    if let Some(first) = remarks.first() {
        let more = match remarks.len() - 1 {
            0 => String::new(),
            n => format!(" (and {n} more like it)"),
        };
        output::note(format_args!("note: {first}{more}"));
    }
}

/// Begins to write the folder of a package, which has a journal.
fn begin_package(out: &Path) -> Result<Staging> {
    let staging = Staging::begin(out);
    if staging.is_err()
        && out.exists()
        && let Some(partial) = partial(out).filter(|partial| !partial.exists())
    {
        // Left if the conversion was interrupted at the very end; nobody needs it any more.
        let _ = Journal::remove(&partial);
    }
    let staging = staging?;
    let what = || staging.path.display().to_string();
    fs::create_dir_all(&staging.path).with_context(what)?;
    Ok(staging)
}

/// Gives a package its name.
fn finish_package(staging: Staging, out: &Path) -> Result<()> {
    let dir = staging.path.clone();
    // Names of files in the package first, then its own.
    sync_folder(&dir).with_context(|| dir.display().to_string())?;
    staging.finish(out)?;
    Journal::remove(&dir)
}

/// What must be the same for a conversion to go on with another's shards.
fn key(files: &LocalModel, options: &Options) -> Result<String> {
    let mut key = format!(
        "sterna {}; {:?}; {:?}; shards of {}; {}",
        env!("CARGO_PKG_VERSION"),
        options.plan,
        options.targets,
        options.shard_size,
        options.algorithm,
    );
    for name in [MANIFEST_FILE, TENSORS_FILE, "config.json"] {
        if let Some(bytes) = files.read_beside(name)? {
            key += &format!("; {name} {}", digest_of(Algorithm::Blake3, &bytes));
        }
    }
    for file in files.sources() {
        key += &format!("; {file} of {} bytes", file.len());
        if let Some(path) = file.path() {
            let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
            let modified = modified.with_context(|| file.to_string())?;
            let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
            key += &format!(" changed {}", since.as_nanos());
        }
    }
    Ok(key)
}
