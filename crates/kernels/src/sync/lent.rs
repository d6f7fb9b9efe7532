//! Threads and a clock that a program in a browser lends, where WebAssembly has neither of its own.
//!
//! A Worker of JavaScript shares the module's memory and calls [`lend`], which doesn't return: from then on it
//! runs what pools start.

use std::collections::VecDeque;
use std::ops::{Add, Sub};
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

/// What a lent thread is to run.
type Task = Box<dyn FnOnce() + Send>;

/// The lent threads that have nothing to run, and what waits for them.
struct Exchange {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// Threads that wait, or will take one of `tasks`.
    n_idle: usize,
    tasks: VecDeque<Task>,
}

static EXCHANGE: Exchange = Exchange {
    state: Mutex::new(State {
        n_idle: 0,
        tasks: VecDeque::new(),
    }),
    changed: Condvar::new(),
};

static CLOCK: OnceLock<fn() -> Duration> = OnceLock::new();

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What is locked here is consistent whenever a panic can occur.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Sets the clock of all pools, before any has threads: the time since a moment that is the same for all threads.
pub fn set_clock(clock: fn() -> Duration) {
    CLOCK.get_or_init(|| clock);
}

/// Lends the calling thread to pools, for ever. `set_clock` comes first.
pub fn lend() -> ! {
    let mut state = lock(&EXCHANGE.state);
    state.n_idle += 1;
    loop {
        let Some(task) = state.tasks.pop_front() else {
            state = (EXCHANGE.changed)
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
            continue;
        };
        drop(state);
        task();
        state = lock(&EXCHANGE.state);
        state.n_idle += 1;
    }
}

/// How many lent threads have nothing to run.
pub fn n_idle() -> usize {
    lock(&EXCHANGE.state).n_idle
}

/// A moment by the clock that was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Instant(Duration);

impl Instant {
    pub(crate) fn now() -> Instant {
        Instant(CLOCK.get().map_or(Duration::ZERO, |clock| clock()))
    }

    pub(crate) fn elapsed(self) -> Duration {
        Instant::now() - self
    }

    pub(crate) fn saturating_duration_since(self, earlier: Instant) -> Duration {
        self - earlier
    }
}

impl Add<Duration> for Instant {
    type Output = Instant;

    fn add(self, time: Duration) -> Instant {
        Instant(self.0 + time)
    }
}

/// Zero where the other is later: clocks of several threads may differ a little.
impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Instant) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// `std::thread`, as far as it is used.
pub(crate) mod thread {
    use std::cell::RefCell;
    use std::io;
    use std::sync::{Arc, Condvar, Mutex, PoisonError};

    use super::{EXCHANGE, lock};

    /// Something that one thread waits for.
    #[derive(Debug, Default)]
    struct Event {
        has_happened: Mutex<bool>,
        changed: Condvar,
    }

    impl Event {
        fn tell(&self) {
            *lock(&self.has_happened) = true;
            self.changed.notify_one();
        }

        /// Waits until it happens, and forgets that it has.
        fn wait(&self) {
            let mut has_happened = lock(&self.has_happened);
            while !std::mem::take(&mut *has_happened) {
                has_happened = (self.changed)
                    .wait(has_happened)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    thread_local! {
        /// What wakes this thread, while it runs a task.
        static CURRENT: RefCell<Thread> = RefCell::new(Thread::default());
    }

    #[derive(Debug, Clone, Default)]
    pub(crate) struct Thread(Arc<Event>);

    impl Thread {
        pub(crate) fn unpark(&self) {
            self.0.tell();
        }
    }

    /// Waits until this thread is unparked.
    pub(crate) fn park() {
        let current = CURRENT.with_borrow(Thread::clone);
        current.0.wait();
    }

    #[derive(Debug, Default)]
    pub(crate) struct Builder;

    impl Builder {
        pub(crate) fn new() -> Builder {
            Builder
        }

        pub(crate) fn name(self, _: String) -> Builder {
            self
        }

        /// Runs `f` on a lent thread.
        ///
        /// Errors: none is idle.
        pub(crate) fn spawn(self, f: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
            let handle = JoinHandle {
                thread: Thread::default(),
                ended: Arc::new(Event::default()),
                result: (),
            };
            let (thread, ended) = (handle.thread.clone(), Arc::clone(&handle.ended));
            let mut state = lock(&EXCHANGE.state);
            let Some(n_idle) = state.n_idle.checked_sub(1) else {
                return Err(io::ErrorKind::WouldBlock.into());
            };
            state.n_idle = n_idle;
            state.tasks.push_back(Box::new(move || {
                CURRENT.set(thread);
                f();
                ended.tell();
            }));
            drop(state);
            EXCHANGE.changed.notify_one();
            Ok(handle)
        }
    }

    #[derive(Debug)]
    pub(crate) struct JoinHandle<T> {
        thread: Thread,
        ended: Arc<Event>,
        result: T,
    }

    impl<T> JoinHandle<T> {
        pub(crate) fn thread(&self) -> &Thread {
            &self.thread
        }

        /// Waits until its task has ended. A panic ends the whole program, so there is none to report.
        #[allow(clippy::unnecessary_wraps)] // as `std` has it
        pub(crate) fn join(self) -> Result<T, std::convert::Infallible> {
            self.ended.wait();
            Ok(self.result)
        }
    }
}
