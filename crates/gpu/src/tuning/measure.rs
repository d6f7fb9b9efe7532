//! Finding the fastest launch configuration on the device itself.
//!
//! Products are run as in a model's step, one after the other and each with its own matrix, so that the cache
//! state matches a real decode step. Only the products in question use other configurations, and the whole
//! step is timed: its end is what matters, and timestamps within it would change that. A configuration whose
//! results differ from those of the heuristics is not measured.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::kernels::Rows;
use crate::kernels::linear::{Epilogue, Form, Input, Linear, multiply, settled};
use crate::kernels::quantize::{QuantizedRows, quantize};
use crate::memory::Buffer;
use crate::tuning::{LaunchConfig, Product, RowClass};
use crate::{Commands, Device, GpuError, Recorder, Tuning, WeightKind};

/// A product of a step: the matrix, and what it is multiplied with.
#[derive(Debug, Clone)]
pub struct Sample {
    /// The matrix.
    pub weights: Linear,
    /// Rows of activations.
    pub n_rows: usize,
    /// Whether a norm is computed as the activations are quantized.
    pub is_normed: bool,
    /// What is done with the result.
    pub epilogue: Epilogue,
    /// Whether no other product reads the same activations in the same form. Where one does, how they are quantized is
    /// left to heuristics: alone, a product seems to save a dispatch that the other still needs.
    pub is_alone: bool,
}

impl Sample {
    /// Its tuning key.
    pub fn product(&self) -> Product {
        self.weights.product(self.n_rows)
    }
}

/// The effort to spend on a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Rounds in which the best configurations are timed, in turns.
    pub rounds: usize,
    /// When to stop with what is known.
    pub limit: Duration,
}

/// The measurements of a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The product.
    pub product: Product,
    /// Number of different matrices that were multiplied in turn.
    pub n_matrices: usize,
    /// The default configuration, with every choice resolved.
    pub rule: LaunchConfig,
    /// Microseconds that all products of the step take together with the default configuration: the median of
    /// all rounds.
    pub rule_us: f64,
    /// The fastest configuration, resolved; the default unless another is significantly faster.
    pub best: LaunchConfig,
    /// The same where this product uses the fastest configuration.
    pub best_us: f64,
    /// Configurations that gave the right result and were timed, including the default.
    pub n_configs: usize,
    /// Configurations that gave other results and were excluded: there should be none.
    pub wrong: Vec<LaunchConfig>,
}

/// Measures the products of a step.
#[derive(Debug)]
pub struct Tuner {
    device: Device,
    samples: Vec<Sample>,
    products: Vec<Product>,
    x: Buffer,
    norm: Buffer,
    out: Buffer,
    /// Quantized activations, for each form and width; for floats, memory for them as f16.
    rounded: HashMap<(Form, usize), QuantizedRows>,
    /// Room to quantize one row.
    scratch: QuantizedRows,
}

/// For each product, this many matrices are run in turn, and more until they have this many bytes together.
const MATRICES: usize = 4;
const BYTES: u64 = 256 << 20;

/// Rounds in which all configurations take part, and how many of the fastest take part in the others.
const HEATS: usize = 3;
const FINALISTS: usize = 3;

/// A configuration that at first makes the step this many times as long is not timed again.
const HOPELESS: f64 = 1.2;

/// The least share of the step that another configuration has to save.
const MIN_GAIN: f64 = 0.002;

/// Maximum elements of a result that are compared, of its first rows.
const CHECKED: usize = 1 << 20;

/// Ample time for power-saving devices to reach their full clock.
const WARM_UP: Duration = Duration::from_millis(100);

/// Submissions in a row, where only the host's clock is available.
const AT_ONCE: usize = 6;

