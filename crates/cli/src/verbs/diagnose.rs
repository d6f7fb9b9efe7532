//! `sterna diagnose`: where a GPU and the CPU diverge.

use std::fmt;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna_engine::compare::{Compare, Comparison, Measured};
use sterna_engine::{Cpu, Gpu, Logits};
use sterna_text::Encode;

use crate::args::ReportFlags;
use sterna::native::LocalModel;

use crate::model;
use crate::output;
use crate::progress::Progress;
use crate::verbs::{self, logits::parse_ids};
use sterna::native;

const EXAMPLE: &str = "Example:
  sterna diagnose model.gguf
  sterna diagnose model.gguf --prompt 'Once upon a time' --tokens 16 --verbose
  sterna diagnose builtin --cache f16 --json";

/// Compare the GPU with the CPU, stage by stage, and name the first place where they diverge
///
/// A prompt is computed at once, and some tokens after it one by one: three times on both. First, each
/// operation on the GPU begins with the CPU's values, which shows a kernel that is wrong. Then each layer
/// does, its operations fused as usual. Last, the GPU continues with its own values, which shows how errors
/// accumulate, and whether the same tokens would be chosen. The exit status is 0 only if all are as close as
/// expected.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Diagnose {
    /// Model to run
    model: String,

    /// Text to compute [default: some sentences]
    #[arg(long, value_name = "TEXT", conflicts_with = "ids")]
    prompt: Option<String>,

    /// Token ids to compute, separated by commas
    #[arg(long, value_name = "IDS")]
    ids: Option<String>,

    /// Number of tokens to compute one by one after the prompt: the CPU's greedy choices
    #[arg(long, value_name = "N", default_value_t = 4)]
    tokens: usize,

    /// Print every stage, not only the worst of each kind
    #[arg(long)]
    verbose: bool,

    #[command(flatten)]
    flags: ReportFlags,
}

/// The default prompt: enough rows to fill tiles and leave a remainder.
const PROMPT: &str = "The Arctic tern flies from the far north to the far south and back again every year, \
    farther than any other animal. It weighs no more than a hundred grams. On the way it crosses three \
    oceans, sleeps in the air, and finds the same cliff that it left. What 7 plus 8 is, it does not know; \
    where the summer is, it does.";

/// Maximum tokens of a prompt: they are computed at once, and the logits of all are kept.
const MAX_PROMPT: usize = 256;

/// A comparison of one stage, of one forward pass.
#[derive(Debug)]
struct Found {
    /// 0 for the prompt, then the tokens after it.
    step: usize,
    measured: Measured,
}

/// The results in all three modes.
#[derive(Debug)]
struct Findings {
    operations: Vec<Found>,
    layers: Vec<Found>,
    drift: Vec<Found>,
}

impl Diagnose {
    pub(crate) fn run(self) -> Result<()> {
        let files = model::open(&self.model)?;
        let plan = model::plan(&files, &self.flags.files)?;
        let prompt = self.prompt_ids(&files)?;
        verbs::check_ids(&prompt, plan.config().n_vocab)?;
        if prompt.len() > MAX_PROMPT {
            bail!(
                "expected a prompt of at most {MAX_PROMPT} tokens, found {}",
                prompt.len()
            );
        }
        let engine = &self.flags.engine.clone().for_model(&files);
        let ctx_len = engine.ctx_for(prompt.len().saturating_add(self.tokens))?;
        let (cpu, gpu) = engine.both_devices(&plan, &engine.device().hints(files.hints()))?;
        let name = native::adapter_name(gpu.device().info());
        let model = model::load_on(&files, plan, Compare::new(cpu, gpu), engine)?;
        let model = model::adapt(model, &files, engine.lora())?;
        let progress = Progress::items("comparing", 3 * (self.tokens as u64 + 1));
        let compare = |comparison| {
            let options = engine.session(ctx_len);
            let mut session = model.session(options)?;
            compare(
                model.model(),
                &mut session,
                comparison,
                &prompt,
                self.tokens,
                &progress,
            )
        };
        let findings = Findings {
            operations: compare(Comparison::Operations)?,
            layers: compare(Comparison::Layers)?,
            drift: compare(Comparison::Drift)?,
        };
        drop(progress);
        let first = findings.first();
        let verdict = match &first {
            None => findings.agreement(),
            Some((found, how)) => format!("first diverges at {found}{how}"),
        };
        if self.flags.json {
            output::json(&Report {
                gpu: &name,
                n_prompt: prompt.len(),
                n_tokens: self.tokens,
                agrees: first.is_none(),
                verdict: &verdict,
                operations: rows(&findings.operations),
                layers: rows(&findings.layers),
                drift: rows(&findings.drift),
            })?;
        } else {
            let compared = format!(
                "{name} with the CPU, {} tokens at once and {} one by one",
                prompt.len(),
                self.tokens
            );
            let head = output::table(&[("compared", compared)]);
            output::line(format_args!("{head}\n\n{}", findings.text(self.verbose)))?;
        }
        if first.is_some() {
            bail!("{}: {verdict}", self.model);
        }
        if !self.flags.json {
            output::line(verdict)?;
        }
        Ok(())
    }

