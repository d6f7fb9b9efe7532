//! The bytes of a package: tensors in aligned shards, with all hashes computed on the fly.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;

use bytes::Bytes;
use sterna::{Context, Result};
use sterna_delivery::hash::{
    Algorithm, BlockDigests, BlockHasher, DEFAULT_BLOCK_SIZE, Digest, Hasher,
};
use sterna_format::rdrr::groups::GroupId;
use sterna_format::rdrr::{Span, TENSOR_ALIGNMENT, shard_file_name};

use super::journal::Journal;

/// Pieces queued for a hashing thread; each is at most a few megabytes.
const QUEUED: usize = 4;
/// Bytes read at a time from shards that an earlier run finished.
const READ_BYTES: usize = 1 << 20;

/// Writes tensors one after another into shards of at most a given size.
///
/// A tensor begins at a multiple of 4096 bytes. If the rest of a shard can't hold it, it begins a new one;
/// only tensors larger than a shard are split. Hashing is done by two threads in addition to the one that
/// writes.
pub(super) struct ShardWriter {
    dir: PathBuf,
    shard_size: u64,
    algorithm: Algorithm,
    journal: Journal,
    /// Index of the current shard, its file unless an earlier run finished it, bytes in it.
    shard: usize,
    file: Option<File>,
    len: u64,
    /// Bytes of the current tensor that remain.
    left: u64,
    shards: HashThread<ShardPiece, (Vec<ShardHashes>, Digest)>,
    tensors: HashThread<TensorPiece, TensorHashes>,
}

/// The hashes of a complete shard.
pub(super) struct ShardHashes {
    pub(super) size: u64,
    pub(super) digest: Digest,
    pub(super) blocks: BlockDigests,
}

/// Hashes of the contents of shards.
#[derive(Default)]
pub(super) struct TensorHashes {
    /// Over the bytes of each group's tensors.
    pub(super) groups: HashMap<GroupId, Digest>,
    /// The root of each tensor's hash tree, in the order of writing.
    pub(super) roots: Vec<Digest>,
}

/// Everything that was written.
pub(super) struct Written {
    /// Hash algorithm of shards and groups.
    pub(super) algorithm: Algorithm,
    pub(super) shards: Vec<ShardHashes>,
    /// BLAKE3 over all shards.
    pub(super) blake3: Digest,
    pub(super) tensors: TensorHashes,
}

enum ShardPiece {
    Bytes(Bytes),
    End,
}

enum TensorPiece {
    Begin(GroupId),
    Bytes(Bytes),
    End,
}

impl ShardWriter {
    /// Begins to write into `dir`, or resumes where the run that left `journal` was interrupted: shards that
    /// it finished are kept, and read for their hashes.
    pub(super) fn new(dir: &Path, shard_size: u64, algorithm: Algorithm, journal: Journal) -> Self {
        ShardWriter {
            dir: dir.to_owned(),
            shard_size,
            algorithm,
            shard: 0,
            file: None,
            len: 0,
            left: 0,
            shards: HashThread::spawn(move |pieces| hash_shards(algorithm, pieces)),
            tensors: HashThread::spawn(move |pieces| hash_tensors(algorithm, pieces)),
            journal,
        }
    }

    /// Begins a tensor of `size` bytes; returns the pieces that it will consist of.
    pub(super) fn begin(&mut self, group: GroupId, size: u64) -> Result<Vec<Span>> {
        assert_eq!(
            self.left, 0,
            "a tensor has as many bytes as it was said to have"
        );
        let aligned = self.len.next_multiple_of(TENSOR_ALIGNMENT);
        if self.len > 0 && aligned + size > self.shard_size {
            self.end_shard()?;
        } else if aligned > self.len {
            let gap = Bytes::from(vec![0; (aligned - self.len) as usize]);
            self.append(gap)?;
        }
        self.left = size;
        self.tensors.send(TensorPiece::Begin(group));
        let (mut spans, mut rest) = (Vec::new(), size);
        let (mut shard, mut offset) = (self.shard, self.len);
        loop {
            let piece = rest.min(self.shard_size - offset);
            spans.push(Span {
                shard,
                offset,
                size: piece,
            });
            rest -= piece;
            if rest == 0 {
                return Ok(spans);
            }
            (shard, offset) = (shard + 1, 0);
        }
    }

    /// True if an earlier run wrote all `spans`; then [`ShardWriter::skip`] replaces [`ShardWriter::write`].
    pub(super) fn is_written(&self, spans: &[Span]) -> bool {
        spans
            .iter()
            .all(|span| self.journal.is_finished(span.shard))
    }

    /// Reads the current tensor from the shards of an earlier run.
    pub(super) fn skip(&mut self, spans: &[Span]) -> Result<()> {
        for span in spans {
            let path = self.dir.join(shard_file_name(span.shard));
            let name = || path.display().to_string();
            let mut file = File::open(&path).with_context(name)?;
            file.seek(SeekFrom::Start(span.offset)).with_context(name)?;
            let mut left = span.size;
            while left > 0 {
                let mut piece = vec![0; READ_BYTES.min(left as usize)];
                file.read_exact(&mut piece)
                    .with_context(|| format!("{}: shorter than it was", name()))?;
                left -= piece.len() as u64;
                self.write(piece.into())?;
            }
        }
        Ok(())
    }

