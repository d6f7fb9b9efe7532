//! The files that a package names.

use std::collections::BTreeMap;
use std::fs;
use std::ops::Range;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use bytes::Bytes;
use serde_json::Value;
use sterna_delivery::LocalFile;
use sterna_delivery::hash::{Algorithm, Digest};
use sterna_delivery::sign::SIGNATURE_FILE;

const MANIFEST: &str = "manifest.json";
/// Largest file that is not mapped but read: manifest, tensor map, tokenizer.
const MAX_SMALL_BYTES: u64 = 256 << 20;

/// A package whose files are open.
#[derive(Debug)]
pub(super) struct Package {
    name: String,
    files: BTreeMap<String, ServedFile>,
}

/// A file that is open: its bytes, and what answers say of it. Name, entity tag and type are visible ASCII.
#[derive(Debug)]
pub(super) struct ServedFile {
    name: String,
    etag: String,
    bytes: Bytes,
    is_shard: bool,
}

impl Package {
    /// Opens the package in `folder`, and every file that its manifest names.
    pub(super) fn open(folder: &Path) -> Result<Package> {
        let path = folder.join(MANIFEST);
        let place = path.display();
        let bytes = read_small(&path)?;
        let manifest: Value = serde_json::from_slice(&bytes)
            .with_context(|| format!("{place}: expected a manifest in JSON"))?;
        let mut package = Package {
            name: manifest["modelId"].as_str().unwrap_or("package").to_owned(),
            files: BTreeMap::new(),
        };
        package.add(small(MANIFEST, bytes)?)?;
        let shards = (manifest["shards"].as_array())
            .with_context(|| format!("{place}: shards: expected an array"))?;
        let default = manifest["hashAlgorithm"].as_str();
        for (i, entry) in shards.iter().enumerate() {
            let shard =
                shard(folder, entry, default).with_context(|| format!("{place}: shards[{i}]"))?;
            package.add(shard)?;
        }
        let tokenizer = &manifest["tokenizer"];
        let named = [
            &manifest["tensorsFile"],
            &tokenizer["file"],
            &tokenizer["sentencepieceModel"],
        ];
        for name in named.into_iter().filter_map(Value::as_str) {
            check_name(name).with_context(|| format!("{place}: a file it names"))?;
            if !package.files.contains_key(name) {
                package.add(small(name, read_small(&folder.join(name))?)?)?;
            }
        }
        let signature = folder.join(SIGNATURE_FILE);
        if signature.exists() {
            package.add(small(SIGNATURE_FILE, read_small(&signature)?)?)?;
        }
        Ok(package)
    }

