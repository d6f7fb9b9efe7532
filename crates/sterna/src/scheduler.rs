//! Many answers in shared steps.
//!
//! A [`Scheduler`] owns [`Sequence`]s, each of which answers one request at a time. A step computes the next
//! token of some and a chunk of the prompt of others in one batch, for which weights are read once. An answer
//! doesn't depend on what shares its steps.

use std::slice;
use std::sync::Arc;
use std::time::Duration;

use sterna_engine::screening::HeadUse;
use sterna_engine::{Backend, Decoded, EngineError, Logits, Sampling, Session, Step};

use crate::error::{Error, ErrorCode, Result};
use crate::generate::{Draw, Event, Generator, Given, Request};
use crate::sequence::Sequence;

/// How many lost devices are tolerated in one answer: more are no accident.
const MAX_LOSSES: usize = 3;

/// Steps after which a prompt comes before shorter ones.
const PATIENCE: u64 = 8;

/// Tokens of prompts, for each prompt that waits, in a step that gives other answers a token. Time to the first token and
/// time between tokens are taken from each other: with a fixed number the one grows with the requests, and the other
/// doesn't.
const BESIDE_EACH: usize = 4;

/// The share of a chunk that a short prompt has at most. Longer ones have nothing of a step that ends a short one: its first token
/// waits for the rest of the step before at most, and for its own tokens. That is so for a few steps in a row.
const SHORT_SHARE: usize = 4;
const MOST_SHORT_STEPS: u32 = 2;

/// How a [`Scheduler`] fills its steps.
#[derive(Debug, Clone, Copy)]
pub struct SchedulerOptions {
    /// Maximum tokens of one prompt per step.
    pub chunk: usize,
    /// Maximum tokens of prompts, of all together, in a step that gives other answers a token, which wait for it. Where
    /// many prompts wait it is more, but no more than [`SchedulerOptions::chunk`].
    pub chunk_beside: usize,
    /// Maximum tokens per step, of all sequences.
    pub max_rows: usize,
    /// Devices may also sample at random. They have random numbers of their own, so an answer then depends on whether
    /// it was computed on one. Greedy sampling is left to them in any case.
    pub draw_on_device: bool,
    /// Steps that have nothing but parts of prompts are waited for, where a device computes: what comes meanwhile is in the next
    /// one, and not behind all of a long prompt.
    pub await_prompts: bool,
    /// The time since some fixed moment, for statistics.
    pub clock: Option<fn() -> Duration>,
}

impl Default for SchedulerOptions {
    /// For the CPU, where longer chunks of prompts are hardly faster, and shorter ones react sooner to an
    /// interruption.
    fn default() -> SchedulerOptions {
        SchedulerOptions {
            chunk: 64,
            chunk_beside: 16,
            max_rows: 512,
            draw_on_device: false,
            await_prompts: false,
            clock: default_clock(),
        }
    }
}

impl SchedulerOptions {
    /// For a GPU, which needs many rows to be fully occupied.
    pub fn gpu() -> SchedulerOptions {
        SchedulerOptions {
            chunk: 512,
            chunk_beside: 512,
            ..SchedulerOptions::default()
        }
    }

    /// Maximum tokens of prompts in a step that gives other answers a token, when `n_prompts` wait.
    fn beside(&self, n_prompts: usize) -> usize {
        let wanted = n_prompts.saturating_mul(BESIDE_EACH).min(self.chunk);
        wanted.max(self.chunk_beside).max(1)
    }
}

#[cfg(not(target_family = "wasm"))]
fn default_clock() -> Option<fn() -> Duration> {
    use std::sync::LazyLock;
    use std::time::Instant;

    static BEGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
    Some(|| BEGIN.elapsed())
}

#[cfg(target_family = "wasm")]
fn default_clock() -> Option<fn() -> Duration> {
    None
}

/// A sequence of a [`Scheduler`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

/// Sequences that answer requests in shared steps.
pub struct Scheduler<B: Backend> {
    slots: Vec<Slot<B>>,
    options: SchedulerOptions,
    next_id: u64,
    n_steps: u64,
    /// Steps up to now in which longer prompts had nothing beside short ones.
    n_short_steps: u32,
    /// The models of the last steps, and the last step of each.
    turns: Vec<(ModelId, u64)>,
}

