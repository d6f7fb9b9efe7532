//! `sterna completions`: what a shell needs to complete the command line.

use anyhow::Result;
use clap::Args;
use clap_complete::Shell;

use crate::output;

const EXAMPLE: &str = "Examples:
  sterna completions bash > ~/.local/share/bash-completion/completions/sterna
  sterna completions fish > ~/.config/fish/completions/sterna.fish";

/// Print a script that completes verbs and flags in a shell
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(crate) fn run(self) -> Result<()> {
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut crate::command(), "sterna", &mut script);
        output::write_now(&String::from_utf8(script)?)
    }
}
