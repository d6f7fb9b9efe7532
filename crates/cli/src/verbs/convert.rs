//! `sterna convert`: a package or a GGUF file of a model in any form.

use std::num::NonZero;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::builder::NonEmptyStringValueParser;
use clap::{Args, ValueEnum};
use sterna::ADAPTER_CONFIG;
use sterna_convert::{
    AdapterPackageOptions, GgufOptions, GroupVersion, GroupVersions, ManifestDetail,
    PackageOptions, PackageSummary, Precisions, Statements, Target, Targets, adapter_to_package,
    to_gguf, to_package,
};
use sterna_delivery::hash::Algorithm;
#[cfg(feature = "stores")]
use sterna_delivery::push::{self, PackageFiles};
use sterna_engine::plan::PlanOptions;
use sterna_format::I2sLayout;
use sterna_format::rdrr::RuntimeOptimizations;
use sterna_kernels::Exec;

use crate::args::{i2s_layout, isa, thread_count};
#[cfg(feature = "stores")]
use crate::conversion::Staging;
use crate::conversion::notify;
use crate::device::kernel_hints::read_hints;
use crate::output::{self, Bytes};
use crate::size::n_bytes;
#[cfg(feature = "stores")]
use crate::verbs;
use crate::{machine, model};

/// Make an RDRR package or a GGUF file from a model
///
/// The same model and options give the same bytes, on any number of threads. The output gets its name only
/// once it is complete. An interrupted conversion to a package resumes when it is started again; one to a
/// GGUF file starts over.
#[derive(Debug, Args)]
#[command(
    after_help = "Examples:\n  sterna convert Llama-3.2-1B/ llama-rdrr --quantize q4_k_m --embeddings f16\n  \
                  sterna convert llama-rdrr llama.gguf\n  \
                  sterna convert llama.gguf s3://models/llama"
)]
pub(crate) struct Convert {
    /// GGUF file (or the first of a split set), Hugging Face folder, package, or PEFT folder of an adapter
    #[arg(value_name = "MODEL")]
    model: String,

    /// Folder or GGUF file to write, which must not exist; or where to push the package to, as `sterna push` says
    #[arg(value_name = "OUT")]
    out: PathBuf,

    /// Output format [default: gguf if OUT ends in .gguf, else package]
    #[arg(long, value_enum, value_name = "FORMAT")]
    to: Option<To>,

    /// Type of the matrices in the layers: keep, q4_k_m, q4_k, q5_k, q6_k, q8_0, q4_0, tq2_0, tq1_0, i2_s,
    /// f16, bf16 or f32. Ternary ones are stored as I2_S unless a type that represents them exactly is
    /// requested
    #[arg(long, value_name = "TYPE", value_parser = str::parse::<Target>, default_value = "keep")]
    quantize: Target,

    /// Type of the embedding table [default: keep]
    #[arg(long, value_name = "TYPE", value_parser = str::parse::<Target>)]
    embeddings: Option<Target>,

    /// Type of the output head [default: that of the table]. For a model without a separate one, which uses
    /// its table, the type of the table unless --embeddings is given
    #[arg(long, value_name = "TYPE", value_parser = str::parse::<Target>)]
    head: Option<Target>,

    /// Maximum bytes of a package's shard, such as 64MiB
    #[arg(long, value_name = "SIZE", value_parser = shard_size, default_value = "64MiB")]
    shard_size: NonZero<u64>,

    /// Hash algorithm of a package's shards and groups
    #[arg(long, value_name = "ALGORITHM", default_value = "sha256")]
    hash: Algorithm,

    /// Name of the package [default: the name of the model and its types], or of the model in a GGUF file
    /// [default: its name]
    #[arg(long, value_name = "NAME", value_parser = NonEmptyStringValueParser::new())]
    id: Option<String>,

    #[command(flatten)]
    manifest: ManifestFlags,

    /// Threads to compute with [default: one for each physical core available]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    jobs: Option<NonZero<usize>>,

    /// Layout of the source's I2_S weights, which GGUF files don't say
    #[arg(long, value_parser = i2s_layout(), default_value = I2sLayout::NAMES[0], hide_short_help = true)]
    i2s_layout: I2sLayout,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// What the manifest of a package says besides what was converted. What isn't given is kept, if the source is
/// a package.
#[derive(Debug, Args)]
#[command(next_help_heading = "Manifest of a package")]
struct ManifestFlags {
    /// JSON file with hints for running the model (`runtimeOptimizations`)
    #[arg(long, value_name = "FILE")]
    hints: Option<PathBuf>,

    /// Kernel variant preferred for an operation, such as matmul=f32; may be given several times
    #[arg(long, value_name = "OP=VARIANT", value_parser = kernel_hint)]
    kernel_hint: Vec<(String, String)>,

