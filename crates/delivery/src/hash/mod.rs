//! What bytes must be, said in 32 bytes: digests, and the checks made of them.
//!
//! ```
//! use sterna_delivery::hash::{Algorithm, Digest};
//!
//! let digest = Digest::of(Algorithm::Sha256, b"abc");
//! assert_eq!(
//!     digest.to_string(),
//!     "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
//! );
//! assert!(digest.verify(b"abc").is_ok());
//! ```

mod blake3_variant;
mod blocks;
mod expected;

use std::{fmt, str::FromStr};

use sha2::Digest as _;

pub use self::{
    blake3_variant::Blake3Variant,
    blocks::{BlockDigests, BlockDigestsError, BlockHasher, DEFAULT_BLOCK_SIZE},
    expected::{Expected, Mismatch, Verified, Verifier},
};

/// Bytes in a digest of either algorithm.
pub const DIGEST_BYTES: usize = 32;

/// How a digest is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Algorithm {
    /// SHA-256 (FIPS 180-4), with the processor's instructions where it has them.
    Sha256,
    /// BLAKE3 with its default output of 32 bytes, with the widest vectors the processor has.
    Blake3,
}

impl Algorithm {
    /// Both, the default of packages first.
    pub const ALL: [Self; 2] = [Self::Sha256, Self::Blake3];

    /// Its name in manifests.
    pub fn name(self) -> &'static str {
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
    /// A character that is no hexadecimal digit.
    #[error("digest: expected a hexadecimal digit at character {index}, found {found:?}")]
    Digit {
        /// Where, counted from 0.
        index: usize,
        /// The character.
        found: char,
    },
    /// An algorithm this crate doesn't compute.
    #[error("hash algorithm: expected sha256 or blake3, found {found:?}")]
    Algorithm {
        /// The name given.
        found: String,
    },
}

impl FromStr for Algorithm {
    type Err = DigestError;

    fn from_str(name: &str) -> Result<Self, DigestError> {
        (Self::ALL.into_iter())
            .find(|a| name.eq_ignore_ascii_case(a.name()))
            .ok_or_else(|| DigestError::Algorithm {
                found: name.chars().take(64).collect(),
            })
    }
}

impl Digest {
    /// A digest that is known already.
    pub fn new(algorithm: Algorithm, bytes: [u8; DIGEST_BYTES]) -> Self {
        Self { algorithm, bytes }
    }

    /// The digest of `bytes`.
    pub fn of(algorithm: Algorithm, bytes: &[u8]) -> Self {
        let mut hasher = Hasher::new(algorithm);
        hasher.update(bytes);
        hasher.finish()
    }

    /// Reads 64 hexadecimal digits of either case.
    pub fn from_hex(algorithm: Algorithm, hex: &str) -> Result<Self, DigestError> {
        Ok(Self::new(algorithm, parse_hex(hex)?))
    }

    /// How it was made.
    pub fn algorithm(&self) -> Algorithm {
        self.algorithm
    }

    /// The 32 bytes.
    pub fn as_bytes(&self) -> &[u8; DIGEST_BYTES] {
        &self.bytes
    }

    /// Whether `bytes` are those the digest was made of; see [`Expected::verify`] for what a wrong
    /// BLAKE3 digest is tried as.
    ///
    /// Errors: [`Mismatch`] with both digests.
    pub fn verify(&self, bytes: &[u8]) -> Result<Verified, Mismatch> {
        Expected::Digest(*self).verify(bytes)
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(&self.bytes, f)
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{self}", self.algorithm)
    }
}

/// A digest in the making. A clone is a state to come back to.
#[derive(Clone)]
pub struct Hasher(State);

#[derive(Clone)]
enum State {
    Sha256(sha2::Sha256),
    // Fifteen times as large as the other.
    Blake3(Box<blake3::Hasher>),
}

impl Hasher {
    /// The state before the first byte.
    pub fn new(algorithm: Algorithm) -> Self {
        Self(match algorithm {
            Algorithm::Sha256 => State::Sha256(sha2::Sha256::new()),
            Algorithm::Blake3 => State::Blake3(Box::new(blake3::Hasher::new())),
        })
    }

    /// Takes the next bytes. BLAKE3 is fastest in pieces of 16 KiB and more.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Sha256(state) => state.update(bytes),
            State::Blake3(state) => {
                state.update(bytes);
            }
        }
    }

    /// The digest of all bytes taken.
    pub fn finish(self) -> Digest {
        match self.0 {
            State::Sha256(state) => Digest::new(Algorithm::Sha256, state.finalize().into()),
            State::Blake3(state) => Digest::new(Algorithm::Blake3, state.finalize().into()),
        }
    }
}

impl fmt::Debug for Hasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            State::Sha256(_) => "Hasher(sha256)",
            State::Blake3(_) => "Hasher(blake3)",
        })
    }
}

fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

fn parse_hex<const N: usize>(hex: &str) -> Result<[u8; N], DigestError> {
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

    /// The input of BLAKE3's official test vectors: bytes that count up to 250, again and again.
    pub(super) fn counting(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn sha256_gives_the_digests_of_fips_180() {
        let million = vec![b'a'; 1_000_000];
        let cases: [(&[u8], &str); 4] = [
            (
                b"",
                "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
            ),
            (
                b"abc",
                "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
            ),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
            (
                &million,
                "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0",
            ),
        ];
        for (bytes, digest) in cases {
            assert_eq!(Digest::of(Algorithm::Sha256, bytes).to_string(), digest);
        }
    }

    #[test]
    fn blake3_gives_the_digests_of_its_test_vectors() {
        // Lengths and digests from test_vectors.json of the BLAKE3 team.
        let cases = [
            (
                0,
                "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262",
            ),
            (
                1,
                "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213",
            ),
            (
                1023,
                "10108970eeda3eb932baac1428c7a2163b0e924c9a9e25b35bba72b28f70bd11",
            ),
            (
                1024,
                "42214739f095a406f3fc83deb889744ac00df831c10daa55189b5d121c855af7",
            ),
            (
                1025,
                "d00278ae47eb27b34faecf67b4fe263f82d5412916c1ffd97c8cb7fb814b8444",
            ),
            (
                102400,
                "bc3e3d41a1146b069abffad3c0d44860cf664390afce4d9661f7902e7943e085",
            ),
        ];
        for (len, digest) in cases {
            let bytes = counting(len);
            assert_eq!(
                Digest::of(Algorithm::Blake3, &bytes).to_string(),
                digest,
                "{len} bytes"
            );
        }
    }

    #[test]
    fn a_clone_is_a_state_to_come_back_to() {
        let bytes = counting(5000);
        for algorithm in Algorithm::ALL {
            let mut hasher = Hasher::new(algorithm);
            hasher.update(&bytes[..1234]);
            let kept = hasher.clone();
            hasher.update(b"other bytes");
            let mut hasher = kept;
            for part in bytes[1234..].chunks(77) {
                hasher.update(part);
            }
            assert_eq!(hasher.finish(), Digest::of(algorithm, &bytes));
        }
    }

    #[test]
    fn digests_are_read_in_either_case_and_nothing_else() {
        let digest = Digest::of(Algorithm::Blake3, b"x");
        let hex = digest.to_string();
        assert_eq!(Digest::from_hex(Algorithm::Blake3, &hex), Ok(digest));
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
        assert_eq!("SHA256".parse(), Ok(Algorithm::Sha256));
        assert_eq!(
            "md5".parse::<Algorithm>().map_err(|e| e.to_string()),
            Err("hash algorithm: expected sha256 or blake3, found \"md5\"".into())
        );
    }
}
