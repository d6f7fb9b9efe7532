//! Persistent threads that share the items of one operation at a time.
//!
//! The operations of a forward pass follow one another within microseconds, so starting one must cost less
//! than that, and no operation may wait for a thread that has nothing to do:
//!
//! - Half of the items are shared out beforehand: each thread has its [own](own_items), in a word of its own, so that
//!   threads don't contend when a job begins, and it is known which items a thread takes first.
//! - Another atomic word says how many of the other items are left. A thread takes items by subtracting them from
//!   that word: its share of half of what is left, which are adjacent items, that memory delivers faster than
//!   scattered ones, and ever fewer, so that all threads finish at the same time. The caller then takes what other
//!   threads have not begun of their own.
//! - Both words have the number of the job, so a thread that comes late finds nothing and touches nothing.
//! - The caller works too, and then waits for the items that others took, not for other threads. A
//!   preempted worker holds up an operation only if it was preempted within an item.
//! - When that happens the caller sleeps soon, which leaves its core to the preempted thread, and
//!   [`Pace`] uses fewer threads for a while: a machine whose other cores are busy computes about as
//!   fast as with one thread, instead of waiting for a time slice in every operation.
//! - Workers spin between operations and sleep between forward passes. They are woken by the first
//!   operation of a pass; later ones cost no system call.

use std::any::Any;
use std::fmt;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{OnceLock, PoisonError};
use std::time::Duration;

use crate::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering, fence};
use crate::sync::thread::{self, JoinHandle};
use crate::sync::{Arc, Condvar, IS_MODEL, Instant, Mutex, MutexGuard, spin_loop};

/// How long a worker spins for the next job before it sleeps. The time between the parallel operations of a
/// forward pass is shorter.
const WORKER_SPIN: Duration = Duration::from_micros(if IS_MODEL { 0 } else { 100 });

/// How long a caller spins for the last items before it sleeps: longer than an item takes, so it sleeps only
/// if a worker was preempted within one.
const CALLER_SPIN: Duration = Duration::from_micros(if IS_MODEL { 0 } else { 50 });

/// Spins between two readings of the clock.
const LOOKS: u32 = if IS_MODEL { 1 } else { 32 };

/// A fixed set of threads; the calling thread is one of them.
///
/// One operation runs at a time. A second caller waits for its turn, so that a machine is never
/// asked to run more threads than it was given. Where threads can't be started (WebAssembly without
/// shared memory, or with too few that are lent) the pool has those that it gets.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<Turn>,
}

/// State of the caller whose turn it is.
#[derive(Debug)]
struct Turn {
    epoch: u64,
    pace: Pace,
}

/// What workers do before they wait for a job.
pub(crate) trait Idle: fmt::Debug + Send + Sync {
    /// Called by thread `index` of `n_threads`, the first of which is the caller. There is a job when `is_over`.
    fn idle(&self, index: usize, n_threads: usize, is_over: &dyn Fn() -> bool);
}

/// Nothing.
impl Idle for () {
    fn idle(&self, _: usize, _: usize, _: &dyn Fn() -> bool) {}
}

