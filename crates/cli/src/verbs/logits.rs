//! `sterna logits`: a model's logits, for checking one implementation against another.

use std::num::NonZero;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use sterna_engine::Logits as Rows;

use crate::args::ReportFlags;
use crate::model;
use crate::progress::Progress;
use crate::tensor_file::TensorFile;
use crate::{output, verbs};

const EXAMPLE: &str = "Example:
  sterna logits model.gguf --ids 1,403,407 -o logits.safetensors
  sterna logits builtin --ids-file ids.txt --last -o last.safetensors";

/// Write the logits that follow each token of a sequence
///
/// The file holds one tensor, `logits`, f32 [n_tokens, n_vocab].
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Logits {
    /// Model to run
    model: String,

    #[command(flatten)]
    ids: IdSource,

    /// File to write
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: PathBuf,

    /// Only those after the last token
    #[arg(long)]
    last: bool,

    /// Compute the sequence in chunks of N tokens
    #[arg(long, value_name = "N", conflicts_with = "decode")]
    chunk: Option<NonZero<usize>>,

    /// Compute token by token, through the KV cache
    #[arg(long)]
    decode: bool,

    #[command(flatten)]
    flags: ReportFlags,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct IdSource {
    /// Token ids, separated by commas
    #[arg(long, value_name = "IDS")]
    ids: Option<String>,

    /// A file of token ids, separated by commas or white space; brackets of JSON are allowed
    #[arg(long, value_name = "FILE")]
    ids_file: Option<PathBuf>,
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    file: &'a Path,
    shape: [usize; 2],
}

/// Default chunk size; bounds the memory that logits take.
const DEFAULT_CHUNK: usize = 256;

impl Logits {
    pub(crate) fn run(self) -> Result<()> {
        let ids = match (&self.ids.ids, &self.ids.ids_file) {
            (Some(list), _) => parse_ids(list).context("--ids")?,
            (None, Some(file)) => {
                parse_ids(&verbs::read_text(file)?).with_context(|| file.display().to_string())?
            }
            (None, None) => unreachable!("clap demands one of them"),
        };
        let files = model::open(&self.model)?;
        let plan = model::plan(&files, &self.flags.files)?;
        let n_vocab = plan.config().n_vocab;
        verbs::check_ids(&ids, n_vocab)?;
        let ctx_len = self.flags.engine.ctx_for(ids.len())?;
        let mut session = model::session(&files, plan, &self.flags.engine, ctx_len)?;

        let n_rows = if self.last { 1 } else { ids.len() };
        let mut file = TensorFile::create(&self.output, "logits", [n_rows, n_vocab])?;
        let chunk = match self.chunk {
            _ if self.decode => 1,
            Some(n) => n.get(),
            None => DEFAULT_CHUNK,
        };
        let rows = if self.last { Rows::Last } else { Rows::All };
        let progress = Progress::items("computing", ids.len() as u64);
        let mut last = Vec::new();
        for chunk in ids.chunks(chunk) {
            last = session.forward(chunk, rows)?;
            if !self.last {
                file.write(&last)?;
            }
            progress.add(chunk.len() as u64);
        }
        if self.last {
            file.write(&last)?;
        }
        file.finish()?;
        if self.flags.json {
            output::json(&Report {
                file: &self.output,
                shape: [n_rows, n_vocab],
            })?;
        }
        Ok(())
    }
}

/// Ids separated by commas or white space, perhaps within the brackets of a JSON array.
pub(super) fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let text = text.trim();
    let text = text
        .strip_prefix('[')
        .and_then(|t| t.strip_suffix(']'))
        .unwrap_or(text);
    let words = text
        .split(|c: char| c == ',' || c.is_whitespace())
        .filter(|word| !word.is_empty());
    let parse = |(i, word): (usize, &str)| {
        word.parse()
            .with_context(|| format!("id {i}: expected a token id, found `{word}`"))
    };
    let ids: Vec<u32> = words.enumerate().map(parse).collect::<Result<_>>()?;
    if ids.is_empty() {
        bail!("expected at least one token id, found none");
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read_in_several_forms() {
        for text in ["1,2,30", " 1 2\n30\n", "[1, 2, 30]\n"] {
            assert_eq!(parse_ids(text).unwrap(), [1, 2, 30], "{text}");
        }
        for (text, message) in [
            ("1,x", "id 1: expected a token id, found `x`"),
            ("-1", "id 0: expected a token id, found `-1`"),
            (
                "4294967296",
                "id 0: expected a token id, found `4294967296`",
            ),
            (" ", "expected at least one token id, found none"),
        ] {
            assert_eq!(parse_ids(text).unwrap_err().to_string(), message);
        }
    }
}
