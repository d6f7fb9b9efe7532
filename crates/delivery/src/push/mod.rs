//! Sending packages to registries and object stores.
//!
//! Files are sent by their digests, in any order, and only those that aren't there; then the manifest that names them,
//! if the place still has what it had at the beginning. So nobody sees a half package, the same push sends what an
//! interrupted one didn't, and of two that send different packages to one place one wins whole.
//!
//! ```no_run
//! use sterna_delivery::push::{PackageFiles, PushOptions, push};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let files = PackageFiles::folder("tiny-rdrr");
//! let pushed = push(&files, "oci://ghcr.io/me/tiny:v1", &PushOptions::default(), &|event| {
//!     println!("{event:?}");
//! })?;
//! println!("sha256:{}", pushed.digest);
//! # Ok(())
//! # }
//! ```

mod body;
#[cfg(feature = "object-store")]
mod bucket;
mod error;
mod package;
#[cfg(feature = "oci")]
mod registry;
mod target;
#[cfg(feature = "object-store")]
mod uploads;

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use bytes::Bytes;

use self::{
    body::{Body, Content},
    package::{Local, LocalFile},
    target::{Current, Target, TargetError},
};
pub use self::{error::PushError, package::PackageFiles};
use crate::{
    artifact::{File, describe},
    fetch::Cancel,
    hash::{Algorithm, Digest, digest_of},
    sign::TrustList,
};

/// Options for a push.
#[derive(Debug, Clone)]
pub struct PushOptions {
    /// Files that are sent at a time.
    pub parallel: usize,
    /// How often a file is sent again that couldn't be sent.
    pub retries: u32,
    /// Ends the push early. What was sent stays there, and the next push sends the rest.
    pub cancel: Cancel,
    /// Keys by which a signature is checked before it is sent. One by a key that isn't here is sent unchecked.
    pub trust: TrustList,
    /// The folder in which uploads of large files to object stores are noted, so that a push goes on within them;
    /// without one they are sent whole.
    pub uploads: Option<PathBuf>,
}

impl Default for PushOptions {
    /// Four files at a time, each tried five times, and nothing noted.
    fn default() -> Self {
        Self {
            parallel: 4,
            retries: 4,
            cancel: Cancel::new(),
            trust: TrustList::default(),
            uploads: None,
        }
    }
}

/// The result of a push.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pushed {
    /// Where it is.
    pub target: String,
    /// The SHA-256 of its OCI manifest, by which it can be pinned.
    pub digest: Digest,
    /// Bytes of all files.
    pub size: u64,
    /// Bytes of files that were sent, those of attempts that failed among them.
    pub sent: u64,
    /// The number of files.
    pub n_files: usize,
    /// How many of them were sent.
    pub n_sent: usize,
    /// The manifest that was there before, if it was another.
    pub replaced: Option<Digest>,
}

/// What happens during a push.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Bytes of files that are checked before anything is sent.
    Checked {
        /// Bytes so far.
        done: u64,
        /// Bytes of all files.
        total: u64,
    },
    /// Bytes that are there, because they were or because they were sent.
    Progress {
        /// Bytes so far.
        done: u64,
        /// Bytes of all files.
        total: u64,
    },
}

/// The wait before a file is sent again the first time; it doubles.
const BACKOFF: Duration = Duration::from_millis(500);

/// How often progress is told.
const TICK: Duration = Duration::from_millis(100);

/// Whether a package can be pushed to `address`, by its scheme.
pub fn is_target(address: &str) -> bool {
    #[cfg(feature = "object-store")]
    if crate::source::bucket::is_bucket_address(address) {
        return true;
    }
    #[cfg(feature = "oci")]
    if crate::source::registry::is_registry_address(address) {
        return true;
    }
    let _ = address;
    false
}

fn open(address: &str, uploads: Option<PathBuf>) -> Result<Box<dyn Target>, PushError> {
    #[cfg(feature = "object-store")]
    if crate::source::bucket::is_bucket_address(address) {
        let bucket = crate::source::Bucket::open(address)?;
        return Ok(Box::new(bucket::BucketTarget::new(bucket, uploads)));
    }
    #[cfg(feature = "oci")]
    if crate::source::registry::is_registry_address(address) {
        let registry = crate::source::Registry::open(address)?;
        return Ok(Box::new(registry::RegistryTarget::new(registry)?));
    }
    let _ = uploads;
    Err(PushError::NotATarget {
        address: address.chars().take(200).collect(),
    })
}

/// Checks that a package can be pushed to `address`, without asking anyone.
///
/// Errors: [`PushError`].
pub fn check_target(address: &str) -> Result<(), PushError> {
    open(address, None).map(drop)
}

/// Sends the package with these `files` to `address`: a folder of an object store, or a repository of a registry, at
/// a tag. All bytes are compared with the manifest before any is sent, and once more while they are.
///
/// Errors: [`PushError`].
pub fn push(
    files: &PackageFiles,
    address: &str,
    options: &PushOptions,
    notify: &(dyn Fn(Event) + Sync),
) -> Result<Pushed, PushError> {
    let target = open(address, options.uploads.clone())?;
    push_to(files, &*target, options, notify)
}

