//! The index of a model: its files, and where its groups are. One JSON file for each revision.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    time::{Duration, SystemTime},
};

use serde::{Deserialize, Serialize};

use crate::hash::{Algorithm, Digest};

use super::{Blob, Piece, StoreError, name};

/// Maximum size of an index file. A model of a million groups stays below.
pub(super) const MAX_INDEX_BYTES: u64 = 256 << 20;

/// The version of index files that is written and read.
const VERSION: u32 = 1;

/// One revision of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    /// Where it was fetched from.
    pub source: String,
    /// The id of the key it was signed with, if it was.
    pub signer: Option<String>,
    /// When it was published, to the second.
    pub published: SystemTime,
    /// Its files: paths with `/` between their parts, and the bytes of each.
    pub files: BTreeMap<String, Blob>,
    /// Groups of its bytes that other models may share.
    pub groups: Vec<Group>,
    /// What its source said of files that it has no digests for, to tell whether they have changed there: an
    /// ETag, or a date. By the files' names.
    pub validators: BTreeMap<String, String>,
    /// Files that have the BLAKE3 digest of their bytes as SHA-256, as a known writer labels it.
    pub labelled: BTreeSet<String>,
}

impl Entry {
    /// A model without files yet, published now.
    pub fn new(source: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            signer: None,
            published: SystemTime::now(),
            files: BTreeMap::new(),
            groups: Vec::new(),
            validators: BTreeMap::new(),
            labelled: BTreeSet::new(),
        }
    }

    /// Total bytes of its files; shared ones count once.
    pub fn size(&self) -> u64 {
        let sizes = self.blobs().into_iter().map(|blob| blob.size);
        sizes.fold(0, u64::saturating_add)
    }

    /// The blobs of its files, each once.
    fn blobs(&self) -> BTreeSet<Blob> {
        self.files.values().copied().collect()
    }

    /// The index file of this entry for the model called `model`.
    ///
    /// Errors: [`StoreError`] for names that some system can't have, and groups outside the files.
    pub fn to_json(&self, model: &str) -> Result<Vec<u8>, StoreError> {
        write(model, self)
    }

    /// Reads an index file; returns the model's name and its entry. `path` is used in errors.
    ///
    /// Errors: [`StoreError`] for what [`to_json`](Self::to_json) would not have written.
    pub fn parse(bytes: &[u8], path: &Path) -> Result<(String, Self), StoreError> {
        read(bytes, path)
    }
}

/// Bytes with a digest of their own that consist of pieces of a model's files: the tensors of a layer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The digest of the pieces, one after another.
    pub digest: Digest,
    /// Its pieces.
    pub pieces: Vec<Piece>,
}

#[derive(Serialize, Deserialize)]
struct Record {
    version: u32,
    name: String,
    source: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    signer: Option<String>,
    /// Seconds since 1970.
    published: u64,
    files: BTreeMap<String, BlobRecord>,
    #[serde(default)]
    groups: Vec<GroupRecord>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    validators: BTreeMap<String, String>,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    labelled: BTreeSet<String>,
}

#[derive(Serialize, Deserialize)]
struct BlobRecord {
    algorithm: String,
    digest: String,
    size: u64,
}

#[derive(Serialize, Deserialize)]
struct GroupRecord {
    algorithm: String,
    digest: String,
    /// File, offset and length of each piece.
    pieces: Vec<(String, u64, u64)>,
}

/// The index file of `entry`, which is validated first: its names, and that its groups are within its files.
fn write(model: &str, entry: &Entry) -> Result<Vec<u8>, StoreError> {
    check_files(entry)?;
    let mut file_of = BTreeMap::new();
    for (file, blob) in &entry.files {
        file_of.entry(*blob).or_insert(file.as_str());
    }
    let mut groups = Vec::with_capacity(entry.groups.len());
    for group in &entry.groups {
        let mut pieces = Vec::with_capacity(group.pieces.len());
        for piece in &group.pieces {
            piece.blob.end_of(piece.offset, piece.len)?;
            let file = file_of
                .get(&piece.blob)
                .ok_or_else(|| StoreError::MissingBlob {
                    file: format!("a group with the digest {}", group.digest),
                    blob: piece.blob,
                })?;
            pieces.push(((*file).to_owned(), piece.offset, piece.len));
        }
        groups.push(GroupRecord {
            algorithm: group.digest.algorithm().name().to_owned(),
            digest: group.digest.to_string(),
            pieces,
        });
    }
    let files = entry.files.iter().map(|(file, blob)| {
        let record = BlobRecord {
            algorithm: blob.digest.algorithm().name().to_owned(),
            digest: blob.digest.to_string(),
            size: blob.size,
        };
        (file.clone(), record)
    });
    let record = Record {
        version: VERSION,
        name: model.to_owned(),
        source: entry.source.clone(),
        signer: entry.signer.clone(),
        published: (entry.published.duration_since(SystemTime::UNIX_EPOCH))
            .map_or(0, |since| since.as_secs()),
        files: files.collect(),
        groups,
        validators: entry.validators.clone(),
        labelled: entry.labelled.clone(),
    };
    Ok(serde_json::to_vec_pretty(&record).expect("strings and numbers always become JSON"))
}