#[derive(Debug)]
struct Shared {
    work: Line<Work>,
    /// For each thread, the caller first, its own items of the job, as in [`Work::word`].
    own: Box<[Line<AtomicU64>]>,
    done: Line<Done>,
    /// The origin of [`Done::at`]. Read by workers only: where there are none, there may be no clock.
    origin: OnceLock<Instant>,
    /// For each worker, whether it must be unparked to see a new job.
    asleep: Box<[AtomicBool]>,
    stop: AtomicBool,
    idle: Box<dyn Idle>,
    /// Held by a caller from when it marks `done` until it sleeps.
    caller: Mutex<()>,
    wake_caller: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// Written by different threads, kept in separate cache lines.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Line<T>(T);

/// The current job, if any.
#[derive(Debug, Default)]
struct Work {
    /// Number of the job in the upper 40 bits, its items that are nobody's own and haven't been taken yet in the
    /// lower 24.
    word: AtomicU64,
    /// Alive while there are items left, or an item that was taken is not done.
    job: AtomicPtr<Job<'static>>,
    /// Workers with a lower index take part.
    n_workers: AtomicUsize,
}

/// Progress of the job.
#[derive(Debug, Default)]
struct Done {
    /// Items that are done, and [`CALLER_SLEEPS`].
    items: AtomicUsize,
    /// When the last worker finished its items, in nanoseconds; 0 if none took any.
    at: AtomicU64,
}

/// Items of `word`.
const ITEMS: u64 = (1 << 24) - 1;

/// Set by a caller that is about to sleep.
const CALLER_SLEEPS: usize = 1 << (usize::BITS - 1);

/// An operation, on the stack of the caller.
struct Job<'a> {
    f: &'a (dyn Fn(Range<usize>) + Sync),
    range: Range<usize>,
    grain: usize,
    n_items: usize,
}

/// What a thread took of a job.
#[derive(Debug, Default)]
struct Taken {
    n_done: usize,
    /// Of the job.
    n_items: usize,
}

/// The items that thread `index` of `n_threads` takes first, of `n_items` that all share: half of them together, or one
/// each.
pub(crate) fn own_items(n_items: usize, index: usize, n_threads: usize) -> Range<usize> {
    let each = n_items.div_ceil(2 * n_threads.max(1));
    let first = |index: usize| n_items.min(index.saturating_mul(each));
    first(index)..first(index + 1)
}

impl Pool {
    /// A pool of `n_threads` threads, counting the caller; at least one.
    pub(crate) fn new(n_threads: usize, idle: impl Idle + 'static) -> Pool {
        let n_workers = n_threads.saturating_sub(1);
        let shared = Arc::new(Shared {
            work: Line::default(),
            own: (0..=n_workers).map(|_| Line::default()).collect(),
            done: Line::default(),
            origin: OnceLock::new(),
            asleep: (0..n_workers).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            idle: Box::new(idle),
            caller: Mutex::new(()),
            wake_caller: Condvar::new(),
            panic: Mutex::new(None),
        });
        let workers: Vec<_> = (0..n_workers)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                thread::Builder::new()
                    .name(format!("sterna-{}", i + 1))
                    .spawn(move || shared.work(i))
                    .ok()
            })
            .collect();
        let pace = Pace::new(workers.len());
        Pool {
            shared,
            workers,
            turn: Mutex::new(Turn { epoch: 0, pace }),
        }
    }

    /// Calls `f` with ranges that cover `0..n` once each, on all threads.
    ///
    /// Ranges are multiples of `grain`, or end at `n`, and are handed out as threads become free; with
    /// one thread, or no more than `grain` items, there is one range. `f` must not depend on which thread runs which
    /// range, must not wait for another range, which may come later on the same thread, and must not
    /// use the pool itself: it would wait for its own turn for ever. Panics if `f` does, after all
    /// ranges are done.
    pub(crate) fn for_ranges(&self, n: usize, grain: usize, f: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        if self.workers.is_empty() || n <= grain {
            if n > 0 {
                f(0..n);
            }
            return;
        }
        let most = grain.saturating_mul(ITEMS as usize);
        for start in (0..n).step_by(most) {
            let range = start..n.min(start.saturating_add(most));
            self.run(&Job {
                f: &f,
                grain,
                n_items: range.len().div_ceil(grain),
                range,
            });
        }
    }

    /// Threads, the caller's included.
    pub(crate) fn n_threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs all items of `job`, which has at least one and at most [`ITEMS`].
    fn run(&self, job: &Job<'_>) {
        let mut turn = lock(&self.turn);
        let started = Instant::now();
        let n_workers = turn.pace.n_workers(started);
        if n_workers == 0 {
            job.run(0..job.n_items);
            return;
        }
        turn.epoch += 1;
        self.shared.publish(job, turn.epoch, n_workers);
        for (asleep, worker) in self.shared.asleep.iter().zip(&self.workers).take(n_workers) {
            // Behind a fence, as in `await_work`: either the worker sees the new job before it sleeps, or it is seen
            // here to be asleep.
            if asleep.load(Ordering::SeqCst) && asleep.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
        self.shared.take_items(0, || ());
        let idle_since = self.shared.await_done(job.n_items);
        let now = Instant::now();
        if let Some(theirs) = self.shared.workers_done() {
            let own = idle_since.unwrap_or(now);
            let busy = own.min(theirs).saturating_duration_since(started);
            turn.pace
                .finished(now, busy, own.max(theirs) - own.min(theirs));
        }
        let panic = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl fmt::Debug for Pool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("n_workers", &self.workers.len())
            .finish_non_exhaustive()
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // Panics of items are caught and passed on by `run`; there is none to report.
            let _ = worker.join();
        }
    }
}

