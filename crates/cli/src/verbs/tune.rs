//! `sterna tune`: the fastest launch configurations on this GPU.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna_engine::{Logits, Sampler, SamplerConfig, Session};
use sterna_gpu::tuning::{Effort, LaunchConfig, Measured, Product, Tuner};

use crate::args::{EngineFlags, ReportFlags};
use crate::device;
use crate::model;
use crate::progress::Progress;
use crate::tuning::{self, Key};
use sterna::native::BUILTIN;
use sterna::native::{self, Device};

use crate::output;

const EXAMPLE: &str = "Example:
  sterna tune model.gguf
  sterna tune model.gguf --gpu nvidia --rounds 31 --limit 300
  sterna tune builtin --dry-run --json
  sterna tune --reset";

/// Measure which kernels and workgroup sizes are fastest on this GPU, and keep the result
///
/// The products of the model's own matrices are computed with every configuration that the device supports,
/// alternating and in the order of the model's step, for one row of activations, for four, and for a prompt
/// where there is a choice. A configuration is considered only if it gives the same results as the default,
/// and kept only if it is significantly faster. Every later run on the same GPU, driver and kernels uses the
/// result, for all models with matrices of these shapes.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Tune {
    /// Model whose products are measured
    #[arg(default_value = BUILTIN)]
    model: String,

    /// How often to time the best configurations of each product
    #[arg(long, value_name = "N", default_value = "15")]
    rounds: NonZero<usize>,

    /// Approximate time limit in seconds; products there is no time for are unchanged
    #[arg(long, value_name = "SECONDS", default_value = "60")]
    limit: NonZero<u64>,

    /// Measure, and keep nothing
    #[arg(long)]
    dry_run: bool,

    /// Remove what was measured on this GPU, and measure nothing
    #[arg(long, conflicts_with_all = ["dry_run", "rounds", "limit"])]
    reset: bool,

    #[command(flatten)]
    flags: ReportFlags,
}

/// Rows of activations of the steps whose products are measured: a token; a few; and a prompt, where
/// cooperative matrices may be faster than other kernels, or slower.
const TOKEN: usize = 1;
const FEW: usize = 4;
const PROMPT: usize = 512;

impl Tune {
    pub(crate) fn run(self) -> Result<()> {
        let engine = self.flags.engine.clone().on_gpu()?;
        if self.reset {
            return reset(&engine, self.flags.json);
        }
        let files = model::open(&self.model)?;
        let plan = model::plan(&files, &self.flags.files)?;
        let n_vocab = plan.config().n_vocab;
        let prompt = plan.config().max_ctx.min(PROMPT);
        let mut session = model::session(&files, plan, &engine, prompt)?;
        let model = session.model().clone();
        let gpu = model.backend().device();
        let gpu = gpu.context("--gpu-layers 0: expected layers on a GPU")?;
        let device = gpu.device();
        let key = Key::new(device.info(), device.features());
        if !self.dry_run {
            // Before the work, not after it.
            tuning::check(&key)?;
        }
        if device.has_matrix_units() && prompt > FEW {
            step(&mut session, prompt, n_vocab)?;
        }
        // From the beginning: a growing cache splits a step in pieces.
        session.truncate(0);
        step(&mut session, FEW, n_vocab)?;
        session.truncate(0);
        // Decoding on the device has fewer products than a separate step.
        let greedy = Sampler::new(SamplerConfig::default(), n_vocab)?;
        session.decode(&[0], greedy.sampling(), TOKEN)?;
        let products = gpu.products();
        if products.is_empty() {
            bail!("expected layers on the GPU, found room for none there: see --gpu-memory");
        }
        let tuner = Tuner::new(device, products)?;
        let (found, n_left) = self.measure(&tuner)?;
        for found in found.iter().filter(|found| !found.wrong.is_empty()) {
            output::warning(format_args!(
                "{}: {} of its configurations give wrong results and are excluded; see \
                 `sterna diagnose`",
                name(&found.product),
                found.wrong.len()
            ));
        }
        let file = match self.dry_run || found.is_empty() {
            true => None,
            false => Some(tuning::save(&key, &found)?),
        };
        let name = native::adapter_name(gpu.device().info());
        if self.flags.json {
            return output::json(&Report {
                gpu: &name,
                products: found.iter().map(Row::new).collect(),
                n_left,
                file: file.as_deref(),
            });
        }
        output::line(text(&name, &found, n_left, file.as_ref()))
    }

    /// The results for each product, and for how many there was no time.
    fn measure(&self, tuner: &Tuner) -> Result<(Vec<Measured>, usize)> {
        let products = tuner.products();
        let end = Instant::now() + Duration::from_secs(self.limit.get());
        let progress = Progress::items("measuring", products.len() as u64);
        let mut found = Vec::with_capacity(products.len());
        for (i, product) in products.iter().enumerate() {
            let left = end.saturating_duration_since(Instant::now());
            let effort = Effort {
                rounds: self.rounds.get(),
                // Time that one doesn't use is available to those after it.
                limit: left / (products.len() - i) as u32,
            };
            found.extend(tuner.measure(product, effort)?);
            progress.add(1);
        }
        let n_left = products.len() - found.len();
        Ok((tuner.confirm(found, self.rounds.get())?, n_left))
    }
}

