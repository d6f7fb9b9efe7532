//! `sterna convert`: a package of a model in any form.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::Result;
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use sterna_delivery::hash::Algorithm;
use sterna_engine::PlanOptions;
use sterna_kernels::Exec;

use crate::args::{I2sLayoutFlag, isa, thread_count};
use crate::convert::{Options, Summary, Target, Targets, convert, convert_adapter};
use crate::machine;
use crate::model::{ADAPTER_CONFIG, ModelFiles};
use crate::output::{self, Bytes};

/// Make an RDRR package of a model
///
/// The same model and options give the same bytes, on any number of threads. An interrupted
/// conversion goes on where it was when it is started again.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  sterna convert Llama-3.2-1B/ llama-rdrr --quantize q4_k_m --embeddings f16"
)]
pub(crate) struct Convert {
    /// GGUF file (or the first of a split set), Hugging Face folder, package, or the folder of an adapter as
    /// PEFT saves it
    #[arg(value_name = "MODEL")]
    model: String,

    /// Folder to write; must not exist
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Type of the matrices in the layers: keep, q4_k_m, q4_k, q5_k, q6_k, q8_0, q4_0, tq2_0, tq1_0,
    /// i2_s, f16, bf16 or f32. Ternary ones are stored as I2_S unless a type that holds them exactly is
    /// asked for
    #[arg(long, value_name = "TYPE", value_parser = Target::parse, default_value = "keep")]
    quantize: Target,

    /// Type of the embedding table [default: keep]
    #[arg(long, value_name = "TYPE", value_parser = Target::parse)]
    embeddings: Option<Target>,

    /// Type of the output head [default: that of the table]. Of a model without one of its own, whose
    /// table serves as one, the type of the table unless --embeddings is given
    #[arg(long, value_name = "TYPE", value_parser = Target::parse)]
    head: Option<Target>,

    /// Bytes of a shard at most, such as 64MiB
    #[arg(long, value_name = "SIZE", value_parser = shard_size, default_value = "64MiB")]
    shard_size: NonZero<u64>,

    /// What shards and groups are hashed with
    #[arg(long, value_name = "ALGORITHM", default_value = "sha256")]
    hash: Algorithm,

    /// What the package is called [default: the name of the model and its types]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    id: Option<String>,

    /// Threads to compute with [default: one for each physical core available]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    jobs: Option<NonZero<usize>>,

    /// Layout of the source's I2_S weights, which GGUF files don't say
    #[arg(long, value_enum, default_value_t, hide_short_help = true)]
    i2s_layout: I2sLayoutFlag,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Smallest shard that is taken: what tensors are aligned to.
const MIN_SHARD: u64 = 4096;

/// Parses a number of bytes, with K, M or G (powers of 1024) behind it or their longer names.
fn shard_size(text: &str) -> Result<NonZero<u64>, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1_u64 << 30),
        _ => None,
    };
    digits
        .parse::<u64>()
        .ok()
        .zip(factor)
        .and_then(|(n, factor)| n.checked_mul(factor))
        .filter(|n| n.is_multiple_of(MIN_SHARD))
        .and_then(NonZero::new)
        .ok_or_else(|| format!("expected a multiple of {MIN_SHARD} bytes, such as 64MiB"))
}

impl Convert {
    pub(crate) fn run(self) -> Result<()> {
        let folder = Path::new(&self.model);
        if folder.join(ADAPTER_CONFIG).exists() {
            let id = self.id.as_deref();
            let size = self.shard_size.get();
            let summary = convert_adapter(folder, &self.out, id, size, self.hash)?;
            return say(&summary, self.json);
        }
        let files = ModelFiles::open(&self.model)?;
        let n_threads = self
            .jobs
            .map_or_else(machine::default_threads, NonZero::get);
        let options = Options {
            plan: PlanOptions {
                i2s_layout: self.i2s_layout.layout(),
            },
            targets: Targets {
                weights: self.quantize,
                embeddings: self.embeddings,
                head: self.head,
            },
            shard_size: self.shard_size.get(),
            algorithm: self.hash,
            model_id: self.id,
        };
        let exec = Arc::new(Exec::new(n_threads, isa()?));
        let summary = convert(&files, &self.out, &options, exec)?;
        say(&summary, self.json)
    }
}

/// Prints what came of a conversion.
fn say(summary: &Summary, as_json: bool) -> Result<()> {
    if as_json {
        return output::json(summary);
    }
    let resumed = match summary.n_resumed {
        0 => String::new(),
        n => format!(", {n} of them from an interrupted run"),
    };
    output::note(format_args!(
        "{}: {} tensors, {} in {} shards{resumed}",
        summary.model_id,
        summary.n_tensors,
        Bytes(summary.total_size),
        summary.n_shards,
    ));
    output::line(summary.package.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_of_shards_are_read() {
        for (text, bytes) in [
            ("4096", 4096),
            ("8K", 8192),
            ("64MiB", 64 << 20),
            ("1g", 1 << 30),
        ] {
            assert_eq!(shard_size(text).map(NonZero::get), Ok(bytes), "{text}");
        }
        for text in ["", "0", "4095", "64MB", "-1", "1.5M", "99999999999G", "MiB"] {
            assert!(shard_size(text).is_err(), "{text}");
        }
    }
}
