//! What peers say to each other: one stream for each request.
//!
//! The request is a JSON object, to the end of the stream. The answer is a JSON object behind its length in two
//! bytes, the higher first, and then the bytes that were asked for, to the end of the stream.

use serde::{Deserialize, Serialize};

/// The protocol and its version, on which both sides agree when they connect.
pub(super) const ALPN: &[u8] = b"sterna/package/1";

/// Bytes of a request, at most: a file name of 1024 bytes may be escaped.
pub(super) const MAX_REQUEST: usize = 8 << 10;

/// Bytes of an answer's head, at most.
pub(super) const MAX_ANSWER: usize = 1 << 10;

/// A request for bytes of a package's file.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Request {
    /// SHA-256 of the package's manifest, in hexadecimal digits.
    pub(super) manifest: String,
    /// The file's path within the package.
    pub(super) file: String,
    /// The first byte.
    pub(super) start: u64,
    /// The one after the last; the end of the file if there is none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) end: Option<u64>,
}

/// The head of an answer.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub(super) enum Answer {
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

impl Answer {
    /// The head as it is sent.
    pub(super) fn encoded(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).expect("it has neither maps nor floats");
        let length = u16::try_from(json.len()).expect("it has a few words and a number");
        [&length.to_be_bytes()[..], &json].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_form_that_is_documented() {
        let request = Request {
            manifest: "ab".to_owned(),
            file: "x.bin".to_owned(),
            start: 3,
            end: None,
        };
        let text = serde_json::to_string(&request).unwrap();
        assert_eq!(text, r#"{"manifest":"ab","file":"x.bin","start":3}"#);
        assert_eq!(serde_json::from_str::<Request>(&text).unwrap(), request);
        let bytes = Answer::Bytes { size: 7 }.encoded();
        assert_eq!(bytes, b"\0\x14{\"bytes\":{\"size\":7}}");
        assert_eq!(Answer::Busy.encoded(), b"\0\x06\"busy\"");
    }
}
