//! Where bytes come from: web servers and folders.

mod folder;
#[cfg(feature = "http")]
mod http;
#[cfg(feature = "http")]
pub mod hugging_face;
#[cfg(feature = "http")]
mod url;

use std::{
    io::{self, Read},
    ops::Range,
};

pub use self::folder::FolderSource;
#[cfg(feature = "http")]
pub use self::{
    http::{HttpOptions, HttpSource},
    url::{Url, UrlError},
};
use crate::fetch::{Fault, Head};

/// Somewhere that has blobs under their names.
pub trait Source: Send + Sync {
    /// What it is called in messages: its address.
    fn name(&self) -> &str;

    /// Asks for a blob, or for a part of one.
    ///
    /// Errors: [`Fault`] if there is no answer, or none that may be followed.
    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault>;

    /// Ends every request under way, as soon as it can; later ones work.
    fn interrupt(&self) {}
}

/// What a source says, and the bytes that follow.
pub struct Answer {
    /// What it says about them.
    pub head: Head,
    /// The bytes.
    pub body: Box<dyn Read + Send>,
}

/// What an error while reading an answer's body means.
pub(crate) fn body_fault(error: &io::Error, received: u64, expected: u64) -> Fault {
    match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => Fault::Stalled,
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            Fault::Cut { received, expected }
        }
        _ => Fault::Unreachable {
            message: error.to_string(),
        },
    }
}
