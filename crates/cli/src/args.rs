//! Flags that several verbs share.

use std::num::NonZero;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use anyhow::{Context, Result, anyhow, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use sterna::native::{ComputeOptions, Device, ExpertsInMemory};
use sterna::receipt::Settings;
use sterna::{DEFAULT_CTX_LEN, Loaded, ModelFiles, Warning};
use sterna_engine::plan::{HeadOptions, HeadScreen};
use sterna_engine::{Activations, CacheType, Model, ModelPlan, SessionOptions};
use sterna_format::rdrr::RuntimeOptimizations;
use sterna_format::{DType, I2sLayout};
use sterna_kernels::Isa;

use crate::device::gpus::Gpus;
use crate::device::{self, DeviceFlags};
use crate::machine;
use crate::numbers::positive;
use crate::size;

/// Flags shared by the verbs that print a result about a model.
#[derive(Debug, Clone, Args)]
pub(crate) struct ReportFlags {
    /// Print JSON
    #[arg(long)]
    pub(crate) json: bool,

    #[command(flatten)]
    pub(crate) engine: EngineFlags,

    #[command(flatten)]
    pub(crate) files: ModelFlags,
}

/// How to read the files of a model.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct ModelFlags {
    /// How I2_S weights are packed; the files don't say, and nearly all are block128
    #[arg(long, value_parser = i2s_layout(), default_value = I2sLayout::NAMES[0], hide_short_help = true)]
    i2s_layout: I2sLayout,

    /// Type to convert the output head to; fewer bits are faster and less exact
    #[arg(long, value_enum, value_name = "TYPE", default_value_t)]
    head: HeadFlag,

    /// Type of a copy of the output head that rules tokens out before the head is read, on the CPU; changes no
    /// token, takes memory and time to load, and is faster for greedy and top-k sampling [default: auto where
    /// answers are generated on the CPU and neither weights nor experts are asked to stay in the file, else off]
    #[arg(long, value_enum, value_name = "TYPE")]
    head_screen: Option<ScreenFlag>,
}

impl ModelFlags {
    /// The layout of I2_S weights.
    pub(crate) fn i2s_layout(&self) -> I2sLayout {
        self.i2s_layout
    }

    /// Those that a receipt with `settings` was written with.
    ///
    /// Errors: a type that no flag has.
    pub(crate) fn of_receipt(settings: &Settings) -> Result<ModelFlags> {
        let head = settings.head.as_deref().map(|name| {
            HeadFlag::from_str(name, true)
                .map_err(|_| anyhow::anyhow!("receipt: settings.head: unknown type {name:?}"))
        });
        let layout = settings.i2s_layout.as_deref().map(str::parse);
        Ok(ModelFlags {
            i2s_layout: (layout.transpose())
                .context("receipt: settings.i2s_layout")?
                .unwrap_or_default(),
            head: head.transpose()?.unwrap_or_default(),
            head_screen: None,
        })
    }

    /// How the output head is loaded, with a screen as in `otherwise` if none is asked for.
    pub(crate) fn head(&self, otherwise: HeadScreen) -> HeadOptions {
        let dtype = match self.head {
            HeadFlag::Keep => None,
            HeadFlag::Q8_0 => Some(DType::Q8_0),
            HeadFlag::Q6_K => Some(DType::Q6_K),
            HeadFlag::Q4_K => Some(DType::Q4_K),
            HeadFlag::F16 => Some(DType::F16),
        };
        let screen = match self.head_screen {
            None => otherwise,
            Some(ScreenFlag::Off) => HeadScreen::Off,
            Some(ScreenFlag::Auto) => HeadScreen::Auto,
            Some(ScreenFlag::Q8_0) => HeadScreen::As(DType::Q8_0),
            Some(ScreenFlag::Q6_K) => HeadScreen::As(DType::Q6_K),
            Some(ScreenFlag::Q5_K) => HeadScreen::As(DType::Q5_K),
            Some(ScreenFlag::Q4_K) => HeadScreen::As(DType::Q4_K),
        };
        HeadOptions { dtype, screen }
    }
}

/// Types are spelled as in files.
#[derive(Debug, Clone, Copy, ValueEnum)]
#[value(rename_all = "snake_case")]
#[allow(non_camel_case_types)]
enum ScreenFlag {
    /// No copy
    Off,
    /// q8_0 for large heads of floats, else off
    Auto,
    Q8_0,
    Q6_K,
    Q5_K,
    Q4_K,
}

