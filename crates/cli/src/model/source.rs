//! The files a MODEL argument stands for, before anything is known about what they hold.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use bytes::Bytes;
use sterna_delivery::fetch::Limits;
use sterna_delivery::pull::IncomingPackage;
use sterna_delivery::store::{self, StoreError};
use sterna_delivery::{LocalFile, LocalFileError};
use sterna_format::bundle::{LORA_FILE, TENSORS_FILE as BUNDLE_FILE};
use sterna_format::gguf;
use sterna_format::rdrr::MANIFEST_FILE;

use super::ADAPTER_CONFIG;
use crate::{builtin, output, pull};

/// The file that says where the tensors of a sharded checkpoint are.
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// The file that holds all tensors of a checkpoint.
pub(super) const SINGLE: &str = "model.safetensors";

/// One file: from disk, or part of this program.
#[derive(Debug, Clone)]
pub(crate) enum SourceFile {
    Local(LocalFile),
    /// A file of a model in the store, where files have other names.
    Stored {
        name: String,
        file: LocalFile,
    },
    /// A file of `size` bytes that is being fetched.
    Arriving {
        name: String,
        size: u64,
        arrival: Arc<IncomingPackage>,
    },
    Builtin {
        name: &'static str,
        bytes: Bytes,
    },
}

impl SourceFile {
    fn open(path: impl Into<PathBuf>) -> Result<SourceFile> {
        Ok(SourceFile::Local(LocalFile::open(path)?))
    }

    /// The same file with its bytes in memory of this process.
    pub(super) fn read(&self) -> Result<SourceFile> {
        self.read_by(LocalFile::read)
    }

    /// The same, on this thread alone; `look` is shown all bytes, in order, while they are read.
    pub(super) fn read_past(&self, look: impl FnMut(&[u8])) -> Result<SourceFile> {
        self.read_by(|file| file.read_past(look))
    }

    fn read_by(
        &self,
        read: impl FnOnce(&LocalFile) -> Result<LocalFile, LocalFileError>,
    ) -> Result<SourceFile> {
        Ok(match self {
            SourceFile::Local(file) => SourceFile::Local(read(file)?),
            SourceFile::Stored { name, file } => SourceFile::Stored {
                name: name.clone(),
                file: read(file)?,
            },
            SourceFile::Arriving { name, arrival, .. } => SourceFile::Stored {
                name: name.clone(),
                file: read(&LocalFile::open(
                    arrival.path(name).map_err(pull::with_advice)?,
                )?)?,
            },
            SourceFile::Builtin { .. } => self.clone(),
        })
    }

    /// Where it is, if it is a file on this machine.
    pub(crate) fn path(&self) -> Option<&Path> {
        match self {
            SourceFile::Local(file) | SourceFile::Stored { file, .. } => Some(file.path()),
            SourceFile::Arriving { .. } | SourceFile::Builtin { .. } => None,
        }
    }

    /// The file's name in its folder, by which an index calls it.
    pub(super) fn file_name(&self) -> String {
        match self {
            SourceFile::Local(file) => file
                .path()
                .file_name()
                .map(|name| name.to_string_lossy().into_owned())
                .unwrap_or_default(),
            SourceFile::Stored { name, .. } | SourceFile::Arriving { name, .. } => name.clone(),
            SourceFile::Builtin { name, .. } => (*name).to_owned(),
        }
    }

    /// Bytes in the file.
    pub(crate) fn len(&self) -> u64 {
        match self {
            SourceFile::Local(file) | SourceFile::Stored { file, .. } => file.len(),
            SourceFile::Arriving { size, .. } => *size,
            SourceFile::Builtin { bytes, .. } => bytes.len() as u64,
        }
    }

    /// The first `n` bytes, or all if there are fewer. A file that is being fetched is waited for.
    pub(crate) fn prefix(&self, n: u64) -> Result<Bytes> {
        Ok(match self {
            SourceFile::Local(file) | SourceFile::Stored { file, .. } => file.prefix(n),
            SourceFile::Arriving { name, arrival, .. } => {
                LocalFile::open(arrival.path(name).map_err(pull::with_advice)?)?.prefix(n)
            }
            SourceFile::Builtin { bytes, .. } => {
                bytes.slice(..usize::try_from(n).map_or(bytes.len(), |n| n.min(bytes.len())))
            }
        })
    }

