//! A model's files, their headers parsed, no weight read: what they say, and where each weight lies.

mod adapter;
mod assemble;
mod bundle;
pub(crate) mod bundled;
mod checkpoint;
mod companions;
mod generation;
mod gguf;
mod load;
mod names;
mod package;
mod text;

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use sterna_delivery::hash::{Algorithm, Digest, Expected, Hasher};
use sterna_delivery::package::MAX_FILE_BYTES;
use sterna_engine::plan::{PlanOptions, TensorRequest};
use sterna_engine::{Activations, CacheType, ModelPlan, SessionOptions};
use sterna_format::gguf::Metadata;
use sterna_format::hf::{Config, GenerationConfig, parse_json};
use sterna_format::rdrr::{MANIFEST_FILE, QuantizationInfo, RuntimeOptimizations};
use sterna_format::{DType, I2sLayout, TensorCatalog};
use sterna_text::Tokenizer;

use crate::embedding::Pooling;
use crate::error::{Context, Result, bail};
use crate::want::{Files, Machine};
use crate::warning::Warning;
use assemble::Assembled;
use companions::Companions;

pub use adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, AdapterFiles};
pub use bundle::{BundleHeader, identity_hash};
pub use bundled::Bundled;
pub use checkpoint::{CHECKPOINT_FILE, CHECKPOINT_INDEX};
pub use companions::RWKV_VOCAB;
pub(crate) use load::Shards;
pub use load::{EarlyPrompt, LoadOptions, Loaded, Verification};
pub use names::may_be_called;
pub use package::{PackageFiles, PackageHeader, Signatures};
pub use text::GGUF_TOKENIZER_FILE;

/// Bytes of a file that are hashed at once.
const DIGEST_PIECE: u64 = 16 << 20;

/// The operation of hints whose kernels differ in precision.
const MATMUL: &str = "matmul";

/// What a model's files are opened by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelEntry {
    /// A folder with a checkpoint, a package or an engine bundle; its files tell which.
    Folder,
    /// One file: GGUF, or the first of a split set; safetensors; a package's manifest.
    File(String),
}

/// How to open a model.
#[derive(Clone)]
pub struct OpenOptions {
    /// What messages call the model.
    pub name: String,
    /// What the model is called apart from its place: the last part of a path, without an extension.
    pub stem: String,
    /// Stands before the names of files in messages: a folder, or nothing.
    pub prefix: String,
    /// The `config.json` of a model whose files have none.
    pub config: Option<Value>,
    /// Who decides whether a signed package is let in; with `None`, no signed one is.
    pub signatures: Option<Arc<dyn Signatures>>,
    /// Whether the source has verified a package's bytes already, as a store does on their way in.
    pub is_verified: bool,
}

impl OpenOptions {
    /// A model that messages call `name`.
    pub fn new(name: impl Into<String>) -> OpenOptions {
        let name = name.into();
        OpenOptions {
            stem: name.clone(),
            name,
            prefix: String::new(),
            config: None,
            signatures: None,
            is_verified: false,
        }
    }

    /// What messages call the file `name`.
    fn label(&self, name: &str) -> String {
        label(&self.prefix, name)
    }
}

/// What messages call the file `name`, whose folder they call `prefix`.
pub(crate) fn label(prefix: &str, name: &str) -> String {
    match prefix {
        "" => name.to_owned(),
        prefix if prefix.ends_with(['/', '\\']) => format!("{prefix}{name}"),
        prefix => format!("{prefix}/{name}"),
    }
}

/// A file with weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WeightFile {
    /// Its name in its folder.
    pub name: String,
    /// What messages call it.
    pub label: String,
    /// Its length in bytes.
    pub len: u64,
}

/// The files of a model, their headers parsed, no weight read.
pub struct ModelFiles {
    options: OpenOptions,
    files: Vec<WeightFile>,
    /// Tensors that are made from several places of the files; their indices follow the files'.
    assembled: Vec<Assembled>,
    /// Tensors under the names that the files give them.
    tensors: TensorCatalog,
    companions: Companions,
    header: Header,
}

