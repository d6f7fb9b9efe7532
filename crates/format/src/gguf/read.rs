//! A cursor over the first bytes of a file that knows how long the whole file is.

use std::fmt;

use crate::budget::Budget;

use super::{GgufError, MAX_HEADER_BYTES, MAX_HEADER_MEMORY};

/// What is being read, for messages. Rendered only when something is wrong.
#[derive(Clone, Copy)]
pub(super) enum Location<'a> {
    Start,
    Entries(u64),
    Key(u64),
    Value(&'a str),
    Tensors(u64),
    TensorName(u64),
    Tensor(&'a str),
}

impl fmt::Display for Location<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Location::Start => write!(f, "the first 24 bytes"),
            Location::Entries(n) => write!(f, "the list of {n} metadata entries"),
            Location::Key(i) => write!(f, "the name of metadata entry {i}"),
            Location::Value(key) => write!(f, "metadata key `{key}`"),
            Location::Tensors(n) => write!(f, "the list of {n} tensors"),
            Location::TensorName(i) => write!(f, "the name of tensor {i}"),
            Location::Tensor(name) => write!(f, "the description of tensor `{name}`"),
        }
    }
}

/// Reads little-endian values from the front of `prefix`.
///
/// Invariant: `pos <= prefix.len() <= file_len`.
pub(super) struct Cursor<'a> {
    prefix: &'a [u8],
    file_len: u64,
    pos: usize,
    memory: Budget,
}

impl<'a> Cursor<'a> {
    /// Bytes of `prefix` after `file_len` are ignored.
    pub(super) fn new(prefix: &'a [u8], file_len: u64) -> Self {
        let len = usize::try_from(file_len).map_or(prefix.len(), |n| n.min(prefix.len()));
        Cursor {
            prefix: &prefix[..len],
            file_len,
            pos: 0,
            memory: Budget::new(MAX_HEADER_MEMORY),
        }
    }

    /// Bytes read so far.
    pub(super) fn pos(&self) -> u64 {
        self.pos as u64
    }

    /// Charges `bytes` of memory that what is read next will take.
    pub(super) fn charge(&mut self, bytes: u64, place: Location<'_>) -> Result<(), GgufError> {
        self.memory
            .charge(bytes)
            .map_err(|over| GgufError::TooMuchMemory {
                place: place.to_string(),
                need: over.need,
                limit: over.limit,
            })
    }

    /// Checks that the header may have `need` more bytes here; where they end.
    fn check_end(&self, need: u64, place: Location<'_>) -> Result<u64, GgufError> {
        let have = self.file_len - self.pos();
        if need > have {
            return Err(GgufError::Truncated {
                place: place.to_string(),
                need,
                have,
            });
        }
        let end = self.pos() + need;
        if end > MAX_HEADER_BYTES {
            return Err(GgufError::HeaderTooLarge {
                place: place.to_string(),
                need: end,
                limit: MAX_HEADER_BYTES,
            });
        }
        Ok(end)
    }

    /// Checks that `need` more bytes are at hand.
    fn ensure(&self, need: u64, place: Location<'_>) -> Result<(), GgufError> {
        let end = self.check_end(need, place)?;
        match end > self.prefix.len() as u64 {
            true => Err(GgufError::NeedMore { at_least: end }),
            false => Ok(()),
        }
    }

    /// Checks that `count` items of at least `min_bytes` each are at hand and that `memory` bytes
    /// for each fit the budget, so that room for `count` may be reserved.
    pub(super) fn ensure_items(
        &mut self,
        count: u64,
        min_bytes: u64,
        memory: u64,
        place: Location<'_>,
    ) -> Result<usize, GgufError> {
        let need = count.saturating_mul(min_bytes);
        self.check_end(need, place)?;
        // Before more of the file is asked for: it may have to be fetched.
        self.charge(count.saturating_mul(memory), place)?;
        self.ensure(need, place)?;
        Ok(usize::try_from(count).expect("a count of items that lie in memory"))
    }

    pub(super) fn bytes(&mut self, n: u64, place: Location<'_>) -> Result<&'a [u8], GgufError> {
        self.ensure(n, place)?;
        let start = self.pos;
        self.pos += usize::try_from(n).expect("a length that lies in memory");
        Ok(&self.prefix[start..self.pos])
    }

    /// `n` items of `N` bytes, charged at their size.
    pub(super) fn items<const N: usize>(
        &mut self,
        n: u64,
        place: Location<'_>,
    ) -> Result<&'a [[u8; N]], GgufError> {
        self.ensure_items(n, N as u64, N as u64, place)?;
        let bytes = self.bytes(n.saturating_mul(N as u64), place)?;
        Ok(bytes.as_chunks().0)
    }

    pub(super) fn array<const N: usize>(
        &mut self,
        place: Location<'_>,
    ) -> Result<[u8; N], GgufError> {
        let bytes = self.bytes(N as u64, place)?;
        Ok(bytes.try_into().expect("as many bytes as asked for"))
    }

    pub(super) fn u32(&mut self, place: Location<'_>) -> Result<u32, GgufError> {
        self.array(place).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, place: Location<'_>) -> Result<u64, GgufError> {
        self.array(place).map(u64::from_le_bytes)
    }

    /// A length and that many bytes of UTF-8.
    pub(super) fn str(&mut self, place: Location<'_>) -> Result<&'a str, GgufError> {
        let len = self.u64(place)?;
        let bytes = self.bytes(len, place)?;
        std::str::from_utf8(bytes).map_err(|e| GgufError::NotUtf8 {
            place: place.to_string(),
            at: e.valid_up_to(),
            len: bytes.len(),
        })
    }

    /// The bytes that the next `n` strings take without their lengths. Doesn't move the cursor.
    pub(super) fn text_bytes(&self, n: usize, place: Location<'_>) -> Result<u64, GgufError> {
        let mut ahead = Cursor { ..*self };
        let mut text = 0;
        for _ in 0..n {
            let len = ahead.u64(place)?;
            ahead.bytes(len, place)?;
            text += len;
        }
        Ok(text)
    }

    /// A string of 1 to `limit` bytes.
    pub(super) fn name(&mut self, limit: u64, place: Location<'_>) -> Result<&'a str, GgufError> {
        let mut ahead = Cursor { ..*self };
        let len = ahead.u64(place)?;
        if len == 0 {
            return Err(GgufError::EmptyName {
                place: place.to_string(),
            });
        }
        if len > limit {
            return Err(GgufError::NameTooLong {
                place: place.to_string(),
                found: len,
                limit,
            });
        }
        self.str(place)
    }
}