    /// All bytes.
    pub(crate) fn bytes(&self) -> Result<Bytes> {
        self.prefix(u64::MAX)
    }

    /// `len` bytes from `offset` on.
    pub(crate) fn slice(&self, offset: u64, len: u64) -> Result<Bytes> {
        match self {
            SourceFile::Local(file) | SourceFile::Stored { file, .. } => {
                Ok(file.slice(offset, len)?)
            }
            SourceFile::Arriving { name, arrival, .. } => Ok(LocalFile::open(
                arrival.path(name).map_err(pull::with_advice)?,
            )?
            .slice(offset, len)?),
            SourceFile::Builtin { name, bytes } => {
                let end = offset
                    .checked_add(len)
                    .filter(|&end| end <= bytes.len() as u64);
                let end = end.with_context(|| {
                    format!(
                        "{name}: wanted {len} bytes at offset {offset}, but the file has {}",
                        bytes.len()
                    )
                })?;
                Ok(bytes.slice(offset as usize..end as usize))
            }
        }
    }
}

impl fmt::Display for SourceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SourceFile::Local(file) => file.path().display().fmt(f),
            SourceFile::Stored { name, .. } | SourceFile::Arriving { name, .. } => {
                f.write_str(name)
            }
            SourceFile::Builtin { name, .. } => write!(f, "{}/{name}", builtin::NAME),
        }
    }
}

/// Where the JSON files beside the weights are.
#[derive(Debug, Clone)]
pub(crate) enum Folder {
    Local(PathBuf),
    /// A model in the store, whose files were verified on their way there.
    Stored(Arc<store::Model>),
    /// A package on its way into the store.
    Arriving(Arc<IncomingPackage>),
    Builtin,
}

impl Folder {
    /// The file called `name`, if there is one.
    pub(crate) fn file(&self, name: &str) -> Result<Option<SourceFile>> {
        match self {
            Folder::Local(folder) => {
                let path = folder.join(name);
                if path.exists() {
                    SourceFile::open(path).map(Some)
                } else {
                    Ok(None)
                }
            }
            Folder::Stored(model) => match model.paths().get(name) {
                Some(path) => Ok(Some(SourceFile::Stored {
                    name: name.to_owned(),
                    file: LocalFile::open(path)?,
                })),
                None => Ok(None),
            },
            Folder::Arriving(arrival) => {
                let size = arrival
                    .files()
                    .map_err(pull::with_advice)?
                    .get(name)
                    .copied();
                Ok(size.map(|size| SourceFile::Arriving {
                    name: name.to_owned(),
                    size,
                    arrival: Arc::clone(arrival),
                }))
            }
            Folder::Builtin => {
                Ok(builtin::file(name).map(|(name, bytes)| SourceFile::Builtin { name, bytes }))
            }
        }
    }

    /// What messages call the file `name`.
    pub(crate) fn path_of(&self, name: &str) -> String {
        match self {
            Folder::Local(folder) => folder.join(name).display().to_string(),
            Folder::Stored(model) => format!("{}/{name}", model.name()),
            Folder::Arriving(_) => name.to_owned(),
            Folder::Builtin => format!("{}/{name}", builtin::NAME),
        }
    }

    /// The weight file called `name`, which an index lists.
    pub(crate) fn shard(&self, name: &str) -> Result<SourceFile> {
        match self {
            Folder::Local(folder) => SourceFile::open(folder.join(name)),
            Folder::Stored(model) => self.file(name)?.with_context(|| {
                format!("{}: expected the file `{name}`, found none", model.name())
            }),
            Folder::Arriving(_) => self
                .file(name)?
                .with_context(|| format!("expected the file `{name}`, found none")),
            Folder::Builtin => bail!("{}: expected no shards, found `{name}`", builtin::NAME),
        }
    }
}

/// What a MODEL argument turns out to be.
#[derive(Debug)]
pub(super) enum Found {
    /// A GGUF file, or all parts of a split one.
    Gguf(Vec<SourceFile>),
    /// A folder with safetensors files.
    Folder(Folder),
    /// A folder with a manifest.
    Package(Folder),
    /// A folder with the weight file of an engine.
    Bundle(Folder),
    /// One safetensors file, and the folder it is in.
    SafeTensors { file: SourceFile, folder: Folder },
}

