//! `sterna run`: generates text.

use std::io::{self, IsTerminal};
use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use sterna::conversation::Conversation;
use sterna::generate::FirstWord;
use sterna::native::{self, BUILTIN};
use sterna_engine::Sampler;

use crate::args::{EngineFlags, ModelFlags};
use crate::chat::{Answer, Chat, ChatOptions};
use crate::model;
use crate::output;
use crate::runtime::StatsReport;
use crate::sampling::SamplingFlags;

const EXAMPLE: &str = "Example:
  sterna run -p 'Tell me a story about a fox named Ruby.'
  sterna run model.gguf
  echo 'What is 3 plus 4?' | sterna run builtin --temperature 0";

/// Generate text, or chat
///
/// Without -p, a prompt is read from standard input; if that is a terminal, a chat begins. The text
/// goes to standard output, timings to standard error.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Run {
    /// Model to run
    #[arg(default_value = BUILTIN)]
    model: String,

    /// The prompt
    #[arg(short, long)]
    prompt: Option<String>,

    /// Continue the prompt as it is, without the chat template; special tokens in it are recognised
    #[arg(long)]
    raw: bool,

    /// System instructions
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,

    /// Maximum tokens to generate [default: what the model recommends, else as many as fit]
    #[arg(long, value_name = "N")]
    max_tokens: Option<usize>,

    /// Text that ends the answer and is not part of it; may be given several times
    #[arg(long, value_name = "TEXT")]
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

    /// Print JSON instead of the text: text, token ids and timings
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    sampling: SamplingFlags,

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

impl Run {
    pub(crate) fn run(self) -> Result<()> {
        let start = Instant::now();
        let files = model::open(&self.model)?;
        let tokenizer = files.require_tokenizer()?;
        let template = if self.raw {
            None
        } else {
            files.chat_template(&tokenizer)?
        };
        if template.is_none() && !self.raw {
            if self.system.is_some() {
                bail!(
                    "--system: expected a model with a chat template, {} is a base model",
                    self.model
                );
            }
            output::note("This is a base model without a chat template: it continues your text.");
        }
        let generation_config = model::generation_config(&files)?;
        let plan = model::plan(&files, &self.files)?;
        let (n_vocab, max_ctx) = (plan.config().n_vocab, plan.config().max_ctx);
        let config = self.sampling.options().config(&generation_config);
        let sampler = Sampler::new(config, n_vocab)?;
        let seed = sampler.config().seed;
        let stop_ids = files.stop_ids(Some(&tokenizer), &generation_config)?;
        let engine = self.engine;
        let open = move || model::session(&files, plan.clone(), &engine, engine.ctx_len(max_ctx));
        let session = open()?;
        let n_layers = session.model().config().n_layers;
        let n_gpu_layers = native::n_gpu_layers(session.model().backend());
        let mut conversation = template.map(Conversation::new);
        if let Some(conversation) = &mut conversation {
            conversation.set_system(self.system);
        }
        let mut first_word = FirstWord::new(conversation.is_some());
        let options = ChatOptions {
            sampler,
            conversation,
            stop_ids,
            tokenizer,
            stop_strings: self.stop,
            max_tokens: self
                .max_tokens
                .or(generation_config.max_new_tokens)
                .unwrap_or(usize::MAX),
            speculate: self.speculate,
        };
        let mut chat = Chat::new(session, open, options);
        let load_ms = start.elapsed().as_secs_f64() * 1e3;

        let prompt = match self.prompt {
            Some(prompt) => prompt,
            None if io::stdin().is_terminal() => return chat.converse(),
            None => read_prompt()?,
        };
        let is_shown = !self.json;
        let tell = |piece: &str| match is_shown {
            true => output::write_now(&first_word.push(piece)),
            false => Ok(()),
        };
        let answer = chat.answer(prompt, || false, tell)?;
        let Answer {
            text, ids, stats, ..
        } = answer;
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
}

/// Maximum number of drafted tokens: more never pays.
const MAX_DRAFTS: usize = 64;

fn draft_count(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|n| (1..=MAX_DRAFTS).contains(n))
        .ok_or_else(|| format!("expected a number of tokens from 1 to {MAX_DRAFTS}"))
}

/// The whole of standard input, without the line end that `echo` adds.
fn read_prompt() -> Result<String> {
    let mut prompt = super::read_stdin()?;
    if prompt.ends_with('\n') {
        prompt.pop();
        if prompt.ends_with('\r') {
            prompt.pop();
        }
    }
    Ok(prompt)
}
