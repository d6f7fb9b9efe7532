//! From a prompt to an answer, as a state machine.
//!
//! A [`Generator`] says which tokens have to be computed and which logits it needs, is given those, and
//! yields the answer token by token. It owns no session and never blocks: a
//! [`Scheduler`](crate::scheduler::Scheduler) runs many of them in shared batches, and a program with a
//! sampler of its own may drive one by hand.
//!
//! ```
//! # use sterna::generate::{Event, Generator, Given, Request};
//! # use sterna_engine::{Logits, Sampler, SamplerConfig};
//! # fn forward(keep: usize, ids: &[u32], logits: Logits) -> Vec<f32> { vec![0.0, 1.0, 2.0] }
//! # fn main() -> sterna::Result<()> {
//! let sampler = Sampler::new(SamplerConfig::default(), 3)?;
//! let request = Request { max_tokens: 2, ..Request::new(vec![0, 1], sampler) };
//! let mut generator = Generator::new(request, &[], 512)?;
//! while let Some(wanted) = generator.wanted(64) {
//!     let given = match wanted.logits {
//!         Logits::None => Given::Nothing,
//!         logits => Given::Logits(forward(wanted.keep, wanted.ids, logits)),
//!     };
//!     generator.give(given);
//!     while let Some(event) = generator.next_event() {
//!         if let Event::Token(token) = event {
//!             assert_eq!(token.id, 2);
//!         }
//!     }
//! }
//! assert_eq!(generator.answer(), [2, 2]);
//! # Ok(())
//! # }
//! ```

mod constraint;
mod first_word;
mod speculate;
mod stats;
mod stop;
mod text;

use std::mem;
use std::sync::Arc;

use sterna_engine::{Logits, Sampler, Sampling};
use sterna_text::Tokenizer;

use crate::error::{Error, ErrorCode, Result, bail};
use crate::receipt::{Asking, Receipt, Recorder, Setup};
use constraint::{Constrained, Next};
use speculate::Drafter;
use text::TextStream;

pub use constraint::{Allowed, TokenConstraint, spellings};
pub use first_word::FirstWord;
pub use stats::{Stats, StopReason};
pub use sterna_engine::{Chosen, Logprobs};

/// A request to generate.
#[derive(Debug, Clone)]
pub struct Request {
    /// The whole context, from its first token on.
    pub prompt: Vec<u32>,
    /// Maximum tokens to generate.
    pub max_tokens: usize,
    /// Tokens that end the answer and are not part of it.
    pub stop_ids: Vec<u32>,
    /// How to sample tokens. Its penalty window is cleared, but its random sequence continues.
    pub sampler: Sampler,
    /// Maximum tokens to draft from the text so far, and to compute together; `None` drafts none. No answer
    /// depends on it.
    pub speculate: Option<usize>,
    /// Whether to return log-probabilities: of each token, and of this many most probable ones.
    pub logprobs: Option<usize>,
    /// How to decode the tokens to text; without it, there is no text.
    pub text: Option<TextOptions>,
    /// What the answer has to match. It does unless it is cut off: by a limit, or a stop string.
    pub constraint: Option<Box<dyn TokenConstraint>>,
    /// What computes the answer, if a [receipt](Generator::receipt) of it is to be written.
    pub receipt: Option<Arc<Setup>>,
}

impl Request {
    /// As many tokens after `prompt` as the context holds.
    pub fn new(prompt: Vec<u32>, sampler: Sampler) -> Request {
        Request {
            prompt,
            max_tokens: usize::MAX,
            stop_ids: Vec::new(),
            sampler,
            speculate: None,
            logprobs: None,
            text: None,
            constraint: None,
            receipt: None,
        }
    }
}

/// How to decode an answer to text.
#[derive(Debug, Clone)]
pub struct TextOptions {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// Text that ends the answer and is not part of it.
    pub stop_strings: Vec<String>,
}

