//! Folders of object stores as targets: OCI image layouts.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc, time::Duration};

use futures_util::StreamExt as _;
use object_store::{
    ObjectStore as _, ObjectStoreExt as _, PutMode, PutOptions, UpdateVersion, multipart::PartId,
};
use tokio::task::JoinSet;

use super::{Body, Current, Target, TargetError, uploads::Upload};
use crate::{
    artifact::{
        Found, INDEX_FILE, LAYOUT, LAYOUT_FILE, MAX_MANIFEST_BYTES, blob_path, index_of, parse,
    },
    blocking::{Activity, GivenUp},
    fetch::Cancel,
    hash::{Algorithm, Digest, digest_of},
    source::{Bucket, bucket::PATIENCE, chain},
};

/// A folder of an object store.
pub(super) struct BucketTarget {
    bucket: Bucket,
    /// Where uploads under way are noted.
    uploads: Option<PathBuf>,
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
    pub(super) fn new(bucket: Bucket, uploads: Option<PathBuf>) -> Self {
        Self { bucket, uploads }
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

    /// Sends a large blob in parts, and goes on with those that an earlier push has sent.
    fn put_parts(&self, body: &Body, cancel: &Cancel) -> Result<(), TargetError> {
        let path = self.path(&blob_path(body.digest()))?;
        let part = body.size().div_ceil(MAX_PARTS).max(PART);
        let what = format!("{} {path} {part} {}", self.name(), self.bucket.place());
        let folder = self.uploads.as_deref();
        let (store, bridge) = (self.bucket.multipart(), self.bucket.bridge());
        let mut upload = match Upload::find(folder, &what) {
            Some(upload) => upload,
            None => {
                let id = self.ask(cancel, store.create_multipart(&path))?;
                Upload::begin(folder, &what, id.map_err(failed)?)
            }
        };
        let sent = self.send_parts(&path, part, body, &mut upload, cancel);
        let ended = sent.and_then(|parts| {
            body.activity().note();
            let complete = store.complete_multipart(&path, &upload.id, parts);
            let ended = bridge.wait(patience(part), body.activity(), Some(cancel), complete)?;
            let Err(error) = ended else { return Ok(()) };
            // The answer may have been lost, also to an earlier push; or another push has ended it.
            if self.has(body.digest(), body.size(), cancel)? {
                return Ok(());
            }
            if are_parts_wrong(&error) && upload.could_not_end() {
                upload.forget();
            }
            Err(error.into())
        });
        let ended = match ended {
            Ok(()) => Ok(()),
            Err(Broken::Other(error)) => Err(error),
            // Another push may have ended it, after which the blob is there; otherwise it is begun again.
            Err(Broken::Gone(why)) => {
                upload.forget();
                match self.has(body.digest(), body.size(), cancel)? {
                    true => return Ok(()),
                    false => Err(TargetError::Failed(format!(
                        "the store ended the upload: {why}"
                    ))),
                }
            }
        };
        match ended {
            Ok(()) => upload.forget(),
            Err(_) if body.damage().is_none() && upload.is_noted() => {}
            Err(_) => {
                upload.forget();
                // As well as that is possible now; what stays is invisible, and the store's own rules end it.
                let abort = store.abort_multipart(&path, &upload.id);
                let _ = bridge.wait(PATIENCE, &Activity::new(), None, abort);
            }
        }
        ended
    }

    /// Sends the parts that aren't there yet; returns all.
    fn send_parts(
        &self,
        path: &object_store::path::Path,
        part_bytes: u64,
        body: &Body,
        upload: &mut Upload,
        cancel: &Cancel,
    ) -> Result<Vec<PartId>, Broken> {
        let part_bytes = usize::try_from(part_bytes)
            .map_err(|_| TargetError::Refused("too large".to_owned()))?;
        let (bridge, activity) = (self.bucket.bridge(), body.activity());
        let patience = patience(part_bytes as u64 * PARALLEL_PARTS as u64);
        let sent = bridge.wait(patience, activity, Some(cancel), async {
            let mut ids = BTreeMap::new();
            let mut sending = JoinSet::new();
            let take = |upload: &mut Upload, ids: &mut BTreeMap<_, _>, sent| {
                let (index, digest, id): (usize, Digest, object_store::Result<PartId>) = match sent
                {
                    Ok(sent) => sent,
                    Err(error) => return Err(Broken::Other(TargetError::Failed(chain(&error)))),
                };
                let id = id.map_err(Broken::from)?;
                activity.note();
                upload.add(index, &digest, &id);
                ids.insert(index, id);
                Ok(())
            };
            let mut pieces = body.stream();
            let (mut index, mut is_over) = (0, false);
            while !is_over {
                let mut part = Vec::with_capacity(part_bytes);
                while part.len() < part_bytes && !is_over {
                    match pieces.next().await {
                        // Pieces are as large as parts are multiples of.
                        Some(piece) => {
                            let piece = piece.map_err(unreadable)?;
                            body.keep(piece.len() as u64);
                            part.extend_from_slice(&piece);
                        }
                        None => is_over = true,
                    }
                }
                if part.is_empty() {
                    break;
                }
                let digest = digest_of(Algorithm::Blake3, &part);
                if let Some(id) = upload.part(index, &digest) {
                    ids.insert(index, id);
                } else {
                    while sending.len() >= PARALLEL_PARTS {
                        let sent = sending.join_next().await.expect("it isn't empty");
                        take(upload, &mut ids, sent)?;
                    }
                    let (store, path, id) = (
                        Arc::clone(self.bucket.multipart()),
                        path.clone(),
                        upload.id.clone(),
                    );
                    body.send(part.len() as u64);
                    sending.spawn(async move {
                        let sent = store.put_part(&path, &id, index, part.into()).await;
                        (index, digest, sent)
                    });
                }
                index += 1;
            }
            while let Some(sent) = sending.join_next().await {
                take(upload, &mut ids, sent)?;
            }
            Ok::<_, Broken>(ids.into_values().collect())
        });
        sent?
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

/// Why an upload didn't end well.
enum Broken {
    /// The store doesn't know it any more.
    Gone(String),
    Other(TargetError),
}

impl From<TargetError> for Broken {
    fn from(error: TargetError) -> Self {
        Self::Other(error)
    }
}

impl From<GivenUp> for Broken {
    fn from(why: GivenUp) -> Self {
        Self::Other(why.into())
    }
}

impl From<object_store::Error> for Broken {
    fn from(error: object_store::Error) -> Self {
        match error {
            object_store::Error::NotFound { .. } => Self::Gone(chain(&error)),
            error => Self::Other(failed(error)),
        }
    }
}

/// Codes by which stores say that an upload lacks parts that it is said to have, or has others.
const WRONG_PARTS: [&str; 5] = [
    "InvalidPart",
    "InvalidPartOrder",
    "EntityTooSmall",
    "InvalidBlockId",
    "InvalidBlockList",
];

/// Whether the answer to the end of an upload says so: other errors pass, and the parts stay.
fn are_parts_wrong(error: &object_store::Error) -> bool {
    let answer = chain(error);
    let mut codes = WRONG_PARTS.iter();
    codes.any(|code| answer.contains(&format!("<Code>{code}</Code>")))
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_wrong_parts_make_an_end_fail() {
        let says = |text: &str| {
            are_parts_wrong(&object_store::Error::Generic {
                store: "S3",
                source: text.into(),
            })
        };
        assert!(says("400: <Error><Code>InvalidPart</Code></Error>"));
        assert!(says("400: <Error><Code>InvalidBlockList</Code></Error>"));
        assert!(!says("503: <Error><Code>SlowDown</Code></Error>"));
        assert!(!says("POST /InvalidPart: the connection broke"));
    }
}
