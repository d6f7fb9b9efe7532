//! `sterna cp`: a second name for a model in the store.

use anyhow::{Result, bail};
use clap::Args;
use sterna::native::BUILTIN;

use crate::{output, pull};

/// Give a model in the store a second name
///
/// Both share their files; removing one leaves the other. With `sterna remove NAME` after it, this renames.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  sterna cp tiny tiny-before-update")]
pub(crate) struct Cp {
    /// Name of the model, as `sterna list` shows it
    #[arg(value_name = "NAME")]
    name: String,

    /// Second name, which no model has
    #[arg(value_name = "NEW")]
    new: String,
}

impl Cp {
    pub(crate) fn run(self) -> Result<()> {
        let Cp { name, new } = self;
        let store = pull::store()?;
        let model = store.model(&name)?;
        if new == BUILTIN {
            bail!("{new}: expected another name, found that of the model inside this program");
        }
        // While this is held, nothing else takes the name.
        let pull = store.pull(&new)?;
        let models = store.list()?;
        let taken = models.iter().find(|model| model.name == new);
        if let Some(taken) = taken {
            bail!(
                "{new}: expected a name that no model has, found the model {}",
                taken.name
            );
        }
        pull.publish(model.entry())?;
        output::line(format_args!("{new}: the same as {name}"))
    }
}
