//! The flags that choose the device, and its options.

pub(crate) mod gpus;
pub(crate) mod kernel_hints;

use std::num::NonZero;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use sterna::native::{
    ComputeOptions, Device, DeviceKind, DeviceRequest, GpuPreference, n_gpu_layers,
};
#[cfg(feature = "gpu")]
use sterna::native::{adapter_name, is_real};
use sterna::{Loaded, Warning};
use sterna_engine::{Model, ModelPlan};
use sterna_format::rdrr::RuntimeOptimizations;
#[cfg(feature = "gpu")]
use sterna_gpu::{AdapterCaps, DeviceOptions, tuning::hints};

use self::gpus::Gpus;
use crate::numbers::whole;
use crate::size::n_bytes;
#[cfg(feature = "gpu")]
use crate::{pipelines, tuning::Settings};

/// The requested device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendFlag {
    /// The best GPU for models of 64 MiB and more, if there is one; else the CPU
    Auto,
    Cpu,
    Gpu,
}

/// Where to compute.
#[derive(Debug, Clone, Args)]
// Programs without GPUs accept the flags too, and don't use some.
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
pub(crate) struct DeviceFlags {
    /// Where to compute; layers that don't fit a GPU's memory are computed on the CPU [default: auto]
    #[arg(long, value_enum)]
    backend: Option<BackendFlag>,

    /// Part of the name of the GPU to use [default: the best]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,

    /// The place of the GPU among all adapters.
    #[arg(skip)]
    gpu_index: Option<usize>,

    /// Maximum number of layers to offload to the GPU [default: as many as fit]
    #[arg(long, alias = "n-gpu-layers", value_name = "N", value_parser = whole)]
    gpu_layers: Option<usize>,

    /// Maximum device memory for weights, cache and activations, such as 6GiB [default: all available]
    #[arg(long, value_name = "SIZE", value_parser = n_bytes)]
    gpu_memory: Option<NonZero<u64>>,

    /// Launch configurations of GPU kernels: as measured by `sterna tune`, else as hinted by a package, else
    /// the defaults; or the defaults only
    #[arg(long, value_enum, value_name = "HOW", default_value_t = TuningFlag::Auto, hide_short_help = true)]
    gpu_tuning: TuningFlag,

    /// Hints for GPU kernels, as a package's `runtimeOptimizations` has them: JSON or a file with it. They take
    /// precedence over the package's
    #[arg(long, value_name = "FILE|JSON", value_parser = kernel_hints::parse, hide_short_help = true)]
    kernel_hints: Option<RuntimeOptimizations>,
}

/// What determines launch configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TuningFlag {
    /// Measurements, if any; else a package's hints; else the defaults
    Auto,
    /// The defaults
    Off,
}

impl DeviceFlags {
    /// As if the CPU had been asked for.
    pub(crate) fn cpu() -> DeviceFlags {
        DeviceFlags {
            backend: Some(BackendFlag::Cpu),
            gpu: None,
            gpu_index: None,
            gpu_layers: None,
            gpu_memory: None,
            gpu_tuning: TuningFlag::Auto,
            kernel_hints: None,
        }
    }

    /// These, or where they say nothing, the device called `backend` and memory of `gpu_memory`.
    ///
    /// Errors: a name or a size that isn't one.
    pub(crate) fn or(self, backend: Option<&str>, gpu_memory: Option<&str>) -> Result<DeviceFlags> {
        let backend = backend.map(|name| {
            let known = BackendFlag::from_str(name, false);
            known.map_err(|_| anyhow!("backend: expected auto, cpu or gpu, found {name:?}"))
        });
        let gpu_memory = gpu_memory.map(|text| {
            n_bytes(text).map_err(|error| anyhow!("gpu-memory: {error}, found {text:?}"))
        });
        Ok(DeviceFlags {
            backend: self.backend.or(backend.transpose()?),
            gpu_memory: self.gpu_memory.or(gpu_memory.transpose()?),
            ..self
        })
    }

    /// Whether a GPU is asked for.
    pub(crate) fn is_gpu(&self) -> bool {
        self.backend == Some(BackendFlag::Gpu)
    }

    /// The GPU that would be asked to compute a model of `memory_bytes`. It isn't opened; one that isn't available is
    /// treated as none.
    ///
    /// Errors: flags that contradict each other.
    #[cfg(feature = "gpu")]
    fn offer(&self, memory_bytes: u64) -> Result<Option<AdapterCaps>> {
        let request = self.request()?;
        Ok(match request.preference(memory_bytes)? {
            GpuPreference::Never => None,
            GpuPreference::Required => request.adapter().ok(),
            GpuPreference::IfReal => request.adapter().ok().filter(|offer| is_real(&offer.info)),
        })
    }

