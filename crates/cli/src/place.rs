//! Where models are computed: on the CPU, on a GPU if there is one, or on both.

use std::num::NonZero;
use std::sync::Arc;

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
#[cfg(feature = "gpu")]
use sterna_engine::SessionOptions;
use sterna_engine::{Activations, Cpu, Model, ModelPlan};
use sterna_format::rdrr::RuntimeOptimizations;
use sterna_format::rdrr::hints::{self, Capabilities, Decision};
use sterna_kernels::Isa;

use crate::args::n_bytes;

#[cfg(not(feature = "gpu"))]
pub(crate) use sterna_engine::Cpu as Place;
#[cfg(feature = "gpu")]
pub(crate) use sterna_engine::Place;

/// What was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum BackendFlag {
    /// The best GPU for models of 64 MiB and more, if there is one; else the CPU
    Auto,
    Cpu,
    Gpu,
}

/// Where to compute.
#[derive(Debug, Clone, Args)]
// Programs without GPUs take the flags too, and have no use for some.
#[cfg_attr(not(feature = "gpu"), allow(dead_code))]
pub(crate) struct PlaceFlags {
    /// Where to compute; layers that don't fit a GPU's memory are computed on the CPU
    #[arg(long, value_enum, default_value_t = BackendFlag::Auto)]
    backend: BackendFlag,

    /// Part of the name of the GPU to take [default: the best]
    #[arg(long, value_name = "NAME")]
    gpu: Option<String>,

    /// Layers to put on the GPU at most [default: as many as fit]
    #[arg(long, value_name = "N")]
    gpu_layers: Option<usize>,

    /// Device memory to take at most, for weights, cache and activations, such as 6GiB [default: what there
    /// is]
    #[arg(long, value_name = "SIZE", value_parser = n_bytes)]
    gpu_memory: Option<NonZero<u64>>,

    /// Whether a GPU's work is shared out as `sterna tune` measured, or as a package asks for, or only by
    /// rules
    #[arg(long, value_enum, value_name = "HOW", default_value_t = TuningFlag::Auto, hide_short_help = true)]
    gpu_tuning: TuningFlag,
}

/// What decides how a GPU's work is shared out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum TuningFlag {
    /// Measurements, where there are some; else a package's hints; else rules
    Auto,
    /// Rules
    Off,
}

impl PlaceFlags {
    /// As if the CPU had been asked for.
    pub(crate) fn cpu() -> PlaceFlags {
        PlaceFlags {
            backend: BackendFlag::Cpu,
            gpu: None,
            gpu_layers: None,
            gpu_memory: None,
            gpu_tuning: TuningFlag::Auto,
        }
    }

    /// As if a GPU had been asked for; fails if the CPU was.
    #[cfg(feature = "gpu")]
    pub(crate) fn gpu(&self) -> Result<PlaceFlags> {
        if self.backend == BackendFlag::Cpu {
            bail!("--backend cpu: expected a GPU");
        }
        Ok(PlaceFlags {
            backend: BackendFlag::Gpu,
            ..self.clone()
        })
    }

    /// How much to want a GPU for a model of `memory_bytes`.
    fn wish(&self, memory_bytes: u64) -> Result<Wish> {
        Ok(match (self.backend, &self.gpu) {
            (BackendFlag::Cpu, Some(_)) => {
                bail!("--gpu: expected --backend gpu or auto, found --backend cpu")
            }
            _ if self.gpu_layers == Some(0) => Wish::None,
            (BackendFlag::Gpu, _) | (BackendFlag::Auto, Some(_)) => Wish::Must,
            (BackendFlag::Auto, None) if memory_bytes >= PAYS_FROM => Wish::May,
            (BackendFlag::Auto | BackendFlag::Cpu, None) => Wish::None,
        })
    }
}

/// Whether a model is to be computed on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wish {
    None,
    /// If there is a real one.
    May,
    Must,
}

/// Bytes of weights from which on a GPU is looked for unasked. Opening one takes longer than smaller models
/// need for a whole answer.
const PAYS_FROM: u64 = 64 << 20;

/// How to compute, wherever that is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Engine {
    pub(crate) n_threads: usize,
    pub(crate) isa: Isa,
    pub(crate) activations: Activations,
    /// What device memory is kept for.
    #[cfg(feature = "gpu")]
    pub(crate) session: SessionOptions,
}

