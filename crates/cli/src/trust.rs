//! The list of trusted keys: `trust.json` in the folder for settings.

use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, ensure};
use serde::{Deserialize, Serialize};
use sterna_delivery::package::{self, PackageError, SignatureRefusal};
use sterna_delivery::sign::{PublicKey, SignatureError, TrustList};
use sterna_delivery::write_whole;

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

/// The list of this user.
pub(crate) fn list() -> Result<TrustList> {
    load(&path()?)
}

/// The name of the trusted key that signed `manifest`, which is that of `what`; fails if another did.
pub(crate) fn check_signature(
    what: &str,
    manifest: &[u8],
    signature: Option<&str>,
) -> Result<Option<String>> {
    let checked = package::check_signature(what, &list()?, manifest, signature);
    checked.map_err(|error| match &error {
        PackageError::Signature { problem, .. } => {
            anyhow!("{error}{}", advice(problem))
        }
        _ => error.into(),
    })
}

/// A hint for messages about a signature: how the user adds a trusted key.
pub(crate) fn advice(error: &SignatureError) -> &'static str {
    match error {
        SignatureError::UnknownKey { .. } => {
            "; `sterna trust NAME KEY` adds a key to it: have KEY from its owner, not from where the package is"
        }
        _ => "",
    }
}

/// Why a model in the store is refused for its signature, and what to do.
pub(crate) fn refusal_text(refusal: &SignatureRefusal) -> String {
    let advice = match refusal {
        SignatureRefusal::Package(PackageError::Signature { problem, .. }) => advice(problem),
        _ => "",
    };
    format!("{refusal}{advice}")
}

/// The text of a file that holds a key or a password.
///
/// Errors: it can't be read, or has more than 64 KiB: a device, or a file that is none.
pub(crate) fn read_key_file(path: &Path) -> Result<String> {
    const LIMIT: u64 = 64 << 10;
    let mut text = String::new();
    let read = fs::File::open(path).and_then(|file| file.take(LIMIT + 1).read_to_string(&mut text));
    read.with_context(|| format!("{}: cannot read", path.display()))?;
    ensure!(
        text.len() as u64 <= LIMIT,
        "{}: expected at most {LIMIT} bytes, found more",
        path.display()
    );
    Ok(text)
}

/// The list in the file at `path`; empty if there is none.
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

/// Writes the list atomically.
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
    let written =
        fs::create_dir_all(folder).and_then(|()| write_whole(path, format!("{text}\n").as_bytes()));
    written.with_context(|| format!("{}: cannot write", path.display()))
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
