//! Token ids to logits: the model families, their loading, and the forward pass.
//!
//! For planning a model from parsed headers ([`ModelPlan`]), loading it from bytes someone else
//! fetches ([`Loader`]), running it ([`Session`]) and choosing tokens ([`Sampler`]). Not for text,
//! files or the network: this crate never sees a string of a prompt, a path or a URL.
//!
//! Where a model is computed is behind the [`Backend`] trait: [`Cpu`] and, with the feature `gpu`,
//! `Gpu`, or `Place` where that is decided at run time.
#![forbid(unsafe_code)]

mod ahead;
mod backend;
mod compare;
mod config;
mod cpu;
mod error;
mod export;
mod family;
mod forward;
mod generation;
#[cfg(feature = "gpu")]
mod gpu;
mod load;
mod lora;
mod model;
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
mod place;
mod plan;
mod rope;
mod sampler;
mod screening;
mod session;
mod stage;
mod swap;
mod weights;

pub use backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, Continued, Decoding, DeviceError,
    DeviceErrorKind, Drawn, KvCache, LinearSource, LowRank, MaybeSend, OutputLayout, Product,
    Rotation, ScreenedRows, Sequence, TernaryPacking, WeightData,
};
pub use compare::{
    Agreement, Both, Compare, ComparedBuffer, ComparedLinear, Comparison, Difference, Measured,
    NoScreen,
};
pub use config::{LayerConfig, ModelConfig};
pub use cpu::{Activations, Cpu, CpuBuffer, CpuCache, CpuLinear};
pub use error::PlanError;
pub use export::{Exported, ExportedData, Exporter, GgufHead, i2_s};
pub use family::Family;
pub use generation::Versions;
#[cfg(feature = "gpu")]
pub use gpu::{Gpu, GpuBuffer, GpuCache, GpuLinear, GpuReadback, GpuScreen, GpuVector, GpuWork};
pub use load::{LoadError, Loader};
pub use lora::{
    ActiveAdapter, Adapter, AdapterError, AdapterOptions, AdapterSource, LoraMatrix, LoraPair,
    Module, Orientation,
};
pub use model::Model;
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
pub use place::{Either, GpuShare, Place, PlaceBuffer, PlaceCache, PlaceReadback};
pub use plan::{HeadOptions, HeadScreen, ModelPlan, PlanOptions, TensorRequest, TernaryRules};
pub use rope::{Angles, RopeConfig, RopeScaling};
pub use sampler::{Sampler, SamplerConfig, SamplerError, Sampling};
pub use screening::HeadUse;
pub use session::{Decoded, EngineError, Logits, Session, SessionOptions, Step};
pub use stage::{LinearLayer, Operation, Stage};
pub use swap::{Swap, SwapError};
pub use weights::Group;
