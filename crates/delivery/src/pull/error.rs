//! Why a pull failed, and its warnings.

use std::{fmt, io};

use sterna_format::rdrr::MANIFEST_FILE;

use super::DeltaFailure;
#[cfg(feature = "p2p")]
use crate::peers::PeersError;
#[cfg(feature = "object-store")]
use crate::source::BucketError;
#[cfg(feature = "oci")]
use crate::source::RegistryError;
use crate::{
    fetch::{Failure, Fault, FetchError},
    hash::Mismatch,
    package::{PackageError, Rejected},
    sign::SignatureError,
    source::{UrlError, hugging_face::RepositoryError},
    store::StoreError,
};

/// Why a model could not be pulled. Verified files stay, and received bytes help the next pull.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PullError {
    /// No source.
    #[error("expected a source, found none")]
    NoSource,
    /// A folder that can't be opened.
    #[error("{address}: cannot open the folder")]
    Folder {
        /// The folder.
        address: String,
        /// The system's message.
        source: io::Error,
    },
    /// A file where a folder should be.
    #[error("{address}: expected a URL or a folder, found a file")]
    NotAFolder {
        /// The address.
        address: String,
    },
    /// An address without a part that could be used as a name.
    #[error("{address}: expected a name to keep it under, found none; give one")]
    NoName {
        /// The address.
        address: String,
    },
    /// The name it would get is that of a model from elsewhere.
    #[error("{address}: the store has another model called `{name}`, from {existing}")]
    NameInUse {
        /// The address.
        address: String,
        /// The name.
        name: String,
        /// Where the model of that name came from.
        existing: String,
    },
    /// The name it would get stands for something else.
    #[error("{address}: `{name}` stands for another model already; give another name")]
    NameTaken {
        /// The address.
        address: String,
        /// The name.
        name: String,
    },
    /// Mirrors of something that has none.
    #[error("{address}: expected no mirrors of what is no package, found {found}")]
    Mirrors {
        /// The repository or file.
        address: String,
        /// Number of mirrors.
        found: usize,
    },
    /// A file is chosen of what has no choice.
    #[error(
        "{address}: expected a repository to choose the file `{file}` of, found another kind of source"
    )]
    Choice {
        /// The address.
        address: String,
        /// What was chosen.
        file: String,
    },
    /// A source that has no manifest.
    #[error("{from}: expected a package, found no {MANIFEST_FILE}")]
    NoManifest {
        /// The source.
        from: String,
    },
    /// No source has a package that is to be believed.
    #[error("no source has a package:{}", listed(reasons))]
    NoPackage {
        /// Each source, and why not.
        reasons: Vec<(String, PullError)>,
    },
    /// The package is refused.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A small file with a wrong digest.
    #[error("{file}: {problem}")]
    Mismatch {
        /// The file.
        file: String,
        /// Both digests.
        problem: Mismatch,
    },
    /// The manifest that a signature is for has been replaced.
    #[error("{name}: its {MANIFEST_FILE} has changed; try again")]
    ManifestChanged {
        /// The model.
        name: String,
    },
    /// A file of a model that is being fetched was not fetched.
    #[error("{file}: not fetched")]
    NotFetched {
        /// The file.
        file: String,
        /// Why not.
        source: Box<PullError>,
    },
    /// Fetching ended before the file arrived, and its error has already been returned.
    #[error("fetching has ended")]
    Ended,
    /// The thread that fetched panicked.
    #[error("fetching failed; its message is above")]
    Panicked,
    /// Bytes could not be fetched.
    #[error(transparent)]
    Fetch(#[from] FetchError),
    /// A repository doesn't have what is requested.
    #[error(transparent)]
    Repository(#[from] RepositoryError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// An invalid address.
    #[error(transparent)]
    Url(#[from] UrlError),
    /// An object store that can't be used.
    #[cfg(feature = "object-store")]
    #[error(transparent)]
    Bucket(#[from] BucketError),
    /// A registry that can't be used.
    #[cfg(feature = "oci")]
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// Peers that can't be found or reached.
    #[cfg(feature = "p2p")]
    #[error(transparent)]
    Peers(#[from] PeersError),
    /// Files that have no hashes, and nobody to take them from but peers.
    #[error("{from}: its manifest has no hashes for {}, and the word of peers doesn't count; add another source of it as a mirror", files.join(", "))]
    OnlyStrangers {
        /// Where the package is.
        from: String,
        /// The files.
        files: Vec<String>,
    },
    /// A part of a split set of GGUF files that isn't the first.
    #[error(transparent)]
    Gguf(#[from] sterna_format::gguf::GgufError),
}

fn listed(reasons: &[(String, PullError)]) -> String {
    let reasons = reasons.iter();
    let lines = reasons.map(|(name, error)| format!("\n  {name}: {}", without_name(name, error)));
    lines.collect()
}

/// What is wrong with the source called `name`, for a line that begins with its name.
fn without_name(name: &str, error: &PullError) -> String {
    if let PullError::Fetch(FetchError::Failed(Failure::Exhausted { blob, reasons })) = error
        && let [(source, why)] = &reasons[..]
        && source == name
    {
        return format!("`{blob}`: {why}");
    }
    strip_name(name, &WithSources(error).to_string())
}

/// `text` without the name of the source at its beginning.
fn strip_name(name: &str, text: &str) -> String {
    let rest = text
        .strip_prefix(name)
        .and_then(|rest| rest.strip_prefix(": "));
    rest.unwrap_or(text).to_owned()
}

/// An error and what caused it, in one line.
struct WithSources<'a>(&'a dyn std::error::Error);

impl fmt::Display for WithSources<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)?;
        let mut next = self.0.source();
        while let Some(cause) = next {
            write!(f, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

impl PullError {
    /// True if nobody answered, or the store can't be written, so that what is in the store already may do.
    pub fn is_unanswered(&self) -> bool {
        match self {
            Self::Fetch(error) => !matches!(error, FetchError::Cancelled),
            Self::NoManifest { .. } | Self::Store(StoreError::Unwritable { .. }) => true,
            _ => false,
        }
    }

    /// What is wrong with the signature, if that is why the model is refused.
    pub fn signature_error(&self) -> Option<&SignatureError> {
        match self {
            Self::Package(PackageError::Signature { problem, .. }) => Some(problem),
            Self::NotFetched { source, .. } => source.signature_error(),
            Self::NoPackage { reasons } => {
                let mut errors = reasons.iter().map(|(_, error)| error);
                errors.find_map(Self::signature_error)
            }
            _ => None,
        }
    }
}

/// A warning of a pull that continues.
#[derive(Debug)]
#[non_exhaustive]
pub enum Warning {
    /// A source doesn't respond; it is retried for a while. Reported once for each.
    Silent {
        /// The source.
        source: String,
        /// What is wrong with it.
        fault: Fault,
    },
    /// A source isn't asked for files.
    NotUsed {
        /// The source.
        source: String,
        /// Why not.
        reason: Rejection,
    },
    /// A peer isn't asked, as it lied before.
    Liar {
        /// The peer.
        source: String,
        /// What it sent.
        why: String,
    },
    /// That a source sent something false can't be remembered.
    Forgotten {
        /// The source.
        source: String,
        /// Why not.
        why: String,
    },
    /// Peers on the local network can't be found.
    NoPeers {
        /// Why not.
        why: String,
    },
    /// A source was dropped while files were fetched.
    GivenUp {
        /// The source.
        source: String,
        /// Why.
        why: String,
    },
    /// Files whose digests are labelled SHA-256 and are BLAKE3.
    LabelledSha256 {
        /// Where the package is.
        from: String,
        /// The first of them.
        file: String,
        /// How many more there are.
        n_more: usize,
    },
    /// A file that nothing vouches for: it has no digest, and doesn't come over a secure connection.
    Unverified {
        /// Its address.
        from: String,
    },
    /// The package has deltas, and which isn't known.
    NoDeltas {
        /// Where the package is.
        from: String,
        /// Why not.
        why: String,
    },
    /// A delta is of no use, and its group is fetched whole.
    DeltaNotUsed {
        /// The delta's file.
        file: String,
        /// The group's id.
        group: String,
        /// Why not.
        why: DeltaFailure,
    },
    /// The manifest has no digests for files other than shards.
    NoDigests {
        /// Where the package is.
        from: String,
        /// The files.
        files: Vec<String>,
    },
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent { source, fault } => {
                write!(f, "{source}: {fault}; it is asked again for a while")
            }
            Self::NotUsed { source, reason } => {
                write!(f, "{source}: not used: {}", reason.without_name(source))
            }
            Self::Liar { source, why } => write!(f, "{source}: not asked: it lied before: {why}"),
            Self::Forgotten { source, why } => {
                write!(
                    f,
                    "{source}: that it lied is forgotten after this run: {why}"
                )
            }
            Self::NoPeers { why } => write!(f, "no peers on the local network: {why}"),
            Self::GivenUp { source, why } => write!(f, "{source}: given up: {why}"),
            Self::LabelledSha256 { from, file, n_more } => {
                write!(f, "{from}: the manifest calls the hash of {file}")?;
                if *n_more > 0 {
                    write!(f, " and {n_more} more")?;
                }
                f.write_str(" SHA-256, and it is BLAKE3")
            }
            Self::Unverified { from } => write!(
                f,
                "{from}: not verified: it has no digest, and without https nothing vouches for its bytes"
            ),
            Self::NoDeltas { from, why } => {
                write!(f, "{from}: {why}; changed groups are fetched whole")
            }
            Self::DeltaNotUsed { file, group, why } => write!(
                f,
                "{file}: {}; the group {group} is fetched whole",
                WithSources(why)
            ),
            Self::NoDigests { from, files } => write!(
                f,
                "{from}: its manifest has no hashes for {}; only its shards are verified",
                files.join(", ")
            ),
        }
    }
}

/// Why a source isn't asked for the files of a package.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// It contradicts the source that is trusted, or isn't trusted itself.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// It could not be read.
    #[error("{}", WithSources(.0))]
    Failed(PullError),
}

impl Rejection {
    /// Why, for a message that has the name of the source already.
    pub(super) fn without_name(&self, source: &str) -> String {
        strip_name(source, &self.to_string())
    }

    /// What is wrong with the signature, if that is why.
    pub fn signature_error(&self) -> Option<&SignatureError> {
        match self {
            Self::Rejected(Rejected::Package(PackageError::Signature { problem, .. })) => {
                Some(problem)
            }
            Self::Failed(error) => error.signature_error(),
            _ => None,
        }
    }
}
