//! Files of models on this machine: on disk, in a store, in memory, or still arriving.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use sterna_delivery::package::MAX_FILE_BYTES;
use sterna_delivery::pull::IncomingPackage;
use sterna_delivery::{LocalFile, LocalFileError, store};

use crate::error::{Context, Result, bail};
use crate::model::label;
use crate::warning::Warning;

/// Named files that belong together: a folder, whatever it is kept in.
pub trait FileSet: Send + Sync {
    /// The file called `name`, if there is one. One that is still arriving isn't waited for.
    ///
    /// Errors: it is there and can't be opened.
    fn file(&self, name: &str) -> Result<Option<SourceFile>>;

    /// What messages put before the names of files: the folder, or nothing.
    fn prefix(&self) -> String;

    /// What messages call the file `name`.
    fn label(&self, name: &str) -> String {
        label(&self.prefix(), name)
    }

    /// The folder, if it is one on disk.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// Whether a package's bytes were verified on their way here.
    fn is_verified(&self) -> bool {
        false
    }

    /// What was odd about that.
    fn warnings(&self) -> Vec<Warning> {
        Vec::new()
    }

    /// Waits until everything that is still arriving is here to stay.
    ///
    /// Errors: it can't be had.
    fn settle(&self) -> Result<()> {
        Ok(())
    }
}

/// One file.
#[derive(Clone)]
pub struct SourceFile {
    label: String,
    content: Content,
}

#[derive(Clone)]
enum Content {
    Local(LocalFile),
    Memory(Bytes),
    Arriving { len: u64, open: Arc<OpenArrived> },
}

/// Waits for a file, and opens it.
type OpenArrived = dyn Fn() -> Result<LocalFile> + Send + Sync;

impl SourceFile {
    /// A file on disk, which messages call `label`.
    pub fn local(label: impl Into<String>, file: LocalFile) -> SourceFile {
        SourceFile {
            label: label.into(),
            content: Content::Local(file),
        }
    }

    /// The file at `path`.
    ///
    /// Errors: it can't be opened.
    pub fn open(path: impl Into<PathBuf>) -> Result<SourceFile> {
        let file = LocalFile::open(path)?;
        Ok(SourceFile::local(file.path().display().to_string(), file))
    }

    /// A file in memory.
    pub fn memory(label: impl Into<String>, bytes: Bytes) -> SourceFile {
        SourceFile {
            label: label.into(),
            content: Content::Memory(bytes),
        }
    }

    /// A file of `len` bytes that is being fetched: `open` waits for it.
    pub fn arriving(
        label: impl Into<String>,
        len: u64,
        open: impl Fn() -> Result<LocalFile> + Send + Sync + 'static,
    ) -> SourceFile {
        SourceFile {
            label: label.into(),
            content: Content::Arriving {
                len,
                open: Arc::new(open),
            },
        }
    }

    /// The same file with its bytes in memory of this process.
    ///
    /// Errors: it can't be read.
    pub fn read(&self) -> Result<SourceFile> {
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
        let content = match &self.content {
            Content::Local(file) => Content::Local(read(file)?),
            Content::Arriving { open, .. } => Content::Local(read(&open()?)?),
            Content::Memory(bytes) => Content::Memory(bytes.clone()),
        };
        Ok(SourceFile {
            label: self.label.clone(),
            content,
        })
    }

    /// Where it is, if it is a file on this machine.
    pub fn path(&self) -> Option<&Path> {
        match &self.content {
            Content::Local(file) => Some(file.path()),
            Content::Memory(_) | Content::Arriving { .. } => None,
        }
    }

    /// Bytes in the file.
    pub fn len(&self) -> u64 {
        match &self.content {
            Content::Local(file) => file.len(),
            Content::Memory(bytes) => bytes.len() as u64,
            Content::Arriving { len, .. } => *len,
        }
    }

    /// True if there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All bytes. A file that is being fetched is waited for.
    ///
    /// Errors: it can't be had.
    pub fn bytes(&self) -> Result<Bytes> {
        Ok(match &self.content {
            Content::Local(file) => file.prefix(u64::MAX),
            Content::Memory(bytes) => bytes.clone(),
            Content::Arriving { open, .. } => open()?.prefix(u64::MAX),
        })
    }

    /// A copy of all bytes as they are now: what is verified and then parsed can't change in between.
    ///
    /// Errors: there are more than [`MAX_FILE_BYTES`], or they can't be had.
    pub fn read_small(&self) -> Result<Bytes> {
        if self.len() > MAX_FILE_BYTES {
            bail!(
                InvalidFile,
                "{self}: expected at most {MAX_FILE_BYTES} bytes, found {}",
                self.len()
            );
        }
        Ok(Bytes::copy_from_slice(&self.bytes()?))
    }

    /// Takes the pages of `len` bytes from `offset` on out of memory, if it is mapped; they are read again when they are
    /// used.
    pub(super) fn release(&self, offset: u64, len: u64) {
        if let Some(file) = self.mapped() {
            let end = offset.saturating_add(len);
            file.release(offset as usize..end.min(file.len()) as usize);
        }
    }

