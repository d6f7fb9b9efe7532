//! How bytes are verified.

use std::fmt;

use sha1::Digest as _;

use sterna_format::digest::parse_hex;

use super::{Algorithm, Blake3Variant, DIGEST_BYTES, Digest, DigestError, Hasher, write_hex};

/// What is known of some bytes besides their size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Expected {
    /// Their digest.
    Digest(Digest),
    /// The object id that git gives a file of these bytes (SHA-1): protects against accidents, and against
    /// attackers as far as SHA-1 does.
    GitBlob([u8; 20]),
    /// Nothing: only their size can be checked.
    SizeOnly,
}

/// How bytes were verified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Verified {
    /// By the digest.
    Digest(Algorithm),
    /// By a digest that is labelled BLAKE3 and is the variant of [`Blake3Variant`].
    Blake3Variant,
    /// By a digest that is labelled SHA-256 and is BLAKE3: a known writer says the one and computes the other.
    LabelledSha256,
    /// By git's object id.
    GitBlob,
    /// Only by their size.
    SizeOnly,
}

/// A failed verification.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected {kind} {expected}, found {found}")]
pub struct Mismatch {
    /// What was compared.
    pub kind: &'static str,
    /// The expected value, in hexadecimal digits or bytes.
    pub expected: String,
    /// The value found.
    pub found: String,
}

impl Expected {
    /// The digest in hexadecimal digits.
    pub fn digest(algorithm: Algorithm, hex: &str) -> Result<Self, DigestError> {
        Digest::from_hex(algorithm, hex).map(Self::Digest)
    }

    /// The git object id given in 40 hexadecimal digits.
    pub fn git_blob(hex: &str) -> Result<Self, DigestError> {
        parse_hex(hex).map(Self::GitBlob)
    }

    /// Verifies `bytes`.
    ///
    /// Bytes that fail a BLAKE3 digest are tried with the variant of [`Blake3Variant`], those that fail a
    /// SHA-256 digest with BLAKE3, and the result says so. Errors: [`Mismatch`], with the result of hashing as
    /// the digest says.
    pub fn verify(&self, bytes: &[u8]) -> Result<Verified, Mismatch> {
        let mut verifier = Verifier::new(*self, bytes.len() as u64);
        verifier.update(bytes);
        (verifier.finish()).or_else(|mismatch| self.second_opinion(mismatch, bytes))
    }

    /// The result of [`verify`](Self::verify) for `bytes` whose first result was `mismatch`.
    pub fn second_opinion(&self, mismatch: Mismatch, bytes: &[u8]) -> Result<Verified, Mismatch> {
        let Some(mut second) = self.second_verifier() else {
            return Err(mismatch);
        };
        second.update(bytes);
        second.finish().map_err(|_| mismatch)
    }

    /// The second verifier for bytes that failed: the variant of a BLAKE3 digest, and BLAKE3 itself of one that
    /// is labelled SHA-256. `None` for all else.
    pub fn second_verifier(&self) -> Option<Verifier> {
        let Self::Digest(digest) = self else {
            return None;
        };
        let bytes = *digest.as_bytes();
        let state = match digest.algorithm() {
            Algorithm::Blake3 => State::Variant(Box::default(), bytes),
            Algorithm::Sha256 => State::Labelled(Hasher::new(Algorithm::Blake3), bytes),
        };
        Some(Verifier { state })
    }
}

/// One pass over bytes, in order, that ends in a result. A clone is a state to return to.
#[derive(Debug, Clone)]
pub struct Verifier {
    state: State,
}

#[derive(Clone)]
enum State {
    Digest(Hasher, Digest),
    Variant(Box<Blake3Variant>, [u8; DIGEST_BYTES]),
    Labelled(Hasher, [u8; DIGEST_BYTES]),
    GitBlob(sha1::Sha1, [u8; 20]),
    Size,
}

impl fmt::Debug for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Digest(..) => "digest",
            Self::Variant(..) => "BLAKE3 variant",
            Self::Labelled(..) => "BLAKE3 labelled SHA-256",
            Self::GitBlob(..) => "git object id",
            Self::Size => "size",
        })
    }
}

impl Verifier {
    /// The state before the first of `size` bytes. The caller ensures the size.
    pub fn new(expected: Expected, size: u64) -> Self {
        let state = match expected {
            Expected::Digest(digest) => State::Digest(Hasher::new(digest.algorithm()), digest),
            Expected::GitBlob(id) => {
                // Git hashes a header with the file.
                let mut sha1 = sha1::Sha1::new();
                sha1.update(format!("blob {size}\0"));
                State::GitBlob(sha1, id)
            }
            Expected::SizeOnly => State::Size,
        };
        Self { state }
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.state {
            State::Digest(hasher, _) => hasher.update(bytes),
            State::Variant(variant, _) => variant.update(bytes),
            State::Labelled(hasher, _) => hasher.update(bytes),
            State::GitBlob(sha1, _) => sha1.update(bytes),
            State::Size => {}
        }
    }

