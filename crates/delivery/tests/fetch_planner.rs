//! The planner, driven by a simulated world of sources that fail and lie at random.

use std::{ops::Range, time::Duration};

use proptest::prelude::*;
use sterna_delivery::{
    fetch::{Action, Blob, Failure, Fault, Fetch, HashJob, Head, Limits, RangeSet, Transfer},
    hash::{Algorithm, BlockDigests, Expected, digest_of},
};

const BLOCK: u64 = 64;

/// How a source misbehaves, on one answer in three unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    Honest,
    /// Honest, but gives whole files only.
    WholeOnly,
    Cuts,
    Stalls,
    Busy,
    Unreachable,
    /// Has no blob of odd index, ever.
    Lacks,
    WrongBytes,
    /// Wrong bytes in every answer.
    Garbage,
    Page,
    WrongSize,
    WrongRange,
    NewEtag,
    /// Whole files only, and cuts them.
    WholeAndCuts,
}

const KINDS: [Kind; 14] = [
    Kind::Honest,
    Kind::WholeOnly,
    Kind::Cuts,
    Kind::Stalls,
    Kind::Busy,
    Kind::Unreachable,
    Kind::Lacks,
    Kind::WrongBytes,
    Kind::Garbage,
    Kind::Page,
    Kind::WrongSize,
    Kind::WrongRange,
    Kind::NewEtag,
    Kind::WholeAndCuts,
];

#[derive(Debug, Clone)]
struct Case {
    sizes: Vec<usize>,
    algorithm: Algorithm,
    blocks: bool,
    kinds: Vec<Kind>,
    parallel: usize,
    segment: u64,
    /// For each blob, what an earlier fetch left of it, and whether that is right.
    left: Vec<(Range<u64>, bool)>,
    seed: u64,
    /// Nothing is known of the bytes but their number, and each source has others.
    size_only: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let left = (0u64..1200, 0u64..1200, prop::bool::weighted(0.8));
    (
        prop::collection::vec((0usize..1000, left), 1..6),
        prop::sample::select(vec![Algorithm::Sha256, Algorithm::Blake3]),
        any::<bool>(),
        prop::collection::vec(prop::sample::select(KINDS.to_vec()), 1..5),
        1usize..6,
        1u64..400,
        any::<u64>(),
    )
        .prop_map(
            |(blobs, algorithm, blocks, kinds, parallel, segment, seed)| Case {
                sizes: blobs.iter().map(|(size, _)| *size).collect(),
                left: (blobs.into_iter())
                    .map(|(_, (a, b, right))| (a.min(b)..a.max(b), right))
                    .collect(),
                algorithm,
                blocks,
                kinds,
                parallel,
                segment,
                seed,
                size_only: false,
            },
        )
}

/// A request under way: what the source will say, send, and do then.
struct Running {
    transfer: Transfer,
    head: Head,
    body: Vec<u8>,
    sent: usize,
    begun: bool,
    then: Then,
    cancelled: bool,
}

#[derive(PartialEq)]
enum Then {
    End,
    Stall,
    NoAnswer,
}

struct World {
    case: Case,
    truth: Vec<Vec<u8>>,
    store: Vec<Vec<u8>>,
    /// For each byte, the transfer under way that wrote it.
    writers: Vec<Vec<Option<u64>>>,
    committed: Vec<bool>,
    running: Vec<Running>,
    jobs: Vec<HashJob>,
    /// Commits under way.
    commits: Vec<usize>,
    now: Duration,
    faults: u64,
    received: u64,
    random: u64,
}

enum End {
    Done,
    Failed(String),
}

fn truth(sizes: &[usize]) -> Vec<Vec<u8>> {
    let byte = |i: usize, j: usize| (i * 31 + j * 7 + (j >> 8)) as u8;
    (sizes.iter().enumerate())
        .map(|(i, size)| (0..*size).map(|j| byte(i, j)).collect())
        .collect()
}

impl World {
    fn new(case: Case, truth: Vec<Vec<u8>>, store: Vec<Vec<u8>>, faults: u64) -> Self {
        Self {
            writers: truth.iter().map(|t| vec![None; t.len()]).collect(),
            committed: vec![false; truth.len()],
            truth,
            store,
            running: vec![],
            jobs: vec![],
            commits: vec![],
            now: Duration::ZERO,
            faults,
            received: 0,
            random: case.seed | 1,
            case,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) % below.max(1)
    }

