//! Models from elsewhere into the store: what there is to fetch, where from, and what is here already.

mod arrival;
pub(crate) mod contents;
mod offer;
mod signature;
mod told;

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail};
use sterna_delivery::fetch::{self, Cancel, Event, Limits, fetch_small};
use sterna_delivery::hash::{Algorithm, Expected};
use sterna_delivery::sign::SIGNATURE_FILE;
use sterna_delivery::source::hugging_face::Hub;
use sterna_delivery::source::{FolderSource, HttpOptions, HttpSource, Source, Url};
use sterna_delivery::store::{self, Entry, Pull, Store};
use sterna_format::rdrr::{MANIFEST_FILE, Manifest, Package, TensorMap};

use crate::progress::Progress;
use crate::{folders, output};
pub(crate) use arrival::Arrival;
use contents::PackageContents;
use offer::Offer;
pub(crate) use signature::{Standing, check_signature};
use told::Told;

/// The largest file beside the weights that is fetched, read or served: no parser of ours takes a larger
/// one, and the largest `tokenizer.json` in use have about 35 MB.
pub(crate) const MAX_FILE_BYTES: u64 = 64 << 20;

/// What a pull did.
#[derive(Debug, serde::Serialize)]
pub(crate) struct Pulled {
    pub(crate) name: String,
    pub(crate) source: String,
    /// Bytes of all files.
    pub(crate) size: u64,
    /// Bytes that came from sources.
    pub(crate) received: u64,
    /// Bytes taken from models that were here.
    pub(crate) copied: u64,
    /// Whose signature it bears.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) signer: Option<String>,
    /// Sources given up, and why.
    pub(crate) dropped: Vec<(String, String)>,
}

/// The store of this user.
pub(crate) fn store() -> Result<Store> {
    Ok(Store::open(folders::data()?)?)
}

/// Where the model called `name` came from, if there is one in the store and nothing else of that name.
pub(crate) fn origin(store: &Store, name: &str) -> Result<Option<String>> {
    if name.contains(['/', '\\']) || Path::new(name).exists() {
        return Ok(None);
    }
    let model = store.list()?.into_iter().find(|model| model.name == name);
    Ok(model.map(|model| model.entry.source))
}

/// Fetches the model at `sources`, which are the same model in several places, into `store`, under
/// `name` or one made from the first address.
///
/// `file` chooses one of the models of a Hugging Face repository. `arrival` is told of the files of a
/// package as soon as they are verified.
pub(crate) fn pull(
    store: &Store,
    sources: &[String],
    name: Option<&str>,
    file: Option<&str>,
    limits: &Limits,
    arrival: Option<&Arrival>,
) -> Result<Pulled> {
    let first = sources.first().context("expected a source, found none")?;
    // The same from wherever it is pulled again.
    let first = &match first.contains("://") {
        true => first.clone(),
        false => fs::canonicalize(first)
            .with_context(|| first.clone())?
            .display()
            .to_string(),
    };
    let unnamed = name.is_none();
    let name = match name {
        Some(name) => name.to_owned(),
        None => name_of(first)?,
    };
    let before = store.list()?.into_iter().find(|model| model.name == name);
    if let Some(before) = &before
        && unnamed
        && before.entry.source != *first
    {
        bail!(
            "{first}: the store has another model called `{name}`, from {}; give a name",
            before.entry.source
        );
    }
    let must_be_signed = before.and_then(|model| model.entry.signer);
    let pull = store.pull(&name)?;
    let hub = Hub::from_env()?;
    if let Ok(url) = Url::parse(first)
        && let Some(repository) = hub.repository(&url)
    {
        if sources.len() > 1 {
            bail!(
                "{first}: expected no mirrors of a repository, found {}",
                sources.len() - 1
            );
        }
        let cancel = Cancel::new();
        let listing = hub.list(&repository, limits, &cancel)?;
        let blobs = hub.select(&repository, &listing, file)?;
        let source = hub.source(&repository, &listing.commit)?;
        let mut entry = Entry::new(first.as_str());
        let mut large = Vec::new();
        for blob in blobs {
            match stored(&blob) {
                Some(_) => large.push(blob),
                None => {
                    let bytes = small(blob.name(), &[&source], limits)?;
                    blob.expected()
                        .verify(&bytes)
                        .with_context(|| blob.name().to_owned())?;
                    let file = pull.put(Algorithm::Sha256, &bytes)?;
                    entry.files.insert(blob.name().to_owned(), file);
                }
            }
        }
        return finish(pull, entry, large, &[&source], limits, 0, None);
    }
    let opened: Vec<Box<dyn Source>> = sources.iter().map(|s| source(s)).collect::<Result<_>>()?;
    let all: Vec<&dyn Source> = opened.iter().map(|source| &**source).collect();
    let offer = offer::choose(&all, must_be_signed.as_deref(), limits)?;
    pull_package(store, pull, first, offer, limits, arrival)
}

