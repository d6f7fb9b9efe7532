//! A planner's state of each blob and each source.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Range,
    time::Duration,
};

use super::{Blob, Fault, Limits, RangeSet, pass::Pass};
use crate::hash::{Expected, Mismatch, Verified, Verifier};

/// The progress of a blob.
#[derive(Debug)]
pub(super) enum Phase {
    /// Bytes are missing, or not hashed yet.
    Fetching,
    /// The digest is wrong, and a second verifier will be tried (`None`: is being tried).
    Doubted(Mismatch, Option<Box<Verifier>>),
    /// The digest is right.
    Verified(Verified),
    /// Its commit is in progress.
    Committing,
    /// It is committed.
    Done,
}

/// A block whose beginning is stored and whose rest is missing.
#[derive(Debug)]
pub(super) struct Unfinished {
    /// The end of the stored bytes.
    pub(super) end: u64,
    /// The pass over them, to be continued; `None` until they were read back.
    pub(super) pass: Option<Pass>,
}

#[derive(Debug)]
pub(super) struct BlobState {
    pub(super) blob: Blob,
    pub(super) phase: Phase,
    /// Bytes that are stored; with block digests, in blocks that are right.
    pub(super) present: RangeSet,
    /// Whole blocks left from an earlier fetch, not yet compared with their digests.
    pub(super) unchecked: RangeSet,
    /// Partially stored blocks, by their start.
    pub(super) unfinished: BTreeMap<u64, Unfinished>,
    /// Bytes that requests in progress will receive.
    pub(super) taken: RangeSet,
    pub(super) n_transfers: usize,
    /// Whether a job is reading it back.
    pub(super) busy: bool,
    /// Bytes from the start on that went through the digest.
    pub(super) frontier: u64,
    /// The digest's state at `frontier`, unless a transfer or a job has it.
    pub(super) whole: Option<Verifier>,
    /// The sources that its bytes came from.
    pub(super) contributors: BTreeSet<usize>,
    /// Whether some were left from an earlier fetch.
    pub(super) inherited: bool,
    /// The one source it may come from, after it was wrong and no source could be blamed.
    pub(super) alone: Option<usize>,
    /// Its bytes can't be trusted: start over as soon as nothing writes to it.
    pub(super) doomed: bool,
    /// Whether one reading of all that is stored, which also went through the digest, found every block
    /// right.
    pub(super) blocks_are_right: bool,
    /// How often everything was read again because the digest was wrong for right blocks.
    pub(super) n_rereads: u32,
    /// For each source, the ETag it gave.
    pub(super) etags: Vec<Option<String>>,
    /// For each source, why it can't give this blob.
    pub(super) refusals: Vec<Option<String>>,
}

impl BlobState {
    pub(super) fn new(blob: Blob, n_sources: usize) -> Self {
        Self {
            phase: Phase::Fetching,
            present: RangeSet::new(),
            unchecked: RangeSet::new(),
            unfinished: BTreeMap::new(),
            taken: RangeSet::new(),
            n_transfers: 0,
            busy: false,
            frontier: 0,
            whole: Some(Verifier::new(blob.expected(), blob.size())),
            contributors: BTreeSet::new(),
            inherited: false,
            alone: None,
            doomed: false,
            blocks_are_right: false,
            n_rereads: 0,
            etags: vec![blob.etag().cloned(); n_sources],
            refusals: vec![None; n_sources],
            blob,
        }
    }

    /// One more source, and why it can't give this blob, if so.
    pub(super) fn add_source(&mut self, refusal: Option<String>) {
        self.etags.push(self.blob.etag().cloned());
        self.refusals.push(refusal);
    }

    /// Records bytes left from an earlier fetch, and returns whether they are of any use.
    pub(super) fn inherit(&mut self, ranges: &RangeSet) -> bool {
        let size = self.blob.size();
        let ranges = ranges.iter().map(|r| r.start.min(size)..r.end.min(size));
        if self.blob.expected() == Expected::SizeOnly && self.blob.etag().is_none() {
            // Nothing would show that they belong to the same file.
            return ranges.into_iter().all(|r| r.is_empty());
        }
        match self.blob.blocks() {
            Some(blocks) => {
                let step = blocks.block_size();
                for range in ranges {
                    let end = match range.end == size {
                        true => size,
                        false => range.end - range.end % step,
                    };
                    let start = range.start.checked_next_multiple_of(step);
                    self.unchecked
                        .insert(start.map_or(end, |start| start.min(end))..end);
                    if range.start <= end && end < range.end {
                        let part = Unfinished {
                            end: range.end,
                            pass: None,
                        };
                        self.unfinished.insert(end, part);
                    }
                }
            }
            None => {
                self.present = ranges.collect();
                self.inherited = !self.present.is_empty();
            }
        }
        true
    }

