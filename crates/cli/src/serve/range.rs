//! The Range header (RFC 9110, section 14).

use std::ops::Range;

/// The part of a file that a request is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Wanted {
    /// All of it, because no range is requested, or none that this server supports.
    Whole,
    /// These bytes, of which there is at least one.
    Part(Range<u64>),
    /// Bytes beyond its end.
    Unsatisfiable,
}

/// Interprets the `Range` header with this value for a file with `size` bytes.
///
/// A server may ignore the header. That is done for several ranges at once, for units other than bytes, and
/// for invalid ranges.
pub(super) fn parse(value: &str, size: u64) -> Wanted {
    let Some((unit, range)) = value.split_once('=') else {
        return Wanted::Whole;
    };
    let Some((first, last)) = range.trim().split_once('-') else {
        return Wanted::Whole;
    };
    if !unit.trim().eq_ignore_ascii_case("bytes") {
        return Wanted::Whole;
    }
    let range = match (first.is_empty(), number(first), number(last)) {
        // A suffix range.
        (true, _, Some(n)) => size.saturating_sub(n)..size,
        (false, Some(first), None) if last.is_empty() => first..size,
        (false, Some(first), Some(last)) if first <= last => {
            first..last.saturating_add(1).min(size)
        }
        _ => return Wanted::Whole,
    };
    if range.is_empty() {
        Wanted::Unsatisfiable
    } else {
        Wanted::Part(range)
    }
}

/// A number of digits only. One too large for any file is treated as the largest.
fn number(digits: &str) -> Option<u64> {
    let all_digits = !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit());
    all_digits.then(|| digits.parse().unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_ranges_are_understood() {
        for (value, wanted) in [
            ("bytes=0-0", Wanted::Part(0..1)),
            ("bytes=2-5", Wanted::Part(2..6)),
            ("Bytes = 2-5", Wanted::Part(2..6)),
            ("bytes=7-", Wanted::Part(7..10)),
            ("bytes=7-99999999999999999999999999", Wanted::Part(7..10)),
            ("bytes=-3", Wanted::Part(7..10)),
            ("bytes=-30", Wanted::Part(0..10)),
            ("bytes=10-", Wanted::Unsatisfiable),
            ("bytes=99999999999999999999999999-", Wanted::Unsatisfiable),
            (
                "bytes=18446744073709551615-18446744073709551615",
                Wanted::Unsatisfiable,
            ),
            ("bytes=-0", Wanted::Unsatisfiable),
        ] {
            assert_eq!(parse(value, 10), wanted, "{value}");
        }
        assert_eq!(parse("bytes=0-", 0), Wanted::Unsatisfiable);
        assert_eq!(parse("bytes=-1", 0), Wanted::Unsatisfiable);
    }

    #[test]
    fn whatever_else_is_ignored() {
        for value in [
            "",
            "bytes",
            "bytes=",
            "bytes=-",
            "bytes=5-2",
            "bytes=a-b",
            "bytes=+1-2",
            "bytes=0-1,3-4",
            "items=0-1",
            "bytes=1 - 2",
            "bytes=--1",
        ] {
            assert_eq!(parse(value, 10), Wanted::Whole, "{value}");
        }
    }
}
