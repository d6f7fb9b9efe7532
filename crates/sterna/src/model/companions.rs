//! The files next to a model's weights: configuration, tokenizer, chat template.

use std::collections::BTreeMap;

use bytes::Bytes;

use super::{MAX_FILE_BYTES, OpenOptions};
use crate::error::{Result, bail};
use crate::want::Files;

/// The vocabulary that RWKV's models for all languages share.
pub const RWKV_VOCAB: &str = "rwkv_vocab_v20230424.txt";

/// What says how vectors of texts are made of hidden states (Sentence Transformers).
pub(super) const POOLING: &str = "1_Pooling/config.json";

/// Names that such files have in any folder.
pub(super) const NAMES: [&str; 11] = [
    "config.json",
    POOLING,
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    RWKV_VOCAB,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
];

/// The small files of a model by name.
#[derive(Debug, Default)]
pub(super) struct Companions(BTreeMap<String, Companion>);

#[derive(Debug)]
struct Companion {
    label: String,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Bytes(Bytes),
    /// Its size in bytes; it wasn't read.
    TooLarge(u64),
}

impl Companions {
    /// Those of `names` that exist.
    pub(super) async fn read(
        names: impl IntoIterator<Item = &str>,
        options: &OpenOptions,
        files: &Files,
    ) -> Companions {
        let mut found = BTreeMap::new();
        for name in names {
            let Some(len) = files.len(name).await else {
                continue;
            };
            let content = match len {
                0 => Content::Bytes(Bytes::new()),
                len if len > MAX_FILE_BYTES => Content::TooLarge(len),
                len => Content::Bytes(files.bytes(name, 0..len).await),
            };
            let label = options.label(name);
            found.insert(name.to_owned(), Companion { label, content });
        }
        Companions(found)
    }

    /// The file called `name`, if there is one. Errors: it is too large.
    pub(super) fn get(&self, name: &str) -> Result<Option<Bytes>> {
        match self.0.get(name).map(|found| (&found.label, &found.content)) {
            None => Ok(None),
            Some((_, Content::Bytes(bytes))) => Ok(Some(bytes.clone())),
            Some((label, Content::TooLarge(len))) => bail!(
                InvalidFile,
                "{label}: expected at most {MAX_FILE_BYTES} bytes, found {len}"
            ),
        }
    }
}

/// The small file called `name`, if there is one. Errors: it is too large.
pub(super) async fn read_one(
    name: &str,
    options: &OpenOptions,
    files: &Files,
) -> Result<Option<Bytes>> {
    Companions::read([name], options, files).await.get(name)
}
