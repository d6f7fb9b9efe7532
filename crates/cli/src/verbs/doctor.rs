//! `sterna doctor`: what this machine offers, and what of it will be used.

use std::collections::BTreeMap;
use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use sterna_kernels::Isa;

use crate::machine::{self, Machine};
#[cfg(feature = "gpu")]
use crate::pipelines;
#[cfg(feature = "gpu")]
use crate::tuning::{self, Found, Key};
use crate::{args, output};

const EXAMPLE: &str = "Example:
  sterna doctor
  sterna doctor --json";

/// Show what this machine offers and what will be used
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Doctor {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    version: &'static str,
    #[serde(flatten)]
    machine: Machine,
    /// Instruction set extensions that are relevant to arithmetic.
    cpu_features: Vec<&'static str>,
    /// Levels that are supported by this program and the machine.
    instruction_sets: Vec<&'static str>,
    read_bandwidth_bytes_per_s: f64,
    /// Adapters, best first; software ones too.
    gpus: Vec<Gpu>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pipelines: Option<Pipelines>,
    used: Used,
}

/// A GPU, and the features kernels would use.
#[derive(Debug, Serialize)]
struct Gpu {
    /// Its number, by which `--gpus` names it.
    index: usize,
    /// Where it is plugged in, where the driver tells.
    bus: Option<String>,
    name: String,
    driver: String,
    /// `vulkan`, `metal` or `dx12`.
    api: String,
    /// `discrete`, `integrated`, `virtual`, `software` or `unknown`.
    kind: String,
    features: Vec<&'static str>,
    limits: Limits,
    /// Which kernel variants would run, by purpose.
    kernels: BTreeMap<&'static str, &'static str>,
    tuning: TuningReport,
}

/// Measurements of `sterna tune` for a GPU.
#[derive(Debug, Default, Serialize)]
struct TuningReport {
    /// Products with measured configurations.
    n_products: usize,
    /// Those of them that don't use the default.
    n_changed: usize,
    /// Days since then.
    age_days: Option<u64>,
    /// Why existing measurements are not used.
    unused: Option<String>,
}

#[derive(Debug, Serialize)]
struct Limits {
    buffer_bytes: u64,
    /// Maximum bytes of a binding; larger matrices are split.
    binding_bytes: u64,
    /// Shared memory per workgroup.
    workgroup_bytes: u32,
    /// Invocations per workgroup.
    workgroup_len: u32,
    /// The smallest and the largest subgroup; 1 without subgroups.
    subgroup_len: [u32; 2],
}

/// Compiled kernels on disk.
#[derive(Debug, Serialize)]
struct Pipelines {
    folder: PathBuf,
    n_files: usize,
    n_bytes: u64,
}

#[cfg(feature = "gpu")]
fn gpus() -> Vec<Gpu> {
    let offers = sterna_gpu::Device::all_caps(&sterna_gpu::DeviceOptions::default());
    let gpu = |(index, offer): (usize, sterna_gpu::AdapterCaps)| Gpu {
        index,
        bus: offer.info.bus.clone(),
        kernels: offer.variants().into(),
        tuning: TuningReport::new(&offer),
        features: offer.features.names(),
        limits: Limits {
            buffer_bytes: offer.limits.buffer_bytes,
            binding_bytes: offer.limits.binding_bytes,
            workgroup_bytes: offer.limits.workgroup_bytes,
            workgroup_len: offer.limits.workgroup_len,
            subgroup_len: [offer.limits.min_subgroup, offer.limits.max_subgroup],
        },
        name: offer.info.name,
        driver: offer.info.driver,
        api: format!("{:?}", offer.info.api).to_lowercase(),
        kind: format!("{:?}", offer.info.kind).to_lowercase(),
    };
    offers.into_iter().enumerate().map(gpu).collect()
}

#[cfg(feature = "gpu")]
impl TuningReport {
    fn new(offer: &sterna_gpu::AdapterCaps) -> TuningReport {
        let unused = |reason| TuningReport {
            unused: Some(reason),
            ..TuningReport::default()
        };
        match tuning::kept(&Key::new(&offer.info, offer.features)) {
            Found::Nothing => TuningReport::default(),
            Found::Kept(kept) => {
                let [n_products, n_changed] = kept.n_products();
                TuningReport {
                    n_products,
                    n_changed,
                    age_days: Some(kept.age_days()),
                    unused: None,
                }
            }
            Found::Stale(reason) => unused(format!("measured {reason}")),
            Found::Damaged(reason) => unused(reason),
        }
    }
}

#[cfg(not(feature = "gpu"))]
fn gpus() -> Vec<Gpu> {
    Vec::new()
}

#[cfg(feature = "gpu")]
fn kept_pipelines() -> Option<Pipelines> {
    match pipelines::kept() {
        Ok(kept) => Some(Pipelines {
            folder: kept.folder,
            n_files: kept.n_files,
            n_bytes: kept.n_bytes,
        }),
        Err(error) => {
            // Everything else is still useful.
            output::note(format_args!("gpu kernels kept: {error:#}"));
            None
        }
    }
}

