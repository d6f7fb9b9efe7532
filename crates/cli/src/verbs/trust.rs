//! `sterna trust`: whose signatures are trusted.

use std::path::Path;

use anyhow::{Context, Result};
use clap::Args;
use clap::builder::NonEmptyStringValueParser;
use serde::Serialize;
use sterna_delivery::sign::PublicKey;

use crate::{output, trust};

const EXAMPLE: &str = "Example:
  sterna trust
  sterna trust alice RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3
  sterna trust bob bob.pub
  sterna trust --remove alice";

/// List, add or remove trusted keys
///
/// A signed package is used only if it is signed with one of them.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Trust {
    /// Name of the key; a key with that name is replaced
    #[arg(requires = "key", value_parser = NonEmptyStringValueParser::new())]
    name: Option<String>,

    /// The key: 56 characters, or the .pub file that holds it
    #[arg(requires = "name", value_parser = NonEmptyStringValueParser::new())]
    key: Option<String>,

    /// Remove the key with that name
    #[arg(long, value_name = "NAME", conflicts_with = "name")]
    remove: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Listed {
    name: String,
    id: String,
    key: String,
}

impl Trust {
    pub(crate) fn run(self) -> Result<()> {
        let path = trust::path()?;
        let mut list = trust::load(&path)?;
        if let (Some(name), Some(key)) = (&self.name, &self.key) {
            list.insert(name, public_key(key)?);
            trust::save(&path, &list)?;
        } else if let Some(name) = &self.remove {
            list.remove(name)
                .with_context(|| format!("{}: no key is named {name:?}", path.display()))?;
            trust::save(&path, &list)?;
        }
        let keys = list.iter().map(|(name, key)| Listed {
            name: name.to_owned(),
            id: key.id().to_string(),
            key: key.to_string(),
        });
        let keys: Vec<_> = keys.collect();
        if self.json {
            return output::json(&keys);
        }
        if keys.is_empty() {
            output::note("no keys are trusted yet");
            return Ok(());
        }
        let rows: Vec<_> = keys
            .iter()
            .map(|key| (key.name.as_str(), key.key.clone()))
            .collect();
        output::line(output::table(&rows))
    }
}

/// The key itself, or the one in the file of that name.
fn public_key(text: &str) -> Result<PublicKey> {
    let as_given = match PublicKey::parse(text) {
        Ok(key) => return Ok(key),
        Err(error) => error,
    };
    if !Path::new(text).exists() {
        return Err(as_given).with_context(|| format!("{text:?} is no file either"));
    }
    let file = trust::read_key_file(Path::new(text))?;
    PublicKey::parse(&file).with_context(|| text.to_owned())
}
