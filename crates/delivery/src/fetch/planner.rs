//! Decides what to do next, without doing anything.

use std::{
    collections::{BTreeMap, VecDeque},
    ops::Range,
    time::Duration,
};

use super::{
    Blob, Fault, HashJob, Limits, PlanError, RangeSet, Request, Transfer,
    blob::check_all,
    fault::Verdict,
    pass::Pass,
    state::{BlobState, Jitter, Phase, Ranges, SourceState, Unfinished},
};
use crate::hash::{Expected, Mismatch, Verified};

/// A fetch of several blobs from several sources: a state machine without sockets, files or clock.
///
/// [`poll`](Self::poll) returns what to do next; the outcome is reported to [`progress`](Self::progress),
/// [`transferred`](Self::transferred), [`hashed`](Self::hashed) and [`committed`](Self::committed). Times are
/// durations since any fixed moment, the same one for all.
///
/// Blobs are fetched in the order given, several ranges at a time. A source that fails is retried after a
/// while; one that sent something false is not. Of wrong bytes, only the block is fetched again if there are
/// block digests, and else the blob.
///
/// A [`Transfer`] is the exclusive permission to write to its range: no other is planned for it, and nothing
/// of it is read, discarded or committed, before the transfer is returned.
#[derive(Debug)]
pub struct Fetch {
    limits: Limits,
    blobs: Vec<BlobState>,
    sources: Vec<SourceState>,
    transfers: BTreeMap<u64, InFlight>,
    n_jobs: usize,
    next_id: u64,
    received_bytes: u64,
    /// Sources that sent something false, and what, and that nobody was told of yet.
    liars: VecDeque<(usize, String)>,
    jitter: Jitter,
    queue: VecDeque<Action>,
    failed: Option<Failure>,
}

/// An action for the driver of a [`Fetch`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Action {
    /// Send this request, and return the transfer to [`Fetch::transferred`].
    Transfer(Transfer),
    /// Read these bytes back, and return the job to [`Fetch::hashed`].
    Hash(HashJob),
    /// End the transfer of this id soon, with [`Fault::Cancelled`].
    Cancel(u64),
    /// Forget stored bytes, before any later action is begun.
    Discard {
        /// Which blob, by index.
        blob: usize,
        /// Its bytes to forget.
        range: Range<u64>,
    },
    /// Make a blob visible: all its bytes are stored and verified. Then call [`Fetch::committed`].
    Commit {
        /// Which blob, by index.
        blob: usize,
        /// How it was verified.
        verified: Verified,
    },
    /// Nothing until something is reported, or until this time.
    Wait(Option<Duration>),
    /// Every blob is committed.
    Done,
    /// A blob can't be fetched. Transfers in progress are useless now.
    Failed(Failure),
}

/// Why a fetch ended without every blob.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Failure {
    /// No source is left for a blob.
    #[error("`{blob}`: no source can deliver it:{}", list(reasons))]
    Exhausted {
        /// The blob.
        blob: String,
        /// Every source, and why it can't.
        reasons: Vec<(String, String)>,
    },
    /// No bytes can be right: the digest of an empty blob is wrong, or every block was read back and is
    /// right, and the whole is not. The author of the digests made a mistake.
    #[error("`{blob}`: what is said of it contradicts itself: {mismatch}")]
    Contradiction {
        /// The blob.
        blob: String,
        /// The digests of the whole.
        mismatch: Mismatch,
    },
    /// What is read back repeatedly differs from what was stored.
    #[error(
        "`{blob}`: what was stored of it was read back wrong {n_times} times; is the disk in order?"
    )]
    Unsteady {
        /// The blob.
        blob: String,
        /// Number of changed blocks.
        n_times: u32,
    },
}

fn list(reasons: &[(String, String)]) -> String {
    if reasons.is_empty() {
        return " there is none".to_owned();
    }
    reasons
        .iter()
        .map(|(source, why)| format!("\n  {source}: {why}"))
        .collect()
}

