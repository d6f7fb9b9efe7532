//! The thread that computes, of one engine.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use sterna::generate::{Event, Request};
use sterna::receipt::{AdapterId, Setup};
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::{SavedSequence, Sequence};
use sterna::{Error, ErrorCode, Result};
use sterna_engine::{Backend, Session};

use super::aside::{Aside, Part, Task};
use super::dispatch::{Dispatch, Given, Report, names};
use super::models::{EngineModel, Table};
use super::prefix::{Candidate, Choice, Prefixes, choose, n_common};
use super::rates::{Copied, Rates};
use super::route::{Busy, Held, Kept, Key};
use super::tiers::{Computing, Fetch, Found, Identity, Tiers};
use super::{AdapterKey, Continued, Device, EngineOptions, Job, Output, Reply, Undelivered, Work};
use crate::metrics::{EngineFigures, Metrics, Tier};

pub(super) struct Worker<B: Backend> {
    /// Its place among the engines.
    number: usize,
    /// The kind of its device.
    kind: String,
    models: Arc<Table<B>>,
    options: EngineOptions,
    dispatch: Arc<Dispatch>,
    tiers: Arc<Tiers>,
    scheduler: Scheduler<B>,
    running: Vec<Running<B>>,
    /// What their sequences held when a job was last begun: they grow with each step, and what came since is added where
    /// it is looked for.
    held: Prefixes<Key, SequenceId>,
    /// Jobs whose beginnings are being read from disk, or wait to be restored.
    fetching: Vec<Fetching>,
    /// Sequences that were restored since the last step.
    n_restored: usize,
    /// Work that isn't an answer, of which a part is done between steps, each in turn.
    aside: VecDeque<Aside<B>>,
    /// Sequences that nobody uses, by when they were used last.
    idle: BTreeMap<u64, Idle<B>>,
    /// The same by their tokens.
    kept: Kept,
    /// What they take, as long as that is known.
    idle_bytes: Option<IdleBytes>,
    /// Whose sequences they are, if none but these are.
    idle_of: Option<Vec<Option<Named>>>,
    /// Counts uses.
    clock: u64,
    /// Jobs that could not be begun, as the device is lost.
    unbegun: Vec<Job>,
    /// Why nothing can be computed any more.
    lost: Option<String>,
    /// How quickly tokens of each model are computed, and copied.
    rates: HashMap<usize, Rates>,
    metrics: Arc<Metrics>,
}

/// What a sequence is computed by, and whose turn was taken.
pub(super) struct Of<B: Backend> {
    /// The number of the model.
    number: usize,
    pub(super) model: Arc<EngineModel<B>>,
    /// The adapter of its request.
    adapter: Option<Arc<AdapterKey>>,
    /// Model, generation, adapters and settings.
    pub(super) identity: Identity,
    key: usize,
}

impl<B: Backend> Of<B> {
    /// What tells its sequences from others.
    fn key(&self) -> Key {
        Key {
            // Without a claim on the adapter.
            of: Held::new(self.number, self.adapter.as_deref()),
            identity: self.identity,
            copy: Arc::as_ptr(&self.model).addr(),
        }
    }

    /// The same for receipts of answers.
    ///
    /// Errors: they aren't written; its weights were replaced.
    fn setup(&self) -> Result<Arc<Setup>> {
        let describe = self.model.describe.as_ref().ok_or_else(|| {
            Error::new(
                ErrorCode::Unsupported,
                "a receipt: expected a model that receipts are written of, found another",
            )
        });
        let mut setup = describe?(&self.model.adapted)?;
        if let Some(key) = &self.adapter {
            // One that is gone has no session either.
            setup.extend_adapters(self.model.adapters.id(key));
        }
        Ok(Arc::new(setup))
    }

    /// A job of it.
    fn job(self, work: Work, reply: Reply) -> Job {
        Job {
            model: self.number,
            adapter: self.adapter,
            key: self.key,
            work,
            // What was begun has it already.
            receipt: false,
            reply,
        }
    }
}

/// An answer in progress.
struct Running<B: Backend> {
    id: SequenceId,
    of: Of<B>,
    reply: Reply,
    busy: Busy,
    begun: Instant,
    /// Tokens of its prompt.
    n_prompt: usize,
    /// When its newest token came.
    last: Option<Instant>,
    /// It isn't counted any more.
    is_done: bool,
    /// Nothing else was computed since it began.
    is_alone: bool,
}

/// A job that begins once something was read.
struct Fetching {
    given: Given,
    /// What computes it, and has computed what it waits for.
    identity: Identity,
    awaited: Awaited,
}

/// What a job waits for.
enum Awaited {
    /// To be read.
    Read(Fetch),
    /// It is here, if it could be read; another was restored before it.
    Here(Option<ToRestore>),
}

/// What is to be copied to the engine.
struct ToRestore {
    saved: Arc<SavedSequence>,
    tier: Tier,
    /// How long reading it took.
    read: Duration,
}

/// What a job waited for, and what has computed it.
type WasFetched = (Identity, Option<ToRestore>);

