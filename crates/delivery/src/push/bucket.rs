//! Folders of object stores as targets: OCI image layouts.

use std::time::Duration;

use futures_util::StreamExt as _;
use object_store::{
    ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions, UpdateVersion, WriteMultipart,
};

use super::{Body, Current, Target, TargetError};
use crate::{
    artifact::{
        Found, INDEX_FILE, LAYOUT, LAYOUT_FILE, MAX_MANIFEST_BYTES, blob_path, index_of, parse,
    },
    blocking::Activity,
    fetch::Cancel,
    hash::Digest,
    source::{Bucket, bucket::PATIENCE, chain},
};

/// A folder of an object store.
pub(super) struct BucketTarget {
    bucket: Bucket,
}

/// The largest object that is sent in one request.
const MAX_AT_ONCE: u64 = 8 << 20;

/// The least size of a part of a larger one.
const PART: u64 = 8 << 20;

/// The most parts of one.
const MAX_PARTS: u64 = 9_000;

/// The bytes per second that an upload has to reach, after [`PATIENCE`].
const LEAST_RATE: u64 = 32 << 10;

/// How long a request with so many bytes may take.
fn patience(n_bytes: u64) -> Duration {
    PATIENCE + Duration::from_secs(n_bytes / LEAST_RATE)
}

/// Parts of an object that are sent at a time.
const PARALLEL_PARTS: usize = 2;

impl BucketTarget {
    pub(super) fn new(bucket: Bucket) -> Self {
        Self { bucket }
    }

    fn path(&self, name: &str) -> Result<object_store::path::Path, TargetError> {
        self.bucket.path(name).map_err(TargetError::Refused)
    }

    /// Waits for a request without a large body.
    fn ask<T>(
        &self,
        cancel: &Cancel,
        request: impl Future<Output = object_store::Result<T>>,
    ) -> Result<object_store::Result<T>, TargetError> {
        let bridge = self.bucket.bridge();
        Ok(bridge.wait(PATIENCE, &Activity::new(), Some(cancel), request)?)
    }

    fn put_small(
        &self,
        name: &str,
        bytes: Vec<u8>,
        mode: PutMode,
        cancel: &Cancel,
    ) -> Result<object_store::Result<()>, TargetError> {
        let path = self.path(name)?;
        let store = self.bucket.store();
        let put = store.put_opts(&path, bytes.into(), PutOptions::from(mode));
        Ok(self.ask(cancel, put)?.map(drop))
    }

    fn put_parts(&self, body: &Body, cancel: &Cancel) -> Result<(), TargetError> {
        let path = self.path(&blob_path(body.digest()))?;
        let (store, bridge) = (self.bucket.store(), self.bucket.bridge());
        let upload = self
            .ask(cancel, store.put_multipart(&path))?
            .map_err(failed)?;
        let part = body.size().div_ceil(MAX_PARTS).max(PART);
        let patience = patience(part * PARALLEL_PARTS as u64);
        let part =
            usize::try_from(part).map_err(|_| TargetError::Refused("too large".to_owned()))?;
        let mut write = WriteMultipart::new_with_chunk_size(upload, part);
        let activity = body.activity();
        let fed = bridge.wait(patience, activity, Some(cancel), async {
            let mut pieces = body.stream();
            while let Some(piece) = pieces.next().await {
                write
                    .wait_for_capacity(PARALLEL_PARTS)
                    .await
                    .map_err(failed)?;
                activity.note();
                write.put(piece.map_err(unreadable)?);
            }
            write.wait_for_capacity(1).await.map_err(failed)
        });
        let fed = fed.map_err(TargetError::from).and_then(|fed| fed);
        if let Err(error) = fed {
            // As well as that is possible now; what stays is invisible, and the store's own rules end it.
            let _ = bridge.wait(PATIENCE, &Activity::new(), None, write.abort());
            return Err(error);
        }
        activity.note();
        let finished = bridge.wait(patience, activity, Some(cancel), write.finish());
        finished?.map(drop).map_err(failed)
    }
}

/// What an error means for a push.
fn failed(error: object_store::Error) -> TargetError {
    use object_store::Error as E;
    let message = chain(&error);
    match error {
        E::NotFound { .. } => TargetError::Refused(format!("no such bucket: {message}")),
        E::PermissionDenied { .. } | E::Unauthenticated { .. } => TargetError::Refused(format!(
            "the credentials in the environment don't allow it: {message}"
        )),
        E::InvalidPath { .. } | E::NotSupported { .. } | E::NotImplemented { .. } => {
            TargetError::Refused(message)
        }
        _ => TargetError::Failed(message),
    }
}