/// The progress of a fetch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Progress {
    /// Number of blobs.
    pub n_blobs: usize,
    /// Number of committed blobs.
    pub n_done: usize,
    /// Bytes of all blobs.
    pub total_bytes: u64,
    /// Bytes of them that are stored, verified or not.
    pub done_bytes: u64,
    /// Bytes received since the start, those fetched twice counted twice.
    pub received_bytes: u64,
}

#[derive(Debug)]
struct InFlight {
    blob: usize,
    source: usize,
    /// Failures of its source before it began.
    n_failures_before: u64,
    /// Whether it has the digest's state.
    has_whole: bool,
    /// The block that it continues, of which a part was stored.
    resumed: Option<u64>,
    received: u64,
    /// When it last made sufficient progress, and how much it had received then.
    mark: (Duration, u64),
    cancelled: Option<Fault>,
}

impl InFlight {
    /// When it counts as stalled unless it brings enough.
    fn stalled_at(&self, limits: &Limits) -> Duration {
        let patience = match self.mark.1 {
            0 => limits.stall_timeout,
            _ => limits.least_rate_over,
        };
        self.mark.0.saturating_add(patience)
    }
}

/// Jobs at a time; they wait for memory and processor, not for the network.
const MAX_JOBS: usize = 2;

/// Parallel commits: enough that waits for the disk overlap.
const MAX_COMMITS: usize = 8;

/// Verified blobs that may wait for their commit before no more are requested; each may be an open file.
const MAX_UNCOMMITTED: usize = 32;

/// What a stranger adds to the requests at a time.
const REQUESTS_OF_STRANGER: usize = 2;

/// How often a blob is read again whose blocks were right when they arrived and whose whole is not.
const MAX_REREADS: u32 = 3;

/// A failed request that received this much shows that its source works.
const WORTH: u64 = 256 << 10;

impl Fetch {
    /// A fetch of `blobs` from the sources called `sources`, each of which is assumed to have them all.
    /// Without any, it fails unless every blob is committed already.
    ///
    /// Errors: [`PlanError`].
    pub fn new(blobs: Vec<Blob>, sources: Vec<String>, limits: Limits) -> Result<Self, PlanError> {
        check_all(&blobs)?;
        let n_sources = sources.len();
        Ok(Self {
            blobs: (blobs.into_iter())
                .map(|blob| BlobState::new(blob, n_sources))
                .collect(),
            sources: sources.into_iter().map(SourceState::new).collect(),
            transfers: BTreeMap::new(),
            n_jobs: 0,
            next_id: 0,
            received_bytes: 0,
            liars: VecDeque::new(),
            jitter: Jitter(limits.seed),
            limits,
            queue: VecDeque::new(),
            failed: None,
        })
    }

    /// The blobs, in the order given.
    pub fn blobs(&self) -> impl ExactSizeIterator<Item = &Blob> {
        self.blobs.iter().map(|state| &state.blob)
    }

    /// Reports, before the first [`poll`](Self::poll), bytes that an earlier fetch left. They are read back
    /// and hashed before they are trusted.
    pub fn stored(&mut self, blob: usize, ranges: &RangeSet) {
        let state = &mut self.blobs[blob];
        if !state.inherit(ranges) {
            let range = 0..state.blob.size();
            self.queue.push_back(Action::Discard { blob, range });
        }
    }

    /// Takes note, before the first [`poll`](Self::poll), that a source didn't answer when it was asked for
    /// something else. It is asked only while no other can be.
    pub fn doubt(&mut self, source: usize) {
        self.sources[source].is_slow = true;
    }

    /// One more source, also while the fetch is under way, and two more requests at a time, since others may have all
    /// there are; its index. It is a stranger: it isn't asked for blobs of which only the size is known.
    pub fn add_stranger(&mut self, name: String) -> usize {
        for state in &mut self.blobs {
            let has_digest = state.blob.expected() != Expected::SizeOnly;
            state.add_source((!has_digest).then(|| "no hash of it is known".to_owned()));
        }
        self.limits.parallel = self.limits.parallel.saturating_add(REQUESTS_OF_STRANGER);
        self.sources.push(SourceState::new(name));
        self.sources.len() - 1
    }

