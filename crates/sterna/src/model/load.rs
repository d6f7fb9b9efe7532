//! From a model's files to the engine: the bytes it requests, verified, in the order of its requests.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use sterna_delivery::hash::Expected;
use sterna_engine::plan::TensorRequest;
use sterna_engine::{Backend, Loader, Model, ModelPlan, SessionOptions};

use super::ModelFiles;
use crate::error::{Context, Result};
use crate::sequence::Sequence;
use crate::want::{Files, Joined, Machine};
use crate::warning::Warning;

/// How to load a model.
#[derive(Default)]
pub struct LoadOptions<'a> {
    /// Who verifies files whose hashes are known.
    pub verification: Verification,
    /// Called with the number of bytes of weights loaded each time there are more.
    pub progress: Option<Box<dyn FnMut(u64) + 'a>>,
    /// Computed while weights arrive ([`Loader::prefill`]).
    pub prompt: Option<EarlyPrompt>,
}

/// The beginning of a sequence that is to be there as soon as its model.
#[derive(Debug, Clone)]
pub struct EarlyPrompt {
    /// Its tokens, of which the first chunk is computed.
    pub ids: Vec<u32>,
    /// Settings of the sequence.
    pub session: SessionOptions,
}

/// Who verifies files whose hashes are known, before a model is made of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verification {
    /// Loading: such a file is requested as a whole, and kept in memory.
    #[default]
    ByLoading,
    /// The provider of the bytes: it checks [`ModelFiles::checks`] before it gives a range.
    BySource,
}

/// A loaded model.
pub struct Loaded<B: Backend> {
    /// The model.
    pub model: Arc<Model<B>>,
    /// The sequence of [`LoadOptions::prompt`].
    pub sequence: Option<Sequence<B>>,
    /// Oddities of its files.
    pub warnings: Vec<Warning>,
}

impl ModelFiles {
    /// Loads the weights of `plan`, made from these files, onto `backend`.
    pub fn load<'a, B: Backend + 'a>(
        &'a self,
        plan: ModelPlan,
        backend: B,
        options: LoadOptions<'a>,
    ) -> Machine<'a, Loaded<B>> {
        Machine::new(move |files| self.run_load(plan, backend, options, files))
    }

    async fn run_load<B: Backend>(
        &self,
        plan: ModelPlan,
        backend: B,
        mut options: LoadOptions<'_>,
        files: Files,
    ) -> Result<Loaded<B>> {
        let mut shards = Shards::new(self, files, options.verification);
        let oddity = |what: String| Warning::Oddity {
            model: self.name().to_owned(),
            what,
        };
        let configured = plan.oddity().map(|what| oddity(what.to_owned()));
        let mut loader = Loader::new(plan, backend);
        let mut ids = Vec::new();
        if let Some(prompt) = options.prompt.take() {
            ids.clone_from(&prompt.ids);
            let begun = loader.prefill(prompt.ids, prompt.session);
            begun.with_context(|| self.name())?;
        }
        while let Some(want) = loader.wanted() {
            let bytes = shards.tensor(want).await?;
            let len = want.len;
            loader.feed(bytes).with_context(|| self.name())?;
            if let Some(progress) = &mut options.progress {
                progress(len);
            }
        }
        // Files that hold no weights of the plan must be intact too.
        shards.verify_rest().await?;
        let mut warnings = shards.warnings;
        warnings.extend(self.warnings());
        warnings.extend(configured);
        // One of a kind is enough: oddities of a checkpoint usually affect all its layers.
        let first = loader.warnings().first().map(ToString::to_string);
        warnings.extend(first.map(oddity));
        let loaded = loader.finish_with_session();
        let loaded = loaded.with_context(|| self.name())?;
        Ok(Loaded {
            model: loaded.model,
            sequence: loaded.session.map(|session| Sequence::of(session, ids)),
            warnings,
        })
    }
}

/// Weight files as they arrive, verified where the provider hasn't done so.
pub(crate) struct Shards<'a> {
    of: &'a ModelFiles,
    files: Files,
    checks: Vec<Option<Expected>>,
    /// Files that were verified, whole.
    verified: HashMap<usize, Bytes>,
    /// The tensor that was converted last, by the index of its file.
    converted: Option<(usize, Bytes)>,
    pub(super) warnings: Vec<Warning>,
}

impl<'a> Shards<'a> {
    pub(crate) fn new(of: &'a ModelFiles, files: Files, verification: Verification) -> Shards<'a> {
        Shards {
            checks: match verification {
                Verification::ByLoading => of.checks(),
                Verification::BySource => Vec::new(),
            },
            of,
            files,
            verified: HashMap::new(),
            converted: None,
            warnings: Vec::new(),
        }
    }

    /// The bytes of `want`, from verified files.
    pub(crate) async fn tensor(&mut self, want: &TensorRequest) -> Result<Bytes> {
        let Some(all) = self.of.converted(want)? else {
            self.converted = None;
            return self.made(want).await;
        };
        let whole = match self.converted.take() {
            Some((file, whole)) if file == want.file => whole,
            _ => self.made(&all).await?,
        };
        self.converted = Some((want.file, whole.clone()));
        let len = whole.len() as u64;
        let end = want.offset.checked_add(want.len);
        let end = end.filter(|end| *end <= len).with_context(|| {
            let TensorRequest {
                name,
                offset,
                len: wanted,
                ..
            } = want;
            format!("tensor `{name}`: wanted {wanted} bytes at offset {offset}, but it has {len}")
        })?;
        Ok(whole.slice(want.offset as usize..end as usize))
    }

    /// The same; parts are joined as they arrive.
    async fn made(&mut self, want: &TensorRequest) -> Result<Bytes> {
        let parts = self.of.parts(want)?;
        let mut stored = Joined::new(&parts);
        for (file, range) in parts {
            stored.push(self.bytes(file, range).await?)?;
        }
        self.of.make(want, stored.finish())
    }

    /// Oddities of the files so far.
    pub(crate) fn into_warnings(self) -> Vec<Warning> {
        self.warnings
    }

    async fn bytes(&mut self, file: usize, range: std::ops::Range<u64>) -> Result<Bytes> {
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        if self.checks.get(file).copied().flatten().is_none() {
            let name = &self.of.files[file].name;
            return Ok(self.files.bytes(name, range).await);
        }
        let whole = self.whole(file).await?;
        Ok(whole.slice(range.start as usize..range.end as usize))
    }

    /// The file with this index, verified.
    async fn whole(&mut self, file: usize) -> Result<Bytes> {
        if let Some(bytes) = self.verified.get(&file) {
            return Ok(bytes.clone());
        }
        let entry = &self.of.files[file];
        let bytes = match entry.len {
            0 => Bytes::new(),
            len => self.files.bytes(&entry.name, 0..len).await,
        };
        if let Some(expected) = self.checks.get(file).copied().flatten() {
            let verified = expected.verify(&bytes);
            let verified = verified.with_context(|| entry.label.clone())?;
            self.warnings
                .extend(Warning::of_verified(verified, || entry.label.clone()));
        }
        self.verified.insert(file, bytes.clone());
        Ok(bytes)
    }

    /// Verifies the files that nothing was requested from.
    pub(super) async fn verify_rest(&mut self) -> Result<()> {
        for file in 0..self.checks.len() {
            if self.checks[file].is_some() {
                self.whole(file).await?;
            }
        }
        Ok(())
    }
}
