//! What a model is called after where it lies.

use std::fs;
use std::path::Path;

/// What a model is called after: the last part of its name, without an extension.
///
/// A folder has its own name however it was reached (`.`, `models/../llama`, a link), so that the same
/// model gives the same bytes. Links to files aren't followed: where caches keep files by their hash,
/// the link has the name.
pub fn stem(name: &str) -> String {
    let given = Path::new(name.trim_end_matches(['/', '\\']));
    let folder = (Path::new(name).is_dir())
        .then(|| fs::canonicalize(name).ok())
        .flatten();
    let path = folder.as_deref().unwrap_or(given);
    let stem = match path.extension() {
        Some(extension) if extension.eq_ignore_ascii_case("gguf") || extension == "safetensors" => {
            path.file_stem()
        }
        _ => path.file_name(),
    };
    stem.map_or_else(
        || "model".to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_has_its_own_name_and_a_file_the_given_one() {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("Llama-3.2-1B");
        fs::create_dir_all(model.join("sub")).unwrap();
        for typed in ["", "/", "//", "/.", "/sub/.."] {
            let typed = format!("{}{typed}", model.display());
            assert_eq!(stem(&typed), "Llama-3.2-1B", "{typed}");
        }
        for (name, called) in [
            ("no/such/llama.gguf", "llama"),
            ("https://example.org/llama/", "llama"),
            ("llama.GGUF", "llama"),
            ("llama", "llama"),
            ("/", "model"),
        ] {
            assert_eq!(stem(name), called, "{name}");
        }
        #[cfg(unix)]
        {
            std::os::unix::fs::symlink(&model, dir.path().join("latest")).unwrap();
            assert_eq!(
                stem(dir.path().join("latest").to_str().unwrap()),
                "Llama-3.2-1B"
            );
            let (blob, link) = (dir.path().join("0a1b2c"), dir.path().join("tiny.gguf"));
            fs::write(&blob, "").unwrap();
            std::os::unix::fs::symlink(&blob, &link).unwrap();
            assert_eq!(stem(link.to_str().unwrap()), "tiny");
        }
    }
}
