//! The bytes of a package: tensors in aligned shards, with all hashes computed on the fly.

use std::collections::HashMap;
use std::sync::mpsc::{self, SyncSender};
use std::thread::JoinHandle;

use bytes::Bytes;
use sterna::Result;
use sterna_delivery::hash::{
    Algorithm, BlockDigests, BlockHasher, DEFAULT_BLOCK_SIZE, Digest, Hasher,
};
use sterna_format::rdrr::groups::GroupId;
use sterna_format::rdrr::{Span, TENSOR_ALIGNMENT};

use super::sink::PackageSink;

/// Pieces queued for a hashing thread; each is at most a few megabytes.
const QUEUED: usize = 4;
/// Bytes read at a time from shards that an earlier run finished.
const READ_BYTES: u64 = 1 << 20;

/// Writes tensors one after another into shards of at most a given size.
///
/// A tensor begins at a multiple of 4096 bytes. If the rest of a shard can't hold it, it begins a new one;
/// only tensors larger than a shard are split. Hashing is done by two threads in addition to the one that
/// writes, where there are threads.
pub(super) struct ShardWriter<S> {
    sink: S,
    shard_size: u64,
    algorithm: Algorithm,
    /// Index of the current shard, bytes in it.
    shard: usize,
    len: u64,
    /// Bytes of the current tensor that remain.
    left: u64,
    shards: Hashing<ShardPiece, HashShards>,
    tensors: Hashing<TensorPiece, HashTensors>,
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

impl<S: PackageSink> ShardWriter<S> {
    /// Begins to write into `sink`, or resumes where an earlier run was interrupted: shards that it finished
    /// are kept, and read for their hashes. Hashing is done on threads of its own if `on_threads`.
    pub(super) fn new(sink: S, shard_size: u64, algorithm: Algorithm, on_threads: bool) -> Self {
        ShardWriter {
            sink,
            shard_size,
            algorithm,
            shard: 0,
            len: 0,
            left: 0,
            shards: Hashing::begin(HashShards::new(algorithm), on_threads),
            tensors: Hashing::begin(HashTensors::new(algorithm), on_threads),
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
        self.tensors.take(TensorPiece::Begin(group));
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
        let n_finished = self.sink.n_finished();
        spans.iter().all(|span| span.shard < n_finished)
    }

    /// Reads the current tensor from the shards of an earlier run.
    pub(super) fn skip(&mut self, spans: &[Span]) -> Result<()> {
        for span in spans {
            let mut offset = span.offset;
            let end = offset + span.size;
            while offset < end {
                let n = READ_BYTES.min(end - offset);
                let piece = self.sink.read_back(span.shard, offset..offset + n)?;
                self.write(piece)?;
                offset += n;
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
        self.tensors.take(TensorPiece::Bytes(bytes.clone()));
        while !bytes.is_empty() {
            if self.len == self.shard_size {
                self.end_shard()?;
            }
            let room = usize::try_from(self.shard_size - self.len).unwrap_or(usize::MAX);
            let piece = bytes.split_to(bytes.len().min(room));
            self.append(piece)?;
        }
        if self.left == 0 {
            self.tensors.take(TensorPiece::End);
        }
        Ok(())
    }

    /// The sink.
    pub(super) fn sink(&mut self) -> &mut S {
        &mut self.sink
    }

    /// Ends the last shard.
    pub(super) fn finish(mut self) -> Result<(Written, S)> {
        if self.len > 0 {
            self.end_shard()?;
        }
        let (shards, blake3) = self.shards.finish().finish();
        let written = Written {
            algorithm: self.algorithm,
            shards,
            blake3,
            tensors: self.tensors.finish().finish(),
        };
        Ok((written, self.sink))
    }

    fn append(&mut self, bytes: Bytes) -> Result<()> {
        if self.shard >= self.sink.n_finished() {
            self.sink.append(self.shard, bytes.clone())?;
        }
        self.len += bytes.len() as u64;
        self.shards.take(ShardPiece::Bytes(bytes));
        Ok(())
    }

    fn end_shard(&mut self) -> Result<()> {
        self.shards.take(ShardPiece::End);
        if self.shard >= self.sink.n_finished() {
            self.sink.end_shard(self.shard, self.len)?;
        }
        self.shard += 1;
        self.len = 0;
        Ok(())
    }
}

/// What hashes pieces, one after another.
trait Hash<T>: Send + 'static {
    fn take(&mut self, piece: T);
}

/// Hashes shards, and all of them together with BLAKE3.
struct HashShards {
    algorithm: Algorithm,
    all: Hasher,
    /// Of the current shard.
    whole: Hasher,
    in_blocks: BlockHasher,
    size: u64,
    shards: Vec<ShardHashes>,
}

impl HashShards {
    fn new(algorithm: Algorithm) -> HashShards {
        HashShards {
            algorithm,
            all: Hasher::new(Algorithm::Blake3),
            whole: Hasher::new(algorithm),
            // Blocks of shards are hashed with BLAKE3 whatever the algorithm of shards: it costs a fifth.
            in_blocks: blocks(Algorithm::Blake3),
            size: 0,
            shards: Vec::new(),
        }
    }

    fn finish(self) -> (Vec<ShardHashes>, Digest) {
        (self.shards, self.all.finish())
    }
}

impl Hash<ShardPiece> for HashShards {
    fn take(&mut self, piece: ShardPiece) {
        match piece {
            ShardPiece::Bytes(bytes) => {
                self.size += bytes.len() as u64;
                self.whole.update(&bytes);
                self.in_blocks.update(&bytes);
                self.all.update(&bytes);
            }
            ShardPiece::End => {
                let whole = std::mem::replace(&mut self.whole, Hasher::new(self.algorithm));
                let in_blocks = std::mem::replace(&mut self.in_blocks, blocks(Algorithm::Blake3));
                self.shards.push(ShardHashes {
                    size: std::mem::take(&mut self.size),
                    digest: whole.finish(),
                    blocks: in_blocks.finish(),
                });
            }
        }
    }
}

/// Hashes blocks of the usual size.
fn blocks(algorithm: Algorithm) -> BlockHasher {
    BlockHasher::new(algorithm, DEFAULT_BLOCK_SIZE).expect("blocks of the usual size have bytes")
}

/// Hashes tensors and the groups that they belong to.
struct HashTensors {
    algorithm: Algorithm,
    groups: HashMap<GroupId, Hasher>,
    roots: Vec<Digest>,
    /// Of the current tensor.
    group: GroupId,
    leaves: BlockHasher,
}

impl HashTensors {
    fn new(algorithm: Algorithm) -> HashTensors {
        HashTensors {
            algorithm,
            groups: HashMap::new(),
            roots: Vec::new(),
            group: GroupId::Other,
            leaves: blocks(Algorithm::Sha256),
        }
    }

    fn finish(self) -> TensorHashes {
        TensorHashes {
            groups: (self.groups.into_iter())
                .map(|(id, hasher)| (id, hasher.finish()))
                .collect(),
            roots: self.roots,
        }
    }
}

impl Hash<TensorPiece> for HashTensors {
    fn take(&mut self, piece: TensorPiece) {
        match piece {
            TensorPiece::Begin(id) => {
                self.group = id;
                let of_group = self.groups.entry(id);
                of_group.or_insert_with(|| Hasher::new(self.algorithm));
            }
            TensorPiece::Bytes(bytes) => {
                self.leaves.update(&bytes);
                let hasher = self.groups.get_mut(&self.group);
                hasher.expect("it was begun").update(&bytes);
            }
            TensorPiece::End => {
                let leaves = std::mem::replace(&mut self.leaves, blocks(Algorithm::Sha256));
                self.roots.push(leaves.finish().merkle_root());
            }
        }
    }
}

/// Hashing what it is given: at once, or on a thread of its own.
enum Hashing<T, H> {
    AtOnce(H),
    OnThread {
        sender: SyncSender<T>,
        thread: JoinHandle<H>,
    },
}

impl<T: Send + 'static, H: Hash<T>> Hashing<T, H> {
    fn begin(mut hash: H, on_thread: bool) -> Hashing<T, H> {
        if !on_thread {
            return Hashing::AtOnce(hash);
        }
        let (sender, receiver) = mpsc::sync_channel(QUEUED);
        let thread = std::thread::spawn(move || {
            receiver.into_iter().for_each(|piece| hash.take(piece));
            hash
        });
        Hashing::OnThread { sender, thread }
    }

    fn take(&mut self, piece: T) {
        match self {
            Hashing::AtOnce(hash) => hash.take(piece),
            Hashing::OnThread { sender, .. } => {
                sender.send(piece).expect("hashing doesn't fail");
            }
        }
    }

    fn finish(self) -> H {
        match self {
            Hashing::AtOnce(hash) => hash,
            Hashing::OnThread { sender, thread } => {
                drop(sender);
                thread.join().expect("hashing doesn't fail")
            }
        }
    }
}

#[cfg(all(test, not(target_family = "wasm")))]
mod tests {
    use std::path::Path;

    use sterna_delivery::hash::digest_of;
    use sterna_format::rdrr::shard_file_name;

    use super::super::folder::Folder;
    use super::super::journal::Journal;
    use super::*;

    /// Writes tensors of these sizes, filled by their index.
    fn write(
        dir: &Path,
        sizes: &[u64],
        upto: usize,
        journal: Journal,
    ) -> (Vec<Vec<Span>>, Option<Written>) {
        let folder = Folder::new(dir, journal);
        // Threads change nothing.
        let on_threads = upto.is_multiple_of(2);
        let mut writer = ShardWriter::new(folder, 10_000, Algorithm::Sha256, on_threads);
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
        let written = (upto == sizes.len()).then(|| writer.finish().unwrap().0);
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