/// Where a model is in memory. Of one that is gone, another may get the same: it then waits for a turn as if it had had
/// one.
type ModelId = usize;

/// Steps after which it doesn't matter which models had them.
const REMEMBERED: u64 = 1000;

struct Slot<B: Backend> {
    id: SequenceId,
    sequence: Sequence<B>,
    generator: Option<Generator>,
    /// How much of the output head had been read before the answer.
    head_before: HeadUse,
    /// Devices lost in this answer.
    n_losses: usize,
    /// Its device was lost.
    is_lost: bool,
    /// The last step that it took part in.
    served: u64,
}

/// A sequence's part of a step.
struct Part {
    /// The index of its slot.
    slot: usize,
    /// Maximum tokens.
    max_ids: usize,
    /// It computes the prompt.
    is_prompt: bool,
    /// It recomputes what was lost, which the generator doesn't notice.
    is_again: bool,
}

/// The same, with what is needed to compute it.
struct Work<'a, B: Backend> {
    sequence: &'a mut Sequence<B>,
    ids: &'a [u32],
    logits: Logits,
    draw: Option<Draw<'a>>,
}

impl<B: Backend> Scheduler<B> {
    /// A scheduler without sequences.
    pub fn new(options: SchedulerOptions) -> Scheduler<B> {
        Scheduler {
            slots: Vec::new(),
            options,
            next_id: 0,
            n_steps: 0,
            n_short_steps: 0,
            turns: Vec::new(),
        }
    }

    /// Adds `sequence`. Only sequences of the same model share steps; models take turns, whether they have prompts or
    /// answers.
    pub fn add(&mut self, sequence: Sequence<B>) -> SequenceId {
        let id = SequenceId(self.next_id);
        self.next_id += 1;
        self.slots.push(Slot {
            id,
            sequence,
            generator: None,
            head_before: HeadUse::default(),
            n_losses: 0,
            is_lost: false,
            served: 0,
        });
        id
    }

    /// Removes `id`'s sequence and returns it, with the tokens that are part of it for certain.
    pub fn remove(&mut self, id: SequenceId) -> Option<Sequence<B>> {
        let index = self.slots.iter().position(|slot| slot.id == id)?;
        let mut slot = self.slots.remove(index);
        slot.finish();
        Some(slot.sequence)
    }