    /// Semantic version of a component group, such as layer.0=1.1.0, or of all of them; may be given several
    /// times [default: 1.0.0]
    #[arg(long, value_name = "[GROUP=]VERSION", value_parser = str::parse::<GroupVersion>)]
    group_version: Vec<GroupVersion>,

    /// KV cache to run the model with, unless --cache says otherwise there
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "f16", "q8_0"])]
    kv_cache: Option<String>,

    /// Activations to run the model with, unless --activations says otherwise there
    #[arg(long, value_name = "TYPE", value_parser = ["int8", "f32"])]
    activations: Option<String>,

    /// Precision of arithmetic to run the model with: a hint
    #[arg(long, value_name = "TYPE", value_parser = ["f32", "f16"])]
    compute: Option<String>,

    /// full has the tensor map inline and hashes of blocks and tensors; compact has neither: a few kilobytes,
    /// and shards that can only be verified whole
    #[arg(long = "manifest", value_enum, value_name = "DETAIL", default_value_t)]
    detail: Detail,
}

/// How much a manifest has besides what is needed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Detail {
    #[default]
    Full,
    Compact,
}

impl ManifestFlags {
    /// The first flag that is given.
    fn given(&self) -> Option<&'static str> {
        [
            (self.hints.is_some(), "--hints"),
            (!self.kernel_hint.is_empty(), "--kernel-hint"),
            (!self.group_version.is_empty(), "--group-version"),
            (self.kv_cache.is_some(), "--kv-cache"),
            (self.activations.is_some(), "--activations"),
            (self.compute.is_some(), "--compute"),
            (self.detail != Detail::Full, "--manifest"),
        ]
        .into_iter()
        .find_map(|(is_given, flag)| is_given.then_some(flag))
    }

    fn detail(&self) -> ManifestDetail {
        match self.detail {
            Detail::Full => ManifestDetail::Full,
            Detail::Compact => ManifestDetail::Compact,
        }
    }

    fn statements(self) -> Result<Statements> {
        let hints = match &self.hints {
            None => RuntimeOptimizations::default(),
            Some(path) => read_hints(path).context("--hints")?,
        };
        Ok(Statements {
            hints: hints.overridden_by(&RuntimeOptimizations {
                preferred_kernels: self.kernel_hint,
                ..RuntimeOptimizations::default()
            }),
            versions: GroupVersions::new(self.group_version),
            precisions: Precisions {
                kv_cache: self.kv_cache,
                activations: self.activations,
                compute: self.compute,
            },
        })
    }
}

/// Parses an operation and a kernel variant.
fn kernel_hint(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((operation, variant)) if !operation.is_empty() && !variant.is_empty() => {
            Ok((operation.to_owned(), variant.to_owned()))
        }
        _ => Err("expected an operation and a kernel variant, such as matmul=f32".to_owned()),
    }
}

/// Output formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum To {
    /// A folder with a manifest and shards
    Package,
    /// One file, also for llama.cpp and the like
    Gguf,
}

impl To {
    /// That of `out`, by its name.
    fn of(out: &Path) -> To {
        match out.extension() {
            Some(extension) if extension.eq_ignore_ascii_case("gguf") => To::Gguf,
            _ => To::Package,
        }
    }
}

/// Smallest shard: the alignment of tensors.
const MIN_SHARD: u64 = 4096;

/// Parses the size of a shard.
fn shard_size(text: &str) -> Result<NonZero<u64>, String> {
    n_bytes(text)
        .ok()
        .filter(|n| n.get().is_multiple_of(MIN_SHARD))
        .ok_or_else(|| format!("expected a multiple of {MIN_SHARD} bytes, such as 64MiB"))
}

/// Where a package goes.
enum Output {
    /// To a folder, or a file.
    Path(PathBuf),
    /// To a registry or an object store, by way of a folder.
    #[cfg(feature = "stores")]
    Target { address: String, staging: Staging },
}

impl Output {
    fn of(out: &Path, to: To) -> Result<Output> {
        let Some(address) = out.to_str().filter(|out| model::is_address(out)) else {
            return Ok(Output::Path(out.to_owned()));
        };
        #[cfg(feature = "stores")]
        {
            push::check_target(address)?;
            if to == To::Gguf {
                bail!("{address}: expected a package to push, found --to gguf");
            }
            let staging = Staging::lock(&format!("push:{address}"))?;
            // Of a push that was interrupted. The same bytes are made again, and those that were sent aren't again.
            staging.clear()?;
            let address = address.to_owned();
            Ok(Output::Target { address, staging })
        }
        #[cfg(not(feature = "stores"))]
        {
            let _ = to;
            bail!("{address}: expected a folder or a file, found an address");
        }
    }

