//! From a model in any form to an RDRR package.
//!
//! The exporter returns tensors one by one as a checkpoint has them ([`sterna_engine::export::Exporter`]);
//! [`crate::types`] decides what each is stored as and encodes it, [`shards`] lays it out, hashes and writes
//! it, [`manifest`] describes the whole. Everything is written to a temporary folder next to the target,
//! which is renamed at the end; if the conversion is interrupted, the next one resumes with the existing
//! shards.

mod adapter;
mod companions;
mod journal;
mod manifest;
mod shards;
mod stated;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use sterna::native::LocalModel;
use sterna::{Context, Error, ErrorCode, Header, Result, bail};
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_delivery::{remove_temporaries, sync_folder};
use sterna_engine::export::{Exported, Exporter};
use sterna_engine::plan::{PlanOptions, TernaryRules};
use sterna_format::rdrr::groups::{group_of, model_type_of, role_of};
use sterna_format::rdrr::{MANIFEST_FILE, TENSOR_ALIGNMENT, TENSORS_FILE, Tensor, TensorMap};
use sterna_kernels::Exec;

pub use adapter::{AdapterPackageOptions, adapter_to_package};
use companions::Companions;
use journal::Journal;
use shards::ShardWriter;
pub use stated::{GroupVersion, GroupVersions, ManifestDetail, Precisions, Statements};

use crate::event::{self, Event, Notify, Step, Warning};
use crate::staging::{Staging, partial};
use crate::types::{self, Encoding, Targets, storable};

/// Options for a package.
#[derive(Debug, Clone)]
pub struct PackageOptions {
    /// How the source is read.
    pub plan: PlanOptions,
    /// Types of the tensors.
    pub targets: Targets,
    /// Maximum bytes of a shard, a multiple of 4096.
    pub shard_size: u64,
    /// Hash algorithm of shards and groups.
    pub algorithm: Algorithm,
    /// Name of the package; by default made from the names of source and types.
    pub model_id: Option<String>,
    /// What the manifest says besides.
    pub statements: Statements,
    /// How much the manifest has besides what is needed.
    pub detail: ManifestDetail,
    /// Threads that verify the source, if it is a package.
    pub n_verify_threads: usize,
}

impl Default for PackageOptions {
    /// Unchanged types, in shards of 64 MiB, hashed with SHA-256.
    fn default() -> PackageOptions {
        PackageOptions {
            plan: PlanOptions::default(),
            targets: Targets::KEEP,
            shard_size: DEFAULT_SHARD_SIZE,
            algorithm: Algorithm::Sha256,
            model_id: None,
            statements: Statements::default(),
            detail: ManifestDetail::Full,
            n_verify_threads: 1,
        }
    }
}

const DEFAULT_SHARD_SIZE: u64 = 64 << 20;

/// The language models that can be converted are all plain transformers.
const MODEL_TYPE: &str = "transformer";

/// A summary of a conversion to a package.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PackageSummary {
    /// The folder.
    pub package: PathBuf,
    /// Its name.
    pub model_id: String,
    /// Tensors in it.
    pub n_tensors: usize,
    /// Shards of it.
    pub n_shards: usize,
    /// Bytes of all shards.
    pub total_size: u64,
    /// Shards reused from an interrupted conversion.
    pub n_resumed: usize,
}

/// Refuses an invalid shard size.
fn check_shard_size(size: u64) -> Result<()> {
    if size == 0 || !size.is_multiple_of(TENSOR_ALIGNMENT) {
        bail!(
            InvalidRequest,
            "expected shards of a multiple of {TENSOR_ALIGNMENT} bytes, found {size}"
        );
    }
    Ok(())
}

