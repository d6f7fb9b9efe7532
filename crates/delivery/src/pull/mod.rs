//! Fetching models into the store: what to fetch, where from, and what is here already.
//!
//! [`pull`] waits until a model is in the store; an [`IncomingPackage`] provides its files while they arrive.
//! Neither prints: progress is an [`Event`], and the keys to trust are an argument.
//!
//! ```no_run
//! use sterna_delivery::{pull::{Event, PullOptions, pull}, sign::TrustList, store::Store};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let store = Store::open("models")?;
//! let notify = |event: Event<'_>| println!("{event:?}");
//! let options = PullOptions::default();
//! let pulled = pull(&store, "https://example.org/tiny", &options, &TrustList::default(), &notify)?;
//! let model = store.model(&pulled.name)?;
//! # let _ = model;
//! # Ok(())
//! # }
//! ```

mod deltas;
mod error;
mod gguf_file;
mod incoming;
mod places;
mod sources;
mod warn_once;

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::Path;

use sterna_format::rdrr::{MANIFEST_FILE, Package};

#[cfg(feature = "stores")]
use crate::artifact::LAYOUT_FILE;
use crate::fetch::{
    self, Cancel, Fault, FetchError, Limits, Progress, Report, fetch_from, fetch_small, read_small,
};
use crate::hash::{Algorithm, Verified, digest_of};
use crate::package::{
    CONFIG_FILE, Contents, HashedFile, MAX_FILE_BYTES, Offer, PackageError, check_signature,
};
#[cfg(feature = "p2p")]
use crate::peers::{PeerOptions, Ticket, is_peer_address};
use crate::sign::{SIGNATURE_FILE, TrustList};
#[cfg(feature = "stores")]
use crate::source::artifact::{ArtifactSource, Layout};
#[cfg(feature = "object-store")]
use crate::source::bucket::{Bucket, BucketSource, is_bucket_address};
use crate::source::hugging_face::{Hub, Repository};
#[cfg(feature = "oci")]
use crate::source::registry::{Registry, RegistryAddress, RegistryBlobs, is_registry_address};
use crate::source::{FolderSource, HttpOptions, HttpSource, Source, Url, percent_decoded};
use crate::store::{Blob, Entry, Pull, Store, is_allowed, portable_name};

pub use self::{
    deltas::DeltaFailure,
    error::{PullError, Rejection, Warning},
    incoming::IncomingPackage,
};
use self::{
    deltas::{Made, add_received},
    places::Places,
    sources::{Chosen, Judge},
    warn_once::WarnOnce,
};

/// Options for pulling a model.
#[derive(Debug, Clone, Default)]
pub struct PullOptions {
    /// Other places with the same package.
    pub mirrors: Vec<String>,
    /// The name in the store; by default, the last part of its address.
    pub name: Option<String>,
    /// Whether it may take the place of a model of that name from elsewhere.
    pub replace: bool,
    /// What the store says that it came from, if not the address: of a package that was made on this machine.
    pub made_from: Option<String>,
    /// Names that stand for something else than a model in the store.
    pub taken: Vec<String>,
    /// Which model of a Hugging Face repository: a file's name, or a part of a GGUF file's.
    pub file: Option<String>,
    /// Parallelism, rate and patience.
    pub limits: Limits,
    /// Ends the pull early. What has arrived is recorded, and the next pull goes on with it.
    pub cancel: Cancel,
    /// The server of repositories that the address may refer to; without one, it is a package's address.
    pub hub: Option<Hub>,
    /// How peers are found and reached.
    #[cfg(feature = "p2p")]
    pub peers: PeerOptions,
}

/// The result of a pull.
#[derive(Debug, Clone)]
pub struct Pulled {
    /// The model's name in the store.
    pub name: String,
    /// Where it came from.
    pub source: String,
    /// Bytes of all files.
    pub size: u64,
    /// Bytes received from sources.
    pub received: u64,
    /// The same by source: each that was asked for files.
    pub received_by: Vec<(String, u64)>,
    /// Bytes copied from models that were here.
    pub copied: u64,
    /// Bytes made of models that were here, by deltas.
    pub made: u64,
    /// Bytes of these deltas, which are among those received.
    pub deltas: u64,
    /// The signer.
    pub signer: Option<String>,
    /// Sources dropped, and why.
    pub dropped: Vec<(String, String)>,
}

