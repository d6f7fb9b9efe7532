//! The tests, and their timing.

use std::sync::Arc;

use anyhow::Result;
use bytes::Bytes;
use sterna_engine::{
    CacheType, Decoded, Logits, ModelConfig, ModelPlan, Sampler, SamplerConfig, Session,
    SessionOptions, Step,
};
use sterna_kernels::{Exec, Isa};

use super::kernels::Kernels;
use crate::device;
use crate::machine::{self, Elapsed, MemoryReaders, Reading, Stopwatch};
use crate::progress::Progress;
use sterna::Adapted;
use sterna::native::{self, Device};

/// One thing to time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    /// A prompt of this many tokens.
    Prefill(usize),
    /// `n` steps of `batch` sequences together, each with `depth` tokens in its cache before them.
    Decode {
        n: usize,
        depth: usize,
        batch: usize,
    },
}

impl Test {
    /// Tokens that are computed while timed.
    pub(super) fn n_tokens(self) -> usize {
        match self {
            Test::Prefill(n) => n,
            Test::Decode { n, batch, .. } => n.saturating_mul(batch),
        }
    }

    /// Tokens in each cache when that begins.
    pub(super) fn depth(self) -> usize {
        match self {
            Test::Prefill(_) => 0,
            Test::Decode { depth, .. } => depth,
        }
    }

    /// Tokens in each cache when it ends.
    pub(super) fn end(self) -> usize {
        match self {
            Test::Prefill(n) => n,
            Test::Decode { n, depth, .. } => depth.saturating_add(n),
        }
    }

    /// Sequences that are computed together.
    pub(super) fn batch(self) -> usize {
        match self {
            Test::Prefill(_) => 1,
            Test::Decode { batch, .. } => batch,
        }
    }

    /// Its name in tables: `pp128`, `tg64`, `tg64x4`, `tg64@4096`.
    pub(super) fn name(self) -> String {
        let Test::Decode { n, depth, batch } = self else {
            return format!("pp{}", self.n_tokens());
        };
        let mut name = format!("tg{n}");
        if batch > 1 {
            name += &format!("x{batch}");
        }
        if depth > 0 {
            name += &format!("@{depth}");
        }
        name
    }
}

/// The minimum work of a test on any engine: what bounds it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Work {
    /// Bytes to read from memory, of a decode test.
    pub(super) bytes: Option<u64>,
    /// Multiply-accumulates with weights, where several rows share a read of them.
    pub(super) multiply_adds: Option<u64>,
}

impl Work {
    /// What bounds `test` of the planned model, with caches of this type.
    pub(super) fn of(test: Test, plan: &ModelPlan, cache: CacheType) -> Work {
        match test {
            Test::Prefill(n) => Work {
                bytes: None,
                multiply_adds: Some(plan.prefill_multiply_adds(n)),
            },
            Test::Decode { n, depth, batch } => {
                // Weights once per step, and for each sequence its cache so far.
                let cached: u64 = (depth..depth + n)
                    .map(|pos| cache_bytes(plan, cache, pos))
                    .sum();
                let tokens = (n * batch) as u64;
                Work {
                    bytes: Some(plan.bytes_per_token() * n as u64 + cached * batch as u64),
                    multiply_adds: (batch > 1).then(|| plan.prefill_multiply_adds(1) * tokens),
                }
            }
        }
    }
}

/// Bytes of the cache that the last of `n` positions attends to.
fn cache_bytes(plan: &ModelPlan, cache: CacheType, n: usize) -> u64 {
    let ModelConfig {
        n_layers, layers, ..
    } = plan.config();
    let seen = layers
        .iter()
        .map(|layer| layer.window.map_or(n, |window| window.min(n)));
    seen.map(|seen| plan.cache_bytes(seen, cache) / *n_layers as u64)
        .sum()
}

/// The sequences that a test appends to, with filled caches. None shares memory with another.
struct Sequences {
    together: Vec<Session<Device>>,
    /// Takes every step separately, where others take it together.
    alone: Option<Session<Device>>,
}

