//! Whether two names may refer to one model.

/// Whether one of a model's `names` may refer to the model that an adapter calls `base`: the same words,
/// possibly followed by more, such as a variant or a type, after the owner or folder before a slash.
pub fn may_be_called(base: &str, names: &[String]) -> bool {
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
            assert!(may_be_called(base, &names(called)), "{base} {called:?}");
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
            assert!(!may_be_called(base, &names(called)), "{base} {called:?}");
        }
    }
}
