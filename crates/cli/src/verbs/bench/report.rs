//! The summary of the measurements.

use serde::Serialize;

use super::kernels::Kernels;
use super::measure::{Candidate, Test, Times, Work};
use crate::machine::{Machine, Pages, Reading};
use crate::output::{self, Bytes};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    /// The commit that was built, if the build set it.
    pub(super) commit: Option<&'static str>,
    pub(super) model: ModelReport,
    #[serde(flatten)]
    pub(super) machine: Machine,
    pub(super) backend: &'static str,
    /// The GPU that computes, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) gpu: Option<String>,
    pub(super) instruction_set: &'static str,
    /// Data type of the KV cache.
    pub(super) cache: &'static str,
    pub(super) runs: Vec<Run>,
    /// The peak memory of the process, with the model loaded once for each thread count, before the bandwidth
    /// was measured.
    pub(super) peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct ModelReport {
    pub(super) name: String,
    pub(super) family: String,
    pub(super) file_bytes: u64,
    /// Identifies files, without security: FNV-1a of each file's length and first MiB.
    pub(super) head_fnv1a64: String,
    /// Weights that decoding one token reads, in their loaded types.
    pub(super) bytes_per_token: u64,
}

/// Measurements with one number of threads.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    threads: usize,
    /// From opened files to a loaded model.
    load_ms: f64,
    /// The bandwidth of as many threads reading memory together: the best of `reads`. Not measured where a
    /// GPU computes all layers.
    read_bandwidth_bytes_per_s: Option<f64>,
    /// The methods of reading memory.
    reads: Vec<Read>,
    /// The multiply-adds per second of as many threads in registers, the median of the repetitions. Not
    /// measured where a GPU computes all layers.
    peak_multiply_adds_per_s: Option<f64>,
    results: Vec<Rate>,
}

/// The rate of reading memory by one method.
#[derive(Debug, Serialize)]
struct Read {
    #[serde(flatten)]
    reading: Reading,
    /// The median of the repetitions.
    bytes_per_s: f64,
    /// Half of the difference between the quartiles.
    spread: f64,
}

impl Read {
    /// `rates` must not be empty.
    fn new(reading: Reading, rates: &[f64]) -> Read {
        let rates = sorted(rates.iter().copied());
        Read {
            reading,
            bytes_per_s: quantile(&rates, 0.5),
            spread: spread(&rates),
        }
    }
}

/// Tokens per second in one test, of all sequences together.
#[derive(Debug, Serialize)]
struct Rate {
    test: String,
    median: f64,
    min: f64,
    max: f64,
    /// Half of the difference between the quartiles.
    spread: f64,
    /// Median of tokens per second of CPU time, of one thread.
    cpu_median: Option<f64>,
    /// Milliseconds per step, of a decode test.
    step_ms: Option<f64>,
    /// Steps of several sequences together, compared with those of one.
    batch: Option<BatchCost>,
    /// Bytes of weights and cache read per second, of a decode test.
    bytes_per_s: Option<f64>,
    /// The same as a share of the measured bandwidth.
    bandwidth_share: Option<f64>,
    /// Multiply-accumulates with weights per second, of a prefill test or several sequences.
    multiply_adds_per_s: Option<f64>,
    /// The same as a share of the measured peak.
    peak_share: Option<f64>,
    /// The kernels of a GPU, if they were to be timed.
    #[serde(skip_serializing_if = "Option::is_none")]
    kernels: Option<Kernels>,
}

/// The cost of a step of several sequences, compared with steps of one that it alternated with.
#[derive(Debug, Serialize)]
struct BatchCost {
    n_sequences: usize,
    /// Milliseconds per step of one sequence, the median of the repetitions.
    alone_step_ms: f64,
    /// Time of a step of all, over that of one sequence: the median of the repetitions.
    relative: f64,
    /// Half of the difference between the quartiles of that.
    relative_spread: f64,
}

impl BatchCost {
    /// `None` if no sequence was computed alone; `times` must not be empty.
    fn new(test: Test, times: &[Times]) -> Option<BatchCost> {
        let n_steps = (test.n_tokens() / test.batch()) as f64;
        let alone: Vec<f64> = (times.iter())
            .map(|times| Some(times.alone?.wall.as_secs_f64()))
            .collect::<Option<_>>()?;
        let relative = times.iter().zip(&alone);
        let relative = sorted(relative.map(|(times, alone)| times.test.wall.as_secs_f64() / alone));
        Some(BatchCost {
            n_sequences: test.batch(),
            alone_step_ms: median(&alone) / n_steps * 1e3,
            relative: quantile(&relative, 0.5),
            relative_spread: spread(&relative),
        })
    }
}

