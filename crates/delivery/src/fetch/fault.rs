//! What can go wrong with a request, and what it says about the source.

use std::{ops::Range, time::Duration};

use crate::hash::Mismatch;

/// Why a request did not bring what was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// No answer: no connection, no such host, a broken one.
    #[error("no answer: {message}")]
    Unreachable {
        /// What the system or the library said.
        message: String,
    },
    /// There is no safe connection: a certificate that nobody vouches for, or no TLS that both know.
    #[error("no safe connection: {message}")]
    Insecure {
        /// What the library said.
        message: String,
    },
    /// The answer ended early.
    #[error("the answer ended after {received} of {expected} bytes")]
    Cut {
        /// Bytes that came.
        received: u64,
        /// Bytes that were to come.
        expected: u64,
    },
    /// Next to nothing came for too long.
    #[error("next to nothing came for too long")]
    Stalled,
    /// The server can't answer now.
    #[error("HTTP status {status}")]
    Busy {
        /// The status.
        status: u16,
        /// How long the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The server won't give this file.
    #[error("HTTP status {status}")]
    Refused {
        /// The status.
        status: u16,
    },
    /// The source doesn't have this file.
    #[error("not there: {message}")]
    Missing {
        /// What the system said.
        message: String,
    },
    /// The source gives whole files only.
    #[error("it doesn't serve parts of files")]
    NoRanges,
    /// Another number of bytes than the file has.
    #[error("expected a file of {expected} bytes, found {found}")]
    WrongLength {
        /// Bytes the file has.
        expected: u64,
        /// Bytes the source speaks of.
        found: u64,
    },
    /// More bytes than a small file may have.
    #[error("expected at most {limit} bytes, found {found}")]
    TooLarge {
        /// Bytes it may have.
        limit: u64,
        /// Bytes the source speaks of, or sent so far.
        found: u64,
    },
    /// Another part of the file than was asked for.
    #[error("asked for bytes {}..{}, was given `{found}`", asked.start, asked.end)]
    WrongRange {
        /// The part asked for.
        asked: Range<u64>,
        /// The `Content-Range` of the answer.
        found: String,
    },
    /// The file changed from one request to the next.
    #[error("the file changed: its ETag was {before}, now it is {now}")]
    Changed {
        /// The ETag of an earlier answer.
        before: String,
        /// That of this one.
        now: String,
    },
    /// A web page instead of the file.
    #[error("expected data, found `{content_type}`")]
    NotData {
        /// The answer's `Content-Type`.
        content_type: String,
    },
    /// Compressed, though that was excluded.
    #[error("expected plain bytes, found the encoding `{encoding}`")]
    Encoded {
        /// The answer's `Content-Encoding`.
        encoding: String,
    },
    /// A redirect that is not followed.
    #[error("redirect to {to}: {why}")]
    Redirect {
        /// Where it leads.
        to: String,
        /// Why it isn't followed.
        why: &'static str,
    },
    /// A block whose digest is another.
    #[error("bytes {}..{}: {mismatch}", block.start, block.end)]
    WrongBlock {
        /// The block.
        block: Range<u64>,
        /// Both digests.
        mismatch: Mismatch,
    },
    /// A file whose digest is another.
    #[error("{0}")]
    WrongBytes(Mismatch),
    /// The request was given up from this side.
    #[error("given up")]
    Cancelled,
}

/// What follows from a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Try again, after a while.
    Again,
    /// The source is no use for this blob.
    NotHere,
    /// The source is not to be trusted.
    Drop,
    /// Ask for whole files from now on.
    AskWhole,
    /// Nothing: it was this side's wish.
    Nothing,
}

impl Fault {
    /// Whether asking again may help.
    #[cfg(not(target_family = "wasm"))]
    pub(super) fn may_pass(&self) -> bool {
        self.verdict() == Verdict::Again
    }

    pub(super) fn verdict(&self) -> Verdict {
        match self {
            Self::Unreachable { .. } | Self::Cut { .. } | Self::Stalled | Self::Busy { .. } => {
                Verdict::Again
            }
            Self::Refused { .. } | Self::Missing { .. } => Verdict::NotHere,
            Self::NoRanges => Verdict::AskWhole,
            Self::Cancelled => Verdict::Nothing,
            Self::Insecure { .. }
            | Self::WrongLength { .. }
            | Self::TooLarge { .. }
            | Self::WrongRange { .. }
            | Self::Changed { .. }
            | Self::NotData { .. }
            | Self::Encoded { .. }
            | Self::Redirect { .. }
            | Self::WrongBlock { .. }
            | Self::WrongBytes(_) => Verdict::Drop,
        }
    }
}