/// Fetches the package on `offer`.
fn pull_package(
    store: &Store,
    pull: Pull,
    from: &str,
    offer: Offer<'_>,
    limits: &Limits,
    arrival: Option<&Arrival>,
) -> Result<Pulled> {
    let Offer {
        manifest,
        bytes,
        signature,
        signer,
        sources,
        dropped,
    } = offer;
    for (source, why) in &dropped {
        output::note(format_args!("warning: {source}: not used: {why}"));
    }
    let mut entry = Entry::new(from);
    entry.signer = signer;
    entry.files.insert(
        MANIFEST_FILE.to_owned(),
        pull.put(Algorithm::Sha256, &bytes)?,
    );
    if let Some(text) = &signature {
        let file = pull.put(Algorithm::Sha256, text.as_bytes())?;
        entry.files.insert(SIGNATURE_FILE.to_owned(), file);
    }
    let mut contents = PackageContents::of(&manifest).with_context(|| from.to_owned())?;
    let mut tensors = None;
    for name in &contents.unverified {
        let bytes = small(name, &sources, limits)?;
        let file = pull.put(Algorithm::Sha256, &bytes)?;
        entry.files.insert(name.clone(), file);
        if contents.tensors_file.as_ref() == Some(name) {
            tensors = Some(bytes);
        }
    }
    if !contents.unverified.is_empty() {
        output::note(format_args!(
            "note: {from}: its manifest has no hashes for {}; only its shards are verified",
            contents.unverified.join(", ")
        ));
    }
    if let (None, Some(name)) = (&tensors, &contents.tensors_file) {
        let blob = contents.blob(name).expect("others are fetched above");
        tensors = Some(in_store(&pull, blob, &sources, limits)?);
    }
    let tensors = package(from, &manifest, &contents, tensors.as_deref())?;
    let copied = contents.copy_groups(store, &pull, &manifest, &tensors)?;
    entry.groups = contents.groups(&manifest, &tensors);
    if let Some(arrival) = arrival {
        let small = entry
            .files
            .iter()
            .map(|(name, file)| (name.clone(), file.size));
        let large = contents
            .blobs
            .iter()
            .map(|blob| (blob.name().to_owned(), blob.size()));
        arrival.announce(small.chain(large).collect());
        for (name, file) in &entry.files {
            arrival.add(name, pull.commit(file)?);
        }
    }
    // Small files first: they are wanted before the shards.
    contents.blobs.rotate_left(manifest.shards.len());
    let mut pulled = finish(
        pull,
        entry,
        contents.blobs,
        &sources,
        limits,
        copied,
        arrival,
    )?;
    pulled.dropped.splice(0..0, dropped);
    Ok(pulled)
}

/// The package at `address` as it is described there: its manifest, and where its tensors are.
pub(crate) fn look_at(address: &str) -> Result<Package> {
    let source = source(address)?;
    let limits = Limits::default();
    let offer = offer::choose(&[&*source], None, &limits)?;
    let contents = PackageContents::of(&offer.manifest).with_context(|| address.to_owned())?;
    let tensors = match &contents.tensors_file {
        None => None,
        Some(name) => {
            let bytes = small(name, &offer.sources, &limits)?;
            if let Some(blob) = contents.blob(name) {
                let verified = blob.expected().verify(&bytes);
                verified.with_context(|| format!("{address}: {name}"))?;
            }
            Some(bytes)
        }
    };
    package(address, &offer.manifest, &contents, tensors.as_deref())
}

/// What `manifest` and the tensor map beside it say together; fails if they contradict each other.
fn package(
    from: &str,
    manifest: &Manifest,
    contents: &PackageContents,
    tensors: Option<&[u8]>,
) -> Result<Package> {
    let external = match (&contents.tensors_file, tensors) {
        (Some(name), Some(bytes)) => {
            let map = TensorMap::parse(bytes);
            Some(map.with_context(|| format!("{from}: {name}"))?)
        }
        _ => None,
    };
    Package::new(manifest.clone(), external).with_context(|| from.to_owned())
}

/// The bytes of a small file, which is put into the store if it isn't there.
fn in_store(
    pull: &Pull,
    blob: &fetch::Blob,
    sources: &[&dyn Source],
    limits: &Limits,
) -> Result<Vec<u8>> {
    let file = stored(blob).expect("only blobs with digests get here");
    if pull.present(&file)? == file.size {
        let path = pull.commit(&file)?;
        return fs::read(&path).with_context(|| path.display().to_string());
    }
    let bytes = small(blob.name(), sources, limits)?;
    let verified = blob.expected().verify(&bytes);
    let verified = verified.with_context(|| blob.name().to_owned())?;
    pull.write_at(&file, 0, &bytes)?;
    pull.commit_verified(&file, verified)?;
    Ok(bytes)
}

