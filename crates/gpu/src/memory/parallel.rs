//! Work on memory that one thread is too slow for: it fills a mapped buffer at 3 to 4 GB/s.

use std::sync::{Mutex, PoisonError};
use std::thread;

/// More are bound by the same memory.
const MOST_THREADS: usize = 4;

/// What a thread does at least: to start one costs some 20 µs.
const LEAST_BYTES: usize = 1 << 20;

/// Into how many parts `n_bytes` are best divided.
pub(crate) fn n_parts(n_bytes: usize) -> usize {
    let threads = || thread::available_parallelism().map_or(1, |n| n.get().min(MOST_THREADS));
    match n_bytes / LEAST_BYTES {
        0 | 1 => 1,
        most => threads().min(most),
    }
}

/// Does `job` with each of `parts`, on threads of their own if there are several.
pub(crate) fn for_each<T: Send>(parts: Vec<T>, job: impl Fn(T) + Sync) {
    let n_parts = parts.len();
    let rest = Mutex::new(parts.into_iter());
    let work = || {
        loop {
            let next = rest.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = next else { break };
            job(part);
        }
    };
    thread::scope(|scope| {
        for _ in 1..n_parts {
            // Where the system refuses a thread, the others do its part.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}
