//! From a prompt to an answer, pulled token by token; [`text`] makes words of it.
//!
//! Nothing here prints or reads: whoever pulls decides what becomes of the tokens, and stops by not
//! pulling on. Tokens that the session already holds are not computed again.

mod text;

use std::fmt;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::Serialize;
use sterna_engine::{Decoded, HeadUse, Logits, Sampler, Session};

use sterna::native::{self, Device};
use crate::recovery::Recovery;
use crate::speculate::{Ahead, Drafter};

pub(crate) use text::Generation;

/// Prompt tokens computed between two chances to stop. On the CPU longer pieces are hardly faster, and
/// shorter ones let an interruption be heeded sooner; a GPU needs many rows to be busy.
const PREFILL_CHUNK: usize = 64;
const GPU_PREFILL_CHUNK: usize = 512;

/// A session with its sampler, and what is in the session's cache.
pub(crate) struct Runtime {
    session: Session<Device>,
    sampler: Sampler,
    /// Ids of the tokens in the cache, in order.
    cached: Vec<u32>,
    /// Drafts in the session's cache behind those, until they turn out to be right or are forgotten.
    ahead: Ahead,
    /// What to do if the session is lost with its device.
    recovery: Recovery,
}

/// What to generate.
#[derive(Debug, Clone)]
pub(crate) struct Request<'a> {
    /// The whole context, from its first token on.
    pub(crate) prompt: Vec<u32>,
    /// Tokens to generate at most.
    pub(crate) max_tokens: usize,
    /// Tokens that end the answer and are no part of it.
    pub(crate) stop_ids: &'a [u32],
    /// Tokens to draft at most, and to compute together; `None` drafts none. No answer depends on it.
    pub(crate) speculate: Option<usize>,
}

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StopReason {
    /// The model said so, by one of the stop ids.
    StopToken,
    /// A stop string appeared.
    StopString,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The context holds no more tokens.
    ContextFull,
}

impl StopReason {
    /// True if there might have been more to say.
    pub(crate) const fn is_cut_off(self) -> bool {
        matches!(self, StopReason::MaxTokens | StopReason::ContextFull)
    }

    /// In words, to follow "stopped".
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            StopReason::StopToken => "at the end of the answer",
            StopReason::StopString => "at a stop string",
            StopReason::MaxTokens => "at the token limit",
            StopReason::ContextFull => "at the end of the context",
        }
    }
}

/// What an answer took, so far.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub(crate) struct Stats {
    /// Tokens of the prompt.
    pub(crate) n_prompt: usize,
    /// Those among them that were in the cache already.
    pub(crate) n_reused: usize,
    /// Tokens of the prompt computed.
    pub(crate) n_prefilled: usize,
    /// Tokens generated, a stop token not counted.
    pub(crate) n_generated: usize,
    /// Tokens fed back.
    pub(crate) n_decoded: usize,
    /// Tokens drafted.
    pub(crate) n_drafted: usize,
    /// Those among them that were right, and so fed back before they were chosen.
    pub(crate) n_accepted: usize,
    /// The share of the output head that was read where only the largest logits were wanted, if the head
    /// has a screen, whose bytes count.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) head_share: Option<f64>,
    /// Time spent on the prompt.
    #[serde(rename = "prefill_ms", serialize_with = "as_ms")]
    pub(crate) prefill: Duration,
    /// Time spent on the answer.
    #[serde(rename = "decode_ms", serialize_with = "as_ms")]
    pub(crate) decode: Duration,
    /// Why it ended; `None` if nobody let it.
    pub(crate) stop: Option<StopReason>,
}

fn as_ms<S: serde::Serializer>(time: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(time.as_secs_f64() * 1e3)
}

impl Stats {
    /// Prompt tokens computed per second.
    fn prefill_rate(&self) -> f64 {
        rate(self.n_prefilled, self.prefill)
    }

    /// Tokens decoded per second.
    fn decode_rate(&self) -> f64 {
        rate(self.n_decoded, self.decode)
    }
}

