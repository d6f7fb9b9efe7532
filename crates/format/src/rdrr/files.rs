//! Names of files in a package's folder: plain ones, on every system.

/// The name of the file that makes a folder a package.
pub const MANIFEST_FILE: &str = "manifest.json";
/// The usual name of the external tensor map.
pub const TENSORS_FILE: &str = "tensors.json";

/// The longest name that all file systems take, in bytes.
const MAX_LEN: usize = 255;

/// Names that Windows gives to devices, whatever ending follows them.
const DEVICES: [&str; 7] = ["con", "prn", "aux", "nul", "conin$", "conout$", "clock$"];

/// The usual name of the shard with this index.
pub fn shard_file_name(index: usize) -> String {
    format!("shard_{index:05}.bin")
}

/// Whether `name` names a file in the folder itself, on every system: no path, no drive, no
/// device, no hidden file, nothing that a system would read as another name.
pub fn is_plain_file_name(name: &str) -> bool {
    let stem = name.split('.').next().unwrap_or_default();
    let stem = stem.trim_end().to_ascii_lowercase();
    let numbered = |port| {
        let digit = stem.strip_prefix(port);
        digit.is_some_and(|d| {
            matches!(d, "¹" | "²" | "³") || (d.len() == 1 && d.as_bytes()[0].is_ascii_digit())
        })
    };
    !name.is_empty()
        && name.len() <= MAX_LEN
        && !name.starts_with(['.', ' '])
        && !name.ends_with(['.', ' '])
        && !name.contains(|c: char| c.is_control() || r#"/\:*?"<>|%"#.contains(c))
        && !name.contains(is_invisible)
        && !DEVICES.contains(&stem.as_str())
        && !numbered("com")
        && !numbered("lpt")
}

/// Marks that make a name read otherwise than it is written.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

/// What two names have in common that some file system takes for one.
pub(super) fn folded(name: &str) -> String {
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
        assert_eq!(shard_file_name(12), "shard_00012.bin");
        assert_eq!(shard_file_name(123_456), "shard_123456.bin");
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