impl Job<'_> {
    /// Calls the function with these items of the range.
    fn run(&self, items: Range<usize>) {
        let start = self.range.start + items.start * self.grain;
        let len = items.len().saturating_mul(self.grain);
        (self.f)(start..self.range.end.min(start.saturating_add(len)));
    }
}

impl Shared {
    /// Offers `job`. The caller must not return before [`Shared::await_done`] has.
    fn publish(&self, job: &Job<'_>, epoch: u64, n_workers: usize) {
        let n_items = job.n_items;
        let job: *const Job<'_> = job;
        let work = &self.work.0;
        self.done.0.items.store(0, Ordering::Relaxed);
        self.done.0.at.store(0, Ordering::Relaxed);
        // Only the lifetime is lost; `take_from` says why the job is alive where it is used.
        work.job.store(job.cast_mut().cast(), Ordering::Relaxed);
        work.n_workers.store(n_workers, Ordering::Relaxed);
        // Releases the stores above, to any thread that sees this job's number.
        let offer = |to: &AtomicU64, items: Range<usize>| {
            let number = epoch << ITEMS.count_ones();
            to.store(number | items.len() as u64, Ordering::Release);
        };
        let own = |index| own_items(n_items, index, n_workers + 1);
        for (index, to) in self.own.iter().take(n_workers + 1).enumerate() {
            offer(&to.0, own(index));
        }
        offer(&work.word, own(n_workers).end..n_items);
        fence(Ordering::SeqCst);
    }

    /// Takes items of the current job and runs them until none is left: those of thread `me` and those that are nobody's,
    /// and, as the caller, those that others haven't come for. If there were any, calls `then` before they are counted as
    /// done.
    fn take_items(&self, me: usize, then: impl FnOnce()) {
        let mut taken = Taken::default();
        let take_own = |index: usize, share: fn(usize) -> usize, taken: &mut Taken| {
            let end = |n_items, n_threads| own_items(n_items, index, n_threads).end;
            self.take_from(&self.own[index].0, end, |n_left, _| share(n_left), taken);
        };
        take_own(me, |n_left| n_left, &mut taken);
        let share = |n_left, n_threads| n_left / (2 * n_threads);
        self.take_from(&self.work.0.word, |n_items, _| n_items, share, &mut taken);
        if me == 0 {
            // Others don't look: what many have read is slow to be written again.
            (1..self.own.len()).for_each(|index| take_own(index, |n_left| n_left / 2, &mut taken));
        }
        let Taken { n_done, n_items } = taken;
        if n_done > 0 {
            then();
            // Releases what the items wrote. From here on the job may be gone.
            let before = self.done.0.items.fetch_add(n_done, Ordering::Release);
            if before == (n_items - n_done) | CALLER_SLEEPS {
                // The caller marked `done` under this lock and releases it by sleeping.
                drop(lock(&self.caller));
                self.wake_caller.notify_one();
            }
        }
    }

