//! The files of a bundle besides weights: configuration, tokenizer, template.

use std::fs::{self, File};
use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};

use crate::model::{ADAPTER_CONFIG, ModelFiles};

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
pub(super) fn copy_model(files: &ModelFiles, dir: &Path) -> Result<()> {
    for name in TAKEN {
        if let Some(bytes) = files.beside(name)? {
            write(&dir.join(name), &bytes)?;
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
            write(&dir.join(name), &bytes)?;
        }
    }
    Ok(())
}

/// Writes a file to the disk.
pub(super) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    let write = || -> std::io::Result<()> {
        let mut file = File::create(path)?;
        file.write_all(bytes)?;
        file.sync_all()
    };
    write().with_context(|| format!("{}: cannot write", path.display()))
}