/// Types are spelled as in files.
#[derive(Debug, Clone, Copy, Default, ValueEnum)]
#[value(rename_all = "snake_case")]
#[allow(non_camel_case_types)]
enum HeadFlag {
    /// Unchanged
    #[default]
    Keep,
    Q8_0,
    Q6_K,
    Q4_K,
    F16,
}

/// Parses the name of a layout of I2_S weights.
pub(crate) fn i2s_layout() -> impl TypedValueParser<Value = I2sLayout> {
    PossibleValuesParser::new(I2sLayout::NAMES).try_map(|name| name.parse::<I2sLayout>())
}

/// How to run a model.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Engine")]
pub(crate) struct EngineFlags {
    #[command(flatten)]
    device: DeviceFlags,

    /// Threads to compute with [default: one for each physical core available]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    threads: Option<NonZero<usize>>,

    /// Context size in tokens [default: what the model was trained for, at most 4096]
    #[arg(short = 'c', long, alias = "ctx-size", value_name = "N", value_parser = positive)]
    ctx: Option<NonZero<usize>>,

    /// Data type of the KV cache; f16 halves its size, q8_0 nearly quarters it [default: what a package says,
    /// else f16 where a GPU computes and f32 on the CPU alone]
    #[arg(long, value_enum, value_name = "TYPE")]
    cache: Option<CacheFlag>,

    /// Activations for weights stored as blocks of integers (Q4_K, Q8_0, ...); with int8, those for F16 and
    /// BF16 weights are rounded to 13 and 16 bits on the CPU; f32 is for comparisons
    /// [default: what a package says, else int8]
    #[arg(long, value_enum, value_name = "TYPE", hide_short_help = true)]
    activations: Option<ActivationsFlag>,

    /// Where weights are kept: in the mapped files, or read into memory of this process, which takes a moment
    /// and is faster to compute from; auto reads what fits in half of the available memory. What goes to a GPU is copied
    /// there from the mapped files
    #[arg(long, value_enum, value_name = "HOW", default_value_t = WeightsFlag::Auto)]
    weights: WeightsFlag,

    /// Of a mixture of experts, keep at most so many bytes of experts in memory between tokens (4GiB), or such a
    /// share of them (33%); the others stay in the file, from which they are read when they are chosen. For the CPU
    #[arg(long, value_name = "SIZE|SHARE%", value_parser = experts_in_memory, hide_short_help = true)]
    experts_in_memory: Option<ExpertsInMemory>,

    /// LoRA adapter to apply: a PEFT folder, a package, its URL, or its name in the store; =SCALE sets its
    /// strength [SCALE: 1]; may be given several times
    #[arg(long, value_name = "DIR[=SCALE]")]
    lora: Vec<LoraFlag>,
}

/// What a file says of the flags of the same names.
#[derive(Debug, Default)]
pub(crate) struct EngineSettings {
    pub(crate) ctx: Option<NonZero<usize>>,
    pub(crate) threads: Option<NonZero<usize>>,
    pub(crate) backend: Option<String>,
    pub(crate) gpu_memory: Option<String>,
    pub(crate) lora: Vec<String>,
}

/// The value of `--lora`: a folder, an address or a name in the store, and the scale of the adapter there.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LoraFlag {
    pub(crate) folder: PathBuf,
    pub(crate) scale: f32,
    /// The type to convert its matrices to; `None` to keep theirs.
    pub(crate) dtype: Option<DType>,
}

impl FromStr for LoraFlag {
    type Err = String;

    /// `DIR` or `DIR=SCALE`. What follows the last `=` is a scale if it is a number, else part of the
    /// folder's name.
    fn from_str(text: &str) -> Result<LoraFlag, String> {
        let scaled = text.rsplit_once('=').and_then(|(folder, scale)| {
            let scale: f32 = scale.parse().ok()?;
            Some((folder, scale))
        });
        let (folder, scale) = scaled.unwrap_or((text, 1.0));
        if folder.is_empty() {
            return Err("expected a folder, or a folder and `=SCALE`".to_owned());
        }
        if !scale.is_finite() {
            return Err(format!("expected a finite scale, found {scale}"));
        }
        Ok(LoraFlag {
            folder: folder.into(),
            scale,
            dtype: None,
        })
    }
}

impl LoraFlag {
    /// The adapter in `folder` with its trained scale, its matrices converted to `dtype` where possible.
    pub(crate) fn new(folder: PathBuf, dtype: Option<DType>) -> LoraFlag {
        LoraFlag {
            folder,
            scale: 1.0,
            dtype,
        }
    }
}

