//! The one place that maps files into memory.
#![allow(unsafe_code)]

use std::{fs::File, io};

use bytes::Bytes;
use memmap2::Mmap;

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
