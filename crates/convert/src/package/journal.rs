//! The journal of a conversion, from which the next one resumes after an interruption.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use sterna::{Context, Result, bail};
use sterna_delivery::PartialFile;

use crate::staging::with_suffix;

/// The path of the journal of the conversion into `dir`: next to the folder, so that this can become a
/// package in one step, without anything else in it.
fn path_of(dir: &Path) -> PathBuf {
    with_suffix(dir, ".json")
}

/// The shards that are complete and on disk.
pub(super) struct Journal {
    path: Option<PathBuf>,
    state: State,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    /// What is converted, and how: another conversion can't resume with these shards.
    key: String,
    /// Bytes of each.
    shards: Vec<u64>,
}

impl Journal {
    /// A journal that nothing is written to.
    #[cfg(test)]
    pub(super) fn none() -> Journal {
        Journal {
            path: None,
            state: State::default(),
        }
    }

    /// The journal of the conversion `key` into `dir`: that of an interrupted run, or a new one, in which
    /// case everything else is removed from `dir`.
    pub(super) fn open(dir: &Path, key: &str) -> Result<Journal> {
        let path = path_of(dir);
        let name = || path.display().to_string();
        let found: Option<State> = match fs::read(&path) {
            // An invalid journal is from another version, or was truncated: start over.
            Ok(bytes) => serde_json::from_slice(&bytes).ok(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(error).with_context(name),
        };
        let complete = |state: &State| {
            state.key == key
                && state.shards.iter().enumerate().all(|(i, &size)| {
                    let path = dir.join(sterna_format::rdrr::shard_file_name(i));
                    fs::metadata(path).is_ok_and(|found| found.len() == size)
                })
        };
        let state = match found.filter(complete) {
            Some(state) => state,
            None => {
                clear(dir)?;
                State {
                    key: key.to_owned(),
                    shards: Vec::new(),
                }
            }
        };
        let journal = Journal {
            path: Some(path),
            state,
        };
        journal.save()?;
        Ok(journal)
    }

    /// The journal of a conversion into `dir` that doesn't resume an earlier one.
    pub(super) fn fresh(dir: &Path) -> Result<Journal> {
        clear(dir)?;
        let journal = Journal {
            path: Some(path_of(dir)),
            state: State::default(),
        };
        journal.save()?;
        Ok(journal)
    }

    /// How many shards an earlier run finished.
    pub(super) fn n_finished(&self) -> usize {
        self.state.shards.len()
    }

    /// Records that the next shard, of `size` bytes, is on disk.
    pub(super) fn note(&mut self, index: usize, size: u64) -> Result<()> {
        assert_eq!(
            index,
            self.state.shards.len(),
            "shards are finished in order"
        );
        self.state.shards.push(size);
        self.save()
    }

    fn save(&self) -> Result<()> {
        let Some(path) = &self.path else {
            return Ok(());
        };
        let json = serde_json::to_vec(&self.state).context("the journal")?;
        let write = || -> std::io::Result<()> {
            // Always the same name, so that leftovers of a run are overwritten by the next one.
            let mut file = PartialFile::create_as(path, &path.with_extension("new"))?;
            file.write_all(&json)?;
            file.finish()
        };
        write().with_context(|| format!("{}: cannot write", path.display()))
    }

    /// Removes that of the conversion into `dir`, once the package has its name.
    pub(super) fn remove(dir: &Path) -> Result<()> {
        let path = path_of(dir);
        fs::remove_file(&path).with_context(|| path.display().to_string())
    }
}

/// Empties the folder of an interrupted conversion; refuses one that wasn't written here.
fn clear(dir: &Path) -> Result<()> {
    let what = || dir.display().to_string();
    let entries: Vec<_> = fs::read_dir(dir)
        .and_then(|entries| entries.collect::<Result<_, _>>())
        .with_context(what)?;
    // A journal is the first thing that a conversion writes.
    if !entries.is_empty() && !path_of(dir).exists() {
        bail!(
            InvalidRequest,
            "{}: expected an empty folder or that of an interrupted conversion, found other files",
            dir.display()
        );
    }
    for path in entries.iter().map(fs::DirEntry::path) {
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}
