//! Which models engines have, and the thread that loads them and lets them go.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Instant;

use sterna::receipt::Setup;
use sterna::swap::SwappedGroup;
use sterna::{Adapted, AdapterFiles, Context, Error, ErrorCode, Result};
use sterna_engine::lora::ActiveAdapter;
use sterna_engine::{Backend, CacheType, Model, SessionOptions};

use super::dispatch::{Dispatch, Errand};
use super::{AdapterKey, Adapters, LoadAdapter};

/// A model as an engine has it: no strings.
pub(super) struct EngineModel<B: Backend> {
    /// The model, with the adapters of its sequences.
    pub(super) adapted: Adapted<B>,
    /// The digest of its files, if it is known.
    pub(super) hash: Option<String>,
    /// 0 for the weights of its files; another number for each time that they were replaced.
    pub(super) weights: u64,
    /// Settings of its sequences.
    pub(super) session: SessionOptions,
    /// Says what computes answers, if receipts of them are written.
    pub(super) describe: Option<Arc<Describe<B>>>,
    cache_bytes: Arc<CacheBytes>,
    /// Adapters that requests may name, beside those of all sequences. All engines share them.
    pub(super) adapters: Arc<Adapters<B>>,
    /// Is told when this is gone.
    _guard: CopyGuard,
}

impl<B: Backend> EngineModel<B> {
    /// Data type of the caches of its sequences.
    pub(super) fn cache(&self) -> CacheType {
        self.session.cache_on(self.adapted.model().backend())
    }

    /// Bytes of the cache of a sequence of `len` tokens.
    pub(super) fn cache_bytes(&self, len: usize) -> u64 {
        (self.cache_bytes)(len, self.cache())
    }
}

/// Bytes of a sequence's cache by its number of tokens and its data type.
pub(crate) type CacheBytes = dyn Fn(usize, CacheType) -> u64 + Send + Sync;

/// Loads a model for the engines with these numbers; what it returns is in their order.
pub(crate) type LoadModel<B> = dyn Fn(&[usize]) -> Result<Vec<Adapted<B>>> + Send + Sync;

/// Replaces groups of the weights of all these models, which are equal, by those of the revision of that name: the groups
/// called so, or all that differ if none is named. What changed to what.
pub(crate) type SwapGroups<B> =
    dyn Fn(&[Arc<Model<B>>], &str, &[String]) -> Result<Vec<SwappedGroup>> + Send + Sync;

/// What answers are computed by, for receipts of them.
pub(crate) type Describe<B> = dyn Fn(&Adapted<B>) -> Result<Setup> + Send + Sync;

/// Why weights aren't replaced.
#[derive(Debug)]
pub(crate) enum NotSwapped {
    /// The weights of this model stay.
    Fixed,
    /// It isn't loaded.
    Unloaded,
    /// The revision can't be read, or isn't one of the model.
    Unfit(Error),
}

/// Opens an adapter.
pub(crate) type OpenFiles = dyn Fn() -> Result<AdapterFiles> + Send + Sync;

/// A copy of a model, on an engine.
struct CopyGuard {
    dispatch: Arc<Dispatch>,
    number: usize,
}

impl Drop for CopyGuard {
    fn drop(&mut self) {
        self.dispatch.freed(self.number);
    }
}

/// Where a model comes from.
pub(crate) struct ModelSource<B: Backend> {
    pub(crate) name: String,
    /// The digest of its files, if it is known.
    pub(crate) hash: Option<String>,
    /// Bytes that it takes on each engine.
    pub(crate) bytes: u64,
    pub(crate) session: SessionOptions,
    /// Without it, no receipts are written.
    pub(crate) describe: Option<Arc<Describe<B>>>,
    pub(crate) cache_bytes: Arc<CacheBytes>,
    /// As it is from the beginning, for each engine, if it is.
    pub(crate) loaded: Option<Vec<Adapted<B>>>,
    /// Without it, the model is there from the beginning to the end.
    pub(crate) load: Option<Box<LoadModel<B>>>,
    /// Without it, its weights stay.
    pub(crate) swap: Option<Box<SwapGroups<B>>>,
    /// Adapters that are loaded with it.
    pub(crate) adapters: Vec<AdapterSource>,
}

