//! Digests, and verification by them.
//!
//! ```
//! use sterna_delivery::hash::{Algorithm, Expected, digest_of};
//!
//! let digest = digest_of(Algorithm::Sha256, b"abc");
//! assert_eq!(
//!     digest.to_string(),
//!     "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad",
//! );
//! assert!(Expected::Digest(digest).verify(b"abc").is_ok());
//! ```

mod blake3_variant;
mod blocks;
mod expected;

use std::fmt;

use sha2::Digest as _;

pub use sterna_format::digest::{Algorithm, DIGEST_BYTES, Digest, DigestError};

pub(crate) use self::expected::compare_digests;
pub use self::{
    blake3_variant::Blake3Variant,
    blocks::{BlockDigests, BlockDigestsError, BlockHasher, DEFAULT_BLOCK_SIZE},
    expected::{Expected, Mismatch, Verified, Verifier},
};

/// The digest of `bytes`.
pub fn digest_of(algorithm: Algorithm, bytes: &[u8]) -> Digest {
    let mut hasher = Hasher::new(algorithm);
    hasher.update(bytes);
    hasher.finish()
}

fn write_hex(bytes: &[u8], f: &mut fmt::Formatter<'_>) -> fmt::Result {
    bytes.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
}

/// A hasher. A clone is a state to return to.
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

    /// Hashes the next bytes. BLAKE3 is fastest in pieces of 16 KiB and more.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Sha256(state) => state.update(bytes),
            State::Blake3(state) => {
                state.update(bytes);
            }
        }
    }

    /// The digest of all bytes so far.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// The input of BLAKE3's official test vectors: repeated bytes from 0 to 250.
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
            assert_eq!(digest_of(Algorithm::Sha256, bytes).to_string(), digest);
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
                digest_of(Algorithm::Blake3, &bytes).to_string(),
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
            assert_eq!(hasher.finish(), digest_of(algorithm, &bytes));
        }
    }
}