struct Idle<B: Backend> {
    key: Key,
    model: Arc<EngineModel<B>>,
    sequence: Sequence<B>,
    /// Tokens of the prompt of its last answer.
    n_prompt: usize,
    /// The lengths by which it is found.
    parts: Vec<usize>,
}

/// What idle sequences take. What they have in common with others counts by how many these are: that changes as
/// sequences come and go, and as one that runs writes to a page that it shares, of which it has a copy then.
struct IdleBytes {
    n: u64,
    /// What runs and hasn't grown beyond these lengths since, so that it may share the page that it writes to next.
    growing: Vec<(SequenceId, usize)>,
}

/// What can be asked for by a model's number.
#[derive(PartialEq)]
struct Named {
    /// Tells copies of it apart, as [`Key`] does.
    copy: usize,
    generation: u64,
    adapters: Vec<usize>,
}

impl Named {
    fn of<B: Backend>(model: &Arc<EngineModel<B>>) -> Named {
        Named {
            copy: Arc::as_ptr(model).addr(),
            generation: model.adapted.model().generation(),
            adapters: model.adapters.keep_named(),
        }
    }

    /// Whether it has computed sequences of `key`.
    fn has(&self, key: &Key) -> bool {
        let is_named = |id: usize| self.adapters.contains(&id);
        self.copy == key.copy
            && self.generation == key.identity.generation
            && key.of.adapter.is_none_or(is_named)
    }
}

/// A sequence that a prompt may continue.
#[derive(Debug, Clone, Copy)]
enum Place {
    /// An idle one, last used then.
    Idle(u64),
    Running(SequenceId),
}

/// What tells an adapter from those that compute something else.
fn form(id: &AdapterId) -> String {
    format!("{} {:?}", id.blake3, id.scale)
}

/// The lengths by which `sequence` is found: where it can be cut if its model has states, the longest first; otherwise
/// all of it, of which any part can be taken.
fn parts<B: Backend>(sequence: &Sequence<B>, is_whole: bool) -> Vec<usize> {
    let remembered = |len: usize| Some(sequence.session().len_within(len)).filter(|len| *len > 0);
    match is_whole {
        true => {
            let last = remembered(sequence.len());
            std::iter::successors(last, |len| remembered(len - 1)).collect()
        }
        false => vec![sequence.len()],
    }
}

/// Templates write the end of a prompt otherwise once the answer is a part of it: fewer tokens than this.
const REWRITTEN: usize = 8;

impl<B: Backend> Idle<B> {
    fn new(of: &Of<B>, sequence: Sequence<B>, n_prompt: usize) -> Idle<B> {
        Idle {
            key: of.key(),
            model: Arc::clone(&of.model),
            parts: parts(&sequence, of.identity.is_whole),
            sequence,
            n_prompt,
        }
    }

    /// Where a model has states, what the next turn begins with if its template writes past answers otherwise: the
    /// prompt, as far as states are remembered.
    fn beginning(&self) -> Option<Sequence<B>> {
        let len = self.n_prompt.checked_sub(REWRITTEN)?;
        let has_states = self.model.adapted.model().config().has_states();
        has_states.then(|| self.sequence.fork(len))
    }

    fn n_bytes(&self) -> u64 {
        self.model.cache_bytes(self.sequence.session().share())
    }

    /// Whether the model still has the weights that have computed it.
    fn is_current(&self) -> bool {
        self.model.adapted.model().generation() == self.key.identity.generation
    }
}

impl<B: Backend> Worker<B> {
    pub(super) fn new(
        device: &Device,
        models: Arc<Table<B>>,
        options: EngineOptions,
        (dispatch, tiers): (Arc<Dispatch>, Arc<Tiers>),
        metrics: Arc<Metrics>,
    ) -> Worker<B> {
        let scheduling = SchedulerOptions {
            chunk: options.chunk,
            chunk_beside: options.chunk_beside,
            // A chunk of prompts in a step, and a token of each answer.
            max_rows: options.chunk + options.parallel,
            // Its random numbers are those of seed and position, whatever else is in the step.
            draw_on_device: true,
            await_prompts: true,
            ..SchedulerOptions::default()
        };
        Worker {
            number: device.number,
            kind: device.kind.clone(),
            models,
            options,
            kept: dispatch.kept(device.number),
            dispatch,
            tiers,
            scheduler: Scheduler::new(scheduling),
            running: Vec::new(),
            held: Prefixes::default(),
            fetching: Vec::new(),
            n_restored: 0,
            aside: VecDeque::new(),
            idle: BTreeMap::new(),
            idle_bytes: None,
            idle_of: None,
            clock: 0,
            unbegun: Vec::new(),
            lost: None,
            rates: HashMap::new(),
            metrics,
        }
    }

    /// Computes until the other side is gone and all is answered, or the device is lost; whether it is.
    pub(super) fn run(mut self) -> bool {
        loop {
            let report = self.report();
            let Some(given) = self.dispatch.exchange(self.number, report) else {
                self.save_all();
                return false;
            };
            self.n_restored = 0;
            self.begin_fetched();
            self.begin(given);
            self.work_aside();
            self.step();
            if let Some(message) = self.lost.take() {
                self.hand_back(&message);
                return true;
            }
            self.drop_abandoned();
            self.forget();
            #[cfg(test)]
            self.dispatch.wait_while_held(self.number);
        }
    }

