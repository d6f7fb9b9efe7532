//! The files of a bundle besides weights: configuration, tokenizer, template.

use std::path::Path;

use sterna::native::{LocalFolder, LocalModel, read_small};
use sterna::{ADAPTER_CONFIG, Result};

use crate::staging::write_file;

/// What is copied from a model, if it exists.
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
        if let Some(bytes) = read_small(&LocalFolder::new(folder), name)? {
            write_file(&dir.join(name), &bytes)?;
        }
    }
    Ok(())
}