/// What a [`Generator`] needs computed next.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// First the sequence is truncated to this many tokens: those beyond are rejected drafts.
    pub keep: usize,
    /// Tokens to append after that.
    pub ids: &'a [u32],
    /// Which logits to return; additional ones are ignored.
    pub logits: Logits,
    /// A token may be given instead of logits, if it is sampled like this.
    pub draw: Option<Draw<'a>>,
}

/// How a device may sample the next token, for [`Session::decode`](sterna_engine::Session::decode).
#[derive(Debug)]
pub struct Draw<'a> {
    /// How to choose tokens.
    pub sampling: Sampling<'a>,
    /// Maximum tokens still to come.
    pub n_left: usize,
}

/// The result for the tokens that a [`Generator`] needed computed.
#[derive(Debug, Clone, PartialEq)]
pub enum Given {
    /// They are computed, and no logits were needed.
    Nothing,
    /// The requested logits, `[rows, n_vocab]`.
    Logits(Vec<f32>),
    /// The next token, sampled elsewhere.
    Token(Chosen),
}

/// An event of an answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A token was chosen.
    Token(Token),
    /// The answer has ended.
    Ended {
        /// Why.
        reason: StopReason,
        /// Remaining text that had been held back.
        text: String,
    },
    /// The answer failed.
    Failed(Error),
    /// The device that computes it was lost, and with it the model and its results
    /// ([`Scheduler::restore`](crate::scheduler::Scheduler::restore)).
    DeviceLost {
        /// The driver's message.
        message: String,
    },
}

/// A token of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// The text that it completes, often none.
    pub text: String,
    /// Its log-probability, if requested.
    pub logprobs: Option<Logprobs>,
}

/// An answer in progress.
#[derive(Debug)]
pub struct Generator {
    /// The prompt, followed by the answer.
    tokens: Vec<u32>,
    n_prompt: usize,
    /// How many of them the sequence holds for certain.
    n_held: usize,
    ctx_len: usize,
    max_tokens: usize,
    stop_ids: Vec<u32>,
    sampler: Sampler,
    /// Knows the prompt and the answer so far.
    drafter: Option<Drafter>,
    recorder: Option<Recorder>,
    n_logprobs: Option<usize>,
    text: Option<TextStream>,
    constraint: Option<Constrained>,
    /// Tokens that a constraint leaves no choice of are computed together with what follows.
    merges: bool,
    state: State,
    /// The stop token that ended it.
    stop_id: Option<u32>,
    stats: Stats,
}

#[derive(Debug)]
enum State {
    /// More of the prompt has to be computed, or of tokens that a constraint left no choice of; this many were
    /// requested last.
    Append { n_asked: usize },
    /// The newest token is to be computed, with drafts of those after it.
    Decode { batch: Vec<u32> },
    /// What follows the newest token was computed.
    Computed(Computed),
    /// A token was chosen; computed drafts may follow it.
    Chosen(Option<Computed>),
    /// The answer has ended, and the event hasn't been taken.
    Ended,
    /// The same, with an error.
    Failed(Error),
    /// All events were taken.
    Over,
}

/// What follows a token.
#[derive(Debug)]
enum Computed {
    /// This one.
    Token(Chosen),
    /// Logits, of the newest token and of the drafts after it.
    Logits {
        /// `[1 + drafts.len(), n_vocab]`.
        rows: Vec<f32>,
        drafts: Vec<u32>,
        /// Drafts that were accepted.
        n_right: usize,
    },
}

impl Computed {
    /// The logits that follow the newest token, `[n_vocab]`, unless what follows was sampled elsewhere.
    fn logits(&self) -> Option<&[f32]> {
        match self {
            Computed::Token(_) => None,
            Computed::Logits {
                rows,
                drafts,
                n_right,
            } => {
                let n_vocab = rows.len() / (drafts.len() + 1);
                Some(&rows[n_right * n_vocab..][..n_vocab])
            }
        }
    }

