//! The only place that asks the system for memory: for mapped files, and for large blocks.
#![allow(unsafe_code)]

use std::{fs::File, io};

use bytes::Bytes;
use memmap2::{Mmap, MmapMut};

/// Maps all of `file` for reading. Pages are read from the disk when they are first touched.
pub(crate) fn map(file: &File) -> io::Result<Bytes> {
    // SAFETY: the mapping is read-only and is owned by the `Bytes` it becomes, so no slice outlives
    // it and nothing in this process writes through it. What cannot be ruled out is another
    // process changing the file meanwhile. A change in place alters weight values, or makes a
    // header that is parsed again differ; every reader checks ranges against the length of the
    // slice it holds, never against a number read earlier from the file, so memory outside the
    // mapping is not reached. A file cut short makes the system stop this process when it touches
    // the missing pages: a crash, as with any mapped file, and not a read of foreign memory.
    let map = unsafe { Mmap::map(file)? };
    Ok(Bytes::from_owner(map))
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
