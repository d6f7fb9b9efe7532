//! Opening a model: which files it has, what they say, and feeding the engine from them.

mod adapter;
mod assemble;
mod bundle;
mod bundled;
mod called;
mod generation;
mod package;
mod shards;
mod source;
mod text;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;
use std::thread;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use serde_json::Value;
use sterna_engine::{Backend, Loader, Model, ModelPlan, PlanOptions, Session, TensorRequest};
use sterna_format::TensorCatalog;
use sterna_format::gguf::{self, Gguf, Metadata};
use sterna_format::hf::{Config, GenerationConfig, parse_json};
use sterna_format::rdrr::RuntimeOptimizations;
use sterna_format::safetensors::{self, Index, SafeTensors};
use sterna_kernels::quant::ternary::I2sLayout;
use sterna_text::Tokenizer;

use crate::args::{EngineFlags, ModelFlags, WeightsFlag};
use crate::machine::Machine;
use crate::output;
use crate::place::Place;
use crate::progress::Progress;

pub(crate) use adapter::{
    Adapted, AdapterFiles, CONFIG as ADAPTER_CONFIG, WEIGHTS as ADAPTER_WEIGHTS,
    config as adapter_config, open as open_adapter,
};
use assemble::Assembled;
pub(crate) use bundle::{BundleHeader, identity_hash};
pub(crate) use bundled::Bundled;
pub(crate) use called::{stem, warn_of_other_base};
pub(crate) use package::{PackageHeader, read_package};
use shards::Shards;
use source::Found;
pub(crate) use source::{Folder, SourceFile, package_folder};
pub(crate) use text::GGUF_TOKENIZER_FILE;

/// The files of a model, their headers parsed, no weight read.
#[derive(Debug)]
pub(crate) struct ModelFiles {
    /// As the user called it.
    name: String,
    files: Vec<SourceFile>,
    /// Tensors that are made from several places of the files; their indices follow the files'.
    assembled: Vec<Assembled>,
    /// Tensors under the names that the files give them.
    tensors: TensorCatalog,
    header: Header,
    /// The configuration of a model whose files have none.
    told: Option<Value>,
}

/// What the files say besides tensors.
#[derive(Debug)]
pub(crate) enum Header {
    Gguf {
        version: u32,
        metadata: Metadata,
    },
    SafeTensors {
        /// Strings in the header of the first file.
        metadata: BTreeMap<String, String>,
        /// Where the files beside the weights are.
        folder: Folder,
    },
    Package(Box<PackageHeader>),
    Bundle(Box<BundleHeader>),
}

impl ModelFiles {
    /// Opens what `name` stands for: a path, or the built-in model.
    pub(crate) fn open(name: &str) -> Result<ModelFiles> {
        match source::find(name)? {
            Found::Gguf(files) => ModelFiles::open_gguf(name, files),
            Found::SafeTensors { file, folder } => ModelFiles::open_file(name, file, folder),
            Found::Folder(folder) => ModelFiles::open_folder(name, folder),
            Found::Package(folder) => ModelFiles::open_package(name, folder),
            Found::Bundle(folder) => ModelFiles::open_bundle(name, folder),
        }
    }

    /// The same; `told` is the `config.json` of a model whose files have none.
    pub(crate) fn open_told(name: &str, told: Value) -> Result<ModelFiles> {
        Ok(ModelFiles {
            told: Some(told),
            ..ModelFiles::open(name)?
        })
    }

    fn open_gguf(name: &str, files: Vec<SourceFile>) -> Result<ModelFiles> {
        let parts: Vec<Gguf> = files.iter().map(parse_gguf).collect::<Result<_>>()?;
        let version = parts.first().map_or(0, Gguf::version);
        let model = gguf::Model::from_parts(parts).with_context(|| name.to_owned())?;
        let (metadata, tensors) = model.into_parts();
        let header = Header::Gguf { version, metadata };
        Ok(ModelFiles {
            name: name.to_owned(),
            files,
            assembled: Vec::new(),
            tensors,
            header,
            told: None,
        })
    }