    /// What follows `id`, if that is the next draft.
    fn behind(self, id: u32) -> Option<Computed> {
        match self {
            Computed::Logits {
                rows,
                drafts,
                n_right,
            } if drafts.get(n_right) == Some(&id) => Some(Computed::Logits {
                rows,
                drafts,
                n_right: n_right + 1,
            }),
            _ => None,
        }
    }
}

impl Generator {
    /// Begins to answer `request` in a context of `ctx_len` tokens, on a sequence that already holds the
    /// tokens `held`. A common prefix with the prompt isn't computed again, except for the prompt's last
    /// token.
    ///
    /// Errors: [`ErrorCode::InvalidRequest`] if the prompt is empty, [`ErrorCode::ContextFull`] if it leaves
    /// no room for an answer.
    pub fn new(request: Request, held: &[u32], ctx_len: usize) -> Result<Generator> {
        let Request {
            prompt,
            max_tokens,
            stop_ids,
            mut sampler,
            speculate,
            logprobs,
            text,
            constraint,
            receipt,
        } = request;
        let n_prompt = prompt.len();
        if n_prompt == 0 {
            bail!(
                InvalidRequest,
                "the prompt has no tokens: expected at least one"
            );
        }
        if n_prompt >= ctx_len {
            bail!(
                ContextFull,
                "the prompt has {n_prompt} tokens, but the context holds {ctx_len}"
            );
        }
        let recorder = receipt.map(|setup| {
            Recorder::new(&Asking {
                setup: &setup,
                sampler: &sampler,
                max_tokens,
                stop_ids: &stop_ids,
                prompt: &prompt,
                has_constraint: constraint.is_some(),
            })
        });
        let recorder = recorder.transpose()?;
        // The last token is always computed: its logits begin the answer.
        let n_held = n_equal(&prompt, held).min(n_prompt - 1);
        sampler.clear_history();
        prompt.iter().for_each(|&id| sampler.accept(id));
        let drafter = speculate.map(|max| {
            let mut drafter = Drafter::new(max);
            prompt.iter().for_each(|&id| drafter.push(id));
            drafter
        });
        Ok(Generator {
            text: text.map(|options| TextStream::new(options, prompt.last().copied())),
            constraint: constraint.map(|constraint| Constrained::new(constraint, &stop_ids)),
            tokens: prompt,
            n_prompt,
            n_held,
            ctx_len,
            max_tokens,
            stop_ids,
            sampler,
            drafter,
            recorder,
            n_logprobs: logprobs,
            merges: true,
            state: State::Append { n_asked: 0 },
            stop_id: None,
            stats: Stats {
                n_prompt,
                n_reused: n_held,
                ..Stats::default()
            },
        })
    }

    /// Tells an answer that has not begun that the sequence holds only `n_held` tokens of the prompt.
    pub(crate) fn begin_at(&mut self, n_held: usize) {
        self.n_held = self.n_held.min(n_held);
        self.stats.n_reused = self.n_held;
    }

    /// Whether tokens that a constraint leaves no choice of are computed together with what follows, not one by one, like
    /// others. That is slower on a device that [draws](Wanted::draw) tokens ahead, which other steps interrupt.
    pub(crate) fn merge_forced(&mut self, merges: bool) {
        self.merges = merges;
    }

    /// Whether a device draws its tokens, if that may `draw` at random.
    pub(crate) fn may_draw(&self, at_random: bool) -> bool {
        let is_greedy = self.sampler.config().temperature == 0.0;
        (at_random || is_greedy) && self.recorder.is_none() && self.drafter.is_none()
    }

    /// Whether something decides which tokens may come next.
    #[cfg(not(target_family = "wasm"))]
    pub(crate) fn is_constrained(&self) -> bool {
        self.constraint
            .as_ref()
            .is_some_and(|constraint| !constraint.is_free())
    }

