//! The files of a bundle besides weights: configuration, tokenizer, template.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

use sterna::ADAPTER_CONFIG;
use sterna::native::LocalModel;

use crate::staging::write_file;

/// What is taken along of a model, where it is there.
const TAKEN: [&str; 14] = [
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "merges.txt",
    "sentencepiece.bpe.model",
    "special_tokens_map.json",
    "spiece.model",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
];

/// Whether a file called `name` is one that is copied here.
pub(super) fn is_taken(name: &str) -> bool {
    TAKEN.contains(&name) || name == ADAPTER_CONFIG
}

/// Copies what belongs to the model in `files` to `dir`.
pub(super) fn copy_model(files: &LocalModel, dir: &Path) -> Result<()> {
    for name in TAKEN {
        if let Some(bytes) = files.read_beside(name)? {
            write_file(&dir.join(name), &bytes)?;
        }
    }
    Ok(())
}

/// Copies what belongs to the adapter in `folder` to `dir`.
pub(super) fn copy_adapter(folder: &Path, dir: &Path) -> Result<()> {
    for name in TAKEN.iter().copied().chain([ADAPTER_CONFIG]) {
        let path = folder.join(name);
        if path.is_file() {
            let bytes = fs::read(&path).with_context(|| path.display().to_string())?;
            write_file(&dir.join(name), &bytes)?;
        }
    }
    Ok(())
}
