//! Sampling the next token on the device.

use super::op::{Shared, View};
use crate::kernels::attention::Position;
use crate::kernels::output::{
    Draw, MAX_TOP_K, Penalties, TopK, Weights, penalize, perturb, sample, sample_of_all, top_k,
    weigh,
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

/// Samples the token that follows a step.
#[derive(Debug, Clone, PartialEq)]
pub struct SampleOp {
    /// One row.
    pub logits: View,
    /// The set of tokens to sample from.
    pub method: SampleMethod,
    /// Divides logits before Gumbel noise is added.
    pub temperature: f32,
    /// How a token is drawn from the top ones.
    pub draw: Draw,
    /// Position and token of the step.
    pub state: Buffer,
    /// The tokens of the sequence by position.
    pub tokens: Buffer,
    /// Room for the top tokens.
    pub best: Shared<TopK>,
    /// Room for the weights of all tokens, if they are needed.
    pub weights: Option<Shared<Weights>>,
    /// Factor, frequency, presence and window.
    pub penalties: Option<(f32, f32, f32, usize)>,
    /// Pairs of an id and the bits of an f32 that is added to its logit.
    pub biases: Option<Buffer>,
}

impl SampleOp {
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
        if self.method == SampleMethod::Gumbel {
            perturb(recorder, logits, self.temperature, draw.seed, state)?;
        }
        top_k(recorder, logits, best)?;
        match self.method {
            SampleMethod::All { .. } => {
                if let Some(weights) = weights {
                    weigh(recorder, logits, draw.temperature, weights)?;
                }
                sample_of_all(recorder, best, weights, draw, state, &self.tokens)
            }
            SampleMethod::Best(_) | SampleMethod::Gumbel => {
                sample(recorder, best, draw, state, &self.tokens)
            }
        }
    }
}
