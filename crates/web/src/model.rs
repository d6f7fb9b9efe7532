//! A loaded model and its sessions.

mod core;
mod place;

use std::collections::BTreeMap;
use std::rc::Rc;

use js_sys::{Array, Function, Object, Uint8Array, Uint32Array};
use sterna::receipt::{self, Receipt};
use sterna::scheduler::SchedulerOptions;
use sterna::{Error, ErrorCode, ModelEntry, ModelFiles, OpenOptions, Result};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Cpu, Gpu};
use sterna_kernels::Isa;
use wasm_bindgen::JsValue;
use wasm_bindgen::prelude::wasm_bindgen;

use crate::files::drive;
use crate::js::{self, Constraint, Files, failure, from_js, to_js};
use crate::options::{
    AdapterUse, BackendChoice, ModelInfo, ModelOptions, PromptOptions, Reason, ReceiptCheck,
};

use self::core::{Core, Early};
use self::place::Place;

/// A model, on the device that it was loaded to.
enum Loaded {
    Cpu(Box<Core<Cpu>>),
    Gpu(Box<Core<Gpu>>),
}

/// Evaluates an expression with the core of a model, wherever that is.
macro_rules! with {
    ($model:expr, $core:ident => $value:expr) => {
        match $model {
            Loaded::Cpu($core) => $value,
            Loaded::Gpu($core) => $value,
        }
    };
}

/// A loaded model.
///
/// Its methods are called one at a time: the next only when what the last one returned is settled.
#[wasm_bindgen]
pub struct Model {
    loaded: Loaded,
    files: Rc<ModelFiles>,
    options: ModelOptions,
    reason: Option<Reason>,
    /// What was swapped: the files, and the groups that were named.
    swaps: Vec<(Files, Vec<String>)>,
    /// The files of adapters, also of those that only sessions still have.
    adapters: BTreeMap<String, Files>,
}

#[wasm_bindgen]
impl Model {
    /// Loads the model whose files are `files`; `progress` is called with the bytes of weights that are loaded
    /// and those of all.
    pub async fn load(
        files: Files,
        options: JsValue,
        progress: Function,
    ) -> Result<Model, JsValue> {
        let options: ModelOptions = from_js("options", &options)?;
        Model::new(&files, options, &progress)
            .await
            .map_err(|error| failure(&error))
    }

    async fn new(from: &Files, options: ModelOptions, progress: &Function) -> Result<Model> {
        let files = Rc::new(
            drive(
                ModelFiles::open(entry(options.entry.as_deref()), open(&options.name)),
                from,
            )
            .await?,
        );
        let plan = files.plan(&PlanOptions::default())?;
        let place = Place::choose(&options, &plan, &files).await?;
        let early = options.prefill.clone().map(|prefill| Early {
            prefill,
            ctx_len: options.context_length,
        });
        let early = early.as_ref();
        let (loaded, reason) = match place {
            Place::Gpu(gpu) => {
                let cache = files.session(0).cache_on(&*gpu);
                let loaded = match place::trust(&gpu, &plan, cache).await {
                    Ok(()) => {
                        let scheduling = place::scheduling(&gpu);
                        Core::load(&files, from, plan, *gpu, scheduling, early, progress).await
                    }
                    Err(error) => Err(error),
                };
                match loaded {
                    Ok(core) => (Loaded::Gpu(Box::new(core)), None),
                    Err(error)
                        if options.backend == BackendChoice::Auto
                            && place::is_of_device(&error) =>
                    {
                        let reason = place::reason(&error);
                        let core = on_cpu(&files, from, options.threads, early, progress).await?;
                        (Loaded::Cpu(Box::new(core)), Some(reason))
                    }
                    Err(error) => return Err(error),
                }
            }
            Place::Cpu(reason) => {
                let core = on_cpu(&files, from, options.threads, early, progress).await?;
                (Loaded::Cpu(Box::new(core)), reason)
            }
        };
        Ok(Model {
            loaded,
            files,
            options,
            reason,
            swaps: Vec::new(),
            adapters: BTreeMap::new(),
        })
    }