impl Pulled {
    fn add_made(&mut self, made: Made) {
        self.made = made.bytes;
        self.deltas = made.received;
        self.received += made.received;
        for (source, n_bytes) in made.received_by {
            add_received(&mut self.received_by, &source, n_bytes);
        }
    }
}

/// What happens during a pull.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event<'a> {
    /// Something that the user should know, and that doesn't stop the pull.
    Warning(Warning),
    /// All files of the model, and their sizes. For a package before any is verified.
    Listed(&'a BTreeMap<String, u64>),
    /// A file is verified, and readable.
    Verified {
        /// Its path within the model.
        file: &'a str,
        /// Where it is; its bytes never change.
        path: &'a Path,
    },
    /// The progress of the files, about ten times a second.
    Progress(Progress),
}

/// A callback for each event, from any thread.
pub type Notify<'a> = dyn Fn(Event<'_>) + Sync + 'a;

/// Fetches the model at `address`, and at the mirrors that `options` name, into `store`.
///
/// The address is the URL of a package, of a Hugging Face repository or of a GGUF file (of a split set, the
/// first), a folder, or with the features for them a folder of an object store or a repository of a registry. A GGUF file has no digests: what is fetched is what the server sends, it is hashed here,
/// and fetched again only if the server says that it has changed.
///
/// Errors: [`PullError`].
pub fn pull(
    store: &Store,
    address: &str,
    options: &PullOptions,
    trust: &TrustList,
    notify: &Notify<'_>,
) -> Result<Pulled, PullError> {
    let (first, name) = source_and_name(address, options)?;
    if options
        .taken
        .iter()
        .any(|taken| taken.eq_ignore_ascii_case(&name))
    {
        return Err(PullError::NameTaken {
            address: first,
            name,
        });
    }
    let before = store.list()?.into_iter().find(|model| model.name == name);
    if let Some(before) = &before
        && !options.replace
        && before.entry.source.trim_end_matches('/') != first.trim_end_matches('/')
    {
        return Err(PullError::NameInUse {
            address: first,
            name,
            existing: before.entry.source.clone(),
        });
    }
    let before = before.map(|model| model.entry);
    let transaction = Transaction {
        store,
        pull: store.pull(&name)?,
        from: &first,
        limits: &options.limits,
        cancel: &options.cancel,
        notify,
    };
    let no_mirrors = || match options.mirrors.len() {
        0 => Ok(()),
        found => Err(PullError::Mirrors {
            address: first.clone(),
            found,
        }),
    };
    let no_choice = || match &options.file {
        None => Ok(()),
        Some(file) => Err(PullError::Choice {
            address: first.clone(),
            file: file.clone(),
        }),
    };
    if let Ok(url) = Url::parse(&first) {
        let hub = options.hub.as_ref();
        if let Some((hub, repository)) = hub.and_then(|hub| Some((hub, hub.repository(&url)?))) {
            no_mirrors()?;
            return transaction.repository(hub, &repository, options.file.as_deref());
        }
        if let Some((folder, name)) = gguf_file::split(&url) {
            no_mirrors()?;
            no_choice()?;
            return transaction.gguf_file(folder, &name, before.as_ref());
        }
    }
    no_choice()?;
    let must_be_signed = before.and_then(|entry| entry.signer);
    let places = Places::open(address, options, notify)?;
    let judge = Judge {
        trust,
        must_be_signed: must_be_signed.as_deref(),
        manifest: places.manifest(),
        limits: &options.limits,
        cancel: &options.cancel,
    };
    let near;
    let chosen = match places.manifest() {
        Some(manifest) => {
            near = places.near(manifest, &options.cancel)?;
            judge.choose(&[places.given(), refs(&near)].concat())?
        }
        None => {
            let mut chosen = judge.choose(&places.given())?;
            let manifest = digest_of(Algorithm::Sha256, chosen.offer.bytes());
            near = places.near(manifest, &options.cancel)?;
            chosen.join(refs(&near));
            chosen
        }
    };
    transaction.package(chosen)
}

