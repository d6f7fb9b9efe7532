//! `sterna perplexity`: how well a model predicts a text.

use std::num::NonZero;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna_engine::{Logits, Session};
use sterna_text::{Encode, Tokenizer};

use crate::args::ReportFlags;
use crate::model;
use crate::progress::Progress;
use crate::{output, verbs};
use sterna::native::Device;

const EXAMPLE: &str = "Example:
  sterna perplexity model.gguf --file story.txt
  sterna perplexity builtin --file story.txt --window 128 --json";

/// Measure how well a model predicts a text
///
/// The text is divided into windows that don't overlap. Each begins with the beginning-of-sequence token
/// where the model has one; the first token of a window is not scored.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Perplexity {
    /// Model to measure
    model: String,

    /// File that holds the text
    #[arg(long, value_name = "TEXT")]
    file: PathBuf,

    /// Tokens per window, including a beginning-of-sequence token
    #[arg(long, value_name = "N", default_value = "256")]
    window: NonZero<usize>,

    #[command(flatten)]
    flags: ReportFlags,
}

#[derive(Debug, Serialize)]
struct Report {
    /// Mean negative log-likelihood per scored token, in nats.
    nll: f64,
    perplexity: f64,
    /// Scored tokens.
    n_tokens: usize,
}

/// Rows of logits kept at once: 32 MiB for a vocabulary of 128 thousand.
const CHUNK: usize = 64;

impl Perplexity {
    pub(crate) fn run(self) -> Result<()> {
        let window = self.window.get();
        if window < 2 {
            bail!("--window: expected at least 2 tokens, of which one is scored, found {window}");
        }
        let files = model::open(&self.model)?;
        let tokenizer = files.require_tokenizer()?;
        let text = verbs::read_text(&self.file)?;
        let plan = model::plan(&files, &self.flags.files)?;
        let ctx_len = self.flags.engine.ctx_for(window).context("--window")?;
        let n_vocab = plan.config().n_vocab;
        let mut session = model::session(&files, plan, &self.flags.engine, ctx_len)?;

        let windows = windows(&tokenizer, files.text_start(&tokenizer)?, &text, window)?;
        let progress = Progress::items("scoring", windows.iter().map(|w| w.len() as u64).sum());
        let mut sum = 0.0;
        let mut n_tokens = 0;
        for (index, ids) in windows.iter().enumerate() {
            let place = || format!("{}: window {index}", self.file.display());
            verbs::check_ids(ids, n_vocab).with_context(place)?;
            session.truncate(0);
            sum += negative_log_likelihood(&mut session, ids, n_vocab).with_context(place)?;
            n_tokens += ids.len() - 1;
            progress.add(ids.len() as u64);
        }
        if n_tokens == 0 {
            bail!(
                "{}: expected a text of at least one token to score, found less",
                self.file.display()
            );
        }
        drop(progress);
        let nll = sum / n_tokens as f64;
        let report = Report {
            nll,
            perplexity: nll.exp(),
            n_tokens,
        };
        if self.flags.json {
            output::json(&report)
        } else {
            output::line(report.text())
        }
    }
}

impl Report {
    fn text(&self) -> String {
        output::table(&[
            ("perplexity", format!("{:.4}", self.perplexity)),
            ("nll", format!("{:.6} nats per token", self.nll)),
            ("tokens", self.n_tokens.to_string()),
        ])
    }
}

/// The ids of `text` in windows of at most `window`, each begun with `bos`.
fn windows(
    tokenizer: &Tokenizer,
    bos: Option<u32>,
    text: &str,
    window: usize,
) -> Result<Vec<Vec<u32>>> {
    let ids = tokenizer.encode(text, Encode::PLAIN)?;
    let room = window - usize::from(bos.is_some());
    Ok(ids
        .chunks(room)
        .map(|chunk| bos.into_iter().chain(chunk.iter().copied()).collect())
        .collect())
}

/// The sum over all tokens of `ids` but the first, in nats. `session` must be empty.
///
/// Fails at the first token whose contribution is not finite.
fn negative_log_likelihood(
    session: &mut Session<Device>,
    ids: &[u32],
    n_vocab: usize,
) -> Result<f64> {
    let mut sum = 0.0;
    // Logits after the last token are not needed.
    let inputs = &ids[..ids.len() - 1];
    let mut position = 0;
    for (chunk, targets) in inputs.chunks(CHUNK).zip(ids[1..].chunks(CHUNK)) {
        let logits = session.forward(chunk, Logits::All)?;
        for (row, &target) in logits.chunks_exact(n_vocab).zip(targets) {
            position += 1;
            let score = log_sum_exp(row) - f64::from(row[target as usize]);
            if !score.is_finite() {
                bail!(
                    "position {position}: expected a finite negative log-likelihood, found {score}"
                );
            }
            sum += score;
        }
    }
    Ok(sum)
}

fn log_sum_exp(row: &[f32]) -> f64 {
    let max = f64::from(row.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + row
        .iter()
        .map(|&logit| (f64::from(logit) - max).exp())
        .sum::<f64>()
        .ln()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_sum_exp_does_not_overflow() {
        assert!((log_sum_exp(&[1000.0, 1000.0]) - (1000.0 + 2f64.ln())).abs() < 1e-9);
        assert!((log_sum_exp(&[0.0, f32::NEG_INFINITY]) - 0.0).abs() < 1e-12);
    }
}
