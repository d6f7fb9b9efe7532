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

use sterna_gpu::graph::{SampleMethod, SampleOp, Shared, SharedGraph, View};
use sterna_gpu::kernels::output::{Draw, MAX_TOP_K, TopK, Weights};
use sterna_gpu::memory::Buffer;
use sterna_gpu::{Commands, Device, GpuError, ReadRange, Submission};

use crate::backend::{BackendError, Decoding, Sampled};
use crate::sampling::{SamplerConfig, Sampling};

/// Steps that are decoded in one go: rotations of so many positions are computed at once.
pub(super) const MOST_STEPS: usize = 256;

/// The most tokens that penalties look back on: the time they take grows with the square.
const MOST_PENALISED: usize = 4096;

/// Steps under way at most.
const MOST_UNDER_WAY: usize = 8;

/// Work to have under way: what the host does with a token, and to hand over a step, takes less.
const IN_RESERVE: Duration = Duration::from_millis(5);

/// How the device samples as `config` says, if it can.
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
    // Devices take the smallest numbers for 0.
    if !temperature.is_normal() {
        return None;
    }
    let share = top_p < 1.0;
    match top_k {
        1..=MAX_TOP_K => Some(SampleMethod::Best(top_k)),
        0 if !share && min_p == 0.0 => Some(SampleMethod::Gumbel),
        0 => Some(SampleMethod::All { share }),
        // Those that are not among the best are no more kept than with all.
        _ if !share && min_p > 0.0 => Some(SampleMethod::All { share }),
        _ => None,
    }
}

/// For how many steps from position `len` on tokens can be sampled as `sampling` says.
pub(super) fn steps_from(len: usize, sampling: &Sampling<'_>) -> usize {
    let config = sampling.config;
    // Biases of one token are added in turn; kernels add them side by side.
    let mut biased: Vec<u32> = config.logit_bias.iter().map(|(id, _)| *id).collect();
    biased.sort_unstable();
    let is_twice = biased.windows(2).any(|ids| ids[0] == ids[1]);
    // Tokens are remembered by position.
    let has_places = sampling.recent.len() <= len + 1;
    if method(config).is_none() || is_twice || !has_places {
        return 0;
    }
    if sampling.window > MOST_PENALISED {
        return MOST_PENALISED.saturating_sub(len).min(MOST_STEPS);
    }
    MOST_STEPS
}

/// Memory for sampling, kept with a sequence.
#[derive(Debug, Default)]
pub(super) struct SampleScratch {
    /// Tokens by position, for penalties.
    tokens: Option<Buffer>,
    best: Option<Shared<TopK>>,
    weights: Option<Shared<Weights>>,
    biases: Option<(Vec<(u32, f32)>, Buffer)>,
}

impl SampleScratch {
    /// What samples as `sampling` says, of a sequence of `len` tokens in memory for `capacity`; `state` has
    /// the position and the token of the step. There are steps by [`steps_from`].
    pub(super) fn op(
        &mut self,
        device: &Device,
        (len, capacity): (usize, usize),
        logits: View,
        state: &Buffer,
        sampling: &Sampling<'_>,
    ) -> Result<Option<SampleOp>, GpuError> {
        let config = sampling.config;
        let Some(method) = method(config) else {
            return Ok(None);
        };
        let best = match self.best.take() {
            Some(best) if best.k() == method.k() => best,
            _ => Shared::new(TopK::new(device, logits.width, method.k())?),
        };
        let weights = match (method, self.weights.take()) {
            (SampleMethod::All { share: true }, None) => {
                Some(Shared::new(Weights::new(device, logits.width)?))
            }
            (_, weights) => weights,
        };
        (self.best, self.weights) = (Some(best.clone()), weights.clone());
        let (temperature, seed) = match config.temperature {
            // Commands stay the same, whatever the seed.
            0.0 => (0.0, 0),
            // The draw is in the Gumbel noise.
            _ if method == SampleMethod::Gumbel => (0.0, sampling.seed),
            temperature => (temperature, sampling.seed),
        };
        Ok(Some(SampleOp {
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
            tokens: self.tokens(device, (len, capacity), sampling)?,
            best,
            weights: weights.filter(|_| method == SampleMethod::All { share: true }),
            penalties: (sampling.window > 0).then_some((
                config.repeat_penalty,
                config.frequency_penalty,
                config.presence_penalty,
                sampling.window,
            )),
            biases: self.biases(device, &config.logit_bias)?,
        }))
    }

    /// The tokens that penalties look back on, by position.
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
            // Of tokens that are forgotten, what is no token.
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

/// A step that is handed over again and again.
pub(super) struct Steps {
    graph: SharedGraph,
    commands: Arc<Commands>,
    /// Position and token of the next step.
    state: Buffer,
    under_way: VecDeque<Submission>,
    /// The position that the first of those computes.
    position: usize,
    /// The position that none computes.
    end: usize,
    pace: TokenRate,
}

impl Steps {
    /// The step `commands` for the positions from `position` to `end`.
    pub(super) fn new(
        graph: &SharedGraph,
        commands: Arc<Commands>,
        state: Buffer,
        (position, end): (usize, usize),
    ) -> Steps {
        Steps {
            graph: graph.clone(),
            commands,
            state,
            under_way: VecDeque::with_capacity(MOST_UNDER_WAY),
            position,
            end,
            pace: TokenRate::default(),
        }
    }
}

impl Decoding for Steps {
    fn poll_next(
        &mut self,
        wanted: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Sampled, BackendError>> {
        let depth = self.pace.depth().min(wanted.max(1));
        let depth = depth.min(self.end - self.position);
        while self.under_way.len() < depth {
            let read = ReadRange::of::<u32>(&self.state, 0..2);
            let submission = self.graph.lock().run(&self.commands, &[read])?;
            self.under_way.push_back(submission);
        }
        let Some(first) = self.under_way.front_mut() else {
            return Poll::Ready(Ok(Sampled::Over));
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
            return Poll::Ready(Ok(Sampled::Undecided));
        }
        self.pace.count();
        Poll::Ready(Ok(Sampled::Token(u32::from_ne_bytes(id))))
    }
}

/// How fast tokens come.
#[derive(Debug, Default)]
struct TokenRate {
    n_tokens: usize,
    #[cfg(not(target_arch = "wasm32"))]
    last: Option<Instant>,
    /// From one token to the next, of late; unknown where there is no clock.
    interval: Option<Duration>,
}

impl TokenRate {
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