fn refs<'a, 'n>(sources: &'a [Box<dyn Source + 'n>]) -> Vec<&'a dyn Source> {
    sources
        .iter()
        .map(|source| &**source as &dyn Source)
        .collect()
}

/// Where [`pull`] says that a model at `address` comes from, the same from wherever it is pulled again; and
/// what it calls it.
///
/// Errors: [`PullError::Folder`] for a folder that isn't there; [`PullError::NoName`].
pub fn source_and_name(
    address: &str,
    options: &PullOptions,
) -> Result<(String, String), PullError> {
    let address = &*meant(address);
    #[cfg(feature = "p2p")]
    if is_peer_address(address) {
        // The package, whoever has it.
        let manifest = Ticket::parse(address)?.manifest();
        let package = Ticket::of(manifest).to_string();
        let name = || format!("p2p-{}", &manifest.to_string()[..12]);
        let name = options.name.clone().unwrap_or_else(name);
        return Ok((options.made_from.clone().unwrap_or(package), name));
    }
    let first = match address.contains("://") {
        true => address.to_owned(),
        false => (fs::canonicalize(address).map_err(folder_error(address))?)
            .display()
            .to_string(),
    };
    let name = match &options.name {
        Some(name) => name.clone(),
        None => name_of(&first)?,
    };
    Ok((options.made_from.clone().unwrap_or(first), name))
}

/// The package at `address` as it is described there: its manifest, and where its tensors are.
///
/// Errors: [`PullError`].
pub fn read_remote_package(
    address: &str,
    trust: &TrustList,
    notify: &Notify<'_>,
) -> Result<Package, PullError> {
    let options = PullOptions::default();
    let places = Places::open(address, &options, notify)?;
    let (limits, cancel) = (&options.limits, &options.cancel);
    let judge = Judge {
        trust,
        must_be_signed: None,
        manifest: places.manifest(),
        limits,
        cancel,
    };
    let near = match places.manifest() {
        Some(manifest) => places.near(manifest, cancel)?,
        None => Vec::new(),
    };
    let Chosen { offer, sources, .. } = judge.choose(&[places.given(), refs(&near)].concat())?;
    let contents = Contents::of(address, offer.manifest())?;
    let tensors = match contents.tensor_map_file() {
        None => None,
        Some(name) => {
            let sources = match contents.file(name) {
                Some(_) => sources,
                None => vouched(address, &[name], &sources)?,
            };
            let bytes = small(name, &sources, limits, cancel)?;
            if let Some(file) = contents.file(name) {
                let verified = file.blob().expected().verify(&bytes);
                verified.map_err(|problem| PackageError::Mismatch {
                    from: address.to_owned(),
                    file: name.to_owned(),
                    problem,
                })?;
            }
            Some(bytes)
        }
    };
    Ok(contents.package(address, offer.manifest().clone(), tensors.as_deref())?)
}

/// Adds `signature` to the model called `name` in the store, whose manifest is `manifest`.
///
/// Errors: [`PullError::ManifestChanged`] if the manifest has been replaced.
pub fn add_signature(
    store: &Store,
    name: &str,
    manifest: &[u8],
    signature: &str,
    trust: &TrustList,
) -> Result<(), PullError> {
    // Nothing else publishes it while this lives.
    let pull = store.pull(name)?;
    let mut entry = store.model(name)?.entry().clone();
    let expected = Blob::of(Algorithm::Sha256, manifest);
    if entry.files.get(MANIFEST_FILE) != Some(&expected) {
        return Err(PullError::ManifestChanged {
            name: name.to_owned(),
        });
    }
    // Signatures of untrusted keys are kept too: the user is told when the model is opened.
    entry.signer = check_signature(name, trust, manifest, Some(signature)).unwrap_or(None);
    let file = pull.put(Algorithm::Sha256, signature.as_bytes())?;
    entry.files.insert(SIGNATURE_FILE.to_owned(), file);
    Ok(pull.publish(&entry)?)
}

