//! `sterna tokenize`: text to token ids.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use sterna_text::Encode;

use crate::model;
use crate::{output, verbs};

const EXAMPLE: &str = "Example:
  sterna tokenize builtin --text 'Once upon a time'
  sterna tokenize model.gguf --file story.txt --json";

/// Print the token ids of a text
///
/// Special tokens written out in the text are recognised, and the model's own are added.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Tokenize {
    /// Model whose tokenizer to use
    model: String,

    #[command(flatten)]
    text: TextSource,

    /// Add no special tokens, and recognise none in the text
    #[arg(long)]
    no_special: bool,

    /// Print JSON: the ids, and the pieces as in the vocabulary
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct TextSource {
    /// The text
    #[arg(long, value_name = "TEXT")]
    text: Option<String>,

    /// A file that holds the text
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    ids: &'a [u32],
    pieces: Vec<Option<&'a str>>,
}

impl Tokenize {
    pub(crate) fn run(self) -> Result<()> {
        let tokenizer = model::open(&self.model)?.require_tokenizer()?;
        let text = match (self.text.text, self.text.file) {
            (Some(text), _) => text,
            (None, Some(file)) => verbs::read_text(&file)?,
            (None, None) => unreachable!("clap demands one of them"),
        };
        let special = !self.no_special;
        let ids = tokenizer.encode(
            &text,
            Encode {
                add_special: special,
                parse_special: special,
            },
        )?;
        if self.json {
            let pieces = ids.iter().map(|&id| tokenizer.piece(id)).collect();
            output::json(&Report { ids: &ids, pieces })
        } else {
            let ids: Vec<_> = ids.iter().map(u32::to_string).collect();
            output::line(ids.join(" "))
        }
    }
}