    /// Ends what nobody waits for any more. What was computed stays.
    fn drop_abandoned(&mut self) {
        for at in (0..self.running.len()).rev() {
            if self.running[at].reply.is_closed() {
                self.metrics.cancelled.inc();
                self.end(at);
            }
        }
        for at in (0..self.aside.len()).rev() {
            if self.aside[at].reply.is_closed()
                && let Some(aside) = self.aside.remove(at)
            {
                self.done(&aside.busy);
            }
        }
        for at in (0..self.fetching.len()).rev() {
            if self.fetching[at].given.job.reply.is_closed() {
                let Fetching { given, .. } = self.fetching.remove(at);
                self.metrics.cancelled.inc();
                self.done(&given.busy);
            }
        }
    }

    /// Records that a job is done.
    fn done(&self, busy: &Busy) {
        self.dispatch.done(self.number, busy);
    }

    /// Gives all that isn't done to other engines.
    fn hand_back(mut self, message: &str) {
        let mut jobs = Vec::new();
        for running in std::mem::take(&mut self.running) {
            let Running {
                id,
                of,
                reply,
                begun,
                last,
                ..
            } = running;
            // What was to be said is said; what follows is computed elsewhere.
            if let Some(generator) = self.scheduler.finish(id) {
                let continued = Continued {
                    generator,
                    begun,
                    last,
                };
                jobs.push(of.job(Work::Continue(Box::new(continued)), reply));
            }
        }
        let aside = std::mem::take(&mut self.aside);
        let aside = aside.into_iter().map(|aside| {
            let Aside {
                of, reply, task, ..
            } = aside;
            of.job(task.work(), reply)
        });
        jobs.extend(aside);
        let fetching = std::mem::take(&mut self.fetching);
        jobs.extend(fetching.into_iter().map(|fetching| fetching.given.job));
        jobs.append(&mut self.unbegun);
        self.dispatch.lose(self.number, jobs, message);
    }

    /// Begins the jobs that it was given.
    fn begin(&mut self, given: Vec<Given>) {
        for given in given {
            self.begin_with(given, None);
        }
    }

    /// Begins those whose beginnings were read, or can't be.
    fn begin_fetched(&mut self) {
        for fetching in std::mem::take(&mut self.fetching) {
            let Fetching {
                given,
                identity,
                awaited,
            } = fetching;
            let copy = match awaited {
                Awaited::Here(copy) => copy,
                Awaited::Read(fetch) => match fetch.get() {
                    Some(read) => read.map(|(saved, read)| ToRestore {
                        saved,
                        tier: Tier::Disk,
                        read,
                    }),
                    None => {
                        self.wait_for(given, identity, Awaited::Read(fetch));
                        continue;
                    }
                },
            };
            match copy.is_none() || self.may_restore() {
                true => self.begin_with(given, Some((identity, copy))),
                false => self.wait_for(given, identity, Awaited::Here(copy)),
            }
        }
    }

    fn wait_for(&mut self, given: Given, identity: Identity, awaited: Awaited) {
        self.fetching.push(Fetching {
            given,
            identity,
            awaited,
        });
    }

    /// Whether a sequence may be restored before the next step: one, as long as there are answers that wait for that.
    fn may_restore(&self) -> bool {
        self.n_restored == 0 || self.running.is_empty() && self.aside.is_empty()
    }

    /// Begins a job, with what it has waited for.
    fn begin_with(&mut self, given: Given, fetched: Option<WasFetched>) {
        let (busy, reply) = (given.busy.clone(), given.job.reply.clone());
        let Some(model) = self.models.get(given.job.model) else {
            // It has gone meanwhile.
            self.dispatch.give_back(self.number, given);
            return;
        };
        if let Err(error) = self.begin_job(model, given, fetched) {
            self.done(&busy);
            // Whoever is gone needn't be told.
            let _ = reply.send(Output::Failed(error));
        }
    }

    /// A job fails, or waits for another engine if that is because of the device.
    fn refuse(&mut self, job: Job, error: Error) -> Result<()> {
        if error.code() != ErrorCode::DeviceLost {
            return Err(error);
        }
        self.unbegun.push(job);
        self.lost.get_or_insert(error.to_string());
        Ok(())
    }

