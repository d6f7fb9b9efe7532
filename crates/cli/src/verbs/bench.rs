//! `sterna bench`: how fast a model runs here, and how near that is to what the memory allows.

use std::num::NonZero;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use sterna_engine::{Cpu, Logits, Model, Session};

use crate::args::{self, ReportFlags};
use crate::builtin;
use crate::machine::{self, Machine, MemoryReaders};
use crate::model::{ModelFiles, SourceFile};
use crate::output::{self, Bytes};
use crate::progress::Progress;

const EXAMPLE: &str = "Example:
  sterna bench model.gguf
  sterna bench builtin -p 128 -n 64 -t 1,2 -r 3 --json";

/// Measure prefill and decode rates
///
/// Results are checked before anything is timed. All tests with all thread counts take turns, and so
/// do measurements of how fast memory can be read, after a warm-up.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Bench {
    /// Model to run
    #[arg(default_value = builtin::NAME)]
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

    /// Tokens to decode, one by one from an empty context
    #[arg(
        short = 'n',
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "64"
    )]
    decode: Vec<NonZero<usize>>,

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

    #[command(flatten)]
    flags: ReportFlags,
}

/// One thing to time.
#[derive(Debug, Clone, Copy)]
enum Test {
    Prefill(usize),
    Decode(usize),
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    /// What was built, if whoever built it said so.
    commit: Option<&'static str>,
    model: ModelReport,
    #[serde(flatten)]
    machine: Machine,
    backend: &'static str,
    instruction_set: &'static str,
    runs: Vec<Run>,
    /// The most memory the process held, with the model loaded once for each thread count, less what
    /// measuring the bandwidth takes.
    peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
struct ModelReport {
    name: String,
    family: String,
    file_bytes: u64,
    /// Tells files apart, if nobody wants to deceive: FNV-1a of each file's length and first MiB.
    head_fnv1a64: String,
    /// Weights that decoding one token reads, as stored.
    bytes_per_token: u64,
}

/// A model loaded for one number of threads, and what was measured with it.
struct Candidate {
    threads: usize,
    load_ms: f64,
    model: Arc<Model<Cpu>>,
    readers: MemoryReaders,
    /// Of each test, each repetition.
    times: Vec<Vec<Duration>>,
    /// Bytes read per second, of each repetition.
    bandwidths: Vec<f64>,
}

/// What that means.
#[derive(Debug, Serialize)]
struct Run {
    threads: usize,
    /// From opened files to a model that can run.
    load_ms: f64,
    /// What as many threads read from memory together, the median of the repetitions.
    read_bandwidth_bytes_per_s: f64,
    results: Vec<Rate>,
}

/// Tokens per second in one test.
#[derive(Debug, Serialize)]
struct Rate {
    test: String,
    median: f64,
    min: f64,
    max: f64,
    /// Half of the difference between the quartiles.
    spread: f64,
    /// Bytes of weights read per second, of a decode test.
    bytes_per_s: Option<f64>,
    /// The same as a share of the measured bandwidth.
    bandwidth_share: Option<f64>,
}

impl Bench {
    pub(crate) fn run(self) -> Result<()> {
        let tests: Vec<Test> = (self.prefill.iter().map(|n| Test::Prefill(n.get())))
            .chain(self.decode.iter().map(|n| Test::Decode(n.get())))
            .collect();
        let longest = tests.iter().map(|test| test.n_tokens()).max().unwrap_or(0);
        let ctx_len = self.flags.engine.ctx_for(longest.max(CHECKED))?;
        let mut thread_counts: Vec<usize> = self.thread_counts.iter().map(|n| n.get()).collect();
        if thread_counts.is_empty() {
            thread_counts.push(self.flags.engine.n_threads());
        }

        let files = ModelFiles::open(&self.model)?;
        let plan = files.plan(&self.flags.files)?;
        let model = ModelReport {
            name: files.name().to_owned(),
            family: plan.config().family.name.to_owned(),
            file_bytes: files.files().iter().map(SourceFile::len).sum(),
            head_fnv1a64: format!("{:016x}", head_hash(files.files())),
            bytes_per_token: plan.bytes_per_token(),
        };
        let machine = Machine::detect();
        let mut candidates = Vec::with_capacity(thread_counts.len());
        let n_bytes = machine::readable_bytes(thread_counts.len(), machine.free_memory_bytes);
        let mut reader_bytes = 0;
        let mut peak_without_readers = None;
        for &threads in &thread_counts {
            let (model, load_ms) = self.load(&files, threads)?;
            if candidates.is_empty() {
                peak_without_readers = machine::peak_memory_bytes();
            }
            let readers = MemoryReaders::start(threads, n_bytes)?;
            reader_bytes += readers.n_bytes();
            candidates.push(Candidate {
                threads,
                load_ms,
                model,
                readers,
                times: vec![Vec::new(); tests.len()],
                bandwidths: Vec::new(),
            });
        }
        self.measure(&mut candidates, ctx_len, &tests)?;
        // All readers held their memory at the later peak; the earlier one was before the first.
        let peak_memory_bytes = machine::peak_memory_bytes()
            .map(|peak| peak.saturating_sub(reader_bytes))
            .max(peak_without_readers);
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            commit: option_env!("STERNA_COMMIT"),
            runs: (candidates.iter())
                .map(|candidate| candidate.report(&tests, model.bytes_per_token))
                .collect(),
            model,
            machine,
            backend: "cpu",
            instruction_set: args::isa()?.name(),
            peak_memory_bytes,
        };
        if self.flags.json {
            output::json(&report)
        } else {
            output::line(report.text())
        }
    }

