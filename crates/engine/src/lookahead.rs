//! Decoding that a backend does on its own, ahead of the caller.

use std::collections::VecDeque;
use std::future::poll_fn;

use crate::backend::{BackendError, Decoding, Sampled};
use crate::sampling::{SamplerConfig, Sampling};

/// The decoding of a session, and the state it continues from.
pub(crate) struct Lookahead {
    steps: Box<dyn Decoding>,
    /// The weights it computes with.
    generation: u64,
    config: SamplerConfig,
    /// The state of a sampler that has accepted every token so far.
    recent: VecDeque<u32>,
    n_remembered: usize,
    /// The token drawn last.
    last: Option<u32>,
}

impl Lookahead {
    /// `steps` that sample as `sampling` specifies, with the weights of `generation`.
    pub(crate) fn new(
        steps: Box<dyn Decoding>,
        sampling: &Sampling<'_>,
        generation: u64,
    ) -> Lookahead {
        Lookahead {
            steps,
            generation,
            config: sampling.config.clone(),
            recent: sampling.recent.clone(),
            n_remembered: sampling.window,
            last: None,
        }
    }

    /// Whether the next step is the one that computes `id`, and samples as `sampling` specifies.
    pub(crate) fn continues_with(&self, id: u32, sampling: &Sampling<'_>, generation: u64) -> bool {
        self.last == Some(id)
            && self.generation == generation
            && self.config == *sampling.config
            && self.recent == *sampling.recent
    }

    /// [`Decoding::poll_next`] as a future. Dropping it loses nothing.
    pub(crate) async fn next(&mut self, wanted: usize) -> Result<Sampled, BackendError> {
        let drawn = poll_fn(|cx| self.steps.poll_next(wanted, cx)).await?;
        if let Sampled::Token(id) = drawn {
            self.last = Some(id);
            if self.n_remembered > 0 {
                if self.recent.len() == self.n_remembered {
                    self.recent.pop_front();
                }
                self.recent.push_back(id);
            }
        }
        Ok(drawn)
    }
}
