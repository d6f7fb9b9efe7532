//! The package that is sent.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Read as _},
    path::{Path, PathBuf},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use sterna_format::{
    delta::{DELTAS_FILE, DeltaList},
    rdrr::{MANIFEST_FILE, Manifest},
};

use super::{Event, PushError, PushOptions, in_parallel};
use crate::{
    artifact,
    fetch::{Cancel, check_name},
    hash::{Algorithm, Digest, Expected, Hasher, Mismatch, Verifier},
    package::{
        CONFIG_FILE, Contents, MAX_FILE_BYTES, PackageError, check_json, check_signature,
        signature_text,
    },
    sign::{SIGNATURE_FILE, SignatureError},
    store,
};

/// Where the files of a package are on this machine.
#[derive(Debug, Clone)]
pub struct PackageFiles {
    name: String,
    place: Place,
}

#[derive(Debug, Clone)]
enum Place {
    Folder(PathBuf),
    Paths(BTreeMap<String, PathBuf>),
}

impl PackageFiles {
    /// Those of the package in the folder `path`, or of the one whose manifest is there.
    pub fn folder(path: impl Into<PathBuf>) -> Self {
        let mut path = path.into();
        if path.ends_with(MANIFEST_FILE) && path.is_file() {
            path.pop();
        }
        Self {
            name: path.display().to_string(),
            place: Place::Folder(path),
        }
    }

    /// Those of a model in the store.
    pub fn stored(model: &store::Model) -> Self {
        Self {
            name: model.name().to_owned(),
            place: Place::Paths(model.paths().clone()),
        }
    }

    /// The path of the file called `name`, if it is there.
    fn path(&self, name: &str) -> Option<PathBuf> {
        match &self.place {
            Place::Folder(folder) => {
                let path = folder.join(name);
                path.is_file().then_some(path)
            }
            Place::Paths(paths) => paths.get(name).cloned(),
        }
    }
}

/// A package that was read and checked.
pub(super) struct Local {
    pub(super) manifest: Manifest,
    /// All of its files, and deltas beside them, in the order of layers.
    pub(super) files: Vec<LocalFile>,
}

/// A file of it.
pub(super) struct LocalFile {
    pub(super) described: artifact::File,
    pub(super) path: PathBuf,
}

/// A file that is to be checked.
struct Unchecked {
    name: String,
    path: PathBuf,
    size: u64,
    expected: Option<Digest>,
    is_shard: bool,
}

/// Bytes that are read and hashed at once.
const PIECE: usize = 1 << 20;

/// Reads the package, and compares all of its bytes with its manifest.
///
/// Errors: [`PushError`].
pub(super) fn read(
    package: &PackageFiles,
    options: &PushOptions,
    notify: &(dyn Fn(Event) + Sync),
) -> Result<Local, PushError> {
    let from = package.name.as_str();
    let missing = |name: &str| PushError::File {
        file: format!("{from}: {name}"),
        source: io::ErrorKind::NotFound.into(),
    };
    let read_small = |name: &str| -> Result<Option<(PathBuf, Vec<u8>)>, PushError> {
        let Some(path) = package.path(name) else {
            return Ok(None);
        };
        let bytes = read_bounded(&path).map_err(|source| PushError::File {
            file: format!("{from}: {name}"),
            source,
        })?;
        Ok(Some((path, bytes)))
    };
    let (manifest_path, bytes) =
        read_small(MANIFEST_FILE)?.ok_or_else(|| missing(MANIFEST_FILE))?;
    check_json(from, &bytes)?;
    let manifest = Manifest::parse(&bytes).map_err(|problem| PackageError::Manifest {
        from: from.to_owned(),
        problem,
    })?;
    let mut files = vec![Unchecked {
        name: MANIFEST_FILE.to_owned(),
        path: manifest_path,
        size: bytes.len() as u64,
        expected: None,
        is_shard: false,
    }];
    if let Some((path, signature)) = read_small(SIGNATURE_FILE)? {
        let size = signature.len() as u64;
        let text = signature_text(from, signature)?;
        match check_signature(from, &options.trust, &bytes, Some(&text)) {
            Ok(_)
            | Err(PackageError::Signature {
                problem: SignatureError::UnknownKey { .. },
                ..
            }) => {}
            Err(error) => return Err(error.into()),
        }
        files.push(Unchecked {
            name: SIGNATURE_FILE.to_owned(),
            path,
            size,
            expected: None,
            is_shard: false,
        });
    }
    let contents = Contents::of(from, &manifest)?;
    let mut unverified = contents.unverified().to_vec();
    if contents.may_have_config(&manifest) && package.path(CONFIG_FILE).is_some() {
        unverified.push(CONFIG_FILE.to_owned());
    }
    for name in unverified {
        check_name(&name).map_err(|problem| PackageError::File {
            from: from.to_owned(),
            problem,
        })?;
        let (path, bytes) = read_small(&name)?.ok_or_else(|| missing(&name))?;
        files.push(Unchecked {
            name,
            path,
            size: bytes.len() as u64,
            expected: None,
            is_shard: false,
        });
    }
    let shards = (contents.shards().iter()).map(|file| (file, true));
    let beside = (contents.beside().iter()).map(|file| (file, false));
    for (file, is_shard) in beside.chain(shards) {
        files.push(Unchecked {
            name: file.name().to_owned(),
            path: package
                .path(file.name())
                .ok_or_else(|| missing(file.name()))?,
            size: file.size(),
            expected: Some(file.digest()),
            is_shard,
        });
    }
    files.extend(deltas(package, &files, read_small(DELTAS_FILE)?)?);
    let files = check(from, files, options, notify)?;
    Ok(Local { manifest, files })
}

