//! A loaded model.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::Backend;
use crate::config::ModelConfig;
use crate::rope::Rope;
use crate::weight_set::{WeightSet, WeightVersions};

/// Weights on a backend, with the shapes and constants they go with. Shared by all its sessions.
///
/// Weights are held in groups (the embedding table, each layer, the output head), any of which can be
/// replaced while the model runs: see [`Swap`](crate::swap::Swap).
pub struct Model<B: Backend> {
    pub(crate) config: ModelConfig,
    /// Its forks have the same.
    pub(crate) backend: Arc<B>,
    /// The weights that the next step is computed with.
    current: Mutex<Arc<WeightSet<B>>>,
    /// The rotations of the latest session, and how many positions it holds: the next will mostly be as long, and have the
    /// same.
    ropes: Mutex<(usize, Vec<Rope>)>,
}

impl<B: Backend> Model<B> {
    pub(crate) fn new(config: ModelConfig, backend: B, weights: WeightSet<B>) -> Model<B> {
        Model {
            config,
            backend: Arc::new(backend),
            current: Mutex::new(Arc::new(weights)),
            ropes: Mutex::default(),
        }
    }

    /// The rotations of a session of `ctx_len` positions.
    pub(crate) fn ropes(&self, ctx_len: usize) -> Vec<Rope> {
        let mut known = self.ropes.lock().unwrap_or_else(PoisonError::into_inner);
        if known.0 != ctx_len || known.1.is_empty() {
            *known = (ctx_len, Rope::all(&self.config.ropes, ctx_len));
        }
        known.1.clone()
    }

    /// Another model, which shares the backend and the weights of this one: what is
    /// [replaced](crate::swap::Swap) in one of them stays as it was in the other. Adapters that were loaded for one are
    /// adapters of the other.
    pub fn fork(&self) -> Arc<Model<B>> {
        Arc::new(Model {
            config: self.config.clone(),
            backend: Arc::clone(&self.backend),
            current: Mutex::new(self.current()),
            ropes: Mutex::default(),
        })
    }

    /// Shapes and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// The backend it is computed on.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The generation of weights that the next step is computed with, and the versions of its groups.
    pub fn versions(&self) -> WeightVersions {
        self.current().versions()
    }

    /// How often weights have been replaced, as [`Model::versions`] says.
    pub fn generation(&self) -> u64 {
        self.current().number()
    }

    /// The weights to compute a step with. They stay alive while held, whatever is published meanwhile.
    pub(crate) fn current(&self) -> Arc<WeightSet<B>> {
        Arc::clone(&self.lock())
    }

    /// Publishes a generation derived from the current one, for later steps; returns its number.
    ///
    /// Errors: those of `replace`; nothing has changed then.
    pub(crate) fn publish<E>(
        &self,
        replace: impl FnOnce(WeightSet<B>) -> Result<WeightSet<B>, E>,
    ) -> Result<u64, E> {
        let mut current = self.lock();
        let next = replace(current.next())?;
        let number = next.number();
        let old = std::mem::replace(&mut *current, Arc::new(next));
        // Freeing weights takes time, during which steps may begin.
        drop(current);
        drop(old);
        Ok(number)
    }

    fn lock(&self) -> MutexGuard<'_, Arc<WeightSet<B>>> {
        // The generation behind this lock is replaced as a whole or not at all.
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
