//! The queue that all engines take from.
//!
//! What waits is here and nowhere else: an engine is handed a job only when it has room for it. Whoever changes
//! something, by submitting jobs or by reporting what an engine has, hands out what may go by that.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde_json::{Map, Value, json};
use sterna::{Error, ErrorCode};

use super::fair::FairQueue;
use super::route::{Busy, Kept, Offer, Route, route};
use super::{AdapterKey, EngineOptions, Job, Output, Refused};
use crate::metrics::Metrics;
use crate::settings::Log;

/// The queue, and what is known of the engines.
pub(super) struct Dispatch {
    state: Mutex<State>,
    /// There are jobs for an engine, or nothing more comes.
    changed: Condvar,
    options: EngineOptions,
    metrics: Arc<Metrics>,
    log: Log,
}

struct State {
    queue: FairQueue<Given>,
    engines: Vec<Place>,
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
    is_lost: bool,
    #[cfg(test)]
    is_doomed: bool,
    /// Jobs that it has and hasn't done.
    n_jobs: usize,
    /// Those that it hasn't looked at.
    given: Vec<Given>,
    /// Those that aren't in its report yet.
    taken: Vec<Busy>,
    report: Report,
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
    /// `None` if that is as before.
    pub(super) kept: Option<Vec<Kept>>,
}

impl Place {
    /// Takes `busy` for done: what was computed is kept.
    fn forget(&mut self, busy: &Busy) {
        let is_other = |other: &Busy| other.id != busy.id;
        self.taken.retain(is_other);
        self.report.busy.retain(is_other);
        if busy.n_left == 0 {
            let kept = self.report.kept.get_or_insert_default();
            kept.push(Kept {
                of: busy.of,
                ids: Arc::clone(&busy.prompt),
            });
        }
    }

    fn offer(&self) -> Offer<'_> {
        let given = self.given.iter().map(|given| &given.busy);
        let busy = self.report.busy.iter().chain(&self.taken).chain(given);
        Offer {
            kept: self.report.kept.as_deref().unwrap_or_default(),
            busy: busy.collect(),
        }
    }
}

impl State {
    /// Jobs that wait or are being done.
    fn n_pending(&self) -> usize {
        let at_engines: usize = self.engines.iter().map(|place| place.n_jobs).sum();
        self.queue.len() + at_engines
    }

