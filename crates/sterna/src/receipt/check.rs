//! Computing a receipt's answer again.

use std::fmt;
use std::sync::Arc;

use sterna_engine::{Backend, EngineError, Logits, Sampler, Session};

use super::document::{AdapterId, End, Receipt};
use super::record::Chain;
use super::{Hex, Setup};
use crate::error::{Context, Result, bail};

/// Bytes of logits in memory at once, unless those of a few tokens are more.
const LOGITS_BYTES: usize = 64 << 20;
/// Tokens of a batched pass: more aren't faster, and fewer would be slower.
const MAX_ROWS: usize = 512;
const MIN_ROWS: usize = 16;
/// Penalties multiply errors of logits, too, but no more than this is made of it: a receipt chooses them.
const MAX_PENALTY: f64 = 2.0;

/// What came of a check.
#[derive(Debug, Clone, PartialEq)]
pub enum Checked {
    /// The answer is what the model answers, bit for bit.
    Same,
    /// Of an answer of a GPU: each token is the best one, or within the margin of it.
    WithinMargin {
        /// How many of them aren't the best.
        n_others: usize,
    },
    /// It isn't.
    Differs(Difference),
}

/// The first thing in which a receipt differs from what is computed.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Difference {
    /// The answer was given by another model.
    Model {
        /// The digest of the files of the model here.
        expected: String,
        /// That in the receipt.
        found: String,
    },
    /// It was given with other adapters.
    Adapters {
        /// Those here.
        expected: Vec<AdapterId>,
        /// Those in the receipt.
        found: Vec<AdapterId>,
    },
    /// A setting is another one.
    Settings {
        /// Those here.
        expected: String,
        /// Those in the receipt.
        found: String,
    },
    /// What was asked isn't what the receipt was written for.
    Asked {
        /// The digest of what the receipt says was asked.
        expected: String,
        /// The digest that it has.
        found: String,
    },
    /// A token of the answer isn't the one that is sampled.
    Token {
        /// Its place in the answer, counted from 0.
        index: usize,
        /// The token that is sampled.
        expected: u32,
        /// The token in the receipt.
        found: u32,
    },
    /// A token is sampled as the receipt says, from logits with other bits.
    Logits {
        /// Its place in the answer, counted from 0.
        index: usize,
        /// The beginning of the digest of the logits.
        expected: String,
        /// That in the receipt.
        found: String,
    },
    /// A token of an answer of a GPU is too far from the best.
    Margin {
        /// Its place in the answer, counted from 0.
        index: usize,
        /// The best token.
        expected: u32,
        /// The token in the receipt.
        found: u32,
        /// By how much its logit is lower.
        behind: f32,
        /// By how much it may be.
        margin: f32,
    },
    /// The answer didn't end as the receipt says.
    End {
        /// How an answer like it ends.
        expected: String,
        /// What the receipt says.
        found: String,
    },
    /// The last digest is another one, though the beginnings of all are the same.
    Digest {
        /// The digest of all.
        expected: String,
        /// That in the receipt.
        found: String,
    },
}

impl Difference {
    /// The place in the answer of the token that differs, counted from 0, if it is one.
    pub fn index(&self) -> Option<usize> {
        match self {
            Difference::Token { index, .. }
            | Difference::Logits { index, .. }
            | Difference::Margin { index, .. } => Some(*index),
            _ => None,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Difference::Model { expected, found } => write!(
                f,
                "the model: expected files with the digest {expected}, found {found} in the receipt"
            ),
            Difference::Adapters { expected, found } => {
                let list = |all: &[AdapterId]| match all {
                    [] => "none".to_owned(),
                    all => all.iter().map(shown).collect::<Vec<_>>().join(", "),
                };
                write!(
                    f,
                    "the adapters: expected {}, found {} in the receipt",
                    list(expected),
                    list(found)
                )
            }
            Difference::Settings { expected, found } => {
                write!(
                    f,
                    "the settings: expected {expected}, found {found} in the receipt"
                )
            }
            Difference::Asked { expected, found } => write!(
                f,
                "what was asked (model, adapters, settings, sampling, seed, prompt): expected the digest {expected}, \
                 found {found}: the receipt was changed"
            ),
            Difference::Token {
                index,
                expected,
                found,
            } => write!(
                f,
                "token {index} of the answer: expected {expected}, found {found}"
            ),
            Difference::Logits {
                index,
                expected,
                found,
            } => write!(
                f,
                "token {index} of the answer: expected logits with the digest {expected}, found {found}"
            ),
            Difference::Margin {
                index,
                expected,
                found,
                behind,
                margin,
            } => write!(
                f,
                "token {index} of the answer: expected {expected}, or one whose logit is at most {margin:.3} lower, \
                 found {found}, which is {behind:.3} lower"
            ),
            Difference::End { expected, found } => {
                write!(
                    f,
                    "the end of the answer: expected {expected}, found {found}"
                )
            }
            Difference::Digest { expected, found } => write!(
                f,
                "the last digest of the logits: expected {expected}, found {found}"
            ),
        }
    }
}