    /// The result for all bytes so far. Errors: [`Mismatch`] with both values.
    pub fn finish(self) -> Result<Verified, Mismatch> {
        match self.state {
            State::Digest(hasher, digest) => {
                compare_digests(&digest, &hasher.finish())?;
                Ok(Verified::Digest(digest.algorithm()))
            }
            State::Variant(variant, digest) => {
                let kind = "the variant of blake3";
                compare(kind, &digest, &variant.finish())?;
                Ok(Verified::Blake3Variant)
            }
            State::Labelled(hasher, digest) => {
                compare(
                    Algorithm::Blake3.name(),
                    &digest,
                    hasher.finish().as_bytes(),
                )?;
                Ok(Verified::LabelledSha256)
            }
            State::GitBlob(sha1, id) => {
                let found: [u8; 20] = sha1.finalize().into();
                compare("git object id", &id, &found)?;
                Ok(Verified::GitBlob)
            }
            State::Size => Ok(Verified::SizeOnly),
        }
    }
}

/// Whether `expected` was made from bytes with the digest `found`.
pub(crate) fn compare_digests(expected: &Digest, found: &Digest) -> Result<(), Mismatch> {
    let kind = expected.algorithm().name();
    compare(kind, expected.as_bytes(), found.as_bytes())
}

fn compare(kind: &'static str, expected: &[u8], found: &[u8]) -> Result<(), Mismatch> {
    if expected == found {
        return Ok(());
    }
    Err(Mismatch {
        kind,
        expected: Hex(expected).to_string(),
        found: Hex(found).to_string(),
    })
}

struct Hex<'a>(&'a [u8]);

impl fmt::Display for Hex<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write_hex(self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::digest_of;

    #[test]
    fn bytes_are_told_from_others_by_every_means() {
        let bytes = b"hello\n";
        // From `git hash-object`.
        let git = Expected::git_blob("ce013625030ba8dba906f756967f9e9ca394464a").unwrap();
        assert_eq!(git.verify(bytes), Ok(Verified::GitBlob));
        for algorithm in Algorithm::ALL {
            let expected = Expected::Digest(digest_of(algorithm, bytes));
            assert_eq!(expected.verify(bytes), Ok(Verified::Digest(algorithm)));
            assert!(expected.verify(b"hello").is_err());
        }
        assert_eq!(Expected::SizeOnly.verify(bytes), Ok(Verified::SizeOnly));
        let message = git.verify(b"").unwrap_err().to_string();
        assert_eq!(
            message,
            "expected git object id ce013625030ba8dba906f756967f9e9ca394464a, \
             found e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"
        );
    }

    #[test]
    fn the_variant_is_tried_after_blake3_and_reported() {
        let bytes = vec![7; 3000];
        let mut variant = Blake3Variant::new();
        variant.update(&bytes);
        let digest = variant.finish();
        let blake3 = Digest::new(Algorithm::Blake3, digest);
        assert_eq!(
            Expected::Digest(blake3).verify(&bytes),
            Ok(Verified::Blake3Variant)
        );
        // Other bytes fail both, and the standard digest is what is reported.
        let mismatch = Expected::Digest(blake3).verify(b"other").unwrap_err();
        assert_eq!(mismatch.kind, "blake3");
        let standard = digest_of(Algorithm::Blake3, b"other").to_string();
        assert_eq!(mismatch.found, standard);
        // The variant is not accepted for SHA-256.
        let sha256 = Digest::new(Algorithm::Sha256, digest);
        assert!(Expected::Digest(sha256).verify(&bytes).is_err());
    }

    #[test]
    fn blake3_that_is_labelled_sha256_is_accepted_and_reported() {
        let bytes = b"shard";
        let blake3 = digest_of(Algorithm::Blake3, bytes);
        let labelled = Expected::Digest(Digest::new(Algorithm::Sha256, *blake3.as_bytes()));
        assert_eq!(labelled.verify(bytes), Ok(Verified::LabelledSha256));
        let mismatch = labelled.verify(b"other").unwrap_err();
        assert_eq!(mismatch.kind, "sha256");
        // Not the other way round.
        let sha256 = digest_of(Algorithm::Sha256, bytes);
        let labelled = Expected::Digest(Digest::new(Algorithm::Blake3, *sha256.as_bytes()));
        assert!(labelled.verify(bytes).is_err());
    }

    #[test]
    fn a_verifier_goes_on_from_a_clone() {
        let bytes: Vec<u8> = (0..200u8).collect();
        let expected = Expected::Digest(digest_of(Algorithm::Blake3, &bytes));
        let mut verifier = Verifier::new(expected, 200);
        verifier.update(&bytes[..50]);
        let kept = verifier.clone();
        verifier.update(b"wrong");
        assert!(verifier.finish().is_err());
        let mut verifier = kept;
        verifier.update(&bytes[50..]);
        assert!(verifier.finish().is_ok());
    }
}