impl fmt::Display for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        write!(f, "prompt {} tokens", self.n_prompt)?;
        if self.n_reused > 0 {
            write!(f, ", {} of them reused", self.n_reused)?;
        }
        write!(
            f,
            ", {:.0} ms, {:.1}/s; ",
            ms(self.prefill),
            self.prefill_rate()
        )?;
        write!(f, "answer {} tokens", self.n_generated)?;
        write!(
            f,
            ", {:.0} ms, {:.1}/s",
            ms(self.decode),
            self.decode_rate()
        )?;
        if self.n_drafted > 0 {
            write!(
                f,
                ", {} of {} drafts right",
                self.n_accepted, self.n_drafted
            )?;
        }
        if let Some(share) = self.head_share {
            write!(f, ", {:.0} % of the head read", share * 100.0)?;
        }
        match self.stop {
            Some(reason) => write!(f, "; stopped {}", reason.describe()),
            None => write!(f, "; interrupted"),
        }
    }
}

fn rate(n: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        n as f64 / time.as_secs_f64()
    }
}

impl Runtime {
    /// A runtime with nothing in its cache; `session` must be empty.
    pub(crate) fn new(session: Session<Device>, sampler: Sampler) -> Runtime {
        Runtime {
            session,
            sampler,
            cached: Vec::new(),
            ahead: Ahead::default(),
            recovery: Recovery::default(),
        }
    }

    /// The same, made up for by `recovery` if its device is lost.
    pub(crate) fn recovering(self, recovery: Recovery) -> Runtime {
        Runtime { recovery, ..self }
    }

    /// Tokens that the context holds.
    pub(crate) fn ctx_len(&self) -> usize {
        self.session.ctx_len()
    }

    /// The tokens in the cache, in order.
    pub(crate) fn cached(&self) -> &[u32] {
        &self.cached
    }

    /// How many tokens are in the cache.
    pub(crate) fn n_cached(&self) -> usize {
        self.cached.len()
    }

    /// Forgets everything said.
    pub(crate) fn reset(&mut self) {
        self.sampler.clear_history();
        self.truncate(0);
    }

    fn truncate(&mut self, len: usize) {
        self.cached.truncate(len);
        self.forget_drafts();
        self.session.truncate(len);
    }

    /// Takes out of the session what was drafted and not confirmed.
    fn forget_drafts(&mut self) {
        if !self.ahead.is_empty() {
            self.session.truncate(self.cached.len());
        }
        self.ahead = Ahead::default();
    }

    /// Computes `ids` behind what is cached; the logits that follow the last of them, `[n_vocab]`.
    ///
    /// Fails if none of them is finite: the sampler would take that for token 0.
    fn append(&mut self, ids: &[u32]) -> Result<Vec<f32>> {
        let wanted = self.sampler.top().map_or(Logits::Last, Logits::Top);
        let logits = self.forward(ids, wanted)?;
        self.checked(logits)
    }

    /// Computes `id` behind what is cached; the token that the session chooses to follow it, or the logits
    /// for the sampler to choose by. `wanted` tokens are still to come, at most.
    ///
    /// Fails as [`Runtime::append`] does.
    fn decode(&mut self, id: u32, wanted: usize) -> Result<Decoded> {
        self.forget_drafts();
        let sampler = &self.sampler;
        let step = |session: &mut Session<Device>| session.decode(id, sampler, wanted);
        let decoded = self.recovery.run(&mut self.session, &self.cached, step)?;
        self.cached.push(id);
        match decoded {
            Decoded::Logits(logits) => self.checked(logits).map(Decoded::Logits),
            token @ Decoded::Token(_) => Ok(token),
        }
    }

    /// Computes `ids` behind what is cached; the logits that are `wanted`.
    fn forward(&mut self, ids: &[u32], wanted: Logits) -> Result<Vec<f32>> {
        self.forget_drafts();
        let logits = self.compute(ids, wanted)?;
        self.cached.extend_from_slice(ids);
        Ok(logits)
    }