/// The value of `--adapter`: the name by which requests ask for an adapter, of which model, and what `--lora` has.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct AdapterFlag {
    /// What clients call the model; `None` is the first one.
    pub(crate) model: Option<String>,
    pub(crate) name: String,
    pub(crate) lora: LoraFlag,
}

impl FromStr for AdapterFlag {
    type Err = String;

    /// `NAME=DIR`, `NAME=DIR=SCALE`, and either after `MODEL:`.
    fn from_str(text: &str) -> Result<AdapterFlag, String> {
        let Some((name, lora)) = text.split_once('=') else {
            return Err("expected NAME=DIR, or NAME=DIR=SCALE".to_owned());
        };
        let (model, name) = match name.rsplit_once(':') {
            Some((model, name)) => (Some(model.to_owned()), name),
            None => (None, name),
        };
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if name.is_empty() || !name.chars().all(fits) {
            return Err(format!(
                "expected letters, digits, - and _ as the name, found {name:?}"
            ));
        }
        Ok(AdapterFlag {
            model,
            name: name.to_owned(),
            lora: lora.parse()?,
        })
    }
}

/// Where weights are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WeightsFlag {
    Auto,
    Map,
    Read,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum CacheFlag {
    F32,
    F16,
    #[value(name = "q8_0")]
    Q8_0,
}