    /// Begins to answer `request` on the sequence `id`, whose previous answer is dropped. A common prefix
    /// with the prompt isn't computed again, and other tokens are dropped. Models whose layers have states don't
    /// speculate: what drafts leave behind can't be taken back without computing it again.
    ///
    /// Errors: those of [`Generator::new`], a token outside the vocabulary, no such sequence.
    pub fn start(&mut self, id: SequenceId, mut request: Request) -> Result<()> {
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) else {
            return Err(no_sequence(id));
        };
        slot.finish();
        let session = slot.sequence.session();
        let n_vocab = session.model().config().n_vocab;
        if session.model().config().has_states() {
            request.speculate = None;
        }
        let head_before = session.head_use().unwrap_or_default();
        let unknown = request.prompt.iter().position(|&id| id as usize >= n_vocab);
        let unknown = unknown.map(|index| EngineError::UnknownToken {
            id: request.prompt[index],
            index,
            n_vocab,
        });
        let mut generator = Generator::new(request, slot.sequence.ids(), slot.sequence.ctx_len())?;
        if let Some(error) = unknown {
            return Err(generator.in_place(error.into()));
        }
        slot.sequence.truncate(generator.n_held());
        generator.begin_at(slot.sequence.len());
        slot.set_merging(&mut generator, &self.options);
        slot.head_before = head_before;
        slot.n_losses = 0;
        slot.served = self.n_steps;
        slot.generator = Some(generator);
        Ok(())
    }

    /// Continues an answer that another scheduler began, of the same model, on the sequence `id`: what that lacks is
    /// computed first.
    ///
    /// Errors: the sequence has no room for the answer's tokens; there is no such sequence.
    pub fn resume(&mut self, id: SequenceId, mut generator: Generator) -> Result<()> {
        let Some(slot) = self.slots.iter_mut().find(|slot| slot.id == id) else {
            return Err(no_sequence(id));
        };
        slot.finish();
        if generator.n_held() > slot.sequence.ctx_len() {
            return Err(Error::new(
                ErrorCode::ContextFull,
                format!(
                    "expected a sequence of at least {} tokens, found one of {}",
                    generator.n_held(),
                    slot.sequence.ctx_len()
                ),
            ));
        }
        let held = slot.sequence.ids().iter().zip(generator.tokens());
        let n_common = held.take_while(|(held, wanted)| held == wanted).count();
        slot.sequence.truncate(n_common.min(generator.n_held()));
        slot.head_before = slot.sequence.session().head_use().unwrap_or_default();
        slot.n_losses = 0;
        slot.set_merging(&mut generator, &self.options);
        slot.generator = Some(generator);
        Ok(())
    }

    /// Removes the answer of the sequence `id`, complete or not; the sequence stays, with the tokens that are
    /// part of it for certain.
    pub fn finish(&mut self, id: SequenceId) -> Option<Generator> {
        let slot = self.slots.iter_mut().find(|slot| slot.id == id)?;
        slot.finish()
    }

    /// The answer of the sequence `id`.
    pub fn generator(&self, id: SequenceId) -> Option<&Generator> {
        self.slot(id)?.generator.as_ref()
    }

    /// The sequence `id`.
    pub fn sequence(&self, id: SequenceId) -> Option<&Sequence<B>> {
        Some(&self.slot(id)?.sequence)
    }

    /// The sequence `id`. Tokens truncated from it are recomputed if an answer needs them.
    pub fn sequence_mut(&mut self, id: SequenceId) -> Option<&mut Sequence<B>> {
        let slot = self.slots.iter_mut().find(|slot| slot.id == id)?;
        Some(&mut slot.sequence)
    }

    fn slot(&self, id: SequenceId) -> Option<&Slot<B>> {
        self.slots.iter().find(|slot| slot.id == id)
    }

    /// The sequences, in the order in which they were added.
    pub fn ids(&self) -> impl Iterator<Item = SequenceId> + '_ {
        self.slots.iter().map(|slot| slot.id)
    }

    /// True if no answer is in progress.
    pub fn is_idle(&self) -> bool {
        !self.slots.iter().any(Slot::is_running)
    }

    /// Computes the next tokens of as many answers as fit in a step: first of those being decoded, the ones that waited
    /// longest first, then of prompts, the shortest first, but none waits for long for shorter ones. Returns the
    /// events, and nothing, immediately, if there is nothing to do.
    ///
    /// An answer that fails ends with [`Event::Failed`], without affecting others: what can't be computed in
    /// a shared step is computed alone. If a device is lost, each answer that was computed there gets
    /// [`Event::DeviceLost`], and [`Scheduler::restore`] lets them continue; an answer that loses too many
    /// ends.
    /// Errors: the device can't be waited for; all answers are as before.
    pub fn step(&mut self) -> Result<Vec<(SequenceId, Event)>> {
        let parts = self.plan();
        let Some(first) = parts.first() else {
            return Ok(Vec::new());
        };
        let model = Arc::clone(self.slots[first.slot].sequence.session().model());
        let waited = model.backend().wait(self.step_parts(&parts));
        Ok(waited.map_err(EngineError::from)?)
    }

    /// [`Scheduler::step`] for callers that may not block: the device's results are awaited. If the future is
    /// dropped, all answers are as before.
    ///
    /// Errors: none at present; those of answers are events.
    pub async fn step_async(&mut self) -> Result<Vec<(SequenceId, Event)>> {
        let parts = self.plan();
        Ok(self.step_parts(&parts).await)
    }

    async fn step_parts(&mut self, parts: &[Part]) -> Vec<(SequenceId, Event)> {
        let begun = self.now();
        let mut computed = vec![(parts, self.compute(parts).await)];
        if parts.len() > 1
            && let (_, Err(error)) = &computed[0]
            && !error.is_lost()
        {
            // Alone, those fail that are to blame.
            computed.clear();
            for part in parts.chunks(1) {
                let given = self.compute_alone(&part[0]).await;
                let is_lost = given.as_ref().is_err_and(EngineError::is_lost);
                computed.push((part, given));
                if is_lost {
                    break;
                }
            }
        }
        // From here on nothing is awaited, so that no result gets lost.
        let mut events = Vec::new();
        for (parts, given) in computed {
            events.extend(match given {
                Ok(given) => self.give(parts, given, begun),
                Err(error) if error.is_lost() => self.lose(parts, &error),
                Err(error) => self.fail(parts, error),
            });
        }
        events
    }

    /// The part of each sequence in the next step, by index.
    fn plan(&mut self) -> Vec<Part> {
        let Scheduler {
            slots,
            options,
            n_steps,
            n_short_steps,
            turns,
            ..
        } = self;
        slots.iter_mut().for_each(Slot::settle);
        let mut order: Vec<usize> = (0..slots.len())
            .filter(|&slot| slots[slot].is_running())
            .collect();
        order.sort_by_key(|&slot| slots[slot].rank(*n_steps));
        // Those of other models wait for this step, too.
        let has_answers = order.iter().any(|&slot| !slots[slot].is_prompt());
        let mut parts: Vec<Part> = Vec::with_capacity(order.len());
        let mut room = options.max_rows.max(1);
        // The model that waited longest for a turn; of those that never had one, that of what comes first.
        let last_turn = |model| turns.iter().find(|turn| turn.0 == model).map(|turn| turn.1);
        let models = order.iter().map(|&slot| slots[slot].model());
        let Some(model) = models.min_by_key(|&model| last_turn(model)) else {
            return Vec::new();
        };
        order.retain(|&slot| slots[slot].model() == model);
        let n_prompts = order.iter().filter(|&&slot| slots[slot].is_prompt());
        let beside = options.beside(n_prompts.count());
        let (mut ends_short, mut is_without_long) = (false, false);
        for index in order {
            if room == 0 {
                break;
            }
            let slot = &mut slots[index];
            let (is_prompt, is_again) = (slot.is_prompt(), slot.is_again());
            // Prompts come behind answers, the shortest first.
            if is_prompt && has_answers {
                room = room.min(beside);
            }
            let is_short = slot.is_short_prompt(options.chunk / SHORT_SHARE);
            if is_prompt && !is_short && ends_short && *n_short_steps < MOST_SHORT_STEPS {
                is_without_long = true;
                break;
            }
            let max_ids = if is_prompt || is_again {
                room.min(options.chunk.max(1))
            } else {
                room
            };
            let Some(work) = slot.work(max_ids) else {
                continue;
            };
            ends_short |= is_short && work.logits != Logits::None;
            room -= work.ids.len();
            parts.push(Part {
                slot: index,
                max_ids,
                is_prompt,
                is_again,
            });
        }
        *n_short_steps = if is_without_long {
            *n_short_steps + 1
        } else {
            0
        };
        parts.sort_by_key(|part| part.slot);
        parts
    }

    /// Computes `parts`, in ascending order of slots; returns the result of each. All waiting for a device is
    /// here.
    async fn compute(&mut self, parts: &[Part]) -> Result<Vec<Given>, EngineError> {
        let draw_on_device = self.options.draw_on_device;
        let mut parts = parts.iter().peekable();
        let works = self
            .slots
            .iter_mut()
            .enumerate()
            .filter_map(|(index, slot)| {
                let part = parts.next_if(|part| part.slot == index)?;
                slot.work(part.max_ids)
            });
        let mut works: Vec<Work<'_, B>> = works.collect();
        let is_awaited =
            self.options.await_prompts && works.iter().all(|work| work.logits == Logits::None);
        let given = match &mut works[..] {
            [] => Vec::new(),
            [work] => vec![work.alone(draw_on_device).await?],
            works => {
                let n_left = works.iter().filter_map(|work| work.draw.as_ref());
                let wanted = n_left.map(|draw| draw.n_left).max().unwrap_or(1);
                let steps = works.iter_mut().map(|work| {
                    let sampling = work.sampling(draw_on_device);
                    let step = Step {
                        session: work.sequence.session_mut(),
                        ids: work.ids,
                        logits: work.logits,
                    };
                    (step, sampling)
                });
                let (mut steps, samplings): (Vec<Step<'_, B>>, Vec<_>) = steps.unzip();
                let decoded =
                    Session::decode_together_async(&mut steps, &samplings, wanted).await?;
                decoded.into_iter().map(given).collect()
            }
        };
        if let (true, Some(work)) = (is_awaited, works.first()) {
            work.sequence.session().settle_async().await?;
        }
        for work in works {
            work.sequence.computed(work.ids);
        }
        Ok(given)
    }

    /// Computes `part` after a step with others has failed, and before it what that took from its sequence.
    async fn compute_alone(&mut self, part: &Part) -> Result<Vec<Given>, EngineError> {
        let again = Part {
            slot: part.slot,
            max_ids: self.options.chunk.max(1),
            is_prompt: false,
            is_again: true,
        };
        self.slots[part.slot].settle();
        while !part.is_again && self.slots[part.slot].is_again() {
            self.compute(slice::from_ref(&again)).await?;
        }
        self.compute(slice::from_ref(part)).await
    }

    /// Passes the results to the generators of `parts`.
    fn give(
        &mut self,
        parts: &[Part],
        given: Vec<Given>,
        begun: Option<Duration>,
    ) -> Vec<(SequenceId, Event)> {
        self.n_steps += 1;
        if let Some(part) = parts.first() {
            let (model, now) = (self.slots[part.slot].model(), self.n_steps);
            self.turns
                .retain(|&(other, last)| other != model && now - last < REMEMBERED);
            self.turns.push((model, now));
        }
        let events = self.choose(parts, given);
        let took = self.now().zip(begun);
        let took = took.map_or(Duration::ZERO, |(now, begun)| now.saturating_sub(begun));
        for part in parts {
            self.slots[part.slot].account(part.is_prompt, took);
        }
        events
    }

    /// Gives the generators of `parts`, in ascending order of slots, what was computed for them, and takes their events, in order. Tokens are chosen on all
    /// threads: each takes a pass over the vocabulary, and more where there are constraints.
    fn choose(&mut self, parts: &[Part], given: Vec<Given>) -> Vec<(SequenceId, Event)> {
        #[cfg(not(target_family = "wasm"))]
        let model = (parts.first())
            .map(|part| Arc::clone(self.slots[part.slot].sequence.session().model()));
        let mut parts = parts.iter().zip(given).peekable();
        let mut choices = Vec::with_capacity(parts.len());
        for (index, slot) in self.slots.iter_mut().enumerate() {
            if let Some((part, given)) = parts.next_if(|(part, _)| part.slot == index) {
                slot.served = self.n_steps;
                if let Some(generator) = &mut slot.generator {
                    choices.push((slot.id, generator, Some(given).filter(|_| !part.is_again)));
                }
            }
        }
        let choose = |(id, generator, given): &mut (SequenceId, &mut Generator, Option<Given>)| {
            if let Some(given) = given.take() {
                generator.give(given);
            }
            let mut events = Vec::new();
            take_events(*id, generator, &mut events);
            events
        };
        // In a browser constraints belong to one thread. Tokens that a device has chosen aren't worth waking others for, unless
        // what may follow them has to be found.
        #[cfg(not(target_family = "wasm"))]
        if let Some(model) = model
            && (choices.iter()).any(|(_, generator, given)| {
                matches!(given, Some(Given::Logits(_))) || generator.is_constrained()
            })
        {
            let events = model.backend().host().map_mut(&mut choices, choose);
            return events.into_iter().flatten().collect();
        }
        choices.iter_mut().flat_map(choose).collect()
    }

    /// Ends the answer of the one part that failed.
    fn fail(&mut self, parts: &[Part], error: EngineError) -> Vec<(SequenceId, Event)> {
        let mut events = Vec::new();
        if let [Part { slot, .. }] = *parts {
            let slot = &mut self.slots[slot];
            if let Some(generator) = &mut slot.generator {
                generator.fail(error.into());
            }
            slot.take_events(&mut events);
        }
        events
    }

    /// Handles the answers of a model whose device was lost while `parts` were computed.
    fn lose(&mut self, parts: &[Part], error: &EngineError) -> Vec<(SequenceId, Event)> {
        let mut events = Vec::new();
        let Some(first) = parts.first() else {
            return events;
        };
        let model = Arc::clone(self.slots[first.slot].sequence.session().model());
        let of_model = |slot: &&mut Slot<B>| Arc::ptr_eq(slot.sequence.session().model(), &model);
        for slot in self.slots.iter_mut().filter(of_model) {
            slot.is_lost = true;
            if !slot.is_running() {
                continue;
            }
            slot.n_losses += 1;
            let message = error.to_string();
            if slot.n_losses <= MAX_LOSSES {
                events.push((slot.id, Event::DeviceLost { message }));
            } else if let Some(generator) = &mut slot.generator {
                generator.fail(Error::new(ErrorCode::DeviceLost, message));
                slot.take_events(&mut events);
            }
        }
        events
    }

    /// Replaces every session whose device was lost by one that `open` returns for it, of the same model
    /// loaded again, with the same adapters. Their tokens are recomputed by the steps that follow, and
    /// answers continue exactly where they were.
    ///
    /// Errors: those of `open`; sessions that weren't replaced are then tried as they are, and lost again.
    pub fn restore<E>(
        &mut self,
        mut open: impl FnMut(&Session<B>) -> Result<Session<B>, E>,
    ) -> Result<(), E> {
        for slot in self.slots.iter_mut().filter(|slot| slot.is_lost) {
            slot.sequence = Sequence::new(open(slot.sequence.session())?);
            slot.head_before = HeadUse::default();
            slot.is_lost = false;
        }
        Ok(())
    }

    fn now(&self) -> Option<Duration> {
        self.options.clock.map(|clock| clock())
    }
}

