//! Loading the models in `testdata/`, and reading what they are compared with.
#![allow(dead_code)]

#[cfg(feature = "gpu")]
pub(crate) mod compare;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use sterna_engine::plan::PlanOptions;
use sterna_engine::{
    Backend, CacheType, Cpu, LoadError, Loader, Logits, Model, ModelPlan, Session, SessionOptions,
};
use sterna_format::gguf::{self, Gguf};
use sterna_format::hf;
use sterna_format::safetensors::{self, SafeTensors};
use sterna_kernels::Isa;
use sterna_kernels::quant::decode_row;

pub(crate) fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata")
}

pub(crate) fn read(path: &Path) -> Bytes {
    Bytes::from(fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display())))
}

/// Files with names ending in `extension`, in order.
pub(crate) fn files(dir: &Path, extension: &str) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = fs::read_dir(dir)
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == extension))
        .collect();
    files.sort();
    files
}

pub(crate) fn cpu() -> Cpu {
    Cpu::new(2, Isa::detect())
}

/// Sessions of `ctx_len` tokens with the same cache on every device.
pub(crate) fn in_f32(ctx_len: usize) -> SessionOptions {
    SessionOptions {
        cache: Some(CacheType::F32),
        ..SessionOptions::new(ctx_len)
    }
}

pub(crate) fn load(
    plan: ModelPlan,
    files: &[Bytes],
    cpu: Cpu,
) -> Result<Arc<Model<Cpu>>, LoadError> {
    load_on(plan, files, cpu)
}

pub(crate) fn load_on<B: Backend>(
    plan: ModelPlan,
    files: &[Bytes],
    backend: B,
) -> Result<Arc<Model<B>>, LoadError> {
    let mut loader = Loader::new(plan, backend);
    while let Some(want) = loader.wanted() {
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let bytes = files[want.file].slice(range);
        loader.feed(bytes)?;
    }
    loader.finish()
}

/// A session that holds the first chunk of `ids`, which was asked for when the share `from` of the weights was there.
pub(crate) fn load_with_prompt<B: Backend>(
    plan: ModelPlan,
    files: &[Bytes],
    backend: B,
    from: f64,
    (ids, options): (&[u32], SessionOptions),
) -> Result<Session<B>, LoadError> {
    let n_requests = plan.requests().count();
    let mut loader = Loader::new(plan, backend);
    for i in 0.. {
        if i == (from * n_requests as f64) as usize {
            loader.prefill(ids.to_vec(), options)?;
        }
        let Some(want) = loader.wanted() else {
            break;
        };
        let range = want.offset as usize..(want.offset + want.len) as usize;
        let bytes = files[want.file].slice(range);
        loader.feed(bytes)?;
    }
    let session = loader.finish_with_session()?.session;
    Ok(session.expect("a prompt was asked for"))
}

/// The plan and the files of a Hugging Face folder.
pub(crate) fn plan_hf(dir: &Path) -> (ModelPlan, Vec<Bytes>) {
    let config = hf::Config::parse(&read(&dir.join("config.json"))).unwrap();
    let paths: Vec<PathBuf> = files(dir, "safetensors")
        .into_iter()
        .filter(|p| !p.ends_with("reference.safetensors"))
        .collect();
    let files: Vec<Bytes> = paths.iter().map(|p| read(p)).collect();
    let headers: Vec<SafeTensors> = files
        .iter()
        .map(|f| SafeTensors::parse(f, f.len() as u64).unwrap())
        .collect();
    let names: Vec<&str> = paths
        .iter()
        .map(|p| p.file_name().unwrap().to_str().unwrap())
        .collect();
    let parts: Vec<_> = names.into_iter().zip(headers).collect();
    let catalog = safetensors::merge(parts, None).unwrap();
    let plan = ModelPlan::from_hf(&config, &catalog, &PlanOptions::default())
        .unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    (plan, files)
}

