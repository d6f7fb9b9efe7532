//! Prefetching weights.
//!
//! A kernel that takes several rows at a time reads as many streams, each for less than a page. Hardware
//! prefetchers detect such streams late or not at all, so memory latency shows: prefetched one tile ahead,
//! the same kernels read up to twice as fast.

/// The target of a prefetch.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Level {
    /// The nearest cache: for tiles that are small compared to it.
    First,
    /// The next cache.
    Second,
}

/// Prefetches the lines of `n` bytes from `at` on, which need not be in any allocation.
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
