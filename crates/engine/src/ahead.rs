//! Decoding that a backend does by itself, ahead of whoever takes the tokens.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::task::{Context, Poll};

use crate::backend::BackendError;
use crate::sampler::{Sampler, SamplerConfig};

/// Steps of decoding that a device takes by itself, each with the token that the step before drew.
///
/// They belong to one sequence. What they compute of tokens that nobody takes lies behind the sequence's
/// end, where later steps write.
pub trait Decoding: MaybeSend {
    /// What the next step came to, once it is done. Steps after it are under way, so that in all no more
    /// than `wanted` are.
    fn poll_next(
        &mut self,
        wanted: usize,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Drawn, BackendError>>;
}

/// [`Send`], but for browsers, whose devices belong to one thread.
#[cfg(not(target_arch = "wasm32"))]
pub trait MaybeSend: Send {}
#[cfg(not(target_arch = "wasm32"))]
impl<T: Send + ?Sized> MaybeSend for T {}

/// [`Send`], but for browsers, whose devices belong to one thread.
#[cfg(target_arch = "wasm32")]
pub trait MaybeSend {}
#[cfg(target_arch = "wasm32")]
impl<T: ?Sized> MaybeSend for T {}

/// What a step of [`Decoding`] came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Drawn {
    /// This token comes next.
    Token(u32),
    /// The device can't tell which token comes next, or the logits are no numbers. The step is to be
    /// computed again, for the host to choose. Others would come to the same.
    Undecided,
    /// There was no step: there is room for no more.
    Over,
}

/// The decoding of a session, and what it follows from.
pub(crate) struct Ahead {
    steps: Box<dyn Decoding>,
    /// The weights it computes with.
    generation: u64,
    config: SamplerConfig,
    /// What a sampler remembers that has accepted every token so far.
    recent: VecDeque<u32>,
    n_remembered: usize,
    /// The token drawn last.
    last: Option<u32>,
}

impl Ahead {
    /// `steps` that choose as `sampler` does, with the weights of `generation`.
    pub(crate) fn new(steps: Box<dyn Decoding>, sampler: &Sampler, generation: u64) -> Ahead {
        Ahead {
            steps,
            generation,
            config: sampler.config().clone(),
            recent: sampler.recent().clone(),
            n_remembered: sampler.n_remembered(),
            last: None,
        }
    }

    /// Whether the next step is the one that computes `id`, and chooses as `sampler` does.
    pub(crate) fn goes_on_with(&self, id: u32, sampler: &Sampler, generation: u64) -> bool {
        self.last == Some(id)
            && self.generation == generation
            && self.config == *sampler.config()
            && self.recent == *sampler.recent()
    }

    /// [`Decoding::poll_next`], awaited. A future that is dropped takes nothing.
    pub(crate) async fn next(&mut self, wanted: usize) -> Result<Drawn, BackendError> {
        let drawn = poll_fn(|cx| self.steps.poll_next(wanted, cx)).await?;
        if let Drawn::Token(id) = drawn {
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