    /// The same, without counting `ids` as cached.
    fn compute(&mut self, ids: &[u32], wanted: Logits) -> Result<Vec<f32>> {
        let step = |session: &mut Session<Device>| session.forward(ids, wanted);
        self.recovery.run(&mut self.session, &self.cached, step)
    }

    /// The same for one token, with `drafts` computed in the same batch.
    fn append_with_drafts(&mut self, id: u32, drafts: &[u32]) -> Result<Vec<f32>> {
        if drafts.is_empty() {
            return self.append(&[id]);
        }
        self.forget_drafts();
        let batch = [&[id], drafts].concat();
        let mut logits = self.compute(&batch, Logits::All)?;
        let behind = logits.split_off(logits.len() / batch.len());
        self.cached.push(id);
        self.ahead = Ahead::new(drafts.to_vec(), behind);
        self.checked(logits)
    }

    /// The logits that follow `id` if it was drafted to come next: it counts as appended then.
    fn append_draft(&mut self, id: u32) -> Option<Result<Vec<f32>>> {
        let logits = self.ahead.take(id)?;
        self.cached.push(id);
        Some(self.checked(logits))
    }

    fn checked(&self, logits: Vec<f32>) -> Result<Vec<f32>> {
        if !logits.iter().any(|logit| logit.is_finite()) {
            bail!(
                "after token {}: expected logits, found none that is finite: the weights are damaged, or not \
                 what the files say",
                self.cached.len()
            );
        }
        Ok(logits)
    }

    /// Chooses the tokens of the answers to come by `sampler`.
    pub(crate) fn set_sampler(&mut self, sampler: Sampler) {
        self.sampler = sampler;
    }

    /// Prepares to answer `request`.
    ///
    /// Fails if the prompt is empty or leaves no room in the context.
    pub(crate) fn start<'a>(&'a mut self, request: Request<'a>) -> Result<Answer<'a>> {
        let (n_prompt, ctx_len) = (request.prompt.len(), self.ctx_len());
        if n_prompt == 0 {
            bail!("the prompt has no tokens: expected at least one");
        }
        if n_prompt >= ctx_len {
            bail!("the prompt has {n_prompt} tokens, but the context holds {ctx_len} (--ctx)");
        }
        let equal = request
            .prompt
            .iter()
            .zip(&self.cached)
            .take_while(|(a, b)| a == b)
            .count();
        // The last token is always computed: its logits begin the answer.
        let n_reused = equal.min(n_prompt - 1);
        self.truncate(n_reused);
        self.recovery.begin();
        self.sampler.clear_history();
        request
            .prompt
            .iter()
            .for_each(|&id| self.sampler.accept(id));
        let drafter = request.speculate.map(|max| {
            let mut drafter = Drafter::new(max);
            request.prompt.iter().for_each(|&id| drafter.push(id));
            drafter
        });
        Ok(Answer {
            head_before: self.session.head_use().unwrap_or_default(),
            runtime: self,
            drafter,
            logits: Vec::new(),
            ids: Vec::new(),
            stop_id: None,
            stats: Stats {
                n_prompt,
                n_reused,
                ..Stats::default()
            },
            request,
        })
    }
}

/// An answer in the making.
pub(crate) struct Answer<'a> {
    runtime: &'a mut Runtime,
    request: Request<'a>,
    /// Knows the prompt and the answer so far.
    drafter: Option<Drafter>,
    /// What follows the prompt; empty until it is computed.
    logits: Vec<f32>,
    ids: Vec<u32>,
    stop_id: Option<u32>,
    stats: Stats,
    /// What was read of the output head before.
    head_before: HeadUse,
}