/// What the files say besides tensors.
#[derive(Debug)]
pub enum Header {
    /// GGUF, one file or a split set.
    Gguf {
        /// The version of the format.
        version: u32,
        /// Keys and values of all parts.
        metadata: Metadata,
    },
    /// A checkpoint of Hugging Face.
    SafeTensors {
        /// Strings in the header of the first file.
        metadata: BTreeMap<String, String>,
    },
    /// An RDRR package.
    Package(Box<PackageHeader>),
    /// The bundle of an engine.
    Bundle(Box<BundleHeader>),
}

impl ModelFiles {
    /// Opens the model that `entry` leads to.
    pub fn open(entry: ModelEntry, options: OpenOptions) -> Machine<'static, ModelFiles> {
        Machine::new(move |files| async move {
            match &entry {
                ModelEntry::File(name) => ModelFiles::open_file(name, options, &files).await,
                ModelEntry::Folder => ModelFiles::open_folder(options, &files).await,
            }
        })
    }

    async fn open_folder(options: OpenOptions, files: &Files) -> Result<ModelFiles> {
        for name in [CHECKPOINT_FILE, CHECKPOINT_INDEX] {
            if files.len(name).await.is_some() {
                return checkpoint::open_folder(options, files).await;
            }
        }
        if files.len(MANIFEST_FILE).await.is_some() {
            return package::open(options, files).await;
        }
        if files
            .len(sterna_format::bundle::TENSORS_FILE)
            .await
            .is_some()
        {
            return bundle::open(options, files).await;
        }
        bail!(
            NotFound,
            "{}: expected {CHECKPOINT_FILE}, {CHECKPOINT_INDEX}, {MANIFEST_FILE} or {}, found none of them",
            options.name,
            sterna_format::bundle::TENSORS_FILE
        )
    }

    async fn open_file(name: &str, options: OpenOptions, files: &Files) -> Result<ModelFiles> {
        if name == MANIFEST_FILE {
            return package::open(options, files).await;
        }
        let label = options.label(name);
        let len = files.len(name).await;
        let Some(len) = len else {
            bail!(NotFound, "{label}: cannot open: no such file");
        };
        let start = match len {
            0 => Bytes::new(),
            len => files.bytes(name, 0..len.min(4)).await,
        };
        if &start[..] == b"GGUF" {
            return gguf::open(name, options, files).await;
        }
        if name.ends_with(".safetensors") {
            return checkpoint::open_file(name, options, files).await;
        }
        bail!(
            InvalidFile,
            "{label}: expected a GGUF file, which begins with `GGUF`, or a name that ends in .safetensors; \
             found {len} bytes that begin with `{}`",
            start.escape_ascii(),
        )
    }

    /// What messages call the model.
    pub fn name(&self) -> &str {
        &self.options.name
    }

    /// What the model is called: by the user, and by its makers in its files.
    ///
    /// Errors: a configuration that can't be read.
    pub fn names(&self) -> Result<Vec<String>> {
        let mut names = vec![self.options.stem.clone()];
        match &self.header {
            Header::Gguf { metadata, .. } => {
                for key in ["general.name", "general.basename"] {
                    names.extend(metadata.get_str(key)?.map(str::to_owned));
                }
            }
            Header::SafeTensors { .. } | Header::Bundle(_) => {
                let config = self.config_json()?.unwrap_or_default();
                names.extend(config["_name_or_path"].as_str().map(str::to_owned));
            }
            Header::Package(header) => {
                let manifest = header.package.manifest();
                names.push(manifest.model_id.clone());
                let source = manifest.metadata.as_ref().and_then(|m| m.get("source"));
                names.extend(source.and_then(|s| s.as_str()).map(str::to_owned));
            }
        }
        names.retain(|name| !name.is_empty());
        names.dedup();
        Ok(names)
    }

    /// The last part of the model's name, without an extension.
    pub fn stem(&self) -> &str {
        &self.options.stem
    }

    /// The files that hold tensors; [`TensorEntry::file`](sterna_format::TensorEntry) counts them.
    pub fn files(&self) -> &[WeightFile] {
        &self.files
    }

    /// Every tensor, under the name its file gives it.
    pub fn tensors(&self) -> &TensorCatalog {
        &self.tensors
    }

    /// What the files say besides tensors.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The file called `name` beside the weights; `None` if there is none, or none that counts: where a
    /// package gives hashes of such files, others are taken not to be there.
    ///
    /// Errors: it is too large, or not what the manifest says.
    pub fn beside(&self, name: &str) -> Result<Option<Bytes>> {
        match &self.header {
            Header::Gguf { .. } => Ok(None),
            Header::Package(header) => header.beside(&self.companions, name),
            Header::SafeTensors { .. } | Header::Bundle(_) => self.companions.get(name),
        }
    }

    /// The file called `name` beside the weights, and what `parse` makes of it.
    fn parsed<T, E>(
        &self,
        name: &str,
        parse: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> Result<Option<T>>
    where
        E: Into<crate::Error>,
    {
        let Some(bytes) = self.beside(name)? else {
            return Ok(None);
        };
        parse(&bytes)
            .map(Some)
            .with_context(|| self.options.label(name))
    }

    /// `config.json`, of a model that has one; of a package, what its manifest amounts to.
    ///
    /// Errors: it can't be read; a package that nothing here can run.
    pub fn config(&self) -> Result<Option<Config>> {
        self.read_config().with_context(|| self.name())
    }

    /// The same; errors don't name the model.
    fn read_config(&self) -> Result<Option<Config>> {
        match &self.header {
            Header::Package(header) => header.config().map(Some),
            _ => match (
                self.parsed("config.json", Config::parse)?,
                self.given_config()?,
            ) {
                (None, Some(given)) => Ok(Some(Config::from_value(&given)?)),
                (own, _) => Ok(own),
            },
        }
    }

    /// How embeddings of texts are pooled, if the model says so: in a GGUF file's metadata, a package's, or a
    /// checkpoint's `1_Pooling/config.json`.
    ///
    /// Errors: it says something that isn't known.
    pub fn pooling(&self) -> Result<Option<Pooling>> {
        match self.header() {
            Header::Gguf { metadata, .. } => Pooling::of_gguf(metadata),
            Header::Package(header) => Pooling::of_package(header.package.manifest()),
            Header::SafeTensors { .. } | Header::Bundle(_) => {
                self.parsed(companions::POOLING, Pooling::of_checkpoint)
            }
        }
    }

    /// `config.json` as it stands, of a model that has one.
    ///
    /// Errors: it is no JSON.
    pub fn config_json(&self) -> Result<Option<Value>> {
        match &self.header {
            Header::Package(header) => Ok(Some(header.hf_config()?.config.into())),
            _ => match self.parsed("config.json", parse_json)? {
                None => self.given_config(),
                own => Ok(own),
            },
        }
    }

    /// [`OpenOptions::config`], completed by what files of a bundle say.
    fn given_config(&self) -> Result<Option<Value>> {
        let Some(given) = &self.options.config else {
            return Ok(None);
        };
        match &self.header {
            Header::Bundle(header) => header.complete(given).map(Some),
            _ => Ok(Some(given.clone())),
        }
        .with_context(|| self.name())
    }

    /// `generation_config.json`, or the empty one; recommendations in it that are ignored are added to
    /// `warnings`.
    ///
    /// Errors: it can't be read.
    pub fn generation_config(&self, warnings: &mut Vec<Warning>) -> Result<GenerationConfig> {
        const NAME: &str = "generation_config.json";
        let (config, ignored) = self.parsed(NAME, generation::parse)?.unwrap_or_default();
        warnings.extend(
            ignored
                .into_iter()
                .map(|reason| Warning::IgnoredRecommendation {
                    model: self.name().to_owned(),
                    reason: format!("{NAME}: {reason}"),
                }),
        );
        Ok(config)
    }

    /// A digest of all that the model's logits depend on: of a package its manifest, which has the hashes of the shards,
    /// and its tensor map; of others the files with weights, which are read for that. `progress` is told how many bytes
    /// of them were.
    pub fn digest<'a>(&'a self, progress: impl Fn(u64) + 'a) -> Machine<'a, Digest> {
        Machine::new(move |files| async move {
            let mut hasher = Hasher::new(Algorithm::Blake3);
            match &self.header {
                Header::Package(header) => hasher.update(header.digest.as_bytes()),
                _ => {
                    for file in &self.files {
                        hasher.update(&file.len.to_le_bytes());
                        let mut at = 0;
                        while at < file.len {
                            let end = file.len.min(at + DIGEST_PIECE);
                            hasher.update(&files.bytes(&file.name, at..end).await);
                            progress(end - at);
                            at = end;
                        }
                    }
                }
            }
            if let Some(config) = self.config_json()? {
                hasher.update(config.to_string().as_bytes());
            }
            Ok(hasher.finish())
        })
    }

    /// What the engine makes of the files, the output head as it is stored.
    ///
    /// What a package says of its I2_S weights counts, not what `options` say.
    /// Errors: the engine can't run the model.
    pub fn plan(&self, options: &PlanOptions) -> Result<ModelPlan> {
        let stated = match &self.header {
            Header::Package(header) => header.i2s_layout().with_context(|| self.name())?,
            Header::Bundle(_) => Some(I2sLayout::PaddedRows),
            _ => None,
        };
        let options = &PlanOptions {
            i2s_layout: stated.unwrap_or(options.i2s_layout),
        };
        let plan = || -> Result<ModelPlan> {
            if let Header::Gguf { metadata, .. } = &self.header {
                return Ok(ModelPlan::from_gguf(metadata, &self.tensors, options)?);
            }
            let config = self.read_config()?;
            let config = config.context("expected config.json beside the weights, found none")?;
            let plan = ModelPlan::from_hf(&config, &self.tensors, options)?;
            if let Header::Bundle(header) = &self.header {
                header.check_config(plan.config())?;
            }
            Ok(plan)
        };
        plan().with_context(|| self.name())
    }

    /// What each weight file must be, where that isn't known to be so: shards of a package that nobody has
    /// verified yet.
    pub fn checks(&self) -> Vec<Option<Expected>> {
        match &self.header {
            Header::Package(header) if !self.options.is_verified => header.checks(),
            _ => vec![None; self.files.len()],
        }
    }

    /// The parts of weight files, by index and range, that the bytes of `want` are made of, in order.
    ///
    /// Errors: `want` isn't of a plan of this model.
    pub fn parts(&self, want: &TensorRequest) -> Result<Vec<(usize, std::ops::Range<u64>)>> {
        match self.assembled(want)? {
            Some(made) => made.parts(want.offset, want.len),
            None => {
                let end = want.offset.checked_add(want.len);
                let end = end.filter(|&end| end <= self.files[want.file].len);
                let end = end.with_context(|| {
                    format!(
                        "{}: wanted {} bytes at offset {}, but the file has {}",
                        self.files[want.file].label,
                        want.len,
                        want.offset,
                        self.files[want.file].len
                    )
                })?;
                Ok(vec![(want.file, want.offset..end)])
            }
        }
    }

    /// The bytes of `want`, made of `stored`: the [parts](ModelFiles::parts), joined.
    ///
    /// Errors: what is stored can't be decoded.
    pub fn make(&self, want: &TensorRequest, stored: Bytes) -> Result<Bytes> {
        match self.assembled(want)? {
            Some(made) => made
                .make(stored, want.offset, want.len)
                .with_context(|| self.name()),
            None => Ok(stored),
        }
    }

    /// All of the tensor that `want` is of, if any part of it is made of all that is stored.
    fn converted(&self, want: &TensorRequest) -> Result<Option<TensorRequest>> {
        let made = self.assembled(want)?;
        Ok(made
            .and_then(Assembled::converted_bytes)
            .map(|len| TensorRequest {
                offset: 0,
                len,
                ..want.clone()
            }))
    }

    /// What makes the bytes that are asked for; `None` if they lie in a file.
    fn assembled(&self, want: &TensorRequest) -> Result<Option<&Assembled>> {
        let Some(index) = want.file.checked_sub(self.files.len()) else {
            return Ok(None);
        };
        let made = self.assembled.get(index).with_context(|| {
            format!(
                "tensor `{}`: expected a file of the model, found file {}",
                want.name, want.file
            )
        })?;
        Ok(Some(made))
    }

    /// What is odd about the files and was accepted.
    pub fn warnings(&self) -> Vec<Warning> {
        let Header::Package(header) = &self.header else {
            return Vec::new();
        };
        let oddity = |what| Warning::Oddity {
            model: self.name().to_owned(),
            what,
        };
        header.warnings().into_iter().map(oddity).collect()
    }

    /// The type of key-value cache that a package asks for, if it asks for one.
    pub fn cache_type(&self) -> Option<CacheType> {
        match self.quantization_info()?.cache_type()? {
            DType::F32 => Some(CacheType::F32),
            DType::F16 => Some(CacheType::F16),
            DType::Q8_0 => Some(CacheType::Q8_0),
            _ => None,
        }
    }

    /// The activations that a package asks for where weights are stored as blocks of integers, if it asks for
    /// any.
    pub fn activations(&self) -> Option<Activations> {
        Some(match self.quantization_info()?.int8_activations()? {
            true => Activations::Int8,
            false => Activations::F32,
        })
    }

    /// Settings of a session that holds `ctx_len` tokens, with the cache that a package asks for.
    pub fn session(&self, ctx_len: usize) -> SessionOptions {
        SessionOptions {
            cache: self.cache_type(),
            ..SessionOptions::new(ctx_len)
        }
    }

    fn quantization_info(&self) -> Option<&QuantizationInfo> {
        match &self.header {
            Header::Package(header) => header.package.manifest().quantization_info.as_ref(),
            _ => None,
        }
    }

    /// What a package would like of the machine that runs it; nothing of another model. A precision of arithmetic
    /// is a preferred kernel for matrix products, unless one is named.
    pub fn hints(&self) -> RuntimeOptimizations {
        let Header::Package(header) = &self.header else {
            return RuntimeOptimizations::default();
        };
        let hints = header.package.manifest().runtime_optimizations.clone();
        let mut hints = hints.unwrap_or_default();
        let compute = self
            .quantization_info()
            .and_then(|info| info.compute_type());
        let is_matmul = |(operation, _): &(String, String)| operation == MATMUL;
        if let Some(dtype) = compute
            && !hints.preferred_kernels.iter().any(is_matmul)
        {
            let variant = dtype.name().to_ascii_lowercase();
            hints.preferred_kernels.push((MATMUL.to_owned(), variant));
        }
        hints
    }

    /// Every token that ends an answer: those that the files name, and those that `tokenizer` knows of.
    ///
    /// Errors: a configuration that can't be read.
    pub fn stop_ids(
        &self,
        tokenizer: Option<&Tokenizer>,
        generation: &GenerationConfig,
    ) -> Result<Vec<u32>> {
        let mut ids = tokenizer.map_or(Vec::new(), |tokenizer| tokenizer.end_ids().to_vec());
        ids.extend(&generation.eos_token_id);
        if let Some(config) = self.config()? {
            ids.extend(config.eos_token_id);
        }
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}