/// The duration of one repetition of a test.
#[derive(Debug, Clone, Copy)]
pub(super) struct Times {
    /// The total, without `alone`.
    pub(super) test: Elapsed,
    /// The steps of one sequence alone, as many as those of several together.
    pub(super) alone: Option<Elapsed>,
}

/// Steps that are decoded to time kernels.
const DECODED: usize = 8;

/// A model loaded for one number of threads, and what was measured with it.
pub(super) struct Candidate {
    pub(super) threads: usize,
    pub(super) load_ms: f64,
    model: Adapted<Device>,
    /// Threads to measure arithmetic with: as many as the model uses.
    exec: Exec,
    /// For each test.
    sequences: Vec<Sequences>,
    /// Of each test, each repetition.
    pub(super) times: Vec<Vec<Times>>,
    /// Of each test, if kernels were to be timed.
    pub(super) kernels: Vec<Kernels>,
    /// For each method of reading memory, bytes per second in each repetition.
    pub(super) bandwidths: Vec<(Reading, Vec<f64>)>,
    /// Multiply-adds per second, of each repetition.
    pub(super) peaks: Vec<f64>,
}

impl Candidate {
    pub(super) fn new(
        threads: usize,
        load_ms: f64,
        model: Adapted<Device>,
        exec: Exec,
    ) -> Candidate {
        Candidate {
            threads,
            load_ms,
            model,
            exec,
            sequences: Vec::new(),
            times: Vec::new(),
            kernels: Vec::new(),
            bandwidths: Vec::new(),
            peaks: Vec::new(),
        }
    }

    /// The GPU that the model is computed on, if any, and how much of it.
    pub(super) fn gpu_share(&self) -> Option<String> {
        native::gpu_share(self.model.model())
    }

    /// Data type of the caches of sessions with these options.
    pub(super) fn cache(&self, options: &SessionOptions) -> CacheType {
        options.cache_on(self.model.model().backend())
    }

    /// Fills the caches that `tests` begin with.
    fn prepare(&mut self, tests: &[Test], options: SessionOptions) -> Result<()> {
        for test in tests {
            let filled = |_| {
                let mut session = self.model.session(options)?;
                if test.depth() > 0 {
                    session.forward(&self.ids(test.depth()), Logits::None)?;
                }
                Ok(session)
            };
            let mut together = (0..=test.batch()).map(filled).collect::<Result<Vec<_>>>()?;
            let alone = together.pop().filter(|_| test.batch() > 1);
            self.sequences.push(Sequences { together, alone });
            self.times.push(Vec::new());
        }
        Ok(())
    }

    /// Runs `test`, which has index `i`, or a part of it; several sequences alternating with one alone, if
    /// they are compared.
    fn time(&mut self, i: usize, test: Test, compares: bool) -> Result<Times> {
        let ids = self.ids(test.n_tokens());
        let Sequences { together, alone } = &mut self.sequences[i];
        let mut alone = alone.as_mut().filter(|_| compares);
        let times = match test {
            Test::Prefill(_) => time_prompt(&mut together[0], &ids)?,
            Test::Decode { batch: 1, .. } => time_decoding(&mut together[0], &ids)?,
            Test::Decode { .. } => time_batch(together, alone.as_deref_mut(), &ids)?,
        };
        for session in together.iter_mut().chain(alone) {
            session.truncate(test.depth());
        }
        Ok(times)
    }

    /// How long kernels take on a GPU, for some steps of each of `tests`.
    pub(super) fn time_kernels(&mut self, tests: &[Test]) -> Result<()> {
        for (i, test) in tests.iter().enumerate() {
            let (part, n) = match *test {
                Test::Prefill(_) => (*test, 1),
                Test::Decode { n, depth, batch } => {
                    let n = n.min(DECODED);
                    (Test::Decode { n, depth, batch }, n * batch)
                }
            };
            let model = Arc::clone(self.model.model());
            let times = device::timed(model.backend(), || self.time(i, part, false).map(|_| ()))?;
            self.kernels.push(Kernels::new(n, &times));
        }
        Ok(())
    }

