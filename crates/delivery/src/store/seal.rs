//! A mark that a blob's file has not been written to since its bytes were verified.
//!
//! Every such file has the same modification time. Writing to it changes that, which is as cheap to check as
//! its size; then its bytes are hashed again. So a change by any program is noticed, unless that program
//! resets the date; corruption without a write, by a disk, is not.

use std::{
    fs::{File, Metadata},
    time::{Duration, SystemTime},
};

/// The modification time: an even full second, since some file systems have a resolution of two.
const MOMENT: Duration = Duration::from_secs(1_000_000_000);

/// Seals a file whose bytes were verified. A file system without dates has no seals, and its files are hashed
/// whenever they are requested.
pub(super) fn seal(file: &File) {
    let _ = file.set_modified(SystemTime::UNIX_EPOCH + MOMENT);
}

/// True if the file is unchanged since it was sealed.
pub(super) fn is_sealed(metadata: &Metadata) -> bool {
    let modified = metadata.modified();
    modified.is_ok_and(|modified| modified == SystemTime::UNIX_EPOCH + MOMENT)
}
