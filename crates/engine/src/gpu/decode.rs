//! Decoding without the host: the token sampled by a step is the next step's input.
//!
//! Commands of a step, of one sequence or of several, are submitted several times before the first tokens are read back.
//! They read token and position of each where the previous step has written them.

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
    PenaltyOp, RecordedStep, SampleMethod, SampleOp, Shared, SharedGraph, View,
};
use sterna_gpu::kernels::output::{Draw, MAX_TOP_K, STATE_LEN, TopK, Weights};
use sterna_gpu::kernels::recurrent::SLOTS;
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Device, GpuError, ReadRange, Submission};

use super::GpuCache;
use super::buffer::room;
use super::pages::Moves;
use crate::backend::{BackendError, Continued, Decoding, KvCache, Sampled};
use crate::sampling::{SamplerConfig, Sampling};

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

/// How many steps from position `len` on can be sampled as `sampling` specifies.
pub(super) fn steps_from(len: usize, sampling: &Sampling<'_>) -> usize {
    let config = sampling.config;
    // Biases of one token are added sequentially; kernels add them in parallel.
    let mut biased: Vec<u32> = config.logit_bias.iter().map(|(id, _)| *id).collect();
    biased.sort_unstable();
    let is_twice = biased.windows(2).any(|ids| ids[0] == ids[1]);
    // Tokens are stored by position.
    let has_places = sampling.recent.len() <= len + 1;
    if method(config).is_none() || is_twice || !has_places {
        return 0;
    }
    if sampling.window > MOST_PENALISED {
        return MOST_PENALISED.saturating_sub(len).min(MOST_STEPS);
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
    let kind = |of: &Continued<'_, GpuCache>| SampleKind::of(of.sampling.config);
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
}

impl SampleKind {
    /// `None` if there are no kernels for that.
    pub(super) fn of(config: &SamplerConfig) -> Option<SampleKind> {
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
) -> Result<SampleOp, GpuError> {
    let n = choices.len();
    let (mut penalties, mut states) = (Vec::new(), Vec::with_capacity(n));
    for (member, (sequence, row)) in choices.iter_mut().enumerate() {
        let Continued {
            cache,
            last,
            sampling,
        } = sequence;
        penalties.extend(cache.penalty(device, (member, *row), sampling)?);
        states.push(state(cache.len(), *last, *row, sampling.seed));
    }
    let scratch = choices[0].0.cache.sampling();
    let memory = room(device, &mut scratch.states, n * STATE_LEN)?;
    device.write(&memory, 0, states.as_flattened())?;
    scratch.op(device, logits.clone(), (memory, 0..n), kind, penalties)
}

/// Memory for sampling, reused with a sequence.
#[derive(Debug, Default)]
pub(super) struct SampleScratch {
    /// Tokens by position, for penalties.
    tokens: Option<Buffer>,
    /// Of sequences that are sampled for together.
    states: Option<Buffer>,
    best: Option<Shared<TopK>>,
    weights: Option<Shared<Weights>>,
    biases: Option<(Vec<(u32, f32)>, Buffer)>,
}

impl SampleScratch {
    /// The sampling operation for the sequences `run` of those with these states.
    pub(super) fn op(
        &mut self,
        device: &Device,
        logits: View,
        (states, run): (Buffer, Range<usize>),
        kind: SampleKind,
        penalties: Vec<PenaltyOp>,
    ) -> Result<SampleOp, GpuError> {
        let SampleKind {
            method,
            temperature,
            draw,
        } = kind;
        let n = run.len();
        let best = match self.best.take() {
            Some(best) if best.k() == method.k() && best.n_samplers() >= n => best,
            _ => Shared::new(TopK::new(device, logits.width, method.k(), n)?),
        };
        let is_share = method == SampleMethod::All { share: true };
        let weights = match self.weights.take() {
            Some(weights) if !is_share || weights.n_samplers() >= n => Some(weights),
            _ if is_share => Some(Shared::new(Weights::new(device, logits.width, n)?)),
            _ => None,
        };
        (self.best, self.weights) = (Some(best.clone()), weights.clone());
        Ok(SampleOp {
            logits,
            states,
            first: run.start,
            n,
            method,
            temperature,
            draw,
            tokens: penalties.first().map(|penalty| penalty.tokens.clone()),
            penalties,
            best,
            weights: weights.filter(|_| is_share),
        })
    }

    /// The penalties and biases of a sequence of `len` tokens in memory for `capacity`, if there are any.
    pub(super) fn penalty(
        &mut self,
        device: &Device,
        (len, capacity): (usize, usize),
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
            tokens: self.tokens(device, (len, capacity), sampling)?,
            biases: self.biases(device, &config.logit_bias)?,
        }))
    }

    /// The tokens in the penalty window, by position.
    fn tokens(
        &mut self,
        device: &Device,
        (len, capacity): (usize, usize),
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
            let end = len + 1;
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

/// A step that is submitted repeatedly.
pub(super) struct Steps {
    graph: SharedGraph,
    /// `None` once no more are submitted: they keep memory alive.
    commands: Option<RecordedStep>,
    /// Position and token of each sequence in the next step, [`STATE_LEN`] words each.
    states: Buffer,
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
        states: Buffer,
        (positions, n_steps): (Vec<usize>, usize),
        are_forked: Vec<Arc<AtomicBool>>,
        moves: Moves,
    ) -> Steps {
        Steps {
            graph: graph.clone(),
            commands: Some(commands),
            states,
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

impl Decoding for Steps {
    fn poll_next(
        &mut self,
        wanted: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Vec<Sampled>>, BackendError>> {
        let depth = self.pace.depth().min(wanted);
        let depth = depth.min(self.n_left).min(self.max_depth());
        let n_words = self.positions.len() * STATE_LEN;
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
            let read = ReadRange::of::<u32>(&self.states, 0..n_words);
            let submission = graph.run(commands, &[read])?;
            drop(graph);
            self.under_way.push_back(submission);
        }
        let Some(first) = self.under_way.front_mut() else {
            return Poll::Ready(Ok(None));
        };
        let read = ready!(Pin::new(first).poll(cx));
        self.under_way.pop_front();
        let read = read?;
        let words: &[[u8; 4]] = read.first().map_or(&[], |bytes| bytes.as_chunks().0);
        if words.len() != n_words {
            return Poll::Ready(Err(BackendError::from(GpuError::Shape {
                what: "words of a decoded step",
                expected: n_words as u64,
                found: words.len() as u64,
            })));
        }
        self.n_left -= 1;
        self.pace.count();
        let states = words.chunks_exact(STATE_LEN);
        let sampled = states.zip(&mut self.positions).map(|(state, position)| {
            *position += 1;
            let [at, id] = [state[0], state[1]].map(u32::from_ne_bytes);
            // Where the device is undecided, a sequence stays where it is.
            match at as usize == *position {
                true => Sampled::Token(id),
                false => Sampled::Undecided,
            }
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
