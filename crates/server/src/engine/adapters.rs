//! Adapters that requests may name: each of their sequences is computed with one of them, or with none.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use sterna::{AdapterFiles, Context, Result};
use sterna_engine::lora::{ActiveAdapter, AdapterOptions};
use sterna_engine::{Backend, Model};

/// Stands for a loaded adapter, which is kept as long as something has this.
#[derive(Debug)]
pub(crate) struct AdapterKey {
    /// No other adapter has or had it.
    pub(super) id: usize,
    pub(crate) name: String,
}

/// The loaded adapters of a model.
pub(crate) struct Adapters<B: Backend> {
    model: Arc<Model<B>>,
    all: Mutex<Vec<(Weak<AdapterKey>, ActiveAdapter<B>)>>,
}

impl<B: Backend> Adapters<B> {
    /// None yet.
    pub(crate) fn new(model: Arc<Model<B>>) -> Adapters<B> {
        Adapters {
            model,
            all: Mutex::default(),
        }
    }

    fn all(&self) -> MutexGuard<'_, Vec<(Weak<AdapterKey>, ActiveAdapter<B>)>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The adapter that `key` stands for.
    pub(super) fn get(&self, key: &AdapterKey) -> Option<ActiveAdapter<B>> {
        let all = self.all();
        let found = all
            .iter()
            .find(|(own, _)| own.as_ptr() == std::ptr::from_ref(key));
        found.map(|(_, adapter)| adapter.clone())
    }

    /// Drops those that nothing stands for any more; the ids of the others.
    pub(super) fn keep_named(&self) -> Vec<usize> {
        let mut all = self.all();
        all.retain(|(key, _)| key.strong_count() > 0);
        let ids = all.iter().filter_map(|(key, _)| Some(key.upgrade()?.id));
        ids.collect()
    }
}

/// Where adapters are loaded.
pub(crate) trait LoadAdapter: Send + Sync {
    /// Loads `files` under the name `name`; its updates are scaled by `scale`.
    ///
    /// Errors: its matrices don't fit the model.
    fn load(&self, name: &str, files: AdapterFiles, scale: f32) -> Result<Arc<AdapterKey>>;
}

impl<B> LoadAdapter for Adapters<B>
where
    B: Backend,
    Model<B>: Send + Sync,
    ActiveAdapter<B>: Send,
{
    fn load(&self, name: &str, files: AdapterFiles, scale: f32) -> Result<Arc<AdapterKey>> {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let refusal = files.refusal();
        let adapter = self
            .model
            .load_adapter(files.source, AdapterOptions::default());
        let adapter = adapter.with_context(|| refusal)?;
        let key = Arc::new(AdapterKey {
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            name: name.to_owned(),
        });
        let active = ActiveAdapter { adapter, scale };
        self.all().push((Arc::downgrade(&key), active));
        Ok(key)
    }
}
