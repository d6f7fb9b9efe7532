//! The operations of a step, fused, recorded once, and replayed.
//!
//! A [`Graph`] collects operations ([`Op`]) until their results are needed. A step that consists of the same
//! operations on the same buffers as an earlier one is not recorded again: what differs from step to step
//! (ids, positions, rotations) is in buffers that are written before it runs.

mod fuse;
mod matrix;
mod op;
mod sample;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::kernels::linear::Form;
use crate::memory::Buffer;
use crate::tuning::{RowClass, Sample};
use crate::{Commands, Device, GpuError, ReadRange, Recorder, Submission, Timing};
use fuse::fuse;
use op::{Workspace, record};

pub use matrix::{Matrix, join, stack};
pub use op::{
    Convolution, ExpertOutput, HeadInputs, Norm, Op, Output, RopeTable, Routes, ScanGates,
    SequencesRef, Shared, StateRef, TimeInputs, TimeViews, View,
};
pub use sample::{LogprobsOp, PenaltyOp, SampleMethod, SampleOp};

/// Counters of work done on the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Work {
    /// Kernel dispatches.
    pub n_dispatches: u64,
    /// Command lists submitted to the device.
    pub n_submits: u64,
    /// Steps that were recorded anew, not replayed, each submitted once or in pieces.
    pub n_recorded: u64,
}

/// A graph shared by several owners, which take turns.
#[derive(Debug, Clone)]
pub struct SharedGraph(Arc<Mutex<Graph>>);

impl SharedGraph {
    /// An empty graph on `device`.
    pub fn new(device: &Device) -> SharedGraph {
        SharedGraph(Arc::new(Mutex::new(Graph::new(device))))
    }

    /// The graph, locked while the guard lives.
    pub fn lock(&self) -> MutexGuard<'_, Graph> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Times dispatches of operations from here on, while the returned value lives.
    ///
    /// Errors: those of earlier operations.
    pub fn time(&self) -> Result<Timed<'_>, GpuError> {
        let mut graph = self.lock();
        graph.flush()?;
        graph.timings.n_wanted += 1;
        let first = graph.timings.all.len();
        Ok(Timed { graph: self, first })
    }
}

/// While it lives, dispatches are timed one after the other: submitting waits for them.
#[derive(Debug)]
pub struct Timed<'a> {
    graph: &'a SharedGraph,
    /// How many dispatches had been timed already, for other timers.
    first: usize,
}

impl Timed<'_> {
    /// The durations of all dispatches so far, in order.
    ///
    /// Errors: those of the operations.
    pub fn timings(&self) -> Result<Vec<Timing>, GpuError> {
        let mut graph = self.graph.lock();
        graph.flush()?;
        Ok(graph.timings.all[self.first..].to_vec())
    }
}

impl Drop for Timed<'_> {
    fn drop(&mut self) {
        let timings = &mut self.graph.lock().timings;
        timings.n_wanted -= 1;
        if timings.n_wanted == 0 {
            timings.all = Vec::new();
        }
    }
}

/// Durations of dispatches, while there are timers.
#[derive(Debug, Default)]
struct Timings {
    /// Number of timers.
    n_wanted: usize,
    /// Since the first timer began.
    all: Vec<Timing>,
}

/// Collects operations until their results are needed.
#[derive(Debug)]
pub struct Graph {
    device: Device,
    ops: Vec<Op>,
    /// Counts steps.
    step: u64,
    workspace: Workspace,
    /// Rows that one operation writes and the next reads.
    scratch: Option<Buffer>,
    /// Recently run steps, the latest first.
    replays: Vec<(Vec<Op>, RecordedStep)>,
    work: Work,
    timings: Timings,
}

/// A recorded step, or some of one. Its pieces are submitted one by one.
#[derive(Debug, Clone)]
pub struct RecordedStep {
    pieces: Arc<[Commands]>,
    /// Those that are meant.
    of: Range<usize>,
}

impl RecordedStep {
    fn new(pieces: Vec<Commands>) -> RecordedStep {
        RecordedStep {
            of: 0..pieces.len(),
            pieces: pieces.into(),
        }
    }

    /// What comes before the last piece, and that.
    pub fn split_last(&self) -> (RecordedStep, RecordedStep) {
        let Range { start, end } = self.of;
        let last = end.saturating_sub(1).max(start);
        let of = |of| RecordedStep { of, ..self.clone() };
        (of(start..last), of(last..end))
    }
}