/// The list of deltas, if there is one, and those that it names; the manifest doesn't, and `files` don't have them.
fn deltas(
    package: &PackageFiles,
    files: &[Unchecked],
    list: Option<(PathBuf, Vec<u8>)>,
) -> Result<Vec<Unchecked>, PushError> {
    let Some((path, bytes)) = list else {
        return Ok(Vec::new());
    };
    let file = |name: &str| format!("{}: {name}", package.name);
    let list = DeltaList::parse(&bytes).map_err(|problem| PushError::Deltas {
        file: file(DELTAS_FILE),
        problem,
    })?;
    let mut deltas = vec![Unchecked {
        name: DELTAS_FILE.to_owned(),
        path,
        size: bytes.len() as u64,
        expected: None,
        is_shard: false,
    }];
    for delta in list.deltas {
        // Groups that are alike have one; and what the package has by that name is no delta, as will be found out.
        let is_known = |known: &Unchecked| known.name == delta.file;
        if files.iter().chain(&deltas).any(is_known) {
            continue;
        }
        deltas.push(Unchecked {
            path: (package.path(&delta.file)).ok_or_else(|| PushError::File {
                file: file(&delta.file),
                source: io::ErrorKind::NotFound.into(),
            })?,
            name: delta.file,
            size: delta.size,
            expected: Some(delta.hash),
            is_shard: true,
        });
    }
    Ok(deltas)
}

/// Hashes all `files`, and compares them with what is known of them.
fn check(
    from: &str,
    files: Vec<Unchecked>,
    options: &PushOptions,
    notify: &(dyn Fn(Event) + Sync),
) -> Result<Vec<LocalFile>, PushError> {
    let total = files.iter().map(|file| file.size).sum();
    let done = AtomicU64::new(0);
    let digests: Vec<Mutex<Option<Digest>>> = files.iter().map(|_| Mutex::default()).collect();
    let tell = || {
        let done = done.load(Ordering::Relaxed).min(total);
        notify(Event::Checked { done, total });
    };
    let indices: Vec<usize> = (0..files.len()).collect();
    in_parallel(
        options.parallel,
        &indices,
        &options.cancel,
        &tell,
        |&index| {
            let file = &files[index];
            let label = || format!("{from}: {}", file.name);
            let outcome = hash(file, &done, &options.cancel).map_err(|source| PushError::File {
                file: label(),
                source,
            })?;
            let digest = outcome.map_err(|problem| PushError::Damaged {
                file: label(),
                problem,
            })?;
            let mut place = digests[index]
                .lock()
                .unwrap_or_else(PoisonError::into_inner);
            *place = digest;
            Ok::<_, PushError>(())
        },
    )?;
    let digests = digests.into_iter();
    let digests = digests.map(|digest| digest.into_inner().unwrap_or_else(PoisonError::into_inner));
    (files.into_iter().zip(digests))
        .map(|(file, digest)| {
            // All are hashed unless it was cancelled.
            let digest = digest.ok_or(PushError::Cancelled)?;
            Ok(LocalFile {
                described: artifact::File {
                    name: file.name,
                    digest,
                    size: file.size,
                    is_shard: file.is_shard,
                },
                path: file.path,
            })
        })
        .collect()
}

/// The SHA-256 of a file that is what it should be; `None` if it was cancelled.
fn hash(
    file: &Unchecked,
    done: &AtomicU64,
    cancel: &Cancel,
) -> io::Result<Result<Option<Digest>, Mismatch>> {
    let found = fs::metadata(&file.path)?.len();
    if found != file.size {
        return Ok(Err(Mismatch {
            kind: "bytes",
            expected: file.size.to_string(),
            found: found.to_string(),
        }));
    }
    let mut sha256 = Hasher::new(Algorithm::Sha256);
    let expected = file.expected.map(Expected::Digest);
    let mut verifier = expected.map(|expected| Verifier::new(expected, file.size));
    // One pass where the one is the other.
    let is_sha256 = |digest: Digest| digest.algorithm() == Algorithm::Sha256;
    if file.expected.is_some_and(is_sha256) {
        verifier = None;
    }
    if !pass(&file.path, cancel, |piece| {
        sha256.update(piece);
        if let Some(verifier) = &mut verifier {
            verifier.update(piece);
        }
        done.fetch_add(piece.len() as u64, Ordering::Relaxed);
    })? {
        return Ok(Ok(None));
    }
    let digest = sha256.finish();
    let outcome = match (verifier, file.expected) {
        (Some(verifier), _) => verifier.finish().map(drop),
        (None, Some(expected)) if expected != digest => Err(Mismatch {
            kind: "sha256",
            expected: expected.to_string(),
            found: digest.to_string(),
        }),
        (None, _) => Ok(()),
    };
    let Err(mismatch) = outcome else {
        return Ok(Ok(Some(digest)));
    };
    // What some writers compute under the name of another digest.
    let Some(mut second) = expected.and_then(|expected| expected.second_verifier()) else {
        return Ok(Err(mismatch));
    };
    if !pass(&file.path, cancel, |piece| second.update(piece))? {
        return Ok(Ok(None));
    }
    let second = second.finish();
    Ok(second.map(|_| Some(digest)).map_err(|_| mismatch))
}

/// Shows `look` all bytes of a file; returns false if it was cancelled.
fn pass(path: &Path, cancel: &Cancel, mut look: impl FnMut(&[u8])) -> io::Result<bool> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; PIECE];
    loop {
        if cancel.is_cancelled() {
            return Ok(false);
        }
        match file.read(&mut buffer) {
            Ok(0) => return Ok(true),
            Ok(n) => look(&buffer[..n]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?
        .take(MAX_FILE_BYTES + 1)
        .read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let expected = format!("expected at most {MAX_FILE_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, expected));
    }
    Ok(bytes)
}