    /// What to do next. To be asked again after each action, until it says to wait or has ended.
    pub fn poll(&mut self, now: Duration) -> Action {
        if let Some(failure) = &self.failed {
            return Action::Failed(failure.clone());
        }
        // Settling one blob may affect another.
        while (0..self.blobs.len()).any(|blob| self.settle(blob)) {}
        if let Some(action) = self.queue.pop_front() {
            return action;
        }
        self.failed = self.failed.take().or_else(|| self.failure());
        if let Some(failure) = &self.failed {
            return Action::Failed(failure.clone());
        }
        (self.cancel_stalled(now))
            .or_else(|| self.next_commit())
            .or_else(|| self.next_job())
            .or_else(|| self.next_transfer(now))
            .unwrap_or_else(|| {
                let done = |state: &BlobState| matches!(state.phase, Phase::Done);
                if self.blobs.iter().all(done) {
                    Action::Done
                } else {
                    Action::Wait(self.wake(now))
                }
            })
    }

    /// Reports that a transfer has received `received` bytes in all.
    pub fn progress(&mut self, id: u64, received: u64, now: Duration) {
        let enough = self.trickle();
        if let Some(transfer) = self.transfers.get_mut(&id) {
            transfer.received = received;
            let is_first = transfer.mark.1 == 0 && received > 0;
            if is_first || received.saturating_sub(transfer.mark.1) >= enough {
                transfer.mark = (now, received);
            }
        }
    }

    /// Returns a transfer that has ended.
    pub fn transferred(&mut self, transfer: Transfer, outcome: Result<(), Fault>, now: Duration) {
        let Some(flight) = self.transfers.remove(&transfer.id()) else {
            return;
        };
        let (blob, source) = (flight.blob, flight.source);
        self.received_bytes += transfer.received();
        self.sources[source].received += transfer.received();
        self.sources[source].n_transfers -= 1;
        let outcome = match outcome {
            // Cancelled for a reason known here, or for one of the driver's.
            Err(Fault::Cancelled) => Err(flight.cancelled.unwrap_or(Fault::Unreachable {
                message: Fault::Cancelled.to_string(),
            })),
            outcome => outcome.and_then(|()| self.same_etag(blob, source, &transfer)),
        };
        // Earlier bytes from this source are as good as later ones from another.
        let is_honest = match &outcome {
            Ok(()) => true,
            Err(fault) => fault.verdict() != Verdict::Drop,
        };
        let kept = self.store(blob, source, flight.has_whole, is_honest, transfer);
        if let Err(Fault::WrongBlock { block, .. }) = &outcome
            && flight.resumed == Some(block.start)
        {
            // Which part is wrong is unknown; the block is fetched as a whole, and then it is known.
            return;
        }
        let Err(fault) = outcome else {
            self.sources[source].failures = 0;
            self.sources[source].is_slow = false;
            return;
        };
        match fault.verdict() {
            Verdict::Again => {
                let state = &mut self.sources[source];
                if kept >= WORTH {
                    state.failures = 0;
                }
                state.is_slow |= fault == Fault::Stalled;
                let jitter = self.jitter.next();
                if !state.fail(&fault, flight.n_failures_before, now, &self.limits, jitter) {
                    self.left(source);
                }
            }
            Verdict::NotHere => {
                self.blobs[blob].refusals[source] = Some(fault.to_string());
                self.find_alone(blob);
            }
            Verdict::AskWhole => self.sources[source].ranges = Ranges::No,
            Verdict::Nothing => {}
            Verdict::Drop => {
                let state = &mut self.blobs[blob];
                // Earlier bytes from before the change don't match the current file.
                if matches!(fault, Fault::Changed { .. }) && state.blob.blocks().is_none() {
                    state.doomed |= state.contributors.contains(&source);
                }
                self.drop_source(blob, source, &fault);
            }
        }
    }

