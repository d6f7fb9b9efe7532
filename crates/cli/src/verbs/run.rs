//! `sterna run`: generates text.

use std::io::{self, IsTerminal};
use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna::constraint::Constraints;
use sterna::conversation::Conversation;
use sterna::generate::FirstWord;
use sterna::native::{self, BUILTIN, LocalModel};
use sterna_delivery::write_whole;
use sterna_engine::Sampler;
use sterna_engine::plan::{HeadScreen, PlanOptions};
use sterna_text::{ChatTemplate, Tokenizer};

use crate::args::{EngineFlags, ModelFlags};
use crate::batch::{self, BatchOptions};
use crate::chat::{Answer, Chat, ChatOptions};
use crate::grammar::GrammarFlags;
use crate::key_file::KeyFile;
use crate::model::{self, Replaceable};
use crate::numbers::{max_tokens, positive};
use crate::output;
use crate::runtime::StatsReport;
use crate::sampling::SamplingFlags;

const EXAMPLE: &str = "Example:
  sterna run -p 'Tell me a story about a fox named Ruby.'
  sterna run model.gguf
  sterna run model.gguf -f prompt.txt
  sterna run model.gguf --batch prompts.jsonl
  sterna run model.gguf -p 'Describe a fox.' --json-schema animal.json
  sterna run model.gguf -p 'Describe a fox.' --receipt fox.json
  echo 'What is 3 plus 4?' | sterna run builtin --temperature 0";

/// Generate text, or chat
///
/// Without -p or -f, a prompt is read from standard input; if that is a terminal, a chat begins. The text
/// goes to standard output, timings to standard error.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Run {
    /// Model to run
    #[arg(default_value = BUILTIN)]
    model: String,

    /// The prompt
    #[arg(short, long, value_name = "TEXT")]
    prompt: Option<String>,

    /// File to read the prompt from; `-` is standard input
    #[arg(short, long, value_name = "FILE", conflicts_with = "prompt")]
    file: Option<PathBuf>,

    /// Answer each line of a file, several at a time, and print the results as JSON, one on each line, in the
    /// order of the prompts; a line is a prompt, or JSON with `prompt` or `messages`; one that is neither has
    /// an error as its result
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "file"])]
    batch: Option<PathBuf>,

    /// Maximum number of prompts of --batch to answer at a time
    #[arg(long, value_name = "N", value_parser = positive, default_value = "8", requires = "batch")]
    parallel: NonZero<usize>,

    /// Continue the prompt as it is, without the chat template; special tokens in it are recognised
    #[arg(long)]
    raw: bool,

    /// System instructions
    #[arg(
        long,
        alias = "system-prompt",
        value_name = "TEXT",
        conflicts_with = "raw"
    )]
    system: Option<String>,

    /// Maximum tokens to generate [default: what the model recommends, else as many as fit]
    #[arg(
        short = 'n',
        long,
        aliases = ["predict", "n-predict"],
        value_name = "N",
        value_parser = max_tokens
    )]
    max_tokens: Option<usize>,

    /// Text that ends the answer and is not part of it; may be given several times
    #[arg(long, value_name = "TEXT", value_parser = stop_text)]
    stop: Vec<String>,

    /// Draft up to N tokens from the text so far and verify them at once: changes no token, and is faster
    /// where text repeats [N: 8]
    #[arg(
        long,
        value_name = "N",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "8",
        value_parser = draft_count
    )]
    speculate: Option<usize>,

    /// Write a receipt of the answer to FILE, which anyone who has the model can check (`sterna check`); of an
    /// answer of a GPU only at temperature 0
    #[arg(long, value_name = "FILE", conflicts_with_all = ["batch", "GrammarFlags"])]
    receipt: Option<PathBuf>,

    /// Sign the receipt with the secret key in FILE (`sterna sign --generate`)
    #[arg(long, value_name = "FILE", requires = "receipt")]
    receipt_key: Option<PathBuf>,

    /// File whose first line is the key's password [default: asked for on the terminal]
    #[arg(long, value_name = "FILE", requires = "receipt_key")]
    password_file: Option<PathBuf>,

    /// Don't remember the messages of this chat for later ones
    #[arg(long)]
    no_history: bool,

    /// Print JSON instead of the text: text, token ids and timings
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    sampling: SamplingFlags,

    #[command(flatten)]
    grammar: GrammarFlags,

    #[command(flatten)]
    engine: EngineFlags,

    #[command(flatten)]
    files: ModelFlags,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    text: &'a str,
    ids: &'a [u32],
    seed: u64,
    load_ms: f64,
    n_layers: usize,
    /// Those of them that were computed on a GPU.
    n_gpu_layers: usize,
    #[serde(flatten)]
    stats: StatsReport,
}

