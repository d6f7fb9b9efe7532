//! The only place that asks the system for memory: for mapped files, and for large blocks.
#![allow(unsafe_code)]

use std::{fs::File, io, ops::Range, sync::Arc};

use bytes::Bytes;
use memmap2::{Mmap, MmapMut};

/// A file in memory, whose pages the system reads and forgets.
#[derive(Debug, Clone)]
pub(crate) struct Mapping(Arc<Mmap>);

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Mapping {
    /// All of the file.
    pub(crate) fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    /// Where `bytes` are in the file, if they are part of this mapping.
    pub(crate) fn position(&self, bytes: &[u8]) -> Option<Range<usize>> {
        let first = (bytes.as_ptr() as usize).checked_sub(self.0.as_ptr() as usize)?;
        let end = first.checked_add(bytes.len())?;
        (end <= self.0.len()).then_some(first..end)
    }

    /// Asks the system for ordinary pages, since of a huge one nothing is released alone. A hint.
    pub(crate) fn in_small_pages(&self) {
        #[cfg(target_os = "linux")]
        let _ = self.0.advise(memmap2::Advice::NoHugePage);
    }

    fn within(&self, range: Range<usize>) -> Range<usize> {
        let end = range.end.min(self.0.len());
        range.start.min(end)..end
    }

    /// Has the system begin to read `range`. A hint: nothing follows where the system has no such thing.
    pub(crate) fn will_need(&self, range: Range<usize>) {
        let range = self.within(range);
        #[cfg(unix)]
        let _ = (self.0).advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        #[cfg(not(unix))]
        let _ = range;
    }

    /// Takes the whole pages of `range` out of this process; they are read again when they are touched.
    pub(crate) fn release(&self, range: Range<usize>) {
        let range = self.within(range);
        #[cfg(unix)]
        {
            let first = range.start.next_multiple_of(PAGE);
            let len = (range.end / PAGE * PAGE).saturating_sub(first);
            if len > 0 {
                // SAFETY: the mapping is of a file, read-only and shared, so that its pages have what the file has,
                // before and after: nothing that was written is lost.
                let released = unsafe {
                    let advice = memmap2::UncheckedAdvice::DontNeed;
                    self.0.unchecked_advise_range(advice, first, len)
                };
                // A hint, as above.
                drop(released);
            }
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// Bytes of a page, or of several where systems have pages of different sizes.
#[cfg(unix)]
const PAGE: usize = if cfg!(target_arch = "x86_64") {
    4 << 10
} else {
    64 << 10
};

/// Maps all of `file` for reading. Pages are read from the disk when they are first touched.
pub(crate) fn map(file: &File) -> io::Result<Mapping> {
    // SAFETY: the mapping is read-only and is owned by the `Bytes` made of it, so no slice outlives
    // it and nothing in this process writes through it. What cannot be ruled out is another
    // process changing the file meanwhile. A change in place alters weight values, or makes a
    // header that is parsed again differ; every reader checks ranges against the length of the
    // slice it holds, never against a number read earlier from the file, so memory outside the
    // mapping is not reached. A file cut short makes the system stop this process when it touches
    // the missing pages: a crash, as with any mapped file, and not a read of foreign memory.
    let map = unsafe { Mmap::map(file)? };
    Ok(Mapping(Arc::new(map)))
}

/// Bytes of a huge page, on the systems and processors that matter here.
pub(crate) const HUGE_PAGE: usize = 2 << 20;

/// `len` bytes that `fill` has written, aligned to a huge page and in huge pages if the system gives them.
pub(crate) fn filled(
    len: usize,
    fill: impl FnOnce(&mut [u8]) -> io::Result<()>,
) -> io::Result<Bytes> {
    let too_long = || io::Error::from(io::ErrorKind::OutOfMemory);
    let mut map = MmapMut::map_anon(len.checked_add(HUGE_PAGE).ok_or_else(too_long)?)?;
    // A hint: a system that doesn't support it uses ordinary pages.
    #[cfg(target_os = "linux")]
    let _ = map.advise(memmap2::Advice::HugePage);
    let first = map.as_ptr().align_offset(HUGE_PAGE);
    fill(&mut map[first..first + len])?;
    Ok(Bytes::from_owner(map.make_read_only()?).slice(first..first + len))
}
