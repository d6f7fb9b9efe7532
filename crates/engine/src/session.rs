//! The sequences of a model.

pub(crate) mod early;
mod snapshot;

use std::ops::Range;
use std::slice;
use std::sync::Arc;

use crate::backend::{
    Backend, BackendError, CacheType, Continued, KvCache, PendingRows, RowsRead, RowsWanted,
    Sampled, Sequence,
};
use crate::config::ModelConfig;
use crate::forward::{Batch, Scratch};
use crate::lookahead::Ahead;
use crate::lora::ActiveAdapter;
use crate::model::Model;
use crate::rope::{Angles, Rope};
use crate::sampling::{Chosen, Sampling};
use crate::screening::HeadUse;
use crate::weight_set::WeightSet;

use early::Start;
pub use snapshot::{SaveError, Snapshot, SnapshotPieces};

/// Settings of a [`Session`].
#[derive(Debug, Clone, Copy)]
pub struct SessionOptions {
    /// Maximum tokens of the sequence.
    ///
    /// Rotary embeddings that depend on the length of the context use this, so that results don't depend on
    /// how a prompt is chunked.
    pub ctx_len: usize,
    /// Data type of cached keys and values; `None` for what the backend usually has ([`SessionOptions::cache_on`]).
    pub cache: Option<CacheType>,
    /// Maximum tokens per forward pass.
    pub chunk: usize,
}

impl SessionOptions {
    /// A context of `ctx_len` tokens, the backend's usual cache, chunks of 512.
    pub fn new(ctx_len: usize) -> SessionOptions {
        SessionOptions {
            ctx_len,
            cache: None,
            chunk: 512,
        }
    }

    /// The data type of cached keys and values on `backend`: what is asked for, else f16 on GPUs and f32 elsewhere.
    pub fn cache_on<B: Backend>(&self, backend: &B) -> CacheType {
        self.cache.unwrap_or_else(|| backend.usual_cache())
    }
}

/// One sequence of tokens, with the keys and values the model has computed for it.
pub struct Session<B: Backend> {
    model: Arc<Model<B>>,
    options: SessionOptions,
    /// One for each of the model's rotary embeddings.
    ropes: Vec<Rope>,
    cache: B::Cache,
    /// Without those whose scale is 0.
    adapters: Vec<ActiveAdapter<B>>,
    scratch: Scratch<B>,
    /// Its part of what the backend decodes on its own, from the current sequence.
    ahead: Option<Ahead>,
    /// How many of the next tokens the host samples, as the backend declined recently.
    host_steps: usize,
}

/// After the device declined to sample (a near-tie), the host samples this many tokens: the device would
/// likely decline again, and each attempt costs a step.
const HOST_STEPS: usize = 16;

/// What follows a token ([`Session::decode`]).
#[derive(Debug, Clone, PartialEq)]
pub enum Decoded {
    /// This token, chosen by the backend.
    Token(Chosen),
    /// Logits to sample from, `[n_vocab]`.
    Logits(Vec<f32>),
}

/// Which logits a forward pass returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Logits {
    /// None: more of a prompt follows.
    None,
    /// Those after the last token.
    Last,
    /// Those after the last token that are among this many largest, or equal the least of these; −∞ for
    /// others that were not computed. All of them if the number is 0.
    ///
    /// Faster than [`Logits::Last`] if the output head has a screen
    /// ([`HeadScreen`](crate::plan::HeadScreen)), and all logits of another sequence aren't needed in the batch;
    /// otherwise the same.
    Top(usize),
    /// Those after each token.
    All,
}

/// What is returned of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wanted {
    Logits(Logits),
    /// The hidden states of all tokens.
    Hidden,
}

/// One session's part of a batch.
pub struct Step<'a, B: Backend> {
    /// The session.
    pub session: &'a mut Session<B>,
    /// Tokens to append to its sequence.
    pub ids: &'a [u32],
    /// Which of their logits are needed.
    pub logits: Logits,
}

impl<B: Backend> Step<'_, B> {
    /// The same step, for a while.
    fn reborrow(&mut self) -> Step<'_, B> {
        Step {
            session: &mut *self.session,
            ids: self.ids,
            logits: self.logits,
        }
    }

    /// Tokens whose logits are needed: the last ones.
    fn n_wanted(&self) -> usize {
        match self.logits {
            Logits::None => 0,
            Logits::Last | Logits::Top(_) => 1,
            Logits::All => self.ids.len(),
        }
    }

    /// The position of its last token.
    fn last_position(&self) -> usize {
        (self.session.cache.len() + self.ids.len()).saturating_sub(1)
    }
}