/// Fetches `blobs` and publishes `entry` with them.
fn finish(
    pull: Pull,
    mut entry: Entry,
    blobs: Vec<fetch::Blob>,
    sources: &[&dyn Source],
    limits: &Limits,
    copied: u64,
    arrival: Option<&Arrival>,
) -> Result<Pulled> {
    for blob in &blobs {
        let file = stored(blob).expect("only blobs with digests get here");
        entry.files.insert(blob.name().to_owned(), file);
    }
    let total = blobs.iter().map(fetch::Blob::size).sum();
    let progress = Progress::bytes("fetching", total);
    let (mut shown, mut lost) = (0, None);
    let report = fetch::fetch(
        blobs,
        sources,
        &pull,
        limits.clone(),
        &Cancel::new(),
        &mut |event| match (event, arrival) {
            (Event::Committed { blob, .. }, Some(arrival)) => {
                let file = stored(blob).expect("only blobs with digests get here");
                match pull.commit(&file) {
                    Ok(path) => arrival.add(blob.name(), path),
                    Err(error) => lost = Some(error),
                }
            }
            // Whoever waits for the files shows how far they are.
            (Event::Progress(so_far), None) => {
                progress.add(so_far.done_bytes.saturating_sub(shown));
                shown = shown.max(so_far.done_bytes);
            }
            _ => {}
        },
    )?;
    if let Some(error) = lost {
        return Err(error.into());
    }
    drop(progress);
    for (source, why) in &report.dropped {
        output::note(format_args!("warning: {source}: given up: {why}"));
    }
    let pulled = Pulled {
        name: pull.name().to_owned(),
        source: entry.source.clone(),
        size: entry.size(),
        received: report.progress.received_bytes,
        copied,
        signer: entry.signer.clone(),
        dropped: report.dropped,
    };
    pull.publish(&entry)?;
    Ok(pulled)
}

/// A file of which nothing is known.
fn small(name: &str, sources: &[&dyn Source], limits: &Limits) -> Result<Vec<u8>> {
    let max = MAX_FILE_BYTES as usize;
    Ok(fetch_small(name, max, sources, limits, &Cancel::new())?.0)
}

/// Adds `signature` to the model called `name` in the store, whose manifest is `bytes`.
///
/// Errors: the manifest is another one by now.
pub(crate) fn add_signature(name: &str, bytes: &[u8], signature: &str) -> Result<()> {
    let store = store()?;
    // Nobody else publishes it while this lives.
    let pull = store.pull(name)?;
    let mut entry = store.model(name)?.entry().clone();
    let manifest = store::Blob::of(Algorithm::Sha256, bytes);
    if entry.files.get(MANIFEST_FILE) != Some(&manifest) {
        bail!("{name}: its manifest has changed; try again");
    }
    // A key that isn't trusted here is nobody's: whoever opens the model is told.
    entry.signer = check_signature(name, bytes, Some(signature)).unwrap_or(None);
    let file = pull.put(Algorithm::Sha256, signature.as_bytes())?;
    entry.files.insert(SIGNATURE_FILE.to_owned(), file);
    Ok(pull.publish(&entry)?)
}

/// A blob as the store knows it; `None` if its digest isn't known.
pub(crate) fn stored(blob: &fetch::Blob) -> Option<store::Blob> {
    match blob.expected() {
        Expected::Digest(digest) => Some(store::Blob {
            digest,
            size: blob.size(),
        }),
        _ => None,
    }
}

fn source(address: &str) -> Result<Box<dyn Source>> {
    if address.contains("://") {
        let url = Url::parse(address.trim_end_matches('/'))?;
        let source = HttpSource::new(url, HttpOptions::default());
        return Ok(Box::new(Told::new(source)));
    }
    let metadata = fs::metadata(address).with_context(|| address.to_owned())?;
    if !metadata.is_dir() {
        bail!("{address}: expected a URL or a folder, found a file");
    }
    Ok(Box::new(FolderSource::new(address)))
}

/// The name that a model gets if nobody gives it one: the last part of its address.
fn name_of(address: &str) -> Result<String> {
    let path = address.split_once("://").map_or(address, |(_, rest)| rest);
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let parts: Vec<&str> = path
        .split(['/', '\\'])
        .filter(|part| !part.is_empty())
        .collect();
    // A repository is called by its name, whatever revision or file of it is meant.
    let last = match parts
        .iter()
        .position(|part| matches!(*part, "resolve" | "tree" | "blob"))
    {
        Some(i) if i > 0 => parts[i - 1],
        _ => parts.last().copied().unwrap_or_default(),
    };
    if last.is_empty() {
        bail!("{address}: expected a name to keep it under, found none; give one");
    }
    // What the store doesn't take in names, such as the colon before a port.
    let taken = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    Ok(last.replace(|c| !taken(c), "-"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_are_called_by_their_address() {
        for (address, name) in [
            ("https://example.org/models/tiny-rdrr/", "tiny-rdrr"),
            ("https://huggingface.co/owner/repo", "repo"),
            (
                "https://huggingface.co/owner/repo/resolve/main/a.gguf",
                "repo",
            ),
            ("/some/folder/tiny", "tiny"),
            ("http://localhost:8765", "localhost-8765"),
        ] {
            assert_eq!(name_of(address).unwrap(), name, "{address}");
        }
        assert!(name_of("///").is_err());
    }
}
