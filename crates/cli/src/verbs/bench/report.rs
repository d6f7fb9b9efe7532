//! What was measured, summed up.

use serde::Serialize;

use super::measure::{Candidate, Test, Work};
use crate::machine::{Elapsed, Machine};
use crate::output::{self, Bytes};

#[derive(Debug, Serialize)]
pub(super) struct Report {
    pub(super) version: &'static str,
    /// What was built, if whoever built it said so.
    pub(super) commit: Option<&'static str>,
    pub(super) model: ModelReport,
    #[serde(flatten)]
    pub(super) machine: Machine,
    pub(super) backend: &'static str,
    pub(super) instruction_set: &'static str,
    pub(super) runs: Vec<Run>,
    /// The most memory the process held, with the model loaded once for each thread count, less what
    /// measuring the bandwidth takes.
    pub(super) peak_memory_bytes: Option<u64>,
}

#[derive(Debug, Serialize)]
pub(super) struct ModelReport {
    pub(super) name: String,
    pub(super) family: String,
    pub(super) file_bytes: u64,
    /// Tells files apart, if nobody wants to deceive: FNV-1a of each file's length and first MiB.
    pub(super) head_fnv1a64: String,
    /// Weights that decoding one token reads, as computed with.
    pub(super) bytes_per_token: u64,
}

/// What was measured with one number of threads.
#[derive(Debug, Serialize)]
pub(super) struct Run {
    threads: usize,
    /// From opened files to a model that can run.
    load_ms: f64,
    /// What as many threads read from memory together, the median of the repetitions.
    read_bandwidth_bytes_per_s: f64,
    /// What as many threads multiply and add in registers, the median of the repetitions.
    peak_multiply_adds_per_s: f64,
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
    /// Median of tokens per second of computing, of one thread.
    cpu_median: Option<f64>,
    /// Bytes of weights and cache read per second, of a decode test.
    bytes_per_s: Option<f64>,
    /// The same as a share of the measured bandwidth.
    bandwidth_share: Option<f64>,
    /// Multiplications with weights per second, of a prefill test.
    multiply_adds_per_s: Option<f64>,
    /// The same as a share of the measured peak.
    peak_share: Option<f64>,
}

impl Rate {
    /// `times` must not be empty.
    fn new(test: Test, times: &[Elapsed]) -> Rate {
        let per_second = |time: f64| test.n_tokens() as f64 / time;
        let rates = sorted(times.iter().map(|time| per_second(time.wall.as_secs_f64())));
        let cpu_rates: Option<Vec<f64>> = times
            .iter()
            .map(|time| Some(per_second(time.cpu?.as_secs_f64())))
            .collect();
        Rate {
            test: test.name(),
            median: quantile(&rates, 0.5),
            min: rates[0],
            max: rates[rates.len() - 1],
            spread: (quantile(&rates, 0.75) - quantile(&rates, 0.25)) / 2.0,
            cpu_median: cpu_rates.map(|rates| median(&rates)),
            bytes_per_s: None,
            bandwidth_share: None,
            multiply_adds_per_s: None,
            peak_share: None,
        }
    }
}

impl Run {
    /// Rates, and what they are of the machine's; `works` has the work of each of `tests`.
    pub(super) fn new(candidate: &Candidate, tests: &[Test], works: &[Work]) -> Run {
        let bandwidth = median(&candidate.bandwidths);
        let peak = median(&candidate.peaks);
        let results = tests.iter().zip(works).zip(&candidate.times);
        let results = results.map(|((test, work), times)| {
            let mut rate = Rate::new(*test, times);
            let per_second = rate.median / test.n_tokens() as f64;
            match *work {
                Work::Bytes(bytes) => {
                    let bytes_per_s = bytes as f64 * per_second;
                    rate.bytes_per_s = Some(bytes_per_s);
                    rate.bandwidth_share = Some(bytes_per_s / bandwidth);
                }
                Work::MultiplyAdds(n) => {
                    let n_per_s = n as f64 * per_second;
                    rate.multiply_adds_per_s = Some(n_per_s);
                    rate.peak_share = Some(n_per_s / peak);
                }
            }
            // Of several threads, the first one's time says little.
            rate.cpu_median = rate.cpu_median.filter(|_| candidate.threads == 1);
            rate
        });
        Run {
            threads: candidate.threads,
            load_ms: candidate.load_ms,
            read_bandwidth_bytes_per_s: bandwidth,
            peak_multiply_adds_per_s: peak,
            results: results.collect(),
        }
    }

    fn text(&self) -> String {
        let threads = match self.threads {
            1 => "1 thread".to_owned(),
            n => format!("{n} threads"),
        };
        let mut text = format!(
            "{threads}: loaded in {:.0} ms, reads {:.1} GB/s, multiplies and adds {:.0} G/s",
            self.load_ms,
            self.read_bandwidth_bytes_per_s / 1e9,
            self.peak_multiply_adds_per_s / 1e9,
        );
        for rate in &self.results {
            text += &format!(
                "\n  {:10} {:>10.1} ± {:.1} tokens/s",
                rate.test, rate.median, rate.spread
            );
            if let Some(cpu) = rate.cpu_median {
                text += &format!(" ({cpu:.1} by CPU time)");
            }
            if let (Some(bytes), Some(share)) = (rate.bytes_per_s, rate.bandwidth_share) {
                text += &format!(
                    "   {:.2} GB/s, {:.0} % of the bandwidth",
                    bytes / 1e9,
                    share * 100.0
                );
            }
            if let (Some(n), Some(share)) = (rate.multiply_adds_per_s, rate.peak_share) {
                text += &format!("   {:.1} G/s, {:.0} % of the peak", n / 1e9, share * 100.0);
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
            text += "\n\n";
            text += &run.text();
        }
        text
    }
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

/// The value that a share `q` of the sorted `values` lies below, between two of them if need be.
fn quantile(values: &[f64], q: f64) -> f64 {
    let at = q * (values.len() - 1) as f64;
    let (low, high) = (values[at.floor() as usize], values[at.ceil() as usize]);
    low + (high - low) * at.fract()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn rates_are_summed_up() {
        let times = [1.0, 0.5, 0.25].map(|seconds| Elapsed {
            wall: Duration::from_secs_f64(seconds),
            cpu: Some(Duration::from_secs_f64(seconds / 2.0)),
        });
        let rate = Rate::new(Test::Prefill(8), &times);
        assert_eq!(
            (rate.test.as_str(), rate.median, rate.min, rate.max),
            ("pp8", 16.0, 8.0, 32.0)
        );
        assert_eq!(rate.spread, (24.0 - 12.0) / 2.0);
        assert_eq!(rate.cpu_median, Some(32.0));
        assert_eq!(quantile(&[3.0], 0.75), 3.0);
    }
}