/// Finds what `model` names.
pub(super) fn find(model: &str) -> Result<Found> {
    if model == builtin::NAME {
        return Ok(Found::Folder(Folder::Builtin));
    }
    if model.contains("://") {
        return fetched(model);
    }
    let path = Path::new(model);
    if path.is_dir() {
        return find_in_folder(path);
    }
    // A name of the store can't look like a path in a folder.
    if !path.exists() && !model.contains(['/', '\\']) {
        return find_in_store(in_store(model)?.with_context(|| unknown(model))?);
    }
    find_file(path)
}

/// The folder of a package: a path, or a name in the store.
pub(crate) fn package_folder(name: &str) -> Result<Folder> {
    let path = Path::new(name);
    if path.exists() {
        return Ok(Folder::Local(path.to_owned()));
    }
    let model = in_store(name)?.with_context(|| unknown(name))?;
    Ok(Folder::Stored(Arc::new(model)))
}

/// The model called `name` in the store, if there is one.
pub(super) fn in_store(name: &str) -> Result<Option<store::Model>> {
    let store = pull::store()?;
    match store.model(name) {
        Ok(model) => Ok(Some(model)),
        Err(StoreError::NoSuchModel { .. } | StoreError::Name { .. }) => Ok(None),
        Err(error @ StoreError::Damaged { .. }) => Err(error).with_context(|| {
            format!("{name}: damaged; `sterna pull {name}` fetches what is wrong again")
        }),
        Err(error) => Err(error.into()),
    }
}

/// What to say of a name that means nothing here: which names do.
fn unknown(name: &str) -> String {
    const SHOWN: usize = 5;
    let models = pull::store().and_then(|store| Ok(store.list()?));
    // What can't be listed can't be suggested; whoever asks for it is told why.
    let mut names: Vec<String> = models.map_or(Vec::new(), |models| {
        models.into_iter().map(|model| model.name).collect()
    });
    names.sort_by_cached_key(|known| (distance(name, known), known.clone()));
    let has = match names.len() {
        0 => "which is empty (`sterna pull SOURCE` fetches a model)".to_owned(),
        n if n > SHOWN => format!(
            "which has {} and {} more",
            names[..SHOWN].join(", "),
            n - SHOWN
        ),
        _ => format!("which has {}", names.join(", ")),
    };
    format!("{name}: no such file or folder, and no model of that name in the store, {has}")
}

/// Letters to be put in, taken out or exchanged to make `b` of `a`, whatever their case.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.to_lowercase(), b.to_lowercase());
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.iter().enumerate() {
            let exchanged = diagonal + usize::from(from != *to);
            diagonal = row[j + 1];
            row[j + 1] = exchanged.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[b.len()]
}

/// The model at an address, as it is there now: a package while it is fetched, others once they are in
/// the store. One that can't be reached is taken as it was last.
fn fetched(address: &str) -> Result<Found> {
    let store = pull::store()?;
    let known = store.list()?;
    let known = known
        .into_iter()
        .find(|model| model.entry.source == address);
    let name = known.as_ref().map(|model| model.name.as_str());
    let limits = Limits {
        seed: std::process::id().into(),
        // What is here already isn't waited for.
        retries: if known.is_some() {
            1
        } else {
            Limits::default().retries
        },
        ..Limits::default()
    };
    let arrival = pull::begin(store.clone(), address, name, limits)?;
    let failed = match arrival.files() {
        Ok(files) if files.contains_key(MANIFEST_FILE) => {
            return Ok(Found::Package(Folder::Arriving(arrival)));
        }
        Ok(_) => arrival.finish().err(),
        Err(error) => Some(error),
    };
    match (failed, name) {
        (None, _) => {}
        // That it can't be reached is no refusal.
        (Some(error), Some(name)) if error.is_unanswered() => {
            let error = anyhow::Error::from(error);
            output::note(format_args!(
                "warning: {error:#}; using `{name}` as it is in the store"
            ));
        }
        (Some(error), _) => return Err(pull::with_advice(error)),
    }
    let models = store.list()?;
    let model = models.iter().find(|model| model.entry.source == address);
    let model = model.with_context(|| format!("{address}: not in the store"))?;
    find_in_store(store.model(&model.name)?)
}

