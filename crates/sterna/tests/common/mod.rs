//! Models to generate with.
#![allow(dead_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna_engine::plan::PlanOptions;
use sterna_engine::{
    Backend, Cpu, Loader, Model, ModelPlan, SamplerConfig, Session, SessionOptions,
};
use sterna_format::gguf::{self, Gguf};
use sterna_format::hf::{self, TokenizerConfig};
use sterna_format::safetensors::{self, SafeTensors};
use sterna_kernels::Isa;
use sterna_text::{Encode, Tokenizer};

/// A model's files, to be loaded as often as wanted.
pub(crate) struct Files {
    pub(crate) name: &'static str,
    pub(crate) plan: ModelPlan,
    pub(crate) tokenizer: Tokenizer,
    files: Vec<Bytes>,
}

fn read(path: &Path) -> Bytes {
    Bytes::from(fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
}

fn at(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

impl Files {
    /// The built-in model.
    pub(crate) fn tiny_tales() -> Files {
        Files::hf("builtin", &at("models/tiny-tales"))
    }

    /// A model that is quick, and says nothing worth reading.
    pub(crate) fn stories() -> Files {
        Files::hf("stories260K", &at("../../testdata/stories260K/hf"))
    }

    /// A model of trits.
    pub(crate) fn bitllama() -> Files {
        let file = read(&at("../../testdata/bitllama-3M/bitllama-3M-tq2_0.gguf"));
        let header = Gguf::parse(&file, file.len() as u64).unwrap();
        let model = gguf::Model::from_parts(vec![header]).unwrap();
        let options = PlanOptions::default();
        Files {
            name: "bitllama",
            plan: ModelPlan::from_gguf(model.metadata(), model.tensors(), &options).unwrap(),
            tokenizer: Tokenizer::from_gguf(model.metadata()).unwrap(),
            files: vec![file],
        }
    }

    fn hf(name: &'static str, dir: &Path) -> Files {
        let (plan, file) = plan(dir);
        let tokenizer_config = fs::read(dir.join("tokenizer_config.json"));
        let tokenizer_config = TokenizerConfig::parse(&tokenizer_config.unwrap()).unwrap();
        let tokenizer = match fs::read(dir.join("tokenizer.json")) {
            Ok(json) => Tokenizer::from_hf_json(&json, Some(&tokenizer_config)),
            Err(_) => Tokenizer::from_sentencepiece(
                &read(&dir.join("tokenizer.model")),
                Some(&tokenizer_config),
            ),
        };
        Files {
            name,
            plan,
            tokenizer: tokenizer.unwrap(),
            files: vec![file],
        }
    }

    pub(crate) fn load<B: Backend>(&self, backend: B) -> Arc<Model<B>> {
        load(self.plan.clone(), &self.files, backend)
    }

    /// The tokens of `text`, in which special ones may be written out.
    pub(crate) fn encode(&self, text: &str) -> Vec<u32> {
        let options = Encode {
            add_special: true,
            parse_special: true,
        };
        self.tokenizer.encode(text, options).unwrap()
    }
}

/// The checkpoint in `dir`, of one file.
fn plan(dir: &Path) -> (ModelPlan, Bytes) {
    let config = hf::Config::parse(&read(&dir.join("config.json"))).unwrap();
    let file = read(&dir.join("model.safetensors"));
    let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
    let catalog = safetensors::merge(vec![("model.safetensors", header)], None).unwrap();
    let plan = ModelPlan::from_hf(&config, &catalog, &PlanOptions::default());
    (plan.unwrap(), file)
}

fn load<B: Backend>(plan: ModelPlan, files: &[Bytes], backend: B) -> Arc<Model<B>> {
    let mut loader = Loader::new(plan, backend);
    while let Some(want) = loader.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        loader.feed(files[want.file].slice(range)).unwrap();
    }
    loader.finish().unwrap()
}

/// The checkpoint in `dir`, without a tokenizer.
pub(crate) fn checkpoint(dir: &Path) -> Arc<Model<Cpu>> {
    let (plan, file) = plan(dir);
    load(plan, &[file], cpu())
}

/// The GGUF file at `path`, likewise.
pub(crate) fn gguf(path: &Path) -> Arc<Model<Cpu>> {
    let file = read(path);
    let header = Gguf::parse(&file, file.len() as u64).unwrap();
    let model = gguf::Model::from_parts(vec![header]).unwrap();
    let options = PlanOptions::default();
    let plan = ModelPlan::from_gguf(model.metadata(), model.tensors(), &options).unwrap();
    load(plan, &[file], cpu())
}

/// A model most of whose layers have a state, without a tokenizer.
pub(crate) fn stateful() -> Arc<Model<Cpu>> {
    checkpoint(&at("../../testdata/reference-states/hf/lfm2"))
}

pub(crate) fn cpu() -> Cpu {
    Cpu::new(1, Isa::detect())
}

/// The GPU there is, a software one too; `None`, with a message, if there is none and none is required.
#[cfg(feature = "gpu")]
pub(crate) fn gpu() -> Option<sterna_engine::Gpu> {
    let device = sterna_testing::gpu::device()?;
    Some(sterna_engine::Gpu::new(device, 1, Isa::detect()))
}

pub(crate) fn session<B: Backend>(model: &Arc<Model<B>>, ctx_len: usize) -> Session<B> {
    Session::new(Arc::clone(model), SessionOptions::new(ctx_len)).unwrap()
}

/// A scheduler with one empty sequence.
pub(crate) fn one<B: Backend>(
    model: &Arc<Model<B>>,
    ctx_len: usize,
    options: SchedulerOptions,
) -> (Scheduler<B>, SequenceId) {
    let mut scheduler = Scheduler::new(options);
    let id = scheduler.add(Sequence::new(session(model, ctx_len)));
    (scheduler, id)
}

pub(crate) fn sampled(seed: u64) -> SamplerConfig {
    SamplerConfig {
        temperature: 0.8,
        top_k: 40,
        top_p: 0.95,
        seed,
        ..SamplerConfig::default()
    }
}