    /// Writes the next bytes of the current tensor.
    pub(super) fn write(&mut self, mut bytes: Bytes) -> Result<()> {
        assert!(
            bytes.len() as u64 <= self.left,
            "no more bytes than were said"
        );
        self.left -= bytes.len() as u64;
        self.tensors.send(TensorPiece::Bytes(bytes.clone()));
        while !bytes.is_empty() {
            if self.len == self.shard_size {
                self.end_shard()?;
            }
            let room = usize::try_from(self.shard_size - self.len).unwrap_or(usize::MAX);
            let piece = bytes.split_to(bytes.len().min(room));
            self.append(piece)?;
        }
        if self.left == 0 {
            self.tensors.send(TensorPiece::End);
        }
        Ok(())
    }

    /// Ends the last shard.
    pub(super) fn finish(mut self) -> Result<Written> {
        if self.len > 0 {
            self.end_shard()?;
        }
        let (shards, blake3) = self.shards.finish();
        Ok(Written {
            algorithm: self.algorithm,
            shards,
            blake3,
            tensors: self.tensors.finish(),
        })
    }

    fn append(&mut self, bytes: Bytes) -> Result<()> {
        if !self.journal.is_finished(self.shard) {
            let path = self.dir.join(shard_file_name(self.shard));
            let file = match &mut self.file {
                Some(file) => file,
                none => {
                    let file = File::create(&path);
                    none.insert(file.with_context(|| path.display().to_string())?)
                }
            };
            file.write_all(&bytes)
                .with_context(|| format!("{}: cannot write", path.display()))?;
        }
        self.len += bytes.len() as u64;
        self.shards.send(ShardPiece::Bytes(bytes));
        Ok(())
    }

    /// Ends the current shard: on disk first, then in the journal.
    fn end_shard(&mut self) -> Result<()> {
        self.shards.send(ShardPiece::End);
        if let Some(file) = self.file.take() {
            let name = shard_file_name(self.shard);
            file.sync_all()
                .with_context(|| format!("{}: cannot write", self.dir.join(&name).display()))?;
            self.journal.note(self.shard, self.len)?;
        }
        self.shard += 1;
        self.len = 0;
        Ok(())
    }
}

/// Hashes shards; also returns the BLAKE3 of all of them together.
fn hash_shards(
    algorithm: Algorithm,
    pieces: impl Iterator<Item = ShardPiece>,
) -> (Vec<ShardHashes>, Digest) {
    let mut all = Hasher::new(Algorithm::Blake3);
    let mut shards = Vec::new();
    // Blocks of shards are hashed with BLAKE3 whatever the algorithm of shards: it costs a fifth.
    let (mut whole, mut in_blocks, mut size) =
        (Hasher::new(algorithm), blocks(Algorithm::Blake3), 0);
    for piece in pieces {
        match piece {
            ShardPiece::Bytes(bytes) => {
                size += bytes.len() as u64;
                whole.update(&bytes);
                in_blocks.update(&bytes);
                all.update(&bytes);
            }
            ShardPiece::End => {
                let whole = std::mem::replace(&mut whole, Hasher::new(algorithm));
                let in_blocks = std::mem::replace(&mut in_blocks, blocks(Algorithm::Blake3));
                shards.push(ShardHashes {
                    size: std::mem::take(&mut size),
                    digest: whole.finish(),
                    blocks: in_blocks.finish(),
                });
            }
        }
    }
    (shards, all.finish())
}

/// Hashes blocks of the usual size.
fn blocks(algorithm: Algorithm) -> BlockHasher {
    BlockHasher::new(algorithm, DEFAULT_BLOCK_SIZE).expect("blocks of the usual size have bytes")
}

/// Hashes tensors and the groups that they belong to.
fn hash_tensors(algorithm: Algorithm, pieces: impl Iterator<Item = TensorPiece>) -> TensorHashes {
    let mut groups: HashMap<GroupId, Hasher> = HashMap::new();
    let mut roots = Vec::new();
    let mut group = GroupId::Other;
    let mut leaves = blocks(Algorithm::Sha256);
    for piece in pieces {
        match piece {
            TensorPiece::Begin(id) => {
                group = id;
                groups.entry(id).or_insert_with(|| Hasher::new(algorithm));
            }
            TensorPiece::Bytes(bytes) => {
                leaves.update(&bytes);
                let hasher = groups.get_mut(&group).expect("it was begun");
                hasher.update(&bytes);
            }
            TensorPiece::End => {
                let leaves = std::mem::replace(&mut leaves, blocks(Algorithm::Sha256));
                roots.push(leaves.finish().merkle_root());
            }
        }
    }
    TensorHashes {
        groups: (groups.into_iter())
            .map(|(id, hasher)| (id, hasher.finish()))
            .collect(),
        roots,
    }
}

