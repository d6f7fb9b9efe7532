//! The head of a response, and its validation.

use std::{ops::Range, time::Duration};

use super::Fault;

/// The relevant parts of the head of an HTTP response.
///
/// Sources that aren't HTTP servers fill in the equivalent.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Head {
    /// The status.
    pub status: u16,
    /// `Content-Length`, if it is a number.
    pub content_length: Option<u64>,
    /// `Content-Range`, verbatim.
    pub content_range: Option<String>,
    /// `Content-Type`, verbatim.
    pub content_type: Option<String>,
    /// `Content-Encoding`, verbatim.
    pub content_encoding: Option<String>,
    /// `ETag`, verbatim.
    pub etag: Option<String>,
    /// `Last-Modified`, verbatim.
    pub last_modified: Option<String>,
    /// `Retry-After`, verbatim.
    pub retry_after: Option<String>,
    /// `Date`, verbatim.
    pub date: Option<String>,
}

/// The content of a valid head.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Promise {
    /// The range of the bytes that follow.
    pub(super) range: Range<u64>,
    /// Whether the source reported their number.
    pub(super) counted: bool,
}

/// What a source says of a file that nothing else describes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Described {
    /// Its size in bytes.
    pub size: u64,
    /// A strong ETag: it stands for the same bytes wherever it is seen again.
    pub etag: Option<String>,
    /// What changes when the file does, as far as the source tells: any ETag, or a date, or nothing.
    pub validator: String,
}

/// The request: `range` of a file of `size` bytes, as a partial request if `partial`.
pub(super) struct Asked<'a> {
    pub(super) name: &'a str,
    pub(super) size: u64,
    pub(super) range: Range<u64>,
    pub(super) partial: bool,
    pub(super) etag: Option<&'a str>,
}

impl Head {
    /// The head of an HTTP response with this status; `header` returns the value of a header by its
    /// lower-case name, if the response has it.
    pub fn read(status: u16, header: impl Fn(&str) -> Option<String>) -> Self {
        Self {
            status,
            content_length: header("content-length").and_then(|n| n.trim().parse().ok()),
            content_range: header("content-range"),
            content_type: header("content-type"),
            content_encoding: header("content-encoding"),
            etag: header("etag"),
            last_modified: header("last-modified"),
            retry_after: header("retry-after"),
            date: header("date"),
        }
    }

    /// Validates the head of a response to this request.
    pub(super) fn check(&self, asked: &Asked<'_>) -> Result<Promise, Fault> {
        self.check_kind(asked.name)?;
        if let (Some(before), Some(now)) = (asked.etag, self.strong_etag())
            && before != now
        {
            return Err(Fault::Changed {
                before: shortened(before),
                now: shortened(now),
            });
        }
        if self.status == 206 {
            return self.check_partial(asked);
        }
        if let Some(found) = self.content_length
            && found != asked.size
        {
            return Err(Fault::WrongLength {
                expected: asked.size,
                found,
            });
        }
        if asked.partial {
            return Err(Fault::NoRanges);
        }
        Ok(Promise {
            range: 0..asked.size,
            counted: self.content_length.is_some(),
        })
    }

    /// Checks that the answer is the plain bytes of a file called `name`.
    ///
    /// Errors: the [`Fault`] that it shows.
    pub fn check_kind(&self, name: &str) -> Result<(), Fault> {
        match self.status {
            200 | 206 => {}
            408 | 425 | 429 | 500..=599 => {
                return Err(Fault::Busy {
                    status: self.status,
                    retry_after: self.wait(),
                });
            }
            status => return Err(Fault::Refused { status }),
        }
        if let Some(encoding) = &self.content_encoding
            && !encoding.trim().eq_ignore_ascii_case("identity")
        {
            let encoding = shortened(encoding);
            return Err(Fault::Encoded { encoding });
        }
        if let Some(content_type) = &self.content_type
            && is_page(content_type)
            && !is_page_name(name)
        {
            let content_type = shortened(content_type);
            return Err(Fault::NotData { content_type });
        }
        Ok(())
    }

    /// Reads what the answer to a request for the first byte of a file called `name` says of the file.
    ///
    /// Errors: the [`Fault`] that it shows; [`Fault::NoSize`].
    pub fn describe(&self, name: &str) -> Result<Described, Fault> {
        self.check_kind(name)?;
        let size = match self.status {
            206 => (self.content_range.as_deref())
                .and_then(parse_content_range)
                .and_then(|(_, size)| size),
            _ => self.content_length,
        };
        let validator = [&self.etag, &self.last_modified];
        let validator = validator.into_iter().flatten().next();
        Ok(Described {
            size: size.ok_or(Fault::NoSize)?,
            etag: self.strong_etag().map(str::to_owned),
            validator: validator.map_or(String::new(), |text| shortened(text.trim())),
        })
    }

