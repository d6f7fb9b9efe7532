//! The sign that nobody has written to a blob's file since its bytes were verified.
//!
//! Every such file is dated to the same moment. Writing to it gives it another date, which costs as little
//! to see as its size; then its bytes are hashed again. So a change by any program is noticed, unless that
//! program hides it by setting the date back; what fails without a write, a disk, is not.

use std::{
    fs::{File, Metadata},
    time::{Duration, SystemTime},
};

/// The moment: a full second, and an even one, since some file systems count in twos.
const MOMENT: Duration = Duration::from_secs(1_000_000_000);

/// Seals a file whose bytes were verified. A file system without dates has no seals, and its files are
/// hashed whenever they are asked for.
pub(super) fn seal(file: &File) {
    let _ = file.set_modified(SystemTime::UNIX_EPOCH + MOMENT);
}

/// True if the file is as it was when it was sealed.
pub(super) fn is_sealed(metadata: &Metadata) -> bool {
    let modified = metadata.modified();
    modified.is_ok_and(|modified| modified == SystemTime::UNIX_EPOCH + MOMENT)
}