    /// Loads the model for `threads` threads, and checks it; how many milliseconds loading took.
    fn load(&self, files: &ModelFiles, threads: usize) -> Result<(Arc<Model<Cpu>>, f64)> {
        let plan = files.plan(&self.flags.files)?;
        let start = Instant::now();
        let model = files.load(plan, self.flags.engine.backend(threads)?)?;
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        self.check(&model)?;
        Ok((model, load_ms))
    }

    /// Times `tests` with all `candidates` in turns, so that whatever else the machine does meets all
    /// alike.
    fn measure(&self, candidates: &mut [Candidate], ctx_len: usize, tests: &[Test]) -> Result<()> {
        let repetitions = self.repetitions.get();
        let n_steps = candidates.len() * (tests.len() + 1);
        let progress = Progress::items("measuring", (n_steps * (repetitions + 1)) as u64);
        for repetition in 0..=repetitions {
            // The first round warms up.
            let counts = repetition > 0;
            for candidate in &mut *candidates {
                let bandwidth = candidate.readers.pass()?;
                if counts {
                    candidate.bandwidths.push(bandwidth);
                }
                progress.add(1);
            }
            for (i, test) in tests.iter().enumerate() {
                for candidate in &mut *candidates {
                    let time = self.time(*test, &candidate.model, ctx_len)?;
                    if counts {
                        candidate.times[i].push(time);
                    }
                    progress.add(1);
                }
            }
        }
        Ok(())
    }

    /// Computes a few tokens at once and one by one, which must give the same.
    fn check(&self, model: &Arc<Model<Cpu>>) -> Result<()> {
        let n_vocab = model.config().n_vocab;
        let ids = token_ids(CHECKED, n_vocab);
        let mut session = Session::new(model.clone(), self.flags.engine.session(CHECKED))?;
        let at_once = session.forward(&ids, Logits::Last)?;
        session.truncate(0);
        let mut one_by_one = Vec::new();
        for id in &ids {
            one_by_one = session.forward(&[*id], Logits::Last)?;
        }
        let error = normalized_error(&at_once, &one_by_one);
        if error.is_nan() || error > MAX_ERROR {
            bail!(
                "wrong result, so nothing was timed: logits of {CHECKED} tokens at once and one by one \
                 differ by a normalised mean squared error of {error:.1e}, expected at most {MAX_ERROR:.0e}"
            );
        }
        Ok(())
    }

    fn time(&self, test: Test, model: &Arc<Model<Cpu>>, ctx_len: usize) -> Result<Duration> {
        let ids = token_ids(test.n_tokens(), model.config().n_vocab);
        let mut session = Session::new(model.clone(), self.flags.engine.session(ctx_len))?;
        let chunk = match test {
            Test::Prefill(n) => n,
            Test::Decode(_) => 1,
        };
        let start = Instant::now();
        for chunk in ids.chunks(chunk) {
            session.forward(chunk, Logits::Last)?;
        }
        Ok(start.elapsed())
    }
}

/// Tokens computed two ways before timing.
const CHECKED: usize = 16;

/// Bound on the difference of the two, as mean squared error over mean square: what float sums in
/// another order may cost. It is 0 on backends that promise the same bits.
const MAX_ERROR: f64 = 1e-6;

fn normalized_error(a: &[f32], b: &[f32]) -> f64 {
    let squares =
        |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>();
    let difference = squares(&mut a.iter().zip(b).map(|(a, b)| a - b));
    difference / squares(&mut a.iter().copied()).max(f64::MIN_POSITIVE)
}

/// `n` ids below `n_vocab` that look random and are the same every time.
fn token_ids(n: usize, n_vocab: usize) -> Vec<u32> {
    // Steps of the golden ratio spread over the vocabulary without repeating soon.
    (1..=n as u64)
        .map(|i| ((i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) * n_vocab as u64) >> 32)
        .map(|id| id as u32)
        .collect()
}

impl Test {
    const fn n_tokens(self) -> usize {
        match self {
            Test::Prefill(n) | Test::Decode(n) => n,
        }
    }