#[cfg(not(feature = "gpu"))]
fn kept_pipelines() -> Option<Pipelines> {
    None
}

#[derive(Debug, Serialize)]
struct Used {
    backend: &'static str,
    threads: usize,
    instruction_set: &'static str,
}

impl Doctor {
    pub(crate) fn run(self) -> Result<()> {
        let machine = Machine::detect();
        let threads = machine::default_threads();
        let report = Report {
            version: env!("CARGO_PKG_VERSION"),
            cpu_features: machine::cpu_features(),
            instruction_sets: Isa::available().map(Isa::name).collect(),
            read_bandwidth_bytes_per_s: machine::read_bandwidth(
                threads,
                args::isa()?,
                machine.free_memory_bytes,
            )?,
            used: Used {
                backend: "cpu",
                threads,
                instruction_set: args::isa()?.name(),
            },
            gpus: gpus(),
            pipelines: kept_pipelines(),
            machine,
        };
        if self.json {
            output::json(&report)
        } else {
            output::line(report.text())
        }
    }
}

impl Report {
    fn text(&self) -> String {
        let machine = &self.machine;
        let cores = machine
            .physical_cores
            .map_or("unknown".to_owned(), |n| n.to_string());
        let mut rows = vec![
            ("sterna", self.version.to_owned()),
            ("system", machine.system.clone()),
            ("processor", machine.cpu.clone()),
            (
                "cores",
                format!(
                    "{cores} physical, {} threads available",
                    machine.available_threads
                ),
            ),
            ("features", self.cpu_features.join(" ")),
            ("instruction sets", self.instruction_sets.join(" ")),
            (
                "memory",
                match machine.memory_bytes {
                    0 => "the system doesn't tell".to_owned(),
                    bytes => format!(
                        "{}, {} free",
                        output::Bytes(bytes),
                        output::Bytes(machine.free_memory_bytes)
                    ),
                },
            ),
            (
                "read bandwidth",
                format!("{:.1} GB/s", self.read_bandwidth_bytes_per_s / 1e9),
            ),
        ];
        if self.gpus.is_empty() {
            rows.push(("gpu", "none found".to_owned()));
        }
        rows.extend(self.gpus.iter().flat_map(Gpu::rows));
        rows.extend(self.pipelines.iter().map(Pipelines::row));
        rows.push((
            "will use",
            format!(
                "{} with {} threads and {}",
                self.used.backend, self.used.threads, self.used.instruction_set
            ),
        ));
        output::table(&rows)
    }
}

impl Gpu {
    fn rows(&self) -> [(&'static str, String); 5] {
        let Limits {
            buffer_bytes,
            binding_bytes,
            workgroup_bytes,
            workgroup_len,
            subgroup_len: [least, most],
        } = self.limits;
        let subgroups = match (least, most) {
            (_, 1) => "no subgroups".to_owned(),
            (least, most) if least == most => format!("subgroups of {least}"),
            (least, most) => format!("subgroups of {least} to {most}"),
        };
        let kernels = self
            .kernels
            .iter()
            .map(|(what, which)| format!("{what}: {which}"));
        [
            (
                "gpu",
                format!(
                    "{}: {} ({}, {}, {}){}",
                    self.index,
                    self.name,
                    self.kind,
                    self.api,
                    self.driver,
                    match &self.bus {
                        Some(bus) => format!(" at {bus}"),
                        None => String::new(),
                    }
                ),
            ),
            ("  features", self.features.join(" ")),
            (
                "  limits",
                format!(
                    "buffers of {}, {} per binding; workgroups of {workgroup_len} with {}, {subgroups}",
                    output::Bytes(buffer_bytes),
                    output::Bytes(binding_bytes),
                    output::Bytes(workgroup_bytes.into()),
                ),
            ),
            ("  kernels", kernels.collect::<Vec<_>>().join("; ")),
            ("  tuning", self.tuning.text()),
        ]
    }
}

impl TuningReport {
    fn text(&self) -> String {
        match (self.age_days, &self.unused) {
            (_, Some(reason)) => format!("not used: {reason}; `sterna tune` measures again"),
            (None, None) => "none; `sterna tune` measures".to_owned(),
            (Some(days), None) => format!(
                "{} products, {} of them not the default, measured {}",
                self.n_products,
                self.n_changed,
                match days {
                    0 => "today".to_owned(),
                    1 => "a day ago".to_owned(),
                    days => format!("{days} days ago"),
                }
            ),
        }
    }
}

impl Pipelines {
    fn row(&self) -> (&'static str, String) {
        let kept = match self.n_files {
            0 => "nothing".to_owned(),
            n => format!("{n} files of {}", output::Bytes(self.n_bytes)),
        };
        let folder = self.folder.display();
        ("gpu kernels kept", format!("{kept} in {folder}"))
    }
}
