//! Where models are computed: on the CPU, on a GPU if there is one, or on both.

use std::sync::Arc;
#[cfg(feature = "gpu")]
use std::time::Duration;

#[cfg(feature = "gpu")]
use sterna_engine::hybrid::OffloadPlan;
use sterna_engine::{Activations, Cpu, Model, ModelPlan, SessionOptions};
#[cfg(feature = "gpu")]
use sterna_engine::{BackendError, Gpu, LoadError};
#[cfg(feature = "gpu")]
use sterna_gpu::{AdapterCaps, AdapterInfo, AdapterKind, DeviceOptions, GpuError};
use sterna_kernels::Isa;

#[cfg(feature = "gpu")]
use crate::error::Error;
use crate::error::{Result, bail};
use crate::model::Loaded;
use crate::warning::Warning;

/// Where a model is computed: the CPU.
#[cfg(not(feature = "gpu"))]
pub use sterna_engine::Cpu as Device;
/// Where a model is computed, decided at run time.
#[cfg(feature = "gpu")]
pub use sterna_engine::Hybrid as Device;

/// Which device was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceKind {
    /// The best GPU for models of 64 MiB and more, if there is one; else the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// A GPU.
    Gpu,
}

/// Which device was asked for, and how much of it.
#[derive(Debug, Clone, Default)]
pub struct DeviceRequest {
    /// Which kind.
    pub kind: DeviceKind,
    /// Part of the name of the GPU to take; `None` for the best.
    pub gpu: Option<String>,
    /// The place of the GPU to take among all adapters, best first, counted from 0.
    pub gpu_index: Option<usize>,
    /// Layers to put on the GPU at most; `None` for as many as fit.
    pub gpu_layers: Option<usize>,
    /// Bytes of device memory to take at most; `None` for what there is.
    pub gpu_memory: Option<u64>,
}

/// How to compute, wherever that is.
#[derive(Debug, Clone, Copy)]
pub struct ComputeOptions {
    /// Threads of the CPU.
    pub n_threads: usize,
    /// Its instruction set.
    pub isa: Isa,
    /// What weights stored as blocks of integers are multiplied with.
    pub activations: Activations,
    /// What device memory is kept for.
    pub session: SessionOptions,
}

impl ComputeOptions {
    /// The CPU that computes so.
    pub fn cpu(self) -> Cpu {
        Cpu::new(self.n_threads, self.isa).with_activations(self.activations)
    }

    /// The GPU `device`, with a CPU beside it that computes so.
    #[cfg(feature = "gpu")]
    pub fn gpu(self, device: sterna_gpu::Device) -> Gpu {
        Gpu::new(device, self.n_threads, self.isa).with_activations(self.activations)
    }
}

/// How much a GPU is wanted for a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuPreference {
    /// Not at all.
    Never,
    /// If there is a real one.
    IfReal,
    /// It is an error if there is none.
    Required,
}

/// Bytes of weights from which on a GPU is looked for unasked. Opening one takes longer than smaller models
/// need for a whole answer.
const PAYS_FROM: u64 = 64 << 20;

impl DeviceRequest {
    /// How much a GPU is wanted for a model of `memory_bytes`.
    ///
    /// Errors: a GPU is named and the CPU asked for.
    pub fn preference(&self, memory_bytes: u64) -> Result<GpuPreference> {
        let is_named = self.gpu.is_some() || self.gpu_index.is_some();
        Ok(match (self.kind, is_named) {
            (DeviceKind::Cpu, true) => {
                bail!(
                    InvalidRequest,
                    "expected a GPU or any device, where a GPU is named; found the CPU"
                )
            }
            _ if self.gpu_layers == Some(0) => GpuPreference::Never,
            (DeviceKind::Gpu, _) | (DeviceKind::Auto, true) => GpuPreference::Required,
            (DeviceKind::Auto, false) if memory_bytes >= PAYS_FROM => GpuPreference::IfReal,
            (DeviceKind::Auto | DeviceKind::Cpu, false) => GpuPreference::Never,
        })
    }

