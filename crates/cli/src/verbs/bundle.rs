//! `sterna bundle`: the files of a subprocess engine from a Hugging Face folder.

use std::num::NonZero;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use sterna_convert::{BundleOptions, BundleSummary, ManifestForm, to_bundle};
use sterna_format::bundle::ArchType;
use sterna_kernels::Exec;

use crate::args::{isa, thread_count};
use crate::conversion::notify;
use crate::output::{self, Bytes};
use crate::{machine, model};

/// Make an engine bundle from a Hugging Face folder, or from an adapter for it
///
/// A bundle has the weights as an engine computes with them (qmodel.tensors), the parameters of the rotary
/// embedding (rope.cache), and the configuration and tokenizer. Ternary models become I2_S; others keep their
/// types. The folder appears only when it is complete.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  sterna bundle bitnet-b1.58-2B-4T/ -o bitnet-bundle\n  \
                  sterna bundle bitnet-b1.58-2B-4T/ my-adapter/ -o my-adapter-bundle"
)]
pub(crate) struct Bundle {
    /// Hugging Face folder of the model, with config.json and safetensors files
    #[arg(value_name = "HF_DIR")]
    model: String,

    /// PEFT folder of an adapter for it; the bundle is then the adapter's
    #[arg(value_name = "ADAPTER_DIR")]
    adapter: Option<PathBuf>,

    /// Folder to write; must not exist
    #[arg(short, long, value_name = "OUT")]
    out: PathBuf,

    /// Put model and adapter into one folder, for `sterna worker DIR --lora`
    #[arg(long, requires = "adapter")]
    together: bool,

    /// Architecture by name or number, where config.json leaves a choice: bonsai (one bit) or bonsai_ternary
    /// instead of qwen3 [default: what config.json and README.md say]
    #[arg(long, value_name = "ARCH")]
    arch: Option<ArchType>,

    /// Store the embedding table as int8, in blocks of 32, instead of as it is
    #[arg(long)]
    embeddings_i8: bool,

    /// Keep the quantize manifest, which describes how each tensor is converted, in this file
    #[arg(long, value_name = "FILE")]
    manifest: Option<PathBuf>,

    /// Version of the manifest: with a table of sections, as later writers have it, or version 1, without
    #[arg(
        long,
        value_name = "FORM",
        value_parser = manifest_form(),
        default_value = ManifestForm::NAMES[0],
        hide_short_help = true
    )]
    manifest_form: ManifestForm,

    /// Threads to compute with [default: one for each physical core available]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    jobs: Option<NonZero<usize>>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Parses the name of a version of manifests.
fn manifest_form() -> impl TypedValueParser<Value = ManifestForm> {
    PossibleValuesParser::new(ManifestForm::NAMES).try_map(|name| name.parse::<ManifestForm>())
}

impl Bundle {
    pub(crate) fn run(self) -> Result<()> {
        let files = model::open(&self.model)?;
        let options = BundleOptions {
            adapter: self.adapter,
            together: self.together,
            arch: self.arch,
            embeddings_i8: self.embeddings_i8,
            manifest: self.manifest,
            form: self.manifest_form,
        };
        let n_threads = self
            .jobs
            .map_or_else(machine::default_threads, NonZero::get);
        let exec = Exec::new(n_threads, isa()?);
        let summary = to_bundle(&files, &self.out, &options, &exec, &notify())?;
        if self.json {
            return output::json(&summary);
        }
        let BundleSummary {
            bundle,
            architecture,
            n_tensors,
            n_adapted,
            bytes,
        } = summary;
        let what = match (n_tensors, n_adapted) {
            (n, 0) => format!("{n} tensors"),
            (0, n) => format!("an adapter of {n} projections"),
            (n, m) => format!("{n} tensors and an adapter of {m} projections"),
        };
        output::line(format_args!(
            "{}: {architecture}, {what}, {}",
            bundle.display(),
            Bytes(bytes)
        ))
    }
}
