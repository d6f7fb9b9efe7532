//! Hashes as packages name and spell them. Computing them is not done here.

use std::fmt;
use std::str::FromStr;

/// What the hashes of a package are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum HashAlgorithm {
    /// SHA-256, which browsers bring along.
    #[default]
    Sha256,
    /// BLAKE3.
    Blake3,
}

impl HashAlgorithm {
    /// The spelling in files.
    pub const fn name(self) -> &'static str {
        match self {
            HashAlgorithm::Sha256 => "sha256",
            HashAlgorithm::Blake3 => "blake3",
        }
    }
}

impl fmt::Display for HashAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A name that is no hash algorithm of packages.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("expected sha256 or blake3, found {found:?}")]
pub struct UnknownHashAlgorithm {
    /// The name.
    pub found: String,
}

impl FromStr for HashAlgorithm {
    type Err = UnknownHashAlgorithm;

    /// Reads `sha256` or `blake3`, in any case and with a hyphen or without.
    fn from_str(name: &str) -> Result<HashAlgorithm, UnknownHashAlgorithm> {
        match name.to_ascii_lowercase().as_str() {
            "sha256" | "sha-256" => Ok(HashAlgorithm::Sha256),
            "blake3" | "blake-3" => Ok(HashAlgorithm::Blake3),
            _ => Err(UnknownHashAlgorithm {
                found: name.chars().take(80).collect(),
            }),
        }
    }
}

/// The 32 bytes of a hash; both algorithms give as many.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Digest(pub [u8; 32]);

/// A text that isn't 64 lower-case hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected 64 lower-case hexadecimal digits")]
pub struct NotADigest;

impl FromStr for Digest {
    type Err = NotADigest;

    /// Reads 64 lower-case hexadecimal digits: one spelling a hash, so that equal hashes are equal
    /// texts everywhere.
    fn from_str(hex: &str) -> Result<Digest, NotADigest> {
        let digit = |c: u8| match c {
            b'0'..=b'9' => Ok(c - b'0'),
            b'a'..=b'f' => Ok(c - b'a' + 10),
            _ => Err(NotADigest),
        };
        let mut bytes = [0; 32];
        if hex.len() != 2 * bytes.len() {
            return Err(NotADigest);
        }
        for (byte, pair) in bytes.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Digest(bytes))
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_has_one_spelling() {
        let hex = "00ff10".to_owned() + &"ab".repeat(29);
        let digest: Digest = hex.parse().unwrap();
        assert_eq!(digest.0[..4], [0, 255, 16, 0xab]);
        assert_eq!(digest.to_string(), hex);
        for bad in [
            "",
            &hex[1..],
            &hex.to_uppercase(),
            &format!("{hex}0"),
            &hex.replace("ff", "é"),
        ] {
            assert_eq!(bad.parse::<Digest>(), Err(NotADigest), "{bad}");
        }
    }

    #[test]
    fn algorithms_by_name() {
        for (name, algorithm) in [
            ("sha256", HashAlgorithm::Sha256),
            ("SHA-256", HashAlgorithm::Sha256),
            ("BLAKE3", HashAlgorithm::Blake3),
        ] {
            assert_eq!(name.parse(), Ok(algorithm));
            assert_eq!(algorithm.to_string().parse(), Ok(algorithm));
        }
        let error = "md5".parse::<HashAlgorithm>().unwrap_err();
        assert_eq!(
            error.to_string(),
            "expected sha256 or blake3, found \"md5\""
        );
    }
}
