//! `sterna worker`: lets another program drive a model.

use anyhow::Result;
use clap::Args;

use crate::{output, worker};

const AFTER_HELP: &str =
    "STERNA_SEED in the environment, a number, makes the choice of tokens repeatable.

Exit codes: 0 if the driver ended it, 1 if the model can't be opened or computed,
2 if the arguments or the input are wrong.

Example:
  sterna worker --print-config builtin
  printf '2\\n1\\n0\\n0\\n1\\n1\\n0\\n8\\n1\\n53\\n0\\n' |
    sterna worker builtin --config $(sterna worker --print-config builtin)";

/// Serve token ids to another program, over standard input and output
///
/// With --config, requests are lines in the order of version 1 of the protocol; without it, the
/// configuration and each request are blocks of key=value lines. docs/worker.md describes both.
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Worker {
    /// Model to serve
    #[arg(required_unless_present = "protocol_version")]
    model: Option<String>,

    /// Apply the adapter in the folder of the model, qmodel.lora; must precede --config
    #[arg(long)]
    lora: bool,

    /// Print the arguments after --config for this model, and exit
    #[arg(long, conflicts_with_all = ["lora", "config"])]
    print_config: bool,

    /// Print the version of the protocol, and exit
    #[arg(long, conflicts_with_all = ["lora", "print_config", "config"])]
    protocol_version: bool,

    /// The model's configuration in the order of version 1; all arguments that follow belong to it
    #[arg(long, value_name = "ARGS", num_args = 0.., allow_hyphen_values = true)]
    config: Option<Vec<String>>,
}

impl Worker {
    pub(crate) fn run(self) -> Result<()> {
        let Some(model) = self.model.filter(|_| !self.protocol_version) else {
            return output::line(worker::PROTOCOL_VERSION);
        };
        if self.print_config {
            return output::line(worker::describe(&model)?);
        }
        worker::serve(&model, self.lora, self.config.as_deref())
    }
}
