//! GGUF files at plain addresses, which nothing describes: no manifest, no listing, no digests.

use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use sterna_format::gguf::{parse_split_name, split_names};

use super::warn_once::WarnOnce;
use super::{Event, PullError, Pulled, Transaction, Warning, portable};
use crate::fetch::{self, Described, Present, RangeSet, Sink, SinkError, fetch_from, fetch_rather};
use crate::hash::{Expected, Verified};
use crate::source::{HttpOptions, HttpSource, Source as _, Url};
use crate::store::{Blob, Entry, Pull};

/// How the names of GGUF files end, in letters of either case.
const END: &str = ".gguf";

/// The folder of the GGUF file at `url`, and the file's name; `None` for other addresses.
pub(super) fn split(url: &Url) -> Option<(Url, String)> {
    let (folder, name) = url.split_file()?;
    is_name(&name).then_some((folder, name))
}

/// `name` without the end that says that it is a GGUF file's.
fn without_end(name: &str) -> Option<&str> {
    let (rest, end) = name.split_at_checked(name.len().checked_sub(END.len())?)?;
    end.eq_ignore_ascii_case(END).then_some(rest)
}

/// Whether a file of this name is a GGUF file.
pub(super) fn is_name(name: &str) -> bool {
    without_end(name).is_some()
}

/// The name of a GGUF file in the store.
fn stored_name(name: &str) -> String {
    portable(without_end(name).unwrap_or(name)) + END
}

/// What a GGUF file is called without its end, and of a split set without the number of the part.
pub(super) fn stem(name: &str) -> &str {
    match parse_split_name(name) {
        Some((stem, ..)) => stem,
        None => without_end(name).unwrap_or(name),
    }
}

impl Transaction<'_> {
    /// Fetches the GGUF file called `first` in `folder`, and the other parts of its set. Those of `before` that
    /// have not changed there aren't fetched again.
    pub(super) fn gguf_file(
        self,
        folder: Url,
        first: &str,
        before: Option<&Entry>,
    ) -> Result<Pulled, PullError> {
        let is_secure = folder.is_secure();
        let source = HttpSource::new(folder, HttpOptions::default());
        let source = WarnOnce::new(source, self.notify);
        let names = split_names(first)?.unwrap_or_else(|| vec![first.to_owned()]);
        let mut entry = Entry::new(self.from);
        let mut coming = Vec::new();
        for name in &names {
            let (found, _) = fetch_from(&[&source], name, self.limits, self.cancel, |source| {
                source.open(name, Some(0..1))?.head.describe(name)
            })?;
            let file = stored_name(name);
            let unchanged = before.and_then(|before| {
                let blob = *before.files.get(&file)?;
                let same = before.validators.get(&file) == Some(&found.validator);
                (same && blob.size == found.size).then_some(blob)
            });
            match unchanged {
                Some(blob) if self.pull.present(&blob)? == blob.size => {
                    entry.files.insert(file.clone(), blob);
                }
                _ => coming.push(self.unhashed(name, &found)?),
            }
            entry.validators.insert(file, found.validator);
        }
        if !is_secure && !coming.is_empty() {
            self.warn(Warning::Unverified {
                from: self.from.to_owned(),
            });
        }
        let sizes = coming.iter();
        let sizes: Vec<_> = sizes
            .map(|(blob, _)| (stored_name(blob.name()), blob.size()))
            .collect();
        self.announce(&entry, &sizes)?;
        let blobs = coming.iter().map(|(blob, _)| blob.clone()).collect();
        let sink = Unhashed {
            pull: &self.pull,
            gathered: (coming.into_iter())
                .map(|(blob, gathered)| (blob.name().to_owned(), gathered))
                .collect(),
            committed: Mutex::default(),
        };
        let mut failed = None;
        let report = fetch_rather(
            blobs,
            &[&source],
            1,
            &sink,
            self.limits.clone(),
            self.cancel,
            &mut |event| match event {
                fetch::Event::Committed { blob, .. } => {
                    let Some(stored) = sink.committed(blob.name()) else {
                        return;
                    };
                    let file = stored_name(blob.name());
                    match self.pull.commit(&stored) {
                        Ok(path) => (self.notify)(Event::Verified {
                            file: &file,
                            path: &path,
                        }),
                        Err(error) => failed = Some(error),
                    }
                    entry.files.insert(file, stored);
                }
                fetch::Event::Progress(so_far) => (self.notify)(Event::Progress(so_far)),
            },
        )?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        drop(sink);
        self.publish(&entry, report)
    }

    /// The file called `name` as it is fetched, and as the store gathers it. One that the source doesn't name by
    /// an ETag can't be told from its next version: what an earlier pull left of it is not continued.
    fn unhashed(&self, name: &str, found: &Described) -> Result<(fetch::Blob, Blob), PullError> {
        let mut blob = fetch::Blob::new(name, found.size, Expected::SizeOnly)
            .map_err(fetch::FetchError::from)?;
        let identity = format!("{}\n{name}\n{}", self.from, found.validator);
        if let Some(etag) = &found.etag {
            blob = blob.with_etag(etag.clone());
        }
        Ok((blob, self.pull.unhashed(&identity, found.size)))
    }
}

