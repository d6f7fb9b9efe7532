//! Failures of requests, and what they mean for the source.

use std::{ops::Range, time::Duration};

use crate::hash::Mismatch;

/// Why a request failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Fault {
    /// No response: no connection, no such host, a broken one.
    #[error("no answer: {message}")]
    Unreachable {
        /// The system's or the library's message.
        message: String,
    },
    /// No response: nothing listens there.
    #[error("no answer: {message}")]
    Closed {
        /// The system's or the library's message.
        message: String,
    },
    /// No secure connection: an untrusted certificate, or no common TLS version.
    #[error("no safe connection: {message}")]
    Insecure {
        /// The library's message.
        message: String,
    },
    /// The response ended early.
    #[error("the answer ended after {received} of {expected} bytes")]
    Cut {
        /// Bytes received.
        received: u64,
        /// Bytes expected.
        expected: u64,
    },
    /// Next to nothing came for too long.
    #[error("next to nothing came for too long")]
    Stalled,
    /// The server can't respond now.
    #[error("HTTP status {status}")]
    Busy {
        /// The status.
        status: u16,
        /// How long the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The server refuses this file.
    #[error("HTTP status {status}")]
    Refused {
        /// The status.
        status: u16,
    },
    /// The source doesn't have this file.
    #[error("not there: {message}")]
    Missing {
        /// The system's message.
        message: String,
    },
    /// What the source says of its files contradicts itself, or can't be read.
    #[error("{message}")]
    Invalid {
        /// What is wrong with it.
        message: String,
    },
    /// The source doesn't support ranges.
    #[error("it doesn't serve parts of files")]
    NoRanges,
    /// The wrong size for the file.
    #[error("expected a file of {expected} bytes, found {found}")]
    WrongLength {
        /// Bytes the file has.
        expected: u64,
        /// Bytes the source reports.
        found: u64,
    },
    /// A file whose size the source doesn't tell.
    #[error("expected the file's size, found neither Content-Length nor one in Content-Range")]
    NoSize,
    /// More bytes than a small file may have.
    #[error("expected at most {limit} bytes, found {found}")]
    TooLarge {
        /// The limit.
        limit: u64,
        /// Bytes the source reports, or sent so far.
        found: u64,
    },
    /// A range other than the requested one.
    #[error("asked for bytes {}..{}, was given `{found}`", asked.start, asked.end)]
    WrongRange {
        /// The requested range.
        asked: Range<u64>,
        /// The `Content-Range` of the response.
        found: String,
    },
    /// The file changed from one request to the next.
    #[error("the file changed: its ETag was {before}, now it is {now}")]
    Changed {
        /// The ETag of an earlier response.
        before: String,
        /// That of this one.
        now: String,
    },
    /// A web page instead of the file.
    #[error("expected data, found `{content_type}`")]
    NotData {
        /// The `Content-Type` of the response.
        content_type: String,
    },
    /// Compressed, though that was excluded.
    #[error("expected plain bytes, found the encoding `{encoding}`")]
    Encoded {
        /// The `Content-Encoding` of the response.
        encoding: String,
    },
    /// A redirect that is not followed.
    #[error("redirect to {to}: {why}")]
    Redirect {
        /// Its target.
        to: String,
        /// Why it isn't followed.
        why: &'static str,
    },
    /// A block with the wrong digest.
    #[error("bytes {}..{}: {mismatch}", block.start, block.end)]
    WrongBlock {
        /// The block.
        block: Range<u64>,
        /// Both digests.
        mismatch: Mismatch,
    },
    /// A file with the wrong digest.
    #[error("{0}")]
    WrongBytes(Mismatch),
    /// The request was cancelled on this side.
    #[error("given up")]
    Cancelled,
}

/// The consequence of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Try again, after a while.
    Again,
    /// The source is useless for this blob.
    NotHere,
    /// The source is dropped entirely.
    Drop,
    /// Request whole files from now on.
    AskWhole,
    /// Nothing: it was cancelled on this side.
    Nothing,
}

impl Fault {
    /// Whether asking again may help.
    #[cfg(not(target_family = "wasm"))]
    pub(crate) fn may_pass(&self) -> bool {
        self.verdict() == Verdict::Again
    }

    pub(super) fn verdict(&self) -> Verdict {
        match self {
            Self::Unreachable { .. }
            | Self::Closed { .. }
            | Self::Cut { .. }
            | Self::Stalled
            | Self::Busy { .. } => Verdict::Again,
            Self::Refused { .. } | Self::Missing { .. } => Verdict::NotHere,
            Self::NoRanges => Verdict::AskWhole,
            Self::Cancelled => Verdict::Nothing,
            Self::Insecure { .. }
            | Self::WrongLength { .. }
            | Self::NoSize
            | Self::TooLarge { .. }
            | Self::WrongRange { .. }
            | Self::Changed { .. }
            | Self::NotData { .. }
            | Self::Encoded { .. }
            | Self::Redirect { .. }
            | Self::Invalid { .. }
            | Self::WrongBlock { .. }
            | Self::WrongBytes(_) => Verdict::Drop,
        }
    }
}
