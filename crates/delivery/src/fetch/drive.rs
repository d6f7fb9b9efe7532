//! Running a fetch on a machine with threads.

use std::{
    collections::HashMap,
    io::{self, Read as _},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread::{self, Scope},
    time::{Duration, Instant},
};

use super::{
    Action, Blob, Failure, Fault, Fetch, HashJob, Limits, PlanError, Present, Progress, RateLimit,
    Sink, SinkError, Transfer,
};
use crate::{
    hash::Verified,
    source::{Source, body_fault},
};

/// A cancellation token, usable from any thread.
#[derive(Debug, Clone, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Not cancelled yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Cancels.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// What happens during a fetch.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Progress, about ten times a second.
    Progress(Progress),
    /// A blob is verified and visible.
    Committed {
        /// The blob.
        blob: &'a Blob,
        /// How it was verified; `None` if the sink already had it.
        verified: Option<Verified>,
    },
}

/// The result of a successful fetch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Report {
    /// The final progress.
    pub progress: Progress,
    /// How each blob was verified, in the order given; `None` if the sink already had it.
    pub verified: Vec<Option<Verified>>,
    /// Sources that were dropped, and why.
    pub dropped: Vec<(String, String)>,
    /// Each source, and the bytes received from it: together those of `progress`.
    pub received_by: Vec<(String, u64)>,
}