/// Why a forward pass failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// No tokens to run.
    #[error("no tokens: a forward pass needs at least one")]
    Empty,
    /// A token id outside the vocabulary.
    #[error("token id {id} at index {index}: the model has {n_vocab} tokens")]
    UnknownToken {
        /// The id.
        id: u32,
        /// Its index among those given.
        index: usize,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// More tokens than the session's context holds.
    #[error("context is full: {len} tokens and {more} more, where {ctx_len} fit")]
    ContextFull {
        /// Tokens in the cache.
        len: usize,
        /// Tokens to be appended.
        more: usize,
        /// The limit.
        ctx_len: usize,
    },
    /// A text to be continued, of a model that reads whole texts.
    #[error(
        "expected a model that continues texts, found an encoder ({family}), which only makes vectors of them"
    )]
    Encoder {
        /// The model's family.
        family: &'static str,
    },
    /// A part of a text, of a model that reads whole ones.
    #[error(
        "an encoder reads texts as a whole: expected an empty sequence, found one of {len} tokens"
    )]
    NotWhole {
        /// Tokens in the sequence.
        len: usize,
    },
    /// Sessions that can't share a batch.
    #[error("session {index} of the batch: expected the model of the first, found another")]
    OtherModel {
        /// Its index among those given.
        index: usize,
    },
    /// An adapter that was loaded for another model.
    #[error(
        "adapter `{name}`: expected one that was loaded for the session's model, found one for another"
    )]
    OtherAdapter {
        /// Its name.
        name: String,
    },
    /// An adapter's scale that is NaN or infinite.
    #[error("adapter `{name}`: expected a finite scale, found {found}")]
    AdapterScale {
        /// Its name.
        name: String,
        /// The scale.
        found: f32,
    },
    /// The backend failed.
    #[error(transparent)]
    Backend(#[from] BackendError),
}

impl EngineError {
    /// Whether the device that the model is on is lost, and the model with it ([`BackendError::is_lost`]).
    pub fn is_lost(&self) -> bool {
        matches!(self, EngineError::Backend(error) if error.is_lost())
    }
}

impl<B: Backend> Session<B> {
    /// An empty sequence.
    pub fn new(model: Arc<Model<B>>, options: SessionOptions) -> Result<Session<B>, EngineError> {
        let ropes = |ctx_len| model.ropes(ctx_len);
        let start = Start::new(model.backend(), &model.config, ropes, options)?;
        Ok(Session::of(model, start))
    }

    /// The sequence of `model` that began as `start`.
    pub(crate) fn of(model: Arc<Model<B>>, start: Start<B>) -> Session<B> {
        let Start {
            options,
            ropes,
            cache,
            scratch,
        } = start;
        Session {
            model,
            options,
            ropes,
            cache,
            adapters: Vec::new(),
            scratch,
            ahead: None,
            host_steps: 0,
        }
    }

    /// Applies these adapters, and no others, from the next step on: `y = W x + Σ scale · B (A x)`.
    ///
    /// The model's weights and other sessions are not affected. Neither are keys and values of the tokens so
    /// far: they were computed with the adapters that were active then.
    /// Errors: [`EngineError`] names an adapter of another model, or one whose scale is NaN or infinite; the
    /// session then keeps its previous adapters.
    pub fn set_adapters(&mut self, adapters: Vec<ActiveAdapter<B>>) -> Result<(), EngineError> {
        for ActiveAdapter { adapter, scale } in &adapters {
            let name = || adapter.name().to_owned();
            if !adapter.is_for(&self.model) {
                return Err(EngineError::OtherAdapter { name: name() });
            }
            if !scale.is_finite() {
                return Err(EngineError::AdapterScale {
                    name: name(),
                    found: *scale,
                });
            }
        }
        self.discard_lookahead();
        self.adapters = adapters;
        self.adapters.retain(|active| active.scale != 0.0);
        Ok(())
    }