impl Tuner {
    /// Prepares the products of `samples`, in the order in which a step has them.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if there is no room for their activations.
    pub fn new(device: &Device, samples: Vec<Sample>) -> Result<Tuner, GpuError> {
        let samples = enough(alone_everywhere(samples));
        let mut products = Vec::new();
        for product in samples.iter().map(Sample::product) {
            if !products.contains(&product) {
                products.push(product);
            }
        }
        let most = |of: fn(&Sample) -> usize| samples.iter().map(of).max().unwrap_or(1).max(1);
        let x_len = most(|s| s.n_rows * s.weights.k());
        let x: Vec<f32> = (0..x_len)
            .map(|i| (i as u32).wrapping_mul(2_654_435_761) as f32 / 2f32.powi(31) - 1.0)
            .collect();
        let width = most(|s| s.weights.k());
        let mut tuner = Tuner {
            device: device.clone(),
            products,
            x: device.upload(&x)?,
            norm: device.upload(&vec![1.0f32; width])?,
            out: device.buffer("results", most(|s| s.n_rows * s.weights.n()) as u64 * 4)?,
            rounded: HashMap::new(),
            scratch: QuantizedRows::new(device, 1, width)?,
            samples: Vec::new(),
        };
        let mut recorder = Recorder::new(device);
        for sample in &samples {
            let k = sample.weights.k();
            let rows = samples.iter().filter(|s| s.weights.k() == k);
            let n_rows = rows.map(|s| s.n_rows).max().unwrap_or(1);
            let form = sample.weights.kind().form();
            if !tuner.rounded.contains_key(&(form, k)) {
                let rounded = QuantizedRows::new(device, n_rows, k)?;
                if let Form::Int8(scaling) = form {
                    let x = Rows::new(&tuner.x, n_rows, k);
                    quantize(&mut recorder, x, None, scaling, &rounded)?;
                }
                tuner.rounded.insert((form, k), rounded);
            }
        }
        device.submit(&[&recorder.finish()?], &[])?.wait()?;
        tuner.samples = samples;
        Ok(tuner)
    }

    /// The distinct products, in the order in which the step has them.
    pub fn products(&self) -> &[Product] {
        &self.products
    }

    /// Measures the configurations of `product`, one of [`Tuner::products`].
    ///
    /// `None` if there was no time to compare any two.
    ///
    /// Errors: [`GpuError::Unsupported`] if no matrix has this product; errors of running products.
    pub fn measure(&self, product: &Product, effort: Effort) -> Result<Option<Measured>, GpuError> {
        let deadline = Instant::now() + effort.limit;
        let mut samples = self.samples.iter().filter(|s| s.product() == *product);
        let Some(first) = samples.next() else {
            return Err(GpuError::Unsupported {
                what: format!("measuring {product:?}"),
                reason: "no matrix is multiplied like this".into(),
            });
        };
        let Checked {
            mut runs,
            n_configs,
            wrong,
            is_all,
        } = self.check(first, Instant::now() + effort.limit / 2)?;
        let is_only = runs.len() == 1;
        if self.race(&mut runs, HEATS, Some(deadline))? && !is_only {
            runs[1..].sort_by(|a, b| a.times.median().total_cmp(&b.times.median()));
            runs.truncate(1 + FINALISTS);
            // So that the winner is not one that was merely lucky in the heats.
            runs.iter_mut().for_each(|run| run.times.0.clear());
            self.race(&mut runs, effort.rounds.max(HEATS), Some(deadline))?;
        }
        let is_known = |run: &&Run| run.times.0.len() >= HEATS;
        let (rule, others) = runs.split_first().expect("the default is among them");
        let known: Vec<&Run> = others.iter().filter(is_known).collect();
        let nothing_else = is_all && is_only;
        if !is_known(&rule) || known.is_empty() && !nothing_else {
            return Ok(None);
        }
        let better = known.into_iter().filter(|run| run.times.beats(&rule.times));
        let best = better
            .min_by(|a, b| a.times.median().total_cmp(&b.times.median()))
            .unwrap_or(rule);
        Ok(Some(Measured {
            product: *product,
            n_matrices: 1 + samples.count(),
            rule: rule.config,
            rule_us: rule.times.median(),
            best: best.config,
            best_us: best.times.median(),
            n_configs,
            wrong,
        }))
    }

