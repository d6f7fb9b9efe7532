//! The queue that all engines take from.
//!
//! What waits is here and nowhere else: an engine is handed a job only when it has room for it. Whoever changes
//! something, by submitting jobs or by reporting what an engine has, hands out what may go by that.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use serde_json::json;
use sterna::{Error, ErrorCode, Result};

use super::fair::FairQueue;
use super::route::{Busy, Kept, Offer, Route, route};
use super::{AdapterKey, EngineOptions, Job, Output, Refused};
use crate::metrics::Metrics;
use crate::settings::{Log, tell};

/// The queue, and what is known of the engines.
pub(super) struct Dispatch {
    state: Mutex<State>,
    /// There are jobs for an engine, models are gone, or nothing more comes.
    changed: Condvar,
    /// There may be something to load or to unload.
    errands: Condvar,
    options: EngineOptions,
    metrics: Arc<Metrics>,
    log: Log,
}

struct State {
    queue: FairQueue<Given>,
    engines: Vec<Place>,
    models: Vec<ModelState>,
    /// Counts what is begun and done, to tell what was last.
    clock: u64,
    /// Nobody can submit any more.
    is_closed: bool,
    /// How long answers took lately.
    answer_ms: u64,
}

/// An engine, as seen from the queue.
#[derive(Default)]
struct Place {
    /// The name of its device.
    device: String,
    /// Its device is lost.
    lost: Option<Lost>,
    /// How often its device was lost, or could not be opened again, since it last did a job.
    n_failures: usize,
    #[cfg(test)]
    test: ForTests,
    /// Jobs that it has and hasn't done, by the number of their model.
    n_jobs_of: Vec<usize>,
    /// It has to look at what it has: models are gone, or what it waits for is there.
    has_to_look: bool,
    /// Those that it hasn't looked at.
    given: Vec<Given>,
    /// Those that aren't in its report yet.
    taken: Vec<Busy>,
    /// Those that it has done since its report.
    done: Vec<Busy>,
    report: Report,
    kept: Kept,
}

/// What tests do to an engine.
#[cfg(test)]
#[derive(Debug, Default)]
struct ForTests {
    /// It loses its device before its next step, once one of its answers has so many tokens.
    doom: Option<usize>,
    /// It waits after each step.
    is_held: bool,
}

/// What becomes of an engine whose device is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    /// The device is to be opened again then.
    Until(Instant),
    /// It is being opened.
    Opening,
    /// It comes back no more.
    ForGood,
}

/// What there is of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) enum Stage {
    /// Nothing; it is loaded when a request names it.
    #[default]
    Unloaded,
    /// It is being loaded.
    Loading,
    /// It answers.
    Loaded,
    /// It is being unloaded.
    Unloading,
}

/// A model, as seen from the queue.
#[derive(Default)]
struct ModelState {
    name: String,
    /// Bytes on each engine.
    bytes: u64,
    can_load: bool,
    stage: Stage,
    /// Copies on engines, also of those that only end what they have begun.
    n_copies: usize,
    /// It isn't unloaded to make room.
    is_pinned: bool,
    /// Adapters that were loaded by request, which would be gone with it.
    n_adapters: usize,
    /// When it was last used.
    last_used: u64,
    /// The same by the clock; `None` until it is loaded.
    used_at: Option<Instant>,
    /// How often its weights were replaced since it was loaded.
    generation: u64,
    /// It begins nothing more, as another one waits for its memory.
    is_draining: bool,
    /// It is to be unloaded.
    is_unwanted: bool,
    /// Who waits for it to be loaded, beside jobs.
    load_waits: Vec<oneshot::Sender<Result<()>>>,
    /// Who waits for it to be unloaded.
    unload_waits: Vec<oneshot::Sender<()>>,
}

/// What is to be done about models.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Errand {
    Load {
        number: usize,
        /// The numbers of the engines that live.
        engines: Vec<usize>,
    },
    Unload {
        number: usize,
        reason: Reason,
    },
    /// Opens the lost device of an engine again, with all models.
    Reopen {
        engine: usize,
    },
}

/// Why a model is unloaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reason {
    /// It was asked for.
    Request,
    /// Another one needs its memory.
    Memory,
    /// Nobody has used it for a while.
    Idle,
}

