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
    pub(crate) loader: Arc<dyn LoadAdapter>,
    /// Without it, none are loaded at the request of clients.
    pub(crate) open: Option<Box<OpenAdapter>>,
}

/// All of them.
pub(crate) struct Shelf {
    /// By the index of the model.
    sources: Vec<Source>,
    offered: RwLock<Vec<Offered>>,
}

/// Why an adapter isn't loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotLoaded {
    /// This model takes none.
    Fixed,
    /// One is called so.
    Taken,
    /// There are as many as may be.
    Full,
    /// It can't be read, or isn't one of the model.
    Unfit(String),
}

impl Shelf {
    /// Of models with these sources; `loaded` are there from the beginning, of the model with the index.
    pub(crate) fn new(sources: Vec<Source>, loaded: Vec<(usize, Arc<AdapterKey>)>) -> Shelf {
        let offered = loaded.into_iter().map(|(model, key)| offered(model, key));
        Shelf {
            sources,
            offered: RwLock::new(offered.collect()),
        }
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
        let source = self.sources.get(model).ok_or(NotLoaded::Fixed)?;
        let open = source.open.as_ref().ok_or(NotLoaded::Fixed)?;
        let is_named = |offered: &Offered| offered.model == model && offered.key.name == name;
        let check = |all: &[Offered]| match all.iter().any(is_named) {
            true if replaces => Ok(()),
            true => Err(NotLoaded::Taken),
            false if all.len() >= MAX_ADAPTERS => Err(NotLoaded::Full),
            false => Ok(()),
        };
        check(&self.all())?;
        let files = open(path).map_err(NotLoaded::Unfit)?;
        let key = source.loader.load(name, files, scale);
        let key = key.map_err(|error| NotLoaded::Unfit(format!("{error:#}")))?;
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
