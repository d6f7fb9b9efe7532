//! Why a push failed.

use std::io;

use sterna_format::delta::DeltaListError;

use super::TargetError;
use crate::{
    artifact::ArtifactError,
    hash::{Digest, Mismatch},
    package::PackageError,
};

/// Why a package could not be pushed. What was sent stays there, and the next push sends the rest.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PushError {
    /// An address to which nothing can be pushed.
    #[error("{address:?}: expected {TARGETS} to push to")]
    NotATarget {
        /// The address.
        address: String,
    },
    /// An address that is pinned by a digest.
    #[error("{address}: expected a tag to push to, found a digest, which stands for what is there")]
    Pinned {
        /// The address.
        address: String,
    },
    /// An object store that can't be used.
    #[cfg(feature = "object-store")]
    #[error(transparent)]
    Bucket(#[from] crate::source::BucketError),
    /// A registry that can't be used.
    #[cfg(feature = "oci")]
    #[error(transparent)]
    Registry(#[from] crate::source::RegistryError),
    /// What is to be pushed is no package, or not one that can be trusted.
    #[error(transparent)]
    Package(#[from] PackageError),
    /// A file of the package can't be read.
    #[error("{file}: cannot read")]
    File {
        /// The file.
        file: String,
        /// The system's message.
        source: io::Error,
    },
    /// A file of the package with other bytes than its manifest says. Nothing of it was stored.
    #[error("{file}: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// Both digests, or sizes.
        problem: Mismatch,
    },
    /// A list of deltas that can't be read.
    #[error("{file}: {problem}")]
    Deltas {
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: DeltaListError,
    },
    /// A package that makes too large an artifact.
    #[error("{0}; larger shards make fewer layers (`sterna convert --shard-size`)")]
    Artifact(#[from] ArtifactError),
    /// The target doesn't take it.
    #[error("{target}: {what}: {problem}")]
    Target {
        /// The target.
        target: String,
        /// What it was asked for.
        what: String,
        /// What it said.
        problem: String,
    },
    /// Another package was pushed to the same place meanwhile.
    #[error(
        "{target}: another push ended there meanwhile{}; this package's files are there, and the same command, given \
         again, puts it in the place of the other", found.map(|d| format!(", of sha256:{d}")).unwrap_or_default()
    )]
    Conflict {
        /// The target.
        target: String,
        /// The digest of what is there now, if it is known.
        found: Option<Digest>,
    },
    /// It was cancelled.
    #[error("cancelled")]
    Cancelled,
}

/// What can be pushed to.
const TARGETS: &str = match (cfg!(feature = "object-store"), cfg!(feature = "oci")) {
    (true, true) => "oci://, s3://, gs:// or az://",
    (true, false) => "s3://, gs:// or az://",
    _ => "oci://",
};

impl PushError {
    /// That of `target`, which was asked for `what`.
    pub(super) fn of(target: &str, what: &str, error: TargetError) -> Self {
        let target = target.to_owned();
        match error {
            TargetError::Refused(problem) | TargetError::Failed(problem) => Self::Target {
                target,
                what: what.to_owned(),
                problem,
            },
            TargetError::Conflict(found) => Self::Conflict { target, found },
            TargetError::Damaged(problem) => Self::Damaged {
                file: what.to_owned(),
                problem,
            },
            TargetError::Cancelled => Self::Cancelled,
        }
    }
}