    /// The file, if it is on disk.
    pub(super) fn mapped(&self) -> Option<&LocalFile> {
        match &self.content {
            Content::Local(file) => Some(file),
            Content::Memory(_) | Content::Arriving { .. } => None,
        }
    }

    /// As [`slice`](Self::slice), copied out of a mapped file.
    pub(super) fn copy(&self, offset: u64, len: u64) -> Result<Bytes> {
        match &self.content {
            Content::Local(file) => Ok(file.copy(offset, len)?),
            Content::Arriving { open, .. } => Ok(open()?.copy(offset, len)?),
            Content::Memory(_) => self.slice(offset, len),
        }
    }

    /// `len` bytes from `offset` on.
    ///
    /// Errors: the file hasn't so many, or can't be had.
    pub fn slice(&self, offset: u64, len: u64) -> Result<Bytes> {
        match &self.content {
            Content::Local(file) => Ok(file.slice(offset, len)?),
            Content::Arriving { open, .. } => Ok(open()?.slice(offset, len)?),
            Content::Memory(bytes) => {
                let end = offset
                    .checked_add(len)
                    .filter(|&end| end <= bytes.len() as u64);
                let end = end.with_context(|| {
                    format!(
                        "{self}: wanted {len} bytes at offset {offset}, but the file has {}",
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
        f.write_str(&self.label)
    }
}

impl fmt::Debug for SourceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SourceFile({}, {} bytes)", self.label, self.len())
    }
}

/// A folder on disk.
#[derive(Debug, Clone)]
pub struct LocalFolder(PathBuf);

impl LocalFolder {
    /// The folder at `path`.
    pub fn new(path: impl Into<PathBuf>) -> LocalFolder {
        LocalFolder(path.into())
    }
}

impl FileSet for LocalFolder {
    fn file(&self, name: &str) -> Result<Option<SourceFile>> {
        let path = self.0.join(name);
        match path.exists() {
            true => SourceFile::open(path).map(Some),
            false => Ok(None),
        }
    }

    fn prefix(&self) -> String {
        self.0.display().to_string()
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.0)
    }
}

/// The files of a model in a store, which were verified on their way there.
pub struct StoredFiles(Arc<store::Model>);

impl StoredFiles {
    /// Those of `model`.
    pub fn new(model: Arc<store::Model>) -> StoredFiles {
        StoredFiles(model)
    }
}

impl FileSet for StoredFiles {
    fn file(&self, name: &str) -> Result<Option<SourceFile>> {
        let Some(path) = self.0.paths().get(name) else {
            return Ok(None);
        };
        let file = LocalFile::open(path)?;
        Ok(Some(SourceFile::local(name, file)))
    }

    fn prefix(&self) -> String {
        self.0.name().to_owned()
    }

    fn is_verified(&self) -> bool {
        true
    }

    fn warnings(&self) -> Vec<Warning> {
        let labelled = self.0.entry().labelled.iter().cloned();
        labelled
            .map(|file| Warning::LabelledSha256 { file })
            .collect()
    }
}

/// The files of a model that is being fetched: each can be had once it has been verified.
pub struct IncomingFiles(Arc<IncomingPackage>);

impl IncomingFiles {
    /// Those of `package`.
    pub fn new(package: Arc<IncomingPackage>) -> IncomingFiles {
        IncomingFiles(package)
    }
}

impl FileSet for IncomingFiles {
    fn file(&self, name: &str) -> Result<Option<SourceFile>> {
        let len = self.0.files()?.get(name).copied();
        let (package, called) = (Arc::clone(&self.0), name.to_owned());
        let open = move || Ok(LocalFile::open(package.path(&called)?)?);
        Ok(len.map(|len| SourceFile::arriving(name, len, open)))
    }

    fn prefix(&self) -> String {
        String::new()
    }

    fn is_verified(&self) -> bool {
        true
    }

    fn settle(&self) -> Result<()> {
        Ok(self.0.finish()?)
    }
}

/// Files in memory.
#[derive(Debug, Clone, Default)]
pub struct MemoryFiles {
    /// What messages put before the names.
    pub prefix: String,
    /// Names and contents.
    pub files: std::collections::BTreeMap<String, Bytes>,
}

impl FileSet for MemoryFiles {
    fn file(&self, name: &str) -> Result<Option<SourceFile>> {
        let bytes = self.files.get(name).cloned();
        Ok(bytes.map(|bytes| SourceFile::memory(self.label(name), bytes)))
    }

    fn prefix(&self) -> String {
        self.prefix.clone()
    }
}

/// The file called `name` of `files`.
///
/// Errors: there is none.
pub fn expect_file(files: &dyn FileSet, name: &str) -> Result<SourceFile> {
    match files.file(name)? {
        Some(file) => Ok(file),
        None => bail!(
            NotFound,
            "{}: expected the file `{name}`, found none",
            files.prefix()
        ),
    }
}
