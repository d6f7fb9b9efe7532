//! Prefetching weights.
//!
//! A kernel that takes several rows at a time reads as many streams, each for less than a page. Hardware
//! prefetchers detect such streams late or not at all, so memory latency shows: prefetched one tile ahead,
//! the same kernels read up to twice as fast.

/// Reads `n` bytes from `at` on, or as many as there are: what WebAssembly has instead of prefetching. The lines are
/// read in their order, so that a hardware prefetcher follows.
#[cfg(target_arch = "wasm32")]
#[inline(always)]
pub(super) fn touch(bytes: &[u8], at: usize, n: usize) {
    for line in (at..bytes.len().min(at + n)).step_by(64) {
        // SAFETY: it is one of the bytes. Reading it is all that matters, so it must not be left out.
        unsafe { bytes.as_ptr().add(line).read_volatile() };
    }
}

/// The target of a prefetch.
#[cfg(not(target_arch = "wasm32"))]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// The nearest cache: for what is small compared to it, or a short way ahead.
    First,
    /// The next cache.
    Second,
}

/// Prefetches the lines of `n` bytes from `at` on, which need not be in any allocation.
#[cfg(not(target_arch = "wasm32"))]
#[inline(always)]
pub(super) fn lines(level: Level, at: *const u8, n: usize) {
    #[cfg(target_arch = "x86_64")]
    for line in (0..n).step_by(64) {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        let at = at.wrapping_add(line).cast();
        // SAFETY: SSE is part of the target, and a prefetch touches nothing.
        unsafe {
            match level {
                Level::First => _mm_prefetch::<_MM_HINT_T0>(at),
                Level::Second => _mm_prefetch::<_MM_HINT_T1>(at),
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    for line in (0..n).step_by(64) {
        use crate::arm::{prefetch_first, prefetch_second};
        let at = at.wrapping_add(line);
        match level {
            Level::First => prefetch_first(at),
            Level::Second => prefetch_second(at),
        }
    }
}
