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
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
mod gpu;
mod head;
mod load;
mod lora;
mod model;
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
mod place;
mod plan;
mod rope;
mod sampler;
mod session;
mod stage;
mod swap;
mod weights;

pub use ahead::{Decoding, Drawn, MaybeSend};
pub use backend::{
    Attention, Backend, BackendError, CacheShape, CacheType, Continued, DeviceError,
    DeviceErrorKind, KvCache, LinearSource, LowRank, OutputLayout, Product, Rotation, ScreenedRows, Sequence, TernaryPacking, WeightData,
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
pub use generation::Group;
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
pub use gpu::{Gpu, GpuBuffer, GpuCache, GpuLinear, GpuReadback, GpuScreen, GpuVector, GpuWork};
pub use head::screening::HeadUse;
pub use head::{HeadOptions, HeadScreen};
pub use load::{LoadError, Loader};
pub use lora::{
    ActiveAdapter, Adapter, AdapterError, AdapterOptions, AdapterSource, LoraMatrix, LoraPair,
    Module, Orientation,
};
pub use model::{Model, Versions};
#[cfg(all(feature = "gpu", not(target_arch = "wasm32")))]
pub use place::{Either, GpuShare, Place, PlaceBuffer, PlaceCache, PlaceReadback};
pub use plan::{ModelPlan, PlanOptions, TensorRequest, TernaryRules};
pub use rope::{Angles, RopeConfig, RopeScaling};
pub use sampler::{Sampler, SamplerConfig, SamplerError};
pub use session::{Decoded, EngineError, Logits, Session, SessionOptions, Step};
pub use stage::{LinearLayer, Operation, Stage};
pub use swap::{Swap, SwapError};
