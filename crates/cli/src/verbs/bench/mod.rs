//! `sterna bench`: how fast a model runs here, and how close that is to what the machine allows.

mod kernels;
mod measure;
mod report;

use std::num::NonZero;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use clap::Args;
use sterna_engine::{Decoded, Logits, ModelPlan, Sampler, SamplerConfig, Session};
use sterna_kernels::Exec;

use self::measure::{Candidate, Test, Work, token_ids};
use self::report::{ModelReport, Report, Run};
use crate::args::{self, ReportFlags};
use crate::machine::{self, Machine};
use sterna::Adapted;
use sterna::native::BUILTIN;
use sterna::native::{self, LocalModel, SourceFile};

use crate::model;
use crate::{device, output};
use sterna::native::Device;

const EXAMPLE: &str = "Example:
  sterna bench model.gguf
  sterna bench model.gguf -n 32 -b 1,4,8
  sterna bench builtin -p 128 -n 64 -t 1,2 -r 3 --json";

/// Measure prefill and decode rates
///
/// Results are checked before anything is timed. After a warm-up, all tests with all thread counts alternate,
/// as do measurements of memory bandwidth and of the peak rate of multiplying bytes.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Bench {
    /// Model to run
    #[arg(default_value = BUILTIN)]
    model: String,

    /// Prompt lengths to prefill, separated by commas
    #[arg(
        short = 'p',
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "128,512"
    )]
    prefill: Vec<NonZero<usize>>,

    /// Number of tokens to decode, one by one
    #[arg(
        short = 'n',
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "64"
    )]
    decode: Vec<NonZero<usize>>,

    /// Context length before decoding, in tokens
    #[arg(
        short = 'd',
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "0"
    )]
    depth: Vec<usize>,

    /// Number of sequences to decode in one batch
    #[arg(
        short = 'b',
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "1",
        value_parser = batch_size
    )]
    batch: Vec<NonZero<usize>>,

    /// Thread counts to try, separated by commas [default: that of --threads]
    #[arg(
        short = 't',
        value_name = "N,…",
        value_delimiter = ',',
        value_parser = args::thread_count,
        conflicts_with = "threads"
    )]
    thread_counts: Vec<NonZero<usize>>,

    /// How often to repeat each test
    #[arg(short = 'r', long, value_name = "N", default_value = "5")]
    repetitions: NonZero<usize>,

    /// Report how long each kernel takes on a GPU, measured separately
    #[arg(long)]
    kernels: bool,

    #[command(flatten)]
    flags: ReportFlags,
}