impl Answer<'_> {
    /// Tokens of the prompt that are still to be computed.
    pub(crate) fn n_left(&self) -> usize {
        self.request
            .prompt
            .len()
            .saturating_sub(self.runtime.cached.len())
    }

    /// Computes the next part of the prompt; returns how many of its tokens are still to come.
    pub(crate) fn prefill(&mut self) -> Result<usize> {
        let start = Instant::now();
        let rest = &self.request.prompt[self.request.prompt.len() - self.n_left()..];
        let most = if native::has_gpu(self.runtime.session.model().backend()) {
            GPU_PREFILL_CHUNK
        } else {
            PREFILL_CHUNK
        };
        let chunk = &rest[..rest.len().min(most)];
        if !chunk.is_empty() {
            // Nothing is chosen before the prompt has ended.
            let logits = if chunk.len() < rest.len() {
                self.runtime.forward(chunk, Logits::None)
            } else {
                self.runtime.append(chunk)
            };
            self.logits = logits.context("computing the prompt")?;
            self.stats.prefill += start.elapsed();
            self.stats.n_prefilled += chunk.len();
        }
        Ok(rest.len() - chunk.len())
    }

    /// The stop token that ended it.
    pub(crate) fn stop_id(&self) -> Option<u32> {
        self.stop_id
    }

    /// What it took so far.
    pub(crate) fn stats(&self) -> Stats {
        let head_use = self.runtime.session.head_use();
        Stats {
            head_share: head_use.and_then(|used| used.since(&self.head_before).share()),
            ..self.stats
        }
    }

    /// Generates a token, after what is left of the prompt is computed; `None` once the answer has ended,
    /// for the reason that the statistics give.
    pub(crate) fn next_id(&mut self) -> Result<Option<u32>> {
        while self.n_left() > 0 {
            self.prefill()?;
        }
        if self.stats.stop.is_some() {
            return Ok(None);
        }
        let start = Instant::now();
        let id = self.step();
        self.stats.decode += start.elapsed();
        id
    }

    fn step(&mut self) -> Result<Option<u32>> {
        if self.ids.len() == self.request.max_tokens {
            self.stop(StopReason::MaxTokens);
            return Ok(None);
        }
        // The token chosen last is computed only now, so that it is out before that.
        let decoded = match self.ids.last() {
            None => Decoded::Logits(std::mem::take(&mut self.logits)),
            Some(_) if self.runtime.cached.len() == self.runtime.ctx_len() => {
                self.stop(StopReason::ContextFull);
                return Ok(None);
            }
            Some(&last) => {
                let decoded = self.feed(last)?;
                self.stats.n_decoded += 1;
                decoded
            }
        };
        let id = match decoded {
            Decoded::Token(id) => id,
            Decoded::Logits(logits) => self.runtime.sampler.sample(&logits),
        };
        if self.request.stop_ids.contains(&id) {
            self.stop_id = Some(id);
            self.stop(StopReason::StopToken);
            return Ok(None);
        }
        self.runtime.sampler.accept(id);
        self.ids.push(id);
        if let Some(drafter) = &mut self.drafter {
            drafter.push(id);
        }
        self.stats.n_generated += 1;
        Ok(Some(id))
    }

    /// Ends the answer.
    fn stop(&mut self, reason: StopReason) {
        self.runtime.forget_drafts();
        self.stats.stop = Some(reason);
    }

    /// What follows `last`, the newest token of the answer.
    fn feed(&mut self, last: u32) -> Result<Decoded> {
        let Some(drafter) = &mut self.drafter else {
            let wanted = self.request.max_tokens - self.ids.len();
            return self.runtime.decode(last, wanted);
        };
        if let Some(logits) = self.runtime.append_draft(last) {
            drafter.confirm();
            self.stats.n_accepted += 1;
            return logits.map(Decoded::Logits);
        }
        // Neither what the context doesn't hold nor what comes after the end is worth a draft.
        let room = self.runtime.ctx_len() - self.runtime.cached.len() - 1;
        let wanted = self.request.max_tokens - self.ids.len() - 1;
        let drafts = drafter.draft(room.min(wanted));
        let ends = |id: &u32| self.request.stop_ids.contains(id);
        let drafts = &drafts[..drafts.iter().position(ends).unwrap_or(drafts.len())];
        self.stats.n_drafted += drafts.len();
        let logits = self.runtime.append_with_drafts(last, drafts)?;
        Ok(Decoded::Logits(logits))
    }
}

#[cfg(test)]
mod tests;
