//! From requests to replies, in token ids only.

use std::io::Write;
use std::sync::Arc;

use anyhow::{Result, bail};
use sterna::generate::{self, Event, StopReason};
use sterna::native::Device;
use sterna::sampling::random_seed;
use sterna::scheduler::{Scheduler, SequenceId};
use sterna::sequence::Sequence;
use sterna::swap::{GroupRevision, SwappedGroup};
use sterna_engine::{Sampler, SamplerConfig, Session};

use super::driver::Driver;
use super::protocol::{Form, Keep, ProtocolError, Reply, Request, Sampling, Swap};
use crate::model::Replaceable;
use crate::output::StdoutError;
use crate::runtime;

/// A model that continues sequences of tokens.
pub(crate) struct Engine {
    scheduler: Scheduler<Device>,
    /// The only sequence.
    sequence: SequenceId,
    weights: Replaceable,
    form: Form,
    /// Ids that end a reply.
    eos_ids: Vec<u32>,
    /// The sampling for all requests, if set; otherwise each has its own.
    seed: Option<u64>,
    driver: Driver,
}

impl Engine {
    /// An engine using `session`, whose model has `weights`; replies are those of `form`.
    pub(crate) fn new(
        session: Session<Device>,
        weights: Replaceable,
        form: Form,
        eos_ids: Vec<u32>,
        seed: Option<u64>,
        driver: Driver,
    ) -> Engine {
        let (scheduler, sequence) = runtime::alone(session);
        Engine {
            scheduler,
            sequence,
            weights,
            form,
            eos_ids,
            seed,
            driver,
        }
    }

    /// Replies to `request`; false if the driver is gone.
    ///
    /// Errors: a [`ProtocolError`] for what the model or its cache can't take, before anything is
    /// written; others if the reply can't be made or written.
    pub(crate) fn answer(
        &mut self,
        request: Request,
        reply: &mut Reply<impl Write>,
    ) -> Result<bool> {
        let config = sampler_config(&request.sampling, self.seed.unwrap_or_else(random_seed));
        let max_tokens = match request.max_tokens {
            0 => usize::MAX,
            n => n,
        };
        let sampler = Sampler::new(config, self.n_vocab())?;
        let request = generate::Request {
            max_tokens,
            stop_ids: self.eos_ids.clone(),
            ..generate::Request::new(self.prompt(request)?, sampler)
        };
        self.scheduler.start(self.sequence, request)?;
        loop {
            if self.driver.is_gone() {
                return Ok(false);
            }
            if self.scheduler.is_idle() {
                break;
            }
            for (_, event) in self.scheduler.step()? {
                match event {
                    Event::Token(token) => reply.line(token.id).map_err(StdoutError)?,
                    Event::Failed(error) => return Err(error.into()),
                    Event::DeviceLost { message } => bail!(message),
                    _ => {}
                }
            }
        }
        let generator = self.scheduler.finish(self.sequence);
        let generator = generator.expect("an answer was started");
        let terminator = match generator.stats().stop {
            // In version 1, readers count tokens; in the keyed form, they wait for an EOS id.
            Some(StopReason::MaxTokens) if self.form == Form::Positional => None,
            _ => generator.stop_id().or(self.eos_ids.first().copied()),
        };
        if let Some(id) = terminator {
            reply.line(id).map_err(StdoutError)?;
        }
        reply.line(self.sequence().len()).map_err(StdoutError)?;
        Ok(true)
    }

    /// Replaces groups of weights, forgets what is in the cache, and replies with what changed to what, or
    /// with an error that leaves everything as it was.
    pub(crate) fn swap(&mut self, swap: &Swap, reply: &mut Reply<impl Write>) -> Result<bool> {
        let model = Arc::clone(self.sequence().session().model());
        match self.weights.swap(&[model], &swap.model, &swap.groups) {
            Ok(swapped) => {
                if let Some(sequence) = self.scheduler.sequence_mut(self.sequence) {
                    sequence.reset();
                }
                reply.line(swapped.len()).map_err(StdoutError)?;
                for group in &swapped {
                    reply.line(describe_swapped(group)).map_err(StdoutError)?;
                }
            }
            Err(error) => {
                let text = format!("{error:#}").replace(char::is_control, " ");
                reply
                    .line(format_args!("error: {text}"))
                    .map_err(StdoutError)?;
            }
        }
        Ok(true)
    }

