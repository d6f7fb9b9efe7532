//! The list of the deltas that are beside a package.

use serde::{Deserialize, Serialize};

use super::MAX_DELTA_BYTES;
use crate::digest::{Algorithm, Digest, DigestError};
use crate::file_name::is_plain_file_name;

/// The file beside a package's manifest that lists deltas to it. The manifest says nothing of it, so that deltas
/// from further versions can be added to a package that is signed.
pub const DELTAS_FILE: &str = "deltas.json";

/// Maximum size of that file: some ten thousand deltas. Whoever writes one compares: a longer one isn't read.
pub const MAX_LIST_BYTES: usize = 4 << 20;

/// A delta that a list has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedDelta {
    /// The group's id, for people.
    pub group: String,
    /// The digest of the group that it is to be applied to.
    pub base: Digest,
    /// The digest of the group that comes out.
    pub target: Digest,
    /// The file, beside the list.
    pub file: String,
    /// Bytes of the file: at most [`MAX_DELTA_BYTES`] in a list that was read.
    pub size: u64,
    /// Their digest.
    pub hash: Digest,
}

/// What deltas there are.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeltaList {
    /// In the order of the file.
    pub deltas: Vec<ListedDelta>,
}

/// Why a list of deltas can't be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeltaListError {
    /// It is too large.
    #[error("{DELTAS_FILE}: expected at most {MAX_LIST_BYTES} bytes, found {found}")]
    TooLarge {
        /// Its bytes.
        found: usize,
    },
    /// It isn't JSON, or lacks something.
    #[error("{DELTAS_FILE}: {0}")]
    Json(#[from] serde_json::Error),
    /// It is of a version that isn't known.
    #[error("{DELTAS_FILE}: version: expected 1, found {found}")]
    Version {
        /// The version.
        found: u64,
    },
    /// What is no digest.
    #[error("{DELTAS_FILE}: deltas[{index}].{member}: {problem}")]
    Digest {
        /// Which delta.
        index: usize,
        /// Its member.
        member: &'static str,
        /// What is wrong with it.
        problem: DigestError,
    },
    /// A delta that is too large.
    #[error(
        "{DELTAS_FILE}: deltas[{index}].size: expected at most {MAX_DELTA_BYTES} bytes, found {found}"
    )]
    Size {
        /// Which delta.
        index: usize,
        /// Its bytes.
        found: u64,
    },
    /// A file that isn't beside the list.
    #[error(
        "{DELTAS_FILE}: deltas[{index}].file: expected the name of a file beside it, found {found:?}"
    )]
    File {
        /// Which delta.
        index: usize,
        /// The name.
        found: String,
    },
}

/// As it is written.
#[derive(Serialize, Deserialize)]
struct Written {
    version: u64,
    deltas: Vec<WrittenDelta>,
}

#[derive(Serialize, Deserialize)]
struct WrittenDelta {
    group: String,
    base: String,
    target: String,
    file: String,
    size: u64,
    hash: String,
}

impl DeltaList {
    /// Reads the list. Members that aren't known are left aside.
    ///
    /// # Errors
    ///
    /// [`DeltaListError`].
    pub fn parse(bytes: &[u8]) -> Result<DeltaList, DeltaListError> {
        if bytes.len() > MAX_LIST_BYTES {
            return Err(DeltaListError::TooLarge { found: bytes.len() });
        }
        let written: Written = serde_json::from_slice(bytes)?;
        if written.version != 1 {
            return Err(DeltaListError::Version {
                found: written.version,
            });
        }
        let deltas = written.deltas.into_iter().enumerate();
        let deltas = deltas.map(|(index, delta)| {
            let digest = |member, text: &str| {
                digest(text).map_err(|problem| DeltaListError::Digest {
                    index,
                    member,
                    problem,
                })
            };
            if !is_plain_file_name(&delta.file) {
                return Err(DeltaListError::File {
                    index,
                    found: delta.file.chars().take(255).collect(),
                });
            }
            if delta.size > MAX_DELTA_BYTES {
                return Err(DeltaListError::Size {
                    index,
                    found: delta.size,
                });
            }
            Ok(ListedDelta {
                base: digest("base", &delta.base)?,
                target: digest("target", &delta.target)?,
                hash: digest("hash", &delta.hash)?,
                group: delta.group,
                file: delta.file,
                size: delta.size,
            })
        });
        Ok(DeltaList {
            deltas: deltas.collect::<Result<_, _>>()?,
        })
    }

    /// The text of the file.
    pub fn to_json(&self) -> Vec<u8> {
        let text = |digest: &Digest| format!("{}:{digest}", digest.algorithm());
        let deltas = self.deltas.iter().map(|delta| WrittenDelta {
            group: delta.group.clone(),
            base: text(&delta.base),
            target: text(&delta.target),
            file: delta.file.clone(),
            size: delta.size,
            hash: text(&delta.hash),
        });
        let written = Written {
            version: 1,
            deltas: deltas.collect(),
        };
        let mut json = serde_json::to_vec_pretty(&written).expect("texts and numbers are JSON");
        json.push(b'\n');
        json
    }
}

/// A digest with its algorithm before it.
fn digest(text: &str) -> Result<Digest, DigestError> {
    let (algorithm, hex) = text.split_once(':').unwrap_or((text, ""));
    Digest::from_hex(algorithm.parse::<Algorithm>()?, hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one() -> DeltaList {
        let digest = |byte: &str| Digest::from_hex(Algorithm::Sha256, &byte.repeat(32)).unwrap();
        DeltaList {
            deltas: vec![ListedDelta {
                group: "layer.0".to_owned(),
                base: digest("0a"),
                target: digest("0b"),
                file: "delta_0a_0b.bin".to_owned(),
                size: 7,
                hash: digest("0c"),
            }],
        }
    }

    #[test]
    fn what_is_written_is_read() {
        assert_eq!(DeltaList::parse(&one().to_json()).unwrap(), one());
    }

    #[test]
    fn what_is_wrong_is_said() {
        let text = String::from_utf8(one().to_json()).unwrap();
        for (from, to, expected) in [
            (
                "delta_0a_0b.bin",
                "../x",
                "deltas[0].file: expected the name of a file beside it, found \"../x\"",
            ),
            (
                "sha256:0a",
                "md5:0a",
                "deltas[0].base: hash algorithm: expected sha256 or blake3, found \"md5\"",
            ),
            (
                "sha256:0b",
                "sha256:",
                "deltas[0].target: digest: expected 64",
            ),
            (
                "\"version\": 1",
                "\"version\": 2",
                "version: expected 1, found 2",
            ),
            ("\"size\"", "\"sizes\"", "missing field `size`"),
            (
                "\"size\": 7",
                "\"size\": 18446744073709551615",
                "deltas[0].size: expected at most 67108864 bytes, found 18446744073709551615",
            ),
        ] {
            let error = DeltaList::parse(text.replacen(from, to, 1).as_bytes()).unwrap_err();
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = DeltaList::parse(&vec![b' '; MAX_LIST_BYTES + 1]).unwrap_err();
        assert!(
            error.to_string().contains("at most 4194304 bytes"),
            "{error}"
        );
    }
}