    fn n_alive(&self) -> usize {
        self.engines.iter().filter(|place| !place.is_lost).count()
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
                is_closed: false,
                answer_ms: 0,
            }),
            changed: Condvar::new(),
            options,
            metrics,
            log,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes `jobs`, all or none.
    pub(super) fn submit(&self, jobs: Vec<Job>) -> Result<(), Refused> {
        let mut state = self.state();
        let n_at_once = self.options.parallel * state.n_alive();
        if n_at_once == 0 {
            return Err(Refused::Stopped);
        }
        let limit = n_at_once + self.options.queue;
        if jobs.len() > limit {
            return Err(Refused::TooMany { limit });
        }
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

    /// Nothing more is submitted.
    pub(super) fn close(&self) {
        self.state().is_closed = true;
        self.changed.notify_all();
    }

    /// Takes the report of the engine `number`, and returns the jobs that it is to begin: none once it has nothing to
    /// do, and nothing more will come. An engine that is idle waits here.
    pub(super) fn exchange(&self, number: usize, report: Report) -> Option<Vec<Given>> {
        let mut state = self.state();
        let place = &mut state.engines[number];
        place.taken.clear();
        let is_idle = report.busy.is_empty();
        let kept = report.kept.or(place.report.kept.take());
        place.report = Report {
            busy: report.busy,
            kept,
        };
        self.hand_out(&mut state);
        loop {
            let place = &mut state.engines[number];
            if !is_idle || !place.given.is_empty() {
                let given = std::mem::take(&mut place.given);
                place.taken = given.iter().map(|given| given.busy.clone()).collect();
                return Some(given);
            }
            if state.is_closed && state.queue.is_empty() {
                return None;
            }
            let waited = self.changed.wait(state);
            state = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that the engine `number` has done a job.
    pub(super) fn done(&self, number: usize, busy: &Busy) {
        let mut state = self.state();
        let place = &mut state.engines[number];
        place.n_jobs -= 1;
        place.forget(busy);
    }

    /// Lets the engine `number` lose its device in its next step.
    #[cfg(test)]
    pub(super) fn doom(&self, number: usize) {
        self.state().engines[number].is_doomed = true;
    }

    /// Whether a test lets the engine `number` lose its device.
    #[cfg(test)]
    pub(super) fn is_doomed(&self, number: usize) -> bool {
        self.state().engines[number].is_doomed
    }

    /// Records how long an answer took.
    pub(super) fn took(&self, time: Duration) {
        let mut state = self.state();
        // A running mean, of which the newest is an eighth.
        state.answer_ms = (7 * state.answer_ms + time.as_millis() as u64) / 8;
    }

    /// Takes the engine `number` out, whose device is lost: `jobs`, which it hasn't done, and those that it hasn't
    /// begun, go to the others, before all that waits.
    pub(super) fn lose(&self, number: usize, jobs: Vec<Job>, message: &str) {
        let mut state = self.state();
        let place = &mut state.engines[number];
        if place.is_lost {
            return;
        }
        place.is_lost = true;
        place.n_jobs = 0;
        place.report = Report::default();
        place.taken.clear();
        let device = place.device.clone();
        let given = std::mem::take(&mut place.given);
        let back: Vec<Given> = jobs.into_iter().map(Given::from).chain(given).collect();
        let n_back = back.len();
        for given in back.into_iter().rev() {
            state.queue.push_front(given.job.key, given);
        }
        let n_alive = state.n_alive();
        if n_alive == 0 {
            for Given { job, .. } in state.queue.drain() {
                let error = Error::new(ErrorCode::DeviceLost, message.to_owned());
                // Whoever is gone needn't be told.
                let _ = job.reply.send(Output::Failed(error));
            }
        }
        self.hand_out(&mut state);
        drop(state);
        self.metrics.lose_engine(number);
        self.log(json!({
            "event": "engine",
            "action": "lost",
            "engine": number,
            "device": device,
            "message": message,
            "n_requeued": n_back,
            "n_left": n_alive,
        }));
    }

    fn log(&self, record: Value) {
        if let Value::Object(record) = record {
            let record: Map<String, Value> = record;
            (self.log)(&record);
        }
    }

    /// Hands out what may go.
    fn hand_out(&self, state: &mut State) {
        let State { queue, engines, .. } = state;
        queue.retain(|given| !given.job.reply.is_closed());
        let has_room = |place: &Place| !place.is_lost && place.n_jobs < self.options.parallel;
        let mut is_given = false;
        while engines.iter().any(has_room) {
            let mut to = None;
            let next = queue.next(|given| {
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
            let place = &mut engines[number];
            place.n_jobs += 1;
            place.given.push(given);
            is_given = true;
        }
        if is_given {
            self.changed.notify_all();
        }
        let waiting = queue.iter().filter_map(|given| given.job.adapter.as_ref());
        self.metrics.set_waiting(queue.len(), names(waiting));
    }
}

/// The names of adapters, each once.
pub(super) fn names<'a>(keys: impl Iterator<Item = &'a Arc<AdapterKey>>) -> Vec<String> {
    let mut names: Vec<String> = keys.map(|key| key.name.clone()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

#[cfg(test)]
mod tests {
    use super::super::{Outputs, Work, replies};
    use super::*;

    /// Jobs named by their first token.
    fn job(key: usize, name: u32) -> (Job, Outputs) {
        let (mut all, outputs) = replies(1);
        let job = Job {
            model: 0,
            adapter: None,
            key,
            work: Work::Score {
                ids: vec![name],
                n_top: 0,
            },
            reply: all.remove(0),
        };
        (job, outputs)
    }

    fn dispatch(n: usize, parallel: usize) -> Dispatch {
        let devices = vec![String::new(); n];
        let options = EngineOptions {
            parallel,
            queue: 100,
            cache_bytes: 0,
            chunk: 1,
        };
        let metrics = Arc::new(Metrics::new(&devices, 0, 1));
        Dispatch::new(devices, options, metrics, Arc::new(|_| {}))
    }

    fn names(given: &[Given]) -> Vec<u32> {
        let name = |given: &Given| match &given.job.work {
            Work::Score { ids, .. } => ids[0],
            _ => panic!("another job"),
        };
        given.iter().map(name).collect()
    }

    /// What an engine reports that has these.
    fn report(given: &[Given]) -> Report {
        Report {
            busy: given.iter().map(|given| given.busy.clone()).collect(),
            kept: None,
        }
    }

    #[test]
    fn engines_take_turns_of_keys_when_they_have_room() {
        let dispatch = dispatch(2, 1);
        let asked = [(0, 1), (0, 2), (0, 3), (0, 4), (1, 11), (1, 12)];
        let (jobs, _outputs): (Vec<_>, Vec<_>) =
            asked.iter().map(|(key, name)| job(*key, *name)).unzip();
        dispatch.submit(jobs).unwrap();
        let mut has: Vec<Vec<Given>> = (0..2)
            .map(|number| dispatch.exchange(number, Report::default()).unwrap())
            .collect();
        assert_eq!((names(&has[0]), names(&has[1])), (vec![1], vec![11]));
        // Nothing is handed to who has no room.
        let more = dispatch.exchange(0, report(&has[0])).unwrap();
        assert!(more.is_empty());
        let mut order = Vec::new();
        for number in [1, 1, 0, 1] {
            dispatch.done(number, &has[number][0].busy);
            has[number] = dispatch.exchange(number, Report::default()).unwrap();
            order.extend(names(&has[number]));
        }
        assert_eq!(order, [2, 12, 3, 4]);
    }

    #[test]
    fn what_a_lost_engine_had_comes_before_what_waits() {
        let dispatch = dispatch(2, 1);
        let (jobs, _outputs): (Vec<_>, Vec<_>) =
            [1, 2, 3, 4].map(|name| job(0, name)).into_iter().unzip();
        dispatch.submit(jobs).unwrap();
        let has = dispatch.exchange(0, Report::default()).unwrap();
        assert_eq!(names(&has), [1]);
        let lost = dispatch.exchange(1, Report::default()).unwrap();
        assert_eq!(names(&lost), [2]);
        let jobs = lost.into_iter().map(|given| given.job).collect();
        dispatch.lose(1, jobs, "gone");
        assert!(dispatch.is_well());
        let mut has = has;
        for expected in [2, 3, 4] {
            dispatch.done(0, &has[0].busy);
            has = dispatch.exchange(0, Report::default()).unwrap();
            assert_eq!(names(&has), [expected]);
        }
        // One that was given a job and hasn't looked at it yet.
        let (next, outputs) = job(0, 5);
        dispatch.done(0, &has[0].busy);
        dispatch.submit(vec![next]).unwrap();
        dispatch.lose(0, Vec::new(), "gone too");
        let mut outputs = outputs;
        let output = outputs.blocking_recv();
        assert!(
            matches!(&output, Some((0, Output::Failed(error))) if error.to_string() == "gone too"),
            "{output:?}"
        );
        assert!(!dispatch.is_well());
    }
}
