//! Token ids to logits: the model families, their loading, and the forward pass.
//!
//! For planning a model from parsed headers ([`ModelPlan`]), loading it from bytes fetched elsewhere
//! ([`Loader`]), running it ([`Session`]) and sampling tokens ([`Sampler`]). Not for text, files or the
//! network: this crate never sees a string of a prompt, a path or a URL.
//!
//! Where a model is computed is abstracted by the [`Backend`] trait: [`Cpu`] and, with the feature `gpu`,
//! `Gpu`, or `Hybrid` where that is chosen at run time.
#![forbid(unsafe_code)]

pub mod backend;
mod checkpoints;
pub mod compare;
pub mod config;
pub mod cpu;
mod error;
pub mod export;
mod family;
mod forward;
#[cfg(feature = "gpu")]
pub mod gpu;
mod halves;
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
pub mod hybrid;
pub mod load;
pub mod logprobs;
mod lookahead;
pub mod lora;
mod model;
pub mod plan;
pub mod rope;
pub mod sampling;
pub mod screening;
pub mod self_test;
pub mod session;
pub mod stage;
pub mod swap;
mod weight_set;
mod weights;

pub use backend::{Backend, BackendError, CacheType};
pub use config::ModelConfig;
pub use cpu::{Activations, Cpu};
pub use error::PlanError;
#[cfg(feature = "gpu")]
pub use gpu::Gpu;
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
pub use hybrid::Hybrid;
pub use load::{LoadError, Loader};
pub use logprobs::Logprobs;
pub use model::Model;
pub use plan::ModelPlan;
pub use sampling::{Chosen, Sampler, SamplerConfig, Sampling};
pub use session::{Decoded, EngineError, Logits, Session, SessionOptions, Step};
