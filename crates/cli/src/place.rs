//! Where models are computed: on the CPU, or on a GPU if there is one.

use anyhow::Result;
#[cfg(not(feature = "gpu"))]
use anyhow::bail;
use clap::ValueEnum;
use sterna_engine::{Activations, Cpu};
use sterna_kernels::Isa;

#[cfg(not(feature = "gpu"))]
pub(crate) use sterna_engine::Cpu as Place;
#[cfg(feature = "gpu")]
pub(crate) use sterna_engine::Place;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum BackendFlag {
    /// The CPU, until GPUs have been measured to be the better choice
    Auto,
    Cpu,
    Gpu,
}

/// How to compute, wherever that is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Engine {
    pub(crate) n_threads: usize,
    pub(crate) isa: Isa,
    pub(crate) activations: Activations,
}

impl Engine {
    fn cpu(self) -> Cpu {
        Cpu::new(self.n_threads, self.isa).with_activations(self.activations)
    }
}

/// Calls `load` with the place that `flag` asks for.
#[cfg(feature = "gpu")]
pub(crate) fn load_on<T>(
    flag: BackendFlag,
    engine: Engine,
    load: impl FnOnce(Place) -> Result<T>,
) -> Result<T> {
    match flag {
        BackendFlag::Cpu | BackendFlag::Auto => load(Place::Cpu(engine.cpu())),
        BackendFlag::Gpu => load(gpu::open(engine)?),
    }
}

/// Calls `load` with the CPU, unless `flag` asks for a GPU.
#[cfg(not(feature = "gpu"))]
pub(crate) fn load_on<T>(
    flag: BackendFlag,
    engine: Engine,
    load: impl FnOnce(Place) -> Result<T>,
) -> Result<T> {
    if flag == BackendFlag::Gpu {
        bail!("--backend gpu: this program was built without GPUs; use cpu or auto");
    }
    load(engine.cpu())
}

/// Name of the GPU that a model is computed on; `None` for the CPU.
pub(crate) fn gpu_name(place: &Place) -> Option<String> {
    #[cfg(feature = "gpu")]
    if let Place::Gpu(gpu) = place {
        return Some(gpu::describe(gpu.device().info()));
    }
    #[cfg(not(feature = "gpu"))]
    let _ = place;
    None
}

#[cfg(feature = "gpu")]
mod gpu {
    use std::time::Duration;

    use anyhow::{Context, Result};
    use sterna_engine::Gpu;
    use sterna_gpu::{AdapterInfo, Device, DeviceOptions};

    use super::{Engine, Place};
    use crate::pipelines;

    /// Software adapters take their time over long prompts.
    const TIMEOUT: Duration = Duration::from_secs(600);

    fn options(adapter: Option<String>) -> DeviceOptions {
        DeviceOptions {
            adapter,
            pipeline_cache: pipelines::folder(),
            timeout: TIMEOUT,
            ..DeviceOptions::default()
        }
    }

    fn place(device: Device, engine: Engine) -> Place {
        let gpu = Gpu::new(device, engine.n_threads, engine.isa);
        Place::Gpu(gpu.with_activations(engine.activations))
    }

    /// The best GPU, software or not.
    pub(super) fn open(engine: Engine) -> Result<Place> {
        let device = Device::open(&options(None)).context("--backend gpu")?;
        Ok(place(device, engine))
    }

    pub(super) fn describe(info: &AdapterInfo) -> String {
        format!("{} ({:?}, {})", info.name, info.api, info.driver)
    }
}