fn no_sequence(id: SequenceId) -> Error {
    let found = id.0;
    Error::new(
        ErrorCode::InvalidRequest,
        format!("expected a sequence of this scheduler, found number {found}"),
    )
}

impl<B: Backend> Slot<B> {
    /// Whether there is something to compute.
    fn is_running(&self) -> bool {
        self.generator.as_ref().is_some_and(|g| !g.is_over())
    }

    fn model(&self) -> ModelId {
        Arc::as_ptr(self.sequence.session().model()).addr()
    }

    /// What comes first in a step, after `n_steps`, has less: an answer that is being decoded, the longer it waited; a
    /// prompt that waited for too long; a prompt, the shorter it is.
    fn rank(&self, n_steps: u64) -> (bool, usize, u64) {
        let left = self.generator.as_ref().map_or(0, Generator::n_prompt_left);
        let is_late = n_steps.saturating_sub(self.served) > PATIENCE;
        (left > 0, if is_late { 0 } else { left }, self.served)
    }

    /// Whether that is part of a prompt.
    fn is_prompt(&self) -> bool {
        self.generator
            .as_ref()
            .is_some_and(|generator| generator.n_prompt_left() > 0)
    }

    /// Whether that is all that has to be computed of a prompt, at most `most` tokens.
    fn is_short_prompt(&self, most: usize) -> bool {
        self.generator.as_ref().is_some_and(|generator| {
            let n_left = generator.n_prompt_left();
            (1..=most).contains(&n_left) && generator.stats().n_prefilled == 0
        })
    }

