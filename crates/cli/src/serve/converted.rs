//! Packages made of other models, kept in the store for the next time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use sterna::native::LocalModel;
use sterna_convert::{PackageOptions, to_package};
use sterna_delivery::pull::PullOptions;
use sterna_delivery::store::{self, Store, StoreError, portable_name};
use sterna_format::rdrr::MANIFEST_FILE;
use sterna_kernels::Exec;

use crate::args::isa;
use crate::conversion::notify;
use crate::pull::CONVERTED;
use crate::{folders, machine, model, output, pull};

/// Whether `path` is a model that isn't a package.
pub(super) fn is_convertible(path: &Path) -> bool {
    let is_manifest = path.file_name().is_some_and(|name| name == MANIFEST_FILE);
    path.exists() && !is_manifest && !path.join(MANIFEST_FILE).exists()
}

/// The package of the model at `path` in the store: as it was made before, if the files are as they were
/// then, or else made now.
pub(super) fn package_of(path: &Path) -> Result<store::Model> {
    let files = model::open(&path.to_string_lossy())?;
    let origin = format!("{CONVERTED}{}#", fs::canonicalize(path)?.display());
    let source = format!("{origin}{}", state(path, &files)?);
    let store = pull::store()?;
    if let Some(made) = made_before(&store, &source)? {
        return Ok(made);
    }
    let known = store.list()?;
    let default = portable_name(&format!("{}-rdrr", files.stem()));
    let is_ours = |source: &str| source.starts_with(&origin);
    let before = pull::of_source(&known, &default, is_ours);
    let is_taken = |model: &&store::Listed| model.name.eq_ignore_ascii_case(&default);
    if before.is_none()
        && let Some(other) = known.iter().find(is_taken)
    {
        bail!(
            "{}: the store has another model of that name, from {}; `sterna remove {0}` removes it",
            other.name,
            other.entry.source
        );
    }
    let exec = Arc::new(Exec::new(machine::default_threads(), isa()?));
    let options = PackageOptions {
        model_id: Some(default.clone()),
        n_verify_threads: machine::default_threads(),
        ..PackageOptions::default()
    };
    let staging = folders::data()?
        .with_file_name("converting")
        .join(files.stem());
    // Complete, and on its way into the store when an earlier start was interrupted.
    if staging.exists() {
        fs::remove_dir_all(&staging)
            .with_context(|| format!("{}: cannot remove", staging.display()))?;
    }
    if let Some(parent) = staging.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("{}: cannot create", parent.display()))?;
    }
    to_package(&files, &staging, &options, exec, &notify())?;
    let options = PullOptions {
        replace: before.is_some(),
        name: Some(before.map_or(default, |before| before.name.clone())),
        made_from: Some(source),
        ..PullOptions::default()
    };
    let pulled = pull::pull(&store, &staging.to_string_lossy(), options);
    // Whatever came of it: the next start begins with the model.
    fs::remove_dir_all(&staging)
        .with_context(|| format!("{}: cannot remove", staging.display()))?;
    let pulled = pulled?;
    output::note(format_args!(
        "converted {} into the store, as {}",
        path.display(),
        pulled.name
    ));
    Ok(store.model(&pulled.name)?)
}

/// The package that was made from `source`, if it is in the store, undamaged.
fn made_before(store: &Store, source: &str) -> Result<Option<store::Model>> {
    for made in store.list()? {
        if made.entry.source == source {
            match store.model(&made.name) {
                Err(StoreError::Damaged { .. } | StoreError::DamagedIndex { .. }) => {}
                made => return Ok(Some(made?)),
            }
        }
    }
    Ok(None)
}

/// Something that changes when the files at `path` do.
fn state(path: &Path, files: &LocalModel) -> Result<String> {
    let sources = files.sources().iter();
    let mut paths: Vec<PathBuf> = sources
        .filter_map(|file| file.path().map(Path::to_owned))
        .collect();
    if path.is_dir() {
        let listed = fs::read_dir(path).with_context(|| format!("{}: cannot list", path.display()));
        for entry in listed? {
            paths.push(entry?.path());
        }
    }
    let (mut n_bytes, mut newest) = (0, UNIX_EPOCH);
    paths.sort();
    paths.dedup();
    for path in paths {
        let metadata =
            fs::metadata(&path).with_context(|| format!("{}: cannot open", path.display()))?;
        if metadata.is_file() {
            n_bytes += metadata.len();
            newest = newest.max(metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH));
        }
    }
    let newest = newest.duration_since(UNIX_EPOCH).unwrap_or_default();
    Ok(format!("{n_bytes}-{}", newest.as_nanos()))
}
