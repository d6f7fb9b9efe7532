//! Sampling the next token on the device.

use super::op::{Shared, View};
use crate::kernels::attention::Position;
use crate::kernels::elementwise::copy;
use crate::kernels::linear::Ids;
use crate::kernels::output::{
    Draw, MAX_TOP_K, Penalties, STATE_LEN, Samplers, TopK, Weights, log_probability, mask,
    penalize, perturb, sample, sample_of_all, top_k, weigh,
};
use crate::memory::Buffer;
use crate::{GpuError, Recorder};

/// The set of tokens to sample from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleMethod {
    /// From this many top tokens.
    Best(usize),
    /// From all, if the tokens kept are among the top ones; `share` if they are selected by their share of
    /// the probability of all tokens.
    All {
        /// Whether the softmax weights of all tokens are needed.
        share: bool,
    },
    /// From all, by Gumbel-max sampling: the argmax of the logits plus Gumbel noise.
    Gumbel,
}

impl SampleMethod {
    /// How many of the largest logits are found, in order.
    pub fn k(self) -> usize {
        match self {
            SampleMethod::Best(k) => k,
            SampleMethod::All { .. } => MAX_TOP_K,
            SampleMethod::Gumbel => 1,
        }
    }
}

/// Samples the tokens that follow a step.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleOp {
    /// Rows, among which are those of each sequence.
    pub logits: View,
    /// Their states, among others, as [`Samplers::states`].
    pub states: Buffer,
    /// The number of the first of them.
    pub first: usize,
    /// How many sequences there are.
    pub n: usize,
    /// The set of tokens to sample from.
    pub method: SampleMethod,
    /// Divides logits before Gumbel noise is added.
    pub temperature: f32,
    /// How a token is drawn from the top ones.
    pub draw: Draw,
    /// Which tokens may be drawn, as [`mask`] reads it, of all that have states; `None` if any may.
    pub masks: Option<Buffer>,
    /// What log-probabilities of tokens follow from, if they are wanted.
    pub logprobs: Option<LogprobsOp>,
    /// Room for the logits as they are before anything, if they change and are needed afterwards.
    pub unchanged: Option<View>,
    /// Of those whose logits change first, which and how.
    pub penalties: Vec<PenaltyOp>,
    /// Of a single sequence, its tokens by position, if the next are to be written there.
    pub tokens: Option<Buffer>,
    /// Room for the top tokens.
    pub best: Shared<TopK>,
    /// Room for the weights of all tokens, if they are needed.
    pub weights: Option<Shared<Weights>>,
}

/// Logits and their sums as they are before masks, penalties and noise.
#[derive(Debug, Clone, PartialEq)]
pub struct LogprobsOp {
    /// Room for the largest logits of each sequence.
    pub top: Shared<TopK>,
    /// Room for the weights of all tokens.
    pub weights: Shared<Weights>,
    /// Room for what [`log_probability`] computes.
    pub out: Buffer,
}

/// Penalties and biases of a sequence.
#[derive(Debug, Clone, PartialEq)]
pub struct PenaltyOp {
    /// The number of its state.
    pub member: usize,
    /// The row of its logits.
    pub row: usize,
    /// Factor, frequency, presence and window.
    pub factors: (f32, f32, f32, usize),
    /// Its tokens by position.
    pub tokens: Buffer,
    /// Pairs of an id and the bits of an f32 that is added to its logit.
    pub biases: Option<Buffer>,
}

impl SampleOp {
    /// The tokens in the states of all, also of those that others sample for.
    pub(super) fn tokens_of_all(&self) -> Ids {
        Ids {
            buffer: self.states.clone(),
            offset: 1,
            stride: STATE_LEN,
        }
    }

    /// Where logits are afterwards as they were, if they are.
    pub fn logits_before(&self) -> Option<&View> {
        let changes =
            self.masks.is_some() || SampleOp::changes_logits(self.method, &self.penalties);
        self.unchanged
            .as_ref()
            .or((!changes).then_some(&self.logits))
    }

    /// Whether logits change before a token is drawn, which masks don't do to those of tokens that may be.
    pub fn changes_logits(method: SampleMethod, penalties: &[PenaltyOp]) -> bool {
        method == SampleMethod::Gumbel || !penalties.is_empty()
    }

    pub(super) fn record(&self, recorder: &mut Recorder) -> Result<(), GpuError> {
        let samplers = Samplers {
            logits: self.logits.of(),
            states: &self.states,
            first: self.first,
            n: self.n,
        };
        if let Some(unchanged) = &self.unchanged {
            copy(recorder, unchanged.of(), samplers.logits)?;
        }
        if let Some(logprobs) = &self.logprobs {
            top_k(recorder, samplers, &logprobs.top)?;
            weigh(recorder, samplers, 1.0, &logprobs.weights)?;
        }
        if let Some(masks) = &self.masks {
            mask(recorder, samplers, masks)?;
        }
        self.draw(recorder, samplers)?;
        match &self.logprobs {
            Some(LogprobsOp { weights, out, .. }) => {
                let logits = self.unchanged.as_ref().map_or(samplers.logits, View::of);
                let samplers = Samplers { logits, ..samplers };
                log_probability(recorder, samplers, weights, out)
            }
            None => Ok(()),
        }
    }

    /// Draws tokens from logits of which any may be drawn.
    fn draw(&self, recorder: &mut Recorder, samplers: Samplers<'_>) -> Result<(), GpuError> {
        for penalty in &self.penalties {
            let position = Position {
                buffer: &self.states,
                index: penalty.member * STATE_LEN,
            };
            let (repeat, frequency, presence, window) = penalty.factors;
            let penalties = Penalties {
                repeat,
                frequency,
                presence,
                window,
                biases: penalty.biases.as_ref(),
            };
            let logits = self.logits.rows(penalty.row, 1);
            penalize(recorder, logits.of(), &penalties, &penalty.tokens, position)?;
        }
        let (draw, best, weights) = (&self.draw, &*self.best, self.weights.as_deref());
        let tokens = self.tokens.as_ref();
        if self.method == SampleMethod::Gumbel {
            perturb(recorder, samplers, self.temperature)?;
        }
        top_k(recorder, samplers, best)?;
        match self.method {
            SampleMethod::All { .. } => {
                if let Some(weights) = weights {
                    weigh(recorder, samplers, draw.temperature, weights)?;
                }
                sample_of_all(recorder, samplers, best, weights, draw, tokens)
            }
            SampleMethod::Best(_) | SampleMethod::Gumbel => {
                sample(recorder, samplers, best, draw, tokens)
            }
        }
    }
}
