//! The end of standard input, with which a server ends that was told to.

use std::io;
use std::process;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

use anyhow::{Context, Result};
use tokio::sync::oneshot;

/// Who is told that standard input has closed. While there is nobody, the program exits by that: it has no answers yet
/// that could be waited for.
#[derive(Clone, Default)]
pub(super) struct Stdin(Arc<Mutex<Option<oneshot::Sender<()>>>>);

impl Stdin {
    /// Reads it, on a thread of its own, and passes over what is in it.
    pub(super) fn watch() -> Result<Stdin> {
        let stdin = Stdin::default();
        let told = stdin.clone();
        let read = move || {
            // What can't be read any more says nothing more, either.
            let _ = io::copy(&mut io::stdin().lock(), &mut io::sink());
            let waiting = told.0.lock().unwrap_or_else(PoisonError::into_inner).take();
            match waiting {
                // Whoever is gone needn't be told.
                Some(waiting) => drop(waiting.send(())),
                None => process::exit(0),
            }
        };
        thread::Builder::new()
            .name("stdin".to_owned())
            .spawn(read)
            .context("cannot watch standard input")?;
        Ok(stdin)
    }

    /// Waits until it has closed; from now on the program doesn't exit by that.
    pub(super) async fn closed(self) {
        let (sender, closed) = oneshot::channel();
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(sender);
        // The sender lives until it is told.
        let _ = closed.await;
    }
}