    fn ids(&self, n: usize) -> Vec<u32> {
        token_ids(n, self.model.model().config().n_vocab)
    }
}

/// Appends `ids` to a sequence at once, for a greedy choice.
fn time_prompt(session: &mut Session<Device>, ids: &[u32]) -> Result<Times> {
    let watch = Stopwatch::start();
    session.forward(ids, Logits::Top(1))?;
    Ok(Times {
        test: watch.elapsed(),
        alone: None,
    })
}

/// Appends as many tokens as there are `ids` to a sequence, one by one, with greedy choices: those that the
/// session samples on its own, or `ids` where it doesn't.
fn time_decoding(session: &mut Session<Device>, ids: &[u32]) -> Result<Times> {
    let greedy = Sampler::new(SamplerConfig::default(), session.model().config().n_vocab)?;
    let watch = Stopwatch::start();
    let mut chosen = None;
    for (i, &id) in ids.iter().enumerate() {
        let decoded = session.decode(&[chosen.unwrap_or(id)], greedy.sampling(), ids.len() - i)?;
        chosen = match decoded {
            Decoded::Token(chosen) => Some(chosen.id),
            Decoded::Logits(_) => None,
        };
    }
    Ok(Times {
        test: watch.elapsed(),
        alone: None,
    })
}

/// Appends `ids` to the sequences `together`, one to each at a time, or what a device that samples has chosen in their place.
///
/// Alternates with steps of `alone`, if there is one: other load on the machine affects both equally, and neither benefits
/// from weights that the other has left in a cache more than it would alone. Steps of `alone` on a device that decodes ahead
/// come last: it would have the next step of the others in hand.
fn time_batch(
    together: &mut [Session<Device>],
    mut alone: Option<&mut Session<Device>>,
    ids: &[u32],
) -> Result<Times> {
    let n_vocab = together.first().map_or(1, |s| s.model().config().n_vocab);
    let greedy = Sampler::new(SamplerConfig::default(), n_vocab)?;
    let mut times = Times {
        test: Elapsed::default(),
        alone: alone.as_ref().map(|_| Elapsed::default()),
    };
    let n_steps = ids.len().div_ceil(together.len());
    let (mut chosen, mut left) = (None, Vec::new());
    for (i, ids) in ids.chunks(together.len()).enumerate() {
        times.test += time_step(together, &mut chosen, ids, (&greedy, n_steps - i))?;
        match (&chosen, &mut alone, &mut times.alone) {
            (Some(_), ..) => left.push(ids[0]),
            (None, Some(alone), Some(total)) => {
                let alone = std::slice::from_mut(&mut **alone);
                *total += time_step(alone, &mut None, &ids[..1], (&greedy, 1))?;
            }
            _ => {}
        }
    }
    if let (Some(alone), Some(total)) = (alone, &mut times.alone) {
        *total += time_decoding(alone, &left)?.test;
    }
    Ok(times)
}

/// Appends to each of `sessions` the one of `chosen` that follows it, if there are any, else of `ids`; leaves in `chosen` what
/// the sessions choose. `wanted` steps follow, with this one.
fn time_step(
    sessions: &mut [Session<Device>],
    chosen: &mut Option<Vec<u32>>,
    ids: &[u32],
    (greedy, wanted): (&Sampler, usize),
) -> Result<Elapsed> {
    let watch = Stopwatch::start();
    let ids = chosen.take().unwrap_or_else(|| ids.to_vec());
    let samplings = vec![Some(greedy.sampling()); sessions.len()];
    let decoded = Session::decode_together(&mut steps(sessions, &ids), &samplings, wanted)?;
    let tokens = decoded.into_iter().map(|decoded| match decoded {
        Decoded::Token(chosen) => Some(chosen.id),
        Decoded::Logits(_) => None,
    });
    *chosen = tokens.collect();
    Ok(watch.elapsed())
}

