//! From a model in any form to an RDRR package.
//!
//! The exporter returns tensors one by one as a checkpoint has them ([`sterna_engine::export::Exporter`]);
//! [`crate::types`] decides what each is stored as and encodes it, [`shards`] lays it out and hashes it,
//! [`manifest`] describes the whole. [`Packing`] does all that without files: it asks for the model's bytes, and
//! gives the package's to a [`PackageSink`]. In [`folder`] that is a temporary folder next to the target, which is
//! renamed at the end; if the conversion is interrupted, the next one resumes with the existing shards.

#[cfg(not(target_family = "wasm"))]
mod adapter;
mod companions;
#[cfg(not(target_family = "wasm"))]
mod folder;
#[cfg(not(target_family = "wasm"))]
mod journal;
mod manifest;
mod shards;
mod sink;
mod stated;

use std::collections::BTreeSet;
use std::sync::Arc;

use bytes::Bytes;
use sterna::{Context, Error, ErrorCode, Header, ModelFiles, Result, bail};
use sterna_delivery::hash::Algorithm;
use sterna_engine::ModelConfig;
use sterna_engine::export::{Exported, Exporter};
use sterna_engine::plan::{PlanOptions, TensorRequest, TernaryRules};
use sterna_format::rdrr::groups::{group_of, model_type_of, role_of};
use sterna_format::rdrr::{TENSOR_ALIGNMENT, Tensor, TensorMap};
use sterna_kernels::Exec;

#[cfg(not(target_family = "wasm"))]
pub use adapter::{AdapterPackageOptions, adapter_to_package};
use companions::Companions;
#[cfg(not(target_family = "wasm"))]
pub use folder::{PackageSummary, to_package};
use shards::ShardWriter;
pub use sink::PackageSink;
pub use stated::{GroupVersion, GroupVersions, ManifestDetail, Precisions, Statements};

use crate::event::{Event, Notify, Step, Warning, pooling, warn_of};
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
    /// Whether hashing has threads of its own.
    pub hash_on_threads: bool,
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
            hash_on_threads: !cfg!(target_family = "wasm"),
        }
    }
}

const DEFAULT_SHARD_SIZE: u64 = 64 << 20;

/// The type of models that nothing else is known of.
const TRANSFORMER: &str = "transformer";

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

/// A conversion to a package, without files: feed it what it [wants](Packing::wanted), then
/// [finish](Packing::finish). What is written goes to its sink.
///
/// The same model and options give the same bytes, on any number of threads. One tensor at a time is in memory.
pub struct Packing<'a, S> {
    files: &'a ModelFiles,
    options: &'a PackageOptions,
    exec: Arc<Exec>,
    notify: &'a Notify<'a>,
    exporter: Exporter,
    writer: ShardWriter<S>,
    config: ModelConfig,
    /// What the package calls the kind of model.
    model_type: &'static str,
    tied: bool,
    /// Whether the scale that is stored beside weights divides them.
    divides: bool,
    tensors: TensorMap,
    remarks: Vec<String>,
    n_resumed: usize,
}

/// What was written.
#[derive(Debug)]
pub struct Packed<S> {
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
    /// What has all files.
    pub sink: S,
}

