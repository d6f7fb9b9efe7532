//! Checkpoints of Hugging Face as models: safetensors with a configuration.

use sterna_format::safetensors::{self, Index, SafeTensors, SafeTensorsError};

use super::companions::{self, Companions, read_one};
use super::{Header, ModelFiles, OpenOptions, WeightFile};
use crate::error::{Context, Result, bail};
use crate::want::Files;

/// The file that says where the tensors of a sharded checkpoint are.
pub const CHECKPOINT_INDEX: &str = "model.safetensors.index.json";
/// The file that holds all tensors of a checkpoint.
pub const CHECKPOINT_FILE: &str = "model.safetensors";

/// Opens the checkpoint in a folder.
pub(super) async fn open_folder(options: OpenOptions, files: &Files) -> Result<ModelFiles> {
    // Where there are both, the single file wins, as in Transformers.
    if files.len(CHECKPOINT_FILE).await.is_some() {
        return open_files(vec![CHECKPOINT_FILE.to_owned()], None, options, files).await;
    }
    match read_index(&options, files).await? {
        Some(index) => open_shards(index, options, files).await,
        None => bail!(
            NotFound,
            "{}: expected {CHECKPOINT_FILE} or {CHECKPOINT_INDEX}, found neither",
            options.name
        ),
    }
}

/// Opens the safetensors file called `name`; for a shard that an index next to it lists, the whole set.
pub(super) async fn open_file(
    name: &str,
    options: OpenOptions,
    files: &Files,
) -> Result<ModelFiles> {
    if name != CHECKPOINT_FILE
        && let Some(index) = read_index(&options, files).await?
        && index.files().contains(&name)
    {
        return open_shards(index, options, files).await;
    }
    open_files(vec![name.to_owned()], None, options, files).await
}

async fn read_index(options: &OpenOptions, files: &Files) -> Result<Option<Index>> {
    let Some(bytes) = read_one(CHECKPOINT_INDEX, options, files).await? else {
        return Ok(None);
    };
    let index = Index::parse(&bytes);
    index
        .map(Some)
        .with_context(|| options.label(CHECKPOINT_INDEX))
}

async fn open_shards(index: Index, options: OpenOptions, files: &Files) -> Result<ModelFiles> {
    let names = index.files().into_iter().map(str::to_owned).collect();
    open_files(names, Some(&index), options, files).await
}

async fn open_files(
    names: Vec<String>,
    index: Option<&Index>,
    options: OpenOptions,
    files: &Files,
) -> Result<ModelFiles> {
    let (mut parts, mut opened) = (Vec::new(), Vec::new());
    for name in &names {
        let label = options.label(name);
        let Some(len) = files.len(name).await else {
            bail!(NotFound, "{label}: cannot open: no such file");
        };
        let part = header(name, len, files).await.with_context(|| &*label)?;
        parts.push(part);
        let name = name.clone();
        opened.push(WeightFile { name, label, len });
    }
    let metadata = parts
        .first()
        .map(|part| part.metadata().clone())
        .unwrap_or_default();
    let named = names.iter().map(String::as_str).zip(parts).collect();
    let tensors = safetensors::merge(named, index).with_context(|| options.name.clone())?;
    let companions = Companions::read(companions::NAMES, &options, files).await;
    Ok(ModelFiles {
        options,
        files: opened,
        assembled: Vec::new(),
        tensors,
        companions,
        header: Header::SafeTensors { metadata },
    })
}

/// The header of the safetensors file called `name`.
pub(super) async fn header(
    name: &str,
    len: u64,
    files: &Files,
) -> Result<SafeTensors, SafeTensorsError> {
    let needs_more = |error: &SafeTensorsError| match error {
        SafeTensorsError::NeedMore { at_least } => Some(*at_least),
        _ => None,
    };
    files
        .header(name, len, SafeTensors::parse, needs_more)
        .await
}
