//! The weight files of a model as the engine gets them: read into memory or mapped, and verified where
//! nobody has done that yet.
//!
//! Files that are to be verified are read and hashed ahead of whoever wants them, on threads of their own,
//! and what was hashed is what is handed out: the bytes in memory, or the mapping.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver};
use std::thread::Scope;

use sterna_delivery::hash::{Expected, Verified, Verifier};

use super::SourceFile;
use crate::error::{Context, Result, bail};
use crate::warning::Warning;

/// How files are handed out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kept {
    /// Mapped.
    Mapped,
    /// Mapped, and none of their pages in memory because they were verified.
    Released,
    /// Read into memory.
    Read,
}

/// Weight files on their way.
pub(super) struct Shards {
    files: Vec<SourceFile>,
    states: Vec<State>,
    /// Files that were verified, in whatever order.
    verified: Receiver<(usize, Result<(SourceFile, Verified)>)>,
    kept: Kept,
    warnings: Vec<Warning>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// As it was opened, and to be used like that.
    Opened,
    /// On another thread, being read or hashed.
    Verifying,
    /// As it is to be used.
    Ready,
}

impl Shards {
    /// Begins to verify those of `files` for which `checks` says what they must be; files without an entry
    /// there are believed. They are handed out as `kept` says.
    ///
    /// Dropped, it lets the threads of `scope` end with the file that they are at.
    pub(super) fn start<'scope>(
        scope: &'scope Scope<'scope, '_>,
        files: &[SourceFile],
        checks: Vec<Option<Expected>>,
        kept: Kept,
        n_threads: usize,
    ) -> Shards {
        let states = (0..files.len()).map(|i| match checks.get(i) {
            Some(Some(_)) => State::Verifying,
            _ => State::Opened,
        });
        let states: Vec<_> = states.collect();
        let work: Vec<(usize, SourceFile, Expected)> = (files.iter().zip(checks).enumerate())
            .filter_map(|(i, (file, check))| Some((i, file.clone(), check?)))
            .collect();
        let n_threads = n_threads.max(1).min(work.len());
        let (work, next) = (Arc::new(work), Arc::new(AtomicUsize::new(0)));
        let (sender, verified) = mpsc::channel();
        for _ in 0..n_threads {
            let (work, next, sender) = (Arc::clone(&work), Arc::clone(&next), sender.clone());
            scope.spawn(move || {
                while let Some((i, file, expected)) = work.get(next.fetch_add(1, Ordering::Relaxed))
                {
                    let outcome = verified_file(file, *expected, kept);
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
            states,
            verified,
            kept,
            warnings: Vec::new(),
        }
    }

    /// The file with this index, as it is to be used; waited for if need be. Errors: it can't be read, or its
    /// bytes are not the right ones.
    pub(super) fn get(&mut self, index: usize) -> Result<&SourceFile> {
        if self.states.get(index) == Some(&State::Opened) && self.kept == Kept::Read {
            // Nobody reads ahead: the file is read on several threads.
            self.files[index] = self.files[index].read()?;
            self.states[index] = State::Ready;
        }
        while self.states.get(index) == Some(&State::Verifying) {
            let Ok((i, file)) = self.verified.recv() else {
                bail!(Io, "{}: verifying it has ended early", self.files[index]);
            };
            let (file, verified) = file?;
            self.warnings
                .extend(Warning::of_verified(verified, || file.to_string()));
            self.files[i] = file;
            self.states[i] = State::Ready;
        }
        self.files
            .get(index)
            .with_context(|| format!("expected a file of the model, found file {index}"))
    }

    /// Waits until every file that is to be verified is.
    pub(super) fn finish(&mut self) -> Result<Vec<Warning>> {
        let verifying = |(i, state): (usize, &State)| (*state == State::Verifying).then_some(i);
        let left: Vec<usize> = (self.states.iter().enumerate())
            .filter_map(verifying)
            .collect();
        left.into_iter().try_for_each(|i| self.get(i).map(drop))?;
        Ok(std::mem::take(&mut self.warnings))
    }
}

/// The file with its bytes where they will be used, after they were found to be the expected ones there.
fn verified_file(
    file: &SourceFile,
    expected: Expected,
    kept: Kept,
) -> Result<(SourceFile, Verified)> {
    if kept != Kept::Read {
        let verified = expected.verify(&file.bytes()?)?;
        if kept == Kept::Released {
            file.release(0, file.len());
        }
        return Ok((file.clone(), verified));
    }
    let mut verifier = Verifier::new(expected, file.len());
    let file = file.read_past(|piece| verifier.update(piece))?;
    let verified = match verifier.finish() {
        Ok(verified) => verified,
        Err(mismatch) => expected.second_opinion(mismatch, &file.bytes()?)?,
    };
    Ok((file, verified))
}