/// A model being fetched into the store.
struct Transaction<'a> {
    store: &'a Store,
    pull: Pull,
    from: &'a str,
    limits: &'a Limits,
    cancel: &'a Cancel,
    notify: &'a Notify<'a>,
}

impl Transaction<'_> {
    fn warn(&self, warning: Warning) {
        (self.notify)(Event::Warning(warning));
    }

    /// Fetches the model of a repository that `file` names, or its only one.
    fn repository(
        self,
        hub: &Hub,
        repository: &Repository,
        file: Option<&str>,
    ) -> Result<Pulled, PullError> {
        let listing = hub.list(repository, self.limits, self.cancel)?;
        let blobs = hub.select(repository, &listing, file)?;
        let source = hub.source(repository, &listing.commit)?;
        let mut entry = Entry::new(self.from);
        let mut large = Vec::new();
        for blob in blobs {
            match HashedFile::try_from(blob) {
                Ok(file) => large.push(file),
                Err(blob) => {
                    let bytes = small(blob.name(), &[&source], self.limits, self.cancel)?;
                    verify(&blob, &bytes)?;
                    let file = self.pull.put(Algorithm::Sha256, &bytes)?;
                    entry.files.insert(blob.name().to_owned(), file);
                }
            }
        }
        self.announce(&entry, &sizes(&large))?;
        self.finish(entry, &large, &[&source], 1)
    }

    /// Fetches the package that was chosen.
    fn package(self, chosen: Chosen<'_>) -> Result<Pulled, PullError> {
        let Chosen {
            offer,
            sources,
            n_sure,
            silent,
            rejected,
        } = chosen;
        for source in silent {
            let fault = Fault::Stalled;
            self.warn(Warning::Silent { source, fault });
        }
        let mut dropped = Vec::new();
        for (source, reason) in rejected {
            dropped.push((source.clone(), reason.without_name(&source)));
            self.warn(Warning::NotUsed { source, reason });
        }
        let manifest = offer.manifest();
        let mut entry = self.entry(&offer)?;
        let contents = Contents::of(self.from, manifest)?;
        let mut unverified = contents.unverified().to_vec();
        let believed: Vec<&dyn Source> = match unverified.is_empty() {
            true => known(&sources),
            false => vouched(self.from, &unverified, &sources)?,
        };
        if contents.may_have_config(manifest)
            && !believed.is_empty()
            && let Some(bytes) = small_if_any(CONFIG_FILE, &believed, self.limits, self.cancel)?
        {
            let file = self.pull.put(Algorithm::Sha256, &bytes)?;
            entry.files.insert(CONFIG_FILE.to_owned(), file);
            unverified.push(CONFIG_FILE.to_owned());
        }
        let mut tensors = None;
        for name in contents.unverified() {
            let bytes = small(name, &believed, self.limits, self.cancel)?;
            let file = self.pull.put(Algorithm::Sha256, &bytes)?;
            entry.files.insert(name.clone(), file);
            if contents.tensor_map_file() == Some(name) {
                tensors = Some(bytes);
            }
        }
        if !unverified.is_empty() {
            self.warn(Warning::NoDigests {
                from: self.from.to_owned(),
                files: unverified,
            });
        }
        if let (None, Some(file)) = (
            &tensors,
            contents
                .tensor_map_file()
                .and_then(|name| contents.file(name)),
        ) {
            tensors = Some(self.read_small(file, &sources)?);
        }
        let package = contents.package(self.from, manifest.clone(), tensors.as_deref())?;
        let copied = contents.copy_groups(self.store, &self.pull, manifest, &package)?;
        let made = self.make_groups(&contents, manifest, &package, &sources)?;
        contents.fill_gaps(&self.pull, &package)?;
        entry.groups = contents.groups(manifest, &package);
        self.announce(&entry, &sizes(contents.files()))?;
        // Small files first: they are needed before the shards.
        let files = [contents.beside(), contents.shards()].concat();
        let mut pulled = self.finish(entry, &files, &sources, n_sure)?;
        pulled.dropped.splice(0..0, dropped);
        pulled.copied = copied;
        pulled.add_made(made);
        Ok(pulled)
    }

    /// Reports the files of the model: those of `entry`, which are here, and `coming`, with their sizes.
    fn announce(&self, entry: &Entry, coming: &[(String, u64)]) -> Result<(), PullError> {
        let here = entry.files.iter();
        let here = here.map(|(name, file)| (name.clone(), file.size));
        (self.notify)(Event::Listed(&here.chain(coming.iter().cloned()).collect()));
        for (name, file) in &entry.files {
            let path = &self.pull.commit(file)?;
            (self.notify)(Event::Verified { file: name, path });
        }
        Ok(())
    }

    /// What is known of the package before its files are.
    fn entry(&self, offer: &Offer) -> Result<Entry, PullError> {
        let mut entry = Entry::new(self.from);
        entry.signer = offer.signer().map(str::to_owned);
        let manifest = self.pull.put(Algorithm::Sha256, offer.bytes())?;
        entry.files.insert(MANIFEST_FILE.to_owned(), manifest);
        if let Some(text) = offer.signature() {
            let file = self.pull.put(Algorithm::Sha256, text.as_bytes())?;
            entry.files.insert(SIGNATURE_FILE.to_owned(), file);
        }
        Ok(entry)
    }

    /// The bytes of a small file, which is put into the store if it isn't there.
    fn read_small(&self, file: &HashedFile, sources: &[&dyn Source]) -> Result<Vec<u8>, PullError> {
        let blob = file.stored();
        if self.pull.present(&blob)? == blob.size {
            let path = self.pull.commit(&blob)?;
            return fs::read(&path).map_err(folder_error(&path.display().to_string()));
        }
        let bytes = small(file.name(), sources, self.limits, self.cancel)?;
        let verified = verify(file.blob(), &bytes)?;
        self.pull.write_at(&blob, 0, &bytes)?;
        self.pull.commit_verified(&blob, verified)?;
        Ok(bytes)
    }

    /// Fetches `files`, rather from the first `n_sure` of `sources`, and publishes `entry` with them.
    fn finish(
        self,
        mut entry: Entry,
        files: &[HashedFile],
        sources: &[&dyn Source],
        n_sure: usize,
    ) -> Result<Pulled, PullError> {
        for file in files {
            entry.files.insert(file.name().to_owned(), file.stored());
        }
        let mut failed = None;
        let report = fetch::fetch_rather(
            files.iter().map(|file| file.blob().clone()).collect(),
            sources,
            n_sure,
            &self.pull,
            self.limits.clone(),
            self.cancel,
            &mut |event| match event {
                fetch::Event::Committed { blob, .. } => {
                    // Every blob that is fetched is a file of the entry.
                    let Some(file) = entry.files.get(blob.name()) else {
                        return;
                    };
                    match self.pull.commit(file) {
                        Ok(path) => (self.notify)(Event::Verified {
                            file: blob.name(),
                            path: &path,
                        }),
                        Err(error) => failed = Some(error),
                    }
                }
                fetch::Event::Progress(so_far) => (self.notify)(Event::Progress(so_far)),
            },
        )?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let known = self.store.labelled()?;
        for (file, how) in files.iter().zip(&report.verified) {
            let is_labelled = match how {
                Some(how) => *how == Verified::LabelledSha256,
                // It was here.
                None => known.contains(&file.stored()),
            };
            if is_labelled {
                entry.labelled.insert(file.name().to_owned());
            }
        }
        let mut labelled = entry.labelled.iter();
        if let Some(first) = labelled.next() {
            self.warn(Warning::LabelledSha256 {
                from: self.from.to_owned(),
                file: first.clone(),
                n_more: labelled.count(),
            });
        }
        self.publish(&entry, report)
    }

    /// Publishes `entry`, all of whose files are in the store after the fetch that `report` is of.
    fn publish(self, entry: &Entry, report: Report) -> Result<Pulled, PullError> {
        for (source, why) in &report.dropped {
            self.warn(Warning::GivenUp {
                source: source.clone(),
                why: why.clone(),
            });
        }
        let pulled = Pulled {
            name: self.pull.name().to_owned(),
            source: entry.source.clone(),
            size: entry.size(),
            received: report.progress.received_bytes,
            received_by: report.received_by,
            copied: 0,
            made: 0,
            deltas: 0,
            signer: entry.signer.clone(),
            dropped: report.dropped,
        };
        self.pull.publish(entry)?;
        Ok(pulled)
    }
}

