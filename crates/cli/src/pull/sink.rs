//! Fetched bytes into the store.

use std::io;
use std::ops::Range;

use sterna_delivery::fetch::{self, Present, RangeSet, Sink, SinkError};
use sterna_delivery::hash::{Expected, Verified};
use sterna_delivery::store::{self, Pull, StoreError};

/// The store's side of a fetch, whose blobs all have digests.
pub(super) struct StoreSink<'a>(pub(super) &'a Pull);

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

impl StoreSink<'_> {
    fn with<T>(
        &self,
        blob: &fetch::Blob,
        action: &'static str,
        run: impl FnOnce(&store::Blob) -> Result<T, StoreError>,
    ) -> Result<T, SinkError> {
        let known = stored(blob).expect("blobs without digests aren't given to this sink");
        run(&known).map_err(|error| SinkError {
            path: blob.name().into(),
            action,
            source: io::Error::other(error),
        })
    }
}

impl Sink for StoreSink<'_> {
    fn present(&self, blob: &fetch::Blob) -> Result<Present, SinkError> {
        self.with(blob, "look up", |known| {
            if self.0.present(known)? == known.size {
                return Ok(Present::Complete);
            }
            let mut ranges = RangeSet::new();
            for range in self.0.extents(known)? {
                ranges.insert(range);
            }
            Ok(Present::Parts(ranges))
        })
    }

    fn write_at(&self, blob: &fetch::Blob, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        self.with(blob, "store", |known| self.0.write_at(known, offset, bytes))
    }

    fn read_at(&self, blob: &fetch::Blob, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError> {
        self.with(blob, "read", |known| self.0.read_at(known, offset, bytes))
    }

    fn discard(&self, blob: &fetch::Blob, range: Range<u64>) -> Result<(), SinkError> {
        self.with(blob, "discard", |known| self.0.discard(known, range))
    }

    fn commit(&self, blob: &fetch::Blob, verified: Verified) -> Result<(), SinkError> {
        self.with(blob, "keep", |known| {
            self.0.commit_verified(known, verified).map(|_| ())
        })
    }
}
