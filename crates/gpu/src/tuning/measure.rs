//! Which way is fastest, found on the device itself.
//!
//! Products are run as a model's step has them, one behind the other and each with its own matrix, so that
//! caches hold of a matrix what they hold of it in earnest. Only the products in question go other ways, and
//! the whole step is timed: what counts is when it is done, and looking at the clock within it would change
//! that. A way whose results are not those of the rules is not measured.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::kernels::Rows;
use crate::kernels::linear::{Epilogue, Form, Input, Linear, multiply, settled};
use crate::kernels::quantize::{QuantizedRows, Scaling, quantize};
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
    /// Whether a norm is computed as the activations are rounded.
    pub is_normed: bool,
    /// What becomes of the result.
    pub epilogue: Epilogue,
}

impl Sample {
    /// What tuning calls it.
    pub fn product(&self) -> Product {
        self.weights.product(self.n_rows)
    }
}

/// How much to do for a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// Times that the best ways are run, in turns.
    pub rounds: usize,
    /// When to make do with what is known.
    pub limit: Duration,
}

/// What was found of a product.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The product.
    pub product: Product,
    /// Different matrices that were multiplied in turn.
    pub n_matrices: usize,
    /// The way by the rules, every choice made.
    pub rule: LaunchConfig,
    /// Microseconds that all products of the step take together, this one by the rules: the median of all
    /// rounds.
    pub rule_us: f64,
    /// The fastest way, every choice made; that of the rules unless another is better by more than chance.
    pub best: LaunchConfig,
    /// The same where this product goes the fastest way.
    pub best_us: f64,
    /// Ways that gave the right result and were timed, that of the rules among them.
    pub n_ways: usize,
    /// Ways that gave other results, and so don't count: there should be none.
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
    /// Activations rounded before, for each form and width.
    rounded: HashMap<(Scaling, usize), QuantizedRows>,
    /// Room to round one row.
    scratch: QuantizedRows,
}

/// Of each product, so many matrices are run in turn, and more until they have this many bytes together.
const MATRICES: usize = 4;
const BYTES: u64 = 256 << 20;

/// Rounds in which all ways take part, and how many of the fastest take part in the others.
const HEATS: usize = 3;
const FINALISTS: usize = 3;

/// A way that at first makes the step so many times as long is not timed again.
const HOPELESS: f64 = 1.2;

/// The least share of the step that another way has to save.
const MIN_GAIN: f64 = 0.002;

/// Elements of a result that are compared at most, of its first rows.
const CHECKED: usize = 1 << 20;

/// What devices that save power when they do nothing take to come to their full speed, amply.
const WARM_UP: Duration = Duration::from_millis(100);

/// Submissions in a row, where the clock of the host is all there is.
const AT_ONCE: usize = 6;

