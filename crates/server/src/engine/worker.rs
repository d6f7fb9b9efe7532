//! The thread that computes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::Instant;

use sterna::embedding::embed;
use sterna::generate::{Event, Logprobs, Request};
use sterna::scheduler::{Scheduler, SchedulerOptions, SequenceId};
use sterna::sequence::Sequence;
use sterna::{Error, ErrorCode, Result};
use sterna_engine::{Backend, EngineError, Logits, Session};

use super::fair::FairQueue;
use super::prefix::{Candidate, Choice, WORTH, choose, n_common};
use super::{AdapterKey, EngineModel, EngineOptions, Job, Load, Output, Reply, Undelivered, Work};
use crate::metrics::Metrics;

pub(super) struct Worker<B: Backend> {
    models: Vec<EngineModel<B>>,
    options: EngineOptions,
    jobs: Receiver<Job>,
    /// The other side is gone.
    is_closed: bool,
    queue: FairQueue<Job>,
    scheduler: Scheduler<B>,
    running: Vec<Running>,
    /// Work that isn't an answer, of which a part is done between steps, each in turn.
    aside: VecDeque<Aside<B>>,
    /// Sequences that nobody uses, the least recently used first.
    idle: Vec<Idle<B>>,
    load: Arc<Load>,
    metrics: Arc<Metrics>,
}

/// What a sequence is computed by.
#[derive(Debug, Clone)]
struct Of {
    model: usize,
    /// The adapter of its request.
    adapter: Option<Arc<AdapterKey>>,
}

impl Of {
    /// The same without a claim on the adapter.
    fn held(&self) -> Held {
        Held::new(self.model, self.adapter.as_deref())
    }
}

/// What a sequence was computed by: only one that is computed by the same may go on with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Held {
    model: usize,
    /// The number of the adapter.
    adapter: Option<usize>,
}

impl Held {
    fn new(model: usize, adapter: Option<&AdapterKey>) -> Held {
        Held {
            model,
            adapter: adapter.map(|key| key.id),
        }
    }
}

/// An answer in progress.
struct Running {
    id: SequenceId,
    of: Of,
    reply: Reply,
    submitted: Instant,
    /// When its newest token came.
    last: Option<Instant>,
}

struct Idle<B: Backend> {
    of: Held,
    sequence: Sequence<B>,
}

/// Work in parts.
struct Aside<B: Backend> {
    of: Of,
    reply: Reply,
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

impl<B: Backend> Worker<B> {
    pub(super) fn new(
        models: Vec<EngineModel<B>>,
        options: EngineOptions,
        jobs: Receiver<Job>,
        load: Arc<Load>,
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
            models,
            options,
            jobs,
            is_closed: false,
            queue: FairQueue::default(),
            scheduler: Scheduler::new(scheduling),
            running: Vec::new(),
            aside: VecDeque::new(),
            idle: Vec::new(),
            load,
            metrics,
        }
    }

    /// Computes until the other side is gone and all is answered.
    pub(super) fn run(mut self) {
        loop {
            self.take_jobs();
            if self.is_closed && self.has_nothing_to_do() {
                return;
            }
            self.drop_abandoned();
            self.begin();
            self.work_aside();
            self.step();
            self.forget();
            self.report();
        }
    }

    fn has_nothing_to_do(&self) -> bool {
        self.running.is_empty() && self.queue.is_empty() && self.aside.is_empty()
    }

    /// Takes what has arrived; waits for something if there is nothing to do.
    fn take_jobs(&mut self) {
        loop {
            let job = match self.has_nothing_to_do() && !self.is_closed {
                true => self.jobs.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.jobs.try_recv(),
            };
            match job {
                Ok(job) => self.queue.push(job.key, job),
                Err(TryRecvError::Empty) => return,
                Err(TryRecvError::Disconnected) => {
                    self.is_closed = true;
                    return;
                }
            }
        }
    }

    /// Ends what nobody waits for any more. What was computed stays.
    fn drop_abandoned(&mut self) {
        let n = self.queue.retain(|job| !job.reply.is_closed());
        self.done(n);
        let abandoned = |running: &Running| running.reply.is_closed();
        for at in (0..self.running.len()).rev() {
            if abandoned(&self.running[at]) {
                self.metrics.cancelled.inc();
                self.end(at);
            }
        }
        let before = self.aside.len();
        self.aside.retain(|aside| !aside.reply.is_closed());
        self.done(before - self.aside.len());
    }

    /// Records that `n` jobs are done.
    fn done(&self, n: usize) {
        self.load.pending.fetch_sub(n, Ordering::SeqCst);
    }

    /// Begins as many jobs as may run at once.
    fn begin(&mut self) {
        while self.running.len() + self.aside.len() < self.options.parallel {
            let Worker {
                queue,
                scheduler,
                running,
                idle,
                ..
            } = self;
            let may = |job: &Job| !pays_to_wait(job, scheduler, running, idle);
            let Some(job) = queue.next(may) else { return };
            let reply = job.reply.clone();
            if let Err(error) = self.begin_job(job) {
                // Whoever is gone needn't be told.
                let _ = reply.send(Output::Failed(error));
                self.done(1);
            }
        }
    }