/// A pull as the destination of files without digests.
struct Unhashed<'a> {
    pull: &'a Pull,
    /// What the store gathers each under, by its name.
    gathered: HashMap<String, Blob>,
    /// What each turned out to be.
    committed: Mutex<HashMap<String, Blob>>,
}

impl Unhashed<'_> {
    fn gathered(&self, blob: &fetch::Blob) -> &Blob {
        // Only what it was made of is fetched into it.
        &self.gathered[blob.name()]
    }

    /// What comes in a file's place, such as a page to sign in at, must not replace a model.
    fn check_is_gguf(&self, blob: &fetch::Blob) -> Result<(), SinkError> {
        let mut start = vec![0; blob.size().min(4) as usize];
        self.read_at(blob, 0, &mut start)?;
        if start == b"GGUF" {
            return Ok(());
        }
        self.discard(blob, 0..blob.size())?;
        let found = start.escape_ascii();
        Err(SinkError {
            path: blob.name().into(),
            action: "keep",
            source: io::Error::new(
                io::ErrorKind::InvalidData,
                format!("expected a GGUF file, which begins with `GGUF`, found `{found}`"),
            ),
        })
    }

    fn committed(&self, name: &str) -> Option<Blob> {
        let committed = self.committed.lock();
        let committed = committed.unwrap_or_else(PoisonError::into_inner);
        committed.get(name).copied()
    }
}

impl Sink for Unhashed<'_> {
    fn present(&self, blob: &fetch::Blob) -> Result<Present, SinkError> {
        let mut parts = RangeSet::new();
        let extents = self.pull.extents(self.gathered(blob));
        for range in extents.map_err(|error| self.pull.failed(error))? {
            parts.insert(range);
        }
        Ok(Present::Parts(parts))
    }

    fn write_at(&self, blob: &fetch::Blob, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        let written = self.pull.write_at(self.gathered(blob), offset, bytes);
        written.map_err(|error| self.pull.failed(error))
    }

    fn read_at(&self, blob: &fetch::Blob, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError> {
        let read = self.pull.read_at(self.gathered(blob), offset, bytes);
        read.map_err(|error| self.pull.failed(error))
    }

    fn discard(&self, blob: &fetch::Blob, range: Range<u64>) -> Result<(), SinkError> {
        let discarded = self.pull.discard(self.gathered(blob), range);
        discarded.map_err(|error| self.pull.failed(error))
    }

    fn commit(&self, blob: &fetch::Blob, _: Verified) -> Result<(), SinkError> {
        self.check_is_gguf(blob)?;
        let stored = self.pull.commit_unhashed(self.gathered(blob));
        let stored = stored.map_err(|error| self.pull.failed(error))?;
        let committed = self.committed.lock();
        let mut committed = committed.unwrap_or_else(PoisonError::into_inner);
        committed.insert(blob.name().to_owned(), stored);
        Ok(())
    }
}