    fn begin_job(
        &mut self,
        model: Arc<EngineModel<B>>,
        given: Given,
        fetched: Option<WasFetched>,
    ) -> Result<()> {
        let of = self.of(model, &given.job);
        let wanted = match &given.job.work {
            Work::Generate(request) => Some(&request.prompt[..]),
            Work::Continue(continued) => {
                let generator = &continued.generator;
                Some(&generator.tokens()[..generator.n_held()])
            }
            Work::Score { .. } | Work::Embed { .. } => None,
        };
        let sequence = match wanted {
            None => self.empty(&of).map(|sequence| (sequence, Tier::Engine)),
            Some(prompt) => {
                let copy = match fetched {
                    Some((identity, copy)) => copy.filter(|_| identity == of.identity),
                    None => match self.find(&of, prompt) {
                        Some(Found::Here(saved, tier)) => {
                            let copy = ToRestore {
                                saved,
                                tier,
                                read: Duration::ZERO,
                            };
                            if !self.may_restore() {
                                self.wait_for(given, of.identity, Awaited::Here(Some(copy)));
                                return Ok(());
                            }
                            Some(copy)
                        }
                        Some(Found::Fetched(fetch)) => {
                            self.wait_for(given, of.identity, Awaited::Read(fetch));
                            return Ok(());
                        }
                        None => None,
                    },
                };
                let restored = copy.and_then(|copy| {
                    let restored = self.restore(&of, &copy)?;
                    Some(restored.map(|sequence| (sequence, copy.tier)))
                });
                restored.unwrap_or_else(|| {
                    let held = self.sequence_for(&of, prompt);
                    held.map(|sequence| (sequence, Tier::Engine))
                })
            }
        };
        let Given { job, busy } = given;
        let (sequence, tier) = match sequence {
            Ok(sequence) => sequence,
            Err(error) => return self.refuse(job, error),
        };
        let Job {
            work,
            receipt,
            reply,
            ..
        } = job;
        let task = match work {
            Work::Generate(mut request) => {
                if receipt {
                    request.receipt = Some(of.setup()?);
                }
                return self.begin_answer(of, (sequence, tier), *request, reply, busy);
            }
            Work::Continue(continued) => {
                return self.go_on(of, sequence, *continued, reply, busy);
            }
            Work::Score { ids, n_top } => Task::score(ids, n_top, sequence),
            Work::Embed {
                texts,
                pooling,
                normalised,
            } => Task::embed(texts, pooling, normalised, sequence),
        };
        self.compute_more();
        self.aside.push_back(Aside {
            of,
            reply,
            busy,
            task,
        });
        Ok(())
    }

    fn begin_answer(
        &mut self,
        of: Of<B>,
        (sequence, tier): (Sequence<B>, Tier),
        request: Request,
        reply: Reply,
        busy: Busy,
    ) -> Result<()> {
        let n_prompt = request.prompt.len();
        let id = self.scheduler.add(sequence);
        if let Err(error) = self.scheduler.start(id, request) {
            self.keep(&of, id, 0);
            return Err(error);
        }
        let generator = self.scheduler.generator(id);
        let n_cached = generator.map_or(0, |answer| answer.stats().n_reused);
        self.metrics.prompt_tokens.inc_by(n_prompt as u64);
        self.metrics.cached_tokens.inc_by(n_cached as u64);
        if n_cached > 0 {
            self.metrics.count_cache_hit(tier, n_cached);
        }
        let is_alone = self.running.is_empty() && self.aside.is_empty();
        self.compute_more();
        // Whoever is gone is noticed before the next step.
        let _ = reply.send(Output::Begun {
            engine: self.number,
            n_prompt,
            n_cached,
        });
        self.add_running(Running {
            id,
            of,
            reply,
            busy,
            begun: Instant::now(),
            n_prompt,
            last: None,
            is_done: false,
            is_alone,
        });
        Ok(())
    }

    /// Records that something is computed besides the answers that have begun.
    fn compute_more(&mut self) {
        self.running.iter_mut().for_each(|own| own.is_alone = false);
    }

    /// Goes on with an answer that another engine began.
    fn go_on(
        &mut self,
        of: Of<B>,
        sequence: Sequence<B>,
        continued: Continued,
        reply: Reply,
        busy: Busy,
    ) -> Result<()> {
        let Continued {
            generator,
            begun,
            last,
        } = continued;
        let n_prompt = generator.stats().n_prompt;
        let id = self.scheduler.add(sequence);
        if let Err(error) = self.scheduler.resume(id, generator) {
            self.keep(&of, id, 0);
            return Err(error);
        }
        self.compute_more();
        self.add_running(Running {
            id,
            of,
            reply,
            busy,
            begun,
            n_prompt,
            last,
            is_done: false,
            is_alone: false,
        });
        Ok(())
    }

    /// What computes `job`, by `model`.
    fn of(&self, model: Arc<EngineModel<B>>, job: &Job) -> Of<B> {
        let adapter = job.adapter.clone();
        Of {
            number: job.model,
            identity: self.identity(job.model, &model, adapter.as_deref()),
            model,
            adapter,
            key: job.key,
        }
    }

    /// What the sequences of `model` with `adapter` are computed by now.
    fn identity(
        &self,
        number: usize,
        model: &EngineModel<B>,
        adapter: Option<&AdapterKey>,
    ) -> Identity {
        let (own, cache, ctx_len) = (&model.adapted, model.cache(), model.session.ctx_len);
        let adapter = adapter.map(|key| model.adapters.id(key));
        // One that is gone has no sequences.
        let adapter = adapter.map(|id| id.map_or(String::new(), |id| form(&id)));
        let (adapters, weights) = (own.adapters_digest(), model.weights);
        let settings = format!("{adapters} {adapter:?} {cache:?} {ctx_len} {weights}");
        Identity::of(&Computing {
            model: model.hash.as_deref(),
            number,
            generation: own.model().generation(),
            settings: &settings,
            device: &self.kind,
            has_states: own.model().config().has_states(),
        })
    }