/// The plan and the files of a GGUF file or of the parts of a split set.
pub(crate) fn plan_gguf(paths: &[PathBuf]) -> (ModelPlan, Vec<Bytes>) {
    let files: Vec<Bytes> = paths.iter().map(|path| read(path)).collect();
    let headers = files
        .iter()
        .map(|file| Gguf::parse(file, file.len() as u64).unwrap())
        .collect();
    let model = gguf::Model::from_parts(headers).unwrap();
    let plan = ModelPlan::from_gguf(model.metadata(), model.tensors(), &PlanOptions::default())
        .unwrap_or_else(|e| panic!("{paths:?}: {e}"));
    (plan, files)
}

pub(crate) fn load_hf(dir: &Path) -> Arc<Model<Cpu>> {
    let (plan, files) = plan_hf(dir);
    load(plan, &files, cpu()).unwrap_or_else(|e| panic!("{}: {e}", dir.display()))
}

pub(crate) fn load_gguf(path: &Path) -> Arc<Model<Cpu>> {
    load_gguf_parts(&[path.to_owned()])
}

pub(crate) fn load_gguf_parts(paths: &[PathBuf]) -> Arc<Model<Cpu>> {
    load_gguf_parts_on(paths, cpu())
}

pub(crate) fn load_gguf_parts_on(paths: &[PathBuf], cpu: Cpu) -> Arc<Model<Cpu>> {
    let (plan, files) = plan_gguf(paths);
    load(plan, &files, cpu).unwrap_or_else(|e| panic!("{paths:?}: {e}"))
}

/// What a model should give.
pub(crate) struct Reference {
    pub(crate) ids: Vec<u32>,
    /// `[ids.len(), n_vocab]`.
    pub(crate) logits: Vec<f32>,
    pub(crate) greedy_ids: Vec<u32>,
    pub(crate) greedy_margins: Vec<f32>,
}

impl Reference {
    pub(crate) fn read(path: &Path) -> Reference {
        let file = read(path);
        let header = SafeTensors::parse(&file, file.len() as u64).unwrap();
        let bytes = |name: &str| {
            let t = header.tensors().iter().find(|t| t.name == name).unwrap();
            &file[t.offset as usize..(t.offset + t.len) as usize]
        };
        let ints = |name: &str| -> Vec<u32> {
            bytes(name)
                .as_chunks::<4>()
                .0
                .iter()
                .map(|b| u32::from_le_bytes(*b))
                .collect()
        };
        let floats = |name: &str| {
            let bytes = bytes(name);
            let mut out = vec![0.0; bytes.len() / 4];
            decode_row(sterna_format::DType::F32, bytes, &mut out).unwrap();
            out
        };
        Reference {
            ids: ints("input_ids"),
            logits: floats("logits"),
            greedy_ids: ints("greedy_ids"),
            greedy_margins: floats("greedy_margins"),
        }
    }

    pub(crate) fn n_vocab(&self) -> usize {
        self.logits.len() / self.ids.len()
    }
}

/// Logits at every position of `ids`, run `chunk` tokens at a time.
pub(crate) fn logits(model: &Arc<Model<Cpu>>, ids: &[u32], chunk: usize) -> Vec<f32> {
    let options = SessionOptions {
        chunk,
        ..SessionOptions::new(ids.len())
    };
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session.forward(ids, Logits::All).unwrap()
}

/// Mean negative log-likelihood of each next id.
pub(crate) fn nll(logits: &[f32], ids: &[u32], n_vocab: usize) -> f64 {
    let rows = logits.chunks_exact(n_vocab);
    let total: f64 = rows
        .zip(&ids[1..])
        .map(|(row, &next)| {
            let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let sum: f64 = row.iter().map(|&v| f64::from(v - max).exp()).sum();
            sum.ln() - f64::from(row[next as usize] - max)
        })
        .sum();
    total / (ids.len() - 1) as f64
}

/// The best id of a row, and by how much.
pub(crate) fn best(row: &[f32]) -> (u32, f32) {
    let (mut best, mut first, mut second) = (0, f32::NEG_INFINITY, f32::NEG_INFINITY);
    for (id, &v) in row.iter().enumerate() {
        if v > first {
            (best, second, first) = (id as u32, first, v);
        } else if v > second {
            second = v;
        }
    }
    (best, first - second)
}

/// Largest difference of two slices of one length.
pub(crate) fn max_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter()
        .zip(b)
        .map(|(a, b)| (a - b).abs())
        .fold(0.0, f32::max)
}