    fn name(self) -> String {
        match self {
            Test::Prefill(n) => format!("pp{n}"),
            Test::Decode(n) => format!("tg{n}"),
        }
    }

    /// `times` must not be empty.
    fn rate(self, times: &[Duration]) -> Rate {
        let mut rates: Vec<f64> = times
            .iter()
            .map(|time| self.n_tokens() as f64 / time.as_secs_f64())
            .collect();
        rates.sort_by(f64::total_cmp);
        Rate {
            test: self.name(),
            median: quantile(&rates, 0.5),
            min: rates[0],
            max: rates[rates.len() - 1],
            spread: (quantile(&rates, 0.75) - quantile(&rates, 0.25)) / 2.0,
            bytes_per_s: None,
            bandwidth_share: None,
        }
    }
}

/// The value that a share `q` of the sorted `values` lies below, between two of them if need be.
fn quantile(values: &[f64], q: f64) -> f64 {
    let at = q * (values.len() - 1) as f64;
    let (low, high) = (values[at.floor() as usize], values[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

impl Candidate {
    /// Rates, and decode rates as a share of the bandwidth.
    fn report(&self, tests: &[Test], bytes_per_token: u64) -> Run {
        let mut bandwidths = self.bandwidths.clone();
        bandwidths.sort_by(f64::total_cmp);
        let bandwidth = quantile(&bandwidths, 0.5);
        let results = tests.iter().zip(&self.times).map(|(test, times)| {
            let mut rate = test.rate(times);
            if let Test::Decode(_) = test {
                let bytes_per_s = rate.median * bytes_per_token as f64;
                rate.bytes_per_s = Some(bytes_per_s);
                rate.bandwidth_share = Some(bytes_per_s / bandwidth);
            }
            rate
        });
        Run {
            threads: self.threads,
            load_ms: self.load_ms,
            read_bandwidth_bytes_per_s: bandwidth,
            results: results.collect(),
        }
    }
}

/// FNV-1a, 64 bits, over each file's length (8 bytes, little-endian) and first MiB.
fn head_hash(files: &[SourceFile]) -> u64 {
    const HEAD: u64 = 1 << 20;
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0000_0100_0000_01b3;
    let add = |hash: u64, bytes: &[u8]| {
        (bytes.iter()).fold(hash, |hash, &b| (hash ^ u64::from(b)).wrapping_mul(PRIME))
    };
    files.iter().fold(BASIS, |hash, file| {
        add(add(hash, &file.len().to_le_bytes()), &file.prefix(HEAD))
    })
}

impl Report {
    fn text(&self) -> String {
        let model = &self.model;
        let mut rows = vec![
            (
                "model",
                format!(
                    "{} ({}), {}",
                    model.name,
                    model.family,
                    Bytes(model.file_bytes)
                ),
            ),
            (
                "machine",
                format!("{}, {}", self.machine.cpu, self.machine.system),
            ),
            (
                "using",
                format!(
                    "{}, {}, sterna {}",
                    self.backend, self.instruction_set, self.version
                ),
            ),
            ("read per token", Bytes(model.bytes_per_token).to_string()),
        ];
        if let Some(bytes) = self.peak_memory_bytes {
            rows.push(("peak memory", Bytes(bytes).to_string()));
        }
        let mut text = output::table(&rows);
        for run in &self.runs {
            text += &format!(
                "\n\n{} threads: loaded in {:.0} ms, memory reads {:.1} GB/s",
                run.threads,
                run.load_ms,
                run.read_bandwidth_bytes_per_s / 1e9
            );
            for rate in &run.results {
                text += &format!(
                    "\n  {:8} {:>10.1} ± {:.1} tokens/s",
                    rate.test, rate.median, rate.spread
                );
                if let (Some(bytes), Some(share)) = (rate.bytes_per_s, rate.bandwidth_share) {
                    text += &format!(
                        "   {:.2} GB/s, {:.0} % of the bandwidth",
                        bytes / 1e9,
                        share * 100.0
                    );
                }
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_summed_up() {
        let times = [1.0, 0.5, 0.25].map(Duration::from_secs_f64);
        let rate = Test::Prefill(8).rate(&times);
        assert_eq!(
            (rate.test.as_str(), rate.median, rate.min, rate.max),
            ("pp8", 16.0, 8.0, 32.0)
        );
        assert_eq!(rate.spread, (24.0 - 12.0) / 2.0);
        assert_eq!(quantile(&[3.0], 0.75), 3.0);
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

    #[test]
    fn errors_are_relative() {
        assert_eq!(normalized_error(&[1.0, 2.0], &[1.0, 2.0]), 0.0);
        assert!((normalized_error(&[2.0, 0.0], &[2.0, 1.0]) - 0.25).abs() < 1e-12);
        assert!(normalized_error(&[f32::NAN], &[1.0]).is_nan());
    }
}
