//! What an interrupted conversion leaves behind, so that the next one goes on from there.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

/// Its name, beside the shards that it speaks of.
const FILE: &str = "conversion.json";
/// How it ends while it is written.
const NEW: &str = "new";

/// The shards that are complete and on disk.
pub(super) struct Journal {
    path: Option<PathBuf>,
    state: State,
}

#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
struct State {
    /// What is converted, and how: another conversion can't go on with these shards.
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

    /// The journal in `dir` of the conversion `key`: that of an interrupted run, or a new one, in which
    /// case everything else is removed from `dir`.
    pub(super) fn open(dir: &Path, key: &str) -> Result<Journal> {
        let path = dir.join(FILE);
        let name = || path.display().to_string();
        let found: Option<State> = match fs::read(&path) {
            // What isn't a journal is that of another version, or was cut off: begun anew.
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

    /// A journal in `dir` of a conversion that doesn't go on with what another left.
    pub(super) fn fresh(dir: &Path) -> Result<Journal> {
        clear(dir)?;
        let journal = Journal {
            path: Some(dir.join(FILE)),
            state: State::default(),
        };
        journal.save()?;
        Ok(journal)
    }

    /// How many shards an earlier run finished.
    pub(super) fn n_finished(&self) -> usize {
        self.state.shards.len()
    }

    /// Whether shard `index` is complete.
    pub(super) fn is_finished(&self, index: usize) -> bool {
        index < self.state.shards.len()
    }

    /// Notes that the next shard, of `size` bytes, is on disk.
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
        let new = path.with_extension(NEW);
        let write = || -> std::io::Result<()> {
            let mut file = File::create(&new)?;
            file.write_all(&json)?;
            file.sync_all()?;
            fs::rename(&new, path)
        };
        write().with_context(|| format!("{}: cannot write", path.display()))
    }

    /// Removes it, once everything is written.
    pub(super) fn remove(dir: &Path) -> Result<()> {
        let path = dir.join(FILE);
        fs::remove_file(&path).with_context(|| path.display().to_string())
    }
}

/// Empties the folder of an interrupted conversion; refuses one that isn't ours.
fn clear(dir: &Path) -> Result<()> {
    let what = || dir.display().to_string();
    let entries: Vec<_> = fs::read_dir(dir)
        .and_then(|entries| entries.collect::<Result<_, _>>())
        .with_context(what)?;
    // A journal is the first thing that a conversion writes, under another name until it is whole.
    let unfinished = |entry: &fs::DirEntry| entry.path() == dir.join(FILE).with_extension(NEW);
    if !entries.iter().all(unfinished) && !dir.join(FILE).exists() {
        anyhow::bail!(
            "{}: expected an empty folder or that of an interrupted conversion, found other files",
            dir.display()
        );
    }
    let (journal, others): (Vec<_>, Vec<_>) = entries
        .iter()
        .map(fs::DirEntry::path)
        .partition(|path| path.ends_with(FILE));
    for path in others.into_iter().chain(journal) {
        fs::remove_file(&path).with_context(|| path.display().to_string())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kill_while_the_first_journal_is_written_leaves_a_folder_that_is_ours() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("conversion.new"), "{").unwrap();
        assert_eq!(Journal::open(dir.path(), "key").unwrap().n_finished(), 0);
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.txt"), "").unwrap();
        assert!(Journal::open(dir.path(), "key").is_err());
    }
}