impl Rate {
    /// `times` must not be empty.
    fn new(test: Test, times: &[Times]) -> Rate {
        let per_second = |time: f64| test.n_tokens() as f64 / time;
        let rates = sorted((times.iter()).map(|time| per_second(time.test.wall.as_secs_f64())));
        let cpu_rates: Option<Vec<f64>> = times
            .iter()
            .map(|time| Some(per_second(time.test.cpu?.as_secs_f64())))
            .collect();
        let median_rate = quantile(&rates, 0.5);
        let is_decode = matches!(test, Test::Decode { .. });
        Rate {
            test: test.name(),
            median: median_rate,
            min: rates[0],
            max: rates[rates.len() - 1],
            spread: spread(&rates),
            cpu_median: cpu_rates.map(|rates| median(&rates)),
            step_ms: is_decode.then_some(test.batch() as f64 / median_rate * 1e3),
            batch: BatchCost::new(test, times),
            bytes_per_s: None,
            bandwidth_share: None,
            multiply_adds_per_s: None,
            peak_share: None,
            kernels: None,
        }
    }
}

impl Run {
    /// Rates, and their shares of the machine's peak rates; `works` has the work of each of `tests`.
    pub(super) fn new(candidate: &mut Candidate, tests: &[Test], works: &[Work]) -> Run {
        let reads: Vec<Read> = (candidate.bandwidths.iter())
            .map(|(reading, rates)| Read::new(*reading, rates))
            .collect();
        let bandwidth = best(&reads, |_| true);
        let peak = (!candidate.peaks.is_empty()).then(|| median(&candidate.peaks));
        let results = tests.iter().zip(works).zip(&candidate.times);
        let mut kernels = std::mem::take(&mut candidate.kernels).into_iter();
        let results = results.map(|((test, work), times)| {
            let mut rate = Rate::new(*test, times);
            let per_second = rate.median / test.n_tokens() as f64;
            rate.bytes_per_s = work.bytes.map(|bytes| bytes as f64 * per_second);
            rate.bandwidth_share = (rate.bytes_per_s.zip(bandwidth)).map(|(rate, of)| rate / of);
            rate.multiply_adds_per_s = work.multiply_adds.map(|n| n as f64 * per_second);
            rate.peak_share = (rate.multiply_adds_per_s.zip(peak)).map(|(rate, of)| rate / of);
            // With several threads, the first one's time says little.
            rate.cpu_median = rate.cpu_median.filter(|_| candidate.threads == 1);
            rate.kernels = kernels.next();
            rate
        });
        Run {
            threads: candidate.threads,
            load_ms: candidate.load_ms,
            read_bandwidth_bytes_per_s: bandwidth,
            reads,
            peak_multiply_adds_per_s: peak,
            results: results.collect(),
        }
    }

    fn text(&self) -> String {
        let threads = match self.threads {
            1 => "1 thread".to_owned(),
            n => format!("{n} threads"),
        };
        let mut text = format!("{threads}: loaded in {:.0} ms", self.load_ms);
        let kinds = [
            (Pages::Ordinary, "ordinary pages"),
            (Pages::Huge, "huge pages"),
            (Pages::File, "the model's files"),
        ];
        let kinds: Vec<String> = (kinds.iter())
            .filter_map(|(pages, name)| {
                let rate = best(&self.reads, |read| read.pages == *pages)?;
                Some(format!("{name} {:.1}", rate / 1e9))
            })
            .collect();
        if let (Some(read), Some(peak)) = (
            self.read_bandwidth_bytes_per_s,
            self.peak_multiply_adds_per_s,
        ) {
            text += &format!(
                ", reads {:.1} GB/s ({}), multiplies and adds {:.0} G/s",
                read / 1e9,
                kinds.join(", "),
                peak / 1e9,
            );
        }
        for rate in &self.results {
            text += &format!(
                "\n  {:10} {:>10.1} ± {:.1} tokens/s",
                rate.test, rate.median, rate.spread
            );
            if let Some(cpu) = rate.cpu_median {
                text += &format!(" ({cpu:.1} by CPU time)");
            }
            if let Some((ms, batch)) = rate.step_ms.zip(rate.batch.as_ref()) {
                text += &format!(
                    "   {ms:.1} ms a step, {:.2} ± {:.2} times that of one sequence",
                    batch.relative, batch.relative_spread
                );
            }
            if let Some(bytes) = rate.bytes_per_s {
                text += &format!("   {:.2} GB/s", bytes / 1e9);
            }
            if let Some(share) = rate.bandwidth_share {
                text += &format!(", {:.0} % of the bandwidth", share * 100.0);
            }
            if let Some(n) = rate.multiply_adds_per_s {
                text += &format!("   {:.1} G/s", n / 1e9);
            }
            if let Some(share) = rate.peak_share {
                text += &format!(", {:.0} % of the peak", share * 100.0);
            }
            if let Some(kernels) = &rate.kernels {
                let of = rate.step_ms.map_or("the prompt", |_| "a token");
                text += &kernels.text(of);
            }
        }
        text
    }
}

