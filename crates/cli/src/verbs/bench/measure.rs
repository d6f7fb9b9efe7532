//! What is timed, and the timing of it.

use std::sync::Arc;

use anyhow::Result;
use sterna_engine::{Cpu, Logits, Model, ModelConfig, ModelPlan, Session, SessionOptions};
use sterna_kernels::Exec;

use crate::machine::{self, Elapsed, MemoryReaders, Stopwatch};
use crate::progress::Progress;

/// One thing to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    /// A prompt of so many tokens.
    Prefill(usize),
    /// `n` tokens one by one, with `depth` in the cache before them.
    Decode { n: usize, depth: usize },
}

impl Test {
    /// Tokens that are computed while time is taken.
    pub(super) fn n_tokens(self) -> usize {
        match self {
            Test::Prefill(n) | Test::Decode { n, .. } => n,
        }
    }

    /// Tokens in the cache when that begins.
    pub(super) fn depth(self) -> usize {
        match self {
            Test::Prefill(_) => 0,
            Test::Decode { depth, .. } => depth,
        }
    }

    /// As tables call it: `pp128`, `tg64`, `tg64@4096`.
    pub(super) fn name(self) -> String {
        match self {
            Test::Prefill(n) => format!("pp{n}"),
            Test::Decode { n, depth: 0 } => format!("tg{n}"),
            Test::Decode { n, depth } => format!("tg{n}@{depth}"),
        }
    }
}

/// What a test makes the machine do at least, whatever the engine.
#[derive(Debug, Clone, Copy)]
pub(super) enum Work {
    /// Bytes to read from memory.
    Bytes(u64),
    /// Multiplications of activations with weights.
    MultiplyAdds(u64),
}

impl Work {
    /// What limits `test` of the model that is planned, its cache as in `session`.
    pub(super) fn of(test: Test, plan: &ModelPlan, session: &SessionOptions) -> Work {
        match test {
            Test::Prefill(n) => Work::MultiplyAdds(plan.prefill_multiply_adds(n)),
            Test::Decode { n, depth } => {
                let cache: u64 = (depth..depth + n)
                    .map(|pos| cache_bytes(plan, session, pos + 1))
                    .sum();
                Work::Bytes(plan.bytes_per_token() * n as u64 + cache)
            }
        }
    }
}

/// Bytes of the cache that the last of `n` positions sees.
fn cache_bytes(plan: &ModelPlan, session: &SessionOptions, n: usize) -> u64 {
    let ModelConfig {
        n_layers, layers, ..
    } = plan.config();
    let seen = layers
        .iter()
        .map(|layer| layer.window.map_or(n, |window| window.min(n)));
    seen.map(|seen| plan.cache_bytes(seen, session.cache) / *n_layers as u64)
        .sum()
}

/// A model loaded for one number of threads, and what was measured with it.
pub(super) struct Candidate {
    pub(super) threads: usize,
    pub(super) load_ms: f64,
    model: Arc<Model<Cpu>>,
    readers: MemoryReaders,
    /// Threads to measure arithmetic with: as many as the model's.
    exec: Exec,
    /// For each test, with what is in its cache.
    sessions: Vec<Session<Cpu>>,
    /// Of each test, each repetition.
    pub(super) times: Vec<Vec<Elapsed>>,
    /// Bytes read per second, of each repetition.
    pub(super) bandwidths: Vec<f64>,
    /// Multiply-adds per second, of each repetition.
    pub(super) peaks: Vec<f64>,
}

impl Candidate {
    pub(super) fn new(
        threads: usize,
        load_ms: f64,
        model: Arc<Model<Cpu>>,
        readers: MemoryReaders,
        exec: Exec,
    ) -> Candidate {
        Candidate {
            threads,
            load_ms,
            model,
            readers,
            exec,
            sessions: Vec::new(),
            times: Vec::new(),
            bandwidths: Vec::new(),
            peaks: Vec::new(),
        }
    }

    /// Fills the caches that `tests` begin with.
    fn prepare(&mut self, tests: &[Test], options: SessionOptions) -> Result<()> {
        for test in tests {
            let mut session = Session::new(self.model.clone(), options)?;
            if test.depth() > 0 {
                session.forward(&self.ids(test.depth()), Logits::Last)?;
            }
            self.sessions.push(session);
            self.times.push(Vec::new());
        }
        Ok(())
    }

    fn time(&mut self, i: usize, test: Test) -> Result<Elapsed> {
        let ids = self.ids(test.n_tokens());
        let session = &mut self.sessions[i];
        let watch = Stopwatch::start();
        match test {
            Test::Prefill(_) => drop(session.forward(&ids, Logits::Last)?),
            Test::Decode { .. } => {
                for id in ids.chunks(1) {
                    session.forward(id, Logits::Last)?;
                }
            }
        }
        let elapsed = watch.elapsed();
        session.truncate(test.depth());
        Ok(elapsed)
    }

    fn ids(&self, n: usize) -> Vec<u32> {
        token_ids(n, self.model.config().n_vocab)
    }
}

/// Times `tests` with all `candidates`, `repetitions` times, in turns: whatever else the machine does
/// meets all alike.
pub(super) fn measure(
    candidates: &mut [Candidate],
    tests: &[Test],
    options: SessionOptions,
    repetitions: usize,
) -> Result<()> {
    if tests.iter().any(|test| test.depth() > 0) {
        let progress = Progress::items("filling caches", candidates.len() as u64);
        for candidate in &mut *candidates {
            candidate.prepare(tests, options)?;
            progress.add(1);
        }
    } else {
        for candidate in &mut *candidates {
            candidate.prepare(tests, options)?;
        }
    }
    let n_steps = candidates.len() * (tests.len() + 1);
    let progress = Progress::items("measuring", (n_steps * (repetitions + 1)) as u64);
    for repetition in 0..=repetitions {
        // The first round warms up.
        let counts = repetition > 0;
        for candidate in &mut *candidates {
            let bandwidth = candidate.readers.pass()?;
            let peak = machine::multiply_add_rate(&candidate.exec);
            if counts {
                candidate.bandwidths.push(bandwidth);
                candidate.peaks.push(peak);
            }
            progress.add(1);
        }
        for (i, test) in tests.iter().enumerate() {
            for candidate in &mut *candidates {
                let time = candidate.time(i, *test)?;
                if counts {
                    candidate.times[i].push(time);
                }
                progress.add(1);
            }
        }
    }
    Ok(())
}

/// `n` ids below `n_vocab` that look random and are the same every time.
pub(super) fn token_ids(n: usize, n_vocab: usize) -> Vec<u32> {
    // Steps of the golden ratio spread over the vocabulary without repeating soon.
    (1..=n as u64)
        .map(|i| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) * n_vocab as u64) >> 32)
        .map(|id| id as u32)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_named_for_what_they_do() {
        let decode = |n, depth| Test::Decode { n, depth };
        for (test, name) in [
            (Test::Prefill(128), "pp128"),
            (decode(64, 0), "tg64"),
            (decode(64, 4096), "tg64@4096"),
        ] {
            assert_eq!(test.name(), name);
        }
    }

    #[test]
    fn ids_lie_in_the_vocabulary() {
        for n_vocab in [1, 2, 512, 128_256] {
            let ids = token_ids(300, n_vocab);
            assert!(ids.iter().all(|&id| (id as usize) < n_vocab));
        }
        let distinct: std::collections::HashSet<_> = token_ids(100, 128_256).into_iter().collect();
        assert_eq!(distinct.len(), 100);
    }
}
