//! Packages in folders of this machine: written under a temporary name, resumed after an interruption.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use bytes::Bytes;
use sterna::native::LocalModel;
use sterna::{Context, Result};
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_delivery::{remove_temporaries, sync_folder};
use sterna_format::rdrr::{MANIFEST_FILE, TENSORS_FILE, shard_file_name};
use sterna_kernels::Exec;

use super::journal::Journal;
use super::sink::PackageSink;
use super::{PackageOptions, Packed, Packing, check_shard_size};
use crate::event::{self, Notify};
use crate::staging::{Staging, partial, write_file};

/// A summary of a conversion to a package.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct PackageSummary {
    /// The folder.
    pub package: PathBuf,
    /// Its name.
    pub model_id: String,
    /// Tensors in it.
    pub n_tensors: usize,
    /// Shards of it.
    pub n_shards: usize,
    /// Bytes of all shards.
    pub total_size: u64,
    /// Shards reused from an interrupted conversion.
    pub n_resumed: usize,
}

/// Writes the model in `files` to the package `out`, which must not exist.
///
/// The same model and options give the same bytes, on any number of threads. An interrupted conversion
/// resumes when it is started again.
/// Errors: a model that can't be read or run here, a package whose hashes don't match, or a package that
/// can't be written.
pub fn to_package(
    files: &LocalModel,
    out: &Path,
    options: &PackageOptions,
    exec: Arc<Exec>,
    notify: &Notify<'_>,
) -> Result<PackageSummary> {
    check_shard_size(options.shard_size)?;
    // Wrong bytes must not get right hashes.
    event::verify(files, options.n_verify_threads, notify)?;
    let mut staging = None;
    let mut packing = Packing::new(files, options, exec, notify, || {
        let dir = &staging.insert(begin_package(out)?).path;
        let journal = Journal::open(dir, &key(files, options)?)?;
        Ok(Folder::new(dir, journal))
    })?;
    while let Some(want) = packing.wanted() {
        let bytes = files.bytes_of(want)?;
        packing.feed(bytes)?;
    }
    let Packed {
        model_id,
        n_tensors,
        n_shards,
        total_size,
        n_resumed,
        sink,
    } = packing.finish()?;
    drop(sink);
    finish_package(staging.context("the folder was begun")?, out)?;
    files.settle()?;
    Ok(PackageSummary {
        package: out.to_owned(),
        model_id,
        n_tensors,
        n_shards,
        total_size,
        n_resumed,
    })
}

/// The folder of a package that is being written, and its journal.
pub(super) struct Folder {
    dir: PathBuf,
    journal: Journal,
    /// The shard that is written.
    file: Option<File>,
    /// The shard that is read back.
    reading: Option<(usize, File)>,
}

impl Folder {
    pub(super) fn new(dir: &Path, journal: Journal) -> Folder {
        Folder {
            dir: dir.to_owned(),
            journal,
            file: None,
            reading: None,
        }
    }

    fn shard(&self, index: usize) -> PathBuf {
        self.dir.join(shard_file_name(index))
    }
}

impl PackageSink for Folder {
    fn append(&mut self, index: usize, bytes: Bytes) -> Result<()> {
        let path = self.shard(index);
        let file = match &mut self.file {
            Some(file) => file,
            none => {
                let file = File::create(&path);
                none.insert(file.with_context(|| path.display().to_string())?)
            }
        };
        file.write_all(&bytes)
            .with_context(|| format!("{}: cannot write", path.display()))
    }

    /// On disk first, then in the journal.
    fn end_shard(&mut self, index: usize, len: u64) -> Result<()> {
        if let Some(file) = self.file.take() {
            let path = self.shard(index);
            file.sync_all()
                .with_context(|| format!("{}: cannot write", path.display()))?;
        }
        self.journal.note(index, len)
    }

    fn put(&mut self, name: &str, bytes: Bytes) -> Result<()> {
        write_file(&self.dir.join(name), &bytes)
    }

    fn n_finished(&self) -> usize {
        self.journal.n_finished()
    }

    fn read_back(&mut self, index: usize, range: Range<u64>) -> Result<Bytes> {
        let path = self.shard(index);
        let name = || path.display().to_string();
        let file = match &mut self.reading {
            Some((of, file)) if *of == index => file,
            other => {
                let file = File::open(&path).with_context(name)?;
                &mut other.insert((index, file)).1
            }
        };
        file.seek(SeekFrom::Start(range.start)).with_context(name)?;
        let mut bytes = vec![0; (range.end - range.start) as usize];
        file.read_exact(&mut bytes)
            .with_context(|| format!("{}: shorter than it was", name()))?;
        Ok(bytes.into())
    }
}

/// Begins to write the folder of a package, which has a journal.
pub(super) fn begin_package(out: &Path) -> Result<Staging> {
    let staging = Staging::begin(out);
    if staging.is_err()
        && out.exists()
        && let Some(partial) = partial(out).filter(|partial| !partial.exists())
    {
        // Left if the conversion was interrupted at the very end; no longer needed.
        let _ = Journal::remove(&partial);
    }
    let staging = staging?;
    let what = || staging.path.display().to_string();
    fs::create_dir_all(&staging.path).with_context(what)?;
    // Of a conversion that was killed while it wrote the manifest, say.
    remove_temporaries(&staging.path, Duration::ZERO).with_context(what)?;
    Ok(staging)
}

/// Gives a package its name.
pub(super) fn finish_package(staging: Staging, out: &Path) -> Result<()> {
    let dir = staging.path.clone();
    // Names of files in the package first, then its own.
    sync_folder(&dir).with_context(|| dir.display().to_string())?;
    staging.finish(out)?;
    Journal::remove(&dir)
}

/// What must be the same for a conversion to resume with another's shards.
fn key(files: &LocalModel, options: &PackageOptions) -> Result<String> {
    let mut key = format!(
        "sterna {}; {:?}; {:?}; shards of {}; {}",
        env!("CARGO_PKG_VERSION"),
        options.plan,
        options.targets,
        options.shard_size,
        options.algorithm,
    );
    for name in [MANIFEST_FILE, TENSORS_FILE, "config.json"] {
        if let Some(bytes) = files.read_beside(name)? {
            key += &format!("; {name} {}", digest_of(Algorithm::Blake3, &bytes));
        }
    }
    for file in files.sources() {
        key += &format!("; {file} of {} bytes", file.len());
        if let Some(path) = file.path() {
            let modified = fs::metadata(path).and_then(|metadata| metadata.modified());
            let modified = modified.with_context(|| file.to_string())?;
            let since = modified.duration_since(UNIX_EPOCH).unwrap_or_default();
            key += &format!(" changed {}", since.as_nanos());
        }
    }
    Ok(key)
}