/// What there is of a model, to be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Standing {
    pub(crate) stage: Stage,
    /// It has to stay.
    pub(crate) is_pinned: bool,
    /// How often its weights were replaced since it was loaded.
    pub(crate) generation: u64,
}

/// A job, and what it makes an engine do.
pub(super) struct Given {
    pub(super) job: Job,
    pub(super) busy: Busy,
}

impl From<Job> for Given {
    fn from(job: Job) -> Given {
        let busy = Busy::new(&job);
        Given { job, busy }
    }
}

/// What an engine has.
#[derive(Debug, Default)]
pub(super) struct Report {
    pub(super) busy: Vec<Busy>,
    /// It has nothing to compute before something is read that it waits for.
    pub(super) is_waiting: bool,
}

impl ModelState {
    /// Whether it takes memory, and not only until something has ended.
    fn is_here(&self) -> bool {
        matches!(self.stage, Stage::Loading | Stage::Loaded)
    }

    /// Whether it may be unloaded without being asked to: all of it comes back when it is loaded again.
    fn may_go(&self) -> bool {
        self.can_load && !self.is_pinned && self.n_adapters == 0 && self.generation == 0
    }
}

impl Place {
    fn n_jobs(&self) -> usize {
        self.n_jobs_of.iter().sum()
    }

    fn lives(&self) -> bool {
        self.lost.is_none()
    }

    /// Whether it lives, or may live again.
    fn has_future(&self) -> bool {
        self.lost != Some(Lost::ForGood)
    }

    fn count(&mut self, model: usize) -> &mut usize {
        if self.n_jobs_of.len() <= model {
            self.n_jobs_of.resize(model + 1, 0);
        }
        &mut self.n_jobs_of[model]
    }

    /// Takes `busy` for done: what was computed is kept.
    fn forget(&mut self, busy: &Busy) {
        let is_other = |other: &Busy| other.id != busy.id;
        self.taken.retain(is_other);
        self.report.busy.retain(is_other);
        if busy.n_left == 0 {
            self.done.push(busy.clone());
        }
    }

    fn offer(&self) -> Offer<'_> {
        let given = self.given.iter().map(|given| &given.busy);
        let busy = self.report.busy.iter().chain(&self.taken).chain(given);
        Offer {
            kept: &self.kept,
            done: &self.done,
            busy: busy.collect(),
        }
    }
}

impl State {
    /// Jobs that wait or are being done.
    fn n_pending(&self) -> usize {
        let at_engines: usize = self.engines.iter().map(Place::n_jobs).sum();
        self.queue.len() + at_engines
    }

    fn n_alive(&self) -> usize {
        self.engines.iter().filter(|place| place.lives()).count()
    }

    /// Engines that live or may live again.
    fn n_with_future(&self) -> usize {
        let engines = self.engines.iter();
        engines.filter(|place| place.has_future()).count()
    }

    /// Nothing more can come.
    fn is_over(&self) -> bool {
        self.is_closed && self.queue.is_empty()
    }

    /// Whether `job` may be done now.
    fn is_ready(models: &[ModelState], job: &Job) -> bool {
        let model = models.get(job.model);
        model.is_some_and(|model| model.stage == Stage::Loaded && !model.is_draining)
    }

    /// Records that the model `number` is used.
    fn used(&mut self, number: usize) {
        self.clock += 1;
        if let Some(model) = self.models.get_mut(number) {
            model.last_used = self.clock;
            model.used_at = Some(Instant::now());
        }
    }

    /// Answers of the model `number` that engines are at.
    fn n_busy(&self, number: usize) -> usize {
        let jobs = self.engines.iter().map(|place| place.n_jobs_of.get(number));
        jobs.map(|n| n.copied().unwrap_or(0)).sum()
    }

    /// Drops what nobody waits for any more.
    fn forget_abandoned(&mut self) {
        self.queue.retain(|given| !given.job.reply.is_closed());
        for model in &mut self.models {
            model.load_waits.retain(|waits| !waits.is_closed());
        }
    }

