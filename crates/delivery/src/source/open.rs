//! What is asked of a source, and what it answers.

use std::{
    io::{self, Read},
    ops::Range,
};

use crate::{
    fetch::{Fault, Head, check_name},
    hash::Mismatch,
};

/// A source of blobs by name.
pub trait Source: Send + Sync {
    /// Its name in messages: its address.
    fn name(&self) -> &str;

    /// Requests a blob, or a range of one.
    ///
    /// Errors: [`Fault`] if there is no response, or none that is acceptable.
    fn open(&self, name: &str, range: Option<Range<u64>>) -> Result<Answer, Fault>;

    /// Cancels every request in progress, as soon as possible; later ones work.
    fn interrupt(&self) {}

    /// Whether nobody vouches for it: its bytes count only by the hashes of a manifest.
    fn is_stranger(&self) -> bool {
        false
    }

    /// Tells it that it sent something false, `why`, and is not asked again. What it can't remember of that, and why
    /// not, is returned.
    fn lied(&self, _why: &str) -> Option<String> {
        None
    }
}

/// The head of a response, and its body.
pub struct Answer {
    /// The head.
    pub head: Head,
    /// The body.
    pub body: Box<dyn Read + Send>,
}

/// Classifies an error while reading a response's body.
pub(crate) fn body_fault(error: &io::Error, received: u64, expected: u64) -> Fault {
    let mismatch = error.get_ref().and_then(|error| error.downcast_ref());
    if let Some(mismatch) = mismatch {
        return Fault::WrongBytes(Mismatch::clone(mismatch));
    }
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

/// Checks the name of a file that a source is asked for. Errors: [`Fault::Missing`].
pub(crate) fn asked_for(name: &str) -> Result<(), Fault> {
    check_name(name).map_err(|error| Fault::Missing {
        message: error.to_string(),
    })
}
