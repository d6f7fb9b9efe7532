//! The models that requests may name, and how more are opened.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use sterna::swap::SwappedGroup;

use crate::engine::NotSwapped;
use crate::model::ModelText;

/// Models at once, loaded or not.
pub(crate) const MAX_MODELS: usize = 64;

/// Opens the model that a client calls so: a path, a name in a store, or whatever else the program takes.
pub(crate) type OpenModel = dyn Fn(&str) -> Result<Opened, String> + Send + Sync;

/// Replaces groups of the weights of the model with this number, by those of the revision of that name: the groups called
/// so, or all that differ if none is named.
pub(crate) type SwapModel =
    dyn Fn(usize, &str, &[String]) -> Result<Vec<SwappedGroup>, NotSwapped> + Send + Sync;

/// A model that was opened, of which nothing is loaded.
pub(crate) struct Opened {
    pub(crate) text: ModelText,
    /// Lets engines know it; its number.
    pub(crate) add: Box<dyn FnOnce() -> sterna::Result<usize>>,
}

/// All of them, by number.
pub(crate) struct Catalog {
    texts: RwLock<Vec<Arc<ModelText>>>,
    /// Without it, no others are opened.
    open: Option<Box<OpenModel>>,
    swap: Box<SwapModel>,
    /// One at a time is added.
    adding: Mutex<()>,
}

/// Why a model isn't added.
#[derive(Debug)]
pub(crate) enum NotAdded {
    /// No others are opened.
    Fixed,
    /// There are as many as may be.
    Full,
    /// One is called so.
    Taken(String),
    /// It can't be opened.
    Unfit(String),
    /// There would never be room for it.
    Failed(sterna::Error),
}

impl Catalog {
    /// Of models with these texts.
    pub(crate) fn new(
        texts: Vec<Arc<ModelText>>,
        open: Option<Box<OpenModel>>,
        swap: Box<SwapModel>,
    ) -> Catalog {
        Catalog {
            texts: RwLock::new(texts),
            open,
            swap,
            adding: Mutex::default(),
        }
    }

    /// The text sides of all of them.
    pub(crate) fn texts(&self) -> Vec<Arc<ModelText>> {
        let texts = self.texts.read().unwrap_or_else(PoisonError::into_inner);
        texts.clone()
    }

    /// Replaces groups of the weights of the model `number` by those of `revision`: the groups called `ids`, or all that
    /// differ if none is named. What changed to what.
    pub(crate) fn swap(
        &self,
        number: usize,
        revision: &str,
        ids: &[String],
    ) -> Result<Vec<SwappedGroup>, NotSwapped> {
        (self.swap)(number, revision, ids)
    }

    /// Opens the model that a client calls `name`, and adds it; its number. If it is there already, that one's.
    pub(crate) fn add(&self, name: &str) -> Result<usize, NotAdded> {
        let open = self.open.as_ref().ok_or(NotAdded::Fixed)?;
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        let Opened { text, add } = open(name).map_err(NotAdded::Unfit)?;
        let texts = self.texts();
        if let Some(number) = texts.iter().position(|other| other.name == text.name) {
            return match text.origin.is_some() && texts[number].origin == text.origin {
                true => Ok(number),
                false => Err(NotAdded::Taken(text.name)),
            };
        }
        if texts.len() >= MAX_MODELS {
            return Err(NotAdded::Full);
        }
        let number = add().map_err(NotAdded::Failed)?;
        let mut texts = self.texts.write().unwrap_or_else(PoisonError::into_inner);
        texts.push(Arc::new(text));
        Ok(number)
    }
}
