//! A model at a path, opened, loaded and ready to talk.

use std::path::Path;
use std::thread;

use sterna_engine::plan::PlanOptions;
use sterna_engine::{Activations, SessionOptions};
use sterna_kernels::Isa;

use super::{
    ComputeOptions, Device, DeviceRequest, LoadFrom, LocalModel, Located, Weights, has_gpu,
    load_on_device,
};
use crate::adapted::Adapted;
use crate::chat::TextModel;
use crate::error::Result;
use crate::scheduler::SchedulerOptions;
use crate::warning::Warning;

/// How to open a model with [`open`].
pub struct Options<'a> {
    /// Where to compute.
    pub device: DeviceRequest,
    /// Threads of the CPU; `None` for as many as this process may use.
    pub n_threads: Option<usize>,
    /// Where weights lie once they are loaded.
    pub weights: Weights,
    /// Is told how many bytes of weights were loaded each time there are more.
    pub progress: &'a dyn Fn(u64),
    /// Is told what went otherwise than one would expect.
    pub warn: &'a dyn Fn(Warning),
}

impl Default for Options<'_> {
    /// A GPU where that pays, all threads, weights in the mapped files.
    fn default() -> Self {
        Options {
            device: DeviceRequest::default(),
            n_threads: None,
            weights: Weights::Mapped,
            progress: &|_| {},
            warn: &|_| {},
        }
    }
}

/// Opens the model at `path` and loads it: a GGUF file, the folder of a checkpoint, a package or an engine
/// bundle; with the feature `builtin`, also `builtin`.
///
/// Errors: there is no such model, its files are damaged, nothing here can run it.
pub fn open(path: &str, options: &Options<'_>) -> Result<TextModel<Device>> {
    #[cfg(feature = "builtin")]
    if path == super::BUILTIN {
        return load(path, super::builtin(), options);
    }
    load(path, Located::at(Path::new(path))?, options)
}

/// The same for a model that was found elsewhere, such as in a store; messages call it `name`.
///
/// Errors: as for [`open`].
pub fn load(name: &str, located: Located, options: &Options<'_>) -> Result<TextModel<Device>> {
    let n_threads = options
        .n_threads
        .unwrap_or_else(|| thread::available_parallelism().map_or(1, |n| n.get()));
    let files = LocalModel::open(name, located, None, None)?;
    let plan = files.plan(&PlanOptions::default())?;
    let compute = ComputeOptions {
        n_threads,
        isa: Isa::detect(),
        activations: Activations::Int8,
        session: SessionOptions::new(plan.config().max_ctx),
    };
    let load_from = LoadFrom {
        weights: options.weights,
        n_threads,
        progress: options.progress,
    };
    let mut warn = |warning| (options.warn)(warning);
    let load = |device| files.load_on(plan.clone(), device, &load_from);
    #[cfg(feature = "gpu")]
    let model = load_on_device(&options.device, compute, &plan, &|_, _| {}, &mut warn, load)?;
    #[cfg(not(feature = "gpu"))]
    let model = load_on_device(&options.device, compute, &plan, &mut warn, load)?;
    let scheduling = match has_gpu(model.backend()) {
        true => SchedulerOptions::gpu(),
        false => SchedulerOptions::default(),
    };
    let mut warnings = Vec::new();
    let model = TextModel::new(Adapted::new(model), &files, scheduling, &mut warnings)?;
    warnings.into_iter().for_each(options.warn);
    Ok(model)
}
