//! Reading a saved sequence while what was read before is hashed.

use std::io::Read;
use std::sync::mpsc::sync_channel;
use std::thread;

use sterna_delivery::hash::DIGEST_BYTES;
use sterna_engine::backend::SnapshotSink;
use sterna_engine::session::Snapshot;

use super::saved::{DAMAGED, HEAD_BYTES, Hashed, SavedSequence, read_ids, room};
use crate::error::{Result, bail};

/// Bytes that are read while those before are hashed.
const PIECE_BYTES: u64 = 4 << 20;

impl SavedSequence {
    /// Reads all of `from`, of `n_bytes`, which was written by [`SavedSequence::write`] or
    /// [`Sequence::save`](super::Sequence::save).
    ///
    /// Errors: it is no saved sequence, or damaged.
    pub fn read(from: &mut (dyn Read + Send), n_bytes: u64) -> Result<SavedSequence> {
        let mut hashed = Hashed::new(from);
        let ids = read_ids(&mut hashed, n_bytes / 4)?;
        let n_rest = HEAD_BYTES + size_of_val(&ids[..]) as u64 + DIGEST_BYTES as u64;
        let Some(n_contents) = n_bytes.checked_sub(n_rest) else {
            bail!(HashMismatch, "{DAMAGED}");
        };
        let contents = hashed.read_pieces(n_contents)?;
        let (from, digest) = hashed.finish();
        let mut expected = Vec::new();
        // More than a digest is one too many.
        from.take(DIGEST_BYTES as u64 + 1)
            .read_to_end(&mut expected)?;
        if expected != digest {
            bail!(HashMismatch, "{DAMAGED}");
        }
        Ok(SavedSequence { ids, contents })
    }
}

impl<T: Read + Send> Hashed<T> {
    /// The next `n_bytes`, or what there is, by a thread that reads beside one that hashes.
    fn read_pieces(&mut self, n_bytes: u64) -> Result<Snapshot> {
        let Hashed { inner, hasher } = self;
        let mut all = Snapshot::default();
        thread::scope(|scope| {
            let (to, pieces) = sync_channel(1);
            let read = move || {
                let mut n_left = n_bytes;
                while n_left > 0 {
                    let piece = read_piece(inner, n_left.min(PIECE_BYTES));
                    n_left = match &piece {
                        // The file may be shorter than it said.
                        Ok(piece) if piece.is_empty() => 0,
                        Ok(piece) => n_left - piece.len() as u64,
                        Err(_) => 0,
                    };
                    if to.send(piece).is_err() {
                        return;
                    }
                }
            };
            thread::Builder::new().spawn_scoped(scope, read)?;
            for piece in pieces {
                let piece = piece?;
                hasher.update(&piece);
                all.put(piece)?;
            }
            Ok(all)
        })
    }
}

/// At most `n_bytes` of `from`, fewer only at its end.
fn read_piece(from: &mut impl Read, n_bytes: u64) -> Result<Vec<u8>> {
    let mut piece = room(n_bytes)?;
    from.take(n_bytes).read_to_end(&mut piece)?;
    Ok(piece)
}
