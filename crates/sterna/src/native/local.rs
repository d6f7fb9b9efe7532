//! Models whose files are on this machine.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;
use std::thread;

use bytes::Bytes;
use serde_json::Value;
use sterna_delivery::hash::Digest;
use sterna_engine::backend::ExpertMemory;
use sterna_engine::plan::TensorRequest;
use sterna_engine::{Backend, Model, ModelPlan};
use sterna_format::rdrr::Package;

use super::experts::{ExpertsInMemory, MappedExperts};
use super::files::{FileSet, SourceFile, expect_file};
use super::find::Located;
use super::shards::{Kept, Shards};
use crate::error::{Context, Result};
use crate::model::{
    ADAPTER_CONFIG, AdapterFiles, LoadOptions, Loaded, ModelFiles, OpenOptions, PackageFiles,
    Signatures, Verification,
};
use crate::swap::Group;
use crate::want::{Joined, Machine, Want};
use crate::warning::Warning;

/// A model whose files are on this machine, or on their way to it: what they say ([`ModelFiles`]), and the
/// files.
pub struct LocalModel {
    model: ModelFiles,
    files: Arc<dyn FileSet>,
    /// The files with weights, in the order of [`ModelFiles::files`].
    sources: Vec<SourceFile>,
}

/// Where weights lie once they are loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Weights {
    /// In the mapped files.
    Mapped,
    /// Read into memory of this process, in huge pages where the system has them; files with weights that are rewritten
    /// when they are loaded are mapped until then, and only what is used as it is given is read.
    Read,
    /// Read if they are no more bytes than this, else mapped.
    ReadUpTo(u64),
}

/// Weights of fewer bytes than this stay in a mapped file: each that is read begins a huge page.
const MIN_COPIED: u64 = 16 << 20;

/// How to load a model from files of this machine.
pub struct LoadFrom<'a> {
    /// Where weights lie.
    pub weights: Weights,
    /// How many experts are in memory, where not all are to be: weights are mapped then.
    pub experts: Option<ExpertsInMemory>,
    /// Threads that verify files ahead of whoever wants them.
    pub n_threads: usize,
    /// Is told how many bytes of weights were loaded each time there are more.
    pub progress: &'a dyn Fn(u64),
}

impl LocalModel {
    /// Opens the model of `located`, which messages call `name`.
    ///
    /// `config` stands for the `config.json` of a model whose files have none; `signatures` decides whether a
    /// signed package is let in.
    /// Errors: files that can't be opened or read.
    pub fn open(
        name: &str,
        located: Located,
        config: Option<Value>,
        signatures: Option<Arc<dyn Signatures>>,
    ) -> Result<LocalModel> {
        let Located { files, entry } = located;
        let options = OpenOptions {
            stem: super::stem(name),
            prefix: files.prefix(),
            config,
            signatures,
            is_verified: files.is_verified(),
            ..OpenOptions::new(name)
        };
        let mut opened = Opened::new(&*files);
        let model = opened.drive(ModelFiles::open(entry, options))?;
        let sources = (model.files().iter())
            .map(|file| opened.expect(&file.name))
            .collect::<Result<_>>()?;
        Ok(LocalModel {
            model,
            files,
            sources,
        })
    }

    /// The files with weights, in the order of [`ModelFiles::files`].
    pub fn sources(&self) -> &[SourceFile] {
        &self.sources
    }

    /// Bytes of all of them together.
    pub fn file_bytes(&self) -> u64 {
        self.sources.iter().map(SourceFile::len).sum()
    }

    /// A digest of the model's files ([`ModelFiles::digest`]); `progress` is told how many bytes of weights were read
    /// for that.
    ///
    /// Errors: they can't be had.
    pub fn digest(&self, progress: &dyn Fn(u64)) -> Result<Digest> {
        self.opened().drive(self.model.digest(progress))
    }

    /// The small file called `name` in the model's folder, as it is now, if there is one.
    ///
    /// Errors: it is too large, or can't be read.
    pub fn read_beside(&self, name: &str) -> Result<Option<Bytes>> {
        read_small(&*self.files, name)
    }

