//! Decoding without the host: the token sampled by a step is the next step's input.
//!
//! Commands of a step, of one sequence or of several, are submitted several times before the first tokens are read back.
//! They read token and position of each where the previous step has written them. Where the host says which tokens may
//! come next, it knows that only after the last one: the device computes logits meanwhile, and then samples from those.

use std::collections::VecDeque;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
#[cfg(not(target_arch = "wasm32"))]
use std::time::Instant;

use sterna_gpu::graph::{
    Graph, LogprobsOp, PenaltyOp, RecordedStep, SampleMethod, SampleOp, Shared, SharedGraph, View,
};
use sterna_gpu::kernels::output::{Draw, MAX_TOP_K, STATE_LEN, TopK, Weights, mask_len};
use sterna_gpu::kernels::recurrent::SLOTS;
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, GpuError, ReadRange, Submission};

use super::GpuCache;
use super::buffer::room;
use super::cache::Current;
use super::pages::Moves;
use crate::backend::{BackendError, Continued, Decoding, KvCache, Sampled};
use crate::logprobs::Logprobs;
use crate::sampling::{Chosen, SamplerConfig, Sampling};

/// Steps that are decoded ahead: rotations of as many positions are computed, and pages taken, at once.
pub(super) const MOST_STEPS: usize = 256;

/// The maximum penalty window: the time it takes grows quadratically.
const MOST_PENALISED: usize = 4096;

/// Rotations that are computed at once for steps of several sequences.
const MOST_TOGETHER: usize = 1024;

/// Maximum steps in flight.
const MOST_UNDER_WAY: usize = 8;

/// Work to keep in flight: the host takes less time to process a token and submit a step.
const IN_RESERVE: Duration = Duration::from_millis(5);

/// How the device samples for `config`, if it can.
fn method(config: &SamplerConfig) -> Option<SampleMethod> {
    let SamplerConfig {
        temperature,
        top_k,
        top_p,
        min_p,
        ..
    } = *config;
    if temperature == 0.0 {
        return Some(SampleMethod::Best(1));
    }
    // Devices flush the smallest numbers to 0.
    if !temperature.is_normal() {
        return None;
    }
    let share = top_p < 1.0;
    match top_k {
        1..=MAX_TOP_K => Some(SampleMethod::Best(top_k)),
        0 if !share && min_p == 0.0 => Some(SampleMethod::Gumbel),
        0 => Some(SampleMethod::All { share }),
        // Tokens outside the top k are no more likely to be kept than with all.
        _ if !share && min_p > 0.0 => Some(SampleMethod::All { share }),
        _ => None,
    }
}

/// How many steps from `position` on can be sampled as `sampling` specifies.
pub(super) fn steps_from(position: usize, sampling: &Sampling<'_>) -> usize {
    let config = sampling.config;
    // Biases of one token are added sequentially; kernels add them in parallel.
    let mut biased: Vec<u32> = config.logit_bias.iter().map(|(id, _)| *id).collect();
    biased.sort_unstable();
    let is_twice = biased.windows(2).any(|ids| ids[0] == ids[1]);
    // Tokens are stored by position.
    let has_places = sampling.recent.len() <= position + 1;
    let is_many = sampling.logprobs.is_some_and(|n| n > MAX_TOP_K);
    if method(config).is_none() || is_twice || !has_places || is_many {
        return 0;
    }
    if sampling.window > MOST_PENALISED {
        return MOST_PENALISED.saturating_sub(position).min(MOST_STEPS);
    }
    MOST_STEPS
}

/// How many steps of `sequences` together their rotations are computed for at once.
pub(super) fn most_steps(n_sequences: usize) -> usize {
    match n_sequences {
        0 | 1 => MOST_STEPS,
        n => (MOST_TOGETHER / n).clamp(1, MOST_STEPS),
    }
}

/// The most [`runs`] that are sampled for ahead: each takes dispatches of its own.
const MOST_RUNS: usize = 8;

