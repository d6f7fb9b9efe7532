//! Writing results: text for people, JSON for programs.
//!
//! Names and messages come from untrusted files, so control characters, which terminals interpret, are
//! written as escapes. Generated text is exact unless it goes to a terminal.

use std::borrow::Cow;
use std::fmt;
use std::io::{self, IsTerminal, Write};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result};
use serde::Serialize;

/// A failure to write to standard output.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output")]
pub(crate) struct StdoutError(#[source] pub(crate) io::Error);

/// Writes `text` to stdout and flushes, so that a reader sees each token when it is made.
pub(crate) fn write_now(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let text = if out.is_terminal() {
        escaped(text, &['\n', '\r', '\t'])
    } else {
        Cow::Borrowed(text)
    };
    out.write_all(text.as_bytes())
        .and_then(|()| out.flush())
        .map_err(StdoutError)?;
    Ok(())
}

/// Writes `text` and a line end to stdout.
pub(crate) fn line(text: impl fmt::Display) -> Result<()> {
    let text = text.to_string();
    writeln!(io::stdout().lock(), "{}", escaped(&text, &['\n'])).map_err(StdoutError)?;
    Ok(())
}

/// Writes `value` to stdout as one line of JSON.
pub(crate) fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).context("cannot write the result as JSON")?;
    line(json_escaped(&text))
}

/// `text` with its control characters as escapes such as `\u{1b}`, except those in `kept`.
fn escaped<'a>(text: &'a str, kept: &[char]) -> Cow<'a, str> {
    let is_escaped = |c: char| c.is_control() && !kept.contains(&c);
    if !text.contains(is_escaped) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_escaped(c) {
            out.extend(c.escape_debug());
        } else {
            out.push(c);
        }
    }
    Cow::Owned(out)
}

/// JSON whose strings hold no control characters: those that the format allows unescaped, U+007F to
/// U+009F, are escaped too.
fn json_escaped(json: &str) -> String {
    let mut out = String::with_capacity(json.len());
    for c in json.chars() {
        if c.is_control() {
            out += &format!("\\u{:04x}", u32::from(c));
        } else {
            out.push(c);
        }
    }
    out
}

/// Lines of `name  value`, with aligned values.
///
/// A line break within one is escaped, so that no value can pass for a row.
pub(crate) fn table(rows: &[(&str, String)]) -> String {
    let rows: Vec<_> = rows
        .iter()
        .map(|(name, value)| (escaped(name, &[]), escaped(value, &[])))
        .collect();
    let width = rows
        .iter()
        .map(|row| row.0.chars().count())
        .max()
        .unwrap_or(0);
    let lines: Vec<_> = rows
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}"))
        .collect();
    lines.join("\n")
}

/// Lines with aligned columns.
#[cfg(feature = "gpu")]
pub(crate) fn columns<const N: usize>(header: &[String; N], rows: &[[String; N]]) -> String {
    let all = || std::iter::once(header).chain(rows);
    let width = |i: usize| all().map(|row| row[i].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in all() {
        let cells = row
            .iter()
            .zip(widths)
            .map(|(cell, width)| format!("{cell:width$}  "));
        text += cells.collect::<String>().trim_end();
        text.push('\n');
    }
    text
}

/// Set by `--quiet`.
static QUIET: AtomicBool = AtomicBool::new(false);

/// From here on, notes, progress and timings are not shown.
pub(crate) fn be_quiet() {
    QUIET.store(true, Ordering::Relaxed);
}

/// Whether notes, progress and timings are not shown.
pub(crate) fn is_quiet() -> bool {
    QUIET.load(Ordering::Relaxed)
}

/// Writes a line to stderr, unless it is to be quiet: what is good to know, and nothing has to be done about.
pub(crate) fn note(text: impl fmt::Display) {
    if !is_quiet() {
        reply(text);
    }
}

/// Writes a warning to stderr.
pub(crate) fn warning(text: impl fmt::Display) {
    reply(format_args!("warning: {text}"));
}

/// Writes a warning or a note to stderr.
pub(crate) fn remark(is_warning: bool, text: impl fmt::Display) {
    match is_warning {
        true => warning(text),
        false => note(format_args!("note: {text}")),
    }
}

/// Writes an error to stderr.
pub(crate) fn error(text: impl fmt::Display) {
    reply(format_args!("error: {text}"));
}

/// Writes a line to stderr in any case, such as the answer to a command. It is no result, so failing to print
/// it is no error.
pub(crate) fn reply(text: impl fmt::Display) {
    let text = text.to_string();
    let text = shortened(&escaped(&text, &['\n'])).into_owned();
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// Longest message in bytes. Names in files may be of any length.
const MAX_MESSAGE: usize = 4096;

/// `text`, its middle left out if it is longer than a message may be.
pub(crate) fn shortened(text: &str) -> Cow<'_, str> {
    if text.len() <= MAX_MESSAGE {
        return Cow::Borrowed(text);
    }
    // The place comes first, expected and found last.
    let head = &text[..text.floor_char_boundary(MAX_MESSAGE / 2)];
    let tail = &text[text.ceil_char_boundary(text.len() - MAX_MESSAGE / 4)..];
    let n_left_out = text.len() - head.len() - tail.len();
    Cow::Owned(format!("{head}… ({n_left_out} bytes left out) …{tail}"))
}

/// True if the root cause of `error` is a closed stdout: the reader has seen enough (`| head`). Any other
/// broken pipe is a failure.
pub(crate) fn is_closed_stdout(error: &anyhow::Error) -> bool {
    error
        .downcast_ref::<StdoutError>()
        .is_some_and(|StdoutError(e)| e.kind() == io::ErrorKind::BrokenPipe)
}

/// A number of bytes, in the largest binary unit that leaves at least one: `1.5 MiB`.
pub(crate) struct Bytes(pub(crate) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
        let mut size = self.0 as f64;
        let mut unit = 0;
        while size >= 1024.0 && unit + 1 < UNITS.len() {
            size /= 1024.0;
            unit += 1;
        }
        let text = match unit {
            0 => format!("{} B", self.0),
            _ => format!("{size:.1} {}", UNITS[unit]),
        };
        f.pad(&text)
    }
}