    fn open_folder(name: &str, folder: Folder) -> Result<ModelFiles> {
        // Where there are both, the whole file wins, as it does in Transformers.
        if let Some(file) = folder.file(source::SINGLE)? {
            return ModelFiles::open_safetensors(name, vec![file], None, folder);
        }
        let Some(index) = read_index(&folder)? else {
            bail!(
                "{name}: expected {} or {}, found neither",
                source::SINGLE,
                source::INDEX
            );
        };
        ModelFiles::open_shards(name, index, folder)
    }

    /// Opens a safetensors file in `folder`; of a shard that an index there lists, the whole set.
    fn open_file(name: &str, file: SourceFile, folder: Folder) -> Result<ModelFiles> {
        if file.file_name() != source::SINGLE
            && let Some(index) = read_index(&folder)?
            && index.files().contains(&file.file_name().as_str())
        {
            return ModelFiles::open_shards(name, index, folder);
        }
        ModelFiles::open_safetensors(name, vec![file], None, folder)
    }

    fn open_shards(name: &str, index: Index, folder: Folder) -> Result<ModelFiles> {
        let shards = index.files().into_iter().map(|shard| folder.shard(shard));
        let files = shards.collect::<Result<_>>()?;
        ModelFiles::open_safetensors(name, files, Some(index), folder)
    }

    fn open_safetensors(
        name: &str,
        files: Vec<SourceFile>,
        index: Option<Index>,
        folder: Folder,
    ) -> Result<ModelFiles> {
        let parts: Vec<SafeTensors> = files.iter().map(parse_safetensors).collect::<Result<_>>()?;
        let metadata = parts
            .first()
            .map(|part| part.metadata().clone())
            .unwrap_or_default();
        let file_names: Vec<String> = files.iter().map(SourceFile::file_name).collect();
        let named = file_names.iter().map(String::as_str).zip(parts).collect();
        let tensors = safetensors::merge(named, index.as_ref()).with_context(|| name.to_owned())?;
        let header = Header::SafeTensors { metadata, folder };
        Ok(ModelFiles {
            name: name.to_owned(),
            files,
            assembled: Vec::new(),
            tensors,
            header,
            told: None,
        })
    }

    /// As the user called it.
    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// What the model is called: by the user, and by its makers in its files.
    pub(crate) fn names(&self) -> Result<Vec<String>> {
        let mut names = vec![stem(&self.name)];
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

    /// The files that hold tensors; [`TensorEntry::file`](sterna_format::TensorEntry) counts them.
    pub(crate) fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Every tensor, under the name its file gives it.
    pub(crate) fn tensors(&self) -> &TensorCatalog {
        &self.tensors
    }

    /// What the files say besides tensors.
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// Where the files beside the weights are; a GGUF file has everything inside.
    fn folder(&self) -> Option<&Folder> {
        match &self.header {
            Header::Gguf { .. } => None,
            Header::SafeTensors { folder, .. } => Some(folder),
            Header::Package(header) => Some(&header.folder),
            Header::Bundle(header) => Some(&header.folder),
        }
    }

    /// The bytes of the file called `name` beside the weights, if there is one.
    fn bytes(&self, name: &str) -> Result<Option<bytes::Bytes>> {
        let Some(folder) = self.folder() else {
            return Ok(None);
        };
        if let Header::Package(header) = &self.header {
            return header.beside(name);
        }
        Ok(package::small_file(folder, name)?.map(|(_, bytes)| bytes))
    }

    /// The file called `name` beside the weights, and what `parse` makes of it.
    fn parsed<T, E>(
        &self,
        name: &str,
        parse: impl FnOnce(&[u8]) -> Result<T, E>,
    ) -> Result<Option<T>>
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let (Some(folder), Some(bytes)) = (self.folder(), self.bytes(name)?) else {
            return Ok(None);
        };
        parse(&bytes)
            .map(Some)
            .with_context(|| folder.path_of(name))
    }

    /// `config.json`, of a model that has one; of a package, what its manifest amounts to.
    pub(crate) fn config(&self) -> Result<Option<Config>> {
        match &self.header {
            Header::Package(header) => header.config().map(Some),
            _ => match (
                self.parsed("config.json", Config::parse)?,
                self.told_config()?,
            ) {
                (None, Some(told)) => Ok(Some(Config::from_value(&told)?)),
                (own, _) => Ok(own),
            },
        }
        .with_context(|| self.name.clone())
    }