    fn check_partial(&self, asked: &Asked<'_>) -> Result<Promise, Fault> {
        let found = self.content_range.as_deref().unwrap_or("no Content-Range");
        let wrong = || Fault::WrongRange {
            asked: asked.range.clone(),
            found: shortened(found),
        };
        let (range, size) = parse_content_range(found).ok_or_else(wrong)?;
        if let Some(found) = size.filter(|&size| size != asked.size) {
            return Err(Fault::WrongLength {
                expected: asked.size,
                found,
            });
        }
        if range.start != asked.range.start || range.end > asked.range.end {
            return Err(wrong());
        }
        let promised = range.end - range.start;
        if let Some(found) = self.content_length.filter(|&length| length != promised) {
            return Err(Fault::WrongLength {
                expected: promised,
                found,
            });
        }
        Ok(Promise {
            range,
            counted: true,
        })
    }

    /// The ETag, if it is a strong one.
    pub(super) fn strong_etag(&self) -> Option<&str> {
        let etag = self.etag.as_deref()?.trim();
        (!etag.starts_with("W/") && !etag.is_empty()).then_some(etag)
    }

    /// The wait in `Retry-After`. A date is relative to the response's own `Date`, so no clock is needed.
    pub(super) fn wait(&self) -> Option<Duration> {
        let wait = self.retry_after.as_deref()?.trim();
        if let Ok(seconds) = wait.parse() {
            return Some(Duration::from_secs(seconds));
        }
        let (until, now) = (http_date(wait)?, http_date(self.date.as_deref()?)?);
        Some(Duration::from_secs(until.saturating_sub(now)))
    }
}

/// Untrusted text, shortened for an error.
fn shortened(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(100).collect()
}

fn is_page(content_type: &str) -> bool {
    let kind = content_type.split(';').next().unwrap_or("").trim();
    ["text/html", "application/xhtml+xml"]
        .iter()
        .any(|page| kind.eq_ignore_ascii_case(page))
}

fn is_page_name(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    [".html", ".htm", ".xhtml"]
        .iter()
        .any(|end| name.ends_with(end))
}

/// `bytes 0-9/100`: the range, and the size unless it is `*`.
fn parse_content_range(text: &str) -> Option<(Range<u64>, Option<u64>)> {
    let (range, size) = text.trim().strip_prefix("bytes ")?.split_once('/')?;
    let (first, last) = range.trim().split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    let size = match size.trim() {
        "*" => None,
        size => Some(size.parse().ok()?),
    };
    let end = last.checked_add(1)?;
    (first < end).then_some((first..end, size))
}

