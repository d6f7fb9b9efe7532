//! The model inside this library; see `models/tiny-tales/README.md` for what it is.

use std::sync::Arc;

use bytes::Bytes;

use super::{Located, MemoryFiles};
use crate::model::ModelEntry;

/// What the built-in model is called.
pub const BUILTIN: &str = "builtin";

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        [$(($name, include_bytes!(concat!("../../models/tiny-tales/", $name)).as_slice())),*]
    };
}

static FILES: [(&str, &[u8]); 5] = files![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// The built-in model.
pub fn builtin() -> Located {
    let files = FILES.map(|(name, bytes)| (name.to_owned(), Bytes::from_static(bytes)));
    Located {
        files: Arc::new(MemoryFiles {
            prefix: BUILTIN.to_owned(),
            files: files.into(),
        }),
        entry: ModelEntry::Folder,
    }
}