/// Number of steps kept for replay: those of prompts and of decoding, each before and after a cache grows.
const KEPT: usize = 4;

/// Dispatches of the first piece of a step that is submitted in pieces, each twice as long as the one before: few, so that
/// the device has something to do soon, and enough to last while the next are recorded and encoded.
const FIRST_PIECE: usize = 16;

impl Graph {
    fn new(device: &Device) -> Graph {
        Graph {
            device: device.clone(),
            ops: Vec::new(),
            step: 0,
            workspace: Workspace::default(),
            scratch: None,
            replays: Vec::new(),
            work: Work::default(),
            timings: Timings::default(),
        }
    }

    /// Submits what is pending of the previous step: its inputs are about to be replaced.
    ///
    /// Errors: as [`Device::submit`].
    pub fn begin_step(&mut self) -> Result<(), GpuError> {
        self.step += 1;
        self.flush()
    }

    /// The number of the current step.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Adds an operation.
    pub fn push(&mut self, op: Op) {
        self.ops.push(op);
    }

    /// Memory for `len` f32 that are read only before the next call.
    ///
    /// Errors: as [`Device::buffer`].
    pub fn scratch(&mut self, len: usize) -> Result<Buffer, GpuError> {
        let bytes = len as u64 * 4;
        match &self.scratch {
            Some(buffer) if buffer.bytes() >= bytes => Ok(buffer.clone()),
            _ => {
                let buffer = self.device.buffer("scratch", bytes.next_power_of_two())?;
                Ok(self.scratch.insert(buffer).clone())
            }
        }
    }

    /// Submits all operations, without waiting.
    ///
    /// Errors: as [`Device::submit`], and those of kernels about shapes.
    pub fn flush(&mut self) -> Result<(), GpuError> {
        if self.ops.is_empty() {
            return Ok(());
        }
        // Whoever waits for something later waits for this too, and learns of what went wrong.
        drop(self.submit(&[])?);
        Ok(())
    }

    /// Submits all operations; reads are enqueued after them.
    ///
    /// Errors: as [`Graph::flush`].
    pub fn submit(&mut self, reads: &[ReadRange]) -> Result<Submission, GpuError> {
        let ops = std::mem::take(&mut self.ops);
        if let Some(step) = self.replay(&ops) {
            return self.run(&step, reads);
        }
        let fused = self.begin_recording(&ops)?;
        let mut rest = &fused[..];
        let mut most = match is_long(&fused) {
            true => FIRST_PIECE,
            false => usize::MAX,
        };
        let mut pieces = Vec::new();
        let submission = loop {
            let (piece, next) = self.record(rest, most)?;
            (rest, most) = (next, most.saturating_mul(2));
            let is_last = rest.is_empty();
            let submission = self.run_piece(&piece, if is_last { reads } else { &[] })?;
            pieces.push(piece);
            if is_last {
                break submission;
            }
        };
        self.keep(ops, RecordedStep::new(pieces));
        Ok(submission)
    }

    /// Submits `step`; reads are enqueued after it.
    ///
    /// Errors: as [`Device::submit`].
    pub fn run(
        &mut self,
        step: &RecordedStep,
        reads: &[ReadRange],
    ) -> Result<Submission, GpuError> {
        let Some((last, others)) = step.pieces[step.of.clone()].split_last() else {
            return self.device.submit(&[], reads);
        };
        for piece in others {
            // Whoever waits for the last waits for all.
            drop(self.run_piece(piece, &[])?);
        }
        self.run_piece(last, reads)
    }