    /// A range of bytes that a plan of this model asks for.
    ///
    /// Errors: it can't be read.
    pub fn bytes_of(&self, want: &TensorRequest) -> Result<Bytes> {
        let parts = self.model.parts(want)?;
        let mut stored = Joined::new(&parts);
        for (file, range) in parts {
            stored.push(self.sources[file].slice(range.start, range.end - range.start)?)?;
        }
        self.model.make(want, stored.finish())
    }

    /// Checks the bytes of a package that nobody has checked yet, where they are mapped, on `n_threads`
    /// threads; `progress` is told of the bytes of each file.
    ///
    /// Errors: a file that isn't what its hash says.
    pub fn verify(&self, n_threads: usize, progress: &dyn Fn(u64)) -> Result<Vec<Warning>> {
        let checks = self.model.checks();
        let is_checked: Vec<bool> = checks.iter().map(Option::is_some).collect();
        thread::scope(|scope| {
            let mut shards = Shards::start(scope, &self.sources, checks, Kept::Mapped, n_threads);
            for (i, _) in is_checked.iter().enumerate().filter(|(_, is)| **is) {
                progress(shards.get(i)?.len());
            }
            shards.finish()
        })
    }

    /// Waits until a package that is being fetched is in the store.
    ///
    /// Errors: it can't be had.
    pub fn settle(&self) -> Result<()> {
        self.files.settle()
    }

    /// Reads the weights that `plan` asks for onto `backend`.
    ///
    /// Errors: weights that can't be read, aren't what their hash says, or that the backend can't take.
    pub fn load_on<B: Backend>(
        &self,
        plan: ModelPlan,
        backend: B,
        options: &LoadFrom<'_>,
    ) -> Result<Loaded<B>> {
        let all_bytes = self.file_bytes();
        let rewrites = |dtype, k| backend.rewrites(dtype, k);
        let rewritten = plan.rewritten_bytes(rewrites);
        // Files that are read are in memory as a whole.
        let is_rewritten = options.experts.is_none() && rewritten > all_bytes / 8;
        let is_read = match options.weights {
            Weights::Mapped => false,
            Weights::Read => true,
            Weights::ReadUpTo(n_bytes) => all_bytes <= n_bytes,
        };
        let kept = match is_read {
            _ if options.experts.is_some() => Kept::Released,
            true if !is_rewritten => Kept::Read,
            _ => Kept::Mapped,
        };
        // What is used as it is given is read from mapped files, too, if it is large.
        let copied: HashSet<(usize, u64)> = plan
            .given(rewrites)
            .filter(|part| is_read && is_rewritten && part.len >= MIN_COPIED)
            .map(|part| (part.file, part.offset))
            .collect();
        let experts = options.experts.map(|bound| {
            let files = self.sources.iter().filter_map(SourceFile::mapped);
            Arc::new(MappedExperts::new(files.cloned().collect(), bound))
        });
        if let Some(experts) = &experts {
            backend.bound_experts(&(Arc::clone(experts) as Arc<dyn ExpertMemory>));
        }
        let (checks, n_threads) = (self.model.checks(), options.n_threads);
        let progress = options.progress;
        thread::scope(|scope| {
            let mut shards = Shards::start(scope, &self.sources, checks, kept, n_threads);
            let loading = LoadOptions {
                verification: Verification::BySource,
                progress: Some(Box::new(progress)),
                prompt: None,
            };
            let mut machine = self.model.load(plan, backend, loading);
            while let Some(want) = machine.wanted() {
                let Want::Bytes { name, range } = want else {
                    unreachable!("all files are there once a model is open");
                };
                let index = self.model.files().iter().position(|file| file.name == name);
                let index = index.with_context(|| format!("{name}: no file of the model"))?;
                let (file, len) = (shards.get(index)?, range.end - range.start);
                machine.give_bytes(match copied.contains(&(index, range.start)) {
                    true => file.copy(range.start, len)?,
                    false => file.slice(range.start, len)?,
                })?;
                if is_rewritten {
                    // It isn't needed any more; what is used in place is read again.
                    self.sources[index].release(range.start, len);
                }
            }
            let warnings = shards.finish()?;
            self.settle()?;
            let mut loaded = machine.finish()?;
            if is_rewritten {
                self.sources
                    .iter()
                    .for_each(|file| file.release(0, file.len()));
            }
            loaded.warnings.extend(warnings);
            loaded.warnings.extend(self.files.warnings());
            if let Some(experts) = &experts {
                let model = self.model.name().to_owned();
                (loaded.warnings)
                    .extend(experts.oddity().map(|what| Warning::Oddity { model, what }));
            }
            Ok(loaded)
        })
    }