    /// Has the generator compute tokens one by one where a device draws them.
    fn set_merging(&self, generator: &mut Generator, options: &SchedulerOptions) {
        let samples = self.sequence.session().model().backend().samples();
        generator.merge_forced(!(samples && generator.may_draw(options.draw_on_device)));
    }

    /// Lets the sequence have no more than the generator counts on, and than a step left of it that failed or was dropped.
    fn settle(&mut self) {
        let n_held = self.generator.as_ref().map(Generator::n_held);
        self.sequence.truncate(n_held.unwrap_or(usize::MAX));
    }

    /// Whether the sequence lacks tokens that have to be recomputed.
    fn is_again(&self) -> bool {
        self.generator
            .as_ref()
            .is_some_and(|generator| self.sequence.len() < generator.n_held())
    }

    /// What has to be computed next, of at most `max_ids` tokens.
    fn work(&mut self, max_ids: usize) -> Option<Work<'_, B>> {
        let is_again = self.is_again();
        let Slot {
            sequence,
            generator,
            ..
        } = self;
        let generator = generator.as_mut()?;
        if is_again {
            let missing = &generator.tokens()[sequence.len()..generator.n_held()];
            let ids = &missing[..missing.len().min(max_ids)];
            return Some(Work {
                sequence,
                ids,
                logits: Logits::None,
                draw: None,
            });
        }
        let wanted = generator.wanted(max_ids)?;
        sequence.truncate(wanted.keep);
        Some(Work {
            sequence,
            ids: wanted.ids,
            logits: wanted.logits,
            draw: wanted.draw,
        })
    }

    fn take_events(&mut self, events: &mut Vec<(SequenceId, Event)>) {
        if let Some(generator) = &mut self.generator {
            take_events(self.id, generator, events);
        }
    }

    /// Adds a step to the statistics of the answer.
    fn account(&mut self, is_prompt: bool, took: Duration) {
        let head_use = self.sequence.session().head_use();
        if let Some(generator) = &mut self.generator {
            let stats = generator.stats_mut();
            stats.head_share = head_use.and_then(|used| used.since(&self.head_before).share());
            *(if is_prompt {
                &mut stats.prefill
            } else {
                &mut stats.decode
            }) += took;
        }
    }

    /// Removes the answer, and its drafts from the sequence.
    fn finish(&mut self) -> Option<Generator> {
        let generator = self.generator.take()?;
        self.sequence.truncate(generator.n_held());
        self.sequence.session_mut().discard_lookahead();
        Some(generator)
    }
}

