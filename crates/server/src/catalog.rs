//! The models that requests may name, and how more are opened.

use std::sync::{Arc, Mutex, PoisonError, RwLock};

use crate::model::ModelText;

/// Models at once, loaded or not.
pub(crate) const MAX_MODELS: usize = 64;

/// Opens the model that a client calls so: a path, a name in a store, or whatever else the program takes.
pub(crate) type OpenModel = dyn Fn(&str) -> Result<Opened, String> + Send + Sync;

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
    /// One at a time is added.
    adding: Mutex<()>,
}

/// Why a model isn't added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotAdded {
    /// No others are opened.
    Fixed,
    /// There are as many as may be.
    Full,
    /// One is called so.
    Taken(String),
    /// It can't be opened.
    Unfit(String),
}

impl Catalog {
    /// Of models with these texts.
    pub(crate) fn new(texts: Vec<Arc<ModelText>>, open: Option<Box<OpenModel>>) -> Catalog {
        Catalog {
            texts: RwLock::new(texts),
            open,
            adding: Mutex::default(),
        }
    }

    /// The text sides of all of them.
    pub(crate) fn texts(&self) -> Vec<Arc<ModelText>> {
        let texts = self.texts.read().unwrap_or_else(PoisonError::into_inner);
        texts.clone()
    }

    /// Opens the model that a client calls `name`, and adds it; its number.
    pub(crate) fn add(&self, name: &str) -> Result<usize, NotAdded> {
        let open = self.open.as_ref().ok_or(NotAdded::Fixed)?;
        let _adding = self.adding.lock().unwrap_or_else(PoisonError::into_inner);
        if self.texts().len() >= MAX_MODELS {
            return Err(NotAdded::Full);
        }
        let Opened { text, add } = open(name).map_err(NotAdded::Unfit)?;
        if self.texts().iter().any(|other| other.name == text.name) {
            return Err(NotAdded::Taken(text.name));
        }
        let number = add().map_err(|error| NotAdded::Unfit(format!("{error:#}")))?;
        let mut texts = self.texts.write().unwrap_or_else(PoisonError::into_inner);
        texts.push(Arc::new(text));
        Ok(number)
    }
}
