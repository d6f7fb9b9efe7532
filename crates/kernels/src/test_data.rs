//! Shared by the tests of several kernels.

use std::fmt::Display;

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

/// Expects `computed`, the answers and the last state of a scan of `m` positions in chunks, to be the answers `want` within
/// a relative 1e-5, and the same bits on every machine and in chunks of every length.
pub(crate) fn expect_scan(
    what: impl Display,
    m: usize,
    want: &[f64],
    computed: impl Fn(&Exec, usize) -> (Vec<f32>, Vec<f32>),
) {
    let mut first = None;
    for exec in exec_matrix() {
        for chunk in [1, 4, m] {
            let got = computed(&exec, chunk);
            assert_eq!(got.0.len(), want.len());
            for (i, (got, want)) in got.0.iter().zip(want).enumerate() {
                let error = (f64::from(*got) - want).abs();
                assert!(
                    error < 1e-5 * want.abs().max(1.0),
                    "{what} {i}: {got}, not {want}"
                );
            }
            let first = first.get_or_insert_with(|| got.clone());
            assert_eq!(*first, got, "{what} {chunk} {exec:?}");
        }
    }
}