/// A step of each of `sessions`, with one token of `ids`, of which the most likely token is needed.
pub(super) fn steps<'a>(
    sessions: &'a mut [Session<Device>],
    ids: &'a [u32],
) -> Vec<Step<'a, Device>> {
    let steps = sessions.iter_mut().zip(ids.chunks(1));
    let step = |(session, ids)| Step {
        session,
        ids,
        logits: Logits::Top(1),
    };
    steps.map(step).collect()
}

/// How to measure.
pub(super) struct Plan<'a> {
    pub(super) tests: &'a [Test],
    pub(super) options: SessionOptions,
    pub(super) repetitions: usize,
    /// Instruction set to read memory with.
    pub(super) isa: Isa,
    /// Bytes to measure the bandwidth with, for each candidate.
    pub(super) memory_bytes: u64,
    /// The model's files.
    pub(super) files: &'a [Bytes],
}

/// Times all tests with all `candidates`, repeatedly and alternating: other load on the machine affects all
/// equally. Returns the peak memory before the bandwidth was measured, if the system reports it.
pub(super) fn measure(candidates: &mut [Candidate], plan: &Plan<'_>) -> Result<Option<u64>> {
    let depth = plan.tests.iter().map(|test| test.depth()).max();
    let progress =
        (depth > Some(0)).then(|| Progress::long_items("filling caches", candidates.len() as u64));
    for candidate in &mut *candidates {
        candidate.prepare(plan.tests, plan.options)?;
        progress.iter().for_each(|progress| progress.add(1));
    }
    drop(progress);
    let n_steps = candidates.len() * plan.tests.len() * (plan.repetitions + 1);
    let progress = Progress::long_items("measuring", n_steps as u64);
    let round = |candidates: &mut [Candidate], counts: bool| -> Result<()> {
        for (i, test) in plan.tests.iter().enumerate() {
            for candidate in &mut *candidates {
                let times = candidate.time(i, *test, true)?;
                if counts {
                    candidate.times[i].push(times);
                }
                progress.add(1);
            }
        }
        Ok(())
    };
    // The first round warms up.
    round(candidates, false)?;
    let peak_memory_bytes = machine::peak_memory_bytes();
    let mut readers = Vec::with_capacity(candidates.len());
    for candidate in &mut *candidates {
        if native::is_all_on_gpu(candidate.model.model()) {
            // What the processor could do is irrelevant for it; layers on the processor are bound by it.
            readers.push(None);
            continue;
        }
        let n_bytes = plan.memory_bytes;
        let reader = MemoryReaders::start(candidate.threads, plan.isa, n_bytes, plan.files)?;
        let readings = reader.readings().into_iter();
        candidate.bandwidths = readings.map(|reading| (reading, Vec::new())).collect();
        readers.push(Some(reader));
    }
    for _ in 0..plan.repetitions {
        let pairs = candidates.iter_mut().zip(&readers);
        for (candidate, readers) in pairs.filter_map(|(c, r)| Some((c, r.as_ref()?))) {
            for (reading, rates) in &mut candidate.bandwidths {
                rates.push(readers.pass(*reading)?);
            }
            let peak = machine::multiply_add_rate(&candidate.exec);
            candidate.peaks.push(peak);
        }
        round(candidates, true)?;
    }
    Ok(peak_memory_bytes)
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
        let decode = |n, depth, batch| Test::Decode { n, depth, batch };
        for (test, name, n_tokens, end) in [
            (Test::Prefill(128), "pp128", 128, 128),
            (decode(64, 0, 1), "tg64", 64, 64),
            (decode(64, 4096, 1), "tg64@4096", 64, 4160),
            (decode(64, 0, 4), "tg64x4", 256, 64),
            (decode(8, 2, 3), "tg8x3@2", 24, 10),
        ] {
            assert_eq!(
                (test.name().as_str(), test.n_tokens(), test.end()),
                (name, n_tokens, end)
            );
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
