//! Where a model is computed.

use std::time::Duration;

use sterna::scheduler::SchedulerOptions;
use sterna::{Error, ErrorCode, ModelFiles, Result};
use sterna_engine::self_test::{SelfTestError, self_test};
use sterna_engine::{BackendError, CacheType, Cpu, Gpu, ModelPlan};
use sterna_gpu::{AdapterKind, Device, DeviceOptions, GpuError};
use sterna_kernels::Isa;

use crate::options::{BackendChoice, DevicePreference, ModelOptions, Reason};

/// Bytes of weights from which on a GPU is taken unasked. Opening one, and compiling its kernels, takes longer
/// than smaller models need for a whole answer.
const PAYS_FROM: u64 = 64 << 20;

/// How long a GPU may take for what was submitted, unless asked otherwise.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Where a model is to be loaded.
pub(super) enum Place {
    Gpu(Box<Gpu>),
    /// With why it isn't the GPU.
    Cpu(Option<Reason>),
}

impl Place {
    /// The place for the model that `plan` describes.
    ///
    /// Errors: the GPU is asked for, and there is none.
    pub(super) async fn choose(
        options: &ModelOptions,
        plan: &ModelPlan,
        files: &ModelFiles,
    ) -> Result<Place> {
        let cpu = |code, message: &str| Ok(Place::Cpu(Some(because(code, message))));
        let is_auto = options.backend == BackendChoice::Auto;
        if options.backend == BackendChoice::Cpu {
            return cpu("asked", "the CPU was asked for");
        }
        if is_auto && plan.memory_bytes() < PAYS_FROM {
            return cpu("too_small", "small models are ready sooner on the CPU");
        }
        let timeout = options
            .gpu_timeout
            .map(|ms| Duration::try_from_secs_f64(ms / 1000.0));
        let timeout = timeout.and_then(Result::ok).unwrap_or(TIMEOUT);
        let device_options = DeviceOptions {
            timeout,
            low_power: options.device == DevicePreference::LowPower,
            ..Default::default()
        };
        match Device::open_async(&device_options, |_, _| {}).await {
            Ok(device) if is_auto && device.info().kind == AdapterKind::Software => {
                let message = format!("{} is software", device.info().name);
                cpu("software_adapter", &message)
            }
            Ok(device) => {
                let gpu = Gpu::new(device, options.threads, Isa::detect());
                let activations = files.activations().unwrap_or_default();
                Ok(Place::Gpu(Box::new(gpu.with_activations(activations))))
            }
            Err(error) if is_auto => cpu("no_adapter", &error.to_string()),
            Err(error) => Err(Error::typed(ErrorCode::NotFound, error)),
        }
    }
}

/// How much of a prompt a GPU computes at once: software takes seconds for what hardware does at once.
pub(super) fn scheduling(gpu: &Gpu) -> SchedulerOptions {
    match gpu.device().info().kind {
        AdapterKind::Software => SchedulerOptions::default(),
        _ => SchedulerOptions::gpu(),
    }
}

/// The CPU, on `threads` threads, for the model of `files`.
pub(super) fn cpu(files: &ModelFiles, threads: usize) -> Cpu {
    let activations = files.activations().unwrap_or_default();
    Cpu::new(threads, Isa::detect()).with_activations(activations)
}

fn because(code: &'static str, message: &str) -> Reason {
    Reason {
        code,
        message: message.to_owned(),
    }
}

/// Compares each family of kernels that `plan` needs with the CPU.
///
/// Errors: the GPU gives other results, or fails.
pub(super) async fn trust(gpu: &Gpu, plan: &ModelPlan, cache: CacheType) -> Result<()> {
    let tested = self_test(gpu, &plan.kernels(), cache).await;
    tested.map_err(|error| Error::typed(ErrorCode::Compute, error).context("the GPU"))
}

/// Whether a GPU is at fault, and not the model.
pub(super) fn is_of_device(error: &Error) -> bool {
    error.find::<BackendError>().is_some()
        || error.find::<GpuError>().is_some()
        || error.find::<SelfTestError>().is_some()
}

/// Why the GPU isn't used after all.
pub(super) fn reason(error: &Error) -> Reason {
    let code = match error.find::<SelfTestError>() {
        Some(SelfTestError::Wrong { .. }) => "wrong_results",
        Some(SelfTestError::Failed { source, .. }) if source.is_lost() => {
            ErrorCode::DeviceLost.as_str()
        }
        _ => error.code().as_str(),
    };
    because(code, &format!("{error:#}"))
}
