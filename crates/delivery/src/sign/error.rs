//! Errors of keys and signatures.

use super::KeyId;

/// What is wrong with a key or a signature.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SignatureError {
    /// Not a signature file.
    #[error("signature: {0}")]
    Malformed(String),
    /// A signature by a key that is not on the trust list.
    #[error("signed with the key {key}, which is not trusted: the trust list has {listed}")]
    UnknownKey {
        /// The key named in the signature.
        key: KeyId,
        /// The keys on the list, for display.
        listed: String,
    },
    /// A signature that doesn't match its key and these bytes, or whose trusted comment was altered.
    #[error(
        "the signature with the key {key} ({name:?}) does not fit: the signed file or the signature was altered"
    )]
    Bad {
        /// The key named in the signature.
        key: KeyId,
        /// The name of that key on the list.
        name: String,
    },
    /// Not a public key.
    #[error("public key: {0}")]
    PublicKey(String),
    /// Not a secret key, or a wrong password.
    #[error("secret key: {0}")]
    SecretKey(String),
    /// A comment that a signature file can't hold.
    #[error("trusted comment: expected one line without control characters, found {0:?}")]
    Comment(String),
}