    /// `config.json` as it stands, of a model that has one.
    pub(crate) fn config_json(&self) -> Result<Option<Value>> {
        match &self.header {
            Header::Package(header) => Ok(Some(header.hf_config()?.config.into())),
            _ => match self.parsed("config.json", parse_json)? {
                None => self.told_config(),
                own => Ok(own),
            },
        }
    }

    /// What the model's user said in the place of `config.json`, completed by what files of a bundle say.
    fn told_config(&self) -> Result<Option<Value>> {
        let Some(told) = &self.told else {
            return Ok(None);
        };
        match &self.header {
            Header::Bundle(header) => header.complete(told).map(Some),
            _ => Ok(Some(told.clone())),
        }
        .with_context(|| self.name.clone())
    }

    /// `generation_config.json`, or the empty one. Warns of recommendations in it that are ignored.
    pub(crate) fn generation_config(&self) -> Result<GenerationConfig> {
        const NAME: &str = "generation_config.json";
        let (config, ignored) = self.parsed(NAME, generation::parse)?.unwrap_or_default();
        for reason in ignored {
            output::note(format_args!(
                "warning: {}: {NAME}: {reason}; ignored",
                self.name
            ));
        }
        Ok(config)
    }

    /// What the engine makes of the files; fails if it can't run the model.
    pub(crate) fn plan(&self, flags: &ModelFlags) -> Result<ModelPlan> {
        let options = PlanOptions {
            i2s_layout: flags.i2s_layout(),
        };
        self.plan_for(&options)?
            .with_head(flags.head())
            .with_context(|| self.name.clone())
    }

    /// What the engine makes of the files, its output head as it is stored.
    ///
    /// What a package says of its I2_S weights counts, not what `options` say.
    pub(crate) fn plan_for(&self, options: &PlanOptions) -> Result<ModelPlan> {
        let told = match &self.header {
            Header::Package(header) => header.i2s_layout().with_context(|| self.name.clone())?,
            Header::Bundle(_) => Some(I2sLayout::PaddedRows),
            _ => None,
        };
        let options = &PlanOptions {
            i2s_layout: told.unwrap_or(options.i2s_layout),
        };
        let plan = || -> Result<ModelPlan> {
            if let Header::Gguf { metadata, .. } = &self.header {
                return Ok(ModelPlan::from_gguf(metadata, &self.tensors, options)?);
            }
            let config = self.config()?;
            let config = config.context("expected config.json beside the weights, found none")?;
            let plan = ModelPlan::from_hf(&config, &self.tensors, options)?;
            if let Header::Bundle(header) = &self.header {
                header.check_config(plan.config())?;
            }
            Ok(plan)
        };
        plan().with_context(|| self.name.clone())
    }

    /// Checks the bytes of a package that nobody has checked yet, before anything is made of them.
    pub(crate) fn verify(&self) -> Result<()> {
        match &self.header {
            Header::Package(header) => shards::verify(&self.files, header.checks()),
            _ => Ok(()),
        }
    }

    /// Waits until a package that is being fetched is in the store.
    pub(crate) fn settle(&self) -> Result<()> {
        match &self.header {
            Header::Package(header) => header.settle(),
            _ => Ok(()),
        }
    }

