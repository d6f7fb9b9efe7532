//! The weight files of a model as the engine gets them: read into memory or mapped, and verified where
//! nobody has done that yet.
//!
//! Files that are to be verified are read and hashed ahead of whoever wants them, on threads of their own,
//! and what was hashed is what is handed out: the bytes in memory, or the mapping.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::{self, Scope};

use anyhow::{Context, Result, bail};
use sterna_delivery::hash::{Expected, Verified, Verifier};

use super::SourceFile;
use crate::progress::Progress;
use crate::{machine, output};

/// Weight files on their way.
pub(super) struct Shards {
    files: Vec<SourceFile>,
    standing: Vec<Standing>,
    /// Files that were verified, in whatever order.
    verified: Receiver<(usize, Result<SourceFile>)>,
    is_read: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// As it was opened, and to be used like that.
    Opened,
    /// On another thread, being read or hashed.
    Verifying,
    /// As it is to be used.
    Ready,
}

impl Shards {
    /// Begins to verify those of `files` for which `checks` says what they must be; files without an entry
    /// there are believed. With `is_read`, files are handed out read into memory.
    ///
    /// Dropped, it lets the threads of `scope` end with the file that they are at.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        files: &[SourceFile],
        checks: Vec<Option<Expected>>,
        is_read: bool,
    ) -> Shards {
        let standing = (0..files.len()).map(|i| match checks.get(i) {
            Some(Some(_)) => Standing::Verifying,
            _ => Standing::Opened,
        });
        let standing: Vec<_> = standing.collect();
        let work: Vec<(usize, SourceFile, Expected)> = (files.iter().zip(checks).enumerate())
            .filter_map(|(i, (file, check))| Some((i, file.clone(), check?)))
            .collect();
        let n_threads = machine::default_threads().min(work.len());
        let (work, next) = (Arc::new(work), Arc::new(AtomicUsize::new(0)));
        let (sender, verified) = mpsc::channel();
        for _ in 0..n_threads {
            let (work, next, sender) = (Arc::clone(&work), Arc::clone(&next), sender.clone());
            scope.spawn(move || {
                while let Some((i, file, expected)) = work.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let outcome = verified_file(file, *expected, is_read);
                    let outcome = outcome.with_context(|| file.to_string());
                    // Nobody listens any more if loading failed.
                    if sender.send((*i, outcome)).is_err() {
                        return;
                    }
                }
            });
        }
        Shards {
            files: files.to_vec(),
            standing,
            verified,
            is_read,
        }
    }

    /// The file with this index, as it is to be used; waited for if need be. Errors: it can't be read, or its
    /// bytes are not the right ones.
    pub(super) fn get(&mut self, index: usize) -> Result<&SourceFile> {
        if self.standing.get(index) == Some(&Standing::Opened) && self.is_read {
            // Nobody reads ahead: the file is read on several threads.
            self.files[index] = self.files[index].read()?;
            self.standing[index] = Standing::Ready;
        }
        while self.standing.get(index) == Some(&Standing::Verifying) {
            let Ok((i, file)) = self.verified.recv() else {
                bail!("{}: verifying it has ended early", self.files[index]);
            };
            self.files[i] = file?;
            self.standing[i] = Standing::Ready;
        }
        self.files
            .get(index)
            .with_context(|| format!("expected a file of the model, found file {index}"))
    }

    /// All files; those that [`get`](Self::get) gave are as they are to be used.
    pub(super) fn files(&self) -> &[SourceFile] {
        &self.files
    }

    /// Waits until every file that is to be verified is.
    pub(super) fn finish(&mut self) -> Result<()> {
        let verifying =
            |(i, standing): (usize, &Standing)| (*standing == Standing::Verifying).then_some(i);
        let left: Vec<usize> = (self.standing.iter().enumerate())
            .filter_map(verifying)
            .collect();
        left.into_iter().try_for_each(|i| self.get(i).map(drop))
    }
}

/// Verifies `files` where they are mapped, on as many threads as there are cores.
pub(super) fn verify(files: &[SourceFile], checks: Vec<Option<Expected>>) -> Result<()> {
    let checked = files
        .iter()
        .zip(&checks)
        .filter(|(_, check)| check.is_some());
    let total = checked.map(|(file, _)| file.len()).sum();
    let progress = Progress::bytes("verifying", total);
    thread::scope(|scope| {
        let is_checked: Vec<bool> = checks.iter().map(Option::is_some).collect();
        let mut shards = Shards::start(scope, files, checks, false);
        for (i, is_checked) in is_checked.into_iter().enumerate() {
            if is_checked {
                progress.add(shards.get(i)?.len());
            }
        }
        Ok(())
    })
}

/// The file with its bytes where they will be used, after they were found to be the expected ones there.
fn verified_file(file: &SourceFile, expected: Expected, is_read: bool) -> Result<SourceFile> {
    let (file, verified) = match is_read {
        true => {
            let mut verifier = Verifier::new(expected, file.len());
            let file = file.read_past(|piece| verifier.update(piece))?;
            let verified = match verifier.finish() {
                Ok(verified) => verified,
                Err(mismatch) => expected.second_opinion(mismatch, &file.bytes()?)?,
            };
            (file, verified)
        }
        false => (file.clone(), expected.verify(&file.bytes()?)?),
    };
    if verified == Verified::Blake3Variant {
        output::note(format_args!(
            "note: {file}: verified by the variant of BLAKE3 that the existing JavaScript runtime computes"
        ));
    }
    Ok(file)
}
