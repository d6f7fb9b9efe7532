//! `sterna man`: manual pages.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use crate::output;

const EXAMPLE: &str = "Examples:
  sterna man | man -l -
  sterna man ~/.local/share/man/man1";

/// Print the manual page, or write the pages of all verbs to a folder
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Man {
    /// Folder to write the pages to: sterna.1, sterna-run.1 and so on; it is created
    #[arg(value_name = "DIR")]
    folder: Option<PathBuf>,
}

impl Man {
    pub(crate) fn run(self) -> Result<()> {
        let command = crate::command().disable_help_subcommand(true);
        let Some(folder) = self.folder else {
            let mut page = Vec::new();
            clap_mangen::Man::new(command).render(&mut page)?;
            return output::write_now(&String::from_utf8(page)?);
        };
        fs::create_dir_all(&folder)
            .and_then(|()| clap_mangen::generate_to(command, &folder))
            .with_context(|| format!("{}: cannot write", folder.display()))
    }
}