    fn prompt_ids(&self, files: &LocalModel) -> Result<Vec<u32>> {
        if let Some(ids) = &self.ids {
            return parse_ids(ids).context("--ids");
        }
        let tokenizer = files
            .require_tokenizer()
            .context("expected --ids for a model without a tokenizer")?;
        let options = Encode {
            add_special: true,
            parse_special: true,
        };
        let mut ids = tokenizer.encode(self.prompt.as_deref().unwrap_or(PROMPT), options)?;
        if ids.is_empty() {
            bail!("--prompt: expected at least one token, found none");
        }
        if self.prompt.is_none() {
            ids.truncate(MAX_PROMPT);
        }
        Ok(ids)
    }
}

/// The model on both devices.
type Model = sterna_engine::Model<Compare<Cpu, Gpu>>;
type Session = sterna_engine::Session<Compare<Cpu, Gpu>>;

/// Computes `prompt` and `n_tokens` after it, in a new session.
fn compare(
    model: &Arc<Model>,
    session: &mut Session,
    comparison: Comparison,
    prompt: &[u32],
    n_tokens: usize,
    progress: &Progress,
) -> Result<Vec<Found>> {
    let mut found = Vec::new();
    let mut ids = prompt.to_vec();
    model.backend().begin(comparison);
    for step in 0..=n_tokens {
        let logits = session.forward(&ids, Logits::All)?;
        let measured = model.backend().take().into_iter();
        found.extend(measured.map(|measured| Found { step, measured }));
        let last = &logits[logits.len() - model.config().n_vocab..];
        ids = vec![largest(last)];
        progress.add(1);
    }
    Ok(found)
}

/// The id of the largest of `logits`; the first if there are several.
fn largest(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, logit) in logits.iter().enumerate() {
        if *logit > logits[best] {
            best = id;
        }
    }
    best as u32
}

impl Found {
    /// The name of the forward pass.
    fn step(&self) -> String {
        match self.step {
            0 => "prompt".to_owned(),
            step => format!("token {step}"),
        }
    }
}

impl fmt::Display for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Found { step, measured } = self;
        write!(f, "{}", measured.stage)?;
        if *step > 0 {
            write!(f, " (token {step} after the prompt)")?;
        }
        if measured.n_lost > 0 {
            write!(
                f,
                ": {} of {} values are not finite",
                measured.n_lost,
                measured.n_rows * measured.width
            )?;
        } else {
            write!(
                f,
                ": relative error {:.1e}, expected at most {:.0e}",
                measured.relative_error, measured.bound
            )?;
        }
        match &measured.largest {
            Some(at) => write!(
                f,
                " (row {}, element {}: gpu {}, cpu {})",
                at.row, at.column, at.tested, at.reference
            ),
            None => Ok(()),
        }
    }
}

impl Findings {
    /// The first outside its bound, and its stage.
    fn first(&self) -> Option<(&Found, &'static str)> {
        let first = |found: &[Found]| found.iter().position(|f| !f.measured.is_within());
        [
            (&self.operations, ""),
            (&self.layers, ", where operations are fused"),
            (&self.drift, ", where errors accumulate"),
        ]
        .into_iter()
        .find_map(|(found, how)| Some((&found[first(found)?], how)))
    }

    /// The error of the logits where errors accumulate.
    fn logits(&self) -> impl Iterator<Item = &Measured> {
        let all = self.drift.iter().map(|found| &found.measured);
        all.filter(|measured| measured.stage.layer.is_none())
    }

    /// Describes how well the two agree.
    fn agreement(&self) -> String {
        let n_rows: usize = self.logits().map(|m| m.n_rows).sum();
        let n_same: usize = self.logits().map(|m| m.agreement.n_same).sum();
        let margin = self
            .logits()
            .map(|m| m.agreement.margin)
            .fold(0.0, f32::max);
        let mut text = format!("agrees: {n_same} of {n_rows} greedy tokens are the same");
        if n_same < n_rows {
            text += &format!(", the others at most {margin:.2} apart");
        }
        text
    }