/// `n` of something, in words.
pub(crate) fn counted(n: usize, what: &str) -> String {
    match n {
        1 => format!("1 {what}"),
        n => format!("{n} {what}s"),
    }
}

/// A count in thousands, millions or billions, as model sizes are given: `6.7 M`.
pub(crate) struct Count(pub(crate) u64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.0 {
            n @ 0..1_000 => format!("{n}"),
            n @ 1_000..1_000_000 => format!("{:.1} k", n as f64 / 1e3),
            n @ 1_000_000..1_000_000_000 => format!("{:.1} M", n as f64 / 1e6),
            n => format!("{:.2} B", n as f64 / 1e9),
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_read_well() {
        for (bytes, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.0 KiB"),
            (2_498_192, "2.4 MiB"),
            (u64::MAX, "16777216.0 TiB"),
        ] {
            assert_eq!(Bytes(bytes).to_string(), text);
        }
        for (count, text) in [
            (999, "999"),
            (260_032, "260.0 k"),
            (6_733_824, "6.7 M"),
            (2_400_000_000, "2.40 B"),
        ] {
            assert_eq!(Count(count).to_string(), text);
        }
    }

    #[test]
    fn control_characters_are_escaped() {
        let hostile = "a\u{1b}[2Jb\u{9b}c\r\nd";
        assert_eq!(escaped(hostile, &['\n']), "a\\u{1b}[2Jb\\u{9b}c\\r\nd");
        assert!(matches!(escaped("für", &[]), Cow::Borrowed("für")));
        assert_eq!(table(&[("x\ny", "\u{7}".into())]), "x\\ny  \\u{7}");
        let text = json_escaped(&serde_json::to_string(hostile).unwrap());
        assert!(!text.contains(char::is_control), "{text}");
        assert_eq!(serde_json::from_str::<String>(&text).unwrap(), hostile);
    }

    #[test]
    fn long_messages_lose_their_middle() {
        let long = format!("place: {}: found x", "ü".repeat(1 << 20));
        let short = shortened(&long);
        assert!(short.len() < MAX_MESSAGE, "{}", short.len());
        assert!(short.starts_with("place: ü") && short.ends_with("ü: found x"));
        assert!(short.contains("… (20"), "{short}");
        assert!(matches!(shortened("place"), Cow::Borrowed("place")));
    }

    #[test]
    fn a_closed_stdout_is_told_from_other_errors() {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let closed = anyhow::Error::from(StdoutError(broken())).context("writing");
        assert!(is_closed_stdout(&closed));
        let full = StdoutError(io::Error::from(io::ErrorKind::StorageFull));
        assert!(!is_closed_stdout(&full.into()));
        assert!(!is_closed_stdout(&broken().into()));
    }
}
