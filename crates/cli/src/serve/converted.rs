//! Packages made of other models, kept in the store for the next time.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use sterna::native::{BUILTIN, LocalModel};
use sterna_convert::{PackageOptions, to_package};
use sterna_delivery::hash::{Algorithm, digest_of};
use sterna_delivery::pull::PullOptions;
use sterna_delivery::store::{self, Store, StoreError, portable_name};
use sterna_format::rdrr::MANIFEST_FILE;
use sterna_kernels::Exec;

use crate::args::isa;
use crate::conversion::{Staging, notify};
use crate::model::PackagePlace;
use crate::pull::CONVERTED;
use crate::{machine, model, output, pull};

/// The name of the built-in model.
const TALES: &str = "tiny-tales";

/// Where the package of the model called `name` is: there, if it is a package; else in the store, where it is made
/// now, called `wanted` if that is given, unless it was made before of the same files.
pub(super) fn find(name: &str, wanted: Option<&str>) -> Result<PackagePlace> {
    let made = if name == BUILTIN {
        let files = model::open(name)?;
        let state = state_builtin(&files)?;
        package_of(name, &files, BUILTIN, &state, wanted)?
    } else {
        let place = PackagePlace::find(name)?;
        if !is_convertible(&place) {
            if let Some(wanted) = wanted {
                bail!(
                    "--name {wanted}: expected a model that is converted, found the package {name}"
                );
            }
            return Ok(place);
        }
        let files = model::open(name)?;
        let (origin, state) = match &place {
            PackagePlace::Folder(path) => {
                let origin = fs::canonicalize(path)?.display().to_string();
                (origin, state(path, &files)?)
            }
            PackagePlace::Stored(model) => (model.name().to_owned(), state_stored(model)),
        };
        package_of(name, &files, &origin, &state, wanted)?
    };
    Ok(PackagePlace::Stored(Arc::new(made)))
}

/// Whether the model in `place` isn't a package.
fn is_convertible(place: &PackagePlace) -> bool {
    match place {
        PackagePlace::Folder(path) => {
            !path.ends_with(MANIFEST_FILE) && !path.join(MANIFEST_FILE).exists()
        }
        PackagePlace::Stored(model) => !model.paths().contains_key(MANIFEST_FILE),
    }
}

/// The package of the model called `name` in the store, called `wanted` if that is given: as it was made before of
/// what is at `origin`, if that is in the same `state`, or else made of `files` now.
fn package_of(
    name: &str,
    files: &LocalModel,
    origin: &str,
    state: &str,
    wanted: Option<&str>,
) -> Result<store::Model> {
    let origin = format!("{CONVERTED}{origin}#");
    let source = format!("{origin}{state}");
    let store = pull::store()?;
    if let Some(made) = made_before(&store, &source, wanted)? {
        return Ok(made);
    }
    let staging = Staging::lock(&origin)?;
    // By whoever held the lock.
    if let Some(made) = made_before(&store, &source, wanted)? {
        return Ok(made);
    }
    let known = store.list()?;
    let default = match wanted {
        Some(wanted) => wanted.to_owned(),
        None => portable_name(&format!("{}-rdrr", files.stem())),
    };
    let is_ours = |source: &str| source.starts_with(&origin);
    let before = pull::of_source(&known, &default, is_ours)
        .filter(|before| wanted.is_none_or(|wanted| wanted == before.name));
    let is_taken = |model: &&store::Listed| model.name.eq_ignore_ascii_case(&default);
    if before.is_none()
        && let Some(other) = known.iter().find(is_taken)
    {
        bail!(
            "{}: the store has another model of that name, {}; `sterna serve {name} --name {}` serves this one",
            other.name,
            pull::origin_in_words(&other.entry.source),
            pull::free_name(&default)
        );
    }
    let exec = Arc::new(Exec::new(machine::default_threads(), isa()?));
    let options = PackageOptions {
        model_id: Some(match name {
            BUILTIN => TALES.to_owned(),
            _ => default.clone(),
        }),
        n_verify_threads: machine::default_threads(),
        ..PackageOptions::default()
    };
    let folder = staging
        .folder
        .to_str()
        .with_context(|| format!("{}: expected a path in Unicode", staging.folder.display()))?;
    // Complete, and on its way into the store when an earlier start was interrupted.
    staging.clear()?;
    to_package(files, &staging.folder, &options, exec, &notify())?;
    let options = PullOptions {
        replace: before.is_some(),
        name: Some(before.map_or(default, |before| before.name.clone())),
        made_from: Some(source),
        ..PullOptions::default()
    };
    let pulled = pull::pull(&store, folder, options);
    // Whatever came of it: the next start begins with the model.
    staging.clear()?;
    let pulled = pulled?;
    output::note(format_args!(
        "converted {name} into the store, as {}",
        pulled.name
    ));
    Ok(store.model(&pulled.name)?)
}

/// The package that was made from `source`, if it is in the store, undamaged, and called `wanted` if that is given.
fn made_before(store: &Store, source: &str, wanted: Option<&str>) -> Result<Option<store::Model>> {
    for made in store.list()? {
        if made.entry.source == source && wanted.is_none_or(|wanted| wanted == made.name) {
            match store.model(&made.name) {
                Err(StoreError::Damaged { .. } | StoreError::DamagedIndex { .. }) => {}
                made => return Ok(Some(made?)),
            }
        }
    }
    Ok(None)
}

/// Something that changes when the files of the built-in model do.
fn state_builtin(files: &LocalModel) -> Result<String> {
    const BESIDE: [&str; 4] = [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ];
    let mut digests = String::new();
    for file in files.sources() {
        digests += &format!("{}\n", digest_of(Algorithm::Sha256, &file.bytes()?));
    }
    for name in BESIDE {
        let bytes = files.read_beside(name)?.unwrap_or_default();
        digests += &format!("{}\n", digest_of(Algorithm::Sha256, &bytes));
    }
    Ok(digest_of(Algorithm::Sha256, digests.as_bytes()).to_string())
}

/// Something that changes when the files of a model in the store do.
fn state_stored(model: &store::Model) -> String {
    let files = model.entry().files.iter();
    let files: String = files
        .map(|(name, blob)| format!("{name} {blob}\n"))
        .collect();
    digest_of(Algorithm::Sha256, files.as_bytes()).to_string()
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