    /// Loads the model again on the CPU, after its device was lost: answers in progress continue with the next
    /// step.
    pub async fn recover(&mut self, files: Files, progress: Function) -> Result<(), JsValue> {
        let core = on_cpu(&self.files, &files, self.options.threads, None, &progress).await;
        let mut core = core.map_err(|error| failure(&error))?;
        for (files, groups) in &self.swaps {
            let swapped = core.swap(files, &self.options.name, groups).await;
            swapped.map_err(|error| failure(&error))?;
        }
        for (name, files) in &self.adapters {
            let added = core.add_adapter(name.clone(), files, &self.files).await;
            added.map_err(|error| failure(&error))?;
        }
        let moved = with!(&mut self.loaded, old => core.take_over(old));
        moved.map_err(|error| failure(&error))?;
        self.loaded = Loaded::Cpu(Box::new(core));
        self.reason = Some(Reason {
            code: "device_lost",
            message: "the GPU was lost; the CPU goes on".to_owned(),
        });
        Ok(())
    }

    /// What is known of it.
    pub fn info(&self) -> Result<JsValue, JsValue> {
        let info = with!(&self.loaded, core => core.info(&self.files));
        let mut info: ModelInfo = info.map_err(|error| failure(&error))?;
        match &self.loaded {
            Loaded::Cpu(_) => info.backend_reason.clone_from(&self.reason),
            Loaded::Gpu(core) => {
                info.backend = "gpu";
                info.adapter = Some(core.backend().device().info().name.clone());
            }
        }
        to_js(&info)
    }