    /// What the tiers have of `prompt`, if that is more than is held here.
    fn find(&mut self, of: &Of<B>, prompt: &[u32]) -> Option<Found> {
        let nearest = self.nearest(of, prompt);
        let n_held = nearest.map(|near| near.n_common).max().unwrap_or(0);
        // The last token is computed in any case.
        let (_, prompt) = prompt.split_last()?;
        let (dispatch, number) = (Arc::clone(&self.dispatch), self.number);
        let wake = move || dispatch.wake(number);
        let rates = self.rates.entry(of.number).or_default();
        let pays = |copied| rates.pays(copied);
        self.tiers.find(&of.identity, prompt, n_held, pays, wake)
    }

    /// A sequence with what was saved; `None` if that is refused, and everything else goes on without it.
    fn restore(&mut self, of: &Of<B>, copy: &ToRestore) -> Option<Result<Sequence<B>>> {
        let ToRestore { saved, tier, read } = copy;
        let mut sequence = match self.empty(of) {
            Ok(sequence) => sequence,
            Err(error) => return Some(Err(error)),
        };
        self.n_restored += 1;
        let begun = Instant::now();
        match sequence.restore_from(saved) {
            Ok(()) => {
                let took = *read + begun.elapsed();
                let rates = self.rates.entry(of.number).or_default();
                // What is on its way to disk is still in memory.
                let from = if read.is_zero() { Tier::Host } else { *tier };
                rates.copied(from, saved.n_bytes(), took);
                Some(Ok(sequence))
            }
            Err(error) if error.code() == ErrorCode::DeviceLost => Some(Err(error)),
            // It may be restored later, or by another engine.
            Err(error) if matches!(error.code(), ErrorCode::OutOfMemory | ErrorCode::Compute) => {
                None
            }
            Err(error) => {
                self.tiers.refuse(&of.identity, saved.ids(), &error);
                None
            }
        }
    }

    /// What has most in common with `prompt`, of the sequences that are idle and of those that aren't.
    fn nearest(&mut self, of: &Of<B>, prompt: &[u32]) -> impl Iterator<Item = Candidate<Place>> {
        let key = of.key();
        for running in self.running.iter().filter(|own| own.of.key() == key) {
            if let Some(ids) = held(&self.scheduler, running.id) {
                self.held.grow(key, running.id, ids);
            }
        }
        let idle = self.kept.nearest(&key, prompt).into_iter();
        let idle = idle.filter_map(|near| {
            let ((number, _), n) = (near.id, near.n_common);
            let ids = self.idle.get(&number)?.sequence.ids();
            // What is computed again, as its states aren't remembered, isn't lost.
            let n_again = n_common(&ids[n..], &prompt[n..]);
            Some(Candidate {
                id: Place::Idle(number),
                len: ids.len() - n_again,
                n_common: n,
                is_busy: false,
            })
        });
        let running = self.held.nearest(&key, prompt).and_then(|near| {
            let session = self.scheduler.sequence(near.id)?.session();
            Some(Candidate {
                id: Place::Running(near.id),
                len: near.len,
                // Where those that run have states isn't in the tree, since it changes with each step.
                n_common: session.len_within(near.n_common),
                is_busy: true,
            })
        });
        idle.chain(running)
    }

    /// A sequence for `prompt`: one that holds as much of it as possible.
    fn sequence_for(&mut self, of: &Of<B>, prompt: &[u32]) -> Result<Sequence<B>> {
        let held = match choose(self.nearest(of, prompt)) {
            // Others need one that runs as it is.
            Choice::Take(Place::Running(_)) | Choice::New => None,
            Choice::Take(Place::Idle(number)) => self.take_idle(number).map(|idle| idle.sequence),
            Choice::Fork(Place::Idle(number), len) => self.take_idle(number).map(|used| {
                let fork = used.sequence.fork(len);
                // It was of use.
                self.add_idle(used);
                fork
            }),
            Choice::Fork(Place::Running(id), len) => {
                let sequence = self.scheduler.sequence(id);
                sequence.map(|sequence| sequence.fork(len))
            }
        };
        match held {
            Some(sequence) => Ok(sequence),
            None => self.empty(of),
        }
    }

    /// Adds an idle sequence, which was used now.
    fn add_idle(&mut self, idle: Idle<B>) {
        self.clock += 1;
        self.put_idle(self.clock, idle);
    }

    /// Puts an idle sequence where it was.
    fn put_idle(&mut self, number: u64, idle: Idle<B>) {
        let ids = idle.sequence.ids();
        self.kept.insert(idle.key, number, ids, &idle.parts);
        self.idle.insert(number, idle);
        (self.idle_bytes, self.idle_of) = (None, None);
    }

    /// Takes an idle sequence.
    fn take_idle(&mut self, number: u64) -> Option<Idle<B>> {
        let idle = self.idle.remove(&number)?;
        self.idle_bytes = None;
        self.kept.remove(&idle.key, number, &idle.parts);
        Some(idle)
    }