    /// Takes items of `word` until it has none left, and runs them: each time `share` of those that are left, given
    /// the number of threads, or one. `end` is where they end among all, given the numbers of these and of threads.
    fn take_from(
        &self,
        word: &AtomicU64,
        end: impl Fn(usize, usize) -> usize,
        share: impl Fn(usize, usize) -> usize,
        taken: &mut Taken,
    ) {
        let mut now = word.load(Ordering::Acquire);
        while now & ITEMS > 0 {
            let job = self.work.0.job.load(Ordering::Relaxed);
            // If it is that of another job, nothing is taken.
            let n_threads = self.work.0.n_workers.load(Ordering::Relaxed) + 1;
            let n_left = (now & ITEMS) as usize;
            let n = share(n_left, n_threads).max(1);
            let then = now - n as u64;
            if let Err(other) =
                word.compare_exchange_weak(now, then, Ordering::AcqRel, Ordering::Acquire)
            {
                now = other;
                continue;
            }
            // SAFETY: `job` is the job that `word` numbers, and it is alive until the items just taken are done. So is
            // `n_threads` that of this job.
            // - Not of an older one: `publish` stores both before it releases the number, and `word`, read with
            //   acquire, is that release or continues it.
            // - Not of a newer one: the next `publish` happens after `await_done` saw every item done, these too,
            //   which are counted after the loads.
            // - The exchange succeeded, so `word` was still current. Within a job it only falls, and numbers don't
            //   come back while a thread stands between the load and the exchange: at a job each microsecond, 2^40
            //   of them take twelve days.
            // - `run` doesn't return, and so the job lives, before `await_done` does.
            let job = unsafe { &*job };
            let first = end(job.n_items, n_threads) - n_left;
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| job.run(first..first + n))) {
                lock(&self.panic).get_or_insert(panic);
            }
            taken.n_items = job.n_items;
            taken.n_done += n;
            now = word.load(Ordering::Acquire);
        }
    }

    /// Waits until `n_items` are done. If that took long, returns since when.
    fn await_done(&self, n_items: usize) -> Option<Instant> {
        let done = &self.done.0.items;
        // Acquires what the items wrote: every addition releases, and is part of the value read here.
        let is_done = || done.load(Ordering::Acquire) & !CALLER_SLEEPS == n_items;
        if spin(LOOKS, is_done) {
            return None;
        }
        let since = Instant::now();
        while since.elapsed() < CALLER_SPIN {
            if spin(LOOKS, is_done) {
                return Some(since);
            }
        }
        let mut guard = lock(&self.caller);
        done.fetch_or(CALLER_SLEEPS, Ordering::Relaxed);
        while !is_done() {
            guard = self
                .wake_caller
                .wait(guard)
                .unwrap_or_else(PoisonError::into_inner);
        }
        Some(since)
    }

    /// The life of worker `me`.
    fn work(&self, me: usize) {
        while self.await_work(me) {
            self.take_items(me + 1, || {
                let origin = self.origin.get_or_init(Instant::now);
                let at = (origin.elapsed().as_nanos() as u64).max(1);
                self.done.0.at.fetch_max(at, Ordering::Relaxed);
            });
            let n_threads = self.work.0.n_workers.load(Ordering::Relaxed) + 1;
            (self.idle).idle(me + 1, n_threads, &|| self.has_items(me));
        }
    }

    /// Whether there are items for worker `me`. Where any are nobody's, every thread has had some of its own.
    fn has_items(&self, me: usize) -> bool {
        self.own[me + 1].0.load(Ordering::Relaxed) & ITEMS > 0
    }

    /// When the last worker finished its items of the current job; `None` if none took any.
    fn workers_done(&self) -> Option<Instant> {
        match self.done.0.at.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(*self.origin.get()? + Duration::from_nanos(nanos)),
        }
    }

    /// Waits for a job that worker `me` can take part in: spinning for a while, then asleep. False
    /// when the pool is dropped.
    fn await_work(&self, me: usize) -> bool {
        let has_work = || self.has_items(me);
        loop {
            let give_up = Instant::now() + WORKER_SPIN;
            while Instant::now() < give_up {
                if spin(LOOKS, has_work) {
                    return true;
                }
            }
            self.asleep[me].store(true, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // A caller that wakes this worker clears the flag.
            while self.asleep[me].load(Ordering::SeqCst) {
                if self.stop.load(Ordering::SeqCst) {
                    return false;
                }
                if has_work() {
                    self.asleep[me].store(false, Ordering::SeqCst);
                    return true;
                }
                thread::park();
            }
        }
    }
}