    /// A source's version of a blob.
    fn version(&self, blob: usize, source: usize) -> Vec<u8> {
        let key = if self.case.size_only { source as u8 } else { 0 };
        self.truth[blob].iter().map(|byte| byte ^ key).collect()
    }

    fn answer(&mut self, transfer: Transfer) -> Running {
        let request = transfer.request().clone();
        let kind = self.case.kinds[request.source];
        let truth = &self.version(request.blob, request.source);
        let size = truth.len() as u64;
        let whole_only = matches!(kind, Kind::WholeOnly | Kind::WholeAndCuts);
        let range = request
            .range
            .clone()
            .filter(|_| !whole_only)
            .unwrap_or(0..size);
        let mut body = truth[range.start as usize..range.end as usize].to_vec();
        let mut head = Head {
            status: 200,
            content_length: Some(body.len() as u64),
            etag: Some("\"1\"".into()),
            ..Head::default()
        };
        if request.range.is_some() && !whole_only {
            head.status = 206;
            head.content_range = Some(format!("bytes {}-{}/{size}", range.start, range.end - 1));
        }
        let mut then = Then::End;
        let strikes = match kind {
            Kind::Garbage => true,
            Kind::Lacks => request.blob % 2 == 1,
            _ => self.random(3) == 0,
        };
        let mut fault = strikes;
        match kind {
            _ if !strikes => {}
            Kind::Honest | Kind::WholeOnly => fault = false,
            Kind::Cuts | Kind::WholeAndCuts => {
                body.truncate(self.random(range.end - range.start) as usize)
            }
            Kind::Stalls => {
                body.truncate(self.random(range.end - range.start) as usize);
                then = Then::Stall;
            }
            Kind::Busy => {
                head.status = 503;
                head.retry_after = (self.random(2) == 0).then(|| "3".into());
            }
            Kind::Unreachable => then = Then::NoAnswer,
            Kind::Lacks => head.status = 404,
            Kind::WrongBytes | Kind::Garbage => {
                let at = self.random(body.len() as u64) as usize;
                body[at..].fill(0x55);
                body[at] ^= 0xFF;
            }
            Kind::Page => head.content_type = Some("text/html".into()),
            Kind::WrongSize => {
                head.content_length = Some(size + 1);
                head.content_range = head
                    .content_range
                    .map(|r| r.replace(&format!("/{size}"), "/77777"));
            }
            Kind::WrongRange => {
                head.status = 206;
                head.content_range =
                    Some(format!("bytes {}-{}/{size}", range.start + 1, range.end));
            }
            Kind::NewEtag => head.etag = Some("\"2\"".into()),
        }
        // A source that gives whole files only sends what is there already once more.
        let again = request.range.is_none() && transfer.offset() > 0;
        self.faults += u64::from(fault || again);
        Running {
            transfer,
            head,
            body,
            sent: 0,
            begun: false,
            then,
            cancelled: false,
        }
    }

    /// Lets one request go on by one step, and ends it if it ends.
    fn step(&mut self, fetch: &mut Fetch, index: usize) {
        let piece = 1 + self.random(200) as usize;
        self.now += Duration::from_millis(1);
        let running = &mut self.running[index];
        let before = running.transfer.offset() as usize;
        let outcome = running.advance(&mut self.store, piece);
        let (id, after) = (running.transfer.id(), running.transfer.offset() as usize);
        for writer in &mut self.writers[running.transfer.request().blob][before..after] {
            assert!(writer.is_none(), "two write to one place");
            *writer = Some(id);
        }
        match outcome {
            None => {
                fetch.progress(id, running.transfer.received(), self.now);
            }
            Some(outcome) => {
                let running = self.running.swap_remove(index);
                self.received += running.transfer.received();
                for writer in &mut self.writers[running.transfer.request().blob] {
                    writer.take_if(|writer| *writer == id);
                }
                fetch.transferred(running.transfer, outcome, self.now);
            }
        }
    }