/// Computes a step of `n_rows`, whose products are then known. The tokens are arbitrary.
fn step(session: &mut Session<Device>, n_rows: usize, n_vocab: usize) -> Result<()> {
    let ids: Vec<u32> = (0..n_rows).map(|i| (i % n_vocab) as u32).collect();
    session.forward(&ids, Logits::Last)?;
    Ok(())
}

/// Removes the measurements of the GPU.
fn reset(engine: &EngineFlags, json: bool) -> Result<()> {
    let offer = device::adapter(engine.device())?;
    let removed = tuning::remove(&Key::new(&offer.info, offer.features))?;
    if json {
        return output::json(&Removed {
            gpu: &offer.info.name,
            removed: &removed,
        });
    }
    if removed.is_empty() {
        output::line(format_args!("{}: nothing was kept", offer.info.name))?;
    }
    for path in removed {
        output::line(format_args!("removed {}", path.display()))?;
    }
    Ok(())
}

/// Describes a product.
fn name(product: &Product) -> String {
    let Product {
        weights,
        n,
        k,
        rows,
    } = product;
    format!("{} {n}x{k}, {} rows", weights.name(), rows.name())
}

/// Describes a configuration.
fn way(way: &LaunchConfig) -> String {
    let mut words = Vec::new();
    if let (Some(lanes), Some(workgroup)) = (way.lanes, way.workgroup) {
        words.push(format!("{lanes} x {workgroup}"));
    }
    words.extend(way.rounds_itself.map(|own| match own {
        true => "fused quantization".to_owned(),
        false => "separate quantization".to_owned(),
    }));
    words.extend(way.matrix_units.map(|units| match units {
        true => "cooperative matrices".to_owned(),
        false => "tiles".to_owned(),
    }));
    match words.is_empty() {
        true => "the only one".to_owned(),
        false => words.join(", "),
    }
}

fn text(gpu: &str, found: &[Measured], n_left: usize, file: Option<&PathBuf>) -> String {
    let header = [
        "weights",
        "shape",
        "rows",
        "default",
        "µs per step",
        "best",
        "µs per step",
        "gain",
    ];
    let rows: Vec<[String; 8]> = found
        .iter()
        .map(|found| {
            let Product {
                weights,
                n,
                k,
                rows,
            } = found.product;
            let gain = 1.0 - found.best_us / found.rule_us;
            let [best, us, gain] = match found.best == found.rule {
                true => ["the same".to_owned(), String::new(), String::new()],
                false => [
                    way(&found.best),
                    format!("{:.1}", found.best_us),
                    format!("{:.1} %", gain * 100.0),
                ],
            };
            let rule = way(&found.rule);
            let rule_us = format!("{:.1}", found.rule_us);
            let shape = format!("{n}x{k}");
            let rows = rows.name().to_owned();
            let weights = weights.name().to_owned();
            [weights, shape, rows, rule, rule_us, best, us, gain]
        })
        .collect();
    let mut text = output::table(&[("measured", gpu.to_owned())]);
    text += "\n\n";
    text += &output::columns(&header.map(str::to_owned), &rows);
    if n_left > 0 {
        text += &format!("\nNo time for {n_left} more; see --limit.");
    }
    text += &match file {
        Some(path) => format!("\nKept in {}", path.display()),
        None => "\nNothing was kept.".to_owned(),
    };
    text
}

#[derive(Serialize)]
struct Report<'a> {
    gpu: &'a str,
    products: Vec<Row>,
    /// Products there was no time for.
    n_left: usize,
    /// Where the result is kept; `None` if it isn't.
    file: Option<&'a Path>,
}

#[derive(Serialize)]
struct Removed<'a> {
    gpu: &'a str,
    removed: &'a [PathBuf],
}

#[derive(Serialize)]
struct Row {
    weights: &'static str,
    n: usize,
    k: usize,
    rows: &'static str,
    n_matrices: usize,
    n_ways: usize,
    n_wrong: usize,
    rule: WayRow,
    rule_us: f64,
    best: WayRow,
    best_us: f64,
}

#[derive(Serialize)]
struct WayRow {
    lanes: Option<u32>,
    workgroup: Option<u32>,
    rounds_itself: Option<bool>,
    matrix_units: Option<bool>,
}

impl Row {
    fn new(found: &Measured) -> Row {
        let way = |way: &LaunchConfig| WayRow {
            lanes: way.lanes,
            workgroup: way.workgroup,
            rounds_itself: way.rounds_itself,
            matrix_units: way.matrix_units,
        };
        Row {
            weights: found.product.weights.name(),
            n: found.product.n,
            k: found.product.k,
            rows: found.product.rows.name(),
            n_matrices: found.n_matrices,
            n_ways: found.n_configs,
            n_wrong: found.wrong.len(),
            rule: way(&found.rule),
            rule_us: found.rule_us,
            best: way(&found.best),
            best_us: found.best_us,
        }
    }
}
