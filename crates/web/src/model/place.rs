//! Where a model is computed.

use sterna::{Error, ErrorCode, Result};
use sterna_engine::self_test::{SelfTestError, self_test};
use sterna_engine::{BackendError, CacheType, Cpu, Gpu, ModelPlan};
use sterna_gpu::{Device, DeviceOptions, GpuError};
use sterna_kernels::Isa;

use crate::options::{BackendChoice, Reason};

/// Bytes of weights from which on a GPU is taken unasked. Opening one, and compiling its kernels, takes longer
/// than smaller models need for a whole answer.
const PAYS_FROM: u64 = 64 << 20;

/// Where a model is to be loaded.
pub(super) enum Place {
    Gpu(Box<Gpu>),
    /// With why it isn't the GPU.
    Cpu(Option<Reason>),
}

impl Place {
    /// The place for a model of `memory_bytes`.
    ///
    /// Errors: the GPU is asked for and there is none.
    pub(super) async fn choose(
        choice: BackendChoice,
        memory_bytes: u64,
        threads: usize,
    ) -> Result<Place> {
        match choice {
            BackendChoice::Cpu => {
                return Ok(Place::Cpu(Some(because("asked", "the CPU was asked for"))));
            }
            BackendChoice::Auto if memory_bytes < PAYS_FROM => {
                let message = "small models are ready sooner on the CPU";
                return Ok(Place::Cpu(Some(because("too_small", message))));
            }
            BackendChoice::Auto | BackendChoice::Gpu => {}
        }
        match Device::open_async(&DeviceOptions::default(), |_, _| {}).await {
            Ok(device) if choice == BackendChoice::Auto && is_software(&device) => {
                let message = format!("{} is software", device.info().name);
                Ok(Place::Cpu(Some(because("software_adapter", &message))))
            }
            Ok(device) => Ok(Place::Gpu(Box::new(Gpu::new(
                device,
                threads,
                Isa::detect(),
            )))),
            Err(error) if choice == BackendChoice::Auto => {
                Ok(Place::Cpu(Some(because("no_adapter", &error.to_string()))))
            }
            Err(error) => Err(Error::typed(ErrorCode::NotFound, error)),
        }
    }
}

/// The CPU, on `threads` threads.
pub(super) fn cpu(threads: usize) -> Cpu {
    Cpu::new(threads, Isa::detect())
}

fn because(code: &'static str, message: &str) -> Reason {
    Reason {
        code,
        message: message.to_owned(),
    }
}

/// Browsers don't say that an adapter is software, but by its name.
fn is_software(device: &Device) -> bool {
    let name = device.info().name.to_lowercase();
    ["swiftshader", "llvmpipe", "basic render"]
        .iter()
        .any(|software| name.contains(software))
}

/// Compares each family of kernels that `plan` needs with the CPU.
///
/// Errors: the GPU gives other results, or fails.
pub(super) async fn trust(gpu: &Gpu, plan: &ModelPlan, cache: Option<CacheType>) -> Result<()> {
    let tested = self_test(gpu, &plan.weight_forms(), cache.unwrap_or(CacheType::F32)).await;
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
        _ => error.code().as_str(),
    };
    because(code, &format!("{error:#}"))
}