impl Report {
    pub(super) fn text(&self) -> String {
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
                    "{}, {}, cache {}, sterna {}",
                    self.gpu.as_deref().unwrap_or(self.backend),
                    self.instruction_set,
                    self.cache,
                    self.version
                ),
            ),
            ("read per token", Bytes(model.bytes_per_token).to_string()),
        ];
        if let Some(bytes) = self.peak_memory_bytes {
            rows.push(("peak memory", Bytes(bytes).to_string()));
        }
        let mut text = output::table(&rows);
        for run in &self.runs {
            text += "\n\n";
            text += &run.text();
        }
        text
    }
}

/// The best rate of those `reads` that are `wanted`, if any.
fn best(reads: &[Read], wanted: impl Fn(Reading) -> bool) -> Option<f64> {
    let reads = reads.iter().filter(|read| wanted(read.reading));
    reads.map(|read| read.bytes_per_s).max_by(f64::total_cmp)
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}

/// `values` must not be empty.
fn median(values: &[f64]) -> f64 {
    quantile(&sorted(values.iter().copied()), 0.5)
}

/// The `q` quantile of the sorted `values`, interpolated.
fn quantile(values: &[f64], q: f64) -> f64 {
    let at = q * (values.len() - 1) as f64;
    let (low, high) = (values[at.floor() as usize], values[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

/// Half of the interquartile range of the sorted `values`.
fn spread(values: &[f64]) -> f64 {
    (quantile(values, 0.75) - quantile(values, 0.25)) / 2.0
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::machine::Elapsed;

    fn seconds(wall: f64) -> Elapsed {
        Elapsed {
            wall: Duration::from_secs_f64(wall),
            cpu: Some(Duration::from_secs_f64(wall / 2.0)),
        }
    }

    #[test]
    fn rates_are_summed_up() {
        let times = [1.0, 0.5, 0.25].map(|wall| Times {
            test: seconds(wall),
            alone: None,
        });
        let rate = Rate::new(Test::Prefill(8), &times);
        assert_eq!(
            (rate.test.as_str(), rate.median, rate.min, rate.max),
            ("pp8", 16.0, 8.0, 32.0)
        );
        assert_eq!(rate.spread, (24.0 - 12.0) / 2.0);
        assert_eq!(rate.cpu_median, Some(32.0));
        assert!(rate.step_ms.is_none() && rate.batch.is_none());
        assert_eq!(quantile(&[3.0], 0.75), 3.0);
    }

    #[test]
    fn steps_of_several_are_compared_with_steps_of_one() {
        let times = [(3.0, 1.0), (8.0, 4.0), (6.0, 2.0)].map(|(test, alone)| Times {
            test: seconds(test),
            alone: Some(seconds(alone)),
        });
        let test = Test::Decode {
            n: 10,
            depth: 0,
            batch: 4,
        };
        let rate = Rate::new(test, &times);
        assert_eq!(rate.median, 40.0 / 6.0);
        assert_eq!(rate.step_ms, Some(4.0 / rate.median * 1e3));
        let batch = rate.batch.unwrap();
        assert_eq!((batch.n_sequences, batch.relative), (4, 3.0));
        assert_eq!(batch.alone_step_ms, 200.0);
        assert_eq!(batch.relative_spread, 0.25);
    }
}
