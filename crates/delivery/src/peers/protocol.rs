//! What peers say to each other: one stream for each request.
//!
//! The request is a JSON object, to the end of the stream. The answer is a JSON value behind its length in two bytes, the
//! higher first, and then the bytes that were asked for, to the end of the stream. Between tabs, where a channel has
//! messages, request and answer are a message of text each.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::{
    fetch::{Fault, Head},
    hash::{Algorithm, Digest},
};

/// The protocol and its version, on which both sides agree when they connect.
#[cfg(not(target_family = "wasm"))]
pub(super) const ALPN: &[u8] = b"sterna/package/1";

/// Bytes of a request, at most: a file name of 1024 bytes may be escaped.
pub(super) const MAX_REQUEST: usize = 8 << 10;

/// Bytes of an answer's head, at most.
pub(super) const MAX_REPLY: usize = 1 << 10;

/// A request for bytes of a package's file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// SHA-256 of the package's manifest, in hexadecimal digits.
    manifest: String,
    /// The file's path within the package.
    file: String,
    /// The first byte.
    start: u64,
    /// The one after the last; the end of the file if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<u64>,
}

impl Request {
    /// One for `range` of the file `name`, or all of it, of the package with this SHA-256 of its manifest.
    pub fn new(manifest: Digest, name: &str, range: Option<Range<u64>>) -> Self {
        Self {
            manifest: manifest.to_string(),
            file: name.to_owned(),
            start: range.as_ref().map_or(0, |range| range.start),
            end: range.map(|range| range.end),
        }
    }

    /// The one that a peer sent, and the manifest's digest.
    ///
    /// Errors: [`Reply::Invalid`].
    pub fn read(bytes: &[u8]) -> Result<(Self, Digest), Reply> {
        if bytes.len() > MAX_REQUEST {
            return Err(Reply::Invalid);
        }
        let request: Self = serde_json::from_slice(bytes).map_err(|_| Reply::Invalid)?;
        let manifest = Digest::from_hex(Algorithm::Sha256, &request.manifest);
        Ok((request, manifest.map_err(|_| Reply::Invalid)?))
    }

    /// As it is sent.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("it has neither maps nor floats")
    }

    /// The file's path within the package.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// The bytes that it asks for of a file of `size`.
    ///
    /// Errors: [`Reply::Invalid`] if they aren't in it.
    pub fn part(&self, size: u64) -> Result<Range<u64>, Reply> {
        let end = self.end.unwrap_or(size);
        match self.start <= end && end <= size {
            true => Ok(self.start..end),
            false => Err(Reply::Invalid),
        }
    }
}

/// The head of an answer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Reply {
    /// The bytes follow.
    Bytes {
        /// Bytes of the whole file.
        size: u64,
    },
    /// No such package, or no such file in it.
    Unknown,
    /// The request can't be read, or asks for bytes that aren't in the file.
    Invalid,
    /// Too many requests are under way.
    Busy,
    /// Whoever asks has had all that one may have.
    Quota,
}

impl Reply {
    /// The one that a peer sent.
    ///
    /// Errors: [`Fault::Invalid`].
    pub fn read(bytes: &[u8]) -> Result<Self, Fault> {
        Self::check_len(bytes.len())?;
        serde_json::from_slice(bytes).map_err(|error| Fault::Invalid {
            message: format!("expected an answer, found something else: {error}"),
        })
    }

    /// Whether one may have so many bytes.
    ///
    /// Errors: [`Fault::Invalid`].
    pub(super) fn check_len(len: usize) -> Result<(), Fault> {
        match len > MAX_REPLY {
            true => Err(Fault::Invalid {
                message: format!("expected an answer of at most {MAX_REPLY} bytes, found {len}"),
            }),
            false => Ok(()),
        }
    }