impl Bench {
    pub(crate) fn run(mut self) -> Result<()> {
        let files = model::open(&self.model)?;
        self.flags.engine = self.flags.engine.for_model(&files);
        let tests = self.tests();
        let end = tests.iter().map(|test| test.end()).fold(0, usize::max);
        let ctx_len = self.flags.engine.ctx_for(end.max(CHECKED))?;
        let options = self.flags.engine.session(ctx_len);
        let mut thread_counts: Vec<usize> = self.thread_counts.iter().map(|n| n.get()).collect();
        if thread_counts.is_empty() {
            thread_counts.push(self.flags.engine.n_threads());
        }

        let machine = Machine::detect();
        let mut candidates = Vec::with_capacity(thread_counts.len());
        for &threads in &thread_counts {
            let (model, load_ms) = self.load(&files, threads)?;
            let exec = Exec::new(threads, args::isa()?);
            candidates.push(Candidate::new(threads, load_ms, model, exec));
        }
        let gpu = (candidates.first()).and_then(|candidate| candidate.gpu_share());
        // There, a screen that wasn't asked for is left out.
        let plan = match gpu.is_some() {
            true => model::plan(&files, &self.flags.files)?,
            false => self.plan(&files)?,
        };
        let model = ModelReport {
            name: files.name().to_owned(),
            family: plan.config().family.name.to_owned(),
            file_bytes: files.file_bytes(),
            head_fnv1a64: format!("{:016x}", head_hash(files.sources())?),
            bytes_per_token: plan.bytes_per_token(),
        };
        // All are on the same device.
        let cache = candidates
            .first()
            .map(|candidate| candidate.cache(&options));
        let cache = cache.context("expected a number of threads")?;
        let works: Vec<Work> = (tests.iter())
            .map(|test| Work::of(*test, &plan, cache))
            .collect();
        let mapped = files.sources().iter().map(SourceFile::bytes);
        let mapped: Vec<Bytes> = mapped.collect::<sterna::Result<_>>()?;
        let plan = measure::Plan {
            tests: &tests,
            options,
            repetitions: self.repetitions.get(),
            isa: args::isa()?,
            memory_bytes: machine::readable_bytes(candidates.len(), machine.free_memory_bytes),
            files: &mapped,
        };
        let peak_memory_bytes = measure::measure(&mut candidates, &plan)?;
        if self.kernels {
            for candidate in &mut candidates {
                candidate.time_kernels(&tests)?;
            }
        }
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("STERNA_COMMIT"),
            runs: (candidates.iter_mut())
                .map(|candidate| Run::new(candidate, &tests, &works))
                .collect(),
            model,
            machine,
            backend: if gpu.is_some() { "gpu" } else { "cpu" },
            gpu,
            instruction_set: args::isa()?.name(),
            cache: cache.name(),
            peak_memory_bytes,
        };
        if self.flags.json {
            output::json(&report)
        } else {
            output::line(report.text())
        }
    }

    fn tests(&self) -> Vec<Test> {
        let prefill = self.prefill.iter().map(|n| Test::Prefill(n.get()));
        let mut tests: Vec<Test> = prefill.collect();
        for n in &self.decode {
            for &depth in &self.depth {
                tests.extend(self.batch.iter().map(|batch| Test::Decode {
                    n: n.get(),
                    depth,
                    batch: batch.get(),
                }));
            }
        }
        tests
    }

    fn plan(&self, files: &LocalModel) -> Result<ModelPlan> {
        model::plan_with(files, &self.flags.files, self.flags.engine.screen())
    }

    /// Loads the model for `threads` threads, and checks it; returns the loading time in milliseconds.
    fn load(&self, files: &LocalModel, threads: usize) -> Result<(Adapted<Device>, f64)> {
        let plan = self.plan(files)?;
        let start = Instant::now();
        let engine = &self.flags.engine;
        let model = model::load(files, &plan, engine, threads)?;
        let model = model::adapt(model, files, engine.lora())?;
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        if self.kernels {
            // Fails early, before any measurement.
            device::expect_timing(model.model().backend())?;
        }
        self.check(&model)?;
        for batch in self.batch.iter().filter(|batch| batch.get() > 1) {
            self.check_batch(&model, batch.get())?;
        }
        Ok((model, load_ms))
    }

    /// Computes a few tokens at once, one by one, and most of them at once and the others one by one, which must give the same
    /// results.
    fn check(&self, model: &Adapted<Device>) -> Result<()> {
        let n_vocab = model.model().config().n_vocab;
        let ids = token_ids(CHECKED, n_vocab);
        let mut session = model.session(self.flags.engine.session(CHECKED))?;
        let at_once = session.forward(&ids, Logits::Last)?;
        for n_before in [0, CHECKED - CHECKED / 4] {
            session.truncate(0);
            let (before, others) = ids.split_at(n_before);
            if !before.is_empty() {
                session.forward(before, Logits::Last)?;
            }
            let mut one_by_one = Vec::new();
            for id in others {
                one_by_one = session.forward(&[*id], Logits::Last)?;
            }
            let error = normalized_error(&at_once, &one_by_one);
            let most = max_error(model);
            if error > most {
                bail!(
                    "wrong result, so nothing was timed: logits of {CHECKED} tokens at once and one by one, {n_before} of \
                     them at once, differ by a normalised mean squared error of {error:.1e}, expected at most {most:.0e}"
                );
            }
        }
        session.truncate(0);
        self.check_choices(session, ids[0])
    }

    /// Decodes from `first` on, where the session samples on its own: the tokens must be the greedy choices
    /// from single steps.
    fn check_choices(&self, mut session: Session<Device>, first: u32) -> Result<()> {
        let mut greedy = Sampler::new(SamplerConfig::default(), session.model().config().n_vocab)?;
        let mut ids = vec![first];
        while ids.len() <= CHECKED {
            let wanted = CHECKED + 1 - ids.len();
            match session.decode(&[ids[ids.len() - 1]], greedy.sampling(), wanted)? {
                Decoded::Token(chosen) => ids.push(chosen.id),
                Decoded::Logits(_) => break,
            }
        }
        session.truncate(0);
        for (i, ids) in ids.windows(2).enumerate() {
            let best = greedy.sample(&session.forward(&ids[..1], Logits::Last)?);
            if best != ids[1] {
                bail!(
                    "wrong result, so nothing was timed: token {i} decoded on the device is {}, expected \
                     {best}, the best of its logits",
                    ids[1]
                );
            }
        }
        Ok(())
    }

    /// Takes steps of `n` sequences together and of each alone, which must give the same bits; on a GPU,
    /// nearly the same logits.
    fn check_batch(&self, model: &Adapted<Device>, n: usize) -> Result<()> {
        let options = self.flags.engine.session(CHECKED);
        let n_vocab = model.model().config().n_vocab;
        let ids = token_ids(n * CHECKED, n_vocab);
        // Sequences of different lengths, so that mixing them up is noticed.
        let mut together = Vec::with_capacity(n);
        for (i, ids) in ids.chunks(CHECKED).enumerate() {
            let mut session = model.session(options)?;
            session.forward(&ids[..1 + i % (CHECKED - 2)], Logits::None)?;
            together.push(session);
        }
        for step in 0..2 {
            let ids = token_ids(n * (step + 1), n_vocab).split_off(n * step);
            let mut alone = Vec::with_capacity(n);
            for (session, id) in together.iter().zip(&ids) {
                let mut session = session.fork(session.len());
                alone.push(session.forward(&[*id], Logits::Last)?);
            }
            let mut found = Session::forward_together(&mut measure::steps(&mut together, &ids))?;
            (alone.iter().zip(&mut found)).for_each(|(alone, found)| fill_ruled_out(alone, found));
            let on_gpu = native::gpu_name(model.model().backend()).is_some();
            let (usual, most) = match on_gpu {
                true => (MAX_ERROR_GPU, MAX_ERROR_OF_FEW),
                false => (0.0, 0.0),
            };
            let mut unusual = Vec::new();
            for (i, found) in found.iter().enumerate() {
                let error = match !on_gpu && same_bits(&alone[i], found) {
                    true => 0.0,
                    false => normalized_error(&alone[i], found).max(f64::MIN_POSITIVE),
                };
                if error > usual {
                    // It mustn't be those of another sequence that are as near.
                    let other = normalized_error(&alone[i], &alone[(i + 1) % n]);
                    unusual.push((i, error, error <= most && error <= other / 4.0));
                }
            }
            let is_few = unusual.len() <= n / 16 && unusual.iter().all(|(.., is_near)| *is_near);
            let worst = unusual.iter().max_by(|a, b| a.1.total_cmp(&b.1));
            if let Some((i, error, _)) = worst.filter(|_| !is_few) {
                let expected = match on_gpu {
                    true => format!("at most {usual:.0e}, of one in 16 {most}"),
                    false => "the same bits".to_owned(),
                };
                bail!(
                    "wrong result, so nothing was timed: logits of sequence {i} differ by a normalised mean squared \
                     error of {error:.1e} when {n} are decoded together, as do those of {} others by too much; \
                     expected {expected}",
                    unusual.len() - 1
                );
            }
        }
        Ok(())
    }
}

