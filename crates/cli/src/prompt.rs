//! What every verb that makes prompts does alike.

use std::time::{SystemTime, UNIX_EPOCH};

use sterna_text::DateTime;

/// Why a prompt without text is refused where there is a chat template.
pub(crate) const EMPTY_PROMPT: &str = "the prompt is empty: expected text";

/// The time for templates that ask for it: UTC, so that this machine's time zone isn't disclosed.
pub(crate) fn now() -> DateTime {
    let since_1970 = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    DateTime::from_unix(since_1970.as_secs().try_into().unwrap_or(i64::MAX), 0)
}
