//! A request in progress.

use std::ops::Range;

use super::{Fault, Head, head::Asked, pass::Pass};

/// A request to a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Which blob, by index.
    pub blob: usize,
    /// The blob's path below the source.
    pub name: String,
    /// Which source, by index.
    pub source: usize,
    /// Bytes the whole blob has.
    pub size: u64,
    /// The range for the `Range` header; without one, the whole blob is requested.
    pub range: Option<Range<u64>>,
}

/// A request planned by a [`Fetch`](super::Fetch), and its progress.
///
/// The driver sends [`request`](Self::request), passes the response's head to [`begin`](Self::begin), and for
/// every piece of the body stores the part that [`wanted`](Self::wanted) returns at [`offset`](Self::offset)
/// and passes that to [`stored`](Self::stored), until [`is_complete`](Self::is_complete) or the body ends;
/// then it returns the transfer to [`Fetch::transferred`](super::Fetch::transferred).
#[derive(Debug)]
pub struct Transfer {
    id: u64,
    request: Request,
    /// What is stored once it is complete: what an earlier one received of the first block, and `range`.
    claim: Range<u64>,
    /// The bytes that are needed of what the source sends.
    range: Range<u64>,
    /// Bytes that come first and are already stored.
    skip: u64,
    skipped: u64,
    /// Whether the source reported how many bytes it sends.
    counted: bool,
    known_etag: Option<String>,
    etag: Option<String>,
    /// The end of the stored bytes: after a wrong block, more than went through the pass.
    stored: u64,
    pass: Pass,
}

impl Transfer {
    pub(super) fn new(
        id: u64,
        request: Request,
        claim: Range<u64>,
        known_etag: Option<String>,
        pass: Pass,
    ) -> Self {
        Self {
            id,
            request,
            range: pass.offset()..claim.end,
            claim,
            skip: 0,
            skipped: 0,
            counted: true,
            known_etag,
            etag: None,
            stored: pass.offset(),
            pass,
        }
    }

    /// Its id in the planner.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What to ask for.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Takes the head of the response. Errors: the [`Fault`] that it shows; the body isn't needed then.
    pub fn begin(&mut self, head: &Head) -> Result<(), Fault> {
        let asked = Asked {
            name: &self.request.name,
            size: self.request.size,
            range: (self.request.range.clone()).unwrap_or(0..self.request.size),
            partial: self.request.range.is_some(),
            etag: self.known_etag.as_deref(),
        };
        let promise = head.check(&asked)?;
        self.etag = head.strong_etag().map(str::to_owned);
        // The request begins at or before the needed bytes, and so does the promised range.
        self.skip = self.range.start - promise.range.start;
        self.counted = promise.counted;
        Ok(())
    }

    /// The offset in the blob of the next needed byte.
    pub fn offset(&self) -> u64 {
        self.pass.offset()
    }

    /// The part of the next piece of the body that has to be stored at [`offset`](Self::offset).
    ///
    /// Errors: [`Fault::WrongLength`] if a source that did not report its number of bytes sends more than the
    /// blob has.
    pub fn wanted<'a>(&mut self, bytes: &'a [u8]) -> Result<&'a [u8], Fault> {
        let skip = (self.skip - self.skipped).min(bytes.len() as u64);
        self.skipped += skip;
        // No more than the bytes there are.
        let bytes = &bytes[skip as usize..];
        let left = self.range.end - self.offset();
        match usize::try_from(left) {
            Ok(left) if left < bytes.len() => {
                if !self.counted && self.range.end == self.request.size {
                    return Err(Fault::WrongLength {
                        expected: self.request.size,
                        found: self.offset().saturating_add(bytes.len() as u64),
                    });
                }
                Ok(&bytes[..left])
            }
            _ => Ok(bytes),
        }
    }

    /// Records that the bytes returned by [`wanted`](Self::wanted) are stored.
    ///
    /// Errors: [`Fault::WrongBlock`] if they complete a block with a wrong digest.
    pub fn stored(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.stored = self.offset() + bytes.len() as u64;
        self.pass.take(bytes)
    }

    /// Whether nothing more is needed. If the source did not report its number of bytes, the end of the body
    /// has to be seen: only [`end`](Self::end) can tell.
    pub fn is_complete(&self) -> bool {
        self.offset() == self.range.end && (self.counted || self.range.end != self.request.size)
    }

    /// The result when the body ends. Errors: [`Fault::Cut`].
    pub fn end(&self) -> Result<(), Fault> {
        if self.offset() == self.range.end {
            return Ok(());
        }
        Err(Fault::Cut {
            received: self.received(),
            expected: self.skip + (self.range.end - self.range.start),
        })
    }

    /// Bytes of the body taken so far, needed or not.
    pub fn received(&self) -> u64 {
        self.skipped + (self.offset() - self.range.start)
    }

    pub(super) fn etag(&self) -> Option<&str> {
        self.etag.as_deref()
    }

    pub(super) fn claim(&self) -> Range<u64> {
        self.claim.clone()
    }

    /// The stored bytes that are valid.
    pub(super) fn kept(&self) -> Range<u64> {
        self.claim.start..self.pass.kept()
    }

    /// The stored bytes that aren't.
    pub(super) fn spoilt(&self) -> Range<u64> {
        self.pass.kept()..self.stored
    }

    pub(super) fn into_pass(self) -> Pass {
        self.pass
    }
}