    /// The tokens of `text`.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, JsValue> {
        with!(&self.loaded, core => core.encode(text)).map_err(|error| failure(&error))
    }

    /// The text of `ids`.
    pub fn decode(&self, ids: &[u32]) -> Result<String, JsValue> {
        with!(&self.loaded, core => core.decode(ids)).map_err(|error| failure(&error))
    }

    /// The prompt that the model's chat template makes of `messages`.
    pub fn prompt(&self, messages: JsValue, options: JsValue) -> Result<Vec<u32>, JsValue> {
        let messages = from_js("messages", &messages)?;
        let options: PromptOptions = from_js("options", &options)?;
        let ids = with!(&self.loaded, core => core.prompt(messages, options));
        ids.map_err(|error| failure(&error))
    }

    /// A new session of at most `context_length` tokens.
    pub fn session(&mut self, context_length: Option<usize>) -> Result<u32, JsValue> {
        let id = with!(&mut self.loaded, core => core.open_session(context_length));
        id.map_err(|error| failure(&error))
    }

    /// Ends a session.
    pub fn close(&mut self, session: u32) {
        with!(&mut self.loaded, core => core.close_session(session));
    }

    /// What the tokens spell, for constraints: their bytes, one after the other, and where each ends.
    pub fn vocabulary(&self) -> Result<Array, JsValue> {
        let tokens = with!(&self.loaded, core => core.spellings());
        let tokens = tokens.map_err(|error| failure(&error))?;
        let ends = tokens.iter().scan(0, |end, token| {
            *end += token.len() as u32;
            Some(*end)
        });
        let ends: Vec<u32> = ends.collect();
        let bytes = Uint8Array::from(&tokens.concat()[..]);
        Ok(Array::of2(&bytes, &Uint32Array::from(&ends[..])))
    }

    /// Begins to answer `prompt` in a session; `constraint` is what the answer has to match.
    pub fn start(
        &mut self,
        session: u32,
        prompt: Vec<u32>,
        options: JsValue,
        constraint: Option<Constraint>,
    ) -> Result<(), JsValue> {
        let options = from_js("options", &options)?;
        let constraint = constraint.map(|constraint| Box::new(constraint) as _);
        let started =
            with!(&mut self.loaded, core => core.start(session, prompt, &options, constraint));
        started.map_err(|error| failure(&error))
    }

    /// Ends the answer of a session; what it holds stays.
    pub fn cancel(&mut self, session: u32) {
        with!(&mut self.loaded, core => core.cancel(session));
    }

    /// Computes one step of all answers; their events.
    pub async fn step(&mut self) -> Result<JsValue, JsValue> {
        let events = with!(&mut self.loaded, core => core.step().await);
        to_js(&events.map_err(|error| failure(&error))?)
    }

    /// Whether no answer is in progress.
    #[wasm_bindgen(js_name = isIdle)]
    pub fn is_idle(&self) -> bool {
        with!(&self.loaded, core => core.is_idle())
    }

    /// Logits after the last of `ids`, or after each of them if `all`.
    pub async fn logits(&self, ids: Vec<u32>, all: bool) -> Result<Vec<f32>, JsValue> {
        let logits = with!(&self.loaded, core => core.logits(&ids, all).await);
        logits.map_err(|error| failure(&error))
    }

    /// Computes the answer of `receipt`, JSON, again, with `adapters`; `files` are those that the model was loaded
    /// from.
    pub async fn check(
        &self,
        receipt: String,
        files: Files,
        adapters: JsValue,
    ) -> Result<JsValue, JsValue> {
        let adapters: Vec<AdapterUse> = from_js("adapters", &adapters)?;
        let checked = self.checked(&receipt, &files, &adapters).await;
        to_js(&ReceiptCheck::of(checked.map_err(|error| failure(&error))?))
    }

    async fn checked(
        &self,
        receipt: &str,
        from: &Files,
        adapters: &[AdapterUse],
    ) -> Result<receipt::Checked> {
        let receipt = Receipt::parse(receipt.as_bytes())?;
        let digest = drive(self.files.digest(|_| {}), from).await?;
        let device = match &self.loaded {
            Loaded::Cpu(_) => receipt::Device::Cpu(Isa::detect().name().to_owned()),
            Loaded::Gpu(core) => receipt::Device::Gpu(core.backend().device().info().name.clone()),
        };
        let files = &self.files;
        with!(&self.loaded, core => core.check(&receipt, files, digest, device, adapters).await)
    }

    /// Loads an adapter under `name`.
    #[wasm_bindgen(js_name = addAdapter)]
    pub async fn add_adapter(&mut self, name: String, files: Files) -> Result<(), JsValue> {
        let base = Rc::clone(&self.files);
        let added =
            with!(&mut self.loaded, core => core.add_adapter(name.clone(), &files, &base).await);
        added.map_err(|error| failure(&error))?;
        self.adapters.insert(name, files);
        Ok(())
    }

    /// Forgets an adapter; sessions that use it keep it.
    #[wasm_bindgen(js_name = removeAdapter)]
    pub fn remove_adapter(&mut self, name: &str) {
        let is_used = with!(&mut self.loaded, core => {
            core.remove_adapter(name);
            core.is_adapter_used(name)
        });
        if !is_used {
            self.adapters.remove(name);
        }
    }

    /// Makes `adapters` those of a session.
    #[wasm_bindgen(js_name = useAdapters)]
    pub fn use_adapters(&mut self, session: u32, adapters: JsValue) -> Result<(), JsValue> {
        let adapters: Vec<AdapterUse> = from_js("adapters", &adapters)?;
        let used = with!(&mut self.loaded, core => core.use_adapters(session, adapters));
        used.map_err(|error| failure(&error))
    }

    /// Replaces `groups`, or those that differ, by those of the package in `files`.
    pub async fn swap(&mut self, files: Files, groups: Vec<String>) -> Result<JsValue, JsValue> {
        let name = &self.options.name;
        let swapped = with!(&mut self.loaded, core => core.swap(&files, name, &groups).await);
        let swapped = swapped.map_err(|error| failure(&error))?;
        self.swaps.push((files, groups));
        to_js(&swapped)
    }

    /// Bytes in use: of this module's memory, and of buffers on the GPU.
    pub fn memory(&self) -> Result<JsValue, JsValue> {
        let gpu_bytes = match &self.loaded {
            Loaded::Cpu(_) => 0,
            Loaded::Gpu(core) => core.backend().device().memory().used,
        };
        let memory = Object::new();
        let set = |name: &str, bytes: u64| {
            js_sys::Reflect::set(&memory, &name.into(), &JsValue::from(bytes as f64))
        };
        set("wasmBytes", js::memory_bytes())?;
        set("gpuBytes", gpu_bytes)?;
        Ok(memory.into())
    }
}

async fn on_cpu(
    files: &Rc<ModelFiles>,
    from: &Files,
    threads: usize,
    early: Option<&Early>,
    progress: &Function,
) -> Result<Core<Cpu>> {
    let plan = files.plan(&PlanOptions::default())?;
    let (cpu, scheduling) = (place::cpu(files, threads), SchedulerOptions::default());
    Core::load(files, from, plan, cpu, scheduling, early, progress).await
}

pub(crate) fn entry(name: Option<&str>) -> ModelEntry {
    name.map_or(ModelEntry::Folder, |name| ModelEntry::File(name.to_owned()))
}

/// How to open files that were verified when they arrived, and their signature with them.
fn open(name: &str) -> OpenOptions {
    OpenOptions {
        is_verified: true,
        signatures: Some(std::sync::Arc::new(Checked)),
        ..OpenOptions::new(name)
    }
}

/// Signatures are checked when a package arrives.
struct Checked;

impl sterna::Signatures for Checked {
    fn check(&self, _: &str, _: &[u8], _: &str) -> Result<()> {
        Ok(())
    }
}

/// An error of a request.
fn invalid(message: impl Into<String>) -> Error {
    Error::new(ErrorCode::InvalidRequest, message)
}
