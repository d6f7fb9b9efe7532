//! What is at an address: the files of a model, how each is verified, and where they are.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use sterna::{Error, ErrorCode, Result};
use sterna_delivery::fetch::{Blob, Fault, Head, PlanError};
use sterna_delivery::hash::{Algorithm, Digest, Expected, digest_of};
use sterna_delivery::package::{
    CONFIG_FILE, Contents, MAX_FILE_BYTES, Offer, hashed_files, signature_text,
};
use sterna_delivery::sign::{SIGNATURE_FILE, TrustList};
use sterna_delivery::source::Url;
use sterna_delivery::source::hugging_face::{Hub, Listing, MAX_LISTING, Repository};
use sterna_format::gguf::split_names;
use sterna_format::rdrr::{MANIFEST_FILE, Manifest};

use crate::js::{Disk, Files, Http, HttpAnswer};

/// Where this side keeps what it knows of files that nothing else describes.
const RECORD_FILE: &str = "sterna.json";

/// What there is to fetch.
pub(crate) struct Remote {
    /// The folders that have the files.
    pub(crate) bases: Vec<Url>,
    /// All large files, in the order in which they are needed.
    pub(crate) blobs: Vec<Blob>,
    /// Small files that came along: name and bytes.
    small: BTreeMap<String, Vec<u8>>,
    /// The manifest of a package.
    pub(crate) manifest: Option<String>,
    /// Its SHA-256, which is what peers know the package by.
    pub(crate) digest: Option<Digest>,
    /// What is known of files without digests.
    record: Record,
}

/// [`RECORD_FILE`]: what was fetched of files without digests.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Record {
    files: BTreeMap<String, Fetched>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Fetched {
    size: u64,
    validator: String,
}

impl Remote {
    /// Asks the `addresses`, the first of which counts, what they have.
    ///
    /// Errors: nobody answers and `disk` has no model; what they answer is no model.
    pub(crate) async fn find(
        addresses: &[String],
        disk: &Disk,
        http: &Http,
        file: Option<&str>,
        trust: &TrustList,
    ) -> Result<Remote> {
        let mut urls = Vec::new();
        for address in addresses {
            urls.push(Url::parse(address).map_err(invalid)?);
        }
        let Some(first) = urls.first() else {
            return Err(invalid("expected an address, found none"));
        };
        let hub = Hub::public();
        if let Some(repository) = hub.repository(first) {
            return Remote::repository(&hub, &repository, http, file).await;
        }
        match first.split_file() {
            Some((folder, name)) if name.ends_with(".gguf") => {
                Remote::gguf(folder, &name, disk, http).await
            }
            _ => Remote::package(&urls, disk, http, trust).await,
        }
    }

    async fn repository(
        hub: &Hub,
        repository: &Repository,
        http: &Http,
        file: Option<&str>,
    ) -> Result<Remote> {
        let listing = hub.listing_address(repository).map_err(invalid)?;
        let json = small(http, &listing, "listing.json", MAX_LISTING).await?;
        let json = json.ok_or_else(|| not_found(format!("{listing}: no such repository")))?;
        let listing = Listing::parse(repository, &json).map_err(invalid_file)?;
        let blobs = hub.select(repository, &listing, file).map_err(invalid)?;
        let base = hub
            .files_address(repository, &listing.commit)
            .map_err(invalid)?;
        Ok(Remote {
            bases: vec![base],
            blobs,
            small: BTreeMap::new(),
            manifest: None,
            digest: None,
            record: Record::default(),
        })
    }

    async fn gguf(folder: Url, first: &str, disk: &Disk, http: &Http) -> Result<Remote> {
        let names =
            split_names(first).map_err(|error| Error::typed(ErrorCode::InvalidRequest, error))?;
        let names = names.unwrap_or_else(|| vec![first.to_owned()]);
        let before = Record::read(disk).await?;
        let mut record = Record::default();
        let mut blobs = Vec::new();
        for name in names {
            let url = folder.below(&name);
            let described = match http.open(&url.to_string(), Some(0..1)).await {
                Ok(answer) => {
                    let described = head(&answer).describe(&name);
                    answer.cancel();
                    described
                }
                Err(message) => Err(Fault::Unreachable { message }),
            };
            let (found, etag) = match described {
                Ok(found) => (
                    Fetched {
                        size: found.size,
                        validator: found.validator,
                    },
                    found.etag,
                ),
                // What is here is used as it is.
                Err(Fault::Unreachable { .. }) if before.files.contains_key(&name) => {
                    (before.files[&name].clone(), None)
                }
                Err(fault) => return Err(unanswered(&url, &fault)),
            };
            if before.files.get(&name).is_some_and(|known| *known != found) {
                disk.remove(&name).await?;
            }
            let mut blob = Blob::new(&name, found.size, Expected::SizeOnly).map_err(plan)?;
            if let Some(etag) = etag {
                blob = blob.with_etag(etag);
            }
            blobs.push(blob);
            record.files.insert(name, found);
        }
        Ok(Remote {
            bases: vec![folder],
            blobs,
            small: BTreeMap::new(),
            manifest: None,
            digest: None,
            record,
        })
    }