/// Replaces logits that a screen of the output head ruled out by those of `all`, where they aren't the largest.
fn fill_ruled_out(all: &[f32], found: &mut [f32]) {
    let largest = all.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for (all, found) in all.iter().zip(found) {
        if *found == f32::NEG_INFINITY && *all < largest {
            *found = *all;
        }
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    let bits = |values: &[f32]| {
        values
            .iter()
            .map(|value| value.to_bits())
            .collect::<Vec<_>>()
    };
    bits(a) == bits(b)
}

/// More sequences than any useful batch; each takes memory of its own.
const MAX_BATCH: usize = 1024;

fn batch_size(text: &str) -> Result<NonZero<usize>, String> {
    text.parse()
        .ok()
        .filter(|n: &NonZero<usize>| n.get() <= MAX_BATCH)
        .ok_or_else(|| format!("expected a number of sequences from 1 to {MAX_BATCH}"))
}

/// Tokens computed two ways before timing.
const CHECKED: usize = 16;

/// Bound on the difference of the two, as mean squared error over mean square: what float sums in another
/// order may cost. It is 0 on backends that promise the same bits.
const MAX_ERROR: f64 = 1e-6;

/// The same for models on a GPU, where a sum in another order may flip the rounding of an activation.
const MAX_ERROR_GPU: f64 = 1e-2;

/// And for a few of many sequences, where such a rounding is followed by others. Logits of something else differ by 1 and more.
const MAX_ERROR_OF_FEW: f64 = 0.25;

fn max_error(model: &Adapted<Device>) -> f64 {
    match native::gpu_name(model.model().backend()) {
        Some(_) => MAX_ERROR_GPU,
        None => MAX_ERROR,
    }
}

fn normalized_error(a: &[f32], b: &[f32]) -> f64 {
    let squares =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| a - b));
    let error = difference / squares(&mut a.iter().copied()).max(f64::MIN_POSITIVE);
    // Worse than any number.
    if error.is_nan() { f64::INFINITY } else { error }
}

