//! What can be wrong with keys and signatures.

use super::KeyId;

/// What is wrong with a key or a signature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// Text that is no signature file.
    #[error("signature: {0}")]
    Malformed(String),
    /// A signature by a key that is not on the trust list.
    #[error("signed with the key {key}, which is not trusted: the trust list has {listed}")]
    UnknownKey {
        /// Whose signature it claims to be.
        key: KeyId,
        /// The keys on the list, for people.
        listed: String,
    },
    /// A signature that the key it names did not make of these bytes, or whose trusted comment was altered.
    #[error(
        "the signature with the key {key} ({name:?}) does not fit: the signed file or the signature was altered"
    )]
    Bad {
        /// Whose signature it claims to be.
        key: KeyId,
        /// Under what name the list has that key.
        name: String,
    },
    /// Text that is no public key.
    #[error("public key: {0}")]
    PublicKey(String),
    /// Text that is no secret key, or a password that does not open it.
    #[error("secret key: {0}")]
    SecretKey(String),
    /// A comment that a signature file can't hold.
    #[error("trusted comment: expected one line without control characters, found {0:?}")]
    Comment(String),
}