    /// The folder or the file that is written.
    fn path(&self) -> &Path {
        match self {
            Output::Path(path) => path,
            #[cfg(feature = "stores")]
            Output::Target { staging, .. } => &staging.folder,
        }
    }

    /// Brings the package to where it goes, and prints the result.
    fn finish(self, summary: &PackageSummary, as_json: bool) -> Result<()> {
        match self {
            Output::Path(_) => say(summary, as_json),
            #[cfg(feature = "stores")]
            Output::Target { address, staging } => {
                let files = PackageFiles::folder(&staging.folder);
                let pushed = verbs::push::push(&files, &address, PARALLEL_FILES)?;
                staging.clear()?;
                if as_json {
                    let summary = PackageSummary {
                        package: address.into(),
                        ..summary.clone()
                    };
                    let pushed = verbs::push::Report::of(&pushed);
                    return output::json(&Converted { summary, pushed });
                }
                describe(summary);
                output::line(verbs::push::in_words(&pushed))
            }
        }
    }
}

/// Files that are sent at a time.
#[cfg(feature = "stores")]
const PARALLEL_FILES: NonZero<u8> = NonZero::new(4).expect("it isn't zero");

/// A package that was made and pushed, for programs.
#[cfg(feature = "stores")]
#[derive(serde::Serialize)]
struct Converted {
    #[serde(flatten)]
    summary: PackageSummary,
    pushed: verbs::push::Report,
}

impl Convert {
    pub(crate) fn run(self) -> Result<()> {
        let to = self.to.unwrap_or_else(|| To::of(&self.out));
        let out = Output::of(&self.out, to)?;
        let folder = Path::new(&self.model);
        if folder.join(ADAPTER_CONFIG).exists() {
            if to == To::Gguf {
                let model = &self.model;
                bail!("{model}: expected a model to make a GGUF file of, found an adapter");
            }
            let adapter = model::open_adapter(folder)?;
            let options = AdapterPackageOptions {
                shard_size: self.shard_size.get(),
                algorithm: self.hash,
                model_id: self.id,
                detail: self.manifest.detail(),
                statements: self.manifest.statements()?,
            };
            let summary = adapter_to_package(&adapter, &self.model, out.path(), &options)?;
            return out.finish(&summary, self.json);
        }
        let files = model::open(&self.model)?;
        let n_threads = self
            .jobs
            .map_or_else(machine::default_threads, NonZero::get);
        let exec = Arc::new(Exec::new(n_threads, isa()?));
        let plan = PlanOptions {
            i2s_layout: self.i2s_layout,
        };
        let targets = Targets {
            weights: self.quantize,
            embeddings: self.embeddings,
            head: self.head,
        };
        match to {
            To::Package => {
                let options = PackageOptions {
                    plan,
                    targets,
                    shard_size: self.shard_size.get(),
                    algorithm: self.hash,
                    model_id: self.id,
                    detail: self.manifest.detail(),
                    statements: self.manifest.statements()?,
                    n_verify_threads: machine::default_threads(),
                    hash_on_threads: true,
                };
                let summary = to_package(&files, out.path(), &options, exec, &notify())?;
                out.finish(&summary, self.json)
            }
            To::Gguf => {
                if let Some(flag) = self.manifest.given() {
                    bail!(
                        "{flag}: expected a package, which has a manifest, found the GGUF file {}",
                        self.out.display()
                    );
                }
                let options = GgufOptions {
                    plan,
                    targets,
                    name: self.id,
                    n_verify_threads: machine::default_threads(),
                };
                let summary = to_gguf(&files, &self.out, &options, exec, &notify())?;
                if self.json {
                    return output::json(&summary);
                }
                output::note(format_args!(
                    "{}: {} tensors, {}",
                    summary.architecture,
                    summary.n_tensors,
                    Bytes(summary.size),
                ));
                output::line(summary.file.display())
            }
        }
    }
}

/// Prints the result of a conversion.
fn say(summary: &PackageSummary, as_json: bool) -> Result<()> {
    if as_json {
        return output::json(summary);
    }
    describe(summary);
    output::line(summary.package.display())
}

/// Says what a package has.
fn describe(summary: &PackageSummary) {
    let resumed = match summary.n_resumed {
        0 => String::new(),
        n => format!(", {n} of them from an interrupted run"),
    };
    output::note(format_args!(
        "{}: {} tensors, {} in {}{resumed}",
        summary.model_id,
        summary.n_tensors,
        Bytes(summary.total_size),
        output::counted(summary.n_shards, "shard"),
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_hints_are_read() {
        let hint = |operation: &str, variant: &str| Ok((operation.into(), variant.into()));
        assert_eq!(kernel_hint("matmul=q4_fused"), hint("matmul", "q4_fused"));
        for text in ["", "matmul", "=f32", "matmul="] {
            assert!(kernel_hint(text).is_err(), "{text}");
        }
    }

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