    fn sequence(&self) -> &Sequence<Device> {
        let sequence = self.scheduler.sequence(self.sequence);
        sequence.expect("the sequence is never taken out")
    }

    fn n_vocab(&self) -> usize {
        self.sequence().session().model().config().n_vocab
    }

    /// The whole sequence that `request` continues.
    fn prompt(&self, request: Request) -> Result<Vec<u32>, ProtocolError> {
        let place = |what| format!("request in line {}: {what}", request.line);
        let cached = self.sequence().ids();
        let n_kept = match request.keep {
            Keep::All => cached.len(),
            Keep::First(n) => n,
        };
        let kept = cached.get(..n_kept).ok_or_else(|| {
            let expected = format!("at most {}, the tokens in the cache", cached.len());
            ProtocolError::new(place("`kv_position`"), expected, n_kept)
        })?;
        let n_vocab = self.n_vocab();
        if let Some(i) = request.ids.iter().position(|&id| id as usize >= n_vocab) {
            let place = place(&format!("token {i}"));
            let expected = format!("an id below {n_vocab}");
            return Err(ProtocolError::new(place, expected, request.ids[i]));
        }
        let (len, ctx_len) = (kept.len() + request.ids.len(), self.sequence().ctx_len());
        if len == 0 || len >= ctx_len {
            let expected = format!(
                "1 to {} with those in the cache, in a context of {ctx_len}",
                ctx_len - 1
            );
            return Err(ProtocolError::new(place("tokens"), expected, len));
        }
        Ok([kept, &request.ids].concat())
    }
}

/// `ID VERSION VERSION HASH HASH`: before and after, `-` for what isn't known.
fn describe_swapped(group: &SwappedGroup) -> String {
    let known = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let version = |revision: Option<&GroupRevision>| {
        let version = revision.and_then(|revision| revision.version.as_ref());
        // One word, whatever a manifest has.
        let word = version.map(|version| version.split_whitespace().collect::<String>());
        known(word.filter(|word| !word.is_empty()))
    };
    let hash = |revision: Option<&GroupRevision>| {
        known(revision.and_then(|revision| Some(revision.hash?.to_string())))
    };
    let SwappedGroup { from, to } = group;
    let (from, to) = (from.as_ref(), Some(to));
    format!(
        "{} {} {} {} {}",
        group.to.id,
        version(from),
        version(to),
        hash(from),
        hash(to)
    )
}

fn sampler_config(sampling: &Sampling, seed: u64) -> SamplerConfig {
    SamplerConfig {
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        // The sampler takes no 0; this also keeps only the best token.
        top_p: sampling.top_p.max(f32::MIN_POSITIVE),
        repeat_penalty: sampling.repetition_penalty,
        repeat_last_n: sampling.rep_penalty_lookback,
        seed,
        ..SamplerConfig::default()
    }
}

#[cfg(test)]
mod tests {
    use sterna::swap::Group;

    use super::*;

    #[test]
    fn a_swap_is_told_in_five_words() {
        let revision = |version: &str| GroupRevision {
            id: "head".to_owned(),
            group: Group::Head,
            version: Some(version.to_owned()),
            hash: None,
        };
        for (from, to, line) in [
            (None, "1.0.0", "head - 1.0.0 - -"),
            (Some(" "), "", "head - - - -"),
            (Some("1.0.0"), "1. 1", "head 1.0.0 1.1 - -"),
        ] {
            let (from, to) = (from.map(revision), revision(to));
            assert_eq!(describe_swapped(&SwappedGroup { from, to }), line);
        }
    }
}