impl Tuner {
    /// For the products of `samples`, in the order in which a step has them.
    ///
    /// Errors: [`GpuError::OutOfMemory`] if there is no room for their activations.
    pub fn new(device: &Device, samples: Vec<Sample>) -> Result<Tuner, GpuError> {
        let samples = enough(samples);
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
            if let Form::Int8(scaling) = sample.weights.kind().form()
                && !tuner.rounded.contains_key(&(scaling, k))
            {
                let rounded = QuantizedRows::new(device, n_rows, k)?;
                let x = Rows::new(&tuner.x, n_rows, k);
                quantize(&mut recorder, x, None, scaling, &rounded)?;
                tuner.rounded.insert((scaling, k), rounded);
            }
        }
        device.submit(&[&recorder.finish()?], &[])?.wait()?;
        tuner.samples = samples;
        Ok(tuner)
    }

    /// The products there are, in the order in which the step has them.
    pub fn products(&self) -> &[Product] {
        &self.products
    }

    /// Measures the ways of `product`, one of [`Tuner::products`].
    ///
    /// `None` if there was no time to compare any two.
    ///
    /// Errors: [`GpuError::Unsupported`] if no matrix is multiplied like this; what running products returns.
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
            n_ways,
            wrong,
            is_all,
        } = self.check(first, Instant::now() + effort.limit / 2)?;
        let is_only = runs.len() == 1;
        if self.race(&mut runs, HEATS, Some(deadline))? && !is_only {
            runs[1..].sort_by(|a, b| a.times.median().total_cmp(&b.times.median()));
            runs.truncate(1 + FINALISTS);
            // Who was lucky in the heats is not to win by that.
            runs.iter_mut().for_each(|run| run.times.0.clear());
            self.race(&mut runs, effort.rounds.max(HEATS), Some(deadline))?;
        }
        let is_known = |run: &&Run| run.times.0.len() >= HEATS;
        let (rule, others) = runs.split_first().expect("the way of the rules is one");
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
            rule: rule.way,
            rule_us: rule.times.median(),
            best: best.way,
            best_us: best.times.median(),
            n_ways,
            wrong,
        }))
    }

    /// What was `found`, with the ways that make steps faster together as well: where they don't, the rules
    /// are left to decide.
    ///
    /// Errors: what running products returns.
    pub fn confirm(
        &self,
        mut found: Vec<Measured>,
        rounds: usize,
    ) -> Result<Vec<Measured>, GpuError> {
        for rows in [RowClass::One, RowClass::Few, RowClass::Many] {
            let is_meant = |m: &Measured| m.product.rows == rows && m.best != m.rule;
            let ways = found.iter().filter(|m| is_meant(m));
            let tuning = Tuning::default().with(ways.map(|m| (m.product, m.best)));
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

    /// Runs all in turns, so many times; false if that took too long, and was ended.
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
                // To and fro, that a drift of the clock favours none.
                let run = &mut runs[if round % 2 == 0 { i } else { n - 1 - i }];
                run.times.0.push(self.time(&run.chain)?);
                if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Whether the ways that the device has for the product of `sample` give the same result, as far as there
    /// is time.
    fn check(&self, sample: &Sample, deadline: Instant) -> Result<Checked, GpuError> {
        let settle = |way| settled(&self.device, way, &sample.weights, sample.n_rows);
        let rule = settle(LaunchConfig::default());
        let norms: &[bool] = match sample.is_normed && sample.n_rows == 1 {
            true => &[false, true],
            false => &[false],
        };
        let results = |way| -> Result<Vec<Vec<f32>>, GpuError> {
            let of_norm = |&normed: &bool| self.result(sample, way, normed);
            norms.iter().map(of_norm).collect()
        };
        let want = results(rule)?;
        let mut checked = Checked {
            runs: vec![self.first_run(sample, rule)?],
            n_ways: 1,
            wrong: Vec::new(),
            is_all: true,
        };
        let mut known = vec![rule];
        for way in wishes().into_iter().map(settle) {
            if known.contains(&way) {
                continue;
            }
            if Instant::now() > deadline {
                checked.is_all = false;
                break;
            }
            known.push(way);
            let got = results(way)?;
            let mut pairs = got.iter().zip(&want).zip(norms);
            if !pairs.all(|((got, want), normed)| negotiate(got, want, bound(sample, *normed))) {
                checked.wrong.push(way);
                continue;
            }
            checked.n_ways += 1;
            let run = self.first_run(sample, way)?;
            if run.times.median() < HOPELESS * checked.runs[0].times.median() {
                checked.runs.push(run);
            }
        }
        // Those were for a first impression.
        checked.runs.iter_mut().for_each(|run| run.times.0.clear());
        Ok(checked)
    }

    /// `way`, timed once, after one time that warms up.
    fn first_run(&self, sample: &Sample, way: LaunchConfig) -> Result<Run, GpuError> {
        let product = sample.product();
        let tuning = Tuning::default().with([(product, way)]);
        let mut run = self.warm_run(product.rows, way, &tuning)?;
        run.times.0.push(self.time(&run.chain)?);
        Ok(run)
    }

    /// A step with products that go the ways of `tuning`, run once to warm up.
    fn warm_run(
        &self,
        rows: RowClass,
        way: LaunchConfig,
        tuning: &Tuning,
    ) -> Result<Run, GpuError> {
        let chain = self.chain(rows, tuning)?;
        self.time(&chain)?;
        Ok(Run {
            way,
            chain,
            times: Times::default(),
        })
    }

    /// The first rows of what a product comes to.
    fn result(
        &self,
        sample: &Sample,
        way: LaunchConfig,
        normed: bool,
    ) -> Result<Vec<f32>, GpuError> {
        let sample = Sample {
            is_normed: normed,
            ..sample.clone()
        };
        let width = sample.epilogue.width(sample.weights.n());
        let len = (sample.n_rows * width).min(CHECKED);
        // Some products are added to what is there.
        self.device.write(&self.out, 0, &vec![0; len * 4])?;
        let mut recorder = Recorder::new(&self.device);
        self.record(&mut recorder, &sample, way)?;
        let commands = recorder.finish()?;
        self.device.submit(&[&commands], &[])?.wait()?;
        self.device.read(&self.out, 0..len)
    }

    /// Records the product of `sample`, rounding included where a single row is rounded.
    fn record(
        &self,
        recorder: &mut Recorder,
        sample: &Sample,
        way: LaunchConfig,
    ) -> Result<(), GpuError> {
        let Sample {
            weights: w, n_rows, ..
        } = sample;
        recorder.set_tuning(Tuning::all(way));
        let x = Rows::new(&self.x, *n_rows, w.k());
        let input = match w.kind().form() {
            Form::Float => Input::Float(x),
            Form::Int8(_) if *n_rows == 1 => Input::Round {
                x,
                norm: sample.is_normed.then_some((&self.norm, 1e-5)),
                scratch: &self.scratch,
            },
            Form::Int8(scaling) => Input::Int8(&self.rounded[&(scaling, w.k())]),
        };
        let out = Rows::new(&self.out, *n_rows, sample.epilogue.width(w.n()));
        multiply(recorder, w, input, sample.epilogue, out)
    }

    /// A step with as many rows, in which products go the ways of `tuning`.
    fn chain(&self, rows: RowClass, tuning: &Tuning) -> Result<Commands, GpuError> {
        let mut recorder = Recorder::new(&self.device);
        for sample in &self.samples {
            if RowClass::of(sample.n_rows) == rows {
                let way = tuning.way(&sample.product());
                self.record(&mut recorder, sample, way)?;
            }
        }
        recorder.finish()
    }

    /// Microseconds that a step takes.
    fn time(&self, chain: &Commands) -> Result<f64, GpuError> {
        if self.device.features().timestamps {
            // Behind another, so that the device doesn't come from doing nothing.
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

/// Ways that may be timed, none of them timed yet.
#[derive(Debug)]
struct Checked {
    /// The way of the rules, and those that give the same result and don't take much longer.
    runs: Vec<Run>,
    /// Those that give the same result.
    n_ways: usize,
    /// Those that give another.
    wrong: Vec<LaunchConfig>,
    /// Whether there was time for all ways.
    is_all: bool,
}

/// A way, and how long it took each time.
#[derive(Debug)]
struct Run {
    way: LaunchConfig,
    chain: Commands,
    times: Times,
}

/// Microseconds that something took, time after time.
#[derive(Debug, Default)]
struct Times(Vec<f64>);

impl Times {
    fn median(&self) -> f64 {
        median(self.0.clone())
    }

    /// The median of how far times are from their median.
    fn spread(&self) -> f64 {
        let middle = self.median();
        median(self.0.iter().map(|us| (us - middle).abs()).collect())
    }

    /// Whether it is faster than `rule` by more than chance, and by enough to be worth it.
    fn beats(&self, rule: &Times) -> bool {
        let gain = rule.median() - self.median();
        gain > (rule.median() * MIN_GAIN).max(self.spread() + rule.spread())
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// What might be tried of a product, the likeliest first.
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

/// The first matrices of each product, so many that caches don't hold them: each once, and none without
/// elements.
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

/// How far two ways may be apart, as squared error relative to the mean square: see `docs/gpu.md`. 0 asks for
/// the same bits.
fn bound(sample: &Sample, normed: bool) -> f64 {
    let product = sample.product();
    match product.weights {
        // A norm is a sum of floats, and may move a code; wide rows have many, of which few are moved.
        _ if normed => 1e-5,
        WeightKind::Ternary if !matches!(sample.epilogue, Epilogue::Gate(_)) => 0.0,
        WeightKind::Blocks(_) if product.rows == RowClass::Many => 2e-6,
        _ => 1e-10,
    }
}

/// Whether `got` is `want`, as closely as `bound` says.
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
    fn a_way_wins_by_more_than_chance() {
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
