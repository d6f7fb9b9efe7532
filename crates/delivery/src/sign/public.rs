//! Public keys, in minisign's format.

use std::fmt;

use base64::{Engine as _, prelude::BASE64_STANDARD};

use super::SignatureError;

/// The offset of the key id in a key and in a signature, after two letters for the algorithm.
const ID_AT: usize = 2;
/// Bytes in a public key with its algorithm and id.
const KEY_BYTES: usize = 42;

/// Distinguishes keys: eight random bytes. Anyone can make a key with any id, so it selects a key to try, and
/// says nothing about trust.
///
/// Displayed as minisign does, as 16 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 8]);

impl KeyId {
    /// The id in the base64 text of a key or a signature.
    pub(super) fn in_base64(text: &str) -> Option<Self> {
        let bytes = BASE64_STANDARD.decode(text.trim()).ok()?;
        let id = bytes.get(ID_AT..)?.first_chunk()?;
        Some(Self(*id))
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016X}", u64::from_le_bytes(self.0))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KeyId({self})")
    }
}

/// A public key: verifies what its secret key signed.
///
/// Displayed as minisign prints it, 56 characters of base64.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicKey {
    id: KeyId,
    key: minisign_verify::PublicKey,
    text: String,
}

impl PublicKey {
    /// Reads the 56 characters, or the two lines of a `.pub` file.
    pub fn parse(text: &str) -> Result<Self, SignatureError> {
        let wrong = |problem: &str| SignatureError::PublicKey(problem.to_owned());
        let mut lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let key = (lines.find(|line| !line.starts_with("untrusted comment:")))
            .ok_or_else(|| wrong("expected 56 characters of base64, found none"))?;
        let is_key = BASE64_STANDARD
            .decode(key)
            .is_ok_and(|bytes| bytes.len() == KEY_BYTES);
        let (true, Some(id), None) = (is_key, KeyId::in_base64(key), lines.next()) else {
            return Err(wrong(
                "expected 56 characters of base64, or the file that minisign makes",
            ));
        };
        Ok(Self {
            id,
            key: minisign_verify::PublicKey::from_base64(key)
                .map_err(|error| wrong(&error.to_string()))?,
            text: key.to_owned(),
        })
    }

    /// Its id.
    pub fn id(&self) -> KeyId {
        self.id
    }

    /// Two lines, as in minisign's `.pub` files.
    pub fn to_file(&self) -> String {
        format!(
            "untrusted comment: minisign public key {}\n{self}\n",
            self.id
        )
    }

    /// Whether the key made `signature` of `bytes`.
    pub(super) fn made(&self, signature: &minisign_verify::Signature, bytes: &[u8]) -> bool {
        // The older form signs the bytes instead of their digest; minisign accepts both.
        let allow_legacy = true;
        self.key.verify(bytes, signature, allow_legacy).is_ok()
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}
