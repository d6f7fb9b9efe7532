//! Adapters that requests may name: each of their sequences is computed with one of them, or with none.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use sterna::receipt::AdapterId;
use sterna::{AdapterFiles, Context, ErrorCode, Result};
use sterna_engine::lora::{ActiveAdapter, AdapterOptions, AdapterSource};
use sterna_engine::{Backend, Model};

/// Stands for a loaded adapter, which is kept as long as something has this.
#[derive(Debug)]
pub(crate) struct AdapterKey {
    /// No other adapter has or had it.
    pub(super) id: usize,
    pub(crate) name: String,
}

impl AdapterKey {
    /// A new one, for an adapter called `name`.
    pub(crate) fn new(name: &str) -> Arc<AdapterKey> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        Arc::new(AdapterKey {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            name: name.to_owned(),
        })
    }
}

/// The loaded adapters of a model, on every engine.
pub(crate) struct Adapters<B: Backend> {
    /// By engine; `None` where the model isn't, as the device is lost.
    models: Mutex<Vec<Option<Arc<Model<B>>>>>,
    all: Mutex<Vec<Loaded<B>>>,
}

/// What a key stands for.
struct Loaded<B: Backend> {
    key: Weak<AdapterKey>,
    /// What tells it from others.
    id: AdapterId,
    /// Where it is loaded from again, for a device that was lost.
    source: AdapterSource,
    scale: f32,
    /// By engine; `None` on those whose device is lost.
    adapters: Vec<Option<ActiveAdapter<B>>>,
}

impl<B: Backend> Loaded<B> {
    fn is_of(&self, key: &AdapterKey) -> bool {
        self.key.as_ptr() == std::ptr::from_ref(key)
    }
}

impl<B: Backend> Adapters<B> {
    /// None yet, of a model that each engine has its own of.
    pub(crate) fn new(models: Vec<Option<Arc<Model<B>>>>) -> Adapters<B> {
        Adapters {
            models: Mutex::new(models),
            all: Mutex::default(),
        }
    }

    /// Goes on with `models`, which are forks of those before: the adapters stay.
    pub(super) fn set_models(&self, models: Vec<Option<Arc<Model<B>>>>) {
        let mut own = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::replace(&mut *own, models);
        drop(own);
        // They may be the last ones, which takes time.
        drop(before);
    }

    fn all(&self) -> MutexGuard<'_, Vec<Loaded<B>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The adapter that `key` stands for, of the engine `number`.
    pub(super) fn get(&self, key: &AdapterKey, number: usize) -> Option<ActiveAdapter<B>> {
        let all = self.all();
        let loaded = all.iter().find(|loaded| loaded.is_of(key))?;
        loaded.adapters.get(number)?.clone()
    }

    /// What tells the adapter of `key` from those that compute something else.
    pub(super) fn id(&self, key: &AdapterKey) -> Option<AdapterId> {
        let all = self.all();
        let loaded = all.iter().find(|loaded| loaded.is_of(key))?;
        Some(loaded.id.clone())
    }

    /// Takes `model` for that of the engine `number`, whose device was lost, and loads all adapters for it.
    ///
    /// Errors: they can't be loaded; the engine is as it was.
    pub(super) fn move_to(&self, number: usize, model: &Arc<Model<B>>) -> Result<()> {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let mut all = self.all();
        let mut loaded = Vec::with_capacity(all.len());
        for Loaded { source, scale, .. } in &*all {
            let adapter = model.load_adapter(source.clone(), AdapterOptions::default());
            loaded.push(ActiveAdapter {
                adapter: adapter.with_context(|| source.name.clone())?,
                scale: *scale,
            });
        }
        for (own, adapter) in all.iter_mut().zip(loaded) {
            own.adapters[number] = Some(adapter);
        }
        models[number] = Some(Arc::clone(model));
        Ok(())
    }

    /// Drops those that nothing stands for any more; the ids of the others.
    pub(super) fn keep_named(&self) -> Vec<usize> {
        let mut all = self.all();
        all.retain(|loaded| loaded.key.strong_count() > 0);
        let ids = all
            .iter()
            .filter_map(|loaded| Some(loaded.key.upgrade()?.id));
        ids.collect()
    }
}

/// Where adapters are loaded.
pub(crate) trait LoadAdapter: Send + Sync {
    /// Loads `files` for every engine, to be known as `key`; updates are scaled by `scale`.
    ///
    /// Errors: its matrices don't fit the model; no device is left.
    fn load_as(&self, key: &Arc<AdapterKey>, files: AdapterFiles, scale: f32) -> Result<()>;

    /// How many there are.
    #[cfg(test)]
    fn n_loaded(&self) -> usize;
}

impl<B> LoadAdapter for Adapters<B>
where
    B: Backend,
    Model<B>: Send + Sync,
    ActiveAdapter<B>: Send,
{
    fn load_as(&self, key: &Arc<AdapterKey>, files: AdapterFiles, scale: f32) -> Result<()> {
        let refusal = files.refusal();
        let id = AdapterId {
            name: key.name.clone(),
            blake3: files.digest().into(),
            scale,
            dtype: None,
        };
        // Until it is loaded everywhere, no engine comes back.
        let models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut adapters, mut lost) = (Vec::new(), None);
        for model in &*models {
            let Some(model) = model else {
                adapters.push(None);
                continue;
            };
            let loaded = model.load_adapter(files.source.clone(), AdapterOptions::default());
            match loaded.with_context(|| refusal.clone()) {
                Ok(adapter) => adapters.push(Some(ActiveAdapter { adapter, scale })),
                // Nothing is asked of that engine any more.
                Err(error) if error.code() == ErrorCode::DeviceLost => {
                    adapters.push(None);
                    lost = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        if let Some(error) = lost.filter(|_| adapters.iter().all(Option::is_none)) {
            return Err(error);
        }
        self.all().push(Loaded {
            key: Arc::downgrade(key),
            id,
            source: files.source,
            scale,
            adapters,
        });
        Ok(())
    }

    #[cfg(test)]
    fn n_loaded(&self) -> usize {
        self.all().len()
    }
}