    async fn package(urls: &[Url], disk: &Disk, http: &Http, trust: &TrustList) -> Result<Remote> {
        let mut chosen: Option<(Offer, Vec<Url>)> = None;
        let mut problems = Vec::new();
        for url in urls {
            let base = match url.split_file() {
                Some((folder, name)) if name == MANIFEST_FILE => folder,
                _ => url.clone(),
            };
            match ask(&base, http).await {
                Ok(Some((manifest, signature))) => match &mut chosen {
                    None => {
                        let from = base.to_string();
                        let offer = Offer::read(&from, manifest, signature, trust, None);
                        chosen = Some((offer.map_err(package)?, vec![base]));
                    }
                    Some((offer, bases)) => {
                        if offer
                            .compare(&base.to_string(), &manifest, signature, trust)
                            .is_ok()
                        {
                            bases.push(base);
                        }
                    }
                },
                Ok(None) => problems.push(not_found(format!(
                    "{base}: expected a package, found no {MANIFEST_FILE}"
                ))),
                Err(error) => problems.push(error),
            }
        }
        let from = urls[0].to_string();
        let is_offline = chosen.is_none();
        let (manifest, signature, bases) = match chosen {
            Some((offer, bases)) => {
                let signature = offer.signature().map(str::to_owned);
                (offer.bytes().to_vec(), signature, bases)
            }
            None => match whole(disk, MANIFEST_FILE).await? {
                // Nobody answers: what is here is used as it is.
                Some(manifest) => (manifest, None, urls.to_vec()),
                None => {
                    let problem = problems.into_iter().next();
                    return Err(
                        problem.unwrap_or_else(|| not_found("expected a source, found none"))
                    );
                }
            },
        };
        let parsed = Manifest::parse(&manifest)
            .map_err(|error| Error::typed(ErrorCode::InvalidFile, error))?;
        let contents = Contents::of(&from, &parsed).map_err(package)?;
        let mut small_files = BTreeMap::new();
        let mut optional = Vec::new();
        if contents.may_have_config(&parsed) {
            optional.push((CONFIG_FILE.to_owned(), false));
        }
        optional.extend(
            contents
                .unverified()
                .iter()
                .map(|name| (name.clone(), true)),
        );
        for (name, is_needed) in optional {
            let bytes = match is_offline {
                true => whole(disk, &name).await?,
                false => any(http, &bases, &name).await?,
            };
            match bytes {
                Some(bytes) => drop(small_files.insert(name, bytes)),
                None if is_needed => return Err(not_found(format!("{from}: no {name}"))),
                None => {}
            }
        }
        if let Some(before) = whole(disk, MANIFEST_FILE).await?
            && before != manifest
        {
            forget_changed(&before, &parsed, disk).await?;
        }
        if let Some(signature) = signature {
            small_files.insert(SIGNATURE_FILE.to_owned(), signature.into_bytes());
        }
        let text = String::from_utf8(manifest.clone()).ok();
        let digest = digest_of(Algorithm::Sha256, &manifest);
        small_files.insert(MANIFEST_FILE.to_owned(), manifest);
        let files = [contents.beside(), contents.shards()].concat();
        Ok(Remote {
            bases,
            blobs: files.iter().map(|file| file.blob().clone()).collect(),
            small: small_files,
            manifest: text,
            digest: Some(digest),
            record: Record::default(),
        })
    }

    /// Stores the small files, and notes what is known of the others.
    pub(crate) async fn store(&self, disk: &Disk) -> Result<()> {
        for (name, bytes) in &self.small {
            put(disk, name, bytes).await?;
        }
        if !self.record.files.is_empty() {
            let json = serde_json::to_vec(&self.record);
            put(disk, RECORD_FILE, &json.map_err(invalid)?).await?;
        }
        Ok(())
    }

    /// The small files: name and size.
    pub(crate) fn small(&self) -> impl Iterator<Item = (&str, u64)> {
        let files = self.small.iter();
        files.map(|(name, bytes)| (name.as_str(), bytes.len() as u64))
    }
}

impl Record {
    async fn read(disk: &Disk) -> Result<Record> {
        let bytes = whole(disk, RECORD_FILE).await?;
        // Damaged, it is as good as none: files are fetched again.
        Ok(bytes
            .and_then(|bytes| serde_json::from_slice(&bytes).ok())
            .unwrap_or_default())
    }
}

