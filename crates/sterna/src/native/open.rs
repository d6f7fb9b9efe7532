//! A model at a path, opened, loaded and ready to talk.

use std::path::Path;
use std::sync::Arc;
use std::thread;

use sterna_engine::Activations;
use sterna_engine::plan::PlanOptions;
#[cfg(feature = "gpu")]
use sterna_format::rdrr::RuntimeOptimizations;
#[cfg(feature = "gpu")]
use sterna_gpu::{
    AdapterCaps, DeviceOptions, Tuning,
    tuning::{
        LaunchConfig,
        hints::{self, Capabilities, Sizing},
    },
};
use sterna_kernels::Isa;

use super::{
    ComputeOptions, Device, DeviceRequest, ExpertsInMemory, LoadFrom, LocalModel, Located, Weights,
    has_gpu, load_on_device,
};
use crate::adapted::Adapted;
use crate::chat::{DEFAULT_CTX_LEN, TextModel};
use crate::error::Result;
use crate::model::Signatures;
use crate::scheduler::SchedulerOptions;
use crate::warning::Warning;

/// How to open a model with [`open`].
pub struct Options<'a> {
    /// Where to compute.
    pub device: DeviceRequest,
    /// Threads of the CPU; `None` for as many as this process may use.
    pub n_threads: Option<usize>,
    /// Context size in tokens that device memory is kept for, and that chats have unless they ask for
    /// another; `None` for what the model was made for, at most [`DEFAULT_CTX_LEN`].
    pub ctx_len: Option<usize>,
    /// Where weights lie once they are loaded.
    pub weights: Weights,
    /// How many experts are in memory, where not all are to be: weights are mapped then.
    pub experts: Option<ExpertsInMemory>,
    /// Decides whether a signed package is let in; with `None`, no signed one is.
    pub signatures: Option<Arc<dyn Signatures>>,
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
            ctx_len: None,
            weights: Weights::Mapped,
            experts: None,
            signatures: None,
            progress: &|_| {},
            warn: &|_| {},
        }
    }
}

/// Opens the model at `path` and loads it: a GGUF file, the folder of a checkpoint, a package or an engine
/// bundle; with the feature `builtin`, also `builtin`. A package is computed with the cache and the
/// activations that it asks for, and its hints are followed.
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
    let files = LocalModel::open(name, located, None, options.signatures.clone())?;
    let plan = files.plan(&PlanOptions::default())?;
    let max_ctx = plan.config().max_ctx;
    let ctx_len = options.ctx_len.unwrap_or(max_ctx.min(DEFAULT_CTX_LEN));
    if ctx_len > max_ctx {
        (options.warn)(Warning::LongContext {
            model: name.to_owned(),
            ctx_len,
            max_ctx,
        });
    }
    let compute = ComputeOptions {
        n_threads,
        isa: Isa::detect(),
        activations: files.activations().unwrap_or(Activations::Int8),
        session: files.session(ctx_len),
    };
    let load_from = LoadFrom {
        weights: options.weights,
        experts: options.experts,
        n_threads,
        progress: options.progress,
    };
    let mut warn = |warning| (options.warn)(warning);
    let load = |device| files.load_on(plan.clone(), device, &load_from);
    #[cfg(feature = "gpu")]
    let model = {
        let hints = files.hints();
        let configure =
            |offer: &AdapterCaps, options: &mut DeviceOptions| follow(&hints, offer, options);
        load_on_device(&options.device, compute, &plan, &configure, &mut warn, load)?
    };
    #[cfg(not(feature = "gpu"))]
    let model = load_on_device(&options.device, compute, &plan, &mut warn, load)?;
    let scheduling = match has_gpu(model.backend()) {
        true => SchedulerOptions::gpu(),
        false => SchedulerOptions::default(),
    };
    let mut warnings = Vec::new();
    let model = TextModel::new(Adapted::new(model), &files, scheduling, &mut warnings)?;
    warnings.into_iter().for_each(options.warn);
    Ok(model.with_ctx_len(ctx_len))
}