/// Whether a step of all of `sequences` can be repeated: what changes from one to the next is in one table.
pub(super) fn are_alike(sequences: &[Continued<'_, GpuCache>]) -> bool {
    let [first, others @ ..] = sequences else {
        return false;
    };
    let is_beside = |of: &Continued<'_, GpuCache>| of.cache.is_beside(first.cache);
    others.is_empty() || sequences.iter().all(is_beside) && runs(sequences).len() <= MOST_RUNS
}

/// Adjacent sequences that are sampled for in the same dispatches: those with penalties, which need the tokens of each, are
/// alone.
pub(super) fn runs(sequences: &[Continued<'_, GpuCache>]) -> Vec<Range<usize>> {
    let kind = |of: &Continued<'_, GpuCache>| SampleKind::of(&of.sampling);
    let is_plain = |of: &Continued<'_, GpuCache>| of.sampling.window == 0;
    let mut first = 0;
    let runs = sequences.chunk_by(|a, b| is_plain(a) && is_plain(b) && kind(a) == kind(b));
    let ranges = runs.map(|run| {
        first += run.len();
        first - run.len()..first
    });
    ranges.collect()
}

/// How the device samples: for sequences with the same all at once.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct SampleKind {
    method: SampleMethod,
    temperature: f32,
    draw: Draw,
    /// Log-probabilities, too.
    has_logprobs: bool,
}

impl SampleKind {
    /// `None` if there are no kernels for that.
    pub(super) fn of(sampling: &Sampling<'_>) -> Option<SampleKind> {
        let config = sampling.config;
        let method = method(config)?;
        Some(SampleKind {
            method,
            temperature: config.temperature,
            draw: Draw {
                temperature: match method {
                    // The randomness is in the Gumbel noise.
                    SampleMethod::Gumbel => 0.0,
                    _ => config.temperature,
                },
                top_p: config.top_p,
                min_p: config.min_p,
            },
            has_logprobs: sampling.logprobs.is_some(),
        })
    }
}

/// Where the seed is in the state of a sequence that is sampled for.
pub(super) const SEED_AT: usize = 6;

/// A seed as kernels read it: the low and the high half.
pub(super) fn seed_words(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// What kernels read of a sequence that is sampled for, whose last token is `last`, at `position`, and whose logits are
/// row `row`.
fn state(position: usize, last: u32, row: usize, seed: u64) -> [u32; STATE_LEN] {
    let mut state = [0; STATE_LEN];
    state[..3].copy_from_slice(&[position as u32, last, row as u32]);
    state[SEED_AT..].copy_from_slice(&seed_words(seed));
    state
}

/// A sequence that a token is wanted of, and the row of its logits.
pub(super) type Choice<'a> = (Continued<'a, GpuCache>, usize);

/// Samples a token of each of `choices`, of which there is one at least.
pub(super) fn sample_together(
    device: &Device,
    logits: &View,
    kind: SampleKind,
    choices: &mut [Choice<'_>],
) -> Result<(SampleOp, ReadSamples), GpuError> {
    let n = choices.len();
    let (mut penalties, mut states) = (Vec::new(), Vec::with_capacity(n));
    let (mut n_top, mut allowed) = (Vec::with_capacity(n), Vec::with_capacity(n));
    let mut keeps_logits = false;
    for (member, (sequence, row)) in choices.iter_mut().enumerate() {
        let Continued {
            cache,
            last,
            position,
            sampling,
        } = sequence;
        // A step of several tokens isn't computed again.
        keeps_logits |= *position > cache.len();
        penalties.extend(cache.penalty(device, *position, (member, *row), sampling)?);
        states.push(state(*position, *last, *row, sampling.seed));
        n_top.push(sampling.logprobs);
        allowed.push(sampling.allowed);
    }
    let scratch = choices[0].0.cache.sampling();
    let memory = room(device, &mut scratch.states, n * STATE_LEN)?;
    device.write(&memory, 0, states.as_flattened())?;
    let masks = scratch.masks(device, logits.width, &allowed)?;
    if let Some(masks) = &masks {
        masks.write(&allowed)?;
    }
    let run = Run {
        members: 0..n,
        kind,
        n_top: most_of(&n_top),
        penalties,
        masks: masks.as_ref(),
        keeps_logits,
    };
    let op = scratch.op(device, logits.clone(), memory, run)?;
    let reads = ReadSamples::new(std::slice::from_ref(&op), n_top);
    Ok((op, reads))
}

/// How many of the most probable tokens are wanted at most; `None` if no log-probabilities are.
pub(super) fn most_of(n_top: &[Option<usize>]) -> Option<usize> {
    n_top.iter().flatten().max().copied()
}

/// Which tokens sequences may have next, where the device reads it.
#[derive(Debug, Clone)]
pub(super) struct Masks {
    device: Device,
    buffer: Buffer,
    n_words: usize,
    /// Whose may change; the others may have any.
    are_restricted: Vec<bool>,
}

impl Masks {
    /// For sequences of which something is said in `allowed`, or nothing ever will be.
    fn new(
        device: &Device,
        buffer: Buffer,
        n_words: usize,
        allowed: &[Option<&[u32]>],
    ) -> Result<Masks, GpuError> {
        let masks = Masks {
            device: device.clone(),
            buffer,
            n_words,
            are_restricted: allowed.iter().map(Option::is_some).collect(),
        };
        for (member, _) in (allowed.iter().enumerate()).filter(|(_, allowed)| allowed.is_none()) {
            masks.write_one(member, None)?;
        }
        Ok(masks)
    }

    /// Writes what the next token of each sequence may be.
    fn write(&self, allowed: &[Option<&[u32]>]) -> Result<(), GpuError> {
        for (member, allowed) in allowed.iter().enumerate() {
            if self.are_restricted.get(member) == Some(&true) {
                self.write_one(member, *allowed)?;
            }
        }
        Ok(())
    }

    fn write_one(&self, member: usize, allowed: Option<&[u32]>) -> Result<(), GpuError> {
        let mut words = vec![if allowed.is_none() { u32::MAX } else { 0 }; self.n_words];
        for (word, bits) in words.iter_mut().zip(allowed.unwrap_or_default()) {
            *word = *bits;
        }
        let first = (member * self.n_words) as u64 * 4;
        self.device.write(&self.buffer, first, &words)
    }
}

/// Adjacent sequences that are sampled for in the same dispatches.
pub(super) struct Run<'a> {
    /// Their numbers among those with states.
    pub(super) members: Range<usize>,
    pub(super) kind: SampleKind,
    /// How many of the most probable tokens are wanted, if log-probabilities are.
    pub(super) n_top: Option<usize>,
    pub(super) penalties: Vec<PenaltyOp>,
    /// Of all with states, if any of the run has one.
    pub(super) masks: Option<&'a Masks>,
    /// Logits are needed afterwards, too.
    pub(super) keeps_logits: bool,
}

/// Memory for sampling, reused with a sequence.
#[derive(Debug, Default)]
pub(super) struct SampleScratch {
    /// Tokens by position, for penalties.
    tokens: Option<Buffer>,
    /// Of sequences that are sampled for together.
    states: Option<Buffer>,
    masks: Option<Buffer>,
    best: Option<Shared<TopK>>,
    weights: Option<Shared<Weights>>,
    biases: Option<(Vec<(u32, f32)>, Buffer)>,
    logprobs: LogprobsScratch,
    unchanged: Option<Buffer>,
}

/// The same for log-probabilities.
#[derive(Debug, Default)]
struct LogprobsScratch {
    top: Option<Shared<TopK>>,
    weights: Option<Shared<Weights>>,
    out: Option<Buffer>,
}

/// Room for the `k` largest of `n_vocab` logits of each of `n` sequences: `room`, if that fits.
fn top_room(
    device: &Device,
    room: &mut Option<Shared<TopK>>,
    (n_vocab, k, n): (usize, usize, usize),
) -> Result<Shared<TopK>, GpuError> {
    let best = match room.take() {
        Some(best) if best.k() == k && best.n_samplers() >= n => best,
        _ => Shared::new(TopK::new(device, n_vocab, k, n)?),
    };
    Ok(room.insert(best).clone())
}

/// The same for the weights of all tokens.
fn weights_room(
    device: &Device,
    room: &mut Option<Shared<Weights>>,
    (n_vocab, n): (usize, usize),
) -> Result<Shared<Weights>, GpuError> {
    let weights = match room.take() {
        Some(weights) if weights.n_samplers() >= n => weights,
        _ => Shared::new(Weights::new(device, n_vocab, n)?),
    };
    Ok(room.insert(weights).clone())
}

impl SampleScratch {
    /// Room for the masks of as many sequences, if any has one. Those of others allow all.
    pub(super) fn masks(
        &mut self,
        device: &Device,
        n_vocab: usize,
        allowed: &[Option<&[u32]>],
    ) -> Result<Option<Masks>, GpuError> {
        if allowed.iter().all(Option::is_none) {
            return Ok(None);
        }
        let n_words = mask_len(n_vocab);
        let buffer = room(device, &mut self.masks, allowed.len() * n_words)?;
        Masks::new(device, buffer, n_words, allowed).map(Some)
    }

    /// The sampling operation for sequences of `run`, among those with these states.
    pub(super) fn op(
        &mut self,
        device: &Device,
        logits: View,
        states: Buffer,
        run: Run<'_>,
    ) -> Result<SampleOp, GpuError> {
        let Run {
            members,
            kind,
            n_top,
            penalties,
            masks,
            keeps_logits,
        } = run;
        let SampleKind {
            method,
            temperature,
            draw,
            ..
        } = kind;
        let (n, n_vocab) = (members.len(), logits.width);
        let best = top_room(device, &mut self.best, (n_vocab, method.k(), n))?;
        let weights = match method {
            SampleMethod::All { share: true } => {
                Some(weights_room(device, &mut self.weights, (n_vocab, n))?)
            }
            _ => None,
        };
        let changes = SampleOp::changes_logits(method, &penalties);
        let logprobs = n_top
            .map(|n_top| (self.logprobs).op(device, &logits, (n_top, n)))
            .transpose()?;
        // Log-probabilities are of tokens that may be drawn, whose logits masks leave.
        let is_needed = n_top.is_some() && changes || keeps_logits && (changes || masks.is_some());
        let unchanged = match is_needed {
            true => {
                let (n_rows, n_vocab) = (logits.n_rows, logits.width);
                let memory = room(device, &mut self.unchanged, n_rows * n_vocab)?;
                Some(View::new(&memory, n_rows, n_vocab))
            }
            false => None,
        };
        Ok(SampleOp {
            logits,
            states,
            first: members.start,
            n,
            method,
            temperature,
            draw,
            masks: masks.map(|masks| masks.buffer.clone()),
            logprobs,
            unchanged,
            tokens: penalties.first().map(|penalty| penalty.tokens.clone()),
            penalties,
            best,
            weights,
        })
    }

    /// The penalties and biases of a sequence whose last token is at `position`, in memory for `capacity` tokens, if there
    /// are any.
    pub(super) fn penalty(
        &mut self,
        device: &Device,
        (position, capacity): (usize, usize),
        (member, row): (usize, usize),
        sampling: &Sampling<'_>,
    ) -> Result<Option<PenaltyOp>, GpuError> {
        let config = sampling.config;
        if sampling.window == 0 && config.logit_bias.is_empty() {
            return Ok(None);
        }
        Ok(Some(PenaltyOp {
            member,
            row,
            factors: (
                config.repeat_penalty,
                config.frequency_penalty,
                config.presence_penalty,
                sampling.window,
            ),
            tokens: self.tokens(device, (position, capacity), sampling)?,
            biases: self.biases(device, &config.logit_bias)?,
        }))
    }

    /// The tokens in the penalty window, by position.
    fn tokens(
        &mut self,
        device: &Device,
        (position, capacity): (usize, usize),
        sampling: &Sampling<'_>,
    ) -> Result<Buffer, GpuError> {
        let n_remembered = sampling.window;
        let bytes = if n_remembered > 0 {
            capacity as u64 * 4
        } else {
            4
        };
        let buffer = match self.tokens.take() {
            Some(buffer) if buffer.bytes() >= bytes => buffer,
            _ => device.buffer("tokens", bytes)?,
        };
        if n_remembered > 0 {
            let end = position + 1;
            let recent = sampling.recent;
            // Forgotten tokens are replaced by an invalid id.
            let forgotten = n_remembered.min(end) - recent.len().min(end);
            let ids = std::iter::repeat_n(u32::MAX, forgotten).chain(recent.iter().copied());
            let ids: Vec<u32> = ids.collect();
            let first = end - ids.len();
            device.write(&buffer, first as u64 * 4, &ids)?;
        }
        Ok(self.tokens.insert(buffer).clone())
    }

    fn biases(
        &mut self,
        device: &Device,
        biases: &[(u32, f32)],
    ) -> Result<Option<Buffer>, GpuError> {
        if biases.is_empty() {
            return Ok(None);
        }
        let buffer = match self.biases.take() {
            Some((known, buffer)) if known == biases => buffer,
            _ => {
                // Buffers are multiples of 16 bytes: pairs, the last one with an invalid token.
                let mut words: Vec<[u32; 2]> =
                    biases.iter().map(|b| [b.0, b.1.to_bits()]).collect();
                words.resize(words.len().next_multiple_of(2), [u32::MAX, 0]);
                device.upload(words.as_flattened())?
            }
        };
        self.biases = Some((biases.to_vec(), buffer.clone()));
        Ok(Some(buffer))
    }
}

impl LogprobsScratch {
    /// For the `n_top` most probable tokens of `n` sequences.
    fn op(
        &mut self,
        device: &Device,
        logits: &View,
        (n_top, n): (usize, usize),
    ) -> Result<LogprobsOp, GpuError> {
        // The largest is always needed. Few lengths, so that commands can be replayed for others.
        let k = n_top.max(1).next_power_of_two().min(MAX_TOP_K);
        let n_vocab = logits.width;
        Ok(LogprobsOp {
            top: top_room(device, &mut self.top, (n_vocab, k, n))?,
            weights: weights_room(device, &mut self.weights, (n_vocab, n))?,
            out: room(device, &mut self.out, 2 * n)?,
        })
    }
}

/// What is read back of sequences that were sampled for.
#[derive(Debug)]
pub(super) struct ReadSamples {
    /// Their states, and of each run with log-probabilities the largest logits, and what is known of those chosen.
    ranges: Vec<ReadRange>,
    /// The members of these runs, and how many logits.
    runs: Vec<(Range<usize>, usize)>,
    /// How many of the most probable tokens are wanted of each sequence.
    n_top: Vec<Option<usize>>,
}

impl ReadSamples {
    /// Of the sequences that `samples` samples for, all that have states.
    pub(super) fn new(samples: &[SampleOp], n_top: Vec<Option<usize>>) -> ReadSamples {
        let states = samples.first().map(|sample| &sample.states);
        let states = states.map(|states| ReadRange::of::<u32>(states, 0..n_top.len() * STATE_LEN));
        let mut ranges: Vec<ReadRange> = states.into_iter().collect();
        let mut runs = Vec::new();
        for sample in samples {
            let Some(logprobs) = &sample.logprobs else {
                continue;
            };
            let (n, k) = (sample.n, logprobs.top.k());
            ranges.push(ReadRange::of::<u32>(logprobs.top.best(), 0..2 * n * k));
            ranges.push(ReadRange::of::<f32>(&logprobs.out, 0..2 * n));
            runs.push((sample.first..sample.first + n, k));
        }
        ReadSamples {
            ranges,
            runs,
            n_top,
        }
    }

    pub(super) fn ranges(&self) -> &[ReadRange] {
        &self.ranges
    }

    /// What was sampled for sequence number `member`, which was at `position`, where `read` has what was read.
    pub(super) fn sampled(&self, read: &[Vec<u8>], member: usize, position: usize) -> Sampled {
        let words = |range: usize| {
            let bytes = read.get(range).map_or(&[][..], Vec::as_slice);
            bytes.as_chunks::<4>().0
        };
        let word =
            |range: usize, at: usize| words(range).get(at).map(|word| u32::from_ne_bytes(*word));
        let at = member * STATE_LEN;
        // Where the device is undecided, a sequence stays where it is.
        let (Some(id), true) = (word(0, at + 1), word(0, at) == Some(position as u32 + 1)) else {
            return Sampled::Undecided;
        };
        let Some(n_top) = self.n_top.get(member).copied().flatten() else {
            return Sampled::Token(id.into());
        };
        let found = self.runs.iter().position(|(run, _)| run.contains(&member));
        let logprobs = found.and_then(|i| {
            let (run, k) = &self.runs[i];
            let (range, of_run) = (1 + 2 * i, member - run.start);
            let pairs = words(range).get(2 * k * of_run..2 * k * (of_run + 1))?;
            let number = |word: &[u8; 4]| u32::from_ne_bytes(*word);
            let largest = pairs.chunks_exact(2);
            let largest = largest.map(|pair| (number(&pair[1]), f32::from_bits(number(&pair[0]))));
            let largest: Vec<_> = largest.filter(|(id, _)| *id != u32::MAX).collect();
            let [chosen, log_total] =
                [0, 1].map(|i| word(range + 1, 2 * of_run + i).map(f32::from_bits));
            Logprobs::of_largest(chosen?, &largest, log_total?, n_top)
        });
        match logprobs {
            Some(_) => Sampled::Token(Chosen { id, logprobs }),
            // Logits that aren't finite are the host's.
            None => Sampled::Undecided,
        }
    }
}

/// A step that is submitted repeatedly.
pub(super) struct Steps {
    graph: SharedGraph,
    /// `None` once no more are submitted: they keep memory alive.
    commands: Option<RecordedStep>,
    reads: ReadSamples,
    /// The host says which tokens may come next: then sampling is a piece of its own, of what is still there.
    masks: Option<(Masks, Current)>,
    /// With masks: the logits that are sampled from next are being computed.
    is_computed: bool,
    under_way: VecDeque<Submission>,
    /// The positions that the first of those computes.
    positions: Vec<usize>,
    /// How many steps have results that weren't taken yet, or haven't been submitted.
    n_left: usize,
    /// Of sequences whose layers have states, whether others share these: steps mustn't overwrite them then.
    are_forked: Vec<Arc<AtomicBool>>,
    /// Of the memory that they write keys, values and states to.
    moves: Moves,
    pace: TokenRate,
}

impl Steps {
    /// `n_steps` times the step `commands`, the first for `positions`, as long as keys, values and states stay where they are;
    /// where layers have states, until these are shared.
    pub(super) fn new(
        graph: &SharedGraph,
        commands: RecordedStep,
        (reads, masks): (ReadSamples, Option<(Masks, Current)>),
        (positions, n_steps): (Vec<usize>, usize),
        are_forked: Vec<Arc<AtomicBool>>,
        moves: Moves,
    ) -> Steps {
        Steps {
            graph: graph.clone(),
            commands: Some(commands),
            reads,
            masks,
            is_computed: false,
            under_way: VecDeque::with_capacity(MOST_UNDER_WAY),
            positions,
            n_left: n_steps,
            are_forked,
            moves,
            pace: TokenRate::default(),
        }
    }
}

impl Steps {
    /// Steps in flight after which the state at the first of them is still there.
    fn max_depth(&self) -> usize {
        let is_forked = |of: &Arc<AtomicBool>| of.load(Ordering::Relaxed);
        match &*self.are_forked {
            [] => MOST_UNDER_WAY,
            all if all.iter().any(is_forked) => 0,
            _ => SLOTS - 1,
        }
    }
}

impl Steps {
    /// Submits steps, so that `wanted` are under way, or fewer.
    fn submit(&mut self, wanted: usize) -> Result<(), GpuError> {
        let depth = self.pace.depth().min(wanted);
        let depth = depth.min(self.n_left).min(self.max_depth());
        if wanted == 0 {
            self.commands = None;
        }
        while self.under_way.len() < depth
            && let Some(commands) = &self.commands
        {
            let mut graph = self.graph.lock();
            if self.moves.are_there() {
                self.commands = None;
                break;
            }
            let submission = graph.run(commands, self.reads.ranges())?;
            drop(graph);
            self.under_way.push_back(submission);
        }
        Ok(())
    }

    /// Samples tokens that are `allowed` for the step that is computed, if no tokens are under way, and computes the next
    /// step: one ahead of what is sampled. If none is wanted, what is computed already is sampled from; unless a sequence
    /// has taken another step since, on its own, which overwrites that.
    fn submit_restricted(
        &mut self,
        wanted: usize,
        allowed: &[Option<&[u32]>],
    ) -> Result<(), GpuError> {
        let Some((masks, current)) = &self.masks else {
            return Ok(());
        };
        let (masks, is_current) = (masks.clone(), current.is_current());
        let are_under_way = !self.under_way.is_empty();
        if let Some(commands) = self
            .commands
            .clone()
            .filter(|_| is_current && !are_under_way)
        {
            let (step, sampling) = commands.split_last();
            let shared = self.graph.clone();
            let mut graph = shared.lock();
            self.compute(&mut graph, &step, wanted)?;
            if self.is_computed {
                masks.write(allowed)?;
                let submission = graph.run(&sampling, self.reads.ranges())?;
                self.under_way.push_back(submission);
                self.is_computed = false;
                self.compute(&mut graph, &step, wanted)?;
            }
        }
        if wanted == 0 || !is_current {
            (self.commands, self.is_computed) = (None, false);
        }
        Ok(())
    }

    /// Begins to compute the logits of one more step, if there are fewer than `wanted` under way.
    fn compute(
        &mut self,
        graph: &mut Graph,
        step: &RecordedStep,
        wanted: usize,
    ) -> Result<(), GpuError> {
        let most = wanted.min(self.n_left).min(self.max_depth());
        if self.is_computed || self.under_way.len() >= most || self.moves.are_there() {
            return Ok(());
        }
        drop(graph.run(step, &[])?);
        self.is_computed = true;
        Ok(())
    }
}

impl Decoding for Steps {
    fn poll_next(
        &mut self,
        wanted: usize,
        allowed: &[Option<&[u32]>],
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Vec<Sampled>>, BackendError>> {
        match &self.masks {
            Some(_) => self.submit_restricted(wanted, allowed)?,
            None => self.submit(wanted)?,
        }
        let Some(first) = self.under_way.front_mut() else {
            return Poll::Ready(Ok(None));
        };
        let read = ready!(Pin::new(first).poll(cx));
        self.under_way.pop_front();
        let read = read?;
        self.n_left -= 1;
        self.pace.count();
        let sampled = self.positions.iter_mut().enumerate().map(|(i, position)| {
            *position += 1;
            self.reads.sampled(&read, i, *position - 1)
        });
        Poll::Ready(Ok(Some(sampled.collect())))
    }
}

/// The rate at which tokens arrive.
#[derive(Debug, Default)]
struct TokenRate {
    n_tokens: usize,
    #[cfg(not(target_arch = "wasm32"))]
    last: Option<Instant>,
    /// Recent time from one token to the next; unknown where there is no clock.
    interval: Option<Duration>,
}

impl TokenRate {
    /// Records the arrival of a token.
    fn count(&mut self) {
        self.n_tokens += 1;
        #[cfg(not(target_arch = "wasm32"))]
        {
            let now = Instant::now();
            if let Some(last) = self.last.replace(now) {
                let interval = now.duration_since(last);
                let before = self.interval.unwrap_or(interval);
                self.interval = Some((before * 3 + interval) / 4);
            }
        }
    }

    /// Steps to keep in flight: few where they take long, as anything after the last token has to wait for
    /// them, and few at the beginning, which may soon be the end.
    fn depth(&self) -> usize {
        let reserve = match self.interval {
            None => 2,
            Some(interval) => {
                let steps = IN_RESERVE.as_nanos() / interval.as_nanos().max(1);
                usize::try_from(steps)
                    .unwrap_or(usize::MAX)
                    .saturating_add(2)
            }
        };
        reserve.min(self.n_tokens + 1).min(MOST_UNDER_WAY)
    }
}
