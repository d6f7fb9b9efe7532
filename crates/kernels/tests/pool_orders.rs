//! The pool's hand-over, in every order in which threads can take their steps, by loom: jobs are published,
//! claimed, finished and followed by others in the same memory, callers take turns, and pools are dropped.
//!
//! It is the pool of the library, whose source stands here on loom's threads. The clock stands still and
//! nobody spins, so workers sleep, and are woken, whenever they can be. Loom takes sequentially consistent
//! accesses for acquiring and releasing ones: it also tries orders in which a worker is left asleep, which
//! costs time and no result.

#[cfg(target_arch = "x86_64")]
#[allow(dead_code, unsafe_code, unused_imports)]
#[path = "../src/pool.rs"]
mod pool;

/// What stands in for `src/sync.rs`.
#[cfg(target_arch = "x86_64")]
mod sync {
    use std::ops::{Add, Sub};
    use std::time::Duration;

    pub(crate) use loom::sync::{Arc, Condvar, Mutex, MutexGuard, atomic};
    pub(crate) use loom::thread;

    pub(crate) const IS_MODEL: bool = true;

    pub(crate) fn spin_loop() {}

    /// A clock that stands still: what happens must not depend on how fast it does.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
    pub(crate) struct Instant(Duration);

    impl Instant {
        pub(crate) fn now() -> Instant {
            Instant(Duration::ZERO)
        }

        pub(crate) fn elapsed(self) -> Duration {
            Instant::now() - self
        }

        pub(crate) fn saturating_duration_since(self, earlier: Instant) -> Duration {
            self.0.saturating_sub(earlier.0)
        }
    }

    impl Add<Duration> for Instant {
        type Output = Instant;

        fn add(self, duration: Duration) -> Instant {
            Instant(self.0 + duration)
        }
    }

    impl Sub for Instant {
        type Output = Duration;

        fn sub(self, earlier: Instant) -> Duration {
            self.saturating_duration_since(earlier)
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod orders {
    use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

    use loom::cell::UnsafeCell;
    use loom::model::Builder;

    use crate::pool::Pool;
    use crate::sync::{Arc, thread};

    /// Checks `f` in all orders with at most so many `preemptions`.
    pub(crate) fn check(name: &str, preemptions: usize, f: impl Fn() + Send + Sync + 'static) {
        let start = std::time::Instant::now();
        let mut model = Builder::new();
        model.preemption_bound = Some(preemptions);
        model.check(f);
        println!("pool, {name}: ok ({:.1} s)", start.elapsed().as_secs_f64());
    }

    /// How often an item was run. Loom fails where two threads meet here, and where one looks at what it
    /// need not see yet.
    struct Item(UnsafeCell<usize>);

    // SAFETY: loom finds accesses that are not in order; that is what they are here for.
    #[allow(unsafe_code)]
    unsafe impl Sync for Item {}

    impl Item {
        #[allow(unsafe_code)]
        fn run(&self) {
            // SAFETY: the pool gives out each item once.
            self.0.with_mut(|count| unsafe { *count += 1 });
        }

        #[allow(unsafe_code)]
        fn count(&self) -> usize {
            // SAFETY: all items are done.
            self.0.with(|count| unsafe { *count })
        }
    }

    /// Runs a job of `n` items, each of which must have been run once when it is over.
    fn run(pool: &Pool, n: usize) {
        let items: Vec<_> = (0..n).map(|_| Item(UnsafeCell::new(0))).collect();
        pool.for_ranges(n, 1, |range| items[range].iter().for_each(Item::run));
        assert!(items.iter().all(|item| item.count() == 1));
    }

    pub(crate) fn two_threads() {
        run(&Pool::new(2, ()), 3);
    }

    pub(crate) fn three_threads() {
        run(&Pool::new(3, ()), 3);
    }

    /// A worker that comes late to one job finds the next in its place, on the same stack.
    pub(crate) fn jobs_after_one_another() {
        let pool = Pool::new(2, ());
        run(&pool, 2);
        run(&pool, 3);
    }

    pub(crate) fn two_callers() {
        let pool = Arc::new(Pool::new(2, ()));
        let theirs = Arc::clone(&pool);
        let other = thread::spawn(move || run(&theirs, 2));
        run(&pool, 2);
        other.join().unwrap();
    }

    pub(crate) fn a_panic() {
        let pool = Pool::new(2, ());
        let result = catch_unwind(AssertUnwindSafe(|| {
            pool.for_ranges(2, 1, |range| {
                if range.contains(&1) {
                    resume_unwind(Box::new("item 1"));
                }
            });
        }));
        assert_eq!(result.unwrap_err().downcast_ref(), Some(&"item 1"));
        run(&pool, 2);
    }

    /// Workers that wait, or have not even begun.
    pub(crate) fn no_job() {
        drop(Pool::new(3, ()));
    }
}

#[cfg(target_arch = "x86_64")]
fn main() {
    orders::check("no job", 3, orders::no_job);
    orders::check("two threads", 3, orders::two_threads);
    orders::check("three threads", 2, orders::three_threads);
    orders::check("jobs after one another", 3, orders::jobs_after_one_another);
    orders::check("two callers", 1, orders::two_callers);
    orders::check("a panic", 2, orders::a_panic);
}

#[cfg(not(target_arch = "x86_64"))]
fn main() {}
