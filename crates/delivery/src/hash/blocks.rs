//! Digests of consecutive blocks, so that a wrong block is found and fetched on its own.

use std::ops::Range;

use super::{Algorithm, DIGEST_BYTES, Digest, Hasher, digest_of};

/// Default block size in bytes.
pub const DEFAULT_BLOCK_SIZE: u64 = 1 << 20;

/// One digest for each consecutive block of some bytes; all blocks but the last have one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDigests {
    block_size: u64,
    size: u64,
    digests: Vec<Digest>,
}

/// Why digests don't match the size of their bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockDigestsError {
    /// Empty blocks.
    #[error("block digests: expected a block size above 0, found 0")]
    NoBlockSize,
    /// A number of digests other than the number of blocks.
    #[error(
        "block digests: expected {expected} for {size} bytes in blocks of {block_size}, found {found}"
    )]
    Count {
        /// Bytes there are.
        size: u64,
        /// Bytes in a block.
        block_size: u64,
        /// Number of blocks.
        expected: u64,
        /// Number of digests.
        found: usize,
    },
}

impl BlockDigests {
    /// Known digests, for `size` bytes in blocks of `block_size`.
    ///
    /// Errors: [`BlockDigestsError`] unless there is one for each block.
    pub fn new(
        size: u64,
        block_size: u64,
        digests: Vec<Digest>,
    ) -> Result<Self, BlockDigestsError> {
        if block_size == 0 {
            return Err(BlockDigestsError::NoBlockSize);
        }
        let expected = size.div_ceil(block_size);
        if digests.len() as u64 != expected {
            return Err(BlockDigestsError::Count {
                size,
                block_size,
                expected,
                found: digests.len(),
            });
        }
        Ok(Self {
            block_size,
            size,
            digests,
        })
    }

    /// The digests of `bytes` in blocks of `block_size`.
    ///
    /// Errors: [`BlockDigestsError::NoBlockSize`].
    pub fn of(
        algorithm: Algorithm,
        block_size: u64,
        bytes: &[u8],
    ) -> Result<Self, BlockDigestsError> {
        let mut hasher = BlockHasher::new(algorithm, block_size)?;
        hasher.update(bytes);
        Ok(hasher.finish())
    }

    /// Bytes in each block but the last.
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Total bytes of all blocks.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The digests, in the order of their blocks.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }

    /// The block that contains `offset`: its digest and its bytes' range. `None` past the end.
    pub fn block_at(&self, offset: u64) -> Option<(Digest, Range<u64>)> {
        if offset >= self.size {
            return None;
        }
        let index = offset / self.block_size;
        let start = index * self.block_size;
        let end = start.saturating_add(self.block_size).min(self.size);
        // There is a digest for every block that begins before `size`, so the index fits memory.
        Some((self.digests[index as usize], start..end))
    }

    /// The root of a hash tree whose leaves these digests are: a parent is the SHA-256 of its two
    /// children, of which an odd last one is its own sibling. Without blocks, the SHA-256 of nothing.
    pub fn merkle_root(&self) -> Digest {
        let mut nodes = self.digests.clone();
        while nodes.len() > 1 {
            let parents = nodes.chunks(2).map(|pair| {
                let (left, right) = (pair[0], pair[pair.len() - 1]);
                let mut both = [0; 2 * DIGEST_BYTES];
                both[..DIGEST_BYTES].copy_from_slice(left.as_bytes());
                both[DIGEST_BYTES..].copy_from_slice(right.as_bytes());
                digest_of(Algorithm::Sha256, &both)
            });
            nodes = parents.collect();
        }
        let root = nodes.pop();
        root.unwrap_or_else(|| digest_of(Algorithm::Sha256, &[]))
    }
}

/// A hasher for [`BlockDigests`], of bytes that come in pieces of any size.
#[derive(Debug)]
pub struct BlockHasher {
    algorithm: Algorithm,
    block_size: u64,
    /// Of the incomplete block, and how many bytes it has.
    hasher: Hasher,
    len: u64,
    /// Of complete blocks.
    digests: Vec<Digest>,
    size: u64,
}

impl BlockHasher {
    /// The state before the first byte. Errors: [`BlockDigestsError::NoBlockSize`].
    pub fn new(algorithm: Algorithm, block_size: u64) -> Result<Self, BlockDigestsError> {
        if block_size == 0 {
            return Err(BlockDigestsError::NoBlockSize);
        }
        Ok(Self {
            algorithm,
            block_size,
            hasher: Hasher::new(algorithm),
            len: 0,
            digests: Vec::new(),
            size: 0,
        })
    }