/// Spins up to `n` times until a condition holds.
fn spin(n: u32, is_so: impl Fn() -> bool) -> bool {
    for _ in 0..n {
        if is_so() {
            return true;
        }
        spin_loop();
    }
    false
}

/// How many workers to use.
///
/// Items are equal in cost, so threads finish within an item of one another. One that finishes much later
/// than another was preempted: something else runs on its core. Each such stall takes one worker out,
/// which leaves its core to the other threads, for as long as it lasted: what was short, such as a client that reads a
/// token, is over by then. That time grows when its return causes the next stall, so that the cost of stalls stays at
/// a few percent.
#[derive(Debug)]
struct Pace {
    /// Their total number.
    most: usize,
    /// In use.
    n_workers: usize,
    /// Time after which one more takes part again.
    pause: Duration,
    /// When `n_workers` last changed.
    changed: Option<Instant>,
}

impl Pace {
    /// The longest first pause: a time slice of the scheduler.
    const FIRST: Duration = Duration::from_millis(4);
    const LONGEST: Duration = Duration::from_millis(128);

    /// Not a stall, however short the job: a core that wakes up, or an interrupt.
    const PATIENCE: Duration = Duration::from_micros(150);

    fn new(most: usize) -> Pace {
        Pace {
            most,
            n_workers: most,
            pause: Pace::FIRST,
            changed: None,
        }
    }

    /// The workers to use in a job that starts `now`.
    fn n_workers(&mut self, now: Instant) -> usize {
        if self.n_workers < self.most && self.since_change(now) > Some(self.pause) {
            self.n_workers += 1;
            self.changed = Some(now);
        }
        self.n_workers
    }

    /// Records a job that ended `now`: one thread finished its part after `busy`, another later by `apart`.
    fn finished(&mut self, now: Instant, busy: Duration, apart: Duration) {
        if apart <= Pace::PATIENCE + 2 * busy || self.n_workers == 0 {
            return;
        }
        let soon = self.since_change(now) < Some(4 * self.pause) && self.changed.is_some();
        let first = Pace::FIRST.min(apart);
        self.pause = if soon {
            Pace::LONGEST.min(4 * self.pause).max(first)
        } else {
            first
        };
        self.n_workers -= 1;
        self.changed = Some(now);
    }

    fn since_change(&self, now: Instant) -> Option<Duration> {
        self.changed.map(|changed| now - changed)
    }
}

/// Locks, ignoring poison. What the locks of this file protect is consistent whenever a panic can occur.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A slice that several threads write at once, disjointly.
pub(crate) struct SharedSlice<'a, T> {
    start: *mut T,
    len: usize,
    _slice: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `range_mut`, whose caller promises that ranges don't overlap.
unsafe impl<T: Send> Sync for SharedSlice<'_, T> {}

