//! Decoding without the host: the token that a step draws is the next step's.
//!
//! Commands of a step are handed over several times before the first token is back. They read their
//! token and position where the step before has left them.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
#[cfg(not(target_arch = "wasm32"))]
use std::time::Instant;

use sterna_gpu::kernels::attention::Position;
use sterna_gpu::kernels::output::{
    Draw, MAX_TOP_K, Penalties, TopK, Weights, penalize, perturb, sample, sample_of_all, top_k,
    weigh,
};
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Commands, Device, GpuError, ReadRange, Recorder, Submission};

use super::op::{Shared, View};
use super::tape::SharedTape;
use crate::ahead::{Decoding, Drawn};
use crate::backend::BackendError;
use crate::sampler::{Sampler, SamplerConfig};

/// Steps that are decoded in one go: rotations of so many positions are computed at once.
pub(super) const MOST_STEPS: usize = 256;

/// The most tokens that penalties look back on: the time they take grows with the square.
const MOST_PENALISED: usize = 4096;

/// Steps under way at most.
const MOST_UNDER_WAY: usize = 8;

/// Work to have under way: what the host does with a token, and to hand over a step, takes less.
const IN_RESERVE: Duration = Duration::from_millis(5);

/// How a token is chosen, as far as the device can.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Method {
    /// Of so many best.
    Best(usize),
    /// Of all, if those that are kept are found among the best; by their share in the whole, or by what
    /// they are compared to the best.
    All { share: bool },
    /// The best with noise, which is a draw from all.
    Noise,
}

impl Method {
    /// The way to choose as `config` says, if there is one.
    fn of(config: &SamplerConfig) -> Option<Method> {
        let SamplerConfig {
            temperature,
            top_k,
            top_p,
            min_p,
            ..
        } = *config;
        if temperature == 0.0 {
            return Some(Method::Best(1));
        }
        // Devices take the smallest numbers for 0.
        if !temperature.is_normal() {
            return None;
        }
        let share = top_p < 1.0;
        match top_k {
            1..=MAX_TOP_K => Some(Method::Best(top_k)),
            0 if !share && min_p == 0.0 => Some(Method::Noise),
            0 => Some(Method::All { share }),
            // Those that are not among the best are no more kept than with all.
            _ if !share && min_p > 0.0 => Some(Method::All { share }),
            _ => None,
        }
    }

    /// Logits that are found in order.
    fn k(self) -> usize {
        match self {
            Method::Best(k) => k,
            Method::All { .. } => MAX_TOP_K,
            Method::Noise => 1,
        }
    }
}

/// For how many steps from position `len` on tokens can be chosen as `sampler` does.
pub(super) fn steps_from(len: usize, sampler: &Sampler) -> usize {
    let config = sampler.config();
    // Biases of one token are added in turn; kernels add them side by side.
    let mut biased: Vec<u32> = config.logit_bias.iter().map(|(id, _)| *id).collect();
    biased.sort_unstable();
    let is_twice = biased.windows(2).any(|ids| ids[0] == ids[1]);
    // Tokens are remembered by position.
    let has_places = sampler.recent().len() <= len + 1;
    if Method::of(config).is_none() || is_twice || !has_places {
        return 0;
    }
    if sampler.n_remembered() > MOST_PENALISED {
        return MOST_PENALISED.saturating_sub(len).min(MOST_STEPS);
    }
    MOST_STEPS
}

/// Memory for choices, kept with a sequence.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// Tokens by position, for penalties.
    tokens: Option<Buffer>,
    best: Option<Shared<TopK>>,
    weights: Option<Shared<Weights>>,
    biases: Option<(Vec<(u32, f32)>, Buffer)>,
}

/// What chooses the next token of a step.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    /// One row.
    pub(super) logits: View,
    method: Method,
    /// Divides logits before noise is added.
    temperature: f32,
    draw: Draw,
    /// Position and token of the step.
    state: Buffer,
    tokens: Buffer,
    best: Shared<TopK>,
    weights: Option<Shared<Weights>>,
    /// Factor, frequency, presence and window.
    penalties: Option<(f32, f32, f32, usize)>,
    biases: Option<Buffer>,
}

impl Room {
    /// What chooses as `sampler` does, of a sequence of `len` tokens in memory for `capacity`; `state` has
    /// the position and the token of the step. There are steps by [`steps_from`].
    pub(super) fn choice(
        &mut self,
        device: &Device,
        (len, capacity): (usize, usize),
        logits: View,
        state: &Buffer,
        sampler: &Sampler,
    ) -> Result<Option<Choice>, GpuError> {
        let config = sampler.config();
        let Some(method) = Method::of(config) else {
            return Ok(None);
        };
        let best = match self.best.take() {
            Some(best) if best.k() == method.k() => best,
            _ => Shared::new(TopK::new(device, logits.width, method.k())?),
        };
        let weights = match (method, self.weights.take()) {
            (Method::All { share: true }, None) => {
                Some(Shared::new(Weights::new(device, logits.width)?))
            }
            (_, weights) => weights,
        };
        (self.best, self.weights) = (Some(best.clone()), weights.clone());
        let (temperature, seed) = match config.temperature {
            // Commands stay the same, whatever the seed.
            0.0 => (0.0, 0),
            // The draw is in the noise.
            _ if method == Method::Noise => (0.0, sampler.seed_elsewhere()),
            temperature => (temperature, sampler.seed_elsewhere()),
        };
        Ok(Some(Choice {
            logits,
            method,
            temperature: config.temperature,
            draw: Draw {
                temperature,
                top_p: config.top_p,
                min_p: config.min_p,
                seed,
            },
            state: state.clone(),
            tokens: self.tokens(device, (len, capacity), sampler)?,
            best,
            weights: weights.filter(|_| method == Method::All { share: true }),
            penalties: (sampler.n_remembered() > 0).then_some((
                config.repeat_penalty,
                config.frequency_penalty,
                config.presence_penalty,
                sampler.n_remembered(),
            )),
            biases: self.biases(device, &config.logit_bias)?,
        }))
    }