    fn run(&mut self) -> End {
        let blobs: Vec<Blob> = (self.truth.iter().enumerate())
            .map(|(i, truth)| {
                let expected = match self.case.size_only {
                    true => Expected::SizeOnly,
                    false => Expected::Digest(digest_of(self.case.algorithm, truth)),
                };
                let blob = Blob::new(&format!("b{i}"), truth.len() as u64, expected).unwrap();
                if !self.case.blocks {
                    return blob;
                }
                let blocks = BlockDigests::of(Algorithm::Sha256, BLOCK, truth).unwrap();
                blob.with_blocks(blocks).unwrap()
            })
            .collect();
        let names = (0..self.case.kinds.len())
            .map(|i| format!("source {i}"))
            .collect();
        let limits = Limits {
            parallel: self.case.parallel,
            segment_bytes: self.case.segment,
            seed: self.case.seed,
            ..Limits::default()
        };
        let mut fetch = Fetch::new(blobs, names, limits).unwrap();
        for (blob, (range, _)) in self.case.left.iter().enumerate() {
            fetch.stored(blob, &[range.clone()].into_iter().collect::<RangeSet>());
        }
        for _ in 0..200_000 {
            match fetch.poll(self.now) {
                Action::Transfer(transfer) => {
                    let running = self.answer(transfer);
                    self.running.push(running);
                    assert!(self.running.len() <= self.case.parallel);
                }
                Action::Hash(job) => self.jobs.push(job),
                Action::Cancel(id) => {
                    // A request given up in the middle of a block loses that block.
                    self.faults += 1;
                    let running = self.running.iter_mut().find(|r| r.transfer.id() == id);
                    running.expect("only what runs is cancelled").cancelled = true;
                }
                Action::Discard { blob, range } => {
                    self.check_unwritten(blob, &range);
                    self.store[blob][range.start as usize..range.end as usize].fill(0xEE);
                }
                Action::Commit { blob, .. } => {
                    self.check_unwritten(blob, &(0..self.store[blob].len() as u64));
                    let versions = if self.case.size_only {
                        self.case.kinds.len()
                    } else {
                        1
                    };
                    let right = |source| self.store[blob] == self.version(blob, source);
                    assert!((0..versions).any(right), "wrong bytes are committed");
                    assert!(!self.committed[blob], "committed twice");
                    self.committed[blob] = true;
                    self.commits.push(blob);
                }
                Action::Wait(until) => self.wait(&mut fetch, until),
                Action::Done => {
                    assert!(self.committed.iter().all(|c| *c) && self.running.is_empty());
                    let so_far = fetch.so_far();
                    assert_eq!(so_far.done_bytes, so_far.total_bytes);
                    assert_eq!(so_far.received_bytes, self.received);
                    return End::Done;
                }
                Action::Failed(failure) => return End::Failed(failure.to_string()),
                other => panic!("{other:?}"),
            }
        }
        panic!("it does not end");
    }

    /// Checks that no request under way has written to `range`.
    fn check_unwritten(&self, blob: usize, range: &Range<u64>) {
        let writers = &self.writers[blob][range.start as usize..range.end as usize];
        assert!(writers.iter().all(Option::is_none), "it is being written");
    }

    /// Something happens: a request goes on, a job is done, or time passes.
    fn wait(&mut self, fetch: &mut Fetch, until: Option<Duration>) {
        let lively: Vec<usize> = (0..self.running.len())
            .filter(|&i| !self.running[i].is_stuck())
            .collect();
        let choices = lively.len() + self.jobs.len() + self.commits.len();
        if choices == 0 {
            self.now = until
                .expect("nothing runs, and nothing is waited for")
                .max(self.now);
            return;
        }
        let choice = self.random(choices as u64) as usize;
        if let Some(&index) = lively.get(choice) {
            self.step(fetch, index);
            return;
        }
        if choice >= lively.len() + self.jobs.len() {
            let commit = choice - lively.len() - self.jobs.len();
            fetch.committed(self.commits.swap_remove(commit));
            return;
        }
        let mut job = self.jobs.swap_remove(choice - lively.len());
        let (blob, range) = (job.blob(), job.remaining());
        self.check_unwritten(blob, &range);
        for piece in self.store[blob][range.start as usize..range.end as usize].chunks(100) {
            job.take(piece);
        }
        fetch.hashed(job);
    }
}

impl Running {
    fn is_stuck(&self) -> bool {
        self.then == Then::Stall && self.begun && self.sent == self.body.len() && !self.cancelled
    }