/// A thread that hashes what it is sent, and returns a result at the end.
struct HashThread<T, R> {
    sender: SyncSender<T>,
    thread: JoinHandle<R>,
}

impl<T: Send + 'static, R: Send + 'static> HashThread<T, R> {
    fn spawn(hash: impl FnOnce(mpsc::IntoIter<T>) -> R + Send + 'static) -> HashThread<T, R> {
        let (sender, receiver) = mpsc::sync_channel(QUEUED);
        let thread = std::thread::spawn(move || hash(receiver.into_iter()));
        HashThread { sender, thread }
    }

    fn send(&self, piece: T) {
        self.sender.send(piece).expect("hashing doesn't fail");
    }

    fn finish(self) -> R {
        drop(self.sender);
        self.thread.join().expect("hashing doesn't fail")
    }
}

#[cfg(test)]
mod tests {
    use sterna_delivery::hash::digest_of;

    use super::*;

    /// Writes tensors of these sizes, filled by their index.
    fn write(
        dir: &Path,
        sizes: &[u64],
        upto: usize,
        journal: Journal,
    ) -> (Vec<Vec<Span>>, Option<Written>) {
        let mut writer = ShardWriter::new(dir, 10_000, Algorithm::Sha256, journal);
        let mut places = Vec::new();
        for (i, &size) in sizes.iter().take(upto).enumerate() {
            let spans = writer.begin(GroupId::Layer(i as u32 / 2), size).unwrap();
            if writer.is_written(&spans) {
                writer.skip(&spans).unwrap();
            } else {
                let bytes = Bytes::from(vec![i as u8 + 1; size as usize]);
                let (a, b) = bytes.split_at(bytes.len() / 3);
                writer.write(bytes.slice_ref(a)).unwrap();
                writer.write(bytes.slice_ref(b)).unwrap();
            }
            places.push(spans);
        }
        let written = (upto == sizes.len()).then(|| writer.finish().unwrap());
        (places, written)
    }

    const SIZES: [u64; 6] = [100, 5_000, 3_000, 25_000, 1, 9_000];

    #[test]
    fn tensors_lie_aligned_and_only_large_ones_are_cut() {
        let dir = tempfile::tempdir().unwrap();
        let (places, written) = write(dir.path(), &SIZES, 6, Journal::none());
        let written = written.unwrap();
        let span = |shard, offset, size| Span {
            shard,
            offset,
            size,
        };
        assert_eq!(
            places,
            [
                vec![span(0, 0, 100)],
                vec![span(0, 4096, 5_000)],
                vec![span(1, 0, 3_000)],
                vec![span(2, 0, 10_000), span(3, 0, 10_000), span(4, 0, 5_000)],
                vec![span(4, 8192, 1)],
                vec![span(5, 0, 9_000)],
            ]
        );
        let mut all = Vec::new();
        for (i, shard) in written.shards.iter().enumerate() {
            let bytes = std::fs::read(dir.path().join(shard_file_name(i))).unwrap();
            assert_eq!(bytes.len() as u64, shard.size);
            assert_eq!(digest_of(Algorithm::Sha256, &bytes), shard.digest);
            let blocks = BlockDigests::of(Algorithm::Blake3, DEFAULT_BLOCK_SIZE, &bytes).unwrap();
            assert_eq!(blocks, shard.blocks);
            all.extend(bytes);
        }
        assert_eq!(digest_of(Algorithm::Blake3, &all), written.blake3);
        let group = [vec![3; 3_000], vec![4; 25_000]].concat();
        let group = digest_of(Algorithm::Sha256, &group);
        assert_eq!(written.tensors.groups[&GroupId::Layer(1)], group);
        assert_eq!(written.tensors.roots.len(), 6);
        assert_eq!(written.tensors.roots[4], digest_of(Algorithm::Sha256, &[5]));
    }

    #[test]
    fn an_interrupted_run_goes_on_to_the_same_bytes() {
        let whole = tempfile::tempdir().unwrap();
        let (_, expected) = write(whole.path(), &SIZES, 6, Journal::none());
        for upto in 0..6 {
            let dir = tempfile::tempdir().unwrap();
            let dir = dir.path().join("package.partial");
            std::fs::create_dir(&dir).unwrap();
            let journal = Journal::open(&dir, "key").unwrap();
            write(&dir, &SIZES, upto, journal);
            let journal = Journal::open(&dir, "key").unwrap();
            let (_, written) = write(&dir, &SIZES, 6, journal);
            let (written, expected) = (written.unwrap(), expected.as_ref().unwrap());
            assert_eq!(written.blake3, expected.blake3, "{upto}");
            assert_eq!(written.tensors.roots, expected.tensors.roots);
            assert_eq!(written.tensors.groups, expected.tensors.groups);
        }
    }
}