/// An adapter, for people.
fn shown(adapter: &AdapterId) -> String {
    let AdapterId {
        name,
        blake3,
        scale,
        dtype,
    } = adapter;
    let dtype = dtype
        .as_ref()
        .map_or(String::new(), |dtype| format!(" as {dtype}"));
    format!("{name:?}{dtype} with the digest {blake3} and scale {scale}")
}

impl Receipt {
    /// Blocking form of [`Receipt::check_async`].
    pub fn check<B: Backend>(&self, setup: &Setup, session: &mut Session<B>) -> Result<Checked> {
        let model = Arc::clone(session.model());
        let checked = model.backend().wait(self.check_async(setup, session));
        checked.map_err(EngineError::from)?
    }

    /// Computes the answer again by `session`, which has the settings and adapters that `setup` says, and is emptied
    /// first: what is known is computed in batched passes. Of an answer of a CPU all bits of the logits have to be the
    /// same; of one of a GPU each token has to be within a margin of the best, which `docs/gpu.md` has.
    ///
    /// Whether the receipt is signed isn't looked at, and whether a stop string ended the answer can't be seen in it.
    /// Errors: the session is on a GPU; settings or tokens that the model can't have; what fails while it is computed.
    pub async fn check_async<B: Backend>(
        &self,
        setup: &Setup,
        session: &mut Session<B>,
    ) -> Result<Checked> {
        if setup.machine.is_gpu() {
            bail!(
                Unsupported,
                "checking a receipt: expected the CPU, whose bits are those of every other, found a GPU"
            );
        }
        let difference = self.unlike(setup);
        let difference = difference.or_else(|| self.wrong_end());
        if let Some(difference) = difference {
            return Ok(Checked::Differs(difference));
        }
        for (field, ids) in [("prompt", &self.prompt), ("answer", &self.answer)] {
            let unknown = ids.iter().position(|&id| id as usize >= setup.n_vocab);
            if let Some(index) = unknown {
                bail!(
                    InvalidFile,
                    "receipt: {field}: token {index}: expected an id below {}, found {}",
                    setup.n_vocab,
                    ids[index]
                );
            }
        }
        let sampler = Sampler::new(self.sampling.config(), setup.n_vocab);
        let mut sampler = sampler.context("receipt")?;
        self.prompt.iter().for_each(|&id| sampler.accept(id));
        session.truncate(0);
        let mut steps = Steps {
            receipt: self,
            bound: setup.bound,
            sampler,
            chain: Chain::new(self.logits.begin.0),
            index: 0,
            n_others: 0,
        };
        let n_rows = (LOGITS_BYTES / (4 * setup.n_vocab.max(1))).clamp(MIN_ROWS, MAX_ROWS);
        // The last token of the prompt begins the answer.
        let n_steps = self.logits.steps.len();
        let n_before = match n_steps {
            0 => 0,
            _ => self.prompt.len() - 1,
        };
        for ids in self.prompt[..n_before].chunks(MAX_ROWS) {
            session
                .forward_async(ids, Logits::None)
                .await
                .context("receipt: prompt")?;
        }
        let known = self.prompt[n_before..].iter().chain(&self.answer);
        let known: Vec<u32> = known.copied().take(n_steps).collect();
        for ids in known.chunks(n_rows) {
            let logits = session.forward_async(ids, Logits::All).await;
            let logits = logits.context("receipt: answer")?;
            for row in logits.chunks_exact(setup.n_vocab) {
                if let Some(difference) = steps.next(row) {
                    return Ok(Checked::Differs(difference));
                }
            }
        }
        Ok(steps.finish())
    }

    /// In what the receipt is of something else than `setup`, or not of what it says itself.
    fn unlike(&self, setup: &Setup) -> Option<Difference> {
        if self.model.blake3 != setup.model.blake3 {
            return Some(Difference::Model {
                expected: setup.model.blake3.to_string(),
                found: self.model.blake3.to_string(),
            });
        }
        let form = |adapter: &AdapterId| {
            let scale = adapter.scale.to_bits();
            (adapter.blake3, scale, adapter.dtype.clone())
        };
        if !self
            .adapters
            .iter()
            .map(form)
            .eq(setup.adapters.iter().map(form))
        {
            return Some(Difference::Adapters {
                expected: setup.adapters.clone(),
                found: self.adapters.clone(),
            });
        }
        if self.settings != setup.settings {
            return Some(Difference::Settings {
                expected: setup.settings.to_string(),
                found: self.settings.to_string(),
            });
        }
        let asked = Hex(self.beginning().asked().digest());
        (asked != self.logits.begin).then(|| Difference::Asked {
            expected: asked.to_string(),
            found: self.logits.begin.to_string(),
        })
    }