/// Deletes files of the package that `before` describes whose digests are others in `now`, so that none of an
/// earlier revision is taken for one of this.
async fn forget_changed(before: &[u8], now: &Manifest, disk: &Disk) -> Result<()> {
    let Ok(before) = Manifest::parse(before) else {
        return Ok(());
    };
    let digests = |manifest: &Manifest| {
        let shards = manifest.shards.iter();
        let shards = shards.map(|shard| (shard.file_name.clone(), shard.hash));
        let others = hashed_files(manifest).into_iter();
        let others = others.map(|(name, file)| (name.to_owned(), file.hash));
        shards.chain(others).collect::<BTreeMap<_, _>>()
    };
    let now = digests(now);
    for (name, digest) in digests(&before) {
        if now.get(&name) != Some(&digest) {
            disk.remove(&name).await?;
        }
    }
    Ok(())
}

/// Manifest and signature of the package at `base`; `None` if there is none.
async fn ask(base: &Url, http: &Http) -> Result<Option<(Vec<u8>, Option<String>)>> {
    let max = MAX_FILE_BYTES as usize;
    let Some(manifest) = small(http, &base.below(MANIFEST_FILE), MANIFEST_FILE, max).await? else {
        return Ok(None);
    };
    let signature = small(http, &base.below(SIGNATURE_FILE), SIGNATURE_FILE, max).await?;
    let signature = signature.map(|bytes| signature_text(&base.to_string(), bytes));
    Ok(Some((manifest, signature.transpose().map_err(package)?)))
}

async fn any(http: &Http, bases: &[Url], name: &str) -> Result<Option<Vec<u8>>> {
    let mut last = Ok(None);
    for base in bases {
        last = small(http, &base.below(name), name, MAX_FILE_BYTES as usize).await;
        if let Ok(Some(_)) = last {
            break;
        }
    }
    last
}

/// A small file, at most `max` bytes; `None` if the server says that it has none.
async fn small(http: &Http, url: &Url, name: &str, max: usize) -> Result<Option<Vec<u8>>> {
    let answer = http.open(&url.to_string(), None).await;
    let answer = answer.map_err(|message| unanswered(url, &Fault::Unreachable { message }))?;
    match head(&answer).check_kind(name) {
        Ok(()) => {}
        Err(Fault::Refused {
            status: 404 | 403 | 410,
        }) => {
            answer.cancel();
            return Ok(None);
        }
        Err(fault) => {
            answer.cancel();
            return Err(unanswered(url, &fault));
        }
    }
    let mut bytes = Vec::new();
    loop {
        let piece = answer.read().await;
        let piece = piece.map_err(|message| unanswered(url, &Fault::Unreachable { message }))?;
        let Some(piece) = piece else {
            return Ok(Some(bytes));
        };
        bytes.extend_from_slice(&piece);
        if bytes.len() > max {
            answer.cancel();
            let fault = Fault::TooLarge {
                limit: max as u64,
                found: bytes.len() as u64,
            };
            return Err(unanswered(url, &fault));
        }
    }
}

/// The head of an answer, for the planner.
pub(crate) fn head(answer: &HttpAnswer) -> Head {
    Head::read(answer.status(), |name| answer.header(name))
}

/// All of a complete file, if it is there.
pub(crate) async fn whole(disk: &Files, name: &str) -> Result<Option<Vec<u8>>> {
    let Some(len) = disk.len(name).await? else {
        return Ok(None);
    };
    if len > MAX_FILE_BYTES {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < len {
        let piece = disk.read(name, bytes.len() as u64..len).await?;
        if piece.is_empty() {
            break;
        }
        bytes.extend_from_slice(&piece);
    }
    Ok(Some(bytes))
}

/// Stores a small file, unless it is there.
async fn put(disk: &Disk, name: &str, bytes: &[u8]) -> Result<()> {
    if whole(disk, name).await?.as_deref() == Some(bytes) {
        return Ok(());
    }
    disk.remove(name).await?;
    disk.write_at(name, 0, bytes).await?;
    disk.commit(name).await
}

fn invalid(error: impl ToString) -> Error {
    Error::new(ErrorCode::InvalidRequest, error.to_string())
}

fn invalid_file(error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::typed(ErrorCode::InvalidFile, error)
}

fn not_found(message: impl Into<String>) -> Error {
    Error::new(ErrorCode::NotFound, message)
}

fn plan(error: PlanError) -> Error {
    Error::typed(ErrorCode::InvalidFile, error)
}

fn package(error: sterna_delivery::package::PackageError) -> Error {
    let code = match &error {
        sterna_delivery::package::PackageError::Signature { .. } => ErrorCode::Untrusted,
        _ => ErrorCode::InvalidFile,
    };
    Error::typed(code, error)
}

fn unanswered(url: &Url, fault: &Fault) -> Error {
    Error::new(ErrorCode::Io, format!("{url}: {fault}"))
}