    fn add(&mut self, file: ServedFile) -> Result<()> {
        let name = file.name.clone();
        if self.files.insert(name.clone(), file).is_some() {
            bail!("{MANIFEST}: names the file {name:?} twice");
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
}

impl ServedFile {
    /// Its path within the package.
    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Its strong entity tag, quotes included: the algorithm and digest of its bytes.
    pub(super) fn etag(&self) -> &str {
        &self.etag
    }

    /// Bytes in it.
    pub(super) fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// All bytes. Nothing is copied.
    pub(super) fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Bytes of a range that lies within. Nothing is copied.
    pub(super) fn part(&self, range: Range<u64>) -> Bytes {
        // Within the file, so both fit an address.
        self.bytes.slice(range.start as usize..range.end as usize)
    }

    /// True if whoever has it never needs to ask again: the manifest says what its bytes are.
    pub(super) fn is_immutable(&self) -> bool {
        self.is_shard
    }

    /// Its media type.
    pub(super) fn content_type(&self) -> &'static str {
        match self.name.rsplit_once('.') {
            Some((_, "json")) => "application/json",
            Some((_, "minisig" | "txt")) => "text/plain; charset=utf-8",
            _ => "application/octet-stream",
        }
    }
}

/// A shard, mapped. Its tag is the digest in the manifest, which is not checked here.
fn shard(folder: &Path, entry: &Value, default: Option<&str>) -> Result<ServedFile> {
    let name = (entry["fileName"].as_str().or(entry["filename"].as_str()))
        .context("expected a file name")?;
    check_name(name)?;
    let bytes = LocalFile::open(folder.join(name))?.prefix(u64::MAX);
    let size = entry["size"].as_u64().context("size: expected a number")?;
    ensure!(
        bytes.len() as u64 == size,
        "{name}: expected {size} bytes, found {}",
        bytes.len()
    );
    let algorithm = entry["hashAlgorithm"]
        .as_str()
        .or(default)
        .map(str::parse::<Algorithm>);
    let digest = match (entry["hash"].as_str(), entry["blake3"].as_str(), algorithm) {
        (Some(hex), _, Some(algorithm)) => Digest::from_hex(algorithm?, hex)?,
        (_, Some(hex), _) => Digest::from_hex(Algorithm::Blake3, hex)?,
        // Nothing says what its bytes are.
        _ => Digest::of(Algorithm::Sha256, &bytes),
    };
    Ok(ServedFile {
        name: name.to_owned(),
        etag: etag(&digest),
        bytes,
        is_shard: true,
    })
}

/// A file that is read now, so that it can be replaced while the server runs.
fn small(name: &str, bytes: Vec<u8>) -> Result<ServedFile> {
    Ok(ServedFile {
        name: name.to_owned(),
        etag: etag(&Digest::of(Algorithm::Sha256, &bytes)),
        bytes: bytes.into(),
        is_shard: false,
    })
}

fn etag(digest: &Digest) -> String {
    format!("\"{}-{digest}\"", digest.algorithm())
}

fn read_small(path: &Path) -> Result<Vec<u8>> {
    let place = path.display();
    let size = fs::metadata(path)
        .with_context(|| format!("{place}: cannot open"))?
        .len();
    ensure!(
        size <= MAX_SMALL_BYTES,
        "{place}: expected at most {MAX_SMALL_BYTES} bytes, found {size}"
    );
    fs::read(path).with_context(|| format!("{place}: cannot read"))
}

/// Names are paths within the folder, and mean the same in a URL.
fn check_name(name: &str) -> Result<()> {
    let is_part = |part: &str| {
        let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        !part.is_empty() && part.chars().all(allowed) && !part.starts_with('.')
    };
    ensure!(
        name.split('/').all(is_part),
        "expected a file in the package's folder, named with letters, digits, '.', '_' and '-', found {name:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(manifest: &Value) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(MANIFEST), manifest.to_string()).unwrap();
        fs::write(dir.path().join("s.bin"), b"0123456789").unwrap();
        fs::write(dir.path().join("t.json"), b"{}").unwrap();
        fs::write(dir.path().join("secret"), b"not named").unwrap();
        dir
    }

    fn shard_entry() -> Value {
        serde_json::json!({"index": 0, "filename": "s.bin", "size": 10, "hash": "ab".repeat(32)})
    }

    #[test]
    fn only_named_files_are_served() {
        let manifest = serde_json::json!({
            "modelId": "m",
            "hashAlgorithm": "blake3",
            "shards": [shard_entry()],
            "tensorsFile": "t.json",
            "tokenizer": {"type": "huggingface", "file": "t.json"},
        });
        let dir = folder(&manifest);
        let package = Package::open(dir.path()).unwrap();
        let names: Vec<_> = package.files().map(ServedFile::name).collect();
        assert_eq!(names, ["manifest.json", "s.bin", "t.json"]);
        let shard = package.file("s.bin").unwrap();
        assert_eq!(shard.etag(), format!("\"blake3-{}\"", "ab".repeat(32)));
        assert_eq!(shard.part(2..5), "234");
        assert!(shard.is_immutable() && !package.file("t.json").unwrap().is_immutable());
        assert!(package.file("secret").is_none());
        fs::write(dir.path().join(SIGNATURE_FILE), b"x").unwrap();
        assert!(
            Package::open(dir.path())
                .unwrap()
                .file(SIGNATURE_FILE)
                .is_some()
        );
    }

    #[test]
    fn wrong_manifests_are_refused() {
        let with = |key: &str, value: Value| {
            let mut entry = shard_entry();
            entry[key] = value;
            serde_json::json!({"hashAlgorithm": "sha256", "shards": [entry]})
        };
        let twice = serde_json::json!({"hashAlgorithm": "sha256", "shards": [shard_entry(), shard_entry()]});
        for (manifest, message) in [
            (serde_json::json!({}), "shards: expected an array"),
            (
                with("filename", "../secret".into()),
                "expected a file in the package's folder",
            ),
            (
                with("filename", "/etc/passwd".into()),
                "expected a file in the package's folder",
            ),
            (with("filename", "none.bin".into()), "cannot open"),
            (with("size", 11.into()), "expected 11 bytes, found 10"),
            (with("hash", "abc".into()), "expected 64 hexadecimal digits"),
            (twice, "twice"),
        ] {
            let dir = folder(&manifest);
            let error = format!("{:#}", Package::open(dir.path()).unwrap_err());
            assert!(error.contains(message), "{error}");
        }
    }
}