impl<B: Backend> ModelSource<B> {
    /// Bytes of a token in the cache; where nothing is loaded yet and no data type asked for, in f32.
    pub(crate) fn token_bytes(&self) -> u64 {
        let loaded = self.loaded.as_ref().and_then(|loaded| loaded.first());
        let cache = match loaded {
            Some(adapted) => self.session.cache_on(adapted.model().backend()),
            None => self.session.cache.unwrap_or(CacheType::F32),
        };
        let bytes = |len| (self.cache_bytes)(len, cache);
        bytes(1).saturating_sub(bytes(0))
    }
}

/// An adapter that is loaded with its model.
pub(crate) struct AdapterSource {
    pub(crate) key: Arc<AdapterKey>,
    pub(crate) open: Box<OpenFiles>,
    pub(crate) scale: f32,
}

/// The models that an engine has now, by number.
pub(super) struct Table<B: Backend> {
    all: RwLock<Vec<Option<Arc<EngineModel<B>>>>>,
}

impl<B: Backend> Table<B> {
    fn new() -> Table<B> {
        Table {
            all: RwLock::default(),
        }
    }

    /// The model with this number.
    pub(super) fn get(&self, number: usize) -> Option<Arc<EngineModel<B>>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.get(number)?.clone()
    }

    /// All of them, by number.
    pub(super) fn all(&self) -> Vec<Option<Arc<EngineModel<B>>>> {
        let all = self.all.read().unwrap_or_else(PoisonError::into_inner);
        all.clone()
    }

    fn set(&self, number: usize, model: Option<Arc<EngineModel<B>>>) {
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        if all.len() <= number {
            all.resize_with(number + 1, || None);
        }
        let before = std::mem::replace(&mut all[number], model);
        drop(all);
        // It may be the last one, which tells others.
        drop(before);
    }
}

/// Is told that the model with a number is there, with what loads its adapters, or is there no more.
pub(crate) type Tell = dyn Fn(usize, Option<Arc<dyn LoadAdapter>>) + Send + Sync;

/// All models, loaded or not, and the tables of the engines.
pub(crate) struct Library<B: Backend> {
    pub(super) tables: Vec<Arc<Table<B>>>,
    /// The adapters of those that are loaded, by number.
    adapters: Mutex<Vec<Option<Arc<Adapters<B>>>>>,
    sources: Mutex<Vec<Arc<ModelSource<B>>>>,
    /// Held while tables change.
    changing: Mutex<()>,
    /// How often weights of any model were replaced.
    swaps: AtomicU64,
    dispatch: Arc<Dispatch>,
    tell: Box<Tell>,
}

