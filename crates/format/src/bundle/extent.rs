//! Where data is in mapped files.

use super::error::ensure;
use super::{BundleError, Location};

/// Data starts at multiples of this.
pub(super) const ALIGNMENT: u64 = 64;

/// The part of a file that holds some data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) offset: u64,
    pub(super) size: u64,
}

/// What an extent belongs to, for messages.
#[derive(Clone, Copy)]
pub(super) struct Owner {
    pub(super) place: Location,
    pub(super) offset_field: &'static str,
    pub(super) size_field: &'static str,
}

impl Extent {
    /// Checks that the extent has `needed` bytes (which are `None` beyond 64 bits), and that it is
    /// aligned and begins after `free` in a file of `file_len` bytes; gives where it ends.
    pub(super) fn check(
        self,
        owner: Owner,
        needed: Option<u64>,
        free: u64,
        file_len: u64,
    ) -> Result<u64, BundleError> {
        let Extent { offset, size } = self;
        let Owner {
            place,
            offset_field,
            size_field,
        } = owner;
        let needed = needed.ok_or_else(|| owner.too_large())?;
        ensure(size == needed, place, size_field, needed, size)?;
        let aligned = offset.is_multiple_of(ALIGNMENT);
        let expected = format_args!("a multiple of {ALIGNMENT}");
        ensure(aligned, place, offset_field, expected, offset)?;
        let expected = format_args!("at least {free}, where what precedes it ends");
        ensure(offset >= free, place, offset_field, expected, offset)?;
        let end = offset.checked_add(size).filter(|&end| end <= file_len);
        end.ok_or_else(|| BundleError::Truncated {
            place,
            need: size,
            have: file_len.saturating_sub(offset),
        })
    }

    /// The next aligned extent after `free` that has `needed` bytes, and where it ends.
    pub(super) fn next(
        owner: Owner,
        needed: Option<u64>,
        free: u64,
    ) -> Result<(Extent, u64), BundleError> {
        let offset = free.checked_next_multiple_of(ALIGNMENT);
        let extent = (offset.zip(needed)).map(|(offset, size)| Extent { offset, size });
        extent
            .and_then(|extent| Some((extent, extent.offset.checked_add(extent.size)?)))
            .ok_or_else(|| owner.too_large())
    }
}

impl Owner {
    fn too_large(self) -> BundleError {
        let expected = "a number of bytes that 64 bits can hold";
        BundleError::field(self.place, self.size_field, expected, "more")
    }
}
