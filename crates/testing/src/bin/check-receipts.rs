//! Checks the receipts in `testdata/receipts` with every instruction set of the machine that it runs on, and that they
//! don't check once they are changed: by itself, so that it runs where there are neither files nor threads.

use std::collections::BTreeMap;
use std::process::ExitCode;

use bytes::Bytes;
use serde_json::{Value, json};
use sterna::receipt::{Checked, Device, Difference, Receipt, Setup};
use sterna::{
    Adapted, LoadOptions, Machine, ModelEntry, ModelFiles, OpenOptions, Result, Verification, Want,
};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Activations, Cpu, SessionOptions};
use sterna_kernels::Isa;

macro_rules! model {
    ($($name:literal),*) => {
        [$(($name, include_bytes!(concat!("../../../sterna/models/tiny-tales/", $name)).as_slice())),*]
    };
}

macro_rules! receipts {
    ($($name:literal),*) => {
        [$(($name, include_bytes!(concat!("../../../../testdata/receipts/", $name)).as_slice())),*]
    };
}

/// The built-in model.
static MODEL: [(&str, &[u8]); 5] = model![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json"
];
static RECEIPTS: [(&str, &[u8]); 2] = receipts!["drawn.json", "greedy.json"];

/// A model's files, by name.
type Files = BTreeMap<&'static str, Bytes>;

fn files() -> Files {
    let files = MODEL.into_iter();
    files
        .map(|(name, bytes)| (name, Bytes::from_static(bytes)))
        .collect()
}

/// The same with a weight changed: of four in a byte, each 0, 1 or 2, a 0 is a 1, or the other way round.
fn changed_files() -> Files {
    let mut files = files();
    let weights = files.get_mut("model.safetensors").expect("it has weights");
    let mut changed = weights.to_vec();
    let half = changed.len() / 2;
    let mut weights_of_layers = changed[half..].iter_mut();
    *weights_of_layers
        .find(|byte| **byte & 2 == 0)
        .expect("not all are 2") ^= 1;
    *weights = changed.into();
    files
}

/// Gives `machine` the files of the model.
fn drive<T>(mut machine: Machine<'_, T>, files: &Files) -> Result<T> {
    while let Some(want) = machine.wanted() {
        match want {
            Want::Len { name } => {
                let len = files.get(&*name).map(|file| file.len() as u64);
                machine.give_len(len)?;
            }
            Want::Bytes { name, range } => {
                let range = range.start as usize..range.end as usize;
                machine.give_bytes(files[&*name].slice(range))?;
            }
        }
    }
    machine.finish()
}

/// A model that is loaded for an instruction set, and in what sessions it answers.
struct Model {
    adapted: Adapted<Cpu>,
    setup: Setup,
    session: SessionOptions,
}

impl Model {
    fn load(files: &Files, isa: Isa, session: SessionOptions) -> Result<Self> {
        let open = ModelFiles::open(ModelEntry::Folder, OpenOptions::new("builtin"));
        let opened = drive(open, files)?;
        let plan = opened.plan(&PlanOptions::default())?;
        let digest = drive(opened.digest(|_| {}), files)?;
        let device = Device::Cpu(isa.name().to_owned());
        let cpu = Cpu::new(1, isa);
        let (ctx_len, cache) = (session.ctx_len, session.cache_on(&cpu));
        let int8 = Activations::Int8;
        let setup = Setup::new("builtin", digest, &plan, int8, ctx_len, cache, device);
        let options = LoadOptions {
            verification: Verification::ByLoading,
            ..LoadOptions::default()
        };
        let loaded = drive(opened.load(plan, cpu, options), files)?;
        Ok(Self {
            adapted: Adapted::new(loaded.model),
            setup,
            session,
        })
    }

    /// What `receipt` comes to.
    fn check(&self, receipt: &Receipt) -> Result<Checked> {
        receipt.check(&self.setup, &mut self.adapted.session(self.session)?)
    }

    /// In what `receipt` differs. Errors: in nothing.
    fn difference(&self, receipt: &Receipt) -> Result<Difference, String> {
        match self.check(receipt) {
            Ok(Checked::Differs(difference)) => Ok(difference),
            Ok(_) => Err("it checks, though it was changed".to_owned()),
            Err(error) => Err(format!("{error:#}")),
        }
    }
}

/// The receipt with the value at `path` changed to `value`.
fn with(json: &[u8], path: &str, value: Value) -> Receipt {
    let mut json: Value = serde_json::from_slice(json).expect("a receipt, which is JSON");
    *json.pointer_mut(path).expect("a member of it") = value;
    Receipt::parse(json.to_string().as_bytes()).expect("still a receipt")
}

/// That `receipt` differs in what was asked, and with the digest that belongs to that in a token.
fn is_found_out(model: &Model, receipt: &Receipt) -> Result<(), String> {
    let begin = match model.difference(receipt)? {
        Difference::Asked { expected, .. } => expected,
        other => return Err(other.to_string()),
    };
    let again = with(receipt.to_json().as_bytes(), "/logits/begin", begin.into());
    match model.difference(&again)? {
        difference if difference.index().is_some() => Ok(()),
        other => Err(other.to_string()),
    }
}

/// That the receipt checks, and that none does with another token, seed, weight or adapter.
fn check(json: &[u8], isa: Isa) -> Result<(), String> {
    let receipt = Receipt::parse(json).map_err(|error| error.to_string())?;
    let session = receipt.settings().session();
    let load =
        |files: Files| Model::load(&files, isa, session).map_err(|error| format!("{error:#}"));
    let model = load(files())?;
    match model.check(&receipt) {
        Ok(Checked::Same) => {}
        Ok(_) => return Err("other bits".to_owned()),
        Err(error) => return Err(format!("{error:#}")),
    }
    match model.difference(&with(json, "/answer/3", 9.into()))? {
        Difference::Token { index: 3, .. } => {}
        other => return Err(format!("a token: {other}")),
    }
    is_found_out(&model, &with(json, "/sampling/seed", "8".into()))
        .map_err(|other| format!("the seed: {other}"))?;
    let adapter = json!([{"name": "red", "blake3": "00".repeat(32), "scale": 1.0, "dtype": null}]);
    match model.difference(&with(json, "/adapters", adapter))? {
        Difference::Adapters { .. } => {}
        other => return Err(format!("an adapter: {other}")),
    }
    let changed = load(changed_files())?;
    let digest = match changed.difference(&receipt)? {
        Difference::Model { expected, .. } => expected,
        other => return Err(format!("a weight: {other}")),
    };
    // Whoever says that it is that model's.
    is_found_out(&changed, &with(json, "/model/blake3", digest.into()))
        .map_err(|other| format!("a weight: {other}"))
}

fn main() -> ExitCode {
    let mut all_right = true;
    for (name, json) in RECEIPTS {
        for isa in Isa::available() {
            let said = match check(json, isa) {
                Ok(()) => "the same bits, and others once it is changed".to_owned(),
                Err(error) => {
                    all_right = false;
                    error
                }
            };
            println!("{name} with {}: {said}", isa.name());
        }
    }
    match all_right {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