fn sizes(files: &[HashedFile]) -> Vec<(String, u64)> {
    let sizes = files.iter();
    let sizes = sizes.map(|file| (file.name().to_owned(), file.size()));
    sizes.collect()
}

/// Those of `sources` that somebody vouches for.
fn known<'a>(sources: &[&'a dyn Source]) -> Vec<&'a dyn Source> {
    let known = sources.iter().copied().filter(|s| !s.is_stranger());
    known.collect()
}

/// Those of `sources` whose word counts for `files`, which have no digests.
///
/// Errors: [`PullError::OnlyStrangers`] if there are none.
fn vouched<'a>(
    from: &str,
    files: &[impl ToString],
    sources: &[&'a dyn Source],
) -> Result<Vec<&'a dyn Source>, PullError> {
    let believed = known(sources);
    match believed.is_empty() {
        false => Ok(believed),
        true => Err(PullError::OnlyStrangers {
            from: from.to_owned(),
            files: files.iter().map(ToString::to_string).collect(),
        }),
    }
}

/// A file without a known digest.
fn small(
    name: &str,
    sources: &[&dyn Source],
    limits: &Limits,
    cancel: &Cancel,
) -> Result<Vec<u8>, FetchError> {
    let max = MAX_FILE_BYTES as usize;
    Ok(fetch_small(name, max, sources, limits, cancel)?.0)
}

