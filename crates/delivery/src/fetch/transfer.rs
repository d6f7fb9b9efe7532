//! One request on its way.

use std::ops::Range;

use super::{Fault, Head, head::Asked, pass::Pass};

/// What to ask a source for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Which blob, counted as they were given.
    pub blob: usize,
    /// The blob's path below the source.
    pub name: String,
    /// Which source, counted as they were given.
    pub source: usize,
    /// Bytes the whole blob has.
    pub size: u64,
    /// The part to ask for with a `Range` header; without one, the whole blob is asked for.
    pub range: Option<Range<u64>>,
}

/// A request that a [`Fetch`](super::Fetch) has planned, and what came of it so far.
///
/// Whoever drives it sends [`request`](Self::request), passes the answer's head to
/// [`begin`](Self::begin), and for every piece of the body stores what [`wanted`](Self::wanted) leaves
/// of it at [`offset`](Self::offset) and passes that to [`stored`](Self::stored), until
/// [`is_complete`](Self::is_complete) or the body ends; then gives the transfer back to
/// [`Fetch::transferred`](super::Fetch::transferred).
#[derive(Debug)]
pub struct Transfer {
    id: u64,
    request: Request,
    /// What is there once it is complete: what an earlier one brought of the first block, and `range`.
    claim: Range<u64>,
    /// The bytes that are wanted of what the source sends.
    range: Range<u64>,
    /// Bytes that come first and are there already.
    skip: u64,
    skipped: u64,
    /// Whether the source said how many bytes it sends.
    counted: bool,
    known_etag: Option<String>,
    etag: Option<String>,
    /// Up to where bytes are stored: behind a wrong block, more than went through the pass.
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

    /// What the planner knows it by.
    pub fn id(&self) -> u64 {
        self.id
    }

    /// What to ask for.
    pub fn request(&self) -> &Request {
        &self.request
    }

    /// Takes the head of the answer. Errors: the [`Fault`] that it shows; the body isn't wanted then.
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
        // What was asked for begins at or before what is wanted, and what is promised begins there too.
        self.skip = self.range.start - promise.range.start;
        self.counted = promise.counted;
        Ok(())
    }

    /// Where in the blob the next wanted byte lies.
    pub fn offset(&self) -> u64 {
        self.pass.offset()
    }

    /// The part of the next piece of the body that is to be stored at [`offset`](Self::offset).
    ///
    /// Errors: [`Fault::WrongLength`] if a source that did not say how many bytes it sends sends more
    /// than the blob has.
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

    /// Takes note of bytes that [`wanted`](Self::wanted) gave and that are stored.
    ///
    /// Errors: [`Fault::WrongBlock`] if they complete a block that has another digest.
    pub fn stored(&mut self, bytes: &[u8]) -> Result<(), Fault> {
        self.stored = self.offset() + bytes.len() as u64;
        self.pass.take(bytes)
    }

    /// Whether nothing more is wanted. A source that did not say how many bytes it sends must also be
    /// seen to end: [`end`](Self::end) is the only way to know.
    pub fn is_complete(&self) -> bool {
        self.offset() == self.range.end && (self.counted || self.range.end != self.request.size)
    }

    /// The verdict when the body ends. Errors: [`Fault::Cut`].
    pub fn end(&self) -> Result<(), Fault> {
        if self.offset() == self.range.end {
            return Ok(());
        }
        Err(Fault::Cut {
            received: self.received(),
            expected: self.skip + (self.range.end - self.range.start),
        })
    }

    /// Bytes of the body taken so far, wanted or not.
    pub fn received(&self) -> u64 {
        self.skipped + (self.offset() - self.range.start)
    }

    pub(super) fn etag(&self) -> Option<&str> {
        self.etag.as_deref()
    }

    pub(super) fn claim(&self) -> Range<u64> {
        self.claim.clone()
    }

    /// The bytes that are stored and count.
    pub(super) fn kept(&self) -> Range<u64> {
        self.claim.start..self.pass.kept()
    }

    /// The bytes that were stored and don't.
    pub(super) fn spoilt(&self) -> Range<u64> {
        self.pass.kept()..self.stored
    }

    pub(super) fn into_pass(self) -> Pass {
        self.pass
    }
}
