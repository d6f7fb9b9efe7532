//! Hashing bytes as they arrive.

use std::{ops::Range, sync::Arc};

use super::{Fault, RangeSet};
use crate::hash::{BlockDigests, Hasher, Verifier, compare_digests};

/// One pass over consecutive bytes of a blob: through the digest of the whole, if everything before them went
/// through it, and through the digests of their blocks, if there are any.
#[derive(Debug)]
pub(super) struct Pass {
    offset: u64,
    /// The end of the bytes known to be right, as far as blocks can tell; without block digests, of all.
    kept: u64,
    whole: Option<Verifier>,
    blocks: Option<Blocks>,
}

#[derive(Debug)]
struct Blocks {
    digests: Arc<BlockDigests>,
    hasher: Option<Hasher>,
    /// The whole's state at `kept`, to return to when a block is wrong.
    checkpoint: Option<Verifier>,
}

impl Pass {
    /// A pass from `offset` on, which is the start of a block if there are block digests. `whole` has hashed
    /// the `offset` bytes before.
    pub(super) fn new(
        offset: u64,
        whole: Option<Verifier>,
        blocks: Option<Arc<BlockDigests>>,
    ) -> Self {
        let blocks = blocks.map(|digests| Blocks {
            digests,
            hasher: None,
            checkpoint: whole.clone(),
        });
        Self {
            offset,
            kept: offset,
            whole,
            blocks,
        }
    }

    /// The offset of the next byte.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// The end of the valid bytes.
    pub(super) fn kept(&self) -> u64 {
        self.kept
    }

    /// Whether it ended inside a block, and could be continued there.
    pub(super) fn is_unfinished(&self) -> bool {
        self.offset > self.kept
    }

    /// Whether it feeds the digest of the whole.
    pub(super) fn has_whole(&self) -> bool {
        self.whole.is_some()
    }

    /// Hashes the next bytes. Errors: [`Fault::WrongBlock`]; everything before the block was right.
    pub(super) fn take(&mut self, mut bytes: &[u8]) -> Result<(), Fault> {
        while !bytes.is_empty() {
            let n = self.take_some(bytes)?;
            bytes = &bytes[n..];
        }
        Ok(())
    }

    /// Hashes bytes up to the end of a block, and returns how many.
    fn take_some(&mut self, bytes: &[u8]) -> Result<usize, Fault> {
        let block = (self.blocks.as_ref()).and_then(|b| b.digests.block_at(self.offset));
        let n = match &block {
            Some((_, range)) => usize::try_from(range.end - self.offset)
                .map_or(bytes.len(), |left| left.min(bytes.len())),
            None => bytes.len(),
        };
        let bytes = &bytes[..n];
        if let Some(whole) = &mut self.whole {
            whole.update(bytes);
        }
        self.offset += n as u64;
        let (Some(blocks), Some((digest, range))) = (&mut self.blocks, block) else {
            self.kept = self.offset;
            return Ok(n);
        };
        let hasher = (blocks.hasher).get_or_insert_with(|| Hasher::new(digest.algorithm()));
        hasher.update(bytes);
        if self.offset == range.end {
            let found = blocks.hasher.take().map(Hasher::finish);
            if let Some(mismatch) = found.and_then(|found| compare_digests(&digest, &found).err()) {
                return Err(Fault::WrongBlock {
                    block: range,
                    mismatch,
                });
            }
            self.kept = self.offset;
            blocks.checkpoint.clone_from(&self.whole);
        }
        Ok(n)
    }

    /// Ends the pass: the end of its valid bytes, and the whole's state there.
    pub(super) fn end(self) -> (u64, Option<Verifier>) {
        match self.blocks {
            Some(blocks) => (self.kept, blocks.checkpoint),
            None => (self.kept, self.whole),
        }
    }
}

/// A pass over bytes that are already stored: left from an earlier fetch, or received out of order.
///
/// The driver of a [`Fetch`](super::Fetch) reads the job's bytes back, passes them to [`HashJob::take`] in
/// order, and returns the job to [`Fetch::hashed`](super::Fetch::hashed).
#[derive(Debug)]
pub struct HashJob {
    blob: usize,
    start: u64,
    end: u64,
    pass: Pass,
    /// Where the pass began: at the job's start, or after the last wrong block.
    pass_start: u64,
    /// What earlier passes found right.
    right: RangeSet,
    /// Where the first pass ended, and the whole's state there, if it isn't the current one.
    first: Option<(u64, Option<Verifier>)>,
    second_opinion: bool,
    /// Whether it reads the start of a block whose rest is missing.
    unfinished: bool,
}

/// The result of a job.
pub(super) struct Findings {
    pub(super) blob: usize,
    /// The bytes that were read.
    pub(super) checked: Range<u64>,
    /// Bytes whose blocks are right; all bytes read, where there are no block digests.
    pub(super) right: RangeSet,
    /// The end of the bytes in the whole's state.
    pub(super) frontier: u64,
    pub(super) whole: Option<Verifier>,
    pub(super) second_opinion: bool,
}

impl HashJob {
    pub(super) fn new(
        blob: usize,
        range: Range<u64>,
        whole: Option<Verifier>,
        blocks: Option<Arc<BlockDigests>>,
    ) -> Self {
        Self {
            blob,
            start: range.start,
            end: range.end,
            pass: Pass::new(range.start, whole, blocks),
            pass_start: range.start,
            right: RangeSet::new(),
            first: None,
            second_opinion: false,
            unfinished: false,
        }
    }

