//! `sterna template`: conversations to prompts.

use std::io::{self, IsTerminal};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use serde_json::Value;
use sterna_text::ChatInput;

use crate::{model, output, prompt, verbs};

const EXAMPLE: &str = r#"Example:
  echo '[{"role": "user", "content": "Hello!"}]' > messages.json
  sterna template builtin --messages messages.json"#;

/// Print the prompt that a chat template renders from a conversation
///
/// The prompt ends where the answer begins. Messages and tools are in the form of the OpenAI API.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Template {
    /// Model whose chat template to use
    model: String,

    /// JSON file: an array of messages with role and content; `-` for standard input
    #[arg(long, value_name = "FILE.json|-")]
    messages: PathBuf,

    /// Tools the model may call: a JSON array of their schemas, or a file with one
    #[arg(long, value_name = "FILE.json|JSON")]
    tools: Option<String>,

    /// Documents to answer from: a JSON array, or a file with one
    #[arg(long, value_name = "FILE.json|JSON")]
    documents: Option<String>,

    /// Don't begin the answer: the prompt ends with the last message
    #[arg(long)]
    no_generation_prompt: bool,

    /// Print JSON: the prompt and its token ids
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    prompt: &'a str,
    ids: Vec<u32>,
}

impl Template {
    pub(crate) fn run(self) -> Result<()> {
        let files = model::open(&self.model)?;
        let tokenizer = files.require_tokenizer()?;
        let tools = array("--tools", self.tools.as_deref())?;
        let template = files.chat_template_for(&tokenizer, tools.is_some())?;
        let template = template.with_context(|| {
            format!(
                "{}: expected a chat template, found none: a base model takes raw text",
                self.model
            )
        })?;
        let (file, messages) = match self.messages.as_path() == Path::new("-") {
            true => ("standard input".to_owned(), verbs::read_stdin()?),
            false => (
                self.messages.display().to_string(),
                verbs::read_text(&self.messages)?,
            ),
        };
        let messages = serde_json::from_str(&messages)
            .with_context(|| format!("{file}: expected a JSON array of messages"))?;
        let input = ChatInput {
            messages,
            tools,
            documents: array("--documents", self.documents.as_deref())?,
            add_generation_prompt: !self.no_generation_prompt,
            now: Some(prompt::now()),
            ..ChatInput::default()
        };
        let prompt = template
            .prompt(&input, &tokenizer)
            .with_context(|| file.clone())?;
        for (flag, without) in [
            (
                "--tools",
                input.tools.is_some().then(|| ChatInput {
                    tools: None,
                    ..input.clone()
                }),
            ),
            (
                "--documents",
                input.documents.is_some().then(|| ChatInput {
                    documents: None,
                    ..input.clone()
                }),
            ),
        ] {
            let other = without.map(|without| template.prompt(&without, &tokenizer));
            if other.is_some_and(|other| other.is_ok_and(|other| other.text() == prompt.text())) {
                output::warning(format_args!(
                    "{flag}: the chat template of {} makes no use of them",
                    self.model
                ));
            }
        }
        if self.json {
            return output::json(&Report {
                prompt: prompt.text(),
                ids: tokenizer.encode_prompt(&prompt)?,
            });
        }
        let prompt = prompt.text();
        output::write_now(prompt)?;
        if io::stdout().is_terminal() && !prompt.ends_with('\n') {
            output::write_now("\n")?;
        }
        Ok(())
    }
}

/// The array that `flag` was given, as JSON or in a file.
fn array(flag: &str, given: Option<&str>) -> Result<Option<Vec<Value>>> {
    let Some(given) = given else {
        return Ok(None);
    };
    let (place, text) = match given.trim_start().starts_with(['[', '{']) {
        true => (flag.to_owned(), given.to_owned()),
        false => (
            format!("{flag}: {given}"),
            verbs::read_text(Path::new(given))?,
        ),
    };
    let values =
        serde_json::from_str(&text).with_context(|| format!("{place}: expected a JSON array"))?;
    Ok(Some(values))
}
