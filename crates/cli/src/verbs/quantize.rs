//! `sterna quantize`: the files of an engine bundle from a manifest.

use std::num::NonZero;
use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::builder::RangedI64ValueParser;
use clap::{Args, value_parser};
use serde_json::{Map, Value, json};
use sterna_convert::{AdapterOutput, QuantizeSettings, quantize};
use sterna_format::bundle::{ArchType, ModelFacts, RopeFile};
use sterna_kernels::Exec;

use crate::args::{isa, thread_count};
use crate::conversion::notify;
use crate::machine;
use crate::output::{self, Bytes};

/// Make the files of an engine bundle from a quantize manifest
///
/// When called as `trillim-quantize`, the program runs this verb.
#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  sterna quantize --manifest manifest.bin --output bundle/qmodel.tensors --arch bitnet \
                  --hidden-dim 2560 --intermediate-dim 6912 --norm-eps 1e-5"
)]
pub(crate) struct Quantize {
    /// The manifest: which ranges of which files are tensors, and how to convert each
    #[arg(long, value_name = "FILE")]
    manifest: PathBuf,

    /// The file of tensors to write
    #[arg(long, value_name = "FILE")]
    output: PathBuf,

    /// Architecture, as a number or by name: bitnet (1), llama (2), qwen35 (3), bonsai (4), bonsai_ternary
    /// (5), qwen3 (6), bonsai_image (7)
    #[arg(long)]
    arch: ArchType,

    /// Width of the residual stream, padded
    #[arg(long, value_name = "N")]
    hidden_dim: u32,

    /// Width of the FFN, padded
    #[arg(long, value_name = "N")]
    intermediate_dim: u32,

    /// Width of the residual stream in the model [default: the padded one]
    #[arg(long, value_name = "N")]
    hidden_dim_orig: Option<u32>,

    /// Width of the FFN in the model [default: the padded one]
    #[arg(long, value_name = "N")]
    intermediate_dim_orig: Option<u32>,

    /// Epsilon of the norms
    #[arg(long, value_name = "X")]
    norm_eps: f64,

    /// The embedding table is also the output head
    #[arg(long)]
    tie_embeddings: bool,

    /// Elements per head
    #[arg(long, value_name = "N")]
    head_dim: Option<u32>,

    /// Threads to compute with [default: one for each physical core available]
    #[arg(long, value_name = "N", value_parser = thread_count)]
    jobs: Option<NonZero<usize>>,

    /// Print the result as JSON
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    rope: RopeFlags,

    #[command(flatten)]
    adapter: AdapterFlags,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Rotary embedding")]
struct RopeFlags {
    /// The file of the rotary embedding to write
    #[arg(long, value_name = "FILE", requires_all = ["rope_theta", "max_pos", "head_dim"])]
    rope_output: Option<PathBuf>,

    /// Base of the rotation frequencies
    #[arg(long, value_name = "X", value_parser = positive)]
    rope_theta: Option<f64>,

    /// Context length of the model
    #[arg(long, value_name = "N", value_parser = position_count())]
    max_pos: Option<u32>,

    /// Elements of each head that are rotated, an even number [default: all]
    #[arg(long, value_name = "N")]
    rope_dim: Option<usize>,

    /// YaRN: scaling factor
    #[arg(long, value_name = "X", value_parser = positive, requires = "yarn_orig_max_pos")]
    yarn_factor: Option<f64>,

    /// YaRN: original context length
    #[arg(long, value_name = "N", value_parser = position_count(), requires = "yarn_factor")]
    yarn_orig_max_pos: Option<u32>,

    /// YaRN: rotations at which interpolation starts
    #[arg(long, value_name = "X", value_parser = positive, requires = "yarn_factor")]
    yarn_beta_slow: Option<f64>,

    /// YaRN: rotations at which extrapolation ends
    #[arg(long, value_name = "X", value_parser = positive, requires = "yarn_factor")]
    yarn_beta_fast: Option<f64>,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Adapter")]
struct AdapterFlags {
    /// The file of the manifest's adapter to write
    #[arg(long, value_name = "FILE")]
    lora_output: Option<PathBuf>,

