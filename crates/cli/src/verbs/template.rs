//! `sterna template`: conversations to prompts.

use std::io::{self, IsTerminal};
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use sterna_text::ChatInput;

use crate::model;
use crate::{chat, output, verbs};

const EXAMPLE: &str = r#"Example:
  echo '[{"role": "user", "content": "Hello!"}]' > messages.json
  sterna template builtin --messages messages.json"#;

/// Print the prompt that a chat template renders from a conversation
///
/// The prompt ends where the answer begins. The messages have the format of the OpenAI API.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Template {
    /// Model whose chat template to use
    model: String,

    /// JSON file: an array of messages with role and content
    #[arg(long, value_name = "FILE.json")]
    messages: PathBuf,

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
        let template = files.chat_template(&tokenizer)?.with_context(|| {
            format!(
                "{}: expected a chat template, found none: a base model takes raw text",
                self.model
            )
        })?;
        let file = self.messages.display();
        let messages = serde_json::from_str(&verbs::read_text(&self.messages)?)
            .with_context(|| format!("{file}: expected a JSON array of messages"))?;
        let input = ChatInput {
            messages,
            add_generation_prompt: true,
            now: Some(chat::now()),
            ..ChatInput::default()
        };
        let prompt = template
            .prompt(&input, &tokenizer)
            .with_context(|| file.to_string())?;
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