    /// Returns a job whose bytes were all read.
    pub fn hashed(&mut self, job: HashJob) {
        self.n_jobs -= 1;
        let job = match job.into_unfinished() {
            Ok((blob, start, pass)) => {
                let state = &mut self.blobs[blob];
                state.busy = false;
                if let Some(part) = state.unfinished.get_mut(&start) {
                    part.pass = Some(pass);
                }
                return;
            }
            Err(job) => job,
        };
        let found = job.findings();
        let state = &mut self.blobs[found.blob];
        state.busy = false;
        if found.second_opinion {
            let Phase::Doubted(mismatch, _) = &state.phase else {
                return;
            };
            let mismatch = mismatch.clone();
            match found.whole.map(crate::hash::Verifier::finish) {
                Some(Ok(verified)) => state.phase = Phase::Verified(verified),
                _ => self.wrong(found.blob, mismatch),
            }
            return;
        }
        let size = state.blob.size();
        state.blocks_are_right |= state.blob.blocks().is_some()
            && found.checked == (0..size)
            && found.right.len() == size;
        state.unchecked.remove(found.checked);
        for range in found.right.iter() {
            state.present.insert(range);
        }
        if found.whole.is_some() {
            (state.frontier, state.whole) = (found.frontier, found.whole);
        }
    }

    /// Reports that a blob is committed, now or before the first [`poll`](Self::poll).
    pub fn committed(&mut self, blob: usize) {
        self.blobs[blob].phase = Phase::Done;
    }

    /// How far it has come.
    pub fn so_far(&self) -> Progress {
        let under_way = self
            .transfers
            .values()
            .map(|transfer| transfer.received)
            .sum::<u64>();
        let total_bytes = self.blobs.iter().map(|state| state.blob.size()).sum();
        let stored: u64 = self.blobs.iter().map(BlobState::done_bytes).sum();
        Progress {
            n_blobs: self.blobs.len(),
            n_done: (self.blobs.iter())
                .filter(|s| matches!(s.phase, Phase::Done))
                .count(),
            total_bytes,
            done_bytes: stored.saturating_add(under_way).min(total_bytes),
            received_bytes: self.received_bytes + under_way,
        }
    }

    /// The sources that were dropped, and why.
    pub fn dropped_sources(&self) -> impl Iterator<Item = (&str, &str)> {
        (self.sources.iter()).filter_map(|s| Some((s.name.as_str(), s.dropped.as_deref()?)))
    }

    /// Each source, and the bytes that it sent in transfers that have ended.
    pub fn received_by(&self) -> impl Iterator<Item = (&str, u64)> {
        self.sources.iter().map(|s| (s.name.as_str(), s.received))
    }

    /// The next source, by index, that was dropped because it sent something false, and what that was; each once.
    pub fn next_liar(&mut self) -> Option<(usize, String)> {
        self.liars.pop_front()
    }

    /// Records what a transfer received in the blob's state; returns the number of valid bytes. If the source
    /// sent nothing false, the start of a block is valid too.
    fn store(
        &mut self,
        blob: usize,
        source: usize,
        has_whole: bool,
        is_honest: bool,
        transfer: Transfer,
    ) -> u64 {
        let state = &mut self.blobs[blob];
        state.n_transfers -= 1;
        state.taken.remove(transfer.claim());
        let (kept, spoilt) = (transfer.kept(), transfer.spoilt());
        if !kept.is_empty() {
            state.contributors.insert(source);
        }
        let n = kept.end - kept.start;
        state.present.insert(kept);
        let pass = transfer.into_pass();
        if is_honest && pass.is_unfinished() {
            if has_whole {
                state.frontier = spoilt.start;
            }
            let part = Unfinished {
                end: spoilt.end,
                pass: Some(pass),
            };
            state.unfinished.insert(spoilt.start, part);
            return n;
        }
        if !spoilt.is_empty() {
            let range = spoilt;
            self.queue.push_back(Action::Discard { blob, range });
        }
        let (end, whole) = pass.end();
        if has_whole {
            (state.frontier, state.whole) = (end, whole);
        }
        n
    }