    /// The tokens that `sampler` remembers, by position.
    fn tokens(
        &mut self,
        device: &Device,
        (len, capacity): (usize, usize),
        sampler: &Sampler,
    ) -> Result<Buffer, GpuError> {
        let n_remembered = sampler.n_remembered();
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
            let recent = sampler.recent();
            // Of tokens that it doesn't remember, what is no token.
            let forgotten = n_remembered.min(end) - recent.len().min(end);
            let ids = std::iter::repeat_n(u32::MAX, forgotten).chain(recent.iter().copied());
            let bytes: Vec<u8> = ids.flat_map(u32::to_ne_bytes).collect();
            let first = end - bytes.len() / 4;
            device.write(&buffer, first as u64 * 4, &bytes)?;
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
                // Buffers are of whole 16 bytes: in pairs, the last with a token that there isn't.
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

impl Choice {
    pub(super) fn record(&self, recorder: &mut Recorder) -> Result<(), GpuError> {
        let logits = self.logits.of();
        let state = Position {
            buffer: &self.state,
            index: 0,
        };
        if self.penalties.is_some() || self.biases.is_some() {
            let (repeat, frequency, presence, window) =
                self.penalties.unwrap_or((1.0, 0.0, 0.0, 0));
            let penalties = Penalties {
                repeat,
                frequency,
                presence,
                window,
                biases: self.biases.as_ref(),
            };
            penalize(recorder, logits, &penalties, &self.tokens, state)?;
        }
        let (draw, best, weights) = (&self.draw, &*self.best, self.weights.as_deref());
        if self.method == Method::Noise {
            perturb(recorder, logits, self.temperature, draw.seed, state)?;
        }
        top_k(recorder, logits, best)?;
        match self.method {
            Method::All { .. } => {
                if let Some(weights) = weights {
                    weigh(recorder, logits, draw.temperature, weights)?;
                }
                sample_of_all(recorder, best, weights, draw, state, &self.tokens)
            }
            Method::Best(_) | Method::Noise => sample(recorder, best, draw, state, &self.tokens),
        }
    }
}

/// A step that is handed over again and again.
pub(super) struct Steps {
    tape: SharedTape,
    commands: Arc<Commands>,
    /// Position and token of the next step.
    state: Buffer,
    under_way: VecDeque<Submission>,
    /// The position that the first of those computes.
    position: usize,
    /// The position that none computes.
    end: usize,
    pace: Pace,
}

impl Steps {
    /// The step `commands` for the positions from `position` to `end`.
    pub(super) fn new(
        tape: &SharedTape,
        commands: Arc<Commands>,
        state: Buffer,
        (position, end): (usize, usize),
    ) -> Steps {
        Steps {
            tape: tape.clone(),
            commands,
            state,
            under_way: VecDeque::with_capacity(MOST_UNDER_WAY),
            position,
            end,
            pace: Pace::default(),
        }
    }
}

impl Decoding for Steps {
    fn poll_next(
        &mut self,
        wanted: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Drawn, BackendError>> {
        let depth = self.pace.depth().min(wanted.max(1));
        let depth = depth.min(self.end - self.position);
        while self.under_way.len() < depth {
            let read = ReadRange::of::<u32>(&self.state, 0..2);
            let submission = self.tape.lock().run(&self.commands, &[read])?;
            self.under_way.push_back(submission);
        }
        let Some(first) = self.under_way.front_mut() else {
            return Poll::Ready(Ok(Drawn::Over));
        };
        let read = ready!(Pin::new(first).poll(cx));
        self.under_way.pop_front();
        let read = read?;
        let words = read.first().map_or(&[][..], |bytes| bytes.as_chunks().0);
        let &[position, id] = words else {
            return Poll::Ready(Err(BackendError::from(GpuError::Shape {
                what: "words of a decoded step",
                expected: 2,
                found: words.len() as u64,
            })));
        };
        self.position += 1;
        if u32::from_ne_bytes(position) as usize != self.position {
            return Poll::Ready(Ok(Drawn::Undecided));
        }
        self.pace.count();
        Poll::Ready(Ok(Drawn::Token(u32::from_ne_bytes(id))))
    }
}

/// How fast tokens come.
#[derive(Debug, Default)]
struct Pace {
    n_tokens: usize,
    #[cfg(not(target_arch = "wasm32"))]
    last: Option<Instant>,
    /// From one token to the next, of late; unknown where there is no clock.
    interval: Option<Duration>,
}

impl Pace {
    /// A token has come.
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

    /// Steps to have under way: few where they take long, as whatever comes after the last token has to
    /// wait for them, and few at the beginning, which may soon be the end.
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
