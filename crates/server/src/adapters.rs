//! The adapters that requests may name, and how more are loaded.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::{SystemTime, UNIX_EPOCH};

use sterna::AdapterFiles;

use crate::engine::{AdapterKey, LoadAdapter};

/// Adapters at once, of all models.
pub(crate) const MAX_ADAPTERS: usize = 64;

/// Opens the adapter that a client calls so: a path, a name in a store, or whatever else the program takes.
pub(crate) type OpenAdapter = dyn Fn(&str) -> Result<AdapterFiles, String> + Send + Sync;

/// An adapter that requests may name.
#[derive(Debug, Clone)]
pub(crate) struct Offered {
    /// The index of its model.
    pub(crate) model: usize,
    /// When it was loaded, in seconds since 1970.
    pub(crate) created: u64,
    pub(crate) key: Arc<AdapterKey>,
}

/// Where a model's adapters come from.
pub(crate) struct Source {
    /// What loads them, while the model is loaded.
    pub(crate) loader: Option<Arc<dyn LoadAdapter>>,
    /// Without it, none are loaded at the request of clients.
    pub(crate) open: Option<Arc<OpenAdapter>>,
    /// Those that are loaded with the model.
    pub(crate) fixed: Vec<Arc<AdapterKey>>,
}

/// All of them.
#[derive(Default)]
pub(crate) struct Shelf {
    /// By the number of the model.
    sources: RwLock<Vec<Source>>,
    offered: RwLock<Vec<Offered>>,
}

/// Why an adapter isn't loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotLoaded {
    /// This model takes none.
    Fixed,
    /// The model isn't loaded.
    Unloaded,
    /// One is called so.
    Taken,
    /// There are as many as may be.
    Full,
    /// It can't be read, or isn't one of the model.
    Unfit(String),
}

impl Shelf {
    /// Adds the next model.
    pub(crate) fn add(&self, source: Source) {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        let model = sources.len();
        let fixed = source
            .fixed
            .iter()
            .map(|key| offered(model, Arc::clone(key)));
        let mut all = self.offered.write().unwrap_or_else(PoisonError::into_inner);
        all.extend(fixed);
        sources.push(source);
    }

    /// The model `model` is loaded, with what loads its adapters, or isn't any more: those that were loaded by request
    /// are gone with it then.
    pub(crate) fn set_loader(&self, model: usize, loader: Option<Arc<dyn LoadAdapter>>) {
        let mut sources = self.sources.write().unwrap_or_else(PoisonError::into_inner);
        let Some(source) = sources.get_mut(model) else {
            return;
        };
        if loader.is_none() {
            let is_fixed =
                |key: &Arc<AdapterKey>| source.fixed.iter().any(|own| Arc::ptr_eq(own, key));
            let mut all = self.offered.write().unwrap_or_else(PoisonError::into_inner);
            all.retain(|offered| offered.model != model || is_fixed(&offered.key));
        }
        source.loader = loader;
    }

    /// How many adapters of the model `model` were loaded by request.
    pub(crate) fn n_loaded(&self, model: usize) -> usize {
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        let fixed = sources.get(model).map(|source| source.fixed.as_slice());
        let is_fixed = |key: &Arc<AdapterKey>| {
            let mut fixed = fixed.unwrap_or_default().iter();
            fixed.any(|own| Arc::ptr_eq(own, key))
        };
        let all = self.all();
        let own = all.iter().filter(|offered| offered.model == model);
        own.filter(|offered| !is_fixed(&offered.key)).count()
    }

    /// Those that are offered now.
    pub(crate) fn all(&self) -> Vec<Offered> {
        let offered = self.offered.read();
        offered.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Loads the one called `path` for the model `model`, to be called `name`. In place of one that is called so only
    /// if `replaces`: what is being computed with that one is finished with it.
    pub(crate) fn load(
        &self,
        model: usize,
        name: &str,
        path: &str,
        scale: f32,
        replaces: bool,
    ) -> Result<(), NotLoaded> {
        let (open, loader) = {
            let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
            let source = sources.get(model).ok_or(NotLoaded::Fixed)?;
            let open = source.open.clone().ok_or(NotLoaded::Fixed)?;
            (open, source.loader.clone().ok_or(NotLoaded::Unloaded)?)
        };
        let is_named = |offered: &Offered| offered.model == model && offered.key.name == name;
        let check = |all: &[Offered]| match all.iter().any(is_named) {
            true if replaces => Ok(()),
            true => Err(NotLoaded::Taken),
            false if all.len() >= MAX_ADAPTERS => Err(NotLoaded::Full),
            false => Ok(()),
        };
        check(&self.all())?;
        let files = open(path).map_err(NotLoaded::Unfit)?;
        let key = AdapterKey::new(name);
        let loaded = loader.load_as(&key, files, scale);
        loaded.map_err(|error| NotLoaded::Unfit(format!("{error:#}")))?;
        // The model may have been unloaded meanwhile, and loaded again.
        let sources = self.sources.read().unwrap_or_else(PoisonError::into_inner);
        let now = sources.get(model).and_then(|source| source.loader.as_ref());
        if !now.is_some_and(|now| Arc::ptr_eq(now, &loader)) {
            return Err(NotLoaded::Unloaded);
        }
        let mut all = self.offered.write().unwrap_or_else(PoisonError::into_inner);
        // Others may have been loaded meanwhile.
        check(&all)?;
        all.retain(|offered| !is_named(offered));
        all.push(offered(model, key));
        Ok(())
    }

    /// Offers the one called `name` of the model `model` no more; false if there is none.
    pub(crate) fn unload(&self, model: usize, name: &str) -> bool {
        let mut all = self.offered.write().unwrap_or_else(PoisonError::into_inner);
        let before = all.len();
        all.retain(|offered| offered.model != model || offered.key.name != name);
        all.len() < before
    }
}

fn offered(model: usize, key: Arc<AdapterKey>) -> Offered {
    let created = SystemTime::now().duration_since(UNIX_EPOCH);
    Offered {
        model,
        created: created.unwrap_or_default().as_secs(),
        key,
    }
}