    fn run_piece(
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

    /// The operations of a whole step of one token of each sequence, and `samples` after them, which sample for all in
    /// order, as commands that find the tokens in the states of the sequences; `None`, with nothing changed, if the pending
    /// operations are something else. Where `samples` have masks, which the host writes while the step is computed, they
    /// are a [piece](RecordedStep::split_last) of their own.
    ///
    /// Errors: as [`Graph::flush`].
    pub fn repeatable(&mut self, samples: Vec<SampleOp>) -> Result<Option<RecordedStep>, GpuError> {
        let n: usize = samples.iter().map(|sample| sample.n).sum();
        let tokens = match (self.ops.first(), samples.first()) {
            (Some(Op::Embed { out, .. }), Some(sample)) if out.n_rows == n => {
                sample.tokens_of_all()
            }
            _ => return Ok(None),
        };
        // Several tables may be looked up, all for the same tokens.
        for op in &mut self.ops {
            if let Op::Embed { ids, .. } = op {
                *ids = tokens.clone();
            }
        }
        let has_masks = samples.iter().any(|sample| sample.masks.is_some());
        self.ops.extend(samples.into_iter().map(Op::Sample));
        let ops = std::mem::take(&mut self.ops);
        if let Some(step) = self.replay(&ops) {
            return Ok(Some(step));
        }
        // Else in one: steps follow one another without a pause, and each submission would be one.
        let fused = self.begin_recording(&ops)?;
        let first_sample = fused.iter().position(|op| matches!(op, Op::Sample(_)));
        let (step, samples) = fused.split_at(first_sample.filter(|_| has_masks).unwrap_or(0));
        let mut pieces = Vec::with_capacity(2);
        for ops in [step, samples] {
            if !ops.is_empty() {
                pieces.push(self.record(ops, usize::MAX)?.0);
            }
        }
        Ok(Some(self.keep(ops, RecordedStep::new(pieces))))
    }

    /// The step that was recorded of the same operations, if it is kept.
    fn replay(&mut self, ops: &[Op]) -> Option<RecordedStep> {
        let known = self.replays.iter().position(|(known, _)| known == ops)?;
        let replay = self.replays.remove(known);
        let step = replay.1.clone();
        self.replays.insert(0, replay);
        Some(step)
    }

    /// The operations, fused, with memory for what they need.
    fn begin_recording(&mut self, ops: &[Op]) -> Result<Vec<Op>, GpuError> {
        self.work.n_recorded += 1;
        let fused = fuse(ops);
        self.workspace.fit(&self.device, &fused)?;
        Ok(fused)
    }

    /// The commands of the first operations, with `most` dispatches and what the last of them adds, and the other
    /// operations.
    fn record<'a>(&self, ops: &'a [Op], most: usize) -> Result<(Commands, &'a [Op]), GpuError> {
        let mut recorder = Recorder::new(&self.device);
        let mut rest = ops;
        let mut added = None;
        while let Some((op, next)) = rest.split_first()
            && (recorder.len() < most || added.is_some())
        {
            added = record(&mut recorder, &self.workspace, (op, next.first()), added)?;
            rest = next;
        }
        Ok((recorder.finish()?, rest))
    }

    /// Keeps a step for replay.
    fn keep(&mut self, ops: Vec<Op>, step: RecordedStep) -> RecordedStep {
        self.replays.truncate(KEPT - 1);
        self.replays.insert(0, (ops, step.clone()));
        step
    }

    /// The matrix multiplications of the most recent steps, four at most, each in order: what a
    /// [`Tuner`](crate::tuning::Tuner) measures. Empty before the first step.
    pub fn products(&self) -> Vec<Sample> {
        let steps = self.replays.iter().flat_map(|(ops, _)| fuse(ops));
        let samples = steps.flat_map(|op| match op {
            Op::Linear { x, norm, outputs } => {
                let of_output = |output: &Output| {
                    let form = output.w.kind().form();
                    let same = outputs.iter().filter(|other| other.w.kind().form() == form);
                    Sample {
                        weights: output.w.linear(),
                        n_rows: x.n_rows,
                        is_normed: norm.is_some() && matches!(form, Form::Int8(_)),
                        epilogue: output.epilogue,
                        is_alone: same.count() == 1,
                    }
                };
                outputs.iter().map(of_output).collect()
            }
            _ => Vec::new(),
        });
        samples.collect()
    }

    /// Drops recorded commands, and with them the memory that only they keep alive.
    pub fn forget(&mut self) {
        self.replays.clear();
    }

    /// Counters of work done so far.
    pub fn work(&self) -> Work {
        self.work
    }
}

/// Whether a step takes so long that the device should begin before all of it is recorded and encoded: it has products with
/// many rows.
fn is_long(ops: &[Op]) -> bool {
    ops.iter().any(|op| match op {
        Op::Linear { x, .. } => RowClass::of(x.n_rows) == RowClass::Many,
        _ => false,
    })
}