/// FNV-1a, 64 bits, over each file's length (8 bytes, little-endian) and first MiB.
fn head_hash(files: &[SourceFile]) -> Result<u64> {
    const HEAD: u64 = 1 << 20;
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let add = |hash: u64, bytes: &[u8]| {
        (bytes.iter()).fold(hash, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(PRIME))
    };
    files.iter().try_fold(BASIS, |hash, file| {
        let head = file.slice(0, file.len().min(HEAD))?;
        Ok(add(add(hash, &file.len().to_le_bytes()), &head))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_relative() {
        assert_eq!(normalized_error(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((normalized_error(&[2.0, 0.0], &[2.0, 1.0]) - 0.25).abs() < 1e-12);
        assert_eq!(normalized_error(&[f32::NAN], &[1.0]), f64::INFINITY);
    }

    #[test]
    fn bits_tell_what_equality_does_not() {
        assert!(same_bits(&[1.0, f32::NAN], &[1.0, f32::NAN]));
        assert!(!same_bits(&[0.0], &[-0.0]));
        assert!(!same_bits(&[0.0], &[0.0, 0.0]));
    }

    #[test]
    fn only_what_may_be_ruled_out_is_filled_in() {
        let none = f32::NEG_INFINITY;
        let mut found = [none, 3.0, none];
        fill_ruled_out(&[1.0, 2.0, 2.0], &mut found);
        assert_eq!(found, [1.0, 3.0, none]);
    }

    #[test]
    fn batches_are_bounded() {
        assert_eq!(batch_size("1024").map(NonZero::get), Ok(1024));
        for text in ["0", "1025", "-1", "two"] {
            let expected = "expected a number of sequences from 1 to 1024";
            assert_eq!(batch_size(text), Err(expected.to_owned()), "{text}");
        }
    }
}