impl Engine {
    fn cpu(self) -> Cpu {
        Cpu::new(self.n_threads, self.isa).with_activations(self.activations)
    }
}

/// Calls `load` with the place that `flags` ask for, or with the CPU if they leave the choice and no GPU can
/// have the model. A note says which GPU was taken unasked, and what it has no room for.
#[cfg(feature = "gpu")]
pub(crate) fn load_on(
    flags: &PlaceFlags,
    engine: Engine,
    plan: &ModelPlan,
    hints: &RuntimeOptimizations,
    load: impl FnMut(Place) -> Result<Arc<Model<Place>>>,
) -> Result<Arc<Model<Place>>> {
    gpu::load_on(flags, engine, plan, hints, load)
}

/// The CPU, and the GPU that `flags` ask for or the best, opened as `hints` would have it.
#[cfg(feature = "gpu")]
pub(crate) fn both(
    flags: &PlaceFlags,
    engine: Engine,
    hints: &RuntimeOptimizations,
) -> Result<(Cpu, sterna_engine::Gpu)> {
    if flags.backend == BackendFlag::Cpu {
        bail!("--backend cpu: expected a GPU, which is to be compared with the CPU");
    }
    Ok((engine.cpu(), gpu::whole(flags, engine, hints)?))
}

/// The adapter that `flags` ask for, or the best.
#[cfg(feature = "gpu")]
pub(crate) fn offer(flags: &PlaceFlags) -> Result<sterna_gpu::Offer> {
    gpu::offer(flags)
}

/// What becomes of `hints` where `flags` have a model of `memory_bytes` computed. No GPU is opened; one that
/// can't be had is none.
pub(crate) fn decisions(
    flags: &PlaceFlags,
    hints: &RuntimeOptimizations,
    memory_bytes: u64,
) -> Result<Vec<Decision>> {
    #[cfg(feature = "gpu")]
    if let Some(decisions) = gpu::decisions(flags, hints, flags.wish(memory_bytes)?) {
        return Ok(decisions);
    }
    let _ = (flags, memory_bytes);
    Ok(hints::resolve(hints, &Capabilities { gpu: None }).decisions)
}

/// Calls `load` with the CPU, unless `flags` ask for a GPU.
#[cfg(not(feature = "gpu"))]
pub(crate) fn load_on(
    flags: &PlaceFlags,
    engine: Engine,
    plan: &ModelPlan,
    _: &RuntimeOptimizations,
    mut load: impl FnMut(Place) -> Result<Arc<Model<Place>>>,
) -> Result<Arc<Model<Place>>> {
    if flags.wish(plan.memory_bytes())? == Wish::Must {
        bail!("--backend gpu: this program was built without GPUs; use cpu or auto");
    }
    load(engine.cpu())
}

/// Name of a GPU, for people to read.
#[cfg(feature = "gpu")]
pub(crate) fn name_of(gpu: &sterna_engine::Gpu) -> String {
    gpu::describe(gpu.device().info())
}

/// Whether there is a GPU that a model is computed on.
pub(crate) fn has_gpu(place: &Place) -> bool {
    #[cfg(feature = "gpu")]
    return place.device().is_some();
    #[cfg(not(feature = "gpu"))]
    {
        let _ = place;
        false
    }
}

/// Name of the GPU that a model is computed on; `None` for the CPU.
pub(crate) fn gpu_name(place: &Place) -> Option<String> {
    #[cfg(feature = "gpu")]
    return place.device().map(name_of);
    #[cfg(not(feature = "gpu"))]
    {
        let _ = place;
        None
    }
}

/// Name of the GPU that a model is computed on, and what of it is computed on the CPU all the same; `None`
/// if all is.
pub(crate) fn gpu_share(model: &Model<Place>) -> Option<String> {
    let name = gpu_name(model.backend())?;
    let (n, of) = (n_gpu_layers(model.backend()), model.config().n_layers);
    Some(match is_all_on_gpu(model) {
        true => name,
        false => format!("{name}: {n} of {of} layers, the rest on the CPU"),
    })
}

/// Whether a GPU computes all layers of a model.
pub(crate) fn is_all_on_gpu(model: &Model<Place>) -> bool {
    has_gpu(model.backend()) && n_gpu_layers(model.backend()) == model.config().n_layers
}

