//! `sterna check`: receipts of answers, computed again.

use std::fs::File;
use std::io::Read;
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna::receipt::{Checked, MAX_RECEIPT_BYTES, Receipt};
use sterna_delivery::sign::{SignatureError, Verdict};

use crate::args::{EngineFlags, LoraFlag, ModelFlags, thread_count};
use crate::{model, output, trust};

const EXAMPLE: &str = "Example:
  sterna run -p 'Tell me a story about a fox named Ruby.' --receipt tale.json
  sterna check tale.json";

/// Check a receipt: whether its answer is what the model answers
///
/// The answer is computed again on the CPU, with the settings of the receipt: on every processor it has the same
/// bits. The first token that differs is named, and the exit code is 1. Of an answer that a GPU gave, each token
/// has to be the best one within the margin that is stated for GPUs. A signature has to fit what it signs.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Check {
    /// File of the receipt
    receipt: PathBuf,

    /// The model [default: what the receipt calls it]
    model: Option<String>,

    /// Threads to compute with [default: one for each physical core available]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    threads: Option<NonZero<usize>>,

    /// LoRA adapter of the answer: a PEFT folder, a package, its URL, or its name in the store; =SCALE is its
    /// strength [SCALE: 1]; several in the order of the receipt
    #[arg(long, value_name = "DIR[=SCALE]")]
    lora: Vec<LoraFlag>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    ok: bool,
    model: &'a str,
    n_prompt: usize,
    n_tokens: usize,
    /// The name of the trusted key that signed it.
    signer: Option<&'a str>,
    /// Tokens of a GPU that aren't the best, but within the margin; `None` if all bits are the same.
    n_within_margin: Option<usize>,
    /// What differs first.
    difference: Option<String>,
    /// The place in the answer of the token that does, counted from 0.
    index: Option<usize>,
    load_ms: f64,
    check_ms: f64,
}

impl Check {
    pub(crate) fn run(self) -> Result<()> {
        let start = Instant::now();
        let place = self.receipt.display().to_string();
        let receipt = read(&self.receipt)?;
        let signer = signer(&receipt).with_context(|| place.clone())?;
        let name = self.model.as_deref().unwrap_or(&receipt.model().name);
        let files = model::open(name)?;
        let settings = receipt.settings();
        let plan = model::plan(&files, &ModelFlags::of_receipt(settings)?)?;
        let flags = EngineFlags::with(self.threads, self.lora).of_receipt(settings);
        let session = settings.session();
        let adapted = model::adapted(&files, &plan, &flags, session.ctx_len)?;
        let setup = model::setup(&files, &plan, &flags, session.ctx_len, &adapted)?;
        let mut session = adapted.session(session)?;
        let load_ms = start.elapsed().as_secs_f64() * 1e3;
        let start = Instant::now();
        let checked = receipt.check(&setup, &mut session);
        let checked = checked.with_context(|| place.clone())?;
        let check_ms = start.elapsed().as_secs_f64() * 1e3;
        let (n_within_margin, difference) = match checked {
            Checked::Same => (None, None),
            Checked::WithinMargin { n_others } => (Some(n_others), None),
            Checked::Differs(difference) => (None, Some(difference)),
        };
        let n_tokens = receipt.answer().len();
        if self.json {
            output::json(&Report {
                ok: difference.is_none(),
                model: name,
                n_prompt: receipt.prompt().len(),
                n_tokens,
                signer: signer.as_deref(),
                n_within_margin,
                difference: difference.as_ref().map(ToString::to_string),
                index: difference
                    .as_ref()
                    .and_then(|difference| difference.index()),
                load_ms,
                check_ms,
            })?;
        }
        if let Some(difference) = difference {
            bail!("{place}: {difference}");
        }
        if !self.json {
            let what = match n_within_margin {
                None => "the same bits".to_owned(),
                Some(n) => format!("of a GPU, {n} of them not the best, and all within the margin"),
            };
            let signed = signer.map_or("not signed".to_owned(), |name| format!("signed by {name}"));
            let tokens = output::counted(n_tokens, "token");
            output::line(format_args!(
                "{place}: {tokens} of {name}, {what}; {signed}"
            ))?;
        }
        Ok(())
    }
}

/// The receipt in `file`.
fn read(file: &Path) -> Result<Receipt> {
    let place = file.display().to_string();
    let mut json = Vec::new();
    let read = File::open(file).and_then(|file| {
        // More than is read is refused.
        file.take(MAX_RECEIPT_BYTES as u64 + 1)
            .read_to_end(&mut json)
    });
    read.with_context(|| format!("{place}: cannot read"))?;
    Receipt::parse(&json).with_context(|| place)
}

/// The name of the trusted key that signed `receipt`. What others signed is checked all the same, and it is said.
fn signer(receipt: &Receipt) -> Result<Option<String>> {
    match receipt.signer(&trust::list()?) {
        Ok(Verdict::Unsigned) => Ok(None),
        Ok(Verdict::Signed(signer)) => Ok(Some(signer.name)),
        Err(error @ SignatureError::UnknownKey { .. }) => {
            output::note(format_args!("note: {error}"));
            Ok(None)
        }
        Err(error) => Err(error.into()),
    }
}
