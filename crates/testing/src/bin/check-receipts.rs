//! Checks the receipts in `testdata/receipts` with every instruction set of the machine that it runs on: by itself, so
//! that it runs where there are neither files nor threads.

use std::collections::BTreeMap;
use std::process::ExitCode;

use bytes::Bytes;
use sterna::receipt::{Checked, Device, Difference, Receipt, Setup};
use sterna::{
    Adapted, LoadOptions, Machine, ModelEntry, ModelFiles, OpenOptions, Result, Verification, Want,
};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Activations, Cpu};
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

/// Gives `machine` the files of the model.
fn drive<T>(mut machine: Machine<'_, T>) -> Result<T> {
    let files: BTreeMap<&str, &'static [u8]> = MODEL.into();
    while let Some(want) = machine.wanted() {
        match want {
            Want::Len { name } => {
                let len = files.get(&*name).map(|file| file.len() as u64);
                machine.give_len(len)?;
            }
            Want::Bytes { name, range } => {
                let range = range.start as usize..range.end as usize;
                machine.give_bytes(Bytes::from_static(&files[&*name][range]))?;
            }
        }
    }
    machine.finish()
}

/// What `receipt` comes to with `isa`.
fn checked(receipt: &Receipt, isa: Isa) -> Result<Checked> {
    let files = drive(ModelFiles::open(
        ModelEntry::Folder,
        OpenOptions::new("builtin"),
    ))?;
    let plan = files.plan(&PlanOptions::default())?;
    let digest = drive(files.digest(|_| {}))?;
    let options = LoadOptions {
        verification: Verification::ByLoading,
        ..LoadOptions::default()
    };
    let loaded = drive(files.load(plan.clone(), Cpu::new(1, isa), options))?;
    let adapted = Adapted::new(loaded.model);
    let session = receipt.settings().session();
    let device = Device::Cpu(isa.name().to_owned());
    let setup = Setup::new("builtin", digest, &plan, Activations::Int8, session, device);
    receipt.check(&setup, &mut adapted.session(session)?)
}

/// Whether the receipt checks, and one with another token doesn't.
fn is_right(json: &[u8], isa: Isa) -> Result<bool> {
    let receipt = Receipt::parse(json)?;
    let mut changed: serde_json::Value =
        serde_json::from_slice(json).expect("a receipt, which is JSON");
    changed["answer"][3] = 9.into();
    let changed = Receipt::parse(changed.to_string().as_bytes())?;
    let difference = checked(&changed, isa)?;
    Ok(checked(&receipt, isa)? == Checked::Same
        && matches!(
            difference,
            Checked::Differs(Difference::Token { index: 3, .. })
        ))
}

fn main() -> ExitCode {
    let mut all_right = true;
    for (name, json) in RECEIPTS {
        for isa in Isa::available() {
            let said = match is_right(json, isa) {
                Ok(true) => "the same bits".to_owned(),
                Ok(false) => "other bits".to_owned(),
                Err(error) => format!("{error:#}"),
            };
            all_right &= said == "the same bits";
            println!("{name} with {}: {said}", isa.name());
        }
    }
    match all_right {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}
