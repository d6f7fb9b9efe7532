//! Language model inference on GPUs.
//!
//! For compute kernels in WGSL and what is needed to run them well: choosing a device, memory, pipelines, and
//! recorded commands that are replayed without allocating. Not for deciding what to compute: shapes, order
//! and weights come from `sterna-engine`.
//!
//! - [`Device`] is an adapter with the negotiated features and limits;
//! - [`memory`] has buffers, pools of them, and uploads in bounded memory;
//! - [`Recorder`] collects dispatches and makes [`Commands`] of them, which [`Device::submit`] runs in
//!   one pass any number of times;
//! - [`kernels`] has a function for each operation, which checks shapes and records dispatches;
//! - [`graph`] collects operations, fuses them, and replays what it has recorded before;
//! - [`tuning`] overrides the default launch configurations, and measures which are fastest.
//!
//! It is built on `wgpu`, which the public API doesn't expose: natively on Vulkan, Metal and DX12. For
//! `wasm32-unknown-unknown` a browser's WebGPU is spoken to directly, by the same names. There no call may
//! block: devices are opened by [`Device::open_async`], and a [`Submission`] is awaited.
//!
//! ```no_run
//! use sterna_gpu::{Device, DeviceOptions, Recorder, kernels};
//! use sterna_gpu::kernels::Rows;
//!
//! let device = Device::open(&DeviceOptions::default())?;
//! let (x, y) = (device.upload(&[1.0f32, 2.0, 3.0])?, device.upload(&[1.0f32; 3])?);
//! let mut recorder = Recorder::new(&device);
//! kernels::elementwise::add(&mut recorder, Rows::new(&x, 1, 3), Rows::new(&y, 1, 3))?;
//! device.submit(&[&recorder.finish()?], &[])?.wait()?;
//! assert_eq!(device.read::<f32>(&x, 0..3)?, [2.0, 3.0, 4.0]);
//! # Ok::<(), sterna_gpu::GpuError>(())
//! ```

#[cfg(target_arch = "wasm32")]
mod browser;
mod checksum;
mod error;
mod features;
pub mod graph;
pub mod shader;
pub mod tuning;
mod weights;

mod device;
pub mod kernels;
pub mod memory;
mod record;

#[cfg(not(target_arch = "wasm32"))]
pub(crate) use ::wgpu;
#[cfg(target_arch = "wasm32")]
pub(crate) use browser as wgpu;

pub use error::GpuError;
pub use features::{AdapterInfo, AdapterKind, Api, DeviceOptions, Features, Limits};
pub use tuning::Tuning;
pub use weights::WeightKind;

pub use device::{AdapterCaps, Device, MemoryUse};
pub use record::{Commands, ReadRange, Recorder, Submission, Timing};