/// How long a kernel took on a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelTime {
    pub(crate) name: &'static str,
    pub(crate) workgroups: u64,
    /// In microseconds.
    pub(crate) us: f64,
}

/// Fails unless `place` has kernels of a GPU that can be timed.
pub(crate) fn expect_timing(place: &Place) -> Result<()> {
    if n_gpu_layers(place) == 0 {
        bail!("--kernels: expected a model on a GPU, found one on the CPU");
    }
    #[cfg(feature = "gpu")]
    if let Some(gpu) = place.device()
        && !gpu.device().features().timestamps
    {
        let name = name_of(gpu);
        bail!("--kernels: expected a GPU that has timestamps, found {name}, which has none");
    }
    Ok(())
}

/// Does `run`, and says how long the kernels took that it started on the GPU of `place`, in order; none
/// on a CPU.
pub(crate) fn timed(place: &Place, run: impl FnOnce() -> Result<()>) -> Result<Vec<KernelTime>> {
    #[cfg(feature = "gpu")]
    if let Some(gpu) = place.device() {
        let ((), timings) = gpu.timed(run)?;
        let timings = timings.into_iter().map(|timing| KernelTime {
            name: timing.name,
            workgroups: timing.grid.map(u64::from).iter().product(),
            us: timing.us,
        });
        return Ok(timings.collect());
    }
    let _ = place;
    run()?;
    Ok(Vec::new())
}

/// How many layers of a model lie on a GPU.
pub(crate) fn n_gpu_layers(place: &Place) -> usize {
    #[cfg(feature = "gpu")]
    return place.n_gpu_layers();
    #[cfg(not(feature = "gpu"))]
    {
        let _ = place;
        0
    }
}

#[cfg(feature = "gpu")]
mod gpu {
    use std::sync::Arc;
    use std::time::Duration;

    use anyhow::{Context, Error, Result};
    use sterna_engine::{BackendError, Gpu, GpuShare, LoadError, Model, ModelPlan};
    use sterna_format::rdrr::RuntimeOptimizations;
    use sterna_format::rdrr::hints::Decision;
    use sterna_gpu::{AdapterInfo, AdapterKind, Device, DeviceOptions, GpuError, Offer};

    use super::{Engine, Place, PlaceFlags, TuningFlag, Wish, gpu_share};
    use crate::tuning::Settings;
    use crate::{output, pipelines};

    /// Software adapters take their time over long prompts.
    const TIMEOUT: Duration = Duration::from_secs(600);

    pub(super) fn load_on(
        flags: &PlaceFlags,
        engine: Engine,
        plan: &ModelPlan,
        hints: &RuntimeOptimizations,
        mut load: impl FnMut(Place) -> Result<Arc<Model<Place>>>,
    ) -> Result<Arc<Model<Place>>> {
        let wish = flags.wish(plan.memory_bytes())?;
        let opened = match wish {
            Wish::None => None,
            Wish::Must => Some(must_open(flags, hints)?),
            Wish::May => open_real(flags, hints),
        };
        let Some(device) = opened else {
            return load(Place::cpu(engine.cpu()));
        };
        let share = GpuShare::new(plan, &engine.session);
        let share = share.with_layers(flags.gpu_layers.unwrap_or(usize::MAX));
        match load(Place::split(on(device, engine), engine.cpu(), share)) {
            Ok(model) => {
                tell(&model, wish);
                Ok(model)
            }
            Err(error) if wish == Wish::May && is_of_gpu(&error) => {
                output::note(format_args!("Computing on the CPU: {error:#}"));
                load(Place::cpu(engine.cpu()))
            }
            Err(error) => Err(error),
        }
    }

    fn on(device: Device, engine: Engine) -> Gpu {
        let gpu = Gpu::new(device, engine.n_threads, engine.isa);
        gpu.with_activations(engine.activations)
    }

    /// The GPU that `flags` ask for, to have all of a model.
    pub(super) fn whole(
        flags: &PlaceFlags,
        engine: Engine,
        hints: &RuntimeOptimizations,
    ) -> Result<Gpu> {
        Ok(on(must_open(flags, hints)?, engine))
    }

    fn must_open(flags: &PlaceFlags, hints: &RuntimeOptimizations) -> Result<Device> {
        open(flags, hints).with_context(|| asked(flags))
    }

