//! sterna-engine.
#![forbid(unsafe_code)]

mod sampler;

pub use sampler::{Sampler, SamplerConfig, SamplerError};