    /// Hashes the next bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.size += bytes.len() as u64;
        while !bytes.is_empty() {
            // A block larger than the address space has room for everything.
            let room = usize::try_from(self.block_size - self.len).unwrap_or(usize::MAX);
            let (now, later) = bytes.split_at(bytes.len().min(room));
            self.hasher.update(now);
            self.len += now.len() as u64;
            bytes = later;
            if self.len == self.block_size {
                self.end_block();
            }
        }
    }

    /// The digests of all blocks so far, the last one of which may be short.
    pub fn finish(mut self) -> BlockDigests {
        if self.len > 0 {
            self.end_block();
        }
        BlockDigests {
            block_size: self.block_size,
            size: self.size,
            digests: self.digests,
        }
    }

    fn end_block(&mut self) {
        let hasher = std::mem::replace(&mut self.hasher, Hasher::new(self.algorithm));
        self.digests.push(hasher.finish());
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_cover_everything_and_the_last_may_be_short() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| i as u8).collect();
        let blocks = BlockDigests::of(Algorithm::Sha256, 300, &bytes).unwrap();
        assert_eq!((blocks.digests().len(), blocks.size()), (4, 1000));
        for (offset, range) in [
            (0, 0..300),
            (299, 0..300),
            (300, 300..600),
            (999, 900..1000),
        ] {
            let (digest, found) = blocks.block_at(offset).unwrap();
            assert_eq!(found, range);
            let block = &bytes[range.start as usize..range.end as usize];
            assert!(digest_of(digest.algorithm(), block) == digest);
        }
        assert_eq!(blocks.block_at(1000), None);
        let again = BlockDigests::new(1000, 300, blocks.digests().to_vec());
        assert_eq!(again, Ok(blocks));
    }

    #[test]
    fn pieces_of_any_size_give_the_same_blocks() {
        let bytes: Vec<u8> = (0..1000u32).map(|i| (i * 7) as u8).collect();
        let whole = BlockDigests::of(Algorithm::Blake3, 300, &bytes).unwrap();
        let blocks = bytes.chunks(300).map(|b| digest_of(Algorithm::Blake3, b));
        assert_eq!(whole.digests(), blocks.collect::<Vec<_>>());
        for step in [1, 7, 299, 300, 301, 1000] {
            let mut hasher = BlockHasher::new(Algorithm::Blake3, 300).unwrap();
            bytes.chunks(step).for_each(|piece| hasher.update(piece));
            assert_eq!(hasher.finish(), whole, "{step}");
        }
        let none = BlockHasher::new(Algorithm::Sha256, 5).unwrap().finish();
        assert_eq!((none.size(), none.digests()), (0, &[][..]));
        assert!(BlockHasher::new(Algorithm::Sha256, 0).is_err());
    }

    #[test]
    fn trees_pair_an_odd_node_with_itself() {
        let parent = |a: Digest, b: Digest| {
            digest_of(Algorithm::Sha256, &[*a.as_bytes(), *b.as_bytes()].concat())
        };
        let root = |bytes: &[u8]| {
            let blocks = BlockDigests::of(Algorithm::Sha256, 1, bytes).unwrap();
            blocks.merkle_root()
        };
        let [a, b, c] = [1, 2, 3].map(|byte| digest_of(Algorithm::Sha256, &[byte]));
        assert_eq!(root(&[1]), a);
        assert_eq!(root(&[1, 2, 3]), parent(parent(a, b), parent(c, c)));
        assert_eq!(root(&[]), digest_of(Algorithm::Sha256, &[]));
    }

    #[test]
    fn digests_that_do_not_fit_are_refused() {
        let one = digest_of(Algorithm::Sha256, b"");
        assert_eq!(
            BlockDigests::new(10, 0, vec![]),
            Err(BlockDigestsError::NoBlockSize)
        );
        let error = BlockDigests::new(10, 3, vec![one; 3]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "block digests: expected 4 for 10 bytes in blocks of 3, found 3"
        );
        assert!(BlockDigests::new(u64::MAX, 1, vec![one]).is_err());
        let whole = BlockDigests::new(u64::MAX, u64::MAX, vec![one]).unwrap();
        let (_, range) = whole.block_at(u64::MAX - 1).unwrap();
        assert_eq!(range, 0..u64::MAX);
        assert!(BlockDigests::new(0, 5, vec![]).is_ok());
    }
}
