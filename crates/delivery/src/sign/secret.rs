//! Secret keys, in minisign's format.

use std::fmt;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use minisign::{KeyPair, SecretKeyBox};

use super::{PublicKey, SignatureError};

/// The offset in a key's file of the password-based key derivation: `Sc` for scrypt, zeros if there is no
/// password.
const KDF_AT: usize = 2;

/// A decrypted secret key.
#[derive(Clone)]
pub struct SecretKey {
    key: minisign::SecretKey,
    public: PublicKey,
}

impl SecretKey {
    /// Generates a new key.
    pub fn generate() -> Result<Self, SignatureError> {
        let pair = KeyPair::generate_unencrypted_keypair().map_err(wrong)?;
        Self::new(pair.sk)
    }

    /// Generates a new key; returns it and the text of its file, encrypted with `password`.
    pub fn generate_encrypted(password: &str) -> Result<(Self, String), SignatureError> {
        let pair = KeyPair::generate_encrypted_keypair(Some(password.to_owned())).map_err(wrong)?;
        let file = pair
            .sk
            .to_box(Some("minisign encrypted secret key"))
            .map_err(wrong)?;
        let file = file.into_string();
        Ok((Self::parse(&file, Some(password))?, file))
    }

    /// The text of a file with the unencrypted key: anyone who reads it can sign.
    pub fn to_unencrypted_file(&self) -> Result<String, SignatureError> {
        let file = self
            .key
            .to_box(Some("minisign unencrypted secret key"))
            .map_err(wrong)?;
        Ok(file.into_string())
    }

    /// True if the key in this file is encrypted.
    pub fn is_encrypted(file: &str) -> Result<bool, SignatureError> {
        let text = file.lines().nth(1).unwrap_or_default().trim();
        let bytes = BASE64_STANDARD.decode(text).unwrap_or_default();
        match bytes.get(KDF_AT..KDF_AT + 2) {
            Some([0, 0]) => Ok(false),
            Some(b"Sc") => Ok(true),
            _ => Err(wrong("expected the two lines of a minisign secret key")),
        }
    }

    /// Reads the file of a key, written by minisign or this module.
    ///
    /// Errors: [`SignatureError::SecretKey`] if it contains none, or `password` is wrong.
    pub fn parse(file: &str, password: Option<&str>) -> Result<Self, SignatureError> {
        let sealed = SecretKeyBox::from_string(file).map_err(wrong)?;
        let key = match (Self::is_encrypted(file)?, password) {
            (false, _) => sealed.into_unencrypted_secret_key().map_err(wrong)?,
            (true, Some(password)) => sealed
                .into_secret_key(Some(password.to_owned()))
                .map_err(wrong)?,
            (true, None) => return Err(wrong("it is encrypted, and no password was given")),
        };
        Self::new(key)
    }

    fn new(key: minisign::SecretKey) -> Result<Self, SignatureError> {
        let public = minisign::PublicKey::from_secret_key(&key).map_err(wrong)?;
        let public = PublicKey::parse(&public.to_base64())?;
        Ok(Self { key, public })
    }

    /// The public key that verifies its signatures.
    pub fn public(&self) -> PublicKey {
        self.public.clone()
    }

    /// Signs `bytes` together with a comment, one line that readers may rely on; returns the text of the
    /// signature file.
    pub fn sign(&self, bytes: &[u8], trusted_comment: &str) -> Result<String, SignatureError> {
        // Readers strip spaces at the ends, which would alter the comment.
        let is_line = trusted_comment.trim() == trusted_comment
            && !trusted_comment.contains(|c: char| c.is_control() && c != '\t');
        if !is_line {
            return Err(SignatureError::Comment(trusted_comment.to_owned()));
        }
        let untrusted = format!("signature with the key {}", self.public.id());
        let signature = minisign::sign(
            None,
            &self.key,
            bytes,
            Some(trusted_comment),
            Some(&untrusted),
        );
        Ok(signature.map_err(wrong)?.into_string())
    }
}

impl fmt::Debug for SecretKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKey({})", self.public.id())
    }
}

fn wrong(problem: impl fmt::Display) -> SignatureError {
    SignatureError::SecretKey(problem.to_string())
}