/// Reads what [`write`] made; returns the model's name and its entry.
fn read(bytes: &[u8], path: &Path) -> Result<(String, Entry), StoreError> {
    let wrong = |problem: String| StoreError::Index {
        path: path.to_owned(),
        problem,
    };
    let record: Record = serde_json::from_slice(bytes).map_err(|e| wrong(e.to_string()))?;
    if record.version != VERSION {
        let found = record.version;
        return Err(wrong(format!("expected version {VERSION}, found {found}")));
    }
    let digest = |algorithm: &str, hex: &str| {
        let algorithm = algorithm.parse::<Algorithm>();
        algorithm.and_then(|algorithm| Digest::from_hex(algorithm, hex))
    };
    let mut files = BTreeMap::new();
    for (file, blob) in record.files {
        let digest = digest(&blob.algorithm, &blob.digest)
            .map_err(|problem| wrong(format!("file {file:?}: {problem}")))?;
        let size = blob.size;
        files.insert(file, Blob { digest, size });
    }
    let mut groups = Vec::new();
    for (i, group) in record.groups.into_iter().enumerate() {
        let digest = digest(&group.algorithm, &group.digest)
            .map_err(|problem| wrong(format!("group {i}: {problem}")))?;
        let mut pieces = Vec::new();
        for (file, offset, len) in group.pieces {
            let blob = *(files.get(&file))
                .ok_or_else(|| wrong(format!("group {i}: there is no file {file:?}")))?;
            blob.end_of(offset, len)?;
            pieces.push(Piece { blob, offset, len });
        }
        groups.push(Group { digest, pieces });
    }
    let published = Duration::from_secs(record.published);
    let entry = Entry {
        source: record.source,
        signer: record.signer,
        // A clock that far in the future can't be represented.
        published: (SystemTime::UNIX_EPOCH.checked_add(published))
            .unwrap_or(SystemTime::UNIX_EPOCH),
        files,
        groups,
        validators: record.validators,
        labelled: record.labelled,
    };
    name::check_model(&record.name)?;
    check_files(&entry)?;
    let mut sizes = entry.blobs().into_iter().map(|blob| blob.size);
    if sizes.try_fold(0, u64::checked_add).is_none() {
        return Err(wrong(
            "expected files of less than 2^64 bytes together, found more".to_owned(),
        ));
    }
    Ok((record.name, entry))
}

fn check_files(entry: &Entry) -> Result<(), StoreError> {
    let mut seen: BTreeMap<String, &str> = BTreeMap::new();
    for file in entry.files.keys() {
        name::check_file(file)?;
        if let Some(existing) = seen.insert(name::key(file), file) {
            return Err(StoreError::NameTaken {
                kind: "file",
                name: file.clone(),
                existing: existing.to_owned(),
            });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::digest_of;

    fn entry() -> Entry {
        let shard = Blob::of(Algorithm::Blake3, b"0123456789");
        Entry {
            signer: Some("1234".into()),
            published: SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000),
            files: BTreeMap::from([
                ("manifest.json".into(), Blob::of(Algorithm::Sha256, b"{}")),
                ("shard_00000.bin".into(), shard),
                ("copy.bin".into(), shard),
            ]),
            groups: vec![Group {
                digest: digest_of(Algorithm::Sha256, b"12789"),
                pieces: [(1, 2), (7, 3)]
                    .map(|(offset, len)| Piece {
                        blob: shard,
                        offset,
                        len,
                    })
                    .to_vec(),
            }],
            validators: BTreeMap::from([("copy.bin".into(), "\"etag\"".into())]),
            labelled: BTreeSet::from(["manifest.json".into()]),
            ..Entry::new("https://example.org/m")
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let entry = entry();
        let bytes = write("Model", &entry).unwrap();
        let read = read(&bytes, Path::new("x.json")).unwrap();
        assert_eq!(read, ("Model".to_owned(), entry.clone()));
        assert_eq!(entry.size(), 12, "what two files share counts once");
    }

    #[test]
    fn an_entry_that_contradicts_itself_is_refused() {
        let mut outside = entry();
        outside.groups[0].pieces[0].offset = 9;
        let mut foreign = entry();
        foreign.groups[0].pieces[0].blob = Blob::of(Algorithm::Sha256, b"other");
        let mut traversal = entry();
        traversal
            .files
            .insert("../x".into(), Blob::of(Algorithm::Sha256, b""));
        let mut collision = entry();
        collision
            .files
            .insert("COPY.bin".into(), Blob::of(Algorithm::Sha256, b""));
        for (wrong, message) in [
            (outside, "wanted 2 bytes at offset 9, but it has 10"),
            (foreign, "is not in the store"),
            (traversal, "expected a letter"),
            (collision, "differs in case only"),
        ] {
            let error = write("m", &wrong).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }

    #[test]
    fn a_damaged_index_is_an_error_that_names_it() {
        let good = String::from_utf8(write("m", &entry()).unwrap()).unwrap();
        for (from, to, message) in [
            (
                "\"version\": 1",
                "\"version\": 2",
                "expected version 1, found 2",
            ),
            ("\"sha256\"", "\"md5\"", "expected sha256 or blake3"),
            ("\"name\": \"m\"", "\"name\": \"../m\"", "expected"),
            ("\"shard_00000.bin\"", "\"shard/../../x\"", "expected"),
            ("{", "[", "invalid"),
        ] {
            let error = read(good.replace(from, to).as_bytes(), Path::new("m.json")).unwrap_err();
            let text = error.to_string();
            assert!(text.contains(message), "{from}: {text}");
        }
    }
}
