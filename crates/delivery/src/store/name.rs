//! Names that are portable between file systems.

use super::StoreError;

/// Maximum characters of a model name: leaves room for prefixes and suffixes in file names.
const MAX_MODEL_NAME: usize = 128;
/// Maximum characters of the path of a file within a model.
const MAX_FILE_NAME: usize = 512;

/// Names of devices on Windows, with any extension.
const DEVICES: [&str; 4] = ["con", "prn", "aux", "nul"];

/// Checks the name of a model: 1 to 128 letters, digits, `.`, `_` and `-` of ASCII.
pub(super) fn check_model(name: &str) -> Result<(), StoreError> {
    let problem = if name.len() > MAX_MODEL_NAME {
        Some("expected at most 128 characters")
    } else {
        component_problem(name)
    };
    refuse("model", name, problem)
}

/// Checks the path of a file within a model: such names, with `/` between them. It never becomes a path in
/// the store; but code that writes the files of a model elsewhere may rely on it.
pub(super) fn check_file(name: &str) -> Result<(), StoreError> {
    let problem = if name.len() > MAX_FILE_NAME {
        Some("expected at most 512 characters")
    } else {
        name.split('/').find_map(component_problem)
    };
    refuse("file", name, problem)
}

/// `text` as the name of a model: what names can't have becomes `-`, such as the colon before a port, and the
/// rest of a long one is left out.
pub fn portable_name(text: &str) -> String {
    let allow = |c: char| if is_allowed(c) { c } else { '-' };
    let name: String = text.chars().take(MAX_MODEL_NAME - 1).map(allow).collect();
    let name = name.trim_end_matches('.');
    match component_problem(name) {
        None => name.to_owned(),
        // That of its beginning, a device's or none.
        Some(_) => format!("_{name}"),
    }
}

/// The normalised form of a name, equal for names that differ only in case.
pub(super) fn key(name: &str) -> String {
    name.to_ascii_lowercase()
}

/// True if `text` is the [`key`] of a model's name.
pub(super) fn is_key(text: &str) -> bool {
    check_model(text).is_ok() && key(text) == text
}

fn refuse(kind: &'static str, name: &str, problem: Option<&'static str>) -> Result<(), StoreError> {
    problem.map_or(Ok(()), |problem| {
        Err(StoreError::Name {
            kind,
            name: name.chars().take(MAX_FILE_NAME).collect(),
            problem,
        })
    })
}

fn component_problem(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        Some("expected at least one character")
    } else if !name.chars().all(is_allowed) {
        Some("expected letters, digits, '.', '_' and '-' of ASCII")
    } else if !name.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_') {
        Some("expected a letter, a digit or '_' at the start")
    } else if name.ends_with('.') {
        Some("expected no '.' at the end")
    } else if is_device(name) {
        Some("is the name of a device on Windows")
    } else {
        None
    }
}

pub(crate) fn is_allowed(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')
}

fn is_device(name: &str) -> bool {
    let stem = key(name.split('.').next().unwrap_or(name));
    let numbered = (stem.strip_prefix("com").or(stem.strip_prefix("lpt")))
        .is_some_and(|n| n.len() == 1 && n.starts_with(|c: char| c.is_ascii_digit()));
    numbered || DEVICES.contains(&stem.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_mean_the_same_everywhere_or_are_refused() {
        for name in [
            "a",
            "gemma-2-2b-it-q4",
            "Llama_3.2",
            "7b",
            "com10",
            "console",
            "_x",
        ] {
            assert!(check_model(name).is_ok(), "{name}");
        }
        let long = "x".repeat(129);
        for name in [
            "",
            ".",
            "..",
            ".hidden",
            "-flag",
            "a/b",
            "a\\b",
            "a:b",
            "a b",
            "trailing.",
            "nul",
            "CON",
            "com1",
            "LPT9.txt",
            "aux.json",
            "ä",
            "a\0",
            "a\n",
            &long,
        ] {
            assert!(check_model(name).is_err(), "{name:?}");
            assert!(check_model(&portable_name(name)).is_ok(), "{name:?}");
        }
        for (text, name) in [
            ("model (1)", "model--1-"),
            ("Llama_3.2", "Llama_3.2"),
            (".hidden", "_.hidden"),
            ("...", "_"),
            ("nul", "_nul"),
        ] {
            assert_eq!(portable_name(text), name);
        }
    }

    #[test]
    fn file_names_stay_inside_their_folder() {
        for name in [
            "manifest.json",
            "shard_00000.bin",
            "onnx/model.json",
            "a/b/c",
        ] {
            assert!(check_file(name).is_ok(), "{name}");
        }
        for name in [
            "/etc/passwd",
            "../x",
            "a/../b",
            "a//b",
            "a/",
            "a/nul.bin",
            "C:x",
            "a\\..\\b",
        ] {
            assert!(check_file(name).is_err(), "{name:?}");
        }
    }
}
