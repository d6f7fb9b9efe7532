//! Shared by the tests of several kernels.

use crate::{Exec, Isa};

/// A small generator, the same numbers everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Random {
        Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    pub(crate) fn next(&mut self) -> u32 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as u32
    }

    pub(crate) fn below(&mut self, n: u32) -> u32 {
        self.next() % n
    }
}

/// `n` values within ±1.
pub(crate) fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..n)
        .map(|_| (random.below(20_001) as f32 - 10_000.0) / 10_000.0)
        .collect()
}

/// Every instruction set of this machine, with one, two and three threads.
///
/// With one thread on architectures other than x86-64: the tests mostly run emulated there, and how threads
/// share work doesn't depend on the instructions.
pub(crate) fn exec_matrix() -> Vec<Exec> {
    let most_threads = if cfg!(target_arch = "x86_64") { 3 } else { 1 };
    Isa::available()
        .flat_map(|isa| (1..=most_threads).map(move |n| Exec::new(n, isa)))
        .collect()
}