/// Adds the events of an answer.
fn take_events(id: SequenceId, generator: &mut Generator, events: &mut Vec<(SequenceId, Event)>) {
    events.extend(std::iter::from_fn(|| generator.next_event()).map(|event| (id, event)));
}

impl<'a, B: Backend> Work<'a, B> {
    /// How a device may sample; at random only if `draws`.
    fn sampling(&self, draws: bool) -> Option<Sampling<'a>> {
        let draw = self.draw.as_ref()?;
        (draws || draw.sampling.config.temperature == 0.0).then_some(draw.sampling)
    }

    /// Computes it in a step of its own; the device may sample at random if `draws`.
    async fn alone(&mut self, draws: bool) -> Result<Given, EngineError> {
        let sampling = self.sampling(draws);
        let session = self.sequence.session_mut();
        Ok(match (sampling, &self.draw) {
            (Some(sampling), Some(draw)) => given(
                session
                    .decode_async(self.ids, sampling, draw.n_left)
                    .await?,
            ),
            _ => Given::Logits(session.forward_async(self.ids, self.logits).await?),
        })
    }
}

fn given(decoded: Decoded) -> Given {
    match decoded {
        Decoded::Token(chosen) => Given::Token(chosen),
        Decoded::Logits(logits) => Given::Logits(logits),
    }
}