/// The file name that stands for standard input.
const STDIN: &str = "-";

impl Run {
    pub(crate) fn run(mut self) -> Result<()> {
        let start = Instant::now();
        let is_chat = self.prompt.is_none()
            && self.file.is_none()
            && self.batch.is_none()
            && io::stdin().is_terminal();
        if is_chat && self.json {
            bail!("--json: expected a prompt (-p, -f, or on standard input), found a chat");
        }
        if is_chat && self.receipt.is_some() {
            bail!("--receipt: expected a prompt (-p, -f, or on standard input), found a chat");
        }
        let key = self.receipt_key.as_deref().map(|path| {
            let password = self.password_file.as_deref();
            KeyFile { path, password }.read()
        });
        let key = key.transpose()?;
        // Before anything that takes time.
        let prompt = match (self.prompt.take(), &self.file) {
            (Some(prompt), _) => Some(prompt),
            (None, Some(file)) => Some(without_line_end(read_file(file)?)),
            (None, None) => None,
        };
        let batch = match &self.batch {
            Some(file) => Some(batch::parse(&file.to_string_lossy(), &read_file(file)?)?),
            None => None,
        };
        let grammar = self.grammar.grammar()?;
        let files = model::open(&self.model)?;
        // A model that can't be run has no use for a prompt.
        let screen = match self.receipt {
            // Of an answer with a receipt the whole head is read.
            Some(_) => HeadScreen::Off,
            None => self.engine.screen(),
        };
        let plan = model::plan_with(&files, &self.files, screen)?;
        let tokenizer = files.require_tokenizer()?;
        let template = self.template(&files, &tokenizer)?;
        let recommended = model::generation_config(&files)?;
        let stop_ids = files.stop_ids(Some(&tokenizer), &recommended)?;
        let (n_vocab, max_ctx) = (plan.config().n_vocab, plan.config().max_ctx);
        let sampling = self.sampling.options();
        let sampler = Sampler::new(sampling.config(&recommended), n_vocab)?;
        let seed = sampler.config().seed;
        let constraints = Constraints::new(tokenizer.clone());
        let constraint = grammar
            .map(|grammar| constraints.of(&grammar))
            .transpose()?;
        let max_tokens = (self.max_tokens)
            .or(recommended.max_new_tokens)
            .unwrap_or(usize::MAX);
        let engine = self.engine.for_model(&files);
        let ctx_len = engine.ctx_len(max_ctx);
        if let Some(lines) = batch {
            let options = BatchOptions {
                tokenizer,
                template,
                system: self.system,
                sampling,
                recommended,
                stop_ids,
                stop_strings: self.stop,
                max_tokens,
                speculate: self.speculate,
                constraint,
                constraints,
                n_vocab,
                n_parallel: self.parallel.get(),
            };
            let mut adapted = model::adapted(&files, &plan, &engine, ctx_len)?;
            return batch::answer(lines, &options, |again| {
                if again {
                    adapted = model::adapted(&files, &plan, &engine, ctx_len)?;
                }
                Ok(adapted.session(engine.session(ctx_len))?)
            });
        }
        let options = PlanOptions {
            i2s_layout: self.files.i2s_layout(),
        };
        let weights = Replaceable::new(&files, &plan, options, self.files.head(screen));
        let adapted = model::adapted(&files, &plan, &engine, ctx_len)?;
        let receipt = match self.receipt.is_some() {
            true => Some(Arc::new(model::setup(
                &files, &plan, &engine, ctx_len, &adapted,
            )?)),
            false => None,
        };
        let session = adapted.session(engine.session(ctx_len))?;
        drop(adapted);
        let open = move || model::session(&files, plan.clone(), &engine, ctx_len);
        let n_layers = session.model().config().n_layers;
        let n_gpu_layers = native::n_gpu_layers(session.model().backend());
        let mut conversation = template.map(Conversation::new);
        if let Some(conversation) = &mut conversation {
            conversation.set_system(self.system);
        }
        let mut first_word = FirstWord::new(conversation.is_some() && constraint.is_none());
        let options = ChatOptions {
            model: self.model,
            sampler,
            conversation,
            stop_ids,
            tokenizer,
            stop_strings: self.stop,
            max_tokens,
            speculate: self.speculate,
            constraint,
            shows_timings: false,
            saves_cache: true,
            weights,
            receipt,
        };
        let mut chat = Chat::new(session, open, options);
        let load_ms = start.elapsed().as_secs_f64() * 1e3;

        let prompt = match prompt {
            Some(prompt) => prompt,
            None if is_chat => return chat.converse(!self.no_history),
            None => without_line_end(super::read_stdin()?),
        };
        let is_shown = !self.json;
        let tell = |piece: &str| match is_shown {
            true => output::write_now(&first_word.push(piece)),
            false => Ok(()),
        };
        let answer = chat.answer(prompt, || false, tell)?;
        let Answer {
            text,
            ids,
            stats,
            receipt,
            ..
        } = answer;
        if let Some(file) = &self.receipt {
            let mut receipt = receipt.context("--receipt: the answer was not ended")?;
            if let Some(key) = &key {
                receipt.sign(key)?;
            }
            write_whole(file, format!("{}\n", receipt.to_json()).as_bytes())
                .with_context(|| format!("{}: cannot write", file.display()))?;
        }
        if self.json {
            output::json(&Report {
                text: &text,
                ids: &ids,
                seed,
                load_ms,
                n_layers,
                n_gpu_layers,
                stats: stats.into(),
            })?;
        } else {
            if !text.ends_with('\n') {
                output::write_now("\n")?;
            }
            output::note(format_args!(
                "[{stats}; loaded in {load_ms:.0} ms, seed {seed}]"
            ));
        }
        Ok(())
    }

