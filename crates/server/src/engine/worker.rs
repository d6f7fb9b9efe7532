//! The thread that computes, of one engine.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use sterna::embedding::embed;
use sterna::generate::{Event, Logprobs, Request};
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna::{Error, ErrorCode, Result};
use sterna_engine::{Backend, EngineError, Logits, Session};

use super::dispatch::{Dispatch, Given, Report, names};
use super::models::{EngineModel, Table};
use super::prefix::{Candidate, Choice, choose, n_common};
use super::route::{Busy, Held, Kept};
use super::{AdapterKey, Continued, EngineOptions, Job, Output, Reply, Undelivered, Work};
use crate::metrics::{EngineFigures, Metrics};

pub(super) struct Worker<B: Backend> {
    /// Its place among the engines.
    number: usize,
    models: Arc<Table<B>>,
    options: EngineOptions,
    dispatch: Arc<Dispatch>,
    scheduler: Scheduler<B>,
    running: Vec<Running<B>>,
    /// Work that isn't an answer, of which a part is done between steps, each in turn.
    aside: VecDeque<Aside<B>>,
    /// Sequences that nobody uses, the least recently used first.
    idle: Vec<Idle<B>>,
    /// They aren't those that were reported.
    idle_has_changed: bool,
    /// Jobs that could not be begun, as the device is lost.
    unbegun: Vec<Job>,
    /// Why nothing can be computed any more.
    lost: Option<String>,
    metrics: Arc<Metrics>,
}

/// What a sequence is computed by, and whose turn was taken.
struct Of<B: Backend> {
    /// The number of the model.
    number: usize,
    model: Arc<EngineModel<B>>,
    /// The adapter of its request.
    adapter: Option<Arc<AdapterKey>>,
    key: usize,
}

impl<B: Backend> Of<B> {
    /// The same without a claim on the adapter.
    fn held(&self) -> Held {
        Held::new(self.number, self.adapter.as_deref())
    }

    /// Whether what `held` and `model` have computed is computed by the same.
    fn is_of(&self, held: Held, model: &Arc<EngineModel<B>>) -> bool {
        self.held() == held && Arc::ptr_eq(&self.model, model)
    }

