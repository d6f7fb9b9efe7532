//! A pull as the destination of fetched bytes.

use std::{io, ops::Range};

use crate::{
    fetch::{self, Present, RangeSet, Sink, SinkError},
    hash::{Expected, Verified},
};

use super::{Blob, Pull, StoreError};

/// Takes blobs with a known digest; for others, which have no name here, every method fails.
impl Sink for Pull {
    fn present(&self, blob: &fetch::Blob) -> Result<Present, SinkError> {
        let blob = self.named(blob)?;
        let failed = |error| self.failed(error);
        // Called even if it has no bytes: this puts an empty blob into the store.
        if Pull::present(self, &blob).map_err(failed)? == blob.size {
            return Ok(Present::Complete);
        }
        let mut parts = RangeSet::new();
        for range in self.extents(&blob).map_err(failed)? {
            parts.insert(range);
        }
        Ok(Present::Parts(parts))
    }

    fn write_at(&self, blob: &fetch::Blob, offset: u64, bytes: &[u8]) -> Result<(), SinkError> {
        let blob = self.named(blob)?;
        Pull::write_at(self, &blob, offset, bytes).map_err(|error| self.failed(error))
    }

    fn read_at(&self, blob: &fetch::Blob, offset: u64, bytes: &mut [u8]) -> Result<(), SinkError> {
        let blob = self.named(blob)?;
        Pull::read_at(self, &blob, offset, bytes).map_err(|error| self.failed(error))
    }

    fn discard(&self, blob: &fetch::Blob, range: Range<u64>) -> Result<(), SinkError> {
        let blob = self.named(blob)?;
        Pull::discard(self, &blob, range).map_err(|error| self.failed(error))
    }

    fn commit(&self, blob: &fetch::Blob, verified: Verified) -> Result<(), SinkError> {
        let blob = self.named(blob)?;
        (self.commit_verified(&blob, verified).map(|_| ())).map_err(|error| self.failed(error))
    }
}

impl Pull {
    /// The name that `blob` has in the store.
    fn named(&self, blob: &fetch::Blob) -> Result<Blob, SinkError> {
        match blob.expected() {
            Expected::Digest(digest) => Ok(Blob {
                digest,
                size: blob.size(),
            }),
            _ => Err(SinkError {
                path: blob.name().into(),
                action: "store without knowing its digest",
                source: io::ErrorKind::Unsupported.into(),
            }),
        }
    }

    /// `error` as one of a sink.
    pub(crate) fn failed(&self, error: StoreError) -> SinkError {
        match error {
            StoreError::Io {
                action,
                path,
                source,
            } => SinkError {
                path,
                action,
                source,
            },
            other => SinkError {
                path: self.name().into(),
                action: "store",
                source: io::Error::other(other),
            },
        }
    }
}
