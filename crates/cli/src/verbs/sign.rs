//! `sterna sign`: keys and signatures.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use bytes::Bytes;
use clap::Args;
use serde::Serialize;
use sterna_delivery::pull::add_signature;
use sterna_delivery::sign::{SIGNATURE_FILE, SecretKey};
use sterna_delivery::write_whole;
use sterna_format::rdrr::MANIFEST_FILE;

use crate::key_file::KeyFile;
use crate::model::PackagePlace;
use crate::{output, pull, trust};

const EXAMPLE: &str = "Example:
  sterna sign --generate --key release.key
  sterna sign model-rdrr --key release.key
  minisign -Vm model-rdrr/manifest.json -p release.key.pub";

/// Sign a package, or make a key to sign with
///
/// The manifest is signed, which holds the hashes of all else; the signature is put beside it as
/// manifest.json.minisig, in minisign's format. Others believe it after `sterna trust NAME KEY.pub`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLE)]
pub(crate) struct Sign {
    /// Folder with a manifest.json, or the name of a model in the store
    #[arg(required_unless_present = "generate")]
    package: Option<String>,

    /// File of the secret key, as made by this program or by minisign
    #[arg(long, value_name = "FILE")]
    key: PathBuf,

    /// Make a new key first: FILE, and FILE.pub to give away
    #[arg(long)]
    generate: bool,

    /// Keep the new key in a file that needs no password: whoever reads it can sign
    #[arg(long, requires = "generate")]
    no_password: bool,

    /// File whose first line is the key's password [default: asked for on the terminal]
    #[arg(long, value_name = "FILE", conflicts_with = "no_password")]
    password_file: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report<'a> {
    key_id: String,
    public_key: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    signature: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    trusted_comment: Option<&'a str>,
}

impl Sign {
    pub(crate) fn run(self) -> Result<()> {
        // What is to be signed is looked at before a key is made or a password asked for.
        let manifest = self.package.as_deref().map(Manifest::read).transpose()?;
        let key = if self.generate {
            self.generate()?
        } else {
            self.key_file().read()?
        };
        let mut signature = None;
        let mut comment = None;
        if let Some(manifest) = &manifest {
            let line = manifest.comment();
            let text = key.sign(&manifest.bytes, &line)?;
            manifest.put_beside(&text)?;
            let place = manifest.place.files().label(SIGNATURE_FILE);
            (signature, comment) = (Some(place), Some(line));
            let trusted = trust::list()?;
            if trusted.check(&manifest.bytes, Some(&text)).is_err() {
                output::note(format_args!(
                    "note: this key is not trusted here, so what it signed is refused here; \
                     `sterna trust NAME {}` has it believed",
                    key.public()
                ));
            }
        }
        if self.json {
            return output::json(&Report {
                key_id: key.public().id().to_string(),
                public_key: key.public().to_string(),
                signature: signature.as_deref(),
                trusted_comment: comment.as_deref(),
            });
        }
        let mut rows = vec![
            ("key", key.public().id().to_string()),
            ("public key", key.public().to_string()),
        ];
        rows.extend(manifest.iter().map(Manifest::what_is_signed));
        rows.extend(comment.map(|comment| ("says", comment.replace('\t', "  "))));
        output::line(output::table(&rows))
    }

    fn key_file(&self) -> KeyFile<'_> {
        KeyFile {
            path: &self.key,
            password: self.password_file.as_deref(),
        }
    }

    /// Makes a key and its two files. No file is overwritten: a lost key can't be had again.
    fn generate(&self) -> Result<SecretKey> {
        let (key, file) = if self.no_password {
            let key = SecretKey::generate()?;
            let file = key.to_unencrypted_file()?;
            (key, file)
        } else {
            SecretKey::generate_encrypted(&self.key_file().new_password()?)?
        };
        let mut public = self.key.clone().into_os_string();
        public.push(".pub");
        let public = PathBuf::from(public);
        ensure!(!public.exists(), "{}: exists already", public.display());
        create_secret(&self.key, &file)?;
        write_whole(&public, key.public().to_file().as_bytes())
            .with_context(|| format!("{}: cannot write", public.display()))?;
        Ok(key)
    }
}

struct Manifest {
    place: PackagePlace,
    bytes: Bytes,
    model_id: String,
}

impl Manifest {
    fn read(package: &str) -> Result<Manifest> {
        let found = PackagePlace::find(package)?;
        let files = found.files();
        let place = files.label(MANIFEST_FILE);
        let file = files.file(MANIFEST_FILE)?;
        let file =
            file.with_context(|| format!("{place}: expected a package, found no manifest"))?;
        let bytes = file.bytes()?;
        let json: serde_json::Value = serde_json::from_slice(&bytes)
            .with_context(|| format!("{place}: expected a manifest in JSON"))?;
        let model_id = (json["modelId"].as_str())
            .with_context(|| format!("{place}: modelId: expected text"))?;
        // It becomes part of one line.
        let model_id = model_id.split(|c: char| c.is_control() || c.is_whitespace());
        let model_id = model_id.collect::<Vec<_>>().join("_");
        Ok(Manifest {
            place: found,
            bytes,
            model_id,
        })
    }

    /// Where the signature is, for people: a file, or a model in the store and what shows it.
    fn what_is_signed(&self) -> (&'static str, String) {
        match &self.place {
            PackagePlace::Stored(model) => {
                let name = model.name();
                let text = format!(
                    "the model `{name}` in the store: `sterna verify {name}` checks the signature, \
                     `sterna serve {name}` gives it away"
                );
                ("signed", text)
            }
            PackagePlace::Folder(_) => ("signature", self.place.files().label(SIGNATURE_FILE)),
        }
    }

    /// Puts a signature beside the manifest: in its folder, or into the store.
    fn put_beside(&self, signature: &str) -> Result<()> {
        match &self.place {
            PackagePlace::Folder(folder) => {
                let path = folder.join(SIGNATURE_FILE);
                write_whole(&path, signature.as_bytes())
                    .with_context(|| format!("{}: cannot write", path.display()))
            }
            PackagePlace::Stored(model) => {
                let store = pull::store()?;
                // Without a list that can be read, nobody is trusted.
                let trust = trust::list().unwrap_or_default();
                add_signature(&store, model.name(), &self.bytes, signature, &trust)?;
                Ok(())
            }
        }
    }

    /// What is signed together with the manifest, as minisign begins it. There is no time in it, so that
    /// it is the same for the same package.
    fn comment(&self) -> String {
        format!("file:manifest.json\tmodel:{}", self.model_id)
    }
}

/// Writes a new file that only its owner can read.
fn create_secret(path: &Path, text: &str) -> Result<()> {
    let mut options = File::options();
    options.write(true).create_new(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
    let write = || -> io::Result<()> {
        let mut file = options.open(path)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()
    };
    write().with_context(|| format!("{}: cannot create", path.display()))
}