impl<'a, T> SharedSlice<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedSlice {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            _slice: std::marker::PhantomData,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// All elements.
    pub(crate) fn into_slice(self) -> &'a mut [T] {
        // SAFETY: ranges borrow what is moved here, so there are none.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// The elements in `range`. Panics if they are not all in the slice.
    ///
    /// # Safety
    /// While the result lives, no other thread may hold a range that overlaps it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn range_mut(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: in bounds by the check above; not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_is_visited_once() {
        for n_threads in [1, 2, 3, 8] {
            let pool = Pool::new(n_threads, ());
            for (n, grain) in [(0, 1), (1, 1), (7, 2), (1000, 16), (5, 100), (64, 0)] {
                let counts: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.for_ranges(n, grain, |range| {
                    for i in range {
                        counts[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "panics abort")]
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3, ());
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_ranges(100, 1, |range| assert!(!range.contains(&57), "item 57"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.for_ranges(100, 1, |range| {
            sum.fetch_add(range.sum(), Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "there are no threads")]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2, ());
        let sum = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        pool.for_ranges(10, 1, |range| {
                            sum.fetch_add(range.len(), Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(sum.into_inner(), 4 * 50 * 10);
    }

    /// Jobs so short that workers come late to most of them, and find another one instead.
    #[test]
    fn short_jobs_do_not_mix() {
        let n_jobs = if cfg!(miri) { 100 } else { 20_000 };
        for n_threads in [2, 3, 5] {
            let pool = Pool::new(n_threads, ());
            for job in 0..n_jobs {
                let n = 2 + job % 7;
                let mut out = vec![0; n];
                let values: Vec<usize> = (0..n).map(|i| i * job).collect();
                {
                    let out = SharedSlice::new(&mut out);
                    pool.for_ranges(n, 1, |range| {
                        // SAFETY: ranges don't overlap.
                        unsafe { out.range_mut(range.clone()) }.copy_from_slice(&values[range]);
                    });
                }
                assert_eq!(out, values);
            }
        }
    }

    #[test]
    #[cfg_attr(target_family = "wasm", ignore = "there are no threads")]
    fn sleeping_threads_wake_up() {
        let pool = Pool::new(2, ());
        let caller = std::thread::current().id();
        for _ in 0..3 {
            std::thread::sleep(20 * WORKER_SPIN);
            let theirs = AtomicUsize::new(0);
            let start = Instant::now();
            // Until the worker has come and taken an item, which then outlasts the caller's spinning.
            while theirs.load(Ordering::Relaxed) == 0 && start.elapsed().as_secs() < 10 {
                pool.for_ranges(100, 1, |_| {
                    if std::thread::current().id() == caller {
                        std::thread::sleep(WORKER_SPIN / 10);
                    } else {
                        theirs.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(20 * CALLER_SPIN);
                    }
                });
            }
            assert!(theirs.into_inner() > 0);
        }
    }

    #[test]
    fn stalls_take_workers_out_for_a_while() {
        let (own, stall) = (Duration::from_millis(1), Duration::from_millis(3));
        let mut pace = Pace::new(2);
        let mut now = Instant::now();
        pace.finished(now, own, 2 * own);
        assert_eq!(pace.n_workers(now), 2, "a wait, but no stall");
        for (n_workers, pause) in [(1, 3), (0, 12), (0, 12)] {
            pace.finished(now, own, stall);
            let pause = Duration::from_millis(pause);
            assert_eq!((pace.n_workers(now), pace.pause), (n_workers, pause));
        }
        for n_workers in [1, 2, 2] {
            now += 2 * pace.pause;
            assert_eq!(pace.n_workers(now), n_workers);
        }
        for _ in 0..20 {
            pace.finished(now, own, stall);
            now += 2 * pace.pause;
            assert_eq!(pace.n_workers(now), 2, "one is tried again");
        }
        assert_eq!(pace.pause, Pace::LONGEST);
        now += 5 * Pace::LONGEST;
        pace.finished(now, own, stall);
        assert_eq!(pace.pause, stall, "a stall that has not been for long");
    }

    /// A client on the same machine reads each token: that is over when it is noticed.
    #[test]
    fn short_stalls_take_workers_out_for_as_short_a_time() {
        let (own, stall) = (Duration::from_micros(50), Duration::from_micros(500));
        let mut pace = Pace::new(1);
        let mut now = Instant::now();
        for _ in 0..20 {
            pace.finished(now, own, stall);
            assert_eq!((pace.n_workers(now), pace.pause), (0, stall));
            now += stall + own;
            assert_eq!(pace.n_workers(now), 1);
            now += Duration::from_millis(12);
        }
    }
}
