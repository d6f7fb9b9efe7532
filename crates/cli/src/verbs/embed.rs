//! `sterna embed`: texts to vectors.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use sterna::embedding::{Pooling, embed};
use sterna_engine::Backend;
use sterna_text::Encode;

use crate::args::ReportFlags;
use crate::model;
use crate::progress::Progress;
use crate::tensor_file::TensorFile;
use crate::{output, verbs};

const EXAMPLE: &str = "Example:
  sterna embed Qwen3-Embedding-0.6B --text 'A fox named Ruby' --text 'A red ball'
  sterna embed model.gguf --file lines.txt -o embeddings.safetensors";

/// Make a vector of each text
///
/// Of the hidden states that follow the tokens of a text, the last, the first or the mean becomes its vector, as the
/// model says or --pooling; it is divided by its length. Vectors are printed as lines of JSON, or written to a file.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Embed {
    /// Model to run
    model: String,

    #[command(flatten)]
    texts: Texts,

    /// Which hidden states count: last, cls (the first) or mean [default: what the model says]
    #[arg(long, value_name = "KIND", value_parser = pooling)]
    pooling: Option<Pooling>,

    /// Leave vectors as long as they are
    #[arg(long)]
    no_normalize: bool,

    /// Write the vectors to a file: the tensor `embeddings`, f32 [n_texts, dimensions]
    #[arg(short, long, value_name = "OUT.safetensors")]
    output: Option<PathBuf>,

    #[command(flatten)]
    flags: ReportFlags,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Texts {
    /// A text; may be given several times
    #[arg(long, value_name = "TEXT")]
    text: Vec<String>,

    /// A file with a text in each line
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
}

/// What is said of one text.
#[derive(Debug, Serialize)]
struct Line<'a> {
    index: usize,
    n_tokens: usize,
    embedding: &'a [f32],
}

#[derive(Debug, Serialize)]
struct Report<'a> {
    file: &'a Path,
    shape: [usize; 2],
    pooling: &'static str,
}

fn pooling(name: &str) -> Result<Pooling, String> {
    let found = Pooling::NAMES.iter().find(|(of, _)| *of == name);
    let found = found.map(|(_, pooling)| *pooling);
    found.ok_or_else(|| format!("expected last, cls or mean, found `{name}`"))
}

impl Embed {
    pub(crate) fn run(self) -> Result<()> {
        let texts = match self.texts.file {
            Some(file) => {
                let text = verbs::read_text(&file)?;
                text.lines().map(str::to_owned).collect()
            }
            None => self.texts.text,
        };
        if texts.is_empty() {
            bail!("expected at least one text, found none");
        }
        let files = model::open(&self.model)?;
        let Some(pooling) = self
            .pooling
            .map_or_else(|| files.pooling(), |p| Ok(Some(p)))?
        else {
            bail!(
                "{}: it doesn't say how its vectors are pooled; say it with --pooling last, cls or mean",
                files.name()
            );
        };
        let tokenizer = files.require_tokenizer()?;
        let plan = model::plan(&files, &self.flags.files)?;
        let (dim, n_vocab) = (plan.config().model_dim, plan.config().n_vocab);
        let special = Encode {
            add_special: true,
            parse_special: true,
        };
        let encoded: Vec<Vec<u32>> = (texts.iter().enumerate())
            .map(|(i, text)| {
                let ids = tokenizer.encode(text, special)?;
                verbs::check_ids(&ids, n_vocab)?;
                if ids.is_empty() {
                    bail!("text {i}: expected at least one token, found none");
                }
                Ok(ids)
            })
            .collect::<Result<_>>()?;
        let longest = encoded.iter().map(Vec::len).max().unwrap_or(0);
        let ctx_len = self.flags.engine.ctx_for(longest)?;
        let mut session = model::session(&files, plan, &self.flags.engine, ctx_len)?;
        let shape = [encoded.len(), dim];
        let mut file = match &self.output {
            Some(path) => Some(TensorFile::create(path, "embeddings", shape)?),
            None => None,
        };
        let progress = Progress::items("computing", encoded.len() as u64);
        let backend = session.model().clone();
        for (index, ids) in encoded.iter().enumerate() {
            let vector = embed(&mut session, ids, pooling, !self.no_normalize);
            let vector = backend.backend().wait(vector)??;
            match &mut file {
                Some(file) => file.write(&vector)?,
                None => output::json(&Line {
                    index,
                    n_tokens: ids.len(),
                    embedding: &vector,
                })?,
            }
            progress.add(1);
        }
        if let (Some(file), Some(path)) = (file, &self.output) {
            file.finish()?;
            if self.flags.json {
                output::json(&Report {
                    file: path,
                    shape,
                    pooling: pooling.name(),
                })?;
            }
        }
        Ok(())
    }
}