    /// Replaces `groups` of `running` by those of these files, of which `plan` was made, as
    /// [`ModelFiles::swap`] does; only files that hold something of them are read and verified, as they were
    /// opened.
    ///
    /// Errors: files that can't be read or aren't what their hash says, another shape; the running model is
    /// unchanged then.
    pub fn swap_into<B: Backend>(
        &self,
        running: &Arc<Model<B>>,
        plan: ModelPlan,
        groups: &[Group],
    ) -> Result<(u64, Vec<Warning>)> {
        let options = LoadOptions::default();
        let machine = self.model.swap(running, plan, groups, options);
        let swapped = self.opened().drive(machine)?;
        self.settle()?;
        Ok(swapped)
    }

    /// The files with weights as they were opened.
    fn opened(&self) -> Opened<'_> {
        let mut opened = Opened::new(&*self.files);
        for (file, source) in self.model.files().iter().zip(&self.sources) {
            let source = Some(source.clone());
            opened.opened.insert(file.name.clone(), source);
        }
        opened
    }
}

impl Deref for LocalModel {
    type Target = ModelFiles;

    fn deref(&self) -> &ModelFiles {
        &self.model
    }
}

/// The adapter in `files`, which messages call `name`.
///
/// Errors: there is none, or it can't be read.
pub fn open_adapter(
    name: &str,
    files: &dyn FileSet,
    signatures: Option<Arc<dyn Signatures>>,
) -> Result<AdapterFiles> {
    if let Some(folder) = files.path().filter(|folder| !folder.is_dir()) {
        // Says what is wrong with the path.
        SourceFile::open(folder.join(ADAPTER_CONFIG))?;
    }
    let options = OpenOptions {
        stem: super::stem(name),
        prefix: files.prefix(),
        signatures,
        is_verified: files.is_verified(),
        ..OpenOptions::new(name)
    };
    let opening = AdapterFiles::open(options, Verification::ByLoading);
    let adapter = Opened::new(files).drive(opening)?;
    files.settle()?;
    Ok(adapter)
}

/// The manifest and the tensor map of the package in `files`, which messages call `name`. Whoever signed it
/// is not looked at.
///
/// Errors: there is none, or it can't be read.
pub fn read_package(name: &str, files: &dyn FileSet) -> Result<Package> {
    let options = OpenOptions {
        prefix: files.prefix(),
        ..OpenOptions::new(name)
    };
    Opened::new(files).drive(PackageFiles::open(options))
}

/// The file called `name` of `files` as it is now, if there is one.
///
/// Errors: it has more than `MAX_FILE_BYTES`, or can't be read.
pub fn read_small(files: &dyn FileSet, name: &str) -> Result<Option<Bytes>> {
    files.file(name)?.map(|file| file.read_small()).transpose()
}

/// Files of a set, each opened once.
struct Opened<'a> {
    files: &'a dyn FileSet,
    opened: HashMap<String, Option<SourceFile>>,
}