impl CacheFlag {
    fn of(cache: CacheType) -> CacheFlag {
        match cache {
            CacheType::F32 => CacheFlag::F32,
            CacheType::F16 => CacheFlag::F16,
            CacheType::Q8_0 => CacheFlag::Q8_0,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ActivationsFlag {
    Int8,
    F32,
}

impl ActivationsFlag {
    fn of(activations: Activations) -> ActivationsFlag {
        match activations {
            Activations::Int8 => ActivationsFlag::Int8,
            Activations::F32 => ActivationsFlag::F32,
        }
    }
}

/// More threads than any machine can use; each takes memory of its own.
pub(crate) const MAX_THREADS: usize = 1024;

/// Parses a number of threads.
pub(crate) fn thread_count(text: &str) -> Result<NonZero<usize>, String> {
    text.parse()
        .ok()
        .filter(|n: &NonZero<usize>| n.get() <= MAX_THREADS)
        .ok_or_else(|| format!("expected a number of threads from 1 to {MAX_THREADS}"))
}

/// Parses a bound of experts in memory.
fn experts_in_memory(text: &str) -> Result<ExpertsInMemory, String> {
    let expected =
        || format!("expected a size such as 4GiB, or a share from 0% to 100%, found {text}");
    match text.strip_suffix('%') {
        Some(share) => {
            let share: f64 = share.parse().map_err(|_| expected())?;
            let is_share = (0.0..=100.0).contains(&share);
            is_share
                .then_some(ExpertsInMemory::Share(share / 100.0))
                .ok_or_else(expected)
        }
        None => {
            let bytes = size::n_bytes(text).map_err(|_| expected())?;
            Ok(ExpertsInMemory::Bytes(bytes.get()))
        }
    }
}

/// Environment variable that limits the instruction set, for tests and bug reports.
const ISA_VARIABLE: &str = "STERNA_ISA";

impl EngineFlags {
    /// With these threads and adapters, on the CPU, and with weights mapped, so that a model is loaded at
    /// once.
    pub(crate) fn with(threads: Option<NonZero<usize>>, lora: Vec<LoraFlag>) -> EngineFlags {
        EngineFlags {
            device: DeviceFlags::cpu(),
            threads,
            ctx: None,
            cache: None,
            activations: None,
            weights: WeightsFlag::Map,
            experts_in_memory: None,
            lora,
        }
    }

    /// These, or where they say nothing, what `file` says.
    ///
    /// Errors: what no flag says.
    pub(crate) fn or(self, file: &EngineSettings) -> Result<EngineFlags> {
        let EngineSettings {
            ctx,
            threads,
            backend,
            gpu_memory,
            lora,
        } = file;
        let threads = threads.map(|n| {
            let n = thread_count(&n.to_string());
            n.map_err(|error| anyhow!("threads: {error}"))
        });
        let lora: Result<Vec<LoraFlag>, String> = match self.lora.is_empty() {
            true => lora.iter().map(|text| text.parse()).collect(),
            false => Ok(self.lora),
        };
        Ok(EngineFlags {
            device: self.device.or(backend.as_deref(), gpu_memory.as_deref())?,
            threads: self.threads.or(threads.transpose()?),
            ctx: self.ctx.or(*ctx),
            lora: lora.map_err(|error| anyhow!("lora: {error}"))?,
            ..self
        })
    }

    /// These, with what the package of `files` asks for where no flag says otherwise.
    pub(crate) fn for_model(mut self, files: &ModelFiles) -> EngineFlags {
        self.cache = self.cache.or(files.cache_type().map(CacheFlag::of));
        let asked = files.activations().map(ActivationsFlag::of);
        self.activations = self.activations.or(asked);
        self
    }

    /// The same with the settings of a receipt, whatever a package asks for.
    pub(crate) fn of_receipt(self, settings: &Settings) -> EngineFlags {
        let session = settings.session();
        EngineFlags {
            ctx: NonZero::new(session.ctx_len),
            cache: session.cache.map(CacheFlag::of),
            activations: Some(ActivationsFlag::of(settings.activations())),
            ..self
        }
    }

    /// Threads to use.
    pub(crate) fn n_threads(&self) -> usize {
        self.threads
            .map_or_else(machine::default_threads, NonZero::get)
    }

    /// Where weights are kept.
    pub(crate) fn weights(&self) -> WeightsFlag {
        self.weights
    }

    /// How many experts are in memory, where not all are to be; fails if all weights are to be read.
    pub(crate) fn experts(&self) -> Result<Option<ExpertsInMemory>> {
        if self.experts_in_memory.is_some() && self.weights == WeightsFlag::Read {
            bail!("expected --weights map or auto beside --experts-in-memory, found read");
        }
        Ok(self.experts_in_memory)
    }

    /// Adapters to apply.
    pub(crate) fn lora(&self) -> &[LoraFlag] {
        &self.lora
    }

    /// Context size for a model trained for `max_ctx`.
    pub(crate) fn ctx_len(&self, max_ctx: usize) -> usize {
        self.ctx.map_or(max_ctx.min(DEFAULT_CTX_LEN), NonZero::get)
    }

    /// Context size for a sequence of exactly `n_tokens`; fails if `--ctx` holds fewer.
    pub(crate) fn ctx_for(&self, n_tokens: usize) -> Result<usize> {
        match self.ctx {
            Some(ctx) if ctx.get() < n_tokens => {
                bail!(
                    "expected at most {ctx} tokens, the size of the context (--ctx), found {n_tokens}"
                )
            }
            _ => Ok(n_tokens),
        }
    }

    /// What weights stored as blocks of integers are multiplied with.
    pub(crate) fn activations(&self) -> Activations {
        match self.activations {
            None | Some(ActivationsFlag::Int8) => Activations::Int8,
            Some(ActivationsFlag::F32) => Activations::F32,
        }
    }

    /// Data type of the KV cache, if one is asked for.
    fn cache(&self) -> Option<CacheType> {
        self.cache.map(|cache| match cache {
            CacheFlag::F32 => CacheType::F32,
            CacheFlag::F16 => CacheType::F16,
            CacheFlag::Q8_0 => CacheType::Q8_0,
        })
    }

    /// Data type of the KV cache of the model of `plan`, before there is a device: as it is on a GPU if one is required.
    pub(crate) fn expected_cache(&self, plan: &ModelPlan) -> CacheType {
        let usual = match self.device.requires_gpu(plan.memory_bytes()) {
            true => CacheType::F16,
            false => CacheType::F32,
        };
        self.cache().unwrap_or(usual)
    }

    /// The screen of the output head with which answers are generated if none is asked for. GPUs have none, and making it
    /// takes longer than mapping weights does.
    pub(crate) fn screen(&self) -> HeadScreen {
        let stays = self.weights == WeightsFlag::Map || self.experts_in_memory.is_some();
        match self.device.is_gpu() || stays {
            true => HeadScreen::Off,
            false => HeadScreen::Auto,
        }
    }

    /// Settings of a session that holds `ctx_len` tokens.
    pub(crate) fn session(&self, ctx_len: usize) -> SessionOptions {
        SessionOptions {
            cache: self.cache(),
            ..SessionOptions::new(ctx_len)
        }
    }

    /// Calls `load` with the device to compute `plan` on, using `n_threads` threads, a GPU opened with
    /// `hints`; with the CPU if the model doesn't fit a GPU and any device will do.
    pub(crate) fn load_on(
        &self,
        n_threads: usize,
        plan: &ModelPlan,
        hints: &RuntimeOptimizations,
        warn: &mut dyn FnMut(Warning),
        load: impl FnMut(Device) -> sterna::Result<Loaded<Device>>,
    ) -> Result<Arc<Model<Device>>> {
        let compute = self.compute(n_threads, plan)?;
        device::load_on(&self.device, compute, plan, hints, warn, load)
    }

    /// The CPU and the GPU, for comparing them over `plan`.
    #[cfg(feature = "gpu")]
    pub(crate) fn both_devices(
        &self,
        plan: &ModelPlan,
        hints: &RuntimeOptimizations,
    ) -> Result<(sterna_engine::Cpu, sterna_engine::Gpu)> {
        device::both(&self.device, self.compute(self.n_threads(), plan)?, hints)
    }

    /// The same, with a GPU asked for; fails if the CPU was.
    #[cfg(feature = "gpu")]
    pub(crate) fn on_gpu(self) -> Result<EngineFlags> {
        Ok(EngineFlags {
            device: self.device.gpu()?,
            ..self
        })
    }

    /// The same for each of the GPUs that `gpus` asks for, and the name of each.
    ///
    /// Errors: a GPU that isn't there; another device was asked for.
    pub(crate) fn on_each(&self, gpus: &Gpus) -> Result<Vec<(EngineFlags, String)>> {
        let devices = self.device.on_each(gpus)?.into_iter();
        let engine = |(device, name)| {
            let flags = EngineFlags {
                device,
                ..self.clone()
            };
            (flags, name)
        };
        Ok(devices.map(engine).collect())
    }

    /// Where to compute.
    pub(crate) fn device(&self) -> &DeviceFlags {
        &self.device
    }

    fn compute(&self, n_threads: usize, plan: &ModelPlan) -> Result<ComputeOptions> {
        Ok(ComputeOptions {
            n_threads,
            isa: isa()?,
            activations: self.activations(),
            session: self.session(self.ctx_len(plan.config().max_ctx)),
        })
    }
}

/// The instruction set to use: the widest, unless the environment asks for less.
pub(crate) fn isa() -> Result<Isa> {
    let Some(name) = std::env::var_os(ISA_VARIABLE) else {
        return Ok(Isa::detect());
    };
    let name = name.to_string_lossy();
    Isa::limited_to(&name).with_context(|| {
        let names: Vec<_> = Isa::available().map(Isa::name).collect();
        format!(
            "{ISA_VARIABLE}: expected one of {}, found `{name}`",
            names.join(", ")
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thread_counts_are_bounded() {
        assert_eq!(thread_count("1").map(NonZero::get), Ok(1));
        assert_eq!(thread_count("1024").map(NonZero::get), Ok(1024));
        for text in ["0", "1025", "-1", "two", "99999999999999999999999"] {
            let expected = "expected a number of threads from 1 to 1024";
            assert_eq!(thread_count(text), Err(expected.to_owned()), "{text}");
        }
    }

    #[test]
    fn a_scale_follows_the_last_equals_sign() {
        let flag = |folder: &str, scale| {
            Ok(LoraFlag {
                folder: folder.into(),
                scale,
                dtype: None,
            })
        };
        assert_eq!("a/b".parse(), flag("a/b", 1.0));
        assert_eq!("a/b=0.5".parse(), flag("a/b", 0.5));
        assert_eq!("a/b=-2".parse(), flag("a/b", -2.0));
        assert_eq!("a=b".parse(), flag("a=b", 1.0));
        assert_eq!("a=1=0".parse(), flag("a=1", 0.0));
        for text in ["", "=1", "a=nan", "a=inf"] {
            assert!(text.parse::<LoraFlag>().is_err(), "{text}");
        }
    }

    #[test]
    fn adapters_have_names() {
        let flag = |text: &str| text.parse::<AdapterFlag>();
        let all = flag("tiny:red=a/b=0.5").unwrap();
        assert_eq!((all.model.as_deref(), &all.name[..]), (Some("tiny"), "red"));
        assert_eq!(
            (all.lora.folder.to_str(), all.lora.scale),
            (Some("a/b"), 0.5)
        );
        assert_eq!(flag("red=https://x/y").unwrap().model, None);
        for text in ["a/b", "=a", "r d=a", "red=", "red=a=inf"] {
            assert!(flag(text).is_err(), "{text}");
        }
    }
}
