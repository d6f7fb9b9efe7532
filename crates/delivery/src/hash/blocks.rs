//! Digests of the consecutive blocks of some bytes, so that a wrong block is found and fetched alone.

use std::ops::Range;

use super::{Algorithm, Digest};

/// Bytes in a block unless something else is asked for.
pub const DEFAULT_BLOCK_SIZE: u64 = 1 << 20;

/// One digest for each consecutive block of some bytes; all blocks but the last have one size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDigests {
    block_size: u64,
    size: u64,
    digests: Vec<Digest>,
}

/// Why digests don't fit the bytes they are for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BlockDigestsError {
    /// Blocks without bytes.
    #[error("block digests: expected a block size above 0, found 0")]
    NoBlockSize,
    /// Not one digest for each block.
    #[error(
        "block digests: expected {expected} for {size} bytes in blocks of {block_size}, found {found}"
    )]
    Count {
        /// Bytes there are.
        size: u64,
        /// Bytes in a block.
        block_size: u64,
        /// Blocks that makes.
        expected: u64,
        /// Digests given.
        found: usize,
    },
}

impl BlockDigests {
    /// Digests that are known already, for `size` bytes in blocks of `block_size`.
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
        // A block larger than memory can address holds everything.
        let step = usize::try_from(block_size).unwrap_or(usize::MAX);
        if step == 0 {
            return Err(BlockDigestsError::NoBlockSize);
        }
        let digests = (bytes.chunks(step))
            .map(|block| Digest::of(algorithm, block))
            .collect();
        Self::new(bytes.len() as u64, block_size, digests)
    }

    /// Bytes in each block but the last.
    pub fn block_size(&self) -> u64 {
        self.block_size
    }

    /// Bytes in all blocks together.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The digests, in the order of their blocks.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }

    /// The block that `offset` lies in: its digest and its bytes' range. `None` past the end.
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
            assert!(digest.verify(block).is_ok());
        }
        assert_eq!(blocks.block_at(1000), None);
        let again = BlockDigests::new(1000, 300, blocks.digests().to_vec());
        assert_eq!(again, Ok(blocks));
    }

    #[test]
    fn digests_that_do_not_fit_are_refused() {
        let one = Digest::of(Algorithm::Sha256, b"");
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
