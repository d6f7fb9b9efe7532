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

/// The bytes of `from`.
pub(crate) fn copied(from: &[u8]) -> Vec<u8> {
    let n_parts = n_parts(from.len());
    if n_parts == 1 {
        return from.to_vec();
    }
    // Memory that the system gives out is cleared when it is touched first, by all threads here.
    let mut to = vec![0; from.len()];
    let share = from.len().div_ceil(n_parts);
    let parts = to.chunks_mut(share).zip(from.chunks(share));
    for_each(
        n_parts,
        parts.collect(),
        |(to, from): (&mut [u8], &[u8])| {
            to.copy_from_slice(from);
        },
    );
    to
}

/// Does `job` with each of `parts`, on `n_threads`.
pub(crate) fn for_each<T: Send>(n_threads: usize, parts: Vec<T>, job: impl Fn(T) + Sync) {
    let rest = Mutex::new(parts.into_iter());
    let work = || {
        loop {
            let next = rest.lock().unwrap_or_else(PoisonError::into_inner).next();
            let Some(part) = next else { break };
            job(part);
        }
    };
    thread::scope(|scope| {
        for _ in 1..n_threads {
            // Where the system refuses a thread, the others do its part.
            let _ = thread::Builder::new().spawn_scoped(scope, work);
        }
        work();
    });
}