    /// What has to be computed next, of at most `max_ids` tokens, but at least one; `None` if there are
    /// events to take first, or the answer is over. Repeated calls return the same.
    pub fn wanted(&mut self, max_ids: usize) -> Option<Wanted<'_>> {
        let max_ids = max_ids.max(1);
        let allowed = match &self.constraint {
            Some(constraint) => constraint.allowed(),
            None => Some(None),
        };
        // A recorder reads logits beside the sampler, and what isn't known to be allowed can't be left to others.
        let sampling = allowed.filter(|_| self.recorder.is_none());
        let sampling = sampling.map(|allowed| Sampling {
            logprobs: self.n_logprobs,
            allowed,
            ..self.sampler.sampling()
        });
        let top = sampling.as_ref().and_then(Sampling::top);
        let one = top.map_or(Logits::Last, Logits::Top);
        let n_left = self.max_tokens - self.stats.n_generated;
        let draw = sampling.filter(|_| self.drafter.is_none());
        let draw = draw.map(|sampling| Draw { sampling, n_left });
        let (ids, logits, draw) = match &mut self.state {
            State::Append { n_asked } => {
                let left = &self.tokens[self.n_held..];
                let ids = &left[..left.len().min(max_ids)];
                *n_asked = ids.len();
                // Nothing is sampled before the end of them.
                match ids.len() < left.len() {
                    true => (ids, Logits::None, None),
                    false => (ids, one, draw),
                }
            }
            State::Decode { batch } => {
                batch.truncate(max_ids);
                match batch.len() {
                    1 => (&batch[..], one, draw),
                    _ => (&batch[..], Logits::All, None),
                }
            }
            _ => return None,
        };
        Some(Wanted {
            keep: self.n_held,
            ids,
            logits,
            draw,
        })
    }

    /// Takes the result for the tokens that were requested last.
    pub fn give(&mut self, given: Given) {
        match mem::replace(&mut self.state, State::Over) {
            State::Append { n_asked } => {
                let n_prefilled = n_asked.min(self.n_prompt_left());
                self.n_held += n_asked;
                self.stats.n_prefilled += n_prefilled;
                self.stats.n_decoded += n_asked - n_prefilled;
                self.state = if self.n_held < self.tokens.len() {
                    State::Append { n_asked: 0 }
                } else {
                    self.computed(given, Vec::new())
                };
            }
            State::Decode { mut batch } => {
                let drafts = batch.split_off(1);
                self.n_held += 1;
                self.stats.n_decoded += 1;
                self.stats.n_drafted += drafts.len();
                self.state = self.computed(given, drafts);
            }
            state @ (State::Ended | State::Failed(_) | State::Over) => self.state = state,
            State::Computed(_) | State::Chosen(_) => self.fail(Error::new(
                ErrorCode::InvalidRequest,
                "expected the events to be taken, found what wasn't wanted",
            )),
        }
    }

    fn computed(&self, given: Given, drafts: Vec<u32>) -> State {
        let n_rows = drafts.len() + 1;
        match given {
            Given::Token(chosen) => State::Computed(Computed::Token(chosen)),
            Given::Logits(rows) if !rows.is_empty() && rows.len().is_multiple_of(n_rows) => {
                State::Computed(Computed::Logits {
                    rows,
                    drafts,
                    n_right: 0,
                })
            }
            Given::Logits(_) | Given::Nothing => State::Failed(self.in_place(Error::new(
                ErrorCode::InvalidRequest,
                format!("expected logits of {n_rows} tokens, found others"),
            ))),
        }
    }

    /// The next event; `None` if more must be computed first, or if the answer is over. Drafted tokens are
    /// only accepted here: those not asked for are never part of the answer.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            match mem::replace(&mut self.state, State::Over) {
                State::Over => return None,
                State::Failed(error) => return Some(Event::Failed(error)),
                State::Ended => return self.end(),
                state @ (State::Append { .. } | State::Decode { .. }) => {
                    self.state = state;
                    return None;
                }
                State::Chosen(computed) => self.state = self.go_on(computed),
                State::Computed(computed) => {
                    if let Some(token) = self.choose(computed) {
                        return Some(Event::Token(token));
                    }
                }
            }
        }
    }

    /// What to do after a token was chosen.
    fn go_on(&mut self, computed: Option<Computed>) -> State {
        let next = self.constraint.as_mut().map(Constrained::next).transpose();
        let only = match next {
            Err(error) => return State::Failed(error),
            Ok(Some(Next::End)) => return self.stopped(StopReason::Complete),
            Ok(Some(&Next::Token { id, .. })) => Some(id),
            Ok(Some(Next::OneOf(_) | Next::Any) | None) => None,
        };
        if self.stats.n_generated == self.max_tokens {
            return self.stopped(StopReason::MaxTokens);
        }
        if self.tokens.len() > self.ctx_len {
            return self.stopped(StopReason::ContextFull);
        }
        let newest = self.tokens[self.n_held];
        if let Some(computed) = computed.and_then(|computed| computed.behind(newest)) {
            self.drafter.iter_mut().for_each(Drafter::confirm);
            self.n_held += 1;
            self.stats.n_decoded += 1;
            self.stats.n_accepted += 1;
            return State::Computed(computed);
        }
        // It needs no logits, and is computed together with what follows.
        if let (Some(id), None, true) = (only, self.n_logprobs, self.merges) {
            return State::Computed(Computed::Token(id.into()));
        }
        if self.tokens.len() > self.n_held + 1 {
            return State::Append { n_asked: 0 };
        }
        State::Decode {
            batch: [&[newest][..], &self.draft()].concat(),
        }
    }

    /// Drafts of what follows the newest token.
    fn draft(&mut self) -> Vec<u32> {
        let Some(drafter) = &mut self.drafter else {
            return Vec::new();
        };
        // Drafts beyond the context or the end of the answer are useless.
        let room = self.ctx_len - self.n_held - 1;
        let wanted = self.max_tokens - self.stats.n_generated - 1;
        let forced = self.constraint.as_mut().map(Constrained::forced);
        let drafts = drafter.draft(room.min(wanted), &forced.unwrap_or_default());
        let ends = |id: &u32| self.stop_ids.contains(id);
        let drafts = &drafts[..drafts.iter().position(ends).unwrap_or(drafts.len())];
        match &mut self.constraint {
            Some(constraint) => constraint.cut(drafts).to_vec(),
            None => drafts.to_vec(),
        }
    }

    /// Samples the next token; `None` if the answer ends before it.
    fn choose(&mut self, computed: Computed) -> Option<Token> {
        let logits = computed.logits();
        // The sampler would return token 0.
        if logits.is_some_and(|logits| !logits.iter().any(|logit| logit.is_finite())) {
            let message = format!(
                "after token {}: expected logits, found none that is finite: the weights are damaged, or not \
                 what the files say",
                self.n_held
            );
            self.fail(Error::new(ErrorCode::Compute, message));
            return None;
        }
        if self.stats.n_generated == self.max_tokens {
            self.state = self.stopped(StopReason::MaxTokens);
            return None;
        }
        let next = self.constraint.as_mut().map(Constrained::next).transpose();
        let id = match (next, &computed) {
            (Err(error), _) => {
                self.fail(error);
                return None;
            }
            (Ok(Some(Next::End)), _) => {
                self.state = self.stopped(StopReason::Complete);
                return None;
            }
            (Ok(next), Computed::Token(chosen)) => {
                if next.is_some_and(|next| !next.allows(chosen.id)) {
                    let message = format!(
                        "the constraint: expected a token that may come next, found {}",
                        chosen.id
                    );
                    self.fail(Error::new(ErrorCode::InvalidRequest, message));
                    return None;
                }
                chosen.id
            }
            (Ok(Some(&Next::Token { id, .. })), _) => id,
            (Ok(None | Some(Next::Any)), _) => self.sampler.sample(logits.unwrap_or_default()),
            (Ok(Some(Next::OneOf(allowed))), _) => {
                let logits = logits.unwrap_or_default();
                let Some(id) = self.sampler.sample_allowed(logits, allowed) else {
                    self.fail(Error::new(
                        ErrorCode::InvalidRequest,
                        "the constraint: expected a token that may come next, found all of them banned",
                    ));
                    return None;
                };
                id
            }
        };
        let logprobs = match &computed {
            Computed::Token(chosen) => chosen.logprobs.clone(),
            Computed::Logits { .. } => logits
                .zip(self.n_logprobs)
                .map(|(logits, n)| Logprobs::new(logits, id, n)),
        };
        if let (Some(recorder), Some(logits)) = (&mut self.recorder, logits) {
            recorder.push(id, logits);
        }
        if self.stop_ids.contains(&id) {
            self.stop_id = Some(id);
            self.state = self.stopped(StopReason::StopToken);
            return None;
        }
        if let Some(Err(error)) = self.constraint.as_mut().map(|c| c.accept(id)) {
            self.fail(error);
            return None;
        }
        self.sampler.accept(id);
        self.tokens.push(id);
        if let Some(drafter) = &mut self.drafter {
            drafter.push(id);
        }
        self.stats.n_generated += 1;
        self.state = State::Chosen(Some(computed));
        let mut text = String::new();
        if let Some(stream) = &mut self.text {
            let passed = stream.push(id);
            text = passed.text;
            if passed.stopped {
                self.state = self.stopped(StopReason::StopString);
            }
        }
        Some(Token { id, text, logprobs })
    }

    fn stopped(&mut self, reason: StopReason) -> State {
        self.stats.stop = Some(reason);
        State::Ended
    }

    /// The end of an answer, with the text that was held back.
    fn end(&mut self) -> Option<Event> {
        let mut text = String::new();
        if self.stats.stop != Some(StopReason::StopString)
            && let Some(stream) = &mut self.text
        {
            let passed = stream.finish();
            text = passed.text;
            if passed.stopped {
                self.stats.stop = Some(StopReason::StopString);
            }
        }
        let reason = self.stats.stop?;
        Some(Event::Ended { reason, text })
    }

    /// Ends the answer with `error`, reported by the next event.
    pub(crate) fn fail(&mut self, error: Error) {
        self.state = State::Failed(self.in_place(error));
    }

    /// Adds to `error` where in the answer it happened.
    pub(crate) fn in_place(&self, error: Error) -> Error {
        if self.tokens.len() == self.n_prompt {
            error.context("computing the prompt")
        } else {
            error
        }
    }

    /// The tokens generated so far.
    pub fn answer(&self) -> &[u32] {
        &self.tokens[self.n_prompt..]
    }

    /// The prompt, followed by the answer so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// How many of them the sequence holds for certain; anything else in it has to be removed once the
    /// generator is done.
    pub fn n_held(&self) -> usize {
        self.n_held
    }

    /// Tokens of the prompt that remain to be computed.
    pub fn n_prompt_left(&self) -> usize {
        self.n_prompt.saturating_sub(self.n_held)
    }

    /// True once there is nothing more to compute; there may be events to take.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Ended | State::Failed(_) | State::Over)
    }

    /// The stop token that ended the answer.
    pub fn stop_id(&self) -> Option<u32> {
        self.stop_id
    }

    /// The receipt of the answer, once it has ended, if the request [asked for one](Request::receipt).
    pub fn receipt(&self) -> Option<Receipt> {
        let (recorder, reason) = (self.recorder.as_ref()?, self.stats.stop?);
        recorder.receipt(
            &self.tokens[..self.n_prompt],
            self.answer(),
            reason,
            self.stop_id,
        )
    }

    /// Statistics so far.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    pub(crate) fn stats_mut(&mut self) -> &mut Stats {
        &mut self.stats
    }

    /// The sampler, whose random sequence the next answer may continue.
    pub fn into_sampler(self) -> Sampler {
        self.sampler
    }
}

/// The length of the common prefix of `a` and `b`.
fn n_equal(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests;