/// The same; `None` if the first source that answers says that there is none.
fn small_if_any(
    name: &str,
    sources: &[&dyn Source],
    limits: &Limits,
    cancel: &Cancel,
) -> Result<Option<Vec<u8>>, FetchError> {
    let fetched = fetch_from(sources, name, limits, cancel, |source| {
        let answer = source.open(name, None);
        match answer.and_then(|answer| read_small(answer, name, MAX_FILE_BYTES as usize, limits)) {
            Ok(bytes) => Ok(Some(bytes)),
            // Some servers have a page for what isn't there.
            Err(
                Fault::Missing { .. }
                | Fault::Refused { status: 404 | 410 }
                | Fault::NotData { .. },
            ) => Ok(None),
            Err(fault) => Err(fault),
        }
    });
    Ok(fetched?.0)
}

fn verify(blob: &fetch::Blob, bytes: &[u8]) -> Result<Verified, PullError> {
    let verified = blob.expected().verify(bytes);
    verified.map_err(|problem| PullError::Mismatch {
        file: blob.name().to_owned(),
        problem,
    })
}

fn folder_error(address: &str) -> impl FnOnce(io::Error) -> PullError {
    let address = address.to_owned();
    move |source| PullError::Folder { address, source }
}

/// What is meant by `address`: the package that it is the manifest of, or a GGUF file without a slash behind it.
fn meant(address: &str) -> Cow<'_, str> {
    let Some((scheme, rest)) = address.split_once("://") else {
        let path = Path::new(address);
        let is_manifest = path.ends_with(MANIFEST_FILE) && path.is_file();
        return match path.parent().filter(|_| is_manifest) {
            Some(folder) => Path::new(".")
                .join(folder)
                .to_string_lossy()
                .into_owned()
                .into(),
            None => address.into(),
        };
    };
    let (path, query) = rest.split_at(rest.find(['?', '#']).unwrap_or(rest.len()));
    let file = path.trim_end_matches('/');
    match file.rsplit_once('/') {
        Some((folder, MANIFEST_FILE)) => format!("{scheme}://{folder}{query}").into(),
        Some((_, name)) if gguf_file::is_name(name) => format!("{scheme}://{file}{query}").into(),
        _ => address.into(),
    }
}