    fn begin_job(&mut self, job: Job) -> Result<()> {
        let Job {
            model,
            adapter,
            work,
            reply,
            ..
        } = job;
        let of = Of { model, adapter };
        let task = match work {
            Work::Generate(request) => return self.begin_answer(of, *request, reply),
            Work::Score { ids, n_top } => Task::Score {
                sequence: self.empty(&of)?,
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
                session: self.session(&of)?,
                texts: texts.into(),
                pooling,
                normalised,
            },
        };
        self.aside.push_back(Aside { of, reply, task });
        Ok(())
    }

    fn begin_answer(&mut self, of: Of, request: Request, reply: Reply) -> Result<()> {
        let n_prompt = request.prompt.len();
        let sequence = self.sequence_for(&of, &request.prompt)?;
        let id = self.scheduler.add(sequence);
        if let Err(error) = self.scheduler.start(id, request) {
            self.keep(of.held(), id);
            return Err(error);
        }
        let generator = self.scheduler.generator(id);
        let n_cached = generator.map_or(0, |answer| answer.stats().n_reused);
        self.metrics.prompt_tokens.inc_by(n_prompt as u64);
        self.metrics.cached_tokens.inc_by(n_cached as u64);
        // Whoever is gone is noticed before the next step.
        let _ = reply.send(Output::Begun { n_prompt, n_cached });
        self.running.push(Running {
            id,
            of,
            reply,
            submitted: Instant::now(),
            last: None,
        });
        Ok(())
    }