/// Why a fetch ended without every blob. Verified blobs stay, and stored bytes help the next fetch.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FetchError {
    /// An invalid request.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The sources failed.
    #[error(transparent)]
    Failed(#[from] Failure),
    /// The bytes could not be stored.
    #[error(transparent)]
    Sink(#[from] SinkError),
    /// The system is out of threads.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// Bytes that are read, hashed and stored at once.
const PIECE: usize = 256 << 10;

/// How long a transfer that is to end may wait for its source, before that is interrupted.
const OVERDUE: Duration = Duration::from_millis(200);

/// How often progress is told and cancellation looked for.
const TICK: Duration = Duration::from_millis(100);

/// Fetches `blobs` into `sink` from `sources`, each of which should have them all, with
/// [`Limits::parallel`] requests at a time. Returns when every blob is committed.
///
/// Errors: [`FetchError`].
pub fn fetch(
    blobs: Vec<Blob>,
    sources: &[&dyn Source],
    sink: &dyn Sink,
    limits: Limits,
    cancel: &Cancel,
    notify: &mut dyn FnMut(Event<'_>),
) -> Result<Report, FetchError> {
    fetch_rather(blobs, sources, sources.len(), sink, limits, cancel, notify)
}

/// As [`fetch`], from the first `n_sure` of `sources` as long as they can deliver.
pub(crate) fn fetch_rather(
    blobs: Vec<Blob>,
    sources: &[&dyn Source],
    n_sure: usize,
    sink: &dyn Sink,
    limits: Limits,
    cancel: &Cancel,
    notify: &mut dyn FnMut(Event<'_>),
) -> Result<Report, FetchError> {
    let rate_limit = limits
        .bytes_per_second
        .map(|rate| Mutex::new(RateLimit::new(rate)));
    let names = sources
        .iter()
        .map(|source| source.name().to_owned())
        .collect();
    let shared = Shared {
        blobs: blobs.clone(),
        sources,
        sink,
        rate_limit,
        began: Instant::now(),
    };
    let mut fetch = Fetch::new(blobs, names, limits)?;
    (n_sure..sources.len()).for_each(|source| fetch.doubt(source));
    for (index, blob) in shared.blobs.iter().enumerate() {
        match sink.present(blob)? {
            Present::Complete => {
                fetch.committed(index);
                notify(Event::Committed {
                    blob,
                    verified: None,
                });
            }
            Present::Parts(ranges) => fetch.stored(index, &ranges),
        }
    }
    let (sender, reports) = mpsc::channel();
    thread::scope(|scope| {
        let mut driver = Driver {
            verified: vec![None; shared.blobs.len()],
            shared: &shared,
            fetch,
            scope,
            sender,
            running: HashMap::new(),
        };
        let outcome = driver.run(&reports, cancel, notify);
        if outcome.is_err() {
            let running = driver.running.values();
            running.for_each(|running| running.flag.cancel());
            sources.iter().for_each(|source| source.interrupt());
        }
        outcome
    })
}

/// State shared by threads.
struct Shared<'a> {
    blobs: Vec<Blob>,
    sources: &'a [&'a dyn Source],
    sink: &'a dyn Sink,
    rate_limit: Option<Mutex<RateLimit>>,
    began: Instant,
}

/// Messages from threads.
enum Message {
    Progress(u64, u64),
    Transferred(Transfer, Result<(), Stop>),
    Hashed(HashJob, Result<(), SinkError>),
    Committed(usize, Verified, Result<(), SinkError>),
}

/// Why a transfer ended.
enum Stop {
    Fault(Fault),
    Sink(SinkError),
}

impl From<Fault> for Stop {
    fn from(fault: Fault) -> Self {
        Self::Fault(fault)
    }
}

impl From<SinkError> for Stop {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}

/// A transfer that a thread is at.
struct Running {
    source: usize,
    flag: Cancel,
    /// When it was last asked to end.
    cancelled: Option<Duration>,
}

struct Driver<'scope, 'env> {
    shared: &'env Shared<'env>,
    fetch: Fetch,
    scope: &'scope Scope<'scope, 'env>,
    sender: mpsc::Sender<Message>,
    running: HashMap<u64, Running>,
    verified: Vec<Option<Verified>>,
}

impl<'scope, 'env> Driver<'scope, 'env> {
    fn run(
        &mut self,
        reports: &mpsc::Receiver<Message>,
        cancel: &Cancel,
        notify: &mut dyn FnMut(Event<'_>),
    ) -> Result<Report, FetchError> {
        let mut told = None;
        loop {
            if cancel.is_cancelled() {
                return Err(FetchError::Cancelled);
            }
            let now = self.shared.began.elapsed();
            let action = self.fetch.poll(now);
            while let Some((source, why)) = self.fetch.next_liar() {
                // Whoever called for the fetch has wrapped sources of which it wants to know more.
                let _ = self.shared.sources[source].lied(&why);
            }
            match action {
                Action::Transfer(transfer) => self.start_transfer(transfer)?,
                Action::Hash(mut job) => {
                    let shared = self.shared;
                    self.spawn(move || {
                        let outcome = shared.read_back(&mut job);
                        Message::Hashed(job, outcome)
                    })?;
                }
                Action::Cancel(id) => {
                    if let Some(running) = self.running.get_mut(&id) {
                        running.flag.cancel();
                        running.cancelled = Some(now);
                    }
                }
                Action::Discard { blob, range } => {
                    self.shared.sink.discard(&self.shared.blobs[blob], range)?;
                }
                Action::Commit { blob, verified } => {
                    let shared = self.shared;
                    self.spawn(move || {
                        let outcome = shared.sink.commit(&shared.blobs[blob], verified);
                        Message::Committed(blob, verified, outcome)
                    })?;
                }
                Action::Wait(until) => {
                    self.interrupt_overdue(now);
                    if told.is_none_or(|told| now >= told + TICK) {
                        told = Some(now);
                        notify(Event::Progress(self.fetch.so_far()));
                    }
                    let left = until.map_or(TICK, |until| until.saturating_sub(now).min(TICK));
                    match reports.recv_timeout(left) {
                        Ok(message) => self.take(message, notify)?,
                        Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
                    }
                    for message in reports.try_iter() {
                        self.take(message, notify)?;
                    }
                }
                Action::Done => {
                    let progress = self.fetch.so_far();
                    notify(Event::Progress(progress));
                    let dropped = self.fetch.dropped_sources();
                    let received_by = self.fetch.received_by();
                    return Ok(Report {
                        progress,
                        dropped: dropped
                            .map(|(name, why)| (name.into(), why.into()))
                            .collect(),
                        received_by: received_by.map(|(name, n)| (name.into(), n)).collect(),
                        verified: std::mem::take(&mut self.verified),
                    });
                }
                Action::Failed(failure) => return Err(failure.into()),
            }
        }
    }

    fn take(
        &mut self,
        message: Message,
        notify: &mut dyn FnMut(Event<'_>),
    ) -> Result<(), FetchError> {
        let now = self.shared.began.elapsed();
        match message {
            Message::Progress(id, received) => self.fetch.progress(id, received, now),
            Message::Transferred(transfer, outcome) => {
                self.running.remove(&transfer.id());
                let outcome = match outcome {
                    Ok(()) => Ok(()),
                    Err(Stop::Fault(fault)) => Err(fault),
                    Err(Stop::Sink(error)) => return Err(error.into()),
                };
                self.fetch.transferred(transfer, outcome, now);
            }
            Message::Hashed(job, outcome) => {
                outcome?;
                self.fetch.hashed(job);
            }
            Message::Committed(blob, verified, outcome) => {
                outcome?;
                self.fetch.committed(blob);
                self.verified[blob] = Some(verified);
                notify(Event::Committed {
                    blob: &self.shared.blobs[blob],
                    verified: Some(verified),
                });
            }
        }
        Ok(())
    }

    /// Interrupts the sources of transfers that were asked to end and wait for them still.
    fn interrupt_overdue(&mut self, now: Duration) {
        for running in self.running.values_mut() {
            if running.cancelled.is_some_and(|at| now >= at + OVERDUE) {
                running.cancelled = Some(now);
                self.shared.sources[running.source].interrupt();
            }
        }
    }

    fn start_transfer(&mut self, mut transfer: Transfer) -> Result<(), FetchError> {
        let flag = Cancel::new();
        let running = Running {
            source: transfer.request().source,
            flag: flag.clone(),
            cancelled: None,
        };
        self.running.insert(transfer.id(), running);
        let (shared, sender) = (self.shared, self.sender.clone());
        self.spawn(move || {
            let outcome = match shared.transfer(&mut transfer, &flag, &sender) {
                // It failed because it was interrupted.
                Err(Stop::Fault(fault)) if flag.is_cancelled() && fault.may_pass() => {
                    Err(Fault::Cancelled.into())
                }
                outcome => outcome,
            };
            Message::Transferred(transfer, outcome)
        })
    }

    /// One thread per piece of work: it waits far longer than it takes to start, and there are never more
    /// than a few.
    fn spawn(&self, work: impl FnOnce() -> Message + Send + 'scope) -> Result<(), FetchError> {
        let sender = self.sender.clone();
        thread::Builder::new()
            .name("fetch".into())
            .spawn_scoped(self.scope, move || {
                // The receiver is gone once the fetch has ended.
                let _ = sender.send(work());
            })
            .map(drop)
            .map_err(FetchError::Thread)
    }
}

impl Shared<'_> {
    fn transfer(
        &self,
        transfer: &mut Transfer,
        cancel: &Cancel,
        sender: &mpsc::Sender<Message>,
    ) -> Result<(), Stop> {
        let request = transfer.request();
        let blob = &self.blobs[request.blob];
        let mut answer = self.sources[request.source].open(&request.name, request.range.clone())?;
        transfer.begin(&answer.head)?;
        let piece = self
            .rate_limit
            .as_ref()
            .map_or(PIECE, |rate_limit| lock(rate_limit).piece().min(PIECE));
        let mut buffer = vec![0; piece];
        while !transfer.is_complete() {
            if cancel.is_cancelled() {
                return Err(Fault::Cancelled.into());
            }
            let n = match answer.body.read(&mut buffer) {
                Ok(0) => return Ok(transfer.end()?),
                Ok(n) => n,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    let expected = transfer.request().range.as_ref();
                    let expected = expected.map_or(blob.size(), |r| r.end - r.start);
                    return Err(body_fault(&error, transfer.received(), expected).into());
                }
            };
            let wanted = transfer.wanted(&buffer[..n])?;
            self.sink.write_at(blob, transfer.offset(), wanted)?;
            transfer.stored(wanted)?;
            let _ = sender.send(Message::Progress(transfer.id(), transfer.received()));
            if let Some(rate_limit) = &self.rate_limit {
                let wait = lock(rate_limit).take(n, self.began.elapsed());
                thread::sleep(wait);
            }
        }
        // Read a completely received response to its end, so that the connection can be reused.
        if transfer.request().range.is_some() || transfer.received() == blob.size() {
            let _ = answer.body.read(&mut [0]);
        }
        Ok(())
    }

    fn read_back(&self, job: &mut HashJob) -> Result<(), SinkError> {
        let blob = &self.blobs[job.blob()];
        let mut buffer = vec![0; PIECE];
        while !job.remaining().is_empty() {
            let range = job.remaining();
            let n = usize::try_from(range.end - range.start).map_or(PIECE, |n| n.min(PIECE));
            self.sink.read_at(blob, range.start, &mut buffer[..n])?;
            job.take(&buffer[..n]);
        }
        Ok(())
    }
}

fn lock(rate_limit: &Mutex<RateLimit>) -> std::sync::MutexGuard<'_, RateLimit> {
    // Consistent at any moment, even if a thread panicked while holding it.
    rate_limit.lock().unwrap_or_else(PoisonError::into_inner)
}