    fn text(&self, verbose: bool) -> String {
        let of = |found: &[Found], by_layer| {
            if verbose {
                found.iter().map(Line::every).collect()
            } else {
                worst(found, by_layer)
            }
        };
        let mut parts = Vec::new();
        for (title, lines) in [
            (
                "each operation, from the CPU's values",
                of(&self.operations, false),
            ),
            ("each layer, from the CPU's values", of(&self.layers, false)),
            (
                "each layer, from the GPU's own values",
                of(&self.drift, true),
            ),
        ] {
            let rows: Vec<[String; 5]> = lines.into_iter().map(|line| line.0).collect();
            let header = [title, "", "error", "at most", "largest difference"].map(str::to_owned);
            parts.push(output::columns(&header, &rows));
        }
        parts.join("\n")
    }
}

/// A line of a table.
struct Line([String; 5]);

impl Line {
    fn every(found: &Found) -> Line {
        Line::new(
            &found.measured,
            found.measured.stage.to_string(),
            found.step(),
        )
    }

    fn new(measured: &Measured, stage: String, place: String) -> Line {
        let bound = match measured.bound.is_finite() {
            true => format!("{:.0e}", measured.bound),
            false => String::new(),
        };
        let error = match measured.n_lost {
            0 if measured.relative_error == 0.0 => "0".to_owned(),
            0 => format!("{:.1e}", measured.relative_error),
            n => format!("{n} lost"),
        };
        let mark = if measured.is_within() { "" } else { "  PARTS" };
        let largest = match &measured.largest {
            None => "none".to_owned(),
            Some(at) => format!(
                "gpu {}, cpu {} (row {}, element {})",
                at.tested, at.reference, at.row, at.column
            ),
        };
        Line([format!("  {stage}"), place, error, bound, largest + mark])
    }
}

/// The worst of each kind, relative to its bound; in the order in which kinds first occur.
fn worst(found: &[Found], by_layer: bool) -> Vec<Line> {
    let share = |m: &Measured| match m.n_lost {
        0 if m.bound.is_finite() => m.relative_error / m.bound,
        0 => m.relative_error,
        _ => f64::INFINITY,
    };
    let kind = |m: &Measured| (by_layer.then_some(m.stage.layer), m.stage.operation);
    let mut kinds: Vec<&Found> = Vec::new();
    for found in found {
        match kinds
            .iter_mut()
            .find(|k| kind(&k.measured) == kind(&found.measured))
        {
            Some(known) if share(&found.measured) > share(&known.measured) => *known = found,
            Some(_) => {}
            None => kinds.push(found),
        }
    }
    let line = |found: &&Found| {
        let (measured, step) = (&found.measured, found.step());
        let (stage, place) = match measured.stage.layer {
            Some(layer) if !by_layer => (
                measured.stage.operation.to_string(),
                format!("layer {layer}, {step}"),
            ),
            _ => (measured.stage.to_string(), step),
        };
        Line::new(measured, stage, place)
    };
    kinds.iter().map(line).collect()
}

#[derive(Serialize)]
struct Report<'a> {
    gpu: &'a str,
    /// Tokens computed at once.
    n_prompt: usize,
    /// Tokens computed one by one.
    n_tokens: usize,
    agrees: bool,
    verdict: &'a str,
    operations: Vec<Row>,
    layers: Vec<Row>,
    drift: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    /// 0 for the prompt, then the tokens after it.
    step: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    layer: Option<usize>,
    stage: String,
    shape: [usize; 2],
    relative_error: f64,
    /// `null` if there is no bound.
    bound: f64,
    within: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    largest: Option<At>,
    /// Values that are not finite on the CPU.
    n_not_finite: usize,
    /// Values that are not finite only on the GPU.
    n_lost: usize,
    /// Rows with the same argmax; of logits.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_same_top: Option<usize>,
}

#[derive(Serialize)]
struct At {
    row: usize,
    column: usize,
    gpu: f32,
    cpu: f32,
}

fn rows(found: &[Found]) -> Vec<Row> {
    found.iter().map(Row::new).collect()
}

impl Row {
    fn new(found: &Found) -> Row {
        let Found { step, measured: m } = found;
        let is_logits = m.stage.operation.is_logits();
        Row {
            step: *step,
            layer: m.stage.layer,
            stage: m.stage.operation.to_string(),
            shape: [m.n_rows, m.width],
            relative_error: m.relative_error,
            bound: m.bound,
            within: m.is_within(),
            largest: m.largest.map(|at| At {
                row: at.row,
                column: at.column,
                gpu: at.tested,
                cpu: at.reference,
            }),
            n_not_finite: m.n_not_finite,
            n_lost: m.n_lost,
            n_same_top: is_logits.then_some(m.agreement.n_same),
        }
    }
}
