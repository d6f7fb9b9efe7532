//! The token-protocol worker: a program drives a model over this process's standard input and output.
//!
//! [`protocol`] turns bytes into requests, [`config`] is the driver's description of the model, [`input`]
//! reads, [`driver`] knows whether the driver is alive, [`engine`] replies. There is no tokenizer, and no
//! text.

mod config;
mod driver;
mod engine;
mod input;
mod protocol;

use std::env;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use sterna_engine::plan::{HeadOptions, HeadScreen, PlanOptions};
use sterna_format::bundle::LORA_FILE;

use crate::args::{EngineFlags, LoraFlag, ModelFlags};
use crate::machine;
use crate::model::{self, Replaceable};

pub(crate) use config::WorkerConfig;
use driver::Driver;
use engine::Engine;
use input::Input;
use protocol::{Form, Message, Reply};
pub(crate) use protocol::{PROTOCOL_VERSION, ProtocolError};

/// Environment variable that seeds the choice of tokens.
const SEED_VARIABLE: &str = "STERNA_SEED";

/// Serves requests from standard input for the model called `name` until there are no more.
///
/// `args` are the arguments after `--config`: without it, the keyed form is used. `lora` applies the adapter
/// in the folder of the model.
/// Errors: a [`ProtocolError`] for invalid input of the driver.
pub(crate) fn serve(name: &str, lora: bool, args: Option<&[String]>) -> Result<()> {
    let form = match args {
        Some(_) => Form::Positional,
        None => Form::Keyed,
    };
    let given = args.map(WorkerConfig::from_args).transpose()?;
    let seed = seed()?;
    model::expect(name)?;
    let driver = Driver::current();
    let input = Input::begin(form, driver)?;
    let config = match given {
        Some(config) => config,
        None => match input.next()? {
            Some(Message::Init(pairs)) => WorkerConfig::from_pairs(&pairs)?,
            _ => return Ok(()),
        },
    };
    let mut engine = load(name, lora, &config, form, seed, driver)?;
    let mut reply = Reply::new(io::stdout().lock());
    while let Some(message) = input.next()? {
        let goes_on = match message {
            Message::Request(request) => engine.answer(request, &mut reply)?,
            Message::Swap(swap) => engine.swap(&swap, &mut reply)?,
            Message::Init(_) | Message::Quit => false,
        };
        if !goes_on {
            break;
        }
    }
    Ok(())
}

/// The arguments of version 1, after `--config`, that describe the model called `name`.
pub(crate) fn describe(name: &str) -> Result<String> {
    let files = model::open(name)?;
    let plan = model::plan(&files, &ModelFlags::default())?;
    let tokenizer = files.tokenizer()?;
    let generation_config = model::generation_config(&files)?;
    let eos_ids = files.stop_ids(tokenizer.as_ref(), &generation_config)?;
    let config = WorkerConfig::of_model(&plan, &eos_ids).with_context(|| name.to_owned())?;
    Ok(config.to_args())
}

fn load(
    name: &str,
    lora: bool,
    config: &WorkerConfig,
    form: Form,
    seed: Option<u64>,
    driver: Driver,
) -> Result<Engine> {
    let files = model::open_with(name, Some(config.hf_config()))?;
    let plan = model::plan(&files, &ModelFlags::default())?;
    config.check(plan.config())?;
    let head = HeadOptions {
        dtype: config.unembed_quant().dtype(),
        screen: HeadScreen::Off,
    };
    let plan = plan.with_head(head).context("unembed_quant")?;
    // Regardless of free memory: drivers rely on it, and the cache takes memory only as it grows.
    let ctx_len = config.max_ctx().min(plan.config().max_ctx);
    let n_threads = NonZero::new(config.n_threads(machine::available_threads()));
    let flags = EngineFlags::with(n_threads, adapters(name, lora, config)?);
    let weights = Replaceable::new(&files, &plan, PlanOptions::default(), head);
    let session = model::session(&files, plan, &flags, ctx_len)?;
    let eos_ids = config.eos_ids().to_vec();
    Ok(Engine::new(session, weights, form, eos_ids, seed, driver))
}

/// The adapters to apply: that in the folder of the model, if `lora`, and that of the configuration.
fn adapters(name: &str, lora: bool, config: &WorkerConfig) -> Result<Vec<LoraFlag>> {
    let mut adapters = Vec::new();
    if lora {
        if !Path::new(name).join(LORA_FILE).is_file() {
            bail!("--lora: expected {LORA_FILE} in {name}, found none");
        }
        adapters.push(LoraFlag::new(PathBuf::from(name), None));
    }
    if let Some((folder, quant)) = config.lora() {
        adapters.push(LoraFlag::new(folder.clone(), quant.dtype()));
    }
    Ok(adapters)
}

/// The sampling settings of the environment.
fn seed() -> Result<Option<u64>> {
    let Some(text) = env::var_os(SEED_VARIABLE) else {
        return Ok(None);
    };
    let text = text.to_string_lossy();
    let seed = text.parse();
    seed.map(Some).with_context(|| {
        format!(
            "{SEED_VARIABLE}: expected a number from 0 to {}, found `{text}`",
            u64::MAX
        )
    })
}
