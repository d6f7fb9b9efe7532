//! `sterna doctor`: what this machine offers, and what will be used of it.

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use sterna_kernels::Isa;

use crate::machine::{self, Machine};
use crate::{args, output, place};

const EXAMPLE: &str = "Example:
  sterna doctor
  sterna doctor --json";

/// Say what this machine offers and what will be used
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
    /// Instruction set extensions that matter to the arithmetic.
    cpu_features: Vec<&'static str>,
    /// Levels that there is code for and that the machine has.
    instruction_sets: Vec<&'static str>,
    read_bandwidth_bytes_per_s: f64,
    /// Adapters, best first; software ones too.
    gpus: Vec<String>,
    used: Used,
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
            gpus: place::gpus(),
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
        let rows = [
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
                format!(
                    "{}, {} free",
                    output::Bytes(machine.memory_bytes),
                    output::Bytes(machine.free_memory_bytes)
                ),
            ),
            (
                "read bandwidth",
                format!("{:.1} GB/s", self.read_bandwidth_bytes_per_s / 1e9),
            ),
            (
                "gpu",
                match self.gpus.as_slice() {
                    [] => "none found".to_owned(),
                    gpus => gpus.join("; "),
                },
            ),
            (
                "will use",
                format!(
                    "{} with {} threads and {}",
                    self.used.backend, self.used.threads, self.used.instruction_set
                ),
            ),
        ];
        output::table(&rows)
    }
}
