//! Digests of bytes as values: which algorithm, and its 32 bytes. Computing them is `sterna-delivery`'s.
//!
//! ```
//! use sterna_format::digest::{Algorithm, Digest};
//!
//! let hex = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
//! let digest = Digest::from_hex(Algorithm::Sha256, hex)?;
//! assert_eq!(digest.to_string(), hex);
//! # Ok::<(), sterna_format::digest::DigestError>(())
//! ```

use std::fmt;
use std::str::FromStr;

/// Bytes in a digest of either algorithm.
pub const DIGEST_BYTES: usize = 32;

/// How a digest is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub enum Algorithm {
    /// SHA-256 (FIPS 180-4), which browsers bring along.
    #[default]
    Sha256,
    /// BLAKE3 with its default output of 32 bytes.
    Blake3,
}

impl Algorithm {
    /// Both, the default of packages first.
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Blake3];

    /// Its name in manifests.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Sha256 => "sha256",
            Self::Blake3 => "blake3",
        }
    }
}

impl fmt::Display for Algorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Algorithm {
    type Err = DigestError;

    /// Reads `sha256` or `blake3`, in any case, with a hyphen before the number or without.
    fn from_str(name: &str) -> Result<Self, DigestError> {
        match name.to_ascii_lowercase().as_str() {
            "sha256" | "sha-256" => Ok(Self::Sha256),
            "blake3" | "blake-3" => Ok(Self::Blake3),
            _ => Err(DigestError::Algorithm {
                found: name.chars().take(64).collect(),
            }),
        }
    }
}

/// The digest of some bytes, and the algorithm it was made with.
///
/// Displayed as 64 lower-case hexadecimal digits, without the algorithm.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest {
    algorithm: Algorithm,
    bytes: [u8; DIGEST_BYTES],
}

/// Why text is no digest.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DigestError {
    /// Too few or too many characters.
    #[error("digest: expected {expected} hexadecimal digits, found {found} characters")]
    Length {
        /// Digits that a digest has.
        expected: usize,
        /// Characters there are.
        found: usize,
    },
    /// A character that isn't a hexadecimal digit.
    #[error("digest: expected a hexadecimal digit at character {index}, found {found:?}")]
    Digit {
        /// Where, counted from 0.
        index: usize,
        /// The character.
        found: char,
    },
    /// An unknown algorithm.
    #[error("hash algorithm: expected sha256 or blake3, found {found:?}")]
    Algorithm {
        /// The name given.
        found: String,
    },
}

impl Digest {
    /// A digest that is known already.
    pub const fn new(algorithm: Algorithm, bytes: [u8; DIGEST_BYTES]) -> Self {
        Self { algorithm, bytes }
    }

    /// Reads 64 hexadecimal digits of either case.
    pub fn from_hex(algorithm: Algorithm, hex: &str) -> Result<Self, DigestError> {
        Ok(Self::new(algorithm, parse_hex(hex)?))
    }

    /// How it was made.
    pub const fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The 32 bytes.
    pub const fn as_bytes(&self) -> &[u8; DIGEST_BYTES] {
        &self.bytes
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.bytes
            .iter()
            .try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{self}", self.algorithm)
    }
}

/// The `N` bytes that `2 * N` hexadecimal digits of either case spell.
pub fn parse_hex<const N: usize>(hex: &str) -> Result<[u8; N], DigestError> {
    let found = hex.chars().count();
    if found != 2 * N {
        return Err(DigestError::Length {
            expected: 2 * N,
            found,
        });
    }
    let mut bytes = [0; N];
    for (index, found) in hex.chars().enumerate() {
        let digit = (found.to_digit(16)).ok_or(DigestError::Digit { index, found })?;
        // A hexadecimal digit is below 16.
        bytes[index / 2] = bytes[index / 2] << 4 | digit as u8;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digests_are_read_in_either_case_and_nothing_else() {
        let hex = "00ff10".to_owned() + &"ab".repeat(29);
        let digest = Digest::from_hex(Algorithm::Blake3, &hex).unwrap();
        assert_eq!(digest.as_bytes()[..4], [0, 255, 16, 0xab]);
        assert_eq!(digest.to_string(), hex);
        let upper = Digest::from_hex(Algorithm::Blake3, &hex.to_uppercase());
        assert_eq!(upper, Ok(digest));
        let message =
            |hex: &str| Digest::from_hex(Algorithm::Sha256, hex).map_err(|e| e.to_string());
        assert_eq!(
            message(&hex[1..]),
            Err("digest: expected 64 hexadecimal digits, found 63 characters".into())
        );
        assert_eq!(
            message(&format!("{}é", &hex[1..])),
            Err("digest: expected a hexadecimal digit at character 63, found 'é'".into())
        );
        for bad in ["", &format!("{hex}0"), &hex.replace("ff", "é")] {
            assert!(Digest::from_hex(Algorithm::Sha256, bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn algorithms_by_name() {
        for (name, algorithm) in [
            ("sha256", Algorithm::Sha256),
            ("SHA-256", Algorithm::Sha256),
            ("BLAKE3", Algorithm::Blake3),
        ] {
            assert_eq!(name.parse(), Ok(algorithm));
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        assert_eq!(
            "md5".parse::<Algorithm>().map_err(|e| e.to_string()),
            Err("hash algorithm: expected sha256 or blake3, found \"md5\"".into())
        );
    }
}
