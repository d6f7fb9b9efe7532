//! What a call takes: time, memory, and a stack of a known size.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// Counts the bytes that the current thread holds, and the most it held.
struct Counting;

thread_local! {
    static HELD: Cell<usize> = const { Cell::new(0) };
    static PEAK: Cell<usize> = const { Cell::new(0) };
}

fn count(old: usize, new: usize) {
    // Memory may be freed while a thread ends, after its counters are gone.
    let _ = HELD.try_with(|held| {
        held.set(held.get().saturating_sub(old) + new);
        let _ = PEAK.try_with(|peak| peak.set(peak.get().max(held.get())));
    });
}

// SAFETY: every call is handed on to the system allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(0, layout.size());
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // Both blocks may exist for a moment.
        count(0, new_size);
        count(layout.size(), 0);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The time and the bytes that `f` took, bytes beyond what was held before.
pub(crate) fn cost<T>(f: impl FnOnce() -> T) -> (T, Duration, usize) {
    let before = HELD.get();
    PEAK.set(before);
    let start = Instant::now();
    let result = f();
    (result, start.elapsed(), PEAK.get() - before)
}

/// Runs `f` on a thread with a stack of `bytes`.
pub(crate) fn on_stack<T: Send>(bytes: usize, f: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| {
        let builder = thread::Builder::new().stack_size(bytes);
        let thread = builder.spawn_scoped(scope, f).expect("a thread");
        match thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