    /// Forgets every byte, once nothing reads or writes it.
    pub(super) fn start_over(&mut self) {
        self.present = RangeSet::new();
        self.unchecked = RangeSet::new();
        self.unfinished.clear();
        self.frontier = 0;
        self.whole = Some(Verifier::new(self.blob.expected(), self.blob.size()));
        self.contributors.clear();
        self.inherited = false;
        self.doomed = false;
        self.etags.fill(self.blob.etag().cloned());
        self.phase = Phase::Fetching;
    }

    /// Has every block read back and compared once more. They are all stored, and nothing is in progress.
    pub(super) fn read_again(&mut self) {
        self.present = RangeSet::new();
        self.unchecked.insert(0..self.blob.size());
        self.frontier = 0;
        self.whole = Some(Verifier::new(self.blob.expected(), self.blob.size()));
        self.n_rereads += 1;
    }

    /// The first bytes that are neither stored nor being fetched.
    pub(super) fn gap(&self) -> Option<Range<u64>> {
        if self.doomed || !matches!(self.phase, Phase::Fetching) {
            return None;
        }
        let mut claimed = self.present.union(&self.taken).union(&self.unchecked);
        // What is being read back can be continued a little later.
        for (&start, part) in &self.unfinished {
            if part.pass.is_none() {
                claimed.insert(start..self.block_end(start));
            }
        }
        claimed.first_gap(self.blob.size())
    }

    /// The first part of a block that has to be read back, once everything before it was.
    pub(super) fn part_to_read(&self) -> Option<(u64, u64)> {
        let unchecked = self.unchecked.iter().next();
        (self.unfinished.iter())
            .find(|(_, part)| part.pass.is_none())
            .map(|(start, part)| (*start, part.end))
            .filter(|(start, _)| unchecked.is_none_or(|range| *start < range.start))
    }

    /// The end of the block that begins at `start`.
    fn block_end(&self, start: u64) -> u64 {
        let block = self.blob.blocks().and_then(|blocks| blocks.block_at(start));
        block.map_or(start, |(_, range)| range.end)
    }

    /// Whether every byte went through the digest.
    pub(super) fn is_hashed(&self) -> bool {
        matches!(self.phase, Phase::Fetching)
            && !self.doomed
            && self.whole.is_some()
            && self.frontier == self.blob.size()
    }

    pub(super) fn is_idle(&self) -> bool {
        self.n_transfers == 0 && !self.busy
    }

    /// Bytes reported as fetched.
    pub(super) fn done_bytes(&self) -> u64 {
        match self.phase {
            Phase::Fetching => {
                let parts = self.unfinished.iter();
                let parts: u64 = parts.map(|(start, part)| part.end - start).sum();
                self.present.len() + parts
            }
            _ => self.blob.size(),
        }
    }

    /// The range to request at the start of `gap`: whole blocks if there are block digests, and only the
    /// first may be partially stored.
    pub(super) fn segment(&self, gap: &Range<u64>, limits: &Limits) -> Range<u64> {
        let step = self.blob.blocks().map_or(1, |blocks| blocks.block_size());
        let wanted = limits
            .segment_bytes
            .max(1)
            .div_ceil(step)
            .saturating_mul(step);
        let mut parts = self.unfinished.range(gap.start + 1..);
        let next_part = parts.next().map_or(gap.end, |(start, _)| *start);
        gap.start..gap.start.saturating_add(wanted).min(gap.end).min(next_part)
    }
}

/// Whether a source supports ranges.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ranges {
    Supposed,
    No,
}

#[derive(Debug)]
pub(super) struct SourceState {
    pub(super) name: String,
    pub(super) ranges: Ranges,
    pub(super) n_transfers: usize,
    /// Consecutive failures.
    pub(super) failures: u32,
    /// Failures in total. A request that began before the latest one says nothing new.
    pub(super) n_failures: u64,
    /// Not to be asked before this time.
    pub(super) wait_until: Duration,
    /// Whether it didn't answer, or too slowly, when it was asked last: it is asked only if nobody else can be.
    pub(super) is_slow: bool,
    /// Why it is not used any more.
    pub(super) dropped: Option<String>,
    /// Whether it sent something false.
    pub(super) lied: bool,
    /// Bytes of transfers that have ended.
    pub(super) received: u64,
}