    /// The model that is to be loaded next, if one is.
    fn wanted(&self) -> Option<usize> {
        let is_absent = |number: &usize| self.models[*number].stage == Stage::Unloaded;
        let asked = (0..self.models.len()).filter(is_absent);
        let asked = asked.filter(|number| !self.models[*number].load_waits.is_empty());
        let waited_for = self.queue.iter().map(|given| given.job.model);
        asked.chain(waited_for.filter(is_absent)).next()
    }
}

/// A job that so many devices are lost with fails.
const MAX_LOST_WITH: usize = 3;
/// How often in turn a device is opened again before it is given up.
const MAX_FAILURES: usize = 7;
/// The time before the second try; it doubles with each.
const FIRST_DELAY: Duration = Duration::from_millis(if cfg!(test) { 5 } else { 1000 });

/// The time before a device is opened again that has failed so often in turn.
fn delay(n_failures: usize) -> Duration {
    match n_failures {
        0 | 1 => Duration::ZERO,
        n => FIRST_DELAY * (1 << (n - 2).min(MAX_FAILURES)),
    }
}

impl Dispatch {
    /// An empty queue for engines on `devices`.
    pub(super) fn new(
        devices: Vec<String>,
        options: EngineOptions,
        metrics: Arc<Metrics>,
        log: Log,
    ) -> Dispatch {
        let place = |device| Place {
            device,
            ..Place::default()
        };
        Dispatch {
            state: Mutex::new(State {
                queue: FairQueue::default(),
                engines: devices.into_iter().map(place).collect(),
                models: Vec::new(),
                clock: 0,
                is_closed: false,
                answer_ms: 0,
            }),
            changed: Condvar::new(),
            errands: Condvar::new(),
            options,
            metrics,
            log,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many jobs run and wait, at most.
    pub(super) fn limit(&self) -> usize {
        let EngineOptions {
            parallel, queue, ..
        } = self.options;
        parallel * self.state().engines.len() + queue
    }

    /// Takes `jobs`, all or none.
    pub(super) fn submit(&self, jobs: Vec<Job>) -> std::result::Result<(), Refused> {
        let mut state = self.state();
        let n_at_once = self.options.parallel * state.n_with_future();
        if n_at_once == 0 || state.is_closed {
            return Err(Refused::Stopped);
        }
        let limit = n_at_once + self.options.queue;
        if jobs.len() > limit {
            return Err(Refused::TooMany { limit });
        }
        state.forget_abandoned();
        let n_pending = state.n_pending();
        if n_pending + jobs.len() > limit {
            let rounds = (n_pending / n_at_once) as u64;
            let wait = (state.answer_ms * rounds).clamp(1_000, 60_000);
            return Err(Refused::Full {
                retry_after: Duration::from_millis(wait),
            });
        }
        for job in jobs {
            state.queue.push(job.key, job.into());
        }
        self.hand_out(&mut state);
        Ok(())
    }

    /// Whether an engine lives.
    pub(super) fn is_well(&self) -> bool {
        self.state().n_alive() > 0
    }

    /// Whether an engine lives, or may live again.
    pub(super) fn has_future(&self) -> bool {
        self.state().n_with_future() > 0
    }

    /// Nothing more is submitted.
    pub(super) fn close(&self) {
        let mut state = self.state();
        state.is_closed = true;
        state.forget_abandoned();
        drop(state);
        self.changed.notify_all();
        self.errands.notify_all();
    }

    /// Takes the report of the engine `number`, and returns the jobs that it is to begin: none once it has nothing to
    /// do, and nothing more will come. An engine that is idle waits here, and so does one that only waits for the disk.
    pub(super) fn exchange(&self, number: usize, report: Report) -> Option<Vec<Given>> {
        let mut state = self.state();
        let place = &mut state.engines[number];
        place.taken.clear();
        place.done.clear();
        let is_idle = report.busy.is_empty();
        let may_wait = is_idle || report.is_waiting;
        place.report = report;
        self.hand_out(&mut state);
        loop {
            let place = &mut state.engines[number];
            let has_to_look = std::mem::take(&mut place.has_to_look);
            if !may_wait || !place.given.is_empty() || has_to_look {
                let given = std::mem::take(&mut place.given);
                place.taken = given.iter().map(|given| given.busy.clone()).collect();
                return Some(given);
            }
            if is_idle && state.is_over() {
                return None;
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Tells the engine `number` that what it waits for is there, or won't come.
    pub(super) fn wake(&self, number: usize) {
        self.state().engines[number].has_to_look = true;
        self.changed.notify_all();
    }

    /// The sequences that the engine `number` keeps.
    pub(super) fn kept(&self, number: usize) -> Kept {
        self.state().engines[number].kept.clone()
    }

    /// Records that the engine `number` has done a job.
    pub(super) fn done(&self, number: usize, busy: &Busy) {
        let model = busy.of.model;
        let mut state = self.state();
        let place = &mut state.engines[number];
        *place.count(model) -= 1;
        place.n_failures = 0;
        place.forget(busy);
        let is_draining = |model: &ModelState| model.is_draining;
        match state.models.get(model).is_some_and(is_draining) {
            // It stays the one that was used least recently, or another would be chosen in its place.
            true => self.errands.notify_all(),
            false => {
                state.used(model);
                if self.options.models_idle.is_some() {
                    // It may be idle from now on.
                    self.errands.notify_all();
                }
            }
        }
    }

    /// Puts a job back that was given to the engine `number`, whose model is gone by now.
    pub(super) fn give_back(&self, number: usize, given: Given) {
        let mut state = self.state();
        *state.engines[number].count(given.job.model) -= 1;
        state.queue.push_front(given.job.key, given);
        self.hand_out(&mut state);
    }

    /// Lets the engine `number` lose its device once one of its answers has `n_tokens`.
    #[cfg(test)]
    pub(super) fn doom(&self, number: usize, n_tokens: usize) {
        self.state().engines[number].test.doom = Some(n_tokens);
    }

    /// When a test lets the engine `number` lose its device.
    #[cfg(test)]
    pub(super) fn doom_of(&self, number: usize) -> Option<usize> {
        self.state().engines[number].test.doom
    }

    /// Whether the engine `number` waits after each step.
    #[cfg(test)]
    pub(super) fn hold(&self, number: usize, is_held: bool) {
        self.state().engines[number].test.is_held = is_held;
        self.changed.notify_all();
    }

    /// Waits while a test holds the engine `number`.
    #[cfg(test)]
    pub(super) fn wait_while_held(&self, number: usize) {
        let state = self.state();
        let is_held = |state: &mut State| state.engines[number].test.is_held;
        let waited = self.changed.wait_while(state, is_held);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Records how long an answer took.
    pub(super) fn took(&self, time: Duration) {
        let mut state = self.state();
        // A running mean, of which the newest is an eighth.
        state.answer_ms = (7 * state.answer_ms + time.as_millis() as u64) / 8;
    }

    /// Takes the engine `number` out, whose device is lost: `jobs`, which it hasn't done, and those that it hasn't
    /// begun, go to the others, or wait for it to come back, before all that waits. A job that several devices were
    /// lost with fails: it may be why.
    pub(super) fn lose(&self, number: usize, jobs: Vec<Job>, message: &str) {
        let mut state = self.state();
        let place = &mut state.engines[number];
        if !place.lives() {
            return;
        }
        place.n_failures += 1;
        place.lost = Some(match place.n_failures {
            n if n > MAX_FAILURES => Lost::ForGood,
            n => Lost::Until(Instant::now() + delay(n)),
        });
        #[cfg(test)]
        {
            place.test.doom = None;
        }
        place.n_jobs_of.clear();
        place.report = Report::default();
        place.kept = Kept::default();
        place.taken.clear();
        place.done.clear();
        let device = place.device.clone();
        let given = std::mem::take(&mut place.given);
        let mut back = Vec::with_capacity(jobs.len() + given.len());
        for mut job in jobs {
            job.reply.n_lost_with += 1;
            if job.reply.n_lost_with < MAX_LOST_WITH {
                back.push(Given::from(job));
                continue;
            }
            // Whoever is gone needn't be told.
            let _ = job.reply.send(lost(message));
        }
        back.extend(given);
        let n_back = back.len();
        for given in back.into_iter().rev() {
            state.queue.push_front(given.job.key, given);
        }
        let n_alive = state.n_alive();
        drop(state);
        // Before anybody sees what comes of it.
        self.metrics.lose_engine(number);
        tell(
            &self.log,
            json!({
                "event": "engine",
                "action": "lost",
                "engine": number,
                "device": device,
                "message": message,
                "n_requeued": n_back,
                "n_left": n_alive,
            }),
        );
        let mut state = self.state();
        self.without_engines(&mut state, message);
        self.hand_out(&mut state);
        self.errands.notify_all();
    }

    /// What waits fails if no engine is left that could do it.
    fn without_engines(&self, state: &mut State, message: &str) {
        if state.n_with_future() == 0 {
            for Given { job, .. } in state.queue.drain() {
                // Whoever is gone needn't be told.
                let _ = job.reply.send(lost(message));
            }
        }
    }

    /// Records whether the lost device of the engine `number` was opened again, which took so long. If it can't be,
    /// there is another try later, unless there were enough, or it is known that none will do.
    pub(super) fn reopened(&self, number: usize, opened: &Result<()>, took: Duration) {
        let mut state = self.state();
        let place = &mut state.engines[number];
        let mut record = json!({
            "event": "engine",
            "action": "reopened",
            "engine": number,
            "device": place.device,
            "ms": took.as_millis() as u64,
        });
        match opened {
            Ok(()) => {
                self.metrics.reopen_engine(number);
                place.lost = None;
            }
            Err(error) => {
                place.n_failures += 1;
                let is_final = error.code() == ErrorCode::Unsupported;
                let n_failures = place.n_failures;
                record["action"] = "reopen_failed".into();
                record["message"] = format!("{error:#}").into();
                place.lost = Some(match n_failures > MAX_FAILURES || is_final {
                    true => {
                        record["action"] = "given_up".into();
                        Lost::ForGood
                    }
                    false => {
                        let delay = delay(n_failures);
                        record["retry_s"] = delay.as_secs().into();
                        Lost::Until(Instant::now() + delay)
                    }
                });
            }
        }
        drop(state);
        // Before anybody sees what comes of it.
        tell(&self.log, record);
        let mut state = self.state();
        if let Err(error) = opened {
            self.without_engines(&mut state, &format!("{error:#}"));
        }
        self.hand_out(&mut state);
        drop(state);
        self.changed.notify_all();
        self.errands.notify_all();
    }

    /// Waits until the lost device of the engine `number` is there again; false if it won't be, or nothing more comes.
    pub(super) fn comes_back(&self, number: usize) -> bool {
        let mut state = self.state();
        loop {
            let place = &state.engines[number];
            if place.lives() {
                return true;
            }
            if !place.has_future() || state.is_over() {
                return false;
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Hands out what may go.
    fn hand_out(&self, state: &mut State) {
        state.forget_abandoned();
        let State {
            queue,
            engines,
            models,
            clock,
            is_closed,
            ..
        } = state;
        let has_room = |place: &Place| place.lives() && place.n_jobs() < self.options.parallel;
        let mut is_given = false;
        while engines.iter().any(has_room) {
            let mut to = None;
            let next = queue.next(|given| {
                if !State::is_ready(models, &given.job) {
                    return false;
                }
                let places = engines.iter().enumerate();
                let places = places.filter(|(_, place)| has_room(place));
                let offers = places.map(|(number, place)| (number, place.offer()));
                to = match route(&given.busy, offers) {
                    Route::To(number) => Some(number),
                    Route::Later => None,
                };
                to.is_some()
            });
            let (Some(given), Some(number)) = (next, to) else {
                break;
            };
            *clock += 1;
            models[given.job.model].last_used = *clock;
            models[given.job.model].used_at = Some(Instant::now());
            let place = &mut engines[number];
            *place.count(given.job.model) += 1;
            place.given.push(given);
            is_given = true;
        }
        let waits = |given: &Given| !State::is_ready(models, &given.job);
        let is_over = *is_closed && queue.is_empty();
        if is_over || queue.iter().any(waits) {
            self.errands.notify_all();
        }
        if is_over || is_given {
            self.changed.notify_all();
        }
        let waiting = queue.iter().filter_map(|given| given.job.adapter.as_ref());
        self.metrics.set_waiting(queue.len(), names(waiting));
    }
}

/// Models that come and go.
impl Dispatch {
    /// Adds the next model, called `name`, of `bytes` on each engine.
    pub(super) fn add_model(&self, name: String, bytes: u64, can_load: bool) {
        self.metrics.set_model(&name, false);
        self.state().models.push(ModelState {
            name,
            bytes,
            can_load,
            ..ModelState::default()
        });
    }

    /// Records that an engine has a copy of the model `number`.
    pub(super) fn held(&self, number: usize) {
        self.state().models[number].n_copies += 1;
    }

    /// Records that a copy is gone.
    pub(super) fn freed(&self, number: usize) {
        self.state().models[number].n_copies -= 1;
        self.errands.notify_all();
    }

    /// Bytes of all models on an engine at most, if that is limited.
    pub(super) fn models_bytes(&self) -> Option<u64> {
        self.options.models_bytes
    }

    /// What there is of the model `number`.
    pub(super) fn standing(&self, number: usize) -> Standing {
        let state = self.state();
        let model = &state.models[number];
        Standing {
            stage: model.stage,
            is_pinned: model.is_pinned || !model.can_load,
            generation: model.generation,
        }
    }

    /// Records that weights of the model `number` were replaced.
    pub(super) fn swapped(&self, number: usize) {
        let mut state = self.state();
        let model = &mut state.models[number];
        model.generation += 1;
        let name = model.name.clone();
        state.used(number);
        for place in &mut state.engines {
            place.has_to_look = true;
        }
        drop(state);
        self.changed.notify_all();
        self.metrics.count_swap(&name);
    }

    /// Whether weights of the model `number` were replaced since it was loaded.
    pub(super) fn is_swapped(&self, number: usize) -> bool {
        self.state().models[number].generation > 0
    }

    /// Wants the model `number` loaded; tells when it is. It is pinned then if `pin` says so, and not if it says that.
    pub(super) fn want(&self, number: usize, pin: Option<bool>) -> oneshot::Receiver<Result<()>> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        let model = &mut state.models[number];
        model.is_pinned = pin.unwrap_or(model.is_pinned);
        model.is_unwanted = false;
        for waits in model.unload_waits.drain(..) {
            // Whoever is gone needn't be told.
            let _ = waits.send(());
        }
        match model.stage {
            Stage::Loaded => {
                // Whoever is gone needn't be told.
                let _ = sender.send(Ok(()));
            }
            _ => model.load_waits.push(sender),
        }
        self.errands.notify_all();
        receiver
    }

    /// Wants the model `number` unloaded: what is being answered ends with it. Tells when it takes no more; `None` if
    /// it is there to stay.
    pub(super) fn unwant(&self, number: usize) -> Option<oneshot::Receiver<()>> {
        let (sender, receiver) = oneshot::channel();
        let mut state = self.state();
        let model = &mut state.models[number];
        if !model.can_load {
            return None;
        }
        model.is_pinned = false;
        match model.stage {
            Stage::Unloaded => {
                // Whoever is gone needn't be told.
                let _ = sender.send(());
            }
            _ => {
                model.is_unwanted = true;
                model.unload_waits.push(sender);
            }
        }
        self.errands.notify_all();
        Some(receiver)
    }

    /// Records how many adapters the model `number` has that were loaded by request.
    pub(super) fn set_adapters(&self, number: usize, n: usize) {
        self.state().models[number].n_adapters = n;
        self.errands.notify_all();
    }

    /// What is to be done next; waits for it. `None` once nobody can ask for anything and nothing waits.
    pub(super) fn next_errand(&self) -> Option<Errand> {
        let mut state = self.state();
        loop {
            state.forget_abandoned();
            if state.is_over() {
                return None;
            }
            if let Some(errand) = self.errand(&mut state) {
                return Some(errand);
            }
            let now = Instant::now();
            let retries = state.engines.iter().filter_map(|place| match place.lost {
                Some(Lost::Until(then)) => Some(then.saturating_duration_since(now)),
                _ => None,
            });
            state = match retries.chain(self.next_idle(&state)).min() {
                None => {
                    let waited = self.errands.wait(state);
                    waited.unwrap_or_else(PoisonError::into_inner)
                }
                Some(time) => {
                    let waited = self.errands.wait_timeout(state, time);
                    waited.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// How long until a model has been idle for long enough to be unloaded; `None` if none ever will be.
    fn next_idle(&self, state: &State) -> Option<Duration> {
        let all = (0..state.models.len()).filter_map(|number| self.idle_in(state, number));
        all.min()
    }

    /// How long until the model `number` has been idle for long enough to be unloaded; `None` if it never will be, as
    /// things are.
    fn idle_in(&self, state: &State, number: usize) -> Option<Duration> {
        let limit = self.options.models_idle?;
        let model = &state.models[number];
        let is_waited_for = || state.queue.iter().any(|given| given.job.model == number);
        if model.stage != Stage::Loaded
            || !model.may_go()
            || state.n_busy(number) > 0
            || is_waited_for()
        {
            return None;
        }
        Some(limit.saturating_sub(model.used_at?.elapsed()))
    }

    /// What is to be done now, if something is.
    fn errand(&self, state: &mut State) -> Option<Errand> {
        let now = Instant::now();
        let is_due = |place: &Place| matches!(place.lost, Some(Lost::Until(then)) if then <= now);
        if let Some(engine) = state.engines.iter().position(is_due) {
            state.engines[engine].lost = Some(Lost::Opening);
            return Some(Errand::Reopen { engine });
        }
        let is_unwanted = |model: &ModelState| model.is_unwanted && model.stage == Stage::Loaded;
        if let Some(number) = state.models.iter().position(is_unwanted) {
            return Some(unload(state, number, Reason::Request));
        }
        let is_idle = |number: &usize| self.idle_in(state, *number) == Some(Duration::ZERO);
        if let Some(number) = (0..state.models.len()).find(is_idle) {
            return Some(unload(state, number, Reason::Idle));
        }
        let was_draining: Vec<bool> = state
            .models
            .iter_mut()
            .map(|model| std::mem::take(&mut model.is_draining))
            .collect();
        let errand = self.make_room(state);
        let is_draining = state.models.iter().map(|model| model.is_draining);
        if is_draining.ne(was_draining) {
            self.hand_out(state);
        }
        errand
    }

    /// What is to be done for the model that is to be loaded next; what stands in its way begins nothing more.
    fn make_room(&self, state: &mut State) -> Option<Errand> {
        let limit = self.options.models_bytes.unwrap_or(u64::MAX);
        loop {
            let number = state.wanted()?;
            let bytes = state.models[number].bytes;
            let sum = |is_counted: &dyn Fn(&ModelState) -> bool| {
                let models = state.models.iter().filter(|model| is_counted(model));
                models.fold(bytes, |sum, model| sum.saturating_add(model.bytes))
            };
            if sum(&|model| model.is_here() || model.n_copies > 0) <= limit {
                let engines = state.engines.iter().enumerate();
                let engines = engines.filter(|(_, place)| place.lives());
                let engines: Vec<usize> = engines.map(|(engine, _)| engine).collect();
                if engines.is_empty() && state.n_with_future() > 0 {
                    // There will be one for it.
                    return None;
                }
                if engines.is_empty() {
                    let error = Error::new(ErrorCode::DeviceLost, "no engine is left");
                    fail(state, number, &error);
                    continue;
                }
                state.models[number].stage = Stage::Loading;
                return Some(Errand::Load { number, engines });
            }
            if sum(&ModelState::is_here) <= limit {
                // There is room once copies have ended what they have begun.
                return None;
            }
            let least = sum(&|model| model.is_here() && !model.may_go());
            if least > limit {
                let message = format!(
                    "the model {} has {bytes} bytes: expected at most {} beside those that have to stay",
                    state.models[number].name,
                    limit.saturating_sub(least - bytes)
                );
                fail(state, number, &Error::new(ErrorCode::OutOfMemory, message));
                continue;
            }
            // Those that nobody needs first, and of them what was used least recently.
            let others = (0..state.models.len()).filter(|other| {
                let model = &state.models[*other];
                model.stage == Stage::Loaded && model.may_go()
            });
            let other = others.min_by_key(|other| {
                let mut waiting = state.queue.iter();
                let is_busy =
                    state.n_busy(*other) > 0 || waiting.any(|given| given.job.model == *other);
                (is_busy, state.models[*other].last_used)
            })?;
            if state.n_busy(other) == 0 {
                return Some(unload(state, other, Reason::Memory));
            }
            state.models[other].is_draining = true;
            return None;
        }
    }

    /// Tells in logs and metrics how loading the model `number` went, and how long it took.
    pub(super) fn tell_load(&self, number: usize, loaded: &Result<()>, took: Duration) {
        let name = self.state().models[number].name.clone();
        self.metrics.count_load(&name, loaded.is_ok());
        let mut record = json!({
            "event": "model",
            "action": "load",
            "model": name,
            "ms": took.as_millis() as u64,
        });
        if let Err(error) = loaded {
            record["action"] = "load_failed".into();
            record["message"] = format!("{error:#}").into();
        }
        tell(&self.log, record);
    }

    /// Records that the model `number` is loaded; if it isn't, whoever waits for it gets the error.
    pub(super) fn finish_load(&self, number: usize, loaded: Result<()>) {
        let mut state = self.state();
        let model = &mut state.models[number];
        self.metrics.set_model(&model.name, loaded.is_ok());
        match loaded {
            Ok(()) => {
                model.stage = Stage::Loaded;
                for waits in model.load_waits.drain(..) {
                    // Whoever is gone needn't be told.
                    let _ = waits.send(Ok(()));
                }
                state.used(number);
                self.hand_out(&mut state);
            }
            Err(error) => {
                model.stage = Stage::Unloaded;
                model.is_unwanted = false;
                for waits in model.unload_waits.drain(..) {
                    let _ = waits.send(());
                }
                fail(&mut state, number, &error);
            }
        }
    }

    /// Records that no engine begins anything with the model `number` any more.
    pub(super) fn finish_unload(&self, number: usize, reason: Reason) {
        let mut state = self.state();
        let model = &mut state.models[number];
        model.stage = Stage::Unloaded;
        model.is_unwanted = false;
        model.n_adapters = 0;
        model.generation = 0;
        for waits in model.unload_waits.drain(..) {
            // Whoever is gone needn't be told.
            let _ = waits.send(());
        }
        let name = model.name.clone();
        for place in &mut state.engines {
            place.has_to_look = true;
        }
        drop(state);
        self.changed.notify_all();
        self.metrics.set_model(&name, false);
        let (action, reason) = match reason {
            Reason::Request => ("unload", "request"),
            Reason::Memory => ("evict", "memory"),
            Reason::Idle => ("idle", "idle"),
        };
        self.metrics.count_unload(&name, reason);
        tell(
            &self.log,
            json!({"event": "model", "action": action, "model": name}),
        );
    }
}

/// What whoever waits gets when a device is lost, and no other is left.
fn lost(message: &str) -> Output {
    Output::Failed(Error::new(ErrorCode::DeviceLost, message.to_owned()))
}

/// Begins to unload the model `number`.
fn unload(state: &mut State, number: usize, reason: Reason) -> Errand {
    let model = &mut state.models[number];
    model.stage = Stage::Unloading;
    model.is_unwanted = false;
    Errand::Unload { number, reason }
}

/// Whoever waits for the model `number` gets `error`.
fn fail(state: &mut State, number: usize, error: &Error) {
    let again = || Error::new(error.code(), format!("{error:#}"));
    for waits in state.models[number].load_waits.drain(..) {
        // Whoever is gone needn't be told.
        let _ = waits.send(Err(again()));
    }
    state.queue.retain(|Given { job, .. }| {
        let is_other = job.model != number;
        if !is_other {
            let _ = job.reply.send(Output::Failed(again()));
        }
        is_other
    });
}

/// The names of adapters, each once.
pub(super) fn names<'a>(keys: impl Iterator<Item = &'a Arc<AdapterKey>>) -> Vec<String> {
    let mut names: Vec<String> = keys.map(|key| key.name.clone()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests;
