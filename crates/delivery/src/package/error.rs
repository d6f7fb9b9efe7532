//! Problems of packages.

use sterna_format::rdrr::{MANIFEST_FILE, Problems};

use super::MAX_FILE_BYTES;
use crate::{
    fetch::PlanError,
    hash::{BlockDigestsError, Mismatch},
    sign::{SIGNATURE_FILE, SignatureError},
};

/// Why a package is refused. `from` is where it is: an address, a folder, or its name in the store.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackageError {
    /// The manifest isn't even JSON; a server that answers everything with a page has no package.
    #[error("{from}: no package: {MANIFEST_FILE}: expected JSON: {problem}")]
    NotJson {
        /// Where the package is.
        from: String,
        /// The parser's message.
        problem: serde_json::Error,
    },
    /// An invalid manifest.
    #[error("{from}: {MANIFEST_FILE}: {problem}")]
    Manifest {
        /// Where the package is.
        from: String,
        /// What is wrong with it.
        problem: Problems,
    },
    /// An invalid tensor map.
    #[error("{from}: {file}: {problem}")]
    TensorMap {
        /// Where the package is.
        from: String,
        /// The file.
        file: String,
        /// What is wrong with it.
        problem: Problems,
    },
    /// Manifest and tensor map contradict each other.
    #[error("{from}: {problem}")]
    Contradiction {
        /// Where the package is.
        from: String,
        /// The contradiction.
        problem: Problems,
    },
    /// A file other than a shard that is too large for any parser.
    #[error(
        "{from}: integrityExtensions.files.{name}.size: expected at most {MAX_FILE_BYTES} bytes, found {size}"
    )]
    FileTooLarge {
        /// Where the package is.
        from: String,
        /// The file.
        name: String,
        /// Its size by the manifest.
        size: u64,
    },
    /// A file with a name that can't be requested or stored.
    #[error("{from}: {problem}")]
    File {
        /// Where the package is.
        from: String,
        /// What is wrong with the file.
        problem: PlanError,
    },
    /// Digests of blocks that don't match their shard.
    #[error("{from}: {file}: {problem}")]
    Blocks {
        /// Where the package is.
        from: String,
        /// The shard.
        file: String,
        /// The mismatch.
        problem: BlockDigestsError,
    },
    /// A file with a wrong digest.
    #[error("{from}: {file}: {problem}")]
    Mismatch {
        /// Where the package is.
        from: String,
        /// The file.
        file: String,
        /// Both digests.
        problem: Mismatch,
    },
    /// A signature that isn't text.
    #[error("{from}: {SIGNATURE_FILE}: no text")]
    SignatureNotText {
        /// Where the package is.
        from: String,
    },
    /// A signature that is not trusted.
    #[error("{from}: refused: {problem}")]
    Signature {
        /// Where the package is.
        from: String,
        /// Why not.
        problem: SignatureError,
    },
    /// A package without a signature, where an earlier revision had one.
    #[error(
        "{from}: refused: not signed, but what the store has under this name was signed by {signer}; \
         remove that first if this is meant"
    )]
    NotSigned {
        /// Where the package is.
        from: String,
        /// Who signed the earlier revision.
        signer: String,
    },
}