fn source<'a>(address: &str, notify: &'a Notify<'a>) -> Result<Box<dyn Source + 'a>, PullError> {
    let address = &*meant(address);
    #[cfg(feature = "object-store")]
    if is_bucket_address(address) {
        let source = ArtifactSource::new(Layout(BucketSource(Bucket::open(address)?)));
        return Ok(Box::new(WarnOnce::new(source, notify)));
    }
    #[cfg(feature = "oci")]
    if is_registry_address(address) {
        let source = ArtifactSource::new(RegistryBlobs(Registry::open(address)?));
        return Ok(Box::new(WarnOnce::new(source, notify)));
    }
    if address.contains("://") {
        let url = Url::parse(address.trim_end_matches('/'))?;
        let source = HttpSource::new(url, HttpOptions::default());
        return Ok(Box::new(WarnOnce::new(source, notify)));
    }
    let metadata = fs::metadata(address).map_err(folder_error(address))?;
    if !metadata.is_dir() {
        return Err(PullError::NotAFolder {
            address: address.to_owned(),
        });
    }
    let folder = FolderSource::new(address);
    #[cfg(feature = "stores")]
    if Path::new(address).join(LAYOUT_FILE).is_file() {
        return Ok(Box::new(ArtifactSource::new(Layout(folder))));
    }
    Ok(Box::new(folder))
}

/// The default name of a model: the last part of its address.
fn name_of(address: &str) -> Result<String, PullError> {
    #[cfg(feature = "oci")]
    if is_registry_address(address) {
        return Ok(portable_name(&RegistryAddress::parse(address)?.stem()));
    }
    let (is_url, path) = match address.split_once("://") {
        Some((_, rest)) => (true, rest),
        None => (false, address),
    };
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let parts: Vec<&str> = path
        .split(['/', '\\'])
        .filter(|part| !part.is_empty())
        .collect();
    // A repository's name, whatever revision or file of it is selected.
    let last = match parts
        .iter()
        .position(|part| matches!(*part, "resolve" | "tree" | "blob"))
    {
        Some(i) if i > 0 => parts[i - 1],
        _ => parts.last().copied().unwrap_or_default(),
    };
    if last.is_empty() {
        return Err(PullError::NoName {
            address: address.to_owned(),
        });
    }
    let decoded = is_url.then(|| percent_decoded(last)).flatten();
    let last = decoded.as_deref().unwrap_or(last);
    Ok(portable_name(gguf_file::stem(last)))
}

/// `name` without what the store doesn't accept in names of files, such as spaces.
fn portable(name: &str) -> String {
    name.replace(|c| !is_allowed(c), "-")
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
            ("https://example.org/a/tiny-Q4_0.gguf?key=1", "tiny-Q4_0"),
            ("https://example.org/big-00001-of-00003.gguf", "big"),
            ("https://example.org/a%20tiny.gguf", "a-tiny"),
            ("https://example.org/tiny.GGUF", "tiny"),
            ("s3://bucket/models/tiny/", "tiny"),
        ] {
            assert_eq!(name_of(address).unwrap(), name, "{address}");
        }
        assert!(name_of("///").is_err());
        #[cfg(feature = "oci")]
        for (address, name) in [
            ("oci://ghcr.io/me/tiny", "tiny"),
            ("oci://localhost:5000/tiny:v2", "tiny-v2"),
        ] {
            assert_eq!(name_of(address).unwrap(), name, "{address}");
        }
    }

    #[test]
    fn addresses_that_are_nearly_right_are_understood() {
        for (address, expected) in [
            ("https://host/p/manifest.json?key=1", "https://host/p?key=1"),
            ("https://host/manifest.json", "https://host"),
            ("https://host/p/x.gguf/", "https://host/p/x.gguf"),
            ("https://host/p/x.GGUF//?a=/", "https://host/p/x.GGUF?a=/"),
            ("https://host/p/", "https://host/p/"),
            ("https://manifest.json/", "https://manifest.json/"),
            ("no/such/manifest.json", "no/such/manifest.json"),
        ] {
            assert_eq!(meant(address), expected);
        }
    }
}