/// Seconds since 1970 of a date as HTTP servers write it: `Sun, 06 Nov 1994 08:49:37 GMT`.
fn http_date(text: &str) -> Option<u64> {
    const MONTHS: [&str; 12] = [
        "Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec",
    ];
    let (_, rest) = text.trim().split_once(", ")?;
    let parts: Vec<&str> = rest.split([' ', ':']).collect();
    let [day, month, year, hour, minute, second, "GMT"] = parts[..] else {
        return None;
    };
    let number =
        |text: &str, low: u64, high: u64| (text.parse().ok()).filter(|n| (low..=high).contains(n));
    let month = MONTHS.iter().position(|name| *name == month)? as u64 + 1;
    let (day, year) = (number(day, 1, 31)?, number(year, 1970, 9999)?);
    let (hour, minute) = (number(hour, 0, 23)?, number(minute, 0, 59)?);
    let second = number(second, 0, 60)?;
    // Years begin in March, so that the leap day is the last of its year.
    let (y, m) = if month > 2 {
        (year, month - 3)
    } else {
        (year - 1, month + 9)
    };
    let days = y * 365 + y / 4 - y / 100 + y / 400 + (m * 153 + 2) / 5 + day - 1;
    // Days from March of year 0 to 1970.
    let days = days.checked_sub(719_468)?;
    Some(((days * 24 + hour) * 60 + minute) * 60 + second)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASKED: Asked<'static> = Asked {
        name: "model.bin",
        size: 100,
        range: 10..50,
        partial: true,
        etag: Some("\"a\""),
    };

    fn partial(content_range: &str) -> Head {
        Head {
            status: 206,
            content_range: Some(content_range.into()),
            ..Head::default()
        }
    }

    #[test]
    fn parts_must_be_those_asked_for() {
        let promise = |text| partial(text).check(&ASKED).map(|p| p.range);
        assert_eq!(promise("bytes 10-49/100"), Ok(10..50));
        assert_eq!(promise("bytes 10-49/*"), Ok(10..50));
        assert_eq!(promise("bytes 10-20/100"), Ok(10..21));
        for lie in [
            "bytes 11-49/100",
            "bytes 0-49/100",
            "bytes 10-50/100",
            "bytes 10-9/100",
            "10-49/100",
            "bytes 10-49",
            "bytes */100",
            "bytes 10-18446744073709551615/100",
            "",
        ] {
            assert!(
                matches!(promise(lie), Err(Fault::WrongRange { .. })),
                "{lie}"
            );
        }
        let length = Fault::WrongLength {
            expected: 100,
            found: 101,
        };
        assert_eq!(promise("bytes 10-49/101"), Err(length));
        let length = Head {
            content_length: Some(41),
            ..partial("bytes 10-49/100")
        };
        let fault = length.check(&ASKED);
        assert_eq!(
            fault,
            Err(Fault::WrongLength {
                expected: 40,
                found: 41
            })
        );
    }

    #[test]
    fn whole_files_must_have_the_size() {
        let ok = |content_length| Head {
            status: 200,
            content_length,
            ..Head::default()
        };
        let whole = Asked {
            partial: false,
            ..ASKED
        };
        assert_eq!(ok(Some(100)).check(&ASKED), Err(Fault::NoRanges));
        assert_eq!(
            ok(Some(100)).check(&whole),
            Ok(Promise {
                range: 0..100,
                counted: true
            })
        );
        assert_eq!(
            ok(None).check(&whole),
            Ok(Promise {
                range: 0..100,
                counted: false
            })
        );
        let fault = ok(Some(99)).check(&whole);
        assert_eq!(
            fault,
            Err(Fault::WrongLength {
                expected: 100,
                found: 99
            })
        );
    }

    type Change = fn(&mut Head);

    #[test]
    fn pages_encodings_and_changes_are_told() {
        let good = partial("bytes 10-49/100");
        let with = |change: Change| {
            let mut head = good.clone();
            change(&mut head);
            head.check(&ASKED).map_err(|fault| fault.to_string())
        };
        assert!(with(|h| h.etag = Some("\"a\"".into())).is_ok());
        assert!(with(|h| h.etag = Some("W/\"b\"".into())).is_ok());
        assert!(with(|h| h.content_encoding = Some("identity".into())).is_ok());
        let cases: [(Change, &str); 3] = [
            (
                |h| h.etag = Some("\"b\"".into()),
                "its ETag was \"a\", now it is \"b\"",
            ),
            (
                |h| h.content_encoding = Some("gzip".into()),
                "found the encoding `gzip`",
            ),
            (
                |h| h.content_type = Some("text/HTML; charset=utf-8".into()),
                "expected data, found `text/HTML",
            ),
        ];
        for (change, message) in cases {
            let error = with(change).unwrap_err();
            assert!(error.contains(message), "{error}");
        }
        let page = Asked {
            name: "index.html",
            ..ASKED
        };
        let head = Head {
            content_type: Some("text/html".into()),
            ..good
        };
        assert!(head.check(&page).is_ok());
    }

    #[test]
    fn servers_may_ask_to_wait_in_seconds_or_until_a_date() {
        let busy = |retry_after: &str, date: Option<&str>| Head {
            status: 503,
            retry_after: Some(retry_after.into()),
            date: date.map(Into::into),
            ..Head::default()
        };
        let wait = |head: Head| match head.check(&ASKED) {
            Err(Fault::Busy {
                status: 503,
                retry_after,
            }) => retry_after.map(|d| d.as_secs()),
            other => panic!("{other:?}"),
        };
        let now = "Sun, 06 Nov 1994 08:49:37 GMT";
        assert_eq!(wait(busy("7", None)), Some(7));
        assert_eq!(
            wait(busy("Sun, 06 Nov 1994 08:51:00 GMT", Some(now))),
            Some(83)
        );
        assert_eq!(
            wait(busy("Sat, 05 Nov 1994 08:51:00 GMT", Some(now))),
            Some(0)
        );
        assert_eq!(wait(busy("Tue, 29 Feb 2028 23:59:60 GMT", None)), None);
        assert_eq!(wait(busy("soon", Some(now))), None);
        assert_eq!(http_date(now), Some(784_111_777));
        assert_eq!(http_date("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(
            http_date("Tue, 29 Feb 2028 12:00:00 GMT"),
            Some(1_835_438_400)
        );
        for status in [400, 401, 403, 404, 410, 416, 304] {
            let head = Head {
                status,
                ..Head::default()
            };
            assert_eq!(head.check(&ASKED), Err(Fault::Refused { status }));
        }
    }
}
