//! A loaded model.

use crate::backend::Backend;
use crate::config::ModelConfig;
use crate::head::screening::Screening;
use crate::weights::Weights;

/// Weights on a backend, with the shapes and constants they go with. Shared by all its sessions.
pub struct Model<B: Backend> {
    pub(crate) config: ModelConfig,
    pub(crate) weights: Weights<B::Linear, B::Vector>,
    /// The screen of the output head.
    pub(crate) screening: Option<Screening<B::Screen>>,
    pub(crate) backend: B,
}

impl<B: Backend> Model<B> {
    pub(crate) fn new(
        config: ModelConfig,
        weights: Weights<B::Linear, B::Vector>,
        screening: Option<Screening<B::Screen>>,
        backend: B,
    ) -> Model<B> {
        Model {
            config,
            weights,
            screening,
            backend,
        }
    }

    /// Shapes and constants of the model.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}
