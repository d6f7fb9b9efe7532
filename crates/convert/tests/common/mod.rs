//! Models of the test data, opened and computed in this process.

// Each test file uses its own part of this module.
#![allow(dead_code)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna::native::{BUILTIN, LoadFrom, LocalModel, Located, Weights, builtin};
use sterna_convert::{Event, Warning};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Cpu, Logits, Session, SessionOptions};
use sterna_kernels::{Exec, Isa};

/// A path in the test data of the workspace.
pub(crate) fn testdata(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testdata")
        .join(path)
}

/// The models of the test data: files and folders.
pub(crate) fn models() -> Vec<PathBuf> {
    let mut models = Vec::new();
    for set in [
        "reference-gguf",
        "reference-logits",
        "reference-layers/hf",
        "reference-variants",
        "reference-mixtures/gguf",
        "reference-mixtures/hf",
        "reference-states/gguf",
        "reference-states/hf",
    ] {
        for dir in fs::read_dir(testdata(set)).unwrap() {
            let dir = dir.unwrap().path();
            if dir.is_dir() {
                models.push(dir);
            }
        }
    }
    for file in ["f16.gguf", "tq1_0.gguf", "tq2_0.gguf"] {
        models.push(testdata(&format!("bitllama-3M/bitllama-3M-{file}")));
    }
    models.push(testdata("bitllama-3M/hf-packed"));
    models.retain(|model| model.exists());
    models.sort();
    models
}

/// A GGUF file of stories260K.
pub(crate) fn stories() -> PathBuf {
    let mut files = fs::read_dir(testdata("stories260K")).unwrap();
    let is_gguf = |path: &PathBuf| path.extension().is_some_and(|e| e == "gguf");
    let found = files.find_map(|entry| Some(entry.unwrap().path()).filter(is_gguf));
    found.expect("a GGUF file of it")
}

/// Opens the model at `path`, or the built-in one.
pub(crate) fn try_open(path: &Path) -> sterna::Result<LocalModel> {
    let located = match path == Path::new(BUILTIN) {
        true => builtin(),
        false => Located::at(path)?,
    };
    LocalModel::open(path.to_str().unwrap(), located, None, None)
}

/// The same, of a model that is one.
pub(crate) fn open(path: &Path) -> LocalModel {
    try_open(path).unwrap()
}

/// Computes on `n_threads` threads.
pub(crate) fn exec(n_threads: usize) -> Arc<Exec> {
    Arc::new(Exec::new(n_threads, Isa::detect()))
}

/// The logits of the model at `path` for `ids`, one row after another.
pub(crate) fn logits(path: &Path, ids: &[u32]) -> Vec<f32> {
    let files = open(path);
    let plan = files.plan(&PlanOptions::default()).unwrap();
    let from = LoadFrom {
        weights: Weights::Mapped,
        experts: None,
        n_threads: 1,
        progress: &|_| {},
    };
    let loaded = files.load_on(plan, Cpu::new(1, Isa::detect()), &from);
    let model = loaded.unwrap().model;
    let mut session = Session::new(model, SessionOptions::new(ids.len())).unwrap();
    let values = match session.model().config().is_encoder() {
        true => session.hidden(ids),
        false => session.forward(ids, Logits::All),
    };
    values.unwrap()
}

/// The bits of a model's logits for a few ids.
pub(crate) fn logit_bits(path: &Path) -> Vec<u32> {
    let rows = logits(path, &[5, 42, 79, 116, 3, 40, 77, 114]);
    rows.into_iter().map(f32::to_bits).collect()
}

/// All files of a folder.
pub(crate) fn contents(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entry = |entry: std::io::Result<fs::DirEntry>| {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        (name, fs::read(path).unwrap())
    };
    fs::read_dir(dir).unwrap().map(entry).collect()
}

/// The names of all that is in a folder, sorted.
pub(crate) fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// What `work` gives, and what it warns of.
pub(crate) fn warned<T>(work: impl FnOnce(&dyn Fn(Event)) -> T) -> (T, Vec<Warning>) {
    let warnings = RefCell::new(Vec::new());
    let result = work(&|event| {
        if let Event::Warning(warning) = event {
            warnings.borrow_mut().push(warning);
        }
    });
    (result, warnings.into_inner())
}

/// The message of an error, down to its cause.
pub(crate) fn message<T>(result: sterna::Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected a refusal"),
        Err(error) => format!("{error:#}"),
    }
}