    /// As it is sent, without its length.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).expect("it has neither maps nor floats")
    }

    /// As it is sent, with its length.
    #[cfg(not(target_family = "wasm"))]
    pub(super) fn encoded(&self) -> Vec<u8> {
        let json = self.to_json().into_bytes();
        let length = u16::try_from(json.len()).expect("it has a few words and a number");
        [&length.to_be_bytes()[..], &json].concat()
    }

    /// What it means for whoever fetches: the size of the file.
    ///
    /// Errors: [`Fault::Missing`] for what the peer doesn't give, [`Fault::Unreachable`] for what it may give later.
    pub fn size(self) -> Result<u64, Fault> {
        let missing = |message: &str| Fault::Missing {
            message: message.to_owned(),
        };
        match self {
            Self::Bytes { size } => Ok(size),
            Self::Unknown => Err(missing("the peer doesn't share it")),
            Self::Invalid => Err(missing("the peer doesn't have these bytes")),
            Self::Quota => Err(missing("the peer gives no more to this machine")),
            Self::Busy => Err(Fault::Unreachable {
                message: "the peer is busy".to_owned(),
            }),
        }
    }

    /// The head of an answer with `range` of a file of `size`, or all of it, as an HTTP server's would be.
    pub fn head(size: u64, range: Option<Range<u64>>) -> Head {
        let part = range.clone().unwrap_or(0..size);
        Head {
            status: if range.is_some() { 206 } else { 200 },
            content_length: Some(part.end.saturating_sub(part.start)),
            content_range: range.map(|range| {
                let last = range.end.saturating_sub(1);
                format!("bytes {}-{last}/{size}", range.start)
            }),
            ..Head::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::digest_of;

    #[test]
    fn messages_have_the_form_that_is_documented() {
        let manifest = digest_of(Algorithm::Sha256, b"");
        let request = Request::new(manifest, "x.bin", None);
        let text = request.to_json();
        let expected = format!(r#"{{"manifest":"{manifest}","file":"x.bin","start":0}}"#);
        assert_eq!(text, expected);
        assert_eq!(Request::read(text.as_bytes()), Ok((request, manifest)));
        let part = Request::new(manifest, "x.bin", Some(3..7)).to_json();
        assert!(part.ends_with(r#""start":3,"end":7}"#), "{part}");
        let bytes = Reply::Bytes { size: 7 }.encoded();
        assert_eq!(bytes, b"\0\x14{\"bytes\":{\"size\":7}}");
        assert_eq!(Reply::Busy.encoded(), b"\0\x06\"busy\"");
        assert_eq!(Reply::read(b"\"busy\""), Ok(Reply::Busy));
    }

    #[test]
    fn what_is_no_request_is_refused() {
        let digest = "00".repeat(32);
        for text in [
            "{".to_owned(),
            r#"{"manifest":"ab","file":"x","start":0}"#.to_owned(),
            format!(r#"{{"manifest":"{digest}","file":"x"}}"#),
            format!(r#"{{"manifest":"{digest}","file":"x","start":-1}}"#),
            format!(r#"{{"manifest":"{digest}","file":"x","start":0,"more":1}}"#),
            format!(
                r#"{{"manifest":"{digest}","file":"{}","start":0}}"#,
                "x".repeat(MAX_REQUEST)
            ),
        ] {
            assert_eq!(
                Request::read(text.as_bytes()),
                Err(Reply::Invalid),
                "{text}"
            );
        }
        let request = |range| Request::new(digest_of(Algorithm::Sha256, b""), "x", range);
        assert_eq!(request(None).part(9), Ok(0..9));
        assert_eq!(request(Some(9..9)).part(9), Ok(9..9));
        for (start, end) in [(0, 10), (10, 10), (5, 4)] {
            let range = Range { start, end };
            assert_eq!(request(Some(range)).part(9), Err(Reply::Invalid));
        }
        assert!(Reply::read(&[b' '; MAX_REPLY + 1]).is_err());
        assert!(matches!(Reply::read(b"{}"), Err(Fault::Invalid { .. })));
    }

    #[test]
    fn what_a_peer_refuses_is_asked_for_elsewhere() {
        assert_eq!(Reply::Bytes { size: 3 }.size(), Ok(3));
        for reply in [Reply::Unknown, Reply::Invalid, Reply::Quota] {
            assert!(matches!(reply.size(), Err(Fault::Missing { .. })));
        }
        assert!(matches!(Reply::Busy.size(), Err(Fault::Unreachable { .. })));
        let head = Reply::head(9, Some(2..5));
        assert_eq!((head.status, head.content_length), (206, Some(3)));
        assert_eq!(head.content_range.as_deref(), Some("bytes 2-4/9"));
        let whole = Reply::head(9, None);
        assert_eq!(
            (whole.status, whole.content_length, whole.content_range),
            (200, Some(9), None)
        );
    }
}