    /// A sequence for `prompt`: one that holds as much of it as possible.
    fn sequence_for(&mut self, of: &Of, prompt: &[u32]) -> Result<Sequence<B>> {
        enum Place {
            Idle(usize),
            Running(SequenceId),
        }
        let idle = self.idle.iter().enumerate();
        let idle = idle.filter(|(_, idle)| idle.of == of.held());
        let idle = idle.map(|(at, idle)| Candidate {
            id: at,
            len: idle.sequence.len(),
            n_common: n_common(idle.sequence.ids(), prompt),
            is_busy: false,
        });
        let running = self.running.iter();
        let running = running.filter(|running| running.of.held() == of.held());
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
            Choice::Take(at) => Ok(self.idle.remove(at).sequence),
            Choice::Fork(at, len) => {
                let fork = match place(at) {
                    Place::Idle(at) => {
                        // It was of use.
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
    fn empty(&mut self, of: &Of) -> Result<Sequence<B>> {
        loop {
            match self.session(of) {
                Ok(session) => return Ok(Sequence::new(session)),
                Err(error) if self.idle.is_empty() => return Err(error),
                Err(_) => drop(self.idle.remove(0)),
            }
        }
    }

    /// An empty session, with the adapters applied.
    fn session(&self, of: &Of) -> Result<Session<B>> {
        let EngineModel {
            adapted,
            session,
            adapters,
            ..
        } = &self.models[of.model];
        let mut session = adapted.session(*session)?;
        if let Some(adapter) = of.adapter.as_ref().and_then(|key| adapters.get(key)) {
            let mut all = session.adapters().to_vec();
            all.push(adapter);
            session.set_adapters(all)?;
        }
        Ok(session)
    }

    /// Computes the next tokens of all answers, and delivers them.
    fn step(&mut self) {
        let events = match self.scheduler.step() {
            Ok(events) => events,
            Err(error) => {
                let code = error.code();
                self.load.is_lost.store(true, Ordering::Relaxed);
                for at in (0..self.running.len()).rev() {
                    let error = Error::new(code, error.to_string());
                    let _ = self.running[at].reply.send(Output::Failed(error));
                    self.end(at);
                }
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
                    None => metrics.first_token.observe(seconds(running.submitted, now)),
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
                self.load.is_lost.store(true, Ordering::Relaxed);
                Output::Failed(Error::new(ErrorCode::DeviceLost, message))
            }
            // Events that are not known here change nothing.
            _ => return,
        };
        let is_last = !matches!(output, Output::Token(_));
        let failed = matches!(output, Output::Failed(_));
        let sent = running.reply.send(output);
        if is_last {
            let took = running.submitted.elapsed();
            self.metrics.answer.observe(took.as_secs_f64());
            // A running mean, of which the newest is an eighth.
            let (mean, ms) = (&self.load.answer_ms, took.as_millis() as usize);
            mean.store(
                (7 * mean.load(Ordering::Relaxed) + ms) / 8,
                Ordering::Relaxed,
            );
        }
        match sent {
            Ok(()) if !is_last => {}
            // What failed isn't built upon.
            _ if failed => {
                let running = self.running.remove(at);
                self.scheduler.remove(running.id);
                self.done(1);
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
        let Running { id, of, .. } = self.running.remove(at);
        self.keep(of.held(), id);
        self.done(1);
    }

    /// Keeps the sequence `id` for prompts to come.
    fn keep(&mut self, of: Held, id: SequenceId) {
        if let Some(sequence) = self.scheduler.remove(id)
            && !sequence.is_empty()
        {
            self.idle.push(Idle { of, sequence });
        }
    }

    /// Does a part of what isn't an answer.
    fn work_aside(&mut self) {
        let Some(mut aside) = self.aside.pop_front() else {
            return;
        };
        match aside.part(&self.models, self.options.chunk) {
            Ok(true) => self.aside.push_back(aside),
            Ok(false) => {
                if let Task::Score { sequence, .. } = aside.task {
                    let of = aside.of.held();
                    self.idle.push(Idle { of, sequence });
                }
                self.done(1);
            }
            Err(error) => {
                let _ = aside.reply.send(Output::Failed(error));
                self.done(1);
            }
        }
    }

    /// Forgets idle sequences, the least recently used first, until the rest has room.
    fn forget(&mut self) {
        // Nobody can ask for those of adapters that are gone.
        let models = self.models.iter();
        let named: Vec<Vec<usize>> = models.map(|model| model.adapters.keep_named()).collect();
        self.idle.retain(|Idle { of, .. }| {
            let is_named = |id: usize| named[of.model].contains(&id);
            of.adapter.is_none_or(is_named)
        });
        let bytes = |model: usize, len| (self.models[model].cache_bytes)(len);
        let idle: u64 = (self.idle.iter())
            .map(|idle| bytes(idle.of.model, idle.sequence.len()))
            .sum();
        let busy: u64 = (self.running.iter())
            .map(|running| {
                let len = self.scheduler.sequence(running.id).map_or(0, Sequence::len);
                bytes(running.of.model, len)
            })
            .sum();
        let mut used = idle + busy;
        let mut n_forgotten = 0;
        while used > self.options.cache_bytes && n_forgotten < self.idle.len() {
            let Idle { of, sequence } = &self.idle[n_forgotten];
            used -= bytes(of.model, sequence.len());
            n_forgotten += 1;
        }
        self.idle.drain(..n_forgotten);
        self.metrics.cache_bytes.set(used as i64);
        let share = used as f64 / self.options.cache_bytes.max(1) as f64;
        self.metrics.set_cache_share(share.min(1.0));
    }

    fn report(&self) {
        let n_running = self.running.len() + self.aside.len();
        self.metrics.set_load(n_running, self.queue.len());
        self.metrics.cache_sequences.set(self.idle.len() as i64);
        let running = self
            .running
            .iter()
            .filter_map(|running| running.of.adapter.as_ref());
        let waiting = self.queue.iter().filter_map(|job| job.adapter.as_ref());
        self.metrics.set_adapters(names(running), names(waiting));
    }
}

impl Running {
    /// Its index in `all`.
    fn id_index(&self, all: &[Running]) -> usize {
        let index = all.iter().position(|other| other.id == self.id);
        index.expect("it is one of them")
    }
}

impl<B: Backend> Aside<B> {
    /// Does the next part of at most `chunk` tokens, or a text; false after the last.
    fn part(&mut self, models: &[EngineModel<B>], chunk: usize) -> Result<bool> {
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
            } => match texts.pop_front() {
                None => (None, false),
                Some(text) => {
                    let backend = models[self.of.model].adapted.model().backend();
                    let vector = backend
                        .wait(embed(session, &text, *pooling, *normalised))
                        .map_err(EngineError::from)??;
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

/// Whether `job` should wait for a prompt that is being computed: it begins with more of that than it could continue
/// now, and would only compute the same.
fn pays_to_wait<B: Backend>(
    job: &Job,
    scheduler: &Scheduler<B>,
    running: &[Running],
    idle: &[Idle<B>],
) -> bool {
    let Work::Generate(request) = &job.work else {
        return false;
    };
    let of = Held::new(job.model, job.adapter.as_deref());
    let of_model = running.iter().filter(|running| running.of.held() == of);
    let (mut now, mut soon) = (0, 0);
    for running in of_model {
        let Some(generator) = scheduler.generator(running.id) else {
            continue;
        };
        let held = held(scheduler, running.id).unwrap_or_default();
        now = now.max(n_common(held, &request.prompt));
        if generator.n_prompt_left() > 0 {
            soon = soon.max(n_common(generator.tokens(), &request.prompt));
        }
    }
    if soon <= now + WORTH {
        return false;
    }
    let idle = idle.iter().filter(|idle| idle.of == of);
    let idle = idle.map(|idle| n_common(idle.sequence.ids(), &request.prompt));
    soon > idle.max().unwrap_or(0).max(now) + WORTH
}

/// The names of adapters, each once.
fn names<'a>(keys: impl Iterator<Item = &'a Arc<AdapterKey>>) -> String {
    let mut names: Vec<&str> = keys.map(|key| key.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names.join(",")
}

fn seconds(from: Instant, to: Instant) -> f64 {
    to.saturating_duration_since(from).as_secs_f64()
}
