//! The library in WebAssembly: opens a model from files that JavaScript provides piece by piece, and
//! generates on the CPU. `node.mjs` in this crate drives it in a dozen lines.
//!
//! Text and bytes pass through one buffer in this module's memory: [`buffer`] makes room for what JavaScript
//! writes, [`output`] returns where it reads. After a call that returns [`FAILED`], the output is a message.

// Names for the other side, which no linker of Rust's resolves; nothing here reads what it is given a
// pointer to.
#![allow(unsafe_code)]

use std::cell::RefCell;
use std::mem;

use bytes::Bytes;
use sterna::conversation::{Conversation, Room};
use sterna::generate::{Event, Request};
use sterna::sampling::SamplingOptions;
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::{
    Adapted, LoadOptions, Loaded, Machine, ModelEntry, ModelFiles, OpenOptions, TextModel, Want,
};
use sterna_engine::plan::PlanOptions;
use sterna_engine::{Activations, Cpu};
use sterna_kernels::Isa;
use sterna_text::Encode;

/// The return value of a failed call.
pub const FAILED: i32 = -2;
/// [`wanted`]: nothing, the model is loaded.
pub const READY: i32 = 0;
/// [`wanted`]: the length of a file, whose name is the output.
pub const WANTS_LEN: i32 = 1;
/// [`wanted`]: bytes of a file, whose name is the output.
pub const WANTS_BYTES: i32 = 2;
/// [`step`]: the answer has ended.
pub const ENDED: i32 = -1;

/// The state of opening the model.
#[derive(Default)]
enum Stage {
    #[default]
    None,
    Opening(Box<Machine<'static, ModelFiles>>),
    Loading(&'static ModelFiles, Machine<'static, Loaded<Cpu>>),
    Ready(Box<Ready>),
}

struct Ready {
    model: TextModel<Cpu>,
    scheduler: Scheduler<Cpu>,
    id: SequenceId,
}

#[derive(Default)]
struct State {
    stage: Stage,
    /// Input from JavaScript, and output to it.
    buffer: Vec<u8>,
    /// Of [`WANTS_BYTES`].
    range: std::ops::Range<u64>,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::default();
}

/// Makes room for `len` bytes of input, and returns where to write them.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn buffer(len: usize) -> *mut u8 {
    STATE.with_borrow_mut(|state| {
        state.buffer.clear();
        state.buffer.resize(len, 0);
        state.buffer.as_mut_ptr()
    })
}

/// Where the output is.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn output() -> *const u8 {
    STATE.with_borrow(|state| state.buffer.as_ptr())
}

/// Bytes of output.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn output_len() -> usize {
    STATE.with_borrow(|state| state.buffer.len())
}

/// Begins to open the model in a folder.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn open() {
    let opening = ModelFiles::open(ModelEntry::Folder, OpenOptions::new("model"));
    STATE.with_borrow_mut(|state| state.stage = Stage::Opening(Box::new(opening)));
}

/// What is wanted next: [`READY`], [`WANTS_LEN`], [`WANTS_BYTES`], or [`FAILED`].
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn wanted() -> i32 {
    run(|state| {
        loop {
            let want = match &mut state.stage {
                Stage::Opening(machine) => machine.wanted(),
                Stage::Loading(_, machine) => machine.wanted(),
                Stage::None | Stage::Ready(_) => return Ok(READY),
            };
            let (kind, name) = match want {
                Some(Want::Len { name }) => (WANTS_LEN, name),
                Some(Want::Bytes { name, range }) => {
                    state.range = range;
                    (WANTS_BYTES, name)
                }
                None => {
                    state.stage = advance(mem::take(&mut state.stage))?;
                    continue;
                }
            };
            state.buffer = name.into_bytes();
            return Ok(kind);
        }
    })
}

