//! The files that a package names.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use flate2::read::GzDecoder;
use sterna_delivery::hash::{Algorithm, Digest, digest_of};
use sterna_delivery::package::Contents;
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_format::delta::{DELTAS_FILE, DeltaList};
use sterna_format::rdrr::{MANIFEST_FILE, Manifest};

use sterna::native::{expect_file, read_small};

use crate::model::PackagePlace;

/// A package whose files are open.
#[derive(Debug)]
pub(super) struct Package {
    name: String,
    files: BTreeMap<String, ServedFile>,
}

/// A file that is open: its bytes, and what answers say of it. Name, entity tag and type are visible ASCII.
#[derive(Debug, Clone)]
pub(super) struct ServedFile {
    name: String,
    content_type: &'static str,
    etag: String,
    bytes: Bytes,
    /// Whether `bytes` are compressed with gzip.
    is_gzip: bool,
    is_shard: bool,
}

/// A form of a file that is sent: as it is, or compressed.
#[derive(Debug)]
pub(super) struct Representation {
    /// A strong entity tag, quotes included.
    pub(super) etag: String,
    pub(super) bytes: Bytes,
    pub(super) is_gzip: bool,
}

impl Package {
    /// Opens the package in `folder`, and every file that its manifest names.
    pub(super) fn open(place: &PackagePlace) -> Result<Package> {
        let folder = place.files();
        let place = folder.label(MANIFEST_FILE);
        let bytes = read_small(&*folder, MANIFEST_FILE)?;
        let bytes =
            bytes.with_context(|| format!("{place}: expected a package, found no manifest"))?;
        let manifest = Manifest::parse(&bytes).with_context(|| place.clone())?;
        let contents = Contents::of(&place, &manifest)?;
        let mut package = Package {
            name: manifest.model_id.clone(),
            files: BTreeMap::new(),
        };
        package.add(small(MANIFEST_FILE, bytes))?;
        for hashed in contents.files() {
            let (name, size) = (hashed.name(), hashed.size());
            let file = expect_file(&*folder, name)?;
            ensure!(
                file.len() == size,
                "{file}: expected {size} bytes, found {}",
                file.len()
            );
            let is_shard = manifest.shards.iter().any(|shard| shard.file_name == name);
            package.add(ServedFile {
                name: name.to_owned(),
                content_type: content_type(name),
                etag: etag(&hashed.digest()),
                bytes: match is_shard {
                    true => file.bytes()?,
                    false => file.read_small()?,
                },
                is_gzip: false,
                is_shard,
            })?;
        }
        for name in contents.unverified() {
            package.add(small(name, expect_file(&*folder, name)?.read_small()?))?;
        }
        if let Some(file) = folder.file(DELTAS_FILE)? {
            let bytes = file.read_small()?;
            let list = DeltaList::parse(&bytes).with_context(|| file.to_string())?;
            package.add(small(DELTAS_FILE, bytes))?;
            let mut names = BTreeSet::new();
            for delta in list.deltas {
                if names.insert(delta.file.clone()) {
                    let bytes = expect_file(&*folder, &delta.file)?.bytes()?;
                    let kind = content_type(&delta.file);
                    package.add(ServedFile::new(&delta.file, kind, bytes))?;
                }
            }
        }
        if let Some(file) = folder.file(SIGNATURE_FILE)? {
            package.add(small(SIGNATURE_FILE, file.read_small()?))?;
        }
        Ok(package)
    }

    fn add(&mut self, file: ServedFile) -> Result<()> {
        let name = file.name.clone();
        if self.files.insert(name.clone(), file).is_some() {
            bail!("{MANIFEST_FILE}: names the file {name:?} twice");
        }
        Ok(())
    }

    /// What the manifest calls the model.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// The file of that name. Nothing else of the folder can be had.
    pub(super) fn file(&self, name: &str) -> Option<&ServedFile> {
        self.files.get(name)
    }

    /// All files, by name.
    pub(super) fn files(&self) -> impl Iterator<Item = &ServedFile> {
        self.files.values()
    }

    /// Bytes in all files.
    pub(super) fn size(&self) -> u64 {
        self.files().map(ServedFile::size).sum()
    }
}

impl ServedFile {
    /// A file with these bytes, which may be others at the next start.
    pub(super) fn new(name: &str, content_type: &'static str, bytes: Bytes) -> ServedFile {
        ServedFile {
            name: name.to_owned(),
            content_type,
            etag: etag(&digest_of(Algorithm::Sha256, &bytes)),
            bytes,
            is_gzip: false,
            is_shard: false,
        }
    }

    /// A file of which `bytes` are what gzip made.
    pub(super) fn compressed(name: &str, content_type: &'static str, bytes: Bytes) -> ServedFile {
        ServedFile {
            is_gzip: true,
            ..ServedFile::new(name, content_type, bytes)
        }
    }

    /// Its path within the package.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its strong entity tag, quotes included: the algorithm and digest of its bytes, compressed if it is held so.
    pub(super) fn etag(&self) -> &str {
        &self.etag
    }

    /// Whether it is held compressed, and there are two forms to send.
    pub(super) fn is_compressed(&self) -> bool {
        self.is_gzip
    }