impl<'a> Opened<'a> {
    fn new(files: &'a dyn FileSet) -> Opened<'a> {
        Opened {
            files,
            opened: HashMap::new(),
        }
    }

    fn get(&mut self, name: &str) -> Result<Option<&SourceFile>> {
        if !self.opened.contains_key(name) {
            let file = self.files.file(name)?;
            self.opened.insert(name.to_owned(), file);
        }
        Ok(self.opened[name].as_ref())
    }

    fn expect(&mut self, name: &str) -> Result<SourceFile> {
        match self.get(name)? {
            Some(file) => Ok(file.clone()),
            // Says which file it is.
            None => expect_file(self.files, name),
        }
    }

    /// Gives `machine` what it wants.
    fn drive<T>(&mut self, mut machine: Machine<'_, T>) -> Result<T> {
        while let Some(want) = machine.wanted() {
            match want {
                Want::Len { name } => machine.give_len(self.get(&name)?.map(SourceFile::len))?,
                Want::Bytes { name, range } => {
                    let file = self.expect(&name)?;
                    // Of a mapped file, all there is costs nothing.
                    let len = file.len().saturating_sub(range.start);
                    machine.give_bytes(file.slice(range.start, len)?)?;
                }
            }
        }
        machine.finish()
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::fs;
    use std::path::Path;

    use sterna_engine::plan::PlanOptions;
    use sterna_engine::{Cpu, Logits, Session, SessionOptions};
    use sterna_kernels::Isa;

    use super::*;

    /// A copy of the test data's `model` in `folder`.
    fn copy(model: &str, folder: &Path) {
        let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        for entry in fs::read_dir(testdata.join(model)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
    }

    /// The model in `folder`, before its weights are loaded.
    pub(crate) fn opened(folder: &Path) -> (LocalModel, ModelPlan) {
        let files = LocalModel::open("model", Located::at(folder).unwrap(), None, None).unwrap();
        let plan = files.plan(&PlanOptions::default()).unwrap();
        (files, plan)
    }

    /// That model on one thread of the CPU.
    pub(crate) fn loaded(files: &LocalModel, plan: &ModelPlan) -> Loaded<Cpu> {
        let options = LoadFrom {
            weights: Weights::Mapped,
            experts: None,
            n_threads: 1,
            progress: &|_| {},
        };
        let cpu = Cpu::new(1, Isa::detect());
        files.load_on(plan.clone(), cpu, &options).unwrap()
    }

    fn logits(model: &Arc<Model<Cpu>>) -> Vec<f32> {
        let mut session = Session::new(Arc::clone(model), SessionOptions::new(8)).unwrap();
        session.forward(&[1, 5, 9], Logits::Last).unwrap()
    }

    #[test]
    fn groups_are_those_of_the_files_that_were_opened() {
        let dir = tempfile::tempdir().unwrap();
        copy("stories260K/hf", dir.path());
        let (files, plan) = opened(dir.path());
        let model = loaded(&files, &plan).model;
        let before = logits(&model);
        // Another file under the name, shorter than where the weights begin.
        let weights = dir.path().join("model.safetensors");
        fs::remove_file(&weights).unwrap();
        fs::write(&weights, "short").unwrap();
        files.swap_into(&model, plan, &[Group::Layer(1)]).unwrap();
        assert_eq!(logits(&model), before);
    }

    #[test]
    fn a_swap_tells_what_loading_tells() {
        let dir = tempfile::tempdir().unwrap();
        copy("rdrr-samples/v1-gemma3-q4k", dir.path());
        let manifest = dir.path().join("manifest.json");
        let text = fs::read_to_string(&manifest).unwrap();
        let mut json: Value = serde_json::from_str(&text).unwrap();
        json["quantizationInfo"]["kvCache"] = "q3".into();
        fs::write(&manifest, json.to_string()).unwrap();
        let (files, plan) = opened(dir.path());
        let Loaded {
            model, warnings, ..
        } = loaded(&files, &plan);
        let (_, swapped) = files.swap_into(&model, plan, &[Group::Layer(0)]).unwrap();
        let is_odd = |warning: &&Warning| matches!(warning, Warning::Oddity { what, .. } if what.contains("q3"));
        assert_eq!(warnings.iter().filter(is_odd).count(), 1, "{warnings:?}");
        assert_eq!(swapped.iter().filter(is_odd).count(), 1, "{swapped:?}");
    }
}