    /// What to open a GPU with.
    #[cfg(feature = "gpu")]
    pub fn options(&self) -> DeviceOptions {
        /// Software adapters take their time over long prompts.
        const TIMEOUT: Duration = Duration::from_secs(600);
        DeviceOptions {
            adapter: self.gpu.clone(),
            adapter_index: self.gpu_index,
            memory_budget: self.gpu_memory,
            timeout: TIMEOUT,
            ..DeviceOptions::default()
        }
    }

    /// Opens the GPU that is asked for, or the best; `configure` completes the options once its features are
    /// known.
    ///
    /// Errors: there is none, or it can't be opened.
    #[cfg(feature = "gpu")]
    pub fn open_gpu(
        &self,
        configure: impl FnOnce(&AdapterCaps, &mut DeviceOptions),
    ) -> Result<sterna_gpu::Device, GpuError> {
        sterna_gpu::Device::open_with(&self.options(), configure)
    }

    /// The adapter that is asked for, or the best. It isn't opened.
    ///
    /// Errors: there is none.
    #[cfg(feature = "gpu")]
    pub fn adapter(&self) -> Result<AdapterCaps, GpuError> {
        sterna_gpu::Device::caps(&self.options())
    }
}

/// Calls `load` with the device that `request` asks for, or with the CPU if it leaves the choice and no GPU
/// can have the model. `warn` is told which GPU was taken unasked, and what it has no room for.
///
/// Errors: those of `load`; no GPU where one is required.
#[cfg(feature = "gpu")]
pub fn load_on_device(
    request: &DeviceRequest,
    compute: ComputeOptions,
    plan: &ModelPlan,
    configure: &dyn Fn(&AdapterCaps, &mut DeviceOptions),
    warn: &mut dyn FnMut(Warning),
    mut load: impl FnMut(Device) -> Result<Loaded<Device>>,
) -> Result<Arc<Model<Device>>> {
    let preference = request.preference(plan.memory_bytes())?;
    let opened = match preference {
        GpuPreference::Never => None,
        GpuPreference::Required => Some(request.open_gpu(configure)?),
        GpuPreference::IfReal => match request.open_gpu(configure) {
            Ok(device) => is_real(device.info()).then_some(device),
            Err(GpuError::NoAdapter { .. }) => None,
            Err(error) => {
                let reason = error.to_string();
                warn(Warning::NotOnGpu { reason });
                None
            }
        },
    };
    let mut load = |device, warn: &mut dyn FnMut(Warning)| -> Result<_> {
        let Loaded {
            model, warnings, ..
        } = load(device)?;
        warnings.into_iter().for_each(warn);
        Ok(model)
    };
    let Some(device) = opened else {
        return load(Device::cpu(compute.cpu()), warn);
    };
    let gpu = compute.gpu(device);
    let share = OffloadPlan::new(plan, &compute.session, &gpu);
    let share = share.with_layers(request.gpu_layers.unwrap_or(usize::MAX));
    let both = Device::split(gpu, compute.cpu(), share);
    match load(both, warn) {
        Ok(model) => {
            let is_as_asked = preference == GpuPreference::Required && is_all_on_gpu(&model);
            if let Some(device) = gpu_share(&model).filter(|_| !is_as_asked) {
                warn(Warning::Placement { device });
            }
            Ok(model)
        }
        Err(error) if preference == GpuPreference::IfReal && is_of_gpu(&error) => {
            let reason = format!("{error:#}");
            warn(Warning::NotOnGpu { reason });
            load(Device::cpu(compute.cpu()), warn)
        }
        Err(error) => Err(error),
    }
}