    /// The chat template to use, if any.
    fn template(&self, files: &LocalModel, tokenizer: &Tokenizer) -> Result<Option<ChatTemplate>> {
        if self.raw {
            return Ok(None);
        }
        let template = files.chat_template(tokenizer)?;
        if template.is_none() {
            if self.system.is_some() {
                bail!(
                    "--system: expected a model with a chat template, {} is a base model",
                    self.model
                );
            }
            output::note("This is a base model without a chat template: it continues your text.");
        }
        Ok(template)
    }
}

/// Maximum number of drafted tokens: more never pays.
const MAX_DRAFTS: usize = 64;

fn draft_count(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|n| (1..=MAX_DRAFTS).contains(n))
        .ok_or_else(|| format!("expected a number of tokens from 1 to {MAX_DRAFTS}"))
}

/// Parses a text that ends an answer.
fn stop_text(text: &str) -> Result<String, String> {
    match text {
        "" => Err("expected text that ends the answer, found none".to_owned()),
        text => Ok(text.to_owned()),
    }
}

/// The text in `file`, or on standard input.
fn read_file(file: &Path) -> Result<String> {
    match file.to_str() == Some(STDIN) {
        true => super::read_stdin(),
        false => super::read_text(file),
    }
}

/// `text` without the line end that `echo` and editors add.
fn without_line_end(mut text: String) -> String {
    if text.ends_with('\n') {
        text.pop();
        if text.ends_with('\r') {
            text.pop();
        }
    }
    text
}