    /// In what the answer can't have ended as the receipt says.
    fn wrong_end(&self) -> Option<Difference> {
        let differs = |expected: String, found: String| Some(Difference::End { expected, found });
        let n = self.answer.len() as u64;
        if let Some(index) = self.answer.iter().position(|id| self.stop_ids.contains(id)) {
            let id = self.answer[index];
            return differs(
                format!("it to end before token {index}, {id}, which is a stop token"),
                format!("{n} tokens"),
            );
        }
        if let Some(most) = self.max_tokens.filter(|most| n > *most) {
            return differs(format!("at most {most} tokens"), format!("{n}"));
        }
        match self.end {
            End::StopToken { id } if !self.stop_ids.contains(&id) => {
                differs("one of the stop tokens".to_owned(), format!("{id}"))
            }
            End::MaxTokens if self.max_tokens != Some(n) => {
                let most = self.max_tokens;
                let most = most.map_or("more tokens".to_owned(), |most| format!("{most} tokens"));
                differs(most, format!("{n}, as many as were asked for"))
            }
            End::ContextFull if (self.prompt.len() as u64) + n != self.settings.context + 1 => {
                let context = self.settings.context;
                let found = self.prompt.len() as u64 + n;
                differs(
                    format!(
                        "{} tokens, one more than the context of {context}",
                        context + 1
                    ),
                    format!("{found}, a full context"),
                )
            }
            _ => None,
        }
    }
}

/// Steps of an answer, compared one after the other.
struct Steps<'a> {
    receipt: &'a Receipt,
    bound: f64,
    sampler: Sampler,
    chain: Chain,
    /// The token that is next.
    index: usize,
    /// Tokens that aren't the best.
    n_others: usize,
}

impl Steps<'_> {
    /// Compares the next token with what is sampled from `logits`, which come before it.
    fn next(&mut self, logits: &[f32]) -> Option<Difference> {
        let receipt = self.receipt;
        let answered = receipt.answer.get(self.index).copied();
        let found = answered.or(receipt.end.stop_id())?;
        let expected = self.sampler.sample(logits);
        let differs = match receipt.machine.is_gpu() {
            true => self.beyond_margin(logits, expected, found),
            false => self.other_bits(logits, expected, found),
        };
        self.sampler.accept(found);
        self.index += 1;
        differs
    }

    fn other_bits(&mut self, logits: &[f32], expected: u32, found: u32) -> Option<Difference> {
        let index = self.index;
        if expected != found {
            return Some(Difference::Token {
                index,
                expected,
                found,
            });
        }
        let step = self.chain.push(found, logits);
        let claimed = self.receipt.logits.steps[index];
        (step != claimed).then(|| Difference::Logits {
            index,
            expected: step.to_string(),
            found: claimed.to_string(),
        })
    }

    fn beyond_margin(&mut self, logits: &[f32], expected: u32, found: u32) -> Option<Difference> {
        if expected == found {
            return None;
        }
        self.n_others += 1;
        let margin = self.margin(logits);
        let logits = self.sampler.adjusted(logits);
        let of = |id: u32| logits.get(id as usize).copied();
        // A token that there isn't is as far away as can be.
        let behind = of(expected)
            .zip(of(found))
            .map_or(f32::INFINITY, |(best, own)| best - own);
        let is_within = behind <= margin;
        (!is_within).then_some(Difference::Margin {
            index: self.index,
            expected,
            found,
            behind,
            margin,
        })
    }

    /// By how much the logit of a token may be below the best one: each of the two may be off by the root mean square
    /// error that is bounded.
    fn margin(&self, logits: &[f32]) -> f32 {
        let finite = logits.iter().filter(|logit| logit.is_finite());
        let (n, squares) = finite.fold((0u32, 0.0), |(n, sum), &logit| {
            (n + 1, sum + f64::from(logit) * f64::from(logit))
        });
        let rms = (squares / f64::from(n.max(1))).sqrt();
        let penalty = f64::from(self.sampler.config().repeat_penalty);
        let penalty = penalty.max(1.0 / penalty).min(MAX_PENALTY);
        (2.0 * self.bound * rms * penalty) as f32
    }

    fn finish(self) -> Checked {
        if self.receipt.machine.is_gpu() {
            return Checked::WithinMargin {
                n_others: self.n_others,
            };
        }
        let (digest, claimed) = (Hex(self.chain.digest()), self.receipt.logits.end);
        match digest == claimed {
            true => Checked::Same,
            false => Checked::Differs(Difference::Digest {
                expected: digest.to_string(),
                found: claimed.to_string(),
            }),
        }
    }
}
