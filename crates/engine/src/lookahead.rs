//! Decoding that a backend does on its own, ahead of the caller.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::backend::{BackendError, Decoding, Sampled};
use crate::sampling::{SamplerConfig, Sampling};

/// A session's part of a [`Lookahead`].
#[derive(Clone)]
pub(crate) struct Ahead {
    all: Arc<Mutex<Lookahead>>,
    member: usize,
}

/// The decoding of one session, or of several together, and the states it continues from.
struct Lookahead {
    steps: Box<dyn Decoding>,
    /// The weights it computes with.
    generation: u64,
    members: Vec<Member>,
    /// Somebody waits for the next step.
    is_awaited: bool,
}

struct Member {
    config: SamplerConfig,
    seed: u64,
    /// The state of a sampler that has accepted every token so far.
    recent: VecDeque<u32>,
    n_remembered: usize,
    logprobs: Option<usize>,
    /// Its tokens may be restricted.
    is_masked: bool,
    /// The token that the next step computes; unknown if the last one wasn't taken.
    last: Option<u32>,
}

impl Ahead {
    /// `steps`, with the weights of `generation`, that begin with these tokens and sample so; the part of each session.
    pub(crate) fn begin<'a>(
        steps: Box<dyn Decoding>,
        generation: u64,
        sequences: impl Iterator<Item = (u32, Sampling<'a>)>,
    ) -> impl Iterator<Item = Ahead> {
        let member = |(last, sampling): (u32, Sampling<'_>)| Member {
            config: sampling.config.clone(),
            seed: sampling.seed,
            recent: sampling.recent.clone(),
            n_remembered: sampling.window,
            logprobs: sampling.logprobs,
            is_masked: sampling.allowed.is_some(),
            last: Some(last),
        };
        let members: Vec<Member> = sequences.map(member).collect();
        let numbers = 0..members.len();
        let all = Arc::new(Mutex::new(Lookahead {
            steps,
            generation,
            members,
            is_awaited: false,
        }));
        numbers.map(move |member| Ahead {
            all: Arc::clone(&all),
            member,
        })
    }

    fn all(&self) -> MutexGuard<'_, Lookahead> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Its number among those that are decoded together.
    pub(crate) fn member(&self) -> usize {
        self.member
    }

    /// How many sessions are decoded together.
    pub(crate) fn n_members(&self) -> usize {
        self.all().members.len()
    }

    /// Whether both are parts of the same.
    pub(crate) fn is_with(&self, other: &Ahead) -> bool {
        Arc::ptr_eq(&self.all, &other.all)
    }

    /// Whether the next step is the one that computes `id`, and samples as `sampling` specifies.
    pub(crate) fn continues_with(&self, id: u32, sampling: &Sampling<'_>, generation: u64) -> bool {
        let all = self.all();
        let own = &all.members[self.member];
        own.last == Some(id)
            && all.generation == generation
            && own.config == *sampling.config
            && own.seed == sampling.seed
            && own.recent == *sampling.recent
            && own.logprobs == sampling.logprobs
            && (own.is_masked || sampling.allowed.is_none())
    }

    /// [`Decoding::poll_next`] as a future; after it no session continues before it [takes](Ahead::take) its token. `None`,
    /// too, if this session can't go on: of several threads that decode sessions of the same steps one has the next.
    /// `allowed` is what the next token of each may be. Dropping the future loses nothing.
    pub(crate) async fn next(
        &self,
        wanted: usize,
        allowed: &[Option<&[u32]>],
    ) -> Result<Option<Vec<Sampled>>, BackendError> {
        let Some(_awaiting) = Awaiting::begin(self) else {
            return Ok(None);
        };
        poll_fn(|cx| {
            let mut all = self.all();
            let sampled = all.steps.poll_next(wanted, allowed, cx);
            if sampled.is_ready() {
                all.members.iter_mut().for_each(|member| member.last = None);
            }
            sampled
        })
        .await
    }

    /// The session goes on with `id`, which the last step sampled for it.
    pub(crate) fn take(&self, id: u32) {
        let mut all = self.all();
        let own = &mut all.members[self.member];
        own.last = Some(id);
        if own.n_remembered > 0 {
            if own.recent.len() == own.n_remembered {
                own.recent.pop_front();
            }
            own.recent.push_back(id);
        }
    }
}

/// While it lives, nobody else waits for the next step.
struct Awaiting<'a>(&'a Ahead);

impl<'a> Awaiting<'a> {
    /// `None` if somebody does, or the session has no token to go on with.
    fn begin(ahead: &'a Ahead) -> Option<Awaiting<'a>> {
        let mut all = ahead.all();
        if all.is_awaited || all.members[ahead.member].last.is_none() {
            return None;
        }
        all.is_awaited = true;
        Some(Awaiting(ahead))
    }
}

impl Drop for Awaiting<'_> {
    fn drop(&mut self) {
        self.0.all().is_awaited = false;
    }
}