    /// Takes the idle sequence that was used least recently.
    fn take_oldest(&mut self) -> Option<(u64, Idle<B>)> {
        let number = *self.idle.first_key_value()?.0;
        Some((number, self.take_idle(number)?))
    }

    /// Takes the answer at `at` out of those in progress.
    fn take_running(&mut self, at: usize) -> Running<B> {
        let running = self.running.remove(at);
        self.idle_bytes = None;
        self.held.remove(&running.of.key(), running.id);
        running
    }

    /// Adds an answer in progress.
    fn add_running(&mut self, running: Running<B>) {
        self.running.push(running);
        self.idle_bytes = None;
    }

    /// An empty sequence. Where there is no memory for it, idle ones make room.
    fn empty(&mut self, of: &Of<B>) -> Result<Sequence<B>> {
        loop {
            match self.session(of) {
                Ok(session) => return Ok(Sequence::new(session)),
                Err(error) => {
                    let Some((number, idle)) = self.take_oldest() else {
                        return Err(error);
                    };
                    self.save(number, idle);
                }
            }
        }
    }

    /// An empty session, with the adapters applied.
    fn session(&self, of: &Of<B>) -> Result<Session<B>> {
        let EngineModel {
            adapted,
            session,
            adapters,
            ..
        } = &*of.model;
        let mut session = adapted.session(*session)?;
        if let Some(key) = &of.adapter {
            let adapter = adapters.get(key, self.number).ok_or_else(|| {
                let name = &key.name;
                Error::new(ErrorCode::NotFound, format!("the adapter `{name}` is gone"))
            })?;
            let mut all = session.adapters().to_vec();
            all.push(adapter);
            session.set_adapters(all)?;
        }
        Ok(session)
    }

    /// Computes the next tokens of all answers, and delivers them.
    fn step(&mut self) {
        #[cfg(test)]
        if let Some(n_tokens) = self.dispatch.doom_of(self.number)
            && self.running.iter().any(|running| {
                let answer = self.scheduler.generator(running.id);
                answer.is_some_and(|answer| answer.answer().len() >= n_tokens)
            })
        {
            self.lost = Some("a test wants it lost".to_owned());
            return;
        }
        let events = match self.scheduler.step() {
            Ok(events) => events,
            // It can't be waited for.
            Err(error) => {
                self.lost = Some(error.to_string());
                return;
            }
        };
        for (id, event) in events {
            let Some(at) = self.running.iter().position(|running| running.id == id) else {
                continue;
            };
            self.deliver(at, event);
        }
    }

    /// Delivers an event of the answer at `at`.
    fn deliver(&mut self, at: usize, event: Event) {
        let running = &mut self.running[at];
        let output = match event {
            Event::Token(token) => {
                let now = Instant::now();
                let metrics = &self.metrics;
                metrics.generated_tokens.inc();
                match running.last.replace(now) {
                    None => {
                        metrics.first_token.observe(seconds(running.begun, now));
                        let generator = self.scheduler.generator(running.id);
                        let n_computed = generator.map_or(0, |answer| answer.stats().n_prefilled);
                        if running.is_alone {
                            let rates = self.rates.entry(running.of.number).or_default();
                            rates.computed(n_computed, now - running.begun);
                        }
                    }
                    Some(last) => metrics.next_token.observe(seconds(last, now)),
                }
                Output::Token(token)
            }
            Event::Ended { reason, text } => {
                let generator = self.scheduler.generator(running.id);
                Output::Ended {
                    reason,
                    text,
                    stats: generator.map(|answer| *answer.stats()).unwrap_or_default(),
                    receipt: generator.and_then(|answer| answer.receipt()).map(Box::new),
                }
            }
            Event::Failed(error) => Output::Failed(error),
            Event::DeviceLost { message } => {
                self.lost.get_or_insert(message);
                return;
            }
            // Events that are not known here change nothing.
            _ => return,
        };
        let is_last = !matches!(output, Output::Token(_));
        let failed = matches!(output, Output::Failed(_));
        if is_last {
            // Before anybody can ask for what follows.
            running.is_done = true;
            if !failed {
                running.busy.n_left = 0;
            }
            self.dispatch.done(self.number, &running.busy);
            let took = running.begun.elapsed();
            self.metrics.answer.observe(took.as_secs_f64());
            self.dispatch.took(took);
        }
        let sent = running.reply.send(output);
        match sent {
            Ok(()) if !is_last => {}
            // What failed isn't built upon.
            _ if failed => {
                let running = self.take_running(at);
                self.scheduler.remove(running.id);
            }
            Ok(()) => self.end(at),
            Err(undelivered) => {
                match undelivered {
                    Undelivered::Slow => self.metrics.slow.inc(),
                    Undelivered::Gone => self.metrics.cancelled.inc(),
                };
                self.end(at);
            }
        }
    }

    /// Ends the answer at `at`, complete or not; its sequence is kept.
    fn end(&mut self, at: usize) {
        let running = self.take_running(at);
        if !running.is_done {
            self.done(&running.busy);
        }
        self.keep(&running.of, running.id, running.n_prompt);
    }