fn push_to(
    files: &PackageFiles,
    target: &dyn Target,
    options: &PushOptions,
    notify: &(dyn Fn(Event) + Sync),
) -> Result<Pushed, PushError> {
    let Local { manifest, files } = package::read(files, options, notify)?;
    let described: Vec<_> = files.iter().map(|file| file.described.clone()).collect();
    let described = describe(&manifest, &described)?;
    let digest = digest_of(Algorithm::Sha256, &described.manifest);
    let sender = Sender {
        target,
        options,
        sent: AtomicU64::new(0),
        n_sent: AtomicUsize::new(0),
        there: Arc::default(),
    };
    let before = sender.again("what is there", || target.current(&options.cancel))?;
    let size = files.iter().map(|file| file.described.size).sum();
    sender.send_all(&files, size, notify)?;
    // Small, and of no use to anyone without the files.
    sender.send(
        "the description of the model",
        digest_of(Algorithm::Sha256, &described.config),
        described.config.len() as u64,
        &Content::Memory(Bytes::from(described.config)),
    )?;
    if before.digest != Some(digest) {
        sender.again("the manifest", || {
            target.commit(&described.manifest, &digest, &before, &options.cancel)
        })?;
    }
    Ok(Pushed {
        target: target.name().to_owned(),
        digest,
        size,
        sent: sender.sent.into_inner(),
        n_files: files.len(),
        n_sent: sender.n_sent.into_inner(),
        replaced: before.digest.filter(|before| *before != digest),
    })
}

struct Sender<'a> {
    target: &'a dyn Target,
    options: &'a PushOptions,
    /// Bytes that were sent of files that are there now, in all attempts.
    sent: AtomicU64,
    n_sent: AtomicUsize,
    /// Bytes that are there, those under way included.
    there: Arc<AtomicU64>,
}

impl Sender<'_> {
    /// Sends what isn't there yet of `files`, which have `total` bytes.
    fn send_all(
        &self,
        files: &[LocalFile],
        total: u64,
        notify: &(dyn Fn(Event) + Sync),
    ) -> Result<(), PushError> {
        let tell = || {
            let done = self.there.load(Ordering::Relaxed).min(total);
            notify(Event::Progress { done, total });
        };
        in_parallel(
            self.options.parallel,
            files,
            &self.options.cancel,
            &tell,
            |file| {
                let File {
                    name, digest, size, ..
                } = &file.described;
                let content = Content::File(file.path.clone());
                if let Some(sent) = self.send(name, *digest, *size, &content)? {
                    self.sent.fetch_add(sent, Ordering::Relaxed);
                    self.n_sent.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            },
        )
    }

    /// Sends a blob unless it is there; returns how much of it was sent.
    fn send(
        &self,
        name: &str,
        digest: Digest,
        size: u64,
        content: &Content,
    ) -> Result<Option<u64>, PushError> {
        let (target, cancel) = (self.target, &self.options.cancel);
        if self.again(name, || target.has(&digest, size, cancel))? {
            self.there.fetch_add(size, Ordering::Relaxed);
            return Ok(None);
        }
        let mut sent = 0;
        self.again(name, || {
            let body = Body::new(content.clone(), digest, size, Arc::clone(&self.there));
            let outcome = target.put(&body, cancel);
            sent += body.sent();
            match (outcome, body.damage()) {
                (Ok(()), _) => {
                    body.settle();
                    Ok(())
                }
                (Err(_), Some(damage)) => {
                    body.take_back();
                    Err(TargetError::Damaged(damage))
                }
                (Err(error), None) => {
                    body.take_back();
                    Err(error)
                }
            }
        })?;
        Ok(Some(sent))
    }

    /// Does `work`, which is about `what`, again and again while that may help.
    fn again<T>(
        &self,
        what: &str,
        mut work: impl FnMut() -> Result<T, TargetError>,
    ) -> Result<T, PushError> {
        let (mut wait, mut left) = (BACKOFF, self.options.retries);
        loop {
            let cancel = &self.options.cancel;
            let error = match work() {
                _ if cancel.is_cancelled() => return Err(PushError::Cancelled),
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            if left == 0 || !error.may_pass() {
                return Err(PushError::of(self.target.name(), what, error));
            }
            left -= 1;
            let until = Instant::now() + wait;
            while Instant::now() < until && !cancel.is_cancelled() {
                thread::sleep(TICK.min(wait));
            }
            wait *= 2;
        }
    }
}

/// Does `work` for each of `items`, for up to `n` of them at a time, and calls `tell` meanwhile and at the end. After
/// an error nothing more is begun.
fn in_parallel<T: Sync, E: Send>(
    n: usize,
    items: &[T],
    cancel: &Cancel,
    tell: &dyn Fn(),
    work: impl Fn(&T) -> Result<(), E> + Sync,
) -> Result<(), E> {
    let next = AtomicUsize::new(0);
    let (sender, outcomes) = mpsc::channel();
    let mut failed = None;
    thread::scope(|scope| {
        for _ in 0..n.clamp(1, items.len().max(1)) {
            let (sender, next, work) = (sender.clone(), &next, &work);
            scope.spawn(move || {
                while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed))
                    && !cancel.is_cancelled()
                {
                    // It listens until the last sender is gone.
                    let _ = sender.send(work(item));
                }
            });
        }
        drop(sender);
        loop {
            match outcomes.recv_timeout(TICK) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    next.store(items.len(), Ordering::Relaxed);
                    failed.get_or_insert(error);
                }
                Err(RecvTimeoutError::Timeout) => tell(),
                Err(RecvTimeoutError::Disconnected) => break,
            }
        }
    });
    tell();
    match failed {
        Some(error) => Err(error),
        None => Ok(()),
    }
}
