//! What a path on this machine leads to: which files belong to the model there.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use sterna_delivery::store;
use sterna_format::bundle::{LORA_FILE, TENSORS_FILE as BUNDLE_FILE};
use sterna_format::gguf;
use sterna_format::rdrr::MANIFEST_FILE;

use super::files::{FileSet, LocalFolder, StoredFiles};
use crate::error::{Context, Error, ErrorCode, Result, bail};
use crate::model::{
    ADAPTER_CONFIG, CHECKPOINT_FILE as SINGLE, CHECKPOINT_INDEX as INDEX, ModelEntry,
};

/// A model's files, and what it is opened by.
#[derive(Clone)]
pub struct Located {
    /// The files.
    pub files: Arc<dyn FileSet>,
    /// The first of them.
    pub entry: ModelEntry,
}

impl Located {
    /// The model that lies at `path`: a file, or a folder.
    ///
    /// Errors: there is none, or several.
    pub fn at(path: &Path) -> Result<Located> {
        if path.is_dir() {
            return in_folder(path);
        }
        // The parent of a bare file name is the empty path, which joins like the current folder.
        let folder = path.parent().unwrap_or(Path::new(""));
        // A name that isn't Unicode isn't one of ours; what is wrong with it, opening the file says.
        let name = path.file_name().and_then(|name| name.to_str());
        let Some(name) = name.filter(|_| path.exists()) else {
            sterna_delivery::LocalFile::open(path)?;
            bail!(NotFound, "{}: expected a name in Unicode", path.display());
        };
        Ok(Located {
            files: Arc::new(LocalFolder::new(folder)),
            entry: ModelEntry::File(name.to_owned()),
        })
    }

    /// The model in a store.
    ///
    /// Errors: its files are of no kind that is known.
    pub fn stored(model: store::Model) -> Result<Located> {
        let has = |name: &str| model.paths().contains_key(name);
        let entry = if [MANIFEST_FILE, SINGLE, INDEX].into_iter().any(has) {
            // A manifest counts before all else: what the store has was fetched by it.
            match has(MANIFEST_FILE) {
                true => ModelEntry::File(MANIFEST_FILE.to_owned()),
                false => ModelEntry::Folder,
            }
        } else {
            let begins =
                |name: &&String| name.ends_with(".gguf") && gguf::split_names(name).is_ok();
            match model.paths().keys().find(begins) {
                Some(first) => ModelEntry::File(first.clone()),
                None => bail!(
                    NotFound,
                    "{}: expected {MANIFEST_FILE}, {SINGLE}, {INDEX} or a .gguf file, found none of them",
                    model.name()
                ),
            }
        };
        Ok(Located {
            files: Arc::new(StoredFiles::new(Arc::new(model))),
            entry,
        })
    }
}

fn in_folder(folder: &Path) -> Result<Located> {
    let has = |name: &str| folder.join(name).exists();
    if [SINGLE, INDEX, MANIFEST_FILE, BUNDLE_FILE]
        .into_iter()
        .any(has)
    {
        return Ok(Located {
            files: Arc::new(LocalFolder::new(folder)),
            entry: ModelEntry::Folder,
        });
    }
    if [ADAPTER_CONFIG, LORA_FILE].into_iter().any(has) {
        bail!(
            InvalidRequest,
            "{0}: expected a model, found a LoRA adapter; use it with its base model: --lora {0}",
            folder.display()
        );
    }
    let list = || -> std::io::Result<Vec<PathBuf>> {
        fs::read_dir(folder)?
            .map(|entry| Ok(entry?.path()))
            .collect()
    };
    let mut files = list()
        .map_err(|error| Error::typed(ErrorCode::Io, error))
        .with_context(|| format!("{}: cannot list", folder.display()))?;
    files.sort();
    let (files, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|path| {
        path.extension()
            .is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"))
    });
    if files.is_empty() {
        bail!(
            NotFound,
            "{}: expected {SINGLE}, {INDEX}, {MANIFEST_FILE}, {BUNDLE_FILE} or a .gguf file in the \
             folder, found {}",
            folder.display(),
            describe(&others)
        );
    }
    // Later parts of a split set are found through the first.
    let (firsts, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|path| {
        path.to_str()
            .is_none_or(|path| gguf::split_names(path).is_ok())
    });
    match &firsts[..] {
        [path] => Located::at(path),
        [] => bail!(
            NotFound,
            "{}: expected the first part of a split GGUF set, found only {}",
            folder.display(),
            others[0].display()
        ),
        several => bail!(
            InvalidRequest,
            "{}: expected one GGUF model in the folder, found {}; give the path of one of them",
            folder.display(),
            names(several)
        ),
    }
}

/// What else is in a folder without a model of ours, and what to do about it.
fn describe(files: &[PathBuf]) -> String {
    let ending = |ending: &str| -> Vec<PathBuf> {
        let ends = |path: &&PathBuf| path.to_string_lossy().ends_with(ending);
        files.iter().filter(ends).cloned().collect()
    };
    let safetensors = ending(".safetensors");
    if !safetensors.is_empty() {
        return format!(
            "{}; give the path of one of them, or if it is in the layout of its makers \
             (consolidated.safetensors) fetch the one of Hugging Face Transformers",
            names(&safetensors)
        );
    }
    for pickle in [".bin", ".pth", ".pt"] {
        let pickles = ending(pickle);
        if !pickles.is_empty() {
            return format!(
                "{}; PyTorch's own files can run code when they are read: fetch the model's safetensors \
                 files instead, or save it as such (save_pretrained)",
                names(&pickles)
            );
        }
    }
    "none of them".to_owned()
}

/// The names of `files`, a few of them if there are many.
fn names(files: &[PathBuf]) -> String {
    const SHOWN: usize = 6;
    let names: Vec<_> = (files.iter().take(SHOWN))
        .map(|path| path.file_name().unwrap_or_default().to_string_lossy())
        .collect();
    match files.len() - names.len() {
        0 => names.join(", "),
        more => format!("{} and {more} more", names.join(", ")),
    }
}
