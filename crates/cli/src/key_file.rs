//! Files of secret keys, and their passwords.

use std::io::{self, IsTerminal};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use sterna_delivery::sign::SecretKey;

use crate::trust;

/// The file of a secret key, as made by this program or by minisign.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KeyFile<'a> {
    pub(crate) path: &'a Path,
    /// The file whose first line is its password; without one it is asked for.
    pub(crate) password: Option<&'a Path>,
}

impl KeyFile<'_> {
    /// The key, for which a password may be asked.
    pub(crate) fn read(&self) -> Result<SecretKey> {
        let place = self.path.display();
        let file = trust::read_key_file(self.path)?;
        let is_encrypted = SecretKey::is_encrypted(&file).with_context(|| place.to_string())?;
        let password = is_encrypted.then(|| self.password(Ask::Once)).transpose()?;
        SecretKey::parse(&file, password.as_deref()).with_context(|| place.to_string())
    }

    /// The password for a key that is made.
    pub(crate) fn new_password(&self) -> Result<String> {
        self.password(Ask::Twice)
    }

    fn password(&self, ask: Ask) -> Result<String> {
        if let Some(path) = self.password {
            let text = trust::read_key_file(path)?;
            return Ok(text.lines().next().unwrap_or_default().to_owned());
        }
        ensure!(
            io::stdin().is_terminal(),
            "the key needs a password, and there is no terminal to ask; use --password-file{}",
            match ask {
                Ask::Twice => " or --no-password",
                Ask::Once => "",
            }
        );
        let prompt =
            |text: &str| rpassword::prompt_password(text).context("cannot ask for a password");
        let password = prompt(&format!("Password of {}: ", self.path.display()))?;
        if ask == Ask::Twice && prompt("Again: ")? != password {
            bail!("the passwords differ");
        }
        Ok(password)
    }
}

/// How often to ask for a password: twice where a slip would lock the key for ever.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ask {
    Once,
    Twice,
}