    /// Keeps the sequence `id` for prompts to come, after an answer to a prompt of `n_prompt` tokens.
    fn keep(&mut self, of: &Of<B>, id: SequenceId, n_prompt: usize) {
        if let Some(sequence) = self.scheduler.remove(id)
            && !sequence.is_empty()
        {
            self.keep_sequence(of, sequence, n_prompt);
        }
    }

    fn keep_sequence(&mut self, of: &Of<B>, sequence: Sequence<B>, n_prompt: usize) {
        let now = self.identity(of.number, &of.model, of.adapter.as_deref());
        if now != of.identity {
            // Its weights were replaced while it was computed.
            return;
        }
        self.add_idle(Idle::new(of, sequence, n_prompt));
    }

    /// Does a part of what isn't an answer.
    fn work_aside(&mut self) {
        let Some(first) = self.aside.pop_front() else {
            return;
        };
        // It is in the way of answers as a prompt is.
        let chunk = match self.running.is_empty() {
            true => self.options.chunk,
            false => self.options.chunk_beside,
        };
        let chunk = chunk.max(1);
        let others = self.aside.iter().position(|other| !first.may_join(other));
        let n_others = others.unwrap_or(self.aside.len());
        let mut together: Vec<_> = [first]
            .into_iter()
            .chain(self.aside.drain(..n_others))
            .collect();
        let mut parts = Aside::parts(&mut together, chunk);
        if parts.is_err() && together.len() > 1 {
            // Whose fault it is shows when each is computed by itself.
            together
                .drain(1..)
                .rev()
                .for_each(|other| self.aside.push_front(other));
            parts = Aside::parts(&mut together, chunk);
        }
        match parts {
            Ok(parts) => {
                let mut untouched = Vec::new();
                for (aside, part) in together.into_iter().zip(parts) {
                    match part {
                        Part::Some => self.aside.push_back(aside),
                        Part::Nothing => untouched.push(aside),
                        Part::Last => {
                            let busy = aside.busy.clone();
                            if let Task::Score(score) = aside.task {
                                self.keep_sequence(&aside.of, score.sequence, 0);
                            }
                            self.done(&busy);
                        }
                    }
                }
                let untouched = untouched.into_iter().rev();
                untouched.for_each(|aside| self.aside.push_front(aside));
            }
            Err(error) if error.code() == ErrorCode::DeviceLost => {
                self.lost.get_or_insert(error.to_string());
                let together = together.into_iter().rev();
                together.for_each(|aside| self.aside.push_front(aside));
            }
            Err(error) => {
                // The only one: of several, others are left.
                if let Some(Aside { reply, busy, .. }) = together.pop() {
                    let _ = reply.send(Output::Failed(error));
                    self.done(&busy);
                }
            }
        }
    }

    /// Forgets idle sequences, the least recently used first, until the rest has room. What there are lower tiers for
    /// is saved there: one after a step, as long as there are answers that wait for the next.
    fn forget(&mut self) {
        let mut may_save = usize::MAX;
        if !self.running.is_empty() || !self.aside.is_empty() {
            may_save = 1;
        }
        // Nobody can ask for those of models that are gone, or of adapters, or of weights that were replaced.
        let models = self.models.all();
        let named = models.iter().map(|own| own.as_ref().map(Named::of));
        let named: Vec<_> = named.collect();
        // Copies that are gone are not to be held for longer.
        drop(models);
        let mut gone: Vec<u64> = Vec::new();
        if self.idle_of.as_ref() != Some(&named) {
            let is_named = |key: &Key| {
                let own = named.get(key.of.model).and_then(Option::as_ref);
                own.is_some_and(|own| own.has(key))
            };
            let idle = self.idle.iter();
            let idle = idle.filter(|(_, idle)| !is_named(&idle.key));
            gone.extend(idle.map(|(number, _)| *number));
            self.idle_of = Some(named);
        }
        // The model may come back.
        for number in gone.into_iter().rev() {
            if let Some(idle) = self.take_idle(number)
                && may_save > 0
                && self.save(number, idle)
            {
                may_save -= 1;
            }
        }
        let limit = self.options.cache_bytes;
        let mut used = self.n_bytes();
        while used > limit && !self.idle.is_empty() {
            // Those that wait to be saved are a little too much for as long, but no more than that.
            if may_save == 0 && used <= limit + limit / 4 {
                break;
            }
            if let Some((number, idle)) = self.take_oldest()
                && may_save > 0
                && self.save(number, idle)
            {
                may_save -= 1;
            }
            used = self.n_bytes();
        }
        let adapters = self.running.iter();
        let adapters = adapters.filter_map(|running| running.of.adapter.as_ref());
        let figures = EngineFigures {
            n_running: self.running.len() + self.aside.len() + self.fetching.len(),
            cache_bytes: used,
            n_sequences: self.idle.len(),
            adapters: names(adapters),
        };
        self.metrics.set_engine(self.number, figures);
    }

