//! Models on a GPU against the same models on the CPU. Skipped, with a message, where there is no
//! adapter; a software one will do.
#![cfg(feature = "gpu")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use common::{Reference, best, cpu, load_on, max_difference, plan_gguf, plan_hf, read, testdata};
use serde_json::Value;
use sterna_engine::{
    Activations, Backend, CacheType, Gpu, Logits, Model, ModelPlan, Session, SessionOptions, Step,
};
use sterna_gpu::{Device, DeviceOptions, GpuError};
use sterna_kernels::Isa;

/// Logits of float models: sums in another order, as between the CPU and the reference.
const MAX_DIFFERENCE: f32 = 2e-3;
/// Models that round activations: a difference in the last place flips a rounding now and then. Mean
/// squared error over mean square.
const MAX_ERROR: f64 = 2e-3;
/// Best tokens are compared where the CPU is this sure.
const SURE: f32 = 0.5;

fn gpu() -> Option<Gpu> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| match Device::open(&DeviceOptions::default()) {
        Ok(device) => Some(device),
        Err(error @ GpuError::NoAdapter { .. }) => {
            eprintln!("SKIPPED: {error}; see scripts/software-gpu.sh");
            None
        }
        Err(error) => panic!("{error}"),
    });
    device.clone().map(|device| Gpu::new(device, 2, Isa::detect()))
}

/// A model in `testdata/`, as often as wanted.
enum Source {
    Hf(PathBuf),
    Gguf(PathBuf),
}

impl Source {
    fn plan(&self) -> (ModelPlan, Vec<Bytes>) {
        match self {
            Source::Hf(dir) => plan_hf(dir),
            Source::Gguf(path) => plan_gguf(std::slice::from_ref(path)),
        }
    }

    fn load<B: Backend>(&self, backend: B) -> Arc<Model<B>> {
        let (plan, files) = self.plan();
        load_on(plan, &files, backend).unwrap_or_else(|e| panic!("{}: {e}", self.name()))
    }

    fn name(&self) -> String {
        let (Source::Hf(path) | Source::Gguf(path)) = self;
        path.display().to_string()
    }
}

fn logits<B: Backend>(model: &Arc<Model<B>>, ids: &[u32], options: SessionOptions) -> Vec<f32> {
    let mut session = Session::new(Arc::clone(model), options).unwrap();
    session.forward(ids, Logits::All).unwrap()
}

/// Mean squared error over mean square.
fn error(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let square = |v: f32| f64::from(v) * f64::from(v);
    let errors: f64 = got.iter().zip(want).map(|(a, b)| square(a - b)).sum();
    errors / want.iter().map(|v| square(*v)).sum::<f64>()
}

/// Compares logits at every position, and the best tokens where the CPU is sure.
fn check_logits(name: &str, got: &[f32], want: &[f32], n_vocab: usize, bound: f64) {
    let error = error(got, want);
    let difference = max_difference(got, want);
    eprintln!("{name}: error {error:.1e}, largest difference {difference:.1e}");
    assert!(error <= bound, "{name}: {error}, largest difference {difference}");
    let sure = SURE.max(2.0 * difference);
    let rows = got.chunks_exact(n_vocab).zip(want.chunks_exact(n_vocab));
    for (i, (got, want)) in rows.enumerate() {
        let (id, margin) = best(want);
        if margin > sure {
            assert_eq!(best(got).0, id, "{name}, position {i}");
        }
    }
}

fn check_model(gpu: &Gpu, source: &Source, ids: &[u32], bound: f64) {
    let on_cpu = source.load(cpu());
    let on_gpu = source.load(gpu.clone());
    let n_vocab = on_cpu.config().n_vocab;
    let options = |chunk| SessionOptions {
        chunk,
        ..SessionOptions::new(ids.len())
    };
    let want = logits(&on_cpu, ids, options(1000));
    for chunk in [1000, 7, 1] {
        let got = logits(&on_gpu, ids, options(chunk));
        let name = format!("{}, chunks of {chunk}", source.name());
        check_logits(&name, &got, &want, n_vocab, bound);
    }
}

fn reference_ids(dir: &Path) -> Vec<u32> {
    Reference::read(&dir.join("reference.safetensors")).ids
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&read(path)).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    let ids = value.as_array().unwrap().iter();
    ids.map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn reference_models() {
    let Some(gpu) = gpu() else { return };
    for kind in ["reference-logits", "reference-variants"] {
        let mut dirs: Vec<PathBuf> = std::fs::read_dir(testdata().join(kind))
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.join("config.json").exists())
            .collect();
        dirs.sort();
        for dir in dirs {
            let name = dir.file_name().unwrap().to_str().unwrap();
            let words = ["bitnet", "bitlinear", "online"];
            let ternary = words.iter().any(|word| name.contains(word));
            let bound = if ternary { MAX_ERROR } else { 1e-7 };
            check_model(&gpu, &Source::Hf(dir.clone()), &reference_ids(&dir), bound);
        }
    }
}