    /// The active adapters, without those whose scale is 0.
    pub fn adapters(&self) -> &[ActiveAdapter<B>] {
        &self.adapters
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model<B>> {
        &self.model
    }

    /// Tokens in the sequence.
    pub fn len(&self) -> usize {
        self.cache.len()
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.cache.is_empty()
    }

    /// Tokens that it takes memory for, where forks share what they have in common.
    pub fn share(&self) -> usize {
        self.cache.share()
    }

    /// How much of the output head was read where [`Logits::Top`] were requested, if it has a screen. Batches
    /// are counted for their first session.
    pub fn head_use(&self) -> Option<HeadUse> {
        let screened = self.model.current().output().screening.is_some();
        screened.then(|| self.scratch.budget().used())
    }

    /// The maximum number of tokens.
    pub fn ctx_len(&self) -> usize {
        self.options.ctx_len
    }

    /// Blocking form of [`Session::forward_async`].
    pub fn forward(&mut self, ids: &[u32], logits: Logits) -> Result<Vec<f32>, EngineError> {
        let model = Arc::clone(&self.model);
        model.backend.wait(self.forward_async(ids, logits))?
    }

    /// Appends `ids` to the sequence and returns logits, `[rows, n_vocab]`.
    ///
    /// Long inputs are run in chunks; chunking doesn't change the result. All chunks are computed with the
    /// weights that the model has at the beginning, whatever is [swapped](crate::swap::Swap) meanwhile.
    /// After an error, and if the future is dropped, the sequence is unchanged; of a model whose layers have states it may
    /// be shorter, as after [`Session::truncate`].
    /// Errors: [`EngineError`] names the token or the limit.
    pub async fn forward_async(
        &mut self,
        ids: &[u32],
        logits: Logits,
    ) -> Result<Vec<f32>, EngineError> {
        self.check_continues(ids)?;
        self.discard_lookahead();
        self.append(ids, Wanted::Logits(logits)).await
    }

    /// Blocking form of [`Session::hidden_async`].
    pub fn hidden(&mut self, ids: &[u32]) -> Result<Vec<f32>, EngineError> {
        let model = Arc::clone(&self.model);
        model.backend.wait(self.hidden_async(ids))?
    }

    /// Appends `ids` to the sequence and returns the last hidden states, which the output head would read: after the
    /// last norm, `[ids.len(), model_dim]`. Embeddings of a text are made of these.
    ///
    /// Encoders do nothing else, and with whole texts: the sequence must be empty. Otherwise as [`Session::forward_async`].
    pub async fn hidden_async(&mut self, ids: &[u32]) -> Result<Vec<f32>, EngineError> {
        self.check_hidden(ids)?;
        self.discard_lookahead();
        self.append(ids, Wanted::Hidden).await
    }

    /// After an error, and if the future is dropped, the sequence is as [`Session::forward_async`] says.
    async fn append(&mut self, ids: &[u32], wanted: Wanted) -> Result<Vec<f32>, EngineError> {
        if ids.len() > 1 {
            self.cache.pin();
        }
        let mut undo = Undo {
            before: self.cache.len(),
            session: self,
        };
        let weights = undo.session.model.current();
        let result = undo.session.run(&weights, ids, wanted).await;
        if result.is_ok() {
            undo.before = usize::MAX;
        }
        result
    }

    async fn run(
        &mut self,
        weights: &WeightSet<B>,
        ids: &[u32],
        wanted: Wanted,
    ) -> Result<Vec<f32>, EngineError> {
        let mut out = Vec::new();
        let mut chunks = ids.chunks(self.options.chunk.max(1)).peekable();
        while let Some(ids) = chunks.next() {
            let logits = match wanted {
                Wanted::Logits(Logits::Last | Logits::Top(_)) if chunks.peek().is_some() => {
                    Logits::None
                }
                Wanted::Logits(logits) => logits,
                Wanted::Hidden => Logits::All,
            };
            let step = Step {
                session: &mut *self,
                ids,
                logits,
            };
            let hidden = wanted == Wanted::Hidden;
            for values in run_batch(weights, &mut [step], hidden).await? {
                if out.is_empty() {
                    out = values;
                } else {
                    out.extend(values);
                }
            }
        }
        Ok(out)
    }

    /// Blocking form of [`Session::forward_together_async`].
    pub fn forward_together(steps: &mut [Step<'_, B>]) -> Result<Vec<Vec<f32>>, EngineError> {
        let Some(first) = steps.first() else {
            return Ok(Vec::new());
        };
        let model = Arc::clone(&first.session.model);
        model.backend.wait(Session::forward_together_async(steps))?
    }

    /// Runs a step of each of several sequences in one batch, for which weights are read once; returns the
    /// logits of each step, `[rows, n_vocab]`.
    ///
    /// The results have the same bits as if each session had been run separately. The batch is run as a
    /// whole, so steps that are parts of prompts should be no longer than a chunk.
    /// Errors: [`EngineError`] names the token, the limit or the session. After one, and if the future is
    /// dropped, all sequences are as [`Session::forward_async`] says.
    pub async fn forward_together_async(
        steps: &mut [Step<'_, B>],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        check_together(steps, Session::check_continues)?;
        Session::together(steps, false).await
    }

    /// [`Session::forward_together_async`] with the last hidden states of the tokens whose logits are asked for, as
    /// [`Session::hidden_async`] has them, also of encoders.
    pub async fn hidden_together_async(
        steps: &mut [Step<'_, B>],
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        check_together(steps, Session::check_hidden)?;
        Session::together(steps, true).await
    }

    async fn together(
        steps: &mut [Step<'_, B>],
        hidden: bool,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let Some(first) = steps.first() else {
            return Ok(Vec::new());
        };
        let weights = first.session.model.current();
        for step in &mut *steps {
            step.session.discard_lookahead();
        }
        run_batch(&weights, steps, hidden).await
    }

    /// Blocking form of [`Session::decode_together_async`].
    pub fn decode_together(
        steps: &mut [Step<'_, B>],
        samplings: &[Option<Sampling<'_>>],
        wanted: usize,
    ) -> Result<Vec<Decoded>, EngineError> {
        let Some(first) = steps.first() else {
            return Ok(Vec::new());
        };
        let model = Arc::clone(&first.session.model);
        model
            .backend
            .wait(Session::decode_together_async(steps, samplings, wanted))?
    }

    /// [`Session::forward_together_async`], and where a step is to be sampled for, the token that follows it, chosen as by
    /// [`Session::decode_async`]; the logits that the step asks for, where it isn't, or where the backend leaves that
    /// to the host. A step that is sampled for asks for the logits of its last token.
    ///
    /// A backend that samples decodes ahead, where several steps are all single tokens, as long as each call has the same sessions
    /// with the tokens that the previous call returned. When a session leaves or another one comes, those that go on still
    /// get what is in flight. `wanted` is how many steps are still needed, this one included, if that is known: no more are
    /// computed.
    ///
    /// Errors: those of [`Session::forward_together_async`].
    pub async fn decode_together_async(
        steps: &mut [Step<'_, B>],
        samplings: &[Option<Sampling<'_>>],
        wanted: usize,
    ) -> Result<Vec<Decoded>, EngineError> {
        check_together(steps, Session::check_continues)?;
        let Some(first) = steps.first() else {
            return Ok(Vec::new());
        };
        let weights = first.session.model.current();
        let mut drawn = draw(steps, samplings, weights.number(), wanted).await?;
        if drawn.iter().all(Option::is_none) && begin(&weights, steps, samplings, wanted)? {
            drawn = draw(steps, samplings, weights.number(), wanted).await?;
        }
        let rest = (steps.iter_mut().zip(samplings).zip(&drawn))
            .filter(|(_, drawn)| drawn.is_none())
            .map(|((step, sampling), _)| (step.reborrow(), *sampling));
        let (mut rest, of_rest): (Vec<Step<'_, B>>, Vec<_>) = rest.unzip();
        let mut computed = decode_now(&weights, &mut rest, &of_rest).await?.into_iter();
        let decoded = steps
            .iter_mut()
            .zip(drawn)
            .map(|(step, drawn)| match drawn {
                Some(chosen) => {
                    step.session.take(chosen.id);
                    Some(Decoded::Token(chosen))
                }
                None => computed.next(),
            });
        Ok(decoded.flatten().collect())
    }

    /// Blocking form of [`Session::decode_async`].
    pub fn decode(
        &mut self,
        ids: &[u32],
        sampling: Sampling<'_>,
        wanted: usize,
    ) -> Result<Decoded, EngineError> {
        let model = Arc::clone(&self.model);
        (model.backend).wait(self.decode_async(ids, sampling, wanted))?
    }

    /// Appends `ids` to the sequence and samples the next token as `sampling` says; or returns the logits to
    /// sample from, where the backend leaves that to the host.
    ///
    /// Several `ids` are appended in chunks, as [`Session::forward_async`] does it. Where they are one, as while an answer is
    /// generated, a backend that samples decodes ahead: while the caller processes a token, those after it are computed,
    /// as long as each call passes the token that the previous call returned, accepted by the same sampler.
    /// Anything else discards what was computed ahead, without visible effect. `wanted` is how many tokens
    /// are still needed, this one included, if that is known: no more are computed. Where tokens are
    /// [restricted](Sampling::allowed), what follows a token is computed ahead, and sampled from once the next call says
    /// what is allowed: the time between calls is the device's, as long as a step takes longer.
    ///
    /// A backend samples with the same probabilities as the sampler, but with random numbers of its own, which
    /// depend on the seed, on how many choices the sampler has made itself, and on the position. Greedy choices
    /// are the same, also among equals. Log-probabilities are those of the host within 2⁻¹⁶, by sums of another order.
    ///
    /// After an error, and if the future is dropped, the sequence is as [`Session::forward_async`] says.
    /// Errors: [`EngineError`] names the token or the limit.
    pub async fn decode_async(
        &mut self,
        ids: &[u32],
        sampling: Sampling<'_>,
        wanted: usize,
    ) -> Result<Decoded, EngineError> {
        self.check_continues(ids)?;
        if ids.len() != 1 {
            return self.decode_behind(ids, sampling).await;
        }
        let weights = self.model.current();
        let samplings = &[Some(sampling)];
        let mut step = Step {
            session: self,
            ids,
            logits: logits_for(&sampling),
        };
        let steps = slice::from_mut(&mut step);
        let mut drawn = draw(steps, samplings, weights.number(), wanted).await?;
        if drawn[0].is_none() {
            let session = &mut *steps[0].session;
            let n_steps = match session.host_steps.checked_sub(1) {
                Some(left) => {
                    session.host_steps = left;
                    0
                }
                None => max_lookahead(steps, samplings)?.min(wanted.max(1)),
            };
            if n_steps > 0 {
                if !decode_ahead(&weights, steps, samplings, n_steps)? {
                    let Session { model, scratch, .. } = &mut *steps[0].session;
                    let logits = model.backend.submit(scratch.logits())?.await?;
                    steps[0].session.cache.advance(1);
                    return Ok(Decoded::Logits(logits));
                }
                drawn = draw(steps, samplings, weights.number(), wanted).await?;
            }
        }
        if let Some(chosen) = drawn.swap_remove(0) {
            steps[0].session.take(chosen.id);
            return Ok(Decoded::Token(chosen));
        }
        let logits = Wanted::Logits(step.logits);
        let appended = self.append(ids, logits).await;
        appended.map(Decoded::Logits)
    }

    /// [`Session::decode_async`] behind several tokens, in chunks of which the last is sampled for.
    async fn decode_behind(
        &mut self,
        ids: &[u32],
        sampling: Sampling<'_>,
    ) -> Result<Decoded, EngineError> {
        self.cache.pin();
        let n_before = (ids.len() - 1) / self.options.chunk.max(1) * self.options.chunk.max(1);
        let (before, last) = ids.split_at(n_before);
        let mut undo = Undo {
            before: self.cache.len(),
            session: self,
        };
        // What was computed ahead goes on elsewhere.
        undo.session.ahead = None;
        let weights = undo.session.model.current();
        let nothing = Wanted::Logits(Logits::None);
        undo.session.run(&weights, before, nothing).await?;
        let mut step = Step {
            session: &mut *undo.session,
            ids: last,
            logits: logits_for(&sampling),
        };
        let steps = slice::from_mut(&mut step);
        let mut decoded = decode_now(&weights, steps, &[Some(sampling)]).await?;
        undo.before = usize::MAX;
        Ok(decoded.swap_remove(0))
    }

    /// Goes on with `id`, which was [drawn](draw): the token before it now belongs to the sequence.
    fn take(&mut self, id: u32) {
        self.cache.advance(1);
        self.ahead.iter().for_each(|ahead| ahead.take(id));
    }

    /// Waits until a device has computed all that it was given.
    pub async fn settle_async(&self) -> Result<(), EngineError> {
        let submitted = {
            let _exclusive = self.model.backend.exclusive();
            self.model.backend.submit_all()?
        };
        if let Some(submitted) = submitted {
            submitted.await?;
        }
        Ok(())
    }

    /// Discards what was computed ahead: it is stored beyond the sequence's end. A session that rests should, as memory of the
    /// device that later steps don't use is kept for it.
    pub fn discard_lookahead(&mut self) {
        self.ahead = None;
        self.host_steps = 0;
    }

    fn check_continues(&self, ids: &[u32]) -> Result<(), EngineError> {
        expect_decoder(&self.model.config)?;
        self.check(ids)
    }

    /// Whether hidden states can be made of `ids`: encoders read whole texts.
    fn check_hidden(&self, ids: &[u32]) -> Result<(), EngineError> {
        self.check(ids)?;
        match self.model.config.family.encoder && !self.is_empty() {
            true => Err(EngineError::NotWhole { len: self.len() }),
            false => Ok(()),
        }
    }

    fn check(&self, ids: &[u32]) -> Result<(), EngineError> {
        check(
            &self.model.config,
            ids,
            self.cache.len(),
            self.options.ctx_len,
        )
    }

    /// Truncates to the first `len` tokens. Of a model whose layers have states, to fewer where those aren't
    /// remembered: [`Session::len`] says how many are left.
    pub fn truncate(&mut self, len: usize) {
        self.discard_lookahead();
        self.cache.truncate(len);
    }

    /// How many tokens [`Session::truncate`] to the first `len` leaves: fewer, where states aren't remembered there.
    pub fn len_within(&self, len: usize) -> usize {
        self.cache.len_within(len)
    }

    /// A sequence that begins with the first `len` tokens of this one, or fewer, as [`Session::truncate`], sharing
    /// their memory.
    pub fn fork(&self, len: usize) -> Session<B> {
        Session {
            model: Arc::clone(&self.model),
            options: self.options,
            ropes: self.ropes.clone(),
            cache: self.cache.fork(len),
            adapters: self.adapters.clone(),
            scratch: Scratch::new(self.model.backend()),
            ahead: None,
            host_steps: 0,
        }
    }
}

/// Whether `steps` can share a batch.
fn check_together<B: Backend>(
    steps: &[Step<'_, B>],
    check: fn(&Session<B>, &[u32]) -> Result<(), EngineError>,
) -> Result<(), EngineError> {
    for (index, step) in steps.iter().enumerate() {
        check(step.session, step.ids)?;
        if !Arc::ptr_eq(&step.session.model, &steps[0].session.model) {
            return Err(EngineError::OtherModel { index });
        }
    }
    Ok(())
}

/// The tokens that steps in flight have sampled for those of `steps` that continue them. More steps follow, as long as all
/// sequences that are in flight together go on, alone: `wanted` at most, with this one.
///
/// No token is [taken](Session::take) yet. What the others of `steps` had in flight is let go.
async fn draw<B: Backend>(
    steps: &mut [Step<'_, B>],
    samplings: &[Option<Sampling<'_>>],
    generation: u64,
    wanted: usize,
) -> Result<Vec<Option<Chosen>>, EngineError> {
    let mut group: Option<Ahead> = None;
    let mut members = vec![None; steps.len()];
    for ((step, sampling), member) in steps.iter().zip(samplings).zip(&mut members) {
        if let (Some(ahead), Some(sampling), [id]) = (&step.session.ahead, sampling, step.ids)
            && step.n_wanted() == 1
            && group.as_ref().is_none_or(|group| group.is_with(ahead))
            && ahead.continues_with(*id, sampling, generation)
        {
            *member = Some(ahead.member());
            group = Some(ahead.clone());
        }
    }
    let Some(group) = group else {
        steps.iter_mut().for_each(|step| step.session.ahead = None);
        return Ok(vec![None; steps.len()]);
    };
    let goes_on = members.iter().all(Option::is_some) && members.len() == group.n_members();
    let mut allowed = vec![None; group.n_members()];
    for (member, sampling) in members.iter().zip(samplings) {
        if let (Some(member), Some(sampling)) = (*member, sampling) {
            allowed[member] = sampling.allowed;
        }
    }
    let wanted = if goes_on { wanted.max(1) } else { 0 };
    let sampled = group.next(wanted, &allowed).await;
    let (found, error) = match sampled {
        Ok(found) => (found.unwrap_or_default(), None),
        Err(error) => (Vec::new(), Some(error)),
    };
    let mut found: Vec<Option<Sampled>> = found.into_iter().map(Some).collect();
    let mut drawn = Vec::with_capacity(steps.len());
    for ((step, member), sampling) in steps.iter_mut().zip(&members).zip(samplings) {
        let sampled = member.and_then(|member| found.get_mut(member)?.take());
        let is_undecided = sampled == Some(Sampled::Undecided);
        // Something else may have been allowed when a future was dropped that waited for this.
        let may_be = |id| sampling.is_none_or(|sampling| sampling.allows(id));
        let chosen = match sampled {
            Some(Sampled::Token(chosen)) if may_be(chosen.id) => Some(chosen),
            _ => None,
        };
        step.session.ahead.take_if(|_| chosen.is_none());
        drawn.push(chosen);
        if is_undecided {
            step.session.host_steps = HOST_STEPS;
        }
    }
    match error {
        Some(error) => Err(error.into()),
        None => Ok(drawn),
    }
}

/// How many steps the backend can take ahead, if it samples after all of `steps`, which ask for a row of logits; else 0.
fn max_lookahead<B: Backend>(
    steps: &mut [Step<'_, B>],
    samplings: &[Option<Sampling<'_>>],
) -> Result<usize, EngineError> {
    let mut room = usize::MAX;
    let mut sequences = Vec::with_capacity(steps.len());
    let mut model = None;
    for (step, sampling) in steps.iter_mut().zip(samplings) {
        let (&Some(sampling), &[.., last], 1) = (sampling, step.ids, step.n_wanted()) else {
            return Ok(0);
        };
        let position = step.last_position();
        let session = &mut *step.session;
        room = room.min(session.options.ctx_len - position);
        model.get_or_insert(&session.model);
        sequences.push(Continued {
            cache: &mut session.cache,
            last,
            position,
            sampling,
        });
    }
    match model {
        Some(model) => Ok(model.backend.max_lookahead(&mut sequences)?.min(room)),
        None => Ok(0),
    }
}

/// Begins to decode `steps` ahead, `wanted` times at most, if the backend can and there are several; returns whether it does.
fn begin<B: Backend>(
    weights: &WeightSet<B>,
    steps: &mut [Step<'_, B>],
    samplings: &[Option<Sampling<'_>>],
    wanted: usize,
) -> Result<bool, EngineError> {
    let is_fit = |step: &Step<'_, B>| step.ids.len() == 1 && step.session.host_steps == 0;
    if steps.len() < 2 || wanted < 2 || !steps.iter().all(is_fit) {
        return Ok(false);
    }
    // Those that are sampled for alike come together.
    let mut order: Vec<(Step<'_, B>, Option<Sampling<'_>>)> = Vec::with_capacity(steps.len());
    for (step, sampling) in steps.iter_mut().zip(samplings) {
        let is_alike = |(_, other): &(_, Option<Sampling<'_>>)| match (other, sampling) {
            (Some(a), Some(b)) => a.is_alike(b),
            _ => false,
        };
        let last = order.iter().rposition(is_alike);
        let at = last.map_or(order.len(), |last| last + 1);
        order.insert(at, (step.reborrow(), *sampling));
    }
    let (mut steps, samplings): (Vec<_>, Vec<_>) = order.into_iter().unzip();
    match max_lookahead(&mut steps, &samplings)?.min(wanted) {
        0 | 1 => Ok(false),
        n_steps => decode_ahead(weights, &mut steps, &samplings, n_steps),
    }
}

/// Computes `steps`, of a token each, and has the backend repeat them, `n_steps` in all. If it can't, returns `false`, and
/// their logits are in the scratch of the first.
fn decode_ahead<B: Backend>(
    weights: &WeightSet<B>,
    steps: &mut [Step<'_, B>],
    samplings: &[Option<Sampling<'_>>],
    n_steps: usize,
) -> Result<bool, EngineError> {
    let Some(model) = steps.first().map(|step| Arc::clone(&step.session.model)) else {
        return Ok(false);
    };
    let _exclusive = model.backend.exclusive();
    compute(weights, steps, n_steps, false)?;
    let mut logits = None;
    let (mut sequences, mut sessions) = (Vec::new(), Vec::new());
    for (step, sampling) in steps.iter_mut().zip(samplings) {
        let (&Some(sampling), Some(last)) = (sampling, step.ids.last()) else {
            return Ok(false);
        };
        let position = step.last_position();
        let Session {
            cache,
            scratch,
            ahead,
            ..
        } = &mut *step.session;
        logits.get_or_insert(scratch.logits());
        sequences.push(Continued {
            cache,
            last: *last,
            position,
            sampling,
        });
        sessions.push(ahead);
    }
    let Some(logits) = logits else {
        return Ok(false);
    };
    let Some(decoding) = model.backend.decode(logits, &mut sequences, n_steps)? else {
        return Ok(false);
    };
    let sequences = sequences.into_iter().map(|of| (of.last, of.sampling));
    let parts = Ahead::begin(decoding, weights.number(), sequences);
    for (session, part) in sessions.into_iter().zip(parts) {
        *session = Some(part);
    }
    Ok(true)
}

/// [`Session::decode_together_async`] of `steps` in one batch.
async fn decode_now<B: Backend>(
    weights: &WeightSet<B>,
    steps: &mut [Step<'_, B>],
    samplings: &[Option<Sampling<'_>>],
) -> Result<Vec<Decoded>, EngineError> {
    let mut samples = Vec::with_capacity(steps.len());
    for (step, sampling) in steps.iter_mut().zip(samplings) {
        let left = step.session.host_steps.checked_sub(1);
        step.session.host_steps = left.unwrap_or(0);
        let sampling = sampling.filter(|_| left.is_none());
        let can = max_lookahead(slice::from_mut(step), &[sampling])? > 0;
        samples.push(sampling.filter(|_| can));
    }
    if samples.iter().all(Option::is_none) {
        let logits = run_batch(weights, steps, false).await?;
        return Ok(logits.into_iter().map(Decoded::Logits).collect());
    }
    let mut begun = Begun {
        steps,
        has_ended: false,
    };
    let steps = &mut *begun.steps;
    let model = Arc::clone(&steps[0].session.model);
    let read = {
        let _exclusive = model.backend.exclusive();
        compute(weights, steps, 1, false)?;
        read_rows(steps, samples)?
    };
    let read = read.await?;
    let mut decoded = Vec::with_capacity(steps.len());
    for (step, read) in steps.chunks_mut(1).zip(read) {
        decoded.push(match read {
            RowsRead::Token(chosen) => Decoded::Token(chosen),
            RowsRead::Logits(logits) => Decoded::Logits(logits),
            RowsRead::Undecided => {
                // Penalties or noise have changed the logits on the device: they are computed again, which states of single
                // tokens allow. Logits behind several tokens are kept.
                debug_assert!(step[0].ids.len() == 1);
                let logits = {
                    let _exclusive = model.backend.exclusive();
                    compute(weights, step, 1, false)?;
                    model.backend.submit(step[0].session.scratch.logits())?
                };
                Decoded::Logits(logits.await?)
            }
        });
    }
    for Step { session, ids, .. } in steps.iter_mut() {
        session.cache.advance(ids.len());
    }
    begun.has_ended = true;
    Ok(decoded)
}

/// Submits `steps`, which were [computed](compute): the tokens that `samples` says how to sample, or logits.
fn read_rows<B: Backend>(
    steps: &mut [Step<'_, B>],
    samples: Vec<Option<Sampling<'_>>>,
) -> Result<PendingRows, EngineError> {
    let mut logits = None;
    let mut wanted = Vec::with_capacity(steps.len());
    for (step, sampling) in steps.iter_mut().zip(samples) {
        let n_wanted = step.n_wanted();
        let (last, position) = (step.ids.last().copied(), step.last_position());
        let Session {
            model,
            cache,
            scratch,
            ..
        } = &mut *step.session;
        logits.get_or_insert((model, scratch.logits()));
        wanted.push(match (sampling, last) {
            (Some(sampling), Some(last)) => RowsWanted::Token(Continued {
                cache,
                last,
                position,
                sampling,
            }),
            _ => RowsWanted::Logits(n_wanted),
        });
    }
    let (model, logits) = logits.expect("there is a first step");
    Ok(model.backend.read_rows(logits, wanted)?)
}

/// The logits that a token is sampled from.
fn logits_for(sampling: &Sampling<'_>) -> Logits {
    sampling.top().map_or(Logits::Last, Logits::Top)
}

/// Refuses encoders, which read whole texts.
fn expect_decoder(config: &ModelConfig) -> Result<(), EngineError> {
    let family = config.family;
    match family.encoder {
        true => Err(EngineError::Encoder {
            family: family.name,
        }),
        false => Ok(()),
    }
}

/// Whether `ids` can follow `len` tokens in a context of `ctx_len`.
fn check(config: &ModelConfig, ids: &[u32], len: usize, ctx_len: usize) -> Result<(), EngineError> {
    if ids.is_empty() {
        return Err(EngineError::Empty);
    }
    let n_vocab = config.n_vocab;
    if let Some(index) = ids.iter().position(|&id| id as usize >= n_vocab) {
        return Err(EngineError::UnknownToken {
            id: ids[index],
            index,
            n_vocab,
        });
    }
    if ids.len() > ctx_len.saturating_sub(len) {
        return Err(EngineError::ContextFull {
            len,
            more: ids.len(),
            ctx_len,
        });
    }
    Ok(())
}

/// Truncates the sequence to `before` tokens when dropped.
struct Undo<'a, B: Backend> {
    session: &'a mut Session<B>,
    before: usize,
}

impl<B: Backend> Drop for Undo<'_, B> {
    fn drop(&mut self) {
        if self.before < self.session.cache.len() {
            self.session.cache.truncate(self.before);
        }
    }
}

/// Steps of sequences that keep nothing of them when this is dropped before they have ended.
struct Begun<'a, 's, B: Backend> {
    steps: &'a mut [Step<'s, B>],
    has_ended: bool,
}

impl<B: Backend> Drop for Begun<'_, '_, B> {
    fn drop(&mut self) {
        if !self.has_ended {
            for step in &mut *self.steps {
                let cache = &mut step.session.cache;
                cache.truncate(cache.len());
            }
        }
    }
}

/// Runs `steps`, of sessions of one model, in one batch with the weights `weights`; returns the requested
/// logits of each, or hidden states in their place.
///
/// Sequences advance only once everything has succeeded.
async fn run_batch<B: Backend>(
    weights: &WeightSet<B>,
    steps: &mut [Step<'_, B>],
    hidden: bool,
) -> Result<Vec<Vec<f32>>, EngineError> {
    let mut begun = Begun {
        steps,
        has_ended: false,
    };
    let steps = &mut *begun.steps;
    let n_rows: Vec<usize> = steps.iter().map(Step::n_wanted).collect();
    let wanted = n_rows.iter().any(|n_rows| *n_rows > 0);
    let model = steps.first().map(|step| Arc::clone(&step.session.model));
    let submitted = {
        let _exclusive = model.as_ref().and_then(|model| model.backend.exclusive());
        compute(weights, steps, 1, hidden)?;
        match (&model, steps.first_mut()) {
            (Some(model), Some(Step { session, .. })) if wanted => {
                let logits = session.scratch.logits();
                Some(model.backend.submit_apart(logits, &n_rows)?)
            }
            _ => None,
        }
    };
    let values = match submitted {
        Some(rows) => {
            let logits = |read| match read {
                RowsRead::Logits(logits) => logits,
                RowsRead::Token(_) | RowsRead::Undecided => Vec::new(),
            };
            rows.await?.into_iter().map(logits).collect()
        }
        None => vec![Vec::new(); n_rows.len()],
    };
    for Step { session, ids, .. } in steps.iter_mut() {
        session.cache.advance(ids.len());
    }
    begun.has_ended = true;
    Ok(values)
}

/// Leaves the requested logits of `steps` in the scratch of the first. Sequences don't advance yet.
///
/// Steps of one token each may be the first of `n_steps` that are repeated for later positions.
fn compute<B: Backend>(
    weights: &WeightSet<B>,
    steps: &mut [Step<'_, B>],
    n_steps: usize,
    hidden: bool,
) -> Result<(), EngineError> {
    let Some(model) = steps.first().map(|step| Arc::clone(&step.session.model)) else {
        return Ok(());
    };
    let mut ids = Vec::new();
    let mut angles: Vec<Angles> = Vec::new();
    let mut wanted = Vec::new();
    for step in steps.iter_mut() {
        let pos = step.session.cache.len();
        for (i, rope) in step.session.ropes.iter().enumerate() {
            let own = rope.angles(pos, step.ids.len().max(n_steps));
            match angles.get_mut(i) {
                Some(angles) => angles.append(&own),
                None => angles.push(own),
            }
        }
        ids.extend_from_slice(step.ids);
        wanted.extend(ids.len() - step.n_wanted()..ids.len());
    }
    // Other steps want rows and give no number: as many numbers as rows mean that each row has one.
    let tops = steps.iter().filter_map(|step| match step.logits {
        Logits::Top(top) if top > 0 => Some(top),
        _ => None,
    });
    let mut tops: Vec<usize> = tops.collect();
    if tops.len() < wanted.len() {
        tops.clear();
    }
    let mut scratch = None;
    let mut sequences = Vec::with_capacity(steps.len());
    let mut adapters: Vec<(Range<usize>, &[ActiveAdapter<B>])> = Vec::new();
    let mut first_row = 0;
    for step in steps.iter_mut() {
        let session = &mut *step.session;
        let rows = first_row..first_row + step.ids.len();
        first_row = rows.end;
        match adapters.last_mut() {
            // Adjacent steps with the same adapters are computed together.
            Some((before, same)) if before.end == rows.start && *same == session.adapters => {
                before.end = rows.end;
            }
            _ if session.adapters.is_empty() => {}
            _ => adapters.push((rows, &session.adapters)),
        }
        scratch.get_or_insert(&mut session.scratch);
        sequences.push(Sequence {
            cache: &mut session.cache,
            n_rows: step.ids.len(),
            n_angles: step.ids.len().max(n_steps),
        });
    }
    let scratch = scratch.expect("there is a first step");
    let mut batch = Batch {
        ids: &ids,
        sequences: &mut sequences,
        angles: &angles,
        adapters: &adapters,
        wanted: &wanted,
        tops: &tops,
        hidden,
    };
    Ok(model.forward(weights, scratch, &mut batch)?)
}