fn find_in_store(model: store::Model) -> Result<Found> {
    let folder = Folder::Stored(Arc::new(model));
    let Folder::Stored(model) = &folder else {
        unreachable!("made above");
    };
    let has = |name: &str| model.paths().contains_key(name);
    if has(MANIFEST_FILE) {
        return Ok(Found::Package(folder.clone()));
    }
    if has(SINGLE) || has(INDEX) {
        return Ok(Found::Folder(folder.clone()));
    }
    let first = model
        .paths()
        .keys()
        .find(|name| name.ends_with(".gguf") && gguf::split_names(name).is_ok());
    let Some(first) = first else {
        bail!(
            "{}: expected {MANIFEST_FILE}, {SINGLE}, {INDEX} or a .gguf file, found none of them",
            model.name()
        );
    };
    let names = gguf::split_names(first)?.unwrap_or_else(|| vec![first.clone()]);
    let files = names.iter().map(|name| folder.shard(name));
    Ok(Found::Gguf(files.collect::<Result<_>>()?))
}

fn find_file(path: &Path) -> Result<Found> {
    if path.file_name().is_some_and(|name| name == MANIFEST_FILE) {
        let folder = path.parent().unwrap_or(Path::new("")).to_owned();
        return Ok(Found::Package(Folder::Local(folder)));
    }
    let file = SourceFile::open(path)?;
    if &file.prefix(4)?[..] == b"GGUF" {
        return gguf_parts(path, file).map(Found::Gguf);
    }
    if path
        .extension()
        .is_some_and(|extension| extension == "safetensors")
    {
        // The parent of a bare file name is the empty path, which joins like the current folder.
        let folder = Folder::Local(path.parent().unwrap_or(Path::new("")).to_owned());
        return Ok(Found::SafeTensors { file, folder });
    }
    let start = file.prefix(4)?;
    bail!(
        "{file}: expected a GGUF file, which begins with `GGUF`, or a name that ends in .safetensors; \
         found {} bytes that begin with `{}`",
        file.len(),
        start.escape_ascii(),
    )
}

/// The parts of the split set that `first`, open as `file`, begins; or `file` alone.
fn gguf_parts(first: &Path, file: SourceFile) -> Result<Vec<SourceFile>> {
    // A name that isn't Unicode isn't one that the splitter makes.
    let names = match first.to_str() {
        Some(first) => gguf::split_names(first)?,
        None => None,
    };
    match names {
        Some(names) => names.into_iter().map(SourceFile::open).collect(),
        None => Ok(vec![file]),
    }
}

fn find_in_folder(folder: &Path) -> Result<Found> {
    if [SINGLE, INDEX]
        .iter()
        .any(|name| folder.join(name).exists())
    {
        return Ok(Found::Folder(Folder::Local(folder.to_owned())));
    }
    if folder.join(MANIFEST_FILE).exists() {
        return Ok(Found::Package(Folder::Local(folder.to_owned())));
    }
    if folder.join(BUNDLE_FILE).exists() {
        return Ok(Found::Bundle(Folder::Local(folder.to_owned())));
    }
    if [ADAPTER_CONFIG, LORA_FILE]
        .iter()
        .any(|name| folder.join(name).exists())
    {
        bail!(
            "{0}: expected a model, found a LoRA adapter; use it with its base model: --lora {0}",
            folder.display()
        );
    }
    let entries = folder
        .read_dir()
        .and_then(|entries| entries.collect::<Result<Vec<_>, _>>())
        .with_context(|| format!("{}: cannot list", folder.display()))?;
    let mut files: Vec<PathBuf> = entries.iter().map(|entry| entry.path()).collect();
    files.sort();
    let (files, others): (Vec<_>, Vec<_>) = files.into_iter().partition(|path| {
        path.extension()
            .is_some_and(|extension| extension == "gguf")
    });
    if files.is_empty() {
        bail!(
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
        [path] => find_file(path),
        [] => bail!(
            "{}: expected the first part of a split GGUF set, found only {}",
            folder.display(),
            others[0].display()
        ),
        several => bail!(
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_by_their_letters() {
        for (a, b, n) in [
            ("", "", 0),
            ("tiny", "Tiny", 0),
            ("tiny", "", 4),
            ("tiny", "tinny", 1),
            ("tiny", "tony-2", 3),
            ("ab", "ba", 2),
        ] {
            assert_eq!((distance(a, b), distance(b, a)), (n, n), "{a} {b}");
        }
    }
}
