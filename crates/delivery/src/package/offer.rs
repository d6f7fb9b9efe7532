//! Which of several sources to trust: the first whose manifest can be read, with a trusted signature if there
//! is one, determines the package; the others may not contradict it.

use serde::de::IgnoredAny;
use sterna_format::rdrr::{MANIFEST_FILE, Manifest};

use super::PackageError;
use crate::sign::{TrustList, Verdict};

/// A trusted manifest. Made from bytes alone, however they arrived.
#[derive(Debug, Clone)]
pub struct Offer {
    from: String,
    manifest: Manifest,
    bytes: Vec<u8>,
    signature: Option<String>,
    signer: Option<String>,
}

/// Why a source isn't asked for files of an [`Offer`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Rejected {
    /// It has another manifest.
    #[error("its {MANIFEST_FILE} is not that of {first}")]
    OtherManifest {
        /// The source that is trusted.
        first: String,
    },
    /// What it has is not trusted.
    #[error(transparent)]
    Package(#[from] PackageError),
}

/// Whether the manifest from `from` is JSON at all. One that isn't needs no signature to be refused.
///
/// Errors: [`PackageError::NotJson`].
pub fn check_json(from: &str, manifest: &[u8]) -> Result<(), PackageError> {
    match serde_json::from_slice::<IgnoredAny>(manifest) {
        Ok(_) => Ok(()),
        Err(problem) => Err(PackageError::NotJson {
            from: from.to_owned(),
            problem,
        }),
    }
}

/// The name of the trusted key that signed `manifest`, `None` if it isn't signed.
///
/// Errors: [`PackageError::Signature`] for a signature that is not trusted.
pub fn check_signature(
    from: &str,
    trust: &TrustList,
    manifest: &[u8],
    signature: Option<&str>,
) -> Result<Option<String>, PackageError> {
    match trust.check(manifest, signature) {
        Ok(Verdict::Unsigned) => Ok(None),
        Ok(Verdict::Signed(signer)) => Ok(Some(signer.name)),
        Err(problem) => Err(PackageError::Signature {
            from: from.to_owned(),
            problem,
        }),
    }
}

/// The text of the signature file from `from`. Errors: [`PackageError::SignatureNotText`].
pub fn signature_text(from: &str, bytes: Vec<u8>) -> Result<String, PackageError> {
    String::from_utf8(bytes).map_err(|_| PackageError::SignatureNotText {
        from: from.to_owned(),
    })
}

impl Offer {
    /// The offer of `from`. The signature is checked before anything in the manifest is trusted.
    ///
    /// `must_be_signed` is the signer of an earlier revision; then an unsigned package is refused.
    /// Errors: [`PackageError`].
    pub fn read(
        from: &str,
        manifest: Vec<u8>,
        signature: Option<String>,
        trust: &TrustList,
        must_be_signed: Option<&str>,
    ) -> Result<Self, PackageError> {
        check_json(from, &manifest)?;
        let signer = check_signature(from, trust, &manifest, signature.as_deref())?;
        if let (None, Some(signer)) = (&signer, must_be_signed) {
            return Err(PackageError::NotSigned {
                from: from.to_owned(),
                signer: signer.to_owned(),
            });
        }
        let parsed = Manifest::parse(&manifest).map_err(|problem| PackageError::Manifest {
            from: from.to_owned(),
            problem,
        })?;
        Ok(Self {
            from: from.to_owned(),
            manifest: parsed,
            bytes: manifest,
            signature,
            signer,
        })
    }

    /// Compares another source with this, and takes its signature if this had none: it may have been removed
    /// from the first.
    ///
    /// Errors: [`Rejected`] if it is another package, or its signature is not trusted.
    pub fn compare(
        &mut self,
        from: &str,
        manifest: &[u8],
        signature: Option<String>,
        trust: &TrustList,
    ) -> Result<(), Rejected> {
        if manifest != self.bytes {
            let first = self.from.clone();
            return Err(Rejected::OtherManifest { first });
        }
        if let (None, Some(text)) = (&self.signature, signature) {
            self.signer = check_signature(from, trust, manifest, Some(&text))?;
            self.signature = Some(text);
        }
        Ok(())
    }

    /// The manifest.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The manifest's text, verbatim.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The text of its signature file.
    pub fn signature(&self) -> Option<&str> {
        self.signature.as_deref()
    }

    /// The name of the key it is signed with.
    pub fn signer(&self) -> Option<&str> {
        self.signer.as_deref()
    }
}

#[cfg(all(test, not(target_family = "wasm")))]
mod tests {
    use super::*;
    use crate::sign::SecretKey;

    const MANIFEST: &str = r#"{"version": 1, "modelId": "m", "modelType": "transformer",
        "quantization": "F32", "hashAlgorithm": "sha256", "totalSize": 32, "tensorsFile": "t.json",
        "groups": {}, "architecture": "x", "config": {}, "shards": [{"index": 0, "fileName": "s.bin", "size": 32,
        "hash": "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff"}]}"#;

    fn keys() -> (SecretKey, TrustList) {
        let key = SecretKey::generate().unwrap();
        let mut trust = TrustList::default();
        trust.insert("me", key.public());
        (key, trust)
    }

    fn read(
        signature: Option<&str>,
        trust: &TrustList,
        before: Option<&str>,
    ) -> Result<Offer, String> {
        let signature = signature.map(str::to_owned);
        Offer::read("here", MANIFEST.into(), signature, trust, before).map_err(|e| e.to_string())
    }

    #[test]
    fn a_manifest_is_believed_as_far_as_its_signature() {
        let (key, trust) = keys();
        let signature = key.sign(MANIFEST.as_bytes(), "m").unwrap();
        let offer = read(Some(&signature), &trust, Some("me")).unwrap();
        assert_eq!(
            (offer.signer(), offer.bytes()),
            (Some("me"), MANIFEST.as_bytes())
        );
        assert_eq!(read(None, &trust, None).unwrap().signer(), None);
        let error = read(None, &trust, Some("me")).unwrap_err();
        assert!(
            error.starts_with("here: refused: not signed, but"),
            "{error}"
        );
        let error = read(Some(&signature), &TrustList::default(), None).unwrap_err();
        assert!(error.contains("not trusted"), "{error}");
        let page = Offer::read("here", b"<html>".into(), None, &trust, None).unwrap_err();
        assert!(matches!(page, PackageError::NotJson { .. }), "{page}");
        let empty = Offer::read("here", b"{}".into(), None, &trust, None).unwrap_err();
        assert!(matches!(empty, PackageError::Manifest { .. }), "{empty}");
    }

    #[test]
    fn others_may_add_a_signature_and_not_contradict() {
        let (key, trust) = keys();
        let mut offer = read(None, &trust, None).unwrap();
        let error = offer.compare("there", b"{}", None, &trust).unwrap_err();
        assert_eq!(error.to_string(), "its manifest.json is not that of here");
        let wrong = key.sign(b"else", "m").unwrap();
        let wrong = offer.compare("there", MANIFEST.as_bytes(), Some(wrong), &trust);
        assert!(wrong.is_err() && offer.signature().is_none());
        assert!(
            offer
                .compare("there", MANIFEST.as_bytes(), None, &trust)
                .is_ok()
        );
        let right = key.sign(MANIFEST.as_bytes(), "m").unwrap();
        offer
            .compare("there", MANIFEST.as_bytes(), Some(right.clone()), &trust)
            .unwrap();
        assert_eq!(
            (offer.signer(), offer.signature()),
            (Some("me"), Some(&*right))
        );
    }
}
