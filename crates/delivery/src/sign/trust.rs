//! Trusted keys.

use minisign_verify::Signature;

use super::{KeyId, MAX_SIGNATURE_BYTES, PublicKey, SignatureError};

/// Trusted public keys, each with a name chosen by the user.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TrustList(Vec<(String, PublicKey)>);

/// The result of checking a package's signature.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// There is none: the package may come from anyone.
    Unsigned,
    /// It was made by a key on the list.
    Signed(Signer),
}

/// Who signed a package.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signer {
    /// The name of the key on the list.
    pub name: String,
    /// The key.
    pub key: KeyId,
    /// The trusted comment: a line of text that was signed with the package.
    pub trusted_comment: String,
}

impl TrustList {
    /// Adds a key; returns the key of that name that it replaces, if any.
    pub fn insert(&mut self, name: impl Into<String>, key: PublicKey) -> Option<PublicKey> {
        let name = name.into();
        let before = self.remove(&name);
        self.0.push((name, key));
        before
    }

    /// Removes the key of that name and returns it.
    pub fn remove(&mut self, name: &str) -> Option<PublicKey> {
        let at = self.0.iter().position(|(existing, _)| existing == name)?;
        Some(self.0.remove(at).1)
    }

    /// Names and keys, in the order they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &PublicKey)> {
        self.0.iter().map(|(name, key)| (name.as_str(), key))
    }

    /// Checks the signature file of a package, if it has one, against the bytes of its manifest.
    ///
    /// Errors, each of which is a reason to refuse the package: [`SignatureError::UnknownKey`],
    /// [`SignatureError::Bad`], [`SignatureError::Malformed`].
    pub fn check(
        &self,
        manifest: &[u8],
        signature: Option<&str>,
    ) -> Result<Verdict, SignatureError> {
        let Some(text) = signature else {
            return Ok(Verdict::Unsigned);
        };
        let (id, signature) = parse(text)?;
        // Several keys may have one id.
        let mut named = self.0.iter().filter(|(_, key)| key.id() == id).peekable();
        let Some((first, _)) = named.peek() else {
            return Err(SignatureError::UnknownKey {
                key: id,
                listed: self.listed(),
            });
        };
        let bad = SignatureError::Bad {
            key: id,
            name: first.clone(),
        };
        let (name, _) = named
            .find(|(_, key)| key.made(&signature, manifest))
            .ok_or(bad)?;
        Ok(Verdict::Signed(Signer {
            name: name.clone(),
            key: id,
            trusted_comment: signature.trusted_comment().to_owned(),
        }))
    }

    fn listed(&self) -> String {
        if self.0.is_empty() {
            return "no keys".to_owned();
        }
        let keys: Vec<_> = (self.0.iter())
            .map(|(name, key)| format!("{} ({name:?})", key.id()))
            .collect();
        keys.join(", ")
    }
}

fn parse(text: &str) -> Result<(KeyId, Signature), SignatureError> {
    let wrong = |problem: String| SignatureError::Malformed(problem);
    if text.len() > MAX_SIGNATURE_BYTES {
        let found = text.len();
        return Err(wrong(format!(
            "expected at most {MAX_SIGNATURE_BYTES} bytes, found {found}"
        )));
    }
    let signature = Signature::decode(text).map_err(|error| {
        wrong(format!(
            "expected the four lines that minisign writes: {error}"
        ))
    })?;
    let id = (text.lines().nth(1).and_then(KeyId::in_base64))
        .ok_or_else(|| wrong("line 2: expected base64".to_owned()))?;
    Ok((id, signature))
}