    /// The start of a block whose rest is missing, so that the rest can follow.
    pub(super) fn unfinished(
        blob: usize,
        range: Range<u64>,
        whole: Option<Verifier>,
        blocks: Option<Arc<BlockDigests>>,
    ) -> Self {
        Self {
            unfinished: true,
            ..Self::new(blob, range, whole, blocks)
        }
    }

    /// The start of the block and the pass over it, if that is what it has read.
    pub(super) fn into_unfinished(self) -> Result<(usize, u64, Pass), Box<Self>> {
        match self.unfinished {
            true => Ok((self.blob, self.start, self.pass)),
            false => Err(Box::new(self)),
        }
    }

    /// All bytes again, through the verifier that is tried when the first one fails.
    pub(super) fn second_opinion(blob: usize, size: u64, verifier: Verifier) -> Self {
        Self {
            second_opinion: true,
            ..Self::new(blob, 0..size, Some(verifier), None)
        }
    }

    /// Which blob, by index.
    pub fn blob(&self) -> usize {
        self.blob
    }

    /// The bytes of the blob that remain to be read.
    pub fn remaining(&self) -> Range<u64> {
        self.pass.offset()..self.end
    }

    /// Hashes the next bytes; anything beyond [`remaining`](Self::remaining) is ignored.
    pub fn take(&mut self, bytes: &[u8]) {
        let left = self.end - self.pass.offset();
        let n = usize::try_from(left).map_or(bytes.len(), |left| left.min(bytes.len()));
        let mut bytes = &bytes[..n];
        while !bytes.is_empty() {
            let before = self.pass.offset();
            let taken = self.pass.take_some(bytes);
            // No more than the bytes there were.
            bytes = &bytes[(self.pass.offset() - before) as usize..];
            if taken.is_err() {
                // No source is to blame: the block is fetched, and the pass continues after it.
                self.next_pass();
            }
        }
    }

    fn next_pass(&mut self) {
        let offset = self.pass.offset();
        let blocks = self.pass.blocks.as_ref().map(|b| b.digests.clone());
        let ended = std::mem::replace(&mut self.pass, Pass::new(offset, None, blocks));
        let (kept, whole) = ended.end();
        self.right.insert(self.pass_start..kept);
        self.pass_start = offset;
        self.first.get_or_insert((kept, whole));
    }

    pub(super) fn findings(mut self) -> Findings {
        self.next_pass();
        let (frontier, whole) = self.first.expect("`next_pass` sets it");
        Findings {
            blob: self.blob,
            checked: self.start..self.pass_start,
            right: self.right,
            frontier,
            whole,
            second_opinion: self.second_opinion,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::{Algorithm, Expected, digest_of};

    fn bytes() -> Vec<u8> {
        (0..1000u32).map(|i| ((i * i) >> 3) as u8).collect()
    }

    fn verifier(bytes: &[u8]) -> Verifier {
        let digest = digest_of(Algorithm::Sha256, bytes);
        Verifier::new(Expected::Digest(digest), bytes.len() as u64)
    }

    fn blocks(bytes: &[u8]) -> Arc<BlockDigests> {
        Arc::new(BlockDigests::of(Algorithm::Blake3, 300, bytes).unwrap())
    }

    #[test]
    fn a_wrong_block_leaves_what_came_before_it() {
        let good = bytes();
        let mut bad = good.clone();
        bad[650] ^= 1;
        let mut pass = Pass::new(0, Some(verifier(&good)), Some(blocks(&good)));
        let error = bad.chunks(70).try_for_each(|part| pass.take(part));
        let Err(Fault::WrongBlock { block, .. }) = error else {
            panic!("{error:?}")
        };
        assert_eq!(block, 600..900);
        let (kept, whole) = pass.end();
        assert_eq!(kept, 600);
        let mut pass = Pass::new(600, whole, Some(blocks(&good)));
        pass.take(&good[600..]).unwrap();
        let (kept, whole) = pass.end();
        assert_eq!(kept, 1000);
        assert!(whole.unwrap().finish().is_ok());
    }

    #[test]
    fn bytes_that_end_inside_a_block_count_only_without_blocks() {
        let good = bytes();
        let mut pass = Pass::new(0, Some(verifier(&good)), Some(blocks(&good)));
        pass.take(&good[..500]).unwrap();
        assert_eq!(pass.end().0, 300);
        let mut pass = Pass::new(0, Some(verifier(&good)), None);
        pass.take(&good[..500]).unwrap();
        assert_eq!(pass.end().0, 500);
    }

    #[test]
    fn a_job_finds_every_right_block_of_what_is_stored() {
        let good = bytes();
        let mut stored = good.clone();
        stored[310] ^= 1;
        let mut job = HashJob::new(3, 0..1000, Some(verifier(&good)), Some(blocks(&good)));
        stored.chunks(64).for_each(|part| job.take(part));
        job.take(b"more than was asked for");
        assert_eq!((job.blob(), job.remaining()), (3, 1000..1000));
        let found = job.findings();
        assert_eq!(found.right.iter().collect::<Vec<_>>(), [0..300, 600..1000]);
        assert_eq!(found.frontier, 300);
        let mut pass = Pass::new(300, found.whole, None);
        pass.take(&good[300..]).unwrap();
        assert!(pass.end().1.unwrap().finish().is_ok());
    }

    #[test]
    fn a_job_without_blocks_takes_all_as_it_is() {
        let good = bytes();
        let mut job = HashJob::new(0, 0..1000, Some(verifier(&good)), None);
        job.take(&good);
        let found = job.findings();
        assert_eq!((found.frontier, found.right.len()), (1000, 1000));
        assert!(found.whole.unwrap().finish().is_ok() && !found.second_opinion);
    }
}