    /// What is sent to whoever takes gzip, or doesn't. Nothing is copied unless it has to be decompressed, and then
    /// the entity tag is that of the file after `plain-`.
    pub(super) fn representation(&self, takes_gzip: bool) -> Representation {
        let is_gzip = self.is_gzip && takes_gzip;
        let (etag, bytes) = match self.is_gzip && !takes_gzip {
            true => (self.etag.replacen("\"", "\"plain-", 1), self.bytes()),
            false => (self.etag.clone(), self.bytes.clone()),
        };
        Representation {
            etag,
            bytes,
            is_gzip,
        }
    }

    /// Bytes in it, as it is held.
    pub(super) fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// All bytes, not compressed.
    pub(super) fn bytes(&self) -> Bytes {
        if !self.is_gzip {
            return self.bytes.clone();
        }
        let mut bytes = Vec::new();
        let read = GzDecoder::new(&*self.bytes).read_to_end(&mut bytes);
        read.expect("the build compressed it");
        bytes.into()
    }

    /// True if whoever has it never needs to ask again: the manifest says what its bytes are.
    pub(super) fn is_immutable(&self) -> bool {
        self.is_shard
    }

    /// Its media type.
    pub(super) fn content_type(&self) -> &'static str {
        self.content_type
    }
}

/// A file that is read now, so that it can be replaced while the server runs.
fn small(name: &str, bytes: Bytes) -> ServedFile {
    ServedFile::new(name, content_type(name), bytes)
}

/// The media type of a package's file. None is a page or a script: packages come from strangers, and would share
/// their origin with the chat.
fn content_type(name: &str) -> &'static str {
    match name.rsplit_once('.') {
        Some((_, "json")) => "application/json",
        Some((_, "minisig" | "txt")) => "text/plain; charset=utf-8",
        _ => "application/octet-stream",
    }
}

fn etag(digest: &Digest) -> String {
    format!("\"{}-{digest}\"", digest.algorithm())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use super::*;

    const SAMPLE: &str = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../../testdata/rdrr-samples/v1-gemma3-q4k"
    );

    fn copy() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(SAMPLE).unwrap() {
            let path = entry.unwrap().path();
            fs::copy(&path, dir.path().join(path.file_name().unwrap())).unwrap();
        }
        fs::write(dir.path().join("secret"), b"not named").unwrap();
        dir
    }

    fn open(dir: &Path) -> Result<Package> {
        Package::open(&PackagePlace::Folder(dir.to_owned()))
    }

    #[test]
    fn only_named_files_are_served() {
        let dir = copy();
        let package = open(dir.path()).unwrap();
        let names: Vec<_> = package.files().map(ServedFile::name).collect();
        assert!(names.contains(&"manifest.json") && names.contains(&"tensors.json"));
        assert!(names.contains(&"tokenizer.json") && names.contains(&"shard_00000.bin"));
        assert!(package.file("secret").is_none() && package.file(SIGNATURE_FILE).is_none());
        let shard = package.file("shard_00000.bin").unwrap();
        assert!(shard.etag().starts_with("\"sha256-0ac4dd4e30ebc330"));
        let sent = shard.representation(true);
        assert_eq!(
            (sent.bytes, &*sent.etag, sent.is_gzip),
            (shard.bytes(), shard.etag(), false)
        );
        assert!(shard.is_immutable() && !package.file("tensors.json").unwrap().is_immutable());
        fs::write(dir.path().join(SIGNATURE_FILE), b"x").unwrap();
        assert!(open(dir.path()).unwrap().file(SIGNATURE_FILE).is_some());
    }

    #[test]
    fn deltas_that_are_listed_are_served() {
        let dir = copy();
        let hash = format!("sha256:{}", "0a".repeat(32));
        let list = format!(
            r#"{{"version": 1, "deltas": [{{"group": "embed", "base": "{hash}", "target": "{hash}",
                "file": "d.bin", "size": 5, "hash": "{hash}"}}]}}"#
        );
        fs::write(dir.path().join(DELTAS_FILE), list).unwrap();
        let error = format!("{:#}", open(dir.path()).unwrap_err());
        assert!(error.contains("d.bin"), "{error}");
        fs::write(dir.path().join("d.bin"), b"delta").unwrap();
        let package = open(dir.path()).unwrap();
        assert!(package.file(DELTAS_FILE).is_some());
        assert_eq!(&package.file("d.bin").unwrap().bytes()[..], b"delta");
    }

    #[test]
    fn packages_that_lack_bytes_are_refused() {
        let dir = copy();
        let shard = dir.path().join("shard_00001.bin");
        fs::write(&shard, b"short").unwrap();
        let error = format!("{:#}", open(dir.path()).unwrap_err());
        assert!(error.contains("expected 161792 bytes, found 5"), "{error}");
        fs::remove_file(&shard).unwrap();
        assert!(open(dir.path()).is_err());
        fs::remove_file(dir.path().join("manifest.json")).unwrap();
        let error = format!("{:#}", open(dir.path()).unwrap_err());
        assert!(error.contains("no manifest"), "{error}");
    }
}