impl<B> Library<B>
where
    B: Backend + 'static,
    Model<B>: Send + Sync,
    ActiveAdapter<B>: Send,
{
    /// Of no model yet, for `n_engines`.
    pub(super) fn new(n_engines: usize, dispatch: Arc<Dispatch>, tell: Box<Tell>) -> Library<B> {
        Library {
            tables: (0..n_engines).map(|_| Arc::new(Table::new())).collect(),
            adapters: Mutex::default(),
            sources: Mutex::default(),
            changing: Mutex::default(),
            swaps: AtomicU64::new(0),
            dispatch,
            tell,
        }
    }

    fn changing(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the model `number` is loaded, with `adapters`, or isn't.
    fn set_adapters(&self, number: usize, adapters: Option<Arc<Adapters<B>>>) {
        let mut all = self.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() <= number {
            all.resize_with(number + 1, || None);
        }
        all[number] = adapters;
    }

    fn sources(&self) -> MutexGuard<'_, Vec<Arc<ModelSource<B>>>> {
        self.sources.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Errors: there would never be room for a model of so many bytes, called `name`.
    pub(crate) fn expect_room(&self, name: &str, bytes: u64) -> Result<()> {
        match self.dispatch.models_bytes() {
            Some(limit) if bytes > limit => {
                let message =
                    format!("the model {name} has {bytes} bytes: expected at most {limit}");
                Err(Error::new(ErrorCode::OutOfMemory, message))
            }
            _ => Ok(()),
        }
    }

    /// Adds a model; its number.
    ///
    /// Errors: an adapter that is to be there from the beginning doesn't fit; a number of engines that isn't right.
    pub(crate) fn add(&self, mut source: ModelSource<B>) -> Result<usize> {
        let mut sources = self.sources();
        let number = sources.len();
        let loaded = source.loaded.take();
        if loaded.is_none() && source.load.is_none() {
            let message = format!("{}: expected weights, or how to load them", source.name);
            return Err(Error::new(ErrorCode::InvalidRequest, message));
        }
        let (name, bytes) = (source.name.clone(), source.bytes);
        self.dispatch.add_model(name, bytes, source.load.is_some());
        let source = Arc::new(source);
        if let Some(loaded) = loaded {
            let engines: Vec<usize> = (0..self.tables.len()).collect();
            self.install(number, &source, &engines, loaded)?;
            self.dispatch.finish_load(number, Ok(()));
        }
        sources.push(source);
        Ok(number)
    }

    /// Gives `loaded`, the model `number`, to `engines`, with its adapters.
    fn install(
        &self,
        number: usize,
        source: &ModelSource<B>,
        engines: &[usize],
        loaded: Vec<Adapted<B>>,
    ) -> Result<()> {
        if loaded.len() != engines.len() {
            let message = format!(
                "{}: expected a model that is loaded for {} engines, found one for {}",
                source.name,
                engines.len(),
                loaded.len()
            );
            return Err(Error::new(ErrorCode::InvalidRequest, message));
        }
        let mut models = vec![None; self.tables.len()];
        for (engine, adapted) in engines.iter().zip(&loaded) {
            models[*engine] = Some(Arc::clone(adapted.model()));
        }
        let adapters = Arc::new(Adapters::new(models));
        for AdapterSource { key, open, scale } in &source.adapters {
            let files = open().with_context(|| format!("adapter {}", key.name))?;
            adapters.load_as(key, files, *scale)?;
        }
        for (engine, adapted) in engines.iter().zip(loaded) {
            self.hand_over(number, source, *engine, (adapted, 0), &adapters);
        }
        self.set_adapters(number, Some(Arc::clone(&adapters)));
        (self.tell)(number, Some(adapters));
        Ok(())
    }

    /// Gives `adapted`, the model `number`, to an engine, with what tells its weights from those of its files.
    fn hand_over(
        &self,
        number: usize,
        source: &ModelSource<B>,
        engine: usize,
        (adapted, weights): (Adapted<B>, u64),
        adapters: &Arc<Adapters<B>>,
    ) {
        self.dispatch.held(number);
        let model = EngineModel {
            adapted,
            weights,
            hash: source.hash.clone(),
            session: source.session,
            describe: source.describe.clone(),
            cache_bytes: Arc::clone(&source.cache_bytes),
            adapters: Arc::clone(adapters),
            _guard: CopyGuard {
                dispatch: Arc::clone(&self.dispatch),
                number,
            },
        };
        self.tables[engine].set(number, Some(Arc::new(model)));
    }

    /// Replaces groups of the weights of the model `number` by those of `revision`: the groups called `ids`, or all that
    /// differ if none is named. What is being answered ends with the weights that it began with; what begins has the
    /// new ones. What changed to what.
    ///
    /// Errors: nothing has changed then.
    pub(crate) fn swap(
        &self,
        number: usize,
        revision: &str,
        ids: &[String],
    ) -> std::result::Result<Vec<SwappedGroup>, NotSwapped> {
        let source = self.sources().get(number).map(Arc::clone);
        let source = source.ok_or(NotSwapped::Fixed)?;
        let swap = source.swap.as_ref().ok_or(NotSwapped::Fixed)?;
        let _changing = self.changing();
        let running: Vec<_> = self.tables.iter().map(|table| table.get(number)).collect();
        let Some(adapters) = running.iter().flatten().map(|own| &own.adapters).next() else {
            return Err(NotSwapped::Unloaded);
        };
        let forks = running.iter().map(|own| Some(own.as_ref()?.adapted.fork()));
        let forks: Vec<Option<Adapted<B>>> = forks.collect();
        let models = forks.iter().map(|own| Some(own.as_ref()?.model()));
        let models: Vec<Option<Arc<Model<B>>>> = models.map(Option::<&_>::cloned).collect();
        let there: Vec<Arc<Model<B>>> = models.iter().flatten().cloned().collect();
        let swapped = swap(&there, revision, ids).map_err(NotSwapped::Unfit)?;
        let weights = self.swaps.fetch_add(1, Ordering::Relaxed) + 1;
        adapters.set_models(models);
        for (engine, fork) in forks.into_iter().enumerate() {
            if let Some(adapted) = fork {
                self.hand_over(number, &source, engine, (adapted, weights), adapters);
            }
        }
        self.dispatch.swapped(number);
        Ok(swapped)
    }

    /// Loads all models for `engine` again, whose device is lost.
    ///
    /// Errors: one of them can't be loaded, which is [`ErrorCode::Unsupported`] if it never can.
    fn reopen(&self, engine: usize) -> Result<()> {
        let loaded = self.adapters.lock().unwrap_or_else(PoisonError::into_inner);
        let loaded: Vec<(usize, Arc<Adapters<B>>)> = (loaded.iter().enumerate())
            .filter_map(|(number, adapters)| Some((number, Arc::clone(adapters.as_ref()?))))
            .collect();
        // What is left of the device is of no use.
        for (number, _) in &loaded {
            self.tables[engine].set(*number, None);
        }
        let mut opened = Vec::with_capacity(loaded.len());
        for (number, adapters) in loaded {
            let source = Arc::clone(&self.sources()[number]);
            if self.dispatch.is_swapped(number) {
                let message = format!(
                    "{}: its weights were replaced, those of its files are others",
                    source.name
                );
                return Err(Error::new(ErrorCode::Unsupported, message));
            }
            let adapted = load_for(&source, &[engine])?.pop();
            let adapted = adapted.context("no model was loaded")?;
            adapters.move_to(engine, adapted.model())?;
            opened.push((number, source, adapted, adapters));
        }
        for (number, source, adapted, adapters) in opened {
            self.hand_over(number, &source, engine, (adapted, 0), &adapters);
        }
        Ok(())
    }

    /// Loads and unloads as is needed, until nothing more is asked.
    pub(super) fn run(&self) {
        while let Some(errand) = self.dispatch.next_errand() {
            match errand {
                Errand::Load { number, engines } => {
                    let begun = Instant::now();
                    let source = Arc::clone(&self.sources()[number]);
                    let _changing = self.changing();
                    let load = || {
                        let loaded = load_for(&source, &engines)?;
                        self.install(number, &source, &engines, loaded)
                    };
                    let installed = caught(load);
                    let installed = installed.with_context(|| format!("loading {}", source.name));
                    self.dispatch.tell_load(number, &installed, begun.elapsed());
                    self.dispatch.finish_load(number, installed);
                }
                Errand::Unload { number, reason } => {
                    let _changing = self.changing();
                    (self.tell)(number, None);
                    self.set_adapters(number, None);
                    self.tables.iter().for_each(|table| table.set(number, None));
                    self.dispatch.finish_unload(number, reason);
                }
                Errand::Reopen { engine } => {
                    let begun = Instant::now();
                    let _changing = self.changing();
                    let opened = caught(|| self.reopen(engine));
                    self.dispatch.reopened(engine, &opened, begun.elapsed());
                }
            }
        }
    }
}

/// Loads the model of `source` for the engines with these numbers.
fn load_for<B: Backend>(source: &ModelSource<B>, engines: &[usize]) -> Result<Vec<Adapted<B>>> {
    match &source.load {
        Some(load) => load(engines),
        None => {
            let message = format!("{}: it can't be loaded again", source.name);
            Err(Error::new(ErrorCode::Unsupported, message))
        }
    }
}

/// What `load` returns; an error if it panics, so that whoever waits for it is told.
fn caught(load: impl FnOnce() -> Result<()>) -> Result<()> {
    catch_unwind(AssertUnwindSafe(load))
        .unwrap_or_else(|_| Err(Error::new(ErrorCode::Compute, "its thread has panicked")))
}
