//! Whose signature a package bears, by the trust list as it is now.

use std::fmt;

use anyhow::{Context, Result, anyhow};
use sterna_delivery::sign::{SIGNATURE_FILE, SignatureError, TrustList, Verdict};
use sterna_delivery::store::{Entry, Store};
use sterna_format::rdrr::MANIFEST_FILE;

use super::MAX_FILE_BYTES;
use crate::trust;

/// The name of the key that signed `manifest`; fails if somebody else did.
pub(crate) fn check_signature(
    what: &str,
    manifest: &[u8],
    signature: Option<&str>,
) -> Result<Option<String>> {
    let list = trust::load(&trust::path()?)?;
    match list.check(manifest, signature) {
        Ok(Verdict::Unsigned) => Ok(None),
        Ok(Verdict::Signed(signer)) => Ok(Some(signer.name)),
        Err(error) => Err(refused(what, &error)),
    }
}

fn refused(what: &str, error: &SignatureError) -> anyhow::Error {
    let advice = match error {
        SignatureError::UnknownKey { .. } => {
            "; `sterna trust NAME KEY` adds a key to it: have KEY from its owner, not from where the package is"
        }
        _ => "",
    };
    anyhow!("{what}: refused: {error}{advice}")
}

/// What the signature of a model in the store is worth.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is no package, so there is nothing to be signed.
    NoPackage,
    Unsigned,
    /// Signed with the key that is trusted under this name.
    Signed(String),
    /// Signed with a key that is not trusted, with what to say of it. It is not used.
    UnknownKey(String),
    /// The signature doesn't fit, or one of the two files has changed. It is not used.
    Wrong(String),
}

impl Standing {
    /// That of the model `name` in `store`, whose files are those of `entry`.
    pub(crate) fn of(store: &Store, list: &TrustList, name: &str, entry: &Entry) -> Standing {
        let read = |file: &str| match entry.files.get(file) {
            Some(blob) => (store.read(blob, MAX_FILE_BYTES).map(Some))
                .with_context(|| format!("{name}: {file}")),
            None => Ok(None),
        };
        let files = || -> Result<_> {
            let Some(signature) = read(SIGNATURE_FILE)? else {
                return Ok(None);
            };
            let signature = String::from_utf8(signature)
                .with_context(|| format!("{name}: {SIGNATURE_FILE}: no text"))?;
            Ok(read(MANIFEST_FILE)?.map(|manifest| (manifest, signature)))
        };
        if !entry.files.contains_key(MANIFEST_FILE) {
            return Standing::NoPackage;
        }
        let (manifest, signature) = match files() {
            Ok(Some(files)) => files,
            Ok(None) => return Standing::Unsigned,
            Err(error) => return Standing::Wrong(format!("{error:#}")),
        };
        match list.check(&manifest, Some(&signature)) {
            Ok(Verdict::Signed(signer)) => Standing::Signed(signer.name),
            Ok(Verdict::Unsigned) => Standing::Unsigned,
            Err(error) => {
                let why = refused(name, &error).to_string();
                match error {
                    SignatureError::UnknownKey { .. } => Standing::UnknownKey(why),
                    _ => Standing::Wrong(why),
                }
            }
        }
    }

    /// The name of the key, if it is trusted.
    pub(crate) fn signer(&self) -> Option<&str> {
        match self {
            Standing::Signed(name) => Some(name),
            _ => None,
        }
    }

    /// Why the model is not used, if it isn't.
    pub(crate) fn refusal(&self) -> Option<&str> {
        match self {
            Standing::UnknownKey(why) | Standing::Wrong(why) => Some(why),
            _ => None,
        }
    }

    /// One word for programs.
    pub(crate) fn word(&self) -> &'static str {
        match self {
            Standing::NoPackage | Standing::Unsigned => "none",
            Standing::Signed(_) => "trusted",
            Standing::UnknownKey(_) => "unknown_key",
            Standing::Wrong(_) => "wrong",
        }
    }
}

/// A few words for people; none where there is nothing to be signed.
impl fmt::Display for Standing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Standing::NoPackage => Ok(()),
            Standing::Unsigned => f.write_str("not signed"),
            Standing::Signed(name) => write!(f, "signed by {name}"),
            Standing::UnknownKey(_) => f.write_str("signed by an unknown key"),
            Standing::Wrong(_) => f.write_str("its signature does not fit"),
        }
    }
}
