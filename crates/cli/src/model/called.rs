//! What models are called, and whether two names may mean one.

use std::fs;
use std::path::Path;

use crate::output;

/// What a model is called after: the last part of its name, without an extension.
///
/// A folder has its own name however it was reached (`.`, `models/../llama`, a link), so that the same
/// model gives the same bytes. Links to files aren't followed: where caches keep files by their hash,
/// the link has the name.
pub(crate) fn stem(name: &str) -> String {
    let given = Path::new(name.trim_end_matches(['/', '\\']));
    let folder = (Path::new(name).is_dir())
        .then(|| fs::canonicalize(name).ok())
        .flatten();
    let path = folder.as_deref().unwrap_or(given);
    let stem = match path.extension() {
        Some(extension) if extension == "gguf" || extension == "safetensors" => path.file_stem(),
        _ => path.file_name(),
    };
    stem.map_or_else(
        || "model".to_owned(),
        |stem| stem.to_string_lossy().into_owned(),
    )
}

/// Says so if the adapter in `folder`, made for the model `base`, is for one that isn't called by any of
/// `names`.
pub(crate) fn warn_of_other_base(folder: &Path, base: &str, names: &[String]) {
    if !is_called(base, names) {
        output::note(format_args!(
            "warning: {}: it was made for `{base}`; this model is called `{}`",
            folder.display(),
            names.join("`, `")
        ));
    }
}

/// Whether one of a model's `names` may mean the model that an adapter calls `base`: the same words, or
/// some more behind them, such as a variant or a type, after the owner or folder before a slash.
fn is_called(base: &str, names: &[String]) -> bool {
    let words = |name: &str| -> Vec<String> {
        let name = name.trim_end_matches(['/', '\\']).to_ascii_lowercase();
        let name = name.rsplit(['/', '\\']).next().unwrap_or_default();
        let name = name.strip_suffix(".gguf").unwrap_or(name);
        let words = name.split(|c: char| !c.is_alphanumeric());
        words
            .filter(|word| !word.is_empty())
            .map(str::to_owned)
            .collect()
    };
    let base = words(base);
    names.iter().map(|name| words(name)).any(|name| {
        !name.is_empty() && !base.is_empty() && (name.starts_with(&base) || base.starts_with(&name))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_model_has_many_names() {
        let names = |names: &[&str]| names.iter().map(|n| n.to_string()).collect::<Vec<_>>();
        for (base, called) in [
            (
                "meta-llama/Llama-3.2-1B",
                &["Llama-3.2-1B-wq4_k_m-embf16"][..],
            ),
            (
                "meta-llama/Llama-3.2-1B",
                &["models/llama-3.2-1b.Q4_K_M.gguf"],
            ),
            ("./llama/", &["other", "/home/me/llama"]),
            ("Qwen2.5_7B-Instruct", &["Qwen2.5 7B"]),
        ] {
            assert!(is_called(base, &names(called)), "{base} {called:?}");
        }
        for (base, called) in [
            (
                "meta-llama/Llama-3.2-1B",
                &["Llama-3.2-3B", "llama-3.1-1b"][..],
            ),
            ("meta-llama/Llama-3.2-1B", &["meta-llama"]),
            ("a", &[]),
            ("llama", &["/", ""]),
        ] {
            assert!(!is_called(base, &names(called)), "{base} {called:?}");
        }
    }

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