    /// What was `found`, restricted to configurations that make steps faster together as well: where they
    /// don't, the heuristics decide.
    ///
    /// Errors: those of running products.
    pub fn confirm(
        &self,
        mut found: Vec<Measured>,
        rounds: usize,
    ) -> Result<Vec<Measured>, GpuError> {
        for rows in [RowClass::One, RowClass::Few, RowClass::Many] {
            let is_meant = |m: &Measured| m.product.rows == rows && m.best != m.rule;
            let configs = found.iter().filter(|m| is_meant(m));
            let tuning = Tuning::default().with(configs.map(|m| (m.product, m.best)));
            if tuning.n_products() == 0 {
                continue;
            }
            let mut runs = [
                self.warm_run(rows, LaunchConfig::default(), &Tuning::default())?,
                self.warm_run(rows, LaunchConfig::default(), &tuning)?,
            ];
            self.race(&mut runs, rounds.max(HEATS), None)?;
            if !runs[1].times.beats(&runs[0].times) {
                for measured in found.iter_mut().filter(|m| is_meant(m)) {
                    (measured.best, measured.best_us) = (measured.rule, measured.rule_us);
                }
            }
        }
        Ok(found)
    }

    /// Runs all in turns, this many times; false if that took too long and was ended.
    fn race(
        &self,
        runs: &mut [Run],
        rounds: usize,
        deadline: Option<Instant>,
    ) -> Result<bool, GpuError> {
        let start = Instant::now();
        while start.elapsed() < WARM_UP {
            self.time(&runs[0].chain)?;
        }
        for round in 0..rounds {
            let n = runs.len();
            for i in 0..n {
                // In alternating order, so that clock drift favours none.
                let run = &mut runs[if round % 2 == 0 { i } else { n - 1 - i }];
                run.times.0.push(self.time(&run.chain)?);
                if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Whether the device's configurations of the product of `sample` give the same result, as far as time
    /// permits.
    fn check(&self, sample: &Sample, deadline: Instant) -> Result<Checked, GpuError> {
        let settle = |config| settled(&self.device, config, &sample.weights, sample.n_rows);
        let rule = settle(LaunchConfig::default());
        let norms: &[bool] = match sample.is_normed && sample.n_rows == 1 {
            true => &[false, true],
            false => &[false],
        };
        let results = |config| -> Result<Vec<Vec<f32>>, GpuError> {
            let of_norm = |&normed: &bool| self.result(sample, config, normed);
            norms.iter().map(of_norm).collect()
        };
        let want = results(rule)?;
        let mut checked = Checked {
            runs: vec![self.first_run(sample, rule)?],
            n_configs: 1,
            wrong: Vec::new(),
            is_all: true,
        };
        let mut known = vec![rule];
        for config in wishes().into_iter().map(settle) {
            let is_own = sample.is_alone || config.rounds_itself == rule.rounds_itself;
            if known.contains(&config) || !is_own {
                continue;
            }
            if Instant::now() > deadline {
                checked.is_all = false;
                break;
            }
            known.push(config);
            let got = results(config)?;
            let mut pairs = got.iter().zip(&want).zip(norms);
            if !pairs.all(|((got, want), normed)| negotiate(got, want, bound(sample, *normed))) {
                checked.wrong.push(config);
                continue;
            }
            checked.n_configs += 1;
            let run = self.first_run(sample, config)?;
            if run.times.median() < HOPELESS * checked.runs[0].times.median() {
                checked.runs.push(run);
            }
        }
        // Those runs were only for a first impression.
        checked.runs.iter_mut().for_each(|run| run.times.0.clear());
        Ok(checked)
    }

    /// `config`, timed once after a warm-up run.
    fn first_run(&self, sample: &Sample, config: LaunchConfig) -> Result<Run, GpuError> {
        let product = sample.product();
        let tuning = Tuning::default().with([(product, config)]);
        let mut run = self.warm_run(product.rows, config, &tuning)?;
        run.times.0.push(self.time(&run.chain)?);
        Ok(run)
    }

    /// A step whose products use `tuning`, run once to warm up.
    fn warm_run(
        &self,
        rows: RowClass,
        config: LaunchConfig,
        tuning: &Tuning,
    ) -> Result<Run, GpuError> {
        let chain = self.chain(rows, tuning)?;
        self.time(&chain)?;
        Ok(Run {
            config,
            chain,
            times: Times::default(),
        })
    }

    /// The first rows of a product's result.
    fn result(
        &self,
        sample: &Sample,
        config: LaunchConfig,
        normed: bool,
    ) -> Result<Vec<f32>, GpuError> {
        let sample = Sample {
            is_normed: normed,
            ..sample.clone()
        };
        let width = sample.epilogue.width(sample.weights.n());
        let len = (sample.n_rows * width).min(CHECKED);
        // Some products accumulate.
        self.device.write(&self.out, 0, &vec![0u32; len])?;
        let mut recorder = Recorder::new(&self.device);
        self.record(&mut recorder, &sample, config)?;
        let commands = recorder.finish()?;
        self.device.submit(&[&commands], &[])?.wait()?;
        self.device.read(&self.out, 0..len)
    }

    /// Records the product of `sample`, including quantization where a single row is quantized.
    fn record(
        &self,
        recorder: &mut Recorder,
        sample: &Sample,
        config: LaunchConfig,
    ) -> Result<(), GpuError> {
        let Sample {
            weights: w, n_rows, ..
        } = sample;
        recorder.set_tuning(Tuning::all(config));
        let x = Rows::new(&self.x, *n_rows, w.k());
        let form = w.kind().form();
        let rounded = &self.rounded[&(form, w.k())];
        let input = match form {
            Form::Float => Input::Half {
                x,
                scratch: rounded,
            },
            Form::Int8(_) if *n_rows == 1 => Input::Round {
                x,
                norm: sample.is_normed.then_some((&self.norm, 1e-5)),
                scratch: &self.scratch,
            },
            Form::Int8(_) => Input::Int8(rounded),
        };
        let out = Rows::new(&self.out, *n_rows, sample.epilogue.width(w.n()));
        multiply(recorder, w, input, sample.epilogue, out)
    }

    /// A step with this many rows whose products use `tuning`.
    fn chain(&self, rows: RowClass, tuning: &Tuning) -> Result<Commands, GpuError> {
        let mut recorder = Recorder::new(&self.device);
        for sample in &self.samples {
            if RowClass::of(sample.n_rows) == rows {
                let config = tuning.config(&sample.product());
                self.record(&mut recorder, sample, config)?;
            }
        }
        recorder.finish()
    }

    /// Microseconds per step.
    fn time(&self, chain: &Commands) -> Result<f64, GpuError> {
        if self.device.features().timestamps {
            // Preceded by another, so that the device isn't idle before.
            let _before = self.device.submit(&[chain], &[])?;
            return self.device.time_together(&[chain]);
        }
        let start = Instant::now();
        let mut last = None;
        for _ in 0..AT_ONCE {
            last = Some(self.device.submit(&[chain], &[])?);
        }
        last.map_or(Ok(Vec::new()), |last| last.wait())?;
        Ok(start.elapsed().as_secs_f64() * 1e6 / AT_ONCE as f64)
    }
}

/// Configurations that may be timed, none of them timed yet.
#[derive(Debug)]
struct Checked {
    /// The default configuration, and those that give the same result and don't take much longer.
    runs: Vec<Run>,
    /// Those that give the same result.
    n_configs: usize,
    /// Those that give another.
    wrong: Vec<LaunchConfig>,
    /// Whether there was time for all configurations.
    is_all: bool,
}

/// A configuration, and how long it took each time.
#[derive(Debug)]
struct Run {
    config: LaunchConfig,
    chain: Commands,
    times: Times,
}

/// Repeated timings, in microseconds.
#[derive(Debug, Default)]
struct Times(Vec<f64>);

impl Times {
    fn median(&self) -> f64 {
        median(self.0.clone())
    }

    /// The median absolute deviation.
    fn spread(&self) -> f64 {
        let middle = self.median();
        median(self.0.iter().map(|us| (us - middle).abs()).collect())
    }

    /// Whether it is significantly faster than `rule`, and by enough to be worth it.
    fn beats(&self, rule: &Times) -> bool {
        let gain = rule.median() - self.median();
        gain > (rule.median() * MIN_GAIN).max(self.spread() + rule.spread())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Candidate configurations of a product, the most promising first.
fn wishes() -> Vec<LaunchConfig> {
    let mut wishes = Vec::new();
    for units in [true, false] {
        wishes.push(LaunchConfig {
            matrix_units: Some(units),
            ..LaunchConfig::default()
        });
    }
    for workgroup in [256, 128, 512, 64, 1024] {
        for lanes in [8, 16, 32] {
            for own in [true, false] {
                wishes.push(LaunchConfig {
                    lanes: Some(lanes),
                    workgroup: Some(workgroup),
                    rounds_itself: Some(own),
                    matrix_units: None,
                });
            }
        }
    }
    wishes
}

/// The samples, none of them alone unless all of its product are.
fn alone_everywhere(mut samples: Vec<Sample>) -> Vec<Sample> {
    let shared = samples.iter().filter(|sample| !sample.is_alone);
    let shared: HashSet<Product> = shared.map(Sample::product).collect();
    for sample in &mut samples {
        sample.is_alone = !shared.contains(&sample.product());
    }
    samples
}

/// The first matrices of each product, enough to exceed the caches: each once, and none without elements.
fn enough(samples: Vec<Sample>) -> Vec<Sample> {
    let mut enough: Vec<Sample> = Vec::new();
    for sample in samples {
        let product = sample.product();
        let same = enough.iter().filter(|s| s.product() == product);
        let known: Vec<&Linear> = same.map(|s| &s.weights).collect();
        let bytes: u64 = known.iter().map(|w| w.bytes()).sum();
        let is_enough = known.len() >= MATRICES && bytes >= BYTES;
        let is_empty = sample.weights.n() == 0 || sample.weights.k() == 0;
        if !is_enough && !is_empty && !known.contains(&&sample.weights) {
            enough.push(sample);
        }
    }
    enough
}

/// How far the results of two configurations may be apart, as squared error relative to the mean square: see
/// `docs/gpu.md`. 0 requires the same bits.
fn bound(sample: &Sample, normed: bool) -> f64 {
    let product = sample.product();
    match product.weights {
        // A norm is a sum of floats, and may change a code; wide rows have many, of which few change.
        _ if normed => 1e-5,
        WeightKind::Ternary if !matches!(sample.epilogue, Epilogue::Gate(_)) => 0.0,
        WeightKind::Blocks(_) if product.rows == RowClass::Many => 2e-6,
        _ => 1e-10,
    }
}

/// Whether `got` equals `want` within `bound`.
fn negotiate(got: &[f32], want: &[f32], bound: f64) -> bool {
    let pairs = || got.iter().zip(want);
    if bound == 0.0 {
        return pairs().all(|(got, want)| got.to_bits() == want.to_bits());
    }
    let error: f64 = pairs()
        .map(|(got, want)| (f64::from(*got) - f64::from(*want)).powi(2))
        .sum();
    let power: f64 = want.iter().map(|want| f64::from(*want).powi(2)).sum();
    error <= bound * power
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(us: &[f64]) -> Times {
        Times(us.to_vec())
    }

    #[test]
    fn a_configuration_wins_by_more_than_chance() {
        let rule = run(&[10.0, 10.1, 9.9, 10.0, 10.1]);
        assert!(run(&[9.0, 9.1, 9.0]).beats(&rule));
        // Too little to be worth it.
        let steady = run(&[10.0, 10.0, 10.0]);
        assert!(!run(&[9.99, 9.99, 9.99]).beats(&steady));
        assert!(!run(&[9.9, 9.9, 9.9]).beats(&rule));
        // As likely as not by chance.
        let noisy = run(&[7.0, 13.0, 10.0, 14.0, 6.0]);
        assert!(!run(&[9.0, 9.1, 9.0]).beats(&noisy));
        assert!(!run(&[12.0, 5.0, 9.0, 5.5, 13.0]).beats(&rule));
        assert!(!rule.beats(&rule));
    }

    #[test]
    fn what_is_no_number_agrees_with_nothing() {
        assert!(negotiate(&[1.0, -0.0], &[1.0, -0.0], 0.0));
        assert!(!negotiate(&[0.0], &[-0.0], 0.0));
        assert!(negotiate(&[1.0, 1.000_001], &[1.0, 1.0], 1e-10));
        assert!(!negotiate(&[1.0, 1.1], &[1.0, 1.0], 1e-10));
        assert!(!negotiate(&[f32::NAN], &[1.0], 1e-5));
        assert!(!negotiate(&[1.0], &[f32::NAN], 1e-5));
    }
}
