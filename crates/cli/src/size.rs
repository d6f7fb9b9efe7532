//! Sizes as people write them.

use std::num::NonZero;

/// Parses a number of bytes, with an optional suffix K, M or G (powers of 1024) or a longer name of these.
pub(crate) fn n_bytes(text: &str) -> Result<NonZero<u64>, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let factor = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => Some(1),
        "k" | "kib" => Some(1 << 10),
        "m" | "mib" => Some(1 << 20),
        "g" | "gib" => Some(1_u64 << 30),
        _ => None,
    };
    digits
        .parse::<u64>()
        .ok()
        .zip(factor)
        .and_then(|(n, factor)| n.checked_mul(factor))
        .and_then(NonZero::new)
        .ok_or_else(|| "expected a number of bytes, such as 4096 or 20MiB".to_owned())
}
