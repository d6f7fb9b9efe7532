//! A loaded model.

use crate::backend::Backend;
use crate::config::ModelConfig;
use crate::weights::Weights;

/// Weights on a backend, with the shapes and constants they go with. Shared by all its sessions.
pub struct Model<B: Backend> {
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights<B::Linear, B::Vector>,
    pub(crate) backend: B,
}

impl<B: Backend> Model<B> {
    pub(crate) fn new(
        config: ModelConfig,
        weights: Weights<B::Linear, B::Vector>,
        backend: B,
    ) -> Model<B> {
        Model {
            config,
            weights,
            backend,
        }
    }

    /// Shapes and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}
