//! Persistent threads that share out the items of one operation at a time.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

/// How often a waiting thread looks again before it sleeps (a worker) or yields (the caller).
///
/// The operations of a forward pass follow one another within microseconds; sleeping between them
/// would cost more than they take.
const SPINS: u32 = 4_000;

/// A fixed set of threads; the calling thread is one of them.
///
/// One operation runs at a time. A second caller waits for its turn, so that a machine is never
/// asked to run more threads than it was given. Where threads can't be started (WebAssembly without
/// shared memory) the pool is the calling thread alone.
#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
}

#[derive(Debug)]
struct Shared {
    /// Counts published jobs; a worker runs when it has seen fewer.
    generation: AtomicU64,
    /// Workers that have not finished the current job.
    busy: AtomicUsize,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Debug)]
struct State {
    job: Option<Job>,
    panic: Option<Box<dyn Any + Send>>,
    stop: bool,
}

/// What each worker calls: a closure that lives on the stack of [`Pool::broadcast`].
#[derive(Clone, Copy)]
struct Job(*const (dyn Fn() + Sync));

// SAFETY: the closure behind the pointer is `Sync`, and `broadcast` keeps it alive until every
// worker has finished with it.
unsafe impl Send for Job {}

impl std::fmt::Debug for Job {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Job")
    }
}

impl Pool {
    /// A pool of `n_threads` threads, counting the caller; at least one.
    pub(crate) fn new(n_threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            generation: AtomicU64::new(0),
            busy: AtomicUsize::new(0),
            state: Mutex::new(State {
                job: None,
                panic: None,
                stop: false,
            }),
            wake: Condvar::new(),
        });
        let workers = (1..n_threads)
            .map_while(|i| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("sterna-{i}"))
                    .spawn(move || shared.work())
                    .ok()
            })
            .collect();
        Pool {
            shared,
            workers,
            turn: Mutex::new(()),
        }
    }

    /// Calls `f` with ranges that cover `0..n` once each, on all threads.
    ///
    /// Ranges are at most `grain` long and are handed out as threads become free; with one thread, or
    /// no more than `grain` items, there is one range. `f` must not depend on which thread runs which
    /// range, and must not use the pool itself: it would wait for its own turn for ever. Panics if
    /// `f` does, after all threads are done.
    pub(crate) fn for_ranges(&self, n: usize, grain: usize, f: impl Fn(Range<usize>) + Sync) {
        let grain = grain.max(1);
        if self.workers.is_empty() || n <= grain {
            if n > 0 {
                f(0..n);
            }
            return;
        }
        let next = AtomicUsize::new(0);
        self.broadcast(&|| {
            loop {
                let start = next.fetch_add(grain, Ordering::Relaxed);
                if start >= n {
                    return;
                }
                f(start..n.min(start + grain));
            }
        });
    }

    /// Runs `f` once on every thread and returns when all have finished.
    fn broadcast(&self, f: &(dyn Fn() + Sync)) {
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. The pointer is dropped from `state` below, and this
        // function does not return or unwind before `busy` is zero, that is, before the last worker
        // has made its last use of it.
        let job = Job(unsafe {
            std::mem::transmute::<*const (dyn Fn() + Sync), *const (dyn Fn() + Sync + 'static)>(f)
        });
        self.shared
            .busy
            .store(self.workers.len(), Ordering::Relaxed);
        {
            let mut state = lock(&self.shared.state);
            state.job = Some(job);
            self.shared.generation.fetch_add(1, Ordering::Release);
        }
        self.shared.wake.notify_all();

        let own = catch_unwind(AssertUnwindSafe(f));
        let mut spins = 0;
        while self.shared.busy.load(Ordering::Acquire) > 0 {
            if spins < SPINS {
                spins += 1;
                std::hint::spin_loop();
            } else {
                std::thread::yield_now();
            }
        }
        let theirs = {
            let mut state = lock(&self.shared.state);
            state.job = None;
            state.panic.take()
        };
        drop(turn);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.shared.state).stop = true;
        self.shared.generation.fetch_add(1, Ordering::Release);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A worker's panics are caught and passed on by `broadcast`; there is none to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            // SAFETY: `broadcast` waits for `busy` to fall, which happens after this call.
            let result = catch_unwind(AssertUnwindSafe(|| unsafe { (*job.0)() }));
            if let Err(panic) = result {
                lock(&self.state).panic = Some(panic);
            }
            self.busy.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a job this worker has not run: spinning for a while, then asleep.
    fn next_job(&self, seen: &mut u64) -> Option<Job> {
        for _ in 0..SPINS {
            if self.generation.load(Ordering::Acquire) != *seen {
                break;
            }
            std::hint::spin_loop();
        }
        let mut state = lock(&self.state);
        loop {
            if state.stop {
                return None;
            }
            let now = self.generation.load(Ordering::Acquire);
            if now != *seen {
                *seen = now;
                return state.job;
            }
            state = self
                .wake
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// Locks; no code panics while it holds one of these locks, so poison carries no news.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A slice that several threads write at once, each to places of its own.
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
            let pool = Pool::new(n_threads);
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
    fn a_panic_reaches_the_caller_and_the_pool_survives() {
        let pool = Pool::new(3);
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_ranges(100, 1, |range| assert!(range.start != 57, "item 57"));
        }));
        assert!(result.is_err());
        let sum = AtomicUsize::new(0);
        pool.for_ranges(100, 1, |range| {
            sum.fetch_add(range.start, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 4950);
    }

    #[test]
    fn callers_on_several_threads_take_turns() {
        let pool = Pool::new(2);
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
}
