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

/// The bytes of each of `all`.
pub(crate) fn copied(all: &[&[u8]]) -> Vec<Vec<u8>> {
    let n_parts = n_parts(all.iter().map(|from| from.len()).sum());
    if n_parts == 1 {
        return all.iter().map(|from| from.to_vec()).collect();
    }
    // Memory that the system gives out is cleared when it is touched first, by all threads here.
    let mut copies: Vec<Vec<u8>> = all.iter().map(|from| vec![0; from.len()]).collect();
    let mut parts: Vec<(&mut [u8], &[u8])> = Vec::new();
    for (to, from) in copies.iter_mut().zip(all) {
        parts.extend(to.chunks_mut(LEAST_BYTES).zip(from.chunks(LEAST_BYTES)));
    }
    for_each(n_parts, parts, |(to, from)| to.copy_from_slice(from));
    copies
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