    /// Expected rank of the adapter
    #[arg(long, value_name = "N")]
    lora_rank: Option<u32>,

    /// Expected number of query heads in the model
    #[arg(long, value_name = "N")]
    num_heads: Option<u32>,

    /// Expected number of key heads in the model
    #[arg(long, value_name = "N")]
    num_kv_heads: Option<u32>,
}

/// Parses a number that scales something.
fn positive(text: &str) -> Result<f64, String> {
    let number = text.parse().ok();
    number
        .filter(|x: &f64| x.is_finite() && *x > 0.0)
        .ok_or_else(|| "expected a number above 0".to_owned())
}

/// Parses a number of positions, which a configuration holds as a signed one.
fn position_count() -> RangedI64ValueParser<u32> {
    value_parser!(u32).range(1..=i64::from(i32::MAX))
}

impl Quantize {
    pub(crate) fn run(self) -> Result<()> {
        let rope = self.rope.file(self.head_dim)?;
        let settings = QuantizeSettings {
            model: ModelFacts {
                arch: self.arch,
                tied_embeddings: self.tie_embeddings,
                hidden_dim: self.hidden_dim,
                intermediate_dim: self.intermediate_dim,
                hidden_dim_orig: self.hidden_dim_orig.unwrap_or(self.hidden_dim),
                intermediate_dim_orig: self.intermediate_dim_orig.unwrap_or(self.intermediate_dim),
                norm_eps: self.norm_eps,
            },
            head_dim: self.head_dim,
            output: Some(self.output),
            rope,
            adapter: self.adapter.lora_output.map(|path| AdapterOutput {
                path,
                rank: self.adapter.lora_rank,
                n_heads: self.adapter.num_heads,
                n_kv_heads: self.adapter.num_kv_heads,
            }),
        };
        let n_threads = self
            .jobs
            .map_or_else(machine::default_threads, NonZero::get);
        let exec = Exec::new(n_threads, isa()?);
        let summary = quantize(&self.manifest, &settings, &exec, &notify())?;
        if self.json {
            return output::json(&summary);
        }
        output::note(format_args!(
            "{} tensors, {}",
            summary.n_tensors,
            Bytes(summary.size)
        ));
        let others = summary.rope.iter().chain(&summary.lora);
        for path in summary.output.iter().chain(others) {
            output::line(path.display())?;
        }
        Ok(())
    }
}

impl RopeFlags {
    /// The file to write, and its content.
    fn file(&self, head_dim: Option<u32>) -> Result<Option<(PathBuf, RopeFile)>> {
        let Some(path) = &self.rope_output else {
            return Ok(None);
        };
        let (Some(rope_theta), Some(max_position_embeddings), Some(head_dim)) =
            (self.rope_theta, self.max_pos, head_dim)
        else {
            bail!("--rope-output: expected --rope-theta, --max-pos and --head-dim beside it");
        };
        let head_dim = usize::try_from(head_dim)?;
        let rope_dim = match self.rope_dim {
            None => head_dim,
            Some(n) if n.is_multiple_of(2) && (2..=head_dim).contains(&n) => n,
            Some(n) => bail!(
                "--rope-dim: expected an even number from 2 to {head_dim}, the elements of a head, found {n}"
            ),
        };
        let file = RopeFile {
            rope_theta,
            head_dim,
            rope_dim,
            max_position_embeddings: usize::try_from(max_position_embeddings)?,
            rope_scaling: self.yarn(),
        };
        Ok(Some((path.clone(), file)))
    }

    /// `rope_scaling` as a configuration would have it.
    fn yarn(&self) -> Option<Map<String, Value>> {
        let mut yarn = Map::new();
        yarn.insert("rope_type".into(), json!("yarn"));
        yarn.insert("factor".into(), json!(self.yarn_factor?));
        let positions = json!(self.yarn_orig_max_pos?);
        yarn.insert("original_max_position_embeddings".into(), positions);
        for (key, beta) in [
            ("beta_slow", self.yarn_beta_slow),
            ("beta_fast", self.yarn_beta_fast),
        ] {
            if let Some(beta) = beta {
                yarn.insert(key.into(), json!(beta));
            }
        }
        Some(yarn)
    }
}