    /// The flags that ask for a GPU.
    fn asked(flags: &PlaceFlags) -> String {
        match &flags.gpu {
            Some(name) => format!("--gpu {name}"),
            None => "--backend gpu".to_owned(),
        }
    }

    fn options(flags: &PlaceFlags) -> DeviceOptions {
        DeviceOptions {
            adapter: flags.gpu.clone(),
            memory_budget: flags.gpu_memory.map(u64::from),
            timeout: TIMEOUT,
            ..DeviceOptions::default()
        }
    }

    fn open(flags: &PlaceFlags, hints: &RuntimeOptimizations) -> Result<Device, GpuError> {
        Device::open_with(&options(flags), |offer, options| {
            options.pipeline_cache = pipelines::folder();
            settings(flags, offer, hints).apply(options);
        })
    }

    fn settings(flags: &PlaceFlags, offer: &Offer, hints: &RuntimeOptimizations) -> Settings {
        Settings::new(offer, hints, flags.gpu_tuning == TuningFlag::Auto)
    }

    /// The adapter that `flags` ask for, or the best.
    pub(super) fn offer(flags: &PlaceFlags) -> Result<Offer> {
        Device::offer(&options(flags)).with_context(|| asked(flags))
    }

    /// What becomes of `hints` on the GPU that would be opened; `None` if none would.
    pub(super) fn decisions(
        flags: &PlaceFlags,
        hints: &RuntimeOptimizations,
        wish: Wish,
    ) -> Option<Vec<Decision>> {
        if wish == Wish::None {
            return None;
        }
        let offer = Device::offer(&options(flags)).ok()?;
        let is_meant = wish == Wish::Must || is_real(&offer.info);
        is_meant.then(|| settings(flags, &offer, hints).decisions)
    }

    /// The best GPU if it is none of software; a note says why one that there is can't be had.
    fn open_real(flags: &PlaceFlags, hints: &RuntimeOptimizations) -> Option<Device> {
        match open(flags, hints) {
            Ok(device) => is_real(device.info()).then_some(device),
            Err(GpuError::NoAdapter { .. }) => None,
            Err(error) => {
                output::note(format_args!("Computing on the CPU: {error}"));
                None
            }
        }
    }

    fn is_real(info: &AdapterInfo) -> bool {
        matches!(
            info.kind,
            AdapterKind::Discrete | AdapterKind::Integrated | AdapterKind::Virtual
        )
    }

    /// Whether a model could not be loaded because of the GPU.
    fn is_of_gpu(error: &Error) -> bool {
        let error = error.downcast_ref::<LoadError>();
        matches!(error, Some(LoadError::Backend(BackendError::Device(_))))
    }

    /// Notes what lies where, unless it is what was asked for.
    fn tell(model: &Model<Place>, wish: Wish) {
        if wish == Wish::Must && model.backend().n_gpu_layers() == model.config().n_layers {
            return;
        }
        if let Some(share) = gpu_share(model) {
            output::note(format_args!("Computing on {share}"));
        }
    }

    pub(super) fn describe(info: &AdapterInfo) -> String {
        format!("{} ({:?}, {})", info.name, info.api, info.driver)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_is_looked_for_where_it_can_pay() {
        let flags = |backend, gpu: Option<&str>, gpu_layers| PlaceFlags {
            backend,
            gpu: gpu.map(str::to_owned),
            gpu_layers,
            gpu_memory: None,
            gpu_tuning: TuningFlag::Auto,
        };
        let (small, large) = (PAYS_FROM - 1, PAYS_FROM);
        for (flags, of_small, of_large) in [
            (flags(BackendFlag::Auto, None, None), Wish::None, Wish::May),
            (
                flags(BackendFlag::Auto, Some("a"), None),
                Wish::Must,
                Wish::Must,
            ),
            (
                flags(BackendFlag::Gpu, None, Some(3)),
                Wish::Must,
                Wish::Must,
            ),
            (
                flags(BackendFlag::Gpu, None, Some(0)),
                Wish::None,
                Wish::None,
            ),
            (PlaceFlags::cpu(), Wish::None, Wish::None),
        ] {
            assert_eq!(flags.wish(small).unwrap(), of_small, "{flags:?}");
            assert_eq!(flags.wish(large).unwrap(), of_large, "{flags:?}");
        }
        assert!(
            flags(BackendFlag::Cpu, Some("a"), None)
                .wish(large)
                .is_err()
        );
    }
}