/// Writes the model in `files` to the package `out`, which must not exist.
///
/// The same model and options give the same bytes, on any number of threads. An interrupted conversion
/// resumes when it is started again.
/// Errors: a model that can't be read or run here, a package whose hashes don't match, or a package that
/// can't be written.
pub fn to_package(
    files: &LocalModel,
    out: &Path,
    options: &PackageOptions,
    exec: Arc<Exec>,
    notify: &Notify<'_>,
) -> Result<PackageSummary> {
    check_shard_size(options.shard_size)?;
    // Wrong bytes must not get right hashes.
    event::verify(files, options.n_verify_threads, notify)?;
    event::warn_of(files.warnings(), notify);
    let plan = files.plan(&options.plan)?;
    let config = plan.config().clone();
    let n_bytes = plan.weight_bytes();
    let mut exporter = Exporter::new(plan, exec.clone());
    let names = exporter.tensors();
    let ids: BTreeSet<_> = names
        .iter()
        .map(|(name, _)| group_of(name, MODEL_TYPE))
        .collect();
    let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
    options
        .statements
        .versions
        .check(ids.iter().map(String::as_str))?;
    let staging = begin_package(out)?;
    let dir = staging.path.clone();
    let journal = Journal::open(&dir, &key(files, options)?)?;
    let n_resumed = journal.n_finished();
    let algorithm = options.algorithm;
    let mut writer = ShardWriter::new(&dir, options.shard_size, algorithm, journal);
    let tied = exporter.is_tied();
    options.targets.warn_if_tied(tied, notify);
    let rules = files
        .config()?
        .map(|hf| TernaryRules::of(&hf))
        .transpose()?;
    let divides = rules.is_some_and(|rules| rules.scales_divide);
    let mut tensors = TensorMap::default();
    let mut remarks = Vec::new();
    export(files, &mut exporter, n_bytes, notify, |exported| {
        let parts = storable(exported, divides)?;
        // Trits that had to become floats are exact.
        let targets = match parts.len() {
            2.. => &Targets::KEEP,
            _ => &options.targets,
        };
        for exported in parts {
            let encoding = Encoding::of(&exported, targets, tied)?;
            let group = group_of(&exported.name, MODEL_TYPE);
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
            tensors.push(tensor).map_err(|twice| {
                let message = format!("tensor `{}`: exported twice", twice.name);
                Error::new(ErrorCode::InvalidFile, message)
            })?;
        }
        Ok(())
    })?;
    warn_of_types(remarks, notify);
    warn_of_inexact(files, exporter.warnings(), notify);
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
    let companions = Companions::of(files, notify)?;
    if companions.eos.is_empty() {
        let model = files.name().to_owned();
        notify(Event::Warning(Warning::NoEnd { model }));
    }
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
    let source = match files.header() {
        Header::Package(header) => Some(header.package.manifest()),
        _ => None,
    };
    stated::state(&mut manifest, &options.statements, source);
    manifest::write(&dir, &mut manifest, companions.files, options.detail)?;
    finish_package(staging, out)?;
    files.settle()?;
    Ok(PackageSummary {
        package: out.to_owned(),
        model_id,
        n_tensors,
        n_shards,
        total_size: manifest.total_size,
        n_resumed,
    })
}

/// Feeds `exporter` with everything it needs from `files`, which is `n_bytes`, and passes each tensor to
/// `take`.
pub(crate) fn export(
    files: &LocalModel,
    exporter: &mut Exporter,
    n_bytes: u64,
    notify: &Notify<'_>,
    mut take: impl FnMut(Exported) -> Result<()>,
) -> Result<()> {
    notify(Event::Started {
        step: Step::Converting,
        n_bytes,
    });
    while let Some(want) = exporter.wanted() {
        let (bytes, len) = (files.bytes_of(want)?, want.len);
        let exported = exporter
            .feed(bytes)
            .with_context(|| files.name().to_owned())?;
        if let Some(exported) = exported {
            take(exported)?;
        }
        notify(Event::Advanced { n_bytes: len });
    }
    Ok(())
}

/// Reports the first tensor stored as another type than requested, and how many more there are.
pub(crate) fn warn_of_types(reasons: Vec<String>, notify: &Notify<'_>) {
    let mut reasons = reasons.into_iter();
    if let Some(reason) = reasons.next() {
        let n_more = reasons.len();
        notify(Event::Warning(Warning::OtherType { reason, n_more }));
    }
}

/// Reports what could not be converted exactly.
pub(crate) fn warn_of_inexact<'a>(
    files: &LocalModel,
    what: impl IntoIterator<Item = &'a String>,
    notify: &Notify<'_>,
) {
    for what in what {
        notify(Event::Warning(Warning::Inexact {
            model: files.name().to_owned(),
            what: what.clone(),
        }));
    }
}

/// Begins to write the folder of a package, which has a journal.
fn begin_package(out: &Path) -> Result<Staging> {
    let staging = Staging::begin(out);
    if staging.is_err()
        && out.exists()
        && let Some(partial) = partial(out).filter(|partial| !partial.exists())
    {
        // Left if the conversion was interrupted at the very end; no longer needed.
        let _ = Journal::remove(&partial);
    }
    let staging = staging?;
    let what = || staging.path.display().to_string();
    fs::create_dir_all(&staging.path).with_context(what)?;
    // Of a conversion that was killed while it wrote the manifest, say.
    remove_temporaries(&staging.path).with_context(what)?;
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

/// What must be the same for a conversion to resume with another's shards.
fn key(files: &LocalModel, options: &PackageOptions) -> Result<String> {
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