    /// Bytes of all sequences; what several have in common counts once.
    fn n_bytes(&mut self) -> u64 {
        let idle = self.idle_bytes();
        let busy = self.running.iter().map(|running| {
            let sequence = self.scheduler.sequence(running.id);
            let n_tokens = sequence.map_or(0, |sequence| sequence.session().share());
            running.of.model.cache_bytes(n_tokens)
        });
        idle + busy.sum::<u64>()
    }

    /// Those of idle sequences: of thousands, they are counted only if they may have changed.
    fn idle_bytes(&mut self) -> u64 {
        let count = || self.idle.values().map(Idle::n_bytes).sum();
        let len = |id: SequenceId| self.scheduler.sequence(id).map_or(0, |own| own.len());
        let growing = match &self.idle_bytes {
            Some(known) if known.growing.is_empty() => {
                debug_assert_eq!(known.n, count());
                return known.n;
            }
            Some(known) => {
                let growing = known.growing.iter().copied();
                growing.filter(|(id, old)| len(*id) <= *old).collect()
            }
            None => {
                let running = self.running.iter();
                running.map(|own| (own.id, len(own.id))).collect()
            }
        };
        let n = count();
        self.idle_bytes = Some(IdleBytes { n, growing });
        n
    }

    /// Saves what `idle` holds in the tiers below, if they lack it; whether that took the time of a step.
    ///
    /// Of a model with states that is two sequences. The first of them to be saved leaves the other one idle.
    fn save(&mut self, number: u64, mut idle: Idle<B>) -> bool {
        if !idle.is_current() {
            return false;
        }
        let identity = idle.key.identity;
        let model = Arc::clone(&idle.model);
        if let Some(mut beginning) = idle.beginning()
            && self.is_to_be_kept(&idle, &beginning)
        {
            self.save_sequence(&identity, &model, &mut beginning);
            idle.n_prompt = 0;
            self.put_idle(number, idle);
            return true;
        }
        // The proof that it is the model's takes the room of a token.
        let sequence = &mut idle.sequence;
        sequence.truncate(sequence.ctx_len() - 1);
        let is_kept = self.is_to_be_kept(&idle, &idle.sequence);
        if is_kept {
            self.save_sequence(&identity, &model, &mut idle.sequence);
        }
        is_kept
    }

    /// Whether the tiers lack `sequence`, which is `idle` or its beginning, and it would pay to copy it back.
    fn is_to_be_kept(&mut self, idle: &Idle<B>, sequence: &Sequence<B>) -> bool {
        let n_tokens = sequence.len();
        let copied = Copied {
            tier: self.tiers.first(),
            n_bytes: idle.model.cache_bytes(n_tokens),
            n_tokens,
            n_saved: n_tokens,
        };
        let Held { model, .. } = idle.key.of;
        let rates = self.rates.entry(model).or_default();
        self.tiers.lacks(&idle.key.identity, sequence.ids()) && rates.pays(copied)
    }

    fn save_sequence(
        &mut self,
        identity: &Identity,
        model: &EngineModel<B>,
        sequence: &mut Sequence<B>,
    ) {
        let n_bytes = model.cache_bytes(sequence.len());
        self.compute_more();
        match sequence.snapshot(n_bytes) {
            // Weights may have been replaced meanwhile.
            Ok(saved) if model.adapted.model().generation() == identity.generation => {
                self.tiers.put(identity, saved);
            }
            Ok(_) => {}
            Err(error) if error.code() == ErrorCode::DeviceLost => {
                self.lost.get_or_insert(error.to_string());
            }
            Err(error) => self.tiers.tell_unsaved(&error),
        }
    }

    /// Saves all idle sequences, before the engine ends.
    fn save_all(&mut self) {
        while self.lost.is_none() && !self.idle.is_empty() {
            self.tiers.settle();
            if let Some((number, idle)) = self.take_oldest() {
                self.save(number, idle);
            }
        }
    }

    /// What it has.
    fn report(&mut self) -> Report {
        for running in &mut self.running {
            let generator = self.scheduler.generator(running.id);
            running.busy.n_left = generator.map_or(0, |answer| answer.n_prompt_left());
        }
        for aside in &mut self.aside {
            aside.busy.n_left = aside.task.n_left();
        }
        let running = self.running.iter().map(|running| &running.busy);
        let aside = self.aside.iter().map(|aside| &aside.busy);
        let fetching = self.fetching.iter();
        let fetching = fetching.map(|fetching| &fetching.given.busy);
        let is_read = |fetching: &Fetching| matches!(fetching.awaited, Awaited::Here(..));
        let is_waiting =
            self.running.is_empty() && self.aside.is_empty() && !self.fetching.iter().any(is_read);
        Report {
            busy: running.chain(aside).chain(fetching).cloned().collect(),
            is_waiting,
        }
    }
}

/// The tokens that the sequence of an answer holds for certain.
fn held<B: Backend>(scheduler: &Scheduler<B>, id: SequenceId) -> Option<&[u32]> {
    let ids = scheduler.sequence(id)?.ids();
    let n_held = scheduler.generator(id)?.n_held();
    Some(&ids[..n_held.min(ids.len())])
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}