/// Completes `options` for opening the GPU of `offer` with what `hints` ask for.
#[cfg(feature = "gpu")]
fn follow(hints: &RuntimeOptimizations, offer: &AdapterCaps, options: &mut DeviceOptions) {
    let gpu = Capabilities::new(offer, Sizing::Hints);
    let choices = hints::resolve(hints, Some(&gpu)).choices;
    options.features = options.features.and(choices.mask(offer.features));
    options.tuning = Tuning::default().with_others(LaunchConfig {
        workgroup: choices.gemv_workgroup,
        ..LaunchConfig::default()
    });
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::PathBuf;
    use std::sync::Mutex;

    use serde_json::{Value, json};
    use sterna_engine::{CacheType, Logits, SessionOptions};

    use super::*;
    use crate::error::ErrorCode;
    use crate::native::DeviceKind;

    fn testdata(path: &str) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../testdata")
            .join(path)
    }

    fn on_cpu() -> Options<'static> {
        Options {
            device: DeviceRequest {
                kind: DeviceKind::Cpu,
                ..DeviceRequest::default()
            },
            n_threads: Some(1),
            ..Options::default()
        }
    }

    const PACKAGE: &str = "rdrr-samples/v1-gemma3-q4k";

    /// A copy in `folder` of the test data's `model`, of which the JSON file `name` is edited.
    fn edited<'a>(
        folder: &'a Path,
        model: &str,
        name: &str,
        edit: impl FnOnce(&mut Value),
    ) -> &'a str {
        for entry in fs::read_dir(testdata(model)).unwrap() {
            let entry = entry.unwrap();
            fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
        }
        let path = folder.join(name);
        let mut json = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        edit(&mut json);
        fs::write(path, json.to_string()).unwrap();
        folder.to_str().unwrap()
    }

    #[test]
    fn a_package_is_computed_as_it_asks() {
        let dir = tempfile::tempdir().unwrap();
        let path = edited(dir.path(), PACKAGE, "manifest.json", |manifest| {
            manifest["quantizationInfo"]["kvCache"] = json!("f16");
            manifest["quantizationInfo"]["activations"] = json!("f32");
        });
        let asking = open(path, &on_cpu()).unwrap();
        assert_eq!(asking.session_options().cache, Some(CacheType::F16));
        let plain = open(testdata(PACKAGE).to_str().unwrap(), &on_cpu()).unwrap();
        assert_eq!(plain.session_options().cache, None);
        let logits = |model: &TextModel<Device>, cache| {
            let options = SessionOptions {
                cache,
                ..SessionOptions::new(8)
            };
            let mut session = model.model().session(options).unwrap();
            session.forward(&[2, 7, 9], Logits::All).unwrap()
        };
        // Other activations, whatever the cache.
        let f32 = Some(CacheType::F32);
        assert_ne!(logits(&asking, f32), logits(&plain, f32));
        let mut sequence = asking.sequence(8).unwrap();
        let found = sequence.forward(&[2, 7, 9], Logits::All).unwrap();
        assert_eq!(found, logits(&asking, Some(CacheType::F16)));
    }

    #[test]
    fn a_context_is_as_long_as_is_asked_for() {
        let dir = tempfile::tempdir().unwrap();
        let path = edited(dir.path(), "stories260K/hf", "config.json", |config| {
            config["max_position_embeddings"] = json!(3 * DEFAULT_CTX_LEN);
        });
        for (asked, expected, is_long) in [
            (None, DEFAULT_CTX_LEN, false),
            (Some(5000), 5000, false),
            (Some(20_000), 20_000, true),
        ] {
            let warnings = Mutex::new(Vec::new());
            let options = Options {
                ctx_len: asked,
                warn: &|warning| warnings.lock().unwrap().push(warning),
                ..on_cpu()
            };
            let model = open(path, &options).unwrap();
            assert_eq!(model.session_options().ctx_len, expected);
            let warnings = warnings.into_inner().unwrap();
            let mut warnings = warnings.iter();
            let found = warnings.any(|warning| matches!(warning, Warning::LongContext { .. }));
            assert_eq!(found, is_long, "{asked:?}");
        }
    }

    #[test]
    fn whom_a_signed_package_is_from_is_asked() {
        struct Asked(Mutex<Vec<String>>);
        impl Signatures for Asked {
            fn check(&self, _: &str, _: &[u8], signature: &str) -> Result<()> {
                self.0.lock().unwrap().push(signature.to_owned());
                Ok(())
            }
        }
        let dir = tempfile::tempdir().unwrap();
        let path = edited(dir.path(), PACKAGE, "manifest.json", |_| {});
        fs::write(dir.path().join("manifest.json.minisig"), "by me").unwrap();
        let refused = open(path, &on_cpu()).err().unwrap();
        assert_eq!(refused.code(), ErrorCode::Untrusted);
        let asked = Arc::new(Asked(Mutex::default()));
        let options = Options {
            signatures: Some(Arc::clone(&asked) as _),
            ..on_cpu()
        };
        open(path, &options).unwrap();
        assert_eq!(*asked.0.lock().unwrap(), ["by me"]);
    }

    #[test]
    #[cfg(feature = "gpu")]
    fn hints_are_followed() {
        if !sterna_testing::gpu::is_there() {
            return;
        }
        let offer = DeviceRequest::default().adapter().unwrap();
        let hints = RuntimeOptimizations {
            disable_features: vec!["subgroups".into(), "dot4".into()],
            ..RuntimeOptimizations::default()
        };
        let mut options = DeviceOptions::default();
        follow(&hints, &offer, &mut options);
        for name in ["subgroups", "dot4"] {
            assert!(!options.features.names().contains(&name), "{name}");
        }
        follow(&RuntimeOptimizations::default(), &offer, &mut options);
        assert_eq!(options.tuning, Tuning::default());
    }
}