/// The next stage of a model that wants nothing more in this one.
fn advance(stage: Stage) -> sterna::Result<Stage> {
    Ok(match stage {
        Stage::Opening(machine) => {
            // It lives as long as the module.
            let files: &'static ModelFiles = Box::leak(Box::new(machine.finish()?));
            let plan = files.plan(&PlanOptions::default())?;
            let activations = files.activations().unwrap_or(Activations::Int8);
            let cpu = Cpu::new(1, Isa::detect()).with_activations(activations);
            Stage::Loading(files, files.load(plan, cpu, LoadOptions::default()))
        }
        Stage::Loading(files, machine) => {
            let model = Adapted::new(machine.finish()?.model);
            let options = SchedulerOptions::default();
            let model = TextModel::new(model, files, options, &mut Vec::new())?;
            let mut scheduler = Scheduler::new(options);
            let id = scheduler.add(model.sequence(model.session_options().ctx_len)?);
            Stage::Ready(Box::new(Ready {
                model,
                scheduler,
                id,
            }))
        }
        stage => stage,
    })
}

/// The first byte of those that are wanted.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn wanted_start() -> f64 {
    STATE.with_borrow(|state| state.range.start as f64)
}

/// Where the bytes end that are wanted.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn wanted_end() -> f64 {
    STATE.with_borrow(|state| state.range.end as f64)
}

/// Says how long the file is that is wanted; −1 if there is none.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn give_len(len: f64) -> i32 {
    run(|state| {
        let len = (len >= 0.0).then_some(len as u64);
        match &mut state.stage {
            Stage::Opening(machine) => machine.give_len(len)?,
            Stage::Loading(_, machine) => machine.give_len(len)?,
            Stage::None | Stage::Ready(_) => {}
        }
        Ok(READY)
    })
}

/// Gives the bytes in the buffer, which begin where the wanted ones do and may be fewer.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn give_bytes() -> i32 {
    run(|state| {
        let bytes = Bytes::from(mem::take(&mut state.buffer));
        match &mut state.stage {
            Stage::Opening(machine) => machine.give_bytes(bytes)?,
            Stage::Loading(_, machine) => machine.give_bytes(bytes)?,
            Stage::None | Stage::Ready(_) => {}
        }
        Ok(READY)
    })
}

/// Begins to answer the text in the buffer: at `temperature`, with the random sequence of `seed`.
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn ask(temperature: f32, seed: u32) -> i32 {
    run(|state| {
        let text = String::from_utf8_lossy(&mem::take(&mut state.buffer)).into_owned();
        let Stage::Ready(ready) = &mut state.stage else {
            return Ok(FAILED);
        };
        let tokenizer = ready.model.tokenizer();
        let ids = match ready.model.template() {
            None => tokenizer.encode(&text, Encode::TEXT)?,
            Some(template) => {
                let mut conversation = Conversation::new(template.clone());
                conversation.say(text);
                let room = Room {
                    ctx_len: ready
                        .scheduler
                        .sequence(ready.id)
                        .map_or(0, |s| s.ctx_len()),
                    max_tokens: usize::MAX,
                };
                conversation.prompt(tokenizer, room, None)?.ids
            }
        };
        let sampling = SamplingOptions {
            temperature: Some(temperature),
            seed: Some(seed.into()),
            ..SamplingOptions::default()
        };
        let request: Request = ready.model.request(ids, &sampling)?;
        ready.scheduler.start(ready.id, request)?;
        Ok(READY)
    })
}

/// The next token's id, with the text that became certain as output; [`ENDED`] or [`FAILED`].
#[cfg_attr(target_family = "wasm", unsafe(no_mangle))]
pub extern "C" fn step() -> i32 {
    run(|state| {
        state.buffer.clear();
        let Stage::Ready(ready) = &mut state.stage else {
            return Ok(ENDED);
        };
        while !ready.scheduler.is_idle() {
            for (_, event) in ready.scheduler.step()? {
                match event {
                    Event::Token(token) => {
                        state.buffer = token.text.into_bytes();
                        return Ok(token.id as i32);
                    }
                    Event::Ended { text, .. } => state.buffer = text.into_bytes(),
                    Event::Failed(error) => return Err(error),
                    _ => {}
                }
            }
        }
        Ok(ENDED)
    })
}

/// Does `work`; what goes wrong becomes the output.
fn run(work: impl FnOnce(&mut State) -> sterna::Result<i32>) -> i32 {
    STATE.with_borrow_mut(|state| match work(state) {
        Ok(result) => result,
        Err(error) => {
            state.buffer = format!("{}: {error:#}", error.code()).into_bytes();
            FAILED
        }
    })
}