    /// A range of bytes that a plan of this model asks for.
    pub(crate) fn bytes_of(&self, want: &TensorRequest) -> Result<Bytes> {
        match self.assembled(want)? {
            None => self.files[want.file].slice(want.offset, want.len),
            Some(made) => made
                .slice(&self.files, want.offset, want.len)
                .with_context(|| self.name.clone()),
        }
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

    /// The file called `name` beside the weights, as it stands.
    pub(crate) fn beside(&self, name: &str) -> Result<Option<Bytes>> {
        self.parsed(name, |bytes| {
            Ok::<_, Infallible>(Bytes::copy_from_slice(bytes))
        })
    }

    /// What a package would like of the machine that runs it; nothing of another model.
    pub(crate) fn hints(&self) -> RuntimeOptimizations {
        let hints = match &self.header {
            Header::Package(header) => header.package.manifest().runtime_optimizations.clone(),
            _ => None,
        };
        hints.unwrap_or_default()
    }

    /// Reads the weights that `plan` asks for, to where `flags` say, using `n_threads` threads.
    pub(crate) fn load(
        &self,
        plan: &ModelPlan,
        flags: &EngineFlags,
        n_threads: usize,
    ) -> Result<Arc<Model<Place>>> {
        let load = |place| self.load_on(plan.clone(), place, flags.weights());
        flags.load_on(n_threads, plan, &self.hints(), load)
    }

    /// Reads the weights that `plan` asks for onto `backend`.
    pub(crate) fn load_on<B: Backend>(
        &self,
        plan: ModelPlan,
        backend: B,
        weights: WeightsFlag,
    ) -> Result<Arc<Model<B>>> {
        let weights_read = match weights {
            WeightsFlag::Map => false,
            WeightsFlag::Read => true,
            WeightsFlag::Auto => {
                let n_bytes: u64 = self.files.iter().map(SourceFile::len).sum();
                n_bytes <= Machine::detect().free_memory_bytes / 2
            }
        };
        let checks = match &self.header {
            Header::Package(header) => header.checks(),
            _ => Vec::new(),
        };
        let progress = Progress::bytes("loading", plan.weight_bytes());
        let mut loader = Loader::new(plan, backend);
        thread::scope(|scope| {
            let mut shards = Shards::start(scope, &self.files, checks, weights_read);
            while let Some(want) = loader.wanted() {
                let bytes = match self.assembled(want)? {
                    None => shards.get(want.file)?.slice(want.offset, want.len)?,
                    Some(made) => {
                        made.shards().try_for_each(|i| shards.get(i).map(drop))?;
                        made.slice(shards.files(), want.offset, want.len)
                            .with_context(|| self.name.clone())?
                    }
                };
                let len = want.len;
                loader.feed(bytes).with_context(|| self.name.clone())?;
                progress.add(len);
            }
            shards.finish()
        })?;
        if let Header::Package(header) = &self.header {
            for warning in header.hf_config()?.warnings {
                output::note(format_args!("warning: {}: {warning}", self.name));
            }
        }
        // One of a kind is enough: what is odd about a checkpoint is odd about all its layers.
        if let Some(warning) = loader.warnings().first() {
            output::note(format_args!("warning: {}: {warning}", self.name));
        }
        self.settle()?;
        loader.finish().with_context(|| self.name.clone())
    }

    /// Loads the model and starts a session that holds `ctx_len` tokens.
    pub(crate) fn session(
        &self,
        plan: ModelPlan,
        flags: &EngineFlags,
        ctx_len: usize,
    ) -> Result<Session<Place>> {
        let max_ctx = plan.config().max_ctx;
        if ctx_len > max_ctx {
            output::note(format_args!(
                "warning: {}: a context of {ctx_len} tokens, but the model was made for {max_ctx}",
                self.name
            ));
        }
        let model = self.load(&plan, flags, flags.n_threads())?;
        Adapted::new(model, self, flags.lora())?.session(flags.session(ctx_len))
    }

    /// Every token that ends an answer: those that the files name, and those that `tokenizer` knows of.
    pub(crate) fn stop_ids(
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

/// The index of a sharded checkpoint in `folder`, if there is one.
fn read_index(folder: &Folder) -> Result<Option<Index>> {
    let Some(file) = folder.file(source::INDEX)? else {
        return Ok(None);
    };
    Index::parse(&file.bytes()?)
        .map(Some)
        .with_context(|| file.to_string())
}

// A mapped file costs nothing to hand over whole: only pages that the parser looks at are read.

fn parse_gguf(file: &SourceFile) -> Result<Gguf> {
    Gguf::parse(&file.bytes()?, file.len()).with_context(|| file.to_string())
}

fn parse_safetensors(file: &SourceFile) -> Result<SafeTensors> {
    SafeTensors::parse(&file.bytes()?, file.len()).with_context(|| file.to_string())
}