    /// The outcome, if it is over.
    fn advance(&mut self, store: &mut [Vec<u8>], piece: usize) -> Option<Result<(), Fault>> {
        if self.cancelled {
            return Some(Err(Fault::Cancelled));
        }
        if self.then == Then::NoAnswer {
            let message = "connection refused".into();
            return Some(Err(Fault::Unreachable { message }));
        }
        if !self.begun {
            self.begun = true;
            return self.transfer.begin(&self.head).err().map(Err);
        }
        if self.transfer.is_complete() {
            return Some(Ok(()));
        }
        if self.sent == self.body.len() {
            return Some(self.transfer.end());
        }
        let end = (self.sent + piece).min(self.body.len());
        let bytes = &self.body[self.sent..end];
        self.sent = end;
        let offset = |transfer: &Transfer| transfer.offset() as usize;
        let stored = self.transfer.wanted(bytes).and_then(|bytes| {
            let at = offset(&self.transfer);
            store[self.transfer.request().blob][at..at + bytes.len()].copy_from_slice(bytes);
            self.transfer.stored(bytes)
        });
        stored.err().map(Err)
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_fetch_always_ends_with_the_right_bytes_or_an_error(case in case()) {
        let truth = truth(&case.sizes);
        let mut store: Vec<Vec<u8>> = truth.iter().map(|t| vec![0xEE; t.len()]).collect();
        let mut missing = 0;
        let mut faults = 0;
        for (i, (range, right)) in case.left.iter().enumerate() {
            let size = truth[i].len();
            let range = (range.start as usize).min(size)..(range.end as usize).min(size);
            store[i][range.clone()].copy_from_slice(&truth[i][range.clone()]);
            if !right && !range.is_empty() {
                store[i][range.start] ^= 1;
                // What it was worth is fetched, and that is no waste yet.
                faults += 1;
            }
            let mut left = range.len();
            if case.blocks {
                // Blocks whose beginning is missing are fetched whole, and by who gives whole files only,
                // those too whose end is missing.
                let whole = case.kinds.iter().any(|k| matches!(k, Kind::WholeOnly | Kind::WholeAndCuts));
                let end = if whole && range.end < size { range.end - range.end % BLOCK as usize } else { range.end };
                left = end.saturating_sub(range.start.next_multiple_of(BLOCK as usize));
            }
            missing += size - left.min(size);
        }
        let mut world = World::new(case, truth, store, faults);
        match world.run() {
            End::Done => {
                let largest = world.case.sizes.iter().max().copied().unwrap_or(0);
                let whole = world.case.kinds.iter().any(|k| matches!(k, Kind::WholeOnly | Kind::WholeAndCuts));
                let unit = if world.case.blocks && !whole { BLOCK as usize } else { largest };
                let bound = missing as u64 + world.faults * unit as u64;
                prop_assert!(
                    world.received <= bound,
                    "received {} of {missing}, {} faults, unit {unit}", world.received, world.faults
                );
            }
            End::Failed(message) => {
                prop_assert!(!world.case.kinds.contains(&Kind::Honest), "{message}");
                for i in 0..world.case.kinds.len() {
                    prop_assert!(message.contains(&format!("source {i}: ")), "{message}");
                }
            }
        }
    }

    #[test]
    fn parts_of_two_sources_are_never_mixed_where_no_digest_would_tell(case in case()) {
        let lies = [
            Kind::WrongBytes, Kind::Garbage, Kind::Page, Kind::WrongSize, Kind::WrongRange, Kind::NewEtag,
        ];
        let kinds = case.kinds.iter().map(|kind| if lies.contains(kind) { Kind::Cuts } else { *kind });
        let kinds = kinds.collect();
        let case = Case { size_only: true, blocks: false, kinds, ..case };
        let truth = truth(&case.sizes);
        // What an earlier fetch left can't be told from anything.
        let store = truth.iter().map(|t| vec![0xEE; t.len()]).collect();
        let mut world = World::new(case, truth, store, 0);
        if let End::Failed(message) = world.run() {
            prop_assert!(!world.case.kinds.contains(&Kind::Honest), "{message}");
        }
    }
}

/// A fetch of one blob of four blocks in two requests, from one honest source, whose store loses bytes.
/// `lose` is asked each time that something is stored or read, and may change what lies there.
fn fetch_into(
    truth: &[u8],
    expected: Expected,
    mut lose: impl FnMut(&mut [u8]),
) -> (Vec<u8>, Vec<Range<u64>>, Action) {
    let blocks = BlockDigests::of(Algorithm::Sha256, BLOCK, truth).unwrap();
    let size = truth.len() as u64;
    let blob = Blob::new("b", size, expected).unwrap();
    let limits = Limits {
        segment_bytes: 2 * BLOCK,
        ..Limits::default()
    };
    let blobs = vec![blob.with_blocks(blocks).unwrap()];
    let mut fetch = Fetch::new(blobs, vec!["source".into()], limits).unwrap();
    let mut store = vec![0xEE; truth.len()];
    let (mut running, mut asked) = (Vec::new(), Vec::new());
    loop {
        match fetch.poll(Duration::ZERO) {
            Action::Transfer(transfer) => running.push(transfer),
            Action::Hash(mut job) => {
                lose(&mut store);
                let range = job.remaining();
                job.take(&store[range.start as usize..range.end as usize]);
                fetch.hashed(job);
            }
            Action::Wait(_) => {
                // The last one first, so that what it brings must be read back.
                let mut transfer = running.pop().expect("nothing runs");
                let range = transfer.request().range.clone().expect("a part");
                asked.push(range.clone());
                let part = format!("bytes {}-{}/{size}", range.start, range.end - 1);
                let head = Head {
                    status: 206,
                    content_length: Some(range.end - range.start),
                    content_range: Some(part),
                    ..Head::default()
                };
                transfer.begin(&head).unwrap();
                let bytes = &truth[range.start as usize..range.end as usize];
                assert_eq!(transfer.wanted(bytes), Ok(bytes));
                store[range.start as usize..range.end as usize].copy_from_slice(bytes);
                transfer.stored(bytes).unwrap();
                fetch.transferred(transfer, Ok(()), Duration::ZERO);
            }
            Action::Commit { blob, .. } => fetch.committed(blob),
            end @ (Action::Done | Action::Failed(_)) => return (store, asked, end),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_block_that_is_lost_after_it_came_is_fetched_again() {
    let truth: Vec<u8> = (0..4 * BLOCK).map(|i| (i * 7 + (i >> 5)) as u8).collect();
    let right = Expected::Digest(digest_of(Algorithm::Sha256, &truth));
    let mut n_lost = 0;
    let (store, asked, end) = fetch_into(&truth, right, |store| {
        if n_lost < 2 {
            n_lost += 1;
            store[200..210].fill(0);
        }
    });
    assert!(matches!(end, Action::Done), "{end:?}");
    assert!(store == truth);
    assert_eq!(asked, [128..256, 0..128, 192..256]);
    // Not for ever.
    let (_, asked, end) = fetch_into(&truth, right, |store| {
        store[70..80].fill(0);
        store[200..210].fill(0);
    });
    let Action::Failed(Failure::Unsteady { n_times, .. }) = end else {
        panic!("{end:?}");
    };
    assert_eq!(asked.len() as u32, 2 + 2 * n_times);
}

#[test]
fn only_what_is_right_on_disk_shows_that_digests_contradict() {
    let truth: Vec<u8> = (0..4 * BLOCK).map(|i| (i * 7 + (i >> 5)) as u8).collect();
    let wrong = Expected::Digest(digest_of(Algorithm::Sha256, b"something else"));
    let mut n_read = 0;
    let (_, asked, end) = fetch_into(&truth, wrong, |_| n_read += 1);
    assert!(
        matches!(end, Action::Failed(Failure::Contradiction { .. })),
        "{end:?}"
    );
    // Twice, each time as SHA-256 and then as BLAKE3.
    assert_eq!((asked.len(), n_read), (2, 4));
}

#[test]
fn a_source_that_drips_or_is_silent_is_asked_last() {
    let at = Duration::from_secs;
    let blob = |name| {
        let expected = Expected::Digest(digest_of(Algorithm::Sha256, &[0; 4000]));
        Blob::new(name, 4000, expected).unwrap()
    };
    let limits = Limits {
        parallel: 2,
        segment_bytes: 1000,
        ..Limits::default()
    };
    // Bytes that source 0 brings in its first second, and when it is given up.
    for (n_bytes, given_up) in [(100, 11), (0, 30)] {
        let names = vec!["slow".into(), "good".into()];
        let mut fetch = Fetch::new(vec![blob("b"), blob("c")], names, limits.clone()).unwrap();
        let next = |fetch: &mut Fetch, now| match fetch.poll(now) {
            Action::Transfer(transfer) => transfer,
            other => panic!("{other:?}"),
        };
        let slow = next(&mut fetch, at(0));
        let other = next(&mut fetch, at(0));
        assert_eq!(slow.request().source, 0);
        fetch.progress(slow.id(), n_bytes, at(1));
        for now in [1, given_up - 1] {
            fetch.progress(other.id(), now * 100_000, at(now));
            assert!(matches!(fetch.poll(at(now)), Action::Wait(Some(_))));
        }
        assert!(matches!(fetch.poll(at(given_up)), Action::Cancel(id) if id == slow.id()));
        fetch.transferred(slow, Err(Fault::Cancelled), at(given_up));
        // Its wait is over, and it would have the least to do.
        let again = next(&mut fetch, at(given_up + 1));
        assert_eq!(again.request().source, 1);
    }
    // One that didn't answer before is not asked first.
    let names = vec!["doubted".into(), "good".into()];
    let mut fetch = Fetch::new(vec![blob("b")], names, limits).unwrap();
    fetch.doubt(0);
    for _ in 0..2 {
        let Action::Transfer(transfer) = fetch.poll(at(0)) else {
            panic!("expected a transfer");
        };
        assert_eq!(transfer.request().source, 1);
    }
}

#[test]
fn a_stranger_that_comes_later_takes_part_and_is_named_when_it_lies() {
    let at = Duration::from_secs;
    let expected = Expected::Digest(digest_of(Algorithm::Blake3, &[0; 2000]));
    let blobs = vec![
        Blob::new("unknown", 500, Expected::SizeOnly).unwrap(),
        Blob::new("b", 2000, expected).unwrap(),
        Blob::new("c", 2000, expected).unwrap(),
    ];
    let limits = Limits {
        parallel: 3,
        segment_bytes: 2000,
        ..Limits::default()
    };
    let mut fetch = Fetch::new(blobs, vec!["mirror".into()], limits).unwrap();
    let next = |fetch: &mut Fetch| match fetch.poll(at(0)) {
        Action::Transfer(transfer) => transfer,
        other => panic!("{other:?}"),
    };
    let unknown = next(&mut fetch);
    assert_eq!(fetch.add_stranger("peer".to_owned()), 1);
    let mut shared = next(&mut fetch);
    assert_eq!((shared.request().blob, shared.request().source), (1, 1));
    // The least busy of the two; what has no hash goes to no stranger, however busy the mirror is.
    let other = next(&mut fetch);
    assert_eq!((other.request().blob, other.request().source), (2, 0));
    fetch.transferred(unknown, Err(Fault::Stalled), at(0));
    assert!(matches!(fetch.poll(at(0)), Action::Wait(_)));
    let again = match fetch.poll(at(1)) {
        Action::Transfer(transfer) => transfer,
        other => panic!("{other:?}"),
    };
    assert_eq!((again.request().blob, again.request().source), (0, 0));
    let head = Head {
        status: 200,
        content_length: Some(2000),
        ..Head::default()
    };
    shared.begin(&head).unwrap();
    shared.stored(&[1; 2000]).unwrap();
    fetch.transferred(shared, Ok(()), at(1));
    // The other meaning of the digest is tried, too.
    let Action::Hash(mut job) = fetch.poll(at(1)) else {
        panic!("expected a second opinion");
    };
    job.take(&[1; 2000]);
    fetch.hashed(job);
    assert!(matches!(fetch.poll(at(1)), Action::Discard { .. }));
    let (liar, why) = fetch.next_liar().unwrap();
    assert_eq!(liar, 1);
    assert!(why.starts_with("`b`: "), "{why}");
    assert_eq!(fetch.next_liar(), None);
    let received: Vec<_> = fetch.received_by().collect();
    assert_eq!(received, [("mirror", 0), ("peer", 2000)]);
    // The mirror gives what the peer didn't.
    let instead = match fetch.poll(at(1)) {
        Action::Transfer(transfer) => transfer,
        other => panic!("{other:?}"),
    };
    assert_eq!((instead.request().blob, instead.request().source), (1, 0));
}
