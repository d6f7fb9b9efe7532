//! Packages as OCI artifacts: what registries have, and OCI image layouts in folders and object stores.
//!
//! An artifact is a manifest that names layers by their SHA-256; the layers of a package are its files, as they are.
//! The media types are those of CNCF's ModelPack, and what others wrote is read whatever its media types are, as long
//! as layers have names and aren't archives. Nothing here does I/O.

mod read;
mod write;

use sterna_format::digest::{Algorithm, Digest, DigestError};

pub(crate) use self::{
    read::{Artifact, Found, parse},
    write::{File, describe, index_of},
};

/// The media type of manifests.
pub(crate) const MANIFEST_TYPE: &str = "application/vnd.oci.image.manifest.v1+json";
/// The media type of lists of manifests.
pub(crate) const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// What Docker calls a manifest with the same fields.
pub(crate) const DOCKER_MANIFEST_TYPE: &str =
    "application/vnd.docker.distribution.manifest.v2+json";
/// What Docker calls a list of manifests.
pub(crate) const DOCKER_INDEX_TYPE: &str =
    "application/vnd.docker.distribution.manifest.list.v2+json";

/// The file of an image layout that says that it is one.
pub(crate) const LAYOUT_FILE: &str = "oci-layout";
/// Its text.
pub(crate) const LAYOUT: &str = r#"{"imageLayoutVersion":"1.0.0"}"#;
/// The file of an image layout that names its manifests.
pub(crate) const INDEX_FILE: &str = "index.json";

/// The largest manifest that is read or written: what registries have to accept.
pub(crate) const MAX_MANIFEST_BYTES: usize = 4 << 20;
/// The most layers of one.
pub(crate) const MAX_LAYERS: usize = 16 << 10;

/// The annotation that ModelPack names a layer's file by.
const FILE_PATH: &str = "org.cncf.model.filepath";
/// The one that ORAS names it by.
const TITLE: &str = "org.opencontainers.image.title";

/// What is wrong with an artifact. `place` is the path of the value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ArtifactError {
    /// Not JSON, or without what a manifest has.
    #[error("expected an OCI manifest: {problem}")]
    NotAManifest {
        /// The parser's message.
        problem: String,
    },
    /// More bytes than a manifest may have.
    #[error("expected an OCI manifest of at most {MAX_MANIFEST_BYTES} bytes, found {found}")]
    TooLarge {
        /// Bytes it has.
        found: usize,
    },
    /// More layers than a manifest may have.
    #[error("layers: expected at most {MAX_LAYERS}, found {found}")]
    TooManyLayers {
        /// Their number.
        found: usize,
    },
    /// A digest that can't be verified.
    #[error("{place}: expected sha256: and 64 hexadecimal digits, found {found:?}")]
    Digest {
        /// Where.
        place: String,
        /// What is there, shortened.
        found: String,
    },
    /// A list of manifests of which none is to be preferred.
    #[error("expected one model, found a list of {found} manifests")]
    Ambiguous {
        /// Their number.
        found: usize,
    },
    /// A list within a list.
    #[error("expected a manifest, found a list of them within a list")]
    Nested,
    /// Two layers with one name.
    #[error("{place}: expected another name than that of an earlier layer, found {name:?}")]
    Twice {
        /// Where.
        place: String,
        /// The name.
        name: String,
    },
}

/// The digest that `text` gives, as OCI writes it: `sha256:` and 64 digits.
pub(crate) fn parse_digest(place: &str, text: &str) -> Result<Digest, ArtifactError> {
    let digest = |hex| -> Result<Digest, DigestError> { Digest::from_hex(Algorithm::Sha256, hex) };
    let digest = text.strip_prefix("sha256:").map(digest);
    digest
        .and_then(Result::ok)
        .ok_or_else(|| ArtifactError::Digest {
            place: place.to_owned(),
            found: text.chars().take(100).collect(),
        })
}

/// The path of the blob with this digest in an image layout.
pub(crate) fn blob_path(digest: &Digest) -> String {
    format!("blobs/sha256/{digest}")
}
