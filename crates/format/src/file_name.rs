//! Names of files in a model's folder: plain ones, on every system.

/// The longest name that all file systems take, in bytes.
const MAX_LEN: usize = 255;

/// Names that Windows gives to devices, whatever ending follows them.
const DEVICES: [&str; 7] = ["con", "prn", "aux", "nul", "conin$", "conout$", "clock$"];

/// Whether `name` names a file in the folder itself, on every system: no path, no drive, no
/// device, no hidden file, nothing that a system would read as another name.
pub fn is_plain_file_name(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default().trim_end();
    !name.is_empty()
        && name.len() <= MAX_LEN
        && !name.starts_with(['.', ' '])
        && !name.ends_with(['.', ' '])
        && !name.contains(|c: char| c.is_control() || is_reserved(c) || is_invisible(c))
        && !is_device(stem)
}

/// Characters that mean something to some system, in paths, patterns or addresses.
fn is_reserved(c: char) -> bool {
    matches!(
        c,
        '/' | '\\' | ':' | '*' | '?' | '"' | '<' | '>' | '|' | '%'
    )
}

/// Whether Windows takes a name that begins with this, up to its first dot, for a device.
fn is_device(stem: &str) -> bool {
    let is_numbered = |port: &str| {
        let (start, digit) = (stem.get(..port.len()), stem.get(port.len()..));
        start.is_some_and(|start| start.eq_ignore_ascii_case(port))
            && digit.is_some_and(|d| {
                matches!(d, "¹" | "²" | "³") || (d.len() == 1 && d.as_bytes()[0].is_ascii_digit())
            })
    };
    (DEVICES.iter()).any(|device| stem.eq_ignore_ascii_case(device))
        || is_numbered("com")
        || is_numbered("lpt")
}

/// Marks that make a name read otherwise than it is written.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// What two names have in common that some file system takes for one.
pub(crate) fn folded(name: &str) -> String {
    name.to_lowercase()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names() {
        for name in [
            "shard_00000.bin",
            "lora_weights.rdrr",
            "tokenizer.json",
            "a",
            "Shard 1.bin",
            "console.bin",
            "com10.bin",
            "größe.bin",
        ] {
            assert!(is_plain_file_name(name), "{name}");
        }
    }

    #[test]
    fn names_that_reach_elsewhere() {
        for name in [
            "",
            ".",
            "..",
            ".hidden",
            "../shard.bin",
            "a/b",
            "/etc/passwd",
            r"a\b",
            "C:shard.bin",
            "shard.bin:stream",
            "con",
            "NUL.bin",
            "nul .bin",
            "com1",
            "LPT9.txt",
            "com¹",
            "a\0b",
            "a\nb",
            "shard.bin.",
            "shard.bin ",
            "what?",
            "%2e%2e",
            "http://example.org",
            "a\u{202e}b",
            &"x".repeat(256),
        ] {
            assert!(!is_plain_file_name(name), "{name:?}");
        }
    }
}