    /// Whether a source still has the same file as at the first request.
    fn same_etag(&mut self, blob: usize, source: usize, transfer: &Transfer) -> Result<(), Fault> {
        let known = &mut self.blobs[blob].etags[source];
        match (transfer.etag(), &known) {
            (Some(now), Some(before)) if now != before => Err(Fault::Changed {
                before: before.clone(),
                now: now.to_owned(),
            }),
            (Some(now), None) => {
                *known = Some(now.to_owned());
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Does what needs no driver: verifies a blob that is hashed, restarts one that can't succeed. Returns
    /// whether there was anything to do.
    fn settle(&mut self, blob: usize) -> bool {
        let state = &mut self.blobs[blob];
        if state.doomed && state.is_idle() {
            state.start_over();
            let range = 0..state.blob.size();
            self.queue.push_back(Action::Discard { blob, range });
            return true;
        }
        if !state.is_hashed() {
            return false;
        }
        let whole = state.whole.take().expect("`is_hashed` saw it");
        match (whole.finish(), state.blob.expected().second_verifier()) {
            (Ok(verified), _) => state.phase = Phase::Verified(verified),
            (Err(mismatch), Some(second)) => {
                state.phase = Phase::Doubted(mismatch, Some(Box::new(second)))
            }
            (Err(mismatch), None) => self.wrong(blob, mismatch),
        }
        true
    }

    /// All bytes of a blob are there, and verification failed.
    fn wrong(&mut self, blob: usize, mismatch: Mismatch) {
        let state = &mut self.blobs[blob];
        state.phase = Phase::Fetching;
        let name = || state.blob.name().to_owned();
        if state.blocks_are_right || state.blob.size() == 0 {
            self.failed = Some(Failure::Contradiction {
                blob: name(),
                mismatch,
            });
            return;
        }
        if state.blob.blocks().is_some() {
            // Each was right when it arrived. Those that have changed are fetched again.
            if state.n_rereads == MAX_REREADS {
                self.failed = Some(Failure::Unsteady {
                    blob: name(),
                    n_times: MAX_REREADS,
                });
            } else {
                state.read_again();
            }
            return;
        }
        let contributors: Vec<usize> = state.contributors.iter().copied().collect();
        let inherited = state.inherited;
        state.doomed = true;
        match contributors[..] {
            [] => {}
            [source] if !inherited => {
                self.drop_source(blob, source, &Fault::WrongBytes(mismatch));
            }
            // One of several sources, and it is unknown which: from now on one at a time.
            [source, ..] => self.blobs[blob].alone = Some(source),
        }
        self.find_alone(blob);
    }

    fn drop_source(&mut self, blob: usize, source: usize, fault: &Fault) {
        let why = format!("`{}`: {fault}", self.blobs[blob].blob.name());
        let state = &mut self.sources[source];
        if !std::mem::replace(&mut state.lied, true) {
            self.liars.push_back((source, why.clone()));
        }
        state.dropped.get_or_insert(why);
        self.left(source);
    }

    /// Drops a source.
    fn left(&mut self, source: usize) {
        for (&id, transfer) in &mut self.transfers {
            if transfer.source == source && transfer.cancelled.is_none() {
                transfer.cancelled = Some(Fault::Cancelled);
                self.queue.push_back(Action::Cancel(id));
            }
        }
        for blob in 0..self.blobs.len() {
            self.find_alone(blob);
        }
    }

    fn is_usable(&self, blob: usize, source: usize) -> bool {
        self.sources[source].dropped.is_none() && self.blobs[blob].refusals[source].is_none()
    }

    /// Replaces the one source of a blob that may have only one, if that was dropped. What it sent is kept if
    /// a digest will tell whether it matches the next one's bytes.
    fn find_alone(&mut self, blob: usize) {
        let Some(source) = self.blobs[blob].alone else {
            return;
        };
        let fetching = matches!(self.blobs[blob].phase, Phase::Fetching);
        if self.is_usable(blob, source) || !fetching {
            return;
        }
        if let Some(next) = (0..self.sources.len()).find(|&s| self.is_usable(blob, s)) {
            let state = &mut self.blobs[blob];
            state.alone = Some(next);
            state.doomed |= state.blob.expected() == Expected::SizeOnly;
        }
    }

    fn failure(&self) -> Option<Failure> {
        let (_, state) = (self.blobs.iter().enumerate()).find(|(blob, state)| {
            let usable = (0..self.sources.len()).any(|source| self.is_usable(*blob, source));
            !usable && state.is_idle() && state.gap().is_some()
        })?;
        let reason = |(source, refusal): (&SourceState, &Option<String>)| {
            let why = refusal.as_ref().or(source.dropped.as_ref())?;
            Some((source.name.clone(), why.clone()))
        };
        Some(Failure::Exhausted {
            blob: state.blob.name().to_owned(),
            reasons: (self.sources.iter().zip(&state.refusals))
                .filter_map(reason)
                .collect(),
        })
    }

    fn cancel_stalled(&mut self, now: Duration) -> Option<Action> {
        let limits = &self.limits;
        let (&id, transfer) = self.transfers.iter_mut().find(|(_, transfer)| {
            transfer.cancelled.is_none() && now >= transfer.stalled_at(limits)
        })?;
        transfer.cancelled = Some(Fault::Stalled);
        Some(Action::Cancel(id))
    }

    fn next_commit(&mut self) -> Option<Action> {
        let committing = |state: &&BlobState| matches!(state.phase, Phase::Committing);
        if self.blobs.iter().filter(committing).count() >= MAX_COMMITS {
            return None;
        }
        let verified = |state: &BlobState| match state.phase {
            Phase::Verified(verified) => Some(verified),
            _ => None,
        };
        let (blob, verified) = (self.blobs.iter().enumerate())
            .find_map(|(blob, state)| Some((blob, verified(state)?)))?;
        self.blobs[blob].phase = Phase::Committing;
        Some(Action::Commit { blob, verified })
    }

    fn next_job(&mut self) -> Option<Action> {
        if self.n_jobs == MAX_JOBS {
            return None;
        }
        let job = (self.blobs.iter_mut().enumerate()).find_map(|(i, state)| job_for(i, state))?;
        self.n_jobs += 1;
        Some(Action::Hash(job))
    }

    fn next_transfer(&mut self, now: Duration) -> Option<Action> {
        let uncommitted =
            |state: &&BlobState| matches!(state.phase, Phase::Verified(_) | Phase::Committing);
        if self.transfers.len() >= self.limits.parallel.max(1)
            || self.blobs.iter().filter(uncommitted).count() >= MAX_UNCOMMITTED
        {
            return None;
        }
        let (blob, source, gap) = (0..self.blobs.len()).find_map(|blob| {
            let gap = self.blobs[blob].gap()?;
            Some((blob, self.choose(blob, now)?, gap))
        })?;
        let state = &mut self.blobs[blob];
        if state.blob.expected() == Expected::SizeOnly {
            // Nothing would show that parts from two sources don't belong together.
            state.alone = Some(source);
        }
        let size = state.blob.size();
        let range = match self.sources[source].ranges {
            Ranges::Supposed => state.segment(&gap, &self.limits),
            Ranges::No => gap,
        };
        // Where the whole file is requested, parts of other blocks are received again.
        let part = state.unfinished.remove(&range.start);
        state.unfinished.retain(|start, _| !range.contains(start));
        let resumed = part.is_some().then_some(range.start);
        let pass = match part.and_then(|part| part.pass) {
            Some(pass) => pass,
            None => {
                let lent = (state.frontier == range.start)
                    .then(|| state.whole.take())
                    .flatten();
                Pass::new(range.start, lent, state.blob.blocks().cloned())
            }
        };
        let wanted = pass.offset()..range.end;
        let whole = wanted == (0..size) || self.sources[source].ranges == Ranges::No;
        let request = Request {
            blob,
            name: state.blob.name().to_owned(),
            source,
            size,
            range: (!whole).then_some(wanted),
        };
        let has_whole = pass.has_whole();
        state.taken.insert(range.clone());
        state.n_transfers += 1;
        self.sources[source].n_transfers += 1;
        let id = self.next_id;
        self.next_id += 1;
        self.transfers.insert(
            id,
            InFlight {
                blob,
                source,
                n_failures_before: self.sources[source].n_failures,
                has_whole,
                resumed,
                received: 0,
                mark: (now, 0),
                cancelled: None,
            },
        );
        let etag = state.etags[source].clone();
        Some(Action::Transfer(Transfer::new(
            id, request, range, etag, pass,
        )))
    }

    /// The source to ask for bytes of a blob now: rather one that answers; then one it comes from already, so that it is clear
    /// whose fault wrong bytes are; then one that serves parts; then the least busy.
    fn choose(&self, blob: usize, now: Duration) -> Option<usize> {
        let state = &self.blobs[blob];
        (0..self.sources.len())
            .filter(|&s| self.is_usable(blob, s) && self.sources[s].wait_until <= now)
            .filter(|&s| state.alone.is_none_or(|alone| alone == s))
            .filter(|&s| self.sources[s].ranges == Ranges::Supposed || state.n_transfers == 0)
            .min_by_key(|&s| {
                let source = &self.sources[s];
                let stranger = state.blob.blocks().is_none() && !self.brings(blob, s);
                let is_whole = source.ranges == Ranges::No;
                (source.is_slow, stranger, is_whole, source.n_transfers, s)
            })
    }

    /// Whether a source has sent bytes of a blob, or is doing so.
    fn brings(&self, blob: usize, source: usize) -> bool {
        let state = &self.blobs[blob];
        state.contributors.contains(&source)
            || (state.n_transfers > 0)
                && (self.transfers.values()).any(|t| t.blob == blob && t.source == source)
    }

    /// When the state changes without a report.
    fn wake(&self, now: Duration) -> Option<Duration> {
        let stalls = (self.transfers.values())
            .filter(|transfer| transfer.cancelled.is_none())
            .map(|transfer| transfer.stalled_at(&self.limits));
        let waits = (self.sources.iter())
            .filter(|source| source.dropped.is_none() && source.wait_until > now)
            .map(|source| source.wait_until);
        stalls.chain(waits).min()
    }

    /// Bytes that show that a request is alive: a quarter of its share, where a rate limit leaves little.
    fn trickle(&self) -> u64 {
        let enough = self.limits.trickle();
        self.limits.bytes_per_second.map_or(enough, |rate| {
            let parallel = self.limits.parallel.max(1) as f64;
            let share = rate as f64 * self.limits.least_rate_over.as_secs_f64() / parallel;
            ((share / 4.0) as u64).clamp(1, enough)
        })
    }
}

/// What has to be read back of a blob.
fn job_for(index: usize, state: &mut BlobState) -> Option<HashJob> {
    if state.busy || state.doomed {
        return None;
    }
    let job = match &mut state.phase {
        Phase::Doubted(_, second) => {
            HashJob::second_opinion(index, state.blob.size(), *second.take()?)
        }
        Phase::Fetching => {
            if let Some((start, end)) = state.part_to_read() {
                let whole = (state.frontier == start)
                    .then(|| state.whole.take())
                    .flatten();
                HashJob::unfinished(index, start..end, whole, state.blob.blocks().cloned())
            } else if let Some(range) = state.unchecked.iter().next() {
                let whole = (state.frontier == range.start)
                    .then(|| state.whole.take())
                    .flatten();
                HashJob::new(index, range, whole, state.blob.blocks().cloned())
            } else {
                let end = state.present.end_of_run(state.frontier)?;
                let whole = state.whole.take()?;
                HashJob::new(index, state.frontier..end, Some(whole), None)
            }
        }
        _ => return None,
    };
    state.busy = true;
    Some(job)
}
