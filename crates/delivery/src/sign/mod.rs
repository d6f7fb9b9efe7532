//! Signatures of packages.
//!
//! A package's manifest contains the digest of everything else in it, so the manifest is what is signed: the
//! signature is stored next to it as [`SIGNATURE_FILE`], in the format of
//! [minisign](https://jedisct1.github.io/minisign/) (Ed25519 over a BLAKE2b digest), and `minisign -Vm
//! manifest.json -P KEY` verifies it as well as this module does.
//!
//! A [`TrustList`] contains the trusted keys. A package may be unsigned; one that is signed must be signed by
//! a key on the list.
//!
//! ```
//! # #[cfg(not(target_family = "wasm"))]
//! # fn main() -> Result<(), sterna_delivery::sign::SignatureError> {
//! use sterna_delivery::sign::{SecretKey, TrustList, Verdict};
//!
//! let key = SecretKey::generate()?;
//! let signature = key.sign(b"{}", "model:tiny")?;
//! let mut trust = TrustList::default();
//! trust.insert("me", key.public());
//! let verdict = trust.check(b"{}", Some(&signature))?;
//! assert!(matches!(verdict, Verdict::Signed(signer) if signer.name == "me"));
//! assert!(trust.check(b"altered", Some(&signature)).is_err());
//! # Ok(())
//! # }
//! # #[cfg(target_family = "wasm")]
//! # fn main() {}
//! ```

mod error;
mod public;
#[cfg(not(target_family = "wasm"))]
mod secret;
mod trust;

pub use self::{
    error::SignatureError,
    public::{KeyId, PublicKey},
    trust::{Signer, TrustList, Verdict},
};

#[cfg(not(target_family = "wasm"))]
pub use self::secret::SecretKey;

/// The file next to `manifest.json` that contains its signature.
pub const SIGNATURE_FILE: &str = "manifest.json.minisig";

/// Maximum bytes of a signature file; minisign's are about 300.
pub const MAX_SIGNATURE_BYTES: usize = 8 << 10;