impl SourceState {
    pub(super) fn new(name: String) -> Self {
        Self {
            name,
            ranges: Ranges::Supposed,
            n_transfers: 0,
            failures: 0,
            n_failures: 0,
            wait_until: Duration::ZERO,
            is_slow: false,
            dropped: None,
            lied: false,
            received: 0,
        }
    }

    /// Counts a transient failure, and sets when to retry. `n_failures_before` is the count when the request
    /// began, `jitter` is in `0.0..1.0`. `false` if it was one too many.
    pub(super) fn fail(
        &mut self,
        fault: &Fault,
        n_failures_before: u64,
        now: Duration,
        limits: &Limits,
        jitter: f64,
    ) -> bool {
        if self.n_failures == n_failures_before {
            self.failures += 1;
            self.n_failures += 1;
        }
        if self.failures > limits.retries {
            self.dropped = Some(match limits.retries {
                0 => fault.to_string(),
                1 => format!("{fault} (and no better after 1 retry)"),
                n => format!("{fault} (and no better after {n} retries)"),
            });
            return false;
        }
        let doublings = self.failures.saturating_sub(1).min(30);
        let backoff = (limits.backoff_base.saturating_mul(1 << doublings)).min(limits.backoff_cap);
        let mut wait = backoff.mul_f64(0.5 + jitter / 2.0);
        if let Fault::Busy {
            retry_after: Some(asked),
            status,
        } = fault
        {
            if *asked > limits.retry_after_cap {
                let asked = asked.as_secs();
                self.dropped = Some(format!("HTTP status {status}, asks to wait {asked} s"));
                return false;
            }
            wait = wait.max(*asked);
        }
        self.wait_until = self.wait_until.max(now.saturating_add(wait));
        true
    }
}

/// Pseudorandom numbers: SplitMix64, by Steele, Lea and Flood.
#[derive(Debug)]
pub(super) struct Jitter(pub(super) u64);

impl Jitter {
    /// The next one, in `0.0..1.0`.
    pub(super) fn next(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(fault: &Fault, limits: &Limits, jitter: f64, n: u32) -> Vec<Option<u128>> {
        let mut source = SourceState::new("s".into());
        let mut now = Duration::from_secs(1000);
        (0..n)
            .map(|_| {
                let before = source.n_failures;
                let alive = source.fail(fault, before, now, limits, jitter);
                let wait = source.wait_until.saturating_sub(now);
                now += wait;
                alive.then_some(wait.as_millis())
            })
            .collect()
    }

    #[test]
    fn waits_double_up_to_a_cap_and_end() {
        let limits = Limits {
            retries: 8,
            ..Limits::default()
        };
        let some = |waits: [u128; 8]| {
            waits
                .map(Some)
                .into_iter()
                .chain([None])
                .collect::<Vec<_>>()
        };
        let slow = [500, 1000, 2000, 4000, 8000, 16000, 30000, 30000];
        assert_eq!(waits(&Fault::Stalled, &limits, 1.0, 9), some(slow));
        assert_eq!(
            waits(&Fault::Stalled, &limits, 0.0, 9),
            some(slow.map(|ms| ms / 2))
        );
    }

    #[test]
    fn a_server_that_asks_is_given_its_time_within_reason() {
        let limits = Limits::default();
        let busy = |seconds| Fault::Busy {
            status: 429,
            retry_after: Some(Duration::from_secs(seconds)),
        };
        assert_eq!(waits(&busy(7), &limits, 1.0, 2), [Some(7000), Some(7000)]);
        assert_eq!(waits(&busy(0), &limits, 1.0, 2), [Some(500), Some(1000)]);
        assert_eq!(waits(&busy(301), &limits, 1.0, 1), [None]);
    }

    #[test]
    fn requests_that_fail_together_count_once() {
        let (limits, now) = (Limits::default(), Duration::ZERO);
        let mut source = SourceState::new("s".into());
        for _ in 0..10 {
            assert!(source.fail(&Fault::Stalled, 0, now, &limits, 0.5));
        }
        assert_eq!(source.failures, 1);
    }

    #[test]
    fn jitter_is_spread_and_the_same_for_a_seed() {
        let values = |seed| {
            let mut jitter = Jitter(seed);
            [(); 1000].map(|()| jitter.next())
        };
        assert_eq!(values(1), values(1));
        assert_ne!(values(1), values(2));
        assert!(values(3).iter().all(|x| (0.0..1.0).contains(x)));
        let mean = values(4).iter().sum::<f64>() / 1000.0;
        assert!((0.45..0.55).contains(&mean), "{mean}");
    }
}