impl<'a, S: PackageSink> Packing<'a, S> {
    /// Begins to convert the model in `files`, computing on `exec`. `open` is called for the sink once it is
    /// known that the model can be converted.
    ///
    /// Errors: a model that can't be read or run here, invalid options, and what `open` fails with.
    pub fn new(
        files: &'a ModelFiles,
        options: &'a PackageOptions,
        exec: Arc<Exec>,
        notify: &'a Notify<'a>,
        open: impl FnOnce() -> Result<S>,
    ) -> Result<Packing<'a, S>> {
        check_shard_size(options.shard_size)?;
        warn_of(files.warnings(), notify);
        let plan = files.plan(&options.plan)?;
        let config = plan.config().clone();
        let n_bytes = plan.weight_bytes();
        let exporter = Exporter::new(plan, exec.clone());
        let names = exporter.tensors();
        let model_type = match files.config_json()? {
            Some(serde_json::Value::Object(hf)) => model_type_of(&hf),
            // What can't be said fails at the end, when divisors of frequencies are known.
            _ => config
                .to_hf(exporter.is_tied())
                .map_or(TRANSFORMER, |hf| model_type_of(&hf)),
        };
        let ids: BTreeSet<_> = names
            .iter()
            .map(|(name, _)| group_of(name, model_type))
            .collect();
        let ids: Vec<String> = ids.iter().map(ToString::to_string).collect();
        options
            .statements
            .versions
            .check(ids.iter().map(String::as_str))?;
        let sink = open()?;
        let n_resumed = sink.n_finished();
        let tied = exporter.is_tied();
        options.targets.warn_if_tied(tied, notify);
        let rules = files
            .config()?
            .map(|hf| TernaryRules::of(&hf))
            .transpose()?;
        notify(Event::Started {
            step: Step::Converting,
            n_bytes,
        });
        Ok(Packing {
            files,
            options,
            exec,
            notify,
            exporter,
            writer: ShardWriter::new(
                sink,
                options.shard_size,
                options.algorithm,
                options.hash_on_threads,
            ),
            config,
            model_type,
            tied,
            divides: rules.is_some_and(|rules| rules.scales_divide),
            tensors: TensorMap::default(),
            remarks: Vec::new(),
            n_resumed,
        })
    }

    /// The bytes to feed next; `None` if there is nothing left but to [finish](Packing::finish).
    pub fn wanted(&self) -> Option<&TensorRequest> {
        self.exporter.wanted()
    }

    /// The sink, which has what was fed so far.
    pub fn sink(&mut self) -> &mut S {
        self.writer.sink()
    }

    /// Takes what [`Packing::wanted`] asks for.
    ///
    /// Errors: bytes that are no tensor, or a sink that can't be written.
    pub fn feed(&mut self, bytes: Bytes) -> Result<()> {
        let n_bytes = bytes.len() as u64;
        let exported = self.exporter.feed(bytes);
        let exported = exported.with_context(|| self.files.name().to_owned())?;
        if let Some(exported) = exported {
            self.write(exported)?;
        }
        (self.notify)(Event::Advanced { n_bytes });
        Ok(())
    }

    fn write(&mut self, exported: Exported) -> Result<()> {
        let parts = storable(exported, self.divides)?;
        // Trits that had to become floats are exact.
        let targets = match parts.len() {
            2.. => &Targets::KEEP,
            _ => &self.options.targets,
        };
        let writer = &mut self.writer;
        for exported in parts {
            let encoding = Encoding::of(&exported, targets, self.tied)?;
            let group = group_of(&exported.name, self.model_type);
            let spans = writer.begin(group, encoding.size())?;
            if writer.is_written(&spans) {
                writer.skip(&spans)?;
            } else {
                encoding.write(&self.exec, |bytes| writer.write(bytes))?;
            }
            self.remarks.extend(encoding.remark.clone());
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
            self.tensors.push(tensor).map_err(|twice| {
                let message = format!("tensor `{}`: exported twice", twice.name);
                Error::new(ErrorCode::InvalidFile, message)
            })?;
        }
        Ok(())
    }

    /// Writes the files that are not shards, the manifest last.
    ///
    /// Errors: something is still wanted, the model's text side can't be read, or a sink that can't be written.
    pub fn finish(self) -> Result<Packed<S>> {
        let Packing {
            files,
            options,
            notify,
            exporter,
            tied,
            tensors,
            ..
        } = self;
        warn_of_types(self.remarks, notify);
        warn_of_inexact(files, exporter.warnings(), notify);
        let (written, mut sink) = self.writer.finish()?;
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
            model_type: self.model_type,
            variant,
            config: &self.config,
            eos: companions.eos.clone(),
            tokenizer: companions.tokenizer.clone(),
            has_chat_template: companions.has_chat_template,
            source: files.stem().to_owned(),
            pooling: pooling(files, notify),
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
        manifest::write(&mut sink, &mut manifest, companions.files, options.detail)?;
        Ok(Packed {
            model_id,
            n_tensors,
            n_shards,
            total_size: manifest.total_size,
            n_resumed: self.n_resumed,
            sink,
        })
    }
}

/// About how many bytes a package of the model in `files` has if its types are kept, rather too many.
///
/// Errors: a model that can't be read or run here.
pub fn package_bytes(files: &ModelFiles, options: &PlanOptions) -> Result<u64> {
    // In memory, ternary weights of every form take what they take in a package.
    let weights = files.plan(options)?.memory_bytes();
    let tensors = files.tensors();
    let gaps = 2 * TENSOR_ALIGNMENT * tensors.len() as u64;
    // What a manifest says of a tensor, twice; its hashes of blocks.
    let described = 2048 * tensors.len() as u64 + weights / 4096;
    // A vocabulary is written in two forms.
    let stored: u64 = tensors.iter().map(|tensor| tensor.len).sum();
    let all: u64 = files.files().iter().map(|file| file.len).sum();
    let text = 3 * all.saturating_sub(stored) + companions::taken_bytes(files)?;
    Ok(weights + gaps + described + text)
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
    files: &ModelFiles,
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
