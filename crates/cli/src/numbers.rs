//! Numbers on the command line, refused by what they may be.

use std::num::NonZero;
use std::str::FromStr;

/// Parses a whole number.
pub(crate) fn whole(text: &str) -> Result<usize, String> {
    parse(text, &format!("a whole number from 0 to {}", usize::MAX))
}

/// Parses a whole number above 0.
pub(crate) fn positive(text: &str) -> Result<NonZero<usize>, String> {
    parse(text, &format!("a whole number from 1 to {}", usize::MAX))
}

/// Parses a seed.
pub(crate) fn seed(text: &str) -> Result<u64, String> {
    let range = format!("a whole number from 0 to {}", u64::MAX);
    parse(
        text,
        &format!("{range}; without a seed, a random one is taken"),
    )
}

/// Parses a maximum number of tokens.
pub(crate) fn max_tokens(text: &str) -> Result<usize, String> {
    let range = format!("a whole number from 0 to {}", usize::MAX);
    parse(
        text,
        &format!("{range}; without a maximum, the answer is as long as fits"),
    )
}

/// Parses a number.
pub(crate) fn number(text: &str) -> Result<f32, String> {
    parse(text, "a number")
}

fn parse<T: FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("expected {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_refused_by_what_they_may_be() {
        assert_eq!((whole("0"), number("-1.5")), (Ok(0), Ok(-1.5)));
        assert_eq!(seed("18446744073709551615"), Ok(u64::MAX));
        assert!(positive("0").unwrap_err().contains("from 1 to"));
        for text in ["-1", "", "1.5", "x", "18446744073709551616"] {
            assert!(whole(text).is_err() && positive(text).is_err(), "{text}");
            assert!(
                max_tokens(text).unwrap_err().contains("from 0 to"),
                "{text}"
            );
            assert!(seed(text).unwrap_err().contains("from 0 to"), "{text}");
        }
        assert_eq!(number("x"), Err("expected a number".to_owned()));
    }
}