/// Calls `load` with the CPU, unless `request` asks for a GPU.
///
/// Errors: those of `load`; a GPU is required.
#[cfg(not(feature = "gpu"))]
pub fn load_on_device(
    request: &DeviceRequest,
    compute: ComputeOptions,
    plan: &ModelPlan,
    warn: &mut dyn FnMut(Warning),
    mut load: impl FnMut(Device) -> Result<Loaded<Device>>,
) -> Result<Arc<Model<Device>>> {
    if request.preference(plan.memory_bytes())? == GpuPreference::Required {
        bail!(Unsupported, "this program was built without GPUs");
    }
    let Loaded {
        model, warnings, ..
    } = load(compute.cpu())?;
    warnings.into_iter().for_each(warn);
    Ok(model)
}

/// Whether a model could not be loaded because of the GPU.
#[cfg(feature = "gpu")]
fn is_of_gpu(error: &Error) -> bool {
    let error = error.find::<LoadError>();
    matches!(error, Some(LoadError::Backend(BackendError::Device(_))))
}

/// Whether `adapter` is a GPU and no software.
#[cfg(feature = "gpu")]
pub fn is_real(adapter: &AdapterInfo) -> bool {
    matches!(
        adapter.kind,
        AdapterKind::Discrete | AdapterKind::Integrated | AdapterKind::Virtual
    )
}

/// Name of a GPU, for people to read.
#[cfg(feature = "gpu")]
pub fn adapter_name(adapter: &AdapterInfo) -> String {
    format!("{} ({:?}, {})", adapter.name, adapter.api, adapter.driver)
}

/// Whether there is a GPU that a model is computed on.
pub fn has_gpu(device: &Device) -> bool {
    gpu_name(device).is_some()
}

/// Name of the GPU that a model is computed on; `None` for the CPU.
pub fn gpu_name(device: &Device) -> Option<String> {
    #[cfg(feature = "gpu")]
    return device.device().map(|gpu| adapter_name(gpu.device().info()));
    #[cfg(not(feature = "gpu"))]
    {
        let _ = device;
        None
    }
}

/// Name of the GPU that a model is computed on, and what of it is computed on the CPU all the same; `None`
/// if all is.
pub fn gpu_share(model: &Model<Device>) -> Option<String> {
    let name = gpu_name(model.backend())?;
    let (n, of) = (n_gpu_layers(model.backend()), model.config().n_layers);
    Some(match is_all_on_gpu(model) {
        true => name,
        false => format!("{name}: {n} of {of} layers, the rest on the CPU"),
    })
}

/// Whether a GPU computes all layers of a model.
pub fn is_all_on_gpu(model: &Model<Device>) -> bool {
    has_gpu(model.backend()) && n_gpu_layers(model.backend()) == model.config().n_layers
}

/// How many layers of a model lie on a GPU.
pub fn n_gpu_layers(device: &Device) -> usize {
    #[cfg(feature = "gpu")]
    return device.n_gpu_layers();
    #[cfg(not(feature = "gpu"))]
    {
        let _ = device;
        0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_looked_for_where_it_can_pay() {
        let request = |kind, gpu: Option<&str>, gpu_layers| DeviceRequest {
            kind,
            gpu: gpu.map(str::to_owned),
            gpu_layers,
            ..DeviceRequest::default()
        };
        let placed = DeviceRequest {
            gpu_index: Some(1),
            ..DeviceRequest::default()
        };
        use GpuPreference::{IfReal, Never, Required};
        let (small, large) = (PAYS_FROM - 1, PAYS_FROM);
        for (request, of_small, of_large) in [
            (request(DeviceKind::Auto, None, None), Never, IfReal),
            (
                request(DeviceKind::Auto, Some("a"), None),
                Required,
                Required,
            ),
            (placed, Required, Required),
            (request(DeviceKind::Gpu, None, Some(3)), Required, Required),
            (request(DeviceKind::Gpu, None, Some(0)), Never, Never),
            (request(DeviceKind::Cpu, None, None), Never, Never),
        ] {
            assert_eq!(request.preference(small).unwrap(), of_small, "{request:?}");
            assert_eq!(request.preference(large).unwrap(), of_large, "{request:?}");
        }
        let contradiction = request(DeviceKind::Cpu, Some("a"), None);
        assert!(contradiction.preference(large).is_err());
    }
}
