//! The list of keys that are believed: `trust.json` in the folder for settings.

use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use sterna_delivery::sign::{PublicKey, TrustList};
use tempfile::NamedTempFile;

use crate::folders;

#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    keys: Vec<StoredKey>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredKey {
    name: String,
    key: String,
}

/// Where the list is.
pub(crate) fn path() -> Result<PathBuf> {
    Ok(folders::config()?.join("trust.json"))
}

/// The list; empty if there is none.
///
/// A list that can't be read is an error and not an empty one: what it would have refused must not pass.
pub(crate) fn load(path: &Path) -> Result<TrustList> {
    let place = path.display();
    let text = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(TrustList::default()),
        Err(error) => return Err(error).with_context(|| format!("{place}: cannot read")),
    };
    let stored: Stored =
        serde_json::from_str(&text).with_context(|| format!("{place}: expected a trust list"))?;
    let mut list = TrustList::default();
    for (i, entry) in stored.keys.into_iter().enumerate() {
        let key =
            PublicKey::parse(&entry.key).with_context(|| format!("{place}: keys[{i}].key"))?;
        let before = list.insert(entry.name, key);
        ensure!(
            before.is_none(),
            "{place}: keys[{i}].name: the same as that of another key"
        );
    }
    Ok(list)
}

/// Writes the list, wholly or not at all.
pub(crate) fn save(path: &Path, list: &TrustList) -> Result<()> {
    let keys = list.iter().map(|(name, key)| StoredKey {
        name: name.to_owned(),
        key: key.to_string(),
    });
    let stored = Stored {
        keys: keys.collect(),
    };
    let text = serde_json::to_string_pretty(&stored).context("cannot write the list as JSON")?;
    let folder = path.parent().context("the trust list lies in a folder")?;
    let write = || -> io::Result<()> {
        fs::create_dir_all(folder)?;
        let mut file = NamedTempFile::new_in(folder)?;
        writeln!(file, "{text}")?;
        file.as_file().sync_all()?;
        file.persist(path)?;
        Ok(())
    };
    write().with_context(|| format!("{}: cannot write", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "RWQf6LRCGA9i53mlYecO4IzT51TGPpvWucNSCh1CBM0QTaLn73Y7GFO3";

    #[test]
    fn a_list_survives_its_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("new/trust.json");
        assert_eq!(load(&path).unwrap(), TrustList::default());
        let mut list = TrustList::default();
        list.insert("frank", PublicKey::parse(KEY).unwrap());
        save(&path, &list).unwrap();
        assert_eq!(load(&path).unwrap(), list);
    }

    #[test]
    fn a_list_that_cannot_be_read_is_not_an_empty_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trust.json");
        let twice =
            format!(r#"{{"keys": [{{"name":"a","key":"{KEY}"}},{{"name":"a","key":"{KEY}"}}]}}"#);
        for (text, message) in [
            ("", "expected a trust list"),
            (r#"{"keys": [{"name": "a", "key": "x"}]}"#, "keys[0].key"),
            (&twice, "the same as"),
        ] {
            fs::write(&path, text).unwrap();
            let error = format!("{:#}", load(&path).unwrap_err());
            assert!(
                error.contains(message) && error.contains("trust.json"),
                "{error}"
            );
        }
    }
}