    /// Whether a GPU would be asked to compute a model of `memory_bytes`.
    pub(crate) fn finds_gpu(&self, memory_bytes: u64) -> bool {
        #[cfg(feature = "gpu")]
        return matches!(self.offer(memory_bytes), Ok(Some(_)));
        #[cfg(not(feature = "gpu"))]
        return self.requires_gpu(memory_bytes);
    }

    /// Whether a GPU, and not just any device, is to compute a model of `memory_bytes`.
    pub(crate) fn requires_gpu(&self, memory_bytes: u64) -> bool {
        let preference = self
            .request()
            .map(|request| request.preference(memory_bytes));
        matches!(preference, Ok(Ok(GpuPreference::Required)))
    }

    /// The hints of a package, where the user gives no others.
    pub(crate) fn hints(&self, package: RuntimeOptimizations) -> RuntimeOptimizations {
        match &self.kernel_hints {
            Some(over) => package.overridden_by(over),
            None => package,
        }
    }

    /// As if a GPU had been asked for; fails if the CPU was.
    #[cfg(feature = "gpu")]
    pub(crate) fn gpu(&self) -> Result<DeviceFlags> {
        if self.backend == Some(BackendFlag::Cpu) {
            bail!("--backend cpu: expected a GPU");
        }
        Ok(DeviceFlags {
            backend: Some(BackendFlag::Gpu),
            ..self.clone()
        })
    }

    /// The same for the library; fails if the flags contradict each other.
    fn request(&self) -> Result<DeviceRequest> {
        if self.backend == Some(BackendFlag::Cpu) && self.gpu.is_some() {
            bail!("--gpu: expected --backend gpu or auto, found --backend cpu");
        }
        Ok(DeviceRequest {
            kind: match self.backend.unwrap_or(BackendFlag::Auto) {
                BackendFlag::Auto => DeviceKind::Auto,
                BackendFlag::Cpu => DeviceKind::Cpu,
                BackendFlag::Gpu => DeviceKind::Gpu,
            },
            gpu: self.gpu.clone(),
            gpu_index: self.gpu_index,
            gpu_layers: self.gpu_layers,
            gpu_memory: self.gpu_memory.map(u64::from),
        })
    }

    /// The flags that ask for a GPU.
    fn asked(&self) -> String {
        match (&self.gpu, self.gpu_index) {
            (Some(name), _) => format!("--gpu {name}"),
            (None, Some(index)) => format!("GPU {index}"),
            (None, None) => "--backend gpu".to_owned(),
        }
    }

    /// These for each of the GPUs that `gpus` asks for, and the name of each.
    ///
    /// Errors: a GPU that isn't there; another device was asked for.
    pub(crate) fn on_each(&self, gpus: &Gpus) -> Result<Vec<(DeviceFlags, String)>> {
        if self.backend == Some(BackendFlag::Cpu) {
            bail!(
                "--gpus: expected --backend gpu or auto, found --backend cpu: the CPU is one device, whose threads \
                 --threads sets"
            );
        }
        if let Some(name) = &self.gpu {
            bail!("--gpus: expected no --gpu beside it, found --gpu {name}");
        }
        if self.gpu_layers == Some(0) {
            bail!("--gpus: expected layers on the GPUs, found --gpu-layers 0");
        }
        let chosen = gpus.find()?.into_iter();
        let device = |(index, name)| {
            let flags = DeviceFlags {
                backend: Some(BackendFlag::Gpu),
                gpu_index: Some(index),
                ..self.clone()
            };
            (flags, name)
        };
        Ok(chosen.map(device).collect())
    }

    /// Completes the options for opening a GPU with `hints`.
    #[cfg(feature = "gpu")]
    fn configure(
        &self,
        offer: &AdapterCaps,
        options: &mut DeviceOptions,
        hints: &RuntimeOptimizations,
    ) {
        options.pipeline_cache = pipelines::folder();
        self.settings(offer, hints).apply(options);
    }

    #[cfg(feature = "gpu")]
    fn settings(&self, offer: &AdapterCaps, hints: &RuntimeOptimizations) -> Settings {
        Settings::new(offer, hints, self.gpu_tuning == TuningFlag::Auto)
    }
}

