//! The bytes of a blob on their way.

use std::{
    fs::File,
    io::{self, Read as _},
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use bytes::Bytes;
use futures_util::{StreamExt as _, stream, stream::BoxStream};

use crate::{
    blocking::Activity,
    hash::{Digest, Expected, Mismatch, Verifier},
};

/// Bytes that are read, hashed and sent at once.
const PIECE: usize = 1 << 20;

/// Where bytes are.
#[derive(Debug, Clone)]
pub(super) enum Content {
    File(PathBuf),
    Memory(Bytes),
}

/// A blob that is being sent. Its bytes are hashed on their way, and the last of them come only if all are right.
pub(super) struct Body {
    content: Content,
    digest: Digest,
    size: u64,
    state: Arc<State>,
}

struct State {
    activity: Activity,
    /// Bytes that were taken, as far as they count.
    taken: AtomicU64,
    /// Those of them that aren't sent.
    kept: AtomicU64,
    /// Those of all blobs.
    there: Arc<AtomicU64>,
    damage: Mutex<Option<Mismatch>>,
}

impl Body {
    pub(super) fn new(content: Content, digest: Digest, size: u64, there: Arc<AtomicU64>) -> Self {
        Self {
            content,
            digest,
            size,
            state: Arc::new(State {
                activity: Activity::new(),
                taken: AtomicU64::new(0),
                kept: AtomicU64::new(0),
                there,
                damage: Mutex::default(),
            }),
        }
    }

    pub(super) fn digest(&self) -> &Digest {
        &self.digest
    }

    pub(super) fn size(&self) -> u64 {
        self.size
    }

    /// When bytes were last taken.
    pub(super) fn activity(&self) -> &Activity {
        &self.state.activity
    }

    /// What is wrong with the bytes, if that has come out.
    pub(super) fn damage(&self) -> Option<Mismatch> {
        let damage = self.state.damage.lock();
        damage.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// So many of the bytes that were taken aren't sent, unless [`send`](Self::send) says that they are.
    #[cfg(feature = "object-store")]
    pub(super) fn keep(&self, n_bytes: u64) {
        self.state.kept.fetch_add(n_bytes, Ordering::Relaxed);
    }

    /// So many of those that were kept are sent now.
    #[cfg(feature = "object-store")]
    pub(super) fn send(&self, n_bytes: u64) {
        self.state.kept.fetch_sub(n_bytes, Ordering::Relaxed);
    }

    /// Bytes that were sent.
    pub(super) fn sent(&self) -> u64 {
        let taken = self.state.taken.load(Ordering::Relaxed);
        taken.saturating_sub(self.state.kept.load(Ordering::Relaxed))
    }

    /// It is there: all of its bytes count.
    pub(super) fn settle(&self) {
        let taken = self.state.taken.load(Ordering::Relaxed);
        let left = self.size.saturating_sub(taken);
        self.state.there.fetch_add(left, Ordering::Relaxed);
    }

    /// It isn't there: none of its bytes count.
    pub(super) fn take_back(&self) {
        let taken = self.state.taken.swap(0, Ordering::Relaxed);
        self.state.there.fetch_sub(taken, Ordering::Relaxed);
    }

    /// All bytes, in pieces. They end with an error unless they have the digest.
    pub(super) fn stream(&self) -> BoxStream<'static, io::Result<Bytes>> {
        let pieces = Pieces {
            content: self.content.clone(),
            file: None,
            left: self.size,
            verifier: Some(Verifier::new(Expected::Digest(self.digest), self.size)),
            state: Arc::clone(&self.state),
        };
        let step = |mut pieces: Pieces| async move {
            let next = pieces.next().transpose()?;
            Some((next, pieces))
        };
        stream::unfold(pieces, step).boxed()
    }
}

struct Pieces {
    content: Content,
    file: Option<File>,
    left: u64,
    verifier: Option<Verifier>,
    state: Arc<State>,
}

impl Pieces {
    fn next(&mut self) -> io::Result<Option<Bytes>> {
        // Nothing follows the last piece, or an error.
        let Some(mut verifier) = self.verifier.take() else {
            return Ok(None);
        };
        let n = usize::try_from(self.left).map_or(PIECE, |left| left.min(PIECE));
        let piece = match &mut self.content {
            Content::Memory(bytes) => bytes.split_to(n.min(bytes.len())),
            Content::File(path) => {
                let file = match &mut self.file {
                    Some(file) => file,
                    none => none.insert(File::open(path)?),
                };
                let mut piece = vec![0; n];
                file.read_exact(&mut piece)?;
                piece.into()
            }
        };
        verifier.update(&piece);
        self.left -= piece.len() as u64;
        if self.left > 0 {
            self.verifier = Some(verifier);
        } else if let Err(mismatch) = verifier.finish() {
            let damage = self.state.damage.lock();
            *damage.unwrap_or_else(PoisonError::into_inner) = Some(mismatch.clone());
            return Err(io::Error::new(io::ErrorKind::InvalidData, mismatch));
        }
        self.state.activity.note();
        let n = piece.len() as u64;
        self.state.taken.fetch_add(n, Ordering::Relaxed);
        self.state.there.fetch_add(n, Ordering::Relaxed);
        Ok((n > 0).then_some(piece))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::hash::{Algorithm, digest_of};

    /// All pieces of a stream that never waits.
    fn pieces(body: &Body) -> Vec<io::Result<Bytes>> {
        let pieces = body.stream().collect::<Vec<_>>();
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.unwrap().block_on(pieces)
    }

    #[test]
    fn bytes_are_sent_once_and_checked_on_their_way() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("blob");
        let bytes: Vec<u8> = (0..PIECE * 2 + 5).map(|i| (i % 251) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let (digest, size) = (digest_of(Algorithm::Sha256, &bytes), bytes.len() as u64);
        let there = Arc::<AtomicU64>::default();
        let body = |content| Body::new(content, digest, size, Arc::clone(&there));
        for content in [
            Content::File(path.clone()),
            Content::Memory(bytes.clone().into()),
        ] {
            let body = body(content);
            let pieces: io::Result<Vec<Bytes>> = pieces(&body).into_iter().collect();
            assert!(pieces.unwrap().concat() == bytes && body.damage().is_none());
            assert_eq!(there.load(Ordering::Relaxed), size);
            body.take_back();
            assert_eq!(there.load(Ordering::Relaxed), 0);
        }
        let mut wrong = bytes.clone();
        wrong[PIECE * 2 + 4] ^= 1;
        fs::write(&path, &wrong).unwrap();
        let body = body(Content::File(path));
        let pieces = pieces(&body);
        // The last piece isn't sent.
        assert_eq!(pieces.len(), 3);
        assert!(pieces[2].is_err() && body.damage().is_some());
        let empty = digest_of(Algorithm::Sha256, b"");
        let empty = Body::new(Content::Memory(Bytes::new()), empty, 0, there);
        assert_eq!(self::pieces(&empty).len(), 0);
    }
}
