//! Operations of the step under way, and the commands they became before.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sterna_gpu::memory::Buffer;
use sterna_gpu::{Commands, Device, GpuError, ReadRange, Recorder, Submission, Timing};

use super::decode::Choice;
use super::fuse::fuse;
use super::op::{Op, Workspace, record};

/// How much was done on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GpuWork {
    /// Dispatches of kernels.
    pub n_dispatches: u64,
    /// Command lists handed to the device.
    pub n_submits: u64,
    /// How many of these were recorded anew, not replayed.
    pub n_recorded: u64,
}

/// A tape that several own.
#[derive(Debug, Clone)]
pub(super) struct SharedTape(Arc<Mutex<Tape>>);

impl SharedTape {
    pub(super) fn new(device: &Device) -> SharedTape {
        SharedTape(Arc::new(Mutex::new(Tape::new(device))))
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Tape> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Times dispatches of operations from here on, as long as what this returns lives.
    pub(super) fn time(&self) -> Result<Timed<'_>, GpuError> {
        let mut tape = self.lock();
        tape.flush()?;
        tape.timings.n_wanted += 1;
        let first = tape.timings.all.len();
        Ok(Timed { tape: self, first })
    }
}

/// Dispatches are timed, one after the other: whoever hands them over waits.
#[derive(Debug)]
pub(super) struct Timed<'a> {
    tape: &'a SharedTape,
    /// How many were timed before, for others.
    first: usize,
}

impl Timed<'_> {
    /// How long all of them took until now, in order.
    pub(super) fn timings(&self) -> Result<Vec<Timing>, GpuError> {
        let mut tape = self.tape.lock();
        tape.flush()?;
        Ok(tape.timings.all[self.first..].to_vec())
    }
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        let timings = &mut self.tape.lock().timings;
        timings.n_wanted -= 1;
        if timings.n_wanted == 0 {
            timings.all = Vec::new();
        }
    }
}

/// How long dispatches took, while someone wants to know.
#[derive(Debug, Default)]
struct Timings {
    /// How many want to.
    n_wanted: usize,
    /// Since the first of them began.
    all: Vec<Timing>,
}

/// Collects operations until their results are wanted.
#[derive(Debug)]
pub(super) struct Tape {
    device: Device,
    ops: Vec<Op>,
    /// Counts steps.
    step: u64,
    workspace: Workspace,
    /// `x · aᵀ` of a change of low rank.
    inner: Option<Buffer>,
    /// What was run lately, the latest first.
    replays: Vec<(Vec<Op>, Arc<Commands>)>,
    work: GpuWork,
    timings: Timings,
}

/// Steps that are kept to be run again: those of prompts and of decoding, each before and after a
/// cache grows.
const KEPT: usize = 4;

impl Tape {
    fn new(device: &Device) -> Tape {
        Tape {
            device: device.clone(),
            ops: Vec::new(),
            step: 0,
            workspace: Workspace::default(),
            inner: None,
            replays: Vec::new(),
            work: GpuWork::default(),
            timings: Timings::default(),
        }
    }

    /// Hands over what there is of the step before: its inputs are about to be replaced.
    pub(super) fn begin_step(&mut self) -> Result<(), GpuError> {
        self.step += 1;
        self.flush()
    }

    pub(super) fn step(&self) -> u64 {
        self.step
    }

    pub(super) fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Memory for `len` f32 on the way of a change of low rank.
    pub(super) fn inner(&mut self, len: usize) -> Result<Buffer, GpuError> {
        let bytes = len as u64 * 4;
        match &self.inner {
            Some(buffer) if buffer.bytes() >= bytes => Ok(buffer.clone()),
            _ => {
                let buffer = self.device.buffer("adapters", bytes.next_power_of_two())?;
                Ok(self.inner.insert(buffer).clone())
            }
        }
    }

    /// Hands all operations over, and waits for none.
    pub(super) fn flush(&mut self) -> Result<(), GpuError> {
        if self.ops.is_empty() {
            return Ok(());
        }
        // Whoever waits for something later waits for this too, and learns of what went wrong.
        let _ = self.submit(&[])?;
        Ok(())
    }

    /// Hands all operations over; what is to be read comes after them.
    pub(super) fn submit(&mut self, reads: &[ReadRange]) -> Result<Submission, GpuError> {
        let commands = self.commands()?;
        self.run(&commands, reads)
    }

    /// Hands `commands` over.
    pub(super) fn run(
        &mut self,
        commands: &Commands,
        reads: &[ReadRange],
    ) -> Result<Submission, GpuError> {
        self.work.n_dispatches += commands.len() as u64;
        self.work.n_submits += 1;
        if self.timings.n_wanted == 0 {
            return self.device.submit(&[commands], reads);
        }
        self.timings.all.extend(self.device.time(&[commands])?);
        self.device.submit(&[], reads)
    }

    /// The operations of a whole step of one token, as commands that find the token in `state`, behind
    /// the position; `None`, and nothing is changed, if these are something else.
    pub(super) fn repeatable(
        &mut self,
        state: &Buffer,
        choice: Choice,
    ) -> Result<Option<Arc<Commands>>, GpuError> {
        match self.ops.first_mut() {
            Some(Op::Embed { ids, out, .. }) if out.n_rows == 1 => *ids = (state.clone(), 1),
            _ => return Ok(None),
        }
        self.ops.push(Op::Choose(choice));
        self.commands().map(Some)
    }

    /// The commands of all operations so far, which are done with.
    fn commands(&mut self) -> Result<Arc<Commands>, GpuError> {
        let ops = std::mem::take(&mut self.ops);
        let known = self.replays.iter().position(|(known, _)| *known == ops);
        let replay = match known {
            Some(i) => self.replays.remove(i),
            None => {
                self.work.n_recorded += 1;
                let fused = fuse(&ops);
                self.workspace.fit(&self.device, &fused)?;
                let mut recorder = Recorder::new(&self.device);
                for op in &fused {
                    record(&mut recorder, &self.workspace, op)?;
                }
                self.replays.truncate(KEPT - 1);
                (ops, Arc::new(recorder.finish()?))
            }
        };
        let commands = Arc::clone(&replay.1);
        self.replays.insert(0, replay);
        Ok(commands)
    }

    /// The operations of the steps that may be run again, the latest first.
    pub(super) fn steps(&self) -> impl Iterator<Item = &[Op]> {
        self.replays.iter().map(|(ops, _)| &ops[..])
    }

    /// Forgets commands, and with them the memory that only they keep alive.
    pub(super) fn forget(&mut self) {
        self.replays.clear();
    }

    pub(super) fn work(&self) -> GpuWork {
        self.work
    }
}