/// Calls `load` with the device that `flags` ask for, or with the CPU if they allow it and the model doesn't
/// fit a GPU; `warn` is called with the choice and the reason.
pub(crate) fn load_on(
    flags: &DeviceFlags,
    compute: ComputeOptions,
    plan: &ModelPlan,
    hints: &RuntimeOptimizations,
    warn: &mut dyn FnMut(Warning),
    load: impl FnMut(Device) -> sterna::Result<Loaded<Device>>,
) -> Result<Arc<Model<Device>>> {
    let request = flags.request()?;
    #[cfg(feature = "gpu")]
    let loaded = {
        let configure = |offer: &AdapterCaps, options: &mut DeviceOptions| {
            flags.configure(offer, options, hints);
        };
        sterna::native::load_on_device(&request, compute, plan, &configure, warn, load)
    };
    #[cfg(not(feature = "gpu"))]
    let loaded = {
        let _ = hints;
        sterna::native::load_on_device(&request, compute, plan, warn, load)
    };
    match loaded {
        Ok(model) => Ok(model),
        // A failure of the requested device, not of the model.
        #[cfg(feature = "gpu")]
        Err(error) if error.is_from::<sterna_gpu::GpuError>() => {
            Err(error).with_context(|| flags.asked())
        }
        #[cfg(not(feature = "gpu"))]
        Err(error) if request.preference(plan.memory_bytes())? == GpuPreference::Required => {
            Err(error).with_context(|| flags.asked())
        }
        Err(error) => Err(error.into()),
    }
}

/// The CPU, and the GPU that `flags` ask for or the best, opened with `hints`.
#[cfg(feature = "gpu")]
pub(crate) fn both(
    flags: &DeviceFlags,
    compute: ComputeOptions,
    hints: &RuntimeOptimizations,
) -> Result<(sterna_engine::Cpu, sterna_engine::Gpu)> {
    if flags.backend == Some(BackendFlag::Cpu) {
        bail!("--backend cpu: expected a GPU, which is to be compared with the CPU");
    }
    let device = (flags.request()?)
        .open_gpu(|offer, options| flags.configure(offer, options, hints))
        .with_context(|| flags.asked())?;
    Ok((compute.cpu(), compute.gpu(device)))
}

/// The adapter that `flags` ask for, or the best.
#[cfg(feature = "gpu")]
pub(crate) fn adapter(flags: &DeviceFlags) -> Result<AdapterCaps> {
    (flags.request()?.adapter()).with_context(|| flags.asked())
}

/// A hint of a package, and its resolution.
#[derive(Debug, Serialize)]
pub(crate) struct HintReport {
    pub(crate) hint: String,
    pub(crate) value: String,
    pub(crate) outcome: &'static str,
    pub(crate) reason: String,
}

/// Resolves `hints` where `flags` select the device of a model of `memory_bytes`. No GPU is opened; one that
/// isn't available is treated as none.
#[cfg(feature = "gpu")]
pub(crate) fn decisions(
    flags: &DeviceFlags,
    hints: &RuntimeOptimizations,
    memory_bytes: u64,
) -> Result<Vec<HintReport>> {
    let decisions = match flags.offer(memory_bytes)? {
        Some(offer) => flags.settings(&offer, hints).decisions,
        None => hints::resolve(hints, None).decisions,
    };
    let report = |decision: hints::Decision| HintReport {
        hint: decision.hint,
        value: decision.value,
        outcome: decision.outcome.name(),
        reason: decision.reason,
    };
    Ok(decisions.into_iter().map(report).collect())
}

/// Resolves `hints`: all are ignored, as hints are about GPUs.
#[cfg(not(feature = "gpu"))]
pub(crate) fn decisions(
    _: &DeviceFlags,
    hints: &RuntimeOptimizations,
    _: u64,
) -> Result<Vec<HintReport>> {
    let ignored = hints.iter().map(|hint| HintReport {
        hint: hint.name(),
        value: hint.value(),
        outcome: "ignored",
        reason: "this program was built without GPUs".to_owned(),
    });
    Ok(ignored.collect())
}

/// How long a kernel took on a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelTime {
    pub(crate) name: &'static str,
    pub(crate) workgroups: u64,
    /// In microseconds.
    pub(crate) us: f64,
}

/// Fails unless `device` has kernels of a GPU that can be timed.
pub(crate) fn expect_timing(device: &Device) -> Result<()> {
    if n_gpu_layers(device) == 0 {
        bail!("--kernels: expected a model on a GPU, found one on the CPU");
    }
    #[cfg(feature = "gpu")]
    if let Some(gpu) = device.device()
        && !gpu.device().features().timestamps
    {
        let name = adapter_name(gpu.device().info());
        bail!("--kernels: expected a GPU that has timestamps, found {name}, which has none");
    }
    Ok(())
}

/// Runs `run`, and returns how long the kernels took that it started on the GPU of `device`, in order; none
/// on a CPU.
pub(crate) fn timed(device: &Device, run: impl FnOnce() -> Result<()>) -> Result<Vec<KernelTime>> {
    #[cfg(feature = "gpu")]
    if let Some(gpu) = device.device() {
        let ((), timings) = gpu.timed(run)?;
        let timings = timings.into_iter().map(|timing| KernelTime {
            name: timing.name,
            workgroups: timing.grid.map(u64::from).iter().product(),
            us: timing.us,
        });
        return Ok(timings.collect());
    }
    let _ = device;
    run()?;
    Ok(Vec::new())
}