#[cfg(all(test, feature = "native", not(target_family = "wasm")))]
mod tests {
    use std::path::Path;

    use sterna_engine::{Cpu, Model, Sampler, SamplerConfig, SessionOptions};

    use super::*;
    use crate::native::{loaded, opened};

    fn with_states() -> Arc<Model<Cpu>> {
        let testdata = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../testdata");
        let folder = testdata.join("reference-states/hf/lfm2");
        let (files, plan) = opened(&folder);
        loaded(&files, &plan).model
    }

    /// An answer; after 20 tokens its step has failed beside others, and left the sequence with `left` tokens at most, if
    /// that is said.
    fn answer(model: &Arc<Model<Cpu>>, left: Option<usize>) -> Vec<u32> {
        let session = Session::new(Arc::clone(model), SessionOptions::new(100)).unwrap();
        let prompt = (0..10).map(|i| 3 + i * 37 % 380).collect();
        let sampler = Sampler::new(SamplerConfig::default(), model.config().n_vocab).unwrap();
        let request = Request {
            max_tokens: 30,
            text: None,
            ..Request::new(prompt, sampler)
        };
        let mut scheduler = Scheduler::new(SchedulerOptions {
            chunk: 7,
            ..SchedulerOptions::default()
        });
        let id = scheduler.add(Sequence::new(session));
        scheduler.start(id, request).unwrap();
        while !scheduler.is_idle() {
            let n_told = scheduler.generator(id).unwrap().answer().len();
            let Some(left) = left.filter(|_| n_told == 20) else {
                scheduler.step().unwrap();
                continue;
            };
            let parts = scheduler.plan();
            let sequence = scheduler.sequence_mut(id).unwrap();
            sequence.session_mut().truncate(left);
            assert!(sequence.session().len() <= left && left < sequence.len());
            let given = model.backend().wait(scheduler.compute_alone(&parts[0]));
            scheduler.give(&parts, given.unwrap().unwrap(), None);
        }
        scheduler.finish(id).unwrap().answer().to_vec()
    }

    #[test]
    fn what_a_step_that_failed_took_of_a_sequence_is_computed_again() {
        let model = with_states();
        let expected = answer(&model, None);
        assert_eq!(expected.len(), 30);
        for left in [0, 10, 28] {
            assert_eq!(answer(&model, Some(left)), expected, "{left}");
        }
    }
}