fn unreadable(error: std::io::Error) -> TargetError {
    TargetError::Refused(format!("the file can't be read: {error}"))
}

impl Target for BucketTarget {
    fn name(&self) -> &str {
        self.bucket.name()
    }

    fn current(&self, cancel: &Cancel) -> Result<Current, TargetError> {
        let path = self.path(INDEX_FILE)?;
        let found = match self.ask(cancel, self.bucket.store().get(&path))? {
            Ok(found) => found,
            Err(object_store::Error::NotFound { .. }) => return Ok(Current::default()),
            Err(error) => return Err(failed(error)),
        };
        let refused = |why: String| TargetError::Refused(format!("{INDEX_FILE}: {why}"));
        if found.meta.size > MAX_MANIFEST_BYTES as u64 {
            let found = found.meta.size;
            return Err(refused(format!(
                "expected an OCI index of at most {MAX_MANIFEST_BYTES} bytes, found {found}"
            )));
        }
        let state = (found.meta.e_tag.clone(), found.meta.version.clone());
        let mut pieces = found.into_stream();
        let (bridge, activity) = (self.bucket.bridge(), Activity::new());
        let bytes = bridge.wait(PATIENCE, &activity, Some(cancel), async {
            let mut bytes = Vec::new();
            while let Some(piece) = pieces.next().await {
                bytes.extend_from_slice(&piece.map_err(failed)?);
                if bytes.len() > MAX_MANIFEST_BYTES {
                    return Err(refused("longer than the store says".to_owned()));
                }
            }
            Ok(bytes)
        })??;
        // Something else of that name isn't ours to replace.
        match parse(&bytes).map_err(|error| refused(error.to_string()))? {
            Found::Listed { digest, .. } => Ok(Current {
                digest: Some(digest),
                state: Some(state),
            }),
            Found::Artifact(_) => Err(refused(
                "expected an OCI index, found a manifest".to_owned(),
            )),
        }
    }

    fn has(&self, digest: &Digest, size: u64, cancel: &Cancel) -> Result<bool, TargetError> {
        let path = self.path(&blob_path(digest))?;
        match self.ask(cancel, self.bucket.store().head(&path))? {
            // One of another size isn't it, whatever it is.
            Ok(meta) => Ok(meta.size == size),
            Err(object_store::Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(failed(error)),
        }
    }

    fn put(&self, body: &Body, cancel: &Cancel) -> Result<(), TargetError> {
        if body.size() > MAX_AT_ONCE {
            return self.put_parts(body, cancel);
        }
        let path = self.path(&blob_path(body.digest()))?;
        let (store, bridge) = (self.bucket.store(), self.bucket.bridge());
        let patience = patience(body.size());
        let put = bridge.wait(patience, body.activity(), Some(cancel), async {
            let mut bytes = Vec::new();
            let mut pieces = body.stream();
            while let Some(piece) = pieces.next().await {
                bytes.extend_from_slice(&piece.map_err(unreadable)?);
            }
            store.put(&path, bytes.into()).await.map_err(failed)
        });
        put?.map(drop)
    }

    fn commit(
        &self,
        manifest: &[u8],
        digest: &Digest,
        before: &Current,
        cancel: &Cancel,
    ) -> Result<(), TargetError> {
        let blob = blob_path(digest);
        let overwrite = PutMode::Overwrite;
        (self.put_small(&blob, manifest.to_vec(), overwrite.clone(), cancel)?).map_err(failed)?;
        if before.state.is_none() {
            let layout = LAYOUT.as_bytes().to_vec();
            (self.put_small(LAYOUT_FILE, layout, overwrite, cancel)?).map_err(failed)?;
        }
        let mode = match before.state.clone() {
            None => PutMode::Create,
            Some((e_tag, version)) => PutMode::Update(UpdateVersion { e_tag, version }),
        };
        match self.put_small(INDEX_FILE, index_of(manifest), mode, cancel)? {
            Ok(())
            | Err(
                object_store::Error::AlreadyExists { .. }
                | object_store::Error::Precondition { .. },
            ) => {}
            Err(error) => return Err(failed(error)),
        }
        // Also where an answer was lost, and where a store doesn't know conditions.
        self.confirm(digest, cancel)
    }
}
