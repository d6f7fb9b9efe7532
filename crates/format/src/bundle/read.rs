//! Reading little-endian fields from the first bytes of a file.

use super::error::ensure;
use super::{BundleError, Location};

/// Version of the headers, the only one there is.
const VERSION: u32 = 1;

/// The most tensors that a file may have; the largest checkpoints of one file have some thousands.
pub(super) const MAX_TENSORS: u32 = 1 << 16;

/// The most layers that an adapter may have.
pub(super) const MAX_LAYERS: u32 = 1 << 12;

/// Reads from the front of `prefix`, the first bytes of a file.
///
/// Invariant: `pos <= prefix.len() <= file_len`.
#[derive(Clone)]
pub(super) struct Cursor<'a> {
    prefix: &'a [u8],
    file_len: u64,
    pos: usize,
}

impl<'a> Cursor<'a> {
    /// Bytes of `prefix` after `file_len` are ignored.
    pub(super) fn new(prefix: &'a [u8], file_len: u64) -> Cursor<'a> {
        let len = usize::try_from(file_len).map_or(prefix.len(), |n| n.min(prefix.len()));
        Cursor {
            prefix: &prefix[..len],
            file_len,
            pos: 0,
        }
    }

    /// Bytes read so far.
    pub(super) fn pos(&self) -> u64 {
        self.pos as u64
    }

    /// Bytes of the file that are left.
    pub(super) fn left(&self) -> u64 {
        self.file_len - self.pos()
    }

    /// Checks that `count` items of at least `size` bytes each are at hand, so that room for them
    /// may be reserved.
    pub(super) fn ensure_items(
        &self,
        count: u32,
        size: u64,
        place: Location,
    ) -> Result<usize, BundleError> {
        let need = u64::from(count).saturating_mul(size);
        let have = self.left();
        if need > have {
            return Err(BundleError::Truncated { place, need, have });
        }
        let end = self.pos() + need;
        if end > self.prefix.len() as u64 {
            return Err(BundleError::NeedMore { at_least: end });
        }
        Ok(usize::try_from(count).expect("as many items lie in memory"))
    }

    pub(super) fn bytes(&mut self, n: u32, place: Location) -> Result<&'a [u8], BundleError> {
        let n = self.ensure_items(n, 1, place)?;
        let bytes = &self.prefix[self.pos..self.pos + n];
        self.pos += n;
        Ok(bytes)
    }

    fn array<const N: usize>(&mut self, place: Location) -> Result<[u8; N], BundleError> {
        let bytes = self.bytes(N as u32, place)?;
        Ok(bytes.try_into().expect("as many bytes were taken"))
    }

    pub(super) fn u8(&mut self, place: Location) -> Result<u8, BundleError> {
        self.array(place).map(u8::from_le_bytes)
    }

    pub(super) fn u16(&mut self, place: Location) -> Result<u16, BundleError> {
        self.array(place).map(u16::from_le_bytes)
    }

    pub(super) fn u32(&mut self, place: Location) -> Result<u32, BundleError> {
        self.array(place).map(u32::from_le_bytes)
    }

    pub(super) fn u64(&mut self, place: Location) -> Result<u64, BundleError> {
        self.array(place).map(u64::from_le_bytes)
    }

    pub(super) fn f64(&mut self, place: Location) -> Result<f64, BundleError> {
        self.array(place).map(f64::from_le_bytes)
    }

    /// A byte that is 0 or 1.
    pub(super) fn flag(
        &mut self,
        place: Location,
        field: &'static str,
    ) -> Result<bool, BundleError> {
        match self.u8(place)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(BundleError::field(place, field, "0 or 1", other)),
        }
    }

    /// Checks that what comes next is `magic` and the version of the header.
    pub(super) fn magic(&mut self, magic: &[u8; 4]) -> Result<(), BundleError> {
        let found: [u8; 4] = self.array(Location::Header)?;
        ensure(
            found == *magic,
            Location::Header,
            "magic",
            format_args!("`{}`", magic.escape_ascii()),
            format_args!("`{}`", found.escape_ascii()),
        )?;
        let version = self.u32(Location::Header)?;
        ensure(
            version == VERSION,
            Location::Header,
            "version",
            VERSION,
            version,
        )
    }

    /// A field that must have the value `expected`.
    pub(super) fn fixed(
        &mut self,
        place: Location,
        field: &'static str,
        expected: u32,
    ) -> Result<(), BundleError> {
        let found = self.u32(place)?;
        ensure(found == expected, place, field, expected, found)
    }

    /// Checks that nothing is left.
    pub(super) fn finish(&self) -> Result<(), BundleError> {
        match self.left() {
            0 => Ok(()),
            n => Err(BundleError::Trailing { at: self.pos(), n }),
        }
    }
}

/// The first eight bytes of a file.
pub(super) fn header(magic: &[u8; 4]) -> Vec<u8> {
    let mut out = magic.to_vec();
    out.extend_from_slice(&VERSION.to_le_bytes());
    out
}