    /// A job of it.
    fn job(self, work: Work, reply: Reply) -> Job {
        Job {
            model: self.number,
            adapter: self.adapter,
            key: self.key,
            work,
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
    /// When its newest token came.
    last: Option<Instant>,
    /// It isn't counted any more.
    is_done: bool,
}

struct Idle<B: Backend> {
    of: Held,
    model: Arc<EngineModel<B>>,
    sequence: Sequence<B>,
    /// Its tokens, to be reported.
    ids: Arc<[u32]>,
}

impl<B: Backend> Idle<B> {
    fn new(of: &Of<B>, sequence: Sequence<B>) -> Idle<B> {
        Idle {
            of: of.held(),
            model: Arc::clone(&of.model),
            ids: sequence.ids().into(),
            sequence,
        }
    }
}

/// Work in parts.
struct Aside<B: Backend> {
    of: Of<B>,
    reply: Reply,
    busy: Busy,
    task: Task<B>,
}

enum Task<B: Backend> {
    Score {
        ids: Vec<u32>,
        n_top: usize,
        sequence: Sequence<B>,
        scores: Vec<Logprobs>,
        /// The logits after the newest token.
        last: Vec<f32>,
    },
    Embed {
        texts: VecDeque<Vec<u32>>,
        pooling: sterna::embedding::Pooling,
        normalised: bool,
        session: Session<B>,
    },
}

impl<B: Backend> Task<B> {
    /// Tokens that it has left.
    fn n_left(&self) -> usize {
        match self {
            Task::Score { ids, sequence, .. } => ids.len() - sequence.len(),
            Task::Embed { texts, .. } => texts.iter().map(Vec::len).sum(),
        }
    }

    /// What is left, to be done by another engine.
    fn work(self) -> Work {
        match self {
            Task::Score { ids, n_top, .. } => Work::Score { ids, n_top },
            Task::Embed {
                texts,
                pooling,
                normalised,
                ..
            } => Work::Embed {
                texts: texts.into(),
                pooling,
                normalised,
            },
        }
    }
}

impl<B: Backend> Worker<B> {
    pub(super) fn new(
        number: usize,
        models: Arc<Table<B>>,
        options: EngineOptions,
        dispatch: Arc<Dispatch>,
        metrics: Arc<Metrics>,
    ) -> Worker<B> {
        let scheduling = SchedulerOptions {
            chunk: options.chunk,
            // A chunk of prompts in a step, and a token of each answer: no prompt stalls them for longer.
            max_rows: options.chunk + options.parallel,
            // Its random numbers are those of seed and position, whatever else is in the step.
            draw_on_device: true,
            ..SchedulerOptions::default()
        };
        Worker {
            number,
            models,
            options,
            dispatch,
            scheduler: Scheduler::new(scheduling),
            running: Vec::new(),
            aside: VecDeque::new(),
            idle: Vec::new(),
            idle_has_changed: false,
            unbegun: Vec::new(),
            lost: None,
            metrics,
        }
    }

    /// Computes until the other side is gone and all is answered, or the device is lost.
    pub(super) fn run(mut self) {
        loop {
            let report = self.report();
            let Some(given) = self.dispatch.exchange(self.number, report) else {
                return;
            };
            self.begin(given);
            self.work_aside();
            self.step();
            if let Some(message) = self.lost.take() {
                return self.hand_back(&message);
            }
            self.drop_abandoned();
            self.forget();
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
        jobs.append(&mut self.unbegun);
        self.dispatch.lose(self.number, jobs, message);
    }

    /// Begins the jobs that it was given.
    fn begin(&mut self, given: Vec<Given>) {
        for given in given {
            let (busy, reply) = (given.busy.clone(), given.job.reply.clone());
            let Some(model) = self.models.get(given.job.model) else {
                // It has gone meanwhile.
                self.dispatch.give_back(self.number, given);
                continue;
            };
            if let Err(error) = self.begin_job(model, given) {
                self.done(&busy);
                // Whoever is gone needn't be told.
                let _ = reply.send(Output::Failed(error));
            }
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

    fn begin_job(&mut self, model: Arc<EngineModel<B>>, given: Given) -> Result<()> {
        let Given { job, busy } = given;
        let of = Of {
            number: job.model,
            model,
            adapter: job.adapter.clone(),
            key: job.key,
        };
        let sequence = match &job.work {
            Work::Generate(request) => self.sequence_for(&of, &request.prompt),
            Work::Continue(continued) => {
                let generator = &continued.generator;
                self.sequence_for(&of, &generator.tokens()[..generator.n_held()])
            }
            Work::Score { .. } | Work::Embed { .. } => self.empty(&of),
        };
        let sequence = match sequence {
            Ok(sequence) => sequence,
            Err(error) => return self.refuse(job, error),
        };
        let Job { work, reply, .. } = job;
        let task = match work {
            Work::Generate(request) => {
                return self.begin_answer(of, sequence, *request, reply, busy);
            }
            Work::Continue(continued) => {
                return self.go_on(of, sequence, *continued, reply, busy);
            }
            Work::Score { ids, n_top } => Task::Score {
                sequence,
                scores: Vec::with_capacity(ids.len()),
                last: Vec::new(),
                ids,
                n_top,
            },
            Work::Embed {
                texts,
                pooling,
                normalised,
            } => Task::Embed {
                session: sequence.into_session(),
                texts: texts.into(),
                pooling,
                normalised,
            },
        };
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
        sequence: Sequence<B>,
        request: Request,
        reply: Reply,
        busy: Busy,
    ) -> Result<()> {
        let n_prompt = request.prompt.len();
        let id = self.scheduler.add(sequence);
        if let Err(error) = self.scheduler.start(id, request) {
            self.keep(&of, id);
            return Err(error);
        }
        let generator = self.scheduler.generator(id);
        let n_cached = generator.map_or(0, |answer| answer.stats().n_reused);
        self.metrics.prompt_tokens.inc_by(n_prompt as u64);
        self.metrics.cached_tokens.inc_by(n_cached as u64);
        // Whoever is gone is noticed before the next step.
        let _ = reply.send(Output::Begun {
            engine: self.number,
            n_prompt,
            n_cached,
        });
        self.running.push(Running {
            id,
            of,
            reply,
            busy,
            begun: Instant::now(),
            last: None,
            is_done: false,
        });
        Ok(())
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
        let id = self.scheduler.add(sequence);
        if let Err(error) = self.scheduler.resume(id, generator) {
            self.keep(&of, id);
            return Err(error);
        }
        self.running.push(Running {
            id,
            of,
            reply,
            busy,
            begun,
            last,
            is_done: false,
        });
        Ok(())
    }

    /// A sequence for `prompt`: one that holds as much of it as possible.
    fn sequence_for(&mut self, of: &Of<B>, prompt: &[u32]) -> Result<Sequence<B>> {
        enum Place {
            Idle(usize),
            Running(SequenceId),
        }
        let idle = self.idle.iter().enumerate();
        let idle = idle.filter(|(_, idle)| of.is_of(idle.of, &idle.model));
        let idle = idle.map(|(at, idle)| Candidate {
            id: at,
            len: idle.sequence.len(),
            n_common: n_common(idle.sequence.ids(), prompt),
            is_busy: false,
        });
        let running = self.running.iter();
        let running = running.filter(|running| of.is_of(running.of.held(), &running.of.model));
        let running = running.filter_map(|running| {
            let held = held(&self.scheduler, running.id)?;
            Some(Candidate {
                id: self.idle.len() + running.id_index(&self.running),
                len: held.len(),
                n_common: n_common(held, prompt),
                is_busy: true,
            })
        });
        let place = |id: usize| match id.checked_sub(self.idle.len()) {
            None => Place::Idle(id),
            Some(at) => Place::Running(self.running[at].id),
        };
        match choose(idle.chain(running)) {
            Choice::Take(at) => {
                self.idle_has_changed = true;
                Ok(self.idle.remove(at).sequence)
            }
            Choice::Fork(at, len) => {
                let fork = match place(at) {
                    Place::Idle(at) => {
                        // It was of use.
                        self.idle_has_changed = true;
                        let used = self.idle.remove(at);
                        let fork = used.sequence.fork(len);
                        self.idle.push(used);
                        Some(fork)
                    }
                    Place::Running(id) => self.scheduler.sequence(id).map(|s| s.fork(len)),
                };
                match fork {
                    Some(fork) => Ok(fork),
                    None => self.empty(of),
                }
            }
            Choice::New => self.empty(of),
        }
    }

    /// An empty sequence. Where there is no memory for it, idle ones make room.
    fn empty(&mut self, of: &Of<B>) -> Result<Sequence<B>> {
        loop {
            match self.session(of) {
                Ok(session) => return Ok(Sequence::new(session)),
                Err(error) if self.idle.is_empty() => return Err(error),
                Err(_) => {
                    self.idle_has_changed = true;
                    self.idle.remove(0);
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
        if self.dispatch.is_doomed(self.number) && !self.running.is_empty() {
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
                    None => metrics.first_token.observe(seconds(running.begun, now)),
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
                let running = self.running.remove(at);
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
        let running = self.running.remove(at);
        if !running.is_done {
            self.done(&running.busy);
        }
        self.keep(&running.of, running.id);
    }

    /// Keeps the sequence `id` for prompts to come.
    fn keep(&mut self, of: &Of<B>, id: SequenceId) {
        if let Some(sequence) = self.scheduler.remove(id)
            && !sequence.is_empty()
        {
            self.keep_sequence(of, sequence);
        }
    }

    fn keep_sequence(&mut self, of: &Of<B>, sequence: Sequence<B>) {
        self.idle.push(Idle::new(of, sequence));
        self.idle_has_changed = true;
    }

    /// Does a part of what isn't an answer.
    fn work_aside(&mut self) {
        let Some(mut aside) = self.aside.pop_front() else {
            return;
        };
        let busy = aside.busy.clone();
        match aside.part(self.options.chunk) {
            Ok(true) => self.aside.push_back(aside),
            Ok(false) => {
                if let Task::Score { sequence, .. } = aside.task {
                    self.keep_sequence(&aside.of, sequence);
                }
                self.done(&busy);
            }
            Err(error) if error.code() == ErrorCode::DeviceLost => {
                self.lost.get_or_insert(error.to_string());
                self.aside.push_front(aside);
            }
            Err(error) => {
                let _ = aside.reply.send(Output::Failed(error));
                self.done(&busy);
            }
        }
    }

    /// Forgets idle sequences, the least recently used first, until the rest has room.
    fn forget(&mut self) {
        let n_idle = self.idle.len();
        // Nobody can ask for those of models that are gone, or of adapters.
        let named = |model: &Arc<EngineModel<B>>| (Arc::clone(model), model.adapters.keep_named());
        let models = self.models.all();
        let named: Vec<_> = models.iter().map(|own| own.as_ref().map(named)).collect();
        self.idle.retain(|Idle { of, model, .. }| {
            let named = named.get(of.model).and_then(Option::as_ref);
            named.is_some_and(|(current, ids)| {
                let is_named = |id: usize| ids.contains(&id);
                Arc::ptr_eq(current, model) && of.adapter.is_none_or(is_named)
            })
        });
        // Copies that are gone are not to be held for longer.
        drop((models, named));
        let idle: u64 = (self.idle.iter())
            .map(|idle| (idle.model.cache_bytes)(idle.sequence.len()))
            .sum();
        let busy: u64 = (self.running.iter())
            .map(|running| {
                let len = self.scheduler.sequence(running.id).map_or(0, Sequence::len);
                (running.of.model.cache_bytes)(len)
            })
            .sum();
        let mut used = idle + busy;
        let mut n_forgotten = 0;
        while used > self.options.cache_bytes && n_forgotten < self.idle.len() {
            let Idle {
                model, sequence, ..
            } = &self.idle[n_forgotten];
            used -= (model.cache_bytes)(sequence.len());
            n_forgotten += 1;
        }
        self.idle.drain(..n_forgotten);
        self.idle_has_changed |= self.idle.len() < n_idle;
        let adapters = self.running.iter();
        let adapters = adapters.filter_map(|running| running.of.adapter.as_ref());
        let figures = EngineFigures {
            n_running: self.running.len() + self.aside.len(),
            cache_bytes: used,
            n_sequences: self.idle.len(),
            adapters: names(adapters),
        };
        self.metrics.set_engine(self.number, figures);
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
        let kept = std::mem::take(&mut self.idle_has_changed).then(|| {
            let kept = |idle: &Idle<B>| Kept {
                of: idle.of,
                ids: Arc::clone(&idle.ids),
            };
            self.idle.iter().map(kept).collect()
        });
        Report {
            busy: running.chain(aside).cloned().collect(),
            kept,
        }
    }
}

impl<B: Backend> Running<B> {
    /// Its index in `all`.
    fn id_index(&self, all: &[Running<B>]) -> usize {
        let index = all.iter().position(|other| other.id == self.id);
        index.expect("it is one of them")
    }
}

impl<B: Backend> Aside<B> {
    /// Does the next part of at most `chunk` tokens, or a text; false after the last.
    fn part(&mut self, chunk: usize) -> Result<bool> {
        let (outputs, is_left) = match &mut self.task {
            Task::Score {
                ids,
                n_top,
                sequence,
                scores,
                last,
            } => {
                let begin = sequence.len();
                let end = ids.len().min(begin + chunk);
                let rows = sequence.forward(&ids[begin..end], Logits::All)?;
                let n_vocab = rows.len() / (end - begin).max(1);
                for (index, row) in rows.chunks_exact(n_vocab.max(1)).enumerate() {
                    if begin + index > 0 {
                        scores.push(Logprobs::new(last, ids[begin + index], *n_top));
                    }
                    last.clear();
                    last.extend_from_slice(row);
                }
                match end < ids.len() {
                    true => (None, true),
                    false => (Some(Output::Scored(std::mem::take(scores))), false),
                }
            }
            Task::Embed {
                texts,
                pooling,
                normalised,
                session,
            } => match texts.front() {
                None => (None, false),
                Some(text) => {
                    let backend = self.of.model.adapted.model().backend();
                    let vector = backend
                        .wait(embed(session, text, *pooling, *normalised))
                        .map_err(EngineError::from)??;
                    texts.pop_front();
                    (Some(Output::Embedded(vector)), !texts.is_empty())
                }
            },
        };
        if let Some(output) = outputs {
            let is_last = !is_left;
            // Whoever doesn't read the last output is gone; who is slow before that is given up.
            if self.reply.send(output).is_err() && !is_last {
                return Ok(false);
            }
        }
        Ok(is_left)
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
